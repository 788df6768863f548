"""Nearest and linear resampling in captured graphs of training: gradients are gathered.

AOTAutograd makes reads by index of ``F.interpolate``, whose gradient clears a tensor and adds to it with atomics, one
for each value that was read, in the dtype of the tensor. Here each position of the gradient is the sum, in float32, of
the results that read it: resampling is linear and goes dim by dim, so its transpose does, too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from kgopt.rewrite import originals, policy
from kgopt.rewrite.captured import is_known, value
from kgopt.rewrite.glue.calls import INTERPOLATE, LINEAR, resize_arguments

_NEAREST = ("nearest", "nearest-exact")
ROUNDING = 1e-6  # of weights
MOST_TERMS = 16  # of one position in one dim; beyond that atomics are few a value


@dataclasses.dataclass(frozen=True)
class Along:
    """Resampling along one dim."""

    mode: str
    align_corners: bool
    size: int
    results: int
    scale: float  # of a result's position, to that of its source
    step: tuple[int, int]  # about how many results a position has, as a fraction
    first: int = 0  # results of position s begin at s * step + first at the earliest
    terms: int = 0  # and are so many at most

    @property
    def repeats(self) -> int:
        """How often each position is repeated, if it is nearest resampling by a whole factor; else 0."""
        whole = self.mode in _NEAREST and self.results % self.size == 0 and self.first == 0
        return self.results // self.size if whole and self.terms == self.results // self.size else 0


def swap(graph_module: fx.GraphModule, always: bool) -> list[str]:
    """Has resampling gather its gradient, in a graph of Dynamo's that has one. Names of the nodes. ``always``: on the
    CPU, too.
    """
    done: list[str] = []
    if not torch.is_grad_enabled():
        return done
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target is INTERPOLATE and originals.runs_as_is(node.target):
            found = _arguments(*node.args, **node.kwargs)
            if found is not None and (always or policy.default(value(found[0]).device.type)):
                node.target, node.args, node.kwargs = resampled, found, {}
                done.append(node.name)
    return done


def _arguments(*args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
    """Those of :func:`resampled`, of a call of ``F.interpolate``; None for one that stays."""
    input, size, scale_factor, mode, align_corners, recomputes, antialias = resize_arguments(*args, **kwargs)
    x = value(input)
    known = isinstance(input, fx.Node) and is_known(x) and x.dim() in (3, 4, 5)
    if not known or antialias or recomputes or (size is None) == (scale_factor is None):
        return None
    spatial = tuple(x.shape[2:])
    given = size if size is not None else scale_factor
    values = tuple(given) if isinstance(given, (tuple, list)) else (given,) * len(spatial)
    if len(values) != len(spatial) or not all(isinstance(v, (int, float)) and v > 0 for v in values):
        return None
    if not (mode in _NEAREST and align_corners is None) and LINEAR.get(mode) != x.dim():
        return None
    if size is not None:
        if not all(type(v) is int for v in values):
            return None
        results, scales = values, (None,) * len(values)
    else:
        results, scales = tuple(int(n * v) for n, v in zip(spatial, values, strict=True)), values
    # Eager kernels take an equal or a double size for what it is, whatever the factor that led to it.
    rounded = [
        n for n, r, v in zip(spatial, results, scales, strict=True) if v is not None and v * n != r in (n, 2 * n)
    ]
    if min(results) < 1 or rounded:
        return None
    plans = [along(mode, bool(align_corners), *sizes) for sizes in zip(spatial, results, scales, strict=True)]
    if max(plan.terms for plan in plans) > MOST_TERMS:
        return None
    sizes = (list(values), None) if size is not None else (None, list(map(float, values)))
    return input, *sizes, mode, align_corners


@functools.lru_cache(maxsize=256)
def along(mode: str, align_corners: bool, size: int, results: int, factor: float | None) -> Along:
    """A dim of ``size`` positions that has so many results; ``factor``: the scale factor that was given."""
    step = (results, size)
    if mode not in _NEAREST and align_corners:
        scale = (size - 1.0) / (results - 1.0) if results > 1 else 0.0
        step = (results - 1, size - 1) if min(size, results) > 1 else step
    else:
        scale = 1.0 / factor if factor is not None else size / results
    plan = Along(mode, align_corners, size, results, scale, step)
    ends: dict[int, tuple[int, int]] = {}
    for r in range(results):
        for s in _sources(plan, r):
            ends[s] = min(r, ends.get(s, (r, r))[0]), max(r, ends.get(s, (r, r))[1])
    begins = {s: s * step[0] // step[1] for s in ends}
    first = min(ends[s][0] - begins[s] for s in ends)
    terms = max(ends[s][1] - begins[s] for s in ends) - first + 1
    return dataclasses.replace(plan, first=first, terms=terms)


def _sources(plan: Along, result: int) -> tuple[int, ...]:
    """The positions that a result reads: nearest ones by float32's arithmetic, as it is run."""
    last = plan.size - 1
    if plan.mode in _NEAREST:
        return (min(int(_float32(_float32(result + _offset(plan)) * _float32(plan.scale))), last),)
    position = plan.scale * (result if plan.align_corners else result + 0.5) - (0.0 if plan.align_corners else 0.5)
    position = min(max(0.0, position), last)
    return tuple(n for n in (int(position), int(position) + 1) if n <= last and abs(n - position) < 1 - ROUNDING)


def _float32(number: float) -> float:
    return ctypes.c_float(number).value


def _offset(plan: Along) -> float:
    return 0.5 if plan.mode == "nearest-exact" else 0.0


class _Resampled(torch.autograd.Function):
    """``F.interpolate`` with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Any, factors: Any, mode: str, align_corners: bool | None) -> Tensor:
        y: Tensor = F.interpolate(x, size, factors, mode, align_corners)
        spatial, results = x.shape[2:], y.shape[2:]
        given = factors if factors is not None else [None] * len(spatial)
        triples = zip(spatial, results, given, strict=True)
        ctx.plans = [along(mode, bool(align_corners), *triple) for triple in triples]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return gathered(dy, ctx.plans), None, None, None, None


def resampled(x: Tensor, size: Any, factors: Any, mode: str, align_corners: bool | None) -> Tensor:
    """``F.interpolate(x, size, factors, mode, align_corners)`` whose gradient adds without atomics.

    Args:
        x: [N, C, *S], floating-point.
        size, factors: a list of sizes and None, or None and a list of scale factors.
        mode: "nearest", "nearest-exact", "linear", "bilinear" or "trilinear".
        align_corners: as ``F.interpolate`` has it.
    """
    return _Resampled.apply(x, size, factors, mode, align_corners)  # type: ignore[no-any-return, no-untyped-call]


def gathered(dy: Tensor, plans: Sequence[Along]) -> Tensor:
    """The gradient of what was resampled, [N, C, *S], in dy's dtype."""
    dx = dy.float() if dy.dtype in (torch.bfloat16, torch.float16) else dy
    # The last dim first: its values lie side by side in most tensors.
    for dim, plan in reversed(list(enumerate(plans, 2))):
        if plan.repeats:
            dx = dx.unflatten(dim, (plan.size, plan.repeats)).sum(dim + 1)
        else:
            dx = _gathered(dx, dim, plan)
    return dx.to(dy.dtype)


def _gathered(dy: Tensor, dim: int, plan: Along) -> Tensor:
    position = torch.arange(plan.size, device=dy.device)
    begin = position * plan.step[0] // plan.step[1] + plan.first
    shape = [-1 if d == dim else 1 for d in range(dy.dim())]
    total: Any = 0
    for k in range(plan.terms):
        result = begin + k
        read = dy.index_select(dim, result.clamp(0, plan.results - 1))
        total = total + read * _weight(plan, position, result, dy.dtype).view(shape)
    return total  # type: ignore[no-any-return]


def _weight(plan: Along, position: Tensor, result: Tensor, dtype: torch.dtype) -> Tensor:
    """How much of a position is in a result; of none that there is not."""
    if plan.mode in _NEAREST:
        source = ((result.float() + _offset(plan)) * plan.scale).long().clamp(max=plan.size - 1)
        weight = (source == position).to(dtype)
    else:
        source = result.to(dtype) * plan.scale if plan.align_corners else (result.to(dtype) + 0.5) * plan.scale - 0.5
        # Beyond the ends there is nothing between which it could lie.
        weight = (1 - (source.clamp(0, plan.size - 1) - position).abs()).clamp(min=0)
    return torch.where((result >= 0) & (result < plan.results), weight, 0)
