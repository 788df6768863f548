"""Reductions over channels or positions, and PyTorch's norms, which are made of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from kgopt.rewrite.formulas.values import (
    MEAN,
    Order,
    Term,
    U,
    UnknownFormulaError,
    Value,
    X,
    add,
    cast,
    float_if_autocast,
    is_size,
    multiply,
    power,
    single,
)


def _reduced_order(a: Value, dim: Any, keepdim: Any) -> Order:
    """The order of what a reduction over ``dim`` gives, if that is what a norm reduces."""
    dims = [dim] if type(dim) is int else list(dim) if isinstance(dim, (tuple, list)) else None
    known = dims is not None and all(type(d) is int and -a.rank <= d < a.rank for d in dims)
    if a.order is None or a.is_reduced or not known or not dims or type(keepdim) is not bool:
        raise UnknownFormulaError("it reduces in a way that is not known")
    at = {d % a.rank for d in dims}
    if len(at) != len(dims) or {part for d in at for part in a.order[d]} != a.over:
        raise UnknownFormulaError("it reduces over other dims than a norm does")
    return a.order if keepdim else tuple(part for i, part in enumerate(a.order) if i not in at)


def mean(a: Value, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Value:
    """Over what a norm reduces."""
    order = _reduced_order(a, dim, keepdim)
    term = single(a)
    for base, made in (((X, 1.0), MEAN), ((X, 2.0), ("square", X)), ((U, 2.0), ("square", U))):
        if term.powers == frozenset((base,)):
            found = Term(term.factor, frozenset(((made, 1.0),)))
            return cast(replace(a, terms=(found,), order=order, is_reduced=True), dtype)
    raise UnknownFormulaError("it takes a mean of something else than the input or its square")


def total(a: Value, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Value:
    """The sum over what a norm reduces."""
    found = multiply(mean(a, dim, keepdim, dtype=dtype), float(_count(a)))
    return replace(found, dtype=float_if_autocast(found))


def _count(a: Value) -> int:
    if not a.count:
        raise UnknownFormulaError("it counts what shows when the code runs")
    return a.count


def variance(a: Value, dim: Any = None, unbiased: Any = None, keepdim: Any = False, *, correction: Any = None) -> Value:
    """Over what a norm reduces."""
    if isinstance(dim, bool):  # of everything, perhaps unbiased
        raise UnknownFormulaError("it reduces in a way that is not known")
    if unbiased is None and correction is None:
        correction = 1
    correction = int(bool(unbiased)) if unbiased is not None else correction
    if correction not in (0, 1) or (correction and _count(a) <= 1):
        raise UnknownFormulaError("it corrects the variance in a way that is not known")
    centered = add(a, mean(a, dim, True), -1.0)
    found = mean(power(centered, 2), dim, keepdim)
    found = multiply(found, a.count / (a.count - 1)) if correction else found
    return replace(found, dtype=a.dtype)  # autocast lets it be


def variance_and_mean(a: Value, dim: Any = None, unbiased: Any = None, keepdim: Any = False, **more: Any) -> Any:
    """``torch.var_mean``."""
    return variance(a, dim, unbiased, keepdim, **more), mean(a, dim, keepdim)


def length(a: Value, p: Any = 2, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Value:
    """``a.norm(2, dim, keepdim=True)``."""
    if p not in (2, "fro"):
        raise UnknownFormulaError("it takes another norm than the Euclidean one")
    return cast(power(total(power(a, 2), dim, keepdim), 0.5), dtype)


def vector_length(a: Value, ord: Any = 2, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Value:
    """``torch.linalg.vector_norm``."""
    return length(a, ord, dim, keepdim, dtype=dtype)


def at_least(a: Value, min: Any = None, max: Any = None) -> Value:
    """A length or mean square, clamped from below."""
    term = single(a)
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
    """``F.layer_norm``, over the last dim, or all but the first."""
    dims = _last_dims(a, normalized_shape)
    centered = add(a, mean(a, dims, True), -1.0)
    y = multiply(centered, power(add(mean(power(centered, 2), dims, True), float(eps)), -0.5))
    return _affine(a, y, weight, bias)


def rms_norm(a: Value, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Value:
    """``F.rms_norm``, over the last dim."""
    dims = _last_dims(a, normalized_shape)
    if eps is None:
        if a.dtype not in (torch.float32, torch.float64):
            raise UnknownFormulaError("its eps depends on the dtype")
        eps = torch.finfo(a.dtype).eps
    return _affine(a, multiply(a, power(add(mean(power(a, 2), dims, True), float(eps)), -0.5)), weight, None)


def _last_dims(a: Value, normalized_shape: Any) -> list[int]:
    """Those that a norm reduces, if it has this shape."""
    shape = (normalized_shape,) if type(normalized_shape) is int else tuple(normalized_shape)
    if a.order is None or a.is_reduced or not 0 < len(shape) < a.rank:
        raise UnknownFormulaError("it normalizes over other dims than a norm does")
    if a.sizes:
        sizes = a.sizes_of(a.order[-len(shape) :])
    else:
        sizes = (a.channels,) if a.at == a.rank - 1 else ()
    if len(sizes) != len(shape) or not all(map(is_size, sizes, shape)):
        raise UnknownFormulaError("it normalizes over other dims than a norm does")
    return list(range(-len(shape), 0))


def _affine(a: Value, y: Value, weight: Any, bias: Any) -> Value:
    if a.sizes and (weight is not None or bias is not None):
        raise UnknownFormulaError("it has a parameter for each position")
    y = y if weight is None else multiply(y, weight)
    y = y if bias is None else add(y, bias)
    return replace(y, dtype=float_if_autocast(a), lies=a.order)
