"""Convolutions alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kgopt.cli.cases.case import Case, Slice, batch_slices, double, is_small
from kgopt.cli.floor import Work


class _OwnKernel(nn.Module):
    """kgopt's convolution with backend="kgopt"."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.conv
        if isinstance(c, nn.ConvTranspose3d):
            return torch.ops.kgopt.conv_transpose3d(
                x, c.weight, c.bias, c.stride, c.padding, c.output_padding, c.groups, c.dilation, backend="kgopt"
            )
        op = torch.ops.kgopt.conv2d if isinstance(c, nn.Conv2d) else torch.ops.kgopt.conv3d
        return op(x, c.weight, c.bias, c.stride, c.padding, c.dilation, c.groups, backend="kgopt")


class _Slab(nn.Module):
    """A convolution of some rows of x, without the output rows that lack neighbours."""

    def __init__(self, conv: nn.Module, keep: slice) -> None:
        super().__init__()
        self.conv, self.keep = conv, keep

    def forward(self, piece: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.conv(piece)[:, :, self.keep]
        return rows


def conv_slices(model: nn.Module, x: torch.Tensor) -> Iterator[Slice]:
    """Whole samples while they are small; else slabs of output rows along the first spatial dim, with their halo.

    For a convolution of stride and dilation 1 with kernel 3 and padding 1. The piece's own padding holds at the ends;
    within, the slab is one row larger on each side and its own padded rows are cut off.
    """
    if isinstance(model, nn.ConvTranspose3d) or is_small(x):
        yield from batch_slices(model, x)
        return
    module = double(model)
    depth = x.shape[2]
    # Two pieces from the ends and one from the middle: a whole float64 convolution would take longer than the bench.
    for start in sorted({0, max(0, depth // 2 - 2), max(0, depth - 4)}):
        stop = min(depth, start + 4)
        low, high = max(0, start - 1), min(depth, stop + 1)
        rows = (slice(None), slice(None))
        slab = _Slab(module, slice(start - low, stop - low))
        yield Slice((*rows, slice(low, high)), (*rows, slice(start, stop)), slab)


def _conv_case(kind: str, c_in: int, c_out: int, batch: int, spatial: tuple[int, ...]) -> Case:
    transposed, flat = kind == "conv_transpose3d", kind == "conv2d"
    # The pipelines' own convolutions have no padding, those of the networks keep the size.
    padding = 0 if batch > 1 else 1
    shape = (batch, c_in, *spatial)

    def make(namespace: Any) -> nn.Module:
        name = "ConvTranspose3d" if transposed else "Conv2d" if flat else "Conv3d"
        module: nn.Module = getattr(namespace, name)(c_in, c_out, 3, padding=padding)
        return module

    def plain() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make(nn)

    def ours(model: nn.Module) -> nn.Module:
        import kgopt.nn

        like = next(model.parameters())
        out = make(kgopt.nn).to(device=like.device, dtype=like.dtype)
        out.load_state_dict(model.state_dict(), strict=True)
        return out

    def work(shape: tuple[int, ...], itemsize: int, direction: str) -> Work:
        out = [s + 2 - 2 * padding if transposed else s - 2 + 2 * padding for s in shape[2:]]
        x, y = math.prod(shape), shape[0] * c_out * math.prod(out)
        taps = 3 ** len(out)
        flops = 2.0 * shape[0] * c_in * c_out * taps * math.prod(shape[2:] if transposed else out)
        if direction == "backward":  # reads x and dy, writes dx; dgrad and wgrad
            return Work((2 * x + y) * itemsize, 2 * flops)
        return Work((x + y + c_in * c_out * taps) * itemsize, flops)

    name = f"{kind} {c_in}->{c_out} {batch}x{'x'.join(map(str, spatial))}"
    # Forward only: the gradients go through ATen.
    return Case("conv", name, shape, plain, ours, work, conv_slices, backward="", own_kernel=_OwnKernel)


_CONV = (
    ("conv3d", 32, 32, 1, (128, 128, 128)),
    ("conv3d", 64, 64, 1, (64, 64, 64)),
    ("conv3d", 128, 128, 1, (32, 32, 32)),
    ("conv3d", 32, 64, 1, (80, 170, 170)),
    ("conv3d", 128, 128, 1, (17, 256, 256)),
    ("conv3d", 512, 512, 1, (5, 32, 32)),
    ("conv3d", 3, 24, 128, (24, 32, 32)),
    ("conv_transpose3d", 64, 128, 16, (32, 32, 32)),
    ("conv2d", 8, 64, 128, (128, 128)),
)


def conv_cases() -> list[Case]:
    """Shapes of segmentation networks and of the pipelines."""
    return [_conv_case(*row) for row in _CONV]
