"""torch.autocast: the dtypes of the equivalent PyTorch program, on the CPU and on CUDA, and its accuracy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kgopt import functional, reference
from tolerances import assert_as_good_as_torch, relative_error

HALVES = [torch.bfloat16, torch.float16]
NORM = {"num_groups": 3, "eps": 1e-3}


def tensors(device, dtype=torch.float32):
    """The inputs of every case: 2D and 3D images, weights, per-channel parameters."""
    generator = torch.Generator().manual_seed(7)

    def rand(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(device=device, dtype=dtype)

    return {
        "x2": rand(2, 4, 9, 10),
        "x3": rand(2, 4, 5, 6, 7),
        "c": rand(2, 6, 9, 10),
        "w2": rand(6, 4, 3, 3, scale=0.3),
        "w3": rand(6, 4, 3, 3, 3, scale=0.2),
        "wt2": rand(4, 6, 3, 3, scale=0.3),
        "wt3": rand(4, 6, 3, 3, 3, scale=0.2),
        "b": rand(6),
        "w1": rand(5, 6, 3, 3, scale=0.3),
        "gamma": rand(6),
        "beta": rand(6),
    }


# name: (kgopt, the same in PyTorch), both of the tensors above
CASES = {
    "conv2d": (
        lambda t: functional.conv2d(t["x2"], t["w2"], t["b"]),
        lambda t: F.conv2d(t["x2"], t["w2"], t["b"]),
    ),
    "conv3d": (
        lambda t: functional.conv3d(t["x3"], t["w3"], None, 1, 1),
        lambda t: F.conv3d(t["x3"], t["w3"], None, 1, 1),
    ),
    "conv_transpose2d": (
        lambda t: functional.conv_transpose2d(t["x2"], t["wt2"], t["b"], 2),
        lambda t: F.conv_transpose2d(t["x2"], t["wt2"], t["b"], 2),
    ),
    "conv_transpose3d": (
        lambda t: functional.conv_transpose3d(t["x3"], t["wt3"]),
        lambda t: F.conv_transpose3d(t["x3"], t["wt3"]),
    ),
    "group_norm": (
        lambda t: functional.group_norm(t["c"], 3, t["gamma"], t["beta"]),
        lambda t: F.group_norm(t["c"], 3, t["gamma"], t["beta"]),
    ),
    "group_norm silu": (
        lambda t: functional.group_norm(t["c"], 3, t["gamma"], t["beta"], act="silu"),
        lambda t: F.silu(F.group_norm(t["c"], 3, t["gamma"], t["beta"])),
    ),
    "group_norm after a conv": (
        lambda t: functional.group_norm(functional.conv2d(t["x2"], t["w2"]), 3, t["gamma"], t["beta"]),
        lambda t: F.group_norm(F.conv2d(t["x2"], t["w2"]), 3, t["gamma"], t["beta"]),
    ),
    "group_norm_conv": (
        lambda t: functional.group_norm_conv(t["c"], 3, t["gamma"], t["beta"], t["w1"], padding=1, gn_act="silu"),
        lambda t: F.conv2d(F.silu(F.group_norm(t["c"], 3, t["gamma"], t["beta"])), t["w1"], padding=1),
    ),
    "group_norm_conv after a conv": (
        lambda t: functional.group_norm_conv(
            functional.conv2d(t["x2"], t["w2"]), 3, t["gamma"], t["beta"], t["w1"], gn_act="relu"
        ),
        lambda t: F.conv2d(F.relu(F.group_norm(F.conv2d(t["x2"], t["w2"]), 3, t["gamma"], t["beta"])), t["w1"]),
    ),
    "group_norm_mean after a conv": (
        lambda t: functional.group_norm_mean(functional.conv2d(t["x2"], t["w2"]), 3, t["gamma"], t["beta"]),
        lambda t: F.group_norm(F.conv2d(t["x2"], t["w2"]), 3, t["gamma"], t["beta"]).mean((1, 2, 3)),
    ),
    "logsumexp after a conv": (
        lambda t: functional.logsumexp(functional.conv2d(t["x2"], t["w2"]), 1),
        lambda t: torch.logsumexp(F.conv2d(t["x2"], t["w2"]), 1),
    ),
    "mean after a conv": (
        lambda t: functional.mean(functional.conv2d(t["x2"], t["w2"]), [2, 3]),
        lambda t: F.conv2d(t["x2"], t["w2"]).mean([2, 3]),
    ),
    "gelu after a conv": (
        lambda t: functional.activation(functional.conv2d(t["x2"], t["w2"]), "gelu"),
        lambda t: F.gelu(F.conv2d(t["x2"], t["w2"])),
    ),
    "softplus after a conv": (
        lambda t: functional.activation(functional.conv2d(t["x2"], t["w2"]), "softplus"),
        lambda t: F.softplus(F.conv2d(t["x2"], t["w2"])),
    ),
    "conv3d_group_norm_mean": (
        lambda t: functional.conv3d_group_norm_mean(t["x3"], t["w3"], t["b"], 3, t["gamma"], t["beta"]),
        lambda t: F.group_norm(F.conv3d(t["x3"], t["w3"], t["b"]), 3, t["gamma"], t["beta"]).mean((1, 2, 3, 4)),
    ),
    "conv_transpose3d_relu_group_norm": (
        lambda t: functional.conv_transpose3d_relu_group_norm(t["x3"], t["wt3"], None, 3, t["gamma"], t["beta"]),
        lambda t: F.group_norm(F.relu(F.conv_transpose3d(t["x3"], t["wt3"])), 3, t["gamma"], t["beta"]),
    ),
    "conv2d_..._logsumexp": (
        lambda t: functional.conv2d_group_norm_tanh_hardswish_residual_logsumexp(
            t["x2"], t["w2"], t["b"], 3, t["gamma"], t["beta"]
        ),
        lambda t: reference.conv2d_group_norm_tanh_hardswish_residual_logsumexp_ref(
            t["x2"], t["w2"], t["b"], 3, t["gamma"], t["beta"]
        ),
    ),
}


def upcast(values):
    return {k: v.double() for k, v in values.items()}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_autocast_dtype_and_values(name, dtype, device):
    ours, theirs = CASES[name]
    inputs = tensors(device)
    with torch.autocast(device, dtype):
        y, expected = ours(inputs), theirs(inputs)
    assert y.dtype == expected.dtype
    exact = theirs(upcast(inputs))
    if "mean" in name and "group_norm" in name:
        # Terms of the size of gamma and beta that cancel: PyTorch's own luck is no yardstick for what is left.
        size = float((inputs["gamma"].abs() + inputs["beta"].abs()).mean())
        assert (
            float((y - exact).abs().max()) <= 2 * float((expected - exact).abs().max()) + torch.finfo(dtype).eps * size
        )
    else:
        # The halves' rounding of the convolution's inputs dominates, also where the result is fp32.
        assert relative_error(y, exact) <= 2 * relative_error(expected, exact) + torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("name", CASES)
def test_autocast_leaves_double_alone(name, device):
    ours, theirs = CASES[name]
    inputs = tensors(device, torch.float64)
    with torch.autocast(device, torch.bfloat16):
        y = ours(inputs)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, theirs(inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_autocast_disabled_inside(name, device):
    """enabled=False inside an autocast region is how people keep one layer in fp32."""
    ours, theirs = CASES[name]
    inputs = tensors(device)
    with torch.autocast(device, torch.bfloat16), torch.autocast(device, enabled=False):
        y, expected = ours(inputs), theirs(inputs)
    assert y.dtype == torch.float32
    if "mean" not in name:
        assert_as_good_as_torch(y, expected, theirs(upcast(inputs)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", [n for n in CASES if "conv" in n])
def test_autocast_gradients(name, dtype, device):
    """Gradients reach fp32 parameters in fp32, and are as good as PyTorch's under the same autocast."""
    ours, theirs = CASES[name]

    def gradients(run, inputs, enabled):
        leaves = {k: v.clone().requires_grad_() for k, v in inputs.items()}
        with torch.autocast(device, dtype, enabled=enabled):
            y = run(leaves)
        torch.manual_seed(3)
        y.backward(torch.randn(y.shape, dtype=torch.float64).to(y))
        return {k: v.grad for k, v in leaves.items() if v.grad is not None}

    inputs = tensors(device)
    exact = gradients(theirs, upcast(inputs), False)
    expected = gradients(theirs, inputs, True)
    got = gradients(ours, inputs, True)
    assert got.keys() == expected.keys()
    for key, grad in got.items():
        assert grad.dtype == torch.float32
        # Where a norm follows, the bias gradient is what is left of terms that cancel; then nothing but size counts.
        scale = exact[key].norm().clamp_min(1e-2)
        error, torchs = (float((g - exact[key]).norm() / scale) for g in (grad, expected[key]))
        assert error <= 2 * torchs + 4 * torch.finfo(dtype).eps, (key, error, torchs)
