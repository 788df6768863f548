"""What each op means, in plain PyTorch.

Computed in the dtype of the inputs: pass float64 for an oracle. Tests compare every kernel with these functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt import _acts
from kgopt._layout import memory_format


def _clamp(x: Tensor, low: float, high: float) -> Tensor:
    """An infinite bound is none, which makes a difference in the gradient at infinity."""
    bounds = [None if math.isinf(bound) else bound for bound in (low, high)]
    return x if bounds == [None, None] else torch.clamp(x, *bounds)


def _clamp_that_stops(x: Tensor, low: float, high: float) -> Tensor:
    """The gradient at a bound is 0, as PyTorch's from 2.14 on; it was 1."""
    y = _clamp(x, low, high)
    for bound in (low, high):
        if not math.isinf(bound):
            y = torch.where(x == bound, y.detach(), y)
    return y


TORCH_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "relu6": F.relu6,
    "selu": F.selu,
    "celu": F.celu,
    "clamp": _clamp,
    "threshold": F.threshold,
    "hardsigmoid": F.hardsigmoid,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "add": torch.add,
    "mul": torch.mul,
}
"""PyTorch's function for each activation: of x and the parameters."""

_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    **TORCH_ACTIVATIONS,
    # As their documentation has it: on CUDA PyTorch multiplies by 1/6 rounded to float, in double too.
    "hardswish": lambda x: x * F.relu6(x + 3) / 6,
    "hardsigmoid": lambda x: F.relu6(x + 3) / 6,
    "clamp": _clamp_that_stops,
}

ACTIVATIONS = _acts.ACTIVATIONS
"""Names that an ``act`` chain may use without parameters."""

PARAMETRIZED = (
    *("leaky_relu(0.2)", "leaky_relu(-1.5)", "elu(0.7)", "celu(1.5)", "softplus(2,15)", "hardtanh(-2,3)"),
    *("clamp(-0.5,2)", "clamp(0.25,inf)", "threshold(0.1,20)", "softshrink(0.3)", "hardshrink(0.8)", "add(-0.75)"),
    "mul(1.7)",
)
"""An example or two of each that takes parameters, for tests and the search."""


def activation_ref(x: Tensor, act: str) -> Tensor:
    """A ``+``-joined chain of activations, applied from left to right."""
    for name, parameters in _acts.parse(act):
        x = _ACTIVATIONS[name](x, *parameters)
    return x


def torch_activation(x: Tensor, act: str) -> Tensor:
    """The same by PyTorch's own functions alone."""
    parse = _acts.parse.__wrapped__ if torch.compiler.is_compiling() else _acts.parse  # Dynamo warns of a cache
    for name, parameters in parse(act):
        x = TORCH_ACTIVATIONS[name](x, *parameters)
    return x


def conv_add_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int = 1,
    transposed: bool = False,
    divisor: float = 1.0,
    act: str = "none",
) -> Tensor:
    """A convolution, its bias, a residual, a division and activations."""
    y = torch.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return activation_ref((y if residual is None else y + residual) / divisor, act)


def conv_add_moments_ref(*args: Any) -> tuple[Tensor, Tensor]:
    """:func:`conv_add_ref`, and mean and variance (biased) of every channel of it, ``[N, C, 2]``."""
    y = conv_add_ref(*args)
    variance, mean = torch.var_mean(y, dim=list(range(2, y.dim())), correction=0)
    return y, torch.stack([mean, variance], -1)


def upsample_linear_ref(x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Linear interpolation to twice the size in every dim (``align_corners=False``), and a residual."""
    y = F.interpolate(x, scale_factor=2, mode="trilinear" if x.dim() == 5 else "bilinear")
    return y if residual is None else y + residual


def upsample_conv_weight_ref(weight: Tensor, factors: Sequence[int], groups: int = 1) -> Tensor:
    """The weight of the transposed convolution that is nearest upsampling and a convolution with ``weight`` behind it.

    Along each dim: the taps in reversed order, summed over windows of ``factor``.
    """
    weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    for dim, factor in enumerate(factors, 2):
        beside = [0, 0] * (weight.dim() - 1 - dim) + [factor - 1, factor - 1]
        weight = F.pad(weight.flip(dim), beside).unfold(dim, factor, 1).sum(-1)
    return weight


def pad_replicate_ref(x: Tensor, pad: Sequence[int]) -> Tensor:
    """``F.pad(x, pad, mode="replicate")``."""
    return F.pad(x, list(pad), mode="replicate")


def in_format_ref(x: Tensor, channels_last: bool, dtype: torch.dtype | None = None) -> Tensor:
    """A copy in channels_last(_3d), or contiguous; in another dtype where one is given."""
    return x.to(x.dtype if dtype is None else dtype).clone(memory_format=memory_format(x.dim(), channels_last))


def max_pool_ref(x: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """``F.max_pool3d`` or ``F.max_pool2d``, after the rank of x."""
    window = list(kernel_size), list(stride), list(padding)
    return torch.max_pool3d(x, *window) if x.dim() == 5 else torch.max_pool2d(x, *window)


def group_norm_conv1x1_ref(
    x: Tensor,
    moments: Tensor | None,
    num_groups: int,
    gn_weight: Tensor | None,
    gn_bias: Tensor | None,
    eps: float,
    act: str,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """GroupNorm (none with 0 groups), activations, and a convolution with a kernel of 1."""
    z = group_norm_ref(x, num_groups, gn_weight, gn_bias, eps, act) if num_groups else x
    return F.conv3d(z, weight, bias) if x.dim() == 5 else F.conv2d(z, weight, bias)


def group_norm_conv_ref(
    x: Tensor,
    moments: Tensor | None,
    num_groups: int,
    gn_weight: Tensor | None,
    gn_bias: Tensor | None,
    eps: float,
    gn_act: str,
    *conv: Any,
    replicate: Sequence[int] = (),
) -> Tensor:
    """:func:`conv_add_ref` of GroupNorm (none with 0 groups) and activations, padded with its outermost values."""
    z = group_norm_ref(x, num_groups, gn_weight, gn_bias, eps, gn_act) if num_groups else x
    z = pad_replicate_ref(z, replicate) if replicate else z
    return conv_add_ref(z, *conv)


def _power_below(largest: Tensor, bits: int) -> Tensor:
    """The power of two by which the value comes below 2**bits, and from 2**-120 on to at least half of that."""
    return torch.ldexp(torch.ones_like(largest), bits - torch.frexp(largest.clamp_min(2.0**-121)).exponent)


def _half_or_nan(x: Tensor) -> Tensor:
    """x in fp16; an infinity, of which cuDNN's kernels may lose some, as NaN."""
    return torch.where(x.isfinite(), x, math.nan).half()


def _finite_magnitudes(t: Tensor) -> Tensor:
    return torch.where(t.isfinite(), t.abs(), 0.0)


def _along(values: Tensor, dim: int, rank: int) -> Tensor:
    """One value for each index of a dim, to be multiplied by tensors of this rank."""
    return values.view([-1 if d == dim else 1 for d in range(rank)])


def scaled_half_ref(z: Tensor) -> tuple[Tensor, Tensor]:
    """z in fp16, every channel times the power of two that brings it below 2**4, and the powers' inverses, float64."""
    z, rank = z.double(), z.dim()
    scale = _power_below(_finite_magnitudes(z).amax([0, *range(2, rank)]), 4)
    return _half_or_nan(z * _along(scale, 1, rank)), 1 / scale


def _scaled_half_weight(weight: Tensor, inverse: Tensor, of: int) -> tuple[Tensor, Tensor]:
    """The weight in fp16 for products with halves, and the powers of two by which their sums are too large.

    ``of``: the weight's dim that the halves' channels and their inverses belong to. For each index of the other one the
    magnitudes sum up to less than 2**11. As the halves are below 2**4, the fp16 result stays below 2**15.
    """
    rank = weight.dim()
    weight = weight.double() * _along(inverse, of, rank)
    unit = _power_below(_finite_magnitudes(weight).sum([of, *range(2, rank)]), 11)
    return _half_or_nan(weight * _along(unit, 1 - of, rank)), _along(unit, 1, rank)


def conv_scaled_half_ref(
    half: Tensor,
    inverse: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """A convolution of what :func:`scaled_half_ref` gives, its bias and a residual, as they are rounded; in float64."""
    half_weight, unit = _scaled_half_weight(weight, inverse, 1)
    geometry = stride, padding, dilation, False, [0] * len(stride), 1
    y = torch.convolution(half.double(), half_weight.double(), None, *geometry).half().double() / unit
    y = y if bias is None else y + _along(bias.double(), 1, y.dim())
    return y if residual is None else y + residual.double()


def conv_scaled_half_backward_ref(
    dy: Tensor,
    half: Tensor,
    inverse: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`conv_scaled_half_ref`, that of what was rounded first; in float64.

    dy is rounded as the other operand was. The weight's gradient, a sum over all positions, is not rounded to fp16.
    """
    half_dy, inverse_dy = scaled_half_ref(dy)
    half_weight, unit = _scaled_half_weight(weight, inverse_dy, 0)
    geometry = None, stride, padding, dilation, False, [0] * len(stride), 1
    operands = half_dy.double(), half.double(), half_weight.double()
    dx, dweight, _ = torch.ops.aten.convolution_backward(*operands, *geometry, [True, True, False])
    dweight = dweight * _along(inverse_dy, 0, weight.dim()) * _along(inverse, 1, weight.dim())
    return dx.half().double() / unit, dweight, dy.double().sum([0, *range(2, dy.dim())])


def scaled_half_conv_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    divisor: float = 1.0,
    act: str = "none",
) -> Tensor:
    """:func:`conv_add_ref` of fp32 tensors as ``backend="kgopt:scaled_half"`` rounds it, exact otherwise."""
    y = conv_scaled_half_ref(*scaled_half_ref(x), weight, bias, residual, stride, padding, dilation)
    return activation_ref(y / divisor, act).float()


def group_norm_conv_moments_ref(*args: Any) -> tuple[Tensor, Tensor]:
    """:func:`group_norm_conv_ref`, and mean and variance (biased) of every channel of it, ``[N, C, 2]``."""
    x, _, num_groups, *norm = args[:7]
    z = group_norm_ref(x, num_groups, *norm) if num_groups else x
    return conv_add_moments_ref(z, *args[7:])


def group_stats_ref(x: Tensor, num_groups: int, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal standard deviation ``[N, G]`` of each group of ``x [N, C, *]`` (biased variance)."""
    groups = x.reshape(x.shape[0], num_groups, -1)
    variance, mean = torch.var_mean(groups, dim=2, correction=0)
    return mean, torch.rsqrt(variance + eps)


def group_norm_ref(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    act: str = "none",
    pre_act: str = "none",
) -> Tensor:
    """``act(GroupNorm(pre_act(x)))`` (Wu and He 2018)."""
    return activation_ref(F.group_norm(activation_ref(x, pre_act), num_groups, weight, bias, eps), act)


def group_norm_scale_shift_ref(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-5,
    act: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """``act(GroupNorm(x) * (1 + scale) + shift + residual)``, ``[N, C]`` or ``[1, C]`` of scale and shift.

    AdaGN (Dhariwal and Nichol 2021), FiLM (Perez et al. 2018).
    """
    sizes = [-1, x.shape[1], *[1] * (x.dim() - 2)]
    y = F.group_norm(x, num_groups, weight, bias, eps)
    y = y if scale is None else y * (1 + scale.reshape(sizes))
    y = y if shift is None else y + shift.reshape(sizes)
    return activation_ref(y if residual is None else y + residual, act)


def group_norm_add_ref(
    x: Tensor,
    residual: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    act: str = "none",
) -> Tensor:
    """``act(GroupNorm(x) + residual)`` (He et al. 2016, figure 2; with Wu and He's norm)."""
    return activation_ref(F.group_norm(x, num_groups, weight, bias, eps) + residual, act)


def enlarged(map: Tensor, x: Tensor) -> Tensor:
    """A map with each position repeated along the dims of x, whose sizes behind the channels its own divide."""
    for d in range(2, x.dim()):
        factor = x.shape[d] // map.shape[d]
        map = map if factor == 1 else map.repeat_interleave(factor, d)
    return map


def group_norm_by_sample_ref(
    x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float = 1e-5, act: str = "none"
) -> Tensor:
    """``act(GroupNorm(x) * weight + bias)`` with ``[N, C]`` of weight and bias."""
    sizes = [*x.shape[:2], *[1] * (x.dim() - 2)]
    y = F.group_norm(x, num_groups, None, None, eps) * weight.reshape(sizes) + bias.reshape(sizes)
    return activation_ref(y, act).to(x.dtype)


def group_norm_maps_ref(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    act: str = "none",
) -> Tensor:
    """``act(GroupNorm(x) * scale + shift)`` of upsampled maps (Park et al. 2019; Zheng et al. 2022)."""
    z = F.group_norm(x, num_groups, weight, bias, eps)
    return activation_ref(z * enlarged(scale, x) + enlarged(shift, x), act)


def group_norm_prelu_ref(
    x: Tensor,
    slope: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor:
    """``PReLU(GroupNorm(x) + residual)`` (He et al. 2015, with Wu and He's norm)."""
    z = F.group_norm(x, num_groups, weight, bias, eps)
    return F.prelu(z if residual is None else z + residual, slope)


def channel_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    kind: str = "rms",
    eps: float = 1e-5,
    act: str = "none",
) -> Tensor:
    """A norm over dim 1 at each position, then activations.

    ``kind``: ``"rms"`` (Zhang and Sennrich 2019), ``"l2"``, that of :func:`torch.nn.functional.normalize` times the
    root of C, or ``"layer"``, :func:`torch.nn.functional.layer_norm` over channels.
    """
    if kind == "layer":
        y = F.layer_norm(x.movedim(1, -1), [x.shape[1]], None, None, eps).movedim(-1, 1)
    elif kind == "l2":
        y = F.normalize(x, dim=1, eps=eps) * x.shape[1] ** 0.5
    elif kind == "rms":
        y = x * torch.rsqrt(x.square().mean(1, True) + eps)
    else:
        raise ValueError(f"kind is {kind!r}, expected 'rms', 'l2' or 'layer'")
    shape = [-1, *[1] * (x.dim() - 2)]
    if weight is not None:
        y = y * weight.view(shape)
    return activation_ref(y if bias is None else y + bias.view(shape), act)


def group_norm_mean_ref(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Mean over all dims but the first of ``GroupNorm(x)``: ``[N]``."""
    return F.group_norm(x, num_groups, weight, bias, eps).flatten(1).mean(1)


def logsumexp_ref(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """``torch.logsumexp``."""
    return torch.logsumexp(x, list(dim), keepdim)


def mean_ref(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """``torch.mean``."""
    return torch.mean(x, list(dims), keepdim)


def conv3d_group_norm_mean_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_groups: int,
    gn_weight: Tensor | None = None,
    gn_bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    eps: float = 1e-5,
) -> Tensor:
    """Conv3d, GroupNorm, mean over every dim but batch: ``[N]``."""
    c = F.conv3d(x, weight, bias, stride, padding, dilation, groups)
    return group_norm_mean_ref(c, num_groups, gn_weight, gn_bias, eps)


def conv_transpose3d_relu_group_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_groups: int,
    gn_weight: Tensor | None = None,
    gn_bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    eps: float = 1e-5,
) -> Tensor:
    """ConvTranspose3d, ReLU, GroupNorm."""
    c = F.conv_transpose3d(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return F.group_norm(F.relu(c), num_groups, gn_weight, gn_bias, eps)


def conv2d_group_norm_tanh_hardswish_residual_logsumexp_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_groups: int,
    gn_weight: Tensor | None = None,
    gn_bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    eps: float = 1e-5,
) -> Tensor:
    """``c = Conv2d(x)``; ``r = c + hardswish(tanh(GroupNorm(c)))``; logsumexp of r over channels: ``[N, 1, H, W]``."""
    c = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    r = c + group_norm_ref(c, num_groups, gn_weight, gn_bias, eps, act="tanh+hardswish")
    return torch.logsumexp(r, dim=1, keepdim=True)
