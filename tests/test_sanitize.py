"""What `make sanitize` runs: every op, and every family of GroupNorm kernels. Needs no GPU: calls are made on meta."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sanitize_ops
from opcases import BEHIND_AUTOGRAD, NAMES
from shapes import laid_out


class Recorder(TorchDispatchMode):
    """The names of kgopt's ops that are called, and the tensors and groups of the norms among them."""

    def __init__(self):
        super().__init__()
        self.names = set()
        self.norms = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "kgopt":
            name = func._schema.name.split("::")[1]
            self.names.add(name)
            if name in ("group_norm", "group_norm_fwd", "group_norm_backward"):
                backward = name.endswith("backward")
                x, groups = (args[1], args[4]) if backward else args[:2]
                last = (
                    x.dim() in (4, 5)
                    and not x.is_contiguous()
                    and x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
                )
                self.norms.add((tuple(x.shape), groups, x.dtype, last, backward))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def recorded():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sanitize_ops, "DEVICE", "meta")
        # Sizes are all that counts here, and large random numbers take their time.
        patch.setattr(sanitize_ops, "tensor", meta_tensor)
        recorder = Recorder()
        for section in sanitize_ops.SECTIONS.values():
            with recorder:
                section()
        yield recorder


def meta_tensor(*shape, dtype=torch.float32, channels_last=False):
    return laid_out(torch.empty(shape, dtype=dtype, device="meta"), "channels_last" if channels_last else "contiguous")


def test_every_op_is_sanitized(recorded):
    """Backward ops included: a new op is found here if sanitize_ops.py forgets it."""
    assert recorded.names == {*NAMES, *BEHIND_AUTOGRAD}


def test_every_section_runs_something(recorded):
    defined = {name.removesuffix("_cases") for name in vars(sanitize_ops) if name.endswith("_cases")}
    assert defined == set(sanitize_ops.SECTIONS)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_every_family_of_norm_kernels_is_sanitized(recorded, backward):
    """By the plans, as an H100 or H200 takes them."""
    dev = pytest.importorskip("kgopt_dev", reason="the developer module is not built: make dev-module")
    taken = set()
    for shape, groups, dtype, last, of_backward in recorded.norms:
        if of_backward == backward and 0 not in shape:
            positions = torch.Size(shape[2:]).numel()
            name = str(dtype).removeprefix("torch.")
            choice = dev.choose_group_norm(
                shape[0], shape[1], positions, groups, name, tensors=2 if backward else 1, channels_last=last
            )
            taken.add(choice["family"])
    # Rows take what columns would where a sample is large; backward has no columns.
    families = {"small", "cluster", "tiles", "rows", "slab", "passes", *([] if backward else ["columns"])}
    assert taken == families


_SANITIZER = """#!/bin/sh
# racecheck finds something in conv, initcheck in mean
case "$*" in
  *racecheck*--sections=conv*) echo "========= Error: Race reported in kgopt::kernel"; exit 1 ;;
  *initcheck*--sections=mean*) echo "========= Uninitialized"; echo "=========     at kgopt::kernel"; exit 0 ;;
esac
echo ok
"""


def test_sanitizer_prints_each_result_as_it_comes(tmp_path, monkeypatch, capsys):
    """A run that a time limit ended had said nothing of what was done by then."""
    script = Path(__file__).parent.parent / "scripts" / "sanitize.py"
    if not script.exists():
        pytest.skip("the scripts are not beside the tests")
    spec = importlib.util.spec_from_file_location("sanitize", script)
    sanitize = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sanitize)
    monkeypatch.setattr(sanitize, "ROOT", tmp_path)
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(_SANITIZER)
    fake.chmod(0o755)
    failed = sanitize.run_all(str(fake), ["racecheck", "initcheck"], ["conv", "mean"], jobs=3)
    assert sorted(failed) == ["initcheck mean", "racecheck conv"]
    printed = capsys.readouterr().out
    assert "racecheck conv: FAILED (1)" in printed
    assert "Race reported in kgopt::kernel" in printed
    assert "initcheck mean: FAILED (1)" in printed
    assert "racecheck mean: clean" in printed
    assert "[4/4]" in printed
    assert (tmp_path / "build/sanitize/racecheck-mean.log").read_text() == "ok\n"
