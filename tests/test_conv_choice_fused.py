"""Which convolution kernel is taken without a measured row: by name, by dtype, and inside the fused pipelines."""

from __future__ import annotations

import pytest

from plan_problems import CASES, DTYPES, GPUS, dev, make_problem


def test_choice_can_be_forced_and_says_why() -> None:
    problem, _ = make_problem(3, 24, (24, 32, 32), (3, 3, 3))
    for backend, path in (("kgopt", "few_channels"), ("aten", "aten")):
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_is_stored_where_filters_are_long(dtype: str) -> None:
    """Two convolutions take longer than one that stores its output, if that is small."""
    which = dev.ConvEpilogue.__members__["residual_lse"]
    long = dict(c_in=18, c_out=48, size=(1, 153, 172), kernel=(1, 5, 7), stride=(1, 1, 2), padding=(0, 2, 2))
    more = {"dtype": dtype, "epilogue": which, "planar": True, "norm_groups": 16}
    choice = dev.choose_conv(make_problem(n=1, **long, **more)[0], GPUS["h200"])
    assert choice.path.name == "few_channels"
    assert choice.composed
    assert "once" in choice.explain()
    assert not dev.choose_conv(make_problem(n=1, **long, **{**more, "planar": False})[0], GPUS["h200"]).composed
    assert not dev.choose_conv(make_problem(n=128, **CASES["pipeline 3"], **more)[0], GPUS["h200"]).composed
    own = dev.choose_conv(make_problem(n=1, **long, **more)[0], GPUS["h200"], dev.ConvBackend.kgopt)
    assert own.path.name == "few_channels"
    assert not own.composed, "two passes by name"


@pytest.mark.parametrize("dtype", DTYPES)
def test_chains_in_one_launch_are_the_small_ones(dtype: str) -> None:
    """The headline shapes stay with passes; what passes would only wait for goes in one launch."""
    limits = GPUS["h200"]
    for name, epilogue in (("pipeline 1", "stats"), ("pipeline 3", "residual_lse")):
        which = dev.ConvEpilogue.__members__[epilogue]
        arguments = {**CASES[name], "dtype": dtype, "epilogue": which, "planar": True, "norm_groups": 8}
        large, _ = make_problem(n=128, **arguments)
        assert dev.choose_conv(large, limits).path.name == "few_channels"
        small, _ = make_problem(n=4, **{**arguments, "size": (1 if name == "pipeline 3" else 6, 9, 12)})
        choice = dev.choose_conv(small, limits)
        assert choice.path.name == "chain"
        assert "one launch" in choice.explain()
        alone, _ = make_problem(n=4, **{**arguments, "size": (1, 9, 12), "kernel": (1, 3, 3), "norm_groups": 0})
        assert dev.choose_conv(alone, limits).path.name == "few_channels", "statistics alone have no chain"
        assert dev.choose_conv(small, limits, dev.ConvBackend.kgopt).path.name == "few_channels", (
            "its own kernels by name"
        )


@pytest.mark.parametrize(
    ("c_in", "c_out", "size"),
    [(32, 32, (128,) * 3), (64, 64, (64,) * 3), (32, 64, (80, 170, 170)), (32, 32, (96,) * 3), (16, 32, (96,) * 3)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_channels_innermost_take_a_kernel_on_wgmma(c_in, c_out, size, dtype: str) -> None:
    case = dict(kernel=(3, 3, 3), padding=(1, 1, 1))
    problem, _ = make_problem(c_in, c_out, size, **case, dtype=dtype, channels_innermost=True)
    choice = dev.choose_conv(problem, GPUS["h200"])
    assert choice.path.name in ("tap_columns", "position_rows")
    assert "wgmma" in choice.explain()
    problem, _ = make_problem(c_in, c_out, size, **case, dtype=dtype, planar=True)
    choice = dev.choose_conv(problem, GPUS["h200"])
    assert choice.path.name in (("aten", "few_channels") if c_in > 16 else ("aten", "implicit_gemm", "few_channels"))
    assert "channels_last" in choice.explain()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("allow_tf32", [True, False])
def test_wide_transposed_convolutions_with_a_norm_take_one_launch(dtype: str, allow_tf32: bool) -> None:
    arguments = {
        "n": 16,
        "transposed": True,
        "dtype": dtype,
        "allow_tf32": allow_tf32,
        "epilogue": dev.ConvEpilogue.store_stats,
    }
    problem, _ = make_problem(64, 128, (32,) * 3, (3,) * 3, **arguments, planar=True)
    choice = dev.choose_conv(problem, GPUS["h200"])
    assert choice.path.name == "transposed_norm"
    assert choice.plan.scaled == (dtype == "float32" and allow_tf32)
    assert ("scaled by powers of two" in choice.reason) == choice.plan.scaled
    if dtype == "float32":
        problem, _ = make_problem(32, 128, (32,) * 3, (3,) * 3, **arguments, planar=True)
        choice = dev.choose_conv(problem, GPUS["h200"], dev.ConvBackend.kgopt)
        assert not choice.plan.scaled, "half of its rows would be padding"
    problem, _ = make_problem(64, 128, (32,) * 3, (3,) * 3, **arguments)
    assert dev.choose_conv(problem, GPUS["h200"]).path.name != "transposed_norm"


def test_more_than_an_activation_behind_a_convolution_goes_to_taps_as_columns() -> None:
    """Its kernel adds a residual to what it stores; the one with positions as rows does not."""
    problem, _ = make_problem(64, 64, (64,) * 3, (3,) * 3, padding=(1, 1, 1), dtype="bfloat16", channels_innermost=True)
    named = dev.ConvBackend.position_rows
    paths = [
        dev.choose_conv(problem, GPUS["h200"], named, tail).path.name for tail in dev.ConvTailKind.__members__.values()
    ]
    assert paths == ["position_rows", "position_rows", "tap_columns"]


def test_gradients_that_would_copy_both_tensors_are_left_to_aten() -> None:
    problem, _ = make_problem(64, 64, (64,) * 3, (3,) * 3, padding=(1, 1, 1), dtype="bfloat16", channels_innermost=True)
    limits, auto = GPUS["h200"], dev.ConvBackend.auto
    assert isinstance(dev.choose_conv_gradients(problem, limits, auto).dweight, dev.WgradPlan)
    copying = dev.choose_conv_gradients(problem, limits, auto, copies=True)
    assert isinstance(copying.dx, dev.AtenPlan)
    assert isinstance(copying.dweight, dev.AtenPlan)
    assert "copied" in copying.explain()
