"""Fused pipelines as modules. A checkpoint of the plain PyTorch model loads with ``strict=True``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt import functional
from kgopt.functional import Ints
from kgopt.nn.modules import Conv2d, Conv3d, ConvTranspose3d, GroupNorm, pad_amounts


def _conv_input(conv: Any, x: Tensor) -> tuple[Tensor, Any]:
    """x and the padding that is left to the convolution; other padding modes than zeros go through F.pad."""
    if conv.padding_mode == "zeros":
        return x, conv.padding
    return F.pad(x, pad_amounts(conv), mode=conv.padding_mode), 0


class Conv3dGroupNormMean(torch.nn.Module):
    """Conv3d, GroupNorm, mean over every dim but batch: ``[N, C, D, H, W]`` to ``[N]``.

    Args:
        in_channels: C of the input.
        out_channels: channels of the convolution and the norm.
        kernel_size: of the convolution.
        num_groups: of the norm; must divide ``out_channels``.
        stride: of the convolution, as padding, dilation, groups, bias and padding_mode.
        padding: numbers, "same" or "valid".
        dilation: of the convolution.
        groups: of the convolution.
        bias: whether the convolution has one.
        padding_mode: as in torch.nn.Conv3d.
        eps: of the norm.
        device: of the parameters.
        dtype: of the parameters.
        conv_groups: another name of ``groups``, the one it has where ``groups`` are the norm's.

    Raises:
        ValueError: channels that do not divide, as in torch.nn.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        num_groups: int,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        conv_groups: int | None = None,
    ) -> None:
        super().__init__()
        if conv_groups is not None and groups not in (1, conv_groups):
            raise ValueError(f"groups is {groups} and conv_groups is {conv_groups}, expected one of them")
        self.conv = Conv3d(
            in_channels,
            out_channels,
            kernel_size,  # type: ignore[arg-type]
            stride,  # type: ignore[arg-type]
            padding,  # type: ignore[arg-type]
            dilation,  # type: ignore[arg-type]
            groups if conv_groups is None else conv_groups,
            bias,
            padding_mode,  # type: ignore[arg-type]
            device,
            dtype,
        )
        self.group_norm = GroupNorm(num_groups, out_channels, eps, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, C, D, H, W]`` to ``[N]``."""
        conv, norm = self.conv, self.group_norm
        x, padding = _conv_input(conv, x)
        return functional.conv3d_group_norm_mean(
            x,
            conv.weight,
            conv.bias,
            norm.num_groups,
            norm.weight,
            norm.bias,
            conv.stride,
            padding,
            conv.dilation,
            conv.groups,
            norm.eps,
        )


class ConvTranspose3dReLUGroupNorm(torch.nn.Module):
    """ConvTranspose3d, ReLU, GroupNorm: ``[N, C, D, H, W]`` to ``[N, out_channels, D', H', W']``.

    Args:
        in_channels: C of the input.
        out_channels: channels of the convolution and the norm.
        kernel_size: of the convolution.
        groups: of the norm; must divide ``out_channels``.
        bias: whether the convolution has one.
        stride: of the convolution, as padding, output_padding, dilation and conv_groups.
        padding: of the convolution.
        output_padding: of the convolution.
        dilation: of the convolution.
        conv_groups: of the convolution.
        eps: of the norm.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: channels that do not divide, as in torch.nn.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        groups: int,
        bias: bool = False,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        dilation: Ints = 1,
        conv_groups: int = 1,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.conv_transpose = ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,  # type: ignore[arg-type]
            stride,  # type: ignore[arg-type]
            padding,  # type: ignore[arg-type]
            output_padding,  # type: ignore[arg-type]
            conv_groups,
            bias,
            dilation,  # type: ignore[arg-type]
            device=device,
            dtype=dtype,
        )
        self.group_norm = GroupNorm(groups, out_channels, eps, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, C, D, H, W]`` to the normalized ``[N, out_channels, D', H', W']``."""
        conv, norm = self.conv_transpose, self.group_norm
        return functional.conv_transpose3d_relu_group_norm(
            x,
            conv.weight,
            conv.bias,
            norm.num_groups,
            norm.weight,
            norm.bias,
            conv.stride,
            conv.padding,  # type: ignore[arg-type]
            conv.output_padding,
            conv.groups,
            conv.dilation,
            norm.eps,
        )


class Conv2dGroupNormTanhHardswishResidualLogSumExp(torch.nn.Module):
    """``c = Conv2d(x)``; ``r = c + hardswish(tanh(GroupNorm(c)))``; logsumexp of r over channels: ``[N, 1, H', W']``.

    Args:
        in_channels: C of the input.
        out_channels: channels of the convolution and the norm.
        kernel_size: of the convolution.
        groups: of the norm; must divide ``out_channels``.
        eps: of the norm.
        stride: of the convolution, as padding, dilation, conv_groups, bias and padding_mode.
        padding: numbers, "same" or "valid".
        dilation: of the convolution.
        conv_groups: of the convolution.
        bias: whether the convolution has one.
        padding_mode: as in torch.nn.Conv2d.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: channels that do not divide, as in torch.nn.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        groups: int,
        eps: float = 1e-5,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        conv_groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.conv = Conv2d(
            in_channels,
            out_channels,
            kernel_size,  # type: ignore[arg-type]
            stride,  # type: ignore[arg-type]
            padding,  # type: ignore[arg-type]
            dilation,  # type: ignore[arg-type]
            conv_groups,
            bias,
            padding_mode,  # type: ignore[arg-type]
            device,
            dtype,
        )
        self.group_norm = GroupNorm(groups, out_channels, eps, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, C, H, W]`` to ``[N, 1, H', W']``."""
        conv, norm = self.conv, self.group_norm
        x, padding = _conv_input(conv, x)
        return functional.conv2d_group_norm_tanh_hardswish_residual_logsumexp(
            x,
            conv.weight,
            conv.bias,
            norm.num_groups,
            norm.weight,
            norm.bias,
            conv.stride,
            padding,
            conv.dilation,
            conv.groups,
            norm.eps,
        )


class _GroupNormConv(torch.nn.Module):
    """GroupNorm, activations and a convolution, the order of SegResNet, 3D U-Nets and VAEs."""

    _conv_class: Any

    def __init__(
        self,
        num_groups: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        act: str = "none",
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.group_norm = GroupNorm(num_groups, in_channels, eps, act=act, **factory)
        self.conv = self._conv_class(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, **factory
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``conv(act(group_norm(x)))``, plus ``residual`` of the result's shape."""
        conv, norm = self.conv, self.group_norm
        if conv.padding_mode != "zeros":  # what the norm gives is padded
            y = conv(norm(x))
            return y if residual is None else y + residual
        return functional.group_norm_conv(
            x,
            norm.num_groups,
            norm.weight,
            norm.bias,
            conv.weight,
            conv.bias,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            norm.eps,
            norm.act,
            residual,
        )


class GroupNormConv2d(_GroupNormConv):
    """GroupNorm, activations, Conv2d: ``[N, C, H, W]`` to ``[N, out_channels, H', W']``.

    Args:
        num_groups: of the norm; must divide ``in_channels``.
        in_channels: C of the input, of the norm and the convolution.
        out_channels: of the convolution, as kernel_size, stride, dilation, groups, bias and padding_mode.
        padding: numbers, "same" or "valid".
        act: activations between the norm and the convolution, as "silu".
        eps: of the norm.
        device: of the parameters.
        dtype: of the parameters.
    """

    _conv_class = Conv2d


class GroupNormConv3d(_GroupNormConv):
    """The same with Conv3d, for ``[N, C, D, H, W]``: see :class:`GroupNormConv2d`."""

    _conv_class = Conv3d
