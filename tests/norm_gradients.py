"""GroupNorm forward and backward, run by the tests of its families."""

from __future__ import annotations

import torch

from kgopt import reference
from shapes import laid_out, make
from tolerances import assert_all_as_good


def run_both_ways(norm, dy, *tensors):
    """The result, and gradients of every tensor."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = norm(*leaves)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def gradients_of(norm, dy, *tensors):
    return run_both_ways(norm, dy, *tensors)[1:]


def check_both_ways(ours, plain, dy, *tensors):
    """As good as PyTorch's by the rule, and that a second call has the same bits; what the first one gave."""
    mine = run_both_ways(ours, dy, *tensors)
    exact = run_both_ways(plain, dy, *(t.double() for t in tensors))
    assert_all_as_good(mine, run_both_ways(plain, dy, *tensors), exact)
    assert all(map(torch.equal, mine, run_both_ways(ours, dy, *tensors)))
    return mine


def away_from_kink(dy, doubles, groups, act, pre_act):
    """``dy`` with 0 where rounding decides on which side of a kink one of millions of elements lies."""
    if act not in ("relu", "leaky_relu"):
        return dy
    near = reference.group_norm_ref(doubles[0], groups, *doubles[1:], pre_act=pre_act).abs() < 1e-3
    return dy.masked_fill(near, 0)


def check_gradients(shape, groups, dtype, act, pre_act, device, layout):
    """Gradients of GroupNorm between two chains against PyTorch's, and that a second call has the same bits."""

    def ours(x, w, b):
        return torch.ops.kgopt.group_norm_fwd(x, groups, w, b, 1e-5, act, pre_act)[0]

    def plain(x, w, b):
        return reference.group_norm_ref(x, groups, w, b, act=act, pre_act=pre_act)

    for scale, offset in ((1.0, 0.0), (3.0, 100.0)):
        tensors = make(shape, dtype, device, layout, scale, offset)
        doubles = [t.double() for t in tensors]
        dy = away_from_kink(torch.randn(shape, device=device), doubles, groups, act, pre_act)
        dy = laid_out(dy.to(dtype), layout)
        mine = gradients_of(ours, dy, *tensors)
        assert mine[0].stride() == dy.stride()
        assert_all_as_good(mine, gradients_of(plain, dy, *tensors), gradients_of(plain, dy, *doubles))
        assert all(map(torch.equal, mine, gradients_of(ours, dy, *tensors)))
