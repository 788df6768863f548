"""What the rows of the zoo say: a line a case, flags, geometric means."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from kgopt.cli.measure import DTYPES, within_tolerance
from kgopt.cli.results import Row
from kgopt.cli.tables import headline
from kgopt.cli.text import bytes_text, error_text, table, time_text

__all__ = ["ZooCase", "print_summary", "summary_lines", "zoo_cases_of"]

SLACK = 1.03  # of a time, up to which nobody is slower
EAGER = ("eager", "eager_channels_last")
COMPILE = ("compile", "compile_reduce_overhead", "compile_max_autotune")
OURS = ("kgopt", "kgopt_graph", "kgopt_backend", "kgopt_compile")
MODES = ("kgopt_backend_reduce_overhead",)  # which count for the best, and have no column of their own


@dataclasses.dataclass
class ZooCase:
    """The rows of a network in one precision."""

    name: str
    dtype: str
    rows: dict[str, Row]

    @property
    def training(self) -> bool:
        """A training step?"""
        return self.dtype.startswith("autocast")

    def time(self, name: str) -> float | None:
        """Microseconds by the clock, None where it failed."""
        return self.rows.get(name, {}).get("time_us")

    def best(self, names: Iterable[str]) -> tuple[str, float] | None:
        """The fastest of some implementations."""
        timed = [(time, name) for name in names if (time := self.time(name)) is not None]
        return (min(timed)[1], min(timed)[0]) if timed else None

    @property
    def ratio(self) -> float | None:
        """The time of the best of eager and compile over the best of ours; None where nobody tried to compile."""
        theirs, ours = self.best(EAGER + COMPILE), self.best(OURS + MODES)
        return theirs[1] / ours[1] if theirs and ours and not self.rows.keys().isdisjoint(COMPILE) else None

    @property
    def over_eager(self) -> float | None:
        """The time of eager, in its better format, over that of optimize without a graph."""
        eager, ours = self.best(EAGER), self.time("kgopt")
        return eager[1] / ours if eager and ours else None

    @property
    def flags(self) -> list[str]:
        """What a user would complain about."""
        found = []
        eager, ours = self.time("eager"), self.time("kgopt")
        for name in ("kgopt", "kgopt_graph"):
            if eager and (time := self.time(name)) and time > SLACK * eager:
                found.append(f"{name} {time / eager:.2f} x eager")
        if self.ratio and self.ratio < 1 / SLACK:
            best = self.best(EAGER + COMPILE)
            found.append(f"{1 / self.ratio:.2f} x {best[0] if best else ''}")
        compiled = self.time("compile")
        for name in ("kgopt_backend", "kgopt_compile"):
            if compiled and (time := self.time(name)) and time > SLACK * compiled:
                found.append(f"{name} {time / compiled:.2f} x compile")
        found += self._memory() + self._errors()
        found += [f"{n} failed" for n in OURS if "failed" in self.rows.get(n, {}) and (ours or n == "kgopt")]
        return found

    def _memory(self) -> list[str]:
        eager, ours = (self.rows.get(name, {}).get("peak_bytes") for name in ("eager", "kgopt"))
        if eager is not None and ours is not None and ours > 1.01 * eager + 2**20:
            return [f"memory {ours / max(eager, 1):.2f} x eager"]
        return []

    def _errors(self) -> list[str]:
        bars = [e for name in EAGER if (e := self.rows.get(name, {}).get("error")) is not None]
        if not bars:
            return []
        dtype = DTYPES["bf16" if self.training else "fp16" if self.dtype == "amp" else self.dtype]
        found = []
        for name in OURS:
            error = self.rows.get(name, {}).get("error")
            if error is not None and not within_tolerance(error, max(bars), dtype):
                found.append(f"{name} error {error:.1e}, eager's {max(bars):.1e}")
        return found


def zoo_cases_of(rows: Iterable[Row]) -> list[ZooCase]:
    """Rows by network and precision, in the order measured; of two rows of one way the later one."""
    found: dict[tuple[str, str], ZooCase] = {}
    for row in rows:
        key = row["case"], row["dtype"]
        found.setdefault(key, ZooCase(*key, {})).rows[row["implementation"]] = row
    return list(found.values())


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


HEADER = (
    "network", "dtype", "eager", "compile", "optimize", "graph", "backend", "opt+compile", "x best", "x eager",
    "error", "eager's", "peak", "eager's", "flags",
)  # fmt: skip


def summary_lines(cases: Iterable[ZooCase]) -> list[list[str]]:
    """Cells of the table, as HEADER has them."""
    lines = []
    for case in cases:

        def cell(names: Iterable[str], case: ZooCase = case) -> str:
            best = case.best(names)
            if best:
                return time_text(best[1])
            return "failed" if any("failed" in case.rows.get(name, {}) for name in names) else "-"

        ours, eager = case.rows.get("kgopt", {}), case.rows.get("eager", {})
        lines.append(
            [
                case.name + (" train" if case.training else ""),
                case.dtype,
                cell(EAGER),
                cell(COMPILE),
                *(cell((name,)) for name in OURS),
                *("-" if ratio is None else f"{ratio:.2f}" for ratio in (case.ratio, case.over_eager)),
                error_text(ours.get("error")),
                error_text(eager.get("error")),
                bytes_text(ours.get("peak_bytes")),
                bytes_text(eager.get("peak_bytes")),
                "; ".join(case.flags),
            ]
        )
    return lines


def means(cases: Sequence[ZooCase]) -> list[str]:
    """Geometric means of inference and of training, a line each."""
    lines = []
    for name, training, drawn in (
        ("inference", False, False),
        ("inference of drawn networks", False, True),
        ("training steps", True, False),
        ("training steps of drawn networks", True, True),
    ):
        some = [case for case in cases if (case.training, case.name.startswith("drawn ")) == (training, drawn)]
        best = [case.ratio for case in some if case.ratio]
        eager = [case.over_eager for case in some if case.over_eager]
        parts = []
        if (mean := geometric_mean(best)) is not None:
            parts.append(f"{mean:.2f} times faster than the best of eager and compile ({len(best)} cases)")
        if (mean := geometric_mean(eager)) is not None:
            parts.append(f"optimize {mean:.2f} times faster than eager ({len(eager)})")
        if parts:
            flagged = sum(bool(case.flags) for case in some)
            lines.append(f"{name}: {', '.join(parts)}; {flagged} of {len(some)} flagged")
    return lines


def print_summary(rows: list[Row]) -> None:
    """The table, the means, and why ways failed."""
    cases = zoo_cases_of(rows)
    facts = [row for row in rows if "torch" in row]
    if facts:
        print(headline(facts[-1]))
        print()
    print(table(HEADER, summary_lines(cases), left=2))
    print()
    for line in means(cases):
        print(line)
    for case in cases:
        for name, row in case.rows.items():
            if "failed" in row:
                print(f"note: {case.name} {case.dtype}, {name}: {row['failed']}")
            elif row.get("left_as_it_came"):
                print(f"note: {case.name} {case.dtype}, {name}: {row['clock']}")
