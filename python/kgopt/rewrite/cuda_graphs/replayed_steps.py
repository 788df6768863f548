"""A forward of compiled code and its backward, recorded as two CUDA graphs that share memory.

What the backward needs lies in that memory between the replays, so from a forward to its backward there is no room for
another forward: that takes the plain path. Results are copies. Gradients are the recording's own memory where the loop
drops them before the next forward, and copies elsewhere; those of one dtype are parts of one. Where autograd's graph
is kept for a second backward, gradients are computed again from the inputs. Buffers that a forward moves along, such
as running statistics, are written to where they are.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from kgopt.rewrite.cuda_graphs import machine
from kgopt.rewrite.cuda_graphs.effects import random_states
from kgopt.rewrite.cuda_graphs.keys import RefusedError, like
from kgopt.rewrite.cuda_graphs.recording import agree, copier, given_of
from kgopt.torch_private import CAN_COUNT_HOLDERS, copy_each, graph_stays, holders, version_of

LAUNCHES = 1 / 3  # of a step's time, below which nothing is recorded
WAITS = 10  # tenths of a millisecond, for gradients to be dropped
ALIGNMENT = 512  # bytes, as PyTorch's allocator has it: optimizers read several values at once


class Step:
    """A kind of call that records gradients, and its backward."""

    def __init__(
        self,
        run: Callable[..., Any],
        inputs: Sequence[Tensor],
        moving: Sequence[int],
        written: Collection[int],
        lane: Any,
    ) -> None:
        """Runs once on tensors like ``inputs``; of those the ones not ``moving`` are read where they are, and those
        ``written`` may be changed.

        Raises:
            RefusedError: a replay would not do what the call does.
        """
        self.run, self.lane, self.moving = run, lane, moving
        self.lock = threading.Lock()  # of one replay: threads of autograd wait for it
        self.pending: Callable[[], Any] = _nobody  # the forward whose backward may still come
        self.keeps = not CAN_COUNT_HOLDERS  # gradients are there when a forward begins
        self._made: Any = None  # results, with the graph of autograd behind them
        if version_of(inputs[0]) is None:
            raise RefusedError("this torch does not say what a call writes to")
        own = [like(t.detach()) if i in moving else t.detach() for i, t in enumerate(inputs)]
        self.own = [t.requires_grad_(given.requires_grad) for t, given in zip(own, inputs, strict=True)]
        self.written = [self.own[i] for i in written]
        if any(i in moving or inputs[i].requires_grad for i in written):
            raise RefusedError("its forward writes to its arguments")
        self.expected: Any = self._try(inputs[0].device)
        self.keeps = self.keeps or self._has_gradients(inputs)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process parts of torch are gone
            if not machine.MACHINE.is_recording():
                self.lane.settle()

    def _try(self, device: torch.device) -> list[Tensor]:
        """Results and gradients of the plain path; what they are made of is known then."""
        with self.lane.aside(), self._put_back():
            drawn = random_states(device)
            versions = [version_of(t) for t in self.own]
            outputs = self._call()
            for t, before in zip(self.own, versions, strict=True):
                if version_of(t) != before and not any(t is own for own in self.written):
                    raise RefusedError("its forward writes to its arguments")
            self.is_differentiable = [y.requires_grad for y in self._made]
            roots = [y for y in self._made if y.requires_grad]
            if not roots:
                raise RefusedError("none of its results has a gradient")
            self.kept = [i for i in _kept(roots, self.own) if i not in self.moving]
            self.places = [self.own[i].data_ptr() for i in self.kept]
            numbers = torch.Generator(device).manual_seed(0)
            # Behind a norm the gradient of a sum, or of a sum of squares, is nothing but rounding errors.
            self.tangents = [like(y.detach()).normal_(generator=numbers) for y in roots]
            wanted = [t for t in self.own if t.requires_grad]
            found = iter(torch.autograd.grad(roots, wanted, self.tangents, allow_unused=True))
            gradients = [next(found) if t.requires_grad else None for t in self.own]
            self._made = None
            self.gradients = _Gradients(self.own, gradients)
            if random_states(device) != drawn:
                raise RefusedError("it draws random numbers")
            return [*outputs, *(g for g in gradients if g is not None), *(t.clone() for t in self.written)]

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[None]:
        """Buffers are afterwards as they were."""
        before = [t.clone() for t in self.written]
        try:
            yield
        finally:
            with torch.no_grad():
                for t, value in zip(self.written, before, strict=True):
                    t.copy_(value)

    def record(self, room: int) -> None:
        """Both graphs, in as much memory as a step by calls takes if that is enough.

        Raises:
            RefusedError: a replay would not do what the call does.
        """
        with self._put_back():
            self._forward, self.outputs = self.lane.record(self._call, room)
            given_of(self.outputs, self.own, [])  # raises where they share memory
            self._results = [copier(y) for y in self.outputs]
            self._backward, self.buffers = self.lane.record(self._differentiate)
        self._holders = self._count_holders()
        expected, self.expected = self.expected, None
        if not agree(expected, self._replayed()):
            raise RefusedError("a replay gives another result than the call")

    def _call(self) -> list[Tensor]:
        with torch.enable_grad():
            self._made = self.run(*self.own)
        if type(self._made) not in (list, tuple) or not all(isinstance(y, Tensor) for y in self._made):
            raise RefusedError("its result is no list of tensors")
        return [y.detach() for y in self._made]

    def _differentiate(self) -> list[Tensor]:
        made, self._made = self._made, None  # nothing of the graph is kept
        return self.gradients.packed(_gradients(made, self.gradients.wanted(self.own), self.tangents))

    def _replayed(self) -> list[Tensor]:
        with self.lane.turn(), self._put_back():
            self._replay_forward()
            results = [y.clone() for y in self.outputs]
            self._backward()
            found = self.gradients.unpacked([b.clone() for b in self.buffers])
            return [*results, *(g for g in found if g is not None), *(t.clone() for t in self.written)]

    def _replay_forward(self) -> None:
        increment_version(self.written)
        self._forward()

    @property
    def copied(self) -> int:
        """Bytes of the copies that a step gives beside what a step by calls has: of results. Where holders are counted,
        gradients are copied for loops alone that have those of the step before during a forward, replayed or not.
        """
        gradients = [] if CAN_COUNT_HOLDERS else self.buffers
        return sum(t.numel() * t.element_size() for t in (*self.outputs, *gradients))

    def peak(self, device: torch.device) -> int:
        """Bytes that a step by calls takes at its worst."""
        with self._put_back():
            return machine.MACHINE.peak(self._plain, device)  # type: ignore[no-any-return]

    def is_busy(self, device: torch.device) -> bool:
        """Whether the work of a step takes much longer than its launches."""
        with self._put_back():
            return bool(machine.MACHINE.is_busy(self._plain, device, 0.0, LAUNCHES))

    def seconds(self, check: Callable[[], Any], device: torch.device) -> tuple[float, float]:
        """Of a step by calls, and by replays with ``check`` before it and all that the host does."""

        def replayed() -> None:
            check()
            made = self(self.own)
            assert made is not None, "no other call is under way"
            _gradients(made, self.gradients.wanted(self.own), self.tangents)

        with self._put_back():
            return machine.MACHINE.seconds(self._plain, replayed, device)  # type: ignore[no-any-return]

    def _plain(self) -> None:
        with torch.enable_grad():
            made = self.run(*self.own)
        _gradients(made, self.gradients.wanted(self.own), self.tangents)

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """The results; None while the backward of an earlier call may still come, or somebody holds gradients that lie
        in the recording.
        """
        with self.lock:
            if self.pending() is not None:
                return None
            is_lent = self._is_lent()
            self.keeps = self.keeps or is_lent or self._has_gradients(inputs)
            if is_lent:
                return None
            turn = _Turn()
            self.pending = weakref.ref(turn)
        return _Replay.apply(self, turn, *inputs)  # type: ignore[no-untyped-call]

    def _is_lent(self) -> bool:
        """Whether somebody holds gradients that lie in the recording. A thread of autograd may hold the last one for a
        moment after its backward.
        """
        for _ in range(WAITS):
            if self._count_holders() == self._holders:
                return False
            time.sleep(1e-4)
        return True

    def _count_holders(self) -> list[int]:
        return [holders(b) for b in self.buffers] if CAN_COUNT_HOLDERS else []

    def _leaves(self, inputs: Sequence[Tensor]) -> Iterator[Tensor]:
        """The inputs whose gradients autograd adds up."""
        return (t for t in self.gradients.wanted(inputs) if t.is_leaf)

    def _has_gradients(self, inputs: Sequence[Tensor]) -> bool:
        return any(t.grad is not None for t in self._leaves(inputs))

    def holds(self) -> bool:
        """Whether what the backward reads lies where it was recorded: sharded parameters may be gathered anew."""
        return [self.own[i].data_ptr() for i in self.kept] == self.places

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the results."""
        with self.lock, self.lane.turn():
            for i in self.moving:
                self.own[i].copy_(inputs[i])
            self._replay_forward()
            return [copy(y) for copy, y in zip(self._results, self.outputs, strict=True)]

    def backward(self, inputs: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients that belong to the last forward. Copies, where some become gradients that stay: those that are
        added to others are gone with the backward.
        """
        copies = self.keeps and (not CAN_COUNT_HOLDERS or any(t.grad is None for t in self._leaves(inputs)))
        with self.lock, self.lane.turn():
            for own, given in zip(self.tangents, self._of_differentiable(tangents), strict=True):
                if given is None:
                    own.zero_()
                else:
                    own.copy_(given)
            self._backward()
            found = self.gradients.unpacked([b.clone() for b in self.buffers] if copies else self.buffers)
            self.pending = _nobody
        return found

    def backward_again(self, inputs: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients by another call; no replay is touched.

        Raises:
            RuntimeError: that would move buffers along once more.
        """
        if self.written:
            raise RuntimeError(
                "behind a replayed call that changes buffers, as BatchNorm does, neither retain_graph=True nor "
                'parameters that move are possible; compile it with options={"kgopt.cuda_graph": False}'
            )
        with torch.enable_grad():
            own = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
            made = self.run(*own)
        roots = [y for y in made if y.requires_grad]
        pairs = zip(roots, self._of_differentiable(tangents), strict=True)
        given = [torch.zeros_like(y) if g is None else g for y, g in pairs]
        found = iter(_gradients(roots, self.gradients.wanted(own), given))
        return [None if place is None else next(found) for place in self.gradients.places]

    def _of_differentiable(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [g for g, has_one in zip(tangents, self.is_differentiable, strict=True) if has_one]


class _Turn:
    """Of one forward: it is gone when nothing can ask for the backward any more."""


def _nobody() -> None:
    """No forward."""


class _Replay(torch.autograd.Function):
    """The node of a replayed call."""

    @staticmethod
    def forward(ctx: Any, step: Step, turn: _Turn, *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.turn, ctx.inputs = step, turn, inputs
        made = step.forward(inputs)
        ctx.versions = [version_of(t) for t in inputs]
        ctx.mark_non_differentiable(*(y for y, has in zip(made, step.is_differentiable, strict=True) if not has))
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        step, turn, inputs = ctx.step, ctx.turn, ctx.inputs
        if inputs is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: what it kept is freed. Specify retain_graph=True "
                "if you need to backward through the graph a second time."
            )
        again = graph_stays() or step.pending() is not turn or not step.holds()
        # A replay reads copies of the other inputs, and of parameters those that compiled code keeps.
        places = range(len(inputs)) if again else step.kept
        now, before = [version_of(inputs[i]) for i in places], [ctx.versions[i] for i in places]
        if now != before:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"inputs of compiled code are at versions {now}, expected {before}"
            )
        found = step.backward_again(inputs, tangents) if again else step.backward(inputs, tangents)
        if not graph_stays():
            ctx.inputs = ctx.turn = None
        return None, None, *found


class _Gradients:
    """Where gradients lie: in one buffer a dtype, each with the strides of its tensor, without gaps in it."""

    def __init__(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """``gradients``: None for a tensor that never has one."""
        self.places: list[tuple[torch.dtype, Any, Any, int] | None] = []
        sizes: dict[torch.dtype, int] = {}
        for t, gradient in zip(tensors, gradients, strict=True):
            if gradient is None:
                self.places.append(None)
                continue
            at, step = sizes.get(t.dtype, 0), ALIGNMENT // t.element_size()
            self.places.append((t.dtype, t.shape, torch.empty_like(t, device="meta").stride(), at))
            sizes[t.dtype] = at + -(-t.numel() // step) * step
        self.sizes, self.device = sizes, tensors[0].device
        self.order = {dtype: i for i, dtype in enumerate(sizes)}

    def wanted(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of the tensors that have a gradient."""
        return [t for t, place in zip(tensors, self.places, strict=True) if place is not None]

    def packed(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Buffers with these values. Those of a recording are memory that its forward has used."""
        buffers = [torch.empty(n, dtype=dtype, device=self.device) for dtype, n in self.sizes.items()]
        copy_each([part for part in self.unpacked(buffers) if part is not None], list(gradients))
        return buffers

    def unpacked(self, buffers: Sequence[Tensor]) -> list[Tensor | None]:
        """Parts of the buffers."""
        order = self.order
        return [p and buffers[order[p[0]]].as_strided(p[1], p[2], p[3]) for p in self.places]


def _gradients(made: Sequence[Tensor], wanted: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad([y for y in made if y.requires_grad], wanted, tangents)


def _kept(roots: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[int]:
    """Which inputs the graph of autograd behind ``roots`` keeps."""
    seen: set[Any] = set()
    waiting = [y.grad_fn for y in roots]
    places: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [behind for behind, _ in node.next_functions]
            places.update(t.data_ptr() for t in _kept_by(node))
    return [i for i, t in enumerate(inputs) if t.data_ptr() in places]


def _kept_by(node: Any) -> Iterator[Tensor]:
    """The tensors that a node of autograd, of Python or of C++, keeps."""
    names = ["saved_tensors"] if hasattr(node, "saved_tensors") else [n for n in dir(node) if n.startswith("_saved_")]
    for name in names:
        value = getattr(node, name)
        yield from (t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor))
