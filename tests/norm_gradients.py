"""GroupNorm forward and backward, run by the tests of its families."""

from __future__ import annotations

import torch

from kgopt import reference


def gradients_of(norm, dy, *tensors):
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
    y = norm(*leaves)
    y.backward(dy.to(y.dtype))
    return [leaf.grad for leaf in leaves]


def away_from_kink(dy, doubles, groups, act, pre_act):
    """``dy`` with 0 where rounding decides on which side of a kink one of millions of elements lies."""
    if act not in ("relu", "leaky_relu"):
        return dy
    near = reference.group_norm_ref(doubles[0], groups, *doubles[1:], pre_act=pre_act).abs() < 1e-3
    return dy.masked_fill(near, 0)


def run_both_ways(norm, dy, *tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = norm(*leaves)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]
