"""Norms over channels, at each position."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kgopt import reference
from kgopt._layout import affine_dtype, as_x_lies, empty_like, wide, wide_or_none
from kgopt.ops.activation import chain_backward
from kgopt.ops.autocast import in_fp32
from kgopt.ops.calls import in_backward
from kgopt.ops.group_norm import affine_gradients, affine_gradients_fake, with_affine
from kgopt.ops.registry import dims, record
from kgopt.ops.vmap import samples

channel_norm_backward = in_backward("channel_norm_backward")  # as nodes call it


def _setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, weight, bias, *ctx.options = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, dy: Tensor) -> Any:
    dx, dweight, dbias = channel_norm_backward(dy, *ctx.saved_tensors, *ctx.options)
    return dx, *affine_gradients(ctx, (1, 2), dweight, dbias), None, None, None


def _formula(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, act: str) -> Tensor:
    y = reference.channel_norm_ref(wide(x), wide_or_none(weight), wide_or_none(bias), kind, eps, act)
    return as_x_lies(y, x)


def _backward_formula(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    u = wide(x)
    channels, others = u.shape[1], [0, *range(2, u.dim())]
    turns: Any = 1
    if kind == "layer":
        u = u - u.mean(1, True)
    if kind == "l2":
        length = u.square().sum(1, True).sqrt()
        turns = (~(length <= eps)).to(u.dtype)  # at eps it does not, as in PyTorch from 2.14 on
        scale = channels**0.5 / length.clamp_min(eps)
    else:
        scale = (u.square().mean(1, True) + eps).rsqrt()
    xhat = u * scale
    dz = chain_backward(wide(dy), with_affine(xhat, weight, bias), act)
    dweight, dbias = (dz * xhat).sum(others), dz.sum(others)
    g = with_affine(dz, weight, None)
    dx = g - xhat * ((g * xhat).mean(1, True) * turns)
    if kind == "layer":
        dx = dx - g.mean(1, True)
    dtype = affine_dtype(x, weight, bias)
    return as_x_lies(dx * scale, x), dweight.to(dtype), dbias.to(dtype)


op = record("channel_norm", fake=lambda x, *_: empty_like(x), formula=_formula)
op.dims = dims("N . .", "N")
op.setup, op.backward = _setup, _backward
op.autocast = {"cuda": in_fp32}
op.vmap = samples()

# No vmap: dweight and dbias are sums over N, so the examples cannot share one call.
op = record(
    "channel_norm_backward",
    fake=lambda dy, x, weight, bias, *_: affine_gradients_fake(x, weight, bias),
    formula=_backward_formula,
)
op.dims = dims("N N . .", "N . .")
