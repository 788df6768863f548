"""Norms that code calls as functions: see :mod:`kgopt.rewrite.norms.calls`."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

from kgopt.rewrite.chains.chain import PRELU
from kgopt.rewrite.norms.calls import NORM_CALLS, NormCall
from kgopt.rewrite.source.syntax.code import own_methods
from kgopt.rewrite.source.syntax.expressions import is_listed, is_name, of_one_argument
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.names import SCOPES, blocks
from kgopt.rewrite.source.syntax.trees import call_of

_NAMES = frozenset(function.__name__ for function in NORM_CALLS)


def calls_norms_in(function: types.FunctionType) -> bool:
    """Whether a function's code has the name of such a call."""
    return not _NAMES.isdisjoint(inspect.unwrap(function).__code__.co_names)


def calls_norms(cls: type) -> bool:
    """Whether a method of a user's class does."""
    return any(calls_norms_in(function) for _, function in own_methods(cls))


def is_norm_call(method: Method, e: Any) -> bool:
    """A call of such a function whose value may wait: its tensor is the first argument."""
    return isinstance(e, ast.Call) and bool(e.args) and is_listed(e) and _norm_of(method, e) is not None


def site_of(method: Method, call: ast.Call) -> NormCall:
    """What such a call is replaced with."""
    return NormCall(_norm_of(method, call))


def waiting_call(method: Method, call: ast.Call, site: str, verb: str, more: Sequence[ast.expr] = ()) -> ast.Call:
    """``site.verb(self, F.group_norm, (x, 8), {"eps": eps}, *more)``."""
    owner = ast.Name(method.self_name, ast.Load())
    return call_of(site, verb, [owner, *parts_of(call), *more], call)


def parts_of(call: ast.Call) -> list[ast.expr]:
    """``F.group_norm, (x, 8), {"eps": eps}``."""
    words = ast.Dict([ast.Constant(w.arg) for w in call.keywords], [w.value for w in call.keywords])
    return [call.func, ast.Tuple(call.args, ast.Load()), words]


def replace_norm_calls(method: Method) -> bool:
    """``F.group_norm(x, ...)`` becomes ``site.run(self, F.group_norm, x, ...)``, and ``F.silu(F.group_norm(x, ...))``
    ``site.run_then(self, F.silu, F.group_norm, x, ...)``. Whether there was one, those that wait included.
    """
    is_any = any(isinstance(site, NormCall) for site in method.sites.values())
    calls = list(_calls_in(method.tree.body))
    norms = {call: function for call in calls if (function := _norm_of(method, call)) is not None}
    if norms:
        _join_statements(method, method.tree.body, norms)
    of_acts = {call.args[0]: call for call in calls if call.args and call.args[0] in norms}
    for norm, function in norms.items():
        call = of_acts.get(norm)
        act = None if call is None else _activation(method, call)
        name = f"_kgopt_norm_{len(method.sites)}"
        owner: ast.expr = ast.Name(method.self_name, ast.Load())
        if call is None or act is None:
            method.sites[name] = NormCall(function)
            call, made = norm, call_of(name, "run", [owner, norm.func], norm)
        else:
            method.sites[name] = NormCall(function, *act)
            made = call_of(name, "run_then", [owner, call.func, norm.func], call)
        call.func, call.args, call.keywords = made.func, [*made.args, *norm.args], norm.keywords
    return is_any or bool(norms)


def _norm_of(method: Method, call: ast.Call) -> Any:
    function = None if method.path(call.func) else method.function(call.func)
    return function if isinstance(function, types.FunctionType) and function in NORM_CALLS else None


def _activation(method: Method, call: ast.Call) -> tuple[str, Any, tuple[Any, Any]] | None:
    """What a call of an activation is: its name, its role, and its arguments after the first one."""
    if not is_listed(call):
        return None
    if method.path(call.func):
        kind, name, _ = method.what(call.func)
        return (name, name, ((), {})) if kind == "act" and name != PRELU and of_one_argument(call) else None
    found = method.activation(call)
    if found is None or found[0] == PRELU:
        return None
    args, kwargs = method.constants(call)
    return *found[:2], (tuple(args[1:]), kwargs)


def _join_statements(method: Method, body: list[ast.stmt], norms: dict[ast.Call, Any]) -> None:
    """``h = F.group_norm(...)``, ``h = F.silu(h)`` becomes one statement: nobody else reads the first value."""
    for first, second in zip(list(body), body[1:], strict=False):
        name = method.target(first)
        norm, act = getattr(first, "value", None), getattr(second, "value", None)
        if name is None or norm not in norms or not isinstance(act, ast.Call) or not act.args:
            continue
        if method.target(second) != name or not is_name(act.args[0], name):
            continue
        if _activation(method, act) is not None:
            act.args[0] = norm
            body.remove(first)
    for statement in body:
        if not isinstance(statement, (*SCOPES, ast.ClassDef)) and not method.may_catch(statement):
            for block in blocks(statement):
                _join_statements(method, block, norms)


def _calls_in(node: Any) -> Iterator[ast.Call]:
    """Those of the method itself: code inside of it that has names of its own runs who knows when."""
    children = node if isinstance(node, list) else list(ast.iter_child_nodes(node))
    for child in children:
        if not isinstance(child, (*SCOPES, ast.ClassDef)):
            yield from _calls_in(child)
            if isinstance(child, ast.Call):
                yield child
