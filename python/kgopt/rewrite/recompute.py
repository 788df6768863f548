"""Results of norms that the backward computes again instead of keeping them.

What a norm and its activation give is kept by the convolution behind it, for the gradient of its weight. It is one
read and one write away from the norm's input, which the norm's own gradient needs anyway. So while the forward of a
root runs with gradients, each site says which of its results can be had again, and from what (:meth:`Forward.offer`).
Hooks for saved tensors (``torch.autograd.graph.saved_tensors_hooks``) keep that recipe wherever autograd wants to keep
such a result, whoever wants it. The backward gets the same bits from the same op. All else is kept as without hooks,
and norms that are given no such result keep theirs without calling one.
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

    __slots__ = ("contiguous", "kept", "op", "rest")

    def __init__(self, op: Callable[..., Tensor], kept: tuple[Any, Any, Any], rest: Any, contiguous: bool) -> None:
        self.op, self.kept, self.rest, self.contiguous = op, kept, rest, contiguous

    def value(self) -> Tensor:
        """The result, once more: as it was made, in memory of its own."""
        if torch.is_grad_enabled():  # a backward with a graph
            with torch.no_grad():
                return self.value()
        x, weight, bias = self.kept
        groups, eps, act = self.rest
        weight, bias = None if weight is None else _value(weight), None if bias is None else _value(bias)
        y = self.op(_value(x), groups, weight, bias, eps, act)
        return y.contiguous() if self.contiguous else y


class _View:
    """A view of a result that is computed again."""

    __slots__ = ("recipe", "shape", "start", "strides")

    def __init__(self, recipe: _Recipe, t: Tensor) -> None:
        self.recipe, self.shape, self.strides, self.start = recipe, t.shape, t.stride(), t.storage_offset()

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
        self, y: Tensor, op: Callable[..., Tensor], args: tuple[Any, ...], x: _Recipe | _View | None, made: Any
    ) -> None:
        """Says that ``op(*args)`` gave ``made``, which the code goes on with as ``y``.

        ``args``: x, the number of groups, weight, bias, eps, the activations. ``x``: what is :meth:`found` of that x.
        Only where a gradient goes through y, so that x is kept anyway.
        """
        if y.grad_fn is None or y.numel() == 0 or y.storage_offset():
            return
        given, groups, weight, bias, eps, act = args
        of_weight, of_bias = None if weight is None else _kept(weight), None if bias is None else _kept(bias)
        kept = (_kept(given) if x is None else x, of_weight, of_bias)
        recipe = _Recipe(op, kept, (groups, eps, act), y is not made)
        self.offered[y.untyped_storage().data_ptr()] = weakref.ref(y), version_of(y), recipe

    def unhooked(self, op: Callable[..., Tensor], x: Tensor, other: Tensor, *args: Any) -> Tensor:
        """``op(x, other, *args)``, whose node keeps without hooks what cannot be had again.

        The node of a norm keeps five tensors, and each call of a hook costs the host microseconds.
        """
        if self.found(x) is None and self.found(other) is None:
            return without_hooks(op, x, other, *args)
        return op(x, other, *args)


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
