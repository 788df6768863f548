"""upsample_conv_weight, and the values of a convolution that reads what is still to be upsampled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kgopt  # noqa: F401  (registers the ops)
from kgopt import reference
from kgopt.rewrite.glue import kernels
from tolerances import assert_as_good_as_torch

OPS = torch.ops.kgopt
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CONVS = {4: F.conv2d, 5: F.conv3d}
layouts = pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)


def draw(shape, dtype, channels_last, device):
    x = torch.randn(shape, device=device).to(dtype)
    return x.contiguous(memory_format=FORMATS[x.dim()]) if channels_last else x


# ---------------------------------------------------------------------------------------------------------- the weight


@dtypes
@layouts
@pytest.mark.parametrize(
    ("shape", "factors", "groups"),
    [
        ((8, 4, 3, 3), [2, 2], 1),
        ((6, 5, 3, 3, 3), [2, 2, 2], 3),
        ((70, 33, 1, 3), [1, 2], 1),
        ((34, 40, 3, 3, 3), [1, 2, 2], 2),
        ((4, 3, 2, 4, 5), [3, 1, 2], 2),
        ((1, 1, 1, 1), [4, 5], 1),
        ((3, 2, 17, 19), [2, 2], 1),
        ((9, 3, 7, 7, 7), [2, 3, 2], 3),
    ],
    ids=str,
)
def test_sums_of_weights(shape, factors, groups, channels_last, dtype, device, poisoned):
    weight = draw(shape, dtype, channels_last, device)
    exact = reference.upsample_conv_weight_ref(weight.double(), factors, groups)
    theirs = reference.upsample_conv_weight_ref(weight, factors, groups)
    for last in (False, True):
        y = OPS.upsample_conv_weight(weight, factors, groups, last)
        assert_as_good_as_torch(y, theirs, exact)
        assert y.is_contiguous(memory_format=FORMATS[y.dim()] if last else torch.contiguous_format)
    part = torch.cat([weight, weight], 1)[:, shape[1] :].transpose(-1, -2)  # some of a tensor, in another order
    factors = [*factors[:-2], factors[-1], factors[-2]]
    y = OPS.upsample_conv_weight(part, factors, groups)
    assert torch.equal(y, OPS.upsample_conv_weight(part.contiguous(), factors, groups))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: OPS.upsample_conv_weight(w, [2]), "factors is"),
        (lambda w: OPS.upsample_conv_weight(w, [0, 2]), "factors is"),
        (lambda w: OPS.upsample_conv_weight(w, [2, 2], 5), "groups is 5"),
        (lambda w: OPS.upsample_conv_weight(w, [2, 2], 0), "groups is 0"),
        (lambda w: OPS.upsample_conv_weight(w[0], [2, 2]), "expected 4 or 5 dimensions"),
        (lambda w: OPS.upsample_conv_weight(w[:, :0], [2, 2]), "expected at least 1"),
        (lambda w: OPS.upsample_conv_weight(w.long(), [2, 2]), "dtype int64"),
    ],
)
def test_bad_weights_are_refused(call, message, device):
    with pytest.raises(RuntimeError, match=message):
        call(torch.randn(4, 3, 3, 3, device=device))


# ---------------------------------------------------------------------------------------------------------- the values


@dtypes
@layouts
@pytest.mark.parametrize(
    ("size", "kernel", "factors", "padding", "groups"),
    [
        ((5, 7), (3, 3), (2, 2), (1, 1), 1),
        ((4, 3), (3, 3), (2, 2), (0, 2), 2),
        ((1, 1), (5, 3), (3, 2), (4, 1), 1),
        ((6, 2), (2, 4), (2, 3), (1, 3), 1),
        ((3, 4, 5), (3, 3, 3), (2, 2, 2), (1, 1, 1), 1),
        ((3, 4, 5), (3, 3, 3), (1, 2, 2), (1, 1, 1), 1),
        ((3, 4, 5), (3, 1, 1), (2, 1, 1), (2, 0, 0), 2),
        ((1, 3, 2), (1, 3, 3), (1, 2, 2), (0, 1, 1), 4),
        ((2, 3, 5), (1, 1, 1), (2, 2, 2), (0, 0, 0), 1),
    ],
    ids=str,
)
def test_values(size, kernel, factors, padding, groups, channels_last, dtype, device, poisoned):
    x = draw((2, 8, *size), dtype, channels_last, device)
    weight = draw((12, 8 // groups, *kernel), dtype, channels_last, device)
    bias = draw((12,), dtype, False, device)
    ones = (1,) * len(size)

    def theirs(x, weight, bias, residual=None):
        up = F.interpolate(x, scale_factor=tuple(map(float, factors)))
        y = CONVS[x.dim()](up, weight, bias, ones, padding, ones, groups)
        return y if residual is None else F.silu((y + residual) / 2)

    option = "commuted" if max(kernel) == 1 else "folded_aten" if groups > 2 else "folded"
    for b in (None, bias):
        y = kernels.upsampled_conv(option, x, weight, b, factors, padding, groups)
        expected = theirs(x, weight, b)
        exact = theirs(x.double(), weight.double(), None if b is None else b.double())
        assert_as_good_as_torch(y, expected, exact)
        assert y.is_contiguous(memory_format=FORMATS[y.dim()] if channels_last else torch.contiguous_format)
    if option != "commuted":
        r = torch.randn_like(y)
        y = kernels.upsampled_conv(option, x, weight, bias, factors, padding, groups, r, 2.0, "silu")
        exact = theirs(x.double(), weight.double(), bias.double(), r.double())
        assert_as_good_as_torch(y, theirs(x, weight, bias, r), exact)
