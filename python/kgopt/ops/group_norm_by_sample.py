"""GroupNorm whose weight and bias differ from sample to sample, both ``[N, C]``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kgopt import reference
from kgopt._layout import as_x_lies, empty, empty_like, wide
from kgopt.ops.activation import chain_backward
from kgopt.ops.autocast import in_fp32
from kgopt.ops.calls import in_backward
from kgopt.ops.group_norm import from_x, norm_backward, norm_formula, normalized, stats_fake
from kgopt.ops.registry import OPS, dims_by_group, record, record_public
from kgopt.ops.vmap import samples

_backward_op = in_backward("group_norm_by_sample_backward")  # as nodes call it


def _setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, weight, bias, ctx.num_groups, _, ctx.act = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)


def _backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    return *_backward_op(dy, x, mean, rstd, weight, bias, ctx.num_groups, ctx.act), None, None, None


def _spread(t: Tensor, x: Tensor) -> Tensor:
    """``[N, C]`` over x's positions."""
    return wide(t).reshape(*t.shape, *[1] * (x.dim() - 2))


def _fwd_formula(
    x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    z, mean, rstd = norm_formula(wide(x), num_groups, None, None, eps, "none")
    z = z * _spread(weight, x) + _spread(bias, x)
    return as_x_lies(reference.activation_ref(z, act), x), mean, rstd


def _backward_formula(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, num_groups: int, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    xhat = normalized(wide(x), mean, rstd)
    z = xhat * _spread(weight, x) + _spread(bias, x)
    dz = chain_backward(wide(dy), z, act)
    rows = *x.shape[:2], math.prod(x.shape[2:])
    dweight, dbias = ((t.reshape(rows)).sum(2).to(weight.dtype) for t in (dz * xhat, dz))
    dx, _, _ = norm_backward(dz * _spread(weight, x), wide(x), mean, rstd, None)
    return as_x_lies(dx, x), dweight, dbias


def _fwd_on_cpu(
    x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float = 1e-5, act: str = "none"
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample by sample."""
    _check(x, weight, bias)
    if x.shape[0] == 0:
        y, mean, rstd = OPS.group_norm_fwd(x, num_groups, None, None, eps, act)
        return y, mean, rstd
    each = [OPS.group_norm_fwd(*one, num_groups, w, b, eps, act) for *one, w, b in _samples(weight, bias, x)]
    y, mean, rstd = (torch.cat(parts) for parts in zip(*each, strict=True))
    return as_x_lies(y, x), mean, rstd


def _backward_on_cpu(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    num_groups: int,
    act: str = "none",
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample by sample, in the dtype of sums: of few positions the norm's own rounding would be all of an error."""
    _check(x, weight, bias)
    if x.shape[0] == 0:
        return empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
    tensors = _samples(wide(weight), wide(bias), wide(dy), wide(x), mean, rstd)
    each = [OPS.group_norm_backward(*one, num_groups, w, b, act) for *one, w, b in tensors]
    dx, dweight, dbias = zip(*each, strict=True)
    return as_x_lies(torch.cat(dx), x), torch.stack(dweight).to(weight.dtype), torch.stack(dbias).to(bias.dtype)


def _samples(weight: Tensor, bias: Tensor, *tensors: Tensor) -> Any:
    """Of each sample, its part of the tensors, its weight and its bias."""
    return zip(*(t.split(1) for t in tensors), weight.unbind(), bias.unbind(), strict=True)


def _check(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """As the CUDA file does."""
    for name, t in (("weight", weight), ("bias", bias)):
        if x.dim() < 2 or t.shape != x.shape[:2]:
            raise RuntimeError(
                f"group_norm_by_sample: {name} has shape {list(t.shape)}, expected {list(x.shape[:2])}, "
                f"of x with shape {list(x.shape)}"
            )


op = record(
    "group_norm_by_sample_fwd",
    fake=lambda x, weight, bias, num_groups, *_: (empty_like(x), *stats_fake(x, num_groups)),
    formula=_fwd_formula,
)
op.dims = dims_by_group("NC NC NC", "NC NG NG")
op.setup, op.backward, op.differentiable = _setup, _backward, 1
op.vmap = samples(3)
op.on_cpu = _fwd_on_cpu
public = record_public("group_norm_by_sample", op)
public.autocast = {"cuda": in_fp32}
public.on_cpu = lambda *args, **kwargs: _fwd_on_cpu(*args, **kwargs)[0]

op = record(
    "group_norm_by_sample_backward",
    fake=lambda dy, x, mean, rstd, weight, bias, *_: (
        empty_like(x),
        *(empty(x, x.shape[:2], weight.dtype) for _ in "wb"),
    ),
    formula=_backward_formula,
)
op.dims = dims_by_group("NC NC NG NG NC NC", "NC NC NC")
op.statistics = (2, 3), from_x(2)
op.vmap = samples(6)
op.on_cpu = _backward_on_cpu
