"""Which way of GroupNorm is taken (csrc/groupnorm/choice.h)."""

from __future__ import annotations

import pytest

from plan_problems import dev


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("cluster", {"n": 128, "c": 24, "s": 19800, "g": 8}),
        ("tiles", {"n": 128, "c": 24, "s": 19800, "g": 8, "dtype": "bfloat16"}),  # 119 KB: a block each in turn
        ("small", {"n": 50, "c": 33, "s": 9, "g": 33}),
        ("small", {"n": 50, "c": 33, "s": 9, "g": 33, "max_blocks": 0}),
        ("small", {"n": 1, "c": 648, "s": 300, "g": 18, "channels_last": True, "tensors": 2}),
        # Two groups of 28518 elements in clusters of eight blocks.
        ("small", {"n": 1, "c": 6, "s": 9506, "g": 2, "channels_last": True, "dtype": "float16"}),
        ("passes", {"n": 1, "c": 6, "s": 9506, "g": 2, "channels_last": True, "max_blocks": 0}),
        # Channels of 30 elements, and of 600.
        ("small", {"n": 2, "c": 278, "s": 30, "g": 1, "dtype": "float16", "tensors": 2}),
        ("cluster", {"n": 2, "c": 14, "s": 600, "g": 1, "dtype": "float16", "tensors": 2}),
        # Of the same size, with vectors of columns.
        ("columns", {"n": 2, "c": 64, "s": 1024, "g": 2, "channels_last": True, "dtype": "float16"}),
        ("slab", {"n": 2, "c": 357, "s": 1456, "g": 51, "channels_last": True, "dtype": "bfloat16"}),
        # One group is contiguous in either layout.
        ("cluster", {"n": 1, "c": 2, "s": 182754, "g": 1, "channels_last": True, "dtype": "bfloat16"}),
        ("passes", {"n": 1, "c": 2, "s": 182754, "g": 1, "channels_last": True, "dtype": "bfloat16", "tensors": 2}),
        ("columns", {"n": 1, "c": 64, "s": 9000, "g": 1, "channels_last": True}),
        ("cluster", {"n": 5000, "c": 33, "s": 9, "g": 33}),
        ("cluster", {"n": 5000, "c": 33, "s": 9, "g": 33, "max_blocks": 0}),  # a team needs no cluster
        ("cluster", {"n": 5000, "c": 33, "s": 9, "g": 33, "max_blocks": 0, "tensors": 2}),
        ("passes", {"n": 5000, "c": 66, "s": 9, "g": 33, "max_blocks": 0, "tensors": 2}),  # of one channel alone
        ("cluster", {"n": 70, "c": 96, "s": 481, "g": 48, "max_blocks": 0}),  # 4 KB a group
        # A cluster of sixteen in one wave, and blocks that have more than such clusters are good for.
        ("cluster", {"n": 1, "c": 62, "s": 4464, "g": 1, "dtype": "float16"}),
        ("tiles", {"n": 1, "c": 128, "s": 8192, "g": 1, "dtype": "float16"}),
        ("passes", {"n": 1, "c": 62, "s": 4464, "g": 1, "dtype": "float16", "tensors": 2}),
        # The sums of many channels are added up faster in shared memory.
        ("cluster", {"n": 11, "c": 138, "s": 225, "g": 3, "dtype": "bfloat16", "tensors": 2}),
        ("small", {"n": 9, "c": 13, "s": 4725, "g": 13, "tensors": 2}),
        ("slab", {"n": 13, "c": 934, "s": 175, "g": 467, "channels_last": True}),
        ("slab", {"n": 13, "c": 934, "s": 175, "g": 467, "channels_last": True, "tensors": 2}),
        # 52 short slabs: 19 us instead of 31 by passes (H200)
        ("slab", {"n": 2, "c": 357, "s": 1456, "g": 51, "channels_last": True, "tensors": 2, "dtype": "bfloat16"}),
        ("tiles", {"n": 1, "c": 128, "s": 32**3, "g": 8}),  # a cluster of sixteen would leave GPU parts idle
        ("cluster", {"n": 1, "c": 128, "s": 32**3, "g": 8, "dtype": "bfloat16"}),  # 64 KB a block, in registers
        ("tiles", {"n": 1, "c": 128, "s": 32**3 + 8, "g": 8, "dtype": "bfloat16"}),
        ("cluster", {"n": 1, "c": 128, "s": 20_000, "g": 8, "dtype": "bfloat16"}),
        ("tiles", {"n": 1, "c": 128, "s": 20 * 256 * 256, "g": 32}),
        ("tiles", {"n": 1, "c": 32, "s": 128**3, "g": 8, "dtype": "bfloat16"}),
        ("tiles", {"n": 1, "c": 128, "s": 20 * 256 * 256, "g": 32, "dtype": "bfloat16"}),
        ("cluster", {"n": 1, "c": 128, "s": 5000, "g": 4}),  # four clusters
        ("cluster", {"n": 1, "c": 128, "s": 5000, "g": 32}),
        ("cluster", {"n": 2, "c": 3, "s": 160_003, "g": 1}),  # no multiple of 16 bytes: sixteen blocks after all
        ("passes", {"n": 1, "c": 32, "s": 128**3, "g": 8}),
        ("rows", {"n": 128, "c": 24, "s": 19800, "g": 8, "channels_last": True}),
        ("rows", {"n": 16, "c": 128, "s": 34**3, "g": 8, "channels_last": True}),
        ("columns", {"n": 1, "c": 32, "s": 128**3, "g": 8, "channels_last": True}),
        ("cluster", {"n": 3, "c": 2, "s": 12960, "g": 1, "dtype": "float16", "channels_last": True}),
        ("cluster", {"n": 8, "c": 32, "s": 1024, "g": 1, "channels_last": True}),
        ("columns", {"n": 8, "c": 32, "s": 16384, "g": 1, "channels_last": True}),
        ("columns", {"n": 1, "c": 64, "s": 3136, "g": 32, "dtype": "bfloat16", "channels_last": True}),  # narrow groups
        ("small", {"n": 1, "c": 64, "s": 3136, "g": 32, "dtype": "bfloat16", "channels_last": True, "tensors": 2}),
        ("small", {"n": 4, "c": 64, "s": 1024, "g": 32, "dtype": "bfloat16", "channels_last": True}),
        ("small", {"n": 1, "c": 64, "s": 3136, "g": 32, "dtype": "bfloat16", "channels_last": True, "max_blocks": 0}),
        ("passes", {"n": 128, "c": 24, "s": 19800, "g": 8, "channels_last": True, "max_blocks": 0}),
        ("passes", {"n": 512, "c": 64, "s": 49, "g": 8, "channels_last": True}),
        ("passes", {"n": 128, "c": 24, "s": 19800, "g": 8, "max_blocks": 0}),
        ("cluster", {"n": 128, "c": 24, "s": 19800, "g": 8, "tensors": 2}),
        ("tiles", {"n": 1, "c": 128, "s": 512**2, "g": 32, "tensors": 2}),
        ("tiles", {"n": 16, "c": 128, "s": 34**3, "g": 8, "tensors": 2}),
        ("passes", {"n": 1, "c": 128, "s": 20 * 256 * 256, "g": 32, "tensors": 2}),  # 42 MB of x and dy
        ("rows", {"n": 128, "c": 24, "s": 19800, "g": 8, "channels_last": True, "tensors": 2}),
        ("rows", {"n": 1, "c": 128, "s": 512**2, "g": 32, "channels_last": True, "tensors": 2}),
        ("passes", {"n": 16, "c": 128, "s": 34**3, "g": 8, "channels_last": True, "tensors": 2}),  # 40 MB of x and dy
    ],
)
def test_choose_group_norm(family, sizes):
    choice = dev.choose_group_norm(**sizes)
    assert choice["family"] == family, choice
    assert family != "passes" or set(choice["why_not"]) == {"small", "cluster", "tiles", "rows", "columns", "slab"}


@pytest.mark.parametrize(
    ("held", "pre_act", "act"),
    [(True, "none", "none"), (True, "none", "relu"), (True, "none", "leaky_relu"), (True, "relu", "none"),
     (False, "none", "silu"), (False, "none", "gelu"), (False, "silu", "none"), (False, "relu", "relu"),
     (False, "silu", "silu"), (False, "gelu", "none")],
)  # fmt: skip
def test_rows_hold_chunks_for_instances_that_do(held, pre_act, act):
    """The instance that walks chains, and SiLU's, have as many warps for sums as for results, and hold none."""
    sizes = {"n": 2, "c": 64, "s": 48**3, "g": 8, "channels_last": True, "tensors": 2}
    choice = dev.choose_group_norm(**sizes, pre_act=pre_act, act=act)
    assert choice["family"] == "rows"
    assert (choice["held"] > 0) == held


@pytest.mark.parametrize(
    ("family", "s", "dtype"),
    [("rows", 48**3, "bfloat16"), ("passes", 128**3, "bfloat16"), ("rows", 128**3, "float32")],
)
def test_walked_backwards(family, s, dtype):
    choice = dev.choose_group_norm(1, 32, s, 8, dtype, act="gelu", channels_last=True, tensors=2)
    assert choice["family"] == family


@pytest.mark.parametrize(
    ("family", "edge", "dtype"),
    [("columns", 64, "bfloat16"), ("passes", 96, "bfloat16"), ("columns", 96, "float32"), ("passes", 128, "float32")],
)
def test_large_sums_take_passes(family, edge, dtype):
    place = (1, 64, edge**3, 8, dtype)
    for act in ("none", "leaky_relu"):
        assert dev.choose_group_norm(*place, channels_last=True, act=act, residual=True)["family"] == family
        assert dev.choose_group_norm(*place, channels_last=True, act=act)["family"] == "columns"


def test_choose_group_norm_says_why():
    """Which kernel runs, and why not the others, in words: what explain_group_norm gives on a GPU."""
    text = dev.choose_group_norm(1, 32, 128**3, 8, "bfloat16", act="silu")["explanation"]
    assert "; family tiles (group_norm_tiles_fwd_kernel); not small: x is large" in text
    assert "; not cluster: a group is larger than the shared memory of a cluster" in text
    backward = dev.choose_group_norm(16, 128, 34**3, 8, tensors=2)
    assert backward["kernels"] == "group_norm_tiles_bwd_kernel, group_norm_tiles_gradient_kernel"
    assert backward["sums"] > 0
    assert backward["sum_rows"] == 0
    rows = dev.choose_group_norm(128, 24, 19800, 8, tensors=2, channels_last=True)
    assert rows["kernels"].endswith("affine_gradient_kernel")
    assert rows["sums"] == rows["sum_rows"] * 24 * 2
    # A plan may be beaten, too.
    assert "tiles are faster" in dev.choose_group_norm(1, 128, 32**3, 8)["why_not"]["cluster"]
    assert dev.choose_group_norm(2, 33, 9, 33)["why_not"] == {}
    narrow = dev.choose_group_norm(1, 64, 3136, 32, "bfloat16", channels_last=True)
    assert narrow["why_not"]["small"] == "narrow groups of many positions go side by side"
    walked = dev.choose_group_norm(128, 24, 19800, 8, channels_last=True, act="gelu")
    assert walked["why_not"]["rows"].startswith("slow activations")
