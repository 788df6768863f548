"""PyTorch's own sample inputs and error inputs of every function that an op stands for.

An adapter calls the op as a user of the function would, or says which part of the sample no op has.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kgopt import functional
from tolerances import assert_as_good_as_torch

pytest.importorskip("expecttest", reason="PyTorch's test cases need it")
with pytest.MonkeyPatch.context() as patch:
    # Imported, they forbid the whole process to set torch.backends' flags, as these tests' fixtures do.
    patch.setattr(torch.backends, "disable_global_flags", lambda: None)
    from torch.testing._internal.common_methods_invocations import op_db

OPS = torch.ops.kgopt
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class NotInTheOpError(Exception):
    """The sample asks for what the op's schema does not have."""


def unless(wanted: bool, reason: str) -> None:
    if wanted:
        raise NotInTheOpError(reason)


def pair(value, rank):
    if isinstance(value, int):
        return [value] * rank
    values = list(value)
    return values * rank if len(values) == 1 else values


def batched(op, x, rank):
    """A sample without a batch as a batch of one."""
    if x.dim() == rank + 1:
        return op(x.unsqueeze(0)).squeeze(0)
    return op(x)


def conv(name, rank):
    def run(x, weight, bias=None, *args, **kwargs):
        # Lists of one value are PyTorch's way for all dims.
        kwargs = {k: v[0] if isinstance(v, (tuple, list)) and len(v) == 1 else v for k, v in kwargs.items()}
        return batched(lambda t: getattr(functional, name)(t, weight, bias, *args, **kwargs), x, rank)

    return run


def max_pool(rank):
    def run(x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
        unless(any(d != 1 for d in pair(dilation, rank)), "dilation")
        unless(ceil_mode, "ceil_mode")
        kernel = pair(kernel_size, rank)
        window = kernel, pair(stride, rank) if stride is not None else kernel, pair(padding, rank)
        return batched(lambda t: OPS.max_pool(t, *window), x, rank)

    return run


def activation(act):
    """Of one that has no parameters, beside whether it writes in place."""

    def run(x, inplace=False):
        return functional.activation(x, act)

    return run


def parametrized(name, **parameters):
    """Of one that has those parameters, with their defaults."""

    def run(x, *args, inplace=False, **kwargs):
        given = {**parameters, **dict(zip(parameters, args, strict=False)), **kwargs}
        assert list(given) == list(parameters)
        return functional.activation(x, f"{name}({','.join(repr(float(p)) for p in given.values())})")

    return run


def gelu(x, approximate="none"):
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    return functional.activation(x, names.get(approximate, approximate))


def mean(x, dim=None, keepdim=False, *, dtype=None):
    unless(dtype is not None and x.is_floating_point(), "dtype")
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return functional.mean(x, dims or None, keepdim)


def instance_norm(
    x, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, *, eps=1e-5, **_
):
    unless(not use_input_stats, "running statistics")  # which are no part of the result otherwise
    return functional.group_norm(x, x.shape[1], weight, bias, eps)


def pad(x, pads, mode="constant", value=None):
    unless(len(pads) not in (4, 6), "pads of one dim")
    unless(min(pads) < 0, "negative pads")
    return batched(lambda t: OPS.pad_replicate(t, list(pads)), x, len(pads) // 2)


def upsample(mode, ours):
    """The samples' inputs at twice their size: the samples' own sizes and factors are no op's."""

    def run(x, *args, **kwargs):
        unless(x.dim() == 3, "one spatial dim")
        return ours(x) if ours else F.interpolate(x, scale_factor=2, mode=mode)

    return run


def logsumexp(x, dim, keepdim=False):
    return functional.logsumexp(x, [dim] if isinstance(dim, int) else list(dim), keepdim)


# Function (and variant): the adapter, the largest share of samples that no op takes, and what it is compared with where
# that is not the function as the sample has it.
ADAPTERS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("nn.functional.group_norm", ""): (functional.group_norm, 0.0),
    ("nn.functional.instance_norm", ""): (instance_norm, 0.25),
    ("nn.functional.conv2d", ""): (conv("conv2d", 2), 0.0),
    ("nn.functional.conv3d", ""): (conv("conv3d", 3), 0.0),
    ("nn.functional.conv_transpose2d", ""): (conv("conv_transpose2d", 2), 0.0),
    ("nn.functional.conv_transpose3d", ""): (conv("conv_transpose3d", 3), 0.0),
    ("logsumexp", ""): (logsumexp, 0.0),
    ("mean", ""): (mean, 0.1),
    ("nn.functional.relu", ""): (activation("relu"), 0.0),
    ("nn.functional.leaky_relu", ""): (parametrized("leaky_relu", negative_slope=0.01), 0.0),
    ("nn.functional.silu", ""): (activation("silu"), 0.0),
    ("nn.functional.gelu", ""): (gelu, 0.0),
    ("sigmoid", ""): (activation("sigmoid"), 0.0),
    ("tanh", ""): (activation("tanh"), 0.0),
    ("nn.functional.hardswish", ""): (activation("hardswish"), 0.0),
    ("nn.functional.hardtanh", ""): (parametrized("hardtanh", min_val=-1, max_val=1), 0.0),
    ("nn.functional.elu", ""): (parametrized("elu", alpha=1), 0.0),
    ("nn.functional.mish", ""): (activation("mish"), 0.0),
    ("nn.functional.softplus", ""): (parametrized("softplus", beta=1, threshold=20), 0.0),
    ("nn.functional.relu6", ""): (activation("relu6"), 0.0),
    ("nn.functional.selu", ""): (activation("selu"), 0.0),
    ("nn.functional.celu", ""): (parametrized("celu", alpha=1), 0.0),
    ("nn.functional.threshold", ""): (parametrized("threshold", threshold=None, value=None), 0.0),
    ("nn.functional.hardsigmoid", ""): (activation("hardsigmoid"), 0.0, lambda x, inplace=False: F.relu6(x + 3) / 6),
    ("nn.functional.logsigmoid", ""): (activation("logsigmoid"), 0.0),
    ("nn.functional.softsign", ""): (activation("softsign"), 0.0),
    ("nn.functional.tanhshrink", ""): (activation("tanhshrink"), 0.0),
    ("nn.functional.softshrink", ""): (parametrized("softshrink", lambd=0.5), 0.0),
    ("nn.functional.hardshrink", ""): (parametrized("hardshrink", lambd=0.5), 0.0),
    # Two dilations of three, and ceil_mode, in 1440 and 576 samples.
    ("nn.functional.max_pool2d", ""): (max_pool(2), 0.84),
    ("nn.functional.max_pool3d", ""): (max_pool(3), 0.84),
    ("nn.functional.interpolate", "nearest"): (
        upsample("nearest", lambda x: OPS.upsample_nearest(x, [2] * (x.dim() - 2))),
        0.3,
        upsample("nearest", None),
    ),
    ("nn.functional.interpolate", "bilinear"): (
        upsample("bilinear", lambda x: OPS.upsample_linear(x, None)),
        0.0,
        upsample("bilinear", None),
    ),
    ("nn.functional.interpolate", "trilinear"): (
        upsample("trilinear", lambda x: OPS.upsample_linear(x, None)),
        0.0,
        upsample("trilinear", None),
    ),
    ("nn.functional.pad", "replicate"): (pad, 0.6),  # most are of one dim
}
INFOS = {(o.name, o.variant_test_name): o for o in op_db if (o.name, o.variant_test_name) in ADAPTERS}
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)


def test_every_function_has_cases():
    """A renamed function would leave its op untested, silently."""
    assert set(INFOS) == set(ADAPTERS)


def first(value):
    return value[0] if isinstance(value, tuple) else value


def leaves_of(sample, dtype):
    """The sample's arguments as leaves of the dtype, and those that take a gradient."""
    leaves = []

    def leaf(t):
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            return t
        copy = t.detach().to(dtype).clone().requires_grad_(t.requires_grad)
        leaves.append(copy)
        return copy

    args = [leaf(a) for a in (sample.input, *sample.args)]
    kwargs = {k: leaf(v) for k, v in sample.kwargs.items()}
    return args, kwargs, [t for t in leaves if t.requires_grad]


def outputs(function, sample, dtype):
    """The result and the gradients of what takes one, from the same values every time."""
    args, kwargs, leaves = leaves_of(sample, dtype)
    y = first(function(*args, **kwargs))
    if not y.requires_grad:
        return [y]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(y)
    return [y, *torch.autograd.grad(y, leaves, dy, allow_unused=True)]


# In float64, where PyTorch's CUDA kernel is no yardstick: hardswish multiplies by a float32 of 1 / 6.
IN_FLOAT64 = {("nn.functional.hardswish", ""): lambda x: x * F.relu6(x + 3) / 6}


def compare(mine, theirs, right):
    if theirs is None:
        assert mine is None
        return
    assert mine.shape == theirs.shape
    assert torch.equal(mine.isnan(), theirs.isnan()), "NaN in other places than PyTorch's"
    finite = theirs.isfinite() & right.isfinite()
    assert torch.equal(mine[~finite & ~theirs.isnan()], theirs[~finite & ~theirs.isnan()])
    if theirs.dtype == torch.float64:  # no yardstick is better, and gradients of few values cancel
        torch.testing.assert_close(mine[finite], theirs[finite], rtol=1e-9, atol=1e-10)
    elif finite.any():
        assert_as_good_as_torch(mine[finite], theirs[finite], right[finite])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ADAPTERS, ids="-".join)
def test_samples(name, dtype, device):
    """Every sample of PyTorch's passes, forward and gradients."""
    info, (ours, most_skipped, *instead) = INFOS[name], ADAPTERS[name]
    torchs = instead[0] if instead else info.op
    if dtype == torch.float64:
        torchs = IN_FLOAT64.get(name, torchs)
    if dtype not in info.supported_dtypes(device):
        pytest.skip(f"PyTorch has no {dtype} there")
    # oneDNN's gradients of half convolutions differ from call to call, here and there by far.
    gradients = not ("conv" in name[0] and device == "cpu" and dtype.itemsize == 2)
    skipped, count = collections.Counter(), 0
    for sample in info.sample_inputs(device, dtype, requires_grad=gradients):
        count += 1
        described = f"{name[0]} of {sample.summary() if hasattr(sample, 'summary') else sample}"
        try:
            mine = outputs(ours, sample, dtype)
        except NotInTheOpError as reason:
            skipped[str(reason)] += 1
            continue
        theirs, right = outputs(torchs, sample, dtype), outputs(torchs, sample, torch.float64)
        try:
            for a, b, c in zip(mine, theirs, right, strict=True):
                compare(a, b, c)
        except AssertionError as error:
            raise AssertionError(f"{described}: {error}") from error
    assert count > 0
    assert sum(skipped.values()) <= most_skipped * count, f"{dict(skipped)} of {count} samples"


@pytest.mark.parametrize(
    "name", [n for n in ADAPTERS if n in INFOS and INFOS[n].error_inputs_func and "hardtanh" not in n[0]], ids="-".join
)
def test_error_inputs(name, device):
    """What PyTorch refuses is refused, with an exception of a sensible type."""
    info, ours = INFOS[name], ADAPTERS[name][0]
    tried = 0
    for error in info.error_inputs(device):
        sample = error.sample_input
        try:
            with pytest.raises(REFUSALS):
                ours(sample.input, *sample.args, **sample.kwargs)
            tried += 1
        except NotInTheOpError:
            continue
        except pytest.fail.Exception:
            pytest.fail(f"{name[0]} took what PyTorch refuses ({error.error_regex}): {sample}")
    assert tried > 0


def test_no_function_is_left_out():
    """Of the ops that stand for a function of PyTorch's: a new one needs an adapter here."""
    stands_for = {
        "conv2d": "nn.functional.conv2d",
        "conv3d": "nn.functional.conv3d",
        "conv_transpose2d": "nn.functional.conv_transpose2d",
        "conv_transpose3d": "nn.functional.conv_transpose3d",
        "group_norm": "nn.functional.group_norm",
        "logsumexp": "logsumexp",
        "mean": "mean",
        "max_pool": "nn.functional.max_pool2d",
        "pad_replicate": "nn.functional.pad",
        "upsample_nearest": "nn.functional.interpolate",
        "upsample_linear": "nn.functional.interpolate",
        "activation": "nn.functional.silu",
    }
    assert set(stands_for.values()) <= {name for name, _ in ADAPTERS}
    assert all(hasattr(OPS, op) for op in stands_for)
