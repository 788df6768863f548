"""Users' functions that are an activation, behind a norm in code: read, fused, and called where they have changed."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optimize_pairs import check, check_compiled, pair


def swish(x):
    """As in latent diffusion's autoencoders, whose name for it is nonlinearity."""
    return x * torch.sigmoid(x)


def gated(x):
    gate = x.sigmoid()
    return x.mul(gate)


def by_name(x, kind="gelu"):
    return getattr(F, kind)(x)


def leaky(x, slope=0.2):
    """Calls another one."""
    return _leaky(x, slope)


def _leaky(x, slope):
    return F.leaky_relu(x, negative_slope=slope)


def doubled(x):
    return swish(x) * 2


def mish(x):
    return x * (torch.tanh(F.softplus(x)))


class Mish(nn.Module):
    def forward(self, x):
        return x.mul(F.softplus(x).tanh())


class Wide(nn.Module):
    """Of another softplus, and no gate."""

    def forward(self, x):
        return torch.tanh(F.softplus(x)) + x * torch.tanh(F.softplus(x, 2.0))


class Called(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        h = self.norm(x)
        h = swish(h)
        h = self.conv(h)
        return x + leaky(self.norm(h), 0.3)


class Inline(Called):
    def forward(self, x):
        h = self.norm(x)
        h = h * torch.sigmoid(h)
        h = self.norm(self.conv(h))
        h = h.sigmoid() * h
        return x + h


class ReadTwice(Called):
    """The value is read by something else as well."""

    def forward(self, x):
        h = self.norm(x)
        y = h * torch.sigmoid(h)
        return y + h


class OfOthers(Called):
    def forward(self, x):
        h = self.norm(x)
        return h * torch.sigmoid(x)


class Exported(Called):
    @torch.jit.export
    def helper(self, x):
        return F.silu(self.norm(x))

    def forward(self, x):
        return self.helper(x)


class Others(Called):
    def forward(self, x):
        return by_name(self.norm(x)) + by_name(self.norm(x), "tanh") + gated(self.norm(x)) + doubled(self.norm(x))


class Mishes(Called):
    def __init__(self):
        super().__init__()
        self.mish, self.wide = Mish(), Wide()

    def forward(self, x):
        h = self.mish(self.norm(x))
        return mish(self.norm(h)) + self.wide(self.norm(h))


class Choices(Called):
    """Branches that are written as expressions."""

    acts, norms = True, True

    def forward(self, x):
        h = self.norm(self.conv(x))
        h = F.silu(h) if self.acts else h
        h = self.norm(self.conv(h)) if self.norms else self.conv(h)
        h = F.relu(h)
        y = self.norm(self.conv(h))
        y = y if not self.acts else torch.tanh(y)
        y = self.norm(self.conv(y))
        return F.gelu(y) if self.acts else x if self.norms else F.relu(y)


@pytest.mark.parametrize("acts", [False, True])
@pytest.mark.parametrize("norms", [False, True])
def test_choices(acts, norms, ran):
    net, original = pair(Choices)
    for model in (net, original):
        model.acts, model.norms = acts, norms
    check(net, original)
    found = ["silu" if acts else "none", *(["relu"] if norms else []), "tanh" if acts else "none"]
    assert ran == [*found, *(["gelu"] if acts else [] if norms else ["relu"])]  # what nobody reads is not computed
    check_compiled(net, original)


@pytest.mark.parametrize(
    ("make", "acts"),
    [
        (Called, ["silu", "leaky_relu(0.3)"]),
        (Inline, ["silu", "silu"]),
        (ReadTwice, ["none"]),
        (OfOthers, ["none"]),
        (Exported, ["silu"]),
        (Mishes, ["mish", "mish", "none"]),
        (Others, ["gelu", "tanh", "silu", "none"]),
    ],
)
def test_what_a_function_is(make, acts, ran):
    net, original = pair(make)
    check(net, original)
    assert ran == acts
    check(pickle.loads(pickle.dumps(net)), original)
    assert ran == acts * 2
    check_compiled(net, original)


def test_a_function_that_changes(monkeypatch, ran):
    net, original = pair(Called)
    check(net, original)
    for name, other in (("swish", lambda x: x * 2), ("leaky", lambda x, slope: x * slope), ("_leaky", lambda x, s: -x)):
        with monkeypatch.context() as patched:
            patched.setitem(globals(), name, other)
            check(net, original)
    monkeypatch.setattr(swish, "__code__", (lambda x: x * 3).__code__)
    check(net, original)
    monkeypatch.undo()
    monkeypatch.setattr(torch, "sigmoid", torch.tanh)
    check(net, original)


def test_inline_patched(monkeypatch):
    net, original = pair(Inline)
    monkeypatch.setattr(torch, "sigmoid", torch.tanh)
    check(net, original)
