"""GroupNorm with a weight and a bias of each sample; activations that are ReLU by another name."""

from __future__ import annotations

import pytest
import torch

from kgopt import reference
from norm_gradients import check_both_ways
from shapes import DTYPES, LAYOUTS, laid_out

OPS = torch.ops.kgopt
SHAPES = {
    "columns": ((3, 64, 40, 41), 16),
    "columns of volumes": ((2, 32, 30, 31, 33), 8),
    "one group": ((2, 48, 21, 22), 1),
    "a group a channel": ((4, 24, 33, 32), 24),
    "odd channels": ((3, 15, 71, 73), 5),
    "no vectors": ((2, 6, 5, 7), 3),
    "many channels": ((2, 1024, 9, 10), 32),
    "one sample": ((1, 32, 40, 41), 8),
    "no positions": ((64, 24), 3),
}


def make(shape, dtype, device, layout, of_parameters=None):
    x = laid_out(torch.randn(shape, device=device).to(dtype), layout)
    return x, *torch.randn(2, *shape[:2], device=device).to(of_parameters or dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["none", "silu", "gelu"])
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients(name, act, dtype, layout, device):
    shape, groups = SHAPES[name]
    if len(shape) < 4 and layout != LAYOUTS[0]:
        pytest.skip("has no other layout")
    tensors = make(shape, dtype, device, layout, torch.float32 if act == "gelu" and dtype.itemsize == 2 else None)
    dy = laid_out(torch.randn(shape, device=device).to(dtype), layout)

    def ours(x, w, b):
        return OPS.group_norm_by_sample(x, w, b, groups, 1e-5, act)

    def plain(x, w, b):
        return reference.group_norm_by_sample_ref(x, w, b, groups, 1e-5, act)

    mine = check_both_ways(ours, plain, dy, *tensors)
    assert mine[0].stride() == tensors[0].stride()
    y, mean, rstd = OPS.group_norm_by_sample_fwd(*tensors, groups, 1e-5, act)
    assert torch.equal(y, mine[0])
    for actual, expected in zip((mean, rstd), OPS.group_stats(tensors[0], groups), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_keep_to_themselves(layout, device):
    """A NaN among one sample's parameters is nobody else's."""
    x, weight, bias = make((3, 16, 33, 34), torch.float32, device, layout)
    weight[1, 3] = bias[1, 3] = float("nan")
    y = OPS.group_norm_by_sample(x, weight, bias, 4)
    expected = torch.zeros_like(y, dtype=torch.bool)
    expected[1, 3] = True
    assert torch.equal(y.isnan(), expected)


@pytest.mark.parametrize("n", [0, 2])
def test_empty_batch_and_parameters_by_name(n, device):
    x, (weight, bias) = torch.randn(n, 8, 5, 6, device=device), torch.randn(2, n, 8, device=device)
    y = OPS.group_norm_by_sample(x=x, weight=weight, bias=bias, num_groups=2)
    torch.testing.assert_close(y, reference.group_norm_by_sample_ref(x, weight, bias, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(8)}, r"weight has shape \[8\], expected \[2, 8\]"),
        ({"bias": torch.zeros(1, 8)}, r"bias has shape \[1, 8\], expected \[2, 8\]"),
        ({"weight": torch.zeros(2, 8).double(), "bias": torch.zeros(2, 8).double()}, "weight has dtype"),
        ({"num_groups": 3}, "num_groups is 3"),
        ({"act": "sulu"}, "sulu"),
    ],
    ids=["channels", "samples", "dtype", "groups", "act"],
)
def test_refusals(change, message, device):
    given = {"weight": torch.zeros(2, 8), "bias": torch.zeros(2, 8), "num_groups": 4, **change}
    given = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    with pytest.raises(RuntimeError, match=message):
        OPS.group_norm_by_sample(torch.randn(2, 8, 5, 6, device=device), **given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("act", ["threshold(0,0)", "clamp(0,inf)", "hardtanh(0,inf)"])
def test_relu_by_another_name(act, layout, device):
    """Kernels compute ReLU in its place, as far as the two are the same at NaN and infinity."""
    x = laid_out(torch.randn(2, 8, 40, 41, device=device), layout)
    weight, bias = torch.ones(2, 8, device=device)
    bias[1], bias[2] = float("inf"), float("nan")
    y = OPS.group_norm(x, 4, weight, bias, 1e-5, act)
    torch.testing.assert_close(y, reference.group_norm_ref(x, 4, weight, bias, 1e-5, act), equal_nan=True)
    weight, bias, dy = weight.requires_grad_(), bias.requires_grad_(), torch.randn_like(x)
    x.requires_grad_()  # without, PyTorch's own gradient in channels_last ends the process on the CPU, up to 2.13
    ours, torchs = (
        torch.autograd.grad(norm(x, 4, weight, bias, 1e-5, act), (x, bias), dy)[1]
        for norm in (OPS.group_norm, reference.group_norm_ref)
    )
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)
