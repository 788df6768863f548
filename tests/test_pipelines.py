"""The three fused pipelines against plain PyTorch, in every dtype and layout, with random affine parameters."""

from __future__ import annotations

import pytest
import torch

from kgopt import functional
from pipeline_cases import CASES, DTYPES, OPTIONS, PIPELINES, check, last_format, make, upcast
from tolerances import relative_error, round_tf32


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_values(pipeline, case, dtype, layout, device, poisoned):
    args, options = make(pipeline, case, dtype, device)
    if layout == "channels_last":
        args[0] = args[0].contiguous(memory_format=last_format(args[0]))
    backends = ["auto", "kgopt"] if device == "cuda" else ["auto"]
    for backend in backends:
        y = PIPELINES[pipeline][0](*args, **options, backend=backend)
        check(pipeline, y, args, options)
        if pipeline == "relu_norm":
            assert y.is_contiguous(memory_format=torch.contiguous_format if layout == "contiguous" else last_format(y))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_arguments(pipeline, option, device, poisoned):
    args, options = make(pipeline, "headline channels", torch.float32, device, options=OPTIONS[option])
    for backend in ["auto", "kgopt"] if device == "cuda" else ["auto"]:
        check(pipeline, PIPELINES[pipeline][0](*args, **options, backend=backend), args, options)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_conv_groups(pipeline, device):
    c_in, c_out, norm_groups = 6, 12, 3
    rank = PIPELINES[pipeline][3]
    x = torch.randn(2, c_in, *(6, 7, 8)[-rank:], device=device)
    kernel = (3,) * rank
    shape = (c_in, c_out // 2, *kernel) if PIPELINES[pipeline][2] else (c_out, c_in // 2, *kernel)
    weight, gamma, beta = (torch.randn(s, device=device) for s in (shape, (c_out,), (c_out,)))
    args = [x, weight, None, norm_groups, gamma, beta]
    exact = PIPELINES[pipeline][1](*[a.double() if isinstance(a, torch.Tensor) else a for a in args], groups=2)
    y = PIPELINES[pipeline][0](*args, groups=2)
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scale", "offset"), [(0.01, 0.0), (3.0, 0.0), (1.0, 100.0)])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_ill_conditioned(pipeline, scale, offset, device):
    args, _ = make(pipeline, "headline channels", torch.float32, device, scale, offset)
    check(pipeline, PIPELINES[pipeline][0](*args), args, {})


@pytest.mark.gpu
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_tf32(pipeline):
    """PyTorch takes TF32 for some of these convolutions and not for others: an ideal TF32 product is the yardstick."""
    torch.backends.cudnn.allow_tf32 = True
    args, _ = make(pipeline, "headline channels", torch.float32, "cuda")
    function, ref, *_ = PIPELINES[pipeline]
    exact = ref(*upcast(args)).cuda()
    ideal = ref(*upcast([round_tf32(args[0]), round_tf32(args[1]), *args[2:]])).cuda()
    error = relative_error(function(*args), exact)
    allowed = 2 * max(relative_error(ref(*args), exact), relative_error(ideal, exact)) + 1e-6
    assert error <= allowed, (error, allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["headline channels", "too wide for one block"])
@pytest.mark.parametrize("pipeline", ["mean", "logsumexp"])
def test_pipeline_in_inference_is_the_twins_result(pipeline, case, dtype, device, poisoned):
    """Inference returns no statistics, and its result in x's dtype in one step; the values are those of training."""
    args, _ = make(pipeline, case, dtype, device)
    y = PIPELINES[pipeline][0](*args)
    op = "conv3d_group_norm_mean" if pipeline == "mean" else "conv2d_group_norm_tanh_hardswish_residual_logsumexp"
    twin = getattr(torch.ops.kgopt, f"{op}_fwd")(*args)[0]
    assert y.dtype == dtype
    assert torch.equal(y, twin.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_of_a_convolution_with_a_large_bias(dtype, device, poisoned):
    """On CUDA the bias of a convolution by cuDNN is no pass over memory, but a shift of each channel's mean."""
    args, options = make("mean", "too wide for one block", dtype, device)
    args[2] = args[2] * 100
    check("mean", functional.conv3d_group_norm_mean(*args), args, options)


@pytest.mark.gpu
@pytest.mark.parametrize("c_out", [24, 50, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logsumexp_is_rounded_once(dtype, c_out, poisoned):
    """What is stored in half types is the fp32 result that a backward would keep, rounded."""
    x = torch.randn(3, 8, 37, 61, device="cuda").to(dtype)
    weight = (torch.randn(c_out, 8, 3, 3, device="cuda") * 0.3).to(dtype)
    bias, gamma, beta = (torch.randn(c_out, device="cuda").to(dtype) for _ in range(3))
    args = [x, weight, bias, 2, gamma, beta, [1, 1], [1, 1], [1, 1], 1, 1e-5]
    name = "conv2d_group_norm_tanh_hardswish_residual_logsumexp"
    kept, *_ = getattr(torch.ops.kgopt, f"{name}_fwd")(*args, backend="kgopt")
    y = getattr(torch.ops.kgopt, name)(*args, backend="kgopt")
    assert kept.dtype is torch.float32
    assert y.dtype is dtype
    assert torch.equal(y, kept.to(dtype))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_no_bias_no_affine(pipeline, device):
    args, _ = make(pipeline, "odd channels", torch.float32, device)
    args[2] = args[4] = args[5] = None
    exact = PIPELINES[pipeline][1](*upcast(args)).to(device)
    torch.testing.assert_close(PIPELINES[pipeline][0](*args).double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_strided_input(pipeline, device):
    args, _ = make(pipeline, "headline channels", torch.float32, device, batch=6)
    args[0] = args[0][::2, :, ..., 1:]
    check(pipeline, PIPELINES[pipeline][0](*args), args, {})


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_empty_batch(pipeline, device):
    args, _ = make(pipeline, "headline channels", torch.float32, device, batch=1)
    args[0] = args[0][:0]
    assert PIPELINES[pipeline][0](*args).shape == PIPELINES[pipeline][1](*args).shape


@pytest.mark.gpu
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_deterministic(pipeline):
    args, _ = make(pipeline, "headline channels", torch.float32, "cuda", batch=16)
    first = PIPELINES[pipeline][0](*args, backend="kgopt")
    assert all(torch.equal(PIPELINES[pipeline][0](*args, backend="kgopt"), first) for _ in range(3))
