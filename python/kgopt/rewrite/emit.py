"""A chain as calls: of kgopt's ops, or of PyTorch's own functions.

``call(function, *args)`` computes it at once (eager) or records a node (graphs), so both front ends emit the same ops.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt import ops as ops
from kgopt.reference import torch_activation
from kgopt.rewrite.chain import CONV_LSE, CONV_MEAN, CONV_RELU_NORM, Chain
from kgopt.torch_private import without_autocast_on_cuda

_OPS = torch.ops.kgopt
Call = Callable[..., Any]

_TORCH_CONVS: dict[str, Callable[..., Tensor]] = {
    "conv2d": F.conv2d,
    "conv3d": F.conv3d,
    "conv_transpose2d": F.conv_transpose2d,
    "conv_transpose3d": F.conv_transpose3d,
}


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


@dataclass
class NormArgs:
    """The arguments of a norm beside x."""

    num_groups: int
    weight: Any
    bias: Any
    eps: float


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
    n = norm
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
    fold = fold_pre and chain.pre != "none" and not mean_of_all
    if chain.pre != "none" and not fold:
        x = call(_OPS.activation.default, x, chain.pre)
    if mean_of_all:
        return call(_OPS.group_norm_mean.default, x, n.num_groups, n.weight, n.bias, n.eps)
    if fold:
        op = _OPS.group_norm_fwd.default
        y = call(operator.getitem, call_norm(op, x, n.num_groups, n.weight, n.bias, n.eps, chain.post, chain.pre), 0)
    else:
        y = call_norm(_OPS.group_norm.default, x, n.num_groups, n.weight, n.bias, n.eps, chain.post)
    if chain.reduce:
        dims = list(range(1, rank)) if chain.dims is None else list(chain.dims)
        y = call(_OPS.mean.default if chain.reduce == "mean" else _OPS.logsumexp.default, y, dims, chain.keepdim)
    return y


def run_torch(chain: Chain, x: Tensor, conv: ConvArgs | None, norm: NormArgs) -> Tensor:
    """The chain in PyTorch's own functions: what is measured against, and, in float64, the reference."""
    if conv is not None:
        if conv.output_padding is None:
            tail: tuple[Any, ...] = (conv.dilation, conv.groups)
        else:
            tail = (conv.output_padding, conv.groups, conv.dilation)
        x = _TORCH_CONVS[chain.conv](x, conv.weight, conv.bias, conv.stride, conv.padding, *tail)
    y = x
    y = torch_activation(y, chain.pre)
    if chain.norm == "instance":
        y = F.instance_norm(y, weight=norm.weight, bias=norm.bias, eps=norm.eps)
    else:
        y = F.group_norm(y, norm.num_groups, norm.weight, norm.bias, norm.eps)
    y = torch_activation(y, chain.post)
    if chain.residual:
        y = x + y
    if chain.reduce:
        dims = list(range(1, y.dim())) if chain.dims is None else list(chain.dims)
        y = torch.mean(y, dims, chain.keepdim) if chain.reduce == "mean" else torch.logsumexp(y, dims, chain.keepdim)
    return y
