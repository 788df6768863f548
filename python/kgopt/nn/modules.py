"""Drop-in replacements of torch.nn modules: same arguments, parameters, initialization and state_dict."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt import _acts, functional
from kgopt.torch_private import output_padding_of


class GroupNorm(torch.nn.GroupNorm):
    """:class:`torch.nn.GroupNorm`, a scale and a shift by sample, a sum and an activation chain, in one pass.

    Args:
        num_groups: groups; must divide ``num_channels``.
        num_channels: C of the input ``[N, C, *]``.
        eps: added to the variance.
        affine: whether there are ``weight`` and ``bias`` of shape ``[C]``.
        device: of the parameters.
        dtype: of the parameters.
        act: ``+``-joined chain of activations, for example ``"silu"`` or ``"leaky_relu(0.2)"``; docs/ops.md has the
            names and their parameters. Or ``"prelu"``, with the parameter ``slope``, which starts at 0.25 as that of
            :class:`torch.nn.PReLU` does.
        num_slopes: of a PReLU: 1, or ``num_channels``.

    Raises:
        ValueError: ``num_channels`` is not divisible by ``num_groups``, ``act`` is no chain of known activations, or
            ``num_slopes`` fits neither.
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
        num_slopes: int = 1,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        try:
            _acts.parse("none" if act == "prelu" else act)
        except ValueError as error:
            raise ValueError(f"act {error}") from None
        if num_slopes not in (1, num_channels) or (act != "prelu" and num_slopes != 1):
            raise ValueError(f"num_slopes is {num_slopes}, expected 1, or {num_channels} with act='prelu'")
        self.act = act
        self.slope: torch.nn.Parameter | None = None
        if act == "prelu":
            self.slope = torch.nn.Parameter(torch.full([num_slopes], 0.25, device=device, dtype=dtype))

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> Tensor:
        """``act(GroupNorm(input) * (1 + scale) + shift + residual)``, in the layout of ``input``.

        ``residual`` has its shape and dtype; ``scale`` and ``shift`` are ``[N, C]`` or ``[1, C]``, as
        :func:`kgopt.functional.group_norm` takes them.
        """
        rest = (self.weight, self.bias, self.eps, self.act, residual, self.slope)
        return functional.group_norm(input, self.num_groups, *rest, scale=scale, shift=shift)

    def extra_repr(self) -> str:
        """torch's, and the activation where there is one."""
        return super().extra_repr() + ("" if self.act == "none" else f", act={self.act}")


def pad_amounts(module: Any) -> list[int]:
    """As F.pad takes them: before and after, the last dim first. "same" has the smaller half before."""
    padding = module.padding
    if not isinstance(padding, str):
        return [p for p in reversed(padding) for _ in range(2)]
    totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return [amount for total in reversed(totals) for amount in (total // 2, total - total // 2)]


def conv_input(conv: Any, x: Tensor) -> tuple[Tensor, Any]:
    """x and the padding that is left to the convolution; other padding modes than zeros go through F.pad."""
    if conv.padding_mode == "zeros":
        return x, conv.padding
    return F.pad(x, pad_amounts(conv), mode=conv.padding_mode), 0


class Conv2d(torch.nn.Conv2d):
    """:class:`torch.nn.Conv2d` on kgopt's convolution."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, padding = conv_input(self, input)
        return functional.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups)


class Conv3d(torch.nn.Conv3d):
    """:class:`torch.nn.Conv3d` on kgopt's convolution."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, padding = conv_input(self, input)
        return functional.conv3d(x, weight, bias, self.stride, padding, self.dilation, self.groups)


class ConvTranspose2d(torch.nn.ConvTranspose2d):
    """:class:`torch.nn.ConvTranspose2d` on kgopt's convolution."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution; ``output_size`` picks among the sizes that the stride leaves open."""
        padding = output_padding_of(self, input, output_size)
        before: Any = self.padding  # a tuple: transposed convolutions have no padding="same"
        return functional.conv_transpose2d(
            input, self.weight, self.bias, self.stride, before, padding, self.groups, self.dilation
        )


class ConvTranspose3d(torch.nn.ConvTranspose3d):
    """:class:`torch.nn.ConvTranspose3d` on kgopt's convolution."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution; ``output_size`` picks among the sizes that the stride leaves open."""
        padding = output_padding_of(self, input, output_size)
        before: Any = self.padding
        return functional.conv_transpose3d(
            input, self.weight, self.bias, self.stride, before, padding, self.groups, self.dilation
        )
