"""Sums with the value of a norm, a convolution, or a module known only when the code runs: see
:mod:`kgopt.rewrite.waiting.sums`.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kgopt.rewrite.chains.chain import Chain
from kgopt.rewrite.chains.roles import Path
from kgopt.rewrite.source.modulated.begins import OpenCalls
from kgopt.rewrite.source.norm_calls import is_norm_call, site_of, waiting_call
from kgopt.rewrite.source.syntax.expressions import (
    called_of,
    constant,
    evaluated_first,
    is_name,
    is_plain,
    is_test,
    of_one_argument,
    reads_value,
)
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.names import blocks, copied, liveness, loads, outside_scopes, reads, walk, writes
from kgopt.rewrite.source.syntax.quiet import is_quiet
from kgopt.rewrite.source.syntax.trees import answer, as_function, assign, become, call_of, forgotten, replace
from kgopt.rewrite.waiting.sums import Activated, Sum

_FINISHED = ("finish", "finish_in_place", "finish_by", "finish_over", "finish_times")  # methods that give a sum
_SCALED = {ast.Div: "finish_over", ast.Mult: "finish_times"}  # by what is done to the sum
_Scaled = tuple[ast.expr, str, list[ast.expr]]
_IsTotal = Callable[[Any], bool]  # what an activation may be computed with
_Join = Callable[[ast.Call, Any], bool]  # turns the activation's call into one of both, if it may


class Sums:
    """Those of one method."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self._is_open = OpenCalls(method).is_open
        self._norms: dict[str, tuple[Path, str, str]] = {}  # by the sum's name: which norm, its kind, the activation

    def chains(self) -> list[tuple[Path, Chain]]:
        """Those that begin with a norm of the method's own."""
        return [(path, Chain(kind, added=True, post=act)) for path, kind, act in self._norms.values()]

    def run(self, body: list[ast.stmt]) -> None:
        """Writes those of a block and of the blocks in it."""
        for statement in body:
            for block in self._blocks_of(statement):
                self.run(block)
        for k in range(len(body)):
            self._sum_of_call(body[k])
            self._sum_of_names(body, k)
        for statement in body:
            self._act_on(statement, self._is_sum, self._join)
        self._act_behind_all(body, self._is_sum, self._join)

    def _blocks_of(self, statement: ast.stmt) -> list[list[ast.stmt]]:
        """The blocks in a statement that run in its method's own order."""
        runs_in_order = isinstance(statement, (ast.If, ast.For, ast.While)) or (
            isinstance(statement, ast.With) and self.method.lets_errors_pass(statement)
        )
        return list(blocks(statement)) if runs_in_order else []

    def _sum_of_call(self, statement: ast.stmt) -> None:
        """``x + self.conv(h)``, ``up(x) + skips[i]``."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return)):
            return
        while statement.value is not None:
            found = next(self._sums_of_calls(statement.value), None)
            if found is None:
                return
            self._write_sum(statement, *found)

    def _sums_of_calls(self, e: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
        """Sums in an expression, and which side of each is the call."""
        for part in outside_scopes(e):
            sides = self._addition(part)
            if sides is None:
                continue
            left, right, _ = sides
            calls = [(side, inner) for side in (right, left) if self._can_wait(inner := self.method.inside(side))]
            for side, inner in sorted(calls, key=lambda call: self._shows_later(call[1])):
                if side is right or self._may_run_beside(inner, right, []):
                    yield part, side
                    break

    def _addition(self, e: Any) -> tuple[ast.expr, ast.expr, list[ast.expr]] | None:
        """The sides of ``a + b``, ``torch.add(a, b)``, ``a.add(b)`` or ``a.add_(b)``, and how the site is told of a
        function.
        """
        if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Add):
            return e.left, e.right, []
        if not isinstance(e, ast.Call) or any(isinstance(a, ast.Starred) for a in e.args):
            return None
        if self.method.function(e.func) is torch.add:
            given = [*e.args, *(word.value for word in e.keywords)]
            names = [word.arg for word in e.keywords]
            return (given[0], given[1], [e.func]) if names == ["input", "other"][len(e.args) :] else None
        is_method = isinstance(e.func, ast.Attribute) and e.func.attr in ("add", "add_")
        if not is_method or len(e.args) != 1 or e.keywords or self.method.path(e.func) is not None:
            return None
        return e.func.value, e.args[0], [ast.copy_location(ast.Constant(e.func.attr), e)]  # type: ignore[attr-defined]

    def _may_run_beside(self, call: ast.expr, e: ast.expr, between: list[str]) -> bool:
        """Whether an expression may be evaluated while the value of ``call`` waits; it calls children ``between``."""
        if is_plain(e):
            return True
        kind, name, _ = self.method.what(call.func)  # type: ignore[attr-defined]
        is_norm = kind == "norm" or (kind, name) == ("tail", "norm")
        return (is_norm or is_norm_call(self.method, call)) and is_quiet(self.method, e, between)

    def _can_wait(self, e: ast.expr) -> bool:
        """A call with one argument of a convolution, or of what shows when the code runs; a norm as a function."""
        if is_norm_call(self.method, e):
            return True
        if not isinstance(e, ast.Call) or not of_one_argument(e):
            return False
        return self._shows_later(e) or self.method.what(e.func)[0] in ("conv", "norm", "tail")

    def _shows_later(self, e: Any) -> bool:
        """Whether only the running code says what is called: a local variable, ``self.norms[i]``, a property."""
        called = e.func
        if isinstance(called, ast.Name):
            return called.id in self.method.locals - self.method.hidden
        return self._is_open(called)

    def _scaled(self, e: Any) -> _Scaled | None:
        """``(a + b) / c``, ``(a + b) * c``, ``2 * (a + b)``: what is scaled, the site's method, and how."""
        if not isinstance(e, ast.BinOp) or type(e.op) not in _SCALED:
            return None
        if self._may_be_number(e.right):
            is_left = [ast.copy_location(ast.Constant(False), e)] if isinstance(e.op, ast.Mult) else []
            return e.left, _SCALED[type(e.op)], [e.right, *is_left]
        if not isinstance(e.op, ast.Mult) or not _is_number(e.left):
            return None
        return e.right, _SCALED[ast.Mult], [e.left, ast.copy_location(ast.Constant(True), e)]

    def _may_be_number(self, e: ast.expr) -> bool:
        """A number, arithmetic or a root of some, an attribute: it shows when the code runs."""
        if isinstance(e, ast.Attribute):
            return is_plain(e)
        if of_one_argument(e):
            function = self.method.function(e.func)  # type: ignore[attr-defined]
            is_root = getattr(function, "__name__", "") == "sqrt" and not isinstance(function, types.FunctionType)
            return is_root and self._may_be_number(e.args[0])  # type: ignore[attr-defined]
        return _is_number(e)

    def _write_sum(self, statement: ast.stmt, e: ast.expr, side: ast.expr) -> None:
        sides, call = self._addition(e), self.method.inside(side)
        assert sides is not None
        assert isinstance(call, ast.Call)
        left, right, how = sides
        name = self._new_sum(call)
        between: list[str] = []
        if side is left:
            self._may_run_beside(call, right, between)
        begin = self.method.skipped(name, side, self._begin(name, call, between))
        operands = [begin if s is side else s for s in (left, right)]
        around = None if how else next((n for n in walk(statement) if (self._scaled(n) or [None])[0] is e), None)
        whole = e if around is None else around
        replace(statement, whole, _finished(name, [*how, *operands], bool(how), self._scaled(around), whole))

    def _sum_of_names(self, body: list[ast.stmt], k: int) -> None:
        """``h = self.conv(h)``, some harmless statements, ``(x + h) / self.scale`` or ``h += x``."""
        target = self.method.target(body[k])
        call = getattr(body[k], "value", None)
        if target is None or call is None or not self._can_wait(call):
            return
        between: list[str] = []
        early: list[ast.stmt] = []  # statements that may read the value, or ask for its sizes
        last = k + 1
        while last < len(body):
            if target in reads(body[last]) and self._sum_in_branch(body, k, last, [*between], [*early]):
                return
            if not self._lets_wait(body[last], target, between, early):
                break
            last += 1
        if last < len(body) and target in reads(body[last]):
            self._add(body[k], body, last, between, early)

    def _lets_wait(self, s: ast.stmt, name: str, between: list[str], early: list[ast.stmt]) -> bool:
        """Whether a value may wait on behind a statement, which may read it ``early``."""
        if self._reads_in_branch(s, name) or self._passes(s, name):
            early.append(s)
            return True
        if reads_value(s, name) or name in writes(s) or not self._is_harmless(s, between):
            return False
        early.append(s)  # which may ask for its sizes
        return True

    def _add(self, first: ast.stmt, body: list[ast.stmt], last: int, between: list[str], early: list[ast.stmt]) -> bool:
        """Writes the sum that a statement computes of what the first one calls; whether it is one."""
        statement = body[last]
        if isinstance(statement, (ast.AugAssign, ast.Expr)):
            return self._add_in_place(first, body, last, between, early)
        has_value = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return)) and statement.value is not None
        return has_value and self._add_names(first, statement, between, early)

    def _add_names(self, first: Any, statement: Any, between: list[str], early: list[ast.stmt]) -> bool:
        """``(x + h) / self.scale``."""
        target, call = str(self.method.target(first)), first.value
        found = self._sum_with(statement.value, target, call, between)
        anew = self.method.target(statement) == target
        dead = anew or target not in liveness(self.method.tree.body).after.get(id(statement), set())
        is_last = dead and len(loads(statement, target)) == 1  # that reads it
        if found is None or not is_last or not evaluated_first(statement.value, found[0]):
            return False
        whole, sides, scaled, how = found
        name = self._new_sum(call)
        replace(first, call, self._begin(name, call, between))
        self._read_now(name, early, target)
        sides = [
            self.method.skipped(name, s, self.method.inside(s)) if self._is_passed(s, target) else s for s in sides
        ]
        replace(statement, whole, _finished(name, [*how, *sides], bool(how), scaled, whole))
        return True

    def _sum_in_branch(
        self, body: list[ast.stmt], k: int, last: int, between: list[str], early: list[ast.stmt]
    ) -> bool:
        """``if self.has_skip: h = self.drop_path(h) + x`` or ``return h + x``: else the value is computed there."""
        branch: Any = body[last]
        target = str(self.method.target(body[k]))
        is_branch = isinstance(branch, ast.If) and self._is_test(branch.test)
        if not is_branch or reads_value(branch.test, target):
            return False
        rest = (i for i, s in enumerate(branch.body) if not self._lets_wait(s, target, between, early))
        i = next(rest, None)
        if i is None or target not in reads(branch.body[i]):
            return False
        statement = branch.body[i]
        anew = isinstance(statement, ast.Assign) and self.method.target(statement) == target
        if not (anew or isinstance(statement, (ast.AugAssign, ast.Expr, ast.Return))):
            return False
        if not self._add(body[k], branch.body, i, between, early):
            return False
        call: Any = body[k].value  # type: ignore[attr-defined]
        read = ast.Name(target, ast.Load())
        answer(branch.test, target, call.func.value.id)
        now = assign(target, call_of(call.func.value.id, "now", [read], branch), branch)
        branch.orelse = [now, *branch.orelse]
        self._act_on(branch.body[i], self._is_sum, self._join)
        self._act_behind_all(branch.body, self._is_sum, self._join)
        return True

    def _reads_in_branch(self, s: ast.stmt, name: str) -> bool:
        """``if self.drop: h = self.drop_path(h)``: whatever it does, it does to the value itself."""
        if not isinstance(s, ast.If) or s.orelse or not is_test(s.test) or name in reads(s.test):
            return False
        return all(isinstance(inner, ast.Assign) and self.method.target(inner) == name for inner in s.body)

    def _read_now(self, sum_name: str, statements: list[ast.stmt], name: str) -> None:
        for statement in statements:
            if self._passes(statement, name):
                call: Any = statement.value  # type: ignore[attr-defined]
                replace(statement, call, call_of(sum_name, "skip", [call.func, *call.args], call))
                continue
            if not reads_value(statement, name):
                answer(statement, name, sum_name)
                continue
            for load in loads(statement, name):
                replace(statement, load, call_of(sum_name, "now", [load], load))

    def _add_in_place(
        self, first: Any, body: list[ast.stmt], last: int, between: list[str], early: list[ast.stmt]
    ) -> bool:
        """``h += x`` or ``h.add_(x)``, where h is what the first statement's call gave; whether it is so."""
        statement: Any = body[last]
        how: list[ast.expr] = []
        if isinstance(statement, ast.Expr):
            sides = self._addition(statement.value)
            if sides is None or [constant(e) for e in sides[2]] != ["add_"]:
                return False
            target, added, how = sides
        else:
            target, added = statement.target, statement.value
            if not isinstance(statement.op, ast.Add):
                return False
        if not isinstance(target, ast.Name) or target.id != self.method.target(first):
            return False
        if not is_plain(added) or target.id in reads(added):
            return False
        call = first.value
        name = self._new_sum(call)
        replace(first, call, self._begin(name, call, between))
        self._read_now(name, early, target.id)
        read = ast.copy_location(ast.Name(target.id, ast.Load()), statement)
        result = call_of(name, "finish_by" if how else "finish_in_place", [*how, read, added], statement.value)
        body[last] = assign(target.id, result, statement)
        return True

    def _begin(self, name: str, call: Any, between: list[str]) -> ast.Call:
        more = [ast.Name(self.method.self_name, ast.Load()), *map(ast.Constant, between)] if between else []
        if is_norm_call(self.method, call):
            site = f"_kgopt_norm_{len(self.method.sites)}"
            self.method.sites[site] = site_of(self.method, call)
            return waiting_call(self.method, call, site, "begin", more)
        return call_of(name, "begin", [call.func, call.args[0], *more], call)

    def _sum_with(
        self, value: ast.expr, name: str, call: ast.expr, between: list[str]
    ) -> tuple[ast.expr, list[ast.expr], _Scaled | None, list[ast.expr]] | None:
        """The sum of a variable and something plain, perhaps scaled, its parts, how it is scaled, how it is written."""
        for e in walk(value):
            scaled = self._scaled(e)
            found = self._addition(e if scaled is None else scaled[0])
            if found is not None and not (found[2] and scaled is not None):
                sides, how = [*found[:2]], found[2]
                named = [self._is_passed(s, name) for s in sides]
                others = [s for s, passed in zip(sides, named, strict=True) if not passed]
                if any(named) and all(self._may_run_beside(call, s, between) for s in others):
                    assert isinstance(e, ast.expr)
                    return e, sides, scaled, how
        return None

    def _is_passed(self, e: Any, name: str) -> bool:
        """A variable, or ``self.drop_path(h)``, which may do nothing."""
        return is_name(self.method.inside(e), name)

    def _passes(self, s: ast.stmt, name: str) -> bool:
        """``h = self.drop_path(h)``."""
        value = s.value if isinstance(s, ast.Assign) and self.method.target(s) == name else None
        return isinstance(value, ast.Call) and self._is_passed(value, name) and isinstance(value.args[0], ast.Name)

    def _is_harmless(self, s: ast.stmt, between: list[str]) -> bool:
        """Changes no tensor: tests, plain assignments, ``.contiguous()``, calls of convolutions (into ``between``)."""
        if isinstance(s, ast.If):
            return self._is_test(s.test) and all(self._is_harmless(inner, between) for inner in (*s.body, *s.orelse))
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

    def _is_test(self, e: ast.expr) -> bool:
        """Also ``hasattr(self, "conv3")``."""
        asks = isinstance(e, ast.Call) and self.method.function(e.func) is hasattr and not e.keywords
        return is_test(e) or (asks and all(map(is_plain, e.args)))  # type: ignore[attr-defined]

    # ----------------------------------------------------------------- activations behind sums, and behind convolutions

    def _act_on(self, statement: ast.stmt, is_total: _IsTotal, join: _Join) -> None:
        """``self.act(a + b)``, once the sum is written, as one call."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return)) or statement.value is None:
            return
        for call in [e for e in outside_scopes(statement.value) if isinstance(e, ast.Call)]:
            if call.args and is_total(call.args[0]):
                join(call, call.args[0])
            elif isinstance(call.func, ast.Attribute) and is_total(call.func.value):
                join(call, call.func.value)

    def _act_behind_all(self, body: list[ast.stmt], is_total: _IsTotal, join: _Join) -> None:
        """The same in two statements, which become one."""
        for k in reversed(range(len(body) - 1)):
            name, second = self.method.target(body[k]), body[k + 1]
            if self._act_behind(body[k], second, is_total, join):
                # What the variable holds now would live on.
                is_anew = self.method.target(second) == name
                body[k : k + 2] = [second, *([] if is_anew else forgotten(str(name), second))]

    def _act_behind(self, first: ast.stmt, second: ast.stmt, is_total: _IsTotal, join: _Join) -> bool:
        """``h = a + b``, then ``h = self.act(h)`` or ``return self.act(h)``: the second statement does both."""
        name = self.method.target(first)
        total = getattr(first, "value", None)
        call = second.value if isinstance(second, (ast.Assign, ast.Return)) else None
        if name is None or not is_total(total) or not isinstance(call, ast.Call):
            return False
        is_method = isinstance(call.func, ast.Attribute) and is_name(call.func.value, name)
        read: Any = call.func.value if is_method else call.args[0] if call.args else None  # type: ignore[attr-defined]
        if not is_name(read, name) or sum(is_name(n, name) for n in walk(call)) != 1:
            return False
        anew = isinstance(second, ast.Return) or self.method.target(second) == name
        if not anew and name in liveness(self.method.tree.body).after.get(id(second), {name}):
            return False  # the sum is read later
        if any(self.method.may_catch(n) for n in walk(self.method.tree)):
            return False  # so may what handles an error
        if is_method:
            call.func.value = total  # type: ignore[attr-defined]
        if join(call, total):
            return True
        if is_method:
            call.func.value = read  # type: ignore[attr-defined]
        return False

    def _is_sum(self, e: Any) -> bool:
        name, verb = called_of(e)
        return isinstance(self.method.sites.get(name), Sum) and verb in _FINISHED

    def _join(self, call: ast.Call, total: Any) -> bool:
        """Turns ``act(total)`` into one call of the sum; whether it did."""
        name = total.func.value.id
        found = self._activation(call, total)
        if found is None:
            return False
        act, more, function, known = found
        if more:
            self.method.sites[name] = Sum(function, known)
        become(call, call_of(name, total.func.attr + "_then", [act, *total.args, *more], call))
        if name in self._norms:
            self._norms[name] = *self._norms[name][:2], known
        return True

    def _activation(
        self, call: ast.Call, value: ast.expr | None = None
    ) -> tuple[ast.expr, list[ast.expr], Any, str] | None:
        """Of ``act(x)``: what to call, the function that this calls, as code and itself, and its name for the ops. Of
        ``value.act()`` the function is the method's name.
        """
        if self.method.path(call.func) is not None:
            kind, name, _ = self.method.what(call.func)
            return (call.func, [], None, name) if kind == "act" and of_one_argument(call) else None
        found = self.method.activation(call, value)
        if found is None:
            return None
        name, function, method = found
        how: ast.expr = ast.Constant(method) if method else copied(call.func)
        return as_function(call, method), [how], method or function, name

    def activate(self, body: list[ast.stmt]) -> None:
        """Writes ``self.act(self.conv(x))``, in one statement or two, as one call, where nothing else was written."""
        for statement in body:
            for block in self._blocks_of(statement):
                self.activate(block)
            self._act_on(statement, self._is_conv, self._activate)
        self._act_behind_all(body, self._is_conv, self._activate)

    def _is_conv(self, e: Any) -> bool:
        return of_one_argument(e) and self.method.what(e.func)[0] == "conv"

    def _activate(self, call: ast.Call, conv: Any) -> bool:
        """Turns ``act(conv)`` into one call; whether it did."""
        found = self._activation(call)
        if found is None:
            return False
        act, more, function, known = found
        name = f"_kgopt_act_{len(self.method.sites)}"
        self.method.sites[name] = Activated(function, known)
        become(call, call_of(name, "run", [act, conv.func, *conv.args, *more], call))
        return True

    def _new_sum(self, call: ast.Call) -> str:
        """The name of a sum with what the call gives."""
        name = f"_kgopt_sum_{len(self.method.sites)}"
        self.method.sites[name] = Sum()
        path, (kind, norm, _) = self.method.path(call.func), self.method.what(call.func)
        if path is not None and kind == "norm":
            self._norms[name] = path, norm, "none"
        return name


def _finished(name: str, operands: list[ast.expr], by: bool, scaled: _Scaled | None, place: ast.AST) -> ast.Call:
    """The sum as a call of its site; ``by``: the first operand says how it is written."""
    if scaled is not None:
        return call_of(name, scaled[1], [*operands, *scaled[2]], place)
    return call_of(name, "finish_by" if by else "finish", operands, place)


def _is_number(e: ast.expr) -> bool:
    """A number, or arithmetic of some: ``2 ** -0.5``."""
    if isinstance(e, ast.BinOp):
        return _is_number(e.left) and _is_number(e.right)
    if isinstance(e, ast.UnaryOp):
        return isinstance(e.op, ast.USub) and _is_number(e.operand)
    return isinstance(e, ast.Constant) and type(e.value) in (int, float)
