"""Norms and activations that a method reaches through a property, in a counted loop or in a function of its own, as
OpenMMLab's do.
"""

from __future__ import annotations

import ast
import copy
import pickle
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kgopt
from kgopt.rewrite.source.syntax.names import counters
from optimize_pairs import check, check_compiled, pair


class Base(nn.Module):
    def __init__(self, order=("conv", "norm", "act")) -> None:
        super().__init__()
        self.order, self.norm_name, self.with_norm = order, "gn", True
        self.conv, self.activate = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True)
        self.add_module("gn", nn.GroupNorm(2, 4))
        self.last = nn.Conv2d(4, 2, 1)

    @property
    def norm(self):
        return getattr(self, self.norm_name) if self.norm_name else None


class Property(Base):
    def forward(self, x):
        x = self.conv(x)
        x = self.norm(x)
        x = self.activate(x)
        return self.last(x)


class ForLoop(Base):
    """mmcv's ConvModule, as it was."""

    def forward(self, x, activate=True):
        for layer in self.order:
            if layer == "conv":
                x = self.conv(x)
            elif layer == "norm" and self.with_norm:
                x = self.norm(x)
            elif layer == "act" and activate:
                x = self.activate(x)
        return self.last(x)


class WhileLoop(Base):
    """As it is."""

    def forward(self, x, activate=True):
        layer_index = 0
        while layer_index < len(self.order):
            layer = self.order[layer_index]
            if layer == "conv":
                x = self.conv(x)
            elif layer == "norm" and self.with_norm:
                x = self.norm(x)
            elif layer == "act" and activate:
                x = self.activate(x)
            layer_index += 1
        return self.last(x)


@pytest.mark.parametrize("net", [Property, ForLoop, WhileLoop])
@pytest.mark.parametrize("train", [False, True])
def test_an_activation_joins(net, train, ran):
    ours, original = pair(net, train=train)
    check(ours, original, (2, 2, 5, 6))
    assert ran == ["relu"]
    check_compiled(ours, original, (2, 2, 5, 6))


def assert_equal_values(ours, original):
    x = torch.randn(2, 2, 5, 6).double()
    with torch.no_grad():
        torch.testing.assert_close(ours(x.clone()), original(x.clone()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "order", [("act", "conv", "norm"), ("conv", "norm", "norm", "act"), ("conv",), ("conv", "act")], ids="+".join
)
@pytest.mark.parametrize("net", [ForLoop, WhileLoop])
def test_other_orders(net, order):
    ours, original = pair(lambda: net(order))
    assert_equal_values(ours, original)
    if order[0] != "act":  # which writes to x
        check(ours, original, (2, 2, 5, 6))


def test_what_a_property_gives_may_change(ran):
    ours, original = pair(Property)
    for name, module in (("other", nn.Sequential(nn.GroupNorm(4, 4), nn.Tanh())), ("same", nn.Identity())):
        for net in (ours, original):
            net.add_module(name, module.double())
            net.norm_name = name
        ran.clear()
        assert_equal_values(ours, original)
        assert "relu" not in ran
    for net in (ours, original):
        net.norm_name = None
        with pytest.raises(TypeError):
            net(torch.randn(2, 2, 5, 6).double())


class Computed(Base):
    """A property that is no module, and one that a module's attribute hides."""

    @property
    def twice(self):
        return lambda t: t * 2

    def forward(self, x):
        x = self.norm(self.conv(x))
        x = self.twice(x)
        x = self.activate(x)
        return self.last(x)


class WhileItIsLarge(Base):
    """The loop's test reads what waits."""

    def forward(self, x):
        x = self.conv(x)
        count = 0
        while count < 3 and x.abs().max() > 0.5:
            x = self.norm(x)
            x = x * 0.5
            count += 1
        return self.last(x)


class NoCounter(Base):
    """``n += 1`` writes to what the norm has read."""

    def forward(self, x):
        x = self.conv(x)
        n = x
        for _ in range(2):
            x = self.norm(x)
            n += 1
            x = self.activate(x)
        return self.last(x + n)


class Else(Base):
    def forward(self, x):
        x, i = self.conv(x), 0
        while i < 2:
            x = self.norm(x)
            i += 1
        else:
            x = x + 1
        return self.last(self.activate(x))


@pytest.mark.parametrize("net", [Computed, WhileItIsLarge, NoCounter, Else])
def test_what_is_not_to_be_joined(net):
    ours, original = pair(net)
    assert_equal_values(ours, original)
    check(ours, original, (2, 2, 5, 6)) if net is not NoCounter else None


def test_counters():
    tree = ast.parse(
        textwrap.dedent("""
        def f(x, given=0):
            i = 0
            j = 1
            k = x
            n = m = 2
            given += 1
            for loop in range(3):
                i += 1
                j += x
                k += 1
            flag = True
            return i
        """)
    ).body[0]
    assert counters(tree) == {"i"}


class Inner(Base):
    """A function for torch.utils.checkpoint, as mmcls' ResNets have it."""

    def __init__(self, use=False) -> None:
        super().__init__()
        self.use, self.other = use, nn.GroupNorm(2, 4)

    def forward(self, x):
        scale = 2.0

        def _inner_forward(x):
            identity = self.conv(x)
            out = self.norm(identity)
            out = self.activate(out)
            out = self.other(out)
            out = out + identity
            return out * scale

        if self.use and x.requires_grad:
            out = checkpoint(_inner_forward, x, use_reentrant=False)
        else:
            out = _inner_forward(x)
        scale = 3.0
        return self.last(self.activate(out)) * scale


class Inherits(Inner):
    def forward(self, x):
        return super().forward(x) * 2


class Counts(Base):
    """Functions that do more than a method's code may."""

    def forward(self, x):
        calls = []

        def first(t, power=1):
            calls.append(power)
            return self.activate(self.norm(self.conv(t)))

        def second(self, t):
            return self.last(t)

        def third(t):
            return next(self.activate(self.gn(u)) for u in (t,))

        y = third(first(x))
        assert calls == [1]
        return second(self, y)


@pytest.mark.parametrize("use", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("net", [Inner, Inherits])
def test_functions_inside_a_method(net, use, train, ran):
    ours, original = pair(lambda: net(use), train=train)
    check(ours, original, (2, 2, 5, 6))
    assert ran[:2] == ["relu", "sum none"]
    check_compiled(ours, original, (2, 2, 5, 6))
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        check(twin, original, (2, 2, 5, 6))
    for model in (ours, original):
        model.other = nn.Identity()
    ran.clear()
    check(ours, original, (2, 2, 5, 6))
    assert "sum none" not in ran


def test_functions_inside_that_are_left_alone():
    ours, original = pair(Counts)
    check(ours, original, (2, 2, 5, 6))


class Bottleneck(Base):
    """As mmcls' BasicBlock: both norms are properties."""

    def __init__(self) -> None:
        super().__init__()
        self.other_name, self.downsample = "other", nn.Conv2d(2, 4, 1)
        self.conv2, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(4, 4)

    @property
    def norm2(self):
        return getattr(self, self.other_name)

    def forward(self, x):
        def _inner_forward(x):
            identity = x
            out = self.conv(x)
            out = self.norm(out)
            out = self.activate(out)
            out = self.conv2(out)
            out = self.norm2(out)
            if self.downsample is not None:
                identity = self.downsample(x)
            out += identity
            return out

        return self.last(self.activate(_inner_forward(x)))


class Stages(Base):
    """Sums behind norms that a loop names, under one name and under two."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 1) for _ in range(3)])
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4) for _ in range(3)])

    def forward(self, x):
        x = self.conv(x)
        for conv, norm in zip(self.convs, self.norms):  # noqa: B905
            h = norm(conv(x))
            x = torch.tanh(x + h)
        for i in range(3):
            h = self.convs[i](x)
            h = self.norms[i](h)
            h += x
            x = self.activate(h)
        return self.last(x)


class Operands(Base):
    """What a norm's value is added to, and what the sum is multiplied with, are properties."""

    @property
    def skip(self):
        return self.short

    @property
    def factor(self):
        return self.half

    def __init__(self) -> None:
        super().__init__()
        self.short, self.half, self.act = nn.Conv2d(2, 4, 1), 0.5, nn.SiLU()

    def forward(self, x):
        y = self.gn(self.conv(x)) + self.skip(x)
        y = self.activate((y + self.norm(self.conv(x))) * self.factor)
        z = (self.skip(x) + self.norm(self.conv(x))) / self.factor
        z = self.act(z)
        return self.last(y + z)


SUMS = {
    Bottleneck: ["relu", "sum none"],
    Stages: ["sum tanh"] * 3 + ["sum relu"] * 3,
    Operands: ["sum none", "sum mul(0.5)+relu", "sum mul(2.0)+silu"],
}


@pytest.mark.parametrize("net", SUMS)
@pytest.mark.parametrize("train", [False, True])
def test_sums(net, train, ran):
    ours, original = pair(net, train=train)
    check(ours, original, (2, 2, 5, 6))
    assert ran == SUMS[net]
    check_compiled(ours, original, (2, 2, 5, 6))
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        check(twin, original, (2, 2, 5, 6))


def test_the_operands_of_sums_may_change(ran):
    ours, original = pair(Operands)
    for name, value in (("half", 3), ("half", torch.tensor(0.25).double()), ("short", nn.Conv2d(2, 1, 1).double())):
        for net in (ours, original):
            setattr(net, name, value)
        check(ours, original, (2, 2, 5, 6))
    ours, original = pair(Bottleneck)
    for name, module in (("norm", nn.Conv2d(4, 4, 1)), ("other", nn.InstanceNorm2d(4)), ("other", nn.Identity())):
        for net in (ours, original):
            net.add_module("gn" if name == "norm" else name, module.double())
        check(ours, original, (2, 2, 5, 6))


def test_the_original_methods_come_back():
    net = Property().eval()
    kgopt.restore(kgopt.optimize(net, measure=False))
    assert type(net) is Property
