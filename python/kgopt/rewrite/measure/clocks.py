"""How long two functions take: in turn, by the device's clock, by the host's, or the work on the GPU alone.

And how much memory one takes.

Whoever measures calls these, with functions of no arguments. What a time means is the caller's question.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kgopt.torch_private import keep_busy

_alone: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
LONG = 0.2  # seconds: what takes longer is timed once
SHORT = 0.02  # seconds: what takes longer waits for no launches, so it is timed alone, and in fewer rounds
FAR = 1.1  # two times that are so far apart, of long calls, are compared in two rounds


def time_both(first: Callable[[], Any], second: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds a call of two functions, taken in turn; the smallest of a few. One function given twice is timed once.

    On CUDA for 0.15 s, or until every time of the one is below every time of the other. Of what may wait for its
    launches seven at least: a process that has just started launches slowly, and would be taken for a model that does.
    """
    timer = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    functions = (first,) if first is second else (first, second)
    once = []
    for function in functions:  # also warms them up
        function()
        once.append(timer(function, device))
    if max(once) > LONG:
        return once[0], once[-1]
    best = once
    rounds: list[list[float]] = []
    while not _are_enough(rounds, max(best), device):
        rounds.append([timer(function, device) for function in functions])
        best = [min(pair) for pair in zip(best, rounds[-1], strict=True)]
    return best[0], best[-1]


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """How much memory of a CUDA device a call takes at its worst, beyond what was taken before; of another device 0.

    PyTorch counts no peak of its own for this: what ``torch.cuda.max_memory_allocated`` says begins anew.
    """
    if device.type != "cuda":
        return 0
    function()  # a first call has more: workspaces of what cuDNN tries
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    return torch.cuda.max_memory_allocated(device) - before


def _are_enough(rounds: list[list[float]], seconds: float, device: torch.device) -> bool:
    """Whether two functions, the longer of which takes so long, have been timed often enough."""
    if device.type != "cuda":
        return len(rounds) >= 3
    if len(rounds) >= max(3, min(40, int(0.15 / max(seconds, 1e-6)))):
        return True
    if len(rounds) < (7 if seconds < SHORT else 2):
        return False
    first, *others = zip(*rounds, strict=True)
    if not others:
        return True
    (second,) = others
    apart = 1.0 if len(rounds) >= 3 else FAR
    return max(first) * apart < min(second) or max(second) * apart < min(first)


def seconds_once(function: Callable[[], Any], device: torch.device) -> float:
    """Of one call."""
    return (_cuda_seconds if device.type == "cuda" else _cpu_seconds)(function, device)


def _cpu_seconds(function: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _cuda_seconds(function: Callable[[], Any], device: torch.device) -> float:
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    function()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def clock_both(
    first: Callable[[], Any],
    second: Callable[[], Any],
    device: torch.device,
    ready: tuple[Callable[[], Any], Callable[[], Any]] | None = None,
) -> tuple[float, float]:
    """Seconds a call of two functions by the clock, with all that the host does: medians of rows of calls in turn.

    The device is idle before and after a row. Rows are repeated until the two are further apart than half of the
    rows are from each other, or one second is over; 7 rows of each at least, 3 of one call each where a call takes more
    than :data:`SHORT`, and one where it takes more than :data:`LONG`.
    ``ready``: what is done before a row of each, and one more call of it, whose time does not count.
    """
    synchronize = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else _nothing
    functions = first, second

    def clock(at: int, calls: int) -> float:
        function = functions[at]
        if ready is not None:
            ready[at]()
            function()
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize()
        return (time.perf_counter() - start) / calls

    once = []
    for at, function in enumerate(functions):
        if ready is None:
            function()  # warms it up
        once.append(clock(at, 1))
    if max(once) > LONG:
        return clock(0, 1), clock(1, 1)
    calls = max(3, min(50, int(0.01 / max(*once, 1e-6)))) if max(once) < SHORT else 1
    rows: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + 1.0
    while True:
        for at, found in enumerate(rows):
            found.append(clock(at, calls))
        if len(rows[0]) < (3 if min(*rows[0], *rows[1]) > SHORT else 7):
            continue
        a, b = (sorted(found) for found in rows)
        half = len(a) // 2
        spread = max(found[(3 * len(found)) // 4] - found[len(found) // 4] for found in (a, b))
        if abs(a[half] - b[half]) > spread or time.perf_counter() > end:
            return a[half], b[half]


def _nothing() -> None:
    """What a device that is never behind waits for."""


@contextlib.contextmanager
def among_others(alone: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Other processes use the GPU; ``alone`` keeps them off while a compiler's callback measures."""
    global _alone
    before, _alone = _alone, alone
    try:
        yield
    finally:
        _alone = before


def alone() -> contextlib.AbstractContextManager[Any]:
    """For what is timed by the clock in the midst of compiling."""
    return _alone()


def busy_both(first: Callable[[], Any], second: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds of work on the GPU of two functions: they are launched while it is kept busy with something else."""
    with _alone():
        before, after = _busy([first, second], device, 0.01)
    return before, after


def busy(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds of work on the GPU of a function that may take long to launch, such as a step of a whole model."""
    function()  # a first call may choose algorithms: the GPU would be kept busy as long, time and again
    with _alone():
        return _busy([function], device, 1.0)[0]


def _busy(functions: list[Callable[[], Any]], device: torch.device, most: float) -> list[float]:
    """``most``: seconds that the GPU is kept busy at a time."""
    best: list[float] = []
    for function in functions:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        launch = time.perf_counter() - start
        cycles = int(2e9 * min(1.5 * launch + 1e-4, most))  # of a clock of at most 2 GHz

        def behind(function: Callable[[], Any] = function, cycles: int = cycles) -> float:
            keep_busy(cycles)
            return _cuda_seconds(function, device)

        found = behind()
        if found < LONG and (not best or found < 2 * best[0]):  # else more of them would not help it
            found = min(found, *(behind() for _ in range(1 if found > SHORT else 2)))
        best.append(found)
    return best
