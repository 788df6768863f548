"""Activations behind convolutions and behind their sums: when they are part of one op."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt.rewrite import glue
from kgopt.rewrite.glue import plans, search
from kgopt.rewrite.measure import clocks
from kgopt.rewrite.model import convolved, whole
from kgopt.rewrite.optimized import known
from kgopt.rewrite.waiting import sums
from optimize_pairs import all_faster


class Block(nn.Module):
    """pytorch3dunet's residual block of the order "gcr": a sum and an activation behind the last convolution."""

    def __init__(self, act=None):
        super().__init__()
        self.conv1 = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True))
        self.conv2 = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1))
        self.act = nn.ReLU(inplace=True) if act is None else act

    def forward(self, x):
        out = self.conv1(x)
        out = self.conv2(out)
        out += x
        out = self.act(out)
        return out


class Nested(Block):
    def forward(self, x):
        return F.leaky_relu(x + self.conv2(self.conv1(x)), 0.2)


class Named(Block):
    def forward(self, x):
        out = self.conv1(x)
        out = self.conv2(out)
        out = out + x
        return self.act(out)


def draw(*shape, device="cpu"):
    return torch.randn(shape or (2, 4, 6, 8), device=device)


def optimized(model, x):
    """The original, and a copy whose calls were all found to be faster."""
    original = model.to(x.device).eval()
    model = kgopt.optimize(copy.deepcopy(original), measure=False)
    all_faster(model, x)
    convolved.give(model)
    return original, model


def acts_run(model, x, monkeypatch):
    """The activations that ran as part of a convolution's op, and the result."""
    names = []
    run = plans._conv_add

    def counted(*args, **kwargs):
        names.append((args[-1], args[3] is not None))
        return run(*args, **kwargs)

    monkeypatch.setattr(plans, "_conv_add", counted)
    y = model(x)
    monkeypatch.setattr(plans, "_conv_add", run)
    return names, y


ACTS = [
    (nn.ReLU(inplace=True), "relu"),
    (nn.ELU(inplace=True), "elu"),
    (nn.LeakyReLU(0.1), "leaky_relu(0.1)"),
    (nn.SiLU(), "silu"),
    (nn.PReLU(4), "none"),  # its slopes are a parameter
]


@pytest.mark.parametrize(("act", "name"), ACTS, ids=str)
def test_an_activation_behind_a_convolutions_sum(act, name, device, monkeypatch, poisoned):
    x = draw(device=device)
    original, model = optimized(Block(copy.deepcopy(act)), x)
    with torch.no_grad():
        names, y = acts_run(model, x.clone(), monkeypatch)
        assert names == [("relu", False), (name, True)]
        torch.testing.assert_close(y, original(x.clone()))
        names, y = acts_run(model, draw(1, 4, 5, 5, device=device), monkeypatch)  # not measured
        assert names == []
    names, y = acts_run(model, x.clone(), monkeypatch)  # with gradients
    assert names == []
    torch.testing.assert_close(y, original(x.clone()))


@pytest.mark.parametrize(("cls", "name"), [(Nested, "leaky_relu(0.2)"), (Named, "relu")])
def test_ways_to_write_it(cls, name, monkeypatch):
    x = draw()
    original, model = optimized(cls(), x)
    with torch.no_grad():
        for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            names, y = acts_run(twin, x, monkeypatch)
            assert names == [("relu", False), (name, True)]
            torch.testing.assert_close(y, original(x))
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), original(x))


def test_who_looks_at_the_sum_sees_it(monkeypatch):
    x = draw()
    original, model = optimized(Block(), x)
    seen = []
    for m in (original, model):
        m.act.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with torch.no_grad():
        names, y = acts_run(model, x.clone(), monkeypatch)
        assert names == [("relu", False), ("none", True)]
        torch.testing.assert_close(y, original(x.clone()))
    torch.testing.assert_close(*seen)
    with torch.no_grad():  # an activation that no op has
        model.act = original.act = nn.RReLU().eval()
        torch.testing.assert_close(model(x.clone()), original(x.clone()))


class Head(nn.Module):
    """A Sequential that ends in a convolution to one channel, which may read the norm's input itself."""

    def __init__(self):
        super().__init__()
        self.tail = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 1, 1), nn.Conv2d(1, 1, 1))

    def forward(self, x):
        return self.tail(x) + x[:, :1]


class NormTail(nn.Module):
    def __init__(self):
        super().__init__()
        self.tail = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))
        self.act = nn.ReLU()

    def forward(self, x):
        h = self.tail(x)
        h += x
        return self.act(h)


class Deep(nn.Module):
    """A chain reaches from one inner Sequential into the next."""

    def __init__(self):
        super().__init__()
        one = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.tail = nn.Sequential(one, nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1)))

    def forward(self, x):
        return F.silu(self.tail(x) + x)


@pytest.mark.parametrize("cls", [Head, NormTail, Deep])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_sequentials_with_sites_that_end_in_what_waits(cls, autocast):
    x = draw()
    original, model = optimized(cls(), x)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, y = original(x.clone()), model(x.clone())
        assert y.dtype is expected.dtype
        torch.testing.assert_close(y, expected, rtol=2e-2 if autocast else 1e-5, atol=2e-2 if autocast else 1e-5)
    model.tail[0], original.tail[0] = nn.Identity(), nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(model(x.clone()), original(x.clone()))
    model.tail.append(nn.ReLU())
    original.tail.append(nn.ReLU())
    with torch.no_grad():
        torch.testing.assert_close(model(x.clone()), original(x.clone()))


def test_a_norm_at_the_end_of_a_sequential_with_sites_waits_for_its_sum(monkeypatch):
    x = draw()
    _, model = optimized(NormTail(), x)
    acts = []
    plus = sums.LaterNorm.plus
    monkeypatch.setattr(sums.LaterNorm, "plus", lambda *args: (acts.append(args[3]), plus(*args))[1])
    with torch.no_grad():
        model(x.clone())
    assert acts == ["relu"]


def test_a_deep_tail_is_one_op_with_its_sum(monkeypatch):
    x = draw()
    original, model = optimized(Deep(), x)
    with torch.no_grad():
        names, y = acts_run(model, x, monkeypatch)
        torch.testing.assert_close(y, original(x))
    assert names[-1] == ("silu", True)


# ---------------------------------------------------------------------------------------- networks without norms


class Plain(nn.Module):
    """A residual block without norms, its convolutions called by name."""

    def __init__(self, act=None):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.act = nn.ReLU(inplace=True) if act is None else act

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.act(out)
        out = self.conv2(out)
        out += identity
        return self.act(out)


class Functions(Plain):
    def forward(self, x):
        h = F.elu(self.conv1(x), alpha=0.5)
        h = torch.tanh(self.conv2(h))
        return F.leaky_relu(x + h, 0.3)


class Branches(Plain):
    def forward(self, x):
        if self.training:
            return self.act(self.conv1(x))
        for conv in (1, 2):
            h = self.conv1(x)
            h = F.relu(h)
            x = x + conv * h
        return x


class Edsr(nn.Module):
    def __init__(self):
        super().__init__()
        conv = lambda: nn.Conv2d(4, 4, 3, padding=1)  # noqa: E731
        self.head, self.tail = conv(), nn.Sequential(nn.ConvTranspose2d(4, 4, 2, 2), nn.GELU(), nn.Conv2d(4, 3, 1))
        self.blocks = nn.ModuleList([Body(nn.Sequential(conv(), nn.ReLU(True), conv())) for _ in range(2)])

    def forward(self, x):
        h = x = self.head(x)
        for block in self.blocks:
            h = block(h)
        return self.tail(h + x)


class Body(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        res = self.body(x)
        res += x
        return res


RELU, SUM = ("relu", False), ("none", True)
NETWORKS = [
    (Plain, [RELU, ("relu", True)]),
    (lambda: Plain(nn.ELU(0.5)), [("elu(0.5)", False), ("elu(0.5)", True)]),
    (Functions, [("elu(0.5)", False), ("tanh", False)]),
    (Branches, [RELU, RELU]),
    # The first convolution; the blocks; the convolution to three channels.
    (Edsr, [("none", False), RELU, SUM, RELU, SUM, ("gelu", False), ("none", False)]),
]


@pytest.mark.parametrize(("make", "expected"), NETWORKS, ids=["relu", "elu", "functions", "branches", "edsr"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_networks_without_norms(make, expected, channels_last, device, monkeypatch, poisoned):
    form = torch.channels_last if channels_last else torch.contiguous_format
    x = draw(device=device).contiguous(memory_format=form)
    original, model = optimized(make().to(memory_format=form), x)
    with torch.no_grad():
        for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)) if make in CLASSES else model):
            names, y = acts_run(twin, x, monkeypatch)
            assert names == expected
            torch.testing.assert_close(y, original(x))
            assert y.stride() == original(x).stride()
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), original(x))
        with torch.autocast(device, torch.bfloat16):
            assert acts_run(model, x, monkeypatch)[0] == []
    names, y = acts_run(model, x, monkeypatch)
    assert names == []
    torch.testing.assert_close(y, original(x))
    y.sum().backward()  # which nothing was written into
    original(x).sum().backward()
    for p, q in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-4)
    kgopt.restore(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert not any(name.startswith("_kgopt") for m in model.modules() for name in m.__dict__)


CLASSES = (Plain, Functions, Branches, Edsr)


def test_modules_get_their_classes_back_where_no_convolution_gained():
    x = draw()
    original, model = optimized(Edsr(), x)
    assert known.get(model.blocks[0], "joins")
    convolved.take_back(model)
    assert known.get(model.blocks[0].body, "joins")
    glue.forget(model.blocks[1])
    convolved.take_back(model)
    assert type(model.blocks[1]) is Body
    assert type(model.blocks[1].body) is nn.Sequential
    assert type(model.blocks[0]) is not Body
    glue.forget(model)
    convolved.take_back(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert not any(name.startswith("_kgopt") and name != "_kgopt" for m in model.modules() for name in m.__dict__)
    with torch.no_grad():
        assert torch.equal(model(x), original(x))


def test_a_model_whose_convolutions_gain_nothing_is_left_alone():
    original = Edsr().eval()
    model = kgopt.optimize(copy.deepcopy(original), measure=False)
    convolved.give(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]


class ReadAfter(Plain):
    def forward(self, x):
        h = self.conv1(x)
        y = F.relu(h)
        return y + h


class InLambda(Plain):
    def forward(self, x):
        run = lambda x: F.relu(self.conv1(x))  # noqa: E731
        return run(x)


class InTry(Plain):
    def forward(self, x):
        try:
            h = self.conv1(x)
            h = F.relu(h)
        except RuntimeError:
            pass
        return h


class Slopes(Plain):
    def __init__(self):
        super().__init__(nn.PReLU())

    def forward(self, x):
        return self.act(self.conv1(x))


@pytest.mark.parametrize("cls", [ReadAfter, InLambda, InTry, Slopes])
def test_what_keeps_an_activation_apart(cls, monkeypatch):
    x = draw()
    original, model = optimized(cls(), x)
    with torch.no_grad():
        names, y = acts_run(model, x, monkeypatch)
        assert not any(name != "none" for name, _ in names)
        torch.testing.assert_close(y, original(x))


def test_an_activation_may_change_after_all(monkeypatch):
    x = draw()
    original, model = optimized(Plain(), x)
    seen = []
    with torch.no_grad():
        for change in (
            lambda m: (delattr(m, "act"), setattr(m, "act", torch.sin)),
            lambda m: (delattr(m, "act"), setattr(m, "act", nn.SiLU())),
            lambda m: setattr(m, "act", nn.Identity()),
            lambda m: setattr(m, "conv1", nn.Identity()),
            lambda m: m.conv2.register_forward_hook(lambda module, args, y: seen.append(y.clone())),
        ):
            for m in (original, model):
                change(m)
            torch.testing.assert_close(model(x.clone()), original(x.clone()))
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_whole_model_decides(is_faster, monkeypatch):
    x = draw()
    original = Edsr().eval()
    model = copy.deepcopy(original)
    times = (2e-3, 1e-3) if is_faster else (1e-3, 2e-3)
    monkeypatch.setattr(whole, "chooses", lambda device: True)
    monkeypatch.setattr(search, "verdict", lambda call, original: call.options[0])
    monkeypatch.setattr(clocks, "time_both", lambda first, second, device: (first(), second(), times)[-1])
    monkeypatch.setattr(clocks, "clock_both", lambda *_: times)
    monkeypatch.setattr(clocks, "busy", lambda function, device: (function(), 1e-3)[-1])
    with torch.no_grad():
        kgopt.forget()
        kgopt.optimize(model, x, channels_last=False, cuda_graph=False)
        names, y = acts_run(model, x, monkeypatch)
        assert (RELU in names) is is_faster
        torch.testing.assert_close(y, original(x))
    assert (type(model.blocks[0].body) is nn.Sequential) is not is_faster
    kgopt.forget()
