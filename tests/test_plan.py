"""Host-side planning of the kernels, looked at directly through the developer module kgopt_dev.

`make dev-module` (part of `make test`) builds it; without it these tests skip.
"""

from __future__ import annotations

import collections
import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

dev = pytest.importorskip("kgopt_dev", reason="the developer module is not built: make dev-module")

DTYPES = ("float32", "bfloat16", "float16")
# A100, RTX 4090, H200: multiprocessors, shared memory of a block and of a multiprocessor in bytes.
GPUS = {
    "a100": dev.DeviceLimits(108, 163 * 1024, 164 * 1024),
    "rtx4090": dev.DeviceLimits(128, 99 * 1024, 100 * 1024),
    "h200": dev.DeviceLimits(132, 227 * 1024, 228 * 1024),
}


def make_problem(c_in, c_out, size, kernel, stride=(1, 1, 1), padding=(0, 0, 0), dilation=(1, 1, 1), **kwargs):
    """A problem with the output size that belongs to it; returns both."""
    dims = zip(size, kernel, stride, padding, dilation, strict=True)
    output = tuple(dev.conv_out_size(*dim, kwargs.get("transposed", False)) for dim in dims)
    problem = dev.ConvProblem(
        c_in=c_in,
        c_out=c_out,
        input=size,
        output=output,
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        **kwargs,
    )
    return problem, output


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


CASES = {
    "pipeline 1": dict(c_in=3, c_out=24, size=(24, 32, 32), kernel=(3, 3, 3)),
    "pipeline 2": dict(c_in=64, c_out=128, size=(32, 32, 32), kernel=(3, 3, 3), transposed=True),
    "pipeline 3": dict(c_in=8, c_out=64, size=(1, 128, 128), kernel=(1, 3, 3)),
    "pointwise": dict(c_in=64, c_out=64, size=(5, 17, 31), kernel=(1, 1, 1)),
    "strided": dict(c_in=5, c_out=7, size=(9, 11, 13), kernel=(3, 4, 5), stride=(2, 3, 1), padding=(1, 0, 2)),
    "dilated": dict(c_in=4, c_out=33, size=(9, 20, 23), kernel=(2, 3, 3), dilation=(1, 3, 2), padding=(0, 3, 2)),
    "upsampling": dict(c_in=6, c_out=12, size=(3, 5, 7), kernel=(2, 4, 3), stride=(2, 4, 3), transposed=True),
    "kernel below stride": dict(c_in=6, c_out=12, size=(3, 5, 7), kernel=(1, 2, 3), stride=(3, 3, 4), transposed=True),
    "transposed, dilated": dict(
        c_in=3,
        c_out=8,
        size=(4, 6, 5),
        kernel=(3, 3, 2),
        stride=(2, 3, 2),
        padding=(1, 2, 0),
        dilation=(2, 2, 3),
        transposed=True,
    ),
    "large kernel": dict(c_in=1, c_out=8, size=(1, 64, 64), kernel=(1, 15, 15), padding=(0, 7, 7)),
    "one column": dict(c_in=2, c_out=1, size=(1, 1, 1), kernel=(1, 1, 1)),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_plan_reaches_what_the_definition_multiplies(name: str, dtype: str, gpu: str) -> None:
    case = {"stride": (1, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1), "transposed": False, **CASES[name]}
    problem, output = make_problem(**case, dtype=dtype)
    plan = dev.plan_conv(problem, GPUS[gpu])
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
    plan = dev.plan_conv(problem, limits)
    if plan.refusal is not None:
        assert len(plan.refusal) > 10
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
    assert dev.plan_conv(problem).math.name == expected


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
    plan = dev.plan_conv(make_problem(**case)[0])
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
    assert "128 output channels" in dev.plan_conv(problem).refusal


@pytest.mark.parametrize("c_out", [1, 8, 9, 24, 25, 64, 65, 96, 128])
def test_plan_keeps_all_channels_in_one_block_for_logsumexp(c_out: int) -> None:
    problem, output = make_problem(8, c_out, (1, 40, 50), (1, 3, 3), epilogue=dev.ConvEpilogue.residual_lse)
    plan = dev.plan_conv(problem)
    check_plan(plan, GPUS["h200"], output)
    assert plan.n_tiles == 1
    assert plan.nb * 8 >= c_out


def test_choice_can_be_forced_and_says_why() -> None:
    problem, _ = make_problem(3, 24, (24, 32, 32), (3, 3, 3))
    for backend, path in (("kgopt", "implicit_gemm"), ("aten", "aten")):
        choice = dev.choose_conv(problem, backend=getattr(dev.ConvBackend, backend))
        assert choice.path.name == path
        assert "asked for" in choice.explain()
    for epilogue in ("store", "stats"):
        problem, _ = make_problem(3, 24, (24, 32, 32), (3, 3, 3), epilogue=getattr(dev.ConvEpilogue, epilogue))
        choice = dev.choose_conv(problem)
        assert choice.explain().split(":")[0] == ("aten" if choice.path.name == "aten" else "kgopt")
        assert len(choice.reason) > 10


def test_choice_of_float64_is_never_the_tensor_core_kernel() -> None:
    problem, _ = make_problem(3, 24, (8, 8, 8), (3, 3, 3), dtype="float64")
    assert dev.choose_conv(problem, backend=dev.ConvBackend.auto).path.name == "aten"
    assert dev.choose_conv(problem, backend=dev.ConvBackend.kgopt).path.name == "direct"


TORCH_ACTS = {
    "none": lambda x: x * 1.0,
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": torch.nn.functional.hardswish,
    "hardtanh": torch.nn.functional.hardtanh,
    "elu": torch.nn.functional.elu,
    "mish": torch.nn.functional.mish,
    "softplus": torch.nn.functional.softplus,
    "tanh+hardswish": lambda x: torch.nn.functional.hardswish(torch.tanh(x)),
}


@pytest.mark.parametrize("act", TORCH_ACTS)
@pytest.mark.parametrize("value", [-30.0, -3.0, -1.0, -0.7, 0.0, 1e-3, 0.9, 1.0, 3.0, 19.0, 21.0])
def test_chain_value_and_derivative_are_those_of_torch(act: str, value: float) -> None:
    x = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    y = TORCH_ACTS[act](x)
    (dx,) = torch.autograd.grad(y, x)
    derivative, result, _ = dev.chain_derivative(act, value)
    assert result == pytest.approx(y.item(), rel=1e-12, abs=1e-14)
    assert result == dev.chain_value(act, value)
    assert derivative == pytest.approx(dx.item(), rel=1e-12, abs=1e-14)


def test_chain_with_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'swish2' in 'relu\+swish2'.*hardswish"):
        dev.chain_value("relu+swish2", 0.0)


@settings(deadline=None, max_examples=300)
@given(
    n=st.integers(1, 5),
    groups=st.integers(1, 12),
    per_group=st.integers(1, 40),
    s=st.integers(2, 400_000),
    dtype=st.sampled_from(DTYPES),
    tensors=st.sampled_from([1, 2]),
    x_line=st.integers(0, 7),
    sm_count=st.sampled_from([4, 114, 132]),
)
def test_plan_group_norm_tiles(n, groups, per_group, s, dtype, tensors, x_line, sm_count):
    """Tiles on 128-byte lines cover each group once, and the blocks have a place for every tile of a group."""
    vec = 4 if dtype == "float32" else 8
    sizes = {"dtype": dtype, "tensors": tensors, "x_line": x_line, "sm_count": sm_count}
    plan = dev.plan_group_norm_tiles(n, groups * per_group, s, groups, **sizes)
    elements = per_group * s
    tile = dev.TILES_SLOT_BYTES // 16 // tensors
    if "refusal" in plan:
        fits = 9 * tile * sm_count * vec
        small = 32 * tile * vec
        short = tensors == 2 and s < tile * vec
        short = short or (tensors == 2 and n * groups * elements * 16 // vec <= 4 << 20)
        assert elements % vec != 0 or elements <= small or elements > fits or short, plan["refusal"]
        return
    tiles, blocks, run = plan["tiles_per_group"], plan["blocks"], plan["run"]
    assert plan["group_vectors"] * vec == elements
    assert plan["tiles"] == n * groups * tiles
    assert plan["parts"] == min(tiles // run, blocks)
    assert plan["words"] == n * groups * (plan["parts"] + 1)
    assert plan["holders"] in (0, dev.TILES_HOLDERS)
    assert tiles % run == 0
    assert plan["collects"] or not plan["holders"]
    if tensors == 1 and plan["parts"] < blocks:
        # Neighbouring groups' mergers are so many blocks apart, and come round to the same ones last.
        assert math.gcd(plan["parts"] + plan["merger_step"], blocks) == 1
    assert run == 1 or tiles <= run * blocks, "a block has several runs of a group, of several tiles"
    # Or a group could wait for its own tiles to make room: a block has every `blocks`th run.
    assert -(-tiles // run // blocks) * run < dev.TILES_SLOTS + plan["holders"]
    for group in {0, n * groups // 2, n * groups - 1}:
        head = (x_line + group * plan["group_vectors"]) % 8
        assert tiles * tile >= plan["group_vectors"] + head
        assert (tiles - 1 - run) * tile < plan["group_vectors"] + head
    for position in (0, 1, s - 1, s, s + 1, 2 * s - 1, s + tile * vec):
        assert (position * plan["s_magic"] >> 32) >> plan["s_shift"] == position // s
    for offset in (0, s - 1, s, elements - 1, elements // 2):
        assert offset * plan["s_magic64"] >> 64 == offset // s


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("bulk copies", {"has_bulk_copy": False}),
        ("shared memory", {"smem_bytes": 99 << 10}),
        ("float64", {"dtype": "float64"}),
        ("channels_last", {"channels_last": True}),
        ("multiple of 16 bytes", {"aligned": False}),
        ("no multiple of 16 bytes", {"c": 3, "s": 500_001, "g": 1}),
        ("less than 16 bytes", {"c": 1 << 20, "s": 3}),
        ("few tiles", {"s": 1000}),
        ("larger than what the GPU holds", {"s": 1 << 23}),
        ("shorter than a tile", {"c": 3200, "s": 2000, "tensors": 2}),
        ("x is small", {"s": 1 << 15, "tensors": 2}),
    ],
)
def test_plan_group_norm_tiles_refuses(why, change):
    sizes = {"n": 1, "c": 32, "s": 1 << 18, "g": 8}
    assert "refusal" not in dev.plan_group_norm_tiles(**sizes)
    assert why in dev.plan_group_norm_tiles(**{**sizes, **change})["refusal"]


@settings(deadline=None, max_examples=200)
@given(
    n=st.integers(1, 600),
    groups=st.integers(1, 12),
    per_group=st.integers(1, 40),
    s=st.integers(2, 60_000),
    dtype=st.sampled_from(DTYPES),
    x_line=st.integers(0, 7),
)
def test_plan_group_norm_alone(n, groups, per_group, s, dtype, x_line):
    """A block has a place for every tile of its group, and tells nobody of it."""
    vec = 4 if dtype == "float32" else 8
    plan = dev.plan_group_norm_alone(n, groups * per_group, s, groups, dtype=dtype, x_line=x_line)
    tile = dev.TILES_SLOT_BYTES // 16
    vectors = per_group * s // vec
    if "refusal" in plan:
        fits = 3 * tile < vectors <= 11 * tile and n * groups >= 4 * 132
        assert per_group * s % vec != 0 or s < vec or not fits, plan["refusal"]
        return
    tiles = plan["tiles_per_group"]
    assert plan["run"] == tiles < dev.TILES_SLOTS
    assert plan["parts"] == 1
    assert plan["words"] == 0
    assert plan["blocks"] <= n * groups
    assert plan["tiles"] == n * groups * tiles
    for group in {0, n * groups // 2, n * groups - 1}:
        assert tiles * tile >= vectors + (x_line + group * vectors) % 8


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("few tiles", {"s": 1000}),
        ("larger than what a block holds", {"s": 1 << 17}),
        ("few groups", {"n": 1}),
        ("do not fit", {"tensors": 2}),
        ("float64", {"dtype": "float64"}),
    ],
)
def test_plan_group_norm_alone_refuses(why, change):
    sizes = {"n": 128, "c": 24, "s": 19800, "g": 8, "dtype": "bfloat16"}
    assert "refusal" not in dev.plan_group_norm_alone(**sizes)
    assert why in dev.plan_group_norm_alone(**{**sizes, **change})["refusal"]


# The Hopper kernel for narrow convolutions.


def check_narrow_plan(plan, case: dict, size, output, limits) -> None:
    """What must hold of every narrow plan that is not a refusal: every output in one strip, every input in its halo."""
    assert plan.refusal is None
    assert plan.smem_bytes <= limits.smem_per_block
    assert plan.tiles_per_sample == math.prod(plan.tiles)
    assert plan.slices * plan.tiles_per_slice >= plan.tiles_per_sample, "a tile belongs to no block"
    assert (plan.slices - 1) * plan.tiles_per_slice < max(1, plan.tiles_per_sample), "a block has no tile"
    assert plan.tile[1] == plan.rows * plan.segments
    assert plan.tile[2] % plan.strip == 0
    assert plan.strips == plan.tile[0] * plan.segments * plan.tile[2] // plan.strip
    for dim in range(3):
        assert plan.tile[dim] * plan.tiles[dim] >= output[dim] > plan.tile[dim] * (plan.tiles[dim] - 1)
        assert plan.origin[dim] == -case["padding"][dim]
    # Rows of the halo start at four words of x, so that a vector lies inside a row of x or outside it as a whole.
    assert (plan.origin[2] - plan.lead) % 4 == 0
    assert plan.pitch % 4 == 0
    assert plan.pitch >= 4 * plan.vectors >= plan.lead + plan.halo[2]
    if plan.window > 1:
        assert case["kernel"][1] == plan.window
        assert case["stride"][1] == case["dilation"][1] == case["stride"][2] == 1
    if plan.gathered:
        return check_gathered(plan, case, output)
    if plan.position_rows:
        return check_position_rows(plan, case, output)
    assert plan.k_steps % plan.batch == 0
    assert plan.k_words <= plan.k_steps * 8 < plan.k_words + 8 * plan.batch
    in_terms = plan.math == dev.ConvMath.fp16x3  # padded K reads what is there, with weights of zero
    assert plan.zero_plane == (plan.k_words != plan.k_steps * 8 and not in_terms)
    assert plan.k_words * plan.window == plan.words * math.prod(case["kernel"])
    for dim in range(3):
        reach = (plan.tile[dim] - 1) * case["stride"][dim] + (case["kernel"][dim] - 1) * case["dilation"][dim] + 1
        assert plan.halo[dim] == reach
    if plan.chunked:
        assert plan.words % 4 == 0
        assert plan.plane == 4 * plan.halo[0] * plan.halo[1] * plan.pitch
    else:
        assert plan.plane % 32 == 8, "planes start 8 banks apart"
        assert plan.plane >= plan.halo[0] * plan.halo[1] * plan.pitch
    if plan.channel_rows:
        check_channel_rows(plan, case, limits)
    else:
        assert plan.strip == dev.NARROW_STRIP


def check_gathered(plan, case: dict, output) -> None:
    """Where chunks are gathered, each output depth has its own halo, and K is every channel and tap of a kernel row."""
    assert plan.window == 3
    assert plan.columns <= 32
    assert plan.strip == dev.NARROW_STRIP
    width = case["kernel"][2]
    shared = plan.types - plan.shifted_types
    chunks = plan.shifted_types * width + shared
    assert chunks <= 4 * plan.blocks < chunks + 4
    assert 8 * chunks >= case["c_in"] * case["kernel"][0] * width, "a value of K is in no chunk"
    assert plan.halo[0] == plan.tile[0]
    assert plan.halo[1] == plan.tile[1] + 2
    # Positions whose outputs count find all columns of the kernel in the halo's row.
    reach = (width - 1) * case["dilation"][2]
    assert plan.halo[2] == min(plan.tile[2], output[2]) + reach
    assert plan.pitch % 8 == 0, "neighbours in a row change places within four"
    assert plan.plane == 4 * (plan.tile[0] * plan.halo[1] * plan.pitch + 4)
    assert plan.segments == 1 or output[1] % plan.rows == 0, "warps of a warpgroup count rows together"
    pairs = plan.columns == 24 and plan.blocks == 1 and plan.math in (dev.ConvMath.bf16, dev.ConvMath.fp16)
    units = math.ceil(plan.strips / 4)
    ahead = 4 if pairs else plan.consumers
    assert plan.stages >= math.ceil(ahead / units) * plan.tiles_together, "a barrier's parity names one of two rounds"
    assert plan.tiles_together == 1 or (pairs and plan.tiles_together * plan.strips == 4), "a strip for each warp"
    assert plan.at_once >= 1


def check_position_rows(plan, case: dict, output) -> None:
    """Where positions are rows, every channel and tap is in a chunk of K, and every position of a row has its halo."""
    assert plan.columns == 64
    assert plan.strip == dev.NARROW_STRIP
    assert plan.math in (dev.ConvMath.tf32, dev.ConvMath.bf16, dev.ConvMath.fp16)
    assert plan.k_steps in (5, 10), "the numbers of products that are compiled"
    assert 8 * plan.types >= case["c_in"] > 8 * (plan.types - 1)
    constant = 1 if case.get("epilogue") == dev.ConvEpilogue.stats else 0
    assert plan.types * math.prod(case["kernel"]) + constant <= 2 * plan.k_steps
    for dim in range(3):
        extent = min(plan.tile[2], output[2]) if dim == 2 else plan.tile[dim]
        reach = (extent - 1) * case["stride"][dim] + (case["kernel"][dim] - 1) * case["dilation"][dim] + 1
        assert plan.halo[dim] == reach
    assert plan.pitch == 4 * plan.vectors
    assert plan.plane == 4 * plan.halo[0] * plan.halo[1] * plan.pitch
    assert 2 <= plan.stages <= 6
    assert plan.strips * plan.strip == math.prod(plan.tile)
    assert max(plan.tile[:2]) < 1 << 15, "a strip's place in the tile"
    # No lane reads beyond its stage, not even for a position behind the end of a row: the next one is being filled.
    at = [(plan.tile[i] - 1) * case["stride"][i] + (case["kernel"][i] - 1) * case["dilation"][i] for i in range(3)]
    last = (at[0] * plan.halo[1] + at[1]) * plan.pitch + plan.lead + at[2]
    assert (plan.types - 1) * plan.plane + 4 * (last + 1) <= plan.stage_words
    assert plan.stage_words % 4 == 0, "copies of 16 bytes"


def check_channel_rows(plan, case: dict, limits) -> None:
    """Where channels are rows, wgmma reads the halo: every chunk of four words and every tap once, at its place."""
    assert plan.chunked
    assert plan.rows == 1
    assert plan.strip in (32, 64)
    assert plan.columns == 64
    assert case["stride"][2] == 1, "neighbouring positions are neighbours in the halo"
    assert plan.math == dev.ConvMath.fp16x3
    assert plan.k_steps == 5, "the number of products that is compiled"
    assert limits.smem_per_block // 16 < 1 << 14, "addresses fit the descriptor"
    chunks = []
    for pair in plan.chunk_pairs:
        first, distance = pair & 0xFFFF, pair >> 16
        assert 0 <= distance < 1 << 14
        chunks += [first, first + distance]
    plane = plan.plane // 4
    want = [
        word * plane
        + (d * case["dilation"][0] * plan.halo[1] + h * case["dilation"][1]) * plan.pitch
        + w * case["dilation"][2]
        for word in range(plan.words // 4)
        for d, h, w in itertools.product(*map(range, case["kernel"]))
    ]
    assert chunks[: len(want)] == want
    assert all(chunk == want[-1] for chunk in chunks[len(want) : 2 * plan.k_steps]), "padding repeats the last chunk"


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_narrow_plan_of_any_shape(data) -> None:
    draw = data.draw
    three = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(3))  # noqa: E731
    case = {"kernel": three(1, 5), "stride": three(1, 3), "padding": three(0, 4), "dilation": three(1, 3)}
    size = three(1, 70)
    outputs = [dev.conv_out_size(*dim) for dim in zip(size, *(case[k] for k in case), strict=True)]
    if min(outputs) < 1:
        return
    case["c_in"] = draw(st.integers(1, 40))
    epilogues = [dev.ConvEpilogue.residual_lse, dev.ConvEpilogue.stats, dev.ConvEpilogue.store]
    case["epilogue"] = draw(st.sampled_from(epilogues))
    problem, output = make_problem(
        c_out=draw(st.integers(1, 150)),
        size=size,
        **case,
        n=draw(st.integers(1, 200)),
        dtype=draw(st.sampled_from(DTYPES)),
        allow_tf32=draw(st.booleans()),
        planar=True,
    )
    limits = GPUS["h200"]
    plan = dev.plan_narrow(problem, limits)
    if plan.refusal is not None:
        assert len(plan.refusal) > 10
        return
    check_narrow_plan(plan, case, size, output, limits)


@pytest.mark.parametrize(
    ("name", "epilogue", "window"), [("pipeline 1", "stats", 3), ("pipeline 3", "stats", 1), ("pipeline 3", "lse", 1)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_plan_takes_the_fused_pipelines(name: str, epilogue: str, window: int, dtype: str) -> None:
    case = {"stride": (1, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1), **CASES[name]}
    which = dev.ConvEpilogue.stats if epilogue == "stats" else dev.ConvEpilogue.residual_lse
    case["epilogue"] = which
    problem, output = make_problem(**case, n=128, dtype=dtype)
    limits = GPUS["h200"]
    choice = dev.choose_conv(problem, limits)
    assert choice.path.name == "narrow"
    assert "wgmma" in choice.explain()
    check_narrow_plan(choice.narrow, case, case["size"], output, limits)
    assert choice.narrow.window == window
    assert choice.narrow.gathered == (name == "pipeline 1")
    assert choice.narrow.position_rows == (name == "pipeline 3")
    assert 128 * choice.narrow.slices >= 0.9 * limits.sm_count, "the GPU is not full"


@pytest.mark.parametrize("epilogue", ["stats", "residual_lse"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c_out", [4, 24, 64, 72])
def test_narrow_plan_of_one_small_image_uses_the_gpu(c_out: int, dtype: str, epilogue: str) -> None:
    which = dev.ConvEpilogue.__members__[epilogue]
    limits = GPUS["h200"]
    blocks = []
    for n in (1, 4, 1024):
        problem, _ = make_problem(c_in=3, c_out=c_out, size=(1, 56, 64), kernel=(1, 3, 3), stride=(1, 1, 1),
                                  padding=(0, 1, 1), dilation=(1, 1, 1), n=n, dtype=dtype, epilogue=which)  # fmt: skip
        plan = dev.plan_narrow(problem, limits)
        assert plan.refusal is None
        blocks.append(n * plan.slices * plan.n_tiles)
    # 3584 positions of one sample are shared among several multiprocessors, and four samples among more.
    assert blocks[0] >= 7
    assert blocks[1] >= 28
    assert blocks[2] >= 1024


# Small chains in one launch.


def check_chain_plan(plan, case: dict, output, limits) -> None:
    """Every block has the halo of its outputs, and shared memory holds what the kernel puts there."""
    assert plan.blocks == math.prod(plan.split)
    if plan.is_team:
        assert plan.blocks > 16
        assert case["n"] * plan.blocks <= limits.sm_count, "all blocks run at a time"
    else:
        assert plan.blocks in (1, 2, 4, 8, 16)
        assert plan.blocks <= limits.cluster_blocks
    assert plan.threads in (256, 512)
    most = [0, 0, output[2]]
    for dim in range(2):
        bounds = [output[dim] * i // plan.split[dim] for i in range(plan.split[dim] + 1)]
        tiles = [b - a for a, b in itertools.pairwise(bounds)]
        assert min(tiles) >= 1, "a block without outputs would have no moments"
        most[dim] = max(tiles)
    for dim in range(3):
        reach = (most[dim] - 1) * case["stride"][dim] + (case["kernel"][dim] - 1) * case["dilation"][dim] + 1
        assert plan.halo[dim] == reach
    assert plan.plane >= math.prod(plan.halo)
    assert plan.plane % 32 == 8
    lanes = 1 << plan.row_lanes_log2
    assert lanes <= 32
    assert plan.pieces * lanes >= plan.halo[2] > (plan.pieces - 1) * lanes
    groups = case.get("groups", 1)
    loads = case["c_in"] * plan.halo[0] * plan.halo[1] * plan.pieces * lanes
    assert plan.load_rounds * plan.threads * dev.CHAIN_LOADS >= loads
    assert plan.k == case["c_in"] // groups * math.prod(case["kernel"])
    assert plan.k_steps == -(-plan.k // 8)
    assert plan.n_tiles == -(-(case["c_out"] // groups) // 8)
    weights = groups * plan.n_tiles * plan.k_steps * 64
    assert plan.load_rounds * plan.threads * dev.CHAIN_WEIGHTS >= weights
    positions = math.prod(most)
    assert plan.chunk % 16 == 0
    assert plan.chunk * plan.chunks >= positions > plan.chunk * (plan.chunks - 1)
    assert plan.chunk_pitch >= plan.chunk
    assert plan.chunk_pitch % 32 == 8
    units = case["c_out"] * plan.stat_parts << plan.stat_lanes_log2
    assert plan.stat_lanes_log2 <= 5
    assert plan.stat_parts == 1 or units <= plan.threads, "a part of a channel has its threads"
    assert plan.lanes_log2 <= 5
    words = case["c_out"] * plan.chunk_pitch + case["c_in"] * plan.plane + weights
    assert 4 * words < plan.smem_bytes <= limits.smem_per_block
    assert plan.cycles > 0


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_chain_plan_of_any_shape(data) -> None:
    draw = data.draw
    three = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(3))  # noqa: E731
    case = {"kernel": three(1, 5), "stride": three(1, 3), "padding": three(0, 4), "dilation": three(1, 3)}
    lse = draw(st.booleans())
    size = three(1, 70)
    if lse:
        size, case["kernel"], case["padding"] = (1, *size[1:]), (1, *case["kernel"][1:]), (0, *case["padding"][1:])
    outputs = [dev.conv_out_size(*dim) for dim in zip(size, *(case[k] for k in case), strict=True)]
    if min(outputs) < 1:
        return
    case["groups"] = draw(st.sampled_from([1, 1, 2, 3]))
    case["c_in"] = case["groups"] * draw(st.integers(1, 20))
    case["c_out"] = case["groups"] * draw(st.integers(1, 60))
    case["epilogue"] = dev.ConvEpilogue.residual_lse if lse else dev.ConvEpilogue.stats
    case["n"] = draw(st.sampled_from([1, 2, 3, 7, 50, 200]))
    problem, output = make_problem(
        size=size,
        **case,
        dtype=draw(st.sampled_from(DTYPES)),
        allow_tf32=draw(st.booleans()),
        planar=True,
        norm_groups=1,
    )
    limits = dev.DeviceLimits(cluster_blocks=draw(st.sampled_from([8, 16])))
    plan = dev.plan_chain(problem, limits)
    if plan.refusal is not None:
        assert len(plan.refusal) > 10
        return
    check_chain_plan(plan, case, output, limits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_is_stored_where_filters_are_long(dtype: str) -> None:
    """Two convolutions take longer than one that stores its output, if that is small."""
    which = dev.ConvEpilogue.__members__["residual_lse"]
    long = dict(c_in=18, c_out=48, size=(1, 153, 172), kernel=(1, 5, 7), stride=(1, 1, 2), padding=(0, 2, 2))
    more = {"dtype": dtype, "epilogue": which, "planar": True, "norm_groups": 16}
    choice = dev.choose_conv(make_problem(n=1, **long, **more)[0], GPUS["h200"])
    assert choice.path.name == "narrow"
    assert choice.stores
    assert "once" in choice.explain()
    assert not dev.choose_conv(make_problem(n=1, **long, **{**more, "planar": False})[0], GPUS["h200"]).stores
    assert not dev.choose_conv(make_problem(n=128, **CASES["pipeline 3"], **more)[0], GPUS["h200"]).stores
    own = dev.choose_conv(make_problem(n=1, **long, **more)[0], GPUS["h200"], dev.ConvBackend.kgopt)
    assert own.path.name == "narrow"
    assert not own.stores, "two passes by name"


@pytest.mark.parametrize("dtype", DTYPES)
def test_chains_in_one_launch_are_the_small_ones(dtype: str) -> None:
    """The headline shapes stay with passes; what passes would only wait for goes in one launch."""
    limits = GPUS["h200"]
    for name, epilogue in (("pipeline 1", "stats"), ("pipeline 3", "residual_lse")):
        which = dev.ConvEpilogue.__members__[epilogue]
        arguments = {**CASES[name], "dtype": dtype, "epilogue": which, "planar": True, "norm_groups": 8}
        large, _ = make_problem(n=128, **arguments)
        assert dev.choose_conv(large, limits).path.name == "narrow"
        small, _ = make_problem(n=4, **{**arguments, "size": (1 if name == "pipeline 3" else 6, 9, 12)})
        choice = dev.choose_conv(small, limits)
        assert choice.path.name == "chain"
        assert "one launch" in choice.explain()
        alone, _ = make_problem(n=4, **{**arguments, "size": (1, 9, 12), "kernel": (1, 3, 3), "norm_groups": 0})
        assert dev.choose_conv(alone, limits).path.name == "narrow", "statistics alone have no chain"
        assert dev.choose_conv(small, limits, dev.ConvBackend.kgopt).path.name == "narrow", "its own kernels by name"


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        ("9.0", {}, dev.DeviceLimits(has_wgmma=False)),
        ("9.0", {}, dev.DeviceLimits(cluster_blocks=0)),
        ("GroupNorm", {"norm_groups": 0}, None),
        ("no elements", {"n": 0}, None),
        ("transposed", {"transposed": True}, None),
        ("float64", {"dtype": "float64"}, None),
        ("mean", {"epilogue": dev.ConvEpilogue.store}, None),
        ("depth", {"epilogue": dev.ConvEpilogue.residual_lse}, None),
        ("no elements", {"c_out": 0}, None),
        ("1024", {"c_out": 1032}, None),
        ("weights", {"c_in": 512}, None),
        ("shared memory of its blocks", {"size": (80, 170, 170)}, None),
        ("too large", {"stride": (1, 1, 1 << 25), "size": (8, 9, 200)}, None),
    ],
)
def test_chain_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    arguments = {"c_in": 4, "c_out": 24, "size": (8, 9, 10), "kernel": (3, 3, 3), "epilogue": dev.ConvEpilogue.stats}
    problem, _ = make_problem(**{**arguments, "norm_groups": 8, **kwargs})
    assert fragment in dev.plan_chain(problem, limits or dev.DeviceLimits()).refusal


# Statistics of narrow 2D convolutions from the input's autocorrelation.


def check_autocorrelation(plan, case: dict, size, output, limits) -> None:
    """What must hold of every such plan: every input value in one task, outer ones where taps do not agree."""
    assert plan.smem_bytes <= limits.smem_per_block
    assert plan.finish_smem_bytes <= limits.smem_per_block
    for dim, core in ((1, plan.core_rows), (2, plan.core_columns)):
        inside = range(case["kernel"][dim])
        for at in range(size[dim]):
            seen = [0 <= at + case["padding"][dim] - tap < output[dim] for tap in inside]
            if core[0] <= at < core[1]:
                assert all(seen), "a value counts for some taps only"
        # An odd distance is the left operand moved by one, which has no column before the first.
        assert core[0] >= dim - 1
        assert 0 <= core[0] <= 2
        assert core[0] < core[1] <= size[dim] <= core[1] + 2, "at most two outer rows or columns on a side"
    height = size[1]
    assert plan.chunks * dev.AUTOCORRELATION_CHUNK >= size[2] > (plan.chunks - 1) * dev.AUTOCORRELATION_CHUNK
    assert plan.slices * plan.slice_rows >= height > (plan.slices - 1) * plan.slice_rows
    core = min(plan.slice_rows, plan.core_rows[1] - plan.core_rows[0])
    assert plan.runs * plan.run_rows >= core > (plan.runs - 1) * plan.run_rows
    # Steps of 16 rows of the outer columns see two rows more.
    assert plan.column_rows % 16 == 2
    assert core + 18 > plan.column_rows >= core + 2
    if plan.slices == 1:
        assert plan.edge_rows == 4
        assert plan.slice_floats == 0
    else:
        # Outer rows of one side lie in one slice, and no slice has those of both.
        assert plan.edge_rows == 2
        assert plan.core_rows[0] <= plan.slice_rows
        assert (plan.slices - 1) * plan.slice_rows <= plan.core_rows[1]
        assert plan.slice_floats % 4 == 0


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_autocorrelation_plan_of_any_shape(data) -> None:
    draw = data.draw
    two = lambda low, high: (draw(st.integers(low, high)), draw(st.integers(low, high)))  # noqa: E731
    case = {"kernel": (1, *two(1, 3)), "padding": (0, *two(0, 5)), "c_in": draw(st.integers(1, 8))}
    size = (1, *two(8, draw(st.sampled_from((40, 700, 3000)))))
    if min(dev.conv_out_size(size[d], case["kernel"][d], 1, case["padding"][d]) for d in (1, 2)) < 8:
        return
    problem, output = make_problem(
        c_out=draw(st.integers(1, 256)),
        size=size,
        **case,
        n=draw(st.integers(1, 300)),
        dtype=draw(st.sampled_from(DTYPES)),
        epilogue=dev.ConvEpilogue.stats,
        planar=True,
    )
    plan = dev.plan_autocorrelation(problem, GPUS["h200"])
    if plan.refusal is not None:
        assert "shared memory" in plan.refusal
        return
    check_autocorrelation(plan, case, size, output, GPUS["h200"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c_out", [40, 64, 256])
def test_autocorrelation_takes_statistics_of_large_inputs(dtype: str, c_out: int) -> None:
    case = {**CASES["pipeline 3"], "c_out": c_out, "padding": (0, 0, 0)}
    stats = dev.ConvEpilogue.stats
    problem, output = make_problem(**case, n=128, dtype=dtype, epilogue=stats, planar=True)
    choice = dev.choose_conv(problem, GPUS["h200"])
    assert choice.path.name == "narrow"
    assert choice.from_input
    assert "autocorrelation" in choice.explain()
    check_autocorrelation(choice.autocorrelation, case, case["size"], output, GPUS["h200"])
    # One small image is done before that kernel's end begins.
    problem, _ = make_problem(**{**case, "size": (1, 40, 40)}, n=1, dtype=dtype, epilogue=stats, planar=True)
    assert not dev.choose_conv(problem, GPUS["h200"]).from_input


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        ("sm_90a", {}, dev.DeviceLimits(has_wgmma=False)),
        ("nothing else", {"epilogue": dev.ConvEpilogue.residual_lse}, None),
        ("channels_last", {"planar": False}, None),
        ("grouped", {"groups": 2}, None),
        ("transposed", {"transposed": True}, None),
        ("float64", {"dtype": "float64"}, None),
        ("fp32 accuracy", {"allow_tf32": False}, None),
        ("8 input channels", {"c_in": 10}, None),
        ("256 output channels", {"c_out": 258}, None),
        ("depth", {"size": (2, 40, 40)}, None),
        ("stride", {"stride": (1, 2, 1)}, None),
        ("stride", {"dilation": (1, 1, 2)}, None),
        ("3 taps", {"kernel": (1, 4, 3)}, None),
        ("8 positions", {"size": (1, 40, 9)}, None),
        ("shared memory", {}, dev.DeviceLimits(smem_per_block=64 << 10)),
    ],
)
def test_autocorrelation_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    stats = dev.ConvEpilogue.stats
    arguments = {"c_in": 8, "c_out": 64, "size": (1, 40, 40), "kernel": (1, 3, 3), "epilogue": stats, "planar": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_autocorrelation(problem, limits or dev.DeviceLimits()).refusal


@pytest.mark.parametrize("name", ["pipeline 1", "pipeline 3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_plan_stores_contiguous_outputs(name: str, dtype: str) -> None:
    case = {"stride": (1, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1), **CASES[name]}
    problem, output = make_problem(**case, n=128, dtype=dtype, planar=True)
    choice = dev.choose_conv(problem, GPUS["h200"], dev.ConvBackend.kgopt)
    assert choice.path.name == "narrow"
    check_narrow_plan(choice.narrow, case, case["size"], output, GPUS["h200"])
    assert choice.narrow.window == 1
    assert not choice.narrow.channel_rows
    problem, _ = make_problem(**case, n=128, dtype=dtype)
    assert dev.choose_conv(problem, GPUS["h200"], dev.ConvBackend.kgopt).path.name == "implicit_gemm"


def test_narrow_plan_of_many_small_images_keeps_all_warps_busy() -> None:
    """A tile of 16^3 has two strips, a warpgroup four warps; 1024 samples load the weights 132 times."""
    limits = GPUS["h200"]
    case = {"kernel": (3, 3, 3), "stride": (1, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1), "c_in": 3}
    for dtype, together in (("bfloat16", 2), ("float32", 1)):
        size = (16, 16, 16)
        problem, output = make_problem(
            c_out=24, size=size, **case, n=1024, dtype=dtype, epilogue=dev.ConvEpilogue.stats, planar=True
        )
        plan = dev.plan_narrow(problem, limits)
        assert plan.gathered
        check_narrow_plan(plan, case, size, output, limits)
        assert plan.tiles_together == together
        assert plan.at_once == limits.sm_count
        assert plan.slices == 1


def test_narrow_plan_without_tf32() -> None:
    """Two fp16 terms where channels are rows and few taps, 3xTF32 elsewhere, which logsumexp refuses."""
    case = {"size": (1, 64, 64), "kernel": (1, 3, 3), "allow_tf32": False}
    for epilogue in (dev.ConvEpilogue.stats, dev.ConvEpilogue.residual_lse):
        problem, _ = make_problem(8, 64, **case, epilogue=epilogue)
        plan = dev.plan_narrow(problem, GPUS["h200"])
        assert (plan.math, plan.channel_rows, plan.k_steps) == (dev.ConvMath.fp16x3, True, 5)
        assert dev.choose_conv(problem, GPUS["h200"]).path.name == "narrow"
    problem, _ = make_problem(16, 64, **case, epilogue=dev.ConvEpilogue.stats)
    assert dev.plan_narrow(problem, GPUS["h200"]).math == dev.ConvMath.tf32x3


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        ("sm_90a", {}, dev.DeviceLimits(has_wgmma=False)),
        ("transposed", {"transposed": True}, None),
        ("float64", {"dtype": "float64"}, None),
        ("stores", {"epilogue": dev.ConvEpilogue.store_stats}, None),
        ("contiguous", {"epilogue": dev.ConvEpilogue.store}, None),
        ("without TF32", {"epilogue": dev.ConvEpilogue.store, "planar": True, "allow_tf32": False}, None),
        ("groups = 1", {"groups": 2, "epilogue": dev.ConvEpilogue.residual_lse}, None),
        ("at most 128", {"c_out": 136, "epilogue": dev.ConvEpilogue.residual_lse}, None),
        ("without TF32", {"allow_tf32": False, "epilogue": dev.ConvEpilogue.residual_lse}, None),
        ("weights", {"c_in": 512}, None),
        ("tile", {}, dev.DeviceLimits(smem_per_block=20 << 10)),
        ("too large", {"stride": (1, 1, 65), "size": (8, 9, 200)}, None),
    ],
)
def test_narrow_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    arguments = {"c_in": 4, "c_out": 24, "size": (8, 9, 10), "kernel": (3, 3, 3), "epilogue": dev.ConvEpilogue.stats}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_narrow(problem, limits or dev.DeviceLimits()).refusal


def check_hopper_plan(plan, case: dict, size, output, limits) -> None:
    """Every output is written once, with all its taps at hand, and shared memory holds what the kernel puts there."""
    width, height = size[2], output[1]
    owned = range(plan.owned_first, plan.owned_end)
    shifts = [plan.first_shift + tap * case["dilation"][2] for tap in range(plan.taps_w)]
    assert (shifts[0], shifts[-1]) == (plan.first_shift, plan.last_shift)
    assert all(abs(shift) < 8 for shift in shifts), "a tap reaches beyond the neighbouring rows of eight"
    rows = dev.HOPPER_CONSUMERS // plan.teams * plan.segments * 64
    assert plan.runs * plan.run_strips * plan.strip_rows == rows
    written = collections.Counter()
    for strip in range(plan.runs_per_plane * plan.run_strips):
        for row in owned:
            q = strip * plan.strip_step - plan.owned_first + row
            line, column = divmod(q, width)
            assert q < 0 or plan.by_width(q) == line
            if q < 0 or line >= height:
                continue
            assert all(0 <= row + s < plan.strip_rows for s in shifts if 0 <= column + s < width), "a tap is missing"
            out = column + plan.anchor_to_out
            written[line, out] += 0 <= out < output[2]
            if plan.anchor_to_out == 1 and column == 0:
                written[line, 0] += 1
            if column == width - 1 and out + 1 < output[2]:
                written[line, out + 1] += 1
            if plan.anchor_to_out == 1 or (column == width - 1 and out + 1 < output[2]):
                assert plan.wide
    written = {place: count for place, count in written.items() if count}
    assert written == {place: 1 for place in itertools.product(range(height), range(output[2]))}
    last = (plan.run_strips - 1) * plan.strip_step + plan.strip_rows
    reach = (plan.taps_per_stage - 1) * case["dilation"][1] * width
    assert plan.boxes * plan.box_rows >= last + reach
    assert plan.box_rows <= 256
    assert plan.box_rows % 8 == 0
    assert plan.taps[1] % plan.taps_per_stage == 0
    assert 2 <= plan.a_stages <= dev.HOPPER_MAX_STAGES
    if plan.teams == 1:
        assert 2 <= plan.b_stages <= dev.HOPPER_MAX_STAGES
        assert plan.lag <= plan.b_stages - 2
    else:
        assert plan.n_tiles == 1
        assert plan.b_stages == plan.taps[0] * plan.taps[1] * plan.chunks
    assert plan.smem_bytes <= limits.smem_per_block
    assert 1 <= plan.blocks <= limits.sm_count
    assert plan.blocks * plan.teams < plan.tiles + plan.teams


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_hopper_plan_of_any_shape(data) -> None:
    draw = data.draw
    transposed = draw(st.booleans())
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 7)), 3)
    size = (draw(st.integers(1, 9)), draw(st.integers(1, 30)), draw(st.integers(1, 300)))
    dilation = tuple(draw(st.integers(1, 3)) for _ in range(3))
    case = {"kernel": kernel, "stride": (1, 1, 1), "dilation": dilation}
    case["padding"] = tuple(draw(st.integers(0, (k - 1) * d)) for k, d in zip(kernel, dilation, strict=True))
    outputs = [
        dev.conv_out_size(*dim, transposed)
        for dim in zip(size, *(case[k] for k in ("kernel", "stride", "padding", "dilation")), strict=True)
    ]
    if min(outputs) < 1:
        return
    problem, output = make_problem(
        8 * draw(st.integers(1, 24)),
        8 * draw(st.integers(1, 24)),
        size,
        **case,
        n=draw(st.integers(1, 20)),
        transposed=transposed,
        dtype=draw(st.sampled_from(DTYPES)),
        epilogue=draw(st.sampled_from([dev.ConvEpilogue.store, dev.ConvEpilogue.store_stats])),
        channels_innermost=True,
    )
    plan = dev.plan_hopper(problem, GPUS["h200"])
    if plan.refusal is not None:
        assert len(plan.refusal) > 10
        return
    check_hopper_plan(plan, case, size, output, GPUS["h200"])


@pytest.mark.parametrize("half", [False, True])
def test_hopper_columns_are_a_permutation(half: bool) -> None:
    assert sorted(dev.hopper_column_channel(x, half) for x in range(64)) == list(range(64))


@pytest.mark.parametrize(
    ("c_in", "c_out", "size"),
    [(32, 32, (128,) * 3), (64, 64, (64,) * 3), (32, 64, (80, 170, 170)), (32, 32, (96,) * 3), (16, 32, (96,) * 3)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_channels_innermost_take_a_hopper_kernel(c_in, c_out, size, dtype: str) -> None:
    case = dict(kernel=(3, 3, 3), padding=(1, 1, 1))
    problem, _ = make_problem(c_in, c_out, size, **case, dtype=dtype, channels_innermost=True)
    choice = dev.choose_conv(problem, GPUS["h200"])
    assert choice.path.name in ("hopper", "rows")
    assert "wgmma" in choice.explain()
    problem, _ = make_problem(c_in, c_out, size, **case, dtype=dtype, planar=True)
    choice = dev.choose_conv(problem, GPUS["h200"])
    assert choice.path.name in (("aten", "narrow") if c_in > 16 else ("aten", "implicit_gemm", "narrow"))
    assert "channels_last" in choice.explain()


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        ("wgmma", {}, dev.DeviceLimits(has_wgmma=False)),
        ("float64", {"dtype": "float64"}, None),
        ("fp32 accuracy", {"allow_tf32": False}, None),
        ("channels_last", {"channels_innermost": False}, None),
        ("grouped", {"groups": 2}, None),
        ("16 bytes", {"c_in": 33}, None),
        ("multiple of 8", {"c_out": 33}, None),
        ("stride", {"stride": (1, 2, 1)}, None),
        ("above 7", {"kernel": (1, 9, 3)}, None),
        ("width other than 3", {"kernel": (3, 3, 2)}, None),
        ("beyond the kernel", {"padding": (0, 3, 0)}, None),
        ("stores no output", {"epilogue": dev.ConvEpilogue.stats}, None),
        ("wider than the input", {"dilation": (1, 1, 2), "transposed": True}, None),
        ("dilation along the width", {"dilation": (1, 1, 9)}, None),
        ("does not fit", {}, dev.DeviceLimits(smem_per_block=60 << 10)),
    ],
)
def test_hopper_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    arguments = {"c_in": 32, "c_out": 32, "size": (8, 9, 40), "kernel": (3, 3, 3), "channels_innermost": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_hopper(problem, limits or dev.DeviceLimits()).refusal


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_rows_plan_of_any_shape(data) -> None:
    """Every tap finds its input, or a zero, at one distance along rows and planes with shared padding."""
    draw = data.draw
    transposed = draw(st.booleans())
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(3))
    dilation = tuple(draw(st.integers(1, 3)) for _ in range(3))
    size = tuple(draw(st.integers(1, 9)) for _ in range(3))
    case = {"kernel": kernel, "stride": (1, 1, 1), "dilation": dilation}
    case["padding"] = tuple(draw(st.integers(0, (k - 1) * d)) for k, d in zip(kernel, dilation, strict=True))
    outputs = [
        dev.conv_out_size(*dim, transposed)
        for dim in zip(size, *(case[k] for k in ("kernel", "stride", "padding", "dilation")), strict=True)
    ]
    if min(outputs) < 1:
        return
    n, limits = draw(st.integers(1, 40)), GPUS["h200"]
    problem, output = make_problem(
        8 * draw(st.integers(1, 24)),
        8 * draw(st.integers(1, 24)),
        size,
        **case,
        n=n,
        transposed=transposed,
        dtype=draw(st.sampled_from(DTYPES)),
        allow_tf32=draw(st.booleans()),
        channels_innermost=True,
    )
    plan = dev.plan_rows(problem, limits)
    assert plan.refusal is None
    assert (plan.columns == 128) == (plan.parts == 2)
    if plan.parts == 2:  # three products of parts; the copy has whole chunks of both
        assert plan.chunks % 3 == 0
        assert plan.copy_bytes == n * math.prod(size) * plan.chunks // 3 * 2 * plan.row_bytes
    spans = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    assert plan.padding == [s - p for s, p in zip(spans, case["padding"], strict=True)] if transposed else True

    def loaded(depth: int, position: int) -> tuple[int, ...] | None:
        """What lies at a position counted along rows from plane `depth` of the outputs on; None: zeros."""
        line, column = divmod(position, plan.row_slots)
        plane, row = divmod(line, plan.plane_rows)
        place = (depth + plane - plan.padding[0], row - plan.padding[1], column - plan.padding[2])
        return place if all(0 <= i < s for i, s in zip(place, size, strict=True)) else None

    for tap in itertools.product(*(range(0, span + 1, d) for span, d in zip(spans, dilation, strict=True))):
        for place in itertools.product(*map(range, output)):
            position = place[1] * plan.row_slots + place[2]
            source = tuple(o - p + t for o, p, t in zip(place, plan.padding, tap, strict=True))
            inside = all(0 <= i < s for i, s in zip(source, size, strict=True))
            found = loaded(place[0] + tap[0], position + tap[1] * plan.row_slots + tap[2])
            assert found == (source if inside else None)
    tile = plan.columns * dev.HOPPER_CONSUMERS
    positions = ((output[0] - 1) * plan.plane_rows + output[1]) * plan.row_slots
    assert plan.tiles_per_sample == -(-positions // tile)
    assert plan.tiles == n * plan.m_tiles * plan.tiles_per_sample
    assert plan.m_tiles * plan.segments * 64 >= 8
    reach = tile - 1 + spans[1] * plan.row_slots + spans[2]
    assert all((q % plan.row_slots + reach) // plan.row_slots < plan.stage_rows for q in range(0, positions, tile))
    assert plan.row_slots <= 256
    assert plan.row_slots * plan.row_bytes % 128 == 0
    assert min(plan.x_stages, plan.w_stages) >= 2
    assert max(plan.x_stages, plan.w_stages) <= dev.ROWS_MAX_STAGES
    assert plan.lag <= plan.w_stages - 2
    assert plan.smem_bytes <= limits.smem_per_block
    assert 1 <= plan.blocks <= min(plan.tiles, limits.sm_count)

    # With a norm in front: every row of a stage is in a piece with a barrier, and the barriers have room.
    assert not plan.normalizes
    prologue = dev.plan_rows(problem, limits, normalizes=True)
    if plan.parts == 2:
        assert "copy of x" in prologue.refusal
        return
    assert prologue.refusal is None
    assert prologue.normalizes
    assert -(-prologue.stage_rows // prologue.piece_rows) <= dev.ROWS_PIECES
    room = 8 * prologue.x_stages * dev.ROWS_PIECES
    stages = prologue.x_stages * -(-prologue.stage_rows * prologue.row_slots * prologue.row_bytes // 1024)
    weights = prologue.w_stages * 64 * prologue.row_bytes
    assert stages * 1024 + weights + room <= prologue.smem_bytes <= limits.smem_per_block


def test_rows_of_an_image_are_a_permutation() -> None:
    assert sorted(map(dev.rows_image_channel, range(128))) == list(range(128))


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        ("wgmma", {}, dev.DeviceLimits(has_wgmma=False)),
        ("float64", {"dtype": "float64"}, None),
        ("channels_last", {"channels_innermost": False}, None),
        ("grouped", {"groups": 2}, None),
        ("16 bytes", {"c_in": 33}, None),
        ("multiple of 8", {"c_out": 33}, None),
        ("more than 8192", {"c_out": 8200}, None),
        ("stride", {"stride": (1, 2, 1)}, None),
        ("above 7", {"kernel": (1, 9, 3)}, None),
        ("beyond the kernel", {"padding": (0, 3, 0)}, None),
        ("other than a store", {"epilogue": dev.ConvEpilogue.stats}, None),
        ("rows above 256", {"size": (3, 3, 260)}, None),
        ("does not fit", {}, dev.DeviceLimits(smem_per_block=30 << 10)),
    ],
)
def test_rows_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    arguments = {"c_in": 64, "c_out": 64, "size": (8, 9, 40), "kernel": (3, 3, 3), "channels_innermost": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_rows(problem, limits or dev.DeviceLimits()).refusal


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_flat_plan_of_any_shape(data) -> None:
    """Every tap of every output finds its input, or a zero, at one distance in the padded copy of x."""
    draw = data.draw
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(3))
    dilation = tuple(draw(st.integers(1, 3)) for _ in range(3))
    size = tuple(draw(st.integers(1, 9)) for _ in range(3))
    dtype = draw(st.sampled_from(DTYPES))
    n = draw(st.integers(1, 40))
    problem, output = make_problem(
        draw(st.integers(1, 200)),
        draw(st.integers(1, 300)),
        size,
        kernel,
        dilation=dilation,
        n=n,
        transposed=True,
        dtype=dtype,
        allow_tf32=draw(st.booleans()),
        epilogue=dev.ConvEpilogue.store_stats,
        planar=True,
    )
    plan = dev.plan_flat(problem, GPUS["h200"])
    if plan.refusal is not None:
        assert "16-byte" in plan.refusal or "float16" in plan.refusal
        return
    spans = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    assert plan.plane == output[1] * output[2]
    assert plan.slots == size[0] * plan.plane
    assert plan.reach == (spans[0] * output[1] + spans[1]) * output[2] + spans[2]
    slot_of = {(d * output[1] + h) * output[2] + w: (d, h, w) for d, h, w in itertools.product(*map(range, size))}
    for tap in itertools.product(*(range(0, span + 1, d) for span, d in zip(spans, dilation, strict=True))):
        shift = (tap[0] * output[1] + tap[1]) * output[2] + tap[2] - plan.reach
        for place in itertools.product(*map(range, output)):
            q = (place[0] * output[1] + place[1]) * output[2] + place[2]
            source = tuple(o - span + t for o, span, t in zip(place, spans, tap, strict=True))
            inside = all(0 <= i < s for i, s in zip(source, size, strict=True))
            assert slot_of.get(q + shift) == (source if inside else None)
    tile = plan.columns * dev.HOPPER_CONSUMERS
    positions = output[0] * plan.plane
    assert plan.tiles_per_sample == -(-positions // tile)
    assert plan.tiles == n * plan.m_tiles * plan.tiles_per_sample
    rows = spans[1] * output[2] if plan.whole_height else 0
    assert plan.boxes * plan.box_rows >= tile + rows + spans[2]
    assert plan.box_rows <= 256
    assert plan.box_rows % 8 == 0
    assert min(plan.x_stages, plan.w_stages) >= 2
    assert plan.lag < (kernel[1] if plan.whole_height else 1) * kernel[2]
    assert plan.smem_bytes <= GPUS["h200"].smem_per_block
    assert 1 <= plan.blocks <= min(plan.tiles, GPUS["h200"].sm_count)


@pytest.mark.parametrize(("n", "size", "most"), [(16, 32, 1), (5, 40, 1), (64, 24, 3), (300, 16, 3)])
def test_blocks_share_the_tiles_with_fewer_taps(n: int, size: int, most: int) -> None:
    """No block has many more taps of the depth than the mean."""
    problem, output = make_problem(
        64,
        128,
        (size,) * 3,
        (3,) * 3,
        n=n,
        transposed=True,
        dtype="bfloat16",
        epilogue=dev.ConvEpilogue.store_stats,
        planar=True,
    )
    plan = dev.plan_flat(problem, GPUS["h200"])
    tile, count = plan.columns * dev.HOPPER_CONSUMERS, plan.tiles_per_sample
    work = [0] * plan.blocks
    for number in range(plan.tiles):
        sample, place = divmod(number, count)
        index = (place + plan.first_short - plan.short_place(sample)) % count
        planes = range(index * tile // plan.plane, min(((index + 1) * tile - 1) // plan.plane, output[0] - 1) + 1)
        work[number % plan.blocks] += len({t for d in planes for t in range(3) if 0 <= d - t < size})
    assert max(work) <= sum(work) / plan.blocks + most


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        ("wgmma", {}, dev.DeviceLimits(has_wgmma=False)),
        ("float64", {"dtype": "float64"}, None),
        ("grouped", {"groups": 2}, None),
        ("stride", {"stride": (1, 2, 1)}, None),
        ("above 7", {"kernel": (1, 9, 3)}, None),
        ("padding", {"padding": (0, 1, 0)}, None),
        ("16-byte", {"size": (7, 7, 7)}, None),
        ("512 output channels", {"c_out": 520}, None),
        ("does not fit", {}, dev.DeviceLimits(smem_per_block=60 << 10)),
    ],
)
def test_flat_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    arguments = {"c_in": 32, "c_out": 128, "size": (8, 8, 8), "kernel": (3, 3, 3), "transposed": True, "planar": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_flat(problem, limits or dev.DeviceLimits()).refusal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("allow_tf32", [True, False])
def test_wide_transposed_convolutions_with_a_norm_take_the_flat_kernel(dtype: str, allow_tf32: bool) -> None:
    arguments = {
        "n": 16,
        "transposed": True,
        "dtype": dtype,
        "allow_tf32": allow_tf32,
        "epilogue": dev.ConvEpilogue.store_stats,
    }
    problem, _ = make_problem(64, 128, (32,) * 3, (3,) * 3, **arguments, planar=True)
    assert dev.choose_conv(problem, GPUS["h200"]).path.name == "flat"
    problem, _ = make_problem(64, 128, (32,) * 3, (3,) * 3, **arguments)
    assert dev.choose_conv(problem, GPUS["h200"]).path.name != "flat"


def check_wgrad_plan(plan, case: dict, a: int, b: int, still, size: int, limits) -> None:
    """Tiles cover the planes, shared memory holds what is loaded and read, and every partial sum has its place."""
    assert plan.tiles[0] * plan.rows >= still[1]
    assert plan.tiles[1] * plan.width >= still[2]
    assert plan.rows in (4, 8)
    assert plan.width % (32 // size) == 0, "not in whole steps of K"
    assert plan.a_tiles * 32 >= a
    assert plan.depth_tiles * (1 if plan.alternate else 3) >= case["kernel"][0]
    taps, stride = case["kernel"][2], case["stride"][2]
    if plan.few:
        assert plan.few == b
        assert plan.few * taps <= plan.columns == 16
        first = (plan.width * stride - case["padding"][2]) * b - plan.row_skip
        assert first * size % 16 == 0, "a copy begins off 16 bytes"
        last = plan.row_skip + (plan.width - 1) * stride * b
        assert last + taps * b <= plan.row_numbers <= 256
        assert plan.row_numbers * size % 16 == 0
        assert plan.pitch >= max(plan.row_numbers, last + 16) * size
        assert plan.pitch % 128 == 0
    else:
        assert plan.b_tiles * plan.columns >= b
        assert plan.columns == 8 * plan.b_blocks
        assert plan.row_bytes == 32 * size
        # Columns that the taps read: all of one run, or those of even and odd taps.
        assert plan.first_run >= plan.width + (taps - 1) // stride
        assert plan.second_run % 8 == 0
        assert plan.second_run >= plan.first_run
        assert plan.pitch == (plan.second_run + (plan.width if stride == 2 else 0)) * plan.row_bytes
        assert plan.pitch % (8 * plan.row_bytes) == 0
    assert plan.back == min(case["kernel"][0], 3) - 1
    assert 2 <= plan.stages <= dev.WGRAD_MAX_STAGES
    planes = ((plan.rows - 1) * stride + case["kernel"][1]) * plan.pitch * plan.stages
    planes += plan.rows * plan.width * plan.row_bytes * (plan.stages + plan.back)
    assert planes < plan.smem_bytes <= limits.smem_per_block
    assert plan.turns == 4 // plan.b_blocks * (3 if plan.alternate else 1)
    assert plan.slots == plan.splits * plan.turns
    assert 1 <= plan.splits <= max(1, plan.steps)
    assert plan.tile_floats % 128 == 0
    assert plan.partial_floats == plan.blocks * plan.turns * plan.tile_floats


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_wgrad_plan_of_any_shape(data) -> None:
    draw = data.draw
    transposed = draw(st.booleans())
    kernel = (draw(st.integers(1, 7)), 3, 3)
    size = (draw(st.integers(1, 40)), draw(st.integers(1, 200)), draw(st.integers(1, 300)))
    plane_stride = draw(st.integers(1, 2))
    case = {"kernel": kernel, "stride": (draw(st.integers(1, 2)), plane_stride, plane_stride)}
    case["padding"] = tuple(draw(st.integers(0, k)) for k in kernel)
    dims = zip(size, kernel, case["stride"], case["padding"], (1, 1, 1), strict=True)
    if min(dev.conv_out_size(*dim, transposed) for dim in dims) < 1:
        return
    dtype = draw(st.sampled_from(DTYPES))
    c_in = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32, 40, 64, 96, 128]))
    c_out = 8 * draw(st.integers(1, 24))
    problem, output = make_problem(
        c_in,
        c_out,
        size,
        **case,
        n=draw(st.integers(1, 20)),
        transposed=transposed,
        dtype=dtype,
        channels_innermost=c_in % 8 == 0,
    )
    plan = dev.plan_wgrad(problem, GPUS["h200"])
    a, b, still, moved = (c_in, c_out, size, output) if transposed else (c_out, c_in, output, size)
    if plan.refusal is not None:
        assert len(plan.refusal) > 10
        assert c_in < 8 or (plane_stride == 2 and moved[2] % 2)
        return
    check_wgrad_plan(plan, case, a, b, still, 4 if dtype == "float32" else 2, GPUS["h200"])


@pytest.mark.parametrize(
    ("c_in", "c_out", "size"),
    [(32, 32, (128,) * 3), (64, 64, (64,) * 3), (32, 64, (80, 170, 170)), (32, 32, (96,) * 3)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_channels_innermost_take_own_gradients(c_in, c_out, size, dtype: str) -> None:
    case = dict(kernel=(3, 3, 3), padding=(1, 1, 1))
    problem, _ = make_problem(c_in, c_out, size, **case, dtype=dtype, channels_innermost=True)
    limits = GPUS["h200"]
    assert dev.choose_conv_gradients(problem, limits).explain() == "dx kgopt; dweight kgopt"
    assert "asked for" in dev.choose_conv_gradients(problem, limits, dev.ConvBackend.aten).explain()
    problem, _ = make_problem(c_in, c_out, size, **case, dtype=dtype)
    assert "dweight aten: x is not channels_last" in dev.choose_conv_gradients(problem, limits).explain()


# Channels, size, stride, dtype: microseconds on an H200, and whether cuDNN took longer.
WGRAD_MEASURED = [
    (32, 32, (128, 128, 128), 1, "float32", 433, True),
    (32, 32, (128, 128, 128), 1, "bfloat16", 218, True),
    (64, 64, (64, 64, 64), 1, "float32", 231, True),
    (64, 64, (64, 64, 64), 1, "bfloat16", 122, True),
    (128, 128, (32, 32, 32), 1, "float32", 132, True),
    (128, 128, (32, 32, 32), 1, "bfloat16", 77, False),
    (16, 32, (96, 128, 128), 1, "float32", 187, True),
    (16, 32, (96, 128, 128), 1, "bfloat16", 101, True),
    (96, 32, (96, 128, 128), 1, "float32", 961, True),
    (96, 32, (96, 128, 128), 1, "bfloat16", 457, True),
    (192, 64, (48, 64, 64), 1, "float32", 492, True),
    (192, 64, (48, 64, 64), 1, "bfloat16", 244, True),
    (256, 256, (16, 16, 16), 1, "bfloat16", 70, False),
    (4, 32, (128, 128, 128), 1, "float32", 117, True),
    (4, 32, (128, 128, 128), 1, "bfloat16", 72, True),
    (1, 16, (96, 128, 128), 1, "float32", 93, True),
    (1, 16, (96, 128, 128), 1, "bfloat16", 63, True),
    (32, 64, (128, 128, 128), 2, "float32", 205, True),
    (32, 64, (128, 128, 128), 2, "bfloat16", 107, True),
    (64, 128, (64, 64, 64), 2, "bfloat16", 67, False),
]


@pytest.mark.parametrize(("c_in", "c_out", "size", "stride", "dtype", "measured", "faster"), WGRAD_MEASURED)
def test_wgrad_model_of_time(c_in, c_out, size, stride, dtype: str, measured: float, faster: bool) -> None:
    case = dict(kernel=(3, 3, 3), padding=(1, 1, 1), stride=(stride,) * 3)
    problem, _ = make_problem(c_in, c_out, size, **case, dtype=dtype, channels_innermost=c_in >= 8)
    choice = dev.choose_conv_gradients(problem, GPUS["h200"])
    assert 0.7 * measured < choice.wgrad.microseconds < 1.25 * measured
    assert ("dweight kgopt" in choice.explain()) == faster


@pytest.mark.parametrize(
    ("fragment", "kwargs", "limits"),
    [
        ("tensor copies", {}, dev.DeviceLimits(has_wgmma=False)),
        ("float64", {"dtype": "float64"}, None),
        ("fp32 accuracy", {"allow_tf32": False}, None),
        ("channels_last", {"channels_innermost": False}, None),
        ("grouped", {"groups": 2}, None),
        ("16 bytes", {"c_in": 33}, None),
        ("16 bytes", {"c_out": 33}, None),
        ("rows of few channels", {"c_in": 3, "size": (8, 9, 41)}, None),
        ("output channels", {"c_in": 3, "c_out": 33}, None),
        ("stride of height", {"stride": (1, 2, 1)}, None),
        ("stride above 2", {"stride": (3, 1, 1)}, None),
        ("odd width", {"stride": (2, 2, 2), "size": (8, 9, 41)}, None),
        ("dilation", {"dilation": (1, 2, 1)}, None),
        ("other than 3", {"kernel": (3, 3, 2)}, None),
        ("does not fit", {}, dev.DeviceLimits(smem_per_block=60 << 10)),
    ],
)
def test_wgrad_plan_refuses_with_a_reason(fragment: str, kwargs: dict, limits) -> None:
    arguments = {"c_in": 32, "c_out": 32, "size": (8, 9, 40), "kernel": (3, 3, 3), "channels_innermost": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    assert fragment in dev.plan_wgrad(problem, limits or dev.DeviceLimits()).refusal


@settings(max_examples=300, deadline=None)
@given(
    n=st.integers(1, 200),
    groups=st.integers(1, 64),
    per_group=st.integers(1, 40),
    s=st.one_of(st.integers(1, 100), st.integers(1, 60_000)),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    tensors=st.sampled_from([1, 2]),
    offset=st.integers(0, 127),
    max_blocks=st.sampled_from([0, 8, 16]),
)
def test_plan_group_norm_cluster(n, groups, per_group, s, dtype, tensors, offset, max_blocks):
    """The blocks' shares cover a group wherever it starts in a line, and fit in shared memory with all else."""
    size = 4 if dtype == "float32" else 2
    line, elements = 128 // size, per_group * s
    offset = offset // size * size
    plan = dev.plan_group_norm_cluster(
        n, groups * per_group, s, groups, dtype, tensors=tensors, x_offset=offset, max_blocks=max_blocks
    )
    if "refusal" in plan:
        many = elements * size < 768 and n * groups > 8192
        # Beside the data lie the channels' coefficients and sums.
        large = tensors * elements * size > max_blocks * 227 * 1024 * 0.7 or s < 64
        few = tensors == 2 and n * groups * 16 < 132 * 0.75 and elements * size > 32 << 10
        assert many or large or few, plan["refusal"]
        return
    blocks, share, threads = plan["blocks"], plan["share"], plan["threads"]
    assert plan["elements"] == elements
    assert share % line == 0
    origins = {(offset // size + g * elements) % line for g in range(min(n * groups, line))}
    assert max(blocks, 1) * share >= max(origins) + elements
    if blocks == 0:
        assert tensors == 1 or per_group == 1
        assert plan["lanes"] in (8, 32)
        assert plan["passes"] in dev.TEAM_PASSES
        assert share * size <= plan["passes"] * plan["lanes"] * 16
        assert plan["grid"] * threads >= n * groups * plan["lanes"]
    else:
        assert blocks <= max_blocks
        assert plan["grid"] == n * groups * blocks
        assert threads % 32 == 0
        assert threads <= 512
        if plan["hold"]:
            assert plan["grid"] <= 4 * 132  # all at a time
            assert share * size <= plan["hold"] * threads * 16
            assert (threads, plan["hold"]) in dev.CLUSTER_HELD[tensors - 1]
            warps, rows = threads // 32, plan["rows"]
            if tensors == 1:
                assert plan["smem_bytes"] == (blocks + warps) * 16 + rows * 8
            else:
                assert plan["smem_bytes"] == (blocks * 16 + rows * 8) * warps
                # No vector is in two channels, and few channels are in a share.
                assert s * size % 16 == 0
                assert offset % 16 == 0
                assert rows <= 4
        else:
            assert tensors * share * size < plan["smem_bytes"] <= 227 * 1024
        assert share * size <= dev.CLUSTER_MAX_PIECES * dev.CLUSTER_PASSES * threads * 16
    for origin in origins:
        for rank in range(max(blocks, 1)):
            first, last = max(0, rank * share - origin), min(elements, (rank + 1) * share - origin) - 1
            assert last < first or last // s - first // s + 1 <= plan["rows"]
    for position in (0, 1, s - 1, s, s + 1, 2 * s - 1, elements - 1):
        assert (position * 2 * plan["s_magic"] >> 32) >> (plan["s_shift"] + 1) == position // s


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("compute capability", {"max_blocks": 0}),
        ("float64", {"dtype": "float64"}),
        ("channels_last", {"channels_last": True}),
        ("different distances", {"aligned": False}),
        ("larger than the shared memory of a cluster", {"s": 1 << 18}),
        ("larger than the shared memory of a cluster", {"s": 120_000, "tensors": 2}),
        ("many groups", {"n": 4096, "s": 4, "tensors": 2}),
        ("slow activations", {"n": 1, "g": 4, "s": 20_000, "long_chain": True}),
        ("whole GPU", {"n": 1, "g": 2, "s": 20_000, "tensors": 2}),
    ],
)
def test_plan_group_norm_cluster_refuses(why, change):
    sizes = {"n": 4, "c": 32, "s": 5000, "g": 8}
    assert "refusal" not in dev.plan_group_norm_cluster(**sizes)
    assert why in dev.plan_group_norm_cluster(**{**sizes, **change})["refusal"]


def assert_clears_alone(p: dict, sm_count: int, threads: int) -> None:
    """Blocks that clear words count each other: no two such launches may run at a time, and all words are cleared."""
    blocks = p["teams"] * p["blocks"]
    assert p["cleared"] in (0, p["words"])
    if p["cleared"]:
        assert 2 * blocks > sm_count
        assert 2 * p["smem_bytes"] > 227 << 10
        assert p["cleared"] <= 4 * threads * blocks


@settings(max_examples=300, deadline=None)
@given(
    n=st.integers(1, 200),
    groups=st.integers(1, 64),
    per_group=st.integers(1, 40),
    s=st.one_of(st.integers(1, 100), st.integers(1, 300_000)),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    sm_count=st.sampled_from([132, 114, 7]),
)
def test_plan_group_norm_columns(n, groups, per_group, s, dtype, sm_count):
    """Slabs, shares and vectors cover x once; what a block keeps fits, and all blocks of a grid run at a time."""
    c, size = groups * per_group, 4 if dtype == "float32" else 2
    vec = 16 // size
    p = dev.plan_group_norm_columns(n, c, s, groups, dtype, sm_count=sm_count)
    if "refusal" in p:
        small = c * s * size < 256 << 10
        turns = vec // math.gcd(c, vec)
        # A row is at most what the threads hold, and beside it lie the tables of its channels, which have an entry for
        # every value of a half type where groups are odd.
        longest = 1000 if size == 2 and per_group % 2 else 2048
        assert small or s % turns or c * turns * size > longest, p["refusal"]
        return
    assert p["slabs"] == n * p["slabs_per_sample"]
    assert p["slabs_per_sample"] * p["channels"] == c
    assert p["groups"] * per_group == p["channels"]
    assert p["slabs_per_sample"] == 1 or (p["channels"] * size % 32 == 0 and p["turns"] == 1)
    assert p["rows"] * p["turns"] == s
    assert p["vectors"] * vec == p["channels"] * p["turns"]
    # Every slab has its team and its round.
    assert p["last_round"] < p["slabs"] <= p["rounds"] * p["teams"]
    assert p["last_round"] == (p["rounds"] - 1) * p["teams"]
    if p["cluster"]:
        assert n * c * s * size < 4 << 20
        assert p["blocks"] in (1, 2, 4, 8, 16)
        assert p["teams"] == p["slabs"]
        assert p["words"] == 0
    else:
        assert p["teams"] * p["blocks"] <= sm_count
        assert p["words"] == p["slabs"] * p["groups"] * p["blocks"] + (p["slabs"] + 1) // 2
    assert_clears_alone(p, sm_count, 32)
    # Every vector has its thread.
    assert p["columns"] * p["warps_per_row"] >= p["vectors"]
    assert p["columns"] * p["positions"] <= 32
    assert p["positions"] <= p["positions_power"] < 2 * p["positions"]
    assert p["walkers"] * p["warps_per_row"] * 32 <= p["threads"] <= 512
    assert p["stride"] == p["walkers"] * p["positions"]
    assert p["blocks"] * p["share"] >= p["rows"]
    assert p["chunks"] * dev.COLUMN_PASSES * p["stride"] >= p["share"]
    assert not p["cluster"] or p["chunks"] <= dev.COLUMN_SLOTS
    assert p["data_bytes"] == min(p["chunks"], dev.COLUMN_SLOTS) * p["slot_bytes"]
    assert p["slot_bytes"] == dev.COLUMN_PASSES * p["stride"] * p["vectors"] * 16
    assert p["data_bytes"] < p["smem_bytes"] <= 227 << 10
    # Runs are of one group wherever they lie; counts are those of all blocks together.
    assert vec % p["run"] == 0
    assert per_group == p["run"] * p["group_runs"]
    assert p["runs"] * p["run"] == p["channels"] * p["turns"]
    assert p["total_count"] == pytest.approx(s * per_group, rel=1e-6)
    assert p["full_blocks"] * p["full_count"] + p["rest_count"] == pytest.approx(s * per_group, rel=1e-5)


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("contiguous", {"channels_last": False}),
        ("whole samples", {"tensors": 2}),
        ("compute capability", {"max_blocks": 0}),
        ("float64", {"dtype": "float64"}),
        ("multiple of 16", {"aligned": False}),
        ("slow activations", {"long_chain": True}),
        ("below 256 KB", {"s": 100, "n": 512}),
        ("multiple of a vector", {"c": 30, "s": 20_001, "g": 3}),
    ],
)
def test_plan_group_norm_columns_refuses(why, change):
    sizes = {"n": 4, "c": 32, "s": 20_000, "g": 8}
    assert "refusal" not in dev.plan_group_norm_columns(**sizes)
    assert why in dev.plan_group_norm_columns(**{**sizes, **change})["refusal"]


@pytest.mark.parametrize(
    ("sizes", "slabs", "teams", "blocks"),
    [
        # As measured on an H200: a column a line wide, as many teams as are full in every round.
        ({"n": 16, "c": 128, "s": 39304, "g": 8}, 64, 5, 26),
        ({"n": 8, "c": 320, "s": 4096, "g": 32}, 64, 32, 4),
        ({"n": 1, "c": 512, "s": 5120, "g": 32}, 16, 16, 8),
        ({"n": 1, "c": 128, "s": 32768, "g": 8}, 4, 4, 33),
        ({"n": 1, "c": 128, "s": 262144, "g": 32}, 1, 1, 132),
    ],
)
def test_plan_group_norm_columns_teams(sizes, slabs, teams, blocks):
    p = dev.plan_group_norm_columns(**sizes)
    assert (p["slabs"], p["teams"], p["blocks"]) == (slabs, teams, blocks)
    assert not p["cluster"]


@settings(max_examples=400, deadline=None)
@given(
    n=st.integers(1, 200),
    groups=st.integers(1, 64),
    per_group=st.integers(1, 40),
    s=st.one_of(st.integers(1, 100), st.integers(1, 3_000_000)),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    tensors=st.sampled_from([1, 2]),
    long_chain=st.booleans(),
    holds=st.booleans(),
    sm_count=st.sampled_from([132, 114, 7]),
)
def test_plan_group_norm_rows(n, groups, per_group, s, dtype, tensors, long_chain, holds, sm_count):
    """Shares and chunks cover a sample once, slots fit, and nobody waits for a slot that only later loads make free."""
    c, size = groups * per_group, 4 if dtype == "float32" else 2
    vec = 16 // size
    p = dev.plan_group_norm_rows(n, c, s, groups, dtype, tensors, long_chain=long_chain, sm_count=sm_count, holds=holds)
    if "refusal" in p:
        return
    assert p["teams"] <= n
    assert 1 <= p["teams"] * p["blocks"] <= sm_count
    assert p["rows"] * p["turns"] == s
    assert p["vectors"] * vec == c * p["turns"]
    assert p["words"] == n * groups * p["blocks"] + (n + 1) // 2
    assert_clears_alone(p, sm_count, 128)
    # Every vector has its block, its thread and its chunk.
    assert p["blocks"] * p["share"] >= p["rows"]
    assert 1 <= p["walkers"] * p["vectors"] <= p["summers"] <= dev.ROW_WRITERS
    assert p["chunk_rows"] <= p["walkers"] * (dev.ROW_WRITERS // p["summers"]) * (dev.ROW_PASSES // tensors)
    few_summers = p["summers"] < dev.ROW_WRITERS
    assert p["held"] <= min(p["chunks"] - p["rereads"], dev.row_held(tensors, size) if holds else 0)
    assert few_summers == ((holds and p["vectors"] <= 128) if tensors == 2 else p["held"] > 0)
    assert p["chunks"] * p["chunk_rows"] >= p["share"] > (p["chunks"] - 1) * p["chunk_rows"]
    assert p["tensor_bytes"] == p["chunk_rows"] * p["vectors"] * 16
    slots = p["slots"] + p["again_slots"]
    assert slots <= dev.ROW_SLOTS
    assert slots * p["tensor_bytes"] * tensors < p["smem_bytes"] <= 227 << 10
    # What stays has a slot, or registers, at the same time as all of its sample that stays. Where chunks come again to
    # the same slots, the block has one sample, and some of its slots are free before anything is written.
    if p["rereads"] > 0 and p["again_slots"] == 0:
        assert p["teams"] == n
        assert p["backwards"]
        assert p["chunks"] - p["rereads"] - p["held"] < p["slots"]
    else:
        assert p["chunks"] - p["rereads"] <= p["slots"]
        assert (p["rereads"] > 0) == (p["again_slots"] > 0)
    assert p["distance"] == 0 or p["distance"] >= p["rereads"]
    # Lanes of a warp, or less than the threads that there are.
    assert p["element_lanes"] <= p["walkers"]
    assert max(p["element_lanes"], p["group_lanes"], p["team_lanes"]) <= 32
    assert p["team_lanes"] <= p["blocks"]
    # A lane asks for more words where the forward holds chunks of fp32, but not with a block's only sample.
    many = tensors == 1 and dtype == "float32" and p["summers"] == 128 and n >= 2 * p["teams"]
    assert p["team_lanes"] * (17 if many else 9) >= p["blocks"] or p["team_lanes"] == 32
    assert p["total_count"] == pytest.approx(s * per_group, rel=1e-6)
    assert p["full_blocks"] * p["full_count"] + p["rest_count"] == pytest.approx(s * per_group, rel=1e-5)


@pytest.mark.parametrize(
    ("sizes", "teams", "chunks", "rereads"),
    [
        # Near what was measured to be best on an H200: about four chunks of a share, where all of x (and dy) stays.
        ({"n": 128, "c": 24, "s": 19800, "g": 8}, 4, 4, 0),
        ({"n": 128, "c": 24, "s": 19800, "g": 8, "holds": False}, 4, 4, 0),
        ({"n": 128, "c": 64, "s": 15876, "g": 16}, 3, 6, 0),
        ({"n": 16, "c": 128, "s": 34**3, "g": 8, "dtype": "bfloat16"}, 1, 5, 0),
        ({"n": 16, "c": 128, "s": 34**3, "g": 8}, 1, 10, 0),
        ({"n": 128, "c": 24, "s": 19800, "g": 8, "dtype": "bfloat16"}, 10, 5, 0),
        ({"n": 128, "c": 64, "s": 15876, "g": 16, "dtype": "bfloat16"}, 4, 4, 0),
        ({"n": 28, "c": 30, "s": 9256, "g": 3, "dtype": "bfloat16"}, 14, 4, 0),
        ({"n": 128, "c": 24, "s": 19800, "g": 8, "tensors": 2}, 2, 4, 0),
        ({"n": 128, "c": 24, "s": 19800, "g": 8, "dtype": "bfloat16", "tensors": 2}, 6, 6, 0),
        ({"n": 128, "c": 64, "s": 15876, "g": 16, "dtype": "bfloat16", "tensors": 2}, 3, 6, 0),
        # 20 MB of x and dy: sample after sample through L2. More, of few samples: all of them at a time.
        ({"n": 16, "c": 128, "s": 34**3, "g": 8, "dtype": "bfloat16", "tensors": 2, "holds": False}, 1, 10, 10),
        ({"n": 2, "c": 32, "s": 96**3, "g": 8, "dtype": "bfloat16", "tensors": 2}, 2, 105, 90),
    ],
)
def test_plan_group_norm_rows_teams(sizes, teams, chunks, rereads):
    p = dev.plan_group_norm_rows(**sizes)
    assert (p["teams"], p["chunks"], p["rereads"]) == (teams, chunks, rereads)


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("contiguous", {"channels_last": False}),
        ("compute capability", {"max_blocks": 0}),
        ("float64", {"dtype": "float64"}),
        ("multiple of 16", {"aligned": False}),
        ("slow activations", {"long_chain": True}),
        ("below 256 KB", {"s": 100}),
        ("whole vectors", {"c": 30, "s": 20_001, "g": 3}),
        ("too long", {"c": 2048}),
        ("does not stay on chip", {"s": 2_000_000}),
        ("slabs are faster", {"c": 320, "n": 8, "s": 4096, "g": 32}),
        ("more than stays in L2", {"c": 128, "n": 16, "s": 34**3, "tensors": 2}),
    ],
)
def test_plan_group_norm_rows_refuses(why, change):
    sizes = {"n": 128, "c": 24, "s": 19800, "g": 8}
    assert "refusal" not in dev.plan_group_norm_rows(**sizes)
    assert why in dev.plan_group_norm_rows(**{**sizes, **change})["refusal"]


def divides(by, largest):
    """Whether quotients up to `largest` are exact, as the kernels compute them."""
    numbers = {
        0,
        1,
        by["d"] - 1,
        by["d"],
        by["d"] + 1,
        largest - 1,
        largest,
        *range(0, largest, max(1, largest // 997)),
    }
    return all((i if by["magic"] == 0 else i * by["magic"] >> 32) == i // by["d"] for i in numbers if 0 <= i <= largest)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_blocks", [0, 16])
def test_plan_group_norm_small(backward, channels_last, dtype, max_blocks):
    """Whatever the sizes, every element has one thread, and every quotient is exact."""
    rng = random.Random(f"{backward} {channels_last} {dtype} {max_blocks}")
    taken = 0
    for _ in range(400):
        g, per_group = rng.choice([1, 2, rng.randint(1, 64)]), rng.choice([1, 2, 4, rng.randint(1, 700)])
        n, s = rng.choice([1, rng.randint(1, 40)]), rng.choice([1, 4 * rng.randint(1, 300), rng.randint(1, 5000)])
        p = dev.plan_group_norm_small(n, g * per_group, s, g, dtype, backward, channels_last, True, max_blocks)
        if "refusal" in p:
            continue
        taken += 1
        elements, lanes = per_group * s, p["by_lanes"]["d"]
        assert p["elements"] == elements
        positions = [elements // 2, elements - 1]
        if channels_last:
            positions = [i // per_group * g * per_group + i % per_group for i in positions]
        assert p["places"] == positions
        assert lanes % 32 == 0 or (lanes < 32 and lanes & (lanes - 1) == 0)
        assert lanes * p["run"] * p["runs"] >= min(p["chunk"], elements)
        assert p["chunk"] * p["blocks"] >= elements
        assert p["blocks"] == 1 or (p["teams"] == 1 and p["blocks"] <= max_blocks)
        assert p["blocks"] == 1 or backward or channels_last  # forward's contiguous ones have a kernel of their own
        assert (p["blocks"] - 1) * p["chunk"] < elements  # no block is without elements
        assert p["blocks"] == 1 or p["chunk"] % 4 == 0
        assert p["teams"] * lanes <= p["threads"] <= dev.SMALL_MAX_THREADS
        assert p["threads"] % 32 == 0
        # Forward has teams below a block for single elements alone: four a thread once shared a block (70x64x13x9 g64).
        assert backward or p["run"] * p["runs"] == 1 or (p["teams"], p["threads"]) == (1, lanes)
        if backward and p["run"] * p["runs"] == dev.SMALL_MAX_ELEMENTS:
            assert p["threads"] <= dev.SMALL_MAX_BWD_THREADS
        if p["owner"]:
            assert (p["teams"], p["grid"], p["blocks"]) == (n, g, 1)
        else:
            assert p["grid"] // p["blocks"] * p["teams"] >= n * g
        if p["run"] > 1:
            assert (per_group if channels_last else s) % p["run"] == 0
        assert divides(p["by_lanes"], p["threads"] - 1)
        assert divides(p["by_minor"], elements - 1)
        assert divides(p["by_groups"], n * g - 1)
        if not backward:
            continue
        assert p["smem_bytes"] <= 96 << 10
        assert p["single"] == (s == 1 and p["blocks"] == 1 and (not p["owner"] or n == 1))
        if p["single"]:
            assert (p["run"], p["terms"]) == (1, 1)
        assert p["term_elements"] == (4 if p["run"] > 1 and not channels_last else 1)
        assert p["terms"] * p["term_elements"] == s * (n if p["owner"] else 1)
        assert p["sums"] == per_group * (1 if p["owner"] else p["teams"])
        sum_lanes = p["by_sum_lanes"]["d"]
        assert sum_lanes <= 32 or p["sum_teams"] >= p["sums"]  # the sums of several warps take one round
        assert p["sum_teams"] * sum_lanes <= p["threads"]
        assert divides(p["by_channels"], max(p["sums"] - 1, elements - 1))
        assert divides(p["by_row_terms"], p["terms"] - 1)
        assert divides(p["by_sum_lanes"], p["threads"] - 1)
    assert taken > 50


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_plan_group_norm_planes(backward, dtype):
    """Groups of one channel: wherever one starts in a vector, its vectors all have a thread."""
    rng = random.Random(f"{backward} {dtype}")
    owners = 0
    for _ in range(600):
        n, g = rng.randint(1, 40), rng.choice([1, 2, rng.randint(1, 100)])
        s = rng.choice([4 * rng.randint(1, 1000), rng.randint(1, 400), rng.randint(1, 9000)])
        p = dev.plan_group_norm_small(n, g, s, g, dtype, backward, plain=True)
        if "refusal" in p:
            continue
        lanes, teams = p["by_lanes"]["d"], p["teams"]
        vectors = s // 4 if s % 4 == 0 else max((start + s + 3) // 4 for start in range(4))
        assert p["plane"] == (s > 32 and (vectors <= 4 * dev.SMALL_MAX_BWD_THREADS if backward else s % 4 != 0))
        if not p["plane"]:
            continue
        owners += p["owner"]
        assert p["run"] == 4
        assert lanes % 32 == 0
        assert lanes * p["runs"] >= vectors
        assert teams * lanes == p["threads"] <= dev.SMALL_MAX_THREADS
        assert p["threads"] <= dev.SMALL_MAX_BWD_THREADS or p["runs"] < 4
        assert backward or lanes == 32 or teams == 1  # a block has a plane, or each of its warps
        assert (p["elements"], p["places"], p["blocks"], p["single"]) == (s, [s // 2, s - 1], 1, False)
        if p["owner"]:
            assert backward
            assert (teams, p["grid"]) == (n, g)
        else:
            assert teams == 1 or lanes == 32
            assert (p["grid"] - 1) * teams < n * g <= p["grid"] * teams
        assert divides(p["by_lanes"], p["threads"] - 1)
        assert divides(p["by_groups"], n * g - 1)
    assert (owners > 50) == backward
    for change in ({"plain": False}, {"aligned": False}, {"channels_last": True}, {"c": 6}):
        sizes = {"n": 2, "c": 3, "s": 77, "g": 3, "dtype": dtype, "backward": backward, "plain": True}
        assert dev.plan_group_norm_small(**sizes)["plane"]
        assert not dev.plan_group_norm_small(**sizes | change)["plane"]


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("float64", {"dtype": "float64"}),
        ("empty", {"n": 0}),
        ("is large", {"n": 1000, "c": 512, "g": 64}),
        ("side by side", {"channels_last": True, "s": 5000}),
        ("over 65535", {"n": 1, "s": 20000}),
        ("cluster's threads", {"s": 2000, "max_blocks": 0}),
        ("through shared memory", {"n": 1, "s": 2000, "backward": False}),
    ],
)
def test_plan_group_norm_small_refuses(why, change):
    sizes = {"n": 2, "c": 32, "s": 60, "g": 8, "backward": True}
    assert "refusal" not in dev.plan_group_norm_small(**sizes)
    assert why in dev.plan_group_norm_small(**sizes | change)["refusal"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("n", "groups", "per_group", "s"), [(13, 467, 2, 175), (9, 709, 1, 924), (60, 7, 5, 1000), (2, 51, 7, 1456)]
)
def test_plan_group_norm_slab(n, groups, per_group, s, dtype):
    p = dev.plan_group_norm_slab(n, groups * per_group, s, groups, dtype)
    assert p["columns"] * p["walkers"] == dev.SLAB_THREADS
    assert p["groups"] * per_group <= p["columns"]
    assert p["per_sample"] * p["groups"] >= groups
    assert p["grid"] == n * p["per_sample"]
    assert divides(p["by_per_sample"], p["grid"] - 1)
    assert divides(p["by_channels"], p["walkers"] * per_group)


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("float64", {"dtype": "float64"}),
        ("contiguous", {"channels_last": False}),
        ("fill a sector", {"g": 20}),
        ("is long", {"s": 10000}),
        ("GPU idle", {"n": 1, "c": 100, "g": 100}),
    ],
)
def test_plan_group_norm_slab_refuses(why, change):
    sizes = {"n": 13, "c": 934, "s": 175, "g": 467}
    assert "refusal" not in dev.plan_group_norm_slab(**sizes)
    if "g" in change and "c" not in change:
        change = change | {"c": 940}
    assert why in dev.plan_group_norm_slab(**sizes | change)["refusal"]


@pytest.mark.parametrize(
    ("way", "sizes"),
    [
        ("on chip", {"n": 128, "c": 24, "s": 19800, "g": 8}),
        ("one read", {"n": 128, "c": 24, "s": 19800, "g": 8, "dtype": "bfloat16"}),  # 119 KB: a block each in turn
        ("small", {"n": 50, "c": 33, "s": 9, "g": 33}),
        ("small", {"n": 50, "c": 33, "s": 9, "g": 33, "max_blocks": 0}),
        ("small", {"n": 1, "c": 648, "s": 300, "g": 18, "channels_last": True, "tensors": 2}),
        # Two groups of 28518 elements in clusters of eight blocks.
        ("small", {"n": 1, "c": 6, "s": 9506, "g": 2, "channels_last": True, "dtype": "float16"}),
        ("passes", {"n": 1, "c": 6, "s": 9506, "g": 2, "channels_last": True, "max_blocks": 0}),
        # Channels of 30 elements, and of 600.
        ("small", {"n": 2, "c": 278, "s": 30, "g": 1, "dtype": "float16", "tensors": 2}),
        ("on chip", {"n": 2, "c": 14, "s": 600, "g": 1, "dtype": "float16", "tensors": 2}),
        # Of the same size, with vectors of columns.
        ("columns", {"n": 2, "c": 64, "s": 1024, "g": 2, "channels_last": True, "dtype": "float16"}),
        ("slabs", {"n": 2, "c": 357, "s": 1456, "g": 51, "channels_last": True, "dtype": "bfloat16"}),
        # One group is contiguous in either layout.
        ("on chip", {"n": 1, "c": 2, "s": 182754, "g": 1, "channels_last": True, "dtype": "bfloat16"}),
        ("passes", {"n": 1, "c": 2, "s": 182754, "g": 1, "channels_last": True, "dtype": "bfloat16", "tensors": 2}),
        ("columns", {"n": 1, "c": 64, "s": 9000, "g": 1, "channels_last": True}),
        ("on chip", {"n": 5000, "c": 33, "s": 9, "g": 33}),
        ("on chip", {"n": 5000, "c": 33, "s": 9, "g": 33, "max_blocks": 0}),  # a team needs no cluster
        ("on chip", {"n": 5000, "c": 33, "s": 9, "g": 33, "max_blocks": 0, "tensors": 2}),
        ("passes", {"n": 5000, "c": 66, "s": 9, "g": 33, "max_blocks": 0, "tensors": 2}),  # of one channel alone
        # A cluster of sixteen in one wave, and blocks that have more than such clusters are good for.
        ("on chip", {"n": 1, "c": 62, "s": 4464, "g": 1, "dtype": "float16"}),
        ("one read", {"n": 1, "c": 128, "s": 8192, "g": 1, "dtype": "float16"}),
        ("passes", {"n": 1, "c": 62, "s": 4464, "g": 1, "dtype": "float16", "tensors": 2}),
        # The sums of many channels are added up faster in shared memory.
        ("on chip", {"n": 11, "c": 138, "s": 225, "g": 3, "dtype": "bfloat16", "tensors": 2}),
        ("small", {"n": 9, "c": 13, "s": 4725, "g": 13, "tensors": 2}),
        ("slabs", {"n": 13, "c": 934, "s": 175, "g": 467, "channels_last": True}),
        ("slabs", {"n": 13, "c": 934, "s": 175, "g": 467, "channels_last": True, "tensors": 2}),
        # 52 short slabs: 19 us instead of 31 by passes (H200)
        ("slabs", {"n": 2, "c": 357, "s": 1456, "g": 51, "channels_last": True, "tensors": 2, "dtype": "bfloat16"}),
        ("one read", {"n": 1, "c": 128, "s": 32**3, "g": 8}),  # a cluster of sixteen would leave GPU parts idle
        ("on chip", {"n": 1, "c": 128, "s": 32**3, "g": 8, "dtype": "bfloat16"}),  # 64 KB a block, in registers
        ("one read", {"n": 1, "c": 128, "s": 32**3 + 8, "g": 8, "dtype": "bfloat16"}),
        ("on chip", {"n": 1, "c": 128, "s": 20_000, "g": 8, "dtype": "bfloat16"}),
        ("one read", {"n": 1, "c": 128, "s": 20 * 256 * 256, "g": 32}),
        ("one read", {"n": 1, "c": 32, "s": 128**3, "g": 8, "dtype": "bfloat16"}),
        ("one read", {"n": 1, "c": 128, "s": 20 * 256 * 256, "g": 32, "dtype": "bfloat16"}),
        ("on chip", {"n": 1, "c": 128, "s": 5000, "g": 4}),  # four clusters
        ("on chip", {"n": 1, "c": 128, "s": 5000, "g": 32}),
        ("on chip", {"n": 2, "c": 3, "s": 160_003, "g": 1}),  # no multiple of 16 bytes: sixteen blocks after all
        ("passes", {"n": 1, "c": 32, "s": 128**3, "g": 8}),
        ("rows", {"n": 128, "c": 24, "s": 19800, "g": 8, "channels_last": True}),
        ("rows", {"n": 16, "c": 128, "s": 34**3, "g": 8, "channels_last": True}),
        ("columns", {"n": 1, "c": 32, "s": 128**3, "g": 8, "channels_last": True}),
        ("on chip", {"n": 3, "c": 2, "s": 12960, "g": 1, "dtype": "float16", "channels_last": True}),
        ("on chip", {"n": 8, "c": 32, "s": 1024, "g": 1, "channels_last": True}),
        ("columns", {"n": 8, "c": 32, "s": 16384, "g": 1, "channels_last": True}),
        ("passes", {"n": 128, "c": 24, "s": 19800, "g": 8, "channels_last": True, "max_blocks": 0}),
        ("passes", {"n": 512, "c": 64, "s": 49, "g": 8, "channels_last": True}),
        ("passes", {"n": 128, "c": 24, "s": 19800, "g": 8, "max_blocks": 0}),
        ("on chip", {"n": 128, "c": 24, "s": 19800, "g": 8, "tensors": 2}),
        ("one read", {"n": 1, "c": 128, "s": 512**2, "g": 32, "tensors": 2}),
        ("one read", {"n": 16, "c": 128, "s": 34**3, "g": 8, "tensors": 2}),
        ("passes", {"n": 1, "c": 128, "s": 20 * 256 * 256, "g": 32, "tensors": 2}),  # 42 MB of x and dy
        ("rows", {"n": 128, "c": 24, "s": 19800, "g": 8, "channels_last": True, "tensors": 2}),
        ("rows", {"n": 1, "c": 128, "s": 512**2, "g": 32, "channels_last": True, "tensors": 2}),
        ("passes", {"n": 16, "c": 128, "s": 34**3, "g": 8, "channels_last": True, "tensors": 2}),  # 40 MB of x and dy
    ],
)
def test_choose_group_norm(way, sizes):
    choice = dev.choose_group_norm(**sizes)
    assert choice["way"] == way, choice
    assert way != "passes" or choice["not_on_chip"]
    assert way != "passes" or choice["not_one_read"]
    assert way != "passes" or choice["not_columns"]
    assert way != "passes" or choice["not_rows"]


def check_narrow_copy(copy, row_bytes: int, threads: int = 256) -> None:
    assert row_bytes % copy.piece == 0, "a copy crosses the end of a row"
    assert copy.piece in (4, 8, 16)
    assert copy.slots % ((threads >> copy.across_log2) * 4) == 0, "not in whole batches"
    assert copy.slots >= copy.rows
    assert 1 << copy.across_log2 >= min(copy.pieces, threads)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_narrow_gradient_plans_of_any_shape(data) -> None:
    """Tiles cover the positions, and what is loaded and read lies in the stages."""
    draw = data.draw
    rank = draw(st.integers(2, 3))
    kernel = (draw(st.integers(1, 3)) if rank == 3 else 1, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    size = (draw(st.integers(1, 40)) if rank == 3 else 1, draw(st.integers(1, 200)), draw(st.integers(1, 300)))
    case = {"kernel": kernel, "padding": (0, draw(st.integers(0, 2)), draw(st.integers(0, 1)))}
    case["stride"] = (draw(st.integers(1, 2)) if rank == 3 else 1, draw(st.integers(1, 2)), 1)
    case["dilation"] = (1, draw(st.integers(1, 2)), 1)
    dims = list(zip(size, kernel, case["stride"], case["padding"], case["dilation"], strict=True))
    if min(dev.conv_out_size(*dim) for dim in dims) < 1:
        return
    dtype = draw(st.sampled_from(DTYPES))
    item = 4 if dtype == "float32" else 2
    c_in, c_out = draw(st.integers(1, 12)), draw(st.integers(1, 130))
    case.update(n=draw(st.integers(1, 20)), dtype=dtype, planar=True, allow_tf32=draw(st.booleans()))
    problem, output = make_problem(c_in, c_out, size, **case)
    parts = 2 if dtype == "float32" and not case["allow_tf32"] else 1
    limits = GPUS["h200"]
    plan = dev.plan_narrow_wgrad(problem, limits)
    if plan.refusal is None:
        assert plan.rows == c_in * kernel[0] * kernel[1] <= plan.x_tiles * 8
        assert plan.channels * plan.channel_blocks >= c_out
        assert plan.dy_tiles % 2 == 0 if plan.dy_is_a else plan.x_tiles % 2 == 0
        assert all(n * t >= o for n, t, o in zip(plan.tiles, plan.tile, output, strict=True))
        assert plan.dy_pitch == plan.tile[2] * item
        assert plan.dy_pitch % 64 == 0, "not in whole units"
        assert plan.dy_channel >= plan.tile[0] * plan.tile[1] * plan.dy_pitch
        assert plan.margin[0] >= case["padding"][2]
        used = min(plan.tile[2], output[2]) + kernel[2] - 1 - case["padding"][2]
        assert plan.tile[2] + plan.margin[1] >= used
        assert plan.x_copy.pieces * plan.x_copy.piece <= plan.x_pitch
        assert plan.dy_copy.pieces * plan.dy_copy.piece == plan.dy_pitch
        check_narrow_copy(plan.dy_copy, output[2] * item)
        check_narrow_copy(plan.x_copy, size[2] * item)
        assert plan.stage_bytes >= plan.channels * plan.dy_channel + c_in * plan.x_channel + plan.dy_pitch
        assert plan.blocks_per_sm * (plan.smem_bytes + 1024) <= limits.smem_per_sm
        assert plan.smem_bytes >= plan.stages * plan.stage_bytes
        assert plan.partial_floats == plan.channel_blocks * plan.blocks * plan.floats
        assert 1 <= plan.blocks <= plan.all_tiles
    else:
        assert len(plan.refusal) > 7
    plan = dev.plan_narrow_dgrad(problem, limits)
    if plan.refusal is None:
        assert c_in * kernel[2] <= plan.row_tiles * 16
        assert plan.channels * plan.chunks >= c_out
        assert plan.units_w * 32 >= output[2]
        assert plan.tile[0] * plan.tile[1] * plan.units_w <= 8 * plan.units
        assert all(n * t >= o for n, t, o in zip(plan.tiles, plan.tile, size[:2], strict=True))
        assert plan.k_steps * (1 if item == 4 else 2) >= plan.channels // 8 * kernel[0] * kernel[1]
        assert plan.channel >= plan.halo[0] * plan.halo[1] * plan.pitch
        assert plan.channel % 128 == (32 if item == 4 else 16)
        check_narrow_copy(plan.dy_copy, output[2] * item)
        assert plan.stage_bytes >= plan.channels * plan.channel + plan.pitch
        sums = plan.tile[0] * plan.tile[1] * (plan.units_w * 32 + 4)
        assert plan.scratch_channel >= sums
        assert plan.stage_bytes >= c_in * plan.scratch_channel * 4
        assert plan.parts == parts
        weights = plan.chunks * plan.k_steps * plan.row_tiles * parts * 512
        assert plan.smem_bytes >= weights + plan.stages * plan.stage_bytes
        assert plan.blocks_per_sm * (plan.smem_bytes + 1024) <= limits.smem_per_sm
        assert 1 <= plan.blocks <= plan.all_tiles
    else:
        assert len(plan.refusal) > 7


@pytest.mark.parametrize(
    ("fragment", "of", "kwargs"),
    [
        ("transposed", "both", {"transposed": True}),
        ("grouped", "both", {"groups": 2}),
        ("float64", "both", {"dtype": "float64"}),
        ("odd number", "both", {"dtype": "bfloat16", "size": (8, 9, 39)}),
        ("wider than 3", "both", {"kernel": (3, 3, 5)}),
        ("dilation of the width", "both", {"dilation": (1, 1, 2)}),
        ("padding of the width", "both", {"padding": (1, 1, 3)}),
        ("stride", "both", {"stride": (1, 1, 2)}),
        ("above 40", "wgrad", {"c_in": 6}),
        ("above 32", "dgrad", {"c_in": 12}),
        ("a stride", "dgrad", {"stride": (1, 2, 1)}),
        ("than a block has", "dgrad", {"size": (8, 9, 1040)}),
    ],
)
def test_narrow_gradient_plans_refuse_with_a_reason(fragment: str, of: str, kwargs: dict) -> None:
    arguments = {"c_in": 4, "c_out": 32, "size": (8, 9, 40), "kernel": (3, 3, 3), "planar": True}
    problem, _ = make_problem(**{**arguments, **kwargs})
    plans = {"wgrad": dev.plan_narrow_wgrad, "dgrad": dev.plan_narrow_dgrad}
    for plan in plans.values() if of == "both" else [plans[of]]:
        assert fragment in plan(problem).refusal


@pytest.mark.parametrize(
    ("n", "c_in", "c_out", "size", "kernel"),
    [
        (128, 3, 24, (24, 32, 32), (3, 3, 3)),
        (128, 8, 64, (1, 128, 128), (1, 3, 3)),
        (2, 4, 32, (64, 96, 96), (3, 3, 3)),
    ],
)
@pytest.mark.parametrize(("dtype", "allow_tf32"), [*((d, True) for d in DTYPES), ("float32", False)])
def test_few_channels_contiguous_take_own_gradients(n, c_in, c_out, size, kernel, dtype, allow_tf32) -> None:
    limits = GPUS["h200"]
    problem, _ = make_problem(c_in, c_out, size, kernel=kernel, n=n, dtype=dtype, allow_tf32=allow_tf32, planar=True)
    choice = dev.choose_conv_gradients(problem, limits)
    assert choice.explain() == "dx kgopt; dweight kgopt"
    assert choice.narrow_dgrad.refusal is None
    assert choice.narrow_wgrad.refusal is None
    choice = dev.choose_conv_gradients(problem, limits, dev.ConvBackend.aten)
    assert "asked for" in choice.narrow_dgrad.refusal
    problem, _ = make_problem(c_in, c_out, size, kernel=kernel, n=n, dtype=dtype)
    assert "contiguous" in dev.choose_conv_gradients(problem, limits).narrow_wgrad.refusal
