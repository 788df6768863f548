"""Slices of Sequentials and ModuleLists that a forward calls or goes through."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from optimize_pairs import check, check_compiled, pair


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.ReLU()),
            *(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()),
        )


class Halves(Base):
    acts = ("relu", "silu")

    def forward(self, x):
        h = self.layers[:3](x)
        return self.layers[3:](h) + h


class Cut(Base):
    """The slices part a norm from its activation, and one has a sum behind it."""

    acts = ("relu", "sum tanh")

    def forward(self, x):
        h = F.relu(self.layers[:2](x))
        return torch.tanh(self.layers[2:-1](h) + x)


class InLoops(Base):
    acts = ("relu", "silu")

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ModuleList(self.layers)

    def forward(self, x):
        for layer in self.layers[:3]:
            x = layer(x)
        for _, layer in enumerate(self.listed[3:]):
            x = layer(x)
        return x


class Nested(nn.Module):
    """A norm and its activation stand in two Sequentials inside."""

    acts = ("relu",)

    def __init__(self) -> None:
        super().__init__()
        one, two = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)), nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.layers = nn.Sequential(nn.Conv2d(4, 4, 1), one, two, nn.Tanh())

    def forward(self, x):
        return self.layers[1:](x) + self.layers[2:3](x)


class Backwards(Base):
    """In another order, and with gaps."""

    acts = ("none", "none", "sum none")

    def forward(self, x):
        return self.layers[::-1](x) + self.layers[:5:2](x) + self.layers[9:](x)


NETS = (Halves, Cut, InLoops, Nested, Backwards)


@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("train", [False, True])
def test_one_op(make, train, ran):
    net, original = pair(make, train=train)
    for twin in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        ran.clear()
        check(twin, original)
        assert tuple(ran) == make.acts


@pytest.mark.parametrize("make", NETS)
def test_compiled(make):
    """A slice of a Sequential of ours was an object that Dynamo could not trace."""
    check_compiled(*pair(make))


def test_a_slice_is_a_sequential():
    net, original = pair(Halves)
    part = net.layers[1:3]
    assert isinstance(part, nn.Sequential)
    assert repr(part) == repr(original.layers[1:3])
    assert [name for name, _ in part.named_parameters()] == ["1.weight", "1.bias"]
    assert part[0] is net.layers[1]
    assert repr(part[:1]) == repr(original.layers[1:2])
    x, theirs = torch.randn(2, 4, 5, 6).double(), original.layers[1:3]
    expected = theirs(x)
    for twin in (part, copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        torch.testing.assert_close(twin(x), expected)
    for both in (part, theirs):
        both.append(nn.Tanh())  # under the name of the ReLU
    torch.testing.assert_close(part(x), theirs(x))
    assert len(net.layers) == 6
    assert type(kgopt.restore(net).layers[1:3]) is nn.Sequential


def test_layers_and_hooks_that_come_later(ran):
    net, original = pair(Halves)
    seen = []
    for model in (net, original):
        model.layers.append(nn.Sigmoid())
        model.layers[2].register_forward_hook(lambda m, args, y: seen.append(y.sum()))
    check(net, original)
    assert len(seen) == 2
    torch.testing.assert_close(*seen)


class Doubled(nn.Sequential):
    """Its slices are its own business."""

    def __getitem__(self, i):
        part = super().__getitem__(i)
        return nn.Sequential(*part, nn.Tanh()) if isinstance(i, slice) else part


def test_a_user_s_slices():
    def make():
        net = Halves()
        net.layers = Doubled(*net.layers)
        return net

    check(*pair(make))


def test_what_slices_was_replaced(monkeypatch):
    net, original = pair(Halves)
    whole = nn.Sequential.__getitem__

    def twice(self, i):
        part = whole(self, i)
        return nn.Sequential(*part, nn.Tanh()) if isinstance(i, slice) else part

    monkeypatch.setattr(nn.Sequential, "__getitem__", twice)
    check(net, original)
