"""Draws the tables of docs/zoo.md from benchmarks/results/zoo/*.json.

python benchmarks/zoo_table.py           # writes the page between its markers
python benchmarks/zoo_table.py --check   # changes nothing; exit status 1 when the page is not current
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kgopt.cli.networks.summary import HEADER, means, summary_lines, zoo_cases_of
from kgopt.cli.results import load_rows
from kgopt.cli.tables import headline

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- zoo: begin (drawn by benchmarks/zoo_table.py) -->"
END = "<!-- zoo: end -->"
LEGEND = (
    "eager, compile: the best of their ways. x best: time of the best of eager and compile over the best of ours. "
    "x eager: time of eager in its better format over `kgopt.optimize`'s, without a graph. error, peak: of "
    "`kgopt.optimize`, then of eager. Flags: over 3 % slower than the network as it came, than the best, or (under "
    "`torch.compile`) than Inductor alone; more memory than eager; an error over twice eager's."
)


def tables(rows: list[dict]) -> str:
    """A table for each GPU, newest rows last in the files."""
    if not rows:
        return "No results yet."
    parts = []
    for gpu in dict.fromkeys(row.get("gpu") or row.get("cpu") for row in rows):
        some = [row for row in rows if (row.get("gpu") or row.get("cpu")) == gpu]
        lines = [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
        lines += [f"| {' | '.join(cells)} |" for cells in summary_lines(zoo_cases_of(some))]
        # Of each commit by itself, the newest first: rows of several say little together.
        commits = reversed(dict.fromkeys(row["commit"] for row in some))
        of_commits = [[row for row in some if row["commit"] == commit] for commit in commits]
        said = [f"- {rows[0]['commit']}, {line}" for rows in of_commits for line in means(zoo_cases_of(rows))]
        parts += [f"**{headline(some[-1])}**", "\n".join(said), "\n".join(lines)]
    return "\n\n".join([*parts, LEGEND])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/zoo", help="folder of results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/zoo.md", help="what is filled")
    args = parser.parse_args()
    rows = [row for path in sorted(args.results.glob("*.json")) for row in load_rows(path)]
    rows = sorted((row for row in rows if "date" in row), key=lambda row: row["date"])
    text = args.page.read_text()
    head, _, rest = text.partition(BEGIN)
    _, closed, tail = rest.partition(END)
    if not closed:
        raise SystemExit(f"{args.page} lacks the markers {BEGIN} and {END}")
    new = f"{head}{BEGIN}\n{tables(rows)}\n{END}{tail}"
    if args.check:
        print("the page is " + ("current" if new == text else "not current: run python benchmarks/zoo_table.py"))
        return int(new != text)
    args.page.write_text(new)
    print(f"wrote {args.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
