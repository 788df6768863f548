"""The search: cases to workers, counts, findings, and the smallest form of each finding."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kgopt.fuzz.kind import Case
from kgopt.fuzz.kinds import make_kind
from kgopt.fuzz.pool import Job, Result, Settings, Worker, wait

__all__ = ["Finding", "Report", "search", "shrink"]

_AHEAD = 16  # jobs that a worker has in its pipe: its parent then never keeps it waiting
_MOST_SHRUNK = 24  # different findings; the others are told with the case as it was drawn
_SHRINK_SECONDS = 90.0  # for one finding
_SHRINK_TRIES = 400
_SHRINK_WAIT = 25.0  # a candidate that hangs costs this much
_TELL_SECONDS = 10.0  # between two reports, where nothing new was found


@dataclasses.dataclass
class Finding:
    """A case that failed: as it was drawn, and in its smallest form. The two are the same until it is ``shrunk``."""

    index: int
    case: Case
    text: str
    smallest: Case
    smallest_text: str
    source: str
    alike: int = 1  # cases that failed the same way
    also: list[int] = dataclasses.field(default_factory=list)  # their numbers, the first few
    shrunk: bool = False


@dataclasses.dataclass
class Report:
    """What a search did. ``counts[op][dtype]`` are cases; what ran out of memory counts in ``no_memory`` alone.

    All cases before ``next`` are done: a search that starts there goes on where this one ended.
    """

    counts: dict[str, dict[str, int]]
    cases: int
    no_memory: int
    failed: int
    seconds: float
    findings: list[Finding]
    next: int = 0


def _kind_of_failure(text: str) -> str:
    """Findings of one kind say the same but for numbers; a smaller case must fail in the same way."""
    return re.split(r"[:;\n]", text, maxsplit=1)[0].strip()


def _signature(text: str, labels: dict[str, str]) -> tuple[str, ...]:
    first = text.splitlines()[0] if text else ""
    return labels.get("op", ""), re.sub(r"[-+]?\d[\d.e+-]*|\[[^\]]*\]|nan|inf", "#", first)[:120]


def shrink(
    case: Case,
    text: str,
    check: Callable[[Case], Result],
    smaller: Callable[[Case], Iterator[Case]],
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Case, str]:
    """The smallest case found that still fails the same way, and how it fails. Bounded in tries and in time."""
    deadline, how = time.monotonic() + _SHRINK_SECONDS, _kind_of_failure(text)
    tried: set[str] = set()
    while True:
        for candidate in smaller(case):
            key = json.dumps(candidate, sort_keys=True)
            if key in tried:
                continue
            if len(tried) >= _SHRINK_TRIES or time.monotonic() > deadline or is_over():
                return case, text
            tried.add(key)
            result = check(candidate)
            if result.outcome == "finding" and _kind_of_failure(result.text) == how:
                case, text = candidate, result.text
                break
        else:
            return case, text


def _jobs(kinds: Sequence[tuple[str, float]], deadline: float) -> Iterator[Job]:
    """Cases in their order; of several kinds by their shares, so that each gets its part of any number."""
    due = [0.0] * len(kinds)
    counts = [0] * len(kinds)
    total = sum(share for _, share in kinds)
    while time.monotonic() < deadline:
        due = [d + share / total for d, (_, share) in zip(due, kinds, strict=True)]
        at = max(range(len(kinds)), key=lambda i: due[i])
        due[at] -= 1
        name = kinds[at][0]
        yield Job(name, counts[at], make_kind(name).seconds, place=sum(counts))
        counts[at] += 1


def _case_of(job: Job, settings: Settings) -> Case:
    from kgopt.fuzz.worker import draw_case

    return job.case or draw_case(make_kind(job.kind), settings.seed, job.index, settings.device, settings.only)


def _source(case: Case, settings: Settings) -> str:
    try:  # a fault here must not take the finding with it
        return make_kind(case["kind"]).source(case, settings.device)
    except Exception as error:
        return f"# no program could be written: {type(error).__name__}: {error}"


def _shrink_finding(finding: Finding, settings: Settings, worker: Worker, is_over: Callable[[], bool]) -> None:
    """Writes the smallest form into the finding."""
    kind = make_kind(finding.case["kind"])
    wait_for = min(kind.seconds, _SHRINK_WAIT)

    def check(candidate: Case) -> Result:
        return worker.answer(Job(kind.name, finding.index, wait_for, candidate))

    try:
        smallest, text = shrink(finding.case, finding.text, check, kind.smaller, is_over)
    except Exception as error:
        finding.source = f"# not shrunk: {type(error).__name__}: {error}\n{finding.source}"
        return
    finding.source = _source(smallest, settings)
    finding.smallest, finding.smallest_text, finding.shrunk = smallest, text, True


def search(
    kinds: Sequence[tuple[str, float]],
    settings: Settings,
    workers: int,
    calls: int | None = None,
    seconds: float | None = None,
    cases: Sequence[Case] | None = None,
    say: Callable[[str], None] = lambda text: None,
    first: int = 0,
    shrink_seconds: float = float("inf"),
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Checks cases until ``calls`` of them are done or ``seconds`` are over, or until Ctrl-C; then what it has so far.

    Args:
        kinds: names, each with its share of the cases.
        settings: of the workers.
        workers: processes.
        calls: how many cases; None: until ``seconds`` are over.
        seconds: after so long no case is started; None: no limit.
        cases: check these instead of drawing any.
        say: told how far it is, every few seconds, and of each new way to fail.
        first: how many cases of the seed to leave out, since another run does them.
        shrink_seconds: for looking for the smallest form of what was found; 0: none is looked for.
        keep: given the report as far as it is: at each new way to fail, every few seconds, before anything is made
            smaller, and with each smallest form. What ends the search by force then loses next to nothing.
    """
    start = time.monotonic()
    deadline = start + (seconds if seconds is not None else float("inf"))
    if cases is not None:
        jobs = iter([Job(c["kind"], i, make_kind(c["kind"]).seconds, c, i) for i, c in enumerate(cases)])
    else:
        jobs = itertools.islice(_jobs(kinds, deadline), first, None if calls is None else first + calls)
    pool = [Worker(i, settings) for i in range(workers)]
    progress = _Progress(settings, first)
    report = progress.report
    try:
        more, told = True, start
        while more or any(worker.load for worker in pool):
            for worker in pool:
                while more and worker.load < _AHEAD:
                    job = next(jobs, None)
                    if job is None:
                        more = False
                    else:
                        progress.given(job)
                        worker.give(job)
            wait(pool, 0.5)
            ways = len(report.findings)
            for worker in pool:
                for result in worker.poll():
                    progress.count(result)
            report.seconds = time.monotonic() - start
            for finding in report.findings[ways:]:
                say(f"case {finding.index} of {finding.case['kind']} failed: {finding.text.splitlines()[0][:200]}")
            if time.monotonic() - told > _TELL_SECONDS:
                told = time.monotonic()
                say(f"{report.cases} cases in {told - start:.0f} s, {report.failed} failed")
                keep(report)
            elif len(report.findings) > ways:
                keep(report)
        report.findings.sort(key=lambda f: -f.alike)  # the most frequent first
        keep(report)
        _shrink_all(report, settings, pool, shrink_seconds, say, keep)
    except KeyboardInterrupt:
        say("interrupted")
    finally:
        for worker in pool:
            worker.close()
    return report


class _Progress:
    """A report that grows with the results."""

    def __init__(self, settings: Settings, first: int) -> None:
        self.settings = settings
        self.report = Report({}, 0, 0, 0, 0.0, [], first)
        self._open: dict[int, None] = {}  # places of cases that were given and not answered, in their order
        self._given = first
        self._ways: dict[tuple[str, ...], Finding] = {}

    def given(self, job: Job) -> None:
        self._open[job.place] = None
        self._given = job.place + 1

    def count(self, result: Result) -> None:
        report, job = self.report, result.job
        self._open.pop(job.place, None)
        report.next = next(iter(self._open), self._given)
        if result.outcome == "out of memory":
            report.no_memory += 1
            return
        labels = result.labels
        if not labels:  # the process died: what the case is follows from its number
            labels = make_kind(job.kind).labels(_case_of(job, self.settings))
        report.cases += 1
        row = report.counts.setdefault(labels["op"], {})
        row[labels["dtype"]] = row.get(labels["dtype"], 0) + 1
        if result.outcome == "finding":
            report.failed += 1
            self._failed(result, labels)

    def _failed(self, result: Result, labels: dict[str, str]) -> None:
        way, index = _signature(result.text, labels), result.job.index
        finding = self._ways.get(way)
        if finding is None:
            case = _case_of(result.job, self.settings)
            finding = Finding(index, case, result.text, case, result.text, _source(case, self.settings), 1, [index])
            self._ways[way] = finding
            self.report.findings.append(finding)
            return
        finding.alike += 1
        if len(finding.also) < 8:
            finding.also.append(index)


def _shrink_all(
    report: Report,
    settings: Settings,
    pool: list[Worker],
    seconds: float,
    say: Callable[[str], None],
    keep: Callable[[Report], None],
) -> None:
    """The smallest form of the most frequent findings, by the workers side by side, within the time that there is."""
    findings = report.findings[:_MOST_SHRUNK]
    if not findings or seconds <= 0:
        return
    say(f"{len(report.findings)} ways to fail; looking for the smallest form of each")
    deadline, interrupted = time.monotonic() + seconds, threading.Event()
    free = list(pool)

    def is_over() -> bool:
        return interrupted.is_set() or time.monotonic() > deadline

    def one(finding: Finding) -> None:
        if is_over():
            return
        worker = free.pop()  # as many threads as workers
        try:
            _shrink_finding(finding, settings, worker, is_over)
        finally:
            free.append(worker)

    with concurrent.futures.ThreadPoolExecutor(len(pool)) as threads:
        try:
            for done in concurrent.futures.as_completed([threads.submit(one, f) for f in findings]):
                done.result()
                keep(report)
        except BaseException:
            interrupted.set()
            raise
