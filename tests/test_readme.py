"""The Python of README.md and of docs/ runs as it stands there."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/index.md", "docs/recipes.md", "docs/usage.md")
LIBRARIES = ("monai", "dynamic_network_architectures", "pytorch3dunet", "diffusers")
BLOCKS = [(p, b) for p in PAGES for b in re.findall(r"```python\n(.*?)```", (ROOT / p).read_text(), re.DOTALL)]
IDS = [f"{page}:{(ROOT / page).read_text().split(block)[0].count(chr(10)) + 1}" for page, block in BLOCKS]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=IDS)
def test_block_runs(page, block, monkeypatch):
    for library in LIBRARIES:
        if f"from {library}" in block:
            pytest.importorskip(library)
    if "import kgopt_dev" in block:
        pytest.importorskip("kgopt_dev")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(block, str(ROOT / page), "exec"), names)
    if page != "CONTRIBUTING.md":  # which looks at plans, and computes nothing
        assert isinstance(names["y"], torch.Tensor)
        assert bool(names["y"].isfinite().all())


def test_every_page_has_programs():
    assert {page for page, _ in BLOCKS} == set(PAGES)
