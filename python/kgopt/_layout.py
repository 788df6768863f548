"""Memory formats and dtypes: of what a tensor lies in, and of what an op returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by rank


def is_channels_last(t: Tensor) -> bool:
    """The rule of torch's suggest_memory_format, as in csrc/common/host/torch_utils.h: the order of strides alone."""
    if t.dim() not in (4, 5) or t.stride(1) == 0:
        return False
    smallest: Any = 0
    for d in (1, *range(t.dim() - 1, 1, -1), 0):
        if t.size(d) == 0 or t.stride(d) < smallest:
            return False
        if d == 0 and smallest == t.stride(1):
            return False
        smallest = t.stride(d)
        if t.size(d) > 1:
            smallest = smallest * t.size(d)
    return True


def is_expanded(t: Tensor) -> bool:
    """Whether elements of a strided tensor share memory."""
    return any(step == 0 and size > 1 for size, step in zip(t.shape, t.stride(), strict=True))


def is_dense_channels_last(x: Tensor) -> bool:
    """channels_last without gaps, and no contiguous tensor as well, which sizes of 1 would allow."""
    return x.dim() in FORMATS and not x.is_contiguous() and x.is_contiguous(memory_format=FORMATS[x.dim()])


def memory_format(rank: int, channels_last: bool) -> torch.memory_format:
    """The format's name for tensors of this rank."""
    return FORMATS.get(rank, torch.channels_last) if channels_last else torch.contiguous_format


def format_of(x: Tensor) -> torch.memory_format:
    """channels_last(_3d) where x is dense so; else contiguous."""
    return memory_format(x.dim(), is_dense_channels_last(x))


def as_channels_last(x: Tensor) -> Tensor:
    """x in channels_last or channels_last_3d; as it is where it has another rank."""
    return x.contiguous(memory_format=FORMATS[x.dim()]) if x.dim() in FORMATS else x


def contiguous(t: Tensor) -> Tensor:
    """Of strides that say so where sizes of 1 leave a choice."""
    return t.clone(memory_format=torch.contiguous_format) if is_channels_last(t) else t.contiguous()


def stats_dtype(x: Tensor) -> torch.dtype:
    """What statistics and sums of x are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def affine_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """What the gradients of a norm's weight and bias are in."""
    return weight.dtype if weight is not None else bias.dtype if bias is not None else stats_dtype(x)


def empty(like: Tensor, sizes: Sequence[Any], dtype: torch.dtype | None = None, channels_last: bool = False) -> Tensor:
    """A tensor without values, of like's device and, unless given, dtype."""
    return torch.empty(
        sizes,
        dtype=dtype or like.dtype,
        device=like.device,
        memory_format=memory_format(len(sizes), channels_last),
    )


def empty_like(x: Tensor) -> Tensor:
    """Contiguous or channels_last as x is, and dense."""
    return empty(x, x.shape, channels_last=is_channels_last(x))


def wide(t: Tensor) -> Tensor:
    """In the dtype that sums are kept in."""
    return t.to(stats_dtype(t))


def wide_or_none(t: Tensor | None) -> Tensor | None:
    """:func:`wide` of an optional tensor."""
    return None if t is None else wide(t)


def as_x_lies(value: Tensor, x: Tensor) -> Tensor:
    """In x's dtype, and channels_last where x is."""
    value = value.to(x.dtype)
    if value.dim() in (4, 5) and is_channels_last(value) != is_channels_last(x):
        value = value.contiguous(memory_format=memory_format(value.dim(), is_channels_last(x)))
    return value
