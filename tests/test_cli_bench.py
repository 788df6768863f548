"""The command `bench`: its suites run small on the CPU, in shards, in jobs, stopped and resumed."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from bench_rows import FACTS
from kgopt.cli import bench, build_parser, cases, chains, convs, jobs, main, measure, models, results, sweep
from kgopt.cli.floor import Ceilings
from kgopt.cli.run_case import measure_case
from kgopt.cli.runner import Compiled, Settings

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quick_bench")


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
        jobs.run_jobs(args, 2, Ceilings(1e9, {}, None), {"device": "cpu"}, [], bench.measure_suite)


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

    case = dataclasses.replace(case, kgopt=lambda model: cases.Chain(broken))
    settings = Settings(CPU, quick=True, compile=False, rep_ms=1, input_sets=1)
    rows = measure_case(case, "fp32", "forward", settings, Ceilings(1e10, {"fp32": 1e11}), FACTS)
    assert [row.get("failed") for row in rows] == [None, "RuntimeError: first line"]
