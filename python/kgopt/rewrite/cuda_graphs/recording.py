"""Recording one call: it runs some times to show that a replay will do, is captured, and its replay is compared.

A call that a replay would not do for is refused, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite.cuda_graphs import machine
from kgopt.rewrite.cuda_graphs.effects import Looking, is_integer, random_states
from kgopt.rewrite.cuda_graphs.keys import RefusedError, key_of, leaves, like, places_of, staying, with_tensors
from kgopt.rewrite.cuda_graphs.outside import Listener
from kgopt.rewrite.cuda_graphs.stamp import Stamp
from kgopt.torch_private import borrowed, dispatch_mode, version_of


class ChangesError(RefusedError):
    """Of a model whose calls change it: what it holds would be another at each call."""

    def __init__(self) -> None:
        super().__init__("its forward changes what the model holds")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a model."""

    forward: Callable[..., Any]
    root: nn.Module
    args: Any
    kwargs: Any
    tensors: list[Tensor]  # among the arguments, each once

    def run(self) -> Any:
        """Its result."""
        return self.forward(self.root, *self.args, **self.kwargs)

    def on(self, tensors: list[Tensor]) -> Call:
        """The same call on other tensors."""
        other = {id(given): t for given, t in zip(self.tensors, tensors, strict=True)}
        args, kwargs = (with_tensors(v, lambda t: other[id(t)]) for v in (self.args, self.kwargs))
        return Call(self.forward, self.root, args, kwargs, tensors)

    def key(self) -> Any:
        """Of its arguments."""
        return key_of((self.args, self.kwargs), [])

    def versions(self) -> list[int | None]:
        """How often each of its tensors was written to."""
        return [version_of(t) for t in self.tensors]

    @property
    def device(self) -> torch.device:
        """Where it runs.

        Raises:
            RefusedError: its tensors are on several devices.
        """
        first, *others = dict.fromkeys(t.device for t in self.tensors)
        if others:
            raise RefusedError("its arguments are on several devices")
        return first


@dataclasses.dataclass(frozen=True)
class Seen:
    """A kind of call that is recorded when it comes again."""

    places: Sequence[int] = ()  # where its tensors lay
    pays: bool = False  # it was recorded before, with copies, and that was worth it
    before: float = 0.0  # seconds of a call without and with that
    after: float = 0.0


class Recording:
    """One kind of call."""

    def __init__(
        self,
        replay: Callable[[], None],
        inputs: list[Tensor],
        outputs: Any,
        given: dict[int, int],
        places: Mapping[int, int],
    ) -> None:
        """``given``: of outputs that are inputs, by id: which; ``places``: of inputs that are read where they are, by
        number: where. Of those nothing is held.
        """
        self.replay = replay
        self._copied = [(i, t) for i, t in enumerate(inputs) if i not in places]
        self.places = dict(places)
        self.outputs = outputs
        # Of each tensor among the outputs which input it is, and what copies it with its strides.
        self._results = [(t, given.get(id(t)), copier(t)) for t in leaves(outputs)]
        # A list of tensors is what compiled code gives: a replay of theirs is a matter of microseconds.
        is_flat = type(outputs) in (list, tuple) and all(isinstance(t, Tensor) for t in outputs)
        self._is_list = is_flat and not given and len(self._results) == len(outputs)
        self._is_tensor = type(outputs) is Tensor and not given
        shapes = ", ".join("x".join(map(str, t.shape)) or "scalar" for t in inputs)
        self.text = f"({shapes}) {inputs[0].dtype}".replace("torch.", "")  # for the report
        self.is_harmless = False  # where the model is another one by now, too: its result is dropped then
        self.before = self.after = 0.0  # seconds of a call without and with it
        self.pays = False  # with copies of all tensors, too
        self.watched = 0  # calls from now on, each of which shows whether tensors stay where they are
        self._lay: Sequence[int] = ()  # where they were at the last of those

    def fits(self, tensors: list[Tensor]) -> bool:
        """Whether those that it reads where they are lie there."""
        return all([tensors[i].data_ptr() == place for i, place in self.places.items()])

    def again(self, tensors: list[Tensor], counts: bool) -> Seen | None:
        """Whether it is to be recorded again, and how: once with copies of all tensors, where one lies elsewhere;
        before that once without copies of those that stay. ``counts``: the call shows whether they do.
        """
        if self.places:
            return None if self.fits(tensors) else Seen((), self.pays, self.before, self.after)
        if self.watched and counts:
            self.watched -= 1
            before, self._lay = self._lay, places_of(tensors)
            if staying(before, self._lay):
                return Seen(before, self.pays, self.before, self.after)
        return None

    def run(self, lane: Any, tensors: list[Tensor]) -> Any:
        """The results for these tensors, which the next call leaves alone."""
        with lane.turn():
            for i, own in self._copied:
                own.copy_(tensors[i])
            self.replay()
            if self._is_tensor:
                return self._results[0][2](self.outputs)
            if self._is_list:
                return type(self.outputs)([copy(t) for t, _, copy in self._results])
            made = {id(t): copy(t) if at is None else tensors[at] for t, at, copy in self._results}
            return with_tensors(self.outputs, lambda t: made[id(t)])


def copier(t: Tensor) -> Callable[[Tensor], Tensor]:
    """What copies tensors like this one with their strides."""
    return Tensor.clone if torch.empty_like(t, device="meta").stride() == t.stride() else like


def check_that_calls_can_be_seen(call: Call) -> None:
    """Raises RefusedError where this torch does not show what a call does."""
    if dispatch_mode is None or version_of(call.tensors[0].detach().clone()) is None:
        raise RefusedError("this torch does not say what a call does")


def stamp_of(call: Call, stamp: Stamp | None, harmless: bool) -> Stamp:
    """A stamp that watches what the code of a call reads, too: ``stamp``, where it does.

    ``harmless``: a call that prints, asks for the time, or does not show what it does, is refused.
    """
    with Listener() as listener:
        call.run()
    if listener.writes:
        raise RefusedError(f"its forward writes to {listener.writes}, a variable outside of it")
    if harmless and (listener.effect or listener.is_blind):
        raise RefusedError(listener.effect or "this thread is profiled, so what its forward does is not seen")
    codes = stamp.codes if stamp is not None else {}
    if stamp is not None and not listener.codes.keys() - codes.keys():
        return stamp
    return Stamp(call.root, codes | listener.codes)


def result_alone(call: Call, stamp: Stamp) -> tuple[Any, bool]:
    """The result of a call, repeated to see that it does nothing else; whether a replay for nothing does no harm.

    Kernels that no op launches are not seen; of them those count that may get integers.
    """
    if stamp.why:
        raise RefusedError(stamp.why)
    if len({*stamp.devices, call.device}) > 1:
        raise RefusedError("its tensors are on several devices")
    if not stamp.holds(call.root):
        raise ChangesError
    values, key, versions = [t.clone() for t in call.tensors], call.key(), call.versions()
    held, drawn = stamp.versions(), random_states(call.device)
    result = call.run()
    looking = Looking()
    with looking.mode():
        call.run()
    if looking.why:
        raise RefusedError(looking.why)
    if stamp.versions() != held or not stamp.holds(call.root):
        raise ChangesError
    same = all(torch.equal(_bits(a), _bits(b)) for a, b in zip(values, call.tensors, strict=True))
    if call.versions() != versions or not same or call.key() != key:
        raise RefusedError("its forward writes to its arguments")
    if random_states(call.device) != drawn:
        raise RefusedError("its forward draws random numbers")
    return result, looking.is_harmless and not any(map(is_integer, call.tensors))


def _bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(-1).view(torch.uint8)


def recorded(
    call: Call, tensors: list[Tensor], lane: Any, stamp: Stamp, expected: Any, places: Mapping[int, int]
) -> Recording:
    """What replays a call on tensors of its own; of ``tensors`` a replay gives ``expected``.

    ``places``: those of ``tensors`` that are read where they are, by number.
    """
    call = call.on([borrowed(tensors[i]) if i in places else own for i, own in enumerate(call.tensors)])
    replay, outputs = lane.record(call.run)
    if not stamp.holds(call.root):
        raise ChangesError
    found = Recording(replay, call.tensors, outputs, given_of(outputs, call.tensors, stamp.tensors), places)
    if not agree(expected, found.run(lane, tensors)):
        raise RefusedError("a replay gives another result than the call")
    return found


def given_of(outputs: Any, tensors: list[Tensor], held: list[Tensor]) -> dict[int, int]:
    """Of results that are arguments, by id: which of them; ``held``: the model's own tensors.

    Raises:
        RefusedError: a result that cannot be copied without a difference.
    """
    places = {t.untyped_storage().data_ptr() for t in (*tensors, *held)}
    own: set[int] = set()
    given = {}
    for t in leaves(outputs):
        at = next((i for i, own in enumerate(tensors) if own is t), None)
        if at is not None:
            given[id(t)] = at
        elif type(t) is not Tensor or not machine.MACHINE.takes(t) or t.requires_grad or t.is_conj() or t.is_neg():
            raise RefusedError("its result is no plain tensor on the GPU")
        elif t.numel() and t.untyped_storage().data_ptr() in places:
            raise RefusedError("its result shares memory with its arguments or parameters")
        elif t.numel() and t.untyped_storage().data_ptr() in own:
            raise RefusedError("two of its results share memory")
        else:
            own.add(t.untyped_storage().data_ptr())
            like(t)
    return given


def agree(expected: Any, result: Any) -> bool:
    """Whether results are equal up to what kernels that sum in another order make of them."""
    pairs = list(zip(leaves(expected), leaves(result), strict=False))
    for a, b in pairs:
        if a.shape != b.shape or a.dtype is not b.dtype:
            return False
        if not a.dtype.is_floating_point:
            if not torch.equal(a, b):
                return False
            continue
        a, b = a.double(), b.double()
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return False
        a, b = a[finite], b[finite]
        if a.numel() and not float((a - b).norm()) <= 0.02 * float(a.norm()):
            return False
    return len(leaves(expected)) == len(leaves(result))
