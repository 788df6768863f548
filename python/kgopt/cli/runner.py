"""One implementation of a case, made and run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from kgopt import torch_private
from kgopt.cli.cases import Case

__all__ = ["Compiled", "Runner", "Settings", "builders", "describe", "inputs_of", "quiet_compiler"]


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


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A baseline that torch.compile has compiled before it is measured, and the seconds that took."""

    model: nn.Module
    compile_s: float


def inputs_of(case: Case, settings: Settings, dtype: torch.dtype) -> list[torch.Tensor]:
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


def builders(
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
