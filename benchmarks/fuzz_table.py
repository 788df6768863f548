"""Draws the counts of docs/fuzz.md from the runs in benchmarks/results/fuzz/*.json.

    python benchmarks/fuzz_table.py           # writes the page between its markers
    python benchmarks/fuzz_table.py --check   # changes nothing; exit status 1 when a table is not current

A run is ``python -m kgopt fuzz --json benchmarks/results/fuzz/<device>_<kind>.json``. Parts of one (``--first``), in
files ``<device>_<kind>_<part>.json``, count as one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kgopt.cli.fuzz import columns

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "fuzz.md"
BEGIN = "<!-- counts: begin (drawn by benchmarks/fuzz_table.py) -->"
END = "<!-- counts: end -->"


def machine(run: dict[str, Any]) -> str:
    """Where it ran."""
    e = run["environment"]
    return str(e["gpu"] or e["cpu"])


def summary(runs: list[dict[str, Any]]) -> str:
    """All of them, a row each, the newest first."""
    lines = [
        "| machine | kind | date | torch | cuDNN | commit | seed | cases | seconds | processes | failed |",
        "|---|---|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for run in sorted(runs, key=lambda run: str(run["environment"]["date"]), reverse=True):
        e = run["environment"]
        failed = f"{run['failed']}" + (f", {run['out_of_memory']} out of memory" if run["out_of_memory"] else "")
        lines.append(
            f"| {machine(run)} | {run['kind']} | {e['date'][:10]} | {e['torch'].split('+')[0]} | {e['cudnn'] or ''} "
            f"| {e['commit']} | {run['seed']} | {run['cases']:,} | {run['seconds']:.0f} | {run['workers']} | {failed} |"
        )
    return "\n".join(lines)


def newest(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each machine and kind the last run that was no small one."""
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: str(run["environment"]["date"])):
        key = machine(run), run["kind"]
        if key not in last or run["cases"] >= last[key]["cases"] / 2:
            last[key] = run
    return list(last.values())


def table(run: dict[str, Any]) -> str:
    """A run's counts by op and dtype."""
    counts = run["counts"]
    shown = columns(counts)
    lines = [
        f"**{machine(run)}, {run['kind']}**, seed {run['seed']}:",
        "",
        f"| op | {' | '.join(shown)} | all |",
        "|---|" + "---:|" * (len(shown) + 1),
    ]
    for op, row in counts.items():
        lines.append(f"| `{op}` | {' | '.join(str(row.get(c, '')) for c in shown)} | {sum(row.values())} |")
    sums = [sum(row.get(c, 0) for row in counts.values()) for c in shown]
    lines.append(f"| all | {' | '.join(map(str, sums))} | {sum(sums)} |")
    return "\n".join(lines)


def joined(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs in their order, the parts of one seed on one machine at one commit as one."""
    whole: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs:
        e = run["environment"]
        key = (e["gpu"] or e["cpu"], e["torch"], e["commit"], run["kind"], run["seed"])
        if key not in whole:
            whole[key] = run
            continue
        into = whole[key]
        for name in ("cases", "failed", "out_of_memory", "seconds"):
            into[name] += run[name]
        for op, row in run["counts"].items():
            counts = into["counts"].setdefault(op, {})
            for dtype, n in row.items():
                counts[dtype] = counts.get(dtype, 0) + n
        into["counts"] = dict(sorted(into["counts"].items()))
    return list(whole.values())


def drawn(page: str) -> str:
    """The page with its tables as the runs have them."""
    runs = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results" / "fuzz").glob("*.json"))]
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    runs = joined(runs)
    return before + "\n\n".join([BEGIN, summary(runs), *map(table, newest(runs)), END]) + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, and fail where the page is not current")
    args = parser.parse_args()
    page = PAGE.read_text()
    if args.check:
        return int(drawn(page) != page)
    PAGE.write_text(drawn(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
