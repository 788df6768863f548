"""Times, peak memory and errors, measured the same way for every implementation."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from kgopt import accuracy, torch_private
from kgopt.accuracy import round_tf32

__all__ = [
    "DTYPES",
    "ErrorMeter",
    "Timing",
    "clock",
    "gpu_time",
    "kink_error",
    "look_again",
    "note_error_ratio",
    "note_time",
    "peak_memory",
    "precision_flags",
    "rounded_convolutions",
    "time_call",
    "time_calls",
    "within_tolerance",
]

# tf32 and fp32 are both float32 tensors; they differ in what convolutions and matmuls may do inside.
DTYPES = {
    "tf32": torch.float32,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median, 20th and 80th percentile of one call, in microseconds."""

    median_us: float
    p20_us: float
    p80_us: float


_CPU_FLUSH_BYTES = 2**26  # written between runs, which empties the caches

# Median first, in the order of Timing's fields.
_QUANTILES = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)


@contextlib.contextmanager
def precision_flags(precision: str) -> Iterator[None]:
    """Allows TF32 for "tf32" and forbids it otherwise, in cuDNN and in matmuls; restores the flags at the end."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    allow = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = allow
    torch.backends.cuda.matmul.allow_tf32 = allow
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def time_call(fn: Callable[[], Any], device: torch.device, rep_ms: float = 100.0) -> Timing:
    """Times `fn` after a warm-up, with caches flushed before each run.

    On CUDA: triton.testing.do_bench (events, a 256 MB write between runs to empty the L2). On CPU: perf_counter around
    each run, a 64 MB write between runs, at least 5 runs and `rep_ms` milliseconds.
    """
    if device.type == "cuda":
        from triton.testing import do_bench  # comes with every CUDA build of torch on Linux

        with torch.cuda.device(device):
            p20, median, p80 = do_bench(fn, warmup=25, rep=rep_ms, quantiles=[0.2, 0.5, 0.8])
        return Timing(median * 1e3, p20 * 1e3, p80 * 1e3)
    return _time_on_cpu([fn], rep_ms)[0]


def gpu_time(fn: Callable[[], Any], device: torch.device, rep_ms: float) -> Timing:
    """Median time of `fn` on the GPU alone: the stream is kept busy while `fn` is launched.

    A small GroupNorm takes less time than its launch from Python. What differs between kernels would not be seen. The
    L2 is emptied by a write before each run, as `time_call` does.
    """
    flush = torch.empty(2**26, dtype=torch.int32, device=device)  # 256 MB empty the L2
    start = time.perf_counter()
    fn()
    torch.cuda.synchronize(device)
    slow = time.perf_counter() - start > 0.1  # a GroupNorm of one huge group by PyTorch: few calls must do
    for _ in range(0 if slow else 2):
        fn()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    fn()
    launch_s = time.perf_counter() - start
    torch.cuda.synchronize(device)
    both_s = time.perf_counter() - start
    count = max(3 if slow else 5, min(50, int(rep_ms * 1e-3 / max(both_s, 1e-6))))
    cycles = int(2e9 * (1.5 * launch_s + 100e-6))  # at most 2 GHz: long enough for the launch
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in events:
        flush.zero_()
        torch_private.keep_busy(cycles)
        begin.record()
        fn()
        end.record()
    torch.cuda.synchronize(device)
    times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in events)
    return Timing(statistics.median(times), times[len(times) // 5], times[(4 * len(times)) // 5])


def clock(fn: Callable[[], Any], device: torch.device, rep_ms: float) -> Timing:
    """By the GPU's clock where there is one."""
    return gpu_time(fn, device, rep_ms) if device.type == "cuda" else time_call(fn, device, rep_ms)


def note_time(row: dict[str, Any], took: Timing) -> None:
    """Median and quantiles of a row."""
    row["time_us"] = round(took.median_us, 2)
    row["time_us_p20"] = round(took.p20_us, 2)
    row["time_us_p80"] = round(took.p80_us, 2)


def time_calls(fns: Sequence[Callable[[], Any]], device: torch.device, rep_ms: float = 100.0) -> list[Timing]:
    """As `time_call` for several functions; on CPU in turns, so that another program's load meets all of them."""
    if device.type == "cuda":
        return [time_call(fn, device, rep_ms) for fn in fns]
    return _time_on_cpu(fns, rep_ms)


def _time_on_cpu(fns: Sequence[Callable[[], Any]], rep_ms: float) -> list[Timing]:
    flush = torch.empty(_CPU_FLUSH_BYTES, dtype=torch.int8)
    for fn in fns:
        fn()
    times: list[list[float]] = [[] for _ in fns]
    total = 0.0
    while len(times[0]) < 5 or (total < rep_ms * 1e-3 * len(fns) and len(times[0]) < 1000):
        for fn, own in zip(fns, times, strict=True):
            flush.zero_()
            start = time.perf_counter()
            fn()
            own.append(time.perf_counter() - start)
            total += own[-1]
        if total > 10.0 * len(fns):  # calls of seconds: what there is must do
            break
    return [
        Timing(*(float(q) * 1e6 for q in torch.tensor(own, dtype=torch.float64).quantile(_QUANTILES))) for own in times
    ]


def peak_memory(fn: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes that `fn` holds at its peak beyond what was held before it: its output and its temporaries.

    On CUDA from the caching allocator; on CPU from the profiler's record of PyTorch's allocations (None where this
    torch keeps none). Call `fn` once before, so that one-time allocations are not counted.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        out = fn()
        torch.cuda.synchronize(device)
        del out
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = fn()
    del out
    try:
        events = profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    except AttributeError:
        return None
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Drops what is written to file descriptor 2: some builds of torch's profiler log every start and stop there."""
    sys.stderr.flush()
    kept, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


def rounded_convolutions(model: nn.Module) -> nn.Module:
    """A copy whose convolutions have weights rounded to TF32: on a rounded input, what ideal TF32 hardware gives."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
            module.weight.data = round_tf32(module.weight.data)
    return model


class ErrorMeter:
    """Relative error against float64, fed piece by piece so that no float64 copy of a large result is needed."""

    def __init__(self) -> None:
        self._diff = self._norm = 0.0
        self._diff_max = self._norm_max = 0.0

    def add(self, value: torch.Tensor, reference: torch.Tensor) -> None:
        """Adds one piece of the result and its float64 reference of the same shape."""
        if value.shape != reference.shape:
            raise ValueError(f"result has shape {list(value.shape)}, expected {list(reference.shape)}")
        if value.numel() == 0:
            return
        diff = (value.detach().double() - reference).abs()
        size = reference.abs()
        # NaN must show: max() and square sums keep it.
        pieces = torch.stack([diff.square().sum(), size.square().sum(), diff.max(), size.max()]).tolist()
        self._diff += pieces[0]
        self._norm += pieces[1]
        self._diff_max = pieces[2] if pieces[2] != pieces[2] else max(self._diff_max, pieces[2])
        self._norm_max = max(self._norm_max, pieces[3])

    @property
    def error(self) -> float:
        """||value - reference|| / ||reference||."""
        return (self._diff / self._norm) ** 0.5 if self._norm else float(self._diff > 0)

    @property
    def error_max(self) -> float:
        """max |value - reference| / max |reference|."""
        return self._diff_max / self._norm_max if self._norm_max else float(self._diff_max > 0)


def look_again(rows: Sequence[Any], calls: Sequence[Callable[[], Any]], device: torch.device, rep_ms: float) -> None:
    """Rows are timed twice more, in turns: each keeps its best median, which noise left alone."""
    for row, fn in [*zip(rows, calls, strict=True)] * 2:
        took = clock(fn, device, rep_ms)
        if took.median_us < row["time_us"]:
            note_time(row, took)


def note_error_ratio(row: dict[str, Any], bar: float, least: float, dtype: torch.dtype) -> None:
    """The row's error beside PyTorch's, which is ``bar``; ``least``: an error that is allowed in any case."""
    if "error" in row:
        row["error_ratio"] = row["error"] / bar if bar > 0 else None
        if not within_tolerance(row["error"], max(bar, least), dtype):
            row["out_of_tolerance"] = True


def within_tolerance(error: float, torch_error: float, dtype: torch.dtype) -> bool:
    """The rule of :mod:`kgopt.accuracy`; NaN is not within it."""
    return error <= accuracy.allowed(dtype, torch_error)


def kink_error(act: str, shape: Sequence[int]) -> float:
    """Error of a gradient that no implementation can avoid: relu's slope jumps at 0.

    Rounding puts one element in 10^7, about, on the other side of 0 than float64 does, PyTorch's others than kgopt's;
    each has all of its gradient or nothing. Where no such element is to be expected there is no allowance.
    """
    flipped = 1e-7
    return math.sqrt(flipped) if act == "relu" and math.prod(shape) * flipped >= 1 else 0.0
