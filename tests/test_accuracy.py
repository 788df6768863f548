"""The accuracy rule: TF32 where PyTorch allows it, and nothing that is wrong."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt import accuracy
from kgopt._layout import FORMATS
from kgopt.cli.models import PIPELINES
from kgopt.rewrite import glue
from kgopt.rewrite.chains import emit
from kgopt.rewrite.chains.chain import Chain
from kgopt.rewrite.glue import search
from kgopt.rewrite.gradients import training
from kgopt.rewrite.measure import clocks, measuring
from kgopt.rewrite.model import layout, whole
from kgopt.rewrite.norms import sites


@pytest.fixture
def tf32(monkeypatch):
    """A GPU whose convolutions may take TF32, while PyTorch's, which is to be matched, takes none."""
    monkeypatch.setattr(accuracy, "may_take_tf32", lambda x: x.dtype is torch.float32)


def test_the_bar_is_twice_the_largest_yardstick_and_a_few_roundings():
    assert accuracy.allowed(torch.float32, 3e-7) == pytest.approx(1.6e-6)
    assert accuracy.allowed(torch.float32, 3e-7, 3e-4) == pytest.approx(6.01e-4)
    assert accuracy.allowed(torch.float64) == 5e-12
    assert accuracy.allowed(torch.bfloat16, math.nan) == math.inf


def test_rounding_to_tf32():
    ulp = 2.0**-10
    for value, rounded in ((1 + ulp, 1 + ulp), (1 + ulp / 4, 1.0), (1 + 0.75 * ulp, 1 + ulp), (-3 - ulp / 4, -3.0)):
        assert accuracy.round_tf32(torch.tensor([value])).item() == rounded
        assert accuracy.round_tf32(torch.tensor([value], dtype=torch.float64)).item() == rounded
    special = torch.tensor([math.inf, -math.inf, math.nan])
    special = torch.cat([special, torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])
    assert accuracy.round_tf32(special).isnan().tolist() == [False, False, True, True]
    assert accuracy.round_tf32(special)[:2].tolist() == [math.inf, -math.inf]


def test_errors():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert accuracy.relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert accuracy.relative_error(torch.tensor([3.0, math.nan]), exact) == math.inf
    assert accuracy.relative_error(torch.tensor([3.0, math.inf]), exact) == math.inf
    assert accuracy.relative_error(torch.tensor([3.0, math.nan]), torch.tensor([3.0, math.nan])) == 0.0
    # A mean of terms that cancel is measured by the terms.
    assert accuracy.relative_error(torch.tensor([1e-7]), torch.zeros(1), torch.ones(1)) == pytest.approx(1e-7)


# ----------------------------------------------------------------------------------------------------------- sites

LSE = Chain(conv="conv2d", post="tanh+hardswish", residual=True, reduce="logsumexp", dims=(1,), keepdim=True)
MEAN = Chain(conv="conv3d", reduce="mean")


def site(chain, affine=True):
    rank = 2 if chain.conv == "conv2d" else 3
    weight, gamma, beta = torch.randn(16, 4, *(3,) * rank), torch.randn(16), torch.randn(16)
    conv = emit.ConvArgs(weight, torch.randn(16), [1] * rank, [0] * rank, [1] * rank, 1)
    norm = emit.NormArgs(4, gamma if affine else torch.ones(16), beta if affine else torch.zeros(16), 1e-5)
    return torch.randn(2, 4, *(9,) * rank), conv, norm


def in_tf32(chain, x, conv, norm):
    rounded = dataclasses.replace(conv, weight=accuracy.round_tf32(conv.weight))
    return emit.run_torch(chain, accuracy.round_tf32(x), rounded, norm)


def verdict(monkeypatch, chain, ours, affine=True):
    """What is said of ``ours(chain, x, conv, norm)``, which is faster."""
    x, conv, norm = site(chain, affine)
    monkeypatch.setattr(clocks, "time_both", lambda first, second, device: (2.0, 1.0))
    monkeypatch.setattr(
        measuring, "emit_kgopt", lambda chain, call, x, rank, conv, norm, fold: ours(chain, x, conv, norm)
    )
    return measuring.measure(measuring.Question(chain, x, conv, norm, False, False, lambda: None, (), emit.call_now))


@pytest.mark.parametrize("chain", [LSE, MEAN], ids=["logsumexp", "mean"])
def test_tf32_is_held_to_an_ideal_tf32_product(chain, tf32, monkeypatch):
    """cuDNN takes no TF32 for few channels of contiguous tensors, so a site that did counted as inaccurate: the third
    pipeline stayed on PyTorch's code, moved to channels_last and took 383 us instead of 149.
    """
    found = verdict(monkeypatch, chain, in_tf32)
    assert found.reason == ""
    assert found.error_after > accuracy.allowed(torch.float32, 1e-8)  # too much for fp32


@pytest.mark.parametrize("chain", [LSE, MEAN], ids=["logsumexp", "mean"])
def test_tf32_where_it_is_not_allowed(chain, monkeypatch):
    assert "less accurate" in verdict(monkeypatch, chain, in_tf32).reason


def wrong_tap(chain, x, conv, norm):
    weight = conv.weight.clone()
    weight[0, 0].flatten()[0] += 0.2
    return in_tf32(chain, x, emit.ConvArgs(**{**vars(conv), "weight": weight}), norm)


def in_bf16(chain, x, conv, norm):
    rounded = emit.ConvArgs(**{**vars(conv), "weight": conv.weight.bfloat16().float()})
    return emit.run_torch(chain, x.bfloat16().float(), rounded, norm)


def one_nan(chain, x, conv, norm):
    y = emit.run_torch(chain, x, conv, norm).clone()
    y.view(-1)[0] = math.nan
    return y


@pytest.mark.parametrize("ours", [wrong_tap, in_bf16, one_nan])
@pytest.mark.parametrize("chain", [LSE, MEAN], ids=["logsumexp", "mean"])
def test_what_is_wrong_is_refused_with_tf32_too(chain, ours, tf32, monkeypatch):
    assert "less accurate" in verdict(monkeypatch, chain, ours).reason


def test_a_mean_that_is_zero_by_itself(monkeypatch):
    """Of a fresh GroupNorm (weight 1, bias 0) the mean over all is zero, and whoever computes it gives rounding: its
    relative error says nothing, but decided whether the first pipeline ran on kgopt.
    """

    def otherwise(chain, x, conv, norm):
        return emit.run_torch(chain, x.flip(-1), emit.ConvArgs(**{**vars(conv), "weight": conv.weight.flip(-1)}), norm)

    found = verdict(monkeypatch, MEAN, otherwise, affine=False)
    assert found.reason == ""

    def shifted(*args):
        return otherwise(*args) + 1e-4

    assert "less accurate" in verdict(monkeypatch, MEAN, shifted, affine=False).reason


@pytest.mark.parametrize("dims", [(8, 4, 16, 16), (1, 4, 64, 48)], ids=["samples", "positions"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_part_of_a_large_input_says_what_the_errors_are(dims, channels_last, tf32, monkeypatch):
    """Above a size the two results were compared with each other: in TF32 every large site was refused."""
    x = torch.randn(dims)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    part = measuring.part_of(x, 2000)
    assert 500 < part.numel() <= 2000
    assert part.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert measuring.part_of(x, x.numel()) is x
    monkeypatch.setattr(measuring, "REFERENCE_ELEMENTS", 300)
    assert verdict(monkeypatch, LSE, in_tf32).reason == ""

    def wrong_in_the_last_sample(chain, x, conv, norm):
        y = in_tf32(chain, x, conv, norm)
        return torch.cat([y[:-1], -y[-1:]]) if len(x) > 1 else y

    assert "less accurate" in verdict(monkeypatch, LSE, wrong_in_the_last_sample).reason


# ------------------------------------------------------------------------------------------------- glue and training


def conv_call(x, weight):
    argument = ("conv2d", False, (1, 1), (1, 1), (1, 1), (0, 0), 1)
    return glue.Call("conv", argument, x, (weight, torch.randn(weight.shape[0])), ("own",))


@pytest.mark.parametrize("allowed", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("how", ["tf32", "fp32", "wrong", "wrong at the end"])
def test_convolutions_between_norms(how, allowed, monkeypatch):
    if allowed:
        monkeypatch.setattr(accuracy, "may_take_tf32", lambda x: True)
    weight = torch.randn(8, 4, 3, 3)
    call = conv_call(torch.randn(2, 4, 30, 31), weight)

    def theirs(x):
        return F.conv2d(x, weight, call.more[1], padding=1)

    def ours(call, option=""):
        if how == "tf32":
            return F.conv2d(accuracy.round_tf32(call.x), accuracy.round_tf32(weight), call.more[1], padding=1)
        y = F.conv2d(call.x.flip(1), weight.flip(1), call.more[1], padding=1)
        if how == "wrong at the end":  # where no corner reaches
            y[..., -1] = 0
        return y + 0.01 * y.abs().mean() if how == "wrong" else y

    monkeypatch.setattr(glue.Call, "run", ours)
    right = search._is_right(call, "own", theirs(call.x), ours(call))
    assert right is (how == "fp32" or (how == "tf32" and allowed))


def test_no_algorithm_is_searched_for_a_corner(monkeypatch):
    """cuDNN's benchmark mode tries ten of them for each new size, which takes as long as for the whole of x."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    sizes, convolve, run = [], torch.convolution, glue.Call.run

    def watched(function):
        def call(*args):
            x = args[0].x if isinstance(args[0], glue.Call) else args[0]
            sizes.append((x.shape[-1], torch.backends.cudnn.benchmark))
            return function(*args)

        return call

    monkeypatch.setattr(torch, "convolution", watched(convolve))
    monkeypatch.setattr(glue.Call, "run", watched(run))
    call = conv_call(torch.randn(2, 4, 30, 30), torch.randn(8, 4, 3, 3))
    y = F.conv2d(call.x, *call.more, padding=1)
    assert search._is_right(call, "bias", y, y + 1e-7)
    assert sizes
    assert all(size == 24 and not searches for size, searches in sizes)


@pytest.mark.parametrize("allowed", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("how", ["tf32", "fp32", "wrong gradient", "lost position"])
def test_convolutions_in_training(how, allowed, monkeypatch):
    if allowed:
        monkeypatch.setattr(accuracy, "may_take_tf32", lambda x: True)
    monkeypatch.setattr(clocks, "busy_both", lambda first, second, device: (2.0, 1.0))
    conv = nn.Conv2d(4, 8, 3, padding=1)

    class Tf32(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return F.conv2d(*map(accuracy.round_tf32, (x, weight)), bias, padding=1)

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            rounded = map(accuracy.round_tf32, (dy, x, weight))
            dx, dw, _ = torch.ops.aten.convolution_backward(
                *rounded, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
            )
            return dx, dw * (1.03 if how == "wrong gradient" else 1.0), dy.sum((0, 2, 3))

    def ours(x):
        if how in ("tf32", "wrong gradient"):
            return Tf32.apply(x, conv.weight, conv.bias)
        y = F.conv2d(x.flip(1), conv.weight.flip(1), conv.bias, padding=1)
        return y if how == "fp32" else y * (torch.arange(y.shape[-1]) < 29)

    both = training._both_of_conv(type(conv).forward, conv)
    both = training.Both(**{**vars(both), "ours": ours})
    x = torch.randn(2, 4, 30, 30, requires_grad=True)
    assert (training._gain(both, x) > 0) is (how == "fp32" or (how == "tf32" and allowed))
    assert conv.weight.grad is None


@pytest.mark.parametrize("how", ["right", "wrong gradient"])
@pytest.mark.parametrize("arguments", [{"size": (60, 62)}, {"scale_factor": 2}], ids=["size", "factor"])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_upsampling_in_training(mode, arguments, how, monkeypatch):
    """A corner of x has another size than the call asks for."""
    monkeypatch.setattr(clocks, "busy_both", lambda first, second, device: (2.0, 1.0))
    monkeypatch.setattr(training, "_is_plain", lambda x: True)
    state = training.TrainingState(measuring=True)

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return F.interpolate(x, scale_factor=2, mode=mode)

        @staticmethod
        def backward(ctx, dy):
            return F.avg_pool2d(dy, 2) * 2

    def ours(kind, factors, x):
        return F.interpolate(x, scale_factor=2, mode=mode) if how == "right" else Halved.apply(x)

    monkeypatch.setattr(training, "_upsample", ours)
    x = torch.randn(2, 4, 30, 31, requires_grad=True)
    with training._Look(state):
        F.interpolate(x, mode=mode, **arguments)
    assert [seconds > 0 for seconds in state.ours.values()] == [how == "right"]


def test_the_switch_decides(monkeypatch):
    x = torch.randn(1)
    assert not accuracy.may_take_tf32(x)  # the CPU has none

    class OnCuda:
        dtype, is_cuda, device = torch.float32, True, torch.device("cuda")

    for allowed in (False, True):
        torch.backends.cudnn.allow_tf32 = allowed
        assert accuracy.may_take_tf32(OnCuda()) is allowed
        assert not accuracy.may_take_tf32(type("Half", (OnCuda,), {"dtype": torch.bfloat16})())


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "fp32"])
def test_plain_pipelines_run_on_kgopt_in_their_own_layout(tf32):
    """The layouts are compared each at its best: see test_tf32_is_held_to_an_ideal_tf32_product."""
    torch.backends.cudnn.allow_tf32 = tf32
    for pipeline in PIPELINES:
        model = pipeline.plain_model(seed=0).cuda().eval()
        x = torch.randn(16, *pipeline.headline[1:], device="cuda")
        with torch.no_grad():
            expected = model(x)
            kgopt.optimize(model, x)
            torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)
        report = kgopt.report(model)
        assert len(report.fused) == 1, str(report)
        assert report.layout.startswith("as it was"), str(report)


@pytest.fixture
def h200(tf32, monkeypatch):
    """The third pipeline's costs on an H200, in seconds: of its op in both layouts, of PyTorch, of converting x."""
    spent = [0.0]

    def ours(chain, call, x, rank, conv, norm, *more):
        before = spent[0]
        y = in_tf32(chain, x, conv, norm)
        spent[0] = before + (149e-6 if x.is_contiguous() else 320e-6)
        return y

    def theirs(*args, **kwargs):
        spent[0] += 3140e-6
        return conv2d(*args, **kwargs)

    def converted(x):
        spent[0] += 60e-6
        return as_channels_last(x)

    def clock(first, second, device):
        out = []
        for function in (first, second):
            spent[0] = 0.0
            function()
            out.append(spent[0])
        return tuple(out)

    conv2d, as_channels_last = F.conv2d, layout.as_channels_last
    for module in (measuring, sites):
        monkeypatch.setattr(module, "emit_kgopt", ours)
    monkeypatch.setitem(emit.TORCH_CONVS, "conv2d", theirs)
    monkeypatch.setattr(layout, "as_channels_last", converted)
    monkeypatch.setattr(clocks, "time_both", clock)
    monkeypatch.setattr(clocks, "busy_both", clock)
    monkeypatch.setattr(clocks, "busy", lambda function, device: clock(function, function, device)[0])
    monkeypatch.setattr(whole, "chooses", lambda device: True)
    return spent


def test_the_third_pipeline_stays_in_its_layout(h200):
    """Refused in the contiguous layout, where cuDNN takes no TF32, it ran in channels_last with a copy of its input."""
    model = PIPELINES[2].plain_model(seed=0).eval()
    x = torch.randn(2, 8, 20, 20)
    kgopt.optimize(model, x)
    report = kgopt.report(model)
    assert report.layout == "as it was: 0.15 ms, 0.38 ms of the GPU's work alone in the other layout"
    assert len(report.fused) == 1, str(report)
    h200[0] = 0.0
    with torch.no_grad():
        model(x)
    assert h200[0] == 149e-6


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("sizes", [(40, 30), (9, 40, 26)], ids=["image", "volume"])
def test_a_corner_lies_as_the_whole(sizes, last):
    """The corner of a channels_last tensor was contiguous, which other kernels compute: the check saw none of ours."""
    form = FORMATS[len(sizes) + 2] if last else torch.contiguous_format
    x = torch.randn(2, 6, *sizes).contiguous(memory_format=form)
    part = search.corner(x, [3] * len(sizes), [15] * len(sizes))
    cut = tuple(slice(0, min(31, size)) for size in sizes)
    assert torch.equal(part, x[(slice(0, 1), slice(None), *cut)])
    assert part.is_contiguous(memory_format=form)
