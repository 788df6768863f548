"""Copies and kernels in place of PyTorch's: values bit for bit, unless the function says otherwise."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt import ops as ops
from kgopt._layout import FORMATS, format_of, is_dense_channels_last

_OPS = torch.ops.kgopt


def lies_as(y: Tensor, x: Tensor) -> bool:
    """Both channels_last, or both contiguous."""
    return is_dense_channels_last(y) if is_dense_channels_last(x) else y.is_contiguous() and x.is_contiguous()


def _empty(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Like x, of other spatial sizes."""
    return torch.empty((*x.shape[:2], *sizes), dtype=x.dtype, device=x.device, memory_format=format_of(x))


def _wide(x: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors with a contiguous last dim of the same length, as elements of 16 bytes where that is possible."""
    for dtype in (torch.complex128, torch.int64, torch.int32):
        count = dtype.itemsize // x.element_size()
        if count > 1 and all(
            t.shape[-1] % count == 0
            and t.storage_offset() % count == 0
            and t.data_ptr() % dtype.itemsize == 0
            and all(stride % count == 0 for stride in t.stride()[:-1])
            for t in (x, like)
        ):
            return x.view(dtype), like.view(dtype)
    return x, like


def upsample_nearest(x: Tensor, factors: Sequence[int]) -> Tensor:
    """``F.interpolate(x, scale_factor=factors, mode="nearest")`` for integer factors, bit for bit.

    x [N, C, *S], contiguous or channels_last; the result [N, C, *(s * f)] in the same memory format.
    """
    if x.is_cuda and is_dense_channels_last(x):
        return _OPS.upsample_nearest(x, list(factors))  # type: ignore[no-any-return]
    return repeated(x, [((0, size, factor),) for size, factor in zip(x.shape[2:], factors, strict=True)])


Run = tuple[int, int, int]  # from this position of a dim on, so many positions, each so often


@functools.lru_cache(maxsize=1024)
def runs_to(size: int, wanted: int) -> tuple[Run, ...]:
    """How often ``F.interpolate(mode="nearest")`` repeats each position of a dim; those it leaves out are in none."""
    sources = F.interpolate(torch.arange(size, dtype=torch.float32, device="cpu")[None, None], size=wanted)[0, 0]
    positions, times = (t.tolist() for t in sources.int().unique_consecutive(return_counts=True))
    runs: list[Run] = []
    for position, often in zip(positions, times, strict=True):
        start, count, last = runs[-1] if runs else (0, 0, 0)
        if often == last and position == start + count:
            runs[-1] = (start, count + 1, often)
        else:
            runs.append((position, 1, often))
    return tuple(runs)


def repeated(x: Tensor, runs: Sequence[tuple[Run, ...]]) -> Tensor:
    """x [N, C, *S], contiguous or channels_last, with positions as often as the runs of each dim say; in its format."""
    if not is_dense_channels_last(x) and any(times > 1 for *_, times in runs[-1]):
        # The last dim first, on the small tensor, so that whole rows can be copied after it.
        once = [((0, size, 1),) for size in x.shape[2:-1]]
        x = _copied(x, [*once, runs[-1]])
        if list(runs[:-1]) == once:
            return x
        runs = [*runs[:-1], ((0, x.shape[-1], 1),)]
    return _copied(x, runs)


def _copied(x: Tensor, runs: Sequence[tuple[Run, ...]]) -> Tensor:
    """:func:`repeated`, a copy for each combination of runs."""
    out = _empty(x, [sum(count * times for _, count, times in of_dim) for of_dim in runs])
    last = is_dense_channels_last(x)
    first = 1 if last else 2
    whole = [t.movedim(1, -1) if last else t for t in (x, out)]
    for parts in itertools.product(*map(_placed, runs)):
        source, target = whole
        for dim, (at, start, count, times) in enumerate(parts, first):
            source, target = source.narrow(dim, start, count), target.narrow(dim, at, count * times)
        if last or parts[-1][-1] == 1:
            source, target = _wide(source, target)
        for dim, (*_, count, times) in reversed(list(enumerate(parts, first))):
            if times > 1:
                target, source = target.unflatten(dim, (count, times)), source.unsqueeze(dim + 1)
        target.copy_(source.expand(target.shape))
    return out


def _placed(runs: Sequence[Run]) -> list[tuple[int, int, int, int]]:
    """Runs behind the positions of the result that they begin at."""
    ends = itertools.accumulate((count * times for _, count, times in runs), initial=0)
    return [(at, *run) for at, run in zip(ends, runs, strict=False)]


def cat_channels_last(tensors: Sequence[Tensor], dim: int = 1) -> Tensor:
    """``torch.cat(tensors, dim)`` of channels_last tensors, bit for bit: copies of 16 bytes at a time."""
    first = tensors[0]
    sizes = list(first.shape)
    sizes[dim] = sum(t.shape[dim] for t in tensors)
    out = torch.empty(sizes, dtype=first.dtype, device=first.device, memory_format=FORMATS[first.dim()])
    start = 0
    for t in tensors:
        source, target = _wide(t.movedim(1, -1), out.narrow(dim, start, t.shape[dim]).movedim(1, -1))
        target.copy_(source)
        start += t.shape[dim]
    return out


def cat_of_views(tensors: Sequence[Tensor], dim: int = 1) -> Tensor:
    """:func:`cat_channels_last` as views and PyTorch's own, for a compiler, whose result keeps the format."""
    last = tensors[0].dim() - 1
    dim = {0: 0, 1: last}.get(dim, dim - 1)
    return torch.cat([t.movedim(1, -1) for t in tensors], dim).movedim(-1, 1)


def pad_reflect(x: Tensor, pad: Sequence[int]) -> Tensor:
    """``F.pad(x, pad, mode="reflect")``, bit for bit, in x's memory format: x as it is, then the borders dim by dim."""
    around = [tuple(pad[2 * i : 2 * i + 2]) for i in reversed(range(len(pad) // 2))]  # before and after, by dim
    out = _empty(x, [size + sum(both) for size, both in zip(x.shape[2:], around, strict=True)])
    inner = [out]  # of the first dims only the part that x fills
    for dim, (before, _) in enumerate(around, 2):
        inner.append(inner[-1].narrow(dim, before, x.shape[dim]))
    last = is_dense_channels_last(x)
    source, target = _wide(*(t.movedim(1, -1) if last else t for t in (x, inner.pop())))
    target.copy_(source)
    for dim, (before, after) in reversed(list(enumerate(around, 2))):
        part, end = inner.pop(), before + x.shape[dim]
        for to, start, count in ((0, before + 1, before), (end, end - 1 - after, after)):
            if count:
                part.narrow(dim, to, count).copy_(part.narrow(dim, start, count).flip(dim))
    return out


def dense_channels_last(x: Tensor) -> Tensor:
    """A copy of a tensor whose channels lie side by side, dense, in channels_last."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=FORMATS[x.dim()])
    source, target = _wide(x.movedim(1, -1), out.movedim(1, -1))
    target.copy_(source)
    return out


def nearest_of_views(x: Tensor, factors: Sequence[int]) -> Tensor:
    """:func:`upsample_nearest` of a channels_last tensor, as views and one copy.

    A compiler has the join or the padding behind it read x itself; on its own the copy takes as long as kgopt's op.
    """
    count, *sizes, channels = x.movedim(1, -1).shape
    single = [n for size in sizes for n in (size, 1)]
    repeated = [n for pair in zip(sizes, factors, strict=True) for n in pair]
    whole = [size * factor for size, factor in zip(sizes, factors, strict=True)]
    y = x.movedim(1, -1).reshape(count, *single, channels).expand(count, *repeated, channels)
    return y.reshape(count, *whole, channels).movedim(-1, 1)


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, rest: Sequence[Any]) -> Tensor:
    """A kernel of 1, to a few channels."""
    return _OPS.group_norm_conv1x1(x, None, 0, None, None, 0.0, "none", weight, bias)  # type: ignore[no-any-return]


def _few(x: Tensor, weight: Tensor, bias: Tensor | None, rest: Sequence[Any]) -> Tensor:
    """To a few channels."""
    return _OPS.group_norm_conv(x, None, 0, None, None, 0.0, "none", weight, bias, None, *rest)  # type: ignore[no-any-return]


def _each_channel(x: Tensor, weight: Tensor, bias: Tensor | None, rest: Sequence[Any]) -> Tensor:
    """Depthwise, of one tap: a factor and a shift of each channel, for which PyTorch's elementwise kernels do."""
    ones = [1] * len(rest[0])
    factor = weight.reshape(1, -1, *ones)
    return x * factor if bias is None else torch.addcmul(bias.reshape(1, -1, *ones), x, factor)


def _repeated_channels(x: Tensor, weight: Tensor, bias: Tensor | None, rest: Sequence[Any]) -> Tensor:
    """Depthwise, of several outputs a channel, by the kernels for one: each channel of x is there as often."""
    *windows, groups, transposed = rest
    channels, *spatial = x.shape[1:]
    times = weight.shape[0] // channels
    sizes = x.shape[0], channels * times, *spatial
    wide = torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=format_of(x))
    each = wide.unflatten(1, (channels, times))
    each.copy_(x.unsqueeze(2).expand(each.shape))
    return _conv_add(wide, weight, bias, None, *windows, groups * times, transposed, backend="kgopt")  # type: ignore[no-any-return]


# Ways to compute a convolution that take nothing of what follows along; given its arguments as conv_add takes them.
ALONE: dict[str, Callable[[Tensor, Tensor, Tensor | None, Sequence[Any]], Tensor]] = {
    "pointwise": _pointwise,
    "few": _few,
    "each channel": _each_channel,
    "repeated channels": _repeated_channels,
}


def dense_weight(weight: Tensor, groups: int, channels_last: bool) -> Tensor:
    """A convolution's weight as that of one group: its groups as blocks on the diagonal, zeros elsewhere.

    [rows, columns, *kernel] becomes [rows, groups * columns, *kernel], for transposed convolutions, too. In
    channels_last, or contiguous: zeros and one copy. Nothing is written to in place, so graphs may hold it, and
    gradients pass.
    """
    if channels_last:
        blocks = weight.movedim(1, -1).unflatten(0, (groups, -1)).movedim(0, -1)
        return torch.diag_embed(blocks, 0, 0, -2).flatten(-2).flatten(0, 1).movedim(-1, 1)
    return torch.diag_embed(weight.unflatten(0, (groups, -1)).movedim(0, -1), 0, 0, 2).flatten(2, 3).flatten(0, 1)


def dense_weight_for(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """:func:`dense_weight` in the format that the convolution of x reads."""
    return dense_weight(weight, groups, is_dense_channels_last(x) or is_dense_channels_last(weight))


def scaled(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *rest: Any, replicate: Sequence[int] = ()
) -> Tensor:
    """A wide convolution of fp32 tensors in fp16, scaled by powers of two; ``rest``: as of conv_add.

    ``replicate``: of x with its outermost positions repeated around it, as F.pad has them.
    """
    args = x, None, 0, None, None, 0.0, "none", weight, bias, residual, *rest
    return _OPS.group_norm_conv(*args, replicate=list(replicate), backend=ops.SCALED_HALF)  # type: ignore[no-any-return]


_group_norm_moments = ops.without_grad("group_norm_moments")


def batch_norm(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``F.batch_norm`` by running statistics: a norm with as many groups as channels, whose moments are given.

    They are read at each call, as the parameters are.
    """
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    moments = torch.empty((*x.shape[:2], 2), dtype=dtype, device=x.device)
    for at, statistic in enumerate((mean, var)):
        moments.select(2, at).copy_(statistic)
    return _group_norm_moments(x, moments, x.shape[1], weight, bias, eps, "none")  # type: ignore[no-any-return]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """``F.scaled_dot_product_attention(q, k, v, scale=scale)`` by matrix products, some queries at a time.

    q [N, H, L, E], k [N, H, S, E], v [N, H, S, V] on a CUDA device. PyTorch's fast kernels end at heads of 256
    channels; beyond, its products run at a quarter of the rate of these. Scores are float32. With the
    weights made of them they take ``_SCORES`` times the memory of a head's queries, or 16 MiB where that is more.
    """
    (n, heads, length, _), keys, channels = q.shape, k.shape[2], v.shape[3]
    y = torch.empty((n, length, heads, channels), dtype=q.dtype, device=q.device).transpose(1, 2)
    room = max(_SCORES * q.numel() // (n * heads) * q.element_size(), 2**24)
    rows = max(128, room // (keys * (4 + q.element_size())) // 128 * 128)
    for i in range(n):
        for j in range(heads):
            transposed, values = k[i, j].t(), v[i, j]
            for first in range(0, length, rows):
                part = slice(first, min(first + rows, length))
                scores = _product_in_fp32(q[i, j, part], transposed)
                weights = _OPS.scaled_softmax(scores, scale, q.dtype)
                del scores
                torch.mm(weights, values, out=y[i, j, part])
                del weights
    return y


_SCORES = 4


def _product_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    is_half = a.dtype in (torch.bfloat16, torch.float16)
    return torch.mm(a, b, out_dtype=torch.float32) if is_half else torch.mm(a, b)


_conv_add, _upsample_conv_weight = map(ops.without_grad, ("conv_add", "upsample_conv_weight"))


def upsampled_conv(
    option: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: Sequence[int],
    padding: Sequence[int],
    groups: int,
    residual: Tensor | None = None,
    divisor: float = 1.0,
    act: str = "none",
) -> Tensor:
    """``act((conv(upsample_nearest(x, factors)) + residual) / divisor)`` of a convolution with stride and dilation 1.

    ``option``: "folded", one transposed convolution, of kgopt's choice; "folded_aten", PyTorch's; "commuted", which
    kernels of 1 can be.
    The sums of weights are taken at each call, also in a replayed CUDA graph: the weight may have changed.
    """
    ones, zeros = [1] * len(factors), [0] * len(factors)
    if option == "commuted":
        y = _conv_add(x, weight, bias, residual, ones, zeros, ones, zeros, groups, False, divisor, act)
        return upsample_nearest(y, factors)
    last = is_dense_channels_last(x) or is_dense_channels_last(weight)
    summed = _upsample_conv_weight(weight, list(factors), groups, last)
    rest = [k - 1 - p for k, p in zip(weight.shape[2:], padding, strict=True)]
    backend = "aten" if option == "folded_aten" else "auto"
    geometry = list(factors), rest, ones, zeros, groups, True
    return _conv_add(x, summed, bias, residual, *geometry, divisor, act, backend=backend)  # type: ignore[no-any-return]
