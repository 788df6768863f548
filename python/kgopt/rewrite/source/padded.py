"""Padding, and frames in front, that a convolution reads, in code: see :mod:`kgopt.rewrite.waiting.padding`."""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any

import torch
from torch import nn

from kgopt.rewrite.chains.meanings import conv_of
from kgopt.rewrite.chains.modules import is_zero_padding
from kgopt.rewrite.glue.calls import CATS, PAD
from kgopt.rewrite.source.syntax.code import own_methods
from kgopt.rewrite.source.syntax.expressions import called_of, constant, is_plain, of_one_argument
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.names import walk
from kgopt.rewrite.source.waiting import Block, Paths, Waiting
from kgopt.rewrite.waiting.padding import Pads

_FUNCTIONS = (torch.conv2d, torch.conv3d)
_NAMES = {"pad", *(f.__name__ for f in CATS)}


def pads(module: nn.Module, cls: type) -> bool:
    """Whether a convolution of the user's, or a module with one, pads in its methods or by a child."""
    children = list(module._modules.values())
    of_its_own = isinstance(module, (nn.Conv2d, nn.Conv3d)) and conv_of(module) is None
    if not of_its_own and not any(map(conv_of, children)) and not any(map(_calls_conv, _functions(cls))):
        return False
    return any(map(is_zero_padding, children)) or any(map(pads_in, _functions(cls)))


def pads_in(function: types.FunctionType) -> bool:
    """Whether a function's code has the names of such calls."""
    return not _NAMES.isdisjoint(inspect.unwrap(function).__code__.co_names)


def _calls_conv(function: types.FunctionType) -> bool:
    return not {f.__name__ for f in _FUNCTIONS}.isdisjoint(inspect.unwrap(function).__code__.co_names)


def _functions(cls: type) -> list[types.FunctionType]:
    return [f for _, f in own_methods(cls)]


class Paddings(Waiting):
    """Those of one method."""

    prefix, site, may_follow = "pad", Pads, True

    def __init__(self, method: Method, gives: bool = False) -> None:
        super().__init__(method)
        self._gives = gives  # what a convolution makes may be returned for later

    def run(self) -> bool:
        """Writes them; whether there are any."""
        has_any = super().run()
        self.method.only_convolves = self.method.takes and self.is_all
        for node in walk(self.method.tree):
            if has_any and isinstance(node, ast.Return) and self._is_of_child(node.value):
                self.method.may_give = True
                if self._gives:
                    node.value.func.attr = "give"  # type: ignore[union-attr]
                    self.method.gives = True
        return has_any

    def _is_of_child(self, e: Any) -> bool:
        """``site.through(self, self.conv, h)``."""
        return called_of(e) == (self.name, "through") and len(e.args) > 1 and bool(self.method.path(e.args[1]))

    def given(self, body: Block) -> dict[int, tuple[ast.stmt, ast.Call | None]]:
        """Those of ``self.conv(F.pad(x, ...))``, where x is the argument and nothing else reads it."""
        arguments = self.method.tree.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        begins = self.begun or any(True for _ in self._nested(body))
        if self.method.code.__name__ != "forward" or len(names) < 2 or names[1] in self.method.hidden or not begins:
            return {}
        paths = Paths(self, names[1])
        paths.follow(body, 0)
        if not paths.passes or paths.stops or paths.skips:
            return {}
        self.method.takes = True
        return paths.passes

    def begins(self, e: Any) -> bool:
        """``F.pad(x, ...)``, ``self.pad(x)``, ``torch.cat([cache, x], dim=2)``."""
        if not isinstance(e, ast.Call) or not e.args or isinstance(e.args[0], ast.Starred):
            return False
        if self.method.path(e.func):
            return self.method.what(e.func)[0] == "pad" and of_one_argument(e)
        if not self._rest_is_still(e):
            return False
        function = self.method.function(e.func)
        if function is PAD:
            return True
        given = [*e.args[1:], *(word.value for word in e.keywords)]
        return any(function is f for f in CATS) and [constant(g) for g in given] in ([2], [-3])

    def convolves(self, e: Any) -> bool:
        """``self.conv(h)``, ``super().forward(h)``, ``self._conv_forward(h, w, b)``, ``F.conv3d(h, w, b, ...)``."""
        if not isinstance(e, ast.Call) or not e.args or isinstance(e.args[0], ast.Starred):
            return False
        if not self._rest_is_still(e):
            return False
        if isinstance(e.func, ast.Attribute) and e.func.attr in ("forward", "_conv_forward"):
            of_self = e.func.attr == "_conv_forward" and self.method.path(e.func.value) == ()
            if of_self or self._is_super(e.func.value):
                return True
        if self.method.path(e.func):
            return self.is_conv(e.func)
        function = self.method.function(e.func)
        return any(function is f for f in _FUNCTIONS)

    def before_conv(self) -> list[ast.expr]:
        """The module, which knows the format that it runs in."""
        return [ast.Name(self.method.self_name, ast.Load())]

    def _is_super(self, e: ast.expr) -> bool:
        return isinstance(e, ast.Call) and not e.args and self.method.function(e.func) is super

    def _rest_is_still(self, e: ast.Call) -> bool:
        """Whether what a call is given beside its first argument changes no tensor when it is evaluated."""
        return all(map(_is_still, e.args[1:])) and all(word.arg and _is_still(word.value) for word in e.keywords)


def _is_still(e: ast.expr) -> bool:
    if isinstance(e, (ast.Tuple, ast.List)):
        return all(map(_is_still, e.elts))
    if isinstance(e, ast.Starred):
        return _is_still(e.value)
    if isinstance(e, ast.UnaryOp):
        return isinstance(e.op, ast.USub) and _is_still(e.operand)
    if isinstance(e, ast.BinOp):
        return _is_still(e.left) and _is_still(e.right)
    return is_plain(e)
