"""The bound by which scaled fp16 scales a channel, from the ends of its range, through the module kgopt_dev."""

from __future__ import annotations

import pytest
import torch

from kgopt.reference import ACTIVATIONS, PARAMETRIZED, activation_ref
from plan_problems import dev

CHAINS = (
    *ACTIVATIONS,
    *PARAMETRIZED,
    "mul(-3)+silu",
    "tanh+hardswish",
    "silu+add(-0.75)+gelu",
    "softplus+mish+mul(-1.7)",
)
REFUSED = ("leaky_relu(-1.5)", "threshold(0.1,20)", "tanhshrink")


@pytest.mark.parametrize("act", [act for act in CHAINS if act not in REFUSED])
def test_it_holds_over_the_whole_range_and_is_near_the_largest(act):
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 0.3, 3.0, 50.0):
        for _ in range(40):
            low, high = sorted((torch.randn(2, generator=generator, dtype=torch.float64) * size).tolist())
            values = activation_ref(torch.linspace(low, high, 2001, dtype=torch.float64), act)
            largest, bound = float(values.abs().max()), dev.scaled_half_bound(act, low, high)["largest"]
            assert bound >= largest * (1 - 1e-5) - 1e-12
            dips = [dip for dip in ("silu", "gelu", "hardswish", "mish") if dip in act]
            if not dips:
                assert bound <= largest * (1 + 1e-3) + 1e-6
            elif "+" not in act:
                assert bound <= max(2.1 * largest, 0.375)


@pytest.mark.parametrize("act", [*REFUSED, "relu+threshold(0.1,20)", "softplus(2,3)", "elu(-1)"])
def test_it_refuses_what_the_ends_say_nothing_of(act):
    assert dev.scaled_half_bound(act, -1.0, 1.0).keys() == {"refusal"}
