"""GroupNorm of groups that stay on chip: in a team's registers, in a block, in a cluster (csrc/groupnorm/cluster)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kgopt import reference
from norm_gradients import check_both_ways
from shapes import DTYPES, make
from tolerances import assert_as_good_as_torch

OPS = torch.ops.kgopt

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

    def ours(x, w, b):
        return OPS.group_norm_fwd(x, groups, w, b, 1e-2, act, pre_act)[0]

    def plain(x, w, b):
        return reference.group_norm_ref(x, groups, w, b, eps=1e-2, act=act, pre_act=pre_act)

    check_both_ways(ours, plain, dy, x, weight, bias)


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
