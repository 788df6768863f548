"""Modules of a user's whose forward is one activation, or nothing: timm's GELU, MONAI's MemoryEfficientSwish, DropPath.

    def forward(self, x):                              def drop_path(x, drop_prob=0.0, training=False):
        return drop_path(x, self.p, self.training)         if drop_prob == 0.0 or not training:
                                                               return x

The forward is run on names, with the numbers that the instance has, into functions that it calls. That is kept by
these numbers. At each call the code and the names that were read must be the same.
"""

from __future__ import annotations

import ast
import inspect
import operator
import types
from typing import Any

import torch
from torch import nn

from kgopt.rewrite import meanings
from kgopt.rewrite.meanings import describe_function, describe_method
from kgopt.rewrite.places import Places
from kgopt.rewrite.source.code import CannotRewriteError, parse

_SCALARS = (bool, int, float, str, type(None))
_LONG = 400  # bytes of code: nothing that is one activation has more
_DEEP = 3
_COMPARED = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_X = "x"  # the value that a forward is given
Act = tuple[str, bool]  # an activation of it: its name, and whether it writes into it


class _UnreadError(Exception):
    """The forward does something else."""


class Small:
    """What a class's forward is, by the numbers that an instance has."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.forward = cls.forward
        self.places = Places()
        self.names = self._names()
        self.known: dict[tuple[Any, ...], Act | str | None] = {}
        for name in ("forward", "__call__", "_call_impl", "__getattr__", "__getattribute__"):
            self.places.read(cls, name)
        self.is_unchanged = self.places.check()  # is all that was read still there?

    def _names(self) -> tuple[str, ...]:
        tree = parse(self.forward)
        own = tree.args.args[0].arg
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
        return tuple(dict.fromkeys(n.attr for n in nodes if n.value.id == own))  # type: ignore[attr-defined]

    def means(self, module: Any, training: bool | None = None) -> Act | str | None:
        """An activation, :data:`_X` for nothing, or None."""
        own = module.__dict__
        values = tuple([own.get(n, self) for n in self.names])
        if training is not None:
            values = tuple([training if n == "training" else v for n, v in zip(self.names, values, strict=True)])
        for value in values:
            if type(value) not in _SCALARS:
                return None
        key = tuple([(type(v), v) for v in values])
        if key not in self.known:
            if torch.compiler.is_compiling() or len(self.known) > 64:
                return None
            count = len(self.places)
            self.known[key] = self._read(dict(zip(self.names, values, strict=True)))
            if len(self.places) > count:  # the other branches call other functions
                self.is_unchanged = self.places.check()
        return self.known[key]

    def _read(self, own: dict[str, Any]) -> Act | str | None:
        try:
            tree = parse(self.forward)
            first, *given = [a.arg for a in tree.args.args]
            if len(given) != 1:
                return None
            found = self._function(self.forward, {first: own, given[0]: _Value(_X)}, 0)
        except (_UnreadError, CannotRewriteError):
            return None
        return found.what if isinstance(found, _Value) else None

    def _function(self, function: Any, values: dict[str, Any], depth: int) -> Any:
        tree = parse(function)
        if depth > _DEEP or function.__code__.co_cellvars or function.__code__.co_freevars:
            raise _UnreadError
        self.places.read(function, "__code__")
        self.places.read(function, "__defaults__")
        reading = _Reading(self, function, values, depth)
        found, result = reading.run(tree.body)
        if not found:
            raise _UnreadError
        return result


class _Value:
    """What is computed of the forward's argument."""

    def __init__(self, what: Act | str) -> None:
        self.what = what


class _Reading:
    def __init__(self, small: Small, function: Any, values: dict[str, Any], depth: int) -> None:
        self.small, self.function, self.values, self.depth = small, function, values, depth

    def run(self, body: list[ast.stmt]) -> tuple[bool, Any]:
        for statement in body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return True, self.value(statement.value)
            if isinstance(statement, ast.If):
                found = self.run(statement.body if self.scalar(statement.test) else statement.orelse)
                if found[0]:
                    return found
            elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                raise _UnreadError
        return False, None

    def scalar(self, e: ast.expr) -> Any:
        value = self.value(e)
        if type(value) not in _SCALARS:
            raise _UnreadError
        return value

    def value(self, e: ast.expr) -> Any:
        if isinstance(e, ast.Constant):
            return e.value
        if isinstance(e, ast.Name) and e.id in self.values:
            return self.values[e.id]
        if isinstance(e, ast.Attribute) and isinstance(e.value, ast.Name) and type(self.values.get(e.value.id)) is dict:
            if hasattr(self.small.cls, e.attr) or e.attr not in self.values[e.value.id]:
                raise _UnreadError
            return self.values[e.value.id][e.attr]
        if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.Not):
            return not self.scalar(e.operand)
        if isinstance(e, ast.BoolOp):
            for part in e.values:
                value = self.scalar(part)
                if bool(value) is isinstance(e.op, ast.Or):
                    break
            return value
        if isinstance(e, ast.Compare) and len(e.ops) == 1 and type(e.ops[0]) in _COMPARED:
            return _COMPARED[type(e.ops[0])](self.scalar(e.left), self.scalar(e.comparators[0]))
        if isinstance(e, ast.IfExp):
            return self.value(e.body if self.scalar(e.test) else e.orelse)
        if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Mult):
            return self.product(self.value(e.left), self.value(e.right))
        if isinstance(e, ast.Call):
            return self.call(e)
        raise _UnreadError

    def product(self, a: Any, b: Any) -> Any:
        """``x * sigmoid(1 * x)`` is silu."""
        whats = [v.what if isinstance(v, _Value) else v for v in (a, b)]
        if type(whats[0]) in (int, float) and whats[0] == 1 and whats[1] == _X and isinstance(b, _Value):
            return b
        if all(isinstance(v, _Value) for v in (a, b)) and whats in ([_X, ("sigmoid", False)], [("sigmoid", False), _X]):
            return _Value(("silu", False))
        raise _UnreadError

    def call(self, e: ast.Call) -> Any:
        if any(isinstance(a, ast.Starred) for a in e.args) or any(w.arg is None for w in e.keywords):
            raise _UnreadError
        args = [self.value(a) for a in e.args]
        words = {str(w.arg): self.value(w.value) for w in e.keywords}
        function = self.resolved(e.func)
        if function is None:
            if not isinstance(e.func, ast.Attribute) or not self.is_x(self.value(e.func.value)):
                raise _UnreadError
            if hasattr(torch.Tensor, e.func.attr):
                self.small.places.read(torch.Tensor, e.func.attr)
            return self.act(describe_method(e.func.attr, args, words))
        node = describe_function(function, args[1:], words) if args and self.is_x(args[0]) else None
        if node is not None:
            return self.act(node)
        if not isinstance(function, types.FunctionType) or inspect.unwrap(function) is not function:
            raise _UnreadError
        try:
            bound = inspect.signature(function).bind(*args, **words)
        except (TypeError, ValueError):
            raise _UnreadError from None
        bound.apply_defaults()
        if any(not isinstance(v, _Value) and type(v) not in _SCALARS for v in bound.arguments.values()):
            raise _UnreadError
        return self.small._function(function, dict(bound.arguments), self.depth + 1)

    def is_x(self, value: Any) -> bool:
        return isinstance(value, _Value) and value.what == _X

    def act(self, node: Any) -> _Value:
        if node is None or node.kind != "act":
            raise _UnreadError
        return _Value((node.name, node.inplace))

    def resolved(self, e: ast.expr) -> Any:
        """What a global name stands for; None for none."""
        names = self.function.__globals__
        if isinstance(e, ast.Name) and e.id not in self.function.__code__.co_varnames and e.id in names:
            return self.small.places.read(names, e.id)
        if isinstance(e, ast.Attribute):
            owner = self.resolved(e.value)
            if isinstance(owner, types.ModuleType) and hasattr(owner, e.attr):
                return self.small.places.read(owner, e.attr)
        return None


def read(module: nn.Module) -> Small | None:
    """Of a module's class; None where that is nothing small."""
    cls: Any = type(module)
    forward = cls.forward
    if module._modules or module._parameters or module._buffers or not isinstance(forward, types.FunctionType):
        return None
    if cls.__module__.startswith("torch.") or len(forward.__code__.co_code) > _LONG:
        return None
    plain = all(getattr(cls, n) is getattr(nn.Module, n) for n in ("__call__", "_call_impl", "__getattr__"))
    if not plain or cls.__getattribute__ is not object.__getattribute__ or cls._compiled_call_impl is not None:
        return None
    try:
        return Small(cls)
    except CannotRewriteError:
        return None


meanings.read_by(read)
