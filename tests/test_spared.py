"""Inputs of norms that a model writes to after the call: where the original trains, the optimized one does, too."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt.rewrite.norms import spared

FORMATS = ("contiguous", "channels_last", "transposed")


class LayerNorm2d(nn.Module):
    """Of differences from the mean, which PyTorch keeps instead of x."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        return (x - u) / torch.sqrt(s + 1e-6) * self.weight[:, None, None]


class Net(nn.Module):
    """``x += block(x)``, and the same through functions and sums."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.group, self.instance = nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)
        self.layer, self.relu, self.prelu = LayerNorm2d(), nn.ReLU(), nn.PReLU(8)
        self.tail = nn.Sequential(nn.Sigmoid(), nn.GroupNorm(4, 8), nn.SiLU())

    def forward(self, x):
        h = getattr(self, self.how)(x)
        x += h
        return x

    def normed(self, x):
        return self.instance(x)

    def acted(self, x):
        return F.silu(self.instance(x))

    def called(self, x):
        return F.silu(F.instance_norm(x))

    def added(self, x):
        return F.relu(self.instance(x) + x.detach().flip(0))

    def added_to(self, x):
        return F.silu(self.group(x.flip(0)) + x)

    def sloped(self, x):
        return self.prelu(self.instance(x))

    def modulated(self, x):
        return F.silu(self.instance(x) * (1 + x.detach().mean((2, 3), keepdim=True)) + x.mean((2, 3), keepdim=True))

    def over_channels(self, x):
        return F.silu(self.layer(x))

    def behind_relu(self, x):
        return F.silu(self.group(self.relu(x)))

    def behind_sigmoid(self, x):
        return self.tail(x)


HOWS = [name for name in vars(Net) if name not in ("__init__", "forward") and not name.startswith("_")]


def laid(x, how):
    if how == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if how == "transposed" else x


def step(model, x):
    """What a training step gives, or None where autograd refuses it."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    try:
        y = model(x * 1)
        y.square().sum().backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def optimized(how, device):
    torch.manual_seed(0)
    model = Net(how).double().to(device)
    return model, kgopt.optimize(copy.deepcopy(model), measure=False)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("how", HOWS)
def test_an_input_may_be_written_to_where_pytorch_keeps_something_else(how, layout, device):
    """PyTorch's instance norm copies an input that is not contiguous, so ``x += f(norm(x))`` trained in channels_last;
    a layer norm by formula keeps differences, ReLU its result, and so it trained in any layout. kgopt's ops keep x, and
    autograd refused every step.
    """
    model, ours = optimized(how, device)
    x = laid(torch.randn(2, 8, 6, 4, dtype=torch.float64, device=device), layout)
    trains = False
    for _ in range(3):
        expected, actual = step(model, x), step(ours, x)
        if expected is not None:
            trains = True
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    if layout == "channels_last" or how in ("over_channels", "behind_relu", "behind_sigmoid", "added_to"):
        assert trains


def copies(monkeypatch):
    """The shapes of inputs that are copied for a norm, as it goes."""
    made, begin = [], spared._Watch.__init__

    def counted(self, written, kind, x):
        made.append(x.shape)
        begin(self, written, kind, x)

    monkeypatch.setattr(spared._Watch, "__init__", counted)
    return made


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.InstanceNorm2d(8, affine=True), LayerNorm2d()

    def forward(self, x):
        return F.silu(self.layer(self.norm(x)))


def test_an_input_that_is_not_written_to_is_copied_once(device, monkeypatch):
    made = copies(monkeypatch)
    model = kgopt.optimize(Plain().to(device), measure=False)
    x = laid(torch.randn(2, 8, 6, 4, device=device), "channels_last")
    for _ in range(3):
        step(model, x)
    assert len(made) == 2  # of each norm
    step(model, laid(torch.randn(2, 8, 6, 8, device=device), "channels_last"))
    assert len(made) == 4  # another size may take another branch
    with torch.no_grad():
        model(laid(torch.randn(1, 8, 6, 8, device=device), "channels_last"))
    assert len(made) == 4


def test_a_graph_without_a_backward_counts_as_one(device, monkeypatch):
    made = copies(monkeypatch)
    model = kgopt.optimize(Plain().to(device), measure=False)
    x = laid(torch.randn(2, 8, 6, 4, device=device, requires_grad=True), "channels_last")
    for _ in range(3):
        model(x)
        gc.collect()
    assert len(made) == 2


def test_a_copy_keeps_no_memory_of_what_it_was_copied_from():
    x = torch.randn(64)
    written = {}
    watch = spared._Watch(written, "kind", x)
    assert watch.twin.untyped_storage().nbytes() == 0
    x[3:].add_(1)
    watch.look()
    assert written == {"kind": True}
    spared._Watch(written, "kind", x).look()
    assert written == {"kind": True}  # never forgotten
    del watch
    spared._Watch(written, "other", x)
    gc.collect()
    assert written == {"kind": True, "other": False}
