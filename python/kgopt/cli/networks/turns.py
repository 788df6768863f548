"""Processes that measure on one GPU: they build and compile side by side, and each is alone while it is timed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Turns", "Waiting"]

# A number that processes share: not 0 while its worker waits for the others, which its time limit does not count.
Waiting = Any


class Turns:
    """Locks on two files of a folder, which end with the process that holds them.

    ``together`` is held by whoever works, ``alone`` by one whose calls are timed, and it waits until nobody else works.
    ``short`` is for what is timed in the midst of compiling: nobody else's such calls run meanwhile.
    """

    def __init__(self, folder: str = "", waiting: Waiting = None) -> None:
        """Without a folder there is no other process, and nothing waits."""
        self._waiting = waiting
        self._files = {
            name: os.open(Path(folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            for name in ("work", "gpu")
            if folder
        }
        self._is_alone = not folder

    @staticmethod
    def folder() -> contextlib.AbstractContextManager[str]:
        """Where a run keeps its locks."""
        return tempfile.TemporaryDirectory(prefix="kgopt_zoo_")

    def _take(self, name: str, how: int) -> None:
        if name not in self._files:
            return
        if self._waiting is not None:
            self._waiting.value = 1
        fcntl.flock(self._files[name], how)
        if self._waiting is not None:
            self._waiting.value = 0

    @contextlib.contextmanager
    def _held(self, name: str, how: int) -> Iterator[None]:
        self._take(name, how)
        try:
            yield
        finally:
            self._take(name, fcntl.LOCK_UN)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """A worker's whole row, but for what is in ``alone``."""
        return self._held("work", fcntl.LOCK_SH)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside of ``together``; nothing else runs."""
        if self._is_alone:
            yield
            return
        self._take("work", fcntl.LOCK_UN)  # two that keep theirs would wait for each other
        self._take("work", fcntl.LOCK_EX)
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False
            self._take("work", fcntl.LOCK_SH)

    def short(self) -> contextlib.AbstractContextManager[None]:
        """Inside of ``together`` or ``alone``; others may compile."""
        return contextlib.nullcontext() if self._is_alone else self._held("gpu", fcntl.LOCK_EX)
