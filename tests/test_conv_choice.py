"""The table of measured convolutions, and what is chosen by it, through the developer module kgopt_dev."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path

import pytest

from kgopt.cli.results import load_rows

dev = pytest.importorskip("kgopt_dev", reason="the developer module is not built: make dev-module")

ROOT = Path(__file__).resolve().parent.parent
ROWS = load_rows(ROOT / "benchmarks/results/h200_conv_table.json")
PATHS = ("aten", "implicit_gemm", "tap_columns", "position_rows", "few_channels")


def problem(row, **changes):
    """The convolution of a row."""
    planar, size = row["layout"] == "contiguous", 2 if row["precision"] == "bf16" else 4
    arguments = {
        "n": row["n"],
        "c_in": row["c_in"],
        "c_out": row["c_out"],
        "groups": row["groups"],
        "input": tuple(row["in"]),
        "output": tuple(row["out"]),
        **{key: tuple(row[key]) for key in ("kernel", "stride", "padding", "dilation")},
        "transposed": row["transposed"],
        "dtype": "bfloat16" if size == 2 else "float32",
        "allow_tf32": row["precision"] != "fp32",
        "channels_innermost": not planar and row["c_in"] * size % 16 == 0,
        "planar": planar,
    }
    return dev.ConvProblem(**{**arguments, **changes})


def test_the_table_is_written_from_its_measurements(tmp_path, monkeypatch):
    written = tmp_path / "rows.inc"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["conv_table.py", "header", "--out", str(written)])
    runpy.run_path("benchmarks/conv_table.py", run_name="__main__")
    assert written.read_text() == (ROOT / "csrc/conv3d/choice/measured_rows.inc").read_text()


def held_out(row):
    """What each path is predicted and estimated to take without the row's own measurement and those of its like.

    Which rows are left out is a matter of shapes alone: all that are less than 1 apart, by half the channels for one.
    """
    q = problem(row)
    predicted = dev.predict_conv(q)
    estimated = dev.estimate_conv(q, predicted, least=1)
    return dict(zip(PATHS, predicted, strict=True)), dict(zip(PATHS, estimated, strict=True))


def fastest(q, times):
    """The path that is taken by these times; a path of 0 cannot run, or nothing near was measured."""
    own = {path: us for path, us in times.items() if us > 0 and path != "aten"}
    best = min(own, key=own.__getitem__, default="aten")
    return best if best != "aten" and own[best] < dev.own_margin(q) * times["aten"] else "aten"


def test_held_out_choices_are_made_as_all_are():
    """With every row in, the tests' rule chooses what the op does."""
    for row in ROWS[::5]:
        q = problem(row)
        choice = dev.choose_conv(q)
        if "output padding" not in choice.reason:
            estimated = dev.estimate_conv(q, dev.predict_conv(q), least=0)
            assert choice.path.name == fastest(q, dict(zip(PATHS, estimated, strict=True)))


def judged(rows):
    """How many rows take an own kernel without their own measurement, which of them are slower for it, how many were
    worth one and how many of those do not take it, and the time of all over cuDNN's.
    """
    taken, slower, worth, missed, logs = 0, [], 0, 0, 0.0
    for row in rows:
        us = row["us"]
        path = fastest(problem(row), held_out(row)[1])
        ratio = us[path] / us["aten"]  # a path that cannot run is never taken
        taken += path != "aten"
        slower += [(row["name"], path, ratio)] if ratio > 1 else []
        worth += min(us.values()) < 0.8 * us["aten"]
        missed += path == "aten" and min(us.values()) < 0.8 * us["aten"]
        logs += math.log(ratio)
    return taken, slower, worth, missed, math.exp(logs / len(rows))


def test_choices_without_the_own_measurement():
    """Of 815 convolutions 190 took an own kernel, none of them slower than cuDNN; 182 of the 281 that were worth it.

    Thresholds leave room for new rows, not for a choice that knows no more than its own row.
    """
    taken, slower, worth, missed, all_time = judged([row for row in ROWS if row["groups"] == 1])
    assert taken > 150
    assert len(slower) <= 0.02 * taken, slower
    assert all(ratio < 1.3 for _, _, ratio in slower), slower
    assert missed <= 0.4 * worth
    assert all_time < 0.87  # 0.78 if the fastest were always taken


def test_choices_of_several_groups_without_the_own_measurement():
    """Of 296 convolutions 40 took an own kernel, none of them slower; 38 of the 175 that were worth it. cuDNN's time is
    erratic there, so a neighbour must be nearer and the kernel clearly faster.
    """
    taken, slower, _, _, all_time = judged([row for row in ROWS if row["groups"] > 1])
    assert taken > 30
    assert len(slower) <= 0.05 * taken, slower
    assert all(ratio < 1.3 for _, _, ratio in slower), slower
    assert all_time < 0.9


def test_own_kernels_without_the_own_measurement():
    """Among the extension's kernels, the one that is taken is the fastest or nearly so."""
    ratios = []
    for row in ROWS:
        own = {path: us for path, us in row["us"].items() if path != "aten"}
        if own:
            predicted, estimated = held_out(row)
            path = min(own, key=lambda name: estimated[name] or predicted[name])
            ratios.append(own[path] / min(own.values()))
    assert sum(ratio <= 1.3 for ratio in ratios) >= 0.95 * len(ratios)
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.03


def test_what_was_measured_is_not_slower_than_cudnn():
    """A convolution of the table takes what its own row says."""
    slower = []
    for row in ROWS:
        path = dev.choose_conv(problem(row)).path.name
        if row["us"].get(path, float("inf")) > row["us"]["aten"]:
            slower.append((row["name"], path))
    assert not slower


def test_what_was_measured_to_be_much_faster_is_taken():
    missed = total = 0
    for row in ROWS:
        if min(row["us"].values()) < 0.8 * row["us"]["aten"]:
            total += 1
            missed += dev.choose_conv(problem(row)).path.name == "aten"
    assert total > 20
    assert missed <= 0.1 * total


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16"])
def test_an_own_kernel_is_the_fastest_of_them(precision, layout):
    """Of the rows that have its time: a few are older than the kernel that would be taken now."""
    rows = [row for row in ROWS if (row["precision"], row["layout"]) == (precision, layout)]
    judged = 0
    for row in rows:
        path = dev.choose_conv(problem(row), backend=dev.ConvBackend.kgopt).path.name
        own = {name: us for name, us in row["us"].items() if name != "aten"}
        if path == "direct":
            assert not own
        elif path in own:
            assert own[path] <= 1.3 * min(own.values()), row["name"]
        judged += path == "direct" or path in own
    assert judged > 0.97 * len(rows)


def test_predictions_are_there_for_what_can_run():
    for row in ROWS:
        predicted = dict(zip(PATHS, dev.predict_conv(problem(row)), strict=True))
        assert {name for name, us in predicted.items() if us > 0} >= set(row["us"])
        assert all(0.05 < us / predicted[name] < 50 for name, us in row["us"].items())


def test_far_from_every_row_cudnn_is_taken():
    row = next(row for row in ROWS if row["groups"] == 1 and not row["transposed"])
    sizes = {"c_in": 65536, "c_out": 65536, "input": (1, 1, 1), "output": (1, 1, 1), "kernel": (1, 1, 1)}
    unit = {"padding": (0, 0, 0), "stride": (1, 1, 1), "dilation": (1, 1, 1)}
    choice = dev.choose_conv(problem(row, **sizes, **unit))
    assert choice.path.name == "aten"
    assert "far from every measured" in choice.reason


@pytest.mark.parametrize(
    ("n", "c_in", "c_out", "groups", "size", "kernel", "padding", "path"),
    [
        (3, 8, 8, 1, (60, 89, 79), 1, 0, "implicit_gemm"),
        (7, 24, 24, 1, (23, 17, 22), 3, 3, "implicit_gemm"),
        (1, 100, 100, 50, (11, 11, 14), 5, 4, "implicit_gemm"),
        (1, 100, 100, 100, (11, 11, 14), 5, 4, "depthwise"),
        (4, 160, 84, 1, (3, 2, 2), 5, 4, "aten"),  # sums that are long for a block, few positions
    ],
)
def test_an_output_padding_that_cudnn_lacks(n, c_in, c_out, groups, size, kernel, padding, path):
    output = tuple(s - 2 * padding + 3 * (kernel - 1) + 1 for s in size)
    row = next(row for row in ROWS if row["transposed"] and row["layout"] == "channels_last")
    changes = {
        "n": n, "c_in": c_in, "c_out": c_out, "groups": groups, "input": size, "output": output,
        "kernel": (kernel,) * 3, "stride": (1, 1, 1), "padding": (padding,) * 3, "dilation": (3, 3, 3),
    }  # fmt: skip
    choice = dev.choose_conv(problem(row, **changes))
    assert choice.path.name == path
    if path == "depthwise":  # which has kernels of its own, with dilation, too
        return
    assert "output padding" in choice.reason
    # One less, and cuDNN has it.
    plain = dev.choose_conv(problem(row, **{**changes, "output": tuple(o - 1 for o in output)}))
    assert "output padding" not in plain.reason


def test_one_value_a_sample_does_not_go_to_cudnn():
    """PyTorch keeps cuDNN's plan of a transposed convolution by the layout of its result, which one value a sample does
    not have: the plan of a contiguous x read one in channels_last, and the result was wrong by more than its size.
    """
    row = next(row for row in ROWS if row["transposed"] and row["groups"] == 1)
    changes = {
        "n": 3, "c_in": 64, "c_out": 1, "input": (1, 1, 6), "output": (1, 1, 1), "kernel": (1, 1, 2),
        "stride": (1, 1, 1), "padding": (0, 0, 3), "dilation": (1, 1, 1),
    }  # fmt: skip
    assert dev.choose_conv(problem(row, **changes)).path.name == "direct"
    more = changes | {"c_out": 2}
    assert dev.choose_conv(problem(row, **more)).path.name != "direct"


def test_few_channels_take_their_kernel_where_it_was_measured_to_be_fastest():
    """It once stood in for the implicit GEMM alone, and cuDNN was taken where only it was faster than cuDNN."""
    won = [
        row
        for row in ROWS
        if row["us"].get("few_channels", 1e9) < 0.8 * min(us for p, us in row["us"].items() if p != "few_channels")
    ]
    assert len(won) > 10
    taken = [dev.choose_conv(problem(row)).path.name == "few_channels" for row in won]
    assert sum(taken) >= 0.9 * len(taken)
    # And between rows: the third pipeline's convolution at another size.
    row = next(row for row in won if row["name"].startswith("conv2d 128x8x128x128 to 64 k3"))
    near = problem(row, n=64, input=(1, 120, 136), output=(1, 120, 136))
    assert dev.choose_conv(near).path.name == "few_channels"


def test_a_named_kernel_runs_or_says_why_not():
    few = next(row for row in ROWS if "few_channels" in row["us"] and row["c_in"] <= 8)
    assert dev.choose_conv(problem(few), backend=dev.ConvBackend.few_channels).path.name == "few_channels"
    assert dev.choose_conv(problem(few, planar=False), backend=dev.ConvBackend.few_channels).path.name == "few_channels"
    last = dev.choose_conv(problem(few, planar=False, c_in=16), backend=dev.ConvBackend.few_channels)
    assert last.explain() == "none: stores channels_last from at most 8 channels"
    row = next(row for row in ROWS if "position_rows" in row["us"] and "tap_columns" in row["us"])
    for name in ("implicit_gemm", "tap_columns", "position_rows"):
        assert dev.choose_conv(problem(row), backend=getattr(dev.ConvBackend, name)).path.name == name
    strided = problem(row, stride=(2, 2, 2), output=tuple((s + 1) // 2 for s in row["out"]))
    assert dev.choose_conv(strided, backend=dev.ConvBackend.position_rows).explain() == "none: stride above 1"
