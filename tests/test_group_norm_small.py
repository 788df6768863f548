"""GroupNorm of small tensors (csrc/groupnorm/small)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kgopt import reference
from norm_gradients import check_both_ways, run_both_ways
from shapes import DTYPES, LAYOUTS, laid_out, make
from tolerances import assert_all_as_good, assert_as_good_as_torch

OPS = torch.ops.kgopt

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

    check_both_ways(ours, plain, dy, x, weight, bias)


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
    assert_all_as_good(mine, (theirs.to(own.dtype) for own, theirs in zip(mine, plain, strict=True)), exact)


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
