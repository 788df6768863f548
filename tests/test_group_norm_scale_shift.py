"""act(GroupNorm(x) * (1 + scale) + shift + residual), with scale and shift by sample: values, gradients, bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager

import kgopt.nn
from kgopt import functional, reference
from norm_gradients import check_both_ways
from shapes import DTYPES, LAYOUTS, NORM_SHAPES, laid_out, make, norm_shape
from test_group_norm_add import FAMILIES
from tolerances import assert_as_good_as_torch

NAMES = [n for n in NORM_SHAPES if n != "one element a group"]


def plain(x, groups, weight=None, bias=None, scale=None, shift=None, act="none", residual=None):
    return reference.group_norm_scale_shift_ref(x, groups, weight, bias, scale, shift, 1e-5, act, residual)


def check(shape, groups, dtype, act, layout, device, rows=None, residual=False):
    x, weight, bias = make(shape, dtype, device, layout)
    rows = shape[0] if rows is None else rows
    scale, shift = torch.randn(2, rows, shape[1], device=device).to(dtype)
    tensors = [x, weight, bias, scale, shift]
    if residual:
        tensors.append(laid_out(torch.randn(shape, device=device).to(dtype), layout))
    doubles = [t.double() for t in tensors]

    def ours(x, w, b, s, t, r=None):
        return functional.group_norm(x, groups, w, b, 1e-5, act, r, scale=s, shift=t)

    def torchs(x, w, b, s, t, r=None):
        return plain(x, groups, w, b, s, t, act, r)

    z = plain(doubles[0], groups, *doubles[1:5], residual=doubles[5] if residual else None)
    # Where rounding decides on which side of a kink a value lies, nothing comes back.
    near = z.abs() < (0.1 if dtype.itemsize == 2 else 1e-3)
    dy = laid_out(torch.randn(shape, device=device).masked_fill(near, 0).to(dtype), layout)
    mine = check_both_ways(ours, torchs, dy, *tensors)
    assert mine[0].stride() == x.stride()


@pytest.mark.parametrize("rows", ["one a sample", "one for all"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name, dtype, layout, rows, device, poisoned):
    shape, groups = NORM_SHAPES[name]
    shape = norm_shape(shape, device, 2**18)
    residual = rows == "one a sample" and "2d" in name
    check(shape, groups, dtype, "silu", layout, device, None if rows == "one a sample" else 1, residual)


@pytest.mark.parametrize("act", ["none", "relu", "leaky_relu(0.1)", "gelu", "tanh+hardswish"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(act, dtype, device, poisoned):
    check((3, 12, 7, 9), 4, dtype, act, "contiguous", device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, layout, dtype, poisoned):
    check(*FAMILIES[name], dtype, "silu", layout, "cuda")


@pytest.mark.parametrize("given", ["scale", "shift", "no affine", "no affine, scale", "no affine, shift", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_left_out(given, dtype, device):
    x, weight, bias = make((3, 8, 5, 7), dtype, device)
    scale, shift = torch.randn(2, 3, 8, device=device).to(dtype)
    if "no affine" in given:
        weight = bias = None
    if given == "no bias":
        bias = None
    scale = None if given.endswith("shift") else scale
    shift = None if given.endswith("scale") else shift
    arguments = [x, weight, bias, scale, shift]
    tensors = [t for t in arguments if t is not None]

    def call(function):
        def run(*some):
            some = list(some)
            x, *rest = [None if t is None else some.pop(0) for t in arguments]
            return function(x, *rest)

        return run

    ours = call(lambda x, w, b, s, t: functional.group_norm(x, 2, w, b, 1e-5, "silu", scale=s, shift=t))
    torchs = call(lambda x, w, b, s, t: plain(x, 2, w, b, s, t, "silu"))
    dy = torch.randn(x.shape, device=device).to(dtype)
    check_both_ways(ours, torchs, dy, *tensors)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_other_dtypes(low, device):
    """x in half precision beside parameters in float32, and the other way round."""
    x, weight, bias = make((3, 8, 5, 7), torch.float32, device)
    scale, shift = torch.randn(2, 3, 8, device=device)
    exact = plain(x.to(low).double(), 2, *(t.double() for t in (weight, bias, scale, shift)), "silu")
    y = functional.group_norm(x.to(low), 2, weight, bias, act="silu", scale=scale, shift=shift)
    assert y.dtype is low
    assert_as_good_as_torch(y, plain(x.to(low).float(), 2, weight, bias, scale, shift, "silu").to(low), exact)
    halves = scale.to(low), shift.to(low)
    y = functional.group_norm(x, 2, weight, bias, act="silu", scale=halves[0], shift=halves[1])
    assert y.dtype is torch.float32
    exact = plain(x.double(), 2, *(t.double() for t in (weight, bias, *halves)), "silu")
    assert_as_good_as_torch(y, plain(x, 2, weight, bias, *(t.float() for t in halves), "silu"), exact)


@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("other", [torch.float16, torch.float64, torch.complex64, torch.int64], ids=str)
def test_dtypes_that_the_norm_refuses(x, rows, other, device):
    """Folding converts weight and bias, behind the op's back."""
    if x is other:
        other = torch.float32
    given = torch.randn(3, 8, 5, device=device).to(x)
    weight, bias = torch.randn(2, 8, device=device).to(x)
    scale = torch.randn(rows, 8, device=device)
    for w, b in ((weight.to(other), None), (None, bias.to(other)), (weight, bias.to(other))):
        with pytest.raises(RuntimeError, match="dtype"):
            functional.group_norm(given, 2, w, b, scale=scale)
        with pytest.raises(RuntimeError, match="dtype"):
            functional.group_norm(given, 2, w, b, shift=scale)
    with pytest.raises(RuntimeError, match="dtype"):
        functional.group_norm(given, 2, scale=scale.to(torch.complex64))
    with pytest.raises(RuntimeError, match="dtype"):
        functional.group_norm(
            given.transpose(0, 1).contiguous().transpose(0, 1), 2, scale=scale, residual=given.to(other)
        )


@pytest.mark.gpu
def test_autocast_takes_parameters_of_any_floating_dtype():
    """Norms are in fp32 there, whatever they are given."""
    x, scale = torch.randn(3, 8, 5, device="cuda"), torch.randn(3, 8, device="cuda")
    weight, bias = torch.randn(2, 8, device="cuda").bfloat16()
    with torch.autocast("cuda"):
        y = functional.group_norm(x, 2, weight, bias, scale=scale)
        with pytest.raises(RuntimeError, match="dtype"):
            functional.group_norm(x, 2, weight.to(torch.complex64), scale=scale)
    torch.testing.assert_close(y, plain(x, 2, weight.float(), bias.float(), scale))


def test_large_values_in_half_precision_do_not_overflow(device):
    """The product of weight and scale, 1.2e5, is no number of float16; what it makes of small values is."""
    x = torch.randn(2, 4, 8, 8, device=device, dtype=torch.float16)
    x[..., 0, 0] = 300  # so that the other values of a group are small
    weight = torch.full([4], 60.0, device=device, dtype=torch.float16)
    scale = torch.full([2, 4], 2000.0, device=device, dtype=torch.float16)
    y = functional.group_norm(x, 2, weight, scale=scale)
    exact = plain(x.double(), 2, weight.double(), None, scale.double())
    finite = exact.abs() < 6e4
    assert finite.any()
    torch.testing.assert_close(y.double()[finite], exact[finite], rtol=2e-3, atol=1)


@pytest.mark.parametrize("rows", [2, 1])
def test_derivatives_to_the_second(rows, device):
    x, residual = torch.randn(2, 2, 4, 3, dtype=torch.float64, device=device)
    weight, bias = torch.randn(2, 4, dtype=torch.float64, device=device)
    scale, shift = torch.randn(2, rows, 4, dtype=torch.float64, device=device)
    given = [t.requires_grad_() for t in (x[..., None], weight, bias, scale, shift, residual[..., None])]
    given = [t.detach().requires_grad_() for t in given]

    def run(x, w, b, s, t, r):
        return functional.group_norm(x, 2, w, b, 1e-5, "silu", r, scale=s, shift=t)

    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradcheck(run, given, check_forward_ad=True, check_backward_ad=False)
    assert torch.autograd.gradgradcheck(run, given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [1, 8])
def test_prelu(kind, layout, device):
    x, weight, bias = make((3, 8, 5, 7), torch.float32, device, layout)
    scale, shift = torch.randn(2, 3, 8, device=device)
    slope = torch.randn(kind, device=device)

    def ours(x, s, t, a):
        return functional.group_norm(x, 2, weight, bias, 1e-5, "prelu", None, a, s, t)

    def torchs(x, s, t, a):
        return F.prelu(plain(x, 2, weight.to(x.dtype), bias.to(x.dtype), s, t), a)

    tensors = (x, scale, shift, slope)
    dy = torch.randn(x.shape, device=device)
    check_both_ways(ours, torchs, dy, *tensors)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_trailing_dims_and_sizes_of_the_batch(n, device):
    x = torch.randn(n, 8, 5, 7, device=device)
    scale, shift = torch.randn(2, n, 8, 1, 1, device=device)
    expected = plain(x, 4, scale=scale, shift=shift, act="relu")
    y = functional.group_norm(x, 4, act="relu", scale=scale, shift=shift)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(functional.group_norm(x, 4, act="relu", scale=scale[..., 0], shift=shift), expected)


def test_sliced_and_expanded(device):
    """What chunk and expand give; x misaligned, and not contiguous at all."""
    wide = torch.randn(3 * 8 * 35 + 1, device=device)
    x = wide[1:].view(3, 8, 5, 7)
    scale, shift = torch.randn(3, 16, device=device).chunk(2, dim=1)
    for given in (x, x.transpose(2, 3), x[:, :, ::2]):
        y = functional.group_norm(given, 4, scale=scale, shift=shift, act="silu")
        torch.testing.assert_close(y, plain(given, 4, None, None, scale, shift, "silu"))
    one = torch.randn(3, 1, device=device).expand(3, 8)
    torch.testing.assert_close(functional.group_norm(x, 4, scale=one), plain(x, 4, scale=one))


@pytest.mark.parametrize("shape", [(2, 8, 1, 5), (3, 8, 5, 1), (2, 6, 1, 4, 1)], ids=str)
def test_channels_last_stays_beside_a_transposed_scale(shape, device):
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = torch.randn(shape, device=device).to(memory_format=last)
    scale, shift = (torch.randn(shape[1], shape[0], device=device).t() for _ in range(2))
    y = functional.group_norm(x, 2, act="mul(1.7)+mish", scale=scale, shift=shift)
    assert y.is_contiguous(memory_format=last)


def test_nan_comes_through(device):
    x, scale = torch.randn(2, 4, 5, device=device), torch.randn(2, 4, device=device)
    scale[1, 2] = float("nan")
    y = functional.group_norm(x, 2, scale=scale, shift=scale)
    assert torch.equal(y.isnan(), plain(x, 2, scale=scale, shift=scale).isnan())


def test_module(device):
    norm = kgopt.nn.GroupNorm(4, 8, act="silu").to(device)
    assert set(norm.state_dict()) == {"weight", "bias"}
    x, residual = torch.randn(2, 2, 8, 5, 6, device=device)
    scale, shift = torch.randn(2, 2, 8, device=device)
    expected = plain(x, 4, norm.weight, norm.bias, scale, shift, "silu", residual)
    torch.testing.assert_close(norm(x, residual, scale, shift), expected)
    torch.testing.assert_close(norm(x, shift=shift), plain(x, 4, norm.weight, norm.bias, None, shift, "silu"))


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_scripted():
    norm, x = kgopt.nn.GroupNorm(4, 8, act="silu"), torch.randn(2, 8, 5, 6)
    scale, shift = torch.randn(2, 2, 8)
    scripted = torch.jit.script(norm)
    assert torch.equal(scripted(x, None, scale, shift), norm(x, None, scale, shift))
    assert torch.equal(scripted(x), norm(x))


def test_compiled_with_dynamic_sizes(device):
    def run(x, s, t, w):
        return functional.group_norm(x, 4, w, w, act="silu", scale=s, shift=t)

    graphs = set()

    def backend(graph, given):
        graphs.add(n)
        return aot_eager(graph, given)

    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)
    for n, size in ((2, 5), (3, 7), (4, 6)):
        tensors = [torch.randn(shape) for shape in ((n, 8, size, 6), (n, 8), (n, 8), (8,))]
        tensors = [t.to(device).requires_grad_() for t in tensors]
        for mine, right in zip(
            *(torch.autograd.grad(f(*tensors).square().sum(), tensors) for f in (compiled, run)), strict=True
        ):
            torch.testing.assert_close(mine, right)
    assert graphs == {2}  # which serves every number of samples


def test_vmap(device):
    x, (scale, shift) = torch.randn(3, 2, 8, 5, device=device), torch.randn(2, 3, 2, 8, device=device)

    def run(x, s, t):
        return functional.group_norm(x, 4, act="silu", scale=s, shift=t)

    expected = torch.stack([run(*each) for each in zip(x, scale, shift, strict=True)])
    torch.testing.assert_close(torch.func.vmap(run)(x, scale, shift), expected)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(x_dtype, device):
    x, (scale, shift) = torch.randn(2, 8, 5, 6, device=device).to(x_dtype), torch.randn(2, 2, 8, device=device)
    low = scale.bfloat16(), shift.bfloat16()
    with torch.autocast(device, torch.bfloat16):
        y = functional.group_norm(x, 4, act="silu", scale=low[0], shift=low[1])
        expected = plain(x, 4, None, None, *low, "silu")
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": torch.zeros(3, 8)}, r"scale has shape \[3, 8\], expected \[2, 8\] or \[1, 8\]"),
        ({"scale": torch.zeros(8)}, r"scale has shape \[8\], expected \[2, 8\] or \[1, 8\]"),
        ({"shift": torch.zeros(2, 8, 5, 6)}, r"shift has shape \[2, 8, 5, 6\], expected \[2, 8\] or \[1, 8\]"),
        ({"shift": torch.zeros(2, 4)}, r"shift has shape \[2, 4\], expected"),
        ({"shift": torch.zeros(2, 8).long()}, "shift has dtype torch.int64, expected a floating one"),
        ({"residual": torch.zeros(2, 8, 5)}, r"residual has shape \[2, 8, 5\], expected \[2, 8, 5, 6\]"),
        ({"weight": torch.zeros(1)}, r"weight has shape \[1\], expected \[8\]"),
        ({"num_groups": 3}, "num_groups is 3, expected a divisor of 8 channels"),
        ({"act": "sulu"}, "sulu"),
    ],
    ids=["samples", "rank", "positions", "channels", "dtype", "residual", "weight", "groups", "act"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_refusals(change, message, layout, device):
    given = {"scale": torch.zeros(2, 8), "num_groups": 4, **change}
    given = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    x = laid_out(torch.randn(2, 8, 5, 6, device=device), layout)
    with pytest.raises(RuntimeError, match=message):
        functional.group_norm(x, **given)
