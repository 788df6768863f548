"""Results of norms that the backward computes again instead of keeping them.

What a norm and its activation give is kept by the convolution behind it, for the gradient of its weight. It is one
read and one write away from the norm's input, which the norm's own gradient needs anyway. The same holds for the sum
behind a norm, and for a concatenation of such results. So while the forward of a root runs with gradients, each site
says which of its results can be had again, and from what (:meth:`Forward.offer`). Hooks for saved tensors
(``torch.autograd.graph.saved_tensors_hooks``) keep that recipe wherever autograd wants to keep such a result, whoever
wants it. The backward gets the same bits from the same op, once for all nodes that follow each other. All else is
kept as without hooks, and norms that are given no such result keep theirs without calling one.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kgopt import torch_private
from kgopt.rewrite.optimized import classes, known
from kgopt.rewrite.optimized.classes import Part
from kgopt.rewrite.pytorch.watching import is_watched
from kgopt.torch_private import current_graph_task, current_stream, may_hook_saved_tensors, version_of

_PLAIN, _STRIDED = (Tensor, nn.Parameter), torch.strided
DEPTH = 3  # results that stand one on the other: a chain of sums would be computed again from its start, block by block


@dataclass
class Recompute:
    """What the root of such a model knows."""

    enabled: bool = True
    results: int = 0  # that the last call did not keep
    bytes: int = 0  # of them


_Kept = tuple[Tensor, "int | None"]
"""A tensor that the backward needs, as autograd keeps it without hooks: its version tells of an in-place change."""


def _kept(t: Tensor) -> _Kept:
    # What a node gave must not hold the node; a parameter comes from none.
    return t if type(t) is nn.Parameter and t.is_leaf else t.detach(), version_of(t)


def _value(kept: _Kept | _Recipe | _View, is_operand: bool = False) -> Tensor:
    """The tensor; ``is_operand``: of a recipe.

    Raises:
        RuntimeError: it was written to meanwhile.
    """
    if type(kept) is not tuple:
        return kept.value(is_operand)  # type: ignore[union-attr]
    t, version = kept
    if version_of(t) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{t.type()} {list(t.shape)}] is at version {version_of(t)}; expected version {version} instead"
        )
    return t


class _Held(NamedTuple):
    """A result between the first node of a backward that wants it and the last one."""

    y: Tensor
    version: int | None
    backward: tuple[int, int]  # and its stream
    left: int  # nodes that are still to come


class _Recipe:
    """A result that is computed again from what is kept.

    Nodes of a backward that want it follow each other closely: where a sum is a block's input, the norm at the end of
    the block comes first, the convolution at its start last. So it is computed for the first of them and held until the
    last. A recipe of which it is an operand, a concatenation's for one, may be asked for long before: it has no result
    held, and takes the one that is there.
    """

    __slots__ = ("again", "contiguous", "depth", "device", "held", "operands", "slots")

    def __init__(
        self, again: Callable[..., Tensor], operands: list[Any], depth: int, contiguous: bool, device: torch.device
    ) -> None:
        self.again, self.operands, self.depth, self.contiguous = again, operands, depth, contiguous
        self.device = device
        self.slots = 0  # in which nodes keep it: each is read once by a whole backward
        self.held: _Held | None = None

    @property
    def recipe(self) -> _Recipe:
        """Itself, as a view's is another."""
        return self

    def value(self, is_operand: bool = False) -> Tensor:
        """The result, as it was made. ``is_operand``: of another recipe.

        What a node that never runs would have read goes with the graph, or with the next backward. Of threads that read
        at once each may compute it.
        """
        if torch.is_grad_enabled():  # a backward with a graph
            with torch.no_grad():
                return self.value(is_operand)
        backward = self._backward() if self.slots > 1 else None
        if backward is None:
            return self._computed()
        held = self.held
        if held is None or held.backward != backward or version_of(held.y) != held.version:  # a node wrote to it
            held = self.held = None
        if is_operand:
            return self._computed() if held is None else held.y
        y, left = (self._computed(), self.slots) if held is None else (held.y, held.left)
        version = version_of(y)
        self.held = _Held(y, version, backward, left - 1) if left > 1 and version is not None else None
        return y

    def _computed(self) -> Tensor:
        y = self.again(*[None if o is None else _value(o, True) for o in self.operands])
        return y.contiguous() if self.contiguous else y

    def _backward(self) -> tuple[int, int] | None:
        """Which backward asks, and on which stream; None outside of any."""
        task = current_graph_task()
        if task < 0:
            return None
        return task, current_stream(self.device.index) if self.device.type == "cuda" else 0


class _View:
    """A view of a result that is computed again."""

    __slots__ = ("recipe", "shape", "start", "strides")

    def __init__(self, recipe: _Recipe, t: Tensor) -> None:
        self.recipe, self.shape, self.strides, self.start = recipe, t.shape, t.stride(), t.storage_offset()

    @property
    def depth(self) -> int:
        """Of its recipe."""
        return self.recipe.depth

    def value(self, is_operand: bool = False) -> Tensor:
        """The tensor."""
        y = self.recipe.value(is_operand)
        if y.shape == self.shape and y.stride() == self.strides:
            return y
        return y.as_strided(self.shape, self.strides, self.start)


_AGAIN = _Recipe, _View


class Forward:
    """The forward of a root: what can be had again, by where it lies."""

    def __init__(self, state: Recompute) -> None:
        self.state = state
        self.offered: dict[int, tuple[Any, int | None, _Recipe]] = {}
        self.kept: set[int] = set()  # where tensors lie that nodes keep; while they do, nobody else has that memory
        self.largest = 0  # bytes of a result of a norm

    def found(self, t: Tensor) -> _Recipe | _View | None:
        """How a tensor can be had again; None, if it cannot."""
        if not self.offered or type(t) not in _PLAIN or t.layout is not _STRIDED:
            return None
        offer = self.offered.get(t.untyped_storage().data_ptr())
        if offer is None:
            return None
        of, version, recipe = offer
        y = of()
        if y is None or version_of(y) != version:  # while it is alive nobody else has its memory
            return None
        if y is t:
            return recipe
        return _View(recipe, t) if t.dtype is y.dtype and version_of(t) == version else None

    def offer(
        self, y: Tensor, made: Any, again: Callable[..., Tensor], operands: Sequence[Any], alone: int = 0
    ) -> None:
        """Says that ``again(*operands)`` gave ``made``, which the code goes on with as ``y``.

        An operand is a tensor, None, or what :meth:`found` says of one. Autograd keeps the operands anyway where a
        gradient goes through y, but the last ``alone`` of them; unless those are computed again themselves, or another
        node keeps them, they would be kept instead of y.
        """
        if _may_go(y):
            self.largest = max(self.largest, y.nbytes)
            self._offer(y, again, operands, alone, 1, y is not made)

    def offer_join(self, y: Tensor, again: Callable[..., Tensor], parts: tuple[Tensor, ...]) -> None:
        """The same of ``again(*parts)``, a concatenation; not of one that is larger than all results before it.

        When the gradients behind it are computed, it is there again with its parts and its own gradient: of the largest
        one that would be the peak.
        """
        if _may_go(y) and y.nbytes <= self.largest:
            self._offer(y, again, [self.found(t) or t for t in parts], len(parts), 0, False)

    def offer_copy(self, y: Tensor, again: Callable[..., Tensor], of: Tensor) -> None:
        """The same of ``again(of)``, a parameter's copy in another dtype."""
        if _may_go(y):
            self._offer(y, again, [of], 0, 0, False)

    def _offer(
        self, y: Tensor, again: Callable[..., Tensor], operands: Sequence[Any], alone: int, step: int, contiguous: bool
    ) -> None:
        rest = [o for o in operands[len(operands) - alone :] if not (o is None or isinstance(o, _AGAIN))]
        rest = [t for t in rest if t.untyped_storage().data_ptr() not in self.kept]
        if rest and sum(t.nbytes for t in rest) >= y.nbytes:
            return
        depth = step + max([o.depth for o in operands if isinstance(o, _AGAIN)], default=0)
        if depth <= DEPTH:
            kept = [o if o is None or isinstance(o, _AGAIN) else _kept(o) for o in operands]
            recipe = _Recipe(again, kept, depth, contiguous, y.device)
            self.offered[y.untyped_storage().data_ptr()] = weakref.ref(y), version_of(y), recipe


def _may_go(y: Tensor) -> bool:
    return y.grad_fn is not None and y.numel() > 0 and not y.storage_offset()


class _Now(threading.local):
    """The forward that runs in this thread."""

    forward: Forward | None = None


_now = _Now()


def now() -> Forward | None:
    """Who wants an :meth:`~Forward.offer`; None: nobody."""
    return _now.forward


def _pack(t: Tensor) -> _Kept | _Recipe | _View:
    """What is kept in place of a tensor: all that nodes in the model keep comes here."""
    if type(t) is nn.Parameter and t.is_leaf:  # the usual case
        return t, version_of(t)
    forward = _now.forward
    found = None if forward is None else forward.found(t)
    if forward is None or found is None:
        if forward is not None and t.layout is _STRIDED and type(t) in _PLAIN:
            forward.kept.add(t.untyped_storage().data_ptr())
        return _kept(t)
    recipe = found.recipe
    recipe.slots += 1
    if recipe.slots == 1:
        forward.state.results += 1
        forward.state.bytes += t.nbytes
    return found


_HOOKS = _pack, _value


def without_hooks(op: Callable[..., Tensor], *args: Any) -> Tensor:
    """``op(*args)``, at which the hooks do not look."""
    return torch_private.unhooked(_HOOKS, op, *args)  # type: ignore[no-any-return]


def wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, of whose norms the backward computes the results again."""

    @functools.wraps(forward)
    def recomputing_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        state: Recompute | None = known.get(self, "recompute")
        if state is None or not state.enabled or _now.forward is not None:
            return forward(self, *args, **kwargs)
        # Hooks of others keep what they want to keep, a checkpoint's nothing at all.
        if is_watched() or not may_hook_saved_tensors():
            return forward(self, *args, **kwargs)
        state.results = state.bytes = 0
        _now.forward = Forward(state)
        try:
            with torch.autograd.graph.saved_tensors_hooks(*_HOOKS):
                return forward(self, *args, **kwargs)
        finally:
            _now.forward = None

    return recomputing_forward


def set_mode(root: nn.Module, on: bool) -> str:
    """Turns it on or off. Returns why it cannot be on."""
    original, recipe = classes.recipe_of(root)
    without = tuple(part for part in recipe if part[0] != "recompute")
    if not on:
        if len(without) < len(recipe):
            classes.give(root, original, without)
            known.drop(root, "recompute")
        return ""
    if ("leaf",) in recipe:
        return "a norm alone has nothing behind it"
    return classes.give(root, original, (*without, ("recompute",)), recompute=Recompute())


def text_of(root: nn.Module, said: str) -> str:
    """What the report says; ``said``: when it was turned on or off."""
    state: Recompute | None = known.get(root, "recompute")
    if state is None:
        return said
    parts = [said] if said else []
    parts += [f"{state.results} results, {state.bytes / 2**20:.1f} MiB, of the last call"] if state.results else []
    return "; ".join(parts) or "no result yet"


classes.add_part("recompute", Part(wrap=lambda _, forward: wrapped_forward(forward), place=4))
