"""The examples run, and the tables of README are drawn from the results."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench_rows import bench_row, bench_rows
from kgopt.cli import results

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("quick_bench")


def run_script(monkeypatch, script: Path, *arguments: object) -> int:
    """The exit status of a script run in this process, which has imported torch."""
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(script), run_name="__main__")
    return exit_info.value.code or 0


def copy_pages(folder: Path) -> None:
    (folder / "docs").mkdir()
    for page in ("README.md", "docs/benchmarks.md"):
        (folder / page).write_text((ROOT / page).read_text())


def test_readme_table(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    script = ROOT / "benchmarks" / "readme_table.py"
    copy_pages(tmp_path)
    results.save_rows(tmp_path / "results" / "h200.json", bench_rows())

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
    copy_pages(tmp_path)
    times = {"eager": 57e3, "eager_channels_last": 66e3, "compile": 12e3, "kgopt": 10e3, "kgopt_compile": 9e3}
    rows = [bench_row(name, time, suite="models", dtype="bf16", shape=[1, 4, 8]) for name, time in times.items()]
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


def test_training_example(tmp_path):
    pytest.importorskip("dynamic_network_architectures")
    curves = tmp_path / "curves.json"
    command = [sys.executable, str(ROOT / "examples" / "train_nnunet.py"), "--device", "cpu", "--steps", "6"]
    command += ["--size", "16", "--features", "4,8", "--seeds", "0,1", "--json", str(curves)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads(curves.read_text())["runs"]
    assert [(run["way"], run["seed"]) for run in runs] == [("eager", 0), ("kgopt", 0), ("eager", 1), ("kgopt", 1)]
    assert all(len(run["losses"]) == 6 and run["losses"][-1] < run["losses"][0] for run in runs)
    assert abs(runs[0]["losses"][0] - runs[1]["losses"][0]) < 0.01, "the same weights and volumes"


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
