"""Norms whose value is scaled and shifted by sample, in the source of a method: see
:mod:`kgopt.rewrite.waiting.modulated`.

    h = self.norm(h)                             h = _kgopt_mod_0.begin(self.norm, h)
    if scale_shift is not None:                  if scale_shift is not None:
        scale, shift = scale_shift                   scale, shift = scale_shift
        h = h * (scale + 1) + shift                  h = _kgopt_mod_0.plus(_kgopt_mod_0.times(h, scale + 1), shift)
    h = self.act(h)                              h = _kgopt_mod_0.then(self.act, h)

From ``begin`` on, along every path, only statements run that change no tensor. In front of any other one, and of one
that reads the value otherwise, stands ``h = _kgopt_mod_0.now(h)``. A path with a sum alone is left as it is, for
:mod:`~kgopt.rewrite.source.sums`.

Written in the same way are norms and activations that only the running code knows (``norm(x)`` in a loop,
``self.norms[i](x)``, ``getattr(F, self.act)(x)``), and activations that :mod:`~kgopt.rewrite.source.chains` cannot put
behind their norm, since a branch or another statement stands in between:

    for layer in self.layers:                    for layer in self.layers:
        x = layer(x)                                 x = _kgopt_mod_0.step(layer, x)
    return x                                     x = _kgopt_mod_0.now(x)
                                                 return x
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kgopt.rewrite.chains.chain import Chain
from kgopt.rewrite.chains.roles import Path
from kgopt.rewrite.source.maps import Maps
from kgopt.rewrite.source.modulated.begins import Begins, OpenCalls
from kgopt.rewrite.source.modulated.paths import Loop, Paths, Place
from kgopt.rewrite.source.modulated.values import Site, Value
from kgopt.rewrite.source.syntax.expressions import called_of
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.names import SCOPES, blocks, counters, liveness, outside_scopes, reads, walk


class Modulations:
    """Those of one method."""

    def __init__(self, method: Method, gives: bool = False) -> None:
        self.method = method
        self.gives = gives  # what waits may be returned

    def run(self) -> list[tuple[Path, Chain]]:
        """Writes them into the method's tree; the chains that begin with a norm of the method's own."""
        tree, name = self.method.tree, f"_kgopt_mod_{len(self.method.sites)}"
        if any(self.method.may_catch(node) for node in walk(tree)):
            return []  # what handles an error may read the value
        counts = counters(tree) - self.method.hidden
        roots, open_calls = list(_roots(tree.body, counts | {self.method.self_name})), OpenCalls(self.method)
        for root, _ in roots:
            open_calls.name_values(root)
        begins = Begins(self.method, name, open_calls)
        site = Site(self.method, name, begins, self.gives, liveness(tree.body), counts)
        maps = Maps(self.method)
        for root, loop in roots:
            for path in list(self._assignments(root, [])):
                self._write(site, path, root is not tree.body, loop)
        if name in self.method.sites:
            maps.write(name)
        return site.chains

    def _assignments(self, body: list[ast.stmt], outside: list[Place]) -> Iterator[list[Place]]:
        """Statements with a norm in them, as the blocks and places that lead to them."""
        for statement in body:
            here = [*outside, (body, statement)]
            if isinstance(statement, ast.If):
                if called_of(statement.test)[0] in self.method.sites:
                    continue  # a chain's
                yield from self._assignments(statement.body, here)
                yield from self._assignments(statement.orelse, here)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return)) and statement.value is not None:
                yield here

    def _write(self, site: Site, path: list[Place], is_inner: bool, loop: Loop | None) -> None:
        """All that one statement begins."""
        statement = path[-1][1]
        if statement in site.written:
            return
        parts = list(outside_scopes(statement.value))  # type: ignore[attr-defined]
        chains = [e for e in parts if isinstance(e, ast.IfExp) and called_of(e.test)[0] in self.method.sites]
        of_chains = {n for e in chains for n in walk(e)}
        for call in reversed(parts):  # the inner ones first
            if not isinstance(call, ast.Call) or call in of_chains or not site.begins.is_one(call):
                continue
            value = Value(site, call)
            if Paths(value, loop).run(path, is_inner) and value.is_modulated:
                value.write()
                return


def _roots(body: list[ast.stmt], fixed: set[str]) -> Iterator[tuple[list[ast.stmt], Loop | None]]:
    """The body, and the bodies of loops and with blocks: no value waits from one to the other, but from one round of a
    loop over children to the next. ``fixed``: variables that never hold a value that waits.
    """
    yield body, None
    waiting = [body]
    while waiting:
        inside = waiting.pop()
        for s in inside:
            if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            for block in blocks(s):
                waiting.append(block)
                if not isinstance(s, ast.If):
                    yield block, Loop(inside, s) if _goes_over_children(s, fixed) else None  # type: ignore[arg-type]


def _goes_over_children(s: ast.stmt, fixed: set[str]) -> bool:
    """A loop, between the rounds of which nothing happens that matters to what waits."""
    if isinstance(s, ast.For):
        return not s.orelse and _only_iterates(s.iter)
    # A test is evaluated in each round.
    return isinstance(s, ast.While) and not s.orelse and _only_iterates(s.test) and reads(s.test) <= fixed | _ITERATORS


_ITERATORS = {"zip", "enumerate", "reversed", "range", "len", "list", "tuple"}
_ITEMS = {"values", "items", "keys", "children", "named_children"}


def _only_iterates(e: ast.expr) -> bool:
    """Whether no code of the user's runs between the rounds of a loop."""
    calls = [n.func for n in walk(e) if isinstance(n, ast.Call)]
    names = [f.id if isinstance(f, ast.Name) else f.attr if isinstance(f, ast.Attribute) else "" for f in calls]
    known = [_ITERATORS if isinstance(f, ast.Name) else _ITEMS for f in calls]
    are_known = all(name in of for name, of in zip(names, known, strict=True))
    return are_known and not any(isinstance(n, SCOPES) for n in walk(e))
