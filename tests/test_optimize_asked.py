"""Code that asks the value of a norm for its sizes, dtype or device while that waits, and helpers that it calls."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import optimize_pairs
from optimize_pairs import check, check_compiled, note_sites

SHAPE = (2, 4, 5, 6)


@pytest.fixture
def done(monkeypatch):
    """The activations of the norms that were scaled and shifted, or added, in one op."""
    return note_sites(
        monkeypatch,
        run_modulated=lambda site, norm, x, factor, shift, act="none", *_: act,
        run_added=lambda site, norm, x, other, act, *_: f"sum {act}",
    )


def unsqueeze_to(x, ndim):
    """As in k-diffusion."""
    if x.ndim > ndim:
        raise ValueError(f"it has {x.ndim} dims")
    return x[(...,) + (None,) * (ndim - x.ndim)]


def unsqueeze_like(x, other):
    missing = other.dim() - x.dim()
    for _ in range(missing):
        x = x.unsqueeze(-1)
    return x


def by_sizes(x, sizes, at_least=2):
    count = 0
    while len(x.shape) < max(at_least, len(sizes)):
        x = x[..., None]
        count += 1
    if count == 0:
        return x
    return x.to(torch.float64)


def doubled(x, ndim):
    """Writes to its argument."""
    x.mul_(2)
    return unsqueeze_to(x, ndim)


def through_another(x, ndim):
    return unsqueeze_to(x, ndim)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.mapper = nn.GroupNorm(2, 4), nn.SiLU(), nn.Linear(4, 8)

    def both(self, x):
        return self.mapper(x.mean((2, 3))).chunk(2, dim=-1)


class Helper(Base):
    acts = ("silu",)

    def forward(self, x):
        w, b = self.both(x)
        x = self.norm(x)
        x = x * (unsqueeze_to(w, x.ndim) + 1) + unsqueeze_to(b, x.ndim)
        return self.act(x)


class Function(Base):
    """k-diffusion's AdaGN."""

    acts = ("none",)

    def forward(self, x):
        weight, bias = self.both(x)
        x = F.group_norm(x, 2, eps=1e-5)
        return torch.addcmul(unsqueeze_to(bias, x.ndim), x, unsqueeze_to(weight, x.ndim) + 1)


class Like(Base):
    acts = ("relu", "tanh")

    def forward(self, x):
        w, b = self.both(x)
        h = self.norm(x)
        h = h * by_sizes(w, h.shape)
        h += by_sizes(b, h.size())
        h = F.relu(h)
        y = self.norm(h)
        y = y * unsqueeze_like(w, h)
        y = y + b.view(y.shape[0], y.size(1), *([1] * (y.dim() - 2)))
        return torch.tanh(y)


class Questions(Base):
    """In loops and tests, in the code itself."""

    acts = ("silu",)

    def forward(self, x):
        w, b = self.both(x)
        h = self.norm(x)
        while len(w.shape) < len(h.shape):
            w = w[..., None]
        if b.ndim != h.ndim:
            b = b.to(device=h.device, dtype=h.dtype)[(...,) + (None,) * (h.ndim - b.ndim)]
        if h.numel() == 0 or h.is_cuda:
            return h.shape
        return self.act(h * w + b)


class Viewed(Base):
    """Of a view."""

    acts = ("silu",)

    def forward(self, x):
        w, _ = self.both(x)
        h = self.norm(x) * w[:, :, None, None]
        h = h.flatten(2)
        sizes = h.shape
        h = self.act(h)
        return h.view(sizes[0], -1).view(x.shape)


class Writes(Base):
    acts = ()

    def forward(self, x):
        w, b = self.both(x)
        x = self.norm(x)
        x = x * (doubled(w.clone(), x.ndim) + 1) + unsqueeze_to(b, x.ndim)
        return self.act(x)


class Nested(Base):
    """A helper of helpers might be any code."""

    acts = ()

    def forward(self, x):
        w, b = self.both(x)
        x = self.norm(x)
        x = x * (through_another(w, x.ndim) + 1) + through_another(b, x.ndim)
        return self.act(x)


class Returned(Base):
    """The waiting value is asked, and nobody reads it."""

    acts = ()

    def forward(self, x):
        w, b = self.both(x)
        h = self.norm(x)
        h = h * w[:, :, None, None]
        if b.shape != w.shape:
            return self.act(h)
        return x * h.ndim + h.shape[1]


class Sums(Base):
    """Sums, whose operand or branch depends on the sizes."""

    acts = ("sum relu", "sum none", "sum none")

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.short = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        h = self.norm(self.conv(x))
        identity = x
        if h.shape[1] != 4:
            identity = self.short(x)
        h = F.relu(h + identity)
        y = self.norm(self.conv(h))
        if y.shape == h.shape:
            y += h
        sizes = y.shape
        z = self.norm(self.conv(y))
        rank = z.ndim
        dtype = z.dtype
        z = z + y
        return z.view(sizes[0], -1).to(dtype) * rank


pair = functools.partial(optimize_pairs.pair, std=0.5)
NETS = (Sums, Helper, Function, Like, Questions, Viewed, Writes, Nested, Returned)


@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("train", [False, True])
def test_one_op(make, train, done):
    net, original = pair(make, train=train)
    check(net, original)
    assert tuple(done) == make.acts
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        done.clear()
        check(twin, original)
        assert tuple(done) == make.acts


@pytest.mark.parametrize("make", NETS)
def test_compiled(make):
    check_compiled(*pair(make))


def test_errors_of_a_helper_come_through():
    net, original = pair(Helper)
    for model in (net, original):
        model.both = lambda x: (torch.ones(1, 1, 1, 1, 1), torch.ones(1))
        with pytest.raises(ValueError, match="it has 5 dims"):
            model(torch.randn(SHAPE).double())


class Dtype(Base):
    """What it gives depends on the dtype of the norm's value."""

    def forward(self, x):
        w, b = self.both(x)
        h = self.norm(x)
        scale = 2.0 if h.dtype is torch.float32 else 3.0
        h = h * (unsqueeze_to(w, h.ndim) * scale).to(h.dtype)
        return self.act(h + unsqueeze_to(b, h.ndim).type(h.dtype))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype(dtype, autocast, device):
    net, original = (model.to(device) for model in pair(Dtype, dtype=torch.float32 if autocast else dtype))
    x = torch.randn(SHAPE, device=device, dtype=dtype)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
        mine, right = net(x), original(x)
    assert mine.dtype is right.dtype
    torch.testing.assert_close(mine, right, rtol=0.05, atol=0.05)
