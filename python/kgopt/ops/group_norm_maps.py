"""GroupNorm times a map plus a map, whose positions each stand for several of x (SPADE, SpatialNorm)."""

from __future__ import annotations

from torch import Tensor

from kgopt import reference
from kgopt._layout import as_x_lies, empty_like, wide
from kgopt.ops.autocast import in_fp32
from kgopt.ops.group_norm import norm_formula
from kgopt.ops.registry import OPS, dims_by_group, record


def _formula(
    x: Tensor,
    moments: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    act: str,
) -> Tensor:
    """The moments are those of x."""
    z, _, _ = norm_formula(wide(x), num_groups, weight, bias, eps, "none")
    z = z * reference.enlarged(wide(scale), x) + reference.enlarged(wide(shift), x)
    return as_x_lies(reference.activation_ref(z, act), x)


def _check(name: str, map: Tensor, x: Tensor) -> None:
    """As the CUDA file does."""
    if map.dtype is not x.dtype or map.device != x.device:
        raise RuntimeError(
            f"group_norm_maps: {name} has dtype {map.dtype} on {map.device}, expected x's, {x.dtype} on {x.device}"
        )
    fits = x.dim() in (4, 5) and map.dim() == x.dim() and map.shape[:2] == x.shape[:2]
    if not fits or any(s == 0 or of_x % s for s, of_x in zip(map.shape[2:], x.shape[2:], strict=True)):
        raise RuntimeError(
            f"group_norm_maps: {name} has shape {list(map.shape)}, expected that of x, {list(x.shape)}, or divisors of "
            "its sizes behind the channels"
        )


def _on_cpu(
    x: Tensor,
    moments: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    act: str = "none",
) -> Tensor:
    """By the norm's kernel, and PyTorch's passes."""
    for name, map in (("scale", scale), ("shift", shift)):
        _check(name, map, x)
    if scale.shape != shift.shape:
        raise RuntimeError(
            f"group_norm_maps: shift has shape {list(shift.shape)}, expected that of scale, {list(scale.shape)}"
        )
    z = OPS.group_norm(x, num_groups, weight, bias, eps)
    z = wide(z).mul(reference.enlarged(scale, x)).add_(reference.enlarged(shift, x))
    return as_x_lies(OPS.activation(z, act), x)


op = record("group_norm_maps", fake=lambda x, *_: empty_like(x), formula=_formula)
op.dims = dims_by_group("NC NC NC NC C C", "NC")
op.on_cpu = _on_cpu
op.autocast = {"cuda": in_fp32}
