"""Random shapes, layouts, dtypes, scales and offsets of the norms, the reductions and the pipelines."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kgopt import functional, reference
from tolerances import assert_as_good_as_torch

OPS = torch.ops.kgopt
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Derandomized: a failure is there again in the next run, and a green run stays green.
EFFORT = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def random_tensor(seed, shape, device, dtype, scale=1.0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale + offset).to(device=device, dtype=dtype)


def laid_out(x, layout):
    """x in a layout; the values stay."""
    if layout == "channels_last" and x.dim() in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "transposed" and x.dim() >= 3:
        return x.transpose(1, -1).contiguous().transpose(1, -1)
    if layout == "offset":
        flat = torch.empty(x.numel() + 1, device=x.device, dtype=x.dtype)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    if layout == "every other":
        wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], device=x.device, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


LAYOUTS = st.sampled_from(["contiguous", "channels_last", "transposed", "offset", "every other"])
SPATIAL = st.lists(st.integers(1, 9), min_size=0, max_size=3)


@EFFORT
@given(data=st.data())
def test_group_norm_random(data, device):
    groups, per_group = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    spatial = data.draw(SPATIAL)
    dtype, layout = data.draw(st.sampled_from(DTYPES)), data.draw(LAYOUTS)
    shape = (data.draw(st.integers(1, 3)), groups * per_group, *spatial)
    assume(math.prod(shape) > groups)  # torch.nn.functional refuses to normalize a single element
    scale, offset = data.draw(st.sampled_from([(1.0, 0.0), (0.01, 0.0), (3.0, 0.0), (1.0, 10.0)]))
    act = data.draw(st.sampled_from(["none", "silu", "relu", "tanh+hardswish", "gelu"]))
    seed = data.draw(st.integers(0, 2**16))
    x = laid_out(random_tensor(seed, shape, device, dtype, scale, offset), layout)
    weight = random_tensor(seed + 1, shape[1], device, dtype) if data.draw(st.booleans()) else None
    bias = random_tensor(seed + 2, shape[1], device, dtype) if data.draw(st.booleans()) else None
    y, mean, rstd = OPS.group_norm_fwd(x, groups, weight, bias, 1e-5, act, "none")
    exact_mean, exact_rstd = reference.group_stats_ref(x.double(), groups)
    torch.testing.assert_close(mean.double(), exact_mean, rtol=1e-5, atol=1e-5)
    if per_group * math.prod(spatial) > 1:
        torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-3, atol=1e-5)
    affine = (weight, bias)
    exact = reference.group_norm_ref(x.double(), groups, *(t if t is None else t.double() for t in affine), act=act)
    assert_as_good_as_torch(y, reference.group_norm_ref(x, groups, *affine, act=act), exact)
    assert torch.equal(functional.group_norm(x, groups, *affine, act=act), y)


@EFFORT
@given(data=st.data())
def test_reductions_random(data, device):
    shape = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    dims = [d - len(shape) if data.draw(st.booleans()) else d for d in dims]
    keepdim, dtype = data.draw(st.booleans()), data.draw(st.sampled_from(DTYPES))
    seed = data.draw(st.integers(0, 2**16))
    x = laid_out(
        random_tensor(seed, shape, device, dtype, 3.0, data.draw(st.sampled_from([0.0, 50.0]))), data.draw(LAYOUTS)
    )
    y, expected = functional.logsumexp(x, dims, keepdim), torch.logsumexp(x, dims, keepdim)
    assert_as_good_as_torch(y, expected, torch.logsumexp(x.double(), dims, keepdim))
    assert y.stride() == expected.contiguous().stride()
    y, exact = functional.mean(x, dims, keepdim), x.double().mean(dims, keepdim)
    assert (y.shape, y.dtype) == (exact.shape, dtype)
    size = float(x.double().abs().mean())
    assert float((y.double() - exact).abs().max()) <= 2 * torch.finfo(dtype).eps * max(size, float(exact.abs().max()))


@EFFORT
@given(data=st.data())
def test_activation_random(data, device):
    names = [n for n in (*reference.ACTIVATIONS, *reference.PARAMETRIZED) if n != "none"]
    act = "+".join(data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)))
    shape = data.draw(st.lists(st.integers(0, 9), min_size=0, max_size=5))
    dtype, seed = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 2**16))
    x = random_tensor(seed, shape, device, dtype, 3.0)
    x = laid_out(x, data.draw(LAYOUTS)) if x.dim() > 0 and x.numel() > 0 else x
    y = functional.activation(x, act)
    exact = reference.activation_ref(x.double(), act)
    # The chain in fp32 and rounded once: PyTorch's own chain rounds after each activation.
    expected = reference.activation_ref(x if dtype == torch.float64 else x.float(), act).to(dtype)
    if exact.abs().sum() > 0:
        assert_as_good_as_torch(y, expected, exact)
    assert y.shape == x.shape


@EFFORT
@given(data=st.data())
def test_gradients_random(data, device):
    """dx, dweight and dbias of group_norm in fp64, where they must be right to the last digits."""
    groups, per_group = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    spatial = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    act, pre_act = (data.draw(st.sampled_from(["none", "silu", "elu", "gelu+tanh"])) for _ in range(2))
    seed = data.draw(st.integers(0, 2**16))
    shape = (data.draw(st.integers(1, 3)), groups * per_group, *spatial)
    assume(math.prod(shape) > groups)
    layout = data.draw(LAYOUTS)
    x = laid_out(random_tensor(seed, shape, device, torch.float64, 2.0, 1.0), layout)
    weight, bias = (random_tensor(seed + i, shape[1], device, torch.float64) for i in (1, 2))
    dy = laid_out(random_tensor(seed + 3, shape, device, torch.float64), data.draw(LAYOUTS))
    grads = []
    for run in (
        lambda *a: OPS.group_norm_fwd(a[0], groups, a[1], a[2], 1e-3, act, pre_act)[0],
        lambda *a: reference.group_norm_ref(a[0], groups, a[1], a[2], 1e-3, act, pre_act),
    ):
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        grads.append(torch.autograd.grad(run(*leaves), leaves, dy))
    for mine, right in zip(*grads, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-8, atol=1e-8)


PIPELINES = {
    "mean": (functional.conv3d_group_norm_mean, reference.conv3d_group_norm_mean_ref, 3, False),
    "relu_norm": (functional.conv_transpose3d_relu_group_norm, reference.conv_transpose3d_relu_group_norm_ref, 3, True),
    "logsumexp": (
        functional.conv2d_group_norm_tanh_hardswish_residual_logsumexp,
        reference.conv2d_group_norm_tanh_hardswish_residual_logsumexp_ref,
        2,
        False,
    ),
}


@pytest.mark.parametrize("pipeline", PIPELINES)
@EFFORT
@given(data=st.data())
def test_pipeline_random(pipeline, data, device):
    function, ref, rank, transposed = PIPELINES[pipeline]

    def ints(low, high):
        return tuple(data.draw(st.integers(low, high)) for _ in range(rank))

    conv_groups = data.draw(st.sampled_from([1, 1, 1, 2]))
    norm_groups = data.draw(st.integers(1, 4))
    c_in = conv_groups * data.draw(st.integers(1, 9))
    c_out = math.lcm(conv_groups, norm_groups) * data.draw(st.integers(1, 6))
    kernel, stride, dilation = ints(1, 3), ints(1, 3), ints(1, 2)
    padding = tuple(data.draw(st.integers(0, d * (k - 1))) for d, k in zip(dilation, kernel, strict=True))
    # The smallest size that leaves at least two positions along a dim.
    size = tuple(
        d * (k - 1) + s + 1 + data.draw(st.integers(0, 6)) for d, k, s in zip(dilation, kernel, stride, strict=True)
    )
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": conv_groups}
    if transposed:
        options["output_padding"] = tuple(
            data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        )
    seed = data.draw(st.integers(0, 2**16))
    x = laid_out(
        random_tensor(seed, (data.draw(st.integers(1, 3)), c_in, *size), device, torch.float32), data.draw(LAYOUTS)
    )
    shape = (c_in, c_out // conv_groups, *kernel) if transposed else (c_out, c_in // conv_groups, *kernel)
    weight = random_tensor(seed + 1, shape, device, torch.float32, 0.5)
    bias, gamma, beta = (
        random_tensor(seed + i, c_out, device, torch.float32) if data.draw(st.booleans()) else None for i in (2, 3, 4)
    )
    args = (x, weight, bias, norm_groups, gamma, beta)
    # A group whose values are all zero after relu has rstd = 1 / sqrt(eps): 1e-2 keeps that from blowing up rounding.
    exact = ref(*(t.double() if isinstance(t, torch.Tensor) else t for t in args), **options, eps=1e-2)
    expected = ref(*args, **options, eps=1e-2)
    for backend in ["auto", "kgopt"] if device == "cuda" else ["auto"]:
        y = function(*args, **options, eps=1e-2, backend=backend)
        assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
        if pipeline == "mean":
            torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-5)
        else:
            # Of a few elements PyTorch's error is a single draw, of another size on every kind of processor.
            assert_as_good_as_torch(y, expected, exact, factor=2 if exact.numel() > 1024 else 4)


@EFFORT
@given(data=st.data())
def test_same_padding_random(data, device):
    """padding="same" with even kernels and dilations pads one side more, exactly as torch does."""
    rank = data.draw(st.sampled_from([2, 3]))
    kernel = tuple(data.draw(st.integers(1, 5)) for _ in range(rank))
    dilation = tuple(data.draw(st.integers(1, 3)) for _ in range(rank))
    size = tuple(data.draw(st.integers(1, 8)) for _ in range(rank))
    batch = data.draw(st.sampled_from([(), (2,)]))  # without a batch, too
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    x = torch.randint(-3, 4, (*batch, 2, *size), generator=generator).float()
    weight = torch.randint(-2, 3, (3, 2, *kernel), generator=generator).float()
    ours, theirs = (functional.conv2d, F.conv2d) if rank == 2 else (functional.conv3d, F.conv3d)
    exact = theirs(x, weight, padding="same", dilation=dilation)
    y = ours(x.to(device), weight.to(device), padding="same", dilation=dilation)
    assert torch.equal(y.cpu(), exact)
