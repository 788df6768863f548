"""Gradients of resampling in captured graphs (rewrite/captured/passes/resampled.py), beside those of eager PyTorch."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from kgopt.rewrite.captured import passes
from kgopt.rewrite.captured.passes.resampled import resampled

MODES = [("nearest", 1), ("nearest", 2), ("nearest-exact", 3), ("linear", 1), ("bilinear", 2), ("trilinear", 3)]


def taken(x, *args, **kwargs):
    """What a call of F.interpolate becomes; None: it stays."""
    node = fx.Graph().placeholder("x")
    node.meta["example_value"] = x
    return passes.resampled._arguments(node, *args, **kwargs)


def drawn(mode, rank, seed):
    """A call: sizes of x, and the arguments of F.interpolate."""
    rng = random.Random(f"{mode} {rank} {seed}")
    sizes = [rng.randint(1, 13) for _ in range(rank)]
    align = None if mode.startswith("nearest") else rng.random() < 0.5
    if rng.random() < 0.5:
        return sizes, ([rng.choice([n, 2 * n, rng.randint(1, 27)]) for n in sizes], None, mode, align)
    factors = [rng.choice([1.0, 2.0, 3.0, 0.5, 1.5, rng.uniform(0.3, 4)]) for _ in sizes]
    return sizes, (None, factors, mode, align)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("mode", "rank"), MODES)
def test_gradients_are_eager_ones(mode, rank, seed):
    sizes, (size, factors, *rest) = drawn(mode, rank, seed)
    x = torch.randn(2, 3, *sizes, dtype=torch.float64, requires_grad=True)
    if factors is not None and min(int(n * f) for n, f in zip(sizes, factors, strict=True)) < 1:
        assert taken(x, size, factors, *rest) is None
        return
    y = F.interpolate(x, size, factors, *rest)
    if taken(x, size, factors, *rest) is None:
        # By a factor that is not that of the sizes compiled code and eager kernels read other positions.
        assert factors is not None or max(y.shape[i] / x.shape[i] for i in range(2, 2 + rank)) > 6
        return
    dy = torch.randn_like(y)
    ours = resampled(x, size, factors, *rest)
    torch.testing.assert_close(ours, y)
    (got,), (expected,) = torch.autograd.grad(ours, x, dy), torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_most_draws_are_taken():
    found = []
    for mode, rank in MODES:
        for seed in range(40):
            sizes, args = drawn(mode, rank, seed)
            found.append(taken(torch.empty(1, 1, *sizes), *args) is not None)
    assert sum(found) > 0.6 * len(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_half_precision_is_summed_in_float(dtype, mode):
    args = (None, [4.0, 4.0], mode, None if mode == "nearest" else False)
    x = torch.zeros(1, 2, 5, 6, dtype=dtype, requires_grad=True)
    dy = torch.randn(1, 2, 20, 24).to(dtype)
    (got,) = torch.autograd.grad(resampled(x, *args), x, dy)
    wide = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.interpolate(wide, *args), wide, dy.double())
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: taken(x, None, 2.0, "bicubic"), id="bicubic"),
        pytest.param(lambda x: taken(x, None, 2.0, "area"), id="area"),
        pytest.param(lambda x: taken(x, None, 2.0, "bilinear", False, None, True), id="antialias"),
        pytest.param(lambda x: taken(x, None, 2.0, "nearest", None, True), id="recomputed scale"),
        pytest.param(lambda x: taken(x, (8, 8), 2.0), id="both"),
        pytest.param(lambda x: taken(x, None, 1.01), id="a factor that changes no size"),
        pytest.param(lambda x: taken(x, None, 32.0, "bilinear"), id="far up"),
        pytest.param(lambda x: taken(x, None, 0.01), id="nothing left"),
        pytest.param(lambda x: taken(x, None, 2.0, "trilinear"), id="another rank"),
        pytest.param(lambda x: taken(x.int(), None, 2.0), id="integers"),
    ],
)
def test_what_stays(call):
    assert call(torch.zeros(1, 2, 5, 6)) is None


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 191])
def test_a_position_of_what_is_doubled_has_four_terms(size, align_corners):
    """Counted by the ratio of the last positions there were five with ``align_corners``."""
    plan = passes.resampled.along("bilinear", align_corners, size, 2 * size, None)
    assert plan.terms <= 4
    assert plan.begin(0) >= 0


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("factor", [2.0, 3.0, 4.0, 5.0])
def test_constant_weights(size, factor):
    """Linear by a whole factor: the weights that are computed from each position, the ends included."""
    plan = passes.resampled.along("bilinear", False, size, int(size * factor), factor)
    assert plan.is_regular
    position = torch.arange(size)
    for k in range(plan.first, plan.first + plan.terms):
        result = plan.begin(position) + k
        inside = (result >= 0) & (result < plan.results)
        expected = torch.where(inside, passes.resampled._weight(plan, position, result, torch.float64), 0)
        got = passes.resampled._constant_weight(plan, position, k, torch.float64)
        got = got if isinstance(got, torch.Tensor) else torch.full_like(expected, got)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("sizes", [(10, 12), (6, 10, 8)])
def test_formats(sizes, align_corners):
    """The sums are the same however the gradient lies, or will lie."""
    mode, half = ("bilinear", "trilinear")[len(sizes) - 2], [s // 2 for s in sizes]
    plans = [passes.resampled.along(mode, align_corners, *pair, None) for pair in zip(half, sizes, strict=True)]
    dy = torch.randn(2, 3, *sizes, dtype=torch.float64)
    expected = passes.resampled.gathered(dy, plans)
    last = dy.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[len(sizes) - 2])
    for got in (passes.resampled.gathered(dy, plans, last=True), passes.resampled.gathered(last, plans)):
        torch.testing.assert_close(got, expected)
    assert expected.is_contiguous()
    assert passes.resampled.gathered(last, plans).movedim(1, -1).is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rank", [2, 3])
def test_passes_over_memory(rank, last, align_corners):
    """Two dims make one kernel, which does not transpose: its grid has one dim."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    mode, size = ("bilinear", "trilinear")[rank - 2], 32
    plans = [passes.resampled.along(mode, align_corners, size, 2 * size, None)] * rank
    dy = torch.randn(2, 16, *[2 * size] * rank, device="cuda", dtype=torch.bfloat16)
    if last:
        dy = dy.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[rank - 2])
    run = torch.compile(lambda dy: passes.resampled.gathered(dy, plans), dynamic=False)
    dx, (code,) = run_and_get_code(run, dy)
    assert code.count("@triton.jit") == rank - 1
    assert "YBLOCK" not in code
    exact = passes.resampled.gathered(dy.double(), plans)
    torch.testing.assert_close(dx.double(), exact, rtol=1e-2, atol=1e-2)


class Net(nn.Module):
    """An upsampling in each mode, as a U-Net has them."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        conv, self.pool = ((nn.Conv2d, nn.MaxPool2d(2)), (nn.Conv3d, nn.MaxPool3d(2)))[rank - 2]
        self.first, self.norm, self.last = conv(2, 4, 3, padding=1), nn.GroupNorm(2, 4), conv(8, 2, 1)
        self.up, self.linear = nn.Upsample(scale_factor=2), ("bilinear", "trilinear")[rank - 2]

    def forward(self, x):
        h = F.silu(self.norm(self.first(x)))
        down = self.pool(h)
        wide = F.interpolate(down, size=h.shape[2:], mode=self.linear, align_corners=True)
        other = F.interpolate(self.pool(down), scale_factor=4, mode=self.linear)
        return self.last(torch.cat([h + self.up(down), wide + other], 1))


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_code_adds_without_atomics(device, rank, last):
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch._dynamo.reset()
    model = Net(rank).to(device)
    expected = copy.deepcopy(model)
    x = torch.randn(2, 2, *([16, 8, 12][:rank]), device=device)
    if last:
        x = x.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[rank - 2])
    x.requires_grad_()
    options = {"kgopt.always": True, "kgopt.cuda_graph": False}
    run = torch.compile(model, backend="kgopt", dynamic=False, options=options)
    _, codes = run_fw_bw_and_get_code(lambda: run(x).square().sum())
    assert not [code for code in codes if "atomic_add(" in code or "aten.index_put" in code.replace("# ", "")]
    model.zero_grad(), setattr(x, "grad", None)
    twin = x.detach().clone().requires_grad_()
    run(x).square().sum().backward(), expected(twin).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=2e-3, atol=2e-3)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=5e-3, atol=5e-3)


def test_inference_and_unknown_sizes_stay():
    class Up(nn.Module):
        def forward(self, x):
            return F.interpolate(x * 2, scale_factor=2)

    def names(grad, dynamic):
        found = []

        def note(graph, inputs):
            found.extend(passes.resampled.swap(graph, True))
            return graph

        torch._dynamo.reset()
        with torch.set_grad_enabled(grad):
            torch.compile(Up(), backend=note, dynamic=dynamic)(torch.randn(1, 2, 5, 6, requires_grad=grad))
        return found

    assert names(True, False)
    assert not names(False, False)
    assert not names(True, True)
