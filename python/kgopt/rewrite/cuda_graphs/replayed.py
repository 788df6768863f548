"""Compiled functions that wait for the host, replayed as CUDA graphs.

The results of a replay are copies: unlike those of ``mode="reduce-overhead"`` they are never overwritten. Parameters
and buffers are read where they are, so what is written to them is seen. So are, in inference, other arguments that lie
where they lay at the first call; the rest is copied into the recording.
In training the backward is replayed, too (:mod:`~kgopt.rewrite.cuda_graphs.replayed_steps`).
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from kgopt.rewrite.cuda_graphs import machine
from kgopt.rewrite.cuda_graphs.calls import BUSY, GAIN, RENEWALS
from kgopt.rewrite.cuda_graphs.effects import random_states
from kgopt.rewrite.cuda_graphs.keys import RefusedError, like, places_of, staying
from kgopt.rewrite.cuda_graphs.recording import Recording, agree, given_of
from kgopt.rewrite.cuda_graphs.replayed_steps import Step
from kgopt.torch_private import (
    KNOWS_IF_GRAPH_STAYS,
    are_functorch_transforms_active,
    borrowed,
    is_of_module,
    may_hook_saved_tensors,
)

MOST = 1 / 16  # of a device's memory, that is held from one training step to the next
MORE = 1.1  # of the memory of a step by calls, that a recorded one may take
ROOM = 1.05  # of it, that is set aside ahead: what is freed and asked for again does not fit without gaps
LITTLE = 2**26  # bytes that one may always hold


class Replayed:
    """A compiled function for arguments of sizes that do not change, with no effect but its result and, in training,
    what it writes to buffers.

    Its second call is recorded, where that is faster by the clock.
    """

    def __init__(
        self, run: Callable[..., Any], always: bool, grad: bool = False, written: Collection[int] = ()
    ) -> None:
        """``always``: without asking the clock; ``grad``: gradients are recorded, and the arguments ``written`` may be
        changed.
        """
        self.run = run
        self.always = always
        self.grad, self.written = grad, written
        self.lock = threading.Lock()  # who does not get it takes the plain path
        self.lane: Any = None
        self.recording: Recording | Step | None = None
        self.held: list[int] = []  # arguments that modules hold
        self.moving: list[int] = []  # the others
        self.staying: dict[int, int] = {}  # of those the ones that are read where they are, and where
        self.places: list[int] = []  # of all that are read where they are
        self.lay: list[int] = []  # where arguments were at the first call; empty once one was elsewhere
        self.recorded = self.calls = 0
        self.why = ""  # nothing is recorded any more

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process parts of torch are gone
            if self.lane is not None and not machine.MACHINE.is_recording():
                self.lane.settle()

    def __call__(self, *inputs: Any) -> Any:
        """The function's results."""
        self.calls += 1
        if self.calls == 1 and not self.grad:
            self.lay = places_of(inputs)
        if self.why or self.calls < 2 or machine.MACHINE.is_recording() or (self.grad and not _may_replay_steps()):
            return self.run(*inputs)
        if not self.lock.acquire(blocking=False):
            return self.run(*inputs)
        try:
            if self.recording is None or not self._holds(inputs):
                self._renew(inputs)
            result = None if self.recording is None else self._replay(inputs)
        finally:
            self.lock.release()
        return self.run(*inputs) if result is None else result

    def _holds(self, inputs: Sequence[Any]) -> bool:
        return list(map(Tensor.data_ptr, self._pick(inputs))) == self.places

    def _replay(self, inputs: Sequence[Any]) -> Any:
        if isinstance(self.recording, Step):
            return self.recording(inputs)
        assert self.recording is not None
        return self.recording.run(self.lane, [inputs[i] for i in self.moving])

    def _renew(self, inputs: Sequence[Any]) -> None:
        """Records a call on these inputs, or notes why not."""
        if self.lane is not None:
            self.lane.settle()
        moved = self.recording is not None and any(inputs[i].data_ptr() != at for i, at in self.staying.items())
        stay = moved and all(inputs[i].data_ptr() == at for i, at in zip(self.held, self.places, strict=False))
        self.recording = None
        if moved:  # arguments are copied from now on, with a pool that is new: the old one has no recording any more
            self.lay, self.lane = [], None
        self.recorded += not stay
        if self.recorded > RENEWALS:
            self.why = f"what its modules hold was replaced {RENEWALS} times"
            return
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(self.grad):
                self._record(inputs)
        except RefusedError as reason:
            self.why = str(reason)
        except Exception as error:  # the plain call that follows raises it if it must
            self.why = f"recording fails: {(str(error) or repr(error)).splitlines()[0]}"
        if self.why and self.lane is not None:
            self.recording = self.lane = None
            machine.MACHINE.reclaim()

    def _record(self, inputs: Sequence[Any]) -> None:
        self.held = [i for i, t in enumerate(inputs) if is_of_module(t)]
        self.moving = [i for i in range(len(inputs)) if i not in self.held]
        found = staying(self.lay, places_of(inputs)) if self.lay else {}
        self.staying = {i: place for i, place in found.items() if i in self.moving}
        self._pick = _picked([*self.held, *self.staying])
        self.places = list(map(Tensor.data_ptr, self._pick(inputs)))
        if not self.moving:
            raise RefusedError("no argument but what modules hold")
        before, after = self._recorded_step(inputs) if self.grad else self._recorded_call(inputs)
        if after >= GAIN * before:
            raise RefusedError("it is not faster")

    def _recorded_call(self, inputs: Sequence[Any]) -> tuple[float, float]:
        """Seconds of a call without and with a recording, which is there then."""
        device = inputs[0].device
        if not self.always and machine.MACHINE.is_busy(lambda: self.run(*inputs), device):
            raise RefusedError(BUSY)
        own = [like(t) if i in self.moving else t for i, t in enumerate(inputs)]
        self._take_lane(device)
        with self.lane.aside():
            drawn = random_states(device)
            expected = self.run(*own)
            if random_states(device) != drawn:
                raise RefusedError("it draws random numbers")
        own = [borrowed(inputs[i]) if i in self.staying else t for i, t in enumerate(own)]
        replay, outputs = self.lane.record(lambda: self.run(*own))
        taken = [own[i] for i in self.moving]
        given = given_of(outputs, taken, [own[i] for i in self.held])
        places = {at: self.staying[i] for at, i in enumerate(self.moving) if i in self.staying}
        self.recording = Recording(replay, taken, outputs, given, places)
        if not agree(expected, self._replay(inputs)):
            raise RefusedError("a replay gives another result than the call")

        def replayed() -> Any:
            return self._holds(inputs) and self._replay(inputs)

        if self.always:
            return 1.0, 0.0
        return machine.MACHINE.seconds(lambda: self.run(*inputs), replayed, device)  # type: ignore[no-any-return]

    def _recorded_step(self, inputs: Sequence[Any]) -> tuple[float, float]:
        """The same of a call with its backward."""
        device = inputs[0].device
        self._take_lane(device)
        step = Step(self.run, inputs, self.moving, self.written, self.lane)
        # Between steps their memory would be free for others otherwise: that is for those alone who wait for the host.
        if not self.always and step.is_busy(device):
            raise RefusedError(BUSY)
        peak = step.peak(device)
        step.record(int(ROOM * peak))
        if not self.always:
            held = self.lane.held + step.copied
            most = min(MOST * machine.MACHINE.memory(device), max(LITTLE, MORE * peak))
            if held > most:
                raise RefusedError(f"it would hold {held / 2**20:.0f} MiB")
        found = (1.0, 0.0) if self.always else step.seconds(lambda: self._holds(inputs), device)
        self.recording = step
        return found

    def _take_lane(self, device: torch.device) -> None:
        if self.lane is None:
            self.lane = machine.MACHINE.lane(device)


def _picked(places: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Gives those of a sequence."""
    if len(places) < 2:
        return lambda inputs: [inputs[i] for i in places]
    return operator.itemgetter(*places)


def _may_replay_steps() -> bool:
    """Whether nobody looks on at what autograd keeps, or transforms the call."""
    return KNOWS_IF_GRAPH_STAYS and may_hook_saved_tensors() and not are_functorch_transforms_active()
