"""The Python of README.md runs as it stands there."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["optimize", "modules", "functions", "ops"])
def test_block_runs(block, monkeypatch):
    if "monai" in block:
        pytest.importorskip("monai.networks.nets")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    names: dict[str, object] = {}
    exec(compile(block, str(README), "exec"), names)
    assert isinstance(names["y"], torch.Tensor)
    assert bool(names["y"].isfinite().all())
