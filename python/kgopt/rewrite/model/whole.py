"""What only the whole model can say: whether launches are hidden, which layout, what pays between the norms.

Two forms of the model are timed in turn, with the example inputs; the answers are verdicts, as those of sites are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kgopt import accuracy
from kgopt.rewrite import cuda_graphs, glue
from kgopt.rewrite.measure import fingerprint, policy, verdicts
from kgopt.rewrite.measure.reporting import Report
from kgopt.rewrite.model import between, convolved, layout
from kgopt.rewrite.model.timed import EQUAL, TimedModel, original_code, site_states
from kgopt.rewrite.optimized import known
from kgopt.rewrite.optimized.disguise import become, original_class
from kgopt.torch_private import tree_leaves

ROOM = 1.02  # of the memory that a call took as the model came, up to which it takes no more
_ANOTHER_RESULT = 0.05  # a relative error beyond what rounding in another order makes, in any dtype


def chooses(device: torch.device) -> bool:
    """Whether whole models are timed there. On the CPU a compiler does what stands between the norms."""
    return device.type == "cuda"


@dataclass
class _Form:
    """A model in one layout: its parts were measured; decided, once ``seconds`` says something."""

    layout: str  # one of layout.py's
    sites: list[tuple[policy.SiteState, tuple[Any, ...]]]
    between: list[tuple[nn.Module, Any]]
    work: float  # of the GPU, in seconds; 0: nobody asked
    seconds: float = 0.0  # by the clock
    glue: str = ""  # what the report says


class Whole(TimedModel):
    """A model and its example inputs: what only all of it can say."""

    def __init__(self, root: nn.Module, example: Any, refuse: Callable[[str], str], options: Any = ()) -> None:
        """``refuse``: why a module is left alone, by its path; ``options``: of optimize, as far as they matter."""
        super().__init__(root, example)
        self.refuse = refuse
        self.options = options
        self.expected: Any = None  # the original code's outputs
        self.error = 0.0  # of the sites' outputs, in the layout that the model came in
        self.came = math.inf  # bytes that a call takes at its worst as the model came; infinity: any number will do
        self.busy: bool | None = None  # are its launches over long before its work? None: nobody asked

    @property
    def states(self) -> list[policy.SiteState]:
        """Of its sites."""
        return site_states(self.root)

    def decide(self, channels_last: bool | str, measure: bool, found: Report, replays: bool) -> None:
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
        if choosing and replays and cuda_graphs.may_pay(self.root, self.example):
            self.busy = self.says("busy", cuda_graphs.is_busy, self.device)
            self.replays = not self.busy and self.says("can be recorded", cuda_graphs.can_record)
        if choosing and channels_last is not True and not chosen:
            with original_code(self.root):
                self.came = self.peak("as it came")
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
            if channels_last == "auto" and not chosen:
                form, found.layout = self.faster_layout()
            else:
                self.find_between()
                form = self.decided(self.held("given"))
            convolved.take_back(self.root)
            if form.between and (more := self.takes_more(f"{form.layout}, between the norms")):
                self.front.forget(self.root)
                form.glue = f"left alone: with it a call takes {more}"
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

    def held(self, layout: str, work: float = 0.0, seconds: float = 0.0, glue: str = "") -> _Form:
        """What the model now is."""
        sites = [(s, (s.results, s.seen, s.kept_back, s.hidden)) for s in self.states]
        kept = [(m, self.front.state_of(m)) for m in self.front.modules_of(self.root)]
        return _Form(layout, sites, kept, work, seconds, glue)

    def take(self, form: _Form) -> None:
        """Makes the model that form."""
        layout.set_layout(self.root, form.layout != layout.GIVEN, moves=form.layout != layout.INSIDE)
        for state, remembered in form.sites:
            state.results, state.seen, state.kept_back, state.hidden = remembered
        self.front.forget(self.root)
        for module, state in form.between:
            self.front.adopt(module, state)

    def decided(self, form: _Form) -> _Form:
        """The form that the model now has, with all decided but the layout."""
        hides = self.choose_hidden(form.layout)
        choice = self.choose_between(form.layout if hides else f"{form.layout}, launches count")
        if not choice.seconds:  # there was nothing to choose
            choice.seconds, choice.work = self.layout_seconds(form.layout), form.work if hides else 0.0
        return self.held(form.layout, choice.work, choice.seconds, choice.text)

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

    def choose_hidden(self, layout: str) -> bool:
        """Whether launches are hidden in this model: where sites depend on it, both are timed.

        Where that makes little difference to a step, kgopt's ops are taken: for the GPU they are less work, as each
        site was measured. A step that waits for this host is no reason to give the GPU a third more to do.
        """
        undecided = [state for state in self.states if state.undecided]
        if not undecided:
            return True

        def hide(on: bool) -> None:
            for state in undecided:
                state.hidden = on

        before, after = self.switched(f"hidden {layout}", hide)
        hidden = after < before or (self.root.training and self.are_equal(before, after))
        hide(hidden)
        return hidden

    def choose_between(self, layout: str) -> between.Choice:
        """Which of kgopt's ways between the norms make the whole model faster."""
        choice = between.choose(self, layout)
        return choice if self.root.training or not choice.modules else self.choose_carrying(layout, choice)

    def choose_carrying(self, layout: str, choice: between.Choice) -> between.Choice:
        """Whether convolutions that compute the moments of their results for the norms behind them pay."""
        self.call()  # shows whose results norms take
        carriers = [glue.state_of(m).carrier for m in choice.modules if glue.state_of(m).carrier.wanted]
        if not carriers:
            return choice

        def carry(on: bool) -> None:
            for carrier in carriers:
                carrier.on = on

        before, after = self.switched(f"moments {layout}", carry)
        carry(after < before)
        if after >= before:
            return choice
        text = f"; moments carried from {len(carriers)} of them: {after * 1e3:.2f} ms, {before * 1e3:.2f} ms without"
        return replace(choice, text=f"{choice.text}{text}", seconds=after, work=0.0)

    # ----------------------------------------------------------------------------------------------------- layouts

    def faster_layout(self) -> tuple[_Form, str]:
        """The model in the layout that it was given in against channels_last inside, each at its best.

        A conversion of what the caller gives, and back, is part of the call. The layout with less work, by what was
        measured of its parts, is decided first; the other one only where it can still win. Where the clock makes little
        difference, perhaps because launches take longer than their work, the one with less work on the GPU is taken:
        the next host is a faster one, or the step becomes a CUDA graph.
        """
        given = self.first("given")
        why = layout.set_layout(self.root, True)
        forms = [given]
        if not why:
            self.front.forget(self.root)
            self.forget()
            try:
                why = self.differs(self.call())  # sites measure themselves in this layout
                if not why:
                    forms = sorted([given, self.first("channels_last")], key=lambda form: form.work)
                    self.take(forms[0])
                    forms[0] = self.decided(forms[0])
                    if not self.is_behind(forms[1], forms[0]):
                        forms = self.both_decided(*forms)
            except RuntimeError as error:
                why = f"channels_last fails: {str(error).splitlines()[0]}"
        if why:
            self.take(given)
            return self.decided(given), f"as it was: {why}"
        taken, other = forms
        self.take(taken)
        if taken.layout == "channels_last" and (more := self.takes_more(taken.layout)):
            if inside := self.from_first_convolution(other):
                return inside, f"{layout.INSIDE}: {inside.seconds * 1e3:.2f} ms; with all in it a call takes {more}"
            self.take(other)
            return (other if other.seconds else self.decided(other)), f"as it was: in channels_last a call takes {more}"
        found = "channels_last" if taken.layout == "channels_last" else "as it was"
        if not other.seconds:
            alone = f"{other.work * 1e3:.2f} ms of the GPU's work alone in the other layout"
            return taken, f"{found}: {taken.seconds * 1e3:.2f} ms, {alone}"
        last, given = sorted(forms, key=lambda form: form.layout)
        times = f"channels_last {last.seconds * 1e3:.2f} ms, as it was {given.seconds * 1e3:.2f} ms"
        if self.are_equal(last.seconds, given.seconds):
            works = f"{last.work * 1e3:.2f} and {given.work * 1e3:.2f} ms of the GPU's work"
            times = f"{works} ({times} by the clock)"
        return taken, f"{found}: {times}"

    def from_first_convolution(self, other: _Form) -> _Form | None:
        """The model in channels_last but for what comes in: its copy may be all that is too much. None where a call
        takes too much nevertheless, or no less time than in another form, of which the work may be all that is known.
        """
        layout.set_layout(self.root, True, moves=False)
        self.front.forget(self.root)
        self.forget()
        try:
            if self.differs(self.call()) or self.takes_more(layout.INSIDE):
                return None
            form = self.decided(self.first(layout.INSIDE))
        except RuntimeError:  # about strides
            return None
        too_slow = form.seconds >= (other.seconds or other.work)
        return None if too_slow or self.takes_more(f"{layout.INSIDE}, decided") else form

    def first(self, layout: str) -> _Form:
        """The model in the layout that it now has, with all that gains on its own. Sites have measured themselves."""
        self.find_between()
        for state in self.states:
            state.hidden = state.undecided
        return self.held(layout, between.work(self, layout))

    def is_behind(self, other: _Form, taken: _Form) -> bool:
        """Whether a form cannot win against one that is decided, whatever it leaves out: no call is shorter than its
        work, and of steps that wait for their host the one with less work is taken.
        """
        bar = EQUAL * taken.seconds
        if self.root.training:
            bar = min(bar, EQUAL * EQUAL * self.work_of(taken))
        if other.work <= bar:
            return False
        self.take(other)
        if between.work(self, other.layout, some=False) <= bar:
            return False
        return not self.root.training or self.layout_seconds(f"{other.layout} at first") >= taken.seconds

    def both_decided(self, first: _Form, second: _Form) -> list[_Form]:
        """Two forms, of which the first is decided; the faster one in front."""
        self.take(second)
        second = self.decided(second)
        if second.seconds < first.seconds:  # a clock that went up meanwhile shows
            self.take(first)
            first.seconds = min(first.seconds, self.layout_seconds(f"{first.layout} again"))
        is_close = self.are_equal(first.seconds, second.seconds)

        def cost(form: _Form) -> tuple[float, bool]:
            return self.work_of(form) if is_close else form.seconds, form.layout == "channels_last"

        return sorted([first, second], key=cost)

    def work_of(self, form: _Form) -> float:
        """Of the GPU, in seconds, in a form that is decided."""
        if not form.work:
            self.take(form)
            form.work = self.work(form.layout)
        return form.work

    def takes_more(self, question: str) -> str:
        """How much memory the form that the model now has takes, where that is more than it took as it came; else "".

        Speed is no reason: who runs out of memory runs nothing.
        """
        if math.isinf(self.came) or (peak := self.peak(question)) <= ROOM * self.came + 2**20:
            return ""
        return f"{peak / 2**20:.0f} MiB, as it came {self.came / 2**20:.0f}"

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
