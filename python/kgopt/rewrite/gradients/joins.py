"""Concatenation of channels in training, where PyTorch copies element by element of channels_last tensors.

The gradient of a concatenation is cut into dense tensors. PyTorch gives views of it, which are copied before a kernel
reads them, or added at half the speed of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kgopt._layout import FORMATS, is_dense_channels_last
from kgopt.rewrite.glue.calls import cat_of
from kgopt.rewrite.glue.kernels import cat_channels_last, dense_channels_last
from kgopt.rewrite.measure import clocks, measuring, verdicts

GAIN = 0.97  # of PyTorch's time, above which a concatenation stays as it is


class _Join(torch.autograd.Function):
    """``torch.cat(tensors, 1)``, bit for bit, and its gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.sizes = [t.shape[1] for t in tensors]
        return cat_channels_last(tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        parts = dy.split(ctx.sizes, 1)
        # Of a backward that is recorded itself, views, which PyTorch can differentiate.
        if not torch.is_grad_enabled() and is_dense_channels_last(dy):
            wanted = ctx.needs_input_grad
            return tuple(dense_channels_last(p) if w else None for p, w in zip(parts, wanted, strict=True))
        return parts


def join(tensors: Sequence[Tensor]) -> Tensor:
    """``torch.cat(tensors, 1)`` of channels_last tensors of one dtype."""
    return _Join.apply(*tensors)  # type: ignore[no-any-return]


def again(*tensors: Tensor) -> Tensor:
    """:func:`join` for a backward that computes it again."""
    return cat_channels_last(tensors)


def tensors_of(is_plain: Callable[[Any], bool], args: Any, kwargs: Any) -> tuple[Tensor, ...] | None:
    """What a call of ``torch.cat`` joins, where :func:`join` can do it."""
    call = cat_of(lambda t: is_plain(t) and t.dim() in FORMATS, args, kwargs)
    return (call.x, *call.more) if call is not None and call.argument[0] == 1 else None


def gain(tensors: tuple[Tensor, ...]) -> float:
    """Seconds of the GPU that it saves until gradients are dense, 0 where it is not faster; known of equal ones."""
    key = verdicts.key_of("training gain", tensors[0].device, ("cat",), verdicts.canonical(list(tensors)))
    seconds: float = verdicts.store.settle(key, lambda: _gain(tensors))[0]
    return seconds


def _gain(tensors: tuple[Tensor, ...]) -> float:
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    wanted = [t for t in leaves if t.requires_grad]
    form = FORMATS[leaves[0].dim()]

    def step(function: Callable[[Sequence[Tensor]], Tensor]) -> list[Tensor]:
        y = function(leaves)
        given = torch.autograd.grad(y, wanted, torch.ones_like(y)) if wanted else ()
        return [y, *(g.contiguous(memory_format=form) for g in given)]

    def theirs(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), 1)

    try:
        with measuring.own_saved_tensors():
            expected, actual = step(theirs), step(join)
            if any(a.stride() != e.stride() for a, e in zip(actual, expected, strict=True)):
                return 0.0
            del expected, actual
            before, after = clocks.busy_both(lambda: step(theirs), lambda: step(join), leaves[0].device)
    except (torch.OutOfMemoryError, RuntimeError):
        return 0.0
    return before - after if after < GAIN * before else 0.0
