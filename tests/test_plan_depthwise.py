"""Plans of depthwise convolutions and their gradients, and their choice (csrc/conv3d/depthwise)."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_problems import DTYPES, GPUS, check_refusal, dev, make_problem

UP = {dev.DepthwiseMode.gather1: 1, dev.DepthwiseMode.gather2: 1, dev.DepthwiseMode.scatter2: 2}
STEP = {dev.DepthwiseMode.gather1: 1, dev.DepthwiseMode.gather2: 2, dev.DepthwiseMode.scatter2: 1}
NEVER = {"no tile fits": False, "2^30": False, "2^28": False, "float64": False}
REGISTERS = 128  # that a thread may have
MOST_PHASES = 32


def draw_problem(draw, fast: bool = False):
    """A depthwise convolution, and its case; None where it gives nothing. `fast`: of a kernel with tiles."""
    rank, transposed = draw(st.sampled_from([2, 3])), draw(st.booleans())
    if fast or draw(st.booleans()):
        k, s = draw(st.sampled_from([3, 5, 7])), draw(st.sampled_from([1, 2]))
        kernel, stride = (k,) * 3, (s,) * 3
        dilation = (1,) * 3 if s == 2 or draw(st.booleans()) else tuple(draw(st.integers(1, 3)) for _ in range(3))
    else:
        kernel, stride, dilation = (tuple(draw(st.integers(1, most)) for _ in range(3)) for most in (6, 3, 3))
    size = [draw(st.integers(1, 40)), draw(st.integers(1, 200)), draw(st.integers(1, 300))]
    padding = [draw(st.integers(0, k)) for k in kernel]
    if rank == 2:
        size[0], padding[0] = 1, 0
        kernel, stride, dilation = (1, *kernel[1:]), (1, *stride[1:]), (1, *dilation[1:])
    case = dict(size=tuple(size), kernel=kernel, stride=stride, padding=tuple(padding), dilation=dilation)
    sizes = zip(size, kernel, stride, padding, dilation, strict=True)
    if min(dev.conv_out_size(*dim, transposed) for dim in sizes) < 1:
        return None
    c_in, copies = draw(st.integers(2, 200)), draw(st.sampled_from([1] if fast else [1, 1, 2, 3]))
    more = dict(n=draw(st.integers(1, 40)), groups=c_in, transposed=transposed, dtype=draw(st.sampled_from(DTYPES)))
    planar = draw(st.booleans())
    problem, output = make_problem(
        c_in, c_in * copies, **case, **more, planar=planar, channels_innermost=not planar and c_in % 8 == 0
    )
    return problem, case, more, c_in, copies, planar, output


def phases_of(case, scatter: bool = False):
    """As many a dim as it is dilated; None where that is refused."""
    pairs = list(zip(case["kernel"], case["dilation"], strict=True))
    phases = [d if k > 1 else 1 for k, d in pairs]
    if any(d > 1 and (s > 1 or scatter) for d, s in zip(phases, case["stride"], strict=True)):
        return None
    return phases if math.prod(phases) <= MOST_PHASES else None


def check_tile(tile, lanes: int, depth: int, neighbours: int) -> None:
    """Rows have slots of their own, threads that read at the same time other banks, and divisions are exact."""
    assert tile.pitch >= tile.span + 2 * tile.slack
    assert tile.pitch % 2 == 1, "neighbouring rows meet the same banks"
    slots = tile.plane // (tile.pitch * lanes)
    assert slots >= tile.rows
    assert tile.step <= tile.rows
    assert tile.all_rows == tile.rows * tile.planes * depth
    if lanes == 1:
        assert tile.plane % 32 == neighbours * tile.pitch % 32, "neighbouring planes' rows meet the same banks"
    items = tile.all_rows * max(tile.span, 16) * lanes
    for divisor, factor in tile.divisors:
        assert (factor == 0) == (divisor == 1)
        for value in {0, divisor - 1, divisor, 7 * divisor - 1, items // divisor * divisor, items}:
            if 0 <= value < 1 << 16 and factor:
                assert value * factor >> 32 == value // divisor


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_plan_of_any_shape(data) -> None:
    drawn = draw_problem(data.draw)
    if drawn is None:
        return
    problem, case, more, c_in, copies, planar, output = drawn
    of_dx, gpu = data.draw(st.booleans()), GPUS[data.draw(st.sampled_from(sorted(GPUS)))]
    plan = dev.plan_depthwise(problem, gpu, of_dx)
    kernel, stride, rank_3 = case["kernel"], case["stride"], case["kernel"][0] > 1
    square = kernel[1] == kernel[2] in (3, 5, 7) and stride[1] == stride[2] <= 2
    scatter = more["transposed"] != of_dx
    phases = phases_of(case, scatter and stride != (1, 1, 1))
    if kernel[0] == 1:
        deep = stride[0] == 1 and case["padding"][0] == 0 and (kernel[2] < 7 or stride[2] == 1)
    else:
        deep = kernel[0] == kernel[2] and stride[0] == stride[2]
    reasons = {"not depthwise": copies > 1, "dilation": phases is None, "7 wide": not (square and deep)}
    if check_refusal(plan.refusal, {**NEVER, **reasons}):
        return
    assert plan.phases == phases
    assert plan.lanes == (1 if planar else dev.DEPTHWISE_LANES)
    assert plan.microseconds > 0
    assert 0 < plan.blocks < 1 << 31
    assert 0 < plan.threads <= dev.DEPTHWISE_THREADS
    assert plan.volume == rank_3
    mode = plan.mode
    assert (mode == dev.DepthwiseMode.scatter2) == (scatter and stride[2] == 2)
    up, step, taps = UP[mode], STEP[mode], dev.depthwise_taps(mode, plan.kernel)
    cell_rows = dev.depthwise_cell_rows(mode, plan.volume)
    cell_columns = dev.depthwise_cell_columns(mode, plan.kernel, plan.volume)
    result = case["size"] if of_dx else output
    cells = [dev.depthwise_cells(problem, phases, 0, dim, of_dx) for dim in range(3)]
    result = [-(-size // step) for size, step in zip(result, phases, strict=True)]
    for dim, ((count, _, skew), out) in enumerate(zip(cells, result, strict=True)):
        of_dim = 1 if dim == 0 and not plan.volume else up
        assert count * of_dim - skew >= out, "cells do not reach all outputs"
    planes = plan.input.planes
    assert plan.threads >= plan.rows * plan.groups * planes * plan.lanes
    assert plan.threads % 32 == 0
    assert plan.tiles[0] * plan.rows * cell_rows >= cells[1][0]
    assert plan.tiles[1] * plan.groups * cell_columns >= cells[2][0]
    assert planes == 1 or (planar and plan.tiles == [1, 1])
    assert plan.channel_blocks * (planes if planar else plan.lanes) >= c_in
    assert plan.segments * plan.segment >= cells[0][0]
    assert (plan.segments - 1) * plan.segment < cells[0][0]
    assert plan.blocks == more["n"] * plan.channel_blocks * plan.segments * plan.tiles[0] * plan.tiles[1]
    assert plan.input.rows == (plan.rows * cell_rows - 1) * step + taps
    assert plan.input.span == (plan.groups * cell_columns - 1) * step + taps
    assert plan.output.rows == plan.rows * cell_rows * up
    depth = step if plan.volume else 1
    check_tile(plan.input, plan.lanes, depth, plan.rows)
    check_tile(plan.output, plan.lanes, up if plan.volume else 1, plan.rows)
    # Shared memory: inputs, outputs behind them or in their place, weights.
    buffers = 2 if plan.volume else 1
    of_input = plan.input.plane * planes * depth * buffers
    assert not (plan.direct and phases[2] > 1), "neighbours of a phase are not neighbours in memory"
    staged = 0 if plan.direct or not planar else plan.output.plane * planes * (up if plan.volume else 1) * buffers
    begin = plan.smem_out + staged
    assert plan.smem_weights >= max(of_input, begin)
    assert plan.volume is False or plan.smem_out >= of_input
    weights = plan.kernel ** (3 if plan.volume else 2)
    row = 8 if plan.kernel > 4 else 4
    assert plan.weight_plane >= (weights // plan.kernel * row if planar else 0)
    of_weights = plan.weight_plane * planes if planar else weights * plan.lanes
    assert plan.smem_bytes == 4 * (plan.smem_weights + of_weights)
    assert plan.smem_bytes <= gpu.smem_per_block
    assert plan.smem_out % 4 == plan.smem_weights % 4 == plan.weight_plane % 4 == 0, "16 bytes at once"
    sums = (-(-taps // step) if plan.volume else 1) * cell_rows * cell_columns * up ** (3 if plan.volume else 2)
    assert sums <= REGISTERS - 40


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("mode", list(UP), ids=str)
def test_every_tap_is_used_once(mode, kernel: int) -> None:
    """Over the outputs of a cell along a dim; a scattering cell's outputs share its inputs."""
    taps = dev.depthwise_taps(mode, kernel)
    used = [dev.depthwise_tap(mode, kernel, at, up) for at, up in itertools.product(range(taps), range(UP[mode]))]
    assert sorted(tap for tap in used if tap < kernel) == list(range(kernel))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_cells_and_taps_are_the_convolution(data) -> None:
    """Along one dim: the inputs that each output reads, and by which tap."""
    drawn = draw_problem(data.draw, fast=True)
    if drawn is None:
        return
    problem, case, more, *_, output = drawn
    of_dx = data.draw(st.booleans())
    plan = dev.plan_depthwise(problem, GPUS["h200"], of_dx)
    if plan.refusal:
        return
    source, result = (output, case["size"]) if of_dx else (case["size"], output)
    stride, padding, kernel = case["stride"][2], case["padding"][2], case["kernel"][2]
    scatter = more["transposed"] != of_dx
    flipped = scatter and stride == 1
    step = plan.phases[2]
    found = {}
    for index in range(step):
        at_last = index * math.prod(plan.phases[:2])
        ins, outs, _, in_first, out_first = dev.depthwise_phase(problem, plan.phases, at_last, "dx" if of_dx else "y")
        count, lead, skew = dev.depthwise_cells(problem, plan.phases, at_last, 2, of_dx)
        for cell, at, up in itertools.product(
            range(count), range(dev.depthwise_taps(plan.mode, kernel)), range(UP[plan.mode])
        ):
            tap, o = dev.depthwise_tap(plan.mode, kernel, at, up), cell * UP[plan.mode] + up - skew
            i = cell * STEP[plan.mode] - lead + at
            if tap < kernel and 0 <= o < outs[2] and 0 <= i < ins[2]:
                place = out_first[2] + step * o, in_first[2] + step * i
                assert place[0] < result[2]
                assert place[1] < source[2]
                assert found.setdefault(place, tap) == tap
    assert found == reads(result[2], source[2], kernel, stride, padding, case["dilation"][2], scatter, flipped)


def reads(outs: int, ins: int, kernel: int, stride: int, padding: int, dilation: int, scatter: bool, flipped: bool):
    """Which input an output reads along a dim, and by which tap."""
    found = {}
    for o, i in itertools.product(range(outs), range(ins)):
        tap, rest = divmod(o + padding - i * stride if scatter else i - o * stride + padding, dilation)
        if rest == 0 and 0 <= tap < kernel:
            found[o, i] = kernel - 1 - tap if flipped else tap
    return found


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_phases_of_a_gradient_are_the_convolution(data) -> None:
    """Along one dim: which positions of dy and x meet in each tap of the weight."""
    drawn = draw_problem(data.draw, fast=True)
    if drawn is None:
        return
    problem, case, more, *_, output = drawn
    phases = phases_of(case)
    if phases is None:
        return
    still, moved = (case["size"], output) if more["transposed"] else (output, case["size"])
    stride, kernel, step = case["stride"][1], case["kernel"][1], phases[1]
    found = {}
    for index in range(step):
        ins, outs, padding, in_first, out_first = dev.depthwise_phase(problem, phases, index * phases[0], "dweight")
        for o, i in itertools.product(range(outs[1]), range(ins[1])):
            tap = i - o * stride + padding[1]
            if 0 <= tap < kernel:
                found[out_first[1] + step * o, in_first[1] + step * i] = tap
    assert found == reads(still[1], moved[1], kernel, stride, case["padding"][1], case["dilation"][1], False, False)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_wgrad_plan_of_any_shape(data) -> None:
    drawn = draw_problem(data.draw)
    if drawn is None:
        return
    problem, case, more, c_in, copies, planar, output = drawn
    gpu = GPUS[data.draw(st.sampled_from(sorted(GPUS)))]
    plan = dev.plan_depthwise_wgrad(problem, gpu)
    still = case["size"] if more["transposed"] else output
    kernel = case["kernel"]
    square = kernel[1] == kernel[2] in (3, 5, 7) and case["stride"][1] == case["stride"][2] <= 2
    phases = phases_of(case)
    reasons = {"not depthwise": copies > 1, "dilation": phases is None, "7 wide": not square}
    if check_refusal(plan.refusal, {**NEVER, **reasons}):
        return
    assert plan.phases == phases
    still = [-(-size // step) for size, step in zip(still, phases, strict=True)]
    assert plan.weights == c_in * kernel[0] * kernel[1] * kernel[2]
    assert plan.partial_floats == math.prod(phases) * plan.splits * plan.weights
    assert 1 <= plan.splits <= 65535
    assert plan.splits <= plan.items
    columns = dev.depthwise_wgrad_columns(plan.kernel, plan.stride, plan.taps)
    assert plan.tiles[0] * plan.rows >= still[1]
    assert plan.tiles[1] * plan.groups * columns >= still[2]
    assert plan.segments * plan.segment >= still[0]
    assert plan.items == more["n"] * plan.segments * plan.tiles[0] * plan.tiles[1]
    # Taps of the depth: one a block, or some of every `stride`-th of them, each of them in one block.
    if plan.taps == 1:
        assert plan.depth == kernel[0]
    else:
        assert plan.stride == case["stride"][0]
        firsts = [dev.depthwise_wgrad_first_tap(b, plan.stride, plan.taps) for b in range(plan.depth)]
        taps = [first + plan.stride * g for first in firsts for g in range(plan.taps)]
        assert sorted(tap for tap in taps if tap < kernel[0]) == list(range(kernel[0]))
        assert max(firsts) < kernel[0], "a block without taps"
    planes = plan.moved.planes
    assert planes == plan.still.planes
    assert plan.channel_blocks * (planes if planar else plan.lanes) >= c_in
    assert plan.rows * plan.groups * planes * plan.lanes <= plan.threads <= dev.DEPTHWISE_THREADS
    assert plan.moved.rows == (plan.rows - 1) * plan.stride + kernel[1]
    assert plan.moved.span == (plan.groups * columns - 1) * plan.stride + kernel[2]
    assert (plan.still.rows, plan.still.span) == (plan.rows, plan.groups * columns)
    check_tile(plan.moved, plan.lanes, 1, plan.rows)
    check_tile(plan.still, plan.lanes, 1, plan.rows)
    assert plan.smem_still >= plan.moved.plane * planes
    assert plan.smem_bytes >= 4 * (plan.smem_still + plan.still.plane * planes)
    assert plan.smem_bytes >= 4 * plan.threads * plan.taps * kernel[1] * kernel[2]
    assert plan.smem_bytes <= gpu.smem_per_block
    if plan.splits < min(plan.items, 60000):
        items = -(-plan.items // plan.splits)
        assert (items - 1) * plan.segment * columns <= 2 * dev.DEPTHWISE_WGRAD_CHAIN, "a long sum"


def test_refusals() -> None:
    assert "no elements" in dev.plan_depthwise(dev.ConvProblem(c_in=4, c_out=4, input=(1, 4, 4), output=(1, 4, 4),
                                                               kernel=(1, 3, 3), groups=4, n=0)).refusal  # fmt: skip
    problem, _ = make_problem(8, 8, (1, 9, 9), (1, 3, 3), groups=4)
    for refused in (dev.plan_depthwise(problem), dev.plan_depthwise_wgrad(problem)):
        assert "not depthwise" in refused.refusal
    problem, _ = make_problem(8, 8, (1, 9, 9), (1, 3, 3), groups=8, dtype="float64")
    assert "float64" in dev.plan_depthwise(problem).refusal
    assert dev.choose_conv(problem, backend=dev.ConvBackend.kgopt).path == dev.ConvPath.direct


VOLUME = dict(size=(144, 144, 144), kernel=(5, 5, 5), stride=(2, 2, 2), padding=(2, 2, 2))
IMAGE = dict(size=(1, 56, 56), kernel=(1, 3, 3), padding=(0, 1, 1))


def test_choice() -> None:
    """Volumes and contiguous images have own kernels; cuDNN keeps 3 x 3 of channels_last half types."""
    h200 = GPUS["h200"]
    for planar in (True, False):
        problem, _ = make_problem(16, 16, **VOLUME, n=4, groups=16, dtype="bfloat16", planar=planar)
        choice = dev.choose_conv(problem, h200)
        assert choice.path == dev.ConvPath.depthwise
        assert "a depthwise convolution: about" in choice.explain()
        assert dev.choose_conv_gradients(problem, h200).explain() == "dx kgopt; dweight kgopt"
        assert dev.choose_conv(problem, h200, dev.ConvBackend.aten).path == dev.ConvPath.aten
        named = dev.choose_conv(problem, h200, dev.ConvBackend.implicit_gemm)
        assert named.path == dev.ConvPath.implicit_gemm
    problem, _ = make_problem(96, 96, **IMAGE, n=32, groups=96, dtype="bfloat16", channels_innermost=True)
    assert dev.choose_conv(problem, h200).path == dev.ConvPath.aten
    assert "PyTorch's kernels" in dev.choose_conv(problem, h200).explain()
    assert dev.choose_conv(problem, h200, dev.ConvBackend.kgopt).path == dev.ConvPath.depthwise
    problem, _ = make_problem(96, 96, **IMAGE, n=32, groups=96, planar=True)
    assert dev.choose_conv(problem, h200).path == dev.ConvPath.depthwise
    for planar, least in ((False, 0), (True, 400)):  # dilated images: of contiguous ones PyTorch's kernels keep most
        for size in (20, 60, 600):
            dilated = dict(size=(1, size, size), kernel=(1, 5, 5), padding=(0, 4, 4), dilation=(1, 2, 2))
            problem, _ = make_problem(
                16, 16, **dilated, n=8, groups=16, dtype="bfloat16", planar=planar, channels_innermost=not planar
            )
            takes = dev.choose_conv(problem, h200).path == dev.ConvPath.depthwise
            assert takes == (size > least), (planar, size)
    assert dev.choose_conv_gradients(problem, h200, dev.ConvBackend.kgopt).explain() == "dx kgopt; dweight kgopt"
