"""Functions with the arguments of :mod:`torch.nn.functional`, on the kernels of kgopt.

Every function takes fp32, bf16, fp16 or fp64 tensors on CPU or CUDA, contiguous or channels_last, and is differentiable
to any order, in reverse and forward mode: kernels compute first derivatives in reverse mode, PyTorch's functions all
others. Wrong arguments raise ``RuntimeError`` with the argument's name, its value and what was expected. ``backend``
picks the convolution: ``"auto"`` (what is faster), ``"kgopt"`` or ``"aten"`` (cuDNN); ``allow_tf32=None`` follows
``torch.backends.cudnn``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt import ops as ops
from kgopt._scale_shift import arranged, by_sample, for_each_sample, is_number, rows, slopes

Ints = int | Sequence[int]

_activation = ops.from_python("activation")
_channel_norm = ops.from_python("channel_norm")
_conv2d = ops.from_python("conv2d")
_conv3d = ops.from_python("conv3d")
_conv3d_group_norm_mean = ops.from_python("conv3d_group_norm_mean")
_conv_transpose2d = ops.from_python("conv_transpose2d")
_conv_transpose3d = ops.from_python("conv_transpose3d")
_conv_transpose3d_relu_group_norm = ops.from_python("conv_transpose3d_relu_group_norm")
_conv_lse = ops.from_python("conv2d_group_norm_tanh_hardswish_residual_logsumexp")
_conv_add = ops.from_python("conv_add")
_group_norm = ops.from_python("group_norm")
_group_norm_add = ops.from_python("group_norm_add")
_group_norm_by_sample = ops.from_python("group_norm_by_sample")
_group_norm_conv = ops.from_python("group_norm_conv")
_group_norm_prelu = ops.from_python("group_norm_prelu")
_group_norm_mean = ops.from_python("group_norm_mean")
_group_stats = ops.from_python("group_stats")
_logsumexp = ops.from_python("logsumexp")
_mean = ops.from_python("mean")


def _ints(value: Ints, rank: int) -> Sequence[int]:
    """One number, or a list of one, for every dim, as in torch."""
    if isinstance(value, int):
        return [value] * rank
    return value if len(value) > 1 or rank == 1 else list(value) * rank


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


def _options(backend: str, allow_tf32: bool | None) -> dict[str, Any]:
    """An op's keywords, as far as they are not its defaults: each takes time at every step of a call."""
    return {} if backend == "auto" and allow_tf32 is None else {"backend": backend, "allow_tf32": allow_tf32}


def _conv(
    op: Any,
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
    unbatched = x.dim() == rank + 1  # [C, *] gets a batch of one, as in torch
    if unbatched:
        x = x.unsqueeze(0)
    x, numbers = _padded(x, weight, stride, padding, dilation, rank)
    lists = (_ints(stride, rank), numbers, _ints(dilation, rank))
    y: Tensor = op(x, weight, bias, *lists, groups, **_options(backend, allow_tf32))
    return y.squeeze(0) if unbatched else y


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
    return _conv(_conv2d, 2, x, weight, bias, stride, padding, dilation, groups, backend, allow_tf32)


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
    return _conv(_conv3d, 3, x, weight, bias, stride, padding, dilation, groups, backend, allow_tf32)


def _conv_transpose(
    op: Any,
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
    unbatched = x.dim() == rank + 1
    if unbatched:
        x = x.unsqueeze(0)
    lists = (_ints(stride, rank), _ints(padding, rank), _ints(output_padding, rank), groups, _ints(dilation, rank))
    y: Tensor = op(x, weight, bias, *lists, **_options(backend, allow_tf32))
    return y.squeeze(0) if unbatched else y


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
    rest = (stride, padding, output_padding, groups, dilation, backend, allow_tf32)
    return _conv_transpose(_conv_transpose2d, 2, x, weight, bias, *rest)


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
    rest = (stride, padding, output_padding, groups, dilation, backend, allow_tf32)
    return _conv_transpose(_conv_transpose3d, 3, x, weight, bias, *rest)


def group_stats(x: Tensor, num_groups: int, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Mean and ``1 / sqrt(var + eps)`` of each group of ``x [N, C, *]``: ``[N, G]``, fp32 (fp64 for fp64 x)."""
    if torch.jit.is_scripting():
        return torch.ops.kgopt.group_stats(x, num_groups, eps)
    return _group_stats(x, num_groups, eps)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    act: str = "none",
    residual: Tensor | None = None,
    slope: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """``act(GroupNorm(x) * (1 + scale) + shift + residual)`` in one pass, what is not given left out.

    ``act`` is a ``+``-joined chain of activations, as ``"silu"`` or ``"leaky_relu(0.2)"``: docs/ops.md, "Pointwise"; or
    ``"prelu"`` with ``slope``, the weight of :func:`torch.nn.functional.prelu`: one, or one a channel.
    ``residual`` has x's shape, dtype and device. ``scale`` and ``shift`` are ``[N, C]`` or ``[1, C]``, perhaps with
    dims of size 1 behind, of any floating dtype: AdaGN (Dhariwal and Nichol 2021), FiLM (Perez et al. 2018). What is
    made of them, ``weight`` and ``bias`` is fp32 (fp64 for fp64 x). The result has x's dtype and layout. Where samples
    differ in scale or shift, residual and PReLU are passes of their own for x that is not contiguous.
    """
    if scale is not None or shift is not None:
        return _scaled_group_norm(x, num_groups, weight, bias, eps, act, residual, slope, scale, shift)
    return _one_group_norm(x, num_groups, weight, bias, eps, act, residual, slope)


def _one_group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    act: str,
    residual: Tensor | None,
    slope: Tensor | None,
) -> Tensor:
    """By one op."""
    if slope is not None:
        if act != "prelu":
            raise ValueError(f"act is '{act}', expected 'prelu' with a slope")
        if torch.jit.is_scripting():
            return torch.ops.kgopt.group_norm_prelu(x, slope, num_groups, weight, bias, eps, residual)
        return _group_norm_prelu(x, slope, num_groups, weight, bias, eps, residual)
    if act == "prelu":
        raise ValueError("slope is None, expected a tensor of one slope or one a channel with act 'prelu'")
    if residual is not None:
        if torch.jit.is_scripting():
            return torch.ops.kgopt.group_norm_add(x, residual, num_groups, weight, bias, eps, act)
        return _group_norm_add(x, residual, num_groups, weight, bias, eps, act)
    if torch.jit.is_scripting():
        return torch.ops.kgopt.group_norm(x, num_groups, weight, bias, eps, act)
    return _group_norm(x, num_groups, weight, bias, eps, act)


def _scaled_group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    act: str,
    residual: Tensor | None,
    slope: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
) -> Tensor:
    """With a scale or a shift: :mod:`kgopt._scale_shift` says how."""
    if x.dim() < 2:
        raise RuntimeError(f"group_norm: x has shape {list(x.shape)}, expected [N, C, *]")
    channels = x.shape[1]
    if num_groups < 1 or channels % num_groups != 0:
        raise RuntimeError(f"group_norm: num_groups is {num_groups}, expected a divisor of {channels} channels")
    _check_per_sample("scale", scale, x)
    _check_per_sample("shift", shift, x)
    _check_per_channel("weight", weight, x)
    _check_per_channel("bias", bias, x)
    if weight is not None and bias is not None and weight.dtype != bias.dtype and not _casts(x):
        raise RuntimeError(f"group_norm: bias has dtype {bias.dtype}, expected {weight.dtype}, the dtype of weight")
    if residual is not None and residual.shape != x.shape:
        raise RuntimeError(f"group_norm: residual has shape {list(residual.shape)}, expected {list(x.shape)}")
    if residual is not None and residual.dtype != x.dtype and not _casts(x):
        raise RuntimeError(f"group_norm: residual has dtype {residual.dtype}, expected {x.dtype}, the dtype of x")
    factor = None if scale is None else 1 + scale.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    count = rows(factor, shift)
    if count == 1:
        x, num_groups, weight, bias = arranged(x, num_groups, weight, bias, factor, shift)
        return _one_group_norm(x, num_groups, weight, bias, eps, act, residual, slope)
    if is_number(count) and x.is_contiguous() and x.numel() > 0:
        u, groups, w, b = arranged(x, num_groups, weight, bias, factor, shift)
        r = None if residual is None else by_sample(residual)
        slope = None if slope is None else slopes(slope, x, u)
        return _one_group_norm(u, groups, w, b, eps, act, r, slope).reshape(x.shape)
    factors, shifts = for_each_sample(x, weight, bias, factor, shift)
    fused = "none" if residual is not None or act == "prelu" else act
    if torch.jit.is_scripting():
        y = torch.ops.kgopt.group_norm_by_sample(x, factors, shifts, num_groups, eps, fused)
    else:
        y = _group_norm_by_sample(x, factors, shifts, num_groups, eps, fused)
    if residual is not None:
        y = y + residual
    if act == "prelu" and slope is not None:
        return F.prelu(y, slope.to(y.dtype))
    return y if act == fused else activation(y, act)


def _check_per_sample(name: str, t: Tensor | None, x: Tensor) -> None:
    if t is None:
        return
    n, channels = x.shape[0], x.shape[1]
    fits = t.dim() >= 2 and t.numel() == t.shape[0] * t.shape[1] and t.shape[1] == channels
    if not fits or (t.shape[0] != n and t.shape[0] != 1):
        raise RuntimeError(
            f"group_norm: {name} has shape {list(t.shape)}, expected [{n}, {channels}] or [1, {channels}]"
        )
    if not t.is_floating_point():
        raise RuntimeError(f"group_norm: {name} has dtype {t.dtype}, expected a floating one")


def _casts(x: Tensor) -> bool:
    """Whether autocast brings a norm's tensors to fp32, which it does on CUDA alone."""
    return x.is_cuda and torch.is_autocast_enabled()


def _check_per_channel(name: str, t: Tensor | None, x: Tensor) -> None:
    """As the op does: it sees what the parameters were folded into, which has x's statistics' dtype."""
    if t is None:
        return
    if t.dim() != 1 or t.shape[0] != x.shape[1]:
        raise RuntimeError(f"group_norm: {name} has shape {list(t.shape)}, expected [{x.shape[1]}]")
    narrow = x.dtype != torch.float64 and t.dtype != torch.float64
    mixed = narrow and (t.dtype == torch.float32 or (_casts(x) and t.is_floating_point()))
    if t.dtype != x.dtype and not mixed:
        raise RuntimeError(f"group_norm: {name} has dtype {t.dtype}, expected {x.dtype} (the dtype of x) or float32")


def explain_group_norm(
    x: Tensor,
    num_groups: int,
    act: str = "none",
    pre_act: str = "none",
    backward: bool = False,
    channels_last: bool | None = None,
) -> str:
    """Which kernels run ``act(GroupNorm(pre_act(x)))`` or its backward, by name, and why not the other families.

    Nothing runs. Only x's sizes, dtype, memory format and device count, so that ``torch.empty(()).expand(shape)`` will
    do; ``channels_last`` then stands for its memory format. ``act`` may be ``"prelu"``, of one slope.
    """
    op = torch.ops.kgopt.explain_group_norm
    if act == "prelu":  # whose backward is a pass of its own and the norm's without activation
        act = "none" if backward else "leaky_relu"
    return str(op(x, num_groups, act, pre_act, backward, channels_last, reasons=True))


def channel_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    kind: str = "rms",
    eps: float = 1e-5,
    act: str = "none",
) -> Tensor:
    """A norm over the channels of ``[N, C, *]``, at each position, and activations, with one read of x.

    ``kind`` is ``"rms"`` (``x * rsqrt(mean(x**2, 1) + eps)``), ``"l2"`` (``F.normalize(x, dim=1, eps=eps) * sqrt(C)``)
    or ``"layer"`` (LayerNorm over dim 1); ``weight`` and ``bias`` are ``[C]``. The result keeps x's layout.
    """
    if torch.jit.is_scripting():
        return torch.ops.kgopt.channel_norm(x, weight, bias, kind, eps, act)
    return _channel_norm(x, weight, bias, kind, eps, act)


def group_norm_mean(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Mean over every dim but batch of ``GroupNorm(x)``: ``[N]``. The normalized tensor is never stored."""
    if torch.jit.is_scripting():
        return torch.ops.kgopt.group_norm_mean(x, num_groups, weight, bias, eps)
    return _group_norm_mean(x, num_groups, weight, bias, eps)


def group_norm_conv(
    x: Tensor,
    num_groups: int,
    gn_weight: Tensor | None,
    gn_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    eps: float = 1e-5,
    gn_act: str = "none",
    residual: Tensor | None = None,
    divisor: float = 1.0,
    act: str = "none",
    *,
    moments: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``act((conv(gn_act(GroupNorm(x))) + residual) / divisor)``: 2D of ``x [N, C, H, W]``, 3D of ``[N, C, D, H, W]``.

    ``groups`` are the convolution's, ``moments`` mean and variance of every channel of x ``[N, C, 2]`` where these are
    known. Where a kernel normalizes what it loads, the normalized tensor is never stored; a gradient computes it again.
    """
    rank = x.dim() - 2
    numbers: Any = padding
    norm = (num_groups, gn_weight, gn_bias, eps, gn_act)
    if isinstance(padding, str):
        padded, numbers = _padded(x, weight, stride, padding, dilation, rank)
        if padded is not x:  # zeros around what the norm gives, not around x
            z, _ = _padded(group_norm(x, *norm), weight, stride, padding, dilation, rank)
            rest = ([1] * rank, numbers, _ints(dilation, rank), [0] * rank, groups, False, divisor, act)
            return _conv_add(z, weight, bias, residual, *rest, backend=ops.conv_backend(backend))
    geometry = (_ints(stride, rank), _ints(numbers, rank), _ints(dilation, rank), [0] * rank, groups, False)
    return _group_norm_conv(x, moments, *norm, weight, bias, residual, *geometry, divisor, act, backend=backend)


def activation(x: Tensor, act: str) -> Tensor:
    """A chain of activations in one pass, such as ``"tanh+hardswish"``."""
    if torch.jit.is_scripting():
        return torch.ops.kgopt.activation(x, act)
    return _activation(x, act)


def logsumexp(x: Tensor, dim: Ints, keepdim: bool = False) -> Tensor:
    """:func:`torch.logsumexp`, in one read."""
    return _logsumexp(x, _ints(dim, 1), keepdim)


def mean(x: Tensor, dims: Ints | None = None, keepdim: bool = False) -> Tensor:
    """:func:`torch.mean` over ``dims``, or over all of them."""
    return _mean(x, [] if dims is None else _ints(dims, 1), keepdim)


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
    x, p = _padded(x, weight, stride, padding, dilation, 3)
    s, d = _ints(stride, 3), _ints(dilation, 3)
    return _conv3d_group_norm_mean(
        x, weight, bias, num_groups, gn_weight, gn_bias, s, p, d, groups, eps, backend=backend, allow_tf32=allow_tf32
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
    s, p, o, d = _ints(stride, 3), _ints(padding, 3), _ints(output_padding, 3), _ints(dilation, 3)
    return _conv_transpose3d_relu_group_norm(
        x, weight, bias, num_groups, gn_weight, gn_bias, s, p, o, groups, d, eps, backend=backend, allow_tf32=allow_tf32
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
    x, p = _padded(x, weight, stride, padding, dilation, 2)
    s, d = _ints(stride, 2), _ints(dilation, 2)
    return _conv_lse(
        x, weight, bias, num_groups, gn_weight, gn_bias, s, p, d, groups, eps, backend=backend, allow_tf32=allow_tf32
    )
