"""The last question: is a call, by the clock, as fast as one of the model as it came? Where not, it becomes that again.

What was measured before are parts, on a GPU that is given several calls: sites, what stands between them, the layout.
Each may win, and the model lose: where it waits for its launches, every check before a site is time of the call.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from kgopt.rewrite import cuda_graphs
from kgopt.rewrite.gradients import casts
from kgopt.rewrite.measure import clocks
from kgopt.rewrite.measure.reporting import Report
from kgopt.rewrite.model import convolved, layout
from kgopt.rewrite.model.timed import NEAR
from kgopt.rewrite.model.whole import Whole
from kgopt.rewrite.optimized import known
from kgopt.rewrite.optimized.disguise import become, original_class
from kgopt.rewrite.optimized.transaction import LOCK

# Of the time as it came, up to which an optimized model is not slower. Infinity: nobody asks.
SLACK = 1.01
PRICE = 1.03  # of a step's time, up to which memory is worth it


def undo(root: nn.Module) -> None:
    """Makes a model what it was before kgopt saw it: classes, layout, what its modules know."""
    with LOCK:
        cuda_graphs.set_mode(root, False)
        layout.set_layout(root, False)
        for module in root.modules():
            original = original_class(module)
            if original is not None:  # the class first: a call that has begun finds what it looks for, or does without
                become(module, original)
            known.clear(module)


@dataclass
class Times:
    """Seconds of a call by the clock."""

    before: float  # as the model came
    after: float  # as it is, without a replay
    known: bool  # of an equal model


def compare(whole: Whole, parts: str = "") -> Times | None:
    """A model and what it was, on its example inputs, both in turn; None where there is nothing to compare.

    Ahead of any recording: the model changes its classes and layout for it, and so its tensors' places. ``parts``: for
    the question, what is left of it.
    """
    if math.isinf(SLACK) or not any(original_class(m) for m in whole.root.modules()):
        return None
    (before, after), asked_before = whole.settle(f"clock {layout.form_of(whole.root)}{parts}", lambda: _clock(whole))
    return Times(before, after, asked_before)


def _without_between(whole: Whole, found: Report, times: Times) -> Times:
    """Times of a model whose norms alone are kgopt's, where it lost by little with what stands between them."""
    front, root = whole.front, whole.root
    if not SLACK * times.before < times.after <= NEAR * times.before or not front.modules_of(root):
        return times
    front.forget(root)
    convolved.take_back(root)
    found.glue = f"left alone: the whole model is slower with it: {times.after * 1e3:.3g} ms a call"
    return compare(whole, ", norms alone") or times


def undo_if_slower(whole: Whole, found: Report, times: Times, replay: float) -> None:
    """Undoes all of it where a model lost; by little, only what stands between the norms, if that is to blame.

    ``replay``: seconds of a call that is replayed; 0: it is not. ``found``: its report, which stays. So does what its
    norms remember: they are no new sites.
    """
    root = whole.root
    times = times if replay else _without_between(whole, found, times)
    after = replay or times.after
    how = ("replayed, " if replay else "") + ("known" if times.known else "measured")
    found.clock = f"{after * 1e3:.3g} ms a call, {times.before * 1e3:.3g} ms as it came ({how})"
    if after <= SLACK * times.before:
        return
    sites = [(m, state) for m in root.modules() if (state := known.get(m, "site")) is not None]
    undo(root)
    known.put(root, report=found)
    for norm, state in sites:
        known.put(norm, site=state)
    found.slower = True
    found.clock = f"left as it came: {found.clock}"
    found.layout = found.glue = found.whole = ""
    for row in found.sites:
        if row.became:
            row.became, row.reason = "", "the whole model is slower"


def choose_graph(whole: Whole, root: nn.Module, found: Report, args: Any, kwargs: Any, times: Times | None) -> float:
    """Records the call of the example inputs, where replays are faster; else turns recording off, and says why.

    Seconds of a replay by the clock; 0 where there is none. ``times``: of a call as it is, if that was asked: one that
    was busy may have become a short one.
    """
    if whole.busy and (times is None or times.after > cuda_graphs.LONG):
        found.graph = f"none: {cuda_graphs.BUSY}"
        cuda_graphs.set_mode(root, False)
        return 0.0
    asks = whole.busy is None
    (seconds,), asked_before = whole.settle(
        f"graph {layout.form_of(root)}", lambda: [cuda_graphs.record(root, args, kwargs, asks=asks)]
    )
    if asked_before and seconds and not cuda_graphs.record(root, args, kwargs, seconds):
        seconds = 0.0
    if not seconds:
        reason = "none: of an equal model it was not possible, or not faster"
        found.graph = reason if asked_before else cuda_graphs.text_of(root) or ""
        cuda_graphs.set_mode(root, False)
    return float(seconds)


def choose_recompute(whole: Whole | None, root: nn.Module, found: Report) -> None:
    """Turns it off again where nobody measures, or a step takes too long with it; says so in the report."""
    state = known.get(root, "recompute")
    if state is None:
        return
    if whole is None or not whole.key or not whole.goes_back():
        found.recompute = "nothing: only a step with example inputs is measured"
        casts.set_mode(root, False)
        return

    def measure() -> list[float]:
        off, on = (functools.partial(setattr, state, "enabled", is_on) for is_on in (False, True))
        with whole.trial(True):
            return list(clocks.clock_both(whole.step, whole.step, whole.device, (off, on)))

    (before, after), _ = whole.settle("recompute", measure)
    state.enabled = after <= PRICE * before
    found.recompute = f"{after * 1e3:.3g} ms a step, {before * 1e3:.3g} ms with all kept"
    if not state.enabled:
        found.recompute = f"nothing: {found.recompute}"
        casts.set_mode(root, False)


def _clock(whole: Whole) -> list[float]:
    """Seconds of a call as the model came, and as it is."""
    forms = _Forms(whole.root)
    with whole.trial(whole.root.training):
        try:
            return list(clocks.clock_both(whole.timed, whole.timed, whole.device, (forms.came, forms.made)))
        finally:
            forms.made()


class _Forms:
    """A model with the classes that it came with, and with those that it was given."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.layout = known.get(root, "layout")
        layout.set_layout(root, False)  # its class is part of the layout
        self.classes: list[tuple[nn.Module, Any, Any]] = [
            (m, type(m), original_class(m)) for m in root.modules() if original_class(m) is not None
        ]

    def came(self) -> None:
        layout.set_layout(self.root, False)
        for module, _, original in self.classes:
            become(module, original)

    def made(self) -> None:
        layout.set_layout(self.root, False)  # made twice, the root would lose the class that converts
        for module, cls, _ in self.classes:
            become(module, cls)
        if self.layout is not None:
            layout.set_layout(self.root, True, self.layout.falls_back, self.layout.moves)
