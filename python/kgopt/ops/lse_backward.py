"""Backward of what follows the third pipeline's convolution: norm, tanh, hardswish, residual sum, logsumexp."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kgopt import reference
from kgopt._layout import affine_dtype, as_x_lies, stats_dtype, wide
from kgopt.ops.activation import chain_backward
from kgopt.ops.group_norm import affine_gradients_fake, from_x, norm_backward, normalized, with_affine
from kgopt.ops.registry import OPS, dims, record

NAME = "group_norm_tanh_hardswish_residual_logsumexp_backward"
CHAIN = "tanh+hardswish"


def _formula(
    dlse: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax is x's own: the forward's logsumexp is of a convolution that was rounded otherwise."""
    u, act = wide(x), CHAIN
    z = with_affine(normalized(u, mean, rstd), weight, bias)
    dr = dlse * torch.softmax(u + reference.activation_ref(z, act), 1)
    dx, dweight, dbias = norm_backward(chain_backward(dr, z, act), u, mean, rstd, weight)
    dtype = affine_dtype(x, weight, bias)
    return as_x_lies(dx + dr, x), dweight.to(dtype), dbias.to(dtype)


def _in_steps(  # type: ignore[no-untyped-def]
    dlse, x, mean, rstd, num_groups, weight=None, bias=None
):
    """The CPU's, with tensors of x's size in between."""
    expected = [x.shape[0], 1, *x.shape[2:]]
    if list(dlse.shape) != expected:
        raise RuntimeError(f"{NAME}: dlse has shape {list(dlse.shape)}, expected {expected}")
    if dlse.dtype != stats_dtype(x):
        kinds = [str(d).removeprefix("torch.") for d in (dlse.dtype, stats_dtype(x))]
        raise RuntimeError(f"{NAME}: dlse has dtype {kinds[0]}, expected the dtype of statistics, {kinds[1]}")
    act, groups, channels = CHAIN, [x.shape[0], num_groups, 1], x.shape[1] // num_groups
    positions = math.prod(x.shape[2:])  # by name: -1 says nothing of a tensor without elements
    grouped = x.to(dlse.dtype).reshape(*groups[:2], channels * positions)
    u = ((grouped - mean.view(groups)) * rstd.view(groups)).reshape(x.shape[0], num_groups * channels, positions)
    if weight is not None:
        u = u * weight.to(u.dtype).view(1, -1, 1)
    if bias is not None:
        u = u + bias.to(u.dtype).view(1, -1, 1)
    residual = x.to(dlse.dtype) + OPS.activation(u, act).reshape(x.shape)
    dresidual = OPS.logsumexp_backward(dlse, residual, OPS.logsumexp(residual, [1], True), [1], True).to(x.dtype)
    dx, dweight, dbias = OPS.group_norm_backward(dresidual, x, mean, rstd, num_groups, weight, bias, act, "none")
    return dx + dresidual, dweight, dbias


op = record(
    NAME,
    fake=lambda dlse, x, mean, rstd, num_groups, weight, bias: affine_gradients_fake(x, weight, bias),
    formula=_formula,
)
op.dims = dims("N N N N . .", "N . .")
op.statistics = (2, 3), from_x(2)
op.on_cpu = _in_steps
