"""Whether a result is right: the tolerance rule, and where NaN and infinities stand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kgopt import accuracy

__all__ = ["TINY", "Judged", "same_bits", "verdict"]

# What rounding alone explains when PyTorch happens to be exact.
TINY = {str(dtype).removeprefix("torch."): tiny for dtype, tiny in accuracy.TINY.items()}
_FLOOR = {"float64": 2.0**-1020, "float32": 2.0**-124, "float16": 2.0**-22, "bfloat16": 2.0**-124}
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@dataclasses.dataclass(frozen=True)
class Judged:
    """One result beside its yardsticks, all on one device."""

    what: str  # "y", "dx", ...
    ours: Tensor
    theirs: Tensor  # PyTorch's, of the same dtype
    exact: Tensor  # the float64 one
    precision: str  # the dtype whose rounding counts: autocast's where that is lower
    floor: float = 0.0  # absolute error that says nothing
    saved: bool = False  # a statistic for the backward: NaN or infinite is the same there
    zeros: bool = False  # where PyTorch has NaN, the product of one and a zero may be left out


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = _BITS.get(a.element_size())
    if kind is None or a.dtype.is_complex:
        return torch.equal(a, b)
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def _kinds(t: Tensor) -> Tensor:
    """0 where finite, 1 where NaN, 2 and 3 where infinite."""
    kinds = t.isnan().to(torch.uint8)
    if bool(t.isinf().any()):
        kinds = kinds + 2 * t.isposinf().to(torch.uint8) + 3 * t.isneginf().to(torch.uint8)
    return kinds


def _factors(elements: int) -> tuple[float, float]:
    """Of noise in the norm and in the largest element: few elements have little to average."""
    return 4.0 + 8 / max(elements, 1) ** 0.5, 8.0 + 16 / max(elements, 1) ** 0.5


def _first(where: Tensor) -> list[int]:
    return [int(i) for i in where.nonzero()[0]]


def verdict(j: Judged, samples: Callable[[], Sequence[Tensor]]) -> str | None:
    """None, or what is wrong. ``samples`` are float64 results under rounding noise, asked for only where needed."""
    if j.ours.numel() == 0:
        return None
    noise = functools.cache(samples)
    return _special_values(j, noise) or _values(j, noise)


def _special_values(j: Judged, noise: Callable[[], Sequence[Tensor]]) -> str | None:
    """Where NaN and infinities stand."""
    ours, theirs, exact = j.ours, j.theirs, j.exact
    dtype = ours.dtype
    of_ours, of_theirs, of_exact = _kinds(ours), _kinds(theirs), _kinds(exact.to(dtype))
    wrong = (of_ours != of_theirs) & (of_ours != of_exact)
    # Of infinities that meet, another order of the same sums leaves one of them.
    wrong &= ~((of_ours > 1) & (of_theirs == 1) & (of_exact == 1))
    # Where PyTorch's value is nothing like float64's, that it is finite says nothing either.
    wrong &= ~((of_theirs == 0) & (of_exact == 0) & ((theirs - exact).abs() > 0.5 * exact.abs()) & (of_ours > 1))
    if j.zeros:
        wrong &= ~((of_theirs == 1) & (of_exact == 1))
    if j.saved:
        wrong &= (of_ours == 0) | ((of_theirs == 0) & (of_exact == 0))
    if not bool(wrong.any()):
        return None
    # Just below the largest number it is the last bit that says whether it overflows.
    wrong &= ~((exact.abs() > 0.98 * torch.finfo(dtype).max) & exact.isfinite() & (of_ours != 1))
    if bool(wrong.any()):
        up, down = torch.zeros_like(wrong), torch.zeros_like(wrong)
        for s in noise():
            of_sample = _kinds(s.to(dtype))
            wrong &= of_ours != of_sample
            up |= of_sample == 2
            down |= of_sample == 3
        # Infinite with either sign: of a factor that is zero but for rounding. Times zero it is NaN.
        wrong &= ~(up & down & (of_ours == 1))
    if not bool(wrong.any()):
        return None
    at = _first(wrong)
    i = tuple(at)
    return (
        f"special values: {j.what}{at} is {float(ours[i])}, PyTorch has {float(theirs[i])}, "
        f"float64 {float(exact[i])}; {int(wrong.sum())} of {ours.numel()} elements"
    )


def _values(j: Judged, noise: Callable[[], Sequence[Tensor]]) -> str | None:
    """The finite ones, by norm and by the largest error."""
    ours, theirs, exact = j.ours, j.theirs, j.exact
    finite = ours.isfinite() & exact.isfinite()
    counted = int(finite.sum()) if not bool(finite.all()) else ours.numel()
    if counted == 0:
        return None
    reference = exact.masked_fill(~finite, 0) if counted < ours.numel() else exact
    mine = (ours.double() - reference).abs()
    other = (theirs.double() - reference).abs()
    odd = ~theirs.isfinite()
    if counted < ours.numel() or bool(odd.any()):
        mine = mine.masked_fill(~finite, 0)
        other = other.masked_fill(~finite | odd, 0)
    numbers = torch.stack([reference.norm(), reference.abs().max(), mine.norm(), mine.max(), other.norm(), other.max()])
    size, largest, my_norm, my_max, other_norm, other_max = numbers.tolist()
    tiny, floor = TINY[j.precision], _FLOOR[j.precision] + j.floor
    norm_allowed = 2 * other_norm + tiny * size + floor * counted**0.5
    max_allowed = 4 * other_max + 8 * tiny * largest + floor
    if my_norm <= norm_allowed and my_max <= max_allowed:
        return None
    norm_factor, max_factor = _factors(counted)
    for s in noise():
        away = (s - reference).abs()
        away = away.masked_fill(~(finite & away.isfinite()), 0)
        a, b = torch.stack([away.norm(), away.max()]).tolist()
        norm_allowed, max_allowed = max(norm_allowed, norm_factor * a), max(max_allowed, max_factor * b)
    if my_norm <= norm_allowed and my_max <= max_allowed:
        return None
    i = tuple(_first(mine == mine.max()))
    return (
        f"wrong values: {j.what} has error {my_norm / max(size, 1e-300):.3e} of its norm, allowed "
        f"{norm_allowed / max(size, 1e-300):.3e} (PyTorch's is {other_norm / max(size, 1e-300):.3e}); the largest "
        f"{my_max:.3e}, allowed {max_allowed:.3e} (PyTorch's is {other_max:.3e}), at {list(i)}: {float(ours[i])}, "
        f"PyTorch {float(theirs[i])}, float64 {float(exact[i])}"
    )
