"""The one place for tolerances: the rule of kgopt.accuracy, in the norm and in the largest element.

``e(op) = |op - reference| / |reference|``; a kernel passes when ``e(kgopt) <= 2 e(PyTorch) + tiny`` with the same dtype
and flags. tests/test_accuracy.py holds the rule itself against numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kgopt import accuracy
from kgopt.accuracy import TINY, relative_error, round_tf32

__all__ = ["TINY", "assert_all_as_good", "assert_as_good_as_torch", "relative_error", "round_tf32"]


def assert_as_good_as_torch(
    actual: Tensor, expected: Tensor, reference: Tensor, also: Tensor | None = None, factor: float = 2
) -> None:
    """``expected`` is PyTorch's result, ``reference`` the fp64 one, ``also`` a second yardstick of the same precision.

    The second is for TF32: PyTorch takes it for some convolutions and not for others under the same flag, so the error
    of an ideal TF32 product (operands rounded, summed in fp64) counts where it is the larger one.
    """
    assert actual.shape == reference.shape, f"shape {tuple(actual.shape)}, expected {tuple(reference.shape)}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert torch.equal(actual.isnan(), expected.isnan()), "NaN in other places than PyTorch's"
    if reference.numel() == 0:
        return
    tiny = TINY[actual.dtype]
    yardsticks = [expected] if also is None else [expected, also]
    errors = [relative_error(y, reference) for y in yardsticks]
    allowed = accuracy.allowed(actual.dtype, *errors, factor=factor)
    error = relative_error(actual, reference)
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"
    scale = float(reference.abs().max())
    largest = float((actual.double() - reference).abs().max())
    torch_largest = max(float((y.double() - reference).abs().max()) for y in yardsticks)
    assert largest <= 2 * factor * torch_largest + 8 * tiny * scale, (
        f"largest error {largest:.3e}, PyTorch's {torch_largest:.3e}"
    )


def assert_all_as_good(
    actual: Iterable[Tensor | None],
    expected: Iterable[Tensor | None],
    reference: Iterable[Tensor | None],
    factor: float = 2,
) -> None:
    """Each by the rule; what PyTorch gives no gradient has none."""
    for mine, theirs, right in zip(actual, expected, reference, strict=True):
        assert (mine is None) == (theirs is None) == (right is None)
        if mine is not None and theirs is not None and right is not None:
            assert_as_good_as_torch(mine, theirs, right, factor=factor)
