"""Measured rows: the JSON file, and the comparisons that tables and charts show.

A file is {"format": 1, "rows": [...]}, one row a line. A row is flat and stands by itself: what was measured
(suite, case, shape, direction, dtype, implementation, layout), the result (time_us, peak_bytes, error, ...), the
floor, and where (gpu, driver, torch, cudnn, kgopt, commit, date, ...). benchmarks/results/README.md lists the fields.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["BASELINES", "COMPILED", "IMPLEMENTATIONS", "Group", "group_rows", "join_shards", "load_rows", "save_rows"]

Row = dict[str, Any]

FORMAT = 1

# Name in the rows -> label in tables and charts, in the order shown.
IMPLEMENTATIONS = {
    "eager": "eager",
    "eager_channels_last": "eager channels_last",
    "compile": "torch.compile",
    "compile_channels_last": "torch.compile channels_last",
    "compile_max_autotune": "torch.compile max-autotune",
    "compile_reduce_overhead": "torch.compile reduce-overhead",
    "kgopt": "kgopt",
    "kgopt_channels_last": "kgopt channels_last",
    "kgopt_own": 'kgopt backend="kgopt"',
    "kgopt_graph": "kgopt as a CUDA graph",
    "kgopt_optimize": "kgopt.optimize",
    "kgopt_compile": "kgopt.optimize + torch.compile",
    "kgopt_backend": 'torch.compile backend="kgopt"',
}
BASELINES = tuple(name for name in IMPLEMENTATIONS if not name.startswith("kgopt"))
COMPILED = tuple(name for name in IMPLEMENTATIONS if name.startswith("compile"))


def save_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Writes rows, replacing the file whole or not at all."""
    lines = ",\n".join("    " + json.dumps(row, sort_keys=False) for row in rows)
    text = f'{{\n  "format": {FORMAT},\n  "rows": [\n{lines}\n  ]\n}}\n'
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_text(text)
    part.replace(target)


def load_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Reads rows. Raises ValueError for a file of another kind or a newer format."""
    try:
        data = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise ValueError(f"{path} holds no rows of a kgopt bench")
    if data.get("format") != FORMAT:
        raise ValueError(f"{path} has format {data.get('format')}, expected {FORMAT}")
    return list(data["rows"])


@dataclasses.dataclass
class Group:
    """The rows of one case, dtype and direction: what is compared with what."""

    suite: str
    case: str
    title: str
    direction: str
    dtype: str
    rows: dict[str, Row]  # implementation -> row

    def time(self, implementation: str) -> float | None:
        """Median microseconds, None where it failed or was not run."""
        row = self.rows.get(implementation)
        return row.get("time_us") if row else None

    def best(self, implementations: Iterable[str]) -> tuple[str, float] | None:
        """The fastest of some implementations and its time."""
        timed = [(time, name) for name in implementations if (time := self.time(name)) is not None]
        return (min(timed)[1], min(timed)[0]) if timed else None

    def over_eager(self, layout: str = "") -> float | None:
        """How many times faster than eager kgopt is, in the same layout: contiguous, or "_channels_last"."""
        return self._ratio([f"eager{layout}"], f"kgopt{layout}")

    @property
    def optimize_over_module(self) -> float | None:
        """The time of kgopt.optimize(plain model) over that of kgopt's own module."""
        own, optimized = self.time("kgopt"), self.time("kgopt_optimize")
        return optimized / own if own and optimized else None

    def over_compile(self, layout: str = "") -> float | None:
        """As `over_eager`, to the fastest mode of torch.compile."""
        return self._ratio([f"compile{layout}", f"compile_max_autotune{layout}"], f"kgopt{layout}")

    def _ratio(self, others: list[str], ours: str) -> float | None:
        other, time = self.best(others), self.time(ours)
        return other[1] / time if other and time else None

    @property
    def floor_us(self) -> float | None:
        """The floor in microseconds."""
        return next((row["floor_us"] for row in self.rows.values() if row.get("floor_us")), None)

    @property
    def floor_fraction(self) -> float | None:
        """The fraction of the floor's speed that kgopt reaches with contiguous tensors."""
        time, floor = self.time("kgopt"), self.floor_us
        return floor / time if time and floor else None

    @property
    def facts(self) -> Row:
        """Any row, for the fields that all rows of the group share."""
        return next(iter(self.rows.values()))


def group_rows(rows: Iterable[Row]) -> list[Group]:
    """Rows by case, dtype and direction, in the order measured. Of a case measured in two runs the later run counts."""
    groups: dict[tuple[Any, ...], Group] = {}
    for row in rows:
        key = tuple(row[k] for k in ("suite", "case", "direction", "dtype"))
        if key not in groups:
            groups[key] = Group(row["suite"], row["case"], row.get("title") or row["case"], key[2], key[3], {})
        elif groups[key].facts.get("date") != row.get("date"):
            groups[key].rows.clear()  # times of two runs are not compared
        groups[key].rows[row["implementation"]] = row
    return list(groups.values())


def join_shards(shards: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of files that --shard 0/N, 1/N, ... wrote, in the order of one run: a case of each in turn."""
    turns = itertools.zip_longest(*([list(group.rows.values()) for group in group_rows(rows)] for rows in shards))
    return [row for turn in turns for rows in turn if rows for row in rows]
