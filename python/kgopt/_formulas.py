"""Every op in differentiable PyTorch functions: where a derivative is asked for that no kernel gives.

A formula takes the op's arguments, all of them, and returns what the op returns. Forward mode runs it on dual numbers;
the second derivative is the vector-Jacobian product of a backward op's formula. Speed does not matter here. Inside,
half types are float32, as in the kernels.

A formula must not use torch.func: it runs inside the dispatcher, where no further transform can begin. That is why the
derivatives of activations are written out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from kgopt import reference, torch_private
from kgopt._layout import affine_dtype, is_channels_last, memory_format, stats_dtype

_OPS = torch.ops.kgopt
_ATEN = torch.ops.aten


def _wide(t: Tensor) -> Tensor:
    return t.to(stats_dtype(t))


def _wide_or_none(t: Tensor | None) -> Tensor | None:
    return None if t is None else _wide(t)


def _result(value: Tensor, x: Tensor) -> Tensor:
    """In x's dtype, and as x lies."""
    value = value.to(x.dtype)
    if value.dim() in (4, 5) and is_channels_last(value) != is_channels_last(x):
        value = value.contiguous(memory_format=memory_format(value.dim(), is_channels_last(x)))
    return value


# ----------------------------------------------------------------------------------------------------------------------
# Activations


def _silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def _sigmoid_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return dy * s * (1 - s)


def _tanh_backward(dy: Tensor, x: Tensor) -> Tensor:
    return dy * (1 - torch.tanh(x).square())


def _mish_backward(dy: Tensor, x: Tensor) -> Tensor:
    t = torch.tanh(F.softplus(x))
    return dy * (t + x * torch.sigmoid(x) * (1 - t.square()))


def _hardswish_backward(dy: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0, torch.where(x < 3, dy * (x / 3 + 0.5), dy))


_DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda dy, x: dy,
    "relu": lambda dy, x: _ATEN.threshold_backward(dy, x, 0),
    "leaky_relu": lambda dy, x: _ATEN.leaky_relu_backward(dy, x, 0.01, False),
    "silu": _silu_backward,
    "gelu": lambda dy, x: _ATEN.gelu_backward(dy, x, approximate="none"),
    "gelu_tanh": lambda dy, x: _ATEN.gelu_backward(dy, x, approximate="tanh"),
    "sigmoid": _sigmoid_backward,
    "tanh": _tanh_backward,
    "hardswish": _hardswish_backward,
    "hardtanh": lambda dy, x: _ATEN.hardtanh_backward(dy, x, -1.0, 1.0),
    "elu": lambda dy, x: _ATEN.elu_backward(dy, 1.0, 1.0, 1.0, False, x),
    "mish": _mish_backward,
    "softplus": lambda dy, x: _ATEN.softplus_backward(dy, x, 1.0, 20.0),
}


def _chain_backward(dy: Tensor, x: Tensor, act: str) -> Tensor:
    """Gradient of a chain's argument, from that of its result."""
    arguments = []
    for name in (n.strip() for n in act.split("+")):
        arguments.append((name, x))
        x = reference.activation_ref(x, name)
    for name, x in reversed(arguments):
        dy = _DERIVATIVES[name](dy, x)
    return dy


def _activation(x: Tensor, act: str) -> Tensor:
    return _result(reference.activation_ref(_wide(x), act), x)


def _activation_backward(dy: Tensor, x: Tensor, act: str) -> Tensor:
    return _result(_chain_backward(_wide(dy), _wide(x), act), x)


# ----------------------------------------------------------------------------------------------------------------------
# GroupNorm


def _grouped(x: Tensor, num_groups: int) -> Tensor:
    """``[N, G, values]``."""
    return x.reshape(x.shape[0], num_groups, math.prod(x.shape[1:]) // num_groups)


def _per_channel(t: Tensor, rank: int) -> Tensor:
    return t.view(1, -1, *[1] * (rank - 2))


def _but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _mean_and_variance(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """torch.var_mean warns of an empty batch."""
    mean = x.mean(dims, True)
    return mean.squeeze(dims), (x - mean).square().mean(dims)


def _group_stats(x: Tensor, num_groups: int, eps: float) -> tuple[Tensor, Tensor]:
    mean, variance = _mean_and_variance(_grouped(_wide(x), num_groups), [2])
    return mean, torch.rsqrt(variance + eps)


def _group_stats_backward(
    dmean: Tensor, drstd: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, num_groups: int
) -> Tensor:
    groups = _grouped(_wide(x), num_groups)
    dvariance = -0.5 * drstd * rstd**3
    dx = (dmean[..., None] + 2 * dvariance[..., None] * (groups - mean[..., None])) / groups.shape[2]
    return _result(dx.reshape(x.shape), x)


def _normalized(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return ((_grouped(x, mean.shape[1]) - mean[..., None]) * rstd[..., None]).reshape(x.shape)


def _affine(xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        xhat = xhat * _per_channel(_wide(weight), xhat.dim())
    return xhat if bias is None else xhat + _per_channel(_wide(bias), xhat.dim())


def _norm(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: str, pre_act: str = "none"
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of a wide x, in that dtype, and its statistics."""
    u = reference.activation_ref(x, pre_act)
    mean, rstd = _group_stats(u, num_groups, eps)
    return reference.activation_ref(_affine(_normalized(u, mean, rstd), weight, bias), act), mean, rstd


def _group_norm_fwd(x: Tensor, *norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _norm(_wide(x), *norm)
    return _result(y, x), mean, rstd


def _group_norm_moments(x: Tensor, moments: Tensor, *norm: Any) -> Tensor:
    """The moments are those of x."""
    return _group_norm_fwd(x, *norm)[0]


def _norm_backward(
    dz: Tensor, u: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the norm's argument, weight and bias, from that of ``xhat * weight + bias``."""
    xhat = _normalized(u, mean, rstd)
    dweight, dbias = (dz * xhat).sum(_but_channels(u)), dz.sum(_but_channels(u))
    g = dz if weight is None else dz * _per_channel(_wide(weight), dz.dim())
    g, groups = _grouped(g, mean.shape[1]), _grouped(xhat, mean.shape[1])
    du = rstd[..., None] * (g - g.mean(2, True) - groups * (g * groups).mean(2, True))
    return du.reshape(u.shape), dweight, dbias


def _group_norm_backward(
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
    u = reference.activation_ref(_wide(x), pre_act)
    z = _affine(_normalized(u, mean, rstd), weight, bias)
    du, dweight, dbias = _norm_backward(_chain_backward(_wide(dy), z, act), u, mean, rstd, weight)
    dtype = affine_dtype(x, weight, bias)
    return _result(_chain_backward(du, _wide(x), pre_act), x), dweight.to(dtype), dbias.to(dtype)


def _group_norm_mean_fwd(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z, mean, rstd = _norm(_wide(x), num_groups, weight, bias, eps, "none")
    return z.flatten(1).mean(1), _wide(x).flatten(2).mean(2), mean, rstd


def _group_norm_mean_backward(
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
    xhat = _normalized(channel_mean, mean, rstd)  # means of the channels
    share = (dout / channels)[:, None]  # gradient of a channel's mean
    dweight, dbias = (share * xhat).sum(0), share.expand(xhat.shape).sum(0)
    g = share.expand(xhat.shape) if weight is None else share * _wide(weight)
    along_one, along_xhat = (_grouped(t, num_groups).mean(2, True) for t in (g, g * xhat))
    spread = [*xhat.shape, *[1] * (x.dim() - 2)]
    # The part along xhat takes xhat's own values, all others are one number a channel.
    first = (_grouped(g, num_groups) - along_one) * rstd[..., None]
    values = _grouped(_normalized(_wide(x), mean, rstd), num_groups)
    second = (values * along_xhat * rstd[..., None]).reshape(x.shape)
    dx = (first.reshape(spread) - second) / math.prod(x.shape[2:])
    dtype = affine_dtype(x, weight, None)
    return _result(dx, x), dweight.to(dtype), dbias.to(dtype)


def _lse_backward(
    dlse: Tensor,
    x: Tensor,
    lse: Tensor,
    mean: Tensor,
    rstd: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax is that of its own sum: lse only shifts it."""
    wide, act = _wide(x), "tanh+hardswish"
    z = _affine(_normalized(wide, mean, rstd), weight, bias)
    shift = lse.masked_fill(lse == -math.inf, 0)
    dr = dlse * torch.softmax(wide + reference.activation_ref(z, act) - shift, 1)
    dx, dweight, dbias = _norm_backward(_chain_backward(dr, z, act), wide, mean, rstd, weight)
    dtype = affine_dtype(x, weight, bias)
    return _result(dx + dr, x), dweight.to(dtype), dbias.to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Convolutions. They are linear in each tensor: a tangent is a sum of calls of the same op, with its precision.


@contextlib.contextmanager
def conv_precision(allow_tf32: bool) -> Iterator[None]:
    """PyTorch's switch for cuDNN convolutions, set for a while. backends.cudnn.flags raises on mixed interfaces."""
    before = torch_private.conv_precision()
    torch_private.set_conv_precision("tf32" if allow_tf32 else "ieee")
    try:
        yield
    finally:
        torch_private.set_conv_precision(before)


def _precision(x: Tensor, allow_tf32: bool | None) -> Any:
    return contextlib.nullcontext() if allow_tf32 is None or not x.is_cuda else conv_precision(allow_tf32)


# The ops in their own formulas would be asked for these again.
_BY_PYTORCH = not (torch_private.SWITCHES_TANGENTS and torch_private.RECORDS_LEVELS)


def _duals(*tensors: Tensor | None) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Primals and tangents."""
    pairs = [(None, None) if t is None else tuple(forward_ad.unpack_dual(t, level=0)) for t in tensors]
    return [p for p, _ in pairs], [t for _, t in pairs]


def _primal(op: Any, tensors: Sequence[Tensor | None], *args: Any, **options: Any) -> Any:
    """The op as if its tensors had no tangents.

    A node that is recorded on the way saves the dual numbers all the same, for forward mode over reverse. Under
    torch.func the two are levels of their own, and the other levels of forward mode must stay on.
    """
    if torch_private.are_functorch_transforms_active():
        return op(*_duals(*tensors)[0], *args, **options)
    with torch_private.pass_tangents(False):
        return op(*tensors, *args, **options)


def _with_tangent(primal: Tensor, parts: Sequence[Tensor]) -> Tensor:
    if not parts:
        return primal
    return forward_ad.make_dual(primal, sum(parts[1:], parts[0]).to(primal.dtype), level=0)


def _conv(name: str) -> Callable[..., Tensor]:
    op, transposed = getattr(_OPS, name), "transpose" in name

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, **options: Any) -> Tensor:
        if transposed:
            stride, padding, output_padding, groups, dilation = rest
        else:
            stride, padding, dilation, groups = rest
            output_padding = [0] * len(stride)
        bias = None if bias is None else bias.to(x.dtype)
        with _precision(x, options["allow_tf32"]):
            return torch.convolution(
                x, weight.to(x.dtype), bias, stride, padding, dilation, transposed, output_padding, groups
            )

    def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any, **options: Any) -> Tensor:
        y = _primal(op, (x, weight, bias), *geometry, **options)
        (px, pw, _), (tx, tw, tb) = _duals(x, weight, bias)
        parts = []
        if tx is not None:
            parts.append(op(tx, pw, None, *geometry, **options))
        if tw is not None:
            parts.append(op(px, tw, None, *geometry, **options))
        if tb is not None:
            parts.append(_per_channel(tb, y.dim()).to(y.dtype).expand(y.shape))
        return _with_tangent(y, parts)

    return plain if _BY_PYTORCH else convolution


def _plain_conv_backward(
    dy: Tensor, x: Tensor, weight: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    stride, padding, dilation, output_padding, groups, transposed, mask = rest
    geometry = [dy.shape[1]], stride, padding, dilation, transposed, output_padding, groups, mask
    with _precision(x, options["allow_tf32"]):
        gradients = _ATEN.convolution_backward(dy.to(x.dtype), x, weight.to(x.dtype), *geometry)
    dx, dweight, dbias = (x.new_empty(0) if g is None else g for g in gradients)
    return dx, dweight.to(weight.dtype), dbias


def _conv_backward(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *geometry, mask = rest
    primals = _primal(_OPS.conv_backward, (dy, x, weight), *geometry, mask, **options)
    (pdy, px, pw), (tdy, tx, tw) = _duals(dy, x, weight)
    parts: list[list[Tensor]] = [[], [], []]

    def add(of: Sequence[bool], *tensors: Tensor | None) -> None:
        if any(of):
            gradients = _OPS.conv_backward(*tensors, *geometry, of, **options)
            for part, gradient, wanted in zip(parts, gradients, of, strict=True):
                if wanted:
                    part.append(gradient)

    if tdy is not None:
        add(mask, tdy, px, pw)
    of_operands = mask[0] and tw is not None, mask[1] and tx is not None, False
    add(of_operands, pdy, px if tx is None else tx, pw if tw is None else tw)
    dx, dweight, dbias = (_with_tangent(p, t) for p, t in zip(primals, parts, strict=True))
    return dx, dweight, dbias


def conv_of(rank: int, transposed: bool) -> Any:
    """The op of a convolution with this many spatial dims."""
    return getattr(_OPS, f"conv{'_transpose' if transposed else ''}{rank}d")


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    transposed: bool,
    **options: Any,
) -> Tensor:
    """A convolution by the op of its rank."""
    op = conv_of(len(stride), transposed)
    rest = (output_padding, groups, dilation) if transposed else (dilation, groups)
    return op(x, weight, bias, stride, padding, *rest, **options)  # type: ignore[no-any-return]


def _conv_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *rest: Any, backend: str
) -> Tensor:
    *geometry, divisor, act = rest
    c = convolution(x, weight, bias, *geometry, backend=backend)
    y = _wide(c)
    y = (y if residual is None else y + _wide(residual)) / divisor
    return _result(reference.activation_ref(y, act), c)


def _with_moments(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, torch.stack(_mean_and_variance(_wide(y), list(range(2, y.dim()))), -1)


def _norm_conv(x: Tensor, moments: Tensor | None, *args: Any, backend: str) -> Tensor:
    """The moments are those of x."""
    num_groups, gn_weight, gn_bias, eps, gn_act, *conv = args
    z = _group_norm_fwd(x, num_groups, gn_weight, gn_bias, eps, gn_act)[0] if num_groups else x
    return _conv_add(z, *conv, backend=backend)


def _norm_conv1x1(x: Tensor, moments: Tensor | None, *args: Any) -> Tensor:
    *norm, weight, bias = args
    ones, zeros = [1] * (x.dim() - 2), [0] * (x.dim() - 2)
    return _norm_conv(
        x, moments, *norm, weight, bias, None, ones, zeros, ones, zeros, 1, False, 1.0, "none", backend="auto"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Reductions and resampling


def _dims(dims: Sequence[int], rank: int) -> list[int]:
    return sorted(d % max(rank, 1) for d in dims) if dims else list(range(rank))


def _kept(t: Tensor, dims: Sequence[int], rank: int, keepdim: bool) -> Tensor:
    """A reduction's result with its dims kept."""
    if not keepdim and rank:
        for d in _dims(dims, rank):
            t = t.unsqueeze(d)
    return t


def _logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    return torch.logsumexp(_wide(x), _dims(dim, x.dim()), keepdim).to(x.dtype) if x.dim() else x.clone()


def _logsumexp_backward(dy: Tensor, x: Tensor, y: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    dy, y = (_kept(_wide(t), dim, x.dim(), keepdim) for t in (dy, y))
    y = y.masked_fill(y == -math.inf, 0)  # a row of -inf: no gradient rather than NaN
    return (dy * torch.exp(_wide(x) - y)).to(x.dtype)


def _mean(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return _wide(x).mean(_dims(dims, x.dim()), keepdim).to(x.dtype) if x.dim() else x.clone()


def _mean_backward(dy: Tensor, sizes: Sequence[int], dims: Sequence[int], keepdim: bool) -> Tensor:
    count = math.prod(sizes[d] for d in _dims(dims, len(sizes)))
    return (_kept(_wide(dy), dims, len(sizes), keepdim) / count).to(dy.dtype).expand(list(sizes)).clone()


def _upsample_linear(x: Tensor, residual: Tensor | None) -> Tensor:
    return _result(reference.upsample_linear_ref(_wide(x), _wide_or_none(residual)), x)


def _upsample_linear_backward(dy: Tensor) -> Tensor:
    """Dim by dim: a position gives three quarters to its two copies, a quarter to their neighbours' far sides."""
    dx = _wide(dy)
    for d in range(2, dy.dim()):
        size = dy.shape[d] // 2
        even, odd = dx.unflatten(d, (size, 2)).unbind(d + 1)
        before = torch.cat((even.narrow(d, 0, 1), odd.narrow(d, 0, size - 1)), d)  # at the edges its own
        after = torch.cat((even.narrow(d, 1, size - 1), odd.narrow(d, size - 1, 1)), d)
        dx = 0.75 * (even + odd) + 0.25 * (before + after)
    return _result(dx, dy)


def _upsample_nearest(x: Tensor, factors: Sequence[int]) -> Tensor:
    y = x
    for d, f in enumerate(factors, 2):
        y = y.unsqueeze(d + 1).expand(*y.shape[: d + 1], f, *y.shape[d + 1 :]).flatten(d, d + 1)
    return _result(y, x)


def _upsample_nearest_backward(dy: Tensor, factors: Sequence[int]) -> Tensor:
    dx = _wide(dy)
    for d, f in enumerate(factors, 2):
        dx = dx.unflatten(d, (dx.shape[d] // f, f)).sum(d + 1)
    return _result(dx, dy)


def _pad_replicate(x: Tensor, pad: Sequence[int]) -> Tensor:
    return _result(reference.pad_replicate_ref(x, pad), x)


def _max_pool(x: Tensor, *window: Any) -> Tensor:
    return _result(reference.max_pool_ref(x, *window), x)


# ----------------------------------------------------------------------------------------------------------------------
# The pipelines, by the ops of their steps


def _conv_mean_fwd(x, weight, bias, num_groups, gn_weight, gn_bias, *rest, **options):  # type: ignore[no-untyped-def]
    *geometry, eps = rest
    return _group_norm_mean_fwd(_OPS.conv3d(x, weight, bias, *geometry, **options), num_groups, gn_weight, gn_bias, eps)


def _conv_relu_norm_fwd(x, weight, bias, num_groups, gn_weight, gn_bias, *rest, **options):  # type: ignore[no-untyped-def]
    *geometry, eps = rest
    c = _OPS.conv_transpose3d(x, weight, bias, *geometry, **options)
    return _group_norm_fwd(c, num_groups, gn_weight, gn_bias, eps, "none", "relu")


def _conv_lse_fwd(x, weight, bias, num_groups, gn_weight, gn_bias, *rest, **options):  # type: ignore[no-untyped-def]
    *geometry, eps = rest
    c = _wide(_OPS.conv2d(x, weight, bias, *geometry, **options))
    y, mean, rstd = _norm(c, num_groups, gn_weight, gn_bias, eps, "tanh+hardswish")
    return torch.logsumexp(c + y, 1, True), mean, rstd


# ----------------------------------------------------------------------------------------------------------------------
# By name


def _first(fwd: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    """A public op of its ``_fwd`` twin."""
    return lambda x, *args, **options: fwd(x, *args, **options)[0].to(x.dtype)


FORMULAS: dict[str, Callable[..., Any]] = {
    **{name: _conv(name) for name in ("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d")},
    "conv_backward": _plain_conv_backward if _BY_PYTORCH else _conv_backward,
    "group_stats": _group_stats,
    "group_stats_backward": _group_stats_backward,
    "group_norm": _first(_group_norm_fwd),
    "group_norm_moments": _group_norm_moments,
    "group_norm_fwd": _group_norm_fwd,
    "group_norm_backward": _group_norm_backward,
    "group_norm_mean": _first(_group_norm_mean_fwd),
    "group_norm_mean_fwd": _group_norm_mean_fwd,
    "group_norm_mean_backward": _group_norm_mean_backward,
    "group_norm_tanh_hardswish_residual_logsumexp_backward": _lse_backward,
    "activation": _activation,
    "activation_backward": _activation_backward,
    "logsumexp": _logsumexp,
    "logsumexp_backward": _logsumexp_backward,
    "mean": _mean,
    "mean_backward": _mean_backward,
    "conv_add": _conv_add,
    "conv_add_moments": lambda *args, **options: _with_moments(_conv_add(*args, **options)),
    "group_norm_conv1x1": _norm_conv1x1,
    "group_norm_conv": _norm_conv,
    "group_norm_conv_moments": lambda *args, **options: _with_moments(_norm_conv(*args, **options)),
    "upsample_linear": _upsample_linear,
    "upsample_linear_backward": _upsample_linear_backward,
    "upsample_nearest": _upsample_nearest,
    "upsample_nearest_backward": _upsample_nearest_backward,
    "pad_replicate": _pad_replicate,
    "max_pool": _max_pool,
    "conv3d_group_norm_mean": _first(_conv_mean_fwd),
    "conv3d_group_norm_mean_fwd": _conv_mean_fwd,
    "conv_transpose3d_relu_group_norm": _first(_conv_relu_norm_fwd),
    "conv_transpose3d_relu_group_norm_fwd": _conv_relu_norm_fwd,
    "conv2d_group_norm_tanh_hardswish_residual_logsumexp": _first(_conv_lse_fwd),
    "conv2d_group_norm_tanh_hardswish_residual_logsumexp_fwd": _conv_lse_fwd,
}
"""By op; each takes every argument."""


# ----------------------------------------------------------------------------------------------------------------------
# Statistics among a backward op's arguments


def _statistics_of(u: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The given statistics, as functions of u. Where eps went into rstd, it is found again."""
    own_mean, variance = _mean_and_variance(_grouped(u, mean.shape[1]), [2])
    eps = (rstd.pow(-2) - variance).detach()
    return own_mean, torch.rsqrt(variance + eps)


def _from_x(at: int, act: int | None = None) -> Callable[[list[Any]], None]:
    """Replaces mean and rstd, the arguments at ``at``, by statistics of x, or of activations of it."""

    def replace(args: list[Any]) -> None:
        u = _wide(args[1])
        if act is not None:
            u = reference.activation_ref(u, args[act])
        args[at : at + 2] = _statistics_of(u, *args[at : at + 2])

    return replace


def _norm_mean_from_x(args: list[Any]) -> None:
    args[2] = _wide(args[1]).flatten(2).mean(2)
    _from_x(3)(args)


_STATISTICS: dict[str, tuple[tuple[int, ...], Callable[[list[Any]], None]]] = {
    "group_norm_backward": ((2, 3), _from_x(2, act=8)),
    "group_norm_mean_backward": ((2, 3, 4), _norm_mean_from_x),
    "group_norm_tanh_hardswish_residual_logsumexp_backward": ((3, 4), _from_x(3)),
}


def formula(name: str, args: Sequence[Any], keywords: dict[str, Any], varies: Callable[[int], bool]) -> Any:
    """The op by its formula, with every argument given. ``varies(i)``: argument i is differentiated.

    The backward of a norm is given statistics that the forward computed from x. Where these vary themselves, they are
    arguments like any other. Where they do not, as a node saved them, they count as what they are, functions of x: as
    constants they would leave a part of the derivative out.
    """
    if name in _STATISTICS:
        positions, replace = _STATISTICS[name]
        if not any(map(varies, positions)):
            args = list(args)
            replace(args)
    return FORMULAS[name](*args, **keywords)
