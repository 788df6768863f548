"""Sums behind norms with what may do nothing in between, and in branches."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import optimize_pairs
from optimize_pairs import check, check_compiled

pair = functools.partial(optimize_pairs.pair, train=False)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.drop = nn.Identity()
        self.drop2 = nn.Dropout(0.5)
        self.act = nn.ReLU()
        self.skips = True
        self.rate = 0.0
        self.stride = 1


class Branch(Base):
    """As timm's InvertedResidual."""

    def forward(self, x):
        shortcut = x
        x = self.conv(x)
        x = self.norm(x)
        if self.skips:
            x = self.drop(x) + shortcut
        return x


class Compared(Base):
    """As MONAI's MBConvBlock."""

    def forward(self, inputs):
        x = self.norm(self.conv(inputs))
        if self.skips and self.stride == 1:
            if self.rate:
                x = x * (1 - self.rate)
            x = x + inputs
        return x


class InPlace(Base):
    def forward(self, x):
        y = self.norm(self.conv(x))
        if self.skips:
            y += x
        return y


class Passed(Base):
    """As timm's ResNetV2."""

    def forward(self, x):
        shortcut = x
        x = self.norm(self.conv(x))
        x = self.drop(x)
        x = self.act(x + shortcut)
        return x


class Nested(Base):
    def forward(self, x):
        y = self.norm(self.conv(x))
        return x + self.drop(self.drop2(y))


class ConvBetween(Base):
    """The convolution is no module that may do nothing."""

    def forward(self, x):
        y = self.norm(x)
        y = self.conv(y)
        return y + x


class EitherWay(Base):
    """Both branches give something."""

    def forward(self, x):
        y = self.norm(self.conv(x))
        if self.skips:
            y = self.drop(y) + x
            y = self.act(y)
        else:
            y = self.act(y * 2)
        return y


class Returned(Base):
    def forward(self, x):
        y = self.norm(self.conv(x))
        return self.act(x + y) if self.skips else self.drop(y)


class Chosen(Base):
    def forward(self, x):
        y = self.norm(self.conv(x))
        y = y + x if self.skips else y
        return self.conv2(y)


FORMS = {
    **{Branch: ["none"], Compared: ["none"], InPlace: ["none"], Passed: ["relu"], Nested: ["none"], ConvBetween: []},
    **{EitherWay: ["relu"], Returned: ["relu"], Chosen: ["none"]},
}


@pytest.mark.parametrize("make", FORMS)
def test_the_sum_is_one_op(make, summed):
    net, original = pair(make)
    check(net, original)
    assert summed == FORMS[make]
    check_compiled(net, original)


def no_skip(net):
    net.skips = False


def other_stride(net):
    net.stride = 2


def rate(net):
    net.rate = 0.25


def dropping(net):
    net.drop = nn.Dropout(0.5)
    net.train()


def doubling(net):
    net.drop = nn.Upsample(scale_factor=1)
    net.drop.register_forward_hook(lambda m, i, o: o * 2)


def hook(net):
    net.drop.register_forward_hook(lambda m, i, o: o * 2)


def own_forward(net):
    net.drop.forward = lambda x: x * 2


def act_hook(net):
    net.act.register_forward_hook(lambda m, i, o: o * 2)


@pytest.mark.parametrize("change", [no_skip, other_stride, rate, dropping, doubling, hook, own_forward, act_hook])
@pytest.mark.parametrize("make", FORMS)
def test_what_changes_afterwards(make, change):
    net, original = pair(make)
    for model in (net, original):
        change(model)
    check(net, original)


def test_a_patched_class(monkeypatch):
    net, original = pair(Passed)
    monkeypatch.setattr(nn.Identity, "forward", lambda self, x: x * 2)
    check(net, original)


def test_global_hooks_see_the_module_that_does_nothing():
    net, original = pair(Branch)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: seen.append((type(m).__name__, o.sum())))
    try:
        x = torch.randn(1, 4, 5, 5).double()
        net(x)
        ours = list(seen)
        seen.clear()
        original(x)
    finally:
        handle.remove()
    assert [name for name, _ in ours] == [name for name, _ in seen]
    torch.testing.assert_close([value for _, value in ours], [value for _, value in seen])


def test_training(summed):
    check(*pair(Branch, train=True))
    assert summed == ["none"]


class Keeps(nn.Module):
    """Holds on to what it returns."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        self.kept = self.norm(x)
        return self.kept


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.act, self.conv = Keeps(), nn.SiLU(), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv(self.act(self.inner(x)))


def test_an_attribute_holds_a_tensor():
    """It held kgopt's value that waits for the activation outside."""
    net, original = pair(Outer)
    check(net, original)
    assert type(net.inner.kept) is torch.Tensor
    torch.testing.assert_close(net.inner.kept, original.inner.kept, rtol=1e-9, atol=1e-9)
