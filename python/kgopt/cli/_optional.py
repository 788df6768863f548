"""Packages that only the command line needs, and the one line a user sees when one is missing."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

__all__ = ["MissingPackageError", "progress", "progress_note", "require"]

T = TypeVar("T")


class MissingPackageError(Exception):
    """A package of an optional extra is not installed; the text says what to install."""


def require(module: str, extra: str) -> Any:
    """Imports `module`, or raises MissingPackageError that names the extra which brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"skimage": "scikit-image", "sklearn": "scikit-learn"}.get(module.split(".")[0], module.split(".")[0])
        raise MissingPackageError(f"{package} is missing ({error}); pip install 'kgopt[{extra}]'") from None


def progress(steps: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yields `steps` with a tqdm bar on stderr; without tqdm one line says that it started."""
    try:
        from tqdm import tqdm
    except ImportError:
        import sys

        print(f"{what}: {total} steps", file=sys.stderr, flush=True)
        yield from steps
        return
    bar = tqdm(steps, total=total, desc=what, leave=False, dynamic_ncols=True)
    _bars.append(bar)
    try:
        yield from bar
    finally:
        _bars.remove(bar)


_bars: list[Any] = []


def progress_note(text: str) -> None:
    """Says behind the bar what is being done now; without a bar nothing is said."""
    if _bars:
        _bars[-1].set_postfix_str(text)
