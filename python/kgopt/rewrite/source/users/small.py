"""A user's modules and functions that are one activation, or nothing: timm's GELU, MONAI's MemoryEfficientSwish,
DropPath, ``swish(x)``.

    def forward(self, x):                              def drop_path(x, drop_prob=0.0, training=False):
        return drop_path(x, self.p, self.training)         if drop_prob == 0.0 or not training:
                                                               return x

The forward is run on names, with the numbers that the instance has, into functions that it calls. That is kept by
these numbers. At each call the code and the names that were read must be the same.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from kgopt.rewrite.chains import meanings
from kgopt.rewrite.chains.meanings import describe_function, describe_method
from kgopt.rewrite.pytorch.places import Places
from kgopt.rewrite.source.syntax.code import CannotRewriteError, parse
from kgopt.rewrite.source.syntax.names import walk
from kgopt.rewrite.source.users.reading import Reading, UnreadError

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
_GATED = {"sigmoid": "silu", "softplus+tanh": "mish"}  # by the gate: what x times it is
_SELF: dict[str, Any] = {}  # an object whose attributes nobody may read
_X = "x"  # the value that a forward is given
Act = tuple[str, bool]  # an activation of it: its name, and whether it writes into it


class _Kept:
    """What was read of code, by the numbers that it was given."""

    cls: Any = None

    def __init__(self) -> None:
        self.places = Places()
        self.known: dict[tuple[Any, ...], Act | str | None] = {}

    def _look_up(self, names: Iterable[str], values: Iterable[Any], read: Callable[[], Any]) -> Act | str | None:
        """What is known for these values; what ``read`` finds, where nothing is."""
        if any(type(value) not in _SCALARS for value in values):
            return None
        key = tuple([(n, type(v), v) for n, v in zip(names, values, strict=True)])
        if key not in self.known:
            if torch.compiler.is_compiling() or len(self.known) > 64:
                return None
            count = len(self.places)
            try:
                found = read()
            except (UnreadError, CannotRewriteError):
                found = None
            is_one = isinstance(found, _Value) and "+" not in found.what[0]
            self.known[key] = found.what if is_one else None  # type: ignore[union-attr]
            if len(self.places) > count:  # the other branches call other functions
                self.is_unchanged = self.places.check()
        return self.known[key]

    def function(self, function: Any, values: dict[str, Any], depth: int) -> Any:
        """What a function gives, by its arguments' names."""
        tree = parse(function)
        if depth > _DEEP or function.__code__.co_cellvars or function.__code__.co_freevars:
            raise UnreadError
        self.places.read(function, "__code__")
        self.places.read(function, "__defaults__")
        reading = _Reading(self, function, values, depth)
        found, result = reading.run(tree.body)
        if not found:
            raise UnreadError
        return result

    def call(self, function: Any, args: Sequence[Any], words: dict[str, Any], depth: int) -> Any:
        """The same, of a call's arguments."""
        if not isinstance(function, types.FunctionType) or inspect.unwrap(function) is not function:
            raise UnreadError
        try:
            bound = inspect.signature(function).bind(*args, **words)
        except (TypeError, ValueError):
            raise UnreadError from None
        bound.apply_defaults()
        given = bound.arguments.values()
        if any(not isinstance(v, _Value) and type(v) not in _SCALARS and v is not _SELF for v in given):
            raise UnreadError
        return self.function(function, dict(bound.arguments), depth)


class SmallFunction(_Kept):
    """What a function is, by the numbers that it is given behind its first argument."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.called = function
        self.is_unchanged = self.places.check()

    def means(self, args: Sequence[Any], words: dict[str, Any], is_method: bool = False) -> Act | str | None:
        """An activation, :data:`_X` for nothing, or None."""
        names = ("self" if is_method else "", *map(str, range(len(args))), *words)
        given = (*([_SELF] if is_method else []), _Value(_X), *args)
        read = functools.partial(self.call, self.called, given, words, 0)
        return self._look_up(names, (None, *args, *words.values()), read)


class Small(_Kept):
    """What a class's forward is, by the numbers that an instance has."""

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cls = cls
        self.forward = cls.forward
        self.names = self._names()
        for name in ("forward", "__call__", "_call_impl", "__getattr__", "__getattribute__"):
            self.places.read(cls, name)
        self.is_unchanged = self.places.check()  # is all that was read still there?

    def _names(self) -> tuple[str, ...]:
        tree = parse(self.forward)
        own = tree.args.args[0].arg
        nodes = [n for n in walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
        return tuple(dict.fromkeys(n.attr for n in nodes if n.value.id == own))  # type: ignore[attr-defined]

    def means(self, module: Any, training: bool | None = None) -> Act | str | None:
        """An activation, :data:`_X` for nothing, or None."""
        own = module.__dict__
        values = tuple([own.get(n, self) for n in self.names])
        if training is not None:
            values = tuple([training if n == "training" else v for n, v in zip(self.names, values, strict=True)])
        return self._look_up(self.names, values, lambda: self._read(dict(zip(self.names, values, strict=True))))

    def _read(self, own: dict[str, Any]) -> Any:
        first, *given = [a.arg for a in parse(self.forward).args.args]
        if len(given) != 1:
            raise UnreadError
        return self.function(self.forward, {first: own, given[0]: _Value(_X)}, 0)


class _Value:
    """What is computed of the forward's argument."""

    def __init__(self, what: Act | str) -> None:
        self.what = what


class _Reading(Reading):
    """One function, with the numbers that its arguments are."""

    def __init__(self, small: _Kept, function: Any, values: dict[str, Any], depth: int) -> None:
        super().__init__(function, small.places, values)
        self.small, self.depth = small, depth

    def test(self, e: ast.expr) -> Any:
        value = self.value(e)
        if type(value) not in _SCALARS:
            raise UnreadError
        return value

    def value(self, e: ast.expr) -> Any:
        if isinstance(e, ast.Constant):
            return e.value
        if isinstance(e, ast.Name) and e.id in self.values:
            return self.values[e.id]
        if isinstance(e, ast.Attribute) and isinstance(e.value, ast.Name) and type(self.values.get(e.value.id)) is dict:
            if hasattr(self.small.cls, e.attr) or e.attr not in self.values[e.value.id]:
                raise UnreadError
            return self.values[e.value.id][e.attr]
        if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.Not):
            return not self.test(e.operand)
        if isinstance(e, ast.BoolOp):
            for part in e.values:
                value = self.test(part)
                if bool(value) is isinstance(e.op, ast.Or):
                    break
            return value
        if isinstance(e, ast.Compare) and len(e.ops) == 1 and type(e.ops[0]) in _COMPARED:
            return _COMPARED[type(e.ops[0])](self.test(e.left), self.test(e.comparators[0]))
        if isinstance(e, ast.IfExp):
            return self.value(e.body if self.test(e.test) else e.orelse)
        if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Mult):
            return self.product(self.value(e.left), self.value(e.right))
        if isinstance(e, ast.Call):
            return self.call(e)
        raise UnreadError

    def product(self, a: Any, b: Any) -> Any:
        """``x * sigmoid(1 * x)`` is silu, ``x * tanh(softplus(x))`` mish."""
        self.places.read(torch.Tensor, "__mul__")
        whats = [v.what if isinstance(v, _Value) else v for v in (a, b)]
        if type(whats[0]) in (int, float) and whats[0] == 1 and whats[1] == _X and isinstance(b, _Value):
            return b
        if not self.is_x(a) and not self.is_x(b):
            raise UnreadError
        return self.gated(b if self.is_x(a) else a, False)

    def gated(self, gate: Any, inplace: bool) -> _Value:
        """x times a gate that is computed of it."""
        act = gate.what if isinstance(gate, _Value) else ""
        if type(act) is not tuple or act[0] not in _GATED or act[1]:
            raise UnreadError
        return _Value((_GATED[act[0]], inplace))

    def call(self, e: ast.Call) -> Any:
        if any(isinstance(a, ast.Starred) for a in e.args) or any(w.arg is None for w in e.keywords):
            raise UnreadError
        args = [self.value(a) for a in e.args]
        words = {str(w.arg): self.value(w.value) for w in e.keywords}
        function = self.resolved(e.func)
        if function is None:
            if not isinstance(e.func, ast.Attribute):
                raise UnreadError
            of = self.value(e.func.value)
            if hasattr(torch.Tensor, e.func.attr):
                self.places.read(torch.Tensor, e.func.attr)
            if e.func.attr in ("mul", "mul_") and self.is_x(of) and len(args) == 1 and not words:
                return self.gated(args[0], e.func.attr == "mul_")
            return self.act(of, describe_method(e.func.attr, args, words))
        first = args[0] if args else None
        node = describe_function(function, args[1:], words, users=False) if isinstance(first, _Value) else None
        if node is not None:
            return self.act(first, node)
        return self.small.call(function, args, words, self.depth + 1)

    def is_x(self, value: Any) -> bool:
        return isinstance(value, _Value) and value.what == _X

    def act(self, of: Any, node: Any) -> _Value:
        if node is None or node.kind != "act" or not isinstance(of, _Value):
            raise UnreadError
        if self.is_x(of):
            return _Value((node.name, node.inplace))
        if of.what[1] or node.inplace:
            raise UnreadError
        return _Value((f"{of.what[0]}+{node.name}", False))

    def resolved(self, e: ast.expr) -> Any:
        """Also ``getattr(F, name)``."""
        if isinstance(e, ast.Call) and not e.keywords and len(e.args) == 2 and self.resolved_name(e.func) is getattr:
            owner, name = self.resolved(e.args[0]), self.test(e.args[1])
            if isinstance(owner, types.ModuleType) and isinstance(name, str) and hasattr(owner, name):
                return self.places.read(owner, name)
        return super().resolved(e)

    def resolved_name(self, e: ast.expr) -> Any:
        """The builtin that a name stands for, where no other variable has it."""
        is_hidden = not isinstance(e, ast.Name) or e.id in self.function.__code__.co_varnames
        if is_hidden or e.id in self.function.__globals__:  # type: ignore[attr-defined]
            return None
        return getattr(builtins, e.id, None)  # type: ignore[attr-defined]


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


def read_function(function: Any) -> SmallFunction | None:
    """Of a function; None where that is nothing small."""
    if inspect.unwrap(function) is not function or len(function.__code__.co_code) > _LONG:
        return None
    return SmallFunction(function)


meanings.read_by(read, read_function)
