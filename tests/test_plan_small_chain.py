"""Plans of small pipelines in one launch (csrc/conv3d/small_chain)."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_problems import DTYPES, check_refusal, dev, extents, make_problem


def check_chain_plan(plan, case: dict, output, limits) -> None:
    """Every block has the halo of its outputs, and shared memory holds what the kernel puts there."""
    assert plan.blocks == math.prod(plan.split)
    if plan.is_team:
        assert plan.blocks > 16
        assert case["n"] * plan.blocks <= limits.sm_count, "all blocks run at a time"
    else:
        assert plan.blocks in (1, 2, 4, 8, 16)
        assert plan.blocks <= limits.cluster_blocks
    assert plan.threads in (256, 512)
    most = [0, 0, output[2]]
    for dim in range(2):
        bounds = [output[dim] * i // plan.split[dim] for i in range(plan.split[dim] + 1)]
        tiles = [b - a for a, b in itertools.pairwise(bounds)]
        assert min(tiles) >= 1, "a block without outputs would have no moments"
        most[dim] = max(tiles)
    for dim in range(3):
        reach = (most[dim] - 1) * case["stride"][dim] + (case["kernel"][dim] - 1) * case["dilation"][dim] + 1
        assert plan.halo[dim] == reach
    assert plan.plane >= math.prod(plan.halo)
    assert plan.plane % 32 == 8
    lanes = 1 << plan.row_lanes_log2
    assert lanes <= 32
    assert plan.pieces * lanes >= plan.halo[2] > (plan.pieces - 1) * lanes
    groups = case.get("groups", 1)
    loads = case["c_in"] * plan.halo[0] * plan.halo[1] * plan.pieces * lanes
    assert plan.load_rounds * plan.threads * dev.CHAIN_LOADS >= loads
    assert plan.k == case["c_in"] // groups * math.prod(case["kernel"])
    assert plan.k_steps == -(-plan.k // 8)
    assert plan.n_tiles == -(-(case["c_out"] // groups) // 8)
    weights = groups * plan.n_tiles * plan.k_steps * 64
    assert plan.load_rounds * plan.threads * dev.CHAIN_WEIGHTS >= weights
    positions = math.prod(most)
    assert plan.chunk % 16 == 0
    assert plan.chunk * plan.chunks >= positions > plan.chunk * (plan.chunks - 1)
    assert plan.chunk_pitch >= plan.chunk
    assert plan.chunk_pitch % 32 == 8
    units = case["c_out"] * plan.stat_parts << plan.stat_lanes_log2
    assert plan.stat_lanes_log2 <= 5
    assert plan.stat_parts == 1 or units <= plan.threads, "a part of a channel has its threads"
    assert plan.lanes_log2 <= 5
    words = case["c_out"] * plan.chunk_pitch + case["c_in"] * plan.plane + weights
    assert 4 * words < plan.smem_bytes <= limits.smem_per_block
    assert plan.cycles > 0


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_chain_plan_of_any_shape(data) -> None:
    draw = data.draw
    three = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(3))  # noqa: E731
    case = {"kernel": three(1, 5), "stride": three(1, 3), "padding": three(0, 4), "dilation": three(1, 3)}
    lse = draw(st.booleans())
    size = three(1, 70)
    if lse:
        size, case["kernel"], case["padding"] = (1, *size[1:]), (1, *case["kernel"][1:]), (0, *case["padding"][1:])
    outputs = [dev.conv_out_size(*dim) for dim in zip(size, *(case[k] for k in case), strict=True)]
    if min(outputs) < 1:
        return
    case["groups"] = draw(st.sampled_from([1, 1, 2, 3]))
    case["c_in"] = case["groups"] * draw(st.integers(1, 20))
    case["c_out"] = case["groups"] * draw(st.integers(1, 60))
    case["epilogue"] = dev.ConvEpilogue.residual_lse if lse else dev.ConvEpilogue.stats
    case["n"] = draw(st.sampled_from([1, 2, 3, 7, 50, 200]))
    problem, output = make_problem(
        size=size,
        **case,
        dtype=draw(st.sampled_from(DTYPES)),
        allow_tf32=draw(st.booleans()),
        planar=True,
        norm_groups=1,
    )
    limits = dev.DeviceLimits(cluster_blocks=draw(st.sampled_from([8, 16])))
    plan = dev.plan_chain(problem, limits)
    # What all blocks have together, in half of what one may have.
    dims = zip(output, case["stride"], extents(case["kernel"], case["dilation"]), strict=True)
    halo = math.prod((positions - 1) * stride + extent for positions, stride, extent in dims)
    weights = case["c_in"] // case["groups"] * case["c_out"] * math.prod(case["kernel"])
    fits = 4 * (case["c_out"] * math.prod(output) + case["c_in"] * halo + weights) <= 96 << 10
    if check_refusal(plan.refusal, {"does not fit in the shared memory of its blocks": False if fits else None}):
        return
    check_chain_plan(plan, case, output, limits)


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        ("9.0", {}, dev.DeviceLimits(has_wgmma=False)),
        ("9.0", {}, dev.DeviceLimits(cluster_blocks=0)),
        ("GroupNorm", {"norm_groups": 0}, None),
        ("no elements", {"n": 0}, None),
        ("transposed", {"transposed": True}, None),
        ("float64", {"dtype": "float64"}, None),
        ("mean", {"epilogue": dev.ConvEpilogue.store}, None),
        ("depth", {"epilogue": dev.ConvEpilogue.residual_lse}, None),
        ("no elements", {"c_out": 0}, None),
        ("1024", {"c_out": 1032}, None),
        ("weights", {"c_in": 512}, None),
        ("shared memory of its blocks", {"size": (80, 170, 170)}, None),
        ("too large", {"stride": (1, 1, 1 << 25), "size": (8, 9, 200)}, None),
    ],
)
def test_chain_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    arguments = {"c_in": 4, "c_out": 24, "size": (8, 9, 10), "kernel": (3, 3, 3), "epilogue": dev.ConvEpilogue.stats}
    problem, _ = make_problem(**{**arguments, "norm_groups": 8, **kwargs})
    assert fragment in dev.plan_chain(problem, limits or dev.DeviceLimits()).refusal
