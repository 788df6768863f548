"""GroupNorm and norms over channels, each with an activation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kgopt.cli.cases.case import ACTS, Case, Slice, all_of_each, batch_slices, double, is_small, per_piece
from kgopt.cli.floor import Work
from kgopt.cli.measure import kink_error
from kgopt.cli.models import randomize


class PlainGroupNorm(nn.GroupNorm):
    """GroupNorm and an activation as plain PyTorch."""

    def __init__(self, num_groups: int, num_channels: int, act: str = "none") -> None:
        super().__init__(num_groups, num_channels)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """act(group_norm(x))."""
        return ACTS[self.act](super().forward(x))


def group_slices(model: nn.Module, x: torch.Tensor) -> Iterator[Slice]:
    """Whole samples where they are small, else one group of one sample at a time."""
    assert isinstance(model, PlainGroupNorm)
    if is_small(x):
        yield from batch_slices(model, x)
        return
    width = model.num_channels // model.num_groups
    modules = []
    for group in range(model.num_groups):
        module = PlainGroupNorm(1, width, model.act).to(x.device, torch.float64)
        module.eps = model.eps
        channels = slice(group * width, (group + 1) * width)
        with torch.no_grad():
            module.weight.copy_(model.weight[channels])
            module.bias.copy_(model.bias[channels])
        modules.append(module)
    for n in range(x.shape[0]):
        for group, module in enumerate(modules):
            channels = slice(group * width, (group + 1) * width)
            index = (slice(n, n + 1), channels)
            params = {name: (name, (channels,)) for name in ("weight", "bias")}
            yield Slice(index, index, module, params)


def group_norm_work(shape: tuple[int, ...], itemsize: int, direction: str) -> Work:
    """Bytes that a GroupNorm of `shape` cannot do without."""
    # Forward: read x, write y. Backward: read x and dy, write dx.
    return Work((3 if direction == "backward" else 2) * math.prod(shape) * itemsize)


def _group_norm_case(shape: tuple[int, ...], groups: int, act: str) -> Case:
    def plain() -> nn.Module:
        return randomize(PlainGroupNorm(groups, shape[1], act))

    def fused(model: nn.Module) -> nn.Module:
        import kgopt.nn

        like = next(model.parameters())
        out = kgopt.nn.GroupNorm(groups, shape[1], act=act, device=like.device, dtype=like.dtype)
        out.load_state_dict(model.state_dict(), strict=True)
        return out

    sizes = "x".join(map(str, shape))
    name, kink = f"{sizes} g{groups} {act}", kink_error(act, shape)
    return Case("groupnorm", name, shape, plain, fused, group_norm_work, group_slices, gpu_clock=True, kink=kink)


_GROUP_NORM = (
    ((1, 32, 128, 128, 128), 8, "relu"),
    ((1, 128, 32, 32, 32), 8, "relu"),
    ((1, 64, 80, 170, 170), 8, "none"),
    ((1, 128, 17, 256, 256), 32, "silu"),
    ((1, 128, 20, 256, 256), 32, "silu"),
    ((1, 512, 5, 32, 32), 32, "silu"),
    ((1, 128, 512, 512), 32, "silu"),
    ((8, 320, 64, 64), 32, "silu"),
    ((2, 32, 96, 96, 96), 8, "relu"),
    ((16, 128, 34, 34, 34), 8, "none"),
    ((128, 24, 22, 30, 30), 8, "none"),
    ((128, 64, 126, 126), 16, "none"),
)


class PlainChannelNorm(nn.Module):
    """A norm over channels and an activation as libraries write them in plain PyTorch.

    ``l2`` as the autoencoders of Wan and Qwen-Image, ``rms`` as that of LTX-Video, ``layer`` as timm's LayerNorm2d.
    """

    def __init__(self, kind: str, num_channels: int, act: str = "none") -> None:
        super().__init__()
        self.kind, self.act = kind, act
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """act(norm(x) * weight + bias)."""
        channels = x.shape[1]
        if self.kind == "layer":
            y = F.layer_norm(x.movedim(1, -1), (channels,), self.weight, self.bias, 1e-6).movedim(-1, 1)
            return ACTS[self.act](y)
        weight, bias = (p.view(-1, *[1] * (x.dim() - 2)) for p in (self.weight, self.bias))
        if self.kind == "l2":
            y = F.normalize(x, dim=1) * channels**0.5
        else:
            y = x * torch.rsqrt(x.square().mean(1, True) + 1e-6)
        return ACTS[self.act](y * weight + bias)


def position_slices(model: nn.Module, x: torch.Tensor) -> Iterator[Slice]:
    """Some rows of one sample at a time: each position has its own norm."""
    module = double(model)
    rows = x.shape[-2]
    step = min(max(1, rows), per_piece(x[:1].numel() // max(1, rows)))
    for n in range(x.shape[0]):
        for row in range(0, rows, step):
            index = (slice(n, n + 1), *[slice(None)] * (x.dim() - 3), slice(row, row + step), slice(None))
            yield Slice(index, index, module, all_of_each(model))


def _channel_norm_case(shape: tuple[int, ...], kind: str, act: str) -> Case:
    def plain() -> nn.Module:
        return randomize(PlainChannelNorm(kind, shape[1], act))

    def fused(model: nn.Module) -> nn.Module:
        import kgopt.nn

        like = next(model.parameters())
        keywords: dict[str, Any] = {"act": act, "bias": True, "device": like.device, "dtype": like.dtype}
        if kind == "layer":
            out: nn.Module = kgopt.nn.ChannelLayerNorm(shape[1], 1e-6, **keywords)
        else:
            eps = 1e-12 if kind == "l2" else 1e-6
            out = kgopt.nn.ChannelRMSNorm(shape[1], eps, normalize=kind == "l2", **keywords)
        out.load_state_dict(model.state_dict(), strict=True)
        return out

    name, kink = f"{'x'.join(map(str, shape))} {kind} {act}", kink_error(act, shape)
    return Case("channelnorm", name, shape, plain, fused, group_norm_work, position_slices, gpu_clock=True, kink=kink)


# Written down before the kernels ran on a GPU. Above 20 MB: within 1.25 of the floor in NCHW, 1.4 in channels_last, 1.5
# backward; the first row in bf16 at 85 % of the copy bandwidth in both formats (its floor is one read and one write of
# 307 MB). The last one lies in L2, where launches and barriers count: within 3 of the floor.
_CHANNEL_NORM = (
    ((1, 96, 4, 480, 832), "l2", "silu"),
    ((1, 384, 4, 120, 208), "l2", "silu"),
    ((1, 128, 9, 256, 256), "rms", "silu"),
    ((16, 192, 56, 56), "layer", "none"),
    ((1, 1024, 4, 32, 32), "rms", "silu"),
)


def group_norm_cases() -> list[Case]:
    """Shapes of segmentation networks, autoencoders and diffusion."""
    return [_group_norm_case(*row) for row in _GROUP_NORM]


def channel_norm_cases() -> list[Case]:
    """Shapes of autoencoders and of ConvNeXt."""
    return [_channel_norm_case(*row) for row in _CHANNEL_NORM]
