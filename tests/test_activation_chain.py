"""Chains of activations: values and derivatives as the kernels compute them."""

from __future__ import annotations

import pytest
import torch

from plan_problems import dev

TORCH_ACTS = {
    "none": lambda x: x * 1.0,
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": torch.nn.functional.hardswish,
    "hardtanh": torch.nn.functional.hardtanh,
    "elu": torch.nn.functional.elu,
    "mish": torch.nn.functional.mish,
    "softplus": torch.nn.functional.softplus,
    "tanh+hardswish": lambda x: torch.nn.functional.hardswish(torch.tanh(x)),
}


@pytest.mark.parametrize("act", TORCH_ACTS)
@pytest.mark.parametrize("value", [-30.0, -3.0, -1.0, -0.7, 0.0, 1e-3, 0.9, 1.0, 3.0, 19.0, 21.0])
def test_chain_value_and_derivative_are_those_of_torch(act: str, value: float) -> None:
    x = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    y = TORCH_ACTS[act](x)
    (dx,) = torch.autograd.grad(y, x)
    derivative, result, _ = dev.chain_derivative(act, value)
    assert result == pytest.approx(y.item(), rel=1e-12, abs=1e-14)
    assert result == dev.chain_value(act, value)
    assert derivative == pytest.approx(dx.item(), rel=1e-12, abs=1e-14)


def test_chain_with_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'swish2' in 'relu\+swish2'.*hardswish"):
        dev.chain_value("relu+swish2", 0.0)
