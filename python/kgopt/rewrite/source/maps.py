"""Nearest upsampling in front of a norm's scale and shift, in the source of a method: see
:mod:`kgopt.rewrite.waiting.maps`.

    zq = F.interpolate(zq, size=f.shape[-2:])    zq = _kgopt_mod_0.enlarge(F.interpolate, (zq,), {...}, self, ...)
    h = self.norm(f)                             h = _kgopt_mod_0.begin(self.norm, f, self, ...)
    return h * self.conv_y(zq) + self.conv_b(zq)
                                                 return _kgopt_mod_0.now(_kgopt_mod_0.plus(_kgopt_mod_0.times(
                                                     h, _kgopt_mod_0.of_map(self.conv_y, zq)), ...

The value may wait where, from there to the last statement that reads it, all change no tensor. Every other place that
reads the variable asks for the tensor, so nobody sees what waits.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

import torch.nn.functional as F

from kgopt.rewrite.source.norm_calls import parts_of
from kgopt.rewrite.source.syntax.expressions import called_of, is_listed, of_one_argument
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.names import loads, walk
from kgopt.rewrite.source.syntax.quiet import is_quiet
from kgopt.rewrite.source.syntax.trees import call_of

_OPERANDS = {"times", "plus", "times_in_place", "plus_in_place", "addcmul"}  # methods that take maps


@dataclass
class _Upsampling:
    """A statement that upsamples, the variables that may hold maps from there on, and children that are called."""

    statement: ast.Assign
    names: set[str]
    of_maps: list[ast.Assign] = field(default_factory=list)  # ``scale = self.conv_y(zq)``
    between: list[str] = field(default_factory=list)


class Maps:
    """Those of one method: found before the norms' values wait, written after."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.found = [u for s in method.tree.body if (u := self._upsampling(s)) is not None]

    def _upsampling(self, s: ast.stmt) -> _Upsampling | None:
        name = self.method.target(s)
        call = s.value if isinstance(s, ast.Assign) else None
        if name is None or not isinstance(call, ast.Call) or self.method.function(call.func) is not F.interpolate:
            return None
        if not is_listed(call):
            return None
        assert isinstance(s, ast.Assign)
        found = _Upsampling(s, {name})
        behind = self._behind(s)
        for other in behind:
            if isinstance(other, ast.Assign) and self._child_of(other.value, {name}):
                target = self.method.target(other)
                if target is not None and target != name:
                    found.of_maps.append(other)
                    found.names.add(target)
        reads = [any(loads(other, n) for n in found.names) for other in behind]
        if True not in reads:
            return None
        last = len(reads) - reads[::-1].index(True)
        return found if all(self._is_harmless(other, found.between) for other in behind[:last]) else None

    def _behind(self, s: ast.stmt) -> list[ast.stmt]:
        body = self.method.tree.body
        return body[body.index(s) + 1 :]

    def _is_harmless(self, s: ast.stmt, between: list[str]) -> bool:
        """A statement that changes no tensor."""
        if isinstance(s, ast.If):
            inside = [*s.body, *s.orelse]
            return is_quiet(self.method, s.test, between) and all(self._is_harmless(i, between) for i in inside)
        if isinstance(s, ast.Return):
            return s.value is None or is_quiet(self.method, s.value, between)
        if isinstance(s, (ast.Assign, ast.AnnAssign)):
            return self.method.target(s) is not None and is_quiet(self.method, s.value, between)  # type: ignore[arg-type]
        return isinstance(s, ast.Pass)

    def _child_of(self, e: ast.AST, names: set[str]) -> bool:
        """``self.child(name)``."""
        if not isinstance(e, ast.Call) or not of_one_argument(e) or not self.method.path(e.func):
            return False
        return isinstance(e.args[0], ast.Name) and e.args[0].id in names

    def write(self, site: str) -> None:
        """Has what a norm's value is multiplied with wait, and all else ask for the tensor."""
        for u in self.found:
            for made in list(u.of_maps):
                if not self._child_of(made.value, u.names):  # a norm's value, which waits in its own way
                    u.of_maps.remove(made)
                    u.names.discard(str(self.method.target(made)))
            writer = _Writer(self, u, site)
            behind = self._behind(u.statement)
            if not any(writer.takes(node) for s in behind for node in walk(s)):
                continue
            for s in behind:
                writer.visit(s)
            call = u.statement.value
            assert isinstance(call, ast.Call)
            more = [ast.Name(self.method.self_name, ast.Load()), *map(ast.Constant, dict.fromkeys(u.between))]
            u.statement.value = call_of(site, "enlarge", [*parts_of(call), *more], call)


class _Writer(ast.NodeTransformer):
    """Writes the statements behind one upsampling."""

    def __init__(self, of: Maps, u: _Upsampling, site: str) -> None:
        self.of, self.u, self.site = of, u, site

    def _is_operand(self, e: ast.AST) -> bool:
        return (isinstance(e, ast.Name) and e.id in self.u.names) or self.of._child_of(e, self.u.names)

    def takes(self, node: ast.AST) -> bool:
        """Whether a call multiplies with, or adds, what may be a map."""
        site, verb = called_of(node)
        return site == self.site and verb in _OPERANDS and any(map(self._is_operand, node.args))  # type: ignore[attr-defined]

    def _operand(self, e: ast.expr) -> ast.expr:
        return call_of(self.site, "of_map", [e.func, e.args[0]], e) if isinstance(e, ast.Call) else e

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if any(node is s for s in self.u.of_maps):
            node.value = self._operand(node.value)
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not self.takes(node):
            return self.generic_visit(node)
        node.args = [self._operand(a) if self._is_operand(a) else self.visit(a) for a in node.args]
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if not isinstance(node.ctx, ast.Load) or node.id not in self.u.names:
            return node
        return call_of(self.site, "now", [node], node)
