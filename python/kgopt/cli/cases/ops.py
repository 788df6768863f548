"""Activations, reductions and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from kgopt.cli.cases.case import ACTS, Case, Chain, batch_slices
from kgopt.cli.floor import Work


def _op_case(
    name: str,
    shape: tuple[int, ...],
    plain: Callable[[torch.Tensor], torch.Tensor],
    ours: Callable[[torch.Tensor], torch.Tensor],
    result: Callable[[tuple[int, ...]], int],
    saves_result: bool = False,
) -> Case:
    """`result` gives the number of elements of the result; the backward of some ops reads it again."""

    def work(shape: tuple[int, ...], itemsize: int, direction: str) -> Work:
        x, y = math.prod(shape), result(shape)
        if direction == "backward":
            reads_x = 0 if name.startswith("mean") else x
            return Work((reads_x + x + y + (y if saves_result else 0)) * itemsize)
        return Work((x + y) * itemsize)

    return Case("ops", name, shape, lambda: Chain(plain), lambda model: Chain(ours), work, batch_slices, layouts=False)


def _plain_stats(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.reshape(x.shape[0], 8, -1)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    var, mean = torch.var_mean(rows, dim=-1, correction=0)
    return mean, torch.rsqrt(var + 1e-5)


def _activation_cases() -> list[Case]:
    big = (32, 64, 128, 128)
    return [
        _op_case(
            f"activation {act}",
            big,
            ACTS[act],
            lambda x, act=act: torch.ops.kgopt.activation(x, act),  # type: ignore[misc]
            math.prod,
        )
        for act in ("relu", "silu", "gelu", "mish", "tanh+hardswish")
    ]


def _reduction_cases() -> list[Case]:
    ops = torch.ops.kgopt
    return [
        _op_case(
            "logsumexp over channels",
            (128, 64, 126, 126),
            lambda x: torch.logsumexp(x, 1, keepdim=True),
            lambda x: ops.logsumexp(x, [1], True),
            lambda s: math.prod(s) // s[1],
            saves_result=True,
        ),
        _op_case(
            "logsumexp over the last dim",
            (8192, 4096),
            lambda x: torch.logsumexp(x, -1),
            lambda x: ops.logsumexp(x, [-1]),
            lambda s: s[0],
            saves_result=True,
        ),
        _op_case(
            "mean over all but batch",
            (128, 24, 22, 30, 30),
            lambda x: x.mean([1, 2, 3, 4]),
            lambda x: ops.mean(x, [1, 2, 3, 4]),
            lambda s: s[0],
        ),
        _op_case(
            "mean over space",
            (32, 64, 128, 128),
            lambda x: x.mean([2, 3]),
            lambda x: ops.mean(x, [2, 3]),
            lambda s: s[0] * s[1],
        ),
    ]


def _statistics_cases() -> list[Case]:
    ops = torch.ops.kgopt
    return [
        # Stacked along dim 1, so that the result is one tensor whose first dim is the batch.
        _op_case(
            "group_stats of 8 groups",
            (16, 128, 34, 34, 34),
            lambda x: torch.cat(_plain_stats(x), 1),
            lambda x: torch.cat(ops.group_stats(x, 8), 1),
            lambda s: s[0] * 16,
        ),
        _op_case(
            "group_norm_mean of 8 groups",
            (128, 24, 22, 30, 30),
            lambda x: F.group_norm(x, 8, *_affine(x)).mean([1, 2, 3, 4]),
            lambda x: ops.group_norm_mean(x, 8, *_affine(x)),
            lambda s: s[0],
        ),
    ]


def _affine(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A gamma and a beta that are not 1 and 0, in x's dtype."""
    key = (x.shape[1], x.dtype, x.device)
    if key not in _AFFINE:
        # Eighths and quarters are exact in every dtype, so the float64 reference has the same gamma and beta.
        steps = torch.arange(x.shape[1])
        _AFFINE[key] = ((steps % 8 / 8 + 0.5).to(x), (steps % 5 / 4 - 0.25).to(x))
    return _AFFINE[key]


_AFFINE: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}


def op_cases() -> list[Case]:
    """Activations, reductions and statistics."""
    return [*_activation_cases(), *_reduction_cases(), *_statistics_cases()]
