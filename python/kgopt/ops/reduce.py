"""logsumexp, mean, and softmax of scores of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kgopt._layout import empty, is_channels_last, wide
from kgopt.ops.autocast import in_fp32
from kgopt.ops.calls import in_backward
from kgopt.ops.registry import LETTERS, Dims, record, with_defaults
from kgopt.ops.vmap import batch_first, one_by_one
from kgopt.torch_private import schema_of

_logsumexp_backward = in_backward("logsumexp_backward")
_mean_backward = in_backward("mean_backward")


def _reduced(dims: Sequence[int], rank: int) -> list[int]:
    """The dims of a reduction, all of them for none."""
    return sorted({d % max(rank, 1) for d in dims}) if dims else list(range(rank))


# ----------------------------------------------------------------------------------------------------------------------
# Results without values


def _reduced_sizes(sizes: Sequence[Any], dims: Sequence[int], keepdim: bool) -> list[Any]:
    reduced = _reduced(dims, len(sizes))
    if keepdim:
        return [1 if d in reduced else s for d, s in enumerate(sizes)]
    return [s for d, s in enumerate(sizes) if d not in reduced]


def _fake(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return empty(x, _reduced_sizes(x.shape, dims, keepdim))


def _logsumexp_backward_fake(dy: Tensor, x: Tensor, y: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    # Where what is kept lies in the order of the result, a channels_last gradient is written as it lies.
    reduced = set(_reduced(dim, x.dim()))
    as_it_lies = 1 in reduced or reduced.issuperset(range(2, x.dim()))
    return empty(x, x.shape, channels_last=as_it_lies and is_channels_last(x))


# ----------------------------------------------------------------------------------------------------------------------
# Autograd


def _logsumexp_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, ctx.dim, ctx.keepdim = inputs
    ctx.save_for_backward(x, output)


def _logsumexp_gradient(ctx: Any, dy: Tensor) -> Any:
    return (_logsumexp_backward(dy, *ctx.saved_tensors, ctx.dim, ctx.keepdim),)


def _mean_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, ctx.dims, ctx.keepdim = inputs
    ctx.sizes = x.shape


def _mean_gradient(ctx: Any, dy: Tensor) -> Any:
    return (_mean_backward(dy, ctx.sizes, ctx.dims, ctx.keepdim),)


# ----------------------------------------------------------------------------------------------------------------------
# Formulas


def _kept(t: Tensor, dims: Sequence[int], rank: int, keepdim: bool) -> Tensor:
    """A reduction's result with its dims kept."""
    if not keepdim and rank:
        for d in _reduced(dims, rank):
            t = t.unsqueeze(d)
    return t


def _logsumexp_formula(x: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    return torch.logsumexp(wide(x), _reduced(dim, x.dim()), keepdim).to(x.dtype) if x.dim() else x.clone()


def _logsumexp_backward_formula(dy: Tensor, x: Tensor, y: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    dy, y = (_kept(wide(t), dim, x.dim(), keepdim) for t in (dy, y))
    y = y.masked_fill(y == -math.inf, 0)  # a row of -inf: no gradient rather than NaN
    return (dy * torch.exp(wide(x) - y)).to(x.dtype)


def _mean_formula(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return wide(x).mean(_reduced(dims, x.dim()), keepdim).to(x.dtype) if x.dim() else x.clone()


def _mean_backward_formula(dy: Tensor, sizes: Sequence[int], dims: Sequence[int], keepdim: bool) -> Tensor:
    count = math.prod(sizes[d] for d in _reduced(dims, len(sizes)))
    return (_kept(wide(dy), dims, len(sizes), keepdim) / count).to(dy.dtype).expand(list(sizes)).clone()


def _scaled_softmax_formula(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return torch.softmax(wide(x) * scale, -1).to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# vmap and DTensor


def _vmap(tensors: int, x_at: int = 0, sizes_at: int | None = None) -> Callable[..., Any]:
    """The new batch comes first, and every reduced dim moves by one."""

    def rule(op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
        args, keywords = with_defaults(schema_of(op.default), args, {})  # type: ignore[assignment]
        sizes = None if sizes_at is None else args[sizes_at]
        rank = len(sizes) if sizes is not None else args[x_at].dim() - (in_dims[x_at] is not None)
        if rank == 0:
            return one_by_one(op, info, (*in_dims, *(None,) * (len(args) - len(in_dims))), *args, **keywords)
        pairs = zip(args[:tensors], in_dims[:tensors], strict=True)
        batched: list[Any] = [batch_first(t, d, info.batch_size) for t, d in pairs]
        if sizes is not None:
            batched.append([info.batch_size, *sizes])
        *_, dims, keepdim = args
        moved = [d + 1 if d >= 0 else d for d in dims] if dims else list(range(1, rank + 1))
        return op(*batched, moved, keepdim), 0

    return rule


def _dims(tensors: str, result: str) -> Callable[[dict[str, Any]], Dims]:
    """``tensors`` and ``result``: "x" and "y" for the whole and the reduced one. What is kept may be sharded."""

    def of(given: dict[str, Any]) -> Dims:
        rank = len(given["sizes"]) if "sizes" in given else given["x"].dim()
        reduced = _reduced(given["dim"] if "dim" in given else given["dims"], rank)
        letters = LETTERS[:rank]
        kept = [letter for d, letter in enumerate(letters) if d not in reduced]
        dot = "." if given["keepdim"] else ""
        all_of = {"x": letters, "y": "".join(letter if letter in kept else dot for letter in letters)}
        counts = tuple((f"sizes.{d}", letters[d]) for d in range(rank)) if "sizes" in given else ()
        return Dims(tuple(all_of[t] for t in tensors), (all_of[result],), "".join(kept), counts)

    return of


def _softmax_dims(given: dict[str, Any]) -> Dims:
    """All dims but the last one may be sharded."""
    kept = LETTERS[: given["x"].dim() - 1]
    return Dims((f"{kept}.",), (f"{kept}.",), kept)


op = record("logsumexp", fake=_fake, formula=_logsumexp_formula)
op.dims = _dims("x", "y")
op.setup, op.backward = _logsumexp_setup, _logsumexp_gradient
op.autocast = {"cuda": in_fp32}
op.vmap = _vmap(1)

op = record("logsumexp_backward", fake=_logsumexp_backward_fake, formula=_logsumexp_backward_formula)
op.dims = _dims("yxy", "x")
op.vmap = _vmap(3, x_at=1)

op = record("mean", fake=_fake, formula=_mean_formula)
op.dims = _dims("x", "y")
op.setup, op.backward = _mean_setup, _mean_gradient
op.vmap = _vmap(1)

op = record("mean_backward", fake=lambda dy, sizes, dims, keepdim: empty(dy, sizes), formula=_mean_backward_formula)
op.dims = _dims("y", "x")
op.vmap = _vmap(1, sizes_at=1)

op = record(
    "scaled_softmax",
    fake=lambda x, scale, dtype: empty(x, x.shape, dtype=dtype),
    formula=_scaled_softmax_formula,
)
op.dims = _softmax_dims
