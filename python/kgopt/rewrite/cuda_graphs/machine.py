"""The device: recording what a call launches, and replaying it."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kgopt.rewrite.measure import clocks
from kgopt.rewrite.pytorch.watching import is_captured
from kgopt.torch_private import CAN_BORROW, clear_blas_workspaces, current_stream, end_allocation_to_pool

_HERE = contextlib.nullcontext()
ALIGNMENT = 512  # bytes, as PyTorch's allocator has it
LONG = 0.03  # seconds of a call whose launches "auto" looks at first


class Cuda:
    """Recording and replaying on a GPU. Tests put another one in its place."""

    def takes(self, t: Tensor) -> bool:
        """Whether a tensor is where calls can be recorded."""
        return t.is_cuda

    def place(self, t: Tensor) -> int:
        """The address where a recording may read a tensor; 0: it has a copy.

        A copy is aligned: with an argument that is not, kernels would be recorded that nobody has measured.
        """
        if not CAN_BORROW or type(t) is not Tensor or not t.is_cuda or t.layout is not torch.strided:
            return 0
        if t.is_conj() or t.is_neg() or not t.numel():
            return 0
        try:
            address = t.data_ptr()
        except RuntimeError:  # it is one that a transform (vmap) has wrapped
            return 0
        return 0 if address % ALIGNMENT else address

    def is_recording(self) -> bool:
        """Whether somebody records what runs now."""
        return is_captured()

    def seconds(self, first: Callable[[], Any], second: Callable[[], Any], device: torch.device) -> tuple[float, float]:
        """Of a call of each."""
        return clocks.clock_both(first, second, device)

    def is_busy(self, call: Callable[[], Any], device: torch.device, long: float = LONG, launches: float = 0.5) -> bool:
        """Whether a call's work takes much longer than its launches: a recording would hold memory for nothing.

        ``long``: seconds of a call below which it is not; ``launches``: the part of its time from which on it is not.
        """
        call()
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        launched = time.perf_counter() - start
        torch.cuda.synchronize(device)
        worked = time.perf_counter() - start
        return worked > long and launched < launches * worked

    def memory(self, device: torch.device) -> int:
        """Bytes of all that it has."""
        return torch.cuda.get_device_properties(device).total_memory

    def peak(self, call: Callable[[], Any], device: torch.device) -> int:
        """Bytes that a call takes at its worst."""
        return clocks.peak_bytes(call, device)

    def reclaim(self) -> None:
        """After a lane is given up: PyTorch's allocator holds its memory for nobody else until it is told."""
        torch.cuda.empty_cache()

    def lane(self, device: torch.device) -> Lane:
        """Where the calls of one model are recorded and replayed."""
        return Lane(device)


class Lane:
    """The recordings of one model on one GPU: one memory pool, and one replay after the other.

    They share memory, so a replay waits for the one before it, on whichever stream that ran.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.pool = torch.cuda.graph_pool_handle()
            self.side = torch.cuda.Stream(device)
        self.last: Any = None  # the stream of the last replay
        self.handle = 0  # and CUDA's own, which is asked for in a tenth of the time

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """On a stream of its own, as what is recorded afterwards. The replays before are over."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            self._follow(current)
            self.side.wait_stream(current)
            try:
                with torch.cuda.stream(self.side):
                    yield
            finally:
                current.wait_stream(self.side)

    def _follow(self, current: Any) -> None:
        """Has a stream wait for the last replay."""
        if self.last is not None and self.last != current:
            current.wait_stream(self.last)

    def record(self, call: Callable[[], Any], room: int = 0) -> tuple[Callable[[], None], Any]:
        """What replays a call, and its result, which each replay writes anew.

        ``room``: bytes that the pool gets in one piece ahead, for this recording and those behind it. Segments that
        come one by one, each as large as what first asked for it, held over a quarter more than a step (DynUNet, bf16).

        A capture that fails is ended, and the allocator is told so.
        """
        gc.collect()  # a graph that is freed within a capture ends it
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self.device):
                torch.cuda.synchronize(self.device)
                # In the capture cuBLAS's workspaces come from the pool then: no other graph has them. A thread beside
                # this one may be about to use the one that it has.
                alone = threading.active_count() == 1
                if alone:
                    clear_blas_workspaces()
                torch.cuda.empty_cache()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(self.side):
                    result = self._capture(graph, call, room)
                if alone:
                    clear_blas_workspaces()
        finally:
            if collects:
                gc.enable()
        return graph.replay, result

    def _capture(self, graph: Any, call: Callable[[], Any], room: int = 0) -> Any:
        graph.capture_begin(self.pool, capture_error_mode="thread_local")
        try:
            if room:
                torch.empty(room, dtype=torch.uint8, device=self.device)  # it is free again at once
            result = call()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what failed may have made the capture void
                self._end(graph)
            raise
        self._end(graph)
        return result

    def _end(self, graph: Any) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            if not _has_ended(graph):  # of a void capture PyTorch does not tell its allocator
                end_allocation_to_pool(self.device, self.pool)
            raise

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """One replay, with what comes before and after it, on the caller's stream."""
        handle = current_stream(self.device.index)
        if self.last is None or handle != self.handle:
            current = torch.cuda.current_stream(self.device)
            self._follow(current)
            self.last, self.handle = current, handle
        return _HERE if torch.cuda.current_device() == self.device.index else torch.cuda.device(self.device)

    def settle(self) -> None:
        """Waits for the last replay, whose memory may be given back then."""
        if self.last is not None:
            with contextlib.suppress(RuntimeError):
                self.last.synchronize()

    @property
    def held(self) -> int:
        """Bytes of the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self.pool))


def _has_ended(graph: Any) -> bool:
    """Whether a capture was ended as PyTorch means it: then the graph gives its pool back itself."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


MACHINE: Any = Cuda()
