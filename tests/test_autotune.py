"""KGOPT_AUTOTUNE=1: what is measured, where it is kept, and that a later process reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kgopt import _autotune


def run(code: str, folder: Path, **more: str) -> str:
    environment = {**os.environ, "KGOPT_AUTOTUNE": "1", "XDG_CACHE_HOME": str(folder), **more}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cache_prefix_follows_xdg_and_names_versions(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prefix = _autotune.cache_prefix()
    assert Path(prefix).parent == tmp_path / "kgopt"
    assert torch.__version__ in prefix
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Path(_autotune.cache_prefix()).parent == Path.home() / ".cache/kgopt"


def test_folder_is_made_only_when_asked_for(tmp_path):
    run("import kgopt", tmp_path, KGOPT_AUTOTUNE="0")
    assert not list(tmp_path.iterdir())
    run("import kgopt", tmp_path)
    assert (tmp_path / "kgopt").is_dir()


def test_forget_clears_the_files_and_tells_the_extension(tmp_path):
    """``kgopt.forget()`` left what autotuning had measured, in the process and on disk."""
    code = """
import kgopt
from kgopt import _autotune
ours, others = _autotune.cache_prefix() + "-GPU.txt", _autotune.cache_folder() + "/conv-torch1.txt"
for path in (ours, others):
    open(path, "w").close()
kgopt.forget()
import os
print(os.path.exists(ours), os.path.exists(others))
"""
    assert run(code, tmp_path).split() == ["False", "True"]
    (tmp_path / "kgopt").mkdir(exist_ok=True)
    assert run(code.replace("kgopt.forget()", "kgopt.forget(); kgopt.forget()"), tmp_path).split() == ["False", "True"]
    assert run(code, tmp_path, KGOPT_AUTOTUNE="0").split() == ["True", "True"]


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "kgopt").write_text("a file")
    run("import kgopt", tmp_path)


_MEASURE = """
import torch, kgopt
x, weight = torch.randn(2, 8, 24, 40, device="cuda"), torch.randn(16, 8, 3, 3, device="cuda")
def explain(x):
    return torch.ops.kgopt.explain_conv(x, weight, [1, 1], [1, 1], [1, 1], [0, 0], 1, False)
def conv(x):
    return torch.ops.kgopt.conv2d(x, weight, None, [1, 1], [1, 1])
print("before:", explain(x))
y = conv(x)
print("after:", explain(x))
torch.testing.assert_close(y, torch.nn.functional.conv2d(x, weight, padding=1), rtol=1e-2, atol=5e-2)
assert torch.equal(conv(x), y)
other = x[:1].contiguous()
torch.ops.kgopt.conv2d(other, weight, None, [1, 1], [1, 1], backend="aten")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = conv(other)
graph.replay()
torch.cuda.synchronize()
print("captured:", explain(other))
torch.testing.assert_close(captured, y[:1], rtol=1e-2, atol=5e-2)
"""


@pytest.mark.gpu
def test_a_path_is_measured_once_and_kept(tmp_path):
    lines = dict(line.split(": ", 1) for line in run(_MEASURE, tmp_path).splitlines())
    assert "measured here" not in lines["before"]
    assert "measured here" in lines["after"]
    assert "measured here" not in lines["captured"]
    (path,) = (tmp_path / "kgopt").iterdir()
    head, row = path.read_text().splitlines()
    assert head == "kgopt convolutions 1"
    name = row.split()[-1]
    # Another process takes what is in the file, whatever it says; a line that is none is passed over.
    other = "aten" if name != "aten" else "implicit_gemm"
    path.write_text(f"{head}\n1 2 three\n{row.removesuffix(name)}{other}\n")
    lines = dict(line.split(": ", 1) for line in run(_MEASURE, tmp_path).splitlines())
    assert ("cuDNN" if other == "aten" else "implicit GEMM") in lines["before"].split("measured here")[1]
    assert path.read_text().splitlines()[-1].split()[-1] == other


@pytest.mark.gpu
def test_what_was_forgotten_is_measured_anew(tmp_path):
    code = _MEASURE + "\nkgopt.forget()\nprint('forgotten:', explain(x))\nconv(x)\nprint('again:', explain(x))\n"
    lines = dict(line.split(": ", 1) for line in run(code, tmp_path).splitlines())
    assert "measured here" in lines["after"]
    assert "measured here" not in lines["forgotten"]
    assert "measured here" in lines["again"]


_MEASURE_GRADIENTS = """
import torch, kgopt
last = torch.channels_last
x = torch.randn(2, 32, 24, 40, device="cuda").to(memory_format=last)
weight, dy = torch.randn(32, 32, 3, 3, device="cuda").to(memory_format=last), torch.randn_like(x)
geometry = [1, 1], [1, 1], [1, 1], [0, 0], 1, False
def explain():
    return torch.ops.kgopt.explain_conv(x, weight, *geometry, "backward")
def gradients(**options):
    return torch.ops.kgopt.conv_backward(dy, x, weight, *geometry, [True, True, True], **options)
print("before:", explain())
ours = gradients()
print("after:", explain())
for a, b, again in zip(ours, gradients(backend="aten"), gradients(), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-1)
    assert torch.equal(a, again)
"""


@pytest.mark.gpu
def test_paths_of_gradients_are_measured_and_kept(tmp_path):
    lines = dict(line.split(": ", 1) for line in run(_MEASURE_GRADIENTS, tmp_path).splitlines())
    assert "measured here" not in lines["before"]
    assert lines["after"].count("measured here") == 2
    (path,) = (tmp_path / "kgopt").iterdir()
    assert len(path.read_text().splitlines()) == 3
    lines = dict(line.split(": ", 1) for line in run(_MEASURE_GRADIENTS, tmp_path).splitlines())
    assert lines["before"].count("measured here") == 2
