"""``python -m kgopt demo``: the three pipelines on real images, compared with PyTorch and with float64."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import kgopt
from kgopt.accuracy import no_autotuning, round_tf32
from kgopt.cli import demo_data
from kgopt.cli._optional import progress, require
from kgopt.cli.cases import batch_slices
from kgopt.cli.environment import build_info, environment, pick_device
from kgopt.cli.measure import (
    DTYPES,
    ErrorMeter,
    peak_memory,
    precision_flags,
    rounded_convolutions,
    time_calls,
    within_tolerance,
)
from kgopt.cli.models import PIPELINES, Pipeline
from kgopt.cli.text import bytes_text, error_text, ratio_text, table, time_text

__all__ = ["Comparison", "compare", "run_demo"]


@dataclasses.dataclass
class Comparison:
    """One pipeline on one input in one precision: kgopt's module, the bare op, and PyTorch."""

    pipeline: Pipeline
    source: str
    precision: str
    shape: tuple[int, ...]
    error: float  # of the kgopt module; relative, against float64
    torch_error: float
    bar: float  # PyTorch's error; under TF32 that of an ideal TF32 convolution where it is larger
    op_error: float  # of the same computation through torch.ops.kgopt
    us: float
    torch_us: float
    peak: int | None  # bytes beyond input and parameters
    torch_peak: int | None

    @property
    def ok(self) -> bool:
        """Within twice the bar, plus a little; NaN is not."""
        dtype = DTYPES[self.precision]
        return all(within_tolerance(error, self.bar, dtype) for error in (self.error, self.op_error))


def _call_op(pipeline: Pipeline, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The pipeline through its op, with the module's parameters."""
    op = getattr(torch.ops.kgopt, pipeline.name)
    conv: Any = model.conv_transpose if pipeline.transposed else model.conv
    norm: Any = model.group_norm
    out: torch.Tensor = op(x, conv.weight, conv.bias, pipeline.args[3], norm.weight, norm.bias, eps=norm.eps)
    return out


def compare(
    pipeline: Pipeline, source: str, x: torch.Tensor, precision: str, seed: int = 0, rep_ms: float = 100.0
) -> Comparison:
    """Runs one pipeline on x (fp32, on the device) with seeded random weights, and compares.

    `precision` is "tf32", "fp32", "bf16" or "fp16"; x is converted.
    """
    dtype, device = DTYPES[precision], x.device
    x = x.to(dtype)
    with precision_flags(precision), torch.no_grad():
        plain = pipeline.plain_model(seed=seed).to(device=device, dtype=dtype)
        model = pipeline.kgopt_model(plain)
        runs: list[Callable[[], torch.Tensor]] = [
            lambda: model(x),
            lambda: plain(x),
            lambda: _call_op(pipeline, plain, x),
        ]
        outputs = [run() for run in runs]
        meters, ideal = [ErrorMeter() for _ in runs], ErrorMeter()
        for piece in batch_slices(plain, x):
            part = x[piece.x_index].double()
            with no_autotuning():
                wanted = piece.module(part)
                if precision == "tf32":  # PyTorch may take TF32 for one convolution and not for another
                    ideal.add(rounded_convolutions(piece.module)(round_tf32(part)), wanted)
            for meter, output in zip(meters, outputs, strict=True):
                meter.add(output[piece.y_index], wanted)
        del outputs
        us, torch_us = (timing.median_us for timing in time_calls(runs[:2], device, rep_ms))
        peak, torch_peak = (peak_memory(run, device) for run in runs[:2])
    error, torch_error, op_error = (meter.error for meter in meters)
    bar = max(torch_error, ideal.error if precision == "tf32" else 0.0)
    return Comparison(
        pipeline, source, precision, tuple(x.shape), error, torch_error, bar, op_error, us, torch_us, peak, torch_peak
    )


def _real_inputs(quick: bool) -> list[tuple[Pipeline, str, torch.Tensor]]:
    volume = demo_data.load_mri()
    count = 2 if quick else None
    inputs = (
        ("MRI patches", demo_data.mri_patches(volume, count)),
        ("MRI, 4x4x4 voxels as channels", demo_data.mri_unshuffled(volume, 1 if quick else None)),
        ("photographs", demo_data.photo_tiles(demo_data.load_photos(), count)),
    )
    return [(pipeline, source, x) for pipeline, (source, x) in zip(PIPELINES, inputs, strict=True)]


def demo_table(rows: list[Comparison]) -> str:
    """One line a comparison."""
    header = ["pipeline", "input", "x", "dtype", "error", "PyTorch's", "time", "PyTorch's", "ratio", "memory",
              "PyTorch's", ""]  # fmt: skip
    lines = [
        [
            row.pipeline.title.replace("hardswish + residual + logsumexp", "... + logsumexp"),
            row.source,
            "x".join(map(str, row.shape)),
            row.precision,
            error_text(max(row.error, row.op_error)),
            error_text(row.torch_error),
            time_text(row.us),
            time_text(row.torch_us),
            ratio_text(row.torch_us / row.us),
            bytes_text(row.peak),
            bytes_text(row.torch_peak),
            "ok" if row.ok else "NOT OK",
        ]
        for row in rows
    ]
    return table(header, lines, left=4)


def run_demo(args: argparse.Namespace) -> int:
    """Runs ``python -m kgopt demo`` with parsed arguments. Returns 1 when an error exceeds twice PyTorch's."""
    require("matplotlib", "demo")
    start = time.monotonic()
    device = pick_device(args.device)
    facts = environment(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    where = facts["gpu"] or f"{facts['cpu']}, {facts['cpu_threads']} threads"
    print(f"kgopt {kgopt.__version__}, torch {torch.__version__}, on {where}")
    if device.type == "cpu" and build_info().get("cuda") and torch.cuda.is_available():
        print("(a GPU is there: --device cuda runs on it)")

    real = _real_inputs(args.quick)
    precisions = ["tf32", "bf16"] if device.type == "cuda" else ["fp32"]
    steps: list[tuple[Pipeline, str, torch.Tensor | None, str]] = [
        (pipeline, source, x, precision) for precision in precisions for pipeline, source, x in real
    ]
    if device.type == "cuda" and not args.quick:
        steps += [(pipeline, "headline shape", None, precision) for precision in precisions for pipeline in PIPELINES]
    rows = []
    rep_ms = 20.0 if args.quick else 100.0 if device.type == "cuda" else 500.0
    for pipeline, source, x, precision in progress(steps, len(steps), "demo"):
        if x is None:
            x = torch.randn(pipeline.headline, generator=torch.Generator().manual_seed(args.seed))
        rows.append(compare(pipeline, source, x.to(device), precision, args.seed, rep_ms))
        if device.type == "cuda":
            torch.cuda.empty_cache()

    print()
    print(demo_table(rows))
    print("\nerror: relative L2 error against float64, the larger of module and op; ok: at most twice PyTorch's")
    print("(with TF32: or twice that of a convolution that is exact but for the rounding of its operands).")
    print("time: median. memory: peak beyond input and parameters. ratio: PyTorch's time over kgopt's.")
    draw_demo(rows, real, where, args.out, args.seed)
    print(f"chart: {os.path.abspath(args.out)}   ({time.monotonic() - start:.0f} s)")
    failed = [row for row in rows if not row.ok]
    for row in failed:
        print(f"NOT OK: {row.pipeline.name} on {row.source} in {row.precision}: error "
              f"{max(row.error, row.op_error):.2e}, PyTorch's {row.torch_error:.2e}")  # fmt: skip
    return 1 if failed else 0


def draw_demo(
    rows: list[Comparison], real: list[tuple[Pipeline, str, torch.Tensor]], where: str, path: str, seed: int
) -> None:
    """A column a pipeline. Above: what went in and what came out. Below: time and error beside PyTorch's."""
    from kgopt.cli.plot import ACCENT, INK, MUTED, figure, save, strip, wrap_title

    with torch.no_grad():
        models = [pipeline.kgopt_model(pipeline.plain_model(seed=seed)) for pipeline, _, _ in real]
        results = [model(x) for model, (_, _, x) in zip(models, real, strict=True)]
    patches, halved, tiles = (x for _, _, x in real)
    upscaled = results[1][0]
    channel = int(upscaled.flatten(1).std(1).argmax())  # the one that shows most
    pictures = (
        (_mosaic(patches[:, 0, patches.shape[2] // 2]), f"{len(patches)} patches, one slice", "gray"),
        (_mosaic(results[0].view(-1, 1, 1)), "result: a number a patch", "viridis"),
        (halved[0, 0, halved.shape[2] // 2], "MRI, one of 64 channels", "gray"),
        (upscaled[channel, upscaled.shape[1] // 2], "result: one of 128 channels", "viridis"),
        (tiles[0, 0], f"one of {len(tiles)} tiles", "gray"),
        (results[2][0, 0], "result", "magma"),
    )
    lines = max(sum(row.pipeline is pipeline for row in rows) for pipeline, _, _ in real)
    fig = figure(14.0, 4.2 + 0.75 * lines)
    fig.suptitle(f"kgopt beside PyTorch on {where}", x=0.01, ha="left", fontsize=15, fontweight="bold", color=INK)
    columns = fig.subfigures(1, 3, wspace=0.04)
    for index, (column, (pipeline, _, _)) in enumerate(zip(columns, real, strict=True)):
        title = wrap_title(pipeline.title, 40) + ("" if "tanh" in pipeline.name else "\n")
        column.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold", color=INK)
        grid = column.add_gridspec(2, 2, height_ratios=[3.0, 0.75 * lines])
        for side in (0, 1):
            picture, text, cmap = pictures[2 * index + side]
            axes = column.add_subplot(grid[0, side])
            low, high = torch.quantile(picture.flatten(), torch.tensor([0.01, 0.99])).tolist()
            axes.imshow(picture.numpy(), cmap=cmap, vmin=low, vmax=high)
            axes.set_title(text, fontsize=9, color=MUTED)
            axes.set_xticks([])
            axes.set_yticks([])
            strip(axes)
            if index == 0 and side == 1:
                for line, values in enumerate(picture.tolist()):
                    for place, value in enumerate(values):
                        ink = "white" if value < 0.5 * (low + high) else INK
                        axes.text(place, line, f"{value:.3f}", ha="center", va="center", fontsize=8, color=ink)

        axes = column.add_subplot(grid[1, :])
        mine = [row for row in rows if row.pipeline is pipeline]
        longest = max(max(row.us, row.torch_us) for row in mine)
        style: dict[str, Any] = {"va": "center", "fontsize": 9, "color": INK}
        for i, row in enumerate(mine):
            axes.barh(i - 0.3, row.torch_us, height=0.26, color="#9aa3af")
            axes.barh(i - 0.02, row.us, height=0.26, color=ACCENT)
            axes.text(row.torch_us + 0.02 * longest, i - 0.3, time_text(row.torch_us), **style)
            text = f"{time_text(row.us)}   {ratio_text(row.torch_us / row.us)}"
            axes.text(row.us + 0.02 * longest, i - 0.02, text, fontweight="bold", **style)
            errors = f"error {error_text(max(row.error, row.op_error))}, PyTorch's {error_text(row.torch_error)}"
            axes.text(0, i + 0.24, f" {errors}", va="center", fontsize=8, color=MUTED)
        kinds = ["headline shape" if row.source == "headline shape" else "real input" for row in mine]
        labels = [f"{kind}\n{row.precision}" for kind, row in zip(kinds, mine, strict=True)]
        axes.set_yticks([i - 0.16 for i in range(len(mine))], labels, fontsize=8.5)
        axes.set_ylim(len(mine) - 0.55, -0.6)
        axes.set_xlim(0, longest * 1.45)
        axes.set_xticks([])
        strip(axes)
    note = f"gray: PyTorch {torch.__version__}; green: kgopt {kgopt.__version__}. Medians; errors against float64."
    fig.supxlabel(note, fontsize=8.5, color=MUTED, x=0.01, ha="left")
    save(fig, path)


def _mosaic(tiles: torch.Tensor) -> torch.Tensor:
    """[N, H, W] as one picture, three tiles a row, filled up with the darkest value."""
    columns = 3 if len(tiles) > 2 else len(tiles)
    missing = -len(tiles) % columns
    if missing:
        tiles = torch.cat([tiles, tiles.min().expand(missing, *tiles.shape[1:])])
    rows = tiles.reshape(-1, columns, *tiles.shape[1:]).permute(0, 2, 1, 3)
    return rows.reshape(-1, columns * tiles.shape[2])
