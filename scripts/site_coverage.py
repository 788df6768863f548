"""How many norms of published networks run on kgopt, and how many with all that stands around them in one op.

    python scripts/site_coverage.py [--write] [--calls] [WORD ...]

Every network of tests/peers (or whose name has one of the words) that has GroupNorms or InstanceNorms by its own
constructor, without the norms that the tests put in place of batch norms, is called twice on the CPU: as it came, under
a mode that sees each call of a norm and who reads its result, and after ``kgopt.optimize(measure=False)``, where the
sites say what they ran. What stands around a norm is read from the calls of the first run, not from kgopt's matcher.
``--write`` draws the table of docs/coverage.md, ``--calls`` prints every norm that is left.
"""

from __future__ import annotations

import argparse
import collections
import copy
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import kgopt
import peers
from kgopt._scale_shift import fits
from kgopt.rewrite.chains.chain import PRELU
from kgopt.rewrite.chains.meanings import describe_function
from kgopt.rewrite.norms import sites
from kgopt.rewrite.norms.calls import NormCall
from kgopt.rewrite.waiting.modulated import VIEWS
from peers.library import Peer, offline

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coverage.md"
BEGIN = "<!-- coverage: begin (drawn by scripts/site_coverage.py) -->"
END = "<!-- coverage: end -->"
NORMS = (F.group_norm, F.instance_norm)
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_PRODUCTS = {"mul", "mul_", "__mul__", "__imul__", "__rmul__"}
_SUMS = {"add", "add_", "__add__", "__iadd__", "__radd__"}


# ----------------------------------------------------------------------------------------------------------------------
# The network as it came


@dataclass(eq=False)
class Call:
    """One call of a function in a forward."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    owner: str  # the path of the innermost module that made it
    is_norm_module: bool = False
    inputs: list[tuple[int, Call | None]] = field(default_factory=list)  # sizes are compared by the tensors in args
    readers: list[Call] = field(default_factory=list)
    shape: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", self.function))

    @property
    def act(self) -> bool:
        """An activation that the ops' act argument has, or PReLU."""
        if self.is_prelu:
            return True
        rest = [UNREAD if isinstance(a, Tensor) else a for a in self.args[1:]]
        if len(self.inputs) != 1 or UNREAD in rest:
            return False
        node = describe_function(self.function, rest, self.kwargs)
        if node is None and isinstance(getattr(Tensor, self.name, None), type(Tensor.relu)):
            function = getattr(torch, self.name.rstrip("_"), None)
            node = None if function is None else describe_function(function, rest, {})
        return node is not None and node.kind == "act"

    @property
    def is_prelu(self) -> bool:
        """The activation that stands alone behind a norm, or its sum, as an op has it."""
        return self.name == PRELU and len(self.args) == 2

    @property
    def sum(self) -> bool:
        """Of two tensors of one size."""
        if self.name not in _SUMS or len(self.inputs) != 2 or self.kwargs.get("alpha", 1) != 1:
            return False
        return all(isinstance(a, Tensor) and tuple(a.shape) == self.shape for a in self.args[:2])

    @property
    def modulates(self) -> int:
        """How many tensors of one value a sample and channel it multiplies with, or adds to, one of its size."""
        if self.name not in (_SUMS | _PRODUCTS | {"addcmul"}) or len(self.inputs) != len(self.args) or self.kwargs:
            return 0
        given = [a for a in self.args if isinstance(a, Tensor)]
        whole = [a for a in given if tuple(a.shape) == self.shape]
        rest = [a for a in given if a.dim() == len(self.shape) and fits(a, whole[0])] if len(whole) == 1 else []
        return len(rest) if len(self.shape) > 2 and len(rest) == len(given) - 1 == len(self.args) - 1 else 0

    @property
    def maps(self) -> bool:
        """A product with a tensor of one value for each position."""
        if self.name not in _PRODUCTS or len(self.inputs) != 2 or len(self.shape) not in (4, 5):
            return False
        return all(isinstance(a, Tensor) and tuple(a.shape) == self.shape for a in self.args[:2])

    @property
    def is_view(self) -> bool:
        """Whether it gives the same elements in other dims."""
        return self.name in VIEWS and len(self.inputs) == 1


UNREAD = object()


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


class Trace(TorchFunctionMode):
    """Every call of PyTorch's functions with who made its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.made: dict[int, Call] = {}
        self.alive: list[Any] = []  # ids are compared
        self.stack: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = list(tensors((args, kwargs)))
        got = list(tensors(result))
        name = str(getattr(func, "__name__", ""))
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or kwargs.get("inplace")
        known = [g for g in given if id(g) in self.made]
        if not got or (not writes and len(got) == 1 and any(got[0] is g for g in given)):
            return result  # nothing new: sizes, contiguous() of what is so
        if func in _DROPOUTS and not (kwargs.get("training", True) and kwargs.get("p", 0.5)):
            if known:
                self.made[id(got[0])] = self.made[id(known[0])]
            self.alive += got
            return result
        call = Call(func, tuple(args), kwargs, self.stack[-1] if self.stack else "", shape=tuple(got[0].shape))
        for g in given:
            maker = self.made.get(id(g))
            if isinstance(g, nn.Parameter):
                continue
            call.inputs.append((id(g), maker))
            if maker is not None:
                maker.readers.append(call)
        for g in got:
            self.made[id(g)] = call
        self.alive += [*given, *got]
        self.calls.append(call)
        return result


def traced(model: nn.Module, args: Any, kwargs: Any) -> list[Call]:
    names = {id(m): name for name, m in model.named_modules()}
    trace = Trace()
    before = nn.modules.module.register_module_forward_pre_hook(
        lambda m, _: trace.stack.append(names.get(id(m), trace.stack[-1] if trace.stack else ""))
    )
    after = nn.modules.module.register_module_forward_hook(
        lambda m, i, o: (trace.stack.pop(), None)[1], always_call=True
    )
    try:
        with trace, torch.no_grad():
            result = model(*args, **kwargs)
    finally:
        before.remove()
        after.remove()
    # What the network returns is read by the caller.
    end = Call(None, (), {}, "")
    values = result.values() if isinstance(result, dict) else [result]
    for value in values:
        for t in tensors(value if not hasattr(value, "__dict__") or isinstance(value, Tensor) else vars(value)):
            if id(t) in trace.made:
                trace.made[id(t)].readers.append(end)
    return trace.calls


@dataclass
class Norm:
    """One call of a norm, and what one of our ops could compute with it."""

    owner: str
    turn: int  # the how manieth of its owner
    around: list[str]
    then: str  # what reads it
    total: int = 0  # the sum that it is a part of: one of two norms can take it
    on_kgopt: bool = False
    fused: int = 0
    reason: str = ""

    @property
    def whole(self) -> bool:
        """Whether all around it is computed with it."""
        return self.fused >= len(self.around)


def expected(call: Call) -> tuple[list[str], int]:
    """What stands around a norm that the op could take, and which sum that is."""
    found: list[str] = []
    last, total = call, 0

    def sole(c: Call) -> Call | None:
        return c.readers[0] if len(c.readers) == 1 else None

    reader = sole(last)
    if reader is not None and reader.maps and (then := sole(reader)) is not None and then.sum:
        found += ["scale of each position", "shift of each position"]
        last, total = then, id(then)  # the shift may be another norm's value
    reader = sole(last)
    while reader is not None and reader.modulates and len(found) < 2:
        found += ["scale or shift"] * reader.modulates
        last = reader
        reader = sole(last)
    if not found and reader is not None and reader.sum:
        found.append("sum")
        last, total = reader, id(reader)
    viewed = False
    while (reader := sole(last)) is not None and not last.is_prelu:
        if reader.is_view:
            viewed, last = True, reader
            continue
        if not reader.act or (reader.is_prelu and (last.act or viewed)):
            break
        found.append(reader.name)
        last = reader
    return found, total


def norms_of(calls: list[Call]) -> list[Norm]:
    turns: collections.Counter[str] = collections.Counter()
    found = []
    for call in calls:
        if call.function not in NORMS:
            continue
        around, total = expected(call)
        then = ", ".join(dict.fromkeys(r.name for r in call.readers))
        found.append(Norm(call.owner, turns[call.owner], around, then, total))
        turns[call.owner] += 1
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The network optimized


@contextmanager
def recording(ran: list[tuple[Any, int]]) -> Iterator[None]:
    """``ran`` gets the norm of each site that kgopt's ops compute, and how many operations beside it."""
    run, run_added, run_modulated = sites.Site.run, sites.Site.run_added, sites.Site.run_modulated
    run_maps, run_call = sites.Site.run_maps, NormCall._run

    def count(text: str) -> int:
        return 0 if text == "none" else text.count("+") + 1

    def recorded_run(self: Any, *operands: Any, **more: Any) -> Any:
        ran.append((operands[self.norm_at], count(self.chain.post) + self.chain.residual))
        return run(self, *operands, **more)

    def recorded_added(self: Any, norm: Any, x: Any, other: Any, act: str, *more: Any) -> Any:
        y = run_added(self, norm, x, other, act, *more)
        if y is not None:
            ran.append((norm, 1 + count(act)))
        return y

    def recorded_modulated(self: Any, norm: Any, x: Any, factor: Any, shift: Any, act: str, *more: Any) -> Any:
        y = run_modulated(self, norm, x, factor, shift, act, *more)
        if y is not None:
            ran.append((norm, (factor is not None) + (shift is not None) + count(act)))
        return y

    def recorded_maps(self: Any, norm: Any, x: Any, factor: Any, shift: Any, act: str, *more: Any) -> Any:
        y = run_maps(self, norm, x, factor, shift, act, *more)
        if y is not None:
            ran.append((norm, 2 + count(act)))
        return y

    def recorded_call(self: Any, owner: Any, *call: Any) -> Any:
        y = run_call(self, owner, *call)
        if y is not None:
            ran.append((owner, count(self.site.chain.post)))
        return y

    NormCall._run = recorded_call  # type: ignore[method-assign]
    sites.Site.run, sites.Site.run_added = recorded_run, recorded_added  # type: ignore[method-assign]
    sites.Site.run_maps = recorded_maps  # type: ignore[method-assign]
    sites.Site.run_modulated = recorded_modulated  # type: ignore[method-assign]
    try:
        yield
    finally:
        NormCall._run = run_call  # type: ignore[method-assign]
        sites.Site.run, sites.Site.run_added = run, run_added  # type: ignore[method-assign]
        sites.Site.run_maps = run_maps  # type: ignore[method-assign]
        sites.Site.run_modulated = run_modulated  # type: ignore[method-assign]


def mark(found: list[Norm], model: nn.Module, args: Any, kwargs: Any) -> None:
    """Optimizes the network, calls it, and notes in ``found`` what ran."""
    kgopt.optimize(model, measure=False)
    names = {id(m): name for name, m in model.named_modules()}
    ran: list[tuple[Any, int]] = []
    with recording(ran), torch.no_grad():
        model(*args, **kwargs)
    at = {(n.owner, n.turn): n for n in found}
    turns: collections.Counter[str] = collections.Counter()
    for module, count in ran:
        owner = names.get(id(module), "?")
        norm = at.get((owner, turns[owner]))
        turns[owner] += 1
        if norm is not None:
            norm.on_kgopt, norm.fused = True, count
    for total in {n.total for n in found if n.total}:
        # A sum of two norms goes with one of them.
        several = sorted((n for n in found if n.total == total), key=lambda n: n.fused)
        for norm in several[:-1]:
            norm.around = []
    rows = {row.path: row for row in kgopt.report(model).sites}
    for norm in found:
        row = rows.get(norm.owner)
        if row is None:
            norm.reason = f"a function called by {type(model.get_submodule(norm.owner)).__name__}"
        else:
            norm.reason = row.reason or (
                f"no reason; around it: {' '.join(norm.around)}" if norm.around else "no reason"
            )


def looked_at(peer: Peer) -> list[Norm]:
    """The norms of a network that are reached by a call."""
    model = peer.make().eval()
    args, kwargs = peer.inputs()
    found = norms_of(traced(model, copy.deepcopy(args), copy.deepcopy(kwargs)))
    if found:
        mark(found, model, args, kwargs)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Tables


@dataclass
class Count:
    """Of a network or a library."""

    networks: int = 0
    norms: int = 0
    ours: int = 0
    joined: int = 0  # on kgopt, with something around them
    whole: int = 0  # of these, with all of it

    def add(self, found: list[Norm]) -> None:
        self.networks += 1
        self.norms += len(found)
        self.ours += sum(n.on_kgopt for n in found)
        self.joined += sum(n.on_kgopt and bool(n.around) for n in found)
        self.whole += sum(n.on_kgopt and bool(n.around) and n.whole for n in found)

    @property
    def cells(self) -> str:
        ours = f"{100 * self.ours / max(self.norms, 1):.1f} %"
        whole = f"{100 * self.whole / self.joined:.1f} %" if self.joined else ""
        return f"{self.norms} | {self.ours} | {ours} | {self.joined} | {self.whole} | {whole}"


def general(reason: str) -> str:
    """A reason without the names of one site."""
    return re.sub(r"\s+", " ", re.sub(r"\d+ times", "several times", reason))[:110]


def table(counts: dict[str, Count], reasons: dict[str, collections.Counter[str]]) -> str:
    total = Count()
    for c in counts.values():
        for name in vars(total):
            setattr(total, name, getattr(total, name) + getattr(c, name))
    lines = [
        "| library | networks | norms | on kgopt | share | with something around | all of it fused | share |",
        "|---|---|---|---|---|---|---|---|",
        *(f"| {name} | {c.networks} | {c.cells} |" for name, c in counts.items()),
        f"| **all** | {total.networks} | {total.cells} |",
    ]
    for title, counted in reasons.items():
        lines += ["", f"| {title} | norms |", "|---|---|"]
        lines += [f"| {reason} | {n} |" for reason, n in counted.most_common(12)]
    return "\n".join(lines)


def main() -> int:
    """Prints a line a network, and the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--write", action="store_true", help="draw the table of docs/coverage.md")
    parser.add_argument("--calls", action="store_true", help="print every norm that is left")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    offline()
    counts: dict[str, Count] = {}
    reasons: dict[str, collections.Counter[str]] = {
        "not on kgopt, because": collections.Counter(),
        "on kgopt, but not with all around it, because": collections.Counter(),
        "on kgopt, with nothing around it that an op takes; read by": collections.Counter(),
    }
    left, apart, bare = reasons.values()
    for peer in peers.all_peers():
        if options.words and not any(word in peer.id for word in options.words):
            continue
        peer = replace(peer, norm="")
        try:
            found = looked_at(peer)
        except Exception as error:  # whatever a library's code raises; scripts/peers.py tells faults of ours
            print(f"{peer.id}: {type(error).__name__}: {error}", flush=True)
            continue
        if not found:
            continue
        counts.setdefault(peer.library, Count()).add(found)
        one = Count()
        one.add(found)
        print(f"{peer.id:64s} {one.cells}", flush=True)
        for norm in found:
            if norm.on_kgopt and not norm.around:
                bare[norm.then or "the caller"] += 1
            if norm.on_kgopt and norm.whole:
                continue
            (apart if norm.on_kgopt else left)[general(norm.reason)] += 1
            if options.calls:
                print(f"    {norm.owner}: {' '.join(norm.around) or '-'} | read by {norm.then} | {norm.reason}")
    drawn = table(counts, reasons)
    print(drawn)
    if options.write:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n\n{drawn}\n\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
