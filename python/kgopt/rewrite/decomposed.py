"""Gradients that ATen computes slowly, in compiled code: as functions that Inductor fuses with what is around them.

Given to Inductor for graphs of ``backend="kgopt"``, beside its own decompositions; eager code and plain
``torch.compile`` keep ATen's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _replication_pad_backward(dy: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Each position is the sum of those that it was repeated at, dim by dim.

    ATen's kernel adds with atomics: four times its own time in channels_last. What is added at an end is written as a
    padded tensor, since Inductor computes that, the sum and the next dim's in one kernel; ``torch.cat`` takes several.
    """
    if min(padding) < 0:  # which cuts off
        return NotImplemented
    dx = dy.float() if dy.dtype in (torch.bfloat16, torch.float16) else dy
    for i in range(len(padding) // 2):
        before, after = padding[2 * i : 2 * i + 2]
        dim, size = dy.dim() - 1 - i, x.shape[-1 - i]
        inner, kept = [0, 0] * i, dx.narrow(dim, before, size)
        if before:
            kept = kept + F.pad(dx.narrow(dim, 0, before).sum(dim, keepdim=True), [*inner, 0, size - 1])
        if after:
            kept = kept + F.pad(dx.narrow(dim, before + size, after).sum(dim, keepdim=True), [*inner, size - 1, 0])
        dx = kept
    return dx.to(dy.dtype)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.replication_pad1d_backward.default: _replication_pad_backward,
    torch.ops.aten.replication_pad2d_backward.default: _replication_pad_backward,
    torch.ops.aten.replication_pad3d_backward.default: _replication_pad_backward,
}
