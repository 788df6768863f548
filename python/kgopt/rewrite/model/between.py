"""Which of kgopt's ways run between the norms: the whole model decides, way by way.

Each call was measured on its own. In the model a way may lose what it gained: it gives another memory format to what
comes next, or its checks keep a host busy that is late already. A way is a kind of call and what replaces it, such as
``conv own`` or ``nearest``.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from torch import nn

from kgopt.rewrite.model.timed import EQUAL, NEAR, TimedModel

# Of the GPU's work, above which a call by the clock waits for the host: forms with fewer checks are tried.
WAITS = 1.1
# Seconds of the GPU that leaving out one way after the other may take, in any case; measuring work takes so many calls.
BUDGET, CALLS = 2.0, 5
_NONE: frozenset[str] = frozenset()


class _Forms:
    """A model with some of the ways that were faster in it."""

    def __init__(self, whole: TimedModel, layout: str) -> None:
        self.whole = whole
        self.layout = layout
        self.front = whole.front
        self.states = [(m, self.front.state_of(m)) for m in self.front.modules_of(whole.root)]
        self.ways = frozenset().union(*(state.ways for _, state in self.states))
        self._made: dict[Set[str], list[tuple[nn.Module, Any]]] = {}

    def take(self, ways: frozenset[str]) -> None:
        """Has the model run these."""
        if ways not in self._made:  # kept: a state knows plans of its own
            self._made[ways] = [(m, state.only(ways)) for m, state in self.states]
        for module, state in self._made[ways]:
            self.front.swap(module, state)

    def name(self, ways: frozenset[str]) -> str:
        """For questions."""
        return f"between {', '.join(sorted(ways))} {self.layout}"

    def work(self, ways: frozenset[str]) -> float:
        """Of the GPU, in seconds."""
        self.take(ways)
        return self.whole.work(self.name(ways))

    def seconds(self, ways: frozenset[str]) -> tuple[float, float]:
        """By the clock: without any, and with these."""
        return self.whole.switched(self.name(ways), self.take, _NONE, ways)

    def settle(self, ways: frozenset[str]) -> int:
        """Gives the modules that have none of these their own forward back. How many are left."""
        self.take(ways)
        kept = {id(m) for m, state in self._made[ways] if state.ways}
        self.front.forget(self.whole.root, lambda module: id(module) not in kept)
        return len(kept)


@dataclass
class Choice:
    """What a model takes."""

    modules: list[nn.Module]  # that have some
    text: str  # what the report says
    seconds: float = 0.0  # by the clock, and of the GPU's work; 0: nobody asked
    work: float = 0.0


def work(whole: TimedModel, layout: str, some: bool = True) -> float:
    """Of the GPU, with all ways that gain on their own, or with none. All run afterwards."""
    forms = _Forms(whole, layout)
    found = forms.work(forms.ways if some else _NONE)
    forms.take(forms.ways)
    return found


def choose(whole: TimedModel, layout: str) -> Choice:
    """Takes the ways that make a model faster.

    First the GPU's work: each way in turn is left out, and stays out where it does not gain. (Where that would take
    seconds, only if all ways together lose.) Then the clock, of the model with what is left and with none; where it
    waits for its host, also without the convolutions and with them alone. Among forms that are equally fast by the
    clock the one with the least work is taken.
    """
    forms = _Forms(whole, layout)
    if not forms.ways:
        return Choice([], "")
    kept, works = forms.ways, {}
    works[kept] = forms.work(kept)
    is_short = CALLS * len(kept) * works[kept] <= BUDGET
    if not is_short:
        works[_NONE] = forms.work(_NONE)
    for way in sorted(forms.ways) if is_short or works[kept] >= works[_NONE] else ():
        fewer = kept - {way}
        if fewer:
            works[fewer] = forms.work(fewer)
            kept = fewer if works[fewer] <= works[kept] else kept
    before, clock = forms.seconds(kept)
    clocks = {kept: clock}
    if not whole.replays and min(before, clock) > WAITS * works[kept]:
        for fewer in _with_fewer_checks(kept):
            again, clocks[fewer] = forms.seconds(fewer)
            before = min(before, again)
    clocks[_NONE] = before
    taken = min(clocks, key=clocks.__getitem__)
    slack = EQUAL if whole.root.training else NEAR
    near = [ways for ways in clocks if whole.are_equal(clocks[ways], clocks[taken], slack)]
    by_work = len(near) > 1
    if by_work:
        for ways in near:
            works[ways] = works[ways] if ways in works else forms.work(ways)
        taken = min(near, key=works.__getitem__)
    count = forms.settle(taken)
    tried = taken or min(clocks.keys() - {_NONE}, key=clocks.__getitem__)
    times = f"{clocks[tried] * 1e3:.2f} ms with them, {before * 1e3:.2f} ms without"
    if by_work and {tried, _NONE} <= works.keys():
        times = (
            f"{works[tried] * 1e3:.2f} ms of the GPU's work with them, {works[_NONE] * 1e3:.2f} ms without "
            f"({clocks[tried] * 1e3:.2f} and {before * 1e3:.2f} ms by the clock)"
        )
    measured = clocks[taken], works.get(taken, 0.0)
    if not taken:
        return Choice([], f"left alone: kgopt's are not faster: {times}", *measured)
    without = sorted(forms.ways - taken)
    of = "a module" if count == 1 else f"{count} modules"
    text = f"kgopt's in {of}{', without ' + ', '.join(without) if without else ''}: {times}"
    return Choice(whole.front.modules_of(whole.root), text, *measured)


def _with_fewer_checks(ways: frozenset[str]) -> list[frozenset[str]]:
    """Forms of a model that cost its host less."""
    convs = frozenset(way for way in ways if way.startswith("conv"))
    found = [ways - convs, convs, ways - {"conv small"}]
    return [some for some in dict.fromkeys(found) if some and some != ways]
