"""Drop-in replacements of torch.nn modules: same arguments, parameters, initialization and state_dict."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt import functional
from kgopt.reference import ACTIVATIONS


class GroupNorm(torch.nn.GroupNorm):
    """:class:`torch.nn.GroupNorm` followed by an activation chain, in one pass.

    Args:
        num_groups: groups; must divide ``num_channels``.
        num_channels: C of the input ``[N, C, *]``.
        eps: added to the variance.
        affine: whether there are ``weight`` and ``bias`` of shape ``[C]``.
        device: of the parameters.
        dtype: of the parameters.
        act: ``+``-joined chain of activations, for example ``"silu"``.

    Raises:
        ValueError: ``num_channels`` is not divisible by ``num_groups``, or ``act`` names an unknown activation.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        act: str = "none",
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        unknown = [name for name in act.split("+") if name.strip() not in ACTIVATIONS]
        if unknown:
            raise ValueError(f"act is {act!r} and names {unknown[0]!r}, expected a '+'-joined chain of {ACTIVATIONS}")
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        """``act(GroupNorm(input))``, in the layout of ``input``."""
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.act)

    def extra_repr(self) -> str:
        """torch's, and the activation where there is one."""
        return super().extra_repr() + ("" if self.act == "none" else f", act={self.act}")


def _pad_amounts(module: Any) -> list[int]:
    return list(module._reversed_padding_repeated_twice)


class Conv2d(torch.nn.Conv2d):
    """:class:`torch.nn.Conv2d` on kgopt's convolution."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, _pad_amounts(self), mode=self.padding_mode)
            padding = 0
        return functional.conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups)


class Conv3d(torch.nn.Conv3d):
    """:class:`torch.nn.Conv3d` on kgopt's convolution."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, _pad_amounts(self), mode=self.padding_mode)
            padding = 0
        return functional.conv3d(input, weight, bias, self.stride, padding, self.dilation, self.groups)


def _output_padding(module: Any, input: Tensor, output_size: list[int] | None, rank: int) -> Any:
    return module._output_padding(
        input, output_size, module.stride, module.padding, module.kernel_size, rank, module.dilation
    )


class ConvTranspose2d(torch.nn.ConvTranspose2d):
    """:class:`torch.nn.ConvTranspose2d` on kgopt's convolution."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution; ``output_size`` picks among the sizes that the stride leaves open."""
        padding = _output_padding(self, input, output_size, 2)
        before: Any = self.padding  # a tuple: transposed convolutions have no padding="same"
        return functional.conv_transpose2d(
            input, self.weight, self.bias, self.stride, before, padding, self.groups, self.dilation
        )


class ConvTranspose3d(torch.nn.ConvTranspose3d):
    """:class:`torch.nn.ConvTranspose3d` on kgopt's convolution."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution; ``output_size`` picks among the sizes that the stride leaves open."""
        padding = _output_padding(self, input, output_size, 3)
        before: Any = self.padding
        return functional.conv_transpose3d(
            input, self.weight, self.bias, self.stride, before, padding, self.groups, self.dilation
        )
