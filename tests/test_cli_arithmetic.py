"""What the command line computes: floors, work, texts, errors and times."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from bench_rows import FACTS
from kgopt import accuracy
from kgopt.cli import cases, measure, models
from kgopt.cli.floor import Ceilings, Work
from kgopt.cli.run_case import measure_case
from kgopt.cli.runner import Settings
from kgopt.cli.text import bytes_text, ratio_text, table, time_text

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quick_bench")


def test_floor_takes_the_larger_bound():
    ceilings = Ceilings(4e12, {"tf32": 360e12, "fp32": 50e12})
    assert ceilings.floor(Work(4e6), "tf32") == (pytest.approx(1.0), "memory")
    assert ceilings.floor(Work(4e6, flops=3.6e9), "tf32") == (pytest.approx(10.0), "math")
    # fp32 accuracy from three TF32 products beats plain multiply-adds here.
    assert ceilings.floor(Work(0, flops=1.2e9), "fp32")[0] == pytest.approx(10.0)
    assert ceilings.special_us(Work(0, special=1e6)) is None


def test_pipeline_work_at_the_headline_shapes():
    first, second, third = (p.work(p.headline, 4) for p in models.PIPELINES)
    assert first.flops == 2 * 128 * 22 * 30 * 30 * 24 * 3 * 27
    assert first.bytes == 4 * (128 * 3 * 24 * 32 * 32 + 128)
    assert second.flops == 2 * 16 * 32**3 * 64 * 128 * 27
    assert second.bytes == 4 * (16 * 64 * 32**3 + 16 * 128 * 34**3)
    assert third.flops == 2 * 128 * 126 * 126 * 64 * 8 * 9
    assert third.bytes == 4 * (128 * 8 * 128 * 128 + 128 * 126 * 126)
    assert third.special == 2 * 128 * 64 * 126 * 126
    training = models.PIPELINES[0].work(models.PIPELINES[0].headline, 4, training=True)
    assert training.flops == 3 * first.flops


@pytest.mark.parametrize("pipeline", models.PIPELINES, ids=lambda p: p.name)
def test_pipeline_shapes_are_those_of_the_plain_model(pipeline):
    shape = (2, pipeline.args[0], *[7, 6, 5][: len(pipeline.headline) - 2])
    plain = pipeline.plain_model()
    conv = plain.conv_transpose if pipeline.transposed else plain.conv
    x = torch.randn(shape)
    assert list(conv(x).shape) == pipeline.conv_output(shape)
    assert plain(x).numel() == pipeline.result_elements(shape)


def test_plain_model_is_seeded_and_its_affine_is_random():
    a, b = (models.PIPELINES[0].plain_model(seed=3) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert a.group_norm.weight.std() > 0.1
    assert a.group_norm.bias.std() > 0.1


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (None, "-"),
        (0.5, "0.5 µs"),
        (28.04, "28 µs"),
        (868, "868 µs"),
        (1931, "1.93 ms"),
        (152300, "152 ms"),
        (2e6, "2 s"),
    ],
)
def test_time_text(us, text):
    assert time_text(us) == text


def test_texts_and_table():
    assert bytes_text(3 * 2**20) == "3 MiB"
    assert bytes_text(900 * 2**20) == "900 MiB"
    assert bytes_text(None) == "-"
    assert ratio_text(12.42) == "12.4x"
    lines = table(["what", "n"], [["a", "10"], ["long", "9"]]).splitlines()
    assert lines == ["what   n", "----  --", "a     10", "long   9"]


def test_error_meter_adds_pieces_up():
    reference = torch.randn(6, 5, dtype=torch.float64)
    value = reference.float() + 1e-3 * torch.randn(6, 5)
    whole, pieces = measure.ErrorMeter(), measure.ErrorMeter()
    whole.add(value, reference)
    for i in range(0, 6, 2):
        pieces.add(value[i : i + 2], reference[i : i + 2])
    wanted = (value.double() - reference).norm() / reference.norm()
    assert whole.error == pytest.approx(wanted.item())
    assert pieces.error == pytest.approx(whole.error)
    assert pieces.error_max == pytest.approx(whole.error_max)
    with pytest.raises(ValueError, match=r"shape \[2\], expected \[3\]"):
        whole.add(torch.zeros(2), torch.zeros(3, dtype=torch.float64))


def test_nan_is_never_within_tolerance():
    meter = measure.ErrorMeter()
    meter.add(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0], dtype=torch.float64))
    meter.add(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert math.isnan(meter.error)
    assert math.isnan(meter.error_max)
    assert not measure.within_tolerance(meter.error, 1.0, torch.float32)
    assert measure.within_tolerance(2e-3, 1e-3, torch.float32)
    assert not measure.within_tolerance(2.1e-3, 1e-3, torch.float32)


def test_ideal_tf32_is_the_yardstick_of_tf32():
    """PyTorch may compute without TF32 what it allows in TF32: kgopt's TF32 result is then no failure."""
    assert accuracy.round_tf32(torch.tensor([1.0 + 2**-10, 1.0 + 2**-12])).tolist() == [1.0 + 2**-10, 1.0]
    case = dataclasses.replace(cases.suite_cases("pipelines")[0], shape=(2, 3, 6, 7, 8))

    def in_tf32(model: nn.Module) -> nn.Module:
        rounded = measure.rounded_convolutions(model)
        return cases.Chain(lambda x: rounded(accuracy.round_tf32(x)))

    case = dataclasses.replace(case, kgopt=in_tf32)
    settings = Settings(CPU, quick=True, compile=False, rep_ms=1, input_sets=1)
    ceilings = Ceilings(1e10, {"tf32": 1e11, "fp32": 1e11})
    tf32, fp32 = (
        {row["implementation"]: row for row in measure_case(case, name, "forward", settings, ceilings, FACTS)}
        for name in ("tf32", "fp32")
    )
    assert tf32["kgopt"]["error"] == pytest.approx(tf32["kgopt"]["error_ideal_tf32"], rel=0.1)
    assert tf32["kgopt"]["error_ratio"] > 10
    assert "out_of_tolerance" not in tf32["kgopt"]
    assert fp32["kgopt"]["out_of_tolerance"]


def test_precision_flags_are_restored():
    before = torch.backends.cudnn.allow_tf32
    with measure.precision_flags("fp32"):
        assert not torch.backends.cudnn.allow_tf32
    with measure.precision_flags("tf32"):
        assert torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32 == before


def test_peak_memory_counts_temporaries():
    x = torch.ones(2**18)
    peak = measure.peak_memory(lambda: (x + 1) * 2, CPU)  # the sum lives until the product is done
    assert peak is None or 2**21 <= peak < 2**21 + 2**16


def test_time_call_orders_its_quantiles():
    timing = measure.time_call(lambda: torch.ones(1000).sum(), CPU, rep_ms=5)
    assert 0 < timing.p20_us <= timing.median_us <= timing.p80_us
    slow, fast = measure.time_calls([lambda: torch.ones(2**20).cumsum(0), lambda: None], CPU, rep_ms=5)
    assert slow.median_us > fast.median_us


@pytest.mark.parametrize("suite", cases.SUITES)
def test_every_case_has_work_and_a_name_of_its_own(suite):
    found = cases.suite_cases(suite)
    assert len({case.name for case in found}) == len(found)
    for case in found:
        for direction in ("forward", *([case.backward] if case.backward else [])):
            work = case.work(case.shape, 4, direction)
            assert work.bytes >= 4 * math.prod(case.shape)
        small = case.scaled(16)
        assert math.prod(small.shape) < math.prod(case.shape)
        assert small.shape[1] == case.shape[1]


def test_unknown_suite():
    with pytest.raises(ValueError, match="expected one of pipelines, groupnorm, channelnorm, conv, ops"):
        cases.suite_cases("poems")


@pytest.mark.parametrize(
    ("model", "slices", "shape", "count"),
    [
        (models.randomize(cases.PlainGroupNorm(4, 12, "silu")), cases.group_slices, (2, 12, 5, 4), 8),
        (models.randomize(cases.PlainChannelNorm("l2", 6, "silu")), cases.position_slices, (2, 6, 3, 5, 4), 10),
        (nn.Conv3d(3, 5, 3, padding=1), cases.conv_slices, (1, 3, 9, 4, 5), 3),
        (nn.Conv3d(3, 5, 3, padding=1), cases.conv_slices, (1, 3, 1, 4, 5), 1),
        (nn.ConvTranspose3d(3, 5, 3), cases.conv_slices, (2, 3, 4, 4, 5), 2),
    ],
)
def test_reference_pieces_agree_with_the_whole(model, slices, shape, count, monkeypatch):
    monkeypatch.setattr("kgopt.cli.cases.case._PIECE", 1)  # so that everything is cut
    x = torch.randn(shape)
    with torch.no_grad():
        wanted = cases.double(model)(x.double())
        pieces = list(slices(model, x))
        for piece in pieces:
            torch.testing.assert_close(piece.module(x[piece.x_index].double()), wanted[piece.y_index])
    assert len(pieces) == count
    seen = torch.zeros(wanted.shape, dtype=torch.bool)
    for piece in pieces:
        seen[piece.y_index] = True
    assert bool(seen.all()), "an element is in no piece"


def test_group_norm_parameter_gradients_from_pieces(monkeypatch):
    """Gradients of gamma and beta are summed over pieces that each see a few channels."""
    monkeypatch.setattr("kgopt.cli.cases.case._PIECE", 1)
    case = next(c for c in cases.suite_cases("groupnorm") if c.shape == (1, 512, 5, 32, 32))
    small = dataclasses.replace(case, shape=(2, 512, 2, 3, 3))
    settings = Settings(CPU, quick=True, compile=False, rep_ms=1, input_sets=2)
    rows = measure_case(small, "fp32", "backward", settings, Ceilings(1e10, {"fp32": 1e11}), FACTS)
    assert all(row["error"] < 1e-5 for row in rows if row["implementation"].startswith("eager"))
