"""Convolutions of every rank: sizes, the op of a rank, floating-point operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kgopt._layout import empty, is_channels_last
from kgopt.ops.registry import OPS


def conv_sizes(
    x: Sequence[Any],
    weight: Sequence[Any],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    transposed: bool,
) -> list[Any]:
    """Output sizes of a convolution from those of its input and weight."""
    rank = len(stride)
    if len(x) != rank + 2 or len(weight) != rank + 2:
        raise RuntimeError(f"x has shape {list(x)} and weight {list(weight)}, expected {rank + 2} dimensions of each")
    if (weight[0] if transposed else weight[1] * groups) != x[1]:
        raise RuntimeError(f"weight has shape {list(weight)}, expected it to fit C = {x[1]} with groups = {groups}")
    sizes = [x[0], weight[1] * groups if transposed else weight[0]]
    for i, (s, p, d, o) in enumerate(zip(stride, padding, dilation, output_padding, strict=True)):
        reach = d * (weight[2 + i] - 1)
        if transposed:
            sizes.append((x[2 + i] - 1) * s - 2 * p + reach + o + 1)
        else:
            sizes.append((x[2 + i] + 2 * p - reach - 1) // s + 1)
    return sizes


def conv_fake(x: Tensor, weight: Tensor, *geometry: Any) -> Tensor:
    """A convolution's result without values."""
    sizes = conv_sizes(x.shape, weight.shape, *geometry)
    return empty(x, sizes, channels_last=is_channels_last(x) or is_channels_last(weight))


_BY_RANK = {
    (2, False): OPS.conv2d,
    (3, False): OPS.conv3d,
    (2, True): OPS.conv_transpose2d,
    (3, True): OPS.conv_transpose3d,
}


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any, **options: Any) -> Tensor:
    """A convolution by the op of its rank. ``geometry``: as the last arguments of :func:`conv_sizes`."""
    stride, padding, dilation, output_padding, groups, transposed = geometry
    op = _BY_RANK[len(stride), transposed]
    rest = (output_padding, groups, dilation) if transposed else (dilation, groups)
    return op(x, weight, bias, stride, padding, *rest, **options)  # type: ignore[no-any-return]


def conv_flops(given: dict[str, Any], transposed: bool | None = None) -> int:
    """Those of ATen's convolution. Arguments that an op does not have count as a convolution's defaults."""
    x, weight = given["x"], given["weight"]
    rank = len(weight) - 2

    def listed(name: str, default: int) -> list[int]:
        value = given.get(name, default)
        numbers = list(value) if isinstance(value, (list, tuple)) else [value]
        return numbers * rank if len(numbers) == 1 else numbers

    groups = given.get("groups", 1)
    if transposed is None:
        transposed = given["transposed"]
    window = listed("stride", 1), listed("padding", 0), listed("dilation", 1), listed("output_padding", 0)
    # Every output (transposed: every input) element meets one column of the weight.
    positions = x[2:] if transposed else conv_sizes(x, weight, *window, groups, transposed)[2:]
    return 2 * int(x[0]) * math.prod(positions) * math.prod(weight)
