"""Plans of GroupNorm by tiles and by clusters (csrc/groupnorm/tiles, cluster)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_problems import DTYPES, check_refusal, dev


@settings(deadline=None, max_examples=300)
@given(
    n=st.integers(1, 5),
    groups=st.integers(1, 12),
    per_group=st.integers(1, 40),
    s=st.one_of(st.integers(1, 50_000).map(lambda vectors: 8 * vectors), st.integers(2, 400_000)),
    dtype=st.sampled_from(DTYPES),
    tensors=st.sampled_from([1, 2]),
    x_line=st.integers(0, 7),
    sm_count=st.sampled_from([4, 114, 132]),
)
def test_plan_group_norm_tiles(n, groups, per_group, s, dtype, tensors, x_line, sm_count):
    """Tiles on 128-byte lines cover each group once, and the blocks have a place for every tile of a group."""
    vec = 4 if dtype == "float32" else 8
    sizes = {"dtype": dtype, "tensors": tensors, "x_line": x_line, "sm_count": sm_count}
    plan = dev.plan_group_norm_tiles(n, groups * per_group, s, groups, **sizes)
    elements = per_group * s
    tile = dev.TILES_SLOT_BYTES // 16 // tensors
    reasons = {
        "no multiple of 16 bytes": elements % vec != 0,
        "a channel of less than 16 bytes": s < vec,
        "a channel is shorter than a tile": tensors == 2 and s < tile * vec,
        "few tiles": None if elements <= 32 * tile * vec else False,
        "x is small": tensors == 2 and n * groups * elements * 16 // vec <= 4 << 20,
        "larger than what the GPU holds": None if elements > 9 * tile * sm_count * vec else False,
    }
    if check_refusal(plan.get("refusal"), reasons):
        return
    tiles, blocks, run = plan["tiles_per_group"], plan["blocks"], plan["run"]
    assert plan["group_vectors"] * vec == elements
    assert plan["tiles"] == n * groups * tiles
    assert plan["parts"] == min(tiles // run, blocks)
    assert plan["words"] == n * groups * (plan["parts"] + 1)
    assert plan["holders"] in (0, dev.TILES_HOLDERS)
    assert tiles % run == 0
    assert plan["collects"] or not plan["holders"]
    if tensors == 1 and plan["parts"] < blocks:
        # Neighbouring groups' mergers are so many blocks apart, and come round to the same ones last.
        assert math.gcd(plan["parts"] + plan["merger_step"], blocks) == 1
    assert run == 1 or tiles <= run * blocks, "a block has several runs of a group, of several tiles"
    # Or a group could wait for its own tiles to make room: a block has every `blocks`th run.
    assert -(-tiles // run // blocks) * run < dev.TILES_SLOTS + plan["holders"]
    for group in {0, n * groups // 2, n * groups - 1}:
        head = (x_line + group * plan["group_vectors"]) % 8
        assert tiles * tile >= plan["group_vectors"] + head
        assert (tiles - 1 - run) * tile < plan["group_vectors"] + head
    for position in (0, 1, s - 1, s, s + 1, 2 * s - 1, s + tile * vec):
        assert (position * plan["s_magic"] >> 32) >> plan["s_shift"] == position // s
    for offset in (0, s - 1, s, elements - 1, elements // 2):
        assert offset * plan["s_magic64"] >> 64 == offset // s


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("bulk copies", {"has_bulk_copy": False}),
        ("shared memory", {"smem_bytes": 99 << 10}),
        ("float64", {"dtype": "float64"}),
        ("channels_last", {"channels_last": True}),
        ("multiple of 16 bytes", {"aligned": False}),
        ("no multiple of 16 bytes", {"c": 3, "s": 500_001, "g": 1}),
        ("less than 16 bytes", {"c": 1 << 20, "s": 3}),
        ("few tiles", {"s": 1000}),
        ("larger than what the GPU holds", {"s": 1 << 23}),
        ("shorter than a tile", {"c": 3200, "s": 2000, "tensors": 2}),
        ("x is small", {"s": 1 << 15, "tensors": 2}),
    ],
)
def test_plan_group_norm_tiles_refuses(why, change):
    sizes = {"n": 1, "c": 32, "s": 1 << 18, "g": 8}
    assert "refusal" not in dev.plan_group_norm_tiles(**sizes)
    assert why in dev.plan_group_norm_tiles(**{**sizes, **change})["refusal"]


@settings(deadline=None, max_examples=200)
@given(
    n=st.integers(1, 600),
    groups=st.integers(1, 12),
    per_group=st.integers(1, 12),
    group_tiles=st.floats(2, 14),
    extra=st.sampled_from([0, 0, 0, 1]),
    dtype=st.sampled_from(DTYPES),
    x_line=st.integers(0, 7),
)
def test_plan_group_norm_alone(n, groups, per_group, group_tiles, extra, dtype, x_line):
    """A block has a place for every tile of its group, and tells nobody of it."""
    vec = 4 if dtype == "float32" else 8
    s = int(group_tiles * dev.TILES_SLOT_BYTES // 16 / per_group) * vec + extra
    plan = dev.plan_group_norm_alone(n, groups * per_group, s, groups, dtype=dtype, x_line=x_line)
    tile = dev.TILES_SLOT_BYTES // 16
    vectors = per_group * s // vec
    reasons = {
        "no multiple of 16 bytes": per_group * s % vec != 0,
        "few tiles": None if vectors <= 3 * tile else False,
        "larger than what a block holds": None if vectors > 11 * tile else False,
        "few groups": None if n * groups < 4 * 132 else False,
    }
    if check_refusal(plan.get("refusal"), reasons):
        return
    tiles = plan["tiles_per_group"]
    assert plan["run"] == tiles < dev.TILES_SLOTS
    assert plan["parts"] == 1
    assert plan["words"] == 0
    assert plan["blocks"] <= n * groups
    assert plan["tiles"] == n * groups * tiles
    for group in {0, n * groups // 2, n * groups - 1}:
        assert tiles * tile >= vectors + (x_line + group * vectors) % 8


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("few tiles", {"s": 1000}),
        ("larger than what a block holds", {"s": 1 << 17}),
        ("few groups", {"n": 1}),
        ("do not fit", {"tensors": 2}),
        ("float64", {"dtype": "float64"}),
    ],
)
def test_plan_group_norm_alone_refuses(why, change):
    sizes = {"n": 128, "c": 24, "s": 19800, "g": 8, "dtype": "bfloat16"}
    assert "refusal" not in dev.plan_group_norm_alone(**sizes)
    assert why in dev.plan_group_norm_alone(**{**sizes, **change})["refusal"]


@settings(max_examples=300, deadline=None)
@given(
    n=st.integers(1, 200),
    groups=st.integers(1, 64),
    per_group=st.integers(1, 40),
    s=st.one_of(st.integers(1, 100), st.integers(1, 60_000)),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    tensors=st.sampled_from([1, 2]),
    offset=st.integers(0, 127),
    max_blocks=st.sampled_from([0, 8, 16]),
)
def test_plan_group_norm_cluster(n, groups, per_group, s, dtype, tensors, offset, max_blocks):
    """The blocks' shares cover a group wherever it starts in a line, and fit in shared memory with all else."""
    size = 4 if dtype == "float32" else 2
    line, elements = 128 // size, per_group * s
    offset = offset // size * size
    plan = dev.plan_group_norm_cluster(
        n, groups * per_group, s, groups, dtype, tensors=tensors, x_offset=offset, max_blocks=max_blocks
    )
    few = n * groups * 16 < 132 * 0.75 and elements * size > 32 << 10
    large = tensors * elements * size > max_blocks * 227 * 1024 * 0.7  # coefficients and sums lie beside it
    reasons = {
        "many groups of under 768 bytes": None if elements * size < 768 and n * groups > 8192 else False,
        "larger than the shared memory": None if large or s < 64 else False,
        "compute capability": None if max_blocks == 0 else False,  # a team needs no cluster
        "need the whole GPU": None if tensors == 2 and few else False,
    }
    if check_refusal(plan.get("refusal"), reasons):
        return
    blocks, share, threads = plan["blocks"], plan["share"], plan["threads"]
    assert plan["elements"] == elements
    assert share % line == 0
    origins = {(offset // size + g * elements) % line for g in range(min(n * groups, line))}
    assert max(blocks, 1) * share >= max(origins) + elements
    if blocks == 0:
        assert tensors == 1 or per_group == 1
        assert plan["lanes"] in (8, 32)
        assert plan["passes"] in dev.TEAM_PASSES
        assert share * size <= plan["passes"] * plan["lanes"] * 16
        assert plan["grid"] * threads >= n * groups * plan["lanes"]
    else:
        assert blocks <= max_blocks
        assert plan["grid"] == n * groups * blocks
        assert threads % 32 == 0
        assert threads <= 512
        if plan["hold"]:
            assert plan["grid"] <= 4 * 132  # all at a time
            assert share * size <= plan["hold"] * threads * 16
            assert (threads, plan["hold"]) in dev.CLUSTER_HELD[tensors - 1]
            warps, rows = threads // 32, plan["rows"]
            if tensors == 1:
                assert plan["smem_bytes"] == (blocks + warps) * 16 + rows * 8
            else:
                assert plan["smem_bytes"] == (blocks * 16 + rows * 8) * warps
                # No vector is in two channels, and few channels are in a share.
                assert s * size % 16 == 0
                assert offset % 16 == 0
                assert rows <= 4
        else:
            assert tensors * share * size < plan["smem_bytes"] <= 227 * 1024
        assert share * size <= dev.CLUSTER_MAX_PIECES * dev.CLUSTER_PASSES * threads * 16
    for origin in origins:
        for rank in range(max(blocks, 1)):
            first, last = max(0, rank * share - origin), min(elements, (rank + 1) * share - origin) - 1
            assert last < first or last // s - first // s + 1 <= plan["rows"]
    for position in (0, 1, s - 1, s, s + 1, 2 * s - 1, elements - 1):
        assert (position * 2 * plan["s_magic"] >> 32) >> (plan["s_shift"] + 1) == position // s


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("compute capability", {"max_blocks": 0}),
        ("float64", {"dtype": "float64"}),
        ("channels_last", {"channels_last": True}),
        ("different distances", {"aligned": False}),
        ("larger than the shared memory of a cluster", {"s": 1 << 18}),
        ("larger than the shared memory of a cluster", {"s": 120_000, "tensors": 2}),
        ("many groups", {"n": 4096, "s": 4, "tensors": 2}),
        ("slow activations", {"n": 1, "g": 4, "s": 20_000, "long_chain": True}),
        ("whole GPU", {"n": 1, "g": 2, "s": 20_000, "tensors": 2}),
    ],
)
def test_plan_group_norm_cluster_refuses(why, change):
    sizes = {"n": 4, "c": 32, "s": 5000, "g": 8}
    assert "refusal" not in dev.plan_group_norm_cluster(**sizes)
    assert why in dev.plan_group_norm_cluster(**{**sizes, **change})["refusal"]
