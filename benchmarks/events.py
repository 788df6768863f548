"""The GPU's time of a call, between events: for benchmarks of single ops."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from kgopt.cli.environment import environment


def busy(call: Callable[[], Any], calls: int = 20) -> float:
    """Microseconds of the GPU: the best of three rows of calls."""
    for _ in range(4):
        call()
    rows = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        rows.append(start.elapsed_time(end) / calls * 1e3)
    return min(rows)


def busy_of_few(call: Callable[[], Any]) -> float:
    """The same of one call where that takes milliseconds: PyTorch's may take half a second."""
    once = busy(call, 1)
    return once if once > 5e3 else busy(call)


def parsed(doc: str | None, dtypes: Iterable[str], only: str, compiles: str = "") -> argparse.Namespace:
    """The command line of a script with rows of several dtypes; ``only``: what ``--only`` leaves; ``compiles``: what
    ``--compile`` costs, where there is one.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help=only)
    parser.add_argument("--dtype", choices=list(dtypes), action="append")
    if compiles:
        parser.add_argument("--compile", action="store_true", help=compiles)
    parser.add_argument("--commit", default=None, help="where the tree's own is not the wheel's")
    return parser.parse_args()


def keep(path: Path | None, rows: list[Any], commit: str | None) -> None:
    """Writes the rows so far, with the machine that they are of; ``path``: None to keep nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = environment(torch.device("cuda"), commit)
        path.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1))
