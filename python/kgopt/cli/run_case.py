"""One case in one precision and direction: every implementation made, timed and compared, a row for each."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kgopt._layout import memory_format
from kgopt.accuracy import no_autotuning
from kgopt.cli import results
from kgopt.cli.cases import Case
from kgopt.cli.errors import IDEAL, eager_of, judge, result_errors
from kgopt.cli.floor import Ceilings, Work
from kgopt.cli.measure import DTYPES, gpu_time, note_time, peak_memory, precision_flags, time_call
from kgopt.cli.results import Row
from kgopt.cli.runner import Compiled, Runner, Settings, builders, describe, inputs_of, quiet_compiler

__all__ = ["compile_case", "measure_case"]


def compile_case(case: Case, precision: str, direction: str, settings: Settings) -> dict[str, Compiled]:
    """The compiled baselines of one case, for `measure_case`. One that fails is left out: it will fail there again."""
    dtype, device = DTYPES[precision], settings.device
    out = {}
    with precision_flags(precision), quiet_compiler(), no_autotuning():
        plain = case.plain().to(device=device, dtype=dtype)
        x = inputs_of(case, dataclasses.replace(settings, input_sets=1), dtype)[0]
        for name, build in builders(case, settings, direction, x).items():
            if name not in results.COMPILED or settings.is_spent:
                continue
            start = time.monotonic()
            with contextlib.suppress(Exception):
                model = build(plain)
                if name.endswith("channels_last"):
                    Runner(model, [x.contiguous(memory_format=memory_format(x.dim(), True))], direction).run_next()
                else:
                    Runner(model, [x], direction).run_next()
                out[name] = Compiled(model, round(time.monotonic() - start, 2))
    return out


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
    rows: dict[str, Row] = {}
    runners: dict[str, Runner] = {}
    if ready is None:
        torch.compiler.reset()  # not between two compiled baselines: the first would compile again for its error
    with precision_flags(precision), quiet_compiler():
        plain = case.plain().to(device=device, dtype=dtype)
        inputs = inputs_of(case, settings, dtype)
        for name, build in builders(case, settings, direction, inputs[0]).items():
            row = rows[name] = _new_row(case, precision, direction, name)
            before = (ready or {}).get(name)
            if name in results.COMPILED and before is None and settings.is_spent:
                row["failed"] = "not run: the time budget was spent"
                continue
            try:
                runners[name] = _measure_one(case, row, build, before, plain, inputs, settings)
            except Exception as error:
                row["failed"] = describe(error)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        ideal = precision == "tf32" and work.flops > 0
        errors = _note_errors(rows, case, plain, runners, inputs, direction, ideal)
    ideal_error = errors.get(IDEAL, {}).get("error", 0.0)
    if ideal_error:
        for row in rows.values():
            row["error_ideal_tf32"] = ideal_error
    judge(rows, dtype, case.kink if direction == "backward" else 0.0)
    _note_ceilings(rows, work, precision, ceilings)
    for row in rows.values():
        row.update(facts)
    return list(rows.values())


def _new_row(case: Case, precision: str, direction: str, name: str) -> Row:
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
    return row


def _measure_one(
    case: Case,
    row: Row,
    build: Callable[[nn.Module], nn.Module],
    before: Compiled | None,
    plain: nn.Module,
    inputs: list[torch.Tensor],
    settings: Settings,
) -> Runner:
    """Makes one implementation of the plain model and times it; ``before``: what was compiled already."""
    device, compiles = settings.device, row["implementation"] in results.COMPILED
    x_format = memory_format(inputs[0].dim(), row["layout"] == "channels_last")
    if before is None:
        model = case.plain().to(device=device, dtype=inputs[0].dtype)
        model.load_state_dict(plain.state_dict())
        model = build(model)
    else:
        model = before.model
    if row["layout"] == "channels_last" and not compiles:
        model = model.to(memory_format=x_format)  # type: ignore[call-overload]
    own_inputs = [x.contiguous(memory_format=x_format) for x in inputs]
    start = time.monotonic()
    runner = Runner(model, own_inputs, row["direction"])
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
    if row["implementation"] == "kgopt_optimize":
        row["layout_chosen"] = _layout_chosen(model)
    return runner


def _layout_chosen(model: nn.Module) -> str:
    import kgopt

    return kgopt.report(model).layout  # type: ignore[no-any-return]


def _note_errors(rows: dict[str, Row], case: Case, plain: nn.Module, runners: dict[str, Runner], *rest: Any) -> Any:
    """Those of every implementation, also returned; where memory is too small for them, the rows say so."""
    try:
        errors = result_errors(case, plain, runners, *rest)
    except torch.cuda.OutOfMemoryError as error:
        for name in runners:
            rows[name]["error_unknown"] = describe(error)
        return {}
    for name, row in rows.items():
        row.update(errors.get(name, {}))
    return errors


def _note_ceilings(rows: dict[str, Row], work: Work, precision: str, ceilings: Ceilings) -> None:
    special = ceilings.special_us(work)
    for row in rows.values():
        took_us = row.get("time_us")
        ceilings.note(row, work, precision)
        if took_us:
            eager_us = rows.get(eager_of(row), {}).get("time_us")
            row["speedup_over_eager"] = round(eager_us / took_us, 4) if eager_us else None
            row["tflops"] = round(work.flops / took_us * 1e-6, 3) if work.flops else None
            row["gbytes_per_s"] = round(work.bytes / took_us * 1e-3, 2)
        row["work_flops"] = work.flops
        row["special_us"] = round(special, 2) if special else None
        row["copy_gbytes_per_s"] = round(ceilings.bytes_per_s * 1e-9, 1)
        row["matmul_tflops"] = round(ceilings.flops_per_s[precision] * 1e-12, 2)
