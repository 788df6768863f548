"""What moves dims, casts, or takes views of parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from kgopt.rewrite.formulas.values import UnknownFormulaError, Value, cast


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


def to(a: Value, *args: Any, **kwargs: Any) -> Value:
    """Casts; to another device only by what is there already."""
    given = [v for v in (*args, *kwargs.values()) if v is not None and type(v) is not bool]
    for v in given:
        if isinstance(v, Value):
            a = cast(a, v.dtype)
        elif isinstance(v, torch.dtype):
            a = cast(a, v)
        else:
            raise UnknownFormulaError("it moves a tensor to a device")
    return a


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
