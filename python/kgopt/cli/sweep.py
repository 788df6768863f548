"""``bench --suite sweep``: GroupNorm at random shapes against the better of eager and torch.compile."""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import kgopt.nn
from kgopt._layout import FORMATS
from kgopt.cli import results
from kgopt.cli.cases import Case, PlainGroupNorm, group_norm_work, group_slices
from kgopt.cli.errors import result_errors
from kgopt.cli.floor import Ceilings
from kgopt.cli.measure import DTYPES, clock, kink_error, look_again, note_error_ratio, note_time, peak_memory
from kgopt.cli.models import randomize
from kgopt.cli.results import Group, Row, group_rows
from kgopt.cli.runner import Compiled, Runner, Settings, describe, quiet_compiler
from kgopt.cli.text import bytes_text, error_text, ratio_text, table, time_text

__all__ = [
    "LIMIT",
    "Shape",
    "compile_shape",
    "log_uniform",
    "measure_shape",
    "random_shapes",
    "sweep_points",
    "sweep_summary",
]

LIMIT = 1.05  # times the better of eager and torch.compile: what is above counts as slower


@dataclasses.dataclass(frozen=True)
class Shape:
    """One random case. Rank 3 has no channels_last."""

    index: int
    shape: tuple[int, ...]
    groups: int
    act: str
    precision: str
    layout: str  # "contiguous" or "channels_last"

    @property
    def bytes(self) -> int:
        """Of x."""
        return math.prod(self.shape) * DTYPES[self.precision].itemsize

    @property
    def name(self) -> str:
        """Index and what is drawn, unique in a sweep."""
        sizes = "x".join(map(str, self.shape))
        layout = " channels_last" if self.layout == "channels_last" else ""
        return f"{self.index:03d}: {sizes} g{self.groups} {self.act}{layout}"


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """A number from `low` to `high`, evenly on a log scale."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _draw(rng: random.Random, index: int, precisions: list[str], max_bytes: float) -> Shape:
    precision = rng.choice(precisions)
    elements = log_uniform(rng, 1024, max(1024, max_bytes)) / DTYPES[precision].itemsize
    rank = rng.randint(3, 5)
    channels = max(1, min(round(log_uniform(rng, 1, 1024)), int(elements)))
    batch = max(1, min(round(log_uniform(rng, 1, 32)), int(elements / channels)))
    left = max(1.0, elements / (channels * batch))
    spatial = []
    for dims in range(rank - 2, 0, -1):
        # Around the even split, so that long and flat volumes occur too.
        size = max(1, round(min(left, left ** (1 / dims) * (1.0 if dims == 1 else log_uniform(rng, 0.5, 2)))))
        spatial.append(size)
        left /= size
    divisors = [g for g in range(1, channels + 1) if channels % g == 0]
    groups = rng.choice(divisors)
    if groups == channels and math.prod(spatial) == 1:
        spatial[-1] = 2  # of one value a group PyTorch says that it cannot be normalized
    layout = rng.choice(["contiguous", "channels_last"])
    act = rng.choice(["none", "relu", "silu"])
    return Shape(index, (batch, channels, *spatial), groups, act, precision, "contiguous" if rank == 3 else layout)


def random_shapes(count: int, seed: int, precisions: list[str], max_bytes: float) -> list[Shape]:
    """The first `count` shapes of a seed: rank 3 to 5, 1 to 1024 channels, any number of groups that divides them.

    Sizes from 1 KB to `max_bytes`, evenly on a log scale. More shapes of the same seed begin with the same ones.
    """
    rng = random.Random(seed)
    return [_draw(rng, index, precisions, max_bytes) for index in range(count)]


def _case(shape: Shape) -> Case:
    channels = shape.shape[1]

    def plain() -> nn.Module:
        return randomize(PlainGroupNorm(shape.groups, channels, shape.act), shape.index)

    def ours(model: nn.Module) -> nn.Module:
        like = next(model.parameters())
        out = kgopt.nn.GroupNorm(shape.groups, channels, act=shape.act, device=like.device, dtype=like.dtype)
        out.load_state_dict(model.state_dict(), strict=True)
        return out

    return Case("sweep", shape.name, shape.shape, plain, ours, group_norm_work, group_slices)


class _Both(Runner):
    """Forward and backward of one implementation on one input; the forward keeps what the backward needs."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        super().__init__(model, [x], "backward")

    def forward(self) -> torch.Tensor:
        y: torch.Tensor = self.model(self.inputs[0])
        return y

    def backward(self) -> tuple[torch.Tensor, ...]:
        return self.run(0)


class _Output:
    """The result of a forward as Runner gives it."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y

    def run(self, index: int) -> tuple[torch.Tensor, ...]:
        return (self.y,)


def _compiles(settings: Settings) -> bool:
    return settings.compile and (not settings.only or "compile" in settings.only)


def _model_and_input(shape: Shape, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    dtype = DTYPES[shape.precision]
    plain = _case(shape).plain().to(device=device, dtype=dtype)
    generator = torch.Generator(device=device).manual_seed(shape.index)
    x = torch.empty(shape.shape, device=device).normal_(generator=generator).mul_(2.0).add_(0.5).to(dtype)
    if shape.layout == "channels_last":
        x = x.contiguous(memory_format=FORMATS[x.dim()])
    return plain, x


def compile_shape(shape: Shape, settings: Settings) -> dict[str, Compiled]:
    """torch.compile's forward and backward at one shape, for `measure_shape`; empty where it fails or is not wanted.

    A failure is met again by `measure_shape`, which notes it.
    """
    if not _compiles(settings) or settings.is_spent:
        return {}
    plain, x = _model_and_input(shape, settings.device)
    start = time.monotonic()
    with quiet_compiler():
        try:
            model: nn.Module = torch.compile(plain, dynamic=False)  # type: ignore[assignment]
            _Both(model, x).backward()
        except Exception:
            return {}
    return {"compile": Compiled(model, round(time.monotonic() - start, 2))}


def measure_shape(
    shape: Shape, settings: Settings, ceilings: Ceilings, facts: Row, ready: dict[str, Compiled] | None = None
) -> list[Row]:
    """Forward and backward rows of eager, torch.compile and kgopt at one shape.

    ready: what `compile_shape` made of this shape; None compiles here.
    """
    device = settings.device
    case = _case(shape)
    plain, x = _model_and_input(shape, device)
    rows: dict[tuple[str, str], Row] = {}
    runners: dict[str, _Both] = {}
    names = ["eager", *(["compile"] if _compiles(settings) else []), "kgopt"]
    if ready is None:
        torch.compiler.reset()
    with quiet_compiler():
        for name in names:
            own = rows[name, "forward"], rows[name, "backward"] = _new_rows(shape, name)
            try:
                runners[name] = _time_one(name, own, case, plain, x, settings, (ready or {}).get(name))
            except Exception as error:
                why = str(error) if isinstance(error, TimeoutError) else describe(error)
                for row in own:
                    row["failed"] = why
        _second_look(rows, runners, settings)
        for direction in _DIRECTIONS:
            kink = kink_error(shape.act, shape.shape) if direction == "backward" else 0.0
            _add_errors(case, plain, {n: rows[n, direction] for n in names}, runners, x, direction, kink)
    for (_, direction), row in rows.items():
        work = case.work(shape.shape, DTYPES[shape.precision].itemsize, direction)
        ceilings.note(row, work, shape.precision)
        row["copy_gbytes_per_s"] = round(ceilings.bytes_per_s * 1e-9, 1)
        row.update(facts)
    del runners
    if device.type == "cuda" and shape.bytes > 2**26:
        gc.collect()
        torch.cuda.empty_cache()
    return list(rows.values())


_DIRECTIONS = ("forward", "backward")


def _new_rows(shape: Shape, name: str) -> tuple[Row, Row]:
    """Of both directions."""
    forward, backward = (
        {
            "suite": "sweep", "case": shape.name, "title": shape.name, "shape": list(shape.shape),
            "groups": shape.groups, "act": shape.act, "bytes": shape.bytes, "direction": direction,
            "dtype": shape.precision, "implementation": name, "layout": shape.layout,
        }
        for direction in _DIRECTIONS
    )  # fmt: skip
    return forward, backward


def _time_one(
    name: str,
    rows: tuple[Row, Row],
    case: Case,
    plain: nn.Module,
    x: torch.Tensor,
    settings: Settings,
    before: Compiled | None,
) -> _Both:
    """Makes one implementation and times both directions; ``before``: what was compiled already."""
    if before:
        model = before.model
    elif name == "compile":
        if settings.is_spent:
            raise TimeoutError("not run: the time budget was spent")
        model = torch.compile(plain, dynamic=False)  # type: ignore[assignment]
    else:
        model = case.kgopt(plain) if name == "kgopt" else plain
    start = time.monotonic()
    runner = _Both(model, x)
    runner.backward()
    if name == "compile":
        rows[0]["compile_s"] = before.compile_s if before else round(time.monotonic() - start, 2)
    for direction, row in zip(_DIRECTIONS, rows, strict=True):
        fn = getattr(runner, direction)
        note_time(row, clock(fn, settings.device, settings.rep_ms))
        row["peak_bytes"] = peak_memory(fn, settings.device)
    return runner


def _second_look(rows: dict[tuple[str, str], Row], runners: dict[str, _Both], settings: Settings) -> None:
    """Where kgopt looks slower both are timed again."""
    for direction in ("forward", "backward"):
        ratio, best = _ratio({n: rows[n, direction] for n in runners})
        if ratio is not None and ratio > LIMIT:
            runs = [getattr(runners[name], direction) for name in (best, "kgopt")]
            both = rows[best, direction], rows["kgopt", direction]
            look_again(both, runs, settings.device, settings.rep_ms)


def _ratio(rows: dict[str, Row]) -> tuple[float | None, str]:
    """Time of kgopt over that of the fastest baseline, and which one that is."""
    timed = [(row["time_us"], name) for name, row in rows.items() if name != "kgopt" and row.get("time_us")]
    ours = rows.get("kgopt", {}).get("time_us")
    return (ours / min(timed)[0], min(timed)[1]) if timed and ours else (None, "")


def _add_errors(
    case: Case,
    plain: nn.Module,
    rows: dict[str, Row],
    runners: dict[str, _Both],
    x: torch.Tensor,
    direction: str,
    kink: float,
) -> None:
    compared: dict[str, Any] = dict(runners)
    if direction == "forward":
        compared = {name: _Output(runner.outputs[0].detach()) for name, runner in runners.items()}
    if not compared:
        return
    try:
        errors = result_errors(case, plain, compared, [x], direction, False)
    except RuntimeError as error:
        for row in rows.values():
            row["error_unknown"] = describe(error)
        return
    for name, found in errors.items():
        rows[name].update(found)
    bar = errors.get("eager", {}).get("error")
    for row in rows.values():
        if bar is not None:
            note_error_ratio(row, bar, kink, x.dtype)


# -------------------------------------------------------------------------------------------------------- report


@dataclasses.dataclass(frozen=True)
class Point:
    """What the chart shows of one shape and direction."""

    group: Group
    ratio: float
    best: str  # the fastest baseline

    @property
    def facts(self) -> Row:
        """Of the kgopt row."""
        return self.group.rows["kgopt"]


def sweep_points(rows: Iterable[Row]) -> list[Point]:
    """A point for every shape and direction where kgopt and a baseline were timed."""
    points = []
    for group in group_rows(rows):
        ratio, best = _ratio(group.rows)
        if ratio is not None:
            points.append(Point(group, ratio, best))
    return points


def sweep_summary(rows: list[Row]) -> str:
    """Ratios by direction, layout and dtype, and the worst shapes."""
    points = sweep_points(rows)
    kinds: dict[tuple[str, str, str], list[float]] = {}
    for point in points:
        for dtype in (point.facts["dtype"], "all"):
            kinds.setdefault((point.facts["direction"], point.facts["layout"], dtype), []).append(point.ratio)
    lines = []
    for (direction, layout, dtype), ratios in sorted(
        kinds.items(), key=lambda kind: (kind[0][0] != "forward", kind[0])
    ):
        lines.append(
            [
                direction, layout, dtype, str(len(ratios)), f"{statistics.median(ratios):.2f}", f"{max(ratios):.2f}",
                str(sum(ratio > LIMIT for ratio in ratios)),
            ]
        )  # fmt: skip
    header = ["direction", "layout", "dtype", "shapes", "median", "worst", f"over {LIMIT}"]
    parts = [table(header, lines, left=3)]
    slow = sorted((p for p in points if p.ratio > LIMIT), key=lambda p: -p.ratio)[:12]
    if slow:
        cells = []
        for p in slow:
            ours, best = p.facts, f"{time_text(p.group.time(p.best))} {results.IMPLEMENTATIONS[p.best]}"
            what = [ours["case"], ours["dtype"], ours["direction"], bytes_text(ours["bytes"])]
            cells.append([*what, time_text(ours["time_us"]), best, f"{p.ratio:.2f}", error_text(ours.get("error"))])
        parts += ["", table(["slower", "dtype", "direction", "x", "kgopt", "best", "ratio", "error"], cells, left=3)]
    compiled = sum("compile" in p.group.rows and "failed" not in p.group.rows["compile"] for p in points)
    faster = [1 / p.ratio for p in points]
    if faster:
        parts += [
            "",
            f"kgopt is {ratio_text(statistics.median(faster))} as fast as the better of eager and torch.compile at the "
            f"median of {len(points)} measurements, {compiled} of them with torch.compile.",
        ]
    return "\n".join(parts)
