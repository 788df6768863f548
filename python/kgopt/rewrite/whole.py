"""What only the whole model can say: whether launches are hidden, which layout, what pays between the norms.

Two forms of the model are timed in turn, with the example inputs; the answers are verdicts, as those of sites are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kgopt import accuracy
from kgopt.rewrite import (
    between,
    clocks,
    convolved,
    fingerprint,
    glue,
    graphs,
    known,
    layout,
    policy,
    training,
    verdicts,
)
from kgopt.rewrite.disguise import become, original_class
from kgopt.rewrite.reporting import Report
from kgopt.rewrite.timed import TimedModel, original_code, site_states, trial
from kgopt.torch_private import tree_leaves

# Of the shorter time by the clock, up to which two layouts are equally fast where the host is in the way.
EQUAL = 1.1
_ANOTHER_RESULT = 0.05  # a relative error beyond what rounding in another order makes, in any dtype


def chooses(device: torch.device) -> bool:
    """Whether whole models are timed there. On the CPU a compiler does what stands between the norms."""
    return device.type == "cuda"


@dataclass
class _Form:
    """A model fully decided in one layout."""

    sites: list[tuple[policy.SiteState, tuple[Any, ...]]]
    between: list[tuple[nn.Module, Any]]
    glue: str  # what the report says


class Whole(TimedModel):
    """A model and its example inputs: what only all of it can say."""

    def __init__(self, root: nn.Module, example: Any, refuse: Callable[[str], str], options: Any = ()) -> None:
        """``refuse``: why a module is left alone, by its path; ``options``: of optimize, as far as they matter."""
        super().__init__(root, example)
        self.refuse = refuse
        self.options = options
        self.front: Any = training if root.training else glue
        self.expected: Any = None  # the original code's outputs
        self.error = 0.0  # of the sites' outputs, in the layout that the model came in
        self.busy: bool | None = None  # are its launches over long before its work? None: nobody asked

    @property
    def states(self) -> list[policy.SiteState]:
        """Of its sites."""
        return site_states(self.root)

    def decide(self, channels_last: bool | str, measure: bool, found: Report, replays: bool = False) -> None:
        """Runs the example inputs: sites measure themselves, layouts are compared, and so is the result.

        ``replays``: calls may be replayed as CUDA graphs in the end, if that is possible and faster.
        """
        chosen = layout.is_on(self.root)  # by an earlier call, which put back what lost in that layout
        with original_code(self.root):
            expected = self.call()
        tensors = [t for t in tree_leaves(expected) if isinstance(t, Tensor)]
        self.device = next((t.device for t in tensors), torch.device("cpu"))
        result = self.call()
        self.expected, self.error = expected, _worst(expected, result)
        choosing = measure and chooses(self.device)
        if measure:
            digest = fingerprint.of_model(self.root, self.example, self.options)
            self.key = verdicts.key_of("model", self.device, digest)
        if choosing and replays and graphs.may_pay(self.root, self.example):
            self.busy = self.says("busy", graphs.is_busy, self.device)
            self.replays = not self.busy and self.says("can be recorded", graphs.can_record)
        if channels_last is True:
            found.layout = layout.ask_for(self.root)
            self.forget()
            result = self.call()  # sites measure themselves in this layout
            why = self.differs(result)
            if why:
                layout.set_layout(self.root, False)
                self.forget()
                found.layout, result = f"as it was: {why}", self.call()
        if choosing:
            form = self.form("given")
            if channels_last == "auto" and not chosen:
                form, found.layout = self.faster_layout(form)
            convolved.take_back(self.root)
            found.glue = form.glue
            found.whole = ("known" if all(self.asked) else "measured") if self.asked else ""
            result = self.call()
        found.accuracy = _compare(expected, result)
        for module in self.root.modules():
            # Where nothing was gained the module becomes what it was, so that not even a check stays.
            state = known.get(module, "site")
            original = original_class(module)
            if state is not None and original is not None and state.lost_everywhere:
                become(module, original)

    def forget(self) -> None:
        """Sites measure themselves again, in another layout."""
        for state in self.states:
            state.forget()

    def form(self, layout: str) -> _Form:
        """Decides all but the layout. Sites have measured themselves."""
        self.find_between()
        self.choose_hidden(layout)
        text = self.choose_between(layout)
        sites = [(s, (s.results, s.seen, s.kept_back, s.hidden)) for s in self.states]
        kept = [(m, self.front.state_of(m)) for m in self.front.modules_of(self.root)]
        return _Form(sites, kept, text)

    def take(self, form: _Form) -> None:
        """Makes the model that form, in the layout that it now has."""
        for state, remembered in form.sites:
            state.results, state.seen, state.kept_back, state.hidden = remembered
        self.front.forget(self.root)
        for module, state in form.between:
            self.front.adopt(module, state)

    def find_between(self) -> None:
        """Measures what stands between the norms, on what it is given where launches are hidden: a norm that runs on
        PyTorch's code gives other formats and dtypes, at which the measurements would say nothing of a model on
        kgopt's.
        """
        states = self.states
        before = [state.hidden for state in states]
        for state in states:
            state.hidden = True
        try:
            self.front.find(self.root, self.call, self.refuse)
        finally:
            for state, hidden in zip(states, before, strict=True):
                state.hidden = hidden
        convolved.give(self.root)

    def choose_hidden(self, layout: str) -> None:
        """Whether launches are hidden in this model: where sites depend on it, both are timed."""
        undecided = [state for state in self.states if state.undecided]
        if not undecided:
            return

        def switched(on: bool) -> Callable[[], Any]:
            timed = self.timed

            def run() -> None:
                for state in undecided:
                    state.hidden = on
                timed()

            return run

        before, after = self.compared(f"hidden {layout}", switched(False), switched(True))
        for state in undecided:
            state.hidden = after < before

    def choose_between(self, layout: str) -> str:
        """Which of kgopt's ways between the norms make the whole model faster; what the report says of it."""
        kept, text = between.choose(self, layout)
        carried = "" if self.root.training or not kept else self.choose_carrying(layout, kept)
        return f"{text}{carried}"

    def choose_carrying(self, layout: str, modules: list[nn.Module]) -> str:
        """Whether convolutions that compute the moments of their results for the norms behind them pay."""
        self.call()  # shows whose results norms take
        carriers = [glue.state_of(m).carrier for m in modules if glue.state_of(m).carrier.wanted]
        if not carriers:
            return ""

        def switched(on: bool) -> Callable[[], Any]:
            timed = self.timed

            def run() -> None:
                for carrier in carriers:
                    carrier.on = on
                timed()

            return run

        before, after = self.seconds(f"moments {layout}", switched(False), switched(True))
        for carrier in carriers:
            carrier.on = after < before
        if after >= before:
            return ""
        return f"; moments carried from {len(carriers)} of them: {after * 1e3:.2f} ms, {before * 1e3:.2f} ms without"

    def compared(self, question: str, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of two forms: a call by the clock; of a step the GPU's work, where the clock makes little difference.

        As between layouts: a step that waits for this host is no reason to give the GPU a third more to do. A short
        call without gradients is replayed where its launches are what takes the time, or they decide.
        """
        before, after = self.seconds(question, first, second)
        if not self.root.training or not self.are_equal(before, after):
            return before, after

        def measure() -> list[float]:
            with trial(self.root, self.root.training):
                return [clocks.busy(form, self.device) for form in (first, second)]

        (before, after), known = self.settle(f"work {question}", measure)
        self.asked.append(known)
        return before, after

    # ----------------------------------------------------------------------------------------------------- layouts

    def faster_layout(self, given: _Form) -> tuple[_Form, str]:
        """The model in the layout that it was given in against channels_last inside, each at its best.

        A conversion of what the caller gives, and back, is part of the call. Where the clock makes little difference,
        perhaps because launches take longer than their work, the one with less work on the GPU is taken: the next host
        is a faster one, or the step becomes a CUDA graph.
        """
        before = self.layout_seconds("given")
        why = layout.set_layout(self.root, True)
        if why:
            return given, f"as it was: {why}"
        self.front.forget(self.root)
        self.forget()
        other, after, work = given, 0.0, 0.0
        try:
            why = self.differs(self.call())  # sites measure themselves in this layout
            if not why:
                other = self.form("channels_last")
                after = self.layout_seconds("channels_last")
                if self.are_equal(before, after):
                    work = self.work("channels_last")
        except RuntimeError as error:
            why = f"channels_last fails: {str(error).splitlines()[0]}"
        layout.set_layout(self.root, False)
        self.take(given)
        if not why and after < before:  # a clock that went up meanwhile shows
            before = min(before, self.layout_seconds("given again"))
        times = f"channels_last {after * 1e3:.2f} ms, as it was {before * 1e3:.2f} ms"
        if not why and work and self.are_equal(before, after):
            times = f"{times} by the clock"
            before, after = self.work("given"), work
            times = f"{after * 1e3:.2f} and {before * 1e3:.2f} ms of the GPU's work ({times})"
        if why or after >= before:
            return given, f"as it was: {why}" if why else f"as it was: {times}"
        layout.set_layout(self.root, True)
        self.take(other)
        return other, f"channels_last: {times}"

    def are_equal(self, before: float, after: float) -> bool:
        """Whether two times by the clock say little of two forms, of which the GPU's work may say more."""
        return not self.replays and max(before, after) <= EQUAL * min(before, after)

    def work(self, layout: str) -> float:
        """Seconds of the GPU's work in a call of the form that the model now has, launches hidden."""

        def measure() -> list[float]:
            with trial(self.root, self.root.training):
                return [clocks.busy(self.timed, self.device)]

        (seconds,), known = self.settle(f"work {layout}", measure)
        self.asked.append(known)
        return float(seconds)

    def differs(self, result: Any) -> str:
        """Why channels_last cannot be taken: its outputs are others. A view of a feature map is a copy there, and what
        the model writes to it is lost. Rounding is not meant, and random numbers fall on other elements there.
        """
        if self.draws:
            return ""
        error = _worst(self.expected, result)
        if error <= 4 * max(self.error, 0.0) + _ANOTHER_RESULT:
            return ""
        return f"channels_last gives other outputs (relative error {error:.1e})"

    def layout_seconds(self, layout: str) -> float:
        """Of a call in the form that the model now has."""
        timed = self.timed
        return min(self.seconds(f"layout {layout}", timed, timed))


def _worst(expected: Any, actual: Any) -> float:
    """The largest relative error of an output; below 0 where none is a tensor of numbers."""
    pairs = zip(tree_leaves(expected), tree_leaves(actual), strict=True)
    floats = [(e.detach(), a.detach()) for e, a in pairs if isinstance(e, Tensor) and e.is_floating_point()]
    return max((accuracy.relative_error(a, e) for e, a in floats), default=-1.0)


def _compare(expected: Any, actual: Any) -> str:
    """How far the model's outputs on the example inputs are from those of the original code."""
    worst = _worst(expected, actual)
    if worst < 0:
        return "no tensor in the output to compare"
    return f"outputs differ from the original's by {worst:.1e} (relative 2-norm)"
