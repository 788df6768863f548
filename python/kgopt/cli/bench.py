"""``python -m kgopt bench``: measures suites of cases and writes rows, a table and a chart."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from kgopt import torch_private
from kgopt.accuracy import no_autotuning, round_tf32
from kgopt.cli import results
from kgopt.cli._optional import MissingPackageError, progress, progress_note, require
from kgopt.cli.cases import Case, suite_cases
from kgopt.cli.environment import environment, pick_device
from kgopt.cli.floor import Ceilings, measure_ceilings
from kgopt.cli.measure import (
    DTYPES,
    ErrorMeter,
    gpu_time,
    note_time,
    peak_memory,
    precision_flags,
    rounded_convolutions,
    time_call,
    within_tolerance,
)
from kgopt.cli.results import Group, Row, group_rows
from kgopt.cli.text import bytes_text, error_text, ratio_text, table, time_text

if TYPE_CHECKING:
    from kgopt.cli.jobs import Turn

_Step = TypeVar("_Step")

__all__ = [
    "Compiled",
    "Runner",
    "Settings",
    "bench_table",
    "compile_case",
    "describe",
    "measure_case",
    "measure_suite",
    "quiet_compiler",
    "result_errors",
    "run_bench",
]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a suite is measured."""

    device: torch.device
    quick: bool = False
    compile: bool = True
    max_autotune: bool = True
    rep_ms: float = 100.0
    input_sets: int = 3
    deadline: float | None = None  # time.monotonic() after which no compiled baseline starts
    stop_at: float | None = None  # and after which nothing starts
    only: tuple[str, ...] = ()  # implementations to measure beside eager; all where empty

    @property
    def is_spent(self) -> bool:
        """Whether the time budget is used up."""
        return self.deadline is not None and time.monotonic() > self.deadline

    @property
    def is_stopped(self) -> bool:
        """Whether no further measurement may start."""
        return self.stop_at is not None and time.monotonic() > self.stop_at


def _inputs(case: Case, settings: Settings, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random x, several sets: normal, normal with another scale and offset, uniform. Fewer where x is large."""
    generator = torch.Generator(device=settings.device).manual_seed(0)
    count = max(1, min(settings.input_sets, 2**30 // max(1, 4 * math.prod(case.shape))))
    out = []
    for index in range(count):
        x = torch.empty(case.shape, device=settings.device)
        if index % 3 == 2:
            x.uniform_(generator=generator)
        else:
            x.normal_(generator=generator)
            if index % 3 == 1:
                x.mul_(3.0).add_(0.5)
        out.append(x.to(dtype))
    return out


def _channels_last(x: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


class Runner:
    """One implementation, ready to run: run(i) works on input set i and returns tensors.

    Directions: "forward" without autograd; "training", forward and backward; "backward" alone, on a graph kept from one
    forward. Gradients are those of x and of every parameter.
    """

    def __init__(self, model: nn.Module, inputs: list[torch.Tensor], direction: str) -> None:
        self.direction = direction
        self.model = model
        self.parameters = list(model.parameters())
        self.inputs = inputs
        self.count = 0
        if direction == "forward":
            return
        self.inputs = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
        self.gradients = []
        self.outputs = []
        for x in self.inputs:
            y = model(x)
            self.gradients.append(self._output_gradient(y.detach()))
            if direction == "backward":
                self.outputs.append(y)

    @staticmethod
    def _output_gradient(y: torch.Tensor) -> torch.Tensor:
        # Drawn in logical order, so that every implementation and layout gets the same gradient.
        generator = torch.Generator(device=y.device).manual_seed(1)
        values = torch.empty(y.shape, dtype=torch.float32, device=y.device).normal_(generator=generator)
        return torch.empty_like(y).copy_(values)

    def run(self, index: int) -> tuple[torch.Tensor, ...]:
        """The output, or the gradients of x and of the parameters."""
        x = self.inputs[index]
        if self.direction == "forward":
            with torch.no_grad():
                return (self.model(x),)
        y = self.outputs[index] if self.direction == "backward" else self.model(x)
        keep = self.direction == "backward"
        return torch.autograd.grad(y, [x, *self.parameters], self.gradients[index], retain_graph=keep)

    def run_next(self) -> tuple[torch.Tensor, ...]:
        """As `run`, one input set after the other."""
        self.count += 1
        return self.run(self.count % len(self.inputs))


class _Replayed(nn.Module):
    """A model's forward as a CUDA graph for each input: captured at the first call, replayed by every call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """model(x), in memory that the next call with this x writes again."""
        if x.data_ptr() not in self.graphs:
            self.model(x)  # what happens once happens before the capture
            torch.cuda.synchronize(x.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = self.model(x)
            self.graphs[x.data_ptr()] = graph, y
        graph, y = self.graphs[x.data_ptr()]
        graph.replay()
        return y


def _builders(
    case: Case, settings: Settings, direction: str, x: torch.Tensor
) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Implementation -> what makes it of the plain model, which is on the device and in its dtype; x: its input."""

    def compiled(mode: str | None) -> Callable[[nn.Module], nn.Module]:
        def build(model: nn.Module) -> nn.Module:
            # Without CUDA graphs: they would copy each input set into place. The clock runs on the GPU, so launches
            # are hidden for all implementations alike.
            return torch.compile(model, dynamic=False, mode=mode)  # type: ignore[return-value]

        return build

    def same(model: nn.Module) -> nn.Module:
        return model

    def optimized(model: nn.Module) -> nn.Module:
        import kgopt

        trains = direction != "forward"
        return kgopt.optimize(model.train(trains), x.clone().requires_grad_(trains))  # type: ignore[no-any-return]

    out: dict[str, Callable[[nn.Module], nn.Module]] = {"eager": same}
    if case.layouts:
        out["eager_channels_last"] = same
    if settings.compile and case.compile:
        out["compile"] = compiled(None)
        if case.layouts and not case.max_autotune:
            out["compile_channels_last"] = compiled(None)
        if case.max_autotune and settings.max_autotune:
            out["compile_max_autotune"] = compiled("max-autotune-no-cudagraphs")
    out["kgopt"] = case.kgopt
    if case.layouts:
        out["kgopt_channels_last"] = case.kgopt
    if case.own_kernel and settings.device.type == "cuda":
        out["kgopt_own"] = lambda model: case.own_kernel(case.kgopt(model))  # type: ignore[misc]
    if case.graph and settings.device.type == "cuda":
        out["kgopt_graph"] = lambda model: _Replayed(case.kgopt(model))
    if case.optimize:
        out["kgopt_optimize"] = optimized
    # Eager is what every error is compared with.
    return {name: build for name, build in out.items() if not settings.only or name in ("eager", *settings.only)}


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Inductor reports every candidate that it tries; only the time counts here."""
    log = logging.getLogger(torch_private.INDUCTOR_LOG)
    level = log.level
    log.setLevel(logging.ERROR)
    # One module's code is compiled for many shapes here; past the usual limits it would run eagerly, unseen.
    settings: dict[str, Any] = {"recompile_limit": 2**16, "accumulated_recompile_limit": 2**16}
    settings["autotune_num_choices_displayed"] = 0
    settings["donated_buffer"] = False  # the backward of a kept graph runs many times: its buffers survive the first
    try:
        with torch_private.compiler_settings(**settings):
            yield
    finally:
        log.setLevel(level)


def describe(error: BaseException) -> str:
    """An exception in one line, for a row's `failed`."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:300]


# Stands among the implementations for a convolution whose operands are rounded to TF32 and which is exact otherwise.
_IDEAL = "ideal_tf32"


def result_errors(
    case: Case, plain: nn.Module, runners: dict[str, Any], inputs: list[torch.Tensor], direction: str, ideal: bool
) -> dict[str, dict[str, float]]:
    """implementation -> error and error_max, of the worst input set and the worst tensor; `ideal` adds _IDEAL's."""
    members = [*runners, *([_IDEAL] if ideal else [])]
    worst: dict[str, dict[str, float]] = {name: {} for name in members}
    parameters = dict(plain.named_parameters())

    def note(name: str, key: str, value: float) -> None:
        before = worst[name].get(key, 0.0)
        worst[name][key] = value if value != value else max(before, value)  # NaN stays visible

    def gradients(module: nn.Module, part: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = part.clone().requires_grad_()
        return torch.autograd.grad(module(part), [part, *module.parameters()], dy)

    for index, x in enumerate(inputs):
        outputs = {name: runner.run(index) for name, runner in runners.items()}
        meters: dict[str, dict[str, ErrorMeter]] = {name: {} for name in members}
        sums: dict[str, dict[str, torch.Tensor]] = {"": {}, _IDEAL: {}}

        def compare(name: str, key: str, value: torch.Tensor, wanted: torch.Tensor) -> None:
            meters[name].setdefault(key, ErrorMeter()).add(value, wanted)  # noqa: B023

        for piece in case.slices(plain, x):
            part = x[piece.x_index].double()
            with no_autotuning():
                rounded = (rounded_convolutions(piece.module), round_tf32(part)) if ideal else None
                if direction == "forward":
                    with torch.no_grad():
                        wanted = piece.module(part)
                        if rounded:
                            compare(_IDEAL, "y", rounded[0](rounded[1]), wanted)
                    for name, out in outputs.items():
                        compare(name, "y", out[0][piece.y_index], wanted)
                    continue
                dy = next(iter(runners.values())).gradients[index][piece.y_index].double()
                exact = gradients(piece.module, part, dy)
                found = {"": exact, **({_IDEAL: gradients(*rounded, dy)} if rounded else {})}
            for name, out in outputs.items():
                compare(name, "dx", out[0][piece.x_index], exact[0])
            if rounded:
                compare(_IDEAL, "dx", found[_IDEAL][0], exact[0])
            local_names = [name for name, _ in piece.module.named_parameters()]
            for kind, grads in found.items():
                by_name = dict(zip(local_names, grads[1:], strict=True))
                for whole, (local, place) in (piece.params or {}).items():
                    zeros = torch.zeros(parameters[whole].shape, dtype=torch.float64, device=x.device)
                    sums[kind].setdefault(whole, zeros)[place] += by_name[local]
        for position, parameter in enumerate(parameters):
            if parameter in sums[""]:
                for name, out in outputs.items():
                    compare(name, parameter, out[1 + position], sums[""][parameter])
                if ideal:
                    compare(_IDEAL, parameter, sums[_IDEAL][parameter], sums[""][parameter])
        for name in members:
            for meter in meters[name].values():
                note(name, "error", meter.error)
                note(name, "error_max", meter.error_max)
    return worst


def _eager_of(row: Row) -> str:
    """The eager implementation of the same layout."""
    return "eager_channels_last" if row["layout"] == "channels_last" else "eager"


def _judge(rows: dict[str, Row], dtype: torch.dtype, kink: float) -> None:
    """Adds error_ratio, to the error of eager in the same layout, and out_of_tolerance where it is too large.

    kink: the error that is allowed in any case.

    Under TF32 the yardstick is the larger of eager's error and that of an ideal TF32 convolution: PyTorch takes TF32
    for some convolutions and not for others under the same flag.
    """
    for row in rows.values():
        bar = rows.get(_eager_of(row), {}).get("error", rows["eager"].get("error"))
        if bar is None or "error" not in row:
            continue
        row["error_ratio"] = row["error"] / bar if bar > 0 else None
        if not within_tolerance(row["error"], max(bar, kink, row.get("error_ideal_tf32", 0.0)), dtype):
            row["out_of_tolerance"] = True


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A baseline that torch.compile has compiled before it is measured, and the seconds that took."""

    model: nn.Module
    compile_s: float


def compile_case(case: Case, precision: str, direction: str, settings: Settings) -> dict[str, Compiled]:
    """The compiled baselines of one case, for `measure_case`. One that fails is left out: it will fail there again."""
    dtype, device = DTYPES[precision], settings.device
    out = {}
    with precision_flags(precision), quiet_compiler(), no_autotuning():
        plain = case.plain().to(device=device, dtype=dtype)
        x = _inputs(case, dataclasses.replace(settings, input_sets=1), dtype)[0]
        for name, build in _builders(case, settings, direction, x).items():
            if name not in results.COMPILED or settings.is_spent:
                continue
            start = time.monotonic()
            with contextlib.suppress(Exception):
                model = build(plain)
                if name.endswith("channels_last"):
                    Runner(model, [x.contiguous(memory_format=_channels_last(x))], direction).run_next()
                else:
                    Runner(model, [x], direction).run_next()
                out[name] = Compiled(model, round(time.monotonic() - start, 2))
    return out


def _layout_chosen(model: nn.Module) -> str:
    import kgopt

    return kgopt.report(model).layout  # type: ignore[no-any-return]


def measure_case(
    case: Case,
    precision: str,
    direction: str,
    settings: Settings,
    ceilings: Ceilings,
    facts: Row,
    ready: dict[str, Compiled] | None = None,
) -> list[Row]:
    """Measures every implementation of one case. A failing one gives a row with `failed` instead of a time.

    ready: what `compile_case` made of this case; None compiles here.
    """
    dtype, device = DTYPES[precision], settings.device
    work = case.work(case.shape, dtype.itemsize, direction)
    floor_us, bound = ceilings.floor(work, precision)
    rows: dict[str, Row] = {}
    runners: dict[str, Runner] = {}
    if ready is None:
        torch.compiler.reset()  # not between two compiled baselines: the first would compile again for its error
    with precision_flags(precision), quiet_compiler():
        plain = case.plain().to(device=device, dtype=dtype)
        inputs = _inputs(case, settings, dtype)
        for name, build in _builders(case, settings, direction, inputs[0]).items():
            row: Row = {
                "suite": case.suite,
                "case": case.name,
                "title": case.title or case.name,
                "shape": list(case.shape),
                "direction": direction,
                "dtype": precision,
                "implementation": name,
                "layout": "channels_last" if name.endswith("channels_last") else "contiguous",
            }
            if case.axis:
                row["axis"], row["axis_value"] = case.axis, case.axis_value
            rows[name] = row
            compiles = name in results.COMPILED
            before = (ready or {}).get(name)
            if compiles and before is None and settings.is_spent:
                row["failed"] = "not run: the time budget was spent"
                continue
            try:
                x_format = _channels_last(inputs[0]) if row["layout"] == "channels_last" else torch.contiguous_format
                if before is None:
                    model = case.plain().to(device=device, dtype=dtype)
                    model.load_state_dict(plain.state_dict())
                    model = build(model)
                else:
                    model = before.model
                if row["layout"] == "channels_last" and not compiles:
                    model = model.to(memory_format=x_format)  # type: ignore[call-overload]
                own_inputs = [x.contiguous(memory_format=x_format) for x in inputs]
                start = time.monotonic()
                runner = Runner(model, own_inputs, direction)
                runner.run_next()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if compiles:
                    row["compile_s"] = before.compile_s if before else round(time.monotonic() - start, 2)
                took = time_call(runner.run_next, device, settings.rep_ms)
                if case.gpu_clock and device.type == "cuda":
                    row["call_us"] = round(took.median_us, 2)
                    took = gpu_time(runner.run_next, device, settings.rep_ms)
                note_time(row, took)
                row["peak_bytes"] = peak_memory(runner.run_next, device)
                if name == "kgopt_optimize":
                    row["layout_chosen"] = _layout_chosen(model)
                runners[name] = runner
            except Exception as error:
                row["failed"] = describe(error)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        ideal = precision == "tf32" and work.flops > 0
        try:
            errors = result_errors(case, plain, runners, inputs, direction, ideal)
        except torch.cuda.OutOfMemoryError as error:
            errors = {name: {} for name in runners}
            for name in runners:
                rows[name]["error_unknown"] = describe(error)
    for name, row in rows.items():
        row.update(errors.get(name, {}))
    ideal_error = errors.get(_IDEAL, {}).get("error", 0.0)
    if ideal_error:
        for row in rows.values():
            row["error_ideal_tf32"] = ideal_error
    _judge(rows, dtype, case.kink if direction == "backward" else 0.0)
    for row in rows.values():
        took_us = row.get("time_us")
        row["floor_us"] = round(floor_us, 3)
        row["floor_bound"] = bound
        if took_us:
            row["floor_fraction"] = round(floor_us / took_us, 5)
            eager_us = rows.get(_eager_of(row), {}).get("time_us")
            row["speedup_over_eager"] = round(eager_us / took_us, 4) if eager_us else None
            row["tflops"] = round(work.flops / took_us * 1e-6, 3) if work.flops else None
            row["gbytes_per_s"] = round(work.bytes / took_us * 1e-3, 2)
        row["work_bytes"], row["work_flops"] = work.bytes, work.flops
        special = ceilings.special_us(work)
        row["special_us"] = round(special, 2) if special else None
        row["copy_gbytes_per_s"] = round(ceilings.bytes_per_s * 1e-9, 1)
        row["matmul_tflops"] = round(ceilings.flops_per_s[precision] * 1e-12, 2)
        row.update(facts)
    return list(rows.values())


# -------------------------------------------------------------------------------------------------------- report


def _short(name: str) -> str:
    """A case's name, short enough for a table row."""
    shorter = {
        "conv3d_group_norm_mean": "conv3d+gn+mean",
        "conv_transpose3d_relu_group_norm": "convT3d+relu+gn",
        "conv2d_group_norm_tanh_hardswish_residual_logsumexp": "conv2d+gn+...+lse",
    }
    first, _, rest = name.partition(" ")
    return f"{shorter.get(first, first)} {rest}".rstrip()


def error_and_peak(group: Group) -> list[str]:
    """Cells: error and peak memory, each of kgopt and of eager."""
    ours, eager = group.rows.get("kgopt", {}), group.rows.get("eager", {})
    return [
        error_text(ours.get("error")) + ("!" if ours.get("out_of_tolerance") else ""),
        error_text(eager.get("error")),
        bytes_text(ours.get("peak_bytes")),
        bytes_text(eager.get("peak_bytes")),
    ]


def table_of_filled(header: list[str], lines: list[list[str]]) -> str:
    """A table of the columns in which something stands; the first two are names."""
    kept = [i for i in range(len(header)) if i < 2 or any(line[i] != "-" for line in lines)]
    return table([header[i] for i in kept], [[line[i] for i in kept] for line in lines], left=2)


def bench_table(groups: list[Group]) -> str:
    """One line a case, dtype and direction: times, ratios, floor, error beside eager's, memory."""
    present = [name for name in results.IMPLEMENTATIONS if any(name in group.rows for group in groups)]
    heads = {
        "eager": "eager",
        "eager_channels_last": "eager cl",
        "compile": "compile",
        "compile_channels_last": "compile cl",
        "compile_max_autotune": "max-auto",
        "kgopt": "kgopt",
        "kgopt_channels_last": "kgopt cl",
        "kgopt_own": "own",
        "kgopt_graph": "kgopt graph",
        "kgopt_optimize": "optimize",
    }
    layouts = "kgopt_channels_last" in present
    speedups = ["x eager", "x compile", *(["x eager cl", "x compile cl"] if layouts else [])]
    header = ["case", "dtype", *(heads[name] for name in present), *speedups, "floor", "of floor",
              "error", "eager's", "peak", "eager's"]  # fmt: skip
    lines = []
    for group in groups:
        fraction = group.floor_fraction
        ratios = [group.over_eager(), group.over_compile()]
        if layouts:
            ratios += [group.over_eager("_channels_last"), group.over_compile("_channels_last")]
        times = ["failed" if "failed" in group.rows.get(n, {}) else time_text(group.time(n)) for n in present]
        arrow = {"forward": "", "backward": " bwd", "training": " train"}[group.direction]
        lines.append(
            [
                _short(group.case) + arrow,
                group.dtype,
                *times,
                *(ratio_text(ratio) for ratio in ratios),
                time_text(group.floor_us),
                "-" if fraction is None else f"{100 * fraction:.0f}%",
                *error_and_peak(group),
            ]
        )
    return table_of_filled(header, lines)


_SLOWER = 1.05  # the module's time, above which kgopt.optimize of the plain model has missed something


def _notes(groups: list[Group]) -> list[str]:
    """What failed, each once."""
    notes: dict[str, None] = {}
    unrun = 0
    for group in groups:
        for name, row in group.rows.items():
            if group.suite == "sweep" and row.get("failed", "").startswith("not run"):
                unrun += 1  # hundreds, all for the same reason
            elif "failed" in row:
                notes[f"{_short(group.case)} {group.dtype} {group.direction}, {name}: {row['failed']}"] = None
        if (ratio := group.optimize_over_module) is not None and ratio > _SLOWER:
            chosen = group.rows["kgopt_optimize"].get("layout_chosen") or "layout not timed"
            notes[
                f"{_short(group.case)} {group.dtype} {group.direction}: kgopt.optimize(plain model) takes {ratio:.2f} "
                f"times the module's ({chosen})"
            ] = None
        for row in group.rows.values():
            if "error_unknown" in row:
                notes[f"{_short(group.case)} {group.dtype}: no error measured: {row['error_unknown']}"] = None
    if unrun:
        notes[f"{unrun} measurements without torch.compile: the time budget was spent"] = None
    return list(notes)


def _headline(row: Row) -> str:
    where = row.get("gpu") or f"{row.get('cpu')}, {row.get('cpu_threads')} threads"
    parts = [where, f"torch {row['torch']}", f"kgopt {row['kgopt']}"]
    if row.get("cudnn"):
        parts.insert(2, f"cuDNN {row['cudnn']}")
    if row.get("driver"):
        parts.insert(1, f"driver {row['driver']}")
    if row.get("commit"):
        parts[-1] += f" ({row['commit']})"
    return ", ".join(parts)


_LEGEND = """
x eager, x compile (the faster mode): times faster in the same layout, contiguous or channels_last (cl).
error: relative L2 error against float64, '!' where it exceeds twice eager's (under TF32 the larger of eager's
and of a convolution that is exact but for the rounding of its operands to TF32).
peak: memory beyond inputs and parameters. optimize: kgopt.optimize(plain model, x)."""

_MODELS_LEGEND = """
optimize: kgopt.optimize(model, example_inputs=x), which picks its layout; backend: torch.compile(backend="kgopt").
Ratios: times faster than the baseline in the faster of its two layouts. train: forward, loss and backward.
error: relative L2 error of the output (train: of all gradients) against float64, '!' where it exceeds twice eager's.
peak: memory beyond inputs and parameters."""


def _report(rows: list[Row], args: argparse.Namespace) -> int:
    """Prints the table and writes the chart. 1 when a kgopt row failed or is out of tolerance."""
    groups = group_rows(rows)
    if not groups:
        raise ValueError("there are no rows to show")
    facts = rows[0]
    print(_headline(facts))
    matmul = {r["dtype"]: r["matmul_tflops"] for r in rows if r.get("matmul_tflops")}
    rates = "; matmul " + ", ".join(f"{d} {f:.3g} TFLOP/s" for d, f in matmul.items()) if matmul else ""
    print(f"ceilings: copy {facts['copy_gbytes_per_s'] / 1e3:.2f} TB/s{rates}")
    print()
    if groups[0].suite == "sweep":
        from kgopt.cli.sweep import LIMIT, sweep_summary

        print(sweep_summary(rows))
        print(
            f"ratio: time of kgopt over the better of eager and torch.compile in the same layout; over {LIMIT}: slower."
        )
        print("On a GPU: its own time, L2 flushed, launches hidden. What looks slower is timed three times.")
    elif groups[0].suite == "convs":
        from kgopt.cli.convs import convs_summary

        print(convs_summary(rows))
        print("median, mean (geometric), best: times faster than cuDNN, autotuned, in the same memory format;")
        print("worst: time over cuDNN's. GPU time, L2 flushed, launches hidden; what looks slower is timed thrice.")
    elif groups[0].suite == "models":
        from kgopt.cli.bench_models import models_table

        print(models_table(groups))
        print(_MODELS_LEGEND)
    else:
        print(bench_table(groups))
        print(_LEGEND)
        if any("call_us" in row for row in rows):
            print("times: of the GPU alone, launches hidden; call_us in the rows: with what launching costs.")
        if groups[0].suite == "chains":
            from kgopt.cli.chains import chains_summary

            print(chains_summary(rows))
    for note in _notes(groups):
        print(f"note: {note}")
    if args.plot:
        from kgopt.cli.plot import plot_rows

        plot_rows(rows, args.plot, args.plot_dtype)
        print(f"chart: {args.plot}")
    bad = [row for row in rows if row["implementation"].startswith("kgopt")]
    bad = [row for row in bad if row.get("out_of_tolerance") or "failed" in row]
    for row in bad:
        why = row.get("failed") or f"error {row['error']:.2e}, {row['error_ratio'] or 0:.1f} times eager's"
        print(f"NOT OK: {row['case']} {row['dtype']} {row['direction']} {row['implementation']}: {why}")
    return 1 if bad else 0


def _implementations(args: argparse.Namespace) -> tuple[str, ...]:
    for name in args.impl or ():
        if name not in results.IMPLEMENTATIONS:
            raise ValueError(f"--impl has {name!r}, expected some of {', '.join(results.IMPLEMENTATIONS)}")
    return tuple(args.impl or ())


def _precisions(args: argparse.Namespace, device: torch.device) -> list[str]:
    if args.dtype is None:
        if device.type == "cpu":
            return ["fp32", "bf16", "fp16"] if args.suite == "sweep" else ["fp32"]
        more = {"pipelines": ["fp32"], "models": ["autocast"] if args.backward else [], "sweep": ["fp16"]}
        first = "fp32" if args.suite == "sweep" else "tf32"
        return [first, "bf16", *more.get(args.suite, [])]
    known = ("tf32", "fp32", "bf16", "fp16")
    for name in args.dtype:
        if name == "autocast" and args.suite == "models":
            if not args.backward:
                raise ValueError("--dtype has autocast, which is measured in training steps: add --backward")
        elif name not in known:
            raise ValueError(f"--dtype has {name!r}, expected {', '.join(known[:-1])} or {known[-1]}")
    if device.type == "cpu" and "tf32" in args.dtype:
        raise ValueError("--dtype has tf32, which the CPU does not have; use fp32")
    return list(args.dtype)


def _count(args: argparse.Namespace, usual: int) -> int:
    if args.count is not None and args.count < 1:
        raise ValueError(f"--count is {args.count}, expected at least 1")
    return args.count or usual


def _shard(steps: list[_Step], args: argparse.Namespace) -> list[_Step]:
    """The part of a suite's steps that --shard I/N names: every N-th from the I-th."""
    if args.shard is None:
        return steps
    match = re.fullmatch(r"(\d+)/(\d+)", args.shard)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError(f"--shard is {args.shard!r}, expected I/N with 0 <= I < N, for example 0/4")
    mine = steps[int(match[1]) :: int(match[2])]
    if not mine:
        raise ValueError(f"--shard is {args.shard!r}, which leaves nothing of {len(steps)} measurements")
    return mine


def _prepare_device(args: argparse.Namespace) -> torch.device:
    device = pick_device(args.device)
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise MissingPackageError("triton is missing, whose do_bench is the clock on a GPU; pip install triton")
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    return device


def _settings(args: argparse.Namespace, device: torch.device) -> Settings:
    return Settings(
        device,
        quick=args.quick,
        compile=not (args.no_compile or args.quick),
        max_autotune=args.max_autotune != "none" and device.type == "cuda",
        rep_ms=20.0 if args.quick else 100.0,
        input_sets=1 if args.quick else 3,
        deadline=None if args.budget is None else time.monotonic() + args.budget,
        stop_at=args.stop_at,
        only=_implementations(args),
    )


def run_bench(args: argparse.Namespace) -> int:
    """Runs ``python -m kgopt bench`` with parsed arguments. Returns the exit status."""
    if args.plot:
        require("matplotlib", "demo")
    if args.from_json:
        joined = results.join_shards([results.load_rows(path) for path in args.from_json])
        if args.json:
            results.save_rows(args.json, joined)
        return _report(joined, args)
    args.stop_at = None if args.stop is None else time.monotonic() + args.stop
    device = _prepare_device(args)
    for name in ("json", "plot"):
        folder = os.path.dirname(getattr(args, name) or "")
        if folder:
            os.makedirs(folder, exist_ok=True)
    settings, precisions = _settings(args, device), _precisions(args, device)
    if args.resume and not args.json:
        raise ValueError("--resume continues the file of --json, which is missing")
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs is {args.jobs}, expected at least 1")
    if args.jobs and args.shard:
        raise ValueError(
            f"--jobs is {args.jobs} and --shard {args.shard}, expected one of them: --jobs makes its own shards"
        )
    suite = _suite(args, settings, precisions)
    gpus = 1 if args.device or device.type == "cpu" else torch.cuda.device_count()
    if args.jobs and suite.compile is None and args.jobs > gpus:
        raise ValueError(
            f"--jobs is {args.jobs}, but suite {args.suite} compiles nothing ahead of its measurements: "
            f"more processes than GPUs ({gpus}) gain nothing"
        )
    earlier = results.load_rows(args.json) if args.resume and os.path.exists(args.json) else []
    earlier = [row for row in earlier if not row.get("partial")]
    args.done = {_step_of(row) for row in earlier}
    facts, ceilings = _before(args, device, suite.rates)
    if args.jobs:
        from kgopt.cli.jobs import run_jobs

        return _report(run_jobs(args, len(suite.steps), ceilings, facts, earlier), args)
    return _report(_measure(suite, args, ceilings, facts, None, earlier), args)


def measure_suite(args: argparse.Namespace, ceilings: Ceilings, facts: Row, turn: Turn) -> None:
    """One of --jobs' processes: compiles its --shard, waits for its turn, measures, writes --json."""
    device = _prepare_device(args)
    suite = _suite(args, _settings(args, device), _precisions(args, device))
    _measure(suite, args, ceilings, facts, turn, [])


def _step_of(row: Row) -> tuple[str, str, str]:
    """By what a step is known in the rows that it gave."""
    return row["case"], row["dtype"], "both" if row["suite"] == "sweep" else row["direction"]


def _measure(
    suite: _Suite, args: argparse.Namespace, ceilings: Ceilings, facts: Row, turn: Turn | None, earlier: list[Row]
) -> list[Row]:
    """`earlier` rows and those of the steps that they lack, until --stop."""
    steps = [step for step in suite.steps if suite.name(step) not in args.done]
    ready: list[Any] = [None] * len(steps)
    if turn:
        if suite.compile:
            ready = [suite.compile(step) for step in steps]
        if facts["device"] == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        turn.wait()
    rows, saved = list(earlier), len(earlier)

    def keep(partial: list[Row]) -> None:
        if args.json:
            results.save_rows(args.json, rows + partial)

    try:
        for index, step in progress(list(enumerate(steps)), len(steps), f"bench {args.suite}"):
            if args.stop_at is not None and time.monotonic() > args.stop_at:
                print(f"stopped: {len(steps) - index} of {len(steps)} steps are left", file=sys.stderr, flush=True)
                break
            rows += suite.measure(step, ready[index], ceilings, facts, keep)
            if args.json and index % suite.save_every == suite.save_every - 1:
                results.save_rows(args.json, rows)
                saved = len(rows)
            if facts["device"] == "cuda" and suite.empty_cache:
                torch.cuda.empty_cache()
    finally:  # an interrupted run leaves what it has
        if args.json and len(rows) > saved:
            results.save_rows(args.json, rows)
    return rows


_Keep = Callable[[list[Row]], None]


@dataclasses.dataclass(frozen=True)
class _Suite:
    """What a suite measures, step by step."""

    steps: list[Any]
    name: Callable[[Any], tuple[str, str, str]]  # of a step, as _step_of has it
    # From a step, what `compile` made of it or None, the ceilings and facts, and what saves the rows of a step that is
    # not done yet.
    measure: Callable[[Any, Any, Ceilings, Row, _Keep], list[Row]]
    compile: Callable[[Any], Any] | None = None  # None: nothing can be compiled ahead
    rates: Sequence[str] = ()  # dtypes whose matmul rate is a ceiling
    save_every: int = 1
    empty_cache: bool = False  # after every step


def _suite(args: argparse.Namespace, settings: Settings, precisions: list[str]) -> _Suite:
    own = {"models": _models_suite, "sweep": _sweep_suite, "convs": _convs_suite}.get(args.suite)
    if own:
        return own(args, settings, precisions)
    if args.suite == "chains":
        from kgopt.cli.chains import chain_cases

        found = chain_cases(_count(args, 100), args.seed)
    else:
        found = suite_cases(args.suite)
    cases = _some([case for case in found if not args.case or args.case in case.name], args)
    if args.quick and args.suite in ("scaling", "chains"):
        cases = [case for case in cases if math.prod(case.shape) <= 2**18]
        if not cases:
            raise ValueError(
                f"--quick measures tensors of up to {2**18} elements, of which --count {args.count} has none"
            )
    elif args.quick:
        cases = [case.scaled(16) for case in cases]
    directions = ["forward", *(["backward"] if args.backward else [])]
    # The dtype changes slowest: a run that is cut short has the first dtype whole.
    steps = [
        (case, precision, case.backward if direction == "backward" else direction)
        for precision in precisions
        for direction in directions
        for case in cases
        if direction == "forward" or case.backward
    ]

    def tuned(precision: str) -> Settings:
        tune = settings.max_autotune and (args.max_autotune == "all" or precision == precisions[0])
        return dataclasses.replace(settings, max_autotune=tune)

    def measure(step: tuple[Case, str, str], ready: Any, ceilings: Ceilings, facts: Row, keep: _Keep) -> list[Row]:
        return measure_case(*step, tuned(step[1]), ceilings, facts, ready)

    def compile_step(step: tuple[Case, str, str]) -> dict[str, Compiled]:
        return compile_case(*step, tuned(step[1]))

    # Where candidates are timed while they are compiled, processes would disturb each other.
    alone = settings.max_autotune and any(case.max_autotune for case in cases)
    return _Suite(
        _shard(steps, args), lambda step: (step[0].name, *step[1:]), measure, None if alone else compile_step,
        precisions, empty_cache=True,
    )  # fmt: skip


def _some(found: list[_Step], args: argparse.Namespace) -> list[_Step]:
    if not found:
        raise ValueError(f"--case is {args.case!r}, which no case of suite {args.suite} contains")
    return found


def _before(args: argparse.Namespace, device: torch.device, precisions: Sequence[str]) -> tuple[Row, Ceilings]:
    """What every row carries, and the ceilings of this run."""
    facts = environment(device, args.commit)
    print(f"measuring copy and matmul rates of {facts['gpu'] or facts['cpu']}", file=sys.stderr, flush=True)
    wanted = ["bf16" if precision == "autocast" else precision for precision in precisions]
    return facts, measure_ceilings(device, wanted, args.quick)


def _models_suite(args: argparse.Namespace, settings: Settings, precisions: list[str]) -> _Suite:
    from kgopt.cli import bench_models

    cases = _some(bench_models.model_cases(args.case, args.quick), args)
    steps = bench_models.model_steps(cases, precisions, args.backward)
    if not steps:
        raise ValueError(f"--dtype {','.join(precisions)} measures nothing: no model here has a training step in it")
    oracles = bench_models.Oracles()

    def measure(step: Any, ready: None, ceilings: Ceilings, facts: Row, keep: _Keep) -> list[Row]:
        case, precision, direction = step
        return bench_models.measure_model(
            case, precision, direction, settings, ceilings, facts, oracles, note=progress_note, keep=keep
        )

    return _Suite(_shard(steps, args), lambda step: (step[0].name, *step[1:]), measure, rates=precisions)


def _sweep_suite(args: argparse.Namespace, settings: Settings, precisions: list[str]) -> _Suite:
    from kgopt.cli import sweep

    small = args.quick or settings.device.type == "cpu"
    max_bytes = args.max_bytes or (2.0**20 if small else 2.0**30)
    shapes = sweep.random_shapes(_count(args, 200), args.seed, precisions, max_bytes)
    shapes = _some([shape for shape in shapes if not args.case or args.case in shape.name], args)
    settings = dataclasses.replace(settings, rep_ms=min(settings.rep_ms, 20.0))

    def measure(shape: sweep.Shape, ready: Any, ceilings: Ceilings, facts: Row, keep: _Keep) -> list[Row]:
        progress_note(shape.name)
        return sweep.measure_shape(shape, settings, ceilings, facts, ready)

    def compile_step(shape: sweep.Shape) -> dict[str, Compiled]:
        return sweep.compile_shape(shape, settings)

    # Without convolutions the matmul rate plays no part.
    return _Suite(_shard(shapes, args), lambda shape: (shape.name, shape.precision, "both"), measure, compile_step)


def _convs_suite(args: argparse.Namespace, settings: Settings, precisions: list[str]) -> _Suite:
    from kgopt.cli import convs

    small = args.quick or settings.device.type == "cpu"
    found = convs.random_convs(_count(args, 200), args.seed, 3e7 if small else 3e10)
    found = _some([conv for conv in found if not args.case or args.case in conv.name], args)
    # The dtype changes slowest: a run that is cut short has the first dtype whole.
    steps = _shard([(conv, precision) for precision in precisions for conv in found], args)
    settings = dataclasses.replace(settings, rep_ms=min(settings.rep_ms, 2.0))
    torch.backends.cudnn.benchmark_limit = 5  # its search takes most of the time; the best come first

    def measure(step: Any, ready: None, ceilings: Ceilings, facts: Row, keep: _Keep) -> list[Row]:
        conv, precision = step
        progress_note(conv.name)
        return convs.measure_conv(conv, precision, settings, ceilings, facts)

    return _Suite(steps, lambda step: (step[0].name, step[1], "forward"), measure, rates=precisions, save_every=10)
