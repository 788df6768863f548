"""The command line: help, info, refusals and the demo, run small on the CPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

from kgopt.cli import _optional, main, models

pytestmark = pytest.mark.usefixtures("quick_bench")


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
        (["fuzz", "--workers", "-1", "--device", "cpu"], "--workers is -1, expected at least 1"),  # it waited for none
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


def require_demo() -> None:
    for name in ("matplotlib", "nibabel"):
        pytest.importorskip(name)
    try:
        import skimage  # noqa: F401
    except ImportError:
        pytest.importorskip("sklearn")


def test_demo_quick(tmp_path, capsys):
    require_demo()
    chart = tmp_path / "demo.png"
    assert main(["demo", "--quick", "--device", "cpu", "--out", str(chart)]) == 0
    text = capsys.readouterr().out
    assert text.count(" ok\n") == 3
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_demo_fails_where_a_result_is_wrong(tmp_path, capsys, monkeypatch):
    require_demo()
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
    require_demo()
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
