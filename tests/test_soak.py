"""Memory over many calls: benchmarks/soak.py at a small size, that it finds a leak, and what a model remembers."""

from __future__ import annotations

import importlib.util
import json
import mmap
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import kgopt
from kgopt.rewrite import glue
from kgopt.rewrite.gradients import training
from kgopt.rewrite.measure import policy
from kgopt.rewrite.optimized import known
from kgopt.rewrite.source.syntax import code

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "soak.py"
SMALL = ("--device", "cpu", "--width", "4", "--largest", "8", "--calls", "150", "--warm", "50")


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_short_run_passes(tmp_path):
    path = tmp_path / "soak.json"
    run = subprocess.run([sys.executable, str(SCRIPT), *SMALL, "--json", str(path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.splitlines()[-1] == "passed: 150 calls, memory as it was"
    (pair,) = json.loads(path.read_text())["pairs"]
    assert pair["eager"]["calls"] == pair["optimized"]["calls"] == 150
    assert pair["optimized"]["host_before"] > 2**20


def test_a_leak_is_found(soak, monkeypatch):
    """1 MiB a call, over 40 calls, is far more than the slack; of the system's own memory, since a process that ran
    other tests may have as much to spare in its heap.
    """
    settings = soak.parse([*SMALL, "--warm", "20", "--calls", "60"])
    threads, forward, kept = torch.get_num_threads(), soak.Net.forward, []

    def leaking(self, x):
        kept.append(mmap.mmap(-1, 2**20))
        kept[-1].write(b"x" * 2**20)
        return forward(self, x)

    eager = soak.run(False, settings, 0)
    monkeypatch.setattr(soak.Net, "forward", leaking)
    found = soak.judge(eager, soak.run(False, settings, 0), settings.slack)
    torch.set_num_threads(threads)
    assert len(found) == 1
    assert found[0].startswith("host memory grew by")


def test_the_verdict(soak):
    def after(device, host):
        return {"device_before": 2**20, "device_after": device, "host_before": 2**30, "host_after": 2**30 + host}

    same = after(2**20, 2**20)
    assert soak.judge(same, same, 5) == []
    assert soak.judge(same, after(2**20, 5 * 2**20), 5) == []
    assert soak.judge(same, after(2**20, 7 * 2**20), 5) == ["host memory grew by 7.0 MiB, eager's by 1.0"]
    # Memory that eager gave back is no reason to ask more of ours.
    assert soak.judge(after(2**20, -(2**24)), after(2**20, 4 * 2**20), 5) == []
    assert soak.judge(same, after(2**21, 0), 5) == ["device memory changed by +1.00 MiB"]


def test_what_a_model_remembers_of_shapes_is_bounded(soak, device):
    torch.manual_seed(0)
    model = kgopt.optimize(soak.Net(8).to(device), torch.randn(1, 3, 8, 8, device=device), channels_last=False)
    for size in range(4, 4 + 2 * (glue.PLANS + 10), 2):
        x = torch.randn(1, 3, 4, size, device=device)
        with torch.no_grad():
            model(x)
        if size < 40:
            model(x).sum().backward()
    sizes = [len(s.results) for m in model.modules() if (s := known.get(m, "site")) is not None]
    assert sizes
    assert max(sizes) <= 3 * policy.SHAPES  # of a norm, each of its chains
    for module in glue.modules_of(model):
        assert len(glue.state_of(module).plans) <= glue.PLANS
    for module in training.modules_of(model):
        assert len(training.state_of(module).ours) <= training.SHAPES


def test_what_is_kept_of_source_code_is_bounded(monkeypatch, tmp_path):
    """Trees of functions were kept for ever, also of classes that a program makes as it runs."""
    monkeypatch.setattr(code, "_PARSED", {})
    monkeypatch.setattr(code, "_PARSED_AT_MOST", 8)
    path = tmp_path / "many.py"
    path.write_text("".join(f"def f{i}(self):\n    return {i}\n" for i in range(20)))
    namespace: dict[str, types.FunctionType] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    for i in range(20):
        assert code.parse(namespace[f"f{i}"]).name == f"f{i}"
        assert len(code._PARSED) <= 8
