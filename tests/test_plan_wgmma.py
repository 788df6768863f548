"""Plans of the wgmma kernels for channels innermost and for wide transposed convolutions (csrc/conv3d/wgmma)."""

from __future__ import annotations

import collections
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_problems import DTYPES, GPUS, check_refusal, dev, make_problem

# What none of these kernels runs, as changes of a convolution that they do: fragment of the reason, change, GPU.
REFUSED_BY_ALL = [
    ("wgmma", {}, dev.DeviceLimits(has_wgmma=False)),
    ("float64", {"dtype": "float64"}, None),
    ("grouped", {"groups": 2}, None),
    ("stride", {"stride": (1, 2, 1)}, None),
    ("above 7", {"kernel": (1, 9, 3)}, None),
]
REFUSED_OF_CHANNELS_INNERMOST = [
    ("channels_last", {"channels_innermost": False}, None),
    ("16 bytes", {"c_in": 33}, None),
    ("multiple of 8", {"c_out": 33}, None),
    ("beyond the kernel", {"padding": (0, 3, 0)}, None),
]


def check_tap_columns_plan(plan, case: dict, size, output, limits) -> None:
    """Every output is written once, with all its taps at hand, and shared memory holds what the kernel puts there."""
    width, height = size[2], output[1]
    owned = range(plan.owned_first, plan.owned_end)
    shifts = [plan.first_shift + tap * case["dilation"][2] for tap in range(plan.taps_w)]
    assert (shifts[0], shifts[-1]) == (plan.first_shift, plan.last_shift)
    assert all(abs(shift) < 8 for shift in shifts), "a tap reaches beyond the neighbouring rows of eight"
    rows = dev.WGMMA_CONSUMERS // plan.teams * plan.segments * 64
    assert plan.runs * plan.run_strips * plan.strip_rows == rows
    written = collections.Counter()
    for strip in range(plan.runs_per_plane * plan.run_strips):
        for row in owned:
            q = strip * plan.strip_step - plan.owned_first + row
            line, column = divmod(q, width)
            assert q < 0 or plan.by_width(q) == line
            if q < 0 or line >= height:
                continue
            assert all(0 <= row + s < plan.strip_rows for s in shifts if 0 <= column + s < width), "a tap is missing"
            out = column + plan.anchor_to_out
            written[line, out] += 0 <= out < output[2]
            if plan.anchor_to_out == 1 and column == 0:
                written[line, 0] += 1
            if column == width - 1 and out + 1 < output[2]:
                written[line, out + 1] += 1
            if plan.anchor_to_out == 1 or (column == width - 1 and out + 1 < output[2]):
                assert plan.wide
    written = {place: count for place, count in written.items() if count}
    assert written == {place: 1 for place in itertools.product(range(height), range(output[2]))}
    last = (plan.run_strips - 1) * plan.strip_step + plan.strip_rows
    reach = (plan.taps_per_stage - 1) * case["dilation"][1] * width
    assert plan.boxes * plan.box_rows >= last + reach
    assert plan.box_rows <= 256
    assert plan.box_rows % 8 == 0
    assert plan.taps[1] % plan.taps_per_stage == 0
    assert 2 <= plan.a_stages <= dev.TAP_COLUMNS_MAX_STAGES
    if plan.teams == 1:
        assert 2 <= plan.b_stages <= dev.TAP_COLUMNS_MAX_STAGES
        assert plan.lag <= plan.b_stages - 2
    else:
        assert plan.n_tiles == 1
        assert plan.b_stages == plan.taps[0] * plan.taps[1] * plan.chunks
    assert plan.smem_bytes <= limits.smem_per_block
    assert 1 <= plan.blocks <= limits.sm_count
    assert plan.blocks * plan.teams < plan.tiles + plan.teams


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_tap_columns_plan_of_any_shape(data) -> None:
    draw = data.draw
    transposed = draw(st.booleans())
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 7)), 3)
    size = (draw(st.integers(1, 9)), draw(st.integers(1, 30)), draw(st.integers(1, 300)))
    dilation = tuple(draw(st.integers(1, 3)) for _ in range(3))
    case = {"kernel": kernel, "stride": (1, 1, 1), "dilation": dilation}
    case["padding"] = tuple(draw(st.integers(0, (k - 1) * d)) for k, d in zip(kernel, dilation, strict=True))
    outputs = [
        dev.conv_out_size(*dim, transposed)
        for dim in zip(size, *(case[k] for k in ("kernel", "stride", "padding", "dilation")), strict=True)
    ]
    if min(outputs) < 1:
        return
    problem, output = make_problem(
        8 * draw(st.integers(1, 24)),
        8 * draw(st.integers(1, 24)),
        size,
        **case,
        n=draw(st.integers(1, 20)),
        transposed=transposed,
        dtype=draw(st.sampled_from(DTYPES)),
        channels_innermost=True,
    )
    plan = dev.plan_tap_columns(problem, GPUS["h200"])
    wider = output[2] - size[2]
    if check_refusal(plan.refusal, {"wider than the input": wider > 0 and (wider, dilation[2]) != (2, 1)}):
        return
    check_tap_columns_plan(plan, case, size, output, GPUS["h200"])


@pytest.mark.parametrize("half", [False, True])
def test_tap_columns_are_a_permutation(half: bool) -> None:
    assert sorted(dev.tap_columns_channel(x, half) for x in range(64)) == list(range(64))


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        *REFUSED_BY_ALL,
        *REFUSED_OF_CHANNELS_INNERMOST,
        ("fp32 accuracy", {"allow_tf32": False}, None),
        ("width other than 3", {"kernel": (3, 3, 2)}, None),
        ("other than a store", {"epilogue": dev.ConvEpilogue.stats}, None),
        ("wider than the input", {"dilation": (1, 1, 2), "transposed": True}, None),
        ("dilation along the width", {"dilation": (1, 1, 9)}, None),
        ("does not fit", {}, dev.DeviceLimits(smem_per_block=60 << 10)),
    ],
)
def test_tap_columns_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    arguments = {"c_in": 32, "c_out": 32, "size": (8, 9, 40), "kernel": (3, 3, 3), "channels_innermost": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_tap_columns(problem, limits or dev.DeviceLimits()).refusal


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_position_rows_plan_of_any_shape(data) -> None:
    """Every tap finds its input, or a zero, at one distance along rows and planes with shared padding."""
    draw = data.draw
    transposed = draw(st.booleans())
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(3))
    dilation = tuple(draw(st.integers(1, 3)) for _ in range(3))
    size = tuple(draw(st.integers(1, 9)) for _ in range(3))
    case = {"kernel": kernel, "stride": (1, 1, 1), "dilation": dilation}
    case["padding"] = tuple(draw(st.integers(0, (k - 1) * d)) for k, d in zip(kernel, dilation, strict=True))
    outputs = [
        dev.conv_out_size(*dim, transposed)
        for dim in zip(size, *(case[k] for k in ("kernel", "stride", "padding", "dilation")), strict=True)
    ]
    if min(outputs) < 1:
        return
    n, limits = draw(st.integers(1, 40)), GPUS["h200"]
    problem, output = make_problem(
        8 * draw(st.integers(1, 24)),
        8 * draw(st.integers(1, 24)),
        size,
        **case,
        n=n,
        transposed=transposed,
        dtype=draw(st.sampled_from(DTYPES)),
        allow_tf32=draw(st.booleans()),
        channels_innermost=True,
    )
    plan = dev.plan_position_rows(problem, limits)
    assert plan.refusal is None
    assert (plan.columns == 128) == (plan.parts == 2)
    if plan.parts == 2:  # three products of parts; the copy has whole chunks of both
        assert plan.chunks % 3 == 0
        assert plan.copy_bytes == n * math.prod(size) * plan.chunks // 3 * 2 * plan.row_bytes
    spans = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    assert plan.padding == [s - p for s, p in zip(spans, case["padding"], strict=True)] if transposed else True

    def loaded(depth: int, position: int) -> tuple[int, ...] | None:
        """What lies at a position counted along rows from plane `depth` of the outputs on; None: zeros."""
        line, column = divmod(position, plan.row_slots)
        plane, row = divmod(line, plan.plane_rows)
        place = (depth + plane - plan.padding[0], row - plan.padding[1], column - plan.padding[2])
        return place if all(0 <= i < s for i, s in zip(place, size, strict=True)) else None

    for tap in itertools.product(*(range(0, span + 1, d) for span, d in zip(spans, dilation, strict=True))):
        for place in itertools.product(*map(range, output)):
            position = place[1] * plan.row_slots + place[2]
            source = tuple(o - p + t for o, p, t in zip(place, plan.padding, tap, strict=True))
            inside = all(0 <= i < s for i, s in zip(source, size, strict=True))
            found = loaded(place[0] + tap[0], position + tap[1] * plan.row_slots + tap[2])
            assert found == (source if inside else None)
    tile = plan.columns * dev.WGMMA_CONSUMERS
    positions = ((output[0] - 1) * plan.plane_rows + output[1]) * plan.row_slots
    assert plan.tiles_per_sample == -(-positions // tile)
    assert plan.tiles == n * plan.m_tiles * plan.tiles_per_sample
    assert plan.m_tiles * plan.segments * 64 >= 8
    reach = tile - 1 + spans[1] * plan.row_slots + spans[2]
    assert all((q % plan.row_slots + reach) // plan.row_slots < plan.stage_rows for q in range(0, positions, tile))
    assert plan.row_slots <= 256
    assert plan.row_slots * plan.row_bytes % 128 == 0
    assert min(plan.x_stages, plan.w_stages) >= 2
    assert max(plan.x_stages, plan.w_stages) <= dev.POSITION_ROWS_MAX_STAGES
    assert plan.lag <= plan.w_stages - 2
    assert plan.smem_bytes <= limits.smem_per_block
    assert 1 <= plan.blocks <= min(plan.tiles, limits.sm_count)

    # With a norm in front: every row of a stage is in a piece with a barrier, and the barriers have room.
    assert not plan.normalizes
    prologue = dev.plan_position_rows(problem, limits, normalizes=True)
    if plan.parts == 2:
        assert "copy of x" in prologue.refusal
        return
    assert prologue.refusal is None
    assert prologue.normalizes
    assert -(-prologue.stage_rows // prologue.piece_rows) <= dev.POSITION_ROWS_PIECES
    room = 8 * prologue.x_stages * dev.POSITION_ROWS_PIECES
    stages = prologue.x_stages * -(-prologue.stage_rows * prologue.row_slots * prologue.row_bytes // 1024)
    weights = prologue.w_stages * 64 * prologue.row_bytes
    assert stages * 1024 + weights + room <= prologue.smem_bytes <= limits.smem_per_block


def test_rows_of_an_image_are_a_permutation() -> None:
    assert sorted(map(dev.position_rows_channel, range(128))) == list(range(128))


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        *REFUSED_BY_ALL,
        *REFUSED_OF_CHANNELS_INNERMOST,
        ("more than 8192", {"c_out": 8200}, None),
        ("other than a store", {"epilogue": dev.ConvEpilogue.stats}, None),
        ("rows above 256", {"size": (3, 3, 260)}, None),
        ("does not fit", {}, dev.DeviceLimits(smem_per_block=30 << 10)),
    ],
)
def test_position_rows_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    arguments = {"c_in": 64, "c_out": 64, "size": (8, 9, 40), "kernel": (3, 3, 3), "channels_innermost": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_position_rows(problem, limits or dev.DeviceLimits()).refusal


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_transposed_norm_plan_of_any_shape(data) -> None:
    """Every tap of every output finds its input, or a zero, at one distance in the padded copy of x."""
    draw = data.draw
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(3))
    dilation = tuple(draw(st.integers(1, 3)) for _ in range(3))
    size = tuple(draw(st.integers(1, 9)) for _ in range(3))
    dtype, allow_tf32 = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    n = draw(st.integers(1, 40))
    problem, output = make_problem(
        draw(st.integers(1, 200)),
        draw(st.integers(1, 300)),
        size,
        kernel,
        dilation=dilation,
        n=n,
        transposed=True,
        dtype=dtype,
        allow_tf32=allow_tf32,
        epilogue=dev.ConvEpilogue.store_stats,
        planar=True,
    )
    scaled = draw(st.booleans())
    plan = dev.plan_transposed_norm(problem, GPUS["h200"], scaled)
    if scaled and plan.refusal is not None and "in place of TF32" in plan.refusal:
        assert dtype != "float32" or not allow_tf32
        return
    odd = math.prod(output) * (4 if dtype == "float32" else 2) % 16 != 0
    if check_refusal(plan.refusal, {"16-byte": odd}):
        return
    spans = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    assert plan.plane == output[1] * output[2]
    assert plan.slots == size[0] * plan.plane
    assert plan.reach == (spans[0] * output[1] + spans[1]) * output[2] + spans[2]
    slot_of = {(d * output[1] + h) * output[2] + w: (d, h, w) for d, h, w in itertools.product(*map(range, size))}
    for tap in itertools.product(*(range(0, span + 1, d) for span, d in zip(spans, dilation, strict=True))):
        shift = (tap[0] * output[1] + tap[1]) * output[2] + tap[2] - plan.reach
        for place in itertools.product(*map(range, output)):
            q = (place[0] * output[1] + place[1]) * output[2] + place[2]
            source = tuple(o - span + t for o, span, t in zip(place, spans, tap, strict=True))
            inside = all(0 <= i < s for i, s in zip(source, size, strict=True))
            assert slot_of.get(q + shift) == (source if inside else None)
    tile = plan.columns * dev.WGMMA_CONSUMERS
    positions = output[0] * plan.plane
    assert plan.tiles_per_sample == -(-positions // tile)
    assert plan.tiles == n * plan.m_tiles * plan.tiles_per_sample
    rows = spans[1] * output[2] if plan.whole_height else 0
    assert plan.boxes * plan.box_rows >= tile + rows + spans[2]
    assert plan.box_rows <= 256
    assert plan.box_rows % 8 == 0
    assert min(plan.x_stages, plan.w_stages) >= 2
    assert plan.lag < (kernel[1] if plan.whole_height else 1) * kernel[2]
    assert plan.smem_bytes <= GPUS["h200"].smem_per_block
    assert 1 <= plan.blocks <= min(plan.tiles, GPUS["h200"].sm_count)


@pytest.mark.parametrize(("n", "size", "most"), [(16, 32, 1), (5, 40, 1), (64, 24, 3), (300, 16, 3)])
def test_blocks_share_the_tiles_with_fewer_taps(n: int, size: int, most: int) -> None:
    """No block has many more taps of the depth than the mean."""
    problem, output = make_problem(
        64,
        128,
        (size,) * 3,
        (3,) * 3,
        n=n,
        transposed=True,
        dtype="bfloat16",
        epilogue=dev.ConvEpilogue.store_stats,
        planar=True,
    )
    plan = dev.plan_transposed_norm(problem, GPUS["h200"])
    tile, count = plan.columns * dev.WGMMA_CONSUMERS, plan.tiles_per_sample
    work = [0] * plan.blocks
    for number in range(plan.tiles):
        sample, place = divmod(number, count)
        index = (place + plan.first_short - plan.short_place(sample)) % count
        planes = range(index * tile // plan.plane, min(((index + 1) * tile - 1) // plan.plane, output[0] - 1) + 1)
        work[number % plan.blocks] += len({t for d in planes for t in range(3) if 0 <= d - t < size})
    assert max(work) <= sum(work) / plan.blocks + most


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        *REFUSED_BY_ALL,
        ("padding", {"padding": (0, 1, 0)}, None),
        ("16-byte", {"size": (7, 7, 7)}, None),
        ("512 output channels", {"c_out": 520}, None),
        ("does not fit", {}, dev.DeviceLimits(smem_per_block=60 << 10)),
    ],
)
def test_transposed_norm_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    arguments = {"c_in": 32, "c_out": 128, "size": (8, 8, 8), "kernel": (3, 3, 3), "transposed": True, "planar": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_transposed_norm(problem, limits or dev.DeviceLimits()).refusal
