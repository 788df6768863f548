"""How the ops' nodes are recorded: what a step launches beside the kernels, and what stands around it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo import compiled_autograd

from kgopt import functional, ops, torch_private

CALLS = {
    "group_norm": lambda x, w, g: functional.group_norm(x, 2, g, g, act="relu"),
    "group_norm_mean": lambda x, w, g: functional.group_norm_mean(x, 2, g, g),
    "activation": lambda x, w, g: functional.activation(x, "silu"),
}


def inputs(device):
    x = torch.randn(2, 4, 5, 6, device=device, requires_grad=True)
    w = torch.randn(4, 4, 3, 3, device=device, requires_grad=True)
    return x, w, torch.randn(4, device=device, requires_grad=True)


@pytest.mark.parametrize("name", CALLS)
def test_no_zeros_for_statistics(name, device):
    """Gradients of statistics, which nobody differentiates, were made of zeros: two launches a norm."""
    y = CALLS[name](*inputs(device))
    dy = torch.ones_like(y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward(dy)
    assert not [e.name for e in profile.events() if e.name in ("aten::zeros", "aten::to")]


@pytest.mark.parametrize("name", ["group_norm", "conv2d"])
def test_direct_calls_are_the_ops(name, device):
    """With and without gradients, under torch.func and inference mode: as through the dispatcher."""
    x, w, g = inputs(device)
    arguments = {"group_norm": (x, 2, g, g, 1e-5, "silu"), "conv2d": (x, w, g, [1, 1], [1, 1], [1, 1], 1)}[name]
    tensors = tuple(t for t in arguments if isinstance(t, torch.Tensor))[:2]
    op, direct = getattr(torch.ops.kgopt, name), ops.direct(name)
    expected, y = op(*arguments), direct(*arguments)
    assert torch.equal(y, expected)
    assert y.requires_grad
    dy = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, tensors, dy), torch.autograd.grad(expected, tensors, dy), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        assert torch.equal(direct(*arguments), expected)
        assert not direct(*arguments).requires_grad
    with torch.inference_mode():
        assert torch.equal(direct(*arguments), expected)

    def loss(function):
        return lambda t: function(t, *arguments[1:]).square().sum()

    a, b = torch.func.grad(loss(direct))(x.detach()), torch.func.grad(loss(op))(x.detach())
    torch.testing.assert_close(a, b)


def test_backward_inside_unpack_hooks(device):
    """Saved tensors that are computed again, with gradients, while a node's backward runs."""
    x, _, g = inputs(device)
    seen = []

    def unpack(t):
        with torch.enable_grad():
            z = functional.group_norm(t.detach().requires_grad_(), 2) if t.dim() == 4 else t
            seen.append(z.requires_grad)
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = functional.group_norm(x, 2, g, g)
    y.sum().backward()
    assert any(seen)


def test_no_gradient_from_above(device):
    """A node behind one whose gradient is None."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x, w, g = inputs(device)
    y = Stop.apply(functional.conv2d(functional.group_norm(x, 2, g, g), w, g, padding=1))
    y.sum().backward()
    assert x.grad is None
    assert w.grad is None
    assert g.grad is None


def test_compiled_autograd(device):
    """The nodes of eager calls have the key of a backward that PyTorch compiles."""
    if torch_private.missing().get("torch.autograd.Function._compiled_autograd_key"):
        pytest.skip("this torch compiles no backward of functions")

    def gradients(given):
        y = sum(call(*given).square().sum() for call in CALLS.values())
        y.backward()
        return [t.grad for t in given]

    given = inputs(device)
    expected = gradients([t.detach().clone().requires_grad_() for t in given])
    with compiled_autograd._enable(functools.partial(torch.compile, backend="eager")):
        found = gradients(given)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)
