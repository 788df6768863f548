"""Charts of measured rows, for a slide or the README."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

from kgopt.cli import results
from kgopt.cli._optional import require
from kgopt.cli.results import Group, Row, group_rows
from kgopt.cli.text import bytes_text, ratio_text, time_text

__all__ = ["ACCENT", "INK", "MUTED", "figure", "plot_rows", "save", "strip", "wrap_title"]

ACCENT = "#76b900"
INK = "#222222"
MUTED = "#6b7280"
COLORS = {
    "eager": "#9aa3af",
    "eager_channels_last": "#c3c9d1",
    "compile": "#6d8fb8",
    "compile_channels_last": "#a9bfd8",
    "compile_max_autotune": "#3f6796",
    "kgopt": ACCENT,
    "kgopt_channels_last": "#b4d870",
    "kgopt_own": "#4d7a00",
    "kgopt_graph": "#4d7a00",
    "kgopt_optimize": "#94b84f",
    "kgopt_compile": "#4d7a00",
    "kgopt_backend": "#94b84f",
}
DTYPE_TITLES = {
    "tf32": "fp32, TF32 allowed",
    "fp32": "fp32, TF32 off",
    "bf16": "bf16",
    "fp16": "fp16",
    "autocast": "autocast to bf16",
}
DIRECTION_TITLES = {"forward": "forward", "training": "training step", "backward": "backward"}


def figure(width: float, height: float) -> Any:
    """An empty figure that needs no display, `width` by `height` inches."""
    require("matplotlib", "demo")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(fig)
    return fig


def strip(axes: Any, keep: Sequence[str] = ()) -> None:
    """Removes frame and ticks but the sides named."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
        spine.set_color(MUTED)
    axes.tick_params(length=0, colors=INK)


def save(fig: Any, path: str | os.PathLike[str]) -> None:
    """Writes the figure; the type is the ending's (.png, .svg, .pdf)."""
    folder = os.path.dirname(os.fspath(path))
    if folder:
        os.makedirs(folder, exist_ok=True)
    # No date or version inside, so that the same rows give the same file.
    kind = os.path.splitext(os.fspath(path))[1].lower()
    metadata = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(kind)
    fig.savefig(path, dpi=160, metadata=metadata)


def _where(row: Row) -> str:
    gpu = row.get("gpu") or row.get("cpu") or "this machine"
    parts = [f"torch {row['torch']}", f"kgopt {row['kgopt']}", str(row["date"])[:10]]
    if row.get("cudnn"):
        parts.insert(1, f"cuDNN {row['cudnn']}")
    return f"{gpu} · " + " · ".join(parts)


def _device_and_dtype(row: Row) -> str:
    if not row.get("gpu"):
        return f"{row.get('cpu')}, {row['dtype']}"
    return f"{row['gpu']}, {DTYPE_TITLES.get(row['dtype'], row['dtype'])}"


def _shape_text(shape: Sequence[int]) -> str:
    return "\u00d7".join(map(str, shape))


def plot_rows(rows: list[Row], path: str | os.PathLike[str], dtype: str | None = None) -> None:
    """Draws the rows of one dtype (default: the first measured): bars for pipelines and models, lines for scaling,
    else a dot chart.

    A sweep is one scatter plot of all its rows, or of those of `dtype`.

    Raises ValueError where no row has this dtype or none was timed.
    """
    groups = group_rows(rows)
    if groups and groups[0].suite == "sweep":
        _plot_sweep([row for row in rows if dtype in (None, row["dtype"])], path)
        return
    dtype = dtype or (groups[0].dtype if groups else None)
    groups = [group for group in groups if group.dtype == dtype and group.best(results.IMPLEMENTATIONS)]
    if not groups:
        raise ValueError(f"there are no timed rows of dtype {dtype} to plot")
    if groups[0].suite == "scaling":
        save(_lines(groups), path)
        return
    save(_bars(groups) if groups[0].suite in ("pipelines", "models") else _dots(groups), path)


# Ways to use kgopt on a whole model; of the pipelines only "kgopt" is a bar.
_MODEL_BARS = ("kgopt", "kgopt_compile", "kgopt_backend")


def _bars(groups: list[Group]) -> Any:
    directions = list(dict.fromkeys(group.direction for group in groups))
    cases = list(dict.fromkeys(group.case for group in groups))
    fig = figure(4.6 * len(cases), 0.9 + 2.6 * len(directions))
    facts = groups[0].facts
    title = f"Time on {_device_and_dtype(facts)}"
    fig.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold", color=INK)
    all_axes = fig.subplots(len(directions), len(cases), squeeze=False)
    shown = [n for n in results.IMPLEMENTATIONS if n in _MODEL_BARS or not n.startswith("kgopt_")]
    names = [n for n in shown if any(g.time(n) for g in groups)]
    for i, direction in enumerate(directions):
        for j, case in enumerate(cases):
            axes = all_axes[i][j]
            group = next((g for g in groups if g.case == case and g.direction == direction), None)
            if group is None:
                axes.set_axis_off()
                continue
            _bar_panel(axes, group, names, labels=j == 0)
    fig.supxlabel(_where(facts) + " · medians, L2 flushed; x = times faster than eager", fontsize=8, color=MUTED,
                  x=0.01, ha="left")  # fmt: skip
    return fig


def wrap_title(title: str, width: int = 34) -> str:
    """A pipeline's title on several lines, broken at its pluses."""
    lines = [""]
    for word in title.split(" + "):
        joined = f"{lines[-1]} + {word}" if lines[-1] else word
        if len(joined) > width and lines[-1]:
            lines[-1] += " +"
            lines.append(word)
        else:
            lines[-1] = joined
    return "\n".join(lines)


def _bar_panel(axes: Any, group: Group, names: list[str], labels: bool) -> None:
    eager = group.time("eager")
    longest = max(t for n in names if (t := group.time(n)))
    for y, name in enumerate(names):
        took = group.time(name)
        if took is None:
            axes.text(0, y, " failed" if name in group.rows else " not run", va="center", fontsize=9, color=MUTED)
            continue
        axes.barh(y, took, height=0.72, color=COLORS[name])
        text = time_text(took) + (f"   {ratio_text(eager / took)}" if eager and name != "eager" else "")
        bold = "bold" if name.startswith("kgopt") else "normal"
        axes.text(took + 0.015 * longest, y, text, va="center", fontsize=9.5, fontweight=bold, color=INK)
    floor = group.floor_us
    if floor:
        axes.plot([floor, floor], [-0.45, len(names) - 0.55], color="#c0392b", linewidth=1.3, linestyle=(0, (3, 2)))
        bound = group.facts["floor_bound"]
        fraction = f", kgopt at {100 * group.floor_fraction:.0f}% of its speed" if group.floor_fraction else ""
        axes.text(0, len(names) - 0.3, f" floor {time_text(floor)} ({bound}){fraction}", fontsize=8,
                  color="#c0392b", va="center")  # fmt: skip
    axes.set_ylim(len(names) - 0.05, -0.55)
    axes.set_xlim(0, max(longest * 1.42, 1.02 * (floor or 0)))
    texts = [results.IMPLEMENTATIONS[n] if group.suite != "models" or n != "kgopt" else "kgopt.optimize" for n in names]
    axes.set_yticks(range(len(names)), texts if labels else [""] * len(names))
    for tick, name in zip(axes.get_yticklabels(), names, strict=True):
        tick.set_fontweight("bold" if name.startswith("kgopt") else "normal")
    axes.set_xticks([])
    direction = "" if group.direction == "forward" else f", {DIRECTION_TITLES[group.direction]}"
    axes.set_title(f"{wrap_title(group.title)}\n", loc="left", fontsize=10.5, fontweight="bold", color=INK)
    axes.text(0, 1.02, f"x {_shape_text(group.facts['shape'])}{direction}", transform=axes.transAxes, fontsize=8.5,
              color=MUTED)  # fmt: skip
    strip(axes, keep=("left",))


_MARKERS = {
    "eager": "o", "eager_channels_last": "s", "compile": "^", "compile_channels_last": "v",
    "compile_max_autotune": "P", "kgopt": "D", "kgopt_channels_last": "d", "kgopt_own": "X", "kgopt_compile": "X",
    "kgopt_backend": "*", "kgopt_graph": "p", "kgopt_optimize": "h",
}  # fmt: skip


def _dots(groups: list[Group]) -> Any:
    fig = figure(12.5, 1.6 + 0.42 * len(groups))
    axes = fig.subplots()
    facts = groups[0].facts
    suites = {
        "groupnorm": "GroupNorm",
        "channelnorm": "Norms over channels",
        "conv": "Convolutions",
        "ops": "Pointwise ops and reductions",
    }
    title = f"{suites.get(groups[0].suite, groups[0].suite)} on {_device_and_dtype(facts)}"
    fig.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold", color=INK)
    seen: dict[str, None] = {}
    for y, group in enumerate(groups):
        times = {n: t for n in results.IMPLEMENTATIONS if (t := group.time(n)) is not None}
        ends = [*times.values(), *([group.floor_us] if group.floor_us else [])]
        axes.plot([min(ends), max(ends)], [y, y], color="#e5e7eb", linewidth=2, zorder=1)
        if group.floor_us:
            axes.plot(group.floor_us, y, marker="|", markersize=15, markeredgewidth=2, color="#c0392b", zorder=2)
        for name, took in times.items():
            ours = name == "kgopt"
            size, edge = (75, INK) if ours else (42, "white")
            axes.scatter(took, y, marker=_MARKERS[name], color=COLORS[name], s=size, edgecolors=edge, linewidths=0.7,
                         zorder=4 if ours else 3)  # fmt: skip
            seen[name] = None
        parts = []
        for what, ratio in (("eager", group.over_eager()), ("compile", group.over_compile())):
            if ratio is not None:
                parts.append(f"{ratio_text(ratio)} {what}")
        if group.floor_fraction is not None:
            parts.append(f"{100 * group.floor_fraction:.0f}% of floor")
        axes.text(1.01, y, " · ".join(parts), transform=axes.get_yaxis_transform(), va="center", fontsize=9, color=INK)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: time_text(value))
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_ylim(len(groups) - 0.5, -0.5)
    labels = [g.title + ("" if g.direction == "forward" else f", {DIRECTION_TITLES[g.direction]}") for g in groups]
    axes.set_yticks(range(len(groups)), labels, fontsize=9)
    axes.grid(axis="x", color="#eef0f2", linewidth=0.8)
    axes.set_axisbelow(True)
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="", marker=_MARKERS[n], color=COLORS[n], label=results.IMPLEMENTATIONS[n],
                      markeredgecolor=INK if n == "kgopt" else COLORS[n])
               for n in results.IMPLEMENTATIONS if n in seen]  # fmt: skip
    handles.append(Line2D([], [], linestyle="", marker="|", markersize=11, markeredgewidth=2, color="#c0392b",
                          label="floor"))  # fmt: skip
    fig.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=8.5,
               handletextpad=0.2, columnspacing=1.2)  # fmt: skip
    fig.supxlabel(_where(facts) + " · medians, L2 flushed; ratios: contiguous tensors",
                  fontsize=8, color=MUTED, x=0.01, ha="left")  # fmt: skip
    strip(axes)
    axes.tick_params(which="minor", length=0)
    return fig


_AXES = {"batch": "batch size", "edge": "edge of the image or volume"}


def _lines(groups: list[Group]) -> Any:
    """Time for each element of x against what grows, a panel for each pipeline and axis, and the floor."""
    panels: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        panels.setdefault((group.title, group.facts["axis"]), []).append(group)
    titles = list(dict.fromkeys(title for title, _ in panels))
    axes_names = [axis for axis in _AXES if any(axis == name for _, name in panels)]
    fig = figure(5.6 * len(axes_names) + 0.4, 3.6 * len(titles) + 0.8)
    fig.suptitle("Cost against work: " + _device_and_dtype(groups[0].facts), x=0.01, ha="left", fontsize=14,
                 fontweight="bold", color=INK)  # fmt: skip
    grid = fig.subplots(len(titles), len(axes_names), squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    for (title, axis), members in panels.items():
        axes = grid[titles.index(title)][axes_names.index(axis)]
        axes.set_visible(True)
        for name, label in results.IMPLEMENTATIONS.items():
            timed = [(g.facts["axis_value"], g.time(name), math.prod(g.facts["shape"])) for g in members]
            points = sorted((value, time * 1e3 / elements) for value, time, elements in timed if time is not None)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.8, color=COLORS[name],
                          label=label)  # fmt: skip
        floors = sorted(
            (g.facts["axis_value"], (g.floor_us or 0.0) * 1e3 / math.prod(g.facts["shape"])) for g in members
        )
        axes.plot(*zip(*floors, strict=True), linestyle=(0, (4, 3)), linewidth=1.2, color=INK, label="floor")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title(wrap_title(title, 60), loc="left", fontsize=10, color=INK)
        axes.set_xlabel(_AXES[axis], color=INK)
        axes.set_ylabel("ns an element of x", color=INK)
        axes.grid(color="#eef0f2", linewidth=0.8)
        axes.set_axisbelow(True)
        strip(axes)
    handles, labels = grid[0][0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False, fontsize=9)
    fig.supxlabel(_where(groups[0].facts) + " · medians, L2 flushed", fontsize=8, color=MUTED, x=0.01, ha="left")
    return fig


_LAYOUT_COLORS = {"contiguous": ACCENT, "channels_last": "#3f6796"}
_DTYPE_MARKERS = {"fp32": "o", "bf16": "D", "fp16": "^"}


def _plot_sweep(rows: list[Row], path: str | os.PathLike[str]) -> None:
    """Time over the better of eager and torch.compile against the tensor's size, a panel for each direction."""
    from kgopt.cli.sweep import LIMIT, sweep_points

    points = sweep_points(rows)
    if not points:
        raise ValueError("there are no timed shapes of this dtype to plot")
    directions = [d for d in ("forward", "backward") if any(p.facts["direction"] == d for p in points)]
    fig = figure(6.2 * len(directions) + 0.6, 5.2)
    facts = points[0].facts
    shapes = len({point.facts["case"] for point in points})
    where = facts.get("gpu") or facts.get("cpu")
    fig.suptitle(f"GroupNorm at {shapes} random shapes on {where}", x=0.01, ha="left", fontsize=15, fontweight="bold",
                 color=INK)  # fmt: skip
    ratios = [point.ratio for point in points]
    low, high = min(0.5, *ratios) / 1.25, max(1.6, *ratios) * 1.25
    panels = fig.subplots(1, len(directions), squeeze=False, sharey=True)[0]
    for axes, direction in zip(panels, directions, strict=True):
        here = [point for point in points if point.facts["direction"] == direction]
        axes.axhspan(low, 1.0, color="#f3f8e8", zorder=0)
        axes.axhline(1.0, color=MUTED, linewidth=0.8, zorder=1)
        axes.axhline(LIMIT, color="#c0392b", linewidth=1.3, linestyle=(0, (4, 3)), zorder=1)
        axes.text(0.995, LIMIT * 1.02, f"{LIMIT}", transform=axes.get_yaxis_transform(), ha="right", va="bottom",
                  fontsize=9, color="#c0392b")  # fmt: skip
        for layout, color in _LAYOUT_COLORS.items():
            for dtype, marker in _DTYPE_MARKERS.items():
                chosen = [p for p in here if p.facts["layout"] == layout and p.facts["dtype"] == dtype]
                axes.scatter([p.facts["bytes"] for p in chosen], [p.ratio for p in chosen], s=30, marker=marker,
                             color=color, edgecolors="white", linewidths=0.5, alpha=0.9, zorder=3)  # fmt: skip
        middle = statistics.median(point.ratio for point in here)
        slow = sum(point.ratio > LIMIT for point in here)
        axes.set_title(f"{DIRECTION_TITLES[direction]}: {ratio_text(1 / middle)} as fast at the median, "
                       f"{slow} of {len(here)} slower", loc="left", fontsize=11, color=INK)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.xaxis.set_major_formatter(lambda value, _: bytes_text(value))
        ticks = [t for t in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if low <= t <= high]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
        axes.grid(color="#eef0f2", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("size of x", color=INK)
        strip(axes)
    panels[0].set_ylabel("time of kgopt / better of eager and torch.compile", color=INK)
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="", marker="s", color=color, label=layout)
               for layout, color in _LAYOUT_COLORS.items()]  # fmt: skip
    handles += [Line2D([], [], linestyle="", marker=marker, color=MUTED, label=dtype)
                for dtype, marker in _DTYPE_MARKERS.items()]  # fmt: skip
    fig.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9,
               handletextpad=0.1, columnspacing=1.2)  # fmt: skip
    compiled = sum(p.group.time("compile") is not None for p in points)
    note = "" if compiled == len(points) else f" · {compiled} of {len(points)} with torch.compile"
    fig.supxlabel(_where(facts) + f" · medians, L2 flushed, launches hidden{note} · below 1: kgopt is faster",
                  fontsize=8, color=MUTED, x=0.01, ha="left")  # fmt: skip
    save(fig, path)
