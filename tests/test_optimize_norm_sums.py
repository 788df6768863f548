"""Sums behind norms in the code of modules: act(norm(x) + r) as one op, and what keeps its parts apart."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
import optimize_pairs

pytestmark = pytest.mark.usefixtures("ours")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.short = nn.Conv2d(4, 4, 1)
        self.short_norm = nn.InstanceNorm2d(4, affine=True)
        self.act = nn.LeakyReLU(0.1, inplace=True)
        self.down = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(4, 4))
        self.drop = False


class Monai(Base):
    """As monai.networks.blocks.UnetResBlock."""

    def forward(self, x):
        residual = x
        out = self.conv(x)
        out = self.norm(out)
        if hasattr(self, "short"):
            residual = self.short(residual)
        if hasattr(self, "short_norm"):
            residual = self.short_norm(residual)
        out += residual
        out = self.act(out)
        return out


class Resnet(Base):
    """As torchvision's."""

    def forward(self, x):
        identity = x
        out = self.conv(x)
        out = self.norm(out)
        if self.down is not None:
            identity = self.down(x)
        out += identity
        return F.relu(out)


class Inline(Base):
    def forward(self, x):
        h = F.silu(self.norm(self.conv(x)) + x, inplace=True)
        return self.act(x + self.norm(self.conv(h)))


class Tail(Base):
    def forward(self, x):
        out = self.body(x)
        out = out + self.down(x)
        return F.gelu(out, approximate="tanh")


class NoActivation(Base):
    def forward(self, x):
        return x + self.norm(self.conv(x))


class Whole(nn.Module):
    """As nnU-Net's ConvDropoutNormReLU: all of its forward is a Sequential's."""

    def __init__(self) -> None:
        super().__init__()
        self.all_modules = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True))

    def forward(self, x):
        return self.all_modules(x)


class Dropped(Base):
    """As nnU-Net's BasicBlockD."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = Whole()

    def drop_path(self, x):
        return x * 0.5

    def forward(self, x):
        residual = self.down(x)
        out = self.whole(self.conv(x))
        if self.drop:
            out = self.drop_path(out)
        out += residual
        return self.act(out)


class ByFunction(Base):
    """``torch.add``, its arguments by place and by name."""

    def forward(self, x):
        h = F.relu(torch.add(self.norm(self.conv(x)), x))
        y = self.norm(self.conv(h))
        y = torch.add(input=h, other=y)
        return self.act(y)


class ByMethod(Base):
    """``add`` and ``add_``, as a value and as a statement, and activations that are methods, too."""

    def forward(self, x):
        h = self.norm(self.conv(x)).add(x).relu()
        y = self.norm(self.conv(h))
        y.add_(h)
        y = y.tanh()
        z = self.norm(self.conv(y))
        z = z.add_(y)
        return z.sigmoid()


class PassedOn(Base):
    """A drop_path that does nothing around the norm, in one expression."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_path = nn.Dropout(0.0)

    def forward(self, x):
        h = x + self.drop_path(self.norm(self.conv(x)))
        return F.relu(torch.add(self.drop_path(self.norm(self.conv(h))), h))


FUSED = {
    ByFunction: ["relu", "leaky_relu(0.1)"],
    ByMethod: ["relu", "tanh", "sigmoid"],
    PassedOn: ["none", "relu"],
    Monai: ["leaky_relu(0.1)"],
    Resnet: ["relu"],
    Inline: ["silu", "leaky_relu(0.1)"],
    Tail: ["gelu_tanh"],
    NoActivation: ["none"],
    Dropped: ["leaky_relu(0.1)"],
}


class ReadLater(Base):
    def forward(self, x):
        h = self.norm(self.conv(x))
        y = h + x
        return self.act(y.clone()) + h


class Broadcast(Base):
    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + x.mean((2, 3), keepdim=True))


class Wider(Base):
    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + x.float() * 1.5)


class InPlaceOnTheOther(Base):
    def forward(self, x):
        r = x * 1
        h = self.norm(self.conv(x))
        r += h
        return F.relu(r) + r


class WritesBetween(Base):
    def forward(self, x):
        c = self.conv(x)
        h = self.norm(c)
        c.mul_(2)
        h += c
        return self.act(h)


class Caught(Base):
    def forward(self, x):
        h = self.norm(self.conv(x))
        try:
            h = h + x
            h = self.act(h[:, :9])
        except ValueError:
            return h
        return h


class Weighted(Base):
    def forward(self, x):
        return F.relu(torch.add(self.norm(self.conv(x)), x, alpha=0.5))


class MethodOfTheOther(Base):
    def forward(self, x):
        r = x * 1
        h = self.norm(self.conv(x))
        r.add_(h)
        return F.relu(r) + r


APART = [Weighted, MethodOfTheOther, ReadLater, Broadcast, Wider, InPlaceOnTheOther, Caught]


pair = functools.partial(optimize_pairs.pair, std=0.4)


def compare(original, model, x):
    """Results, and gradients of the input and of the parameters."""
    results = []
    for m in (original, model):
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = m(given)
        m.zero_grad()
        y.square().sum().backward()
        results.append((y, given.grad, [p.grad for p in m.parameters() if p.grad is not None]))
    torch.testing.assert_close(results[1], results[0])
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x))


def sample(dtype=torch.float64):
    return torch.randn(2, 4, 6, 5, dtype=dtype)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("cls", FUSED)
def test_sums_become_one_op(cls, format, summed):
    model, original = pair(cls)
    x = sample().contiguous(memory_format=format)
    compare(original, model, x)
    if format is torch.contiguous_format:  # else PyTorch's norm changes the layout, and the sum's is that of both
        assert summed == FUSED[cls] * 2


class Second(nn.Module):
    """Of an x in channels_last the norm's value is channels_last, too, and the last convolution's contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.body = nn.ModuleList([nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1)])

    def forward(self, x):
        h = self.body[0](x.contiguous())
        h = self.body[1](h)
        kept = self.norm(x)
        return F.dropout((h + kept) / math.sqrt(2), 0.5)


class First(Second):
    def forward(self, x):
        h = self.body[0](x.contiguous())
        h = self.body[1](h)
        kept = self.norm(x)
        return F.dropout((kept + h) / math.sqrt(2), 0.5)


@pytest.mark.parametrize("cls", [First, Second])
def test_the_first_operand_decides_the_format(cls):
    """The norm waited for the sum, and became its first operand: a dropout behind it drew for other elements."""
    model, original = pair(cls)
    x = sample().contiguous(memory_format=torch.channels_last)
    results = []
    for net in (original, model):
        torch.manual_seed(0)
        results.append(net(x))
    torch.testing.assert_close(*results)
    assert results[0].stride() == results[1].stride()


@pytest.mark.parametrize("cls", [*FUSED, *APART])
def test_compiled(cls, summed):
    model, original = pair(cls)
    x = sample()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=cls is not Caught)(x), original(x))
    assert summed == FUSED.get(cls, [])


@pytest.mark.parametrize("cls", APART)
def test_what_cannot_be_one_op(cls, summed):
    model, original = pair(cls)
    compare(original, model, sample())
    assert not summed


def test_the_input_changes_in_between(summed):
    model, original = pair(WritesBetween)
    x = sample()
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x))
    assert not summed


def test_a_branch_that_reads_the_value(summed):
    model, original = pair(Dropped)
    original.drop = model.drop = True
    compare(original, model, sample())
    assert not summed


@pytest.mark.parametrize("where", ["norm", "whole", "inside", "act"])
def test_hooks_see_what_they_saw(where, summed):
    model, original = pair(Dropped if where in ("whole", "inside") else Monai)
    seen = []
    for m in (original, model):
        inside = m.whole.all_modules if where == "inside" else getattr(m, where)
        inside.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    compare(original, model, sample())
    assert len(seen) == 4
    torch.testing.assert_close(seen[::2], seen[1::2])
    if where != "act":
        assert not summed


def test_replaced_methods_run(summed):
    """A norm's forward, an activation's, and that of a class that only passes on."""
    for change in (
        lambda m: setattr(m.whole.all_modules[1], "forward", lambda x: x * 3),
        lambda m: setattr(m.act, "forward", lambda x: x - 1),
        lambda m: setattr(m.whole, "forward", lambda x: x + 2),
    ):
        model, original = pair(Dropped)
        change(original), change(model)
        compare(original, model, sample())
    assert set(summed) <= {"none"}


def test_a_class_that_passes_on_no_more(monkeypatch, summed):
    model, original = pair(Dropped)
    compare(original, model, sample())
    assert summed
    summed.clear()
    monkeypatch.setattr(Whole, "forward", lambda self, x: self.all_modules(x) * 2)
    compare(original, model, sample())
    assert not summed


def test_a_replaced_addition_runs(monkeypatch, summed):
    original, model = pair(ByFunction)
    monkeypatch.setattr(torch, "add", lambda input, other: input - other)
    compare(original, model, sample())
    monkeypatch.undo()
    original, model = pair(ByMethod)
    monkeypatch.setattr(torch.Tensor, "add_", lambda self, other: self.mul_(other))
    compare(original, model, sample())
    assert not summed


def test_a_set_that_is_added_to(summed):
    """``add`` may be anything's."""

    class Net(Base):
        def forward(self, x):
            kept = set()
            kept.add(self.norm(self.conv(x)))
            return F.relu(next(iter(kept)))

    compare(*pair(Net), sample())
    assert not summed


def test_another_activation_later(summed):
    model, original = pair(Monai)
    for m in (original, model):
        m.act = nn.Softplus(beta=2)
    compare(original, model, sample())
    assert summed == ["softplus(2.0,20.0)"] * 2


def test_copies_pickles_and_restore(summed):
    model, original = pair(Inline)
    x = sample()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        compare(original, other, x)
    assert summed
    kgopt.restore(model)
    summed.clear()
    compare(original, model, x)
    assert not summed


def test_report_names_the_sum():
    model, _ = pair(Monai)
    assert any("sum" in row.kind for row in kgopt.report(model).sites), str(kgopt.report(model))


def test_autocast_on_the_cpu(summed):
    model, original = pair(Monai, torch.float32)
    x = sample(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model(x), original(x)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", [Monai, Resnet, Dropped])
def test_autocast(cls, low, summed):
    """GroupNorm gives float32 under autocast, InstanceNorm what it is given."""
    model, original = (m.cuda() for m in pair(cls, torch.float32))
    x = sample(torch.float32).cuda()
    with torch.autocast("cuda", low):
        y, expected = model(x), original(x)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    assert summed == ([] if cls is Dropped else FUSED[cls])  # there a half is added to what is float32
