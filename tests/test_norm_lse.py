"""The backward of the third pipeline behind its convolution, against PyTorch in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kgopt import reference
from opcases import LSE_BACKWARD
from shapes import DTYPES, LAYOUTS, make
from tolerances import assert_all_as_good

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
    mean, rstd = torch.ops.kgopt.group_stats(x, groups, 1e-5)
    ours = backward(dlse, x, mean, rstd, groups, weight, bias)
    theirs = gradients(x, dlse, groups, weight, bias)
    exact = gradients(double, dlse.double(), groups, weight.double(), bias.double())
    assert ours[0].stride() == x.stride()
    assert all(mine.dtype == dtype for mine in ours)
    assert_all_as_good(ours, theirs, exact)


@pytest.mark.parametrize("last", [False, True])
def test_norm_lse_backward_of_what_is_not_finite(last, device):
    """NaN at a position is NaN in all its channels' gradients."""
    x, weight, bias = make((1, 4, 3, 8), torch.float32, device, "channels_last" if last else "contiguous")
    mean, rstd = torch.ops.kgopt.group_stats(x, 2, 1e-5)
    x[0, 2, 1, 1] = float("nan")
    dlse = torch.zeros(1, 1, 3, 8, device=device)
    dlse[0, 0, 1, 1] = 1
    dx, _, _ = backward(dlse, x, mean, rstd, 2, weight, bias)
    assert torch.isnan(dx[0, :, 1, 1]).all()


def test_norm_lse_backward_same_bits(device):
    x, weight, bias = make((5, 24, 31, 28), torch.bfloat16, device)
    mean, rstd = torch.ops.kgopt.group_stats(x, 8, 1e-5)
    dlse = torch.randn(5, 1, 31, 28, device=device)
    first = backward(dlse, x, mean, rstd, 8, weight, bias)
    again = backward(dlse, x, mean, rstd, 8, weight, bias)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_norm_lse_backward_refuses(device):
    x = torch.randn(2, 4, 5, 6, device=device)
    mean, rstd = torch.ops.kgopt.group_stats(x, 2, 1e-5)
    dlse = torch.randn(2, 1, 5, 6, device=device)
    with pytest.raises(RuntimeError, match=r"dlse.*\[2, 1, 5, 6\]"):
        backward(dlse[:, :, :4], x, mean, rstd, 2)
    with pytest.raises(RuntimeError, match="dlse has dtype float16, expected the dtype of statistics, float32"):
        backward(dlse.half(), x, mean, rstd, 2)
