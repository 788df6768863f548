"""Fused pipelines as modules. A checkpoint of the plain PyTorch model loads with ``strict=True``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kgopt import functional
from kgopt.functional import Ints
from kgopt.nn.modules import Conv2d, Conv3d, ConvTranspose3d, GroupNorm, conv_input


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
        if conv_groups is not None:
            groups = conv_groups
        sizes: Any = (in_channels, out_channels, kernel_size, stride, padding, dilation)
        options: Any = (groups, bias, padding_mode, device, dtype)
        self.conv = Conv3d(*sizes, *options)
        self.group_norm = GroupNorm(num_groups, out_channels, eps, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, C, D, H, W]`` to ``[N]``."""
        conv, norm = self.conv, self.group_norm
        x, padding = conv_input(conv, x)
        affine = (norm.num_groups, norm.weight, norm.bias)
        rest: Any = (conv.stride, padding, conv.dilation, conv.groups, norm.eps)
        return functional.conv3d_group_norm_mean(x, conv.weight, conv.bias, *affine, *rest)


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
        sizes: Any = (in_channels, out_channels, kernel_size, stride, padding, output_padding)
        options: Any = (conv_groups, bias, dilation, "zeros", device, dtype)
        self.conv_transpose = ConvTranspose3d(*sizes, *options)
        self.group_norm = GroupNorm(groups, out_channels, eps, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, C, D, H, W]`` to the normalized ``[N, out_channels, D', H', W']``."""
        conv, norm = self.conv_transpose, self.group_norm
        affine = (norm.num_groups, norm.weight, norm.bias)
        rest: Any = (conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation, norm.eps)
        return functional.conv_transpose3d_relu_group_norm(x, conv.weight, conv.bias, *affine, *rest)


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
        sizes: Any = (in_channels, out_channels, kernel_size, stride, padding, dilation)
        options: Any = (conv_groups, bias, padding_mode, device, dtype)
        self.conv = Conv2d(*sizes, *options)
        self.group_norm = GroupNorm(groups, out_channels, eps, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, C, H, W]`` to ``[N, 1, H', W']``."""
        conv, norm = self.conv, self.group_norm
        x, padding = conv_input(conv, x)
        affine = (norm.num_groups, norm.weight, norm.bias)
        rest: Any = (conv.stride, padding, conv.dilation, conv.groups, norm.eps)
        return functional.conv2d_group_norm_tanh_hardswish_residual_logsumexp(x, conv.weight, conv.bias, *affine, *rest)


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
        affine = (norm.num_groups, norm.weight, norm.bias)
        geometry = (conv.stride, conv.padding, conv.dilation, conv.groups)
        return functional.group_norm_conv(
            x, *affine, conv.weight, conv.bias, *geometry, norm.eps, norm.act, residual=residual
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
