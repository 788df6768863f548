"""Reductions over channels, and PyTorch's norms, which are made of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from kgopt.rewrite.formulas.values import (
    MEAN,
    Term,
    U,
    UnknownFormulaError,
    Value,
    X,
    add,
    cast,
    float_if_autocast,
    multiply,
    power,
    single,
)


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
    term = single(a)
    for base, made in (((X, 1.0), MEAN), ((X, 2.0), ("square", X)), ((U, 2.0), ("square", U))):
        if term.powers == frozenset((base,)):
            found = Term(term.factor, frozenset(((made, 1.0),)))
            return cast(replace(a, terms=(found,), is_reduced=True), dtype)
    raise UnknownFormulaError("it takes a mean of something else than the input or its square")


def total(a: Value, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Value:
    """The sum over channels."""
    found = multiply(mean(a, dim, keepdim, dtype=dtype), float(a.channels))
    return replace(found, dtype=float_if_autocast(found))


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
    return replace(y, dtype=float_if_autocast(a), lies=a.order)
