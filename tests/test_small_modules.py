"""Modules of a user's that are an activation or do nothing: read, fused, and called where they have changed."""

from __future__ import annotations

import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import optimize_pairs
from optimize_pairs import check, check_compiled

pair = functools.partial(optimize_pairs.pair, train=False)


class OwnGelu(nn.Module):
    """As timm's."""

    def __init__(self, inplace: bool = False):
        super().__init__()

    def forward(self, x):
        return F.gelu(x)


class OwnSigmoid(nn.Module):
    def __init__(self, inplace=True):
        super().__init__()
        self.inplace = inplace

    def forward(self, x):
        return x.sigmoid_() if self.inplace else x.sigmoid()


def swish(x, inplace: bool = False):
    """As monai.networks.blocks.activation's."""
    return nn.functional.silu(x, inplace=inplace)


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.inplace = True

    def forward(self, input):
        return swish(input, self.inplace)


class Formula(nn.Module):
    def __init__(self, alpha=1.0):
        super().__init__()
        self.alpha = alpha

    def forward(self, x):
        return x * torch.sigmoid(self.alpha * x)


class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = 0.3

    def forward(self, x):
        return F.leaky_relu(x, negative_slope=self.slope)


class Subclass(nn.ReLU):
    """Adds nothing."""


def drop_path(x, drop_prob: float = 0.0, training: bool = False, scale_by_keep: bool = True):
    if drop_prob == 0.0 or not training:
        return x
    keep = 1 - drop_prob
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    return x * mask / keep if scale_by_keep else x * mask


class DropPath(nn.Module):
    """As timm's."""

    def __init__(self, p=0.5):
        super().__init__()
        self.drop_prob, self.scale_by_keep = p, True

    def forward(self, x):
        return drop_path(x, self.drop_prob, self.training, self.scale_by_keep)


class Net(nn.Module):
    def __init__(self, act, drop=None):
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.act = act
        self.drop = drop if drop is not None else nn.Identity()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), act)

    def forward(self, x):
        s = x
        x = self.norm(x)
        x = self.act(x)
        x = self.body(x)
        x = self.norm(x)
        x = self.drop(x) + s
        return x


ACTS = {
    "gelu": OwnGelu,
    "sigmoid": OwnSigmoid,
    "silu": Memory,
    "leaky_relu(0.3)": Leaky,
}


@pytest.mark.parametrize("name", ACTS)
def test_an_activation_joins_the_norm(name, ran):
    net, original = pair(lambda: Net(ACTS[name]()))
    check(net, original)
    assert ran == [name, name, "sum none"]
    other = pickle.loads(pickle.dumps(net))
    ran.clear()
    check(other, original)
    assert ran == [name, name, "sum none"]
    check_compiled(net, original)


@pytest.mark.parametrize(("act", "name"), [(Formula(), "silu"), (Subclass(), "relu"), (Formula(1.5), None)])
def test_formulas_and_subclasses(act, name, ran):
    check(*pair(lambda: Net(act)))
    assert ran == ([name, name, "sum none"] if name else ["none", "none", "sum none"])


@pytest.mark.parametrize("train", [False, True])
def test_drop_path(train, ran):
    check(*pair(lambda: Net(nn.SiLU(), DropPath()), train=train))
    assert ran == ["silu", "silu", "none" if train else "sum none"]


class More(nn.Module):
    calls = 0

    def forward(self, x):
        More.calls += 1
        return F.silu(x)


class Prints(nn.Module):
    def forward(self, x):
        print(x.shape)
        return F.silu(x)


class Scaled(nn.Module):
    def forward(self, x):
        return F.silu(x) * 2


class ClassNumber(nn.Module):
    slope = 0.3

    def forward(self, x):
        return F.leaky_relu(x, self.slope)


class HiddenInPlace(nn.Module):
    def forward(self, x):
        return F.silu(x, inplace=True)


class Parametric(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return torch.where(x > 0, x, x * self.slope)


@pytest.mark.parametrize("act", [More, Prints, Scaled, ClassNumber, HiddenInPlace, Parametric])
def test_what_does_more_is_called(act, ran):
    check(*pair(lambda: Net(act())))
    assert ran == ["none", "none", "sum none"]


def number(net, patch):
    net.act.slope = 0.7


def hook(net, patch):
    net.act.register_forward_hook(lambda m, i, o: o * 2)


def own_forward(net, patch):
    net.act.forward = lambda x: x * 2


def class_forward(net, patch):
    patch.setattr(Leaky, "forward", lambda self, x: x * 2)


def code(net, patch):
    patch.setattr(Leaky.forward, "__code__", (lambda self, x: x * 2).__code__)


def function(net, patch):
    patch.setattr(F, "leaky_relu", lambda x, negative_slope: x * 2)


def global_name(net, patch):
    patch.setitem(globals(), "F", OwnFunctions)


class OwnFunctions:
    @staticmethod
    def leaky_relu(x, negative_slope):
        return x * 2


@pytest.mark.parametrize("change", [number, hook, own_forward, class_forward, code, function, global_name])
def test_what_changes_afterwards(change, monkeypatch):
    net, original = pair(lambda: Net(Leaky()))
    check(net, original)
    for model in (net, original):
        change(model, monkeypatch)
    check(net, original)
    monkeypatch.undo()
    check(net, original)


def test_a_function_that_changes(monkeypatch):
    net, original = pair(lambda: Net(Memory(), DropPath()))
    check(net, original)
    monkeypatch.setitem(globals(), "swish", lambda x, inplace: x * 2)
    check(net, original)
    monkeypatch.undo()
    monkeypatch.setattr(swish, "__code__", (lambda x, inplace=False: x * 3).__code__)
    check(net, original)
    monkeypatch.setitem(globals(), "drop_path", lambda x, *_: x * 2)
    check(net, original)
