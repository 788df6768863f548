"""The GPU's time of a call, between events: for benchmarks of single ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def busy(call: Callable[[], Any], calls: int = 20) -> float:
    """Microseconds of the GPU: the best of three rows of calls."""
    for _ in range(4):
        call()
    rows = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        rows.append(start.elapsed_time(end) / calls * 1e3)
    return min(rows)
