"""Nearest and linear resampling in captured graphs of training: gradients are gathered.

AOTAutograd makes reads by index of ``F.interpolate``, whose gradient clears a tensor and adds to it with atomics, one
for each value that was read, in the dtype of the tensor. Here each position of the gradient is the sum, in float32, of
the results that read it: resampling is linear and goes dim by dim, so its transpose does, too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from kgopt._layout import is_channels_last
from kgopt.rewrite.captured.values import is_known, value
from kgopt.rewrite.glue.calls import INTERPOLATE, LINEAR, resize_arguments
from kgopt.rewrite.measure import policy
from kgopt.rewrite.pytorch import originals

_NEAREST = ("nearest", "nearest-exact")
ROUNDING = 1e-6  # of weights
MOST_TERMS = 16  # of one position in one dim; beyond that atomics are few a value
MOST_FUSED = 32  # of one position in several dims: two dims that are doubled have 16


@dataclasses.dataclass(frozen=True)
class Along:
    """Resampling along one dim."""

    mode: str
    align_corners: bool
    size: int
    results: int
    scale: float  # of a result's position, to that of its source
    step: tuple[int, int] = (0, 1)  # about how many results a position has, as a fraction
    shift: int = 0  # added to s * step[0] ahead of the division
    first: int = 0  # results of position s begin at (s * step[0] + shift) // step[1] + first at the earliest
    terms: int = 0  # and are so many at most

    def begin(self, position: Any) -> Any:
        """The result from which those of a position are counted; it is never below 0."""
        results, positions = self.step
        if results % positions == 0:
            return position * (results // positions)
        return (position * results + self.shift) // positions

    @property
    def repeats(self) -> int:
        """How often each position is repeated, if it is nearest resampling by a whole factor; else 0."""
        whole = self.mode in _NEAREST and self.results % self.size == 0 and self.first == 0
        return self.results // self.size if whole and self.terms == self.results // self.size else 0

    @property
    def is_regular(self) -> bool:
        """Whether weights are the same for each position, but for the first and the last: linear, by a whole factor."""
        if self.mode in _NEAREST or self.align_corners or self.results % self.size:
            return False
        return abs(self.scale * (self.results // self.size) - 1) < ROUNDING


def swap(graph_module: fx.GraphModule, always: bool, dims_last: Collection[int] = ()) -> list[str]:
    """Has resampling gather its gradient, in a graph of Dynamo's that has one. Names of the nodes.

    Args:
        graph_module: with fake tensors as ``example_value``.
        always: on the CPU, too.
        dims_last: numbers of dims of the tensors that will lie in channels_last.
    """
    done: list[str] = []
    if not torch.is_grad_enabled():
        return done
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target is INTERPOLATE and originals.runs_as_is(node.target):
            found = _arguments(*node.args, **node.kwargs)
            if found is not None and (always or policy.default(value(found[0]).device.type)):
                last = value(found[0]).dim() in dims_last
                node.target, node.args, node.kwargs = resampled, (*found, last), {}
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
    ratio = results, size
    if mode not in _NEAREST and align_corners:
        scale = (size - 1.0) / (results - 1.0) if results > 1 else 0.0
        ratio = (results - 1, size - 1) if min(size, results) > 1 else ratio
    else:
        scale = 1.0 / factor if factor is not None else size / results
    ends: dict[int, tuple[int, int]] = {}
    for r in range(results):
        for s in _sources(Along(mode, align_corners, size, results, scale), r):
            ends[s] = min(r, ends.get(s, (r, r))[0]), max(r, ends.get(s, (r, r))[1])
    # Where results and positions do not divide, the fewest terms depend on where one begins to count.
    plans = [
        _counted(Along(mode, align_corners, size, results, scale, (2 * a, 2 * b), shift), ends)
        for a, b in dict.fromkeys([(results, size), ratio])
        for shift in (0, (-a - b) % (2 * b), -2 * a % (2 * b))
    ]
    plan = min(plans, key=lambda plan: (plan.terms, plan.step[0] % plan.step[1]))
    common = math.gcd(*plan.step, plan.shift)
    return dataclasses.replace(plan, step=(plan.step[0] // common, plan.step[1] // common), shift=plan.shift // common)


def _counted(plan: Along, ends: dict[int, tuple[int, int]]) -> Along:
    """The plan, with all results of each position; ``ends``: the first and the last of them."""
    first = min(low - plan.begin(s) for s, (low, _) in ends.items())
    terms = max(high - plan.begin(s) for s, (_, high) in ends.items()) - first + 1
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
    def forward(
        ctx: Any, x: Tensor, size: Any, factors: Any, mode: str, align_corners: bool | None, last: bool
    ) -> Tensor:
        y: Tensor = F.interpolate(x, size, factors, mode, align_corners)
        spatial, results = x.shape[2:], y.shape[2:]
        given = factors if factors is not None else [None] * len(spatial)
        triples = zip(spatial, results, given, strict=True)
        ctx.plans, ctx.last = [along(mode, bool(align_corners), *triple) for triple in triples], last
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return gathered(dy, ctx.plans, ctx.last), None, None, None, None, None


def resampled(x: Tensor, size: Any, factors: Any, mode: str, align_corners: bool | None, last: bool = False) -> Tensor:
    """``F.interpolate(x, size, factors, mode, align_corners)`` whose gradient adds without atomics.

    Args:
        x: [N, C, *S], floating-point.
        size, factors: a list of sizes and None, or None and a list of scale factors.
        mode: "nearest", "nearest-exact", "linear", "bilinear" or "trilinear".
        align_corners: as ``F.interpolate`` has it.
        last: it will lie in channels_last.
    """
    return _Resampled.apply(x, size, factors, mode, align_corners, last)  # type: ignore[no-any-return, no-untyped-call]


def gathered(dy: Tensor, plans: Sequence[Along], last: bool = False) -> Tensor:
    """The gradient of what was resampled, [N, C, *S], in dy's dtype. ``last``: dy will lie in channels_last.

    The last dim comes first: its values lie side by side in most tensors. Several dims make one sum while that has at
    most :data:`MOST_FUSED` terms: a pass of their own would write its float32 sums to memory, and read them.
    """
    dx = dy.float() if dy.dtype in (torch.bfloat16, torch.float16) else dy
    # When Inductor chooses the format of such a sum, a dim that is read by index counts as one of stride 0, and among
    # dims of equal rank the last one lies innermost. With the channels ahead of it the format would be neither dy's nor
    # contiguous, and each pass would transpose.
    last = last or is_channels_last(dy)
    dx = dx.movedim(1, -1) if last else dx
    left = list(enumerate(plans, 1 if last else 2))
    while left:
        dim, plan = left.pop()
        if plan.repeats:
            dx = dx.unflatten(dim, (plan.size, plan.repeats)).sum(dim + 1)
            continue
        group, terms = [(dim, plan)], plan.terms
        while left and not left[-1][1].repeats and terms * left[-1][1].terms <= MOST_FUSED:
            terms *= left[-1][1].terms
            group.insert(0, left.pop())
        dx = _gathered(dx, group)
    return (dx.movedim(-1, 1) if last else dx).to(dy.dtype)


def _gathered(dy: Tensor, group: Sequence[tuple[int, Along]]) -> Tensor:
    """The sums over some dims, for each term of the first one those of the others."""
    (dim, plan), *others = group
    shape = [-1 if d == dim else 1 for d in range(dy.dim())]
    # In 32 bits where the products fit.
    dtype = torch.int32 if plan.size * plan.step[0] + plan.shift < 2**31 else torch.int64
    position = torch.arange(plan.size, device=dy.device, dtype=dtype)
    begin = plan.begin(position)
    total: Any = 0
    for k in range(plan.first, plan.first + plan.terms):
        result, inside = begin + k, None
        # Compared with the ends where it can be beyond them: most of the instructions would be for this.
        if k < 0:
            result, inside = result.clamp(min=0), result >= 0
        if plan.begin(plan.size - 1) + k >= plan.results:
            is_below = begin + k < plan.results
            result, inside = result.clamp(max=plan.results - 1), is_below if inside is None else inside & is_below
        read = dy.index_select(dim, result)
        weight = _constant_weight(plan, position, k, dy.dtype) if plan.is_regular else None
        if weight is None:
            weight = _weight(plan, position, begin + k, dy.dtype)
            weight = weight if inside is None else torch.where(inside, weight, 0)
        if isinstance(weight, Tensor):
            weight = weight.view(shape)
        total = total + (_gathered(read, others) if others else read) * weight
    return total  # type: ignore[no-any-return]


def _constant_weight(plan: Along, position: Tensor, k: int, dtype: torch.dtype) -> Tensor | float:
    """How much of a position is in the k-th result from its first one on, the same in all but the ends."""
    at_ends = {s: _weight_at(plan, s, s * (plan.results // plan.size) + k) for s in {0, plan.size - 1}}
    between = max(0.0, 1 - abs((k + 0.5) * plan.scale - 0.5))
    weight: Tensor | float = between
    for s, at_end in at_ends.items():
        if at_end != between:
            weight = weight if isinstance(weight, Tensor) else torch.full_like(position, between, dtype=dtype)
            weight = torch.where(position == s, at_end, weight)
    return weight


def _weight_at(plan: Along, position: int, result: int) -> float:
    if not 0 <= result < plan.results:
        return 0.0
    source = min(max((result + 0.5) * plan.scale - 0.5, 0.0), plan.size - 1.0)
    return max(0.0, 1 - abs(source - position))


def _weight(plan: Along, position: Tensor, result: Tensor, dtype: torch.dtype) -> Tensor:
    """How much of a position is in a result that there is."""
    if plan.mode in _NEAREST:
        source = ((result.float() + _offset(plan)) * plan.scale).long().clamp(max=plan.size - 1)
        return (source == position).to(dtype)
    source = result.to(dtype) * plan.scale
    if not plan.align_corners:
        # Beyond the ends there is nothing between which it could lie.
        source = ((result.to(dtype) + 0.5) * plan.scale - 0.5).clamp(0, plan.size - 1)
    return (1 - (source - position).abs()).clamp(min=0)
