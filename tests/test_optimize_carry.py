"""Neighbours that run as one op in a Sequential, and moments carried from a convolution to the norm behind it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import kgopt
from kgopt.rewrite import glue
from kgopt.rewrite.glue import heads, plans
from kgopt.rewrite.norms import carry
from optimize_pairs import all_faster


def found(original, x):
    """A copy whose calls were all found to be faster, in the first of their ways."""
    model = kgopt.optimize(copy.deepcopy(original), measure=False)
    all_faster(model, x)
    return model


def counted(monkeypatch, place, name):
    """A list that grows with every call of an op that a module of kgopt.rewrite holds."""
    calls, op = [], getattr(place, name)

    def call(*args, **kwargs):
        calls.append(args)
        return op(*args, **kwargs)

    monkeypatch.setattr(place, name, call)
    return calls


@pytest.mark.parametrize("act", [nn.ReLU(), nn.SiLU(inplace=True), nn.GELU(), nn.Tanh()], ids=str)
def test_a_convolution_takes_the_activation_behind_it(act, device, monkeypatch, poisoned):
    torch.manual_seed(0)
    original = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1), act).to(device).eval()
    x = torch.randn(2, 4, 9, 7, device=device)
    model = found(original, x)
    calls = counted(monkeypatch, plans, "_conv_add")
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x))
    assert len(calls) == 1
    assert calls[0][-1] != "none"
    seen = []
    handle = model[3].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].min()))
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x))
    handle.remove()
    assert len(seen) == 1
    assert calls[1][-1] == "none"  # the hook sees what the convolution gives
    model(x).sum().backward()  # with gradients the modules run
    assert len(calls) == 2


def test_only_the_tensor_that_was_left_has_moments(monkeypatch):
    carrier = carry.Carrier()
    x, moments = torch.randn(2, 3), torch.zeros(2, 3, 2)
    carry.leave(x, carrier, moments)
    assert carry.take(x.clone()) is None
    assert not carrier.wanted
    assert carry.take(x) is moments
    assert carrier.wanted
    x.add_(1)
    assert carry.take(x) is None
    carry.leave(x, carrier, moments)
    x.view(3, 2).mul_(2)
    assert carry.take(x) is None
    carry.leave(x, carrier, None)
    assert carry.take(x) is None
    with torch.inference_mode():
        y = torch.randn(2, 3)
        carry.leave(y, carrier, moments)
        assert carry.take(y) is None
    for _ in range(carry.KEPT):
        carry.leave(torch.randn(1), carrier, None)
    carry.leave(x, carrier, moments)
    assert len(carry._recent.made) == carry.KEPT


class Chain(nn.Module):
    """Two convolutions and the norms behind them; something may happen in between."""

    def __init__(self, between=None):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv3d(32, 32, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(8, 32), nn.GroupNorm(4, 32)
        self.act = nn.ReLU()
        self.between = between

    def forward(self, x):
        h = self.conv1(x)
        if self.between is not None:
            self.between(h)
        h = self.act(self.norm1(h))
        h = self.conv2(h)
        h += x
        return self.act(self.norm2(h))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("between", [None, lambda h: h.mul_(2).add_(1)], ids=["nothing", "in place"])
def test_moments_reach_the_norm_behind(between, dtype, monkeypatch):
    from kgopt.rewrite.norms import sites

    torch.manual_seed(0)
    original = Chain(between).cuda().to(dtype).eval()
    with torch.no_grad():
        for p in original.parameters():
            p.normal_(std=0.2)
    x = torch.randn(1, 32, 64, 64, 128, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last_3d)
    model = kgopt.optimize(copy.deepcopy(original), measure=False, channels_last=True)
    with torch.no_grad():
        all_faster(model, x)
        expected = model(x)
        carriers = [glue.state_of(m).carrier for m in (model.conv1, model.conv2)]
        assert [c.wanted for c in carriers] == [between is None, True]
        for carrier in carriers:
            carrier.on = True
        calls = counted(monkeypatch, sites, "_group_norm_moments")
        y = model(x)
        assert len(calls) == (2 if between is None else 1)
        exact = copy.deepcopy(original).double()(x.double())
        error, before = ((t.double() - exact).norm() / exact.norm() for t in (y, original(x)))
        assert error <= 2 * before + 1e-5
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
        with torch.inference_mode():
            model(x.clone())
        assert len(calls) == (2 if between is None else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_takes_the_pointwise_convolution_behind_it(dtype, monkeypatch, poisoned):

    head = nn.Sequential(nn.Conv3d(32, 3, 1))
    original = nn.Sequential(nn.Conv3d(4, 32, 1), nn.GroupNorm(8, 32), nn.ReLU(), head).cuda().to(dtype).eval()
    x = torch.randn(1, 4, 40, 40, 40, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last_3d)
    model = kgopt.optimize(copy.deepcopy(original), measure=False, channels_last=True)
    with torch.no_grad():
        all_faster(model, x)
        plain = model(x)  # in two ops, in the layout that was asked for
        conv = model[3][0]
        state = glue.state_of(conv)
        state.faster = dict.fromkeys(state.faster, "pointwise")
        state.plans.clear()
        calls = counted(monkeypatch, heads, "_group_norm_conv1x1")
        y = model(x)
        assert len(calls) == 1
        assert y.stride() == plain.stride()
        exact = copy.deepcopy(original).double()(x.double())
        error, before = ((t.double() - exact).norm() / exact.norm() for t in (y, original(x)))
        assert error <= 2 * before + 1e-5


class NormActConv(nn.Module):
    """A VAE's end: statements of their own, and a branch between the norm and what follows it."""

    def __init__(self, branches):
        super().__init__()
        self.branches = branches
        self.norm, self.act, self.conv = nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x, scale=None):
        return self.branch(x, scale) if self.branches else self.plain(x)

    def plain(self, x):
        h = self.norm(x)
        h = self.act(h)
        h = self.conv(h)
        return h

    def branch(self, x, scale):
        if scale is None:
            h = self.norm(x)
        else:
            h = x * scale
        h = self.act(h)
        h = self.conv(h)
        return h


@pytest.mark.parametrize("branches", [False, True])
def test_a_norm_in_code_runs_with_the_convolution_behind_it(branches, device, monkeypatch, poisoned):

    torch.manual_seed(0)
    original = NormActConv(branches).to(device).eval()
    x = torch.randn(2, 16, 9, 7, device=device).contiguous(memory_format=torch.channels_last)
    model = kgopt.optimize(copy.deepcopy(original), measure=False, channels_last=True)
    with torch.no_grad():
        all_faster(model, x)
        state = glue.state_of(model.conv)
        state.faster = dict.fromkeys(state.faster, "few")
        state.plans.clear()
        calls = counted(monkeypatch, heads, "_group_norm_conv")
        torch.testing.assert_close(model(x), original(x), rtol=1e-3, atol=1e-3)
        assert len(calls) == 1
        if branches:
            torch.testing.assert_close(model(x, 2.0), original(x, 2.0), rtol=1e-3, atol=1e-3)
        seen = []
        for module in (model.conv, model.act, model.norm):  # each sees what the code gives it
            handle = module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].mean()))
            torch.testing.assert_close(model(x), original(x), rtol=1e-3, atol=1e-3)
            handle.remove()
        assert len(seen) == 3
        assert len(calls) == 1
    model(x).sum().backward()  # with gradients the modules run
    assert len(calls) == 1
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), original(x), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_of_a_few_channels_is_found(dtype, poisoned):
    torch.manual_seed(0)
    original = NormActConv(True).cuda().to(dtype).eval()
    x = torch.randn(1, 16, 600, 700, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)
    model = kgopt.optimize(copy.deepcopy(original), measure=False, channels_last=True)
    with torch.no_grad():
        glue.find(model, lambda: model(x), lambda path: "")
        # Which of its kernels is the faster one is measured.
        assert {"few", "own"} & set(glue.state_of(model.conv).faster.values())
        exact = copy.deepcopy(original).double()(x.double())
        error, before = ((t.double() - exact).norm() / exact.norm() for t in (model(x), original(x)))
        assert error <= 2 * before + 1e-5
