"""The ways to run a network that are compared, and what makes a model run in one of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import kgopt
from kgopt._layout import FORMATS, memory_format
from kgopt.cli.results import Row

__all__ = [
    "DEFAULT_WAYS",
    "WAYS",
    "calls_optimize",
    "ends_steps",
    "in_format",
    "is_channels_last",
    "prepare",
    "ways_of",
]

# As --ways names them -> the rows' implementation; in the order of measuring.
WAYS = {
    "eager": "eager",
    "channels_last": "eager_channels_last",
    "optimize": "kgopt",
    "graph": "kgopt_graph",
    "compile": "compile",
    "backend": "kgopt_backend",
    "optimize_compile": "kgopt_compile",
    "reduce_overhead": "compile_reduce_overhead",
    "backend_reduce_overhead": "kgopt_backend_reduce_overhead",
    "max_autotune": "compile_max_autotune",
}
DEFAULT_WAYS = tuple(WAYS)
_MODES = {
    "compile_reduce_overhead": "reduce-overhead",
    "kgopt_backend_reduce_overhead": "reduce-overhead",
    "compile_max_autotune": "max-autotune",
}
# Those that are given the memory format in which eager is faster. kgopt.optimize picks its own.
_FOLLOW_EAGER = ("compile", "kgopt_backend", *_MODES)


def ways_of(names: list[str] | None, training: bool, device: str) -> list[str]:
    """Implementations of ``--ways``, without those that a case does not have.

    Raises:
        ValueError: a name that is no way.
    """
    known = {**WAYS, **{name: name for name in WAYS.values()}}
    for name in names or ():
        if name not in known:
            raise ValueError(f"--ways has {name!r}, expected some of {', '.join(WAYS)}")
    wanted = {known[name] for name in names or DEFAULT_WAYS}
    # A graph stands for calls without gradients.
    missing = {"kgopt_graph"} if training or device == "cpu" else set()
    if device == "cpu":
        missing |= {name for name, mode in _MODES.items() if mode == "reduce-overhead"}
    return [name for name in WAYS.values() if name in wanted - missing]


def in_format(model: nn.Module, arguments: Any, channels_last: bool) -> tuple[nn.Module, Any]:
    """Both in channels_last, if that is wanted and they have 4 or 5 dimensions."""
    values = list(arguments.values()) if isinstance(arguments, dict) else list(arguments)
    dims = values[0].dim()
    if not channels_last or dims not in (4, 5):
        return model, arguments
    form = memory_format(dims, True)

    def moved(value: Any) -> Any:
        is_image = isinstance(value, torch.Tensor) and value.dim() == dims
        return value.contiguous(memory_format=form) if is_image else value

    # Module.to asks for one format of all of them: a video network has weights of 4 and of 5 dimensions.
    for held in (*model.parameters(), *model.buffers()):
        if held.dim() in FORMATS:
            held.data = held.data.contiguous(memory_format=FORMATS[held.dim()])
    if isinstance(arguments, dict):
        return model, {name: moved(value) for name, value in arguments.items()}
    return model, tuple(moved(value) for value in arguments)


def is_channels_last(name: str, eager_prefers_it: bool) -> bool:
    """Is an implementation given channels_last tensors?"""
    return name == "eager_channels_last" or (name in _FOLLOW_EAGER and eager_prefers_it)


def ends_steps(name: str) -> bool:
    """Is a call told when a new step begins, as the compiler's CUDA graphs ask for?"""
    return name in _MODES


def calls_optimize(name: str) -> bool:
    """Does :func:`prepare` measure?"""
    return name in ("kgopt", "kgopt_graph", "kgopt_compile")


def prepare(
    name: str, model: nn.Module, arguments: Any, row: Row, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """The model as an implementation runs it; facts of ``optimize`` go to the row. ``options``: of kgopt's backend,
    where it has no mode.
    """
    if calls_optimize(name):
        start = time.monotonic()
        kgopt.optimize(model, arguments, cuda_graph="auto" if name == "kgopt_graph" else False)
        row["optimize_s"] = round(time.monotonic() - start, 2)
        _note_report(row, kgopt.report(model))
    if name.startswith("kgopt_backend"):
        mode = _MODES.get(name)
        more: dict[str, Any] = {"mode": mode} if mode or not options else {"options": dict(options)}
        return torch.compile(model, dynamic=False, backend="kgopt", **more)  # type: ignore[return-value]
    if name.startswith("compile") or name == "kgopt_compile":
        return torch.compile(model, dynamic=False, mode=_MODES.get(name))  # type: ignore[return-value]
    return model


def _note_report(row: Row, report: Any) -> None:
    row["sites"], row["sites_kgopt"] = len(report.sites), sum(bool(site.became) for site in report.sites)
    row["sites_fused"], row["layout_chosen"], row["clock"] = len(report.fused), report.layout, report.clock
    if report.slower:
        row["left_as_it_came"] = True
    if report.graph:
        row["graph"] = report.graph
    if report.glue:
        row["glue"] = report.glue
