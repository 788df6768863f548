"""Norms whose value a convolution reads, though not in the next statement: see :mod:`kgopt.rewrite.glue.heads`.

h = self.act(self.norm(h))              h = _kgopt_0.run_later(self.conv, True, (self.dropout,), self.norm, self.act, h)
h = self.dropout(h)                     h = _kgopt_head_1.skip(self.dropout, h)
return x + self.conv(h)                 return x + self.conv(h)
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any

from kgopt.rewrite.glue.heads import FollowedSite, Normalizations
from kgopt.rewrite.source.syntax.expressions import called_of, of_one_argument
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.trees import call_of
from kgopt.rewrite.source.waiting import Paths, Waiting


class Heads(Waiting):
    """Those of one method, whose chains are written."""

    prefix, site = "head", Normalizations

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self._ends: dict[int, list[ast.expr]] = {}  # by the expression that makes a value: what run_later is told

    def begins(self, e: Any) -> bool:
        """What a chain computes, with no convolution in the next statement; also in calls that may do nothing."""
        run = _run_of(self.method.inside(e))
        site, verb = called_of(run)
        if not isinstance(self.method.sites.get(site), FollowedSite):
            return False
        return verb == "run" or (verb == "run_before" and self.method.what(run.args[0])[0] == "same")

    def convolves(self, e: Any) -> bool:
        """``self.conv(h)``, ``self.conv(self.dropout(h))``; also of a module that pads and convolves."""
        return of_one_argument(e) and self.method.what(e.func)[0] in ("conv", "tail")

    def skips(self, e: Any) -> bool:
        """``self.dropout(h)``."""
        return bool(self.method.around(e))

    def value_of(self, call: ast.Call) -> ast.expr:
        """Without the calls around it that may do nothing."""
        return call.args[0] if self.begins(call.args[0]) else self.method.inside(call.args[0])

    def accepts(self, e: ast.expr, paths: Paths) -> bool:
        """Where all paths lead to one convolution."""
        calls = [call for _, call in paths.passes.values() if call is not None]
        if len({ast.unparse(call.func) for call in calls}) != 1:
            return False
        self._note(e, calls, [call for _, call in paths.skips.values()], alone=not paths.stops)
        return True

    def _nested(self, body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.Call]]:
        for statement, call in super()._nested(body):
            self._note(self.value_of(call), [call], [], alone=True)
            yield statement, call

    def _note(self, e: ast.expr, calls: list[ast.Call], skips: list[ast.Call], alone: bool) -> None:
        inner = [part for call in calls for part in self.method.around(call.args[0])]
        around = [*self.method.around(e), *skips, *inner]
        modules = {ast.unparse(part.func): part.func for part in around}
        between = ast.Tuple(list(modules.values()), ast.Load())
        self._ends[id(e)] = [calls[0].func, *(ast.copy_location(n, e) for n in (ast.Constant(alone), between))]

    def _begin(self, e: Any) -> Any:
        inside = self.method.inside(e)
        made, run = copy.copy(inside), _run_of(inside)
        given = run.args[1:] if run.func.attr == "run_before" else run.args
        later = call_of(run.func.value.id, "run_later", [*self._ends[id(e)], *given], run)
        if run is inside:
            made = later
        else:
            made.body = later
        return self.method.skipped(self.name, e, made)

    def _through(self, call: ast.Call, value: ast.expr) -> ast.Call:
        made = copy.copy(call)
        given = call.args[0]
        made.args = [value if self.begins(given) else self.method.skipped(self.name, given, value)]
        return made


def _run_of(e: Any) -> Any:
    """The call of a site in ``site.run(...) if site.ready(...) else ...``, or itself."""
    return e.body if isinstance(e, ast.IfExp) else e
