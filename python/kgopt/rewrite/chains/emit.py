"""A chain as calls: of kgopt's ops, or of PyTorch's own functions.

``call(function, *args)`` computes it at once (eager) or records a node (graphs), so both front ends emit the same ops.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt import ops as ops
from kgopt._scale_shift import arranged, by_sample, for_each_sample, is_number, rows, slopes
from kgopt.reference import torch_activation
from kgopt.rewrite.chains.chain import CHANNELS, CONV_LSE, CONV_MEAN, CONV_RELU_NORM, WRITTEN, Chain
from kgopt.rewrite.formulas import Formula
from kgopt.torch_private import without_autocast_on_cuda

_OPS = torch.ops.kgopt
Call = Callable[..., Any]

TORCH_CONVS: dict[str, Callable[..., Tensor]] = {
    "conv2d": F.conv2d,
    "conv3d": F.conv3d,
    "conv_transpose2d": F.conv_transpose2d,
    "conv_transpose3d": F.conv_transpose3d,
}


def padding_in_numbers(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> Any:
    """What "same" or "valid" stands for; None where one side is padded more than the other. Numbers are themselves."""
    if not isinstance(padding, str):
        return padding
    totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    return None if any(t % 2 for t in totals) else [t // 2 for t in totals]


def numbers(value: Any, rank: int) -> tuple[int, ...] | None:
    """One number, or a list of one, for every dim; None where it is something else."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    values = values * rank if len(values) == 1 else values
    return values if len(values) == rank and all(type(v) is int for v in values) else None


@dataclass
class ConvArgs:
    """The arguments of a convolution beside x; numbers have one entry a spatial dim."""

    weight: Any
    bias: Any
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    output_padding: Sequence[int] | None = None  # of a transposed one


@dataclass(slots=True)
class NormArgs:
    """The arguments of a norm beside x."""

    num_groups: int  # of a norm over channels 0
    weight: Any
    bias: Any
    eps: float
    # Of a norm over channels: numbers that its code multiplies with, the dim of channels, and the order of dims in
    # which PyTorch's result is contiguous; None: it lies as x does.
    factor: float = 1.0
    bias_factor: float = 1.0
    axis: int = 1
    lies: tuple[int, ...] | None = None
    slope: Any = None  # of the PReLU behind it
    multiplier: Any = None  # one value a sample and channel, or a map, that its result is multiplied with
    addend: Any = None  # and that is added then
    is_written: bool = (
        False  # code writes a norm in groups out: weight and bias have any shape, and numbers beside them
    )


def written(weight: Any, bias: Any, formula: Formula, channels: int) -> NormArgs:
    """Those of a norm in groups that code writes out."""
    groups = channels if formula.groups < 0 else formula.groups
    factors = formula.factor, formula.bias_factor
    return NormArgs(groups, weight, bias, formula.eps, *factors, lies=formula.lies, is_written=True)


def flattened(x: Tensor, norm: NormArgs) -> NormArgs:
    """Those of a norm in groups that code writes out, with weight and bias as the ops want them."""
    return replace(norm, **_affine_of(call_now, x, norm), factor=1.0, bias_factor=1.0)


def call_now(function: Callable[..., Any], *args: Any) -> Any:
    """The eager ``call``."""
    return function(*args)


def without_autocast(function: Callable[..., Any], *args: Any) -> Any:
    """A ``call`` whose ops keep the dtypes of what they are given, on CUDA."""
    if torch.compiler.is_compiling():
        with torch.autocast("cuda", enabled=False):
            return function(*args)
    with without_autocast_on_cuda():
        return function(*args)


def emit_kgopt(
    chain: Chain,
    call: Call,
    x: Any,
    rank: int,
    conv: ConvArgs | None,
    norm: NormArgs,
    fold_pre: bool = True,
    call_norm: Call | None = None,
    added: Any = None,
) -> Any:
    """The chain in kgopt's ops.

    ``fold_pre``: the activations before the norm run inside it; ``call_norm``: another ``call`` for the norm;
    ``added``: what a chain with a sum adds.
    """
    n = replace(norm, **_affine_of(call, x, norm)) if norm.is_written else norm
    if chain.norm in CHANNELS:
        return _emit_channel_norm(chain, call, call_norm or call, x, n)
    if chain.maps:
        op = _OPS.group_norm_maps.default
        maps = n.multiplier, n.addend
        return (call_norm or call)(op, x, None, *maps, n.num_groups, n.weight, n.bias, n.eps, chain.post)
    if chain.is_modulated and chain.added:
        affine = n.num_groups, n.weight, n.bias, n.eps
        return (call_norm or call)(modulated_sum, x, added, *affine, chain.post, n.multiplier, n.addend)
    if chain.is_modulated:
        rest = (n.num_groups, n.weight, n.bias, n.eps, chain.post, n.slope, n.multiplier, n.addend)
        return (call_norm or call)(modulated_norm, x, *rest)
    if chain.added and chain.has_prelu:
        op = _OPS.group_norm_prelu.default
        return (call_norm or call)(op, x, n.slope, n.num_groups, n.weight, n.bias, n.eps, added)
    if chain.added:
        op = _OPS.group_norm_add.default
        return (call_norm or call)(op, x, added, n.num_groups, n.weight, n.bias, n.eps, chain.post)
    if chain.fused_op and conv is not None:
        shared = (x, conv.weight, conv.bias, n.num_groups, n.weight, n.bias, conv.stride, conv.padding)
        if chain.fused_op == CONV_MEAN:
            return call(_OPS.conv3d_group_norm_mean.default, *shared, conv.dilation, conv.groups, n.eps)
        if chain.fused_op == CONV_RELU_NORM:
            op = _OPS.conv_transpose3d_relu_group_norm.default
            return call(op, *shared, conv.output_padding, conv.groups, conv.dilation, n.eps)
        assert chain.fused_op == CONV_LSE
        op = _OPS.conv2d_group_norm_tanh_hardswish_residual_logsumexp.default
        return call(op, *shared, conv.dilation, conv.groups, n.eps)
    if conv is not None:
        op = getattr(_OPS, chain.conv).default
        if conv.output_padding is None:
            x = call(op, x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
        else:
            tail = (conv.output_padding, conv.groups, conv.dilation)
            x = call(op, x, conv.weight, conv.bias, conv.stride, conv.padding, *tail)
    call_norm = call_norm or call
    mean_of_all = chain.reduce == "mean" and chain.reduces_all(rank) and chain.post == "none" and not chain.keepdim
    fold = fold_pre and chain.pre != "none" and not mean_of_all and not chain.has_prelu
    if chain.pre != "none" and not fold:
        x = call(_OPS.activation.default, x, chain.pre)
    if mean_of_all:
        return call(_OPS.group_norm_mean.default, x, n.num_groups, n.weight, n.bias, n.eps)
    if chain.has_prelu:
        y = call_norm(_OPS.group_norm_prelu.default, x, n.slope, n.num_groups, n.weight, n.bias, n.eps)
    elif fold:
        op = _OPS.group_norm_fwd.default
        y = call(operator.getitem, call_norm(op, x, n.num_groups, n.weight, n.bias, n.eps, chain.post, chain.pre), 0)
    else:
        y = call_norm(_OPS.group_norm.default, x, n.num_groups, n.weight, n.bias, n.eps, chain.post)
    if chain.reduce:
        dims = list(range(1, rank)) if chain.dims is None else list(chain.dims)
        y = call(_OPS.mean.default if chain.reduce == "mean" else _OPS.logsumexp.default, y, dims, chain.keepdim)
    return y


def modulated_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    act: str,
    slope: Tensor | None,
    factor: Tensor | None,
    shift: Tensor | None,
    *,
    group_norm: Any = _OPS.group_norm.default,
    group_norm_prelu: Any = _OPS.group_norm_prelu.default,
    group_norm_by_sample: Any = _OPS.group_norm_by_sample.default,
) -> Tensor:
    """``act(GroupNorm(x) * factor + shift)``, where factor and shift are ``[1 or N, C, 1, ...]``.

    ``slope`` is that of ``"prelu"``, which has a pass of its own where several rows meet an x that is not contiguous.
    Where a compiler does not know the number of rows, what is behind the norm is the compiler's.
    """
    if not is_number(rows(factor, shift)):
        y = group_norm(x, num_groups, weight, bias, eps)
        y = y if factor is None else y * factor
        y = y if shift is None else y + shift
        return torch_activation(y, act) if slope is None else F.prelu(y, slope)
    if rows(factor, shift) > 1 and not x.is_contiguous():
        given = (x, *for_each_sample(x, weight, bias, factor, shift), num_groups, eps)
        if slope is None:
            return group_norm_by_sample(*given, act)  # type: ignore[no-any-return]
        return F.prelu(group_norm_by_sample(*given, "none"), slope)
    u, groups, w, b = arranged(x, num_groups, weight, bias, factor, shift)
    if slope is None:
        y = group_norm(u, groups, w, b, eps, act)
    else:
        y = group_norm_prelu(u, slopes(slope, x, u), groups, w, b, eps)
    return y if u is x else y.reshape(x.shape)  # type: ignore[no-any-return]


def modulated_sum(
    x: Tensor,
    other: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    act: str,
    factor: Tensor | None,
    shift: Tensor | None,
    *,
    group_norm_add: Any = _OPS.group_norm_add.default,
) -> Tensor:
    """``act(GroupNorm(x) * factor + shift + other)``, with factor and shift as of :func:`modulated_norm`."""
    count = rows(factor, shift)
    if not is_number(count) or (count > 1 and not x.is_contiguous()):
        y = modulated_norm(x, num_groups, weight, bias, eps, "none", None, factor, shift)
        return torch_activation(y + other, act)
    u, groups, w, b = arranged(x, num_groups, weight, bias, factor, shift)
    y = group_norm_add(u, other if u is x else by_sample(other), groups, w, b, eps, act)
    return y if u is x else y.reshape(x.shape)  # type: ignore[no-any-return]


def modulated_norm_without_autocast(*args: Any) -> Tensor:
    """:func:`modulated_norm`, whose ops keep x's dtype: captured graphs name functions, and hold none as arguments."""
    return without_autocast(modulated_norm, *args)  # type: ignore[no-any-return]


def _emit_channel_norm(chain: Chain, call: Call, call_norm: Call, x: Any, n: NormArgs) -> Any:
    weight, bias = _affine_of(call, x, n).values()
    x = x if n.axis == 1 else call(torch.movedim, x, n.axis, 1)
    y = call_norm(_OPS.channel_norm.default, x, weight, bias, chain.norm, n.eps, chain.post)
    y = y if n.axis == 1 else call(torch.movedim, y, 1, n.axis)
    return y if n.lies is None else call(_lying, y, n.lies)


def _affine_of(call: Call, x: Any, n: NormArgs) -> dict[str, Any]:
    """Weight and bias as the ops want them, with the numbers that the code multiplies with."""
    wide = n.factor != 1 or n.bias_factor != 1
    weight = None if n.weight is None else call(_flat, n.weight, n.factor, wide)
    if n.weight is None and n.factor != 1:
        weight = call(_filled, x, n.axis, n.factor)
    bias = None if n.bias is None else call(_flat, n.bias, n.bias_factor, wide)
    return {"weight": weight, "bias": bias}


def _flat(p: Tensor, factor: float, wide: bool) -> Tensor:
    """A parameter with one value a channel as the op wants it, times a number."""
    p = p if p.dim() == 1 else p.reshape(-1)
    if wide and p.dtype is not torch.float64:
        p = p.float()
    return p if factor == 1 else p * factor


def _filled(x: Tensor, axis: int, number: float) -> Tensor:
    dtype = x.dtype if x.dtype is torch.float64 else torch.float32
    return torch.full((x.shape[axis],), number, dtype=dtype, device=x.device)


def _lying(y: Tensor, order: tuple[int, ...]) -> Tensor:
    """y, contiguous in another order of its dims."""
    back = [order.index(d) for d in range(len(order))]
    return y.permute(order).contiguous().permute(back)


def _torch_channel_norm(x: Tensor, n: NormArgs, kind: str) -> Tensor:
    """A norm over channels as models write it."""
    channels = x.shape[n.axis]
    if n.lies is not None and n.axis == 1 and kind == "layer":
        weight, bias = (None if p is None else p.reshape(-1).to(x.dtype) for p in (n.weight, n.bias))
        if n.factor == n.bias_factor == 1:
            return F.layer_norm(x.movedim(1, -1), (channels,), weight, bias, n.eps).movedim(-1, 1)
    shape = [1] * x.dim()
    shape[n.axis] = channels
    half = x.dtype in (torch.bfloat16, torch.float16)
    u = x.float() if half else x
    if kind == "layer":
        u = u - u.mean(n.axis, keepdim=True)
    if kind == "l2":
        y = F.normalize(u, dim=n.axis, eps=n.eps).to(x.dtype) * (channels**0.5 * n.factor)
    else:
        y = u * torch.rsqrt(u.square().mean(n.axis, keepdim=True) + n.eps)
        y = y.to(x.dtype) if n.factor == 1 else y.to(x.dtype) * n.factor
    if n.weight is not None:
        y = y * n.weight.reshape(shape)
    if n.bias is not None:
        y = y + n.bias.reshape(shape) * n.bias_factor
    return y.to(x.dtype)


def _torch_written_norm(x: Tensor, n: NormArgs) -> Tensor:
    """A norm in groups as models write it."""
    u = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    u = u.reshape(x.shape[0], n.num_groups, -1) if n.num_groups != x.shape[1] else u
    dims = list(range(2, u.dim()))
    u = u - u.mean(dims, keepdim=True)
    y = (u * torch.rsqrt(u.square().mean(dims, keepdim=True) + n.eps)).reshape(x.shape).to(x.dtype)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    y = y if n.factor == 1 else y * n.factor
    y = y if n.weight is None else y * n.weight.reshape(shape)
    return (y if n.bias is None else y + n.bias.reshape(shape) * n.bias_factor).to(x.dtype)


def run_torch(chain: Chain, x: Tensor, conv: ConvArgs | None, norm: NormArgs) -> Tensor:
    """The chain in PyTorch's own functions: what is measured against, and, in float64, the reference."""
    if conv is not None:
        if conv.output_padding is None:
            tail: tuple[Any, ...] = (conv.dilation, conv.groups)
        else:
            tail = (conv.output_padding, conv.groups, conv.dilation)
        x = TORCH_CONVS[chain.conv](x, conv.weight, conv.bias, conv.stride, conv.padding, *tail)
    y = x
    y = torch_activation(y, chain.pre)
    if norm.is_written:
        y = _torch_written_norm(y, norm)
    elif chain.norm in CHANNELS:
        y = _torch_channel_norm(y, norm, chain.norm)
    elif chain.norm == "instance":
        y = F.instance_norm(y, weight=norm.weight, bias=norm.bias, eps=norm.eps)
    else:
        y = _torch_group_norm(y, norm)
    y = F.prelu(y, norm.slope) if chain.has_prelu else torch_activation(y, chain.post)
    if chain.residual:
        y = x + y
    if chain.reduce:
        dims = list(range(1, y.dim())) if chain.dims is None else list(chain.dims)
        y = torch.mean(y, dims, chain.keepdim) if chain.reduce == "mean" else torch.logsumexp(y, dims, chain.keepdim)
    return y


def _torch_group_norm(x: Tensor, norm: NormArgs) -> Tensor:
    """Half precision beside float32 parameters: as the classes do that compute in float32."""
    is_mixed = any(p is not None and p.dtype is not x.dtype for p in (norm.weight, norm.bias))
    given = x.float() if is_mixed and not torch.is_autocast_enabled(x.device.type) else x
    y = F.group_norm(given, norm.num_groups, norm.weight, norm.bias, norm.eps)
    return y if given is x else y.to(x.dtype)


def as_torch_is_contiguous(chain: Chain, device: torch.device) -> bool:
    """Where PyTorch gives a contiguous tensor though x is channels_last, and kgopt would keep channels_last."""
    if chain.norm in (*CHANNELS, WRITTEN):
        return False  # emit_kgopt sees to it, or code that is written out keeps the format
    return not chain.reduce and (chain.norm == "instance" or device.type == "cuda")


def as_torch(chain: Chain, x: Tensor, y: Tensor) -> Tensor:
    """The result in the memory format that PyTorch's own modules give."""
    if not as_torch_is_contiguous(chain, y.device) or (not torch.compiler.is_compiling() and y.is_contiguous()):
        return y
    return y.contiguous()
