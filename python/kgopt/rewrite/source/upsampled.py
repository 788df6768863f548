"""Nearest upsampling whose value a convolution reads, in the source of a method."""

from __future__ import annotations

import ast
from typing import Any

from kgopt.rewrite.chains.meanings import UNKNOWN
from kgopt.rewrite.glue.calls import INTERPOLATE
from kgopt.rewrite.glue.plans import Wait
from kgopt.rewrite.source.syntax.expressions import called_of, constant, is_listed, of_one_argument
from kgopt.rewrite.source.waiting import Waiting
from kgopt.rewrite.waiting.sums import Sum


class Upsamplings(Waiting):
    """Those of one method."""

    prefix, site = "up", Wait

    def begins(self, e: Any) -> bool:
        """``F.interpolate(h, ...)``, ``self.up(h)``."""
        if not isinstance(e, ast.Call) or not is_listed(e):
            return False
        if self.method.path(e.func):
            return self.method.what(e.func)[0] == "up" and of_one_argument(e)
        if self.method.function(e.func) is not INTERPOLATE:
            return False
        mode = next((constant(word.value) for word in e.keywords if word.arg == "mode"), "nearest")
        return mode is UNKNOWN or mode in ("nearest", "nearest-exact")

    def convolves(self, e: Any) -> bool:
        """``self.conv(h)``."""
        return of_one_argument(e) and self.is_conv(e.func)

    def takes(self, e: ast.Call) -> ast.expr | None:
        """What begins a sum."""
        site, verb = called_of(e)
        begins = verb == "begin" and isinstance(self.method.sites.get(site), Sum) and len(e.args) > 1
        return e.args[1] if begins and self.is_conv(e.args[0]) else None
