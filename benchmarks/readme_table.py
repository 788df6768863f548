"""Draws README.md's table and picture, and the tables of docs/benchmarks.md, from benchmarks/results/*.json.

    python benchmarks/readme_table.py           # writes both files between their markers, and docs/pipelines.png
    python benchmarks/readme_table.py --check   # changes nothing; exit status 1 when a table is not current

Needs kgopt, and matplotlib for the picture.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

from kgopt.cli.bench_models import model_ratios
from kgopt.cli.plot import DTYPE_TITLES, plot_rows
from kgopt.cli.results import BASELINES, Group, group_rows, load_rows
from kgopt.cli.text import bytes_text, error_text, time_text

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- results: begin (drawn by benchmarks/readme_table.py) -->"
END = "<!-- results: end -->"
PICTURE_BEGIN = "<!-- picture: begin (drawn by benchmarks/readme_table.py) -->"
PICTURE_END = "<!-- picture: end -->"
PICTURE = "docs/pipelines.png"
TIMES = "\u00d7"
DIRECTIONS = {"forward": "", "training": ", training step", "backward": ", backward"}


def load_all(folder: Path) -> list[dict]:
    """The rows of every results file, oldest run first."""
    rows = [row for path in sorted(folder.glob("*.json")) for row in load_rows(path) if "suite" in row]
    return sorted(rows, key=lambda row: row["date"])


def ratio(value: float | None) -> str:
    return "" if value is None else f"**{value:.1f}**" if value >= 1.05 else f"{value:.2f}"


def both(over: Callable[..., float | None]) -> str:
    """The ratio of contiguous tensors and, in brackets, that of channels_last."""
    last = over("_channels_last")
    return ratio(over()) + (f" ({ratio(last)})" if last is not None else "")


def line(group: Group) -> str:
    """One table line: kgopt beside the fastest eager and the fastest compiled baseline of its run."""
    ours = group.rows["kgopt"]
    fraction = group.floor_fraction
    eager = group.rows.get("eager", {})
    best = group.best(BASELINES)
    shape = TIMES.join(map(str, ours["shape"]))
    name = group.title if group.suite in ("pipelines", "ops") else re.sub(r"(?<=\d)x(?=\d)", TIMES, group.case)
    what = f"{name}{DIRECTIONS[group.direction]}" + (f"<br>x {shape}" if group.suite in ("pipelines", "ops") else "")
    cells = [
        what,
        DTYPE_TITLES.get(group.dtype, group.dtype),
        time_text(group.time("kgopt")),
        time_text(best[1]) if best else "",
        both(group.over_eager),
        both(group.over_compile),
        "" if fraction is None else f"{100 * fraction:.0f}%",
        f"{error_text(ours.get('error'))} ({error_text(eager.get('error'))})",
        f"{bytes_text(ours.get('peak_bytes'))} ({bytes_text(eager.get('peak_bytes'))})",
    ]
    return "| " + " | ".join(cells) + " |"


def model_line(group: Group) -> str:
    """One table line of a whole model: baselines in the faster of their two layouts."""
    ours, eager = group.rows["kgopt"], group.rows.get("eager", {})
    baselines = [group.best(n for n in BASELINES if n.startswith(kind)) for kind in ("eager", "compile")]
    both = group.best(("kgopt_compile", "kgopt_backend"))
    cells = [
        f"{group.title}{DIRECTIONS[group.direction]}<br>x {TIMES.join(map(str, ours['shape']))}",
        DTYPE_TITLES.get(group.dtype, group.dtype),
        *(time_text(best[1]) if best else "" for best in baselines),
        time_text(group.time("kgopt")),
        time_text(both[1]) if both else "",
        *(ratio(value) for value in model_ratios(group)),
        f"{error_text(ours.get('error'))} ({error_text(eager.get('error'))})",
        f"{bytes_text(ours.get('peak_bytes'))} ({bytes_text(eager.get('peak_bytes'))})",
    ]
    return "| " + " | ".join(cells) + " |"


def heading(title: str, groups: list[Group], more: str = "") -> str:
    """What was measured, with which versions and at which commits: kernels may have changed since."""
    facts = groups[-1].rows["kgopt"]
    commits = sorted({row["commit"] for group in groups for row in group.rows.values() if row.get("commit")})
    return (
        f"**{title}** (driver {facts['driver']}, torch {facts['torch']}, cuDNN {facts['cudnn']}, kgopt "
        f"{facts['kgopt']} at {' and '.join(commits) or 'no commit'}, {facts['date'][:10]}{more})\n"
    )


def model_table(gpu: str, rows: list[dict]) -> list[str]:
    """Lines of the table of suite models."""
    groups = [g for g in group_rows(r for r in rows if r["suite"] == "models") if g.time("kgopt")]
    if not groups:
        return []
    return [
        heading(f"{gpu}, whole models", groups),
        f"| | dtype | eager | compile | optimize | optimize + compile | {TIMES} eager | {TIMES} compile | both {TIMES} "
        "compile | error | memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(model_line(group) for group in groups),
        "",
        "Eager and compile in the faster of their two layouts. optimize: `kgopt.optimize(model, example_inputs=x)`. "
        "Training: forward, loss, backward; error of all gradients. In brackets eager's.\n",
    ]


def tables(rows: list[dict]) -> str:
    """The Markdown between the markers."""
    rows = [row for row in rows if row["device"] == "cuda"]
    if not rows:
        return "No results yet."
    parts = []
    for gpu in sorted({row["gpu"] for row in rows}):
        of_gpu = [row for row in rows if row["gpu"] == gpu]
        parts += model_table(gpu, of_gpu)
        for suite in ("pipelines", "groupnorm", "conv", "ops"):
            groups = [g for g in group_rows(r for r in of_gpu if r["suite"] == suite) if g.time("kgopt")]
            if not groups:
                continue
            copy = groups[-1].rows["kgopt"]["copy_gbytes_per_s"] / 1e3
            parts.append(heading(f"{gpu}, {suite}", groups, f"; copy {copy:.2f} TB/s"))
            parts.append(
                f"| | dtype | kgopt | best other | {TIMES} eager | {TIMES} compile | of floor | error | memory |"
            )
            parts.append("|---|---|---|---|---|---|---|---|---|")
            parts.extend(line(group) for group in groups)
            parts.append("")
    parts.append(
        f"{TIMES} eager, {TIMES} compile: how many times faster than eager and the fastest mode of torch.compile in "
        "the same run, with contiguous tensors; in brackets channels_last against channels_last. Best other: the "
        "fastest baseline of all. Of floor: the fraction of the speed that memory and tensor cores allow. Error and "
        "memory: in brackets eager's."
    )
    return "\n".join(parts)


def best(group: Group, kind: str) -> float | None:
    found = group.best(name for name in BASELINES if name.startswith(kind))
    return found[1] if found else None


def short_line(group: Group) -> str:
    """One line of README's table: times and how many times faster."""
    eager, compiled, time = best(group, "eager"), best(group, "compile"), group.time("kgopt") or math.nan
    cells = [
        f"{group.title}{DIRECTIONS[group.direction]}",
        DTYPE_TITLES.get(group.dtype, group.dtype),
        *(time_text(t) if t else "" for t in (eager, compiled)),
        time_text(time),
        *(ratio(t / time) if t else "" for t in (eager, compiled)),
    ]
    return "| " + " | ".join(cells) + " |"


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: list[dict]) -> str:
    """README's table: the pipelines, the models in half precision, GroupNorm's means, all of one GPU."""
    rows = [row for row in rows if row["device"] == "cuda"]
    if not rows:
        return "No results yet."
    gpu = max(rows, key=lambda row: row["date"])["gpu"]
    rows = [row for row in rows if row["gpu"] == gpu]

    def groups(suite: str) -> list[Group]:
        return [g for g in group_rows(r for r in rows if r["suite"] == suite) if g.time("kgopt")]

    lines = [
        f"| {gpu} | dtype | eager | compile | kgopt | {TIMES} eager | {TIMES} compile |",
        "|---|---|---|---|---|---|---|",
    ]
    pipelines = [g for g in groups("pipelines") if g.dtype == "tf32"]
    cases = list(dict.fromkeys(g.case for g in pipelines))
    pipelines.sort(key=lambda g: (cases.index(g.case), g.direction))
    lines += [short_line(g) for g in pipelines]
    lines += [short_line(g) for g in groups("models") if g.dtype in ("bf16", "autocast")]
    for direction, name in (("forward", "forward"), ("backward", "backward")):
        norms = [g for g in groups("groupnorm") if g.direction == direction]
        means = []
        for over in (Group.over_eager, Group.over_compile):
            found = [r for g in norms for layout in ("", "_channels_last") if (r := over(g, layout)) is not None]
            means.append(ratio(geometric_mean(found)) if found else "")
        if norms:
            shapes = len({g.case for g in norms})
            lines.append(
                f"| GroupNorm {name}, geometric mean of {shapes} shapes | all | | | | {means[0]} | {means[1]} |"
            )
    return "\n".join(lines)


def fill(text: str, begin: str, end: str, inside: str) -> str:
    """`text` with what lies between two markers replaced."""
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"the file to fill lacks the markers {begin} and {end}")
    return f"{head}{begin}\n{inside}\n{end}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether both files are current")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results", help="folder of results")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    args = parser.parse_args()

    rows = load_all(args.results)
    pipelines = [row for row in rows if row["suite"] == "pipelines" and row["device"] == "cuda"]
    # The picture shows forward passes of the first dtype, each pipeline beside the baselines of its own run.
    forward = [row for row in pipelines if row["direction"] == "forward"]
    picture = f"![Time of the three pipelines beside PyTorch]({PICTURE})" if forward else ""
    insides = {
        "README.md": [(PICTURE_BEGIN, PICTURE_END, picture), (BEGIN, END, summary(rows))],
        "docs/benchmarks.md": [(BEGIN, END, tables(rows))],
    }
    stale = bool(forward) and not (args.root / PICTURE).exists()
    for name, parts in insides.items():
        path = args.root / name
        before = after = path.read_text()
        for part in parts:
            after = fill(after, *part)
        if args.check:
            stale = stale or after != before
        else:
            path.write_text(after)
            print(f"wrote {path}")
    if args.check:
        print("the tables are " + ("not current: run python benchmarks/readme_table.py" if stale else "current"))
        return int(stale)
    if forward:
        plot_rows(forward, args.root / PICTURE)
        print(f"wrote {args.root / PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
