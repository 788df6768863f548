"""Values of one variable that may wait, in the source of a method, until a convolution reads them.

``h = f(h)`` becomes ``h = site.begin(f, h)``, which may give what is no tensor yet, and ``self.conv(h)`` becomes
``site.through(self.conv, h)``. Between the two, along every path of tests, only statements run that change no tensor:
in front of any other one, and of one that reads the value otherwise, stands ``h = site.now(h)``. So only these
functions ever see what is no tensor.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from kgopt.rewrite.chains.meanings import UNKNOWN
from kgopt.rewrite.source.syntax.expressions import constant, elements_of, evaluated_first, is_name, is_plain, is_test
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.names import SCOPES, blocks, copied, forgets, liveness, loads, reads, walk
from kgopt.rewrite.source.syntax.trees import assign, call_of, replace

Block = list[ast.stmt]
_Stop = tuple[Block, ast.stmt, list[ast.expr]]  # a block, the statement in it, what ``now`` or ``beside`` is given


class Waiting(ABC):
    """Those of one kind in one method."""

    prefix: ClassVar[str]  # of the site's name
    site: ClassVar[type[Any]]
    may_follow: ClassVar[bool] = False  # may one be made of another that still waits?

    def __init__(self, method: Method) -> None:
        self.method = method
        self.is_all = False  # a value waits wherever there is one, and what a convolution makes of it is returned
        self.name = f"_kgopt_{self.prefix}_{len(method.sites)}"
        self.live = liveness(method.tree.body)

    @abstractmethod
    def begins(self, e: Any) -> bool:
        """Whether an expression makes a value that may wait."""

    @abstractmethod
    def convolves(self, e: Any) -> bool:
        """Whether an expression is a call of a convolution that may read one, as its first argument."""

    def given(self, body: Block) -> dict[int, tuple[ast.stmt, ast.Call | None]]:
        """Statements that give a convolution what a caller gives the method, which may wait already."""
        return {}

    def takes(self, e: ast.Call) -> ast.expr | None:
        """What a call reads that is given the value as it is, if there is such a call."""
        return None

    def skips(self, e: ast.expr) -> bool:
        """Whether an expression is a call that may give its first argument back as it is, and let it wait on."""
        return False

    def is_conv(self, e: ast.expr) -> bool:
        """Whether it is a child that is a convolution in 2D or 3D."""
        kind, name, _ = self.method.what(e)
        return kind == "conv" and name in ("conv2d", "conv3d")

    def value_of(self, call: ast.Call) -> ast.expr:
        """What a convolution reads."""
        return call.args[0]

    def accepts(self, e: ast.expr, paths: Paths) -> bool:
        """Whether what ``e`` makes may wait along these paths, on which a convolution reads it."""
        return True

    def before_conv(self) -> list[ast.expr]:
        """What the site is told in front of the convolution."""
        return []

    def run(self) -> bool:
        """Writes them; whether there are any. What else is written into a method stands there already."""
        body = self.method.tree.body
        passes: dict[int, tuple[ast.stmt, ast.Call | None]] = {}
        stops: dict[tuple[int, str], _Stop] = {}
        skips: dict[int, tuple[ast.stmt, ast.Call]] = {}
        self.begun: dict[int, tuple[ast.stmt, ast.Call]] = {}
        # The last ones first: what reads a value may make another one.
        for path in reversed(list(self._assignments(body, []))):
            block, k = path[-1]
            statement: Any = block[k]
            found = Paths(self, str(self.method.target(statement)))
            is_waiting = True
            for outer, i in reversed(path):
                is_waiting = is_waiting and found.follow(outer, i + 1)
            if found.passes and self.accepts(statement.value, found):
                self.begun[id(statement)] = statement, statement.value
                passes |= found.passes
                stops |= found.stops
                skips |= found.skips
        passes |= self.given(body)
        # What is written copies what it holds, so that this has to be written by then.
        inner = list(self._nested(body))
        for statement, call in passes.values():
            if call is not None:
                replace(statement, call, self._through(call, self.value_of(call)))
        for statement, call in skips.values():
            replace(statement, call, self._skip(call))
        for statement, call in reversed(inner):
            replace(statement, call, self._through(call, self._begin(self.value_of(call))))
        for statement, call in self.begun.values():
            replace(statement, call, self._begin(call))
        for (_, name), (block, before, given) in stops.items():
            made = call_of(self.name, "now" if len(given) == 1 else "beside", given, before)
            block.insert(block.index(before), assign(name, made, before))
        self.is_all = not stops and all(isinstance(s, ast.Return) for s, call in passes.values() if call is not None)
        has_any = bool(self.begun or inner)
        if has_any:
            self.method.sites[self.name] = self.site()
        return has_any

    def _begin(self, call: Any) -> ast.Call:
        first = [self._begin(a) if self.begins(a) else a for a in call.args[:1]]
        made = call_of(self.name, "begin", [call.func, *first, *call.args[1:]], call)
        made.keywords = [copied(n) for n in call.keywords]
        return made

    def _through(self, call: ast.Call, value: ast.expr) -> ast.Call:
        made = call_of(self.name, "through", [*self.before_conv(), call.func, value, *call.args[1:]], call)
        made.keywords = [copied(n) for n in call.keywords]
        return made

    def _skip(self, call: ast.Call) -> ast.Call:
        return call_of(self.name, "skip", [call.func, *call.args], call)

    def _assignments(self, body: Block, outside: list[tuple[Block, int]]) -> Iterator[list[tuple[Block, int]]]:
        """Statements that only assign such a value, outside of loops, as the blocks and places that lead to them."""
        for k, statement in enumerate(body):
            here = [*outside, (body, k)]
            if self.method.target(statement) is not None and self.begins(statement.value):  # type: ignore[attr-defined]
                yield here
            elif isinstance(statement, ast.If):
                yield from self._assignments(statement.body, here)
                yield from self._assignments(statement.orelse, here)

    def _nested(self, body: Block) -> Iterator[tuple[ast.stmt, ast.Call]]:
        """``self.conv(f(x))`` in one expression."""
        for statement in body:
            if isinstance(statement, (*SCOPES, ast.ClassDef)):
                continue
            inner = list(blocks(statement))
            for block in inner:
                yield from self._nested(block)
            if inner:
                continue
            for e in walk(statement):
                if self.convolves(e) and self.begins(self.value_of(e)):  # type: ignore[arg-type]
                    yield statement, e  # type: ignore[misc]


class Paths:
    """Where the value of a variable goes from the statement that makes it."""

    def __init__(self, waiting: Waiting, name: str) -> None:
        self.of = waiting
        self.method = waiting.method
        self.name = name
        self.passes: dict[int, tuple[ast.stmt, ast.Call | None]] = {}  # statements that give it to a convolution, by id
        self.stops: dict[tuple[int, str], _Stop] = {}  # those before which it has to be a tensor, or perhaps has to
        self.skips: dict[int, tuple[ast.stmt, ast.Call]] = {}  # those that may leave it as it is, by id

    def follow(self, block: Block, start: int) -> bool:
        """Goes through a block; whether the value may still wait at its end."""
        for s in block[start:]:
            passed = self._pass(s)
            if passed is not None:
                self.passes[id(s)] = passed
                return False
            if self._skips(s):
                self.skips[id(s)] = s, s.value  # type: ignore[attr-defined]
                continue
            is_read = self.name in reads(s)
            if isinstance(s, ast.If) and self._is_quiet(s.test) and self.name not in reads(s.test):
                waits = [self.follow(s.body, 0), self.follow(s.orelse, 0)]
                if not any(waits):
                    return False
            elif not is_read and forgets(s, self.name):
                return False
            elif not is_read and (changed := _changed(s)) is not None:
                self._stop(block, s, changed)
            elif is_read or not self._is_harmless(s):
                self._stop(block, s)
                return False
        return True

    def _stop(self, block: Block, s: ast.stmt, *more: ast.expr) -> None:
        load = ast.copy_location(ast.Name(self.name, ast.Load()), s)
        self.stops[id(s), self.name] = block, s, [load, *more]

    def _pass(self, s: Any) -> tuple[ast.stmt, ast.Call | None] | None:
        """A statement that gives the value to a convolution, the last to read it, and the call, if it is to be written.

        What begins a sum, or the next value that waits, takes it as it is.
        """
        if not isinstance(s, (ast.Assign, ast.AnnAssign, ast.Return)) or s.value is None:
            return None
        if len(loads(s, self.name)) != 1:
            return None
        target = None if isinstance(s, ast.Return) else self.method.target(s)
        may_live = isinstance(s, ast.Return) or target == self.name
        if not may_live and (target is None or self.name in self.of.live.after.get(id(s), {self.name})):
            return None
        if self.of.may_follow and id(s) in self.of.begun and self._begins_with_it(self.of.begun[id(s)][1]):
            return s, None
        for e in walk(s.value):
            if not isinstance(e, ast.Call) or not evaluated_first(s.value, e):
                continue
            if self.of.convolves(e) and is_name(self.of.value_of(e), self.name):
                return s, e
            if self.of.may_follow and self.of.convolves(e) and self._begins_with_it(self.of.value_of(e)):
                return s, None
            taken = self.of.takes(e)
            if taken is not None and is_name(taken, self.name):
                return s, None
        return None

    def _begins_with_it(self, e: Any) -> bool:
        return self.of.begins(e) and is_name(e.args[0], self.name)

    def _skips(self, s: ast.stmt) -> bool:
        """``h = self.dropout(h)``."""
        value: Any = getattr(s, "value", None)
        return self.method.target(s) == self.name and self.of.skips(value) and is_name(value.args[0], self.name)

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
        if not isinstance(s, ast.Assign) or not all(map(is_plain, elements_of(s.value))):
            return False
        return all(isinstance(t, ast.Name) for target in s.targets for t in elements_of(target))


def _changed(s: ast.stmt) -> ast.expr | None:
    """What ``padding[4] -= cache.shape[2]`` or ``count += 1`` writes to: a list, a number, or perhaps a tensor."""
    target: ast.expr | None = None
    if isinstance(s, ast.AugAssign) and is_plain(s.value):
        target = s.target
    elif isinstance(s, ast.Assign) and len(s.targets) == 1 and is_plain(s.value):
        target = s.targets[0] if isinstance(s.targets[0], ast.Subscript) else None
    if isinstance(target, ast.Subscript):
        target = target.value if is_plain(target.slice) else None
    return ast.copy_location(ast.Name(target.id, ast.Load()), target) if isinstance(target, ast.Name) else None
