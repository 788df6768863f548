"""Convolutions and transposed convolutions, 2D and 3D."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kgopt.ops.autocast import cast, everywhere
from kgopt.ops.conv_gradients import conv_gradients
from kgopt.ops.derivatives import BY_PYTORCH, duals, op_of_primals, with_tangent
from kgopt.ops.geometry import conv_fake, conv_flops
from kgopt.ops.precision import precision_of
from kgopt.ops.registry import OPS, dims, record
from kgopt.ops.vmap import samples


def _regular_fake(x: Tensor, weight: Tensor, bias: Any, *rest: Any, **_: Any) -> Tensor:
    stride, padding, dilation, groups = rest
    return conv_fake(x, weight, stride, padding, dilation, [0] * len(stride), groups, False)


def _transposed_fake(x: Tensor, weight: Tensor, bias: Any, *rest: Any, **_: Any) -> Tensor:
    stride, padding, output_padding, groups, dilation = rest
    return conv_fake(x, weight, stride, padding, dilation, output_padding, groups, True)


def _setup(transposed: bool) -> Callable[..., None]:
    def setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
        if transposed:
            x, weight, _, stride, padding, output_padding, groups, dilation = inputs
        else:
            x, weight, _, stride, padding, dilation, groups = inputs
            output_padding = [0] * len(stride)
        ctx.geometry = stride, padding, dilation, output_padding, groups, transposed
        ctx.options = keywords["allow_tf32"], keywords["backend"]
        ctx.save_for_backward(x, weight)

    return setup


def _backward(ctx: Any, dy: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    if len(needs) == 2:  # without an argument for the bias
        needs = (*needs, False)
    return conv_gradients(needs, dy, x, weight, ctx.geometry, *ctx.options)


def _formula_of(name: str) -> Callable[..., Tensor]:
    op, transposed = getattr(OPS, name), "transpose" in name

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, **options: Any) -> Tensor:
        if transposed:
            stride, padding, output_padding, groups, dilation = rest
        else:
            stride, padding, dilation, groups = rest
            output_padding = [0] * len(stride)
        bias = None if bias is None else bias.to(x.dtype)
        with precision_of(x, options["allow_tf32"]):
            return torch.convolution(
                x, weight.to(x.dtype), bias, stride, padding, dilation, transposed, output_padding, groups
            )

    def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any, **options: Any) -> Tensor:
        y = op_of_primals(op, (x, weight, bias), *geometry, **options)
        (px, pw, _), (tx, tw, tb) = duals(x, weight, bias)
        parts = []
        if tx is not None:
            parts.append(op(tx, pw, None, *geometry, **options))
        if tw is not None:
            parts.append(op(px, tw, None, *geometry, **options))
        if tb is not None:
            parts.append(tb.view(1, -1, *[1] * (y.dim() - 2)).to(y.dtype).expand(y.shape))
        return with_tangent(y, parts)

    return plain if BY_PYTORCH else convolution


def autocast_convolution(dtype: torch.dtype, x: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """What a convolution is given under autocast.

    fp32 weights stay: the op rounds them where it reads them, to half types alone, and their gradients are fp32.
    """
    x = cast(x, dtype)
    if weight.dtype is torch.float32 and (bias is None or bias.dtype is torch.float32) and dtype.itemsize == 2:
        return x, weight, bias
    return x, cast(weight, dtype), cast(bias, dtype)


def _low(op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    return op(*autocast_convolution(dtype, *args[:3]), *args[3:], **kwargs)


for name in ("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d"):
    transposed = "transpose" in name
    op = record(name, fake=_transposed_fake if transposed else _regular_fake, formula=_formula_of(name))
    op.dims = dims("N . .", "N")
    op.setup, op.backward = _setup(transposed), _backward
    op.autocast = everywhere(_low)
    op.vmap = samples()
    op.flops = functools.partial(conv_flops, transposed=transposed)
