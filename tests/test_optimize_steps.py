"""Norms and activations that only the running code names, and activations behind a branch: fused, and as PyTorch's."""

from __future__ import annotations

import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optimize_pairs import check, check_compiled, hooks_see_the_same, pair


class Net(nn.Module):
    """What all of them have."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)])
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)])
        self.act = nn.LeakyReLU(0.2, inplace=True)
        self.layers = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.ReLU())
        self.by_name = nn.ModuleDict({"conv": nn.Conv2d(4, 4, 1), "norm": nn.GroupNorm(2, 4), "act": nn.GELU()})
        self.norm0, self.norm1 = nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)


class Zip(Net):
    acts = ("leaky_relu(0.2)",) * 2

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = conv(x)
            x = norm(x)
            x = self.act(x)
        return x


class Index(Net):
    acts = ("leaky_relu(0.2)", "relu") * 2

    def forward(self, x):
        for i in range(len(self.convs)):
            h = self.act(self.norms[i](self.convs[i](x)))
            x = x + F.relu(self.norms[i](h))
        return x


class Layers(Net):
    acts = ("silu", "relu")

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = layer(h)
        return x + h


class Cached(Net):
    """As the residual blocks of Wan's autoencoder: some layers are called in another way."""

    acts = ("silu", "relu")

    def forward(self, x):
        kept = []
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                kept.append(x[:, :, -1:])
                x = layer(x)
            else:
                x = layer(x)
        return x + kept[0]


class SumBehind(Net):
    acts = ("silu", "sum tanh")

    def forward(self, x):
        h = x
        for layer in self.layers[:4]:
            h = layer(h)
        return torch.tanh(x + h)


class Triples(Net):
    """Only statements that were nothing else fused: this norm and its activation stand in a sum."""

    acts = ("silu", "leaky_relu(0.2)", "silu", "leaky_relu(0.2)")

    def __init__(self):
        super().__init__()
        parts = ((nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()) for _ in range(2))
        self.blocks = nn.ModuleList([nn.ModuleList(three) for three in parts])

    def forward(self, x):
        for conv, norm, act in self.blocks:
            h = conv(x)
            x = act(norm(h)) + x * 0.5
            h = x.clone()
            h += self.act(norm(x))
            x = h
        return x


class Dense(Net):
    """As a DenseNet's layers, in a list that the method fills."""

    acts = ("relu", "relu", "silu")

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.GroupNorm(4, 8)])
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)])

    def forward(self, x):
        found = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            found.append(conv(F.relu(norm(torch.cat(found, 1)))))
        return torch.cat([getattr(F, "silu")(self.norms[0](found[2])), x], 1)  # noqa: B009


class Leaves(Net):
    """What waits is asked for where the loop is left, and where another round keeps it."""

    acts = ("silu", "none")

    def forward(self, x):
        seen = []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 0:
                continue
            if i == 3:
                break
            seen.append(x)
        return x + sum(seen)


class Named(Net):
    acts = ("gelu", "gelu")

    def forward(self, x):
        m = self.by_name
        h = m["act"](m["norm"](m["conv"](x)))
        h = m["norm"](m["conv"](h))
        return m["act"](h)


class ByGetattr(Net):
    acts = ("silu", "silu")
    kind = "silu"

    def forward(self, x):
        for i in range(2):
            x = getattr(self, f"norm{i}")(x)
            x = getattr(F, self.kind)(x)
        return x


class Functions(Net):
    acts = ("relu", "leaky_relu(0.3)", "silu", "elu")

    def __init__(self):
        super().__init__()
        self.f, self.g = F.relu, functools.partial(F.leaky_relu, negative_slope=0.3)

    def swish(self, x):
        return x * torch.sigmoid(x)

    @staticmethod
    def elu(x):
        return F.elu(x)

    def forward(self, x):
        h = self.f(self.norm0(x))
        h = self.g(self.norm1(h))
        h = self.swish(self.norm0(h))
        return x + self.elu(self.norm1(h))


class Optional(Net):
    """As detectron2's and mmcv's convolutions."""

    acts = ("relu",)

    def __init__(self, act=F.relu):
        super().__init__()
        self.activation, self.norm = act, nn.GroupNorm(2, 4)

    def forward(self, x):
        x = self.convs[0](x)
        if self.norm is not None:
            x = self.norm(x)
        if self.activation is not None:
            x = self.activation(x)
        return x


class Missing(Optional):
    acts = ("none",)

    def __init__(self):
        super().__init__(None)


class Wrapped(Net):
    """Norms in modules that only call them."""

    acts = ("silu", "leaky_relu(0.2)")

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.GroupNorm(2, 4)

        def forward(self, x):
            return self.inside(x)

    def __init__(self):
        super().__init__()
        self.first, self.second = Wrapped.Norm(), Wrapped.Norm()

    def forward(self, x):
        h = F.silu(self.first(x))
        h = self.second(self.convs[0](h))
        return self.act(h)


class Written(Net):
    def forward(self, x):
        x = x.clone()
        h = self.norm0(x)
        x.add_(1)
        h = self.act(h)
        for norm in (self.norm1,):
            y = h.clone()
            h = norm(y)
            y.add_(1)
            h = F.silu(h)
        return h + x


NETS = (
    *(Zip, Index, Layers, SumBehind, Triples, Dense, Cached, Leaves, Named, ByGetattr, Functions, Optional, Missing),
    Wrapped,
)


@pytest.mark.parametrize("make", NETS)
def test_one_op(make, ran):
    net, original = pair(make)
    check(net, original)
    assert tuple(ran) == make.acts
    ran.clear()
    check(pickle.loads(pickle.dumps(net)), original)
    assert tuple(ran) == make.acts


@pytest.mark.parametrize("make", NETS)
def test_compiled(make):
    check_compiled(*pair(make))


@pytest.mark.parametrize("make", NETS)
def test_hooks_see_what_they_saw(make):
    net, original = pair(make)
    leaves = {name for name, module in net.named_modules() if not module._modules}
    with hooks_see_the_same(net, original, leaves.__contains__):
        check(net, original)


def test_what_the_norm_was_given_changes_in_between():
    net, original = pair(Written)
    x = torch.randn(2, 4, 5, 6).double()
    with torch.no_grad():
        torch.testing.assert_close(net(x), original(x), rtol=1e-9, atol=1e-9)


def test_another_function_later():
    net, original = pair(Functions)
    net.f = original.f = lambda x: x * 2
    net.g = original.g = functools.partial(F.leaky_relu, negative_slope=0.5)
    check(net, original)
    net.f = original.f = torch.cos
    check(net, original)
    net.swish = original.swish = torch.sin
    check(net, original)


def test_another_layer_later():
    net, original = pair(Layers)
    for model in (net, original):
        model.layers[1] = nn.Identity()
        model.layers[4] = nn.PReLU().double()
    check(net, original)


def test_patched_functions_run(monkeypatch):
    net, original = pair(Functions)
    monkeypatch.setattr(F, "leaky_relu", lambda x, *_, **__: x * 3)
    monkeypatch.setattr(torch.Tensor, "__mul__", lambda x, y: torch.mul(x, y) + 1)
    check(net, original)
