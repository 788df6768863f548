"""Norms over channels, recognized by what is computed.

A value is a sum of terms; a term is a number times powers of atoms. Atoms are the input, its mean over channels, what
is left of the input without it, mean squares, and parameters. Operations combine values (:func:`apply`), and
:func:`recognize` says which norm a value is. The order in which code multiplies, its casts and the dims that it moves
leave no trace in a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

KINDS = ("rms", "l2", "layer")
X, U, MEAN = ("x",), ("u",), ("mean",)  # the input, without its mean, its mean
Atom = tuple[Any, ...]


class UnknownFormulaError(Exception):
    """Why a computation is no norm over channels."""


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
    """What an expression holds."""

    terms: tuple[Term, ...]
    order: tuple[int, ...] | None = None  # of a value of x: which of x's dims each of its dims is
    shape: tuple[int, ...] | None = None  # of one of parameters alone
    dtype: torch.dtype | None = None  # None: a number
    channels: int = 0  # of x's
    axis: int = -1  # of x's dims, the one with the channels
    is_reduced: bool = False  # one value for all channels
    lies: tuple[int, ...] | None = None  # the order in which it is contiguous; None: it lies as x does
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


def _atom(atom: Atom) -> Term:
    return Term(1.0, frozenset(((atom, 1.0),)))


def input_value(rank: int, channels: int, axis: int, dtype: torch.dtype, autocast: bool) -> Value:
    """x itself."""
    order = tuple(range(rank))
    return Value((_atom(X),), order, None, dtype, channels, axis % rank, half_is_float=autocast)


def parameter(name: str, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """A parameter."""
    return Value((_atom(("parameter", name)),), None, tuple(shape), dtype)


@dataclass(frozen=True)
class Formula:
    """A norm over channels: ``norm(x) * factor * weight + bias_factor * bias``, in the terms of the op."""

    kind: str
    eps: float
    factor: float  # beside the op's own norm
    weight: str  # a parameter's name; "": none
    bias: str
    bias_factor: float
    axis: int  # the dim of the channels
    dtype: torch.dtype  # of the result
    lies: tuple[int, ...] | None  # the order of dims in which the result is contiguous; None: as x lies


# ----------------------------------------------------------------------------------------------------------------------
# Sums and products


def constant(number: Any) -> Value:
    """A Python number."""
    if isinstance(number, (bool, complex)) or not isinstance(number, (int, float)):
        raise UnknownFormulaError(f"it computes with a {type(number).__name__}")
    return Value((Term(float(number)),))


def _as_value(operand: Any) -> Value:
    return operand if isinstance(operand, Value) else constant(operand)


def _single(value: Value) -> Term:
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
        if b.order != a.order:
            raise UnknownFormulaError("it combines values whose dims are in different orders")
        dtype = torch.promote_types(_dtype(a), _dtype(b))
        lies = b.lies if a.is_reduced else a.lies
        reduced = a.is_reduced and b.is_reduced
    elif b.shape is not None:
        _check_broadcast(a, b.shape)
        if b.shape:  # one of no dims takes no part in promotion
            dtype = torch.promote_types(_dtype(a), _dtype(b))
        reduced = a.is_reduced and math.prod(b.shape) == 1
    return replace(a, terms=terms, dtype=dtype, is_reduced=reduced, lies=lies)


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
    return _joined(a, b, (_single(a).times(_single(b), power),))


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
    term = _single(a)
    if p != int(p) and any(atom[0] not in _POSITIVE for atom, _ in term.powers):
        raise UnknownFormulaError("it takes the root of what may be negative")
    return replace(a, terms=(Term(1.0).times(term, p),), dtype=_float_if_autocast(a))


def _float_if_autocast(a: Value) -> torch.dtype | None:
    return torch.float32 if a.half_is_float and a.dtype in (torch.float16, torch.bfloat16) else a.dtype


# ----------------------------------------------------------------------------------------------------------------------
# Reductions


def _over_channels(a: Value, dim: Any, keepdim: Any) -> None:
    dims = [dim] if type(dim) is int else list(dim) if isinstance(dim, (tuple, list)) else None
    if a.order is None or a.is_reduced or dims is None or len(dims) != 1 or type(dims[0]) is not int:
        raise UnknownFormulaError("it reduces over other dims than the channels")
    if not -a.rank <= dims[0] < a.rank or dims[0] % a.rank != a.at:
        raise UnknownFormulaError("it reduces over other dims than the channels")
    if keepdim is not True:
        raise UnknownFormulaError("it reduces without keepdim")


def mean(a: Value, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Value:
    """Over channels."""
    _over_channels(a, dim, keepdim)
    term = _single(a)
    for base, made in (((X, 1.0), MEAN), ((X, 2.0), ("square", X)), ((U, 2.0), ("square", U))):
        if term.powers == frozenset((base,)):
            found = Term(term.factor, frozenset(((made, 1.0),)))
            return _cast(replace(a, terms=(found,), is_reduced=True), dtype)
    raise UnknownFormulaError("it takes a mean of something else than the input or its square")


def total(a: Value, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Value:
    """The sum over channels."""
    found = multiply(mean(a, dim, keepdim, dtype=dtype), float(a.channels))
    return replace(found, dtype=_float_if_autocast(found))


def variance(a: Value, dim: Any = None, unbiased: Any = None, keepdim: Any = False, *, correction: Any = None) -> Value:
    """Over channels."""
    if unbiased is None and correction is None:
        correction = 1
    correction = int(bool(unbiased)) if unbiased is not None else correction
    if correction not in (0, 1) or a.channels - correction <= 0:
        raise UnknownFormulaError("it corrects the variance in a way that is not known")
    centered = add(a, mean(a, dim, keepdim), -1.0)
    return multiply(mean(power(centered, 2), dim, keepdim), a.channels / (a.channels - correction))


def length(a: Value, p: Any = 2, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Value:
    """``a.norm(2, dim, keepdim=True)``."""
    if p not in (2, "fro"):
        raise UnknownFormulaError("it takes another norm than the Euclidean one")
    return _cast(power(total(power(a, 2), dim, keepdim), 0.5), dtype)


def vector_length(a: Value, ord: Any = 2, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Value:
    """``torch.linalg.vector_norm``."""
    return length(a, ord, dim, keepdim, dtype=dtype)


def at_least(a: Value, min: Any = None, max: Any = None) -> Value:
    """A length or mean square, clamped from below."""
    term = _single(a)
    if max is not None or min is None or isinstance(min, Value) or len(term.powers) != 1 or not a.is_reduced:
        raise UnknownFormulaError("it clamps something else than a length")
    ((atom, p),) = term.powers
    bound = float(min)
    if atom[0] != "square" or p not in (0.5, 1.0) or bound < 0 or term.factor <= 0:
        raise UnknownFormulaError("it clamps something else than a length")
    # Of the length: root(C * mean square), whatever its unit was here.
    unit = (bound / term.factor) ** (0.5 / p) * math.sqrt(a.channels)
    found = Term(term.factor * float(a.channels) ** -p, frozenset(((("longest", atom[1], unit), 2 * p),)))
    return replace(a, terms=(found,))


def normalize(a: Value, p: Any = 2.0, dim: Any = 1, eps: Any = 1e-12, out: Any = None) -> Value:
    """``F.normalize``."""
    if p != 2 or out is not None:
        raise UnknownFormulaError("it takes another norm than the Euclidean one")
    return multiply(a, at_least(length(a, 2, dim, True), eps), -1.0)


def layer_norm(a: Value, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5) -> Value:
    """``F.layer_norm``, over the last dim."""
    _last_is_channels(a, normalized_shape)
    centered = add(a, mean(a, -1, True), -1.0)
    y = multiply(centered, power(add(mean(power(centered, 2), -1, True), float(eps)), -0.5))
    return _affine(a, y, weight, bias)


def rms_norm(a: Value, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Value:
    """``F.rms_norm``, over the last dim."""
    _last_is_channels(a, normalized_shape)
    if eps is None:
        if a.dtype not in (torch.float32, torch.float64):
            raise UnknownFormulaError("its eps depends on the dtype")
        eps = torch.finfo(a.dtype).eps
    return _affine(a, multiply(a, power(add(mean(power(a, 2), -1, True), float(eps)), -0.5)), weight, None)


def _last_is_channels(a: Value, normalized_shape: Any) -> None:
    shape = (normalized_shape,) if type(normalized_shape) is int else tuple(normalized_shape)
    if a.order is None or a.is_reduced or a.at != a.rank - 1 or shape != (a.channels,):
        raise UnknownFormulaError("it normalizes over other dims than the channels")


def _affine(a: Value, y: Value, weight: Any, bias: Any) -> Value:
    y = y if weight is None else multiply(y, weight)
    y = y if bias is None else add(y, bias)
    return replace(y, dtype=_float_if_autocast(a), lies=a.order)


# ----------------------------------------------------------------------------------------------------------------------
# Dims and dtypes


def permute(a: Value, *dims: Any) -> Value:
    """Of a value of x."""
    listed = list(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else list(dims)
    if a.order is None or len(listed) != a.rank or not all(type(d) is int and -a.rank <= d < a.rank for d in listed):
        raise UnknownFormulaError("it moves dims in a way that is not known")
    order = tuple(a.order[d % a.rank] for d in listed)
    if len(set(order)) != a.rank:
        raise UnknownFormulaError("it moves dims in a way that is not known")
    return replace(a, order=order)


def movedim(a: Value, source: Any, destination: Any) -> Value:
    """Of a value of x; one dim or several."""
    sources = [source] if type(source) is int else list(source)
    targets = [destination] if type(destination) is int else list(destination)
    if a.order is None or len(sources) != len(targets) or not all(type(d) is int for d in (*sources, *targets)):
        raise UnknownFormulaError("it moves dims in a way that is not known")
    if not all(-a.rank <= d < a.rank for d in (*sources, *targets)):
        raise UnknownFormulaError("it moves dims in a way that is not known")
    moved = {t % a.rank: s % a.rank for s, t in zip(sources, targets, strict=True)}
    rest = iter(d for d in range(a.rank) if d not in moved.values())
    return permute(a, *(moved[d] if d in moved else next(rest) for d in range(a.rank)))


def transpose(a: Value, dim0: int, dim1: int) -> Value:
    """Of a value of x."""
    dims = list(range(a.rank))
    if a.order is None or not all(-a.rank <= d < a.rank for d in (dim0, dim1)):
        raise UnknownFormulaError("it moves dims in a way that is not known")
    dims[dim0 % a.rank], dims[dim1 % a.rank] = dims[dim1 % a.rank], dims[dim0 % a.rank]
    return permute(a, *dims)


def contiguous(a: Value, memory_format: Any = torch.contiguous_format) -> Value:
    """A copy in the order of its dims."""
    if memory_format not in (torch.contiguous_format, torch.preserve_format):
        raise UnknownFormulaError("it asks for a memory format")
    return replace(a, lies=a.order) if memory_format is torch.contiguous_format and a.order is not None else a


def _cast(a: Value, dtype: Any) -> Value:
    if dtype is None:
        return a
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or torch.finfo(dtype).bits < 16:
        raise UnknownFormulaError("it casts to another dtype than a float")
    if a.dtype is torch.float64 and dtype is not torch.float64:
        raise UnknownFormulaError("it rounds float64")  # the op would not
    return replace(a, dtype=dtype)


def to(a: Value, *args: Any, **kwargs: Any) -> Value:
    """Casts; to another device only by what is there already."""
    given = [v for v in (*args, *kwargs.values()) if v is not None and type(v) is not bool]
    for v in given:
        if isinstance(v, Value):
            a = _cast(a, v.dtype)
        elif isinstance(v, torch.dtype):
            a = _cast(a, v)
        else:
            raise UnknownFormulaError("it moves a tensor to a device")
    return a


def _to(dtype: torch.dtype) -> Callable[..., Value]:
    return lambda a: _cast(a, dtype)


def view(a: Value, *shape: Any) -> Value:
    """Of a parameter."""
    listed = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
    if a.shape is None or not all(type(s) is int for s in listed):
        raise UnknownFormulaError("it takes a view of the input")
    count = math.prod(a.shape)
    known = math.prod(s for s in listed if s != -1)
    if listed.count(-1) > 1 or known <= 0 or count % known:
        raise UnknownFormulaError("it takes a view that does not fit")
    found = tuple(count // known if s == -1 else s for s in listed)
    if math.prod(found) != count or sum(s != 1 for s in found) > 1 or sum(s != 1 for s in a.shape) > 1:
        raise UnknownFormulaError("it takes a view of several dims")
    return replace(a, shape=found)


def unsqueeze(a: Value, dim: int) -> Value:
    """Of a parameter."""
    if a.shape is None or type(dim) is not int or not -a.rank - 1 <= dim <= a.rank:
        raise UnknownFormulaError("it adds a dim to the input")
    shape = list(a.shape)
    shape.insert(dim % (a.rank + 1), 1)
    return replace(a, shape=tuple(shape))


def getitem(a: Value, index: Any) -> Value:
    """``weight[None, :, None, None]``."""
    listed = list(index) if isinstance(index, tuple) else [index]
    if a.shape is None or any(i is not None and i is not ... and i != slice(None) for i in listed):
        raise UnknownFormulaError("it indexes a tensor")
    taken = sum(isinstance(i, slice) for i in listed)
    if listed.count(...) > 1 or taken > a.rank:
        raise UnknownFormulaError("it indexes a tensor")
    if ... not in listed:
        listed.append(...)
    at = listed.index(...)
    listed[at : at + 1] = [slice(None)] * (a.rank - taken)
    sizes = iter(a.shape)
    return replace(a, shape=tuple(1 if i is None else next(sizes) for i in listed))


def expand_as(a: Value, other: Value) -> Value:
    """What broadcasting does anyway."""
    if a.order is None or other.order != a.order:
        raise UnknownFormulaError("it expands a tensor")
    return a


def _scaled_add(sign: float) -> Callable[..., Value]:
    def function(a: Any, b: Any, *, alpha: Any = 1) -> Value:
        return add(a, b, sign * float(alpha))

    return function


def _divided(a: Any, b: Any, *, rounding_mode: Any = None) -> Value:
    if rounding_mode is not None:
        raise UnknownFormulaError("it rounds a quotient")
    return multiply(a, b, -1.0)


def _root(a: Value) -> Value:
    found = power(a, 0.5)
    return replace(found, dtype=a.dtype)


def _names(function: Callable[..., Value], *names: str) -> dict[str, Callable[..., Value]]:
    return dict.fromkeys(names, function)


OPERATIONS: dict[str, Callable[..., Value]] = {
    **_names(lambda a, b: multiply(a, b), "mul", "multiply", "__mul__", "__rmul__"),
    **_names(_divided, "div", "divide", "true_divide", "__truediv__", "truediv"),
    **_names(lambda a, b: multiply(b, a, -1.0), "__rtruediv__", "__rdiv__"),
    **_names(_scaled_add(1.0), "add", "__add__", "__radd__"),
    **_names(_scaled_add(-1.0), "sub", "subtract", "__sub__"),
    **_names(lambda a, b: add(b, a, -1.0), "__rsub__", "rsub"),
    **_names(power, "pow", "__pow__"),
    "square": lambda a: power(a, 2),
    "sqrt": _root,
    "rsqrt": lambda a: power(a, -0.5),
    "reciprocal": lambda a: power(a, -1),
    "mean": mean,
    "sum": total,
    "var": variance,
    "std": lambda *args, **kwargs: power(variance(*args, **kwargs), 0.5),
    "norm": length,
    **_names(vector_length, "vector_norm", "linalg_vector_norm"),
    "clamp": at_least,
    "clamp_min": at_least,
    "normalize": normalize,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "permute": permute,
    **_names(movedim, "movedim", "moveaxis"),
    **_names(transpose, "transpose", "swapaxes", "swapdims"),
    "contiguous": contiguous,
    "to": to,
    "type": to,
    "type_as": to,
    "float": _to(torch.float32),
    "double": _to(torch.float64),
    "half": _to(torch.float16),
    "bfloat16": _to(torch.bfloat16),
    **_names(view, "view", "reshape"),
    "unsqueeze": unsqueeze,
    **_names(getitem, "__getitem__", "getitem"),
    "expand_as": expand_as,
}


def apply(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Value:
    """What a function or method of tensors gives.

    Raises:
        UnknownFormulaError: it has no part in norms, or not with these arguments.
    """
    operation = OPERATIONS.get(name)
    if operation is None:
        raise UnknownFormulaError(f"it calls {name}")
    try:
        return operation(*args, **kwargs)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnknownFormulaError(f"it calls {name} in a way that is not known") from error


# ----------------------------------------------------------------------------------------------------------------------
# The norm


_NORMS: dict[tuple[Atom, str, Atom], tuple[str, float]] = {
    (X, "floored", X): ("rms", -0.5),
    (X, "square", X): ("rms", -0.5),
    (X, "longest", X): ("l2", -1.0),
    (U, "floored", U): ("layer", -0.5),
    (U, "square", U): ("layer", -0.5),
}


def recognize(value: Any) -> Formula:
    """The norm that a value is.

    Raises:
        UnknownFormulaError: it is none.
    """
    if not isinstance(value, Value) or value.order is None or value.is_reduced:
        raise UnknownFormulaError("its result is no tensor of the input's size")
    if value.order != tuple(range(value.rank)):
        raise UnknownFormulaError("its result has its dims in another order")
    main = [t for t in value.terms if any(atom[0] != "parameter" for atom, _ in t.powers)]
    rest = [t for t in value.terms if t not in main]
    if len(main) != 1 or len(rest) > 1:
        raise UnknownFormulaError("it is no product of the input and its scale")
    weight, others = _parameter_of(main[0])
    bias, left = _parameter_of(rest[0]) if rest else ("", [])
    if left or (rest and not bias):
        raise UnknownFormulaError("it adds something else than a parameter")
    base = [(a, p) for a, p in others if a in (X, U)]
    scale = [(a, p) for a, p in others if a not in (X, U)]
    if len(base) != 1 or base[0][1] != 1.0 or len(scale) != 1 or len(scale[0][0]) < 2:
        raise UnknownFormulaError("it is no product of the input and its scale")
    atom, p = scale[0]
    found = _NORMS.get((base[0][0], atom[0], atom[1]))
    if found is None or found[1] != p:
        raise UnknownFormulaError("it is no product of the input and its scale")
    kind, eps = found[0], float(atom[2]) if len(atom) > 2 else 0.0
    factor = main[0].factor * (1.0 if kind != "l2" else value.channels**-0.5)
    assert value.dtype is not None
    return Formula(
        kind,
        eps,
        1.0 if abs(factor - 1.0) < 1e-13 else factor,
        weight,
        bias,
        rest[0].factor if rest else 1.0,
        value.axis,
        value.dtype,
        value.lies,
    )


def _parameter_of(term: Term) -> tuple[str, list[tuple[Atom, float]]]:
    own = [(a, p) for a, p in term.powers if a[0] == "parameter"]
    if len(own) > 1 or any(p != 1.0 for _, p in own):
        raise UnknownFormulaError("it has several parameters in one product")
    return (own[0][0][1] if own else ""), [(a, p) for a, p in term.powers if a[0] != "parameter"]
