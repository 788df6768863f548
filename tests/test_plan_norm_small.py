"""Plans of GroupNorm of small tensors and of short slabs (csrc/groupnorm/small)."""

from __future__ import annotations

import random

import pytest

from plan_problems import check_refusal, dev


def divides(by, largest):
    """Whether quotients up to `largest` are exact, as the kernels compute them."""
    numbers = {
        0,
        1,
        by["d"] - 1,
        by["d"],
        by["d"] + 1,
        largest - 1,
        largest,
        *range(0, largest, max(1, largest // 997)),
    }
    return all((i if by["magic"] == 0 else i * by["magic"] >> 32) == i // by["d"] for i in numbers if 0 <= i <= largest)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_blocks", [0, 16])
def test_plan_group_norm_small(backward, channels_last, dtype, max_blocks):
    """Whatever the sizes, every element has one thread, and every quotient is exact."""
    rng = random.Random(f"{backward} {channels_last} {dtype} {max_blocks}")
    taken = singles = vectors = 0
    for _ in range(400):
        g, per_group = rng.choice([1, 2, rng.randint(1, 64)]), rng.choice([1, 2, 4, rng.randint(1, 700)])
        n, s = rng.choice([1, rng.randint(1, 40)]), rng.choice([1, 4 * rng.randint(1, 300), rng.randint(1, 5000)])
        plain = rng.random() < 0.5
        p = dev.plan_group_norm_small(n, g * per_group, s, g, dtype, backward, channels_last, True, max_blocks, plain)
        elements, size = per_group * s, 4 if dtype == "float32" else 2
        bytes_of_x = n * g * elements * size
        copied = not backward and not channels_last and max_blocks > 0
        reasons = {
            "x is large": bytes_of_x > 4 << 20,
            "over 65535 elements": elements > 65535,
            "through shared memory": None if copied and elements > 4096 else False,
            "go side by side": channels_last and per_group * size < 32 and bytes_of_x > 1 << 20,
            "threads hold": None if elements > (4096 if backward else 8192) else False,
        }
        if check_refusal(p.get("refusal"), reasons):
            continue
        if p["plane"]:
            continue  # test_plan_group_norm_planes
        taken += 1
        vectors += p["run"] > 1
        assert plain or p["run"] == 1  # chains that are walked have no instance with vectors
        lanes = p["by_lanes"]["d"]
        assert p["elements"] == elements
        positions = [elements // 2, elements - 1]
        if channels_last:
            positions = [i // per_group * g * per_group + i % per_group for i in positions]
        assert p["places"] == positions
        assert lanes % 32 == 0 or (lanes < 32 and lanes & (lanes - 1) == 0)
        assert lanes * p["run"] * p["runs"] >= min(p["chunk"], elements)
        assert p["chunk"] * p["blocks"] >= elements
        assert p["blocks"] == 1 or (p["teams"] == 1 and p["blocks"] <= max_blocks)
        assert p["blocks"] == 1 or backward or channels_last  # forward's contiguous ones have a kernel of their own
        assert (p["blocks"] - 1) * p["chunk"] < elements  # no block is without elements
        assert p["blocks"] == 1 or p["chunk"] % 4 == 0
        assert p["teams"] * lanes <= p["threads"] <= dev.SMALL_MAX_THREADS
        assert p["threads"] % 32 == 0
        # Forward has teams below a block for single elements alone: four a thread once shared a block (70x64x13x9 g64).
        assert backward or p["run"] * p["runs"] == 1 or (p["teams"], p["threads"]) == (1, lanes)
        if backward and p["run"] * p["runs"] == dev.SMALL_MAX_ELEMENTS:
            assert p["threads"] <= dev.SMALL_MAX_BWD_THREADS
        if p["owner"]:
            assert (p["teams"], p["grid"], p["blocks"]) == (n, g, 1)
        else:
            assert p["grid"] // p["blocks"] * p["teams"] >= n * g
        if p["run"] > 1:
            assert (per_group if channels_last else s) % p["run"] == 0
        assert divides(p["by_lanes"], p["threads"] - 1)
        assert divides(p["by_minor"], elements - 1)
        assert divides(p["by_groups"], n * g - 1)
        if not backward:
            continue
        assert p["smem_bytes"] <= 96 << 10
        singles += p["single"]
        if p["single"]:  # an element is all of its channel that a block has
            assert (s, p["blocks"], p["run"], p["terms"]) == (1, 1, 1, 1)
            assert p["runs"] == 1 or lanes > 32  # the only instances that there are
        assert p["term_elements"] == (4 if p["run"] > 1 and not channels_last else 1)
        assert p["terms"] * p["term_elements"] == s * (n if p["owner"] else 1)
        assert p["sums"] == per_group * (1 if p["owner"] else p["teams"])
        sum_lanes = p["by_sum_lanes"]["d"]
        assert sum_lanes <= 32 or p["sum_teams"] >= p["sums"]  # the sums of several warps take one round
        assert p["sum_teams"] * sum_lanes <= p["threads"]
        assert divides(p["by_channels"], max(p["sums"] - 1, elements - 1))
        assert divides(p["by_row_terms"], p["terms"] - 1)
        assert divides(p["by_sum_lanes"], p["threads"] - 1)
    assert taken > 50
    assert vectors > 10
    assert (singles > 10) == backward


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_plan_group_norm_planes(dtype):
    """Groups of one channel: wherever one starts in a vector, its vectors all have a thread."""
    rng = random.Random(dtype)
    owners = planes = 0
    for _ in range(600):
        n, g = rng.randint(1, 40), rng.choice([1, 2, rng.randint(1, 100)])
        s = rng.choice([4 * rng.randint(1, 1000), rng.randint(1, 400), rng.randint(1, 9000)])
        p = dev.plan_group_norm_small(n, g, s, g, dtype, backward=True, plain=True)
        if "refusal" in p:
            continue
        lanes, teams = p["by_lanes"]["d"], p["teams"]
        vectors = s // 4 if s % 4 == 0 else max((start + s + 3) // 4 for start in range(4))
        if not p["plane"]:
            continue
        planes += 1
        owners += p["owner"]
        assert p["run"] == 4
        assert lanes % 32 == 0
        assert lanes * p["runs"] >= vectors
        assert teams * lanes == p["threads"] <= dev.SMALL_MAX_THREADS
        assert p["threads"] <= dev.SMALL_MAX_BWD_THREADS or p["runs"] < 4
        assert (p["elements"], p["places"], p["blocks"], p["single"]) == (s, [s // 2, s - 1], 1, False)
        if p["owner"]:
            assert (teams, p["grid"]) == (n, g)
        else:
            assert teams == 1 or lanes == 32
            assert (p["grid"] - 1) * teams < n * g <= p["grid"] * teams
        assert divides(p["by_lanes"], p["threads"] - 1)
        assert divides(p["by_groups"], n * g - 1)
    assert owners > 50
    assert planes > 100
    for change in ({"plain": False}, {"aligned": False}, {"channels_last": True}, {"c": 6}, {"backward": False}):
        sizes = {"n": 2, "c": 3, "s": 77, "g": 3, "dtype": dtype, "backward": True, "plain": True}
        assert dev.plan_group_norm_small(**sizes)["plane"]
        assert not dev.plan_group_norm_small(**sizes | change)["plane"]


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("float64", {"dtype": "float64"}),
        ("empty", {"n": 0}),
        ("is large", {"n": 1000, "c": 512, "g": 64}),
        ("side by side", {"channels_last": True, "s": 5000}),
        ("over 65535", {"n": 1, "s": 20000}),
        ("cluster's threads", {"s": 2000, "max_blocks": 0}),
        ("through shared memory", {"n": 1, "s": 2000, "backward": False}),
    ],
)
def test_plan_group_norm_small_refuses(why, change):
    sizes = {"n": 2, "c": 32, "s": 60, "g": 8, "backward": True}
    assert "refusal" not in dev.plan_group_norm_small(**sizes)
    assert why in dev.plan_group_norm_small(**sizes | change)["refusal"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("n", "groups", "per_group", "s"), [(13, 467, 2, 175), (9, 709, 1, 924), (60, 7, 5, 1000), (2, 51, 7, 1456)]
)
def test_plan_group_norm_slab(n, groups, per_group, s, dtype):
    p = dev.plan_group_norm_slab(n, groups * per_group, s, groups, dtype)
    assert p["columns"] * p["walkers"] == dev.SLAB_THREADS
    assert p["groups"] * per_group <= p["columns"]
    assert p["per_sample"] * p["groups"] >= groups
    assert p["grid"] == n * p["per_sample"]
    assert divides(p["by_per_sample"], p["grid"] - 1)
    assert divides(p["by_channels"], p["walkers"] * per_group)


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("float64", {"dtype": "float64"}),
        ("contiguous", {"channels_last": False}),
        ("fill a sector", {"g": 20}),
        ("is long", {"s": 10000}),
        ("GPU idle", {"n": 1, "c": 100, "g": 100}),
    ],
)
def test_plan_group_norm_slab_refuses(why, change):
    sizes = {"n": 13, "c": 934, "s": 175, "g": 467}
    assert "refusal" not in dev.plan_group_norm_slab(**sizes)
    if "g" in change and "c" not in change:
        change = change | {"c": 940}
    assert why in dev.plan_group_norm_slab(**sizes | change)["refusal"]
