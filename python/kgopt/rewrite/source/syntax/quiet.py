"""Code that changes no tensor: it may run while a value waits to be computed."""

from __future__ import annotations

import ast
import dis
import functools
import types
from typing import Any

import torch
import torch.nn.functional as F

from kgopt.rewrite.source.syntax.code import CannotRewriteError, parse
from kgopt.rewrite.source.syntax.expressions import is_plain_load, reads_value, value_loads
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.names import blocks, counters, walk, writes

# Methods of tensors that write nowhere; a module has none of the first.
_METHODS = {
    *("chunk", "split", "tensor_split", "unbind", "view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as"),
    *("flatten", "unflatten", "permute", "transpose", "contiguous", "repeat", "size", "dim", "numel", "view_as"),
    *("add", "mul", "sub", "div", "neg", "exp", "tanh", "sigmoid", "clone", "detach", "broadcast_to", "movedim"),
}
_CASTS = {"to", "type", "type_as", "float", "double", "half", "bfloat16"}  # of a module they change its parameters
_FUNCTIONS = {
    *(torch.chunk, torch.split, torch.tensor_split, torch.unbind, torch.unsqueeze, torch.squeeze, torch.reshape),
    *(torch.flatten, torch.permute, torch.transpose, torch.movedim, torch.tanh, torch.sigmoid, torch.exp),
    *(torch.is_tensor, torch.addcmul, torch.cat, F.gelu, F.softplus, F.linear, F.interpolate),
    *(isinstance, hasattr, len, tuple, list, int, float, bool, range, min, max),
}
_EINOPS = {"rearrange", "repeat", "reduce"}
_SILENT = (
    *("RESUME", "NOP", "CACHE", "NOT_TAKEN", "COPY", "TO_BOOL", "UNARY_NOT", "IS_OP", "RETURN_VALUE", "RETURN_CONST"),
    *("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_CONST", "LOAD_SMALL_INT"),
    *("POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE"),
    *("POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE"),
    *("POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE"),
)
_PARTS = ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List, ast.Slice, ast.Starred
_LONG = 400  # bytes of code: helpers have less


@functools.lru_cache(maxsize=1024)
def _only_tests(code: types.CodeType) -> bool:
    """``return x is not None``: the code looks at which objects its arguments are, and calls nothing."""
    return not code.co_freevars and all(i.opname in _SILENT for i in dis.get_instructions(code))


class _Helper(Method):
    """A function that a method calls: code that knows no module."""


def _helper(method: Method, function: types.FunctionType) -> _Helper | None:
    """A user's function, if all its statements change no tensor: ``x[(...,) + (None,) * (n - x.ndim)]``."""
    code = function.__code__
    if isinstance(method, _Helper) or len(code.co_code) > _LONG or code.co_freevars or code.co_cellvars:
        return None
    try:
        helper = _Helper(function, lambda path: None, parse(function), method)
    except CannotRewriteError:
        return None
    is_quiet_all = method.self_name not in helper.locals and all(is_harmless(helper, s, []) for s in helper.tree.body)
    return helper if is_quiet_all else None


def modulates(method: Method, function: Any, argument: int | str) -> set[str]:
    """What a user's function does with one argument, "Mult" or "Add", if that is all: products and sums at its end with
    what it makes of the others. It may ask for sizes.
    """
    if not isinstance(function, types.FunctionType) or function.__module__.partition(".")[0] in ("torch", "kgopt"):
        return set()
    helper = _helper(method, function)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    if helper is None or (isinstance(argument, int) and argument >= len(names)):
        return set()
    name = names[argument] if isinstance(argument, int) else argument
    *before, last = helper.tree.body
    is_free = name in names and not any(name in writes(s) or reads_value(s, name) for s in before)
    if not is_free or not isinstance(last, ast.Return) or len(loads_of := value_loads(last, name)) != 1:
        return set()
    found: set[str] = set()
    e: Any = last.value
    while isinstance(e, ast.BinOp) and isinstance(e.op, (ast.Mult, ast.Add)):
        found.add(type(e.op).__name__)
        e = e.left if any(n is loads_of[0] for n in walk(e.left)) else e.right
    return found if e is loads_of[0] else set()


def _is_quiet_function(method: Method, function: Any) -> bool:
    try:
        if function in _FUNCTIONS:
            return True
    except TypeError:  # not hashable
        return False
    if isinstance(function, types.FunctionType):
        if function.__module__.partition(".")[0] == "einops" and function.__name__ in _EINOPS:
            return True
        return _only_tests(function.__code__) or _helper(method, function) is not None
    return False


def _is_activation(method: Method, function: Any, e: ast.Call) -> bool:
    """``F.relu(x)``; a second argument may be ``inplace``, ``torch.relu_`` is so by its name, users' ones inside."""
    if len(e.args) != 1 or str(getattr(function, "__name__", "_")).endswith("_"):
        return False
    is_function = isinstance(function, types.FunctionType) and function.__module__ == F.__name__
    is_known = is_function or isinstance(function, types.BuiltinFunctionType)
    return is_known and method.activation(e) is not None


def is_quiet(method: Method, e: ast.AST, between: list[str]) -> bool:
    """Whether evaluating an expression changes no tensor.

    Children that it calls go into ``between``; what they are is looked at when the code runs.
    """
    inner = functools.partial(is_quiet, method, between=between)
    if is_plain_load(e):
        return True
    if isinstance(e, ast.Subscript):
        return inner(e.value) and inner(e.slice)
    if isinstance(e, ast.Attribute):
        return inner(e.value)
    if isinstance(e, (*_PARTS, ast.JoinedStr, ast.FormattedValue)):
        parts = [child for child in ast.iter_child_nodes(e) if isinstance(child, ast.expr)]
        return all(map(inner, parts))
    if not isinstance(e, ast.Call) or any(word.arg in (None, "out", "inplace") for word in e.keywords):
        return False
    if not all(map(inner, [*e.args, *(word.value for word in e.keywords)])):
        return False
    function = method.function(e.func)
    if function is not None:
        return _is_quiet_function(method, function) or _is_activation(method, function, e)
    path = method.path(e.func)
    if path is not None and len(path) == 1:
        between.append(str(path[0]))
        return len(e.args) == 1 and not e.keywords
    if not isinstance(e.func, ast.Attribute):
        return False
    if e.func.attr in _CASTS:
        return method.path(e.func.value) is None and inner(e.func.value)
    return e.func.attr in _METHODS and inner(e.func.value)


def is_harmless(method: Method, s: ast.stmt, between: list[str]) -> bool:
    """Whether a statement changes no tensor, with the statements in it."""
    quiet = functools.partial(is_quiet, method, between=between)
    if isinstance(s, (ast.Pass, ast.Raise, ast.Break, ast.Continue)):
        return True  # an error ends what waits
    if isinstance(s, ast.Expr):
        return isinstance(s.value, ast.Constant)
    if isinstance(s, ast.AugAssign):
        return isinstance(s.target, ast.Name) and s.target.id in counters(method.tree) - method.hidden
    if isinstance(s, (ast.If, ast.While, ast.For)):
        is_quiet_head = quiet(s.iter) and _are_names([s.target]) if isinstance(s, ast.For) else quiet(s.test)
        return is_quiet_head and all(is_harmless(method, inner, between) for block in blocks(s) for inner in block)
    if isinstance(s, ast.Assert):
        return all(quiet(e) for e in (s.test, s.msg) if e is not None)
    if isinstance(s, ast.Return):
        return s.value is None or quiet(s.value)
    return isinstance(s, ast.Assign) and quiet(s.value) and _are_names(s.targets)


def _are_names(targets: list[ast.expr]) -> bool:
    parts = [e for t in targets for e in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
    return all(isinstance(t, ast.Name) for t in parts)
