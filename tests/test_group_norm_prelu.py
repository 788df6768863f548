"""PReLU(GroupNorm(x) + residual): values and gradients in every family of kernels, slopes of both kinds, bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kgopt.nn
from kgopt import functional, reference
from norm_gradients import run_both_ways
from shapes import DTYPES, LAYOUTS, NORM_SHAPES, laid_out, make
from test_group_norm_add import FAMILIES
from tolerances import TINY, assert_as_good_as_torch

OPS = torch.ops.kgopt
SLOPES = ["one", "one a channel"]


def slopes(kind, channels, dtype, device):
    """Of either sign, and above 1."""
    return (torch.randn(1 if kind == "one" else channels, device=device) * 1.5).to(dtype)


def check(shape, groups, dtype, kind, layout, device, summed=True):
    x, weight, bias = make(shape, dtype, device, layout)
    slope = slopes(kind, shape[1], dtype, device)
    tensors = [x, slope, weight, bias]
    if summed:
        tensors.append(laid_out(torch.randn(shape, device=device).to(dtype), layout))
    doubles = [t.double() for t in tensors]

    def ours(x, s, w, b, r=None):
        return functional.group_norm(x, groups, w, b, 1e-5, "prelu", r, s)

    def plain(x, s, w, b, r=None):
        return reference.group_norm_prelu_ref(x, s, groups, w, b, 1e-5, r)

    z = plain(doubles[0], torch.ones_like(doubles[1]), *doubles[2:])
    # Where rounding decides on which side of 0 a value lies, nothing comes back.
    near = z.abs() < (0.05 if dtype.itemsize == 2 else 1e-3)
    dy = laid_out(torch.randn(shape, device=device).masked_fill(near, 0).to(dtype), layout)
    mine = run_both_ways(ours, dy, *tensors)
    exact = run_both_ways(plain, dy, *doubles)
    # The slope's gradient is a sum that may cancel to anything: its error is one beside the sum of magnitudes.
    terms = (dy.double() * z).where(z <= 0, 0).abs()
    scale = terms.sum() if slope.numel() == 1 else terms.sum([0, *range(2, z.dim())])
    for i, (got, torchs, right) in enumerate(zip(mine, run_both_ways(plain, dy, *tensors), exact, strict=True)):
        if i == 2:
            off, torchs_off = (((t.double() - right).abs() / (scale + 1e-30)).max() for t in (got, torchs))
            assert got.dtype == slope.dtype
            assert got.shape == slope.shape
            assert off <= 2 * torchs_off + TINY[dtype]
        else:
            assert_as_good_as_torch(got, torchs, right)
    assert mine[0].stride() == x.stride()
    again = run_both_ways(ours, dy, *tensors)
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))
    with torch.no_grad():  # the op without statistics
        assert torch.equal(ours(*tensors), mine[0])


@pytest.mark.parametrize("kind", SLOPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in NORM_SHAPES if n != "one element a group"])
def test_values_and_gradients(name, dtype, layout, kind, device, poisoned):
    check(*NORM_SHAPES[name], dtype, kind, layout, device, summed=kind == "one a channel")


@pytest.mark.gpu
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("kind", SLOPES)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, layout, dtype, kind, summed, poisoned):
    check(*FAMILIES[name], dtype, kind, layout, "cuda", summed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_in_float32(dtype, layout, device):
    x, weight, bias = make((2, 12, 7, 9), dtype, device, layout)
    slope = slopes("one a channel", 12, torch.float32, device)
    y = OPS.group_norm_prelu(x, slope, 3, weight.float(), bias.float())
    exact = reference.group_norm_prelu_ref(x.double(), slope.double(), 3, weight.double(), bias.double())
    torchs = reference.group_norm_prelu_ref(x.float(), slope, 3, weight.float(), bias.float()).to(dtype)
    assert_as_good_as_torch(y, torchs, exact)


@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("kind", SLOPES)
def test_misaligned_and_sliced(offset, kind, device):
    """x and the residual lie differently beside a multiple of 16 bytes; the slopes are every second of a tensor."""
    wide = torch.randn(2 * 8 * 9 * 10 + 8, device=device)
    x = wide[offset : offset + 1440].view(2, 8, 9, 10).requires_grad_()
    residual = torch.randn(1440 + 4, device=device)[4 - offset :][:1440].view(2, 8, 9, 10)
    weight, bias = torch.randn(2, 8, device=device)
    slope = torch.randn(16, device=device)[:: 2 if kind != "one" else 16].requires_grad_()
    y = OPS.group_norm_prelu(x, slope, 4, weight, bias, 1e-5, residual)
    expected = reference.group_norm_prelu_ref(x, slope, 4, weight, bias, 1e-5, residual)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(y)
    for mine, right in zip(*(torch.autograd.grad(t, [x, slope], dy) for t in (y, expected)), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("slope", [0.25, 0.0, -2.0])
def test_nonfinite_values_are_pytorchs(value, slope, device):
    x, weight, bias = make((2, 8, 20, 33), torch.float32, device, "contiguous")
    residual = torch.randn_like(x)
    residual[1, 3, 4, 5] = value
    slope = torch.full([1], slope, device=device).requires_grad_()
    y = OPS.group_norm_prelu(x, slope, 4, weight, bias, 1e-5, residual)
    expected = reference.group_norm_prelu_ref(x, slope, 4, weight, bias, 1e-5, residual)
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    mine, right = (torch.autograd.grad(t.sum(), [slope])[0] for t in (y, expected))
    torch.testing.assert_close(mine, right, equal_nan=True, rtol=1e-3, atol=1e-2)


def test_zeros_keep_pytorchs_sign(device):
    """A zero of either sign is multiplied by the slope."""
    x = torch.ones(1, 2, 4, device=device)
    for slope in (-0.5, 0.5):
        s = torch.full([1], slope, device=device)
        for residual in (x * 0.0, x * -0.0):
            weight, bias = torch.ones(2, device=device), torch.zeros(2, device=device) - residual[0, 0, 0].abs()
            y = OPS.group_norm_prelu(x, s, 1, weight, bias, 1e-5, residual)
            expected = reference.group_norm_prelu_ref(x, s, 1, weight, bias, 1e-5, residual)
            assert torch.equal(y.signbit(), expected.signbit())


def test_gradient_at_zero_is_pytorchs(device):
    """Where the argument is 0, dx takes the slope, and nothing is added to the slope's gradient."""
    x = torch.zeros(1, 2, 4, device=device, dtype=torch.float64)
    residual, slope = x.clone().requires_grad_(), torch.full([2], 3.0, device=device, dtype=torch.float64)
    slope.requires_grad_()
    y = OPS.group_norm_prelu(x, slope, 1, None, None, 1e-5, residual)
    expected = reference.group_norm_prelu_ref(x, slope, 1, None, None, 1e-5, residual)
    for mine, right in zip(*(torch.autograd.grad(t.sum(), [residual, slope]) for t in (y, expected)), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("kind", SLOPES)
def test_derivatives_to_the_second(kind, device):
    x, residual = torch.randn(2, 2, 4, 5, dtype=torch.float64, device=device)
    weight, bias = torch.randn(2, 4, dtype=torch.float64, device=device)
    slope = slopes(kind, 4, torch.float64, device)
    given = [t.requires_grad_() for t in (x, slope, weight, bias, residual)]

    def run(x, s, w, b, r):
        return functional.group_norm(x, 2, w, b, act="prelu", residual=r, slope=s)

    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradcheck(run, given, check_forward_ad=True, check_backward_ad=False)
    assert torch.autograd.gradgradcheck(run, given)


def test_module(device):
    norm = kgopt.nn.GroupNorm(4, 8, act="prelu", num_slopes=8).to(device)
    assert set(norm.state_dict()) == {"weight", "bias", "slope"}
    assert torch.all(norm.slope == 0.25)
    assert set(kgopt.nn.GroupNorm(4, 8, act="silu").state_dict()) == {"weight", "bias"}
    x, residual = torch.randn(2, 2, 8, 5, 6, device=device)
    with torch.no_grad():
        norm.slope.normal_()
    expected = F.prelu(F.group_norm(x, 4, norm.weight, norm.bias) + residual, norm.slope)
    torch.testing.assert_close(norm(x, residual), expected)
    with pytest.raises(ValueError, match="num_slopes is 3, expected 1, or 8 with act='prelu'"):
        kgopt.nn.GroupNorm(4, 8, act="prelu", num_slopes=3)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast(x_dtype, low, device):
    """PyTorch's PReLU gives the autocast dtype whatever it is given."""
    x, residual = torch.randn(2, 2, 8, 5, 6, device=device).to(x_dtype)
    slope = torch.randn(8, device=device)
    with torch.autocast(device, low):
        y = functional.group_norm(x, 4, act="prelu", residual=residual, slope=slope)
        expected = F.prelu(F.group_norm(x, 4) + residual, slope)
    assert y.dtype is expected.dtype is low
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(96, 64, 64, 64), (64, 32, 96, 96)], ids=str)
def test_many_samples_in_channels_last(shape, dtype, poisoned):
    """The plan was that of leaky ReLU, whose kernel keeps chunks in registers: the one that PReLU takes does not, and
    left them unwritten.
    """
    check(shape, 8, dtype, "one", "channels_last", "cuda", summed=False)


@pytest.mark.gpu
def test_a_graph_follows_the_slope():
    """The kernels read the slope where it lies: an update in place changes what a captured graph computes."""
    x, slope = torch.randn(2, 8, 16, 16, device="cuda"), torch.full([1], 0.25, device="cuda")
    OPS.group_norm_prelu(x, slope, 4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = OPS.group_norm_prelu(x, slope, 4)
    slope.fill_(-3)
    graph.replay()
    torch.testing.assert_close(y, F.prelu(F.group_norm(x, 4), slope))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    """The channel of an element is found from its place, by a multiplication."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    x = torch.randn(3, 6, 16, 8192, 1024, device="cuda", dtype=torch.bfloat16)
    slope = torch.arange(6.0, device="cuda") - 2.5
    y = OPS.group_norm_prelu(x, slope, 3)
    z = OPS.group_norm(x, 3)
    for c in range(6):
        part, right = y[:, c, -1, -3:], F.prelu(z[:, c, -1, -3:].float(), slope[c : c + 1])
        torch.testing.assert_close(part.float(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slope": torch.zeros(3)}, r"slope has shape \[3\], expected \[1\] or \[8\]"),
        ({"slope": torch.zeros(8, 1, 1)}, r"slope has shape \[8, 1, 1\], expected \[1\] or \[8\]"),
        ({"slope": torch.zeros(8).double()}, "slope has dtype float64, expected float32"),
        ({"slope": torch.zeros(8, device="meta")}, "slope is on .*, expected the device of x"),
        ({"residual": torch.zeros(2, 4, 5, 6)}, r"residual has shape \[2, 4, 5, 6\], expected \[2, 8, 5, 6\]"),
    ],
    ids=["count", "rank", "dtype", "device", "residual"],
)
def test_refusals(change, message, device):
    given = {"slope": torch.zeros(8), "residual": None, **change}
    given = {n: t if t is None or t.is_meta else t.to(device) for n, t in given.items()}
    with pytest.raises(RuntimeError, match=message):
        OPS.group_norm_prelu(torch.randn(2, 8, 5, 6, device=device), num_groups=4, **given)


def test_a_slope_without_prelu_is_refused():
    x = torch.randn(2, 8, 5, 6)
    with pytest.raises(ValueError, match="act is 'silu', expected 'prelu' with a slope"):
        functional.group_norm(x, 4, act="silu", slope=torch.zeros(1))
    with pytest.raises(ValueError, match="slope is None, expected a tensor"):
        functional.group_norm(x, 4, act="prelu")
