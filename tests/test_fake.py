"""Fake kernels: shapes, strides and dtypes without data are those of the real kernels."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kgopt.nn
from opcases import NAMES, PIPELINE, small_calls
from shapes import CONV_CASES

OPS = torch.ops.kgopt


def as_tuple(out):
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)


def to_meta(args):
    return [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]


def assert_same_metadata(fakes, reals):
    for fake, real in zip(as_tuple(fakes), as_tuple(reals), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        # Strides of dims of size 1 mean nothing, and memory formats are read from all of them: they must agree too.
        assert fake.stride() == real.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_meta_is_as_real(index, channels_last, dtype, device):
    name, args, kwargs = small_calls(device, dtype, channels_last)[index]
    op = getattr(OPS, name)
    assert_same_metadata(op(*to_meta(args), **kwargs), op(*args, **kwargs))


@pytest.mark.parametrize("last", ["neither", "x", "weight"])
@pytest.mark.parametrize("name", CONV_CASES)
def test_conv_meta_is_as_real(name, last, device):
    transposed, rank, c_in, c_out, size, kernel, stride, padding, dilation, output_padding, groups = CONV_CASES[name]
    memory_format = torch.channels_last if rank == 2 else torch.channels_last_3d
    x = torch.randn(2, c_in, *size, device=device)
    shape = (c_in, c_out // groups, *kernel) if transposed else (c_out, c_in // groups, *kernel)
    weight = torch.randn(shape, device=device)
    x = x.contiguous(memory_format=memory_format) if last == "x" else x
    weight = weight.contiguous(memory_format=memory_format) if last == "weight" else weight
    more = (output_padding, groups, dilation) if transposed else (dilation, groups)
    args = (x, weight, None, stride, padding, *more)
    op = getattr(OPS, f"conv{'_transpose' if transposed else ''}{rank}d")
    assert_same_metadata(op(*to_meta(args)), op(*args))


# Layouts that are neither contiguous nor channels_last, or both, are where strides go wrong.
LAYOUTS = {
    "one channel": lambda t: t[:, :1],
    "one position": lambda t: t[:, :, :1, :1],
    "one position, channels_last": lambda t: t.contiguous(memory_format=torch.channels_last)[:, :, :1, :1],
    "sliced": lambda t: t[:, :, 1:, ::2],
    "sliced channels_last": lambda t: t.contiguous(memory_format=torch.channels_last)[:, :, 1:, ::2],
    "half of the channels of channels_last": lambda t: t.contiguous(memory_format=torch.channels_last)[:, :2],
    "transposed": lambda t: t.transpose(2, 3),
    "expanded": lambda t: t[:1].expand(3, -1, -1, -1),
    "empty batch": lambda t: t[:0],
    "empty batch, channels_last": lambda t: t.contiguous(memory_format=torch.channels_last)[:0],
    "no position": lambda t: t[:, :, :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_as_real(layout, device):
    x = LAYOUTS[layout](torch.randn(2, 4, 6, 8, device=device))
    meta = LAYOUTS[layout](torch.randn(2, 4, 6, 8, device="meta"))
    calls = [
        lambda t: OPS.group_norm(t, 1),
        lambda t: OPS.group_norm_fwd(t, 1, None, None, 1e-5, "silu", "relu"),
        lambda t: OPS.group_norm_mean_fwd(t, 1),
        lambda t: OPS.group_stats(t, 1),
        lambda t: OPS.group_norm_backward(t, t, *OPS.group_stats(t, 1), 1),
        lambda t: OPS.activation(t, "gelu"),
        lambda t: OPS.activation_backward(t, t, "gelu"),
        lambda t: OPS.logsumexp(t, [1]),
        lambda t: OPS.logsumexp(t, [0, -1], True),
        lambda t: OPS.logsumexp_backward(OPS.logsumexp(t, [1]), t, OPS.logsumexp(t, [1]), [1]),
        lambda t: OPS.mean(t, []),
        lambda t: OPS.mean_backward(OPS.mean(t, [2]), t.shape, [2]),
    ]
    for call in calls:
        try:
            real = call(x)
        except RuntimeError:  # a norm of no positions is refused where PyTorch refuses it, which depends on its version
            assert layout == "no position"
            continue
        assert_same_metadata(call(meta), real)


def test_modules_on_meta():
    """A model too large for this machine can be built and shaped: nothing is computed."""
    module = kgopt.nn.ConvTranspose3dReLUGroupNorm(64, 128, 3, 8, device="meta")
    y = module(torch.empty(1024, 64, 256, 256, 256, device="meta"))
    assert y.shape == (1024, 128, 258, 258, 258)
    assert y.is_meta


def test_fake_tensor_mode_keeps_the_device():
    # Not the current device where there is a choice; without a GPU any index will do.
    device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else 1)
    with FakeTensorMode():
        x = torch.empty(2, 8, 5, 5, device=device)
        assert OPS.group_norm(x, 4).device == device
        assert all(t.device == device for t in OPS.group_norm_mean_fwd(x, 4))


def test_bad_shapes_without_data():
    x = torch.empty(2, 3, 8, 8, device="meta")
    with pytest.raises(RuntimeError, match=r"x has shape \[2, 3, 8, 8\] .*expected 5 dimensions"):
        OPS.conv3d(x, torch.empty(4, 3, 3, 3, 3, device="meta"))
    with pytest.raises(RuntimeError, match=r"weight has shape \[4, 5, 3, 3\], expected it to fit C = 3"):
        OPS.conv2d(x, torch.empty(4, 5, 3, 3, device="meta"))
    with pytest.raises(RuntimeError, match="expected 4 dimensions"):
        getattr(OPS, PIPELINE)(x[0], torch.empty(4, 3, 3, 3, device="meta"), None, 2)
