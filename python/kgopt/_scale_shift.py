"""GroupNorm whose scale and shift differ from sample to sample, on the op that has one of each a channel.

``(norm(x) * weight + bias) * factor + shift`` is ``norm(x) * (weight * factor) + (bias * factor + shift)``: AdaGN
(Dhariwal and Nichol 2021), FiLM (Perez et al. 2018). The two new parameters are tiny, ``[N, C]``. And a contiguous
``[N, C, *]`` with G groups is a ``[1, N * C, *]`` with N * G groups, each channel of which has parameters of its own.
So the op, its activations, its residual and its backward serve, and autograd takes their gradients through the tiny
tensors to weight, bias, factor and shift. This file is the one place that knows it. In other layouts there is no such
view: there group_norm_by_sample takes the two parameters as they are (:func:`for_each_sample`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def fits(operand: Tensor, x: Tensor) -> bool:
    """Whether a factor or a shift has one value a channel, or a sample and a channel, with x's rank: ``[N, C, 1, 1]``.

    N may be 1.
    """
    if operand.dim() != x.dim() or operand.dim() < 2 or operand.shape[1] != x.shape[1]:
        return False
    if operand.shape[0] != 1 and operand.shape[0] != x.shape[0]:
        return False
    return all(s == 1 for s in operand.shape[2:])


def rows(factor: Tensor | None, shift: Tensor | None) -> int:
    """How many samples have parameters of their own; 1: all have the same."""
    count = 1
    if factor is not None and factor.shape[0] != 1:
        count = factor.shape[0]
    if shift is not None and shift.shape[0] != 1:
        count = shift.shape[0]
    return count


def is_number(count: int) -> bool:
    """Whether a count of rows is known. A compiler's may be symbolic, and a number of groups made of it is none.

    The ops take no symbolic number of groups: code would be compiled for each number of samples.
    """
    if torch.jit.is_scripting():
        return True
    else:  # what stands behind an if is scripted, too
        if torch.compiler.is_compiling():
            return torch.fx.experimental.symbolic_shapes.has_static_value(count)
        return type(count) is int


def folded(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    factor: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """``weight * factor`` and ``bias * factor + shift``, ``[rows * C]``, in fp32 (fp64 for fp64 x).

    ``weight`` and ``bias`` are ``[C]``, ``factor`` and ``shift`` ``[1 or N, C]``, perhaps with more dims of size 1.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels, count = x.shape[1], rows(factor, shift)
    w, b = weight, bias
    if factor is not None:
        f = factor.reshape(-1, channels).to(dtype)
        w = f if weight is None else f * weight
        if bias is not None:
            b = f * bias if shift is None else torch.addcmul(shift.reshape(-1, channels).to(dtype), f, bias)
        elif shift is not None:
            b = shift.reshape(-1, channels)
    elif shift is not None:
        s = shift.reshape(-1, channels).to(dtype)
        b = s if bias is None else s + bias
    w = None if w is None else _for_each(w, count, channels, dtype)
    return w, None if b is None else _for_each(b, count, channels, dtype)


def _for_each(t: Tensor, count: int, channels: int, dtype: torch.dtype) -> Tensor:
    """``[C]``, ``[1, C]`` or ``[count, C]`` as ``[count * C]``."""
    if t.dtype != dtype:
        t = t.to(dtype)
    if t.dim() == 1 or t.shape[0] != count:
        t = t.expand(count, channels)
    return t.reshape(-1)


def arranged(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    factor: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor, int, Tensor | None, Tensor | None]:
    """What group_norm is given instead: x, the number of groups, weight and bias. The result's values lie as x's do."""
    w, b = folded(x, weight, bias, factor, shift)
    count = rows(factor, shift)
    if count == 1:
        return x, num_groups, w, b
    return by_sample(x), count * num_groups, w, b


def for_each_sample(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    factor: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Weight and bias of each sample, ``[N, C]``, where several rows are given."""
    w, b = folded(x, weight, bias, factor, shift)
    dtype, sizes = torch.float64 if x.dtype == torch.float64 else torch.float32, [x.shape[0], x.shape[1]]
    w = torch.ones(sizes, dtype=dtype, device=x.device) if w is None else w.reshape(sizes)
    return w, torch.zeros(sizes, dtype=dtype, device=x.device) if b is None else b.reshape(sizes)


def slopes(slope: Tensor, x: Tensor, u: Tensor) -> Tensor:
    """Those of a PReLU, for what :func:`arranged` made of x."""
    if slope.numel() == 1 or u.shape[1] == x.shape[1]:
        return slope
    return slope.reshape(-1).repeat(u.shape[1] // x.shape[1])


def by_sample(t: Tensor) -> Tensor:
    """A contiguous ``[N, C, *]`` as ``[1, N * C, *]``: a view."""
    return t.flatten(0, 1).unsqueeze(0)
