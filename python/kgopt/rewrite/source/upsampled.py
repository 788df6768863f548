"""Nearest upsampling whose value a convolution reads, in the source of a method."""

from __future__ import annotations

import ast
from typing import Any

from kgopt.rewrite.glue.calls import INTERPOLATE
from kgopt.rewrite.meanings import UNKNOWN
from kgopt.rewrite.source.expressions import constant
from kgopt.rewrite.source.waiting import Waiting
from kgopt.rewrite.sums import Sum
from kgopt.rewrite.upsampling import Wait

_CONVS = ("conv2d", "conv3d")


class Upsamplings(Waiting):
    """Those of one method."""

    prefix, site = "up", Wait

    def begins(self, e: Any) -> bool:
        """``F.interpolate(h, ...)``, ``self.up(h)``."""
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

    def convolves(self, e: Any) -> bool:
        """``self.conv(h)``."""
        is_call = isinstance(e, ast.Call) and len(e.args) == 1 and not e.keywords
        return is_call and not isinstance(e.args[0], ast.Starred) and self._is_conv(e.func)

    def takes(self, e: ast.Call) -> ast.expr | None:
        """What begins a sum."""
        of = e.func.value if isinstance(e.func, ast.Attribute) and e.func.attr == "begin" else None
        if not isinstance(of, ast.Name) or not isinstance(self.method.sites.get(of.id), Sum) or len(e.args) < 2:
            return None
        return e.args[1] if self._is_conv(e.args[0]) else None

    def _is_conv(self, e: ast.expr) -> bool:
        path = self.method.path(e)
        role = self.method.role(path) if path else None
        return role is not None and role[0] == "conv" and role[1] in _CONVS
