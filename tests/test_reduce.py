"""logsumexp, mean and the activations."""

from __future__ import annotations

import itertools

import pytest
import torch

from kgopt import functional, reference
from shapes import with_threads
from tolerances import assert_all_as_good, assert_as_good_as_torch

OPS = torch.ops.kgopt
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ALL_ACTS = [*reference.ACTIVATIONS, *reference.PARAMETRIZED]
CHAINS = ["leaky_relu(0.2)+add(1e+0)+clamp(-inf,2)+selu", "hardtanh(-2,3)+mul(0.5)+softplus(2,15)+elu(0.7)+celu(2)"]
SHAPES = [(5,), (3, 7), (2, 64, 9, 11), (4, 5, 6, 7, 3), (1, 3, 200, 70), (2, 1, 1, 33), (70000,), (3, 40000)]


def dims_of(shape):
    rank = len(shape)
    every = [list(c) for n in range(1, rank + 1) for c in itertools.combinations(range(rank), n)]
    return [*every[:12], [-1], list(range(rank))]


LAYOUTS = [(s, "contiguous") for s in SHAPES] + [(s, "channels_last") for s in SHAPES if len(s) in (4, 5)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "layout"), LAYOUTS, ids=str)
def test_reductions_values(shape, dtype, layout, device, poisoned):
    x = (torch.randn(shape, device=device) * 4).to(dtype)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    for dims in dims_of(shape):
        for keepdim in (False, True):
            exact = torch.logsumexp(x.double(), dims, keepdim)
            assert_as_good_as_torch(functional.logsumexp(x, dims, keepdim), torch.logsumexp(x, dims, keepdim), exact)
            y, expected = functional.mean(x, dims, keepdim), x.mean(dims, keepdim)
            size = float(x.double().abs().max())
            assert y.shape == expected.shape
            limit = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps) * size
            assert float((y.double() - x.double().mean(dims, keepdim)).abs().max()) <= limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [[1], [2, 3], [1, 2, 3], [0, 2, 3]], ids=str)
@pytest.mark.parametrize("shape", [(3, 40, 64, 24), (2, 33, 1024, 520), (2, 7, 33, 16)], ids=str)
def test_reductions_in_whole_vectors(shape, dims, dtype, device, poisoned):
    """Accesses of 16 bytes along what is reduced or across it, forward and backward; one element further on, of one."""
    if str(device) == "cpu" and shape[1] == 33:
        pytest.skip("so many results decide how a GPU is used")
    every = (torch.randn(int(torch.tensor(shape).prod()) + 1, device=device) * 2).to(dtype)
    for x in (every[:-1].view(shape), every[1:].view(shape)):
        for ours, theirs in ((functional.mean, torch.mean), (functional.logsumexp, torch.logsumexp)):
            pair = []
            for function, value in ((ours, x), (theirs, x), (theirs, x.double())):
                leaf = value.detach().requires_grad_()
                y = function(leaf, dims)
                pair.append((y.detach(), *torch.autograd.grad(y, leaf, torch.full_like(y, 0.75))))
            assert_all_as_good(*pair)


def test_mean_of_all_dims(device):
    x = torch.randn(3, 4, 5, device=device)
    torch.testing.assert_close(functional.mean(x), x.mean())
    torch.testing.assert_close(OPS.mean(x, []), x.mean())


@pytest.mark.parametrize("dims", [[0], [1], [0, 1]])
def test_logsumexp_nonfinite(dims, device):
    inf, nan = float("inf"), float("nan")
    rows = [[1.0, 2, 3], [-inf, -inf, -inf], [inf, 0, 1], [-inf, 0, 1], [nan, 0, 1], [inf, -inf, 0], [inf, inf, nan]]
    x = torch.tensor(rows, device=device)
    for t in (x, x[:2], x[1:2]):
        torch.testing.assert_close(functional.logsumexp(t, dims), torch.logsumexp(t, dims), equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 3, 700, 301), (3, 2, 512, 520), (1, 32, 20, 33), (5, 7, 400)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logsumexp_of_few_channels(shape, dtype, device, poisoned):
    """Heads of a network: few channels at many positions, whose rows are vectors or are not."""
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    exact = torch.logsumexp(x.double(), 1, True)
    assert_as_good_as_torch(functional.logsumexp(x, 1, True), torch.logsumexp(x, 1, True), exact)
    x[..., 3] = float("-inf")
    x[:, 0, ..., 4], x[:, 1, ..., 5], x[:, -1, ..., 6] = float("nan"), float("inf"), float("-inf")
    y, expected = functional.logsumexp(x, 1, True), torch.logsumexp(x, 1, True)
    torch.testing.assert_close(y[..., 3:7], expected[..., 3:7], equal_nan=True, rtol=0.02, atol=0.02)
    odd = x.flatten()[1 : 1 + x.numel() // x.shape[-1] * (x.shape[-1] - 1)].view(*x.shape[:-1], -1)
    torch.testing.assert_close(
        functional.logsumexp(odd, 1), torch.logsumexp(odd, 1), equal_nan=True, rtol=0.02, atol=0.02
    )


def test_logsumexp_large_values(device):
    x = torch.randn(4, 50, device=device) * 10 + 1000
    torch.testing.assert_close(functional.logsumexp(x, 1), torch.logsumexp(x, 1))
    torch.testing.assert_close(functional.logsumexp(-x, 1), torch.logsumexp(-x, 1))


@pytest.mark.parametrize("dims", [[1], [0, 2], [2, 3], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_reductions_backward(dims, layout, device, poisoned):
    x = torch.randn(3, 8, 5, 6, device=device, dtype=torch.float64)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    for ours, torchs in ((functional.logsumexp, torch.logsumexp), (functional.mean, torch.mean)):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = torchs(b, dims)
        dy = torch.randn_like(y)
        y.backward(dy)
        ours(a, dims).backward(dy)
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", [*ALL_ACTS, "tanh+hardswish", "none", "relu+none+gelu", *CHAINS])
def test_activation_values(act, dtype, device, poisoned):
    special = torch.tensor([0.0, -0.0, 3.0, -3.0, 1.0, -1.0, 20.0, 30.0, -30.0, 100.0, -100.0, 6.0, 1e-4, -1e-4])
    x = torch.cat([torch.randn(5000) * 4, special]).to(device).to(dtype)
    # On the CPU: PyTorch's hardswish divides by a float 6 on CUDA, in double too.
    exact = reference.activation_ref(x.double().cpu(), act).to(device)
    expected = reference.activation_ref(x, act) if act != "none" else x.clone()
    assert_as_good_as_torch(functional.activation(x, act), expected, exact)


EXTREMES = [0.0, 1e-45, 1e-40, 1.2e-38, 1e-20, 1e-8, 1e-4, 0.3, 0.625, 1.0, 3.0, 6.0, 9.0, 14.5, 17.0, 20.0, 20.5, 30.0]
EXTREMES += [87.0, 88.5, 89.0, 100.0, 104.0, 1e4, 1e20, 3e38]


@pytest.mark.parametrize("act", ALL_ACTS)
def test_activation_extremes(act, device):
    """The polynomials element by element, in value and derivative: twice PyTorch's error and a few roundings."""
    x = torch.tensor([s * v for v in EXTREMES for s in (1, -1)], device=device)

    def torchs(x):
        leaf = x.detach().clone().requires_grad_()
        y = reference.activation_ref(leaf, act)
        y.sum().backward()
        return y.detach(), leaf.grad

    ours = functional.activation(x, act), OPS.activation_backward(torch.ones_like(x), x, act)
    for y, expected, right in zip(ours, torchs(x), torchs(x.double()), strict=True):
        assert torch.equal(y.isnan(), expected.isnan())
        # The reference itself keeps 16 digits of 1 + erf, and powers of the largest values overflow in float alone.
        holds = right.isfinite() & (right.abs() < 1e38) & expected.isfinite()
        # On CUDA the special function unit's exponential is right to a few units of its largest argument here, and
        # what becomes subnormal is zero.
        relative, least = (2e-5, 1e-7) if device == "cuda" else (1e-6, 1e-14)
        allowed = 2 * (expected.double() - right).abs() + relative * right.abs() + least
        wrong = holds & ~((y.double() - right).abs() <= allowed)
        assert not wrong.any(), (x[wrong], y[wrong], right[wrong])


@pytest.mark.parametrize("act", ALL_ACTS)
def test_activation_nonfinite(act, device):
    x = torch.tensor([float("nan"), float("inf"), float("-inf")] * 7, device=device)
    expected = reference.activation_ref(x, act)
    if act == "gelu":
        expected[1::3] = float("inf")  # PyTorch's vectorized CPU kernel makes a NaN of it
    torch.testing.assert_close(functional.activation(x, act), expected, equal_nan=True, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("act", [*ALL_ACTS, "tanh+hardswish", *CHAINS])
def test_activation_backward_values(act, device, poisoned):
    x = torch.cat([torch.randn(4000) * 3, torch.tensor([-3.0, 3.0, 1.0, -1.0, 0.0, 25.0])]).to(device)
    dy = torch.randn_like(x)
    grads = []
    for run, dtype in (
        (functional.activation, torch.float32),
        (reference.activation_ref, torch.float32),
        (reference.activation_ref, torch.float64),
    ):
        leaf = x.to(dtype).requires_grad_() if dtype == torch.float64 else x.clone().requires_grad_()
        run(leaf, act).backward(dy.to(dtype))
        grads.append(leaf.grad)
    assert_as_good_as_torch(*grads)


def test_activation_keeps_channels_last(device):
    x = torch.randn(2, 8, 5, 6, device=device).contiguous(memory_format=torch.channels_last)
    assert functional.activation(x, "silu").is_contiguous(memory_format=torch.channels_last)
    y = functional.activation(x[:, ::2, 1:], "silu")
    torch.testing.assert_close(y, torch.nn.functional.silu(x[:, ::2, 1:]))


@pytest.mark.parametrize("shape", [(4, 300, 300), (2, 3, 70001)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reductions_do_not_depend_on_threads(shape, dtype):
    x = torch.randn(shape).to(dtype)

    def run():
        leaf = x.clone().requires_grad_()
        results = [f(leaf, dims) for f in (functional.mean, functional.logsumexp) for dims in ([0], [1], [2], [0, 2])]
        results.append(functional.activation(leaf, "gelu+mish"))
        sum((r * r).sum() for r in results).backward()
        return [*results, leaf.grad]

    one, three = with_threads(run, 1), with_threads(run, 3)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
