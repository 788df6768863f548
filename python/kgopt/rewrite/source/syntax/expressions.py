"""Small questions about expressions."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from kgopt.rewrite.chains.meanings import UNKNOWN, with_number
from kgopt.rewrite.chains.roles import Path
from kgopt.rewrite.source.syntax.names import SCOPES, loads, walk

_ARITHMETIC = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv"}  # tensors' methods


def path_of(expression: ast.expr, root: str, owner: str) -> Path | None:
    """``self.a.b[0]`` as ("a", "b", 0); ``owner`` is the class whose private names (``self.__a``) these are."""
    if isinstance(expression, ast.Name):
        return () if expression.id == root else None
    if isinstance(expression, ast.Attribute):
        base = path_of(expression.value, root, owner)
        name = expression.attr
        if name.startswith("__") and not name.endswith("__"):
            name = f"_{owner.lstrip('_')}{name}"
        return None if base is None else (*base, name)
    if isinstance(expression, ast.Subscript):
        base = path_of(expression.value, root, owner)
        index = constant(expression.slice)
        return None if base is None or type(index) is not int else (*base, index)
    return None


def is_plain(e: ast.expr) -> bool:
    """Names, attributes and constants, and items at such an index: evaluating them changes nothing."""
    if isinstance(e, ast.Subscript):
        return is_plain(e.value) and is_plain(e.slice)
    if isinstance(e, ast.BinOp):
        return is_index(e)
    return is_plain_load(e)


def is_index(e: ast.expr) -> bool:
    """Arithmetic of a variable and numbers, as in ``skips[i + 1]``."""
    if isinstance(e, ast.BinOp):
        return is_index(e.left) and is_index(e.right)
    return isinstance(e, ast.Name) or (isinstance(e, ast.Constant) and isinstance(e.value, int))


def is_test(e: ast.expr) -> bool:
    """``self.shortcut is not None``, ``self.stride == 1``, ``self.training``, and ``not``, ``and``, ``or`` of such."""
    if isinstance(e, ast.BoolOp):
        return all(map(is_test, e.values))
    if isinstance(e, ast.UnaryOp):
        return isinstance(e.op, ast.Not) and is_test(e.operand)
    if isinstance(e, ast.Compare):
        known = (ast.Is, ast.IsNot, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
        return all(isinstance(op, known) for op in e.ops) and all(map(is_plain, [e.left, *e.comparators]))
    return is_plain_load(e)


def constant(e: ast.expr) -> Any:
    """Its value; UNKNOWN where it is none."""
    try:
        return ast.literal_eval(e)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN


def arithmetic(
    e: ast.BinOp, value_of: Callable[[ast.expr], Any] = constant
) -> tuple[str, str, ast.expr, ast.expr] | None:
    """Of ``h / 2`` or ``2 * h``: the activation that it is, tensors' method that runs, and the value's and the number's
    expressions. ``value_of`` gives the number that an expression is, or something else.
    """
    method = _ARITHMETIC.get(type(e.op))
    if method is None:
        return None
    for value, number in ((e.left, e.right), (e.right, e.left)):
        reverse = number is e.left
        act = with_number(method, value_of(number), reverse)
        if act is not None:
            return act, f"__{'r' if reverse else ''}{method}__", value, number
    return None


def gate_of(e: Any) -> tuple[ast.Name, ast.Call] | None:
    """The variable and the call in ``h * torch.sigmoid(h)`` or ``torch.sigmoid(h) * h``, whatever is called."""
    if not isinstance(e, ast.BinOp) or not isinstance(e.op, ast.Mult):
        return None
    value, gate = (e.left, e.right) if isinstance(e.left, ast.Name) else (e.right, e.left)
    return (value, gate) if isinstance(value, ast.Name) and isinstance(gate, ast.Call) else None


def text_of(path: Path) -> str:
    """A path as it stands in the source."""
    return "".join(f".{p}" if isinstance(p, str) else f"[{p}]" for p in path)


def called_of(e: Any) -> tuple[str, str]:
    """The two names in ``site.method(...)``; empty ones for anything else."""
    function = e.func if isinstance(e, ast.Call) else None
    is_method = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return (function.value.id, function.attr) if is_method else ("", "")  # type: ignore[union-attr]


def is_name(e: Any, name: str) -> bool:
    """Whether it is that variable."""
    return isinstance(e, ast.Name) and e.id == name


_QUESTIONS = ("ndim", "dim", "shape", "size", "numel", "device", "is_cuda", "dtype")


def asks(tree: ast.AST, name: str) -> list[ast.Attribute]:
    """Where code asks the tensor in a variable for what is known without its values: ``h.ndim``, ``h.size(0)``."""
    return [n for n in walk(tree) if isinstance(n, ast.Attribute) and n.attr in _QUESTIONS and is_name(n.value, name)]


def _asked(tree: ast.AST, name: str) -> set[int]:
    """The reads of these, as they stand in the code and as they are written for a value that waits."""
    found = {id(question.value) for question in asks(tree, name)}
    for node in walk(tree):
        if called_of(node)[1] in ("like", "dtype_of"):
            found |= {id(a) for a in node.args}
    return found


def value_loads(tree: ast.AST, name: str) -> list[ast.Name]:
    """The places where code reads a variable for more than that."""
    asked = _asked(tree, name)
    return [load for load in loads(tree, name) if id(load) not in asked]


def reads_value(tree: ast.AST, name: str) -> bool:
    """Whether code reads a variable for more than that; deleting and ``+=`` read, too."""
    count = sum(isinstance(n, ast.AugAssign) and is_name(n.target, name) for n in walk(tree))
    count += sum(is_name(n, name) and not isinstance(n.ctx, ast.Store) for n in walk(tree))
    return count > len(loads(tree, name)) - len(value_loads(tree, name))


def elements_of(e: ast.expr) -> list[ast.expr]:
    """Those of a tuple as it is written, or the one expression."""
    return e.elts if isinstance(e, ast.Tuple) else [e]


def of_one_argument(e: Any) -> bool:
    """Whether it is a call such as ``self.conv(h)``."""
    return isinstance(e, ast.Call) and len(e.args) == 1 and not e.keywords and not isinstance(e.args[0], ast.Starred)


def is_listed(call: ast.Call) -> bool:
    """Whether a call's arguments all stand in it, one by one."""
    return not any(isinstance(a, ast.Starred) for a in call.args) and all(word.arg for word in call.keywords)


def evaluated_first(whole: ast.expr, part: ast.expr) -> bool:
    """Whether nothing but names, attributes and constants is evaluated in ``whole`` before ``part``."""
    if whole is part:
        return True
    if isinstance(whole, (*SCOPES, ast.IfExp, ast.BoolOp)):
        return isinstance(whole, ast.BoolOp) and evaluated_first(whole.values[0], part)
    children = list(ast.iter_child_nodes(whole))
    if isinstance(whole, (ast.Dict, ast.NamedExpr)):
        return False
    for child in children:
        inner = child.value if isinstance(child, ast.keyword) else child
        if any(n is part for n in walk(inner)):
            return isinstance(inner, ast.expr) and evaluated_first(inner, part)
        if not is_plain_load(inner):
            return False
    return False


def is_plain_load(e: ast.AST) -> bool:
    """Names, attributes and constants."""
    if isinstance(e, (ast.expr_context, ast.operator, ast.Constant, ast.Name)):
        return True
    return isinstance(e, ast.Attribute) and is_plain_load(e.value)
