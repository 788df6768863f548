"""Worker processes as their parent sees them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

from kgopt.fuzz import stage
from kgopt.fuzz.kind import Case

__all__ = ["Job", "Result", "Settings", "Worker", "wait"]

_START_SECONDS = 120.0  # until a process says that it is ready: CUDA's context, many processes at once
_LOG_LINES = 6


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all workers of a run share."""

    device: str  # of torch.device: "cpu" or "cuda"
    gpus: tuple[int, ...] = (0,)
    seed: int = 0
    only: tuple[str, ...] = ()
    threads: int = 1
    patience: float = 1.0  # times a kind's seconds
    prepare: Callable[[], None] | None = None  # called in each worker before its first case; for tests


@dataclasses.dataclass(frozen=True)
class Job:
    """A case to check: drawn by the worker where ``case`` is None."""

    kind: str
    index: int
    seconds: float
    case: Case | None = None
    place: int = -1  # among all cases of the run's seed, of whatever kind


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a job; ``labels`` is empty where the process died before it could give them."""

    job: Job
    outcome: str
    text: str
    labels: dict[str, str]
    seconds: float


def _context(device: str) -> Any:
    """Processes forked from one that has imported torch and kgopt. A GPU bears no fork once anything asked for it."""
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kgopt.fuzz.preload"])
    return context


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with exit status {code}"


class Worker:
    """One process, and the jobs it was given. It is started again after it died or was stopped for a hang."""

    def __init__(self, number: int, settings: Settings) -> None:
        self._settings = settings
        gpus = settings.gpus
        self._device = "cpu" if settings.device == "cpu" else f"cuda:{gpus[number % len(gpus)]}"
        self._log = tempfile.NamedTemporaryFile(prefix="kgopt_fuzz_", suffix=".log")  # noqa: SIM115  (as long as self)
        self._board = _context(settings.device).RawArray("c", stage.LENGTH)
        self._jobs: collections.deque[Job] = collections.deque()
        self._process: Any = None
        self._pipe: Any = None
        self._since = 0.0
        self._ready = False

    @property
    def load(self) -> int:
        """Jobs that it was given and has not answered."""
        return len(self._jobs)

    def _start(self) -> None:
        context, s = _context(self._settings.device), self._settings
        self._pipe, theirs = context.Pipe()
        from kgopt.fuzz.worker import serve

        arguments = (theirs, self._board, self._log.name, self._device, s.seed, s.only, s.threads, s.prepare)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._ready, self._since = False, time.monotonic()
        for job in self._jobs:
            self._send(job)

    def _send(self, job: Job) -> None:
        with contextlib.suppress(BrokenPipeError, OSError):  # it died: poll sees that
            self._pipe.send((job.kind, job.index if job.case is None else job.case))

    def give(self, job: Job) -> None:
        """Queues a job."""
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._since = time.monotonic()
        if self._process is None:
            self._start()
        else:
            self._send(job)

    def _limit(self) -> float:
        return self._jobs[0].seconds * self._settings.patience if self._ready else _START_SECONDS

    def objects(self) -> list[Any]:
        """What to wait for: :func:`multiprocessing.connection.wait` takes it."""
        return [] if self._process is None else [self._pipe, self._process.sentinel]

    def poll(self) -> list[Result]:
        """Results that are there now, a death or a hang among them."""
        results: list[Result] = []
        if self._process is None:
            return results
        dead = not self._process.is_alive()  # asked first: what it wrote before it died is still in the pipe
        try:
            while self._pipe.poll():
                message = self._pipe.recv()
                self._ready, self._since = True, time.monotonic()
                if message is not None:
                    results.append(Result(self._jobs.popleft(), *message))
        except (EOFError, OSError):
            self._process.join(5)
            dead = True
        waited = time.monotonic() - self._since
        if dead:
            self._process.join()
            how = _ended(self._process.exitcode)
            if self._jobs and self._process.exitcode != 0:
                results.append(self._lost(how, waited))
            self._restart()
        elif self._jobs and waited > self._limit():
            results.append(self._lost(f"hang: no answer for {waited:.0f} s", waited))
            self.stop()
            self._restart()
        return results

    def _lost(self, how: str, waited: float) -> Result:
        where = self._board.value.decode(errors="replace")
        with open(self._log.name, errors="replace") as file:
            said = file.read().strip().splitlines()[-_LOG_LINES:]
        text = "\n".join([f"{how}; in: {where}", *said])
        return Result(self._jobs.popleft(), "finding", text, {}, waited)

    def _restart(self) -> None:
        self._pipe.close()
        self._process = None
        if self._jobs:
            self._start()

    def stop(self) -> None:
        """Ends the process; jobs that it has stay queued."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join(20)

    def close(self) -> None:
        """Ends the process for good."""
        self._jobs.clear()
        self.stop()
        if self._pipe is not None:
            self._pipe.close()
        self._process = None
        with contextlib.suppress(OSError):
            self._log.close()

    def answer(self, job: Job) -> Result:
        """Gives one job and waits for its result. The worker must have no others."""
        self.give(job)
        while True:
            wait([self], 0.2)
            for result in self.poll():
                return result


def wait(workers: list[Worker], seconds: float) -> None:
    """Sleeps until one of them has something to say, at most so long."""
    objects = [o for worker in workers for o in worker.objects()]
    if objects:
        multiprocessing.connection.wait(objects, seconds)
    else:
        time.sleep(min(seconds, 0.01))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
