"""Processes that measure on one GPU: they build and compile side by side, and each is alone while it is timed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Turns"]


class Turns:
    """Locks on files of a folder, where each worker also leaves its process group.

    Who is timed stops the others, whatever they do, and lets them go on afterwards: it need not wait until they have
    compiled. A lock ends with the process that holds it; those that it had stopped are for :meth:`resume`.
    """

    def __init__(self, folder: str = "", is_worker: bool = True) -> None:
        """Without a folder there is no other process, and nothing waits or stops."""
        self._folder = Path(folder) if folder else None
        self._files: dict[str, int] = {}
        self._is_alone = not folder
        if self._folder is None:
            return
        for name in ("gpu", "memory"):
            self._files[name] = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        if is_worker:
            with self._held("gpu"):  # whoever is timed now does not know of this one
                (self._folder / f"group_{os.getpgrp()}").touch()

    @staticmethod
    def made() -> contextlib.AbstractContextManager[str]:
        """A folder for a run."""
        return tempfile.TemporaryDirectory(prefix="kgopt_zoo_")

    def close(self) -> None:
        """It is not used any more."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    @contextlib.contextmanager
    def _held(self, name: str) -> Iterator[None]:
        fcntl.flock(self._files[name], fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._files[name], fcntl.LOCK_UN)

    def _signal(self, number: signal.Signals) -> None:
        assert self._folder is not None
        for path in self._folder.glob("group_*"):
            group = int(path.name.removeprefix("group_"))
            if group != os.getpgrp():
                with contextlib.suppress(OSError):  # it has ended
                    os.killpg(group, number)

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """For what is timed. Whether others were stopped for it: what they had launched may still run on the GPU."""
        if self._is_alone:
            yield False
            return
        with self._held("gpu"):
            self._is_alone = True
            try:
                self._say(os.getpid())
                self._signal(signal.SIGSTOP)
                yield True
            finally:
                self._signal(signal.SIGCONT)
                self._say(0)
                self._is_alone = False

    def one_by_one(self) -> contextlib.AbstractContextManager[None]:
        """For what takes much of the GPU's memory."""
        return contextlib.nullcontext() if self._is_alone else self._held("memory")

    def _say(self, process: int) -> None:
        assert self._folder is not None
        (self._folder / "alone").write_text(str(process))

    def holder(self) -> int:
        """The process that is alone, or 0."""
        if self._folder is None:
            return 0
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / "alone").read_text())
        return 0

    def resume(self, ended: int) -> None:
        """After the end of a worker, of this process group: those that it had stopped go on."""
        if self._folder is None:
            return
        (self._folder / f"group_{ended}").unlink(missing_ok=True)
        with self._held("gpu"):
            self._signal(signal.SIGCONT)
            self._say(0)
