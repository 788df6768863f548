"""What stands between norms and convolutions: resampling, padding, pooling."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kgopt import reference
from kgopt._layout import as_x_lies, empty, is_channels_last, memory_format, wide, wide_or_none
from kgopt.ops.calls import in_backward, wants_gradient
from kgopt.ops.registry import dims, record

_upsample_linear_backward = in_backward("upsample_linear_backward")
_upsample_nearest_backward = in_backward("upsample_nearest_backward")

# ----------------------------------------------------------------------------------------------------------------------
# Results without values


def _spatial_fake(x: Tensor, spatial: Sequence[Any]) -> Tensor:
    return empty(x, [*x.shape[:2], *spatial], channels_last=is_channels_last(x))


def _scaled(x: Tensor, factors: Sequence[int], scale: Callable[[Any, int], Any]) -> list[Any]:
    return [scale(s, f) for s, f in zip(x.shape[2:], factors, strict=True)]


def _max_pool_fake(x: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    windows = zip(x.shape[2:], kernel_size, stride, padding, strict=True)
    return _spatial_fake(x, [(size + 2 * p - k) // s + 1 for size, k, s, p in windows])


def pad_replicate_fake(x: Tensor, pad: Sequence[int]) -> Tensor:
    """The result without values."""
    dims = range(len(pad) // 2 - 1, -1, -1)  # pad has the last dim first
    return _spatial_fake(x, [s + pad[2 * i] + pad[2 * i + 1] for s, i in zip(x.shape[2:], dims, strict=True)])


def _upsample_conv_weight_fake(weight: Tensor, factors: Sequence[int], groups: int, channels_last: bool) -> Tensor:
    outputs, inputs, *kernel = weight.shape
    sizes = [inputs * groups, outputs // groups, *(k + f - 1 for k, f in zip(kernel, factors, strict=True))]
    return empty(weight, sizes, channels_last=channels_last)


# ----------------------------------------------------------------------------------------------------------------------
# Autograd


def _upsample_backward(ctx: Any, dy: Tensor) -> Any:
    x, residual = wants_gradient(ctx, 0, 1)
    return _upsample_linear_backward(dy) if x else None, dy if residual else None


def _nearest_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    ctx.factors = inputs[1]


def _nearest_backward(ctx: Any, dy: Tensor) -> Any:
    return _upsample_nearest_backward(dy, ctx.factors), None


def _pad_replicate_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, ctx.pad = inputs
    ctx.sizes = x.shape


def _pad_replicate_backward(ctx: Any, dy: Tensor) -> Any:
    return pad_replicate_gradient(dy, ctx.pad, ctx.sizes), None


def pad_replicate_gradient(dy: Tensor, pad: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """That of x, of these sizes.

    Each position is the sum of those that it was repeated at, dim by dim: ATen's own adds them with atomics.
    """
    dtype = dy.dtype
    if dtype in (torch.bfloat16, torch.float16):
        dy = dy.float()
    for i in range(len(pad) // 2):
        before, after = pad[2 * i : 2 * i + 2]
        dim, size = dy.dim() - 1 - i, sizes[-1 - i]
        if size == 1:
            dy = dy.sum(dim, keepdim=True)
        elif before or after:
            first = dy.narrow(dim, 0, before + 1).sum(dim, keepdim=True)
            last = dy.narrow(dim, before + size - 1, after + 1).sum(dim, keepdim=True)
            dy = torch.cat((first, dy.narrow(dim, before + 1, size - 2), last), dim)
    return dy.to(dtype)


def _max_pool_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, *ctx.window = inputs
    ctx.save_for_backward(x)


def _max_pool_backward(ctx: Any, dy: Tensor) -> Any:
    (x,) = ctx.saved_tensors
    return (_max_pool_gradient(dy, x, *ctx.window),)


def _max_pool_gradient(
    dy: Tensor, x: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """That of x. Where each largest value was is found again: the forward is for inference.

    Windows that overlap may have the same largest value, and PyTorch adds their gradients on CUDA by atomics, in any
    order. So windows far enough apart to share no element go together, and these sets one after another.
    """
    find = torch.ops.aten.max_pool3d_with_indices if x.dim() == 5 else torch.ops.aten.max_pool2d_with_indices
    _, indices = find(x, kernel_size, stride, padding)
    last = is_channels_last(x)

    def flat(t: Tensor) -> Tensor:
        """``[N, S, C]`` in channels_last, or ``[N, C, S]``."""
        n, c, size = *t.shape[:2], math.prod(t.shape[2:])
        return t.movedim(1, -1).reshape(n, size, c) if last else t.reshape(n, c, size)

    apart = [-(-k // s) for k, s in zip(kernel_size, stride, strict=True)]
    dx, dy = flat(wide(torch.zeros_like(x))), wide(dy)
    for first in itertools.product(*(range(a) for a in apart)):
        part = (slice(None), slice(None), *(slice(f, None, a) for f, a in zip(first, apart, strict=True)))
        dx = dx.scatter_add(1 if last else 2, flat(indices[part]), flat(dy[part]))
    n, c, *size = x.shape
    return (dx.reshape(n, *size, c).movedim(-1, 1) if last else dx.reshape(x.shape)).to(x.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Formulas


def _upsample_linear_formula(x: Tensor, residual: Tensor | None) -> Tensor:
    return as_x_lies(reference.upsample_linear_ref(wide(x), wide_or_none(residual)), x)


def _upsample_linear_backward_formula(dy: Tensor) -> Tensor:
    """Dim by dim: a position gives three quarters to its two copies, a quarter to their neighbours' far sides."""
    dx = wide(dy)
    for d in range(2, dy.dim()):
        size = dy.shape[d] // 2
        even, odd = dx.unflatten(d, (size, 2)).unbind(d + 1)
        before = torch.cat((even.narrow(d, 0, 1), odd.narrow(d, 0, size - 1)), d)  # at the edges its own
        after = torch.cat((even.narrow(d, 1, size - 1), odd.narrow(d, size - 1, 1)), d)
        dx = 0.75 * (even + odd) + 0.25 * (before + after)
    return as_x_lies(dx, dy)


def _upsample_nearest_formula(x: Tensor, factors: Sequence[int]) -> Tensor:
    y = x
    for d, f in enumerate(factors, 2):
        y = y.unsqueeze(d + 1).expand(*y.shape[: d + 1], f, *y.shape[d + 1 :]).flatten(d, d + 1)
    return as_x_lies(y, x)


def _upsample_nearest_backward_formula(dy: Tensor, factors: Sequence[int]) -> Tensor:
    dx = wide(dy)
    for d, f in enumerate(factors, 2):
        dx = dx.unflatten(d, (dx.shape[d] // f, f)).sum(d + 1)
    return as_x_lies(dx, dy)


def _pad_replicate_formula(x: Tensor, pad: Sequence[int]) -> Tensor:
    return as_x_lies(reference.pad_replicate_ref(x, pad), x)


def _max_pool_formula(x: Tensor, *window: Any) -> Tensor:
    return as_x_lies(reference.max_pool_ref(x, *window), x)


def _upsample_conv_weight_formula(weight: Tensor, factors: Sequence[int], groups: int, channels_last: bool) -> Tensor:
    summed = reference.upsample_conv_weight_ref(wide(weight), factors, groups).to(weight.dtype)
    return summed.contiguous(memory_format=memory_format(weight.dim(), channels_last))


_SAMPLES_AND_CHANNELS = dims("NC", "NC", ways="NC")

op = record(
    "upsample_linear",
    fake=lambda x, residual: _spatial_fake(x, [2 * s for s in x.shape[2:]]),
    formula=_upsample_linear_formula,
)
op.dims = dims("NC NC", "NC", ways="NC")
op.backward = _upsample_backward

op = record(
    "upsample_linear_backward",
    fake=lambda dy: _spatial_fake(dy, [s // 2 for s in dy.shape[2:]]),
    formula=_upsample_linear_backward_formula,
)
op.dims = _SAMPLES_AND_CHANNELS

op = record(
    "upsample_nearest",
    fake=lambda x, factors: _spatial_fake(x, _scaled(x, factors, operator.mul)),
    formula=_upsample_nearest_formula,
)
op.dims = _SAMPLES_AND_CHANNELS
op.setup, op.backward = _nearest_setup, _nearest_backward

op = record(
    "upsample_nearest_backward",
    fake=lambda dy, factors: _spatial_fake(dy, _scaled(dy, factors, operator.floordiv)),
    formula=_upsample_nearest_backward_formula,
)
op.dims = _SAMPLES_AND_CHANNELS

op = record("pad_replicate", fake=pad_replicate_fake, formula=_pad_replicate_formula)
op.dims = _SAMPLES_AND_CHANNELS
op.setup, op.backward = _pad_replicate_setup, _pad_replicate_backward

op = record("max_pool", fake=_max_pool_fake, formula=_max_pool_formula)
op.dims = _SAMPLES_AND_CHANNELS
op.setup, op.backward = _max_pool_setup, _max_pool_backward

op = record("upsample_conv_weight", fake=_upsample_conv_weight_fake, formula=_upsample_conv_weight_formula)
op.dims = dims(".", ".", ways="")
