"""A bench's rows: kept, read again, grouped, drawn."""

from __future__ import annotations

import pytest

from bench_rows import bench_row, bench_rows
from kgopt.cli import convs, main, results
from kgopt.cli.tables import bench_table
from kgopt.cli.tables import notes_of as bench_notes

pytestmark = pytest.mark.usefixtures("quick_bench")


def test_a_plain_model_that_optimize_leaves_slower_than_the_module_is_told():
    """kgopt.optimize took 383 us for the third pipeline where the module took 149, and no bench showed it."""
    rows = [bench_row("kgopt", 149.0), bench_row("kgopt_optimize", 383.0, layout_chosen="channels_last: 0.38 ms")]
    groups = results.group_rows(rows)
    assert groups[0].optimize_over_module == pytest.approx(2.57, abs=0.01)
    text = bench_table(groups)
    assert "optimize" in text
    assert "383" in text
    (note,) = bench_notes(groups)
    assert "2.57 times the module's (channels_last: 0.38 ms)" in note
    assert bench_notes(results.group_rows([bench_row("kgopt", 149.0), bench_row("kgopt_optimize", 154.0)])) == []
    assert bench_notes(results.group_rows([bench_row("kgopt", 149.0)])) == []


def test_rows_round_trip(tmp_path):
    path = tmp_path / "new folder" / "rows.json"
    results.save_rows(path, bench_rows())
    assert results.load_rows(path) == bench_rows()
    assert len(path.read_text().splitlines()) == len(bench_rows()) + 5  # one row a line
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
    first, second = results.group_rows(bench_rows())
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
    later = bench_row("kgopt", 50.0, date="2026-02-01T00:00:00Z")
    group = results.group_rows([*bench_rows(), later])[0]
    assert group.time("kgopt") == 50.0
    assert group.time("eager") is None


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


@pytest.mark.parametrize("suite", ["pipelines", "groupnorm"])
def test_plots_are_reproducible(tmp_path, suite):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rows.json"
    results.save_rows(path, [{**row, "suite": suite} for row in bench_rows()])
    charts = []
    for name in ("a.png", "b.png"):
        assert main(["bench", "--from-json", str(path), "--plot", str(tmp_path / name)]) == 0
        charts.append((tmp_path / name).read_bytes())
    assert charts[0] == charts[1]
    assert main(["bench", "--from-json", str(path), "--plot", str(tmp_path / "c.png"), "--plot-dtype", "bf16"]) == 2


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
