"""Sums with what a convolution or an upsampling gives: when the two run as one, and what keeps them apart."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import kgopt
from kgopt.rewrite import glue
from kgopt.rewrite.waiting import sums
from optimize_pairs import all_faster


class Base(nn.Module):
    """A norm, so that optimize looks at the module at all, and a convolution with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 1)
        self.shortcut = nn.Conv2d(4, 4, 1)
        self.none = None
        self.scale = 1.0
        self.half = 2
        self.tail = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1))
        self.up = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear")))


class Right(Base):
    def forward(self, x):
        return x + self.conv(self.norm(x))


class Left(Base):
    def forward(self, x):
        return self.conv(self.norm(x)) + x


class Two(Base):
    def forward(self, x):
        return self.conv(x) + self.conv2(self.norm(x))


class Resnet(Base):
    def forward(self, x):
        h = self.norm(x)
        h = self.conv(h)
        if self.shortcut is not None:
            if self.training:
                x = x.contiguous()
            x = self.shortcut(x)
        out = (x + h) / self.scale
        return out


class Halved(Base):
    def forward(self, x):
        h = self.conv(self.norm(x))
        if self.none is not None:
            x = self.none(x)
        return (h + x) / self.half


class Upsampled(Base):
    def forward(self, x):
        skips = [None, torch.cat([torch.cat([x, x], 2)] * 2, 3)]
        y = self.norm(x)
        for i, up in enumerate([self.up]):
            y = up(y) + skips[i + 1]
        return y


class InPlace(Base):
    def forward(self, x):
        identity = x
        x = self.norm(x)
        x = self.conv(x)
        x += identity
        return x


class InPlaceTail(Base):
    def forward(self, x):
        h = self.norm(x)
        h = self.tail(h)
        h += x
        return h


class Asked(Base):
    """Code asks for the sizes of what waits, which are not those of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.short = nn.Conv2d(4, 6, 3, stride=2), nn.Conv2d(4, 6, 3, stride=2)

    def forward(self, x):
        h = self.wide(self.norm(x))
        count = h.shape[1]
        if x.shape[1] != h.shape[1]:
            x = self.short(x)
        y = (x + h) / self.half
        return y * count


FUSED = [Right, Left, Two, Resnet, Halved, Upsampled, InPlace, InPlaceTail, Asked]


class ReadTwice(Base):
    def forward(self, x):
        h = self.conv(self.norm(x))
        y = x + h
        return y * h


class ChangedBetween(Base):
    def forward(self, x):
        h = self.norm(x)
        y = self.conv(h)
        h.add_(1)
        return x + y


class CallBetween(Base):
    def forward(self, x):
        y = self.conv(self.norm(x))
        x = torch.relu(x)
        return x + y


class KeptByLoop(Base):
    def forward(self, x):
        h = x
        for _ in range(2):
            x = x + h
            h = self.conv(self.norm(x))
        return x + h


class CallOnTheRight(Base):
    def forward(self, x):
        return self.conv(self.norm(x)) + self.change(x)

    def change(self, x):
        with torch.no_grad():
            self.conv.bias.add_(1)
            self.conv.bias.sub_(1)
        return x


class InTry(Base):
    def forward(self, x):
        try:
            h = self.conv(self.norm(x))
            y = x + h
        except RuntimeError:
            y = x
        return y


class Wider(Base):
    """What PyTorch makes of shapes that broadcast stays its own business."""

    def forward(self, x):
        return torch.stack([x, x]) + self.conv(self.norm(x))


class OtherLayout(Base):
    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last) + self.conv(self.norm(x.contiguous()))


class OtherDtype(Base):
    def forward(self, x):
        return x.double() + self.conv(self.norm(x))


class TwiceInPlace(Base):
    def forward(self, x):
        h = self.conv(self.norm(x))
        h += h
        return h


class ReadBefore(Base):
    def forward(self, x):
        h = self.conv(self.norm(x))
        y = torch.relu(h)
        h += x
        return h * y


APART = [
    TwiceInPlace,
    ReadBefore,
    ReadTwice,
    ChangedBetween,
    CallBetween,
    KeptByLoop,
    CallOnTheRight,
    InTry,
    Wider,
    OtherLayout,
    OtherDtype,
]


def optimized(cls, x, device="cpu"):
    """The original, and a copy whose calls were all found to be faster."""
    original = cls().to(device).eval()
    model = kgopt.optimize(copy.deepcopy(original), measure=False)
    all_faster(model, x)
    return original, model


def sums_run(model, x, monkeypatch):
    """How many sums ran as one, and the result."""
    count = []
    plus = sums.Later.plus

    def counted(self, other, *rest):
        y = plus(self, other, *rest)
        count.append(y is not None)
        return y

    monkeypatch.setattr(sums.Later, "plus", counted)
    y = model(x)
    monkeypatch.setattr(sums.Later, "plus", plus)
    return sum(count), y


def draw(device="cpu"):
    return torch.randn(1, 4, 6, 8, device=device)


@pytest.mark.parametrize("cls", FUSED)
def test_one_op_in_inference(cls, device, monkeypatch, poisoned):
    x = draw(device)
    original, model = optimized(cls, x, device)
    with torch.no_grad():
        fused, y = sums_run(model, x, monkeypatch)
        assert fused == 1
        torch.testing.assert_close(y, original(x))
        assert y.stride() == original(x).stride()
        with torch.autocast(device, torch.bfloat16):
            assert sums_run(model, x, monkeypatch)[0] == 0
            assert model(x).dtype is original(x).dtype
        other = torch.randn(2, 4, 5, 8, device=device)  # not measured
        fused, y = sums_run(model, other, monkeypatch)
        assert fused == 0
        torch.testing.assert_close(y, original(other))
    with torch.inference_mode():
        torch.testing.assert_close(model(x), original(x))


@pytest.mark.parametrize("cls", FUSED)
def test_training_runs_the_modules(cls, device, monkeypatch):
    x = draw(device)
    original, model = optimized(cls, x, device)
    for train in (True, False):
        results = []
        for m in (original, model):
            m.train(train).zero_grad()
            fused, y = sums_run(m, x, monkeypatch)
            assert fused == 0
            y.square().sum().backward()
            results.append([y, *(p.grad for p in m.parameters() if p.grad is not None)])
        for a, b in zip(*results, strict=True):
            # Sums over all of x, which a norm of ours takes in another order.
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cls", APART)
def test_what_keeps_them_apart(cls, device, monkeypatch):
    x = draw(device)
    original, model = optimized(cls, x, device)
    with torch.no_grad():
        fused, y = sums_run(model, x.clone(), monkeypatch)
        assert fused == 0
        torch.testing.assert_close(y, original(x.clone()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["conv", "shortcut"])
def test_hooks_see_every_value(name, monkeypatch):
    x = draw()
    original, model = optimized(Resnet, x)
    seen = []
    for m in (original, model):
        getattr(m, name).register_forward_hook(lambda module, args, y: seen.append(y.clone()))
    with torch.no_grad():
        fused, y = sums_run(model, x, monkeypatch)
        torch.testing.assert_close(y, original(x))
    assert fused == 0
    torch.testing.assert_close(*seen)


def test_a_module_may_change_after_all(monkeypatch):
    """Another stride, another module in its place, a missing child: the code as it stands runs."""
    x = draw()
    for change in (
        lambda m: setattr(m.conv, "dilation", (2, 2)) or setattr(m.conv, "padding", (2, 2)),
        lambda m: setattr(m, "conv", nn.Identity()),
        lambda m: setattr(m, "shortcut", None),
        lambda m: setattr(m, "scale", 2.0),
        lambda m: setattr(m, "scale", torch.tensor(4.0)),
        lambda m: setattr(m.conv, "bias", None),
    ):
        original, model = optimized(Resnet, x)
        change(original)
        change(model)
        with torch.no_grad():
            torch.testing.assert_close(model(x), original(x))


def test_copies_restore_and_compilers(monkeypatch):
    x = draw()
    original, model = optimized(Resnet, x)
    with torch.no_grad():
        expected = original(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(twin(x), expected)
            assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        fused, y = sums_run(compiled, x, monkeypatch)
        assert fused == 0
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.func.vmap(model)(x[None])[0], expected)
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
    kgopt.restore(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert not any(name.startswith("_kgopt") for m in model.modules() for name in m.__dict__)


def test_convolutions_in_chains_are_still_found():
    """A convolution whose class was replaced is the convolution of a chain all the same."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 4)

        def forward(self, x):
            return self.norm(self.act(self.conv(x)))

    x = draw()
    original, model = optimized(Net, x)
    model = kgopt.optimize(kgopt.restore(model), measure=False)
    all_faster(model, x)
    assert kgopt.report(model).sites[0].became == "conv2d + group_norm(pre_act=relu)"
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x))


def test_own_convolution_of_few_channels(monkeypatch):
    """Options beside the bias: the plan runs the op that was found to be the fastest."""
    x = draw()
    conv = nn.Conv2d(4, 4, 3, padding=1, bias=False).eval()
    call = glue.recognize(torch.conv2d, (x, conv.weight.detach(), None, 1, 1), {})
    assert call is None  # on the CPU there is no kernel of our own, and without a bias nothing to add
    conv.bias = nn.Parameter(torch.randn(4))
    call = glue.recognize(torch.conv2d, (x, conv.weight.detach(), conv.bias.detach(), 1, 1), {})
    assert call.options == ("bias",)
    assert call.sizes == [1, 4, 6, 8]
    for refused in ({"padding": "full"}, {"stride": (1, 1, 1)}, {"groups": 1.0}, {"nothing": 1}):
        assert glue.recognize(torch.conv2d, (x, conv.weight.detach(), conv.bias.detach()), refused) is None
    assert glue.recognize(torch.conv2d, (x, conv.weight, conv.bias), {}) is None  # somebody wants its gradient
    pool = torch.nn.functional.max_pool2d
    assert glue.recognize(pool, (x, 2), {}).argument == ((2, 2), (2, 2), (0, 0))
    for refused in ({"ceil_mode": True}, {"return_indices": True}, {"dilation": 2}, {"padding": 2}):
        assert glue.recognize(pool, (x, 2), refused) is None
    assert glue.recognize(pool, (x, 9), {}) is None
