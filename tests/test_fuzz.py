"""The search itself: it finds what is planted, in few cases; it survives what dies; it draws the same from a seed."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fuzz_faults
from kgopt.cli import main
from kgopt.fuzz.catalogue import TARGETS
from kgopt.fuzz.judge import Judged, verdict
from kgopt.fuzz.kinds import make_kind
from kgopt.fuzz.noise import Noise, NoisySteps
from kgopt.fuzz.pool import Result, Settings
from kgopt.fuzz.search import search, shrink
from kgopt.fuzz.worker import draw_case
from opcases import BEHIND_AUTOGRAD

OPS = make_kind("ops")


@pytest.fixture(autouse=True)
def short_shrinking(monkeypatch):
    """A test need not see the smallest form, only a small one."""
    monkeypatch.setattr("kgopt.fuzz.search._SHRINK_SECONDS", 15.0)


def found(fault, op, calls, **more):
    """The report of a short search for a planted fault."""
    settings = Settings("cpu", seed=1, only=(op,), prepare=fault, **more)
    return search([("ops", 1.0)], settings, workers=1, calls=calls)


PLANTED = {
    "one element off": (fuzz_faults.one_element_off, "group_norm", "wrong values"),
    "one unwritten element": (fuzz_faults.one_unwritten, "group_norm", "special values"),
    "scale error": (fuzz_faults.scale_error, "conv2d", "wrong values"),
    "scale error of a gradient": (fuzz_faults.gradient_scale_error, "conv3d", "wrong values"),
    "NaN dropped": (fuzz_faults.nan_dropped, "activation", "special values"),
    "refusal lost": (fuzz_faults.refusal_lost, "conv2d", "accepted"),
    "refusal": (fuzz_faults.refuses, "group_norm", "refused"),
    "other bits": (fuzz_faults.other_bits, "logsumexp", "other bits"),
    "input written": (fuzz_faults.writes_input, "activation", "changed input"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found_and_shrunk(name):
    fault, op, how = PLANTED[name]
    report = found(fault, op, 800 if name == "NaN dropped" else 200)
    alike = [f for f in report.findings if f.smallest_text.startswith(how)]
    assert alike, [f.smallest_text for f in report.findings]
    smallest = min(math.prod(f.smallest["tensors"]["x"]["shape"]) for f in alike)
    assert smallest <= 16
    compile(alike[0].source, "<finding>", "exec")


def test_death_is_a_finding_and_the_search_goes_on():
    report = found(fuzz_faults.dies, "group_norm", 120)
    assert report.cases == 120
    assert 0 < report.failed < 120
    (finding,) = [f for f in report.findings if "SIGFPE" in f.text]
    assert finding.text.startswith("the process died of SIGFPE; in: kgopt, forward")
    assert finding.smallest["tensors"]["x"]["shape"][1] in (5, 7, 11, 13)


def test_hang_is_a_finding_and_the_search_goes_on(monkeypatch):
    monkeypatch.setattr(type(OPS), "seconds", 3.0)
    monkeypatch.setattr("kgopt.fuzz.search._SHRINK_TRIES", 4)
    report = found(fuzz_faults.hangs, "mean", 25)
    assert report.cases == 25
    assert any(f.text.startswith("hang: no answer for") and "in: kgopt, forward" in f.text for f in report.findings)


def test_printed_program_runs_and_shows_the_fault(tmp_path):
    """A finding's program is complete: it runs by itself and prints both results."""
    case = draw_case(OPS, 3, 5, "cpu", ("group_norm",))
    program = tmp_path / "case.py"
    program.write_text(OPS.source(case, "cpu"))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tensor(" in done.stdout


def test_same_cases_whatever_the_number_of_workers():
    reports = [search([("ops", 1.0)], Settings("cpu", seed=5, only=("mean",)), workers=w, calls=40) for w in (1, 2)]
    assert reports[0].counts == reports[1].counts
    assert reports[0].cases == 40


def test_case_follows_from_seed_and_number():
    cases = [draw_case(OPS, 11, 7, "cpu", ()) for _ in range(2)]
    assert cases[0] == cases[1]
    assert cases[0] == json.loads(json.dumps(cases[0]))
    assert draw_case(OPS, 11, 8, "cpu", ()) != cases[0]


def test_every_op_is_drawn():
    """A new op needs a target of its own: the search would never call it."""
    ops = {
        n.removeprefix("kgopt::").split(".")[0]
        for n in torch._C._dispatch_get_all_op_names()
        if n.startswith("kgopt::")
    }
    functions = {"group_norm_scale_shift"}  # without an op of their own
    # On CUDA alone; the gradients of pipelines, which are drawn, call them.
    made = {"conv_group_norm_lse_gradients", "conv_group_norm_mean_gradients"}
    # Of graphs that are compiled for training: in float32 alone, as near as TF32 (tests/test_scaled_half_training.py).
    inside = made | set(BEHIND_AUTOGRAD) | {"group_norm_tanh_hardswish_residual_logsumexp_backward_"}
    assert {o for o in ops - inside if not o.startswith(("explain_", "build_info"))} | functions == set(TARGETS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_smaller_cases_differ_and_can_be_written(device):
    """Every candidate is another case, and its program is Python; for each op, in what it draws for either device."""
    for name in TARGETS:
        case = OPS.draw(random.Random(f"{name}:{device}"), device, (name,))
        assert case["op"] == name
        for smaller in OPS.smaller(case):
            assert smaller != case
            compile(TARGETS[name].ours(smaller), "<ours>", "eval")
            compile(TARGETS[name].theirs(smaller), "<theirs>", "eval")


def test_chains_of_smaller_cases_end():
    """Shrinking a case of which all smaller ones fail, too, comes to an end by itself."""

    for i, name in enumerate(TARGETS):
        case = draw_case(OPS, 2, i, "cpu", (name,))
        steps = []

        def failed(candidate, steps=steps):
            steps.append(candidate)
            return Result(None, "finding", "wrong values: x", {}, 0.0)

        smallest, _ = shrink(case, "wrong values: y", failed, OPS.smaller)
        assert len(steps) < 400, name
        assert not list(OPS.smaller(smallest)), name


def judged(ours, theirs, exact, precision="float32"):
    return Judged("y", torch.tensor(ours), torch.tensor(theirs), torch.tensor(exact, dtype=torch.float64), precision)


def test_verdict_takes_the_place_of_nan_from_pytorch():
    nan, inf = math.nan, math.inf
    assert verdict(judged([nan, 1.0], [nan, 1.0], [nan, 1.0]), list) is None
    assert "special" in verdict(judged([0.0, 1.0], [nan, 1.0], [nan, 1.0]), list)
    assert "special" in verdict(judged([nan, 1.0], [2.0, 1.0], [2.0, 1.0]), list)
    assert "special" in verdict(judged([inf, 1.0], [-inf, 1.0], [-inf, 1.0]), list)


def test_verdict_allows_twice_pytorchs_error_and_no_more():
    exact = [1.0] * 4
    assert verdict(judged([1.0, 1.0, 1.0, 1.0001], [1.0, 1.0, 1.0, 1.0001], exact), list) is None
    assert "wrong values" in verdict(judged([1.0, 1.0, 1.0, 1.0003], [1.0, 1.0, 1.0, 1.0001], exact), list)


@pytest.mark.parametrize("groups", [1, 2])
def test_nan_where_a_transposed_convolution_meets_zeros(groups, monkeypatch):
    """A kernel that collects what an output gets multiplies a NaN at a tap beyond x by zero: no fault, but in its
    channel alone."""
    lies, everywhere = {"dtype": "float32", "layout": "contiguous"}, []

    def collects(x, weight, bias, stride, padding, output_padding, groups, dilation):
        parts = weight.flip(2, 3).unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        y = torch.nn.functional.conv2d(torch.nn.functional.pad(x, (2, 2, 2, 2)), parts, bias, groups=groups)
        return y.fill_(math.nan) if everywhere else y

    monkeypatch.setattr("kgopt.functional.conv_transpose2d", collects)
    case = {
        **{"kind": "ops", "op": "conv_transpose2d", "via": "functional", "dtype": "float32", "seed": 3, "grad": []},
        "tensors": {
            "x": {"shape": [2, 4, 5, 6], "values": "normal", **lies},
            "weight": {"shape": [4, 6 // groups, 3, 3], "values": "nan", **lies},
        },
        "args": {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": groups, "output_padding": [0, 0]},
        **{"dy": {"values": "normal", "layout": "contiguous"}, "tf32": False, "autocast": None, "bad": None},
        **{"deterministic": False, "poison": False},
    }
    assert OPS.check(case, "cpu") is None
    everywhere.append("also in other channels")
    assert OPS.check(case, "cpu").startswith("special values")


def test_nan_beyond_x_in_gradients_behind_a_norm(monkeypatch):
    """Of such a convolution: its NaN is the group's, and of the gradients that go through the norm."""
    lies = {"dtype": "float32", "layout": "contiguous"}

    def collects(x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding, *_):
        y = torch.nn.functional.conv_transpose3d(x, weight, bias, stride, padding)
        y = y + math.nan  # at every output some tap that is NaN, on x or beyond
        return torch.nn.functional.group_norm(y.relu(), num_groups, gn_weight, gn_bias)

    monkeypatch.setattr("kgopt.functional.conv_transpose3d_relu_group_norm", collects)
    case = {
        **{"kind": "ops", "op": "conv_transpose3d_relu_group_norm", "via": "functional", "dtype": "float32"},
        "seed": 2096546319,
        "tensors": {
            "x": {"shape": [1, 1, 1, 1, 1], "values": "normal", **lies},
            "weight": {"shape": [1, 1, 1, 3, 2], "values": "nan", **lies},
        },
        "args": {
            **{"stride": [1, 1, 1], "padding": [0, 1, 0], "dilation": [1, 1, 1], "groups": 1},
            **{"output_padding": [0, 0, 0], "num_groups": 1, "eps": 1e-05},
        },
        **{"grad": ["x", "weight"], "dy": {"values": "normal", "layout": "contiguous"}, "tf32": False},
        **{"autocast": None, "bad": None, "deterministic": False, "poison": False},
    }
    assert OPS.check(case, "cpu") is None


def test_volumes_whose_gradients_onednn_writes_elsewhere_are_not_differentiated():
    """float32, a stride in depth, a kernel deeper than x: PyTorch alone dies of it."""
    drawn = (draw_case(OPS, 1, i, "cpu", ("conv3d", "conv_transpose3d")) for i in range(400))
    strided = [c for c in drawn if c["dtype"] == "float32" and c["args"]["stride"][0] > 1]
    deep = [c for c in strided if c["tensors"]["x"]["shape"][-3] < c["tensors"]["weight"]["shape"][2]]
    assert any(c["grad"] for c in strided)
    assert len(deep) > 5
    assert not any(c["grad"] for c in deep)


def test_noise_knows_what_cancels():
    """Of a group of two values hardly anything is left of dx: noise says how much rounding leaves, float64 does not."""
    x = torch.tensor([[[1.0, 2.0]]], dtype=torch.float64, requires_grad=True)
    dy = torch.tensor([[[0.3, -0.7]]], dtype=torch.float64)
    (exact,) = torch.autograd.grad(torch.nn.functional.group_norm(x, 1), x, dy)
    away = []
    for seed in range(8):
        with NoisySteps(Noise.of("float32", False, seed), torch.device("cpu")):
            y = torch.nn.functional.group_norm(x, 1)
        away.append(float((torch.autograd.grad(y, x, dy)[0] - exact).abs().max()))
    assert 1e-9 < max(away) < 1e-5


def test_noise_knows_what_a_mean_of_large_values_leaves():
    """A group's gradients have the sum zero. PyTorch's formula leaves what the mean is off by, of normalized values."""
    x = torch.tensor([[[1000.0, 1000.3, 999.9, 1000.1]]], dtype=torch.float64, requires_grad=True)
    dy = torch.tensor([[[0.3, -0.7, 0.4, 1.1]]], dtype=torch.float64)
    sums = []
    for seed in range(8):
        with NoisySteps(Noise.of("float32", False, seed), torch.device("cpu")):
            y = torch.nn.functional.group_norm(x, 1, eps=0.1)
        sums.append(float(torch.autograd.grad(y, x, dy)[0].sum().abs()))
    assert 1e-4 < max(sums) < 1e-2


def test_noise_knows_constant_tensors():
    """Bug: of a convolution of constants, each of whose values noise had rounded its own way, the variance was no
    longer zero, and a gradient times 1 / sqrt(eps) counted as wrong for the rounding of its operands.
    """
    x = torch.full((1, 1, 343, 1), -0.94, dtype=torch.float64, requires_grad=True)
    weight = torch.full((7, 1, 343, 1), 0.94, dtype=torch.float64)
    gamma = torch.tensor([-1.7, -0.47, 1.3, 0.03, -1.27, -0.02, 1.4], dtype=torch.float64)
    away = []
    for seed in range(12):
        with NoisySteps(Noise.of("bfloat16", False, seed), torch.device("cpu")):
            z = torch.nn.functional.group_norm(torch.conv2d(x, weight), 1, gamma)
        (dx,) = torch.autograd.grad(z.sum(), x)
        away.append(float(dx.abs().max()))
    # Zero but for rounding: 1 / sqrt(eps) times bfloat16's of seven values near 1.
    assert 0.1 < max(away) < 10


def test_case_on_the_command_line(capsys):
    case = draw_case(OPS, 3, 5, "cpu", ("group_norm",))
    assert main(["fuzz", "--device", "cpu", "--case", json.dumps(case)]) == 0
    printed = capsys.readouterr().out
    assert "group_norm" in printed
    assert "1 cases" in printed
    assert "torch.randn" in printed


def test_json_of_a_run(tmp_path, capsys):
    out = tmp_path / "fuzz.json"
    assert main(["fuzz", "--device", "cpu", "--op", "mean", "--calls", "20", "--seed", "4", "--workers", "1",
                 "--json", str(out)]) == 0  # fmt: skip
    report = json.loads(out.read_text())
    assert report["seed"] == 4
    assert report["cases"] == sum(report["counts"]["mean"].values()) == 20
    assert report["findings"] == []
    assert report["environment"]["torch"] == torch.__version__
    assert "seed 4: 20 cases" in capsys.readouterr().out


def test_findings_are_kept_as_they_come():
    """A run on a GPU lost 23 findings to its time limit: their texts were written after all had been made smaller."""
    kept = []

    def keep(report):
        kept.append([(f.case, f.text, f.source, f.shrunk) for f in report.findings])

    settings = Settings("cpu", seed=1, only=("group_norm",), prepare=fuzz_faults.one_element_off)
    report = search([("ops", 1.0)], settings, workers=1, calls=60, keep=keep)
    drawn = [findings for findings in kept if findings and not any(f[3] for f in findings)]
    assert len(drawn[0]) <= len(drawn[-1]) == len(report.findings)
    case, text, source, _ = drawn[0][0]
    assert case in [draw_case(OPS, 1, f.index, "cpu", ("group_norm",)) for f in report.findings]
    assert text.startswith(("wrong values", "wrong strides"))  # the planted fault makes a new tensor
    compile(source, "<finding>", "exec")
    assert any(f[3] for f in kept[-1])


def test_time_for_smaller_forms_is_bounded():
    settings = Settings("cpu", seed=1, only=("group_norm",), prepare=fuzz_faults.one_element_off)
    report = search([("ops", 1.0)], settings, workers=1, calls=60, shrink_seconds=0)
    assert report.findings
    for finding in report.findings:
        assert not finding.shrunk
        assert finding.smallest == finding.case
        assert "torch" in finding.source


def test_interrupted_search_returns_what_it_has():
    """``make gpu-check`` interrupts it at its time limit."""

    def interrupt(report):
        if report.findings:
            raise KeyboardInterrupt

    settings = Settings("cpu", seed=1, only=("group_norm",), prepare=fuzz_faults.one_element_off)
    report = search([("ops", 1.0)], settings, workers=1, calls=100000, keep=interrupt)
    assert 0 < len(report.findings) <= report.cases < 1000


_ONE_DEEP = """
import fuzz_faults
from kgopt.fuzz.pool import Job, Settings, Worker
worker = Worker(0, Settings("cpu", prepare=fuzz_faults.unless_bf16_is_right))
print(worker.answer(Job("ops", 0, 60.0)).text)
worker.close()
"""


def test_workers_go_without_instructions_for_bf16():
    """With them PyTorch's convolutions are wrong for some volumes; CI failed of it on one of its machines."""
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", _ONE_DEEP], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_parts_of_a_run_are_the_run():
    """Two parts of a seed check what one run of it checks; of two kinds each gets the cases that it would have had."""
    kinds = [("ops", 60.0), ("networks", 1.0)]
    settings = Settings("cpu", seed=5, only=("mean", "network_eager"))
    whole = search(kinds, settings, workers=2, calls=70)
    parts = [search(kinds, settings, workers=2, calls=n, first=first) for first, n in ((0, 31), (31, 39))]
    assert [whole.next, parts[0].next, parts[1].next] == [70, 31, 70]
    summed = {}
    for part in parts:
        for op, row in part.counts.items():
            for dtype, n in row.items():
                summed.setdefault(op, {}).setdefault(dtype, 0)
                summed[op][dtype] += n
    assert summed == whole.counts
    assert set(summed) == {"mean", "network_eager"}


def test_json_is_there_when_the_search_is_killed(tmp_path):
    out = tmp_path / "fuzz.json"
    command = [sys.executable, "-m", "kgopt", "fuzz", "--device", "cpu", "--op", "mean", "--seconds", "600",
               "--seed", "4", "--workers", "1", "--json", str(out)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    report, deadline = {"cases": 0}, time.monotonic() + 120
    try:
        while report["cases"] == 0 and time.monotonic() < deadline:
            time.sleep(0.2)
            report = json.loads(out.read_text()) if out.exists() else report
    finally:
        process.kill()
        process.wait()
    report = json.loads(out.read_text())
    assert report["next"] == report["cases"] > 0
    assert report["findings"] == []


def test_unknown_op_is_refused(capsys):
    assert main(["fuzz", "--device", "cpu", "--op", "softmax", "--calls", "1"]) == 2
    assert "--op is 'softmax', expected one of: activation" in capsys.readouterr().err


def test_json_names_no_folder_of_the_machine():
    """A traceback of a finding named the folder of the environment in which the search had run."""
    from kgopt.cli.fuzz import without_machine

    assert without_machine(f'File \\"{torch.__file__}\\", line 1') == 'File \\"torch/__init__.py\\", line 1'
