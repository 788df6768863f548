"""``bench --suite models``: whole models of published libraries, plain, compiled and through ``kgopt.optimize``."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt._layout import memory_format
from kgopt.accuracy import no_autotuning
from kgopt.cli import results
from kgopt.cli._optional import MissingPackageError
from kgopt.cli.floor import Ceilings, Work
from kgopt.cli.measure import (
    DTYPES,
    ErrorMeter,
    note_error_ratio,
    note_time,
    peak_memory,
    precision_flags,
    time_call,
)
from kgopt.cli.results import Group, Row
from kgopt.cli.runner import Settings, describe, quiet_compiler
from kgopt.cli.tables import error_and_peak, table_of_filled
from kgopt.cli.text import ratio_text, time_text
from kgopt.cli.zoo import MODEL_CASES, ModelCase

__all__ = ["MODEL_IMPLEMENTATIONS", "Oracles", "measure_model", "model_cases", "model_steps", "models_table"]

# Which rows a run makes, in this order; --impl picks among them.
MODEL_IMPLEMENTATIONS = (
    "eager",
    "eager_channels_last",
    "compile",
    "compile_channels_last",
    "kgopt",
    "kgopt_compile",
    "kgopt_backend",
)
REPETITIONS = 10  # of a whole model: enough for a median


def model_cases(text: str | None, small: bool) -> list[ModelCase]:
    """The models that a comma-separated list names, or part of a name, in any case of its letters; all for None."""
    wanted = [part.strip().lower() for part in (text or "").split(",")]
    names = [case.name.lower() for case in MODEL_CASES]

    def is_meant(name: str) -> bool:
        return any(part == name if part in names else part in name for part in wanted)

    # Of a small model float64 is quick.
    changes: dict[str, Any] = {"small": True, "float64_shape": ()} if small else {}
    return [dataclasses.replace(case, **changes) for case in MODEL_CASES if is_meant(case.name.lower())]


def model_steps(cases: list[ModelCase], precisions: list[str], training: bool) -> list[tuple[ModelCase, str, str]]:
    """(case, precision, direction) in the order measured.

    Inference runs with weights and input of the dtype; a training step in float32, plain and under autocast to bf16.
    """
    steps = [(c, p, "forward") for p in precisions if p != "autocast" for c in cases]
    if training:
        steps += [
            (c, p, "training") for p in precisions if p in ("tf32", "fp32", "autocast") for c in cases if c.trains
        ]
    return steps


class _Task:
    """A model, its input, and what is measured: run() calls it, result() gives what is compared with float64."""

    def __init__(self, model: nn.Module, x: torch.Tensor, direction: str, autocast: bool) -> None:
        self.model = model
        self.x = x
        self.training = direction == "training"
        self.autocast = autocast
        self.target: torch.Tensor | None = None
        model.train(self.training)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Where the model runs."""
        if self.autocast:
            return torch.autocast(self.x.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _step(self) -> None:
        with self.context():
            y = self.model(self.x)
            if self.target is None:
                generator = torch.Generator(device=y.device).manual_seed(2)
                drawn = torch.randn(y.shape, generator=generator, device=y.device)
                self.target = drawn.bfloat16().to(self.x.dtype)  # the same values for every precision and float64
            loss = F.mse_loss(y.to(self.x.dtype), self.target)
        loss.backward()

    def run(self) -> Any:
        """One inference, or one training step: forward, loss, backward; gradients are dropped at the end."""
        if not self.training:
            with torch.no_grad():
                return self.model(self.x)
        self._step()
        self.model.zero_grad(set_to_none=True)
        return None

    def result(self) -> list[torch.Tensor]:
        """The output, or the gradient of every parameter that has one."""
        if not self.training:
            return [self.run()]
        self._step()
        # The names of a compiled or optimized model differ, the order does not.
        out = [p.grad.detach() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return out


class Oracles:
    """Float64 results by case and direction, computed once each: every precision has the same weights and input.

    Of a case whose float64 takes minutes they are float32's, without TF32: far closer to float64 than what TF32 and
    half types give. How close is measured at a smaller input.
    """

    def __init__(self) -> None:
        self._plain: dict[str, nn.Module] = {}
        self._known: dict[tuple[str, str], list[torch.Tensor]] = {}
        self._apart: dict[tuple[str, str], float] = {}  # of float32 from float64, where it stands in

    def model(self, case: ModelCase, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """A new copy of the case's model; drawing its weights anew each time would take longer than measuring it."""
        if case.name not in self._plain:
            self._plain[case.name] = case.build()
        return copy.deepcopy(self._plain[case.name]).to(device=device, dtype=dtype)

    def get(self, case: ModelCase, direction: str, device: torch.device) -> list[torch.Tensor]:
        """Output or gradients of `case` on `device`, as float64 has them.

        Raises RuntimeError where the memory does not suffice.
        """
        key = (case.name, direction)
        if key not in self._known:
            dtype = torch.float64
            if case.float64_shape:
                dtype, x = torch.float32, case.inputs(device, shape=case.float64_shape)
                found, exact = (self._result(case, x.to(d), direction) for d in (dtype, torch.float64))
                self._apart[key] = _error(found, exact)["error"]
            self._known[key] = self._result(case, case.inputs(device).to(dtype), direction)
        return self._known[key]

    def stand_in(self, case: ModelCase, direction: str) -> str:
        """What errors are taken against instead of float64, in words; "" where it is float64."""
        apart = self._apart.get((case.name, direction))
        if apart is None:
            return ""
        shape = "x".join(map(str, case.float64_shape))
        return f"float32 without TF32, which is {apart:.1e} from float64 at {shape}"

    def _result(self, case: ModelCase, x: torch.Tensor, direction: str) -> list[torch.Tensor]:
        with no_autotuning(), precision_flags("fp32"):
            found = _Task(self.model(case, x.device, x.dtype), x, direction, False).result()
        return [t.double() for t in found]


def _error(values: list[torch.Tensor], wanted: list[torch.Tensor]) -> dict[str, float]:
    """Relative to all of `wanted` together: a model's gradients are one vector to its optimizer."""
    meter = ErrorMeter()
    for value, exact in zip(values, wanted, strict=True):
        meter.add(value, exact)
    return {"error": meter.error, "error_max": meter.error_max}


def _work(case: ModelCase, model: nn.Module, task: _Task, itemsize: int) -> Work:
    """Operations of convolutions and matrix products, counted; bytes of parameters, input and output."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        y = task.run()
    parameters = sum(p.numel() for p in model.parameters())
    # A training step writes a gradient for each parameter.
    elements = task.x.numel() + (2 * parameters if task.training else parameters + y.numel())
    return Work(float(elements * itemsize), float(counter.get_total_flops()))


def _compiles(name: str) -> bool:
    return name in (*results.COMPILED, "kgopt_compile", "kgopt_backend")


def _prepare(name: str, task: _Task, row: Row) -> None:
    """Makes of the plain model in `task` what the implementation says."""
    if row["layout"] == "channels_last":
        task.model = task.model.to(memory_format=memory_format(task.x.dim(), True))  # type: ignore[call-overload]
        task.x = task.x.contiguous(memory_format=memory_format(task.x.dim(), True))
    if name in ("kgopt", "kgopt_compile"):
        start = time.monotonic()
        with task.context():
            task.model = kgopt.optimize(task.model, example_inputs=task.x)
        report = kgopt.report(task.model)
        row["optimize_s"] = round(time.monotonic() - start, 2)
        row["sites"], row["sites_kgopt"] = len(report.sites), sum(bool(site.became) for site in report.sites)
        row["sites_fused"], row["layout_chosen"] = len(report.fused), report.layout
    if name in ("compile", "compile_channels_last", "kgopt_compile"):
        task.model = torch.compile(task.model, dynamic=False)  # type: ignore[assignment]
    elif name == "kgopt_backend":
        task.model = torch.compile(task.model, dynamic=False, backend="kgopt")  # type: ignore[assignment]


@contextlib.contextmanager
def _empty_after(device: torch.device) -> Iterator[None]:
    """What a model and its compiled code held is given back, so that the next one has the same memory."""
    try:
        yield
    finally:
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure_one(
    name: str, row: Row, task: _Task, settings: Settings, wanted: list[torch.Tensor] | None, compiles: bool
) -> None:
    """Fills in a row: the error, the time, the memory."""
    device = settings.device
    _prepare(name, task, row)
    start = time.monotonic()
    found = task.result()
    _synchronize(device)
    if compiles:
        row["compile_s"] = round(time.monotonic() - start, 2)
    if wanted is not None:
        row.update(_error(found, wanted))
    del found
    for _ in range(2):  # cuDNN has picked its algorithms, memory is laid out
        start = time.monotonic()
        task.run()
        _synchronize(device)
        once = time.monotonic() - start
    took = time_call(task.run, device, rep_ms=REPETITIONS * max(once * 1e3, 1.0))
    note_time(row, took)
    row["peak_bytes"] = peak_memory(task.run, device)


class _Measurement:
    """The rows of one model in one precision and direction."""

    def __init__(
        self, case: ModelCase, precision: str, direction: str, settings: Settings, ceilings: Ceilings, facts: Row
    ) -> None:
        self.case, self.precision, self.direction, self.settings = case, precision, direction, settings
        self.ceilings, self.facts = ceilings, facts
        self.autocast = precision == "autocast"
        self.dtype = torch.float32 if self.autocast else DTYPES[precision]
        # What convolutions compute in; under autocast to bf16 that is bf16.
        self.rate = "bf16" if self.autocast else precision
        self.rows: dict[str, Row] = {}
        self.work: Work | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The implementations that are wanted."""
        settings = self.settings
        wanted = ("eager", *(settings.only or MODEL_IMPLEMENTATIONS))
        return tuple(n for n in MODEL_IMPLEMENTATIONS if n in wanted and (settings.compile or not _compiles(n)))

    def new_row(self, name: str) -> Row:
        case = self.case
        self.rows[name] = {
            "suite": "models",
            "case": case.name,
            "title": case.title,
            "shape": list(case.shape),
            "direction": self.direction,
            "dtype": self.precision,
            "implementation": name,
            "layout": "channels_last" if name.endswith("channels_last") else "contiguous",
        }
        return self.rows[name]

    def measure(self, name: str, row: Row, oracles: Oracles, wanted: list[torch.Tensor] | None) -> None:
        """Fills in the row of one implementation."""
        device, compiles = self.settings.device, _compiles(name)
        with _empty_after(device):
            try:
                model = oracles.model(self.case, device, self.dtype)
                task = _Task(model, self.case.inputs(device).to(self.dtype), self.direction, self.autocast)
                if self.work is None:
                    self.work = _work(self.case, model, task, self.dtype.itemsize)
                _measure_one(name, row, task, self.settings, wanted, compiles)
            except Exception as error:
                row["failed"] = describe(error)
            model = task = None  # type: ignore[assignment]

    def finished(self) -> list[Row]:
        """The rows so far, with what follows from all of them."""
        _judge(self.rows, self.dtype, self.autocast)
        for row in self.rows.values():
            if self.work is not None:
                self._note_floor(row, self.work)
            row["copy_gbytes_per_s"] = round(self.ceilings.bytes_per_s * 1e-9, 1)
            row["matmul_tflops"] = round(self.ceilings.flops_per_s[self.rate] * 1e-12, 2)
            row.update(self.facts)
        return list(self.rows.values())

    def _note_floor(self, row: Row, work: Work) -> None:
        self.ceilings.note(row, work, self.rate)
        row["work_flops"] = work.flops
        took_us = row.get("time_us")
        if took_us:
            eager_us = self.rows.get("eager", {}).get("time_us")
            row["speedup_over_eager"] = round(eager_us / took_us, 4) if eager_us else None
            row["tflops"] = round(work.flops / took_us * 1e-6, 3)


def measure_model(
    case: ModelCase,
    precision: str,
    direction: str,
    settings: Settings,
    ceilings: Ceilings,
    facts: Row,
    oracles: Oracles,
    note: Callable[[str], None] = lambda text: None,
    keep: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Measures one model in one precision and direction: a row for each implementation.

    A missing library gives one row whose `failed` says what to install. `note` hears which implementation starts;
    `keep` gets the rows so far after each, marked `partial` until the last is there.
    """
    found = _Measurement(case, precision, direction, settings, ceilings, facts)
    names = found.names
    with precision_flags("tf32" if found.autocast else precision), quiet_compiler():
        wanted: list[torch.Tensor] | None = None
        unknown = stand_in = ""
        try:
            note(f"{case.name}: reference")
            with _empty_after(settings.device):
                wanted = oracles.get(case, direction, settings.device)
            if (stand_in := oracles.stand_in(case, direction)) and precision == "fp32":
                wanted, unknown = None, f"its reference would be {stand_in}"
        except MissingPackageError as error:
            found.new_row("eager")["failed"] = f"skipped: {error}"
            names = ()
        except RuntimeError as error:  # out of memory
            unknown = describe(error)
        for name in names:
            row = found.new_row(name)
            if unknown:
                row["error_unknown"] = unknown
            elif stand_in:
                row["error_reference"] = stand_in
            if _compiles(name) and settings.is_spent:
                row["failed"] = "not run: the time budget was spent"
                continue
            note(f"{case.name} {precision} {direction}: {name}")
            found.measure(name, row, oracles, wanted)
            if name != names[-1]:
                so_far = [{**row, "partial": True} for row in found.finished()]
                keep(so_far)
                if settings.is_stopped:
                    return so_far
    return found.finished()


def _judge(rows: dict[str, Row], dtype: torch.dtype, autocast: bool) -> None:
    """Adds error_ratio and out_of_tolerance, to the larger of eager's errors in its two layouts.

    PyTorch takes other algorithms, and TF32 for other convolutions, in channels_last, and kgopt may choose that layout.
    """
    bars = [rows[name]["error"] for name in ("eager", "eager_channels_last") if "error" in rows.get(name, {})]
    if not bars:
        return
    for row in rows.values():
        note_error_ratio(row, max(bars), 0.0, torch.bfloat16 if autocast else dtype)


_HEADS = {
    "eager": "eager",
    "eager_channels_last": "eager cl",
    "compile": "compile",
    "compile_channels_last": "compile cl",
    "kgopt": "optimize",
    "kgopt_compile": "opt+compile",
    "kgopt_backend": "backend",
}


def models_table(groups: list[Group]) -> str:
    """One line a model, dtype and direction: times, ratios to the better layout, error and memory beside eager's."""
    present = [name for name in MODEL_IMPLEMENTATIONS if any(name in group.rows for group in groups)]
    ratios = ["x eager", "x compile", "opt+compile x compile"]
    header = ["model", "dtype", *(_HEADS[name] for name in present), *ratios, "floor", "error", "eager's", "peak",
              "eager's"]  # fmt: skip
    lines = []
    for group in groups:
        cells = []
        for name in present:
            failed = group.rows.get(name, {}).get("failed", "")
            text = time_text(group.time(name))
            cells.append("skipped" if failed.startswith("skipped") else "failed" if failed else text)
        lines.append(
            [
                group.case + ("" if group.direction == "forward" else " train"),
                group.dtype,
                *cells,
                *(ratio_text(ratio) for ratio in model_ratios(group)),
                time_text(group.floor_us),
                *error_and_peak(group),
            ]
        )
    notes = {
        f"\nerror of {group.case}: against {row['error_reference']}"
        for group in groups
        for row in group.rows.values()
        if "error_reference" in row
    }
    return table_of_filled(header, lines) + "".join(sorted(notes))


def model_ratios(group: Group) -> tuple[float | None, float | None, float | None]:
    """optimize over eager, optimize over compile, optimize + compile over compile; baselines in their better layout."""
    eager = group.best(name for name in results.BASELINES if name.startswith("eager"))
    compiled = group.best(results.COMPILED)
    ours = group.time("kgopt")
    both = group.best(("kgopt_compile", "kgopt_backend"))

    def over(other: tuple[str, float] | None, time_us: float | None) -> float | None:
        return other[1] / time_us if other and time_us else None

    return over(eager, ours), over(compiled, ours), over(compiled, both[1] if both else None)
