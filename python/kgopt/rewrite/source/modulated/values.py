"""One norm's value while it waits: what the code does with it, and what is written into the method for that."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from kgopt.rewrite.chains.chain import Chain
from kgopt.rewrite.chains.roles import Path
from kgopt.rewrite.source.modulated.begins import Begins
from kgopt.rewrite.source.norm_calls import site_of
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.names import Live
from kgopt.rewrite.source.syntax.trees import answer, assign, become, call_of, replace
from kgopt.rewrite.waiting.modulated import Modulation


@dataclass
class Site:
    """What all values of one method share."""

    method: Method
    name: str
    begins: Begins
    gives: bool  # what waits may be returned
    live: Live
    counters: set[str]  # variables that hold whole numbers
    # The variable that waits behind a statement, and the value it was written for; none where it asks for the tensor.
    written: dict[ast.stmt, tuple[str | None, Value | None]] = field(default_factory=dict)
    chains: list[tuple[Path, Chain]] = field(default_factory=list)

    def call(self, verb: str, arguments: list[ast.expr], place: ast.AST) -> ast.Call:
        """``_kgopt_mod.verb(...)``."""
        return call_of(self.name, verb, arguments, place)

    def put_now(self, block: list[ast.stmt], at: int, name: str, place: ast.stmt) -> None:
        """Puts ``h = _kgopt_mod.now(h)`` into a block."""
        now = assign(name, self.call("now", [ast.Name(name, ast.Load())], place), place)
        self.written[now] = None, None
        block.insert(at, now)


@dataclass
class Uses:
    """What the code does with a value."""

    scaled: bool = False
    shifted: bool = False
    acted: bool = False  # a call takes it
    acted_first: bool = False  # and a sum reads what it gave of a variable: if that is a norm's value, it waits as well
    given: bool = False  # it is returned
    with_more: bool = False  # in a tuple, as the first of several values
    act: str = "none"

    def note(self, is_product: bool, of_variable: bool) -> None:
        """A product, or a sum, of what a variable holds or a call has just given."""
        if is_product:
            self.scaled = True
        else:
            self.acted_first = self.acted and of_variable and not self.shifted
            self.shifted = True


@dataclass
class Edit:
    """What stands in the place of a statement, or of a part of it, and the variable that waits behind it."""

    old: ast.AST
    new: ast.AST
    waits: str | None = None


@dataclass
class Value:
    """The value of one call; nothing is written before all its paths are known."""

    site: Site
    call: ast.Call
    uses: Uses = field(default_factory=Uses)
    between: list[str] = field(default_factory=list)  # children that are called while it waits
    edits: dict[ast.stmt, Edit] = field(default_factory=dict)
    asked: list[tuple[ast.AST, str]] = field(default_factory=list)  # code that may ask for its sizes, and the variables
    stops: dict[ast.stmt, tuple[list[ast.stmt], str]] = field(default_factory=dict)  # in front of these it has to be a
    # tensor: their blocks, and the variables
    ends: list[tuple[list[ast.stmt], ast.stmt, str]] = field(default_factory=list)  # and behind these

    @property
    def is_function(self) -> bool:
        """Whether a function is the norm."""
        return self.call in self.site.begins.functions

    @property
    def is_modulated(self) -> bool:
        """Whether what the code does with it is worth waiting for; of a function's value an activation alone is not."""
        uses = self.uses
        is_taken = uses.given or (uses.acted and not self.is_function)
        return uses.scaled or (is_taken and (uses.acted_first or not uses.shifted))

    def write(self) -> None:
        """Writes what was found into the method's tree."""
        site, method = self.site, self.site.method
        method.sites.setdefault(site.name, Modulation())
        if self.is_function:
            method.sites[site.begins.functions[self.call]] = site_of(method, self.call)
        if self.uses.with_more:
            method.gives_more = True
        else:
            method.gives = method.gives or self.uses.given
        for s, edit in self.edits.items():
            site.begins.tell(edit.new, self.between, self.call)
            if edit.old is s:
                become(s, edit.new)
            else:
                replace(s, edit.old, edit.new)
            site.written[s] = edit.waits, self
        for tree, name in self.asked:
            answer(tree, name, site.name)
        for s, (block, name) in self.stops.items():
            site.put_now(block, block.index(s), name, s)
        for block, s, name in self.ends:
            if name in site.live.after.get(id(s), {name}):
                site.put_now(block, block.index(s) + 1, name, s)
        path, (kind, norm, _) = method.path(self.call.func), method.what(self.call.func)
        if path is not None and kind == "norm":
            uses = self.uses
            site.chains.append((path, Chain(norm, scaled=uses.scaled, shifted=uses.shifted, post=uses.act)))
