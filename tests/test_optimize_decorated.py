"""Methods inside a decorator: the function that it calls is rewritten, the decorator runs as it did."""

from __future__ import annotations

import functools
import inspect
import pickle

import pytest
import torch
from torch import nn

import kgopt
from optimize_pairs import pair

CALLS = []


def logged(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        CALLS.append(type(self).__name__)
        try:
            return function(self, *args, **kwargs)
        finally:
            CALLS.append("end")

    return wrapper


def scaled(name):
    """As diffusers' apply_lora_scale: a decorator with an argument, which the wrapper reads."""

    def decorator(function):
        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            scale = kwargs.pop(name, 1.0)
            return function(self, *args, **kwargs) * scale

        return wrapper

    return decorator


def remembering(function):
    """Does more with the function than call it."""

    @functools.wraps(function)
    def wrapper(self, x):
        CALLS.append(function)
        return function(self, x)

    return wrapper


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, 4), nn.SiLU()


class Logged(Base):
    @logged
    def forward(self, x):
        x = self.norm(x)
        return self.act(x)


class Scaled(Base):
    @scaled("scale")
    def forward(self, x, *, more: float = 0.0):
        x = self.norm(x)
        return self.act(x) + more


class NoGrad(Base):
    @torch.no_grad()
    def forward(self, x):
        x = self.norm(x)
        return self.act(x)


class Remembering(Base):
    @remembering
    def forward(self, x):
        x = self.norm(x)
        return self.act(x)


class Twice(Base):
    @logged
    @logged
    def forward(self, x):
        x = self.norm(x)
        return self.act(x)


X = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(1)).double()


def check(net, original, **keywords):
    torch.testing.assert_close(net(X, **keywords), original(X, **keywords), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [Logged, Scaled])
def test_it_is_fused(make):
    net, original = pair(make)
    assert kgopt.report(net).sites[0].became == "group_norm(act=silu)"
    CALLS.clear()
    ours = net(X)
    calls = list(CALLS)
    CALLS.clear()
    torch.testing.assert_close(ours, original(X), rtol=1e-9, atol=1e-9)
    assert calls == CALLS
    check(pickle.loads(pickle.dumps(net)), original)
    assert inspect.unwrap(type(net).forward) is inspect.unwrap(make.forward)
    assert inspect.signature(net.forward) == inspect.signature(original.forward)
    kgopt.restore(net)
    check(net, original)


def test_arguments_reach_both():
    net, original = pair(Scaled)
    check(net, original, scale=3.0, more=0.5)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, scale=2.0), original(X, scale=2.0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [Remembering, Twice])
def test_it_is_left_alone(make):
    net, original = pair(make)
    check(net, original)
    assert "wrapped by a decorator" in kgopt.report(net).sites[0].reason


def test_no_grad():
    net, original = pair(NoGrad)
    check(net, original)
    assert not net(X).requires_grad


def other(self, x, **_):
    return x * 2


@pytest.mark.parametrize("make", [Logged, Scaled])
def test_replaced_afterwards(make, monkeypatch):
    net, original = pair(make)
    monkeypatch.setattr(make, "forward", other)
    assert torch.equal(net(X), X * 2)
    monkeypatch.undo()
    check(net, original)
    monkeypatch.setattr(make.forward.__wrapped__, "__code__", other.__code__)
    check(net, original)
    monkeypatch.undo()
    monkeypatch.setattr(net, "forward", lambda x: x * 3)
    assert torch.equal(net(X), X * 3)
