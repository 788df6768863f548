"""Runs the zoo: rows by workers, one of which is timed at a time, written as they come, until the time is over."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from kgopt.cli import results
from kgopt.cli.environment import pick_device
from kgopt.cli.networks.case import Entry, Settings, Task
from kgopt.cli.networks.profile import profile_cases
from kgopt.cli.networks.summary import print_summary
from kgopt.cli.networks.turns import Turns
from kgopt.cli.networks.ways import ways_of
from kgopt.cli.networks.worker import DiedError, Worker
from kgopt.cli.networks.zoo import networks
from kgopt.cli.results import Row
from kgopt.cli.suites import count_of, shard
from kgopt.cli.text import time_text

__all__ = ["run_zoo", "zoo_cases"]

PRECISIONS = ("bf16", "training", "fp16", "tf32")
_OF_ALL = ("amp", "fp32")  # that every network has, if they are asked for
ROWS_OF_A_WORKER = 80  # then a new one: compilers keep what they made
FIRST_S = 60.0  # more for the first row of a network: imports, weights, the reference


def zoo_cases(args: argparse.Namespace) -> list[tuple[Entry, str]]:
    """Networks and precisions, after --case, --dtype, --count, --seed and --shard.

    Raises:
        ValueError: nothing is left, or a dtype is unknown.
    """
    wanted = args.dtype or PRECISIONS
    known = (*PRECISIONS, "autocast", "autocast_fp16", *_OF_ALL)
    for name in wanted:
        if name not in known:
            raise ValueError(f"--dtype has {name!r}, expected some of {', '.join(known)}")
    texts = [part.strip().lower() for part in (args.case or "").split(",")]
    entries = networks(0 if args.count == 0 else count_of(args, 60), args.seed)
    names = {entry.name.lower() for entry in entries}

    def is_meant(name: str) -> bool:
        return any(text == name if text in names else text in name for text in texts)

    entries = [entry for entry in entries if is_meant(entry.name.lower())]
    if not entries:
        raise ValueError(f"--case is {args.case!r}, which no network of the zoo contains")
    # The dtype changes slowest: a run that is cut short has the first dtype whole.
    found: dict[tuple[str, str], tuple[Entry, str]] = {}
    for name in wanted:
        for entry in entries:
            precision = entry.trains if name == "training" else name
            has = precision == entry.trains if precision.startswith("autocast") else precision in entry.precisions
            if precision and (has or precision in _OF_ALL):
                found[entry.name, precision] = entry, precision
    if not found:
        raise ValueError(f"--dtype {','.join(wanted)} leaves nothing of {len(entries)} networks")
    return shard(list(found.values()), args)


class _Run:
    """The rows so far, of all lanes."""

    def __init__(self, args: argparse.Namespace, settings: Settings, earlier: list[Row]) -> None:
        self.args, self.settings, self.rows = args, settings, earlier
        self.end = None if args.seconds is None else time.monotonic() + args.seconds
        self._lock = threading.Lock()

    def left(self) -> float:
        """Seconds."""
        return float("inf") if self.end is None else self.end - time.monotonic()

    def keep(self, row: Row) -> None:
        """Into the file at once."""
        with self._lock:
            self.rows.append(row)
            if self.args.json:
                results.save_rows(self.args.json, self.rows)


class _Lane:
    """A worker after the other, and what it measures."""

    def __init__(self, run: _Run) -> None:
        self.run, self.args, self.left = run, run.args, run.left
        self.settings, self.facts = run.settings, Row()
        self.worker: Worker | None = None

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.stop()
        self.worker = None

    def measure(self, task: Task, is_first: bool) -> Row | None:
        """The row of a task; None where the run's time is over."""
        if self.worker is not None and self.worker.measured >= ROWS_OF_A_WORKER:
            self.stop()
        limit = self.args.way_seconds + (FIRST_S if is_first or self.worker is None else 0)
        try:
            if self.worker is None:
                self.worker = Worker(self.settings, self.args.commit, max(self.left(), 1.0))
                self.facts = self.worker.facts
            left = self.left()
            if left <= 0:
                return None
            row = self.worker.measure(task, min(limit, left))
        except DiedError as error:
            self.stop()
            if self.left() <= 0:
                return None
            row = _failed(task, str(error))
        if "failed" in row and not row["failed"].startswith("skipped"):
            self.stop()  # a GPU after an error, memory after a lack of it: the next row starts anew
        return row

    def case(self, entry: Entry, precision: str, done: set[tuple[str, str, str]]) -> None:
        """All ways of a case, but for those that are done."""
        ways = ways_of(self.args.ways, precision.startswith("autocast"), torch.device(self.settings.device).type)
        ways = [way for way in ways if (entry.name, precision, way) not in done]
        for way in ways:
            task = Task(entry.name, precision, way)
            task = Task(entry.name, precision, way, _prefers_channels_last(list(self.run.rows), task))
            row = self.measure(task, way == ways[0])
            if row is None:
                return
            self.run.keep({**row, **self.facts})
            what = row["failed"] if "failed" in row else time_text(row["time_us"])
            print(f"{entry.name} {precision} {way}: {what}", file=sys.stderr, flush=True)
            if row.get("failed", "").startswith("skipped"):
                return


def _failed(task: Task, why: str) -> Row:
    return {
        "suite": "zoo",
        "case": task.network,
        "title": task.network,
        "direction": "training" if task.training else "forward",
        "dtype": task.precision,
        "implementation": task.implementation,
        "layout": "contiguous",
        "failed": why,
    }


def _key(row: Row) -> tuple[str, str, str]:
    return row["case"], row["dtype"], row["implementation"]


def _prefers_channels_last(rows: list[Row], task: Task) -> bool:
    times = {_key(row): row.get("time_us") for row in rows}
    ours = [times.get((task.network, task.precision, name)) for name in ("eager", "eager_channels_last")]
    return ours[0] is not None and ours[1] is not None and ours[1] < ours[0]


def run_zoo(args: argparse.Namespace) -> int:
    """Runs ``bench --suite zoo`` with parsed arguments. Returns the exit status: 0 however many ways failed."""
    if args.from_json:
        rows = [row for path in args.from_json for row in results.load_rows(path)]
        if args.json:
            results.save_rows(args.json, rows)
        print_summary(rows)
        return 0
    for name in ("plot", "impl"):
        if getattr(args, name):
            raise ValueError(f"--{name} is not for suite zoo; --ways chooses")
    jobs = 1 if args.jobs is None else args.jobs
    if jobs < 1:
        raise ValueError(f"--jobs is {jobs}, expected at least 1")
    if args.resume and not args.json:
        raise ValueError("--resume continues the file of --json, which is missing")
    device = pick_device(args.device)
    cases = zoo_cases(args)
    if args.profile:
        return profile_cases(args, cases, Settings(str(device), args.quick, 0.2))
    ways_of(args.ways, False, device.type)  # a wrong name is told before the first row
    earlier = results.load_rows(args.json) if args.resume and os.path.exists(args.json) else []
    earlier = [row for row in earlier if not row.get("failed", "").startswith("skipped")]
    with contextlib.ExitStack() as stack:
        settings = Settings(str(device), args.quick, 0.2 if args.quick else 1.0)
        if jobs > 1:
            cores = max(1, (os.cpu_count() or 1) // jobs)
            settings = dataclasses.replace(settings, turns=stack.enter_context(Turns.made()), compilers=cores)
        run = _Run(args, settings, earlier)
        _run_cases(run, cases, jobs)
    if not run.rows:
        print("no row was measured in this time", file=sys.stderr)
        return 1
    print_summary(run.rows)
    return 0


def _run_cases(run: _Run, cases: list[tuple[Entry, str]], jobs: int) -> None:
    done = {_key(row) for row in run.rows}
    waiting = collections.deque(cases)
    ended: list[str] = []

    def work() -> None:
        lane = _Lane(run)
        try:
            while run.left() > 0:
                try:
                    entry, precision = waiting.popleft()
                except IndexError:
                    return
                lane.case(entry, precision, done)
                if run.left() > 0:
                    ended.append(entry.name)
        finally:
            lane.stop()

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work) for _ in range(jobs)]:
            future.result()
    if len(ended) < len(cases):
        print(f"time is over: {len(cases) - len(ended)} of {len(cases)} cases are left", file=sys.stderr)
