"""Where the time of a network goes: operators of one call with their input shapes and kernels, by torch.profiler.

For those who work on a network: what takes the time in a way, and what of it another way saves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from kgopt.cli import results
from kgopt.cli.networks.case import Entry, Measurement, Settings, Task, clock
from kgopt.cli.networks.ways import ways_of
from kgopt.cli.results import Row
from kgopt.cli.runner import describe
from kgopt.cli.text import table, time_text

__all__ = ["profile_cases"]

_WAYS = ["eager", "compile", "backend", "optimize"]
_SHOWN = 25  # rows of a table; --json has all
_WIDTHS = {"operator": 48, "shapes": 72, "kernels": 64}
# A replay of a CUDA graph is one operator, whose kernels have no names of operators.
_OPTIONS = {"kgopt.cuda_graph": False}


def profile_cases(args: argparse.Namespace, cases: Iterable[tuple[Entry, str]], settings: Settings) -> int:
    """Profiles one call of each case in each of the ``--ways``, prints a table for each, and writes all to ``--json``.
    Returns the exit status: 1 where a way failed.
    """
    device, rows = torch.device(settings.device), list[Row]()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # as in the suite
    for entry, precision in cases:
        measurement = Measurement(entry, settings)
        try:
            last = _prefers_channels_last(measurement, Task(entry.name, precision, "eager"))
            for way in ways_of(args.ways or _WAYS, precision.startswith("autocast"), device.type):
                row = _profile(measurement, Task(entry.name, precision, way, last))
                rows.append(row)
                print(_text(row), flush=True)
                if args.json:
                    results.save_rows(args.json, rows)
        finally:
            measurement.close()
    return int(any("failed" in row for row in rows))


def _prefers_channels_last(measurement: Measurement, task: Task) -> bool:
    """Whether eager PyTorch is faster in channels_last, the format that compilers then are given, as in the suite."""
    if measurement.device.type == "cpu":
        return False
    times = []
    for way in ("eager", "eager_channels_last"):
        try:
            with measurement.ready(Task(task.network, task.precision, way)) as call:
                times.append(clock(call, measurement.device, measurement.settings.seconds)[0].median_us)
        except Exception as error:  # the way itself will tell it again
            print(f"{task.network} {task.precision} {way}: {describe(error)}", file=sys.stderr)
            return False
    return times[1] < times[0]


def _profile(measurement: Measurement, task: Task) -> Row:
    """A row with the ``operators`` of one call; what goes wrong is its ``failed``."""
    row: Row = {
        "suite": "zoo_profile",
        "case": task.network,
        "dtype": task.precision,
        "direction": "training" if task.training else "forward",
        "implementation": task.implementation,
        "shape": measurement.entry.shape(measurement.settings.small),
    }
    try:
        with measurement.ready(task, _OPTIONS) as call:
            row["operators"] = operators_of(call, measurement.device)
    except Exception as error:
        row["failed"] = describe(error)
        return row
    row["total_us"] = round(sum(found["us"] for found in row["operators"]), 1)
    return row


def operators_of(call: Callable[[], Any], device: torch.device) -> list[Row]:
    """The operators of one call, those first that take most: by name, input shapes and kernels, with their number and
    their microseconds, on a GPU of the kernels that they launch themselves, else without the operators inside.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    found: dict[tuple[str, str, str], list[float]] = {}
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        us = sum(k.duration for k in event.kernels) if device.type == "cuda" else event.self_cpu_time_total
        if not us or (device.type == "cpu" and event.name.startswith("ProfilerStep")):
            continue
        shapes = str([list(shape) for shape in event.input_shapes or () if shape])
        kernels = ", ".join(sorted({k.name for k in event.kernels}))
        sums = found.setdefault((event.name, shapes, kernels), [0.0, 0])
        sums[0] += us
        sums[1] += 1
    rows = [
        {"operator": name, "shapes": shapes, "kernels": kernels, "calls": int(calls), "us": round(us, 2)}
        for (name, shapes, kernels), (us, calls) in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def _text(row: Row) -> str:
    title = f"{row['case']} {row['dtype']} {row['implementation']} {row['shape']}"
    if "failed" in row:
        return f"{title}: {row['failed']}\n"
    shown, total = row["operators"][:_SHOWN], row["total_us"]
    lines = []
    for found in shown:
        texts = [_cut(found[name], width) for name, width in _WIDTHS.items()]
        lines.append([*texts, str(found["calls"]), f"{found['us']:.0f}", f"{100 * found['us'] / total:.1f}"])
    rest = len(row["operators"]) - len(shown)
    more = f"\n{rest} more, {time_text(sum(found['us'] for found in row['operators'][_SHOWN:]))}" if rest else ""
    return f"{title}: {time_text(total)}\n{table([*_WIDTHS, 'calls', 'us', '%'], lines, left=3)}{more}\n"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
