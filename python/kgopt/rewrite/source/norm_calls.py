"""Norms that code calls as functions: see :mod:`kgopt.rewrite.norm_calls`."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from typing import Any

from kgopt.rewrite.norm_calls import NORM_CALLS, NormCall
from kgopt.rewrite.source.code import own_methods
from kgopt.rewrite.source.expressions import call_of
from kgopt.rewrite.source.method import Method
from kgopt.rewrite.source.names import SCOPES

_NAMES = frozenset(function.__name__ for function in NORM_CALLS)


def calls_norms_in(function: types.FunctionType) -> bool:
    """Whether a function's code has the name of such a call."""
    return not _NAMES.isdisjoint(inspect.unwrap(function).__code__.co_names)


def calls_norms(cls: type) -> bool:
    """Whether a method of a user's class does."""
    return any(calls_norms_in(function) for _, function in own_methods(cls))


def replace_norm_calls(method: Method) -> bool:
    """``F.group_norm(x, ...)`` becomes ``site.run(self, F.group_norm, x, ...)``. Whether there was one."""
    names: dict[Any, str] = {}
    for call in _calls_in(method.tree.body):
        function = None if method.path(call.func) else method.function(call.func)
        if not isinstance(function, types.FunctionType) or function not in NORM_CALLS:
            continue
        name = names.get(function)
        if name is None:
            name = names[function] = f"_kgopt_norm_{len(method.sites)}"
            method.sites[name] = NormCall(function)
        made = call_of(name, "run", [ast.Name(method.self_name, ast.Load()), call.func], call)
        call.func, call.args = made.func, [*made.args, *call.args]
    return bool(names)


def _calls_in(node: Any) -> Iterator[ast.Call]:
    """Those of the method itself: code inside of it that has names of its own runs who knows when."""
    children = node if isinstance(node, list) else list(ast.iter_child_nodes(node))
    for child in children:
        if not isinstance(child, (*SCOPES, ast.ClassDef)):
            yield from _calls_in(child)
            if isinstance(child, ast.Call):
                yield child
