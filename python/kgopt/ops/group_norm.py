"""GroupNorm: statistics, the norm with activations, its mean."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kgopt import _acts, reference
from kgopt._layout import affine_dtype, as_x_lies, empty, empty_like, stats_dtype, wide
from kgopt.ops.activation import activation_backward, chain_backward
from kgopt.ops.autocast import cast, in_fp32
from kgopt.ops.calls import in_backward, is_grad_enabled
from kgopt.ops.registry import OPS, dims, dims_by_group, record, record_public
from kgopt.ops.vmap import samples

# As nodes call them.
group_norm_backward = in_backward("group_norm_backward")
group_norm_mean_backward = in_backward("group_norm_mean_backward")
_group_stats_backward = in_backward("group_stats_backward")
_group_stats, _group_norm_add = in_backward("group_stats"), in_backward("group_norm_add")
_leaky_relu_backward = in_backward("group_norm_add_leaky_relu_backward")

# ----------------------------------------------------------------------------------------------------------------------
# Results without values


def stats_fake(x: Tensor, num_groups: int, *_: Any) -> tuple[Tensor, Tensor]:
    """Mean and rstd without values."""
    return tuple(empty(x, [x.shape[0], num_groups], stats_dtype(x)) for _ in range(2))  # type: ignore[return-value]


def affine_gradients_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of a norm without values."""
    dtype = affine_dtype(x, weight, bias)
    return empty_like(x), empty(x, [x.shape[1]], dtype), empty(x, [x.shape[1]], dtype)


def sum_gradients_fake(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same behind which a sum stands: dx, the sum's gradient, dweight and dbias."""
    dx, dweight, dbias = affine_gradients_fake(x, weight, bias)
    return dx, empty_like(x), dweight, dbias


def _mean_fwd_fake(x: Tensor, num_groups: int, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = stats_dtype(x)
    return empty(x, [x.shape[0]], dtype), empty(x, [x.shape[0], x.shape[1]], dtype), *stats_fake(x, num_groups)


# ----------------------------------------------------------------------------------------------------------------------
# Autograd


def _norm_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, groups, weight, bias, _, act, pre_act = inputs
    ctx.options = groups, act, pre_act
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)


def _norm_backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    groups, act, pre_act = ctx.options
    dx, dweight, dbias = group_norm_backward(dy, x, mean, rstd, groups, weight, bias, act, pre_act)
    if weight is None or bias is None:  # else a gradient that nobody asked for is dropped by the engine
        dweight, dbias = affine_gradients(ctx, (2, 3), dweight, dbias)
    return dx, None, dweight, dbias, None, None, None, None


def _norm_add_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, residual, *ctx.options = inputs
    groups, weight, bias, eps, act = ctx.options
    ctx.options = groups, eps, act
    y, mean, rstd = output
    # ReLU's slope follows from what it gave, which PyTorch keeps, too; others' from the sum, computed again.
    kept = y if act == "relu" else None if act == "none" else residual
    ctx.save_for_backward(x, weight, bias, mean, rstd, kept)


@functools.lru_cache(1024)
def _leaky_slope(act: str) -> float | None:
    """That of a chain that is one LeakyReLU."""
    chain = _acts.parse(act)
    return chain[0].parameters[0] if len(chain) == 1 and chain[0].name == "leaky_relu" else None


def _norm_add_backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, weight, bias, mean, rstd, kept = ctx.saved_tensors
    groups, eps, act = ctx.options
    slope = _leaky_slope(act)
    if slope is not None:
        dx, dy, dweight, dbias = _leaky_relu_backward(dy, x, kept, mean, rstd, groups, weight, bias, slope)
    else:
        if act not in ("none", "relu"):
            kept = _group_norm_add(x, kept, groups, weight, bias, eps, "none")
        if act != "none":
            dy = activation_backward(dy, kept, act)
        del kept  # what was computed for it is gone before dx is there
        dx, dweight, dbias = group_norm_backward(dy, x, mean, rstd, groups, weight, bias, "none", "none")
    return dx, dy, None, *affine_gradients(ctx, (3, 4), dweight, dbias)


def affine_gradients(ctx: Any, positions: tuple[int, int], dweight: Tensor, dbias: Tensor) -> tuple[Tensor | None, ...]:
    """dweight and dbias, of arguments at these positions, as far as they are asked for."""
    needs, (weight, bias) = ctx.needs_input_grad, positions
    given = len(needs)
    return dweight if weight < given and needs[weight] else None, dbias if bias < given and needs[bias] else None


def _norm_mean_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, ctx.num_groups, weight, bias, _ = inputs
    _, channel_mean, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, channel_mean, mean, rstd)


def reaching(bias: Tensor | None, dout: Tensor) -> Tensor:
    """dout. With a graph it also depends on the bias, by zeros, as in PyTorch's second derivative.

    Else the bias had no gradient there, and torch.autograd.grad of a penalty for all parameters were an error.
    """
    return dout if bias is None or not is_grad_enabled() else dout + bias[:0].sum().to(dout.dtype)


def _norm_mean_backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
    x, weight, bias, channel_mean, mean, rstd = ctx.saved_tensors
    dout = reaching(bias, dout)
    dx, dweight, dbias = group_norm_mean_backward(dout, x, channel_mean, mean, rstd, ctx.num_groups, weight)
    return dx, None, *affine_gradients(ctx, (2, 3), dweight, dbias)


def _stats_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, ctx.num_groups, _ = inputs
    ctx.save_for_backward(x, *output)


def _stats_backward(ctx: Any, dmean: Tensor | None, drstd: Tensor | None) -> Any:
    x, mean, rstd = ctx.saved_tensors
    dmean = torch.zeros_like(mean) if dmean is None else dmean
    drstd = torch.zeros_like(rstd) if drstd is None else drstd
    return (_group_stats_backward(dmean, drstd, x, mean, rstd, ctx.num_groups),)


def _norm_moments_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, _, ctx.num_groups, weight, bias, ctx.eps, ctx.act = inputs
    ctx.save_for_backward(x, weight, bias)


def _norm_moments_backward(ctx: Any, dy: Tensor) -> Any:
    """That of a group_norm of x: the moments are x's."""
    x, weight, bias = ctx.saved_tensors
    mean, rstd = _group_stats(x, ctx.num_groups, ctx.eps)
    more = (ctx.num_groups, weight, bias, ctx.act, "none")
    dx, dweight, dbias = group_norm_backward(dy, x, mean, rstd, *more)
    return dx, None, None, *affine_gradients(ctx, (3, 4), dweight, dbias)


# ----------------------------------------------------------------------------------------------------------------------
# Formulas


def _grouped(x: Tensor, num_groups: int) -> Tensor:
    """``[N, G, values]``."""
    return x.reshape(x.shape[0], num_groups, math.prod(x.shape[1:]) // num_groups)


def _per_channel(t: Tensor, rank: int) -> Tensor:
    return t.view(1, -1, *[1] * (rank - 2))


def _but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def mean_and_variance(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """torch.var_mean warns of an empty batch."""
    mean = x.mean(dims, True)
    return mean.squeeze(dims), (x - mean).square().mean(dims)


def _group_stats_formula(x: Tensor, num_groups: int, eps: float) -> tuple[Tensor, Tensor]:
    mean, variance = mean_and_variance(_grouped(wide(x), num_groups), [2])
    return mean, torch.rsqrt(variance + eps)


def _group_stats_backward_formula(
    dmean: Tensor, drstd: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, num_groups: int
) -> Tensor:
    groups = _grouped(wide(x), num_groups)
    dvariance = -0.5 * drstd * rstd**3
    dx = (dmean[..., None] + 2 * dvariance[..., None] * (groups - mean[..., None])) / groups.shape[2]
    return as_x_lies(dx.reshape(x.shape), x)


def normalized(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """``(x - mean) * rstd`` of each group."""
    return ((_grouped(x, mean.shape[1]) - mean[..., None]) * rstd[..., None]).reshape(x.shape)


def with_affine(xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``xhat * weight + bias``."""
    if weight is not None:
        xhat = xhat * _per_channel(wide(weight), xhat.dim())
    return xhat if bias is None else xhat + _per_channel(wide(bias), xhat.dim())


def norm_formula(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: str, pre_act: str = "none"
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of a wide x, in that dtype, and its statistics."""
    u = reference.activation_ref(x, pre_act)
    mean, rstd = _group_stats_formula(u, num_groups, eps)
    return reference.activation_ref(with_affine(normalized(u, mean, rstd), weight, bias), act), mean, rstd


def group_norm_fwd_formula(x: Tensor, *norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The op group_norm_fwd."""
    y, mean, rstd = norm_formula(wide(x), *norm)
    return as_x_lies(y, x), mean, rstd


def _norm_add_fwd_formula(
    x: Tensor, residual: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    z, mean, rstd = norm_formula(wide(x), num_groups, weight, bias, eps, "none")
    return as_x_lies(reference.activation_ref(z + wide(residual), act), x), mean, rstd


def _group_norm_moments_formula(x: Tensor, moments: Tensor, *norm: Any) -> Tensor:
    """The moments are those of x."""
    return group_norm_fwd_formula(x, *norm)[0]


def norm_backward(
    dz: Tensor, u: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the norm's argument, weight and bias, from that of ``xhat * weight + bias``."""
    xhat = normalized(u, mean, rstd)
    dweight, dbias = (dz * xhat).sum(_but_channels(u)), dz.sum(_but_channels(u))
    g = dz if weight is None else dz * _per_channel(wide(weight), dz.dim())
    g, groups = _grouped(g, mean.shape[1]), _grouped(xhat, mean.shape[1])
    du = rstd[..., None] * (g - g.mean(2, True) - groups * (g * groups).mean(2, True))
    return du.reshape(u.shape), dweight, dbias


def _group_norm_backward_formula(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    act: str,
    pre_act: str,
) -> tuple[Tensor, Tensor, Tensor]:
    u = reference.activation_ref(wide(x), pre_act)
    z = with_affine(normalized(u, mean, rstd), weight, bias)
    du, dweight, dbias = norm_backward(chain_backward(wide(dy), z, act), u, mean, rstd, weight)
    dtype = affine_dtype(x, weight, bias)
    return as_x_lies(chain_backward(du, wide(x), pre_act), x), dweight.to(dtype), dbias.to(dtype)


def _leaky_relu_backward_formula(
    dy: Tensor,
    x: Tensor,
    residual: Tensor,
    mean: Tensor,
    rstd: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z = with_affine(normalized(wide(x), mean, rstd), weight, bias) + wide(residual)
    # Of the residual, too, by zeros, as in PyTorch's second derivative.
    dz = torch.where(z > 0, wide(dy), wide(dy) * slope) + wide(residual)[:0].sum()
    dx, dweight, dbias = norm_backward(dz, wide(x), mean, rstd, weight)
    dtype = affine_dtype(x, weight, bias)
    return as_x_lies(dx, x), as_x_lies(dz, x), dweight.to(dtype), dbias.to(dtype)


def group_norm_mean_fwd_formula(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op group_norm_mean_fwd."""
    z, mean, rstd = norm_formula(wide(x), num_groups, weight, bias, eps, "none")
    return z.flatten(1).mean(1), wide(x).flatten(2).mean(2), mean, rstd


def _group_norm_mean_backward_formula(
    dout: Tensor,
    x: Tensor,
    channel_mean: Tensor,
    mean: Tensor,
    rstd: Tensor,
    num_groups: int,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Every element of the norm has the same gradient, so that its sums come from the means of the channels."""
    channels = x.shape[1]
    xhat = normalized(channel_mean, mean, rstd)  # means of the channels
    share = (dout / channels)[:, None]  # gradient of a channel's mean
    dweight, dbias = (share * xhat).sum(0), share.expand(xhat.shape).sum(0)
    g = share.expand(xhat.shape) if weight is None else share * wide(weight)
    along_one, along_xhat = (_grouped(t, num_groups).mean(2, True) for t in (g, g * xhat))
    spread = [*xhat.shape, *[1] * (x.dim() - 2)]
    # The part along xhat takes xhat's own values, all others are one number a channel.
    first = (_grouped(g, num_groups) - along_one) * rstd[..., None]
    values = _grouped(normalized(wide(x), mean, rstd), num_groups)
    second = (values * along_xhat * rstd[..., None]).reshape(x.shape)
    dx = (first.reshape(spread) - second) / math.prod(x.shape[2:])
    dtype = affine_dtype(x, weight, None)
    return as_x_lies(dx, x), dweight.to(dtype), dbias.to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Statistics among a backward op's arguments


def _statistics_of(u: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The given statistics, as functions of u. Where eps went into rstd, it is found again."""
    own_mean, variance = mean_and_variance(_grouped(u, mean.shape[1]), [2])
    eps = (rstd.pow(-2) - variance).detach()
    return own_mean, torch.rsqrt(variance + eps)


def from_x(at: int, act: int | None = None) -> Callable[[list[Any]], None]:
    """Replaces mean and rstd, the arguments at ``at``, by statistics of x, or of activations of it."""

    def replace(args: list[Any]) -> None:
        u = wide(args[1])
        if act is not None:
            u = reference.activation_ref(u, args[act])
        args[at : at + 2] = _statistics_of(u, *args[at : at + 2])

    return replace


def _norm_mean_from_x(args: list[Any]) -> None:
    args[2] = wide(args[1]).flatten(2).mean(2)
    from_x(3)(args)


# ----------------------------------------------------------------------------------------------------------------------
# Autocast


def _norm_mean_in_fp32(op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """The fp32 result of a half x needs no fp32 copy of x."""
    x, *rest = args
    return OPS.group_norm_mean_fwd(x, *(cast(a, torch.float32) for a in rest), **kwargs)[0]


op = record("group_stats", fake=stats_fake, formula=_group_stats_formula)
op.dims = dims_by_group("NC", "NG NG")
op.setup, op.backward = _stats_setup, _stats_backward
op.vmap = samples()

op = record(
    "group_stats_backward",
    fake=lambda dmean, drstd, x, mean, rstd, num_groups: empty_like(x),
    formula=_group_stats_backward_formula,
)
op.dims = dims_by_group("NG NG NC NG NG", "NC")
op.vmap = samples(5)

op = record(
    "group_norm_fwd",
    fake=lambda x, num_groups, *_: (empty_like(x), *stats_fake(x, num_groups)),
    formula=group_norm_fwd_formula,
)
op.dims = dims_by_group("NC C C", "NC NG NG")
op.setup, op.backward, op.differentiable = _norm_setup, _norm_backward, 1
op.vmap = samples()
record_public("group_norm", op).autocast = {"cuda": in_fp32}

op = record(
    "group_norm_add_fwd",
    fake=lambda x, residual, num_groups, *_: (empty_like(x), *stats_fake(x, num_groups)),
    formula=_norm_add_fwd_formula,
)
op.dims = dims_by_group("NC NC C C", "NC NG NG")
op.setup, op.backward, op.differentiable = _norm_add_setup, _norm_add_backward, 1
op.vmap = samples(2)
record_public("group_norm_add", op).autocast = {"cuda": in_fp32}

op = record("group_norm_moments", fake=lambda x, *_: empty_like(x), formula=_group_norm_moments_formula)
op.dims = dims_by_group("NC NC C C", "NC")
op.setup, op.backward = _norm_moments_setup, _norm_moments_backward
op.autocast = {"cuda": in_fp32}

# No vmap: dweight and dbias are sums over N, so the examples cannot share one call.
op = record(
    "group_norm_backward",
    fake=lambda dy, x, mean, rstd, num_groups, weight, bias, act, pre_act: affine_gradients_fake(x, weight, bias),
    formula=_group_norm_backward_formula,
)
op.dims = dims_by_group("NC NC NG NG C C", "NC C C")
op.statistics = (2, 3), from_x(2, act=8)

op = record(
    "group_norm_add_leaky_relu_backward",
    fake=lambda dy, x, residual, mean, rstd, groups, weight, bias, slope: sum_gradients_fake(x, weight, bias),
    formula=_leaky_relu_backward_formula,
)
op.dims = dims_by_group("NC NC NC NG NG C C", "NC NC C C")
op.statistics = (3, 4), from_x(3)

op = record("group_norm_mean_fwd", fake=_mean_fwd_fake, formula=group_norm_mean_fwd_formula)
op.dims = dims("N . .", "N N N N")
op.setup, op.backward, op.differentiable = _norm_mean_setup, _norm_mean_backward, 1
op.vmap = samples()
record_public("group_norm_mean", op).autocast = {"cuda": _norm_mean_in_fp32}

op = record(
    "group_norm_mean_backward",
    fake=lambda dout, x, channel_mean, mean, rstd, num_groups, weight: affine_gradients_fake(x, weight),
    formula=_group_norm_mean_backward_formula,
)
op.dims = dims("N N N N N .", "N . .")
op.statistics = (2, 3, 4), _norm_mean_from_x
