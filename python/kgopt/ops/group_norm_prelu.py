"""GroupNorm, perhaps a sum, and PReLU, whose slopes are a parameter."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt._layout import affine_dtype, as_x_lies, empty, empty_like, wide
from kgopt.ops.autocast import cast, everywhere
from kgopt.ops.calls import in_backward
from kgopt.ops.group_norm import (
    affine_gradients,
    from_x,
    norm_backward,
    norm_formula,
    normalized,
    stats_fake,
    sum_gradients_fake,
    with_affine,
)
from kgopt.ops.registry import Dims, record, record_public
from kgopt.ops.vmap import one_by_one, samples

_prelu_backward = in_backward("group_norm_prelu_backward")  # as nodes call it


def _setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, slope, ctx.num_groups, weight, bias, _, residual = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, slope, weight, bias, residual, mean, rstd)


def _backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, slope, weight, bias, residual, mean, rstd = ctx.saved_tensors
    groups = ctx.num_groups
    dx, dz, dslope, dweight, dbias = _prelu_backward(dy, x, mean, rstd, slope, groups, weight, bias, residual)
    dweight, dbias = affine_gradients(ctx, (3, 4), dweight, dbias)  # type: ignore[assignment]
    return dx, dslope, None, dweight, dbias, None, None if residual is None else dz


def _by_channel(slope: Tensor, rank: int) -> Tensor:
    return slope.reshape(1, -1, *[1] * (rank - 2))


def _fwd_formula(
    x: Tensor,
    slope: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    z, mean, rstd = norm_formula(wide(x), num_groups, weight, bias, eps, "none")
    z = z if residual is None else z + wide(residual)
    return as_x_lies(F.prelu(z, wide(slope).reshape(-1)), x), mean, rstd


def _backward_formula(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    slope: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    z = with_affine(normalized(wide(x), mean, rstd), weight, bias)
    z = z if residual is None else z + wide(residual)
    above, dy = z > 0, wide(dy)
    dz = torch.where(above, dy, dy * _by_channel(wide(slope), dy.dim()))
    terms = torch.where(above, 0, dy * z)
    dslope = terms.sum() if slope.numel() == 1 else terms.sum([0, *range(2, dy.dim())])
    dx, dweight, dbias = norm_backward(dz, wide(x), mean, rstd, weight)
    dtype = affine_dtype(x, weight, bias)
    dslope = dslope.reshape(slope.shape).to(slope.dtype)
    return as_x_lies(dx, x), as_x_lies(dz, x), dslope, dweight.to(dtype), dbias.to(dtype)


def _gradients_fake(
    x: Tensor, slope: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, dz, dweight, dbias = sum_gradients_fake(x, weight, bias)
    return dx, dz, empty(slope, slope.shape), dweight, dbias


def _in_the_dtype_of_prelu(op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """PyTorch's norm gives float32 on CUDA, and its PReLU rounds to the autocast dtype, as the op does of such an x."""
    x, residual = args[0], args[6] if len(args) > 6 else kwargs.get("residual")
    if x.dtype is dtype and (residual is None or residual.dtype is dtype):
        rest = [a if isinstance(a, Tensor) and a.dtype is dtype else cast(a, torch.float32) for a in args]
        return op(*rest, **kwargs)
    wide_named = {name: cast(a, torch.float32) for name, a in kwargs.items()}
    return cast(op(*(cast(a, torch.float32) for a in args), **wide_named), dtype)


def _vmap(op: Any, info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
    """Examples share a call where the residual, the last argument, is none."""
    rule = samples() if len(args) < 7 or args[6] is None else one_by_one
    return rule(op, info, in_dims, *args, **kwargs)


def _dims(tensors: str, results: str) -> Any:
    """Of letters, with S for the slopes: one for all channels, or one for each."""

    def of(given: dict[str, Any]) -> Dims:
        slope = given["slope"]
        letters = "C" if slope.numel() > 1 else "." * slope.dim()
        given_dims, result_dims = (
            tuple(letters if t == "S" else t for t in text.split()) for text in (tensors, results)
        )
        return Dims(given_dims, result_dims, "NC", (("num_groups", "G"),))

    return of


op = record(
    "group_norm_prelu_fwd",
    fake=lambda x, slope, num_groups, *_: (empty_like(x), *stats_fake(x, num_groups)),
    formula=_fwd_formula,
)
op.dims = Dims(("NC",), ("NC",))
op.setup, op.backward, op.differentiable = _setup, _backward, 1
op.vmap = _vmap
public = record_public("group_norm_prelu", op)
op.dims, public.dims = _dims("NC S C C NC", "NC NG NG"), _dims("NC S C C NC", "NC")
public.autocast = everywhere(_in_the_dtype_of_prelu)

# No vmap: the parameters' gradients are sums over N.
op = record(
    "group_norm_prelu_backward",
    fake=lambda dy, x, mean, rstd, slope, groups, weight, bias, residual: _gradients_fake(x, slope, weight, bias),
    formula=_backward_formula,
)
op.dims = _dims("NC NC NG NG S C C NC", "NC NC S C C")
op.statistics = (2, 3), from_x(2)
