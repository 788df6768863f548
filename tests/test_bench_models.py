"""bench --suite models and --suite sweep, at tiny sizes on the CPU."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from kgopt.cli import bench_models, main, results, sweep, zoo
from kgopt.cli.floor import Ceilings
from kgopt.cli.measure import Timing
from kgopt.cli.runner import Settings

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quick_bench")
PACKAGES = ("monai", "pytorch3dunet", "diffusers")
FACTS = {"device": "cpu", "gpu": None, "cpu": "c", "cpu_threads": 2, "torch": "2.14.1", "cudnn": None,
         "kgopt": "0.1.0", "date": "2026-01-02T00:00:00Z"}  # fmt: skip
CEILINGS = Ceilings(1e11, {"fp32": 1e12, "tf32": 1e12, "bf16": 2e12})


class Net(nn.Module):
    """A model of two levels that needs no library."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv3d(2, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.conv2, self.norm2 = nn.Conv3d(8, 2, 3, padding=1), nn.GroupNorm(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))


CASE = zoo.ModelCase(
    "Net", "A net", "json", "json", lambda library, small: Net(), (1, 2, 8, 8, 8), (1, 2, 4, 4, 4), trains=True
)
NAMES = ("eager", "eager_channels_last", "kgopt")


def measure(precision: str, direction: str, oracles: bench_models.Oracles, **more: object) -> list[dict]:
    settings = Settings(CPU, quick=True, compile=False, rep_ms=1, **more)  # type: ignore[arg-type]
    return bench_models.measure_model(CASE, precision, direction, settings, CEILINGS, FACTS, oracles)


# --------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("precision", "direction"),
    [("fp32", "forward"), ("bf16", "forward"), ("fp32", "training"), ("autocast", "training")],
)
def test_a_model_gives_a_row_for_each_implementation(precision, direction):
    rows = {row["implementation"]: row for row in measure(precision, direction, bench_models.Oracles())}
    assert tuple(rows) == NAMES
    for row in rows.values():
        assert "failed" not in row, row["failed"]
        assert row["suite"] == "models"
        assert row["time_us"] > 0
        assert row["floor_us"] > 0
        assert row["work_flops"] >= 2 * 27 * 2 * 2 * 8 * 8**3  # both convolutions
        assert 0 < row["error"] < (5e-2 if precision in ("bf16", "autocast") else 1e-4)
        assert "out_of_tolerance" not in row
    assert rows["eager_channels_last"]["layout"] == "channels_last"
    assert rows["kgopt"]["sites"] == 2
    json.dumps(list(rows.values()))


def test_one_reference_serves_every_precision():
    """Weights and input are exact in bf16, so float64 is computed once a direction."""
    oracles = bench_models.Oracles()
    measure("fp32", "forward", oracles)
    (known,) = oracles._known.values()
    measure("bf16", "forward", oracles)
    assert list(oracles._known.values()) == [known]
    model = CASE.build()
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())
    assert model.norm1.weight.std() > 0.1
    x = CASE.inputs(CPU)
    assert torch.equal(x, x.bfloat16().float())


def test_float32_stands_in_where_float64_takes_minutes(monkeypatch):
    """Errors are float64's but for float32's own, which is measured at the smaller input and said."""
    exact = {row["implementation"]: row["error"] for row in measure("bf16", "forward", bench_models.Oracles())}
    monkeypatch.setitem(globals(), "CASE", dataclasses.replace(CASE, float64_shape=(1, 2, 3, 4, 5)))
    oracles = bench_models.Oracles()
    rows = measure("bf16", "forward", oracles)
    for row in rows:
        assert row["error_reference"].startswith("float32 without TF32, which is ")
        assert row["error_reference"].endswith(" from float64 at 1x2x3x4x5")
        assert row["error"] == pytest.approx(exact[row["implementation"]], rel=1e-2)
    assert 0 < oracles._apart["Net", "forward"] < 1e-5
    assert "\nerror of Net: against float32" in bench_models.models_table(results.group_rows(rows))
    row = measure("fp32", "forward", oracles)[0]
    assert "error" not in row
    assert row["error_unknown"].startswith("its reference would be float32")


def test_only_the_implementations_asked_for():
    rows = measure("fp32", "forward", bench_models.Oracles(), only=("kgopt",))
    assert [row["implementation"] for row in rows] == ["eager", "kgopt"]


def test_a_spent_budget_leaves_compiled_rows_out():
    settings = Settings(CPU, compile=True, deadline=0.0, only=("compile", "kgopt_compile"))
    rows = bench_models.measure_model(CASE, "fp32", "forward", settings, CEILINGS, FACTS, bench_models.Oracles())
    failed = {row["implementation"]: row.get("failed") for row in rows}
    spent = "not run: the time budget was spent"
    assert failed == {"eager": None, "compile": spent, "kgopt_compile": spent}


def test_what_is_measured_is_kept_before_the_model_is_done():
    """A run that is cut off leaves its rows, and one that is told to stop goes no further than it must."""
    kept: list[list[dict]] = []
    settings = Settings(CPU, quick=True, compile=False, rep_ms=1)
    arguments = (CEILINGS, FACTS, bench_models.Oracles())
    rows = bench_models.measure_model(CASE, "fp32", "forward", settings, *arguments, keep=kept.append)
    assert [[row["implementation"] for row in part] for part in kept] == [["eager"], list(NAMES[:2])]
    assert all(row["partial"] and row["time_us"] > 0 and row["floor_us"] > 0 for part in kept for row in part)
    assert not any("partial" in row for row in rows)
    settings = dataclasses.replace(settings, stop_at=0.0)
    (row,) = bench_models.measure_model(CASE, "fp32", "forward", settings, *arguments)
    assert row["implementation"] == "eager"
    assert row["partial"]


def test_an_error_in_one_implementation_leaves_the_others(monkeypatch):
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(bench_models.kgopt, "optimize", broken)
    rows = {row["implementation"]: row for row in measure("fp32", "forward", bench_models.Oracles())}
    assert rows["kgopt"]["failed"] == "RuntimeError: first line"
    assert rows["eager"]["time_us"] > 0


def test_a_wrong_result_is_out_of_tolerance(monkeypatch):
    def wrong(model, example_inputs):
        with torch.no_grad():
            model.norm2.bias.add_(1e-2)
        return bench_models.kgopt.rewrite.api.optimize(model, measure=False)

    monkeypatch.setattr(bench_models.kgopt, "optimize", wrong)
    rows = {row["implementation"]: row for row in measure("fp32", "forward", bench_models.Oracles())}
    assert rows["kgopt"]["out_of_tolerance"]
    assert "out_of_tolerance" not in rows["eager_channels_last"]


def test_models_table_and_ratios():
    times = {"eager": 57e3, "eager_channels_last": 66e3, "compile": 12e3, "compile_channels_last": 14e3,
             "kgopt": 9e3, "kgopt_compile": 8e3}  # fmt: skip
    base = {"suite": "models", "case": "Net", "title": "A net", "shape": [1], "direction": "training",
            "dtype": "autocast", "layout": "contiguous", "error": 1e-3, "peak_bytes": 2**30, "floor_us": 3e3,
            **FACTS}  # fmt: skip
    rows = [{**base, "implementation": name, "time_us": time} for name, time in times.items()]
    (group,) = results.group_rows(rows)
    assert bench_models.model_ratios(group) == pytest.approx((57 / 9, 12 / 9, 12 / 8))
    text = bench_models.models_table([group])
    for part in ("Net train", "autocast", "optimize", "opt+compile", "6.33x", "1.33x", "1.50x", "1 GiB"):
        assert part in text


def test_steps_train_only_what_trains_and_run_inference_in_plain_dtypes():
    cases = bench_models.model_cases(None, small=True)
    steps = [(c.name, p, d) for c, p, d in bench_models.model_steps(cases, ["tf32", "bf16", "autocast"], training=True)]
    forward = [s for s in steps if s[2] == "forward"]
    training = [s for s in steps if s[2] == "training"]
    assert {s[1] for s in forward} == {"tf32", "bf16"}
    assert len(forward) == 8
    assert {s[:2] for s in training} == {(n, p) for n in ("SegResNet", "UNet3D") for p in ("tf32", "autocast")}
    for text, names in (
        ("autoenc", ["AutoencoderKL", "AutoencoderKLHunyuanVideo"]),
        ("AutoencoderKL", ["AutoencoderKL"]),
        ("segresnet, unet", ["SegResNet", "UNet3D"]),
        ("nothing", []),
    ):
        assert [c.name for c in bench_models.model_cases(text, small=False)] == names


def test_missing_libraries_are_skipped_with_the_pip_command(tmp_path, capsys, monkeypatch):
    real = importlib.import_module

    def missing(name: str, *rest: object) -> object:
        if name.split(".")[0] in PACKAGES:
            raise ImportError(f"No module named '{name}'")
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(importlib, "import_module", missing)
    path = tmp_path / "rows.json"
    arguments = ["bench", "--suite", "models", "--quick", "--backward", "--device", "cpu", "--json", str(path)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for package in PACKAGES:
        assert f"pip install {package}" in text
    assert "skipped" in text
    rows = results.load_rows(path)
    assert {row["implementation"] for row in rows} == {"eager"}
    assert all(row["failed"].startswith("skipped: ") for row in rows)
    monkeypatch.undo()
    assert main(["bench", "--from-json", str(path)]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("case", zoo.MODEL_CASES, ids=lambda case: case.name)
def test_published_models_quick(case, tmp_path, capsys):
    pytest.importorskip(case.module)
    path = tmp_path / "rows.json"
    training = ["--backward"] if case.trains else []
    arguments = ["bench", "--suite", "models", "--case", case.name, "--quick", "--device", "cpu", "--json", str(path)]
    assert main([*arguments, *training]) == 0, capsys.readouterr()
    rows = [row for row in results.load_rows(path) if row["case"] == case.name]
    assert {row["direction"] for row in rows} == {"forward", *(["training"] if case.trains else [])}
    assert {row["implementation"] for row in rows} == set(NAMES)
    assert all(row["time_us"] > 0 for row in rows)


def test_importing_kgopt_imports_no_model_library():
    code = f"import sys, kgopt, kgopt.cli.zoo; print([m for m in {PACKAGES} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "models", "--dtype", "autocast"], "add --backward"),
        (["--suite", "models", "--case", "nothing"], "which no case of suite models contains"),
        (["--suite", "models", "--impl", "fastest"], "--impl has 'fastest', expected some of eager"),
        (["--suite", "ops", "--dtype", "autocast"], "'autocast', expected tf32, fp32, bf16 or fp16"),
        (["--suite", "models", "--dtype", "bf16,autocast", "--backward", "--impl", "eager", "--case", "SegResNet"], ""),
        (["--suite", "sweep", "--count", "0"], "--count is 0"),
        (["--suite", "sweep", "--count", "2", "--case", "nothing"], "which no case of suite sweep contains"),
    ],
)
def test_bad_calls_say_one_line(capsys, arguments, message):
    if not message:
        pytest.importorskip("monai")
        assert main(["bench", "--device", "cpu", "--quick", *arguments]) == 0
        return
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


# ---------------------------------------------------------------------------------------------------------- sweep


def test_random_shapes_cover_the_range_and_are_reproducible():
    precisions = ["fp32", "bf16", "fp16"]
    shapes = sweep.random_shapes(200, 0, precisions, 2.0**30)
    assert shapes[:50] == sweep.random_shapes(50, 0, precisions, 2.0**30)
    assert shapes != sweep.random_shapes(200, 1, precisions, 2.0**30)
    assert len({shape.name for shape in shapes}) == 200
    assert {len(shape.shape) for shape in shapes} == {3, 4, 5}
    assert {shape.precision for shape in shapes} == set(precisions)
    assert {shape.act for shape in shapes} == {"none", "relu", "silu"}
    assert {shape.layout for shape in shapes} == {"contiguous", "channels_last"}
    assert min(shape.bytes for shape in shapes) < 2**12
    assert max(shape.bytes for shape in shapes) > 2**28
    for shape in shapes:
        channels = shape.shape[1]
        assert 1 <= channels <= 1024
        assert channels % shape.groups == 0
        assert math.prod(shape.shape[2:]) * channels // shape.groups > 1
        assert shape.bytes <= 1.5 * 2**30
        assert shape.layout == "contiguous" or len(shape.shape) > 3


def test_sweep_writes_rows_and_a_chart(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, chart = tmp_path / "rows.json", tmp_path / "sweep.png"
    arguments = ["bench", "--suite", "sweep", "--count", "6", "--device", "cpu", "--max-bytes", "20000", "--no-compile"]
    assert main([*arguments, "--json", str(path), "--plot", str(chart)]) == 0
    text = capsys.readouterr().out
    assert "median" in text
    assert chart.read_bytes().startswith(b"\x89PNG")
    rows = results.load_rows(path)
    assert len(rows) == 6 * 2 * 2
    for row in rows:
        assert row["time_us"] > 0
        assert row["error"] < 1e-2
        assert "out_of_tolerance" not in row
        assert row["bytes"] == math.prod(row["shape"]) * (4 if row["dtype"] == "fp32" else 2)
    assert main(["bench", "--from-json", str(path), "--plot", str(tmp_path / "again.png")]) == 0
    assert (tmp_path / "again.png").read_bytes() == chart.read_bytes()
    assert len(sweep.sweep_points(rows)) == 12


def test_sweep_says_what_is_slower():
    base = {"suite": "sweep", "direction": "forward", "dtype": "fp32", "layout": "contiguous", "bytes": 2**20,
            "shape": [1], "error": 1e-7, **FACTS}  # fmt: skip
    times = {"a": (10.0, 5.0, 4.0), "b": (10.0, 8.0, 12.0)}
    rows = [
        {**base, "case": case, "implementation": name, "time_us": time}
        for case, own in times.items()
        for name, time in zip(("eager", "compile", "kgopt"), own, strict=True)
    ]
    points = {point.facts["case"]: point for point in sweep.sweep_points(rows)}
    assert points["a"].ratio == pytest.approx(0.8)
    assert points["b"].ratio == pytest.approx(1.5)
    assert points["b"].best == "compile"
    text = sweep.sweep_summary(rows)
    assert "8 µs torch.compile" in text
    assert "1.50" in text
    assert "a  " not in text.split("slower")[1]


def test_what_looks_slower_is_timed_again(monkeypatch):
    """Noise makes kgopt look slow once: the better of its medians counts."""
    noisy = iter([100.0] + [1.0] * 100)

    def timed(fn, device, rep_ms):
        fn()
        value = next(noisy) if type(fn.__self__.model).__module__.startswith("kgopt.nn") else 50.0
        return Timing(value, value, value)

    monkeypatch.setattr("kgopt.cli.measure.time_call", timed)
    shape = sweep.Shape(0, (2, 8, 5), 4, "relu", "fp32", "contiguous")
    rows = sweep.measure_shape(shape, Settings(CPU, compile=False, rep_ms=1), CEILINGS, FACTS)
    times = {(row["implementation"], row["direction"]): row["time_us"] for row in rows}
    assert times["kgopt", "forward"] == 1.0
    assert times["eager", "forward"] == 50.0


def test_compile_of_a_sweep_keeps_to_the_budget():
    shape = sweep.Shape(0, (2, 8, 5), 4, "relu", "fp32", "contiguous")
    settings = Settings(CPU, compile=True, deadline=0.0, rep_ms=1)
    rows = sweep.measure_shape(shape, settings, CEILINGS, FACTS)
    failed = {row["implementation"]: row.get("failed") for row in rows}
    assert failed == {"eager": None, "compile": "not run: the time budget was spent", "kgopt": None}
