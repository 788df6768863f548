"""Norms whose value goes to a convolution alone: under autocast on a GPU they read and write half precision."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import kgopt
from kgopt._layout import is_dense_channels_last
from kgopt.rewrite.chains import modules
from kgopt.rewrite.glue.heads import FollowedSite
from kgopt.rewrite.model import layout
from kgopt.rewrite.norms import sites


class Block(nn.Module):
    """Of a ResNet, as MONAI writes it: the convolution is inside a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(4, 8)
        self.act = nn.SiLU()
        self.conv1 = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        identity = x
        x = self.norm1(x)
        x = self.act(x)
        x = self.conv1(x)
        x = F.relu(self.norm2(x))
        x = self.conv2(x)
        return x + identity


class Stack(nn.Sequential):
    """Of a U-Net: a norm alone before a convolution, and an activation that reaches into the next Sequential."""

    def __init__(self) -> None:
        def single():
            return nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())

        super().__init__(single(), single())


class ReadTwice(Block):
    def forward(self, x):
        x = self.norm1(x)
        x = self.act(x)
        y = self.conv1(x)
        return x + y


class Handled(Block):
    def forward(self, x):
        x = self.norm1(x)
        x = self.act(x)
        with contextlib.suppress(ValueError):
            x = self.conv2(x)
        return x


class Other(Block):
    def forward(self, x):
        x = self.norm1(x)
        x = self.act(x)
        x = self.norm2(x)
        return x


def halves(model, x, monkeypatch):
    """The followers that sites were told of, and which of them are taken for convolutions."""
    seen = []
    before = FollowedSite.run_before

    def run_before(self, follower, *operands):
        seen.append((follower, modules.first_is_conv(follower)))
        return before(self, follower, *operands)

    monkeypatch.setattr(FollowedSite, "run_before", run_before)
    y = model(x)
    monkeypatch.undo()
    return seen, y


def optimized(cls, device):
    torch.manual_seed(0)
    model = cls().to(device)
    return model, kgopt.optimize(copy.deepcopy(model), measure=False)


def draw(device):
    return torch.randn(2, 8, 20, 24, generator=torch.Generator().manual_seed(1)).to(device)


def test_who_reads_a_norm(monkeypatch):
    _, model = optimized(Block, "cpu")
    seen, _ = halves(model, draw("cpu"), monkeypatch)
    assert [s[0] for s in seen] == [model.conv1, model.conv2]
    assert all(s[1] for s in seen)
    _, model = optimized(Stack, "cpu")
    seen, _ = halves(model, draw("cpu"), monkeypatch)
    assert [s[0] for s in seen if s[1]] == [model[0][1], model[1][1]]


@pytest.mark.parametrize("cls", [ReadTwice, Handled, Other])
def test_a_norm_that_others_may_read(cls, monkeypatch):
    _, model = optimized(cls, "cpu")
    seen, _ = halves(model, draw("cpu"), monkeypatch)
    assert not any(s[1] for s in seen)


def test_what_counts_as_a_convolution():
    conv = nn.Conv2d(8, 8, 1)
    assert modules.first_is_conv(conv)
    assert modules.first_is_conv(nn.Sequential(nn.Sequential(conv, nn.ReLU())))
    assert not modules.first_is_conv(nn.Sequential(nn.ReLU(), conv))
    assert not modules.first_is_conv(nn.Sequential())
    assert not modules.first_is_conv(conv.forward)
    assert not modules.first_is_conv(None)
    sequential = nn.Sequential(conv)
    sequential.register_forward_pre_hook(lambda *_: None)
    assert not modules.first_is_conv(sequential)
    conv.register_forward_pre_hook(lambda *_: None)
    assert not modules.first_is_conv(conv)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cls", [Block, Stack])
def test_half_values_are_the_same(cls, dtype, monkeypatch):
    original, model = optimized(cls, "cuda")
    x = draw("cuda").to(dtype)
    kinds = []
    before = sites.Site.run

    def run(self, *operands, **options):
        y = before(self, *operands, **options)
        kinds.append((operands[-1].dtype, y.dtype))
        return y

    def results(m, x, context):
        x = x.detach().requires_grad_()
        with context:
            y = m(x)
        weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device="cuda").view(y.shape)
        (y.double() * weights).sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in m.parameters())]

    monkeypatch.setattr(sites.Site, "run", run)
    mine = results(model, x, torch.autocast("cuda", dtype))
    assert kinds == [(dtype, dtype)] * 2
    theirs = results(original, x, torch.autocast("cuda", dtype))
    exact = results(copy.deepcopy(original).double(), x.double(), torch.autocast("cuda", enabled=False))
    for a, b, c in zip(mine, theirs, exact, strict=True):
        assert a.dtype is b.dtype
        error, allowed = ((t.double() - c).norm() for t in (a, b))
        assert error <= 2 * allowed + 2e-2 * c.norm()


def test_a_layout_change_within_autocast_reaches_the_casts_that_autocast_keeps():
    """A model that was timed in channels_last inside an autocast ran on casts of its weights from before, which were
    contiguous: its convolutions gave contiguous tensors, and channels_last always lost.
    """
    seen: list[bool] = []

    class Weights(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.convolution.default:
                seen.append(is_dense_channels_last(args[1]))
            return func(*args, **(kwargs or {}))

    model, x = nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8)), torch.randn(2, 4, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        for on in (True, False):
            layout.set_layout(model, on)
            with Weights():
                model(x)
    assert seen == [True, False]
