"""Values, and their sums, products and powers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

X, U, MEAN = ("x",), ("u",), ("mean",)  # the input, without its mean, its mean
Atom = tuple[Any, ...]
Order = tuple[tuple[int, ...], ...]


class UnknownFormulaError(Exception):
    """Why a computation is no norm that is known."""


class GroupsError(UnknownFormulaError):
    """It takes a view of so many groups of channels: asked again with these, it may be a norm."""

    def __init__(self, groups: int) -> None:
        super().__init__("it groups channels")
        self.groups = groups


@dataclass(frozen=True)
class Term:
    """A number times atoms to some powers."""

    factor: float
    powers: frozenset[tuple[Atom, float]] = frozenset()

    def times(self, other: Term, power: float = 1.0) -> Term:
        """``self * other**power``."""
        found = dict(self.powers)
        for atom, p in other.powers:
            found[atom] = found.get(atom, 0.0) + p * power
        powers = frozenset((atom, p) for atom, p in found.items() if p)
        return Term(self.factor * _number_power(other.factor, power), powers)


def _number_power(number: float, power: float) -> float:
    if (number < 0 and power != int(power)) or (number == 0 and power < 0):
        raise UnknownFormulaError("it takes a power that is no number")
    return float(number**power)


@dataclass(frozen=True)
class Value:
    """What an expression holds.

    x's dims are numbered; of a norm in groups x's channels are two of them, groups and the channels of each.
    """

    terms: tuple[Term, ...]
    order: Order | None = None  # of a value of x: which of x's dims each of its dims is made of
    shape: tuple[int, ...] | None = None  # of one of parameters alone
    dtype: torch.dtype | None = None  # None: a number
    channels: int = 0  # of x's
    axis: tuple[int, ...] = ()  # x's dims with the channels
    over: frozenset[int] = frozenset()  # x's dims that are reduced
    count: int = 0  # of the values that are reduced to one; 0: it is not known
    whole: Order = ()  # x's own order
    sizes: tuple[Any, ...] = ()  # of a norm in groups: of x's dims, an int or an object that stands for one
    is_reduced: bool = False  # one value for all of ``over``
    lies: Order | None = None  # the order in which it is contiguous; None: it lies as x does
    half_is_float: bool = False  # autocast is on: some functions give float32

    @property
    def rank(self) -> int:
        """How many dims it has."""
        return len(self.order if self.order is not None else self.shape or ())

    @property
    def at(self) -> int:
        """Which of its dims is that of the channels."""
        assert self.order is not None
        return self.order.index(self.axis)

    def sizes_of(self, order: Order) -> tuple[Any, ...]:
        """Of dims that are made of these of x's: None where several meet of which one is not known."""
        found: list[Any] = []
        for part in order:
            sizes = [self.sizes[d] for d in part if not (self.is_reduced and d in self.over)]
            are_known = all(type(s) is int for s in sizes)
            found.append(math.prod(sizes) if are_known else sizes[0] if len(sizes) == 1 else None)
        return tuple(found)


def _atom(atom: Atom) -> Term:
    return Term(1.0, frozenset(((atom, 1.0),)))


def input_value(rank: int, channels: int, axis: int, dtype: torch.dtype, autocast: bool) -> Value:
    """x itself."""
    order = tuple((d,) for d in range(rank))
    over = (axis % rank,)
    values = Value((_atom(X),), order, None, dtype, channels, over, frozenset(over), channels)
    return replace(values, whole=order, half_is_float=autocast)


def grouped_input(sizes: Sequence[Any], groups: int, dtype: torch.dtype, autocast: bool) -> Value:
    """x itself ``[N, C, *S]``, to be normalized in groups of channels. Of its sizes only C has to be a number."""
    channels: int = sizes[1]
    split = (sizes[0], groups, channels // groups, *sizes[2:])
    parts = [(0,), (1, 2), *((d,) for d in range(3, len(split)))]
    # A dim of size 1 is part of none, wherever it stands.
    order = tuple(tuple(d for d in part if not is_size(split[d], 1)) for part in parts)
    over = frozenset(d for d in range(2, len(split)) if not is_size(split[d], 1))
    known = [split[d] for d in over]
    count = math.prod(known) if all(type(s) is int for s in known) else 0
    return Value((_atom(X),), order, None, dtype, channels, order[1], over, count, order, split, half_is_float=autocast)


def is_size(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be the same; objects stand for sizes that are not known."""
    return a is b or (type(a) is int and type(b) is int and a == b)


def parameter(name: str, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """A parameter."""
    return Value((_atom(("parameter", name)),), None, tuple(shape), dtype)


def constant(number: Any) -> Value:
    """A Python number."""
    if isinstance(number, (bool, complex)) or not isinstance(number, (int, float)):
        raise UnknownFormulaError(f"it computes with a {type(number).__name__}")
    return Value((Term(float(number)),))


def _as_value(operand: Any) -> Value:
    return operand if isinstance(operand, Value) else constant(operand)


def single(value: Value) -> Term:
    """The value as one term; a sum is an atom."""
    if len(value.terms) == 1:
        return value.terms[0]
    if not value.terms:
        return Term(0.0)
    return Term(1.0, frozenset(((("sum", frozenset(value.terms)), 1.0),)))


def _joined(a: Value, b: Value, terms: tuple[Term, ...]) -> Value:
    """The value of an operation on two, whose dims must fit."""
    if a.order is None and b.order is not None:
        a, b = b, a
    if a.order is None:
        if a.shape is None or b.shape is None:
            one = a if b.shape is None else b
            return replace(one, terms=terms)
        shape = tuple(torch.broadcast_shapes(a.shape, b.shape))
        return replace(a, terms=terms, shape=shape, dtype=torch.promote_types(_dtype(a), _dtype(b)))
    dtype = a.dtype
    reduced, lies = a.is_reduced, a.lies
    if b.order is not None:
        both_reduced = a.is_reduced and b.is_reduced
        check_order(a, b)
        dtype = torch.promote_types(_dtype(a), _dtype(b))
        full, other = (b, a) if a.is_reduced else (a, b)
        # Of a norm in groups it also says that the code takes views, which contiguous tensors have.
        lies = full.lies if full.lies is not None or not a.sizes else other.lies
        a = b if a.is_reduced else a
        reduced = both_reduced
    elif b.shape is not None:
        _check_broadcast(a, b.shape)
        if b.shape:  # one of no dims takes no part in promotion
            dtype = torch.promote_types(_dtype(a), _dtype(b))
        is_within = not a.over & set(a.axis)  # channels are not reduced
        reduced = a.is_reduced and (is_within or math.prod(b.shape) == 1)
    return replace(a, terms=terms, dtype=dtype, is_reduced=reduced, lies=lies)


def check_order(a: Value, b: Value) -> None:
    """Raises unless each dim of two values is made of the same of x's, or of one but for what is reduced."""
    orders = a.order or (), b.order or ()
    if a.is_reduced or b.is_reduced:
        orders = tuple(tuple(tuple(d for d in part if d not in a.over) for part in o) for o in orders)  # type: ignore[assignment]
    if orders[0] != orders[1]:
        raise UnknownFormulaError("it combines values whose dims are in different orders")


def _dtype(value: Value) -> torch.dtype:
    assert value.dtype is not None
    return value.dtype


def _check_broadcast(a: Value, shape: tuple[int, ...]) -> None:
    if len(shape) > a.rank:
        raise UnknownFormulaError("a parameter has more dims than the input")
    at = a.at - (a.rank - len(shape))
    for i, size in enumerate(shape):
        if size != (a.channels if i == at else 1) and size != 1:
            raise UnknownFormulaError("a parameter belongs to other dims than the channels")
    if at < 0 or shape[at] != a.channels:
        raise UnknownFormulaError("a parameter is not one value a channel")


def multiply(a: Any, b: Any, power: float = 1.0) -> Value:
    """``a * b**power``."""
    a, b = _as_value(a), _as_value(b)
    return _joined(a, b, (single(a).times(single(b), power),))


def add(a: Any, b: Any, factor: float = 1.0) -> Value:
    """``a + factor * b``."""
    a, b = _as_value(a), _as_value(b)
    found: dict[frozenset[tuple[Atom, float]], float] = {}
    for term, scale in (*((t, 1.0) for t in a.terms), *((t, factor) for t in b.terms)):
        found[term.powers] = found.get(term.powers, 0.0) + scale * term.factor
    terms = tuple(Term(number, powers) for powers, number in found.items() if number)
    return _joined(a, b, _simplified(terms))


def _simplified(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """``x - mean`` is an atom, and so is a mean square plus a number."""
    if len(terms) != 2:
        return terms
    by = {term.powers: term.factor for term in terms}
    x, mean = (frozenset(((atom, 1.0),)) for atom in (X, MEAN))
    if x in by and mean in by and by[x] == -by[mean]:
        return (Term(by[x], frozenset(((U, 1.0),))),)
    if frozenset() in by:
        eps = by.pop(frozenset())
        ((powers, factor),) = by.items()
        if len(powers) == 1:
            ((atom, power),) = powers
            if atom[0] == "square" and power == 1.0 and factor > 0 and eps >= 0:
                return (Term(factor, frozenset(((("floored", atom[1], eps / factor), 1.0),))),)
    return terms


_POSITIVE = ("square", "floored", "longest")  # atoms that are never negative


def power(a: Value, exponent: Any) -> Value:
    """``a ** exponent``."""
    if isinstance(exponent, Value) and len(exponent.terms) == 1 and exponent.order is exponent.shape is None:
        exponent = exponent.terms[0].factor
    p = float(_as_value(exponent).terms[0].factor) if not isinstance(exponent, Value) else math.nan
    if math.isnan(p):
        raise UnknownFormulaError("it takes a power that is no number")
    term = single(a)
    if p != int(p) and any(atom[0] not in _POSITIVE for atom, _ in term.powers):
        raise UnknownFormulaError("it takes the root of what may be negative")
    return replace(a, terms=(Term(1.0).times(term, p),), dtype=float_if_autocast(a))


def float_if_autocast(a: Value) -> torch.dtype | None:
    """Of what autocast computes in float32."""
    return torch.float32 if a.half_is_float and a.dtype in (torch.float16, torch.bfloat16) else a.dtype


def cast(a: Value, dtype: Any) -> Value:
    """To a dtype of at least 16 bits; None: as it is."""
    if dtype is None:
        return a
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or torch.finfo(dtype).bits < 16:
        raise UnknownFormulaError("it casts to another dtype than a float")
    if a.dtype is torch.float64 and dtype is not torch.float64:
        raise UnknownFormulaError("it rounds float64")  # the op would not
    return replace(a, dtype=dtype)
