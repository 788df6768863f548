"""Chains of activations: values and derivatives as the kernels compute them."""

from __future__ import annotations

import math
import re

import pytest
import torch

from kgopt import _acts, functional, reference
from plan_problems import dev

ACTS = [
    *(
        *reference.ACTIVATIONS,
        *reference.PARAMETRIZED,
        "tanh+hardswish",
        "hardtanh(0,6)",
        "clamp(-inf,1)",
        "clamp(2,-1)",
    ),
    *("elu(-0.5)", "softplus(-0.5,1)", "softplus(0.3,200)", "hardshrink(-1)", "softshrink(0)", "threshold(-1,-1)"),
    *("hardtanh(-inf,3)", "mul(0)", "leaky_relu(0.2)+add(1e+0)+clamp(-inf,2)+selu", "add(1)+mul(-2)+celu(2)"),
]
POINTS = [
    -30.0,
    -3.0,
    -2.0,
    -1.0,
    -0.7,
    -0.3,
    0.0,
    1e-3,
    0.1,
    0.25,
    0.3,
    0.5,
    0.8,
    0.9,
    1.0,
    2.0,
    3.0,
    6.0,
    7.5,
    19.0,
    21.0,
]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("value", POINTS)
def test_chain_value_and_derivative_are_those_of_torch(act: str, value: float) -> None:
    x = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    y = reference.torch_activation(x, act) * 1.0
    (dx,) = torch.autograd.grad(y, x)
    derivative, result, _ = dev.chain_derivative(act, value)
    assert result == pytest.approx(y.item(), rel=1e-12, abs=1e-14)
    assert result == dev.chain_value(act, value)
    # PyTorch has 1/6 in single precision in the backward.
    accuracy = 1e-7 if "hardsigmoid" in act else 1e-12
    assert derivative == pytest.approx(dx.item(), rel=accuracy, abs=1e-14)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_ops_at_kinks(act: str, dtype: torch.dtype, device: str) -> None:
    """Vectors and what is left over of them; in double PyTorch's own derivative, kinks included."""
    x = torch.tensor(POINTS * 7, dtype=dtype, device=device)
    leaf = x.clone().requires_grad_()
    expected = reference.torch_activation(leaf, act)
    dy = torch.linspace(-2, 2, x.numel(), dtype=dtype, device=device)
    expected.backward(dy)
    accuracy = 1e-12 if dtype is torch.float64 else 1e-5
    close = {"rtol": accuracy, "atol": accuracy}
    torch.testing.assert_close(functional.activation(x, act), expected.detach(), **close)
    if "hardsigmoid" in act and dtype is torch.float64:
        close = {"rtol": 1e-7, "atol": 1e-7}
    dx = torch.ops.kgopt.activation_backward(dy, x, act)
    torch.testing.assert_close(dx, leaf.grad, **close)


def test_chain_with_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'swish2' in 'relu\+swish2'.*hardswish"):
        dev.chain_value("relu+swish2", 0.0)


def _of_other_kind(act: str, expected: str) -> str:
    name = act.split("(")[0]
    return f"is '{act}', in which {name} has parameters that it does not take, expected {expected}"


REFUSED = {
    "elu(1,2)": "is 'elu(1,2)', in which elu has 2 parameters, expected at most 1 (alpha)",
    "elu(x)": "is 'elu(x)', in which elu has the parameter 'x', expected a number",
    "elu(1,)": "is 'elu(1,)', in which elu has the parameter '', expected a number",
    "elu(0x1)": "is 'elu(0x1)', in which elu has the parameter '0x1', expected a number",
    "elu(1_0)": "is 'elu(1_0)', in which elu has the parameter '1_0', expected a number",
    "elu(1)(2)": "is 'elu(1)(2)', in which elu has the parameter '1)(2', expected a number",
    "relu+elu(1": "is 'relu+elu(1', expected a ')' at the end of 'elu(1'",
    "clamp": "is 'clamp', in which clamp has 0 parameters, expected 2 (min, max)",
    "clamp(1)": "is 'clamp(1)', in which clamp has 1 parameter, expected 2 (min, max)",
    "relu(1)": "is 'relu(1)', in which relu has 1 parameter, expected 0",
    "clamp(nan,1)": _of_other_kind("clamp(nan,1)", "numbers that are not NaN"),
    "add(-inf)": _of_other_kind("add(-inf)", "finite numbers"),
    "hardtanh(2,1)": _of_other_kind("hardtanh(2,1)", "min_val up to max_val"),
    "softplus(0)": _of_other_kind("softplus(0)", "a beta other than 0"),
    "celu(-1)": _of_other_kind("celu(-1)", "an alpha above 0"),
    "softshrink(-1)": _of_other_kind("softshrink(-1)", "a lambd of at least 0"),
    "+".join(["relu"] * 16): "has more than 15 activations: '" + "+".join(["relu"] * 16) + "'",
    "+".join(f"add({i})" for i in range(7)): "has activations of more than 6 different parameters: '"
    + "+".join(f"add({i})" for i in range(7))
    + "'",
}


@pytest.mark.parametrize("act", REFUSED)
def test_refused_chains(act: str) -> None:
    """The ops, with the argument's name, and Python, which reads the same texts."""
    x = torch.zeros(2, 4, 3)
    for argument, call in (
        ("activation: act", lambda: functional.activation(x, act)),
        ("group_norm: pre_act", lambda: torch.ops.kgopt.group_norm_fwd(x, 2, pre_act=act)),
    ):
        with pytest.raises(RuntimeError) as refused:
            call()
        assert f"{argument} {REFUSED[act]}" in str(refused.value)
    with pytest.raises(ValueError, match=f"^{re.escape(REFUSED[act])}$"):
        _acts.parse(act)


def test_longest_chains() -> None:
    x = torch.linspace(-2, 2, 5, dtype=torch.float64)
    for act in ("+".join(["leaky_relu", "elu", "hardtanh"] * 5), "+".join(f"add({i})" for i in range(6)) + "+add(2)"):
        torch.testing.assert_close(functional.activation(x, act), reference.activation_ref(x, act))


def test_spellings() -> None:
    """The canonical text is read back as the same numbers; spaces and signs are read, too."""
    numbers = [0.1, 1e22, 1e-7, -2.5, 3, 5e-324, 1.7976931348623157e308, math.pi, 0.30000000000000004]
    for number in numbers:
        act = _acts.text("add", number)
        assert act is not None
        assert _acts.parse(act) == (_acts.Act("add", (number,)),)
        assert dev.chain_value(act, 0.0) == number
    assert _acts.text("leaky_relu", 0.01) == "leaky_relu"
    assert _acts.text("hardtanh", -1, 1) == "hardtanh"
    assert _acts.text("hardtanh", 0, 6) == "hardtanh(0.0,6.0)"
    assert _acts.text("clamp", -math.inf, 1) == "clamp(-inf,1.0)"
    for refused in (math.nan, math.inf, "1", None, 10**400, 2**53 + 1, torch.tensor(1.0), []):
        assert _acts.text("add", refused) is None
    assert dev.chain_value(" add ( +1.5e+1 ) + mul(.5)+ clamp( -inf , 3. )", 0.0) == 3.0
    assert reference.activation_ref(torch.zeros(1), " add ( +1.5e+1 ) + mul(.5)+ clamp( -inf , 3. )").item() == 3.0
    assert dev.chain_value("softplus(2)", 1.0) == dev.chain_value("softplus(2,20)", 1.0)


def test_numbers_in_a_locale_with_commas() -> None:
    import locale

    old = locale.setlocale(locale.LC_ALL)
    for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "de_DE.utf8", "fr_FR.utf8"):
        try:
            locale.setlocale(locale.LC_ALL, name)
        except locale.Error:
            continue
        try:
            assert dev.chain_value("add(0.25)", 0.0) == 0.25
        finally:
            locale.setlocale(locale.LC_ALL, old)
        return
    pytest.skip("no such locale on this machine")
