"""Plans of norms over channels (csrc/channel_norm/plan.h)."""

from __future__ import annotations

import random

import pytest

from plan_problems import dev

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", SIZES)
def test_plan_channel_norm(dtype, channels_last, backward):
    """Whatever the sizes: what the kernels take for granted of threads, tiles, shared memory and partial sums."""
    rng = random.Random(f"{backward} {channels_last} {dtype}")
    acc = 8 if dtype == "float64" else 4
    for _ in range(600):
        n = rng.choice([1, 2, rng.randint(1, 64)])
        c = rng.choice([1, rng.randint(1, 64), 8 * rng.randint(1, 512), rng.randint(1, 5000), 2048, 2049])
        s = rng.choice([1, rng.randint(1, 300), 8 * rng.randint(1, 40000), rng.randint(1, 2**20)])
        aligned = rng.random() < 0.8
        sm_bytes = rng.choice([100, 164, 228]) << 10
        p = dev.plan_channel_norm(n, c, s, dtype, backward, channels_last, aligned, sm_bytes=sm_bytes)
        vec, along, threads = p["vec"], p["along"], p["threads"]
        assert vec == 1 or (aligned and vec * SIZES[dtype] == 16 and (c if channels_last else s) % vec == 0)
        assert along & (along - 1) == 0, "lanes are masked by it"
        assert threads % 32 == 0
        assert threads % along == 0
        assert threads <= (128 if backward and channels_last else 256), "what the kernels' registers are bounded for"
        assert 1 <= p["blocks"] <= p["tiles"], "each block has a tile: it writes its rows of partial sums"
        table = 2 * c * acc if c <= dev.CHANNEL_NORM_TABLE else 0
        if channels_last:
            assert along <= 32, "a position is a warp's or a part's"
            assert p["tiles"] * (threads // along) >= n * s > (p["tiles"] - 1) * (threads // along)
            held = 3 if backward and vec == 8 else 4
            assert along == 32 or along * held * vec >= c, "a channel of a row is one lane's where it is not held"
            assert p["smem_bytes"] >= table
            rows = threads // 32
        else:
            tile = along * vec
            assert p["tiles"] == n * -(-s // tile)
            groups = threads // max(32, along)
            # Two sums of each group of warps for each position, then the means.
            assert p["smem_bytes"] >= table + (2 * groups + 1) * tile * acc
            rows = max(1, along // 32)
        assert p["rows"] == (p["blocks"] * rows if backward else 0)
        assert p["smem_bytes"] <= sm_bytes // 2 - 1024, "two blocks share a multiprocessor"
        if backward or channels_last:
            assert p["held"] == p["ring_bytes"] == 0
            continue
        # A thread's vectors of a tile, and of the next one where a block has several.
        slot = threads * vec * SIZES[dtype]
        assert 1 <= p["held"] <= -(-c // (threads // along))
        assert p["ring_bytes"] >= p["held"] * slot * (2 if p["tiles"] > p["blocks"] else 1)
        assert p["smem_bytes"] >= p["ring_bytes"] + table + (2 * groups + 1) * tile * acc
        assert p["ring_bytes"] % 16 == 0, "what lies behind it"
