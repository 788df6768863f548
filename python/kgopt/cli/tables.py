"""What bench prints: one line a case, and notes."""

from __future__ import annotations

from kgopt.cli import results
from kgopt.cli.results import Group, Row
from kgopt.cli.text import bytes_text, error_text, ratio_text, table, time_text

__all__ = ["bench_table", "error_and_peak", "headline", "notes_of", "table_of_filled"]


def _short(name: str) -> str:
    """A case's name, short enough for a table row."""
    shorter = {
        "conv3d_group_norm_mean": "conv3d+gn+mean",
        "conv_transpose3d_relu_group_norm": "convT3d+relu+gn",
        "conv2d_group_norm_tanh_hardswish_residual_logsumexp": "conv2d+gn+...+lse",
    }
    first, _, rest = name.partition(" ")
    return f"{shorter.get(first, first)} {rest}".rstrip()


def error_and_peak(group: Group) -> list[str]:
    """Cells: error and peak memory, each of kgopt and of eager."""
    ours, eager = group.rows.get("kgopt", {}), group.rows.get("eager", {})
    return [
        error_text(ours.get("error")) + ("!" if ours.get("out_of_tolerance") else ""),
        error_text(eager.get("error")),
        bytes_text(ours.get("peak_bytes")),
        bytes_text(eager.get("peak_bytes")),
    ]


def table_of_filled(header: list[str], lines: list[list[str]]) -> str:
    """A table of the columns in which something stands; the first two are names."""
    kept = [i for i in range(len(header)) if i < 2 or any(line[i] != "-" for line in lines)]
    return table([header[i] for i in kept], [[line[i] for i in kept] for line in lines], left=2)


def bench_table(groups: list[Group]) -> str:
    """One line a case, dtype and direction: times, ratios, floor, error beside eager's, memory."""
    present = [name for name in results.IMPLEMENTATIONS if any(name in group.rows for group in groups)]
    heads = {
        "eager": "eager",
        "eager_channels_last": "eager cl",
        "compile": "compile",
        "compile_channels_last": "compile cl",
        "compile_max_autotune": "max-auto",
        "kgopt": "kgopt",
        "kgopt_channels_last": "kgopt cl",
        "kgopt_own": "own",
        "kgopt_graph": "kgopt graph",
        "kgopt_optimize": "optimize",
    }
    layouts = "kgopt_channels_last" in present
    speedups = ["x eager", "x compile", *(["x eager cl", "x compile cl"] if layouts else [])]
    header = ["case", "dtype", *(heads[name] for name in present), *speedups, "floor", "of floor",
              "error", "eager's", "peak", "eager's"]  # fmt: skip
    lines = []
    for group in groups:
        fraction = group.floor_fraction
        ratios = [group.over_eager(), group.over_compile()]
        if layouts:
            ratios += [group.over_eager("_channels_last"), group.over_compile("_channels_last")]
        times = ["failed" if "failed" in group.rows.get(n, {}) else time_text(group.time(n)) for n in present]
        arrow = {"forward": "", "backward": " bwd", "training": " train"}[group.direction]
        lines.append(
            [
                _short(group.case) + arrow,
                group.dtype,
                *times,
                *(ratio_text(ratio) for ratio in ratios),
                time_text(group.floor_us),
                "-" if fraction is None else f"{100 * fraction:.0f}%",
                *error_and_peak(group),
            ]
        )
    return table_of_filled(header, lines)


_SLOWER = 1.05  # the module's time, above which kgopt.optimize of the plain model has missed something


def notes_of(groups: list[Group]) -> list[str]:
    """What failed, each once."""
    notes: dict[str, None] = {}
    unrun = 0
    for group in groups:
        for name, row in group.rows.items():
            if group.suite == "sweep" and row.get("failed", "").startswith("not run"):
                unrun += 1  # hundreds, all for the same reason
            elif "failed" in row:
                notes[f"{_short(group.case)} {group.dtype} {group.direction}, {name}: {row['failed']}"] = None
        if (ratio := group.optimize_over_module) is not None and ratio > _SLOWER:
            chosen = group.rows["kgopt_optimize"].get("layout_chosen") or "layout not timed"
            notes[
                f"{_short(group.case)} {group.dtype} {group.direction}: kgopt.optimize(plain model) takes {ratio:.2f} "
                f"times the module's ({chosen})"
            ] = None
        for row in group.rows.values():
            if "error_unknown" in row:
                notes[f"{_short(group.case)} {group.dtype}: no error measured: {row['error_unknown']}"] = None
    if unrun:
        notes[f"{unrun} measurements without torch.compile: the time budget was spent"] = None
    return list(notes)


def headline(row: Row) -> str:
    """Hardware and versions of a run."""
    where = row.get("gpu") or f"{row.get('cpu')}, {row.get('cpu_threads')} threads"
    parts = [where, f"torch {row['torch']}", f"kgopt {row['kgopt']}"]
    if row.get("cudnn"):
        parts.insert(2, f"cuDNN {row['cudnn']}")
    if row.get("driver"):
        parts.insert(1, f"driver {row['driver']}")
    if row.get("commit"):
        parts[-1] += f" ({row['commit']})"
    return ", ".join(parts)


LEGEND = """
x eager, x compile (the faster mode): times faster in the same layout, contiguous or channels_last (cl).
error: relative L2 error against float64, '!' where it exceeds twice eager's (under TF32 the larger of eager's
and of a convolution that is exact but for the rounding of its operands to TF32).
peak: memory beyond inputs and parameters. optimize: kgopt.optimize(plain model, x)."""

MODELS_LEGEND = """
optimize: kgopt.optimize(model, example_inputs=x), which picks its layout; backend: torch.compile(backend="kgopt").
Ratios: times faster than the baseline in the faster of its two layouts. train: forward, loss and backward.
error: relative L2 error of the output (train: of all gradients) against float64, '!' where it exceeds twice eager's.
peak: memory beyond inputs and parameters."""
