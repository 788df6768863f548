"""Functions with the arguments of :mod:`torch.nn.functional`, on the kernels of kgopt.

Every function takes fp32, bf16, fp16 or fp64 tensors on CPU or CUDA, contiguous or channels_last, and is differentiable
once (the convolutions twice). Wrong arguments raise ``RuntimeError`` with the argument's name, its value and what was
expected. ``backend`` picks the convolution: ``"auto"`` (what is faster), ``"kgopt"`` or ``"aten"`` (cuDNN);
``allow_tf32=None`` follows ``torch.backends.cudnn``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt import _ops as _ops

Ints = int | Sequence[int]

_OPS = torch.ops.kgopt


def _ints(value: Ints, rank: int) -> Sequence[int]:
    """One number, or a list of one, for every dim, as in torch."""
    if type(value) is tuple and len(value) == rank:
        return value
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def _batched(op: Callable[[Tensor], Tensor], x: Tensor, rank: int) -> Tensor:
    """An unbatched input ``[C, *]`` gets a batch of one, as in torch."""
    return op(x.unsqueeze(0)).squeeze(0) if x.dim() == rank + 1 else op(x)


def _padded(x: Tensor, weight: Tensor, stride: Ints, padding: Any, dilation: Ints, rank: int) -> tuple[Tensor, Any]:
    """``padding`` as numbers; "same" with an odd total pads the far side of x by one more, as torch does."""
    if not isinstance(padding, str):
        return x, _ints(padding, rank)
    if padding == "valid":
        return x, [0] * rank
    if padding != "same":
        raise ValueError(f"padding is {padding!r}, expected 'same', 'valid' or numbers")
    if any(s != 1 for s in _ints(stride, rank)):
        raise RuntimeError(f"stride is {stride}, expected 1 with padding='same'")
    if weight.dim() != rank + 2:
        return x, [0] * rank  # the op says what is wrong with it
    totals = [d * (k - 1) for d, k in zip(_ints(dilation, rank), weight.shape[2:], strict=True)]
    if any(t % 2 for t in totals):
        x = F.pad(x, [side for t in reversed(totals) for side in (0, t % 2)])
    return x, [t // 2 for t in totals]


_CONVS = {name: (getattr(_OPS, name), _ops.direct(name)) for name in _ops.CONVS}


def _conv_op(name: str, *tensors: Tensor | None) -> Any:
    """The op, spared the dispatcher's way through Python where that is all the same."""
    return _CONVS[name][_ops.are_plain(*tensors)]


def _conv(
    name: str,
    rank: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Any,
    dilation: Ints,
    groups: int,
    backend: str,
    allow_tf32: bool | None,
) -> Tensor:
    options = {} if backend == "auto" and allow_tf32 is None else {"backend": backend, "allow_tf32": allow_tf32}

    def run(batch: Tensor) -> Tensor:
        batch, numbers = _padded(batch, weight, stride, padding, dilation, rank)
        lists = _ints(stride, rank), numbers, _ints(dilation, rank)
        y: Tensor = _conv_op(name, batch, weight, bias)(batch, weight, bias, *lists, groups, **options)
        return y

    return _batched(run, x, rank)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    backend: str = "auto",
    allow_tf32: bool | None = None,
) -> Tensor:
    """2D convolution of ``x [N, C, H, W]`` or ``[C, H, W]``; see :func:`torch.nn.functional.conv2d`."""
    return _conv("conv2d", 2, x, weight, bias, stride, padding, dilation, groups, backend, allow_tf32)


def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    backend: str = "auto",
    allow_tf32: bool | None = None,
) -> Tensor:
    """3D convolution of ``x [N, C, D, H, W]`` or ``[C, D, H, W]``; see :func:`torch.nn.functional.conv3d`."""
    return _conv("conv3d", 3, x, weight, bias, stride, padding, dilation, groups, backend, allow_tf32)


def _conv_transpose(
    name: str,
    rank: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
    backend: str,
    allow_tf32: bool | None,
) -> Tensor:
    lists = [_ints(v, rank) for v in (stride, padding, output_padding)]
    options = {} if backend == "auto" and allow_tf32 is None else {"backend": backend, "allow_tf32": allow_tf32}

    def run(batch: Tensor) -> Tensor:
        op = _conv_op(name, batch, weight, bias)
        y: Tensor = op(batch, weight, bias, *lists, groups, _ints(dilation, rank), **options)
        return y

    return _batched(run, x, rank)


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    backend: str = "auto",
    allow_tf32: bool | None = None,
) -> Tensor:
    """2D transposed convolution; see :func:`torch.nn.functional.conv_transpose2d`."""
    return _conv_transpose(
        "conv_transpose2d",
        2,
        x,
        weight,
        bias,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        backend,
        allow_tf32,
    )


def conv_transpose3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    backend: str = "auto",
    allow_tf32: bool | None = None,
) -> Tensor:
    """3D transposed convolution; see :func:`torch.nn.functional.conv_transpose3d`."""
    return _conv_transpose(
        "conv_transpose3d",
        3,
        x,
        weight,
        bias,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        backend,
        allow_tf32,
    )


def group_stats(x: Tensor, num_groups: int, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Mean and ``1 / sqrt(var + eps)`` of each group of ``x [N, C, *]``: ``[N, G]``, fp32 (fp64 for fp64 x)."""
    return _OPS.group_stats(x, num_groups, eps)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    act: str = "none",
) -> Tensor:
    """``act(GroupNorm(x))`` in one pass after the statistics; :func:`torch.nn.functional.group_norm` with ``act``.

    ``act`` is a ``+``-joined chain of the names in :data:`kgopt.reference.ACTIVATIONS`. The result keeps x's layout.
    """
    return _OPS.group_norm(x, num_groups, weight, bias, eps, act)


def group_norm_mean(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Mean over every dim but batch of ``GroupNorm(x)``: ``[N]``. The normalized tensor is never stored."""
    return _OPS.group_norm_mean(x, num_groups, weight, bias, eps)


def activation(x: Tensor, act: str) -> Tensor:
    """A chain of activations in one pass, such as ``"tanh+hardswish"``."""
    return _OPS.activation(x, act)


def logsumexp(x: Tensor, dim: Ints, keepdim: bool = False) -> Tensor:
    """:func:`torch.logsumexp`, in one read."""
    return _OPS.logsumexp(x, _ints(dim, 1), keepdim)


def mean(x: Tensor, dims: Ints | None = None, keepdim: bool = False) -> Tensor:
    """:func:`torch.mean` over ``dims``, or over all of them."""
    return _OPS.mean(x, [] if dims is None else _ints(dims, 1), keepdim)


def conv3d_group_norm_mean(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_groups: int,
    gn_weight: Tensor | None = None,
    gn_bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    eps: float = 1e-5,
    *,
    backend: str = "auto",
    allow_tf32: bool | None = None,
) -> Tensor:
    """Conv3d, GroupNorm, mean over every dim but batch: ``[N]``.

    On CUDA the convolution's output never reaches memory: the mean after GroupNorm needs its channel means and group
    variances alone. ``groups`` are the convolution's.
    """
    x, numbers = _padded(x, weight, stride, padding, dilation, 3)
    return _OPS.conv3d_group_norm_mean(
        x,
        weight,
        bias,
        num_groups,
        gn_weight,
        gn_bias,
        _ints(stride, 3),
        numbers,
        _ints(dilation, 3),
        groups,
        eps,
        backend=backend,
        allow_tf32=allow_tf32,
    )


def conv_transpose3d_relu_group_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_groups: int,
    gn_weight: Tensor | None = None,
    gn_bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    eps: float = 1e-5,
    *,
    backend: str = "auto",
    allow_tf32: bool | None = None,
) -> Tensor:
    """ConvTranspose3d, ReLU, GroupNorm: ``[N, C, D, H, W]``. ``groups`` are the convolution's."""
    return _OPS.conv_transpose3d_relu_group_norm(
        x,
        weight,
        bias,
        num_groups,
        gn_weight,
        gn_bias,
        _ints(stride, 3),
        _ints(padding, 3),
        _ints(output_padding, 3),
        groups,
        _ints(dilation, 3),
        eps,
        backend=backend,
        allow_tf32=allow_tf32,
    )


def conv2d_group_norm_tanh_hardswish_residual_logsumexp(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_groups: int,
    gn_weight: Tensor | None = None,
    gn_bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    eps: float = 1e-5,
    *,
    backend: str = "auto",
    allow_tf32: bool | None = None,
) -> Tensor:
    """``c = Conv2d(x)``, ``r = c + hardswish(tanh(GroupNorm(c)))``, logsumexp over channels: ``[N, 1, H, W]``.

    On CUDA the convolution runs twice, for its statistics and into the reduction, and its output is never stored.
    ``groups`` are the convolution's.
    """
    x, numbers = _padded(x, weight, stride, padding, dilation, 2)
    return _OPS.conv2d_group_norm_tanh_hardswish_residual_logsumexp(
        x,
        weight,
        bias,
        num_groups,
        gn_weight,
        gn_bias,
        _ints(stride, 2),
        numbers,
        _ints(dilation, 2),
        groups,
        eps,
        backend=backend,
        allow_tf32=allow_tf32,
    )
