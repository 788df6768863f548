"""A tensor in the other memory format, or in a given one and in another dtype."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kgopt import reference
from kgopt._layout import empty, is_channels_last
from kgopt.ops.registry import OPS, dims, record


def _setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    ctx.was_channels_last, ctx.dtype = is_channels_last(inputs[0]), inputs[0].dtype


def _backward(ctx: Any, dy: Tensor) -> Any:
    return OPS.in_format(dy, ctx.was_channels_last, ctx.dtype), None, None


op = record(
    "in_format",
    fake=lambda x, channels_last, dtype: empty(x, x.shape, dtype=dtype, channels_last=channels_last),
    formula=reference.in_format_ref,
)
op.dims = dims("NC", "NC", ways="NC")
op.setup, op.backward = _setup, _backward
