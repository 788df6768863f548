"""``bench --jobs N``: processes that compile side by side, and then measure one after another.

torch.compile takes seconds of one core for every baseline, its measurement milliseconds of a GPU. N processes share a
suite as ``--shard`` shares it. All compile first; only when the last is done does one process for each GPU begin to
measure, and when it ends the next one, so that what is timed has its GPU to itself.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import Any

import torch

from kgopt.cli import results
from kgopt.cli.floor import Ceilings
from kgopt.cli.results import Row
from kgopt.cli.runner import describe

__all__ = ["Turn", "run_jobs"]


class Turn:
    """A process's place: it says when it has compiled everything, and waits until it may measure."""

    def __init__(self, compiled: Event, go: Event) -> None:
        self._compiled = compiled
        self._go = go

    def wait(self) -> None:
        """Returns when nothing else runs on this process's GPU."""
        self._compiled.set()
        self._go.wait()


# Measures one --shard: what it compiles, waits for its turn, and writes --json.
Measure = Callable[[argparse.Namespace, Ceilings, Row, Turn], None]


def _job(
    measure: Measure, args: argparse.Namespace, ceilings: Ceilings, facts: Row, compiled: Event, go: Event
) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # there are as many processes as the caller wants
    with open(args.json + ".log", "w") as log, contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
        try:
            measure(args, ceilings, facts, Turn(compiled, go))
        except Exception as error:
            print(f"\n{describe(error)}")
            sys.exit(1)


def run_jobs(
    args: argparse.Namespace, steps: int, ceilings: Ceilings, facts: Row, earlier: list[Row], measure: Measure
) -> list[Row]:
    """`earlier` rows and those of all `steps` of a suite, by args.jobs processes on all GPUs (or on --device).

    measure: what each of them calls, a function that a module has.

    Raises ChildProcessError with the last line of a process that failed; the rows of the others are in --json then.
    """
    count = min(args.jobs, steps)
    devices = [facts["device"]]
    if facts["device"] == "cuda":
        devices = [args.device] if args.device else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kgopt_bench_") as folder:
        jobs, waiting = [], collections.defaultdict(collections.deque)  # type: ignore[var-annotated]
        for index in range(count):
            own = {"jobs": None, "shard": f"{index}/{count}", "json": os.path.join(folder, f"{index}.json")}
            own["device"] = devices[index % len(devices)]
            compiled, go = spawn.Event(), spawn.Event()
            child = argparse.Namespace(**{**vars(args), **own})
            process = spawn.Process(target=_job, args=(measure, child, ceilings, facts, compiled, go), daemon=True)
            process.start()
            jobs.append((process, compiled, child.json))
            waiting[own["device"]].append((process, go))
        _note(f"{count} processes compile {steps} measurements")
        while not all(compiled.is_set() or not process.is_alive() for process, compiled, _ in jobs):
            time.sleep(0.05)
        _note("all compiled; measuring")
        current: dict[str, Any] = {}
        rows = earlier
        while any(waiting.values()) or current:
            for device, queue in waiting.items():
                running = current.get(device)
                if running is not None and running.is_alive():
                    continue
                if running is not None:
                    running.join()
                    del current[device]
                    rows = earlier + _join([path for _, _, path in jobs])
                    if args.json and rows:
                        results.save_rows(args.json, rows)
                if queue:
                    current[device], go = queue.popleft()
                    go.set()
            time.sleep(0.02)
        failed = [path for process, _, path in jobs if process.exitcode]
        if failed:
            with open(failed[0] + ".log") as log:
                said = log.read().strip() or "nothing"
            raise ChildProcessError(
                f"{len(failed)} of {count} processes failed; the first said: {said.splitlines()[-1]}"
            )
    return rows


def _join(paths: list[str]) -> list[Row]:
    return results.join_shards([results.load_rows(path) if os.path.exists(path) else [] for path in paths])


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
