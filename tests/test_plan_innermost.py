"""Which gradients of contiguous tensors are computed from copies in channels_last, and the plan of split operands."""

from __future__ import annotations

import pytest

from plan_problems import GPUS, dev, make_problem

H200 = GPUS["h200"]


def planar(c_in=64, c_out=128, size=(32, 32, 32), kernel=(3, 3, 3), **more):
    return make_problem(c_in, c_out, size, kernel, planar=True, **{"n": 16, "transposed": True, **more})[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_wide_gradients_of_contiguous_tensors_are_copied(dtype):
    chosen = dev.choose_innermost_gradients(planar(dtype=dtype), H200)
    assert chosen.dx
    assert chosen.dweight
    alone = dev.choose_innermost_gradients(planar(dtype=dtype), H200, dx=False)
    assert not alone.dx


def test_with_fp32_accuracy_dx_alone_is_copied():
    problem = planar(allow_tf32=False)
    chosen = dev.choose_innermost_gradients(problem, H200)
    assert chosen.dx
    assert not chosen.dweight
    choice = dev.choose_conv_gradients(problem, H200, copies=True)
    assert isinstance(choice.dweight, dev.SplitWgradPlan)


@pytest.mark.parametrize(
    "more",
    [{"groups": 2}, {"dtype": "float64"}, {"c_in": 62}, {"c_out": 126}, {"c_in": 4, "transposed": False}, {"n": 0}],
    ids=str,
)
def test_other_gradients_stay_as_they_lie(more):
    chosen = dev.choose_innermost_gradients(planar(**more), H200)
    assert not chosen.dx
    assert not chosen.dweight


def test_small_gradients_of_fp32_accuracy_stay_cudnns():
    problem = planar(size=(2, 4, 4), n=1, allow_tf32=False)
    chosen = dev.choose_innermost_gradients(problem, H200)
    assert not chosen.dx
    assert isinstance(dev.choose_conv_gradients(problem, H200, copies=True).dweight, dev.AtenPlan)


@pytest.mark.parametrize("size", [(32, 32, 32), (7, 9, 11), (128, 128, 128), (1, 3, 3)], ids=str)
@pytest.mark.parametrize("n", [1, 3, 16])
def test_split_weight_gradients_leave_sums_of_few_positions(n, size):
    problem = planar(size=size, n=n, allow_tf32=False)
    plan = dev.plan_split_wgrad(problem, H200)
    assert plan.refusal is None
    assert 1 <= plan.samples <= n
    whole = dev.plan_wgrad_terms(problem, H200, plan.samples, dev.SPLIT_CHAIN)
    portions = dev.wgrad_portions(whole)
    at = 0
    for i in range(portions):
        part = dev.wgrad_portion(whole, i, portions)
        assert part.first_step == at
        at += part.steps
        assert part.partial_floats <= dev.SPLIT_PARTIAL_FLOATS * 2
        in_a_sum = -(-part.steps // part.splits) * part.rows * part.width
        assert in_a_sum <= max(dev.SPLIT_CHAIN, part.rows * part.width) * 2
        assert part.splits == part.slots
    assert at == whole.steps


def test_split_weight_gradients_refuse_what_they_cannot_do():
    assert "not asked for" in dev.plan_split_wgrad(planar(), H200).refusal
    assert "height or width" in dev.plan_split_wgrad(planar(kernel=(1, 1, 1), allow_tf32=False), H200).refusal
    few = planar(c_in=4, c_out=64, transposed=False, allow_tf32=False)
    assert "few input channels" in dev.plan_split_wgrad(few, H200).refusal
