"""``optimize(recompute=True)``: sums behind norms and concatenations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import kgopt
import optimize_models as models
from kgopt.rewrite.gradients import joins, recompute, training
from kgopt.rewrite.optimized import known

pytestmark = pytest.mark.skipif(
    not recompute.may_hook_saved_tensors(), reason="needs names of torch that are hidden here"
)


@pytest.fixture(autouse=True)
def same_bits(monkeypatch):
    """cuDNN's gradients in float64 add up in no fixed order."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


class Residual(nn.Module):
    """Both branches begin and end with convolutions and norms, whose inputs are kept."""

    def __init__(self, act, shortcut=True):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.skip = nn.Conv2d(8, 8, 1) if shortcut else nn.Identity()
        self.skip_norm = nn.InstanceNorm2d(8, affine=True) if shortcut else nn.Identity()
        self.act = act
        self.seen: list[StorageWeakRef] | None = []

    def forward(self, x):
        out = self.norm(self.conv(x)) + self.skip_norm(self.skip(x))
        out = self.act(out)
        if self.seen is not None:
            self.seen.append(StorageWeakRef(out.untyped_storage()))
        return out


class Network(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.stem, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()
        self.blocks, self.last = nn.Sequential(*blocks), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return self.last(self.blocks(self.act(self.norm(self.stem(x)))))


def gradients(model, x):
    x = x.detach().requires_grad_()
    y = model(x)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    return torch.autograd.grad(y, [x, *model.parameters()], dy)


def ways(model, device, **options):
    """As it was, optimized, and optimized with results computed again."""
    model = models.randomized(model, device).double()
    kept, ours = (kgopt.optimize(copy.deepcopy(model), measure=False, recompute=on, **options) for on in (False, True))
    return model, kept, ours


def assert_same(model, kept, ours, x):
    found = gradients(ours, x)
    assert all(map(torch.equal, found, gradients(kept, x)))
    close = {"rtol": 1e-9, "atol": 1e-10} if x.dtype is torch.float64 else {"rtol": 1e-2, "atol": 1e-3}
    for a, b in zip(found, gradients(model, x), strict=True):
        torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("act", "results"),
    # The stem's, the skip's (which a sum alone does not want to keep) and the sum; ReLU keeps its own.
    [(nn.LeakyReLU(0.01), 3), (nn.SiLU(), 3), (nn.Identity(), 2), (nn.ReLU(), 1)],
    ids=["leaky", "silu", "none", "relu"],
)
def test_a_sum_is_not_kept(act, results, channels_last, device):
    model, kept, ours = ways(Network(Residual(act)), device, channels_last=channels_last)
    x = torch.randn(2, 8, 6, 6, device=device, dtype=torch.float64)
    y = ours(x.clone().requires_grad_())
    assert ours.blocks[0].seen[-1].expired() == (results > 1)
    y.sum().backward()
    assert known.get(ours, "recompute").results == results
    assert_same(model, kept, ours, x)


def test_a_chain_of_sums_is_kept_now_and_then(device):
    """Each depends on the one before: the last would take all of them."""
    model, kept, ours = ways(Network(*(Residual(nn.LeakyReLU(0.1), shortcut=False) for _ in range(6))), device)
    x = torch.randn(2, 8, 6, 6, device=device, dtype=torch.float64)
    y = ours(x.clone().requires_grad_())
    gone = [block.seen[-1].expired() for block in ours.blocks]
    assert gone == [True, True, False, True, True, True]  # the stem's norm comes before them
    y.sum().backward()
    assert_same(model, kept, ours, x)


def test_a_sum_alone_of_what_nobody_keeps_is_kept(device):
    """The recipe would keep the other operand instead."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.other, self.last = (
                nn.Conv2d(8, 8, 1),
                nn.GroupNorm(2, 8),
                nn.Conv2d(8, 8, 1),
                nn.Conv2d(8, 8, 1),
            )

        def forward(self, x):
            return self.last(self.norm(self.conv(x)) + self.other(x))

    model, kept, ours = ways(Plain(), device)
    x = torch.randn(2, 8, 6, 6, device=device, dtype=torch.float64)
    assert_same(model, kept, ours, x)
    assert known.get(ours, "recompute").results == 0


def test_a_changed_operand_is_refused(device):
    class Writes(Residual):
        def forward(self, x):
            r = self.skip(x)
            out = self.act(self.norm(self.conv(x)) + r)
            r.add_(1)
            return out

    _, _, ours = ways(Network(Writes(nn.LeakyReLU(0.1))), device)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        gradients(ours, torch.randn(2, 8, 6, 6, device=device, dtype=torch.float64))


class Joined(nn.Module):
    """A decoder's block: what came from below, and the encoder's result; ``wide``: the encoder's largest one."""

    def __init__(self, wide):
        super().__init__()
        self.down, self.norm, self.act = nn.Conv2d(8, wide, 3, padding=1), nn.GroupNorm(2, wide), nn.SiLU()
        self.narrow, self.second = nn.Conv2d(wide, 8, 1), nn.GroupNorm(2, 8)
        self.up, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.seen: list[StorageWeakRef] = []

    def forward(self, x):
        skip = torch.relu(self.second(self.narrow(self.act(self.norm(self.down(x))))))
        both = torch.cat((self.up(skip), skip), 1)
        self.seen.append(StorageWeakRef(both.untyped_storage()))
        return self.last(both)


class Bare(Joined):
    """No norm gives the skip connection; ``kept``: a convolution wants it."""

    def __init__(self, kept):
        super().__init__(16)
        self.kept = kept
        del self.second
        if not kept:
            del self.up

    def forward(self, x):
        skip = self.narrow(self.act(self.norm(self.down(x))))
        both = torch.cat((self.up(skip) if self.kept else skip * 2, skip), 1)
        self.seen.append(StorageWeakRef(both.untyped_storage()))
        return self.last(both)


@pytest.mark.parametrize("kept", [True, False])
def test_a_concatenation_of_what_is_kept_anyway(kept, device, monkeypatch):
    monkeypatch.setattr(training, "_is_plain", lambda t: type(t) is torch.Tensor)
    monkeypatch.setattr(training, "takes", lambda module, x: False)
    monkeypatch.setattr(joins, "gain", lambda tensors: 1.0)
    model, without, ours = ways(Bare(kept), device, channels_last=True)
    x = torch.randn(2, 8, 6, 6, device=device)
    model.float()
    for m in (without, ours):
        m.float().train()
        assert training.find(m, lambda m=m: m(x.clone().requires_grad_()), lambda name: "") == 1
    y = ours(x.clone().requires_grad_())
    assert ours.seen[-1].expired() == kept
    y.sum().backward()
    assert_same(model, without, ours, x)


@pytest.mark.parametrize(("wide", "results"), [(16, 3), (8, 2)], ids=["smaller", "the largest"])
def test_a_concatenation_is_not_kept_but_the_largest(wide, results, device, monkeypatch):
    """Where kgopt joins, which is measured on GPUs alone."""
    monkeypatch.setattr(training, "_is_plain", lambda t: type(t) is torch.Tensor)
    monkeypatch.setattr(training, "takes", lambda module, x: False)  # their gradients are not the subject
    monkeypatch.setattr(joins, "gain", lambda tensors: 1.0)
    model, kept, ours = ways(Joined(wide), device, channels_last=True)
    x = torch.randn(2, 8, 6, 6, device=device)  # cuDNN's results in float64 are contiguous
    model.float()
    for m in (kept, ours):
        m.float().train()
        assert training.find(m, lambda m=m: m(x.clone().requires_grad_()), lambda name: "") == 1
    y = ours(x.clone().requires_grad_())
    assert ours.seen[-1].expired() == (results == 3)
    y.sum().backward()
    assert known.get(ours, "recompute").results == results
    assert_same(model, kept, ours, x)
    y = kept(x.requires_grad_())
    assert not kept.seen[-1].expired()
