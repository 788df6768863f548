"""Which calls of a model are recorded, which are replayed, and which run as ever."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite.cuda_graphs import machine
from kgopt.rewrite.cuda_graphs.effects import no_casts_kept, undone
from kgopt.rewrite.cuda_graphs.keys import RefusedError, form_of, key_of, like, places_of, staying, switches
from kgopt.rewrite.cuda_graphs.recording import (
    Call,
    ChangesError,
    Recording,
    Seen,
    check_that_calls_can_be_seen,
    recorded,
    result_alone,
    stamp_of,
)
from kgopt.rewrite.cuda_graphs.stamp import Stamp, are_hooked
from kgopt.rewrite.optimized.transaction import snapshot
from kgopt.rewrite.pytorch.watching import any_global_hooks, is_foreign_mode, is_watched
from kgopt.torch_private import any_requires_grad, len_torch_function_stack

CALLS = 8  # that are recorded of a model, of different kinds
RENEWALS = 8  # how often a model may change before it is left alone
WATCHED = 3  # calls behind a recording of an example, which may lie elsewhere than what comes
GAIN = 0.97  # of the plain path's time, above which "auto" records nothing
BUSY = "its launches are over long before its work is"


class Graphs:
    """What the root of a model knows of its recordings."""

    def __init__(self, mode: bool | str) -> None:
        self.mode = mode
        self.lock = threading.Lock()  # who does not get it takes the plain path
        self.owner: Any = None  # of the model: copies that share this object (copy.copy, replicas) do not replay
        self.reset()
        self.renewals = 0
        self.off = ""  # why nothing is recorded any more

    def __reduce__(self) -> Any:
        return Graphs, (self.mode,)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process parts of torch are gone
            if not machine.MACHINE.is_recording():
                self.reset()

    def reset(self) -> None:
        """Drops every recording, and what they hold."""
        lane = getattr(self, "lane", None)
        if lane is not None:
            lane.settle()
        self.stamp: Stamp | None = None
        self.lane: Any = None
        self.calls: dict[Any, Recording | Seen | str] = {}  # a reason why not
        self.last_reason = ""

    def call(
        self,
        forward: Callable[..., Any],
        root: nn.Module,
        args: Any,
        kwargs: Any,
        seen: bool = False,
        timed: bool = True,
        asks: bool = True,
    ) -> Any:
        """The model's forward.

        ``seen``: a kind of call that is new is recorded at once, else when it comes again; ``timed``: and compared with
        the plain path by the clock; ``asks``: "auto" looks at a long call's launches first.
        """
        tensors: list[Tensor] = []
        key = None if self.off or root.training else self._key(root, args, kwargs, tensors)
        if key is not None and self.lock.acquire(blocking=False):
            try:
                replayed = self._replayed(key, root, tensors, counts=not seen)
                if replayed is not None:
                    return replayed[0]
                found = self._found(key, root)
                if isinstance(found, Recording):
                    return found.run(self.lane, tensors)
                if isinstance(found, str):
                    pass
                elif seen or (found is not None and self._takes(key)):
                    made = self._try(Call(forward, root, args, kwargs, tensors), found or Seen(), timed, asks)
                    if found is None and isinstance(made, Recording):
                        made.watched = WATCHED
                    self.calls[key] = made
                elif found is not None or len(self.calls) < 4 * CALLS:
                    self.calls[key] = Seen(places_of(tensors))
            finally:
                self.lock.release()
        return forward(root, *args, **kwargs)

    def _key(self, root: nn.Module, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Of a call's recording; None where there can be none."""
        if not self._may_replay(root):
            return None
        try:
            key = key_of(args, tensors), key_of(kwargs, tensors), switches()
            if not tensors:
                raise RefusedError("no argument is a tensor")
            if torch.is_grad_enabled() and self._records(root, tensors):
                raise RefusedError("a gradient is recorded")
        except RefusedError as reason:
            self.last_reason = str(reason)
            return None
        return key

    def _replayed(self, key: Any, root: nn.Module, tensors: list[Tensor], counts: bool) -> tuple[Any] | None:
        """The result of a replay, if there is one that is right.

        The model is compared while the device works. A replay that turns out to be wrong has read memory that is still
        the model's and written to its own, so it is forgotten. Where it may do harm, :meth:`_found` compares first.
        """
        found, stamp = self.calls.get(key), self.stamp
        if isinstance(found, Recording) and (found.places or found.watched):
            again = found.again(tensors, counts)
            if again is not None:
                self.calls[key] = again
                self._leave()
                return None
        if not isinstance(found, Recording) or not found.is_harmless or stamp is None or not stamp.may_launch(root):
            return None
        try:
            result = found.run(self.lane, tensors)
        except Exception:
            if stamp.holds_beside_places(root):
                raise
            return None
        return (result,) if stamp.holds_beside_places(root) else None

    def _found(self, key: Any, root: nn.Module) -> Recording | Seen | str | None:
        """The recording, or why there is none; None: this kind of call is new."""
        if self.stamp is not None and not self.stamp.holds(root):
            self._renew()
        if are_hooked(root) if self.stamp is None else self.stamp.is_hooked:
            self.last_reason = "modules inside have hooks"
            return self.last_reason
        return self.calls.get(key)

    def _may_replay(self, root: nn.Module) -> bool:
        if self.owner is None:
            self.owner = weakref.ref(root)
        if self.owner() is not root or is_watched() or any_global_hooks():
            return False
        if len_torch_function_stack() and is_foreign_mode():
            return False
        return not machine.MACHINE.is_recording()

    def _takes(self, key: Any) -> bool:
        """Whether a kind of call that comes again is recorded. "auto" does so where only its tensors are others than in
        a call that was: a timestep that is a number would be recorded for each of its values, seconds at a time.
        """
        kept = [other for other, c in self.calls.items() if isinstance(c, Recording)]
        return self.mode is True or not kept or any(form_of(other) == form_of(key) for other in kept)

    def _records(self, root: nn.Module, tensors: list[Tensor]) -> bool:
        own = self.stamp.tensors if self.stamp is not None else list(root.parameters())
        return any_requires_grad(*own, *tensors)

    def _renew(self) -> None:
        self.reset()
        self.renewals += 1
        if self.renewals > RENEWALS:
            self.off = f"the model changed {self.renewals} times after a call was recorded"

    def _try(self, call: Call, seen: Seen, timed: bool, asks: bool) -> Recording | str:
        """Records a call, or says why not."""
        if sum(isinstance(c, Recording) for c in self.calls.values()) >= CALLS:
            return f"{CALLS} kinds of calls are recorded already"
        timed = timed and not seen.pays
        compares = self.mode == "auto" and timed
        try:
            found = self._record(call, compares and asks, staying(seen.places, places_of(call.tensors)))
            found.pays = seen.pays or not found.places
            found.before, found.after = self._seconds(found, call) if timed else (seen.before, seen.after)
        except ChangesError as reason:
            self.reset()
            self.off = str(reason)
            return self.off
        except RefusedError as reason:
            return self._without(str(reason))
        except Exception as error:  # the model's own, too: the plain call that follows raises it if it must
            return self._without(f"recording fails: {(str(error) or repr(error)).splitlines()[0]}")
        if compares and found.after >= GAIN * found.before:
            return self._without(f"it is not faster: {_us(found.after)} with it, {_us(found.before)} without")
        return found

    def _without(self, reason: str) -> str:
        """A call that failed leaves no memory behind, unless other calls have their recordings there. The stamp stays:
        once the model has changed, the call may be tried again.
        """
        self._leave()
        self.last_reason = reason
        return reason

    def _leave(self) -> None:
        """Gives the lane up, unless there are recordings in it."""
        if self.lane is not None:
            self.lane.settle()
        if not any(isinstance(c, Recording) for c in self.calls.values()):
            self.lane = None

    def _record(self, call: Call, asks: bool, places: Mapping[int, int]) -> Recording:
        device, grad = call.device, torch.is_grad_enabled()
        check_that_calls_can_be_seen(call)
        # Out of inference mode: its tensors could not be written to by calls that are not in it.
        with undone(call.root), torch.inference_mode(False), torch.set_grad_enabled(grad), no_casts_kept():
            # On copies: what it writes to its arguments happens once, in the call that follows.
            own = call.on(list(map(like, call.tensors)))
            if asks and machine.MACHINE.is_busy(own.run, device):
                raise RefusedError(BUSY)
            if self.lane is None:
                self.lane = machine.MACHINE.lane(device)
            with self.lane.aside():
                own.run()  # sites measure themselves; what the model makes at its first call is there
                self.stamp = stamp_of(own, self.stamp, harmless=self.mode == "auto")
                expected, is_harmless = result_alone(own, self.stamp)
            found = recorded(own, call.tensors, self.lane, self.stamp, expected, places)
            found.is_harmless = is_harmless
            return found

    def _seconds(self, recording: Recording, call: Call) -> tuple[float, float]:
        """Of a call without the recording, and with it and all that is asked around a replay."""
        stamp = self.stamp
        assert stamp is not None

        def replayed() -> Any:
            call.key()
            switches()
            stamp.may_launch(call.root)
            recording.fits(call.tensors)
            result = recording.run(self.lane, call.tensors)
            stamp.holds_beside_places(call.root)
            return result

        put_back = snapshot(call.root)
        try:
            return machine.MACHINE.seconds(call.run, replayed, call.device)  # type: ignore[no-any-return]
        finally:
            put_back()

    def text(self) -> str:
        """For the report."""
        if self.off:
            return f"none: {self.off}"
        kept = [c for c in self.calls.values() if isinstance(c, Recording)]
        reasons = list(dict.fromkeys(c for c in self.calls.values() if isinstance(c, str)))
        if not kept:
            return f"none: {'; '.join(reasons) or self.last_reason or 'no call was seen twice in inference'}"
        calls = [r.text + (f": {_us(r.after)} a call, {_us(r.before)} without" if r.after else "") for r in kept]
        pool = f"{self.lane.held / 2**20:.1f} MiB of memory held"
        return "; ".join([*calls, pool, *(f"not for another call: {reason}" for reason in reasons)])


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"
