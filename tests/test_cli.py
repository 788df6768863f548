"""The command line: its arithmetic, its files, and each subcommand run small on the CPU."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kgopt import accuracy
from kgopt.cli import _optional, build_parser, cases, chains, convs, jobs, main, measure, models, results, sweep
from kgopt.cli.bench import Compiled, Settings, bench_table, measure_case
from kgopt.cli.bench import _notes as bench_notes
from kgopt.cli.floor import Ceilings, Work
from kgopt.cli.text import bytes_text, ratio_text, table, time_text

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quick_bench")


# -------------------------------------------------------------------------------------------------- arithmetic


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
    case = cases.dataclasses.replace(cases.suite_cases("pipelines")[0], shape=(2, 3, 6, 7, 8))

    def in_tf32(model: nn.Module) -> nn.Module:
        rounded = measure.rounded_convolutions(model)
        return cases.Chain(lambda x: rounded(accuracy.round_tf32(x)))

    case = cases.dataclasses.replace(case, kgopt=in_tf32)
    settings = Settings(CPU, quick=True, compile=False, rep_ms=1, input_sets=1)
    ceilings = Ceilings(1e10, {"tf32": 1e11, "fp32": 1e11})
    tf32, fp32 = (
        {row["implementation"]: row for row in measure_case(case, name, "forward", settings, ceilings, _FACTS)}
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


# ------------------------------------------------------------------------------------------------------- cases


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
    with pytest.raises(ValueError, match="expected one of pipelines, groupnorm, conv, ops"):
        cases.suite_cases("poems")


@pytest.mark.parametrize(
    ("model", "slices", "shape"),
    [
        (models.randomize(cases.PlainGroupNorm(4, 12, "silu")), cases.group_slices, (2, 12, 5, 4)),
        (nn.Conv3d(3, 5, 3, padding=1), cases.conv_slices, (1, 3, 9, 4, 5)),
        (nn.Conv3d(3, 5, 3, padding=1), cases.conv_slices, (1, 3, 1, 4, 5)),
        (nn.ConvTranspose3d(3, 5, 3), cases.conv_slices, (2, 3, 4, 4, 5)),
    ],
)
def test_reference_pieces_agree_with_the_whole(model, slices, shape, monkeypatch):
    monkeypatch.setattr(cases, "_PIECE", 1)  # so that everything is cut
    x = torch.randn(shape)
    with torch.no_grad():
        wanted = cases.double(model)(x.double())
        pieces = list(slices(model, x))
        for piece in pieces:
            torch.testing.assert_close(piece.module(x[piece.x_index].double()), wanted[piece.y_index])
    assert len(pieces) >= 1


def test_group_norm_parameter_gradients_from_pieces(monkeypatch):
    """Gradients of gamma and beta are summed over pieces that each see a few channels."""
    monkeypatch.setattr(cases, "_PIECE", 1)
    case = next(c for c in cases.suite_cases("groupnorm") if c.shape == (1, 512, 5, 32, 32))
    small = cases.dataclasses.replace(case, shape=(2, 512, 2, 3, 3))
    settings = Settings(CPU, quick=True, compile=False, rep_ms=1, input_sets=2)
    rows = measure_case(small, "fp32", "backward", settings, Ceilings(1e10, {"fp32": 1e11}), _FACTS)
    assert all(row["error"] < 1e-5 for row in rows if row["implementation"].startswith("eager"))


# ----------------------------------------------------------------------------------------------------- results

_FACTS = {
    "device": "cuda", "gpu": "NVIDIA H200", "driver": "580.1", "cpu": "c", "cpu_threads": 2, "torch": "2.14.1",
    "cuda": "13.0", "cudnn": "9.19.0", "kgopt": "0.1.0", "kgopt_archs": "9.0a", "python": "3.11", "commit": "abc",
    "date": "2026-01-02T00:00:00Z",
}  # fmt: skip


def _row(implementation: str, time_us: float | None, case: str = "some case", **more: object) -> dict:
    row = {
        "suite": "pipelines", "case": case, "title": f"Title of {case}", "shape": [2, 3, 4], "direction": "forward",
        "dtype": "tf32", "implementation": implementation, "layout": "contiguous", "time_us": time_us, "error": 3e-4,
        "peak_bytes": 5000, "floor_us": 28.0, "floor_bound": "math", "copy_gbytes_per_s": 4300.0,
        "matmul_tflops": 356.0, **_FACTS,
    }  # fmt: skip
    return {**row, **more}


def _rows() -> list[dict]:
    times = {
        "eager": 1181.0,
        "eager_channels_last": 1259.0,
        "compile": 881.0,
        "compile_max_autotune": 868.0,
        "kgopt": 95.0,
    }
    rows = [_row(name, time) for name, time in times.items()]
    return [*rows, _row("eager", 500.0, "other"), _row("kgopt", 250.0, "other"),
            _row("compile", None, "other", failed="RuntimeError: no")]  # fmt: skip


def test_a_plain_model_that_optimize_leaves_slower_than_the_module_is_told():
    """kgopt.optimize took 383 us for the third pipeline where the module took 149, and no bench showed it."""
    rows = [_row("kgopt", 149.0), _row("kgopt_optimize", 383.0, layout_chosen="channels_last: 0.38 ms")]
    groups = results.group_rows(rows)
    assert groups[0].optimize_over_module == pytest.approx(2.57, abs=0.01)
    text = bench_table(groups)
    assert "optimize" in text
    assert "383" in text
    (note,) = bench_notes(groups)
    assert "2.57 times the module's (channels_last: 0.38 ms)" in note
    assert bench_notes(results.group_rows([_row("kgopt", 149.0), _row("kgopt_optimize", 154.0)])) == []
    assert bench_notes(results.group_rows([_row("kgopt", 149.0)])) == []


def test_rows_round_trip(tmp_path):
    path = tmp_path / "new folder" / "rows.json"
    results.save_rows(path, _rows())
    assert results.load_rows(path) == _rows()
    assert len(path.read_text().splitlines()) == len(_rows()) + 5  # one row a line
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "holds no rows"), ('{"format": 99, "rows": []}', "has format 99, expected 1")],
)
def test_load_rows_refuses_other_files(tmp_path, text, message):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        results.load_rows(path)


def test_groups_compare_with_the_best_baseline():
    first, second = results.group_rows(_rows())
    assert first.best(results.COMPILED) == ("compile_max_autotune", 868.0)
    assert first.over_compile() == pytest.approx(868 / 95)
    assert first.over_eager() == pytest.approx(1181 / 95)
    assert first.over_eager("_channels_last") is None  # kgopt was not measured in it
    assert first.floor_fraction == pytest.approx(28 / 95)
    assert second.over_compile() is None  # it failed
    text = bench_table([first, second])
    assert "12.4x" in text
    assert "failed" in text
    assert "29%" in text


def test_two_runs_are_not_compared():
    """A later run replaces a case whole: its times must not meet the baselines of another day."""
    later = _row("kgopt", 50.0, date="2026-02-01T00:00:00Z")
    group = results.group_rows([*_rows(), later])[0]
    assert group.time("kgopt") == 50.0
    assert group.time("eager") is None


# ------------------------------------------------------------------------------------------------- subcommands


def test_help_lists_the_commands():
    done = subprocess.run([sys.executable, "-m", "kgopt", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    for command in ("demo", "bench", "info"):
        assert re.search(rf"^ +{command} ", done.stdout, re.M)


def test_command_line_imports_nothing_heavy():
    heavy = ("matplotlib", "nibabel", "skimage", "sklearn")
    code = f"import sys, kgopt.cli; kgopt.cli.build_parser(); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_info(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"torch     {torch.__version__}" in text
    assert "paths on cpu" in text
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["build"]["torch_target"] == "2.10"
    assert {path["dtype"] for path in facts["paths"]["cpu"]} == {"fp32"}
    norms = [path for path in facts["paths"]["cpu"] if path["what"].startswith("group_norm")]
    assert len(norms) == 16
    assert all("CPU" in path["path"] for path in norms)
    assert all(path["path"].startswith("aten") for path in facts["paths"]["cpu"] if path not in norms)


@pytest.mark.parametrize("case", ["mean over space", "logsumexp over the last dim"])
def test_bench_writes_rows(tmp_path, capsys, case):
    path = tmp_path / "rows.json"
    arguments = [
        "bench",
        "--suite",
        "ops",
        "--case",
        case,
        "--quick",
        "--backward",
        "--device",
        "cpu",
        "--commit",
        "c0ffee",
    ]
    assert main([*arguments, "--json", str(path)]) == 0
    rows = results.load_rows(path)
    assert {(row["implementation"], row["direction"]) for row in rows} == {
        (name, direction) for name in ("eager", "kgopt") for direction in ("forward", "backward")
    }
    for row in rows:
        assert row["time_us"] > 0
        assert row["commit"] == "c0ffee"
        assert row["torch"] == torch.__version__
        assert row["floor_fraction"] == pytest.approx(row["floor_us"] / row["time_us"], rel=0.01)
        assert "out_of_tolerance" not in row
    measured = capsys.readouterr().out
    assert main(["bench", "--from-json", str(path)]) == 0
    assert capsys.readouterr().out == measured


def test_relu_may_flip_where_elements_are_many():
    assert 2e-4 < measure.kink_error("relu", (8, 64, 32, 1024)) < 4e-4
    assert measure.kink_error("relu", (8, 64, 100)) == 0
    assert measure.kink_error("silu", (8, 64, 32, 1024)) == 0
    suite = {case.name: case.kink for case in cases.suite_cases("groupnorm")}
    assert suite["2x32x96x96x96 g8 relu"] > 0 == suite["16x128x34x34x34 g8 none"]


def test_shards_join_into_one_run(tmp_path):
    arguments = ["bench", "--suite", "sweep", "--count", "3", "--max-bytes", "4096", "--quick", "--device", "cpu"]
    parts = [tmp_path / f"{i}.json" for i in range(2)]
    for i, part in enumerate(parts):
        assert main([*arguments, "--shard", f"{i}/2", "--json", str(part)]) == 0
    joined = tmp_path / "joined.json"
    assert main(["bench", "--from-json", *map(str, parts), "--json", str(joined)]) == 0
    found = results.group_rows(results.load_rows(joined))
    assert [group.case[:4] for group in found if group.direction == "forward"] == ["000:", "001:", "002:"]
    assert [group.case[:4] for group in found if group.direction == "backward"] == ["000:", "001:", "002:"]


def test_jobs_share_a_suite(tmp_path):
    path = tmp_path / "rows.json"
    arguments = ["bench", "--suite", "sweep", "--count", "3", "--max-bytes", "4096", "--quick", "--device", "cpu"]
    assert main([*arguments, "--jobs", "2", "--json", str(path)]) == 0
    found = results.group_rows(results.load_rows(path))
    assert [group.case[:4] for group in found if group.direction == "backward"] == ["000:", "001:", "002:"]
    assert len({group.facts["date"] for group in found}) == 1  # or they would not count as one run


@pytest.mark.parametrize("suite", ["sweep", "convs", "chains"])
def test_a_run_that_was_stopped_goes_on(suite, tmp_path, capsys):
    path = tmp_path / "rows.json"
    arguments = ["bench", "--suite", suite, "--quick", "--device", "cpu", "--dtype", "fp32", "--no-compile"]
    arguments += ["--count", "8" if suite == "chains" else "2", "--max-bytes", "4096", "--json", str(path)]
    assert main(arguments) == 0
    rows = results.load_rows(path)
    first = [row for row in rows if row["case"] == rows[0]["case"]]
    results.save_rows(path, first)
    assert main([*arguments, "--resume", "--stop", "0"]) == 0
    assert results.load_rows(path) == first
    assert "steps are left" in capsys.readouterr().err or first == rows
    # What a run left of a case when it was cut is measured again.
    results.save_rows(path, [*first, *({**row, "partial": True} for row in rows if row not in first)])
    assert main([*arguments, "--resume"]) == 0
    after = results.load_rows(path)
    assert not any("partial" in row for row in after)
    assert after[: len(first)] == first
    assert [row["case"] for row in after] == [row["case"] for row in rows]


def test_an_interrupted_run_keeps_what_it_has(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    measured, whole = [], convs.measure_conv

    def measure_conv(*arguments):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(arguments)
        return whole(*arguments)

    monkeypatch.setattr(convs, "measure_conv", measure_conv)
    assert main(["bench", "--suite", "convs", "--quick", "--count", "4", "--device", "cpu", "--json", str(path)]) == 130
    assert len({row["case"] for row in results.load_rows(path)}) == 2


def test_one_job_measures_a_suite_that_compiles_nothing(tmp_path):
    path = tmp_path / "rows.json"
    arguments = ["bench", "--suite", "convs", "--count", "2", "--quick", "--device", "cpu", "--json", str(path)]
    assert main([*arguments, "--jobs", "1"]) == 0
    assert len({row["case"] for row in results.load_rows(path)}) == 2


def test_a_job_that_fails_is_named(tmp_path):
    arguments = ["bench", "--suite", "sweep", "--count", "2", "--max-bytes", "4096", "--quick", "--device", "cpu"]
    args = build_parser().parse_args([*arguments, "--jobs", "2", "--dtype", "int8"])  # which run_bench would refuse
    with pytest.raises(ChildProcessError, match=r"2 of 2 processes failed; the first said: ValueError: .*'int8'"):
        jobs.run_jobs(args, 2, Ceilings(1e9, {}, None), {"device": "cpu"}, [])


def test_what_was_compiled_before_is_what_is_measured():
    shape = sweep.Shape(0, (2, 4, 6), 2, "relu", "fp32", "contiguous")
    settings = Settings(torch.device("cpu"), rep_ms=1.0, input_sets=1)
    calls = []

    class Counted(cases.PlainGroupNorm):
        def forward(self, x):
            calls.append(x.shape)
            return super().forward(x)

    before = Compiled(models.randomize(Counted(2, 4, "relu"), 0), 1.5)
    ceilings = Ceilings(1e9, {"tf32": 1e9, "fp32": 1e9}, None)
    rows = sweep.measure_shape(shape, settings, ceilings, {}, {"compile": before})
    row = next(row for row in rows if row["implementation"] == "compile" and row["direction"] == "forward")
    assert calls
    assert row["compile_s"] == 1.5
    assert row["time_us"] > 0
    assert "out_of_tolerance" not in row

    calls.clear()
    case = dataclasses.replace(sweep._case(shape), layouts=False)
    rows = measure_case(
        case, "fp32", "forward", settings, ceilings, {}, {"compile": dataclasses.replace(before, compile_s=2.5)}
    )
    assert calls
    assert {row["compile_s"] for row in rows if row["implementation"] == "compile"} == {2.5}


def test_bench_pipelines_quick(tmp_path):
    path = tmp_path / "rows.json"
    arguments = ["bench", "--suite", "pipelines", "--case", "conv3d", "--quick", "--device", "cpu", "--json", str(path)]
    assert main(arguments) == 0
    names = {row["implementation"] for row in results.load_rows(path)}
    assert names == {"eager", "eager_channels_last", "kgopt", "kgopt_channels_last", "kgopt_optimize"}


def test_bench_scaling_draws_lines(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, chart = tmp_path / "rows.json", tmp_path / "scaling.png"
    arguments = ["bench", "--suite", "scaling", "--quick", "--device", "cpu", "--json", str(path), "--plot", str(chart)]
    assert main(arguments) == 0
    assert "conv3d+gn+mean batch 1" in capsys.readouterr().out
    rows = results.load_rows(path)
    assert {row["implementation"] for row in rows} == {
        "eager",
        "kgopt",
        "kgopt_optimize",
    }, "CUDA graphs are a matter of GPUs"
    assert {row["axis"] for row in rows} == {"batch", "edge"}
    for row in rows:
        assert row["time_us"] > 0
        assert row["axis_value"] == row["shape"][0 if row["axis"] == "batch" else -1]
        assert "out_of_tolerance" not in row
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_random_chains_are_a_family():
    found = chains.random_chains(100, 0)
    assert found[:20] == chains.random_chains(20, 0)
    assert found != chains.random_chains(100, 1)
    assert len({chain.name for chain in found}) == 100
    assert {len(chain.kernel) for chain in found} == {2, 3}
    assert {1, 3, 5, 7} <= {k for chain in found for k in chain.kernel}
    for values in ("stride", "dilation"):
        assert {v for chain in found for v in getattr(chain, values)} == {1, 2}
    assert min(chain.shape[1] for chain in found) == 1
    assert max(chain.shape[1] for chain in found) >= 24
    assert max(chain.conv_groups for chain in found) > 1
    for chain in found:
        assert chain.c_out <= 128
        assert (
            chain.c_out % chain.norm_groups
            == chain.c_out % chain.conv_groups
            == chain.shape[1] % chain.conv_groups
            == 0
        )
        assert min(chain.output) >= 1
        assert math.prod(chain.shape) <= 2**24


def test_bench_chains_runs_what_it_draws(tmp_path, capsys):
    path = tmp_path / "rows.json"
    # Three small ones of each pipeline, with the convolution's own check of its output's size.
    small = sorted(chains.random_chains(60, 0), key=lambda chain: chain.flops)
    for rank in (2, 3):
        for chain in [c for c in small if len(c.kernel) == rank][:3]:
            x = torch.randn(chain.shape)
            model = chain.plain()
            assert tuple(model.conv(x).shape) == chain.output
            torch.testing.assert_close(chain.kgopt(model)(x), model(x), rtol=1e-4, atol=1e-4)
            assert chain.work(chain.shape, 4, "forward").flops == pytest.approx(chain.flops)
    name = small[0].name.split()[0]
    arguments = ["bench", "--suite", "chains", "--count", "60", "--case", name, "--device", "cpu", "--no-compile"]
    assert main([*arguments, "--json", str(path)]) == 0
    assert "measurements: kgopt is" in capsys.readouterr().out
    assert {row["implementation"] for row in results.load_rows(path)} == {"eager", "kgopt"}


def test_random_convs_are_what_they_say():
    found = convs.random_convs(200, 0)
    assert found[:20] == convs.random_convs(20, 0)
    assert found != convs.random_convs(200, 1)
    assert len({conv.name for conv in found}) == 200
    assert {len(conv.kernel) for conv in found} == {2, 3}
    assert {conv.transposed for conv in found} == {False, True}
    assert {k for conv in found for k in conv.kernel} == {1, 2, 3, 4, 5}
    for values in ("stride", "dilation"):
        assert {v for conv in found for v in getattr(conv, values)} == {1, 2, 3}
    channels = [c for conv in found for c in (conv.shape[1], conv.c_out)]
    assert min(channels) == 8
    assert 400 < max(channels) <= 512
    assert any(conv.groups > 1 for conv in found)
    assert max(conv.flops for conv in found) <= 3e10


def test_bench_convs_runs_what_it_draws(tmp_path, capsys):
    for conv in sorted(convs.random_convs(60, 0, 3e7), key=lambda conv: conv.flops)[:12]:
        x, weight = torch.randn(conv.shape), torch.randn(conv.weight_shape)
        expected = conv.torch_call(x, weight)
        assert tuple(expected.shape) == conv.output
        torch.testing.assert_close(conv.call(x, weight), expected, rtol=1e-4, atol=1e-3)
    path = tmp_path / "rows.json"
    arguments = ["bench", "--suite", "convs", "--count", "3", "--device", "cpu", "--json", str(path)]
    assert main(arguments) == 0
    assert "6 measurements" in capsys.readouterr().out
    rows = results.load_rows(path)
    assert {row["implementation"] for row in rows} == {"eager", "eager_channels_last", "kgopt", "kgopt_channels_last"}
    assert all(row["time_us"] > 0 and row["error"] < 1e-5 for row in rows)


def test_convs_say_what_is_slower():
    base = {"suite": "convs", "direction": "forward", "dtype": "bf16", "title": "", "layout": "contiguous"}
    times = {"a": (10, 11), "b": (10, 10), "c": (10, 5)}
    rows = [
        {**base, "case": case, "implementation": name, "time_us": us}
        for case, pair in times.items()
        for name, us in zip(("eager", "kgopt"), pair, strict=True)
    ]
    text = convs.convs_summary(rows)
    assert "3 measurements: 1 faster than cuDNN, 1 slower" in text
    assert "1.10" in text


@pytest.mark.gpu
def test_bench_replays_a_graph(tmp_path):
    path = tmp_path / "rows.json"
    arguments = ["bench", "--suite", "scaling", "--case", "edge 8", "--dtype", "bf16", "--json", str(path)]
    assert main(arguments) == 0
    rows = {row["implementation"]: row for row in results.load_rows(path) if row["case"].startswith("conv2d")}
    assert {"eager", "kgopt", "kgopt_graph"} <= set(rows)
    assert rows["kgopt_graph"]["time_us"] > 0
    assert rows["kgopt_graph"]["error"] == rows["kgopt"]["error"]


def test_bench_records_a_failing_baseline():
    case = cases.suite_cases("ops")[0].scaled(512)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("first line\nsecond line")

    case = cases.dataclasses.replace(case, kgopt=lambda model: cases.Chain(broken))
    settings = Settings(CPU, quick=True, compile=False, rep_ms=1, input_sets=1)
    rows = measure_case(case, "fp32", "forward", settings, Ceilings(1e10, {"fp32": 1e11}), _FACTS)
    assert [row.get("failed") for row in rows] == [None, "RuntimeError: first line"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--dtype", "tf32", "--device", "cpu"], "tf32, which the CPU does not have"),
        (["bench", "--dtype", "int8", "--device", "cpu"], "'int8', expected tf32, fp32, bf16 or fp16"),
        (["bench", "--case", "nothing", "--device", "cpu"], "which no case of suite pipelines contains"),
        (["bench", "--from-json", "/nonexistent.json"], "nonexistent.json"),
        (["bench", "--shard", "2/2", "--device", "cpu"], "--shard is '2/2', expected I/N with 0 <= I < N"),
        (["bench", "--shard", "7/8", "--case", "conv3d", "--device", "cpu"], "'7/8', which leaves nothing of"),
        (["bench", "--suite", "chains", "--quick", "--count", "2", "--device", "cpu"], "of which --count 2 has none"),
        (["bench", "--resume", "--device", "cpu"], "--resume continues the file of --json"),
        (["bench", "--jobs", "0", "--device", "cpu"], "--jobs is 0, expected at least 1"),
        (["bench", "--jobs", "2", "--shard", "0/2", "--device", "cpu"], "expected one of them"),
        (["bench", "--suite", "convs", "--jobs", "2", "--device", "cpu"], "suite convs compiles nothing ahead"),
        (["demo", "--device", "cuda:99"], "--device is cuda:99"),
    ],
)
def test_bad_calls_say_one_line(capsys, arguments, message):
    if "demo" in arguments:
        pytest.importorskip("matplotlib")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_missing_package_says_what_to_install(monkeypatch, capsys):
    def missing(name: str) -> None:
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(_optional.importlib, "import_module", missing)
    assert main(["demo"]) == 2
    assert "pip install 'kgopt[demo]'" in capsys.readouterr().err


def _require_demo() -> None:
    for name in ("matplotlib", "nibabel"):
        pytest.importorskip(name)
    try:
        import skimage  # noqa: F401
    except ImportError:
        pytest.importorskip("sklearn")


def test_demo_quick(tmp_path, capsys):
    _require_demo()
    chart = tmp_path / "demo.png"
    assert main(["demo", "--quick", "--device", "cpu", "--out", str(chart)]) == 0
    text = capsys.readouterr().out
    assert text.count(" ok\n") == 3
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_demo_fails_where_a_result_is_wrong(tmp_path, capsys, monkeypatch):
    _require_demo()
    right = models.Pipeline.kgopt_model

    def wrong(self, plain, in_channels=None):
        model = right(self, plain, in_channels)
        with torch.no_grad():
            model.group_norm.bias.add_(1e-3)
        return model

    monkeypatch.setattr(models.Pipeline, "kgopt_model", wrong)
    assert main(["demo", "--quick", "--device", "cpu", "--out", str(tmp_path / "demo.png")]) == 1
    assert "NOT OK: conv3d_group_norm_mean" in capsys.readouterr().out


def test_demo_inputs():
    _require_demo()
    from kgopt.cli import demo_data

    volume = demo_data.load_mri()
    assert volume.shape == (2, 24, 128, 96)
    assert demo_data.mri_patches(volume).shape == (12, 3, 24, 32, 32)
    # Neighbouring voxels become channels, none is lost.
    unshuffled = demo_data.mri_unshuffled(volume)
    assert unshuffled.shape == (2, 64, 6, 32, 24)
    assert torch.equal(unshuffled[1, :, 2, 3, 4], volume[1, 8:12, 12:16, 16:20].flatten())
    tiles = demo_data.photo_tiles(demo_data.load_photos())
    assert tiles.shape[1:] == (8, 128, 128)
    assert len(tiles) >= 4


@pytest.mark.parametrize("suite", ["pipelines", "groupnorm"])
def test_plots_are_reproducible(tmp_path, suite):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rows.json"
    results.save_rows(path, [{**row, "suite": suite} for row in _rows()])
    charts = []
    for name in ("a.png", "b.png"):
        assert main(["bench", "--from-json", str(path), "--plot", str(tmp_path / name)]) == 0
        charts.append((tmp_path / name).read_bytes())
    assert charts[0] == charts[1]
    assert main(["bench", "--from-json", str(path), "--plot", str(tmp_path / "c.png"), "--plot-dtype", "bf16"]) == 2


def run_script(monkeypatch, script: Path, *arguments: object) -> int:
    """The exit status of a script run in this process, which has imported torch."""
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(script), run_name="__main__")
    return exit_info.value.code or 0


def _copy_pages(folder: Path) -> None:
    (folder / "docs").mkdir()
    for page in ("README.md", "docs/benchmarks.md"):
        (folder / page).write_text((ROOT / page).read_text())


def test_readme_table(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    script = ROOT / "benchmarks" / "readme_table.py"
    _copy_pages(tmp_path)
    results.save_rows(tmp_path / "results" / "h200.json", _rows())

    def run(*more: str) -> int:
        return run_script(monkeypatch, script, "--root", tmp_path, "--results", tmp_path / "results", *more)

    assert run("--check") == 1
    assert run() == 0
    line = (
        "| Title of some case<br>x 2\u00d73\u00d74 | fp32, TF32 allowed | 95 µs | 868 µs | **12.4** | **9.1** | 29% |"
    )
    assert line in (tmp_path / "docs/benchmarks.md").read_text()
    text = (tmp_path / "README.md").read_text()
    assert "| Title of some case | fp32, TF32 allowed | 1.18 ms | 868 µs | 95 µs | **12.4** | **9.1** |" in text
    assert "](docs/pipelines.png)" in text
    assert (tmp_path / "docs" / "pipelines.png").exists()
    assert run("--check") == 0


def test_readme_is_current():
    script = ROOT / "benchmarks" / "readme_table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_table_of_models(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    _copy_pages(tmp_path)
    times = {"eager": 57e3, "eager_channels_last": 66e3, "compile": 12e3, "kgopt": 10e3, "kgopt_compile": 9e3}
    rows = [_row(name, time, suite="models", dtype="bf16", shape=[1, 4, 8]) for name, time in times.items()]
    results.save_rows(tmp_path / "results" / "h200.json", rows)
    script = ROOT / "benchmarks" / "readme_table.py"
    assert run_script(monkeypatch, script, "--root", tmp_path, "--results", tmp_path / "results") == 0
    line = "| bf16 | 57 ms | 12 ms | 10 ms | 9 ms | **5.7** | **1.2** | **1.3** | 3.0e-04 (3.0e-04) |"
    assert line in (tmp_path / "docs/benchmarks.md").read_text()
    short = "| bf16 | 57 ms | 12 ms | 10 ms | **5.7** | **1.2** |"
    assert short in (tmp_path / "README.md").read_text()


def test_denoising_example(tmp_path):
    for name in ("matplotlib", "nibabel", "tqdm"):
        pytest.importorskip(name)
    picture = tmp_path / "denoise.png"
    command = [sys.executable, str(ROOT / "examples" / "denoise_unet3d.py"), "--quick", "--device", "cpu"]
    done = subprocess.run([*command, "--out", str(picture)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = re.search(r"([\d.]+) dB before, ([\d.]+) dB after", done.stdout).groups()
    assert float(after) > float(before)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--channels", "12"], ["--patch", "50"], ["--steps", "1"]])
def test_denoising_example_says_what_is_wrong(arguments, monkeypatch, capsys):
    assert run_script(monkeypatch, ROOT / "examples" / "denoise_unet3d.py", *arguments) == 2
    assert f"{arguments[0]} is {arguments[1]}, expected" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["modules", "functional_compile", "ops_export", "cuda_graph", "optimize_segresnet"])
def test_examples_run(name):
    if name == "functional_compile" and shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_chains_are_counted_by_the_gpu_and_by_calls():
    """A chain whose kernels take longer than eager's, but whose call does not."""
    from kgopt.cli.chains import chains_summary

    def rows(case: str, times: dict[str, tuple[float, float]]) -> list[dict]:
        facts = {"suite": "chains", "case": case, "direction": "forward", "dtype": "bf16", "date": "today"}
        return [
            {**facts, "implementation": name, "time_us": gpu, "call_us": call} for name, (gpu, call) in times.items()
        ]

    both = [
        *rows("small", {"eager": (10.0, 90.0), "compile": (12.0, 80.0), "kgopt": (15.0, 30.0)}),
        *rows("large", {"eager": (300.0, 300.0), "compile": (200.0, 210.0), "kgopt": (50.0, 50.0)}),
    ]
    head, slower = chains_summary(both).splitlines()
    assert head.endswith("; 1 are slower (0 of 2 by the time of a call, launches and all)")
    assert slower == "  slower: small bf16: 1.50"
    for row in both:
        del row["call_us"]
    assert chains_summary(both).splitlines()[0].endswith("; 1 are slower")
