"""Convolutions: every argument, exact on small integers, as accurate as PyTorch on real numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kgopt import functional
from shapes import CONV_CASES, conv_case
from tolerances import assert_as_good_as_torch, round_tf32

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TORCH = {
    (False, 2): F.conv2d,
    (False, 3): F.conv3d,
    (True, 2): F.conv_transpose2d,
    (True, 3): F.conv_transpose3d,
}
OURS = {
    (False, 2): functional.conv2d,
    (False, 3): functional.conv3d,
    (True, 2): functional.conv_transpose2d,
    (True, 3): functional.conv_transpose3d,
}


def weight_shape(case):
    transposed, _, c_in, c_out, _, kernel, *_, groups = case
    return (c_in, c_out // groups, *kernel) if transposed else (c_out, c_in // groups, *kernel)


def run(function, case, x, weight, bias, **options):
    transposed, _, _, _, _, _, stride, padding, dilation, output_padding, groups = case
    if transposed:
        return function(x, weight, bias, stride, padding, output_padding, groups, dilation, **options)
    return function(x, weight, bias, stride, padding, dilation, groups, **options)


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def backends(device):
    return ("auto", "kgopt", "aten") if device == "cuda" else ("auto", "aten")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONV_CASES)
def test_conv_small_integers_exact(name, dtype, layout, device, poisoned):
    case = conv_case(name, device)
    x = torch.randint(-3, 4, (2, case[2], *case[4])).to(dtype).to(device)
    weight = torch.randint(-2, 3, weight_shape(case)).to(dtype).to(device)
    bias = torch.randint(-3, 4, (case[3],)).to(dtype).to(device)
    if layout == "channels_last":
        x = channels_last(x)
    exact = run(TORCH[case[:2]], case, x.cpu().double(), weight.cpu().double(), bias.cpu().double())
    for backend in backends(device):
        for allow_tf32 in (True, False):
            y = run(OURS[case[:2]], case, x, weight, bias, backend=backend, allow_tf32=allow_tf32)
            # Halves hold the sum rounded once; cuDNN rounds some of them twice, so its own result counts too.
            right = torch.equal(y.cpu(), exact.to(dtype))
            assert right or (backend != "kgopt" and torch.equal(y, run(TORCH[case[:2]], case, x, weight, bias))), (
                backend
            )
            if layout == "channels_last":
                assert y.is_contiguous(memory_format=torch.channels_last if y.dim() == 4 else torch.channels_last_3d)
            else:
                assert y.is_contiguous()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("name", CONV_CASES)
def test_conv_values(name, precision, device, poisoned):
    case = conv_case(name, device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(precision, torch.float32)
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    x = torch.randn(2, case[2], *case[4], device=device).to(dtype)
    weight = torch.randn(weight_shape(case), device=device).to(dtype)
    exact = run(TORCH[case[:2]], case, x.double(), weight.double(), None)
    expected = run(TORCH[case[:2]], case, x, weight, None)
    also = None
    if precision == "tf32" and device == "cuda":
        also = run(TORCH[case[:2]], case, round_tf32(x).double(), round_tf32(weight).double(), None).float()
    for backend in backends(device):
        y = run(OURS[case[:2]], case, x, weight, None, backend=backend)
        assert_as_good_as_torch(y, expected, exact, also)


@pytest.mark.gpu
def test_conv_follows_the_tf32_switch():
    case = CONV_CASES["2d k3"]
    x, weight = torch.randn(2, 8, 40, 70, device="cuda"), torch.randn(64, 8, 3, 3, device="cuda")
    exact = F.conv2d(x.double(), weight.double())
    errors = {}
    for allowed in (True, False):
        torch.backends.cudnn.allow_tf32 = allowed
        y = run(functional.conv2d, case, x, weight, None, backend="kgopt")
        errors[allowed] = float((y - exact).norm() / exact.norm())
    assert errors[False] < 1e-6 < 1e-5 < errors[True]


@pytest.mark.gpu
@pytest.mark.parametrize("c_out", [32, 40, 64])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_conv_of_few_channels_innermost(dtype, c_out, poisoned):
    """Large enough for a wgmma kernel to be taken by itself: many tiles a block, all stages of its rings."""
    torch.backends.cudnn.allow_tf32 = True
    x = channels_last(torch.randint(-3, 4, (1, 32, 48, 90, 101)).to(dtype).cuda())
    weight = torch.randint(-2, 3, (c_out, 32, 3, 3, 3)).to(dtype).cuda()
    exact = F.conv3d(x.double(), weight.double(), padding=1)
    assert torch.equal(functional.conv3d(x, weight, padding=1), exact.to(dtype))
    assert torch.equal(functional.conv3d(x, weight, padding=1, backend="kgopt"), exact.to(dtype))
    if torch.cuda.get_device_capability() == (9, 0):
        once, none = [1, 1, 1], [0, 0, 0]
        assert "wgmma" in torch.ops.kgopt.explain_conv(x, weight, once, once, once, none, 1, False)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_conv_random_arguments_exact(data, device):
    rank = data.draw(st.sampled_from([2, 3]))
    transposed, groups = data.draw(st.booleans()), data.draw(st.sampled_from([1, 1, 2, 3]))

    def ints(low, high):
        return tuple(data.draw(st.integers(low, high)) for _ in range(rank))

    size, kernel, stride, padding, dilation = ints(1, 14), ints(1, 4), ints(1, 4), ints(0, 3), ints(1, 3)
    output_padding = tuple(data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    c_in, c_out = groups * data.draw(st.integers(1, 20)), groups * data.draw(st.integers(1, 40))
    case = (transposed, rank, c_in, c_out, size, kernel, stride, padding, dilation, output_padding, groups)
    x = torch.randint(-3, 4, (data.draw(st.integers(1, 3)), c_in, *size)).float()
    weight = torch.randint(-2, 3, weight_shape(case)).float()
    try:
        exact = run(TORCH[case[:2]], case, x.double(), weight.double(), None)
    except RuntimeError:
        assume(False)
    backend = data.draw(st.sampled_from(backends(device)))
    if data.draw(st.booleans()):
        x = channels_last(x)
    y = run(OURS[case[:2]], case, x.to(device), weight.to(device), None, backend=backend)
    assert torch.equal(y.cpu().double(), exact)


@pytest.mark.parametrize("view", ["sliced", "expanded", "misaligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_conv_strided_input(view, dtype, device, poisoned):
    base = torch.randint(-3, 4, (4, 8, 20, 30)).to(dtype).to(device)
    x = {
        "sliced": lambda: base[:, 1::2, 2:, 3:28:2],
        "expanded": lambda: base[:1, :4].expand(3, 4, 20, 30),
        "misaligned": lambda: base.flatten()[1 : 1 + 2 * 4 * 15 * 16].view(2, 4, 15, 16),
    }[view]()
    weight = torch.randint(-2, 3, (16, 4, 3, 3)).to(dtype).to(device)
    exact = F.conv2d(x.cpu().double(), weight.cpu().double()).to(dtype)
    for backend in backends(device):
        assert torch.equal(functional.conv2d(x, weight, backend=backend).cpu(), exact)


def test_conv_same_and_unbatched(device):
    x = torch.randint(-3, 4, (4, 9, 10), device=device).float()
    weight = torch.randint(-2, 3, (6, 4, 2, 3), device=device).float()
    assert torch.equal(functional.conv2d(x, weight, padding="same"), F.conv2d(x, weight, padding="same"))
    assert torch.equal(functional.conv2d(x, weight, padding="valid"), F.conv2d(x, weight, padding="valid"))
    x3, w3 = x.unsqueeze(1), torch.randint(-2, 3, (4, 3, 1, 2, 2), device=device).float()
    assert torch.equal(functional.conv_transpose3d(x3, w3, stride=2), F.conv_transpose3d(x3, w3, stride=2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_conv_nonfinite_stays_local(value, device):
    """A padded K entry once multiplied a neighbour's infinity by a zero weight, which makes a NaN."""
    x = torch.randint(1, 4, (1, 3, 12, 20), device=device).float()
    x[0, 1, 6, 9] = value
    weight = torch.randint(1, 3, (5, 3, 3, 3), device=device).float()
    torch.backends.cudnn.allow_tf32 = True
    expected = F.conv2d(x.double(), weight.double())
    for backend in backends(device):
        y = functional.conv2d(x, weight, backend=backend)
        assert torch.equal(y.isfinite(), expected.isfinite()), backend
        assert torch.equal(y.isnan(), expected.isnan()), backend


def plant(x):
    """Infinities of both signs and NaNs, one sample each; the fourth stays finite, the last has two."""
    middle, last = tuple(size // 2 for size in x.shape[2:]), tuple(size - 1 for size in x.shape[2:])
    x[(0, x.shape[1] // 2, *middle)] = float("inf")
    x[(1, -1, *last)] = -float("inf")
    x[(2, 0, *middle)] = float("nan")
    x[(4, 0, *(0,) * len(middle))], x[(4, -1, *last)] = float("inf"), -float("inf")
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", CONV_CASES)
def test_conv_nonfinite_as_torch(name, precision, layout):
    """Of the own kernels. With TF32 off both factors are sums, and an infinity times a rest is a NaN too many."""
    case = CONV_CASES[name]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    x, weight = torch.randn(5, case[2], *case[4], device="cuda"), torch.randn(weight_shape(case), device="cuda")
    x, weight = x.to(dtype), weight.to(dtype)
    whole = weight.round() + weight.sign()  # without a rest in TF32
    calls = [(plant(x.clone()), weight), (plant(x.clone()), whole)]
    if not case[0] and not any(case[7]):  # padding's zeros times an infinite weight may be NaN or nothing
        infinite = weight.clone()
        infinite.view(-1)[infinite.numel() // 2] = -float("inf")
        calls += [(x, infinite), (calls[0][0], infinite)]
    for x, weight in calls:
        with torch.backends.cudnn.flags(enabled=False):  # cuDNN saturates some and spreads others
            exact = run(TORCH[case[:2]], case, x.double(), weight.double(), None)
        if layout == "channels_last":
            x = channels_last(x)
        for kernel in ("", ":implicit_gemm", ":hopper", ":rows", ":narrow"):
            backend = "kgopt" + kernel
            if torch.ops.kgopt.explain_conv(x, weight, *case[6:], case[0], backend=backend).startswith("none"):
                continue
            y = run(OURS[case[:2]], case, x, weight, None, backend=backend)
            assert torch.equal(y.isnan(), exact.isnan()), kernel
            assert torch.equal(y.isposinf(), exact.isposinf()), kernel
            assert torch.equal(y.isneginf(), exact.isneginf()), kernel


def test_conv_empty_batch(device):
    x, weight = torch.randn(0, 3, 8, 8, device=device), torch.randn(4, 3, 3, 3, device=device)
    assert functional.conv2d(x, weight).shape == (0, 4, 6, 6)


@pytest.mark.parametrize("name", CONV_CASES)
def test_conv_backward_values(name, device):
    case = conv_case(name, device)
    shapes = [(2, case[2], *case[4]), weight_shape(case), (case[3],)]
    inputs = [torch.randn(s, device=device, dtype=torch.float64) for s in shapes]
    grads = []
    for function in (OURS[case[:2]], TORCH[case[:2]]):
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = run(function, case, *leaves)
        y.backward(torch.linspace(-1, 1, y.numel(), device=device, dtype=torch.float64).view_as(y))
        grads.append([leaf.grad for leaf in leaves])
    for mine, right in zip(*grads, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
def test_conv_deterministic():
    x, weight = torch.randn(2, 8, 64, 64, device="cuda"), torch.randn(64, 8, 3, 3, device="cuda")
    first = functional.conv2d(x, weight, backend="kgopt")
    assert all(torch.equal(functional.conv2d(x, weight, backend="kgopt"), first) for _ in range(3))


def gradients(case, dy, x, weight, backend="auto", mask=(True, True, True), **options):
    _, rank, _, _, _, _, stride, padding, dilation, output_padding, groups = case
    geometry = stride, padding, dilation, output_padding or (0,) * rank, groups, case[0]
    return torch.ops.kgopt.conv_backward(dy, x, weight, *geometry, list(mask), backend=backend, **options)


def aten_gradients(case, dy, x, weight):
    transposed, _, _, c_out, _, _, stride, padding, dilation, output_padding, groups = case
    geometry = stride, padding, dilation, transposed, output_padding, groups
    return torch.ops.aten.convolution_backward(dy, x, weight, [c_out], *geometry, [True, True, True])


# Channels of x few enough for taps and channels to be columns together; depths, planes and kernels of one.
GRADIENT_CASES = {
    **CONV_CASES,
    "1 channel": (False, 3, 1, 32, (5, 9, 40), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), 1),
    "3 channels": (False, 3, 3, 40, (4, 10, 24), (3, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), (0, 0, 0), 1),
    "4 channels": (False, 3, 4, 32, (9, 19, 36), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), 1),
    "2d 4 channels": (False, 2, 4, 64, (37, 72), (3, 3), (1, 1), (1, 1), (1, 1), (0, 0), 1),
    "8 channels": (False, 2, 8, 64, (21, 64), (3, 3), (1, 1), (0, 0), (1, 1), (0, 0), 1),
    "3 channels, 24": (False, 3, 3, 24, (9, 32, 32), (3, 3, 3), (1, 1, 1), (0, 0, 0), (1, 1, 1), (0, 0, 0), 1),
    "3 channels, rows in strides": (
        False,
        3,
        3,
        24,
        (6, 11, 34),
        (3, 3, 3),
        (2, 2, 1),
        (0, 1, 1),
        (1, 1, 1),
        (0, 0, 0),
        1,
    ),
    "2 channels, dilated": (False, 3, 2, 17, (12, 23, 38), (3, 3, 3), (1, 1, 1), (1, 2, 1), (2, 2, 1), (0, 0, 0), 1),
    "7 channels, one row": (False, 2, 7, 65, (5, 300), (1, 3), (1, 1), (0, 0), (1, 1), (0, 0), 1),
    "5 channels, kernel 2": (False, 3, 5, 24, (6, 21, 36), (2, 2, 2), (1, 1, 1), (0, 0, 1), (1, 1, 1), (0, 0, 0), 1),
    "5 deep": (False, 3, 32, 40, (7, 9, 20), (5, 3, 3), (1, 1, 1), (2, 1, 0), (1, 1, 1), (0, 0, 0), 1),
    "2 deep": (False, 3, 16, 32, (6, 9, 20), (2, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), 1),
    "16 channels": (False, 3, 16, 32, (7, 9, 35), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), 1),
    "stride 2": (False, 3, 32, 64, (9, 11, 38), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), (0, 0, 0), 1),
    "stride 2 in planes": (False, 3, 40, 32, (5, 9, 20), (3, 3, 3), (1, 2, 2), (1, 0, 0), (1, 1, 1), (0, 0, 0), 1),
    "2d stride 2": (False, 2, 64, 32, (37, 50), (3, 3), (2, 2), (1, 1), (1, 1), (0, 0), 1),
    "4 channels, stride 2": (False, 3, 4, 32, (9, 19, 36), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), (0, 0, 0), 1),
    "stride 2 transposed": (True, 3, 32, 16, (5, 7, 9), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
    "one position": (False, 3, 32, 32, (1, 1, 1), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), 1),
}
# The last with fp32 accuracy.
GRADIENT_MATH = [*((dtype, True) for dtype in DTYPES[:3]), (torch.float32, False)]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_conv_gradients_small_integers_exact(name, dtype, layout, device, poisoned):
    if device == "cpu" and dtype != torch.float32:
        pytest.skip("on the CPU gradients are ATen's")
    case = GRADIENT_CASES[name]
    torch.backends.cudnn.allow_tf32 = True  # exact all the same, and own kernels for fp32
    x = torch.randint(-3, 4, (2, case[2], *case[4])).to(dtype).to(device)
    weight = torch.randint(-2, 3, weight_shape(case)).to(dtype).to(device)
    if layout == "channels_last":
        x = channels_last(x)
    y = run(TORCH[case[:2]], case, x.cpu().double(), weight.cpu().double(), None)
    dy = torch.randint(-2, 3, y.shape).to(dtype).to(device)
    exact = aten_gradients(case, dy.cpu().double(), x.cpu().double(), weight.cpu().double())
    expected = aten_gradients(case, dy, x, weight)
    maths = (True, False) if dtype == torch.float32 else (True,)
    for backend, given_dy, tf32 in itertools.product(backends(device), (dy, channels_last(dy)), maths):
        grads = gradients(case, given_dy, x, weight, backend, allow_tf32=tf32)
        for mine, right, torchs, like in zip(grads, exact, expected, (x, weight, None), strict=True):
            # cuDNN rounds some halves twice, so its own result counts too; its fp32 kernels transform (Winograd).
            near = not tf32 and float((mine.cpu() - right).abs().max()) <= 1e-5 * float(right.abs().max())
            assert near or torch.equal(mine.cpu(), right.to(dtype)) or torch.equal(mine, torchs), backend
            if like is not None:
                last = torch.channels_last if like.dim() == 4 else torch.channels_last_3d
                assert mine.is_contiguous(memory_format=last if like.stride(1) == 1 else torch.contiguous_format)
    for i in range(3):
        mask = [j == i for j in range(3)]
        alone = gradients(case, dy, x, weight, "auto", mask)
        assert [g.numel() > 0 for g in alone] == mask


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("3d 32 channels", channels_last),
        ("3d 64 channels transposed", channels_last),
        ("2d 96 channels", channels_last),
        ("4 channels", channels_last),
        ("5 deep", channels_last),
        ("stride 2", channels_last),
        ("1 channel", torch.Tensor.contiguous),
        ("3 channels, 24", torch.Tensor.contiguous),
        ("4 channels", torch.Tensor.contiguous),
        ("8 channels", torch.Tensor.contiguous),
        ("3 channels, rows in strides", torch.Tensor.contiguous),
        ("2 channels, dilated", torch.Tensor.contiguous),
        ("7 channels, one row", torch.Tensor.contiguous),
        ("5 channels, kernel 2", torch.Tensor.contiguous),
    ],
)
def test_conv_gradient_values(name, layout, precision, poisoned):
    case = GRADIENT_CASES[name]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    x = layout(torch.randn(2, case[2], *case[4], device="cuda").to(dtype))
    weight = torch.randn(weight_shape(case), device="cuda").to(dtype)
    dy = layout(torch.randn_like(run(TORCH[case[:2]], case, x, weight, None)))
    exact = aten_gradients(case, dy.double(), x.double(), weight.double())
    expected = aten_gradients(case, dy, x, weight)
    also = [None] * 3
    if precision == "tf32":
        also = [g.float() for g in aten_gradients(case, *(round_tf32(t).double() for t in (dy, x, weight)))]
    for scale in (1.0, 0.01, 3.0):
        grads = gradients(case, dy * scale, x, weight, "kgopt")
        for mine, torchs, right, rounded in zip(grads, expected, exact, also, strict=True):
            if precision == "fp16" and scale == 0.01:
                continue  # small halves have fewer digits
            rounded = rounded if rounded is None else rounded * scale
            assert_as_good_as_torch(mine, torchs * scale, right * scale, rounded)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tf32"), GRADIENT_MATH, ids=str)
def test_conv_gradients_of_few_channels_contiguous(dtype, tf32, poisoned):
    """Large enough for the own kernels to be taken by themselves; from slices, and with the same bits each time."""
    torch.backends.cudnn.allow_tf32 = tf32
    wide = torch.randint(-3, 4, (65, 4, 18, 33, 48)).to(dtype).cuda()
    x = wide[1:, :3, :, 1:].requires_grad_()
    weight = torch.randint(-2, 3, (24, 3, 3, 3, 3)).to(dtype).cuda().requires_grad_()
    bias = torch.zeros(24, dtype=dtype, device="cuda", requires_grad=True)
    once, none = [1, 1, 1], [0, 0, 0]
    choice = torch.ops.kgopt.explain_conv(x, weight, once, none, once, none, 1, False, "backward")
    assert choice == "dx kgopt; dweight kgopt"
    y = functional.conv3d(x, weight, bias)
    dy = torch.randint(-2, 3, (2, *y.shape)).to(dtype).cuda()[1]
    exact = torch.ops.aten.convolution_backward(
        *(t.detach().double() for t in (dy, x, weight)), [24], once, none, once, False, none, 1, [True, True, True]
    )
    grads = torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True)
    for mine, right in zip(grads, exact, strict=True):
        assert torch.equal(mine, right.to(dtype))
    again = torch.autograd.grad(y, (x, weight, bias), dy)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("dtype", "tf32"), GRADIENT_MATH, ids=str)
def test_conv_gradients_of_few_channels_nonfinite(value, dtype, tf32):
    """An infinite gradient spoils what it reaches and nothing else, though dx is summed over taps in shared memory."""
    torch.backends.cudnn.allow_tf32 = tf32
    case = GRADIENT_CASES["3 channels, 24"]
    x = torch.randint(1, 4, (2, 3, *case[4])).to(dtype).cuda()
    weight = torch.randint(1, 3, weight_shape(case)).to(dtype).cuda()
    if not tf32:  # rests of TF32 that are not zero, of either sign
        x, weight = (t + 0.3 * torch.rand_like(t) for t in (x, weight))
    dy = torch.ones(run(TORCH[case[:2]], case, x, weight, None).shape, dtype=dtype, device="cuda")
    dy[1, 5, 3, 7, 11] = value
    exact = aten_gradients(case, dy.double(), x.double(), weight.double())
    for mine, right in zip(gradients(case, dy, x, weight, "kgopt"), exact, strict=True):
        assert torch.equal(mine.isfinite(), right.isfinite())
        assert torch.equal(mine.isnan(), right.isnan())


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("at", [(0, 0, 0), (4, 6, 20), (4, 10, 41), (8, 6, 41), (8, 10, 20)], ids=str)
@pytest.mark.parametrize(("dtype", "tf32"), GRADIENT_MATH, ids=str)
def test_conv_weight_gradient_of_few_channels_keeps_nan_in_place(dtype, tf32, at, padding):
    """Behind the last plane, row and column of dy stands x, which was multiplied by zero: a NaN there spread."""
    torch.backends.cudnn.allow_tf32 = tf32
    case = (False, 3, 2, 24, (9, 11, 42), (3, 3, 3), (1, 1, 1), (padding,) * 3, (1, 1, 1), (0, 0, 0), 1)
    x = torch.randn(2, 2, *case[4], device="cuda").to(dtype)
    weight = torch.randn(weight_shape(case), device="cuda").to(dtype)
    x[1, 1, at[0], at[1], at[2]] = float("nan")
    dy = torch.randn_like(run(TORCH[case[:2]], case, x, weight, None))
    exact = aten_gradients(case, dy.double(), x.double(), weight.double())[1]
    mine = gradients(case, dy, x, weight, "kgopt")[1]
    assert not exact.isnan().all()
    assert torch.equal(mine.isnan(), exact.isnan())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 6, 1, 1), (3, 1, 5, 4)], ids=str)
def test_conv_gradients_where_the_gradient_begins_inside_a_tensor(shape):
    """Given the strides of x's layout it began at twice its offset, in other memory."""
    x = channels_last(torch.randn(shape[0], 5, shape[2] + 2, shape[3] + 1, device="cuda", dtype=torch.float64))
    case = (False, 2, 5, shape[1], x.shape[2:], (3, 2), (1, 1), (0, 0), (1, 1), (0, 0), 1)
    weight = torch.randn(weight_shape(case), device="cuda", dtype=torch.float64)
    wide = torch.full((64 + 2 * math.prod(shape),), float("nan"), device="cuda", dtype=torch.float64)
    for offset in (0, 1, 64):
        dy = wide[offset : offset + math.prod(shape)].view(shape).copy_(torch.randn(shape))
        exact = aten_gradients(case, dy.cpu(), x.cpu(), weight.cpu())
        for mine, right in zip(gradients(case, dy, x, weight, "aten"), exact, strict=True):
            torch.testing.assert_close(mine.cpu(), right)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_conv_gradients_of_one_channel_in_both_layouts(transposed):
    """PyTorch keeps cuDNN's plans by the layout of the one-channel tensor, which says nothing of the other's: the first
    of two layouts spoiled the weight's gradient of the second one."""
    torch.backends.cudnn.allow_tf32 = False
    for i, ours_first in enumerate((True, False)):
        size = (3 + i, 6)
        case = (transposed, 2, *((6, 1) if transposed else (1, 6)), size, (1, 1), (1, 1), (0, 0), (1, 1), (0, 0), 1)
        x, dy = torch.randn(2, case[2], *size, device="cuda"), torch.randn(2, case[3], *size, device="cuda")
        weight = torch.randn(weight_shape(case), device="cuda")
        exact = aten_gradients(case, dy.double(), x.double(), weight.double())[1].float()
        of = {True: (channels_last(dy), channels_last(x)), False: (dy, x)}
        for ours in (ours_first, not ours_first):
            if ours:
                y_of = run(OURS[case[:2]], case, of[True][1], weight.requires_grad_(), None)
                grads = [torch.autograd.grad(y_of, weight, of[True][0])[0]]
                weight = weight.detach()
                # dy as the user has it: of one channel that is the same memory, and both layouts'.
                grads += [
                    gradients(case, given, of[True][1], weight, "aten")[1] for given in of[True][:1] + of[False][:1]
                ]
            else:
                grads = [aten_gradients(case, *of[False], weight)[1]]
            for got in grads:
                torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_conv_gradients_of_few_channels_innermost(dtype, poisoned):
    """Large enough for the own kernels to be taken by themselves, through autograd and under torch.compile."""
    torch.backends.cudnn.allow_tf32 = True
    x = channels_last(torch.randint(-3, 4, (1, 32, 48, 90, 101)).to(dtype).cuda()).requires_grad_()
    weight = torch.randint(-2, 3, (40, 32, 3, 3, 3)).to(dtype).cuda().requires_grad_()
    bias = torch.zeros(40, dtype=dtype, device="cuda", requires_grad=True)
    dy = channels_last(torch.randint(-2, 3, (1, 40, 48, 90, 101)).to(dtype).cuda())
    once, none = [1, 1, 1], [0, 0, 0]
    if torch.cuda.get_device_capability() == (9, 0):
        choice = torch.ops.kgopt.explain_conv(x, weight, once, once, once, none, 1, False, "backward")
        assert choice == "dx kgopt; dweight kgopt"
    wide = [t.detach().double() for t in (dy, x, weight)]
    exact = torch.ops.aten.convolution_backward(*wide, [40], once, once, once, False, none, 1, [True, True, True])

    def conv(x, weight, bias):
        return functional.conv3d(x, weight, bias, padding=1)

    for function in (conv, torch.compile(conv, backend="aot_eager", fullgraph=True)):
        grads = torch.autograd.grad(function(x, weight, bias), (x, weight, bias), dy)
        assert torch.equal(grads[0], exact[0].to(dtype))
        assert torch.equal(grads[1], exact[1].to(dtype))
        assert grads[0].stride() == x.stride()
        again = torch.autograd.grad(function(x, weight, bias), (x, weight, bias), dy)
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_conv_gradients_through_the_op(rank, compiled, device, monkeypatch):
    """The route of CUDA tensors, on any device; with create_graph it is ATen's, which has a second derivative."""
    calls = []
    op = torch.ops.kgopt.conv_backward

    def taken(dy, x):
        calls.append(1)
        return not torch.is_grad_enabled()

    monkeypatch.setattr("kgopt.ops.conv_gradients._own_gradients", taken)
    x = channels_last(torch.randn(2, 4, *(7, 6, 5)[:rank], device=device)).requires_grad_()
    weight = torch.randn(6, 4, *(3,) * rank, device=device, requires_grad=True)
    bias = torch.randn(6, device=device, requires_grad=True)
    ours = (functional.conv2d, functional.conv3d)[rank - 2]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def both(x, weight, bias):
        return functional.activation(ours(x, weight, bias, padding=1), "relu")

    function = both
    if compiled:
        from torch._dynamo.backends.common import aot_autograd

        torch._dynamo.reset()
        function = torch.compile(both, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    y = function(x, weight, bias)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, (x, weight, bias), dy)
    expected = torch.autograd.grad(
        F.relu((F.conv2d, F.conv3d)[rank - 2](x, weight, bias, padding=1)), (x, weight, bias), dy
    )
    for mine, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, right)
    assert calls
    if compiled:
        assert any(node.target == op.default for graph in graphs for node in graph.graph.nodes)
    else:
        (dx,) = torch.autograd.grad(ours(x, weight, bias).square().sum(), x, create_graph=True)
        dx.square().sum().backward()
        assert weight.grad is not None


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
@pytest.mark.parametrize("name", CONV_CASES)
def test_conv_rounds_fp32_weights(name, dtype, layout, device, poisoned):
    """fp32 weights beside a half x: the bits that rounded weights give, with fp32 gradients."""
    case = conv_case(name, device)
    x = torch.randn(2, case[2], *case[4]).to(dtype).to(device)
    if layout == "channels_last":
        x = channels_last(x)
    weight = torch.randn(weight_shape(case)).to(device).requires_grad_()
    bias = torch.randn(case[3]).to(dtype).float().to(device).requires_grad_()  # fp32 sums may take it unrounded
    x.requires_grad_()
    for backend in backends(device):
        y = run(OURS[case[:2]], case, x, weight, bias, backend=backend)
        dy = torch.randn_like(y)
        wide = torch.autograd.grad(y, (x, weight, bias), dy)
        assert [g.dtype for g in wide] == [dtype, torch.float32, torch.float32]
        narrow_weight, narrow_bias = (t.detach().to(dtype).requires_grad_() for t in (weight, bias))
        expected = run(OURS[case[:2]], case, x, narrow_weight, narrow_bias, backend=backend)
        assert y.dtype == dtype
        assert torch.equal(y, expected)
        narrow = torch.autograd.grad(expected, (x, narrow_weight, narrow_bias), dy)
        if device == "cpu" or backend == "kgopt":  # cuDNN's sums may differ from call to call
            assert all(torch.equal(w.to(dtype), n) for w, n in zip(wide, narrow, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("c_out", [32, 40, 64])
@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
def test_conv_rounds_fp32_weights_on_wgmma(dtype, c_out, poisoned):
    """Those of the kernels that read fp32 weights themselves, after a change in place and in a captured graph."""
    x = channels_last(torch.randn(1, 32, 12, 30, 40).to(dtype).cuda()).requires_grad_()
    weight = torch.randn(c_out, 32, 3, 3, 3, device="cuda", requires_grad=True)
    bias = torch.randn(c_out, device="cuda").to(dtype).float().requires_grad_()

    def step(weight, bias):
        y = functional.conv3d(x, weight, bias, padding=1, backend="kgopt")
        return y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))

    def check(values):
        y, dx, dweight = values
        expected = step(*(t.detach().to(dtype).requires_grad_() for t in (weight, bias)))
        assert torch.equal(y, expected[0])
        assert torch.equal(dx, expected[1])
        assert torch.equal(dweight.to(dtype), expected[2])

    check(step(weight, bias))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    check(step(weight, bias))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(weight, bias)
    with torch.no_grad():
        weight.mul_(-0.5)
    graph.replay()
    check(captured)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_conv_gives_aten_weights_as_it_reads_them(dtype, rank, transposed):
    """Beside a channels_last x ATen copied a contiguous weight by single elements, forward and backward, and a weight
    of another dtype was copied a second time."""
    torch.manual_seed(0)
    form = {2: torch.channels_last, 3: torch.channels_last_3d}[rank]
    x, dy = (
        torch.randn(2, 48, *[7] * rank, device="cuda", dtype=dtype).contiguous(memory_format=form) for _ in range(2)
    )
    weight = torch.randn(48, 48, *[3] * rank, device="cuda")
    ones, zeros = [1] * rank, [0] * rank
    conv = getattr(torch.ops.kgopt, f"conv_transpose{rank}d" if transposed else f"conv{rank}d")
    geometry = ones, ones, ones, transposed, zeros, 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        y = conv(x, weight, None, padding=ones, backend="aten")
        backward = torch.ops.kgopt.conv_backward
        dx, dweight, _ = backward(
            dy, x, weight, ones, ones, ones, zeros, 1, transposed, [True, True, False], backend="aten"
        )
    narrow = weight.to(dtype)
    expected = torch.ops.aten.convolution(x, narrow, None, *geometry)
    theirs = torch.ops.aten.convolution_backward(dy, x, narrow, None, *geometry, [True, True, False])
    for ours, its in zip((y, dx, dweight), (expected, *theirs[:2]), strict=True):
        torch.testing.assert_close(ours, its.to(ours.dtype), rtol=1e-2, atol=1e-2 * its.abs().max().item())
    assert dweight.dtype is torch.float32
    assert dweight.is_contiguous()
    copied = {tuple(e.input_shapes[0]) for e in profile.events() if e.name == "aten::copy_" and e.input_shapes}
    assert tuple(weight.shape) not in copied


def test_conv_refuses_other_weight_dtypes(device):
    x = torch.randn(1, 2, 4, 4, device=device)
    weight = torch.randn(3, 2, 3, 3, device=device)
    for image, other in ((x, weight.bfloat16()), (x.bfloat16(), weight.double()), (x.double(), weight)):
        with pytest.raises(RuntimeError, match=r"weight has dtype .*, expected the dtype of x"):
            functional.conv2d(image, other)
    with pytest.raises(RuntimeError, match="bias has dtype bfloat16"):
        functional.conv2d(x.bfloat16(), weight, weight[:, 0, 0, 0].bfloat16())


def test_depthwise_volumes_with_an_odd_stride_of_a_size_of_1(device):
    """PyTorch's kernel stepped by that stride, ahead of x, on a GPU: an illegal address, or NaN of whose memory lies
    there (in ``F.conv3d`` alone, too)."""
    x = torch.full((2, 17, 37, 7, 1), math.nan, dtype=torch.float32, device=device)[1:]
    x.normal_()
    odd = x.as_strided(x.shape, [3, 259, 7, 1, 12345])
    weight, bias = torch.randn(17, 1, 5, 3, 3, device=device, requires_grad=True), torch.randn(17, device=device)
    call = {"padding": (4, 2, 2), "groups": 17, "allow_tf32": False}
    results = []
    for one in (odd, x):
        y = functional.conv3d(one, weight, bias, **call)
        results.append((y, *torch.autograd.grad(y.square().sum(), [weight])))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    divided = torch.ops.kgopt.conv_add(
        odd, weight, bias, None, [1] * 3, [4, 2, 2], [1] * 3, [0] * 3, 17, False, 2.0, "none"
    )
    torch.testing.assert_close(divided, results[1][0] / 2, rtol=1e-5, atol=1e-5)
