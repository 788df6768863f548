"""Looks a private name up, once, and says what stands in for it where it is missing."""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

_wanted = os.environ.get("KGOPT_WITHOUT_PRIVATE", "")
_WITHOUT = frozenset(name.strip() for name in _wanted.split(",")) - {"", "0"}
MODULE = "torch.nn.Module"
_missing: dict[str, str] = {}  # what stands in for a name
_NAMES: dict[str, str] = {}  # every name, with its fallback in words
_lazy: dict[str, Callable[[], Any]] = {}  # names that are looked up when something needs them


def missing(everything: bool = False) -> dict[str, str]:
    """The private names of this torch that are not what they were, and what is done instead.

    Args:
        everything: look up those of the compilers, too, which takes the time that their import does. Without it they
            are listed once something has needed them.
    """
    if everything:
        for look_up in _lazy.values():
            look_up()
    return dict(_missing)


def names() -> list[str]:
    """Every name that ``KGOPT_WITHOUT_PRIVATE`` may list."""
    return list(_NAMES)


def _look_up(path: str) -> Any:
    """``torch.a.b.c``, whose first parts are modules."""
    found: Any = torch
    done = "torch"
    for part in path.split(".")[1:]:
        done = f"{done}.{part}"
        if isinstance(found, types.ModuleType) and not hasattr(found, part):
            found = importlib.import_module(done)
        else:
            found = getattr(found, part)
    return found


def private(path: str, fallback: Any, instead: str, probe: Callable[[Any], object] | None = None) -> Any:
    """What torch has at ``path``; ``fallback``, where it is missing or ``probe(found)`` raises."""
    _NAMES[path] = instead
    try:
        if path in _WITHOUT or ("1" in _WITHOUT and path != MODULE):
            raise AttributeError("hidden by KGOPT_WITHOUT_PRIVATE")
        found = _look_up(path)
        if probe is not None:
            probe(found)
    except Exception:  # whatever a changed name raises: importing this package never fails because of one
        _missing[path] = instead
        return fallback
    return found


def privates(paths: Iterable[str], instead: str) -> list[Any] | None:
    """Names of which each is useless without the others; None where one is missing."""
    found = [private(path, None, instead) for path in paths]
    return None if None in found else found


def when_needed(paths: Sequence[str], instead: str) -> Callable[[], list[Any] | None]:
    """:func:`privates` that import something big."""
    known: list[Any] = []

    def look_up() -> list[Any] | None:
        if not known:
            known.append(privates(paths, instead))
        found: list[Any] | None = known[0]
        return found

    for path in paths:
        _NAMES[path] = instead
    _lazy[paths[0]] = look_up
    return look_up


def expect(value: Any, *kinds: type) -> None:
    """Has a probe fail unless a value is of one of these types.

    Raises:
        TypeError: it is of another.
    """
    if type(value) not in kinds:
        raise TypeError(f"a {type(value).__name__}, expected {kinds}")


ZERO = torch.zeros(())
