"""Plain-text tables and numbers."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bytes_text", "error_text", "ratio_text", "table", "time_text"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table with aligned columns, the first `left` columns to the left and the others to the right."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        out = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(out).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *(line(row) for row in rows)])


def time_text(us: float | None) -> str:
    """Microseconds as text with a unit, three digits."""
    if us is None:
        return "-"
    for limit, scale, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms"), (float("inf"), 1e6, "s")):
        if us < limit * 0.9995:
            value = us / scale
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return "-"


def bytes_text(count: float | None) -> str:
    """A number of bytes as text."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def error_text(error: float | None) -> str:
    """A relative error as text."""
    return "-" if error is None else f"{error:.1e}"


def ratio_text(ratio: float | None) -> str:
    """A speed ratio as text, "3.4x"."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"
