"""Tensors without elements: empty results where PyTorch gives them, errors where it raises, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from kgopt import functional, reference
from pipeline_cases import PIPELINES

OPS = torch.ops.kgopt


def outcome(run, tensors):
    """Sizes of the result and the gradients, and which are NaN; or that it is refused.

    Of empty tensors' sums it is asked only that nothing is left unwritten: PyTorch's are zeros or NaN, by its version.
    """
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    try:
        y = run(*leaves)
        y.sum().backward()
    except (RuntimeError, ValueError, IndexError):
        return "refused"
    gradients = [leaf.grad for leaf in leaves]
    sizes = [tuple(t.shape) for t in (y, *gradients)]
    empty = min(t.numel() for t in (y, *tensors)) == 0
    if empty:
        return sizes, [bool((t.isnan() | (t == 0)).all()) for t in gradients]
    return sizes, [bool(t.isnan().any()) for t in (y, *gradients)]


def assert_alike(ours, theirs, *tensors, what=""):
    mine, expected = outcome(ours, tensors), outcome(theirs, tensors)
    if expected == "refused" != mine:  # a norm of no channels is refused by 2.11's CUDA kernel alone
        expected = outcome(theirs, [t.cpu() for t in tensors])
    assert mine == expected, f"{what}: {mine}, PyTorch {expected}"


def spatial(rank, last):
    return (*(4,) * (rank - 1), last)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [2, 3])
def test_convolutions_of_nothing(rank, transposed, device):
    """A transposed convolution whose output has a size of 0 is an empty tensor in PyTorch, and was an error here; the
    gradient of the bias had no elements where x has no channels."""
    names = {(2, False): "conv2d", (3, False): "conv3d", (2, True): "conv_transpose2d", (3, True): "conv_transpose3d"}
    name = names[rank, transposed]
    ours, theirs = getattr(functional, name), getattr(F, name)
    for n, c_in, c_out, size, k, p in itertools.product((0, 2), (0, 2), (0, 2), (0, 1, 3), (1, 2, 3), (0, 1, 2)):
        x = torch.randn(n, c_in, *spatial(rank, size), device=device)
        weight = torch.randn(*((c_in, c_out) if transposed else (c_out, c_in)), *[k] * rank, device=device)
        bias = torch.randn(c_out, device=device)
        assert_alike(
            lambda *t, p=p: ours(*t, padding=p),
            lambda *t, p=p: theirs(*t, padding=p),
            *(x, weight, bias),
            what=f"{name} of {list(x.shape)} by {list(weight.shape)}, padding {p}",
        )


def test_transposed_convolution_to_nothing(device):
    """The fuzzer's case: 1 + 6 - 1 - 2 * 3 = 0 columns."""
    x, weight = torch.randn(1, 1, 1, 1, 1, device=device), torch.randn(1, 1, 1, 4, 6, device=device)
    y = functional.conv_transpose3d(x, weight, None, padding=(0, 0, 3))
    assert y.shape == F.conv_transpose3d(x, weight, None, padding=(0, 0, 3)).shape == (1, 1, 1, 4, 0)
    with pytest.raises(RuntimeError, match="would have size"):
        functional.conv_transpose3d(x, weight, None, padding=(0, 0, 4))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipelines_of_nothing(pipeline, device):
    function, ref, transposed, rank = PIPELINES[pipeline]
    for n, c_in, c_out, size, k, p in itertools.product((0, 2), (0, 2), (0, 2), (0, 1, 3), (1, 2, 3), (0, 1)):
        if size == 3 and min(n, c_in, c_out) > 0:
            continue  # not empty
        x = torch.randn(n, c_in, *spatial(rank, size), device=device)
        weight = torch.randn(*((c_in, c_out) if transposed else (c_out, c_in)), *[k] * rank, device=device)
        bias, gamma, beta = torch.randn(3, c_out, device=device)
        assert_alike(
            lambda x, w, b, g, h, p=p: function(x, w, b, 1, g, h, padding=p),
            lambda x, w, b, g, h, p=p: ref(x, w, b, 1, g, h, padding=p),
            *(x, weight, bias, gamma, beta),
            what=f"{pipeline} of {list(x.shape)} by {list(weight.shape)}, padding {p}",
        )


def empty_shapes(rank):
    for n, c, size in itertools.product((0, 2), (0, 2), (0, 1, 3)):
        yield (n, c, *spatial(rank, size))


@pytest.mark.parametrize("rank", [2, 3])
def test_pointwise_ops_of_nothing(rank, device):
    """PyTorch pools, pads and resamples an empty batch, and refuses tensors without channels: we took these."""
    pool = F.max_pool2d if rank == 2 else F.max_pool3d
    for shape in empty_shapes(rank):
        x = torch.randn(shape, device=device)
        for k, s, p in ((2, 2, 0), (3, 2, 1)):
            window = [k] * rank, [s] * rank, [p] * rank
            assert_alike(
                lambda x, w=window: OPS.max_pool(x, *w), lambda x, w=window: pool(x, *w), x, what=f"pool {shape}"
            )
        for pads in ([1, 1] * rank, [0, 0] * rank):
            assert_alike(
                lambda x, pads=pads: OPS.pad_replicate(x, pads),
                lambda x, pads=pads: F.pad(x, pads, mode="replicate"),
                x,
                what=f"pad {shape}",
            )
        assert_alike(
            lambda x: OPS.upsample_nearest(x, [2] * rank),
            lambda x: F.interpolate(x, scale_factor=2),
            x,
            what=f"nearest {shape}",
        )
        assert_alike(lambda x: OPS.upsample_linear(x, None), reference.upsample_linear_ref, x, what=f"linear {shape}")
        assert_alike(lambda x: OPS.activation(x, "silu"), F.silu, x, what=f"silu {shape}")


@pytest.mark.parametrize("rank", [2, 3])
def test_reductions_and_norms_of_nothing(rank, device):
    for shape in empty_shapes(rank):
        x = torch.randn(shape, device=device)
        for dims, keepdim in itertools.product(([1], [0], [rank + 1], [0, 1]), (False, True)):
            for ours, theirs in ((OPS.logsumexp, torch.logsumexp), (OPS.mean, torch.mean)):
                assert_alike(
                    lambda x, f=ours, d=dims, k=keepdim: f(x, d, k),
                    lambda x, f=theirs, d=dims, k=keepdim: f(x, d, k),
                    x,
                    what=f"{theirs.__name__} {shape} {dims}",
                )
        weight, bias = torch.randn(2, shape[1], device=device)
        for groups in (1, 2):
            assert_alike(
                lambda *t, g=groups: functional.group_norm(t[0], g, *t[1:]),
                lambda *t, g=groups: F.group_norm(t[0], g, *t[1:]),
                *(x, weight, bias),
                what=f"group_norm {shape} in {groups} groups",
            )


@pytest.mark.parametrize("eps", [-0.5, -1e-9, 0.0, float("nan"), float("inf"), -float("inf"), 1e300])
def test_group_norm_takes_any_eps(eps, device):
    """PyTorch normalizes with any eps, and a negative one leaves NaN where the variance is smaller: it was refused."""
    x = torch.cat([torch.randn(2, 3, 5, 4), 0.01 * torch.randn(2, 3, 5, 4)], 1).to(device)
    weight, bias = torch.randn(2, 6, device=device)
    results = []
    for norm in (functional.group_norm, F.group_norm):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = norm(leaves[0], 2, leaves[1], leaves[2], eps)
        y.sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(mine.isnan(), expected.isnan())
        torch.testing.assert_close(mine, expected, equal_nan=True, atol=1e-4, rtol=1e-4)
