"""Plans of convolutions of few channels (csrc/conv3d/few_channels)."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_problems import CASES, DTYPES, GPUS, check_refusal, dev, extents, make_problem


def check_few_channels_plan(plan, case: dict, size, output, limits) -> None:
    """What must hold where a plan is no refusal: every output in one strip, every input in its halo."""
    assert plan.refusal is None
    assert plan.smem_bytes <= limits.smem_per_block
    assert plan.tiles_per_sample == math.prod(plan.tiles)
    assert plan.slices * plan.tiles_per_slice >= plan.tiles_per_sample, "a tile belongs to no block"
    assert (plan.slices - 1) * plan.tiles_per_slice < max(1, plan.tiles_per_sample), "a block has no tile"
    assert plan.tile[1] == plan.rows * plan.segments
    assert plan.tile[2] % plan.strip == 0
    assert plan.strips == plan.tile[0] * plan.segments * plan.tile[2] // plan.strip
    for dim in range(3):
        assert plan.tile[dim] * plan.tiles[dim] >= output[dim] > plan.tile[dim] * (plan.tiles[dim] - 1)
        assert plan.origin[dim] == -case["padding"][dim]
    # Rows of the halo start at four words of x, so that a vector lies inside a row of x or outside it as a whole.
    assert (plan.origin[2] - plan.lead) % 4 == 0
    assert plan.pitch % 4 == 0
    assert plan.pitch >= 4 * plan.vectors >= plan.lead + plan.halo[2]
    if plan.window > 1:
        assert case["kernel"][1] == plan.window
        assert case["stride"][1] == case["dilation"][1] == case["stride"][2] == 1
    if plan.by_window:
        return check_gathered(plan, case, output)
    if plan.by_positions:
        return check_positions(plan, case, output)
    assert plan.k_steps % plan.batch == 0
    assert plan.k_words <= plan.k_steps * 8 < plan.k_words + 8 * plan.batch
    in_terms = plan.math == dev.ConvMath.fp16x3  # padded K reads what is there, with weights of zero
    assert plan.zero_plane == (plan.k_words != plan.k_steps * 8 and not in_terms)
    assert plan.k_words * plan.window == plan.words * math.prod(case["kernel"])
    for dim in range(3):
        reach = (plan.tile[dim] - 1) * case["stride"][dim] + (case["kernel"][dim] - 1) * case["dilation"][dim] + 1
        assert plan.halo[dim] == reach
    if plan.chunked:
        assert plan.words % 4 == 0
        assert plan.plane == 4 * plan.halo[0] * plan.halo[1] * plan.pitch
    else:
        assert plan.plane % 32 == 8, "planes start 8 banks apart"
        assert plan.plane >= plan.halo[0] * plan.halo[1] * plan.pitch
    if plan.by_channels:
        check_channels(plan, case, limits)
    else:
        assert plan.strip == dev.FEW_CHANNELS_STRIP


def check_gathered(plan, case: dict, output) -> None:
    """Where chunks are gathered, each output depth has its own halo, and K is every channel and tap of a kernel row."""
    assert plan.window == 3
    assert plan.columns <= 32
    assert plan.strip == dev.FEW_CHANNELS_STRIP
    width = case["kernel"][2]
    shared = plan.types - plan.shifted_types
    chunks = plan.shifted_types * width + shared
    assert chunks <= 4 * plan.blocks < chunks + 4
    assert 8 * chunks >= case["c_in"] * case["kernel"][0] * width, "a value of K is in no chunk"
    assert plan.halo[0] == plan.tile[0]
    assert plan.halo[1] == plan.tile[1] + 2
    # Positions whose outputs count find all columns of the kernel in the halo's row.
    reach = (width - 1) * case["dilation"][2]
    assert plan.halo[2] == min(plan.tile[2], output[2]) + reach
    assert plan.pitch % 8 == 0, "neighbours in a row change places within four"
    assert plan.plane == 4 * (plan.tile[0] * plan.halo[1] * plan.pitch + 4)
    assert plan.segments == 1 or output[1] % plan.rows == 0, "warps of a warpgroup count rows together"
    pairs = plan.columns == 24 and plan.blocks == 1 and plan.math in (dev.ConvMath.bf16, dev.ConvMath.fp16)
    units = math.ceil(plan.strips / 4)
    ahead = 4 if pairs else plan.consumers
    assert plan.stages >= math.ceil(ahead / units) * plan.tiles_together, "a barrier's parity names one of two rounds"
    assert plan.tiles_together == 1 or (pairs and plan.tiles_together * plan.strips == 4), "a strip for each warp"
    assert plan.at_once >= 1


def check_positions(plan, case: dict, output) -> None:
    """Where positions are rows, every channel and tap is in a chunk of K, and every position of a row has its halo."""
    assert plan.columns == 64
    assert plan.strip == dev.FEW_CHANNELS_STRIP
    assert plan.math in (dev.ConvMath.tf32, dev.ConvMath.bf16, dev.ConvMath.fp16)
    assert plan.k_steps in (5, 10), "the numbers of products that are compiled"
    assert 8 * plan.types >= case["c_in"] > 8 * (plan.types - 1)
    constant = 1 if case.get("epilogue") == dev.ConvEpilogue.stats else 0
    assert plan.types * math.prod(case["kernel"]) + constant <= 2 * plan.k_steps
    for dim in range(3):
        extent = min(plan.tile[2], output[2]) if dim == 2 else plan.tile[dim]
        reach = (extent - 1) * case["stride"][dim] + (case["kernel"][dim] - 1) * case["dilation"][dim] + 1
        assert plan.halo[dim] == reach
    assert plan.pitch == 4 * plan.vectors
    assert plan.plane == 4 * plan.halo[0] * plan.halo[1] * plan.pitch
    assert 2 <= plan.stages <= 6
    assert plan.strips * plan.strip == math.prod(plan.tile)
    assert max(plan.tile[:2]) < 1 << 15, "a strip's place in the tile"
    # No lane reads beyond its stage, not even for a position behind the end of a row: the next one is being filled.
    at = [(plan.tile[i] - 1) * case["stride"][i] + (case["kernel"][i] - 1) * case["dilation"][i] for i in range(3)]
    last = (at[0] * plan.halo[1] + at[1]) * plan.pitch + plan.lead + at[2]
    assert (plan.types - 1) * plan.plane + 4 * (last + 1) <= plan.stage_words
    assert plan.stage_words % 4 == 0, "copies of 16 bytes"


def check_channels(plan, case: dict, limits) -> None:
    """Where channels are rows, wgmma reads the halo: every chunk of four words and every tap once, at its place."""
    assert plan.chunked
    assert plan.rows == 1
    assert plan.strip in (32, 64)
    assert plan.columns == 64
    assert case["stride"][2] == 1, "neighbouring positions are neighbours in the halo"
    assert plan.math == dev.ConvMath.fp16x3
    assert plan.k_steps == 5, "the number of products that is compiled"
    assert limits.smem_per_block // 16 < 1 << 14, "addresses fit the descriptor"
    chunks = []
    for pair in plan.chunk_pairs:
        first, distance = pair & 0xFFFF, pair >> 16
        assert 0 <= distance < 1 << 14
        chunks += [first, first + distance]
    plane = plan.plane // 4
    want = [
        word * plane
        + (d * case["dilation"][0] * plan.halo[1] + h * case["dilation"][1]) * plan.pitch
        + w * case["dilation"][2]
        for word in range(plan.words // 4)
        for d, h, w in itertools.product(*map(range, case["kernel"]))
    ]
    assert chunks[: len(want)] == want
    assert all(chunk == want[-1] for chunk in chunks[len(want) : 2 * plan.k_steps]), "padding repeats the last chunk"


def few_channels_reasons(case: dict, c_out: int, dtype: str, allow_tf32: bool) -> dict[str, bool | None]:
    """Why a convolution of contiguous tensors may be refused."""
    c_in, taps, exact = case["c_in"], math.prod(case["kernel"]), dtype == "float32" and not allow_tf32
    lse, store = (case["epilogue"] == getattr(dev.ConvEpilogue, name) for name in ("residual_lse", "store"))
    # With up to ten chunks of eight channels at a tap, channels are rows, of products whose sums are exact enough.
    chunks = math.ceil(c_in / 8) * taps
    rows = 32 < c_out <= 64 and case["stride"][2] == 1 and chunks <= 10
    # Weights, and what a row of 64 outputs reads in two stages, in half the shared memory.
    depth, height, width = extents(case["kernel"], case["dilation"])
    words = c_in if dtype == "float32" else math.ceil(c_in / 2)
    columns = min(128, math.ceil(c_out / 32) * 32) * (2 if exact else 1)
    fits = 4 * words * (2 * depth * height * (63 * case["stride"][2] + width) + taps * columns) <= 96 << 10
    return {
        "wgmma's sums": exact and (store or (lse and not rows)),
        "at most 128 output channels": lse and c_out > 128,
        "fit in shared memory": False if fits else None,
    }


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_few_channels_plan_of_any_shape(data) -> None:
    draw = data.draw
    three = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(3))  # noqa: E731
    case = {"kernel": three(1, 5), "stride": three(1, 3), "padding": three(0, 4), "dilation": three(1, 3)}
    size = three(1, 70)
    outputs = [dev.conv_out_size(*dim) for dim in zip(size, *(case[k] for k in case), strict=True)]
    if min(outputs) < 1:
        return
    case["c_in"] = draw(st.integers(1, 40))
    epilogues = [dev.ConvEpilogue.residual_lse, dev.ConvEpilogue.stats, dev.ConvEpilogue.store]
    case["epilogue"] = draw(st.sampled_from(epilogues))
    c_out, dtype, allow_tf32 = draw(st.integers(1, 150)), draw(st.sampled_from(DTYPES)), draw(st.booleans())
    problem, output = make_problem(
        c_out=c_out, size=size, **case, n=draw(st.integers(1, 200)), dtype=dtype, allow_tf32=allow_tf32, planar=True
    )
    limits = GPUS["h200"]
    plan = dev.plan_few_channels(problem, limits)
    if check_refusal(plan.refusal, few_channels_reasons(case, c_out, dtype, allow_tf32)):
        return
    check_few_channels_plan(plan, case, size, output, limits)


@pytest.mark.parametrize(
    ("name", "epilogue", "window"), [("pipeline 1", "stats", 3), ("pipeline 3", "stats", 1), ("pipeline 3", "lse", 1)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_channels_plan_takes_the_fused_pipelines(name: str, epilogue: str, window: int, dtype: str) -> None:
    case = {"stride": (1, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1), **CASES[name]}
    which = dev.ConvEpilogue.stats if epilogue == "stats" else dev.ConvEpilogue.residual_lse
    case["epilogue"] = which
    problem, output = make_problem(**case, n=128, dtype=dtype)
    limits = GPUS["h200"]
    choice = dev.choose_conv(problem, limits)
    assert choice.path.name == "few_channels"
    assert "wgmma" in choice.explain()
    check_few_channels_plan(choice.plan, case, case["size"], output, limits)
    assert choice.plan.window == window
    assert choice.plan.by_window == (name == "pipeline 1")
    assert choice.plan.by_positions == (name == "pipeline 3")
    assert 128 * choice.plan.slices >= 0.9 * limits.sm_count, "the GPU is not full"


@pytest.mark.parametrize("epilogue", ["stats", "residual_lse"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c_out", [4, 24, 64, 72])
def test_few_channels_plan_of_one_small_image_uses_the_gpu(c_out: int, dtype: str, epilogue: str) -> None:
    which = dev.ConvEpilogue.__members__[epilogue]
    limits = GPUS["h200"]
    blocks = []
    for n in (1, 4, 1024):
        problem, _ = make_problem(c_in=3, c_out=c_out, size=(1, 56, 64), kernel=(1, 3, 3), stride=(1, 1, 1),
                                  padding=(0, 1, 1), dilation=(1, 1, 1), n=n, dtype=dtype, epilogue=which)  # fmt: skip
        plan = dev.plan_few_channels(problem, limits)
        assert plan.refusal is None
        blocks.append(n * plan.slices * plan.n_tiles)
    # 3584 positions of one sample are shared among several multiprocessors, and four samples among more.
    assert blocks[0] >= 7
    assert blocks[1] >= 28
    assert blocks[2] >= 1024


def check_autocorrelation(plan, case: dict, size, output, limits) -> None:
    """What must hold of every such plan: every input value in one task, outer ones where taps do not agree."""
    assert plan.smem_bytes <= limits.smem_per_block
    assert plan.finish_smem_bytes <= limits.smem_per_block
    for dim, core in ((1, plan.core_rows), (2, plan.core_columns)):
        inside = range(case["kernel"][dim])
        for at in range(size[dim]):
            seen = [0 <= at + case["padding"][dim] - tap < output[dim] for tap in inside]
            if core[0] <= at < core[1]:
                assert all(seen), "a value counts for some taps only"
        # An odd distance is the left operand moved by one, which has no column before the first.
        assert core[0] >= dim - 1
        assert 0 <= core[0] <= 2
        assert core[0] < core[1] <= size[dim] <= core[1] + 2, "at most two outer rows or columns on a side"
    height = size[1]
    assert plan.chunks * dev.AUTOCORRELATION_CHUNK >= size[2] > (plan.chunks - 1) * dev.AUTOCORRELATION_CHUNK
    assert plan.slices * plan.slice_rows >= height > (plan.slices - 1) * plan.slice_rows
    core = min(plan.slice_rows, plan.core_rows[1] - plan.core_rows[0])
    assert plan.runs * plan.run_rows >= core > (plan.runs - 1) * plan.run_rows
    # Steps of 16 rows of the outer columns see two rows more.
    assert plan.column_rows % 16 == 2
    assert core + 18 > plan.column_rows >= core + 2
    if plan.slices == 1:
        assert plan.edge_rows == 4
        assert plan.slice_floats == 0
    else:
        # Outer rows of one side lie in one slice, and no slice has those of both.
        assert plan.edge_rows == 2
        assert plan.core_rows[0] <= plan.slice_rows
        assert (plan.slices - 1) * plan.slice_rows <= plan.core_rows[1]
        assert plan.slice_floats % 4 == 0


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_autocorrelation_plan_of_any_shape(data) -> None:
    draw = data.draw
    two = lambda low, high: (draw(st.integers(low, high)), draw(st.integers(low, high)))  # noqa: E731
    case = {"kernel": (1, *two(1, 3)), "padding": (0, *two(0, 5)), "c_in": draw(st.integers(1, 8))}
    size = (1, *two(8, draw(st.sampled_from((40, 700, 3000)))))
    if min(dev.conv_out_size(size[d], case["kernel"][d], 1, case["padding"][d]) for d in (1, 2)) < 8:
        return
    problem, output = make_problem(
        c_out=draw(st.integers(1, 256)),
        size=size,
        **case,
        n=draw(st.integers(1, 300)),
        dtype=draw(st.sampled_from(DTYPES)),
        epilogue=dev.ConvEpilogue.stats,
        planar=True,
    )
    plan = dev.plan_autocorrelation(problem, GPUS["h200"])
    assert plan.refusal is None
    check_autocorrelation(plan, case, size, output, GPUS["h200"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c_out", [40, 64, 256])
def test_autocorrelation_takes_statistics_of_large_inputs(dtype: str, c_out: int) -> None:
    case = {**CASES["pipeline 3"], "c_out": c_out, "padding": (0, 0, 0)}
    stats = dev.ConvEpilogue.stats
    problem, output = make_problem(**case, n=128, dtype=dtype, epilogue=stats, planar=True)
    choice = dev.choose_conv(problem, GPUS["h200"])
    assert choice.path.name == "few_channels"
    assert choice.autocorrelation
    assert "autocorrelation" in choice.explain()
    check_autocorrelation(choice.autocorrelation, case, case["size"], output, GPUS["h200"])
    # One small image is done before that kernel's end begins.
    problem, _ = make_problem(**{**case, "size": (1, 40, 40)}, n=1, dtype=dtype, epilogue=stats, planar=True)
    assert not dev.choose_conv(problem, GPUS["h200"]).autocorrelation


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        ("sm_90a", {}, dev.DeviceLimits(has_wgmma=False)),
        ("nothing else", {"epilogue": dev.ConvEpilogue.residual_lse}, None),
        ("channels_last", {"planar": False}, None),
        ("grouped", {"groups": 2}, None),
        ("transposed", {"transposed": True}, None),
        ("float64", {"dtype": "float64"}, None),
        ("fp32 accuracy", {"allow_tf32": False}, None),
        ("8 input channels", {"c_in": 10}, None),
        ("256 output channels", {"c_out": 258}, None),
        ("depth", {"size": (2, 40, 40)}, None),
        ("stride", {"stride": (1, 2, 1)}, None),
        ("stride", {"dilation": (1, 1, 2)}, None),
        ("3 taps", {"kernel": (1, 4, 3)}, None),
        ("8 positions", {"size": (1, 40, 9)}, None),
        ("shared memory", {}, dev.DeviceLimits(smem_per_block=64 << 10)),
    ],
)
def test_autocorrelation_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    stats = dev.ConvEpilogue.stats
    arguments = {"c_in": 8, "c_out": 64, "size": (1, 40, 40), "kernel": (1, 3, 3), "epilogue": stats, "planar": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_autocorrelation(problem, limits or dev.DeviceLimits()).refusal


@pytest.mark.parametrize("planar", [True, False])
@pytest.mark.parametrize("name", ["pipeline 1", "pipeline 3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_channels_plan_stores_outputs_of_either_format(name: str, dtype: str, planar: bool) -> None:
    case = {"stride": (1, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1), **CASES[name]}
    problem, output = make_problem(**case, n=128, dtype=dtype, planar=planar)
    choice = dev.choose_conv(problem, GPUS["h200"], dev.ConvBackend.kgopt)
    assert choice.path.name == "few_channels"
    check_few_channels_plan(choice.plan, case, case["size"], output, GPUS["h200"])
    assert choice.plan.window == 1
    assert not choice.plan.by_channels


def test_few_channels_plan_of_many_small_images_keeps_all_warps_busy() -> None:
    """A tile of 16^3 has two strips, a warpgroup four warps; 1024 samples load the weights 132 times."""
    limits = GPUS["h200"]
    case = {"kernel": (3, 3, 3), "stride": (1, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1), "c_in": 3}
    for dtype, together in (("bfloat16", 2), ("float32", 1)):
        size = (16, 16, 16)
        problem, output = make_problem(
            c_out=24, size=size, **case, n=1024, dtype=dtype, epilogue=dev.ConvEpilogue.stats, planar=True
        )
        plan = dev.plan_few_channels(problem, limits)
        assert plan.by_window
        check_few_channels_plan(plan, case, size, output, limits)
        assert plan.tiles_together == together
        assert plan.at_once == limits.sm_count
        assert plan.slices == 1


def test_few_channels_plan_without_tf32() -> None:
    """Two fp16 terms where channels are rows and few taps, 3xTF32 elsewhere, which logsumexp refuses."""
    case = {"size": (1, 64, 64), "kernel": (1, 3, 3), "allow_tf32": False}
    for epilogue in (dev.ConvEpilogue.stats, dev.ConvEpilogue.residual_lse):
        problem, _ = make_problem(8, 64, **case, epilogue=epilogue)
        plan = dev.plan_few_channels(problem, GPUS["h200"])
        assert (plan.math, plan.by_channels, plan.k_steps) == (dev.ConvMath.fp16x3, True, 5)
        assert dev.choose_conv(problem, GPUS["h200"]).path.name == "few_channels"
    problem, _ = make_problem(16, 64, **case, epilogue=dev.ConvEpilogue.stats)
    assert dev.plan_few_channels(problem, GPUS["h200"]).math == dev.ConvMath.tf32x3


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        ("sm_90a", {}, dev.DeviceLimits(has_wgmma=False)),
        ("transposed", {"transposed": True}, None),
        ("float64", {"dtype": "float64"}, None),
        ("stores", {"epilogue": dev.ConvEpilogue.store_stats}, None),
        ("channels_last from at most 8", {"epilogue": dev.ConvEpilogue.store, "c_in": 10}, None),
        ("without TF32", {"epilogue": dev.ConvEpilogue.store, "planar": True, "allow_tf32": False}, None),
        ("groups = 1", {"groups": 2, "epilogue": dev.ConvEpilogue.residual_lse}, None),
        ("at most 128", {"c_out": 136, "epilogue": dev.ConvEpilogue.residual_lse}, None),
        ("without TF32", {"allow_tf32": False, "epilogue": dev.ConvEpilogue.residual_lse}, None),
        ("weights", {"c_in": 512}, None),
        ("tile", {}, dev.DeviceLimits(smem_per_block=20 << 10)),
        ("too large", {"stride": (1, 1, 65), "size": (8, 9, 200)}, None),
    ],
)
def test_few_channels_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    arguments = {"c_in": 4, "c_out": 24, "size": (8, 9, 10), "kernel": (3, 3, 3), "epilogue": dev.ConvEpilogue.stats}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_few_channels(problem, limits or dev.DeviceLimits()).refusal
