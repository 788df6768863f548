"""One network in one precision, inference or training step: reference, and a row of measurements for each way."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

import kgopt
from kgopt import torch_private
from kgopt.cli._optional import MissingPackageError
from kgopt.cli.measure import (
    DTYPES,
    ErrorMeter,
    Timing,
    gpu_time,
    note_time,
    peak_memory,
    precision_flags,
)
from kgopt.cli.networks.network import Arguments
from kgopt.cli.networks.turns import Turns
from kgopt.cli.networks.ways import calls_optimize, ends_steps, in_format, is_channels_last, prepare
from kgopt.cli.results import Row
from kgopt.cli.runner import describe
from kgopt.rewrite.measure import clocks

__all__ = ["Entry", "Measurement", "Settings", "Task"]


class Entry(Protocol):
    """What a network of the zoo has, one of a library or a drawn one."""

    @property
    def name(self) -> str:
        """Of rows."""

    @property
    def package(self) -> str:
        """What pip installs."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Of inference."""

    @property
    def trains(self) -> str:
        """The kind of autocast, or ""."""

    @property
    def before_training(self) -> Callable[[Any], None] | None:
        """What trainers set."""

    def shape(self, small: bool = False) -> list[int]:
        """Of the first argument."""

    def built(self, device: torch.device, small: bool = False) -> contextlib.AbstractContextManager[nn.Module]:
        """The network in float32."""

    def arguments(self, device: torch.device, dtype: torch.dtype, small: bool = False) -> Arguments:
        """What it is called with."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How all cases of a run are measured."""

    device: str
    small: bool = False
    seconds: float = 1.0  # of calls that are timed
    turns: str = ""  # a folder, where workers share a device
    compilers: int = 0  # processes of Inductor; 0: its default


@dataclasses.dataclass(frozen=True)
class Task:
    """One row to be measured."""

    network: str
    precision: str  # as rows have it: bf16, fp16, tf32, fp32, amp, autocast, autocast_fp16
    implementation: str
    eager_prefers_channels_last: bool = False

    @property
    def training(self) -> bool:
        """A training step, or inference?"""
        return self.precision.startswith("autocast")

    @property
    def autocast(self) -> torch.dtype | None:
        """What float32 parameters are cast to."""
        return {"amp": torch.float16, "autocast": torch.bfloat16, "autocast_fp16": torch.float16}.get(self.precision)


class _Call:
    """A model with its arguments: a call of inference, or a training step with an optimizer.

    A step begins its backward with a gradient of the outputs that is given: a loss over all of what a drawn network
    returns would be up to two fifths of its step, the same for all ways.
    """

    def __init__(self, task: Task, model: nn.Module, arguments: Arguments, device: torch.device) -> None:
        self.model, self.arguments, self.device, self.task = model, arguments, device, task
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.scaler: Any = None
        self.given: list[torch.Tensor] = []  # the gradient of the outputs, times the scaler's factor
        if not task.training:
            return
        # Momentum as in nnU-Net; a rate that leaves the weights as they are, about.
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-6, momentum=0.99, nesterov=True)
        is_scaled = task.precision == "autocast_fp16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=is_scaled, growth_interval=2**30)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """What a user calls the model under."""
        with contextlib.ExitStack() as stack:
            if not self.task.training:
                stack.enter_context(torch.no_grad())
            if self.task.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, self.task.autocast))
            yield

    def forward(self, run: nn.Module) -> list[torch.Tensor]:
        """The floating-point tensors that it returns."""
        if ends_steps(self.task.implementation):
            torch.compiler.cudagraph_mark_step_begin()
        y = run(**self.arguments) if isinstance(self.arguments, dict) else run(*self.arguments)
        return [t for t in torch_private.tree_leaves(y) if isinstance(t, torch.Tensor) and t.is_floating_point()]

    def gradients(self, run: nn.Module) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.context():
            outputs = [y for y in self.forward(run) if y.requires_grad]
        if not self.given:
            # That of the mean of outputs times normal numbers.
            generator = torch.Generator().manual_seed(2)
            for y in outputs:
                gradient = torch.randn(y.shape, generator=generator).to(self.device)
                self.given.append(torch.empty_like(y).copy_(self.scaler.scale(gradient / y.numel())))
        torch.autograd.backward(outputs, self.given)

    def run(self, run: nn.Module) -> Any:
        """What is timed."""
        if not self.task.training:
            with self.context():
                return self.forward(run)
        self.gradients(run)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return None

    def result(self, run: nn.Module) -> list[torch.Tensor]:
        """Outputs, or gradients of all parameters, in float32."""
        if not self.task.training:
            with self.context():
                return [y.float().clone() for y in self.forward(run)]
        self.given = []  # at another scale, perhaps
        self.gradients(run)
        scale = 1 / self.scaler.get_scale()
        return [torch.zeros_like(p) if p.grad is None else p.grad.float() * scale for p in self.parameters]


class Measurement:
    """A network that is ready in memory, and the reference of one case after the other."""

    def __init__(self, entry: Entry, settings: Settings, turns: Turns | None = None) -> None:
        self.entry, self.settings, self.turns = entry, settings, turns or Turns()
        self.device = torch.device(settings.device)
        self._stack = contextlib.ExitStack()
        self._master: nn.Module | None = None
        self._references: dict[bool, tuple[list[torch.Tensor] | None, str]] = {}
        self._case: tuple[str, ...] = ()

    def close(self) -> None:
        """Gives the memory back."""
        self._master = None
        self._references = {}
        self._stack.close()

    def measure(self, task: Task) -> Row:
        """One row. What goes wrong is its ``failed``."""
        row: Row = {
            "suite": "zoo",
            "case": self.entry.name,
            "title": self.entry.name,
            "direction": "training" if task.training else "forward",
            "dtype": task.precision,
            "implementation": task.implementation,
        }
        last = is_channels_last(task.implementation, task.eager_prefers_channels_last)
        row["layout"] = "channels_last" if last else "contiguous"
        try:
            if self._case != (task.precision,):
                kgopt.forget()  # what one case measured is not for another one's seconds
                self._case = (task.precision,)
            if self._master is None:
                self._master = self._stack.enter_context(self.entry.built(self.device, self.settings.small))
            row["shape"] = self.entry.shape(self.settings.small)
            row["parameters"] = sum(p.numel() for p in self._master.parameters())
            flags = precision_flags(task.precision if task.precision in DTYPES else "tf32")
            with _quiet(), flags:
                self._fill(task, row, last)
        except MissingPackageError as error:
            row["failed"] = f"skipped: {error}"
        except Exception as error:
            row["failed"] = describe(error)
        finally:
            _empty(self.device)
        return row

    @contextlib.contextmanager
    def ready(self, task: Task, options: Mapping[str, Any] | None = None) -> Iterator[Callable[[], Any]]:
        """What is timed in a row: a call, compiled and warm. ``options``: of kgopt's backend."""
        if self._master is None:
            self._master = self._stack.enter_context(self.entry.built(self.device, self.settings.small))
        last = is_channels_last(task.implementation, task.eager_prefers_channels_last)
        try:
            with _quiet(), precision_flags(task.precision if task.precision in DTYPES else "tf32"):
                call = self._call(task, last)
                with call.context():
                    run = prepare(task.implementation, call.model, call.arguments, {}, options)
                for _ in range(3):
                    call.run(run)
                _synchronize(self.device)
                yield lambda: call.run(run)
        finally:
            call = run = None  # type: ignore[assignment]
            _empty(self.device)

    def _call(self, task: Task, channels_last: bool) -> _Call:
        assert self._master is not None
        dtype = DTYPES.get(task.precision, torch.float32)
        model = copy.deepcopy(self._master).to(dtype)
        arguments = self.entry.arguments(self.device, dtype, self.settings.small)
        model, arguments = in_format(model, arguments, channels_last)
        if task.training:
            model.train()
            if self.entry.before_training is not None:
                self.entry.before_training(model)
        return _Call(task, model, arguments, self.device)

    def _fill(self, task: Task, row: Row, channels_last: bool) -> None:
        expected, unknown = self._reference(task)
        call = self._call(task, channels_last)
        _empty(self.device)
        before = _reserved(self.device)
        # What measures by itself does so alone; in the midst of compiling it takes its turns.
        with self._alone() if calls_optimize(task.implementation) else contextlib.nullcontext(), call.context():
            run = prepare(task.implementation, call.model, call.arguments, row)
        start = time.monotonic()
        with clocks.among_others(self._alone):
            found = call.result(run)
        _synchronize(self.device)
        if "compile" in task.implementation or task.implementation.startswith("kgopt_backend"):
            row["compile_s"] = round(time.monotonic() - start, 2)
        if expected is None:
            row["error_unknown"] = unknown
        else:
            _note_error(row, found, expected)
        del found, expected
        with self._alone():
            self._time(task, row, call, run, before)

    def _time(self, task: Task, row: Row, call: _Call, run: nn.Module, before: int) -> None:
        for _ in range(2 if task.training else 0):  # until the scaler has found its factor
            call.given = []
            call.run(run)
        took, once = clock(lambda: call.run(run), self.device, self.settings.seconds)
        note_time(row, took)
        if self.device.type == "cuda" and once < 0.05 and task.precision != "autocast_fp16":
            row["gpu_us"] = round(gpu_time(lambda: call.run(run), self.device, 30.0).median_us, 2)
        if task.training:
            call.optimizer.zero_grad(set_to_none=True)
        _empty(self.device, compiled=False)
        row["held_bytes"] = _reserved(self.device) - before
        row["peak_bytes"] = peak_memory(lambda: call.run(run), self.device)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else runs, and the GPU has done what they had launched."""
        with self.turns.alone() as is_new:
            if is_new and self.device.type == "cuda":
                _wait_for_gpu(self.device)
            yield

    def _reference(self, task: Task) -> tuple[list[torch.Tensor] | None, str]:
        """What float32 without TF32 gives, on the CPU; or None and why there is none."""
        if task.training not in self._references:
            plain = Task(task.network, "autocast_fp32" if task.training else "fp32", "reference")
            try:
                with self.turns.one_by_one(), precision_flags("fp32"):
                    call, state = self._call(plain, False), _random_state(self.device)
                    found = [t.cpu() for t in call.result(call.model)]
                if not torch.equal(state, _random_state(self.device)):
                    self._references[task.training] = None, "the network draws random numbers"
                elif not all(bool(t.isfinite().all()) for t in found):
                    self._references[task.training] = None, "the reference is not finite"
                else:
                    self._references[task.training] = found, ""
            except Exception as error:
                self._references[task.training] = None, f"reference: {describe(error)}"
            call = None  # type: ignore[assignment]
            _empty(self.device)
        return self._references[task.training]


def _wait_for_gpu(device: torch.device, seconds: float = 5.0) -> None:
    """Until small calls come back at once: kernels of several processes share the GPU in slices of milliseconds."""
    x, in_a_row, end = torch.zeros(32, device=device), 0, time.perf_counter() + seconds
    while in_a_row < 10 and time.perf_counter() < end:
        start = time.perf_counter()
        x.add_(1)
        torch.cuda.synchronize(device)
        in_a_row = in_a_row + 1 if time.perf_counter() - start < 5e-4 else 0


def clock(call: Callable[[], Any], device: torch.device, seconds: float) -> tuple[Timing, float]:
    """Time of a whole call by the clock: rows of calls with the device idle before and after. And seconds of one."""
    for _ in range(3):
        start = time.perf_counter()
        call()
        _synchronize(device)
        once = time.perf_counter() - start
    calls = max(1, min(10, int(0.1 * seconds / once)))
    rows: list[float] = []
    end = time.perf_counter() + seconds
    while len(rows) < (5 if seconds else 1) or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        _synchronize(device)
        rows.append((time.perf_counter() - start) / calls)
        if len(rows) >= 3 and time.perf_counter() > end + 5:  # calls of seconds
            break
    rows.sort()
    return Timing(statistics.median(rows) * 1e6, rows[len(rows) // 5] * 1e6, rows[4 * len(rows) // 5] * 1e6), once


def _note_error(row: Row, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    meter = ErrorMeter()
    for ours, theirs in zip(found, expected, strict=True):
        meter.add(ours, theirs.to(ours.device).double())
    if math.isfinite(meter.error):
        row["error"], row["error_max"] = meter.error, meter.error_max
    else:
        row["error_unknown"] = "the result is not finite"


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _empty(device: torch.device, compiled: bool = True) -> None:
    """Gives back what the last way held."""
    if compiled:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Inductor's reports of candidates."""
    log = logging.getLogger(torch_private.INDUCTOR_LOG)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with torch_private.compiler_settings(autotune_num_choices_displayed=0):
            yield
    finally:
        log.setLevel(level)
