"""Norms at the end of a module's forward, and what its caller does with their value: one op."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from optimize_pairs import check, check_compiled, hooks_see_the_same, pair


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv(x)))
        return self.norm2(self.conv(x))


class Early(Block):
    """Of its returns only one is a norm."""

    def forward(self, x):
        if x.shape[0] == 100:
            return x
        h = self.conv(x)
        h = self.norm2(h)
        return h


class AdaIN(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm2d(4)
        self.linear = nn.Linear(3, 8)

    def forward(self, x, style):
        scale, shift = self.linear(style)[:, :, None, None].chunk(2, dim=1)
        return (1 + scale) * self.norm(x) + shift


class Outer(nn.Module):
    """Ends in a module that ends in a norm."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        x = torch.tanh(x)
        return self.inner(x)


class Net(nn.Module):
    made = Block

    def __init__(self):
        super().__init__()
        self.block = self.made()
        self.blocks = nn.ModuleList([Block(), Early()])
        self.act = nn.SiLU()


class Adds(Net):
    ran = ("relu", "sum silu")

    def forward(self, x):
        return self.act(x + self.block(x))


class Loop(Net):
    ran = ("relu", "sum relu", "sum relu")

    def forward(self, x):
        for block in self.blocks:
            x = F.relu(block(x) + x)
        return x


class Nested(Adds):
    made = Outer


class Acts(Net):
    made = Early
    ran = ("silu", "gelu")

    def forward(self, x):
        h = self.block(x)
        h = self.act(h)
        return F.gelu(self.block(h))


class Styled(Net):
    made = AdaIN
    ran = ("scaled silu", "scaled none")

    def forward(self, x):
        style = x.mean((2, 3))[:, :3]
        h = self.act(self.block(x, style))
        return x + self.block(h, style).cos()


class Alone(Net):
    """Nobody waits for it."""

    ran = ("relu", "none")

    def forward(self, x):
        return self.block(x).cos()


class Below(Block):
    """Runs the forward of the class above, and that the one of its own."""

    def forward(self, x):
        return x + torch.sin(super().forward(x))


class Lowest(Below):
    def forward(self, x):
        return F.silu(self.norm1(x)) + super().forward(x)


class Inherits(Net):
    made = Lowest
    ran = ("silu", "relu", "none")

    def forward(self, x):
        return self.block(x)


NETS = (Adds, Loop, Nested, Acts, Styled, Alone, Inherits)


@pytest.mark.parametrize("make", NETS)
def test_one_op(make, ran):
    net, original = pair(make)
    check(net, original)
    assert tuple(ran) == make.ran
    ran.clear()
    check(pickle.loads(pickle.dumps(net)), original)
    assert tuple(ran) == make.ran
    check(kgopt.restore(net), original)


@pytest.mark.parametrize("make", NETS)
def test_compiled(make):
    check_compiled(*pair(make))


@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("which", ["block", "norms", "everything"])
def test_hooks_see_what_they_saw(make, which):
    net, original = pair(make)
    watches = {"block": {"block", "blocks.0"}.__contains__, "norms": lambda name: "norm" in name}
    with hooks_see_the_same(net, original, watches.get(which, lambda name: False), which == "everything"):
        check(net, original)


def test_another_forward_later(monkeypatch):
    net, original = pair(Adds)
    for model in (net, original):
        model.block.forward = lambda x: x * 2
    check(net, original)
    for model in (net, original):
        del model.block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: self.conv(x) * 3)
    check(net, original)
    monkeypatch.undo()
    check(net, original)
    monkeypatch.setattr(Block.forward, "__code__", (lambda self, x: self.norm1(x)).__code__)
    check(net, original)


def test_the_code_of_a_forward_without_sites_changes(monkeypatch):
    net, original = pair(Acts)
    monkeypatch.setattr(Early.forward, "__code__", (lambda self, x: self.conv(x)).__code__)
    check(net, original)
    monkeypatch.undo()
    monkeypatch.setattr(Early, "forward", lambda self, x: self.conv(x) * 3)
    check(net, original)


def test_the_class_above_has_another_forward_later(monkeypatch):
    net, original = pair(Inherits)
    for cls in (Block, Below):
        with monkeypatch.context() as patched:
            patched.setattr(cls, "forward", lambda self, x: self.conv(x) * 3)
            check(net, original)
        check(net, original)
    monkeypatch.setattr(Block.forward, "__code__", (lambda self, x: self.norm1(x)).__code__)
    check(net, original)


def test_a_block_is_called_by_itself():
    net, original = pair(Acts)
    x = torch.randn(2, 4, 5, 6).double()
    y = net.block(x)
    assert type(y) is torch.Tensor
    torch.testing.assert_close(y, original.block(x), rtol=1e-9, atol=1e-9)
    assert type(net.block.forward(x)) is torch.Tensor
