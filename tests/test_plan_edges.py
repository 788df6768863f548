"""Plans at the edges of what they can serve: sizes of 0 to 3, primes, both sides of every tile.

A plan that cannot serve a shape refuses it with a reason; none divides by something that it counted to zero.
"""

from __future__ import annotations

import collections
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import plan_cases

dev = pytest.importorskip("kgopt_dev", reason="the developer module is not built: make dev-module")

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 31, 64, 65)


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_divides_by_zero(seed):
    """Division by zero in host code ends the process: the plans of an empty tensor did, the backward's of channels_last
    rows on a GPU with fewer multiprocessors than samples, and the launcher of the third pipeline's backward with fewer
    channels than a vector has."""
    done = subprocess.run(
        [sys.executable, plan_cases.__file__, str(Path(dev.__file__).parent), str(seed), "150"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    last = done.stdout.rstrip().rpartition("\n")[2]
    assert done.returncode == 0, f"exit status {done.returncode} at {last}\n{done.stderr}"
    assert last == "done"


EMPTY = [
    {"n": 0},
    {"c_in": 0},
    {"c_out": 0},
    {"input": (1, 0, 8)},
    {"output": (1, 6, 0)},
]


@pytest.mark.parametrize("changed", EMPTY, ids=str)
@pytest.mark.parametrize("name", [n for n in plan_cases.CONV_PLANS if n != "predict_conv"])
def test_plans_of_convolutions_refuse_empty_tensors(name, changed):
    sizes = {"n": 2, "c_in": 16, "c_out": 16, "input": (1, 8, 8), "output": (1, 6, 6), "kernel": (1, 3, 3), **changed}
    for planar in (False, True):
        problem = dev.ConvProblem(**sizes, planar=planar, channels_innermost=not planar, dtype="bfloat16")
        assert getattr(dev, name)(problem).refusal == "a tensor has no elements"
        choice = dev.choose_conv(problem)
        assert choice.path == dev.ConvPath.aten


@pytest.mark.parametrize("shape", [(0, 8, 64, 2), (2, 0, 64, 1), (2, 8, 0, 2)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("tensors", [1, 2])
def test_plans_of_norms_refuse_empty_tensors(shape, channels_last, tensors):
    kinds = {"tensors": tensors, "channels_last": channels_last}
    for name in ("tiles", "alone", "cluster", "rows", "columns"):
        assert "refusal" in getattr(dev, f"plan_group_norm_{name}")(*shape, **kinds), name
    assert "refusal" in dev.plan_group_norm_small(*shape, backward=tensors == 2, channels_last=channels_last)
    assert "refusal" in dev.plan_group_norm_slab(*shape, channels_last=channels_last)
    assert dev.choose_group_norm(*shape, **kinds)["family"] == "passes"
    assert "refusal" in dev.plan_norm_lse_backward(*shape[:3], channels_last=channels_last)


def test_second_pipelines_kernel_leaves_large_batches_to_others():
    """Its samples are layers of a grid, of which there are 65535: larger batches were an error of the launch."""
    for n, refused in ((64000, False), (65535, True), (70000, True)):
        problem = dev.ConvProblem(
            n=n,
            c_in=16,
            c_out=16,
            input=(4, 4, 8),
            output=(6, 6, 10),
            kernel=(3, 3, 3),
            transposed=True,
            epilogue=dev.ConvEpilogue.store_stats,
            dtype="bfloat16",
        )
        plan = dev.plan_transposed_norm(problem)
        assert (plan.refusal is not None and "samples" in plan.refusal) == refused, plan.refusal


def share_elements(plan, c, s, channels_last):
    """How often the pass that fills the shares reads each (channel, position) of a sample."""
    reads = collections.Counter()
    vector = plan["vector"]
    if not channels_last:  # a block has all channels of a vector of positions for each of 32 lanes
        tile = 32 * vector
        for block, lane in itertools.product(range(plan["share_blocks"]), range(32)):
            at = block * tile + lane * vector
            if at < s:
                reads.update((channel, at + j) for channel in range(c) for j in range(vector))
        return reads
    lanes, steps = plan["share_lanes"], dev.LSE_POSITION_STEPS
    walkers = dev.TRAVERSE_THREADS // lanes
    for piece in range(plan["share_slices"]):
        begin = piece * plan["share_slice_length"]
        end = min(begin + plan["share_slice_length"], s)
        for base in range(begin, end, walkers * steps):
            for step, walker, lane in itertools.product(range(steps), range(walkers), range(lanes)):
                position = base + walker + step * walkers
                if position < end:
                    for channel in range(lane * vector, c, lanes * vector):
                        reads.update((channel + j, position) for j in range(vector))
    return reads


def pass_elements(plan, c, s, channels_last):
    """The same of the passes for the sums and for dx."""
    reads = collections.Counter()
    vector, threads = plan["vector"], dev.TRAVERSE_THREADS
    units = plan["channel_blocks"] if channels_last else -(-c // dev.LSE_CHANNEL_STEPS)
    assert plan["blocks"] == units * plan["slices"]
    for unit, piece in itertools.product(range(units), range(plan["slices"])):
        begin = piece * plan["slice_length"]
        end = min(begin + plan["slice_length"], s)
        if not channels_last:
            channels = range(unit * dev.LSE_CHANNEL_STEPS, min((unit + 1) * dev.LSE_CHANNEL_STEPS, c))
            for thread in range(threads):
                for at in range(begin + thread * vector, end, threads * vector):
                    reads.update((channel, at + j) for channel in channels for j in range(vector))
            continue
        for lane, walker in itertools.product(range(plan["lanes"]), range(plan["walkers"])):
            channel = (unit * plan["lanes"] + lane) * vector
            if channel < c:
                for position in range(begin + walker, end, plan["walkers"]):
                    reads.update((channel + j, position) for j in range(vector))
    return reads


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("aligned", [False, True])
def test_norm_lse_backward_reads_every_element_once(channels_last, dtype, aligned):
    """With 1 to 3 channels and positions in whole vectors, the geometry of channels_last tensors was computed for
    contiguous ones, too: of vectors of channels, of which there were none, and the process died dividing by them."""
    for c, s in itertools.product(SIZES, SIZES):
        plan = dev.plan_norm_lse_backward(1, c, s, dtype, channels_last, aligned, 4)
        assert "refusal" not in plan
        assert plan["vector"] in ((1, 4) if aligned and dtype != "float64" else (1,))
        assert (c if channels_last else s) % plan["vector"] == 0
        assert plan["slice_length"] % plan["vector"] == 0 or channels_last, "vectors across two slices"
        assert plan["lanes"] * plan["walkers"] <= dev.TRAVERSE_THREADS
        once = collections.Counter(itertools.product(range(c), range(s)))
        assert share_elements(plan, c, s, channels_last) == once, (c, s)
        assert pass_elements(plan, c, s, channels_last) == once, (c, s)


def test_column_walk_reads_every_element_once():
    """Rows of channels that fill no vectors are walked several at a time."""
    for c, s, vector, aligned in itertools.product(SIZES, (*SIZES, 1000), (1, 2, 4, 8), (False, True)):
        walk = dev.plan_column_walk(2, c, s, vector, aligned, 4)
        channels, slices = c * walk["turns"], walk["slices"] // walk["turns"]
        size = vector if channels % vector == 0 else 1
        assert walk["turns"] == 1 or aligned
        assert walk["lanes"] * walk["walkers"] <= dev.TRAVERSE_THREADS
        covered = walk["channel_blocks"] * walk["lanes"] * size
        assert covered >= channels > covered - walk["lanes"] * size, "a block of channels without one, or one too few"
        assert walk["rows"] * channels >= c * s
        assert slices * walk["slice_length"] >= walk["rows"] > (slices - 1) * walk["slice_length"]


def test_reduction_reads_every_element_once():
    sizes = (1, 3, 300), (1, 2, 3, 31, 1000, 70000), (1, 2, 3, 33, 64, 300, 1 << 20)
    for outer, reduced, inner, element_size in itertools.product(*sizes, (2, 4, 8)):
        plan = dev.plan_reduction(outer, reduced, inner, 4, element_size)
        vector = 1 if element_size == 8 else 16 // element_size
        vector = vector if (inner if inner > 1 else reduced) % vector == 0 else 1
        assert plan["vector"] == vector
        assert inner > 1 or plan["slices"] == 1 or plan["slice_length"] % vector == 0, "an access that is not aligned"
        along_inner, along_reduced, along_outer = plan["threads"]
        assert along_inner * along_reduced * along_outer == 256
        inner_blocks, outer_blocks = plan["blocks"]
        step = along_inner * (vector if inner > 1 else 1)
        assert inner_blocks * step >= inner > (inner_blocks - 1) * step
        assert outer_blocks * along_outer >= outer > (outer_blocks - 1) * along_outer
        assert plan["slices"] * plan["slice_length"] >= reduced > (plan["slices"] - 1) * plan["slice_length"]


def test_norm_conv1x1_refuses_what_has_no_whole_vectors():
    """No channels were taken for a power of 2 of vectors, and the launcher divided by it."""
    for dtype, size in (("float32", 4), ("bfloat16", 8)):
        for c in (*SIZES, 0, 128, 256, 512):
            plan = dev.plan_norm_conv1x1(2, c, 1000, 3, dtype)
            lanes = c // size
            runs = c % size == 0 and lanes in (1, 2, 4, 8, 16, 32)
            assert ("refusal" not in plan) == runs, (dtype, c)
            if runs:
                assert 1 <= plan["blocks"] <= -(-1000 // (128 // lanes * 4))
    assert "refusal" in dev.plan_norm_conv1x1(0, 32, 1000, 3)
    assert "refusal" in dev.plan_norm_conv1x1(2, 32, 0, 3)
