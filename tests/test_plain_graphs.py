"""Casts in captured graphs (rewrite/captured/passes/plain.py): left out, or part of a norm that computes in float32."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kgopt.rewrite import backend
from kgopt.rewrite.captured import passes


class Norm32(nn.GroupNorm):
    """As guided diffusion and latent diffusion have it."""

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), Norm32(2, 8), nn.Conv2d(8, 3, 1)

    def middle(self, h):
        return F.silu(self.norm(h))

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def in_half(net, dtype=torch.bfloat16):
    torch.manual_seed(0)
    net = net.to(dtype)
    net.norm.float()
    return net


def rows_of(net, x, **options):
    """What became of the sites of the compiled network, and its value."""
    torch._dynamo.reset()
    run = torch.compile(copy.deepcopy(net), backend="kgopt", options={"kgopt.always": True, **options})
    return run(x), [row.became or row.reason for row in backend.last_report.sites]


def test_casts_that_do_nothing():
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 3, 6, 5)
    with torch.no_grad():
        y, rows = rows_of(net, x)
        assert rows == ["group_norm(act=silu)"]
        torch.testing.assert_close(y, net(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("train", [False, True])
def test_half_precision_in_float32(dtype, train):
    net = in_half(Net().train(train), dtype)
    x = torch.randn(2, 3, 6, 5).to(dtype).requires_grad_(train)
    y, rows = rows_of(net, x)
    assert rows == ["group_norm(act=silu)"]
    expected = net(x)
    assert y.dtype is dtype
    torch.testing.assert_close(y, expected, rtol=0.03, atol=0.03)
    if train:
        ours, theirs = (torch.autograd.grad(t.float().square().mean(), x)[0].float() for t in (y, expected))
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.02 * float(theirs.abs().max()))


class Twice(Net):
    """The float32 result is read by others, too."""

    def middle(self, h):
        y = F.group_norm(h.float(), 2, self.norm.weight, self.norm.bias)
        return F.silu(y.to(h.dtype)) + y.mean().to(h.dtype)


class Written(Net):
    """What was copied has changed when the norm runs."""

    def middle(self, h):
        wide = h.float()
        h.mul_(2)
        return F.silu(F.group_norm(wide, 2, self.norm.weight, self.norm.bias).to(h.dtype)) + h


class Wide(Net):
    """Given back in another dtype."""

    def middle(self, h):
        return F.silu(F.group_norm(h.float(), 2, self.norm.weight, self.norm.bias).to(torch.float64)).to(h.dtype)


@pytest.mark.parametrize("kind", [Twice, Written, Wide])
def test_what_is_more_than_that(kind):
    net, x = in_half(kind()), torch.randn(2, 3, 6, 5).bfloat16()
    with torch.no_grad():
        y, rows = rows_of(net, x)
        assert rows == ["group_norm"]
        torch.testing.assert_close(y, net(x), rtol=0.05, atol=0.05)


class Autocast(Net):
    """A part of it, whose results are half precision whatever reads them."""

    def middle(self, h):
        with torch.autocast("cpu", torch.bfloat16):
            return F.silu(self.norm(h))


@pytest.mark.parametrize("kind", [Net, Autocast])
def test_autocast(kind):
    torch.manual_seed(0)
    net, x = kind(), torch.randn(2, 3, 6, 5)
    if kind is Autocast:
        in_half(net)
        x = x.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=kind is Net):
        y, rows = rows_of(net, x)
        assert rows == ["group_norm(act=silu)"]
        torch.testing.assert_close(y, net(x), rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(torch.float32, copy=True),
        lambda x: x.to(torch.float32, memory_format=torch.channels_last),
        lambda x: x.to("cpu").float().double(),
    ],
)
def test_casts_that_do_something(change):
    """A copy is a tensor of its own."""

    def function(x):
        y = change(x)
        y.add_(1)
        return y

    run, x = torch.compile(function, backend="kgopt"), torch.zeros(1, 2, 3, 4)
    y = run(x)
    assert float(x.sum()) == 0
    assert torch.equal(y, function(x))
    assert y.stride() == function(x).stride()


def test_a_cast_that_does_nothing_is_the_tensor_itself():
    def function(x):
        x.float().type_as(x).add_(1)
        return x.to(x.dtype)

    x = torch.zeros(3)
    assert torch.compile(function, backend="kgopt")(x) is not None
    assert x.tolist() == [1, 1, 1]


def test_what_stays_pytorchs_is_written_as_it_was(monkeypatch):
    """Caches of compiled code do not know a function of kgopt's."""
    seen, compile_graph = [], backend.compile_graph
    monkeypatch.setattr(backend, "compile_graph", lambda g, *a, **k: (seen.append(g), compile_graph(g, *a, **k))[1])
    net, x = in_half(Net()), torch.randn(2, 3, 6, 5).bfloat16()
    with torch.no_grad():
        y, rows = rows_of(net, x, **{"kgopt.always": False})
        assert "on the CPU" in rows[0]
        torch.testing.assert_close(y, net(x), rtol=0.03, atol=0.03)
    (graph,) = seen
    targets = [node.target for node in graph.graph.nodes]
    assert F.group_norm in targets
    assert passes.plain.group_norm_in_float32 not in targets


def test_replaced_methods_are_the_users(monkeypatch):
    net, x = in_half(Net()), torch.randn(2, 3, 6, 5).bfloat16()
    real = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda t: real(t) * 2)
    with torch.no_grad():
        torch.testing.assert_close(rows_of(net, x)[0], net(x), rtol=0.05, atol=0.05)
