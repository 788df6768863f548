"""The process that measures: rows come back one by one, and it may die or be killed at any of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kgopt.cli.environment import environment
from kgopt.cli.networks.case import Measurement, Settings, Task
from kgopt.cli.networks.turns import Turns
from kgopt.cli.networks.zoo import find_network
from kgopt.cli.results import Row
from kgopt.cli.runner import describe

__all__ = ["DiedError", "Worker"]

_STARTING = threading.Lock()
START_S = 120.0  # for importing torch, kgopt and a driver's start


class DiedError(Exception):
    """The worker is gone; the text says how."""


class Worker:
    """A process for rows of one run."""

    def __init__(self, settings: Settings, commit: str | None = None, seconds: float = START_S) -> None:
        self.measured = 0
        self._log = tempfile.NamedTemporaryFile(prefix="kgopt_zoo_", suffix=".log")  # noqa: SIM115
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._turns = Turns(settings.turns, is_worker=False)
        arguments = (theirs, self._log.name, settings, commit)
        self._process = spawn.Process(target=_work, args=arguments, daemon=True)
        own = {"KGOPT_VERDICTS": "0"}  # each case measures anew, and nobody's files are forgotten
        if settings.compilers:
            own["TORCHINDUCTOR_COMPILE_THREADS"] = str(settings.compilers)
        with _STARTING, _environment(**own):
            self._process.start()
        theirs.close()
        try:
            self.facts: Row = self._receive(min(seconds, START_S))
        except DiedError:
            self.stop()
            raise

    def measure(self, task: Task, seconds: float) -> Row:
        """The row of a task.

        Raises:
            DiedError: it took longer, or the process died. This worker is of no use any more.
        """
        self.measured += 1
        try:
            self._connection.send(task)
        except OSError:
            raise DiedError("the process died") from None
        row: Row = self._receive(seconds)
        return row

    def stop(self) -> None:
        """Ends the process, whatever it does, and the compilers that it started."""
        if self._connection.closed:
            return
        if self._process.pid:
            with contextlib.suppress(OSError):  # it has died, or has no group yet
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._turns.resume(self._process.pid or 0)
        self._turns.close()
        self._connection.close()
        self._log.close()

    def _receive(self, seconds: float) -> Any:
        limit = seconds
        try:
            while seconds > 0:
                if self._connection.poll(min(seconds, 0.5)):
                    return self._connection.recv()
                seconds -= 0.5 if self._turns.holder() in (0, self._process.pid) else 0  # else it stands still
        except (EOFError, OSError):
            self._process.join(10)
            code = self._process.exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
            lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
            raise DiedError(f"the process died ({how}): {lines[-1][:200] if lines else 'it said nothing'}") from None
        raise DiedError(f"over {limit:.0f} s")


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Variables of a process that is started here."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(connection: Connection, log: str, settings: Settings, commit: str | None) -> None:
    os.setpgrp()  # see stop
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what a constructor would fetch is an error instead
    device = torch.device(settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    connection.send(environment(device, commit))
    turns = Turns(settings.turns)
    current: Measurement | None = None
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        if current is None or current.entry.name != task.network:
            if current is not None:
                current.close()
            current = Measurement(find_network(task.network), settings, turns)
        try:
            connection.send(current.measure(task))
        except Exception as error:
            print(describe(error), file=sys.stderr, flush=True)
            raise
