"""GroupNorm, its statistics and its mean: values, layouts, hard inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kgopt import functional, reference
from norm_gradients import check_both_ways
from shapes import DTYPES, LAYOUTS, NORM_SHAPES, laid_out, make, with_threads
from tolerances import assert_as_good_as_torch

OPS = torch.ops.kgopt
ACTS = [*reference.ACTIVATIONS, *reference.PARAMETRIZED, "tanh+hardswish", "silu+relu+mish", "mul(0.5)+elu(0.7)+add(1)"]


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
    assert y.stride() == x.stride()


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_norm_act(act, layout, device, poisoned):
    x, weight, bias = make((2, 24, 9, 33), torch.float32, device, layout)
    y = functional.group_norm(x, 8, weight, bias, act=act)
    expected = reference.group_norm_ref(x, 8, weight, bias, act=act)
    exact = reference.group_norm_ref(x.double(), 8, weight.double(), bias.double(), act=act)
    assert_as_good_as_torch(y, expected, exact)


@pytest.mark.parametrize("pre_act", ["relu", "silu", "tanh+leaky_relu", "softplus(2,15)+add(-0.5)"])
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


@pytest.mark.parametrize("at", [0, 2048], ids=["first", "at a sample"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_norm_of_an_outlier(layout, at):
    """One value of 1e4 among those whose mean served as the shift cost 1.4 digits: 24 times PyTorch's error."""
    x, weight, bias = make((2, 8, 32, 64), torch.float32, "cpu", "contiguous")
    x.view(2, 4, -1)[:, :, at] = 1e4
    x = laid_out(x, layout)
    exact = F.group_norm(x.double(), 4, weight.double(), bias.double())
    assert_as_good_as_torch(OPS.group_norm(x, 4, weight, bias), F.group_norm(x, 4, weight, bias), exact)
    _, rstd = OPS.group_stats(x, 4)
    _, exact_rstd = reference.group_stats_ref(x.double(), 4)
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=4e-7, atol=0)


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

    one, three = with_threads(run, 1), with_threads(run, 3)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


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

    def ours(x, weight, bias):
        return OPS.group_norm_fwd(x, groups, weight, bias, 1e-5, act, pre_act)[0]

    def plain(x, weight, bias):
        return reference.group_norm_ref(x, groups, weight, bias, act=act, pre_act=pre_act)

    check_both_ways(ours, plain, dy, x, weight, bias)


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
@pytest.mark.parametrize("act", [act for act in ACTS[1:] if "shrink" not in act])  # which has kinks where values are
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WALKED)
def test_group_norm_walks_every_activation(name, layout, act):
    shape, groups = WALKED[name]
    # Rounded at an offset, some values come to lie on the other side of a kink.
    has_kink = any(kinked in act for kinked in ("relu", "hard", "clamp", "threshold", "shrink", "elu"))
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

        check_both_ways(ours, plain, dy, *tensors)
        tensors[0][(0,) * len(shape)] = float("nan")
        assert torch.equal(ours(*tensors).isnan(), plain(*tensors).isnan())


def test_explain_checks_its_arguments(device):
    x = torch.zeros((), device=device).expand(2, 6, 5, 5)
    assert torch.ops.kgopt.explain_group_norm(x, 3, "silu", backward=True)
    assert functional.explain_group_norm(x, 3, "silu", backward=True)
    with pytest.raises(RuntimeError, match="num_groups"):
        torch.ops.kgopt.explain_group_norm(x, 4)
    with pytest.raises(RuntimeError, match="act"):
        torch.ops.kgopt.explain_group_norm(x, 3, "softmax")
