"""What optimize did, as rows and as a table.

:mod:`~kgopt.rewrite.api` and :mod:`~kgopt.rewrite.backend` fill it in. A reason is a text of whoever decided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kgopt.rewrite.chains.chain import Chain


@dataclass
class SiteRow:
    """One norm of the model.

    ``us_before`` and ``us_after`` are microseconds of one call (with its backward, where a gradient was needed) of
    PyTorch's code and of kgopt's, where both were measured.
    """

    path: str  # as in named_modules(); of a site in functional code: the graph node
    kind: str  # the chain as it stands in the model: "GroupNorm → silu"
    became: str  # the op that runs; "": left alone
    reason: str = ""  # why it, or the activation after it, was left alone
    us_before: float | None = None
    us_after: float | None = None
    verdict: str = ""  # "measured" here, or "known" from an equal site

    def fill(self, chain: Chain) -> None:
        """Says that the norm runs as part of a chain."""
        own = self.kind.split(" ")[0]
        label = chain.label.replace("InstanceNorm", own) if chain.norm == "instance" else chain.label
        self.kind, self.became, self.reason = label, chain.becomes, ""


@dataclass
class Report:
    """Rows by site, and what was decided about the whole model."""

    sites: list[SiteRow] = field(default_factory=list)
    layout: str = ""  # "channels_last, 3.1 ms instead of 4.0 ms", "as it was: ..."
    glue: str = ""  # what became of the rest: convolutions, upsampling, pooling, padding
    padding: str = ""  # how many modules' padding, or frames in front, wait for a convolution in inference
    accuracy: str = ""  # of the model's output on the example inputs
    whole: str = ""  # where layout and glue come from: "measured", or "known" from an equal model
    clock: str = ""  # of a call of the whole model, as it is and as it came
    slower: bool = False  # it was, and so it is as it came
    recompute: str = ""  # what the backward computes again, or why nothing; "": nobody asked
    graph: str = ""  # the CUDA graphs that stand for calls of the model, or why there are none; "": nobody asked

    @property
    def changes(self) -> bool:
        """Whether anything became of it."""
        return bool(self.glue) or any(row.became for row in self.sites)

    @property
    def fused(self) -> list[SiteRow]:
        """Rows whose chain is more than a norm and runs as one."""
        return [row for row in self.sites if row.became and "→" in row.kind]

    def __str__(self) -> str:
        header = ("site", "is", "became", "us before", "us after", "times", "why")
        rows: list[tuple[str, ...]] = [header]
        for row in self.sites:
            times = ("" if t is None or math.isnan(t) else f"{t:.0f}" for t in (row.us_before, row.us_after))
            became = row.became or "left alone"
            rows.append((row.path or "(model)", row.kind, became, *times, row.verdict, row.reason))
        widths = [max(len(r[i]) for r in rows) for i in range(len(header))]
        right = {3, 4}
        lines = []
        for row_ in rows:
            cells = (
                c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row_, widths, strict=True))
            )
            lines.append("  ".join(cells).rstrip())
        lines.insert(1, "  ".join("-" * w for w in widths))
        changed = sum(bool(row.became) for row in self.sites)
        lines.append(f"{changed} of {len(self.sites)} sites run on kgopt, {len(self.fused)} of them fused")
        known = f" ({self.whole})" if self.whole else ""
        lines += [f"layout: {self.layout}{known if 'ms' in self.layout else ''}"] if self.layout else []
        lines += [f"between the norms: {self.glue}{known if 'ms' in self.glue else ''}"] if self.glue else []
        lines += [f"padding: {self.padding}"] if self.padding else []
        lines += [f"whole model: {self.clock}"] if self.clock else []
        lines += [f"computed again in the backward: {self.recompute}"] if self.recompute else []
        lines += [f"CUDA graphs: {self.graph}"] if self.graph else []
        lines += [f"accuracy: {self.accuracy}"] if self.accuracy else []
        return "\n".join(lines)
