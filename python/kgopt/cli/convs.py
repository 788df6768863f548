"""``bench --suite convs``: random convolutions against cuDNN in both memory formats.

8 to 512 channels, kernels of 1 to 5, stride, padding, dilation, conv groups, transposed or not, 2D and 3D.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import torch

from kgopt._layout import FORMATS
from kgopt.accuracy import no_autotuning, round_tf32
from kgopt.cli.floor import Ceilings, Work
from kgopt.cli.measure import (
    DTYPES,
    ErrorMeter,
    clock,
    look_again,
    note_error_ratio,
    note_time,
    peak_memory,
    precision_flags,
)
from kgopt.cli.results import Row, group_rows
from kgopt.cli.runner import Settings, describe
from kgopt.cli.sweep import LIMIT, log_uniform
from kgopt.cli.text import ratio_text, table, time_text
from kgopt.ops import conv_sizes

__all__ = ["RandomConv", "convs_summary", "measure_conv", "random_convs"]

_MOST_ELEMENTS = 2**24  # of x and of y


@dataclasses.dataclass(frozen=True)
class RandomConv:
    """One random convolution; per-dim values are those of the spatial dims."""

    index: int
    transposed: bool
    shape: tuple[int, ...]  # of x
    c_out: int
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]  # zeros for a regular convolution

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """As torch.nn holds it."""
        c_in = self.shape[1]
        if self.transposed:
            return (c_in, self.c_out // self.groups, *self.kernel)
        return (self.c_out, c_in // self.groups, *self.kernel)

    @property
    def output(self) -> tuple[int, ...]:
        """Shape of y."""
        return tuple(
            conv_sizes(
                self.shape, self.weight_shape, self.stride, self.padding, self.dilation, self.output_padding,
                self.groups, self.transposed,
            )
        )  # fmt: skip

    @property
    def flops(self) -> float:
        """Two a multiply-add."""
        positions = self.shape if self.transposed else self.output
        channels = self.shape[1] * self.c_out / self.groups
        return 2.0 * positions[0] * math.prod(positions[2:]) * channels * math.prod(self.kernel)

    @property
    def name(self) -> str:
        """Unique in a run: the index and what is drawn."""

        def sizes(values: tuple[int, ...]) -> str:
            return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))

        parts = [f"{self.index:03d}:", f"conv{'_transpose' if self.transposed else ''}{len(self.kernel)}d"]
        parts += ["x".join(map(str, self.shape)), f"to {self.c_out}", f"k{sizes(self.kernel)}"]
        for letter, values, usual in (
            ("s", self.stride, 1), ("p", self.padding, 0), ("d", self.dilation, 1), ("op", self.output_padding, 0)
        ):  # fmt: skip
            if any(value != usual for value in values):
                parts.append(f"{letter}{sizes(values)}")
        if self.groups > 1:
            parts.append(f"g{self.groups}")
        return " ".join(parts)

    def call(self, x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        """The op of kgopt, without bias."""
        name = f"conv{'_transpose' if self.transposed else ''}{len(self.kernel)}d"
        op = getattr(torch.ops.kgopt, name)
        rest = (self.output_padding, self.groups, self.dilation) if self.transposed else (self.dilation, self.groups)
        y: torch.Tensor = op(x, weight, None, self.stride, self.padding, *rest, **options)
        return y

    def torch_call(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """PyTorch's."""
        return torch.convolution(
            x, weight, None, self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups
        )

    def work(self, shape: tuple[int, ...], itemsize: int, direction: str) -> Work:
        """Bytes and operations that the convolution cannot do without."""
        samples = shape[0] / self.shape[0]
        elements = math.prod(shape) + math.prod(self.output) * samples + math.prod(self.weight_shape)
        return Work(elements * itemsize, self.flops * samples)


def _draw(rng: random.Random, index: int, most_flops: float) -> RandomConv:
    while True:
        rank = rng.choice([2, 3])
        transposed = rng.random() < 0.25
        unit = rng.choice([8, 8, 8, 4, 1])  # most channels of networks are multiples of 8
        c_in, c_out = (max(8, round(log_uniform(rng, 8, 512) / unit) * unit) for _ in range(2))
        groups = 1
        if rng.random() < 0.15:
            groups = rng.choice([g for g in (2, 4, 8, c_in) if c_in % g == 0] or [1])
            c_out = max(1, round(c_out / groups)) * groups
        if rng.random() < 0.75:
            kernel = (rng.choices([1, 2, 3, 4, 5], [3, 1, 8, 1, 2])[0],) * rank
        else:
            kernel = tuple(rng.choices([1, 2, 3, 4, 5], [2, 1, 4, 1, 1], k=rank))
        stride = (rng.choices([1, 2, 3], [12, 5, 1])[0],) * rank
        dilation = (rng.choices([1, 2, 3], [14, 2, 1])[0],) * rank
        same = [(k - 1) * d // 2 for k, d in zip(kernel, dilation, strict=True)]
        padding = tuple(rng.choice([0, p, p]) for p in same)
        output_padding = (0,) * rank
        if transposed:
            output_padding = tuple(rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
        batch = round(log_uniform(rng, 1, 16))
        flops = log_uniform(rng, most_flops / 1e3, most_flops)
        positions = flops / (2.0 * c_in * c_out / groups * math.prod(kernel))
        grow = 1 if transposed else math.prod(stride)
        edge = (positions * grow / batch) ** (1 / rank)
        spatial = tuple(max(2, round(edge * rng.uniform(0.7, 1.4))) for _ in range(rank))
        conv = RandomConv(
            index, transposed, (batch, c_in, *spatial), c_out, groups, kernel, stride, padding, dilation,
            output_padding,
        )  # fmt: skip
        try:
            output = conv.output
        except (RuntimeError, ValueError):
            continue
        if min(output) < 1 or max(math.prod(conv.shape), math.prod(output)) > _MOST_ELEMENTS:
            continue
        if conv.flops <= most_flops and max(math.prod(conv.shape), math.prod(output)) >= 256:
            return conv


def random_convs(count: int, seed: int, most_flops: float = 3e10) -> list[RandomConv]:
    """The first `count` convolutions of a seed. More of the same seed begin with the same ones."""
    rng = random.Random(seed)
    return [_draw(rng, index, most_flops) for index in range(count)]


_IMPLEMENTATIONS = ("eager", "eager_channels_last", "kgopt", "kgopt_channels_last")


def _layout(name: str) -> str:
    return "channels_last" if name.endswith("channels_last") else "contiguous"


def _rival(name: str) -> str:
    """cuDNN in the same memory format."""
    return name.replace("kgopt", "eager")


def _drawn(conv: RandomConv, precision: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight, drawn where they are used: a layer's own start takes longer than its measurement."""
    generator = torch.Generator(device=device).manual_seed(conv.index)
    x = torch.empty(conv.shape, device=device).normal_(generator=generator)
    weight = torch.empty(conv.weight_shape, device=device).normal_(generator=generator)
    terms = conv.shape[1] // conv.groups * math.prod(conv.kernel)
    return x.to(DTYPES[precision]), weight.mul_(terms**-0.5).to(DTYPES[precision])


def _note_errors(
    conv: RandomConv,
    precision: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: dict[str, Row],
    calls: dict[str, Callable[[], torch.Tensor]],
) -> None:
    """Errors against float64, of three samples at most, which may cost more than all else."""
    some = sorted({0, conv.shape[0] // 2, conv.shape[0] - 1})
    x = x[some]
    with no_autotuning():
        exact = conv.torch_call(x.double(), weight.double())
        ideal = 0.0
        if precision == "tf32":
            meter = ErrorMeter()
            meter.add(conv.torch_call(round_tf32(x).double(), round_tf32(weight).double()), exact)
            ideal = meter.error
    for name, fn in calls.items():
        meter = ErrorMeter()
        meter.add(fn()[some], exact)
        rows[name] |= {"error": meter.error, "error_max": meter.error_max}
        if ideal:
            rows[name]["error_ideal_tf32"] = ideal
    for name, row in rows.items():
        bar = rows.get(_rival(name), {}).get("error")
        if bar is not None:
            note_error_ratio(row, bar, ideal, weight.dtype)


def measure_conv(conv: RandomConv, precision: str, settings: Settings, ceilings: Ceilings, facts: Row) -> list[Row]:
    """Rows of cuDNN and kgopt in both memory formats, with errors against float64."""
    work = conv.work(conv.shape, DTYPES[precision].itemsize, "forward")
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    with precision_flags(precision), torch.no_grad():
        x, weight = _drawn(conv, precision, settings.device)
        layouts: dict[str, tuple[torch.Tensor, ...]] = {"contiguous": (x, weight)}
        layouts["channels_last"] = tuple(t.contiguous(memory_format=FORMATS[t.dim()]) for t in (x, weight))
        for name in _IMPLEMENTATIONS:
            if settings.only and name not in ("eager", *settings.only):
                continue
            row = rows[name] = {
                "suite": "convs", "case": conv.name, "title": conv.name, "shape": list(conv.shape),
                "direction": "forward", "dtype": precision, "implementation": name, "layout": _layout(name),
            }  # fmt: skip
            call = conv.call if name.startswith("kgopt") else conv.torch_call
            fn = functools.partial(call, *layouts[_layout(name)])
            try:
                note_time(row, clock(fn, settings.device, settings.rep_ms))
                row["peak_bytes"] = peak_memory(fn, settings.device)
                calls[name] = fn
            except Exception as error:
                row["failed"] = describe(error)
        _second_look(rows, calls, settings)
        try:
            _note_errors(conv, precision, x, weight, rows, calls)
        except RuntimeError as error:
            for row in rows.values():
                row["error_unknown"] = describe(error)
    for row in rows.values():
        ceilings.note(row, work, precision)
        row["work_flops"] = work.flops
        if row.get("time_us"):
            row["tflops"] = round(work.flops / row["time_us"] * 1e-6, 3)
        row["copy_gbytes_per_s"] = round(ceilings.bytes_per_s * 1e-9, 1)
        row.update(facts)
    return list(rows.values())


def _ratio(rows: dict[str, Row], name: str) -> float | None:
    """Time of kgopt over cuDNN's in the same memory format."""
    ours, theirs = rows.get(name, {}).get("time_us"), rows.get(_rival(name), {}).get("time_us")
    return ours / theirs if ours and theirs else None


def _second_look(rows: dict[str, Row], calls: dict[str, Callable[[], torch.Tensor]], settings: Settings) -> None:
    """Where kgopt looks slower both are timed again."""
    for name in ("kgopt", "kgopt_channels_last"):
        ratio = _ratio(rows, name)
        if ratio is not None and ratio > LIMIT:
            rival = _rival(name)
            look_again((rows[rival], rows[name]), (calls[rival], calls[name]), settings.device, settings.rep_ms)


def convs_summary(rows: list[Row]) -> str:
    """Ratios by dtype and memory format, and the worst of them: what is slower, ten at least."""
    kinds: dict[tuple[str, str], list[float]] = {}
    found, slow, wrong, unlike = [], 0, 0, 0
    for group in group_rows(rows):
        for name in ("kgopt", "kgopt_channels_last"):
            wrong += bool(group.rows.get(name, {}).get("out_of_tolerance"))
            ratio = _ratio(group.rows, name)
            if ratio is None:
                continue
            kinds.setdefault((group.dtype, _layout(name)), []).append(ratio)
            unlike += ratio < 1 / LIMIT
            slow += ratio > LIMIT
            ours, theirs = group.rows[name]["time_us"], group.rows[_rival(name)]["time_us"]
            cells = [group.case, group.dtype, _layout(name), time_text(ours), time_text(theirs), f"{ratio:.2f}"]
            found.append((ratio, cells))
    lines = [
        [
            dtype, layout, str(len(ratios)), ratio_text(1 / sorted(ratios)[len(ratios) // 2]),
            ratio_text(math.exp(-sum(map(math.log, ratios)) / len(ratios))), ratio_text(1 / min(ratios)),
            f"{max(ratios):.2f}", str(sum(ratio > LIMIT for ratio in ratios)),
        ]
        for (dtype, layout), ratios in sorted(kinds.items())
    ]  # fmt: skip
    header = ["dtype", "layout", "convolutions", "median", "mean", "best", "worst", f"over {LIMIT}"]
    parts = [table(header, lines, left=2)]
    if found:
        found.sort(key=lambda one: -one[0])
        most = min(20, max(10, slow))
        header = ["worst", "dtype", "layout", "kgopt", "cuDNN", "ratio"]
        parts += ["", table(header, [cells for _, cells in found[:most]], left=3)]
    measured = sum(map(len, kinds.values()))
    parts += ["", f"{measured} measurements: {unlike} faster than cuDNN, {slow} slower, {wrong} out of tolerance"]
    return "\n".join(parts)
