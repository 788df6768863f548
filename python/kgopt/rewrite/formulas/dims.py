"""What moves dims, casts, or takes views of parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from kgopt.rewrite.formulas.values import GroupsError, UnknownFormulaError, Value, cast, check_order, is_size


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
    """Of a parameter, or of a value of x in groups."""
    listed = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
    if a.sizes and a.order is not None:
        return _regrouped(a, listed)
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


def _regrouped(a: Value, shape: list[Any]) -> Value:
    """A value of x whose elements, in x's order, are in other dims."""
    parts = [d for part in a.order or () for d in part if not (a.is_reduced and d in a.over)]
    if parts != sorted(parts):
        raise UnknownFormulaError("it takes a view of dims in another order")
    if sum(is_size(s, -1) for s in shape) > 1:
        raise UnknownFormulaError("it takes a view that does not fit")
    at = next((i for i, s in enumerate(shape) if is_size(s, -1)), len(shape))
    front = [_taken(a, parts, s, 0) for s in shape[:at]]
    back = [_taken(a, parts, s, -1) for s in reversed(shape[at + 1 :])]
    rest = [tuple(parts)] if at < len(shape) else []
    if parts and not rest:
        raise UnknownFormulaError("it takes a view that does not fit")
    order = (*front, *rest, *reversed(back))
    # A view of another layout is an error, and a copy contiguous.
    return replace(a, order=order, lies=a.lies if a.is_reduced else order)


def _taken(a: Value, parts: list[int], size: Any, end: int) -> tuple[int, ...]:
    """Takes the dims that one of this size is made of from an end of ``parts``."""
    found: list[int] = []
    while not is_size(size, a.sizes_of((tuple(found),))[0]):
        if not parts or (found and type(size) is not int):
            raise UnknownFormulaError("it takes a view that does not fit")
        next_size = a.sizes[parts[end]]
        left = size // a.sizes_of((tuple(found),))[0] if type(size) is int and size > 0 else 0
        if parts[end] in a.axis and 1 < left < next_size == a.channels and next_size % left == 0 and end == 0:
            raise GroupsError(left)
        if type(size) is int and (type(next_size) is not int or next_size > left):
            raise UnknownFormulaError("it takes a view that does not fit")
        found.insert(len(found) if end == 0 else 0, parts.pop(end))
    return tuple(found)


def flatten(a: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    """Of a value of x in groups."""
    if not a.sizes or a.order is None or not all(-a.rank <= d < a.rank for d in (start_dim, end_dim)):
        raise UnknownFormulaError("it takes a view of the input")
    first, last = start_dim % a.rank, end_dim % a.rank + 1
    joined = tuple(d for part in a.order[first:last] for d in part)
    parts = [d for part in a.order for d in part]
    if first >= last or parts != sorted(parts):
        raise UnknownFormulaError("it takes a view of dims in another order")
    order = (*a.order[:first], joined, *a.order[last:])
    return replace(a, order=order, lies=a.lies if a.is_reduced else order)


def unsqueeze(a: Value, dim: int) -> Value:
    """Of a parameter, or of a value of x in groups."""
    if type(dim) is not int or not -a.rank - 1 <= dim <= a.rank:
        raise UnknownFormulaError("it adds a dim to the input")
    return getitem(a, (*[slice(None)] * (dim % (a.rank + 1)), None))


def getitem(a: Any, index: Any) -> Value:
    """``weight[None, :, None, None]``; one of several values."""
    if isinstance(a, tuple):
        return a[index]  # type: ignore[no-any-return]
    listed = list(index) if isinstance(index, tuple) else [index]
    held: Any = a.shape if a.shape is not None else a.order if a.sizes else None
    if held is None or any(i is not None and i is not ... and i != slice(None) for i in listed):
        raise UnknownFormulaError("it indexes a tensor")
    taken = sum(isinstance(i, slice) for i in listed)
    if listed.count(...) > 1 or taken > a.rank:
        raise UnknownFormulaError("it indexes a tensor")
    if ... not in listed:
        listed.append(...)
    at = listed.index(...)
    listed[at : at + 1] = [slice(None)] * (a.rank - taken)
    given = iter(held)
    new: Any = 1 if a.shape is not None else ()
    made = tuple(new if i is None else next(given) for i in listed)
    return replace(a, shape=made) if a.shape is not None else replace(a, order=made)


def expand(a: Value, *shape: Any) -> Value:
    """What broadcasting does anyway: to the sizes of x."""
    listed = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
    sizes = replace(a, is_reduced=False).sizes_of(a.whole) if a.sizes else ()
    if a.order is None or len(sizes) != len(listed) or not all(map(is_size, sizes, listed)):
        raise UnknownFormulaError("it expands a tensor")
    check_order(a, replace(a, order=a.whole, is_reduced=False))
    return a


def expand_as(a: Value, other: Value) -> Value:
    """What broadcasting does anyway."""
    if a.order is None or other.order is None:
        raise UnknownFormulaError("it expands a tensor")
    check_order(a, other)
    return a
