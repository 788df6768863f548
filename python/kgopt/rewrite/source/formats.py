"""``h = h.contiguous()`` where all that becomes of h takes any strides: see :mod:`kgopt.rewrite.waiting.formats`."""

from __future__ import annotations

import ast

import torch

from kgopt.rewrite.source.syntax.expressions import called_of
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.names import walk
from kgopt.rewrite.source.syntax.trees import call_of, replace
from kgopt.rewrite.waiting.formats import Keep

# What may be asked of a tensor, or called with it, whatever its strides.
_STRIDELESS = {"contiguous", "device", "dim", "dtype", "ndim", "shape", "size", "split"}
_STRIDELESS_FUNCTIONS = (torch.cat, torch.add, torch.split)


def keep_formats(method: Method) -> None:
    """``h = h.contiguous()``, where all that becomes of h in this method takes any strides."""
    parents = {child: node for node in walk(method.tree) for child in ast.iter_child_nodes(node)}
    for statement in [n for n in parents if isinstance(n, ast.Assign)]:
        call, target = statement.value, method.target(statement)
        if target is None or not isinstance(call, ast.Call) or call.args or call.keywords:
            continue
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "contiguous":
            continue
        if isinstance(call.func.value, ast.Name) and _takes_any_strides(method, target, parents):
            name = f"_kgopt_format_{len(method.sites)}"
            method.sites[name] = Keep()
            owner = ast.Name(method.self_name, ast.Load())
            replace(statement, call, call_of(name, "keep", [owner, call.func.value], call))


def _takes_any_strides(method: Method, name: str, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether every read of a variable, and of those that it is assigned to, takes a tensor of any strides."""
    names, waiting = {name}, [name]
    while waiting:
        current = waiting.pop()
        for read in parents:
            if not isinstance(read, ast.Name) or read.id != current or not isinstance(read.ctx, ast.Load):
                continue
            user = parents[read]
            if isinstance(user, (ast.Assign, ast.AnnAssign)):
                other = method.target(user)
                if other is None:
                    return False
                if other not in names:
                    names.add(other)
                    waiting.append(other)
            elif not _is_strideless(method, read, user, parents):
                return False
    return True


def _is_strideless(method: Method, value: ast.expr, user: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    if isinstance(user, ast.Attribute):
        return user.attr in _STRIDELESS
    if isinstance(user, (ast.Tuple, ast.List)):  # of tensors, for torch.cat
        value, user = user, parents[user]
    if isinstance(user, ast.keyword):
        value, user = user.value, parents[user]
    if not isinstance(user, ast.Call) or value is user.func:
        return isinstance(user, (ast.BinOp, ast.Return))
    path = method.path(user.func)
    if path is not None:
        return method.role(("", *path)) is not None  # a module, which may be given channels_last as well
    function = method.function(user.func)
    if function is not None:
        is_functional = getattr(function, "__module__", "") == "torch.nn.functional"
        return is_functional or any(function is f for f in _STRIDELESS_FUNCTIONS)
    return called_of(user)[0] in method.sites
