"""Gradients of contiguous tensors from copies in channels_last, and with fp32 accuracy from fp16 terms."""

from __future__ import annotations

import pytest
import torch

from kgopt.ops.conv_gradients import conv_gradients
from tolerances import relative_error, round_tf32

# n, channels, size, kernel, stride, padding, transposed; every one of more than a million outputs
CASES = {
    "second pipeline's": (4, (64, 128), (14, 32, 32), (3, 3, 3), 1, 0, True),
    "padded": (2, (64, 64), (30, 32, 36), (3, 3, 3), 1, 1, False),
    "odd sizes": (3, (40, 72), (13, 33, 37), (3, 3, 3), 1, 1, False),
    "strided": (4, (64, 128), (24, 32, 36), (3, 3, 3), 2, 1, False),
    "2D": (4, (64, 64), (72, 66), (3, 3), 1, 1, False),
    "1 x 1": (2, (96, 64), (20, 32, 33), (1, 1, 1), 1, 0, False),
    "strided, transposed": (4, (64, 64), (12, 16, 18), (2, 2, 2), 2, 0, True),
}


def make(case, dtype):
    n, (c_in, c_out), size, kernel, stride, padding, transposed = CASES[case]
    rank = len(size)
    x = torch.randn(n, c_in, *size, device="cuda").to(dtype)
    weight = (torch.randn((c_in, c_out) if transposed else (c_out, c_in), device="cuda") * 0.1).to(dtype)
    weight = weight.view(*weight.shape, *[1] * rank) * torch.rand(kernel, device="cuda").to(dtype)
    geometry = [stride] * rank, [padding] * rank, [1] * rank, [0] * rank, 1, transposed
    stride, padding, dilation, output_padding, groups, transposed = geometry
    shape = torch.convolution(x, weight, None, stride, padding, dilation, transposed, output_padding, groups).shape
    return torch.randn(shape, device="cuda").to(dtype), x, weight, geometry


def by_torch(dy, x, weight, geometry):
    stride, padding, dilation, output_padding, groups, transposed = geometry
    sizes = [dy.shape[1]], stride, padding, dilation, transposed, output_padding, groups, (True, True, True)
    return torch.ops.aten.convolution_backward(dy, x, weight, *sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_contiguous_tensors(case, precision, poisoned):
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    dy, x, weight, geometry = make(case, dtype)
    exact = by_torch(*(t.double() for t in (dy, x, weight)), geometry)
    theirs = by_torch(dy, x, weight, geometry)
    bars = [relative_error(t, e) for t, e in zip(theirs, exact, strict=True)]
    if precision == "tf32":
        ideal = by_torch(*(round_tf32(t).double() for t in (dy, x, weight)), geometry)
        bars = [max(bar, relative_error(i, e)) for bar, i, e in zip(bars, ideal, exact, strict=True)]
    mine = conv_gradients((True, True, True), dy, x, weight, geometry)
    tiny = 1e-6 if dtype is torch.float32 else 1e-3
    for name, m, e, bar in zip(("x", "weight", "bias"), mine, exact, bars, strict=True):
        assert relative_error(m, e) <= 2 * bar + tiny, (name, relative_error(m, e), bar)
    assert mine[0].is_contiguous()
    assert mine[1].is_contiguous()
    for wanted in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)):
        for one, all_of_it, is_wanted in zip(
            conv_gradients(wanted, dy, x, weight, geometry), mine, wanted, strict=True
        ):
            assert (one is not None) == is_wanted
            assert one is None or relative_error(one, all_of_it) < (1e-2 if dtype.itemsize == 2 else 1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's")
@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16"])
def test_contiguous_gradients_say_that_they_are_copied(precision):
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    x = torch.empty(16, 64, 32, 32, 32, device="cuda", dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    weight = torch.empty(64, 128, 3, 3, 3, device="cuda", dtype=x.dtype)
    arguments = [1] * 3, [0] * 3, [1] * 3, [0] * 3, 1, True, "backward"
    text = torch.ops.kgopt.explain_conv(x, weight, *arguments)
    assert ("both" if precision != "fp32" else "dx") + " from copies of x and dy in channels_last" in text
    small = torch.ops.kgopt.explain_conv(x[:, :, :2, :4, :4].contiguous(), weight, *arguments)
    assert "copies of x" not in small


@pytest.mark.gpu
@pytest.mark.parametrize("spread", ["channels far apart", "an outlier", "tiny", "huge", "zeros"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_weight_gradients_of_split_operands(layout, spread, poisoned):
    """The scale is one for a tensor: what lies far below its largest value keeps few digits, beside all of it."""
    torch.backends.cudnn.allow_tf32 = False
    dy, x, weight, geometry = make("second pipeline's", torch.float32)
    if spread == "channels far apart":
        x *= 10.0 ** torch.linspace(-6, 0, x.shape[1], device="cuda").view(1, -1, 1, 1, 1)
        dy *= 10.0 ** torch.linspace(0, 5, dy.shape[1], device="cuda").view(1, -1, 1, 1, 1)
    elif spread == "an outlier":
        x[0, 3, 4, 5, 6] = 1e6
    elif spread == "zeros":
        dy.zero_()
    else:
        x *= 1e-30 if spread == "tiny" else 1e25
    if layout == "channels_last":
        dy, x = (t.contiguous(memory_format=torch.channels_last_3d) for t in (dy, x))
    exact = by_torch(*(t.double() for t in (dy, x, weight)), geometry)[1]
    theirs = by_torch(dy, x, weight, geometry)[1]
    mine = conv_gradients((False, True, False), dy, x, weight, geometry)[1]
    assert relative_error(mine, exact) <= 2 * relative_error(theirs, exact) + 1e-6
    assert torch.equal(mine, conv_gradients((False, True, False), dy, x, weight, geometry)[1])
    x[0, 0, 0, 0, 0] = float("nan")
    assert conv_gradients((False, True, False), dy, x, weight, geometry)[1][0].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("rank", [2, 3])
def test_one_position(rank, n, precision, poisoned):
    """Its strides say nothing of the format that x has: by them the gradient of x was allocated, and a kernel of
    channels_last wrote it, to misaligned addresses."""
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    size, kernel = (3, 5, 3)[:rank], (2, 3, 2)[:rank]
    form = {2: torch.channels_last, 3: torch.channels_last_3d}[rank]
    x = torch.randn(n, 48, *size, device="cuda").to(dtype).contiguous(memory_format=form)
    weight = torch.randn(48, 48, *kernel, device="cuda").to(dtype)
    geometry = [1] * rank, [0] * rank, [2] * rank, [0] * rank, 1, False
    dy = torch.randn(n, 48, *[1] * rank, device="cuda").to(dtype)
    exact = by_torch(*(t.double() for t in (dy, x, weight)), geometry)
    stride, padding, dilation, output_padding, groups, transposed = geometry
    tail = stride, padding, dilation, output_padding, groups, transposed, [True, True, False]
    mine = torch.ops.kgopt.conv_backward(dy, x, weight, *tail, backend="kgopt", allow_tf32=precision == "tf32")
    for name, m, e in zip(("x", "weight"), mine, exact, strict=False):
        assert relative_error(m, e) <= {"fp32": 4e-6, "tf32": 2e-3, "fp16": 1e-3, "bf16": 8e-3}[precision], name
    assert mine[0].stride() == x.stride()
