"""GroupNorm, its statistics and its mean: values, layouts, hard inputs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kgopt import functional, reference
from shapes import DTYPES, LAYOUTS, NORM_SHAPES, laid_out, make, norm_shape
from tolerances import assert_as_good_as_torch

OPS = torch.ops.kgopt


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORM_SHAPES)
def test_group_norm_values(name, dtype, layout, device, poisoned):
    shape, groups = NORM_SHAPES[name]
    x, weight, bias = make(shape, dtype, device, layout)
    y = OPS.group_norm(x, groups, weight, bias)
    expected = F.group_norm(x, groups, weight, bias)
    exact = F.group_norm(x.double(), groups, weight.double(), bias.double())
    assert_as_good_as_torch(y, expected, exact)
    assert y.is_contiguous(memory_format=torch.contiguous_format) or y.stride() == x.stride()


@pytest.mark.parametrize("act", [*reference.ACTIVATIONS, "tanh+hardswish", "relu+gelu+sigmoid"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_norm_act(act, layout, device, poisoned):
    x, weight, bias = make((2, 24, 9, 33), torch.float32, device, layout)
    y = functional.group_norm(x, 8, weight, bias, act=act)
    expected = reference.group_norm_ref(x, 8, weight, bias, act=act)
    exact = reference.group_norm_ref(x.double(), 8, weight.double(), bias.double(), act=act)
    assert_as_good_as_torch(y, expected, exact)


@pytest.mark.parametrize("pre_act", ["relu", "silu", "tanh+leaky_relu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_norm_pre_act(pre_act, layout, device, poisoned):
    x, weight, bias = make((2, 12, 7, 8, 9), torch.float32, device, layout)
    y, mean, rstd = OPS.group_norm_fwd(x, 3, weight, bias, 1e-5, "silu", pre_act)
    exact = reference.group_norm_ref(x.double(), 3, weight.double(), bias.double(), act="silu", pre_act=pre_act)
    expected = reference.group_norm_ref(x, 3, weight, bias, act="silu", pre_act=pre_act)
    assert_as_good_as_torch(y, expected, exact)
    exact_mean, exact_rstd = reference.group_stats_ref(reference.activation_ref(x.double(), pre_act), 3)
    torch.testing.assert_close(mean.double(), exact_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("scale", "offset"), [(0.01, 0.0), (3.0, 0.0), (1.0, 100.0), (0.01, 100.0)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 16, 33, 40), (1, 8, 20, 40, 41)], ids=str)
def test_group_norm_ill_conditioned(shape, layout, scale, offset, device):
    x, weight, bias = make(shape, torch.float32, device, layout, scale, offset)
    exact = F.group_norm(x.double(), 4, weight.double(), bias.double())
    assert_as_good_as_torch(OPS.group_norm(x, 4, weight, bias), F.group_norm(x, 4, weight, bias), exact)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORM_SHAPES)
def test_group_norm_mean_values(name, dtype, layout, device, poisoned):
    shape, groups = NORM_SHAPES[name]
    x, weight, bias = make(shape, dtype, device, layout)
    out, channel_mean, mean, rstd = OPS.group_norm_mean_fwd(x, groups, weight, bias)
    exact = reference.group_norm_mean_ref(x.double(), groups, weight.double(), bias.double())
    # The result is a mean of terms of size |weight| + |bias|: that is what rounding acts on.
    size = float(weight.double().abs().mean() + bias.double().abs().mean())
    tolerance = {torch.float64: 1e-12}.get(dtype, 3e-6) * size
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=tolerance)
    y = OPS.group_norm_mean(x, groups, weight, bias)  # without statistics, and rounded where it is computed
    assert y.dtype == dtype
    assert torch.equal(y, out.to(dtype))
    torch.testing.assert_close(channel_mean.double(), x.double().flatten(2).mean(2) if x.dim() > 2 else x.double(),
                               rtol=1e-5, atol=1e-6)  # fmt: skip
    exact_mean, exact_rstd = reference.group_stats_ref(x.double(), groups)
    torch.testing.assert_close(mean.double(), exact_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_stats_values(dtype, layout, device, poisoned):
    x, _, _ = make((3, 24, 10, 11), dtype, device, layout, 3.0, 5.0)
    mean, rstd = OPS.group_stats(x, 6, 1e-3)
    exact_mean, exact_rstd = reference.group_stats_ref(x.double(), 6, 1e-3)
    torch.testing.assert_close(mean.double(), exact_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("affine", ["none", "weight", "bias"])
def test_group_norm_partial_affine(affine, device):
    x, weight, bias = make((2, 8, 5, 5), torch.float32, device)
    weight = weight if affine == "weight" else None
    bias = bias if affine == "bias" else None
    exact = F.group_norm(x.double(), 2, *(None if t is None else t.double() for t in (weight, bias)))
    assert_as_good_as_torch(OPS.group_norm(x, 2, weight, bias), F.group_norm(x, 2, weight, bias), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_group_norm_fp32_affine_on_half_input(dtype, device):
    x, _, _ = make((2, 8, 9, 9), dtype, device)
    weight, bias = torch.randn(8, device=device), torch.randn(8, device=device)
    exact = F.group_norm(x.double(), 4, weight.double(), bias.double())
    expected = F.group_norm(x.float(), 4, weight, bias).to(dtype)
    assert_as_good_as_torch(OPS.group_norm(x, 4, weight, bias), expected, exact)


@pytest.mark.parametrize("view", ["sliced", "expanded", "transposed", "misaligned"])
def test_group_norm_strided_input(view, device, poisoned):
    base = torch.randn(4, 16, 12, 22, device=device)
    x = {
        "sliced": lambda: base[:, ::2, 1:, 3:20],
        "expanded": lambda: base[:1, :8].expand(3, 8, 12, 22),
        "transposed": lambda: base[:, :8].transpose(2, 3),
        "misaligned": lambda: base.flatten()[1 : 1 + 2 * 8 * 100].view(2, 8, 10, 10),
    }[view]()
    weight, bias = torch.randn(8, device=device), torch.randn(8, device=device)
    exact = F.group_norm(x.double(), 4, weight.double(), bias.double())
    assert_as_good_as_torch(OPS.group_norm(x, 4, weight, bias), F.group_norm(x, 4, weight, bias), exact)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_norm_nonfinite(value, layout, device):
    x, weight, bias = make((2, 8, 6, 7), torch.float32, device, layout)
    x[1, 5, 2, 3] = value
    y = OPS.group_norm(x, 4, weight, bias)
    assert torch.equal(y.isnan(), F.group_norm(x, 4, weight, bias).isnan())
    assert bool(y[0].isfinite().all())


@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (0, 8)], ids=str)
def test_group_norm_empty_batch(shape, device):
    x = torch.randn(shape, device=device)
    assert OPS.group_norm(x, 4).shape == F.group_norm(x, 4).shape
    assert OPS.group_norm_mean(x, 4).shape == (0,)


def test_group_norm_zero_variance(device):
    x = torch.full((2, 6, 8, 8), 3.0, device=device)
    weight, bias = torch.randn(6, device=device), torch.randn(6, device=device)
    torch.testing.assert_close(OPS.group_norm(x, 3, weight, bias), bias.view(1, 6, 1, 1).expand(2, 6, 8, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_norm_deterministic(layout, device):
    x, weight, bias = make((1, 16, 64, 300), torch.float32, device, layout)
    first = OPS.group_norm(x, 4, weight, bias, 1e-5, "silu")
    for _ in range(3):
        assert torch.equal(OPS.group_norm(x, 4, weight, bias, 1e-5, "silu"), first)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 16, 64, 300), (2, 8, 90, 90), (5, 40, 7, 9)], ids=str)
def test_group_norm_does_not_depend_on_threads(shape, dtype, layout):
    """More groups than threads, or fewer: units of work are then done in one go or pass by pass."""
    x, weight, bias = make(shape, dtype, "cpu", layout)
    dy = torch.randn_like(x)

    def run():
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = functional.group_norm(leaves[0], 4, *leaves[1:], act="silu")
        y.backward(dy)
        return [y, *(leaf.grad for leaf in leaves)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run()
        torch.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(one, run(), strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("act", "pre_act"), [("none", "none"), ("silu", "none"), ("none", "relu"), ("gelu+tanh", "elu")]
)
@pytest.mark.parametrize("shape", [(2, 24, 9, 15), (3, 8, 5, 6, 7), (2, 6, 1)], ids=str)
def test_group_norm_backward_values(shape, act, pre_act, dtype, layout, device, poisoned):
    x, weight, bias = make(shape, dtype, device, layout)
    groups = 2
    dy = laid_out(torch.randn(shape, device=device).to(dtype), layout)

    def gradients(run, *tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        run(*leaves).backward(dy.to(leaves[0].dtype))
        return [leaf.grad for leaf in leaves]

    def plain(x, weight, bias):
        return reference.group_norm_ref(x, groups, weight, bias, act=act, pre_act=pre_act)

    ours = gradients(lambda x, w, b: OPS.group_norm_fwd(x, groups, w, b, 1e-5, act, pre_act)[0], x, weight, bias)
    theirs = gradients(plain, x, weight, bias)
    exact = gradients(plain, x.double(), weight.double(), bias.double())
    for mine, torchs, right in zip(ours, theirs, exact, strict=True):
        assert_as_good_as_torch(mine, torchs, right)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_norm_mean_backward_values(layout, device, poisoned):
    x, weight, bias = make((3, 12, 6, 7), torch.float32, device, layout)
    dout = torch.randn(3, device=device)
    grads = []
    for run, dtype in (
        (lambda x, w, b: OPS.group_norm_mean(x, 4, w, b), torch.float32),
        (lambda x, w, b: reference.group_norm_mean_ref(x, 4, w, b), torch.float32),
        (lambda x, w, b: reference.group_norm_mean_ref(x, 4, w, b), torch.float64),
    ):
        leaves = [t.detach().clone().to(dtype).requires_grad_() for t in (x, weight, bias)]
        run(*leaves).backward(dout.to(dtype))
        grads.append([leaf.grad for leaf in leaves])
    # The gradient of x is what is left of terms that cancel: compare on the scale of those terms.
    for mine, right in zip(grads[0], grads[2], strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-7)


# Groups that stay on chip on a GPU that can: in a team's registers, in one block, in a cluster.
ON_CHIP_GROUPS = {
    "a team of eight lanes": ((4000, 66, 3, 3), 66),
    "a team of a warp": ((600, 96, 6, 7), 24),
    "a team of a warp, up to eight vectors": ((70, 96, 13, 37), 48),
    "a team of one channel": ((300, 129, 11, 13), 129),
    "a team of one channel, up to eight vectors": ((70, 129, 29, 31), 129),
    "a block": ((3, 6, 65, 67), 3),
    "a block, many of them": ((300, 12, 33, 37), 6),
    "a cluster, any start and length": ((2, 6, 161, 163), 2),
    "a cluster, vectors across channels": ((1, 70, 33, 41), 1),
    "channels shorter than a vector": ((40, 20000, 3), 8),
    "one channel in several blocks": ((1, 2, 217, 219), 2),
    "one channel in several blocks of a cluster": ((1, 1, 317, 319), 1),
    "many channels a block": ((60, 1040, 9, 5), 8),
    "a cluster of sixteen": ((1, 3, 63, 65, 61), 1),
    "a few clusters of sixteen": ((3, 31, 4464), 1),
}


@pytest.mark.parametrize(
    ("act", "pre_act"), [("none", "none"), ("silu", "none"), ("leaky_relu", "none"), ("gelu+tanh", "elu")]
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", ON_CHIP_GROUPS)
def test_group_norm_on_chip(name, dtype, act, pre_act, device, poisoned):
    shape, groups = ON_CHIP_GROUPS[name]
    if device != "cuda" and math.prod(shape) > 10**6:
        pytest.skip("large, for the sake of a way of the GPU")
    x, weight, bias = make(shape, dtype, device, scale=2.0, offset=1.0)
    dy = torch.randn(shape, device=device).to(dtype)

    def run(norm, *tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = norm(*leaves)
        y.backward(dy.to(y.dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    def ours(x, w, b):
        return OPS.group_norm_fwd(x, groups, w, b, 1e-2, act, pre_act)[0]

    def plain(x, w, b):
        return reference.group_norm_ref(x, groups, w, b, eps=1e-2, act=act, pre_act=pre_act)

    mine = run(ours, x, weight, bias)
    exact = run(plain, x.double(), weight.double(), bias.double())
    for result, expected, right in zip(mine, run(plain, x, weight, bias), exact, strict=True):
        assert_as_good_as_torch(result, expected, right)
    assert all(torch.equal(a, b) for a, b in zip(mine, run(ours, x, weight, bias), strict=True))


@pytest.mark.parametrize("name", ["a block", "a cluster, any start and length", "a cluster, vectors across channels"])
def test_group_norm_on_chip_ill_conditioned(name, device, poisoned):
    shape, groups = ON_CHIP_GROUPS[name]
    for scale, offset in ((0.01, 0.0), (3.0, 0.0), (1.0, 100.0), (0.01, 100.0)):
        x, weight, bias = make(shape, torch.float32, device, scale=scale, offset=offset)
        x.view(-1)[0] += 50 * scale  # an outlier where sums might take their shift from
        exact = F.group_norm(x.double(), groups, weight.double(), bias.double())
        assert_as_good_as_torch(OPS.group_norm(x, groups, weight, bias), F.group_norm(x, groups, weight, bias), exact)


@pytest.mark.gpu
def test_group_norm_on_chip_graph():
    """Forward and backward are captured and replayed."""
    x = torch.randn(4, 16, 33, 35, device="cuda")
    weight, bias = torch.randn(16, device="cuda"), torch.randn(16, device="cuda")
    dy = torch.randn_like(x)

    def run():
        y, mean, rstd = OPS.group_norm_fwd(x, 4, weight, bias, 1e-5, "silu", "none")
        return y, *OPS.group_norm_backward(dy, x, mean, rstd, 4, weight, bias, "silu", "none")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "groups"), [((3, 333, 17, 59), 3), ((1, 799, 66, 23), 1), ((1, 5, 301, 2051), 5)], ids=str
)
def test_group_norm_passes_beside_each_other(shape, groups, layout):
    """Passes start before the kernel ahead has ended, and read what none ahead writes: as with a wait in between."""

    def train(wait):
        torch.manual_seed(3)
        x, weight, bias = (t.requires_grad_() for t in make(shape, torch.float32, "cuda", layout))
        for _ in range(10):
            hidden = functional.group_norm(x, groups, weight, bias, act="silu")
            wait()
            y = functional.group_norm(hidden, groups, weight, bias)
            wait()
            grads = torch.autograd.grad(y, [x, weight, bias], y.detach().sin())
            wait()
            with torch.no_grad():
                for leaf, grad in zip((x, weight, bias), grads, strict=True):
                    leaf -= 0.1 * grad / grad.norm()
            wait()
        return x, weight, bias

    for mine, right in zip(train(lambda: None), train(torch.cuda.synchronize), strict=True):
        assert right.isfinite().all()
        assert torch.equal(mine, right)


# Groups of 0.6 to 27 MB, and many of 50 to 110 KB, which one launch reads once on a GPU with bulk copies. Named by what
# is hard about them.
LARGE_GROUPS = {
    "few long rows": ((1, 16, 64, 64, 40), 2),
    "groups off the 128-byte lines": ((3, 6, 71, 73, 60), 3),
    "vectors across rows": ((2, 40, 130, 129), 2),
    "rows shorter than a tile": ((1, 4096, 16, 17), 1),
    "one channel a group": ((2, 3, 512, 520), 3),
    "tiles in registers": ((1, 4, 4, 409, 1403), 2),
    "tiles in registers, 16 bits": ((1, 4, 8, 409, 1205), 2),
    "more tiles than slots but one": ((1, 4, 4, 650, 650), 1),
    "runs of tiles, the last not full": ((1, 96, 300, 295), 24),
    "a block each in turn": ((150, 6, 75, 120), 2),
    "a block each in turn, vectors across rows": ((140, 8, 2, 3501), 2),
}


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", LARGE_GROUPS)
def test_group_norm_large_groups(name, dtype, device, poisoned):
    shape, groups = LARGE_GROUPS[name]
    shape = norm_shape(shape, device)
    for scale, offset in ((1.0, 0.0), (0.01, 0.0), (3.0, 100.0)):
        x, weight, bias = make(shape, dtype, device, scale=scale, offset=offset)
        y, mean, rstd = OPS.group_norm_fwd(x, groups, weight, bias, 1e-5, "silu", "none")
        exact = reference.group_norm_ref(x.double(), groups, weight.double(), bias.double(), act="silu")
        assert_as_good_as_torch(y, reference.group_norm_ref(x, groups, weight, bias, act="silu"), exact)
        stats = x.double().reshape(shape[0], groups, -1)
        torch.testing.assert_close(mean.double(), stats.mean(2), rtol=1e-5, atol=1e-5 * scale)
        torch.testing.assert_close(rstd.double(), (stats.var(2, correction=0) + 1e-5).rsqrt(), rtol=1e-4, atol=0)
        again = OPS.group_norm_fwd(x, groups, weight, bias, 1e-5, "silu", "none")
        assert all(torch.equal(a, b) for a, b in zip((y, mean, rstd), again, strict=True))


@pytest.mark.parametrize("affine", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", [8, 24, 1])
def test_group_norm_large_groups_in_a_view(start, affine, device, poisoned):
    """x begins at any element of its storage; weight and bias absent, or of another type."""
    base = torch.randn(start + 2 * 8 * 90_000, device=device, dtype=torch.bfloat16)
    x = base[start:].view(2, 8, 300, 300)
    weight, bias = (None, None) if affine is None else (torch.randn(8, device=device, dtype=affine) for _ in "wb")
    y = OPS.group_norm(x, 2, weight, bias, 1e-5, "relu")
    wide = [None if t is None else t.double() for t in (weight, bias)]
    exact = F.relu(F.group_norm(x.double(), 2, *wide))
    same = [None if t is None else t.to(x.dtype) for t in (weight, bias)]
    assert_as_good_as_torch(y, F.relu(F.group_norm(x, 2, *same)), exact)


def test_group_norm_large_groups_nonfinite(device, poisoned):
    """A NaN or an infinity spoils its group and nothing else; a constant group has variance zero."""
    x = torch.randn(4, 8, 300, 300, device=device)
    x[0, 1, 7, 9] = float("nan")
    x[1, 6, 0, 0] = float("inf")
    x[2, :4] = 5.0
    y = OPS.group_norm(x, 2)
    expected = F.group_norm(x.cpu(), 2).to(device)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(
        y.isnan().flatten(2).any(2)[:, ::4],
        torch.tensor([[True, False], [False, True], [False, False], [False, False]], device=device),
    )
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


def gradients_of(norm, dy, *tensors):
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
    y = norm(*leaves)
    y.backward(dy.to(y.dtype))
    return [leaf.grad for leaf in leaves]


def away_from_kink(dy, doubles, groups, act, pre_act):
    """``dy`` with 0 where rounding decides on which side of a kink one of millions of elements lies."""
    if act not in ("relu", "leaky_relu"):
        return dy
    near = reference.group_norm_ref(doubles[0], groups, *doubles[1:], pre_act=pre_act).abs() < 1e-3
    return dy.masked_fill(near, 0)


# x and dy of a group of 0.6 to 21 MB together, which one launch reads once on a GPU with bulk copies.
LARGE_GROUPS_OF_TWO = {
    "few long rows": ((1, 16, 64, 64, 40), 2),
    "groups off the 128-byte lines": ((3, 6, 71, 73, 60), 3),
    "vectors across rows": ((2, 40, 130, 129), 2),
    "more groups than places": ((20, 16, 129, 127), 2),
    "one channel a group": ((2, 3, 512, 520), 3),
    "tiles in registers": ((1, 4, 4, 409, 603), 2),
    "tiles in registers, 16 bits": ((1, 4, 4, 409, 1206), 2),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("act", "pre_act"),
    [
        ("none", "none"),
        ("relu", "none"),
        ("silu", "none"),
        ("leaky_relu", "none"),
        ("none", "relu"),
        ("gelu+tanh", "elu"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", LARGE_GROUPS_OF_TWO)
def test_group_norm_large_groups_backward(name, dtype, act, pre_act, poisoned):
    device = "cuda"
    shape, groups = LARGE_GROUPS_OF_TWO[name]

    def ours(x, w, b):
        return OPS.group_norm_fwd(x, groups, w, b, 1e-5, act, pre_act)[0]

    def plain(x, w, b):
        return reference.group_norm_ref(x, groups, w, b, act=act, pre_act=pre_act)

    for scale, offset in ((1.0, 0.0), (3.0, 100.0)):
        tensors = make(shape, dtype, device, scale=scale, offset=offset)
        doubles = [t.double() for t in tensors]
        dy = torch.randn(shape, device=device)
        dy = away_from_kink(dy, doubles, groups, act, pre_act).to(dtype)
        mine = gradients_of(ours, dy, *tensors)
        exact = gradients_of(plain, dy, *doubles)
        for result, expected, right in zip(mine, gradients_of(plain, dy, *tensors), exact, strict=True):
            assert_as_good_as_torch(result, expected, right)
        assert all(torch.equal(a, b) for a, b in zip(mine, gradients_of(ours, dy, *tensors), strict=True))


@pytest.mark.parametrize("affine", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", [8, 24, 1])
def test_group_norm_large_groups_backward_in_a_view(start, affine, device, poisoned):
    """x and dy begin at any element of their storage; weight and bias absent, or of another type."""
    base, dy = (torch.randn(start + 2 * 8 * 90_000, device=device, dtype=torch.bfloat16)[start:] for _ in "xy")
    x, dy = base.view(2, 8, 300, 300), dy.view(2, 8, 300, 300)
    params = [] if affine is None else [torch.randn(8, device=device, dtype=affine) for _ in "wb"]
    weight, bias = params or (None, None)
    _, mean, rstd = OPS.group_norm_fwd(x, 2, weight, bias, 1e-5, "relu")
    mine = OPS.group_norm_backward(dy, x, mean, rstd, 2, weight, bias, "relu")[: 1 + len(params)]

    def plain(x, *params):
        return F.relu(F.group_norm(x, 2, *params))

    exact = gradients_of(plain, dy, x.double(), *(p.double() for p in params))
    half = gradients_of(plain, dy, x, *(p.to(x.dtype) for p in params))
    for result, expected, right in zip(mine, half, exact, strict=True):
        assert_as_good_as_torch(result, expected.to(result.dtype), right)


def test_group_norm_large_groups_backward_nonfinite(device, poisoned):
    """A NaN in x or dy spoils its group and nothing else; with an infinity in dy, nothing of its group is finite."""
    x, dy = torch.randn(4, 8, 300, 300, device=device), torch.randn(4, 8, 300, 300, device=device)
    x[0, 1, 7, 9] = float("nan")
    dy[1, 6, 0, 0] = float("nan")
    dy[2, 5, 299, 299] = float("inf")
    mine = gradients_of(lambda x: OPS.group_norm(x, 2), dy, x)[0]
    theirs = gradients_of(lambda x: F.group_norm(x, 2), dy.cpu(), x.cpu())[0].to(device)
    assert torch.equal(mine.isfinite(), theirs.isfinite())
    assert torch.equal(mine[:2].isnan(), theirs[:2].isnan())


# Small tensors, whose groups a team of threads has in its registers: few elements or many, in a block of all samples or
# not, in a cluster; vectors or single elements.
SMALL_GROUPS = {
    "two elements": ((5, 214, 1, 2), 214),
    "one position": ((4, 159, 1, 1), 1),
    "one position, many samples": ((26, 707, 1, 1), 1),
    "one position, four elements a thread": ((60, 300, 1, 1), 1),
    "one sample": ((1, 289, 1, 1), 17),
    "single elements": ((4, 7, 4, 3, 6), 7),
    "blocks of all samples": ((30, 13, 7), 1),
    "blocks of all samples, many groups": ((9, 622, 21), 311),
    "short rows": ((3, 657, 2, 1, 2), 1),
    "vectors": ((2, 40, 8, 9), 5),
    "vectors of channels": ((3, 96, 5, 7), 4),
    "one channel": ((2, 11, 2213), 11),
    "one channel, many samples": ((9, 13, 105, 45), 13),
    "one channel, as many threads as the GPU has": ((70, 64, 13, 9), 64),
    "vectors, as many threads as the GPU has": ((11, 62, 404), 62),
    "eight elements": ((28, 11, 13, 35), 1),
    "eight elements, many groups": ((64, 4, 2000), 4),
    "a cluster": ((4, 22, 793), 1),
    "a cluster, vectors": ((2, 12, 40, 52), 1),
    "a cluster, odd": ((3, 19, 45, 23), 1),
    "a cluster, two groups of narrow channels": ((1, 6, 98, 97), 2),
    "a cluster, short rows": ((2, 278, 3, 10), 1),
    "narrow groups": ((13, 934, 5, 5, 7), 467),
    "narrow groups of one channel": ((9, 709, 11, 12, 7), 709),
}


def run_both_ways(norm, dy, *tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = norm(*leaves)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(("act", "pre_act"), [("none", "none"), ("silu", "none"), ("relu", "silu"), ("gelu", "relu")])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", SMALL_GROUPS)
def test_group_norm_small(name, dtype, layout, act, pre_act, device, poisoned):
    shape, groups = SMALL_GROUPS[name]
    if device != "cuda" and "narrow" in name:
        pytest.skip("a way of the GPU, and slow elsewhere")
    x, weight, bias = make(shape, dtype, device, layout, scale=2.0, offset=1.0)
    dy = torch.randn_like(x)

    def ours(x, w, b):
        return OPS.group_norm_fwd(x, groups, w, b, 1e-2, act, pre_act)[0]

    def plain(x, w, b):
        return reference.group_norm_ref(x, groups, w, b, eps=1e-2, act=act, pre_act=pre_act)

    mine = run_both_ways(ours, dy, x, weight, bias)
    exact = run_both_ways(plain, dy, x.double(), weight.double(), bias.double())
    for result, expected, right in zip(mine, run_both_ways(plain, dy, x, weight, bias), exact, strict=True):
        assert_as_good_as_torch(result, expected, right)
    assert all(torch.equal(a, b) for a, b in zip(mine, run_both_ways(ours, dy, x, weight, bias), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["blocks of all samples", "vectors", "one channel", "a cluster, odd", "narrow groups"])
def test_group_norm_small_ill_conditioned(name, layout, device, poisoned):
    shape, groups = SMALL_GROUPS[name]
    for scale, offset in ((0.01, 0.0), (3.0, 0.0), (1.0, 100.0), (0.01, 100.0)):
        x, weight, bias = make(shape, torch.float32, device, scale=scale, offset=offset)
        x.view(-1)[0] += 50 * scale  # an outlier where sums might take their shift from
        x = laid_out(x, layout)
        exact = F.group_norm(x.double(), groups, weight.double(), bias.double())
        assert_as_good_as_torch(OPS.group_norm(x, groups, weight, bias), F.group_norm(x, groups, weight, bias), exact)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    ["blocks of all samples", "vectors", "one channel, many samples", "eight elements, many groups", "a cluster, odd"],
)
def test_group_norm_small_outlier(name, layout, device, poisoned):
    """Sums were relative to a group's first element, and an outlier there took its digits from all the others."""
    shape, groups = SMALL_GROUPS[name]

    def others(y):
        return y.reshape(shape[0] * groups, -1)[:, 1:]

    for scale, offset in ((0.01, 0.0), (3.0, 0.0), (1.0, 100.0)):
        x, _, _ = make(shape, torch.float32, device, scale=scale, offset=offset)
        x.view(shape[0] * groups, -1)[:, 0] += 50 * scale
        x = laid_out(x, layout)
        exact = F.group_norm(x.double(), groups)
        assert_as_good_as_torch(others(OPS.group_norm(x, groups)), others(F.group_norm(x, groups)), others(exact))


@pytest.mark.parametrize("name", ["vectors", "vectors of channels", "one channel", "a cluster, vectors"])
@pytest.mark.parametrize("start", [8, 4, 1])
@pytest.mark.parametrize("affine", [None, torch.float32, torch.bfloat16], ids=str)
def test_group_norm_small_in_a_view(name, start, affine, device, poisoned):
    """x begins at any element of its storage; weight and bias absent, or of another type."""
    shape, groups = SMALL_GROUPS[name]
    x = torch.randn(start + math.prod(shape), device=device, dtype=torch.bfloat16)[start:].view(shape)
    dy = torch.randn_like(x)
    parameters = [] if affine is None else [torch.randn(shape[1], device=device, dtype=affine) for _ in "wb"]

    def norm(op):
        return lambda x, *parameters: op(x, groups, *parameters)

    mine = run_both_ways(norm(OPS.group_norm), dy, x, *parameters)
    exact = run_both_ways(norm(F.group_norm), dy, x.double(), *(t.double() for t in parameters))
    plain = run_both_ways(norm(F.group_norm), dy, x, *(t.to(x.dtype) for t in parameters))
    for result, expected, right in zip(mine, plain, exact, strict=True):
        assert_as_good_as_torch(result, expected.to(result.dtype), right)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["single elements", "vectors", "narrow groups"])
def test_group_norm_small_nonfinite(name, layout, device, poisoned):
    """A NaN or an infinity spoils its group and nothing else."""
    shape, groups = SMALL_GROUPS[name]
    x = torch.randn(shape, device=device)
    x[0, 1].view(-1)[3] = float("nan")
    x[1, -1].view(-1)[-1] = float("inf")
    y = OPS.group_norm(laid_out(x, layout), groups)
    spoiled = y.isnan().reshape(shape[0], groups, -1)
    assert torch.equal(spoiled.any(2), spoiled.all(2))
    assert spoiled.any(2).nonzero().tolist() == [[0, 1 * groups // shape[1]], [1, groups - 1]]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["blocks of all samples", "short rows", "a cluster", "narrow groups"])
def test_group_norm_small_graph(name, layout):
    """Forward and backward, whose second kernel starts beside the first, are captured and replayed."""
    shape, groups = SMALL_GROUPS[name]
    x = laid_out(torch.randn(shape, device="cuda"), layout)
    weight, bias = torch.randn(shape[1], device="cuda"), torch.randn(shape[1], device="cuda")
    dy = torch.randn_like(x)

    def run():
        y, mean, rstd = OPS.group_norm_fwd(x, groups, weight, bias, 1e-5, "silu", "none")
        return y, *OPS.group_norm_backward(dy, x, mean, rstd, groups, weight, bias, "silu", "none")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for t in (x, weight, bias, dy):
        t.copy_(torch.randn_like(t))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(outputs, run(), strict=True))


# channels_last samples that stay on chip on a GPU that can: in clusters below 4 MB, in teams of blocks above.
COLUMNS = {
    "a cluster": ((2, 32, 30, 40), 8),
    "groups of three channels": ((2, 24, 33, 40), 8),
    "C no multiple of a vector": ((2, 6, 32, 34), 2),
    "three channels": ((3, 3, 64, 64), 3),
    "a group a channel": ((2, 40, 20, 24), 40),
    "rows longer than a warp": ((2, 1024, 7, 9), 1),
    "groups of ten channels": ((2, 320, 25, 41), 32),
    "few positions": ((3, 64, 1, 7), 16),
    "teams over columns of a sample": ((3, 128, 52, 61), 8),
    "teams over whole samples": ((6, 24, 101, 120), 8),
    "many samples": ((80, 32, 64, 71), 8),
    "many samples, rows of several positions": ((60, 6, 168, 170), 2),
    "many samples, long rows": ((40, 1000, 19, 21), 25),
    "many samples, a group a channel": ((70, 40, 60, 64), 40),
    "a sample larger than what is kept": ((1, 32, 64, 64, 57), 8),
    "one group of two channels": ((1, 2, 427, 429), 1),
    "one group of odd channels": ((3, 83, 15, 31), 1),
    "passes, samples that start inside a vector": ((3, 5, 303, 423), 5),
    "passes, few odd positions": ((3, 9, 3, 11), 1),
    "passes, odd channels of several groups": ((2, 33, 5, 103), 11),
}


def as_channels_last(x):
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


@pytest.mark.parametrize(
    ("act", "pre_act"), [("none", "none"), ("silu", "none"), ("leaky_relu", "none"), ("none", "relu"), ("gelu", "none")]
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", COLUMNS)
def test_group_norm_columns(name, dtype, act, pre_act, device, poisoned):
    shape, groups = COLUMNS[name]
    shape = norm_shape(shape, device)
    x, weight, bias = make(shape, dtype, device, scale=2.0, offset=1.0)
    x = as_channels_last(x)
    y, mean, rstd = OPS.group_norm_fwd(x, groups, weight, bias, 1e-5, act, pre_act)
    assert y.stride() == x.stride()
    exact = reference.group_norm_ref(x.double(), groups, weight.double(), bias.double(), act=act, pre_act=pre_act)
    plain = reference.group_norm_ref(x, groups, weight, bias, act=act, pre_act=pre_act)
    assert_as_good_as_torch(y, plain, exact)
    again = OPS.group_norm_fwd(x, groups, weight, bias, 1e-5, act, pre_act)
    assert all(torch.equal(a, b) for a, b in zip((y, mean, rstd), again, strict=True))


@pytest.mark.parametrize(
    "name",
    ["a cluster", "groups of three channels", "teams over columns of a sample", "many samples, a group a channel"],
)
def test_group_norm_columns_ill_conditioned(name, device, poisoned):
    shape, groups = COLUMNS[name]
    shape = norm_shape(shape, device)
    for scale, offset in ((0.01, 0.0), (3.0, 0.0), (1.0, 100.0), (0.01, 100.0)):
        x, weight, bias = make(shape, torch.float32, device, scale=scale, offset=offset)
        x.view(-1)[0] += 50 * scale  # an outlier where sums might take their shift from
        x = as_channels_last(x)
        exact = F.group_norm(x.double(), groups, weight.double(), bias.double())
        assert_as_good_as_torch(OPS.group_norm(x, groups, weight, bias), F.group_norm(x, groups, weight, bias), exact)


# A shape for each kind of kernel that walks a chain: x is small; in a cluster; in tiles; its rows end inside vectors;
# and for channels_last on chip and not, of channels that fill vectors, half of them, and none.
WALKED = {
    "small": ((2, 24, 9, 15), 8),
    "a cluster": ((2, 24, 61, 64), 3),
    "tiles": ((1, 8, 64, 64, 40), 2),
    "rows off vectors": ((1, 4, 3, 409, 2007), 1),
    "channels of vectors": ((2, 64, 40, 41), 16),
    "channels of half vectors": ((2, 20, 31, 62), 5),
    "odd channels and positions": ((3, 15, 71, 73), 5),
    "narrow groups": ((13, 34, 25, 7), 17),
    "few narrow groups": ((2, 357, 14, 52), 51),
}


@pytest.mark.gpu
@pytest.mark.parametrize("act", [*list(reference.ACTIVATIONS)[1:], "tanh+hardswish", "silu+relu+mish"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WALKED)
def test_group_norm_walks_every_activation(name, layout, act):
    shape, groups = WALKED[name]
    # Rounded at an offset, some values come to lie on the other side of a kink.
    has_kink = any(kinked in act for kinked in ("relu", "hard"))
    for dtype, scale, offset in (
        (torch.float32, 1.0, 0.0),
        (torch.float32, 3.0, 0.0 if has_kink else 100.0),
        (torch.bfloat16, 1.0, 0.0),
        (torch.float16, 0.01, 0.0),
    ):
        tensors = make(shape, dtype, "cuda", layout, scale, offset)
        dy = torch.randn_like(tensors[0])

        def ours(x, w, b):
            return OPS.group_norm_fwd(x, groups, w, b, 1e-5, act, "none")[0]

        def plain(x, w, b):
            return reference.group_norm_ref(x, groups, w, b, act=act)

        results = run_both_ways(ours, dy, *tensors)
        for mine, torchs, exact in zip(
            results,
            run_both_ways(plain, dy, *tensors),
            run_both_ways(plain, dy, *(t.double() for t in tensors)),
            strict=True,
        ):
            assert_as_good_as_torch(mine, torchs, exact)
        again = run_both_ways(ours, dy, *tensors)
        assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
        tensors[0][(0,) * len(shape)] = float("nan")
        assert torch.equal(ours(*tensors).isnan(), plain(*tensors).isnan())


# channels_last x and dy whose samples stay on chip together, from 256 KB to 20 MB.
COLUMNS_OF_TWO = {
    "groups of three channels": ((5, 24, 101, 120), 8),
    "C no multiple of a vector": ((2, 6, 168, 170), 2),
    "a group a channel": ((2, 40, 60, 64), 40),
    "rows longer than a warp": ((3, 1024, 23, 29), 1),
    "groups of ten channels": ((3, 320, 33, 41), 32),
    "many samples": ((80, 32, 64, 71), 8),
    "one sample": ((1, 64, 100, 101), 16),
    "one sample, read again from L2": ((1, 128, 200, 200), 8),
    "passes, samples that start inside a vector": ((3, 5, 303, 423), 5),
    "passes, one group of odd channels": ((2, 3, 411, 413), 1),
    "three samples, half types again from L2": ((3, 128, 180, 190), 8),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("act", "pre_act"),
    [("none", "none"), ("relu", "none"), ("silu", "none"), ("leaky_relu", "none"), ("none", "relu"), ("gelu", "none")],
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", COLUMNS_OF_TWO)
def test_group_norm_columns_backward(name, dtype, act, pre_act, poisoned):
    device = "cuda"
    shape, groups = COLUMNS_OF_TWO[name]

    def ours(x, w, b):
        return OPS.group_norm_fwd(x, groups, w, b, 1e-5, act, pre_act)[0]

    def plain(x, w, b):
        return reference.group_norm_ref(x, groups, w, b, act=act, pre_act=pre_act)

    for scale, offset in ((1.0, 0.0), (3.0, 100.0)):
        x, *params = make(shape, dtype, device, scale=scale, offset=offset)
        tensors = as_channels_last(x), *params
        doubles = [t.double() for t in tensors]
        dy = away_from_kink(torch.randn(shape, device=device), doubles, groups, act, pre_act)
        dy = as_channels_last(dy.to(dtype))
        mine = gradients_of(ours, dy, *tensors)
        assert mine[0].stride() == dy.stride()
        exact = gradients_of(plain, dy, *doubles)
        for result, expected, right in zip(mine, gradients_of(plain, dy, *tensors), exact, strict=True):
            assert_as_good_as_torch(result, expected, right)
        assert all(torch.equal(a, b) for a, b in zip(mine, gradients_of(ours, dy, *tensors), strict=True))


# Samples whose blocks keep chunks in registers, and such that are read again: two slabs, one, and more than a few.
HELD = {
    "two samples read again": ((2, 32, 90, 91, 110), 8),
    "one sample read again, odd rows": ((1, 64, 803, 811), 16),
    "samples that stay": ((40, 64, 90, 91), 16),
    "samples that stay, in one team": ((9, 128, 30, 31, 33), 8),
}


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["none", "relu", "silu"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", HELD)
def test_group_norm_columns_held(name, dtype, act, poisoned):
    device = "cuda"
    shape, groups = HELD[name]
    x, *params = make(shape, dtype, device, scale=2.0, offset=1.0)
    tensors = as_channels_last(x), *params
    exact = reference.group_norm_ref(tensors[0].double(), groups, *[p.double() for p in params], act=act)
    plain = reference.group_norm_ref(tensors[0], groups, *params, act=act)
    y = OPS.group_norm(tensors[0], groups, *params, 1e-5, act)
    assert_as_good_as_torch(y, plain, exact)
    # What one block overwrites before another has read it shows now and then, and under load.
    for _ in range(20):
        assert torch.equal(y, OPS.group_norm(tensors[0], groups, *params, 1e-5, act))
    dy = as_channels_last(torch.randn(shape, device=device).to(dtype))
    mine = gradients_of(lambda *t: OPS.group_norm_fwd(t[0], groups, *t[1:], 1e-5, act, "none")[0], dy, *tensors)
    for _ in range(10):
        again = gradients_of(lambda *t: OPS.group_norm_fwd(t[0], groups, *t[1:], 1e-5, act, "none")[0], dy, *tensors)
        assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


def test_group_norm_columns_backward_nonfinite(device, poisoned):
    """A NaN in x or dy spoils its group and nothing else; with an infinity in dy, nothing of its group is finite."""
    x, dy = torch.randn(4, 16, 120, 124, device=device), torch.randn(4, 16, 120, 124, device=device)
    x[0, 1, 7, 9] = float("nan")
    dy[1, 6, 0, 0] = float("nan")
    dy[2, 5, 119, 123] = float("inf")
    mine = gradients_of(lambda x: OPS.group_norm(x, 4), as_channels_last(dy), as_channels_last(x))[0]
    theirs = gradients_of(lambda x: F.group_norm(x, 4), dy.cpu(), x.cpu())[0].to(device)
    assert torch.equal(mine.isfinite(), theirs.isfinite())
    assert torch.equal(mine[:2].isnan(), theirs[:2].isnan())


@pytest.mark.parametrize("name", ["a cluster", "teams over columns of a sample"])
def test_group_norm_columns_nonfinite(name, device, poisoned):
    """A NaN or an infinity spoils its group and nothing else."""
    shape, groups = COLUMNS[name]
    x = torch.randn(shape, device=device)
    x[0, 1, 3, 5] = float("nan")
    x[1, -1, 0, 0] = float("inf")
    y = OPS.group_norm(as_channels_last(x), groups)
    spoiled = y.isnan().reshape(shape[0], groups, -1)
    assert torch.equal(spoiled.any(2), spoiled.all(2))
    assert spoiled.any(2).nonzero().tolist() == [[0, 0], [1, groups - 1]]


@pytest.mark.parametrize("name", ["a cluster", "teams over columns of a sample"])
@pytest.mark.parametrize("start", [0, 4, 1])
@pytest.mark.parametrize("affine", [None, torch.float32, torch.bfloat16], ids=str)
def test_group_norm_columns_in_a_view(name, start, affine, device, poisoned):
    """x begins at any element of its storage; weight and bias absent, or of another type."""
    (n, c, h, w), groups = COLUMNS[name]
    base = torch.randn(start + n * c * h * w, device=device, dtype=torch.bfloat16)
    x = base[start:].view(n, h, w, c).permute(0, 3, 1, 2)
    weight, bias = (None, None) if affine is None else (torch.randn(c, device=device, dtype=affine) for _ in "wb")
    y = OPS.group_norm(x, groups, weight, bias, 1e-5, "relu")
    wide = [None if t is None else t.double() for t in (weight, bias)]
    exact = F.relu(F.group_norm(x.double(), groups, *wide))
    same = [None if t is None else t.to(x.dtype) for t in (weight, bias)]
    assert_as_good_as_torch(y, F.relu(F.group_norm(x, groups, *same)), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a cluster", "teams over columns of a sample", "a sample larger than what is kept"])
def test_group_norm_columns_graph(name):
    """The launch, and the memset before it, are captured and replayed."""
    shape, groups = COLUMNS[name]
    x = as_channels_last(torch.randn(shape, device="cuda"))
    OPS.group_norm(x, groups, act="silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = OPS.group_norm(x, groups, act="silu")
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, OPS.group_norm(x, groups, act="silu"))


@pytest.mark.gpu
def test_group_norm_large_groups_graph_and_streams():
    """The cooperative launch is captured, replayed, and shares the GPU with another one."""
    x = torch.randn(4, 16, 128, 130, 16, device="cuda")
    expected = F.silu(F.group_norm(x.double(), 4)).float()
    graph = torch.cuda.CUDAGraph()
    OPS.group_norm(x, 4, act="silu")
    with torch.cuda.graph(graph):
        y = OPS.group_norm(x, 4, act="silu")
    y.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(OPS.group_norm(x, 4, act="silu"))
    torch.cuda.synchronize()
    assert all(torch.equal(r, y) for r in results)


def test_explain_checks_its_arguments(device):
    x = torch.zeros((), device=device).expand(2, 6, 5, 5)
    assert torch.ops.kgopt.explain_group_norm(x, 3, "silu", backward=True)
    with pytest.raises(RuntimeError, match="num_groups"):
        torch.ops.kgopt.explain_group_norm(x, 4)
    with pytest.raises(RuntimeError, match="act"):
        torch.ops.kgopt.explain_group_norm(x, 3, "softmax")
