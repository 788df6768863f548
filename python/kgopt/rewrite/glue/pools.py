"""Pooling to a few results a channel, as reductions of PyTorch's.

PyTorch's pooling kernels have one thread read a whole window. Where there are few windows, which then are large, most
of a GPU waits for a few threads. Its reductions have many threads read a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt._layout import format_of
from kgopt.rewrite.chains.emit import numbers

# Results of a channel, up to which there can be too few threads; positions of a window, from which one takes long.
MOST_RESULTS, LEAST_WINDOW = 64, 32
_ADAPTIVE: dict[Any, tuple[str, int]] = {
    F.adaptive_avg_pool2d: ("mean", 2),
    F.adaptive_avg_pool3d: ("mean", 3),
    F.adaptive_max_pool2d: ("amax", 2),
    F.adaptive_max_pool3d: ("amax", 3),
}
_TORCHS = {kind: function for function, kind in _ADAPTIVE.items()}
_AVERAGES: dict[Any, int] = {F.avg_pool2d: 2, F.avg_pool3d: 3}
FUNCTIONS = (*_ADAPTIVE, *_AVERAGES)


class Pool(NamedTuple):
    """Adaptive pooling of x's first positions."""

    how: str  # "mean" or "amax"
    spatial: tuple[int, ...]  # the positions, by dim
    results: tuple[int, ...]  # of a channel, by dim


def pool_of(takes: Callable[[Any], bool], func: Any, args: Any, kwargs: Any) -> tuple[Pool, Tensor] | None:
    """What a call of one of :data:`FUNCTIONS` asks for, and of which tensor; None where PyTorch's kernel has work for
    many threads, or refuses the call.

    Raises:
        TypeError: arguments that the function does not have.
    """
    is_adaptive = func in _ADAPTIVE
    x, pool = _adaptive(func, *args, **kwargs) if is_adaptive else _average(func, *args, **kwargs)
    return (pool, x) if pool is not None and takes(x) and is_worth(pool, is_adaptive) else None


def is_worth(pool: Pool, is_adaptive: bool = True) -> bool:
    """Whether few results have large windows. PyTorch's adaptive mean of all positions is a reduction already."""
    count = math.prod(pool.results)
    is_own = is_adaptive and count == 1 and pool.how == "mean"
    return not is_own and count <= MOST_RESULTS and math.prod(pool.spatial) >= LEAST_WINDOW * count


def _spatial(x: Any, rank: int) -> tuple[int, ...] | None:
    return tuple(x.shape[2:]) if isinstance(x, Tensor) and x.dim() == rank + 2 else None


def _adaptive(func: Any, input: Any, output_size: Any, return_indices: bool = False) -> tuple[Any, Pool | None]:
    how, rank = _ADAPTIVE[func]
    spatial = _spatial(input, rank)
    given = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size,) * rank
    if spatial is None or return_indices or len(given) != rank:
        return input, None
    results = numbers([s if r is None else r for s, r in zip(spatial, given, strict=True)], rank)
    if results is None or any(not 1 <= r <= s for s, r in zip(spatial, results, strict=True)):
        return input, None
    return input, Pool(how, spatial, results)


def _average(
    func: Any,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> tuple[Any, Pool | None]:
    """Of windows side by side: what they leave over at the end is no part of any."""
    rank = _AVERAGES[func]
    spatial, kernel = _spatial(input, rank), numbers(kernel_size, rank)
    if spatial is None or kernel is None or divisor_override is not None:
        return input, None
    if any(not 1 <= k <= s for s, k in zip(spatial, kernel, strict=True)):  # PyTorch refuses it
        return input, None
    step = kernel if stride is None or stride in ((), []) else numbers(stride, rank)
    if step != kernel or numbers(padding, rank) != (0,) * rank:
        return input, None
    results = tuple(s // k for s, k in zip(spatial, kernel, strict=True))
    whole = tuple(r * k for r, k in zip(results, kernel, strict=True))
    return input, None if ceil_mode and whole != spatial else Pool("mean", whole, results)


def windows(size: int, results: int) -> list[tuple[int, int]]:
    """First position and length of the windows of a dim (`torch.nn.AdaptiveAvgPool2d`): position i of the result is of
    ``floor(i * size / results)`` to ``ceil((i + 1) * size / results)``.
    """
    starts = [i * size // results for i in range(results)]
    return [(start, -((i + 1) * size // -results) - start) for i, start in enumerate(starts)]


def pooled(x: Tensor, pool: Pool, keeps: bool = False) -> Tensor:
    """``F.adaptive_avg_pool`` or ``F.adaptive_max_pool`` of x [N, C, *S], in the memory format of PyTorch's result;
    ``keeps``: in x's, which PyTorch's of volumes is not.

    One reduction where all windows of each dim are as long; else dim by dim, whose means are in fp32 (fp64 for fp64 x):
    each window is one of rows of one of columns, so the mean of means is the mean.
    """
    part = _pooled_part(x, pool)
    y = _of_equal_windows(part, pool) if is_even(pool) else _dim_by_dim(part, pool)
    return y.to(x.dtype).contiguous(memory_format=_format(x, keeps))


def pooled_as_torch(x: Tensor, pool: Pool, keeps: bool = False) -> Tensor:
    """:func:`pooled` with PyTorch's strides also where there is one position, whose format nothing else tells."""
    y = pooled(x, pool, keeps)
    if math.prod(y.shape[2:]) != 1:
        return y
    return torch.empty(y.shape, dtype=y.dtype, device=y.device, memory_format=_format(x, keeps)).copy_(y)


def _format(x: Tensor, keeps: bool) -> torch.memory_format:
    return format_of(x) if keeps or x.dim() == 4 else torch.contiguous_format


def _pooled_part(x: Tensor, pool: Pool) -> Tensor:
    for dim, size in enumerate(pool.spatial, 2):
        x = x.narrow(dim, 0, size)
    return x


def pooled_by_torch(x: Tensor, pool: Pool) -> Tensor:
    """The same by PyTorch's pooling."""
    x = _pooled_part(x, pool)
    return _TORCHS[pool.how, x.dim() - 2](x, pool.results)


def is_even(pool: Pool) -> bool:
    """Whether no dim has windows of two lengths."""
    return not any(s % r for s, r in zip(pool.spatial, pool.results, strict=True))


def _of_equal_windows(x: Tensor, pool: Pool) -> Tensor:
    inner: list[int] = []
    for dim in reversed(range(2, x.dim())):
        results = pool.results[dim - 2]
        if results != x.shape[dim]:
            inner = [dim + 1, *(i + 1 for i in inner)]
            x = x.unflatten(dim, (results, x.shape[dim] // results))
    return x.mean(inner) if pool.how == "mean" else x.amax(inner)


def _dim_by_dim(x: Tensor, pool: Pool) -> Tensor:
    if pool.how == "mean":
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32

        def reduce(t: Tensor, dim: int) -> Tensor:
            return t.mean(dim, dtype=wide)
    else:

        def reduce(t: Tensor, dim: int) -> Tensor:
            return t.amax(dim)

    for dim in reversed(range(2, x.dim())):
        results, size = pool.results[dim - 2], x.shape[dim]
        if results == size:
            continue
        if size % results == 0:
            x = reduce(x.unflatten(dim, (results, size // results)), dim + 1)
        else:
            x = torch.stack([reduce(x.narrow(dim, *window), dim) for window in windows(size, results)], dim)
    return x
