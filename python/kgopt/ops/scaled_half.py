"""fp32 tensors as scaled fp16, convolutions of these, and their gradients, in graphs of training.

They stand in graphs that already are forward and backward, so they have no derivative: their formulas say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kgopt import reference
from kgopt._layout import empty, empty_like
from kgopt.ops.geometry import conv_flops, conv_sizes
from kgopt.ops.registry import OPS, Op, dims, record

# ----------------------------------------------------------------------------------------------------------------------
# Results without values


def _scaled_half_fake(x: Tensor, num_groups: int = 0, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, rstd = (empty(x, [x.shape[0], num_groups]) for _ in range(2))
    half = empty(x, x.shape, torch.float16, channels_last=True)
    return half, empty(x, [x.shape[1]], torch.float64), mean, rstd


def _conv_fake(x: Tensor, inverse: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    _, _, stride, padding, dilation = rest
    sizes = conv_sizes(x.shape, weight.shape, stride, padding, dilation, [0] * len(stride), 1, False)
    return empty(x, sizes, torch.float32, channels_last=True)


def _conv_backward_fake(
    dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    mask = rest[-1]
    return (
        empty(dy, x.shape, channels_last=True) if mask[0] else empty(dy, [0]),
        empty_like(weight) if mask[1] else empty(dy, [0]),
        empty(dy, [dy.shape[1] if mask[2] else 0]),
    )


# ----------------------------------------------------------------------------------------------------------------------
# On the CPU


def _check(op: str, argument: str, t: Tensor, expected: torch.dtype) -> None:
    if t.dtype is not expected:
        raise RuntimeError(f"{op}: {argument} has dtype {t.dtype}, expected {expected}")


def _laid(fakes: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The values in the layouts and dtypes that the fake kernel says."""
    return tuple(fake.copy_(value) for fake, value in zip(fakes, values, strict=True))


def _scaled_half(x: Tensor, num_groups: int = 0, *norm: Any) -> tuple[Tensor, ...]:
    _check("scaled_half", "x", x, torch.float32)
    results = _scaled_half_fake(x, num_groups)
    z, *statistics = OPS.group_norm_fwd(x, num_groups, *norm) if num_groups else (x, *results[2:])
    return _laid(results, (*reference.scaled_half_ref(z), *statistics))


def _conv(x: Tensor, *args: Any) -> Tensor:
    _check("conv_scaled_half", "x", x, torch.float16)
    return _laid([_conv_fake(x, *args)], [reference.conv_scaled_half_ref(x, *args)])[0]


def _conv_backward(dy: Tensor, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _check("conv_scaled_half_backward", "dy", dy, torch.float32)
    _check("conv_scaled_half_backward", "x", x, torch.float16)
    *geometry, mask = args
    gradients = reference.conv_scaled_half_backward_ref(dy, x, *geometry)
    values = [g if wanted else g.new_empty(0) for g, wanted in zip(gradients, mask, strict=True)]
    return _laid(_conv_backward_fake(dy, x, *args), values)


# ----------------------------------------------------------------------------------------------------------------------
# Records


def _record(name: str, fake: Callable[..., Any], on_cpu: Callable[..., Any]) -> Op:
    def formula(*_: Any) -> Any:
        raise RuntimeError(f"{name}: has no derivative, expected in graphs of a forward and its backward alone")

    op = record(name, fake=fake, formula=formula)
    op.on_cpu = on_cpu
    return op


def _backward_flops(given: dict[str, Any]) -> int:
    gradients = int(given["mask"][0]) + int(given["mask"][1])
    return gradients * conv_flops(given, transposed=False)


# Scales are those of all samples, so DTensors are replicated.
_record("scaled_half", _scaled_half_fake, _scaled_half).dims = dims(". . .", ". . . .", ways="")

op = _record("conv_scaled_half", _conv_fake, _conv)
op.dims = dims(". . . . .", ".", ways="")
op.flops = lambda given: conv_flops(given, transposed=False)

op = _record("conv_scaled_half_backward", _conv_backward_fake, _conv_backward)
op.dims = dims(". . . .", ". . .", ways="")
op.flops = _backward_flops
