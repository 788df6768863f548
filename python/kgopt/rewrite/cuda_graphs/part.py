"""The outermost part of a root's class, and what :func:`kgopt.optimize` asks of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite.cuda_graphs import machine
from kgopt.rewrite.cuda_graphs.calls import Graphs
from kgopt.rewrite.cuda_graphs.effects import no_casts_kept, undone
from kgopt.rewrite.cuda_graphs.recording import Recording
from kgopt.rewrite.measure import clocks
from kgopt.rewrite.optimized import classes, known
from kgopt.rewrite.optimized.classes import Part
from kgopt.rewrite.optimized.transaction import LOCK
from kgopt.torch_private import tree_leaves


def wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, replayed where it was recorded."""

    @functools.wraps(forward)
    def graphed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        state: Graphs | None = known.get(self, "graphs")
        if state is None:
            return forward(self, *args, **kwargs)
        return state.call(forward, self, args, kwargs)

    return graphed_forward


def set_mode(root: nn.Module, mode: bool | str) -> str:
    """Turns recording on (True, "auto") or off; recordings from before are dropped. Returns why it cannot be on."""
    with LOCK:
        state: Graphs | None = known.get(root, "graphs")
        original, recipe = classes.recipe_of(root)
        without = tuple(part for part in recipe if part[0] != "graphs")
        if state is not None:
            state.off = "it was turned off"
            classes.give(root, original, without)
            known.drop(root, "graphs")
            # A thread that records may be waiting for LOCK; what it holds goes when it is done.
            if state.lock.acquire(timeout=1.0):
                state.reset()
                state.lock.release()
        return classes.give(root, original, (*without, ("graphs",)), graphs=Graphs(mode)) if mode else ""


def may_pay(root: nn.Module, arguments: Any) -> bool:
    """Whether a call of these arguments is one that can be recorded at all: inference on a GPU."""
    if root.training:
        return False
    leaves = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    return any(map(machine.MACHINE.takes, leaves))


def is_busy(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> bool:
    """Whether a call is a long one whose launches are over long before its work: a recording would gain nothing."""
    forward = type(root).forward
    with torch.no_grad():
        return bool(machine.MACHINE.is_busy(lambda: forward(root, *args, **kwargs), device))


def can_record(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call can be recorded. Nothing is kept."""
    state = Graphs("auto")
    with torch.no_grad():
        try:
            state.call(type(root).forward, root, args, kwargs, seen=True, timed=False)
            return any(isinstance(c, Recording) for c in state.calls.values())
        finally:
            state.reset()


def seconds_of_replays(
    first: Callable[[], Any], second: Callable[[], Any], device: torch.device
) -> tuple[float, float] | None:
    """Of two calls, or twice the same, without their launches; None where one of them cannot be recorded."""
    lane = machine.MACHINE.lane(device)

    def replay_of(call: Callable[[], Any]) -> Callable[[], None]:
        with lane.aside():
            call()
        replay, _ = lane.record(call)
        return replay  # type: ignore[no-any-return]

    try:
        with no_casts_kept():
            replay = replay_of(first)
            return clocks.time_both(replay, replay if second is first else replay_of(second), device)
    except RuntimeError:
        return None
    finally:
        lane.settle()


def record(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], known_seconds: float = 0.0, asks: bool = True
) -> float:
    """Records a call now, where that pays: seconds of a replay by the clock, 0 where it does not.

    ``known_seconds``: those of an equal model, which are not measured again; ``asks``: whether the model is busy.
    """
    state: Graphs | None = known.get(root, "graphs")
    if state is None or root.training:
        return 0.0
    # Below the part of the class, so that hooks of the root are not called.
    plain = classes.make_class(*_without(root)).forward
    with torch.no_grad(), undone(root, (args, kwargs)):
        state.call(plain, root, args, kwargs, seen=True, timed=not known_seconds, asks=asks)
    made = [c for c in state.calls.values() if isinstance(c, Recording)]
    return (known_seconds or made[-1].after) if made else 0.0


def _without(root: nn.Module) -> tuple[Any, Any]:
    original, recipe = classes.recipe_of(root)
    return original, tuple(part for part in recipe if part[0] != "graphs")


def text_of(root: nn.Module) -> str | None:
    """What the report says of them; None where nobody asked for any."""
    state: Graphs | None = known.get(root, "graphs")
    if state is None:
        return None
    if root.training and not state.calls:
        return "none: the model is in training mode"
    return state.text()


classes.add_part("graphs", Part(wrap=lambda _, forward: wrapped_forward(forward), place=3))
