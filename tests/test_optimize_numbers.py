"""A norm's value, and numbers that stand in the code or that the module holds: part of the norm's op."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt.rewrite.chains.meanings import CLAMP_STOPS
from optimize_pairs import check, check_compiled, pair, results


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)
        self.divisor, self.factor, self.offset, self.flag = 2.0, -0.5, 3, True


class Literals(Net):
    acts = ("mul(0.5)+add(1.0)", "add(-2.0)+mul(0.25)+relu", "mul(3.0)")

    def forward(self, x):
        x = self.norm(self.conv(x)) * 0.5 + 1
        x = F.relu((self.norm(x) - 2) / 4)
        return 3 * self.other(x)


class Held(Net):
    acts = ("mul(0.5)", "mul(-0.5)+add(3.0)+tanh")

    def forward(self, x):
        x = self.conv(x)
        x = self.norm(x)
        x = x / self.divisor
        return torch.tanh(self.offset + self.factor * self.other(x))


class InCalls(Net):
    """Bounds and slopes that the module holds."""

    acts = ("hardtanh(-0.5,3.0)", "leaky_relu(2.0)", "elu(2.0)+mul(2.0)")

    def forward(self, x):
        x = F.hardtanh(self.norm(self.conv(x)), self.factor, max_val=self.offset)
        x = F.leaky_relu(self.norm(x), self.divisor)
        return F.elu(self.other(x), alpha=self.divisor) * self.divisor


class Clamps(Net):
    acts = ("clamp(-0.5,3.0)", "clamp(-0.5,1.0)+mul(2.0)") if CLAMP_STOPS else ()

    def forward(self, x):
        x = torch.clamp(self.norm(self.conv(x)), self.factor, max=self.offset)
        return self.other(x).clamp(self.factor, 1.0) * self.divisor


class FewerDims(Net):
    """A parameter ``[C, 1, 1]``, as broadcasting takes it."""

    acts = ("scaled none", "scaled tanh")

    def __init__(self):
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.rand(4, 1, 1) + 0.5) for _ in range(2))

    def forward(self, x):
        x = self.other(x) * self.scale + self.shift
        x = self.norm(self.conv(x)) * self.scale
        return torch.tanh(x)


class ScaledSums(Net):
    """By numbers that show when the code runs, on either side of the product."""

    acts = ("sum mul(0.7071)", "sum mul(0.5)", f"sum mul({1 / (1 / 2**-0.5)!r})", "sum mul(-0.5)")

    def forward(self, x):
        x = 0.7071 * (x + self.norm(self.conv(x)))
        h = self.norm(x)
        x = (x + h) / self.divisor
        x = (self.other(x) + x) * 2**-0.5
        h = self.norm(x)
        h = (h + x) * self.factor
        return h


class Roots(Net):
    acts = (f"sum mul({1 / math.sqrt(2)!r})", f"sum mul({1 / math.sqrt(3)!r})")

    def forward(self, x):
        x = (x + self.norm(self.conv(x))) / math.sqrt(2)
        h = self.other(x)
        return (h + x) / np.sqrt(3.0)


class WithScale(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, 1, 1) + 0.5)


class Gates(WithScale):
    """``h * torch.sigmoid(h)`` behind a scale."""

    acts = ("scaled silu", "scaled silu", "scaled silu")

    def forward(self, x):
        h = self.norm(self.conv(x))
        h = h * self.scale
        h = h * torch.sigmoid(h)
        h = self.other(self.conv(h)) * self.scale
        y = F.sigmoid(h) * h
        h = self.norm(self.conv(y))
        h = h * self.scale
        return h * h.sigmoid()


class NoGates(WithScale):
    """Read again, another function, another value."""

    acts = ("scaled none", "scaled none", "scaled none")

    def forward(self, x):
        h = self.norm(self.conv(x)) * self.scale
        y = h * torch.sigmoid(h)
        h = self.norm(self.conv(y + h)) * self.scale
        h = h * torch.tanh(h)
        g = self.norm(self.conv(h)) * self.scale
        return g * torch.sigmoid(h)


class ScaledByTensors(WithScale):
    """Sums that a tensor scales, and what stands behind another sum."""

    acts = ("sum none", "sum none", "sum none")

    def forward(self, x):
        x = (x + self.norm(self.conv(x))) * self.scale
        h = self.norm(x)
        x = (h + x) / self.scale
        return (x + self.norm(x)) * self.flag


class Others(Net):
    """What is no such number: in front, a power, another order, zero, a truth value, a tensor."""

    acts = ("none", "none", "none", "none", "none")

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1, 1, 1, 1), 0.5))

    def forward(self, x):
        x = self.norm(x * 2) ** 2
        x = 1 - self.norm(x)
        x = 1 / self.norm(x).abs().add(1)
        x = self.norm(x) + self.flag
        return self.other(x) * self.scale


class Extreme(Net):
    """Infinity, NaN, and numbers beyond any float."""

    def __init__(self):
        super().__init__()
        self.high, self.nothing, self.large, self.small = float("inf"), float("nan"), 10**400, 1e-320

    def forward(self, x):
        x = self.norm(self.conv(x)).clamp(-1, self.high)
        x = torch.clamp(self.norm(x), min=0) * 1e-300 * 1e300
        x = torch.where(x > 9, self.norm(x) * self.nothing, x)
        if self.training and x.shape[0] > 99:
            return self.norm(x) * self.large + 10**400
        return torch.tanh(self.other(x) / self.small)


class ExtremeSums(Extreme):
    def forward(self, x):
        found = [(x + self.norm(x)) * self.high, (self.norm(x) + x) / self.high, (x + self.norm(x)) * self.nothing]
        found += [(x + self.norm(x)) / self.nothing, 0 * (x + self.norm(x)), (x + self.norm(x)) / self.small]
        return torch.stack([*found, (x + self.norm(x)) * self.small])


class ReadTwice(Net):
    acts = ("none",)

    def forward(self, x):
        h = self.norm(x)
        return h * 2 + h.mean()


NETS = (
    *(Literals, Held, InCalls, Clamps, FewerDims, ScaledSums, Roots, Gates, NoGates, ScaledByTensors),
    *(Others, ReadTwice),
)


@pytest.mark.parametrize("make", NETS)
def test_one_op(make, ran):
    net, original = pair(make)
    check(net, original)
    assert tuple(a for a in ran if a != "none") == tuple(a for a in make.acts if a != "none")
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        ran.clear()
        check(again, original)
        assert tuple(a for a in ran if a != "none") == tuple(a for a in make.acts if a != "none")


@pytest.mark.parametrize("make", NETS)
def test_compiled(make):
    check_compiled(*pair(make))


@pytest.mark.parametrize("make", [Extreme, ExtremeSums])
def test_extreme_numbers(make):
    net, original = pair(make)
    x = torch.randn(2, 4, 5, 6).double()
    with torch.no_grad():
        torch.testing.assert_close(net(x), original(x), rtol=1e-9, atol=1e-9, equal_nan=True)


def test_a_number_beyond_any_float_behind_a_sum():
    net, original = pair(ScaledSums)
    net.divisor = original.divisor = 10**400
    for model in (net, original):
        with pytest.raises((OverflowError, RuntimeError)):
            model(torch.randn(2, 4, 5, 6).double())


def test_another_number_later(ran):
    net, original = pair(Held)
    for number in (2.0, 4.0, 2, torch.tensor(3.0, dtype=torch.float64)):
        net.divisor = original.divisor = number
        ran.clear()
        check(net, original)
        assert ("mul(0.5)" in ran) is (type(number) is float and number == 2.0)
    net, original = pair(InCalls)
    net.factor = original.factor = -0.25
    net.divisor = original.divisor = 1.5
    check(net, original)
    fast = torch.compile(net, backend="eager")
    for number in (2.0, 5.0, 7.0):
        net.divisor = original.divisor = number
        check(fast, original)


def test_models_that_hold_other_numbers_do_not_share_code():
    one, first = pair(Held)
    with torch.random.fork_rng():
        second = Held().double()
    second.divisor = 8.0
    two = copy.deepcopy(second)
    kgopt.optimize(two, measure=False)
    check(one, first)
    check(two, second)


def test_what_a_tensor_does_was_replaced(monkeypatch):
    net, original = pair(Literals)
    monkeypatch.setattr(torch.Tensor, "__truediv__", lambda x, y: torch.mul(x, y))
    check(net, original)
    monkeypatch.setattr(torch.Tensor, "__rmul__", lambda x, y: torch.mul(x, y) + 1)
    check(net, original)


@pytest.mark.parametrize(
    ("make", "place", "name", "other"),
    [
        (ScaledSums, torch.Tensor, "__mul__", lambda x, y: torch.mul(x, y) + 1),
        (ScaledSums, torch.Tensor, "__rmul__", lambda x, y: torch.mul(x, y) + 1),
        (Roots, math, "sqrt", lambda x: x + 1),
        (Gates, torch, "sigmoid", torch.tanh),
        (Gates, torch.Tensor, "sigmoid", lambda x: torch.tanh(x)),
        (Gates, torch.Tensor, "__mul__", lambda x, y: torch.mul(x, y) + 1),
    ],
)
def test_what_scaled_sums_and_gates_call_was_replaced(make, place, name, other, monkeypatch):
    net, original = pair(make)
    before = results(original)[0]
    monkeypatch.setattr(place, name, other)
    check(net, original)
    assert not torch.allclose(results(original)[0], before)
