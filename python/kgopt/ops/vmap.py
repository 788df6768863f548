"""Rules of vmap: ``rule(op, info, in_dims, *args, **kwargs)`` returns the results and their batch dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def one_by_one(op: Any, info: Any, in_dims: Sequence[int | None], *args: Any, **kwargs: Any) -> Any:
    """The rule that always holds: one call an example."""
    results = [
        op(*(a.select(d, i) if isinstance(d, int) else a for a, d in zip(args, in_dims, strict=True)), **kwargs)
        for i in range(info.batch_size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(r) for r in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def batch_first(t: Tensor, dim: int | None, batch: int) -> Tensor:
    """With the batch as its first dim, expanded where t has none."""
    return t.unsqueeze(0).expand(batch, *t.shape) if dim is None else t.movedim(dim, 0)


def samples(per_sample: int = 1) -> Callable[..., Any]:
    """The first ``per_sample`` arguments begin with N: the new batch joins it, and leaves it again in every output."""

    def rule(op: Any, info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(d, int) for d in in_dims[per_sample:]):  # of a list of numbers it is a list of None
            return one_by_one(op, info, in_dims, *args, **kwargs)
        pairs = zip(args[:per_sample], in_dims[:per_sample], strict=True)
        tensors = [batch_first(t, d, info.batch_size) for t, d in pairs]
        sizes = tensors[0].shape[:2]
        out = op(*(t.flatten(0, 1) for t in tensors), *args[per_sample:], **kwargs)
        if isinstance(out, Tensor):
            return out.unflatten(0, sizes), 0
        return tuple(o.unflatten(0, sizes) for o in out), (0,) * len(out)

    return rule


def pointwise(tensors: int) -> Callable[..., Any]:
    """The batch is one more dim of the first ``tensors`` arguments."""

    def rule(op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
        batched = (batch_first(t, d, info.batch_size) for t, d in zip(args[:tensors], in_dims[:tensors], strict=True))
        return op(*batched, *args[tensors:]), 0

    return rule
