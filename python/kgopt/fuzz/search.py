"""The search: cases to workers, counts, findings, and the smallest form of each finding."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kgopt.fuzz.kind import Case, Kind
from kgopt.fuzz.kinds import make_kind
from kgopt.fuzz.pool import Job, Result, Settings, Worker, wait

__all__ = ["Finding", "Report", "search", "shrink"]

_AHEAD = 16  # jobs that a worker has in its pipe: its parent then never keeps it waiting
_MOST_SHRUNK = 24  # different findings; the others are told with the case as it was drawn
_SHRINK_SECONDS = 90.0
_SHRINK_TRIES = 400
_SHRINK_WAIT = 25.0  # a candidate that hangs costs this much


@dataclasses.dataclass
class Finding:
    """A case that failed: as it was drawn, and in its smallest form."""

    index: int
    case: Case
    text: str
    smallest: Case
    smallest_text: str
    source: str
    alike: int = 1  # cases that failed the same way
    also: list[int] = dataclasses.field(default_factory=list)  # their numbers, the first few


@dataclasses.dataclass
class Report:
    """What a search did. ``counts[op][dtype]`` are cases; what ran out of memory counts in ``no_memory`` alone."""

    counts: dict[str, dict[str, int]]
    cases: int
    no_memory: int
    failed: int
    seconds: float
    findings: list[Finding]


def _kind_of_failure(text: str) -> str:
    """Findings of one kind say the same but for numbers; a smaller case must fail in the same way."""
    return re.split(r"[:;\n]", text, maxsplit=1)[0].strip()


def _signature(text: str, labels: dict[str, str]) -> tuple[str, ...]:
    first = text.splitlines()[0] if text else ""
    return labels.get("op", ""), re.sub(r"[-+]?\d[\d.e+-]*|\[[^\]]*\]|nan|inf", "#", first)[:120]


def shrink(
    case: Case, text: str, check: Callable[[Case], Result], smaller: Callable[[Case], Iterator[Case]]
) -> tuple[Case, str]:
    """The smallest case found that still fails the same way, and how it fails. Bounded in tries and in time."""
    deadline, how = time.monotonic() + _SHRINK_SECONDS, _kind_of_failure(text)
    tried: set[str] = set()
    while True:
        for candidate in smaller(case):
            key = json.dumps(candidate, sort_keys=True)
            if key in tried:
                continue
            if len(tried) >= _SHRINK_TRIES or time.monotonic() > deadline:
                return case, text
            tried.add(key)
            result = check(candidate)
            if result.outcome == "finding" and _kind_of_failure(result.text) == how:
                case, text = candidate, result.text
                break
        else:
            return case, text


def _jobs(kinds: Sequence[tuple[str, float]], calls: int | None, deadline: float) -> Iterator[Job]:
    """Cases in their order; of several kinds by their shares, so that each gets its part of any number."""
    due = [0.0] * len(kinds)
    counts = [0] * len(kinds)
    total = sum(share for _, share in kinds)
    while (calls is None or sum(counts) < calls) and time.monotonic() < deadline:
        due = [d + share / total for d, (_, share) in zip(due, kinds, strict=True)]
        at = max(range(len(kinds)), key=lambda i: due[i])
        due[at] -= 1
        name = kinds[at][0]
        yield Job(name, counts[at], make_kind(name).seconds)
        counts[at] += 1


def _finding(kind: Kind, result: Result, settings: Settings, worker: Worker | None) -> Finding:
    from kgopt.fuzz.worker import draw_case

    job = result.job
    case = job.case or draw_case(kind, settings.seed, job.index, settings.device, settings.only)
    smallest, text, source = case, result.text, ""
    try:  # a fault here must not take the findings with it
        if worker is not None:
            wait_for = min(kind.seconds, _SHRINK_WAIT)
            smallest, text = shrink(
                case, text, lambda c: worker.answer(Job(job.kind, job.index, wait_for, c)), kind.smaller
            )
        source = kind.source(smallest, settings.device)
    except Exception as error:
        source = f"# not shrunk, or no program could be written: {type(error).__name__}: {error}"
    return Finding(job.index, case, result.text, smallest, text, source)


def search(
    kinds: Sequence[tuple[str, float]],
    settings: Settings,
    workers: int,
    calls: int | None = None,
    seconds: float | None = None,
    cases: Sequence[Case] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Checks cases until ``calls`` of them are done or ``seconds`` are over.

    Args:
        kinds: names, each with its share of the cases.
        settings: of the workers.
        workers: processes.
        calls: how many cases; None: until ``seconds`` are over.
        seconds: after so long no case is started; None: no limit.
        cases: check these instead of drawing any.
        say: told how far it is, every few seconds.
    """
    start = time.monotonic()
    deadline = start + (seconds if seconds is not None else float("inf"))
    if cases is not None:
        jobs = iter([Job(c["kind"], i, make_kind(c["kind"]).seconds, c) for i, c in enumerate(cases)])
    else:
        jobs = _jobs(kinds, calls, deadline)
    pool = [Worker(i, settings) for i in range(workers)]
    counts: dict[str, dict[str, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    failed: dict[tuple[str, ...], list[Result]] = collections.defaultdict(list)
    report = Report({}, 0, 0, 0, 0.0, [])
    try:
        more, told = True, start
        while more or any(worker.load for worker in pool):
            for worker in pool:
                while more and worker.load < _AHEAD:
                    job = next(jobs, None)
                    if job is None:
                        more = False
                    else:
                        worker.give(job)
            wait(pool, 0.5)
            for worker in pool:
                for result in worker.poll():
                    _count(result, report, counts, failed, settings)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                say(f"{report.cases} cases in {told - start:.0f} s, {report.failed} failed")
        report.counts = {op: dict(row) for op, row in sorted(counts.items())}
        report.seconds = time.monotonic() - start
        report.findings = _smallest(failed, settings, pool, say)
    finally:
        for worker in pool:
            worker.close()
    return report


def _count(result: Result, report: Report, counts: Any, failed: Any, settings: Settings) -> None:
    from kgopt.fuzz.worker import draw_case

    if result.outcome == "out of memory":
        report.no_memory += 1
        return
    labels = result.labels
    if not labels:  # the process died: what the case is follows from its number
        kind, job = make_kind(result.job.kind), result.job
        labels = kind.labels(job.case or draw_case(kind, settings.seed, job.index, settings.device, settings.only))
    report.cases += 1
    counts[labels["op"]][labels["dtype"]] += 1
    if result.outcome == "finding":
        report.failed += 1
        failed[_signature(result.text, labels)].append(result)


def _smallest(
    failed: dict[tuple[str, ...], list[Result]], settings: Settings, pool: list[Worker], say: Callable[[str], None]
) -> list[Finding]:
    """One finding of each way to fail, shrunk by the workers side by side; the most frequent first."""
    groups = sorted(failed.values(), key=len, reverse=True)
    if groups:
        say(f"{len(groups)} ways to fail; looking for the smallest form of each")
    free = list(pool)

    def one(at: int) -> Finding:
        results = groups[at]
        worker = free.pop()  # as many threads as workers
        try:
            finding = _finding(
                make_kind(results[0].job.kind), results[0], settings, worker if at < _MOST_SHRUNK else None
            )
        finally:
            free.append(worker)
        finding.alike, finding.also = len(results), [r.job.index for r in results[:8]]
        return finding

    with concurrent.futures.ThreadPoolExecutor(len(pool)) as threads:
        return list(threads.map(one, range(len(groups))))
