"""What an optimized module knows: one object a module, its attribute ``_kgopt``.

It lies in the module's ``__dict__``, past ``nn.Module.__setattr__``: it is no part of the ``state_dict``; copies and
pickles carry it along. A module without one runs its original code.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

ATTRIBUTE = "_kgopt"


@dataclass(slots=True)
class Known:
    """Which of these a module has depends on what became of it."""

    site: Any = None  # policy.SiteState: of a norm
    calls: Any = None  # policy.SiteState: of a module whose code calls norms as functions
    channel: Any = None  # channels.Meanings: of a norm over channels
    steps: Any = None  # sequential.Steps: of a Sequential
    joins: bool = False  # of a module whose code was rewritten for what stands behind its convolutions
    glue: Any = None  # glue.GlueState: of a module that calls what stands between the norms, in inference
    training: Any = None  # training.TrainingState: the same in training
    layout: Any = None  # layout.Layout: of a root that runs in channels_last inside
    graphs: Any = None  # graphs.Graphs: of a root whose calls are recorded as CUDA graphs
    recompute: Any = None  # recompute.Recompute: of a root whose norms' results the backward computes again
    keeps: bool = False  # of every module in such a model: channels_last stays what it is
    report: Any = None  # reporting.Report: of a root
    pads: bool = False  # of a module in whose code padding or joins wait for a convolution

    def __reduce__(self) -> Any:
        return Known, tuple(getattr(self, name) for name in NAMES)


NAMES = tuple(f.name for f in fields(Known))
_EMPTY = Known()


def known_of(module: Any) -> Known | None:
    """None, where nothing is known."""
    found: Known | None = module.__dict__.get(ATTRIBUTE)
    return found


def get(module: Any, name: str) -> Any:
    """One of them; None, where the module has none."""
    known = module.__dict__.get(ATTRIBUTE)
    return None if known is None else getattr(known, name)


def put(module: Any, **knows: Any) -> None:
    """Adds to what a module knows."""
    if not knows:
        return
    known = module.__dict__.setdefault(ATTRIBUTE, Known())
    for name, value in knows.items():
        setattr(known, name, value)


def drop(module: Any, *names: str) -> None:
    """Takes away from it."""
    known = known_of(module)
    if known is None:
        return
    for name in names:
        setattr(known, name, getattr(_EMPTY, name))
    if known == _EMPTY:
        clear(module)


def clear(module: Any) -> None:
    """Takes all of it away."""
    module.__dict__.pop(ATTRIBUTE, None)
