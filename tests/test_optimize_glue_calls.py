"""Calls that glue recognizes (kgopt.rewrite.glue.calls), and the ways to compute them, against PyTorch."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from kgopt import accuracy
from kgopt._layout import is_dense_channels_last
from kgopt.rewrite import glue
from kgopt.rewrite.glue import kernels, pools, search
from shapes import make

SHAPES = [(2, 3, 4, 5), (1, 8, 6, 4), (1, 16, 3, 4, 8), (2, 3, 1, 5, 7), (1, 1, 1, 1, 1), (1, 4, 2, 3, 2)]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def draw(shape, dtype, channels_last, device):
    return make(shape, dtype, device, "channels_last" if channels_last else "contiguous")[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_have_the_bits_of_pytorch(shape, channels_last, dtype, device, poisoned):
    x = draw(shape, dtype, channels_last, device)
    dims = x.dim() - 2
    for factors in ((2,) * dims, (1,) * (dims - 1) + (2,), (2,) * (dims - 1) + (1,), (3,) * dims):
        y = glue.upsample_nearest(x, factors)
        assert torch.equal(y, F.interpolate(x, scale_factor=tuple(map(float, factors))))
        assert y.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", [(8, 16), (3, 5, 1), (4, 4)], ids=str)
def test_channels_last_cat_has_the_bits_of_pytorch(widths, dtype, device, poisoned):
    for sizes in ((5, 4), (3, 5, 4)):
        parts = [draw((2, c, *sizes), dtype, True, device) for c in widths]
        if any(not is_dense_channels_last(p) for p in parts):
            continue
        y = glue.recognize(torch.cat, (parts, 1), {}).run()
        assert torch.equal(y, torch.cat(parts, 1))
        assert y.stride() == torch.cat(parts, 1).stride()
    parts = [draw((2, 8, 5, 4), dtype, True, device) for _ in range(2)]
    assert glue.recognize(torch.cat, (parts,), {"dim": -3}) is not None
    for dim in (0, 2, 3, -1):
        y = glue.recognize(torch.cat, (parts, dim), {}).run()
        assert torch.equal(y, torch.cat(parts, dim))
        assert y.is_contiguous(memory_format=torch.channels_last)
    other = draw((2, 8, 5, 3), dtype, True, device)
    assert torch.equal(glue.recognize(torch.cat, ([parts[0], other], 3), {}).run(), torch.cat([parts[0], other], 3))
    for refused in ((parts, 4), ([parts[0], other], 2), (parts[:1], 1), ([parts[0], parts[1].contiguous()], 1)):
        assert glue.recognize(torch.cat, refused, {}) is None
    assert glue.recognize(torch.cat, (parts, 1), {"out": torch.empty(0)}) is None


def test_what_is_recognized():
    x = torch.randn(1, 2, 4, 6)
    known = functools.partial(glue.recognize, F.interpolate, (x,))
    assert known({"scale_factor": 2}).argument == (2, 2)
    assert known({"scale_factor": (2.0, 1.0)}).argument == (2, 1)
    assert known({"size": (8, 18)}).argument == (2, 3)
    assert known({"size": 12}).argument == (3, 2)
    assert known({"scale_factor": 2, "mode": "bilinear"}).kind == "linear"
    for refused in (
        {"scale_factor": 1.5},
        {"size": (3, 12)},
        {"size": (4, 10)},
        {"size": (6, 7)},
        {"size": (5,)},
        {"size": (13,)},
        {"size": (5, 7), "mode": "nearest-exact"},
        {"size": (5, 7), "mode": "bilinear"},
        {"size": (4, 6)},
        {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
        {"scale_factor": 3, "mode": "bilinear"},
        {"scale_factor": 2, "mode": "bicubic"},
        {"scale_factor": 2, "mode": "trilinear"},
        {"scale_factor": 2, "mode": "bilinear", "antialias": True},
        {},
        {"size": (8, 12), "scale_factor": 2},
    ):
        assert known(refused) is None, refused
    for size, argument in (((5, 7), (1, 0, 1, 0)), ((4, 7), (1, 0, 0, 0)), (torch.Size((5, 6)), (0, 0, 1, 0))):
        call = known({"size": size})
        assert (call.kind, call.argument) == ("repeated", argument)
    assert known({"size": 5}) is None  # one position more, and one less
    for size in ((7, 6), (9, 12), (8, 11), (5, 13), 11):
        assert known({"size": size}).kind == "resized"
    assert glue.recognize(F.pad, (x, (1, 1, 1, 1), "replicate"), {}).argument == (1, 1, 1, 1)
    assert glue.recognize(F.pad, (x, (5, 0, 3, 1), "reflect"), {}).argument == (5, 0, 3, 1)
    for pad, mode in (
        ((1, 1, 1, 1), "constant"),
        ((1, 1, 1, 1), "circular"),
        ((1, -1, 1, 1), "replicate"),
        ((1, 1), "replicate"),
        ((6, 1, 1, 1), "reflect"),
        ((1, 1, 1, 4), "reflect"),
    ):
        assert glue.recognize(F.pad, (x, pad, mode), {}) is None
    assert glue.recognize(F.interpolate, (x.transpose(2, 3),), {"scale_factor": 2}) is None
    assert glue.recognize(F.interpolate, (x.int(),), {"scale_factor": 2}) is None
    assert glue.recognize(F.interpolate, (x.clone().requires_grad_(),), {"scale_factor": 2}) is None
    assert glue.recognize(torch.relu, (x,), {}) is None


def test_padding_by_name_is_known_in_numbers():
    x, weight, bias = torch.randn(1, 4, 9, 9), torch.randn(6, 4, 3, 5), torch.randn(6)
    for name, dilation, padding in (("same", (2, 1), (2, 2)), ("valid", (1, 1), (0, 0)), ("same", 3, (3, 6))):
        given = {"padding": name, "dilation": dilation}
        call = glue.recognize(F.conv2d, (x, weight, bias), given)
        assert call.argument[3] == padding
        torch.testing.assert_close(call.run(), F.conv2d(x, weight, bias, **given))
    even = torch.randn(6, 4, 2, 2)
    for given in (
        (F.conv2d, (x, even, bias), {"padding": "same"}),  # more on one side
        (F.conv2d, (x, weight, bias), {"padding": "same", "stride": 2}),  # PyTorch refuses the others
        (F.conv2d, (x, weight, bias), {"padding": "full"}),
        (F.conv_transpose2d, (x, torch.randn(4, 6, 3, 3), bias), {"padding": "same"}),
    ):
        assert glue.recognize(*given) is None


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_one_position_more_has_the_bits_of_pytorch(channels_last, device, poisoned):
    for shape, size in (((2, 8, 5, 7), (6, 7)), ((1, 4, 3, 5, 7), (4, 6, 8)), ((1, 3, 4, 2, 6), (4, 3, 6))):
        x = draw(shape, torch.float32, channels_last, device)
        y = glue.recognize(F.interpolate, (x,), {"size": size}).run()
        assert torch.equal(y, F.interpolate(x, size=size))
        assert y.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)


def test_one_position_more_of_every_size(device):
    """Where PyTorch's float32 would find another source, the call is PyTorch's."""
    widths = range(2, 2100) if device == "cpu" else (2, 3, 31, 159, 1000, 2047)
    for width in widths:
        x = torch.arange(width, device=device, dtype=torch.float32).view(1, 1, 1, width)
        call = glue.recognize(F.interpolate, (x,), {"size": (1, width + 1)})
        assert (call is None) is (width + 1 > 2048)
        if call is not None:
            assert torch.equal(call.run(), F.interpolate(x, size=(1, width + 1)))


RESIZED = [  # as decoders ask for what an encoder has halved, and others
    ((2, 8, 5, 7), (9, 13)),
    ((1, 3, 5, 7), (11, 14)),
    ((1, 16, 3, 4, 5), (5, 9, 10)),
    ((2, 3, 3, 4, 5), (6, 7, 9)),
    ((1, 4, 3, 4, 5), (7, 8, 11)),
    ((1, 8, 6, 2, 1), (6, 5, 2)),
    ((1, 2, 4, 6), (13, 17)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("shape", "size"), RESIZED, ids=str)
def test_other_sizes_have_the_bits_of_pytorch(shape, size, channels_last, dtype, device, poisoned):
    x = draw(shape, dtype, channels_last, device)
    call = glue.recognize(F.interpolate, (x,), {"size": size})
    assert call.kind == "resized"
    y = call.run()
    assert torch.equal(y, F.interpolate(x, size=size))
    assert y.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("shape", "pad"),
    [
        ((2, 8, 5, 7), (1, 1, 1, 1)),
        ((1, 3, 5, 7), (6, 2, 0, 4)),
        ((1, 16, 3, 4, 8), (1, 1, 1, 1, 1, 1)),
        ((2, 4, 3, 4, 5), (0, 3, 2, 0, 2, 1)),
        ((1, 2, 1, 4), (0, 0, 0, 0)),
    ],
)
def test_reflection_has_the_bits_of_pytorch(shape, pad, channels_last, dtype, device, poisoned):
    x = draw(shape, dtype, channels_last, device)
    y = glue.recognize(F.pad, (x, pad, "reflect"), {}).run()
    assert torch.equal(y, F.pad(x, pad, "reflect"))
    assert y.is_contiguous(memory_format=FORMATS[x.dim()] if channels_last else torch.contiguous_format)


def test_runs_are_pytorchs_sources(device):
    """Of every size to every other: also those that are left out, and those that no call is replaced for."""
    for size in range(1, 40):
        x = torch.arange(size, dtype=torch.float32, device=device).view(1, 1, 1, size)
        for wanted in range(1, 90):
            runs = kernels.runs_to(size, wanted)
            assert torch.equal(kernels.repeated(x, [((0, 1, 1),), runs]), F.interpolate(x, size=(1, wanted)))


POOLED = [  # the function, arguments, sizes of x
    (F.adaptive_avg_pool2d, (2,), (16, 24)),
    (F.adaptive_avg_pool2d, ((3, 2),), (31, 16)),
    (F.adaptive_avg_pool2d, ((None, 2),), (3, 131)),
    (F.adaptive_avg_pool3d, ((2, 1, 3),), (8, 9, 11)),
    (F.avg_pool2d, (8,), (17, 31)),
    (F.avg_pool2d, ((16, 24),), (16, 24)),
    (F.avg_pool2d, ((4, 16), None, 0, True), (8, 32)),
    (F.avg_pool3d, (4, (4,)), (8, 9, 10)),
    (F.adaptive_max_pool2d, (3,), (40, 41)),
    (F.adaptive_max_pool3d, (1,), (4, 5, 6)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("function", "args", "sizes"), POOLED)
def test_pooling_to_a_few_results(function, args, sizes, channels_last, dtype, device, poisoned):
    if function is F.avg_pool3d and device == "cpu" and dtype.itemsize == 2:
        pytest.skip("PyTorch's avg_pool3d takes no half types on a CPU")
    x = draw((2, 5, *sizes), dtype, channels_last, device) + 3
    y, expected = glue.recognize(function, (x, *args), {}).run(), function(x, *args)
    assert y.stride() == expected.stride()
    exact = function(x.double(), *args)
    yardstick = accuracy.relative_error(expected, exact)
    assert accuracy.relative_error(y, exact) <= accuracy.allowed(dtype, yardstick)
    if glue.recognize(function, (x, *args), {}).argument.how == "amax":
        assert torch.equal(y, expected)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[0, 1, -1] = x[1, 2, 0] = bad
        y, expected = glue.recognize(function, (x, *args), {}).run(), function(x, *args)
        torch.testing.assert_close(y.isnan(), expected.isnan())
        torch.testing.assert_close(y.isinf(), expected.isinf())


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("function", "args", "sizes"),
    [
        (F.adaptive_avg_pool2d, (3,), (41, 50)),
        (F.avg_pool2d, (8,), (17, 31)),
        (F.adaptive_max_pool3d, (2,), (8, 9, 10)),
        (F.interpolate, ((9, 13),), (5, 7)),
        (F.pad, ((1, 2, 3, 0), "reflect"), (5, 7)),
    ],
)
def test_what_is_faster_and_right_is_taken(function, args, sizes, dtype, channels_last, device, monkeypatch):
    """As a measurement on a GPU judges it; what is wrong is not."""
    monkeypatch.setattr(search, "SMALL", 0)
    monkeypatch.setattr(search.clocks, "busy_both", lambda *_: (2.0, 1.0))
    x = draw((2, 5, *sizes), dtype, channels_last, device)
    call = glue.recognize(function, (x, *args), {}).inside(True)  # on a GPU PyTorch pads into a contiguous tensor
    assert search._fastest(call, lambda: function(x, *args)) == "kgopt"
    monkeypatch.setattr(glue.Call, "run", lambda call, option="": function(call.x, *args) * 1.05)
    assert search._fastest(call, lambda: function(x, *args)) == ""


def test_pooling_that_is_pytorchs():
    x = torch.randn(1, 2, 32, 48)
    for function, args, more in (
        (F.adaptive_avg_pool2d, (1,), {}),  # a reduction already
        (F.adaptive_avg_pool2d, (16,), {}),  # many small windows
        (F.adaptive_avg_pool2d, ((64, 2),), {}),  # windows that repeat
        (F.adaptive_avg_pool2d, ((2, 2, 2),), {}),
        (F.adaptive_max_pool2d, (2,), {"return_indices": True}),
        (F.avg_pool2d, (8,), {"stride": 4}),
        (F.avg_pool2d, (8,), {"padding": 1}),
        (F.avg_pool2d, (10,), {"ceil_mode": True}),
        (F.avg_pool2d, (8,), {"divisor_override": 3}),
        (F.avg_pool2d, (64,), {}),  # which PyTorch refuses
        (F.avg_pool2d, (8,), {"of": 3}),
    ):
        assert glue.recognize(function, (x, *args), more) is None, (function, args, more)
    assert glue.recognize(F.adaptive_avg_pool2d, (x[0], 2), {}) is None
    assert glue.recognize(F.avg_pool2d, (x, 8, ()), {}).argument == pools.Pool("mean", (32, 48), (4, 6))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("way", "weight", "stride"),
    [
        ("each channel", (8, 1, 1, 1), 1),
        ("each channel", (8, 1, 1, 1, 1), 1),
        ("repeated channels", (16, 1, 3, 3), 1),
        ("repeated channels", (24, 1, 3, 5, 5), 2),
    ],
)
def test_ways_of_depthwise_convolutions(way, weight, stride, bias, channels_last, dtype, poisoned):
    rank = len(weight) - 2
    x = draw((2, 8, 9, 11, 12)[: rank + 2], dtype, channels_last, "cuda")
    w, b = (torch.randn(shape, device="cuda").to(dtype) for shape in (weight, weight[:1]))
    b = b if bias else None
    conv, padding = (F.conv2d, F.conv3d)[rank - 2], [k // 2 for k in weight[2:]]
    call = glue.recognize(conv, (x, w, b, stride, padding, 1, 8), {})
    assert way in call.options
    y, expected = call.run(way), conv(x, w, b, stride, padding, 1, 8)
    assert y.stride() == expected.stride()
    exact = conv(x.double(), w.double(), None if b is None else b.double(), stride, padding, 1, 8)
    yardstick = accuracy.relative_error(expected, exact)
    assert accuracy.relative_error(y, exact) <= accuracy.allowed(dtype, yardstick)


def test_batch_norms_that_are_pytorchs():
    x, statistics = torch.randn(2, 3, 4, 5), (torch.zeros(3), torch.ones(3))
    assert glue.recognize(F.batch_norm, (x, *statistics), {}) is None, "the CPU's op computes the moments again"
    for more in ({"training": True}, {"weight": torch.ones(3).double()}):
        assert glue.recognize(F.batch_norm, (x, *statistics), more) is None
    assert glue.recognize(F.batch_norm, (x, None, None), {"training": True}) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nearest_upsampling_as_views_has_the_bits_of_pytorch(dtype, device):
    for shape in SHAPES[1:3]:
        x = draw(shape, dtype, True, device)
        for factors in ((2,) * (x.dim() - 2), (3, *(1,) * (x.dim() - 4), 2)):
            y = kernels.nearest_of_views(x, factors)
            assert torch.equal(y, F.interpolate(x, scale_factor=tuple(map(float, factors))))
            assert y.is_contiguous(memory_format=FORMATS[x.dim()])
