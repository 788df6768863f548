"""torch.func: vmap over any argument, per-sample gradients, Jacobians."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, jacrev, vmap

import kgopt.nn
from kgopt import functional, reference
from opcases import NAMES, small_calls

OPS = torch.ops.kgopt


def as_tuple(out):
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)


def check_vmap(op, args, kwargs, batched, dims):
    """op under vmap, with the arguments at ``batched`` stacked along ``dims``, against one call an example."""
    factors = [1.0, 0.5, -0.75]
    examples = [[a * f if i in batched else a for i, a in enumerate(args)] for f in factors]
    in_dims = [None] * len(args)
    stacked = list(args)
    for i, dim in zip(batched, dims, strict=True):
        dim = min(dim, args[i].dim())
        in_dims[i] = dim
        stacked[i] = torch.stack([e[i] for e in examples], dim)
    out = as_tuple(vmap(lambda *a: op(*a, **kwargs), in_dims=tuple(in_dims))(*stacked))
    singles = [as_tuple(op(*e, **kwargs)) for e in examples]
    for k, o in enumerate(out):
        expected = torch.stack([s[k] for s in singles])
        torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_vmap_over_the_first_argument(index, device):
    name, args, kwargs = small_calls(device, torch.float64)[index]
    for dim in (0, 1, 9):  # first, in the middle, last
        check_vmap(getattr(OPS, name), args, kwargs, [0], [dim])


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_vmap_over_every_tensor(index, device):
    name, args, kwargs = small_calls(device, torch.float64)[index]
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    check_vmap(getattr(OPS, name), args, kwargs, tensors, [i % 2 for i in range(len(tensors))])
    # The last tensor alone: an argument that examples do not share, such as a weight.
    check_vmap(getattr(OPS, name), args, kwargs, tensors[-1:], [0])


def test_vmap_in_vmap(device):
    x = torch.randn(2, 3, 4, 6, 5, device=device, dtype=torch.float64)
    y = vmap(vmap(lambda t: functional.group_norm(t, 3)))(x)
    exact = reference.group_norm_ref(x.flatten(0, 2), 3).view_as(x)
    torch.testing.assert_close(y, exact)


def test_vmap_of_reductions_keeps_their_dims(device):
    x = torch.randn(3, 4, 5, 6, device=device, dtype=torch.float64)
    for dims in ([0], [-1], [0, -2], [0, 1, 2]):
        for keepdim in (False, True):
            y = vmap(lambda t, d=dims, k=keepdim: functional.logsumexp(t, d, k))(x)
            torch.testing.assert_close(y, torch.stack([torch.logsumexp(t, dims, keepdim) for t in x]))
    torch.testing.assert_close(vmap(lambda t: functional.mean(t))(x), x.mean((1, 2, 3)))
    row = x[0, 0, 0]  # each example is a scalar, whose one "dim" is 0
    torch.testing.assert_close(vmap(lambda t: functional.logsumexp(t, 0))(row), row)


FUNCTIONS = {
    "group_norm": (
        [(4, 3, 5), (4,), (4,)],
        lambda x, w, b: functional.group_norm(x[None], 2, w, b, act="silu"),
        lambda x, w, b: reference.group_norm_ref(x[None], 2, w, b, act="silu"),
    ),
    "group_norm_mean": (
        [(4, 3, 5), (4,), (4,)],
        lambda x, w, b: functional.group_norm_mean(x[None], 2, w, b),
        lambda x, w, b: reference.group_norm_mean_ref(x[None], 2, w, b),
    ),
    "group_stats": (
        [(4, 3, 5)],
        lambda x: torch.cat(functional.group_stats(x[None], 2)),
        lambda x: torch.cat(reference.group_stats_ref(x[None], 2)),
    ),
    "conv2d": (
        [(3, 6, 7), (4, 3, 3, 3), (4,)],
        lambda x, w, b: functional.conv2d(x, w, b, 2, 1),
        lambda x, w, b: torch.nn.functional.conv2d(x, w, b, 2, 1),
    ),
    "logsumexp of an activation": (
        [(4, 5)],
        lambda x: functional.logsumexp(functional.activation(x, "mish"), 0),
        lambda x: torch.logsumexp(reference.activation_ref(x, "mish"), 0),
    ),
    "conv2d_..._logsumexp": (
        [(2, 5, 6), (4, 2, 3, 3), (4,), (4,)],
        lambda x, w, g, b: functional.conv2d_group_norm_tanh_hardswish_residual_logsumexp(x[None], w, None, 2, g, b),
        lambda x, w, g, b: reference.conv2d_group_norm_tanh_hardswish_residual_logsumexp_ref(x[None], w, None, 2, g, b),
    ),
    "conv3d_group_norm_mean": (
        [(2, 4, 5, 4), (4, 2, 3, 3, 3), (4,), (4,)],
        lambda x, w, g, b: functional.conv3d_group_norm_mean(x[None], w, None, 2, g, b),
        lambda x, w, g, b: reference.conv3d_group_norm_mean_ref(x[None], w, None, 2, g, b),
    ),
    "conv_transpose3d_relu_group_norm": (
        [(2, 3, 2, 3), (2, 4, 2, 2, 2), (4,), (4,)],
        lambda x, w, g, b: functional.conv_transpose3d_relu_group_norm(x[None], w, None, 2, g, b, 2),
        lambda x, w, g, b: reference.conv_transpose3d_relu_group_norm_ref(x[None], w, None, 2, g, b, 2),
    ),
}


def scalar(function):
    """A scalar that depends on every output in its own way."""

    def weighted(*args):
        y = function(*args)
        return (y * torch.linspace(-1, 1, y.numel()).to(y).view(y.shape)).sum()

    return weighted


@pytest.mark.parametrize("name", FUNCTIONS)
def test_grad_and_per_sample_grad(name, device):
    shapes, ours, theirs = FUNCTIONS[name]
    samples = torch.randn(3, *shapes[0], device=device, dtype=torch.float64)
    shared = [torch.randn(s, device=device, dtype=torch.float64) for s in shapes[1:]]
    every = tuple(range(len(shapes)))
    in_dims = (0, *(None,) * len(shared))
    for a, b in zip(
        grad(scalar(ours), every)(samples[0], *shared), grad(scalar(theirs), every)(samples[0], *shared), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    per_sample = vmap(grad(scalar(ours), every), in_dims)(samples, *shared)
    expected = vmap(grad(scalar(theirs), every), in_dims)(samples, *shared)
    for a, b in zip(per_sample, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jacrev(name, device):
    """A Jacobian is a vmap of the backward pass."""
    shapes, ours, theirs = FUNCTIONS[name]
    inputs = [torch.randn(s, device=device, dtype=torch.float64) for s in shapes]
    torch.testing.assert_close(jacrev(ours)(*inputs), jacrev(theirs)(*inputs), rtol=1e-9, atol=1e-9)


def test_functional_call_per_sample(device):
    module = kgopt.nn.Conv3dGroupNormMean(2, 4, 3, 2, device=device, dtype=torch.float64)
    parameters = {k: torch.randn_like(v) for k, v in module.named_parameters()}
    x = torch.randn(3, 2, 5, 4, 5, device=device, dtype=torch.float64)

    def loss(p, sample):
        return functional_call(module, p, (sample[None],)).square().sum()

    per_sample = vmap(grad(loss), (None, 0))(parameters, x)
    for i in range(3):
        alone = grad(loss)(parameters, x[i])
        for key, value in alone.items():
            torch.testing.assert_close(per_sample[key][i], value, rtol=1e-9, atol=1e-9)
