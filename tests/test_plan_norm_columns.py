"""Plans of GroupNorm of channels_last tensors by columns and by rows (csrc/groupnorm/columns, rows)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_problems import check_refusal, dev


def assert_clears_alone(p: dict, sm_count: int, threads: int) -> None:
    """Blocks that clear words count each other: no two such launches may run at a time, and all words are cleared."""
    blocks = p["teams"] * p["blocks"]
    assert p["cleared"] in (0, p["words"])
    if p["cleared"]:
        assert 2 * blocks > sm_count
        assert 2 * p["smem_bytes"] > 227 << 10
        assert p["cleared"] <= 4 * threads * blocks


@settings(max_examples=300, deadline=None)
@given(
    n=st.integers(1, 200),
    groups=st.integers(1, 64),
    per_group=st.integers(1, 40),
    s=st.one_of(st.integers(1, 100), st.integers(1, 300_000)),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    sm_count=st.sampled_from([132, 114, 7]),
)
def test_plan_group_norm_columns(n, groups, per_group, s, dtype, sm_count):
    """Slabs, shares and vectors cover x once; what a block keeps fits, and all blocks of a grid run at a time."""
    c, size = groups * per_group, 4 if dtype == "float32" else 2
    vec = 16 // size
    p = dev.plan_group_norm_columns(n, c, s, groups, dtype, sm_count=sm_count)
    turns = vec // math.gcd(c, vec)
    # A row is at most what the threads hold, and beside it lie the tables of its channels, which have an entry for
    # every value of a half type where groups are odd.
    longest = 1000 if size == 2 and per_group % 2 else 2048
    reasons = {
        # Of small tensors a cluster has a sample.
        "below 256 KB": c * s * size < 256 << 10 and (True if n * c * s * size >= 4 << 20 else None),
        "no multiple of a vector": s % turns != 0 or (None if c * turns * size > longest else False),
    }
    if check_refusal(p.get("refusal"), reasons):
        return
    assert p["slabs"] == n * p["slabs_per_sample"]
    assert p["slabs_per_sample"] * p["channels"] == c
    assert p["groups"] * per_group == p["channels"]
    assert p["slabs_per_sample"] == 1 or (p["channels"] * size % 32 == 0 and p["turns"] == 1)
    assert p["rows"] * p["turns"] == s
    assert p["vectors"] * vec == p["channels"] * p["turns"]
    # Every slab has its team and its round.
    assert p["last_round"] < p["slabs"] <= p["rounds"] * p["teams"]
    assert p["last_round"] == (p["rounds"] - 1) * p["teams"]
    if p["cluster"]:
        assert n * c * s * size < 4 << 20
        assert p["blocks"] in (1, 2, 4, 8, 16)
        assert p["teams"] == p["slabs"]
        assert p["words"] == 0
    else:
        assert p["teams"] * p["blocks"] <= sm_count
        assert p["words"] == p["slabs"] * p["groups"] * p["blocks"] + (p["slabs"] + 1) // 2
    assert_clears_alone(p, sm_count, 32)
    # Every vector has its thread.
    assert p["columns"] * p["warps_per_row"] >= p["vectors"]
    assert p["columns"] * p["positions"] <= 32
    assert p["positions"] <= p["positions_power"] < 2 * p["positions"]
    assert p["walkers"] * p["warps_per_row"] * 32 <= p["threads"] <= 512
    assert p["stride"] == p["walkers"] * p["positions"]
    assert p["blocks"] * p["share"] >= p["rows"]
    assert p["chunks"] * dev.COLUMN_PASSES * p["stride"] >= p["share"]
    assert not p["cluster"] or p["chunks"] <= dev.COLUMN_SLOTS
    assert p["data_bytes"] == min(p["chunks"], dev.COLUMN_SLOTS) * p["slot_bytes"]
    assert p["slot_bytes"] == dev.COLUMN_PASSES * p["stride"] * p["vectors"] * 16
    assert p["data_bytes"] < p["smem_bytes"] <= 227 << 10
    # Runs are of one group wherever they lie; counts are those of all blocks together.
    assert vec % p["run"] == 0
    assert per_group == p["run"] * p["group_runs"]
    assert p["runs"] * p["run"] == p["channels"] * p["turns"]
    assert p["total_count"] == pytest.approx(s * per_group, rel=1e-6)
    assert p["full_blocks"] * p["full_count"] + p["rest_count"] == pytest.approx(s * per_group, rel=1e-5)


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("contiguous", {"channels_last": False}),
        ("whole samples", {"tensors": 2}),
        ("compute capability", {"max_blocks": 0}),
        ("float64", {"dtype": "float64"}),
        ("multiple of 16", {"aligned": False}),
        ("slow activations", {"long_chain": True, "n": 300}),
        ("below 256 KB", {"s": 100, "n": 512}),
        ("multiple of a vector", {"c": 30, "s": 20_001, "g": 3}),
    ],
)
def test_plan_group_norm_columns_refuses(why, change):
    sizes = {"n": 4, "c": 32, "s": 20_000, "g": 8}
    assert "refusal" not in dev.plan_group_norm_columns(**sizes)
    assert why in dev.plan_group_norm_columns(**{**sizes, **change})["refusal"]


@pytest.mark.parametrize(
    "sizes",
    [
        {"n": 16, "c": 128, "s": 39304, "g": 8},
        {"n": 8, "c": 320, "s": 4096, "g": 32},
        {"n": 1, "c": 512, "s": 5120, "g": 32},
        {"n": 1, "c": 128, "s": 32768, "g": 8},
        {"n": 1, "c": 128, "s": 262144, "g": 32},
    ],
)
def test_plan_group_norm_columns_teams(sizes):
    """A column is a line wide or more, and teams are full in every round."""
    p = dev.plan_group_norm_columns(**sizes)
    assert not p["cluster"]
    assert 4 * p["channels"] >= 128
    assert p["slabs"] * p["blocks"] >= 0.95 * 132 * p["rounds"], "blocks that have nothing to do"


@settings(max_examples=300, deadline=None)
@given(
    n=st.integers(1, 16),
    groups=st.integers(1, 64),
    per_group=st.integers(1, 40),
    s=st.integers(1, 10_000),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    sm_count=st.sampled_from([132, 114]),
)
def test_plan_group_norm_columns_of_small_tensors(n, groups, per_group, s, dtype, sm_count):
    """Many wide blocks would run one after the other, and a few blocks of much data leave the GPU to nobody."""
    size = 4 if dtype == "float32" else 2
    p = dev.plan_group_norm_columns(n, groups * per_group, s, groups, dtype, sm_count=sm_count)
    if "refusal" in p or not p["cluster"]:
        return
    blocks = p["slabs"] * p["blocks"]
    assert p["threads"] == 128 or (p["threads"] == 256 and blocks <= sm_count)
    assert 2 * blocks > sm_count or n * groups * per_group * s * size / blocks <= 32 << 10


@settings(max_examples=400, deadline=None)
@given(
    n=st.one_of(st.integers(1, 6), st.integers(1, 200)),
    groups=st.integers(1, 32),
    per_group=st.integers(1, 20),
    sample_kb=st.one_of(st.integers(200, 2000), st.integers(256, 32 << 10)),
    extra=st.sampled_from([0, 0, 0, 0, 1]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    tensors=st.sampled_from([1, 2]),
    long_chain=st.sampled_from([False] * 9 + [True]),
    holds=st.booleans(),
    sm_count=st.sampled_from([132, 114, 7]),
)
def test_plan_group_norm_rows(n, groups, per_group, sample_kb, extra, dtype, tensors, long_chain, holds, sm_count):
    """Shares and chunks cover a sample once, slots fit, and nobody waits for a slot that only later loads make free."""
    c, size = groups * per_group, 4 if dtype == "float32" else 2
    vec = 16 // size
    turns = vec // math.gcd(c, vec)  # positions whose channels fill vectors
    s = turns * max(1, (sample_kb << 10) // (c * turns * size)) + extra
    sample = c * s * size
    holds = holds and not long_chain
    p = dev.plan_group_norm_rows(n, c, s, groups, dtype, tensors, long_chain=long_chain, sm_count=sm_count, holds=holds)
    reasons = {
        "slow activations": long_chain and (tensors == 1 or (size == 2 and n * c * s > 9 << 20)),
        "below 256 KB": sample < 256 << 10,
        "no whole vectors": s % turns != 0 or (None if c * turns * size > 2048 else False),
        "does not stay on chip": None if tensors == 1 and sample > sm_count * 128 << 10 else False,
        "slabs are faster": None if tensors == 1 else False,
        "more than stays in L2": None if tensors == 2 and n > 4 and sample > 10 << 20 else False,
    }
    if check_refusal(p.get("refusal"), reasons):
        return
    assert p["teams"] <= n
    assert 1 <= p["teams"] * p["blocks"] <= sm_count
    assert p["rows"] * p["turns"] == s
    assert p["vectors"] * vec == c * p["turns"]
    assert p["words"] == n * groups * p["blocks"] + (n + 1) // 2
    assert_clears_alone(p, sm_count, 128)
    # Every vector has its block, its thread and its chunk.
    assert p["blocks"] * p["share"] >= p["rows"]
    assert 1 <= p["walkers"] * p["vectors"] <= p["summers"] <= dev.ROW_WRITERS
    assert p["chunk_rows"] <= p["walkers"] * (dev.ROW_WRITERS // p["summers"]) * (dev.ROW_PASSES // tensors)
    few_summers = p["summers"] < dev.ROW_WRITERS
    assert p["held"] <= min(p["chunks"] - p["rereads"], dev.row_held(tensors, size) if holds else 0)
    assert few_summers == ((holds and p["vectors"] <= 128) if tensors == 2 else p["held"] > 0)
    assert p["chunks"] * p["chunk_rows"] >= p["share"] > (p["chunks"] - 1) * p["chunk_rows"]
    assert p["tensor_bytes"] == p["chunk_rows"] * p["vectors"] * 16
    slots = p["slots"] + p["again_slots"]
    assert slots <= dev.ROW_SLOTS
    assert slots * p["tensor_bytes"] * tensors < p["smem_bytes"] <= 227 << 10
    # What stays has a slot, or registers, at the same time as all of its sample that stays. Where chunks come again to
    # the same slots, the block has one sample, and some of its slots are free before anything is written, even where a
    # long activation leaves registers for two chunks less.
    if p["backwards"]:
        assert p["teams"] == n
        assert p["again_slots"] == 0
        assert p["chunks"] - p["rereads"] - p["held"] + 2 < p["slots"]
    else:
        assert p["chunks"] - p["rereads"] <= p["slots"]
        assert (p["rereads"] > 0) == (p["again_slots"] > 0)
    assert p["distance"] == 0 or p["distance"] >= p["rereads"]
    # Lanes of a warp, or less than the threads that there are.
    assert p["element_lanes"] <= p["walkers"]
    assert max(p["element_lanes"], p["group_lanes"], p["team_lanes"]) <= 32
    assert p["team_lanes"] <= p["blocks"]
    # A lane asks for more words where the forward holds chunks of fp32, but not with a block's only sample.
    many = tensors == 1 and dtype == "float32" and p["summers"] == 128 and n >= 2 * p["teams"]
    assert p["team_lanes"] * (17 if many else 9) >= p["blocks"] or p["team_lanes"] == 32
    assert p["total_count"] == pytest.approx(s * per_group, rel=1e-6)
    assert p["full_blocks"] * p["full_count"] + p["rest_count"] == pytest.approx(s * per_group, rel=1e-5)


@pytest.mark.parametrize(
    ("sizes", "stays"),
    [
        ({"n": 128, "c": 24, "s": 19800, "g": 8}, True),
        ({"n": 128, "c": 24, "s": 19800, "g": 8, "holds": False}, True),
        ({"n": 128, "c": 64, "s": 15876, "g": 16}, True),
        ({"n": 16, "c": 128, "s": 34**3, "g": 8, "dtype": "bfloat16"}, True),
        ({"n": 16, "c": 128, "s": 34**3, "g": 8}, True),
        ({"n": 128, "c": 24, "s": 19800, "g": 8, "dtype": "bfloat16"}, True),
        ({"n": 128, "c": 64, "s": 15876, "g": 16, "dtype": "bfloat16"}, True),
        ({"n": 28, "c": 30, "s": 9256, "g": 3, "dtype": "bfloat16"}, True),
        ({"n": 128, "c": 24, "s": 19800, "g": 8, "tensors": 2}, True),
        ({"n": 128, "c": 24, "s": 19800, "g": 8, "dtype": "bfloat16", "tensors": 2}, True),
        ({"n": 128, "c": 64, "s": 15876, "g": 16, "dtype": "bfloat16", "tensors": 2}, True),
        # 20 MB of x and dy: sample after sample through L2. More, of few samples: all of them at a time.
        ({"n": 16, "c": 128, "s": 34**3, "g": 8, "dtype": "bfloat16", "tensors": 2, "holds": False}, False),
        ({"n": 2, "c": 32, "s": 96**3, "g": 8, "dtype": "bfloat16", "tensors": 2}, False),
    ],
)
def test_plan_group_norm_rows_teams(sizes, stays):
    """Teams fill the GPU, and a share that stays has the few chunks that were measured to be best on an H200."""
    p = dev.plan_group_norm_rows(**sizes)
    assert p["teams"] * p["blocks"] >= 0.95 * 132
    rounds = -(-sizes["n"] // p["teams"])
    assert sizes["n"] >= 0.9 * rounds * p["teams"], "teams that have nothing to do in the last round"
    assert (p["rereads"] == 0) == stays
    if stays:
        assert 4 <= p["chunks"] <= 10
    else:
        assert p["teams"] == (sizes["n"] if sizes["n"] <= 4 else 1)


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("contiguous", {"channels_last": False}),
        ("compute capability", {"max_blocks": 0}),
        ("float64", {"dtype": "float64"}),
        ("multiple of 16", {"aligned": False}),
        ("slow activations", {"long_chain": True}),
        ("below 256 KB", {"s": 100}),
        ("whole vectors", {"c": 30, "s": 20_001, "g": 3}),
        ("too long", {"c": 2048}),
        ("does not stay on chip", {"s": 2_000_000}),
        ("slabs are faster", {"c": 320, "n": 8, "s": 4096, "g": 32}),
        ("more than stays in L2", {"c": 128, "n": 16, "s": 34**3, "tensors": 2}),
    ],
)
def test_plan_group_norm_rows_refuses(why, change):
    sizes = {"n": 128, "c": 24, "s": 19800, "g": 8}
    assert "refusal" not in dev.plan_group_norm_rows(**sizes)
    assert why in dev.plan_group_norm_rows(**{**sizes, **change})["refusal"]
