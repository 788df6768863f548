"""Measures what csrc/conv3d/choice/measured_rows.inc holds, and writes it.

    python benchmarks/conv_table.py measure --json F [--seconds S] [--part I/N] [--narrow | --grouped]   on a GPU; F's
                                                                                                rows are kept
    python benchmarks/conv_table.py header --json benchmarks/results/h200_conv_table.json

A row is one convolution in one precision and memory format, with the microseconds of every path that can run it: cuDNN
through ATen (autotuned among its first five algorithms), and each kernel of the extension (`backend="kgopt:..."`).
Medians of a few calls, the L2 flushed before each, launches hidden. The convolutions are those of U-Nets and
autoencoders at some sizes, and random ones of another seed than `bench --suite convs` has: what is chosen by the table
is tested on shapes that it lacks.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kgopt.cli.convs import RandomConv, random_convs
from kgopt.cli.environment import environment
from kgopt.cli.measure import DTYPES, precision_flags
from kgopt.cli.results import load_rows, save_rows

_MATH = {"tf32": 0, "fp32": 1, "bf16": 2}  # as ConvMeasured::math
_DIMS = ("in", "out", "kernel", "stride", "padding", "dilation")
PATHS = ("aten", "implicit_gemm", "tap_columns", "position_rows", "few_channels")  # in the order of ConvMeasured::us
_SEED = 1000
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_PAIRS = (
    (4, 32), (8, 8), (8, 16), (16, 16), (16, 32), (32, 16), (32, 32), (32, 64), (64, 32), (64, 64), (64, 128),
    (96, 32), (128, 64), (128, 128), (192, 64), (256, 256), (3, 24), (1, 32), (8, 64),
)  # fmt: skip


_SIZES = ((3, 1, 24), (3, 1, 48), (3, 1, 96), (2, 4, 64), (2, 4, 256))  # spatial dims, batch, edge


# Whole layers of published networks.
_LAYERS = (
    (4, 32, 1, (128, 128, 128)), (32, 32, 1, (128, 128, 128)), (64, 64, 1, (64, 64, 64)), (128, 128, 1, (32, 32, 32)),
    (32, 64, 1, (80, 170, 170)), (128, 128, 1, (17, 256, 256)), (512, 512, 1, (5, 32, 32)), (8, 64, 128, (128, 128)),
)  # fmt: skip


def network_convs() -> list[RandomConv]:
    """Those of U-Nets and autoencoders: kernels of 3 that keep the size, some of 1; down and up by two."""
    convs: list[RandomConv] = []

    def add(transposed: bool, c_in: int, c_out: int, size: tuple[int, int, int], k: int, step: int, more: int) -> None:
        rank, batch, edge = size
        zero, padding = (0,) * rank, ((k - 1) // 2,) * rank
        shape = (batch, c_in, *(edge,) * rank)
        conv = RandomConv(
            len(convs), transposed, shape, c_out, 1, (k,) * rank, (step,) * rank, padding, (1,) * rank,
            (more,) * rank if transposed else zero,
        )  # fmt: skip
        if conv.flops <= 4e10:
            convs.append(conv)

    for (c_in, c_out), size in itertools.product(_PAIRS, _SIZES):
        for k in (1, 3) if size[-1] in (48, 256) else (3,):
            add(False, c_in, c_out, size, k, 1, 0)
    for (few, many), size in itertools.product(((16, 32), (32, 64), (64, 128), (128, 256)), _SIZES):
        add(False, few, many, size, 3, 2, 0)
        if size[-1] in (24, 48, 64):
            add(True, many, few, size, 2, 2, 0)
            add(True, many, few, size, 3, 2, 1)
            add(True, few, many, size, 3, 1, 0)
            add(True, many, many, size, 3, 1, 0)
    for c_in, c_out, batch, spatial in _LAYERS:
        one = (1,) * len(spatial)
        shape = (batch, c_in, *spatial)
        convs.append(
            RandomConv(len(convs), False, shape, c_out, 1, (3,) * len(spatial), one, one, one, (0,) * len(spatial))
        )
    return convs


def narrow_convs(count: int = 90) -> list[RandomConv]:
    """First layers: up to 32 channels to up to 96."""
    rng, convs = random.Random(2), []
    while len(convs) < count:
        rank, batch, edge = rng.choice(((3, 1, 48), (3, 1, 96), (3, 8, 28), (2, 4, 256), (2, 32, 128), (2, 1, 500)))
        c_in, c_out = rng.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 32)), rng.choice((8, 16, 24, 32, 48, 64, 96))
        k, step = rng.choice((1, 3, 3, 3, 3, 3, 5, 7 if rank == 2 else 3)), rng.choice((1, 1, 1, 1, 2))
        shape, zero = (batch, c_in, *(edge,) * rank), (0,) * rank
        padding = (rng.choice((0, k // 2, k // 2)),) * rank
        conv = RandomConv(
            len(convs), False, shape, c_out, 1, (k,) * rank, (step,) * rank, padding, (1,) * rank, zero
        )  # fmt: skip
        if conv.flops <= 4e10 and _name(conv) not in {_name(other) for other in convs}:
            convs.append(conv)
    return convs


def grouped_convs(count: int = 70) -> list[RandomConv]:
    """Of some groups, each of a few channels and more."""
    rng, convs = random.Random(4), []
    while len(convs) < count:
        volumes, images = ((3, 1, 24), (3, 1, 48), (3, 1, 64)), ((2, 2, 64), (2, 4, 128), (2, 2, 256), (2, 1, 512))
        rank, batch, edge = rng.choice((*volumes, *images))
        groups, few = rng.choice((2, 2, 4, 4, 8, 16)), rng.choice((2, 4, 8, 16, 32))
        many = rng.choice((2, 4, 8, 16, 32))
        many = rng.choice((few, few, many))
        if max(few, many) * groups > 256:
            continue
        transposed, k, step = rng.choice(((False, 3, 1), (False, 3, 1), (False, 3, 1), (False, 1, 1), (False, 1, 1),
                                          (False, 3, 2), (False, 5, 1), (True, 3, 1), (True, 2, 2)))  # fmt: skip
        zero, padding = (0,) * rank, (k // 2 if k % 2 else 0,) * rank
        conv = RandomConv(
            len(convs), transposed, (batch, few * groups, *(edge,) * rank), many * groups, groups,
            (k,) * rank, (step,) * rank, padding, (1,) * rank, zero,
        )  # fmt: skip
        if conv.flops <= 4e10 and _name(conv) not in {_name(other) for other in convs}:
            convs.append(conv)
    return convs


def grouped_problems() -> list[tuple[RandomConv, str, str]]:
    """Those, in TF32 and bf16, in both memory formats."""
    found = list(itertools.product(grouped_convs(), ("bf16", "tf32"), ("channels_last", "contiguous")))
    random.Random(5).shuffle(found)
    return found


def narrow_problems() -> list[tuple[RandomConv, str, str]]:
    """What the kernel of few channels may run, of all convolutions here, in TF32 and bf16; of channels_last tensors
    those of up to 8 channels, beyond which kernels that read channels are faster.
    """
    kinds = list(itertools.product(("tf32", "bf16"), ("channels_last", "contiguous")))
    found = [(conv, *kind) for conv in narrow_convs() for kind in kinds]
    known = [one for one in problems() if one[1] != "fp32" and not one[0].transposed]
    found, known = ([one for one in some if one[2] == "contiguous" or one[0].shape[1] <= 8] for some in (found, known))
    random.Random(3).shuffle(found)
    turns = itertools.zip_longest(found, known)
    return [one for turn in turns for one in turn if one]


def problems() -> list[tuple[RandomConv, str, str]]:
    """Convolution, precision, memory format: in an order of which every beginning is a fair sample."""
    rng = random.Random(0)
    # fp32 accuracy and contiguous tensors have fewer paths and need fewer rows.
    keep = {("tf32", "channels_last"): 1, ("bf16", "channels_last"): 1, ("tf32", "contiguous"): 0.5,
            ("bf16", "contiguous"): 0.5, ("fp32", "channels_last"): 0.3, ("fp32", "contiguous"): 0.3}  # fmt: skip
    found = []
    for convs in (network_convs(), random_convs(250, _SEED)):
        part = [
            (conv, precision, layout)
            for conv in convs
            for precision, layout in itertools.product(("tf32", "bf16", "fp32"), ("channels_last", "contiguous"))
            if rng.random() < keep[precision, layout]
        ]
        rng.shuffle(part)
        found.append(part)
    # Layers and 3D networks in the layout that has the most paths first, then in turns as long as there are both.
    networks, others = found
    layers = {conv.name for conv in network_convs()[-len(_LAYERS) :]}

    def rank(one: tuple[RandomConv, str, str]) -> int:
        last = one[2] == "channels_last"
        return 0 if one[0].name in layers and last else 1 if len(one[0].kernel) == 3 and last else 2

    networks.sort(key=rank)
    turns = itertools.zip_longest(networks[::3], networks[1::3], networks[2::3], others)
    return [one for turn in turns for one in turn if one]


def _name(conv: RandomConv) -> str:
    """What is drawn, without the index."""
    return conv.name.split(": ", 1)[1]


def describe(conv: RandomConv) -> dict[str, Any]:
    """The fields of a row, per dim as depth, height, width."""

    def dims(values: tuple[int, ...], usual: int) -> list[int]:
        return [usual] * (3 - len(values)) + list(values)

    return {
        "n": conv.shape[0], "c_in": conv.shape[1], "c_out": conv.c_out, "groups": conv.groups,
        "transposed": conv.transposed, "in": dims(conv.shape[2:], 1), "out": dims(conv.output[2:], 1),
        "kernel": dims(conv.kernel, 1), "stride": dims(conv.stride, 1), "padding": dims(conv.padding, 0),
        "dilation": dims(conv.dilation, 1),
    }  # fmt: skip


class Clock:
    """GPU time of a call: the L2 flushed before it, its launch hidden behind a wait."""

    def __init__(self) -> None:
        self.flush = torch.empty(2**25, dtype=torch.int32, device="cuda")

    def __call__(self, fn: Callable[[], Any], reps: int) -> list[float]:
        """Microseconds, sorted."""
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
        for begin, end in pairs:
            self.flush.zero_()
            torch.cuda._sleep(100_000)
            begin.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return sorted(begin.elapsed_time(end) * 1e3 for begin, end in pairs)


def measure(conv: RandomConv, precision: str, layout: str, clock: Clock) -> dict[str, Any]:
    """One row."""
    dtype = DTYPES[precision]
    x = torch.randn(conv.shape, device="cuda").to(dtype)
    weight = torch.randn(conv.weight_shape, device="cuda").to(dtype)
    if layout == "channels_last":
        x, weight = (t.contiguous(memory_format=_FORMATS[t.dim()]) for t in (x, weight))
    row = {"name": _name(conv), "precision": precision, "layout": layout, **describe(conv)}
    us: dict[str, float] = {}
    apart: dict[str, float] = {}
    with precision_flags(precision), torch.no_grad():
        expected = conv.torch_call(x, weight)
        for path in PATHS:

            def fn(path: str = path) -> torch.Tensor:
                if path == "aten":
                    return conv.torch_call(x, weight)
                return conv.call(x, weight, backend=f"kgopt:{path}")

            try:
                y = fn()
            except RuntimeError as error:
                if "cannot run" not in str(error):
                    raise
                continue
            if path != "aten":
                apart[path] = float((y - expected).norm() / expected.norm().clamp_min(1e-30))
            del y
            first = clock(fn, 3)[0]
            # What takes twice cuDNN's time is not taken, however long exactly.
            us[path] = round(first if first > 2 * us.get("aten", first) else statistics.median(clock(fn, 7)), 2)
    return {**row, "us": us, "apart": apart}


def _narrow_runs(conv: RandomConv, precision: str) -> bool:
    x, weight = (torch.empty(s, device="cuda", dtype=DTYPES[precision]) for s in (conv.shape, conv.weight_shape))
    geometry = conv.stride, conv.padding, conv.dilation, conv.output_padding, conv.groups, conv.transposed
    with precision_flags(precision):
        why: str = torch.ops.kgopt.explain_conv(x, weight, *geometry, backend="kgopt:few_channels")
    return not why.startswith("none")


def run_measure(args: argparse.Namespace) -> None:
    """Measures what the file does not hold yet, until the time is up; with --narrow, rows without that kernel anew."""
    end = time.monotonic() + args.seconds
    rows = load_rows(args.json) if Path(args.json).exists() else []
    known = {
        (r["name"], r["precision"], r["layout"]): at
        for at, r in enumerate(rows)
        if not args.narrow or "few_channels" in r["us"]
    }
    again = {(r["name"], r["precision"], r["layout"]): at for at, r in enumerate(rows)}
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = args.algorithms
    clock, facts = Clock(), environment(torch.device("cuda"), args.commit)
    facts = {key: facts[key] for key in ("gpu", "driver", "torch", "cudnn", "kgopt", "commit", "date")}
    index, count = (int(part) for part in args.part.split("/"))
    wanted = narrow_problems() if args.narrow else grouped_problems() if args.grouped else problems()
    for conv, precision, layout in wanted[index::count]:
        if time.monotonic() > end:
            break
        key = _name(conv), precision, layout
        if key in known or (args.narrow and not _narrow_runs(conv, precision)):
            continue
        row = {**measure(conv, precision, layout, clock), **facts}
        if key in again:
            rows[again[key]] = row
        else:
            rows.append(row)
    save_rows(args.json, rows)
    print(f"{len(rows)} rows in {args.json}")


def _literal(row: dict[str, Any]) -> str:
    """A row as a ConvMeasured."""

    def flag(value: bool) -> str:
        return "true" if value else "false"

    numbers = [row[key] for key in ("n", "c_in", "c_out", "groups")]
    dims = ["{" + ", ".join(map(str, row[key])) + "}" for key in _DIMS]
    us = "{" + ", ".join(f"{row['us'].get(path, 0):.4g}" for path in PATHS) + "}"
    parts = [str(_MATH[row["precision"]]), flag(row["layout"] == "contiguous"), flag(row["transposed"])]
    return "{" + ", ".join([*parts, *map(str, numbers), *dims, us]) + "},"


def run_header(args: argparse.Namespace) -> None:
    """Writes the rows as C++."""
    rows = sorted(load_rows(args.json), key=lambda r: (_MATH[r["precision"]], r["layout"], r["transposed"], r["name"]))
    where = {f"{r['gpu']}, torch {r['torch']}, cuDNN {r['cudnn']}" for r in rows}
    head = [f"// Written by benchmarks/conv_table.py from {Path(args.json).name}: {'; '.join(sorted(where))}."]
    Path(args.out).write_text("\n".join([*head, *map(_literal, rows)]) + "\n")
    print(f"{len(rows)} rows in {args.out}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure")
    one.add_argument("--json", required=True)
    one.add_argument("--seconds", type=float, default=600)
    one.add_argument("--part", default="0/1")
    one.add_argument("--narrow", action="store_true", help="the convolutions that the kernel of few channels can run")
    one.add_argument("--grouped", action="store_true", help="convolutions of several groups")
    one.add_argument("--algorithms", type=int, default=5, help="of cuDNN, at most, among which it is autotuned")
    one.add_argument("--commit")
    one.set_defaults(run=run_measure)
    two = commands.add_parser("header")
    two.add_argument("--json", default="benchmarks/results/h200_conv_table.json")
    two.add_argument("--out", default="csrc/conv3d/choice/measured_rows.inc")
    two.set_defaults(run=run_header)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
