"""Norms over channels: values, layouts, gradients, hard inputs."""

from __future__ import annotations

import pytest
import torch

from kgopt import functional, reference
from kgopt.rewrite.chains.meanings import CLAMP_STOPS
from norm_gradients import check_both_ways, run_both_ways
from shapes import DTYPES, LAYOUTS, laid_out, make, norm_shape
from tolerances import assert_as_good_as_torch

OPS = torch.ops.kgopt
EPS = {"rms": 1e-6, "l2": 1e-12, "layer": 1e-6}
KINDS = list(EPS)
ACTS = ["none", "relu", "silu", "leaky_relu", "tanh+hardswish"]
PARAMETRIZED = ["leaky_relu(0.2)", "elu(0.7)", "celu(1.3)", "softplus(2,15)", "add(1)+silu+mul(0.5)"]
SHAPES = {
    "no positions": (5, 24),
    "one position": (3, 16, 1, 1),
    "one channel": (2, 1, 5, 7),
    "1d": (2, 6, 40),
    "primes": (3, 7, 11, 13),
    "whole vectors": (2, 96, 5, 16),
    "tail of a tile": (1, 40, 3, 8, 24),
    "odd rows": (2, 64, 9, 15),
    "every lane": (1, 136, 4, 8, 8),
    "more than a thread holds": (1, 1096, 4, 16),
    "more than a table holds": (2, 2056, 2, 8),
    "primes, more than is held": (1, 1031, 3, 7),
    "4096 channels": (1, 4096, 2, 8),
}


def norms(kind, act):
    eps = EPS[kind]
    return (
        lambda *t: OPS.channel_norm(*t, kind, eps, act),
        lambda *t: reference.channel_norm_ref(*t, kind, eps, act),
    )


def check(x, weight, bias, kind, act, layout):
    """Values and gradients, by the rule; a second call has the same bits."""
    ours, plain = norms(kind, act)
    tensors = (x, weight, bias)
    doubles = [t.double() for t in tensors]
    dy = torch.randn(x.shape, device=x.device)
    if act.startswith(("relu", "leaky_relu")):  # rounding decides on which side of the kink a value lies
        dy = dy.masked_fill(norms(kind, "none")[1](*doubles).abs() < 1e-2, 0)
    dy = laid_out(dy.to(x.dtype), layout)

    mine = run_both_ways(ours, dy, *tensors)
    assert mine[0].stride() == mine[1].stride() == x.stride()
    results = list(zip(mine, run_both_ways(plain, dy, *tensors), run_both_ways(plain, dy, *doubles), strict=True))
    if (
        x.shape[1] == 1 and kind != "layer"
    ):  # the norm is x's sign: its gradient is what rounding leaves of a difference
        result, _, exact = results.pop(1)
        size = dy.double() * weight.double() / x.double()
        assert ((result - exact).abs() <= 32 * torch.finfo(x.dtype).eps * size.abs() + exact.abs() / 8).all()
    for result, expected, exact in results:
        assert_as_good_as_torch(result, expected.to(result.dtype), exact)
    assert all(torch.equal(a, b) for a, b in zip(mine, run_both_ways(ours, dy, *tensors), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_channel_norm(name, dtype, kind, layout, device, poisoned):
    check(*make(SHAPES[name], dtype, device, layout), kind, "silu", layout)


@pytest.mark.parametrize("act", [*reference.ACTIVATIONS, *ACTS[3:], *PARAMETRIZED])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_channel_norm_act(act, layout, device, poisoned):
    check(*make((2, 24, 9, 16), torch.float32, device, layout), "layer", act, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", KINDS)
def test_channel_norm_of_many_tiles(kind, act, layout, dtype, device, poisoned):
    """More tiles than blocks."""
    shape = norm_shape((2, 96, 5, 120, 208), device)
    check(*make(shape, dtype, device, layout), kind, act, layout)


@pytest.mark.parametrize(("scale", "offset"), [(0.01, 0.0), (3.0, 0.0), (1.0, 100.0), (0.01, 100.0)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_channel_norm_ill_conditioned(kind, layout, scale, offset, device):
    check(*make((2, 96, 6, 16), torch.float32, device, layout, scale, offset), kind, "none", layout)


@pytest.mark.parametrize("affine", ["none", "weight", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_channel_norm_partial_affine(kind, affine, device):
    x, weight, bias = make((2, 8, 5, 5), torch.float32, device)
    given = (weight if affine == "weight" else None, bias if affine == "bias" else None)
    ours, plain = norms(kind, "silu")
    exact = plain(x.double(), *(None if t is None else t.double() for t in given))
    assert_as_good_as_torch(ours(x, *given), plain(x, *given), exact)
    tensors = [t for t in (x, *given) if t is not None]

    def padded(norm):
        return lambda *t: norm(*{"none": (t[0], None, None), "weight": (*t, None), "bias": (t[0], None, t[-1])}[affine])

    dy = torch.randn_like(x)
    check_both_ways(padded(ours), padded(plain), dy, *tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_channel_norm_fp32_affine_on_half_input(dtype, layout, device):
    x, _, _ = make((2, 24, 9, 16), dtype, device, layout)
    weight, bias = torch.randn(24, device=device), torch.randn(24, device=device)
    exact = reference.channel_norm_ref(x.double(), weight.double(), bias.double(), "layer", 1e-6, "silu")
    expected = reference.channel_norm_ref(x.float(), weight, bias, "layer", 1e-6, "silu").to(dtype)
    assert_as_good_as_torch(OPS.channel_norm(x, weight, bias, "layer", 1e-6, "silu"), expected, exact)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_channel_norm_short_vectors(kind, layout, device):
    """Positions of zeros, and for l2 some that are shorter than eps: there x is scaled by a constant."""
    x, weight, bias = make((2, 16, 4, 8), torch.float32, device, layout)
    x[:, :, 0] = 0
    x[:, :, 1] *= 1e-3
    eps = 0.1
    dy = torch.randn_like(x)

    def ours(*t):
        return OPS.channel_norm(*t, kind, eps)

    def plain(*t):
        return reference.channel_norm_ref(*t, kind, eps)

    check_both_ways(ours, plain, dy, x, weight, bias)


@pytest.mark.skipif(not CLAMP_STOPS, reason="the gradient of clamp_min at its bound was another one before 2.14")
@pytest.mark.parametrize("eps", [5.0, 4.999, 5.001])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_channel_norm_as_long_as_eps(dtype, layout, eps, device):
    """A position of length 5 exactly: its gradient had the term of a longer one, where PyTorch scales by a constant."""
    x = torch.zeros(1, 4, 2, 4, dtype=dtype, device=device)
    x[:, 1], x[:, 2] = 3, 4
    x = laid_out(x, layout)
    dy = torch.arange(1.0, 5, dtype=dtype, device=device).view(1, 4, 1, 1).expand_as(x)
    ours, theirs = (x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
    OPS.channel_norm(ours, None, None, "l2", eps).backward(dy)
    reference.channel_norm_ref(theirs, None, None, "l2", eps).backward(dy)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_channel_norm_not_finite(kind, layout, value, device):
    x, weight, bias = make((2, 24, 4, 8), torch.float32, device, layout)
    x[1, 5, 2, 3] = value
    ours, plain = norms(kind, "none")
    assert_as_good_as_torch(ours(x, weight, bias).isnan().float(), plain(x, weight, bias).isnan().float(),
                            plain(x.double(), weight.double(), bias.double()).isnan().double())  # fmt: skip
    others = ours(x, weight, bias).isnan().any(1)
    assert int(others.sum()) == 1
    assert bool(others[1, 2, 3])


@pytest.mark.parametrize("kind", KINDS)
def test_channel_norm_strides(kind, device):
    """Tensors that are neither contiguous nor channels_last, and starts that no vector fits."""
    flat = torch.randn(2 * 24 * 8 * 16 + 1, device=device)
    weight, bias = torch.randn(24, device=device), torch.randn(48, device=device)[::2]
    ours, plain = norms(kind, "silu")
    base = torch.randn(2, 24, 16, 8, device=device)
    for x in (flat[1:].view(2, 24, 8, 16), base.transpose(2, 3), base[:, :, ::2], base[:1].expand(3, -1, -1, -1)):
        exact = plain(x.double(), weight.double(), bias.double())
        assert_as_good_as_torch(ours(x, weight, bias), plain(x, weight, bias), exact)


@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (2, 8, 0, 4), (2, 0, 4, 4), (0, 8)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_channel_norm_empty(kind, shape, device):
    x = torch.empty(shape, device=device, requires_grad=True)
    weight = torch.ones(shape[1], device=device, requires_grad=True)
    y = OPS.channel_norm(x, weight, None, kind)
    assert y.shape == x.shape
    y.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_channel_norm_bad_input(device):
    x, weight = torch.ones(2, 4, 5, device=device), torch.ones(4, device=device)
    for args, message in (
        ((x, weight[:3]), r"channel_norm: weight has shape \[3\], expected \[4\]"),
        ((x[0, 0],), r"channel_norm: x has shape \[5\], expected at least 2 dimensions"),
        ((x, weight.double()), "channel_norm: weight has dtype float64, expected float32"),
        ((x.int(),), "channel_norm: x has dtype int32"),
        ((x, None, None, "batch"), "channel_norm: kind is 'batch', expected 'rms', 'l2' or 'layer'"),
        ((x, None, None, "rms", 1e-5, "swoosh"), "channel_norm: act names an unknown activation 'swoosh'"),
    ):
        with pytest.raises(RuntimeError, match=message):
            OPS.channel_norm(*args)
    with pytest.raises(RuntimeError, match=r"channel_norm_backward: dy has shape \[2, 4\], expected \[2, 4, 5\]"):
        OPS.channel_norm_backward(x[..., 0], x)


@pytest.mark.parametrize("kind", KINDS)
def test_channel_norm_gradcheck(kind, device):
    x, weight, bias = (t.requires_grad_() for t in make((2, 5, 3, 4), torch.float64, device))

    def call(*t):
        return functional.channel_norm(*t, kind, EPS[kind], "silu")

    torch.autograd.gradcheck(call, (x, weight, bias), nondet_tol=0.0)
    torch.autograd.gradgradcheck(call, (x, weight, bias), nondet_tol=0.0)


@pytest.mark.gpu
def test_channel_norm_beyond_two_to_the_31():
    """The last positions of a tensor of more elements than 32 bits count, in both layouts."""
    shape = (3, 96, 2700, 2800)
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of memory")
    weight, bias = torch.randn(2, 96, device="cuda", dtype=torch.bfloat16)
    for layout in LAYOUTS:
        format = torch.contiguous_format if layout == "contiguous" else torch.channels_last
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16, memory_format=format).normal_()
        y = OPS.channel_norm(x, weight, bias, "rms", 1e-6, "silu")
        ends = (slice(0, 1), slice(None), slice(0, 2)), (slice(2, 3), slice(None), slice(-2, None))
        for part in ends:
            small = x[part]
            exact = reference.channel_norm_ref(small.double(), weight.double(), bias.double(), "rms", 1e-6, "silu")
            expected = reference.channel_norm_ref(small, weight, bias, "rms", 1e-6, "silu")
            assert_as_good_as_torch(y[part], expected, exact)
        del x, y
