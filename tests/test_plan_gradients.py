"""Plans of a convolution's gradients and their choice (csrc/conv3d/gradients)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_problems import DTYPES, GPUS, check_refusal, dev, extents, make_problem


def check_wgrad_plan(plan, case: dict, a: int, b: int, still, size: int, limits) -> None:
    """Tiles cover the planes, shared memory holds what is loaded and read, and every partial sum has its place."""
    assert plan.tiles[0] * plan.rows >= still[1]
    assert plan.tiles[1] * plan.width >= still[2]
    assert plan.rows in (4, 8)
    assert plan.width % (32 // size) == 0, "not in whole steps of K"
    assert plan.a_tiles * 32 >= a
    assert plan.depth_tiles * (1 if plan.alternate else 3) >= case["kernel"][0]
    taps, stride = case["kernel"][2], case["stride"][2]
    if plan.few:
        assert plan.few == b
        assert plan.few * taps <= plan.columns == 16
        first = (plan.width * stride - case["padding"][2]) * b - plan.row_skip
        assert first * size % 16 == 0, "a copy begins off 16 bytes"
        last = plan.row_skip + (plan.width - 1) * stride * b
        assert last + taps * b <= plan.row_numbers <= 256
        assert plan.row_numbers * size % 16 == 0
        assert plan.pitch >= max(plan.row_numbers, last + 16) * size
        assert plan.pitch % 128 == 0
    else:
        assert plan.b_tiles * plan.columns >= b
        assert plan.columns == 8 * plan.b_blocks
        assert plan.row_bytes == 32 * size
        # Columns that the taps read: all of one run, or those of even and odd taps.
        assert plan.first_run >= plan.width + (taps - 1) // stride
        assert plan.second_run % 8 == 0
        assert plan.second_run >= plan.first_run
        assert plan.pitch == (plan.second_run + (plan.width if stride == 2 else 0)) * plan.row_bytes
        assert plan.pitch % (8 * plan.row_bytes) == 0
    assert plan.back == min(case["kernel"][0], 3) - 1
    assert 2 <= plan.stages <= dev.WGRAD_MAX_STAGES
    planes = ((plan.rows - 1) * stride + case["kernel"][1]) * plan.pitch * plan.stages
    planes += plan.rows * plan.width * plan.row_bytes * (plan.stages + plan.back)
    assert planes < plan.smem_bytes <= limits.smem_per_block
    assert plan.turns == 4 // plan.b_blocks * (3 if plan.alternate else 1)
    assert plan.slots == plan.splits * plan.turns
    assert 1 <= plan.splits <= max(1, plan.steps)
    assert plan.tile_floats % 128 == 0
    assert plan.partial_floats == plan.blocks * plan.turns * plan.tile_floats


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_wgrad_plan_of_any_shape(data) -> None:
    draw = data.draw
    transposed = draw(st.booleans())
    kernel = (draw(st.integers(1, 7)), 3, 3)
    size = (draw(st.integers(1, 40)), draw(st.integers(1, 200)), draw(st.integers(1, 300)))
    plane_stride = draw(st.integers(1, 2))
    case = {"kernel": kernel, "stride": (draw(st.integers(1, 2)), plane_stride, plane_stride)}
    case["padding"] = tuple(draw(st.integers(0, k)) for k in kernel)
    dims = zip(size, kernel, case["stride"], case["padding"], (1, 1, 1), strict=True)
    if min(dev.conv_out_size(*dim, transposed) for dim in dims) < 1:
        return
    dtype = draw(st.sampled_from(DTYPES))
    c_in = draw(st.sampled_from([1, 2, 3, 4, 4, 5] if draw(st.booleans()) else [8, 16, 32, 40, 64, 96, 128]))
    c_out = 8 * draw(st.integers(1, 24))
    problem, output = make_problem(
        c_in,
        c_out,
        size,
        **case,
        n=draw(st.integers(1, 20)),
        transposed=transposed,
        dtype=dtype,
        channels_innermost=c_in % 8 == 0,
    )
    plan = dev.plan_wgrad(problem, GPUS["h200"])
    a, b, still, moved = (c_in, c_out, size, output) if transposed else (c_out, c_in, output, size)
    few = not transposed and 3 * c_in <= 16  # the columns of one product
    reasons = {
        "rows of few channels": few and c_in * size[2] * (4 if dtype == "float32" else 2) % 16 != 0,
        "x is not channels_last": not few and c_in % 8 != 0,
        "odd width": not few and plane_stride == 2 and moved[2] % 2 != 0,
    }
    if check_refusal(plan.refusal, reasons):
        return
    check_wgrad_plan(plan, case, a, b, still, 4 if dtype == "float32" else 2, GPUS["h200"])


@pytest.mark.parametrize(
    ("c_in", "c_out", "size"),
    [(32, 32, (128,) * 3), (64, 64, (64,) * 3), (32, 64, (80, 170, 170)), (32, 32, (96,) * 3)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_channels_innermost_take_own_gradients(c_in, c_out, size, dtype: str) -> None:
    case = dict(kernel=(3, 3, 3), padding=(1, 1, 1))
    problem, _ = make_problem(c_in, c_out, size, **case, dtype=dtype, channels_innermost=True)
    limits = GPUS["h200"]
    assert dev.choose_conv_gradients(problem, limits).explain() == "dx kgopt; dweight kgopt"
    assert "asked for" in dev.choose_conv_gradients(problem, limits, dev.ConvBackend.aten).explain()
    problem, _ = make_problem(c_in, c_out, size, **case, dtype=dtype)
    assert "dweight aten: x is not channels_last" in dev.choose_conv_gradients(problem, limits).explain()


# Channels, size, stride, dtype: microseconds on an H200, and whether cuDNN took longer.
WGRAD_MEASURED = [
    (32, 32, (128, 128, 128), 1, "float32", 433, True),
    (32, 32, (128, 128, 128), 1, "bfloat16", 218, True),
    (64, 64, (64, 64, 64), 1, "float32", 231, True),
    (64, 64, (64, 64, 64), 1, "bfloat16", 122, True),
    (128, 128, (32, 32, 32), 1, "float32", 132, True),
    (128, 128, (32, 32, 32), 1, "bfloat16", 77, False),
    (16, 32, (96, 128, 128), 1, "float32", 187, True),
    (16, 32, (96, 128, 128), 1, "bfloat16", 101, True),
    (96, 32, (96, 128, 128), 1, "float32", 961, True),
    (96, 32, (96, 128, 128), 1, "bfloat16", 457, True),
    (192, 64, (48, 64, 64), 1, "float32", 492, True),
    (192, 64, (48, 64, 64), 1, "bfloat16", 244, True),
    (256, 256, (16, 16, 16), 1, "bfloat16", 70, False),
    (4, 32, (128, 128, 128), 1, "float32", 117, True),
    (4, 32, (128, 128, 128), 1, "bfloat16", 72, True),
    (1, 16, (96, 128, 128), 1, "float32", 93, True),
    (1, 16, (96, 128, 128), 1, "bfloat16", 63, True),
    (32, 64, (128, 128, 128), 2, "float32", 205, True),
    (32, 64, (128, 128, 128), 2, "bfloat16", 107, True),
    (64, 128, (64, 64, 64), 2, "bfloat16", 67, False),
]


@pytest.mark.parametrize(("c_in", "c_out", "size", "stride", "dtype", "measured", "faster"), WGRAD_MEASURED)
def test_wgrad_model_of_time(c_in, c_out, size, stride, dtype: str, measured: float, faster: bool) -> None:
    case = dict(kernel=(3, 3, 3), padding=(1, 1, 1), stride=(stride,) * 3)
    problem, _ = make_problem(c_in, c_out, size, **case, dtype=dtype, channels_innermost=c_in >= 8)
    choice = dev.choose_conv_gradients(problem, GPUS["h200"])
    assert 0.7 * measured < dev.plan_wgrad(problem, GPUS["h200"]).microseconds < 1.25 * measured
    assert ("dweight kgopt" in choice.explain()) == faster


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        ("tensor copies", {}, dev.DeviceLimits(has_wgmma=False)),
        ("float64", {"dtype": "float64"}, None),
        ("fp32 accuracy", {"allow_tf32": False}, None),
        ("channels_last", {"channels_innermost": False}, None),
        ("grouped", {"groups": 2}, None),
        ("16 bytes", {"c_in": 33}, None),
        ("16 bytes", {"c_out": 33}, None),
        ("rows of few channels", {"c_in": 3, "size": (8, 9, 41)}, None),
        ("output channels", {"c_in": 3, "c_out": 33}, None),
        ("stride of height", {"stride": (1, 2, 1)}, None),
        ("stride above 2", {"stride": (3, 1, 1)}, None),
        ("odd width", {"stride": (2, 2, 2), "size": (8, 9, 41)}, None),
        ("dilation", {"dilation": (1, 2, 1)}, None),
        ("other than 3", {"kernel": (3, 3, 2)}, None),
        ("does not fit", {}, dev.DeviceLimits(smem_per_block=60 << 10)),
    ],
)
def test_wgrad_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    arguments = {"c_in": 32, "c_out": 32, "size": (8, 9, 40), "kernel": (3, 3, 3), "channels_innermost": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_wgrad(problem, limits or dev.DeviceLimits()).refusal


def check_row_copy(copy, row_bytes: int, threads: int = 256) -> None:
    assert row_bytes % copy.piece == 0, "a copy crosses the end of a row"
    assert copy.piece in (4, 8, 16)
    assert copy.slots % ((threads >> copy.across_log2) * 4) == 0, "not in whole batches"
    assert copy.slots >= copy.rows
    assert 1 << copy.across_log2 >= min(copy.pieces, threads)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_few_channels_gradient_plans_of_any_shape(data) -> None:
    """Tiles cover the positions, and what is loaded and read lies in the stages."""
    draw = data.draw
    rank, plain = draw(st.integers(2, 3)), draw(st.booleans())  # plain: no stride, which dx must not have
    kernel = (draw(st.integers(1, 3)) if rank == 3 else 1, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    size = (draw(st.integers(1, 40)) if rank == 3 else 1, draw(st.integers(1, 200)), draw(st.integers(1, 300)))
    case = {"kernel": kernel, "padding": (0, draw(st.integers(0, 2)), draw(st.integers(0, 1)))}
    steps = st.integers(1, 1 if plain else 2)
    case["stride"] = (draw(steps) if rank == 3 else 1, draw(steps), 1)
    case["dilation"] = (1, draw(st.integers(1, 2)), 1)
    dims = list(zip(size, kernel, case["stride"], case["padding"], case["dilation"], strict=True))
    if min(dev.conv_out_size(*dim) for dim in dims) < 1:
        return
    dtype = draw(st.sampled_from(DTYPES))
    item = 4 if dtype == "float32" else 2
    c_in, c_out = draw(st.integers(1, 12)), draw(st.integers(1, 130))
    case.update(n=draw(st.integers(1, 20)), dtype=dtype, planar=True, allow_tf32=draw(st.booleans()))
    problem, output = make_problem(c_in, c_out, size, **case)
    parts = 2 if dtype == "float32" and not case["allow_tf32"] else 1
    limits = GPUS["h200"]
    odd = item == 2 and (output[2] % 2 != 0 or size[2] % 2 != 0)
    rows = c_in * kernel[0] * kernel[1]
    plan = dev.plan_few_wgrad(problem, limits)
    if not check_refusal(plan.refusal, {"odd number": odd, "above 40": rows > 40}):
        assert plan.rows == c_in * kernel[0] * kernel[1] <= plan.x_tiles * 8
        assert plan.channels * plan.channel_blocks >= c_out
        assert plan.dy_tiles % 2 == 0 if plan.dy_is_a else plan.x_tiles % 2 == 0
        assert all(n * t >= o for n, t, o in zip(plan.tiles, plan.tile, output, strict=True))
        assert plan.dy_pitch == plan.tile[2] * item
        assert plan.dy_pitch % 64 == 0, "not in whole units"
        assert plan.dy_channel >= plan.tile[0] * plan.tile[1] * plan.dy_pitch
        assert plan.margin[0] >= case["padding"][2]
        used = min(plan.tile[2], output[2]) + kernel[2] - 1 - case["padding"][2]
        assert plan.tile[2] + plan.margin[1] >= used
        assert plan.x_copy.pieces * plan.x_copy.piece <= plan.x_pitch
        assert plan.dy_copy.pieces * plan.dy_copy.piece == plan.dy_pitch
        check_row_copy(plan.dy_copy, output[2] * item)
        check_row_copy(plan.x_copy, size[2] * item)
        assert plan.stage_bytes >= plan.channels * plan.dy_channel + c_in * plan.x_channel + plan.dy_pitch
        assert plan.blocks_per_sm * (plan.smem_bytes + 1024) <= limits.smem_per_sm
        assert plan.smem_bytes >= plan.stages * plan.stage_bytes
        assert plan.partial_floats == plan.channel_blocks * plan.blocks * plan.floats
        assert 1 <= plan.blocks <= plan.all_tiles
    made = dev.plan_few_wgrad(problem, limits, makes_dy=True)
    if not check_refusal(made.refusal, {"odd number": odd, "above 40": rows > 40, "does not fit": None}):
        taps = [made.tap(quad, i) for quad in range(made.k_steps * 2) for i in range(4)]
        assert sorted(t for t in taps if t[0] >= 0) == [(r, w) for r in range(rows) for w in range(kernel[2])]
        assert made.made_bytes >= made.channels * made.dy_channel
        assert made.stage_bytes >= c_in * made.x_channel
        assert made.dy_copy.piece == 16, "rows that are made are filled up"
        weights = made.k_steps * made.channels * 32 * parts
        assert made.smem_bytes >= weights + made.made_bytes + made.stages * made.stage_bytes
        assert made.blocks_per_sm * (made.smem_bytes + 1024) <= limits.smem_per_sm
    reach = [(k - 1) * d for k, d in zip(kernel[:2], case["dilation"][:2], strict=True)]
    reasons = {
        "odd number": odd,
        "above 40": rows > 40,
        "a stride": max(case["stride"]) > 1,
        "a padding above": any(p > r for p, r in zip(case["padding"], (*reach, kernel[2] - 1), strict=True)),
        "above 32": c_in * kernel[0] * kernel[2] > 32,
        "than a block has": None if c_out > 64 else False,
        "fewer planes": reach[0] >= size[0],
        "does not fit": None,
    }
    both = dev.plan_few_wgrad_dx(problem, limits)
    if not check_refusal(both.refusal, reasons):
        marches = both.tiles[0] * both.tiles[1] * case["n"]
        assert both.all_tiles == marches * both.steps
        assert 1 <= both.blocks <= marches
        assert both.tiles[0] * both.dx_planes >= size[0]
        assert both.tiles[1] * both.dx_rows >= size[1]
        assert [both.steps, both.tile[1]] == [both.dx_planes + reach[0], both.dx_rows + reach[1]]
        assert both.dx_slots == reach[0] + 1, "planes of dx that a plane of dy reaches"
        assert both.tile[2] == both.dx_pitch - 4 >= output[2]
        assert both.tile[2] % 32 == 0, "not in whole units"
        assert both.dx_channel >= both.dx_rows * both.dx_pitch
        assert both.dx_k_steps * (1 if item == 4 else 2) >= both.channels // 8 * kernel[1]
        weights = both.k_steps * both.channels * 32 * parts + both.dx_k_steps * 1024 * parts
        sums = both.dx_slots * c_in * both.dx_channel * 4
        assert both.smem_bytes >= weights + sums + both.made_bytes + both.stages * both.stage_bytes
        assert both.blocks_per_sm * (both.smem_bytes + 1024) <= limits.smem_per_sm
    extent = math.prod(extents(kernel[:2], case["dilation"][:2]))
    weights = -(-c_out // 8) * kernel[0] * kernel[1] * (1 if c_in * kernel[2] <= 16 else 2) * parts * 512
    reasons = {
        "odd number": item == 2 and output[2] % 2 != 0,
        "a stride": max(case["stride"]) > 1,
        "a padding of the width": case["padding"][2] > kernel[2] - 1,
        "above 32": c_in * kernel[2] > 32,
        "does not fit in shared memory": None if c_in * extent * size[2] > 1000 or weights > 100_000 else False,
    }
    plan = dev.plan_few_dgrad(problem, limits)
    if not check_refusal(plan.refusal, reasons):
        assert not plan.marches or (kernel[1] == 3 and plan.tile[1] % plan.units == 0), "a warp's rows in two planes"
        assert c_in * kernel[2] <= plan.row_tiles * 16
        assert plan.channels * plan.chunks >= c_out
        assert plan.units_w * 32 >= output[2]
        assert plan.tile[0] * plan.tile[1] * plan.units_w <= 8 * plan.units
        assert all(n * t >= o for n, t, o in zip(plan.tiles, plan.tile, size[:2], strict=True))
        assert plan.k_steps * (1 if item == 4 else 2) >= plan.channels // 8 * kernel[0] * kernel[1]
        assert plan.channel >= plan.halo[0] * plan.halo[1] * plan.pitch
        assert plan.channel % 128 == (32 if item == 4 else 16)
        check_row_copy(plan.dy_copy, output[2] * item)
        assert plan.stage_bytes >= plan.channels * plan.channel + plan.pitch
        sums = plan.tile[0] * plan.tile[1] * (plan.units_w * 32 + 4)
        assert plan.scratch_channel >= sums
        assert plan.stage_bytes >= c_in * plan.scratch_channel * 4
        assert plan.parts == parts
        weights = plan.chunks * plan.k_steps * plan.row_tiles * parts * 512
        assert plan.smem_bytes >= weights + plan.stages * plan.stage_bytes
        assert plan.blocks_per_sm * (plan.smem_bytes + 1024) <= limits.smem_per_sm
        assert 1 <= plan.blocks <= plan.all_tiles


@pytest.mark.parametrize(
    ("fragment", "of", "kwargs"),
    [
        ("transposed", "both", {"transposed": True}),
        ("grouped", "both", {"groups": 2}),
        ("float64", "both", {"dtype": "float64"}),
        ("odd number", "both", {"dtype": "bfloat16", "size": (8, 9, 39)}),
        ("wider than 3", "both", {"kernel": (3, 3, 5)}),
        ("dilation of the width", "both", {"dilation": (1, 1, 2)}),
        ("padding of the width", "both", {"padding": (1, 1, 3)}),
        ("stride", "both", {"stride": (1, 1, 2)}),
        ("above 40", "wgrad", {"c_in": 6}),
        ("above 32", "dgrad", {"c_in": 12}),
        ("a stride", "dgrad", {"stride": (1, 2, 1)}),
        ("than a block has", "dgrad", {"size": (8, 9, 1040)}),
    ],
)
def test_few_channels_gradient_plans_refuse_with_a_reason(fragment: str, of: str, kwargs: dict) -> None:
    arguments = {"c_in": 4, "c_out": 32, "size": (8, 9, 40), "kernel": (3, 3, 3), "planar": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    plans = {"wgrad": dev.plan_few_wgrad, "dgrad": dev.plan_few_dgrad}
    for plan in plans.values() if of == "both" else [plans[of]]:
        assert fragment in plan(problem).refusal


@pytest.mark.parametrize(
    "item", [("float32", True), ("float32", False), ("bfloat16", True), ("float16", True)], ids=str
)
@pytest.mark.parametrize(
    ("n", "c_out", "size", "kernel", "padding"),
    [
        (128, 64, (1, 128, 128), (1, 3, 3), (0, 0, 0)),
        (3, 64, (1, 17, 40), (1, 3, 3), (0, 1, 1)),
        (5, 40, (2, 11, 40), (1, 2, 3), (0, 0, 1)),
        (2, 48, (1, 3, 700), (1, 1, 1), (0, 0, 0)),
    ],
)
def test_plan_of_the_pass_that_makes_dy_and_dx(n, c_out, size, kernel, padding, item) -> None:
    """Strips of four rows and more, or of all, beside which the weights for dx, what is carried and the operands of the
    products for dweight fit."""
    dtype, allow_tf32 = item
    problem, output = make_problem(
        8, c_out, size, kernel=kernel, padding=padding, n=n, dtype=dtype, allow_tf32=allow_tf32, planar=True
    )
    limits = GPUS["h200"]
    alone = dev.plan_conv_norm_lse(problem, limits)
    plan = dev.plan_conv_norm_lse(problem, limits, makes_dx=True)
    assert alone.refusal is None
    assert plan.refusal is None
    assert plan.rows >= min(4, output[1])
    terms = 1 if allow_tf32 or dtype != "float32" else 2
    weights, carried = 64 * 72 * 2 * terms, 384 * 24 * 4
    stages = plan.stages * (plan.words // 4 + plan.zero_plane) * plan.plane * 4 * terms
    own = 64 * plan.k_steps * 8 * 4 * terms
    operands = 256 + 3 * 8192 * terms
    assert weights + carried + operands + stages + own <= plan.smem_bytes
    assert plan.k_steps == 5
    assert plan.smem_bytes <= limits.smem_per_block


@pytest.mark.parametrize(
    ("fragment", "kwargs"),
    [
        ("a stride", {"stride": (1, 2, 1)}),
        ("deeper", {"size": (4, 20, 40), "kernel": (2, 3, 3)}),
        ("deeper", {"kernel": (1, 4, 3)}),
        ("a dilation", {"dilation": (1, 2, 1)}),
        ("padding of the depth", {"padding": (1, 0, 0)}),
        ("8 input channels", {"c_in": 16}),
        ("10^7 positions", {"size": (1, 5000, 5000)}),
        ("33 to 64", {"c_out": 32}),
    ],
)
def test_the_pass_that_makes_dy_and_dx_refuses_with_a_reason(fragment: str, kwargs: dict) -> None:
    arguments = {"c_in": 8, "c_out": 64, "size": (1, 20, 40), "kernel": (1, 3, 3), "n": 4, "planar": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_conv_norm_lse(problem, makes_dx=True).refusal


@pytest.mark.parametrize(
    ("n", "c_in", "c_out", "size", "kernel"),
    [
        (128, 3, 24, (24, 32, 32), (3, 3, 3)),
        (128, 8, 64, (1, 128, 128), (1, 3, 3)),
        (2, 4, 32, (64, 96, 96), (3, 3, 3)),
    ],
)
@pytest.mark.parametrize(("dtype", "allow_tf32"), [*((d, True) for d in DTYPES), ("float32", False)])
def test_few_channels_contiguous_take_own_gradients(n, c_in, c_out, size, kernel, dtype, allow_tf32) -> None:
    limits = GPUS["h200"]
    problem, _ = make_problem(c_in, c_out, size, kernel=kernel, n=n, dtype=dtype, allow_tf32=allow_tf32, planar=True)
    choice = dev.choose_conv_gradients(problem, limits)
    assert choice.explain() == "dx kgopt; dweight kgopt"
    assert isinstance(choice.dx, dev.FewDgradPlan)
    assert isinstance(choice.dweight, dev.FewWgradPlan)
    choice = dev.choose_conv_gradients(problem, limits, dev.ConvBackend.aten)
    assert "asked for" in choice.why_aten_dx
    problem, _ = make_problem(c_in, c_out, size, kernel=kernel, n=n, dtype=dtype)
    assert not isinstance(dev.choose_conv_gradients(problem, limits).dweight, dev.FewWgradPlan), "x is not contiguous"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_few_march_plan_of_any_shape(data) -> None:
    """Slabs and marches cover dx, and what products read of x and dy lies within a plane and within 8 channels."""
    draw = data.draw
    kernel = draw(st.tuples(*(st.integers(1, most) for most in (4, 5, 5))))
    padding = tuple(draw(st.integers(0, k)) for k in kernel)
    size = draw(st.tuples(st.integers(1, 70), st.integers(1, 140), st.integers(1, 200)))
    if any(s + 2 * p < k for s, p, k in zip(size, padding, kernel, strict=True)):
        return
    stride = draw(st.sampled_from([(1, 1, 1)] * 5 + [(1, 2, 1)]))
    dtype, allow_tf32 = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    c_in, c_out, n = draw(st.integers(1, 5)), draw(st.integers(1, 36)), draw(st.integers(1, 300))
    case = {"kernel": kernel, "padding": padding, "stride": stride, "dtype": dtype, "allow_tf32": allow_tf32, "n": n}
    problem, _ = make_problem(c_in, c_out, size, planar=True, **case)
    limits = GPUS["h200"]
    plan = dev.plan_few_march(problem, limits)
    taps, pitch = math.prod(kernel), size[2] + 2 * padding[2]
    terms = 2 if dtype == "float32" and not allow_tf32 else 1
    reasons = {
        "4 input channels": c_in > 4,
        "32 output channels": c_out > 32,
        "a stride": stride != (1, 1, 1),
        "a padding above": any(p > k - 1 for p, k in zip(padding, kernel, strict=True)),
        "3 taps along the depth": kernel[0] > 3,
        "27 taps": taps > 27,
        "do not fit": None if pitch * (2 * kernel[1] - 1) > 256 or terms == 2 else False,
    }
    if check_refusal(plan.refusal, reasons):
        return
    assert plan.pitch == pitch
    assert plan.tiles * 8 >= c_out
    assert plan.slabs * plan.rows >= size[1]
    assert plan.parts * plan.planes >= size[0]
    assert plan.marches == n * plan.slabs * plan.parts
    assert 1 <= plan.blocks <= min(plan.marches, 2 * limits.sm_count)
    assert [plan.dy_rows, plan.x_rows] == [plan.rows + kernel[1] - 1, plan.rows + 2 * (kernel[1] - 1)]
    assert plan.x_rows * pitch <= 3 * 256, "more positions of x than threads load"
    assert plan.terms == (terms == 2)
    assert plan.dx_tiles <= 8 // terms
    assert plan.dx_tiles * 64 >= plan.rows * pitch
    assert plan.dy_tiles * 64 >= plan.dy_rows * pitch
    reach = (kernel[1] - 1) * pitch + kernel[2] - 1
    assert plan.x_plane >= max(plan.dy_tiles * 64, plan.dy_rows * pitch + 15) + reach
    assert plan.dy_octet >= plan.dx_tiles * 64 + reach
    assert plan.dy_octet >= kernel[2] - 1 + max(plan.dy_tiles * 64, plan.dy_rows * pitch + 15)
    assert plan.x_plane % 8 == plan.dy_octet % 8 == 4, "banks"
    assert plan.plane_steps * 2 >= kernel[1] * kernel[2]
    assert plan.dx_steps * 2 >= plan.tiles * kernel[1] * kernel[2]
    rows = [plan.tap(i) for i in range(plan.halves * 16)]
    assert sorted(t for t in rows if t >= 0) == list(range(taps))
    assert plan.smem_bytes >= 16 * (4 * plan.x_plane + terms * plan.tiles * plan.dy_octet)
    assert 2 * (plan.smem_bytes + 1024) <= limits.smem_per_sm
    floats = taps * 4 * plan.tiles * 8 if terms == 2 else plan.halves * plan.inputs * plan.tiles * 128
    assert plan.partial_floats == plan.blocks * floats


@pytest.mark.parametrize("with_dx", [True, False])
@pytest.mark.parametrize("most", [1, 13, 128, 500])
def test_made_gradients_store_no_more_than_is_asked_for(with_dx, most) -> None:
    problem, _ = make_problem(5, 24, (24, 32, 32), kernel=(3, 2, 3), n=128, dtype="float32", planar=True)
    plans = dev.plan_made_gradients(problem, GPUS["h200"], with_dx, most)
    assert plans.march.refusal
    assert ("above 32" if with_dx else "not asked for") in plans.why_apart
    assert plans.dweight.refusal is None
    assert plans.dx.refusal is None
    assert plans.samples <= most if with_dx else plans.samples == 128
    assert plans.dweight.all_tiles % plans.samples == plans.dx.all_tiles % plans.samples == 0


@pytest.mark.parametrize(("dtype", "allow_tf32"), [*((d, True) for d in DTYPES), ("float32", False)])
def test_first_pipelines_gradients_come_from_one_launch(dtype, allow_tf32) -> None:
    shape = {"kernel": (3, 3, 3), "n": 128, "dtype": dtype, "allow_tf32": allow_tf32, "planar": True}
    problem, _ = make_problem(3, 24, (24, 32, 32), **shape)
    plans = dev.plan_made_gradients(problem, GPUS["h200"], True, 13)
    assert plans.march.refusal is None
    wide, _ = make_problem(3, 24, (24, 96, 96), **shape)
    plans = dev.plan_made_gradients(wide, GPUS["h200"], True, 13)
    if allow_tf32:
        assert plans.march.refusal is None
        return
    assert "faster" in plans.march.refusal
    assert plans.why_apart is None
    assert plans.dweight.dx_rows > 0
    assert plans.samples == 128


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_plan_of_a_head_of_any_shape(data) -> None:
    """Blocks share the rows, threads the columns, and every partial sum has its place."""
    draw = data.draw
    kernel = draw(st.sampled_from([(1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 3, 3)]))
    stride = draw(st.sampled_from([(1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 2, 2)]))
    size = (draw(st.integers(1, 40)), draw(st.integers(3, 200)), draw(st.integers(3, 300)))
    dtype = draw(st.sampled_from(DTYPES))
    vec = 4 if dtype == "float32" else 8
    c_in, c_out = vec * draw(st.sampled_from([1, 3, 4, 12, 100, 256, 257])), draw(st.integers(1, 10))
    case = dict(n=draw(st.integers(1, 9)), transposed=draw(st.booleans()), dtype=dtype)
    innermost = draw(st.booleans())
    problem, output = make_problem(c_in, c_out, size, kernel, stride, **case, channels_innermost=innermost)
    plan = dev.plan_head_gradient(problem, GPUS["h200"])
    rows = case["n"] * math.prod(output)
    reasons = {
        "transposed": case["transposed"],
        "not 1 x 1": kernel != (1, 1, 1) or stride != (1, 1, 1),
        "16-byte pieces": not innermost,
        "over 8 outputs": c_out > 8 or c_in > 256 * vec,
        "small": rows < 4096,
    }
    if check_refusal(plan.refusal, reasons):
        return
    assert (plan.rows, plan.c_in, plan.c_out) == (rows, c_in, c_out)
    assert c_out <= plan.outputs <= 8
    assert 1 <= plan.blocks <= 4 * 132
    assert plan.partial_floats == plan.blocks * c_out * c_in
    assert dev.choose_conv_gradients(problem, GPUS["h200"]).explain() == "dx kgopt; dweight kgopt"
    copied = dev.choose_conv_gradients(problem, GPUS["h200"], dev.ConvBackend.auto, True)
    assert "aten" in copied.explain()
