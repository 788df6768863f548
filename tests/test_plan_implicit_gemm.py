"""Plans of the implicit GEMM (csrc/conv3d/implicit_gemm) against the definition of the convolution."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_problems import CASES, DTYPES, GPUS, check_refusal, dev, extents, make_problem


def definition(size, output, kernel, stride, padding, dilation, transposed) -> set[tuple[int, int, int]]:
    """Every (output, input, tap) along one dim that the definition of the convolution multiplies."""
    triples = set()
    for o, k in itertools.product(range(output), range(kernel)):
        if transposed:
            i, rest = divmod(o + padding - k * dilation, stride)
        else:
            i, rest = o * stride - padding + k * dilation, 0
        if rest == 0 and 0 <= i < size:
            triples.add((o, i, k))
    return triples


def planned(plan, dim: int, size: int, output: int) -> set[tuple[int, int, int]]:
    """The same triples as the plan's classes, tiles and halo reach them."""
    triples = []
    tile = 1 << plan.tile_log2[dim]
    for residue in range(plan.classes[dim]):
        cls = plan.dim(dim, residue)
        assert cls.q_count <= plan.tiles[dim] * tile, "tiles do not cover the class"
        for q in range(cls.q_count):
            o = q * plan.out_step[dim] + residue
            assert 0 <= o < output
            q0 = q // tile * tile
            for tap in range(cls.taps):
                i = q * plan.in_step[dim] + cls.off0 + tap * cls.off_step
                halo = i - (q0 * plan.in_step[dim] + cls.tile_lo)
                assert 0 <= halo < plan.halo[dim], "a tap reaches beyond the halo"
                if 0 <= i < size:
                    triples.append((o, i, cls.k0 + tap * cls.k_step))
    assert len(triples) == len(set(triples)), "something is counted twice"
    return set(triples)


def check_plan(plan, limits, output) -> None:
    """What must hold of every plan that is not a refusal."""
    assert plan.refusal is None
    positions = 1 << sum(plan.tile_log2)
    assert positions == 16 * plan.mb * (dev.CONV_THREADS // 32), "a tile is one fragment row block per warp and mb"
    assert plan.tiles_per_sample == math.prod(plan.tiles)
    assert plan.slices * plan.tiles_per_slice >= plan.tiles_per_sample, "a tile belongs to no block"
    assert (plan.slices - 1) * plan.tiles_per_slice < max(1, plan.tiles_per_sample), "a block has no tile"
    layout = plan.smem_layout()
    starts = [layout.offsets, layout.halo_map, layout.weights, layout.epilogue, layout.halo, layout.total]
    assert starts == sorted(starts)
    assert all(start % 32 == 0 for start in starts), "regions start on a bank boundary"
    assert plan.smem_bytes == 4 * layout.total <= limits.smem_per_block
    assert plan.pitch >= plan.halo[2]
    assert plan.plane >= plan.halo[0] * plan.halo[1] * plan.pitch
    for dim in range(3):
        classes = [(r, plan.dim(dim, r).q_count) for r in range(plan.classes[dim])]
        reached = {q * plan.out_step[dim] + r for r, count in classes for q in range(count)}
        assert reached == set(range(output[dim])), "an output is missing or beyond the end"


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_plan_reaches_what_the_definition_multiplies(name: str, dtype: str, gpu: str) -> None:
    case = {"stride": (1, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1), "transposed": False, **CASES[name]}
    problem, output = make_problem(**case, dtype=dtype)
    plan = dev.plan_implicit_gemm(problem, GPUS[gpu])
    check_plan(plan, GPUS[gpu], output)
    for dim in range(3):
        wanted = definition(
            case["size"][dim],
            output[dim],
            *(case[key][dim] for key in ("kernel", "stride", "padding", "dilation")),
            case["transposed"],
        )
        assert planned(plan, dim, case["size"][dim], output[dim]) == wanted


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_plan_of_any_shape(data) -> None:
    draw = data.draw
    three = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(3))  # noqa: E731
    transposed = draw(st.booleans())
    size, kernel, dilation = three(1, 20), three(1, 5), three(1, 3)
    stride, padding = three(1, 4 if transposed else 6), three(0, 4)
    outputs = [dev.conv_out_size(*dim, transposed) for dim in zip(size, kernel, stride, padding, dilation, strict=True)]
    if min(outputs) < 1:
        return  # the ops refuse these before they plan
    problem, output = make_problem(
        draw(st.integers(1, 70)),
        draw(st.integers(1, 150)),
        size,
        kernel,
        stride,
        padding,
        dilation,
        transposed=transposed,
        n=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(DTYPES)),
        allow_tf32=draw(st.booleans()),
    )
    limits = GPUS[draw(st.sampled_from(sorted(GPUS)))]
    plan = dev.plan_implicit_gemm(problem, limits)
    # What a row of 128 outputs reads, eight words of channels at a time in two stages.
    depth, height, width = extents(kernel, dilation)
    halo = depth * height * (127 * stride[2] + width)
    fits = 64 * halo <= limits.smem_per_block
    if check_refusal(plan.refusal, {"does not fit in shared memory": False if fits else None}):
        return
    check_plan(plan, limits, output)
    for dim in range(3):
        wanted = definition(size[dim], output[dim], kernel[dim], stride[dim], padding[dim], dilation[dim], transposed)
        assert planned(plan, dim, size[dim], output[dim]) == wanted


@pytest.mark.parametrize(
    ("dtype", "allow_tf32", "expected"),
    [
        ("float32", True, "tf32"),
        ("float32", False, "tf32x3"),
        ("bfloat16", True, "bf16"),
        ("float16", False, "fp16"),
    ],
)
def test_plan_math_follows_dtype_and_tf32_switch(dtype: str, allow_tf32: bool, expected: str) -> None:
    problem, _ = make_problem(3, 24, (8, 9, 10), (3, 3, 3), dtype=dtype, allow_tf32=allow_tf32)
    assert dev.plan_implicit_gemm(problem).math.name == expected


@pytest.mark.parametrize(
    ("kwargs", "fragment"),
    [
        (dict(dtype="float64"), "float64"),
        (dict(stride=(5, 1, 1), transposed=True), "stride is above 4"),
        (dict(groups=2, epilogue=dev.ConvEpilogue.residual_lse), "groups = 1"),
        (dict(kernel=(1, 5000, 1), size=(1, 6000, 1)), "too large"),
    ],
)
def test_plan_refuses_with_a_reason(kwargs: dict, fragment: str) -> None:
    case = {"c_in": 4, "c_out": 8, "size": (8, 9, 10), "kernel": (3, 3, 3), **kwargs}
    plan = dev.plan_implicit_gemm(make_problem(**case)[0])
    assert plan.refusal is not None
    assert fragment in plan.refusal


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 40),
    kernel=st.integers(1, 6),
    stride=st.integers(1, 5),
    padding=st.integers(0, 6),
    dilation=st.integers(1, 4),
    transposed=st.booleans(),
    output_padding=st.integers(0, 4),
)
def test_output_size_is_that_of_torch(
    size: int, kernel: int, stride: int, padding: int, dilation: int, transposed: bool, output_padding: int
) -> None:
    output_padding = min(output_padding, max(stride, dilation) - 1) if transposed else 0
    ours = dev.conv_out_size(size, kernel, stride, padding, dilation, transposed, output_padding)
    x, weight = torch.empty(1, 1, size, device="meta"), torch.empty(1, 1, kernel, device="meta")
    try:
        if transposed:
            y = torch.nn.functional.conv_transpose1d(x, weight, None, stride, padding, output_padding, 1, dilation)
        else:
            y = torch.nn.functional.conv1d(x, weight, None, stride, padding, dilation)
    except RuntimeError:
        assert ours < 1
    else:
        assert ours == y.shape[2]


def test_plan_refuses_too_many_channels_for_logsumexp() -> None:
    problem, _ = make_problem(8, 129, (1, 32, 32), (1, 3, 3), epilogue=dev.ConvEpilogue.residual_lse)
    assert "128 output channels" in dev.plan_implicit_gemm(problem).refusal


@pytest.mark.parametrize("c_out", [1, 8, 9, 24, 25, 64, 65, 96, 128])
def test_plan_keeps_all_channels_in_one_block_for_logsumexp(c_out: int) -> None:
    problem, output = make_problem(8, c_out, (1, 40, 50), (1, 3, 3), epilogue=dev.ConvEpilogue.residual_lse)
    plan = dev.plan_implicit_gemm(problem)
    check_plan(plan, GPUS["h200"], output)
    assert plan.n_tiles == 1
    assert plan.nb * 8 >= c_out
