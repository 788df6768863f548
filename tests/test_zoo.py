"""bench --suite zoo: its networks small on the CPU, rows that come one by one, ways that fail, the summary."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree

from bench_rows import FACTS
from kgopt._layout import is_dense_channels_last
from kgopt.cli import main, results
from kgopt.cli.networks import case, drawn, suite, summary, ways, zoo
from kgopt.cli.networks.network import Network

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
NETWORKS = zoo.library_networks()
DRAWN = drawn.drawn_networks(3, 5)
SETTINGS = case.Settings("cpu", small=True, seconds=0.0)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small networks: where cores are busy, threads that wait for each other take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def call(model, arguments):
    y = model(**arguments) if isinstance(arguments, dict) else model(*arguments)
    return [t for t in _pytree.tree_leaves(y) if isinstance(t, torch.Tensor) and t.is_floating_point()]


# ---------------------------------------------------------------------------------------------------------- networks


def test_the_zoo_holds_enough():
    assert len(NETWORKS) >= 40
    assert len({network.name for network in NETWORKS}) == len(NETWORKS)
    assert {network.package for network in NETWORKS} >= {"monai", "diffusers", "timm", "pytorch3dunet"}


@pytest.mark.parametrize("entry", [*NETWORKS, *DRAWN], ids=lambda entry: entry.name)
def test_a_network_runs(entry):
    try:
        importlib.import_module(getattr(entry, "module", "torch"))
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{entry.package} cannot be imported: {error}")
    with entry.built(CPU, small=True) as model:
        with torch.no_grad():
            outputs = call(model, entry.arguments(CPU, torch.float32, small=True))
        assert outputs
        assert all(bool(y.isfinite().all()) for y in outputs)
        assert any(float(y.abs().max()) > 0 for y in outputs)
        if not entry.trains:
            return
        model.train()
        if entry.before_training is not None:
            entry.before_training(model)
        sum(y.mean() for y in call(model, entry.arguments(CPU, torch.float32, small=True))).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert all(bool(g.isfinite().all()) for g in gradients)


def test_a_missing_library_is_named():
    lacking = Network("Net", "no-such-package", "no_such_package", lambda m, small: m, ((1, 2, 3),), ((1, 2, 3),))
    row = case.Measurement(lacking, SETTINGS).measure(case.Task("Net", "fp32", "eager"))
    assert row["failed"].startswith("skipped: no-such-package is missing")
    assert row["failed"].endswith("pip install no-such-package")


def test_drawn_networks_are_the_seeds():
    first, again, other = (drawn.drawn_networks(2, seed) for seed in (3, 3, 4))
    assert [entry.drawn() for entry in first] == [entry.drawn() for entry in again]
    assert [entry.drawn() for entry in first] != [entry.drawn() for entry in other]
    assert zoo.find_network("drawn 3/001").drawn() == first[1].drawn()
    with first[0].built(CPU, small=True) as one, again[0].built(CPU, small=True) as two:
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_drawn_networks_are_large_and_small():
    counts = [drawn._cost(entry.drawn())[0] for entry in drawn.drawn_networks(6, 0)]
    assert max(counts) > 2**25
    assert max(counts) <= drawn.ELEMENTS[1]


# -------------------------------------------------------------------------------------------------------------- rows

NET = DRAWN[0]


class Small(nn.Module):
    """A convolution, a norm, an activation."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Dropout(0.0)

    def forward(self, x, scale=1.0):
        return {"sample": F.silu(self.norm(self.conv(x))) * scale}


def small_network(full=((1, 2, 8, 8),)) -> Network:
    return Network("Small", "torch", "torch", lambda m, small: Small(), full, full, trains="autocast")


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("fp32", ("eager", "eager_channels_last", "kgopt")),
        ("autocast_fp16", ("eager", "kgopt")),
        ("bf16", ("kgopt",)),
        ("autocast", ("kgopt",)),
        ("amp", ("eager", "kgopt")),
    ],
)
def test_rows_of_a_case(precision, names):
    measurement = case.Measurement(small_network({"x": (1, 2, 8, 8), "scale": 2.0}), SETTINGS)
    rows = {name: measurement.measure(case.Task("Small", precision, name)) for name in names}
    for row in rows.values():
        assert row.get("failed") is None
        assert row["time_us"] > 0
        assert row["error"] < (1e-5 if precision == "fp32" else 0.1)
        assert row["direction"] == ("training" if precision.startswith("autocast") else "forward")
        assert row["shape"] == [1, 2, 8, 8]
    if precision == "fp32":
        assert rows["eager_channels_last"]["layout"] == "channels_last"
    assert rows["kgopt"]["sites"] == 1 >= rows["kgopt"]["sites_kgopt"]
    assert json.dumps(rows)


def test_random_results_have_no_error():
    class Random(Small):
        def forward(self, x):
            return F.dropout(super().forward(x)["sample"], 0.5, training=self.training)

    network = Network("Random", "torch", "torch", lambda m, small: Random(), ((1, 2, 8, 8),), ((1, 2, 8, 8),))
    measurement = case.Measurement(network, SETTINGS)
    row = measurement.measure(case.Task("Random", "autocast", "eager"))
    assert row["error_unknown"] == "the network draws random numbers"
    assert row["time_us"] > 0
    assert measurement.measure(case.Task("Random", "fp32", "eager"))["error"] < 1e-6


def test_what_a_network_raises_is_in_the_row():
    row = case.Measurement(small_network(((1, 3, 8, 8),)), SETTINGS).measure(case.Task("Small", "fp32", "eager"))
    assert row["failed"].startswith("RuntimeError: Given groups=1")


def arguments(path, *more: str) -> list[str]:
    command = ["bench", "--suite", "zoo", "--quick", "--device", "cpu", "--json", str(path), "--case", NET.name]
    return [*command, "--seed", str(NET.seed), "--count", "3", "--dtype", "fp32", *more]


def fake_rows(monkeypatch, measure):
    """Rows without a process: ``measure`` stands for a worker's."""

    class Worker:
        facts = FACTS
        measured = 0

        def __init__(self, *rest):
            pass

        def measure(self, task, seconds):
            return measure(task, seconds)

        def stop(self):
            stops.append(self)

    stops = []
    monkeypatch.setattr(suite, "Worker", Worker)
    return stops


def row_of(task, time_us=1000.0):
    return {k: v for k, v in {**suite._failed(task, ""), "time_us": time_us}.items() if k != "failed"}


def test_rows_are_written_and_resumed(tmp_path, monkeypatch, capsys):
    path, seen = tmp_path / "zoo.json", []

    def measure(task, seconds):
        if len(seen) == 1:
            assert len(results.load_rows(path)) == 1  # written before the next one is measured
        seen.append(task)
        return row_of(task, 900.0 if task.implementation == "eager_channels_last" else 1000.0)

    fake_rows(monkeypatch, measure)
    assert main(arguments(path, "--ways", "eager,channels_last")) == 0
    assert [task.implementation for task in seen] == ["eager", "eager_channels_last"]
    assert main(arguments(path, "--ways", "eager,channels_last,optimize,compile", "--resume")) == 0
    assert [task.implementation for task in seen[2:]] == ["kgopt", "compile"]
    assert seen[-1].eager_prefers_channels_last
    assert len(results.load_rows(path)) == 4
    printed = capsys.readouterr().out
    assert main(["bench", "--suite", "zoo", "--from-json", str(path)]) == 0
    assert capsys.readouterr().out in printed


def test_a_way_that_fails_is_a_row(tmp_path, monkeypatch, capsys):
    def measure(task, seconds):
        if task.implementation == "eager_channels_last":
            raise suite.DiedError("the process died (SIGSEGV): it said nothing")
        return row_of(task)

    stops = fake_rows(monkeypatch, measure)
    path = tmp_path / "zoo.json"
    assert main(arguments(path, "--ways", "eager,channels_last,optimize")) == 0
    rows = {row["implementation"]: row for row in results.load_rows(path)}
    assert rows["eager_channels_last"]["failed"] == "the process died (SIGSEGV): it said nothing"
    assert rows["kgopt"]["time_us"] == 1000
    assert len(stops) == 2  # the one that died, and the one at the end
    assert "SIGSEGV" in capsys.readouterr().out


def test_time_is_over(tmp_path, monkeypatch, capsys):
    fake_rows(monkeypatch, lambda task, seconds: row_of(task))
    path = tmp_path / "zoo.json"
    assert main(arguments(path, "--seconds", "0")) == 1
    assert not path.exists()
    assert "time is over: 1 of 1 cases are left" in capsys.readouterr().err


def test_a_process_measures_and_is_ended(tmp_path):
    """The one test with a real worker: the first row comes, the second has no time."""
    worker = suite.Worker(SETTINGS)
    try:
        assert worker.facts["torch"] == torch.__version__
        assert worker.measure(case.Task(NET.name, "fp32", "eager"), 100)["time_us"] > 0
        with pytest.raises(suite.DiedError, match="over 0 s"):
            worker.measure(case.Task(NET.name, "fp32", "kgopt"), 0)
    finally:
        worker.stop()
    assert not worker._process.is_alive()
    worker.stop()  # twice does no harm


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--case", "no such network"], "no network of the zoo contains"),
        (["--dtype", "int8"], "--dtype has 'int8'"),
        (["--ways", "eager,faster"], "--ways has 'faster'"),
        (["--shard", "3/2"], "--shard is '3/2'"),
        (["--jobs", "0"], "--jobs is 0, expected at least 1"),
        (["--resume"], "--resume continues the file of --json"),
        (["--case", "HighResNet", "--dtype", "training"], "leaves nothing of 1 networks"),
    ],
)
def test_wrong_arguments(more, text, capsys):
    assert main(["bench", "--suite", "zoo", "--device", "cpu", *more]) == 2
    assert text in capsys.readouterr().err


def test_ways_and_shards():
    parser = importlib.import_module("kgopt.cli").build_parser()

    def chosen(*more):
        args = parser.parse_args(["bench", "--suite", "zoo", "--count", "2", *more])
        return [(entry.name, precision) for entry, precision in suite.zoo_cases(args)]

    everything = chosen()
    assert len(everything) > 200
    assert sorted(chosen("--shard", "0/2") + chosen("--shard", "1/2")) == sorted(everything)
    assert ("nnU-Net PlainConvUNet 3D", "autocast_fp16") in everything
    assert ("UNet3D", "autocast") in chosen("--dtype", "training", "--case", "UNet3D")
    assert len(chosen("--dtype", "bf16", "--case", "UNet3D")) == 1  # the whole name, not a part of one
    assert "kgopt_graph" in ways.ways_of(None, False, "cuda")
    assert "kgopt_graph" not in ways.ways_of(None, True, "cuda")
    assert ways.ways_of(["optimize", "eager"], False, "cuda") == ["eager", "kgopt"]


# ----------------------------------------------------------------------------------------------------------- summary


def zoo_row(implementation, time_us, network="Net", dtype="bf16", **more):
    row = {"suite": "zoo", "case": network, "title": network, "dtype": dtype, "implementation": implementation,
           "direction": "forward", "layout": "contiguous", "time_us": time_us, "error": 3e-3, "peak_bytes": 2**24,
           **FACTS}  # fmt: skip
    return {**row, **more}


def test_summary_flags():
    rows = [
        zoo_row("eager", 2000.0),
        zoo_row("eager_channels_last", 1500.0),
        zoo_row("compile", 1000.0),
        zoo_row("kgopt", 500.0),
        zoo_row("eager", 1000.0, "Slow"),
        zoo_row("compile", 800.0, "Slow"),
        zoo_row("kgopt", 1100.0, "Slow", peak_bytes=2**25, error=9e-2),
        zoo_row("kgopt_backend", 900.0, "Slow"),
        zoo_row("kgopt_compile", None, "Slow", failed="over 240 s"),
    ]
    fast, slow = summary.zoo_cases_of(rows)
    assert fast.flags == []
    assert (fast.ratio, fast.over_eager) == (2.0, 3.0)
    assert slow.flags == [
        "kgopt 1.10 x eager",
        "1.12 x compile",
        "kgopt_backend 1.12 x compile",
        "memory 2.00 x eager",
        "kgopt error 9.0e-02, eager's 3.0e-03",
        "kgopt_compile failed",
    ]
    (replayed,) = summary.zoo_cases_of([*rows[:4], zoo_row("kgopt_backend_reduce_overhead", 250.0)])
    assert replayed.ratio == 4.0
    assert summary.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert summary.means([fast, slow]) == [
        "inference: 1.33 times faster than the best of eager and compile (2 cases), optimize 1.65 times faster than "
        "eager (2); 1 of 2 flagged"
    ]
    (alone,) = summary.zoo_cases_of([row for row in rows[:4] if row["implementation"] != "compile"])
    assert alone.ratio is None  # eager is the best that there is only where somebody tried to compile
    assert summary.means([alone]) == ["inference: optimize 3.00 times faster than eager (1); 0 of 1 flagged"]


def run_table(monkeypatch, *more) -> int:
    script = ROOT / "benchmarks" / "zoo_table.py"
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, more)])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(script), run_name="__main__")
    return exit_info.value.code or 0


def test_page_is_drawn(tmp_path, monkeypatch):
    page = tmp_path / "zoo.md"
    page.write_text((ROOT / "docs/zoo.md").read_text())
    results.save_rows(
        tmp_path / "h200.json", [zoo_row("eager", 2000.0), zoo_row("compile", 2000.0), zoo_row("kgopt", 500.0)]
    )
    given = ("--page", page, "--results", tmp_path)
    assert run_table(monkeypatch, *given, "--check") == 1
    assert run_table(monkeypatch, *given) == 0
    assert "| Net | bf16 | 2 ms | 2 ms | 500 µs | - | - | - | 4.00 | 4.00 |" in page.read_text()
    assert run_table(monkeypatch, *given, "--check") == 0


def test_page_is_current(monkeypatch):
    assert run_table(monkeypatch, "--check") == 0


def test_channels_last_of_a_network_with_weights_of_4_and_5_dimensions():
    """Video decoders have 2D convolutions inside; ``Module.to`` refuses channels_last_3d for their weights."""
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.Flatten(1, 2), nn.Conv2d(8, 2, 3))
    moved, (x,) = ways.in_format(model, (torch.randn(1, 2, 4, 8, 8),), True)
    assert is_dense_channels_last(x)
    assert is_dense_channels_last(moved[0].weight)
    assert is_dense_channels_last(moved[2].weight)


# ----------------------------------------------------------------------------------------------------------- profiles


def test_a_profile_says_where_the_time_goes(tmp_path, capsys):
    path = tmp_path / "profile.json"
    name, dtype = DRAWN[0].name, DRAWN[0].precisions[0]
    shared = ["--suite", "zoo", "--profile", "--device", "cpu", "--quick", "--count", "3", "--seed", "5"]
    more = ["--case", name, "--dtype", dtype, "--ways", "eager,backend", "--json", str(path)]
    assert main(["bench", *shared, *more]) == 0
    rows = results.load_rows(path)
    assert [row["implementation"] for row in rows] == ["eager", "kgopt_backend"]
    for row in rows:
        assert (row["case"], row["dtype"]) == (name, dtype)
        times = [found["us"] for found in row["operators"]]
        assert times == sorted(times, reverse=True)
        assert sum(times) == pytest.approx(row["total_us"], abs=1)
        assert any("convolution" in found["operator"] and "[" in found["shapes"] for found in row["operators"])
    text = capsys.readouterr().out
    assert f"{name} {dtype} eager" in text
    assert "operator" in text


def test_a_profile_of_a_way_that_fails(monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(case, "prepare", fails)
    args = ["--suite", "zoo", "--profile", "--device", "cpu", "--quick", "--count", "3", "--seed", "5"]
    assert main(["bench", *args, "--case", DRAWN[0].name, "--dtype", DRAWN[0].precisions[0], "--ways", "eager"]) == 1
    assert "no such kernel" in capsys.readouterr().out
