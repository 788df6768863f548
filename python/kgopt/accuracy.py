"""What an error may be: the one rule, of docs/numerics.md.

Errors are relative to float64, in the 2-norm. An error of kgopt's may be twice the yardstick, plus a few roundings of
the result. The yardstick is PyTorch's own error with the same dtype and flags. Where convolutions may take TF32 it is
the larger of that and the error of an ideal TF32 product, whose operands are rounded to TF32 and which is exact
otherwise: PyTorch takes TF32 for some convolutions and not for others under the same flag.

Whoever compares kgopt's results with PyTorch's (sites, glue, training, the bench, the tests) asks here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kgopt import ops

__all__ = ["TINY", "allowed", "may_multiply_in_tf32", "may_take_tf32", "no_autotuning", "relative_error", "round_tf32"]

# A few roundings of the result, so that a PyTorch result that happens to be exact sets no bar of zero.
TINY = {torch.float64: 5e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def allowed(dtype: torch.dtype, *yardsticks: float, factor: float = 2.0) -> float:
    """The largest error that a result may have. NaN, as a yardstick, means PyTorch's own result is broken here."""
    return factor * max((math.inf if math.isnan(y) else y for y in yardsticks), default=0.0) + TINY.get(dtype, 1e-2)


def relative_error(y: Tensor, reference: Tensor, scale: Tensor | None = None) -> float:
    """``|y - reference| / |scale|`` in the 2-norm, over the positions that are finite in the reference.

    ``scale``: the reference itself, or where that is a sum whose terms cancel, the sum of their magnitudes: a mean of
    values that average to zero has no digit that is right, whoever computes it. A NaN or infinity of y at a position
    that is finite in the reference gives inf, which no bar allows.
    """
    reference = reference.double()
    finite = reference.isfinite()
    difference = torch.where(finite, y.double() - reference, 0.0).norm()
    size = torch.where(finite, reference if scale is None else scale.double(), 0.0).norm()
    error = float(difference / size.clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


def round_tf32(x: Tensor) -> Tensor:
    """x rounded to TF32's ten bits of mantissa, to nearest, in x's dtype; NaN and infinities stay."""
    single = x.float()
    bits = single.view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(single.isfinite(), rounded, single).to(x.dtype)


def may_take_tf32(x: Tensor) -> bool:
    """Whether a convolution of x may take TF32: float32 on CUDA, PyTorch's switch on, autocast off."""
    return (
        x.dtype is torch.float32
        and x.is_cuda
        and not torch.is_autocast_enabled(x.device.type)
        and bool(ops.conv_tf32_allowed())
    )


def may_multiply_in_tf32(x: Tensor) -> bool:
    """Whether a product of matrices like x may take TF32: float32 on CUDA, and PyTorch's switch on."""
    return x.dtype is torch.float32 and x.is_cuda and torch.backends.cuda.matmul.allow_tf32


@contextlib.contextmanager
def no_autotuning() -> Iterator[None]:
    """Turns cuDNN's benchmark mode off: for a float64 reference it would try every algorithm too."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
