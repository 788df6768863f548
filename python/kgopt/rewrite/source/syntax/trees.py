"""Small changes of trees, and new parts for them."""

from __future__ import annotations

import ast
from typing import TypeVar

from kgopt.rewrite.source.syntax.expressions import asks
from kgopt.rewrite.source.syntax.names import copied, walk

Node = TypeVar("Node", bound=ast.AST)


def placed(tree: Node, place: ast.AST) -> Node:
    """A tree, on the lines of ``place``."""
    for node in walk(tree):
        if "lineno" in node._attributes:
            ast.copy_location(node, place)
    return tree


def call_of(site: str, method: str, arguments: list[ast.expr], place: ast.AST) -> ast.Call:
    """``site.method(*arguments)``, on the lines of ``place``."""
    function = ast.Attribute(ast.Name(site, ast.Load()), method, ast.Load())
    return placed(ast.Call(function, [copied(n) for n in arguments], []), place)


def as_function(call: ast.Call, method: str = "") -> ast.Lambda:
    """What a call makes of its first argument, as a function; ``method``: of what it is called of."""
    made, value = copied(call), ast.Name("_kgopt_value", ast.Load())
    if method:
        made.func = ast.Attribute(value, method, ast.Load())
    else:
        made.args[0] = value
    return lambda_of("_kgopt_value", made, call)


def lambda_of(argument: str, body: ast.expr, place: ast.AST) -> ast.Lambda:
    """``lambda argument: body``."""
    return placed(ast.Lambda(ast.arguments([], [ast.arg(argument)], None, [], [], None, []), body), place)


def assign(name: str, value: ast.expr, place: ast.stmt) -> ast.stmt:
    """``name = value``."""
    target = ast.copy_location(ast.Name(name, ast.Store()), place)
    return ast.copy_location(ast.Assign([target], value), place)


def become(node: ast.AST, other: ast.AST) -> None:
    """Makes a node another one: what holds it stays right."""
    node.__class__ = other.__class__
    node.__dict__.clear()
    node.__dict__.update(other.__dict__)


def moved_out(statement: ast.stmt, part: ast.expr, name: str) -> ast.stmt:
    """Puts a variable in the place of a part of a statement; the statement that assigns the part to it."""
    replace(statement, part, ast.copy_location(ast.Name(name, ast.Load()), part))
    return assign(name, part, statement)


def forgotten(name: str, last: ast.stmt) -> list[ast.stmt]:
    """``name = None`` behind the last statement that reads a variable: what it held lives no longer."""
    none = assign(name, ast.copy_location(ast.Constant(None), last), last)
    return [] if isinstance(last, ast.Return) else [none]


def answer(tree: ast.AST, name: str, site: str) -> None:
    """``h.ndim`` becomes ``site.like(h).ndim``, and ``h.dtype`` ``site.dtype_of(h)``, where h is no tensor yet."""
    for question in asks(tree, name):
        value = question.value
        if question.attr == "dtype":
            become(question, call_of(site, "dtype_of", [value], value))
        else:
            question.value = call_of(site, "like", [value], value)


def replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Puts a node in the place of another, somewhere in a tree."""
    for node in walk(tree):
        for name, value in ast.iter_fields(node):
            if value is old:
                setattr(node, name, new)
                return
            if isinstance(value, list):
                for i, item in enumerate(value):
                    if item is old:
                        value[i] = new
                        return
    raise AssertionError("the expression is not in its statement")
