"""conv_add, upsample_linear and max_pool against PyTorch: values, gradients, layouts, NaN, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import kgopt  # noqa: F401  (registers the ops)
from kgopt import reference
from tolerances import assert_as_good_as_torch

OPS = torch.ops.kgopt
SHAPES = [(2, 3, 4, 5), (1, 8, 6, 1), (1, 16, 3, 4, 8), (2, 3, 1, 5, 7), (1, 1, 1, 1, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
layouts = pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(shape, dtype, channels_last, device, offset=0):
    """Random values; an offset puts the start off every vector's alignment."""
    x = torch.randn(shape, device=device).to(dtype)
    if channels_last:
        x = x.contiguous(memory_format=FORMATS[x.dim()])
    if offset:
        flat = torch.empty(x.numel() + offset, dtype=dtype, device=device)
        x = flat[offset:].as_strided(x.shape, x.stride(), offset).copy_(x)
    return x


CONVS = {
    "2d": ((2, 5, 7, 6), (9, 5, 3, 3), [1, 1], [1, 1], [1, 1], [0, 0], 1, False),
    "2d strided, groups": ((1, 8, 9, 11), (16, 4, 3, 2), [2, 1], [0, 1], [1, 2], [0, 0], 2, False),
    "3d": ((2, 4, 5, 6, 7), (8, 4, 3, 3, 3), [1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0], 1, False),
    "2d wide": ((1, 40, 7, 6), (72, 40, 3, 3), [1, 1], [1, 1], [1, 1], [0, 0], 1, False),
    "3d 1x1": ((1, 16, 3, 5, 4), (3, 16, 1, 1, 1), [1, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0], 1, False),
    "transposed 3d": ((1, 4, 3, 4, 5), (4, 6, 3, 3, 3), [2, 2, 1], [1, 1, 1], [1, 1, 1], [1, 0, 0], 1, True),
}


@dtypes
@layouts
@pytest.mark.parametrize("parts", ["", "bias", "residual", "bias residual", "bias residual divisor"])
@pytest.mark.parametrize("name", CONVS)
def test_conv_add(name, parts, channels_last, dtype, device, poisoned):
    shape, weight_shape, *rest = CONVS[name]
    x, weight = (draw(s, dtype, channels_last, device) for s in (shape, weight_shape))
    channels = weight_shape[1] * rest[4] if rest[5] else weight_shape[0]
    bias = draw((channels,), dtype, False, device) if "bias" in parts else None
    plain = torch.convolution(x, weight, None, *rest[:3], rest[5], rest[3], rest[4])
    residual = draw(plain.shape, dtype, channels_last, device) if "residual" in parts else None
    divisor = 1.5 if "divisor" in parts else 1.0
    args = (x, weight, bias, residual, *rest, divisor)
    double = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    y = OPS.conv_add(*args)
    assert_as_good_as_torch(y, reference.conv_add_ref(*args), reference.conv_add_ref(*double))
    assert y.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)


@dtypes
@layouts
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_upsample_linear(shape, offset, channels_last, dtype, device, poisoned):
    x = draw(shape, dtype, channels_last, device, offset)
    larger = (*shape[:2], *(2 * s for s in shape[2:]))
    for residual in (None, draw(larger, dtype, channels_last, device, offset)):
        more = [None if residual is None else residual.double()]
        y, expected = OPS.upsample_linear(x, residual), reference.upsample_linear_ref(x, residual)
        assert_as_good_as_torch(y, expected, reference.upsample_linear_ref(x.double(), *more))
        assert y.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)


@dtypes
@layouts
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 16, 1, 3, 1), (1, 8, 9, 2, 5)], ids=str)
def test_upsample_linear_backward(shape, offset, channels_last, dtype, device, poisoned):
    x = draw(shape, dtype, channels_last, device).requires_grad_()
    dy = draw((*shape[:2], *(2 * s for s in shape[2:])), dtype, channels_last, device, offset)
    exact = x.detach().double().requires_grad_()
    for t in (x, exact):
        reference.upsample_linear_ref(t).backward(dy.to(t.dtype))
    dx = OPS.upsample_linear_backward(dy)
    assert_as_good_as_torch(dx, x.grad, exact.grad)
    assert dx.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)


@dtypes
@layouts
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("factors", [(2, 2, 2), (1, 3, 2), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 24, 3, 2, 5)], ids=str)
def test_upsample_nearest(shape, factors, offset, channels_last, dtype, device, poisoned):
    factors = list(factors[-(len(shape) - 2) :])
    x = draw(shape, dtype, channels_last, device, offset).requires_grad_()
    y = OPS.upsample_nearest(x, factors)
    expected = x
    for dim, factor in enumerate(factors, 2):
        expected = expected.repeat_interleave(factor, dim)
    assert torch.equal(y, expected)
    memory_format = FORMATS[x.dim()] if channels_last else torch.contiguous_format
    assert y.is_contiguous(memory_format=memory_format)
    dy = draw(y.shape, dtype, channels_last, device, offset)
    y.backward(dy)
    sums = dy.double()
    for dim, factor in enumerate(factors, 2):
        sums = sums.unflatten(dim, (-1, factor)).sum(dim + 1)
    assert x.grad.is_contiguous(memory_format=memory_format)
    assert_as_good_as_torch(x.grad, sums.to(dtype), sums)


@layouts
def test_upsample_linear_spreads_nan_and_infinity_as_torch(channels_last, device):
    for at, value in itertools.product(range(6), (float("nan"), float("inf"))):
        x = draw((1, 4, 2, 6, 5), torch.float32, channels_last, device)
        x[0, 1, at % 2, at, at % 5] = value
        y, expected = OPS.upsample_linear(x), reference.upsample_linear_ref(x)
        if device == "cuda":  # on the CPU it is PyTorch's own
            assert torch.equal(y.isnan(), expected.isnan())
            assert torch.equal(y.isinf(), expected.isinf())


@dtypes
@layouts
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((2, 3, 4, 6), ([2, 2], [2, 2], [0, 0])),
        ((1, 8, 5, 7), ([2, 2], [2, 2], [0, 0])),
        ((1, 5, 9, 8), ([3, 2], [2, 1], [1, 1])),
        ((1, 16, 4, 6, 8), ([2, 2, 2], [2, 2, 2], [0, 0, 0])),
        ((2, 3, 3, 5, 7), ([1, 2, 2], [1, 2, 2], [0, 0, 0])),
        ((1, 8, 7, 5, 6), ([3, 3, 3], [2, 2, 2], [1, 1, 1])),
    ],
    ids=str,
)
def test_max_pool_has_the_bits_of_torch(shape, window, offset, channels_last, dtype, device, poisoned):
    x = draw(shape, dtype, channels_last, device, offset)
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    flat[3], flat[5], flat[-1] = float("nan"), float("-inf"), float("inf")
    y, expected = OPS.max_pool(x, *window), reference.max_pool_ref(x, *window)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(), expected.nan_to_num())
    assert y.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)


@layouts
def test_gradients(channels_last, device):
    def leaf(*shape):
        return draw(shape, torch.float64, channels_last, device).requires_grad_()

    x, w, r = leaf(1, 2, 3, 4, 3), leaf(3, 2, 2, 2, 2), leaf(1, 3, 2, 3, 2)
    bias = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)
    rest = ([1, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0], 1, False, 0.7)
    assert torch.autograd.gradcheck(lambda *a: OPS.conv_add(*a, *rest), (x, w, bias, r))
    for shape in ((1, 2, 3, 2), (2, 1, 1, 3, 2)):
        x, r = leaf(*shape), leaf(*shape[:2], *(2 * s for s in shape[2:]))
        assert torch.autograd.gradcheck(OPS.upsample_linear, (x, r))
        factors = [2] * (len(shape) - 2)
        assert torch.autograd.gradcheck(lambda t, f=factors: OPS.upsample_nearest(t, f), (x,))
        window = ([2] * (len(shape) - 3) + [1], [1] * (len(shape) - 2), [0] * (len(shape) - 2))
        if min(shape[2:]) > 1:
            assert torch.autograd.gradcheck(lambda t, window=window: OPS.max_pool(t, *window), (x,))


def test_residual_of_another_layout(device):
    x, w = draw((1, 4, 5, 6), torch.float32, True, device), draw((8, 4, 3, 3), torch.float32, True, device)
    residual = torch.randn(1, 8, 5, 6, device=device)
    y = OPS.conv_add(x, w, None, residual, [1, 1], [1, 1], [1, 1], [0, 0])
    expected, exact = (F.conv2d(x.to(t), w.to(t), padding=1) + residual.to(t) for t in (torch.float32, torch.float64))
    assert_as_good_as_torch(y, expected, exact)
    wide = torch.randn(1, 4, 10, 24, device=device)[..., ::2]
    assert_as_good_as_torch(
        OPS.upsample_linear(x, wide),
        reference.upsample_linear_ref(x, wide),
        reference.upsample_linear_ref(x.double(), wide.double()),
    )


def test_empty_batch(device):
    x, w = torch.empty(0, 4, 5, 6, device=device), torch.randn(8, 4, 3, 3, device=device)
    assert OPS.conv_add(x, w, torch.zeros(8, device=device), None, [1, 1], [1, 1], [1, 1], [0, 0]).shape == (0, 8, 5, 6)
    assert OPS.upsample_linear(x).shape == (0, 4, 10, 12)
    assert OPS.max_pool(x, [2, 2], [2, 2], [0, 0]).shape == (0, 4, 2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: OPS.conv_add(x, w, None, x, [1, 1], [1, 1], [1, 1], [0, 0]), "residual has shape"),
        (lambda x, w: OPS.conv_add(x, w, x[0, 0, 0], None, [1, 1], [1, 1], [1, 1], [0, 0]), "bias has shape"),
        (lambda x, w: OPS.conv_add(x, w, None, None, [0, 1], [1, 1], [1, 1], [0, 0]), "stride is"),
        (lambda x, w: OPS.conv_add(x, w.double(), None, None, [1, 1], [1, 1], [1, 1], [0, 0]), "weight has dtype"),
        (lambda x, w: OPS.upsample_linear(x[0]), "expected 4 or 5 dimensions"),
        (lambda x, w: OPS.upsample_linear(x, x), "residual has shape"),
        (lambda x, w: OPS.upsample_linear(x.long()), "dtype int64"),
        (lambda x, w: OPS.upsample_linear_backward(x[..., :5]), "expected even sizes"),
        (lambda x, w: OPS.upsample_nearest(x, [2]), "factors is"),
        (lambda x, w: OPS.upsample_nearest(x, [0, 2]), "factors is"),
        (lambda x, w: OPS.upsample_nearest_backward(x, [7, 2]), "expected multiples of factors"),
        (lambda x, w: OPS.max_pool(x, [2, 2], [2, 2], [2, 0]), "padding is"),
        (lambda x, w: OPS.max_pool(x, [9, 2], [2, 2], [0, 0]), "size of a window"),
        (lambda x, w: OPS.max_pool(x, [2, 2, 2], [2, 2], [0, 0]), "kernel_size is"),
    ],
)
def test_bad_input(call, message, device):
    x, w = torch.randn(1, 4, 5, 6, device=device), torch.randn(8, 4, 3, 3, device=device)
    with pytest.raises(RuntimeError, match=message):
        call(x, w)
