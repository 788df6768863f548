"""An activation behind a branch that ends in norms: it moves into the branch, where it can join them. And branches that
are written as expressions.
"""

from __future__ import annotations

import ast
from typing import Any

from kgopt.rewrite.chains.meanings import describe_method
from kgopt.rewrite.source.syntax.expressions import is_name, is_plain_load, of_one_argument
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.names import blocks, copied, walk


def sink(method: Method, body: list[ast.stmt]) -> None:
    """``if c: h = norm(h) ...; h = act(h)``: the statement after moves to the end of each branch, as it may."""
    k = 0
    while k < len(body):
        statement = body[k]
        follower = body[k + 1] if k + 1 < len(body) else None
        if isinstance(statement, ast.If) and isinstance(follower, (ast.Assign, ast.Return)):
            tails = _tails(method, statement)
            if any(_acts_on(method, follower, name) for name in tails):
                _append(statement, follower)
                del body[k + 1]
                # And the convolution of what it gives, which may run with the norm: see Site.run_before.
                if k + 1 < len(body) and _convolves(method, body[k + 1], method.target(follower)):
                    _append(statement, body[k + 1])
                    del body[k + 1]
                continue
        for block in blocks(statement):
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                sink(method, block)
        k += 1


def spread(body: list[ast.stmt]) -> None:
    """``h = self.act(h) if self.acts else h`` becomes a branch with a statement on either side, as do those in it."""
    for k, statement in enumerate(body):
        choice = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
        if isinstance(choice, ast.IfExp) and not all(map(is_plain_load, (choice.body, choice.orelse))):
            yes, no = (_with_value(statement, side) for side in (choice.body, choice.orelse))
            nothing = ast.copy_location(ast.Pass(), statement)
            body[k] = statement = ast.copy_location(ast.If(choice.test, yes or [nothing], no), statement)
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for block in blocks(statement):
                spread(block)


def _with_value(statement: Any, value: ast.expr) -> list[ast.stmt]:
    """A statement with another value; nothing, where that is what its variable holds."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(value, ast.Name) and len(targets) == 1 and is_name(targets[0], value.id):
        return []
    made = copied(statement)
    made.value = value
    return [made]


def _tails(method: Method, statement: ast.If) -> set[str]:
    """Names that a branch ends by giving a norm's result."""
    found: set[str] = set()
    for block in (statement.body, statement.orelse):
        last = block[-1] if block else None
        if isinstance(last, ast.If):
            found |= _tails(method, last)
        elif isinstance(last, ast.Assign) and isinstance(last.value, ast.Call) and len(last.targets) == 1:
            target, is_norm = last.targets[0], method.what(last.value.func)[0] == "norm"
            found |= {target.id} if is_norm and isinstance(target, ast.Name) else set()
    return found


def _acts_on(method: Method, statement: ast.Assign | ast.Return, name: str) -> bool:
    for node in walk(statement):
        if not isinstance(node, ast.Call):
            continue
        is_act = method.what(node.func)[0] in ("act", "same") or method.activation(node) is not None
        if is_act and node.args and is_name(node.args[0], name):
            return True
        called = node.func
        is_method = isinstance(called, ast.Attribute) and is_name(called.value, name)
        if is_method and describe_method(called.attr, *method.constants(node)) is not None:  # type: ignore[attr-defined]
            return True
    return False


def _convolves(method: Method, statement: ast.stmt, name: str | None) -> bool:
    call = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
    if name is None or not isinstance(call, ast.Call) or not of_one_argument(call):
        return False
    return method.what(call.func)[0] == "conv" and is_name(call.args[0], name)


def _append(statement: ast.If, follower: ast.stmt) -> None:
    for block in (statement.body, statement.orelse):
        last = block[-1] if block else None
        if isinstance(last, ast.If):
            _append(last, follower)
        elif not isinstance(last, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            block.append(copied(follower))
