"""What ATen computes slowly, in compiled code: as functions that Inductor fuses with what is around them.

Given to Inductor for graphs of ``backend="kgopt"``, beside its own decompositions; eager code and plain
``torch.compile`` keep ATen's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt.rewrite.glue.pools import Pool, is_even, is_worth, pooled
from kgopt.torch_private import ADAPTIVE_MEANS


def _replication_pad_backward(dy: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Each position is the sum of those that it was repeated at, dim by dim.

    ATen's kernel adds with atomics: four times its own time in channels_last. What is added at an end is written as a
    padded tensor, since Inductor computes that, the sum and the next dim's in one kernel; ``torch.cat`` takes several.
    """
    if min(padding) < 0:  # which cuts off
        return NotImplemented
    dx = dy.float() if dy.dtype in (torch.bfloat16, torch.float16) else dy
    for i in range(len(padding) // 2):
        before, after = padding[2 * i : 2 * i + 2]
        dim, size = dy.dim() - 1 - i, x.shape[-1 - i]
        inner, kept = [0, 0] * i, dx.narrow(dim, before, size)
        if before:
            kept = kept + F.pad(dx.narrow(dim, 0, before).sum(dim, keepdim=True), [*inner, 0, size - 1])
        if after:
            kept = kept + F.pad(dx.narrow(dim, before + size, after).sum(dim, keepdim=True), [*inner, size - 1, 0])
        dx = kept
    return dx.to(dy.dtype)


def _pool(sizes: Sequence[Any], results: Sequence[Any]) -> Pool | None:
    """Means of x [N, C, *S] that ATen's kernels leave to a few threads; None also where sizes are symbols."""
    spatial, given = sizes[2:], tuple(results)
    if len(spatial) != len(given) or not all(type(n) is int and n > 0 for n in (*spatial, *given)):
        return None
    pool = Pool("mean", tuple(spatial), given)
    return pool if is_worth(pool) and all(r <= s for s, r in zip(spatial, given, strict=True)) else None


def _adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Inductor calls ATen for volumes, and for large windows of several lengths."""
    pool = _pool(x.shape, output_size)
    return NotImplemented if pool is None else pooled(x, pool)


def _adaptive_avg_pool_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Windows that share no position: each of their positions has the same part of dy."""
    pool = _pool(x.shape, dy.shape[2:])
    if pool is None or not is_even(pool):
        return NotImplemented
    lengths = [s // r for s, r in zip(pool.spatial, pool.results, strict=True)]
    dx = dy / math.prod(lengths)
    for dim, length in enumerate(lengths, 2):
        dx = dx.repeat_interleave(length, dim)
    return dx


MOST_WINDOWS = 8  # that share a position; ATen's atomics are the better way beyond that


def _max_pool3d_backward(
    dy: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Each position asks the windows that it is in whether it was their largest.

    Inductor does so for images. For volumes it calls ATen, which clears a tensor and scatters into it.
    """
    kernel, strides, pads, dilations = (
        list(v) * 3 if len(v) == 1 else list(v) for v in (kernel_size, stride or kernel_size, padding, dilation)
    )
    windows = [-(-k // s) for k, s in zip(kernel, strides, strict=True)]
    if dilations != [1, 1, 1] or math.prod(windows) > MOST_WINDOWS:
        return NotImplemented
    sizes, results = x.shape[-3:], dy.shape[-3:]
    shapes = ([-1, 1, 1], [1, -1, 1], [1, 1, -1])
    along = [torch.arange(n, device=x.device).view(shape) for n, shape in zip(sizes, shapes, strict=True)]
    here = (along[0] * sizes[1] + along[1]) * sizes[2] + along[2]
    # Of several windows the sum is rounded once.
    wide = dy.float() if math.prod(windows) > 1 and dy.dtype in (torch.bfloat16, torch.float16) else dy
    total: Any = 0
    for offsets in itertools.product(*map(range, windows)):
        window = [(a + p) // s - o for a, p, s, o in zip(along, pads, strides, offsets, strict=True)]
        at: Any = (..., *(w.clamp(0, r - 1) for w, r in zip(window, results, strict=True)))
        inside = [(w >= 0) & (w < r) for w, r in zip(window, results, strict=True)]
        is_largest = (indices[at] == here) & inside[0] & inside[1] & inside[2]
        total = total + torch.where(is_largest, wide[at], 0)
    return total.to(dy.dtype)  # type: ignore[no-any-return]


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.replication_pad1d_backward.default: _replication_pad_backward,
    torch.ops.aten.replication_pad2d_backward.default: _replication_pad_backward,
    torch.ops.aten.replication_pad3d_backward.default: _replication_pad_backward,
    torch.ops.aten.max_pool3d_with_indices_backward.default: _max_pool3d_backward,
}
if ADAPTIVE_MEANS is not None:
    DECOMPOSITIONS.update(zip(ADAPTIVE_MEANS, (_adaptive_avg_pool, _adaptive_avg_pool_backward) * 2, strict=True))
