"""Sums with the value of a convolution, or of a module known only when the code runs: see :mod:`kgopt.rewrite.sums`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from kgopt.rewrite.source.expressions import assign, call_of, evaluated_first, is_plain, is_test, replace
from kgopt.rewrite.source.method import Method
from kgopt.rewrite.source.names import SCOPES, blocks, liveness, reads, writes
from kgopt.rewrite.sums import Sum


class Sums:
    """Those of one method."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def run(self, body: list[ast.stmt]) -> None:
        """Sums with the value of a convolution, or of a module that is known when the code runs."""
        for statement in body:
            if isinstance(statement, (ast.If, ast.For, ast.While)) or (
                isinstance(statement, ast.With) and self.method.lets_errors_pass(statement)
            ):
                for block in blocks(statement):
                    self.run(block)
        for k in range(len(body)):
            self._sum_of_call(body[k])
            self._sum_of_names(body, k)

    def _sum_of_call(self, statement: ast.stmt) -> None:
        """``x + self.conv(h)``, ``up(x) + skips[i]``."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return)):
            return
        while statement.value is not None:
            found = next(self._sums_of_calls(statement.value), None)
            if found is None:
                return
            self._write_sum(statement, *found)

    def _sums_of_calls(self, e: ast.AST) -> Iterator[tuple[ast.BinOp, ast.expr]]:
        """Sums in an expression, and which side of each is the call."""
        if isinstance(e, SCOPES):
            return
        if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Add):
            if self._can_wait(e.right):
                yield e, e.right
            elif self._can_wait(e.left) and is_plain(e.right):  # what is on the right is evaluated while it waits
                yield e, e.left
        for child in ast.iter_child_nodes(e):
            yield from self._sums_of_calls(child)

    def _can_wait(self, e: ast.expr) -> bool:
        """A call with one argument of a convolution, or of something in a local variable."""
        if not isinstance(e, ast.Call) or len(e.args) != 1 or e.keywords or isinstance(e.args[0], ast.Starred):
            return False
        path = self.method.path(e.func)
        if path is not None:
            role = self.method.role(path)
            return role is not None and role[0] in ("conv", "tail")
        return isinstance(e.func, ast.Name) and e.func.id in self.method.locals and e.func.id not in self.method.hidden

    def _write_sum(self, statement: ast.stmt, e: ast.BinOp, call: ast.expr) -> None:
        name = self._new_sum()
        assert isinstance(call, ast.Call)
        begin = call_of(name, "begin", [call.func, call.args[0]], call)
        operands = [begin if side is call else side for side in (e.left, e.right)]
        replace(statement, e, call_of(name, "finish", operands, e))

    def _sum_of_names(self, body: list[ast.stmt], k: int) -> None:
        """``h = self.conv(h)``, some harmless statements, ``(x + h) / self.scale`` or ``h += x``."""
        target = self.method.target(body[k])
        call = getattr(body[k], "value", None)
        if target is None or call is None or not self._can_wait(call) or self.method.path(call.func) is None:
            return
        between: list[str] = []
        last = k + 1
        while last < len(body) and target not in reads(body[last]):
            if target in writes(body[last]) or not self._is_harmless(body[last], between):
                return
            last += 1
        if last == len(body) or not isinstance(body[last], (ast.Assign, ast.AnnAssign, ast.Return, ast.AugAssign)):
            return
        statement: Any = body[last]
        if isinstance(statement, ast.AugAssign):
            self._add_in_place(body, k, last, call, between)
            return
        found = self._sum_with(statement.value, target)
        loads = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == target]
        read = [n for n in loads if isinstance(n.ctx, ast.Load)]
        dead = target not in liveness(self.method.tree.body).after.get(id(statement), set())
        if found is None or len(read) != 1 or not dead or not evaluated_first(statement.value, found[0]):
            return
        whole, sides, divisor = found
        name = self._new_sum()
        replace(body[k], call, self._begin(name, call, between))
        replace(statement, whole, call_of(name, "finish", [*sides, *([divisor] if divisor is not None else [])], whole))

    def _add_in_place(self, body: list[ast.stmt], k: int, last: int, call: Any, between: list[str]) -> None:
        """``h += x``, where h is what the call gave."""
        statement: Any = body[last]
        if not isinstance(statement.op, ast.Add) or not isinstance(statement.target, ast.Name):
            return
        if statement.target.id != self.method.target(body[k]) or not is_plain(statement.value):
            return
        if statement.target.id in reads(statement.value):
            return
        name = self._new_sum()
        replace(body[k], call, self._begin(name, call, between))
        read = ast.copy_location(ast.Name(statement.target.id, ast.Load()), statement)
        result = call_of(name, "finish_in_place", [read, statement.value], statement.value)
        body[last] = assign(statement.target.id, result, statement)

    def _begin(self, name: str, call: Any, between: list[str]) -> ast.Call:
        more = [ast.Name(self.method.self_name, ast.Load()), *map(ast.Constant, between)] if between else []
        for e in more:
            ast.copy_location(e, call)
        return call_of(name, "begin", [call.func, call.args[0], *more], call)

    def _sum_with(self, value: ast.expr, name: str) -> tuple[ast.expr, list[ast.expr], ast.expr | None] | None:
        """The sum of a variable and something plain, perhaps divided by an attribute, and its parts."""
        for e in ast.walk(value):
            divisor = None
            inner = e
            if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Div) and isinstance(e.right, ast.Attribute):
                inner, divisor = e.left, e.right
            if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Add):
                sides = [inner.left, inner.right]
                named = any(isinstance(s, ast.Name) and s.id == name for s in sides)
                if named and all(map(is_plain, sides)) and (divisor is None or is_plain(divisor)):
                    assert isinstance(e, ast.expr)
                    return e, sides, divisor
        return None

    def _is_harmless(self, s: ast.stmt, between: list[str]) -> bool:
        """Changes no tensor: tests, plain assignments, ``.contiguous()``, calls of convolutions (into ``between``)."""
        if isinstance(s, ast.If):
            return is_test(s.test) and all(self._is_harmless(inner, between) for inner in (*s.body, *s.orelse))
        if isinstance(s, ast.Pass):
            return True
        if self.method.target(s) is None:
            return False
        value = s.value  # type: ignore[attr-defined]
        if is_plain(value):
            return True
        if not isinstance(value, ast.Call) or value.keywords or not all(map(is_plain, value.args)):
            return False
        path = self.method.path(value.func)
        if path is not None and len(path) == 1 and len(value.args) == 1:
            between.append(str(path[0]))  # begin looks at what it is
            return True
        is_method = isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Name)
        return is_method and value.func.attr == "contiguous" and not value.args  # type: ignore[attr-defined]

    def _new_sum(self) -> str:
        name = f"_kgopt_sum_{len(self.method.sites)}"
        self.method.sites[name] = Sum()
        return name
