"""Rules of autocast, of the dtypes of PyTorch's own ops: ``rule(op, dtype, args, kwargs)``, with autocast off.

torch lists norms and logsumexp as fp32 on CUDA, and not at all on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def cast(t: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor in this dtype; fp64 ones and all else as they are."""
    if not isinstance(t, Tensor) or t.dtype is dtype:
        return t
    return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t


def everywhere(rule: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The same rule on CPU and CUDA."""
    return {"cpu": rule, "cuda": rule}


def low(tensors: int) -> Callable[..., Any]:
    """The first arguments in the autocast dtype, the rest as it is."""

    def rule(op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
        return op(*(cast(a, dtype) for a in args[:tensors]), *args[tensors:], **kwargs)

    return rule


def in_fp32(op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """Every tensor in fp32."""
    return op(*(cast(a, torch.float32) for a in args), **kwargs)
