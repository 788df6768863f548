"""What the search has found: each case of fuzz_cases.json, with a line on what was wrong, passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kgopt.fuzz.pool import Job, Settings, Worker

CASES = json.loads((Path(__file__).parent / "fuzz_cases.json").read_text())


@pytest.fixture(scope="module")
def worker():
    """A process of its own for each device: a case that kills it fails, and the next one gets another."""
    workers = {}

    def of(device):
        if device not in workers:
            workers[device] = Worker(0, Settings(device))
        return workers[device]

    yield of
    for one in workers.values():
        one.close()


@pytest.mark.parametrize(
    "entry", CASES, ids=[f"{i}-{e['case'].get('op') or e['case']['how']}" for i, e in enumerate(CASES)]
)
def test_found_case(entry, device, worker):
    """A fault that the search found once, with the case that showed it."""
    result = worker(device).answer(Job(entry["case"]["kind"], 0, 120.0, entry["case"]))
    assert result.outcome == "checked", f"{entry['found']}\n{result.text}"
