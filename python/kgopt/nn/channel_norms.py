"""Norms over the channels of ``[N, C, *]``, at each position, with the activation behind them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kgopt import _acts, functional


class _ChannelNorm(torch.nn.Module):
    """``act(norm(x) * weight + bias)``; subclasses say which norm."""

    _kind = "rms"
    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None

    def __init__(
        self, num_channels: int, eps: float, weight: bool, bias: bool, device: Any, dtype: Any, act: str
    ) -> None:
        super().__init__()
        try:
            _acts.parse(act)
        except ValueError as error:
            raise ValueError(f"act {error}") from None
        self.num_channels, self.eps, self.act = num_channels, eps, act
        for name, given in (("weight", weight), ("bias", bias)):
            values = torch.empty(num_channels, device=device, dtype=dtype) if given else None
            self.register_parameter(name, None if values is None else torch.nn.Parameter(values))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones and zeros."""
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """The norm over dim 1 and the activation, in the layout of ``input``."""
        return functional.channel_norm(input, self.weight, self.bias, self._kind, self.eps, self.act)

    def extra_repr(self) -> str:
        """As torch's norms have it."""
        affine = f", weight={self.weight is not None}, bias={self.bias is not None}"
        return f"{self.num_channels}, eps={self.eps}{affine}" + ("" if self.act == "none" else f", act={self.act}")


class ChannelRMSNorm(_ChannelNorm):
    """``x * rsqrt(mean(x**2, 1) + eps) * weight + bias`` of ``[N, C, *]`` and an activation, in one pass.

    :class:`torch.nn.RMSNorm` is that over the last dims. With ``normalize=True`` it is
    ``F.normalize(x, dim=1, eps=eps) * sqrt(C) * weight + bias``, where ``eps`` is the least length.

    Args:
        num_channels: C.
        eps: added to the mean of squares, or the least length.
        elementwise_affine: whether there is a ``weight`` of shape ``[C]``.
        device: of the parameters.
        dtype: of the parameters.
        bias: whether there is a ``bias`` of shape ``[C]``.
        normalize: divides by the length as :func:`torch.nn.functional.normalize` does.
        act: ``+``-joined chain of activations.

    Raises:
        ValueError: ``act`` is no chain of known activations.
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        normalize: bool = False,
        act: str = "none",
    ) -> None:
        super().__init__(num_channels, eps, elementwise_affine, bias, device, dtype, act)
        if normalize:
            self._kind = "l2"

    def extra_repr(self) -> str:
        """The base's, and which norm."""
        return super().extra_repr() + (", normalize=True" if self._kind == "l2" else "")


class ChannelLayerNorm(_ChannelNorm):
    """:class:`torch.nn.LayerNorm` over dim 1 of ``[N, C, *]`` and an activation, in one pass, without a permutation.

    Parameters are those of ``torch.nn.LayerNorm(num_channels)``, so its ``state_dict`` loads, and those of timm's
    ``LayerNorm2d`` and of ConvNeXt.

    Args:
        num_channels: C.
        eps: added to the variance.
        elementwise_affine: whether there are parameters of shape ``[C]``.
        bias: whether there is a ``bias`` among them.
        device: of the parameters.
        dtype: of the parameters.
        act: ``+``-joined chain of activations.

    Raises:
        ValueError: ``act`` is no chain of known activations.
    """

    _kind = "layer"

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        act: str = "none",
    ) -> None:
        super().__init__(num_channels, eps, elementwise_affine, elementwise_affine and bias, device, dtype, act)


class PixelNorm(torch.nn.Module):
    """``x * rsqrt(mean(x**2, 1) + eps)`` of ``[N, C, *]`` and an activation, in one pass; no parameters.

    Args:
        eps: added to the mean of squares.
        act: ``+``-joined chain of activations.

    Raises:
        ValueError: ``act`` is no chain of known activations.
    """

    def __init__(self, eps: float = 1e-8, *, act: str = "none") -> None:
        super().__init__()
        try:
            _acts.parse(act)
        except ValueError as error:
            raise ValueError(f"act {error}") from None
        self.eps, self.act = eps, act

    def forward(self, input: Tensor) -> Tensor:
        """The norm over dim 1 and the activation, in the layout of ``input``."""
        return functional.channel_norm(input, None, None, "rms", self.eps, self.act)

    def extra_repr(self) -> str:
        """eps, and the activation where there is one."""
        return f"eps={self.eps}" + ("" if self.act == "none" else f", act={self.act}")
