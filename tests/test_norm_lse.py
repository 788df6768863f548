"""The backward of the third pipeline behind its convolution, against PyTorch in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kgopt import reference
from opcases import LSE_BACKWARD
from shapes import DTYPES, LAYOUTS, make
from tolerances import assert_as_good_as_torch

backward = getattr(torch.ops.kgopt, LSE_BACKWARD)

# Vectors and single values, fewer channels than a thread takes, more than a block's, several slices, one position.
SHAPES = {
    "vectors": ((3, 16, 12, 10), 4),
    "odd": ((2, 9, 7, 5), 3),
    "few channels": ((2, 4, 18, 6), 2),
    "more channels than a chunk": ((2, 20, 8, 7), 5),
    "slices": ((1, 8, 96, 130), 1),
    "many channels": ((2, 1060, 3, 4), 10),
    "one position": ((4, 24, 1, 1), 3),
    "a channel a group": ((3, 6, 9, 4), 6),
}


def pointwise(z):
    """F.hardswish on CUDA multiplies by a float32 of 1 / 6, in float64 too."""
    return reference.activation_ref(z, "tanh+hardswish") if z.dtype == torch.float64 else F.hardswish(torch.tanh(z))


def gradients(x, dlse, groups, weight, bias):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    r = leaves[0] + pointwise(F.group_norm(leaves[0], groups, leaves[1], leaves[2]))
    torch.logsumexp(r, 1, keepdim=True).backward(dlse.to(x.dtype))
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (0.01, 0.0), (3.0, 100.0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_norm_lse_backward(name, dtype, scale, offset, layout, device, poisoned):
    if dtype == torch.float64 and offset:
        pytest.skip("float64 is the yardstick")
    shape, groups = SHAPES[name]
    x, weight, bias = make(shape, dtype, device, layout, scale=scale, offset=offset)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    dlse = torch.randn(shape[0], 1, *shape[2:], device=device, dtype=stats)
    double = x.double()
    normalized = F.group_norm(double, groups, weight.double(), bias.double())
    lse = torch.logsumexp(double + pointwise(normalized), 1, keepdim=True).to(stats)
    mean, rstd = torch.ops.kgopt.group_stats(x, groups, 1e-5)
    ours = backward(dlse, x, lse, mean, rstd, groups, weight, bias)
    theirs = gradients(x, dlse, groups, weight, bias)
    exact = gradients(double, dlse.double(), groups, weight.double(), bias.double())
    assert ours[0].stride() == x.stride()
    for mine, torchs, right in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == dtype
        assert_as_good_as_torch(mine, torchs, right)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_norm_lse_backward_divides_by_its_own_sum(name, dtype, layout, device, poisoned):
    """lse only keeps exponentials in range: one that is not quite that of x changes nothing."""
    shape, groups = SHAPES[name]
    x, weight, bias = make(shape, dtype, device, layout)
    dlse, near = (torch.randn(shape[0], 1, *shape[2:], device=device, dtype=dtype) for _ in range(2))
    mean, rstd = torch.ops.kgopt.group_stats(x, groups, 1e-5)
    lse = torch.logsumexp(x + pointwise(F.group_norm(x, groups, weight, bias)), 1, keepdim=True)
    right = backward(dlse, x, lse, mean, rstd, groups, weight, bias)
    for mine, other in zip(backward(dlse, x, lse + near, mean, rstd, groups, weight, bias), right, strict=True):
        torch.testing.assert_close(mine, other)


def test_norm_lse_backward_of_infinities(device):
    """A position that is -inf in every channel has no gradient; +inf and NaN give NaN, as in PyTorch."""
    x, weight, bias = make((1, 4, 3, 8), torch.float32, device)
    lse = torch.zeros(1, 1, 3, 8, device=device)
    lse[0, 0, 0, 0], lse[0, 0, 1, 1] = -float("inf"), float("nan")
    mean, rstd = torch.ops.kgopt.group_stats(x, 2, 1e-5)
    dlse = torch.zeros_like(lse)
    dx, _, _ = backward(dlse, x, lse, mean, rstd, 2, weight, bias)
    assert torch.isnan(dx[0, :, 1, 1]).all()
    lse[0, 0, 1, 1] = 0
    dx, dweight, dbias = backward(dlse, x, lse, mean, rstd, 2, weight, bias)
    for zero in (dx, dweight, dbias):
        assert torch.count_nonzero(zero) == 0


def test_norm_lse_backward_same_bits(device):
    x, weight, bias = make((5, 24, 31, 28), torch.bfloat16, device)
    mean, rstd = torch.ops.kgopt.group_stats(x, 8, 1e-5)
    lse, dlse = (torch.randn(5, 1, 31, 28, device=device) for _ in range(2))
    first = backward(dlse, x, lse + 3, mean, rstd, 8, weight, bias)
    again = backward(dlse, x, lse + 3, mean, rstd, 8, weight, bias)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_norm_lse_backward_refuses(device):
    x = torch.randn(2, 4, 5, 6, device=device)
    mean, rstd = torch.ops.kgopt.group_stats(x, 2, 1e-5)
    lse = torch.randn(2, 1, 5, 6, device=device)
    with pytest.raises(RuntimeError, match=r"lse.*\[2, 1, 5, 6\]"):
        backward(lse, x, lse[:, :, :4], mean, rstd, 2)
    with pytest.raises(RuntimeError, match="dlse has dtype float16, expected the dtype of statistics, float32"):
        backward(lse.half(), x, lse, mean, rstd, 2)
