"""Results of norms that the backward computes again instead of keeping them.

What a norm and its activation give is kept by the convolution behind it, for the gradient of its weight. It is one
read and one write away from the norm's input, which the norm's own gradient needs anyway. The same holds for the sum
behind a norm, and for a concatenation of such results. So while the forward of a root runs with gradients, each site
says which of its results can be had again, and from what (:meth:`Forward.offer`). Hooks for saved tensors
(``torch.autograd.graph.saved_tensors_hooks``) keep that recipe wherever autograd wants to keep such a result, whoever
wants it. The backward gets the same bits from the same op. All else is kept as without hooks, and norms that are given
no such result keep theirs without calling one.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kgopt import torch_private
from kgopt.rewrite import classes, known
from kgopt.rewrite.classes import Part
from kgopt.rewrite.watching import is_watched
from kgopt.torch_private import may_hook_saved_tensors, version_of

_PLAIN, _STRIDED = (Tensor, nn.Parameter), torch.strided
DEPTH = 2  # results that stand one on the other: a chain of sums would be computed again from its start, block by block


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


def _value(kept: _Kept | _Recipe | _View) -> Tensor:
    """The tensor.

    Raises:
        RuntimeError: it was written to meanwhile.
    """
    if type(kept) is not tuple:
        return kept.value()  # type: ignore[union-attr]
    t, version = kept
    if version_of(t) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{t.type()} {list(t.shape)}] is at version {version_of(t)}; expected version {version} instead"
        )
    return t


class _Recipe:
    """A result that is computed again from what is kept."""

    __slots__ = ("again", "contiguous", "depth", "is_counted", "operands")

    def __init__(self, again: Callable[..., Tensor], operands: list[Any], depth: int, contiguous: bool) -> None:
        self.again, self.operands, self.depth, self.contiguous = again, operands, depth, contiguous
        self.is_counted = False

    def value(self) -> Tensor:
        """The result, once more: as it was made, in memory of its own."""
        if torch.is_grad_enabled():  # a backward with a graph
            with torch.no_grad():
                return self.value()
        y = self.again(*[None if o is None else _value(o) for o in self.operands])
        return y.contiguous() if self.contiguous else y


class _View:
    """A view of a result that is computed again."""

    __slots__ = ("recipe", "shape", "start", "strides")

    def __init__(self, recipe: _Recipe, t: Tensor) -> None:
        self.recipe, self.shape, self.strides, self.start = recipe, t.shape, t.stride(), t.storage_offset()

    @property
    def depth(self) -> int:
        """Of its recipe."""
        return self.recipe.depth

    def value(self) -> Tensor:
        """The tensor."""
        y = self.recipe.value()
        if y.shape == self.shape and y.stride() == self.strides:
            return y
        return y.as_strided(self.shape, self.strides, self.start)


class Forward:
    """The forward of a root: what can be had again, by where it lies."""

    def __init__(self, state: Recompute) -> None:
        self.state = state
        self.offered: dict[int, tuple[Any, int | None, _Recipe]] = {}
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
        self, y: Tensor, made: Any, again: Callable[..., Tensor], kept: tuple[Any, ...], more: tuple[Any, ...] = ()
    ) -> None:
        """Says that ``again(*kept, *more)`` gave ``made``, which the code goes on with as ``y``.

        ``kept``: tensors, or None, that autograd keeps anyway where a gradient goes through y. ``more``: those that it
        does not; unless they are computed again themselves, they would be kept instead of y.
        """
        if _may_go(y):
            self.largest = max(self.largest, y.nbytes)
            self._offer(y, again, kept, more, 1, y is not made)

    def offer_join(self, y: Tensor, again: Callable[..., Tensor], parts: tuple[Tensor, ...]) -> None:
        """The same of ``again(*parts)``, a concatenation; not of one that is larger than all results before it.

        When the gradients behind it are computed, it is there again with its parts and its own gradient: of the largest
        one that would be the peak.
        """
        if _may_go(y) and y.nbytes <= self.largest:
            self._offer(y, again, (), parts, 0, False)

    def _offer(
        self,
        y: Tensor,
        again: Callable[..., Tensor],
        kept: tuple[Any, ...],
        more: tuple[Any, ...],
        step: int,
        contiguous: bool,
    ) -> None:
        operands = [None if t is None else self._operand(t) for t in kept + more]
        if more and sum(o[0].nbytes for o in operands[len(kept) :] if type(o) is tuple) >= y.nbytes:
            return
        depth = step + max([o.depth for o in operands if isinstance(o, (_Recipe, _View))], default=0)
        if depth <= DEPTH:
            recipe = _Recipe(again, operands, depth, contiguous)
            self.offered[y.untyped_storage().data_ptr()] = weakref.ref(y), version_of(y), recipe

    def _operand(self, t: Tensor) -> _Kept | _Recipe | _View:
        found = None if type(t) is nn.Parameter else self.found(t)
        return _kept(t) if found is None else found

    def unhooked(self, op: Callable[..., Tensor], x: Tensor, other: Tensor, *args: Any) -> Tensor:
        """``op(x, other, *args)``, whose node keeps without hooks what cannot be had again.

        The node of a norm keeps five tensors, and each call of a hook costs the host microseconds.
        """
        if self.found(x) is None and self.found(other) is None:
            return without_hooks(op, x, other, *args)
        return op(x, other, *args)


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
        return _kept(t)
    recipe = found.recipe if isinstance(found, _View) else found
    if not recipe.is_counted:
        recipe.is_counted = True
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
