"""Convolutions with what stands around them: a norm in front, a residual and activations behind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kgopt import reference
from kgopt._layout import as_x_lies, empty, is_channels_last, stats_dtype, wide
from kgopt.ops.activation import activation_backward
from kgopt.ops.autocast import cast, everywhere, low
from kgopt.ops.calls import wants_gradient
from kgopt.ops.conv_gradients import conv_gradients
from kgopt.ops.geometry import conv_fake, conv_flops, convolution
from kgopt.ops.group_norm import affine_gradients, group_norm_backward, group_norm_fwd_formula, mean_and_variance
from kgopt.ops.pointwise import pad_replicate_fake, pad_replicate_gradient
from kgopt.ops.registry import OPS, Dims, Op, dims, record

# ----------------------------------------------------------------------------------------------------------------------
# Results without values


def _conv_add_fake(  # type: ignore[no-untyped-def]
    x, weight, bias, residual, stride, padding, dilation, output_padding, groups, transposed, divisor, act, **_
):
    return conv_fake(x, weight, stride, padding, dilation, output_padding, groups, transposed)


def _norm_conv1x1_fake(x, moments, num_groups, gn_weight, gn_bias, eps, act, weight, bias):  # type: ignore[no-untyped-def]
    return empty(x, [x.shape[0], weight.shape[0], *x.shape[2:]], channels_last=is_channels_last(x))


def _norm_conv_fake(x: Tensor, *args: Any, replicate: Sequence[int] = (), **_: Any) -> Tensor:
    _, _, _, _, _, _, weight, _, _, *geometry = args[:15]
    return conv_fake(pad_replicate_fake(x, replicate) if replicate else x, weight, *geometry)


# ----------------------------------------------------------------------------------------------------------------------
# Autograd


def _conv_add_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, weight, bias, residual, *geometry, ctx.divisor, ctx.act = inputs
    ctx.geometry = tuple(geometry)
    needed = () if ctx.act == "none" else (bias, residual)  # for the activations' argument
    ctx.save_for_backward(x, weight, *needed)


def _conv_add_backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, weight, *more = ctx.saved_tensors
    if more:
        dy = activation_backward(dy, OPS.conv_add(x, weight, *more, *ctx.geometry, ctx.divisor), ctx.act)
    dy = dy if ctx.divisor == 1 else dy / ctx.divisor
    dx, dweight, dbias = conv_gradients(wants_gradient(ctx, 0, 1, 2), dy, x, weight, ctx.geometry)
    return dx, dweight, dbias, dy if wants_gradient(ctx, 3)[0] else None


def _norm_conv_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, _, ctx.num_groups, gn_weight, gn_bias, ctx.eps, ctx.gn_act, weight, bias, residual, *geometry = inputs
    *ctx.geometry, ctx.divisor, ctx.act = geometry
    ctx.replicate = keywords.get("replicate")
    needed = () if ctx.act == "none" else (bias, residual)  # for the activations' argument
    ctx.save_for_backward(x, gn_weight, gn_bias, weight, *needed)


def _norm_conv_backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
    """What the convolution reads is computed again, and for activations behind it what it gave."""
    x, gn_weight, gn_bias, weight, *more = ctx.saved_tensors
    norm, z = (ctx.num_groups, gn_weight, gn_bias), x
    if ctx.num_groups:
        z, mean, rstd = OPS.group_norm_fwd(x, *norm, ctx.eps, ctx.gn_act, "none")
    if ctx.replicate:
        z = OPS.pad_replicate(z, ctx.replicate)
    if more:
        dy = activation_backward(dy, OPS.conv_add(z, weight, *more, *ctx.geometry, ctx.divisor), ctx.act)
    dy = dy if ctx.divisor == 1 else dy / ctx.divisor
    needs: Any = (any(wants_gradient(ctx, 0, 3, 4)), *wants_gradient(ctx, 7, 8))
    dz, dweight, dbias = conv_gradients(needs, dy, z, weight, tuple(ctx.geometry))
    del z  # it is gone before dx is there
    if dz is not None and ctx.replicate:
        dz = pad_replicate_gradient(dz, ctx.replicate, x.shape)
    dx, dgamma, dbeta = dz, None, None
    if dz is not None and ctx.num_groups:
        dx, dgamma, dbeta = group_norm_backward(dz, x, mean, rstd, *norm, ctx.gn_act, "none")
        dgamma, dbeta = affine_gradients(ctx, (3, 4), dgamma, dbeta)
    return dx, None, None, dgamma, dbeta, None, None, dweight, dbias, dy if wants_gradient(ctx, 9)[0] else None


def _norm_conv1x1_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, _, ctx.num_groups, gn_weight, gn_bias, ctx.eps, ctx.act, weight, _ = inputs
    ctx.save_for_backward(x, gn_weight, gn_bias, weight)


def _norm_conv1x1_backward(ctx: Any, dy: Tensor) -> Any:
    """What the convolution reads is computed again."""
    x, gn_weight, gn_bias, weight = ctx.saved_tensors
    groups, z = ctx.num_groups, x
    if groups:
        z, mean, rstd = OPS.group_norm_fwd(x, groups, gn_weight, gn_bias, ctx.eps, ctx.act, "none")
    rank = x.dim() - 2
    ones, zeros = [1] * rank, [0] * rank
    needs: Any = (any(wants_gradient(ctx, 0, 3, 4)), *wants_gradient(ctx, 7, 8))
    dz, dweight, dbias = conv_gradients(needs, dy, z, weight, (ones, zeros, ones, zeros, 1, False))
    del z
    if not groups or dz is None:
        return dz, None, None, None, None, None, None, dweight, dbias
    dx, dgamma, dbeta = group_norm_backward(dz, x, mean, rstd, groups, gn_weight, gn_bias, ctx.act, "none")
    return dx, None, None, *affine_gradients(ctx, (3, 4), dgamma, dbeta), None, None, dweight, dbias


# ----------------------------------------------------------------------------------------------------------------------
# Formulas


def _conv_add_formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *rest: Any, backend: str
) -> Tensor:
    *geometry, divisor, act = rest
    c = convolution(x, weight, bias, *geometry, backend=backend)
    y = wide(c)
    y = (y if residual is None else y + wide(residual)) / divisor
    return as_x_lies(reference.activation_ref(y, act), c)


SCALED_HALF = "kgopt:scaled_half"  # a backend of these ops alone


def conv_backend(backend: str) -> str:
    """A convolution's backend where the norm in front is an op of its own."""
    return "auto" if backend == SCALED_HALF else backend


def _norm_conv_formula(
    x: Tensor, moments: Tensor | None, *args: Any, backend: str, replicate: Sequence[int] = ()
) -> Tensor:
    """The moments are those of x."""
    num_groups, gn_weight, gn_bias, eps, gn_act, *conv = args
    z = group_norm_fwd_formula(x, num_groups, gn_weight, gn_bias, eps, gn_act)[0] if num_groups else x
    if replicate:
        z = as_x_lies(reference.pad_replicate_ref(z, replicate), z)
    return _conv_add_formula(z, *conv, backend=conv_backend(backend))


def _norm_conv1x1_formula(x: Tensor, moments: Tensor | None, *args: Any) -> Tensor:
    *norm, weight, bias = args
    ones, zeros = [1] * (x.dim() - 2), [0] * (x.dim() - 2)
    return _norm_conv_formula(
        x, moments, *norm, weight, bias, None, ones, zeros, ones, zeros, 1, False, 1.0, "none", backend="auto"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Autocast


def _norm_conv1x1_low(op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """The norm in fp32, the convolution in the autocast dtype: two ops."""
    x, _, groups, gn_weight, gn_bias, eps, act, weight, bias = args
    if groups:
        x, gn_weight, gn_bias = (cast(t, torch.float32) for t in (x, gn_weight, gn_bias))
        x = OPS.group_norm(x, groups, gn_weight, gn_bias, eps, act)
    return OPS.group_norm_conv1x1(
        cast(x, dtype), None, 0, None, None, 0.0, "none", cast(weight, dtype), cast(bias, dtype)
    )


def _norm_conv_low(conv_name: str) -> Callable[..., Any]:
    """The convolution in the autocast dtype, and the norm in x's, where that is float32 or the same.

    Whatever a norm reads and writes, its arithmetic is float32: of a half x it gives the convolution the values that a
    float32 norm would, without copies.
    """
    conv = getattr(OPS, conv_name)

    def rule(op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
        x, moments, groups, gn_weight, gn_bias, eps, act, *tensors = args[:10]
        tensors = [cast(t, dtype) for t in tensors]
        if not groups or x.dtype is dtype or x.dtype is torch.float64:
            return op(cast(x, dtype), *args[1:7], *tensors, *args[10:], **kwargs)
        affine = (groups, cast(gn_weight, torch.float32), cast(gn_bias, torch.float32), eps, act)
        x = cast(x, torch.float32)
        z = OPS.group_norm(x, *affine) if moments is None else OPS.group_norm_moments(x, moments, *affine)
        options = {**kwargs, "backend": conv_backend(kwargs["backend"])} if "backend" in kwargs else {**kwargs}
        if replicate := options.pop("replicate", None):
            z = OPS.pad_replicate(z, replicate)
        return conv(cast(z, dtype), *tensors, *args[10:], **options)

    return rule


def _norm_conv_flops(given: dict[str, Any]) -> int:
    pad = given.get("replicate") or []
    x = list(given["x"])
    for i in range(len(pad) // 2):
        x[-1 - i] += pad[2 * i] + pad[2 * i + 1]
    return conv_flops({**given, "x": x})


# ----------------------------------------------------------------------------------------------------------------------
# Records


def _record_with_moments(name: str, of: Op) -> Op:
    """The record of an op that returns, beside its result, mean and variance of every channel of it."""

    def fake(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        y = of.fake(*args, **options)
        return y, empty(y, [*y.shape[:2], 2], stats_dtype(y))

    def formula(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        y = of.formula(*args, **options)
        return y, torch.stack(mean_and_variance(wide(y), list(range(2, y.dim()))), -1)

    assert isinstance(of.dims, Dims)
    op = record(name, fake, formula)
    op.dims = replace(of.dims, results=("N", "N"))
    op.setup, op.backward, op.differentiable, op.flops = of.setup, of.backward, 1, of.flops
    return op


op = record("conv_add", fake=_conv_add_fake, formula=_conv_add_formula)
op.dims = dims("N . . N", "N")
op.setup, op.backward = _conv_add_setup, _conv_add_backward
op.flops = conv_flops
op.autocast = everywhere(low(4))  # the residual, too: a wider one is a sum in its own dtype, which is not this op's
_record_with_moments("conv_add_moments", op).autocast = op.autocast

op = record("group_norm_conv", fake=_norm_conv_fake, formula=_norm_conv_formula)
op.dims = dims("N N . . . . N", "N")
op.setup, op.backward = _norm_conv_setup, _norm_conv_backward
op.flops = _norm_conv_flops
op.autocast = everywhere(_norm_conv_low("conv_add"))
_record_with_moments("group_norm_conv_moments", op).autocast = everywhere(_norm_conv_low("conv_add_moments"))

op = record("group_norm_conv1x1", fake=_norm_conv1x1_fake, formula=_norm_conv1x1_formula)
op.dims = dims("N N . . . .", "N")
op.setup, op.backward = _norm_conv1x1_setup, _norm_conv1x1_backward
op.autocast = {"cuda": _norm_conv1x1_low}
op.flops = functools.partial(conv_flops, transposed=False)
