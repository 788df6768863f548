"""NaN and infinities through activations and norms: they stand where PyTorch has them, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kgopt import functional, reference
from shapes import laid_out

ACTIVATIONS = [
    *(name for name in reference.ACTIVATIONS if name != "none"),
    *("leaky_relu(0.25)", "elu(0.5)", "celu(1.5)", "softplus(2,15)", "hardtanh(-2,3)", "threshold(0.5,20)"),
    *("clamp(-0.5,3)", "clamp(0.5,inf)", "softshrink(0.25)", "hardshrink(0.5)", "add(-0.5)", "mul(1.5)"),
]
# Whose gradient at NaN PyTorch's vector code for the CPU has in another way than its scalar code.
TWO_WAYS = ("hardtanh", "elu", "hardswish", "relu6", "shrink")
# Links that stop a gradient before and behind links whose slope is NaN at infinity.
CHAINS = [
    "relu+silu",
    "silu+relu",
    "silu+hardtanh",
    "hardtanh+silu",
    "hardswish+silu",
    "gelu+relu+tanh",
    "tanh+hardswish",
    "silu+clamp(-0.5,3)",
    "silu+threshold(0.5,20)",
    "softsign+hardshrink(0.5)",
]
VALUES = [math.nan, math.inf, -math.inf, 1e4, -1e4, 100.0, -100.0, 3.5, 1.0, -1.0, 0.5, -0.5, 0.0, -0.0, -3.0, -3.5]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def torchs(x, act):
    """PyTorch's, but for clamp, whose gradient at a bound was another one before 2.14."""
    return (reference.activation_ref if "clamp" in act else reference.torch_activation)(x, act)


def places(t):
    """0 for finite values, and 1, 2, 3 for NaN and the infinities."""
    return torch.isnan(t) + 2 * torch.isposinf(t) + 3 * torch.isneginf(t)


def arbitrary(act, x, device):
    """Where PyTorch's vector code and its scalar code for the CPU contradict each other, or have no NaN by luck."""
    nan, infinite = torch.isnan(x), torch.isposinf(x)
    first = act.split("+")[0]
    none = torch.zeros_like(nan)
    # hardtanh's and elu's gradient at NaN; gelu(inf), which MKL's way of doing it gives as inf * 1 or inf - inf.
    at_nan = nan if device == "cpu" and any(name in act for name in TWO_WAYS) else none
    at_infinity = infinite if device == "cpu" and "gelu" in first else none
    return at_nan | at_infinity


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", [*ACTIVATIONS, *CHAINS])
def test_activation_of_what_is_not_finite(act, dtype, device):
    """relu, hardtanh and hardswish multiplied a gradient by 0 where PyTorch puts 0: NaN and infinity came through."""
    gradients = [1.0, -2.0, math.nan, math.inf, -math.inf]
    x = torch.tensor(VALUES, dtype=dtype).repeat_interleave(64).repeat(len(gradients)).to(device)
    dy = torch.tensor(gradients, dtype=dtype).repeat_interleave(64 * len(VALUES)).to(device)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, right = functional.activation(ours, act), torchs(theirs, act)
    y.backward(dy)
    right.backward(dy)
    # A slope that is 0 in one of the two alone, times infinity, is NaN in that one: where it underflows, and where
    # PyTorch rounds what comes between two activations, or tanh's and sigmoid's result, of which it takes the slope.
    rounds = "+" in act or (dtype.itemsize < 4 and act in ("tanh", "sigmoid"))
    vague = arbitrary(act, x, device) | (dy.isinf() & (x.abs() >= (3 if rounds else 100)))
    if any(name in act for name in ("softsign", "tanhshrink")):
        vague |= dy.isinf()  # PyTorch subtracts one multiple of the gradient from another
    for mine, expected in ((y, right), (ours.grad, theirs.grad)):
        wrong = (places(mine) != places(expected)) & ~vague
        cases = {(a, b) for a, b in zip(x[wrong].tolist(), dy[wrong].tolist(), strict=True)}
        assert not wrong.any(), f"(x, dy) with other places than PyTorch's: {cases}"


# Every family of kernels of the backward on a GPU: shape, groups, layout.
NORMS = {
    "small": ((2, 8, 5, 5), 2, "contiguous"),
    "one value a channel": ((4, 12, 1, 1), 3, "contiguous"),
    "planes": ((3, 6, 33, 31), 6, "contiguous"),
    "teams": ((600, 32, 3, 3), 32, "contiguous"),
    "cluster": ((2, 64, 48, 48), 8, "contiguous"),
    "large cluster": ((2, 32, 24, 64, 64), 2, "contiguous"),
    "tiles": ((2, 16, 40, 128, 128), 2, "contiguous"),
    "small channels_last": ((2, 24, 6, 6), 4, "channels_last"),
    "slabs": ((64, 32, 24, 24), 16, "channels_last"),
    "rows": ((4, 32, 96, 96), 8, "channels_last"),
    "few rows": ((2, 64, 40, 64, 64), 8, "channels_last"),
    "columns": ((16, 128, 64, 64), 8, "channels_last"),
    "odd channels": ((2, 21, 40, 41), 3, "channels_last"),
    "odd rows": ((2, 12, 37, 41), 4, "contiguous"),
}
# On the CPU they are two layouts, and size makes no difference.
CPU_NORMS = ("small", "one value a channel", "planes", "small channels_last", "odd channels", "odd rows")
NORM_CASES = [
    pytest.param(name, device, marks=[pytest.mark.gpu] if device == "cuda" else [])
    for device, names in (("cpu", CPU_NORMS), ("cuda", NORMS))
    for name in names
]


def norm_gradients(norm, x, weight, bias, dy):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = norm(*leaves)
    y.backward(dy)
    return [y, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["pre_act", "act"])
@pytest.mark.parametrize("act", [*ACTIVATIONS, "silu+hardtanh"])
@pytest.mark.parametrize(("name", "device"), NORM_CASES)
def test_group_norm_of_what_is_not_finite(name, device, act, place, value, poisoned):
    """ReLU, then GroupNorm, of an input with one NaN: dx had NaN at every element of the group, where PyTorch has 0 for
    those that ReLU cut off: 36 of them, where PyTorch has 21."""
    shape, groups, layout = NORMS[name]
    dtypes = DTYPES if device == "cpu" else [torch.float32, torch.bfloat16]
    if "+" in act:  # half types are rounded between the two in PyTorch, perhaps to where the second one cuts off
        dtypes = [d for d in dtypes if d.itemsize >= 4]
    for dtype in dtypes:
        x = laid_out(torch.randn(shape, device=device).to(dtype), layout)
        at = (0, 1, *(size // 2 for size in shape[2:]))
        x[at] = value
        weight, bias = (torch.randn(shape[1], device=device).to(dtype) for _ in range(2))
        dy = laid_out(torch.randn(shape, device=device).to(dtype), layout)
        dy[(-1, -1, *(0 for _ in shape[2:]))] = math.nan  # comes to another group, and may be cut off there

        def ours(x, weight, bias):
            acts = {"act": "none", "pre_act": "none", place: act}
            return torch.ops.kgopt.group_norm_fwd(x, groups, weight, bias, 1e-5, **acts)[0]

        def theirs(x, weight, bias):
            if place == "pre_act":
                return F.group_norm(torchs(x, act), groups, weight, bias)
            return torchs(F.group_norm(x, groups, weight, bias), act)

        mine, expected = (norm_gradients(f, x, weight, bias, dy) for f in (ours, theirs))
        # The place itself, in PyTorch on the CPU: see `arbitrary`. Through `act` the group's values are all NaN there.
        vague = arbitrary(act, x if place == "pre_act" else expected[0].detach(), device)
        for what, a, b in zip(("y", "dx", "dweight", "dbias"), mine, expected, strict=True):
            differs = places(a) != places(b)
            if what in ("y", "dx"):
                differs &= ~vague
            elif place == "act" and vague.any():
                continue  # sums over such values
            assert not differs.any(), f"{what} of {dtype}: {int(differs.sum())} of {a.numel()} in other places"


def test_relu_before_group_norm_cuts_off_nan(device):
    """The report: one NaN, 36 NaNs in dx where PyTorch has 21."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, 3, 6, device=device)
    x[0, 0, 1, 1] = math.nan
    dx = []
    for norm in (
        lambda t: torch.ops.kgopt.group_norm_fwd(t, 2, pre_act="relu")[0],
        lambda t: F.group_norm(F.relu(t), 2),
    ):
        leaf = x.clone().requires_grad_()
        norm(leaf).sum().backward()
        dx.append(leaf.grad)
    assert torch.equal(dx[0].isnan(), dx[1].isnan())
    assert 0 < int(dx[1].isnan().sum()) < 36, "the group is all NaN or none, and shows nothing"
