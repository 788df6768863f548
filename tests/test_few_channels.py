"""The pipelines with so few output channels that no vector, tile or lane is full, forward and backward."""

from __future__ import annotations

import pytest
import torch

import kgopt
from kgopt import reference
from pipeline_cases import PIPELINES, gradients, last_format, upcast
from tolerances import assert_as_good_as_torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Output positions in whole vectors and not, and a single one.
SIZES = {"whole vectors": (6, 10, 18), "odd": (5, 9, 16), "one position": (3, 3, 3)}
# Of an error that PyTorch does not have: rounding of what the backward computes again.
ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("c_out", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipelines_with_few_output_channels(pipeline, c_out, size, dtype, layout, device, poisoned):
    """The backward of the third pipeline with 1 to 3 output channels ended the process on CUDA: its launcher divided by
    the number of whole vectors of channels (SIGFPE, every dtype but float64)."""
    function, ref, transposed, rank = PIPELINES[pipeline]
    kernel = (3,) * rank
    for groups in (g for g in range(1, c_out + 1) if c_out % g == 0):
        x = torch.randn(2, 8, *SIZES[size][-rank:], device=device).to(dtype)
        if layout == "channels_last":
            x = x.contiguous(memory_format=last_format(x))
        shape = (8, c_out, *kernel) if transposed else (c_out, 8, *kernel)
        weight = (torch.randn(shape, device=device) * 0.2).to(dtype)
        bias, gamma, beta = torch.randn(3, c_out, device=device).to(dtype)
        args = [x, weight, bias, groups, gamma, beta]
        if size == "one position" and c_out == groups and not transposed:
            continue  # groups of one value: PyTorch refuses to normalize them in training
        right, torchs = ref(*upcast(args)).to(device), ref(*args)
        for backend in ("auto", "kgopt") if device == "cuda" else ("auto",):
            y = function(*args, backend=backend)
            if pipeline == "mean":  # a mean of terms as large as gamma and beta
                scale = float(gamma.abs().double().mean() + beta.abs().double().mean())
                error, theirs = ((v.double() - right).abs().max().item() for v in (y, torchs))
                assert error <= 2 * theirs + ROUNDING[dtype] * scale
            else:
                assert_as_good_as_torch(y, torchs, right)
        dout = torch.randn(right.shape, device=device, dtype=torch.float64)
        exact = gradients(ref, upcast(args), dout)
        least = 1e-2 * max(float(true.norm()) for true in exact)  # of those that are sums that cancel
        expected = gradients(ref, args, dout)
        for mine, theirs, true in zip(gradients(function, args, dout), expected, exact, strict=True):
            assert mine.dtype == theirs.dtype
            assert mine.shape == theirs.shape
            allowed = 3 * float((theirs - true).norm()) + ROUNDING[dtype] * max(float(true.norm()), least)
            assert float((mine - true).norm()) <= allowed, (groups, float((mine - true).norm()), allowed)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_third_pipelines_module_trains_with_three_channels(dtype, padding, device):
    """The report of it: forward, then backward() of the module, which killed the process on CUDA."""
    module = kgopt.nn.Conv2dGroupNormTanhHardswishResidualLogSumExp(
        8, 3, 3, 1, padding=padding, device=device, dtype=dtype
    )
    x = torch.randn(2, 8, 9, 16, device=device, dtype=dtype, requires_grad=True)
    module(x).sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (x, *module.parameters()))


@pytest.mark.parametrize("act", ["tanh", "silu", "relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradient_of_groups_of_few_values_cancels(dtype, act, device):
    """The CPU's backward summed a half type's gradient before it was rounded for the second step: a group of one value,
    whose gradient is 0, was left with the rounding times 1 / sqrt(eps), -0.2 instead of 0."""
    for shape, groups in (((2, 1, 1, 1), 1), ((3, 4, 1, 1), 4), ((2, 8, 1, 2), 8), ((2, 8, 1, 1), 4)):
        x, dy = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        bias = torch.randn(shape[1], device=device).to(dtype)
        gradients = []
        for norm, values in (
            (torch.ops.kgopt.group_norm, (x, bias)),
            (reference.group_norm_ref, (x, bias)),
            (reference.group_norm_ref, (x.double(), bias.double())),
        ):
            leaf = values[0].clone().requires_grad_()
            norm(leaf, groups, None, values[1], 1e-5, act).backward(dy.to(leaf.dtype))
            gradients.append(leaf.grad.double())
        mine, theirs, right = gradients
        assert float((mine - right).abs().max()) <= 2 * float((theirs - right).abs().max()) + 1e-2, shape
