"""conv_add, upsample_linear and max_pool against PyTorch: values, gradients, layouts, NaN, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import kgopt  # noqa: F401  (registers the ops)
from kgopt import reference
from shapes import norm_shape
from tolerances import assert_as_good_as_torch, round_tf32

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
@pytest.mark.parametrize("parts", ["", "bias", "residual relu", "bias residual", "bias residual divisor", "bias gelu"])
@pytest.mark.parametrize("name", CONVS)
def test_conv_add(name, parts, channels_last, dtype, device, poisoned):
    shape, weight_shape, *rest = CONVS[name]
    x, weight = (draw(s, dtype, channels_last, device) for s in (shape, weight_shape))
    channels = weight_shape[1] * rest[4] if rest[5] else weight_shape[0]
    bias = draw((channels,), dtype, False, device) if "bias" in parts else None
    plain = torch.convolution(x, weight, None, *rest[:3], rest[5], rest[3], rest[4])
    residual = draw(plain.shape, dtype, channels_last, device) if "residual" in parts else None
    divisor = 1.5 if "divisor" in parts else 1.0
    act = "relu" if "relu" in parts else "gelu" if "gelu" in parts else "none"
    args = (x, weight, bias, residual, *rest, divisor, act)
    double = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    y = OPS.conv_add(*args)
    assert_as_good_as_torch(y, reference.conv_add_ref(*args), reference.conv_add_ref(*double))
    assert y.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)
    y, moments = OPS.conv_add_moments(*args)
    expected, exact = (reference.conv_add_moments_ref(*a) for a in (args, double))
    assert_as_good_as_torch(y, expected[0], exact[0])
    assert_as_good_as_torch(moments, expected[1].to(moments.dtype), exact[1])


# Convolutions of few channels innermost, which Hopper computes with the residual and the moments in the same kernel.
WIDTHS = {"whole rows": (1, 32, 5, 12, 64), "odd": (2, 32, 4, 9, 37), "64 channels": (1, 64, 6, 10, 33)}


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("act", ["none", "relu", "silu", "tanh"])
@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (0.01, 0), (3, 0), (1, 100)])
@pytest.mark.parametrize("name", WIDTHS)
def test_conv_add_of_few_channels_innermost(name, scale, offset, act, dtype, device, poisoned):
    torch.backends.cudnn.allow_tf32 = True
    # Values that TF32 has: how others are cut to it is not the subject.
    x = (draw(norm_shape(WIDTHS[name], device, 2**14), dtype, True, device) * scale + offset).bfloat16().to(dtype)
    x = x.contiguous(memory_format=FORMATS[5])
    c = x.shape[1]
    weight = (draw((c, c, 3, 3, 3), dtype, True, device) * 0.1).bfloat16().to(dtype)
    bias, residual = draw((c,), dtype, False, device), draw(x.shape, dtype, True, device)
    rest = ([1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0], 1, False)
    for more, divisor in ((residual, 1.0), (residual, 2.0), (None, 1.0)):
        args = (x, weight, bias, more, *rest, divisor, act)
        double = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
        expected, exact = reference.conv_add_ref(*args), reference.conv_add_ref(*double)
        assert_as_good_as_torch(OPS.conv_add(*args, backend="kgopt"), expected, exact)
        # Perhaps by another kernel.
        y, moments = OPS.conv_add_moments(*args, backend="kgopt")
        assert_as_good_as_torch(y, expected, exact)
        assert torch.equal(moments, OPS.conv_add_moments(*args, backend="kgopt")[1])
        variance, mean = torch.var_mean(y.double(), dim=[2, 3, 4], correction=0)
        # Of what is stored, but for its rounding.
        tiny, rounding = (1e-4, 0.0) if dtype == torch.float32 else (4e-3, 1e-5)
        if dtype == torch.bfloat16:  # the most that values between two neighbours vary more once they are rounded
            rounding = torch.finfo(dtype).eps ** 2 / 4
        deviation, mean_size = variance.sqrt(), mean.abs()
        # Values closer to each other than the type's steps are all rounded the same way: half a step of their mean.
        step = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        off = (
            tiny * (deviation + 0.02 * mean_size) + torch.where(deviation < 4 * step * mean_size, step, 0.0) * mean_size
        )
        assert ((moments[..., 0] - mean).abs() <= off + 1e-8).all()
        allowed = tiny * (variance + 0.02 * deviation * mean_size) + rounding * mean_size.square()
        ends = variance < 1e-8  # where an activation leaves next to nothing
        assert (((moments[..., 1] - variance).abs() <= allowed) | ends).all()


@dtypes
@layouts
@pytest.mark.parametrize("act", ["none", "relu", "silu", "tanh"])
@pytest.mark.parametrize(("channels", "out"), [(32, 3), (16, 1), (64, 4), (24, 2), (32, 5)])
def test_group_norm_conv1x1(channels, out, act, channels_last, dtype, device, poisoned):
    for shape, offset in (((2, channels, 3, 5, 7), 0), ((1, channels, 33, 20), 100)):
        x = (draw(shape, dtype, False, device) * 3 + offset).to(dtype)
        x = x.contiguous(memory_format=FORMATS[x.dim()]) if channels_last else x
        gamma, beta = draw((channels,), dtype, False, device), draw((channels,), dtype, False, device)
        weight = draw((out, channels, *[1] * (x.dim() - 2)), dtype, False, device)
        bias = draw((out,), dtype, False, device)
        high = torch.float64 if dtype == torch.float64 else torch.float32
        variance, mean = torch.var_mean(x.double(), dim=list(range(2, x.dim())), correction=0)
        moments = torch.stack([mean, variance], -1).to(high)
        for args in (
            (x, None, 8, gamma, beta, 1e-5, act, weight, bias),
            (x, moments, 4, None, None, 1e-3, act, weight, None),
            (x, None, 0, None, None, 0.0, "none", weight, bias),
        ):
            double = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
            y = OPS.group_norm_conv1x1(*args)
            expected, exact = (reference.group_norm_conv1x1_ref(*a) for a in (args, double))
            assert_as_good_as_torch(y, expected, exact)
            assert y.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)


@dtypes
@layouts
@pytest.mark.parametrize(
    ("gn_act", "parts"),
    [
        ("none", "bias relu"),
        ("relu", ""),
        ("relu", "moments residual gelu"),
        ("silu", "bias residual divisor"),
        ("tanh+hardswish", "moments"),
    ],
)
@pytest.mark.parametrize("name", CONVS)
def test_group_norm_conv(name, gn_act, parts, channels_last, dtype, device, poisoned):
    shape, weight_shape, *rest = CONVS[name]
    x, weight = (draw(s, dtype, channels_last, device) for s in (shape, weight_shape))
    gamma, beta = (draw((shape[1],), dtype, False, device) for _ in range(2))
    channels = weight_shape[1] * rest[4] if rest[5] else weight_shape[0]
    bias = draw((channels,), dtype, False, device) if "bias" in parts else None
    plain = torch.convolution(x, weight, None, *rest[:3], rest[5], rest[3], rest[4])
    residual = draw(plain.shape, dtype, channels_last, device) if "residual" in parts else None
    moments = None
    if "moments" in parts:
        variance, mean = torch.var_mean(x.double(), dim=list(range(2, x.dim())), correction=0)
        moments = torch.stack([mean, variance], -1).to(torch.float64 if dtype == torch.float64 else torch.float32)
    divisor = 1.5 if "divisor" in parts else 1.0
    act = "relu" if "relu" in parts else "gelu" if "gelu" in parts else "none"
    groups = shape[1] if shape[1] % 4 else 4
    args = (x, moments, groups, gamma, beta, 1e-5, gn_act, weight, bias, residual, *rest, divisor, act)
    double = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    y = OPS.group_norm_conv(*args)
    assert_as_good_as_torch(y, reference.group_norm_conv_ref(*args), reference.group_norm_conv_ref(*double))
    assert y.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)
    y, of_result = OPS.group_norm_conv_moments(*args)
    assert_as_good_as_torch(y, reference.group_norm_conv_ref(*args), reference.group_norm_conv_ref(*double))
    variance, mean = torch.var_mean(y.double(), dim=list(range(2, y.dim())), correction=0)
    tiny = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 1e-2)
    torch.testing.assert_close(of_result.double(), torch.stack([mean, variance], -1), rtol=tiny, atol=tiny)


# x's sizes, the weight's, pad: of a large x its norm writes into the padded tensor.
REPLICATED = {
    "2d": ((2, 16, 7, 6), (24, 16, 3, 3), [1, 2, 0, 3]),
    "3d": ((2, 64, 3, 5, 6), (64, 64, 3, 3, 3), [1, 1, 1, 1, 2, 0]),
    "few channels": ((1, 6, 4, 5, 3), (8, 6, 2, 2, 2), [0, 1, 1, 0, 1, 0]),
    "one position": ((1, 64, 1, 1, 1), (64, 64, 3, 3, 3), [1, 1, 1, 1, 2, 0]),
    "padded far": ((1, 64, 2, 3, 2), (64, 64, 3, 3, 3), [4, 5, 0, 7, 3, 2]),
    "large": ((2, 64, 9, 70, 61), (64, 64, 3, 3, 3), [1, 1, 1, 1, 2, 0]),
}


@pytest.mark.parametrize("backend", ["auto", "kgopt:scaled_half"])
@pytest.mark.parametrize("gn_act", [None, "none", "silu", "gelu+relu"])
@layouts
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REPLICATED)
def test_group_norm_conv_repeats_the_outermost_positions(
    name, dtype, channels_last, gn_act, backend, device, poisoned, monkeypatch
):
    """Bound of TF32, also where the norm's value is padded as it is rounded to scaled fp16."""
    if name == "large" and device == "cpu":
        pytest.skip("slow, and nothing of its own there")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    shape, weight_shape, pad = REPLICATED[name]
    rank = len(shape) - 2
    x, weight = (draw(s, dtype, channels_last, device) for s in (shape, weight_shape))
    gamma, beta = (draw((shape[1],), dtype, False, device) for _ in range(2))
    norm = (0, None, None, 0.0, "none") if gn_act is None else (2, gamma, beta, 1e-5, gn_act)
    geometry = [1] * rank, [0] * rank, [1] * rank, [0] * rank, 1, False
    bias = draw((weight_shape[0],), dtype, False, device)
    sizes = [s + pad[2 * i] + pad[2 * i + 1] for i, s in enumerate(reversed(shape[2:]))][::-1]
    sizes = [s - k + 1 for s, k in zip(sizes, weight_shape[2:], strict=True)]
    residual = draw((shape[0], weight_shape[0], *sizes), dtype, channels_last, device)
    moments = None
    if gn_act == "silu":
        variance, mean = torch.var_mean(x.double(), dim=list(range(2, x.dim())), correction=0)
        moments = torch.stack([mean, variance], -1).to(torch.float64 if dtype == torch.float64 else torch.float32)
    args = (x, moments, *norm, weight, bias, residual, *geometry, 2.0, "relu")
    double = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    y = OPS.group_norm_conv(*args, replicate=pad, backend=backend)
    expected = reference.group_norm_conv_ref(*args, replicate=pad)
    exact = reference.group_norm_conv_ref(*double, replicate=pad)
    ideal = ()
    if dtype is torch.float32 and device == "cuda":
        z = reference.group_norm_ref(double[0], *(double[2:7])) if norm[0] else double[0]
        z = round_tf32(reference.pad_replicate_ref(z, pad).float()).double()
        rounded = z, round_tf32(weight).double(), *double[8:]
        ideal = (reference.conv_add_ref(*rounded).float(),)
    assert_as_good_as_torch(y, expected, exact, *ideal)
    assert y.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)
    z, of_result = OPS.group_norm_conv_moments(*args, replicate=pad, backend=backend)
    assert torch.equal(z, y) or backend == "auto"
    mean = y.double().mean(list(range(2, y.dim())))
    torch.testing.assert_close(of_result[..., 0].double(), mean, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bad", [[1, 1], [1, 1, 1, 1, -1, 0]])
def test_what_is_no_padding_is_refused(bad, device):
    x, weight = draw((1, 4, 3, 4, 5), torch.float32, False, device), draw((4, 4, 1, 1, 1), torch.float32, False, device)
    ones, zeros = [1] * 3, [0] * 3
    with pytest.raises(RuntimeError, match="pad"):
        OPS.group_norm_conv(
            x, None, 0, None, None, 0.0, "none", weight, None, None, ones, zeros, ones, zeros, replicate=bad
        )


# Channels innermost, as the kernels that normalize what they load take it: rows and planes that no tile ends with,
# channels of one and of several stages, kernels of one and of many taps, dilation.
PROLOGUES = {
    "3d": ((1, 64, 6, 9, 33), (64, 64, 3, 3, 3), [1, 1, 1], [1, 1, 1], 1),
    "two samples": ((2, 40, 5, 7, 19), (72, 40, 3, 3, 3), [1, 1, 1], [1, 1, 1], 1),
    "no padding": ((2, 96, 5, 7, 19), (64, 96, 3, 3, 3), [0, 0, 0], [1, 1, 1], 1),
    "2d, dilated": ((2, 64, 37, 41), (80, 64, 3, 3), [2, 2], [2, 2], 1),
    "flat kernel": ((1, 128, 3, 20, 21), (64, 128, 1, 3, 5), [0, 1, 2], [1, 1, 1], 1),
    "a batch a row": ((1, 128, 4, 8, 32), (128, 128, 3, 3, 3), [1, 1, 1], [1, 1, 1], 1),
    "halves of rows": ((1, 32, 3, 6, 150), (64, 32, 3, 3, 3), [1, 1, 1], [1, 1, 1], 1),
    "one tap": ((1, 64, 3, 8, 50), (128, 64, 1, 1, 1), [0, 0, 0], [1, 1, 1], 1),
    "head": ((2, 64, 33, 45), (3, 64, 3, 3), [1, 1], [1, 1], 1),
}


def ideal_tf32(x, moments, groups, gamma, beta, eps, gn_act, weight, *rest):
    """What exact products of operands in TF32 give: PyTorch's kernel for a small convolution may not round at all."""
    z = reference.group_norm_ref(x.double(), groups, gamma.double(), beta.double(), eps, gn_act)
    rest = [a.double() if isinstance(a, torch.Tensor) else a for a in rest]
    return reference.conv_add_ref(round_tf32(z.float()).double(), round_tf32(weight).double(), *rest).float()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("gn_act", ["none", "relu", "silu", "gelu"])
@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (0.01, 0), (1, 100)])
@pytest.mark.parametrize("name", PROLOGUES)
def test_group_norm_conv_of_channels_innermost(name, scale, offset, gn_act, dtype, poisoned):
    torch.backends.cudnn.allow_tf32 = True
    shape, weight_shape, padding, dilation, groups = PROLOGUES[name]
    rank, device = len(shape) - 2, "cuda"
    x = (draw(shape, dtype, True, device) * scale + offset).to(dtype)
    weight = draw(weight_shape, dtype, True, device) * 0.1
    gamma, beta = (draw((shape[1],), dtype, False, device) for _ in range(2))
    bias = draw((weight_shape[0],), dtype, False, device)
    rest = ([1] * rank, padding, dilation, [0] * rank, groups, False, 1.0)
    for act in ("none", "relu"):
        args = (x, None, 8, gamma, beta, 1e-5, gn_act, weight, bias, None, *rest, act)
        double = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
        expected, exact = reference.group_norm_conv_ref(*args), reference.group_norm_conv_ref(*double)
        also = ideal_tf32(*args) if dtype == torch.float32 else None
        variance, mean = torch.var_mean(x.double(), dim=list(range(2, x.dim())), correction=0)
        moments = torch.stack([mean, variance], -1).float()
        # The kernel with positions as rows takes it under its name whatever the sizes.
        for backend in ("auto", "kgopt", *(("kgopt:position_rows",) if weight_shape[0] % 8 == 0 else ())):
            for given in (None, moments):
                y = OPS.group_norm_conv(x, given, *args[2:], backend=backend)
                assert_as_good_as_torch(y, expected, exact, also=also)
                assert torch.equal(y, OPS.group_norm_conv(x, given, *args[2:], backend=backend))


def test_group_norm_conv_keeps_nan_and_zero_padding(device):
    """A NaN reaches its whole group and no other sample; padding stays zero whatever the norm makes of zero."""
    torch.backends.cudnn.allow_tf32 = True
    x = draw((2, 64, 12, 40), torch.float32, True, device)
    weight, bias = draw((64, 64, 3, 3), torch.float32, True, device), torch.zeros(64, device=device)
    gamma, beta = torch.ones(64, device=device), torch.full((64,), 50.0, device=device)
    rest = ([1, 1], [1, 1], [1, 1], [0, 0])
    for gn_act in ("none", "relu", "silu"):
        args = (x, None, 8, gamma, beta, 1e-5, gn_act, weight, bias, None, *rest)
        double = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
        backend = "kgopt:position_rows" if x.is_cuda else "auto"
        y = OPS.group_norm_conv(*args, backend=backend)
        also = ideal_tf32(*args) if x.is_cuda else None
        expected, exact = reference.group_norm_conv_ref(*args), reference.group_norm_conv_ref(*double)
        assert_as_good_as_torch(y, expected, exact, also=also)
        bad = x.clone(memory_format=torch.channels_last)
        bad[0, 3, 5, 7] = float("nan")
        z = OPS.group_norm_conv(bad, *args[1:], backend=backend)
        assert z[0].isnan().all()
        assert torch.equal(z[1], y[1])


@dtypes
@layouts
@pytest.mark.parametrize("act", ["none", "relu", "silu", "gelu"])
@pytest.mark.parametrize("offset", [0, 100])
def test_group_norm_moments(offset, act, channels_last, dtype, device, poisoned):
    x = (draw((2, 24, 5, 6, 7), dtype, False, device) * 3 + offset).to(dtype)
    x = x.contiguous(memory_format=FORMATS[5]) if channels_last else x
    gamma, beta = draw((24,), dtype, False, device), draw((24,), dtype, False, device)
    high = torch.float64 if dtype == torch.float64 else torch.float32
    variance, mean = torch.var_mean(x.double(), dim=[2, 3, 4], correction=0)
    moments = torch.stack([mean, variance], -1).to(high)
    for groups in (1, 8, 24):
        expected = reference.group_norm_ref(x, groups, gamma, beta, 1e-5, act)
        exact = reference.group_norm_ref(x.double(), groups, gamma.double(), beta.double(), 1e-5, act)
        y = OPS.group_norm_moments(x, moments, groups, gamma, beta, 1e-5, act)
        assert_as_good_as_torch(y, expected, exact)
        assert y.stride() == x.stride()


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


@dtypes
def test_upsample_nearest_of_some_channels(dtype, device, poisoned):
    whole = draw((2, 24, 4, 6, 8), dtype, True, device)
    for part in (whole[:, 8:], whole[:, 3:16], whole[:, 5:6]):
        dx = OPS.upsample_nearest_backward(part, [2, 3, 4])
        sums = part.double().unflatten(4, (-1, 4)).sum(5).unflatten(3, (-1, 3)).sum(4).unflatten(2, (-1, 2)).sum(3)
        assert_as_good_as_torch(dx, sums.to(dtype), sums)
        assert torch.equal(OPS.upsample_nearest(part, [1, 2, 1]), part.repeat_interleave(2, 3))


@dtypes
@layouts
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 24, 3, 2, 5), (2, 6, 1, 1, 2)], ids=str)
def test_pad_replicate_has_the_bits_of_torch(shape, offset, channels_last, dtype, device, poisoned):
    dims = len(shape) - 2
    x = draw(shape, dtype, channels_last, device, offset).requires_grad_()
    memory_format = FORMATS[x.dim()] if channels_last else torch.contiguous_format
    for pad in (
        (1, 1) * dims,
        (1, 1) * (dims - 1) + (2, 0),
        (0, 3) * dims,
        (0, 0) * dims,
        (9, 4) + (0, 0) * (dims - 1),
    ):
        y, expected = OPS.pad_replicate(x, pad), reference.pad_replicate_ref(x, pad)
        assert torch.equal(y, expected)
        assert y.is_contiguous(memory_format=memory_format)
        dy = draw(y.shape, dtype, channels_last, device, offset)
        (dx,) = torch.autograd.grad(y, x, dy)
        (exact,) = torch.autograd.grad(reference.pad_replicate_ref(x.double(), pad), x, dy.double())
        (theirs,) = torch.autograd.grad(expected, x, dy)
        assert_as_good_as_torch(dx, theirs, exact)
        assert torch.equal(dx, torch.autograd.grad(OPS.pad_replicate(x, pad), x, dy)[0])


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
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((5, 13, 3, 5, 3), ([3, 3, 3], [2, 2, 2], [1, 0, 0])),
        ((2, 3, 5, 6, 4), ([3, 2, 3], [1, 2, 1], [1, 0, 1])),
        ((2, 8, 9, 7), ([5, 3], [2, 1], [2, 1])),
        ((2, 8, 9, 7), ([2, 2], [2, 3], [0, 0])),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_max_pool_gradient_of_overlapping_windows(dtype, shape, window, channels_last, device):
    """The same bits each time, also where PyTorch has no such kernel, and the sum of a position is rounded once."""
    x = draw(shape, dtype, channels_last, device).requires_grad_()
    y = OPS.max_pool(x, *window)
    dy = torch.randn_like(y)
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (torch.autograd.grad(y, x, dy, retain_graph=True)[0] for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, again)
    assert first.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)
    wide = x.detach().cpu().double().requires_grad_()
    (exact,) = torch.autograd.grad(reference.max_pool_ref(wide, *window), wide, dy.cpu().double())
    if dtype is torch.float32:
        torch.testing.assert_close(first.cpu().double(), exact, rtol=1e-6, atol=1e-6)
    else:
        torch.testing.assert_close(first.cpu(), exact.to(dtype), rtol=2**-8, atol=0)


@layouts
def test_gradients(channels_last, device):
    def leaf(*shape):
        return draw(shape, torch.float64, channels_last, device).requires_grad_()

    x, w, r = leaf(1, 2, 3, 4, 3), leaf(3, 2, 2, 2, 2), leaf(1, 3, 2, 3, 2)
    bias = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)
    rest = ([1, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0], 1, False, 0.7)
    assert torch.autograd.gradcheck(lambda *a: OPS.conv_add(*a, *rest), (x, w, bias, r))
    assert torch.autograd.gradcheck(lambda *a: OPS.conv_add(*a, *rest, "silu"), (x, w, bias, r))
    assert torch.autograd.gradcheck(lambda *a: OPS.conv_add_moments(*a, *rest, "tanh")[0], (x, w, bias, r))
    gamma, beta = (torch.randn(4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    x, head = leaf(1, 4, 3, 4, 3), leaf(3, 4, 1, 1, 1)
    moments = torch.stack([x.mean([2, 3, 4]), x.var([2, 3, 4], correction=0)], -1).detach()

    def normalized(x, gamma, beta):
        return OPS.group_norm_moments(x, moments, 2, gamma, beta, 1e-5, "silu")

    y, dy = OPS.group_norm(x, 2, gamma, beta, 1e-5, "silu"), leaf(*x.shape).detach()
    expected = torch.autograd.grad(y, (x, gamma, beta), dy)
    for a, b in zip(torch.autograd.grad(normalized(x, gamma, beta), (x, gamma, beta), dy), expected, strict=True):
        torch.testing.assert_close(a, b)

    def headed(x, gamma, beta, head, bias):
        return OPS.group_norm_conv1x1(x, None, 2, gamma, beta, 1e-5, "silu", head, bias)

    assert torch.autograd.gradcheck(headed, (x, gamma, beta, head, bias))
    weight, r, geometry = leaf(3, 4, 2, 2, 2), leaf(1, 3, 2, 3, 2), rest[:-2]

    def prologue(x, gamma, beta, weight, bias, r, act="none"):
        args = (x, None, 2, gamma, beta, 1e-5, "silu", weight, bias, r, *geometry, False, 0.7, act)
        return OPS.group_norm_conv_moments(*args)[0] if act == "tanh" else OPS.group_norm_conv(*args)

    for act in ("none", "silu", "tanh"):
        assert torch.autograd.gradcheck(lambda *a, act=act: prologue(*a, act), (x, gamma, beta, weight, bias, r))
    up = leaf(4, 3, 2, 2, 2)
    with_moments = (2, None, None, 1e-5, "tanh", up, None, None, [2, 1, 2], [1, 0, 1], [1] * 3, [1, 0, 0], 1, True)
    given, found = (OPS.group_norm_conv(x, m, *with_moments) for m in (moments, None))
    dy = torch.randn_like(given)
    for a, b in zip(torch.autograd.grad(given, (x, up), dy), torch.autograd.grad(found, (x, up), dy), strict=True):
        torch.testing.assert_close(a, b)
    for shape in ((1, 2, 3, 2), (2, 1, 1, 3, 2)):
        x, r = leaf(*shape), leaf(*shape[:2], *(2 * s for s in shape[2:]))
        assert torch.autograd.gradcheck(OPS.upsample_linear, (x, r))
        factors = [2] * (len(shape) - 2)
        assert torch.autograd.gradcheck(lambda t, f=factors: OPS.upsample_nearest(t, f), (x,))
        pad = [1, 2] * (len(shape) - 2)
        assert torch.autograd.gradcheck(lambda t, pad=pad: OPS.pad_replicate(t, pad), (x,))
        window = ([2] * (len(shape) - 3) + [1], [1] * (len(shape) - 2), [0] * (len(shape) - 2))
        if min(shape[2:]) > 1:
            assert torch.autograd.gradcheck(lambda t, w=window: OPS.max_pool(t, *w), (x,), check_batched_grad=True)


def norm_conv(x, groups, weight, residual=None, gn_act="relu", moments=None):
    rest = (residual, [1, 1], [1, 1], [1, 1], [0, 0])
    return OPS.group_norm_conv(x, moments, groups, None, None, 1e-5, gn_act, weight, None, *rest)


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
    assert norm_conv(x, 2, w).shape == (0, 8, 5, 6)
    assert OPS.upsample_linear(x).shape == (0, 4, 10, 12)
    assert OPS.pad_replicate(x, [1, 0, 0, 2]).shape == (0, 4, 7, 7)
    assert OPS.max_pool(x, [2, 2], [2, 2], [0, 0]).shape == (0, 4, 2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: OPS.conv_add(x, w, None, x, [1, 1], [1, 1], [1, 1], [0, 0]), "residual has shape"),
        (lambda x, w: OPS.conv_add(x, w, x[0, 0, 0], None, [1, 1], [1, 1], [1, 1], [0, 0]), "bias has shape"),
        (lambda x, w: OPS.conv_add(x, w, None, None, [0, 1], [1, 1], [1, 1], [0, 0]), "stride is"),
        (lambda x, w: OPS.conv_add(x, w.double(), None, None, [1, 1], [1, 1], [1, 1], [0, 0]), "weight has dtype"),
        (lambda x, w: norm_conv(x, 3, w), "num_groups is 3"),
        (lambda x, w: norm_conv(x, 2, w, x), "residual has shape"),
        (lambda x, w: norm_conv(x, 2, w, None, "swish"), "unknown activation"),
        (lambda x, w: norm_conv(x, 2, w, None, "relu", x), "moments has shape"),
        (lambda x, w: OPS.upsample_linear(x[0]), "expected 4 or 5 dimensions"),
        (lambda x, w: OPS.upsample_linear(x, x), "residual has shape"),
        (lambda x, w: OPS.upsample_linear(x.long()), "dtype int64"),
        (lambda x, w: OPS.upsample_linear_backward(x[..., :5]), "expected even sizes"),
        (lambda x, w: OPS.upsample_nearest(x, [2]), "factors is"),
        (lambda x, w: OPS.upsample_nearest(x, [0, 2]), "factors is"),
        (lambda x, w: OPS.upsample_nearest_backward(x, [7, 2]), "expected multiples of factors"),
        (lambda x, w: OPS.pad_replicate(x, [1, 1]), "pad is"),
        (lambda x, w: OPS.pad_replicate(x, [1, 1, -1, 1]), "pad is"),
        (lambda x, w: OPS.pad_replicate(x[:, :, :0], [1, 1, 1, 1]), "expected at least 1 along each dim"),
        (lambda x, w: OPS.max_pool(x, [2, 2], [2, 2], [2, 0]), "padding is"),
        (lambda x, w: OPS.max_pool(x, [9, 2], [2, 2], [0, 0]), "size of a window"),
        (lambda x, w: OPS.max_pool(x, [2, 2, 2], [2, 2], [0, 0]), "kernel_size is"),
    ],
)
def test_bad_input(call, message, device):
    x, w = torch.randn(1, 4, 5, 6, device=device), torch.randn(8, 4, 3, 3, device=device)
    with pytest.raises(RuntimeError, match=message):
        call(x, w)


def test_explain_group_norm_conv_on_the_cpu():
    x, w = torch.randn(1, 4, 5, 6), torch.randn(8, 4, 3, 3)
    rest = ([1, 1], [1, 1], [1, 1], [0, 0], 1, False)
    assert OPS.explain_group_norm_conv(x, w, *rest, "silu").startswith("two ops: ")
    with pytest.raises(RuntimeError, match="unknown activation"):
        OPS.explain_group_norm_conv(x, w, *rest, "swish")
