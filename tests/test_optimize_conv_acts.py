"""Activations behind convolutions and behind their sums: when they are part of one op."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt.rewrite import glue, sums
from kgopt.rewrite.glue import plans


class Block(nn.Module):
    """pytorch3dunet's residual block of the order "gcr": a sum and an activation behind the last convolution."""

    def __init__(self, act=None):
        super().__init__()
        self.conv1 = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True))
        self.conv2 = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1))
        self.act = nn.ReLU(inplace=True) if act is None else act

    def forward(self, x):
        out = self.conv1(x)
        out = self.conv2(out)
        out += x
        out = self.act(out)
        return out


class Nested(Block):
    def forward(self, x):
        return F.leaky_relu(x + self.conv2(self.conv1(x)), 0.2)


class Named(Block):
    def forward(self, x):
        out = self.conv1(x)
        out = self.conv2(out)
        out = out + x
        return self.act(out)


def draw(*shape):
    return torch.randn(shape or (2, 4, 6, 8))


def optimized(model, x):
    """The original, and a copy whose calls were all found to be faster."""
    original = model.eval()
    model = kgopt.optimize(copy.deepcopy(original), measure=False)
    with torch.no_grad():
        glue.find(model, lambda: model(x), lambda path: "", always=True)
    return original, model


def acts_run(model, x, monkeypatch):
    """The activations that ran as part of a convolution's op, and the result."""
    names = []
    run = plans._conv_add

    def counted(*args, **kwargs):
        names.append((args[-1], args[3] is not None))
        return run(*args, **kwargs)

    monkeypatch.setattr(plans, "_conv_add", counted)
    y = model(x)
    monkeypatch.setattr(plans, "_conv_add", run)
    return names, y


ACTS = [
    (nn.ReLU(inplace=True), "relu"),
    (nn.ELU(inplace=True), "elu"),
    (nn.LeakyReLU(0.1), "leaky_relu(0.1)"),
    (nn.SiLU(), "silu"),
    (nn.PReLU(4), "none"),  # its slopes are a parameter
]


@pytest.mark.parametrize(("act", "name"), ACTS, ids=str)
def test_an_activation_behind_a_convolutions_sum(act, name, monkeypatch, poisoned):
    x = draw()
    original, model = optimized(Block(act), x)
    with torch.no_grad():
        names, y = acts_run(model, x.clone(), monkeypatch)
        assert names == [("relu", False), (name, True)]
        torch.testing.assert_close(y, original(x.clone()))
        names, y = acts_run(model, draw(1, 4, 5, 5), monkeypatch)  # not measured
        assert names == []
    names, y = acts_run(model, x.clone(), monkeypatch)  # with gradients
    assert names == []
    torch.testing.assert_close(y, original(x.clone()))


@pytest.mark.parametrize(("cls", "name"), [(Nested, "leaky_relu(0.2)"), (Named, "relu")])
def test_ways_to_write_it(cls, name, monkeypatch):
    x = draw()
    original, model = optimized(cls(), x)
    with torch.no_grad():
        for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            names, y = acts_run(twin, x, monkeypatch)
            assert names == [("relu", False), (name, True)]
            torch.testing.assert_close(y, original(x))
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), original(x))


def test_who_looks_at_the_sum_sees_it(monkeypatch):
    x = draw()
    original, model = optimized(Block(), x)
    seen = []
    for m in (original, model):
        m.act.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with torch.no_grad():
        names, y = acts_run(model, x.clone(), monkeypatch)
        assert names == [("relu", False), ("none", True)]
        torch.testing.assert_close(y, original(x.clone()))
    torch.testing.assert_close(*seen)
    with torch.no_grad():  # an activation that no op has
        model.act = original.act = nn.RReLU().eval()
        torch.testing.assert_close(model(x.clone()), original(x.clone()))


class Head(nn.Module):
    """A Sequential that ends in a convolution to one channel, which may read the norm's input itself."""

    def __init__(self):
        super().__init__()
        self.tail = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 1, 1), nn.Conv2d(1, 1, 1))

    def forward(self, x):
        return self.tail(x) + x[:, :1]


class NormTail(nn.Module):
    def __init__(self):
        super().__init__()
        self.tail = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))
        self.act = nn.ReLU()

    def forward(self, x):
        h = self.tail(x)
        h += x
        return self.act(h)


class Deep(nn.Module):
    """A chain reaches from one inner Sequential into the next."""

    def __init__(self):
        super().__init__()
        one = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.tail = nn.Sequential(one, nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1)))

    def forward(self, x):
        return F.silu(self.tail(x) + x)


@pytest.mark.parametrize("cls", [Head, NormTail, Deep])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_sequentials_with_sites_that_end_in_what_waits(cls, autocast):
    x = draw()
    original, model = optimized(cls(), x)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, y = original(x.clone()), model(x.clone())
        assert y.dtype is expected.dtype
        torch.testing.assert_close(y, expected, rtol=2e-2 if autocast else 1e-5, atol=2e-2 if autocast else 1e-5)
    model.tail[0], original.tail[0] = nn.Identity(), nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(model(x.clone()), original(x.clone()))
    model.tail.append(nn.ReLU())
    original.tail.append(nn.ReLU())
    with torch.no_grad():
        torch.testing.assert_close(model(x.clone()), original(x.clone()))


def test_a_norm_at_the_end_of_a_sequential_with_sites_waits_for_its_sum(monkeypatch):
    x = draw()
    _, model = optimized(NormTail(), x)
    acts = []
    plus = sums.LaterNorm.plus
    monkeypatch.setattr(sums.LaterNorm, "plus", lambda *args: (acts.append(args[3]), plus(*args))[1])
    with torch.no_grad():
        model(x.clone())
    assert acts == ["relu"]


def test_a_deep_tail_is_one_op_with_its_sum(monkeypatch):
    x = draw()
    original, model = optimized(Deep(), x)
    with torch.no_grad():
        names, y = acts_run(model, x, monkeypatch)
        torch.testing.assert_close(y, original(x))
    assert names[-1] == ("silu", True)
