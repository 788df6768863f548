"""act(GroupNorm(x) + residual): values and gradients in every family of kernels, layouts, bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kgopt.nn
from kgopt import functional, reference
from norm_gradients import check_both_ways
from shapes import DTYPES, LAYOUTS, NORM_SHAPES, laid_out, make
from tolerances import assert_as_good_as_torch

OPS = torch.ops.kgopt
ACTS = ["none", "relu", "leaky_relu(0.1)", "silu", "gelu", "tanh+hardswish"]

# A shape for each family that a GPU takes (tests/test_group_norm.py), and their edges.
FAMILIES = {
    "small": ((2, 24, 9, 15), 8),
    "a cluster": ((2, 24, 61, 64), 3),
    "a cluster, its edges inside vectors": ((2, 12, 61, 67), 3),
    "tiles": ((1, 8, 64, 64, 40), 2),
    "rows off vectors": ((1, 4, 3, 409, 2007), 1),
    "rows or columns": ((2, 64, 40, 41), 16),
    "large rows": ((2, 32, 48, 48, 40), 8),
    "channels of half vectors": ((2, 20, 31, 62), 5),
    "odd channels and positions": ((3, 15, 71, 73), 5),
    "narrow groups": ((13, 34, 25, 7), 17),
}


def check(shape, groups, dtype, act, layout, device, residual_layout=None):
    x, weight, bias = make(shape, dtype, device, layout)
    residual = laid_out(torch.randn(shape, device=device).to(dtype), residual_layout or layout)
    tensors = (x, residual, weight, bias)
    doubles = [t.double() for t in tensors]
    z = reference.group_norm_add_ref(doubles[0], doubles[1], groups, *doubles[2:])
    # Where rounding decides on which side of a kink a value lies, nothing comes back.
    near = z.abs() < (0.05 if dtype.itemsize == 2 else 1e-3)
    dy = laid_out(torch.randn(shape, device=device).masked_fill(near, 0).to(dtype), layout)

    def ours(x, r, w, b):
        return functional.group_norm(x, groups, w, b, 1e-5, act, r)

    def plain(x, r, w, b):
        return reference.group_norm_add_ref(x, r, groups, w, b, 1e-5, act)

    mine = check_both_ways(ours, plain, dy, *tensors)
    assert mine[0].stride() == x.stride()
    with torch.no_grad():  # the op without statistics
        assert torch.equal(ours(*tensors), mine[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in NORM_SHAPES if n != "one element a group"])
def test_values_and_gradients(name, dtype, layout, device, poisoned):
    check(*NORM_SHAPES[name], dtype, "relu", layout, device)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations(act, dtype, layout, device, poisoned):
    check((2, 24, 9, 33), 8, dtype, act, layout, device)


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["none", "relu", "leaky_relu(0.1)", "silu"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, layout, dtype, act, poisoned):
    check(*FAMILIES[name], dtype, act, layout, "cuda")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_residual_of_another_layout(layout, device):
    other = next(one for one in LAYOUTS if one != layout)
    check((2, 12, 7, 9), 3, torch.float32, "relu", layout, device, residual_layout=other)


@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_and_sliced(offset, device):
    """x and the residual lie differently beside a multiple of 16 bytes."""
    wide = torch.randn(2 * 8 * 9 * 10 + 8, device=device)
    x = wide[offset : offset + 1440].view(2, 8, 9, 10)
    residual = torch.randn(2, 9, 9, 12, device=device)[:, 1:, :, 1:11]
    weight, bias = torch.randn(2, 8, device=device)
    y = OPS.group_norm_add(x, residual, 4, weight, bias, 1e-5, "relu")
    expected = reference.group_norm_add_ref(x, residual, 4, weight, bias, act="relu")
    exact = reference.group_norm_add_ref(x.double(), residual.double(), 4, weight.double(), bias.double(), act="relu")
    assert_as_good_as_torch(y, expected, exact)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("act", ["none", "relu", "leaky_relu(0.1)"])
def test_nonfinite_residual_stays_in_place(value, act, device):
    x, weight, bias = make((2, 8, 20, 33), torch.float32, device, "contiguous")
    residual = torch.randn_like(x)
    residual[1, 3, 4, 5] = value
    y = OPS.group_norm_add(x, residual, 4, weight, bias, 1e-5, act)
    expected = reference.group_norm_add_ref(x, residual, 4, weight, bias, act=act)
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert torch.equal(y.isfinite(), expected.isfinite())


def test_residual_may_be_x(device):
    x, weight, bias = make((2, 8, 20, 33), torch.float64, device, "contiguous")
    x.requires_grad_()
    y = functional.group_norm(x, 2, weight, bias, act="silu", residual=x)
    expected = F.silu(F.group_norm(x, 2, weight, bias) + x)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    (mine,), (right,) = (torch.autograd.grad(t, [x], dy) for t in (y, expected))
    torch.testing.assert_close(mine, right)


def test_module(device):
    norm = kgopt.nn.GroupNorm(4, 8, act="leaky_relu(0.2)").to(device)
    x, residual = torch.randn(2, 2, 8, 5, 6, device=device)
    expected = F.leaky_relu(F.group_norm(x, 4, norm.weight, norm.bias) + residual, 0.2)
    torch.testing.assert_close(norm(x, residual), expected)


def test_autocast(device):
    if device == "cpu":
        pytest.skip("norms have no rule of autocast on the CPU")
    x, residual = torch.randn(2, 2, 8, 5, 6, device=device)
    with torch.autocast("cuda", torch.bfloat16):
        y = functional.group_norm(x.bfloat16(), 4, act="relu", residual=residual.bfloat16())
        expected = F.relu(F.group_norm(x.bfloat16(), 4) + residual.bfloat16())
    assert y.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:, :4], r"residual has shape \[2, 4, 5, 6\], expected \[2, 8, 5, 6\]"),
        (lambda r: r.double(), "residual has dtype float64, expected the dtype of x, float32"),
        (lambda r: r.to("meta"), "residual is on .*, expected the device of x"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_refusals(change, message, device):
    x = torch.randn(2, 8, 5, 6, device=device)
    with pytest.raises(RuntimeError, match=message):
        OPS.group_norm_add(x, change(torch.randn_like(x)), 4)


@pytest.mark.parametrize("act", ["leaky_relu", "silu", "relu", "none"])
def test_a_backward_within_autocast(act, device):
    """The sum is computed again for the slopes of the activation. Autocast made float32 of it, while its gradient was
    half: a model whose backward stands inside of the autocast, as where optimize times a step, raised an error.
    """
    half = torch.float16 if device == "cuda" else torch.bfloat16
    x, r, dy = (torch.randn(2, 8, 5, 6, device=device, dtype=half) for _ in range(3))
    leaves = [t.requires_grad_() for t in (x, r, torch.randn(8, device=device), torch.randn(8, device=device))]
    y = torch.ops.kgopt.group_norm_add(leaves[0], leaves[1], 2, *leaves[2:], 1e-5, act)
    expected = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    with torch.autocast(torch.device(device).type, half):
        actual = torch.autograd.grad(y, leaves, dy)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
