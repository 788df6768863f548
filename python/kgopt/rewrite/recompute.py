"""Results of norms that the backward computes again instead of keeping them.

What a norm and its activation give is kept by the convolution behind it, for the gradient of its weight. It is one
read and one write away from the norm's input, which the norm's own gradient needs anyway. The same holds for the sum
behind a norm, and for a concatenation of such results. So while the forward of a root runs with gradients, each site
says which of its results can be had again, and from what (:func:`offer`); hooks for saved tensors
(``torch.autograd.graph.saved_tensors_hooks``) keep that recipe wherever autograd wants to keep such a result, whoever
wants it. The backward gets the same bits from the same op. All else is kept as without hooks.
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

from kgopt.rewrite import classes, known
from kgopt.rewrite.classes import Part
from kgopt.rewrite.watching import is_watched
from kgopt.torch_private import may_hook_saved_tensors, version_of

_PLAIN = (Tensor, nn.Parameter)
DEPTH = 2  # results that stand one on the other: a chain of sums would be computed again from its start, block by block


@dataclass
class Recompute:
    """What the root of such a model knows."""

    enabled: bool = True
    results: int = 0  # that the last call did not keep
    bytes: int = 0  # of them


class _Kept:
    """A tensor that the backward needs, as autograd keeps it without hooks: an in-place change is noticed."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # what a node gave must not hold the node
        self.version = version_of(tensor)

    def value(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was written to meanwhile.
        """
        t = self.tensor
        if version_of(t) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{t.type()} {list(t.shape)}] is at version {version_of(t)}; expected version {self.version} instead"
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
        with torch.no_grad():
            y = self.again(*(None if o is None else o.value() for o in self.operands))
            return y.contiguous() if self.contiguous else y


class _View:
    """A result, or a view of it, that is computed again."""

    __slots__ = ("recipe", "shape", "start", "strides")

    def __init__(self, recipe: _Recipe, t: Tensor) -> None:
        self.recipe, self.shape, self.strides, self.start = recipe, t.shape, t.stride(), t.storage_offset()

    def value(self) -> Tensor:
        """The tensor."""
        y = self.recipe.value()
        if y.shape == self.shape and y.stride() == self.strides:
            return y
        return y.as_strided(self.shape, self.strides, self.start)


class _Results(threading.local):
    """Of the forward that runs in this thread: what can be had again, by where it lies; None: in no such forward."""

    offered: dict[int, tuple[Any, int | None, _Recipe]] | None = None
    largest: int = 0  # bytes of one of them
    state: Any = None


_now = _Results()


def offer(
    y: Tensor, made: Any, again: Callable[..., Tensor], kept: tuple[Any, ...], more: tuple[Any, ...] = ()
) -> None:
    """Says that ``again(*kept, *more)`` gave ``made``, which the code goes on with as ``y``.

    ``kept``: tensors, or None, that autograd keeps anyway where a gradient goes through y. ``more``: those that it does
    not; unless they are computed again themselves, they would be kept instead of y.
    """
    if _now.offered is not None and _may_go(y):
        _now.largest = max(_now.largest, y.nbytes)
        _offer(y, again, kept, more, 1, y is not made)


def offer_join(y: Tensor, again: Callable[..., Tensor], parts: tuple[Tensor, ...]) -> None:
    """The same of ``again(*parts)``, a concatenation; not of one that is larger than all results before it.

    When the gradients behind it are computed, it is there again with its parts and its own gradient: of the largest one
    that would be the peak.
    """
    if _now.offered is not None and _may_go(y) and y.nbytes <= _now.largest:
        _offer(y, again, (), parts, 0, False)


def _may_go(y: Tensor) -> bool:
    return y.grad_fn is not None and y.numel() > 0 and not y.storage_offset()


def _offer(
    y: Tensor, again: Callable[..., Tensor], kept: tuple[Any, ...], more: tuple[Any, ...], step: int, contiguous: bool
) -> None:
    assert _now.offered is not None
    operands = [None if t is None else _pack(t) for t in kept + more]
    if more and sum(o.tensor.nbytes for o in operands[len(kept) :] if type(o) is _Kept) >= y.nbytes:
        return
    depth = step + max([o.recipe.depth for o in operands if type(o) is _View], default=0)
    if depth <= DEPTH:
        recipe = _Recipe(again, operands, depth, contiguous)
        _now.offered[y.untyped_storage().data_ptr()] = weakref.ref(y), version_of(y), recipe


def is_open() -> bool:
    """Whether anybody wants an :func:`offer`."""
    return _now.offered is not None


def _pack(t: Tensor) -> _Kept | _View:
    """What is kept in place of a tensor."""
    if not _now.offered or type(t) not in _PLAIN or t.layout is not torch.strided:
        return _Kept(t)
    found = _now.offered.get(t.untyped_storage().data_ptr())
    if found is None:
        return _Kept(t)
    of, version, recipe = found
    y = of()  # alive, so nobody else has its memory
    is_its = y is not None and t.dtype is y.dtype and version_of(y) == version == version_of(t)
    return _View(recipe, t) if is_its else _Kept(t)


def _count_and_pack(t: Tensor) -> _Kept | _View:
    found = _pack(t)
    if type(found) is _View and not found.recipe.is_counted:
        found.recipe.is_counted = True
        _now.state.results += 1
        _now.state.bytes += t.nbytes
    return found


def _unpack(kept: _Kept | _View) -> Tensor:
    return kept.value()


def wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, of whose norms the backward computes the results again."""

    @functools.wraps(forward)
    def recomputing_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        state: Recompute | None = known.get(self, "recompute")
        # Hooks of others keep what they want to keep, a checkpoint's nothing at all.
        if state is None or not state.enabled or is_open() or is_watched() or not may_hook_saved_tensors():
            return forward(self, *args, **kwargs)
        state.results = state.bytes = 0
        _now.offered, _now.largest, _now.state = {}, 0, state
        try:
            with torch.autograd.graph.saved_tensors_hooks(_count_and_pack, _unpack):
                return forward(self, *args, **kwargs)
        finally:
            _now.offered = _now.state = None

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
