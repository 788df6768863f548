"""Scales and shifts behind norms as functions, methods and users' helpers write them; scales in front of a residual."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modulated_helpers as helpers
import optimize_models as models
from modulated_helpers import film, modulate
from optimize_pairs import CLOSE, check, check_compiled, pair

C = 8
SHAPE = (2, C, 5, 6)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act, self.emb = nn.GroupNorm(4, C), nn.SiLU(), nn.Linear(C, 2 * C)
        self.conv = nn.Conv2d(C, C, 1)
        self.gamma, self.beta = (nn.Parameter(torch.randn(1, C, 1, 1)) for _ in range(2))

    def given(self, x):
        """Scale and shift of each sample, ``[N, C]``."""
        return self.emb(x.mean((2, 3))).chunk(2, 1)

    def large(self, x):
        scale, shift = self.given(x)
        return scale[:, :, None, None], shift[:, :, None, None]


class Functions(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        h = torch.mul(self.norm(x), 1 + scale)
        return self.act(torch.add(h, shift))


class Reversed(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        h = self.norm(x)
        h = torch.mul(scale, h)
        h = torch.add(shift, h)
        return F.silu(h)


class Methods(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        return self.act(self.norm(x).mul(scale).add(shift))


class InPlace(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        h = self.norm(x)
        h.mul_(1 + scale)
        h.add_(shift)
        h = self.act(h)
        return h


class InPlaceValue(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        return self.act(self.norm(x).mul_(scale).add_(shift))


class Helped(Block):
    def forward(self, x):
        scale, shift = self.given(x)
        return self.act(modulate(self.norm(x), shift, scale))


class HelpedByName(Block):
    def forward(self, x):
        scale, shift = self.given(x)
        h = self.norm(x)
        h = modulate(x=h, scale=scale, shift=shift)
        return self.act(h)


class HelpedInModule(Block):
    def forward(self, x):
        scale, shift = self.given(x)
        return self.act(helpers.film(self.norm(x), scale, beta=shift))


class HelpedAfter(Block):
    def forward(self, x):
        scale, shift = self.given(x)
        h = film(self.norm(x), scale, shift)
        return self.conv(F.silu(h))


class HelpedInOrder(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        return self.act(helpers.shifted_first(self.norm(x), scale, shift))


class ShiftFirst(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        return self.act((self.norm(x) + shift) * scale)


class ShiftFirstInSteps(Block):
    def forward(self, x):
        h = self.norm(x)
        h = h + self.beta
        h = h * self.gamma
        return self.act(h)


class Twice(Block):
    def forward(self, x):
        scale, _ = self.large(x)
        return self.act(self.norm(x) * self.gamma * scale)


class LayerScale(Block):
    def forward(self, x):
        return x + self.gamma * self.norm(x)


class ScaledThenAdded(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        h = self.norm(x) * (1 + scale) + shift
        h = h + x
        return self.act(h)


class AddedInPlace(Block):
    def forward(self, x):
        h = self.norm(self.conv(x)) * self.gamma
        h += x
        return F.relu(h)


class AddedByName(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        h = modulate(self.norm(x), shift[:, :, 0, 0], scale[:, :, 0, 0])
        return torch.add(x, h)


FUSED = {
    "scaled silu": (
        *(Functions, Reversed, Methods, InPlace, InPlaceValue, Helped, HelpedByName, HelpedInModule, HelpedAfter),
        *(HelpedInOrder, ShiftFirst, ShiftFirstInSteps, Twice),
    ),
    "scaled sum none": (LayerScale, AddedByName),
    "scaled sum silu": (ScaledThenAdded,),
    "scaled sum relu": (AddedInPlace,),
}
CASES = [(cls, what) for what, classes in FUSED.items() for cls in classes]


@pytest.mark.parametrize(("cls", "what"), CASES, ids=lambda v: getattr(v, "__name__", None))
def test_one_op(cls, what, ran):
    net, original = pair(cls, std=0.5)
    check(net, original, SHAPE)
    assert ran == [what]
    check(net, original, SHAPE)
    with torch.no_grad():
        check_compiled(net, original, SHAPE)


@pytest.mark.parametrize(("cls", "what"), CASES, ids=lambda v: getattr(v, "__name__", None))
def test_channels_last(cls, what):
    """In a model that keeps the format, and one that does not."""
    for options in ({}, {"channels_last": True}):
        net, original = pair(cls, std=0.5, **options)
        x = torch.randn(SHAPE, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(net(x), original(x), **CLOSE)


class Read(Block):
    """Somebody else reads the value."""

    def forward(self, x):
        h = self.norm(x)
        y = h
        h.mul_(self.gamma)
        return self.act(h) + y


class Outside(Block):
    """The shift is written to before the norm's value is read."""

    def forward(self, x):
        shift = self.beta.clone()
        h = torch.add(self.norm(x), shift)
        shift.mul_(3)
        return self.act(h) * shift


class Helper(Block):
    helper = staticmethod(helpers.twice)
    name = "twice"

    def forward(self, x):
        scale, shift = self.large(x)
        return self.act(getattr(helpers, self.name)(self.norm(x), scale, shift))


class ReadTwice(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        return self.act(helpers.twice(self.norm(x), scale, shift))


class Asked(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        return self.act(helpers.asked(self.norm(x), scale, shift))


class Written(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        return self.act(helpers.written(self.norm(x), scale.clone(), shift)) * scale


class Kept(Block):
    def forward(self, x):
        scale, shift = self.large(x)
        seen = []
        y = self.act(helpers.kept(self.norm(x), scale, shift, seen))
        return y + seen[0]


class WithAlpha(Block):
    def forward(self, x):
        return self.act(torch.add(self.norm(x), self.beta, alpha=2))


class OtherSize(Block):
    def forward(self, x):
        scale = x.mean(1, keepdim=True)
        return self.act(torch.mul(self.norm(x), scale).add(self.beta))


class Itself(Block):
    def forward(self, x):
        h = self.norm(x)
        h = torch.mul(h, h)
        return self.act(torch.add(h, self.beta))


@pytest.mark.parametrize(
    "cls",
    [Read, Outside, Helper, ReadTwice, Asked, Written, Kept, WithAlpha, OtherSize, Itself],
    ids=lambda cls: cls.__name__,
)
def test_what_means_something_else(cls):
    net, original = pair(cls, std=0.5)
    check(net, original, SHAPE)


def test_a_helper_may_be_replaced(monkeypatch, ran):
    net, original = pair(Helped, std=0.5)
    check(net, original, SHAPE)
    assert ran == ["scaled silu"]
    real = modulate
    calls = []

    def other(x, shift, scale):
        calls.append(type(x))
        return 2 * real(x, shift, scale)

    monkeypatch.setitem(globals(), "modulate", other)
    check(net, original, SHAPE)
    assert calls == [torch.Tensor] * 2
    monkeypatch.setattr(helpers.film, "__code__", (lambda h, gamma, beta=None: h - gamma[:, :, None, None]).__code__)
    net, original = pair(HelpedAfter, std=0.5)
    check(net, original, SHAPE)


def test_replaced_functions(monkeypatch):
    net, original = pair(Functions, std=0.5)
    multiply = torch.mul
    seen = []
    monkeypatch.setattr(torch, "mul", lambda *args: seen.append(type(args[0])) or 3 * multiply(*args))
    check(net, original, SHAPE)
    assert seen == [torch.Tensor] * 2


def test_hooks_see_tensors():
    for cls in (Helped, LayerScale, InPlace):
        net, original = pair(cls, std=0.5)
        seen = []
        for model in (net, original):
            model.norm.register_forward_hook(lambda module, inputs, y, seen=seen: seen.append(type(y)) or y + 1)
        check(net, original, SHAPE)
        assert seen == [torch.Tensor] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", [ShiftFirst, LayerScale, Helped, ScaledThenAdded], ids=lambda cls: cls.__name__)
def test_half_precision(cls, dtype, ran):
    net, original = pair(cls, dtype, std=0.5)
    exact = pair(cls, std=0.5)[1]
    for p, q in zip(exact.parameters(), original.parameters(), strict=True):
        p.data.copy_(q.data)
    x = torch.randn(SHAPE, dtype=dtype)
    y, theirs, right = net(x), original(x), exact(x.double())
    assert y.dtype is theirs.dtype is dtype
    assert (y - right).norm() <= 1.1 * (theirs - right).norm() + 1e-3 * right.norm()
    assert any("scaled" in what for what in ran)


def test_autocast_on_the_cpu():
    for cls in (LayerScale, ShiftFirst, Helped, Methods):
        net, original = pair(cls, torch.float32, std=0.5)
        x = torch.randn(SHAPE)
        with torch.autocast("cpu", torch.bfloat16):
            y, theirs = net(x), original(x)
        assert y.dtype is theirs.dtype
        torch.testing.assert_close(y, theirs, rtol=2e-2, atol=2e-2)


def test_other_dtypes_are_promoted():
    """A float32 scale makes the product of half precision float32."""
    net, original = pair(Functions, torch.bfloat16, std=0.5)
    for model in (net, original):
        model.emb.float()
        model.given = lambda x, model=model: model.emb(x.float().mean((2, 3))).chunk(2, 1)
    x = torch.randn(SHAPE, dtype=torch.bfloat16)
    assert net(x).dtype is original(x).dtype is torch.float32
    torch.testing.assert_close(net(x), original(x), rtol=2e-2, atol=2e-2)


def test_pickles():
    net, original = pair(Helped, std=0.5)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    check(torch.load(file, weights_only=False), original, SHAPE)


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (LayerScale, "GroupNorm → scale → sum"),
        (ScaledThenAdded, "GroupNorm → scale → shift → sum → silu"),
        (AddedInPlace, "GroupNorm → scale → sum → relu"),
        (AddedByName, "GroupNorm → scale → shift → sum"),
        (Methods, "GroupNorm → scale → shift → silu"),
        (Helped, "GroupNorm → scale → shift → silu"),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_captured_graphs(cls, kind):
    torch.manual_seed(0)
    net, x = cls().double(), torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    y, report = models.rewritten(net, x)
    expected = net(x)
    torch.testing.assert_close(y, expected, **CLOSE)
    given = [x, *net.parameters()]
    ours, theirs = (torch.autograd.grad(t.cos().sum(), given, allow_unused=True) for t in (y, expected))
    torch.testing.assert_close(ours, theirs, **CLOSE)
    assert [row.kind for row in report.sites] == [kind]
