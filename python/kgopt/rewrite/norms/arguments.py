"""What the ops are given for a norm, a convolution or a PReLU at x; None, where PyTorch's forward must see it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite.chains.emit import ConvArgs, NormArgs, padding_in_numbers
from kgopt.rewrite.chains.modules import hides_parameters
from kgopt.rewrite.norms import channels
from kgopt.rewrite.optimized.known import Known
from kgopt.torch_private import FORWARD_AD, LEVEL, stands_for_a_plain_tensor

_FLOAT32, _STRIDED = torch.float32, torch.strided
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


def is_plain(x: Any) -> bool:
    """A tensor that kgopt's ops take: not a DTensor or another subclass, not a dual number."""
    if type(x) is not Tensor and type(x) is not nn.Parameter and not stands_for_a_plain_tensor(x):
        return False
    if x.dtype not in _DTYPES or not (x.is_cuda or x.is_cpu) or x.layout is not _STRIDED:
        return False
    return FORWARD_AD[LEVEL] < 0


def _is_plain_beside(p: Any) -> bool:
    """:func:`is_plain` of a parameter that is on the device of a plain tensor."""
    if type(p) is not nn.Parameter:
        return is_plain(p)
    return p.dtype in _DTYPES and p.layout is torch.strided


def fits(p: Any, x: Tensor) -> bool:
    """Whether a norm's weight or bias (or none) goes with x, a plain tensor, as the ops have it."""
    if p is None:
        return True
    if type(p) is not nn.Parameter and not is_plain(p):
        return False
    dtype = p.dtype
    return (dtype is _FLOAT32 or dtype is x.dtype) and p.device == x.device and p.layout is _STRIDED


def _both_fit(weight: Any, bias: Any, x: Tensor) -> bool:
    """:func:`fits` of the two that most norms have; False where that is still to be asked."""
    if type(weight) is not nn.Parameter or type(bias) is not nn.Parameter:
        return False
    if weight.dtype is not _FLOAT32 or bias.dtype is not _FLOAT32 or weight.layout is not _STRIDED:
        return False
    device = x.device
    return weight.device == device and bias.device == device and bias.layout is _STRIDED


def slope_of(act: Any, x: Tensor, channels: int) -> Any:
    """The slopes of an nn.PReLU behind a norm of x; None where PyTorch's own forward must see them, or refuse them."""
    parameters = act._parameters
    if "weight" not in parameters or hides_parameters(act):
        return None
    slope = parameters["weight"]
    if slope is None or not fits(slope, x) or slope.dim() > 1 or slope.numel() not in (1, channels):
        return None
    # Without autocast PyTorch wants one dtype.
    return slope if slope.dtype is x.dtype or torch.is_autocast_enabled(x.device.type) else None


def channels_of(norm: Any) -> int:
    """Of a GroupNorm or an InstanceNorm."""
    return int(norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features)


def keeps_format(norm: nn.Module) -> bool:
    """Whether channels_last stays where PyTorch's norm would return a contiguous tensor. Any thread may restore it."""
    known: Known | None = norm.__dict__.get("_kgopt")
    return known is not None and known.keeps


def norm_args(norm: Any, x: Tensor | None) -> NormArgs | None:
    """A GroupNorm's or InstanceNorm's arguments for x; None where PyTorch's own forward must see it, or refuse it.

    With x None nothing is checked but that the parameters are where they belong.
    """
    own = norm.__dict__
    if (known := own.get("_kgopt")) is not None and known.channel is not None:
        return None if x is None else channels.arguments(norm, known.channel, x)
    parameters = norm._parameters  # not norm.weight: nn.Module.__getattr__ takes longer than the rest of this
    if "weight" not in parameters or "bias" not in parameters or "weight" in own or "bias" in own:
        return None
    weight, bias = parameters["weight"], parameters["bias"]
    group = isinstance(norm, nn.GroupNorm)
    groups = norm.num_groups if group else norm.num_features
    if x is not None:
        shape, count = x.shape, x.numel()
        if len(shape) < 2 or shape[1] != (norm.num_channels if group else groups):
            return None
        if count == 0 or count == groups * shape[0]:
            return None  # one value a group: PyTorch refuses some of these, and says how
        if not (_both_fit(weight, bias, x) or (fits(weight, x) and fits(bias, x))):
            return None
    return NormArgs(groups, weight, bias, norm.eps)


def _tensor_of(module: Any, name: str) -> Any:
    """``module.name``, a parameter as a rule: nn.Module.__getattr__, where Python looks last, takes longer."""
    parameters = module._parameters
    return parameters[name] if name in parameters and name not in module.__dict__ else getattr(module, name)


def conv_args(conv: Any, x: Tensor) -> ConvArgs | None:
    """A convolution module's arguments for x; None where its own forward must see it."""
    weight, bias = _tensor_of(conv, "weight"), _tensor_of(conv, "bias")
    if x.dim() != len(conv.kernel_size) + 2 or conv.padding_mode != "zeros" or not _is_plain_beside(weight):
        return None
    if x.device != weight.device or not (bias is None or _is_plain_beside(bias)):
        return None
    if x.dtype is not weight.dtype and not torch.is_autocast_enabled(x.device.type):
        return None
    padding = padding_in_numbers(conv.padding, conv.kernel_size, conv.dilation)
    if padding is None:
        return None
    output_padding = tuple(conv.output_padding) if conv.transposed else None
    # A tuple of a tuple, which they are, is itself.
    return ConvArgs(weight, bias, tuple(conv.stride), tuple(padding), tuple(conv.dilation), conv.groups, output_padding)
