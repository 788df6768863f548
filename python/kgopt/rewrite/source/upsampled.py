"""Nearest upsampling whose value a convolution reads, in the source of a method.

``h = F.interpolate(h)`` becomes ``h = _kgopt_up.begin(F.interpolate, h)``, which may give what is no tensor yet, and
``self.conv(h)`` becomes ``_kgopt_up.through(self.conv, h)``. Between the two, along every path of tests, only
statements run that change no tensor: in front of any other one, and of one that reads the value otherwise, stands
``h = _kgopt_up.now(h)``. So only these functions ever see what is no tensor.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any

from kgopt.rewrite.glue.calls import INTERPOLATE
from kgopt.rewrite.meanings import UNKNOWN
from kgopt.rewrite.source.expressions import assign, call_of, constant, evaluated_first, is_plain, is_test, replace
from kgopt.rewrite.source.method import Method
from kgopt.rewrite.source.names import SCOPES, blocks, liveness, reads, writes
from kgopt.rewrite.sums import Sum
from kgopt.rewrite.upsampling import Wait

_CONVS = ("conv2d", "conv3d")


class Upsamplings:
    """Those of one method."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.name = f"_kgopt_up_{len(method.sites)}"
        self.live = liveness(method.tree.body)

    def run(self) -> None:
        """Writes them. What else is written into a method stands there already."""
        body = self.method.tree.body
        passes: dict[int, tuple[ast.stmt, ast.Call | None]] = {}
        stops: dict[int, tuple[list[ast.stmt], ast.stmt, str]] = {}
        begins: list[tuple[ast.stmt, ast.Call]] = []
        for path in self._assignments(body, []):
            block, k = path[-1]
            statement: Any = block[k]
            found = _Paths(self, str(self.method.target(statement)))
            is_waiting = True
            for outer, i in reversed(path):
                is_waiting = is_waiting and found.follow(outer, i + 1)
            if found.passes:
                begins.append((statement, statement.value))
                passes |= found.passes
                stops |= found.stops
        # What is written copies what it holds, so that this has to be written by then.
        inner = list(self._nested(body))
        for statement, call in passes.values():
            if call is not None:
                replace(statement, call, call_of(self.name, "through", [call.func, call.args[0]], call))
        for statement, call in reversed(inner):
            begin = self._begin(call.args[0])
            replace(statement, call, call_of(self.name, "through", [call.func, begin], call))
        for statement, call in begins:
            replace(statement, call, self._begin(call))
        for block, before, name in stops.values():
            load = ast.copy_location(ast.Name(name, ast.Load()), before)
            now = assign(name, call_of(self.name, "now", [load], load), before)
            block.insert([s is before for s in block].index(True), now)
        if begins or inner:
            self.method.sites[self.name] = Wait()

    def _begin(self, call: Any) -> ast.Call:
        made = call_of(self.name, "begin", [call.func, *call.args], call)
        made.keywords = copy.deepcopy(call.keywords)
        return made

    def _assignments(
        self, body: list[ast.stmt], outside: list[tuple[list[ast.stmt], int]]
    ) -> Iterator[list[tuple[list[ast.stmt], int]]]:
        """Statements that only assign an upsampling, outside of loops, as the blocks and places that lead to them."""
        for k, statement in enumerate(body):
            here = [*outside, (body, k)]
            if self.method.target(statement) is not None and self._upsamples(statement.value):  # type: ignore[attr-defined]
                yield here
            elif isinstance(statement, ast.If):
                yield from self._assignments(statement.body, here)
                yield from self._assignments(statement.orelse, here)

    def _nested(self, body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.Call]]:
        """``self.conv(F.interpolate(x))`` in one expression."""
        for statement in body:
            if isinstance(statement, (*SCOPES, ast.ClassDef)):
                continue
            inner = list(blocks(statement))
            for block in inner:
                yield from self._nested(block)
            if inner:
                continue
            for e in ast.walk(statement):
                if self._convolves(e) and self._upsamples(e.args[0]):  # type: ignore[attr-defined]
                    yield statement, e  # type: ignore[misc]

    def _upsamples(self, e: Any) -> bool:
        if not isinstance(e, ast.Call) or any(isinstance(a, ast.Starred) for a in e.args):
            return False
        path = self.method.path(e.func)
        if path:
            role = self.method.role(path)
            return role is not None and role[0] == "up" and len(e.args) == 1 and not e.keywords
        if self.method.function(e.func) is not INTERPOLATE or any(word.arg is None for word in e.keywords):
            return False
        mode = next((constant(word.value) for word in e.keywords if word.arg == "mode"), "nearest")
        return mode is UNKNOWN or mode in ("nearest", "nearest-exact")

    def _convolves(self, e: Any) -> bool:
        """``self.conv(h)``."""
        is_call = isinstance(e, ast.Call) and len(e.args) == 1 and not e.keywords
        return is_call and not isinstance(e.args[0], ast.Starred) and self._is_conv(e.func)

    def _is_conv(self, e: ast.expr) -> bool:
        path = self.method.path(e)
        role = self.method.role(path) if path else None
        return role is not None and role[0] == "conv" and role[1] in _CONVS


class _Paths:
    """Where the value of a variable goes from the statement that upsamples."""

    def __init__(self, upsamplings: Upsamplings, name: str) -> None:
        self.of = upsamplings
        self.method = upsamplings.method
        self.name = name
        self.passes: dict[int, tuple[ast.stmt, ast.Call | None]] = {}  # statements that give it to a convolution, by id
        self.stops: dict[int, tuple[list[ast.stmt], ast.stmt, str]] = {}  # those before which it has to be a tensor

    def follow(self, block: list[ast.stmt], start: int) -> bool:
        """Goes through a block; whether the value may still wait at its end."""
        for s in block[start:]:
            passed = self._pass(s)
            if passed is not None:
                self.passes[id(s)] = passed
                return False
            is_read = self.name in reads(s)
            if isinstance(s, ast.If) and self._is_quiet(s.test) and self.name not in reads(s.test):
                waits = [self.follow(s.body, 0), self.follow(s.orelse, 0)]
                if not any(waits):
                    return False
            elif not is_read and (isinstance(s, (ast.Return, ast.Raise)) or self.name in writes(s)):
                return False  # nobody reads it
            elif is_read or not self._is_harmless(s):
                self.stops[id(s)] = block, s, self.name
                return False
        return True

    def _pass(self, s: Any) -> tuple[ast.stmt, ast.Call | None] | None:
        """A statement that gives the value to a convolution, the last to read it, and the call, if it is to be written.

        What begins a sum takes it as it is.
        """
        if not isinstance(s, (ast.Assign, ast.AnnAssign, ast.Return)) or s.value is None:
            return None
        loads = [n for n in ast.walk(s) if isinstance(n, ast.Name) and n.id == self.name]
        if sum(isinstance(n.ctx, ast.Load) for n in loads) != 1:
            return None
        target = None if isinstance(s, ast.Return) else self.method.target(s)
        may_live = isinstance(s, ast.Return) or target == self.name
        if not may_live and (target is None or self.name in self.of.live.after.get(id(s), {self.name})):
            return None
        for e in ast.walk(s.value):
            if not isinstance(e, ast.Call) or not evaluated_first(s.value, e):
                continue
            if self.of._convolves(e) and self._is_it(e.args[0]):
                return s, e
            if self._begins_sum(e) and self.of._is_conv(e.args[0]) and self._is_it(e.args[1]):
                return s, None
        return None

    def _begins_sum(self, e: ast.Call) -> bool:
        of = e.func.value if isinstance(e.func, ast.Attribute) and e.func.attr == "begin" else None
        return isinstance(of, ast.Name) and isinstance(self.method.sites.get(of.id), Sum) and len(e.args) >= 2

    def _is_it(self, e: ast.expr) -> bool:
        return isinstance(e, ast.Name) and e.id == self.name

    def _is_quiet(self, e: ast.expr) -> bool:
        """A test that changes no tensor: a function that is given constants alone has none to change."""
        if isinstance(e, ast.BoolOp):
            return all(map(self._is_quiet, e.values))
        if isinstance(e, ast.UnaryOp):
            return isinstance(e.op, ast.Not) and self._is_quiet(e.operand)
        if isinstance(e, ast.Call):
            values = [*e.args, *(word.value for word in e.keywords)]
            return self.method.function(e.func) is not None and all(constant(v) is not UNKNOWN for v in values)
        return is_test(e)

    def _is_harmless(self, s: ast.stmt) -> bool:
        if isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)):
            return True
        if not isinstance(s, ast.Assign) or not all(map(is_plain, _parts(s.value))):
            return False
        return all(isinstance(t, ast.Name) for target in s.targets for t in _parts(target))


def _parts(e: ast.expr) -> list[ast.expr]:
    return e.elts if isinstance(e, ast.Tuple) else [e]
