"""The three pipelines as a user writes them in plain PyTorch, and what a computation of each cannot do without."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from kgopt.cli.floor import Work

__all__ = [
    "PIPELINES",
    "Pipeline",
    "PlainConv2dGroupNormTanhHardswishResidualLogSumExp",
    "PlainConv3dGroupNormMean",
    "PlainConvTranspose3dReLUGroupNorm",
    "randomize",
]


class PlainConv3dGroupNormMean(nn.Module):
    """Conv3d, GroupNorm, mean over all but the batch: x [N, C, D, H, W] -> [N]."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, num_groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, C, D, H, W] -> [N]."""
        return self.group_norm(self.conv(x)).mean(dim=[1, 2, 3, 4])


class PlainConvTranspose3dReLUGroupNorm(nn.Module):
    """ConvTranspose3d, ReLU, GroupNorm: x [N, C, D, H, W] -> [N, K, D', H', W']."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, groups: int, bias: bool = False) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=bias)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, C, D, H, W] -> [N, K, D', H', W']."""
        return self.group_norm(F.relu(self.conv_transpose(x)))


class PlainConv2dGroupNormTanhHardswishResidualLogSumExp(nn.Module):
    """c = Conv2d; logsumexp over channels of c + hardswish(tanh(GroupNorm(c))): x [N, C, H, W] -> [N, 1, H', W']."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, groups: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, C, H, W] -> [N, 1, H', W']."""
        c = self.conv(x)
        return torch.logsumexp(c + F.hardswish(torch.tanh(self.group_norm(c))), dim=1, keepdim=True)


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random gamma and beta for every GroupNorm, in place, drawn on the CPU. Convolutions keep torch's initialization.

    With gamma = 1 and beta = 0 the mean after a GroupNorm is zero whatever the input, and a comparison proves nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.GroupNorm) and module.affine:
            with torch.no_grad():
                module.weight.copy_(torch.rand(module.weight.shape, generator=generator) + 0.5)
                module.bias.copy_(torch.randn(module.bias.shape, generator=generator) * 0.5 + 0.25)
    return model


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """One pipeline: the plain PyTorch model, the kgopt module of the same arguments, the headline shape."""

    name: str
    title: str
    module: str  # in kgopt.nn
    plain: Callable[..., nn.Module]
    args: tuple[int, ...]  # in_channels, out_channels, kernel_size, GroupNorm groups
    headline: tuple[int, ...]  # shape of x
    transposed: bool
    special_per_element: int  # exp and tanh for each element of the convolution's output

    def plain_model(self, in_channels: int | None = None, seed: int = 0) -> nn.Module:
        """The plain model, fp32 on the CPU, with seeded weights and random gamma and beta."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.plain(in_channels or self.args[0], *self.args[1:])
        return randomize(model, seed + 1)

    def kgopt_model(self, plain: nn.Module, in_channels: int | None = None) -> nn.Module:
        """The kgopt module, loaded from the plain model's state_dict with strict=True; device and dtype as there."""
        import kgopt.nn

        model = getattr(kgopt.nn, self.module)(in_channels or self.args[0], *self.args[1:])
        like = next(plain.parameters())
        model.to(device=like.device, dtype=like.dtype)
        model.load_state_dict(plain.state_dict(), strict=True)
        return model

    def conv_output(self, shape: Sequence[int]) -> list[int]:
        """Shape of the convolution's output for x of `shape`."""
        kernel = self.args[2]
        grow = kernel - 1 if self.transposed else 1 - kernel
        return [shape[0], self.args[1], *(size + grow for size in shape[2:])]

    def result_elements(self, shape: Sequence[int]) -> int:
        """Elements of the pipeline's result for x of `shape`."""
        out = self.conv_output(shape)
        if self.name == "conv3d_group_norm_mean":
            return out[0]
        return math.prod(out) if self.transposed else out[0] * math.prod(out[2:])

    def work(self, shape: Sequence[int], itemsize: int, training: bool = False) -> Work:
        """The floor's bytes and operations: x read once, the result written once, the convolution done once.

        A training step also reads x and the result's gradient, writes dx, and does the convolution's two gradients.
        """
        out = self.conv_output(shape)
        taps = self.args[2] ** (len(shape) - 2)
        positions = math.prod(shape[2:] if self.transposed else out[2:])
        flops = 2.0 * shape[0] * positions * shape[1] * out[1] * taps
        x_bytes, y_bytes = math.prod(shape) * itemsize, self.result_elements(shape) * itemsize
        special = float(math.prod(out) * self.special_per_element)
        if training:
            return Work(3 * x_bytes + 2 * y_bytes, 3 * flops, 2 * special)
        return Work(x_bytes + y_bytes, flops, special)


PIPELINES = (
    Pipeline(
        "conv3d_group_norm_mean",
        "Conv3d + GroupNorm + mean",
        "Conv3dGroupNormMean",
        PlainConv3dGroupNormMean,
        (3, 24, 3, 8),
        (128, 3, 24, 32, 32),
        transposed=False,
        special_per_element=0,
    ),
    Pipeline(
        "conv_transpose3d_relu_group_norm",
        "ConvTranspose3d + ReLU + GroupNorm",
        "ConvTranspose3dReLUGroupNorm",
        PlainConvTranspose3dReLUGroupNorm,
        (64, 128, 3, 8),
        (16, 64, 32, 32, 32),
        transposed=True,
        special_per_element=0,
    ),
    Pipeline(
        "conv2d_group_norm_tanh_hardswish_residual_logsumexp",
        "Conv2d + GroupNorm + tanh + hardswish + residual + logsumexp",
        "Conv2dGroupNormTanhHardswishResidualLogSumExp",
        PlainConv2dGroupNormTanhHardswishResidualLogSumExp,
        (8, 64, 3, 16),
        (128, 8, 128, 128),
        transposed=False,
        special_per_element=2,
    ),
)
