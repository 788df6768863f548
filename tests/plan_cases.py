"""Sizes at the edges of every plan, tried in a process of its own: a division by zero ends it.

``python plan_cases.py FOLDER SEED ROUNDS`` imports kgopt_dev from FOLDER and prints every case before it plans it, so
that the last line is the one that did it. Needs no torch, so that it starts at once.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from typing import Any

# 0 to 3, primes, and both sides of what tiles, vectors, warps and blocks are made of.
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 11, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129)
LONG = (*SIZES, 1000, 1024, 4096, 65536, 65537, 1 << 20)
CHANNELS = (1, 1, 2, 3, 4, 5, 7, 8, 16, 24, 33, 64)
DTYPES = ("float32", "bfloat16", "float16", "float64")
CONV_PLANS = (
    "plan_implicit_gemm",
    "plan_few_channels",
    "plan_chain",
    "plan_autocorrelation",
    "plan_tap_columns",
    "plan_position_rows",
    "plan_transposed_norm",
    "plan_wgrad",
    "plan_few_march",
    "plan_few_wgrad",
    "plan_few_dgrad",
    "plan_conv_norm_lse",
    "predict_conv",
)


def conv_case(draw: random.Random, dev: Any) -> dict[str, Any]:
    """Arguments of a ConvProblem, some of whose tensors are empty."""
    transposed = draw.random() < 0.3
    kernel = [draw.choice((1, 1, 2, 3, 3, 5)) for _ in range(3)]
    size = [draw.choice(SIZES) for _ in range(3)]
    if draw.random() < 0.5:
        kernel[0] = size[0] = 1
    stride, padding, dilation = (
        [draw.choice(values) for _ in range(3)] for values in ((1, 1, 1, 2, 3), (0, 0, 1, 2), (1, 1, 2))
    )
    groups = draw.choice((1, 1, 1, 2, 3, 8))
    c_in, c_out = (0 if draw.random() < 0.05 else groups * draw.choice(CHANNELS) for _ in range(2))
    dims = zip(size, kernel, stride, padding, dilation, strict=True)
    return {
        "n": draw.choice((0, 1, 1, 2, 3, 128, 100000)),
        "c_in": c_in,
        "c_out": c_out,
        "input": tuple(size),
        "output": tuple(max(0, dev.conv_out_size(*dim, transposed)) for dim in dims),
        "kernel": tuple(kernel),
        "stride": tuple(stride),
        "padding": tuple(padding),
        "dilation": tuple(dilation),
        "groups": groups,
        "transposed": transposed,
        "dtype": draw.choice(DTYPES),
        "allow_tf32": draw.random() < 0.5,
        "epilogue": draw.choice(("store", "store_stats", "stats", "residual_lse")),
        "channels_innermost": draw.random() < 0.5,
        "planar": draw.random() < 0.5,
        "norm_groups": draw.choice([d for d in range(1, c_out + 1) if c_out % d == 0] or [0]),
    }


def plan_implicit_gemm(dev: Any, case: dict[str, Any]) -> None:
    """Every plan and every choice of the convolution, on GPUs large, small and without Hopper's instructions."""
    problem = dev.ConvProblem(**{**case, "epilogue": getattr(dev.ConvEpilogue, case["epilogue"])})
    for limits in (
        dev.DeviceLimits(),
        dev.DeviceLimits(108, 163 * 1024, 164 * 1024, False, 0),
        dev.DeviceLimits(1, 99 * 1024, 100 * 1024, True, 8),
    ):
        for name in CONV_PLANS:
            getattr(dev, name)(problem, limits)
        for backend in dev.ConvBackend.__members__.values():
            dev.choose_conv(problem, limits, backend)
            dev.choose_conv_gradients(problem, limits, backend)


def norm_case(draw: random.Random) -> dict[str, Any]:
    """A tensor to normalize, [n, c, s] in g groups, perhaps empty, and a device, perhaps of one multiprocessor."""
    groups = draw.choice((1, 1, 2, 3, 4, 5, 7, 8, 32))
    return {
        "n": draw.choice((0, 1, 1, 2, 3, 4, 5, 128, 1000)),
        "c": 0 if draw.random() < 0.03 else groups * draw.choice(CHANNELS),
        "s": draw.choice(LONG),
        "g": groups,
        "dtype": draw.choice(DTYPES),
        "tensors": draw.choice((1, 2)),
        "channels_last": draw.random() < 0.5,
        "aligned": draw.random() < 0.8,
        "long_chain": draw.random() < 0.3,
        "max_blocks": draw.choice((0, 1, 8, 16)),
        "sm_count": draw.choice((1, 2, 16, 108, 132)),
    }


def plan_norm(dev: Any, case: dict[str, Any]) -> None:
    """Every plan of the group norm, of its mean and of the norms in pipelines, and the choice among them."""
    place = [case[key] for key in ("n", "c", "s", "g", "dtype")]

    def options(*names: str) -> dict[str, Any]:
        return {name: case[name] for name in names}

    layout = options("channels_last", "aligned", "sm_count")
    for name in ("plan_group_norm_tiles", "plan_group_norm_alone"):
        getattr(dev, name)(*place, **layout, **options("tensors"), has_bulk_copy=case["max_blocks"] > 0)
    for name in ("plan_group_norm_cluster", "plan_group_norm_rows", "plan_group_norm_columns"):
        getattr(dev, name)(*place, **layout, **options("tensors", "long_chain", "max_blocks"))
    dev.plan_group_norm_small(
        *place,
        **options("channels_last", "aligned", "max_blocks"),
        backward=case["tensors"] == 2,
        plain=not case["long_chain"],
    )
    dev.plan_group_norm_slab(*place, **options("channels_last", "sm_count"))
    dev.choose_group_norm(*place, **layout, **options("tensors", "max_blocks"))
    n, c, s, _, dtype = place
    dev.plan_norm_lse_backward(n, c, s, dtype, **layout)
    dev.plan_column_walk(n, max(c, 1), s, 4, **options("aligned", "sm_count"))
    dev.plan_reduction(n, c, s, **options("sm_count"))
    dev.plan_norm_conv1x1(n, c, s, 3, dtype, **options("sm_count"))


def main(folder: str, seed: int, rounds: int) -> None:
    """Draws and plans; prints a case before its plans, and ``done`` at the end."""
    sys.path.insert(0, folder)
    dev = importlib.import_module("kgopt_dev")
    draw = random.Random(seed)
    for _ in range(rounds):
        for _ in range(5):
            norm = norm_case(draw)
            os.write(1, f"{norm}\n".encode())
            plan_norm(dev, norm)
        conv = conv_case(draw, dev)
        os.write(1, f"{conv}\n".encode())
        plan_implicit_gemm(dev, conv)
    os.write(1, b"done\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
