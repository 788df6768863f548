"""Statements that read a norm's value while it waits, as they are written: products and sums, calls that move elements,
modules that may do nothing, and the activation, from the inside of an expression out.
"""

from __future__ import annotations

import ast
import types
from dataclasses import dataclass, replace
from typing import Any

import torch

from kgopt.rewrite.source.modulated.values import Edit, Value
from kgopt.rewrite.source.syntax.expressions import (
    elements_of,
    evaluated_first,
    gate_of,
    is_listed,
    is_name,
    is_plain,
    of_one_argument,
    reads_value,
    value_loads,
)
from kgopt.rewrite.source.syntax.names import copied, outside_scopes, walk
from kgopt.rewrite.source.syntax.quiet import is_quiet, modulates
from kgopt.rewrite.source.syntax.trees import as_function, assign, call_of, lambda_of
from kgopt.rewrite.waiting.modulated import VIEWS, Helper, Modulation

_MOVES = torch.flatten, torch.unflatten, torch.reshape, torch.permute, torch.transpose, torch.movedim, torch.squeeze
_FUNCTIONS = torch.mul, torch.add
_METHODS, _IN_PLACE = ("mul", "mul_", "add", "add_"), ("mul_", "add_")
_Act = tuple[str, Any, str]  # an activation's name, the function, the method's name


@dataclass
class _Part:
    """A part of an expression that may wait, and how it is written."""

    whole: ast.expr
    made: ast.expr
    is_product: bool = False  # or has one in it


class Forms:
    """Those of one value."""

    def __init__(self, value: Value) -> None:
        self.value, self.site, self.method = value, value.site, value.site.method

    # -------------------------------------------------------------------------------------------------- statements

    def begin(self, s: Any) -> Edit | None:
        """The statement with the norm."""
        call, begins = self.value.call, self.site.begins
        if begins.gives_more(call) and (call is not s.value or begins.first_of(s) is None):
            return None
        return self._written(s, _Part(call, begins.written(call)))

    def take(self, s: Any, name: str, may_rename: bool) -> Edit | None:
        """A statement that reads the variable; None where it needs the tensor."""
        return self._in_place(s, name) or self._gated(s, name, may_rename) or self.read(s, name, may_rename)

    def read(self, s: Any, name: str, may_rename: bool = False) -> Edit | None:
        """A statement that reads the variable once, the last to do so."""
        if not self._ends(s, name, may_rename):
            return None
        found = value_loads(s, name)
        if len(found) != 1 or not any(n is found[0] for n in outside_scopes(s.value)):
            return None
        return self._written(s, _Part(found[0], copied(found[0])))

    def _in_place(self, s: Any, name: str) -> Edit | None:
        """``h *= 1 + scale``, ``h += shift``, ``h.mul_(1 + scale)``."""
        if isinstance(s, ast.Expr):
            called = s.value.func if isinstance(s.value, ast.Call) else None
            is_method = isinstance(called, ast.Attribute) and is_name(called.value, name) and called.attr in _IN_PLACE
            part = self._by_name(s.value, _Part(called.value, copied(called.value))) if is_method else None  # type: ignore[union-attr]
            return None if part is None else Edit(s, assign(name, part.made, s), waits=name)
        if not isinstance(s, ast.AugAssign) or not is_name(s.target, name):
            return None
        if not isinstance(s.op, (ast.Mult, ast.Add)) or reads_value(s.value, name):
            return None
        if not is_quiet(self.method, s.value, self.value.between):
            return None
        is_product = isinstance(s.op, ast.Mult)
        self.value.uses.note(is_product, of_variable=True)
        operands = [ast.Name(name, ast.Load()), s.value]
        made = self.site.call("times_in_place" if is_product else "plus_in_place", operands, s)
        return Edit(s, assign(name, made, s), waits=name)

    def _gated(self, s: Any, name: str, may_rename: bool) -> Edit | None:
        """``h = h * torch.sigmoid(h)``, which is silu."""
        found = gate_of(s.value) if self._ends(s, name, may_rename) else None
        if found is None or not is_name(found[0], name):
            return None
        gate = found[1]
        inside = gate.args[0] if of_one_argument(gate) else getattr(gate.func, "value", None)
        act = self._act(gate, inside) if is_name(inside, name) else None
        if act is None or act[0] != "sigmoid" or act[1:] == (None, ""):  # what a module is shows later
            return None
        return Edit(s.value, self._then(s.value, found[0], ("silu", *act[1:]), gate))

    def _ends(self, s: Any, name: str, may_rename: bool) -> bool:
        """A statement with a value, behind which the variable holds that, or is not read any more."""
        if not isinstance(s, (ast.Assign, ast.AnnAssign, ast.Return)) or s.value is None:
            return False
        target = self.method.target(s)
        # A path that comes from elsewhere has it under one name: all come together in the body itself.
        may_rename = may_rename and target is not None and name not in self.site.live.after.get(id(s), {name})
        return isinstance(s, ast.Return) or target == name or may_rename

    def _written(self, s: Any, base: _Part) -> Edit | None:
        """A statement with all that it does to one part, the call of the norm or the variable that waits."""
        before = replace(self.value.uses)
        parents = {child: node for node in walk(s) for child in ast.iter_child_nodes(node)}
        part, around = base, _around(base.whole, parents)
        while isinstance(around, ast.expr) and (larger := self._larger(around, part)) is not None:
            part, around = larger, _around(around, parents)
        act = self._act(around, part.whole)
        if act is None and (passed := self._passed(s, part, is_base=part is base)) is not None:
            return passed
        is_variable = isinstance(base.whole, ast.Name)
        if act is not None:
            edit = Edit(around, self._then(around, part.made, act))
        elif is_variable and part is base:
            return None
        else:
            edit = Edit(part.whole, self.site.call("now", [part.made], part.whole))
        if is_variable and not evaluated_first(s.value, edit.old):  # type: ignore[arg-type]
            self.value.uses = before
            return None
        return edit

    def _passed(self, s: Any, part: _Part, is_base: bool) -> Edit | None:
        """Where the value waits on behind the statement: in a variable, or for the caller."""
        uses, begins = self.value.uses, self.site.begins
        may_give = isinstance(s, ast.Return) and self.site.gives and (uses.scaled or not uses.shifted)
        if part.whole is s.value:
            name = self.method.target(s)
            if name is None and is_base and isinstance(part.whole, ast.Call) and begins.gives_more(part.whole):
                name = begins.first_of(s)
            if name is None and not may_give:
                return None
            uses.given = uses.given or name is None
            return Edit(part.whole, part.made, waits=name)
        if not may_give or not _is_first_returned(s, part.whole):
            return None
        uses.given = uses.with_more = True
        return Edit(part.whole, part.made)

    # ------------------------------------------------------------------------------------------------- expressions

    def _larger(self, e: ast.expr, part: _Part) -> _Part | None:
        """The expression around a part, which may wait, too; None where it may not."""
        if isinstance(e, ast.BinOp):
            return self._computed(e, part)
        if not isinstance(e, ast.Call):
            return None
        if (by_name := self._by_name(e, part) or self._helped(e, part)) is not None:
            return by_name
        if part.is_product and self.value.uses.shifted:
            return None  # an op scales and then shifts, and that is all
        made = self._viewed(e, part) or self._called(e, part)
        return None if made is None else _Part(e, made, part.is_product)

    def _computed(self, e: ast.BinOp, part: _Part) -> _Part | None:
        """``h * e``, ``e + h``."""
        is_product = isinstance(e.op, ast.Mult)
        other = e.right if e.left is part.whole else e.left
        if not (is_product or isinstance(e.op, ast.Add)) or not self._may_compute(is_product, part, other):
            return None
        operands = [part.made if side is part.whole else side for side in (e.left, e.right)]
        return _Part(e, self.site.call("times" if is_product else "plus", operands, e), part.is_product or is_product)

    def _may_compute(self, is_product: bool, part: _Part, other: ast.expr) -> bool:
        """Whether a product or a sum with another value is taken; then it is noted."""
        uses = self.value.uses
        if uses.shifted and is_product and self._may_be_number(other):
            return False  # the sum with another tensor may be scaled (source/sums.py)
        if uses.shifted and part.is_product and not is_product and not is_plain(other):
            return False  # what a convolution gives may wait for the sum
        if not self._are_quiet(other):
            return False
        uses.note(is_product, isinstance(part.whole, ast.Name))
        return True

    def _may_be_number(self, e: ast.expr) -> bool:
        """A constant, arithmetic with some, an attribute that holds one or a property."""
        return not any(isinstance(n, ast.Name) for n in walk(e)) or self.method.what(e)[0] in ("number", "open")

    def _by_name(self, e: Any, part: _Part) -> _Part | None:
        """``torch.mul(h, s)``, ``h.mul(s)``, ``s.add(h)``, ``h.mul_(s)``."""
        if not isinstance(e, ast.Call) or e.keywords or not is_listed(e):
            return None
        how: ast.expr = e.func
        name = e.func.attr if isinstance(e.func, ast.Attribute) else ""
        if len(e.args) == 2 and (function := self.method.function(e.func)) in _FUNCTIONS:
            sides, is_product = e.args, function is torch.mul
        elif len(e.args) == 1 and name in _METHODS and self.method.path(e.func) is None:
            sides, is_product = [e.func.value, e.args[0]], name in ("mul", "mul_")  # type: ignore[attr-defined]
            how = ast.copy_location(ast.Constant(name), e)
        else:
            return None
        others = [side for side in sides if side is not part.whole]
        if len(others) != 1 or (name in _IN_PLACE and others[0] is sides[0] and how is not e.func):
            return None
        if not self._may_compute(is_product, part, others[0]):
            return None
        operands = [part.made if side is part.whole else side for side in sides]
        made = self.site.call("times_by" if is_product else "plus_by", [how, *operands], e)
        return _Part(e, made, part.is_product or is_product)

    def _helped(self, e: ast.Call, part: _Part) -> _Part | None:
        """``modulate(h, shift, scale)``, a user's function."""
        given = [*e.args, *(word.value for word in e.keywords)]
        if not is_listed(e) or not any(a is part.whole for a in given):
            return None
        function = self.method.function(e.func)
        at = next((i for i, a in enumerate(e.args) if a is part.whole), None)
        names = [str(word.arg) for word in e.keywords if word.value is part.whole]
        found = modulates(self.method, function, names[0] if at is None else at)
        if not found or not self._are_quiet(*(a for a in given if a is not part.whole)):
            return None
        uses = self.value.uses
        uses.scaled, uses.shifted = uses.scaled or "Mult" in found, uses.shifted or "Add" in found
        site = f"{self.site.name}_{len(self.site.written)}_{len(self.value.edits)}_{len(self.method.sites)}"
        self.method.sites[site] = Helper(function)
        made = call_of(site, "of", [e.func, *(part.made if a is part.whole else a for a in e.args)], e)
        made.keywords = [copied(n) for n in e.keywords]
        for old, new in zip(e.keywords, made.keywords, strict=True):
            new.value = part.made if old.value is part.whole else new.value
        return _Part(e, made, part.is_product or "Mult" in found)

    def _viewed(self, e: ast.Call, part: _Part) -> ast.expr | None:
        """A view, by a method or a function; None for any other call."""
        is_method = isinstance(e.func, ast.Attribute) and e.func.value is part.whole
        if is_method and e.func.attr in VIEWS:  # type: ignore[attr-defined]
            verb, first, rest = "view", [part.made, ast.Constant(e.func.attr)], e.args  # type: ignore[attr-defined]
        elif e.args and e.args[0] is part.whole and _moves(self.method.function(e.func)):
            verb, first, rest = "view_by", [e.func, part.made], e.args[1:]
        else:
            return None
        has_names = all(word.arg is not None for word in e.keywords)
        if not has_names or not self._are_quiet(*rest, *(word.value for word in e.keywords)):
            return None
        made = self.site.call(verb, [*first, *rest], e)
        made.keywords = [copied(n) for n in e.keywords]
        return made

    def _called(self, e: ast.Call, part: _Part) -> ast.expr | None:
        """What the running code names, a child that may do nothing, ``torch.addcmul``."""
        if e.keywords:
            return None
        if len(e.args) == 1:
            is_open = self.site.begins.is_open(e.func)
            if e.args[0] is not part.whole or not (is_open or self.method.what(e.func)[0] == "same"):
                return None
            self.value.uses.acted = self.value.uses.acted or is_open
            return self.site.call("step" if is_open else "skip", [e.func, part.made], e)
        if len(e.args) != 3 or not any(a is part.whole for a in e.args[1:]):
            return None
        others = [a for a in e.args if a is not part.whole]
        if self.method.function(e.func) is not torch.addcmul or not self._are_quiet(*others):
            return None
        self.value.uses.scaled = self.value.uses.shifted = True
        return self.site.call("addcmul", [e.func, *(part.made if a is part.whole else a for a in e.args)], e)

    def _are_quiet(self, *others: ast.expr) -> bool:
        """Whether expressions may be evaluated while the value waits; then the children that they call are noted."""
        called: list[str] = []
        are_quiet = all(is_quiet(self.method, e, called) for e in others)
        self.value.between += called if are_quiet else []
        return are_quiet

    def _act(self, e: Any, inside: Any) -> _Act | None:
        """What an expression does to the waiting value: an activation, or a call of what shows when the code runs."""
        if not isinstance(e, ast.Call):
            return None
        is_method = isinstance(e.func, ast.Attribute) and e.func.value is inside
        if not is_method and (not e.args or e.args[0] is not inside):
            return None
        if self.method.path(e.func) is None:
            return self.method.activation(e, inside)
        kind, name, _ = self.method.what(e.func)
        if not of_one_argument(e) or kind not in ("", "act", "tail", "function"):
            return None
        self.value.uses.acted = self.value.uses.acted or kind in ("act", "function")
        return (name if kind == "act" else "", None, "")

    def _then(self, e: Any, value: ast.expr, act: _Act, gate: ast.Call | None = None) -> ast.expr:
        """``act(value)`` as a call of the site's. ``gate``: the call in ``h * torch.sigmoid(h)``."""
        name, function, method = act
        uses = self.value.uses
        uses.acted, uses.act = uses.acted or bool(name), name or uses.act
        if function is None and not method:
            return self.site.call("then", [e.func, value], e)
        site = f"{self.site.name}_{len(self.site.written)}_{len(self.value.edits)}"
        self.method.sites[site] = Modulation(function, name, method)
        made = as_function(e, method) if gate is None else lambda_of(value.id, copied(e), e)  # type: ignore[attr-defined]
        return call_of(site, "then", [made, value, *([] if method else [(gate or e).func])], e)


def _around(e: ast.expr, parents: dict[ast.AST, ast.AST]) -> Any:
    """What an expression is a part of: the call, where it is what a method is called of, or is given by name."""
    parent = parents[e]
    if isinstance(parent, ast.keyword):
        return parents[parent]
    return parents[parent] if isinstance(parent, ast.Attribute) and isinstance(parents[parent], ast.Call) else parent


def _moves(function: Any) -> bool:
    """A function that gives the elements of its first argument in other dims."""
    if isinstance(function, types.FunctionType) and function.__name__ == "rearrange":
        return function.__module__.partition(".")[0] == "einops"
    return any(function is f for f in (*_MOVES, torch.unsqueeze))


def _is_first_returned(s: Any, e: ast.expr) -> bool:
    """``return h, caches``, where nothing is computed beside."""
    if not isinstance(s, ast.Return) or not isinstance(s.value, ast.Tuple):
        return False
    rest = [part for other in s.value.elts[1:] for part in elements_of(other)]
    return bool(rest) and s.value.elts[0] is e and all(map(is_plain, rest))
