"""Convolutions in groups: cuDNN's kernels, kgopt's, and a dense convolution with zeros between the groups.

    python benchmarks/grouped.py --json benchmarks/results/grouped/h200.json
    python benchmarks/grouped.py --only 32 --dtype bf16

Microseconds of the GPU between events, the best of three rows of calls, forward, without bias. `cudnn` is the op with
backend="aten", `own` with backend="kgopt", `dense` the option "dense" of kgopt.optimize: the weight is expanded at each
call, and kgopt chooses the convolution (backend="auto"). `bytes` is what x and y take to be read and written at 4.2
TB/s. Channels are as many before as behind. fp32 is TF32. Below about 40 us calls wait for the host, which the
expansion makes slower; `expand` is its part.

Predictions (written before this script's first run, after a look at one shape in bf16, for an H200): with 2 and 4
groups `dense` takes 0.2 to 0.5 of `cudnn` in bf16, 0.4 to 0.8 in TF32; with 8 groups about as long; with 32 groups and
kernels of 3 longer, with kernels of 1 not. Measured: the reverse. With 2 to 8 groups `cudnn` is faster; with 32
volumes in bf16 take 0.05 to 0.43 of its time (benchmarks/results/grouped).
"""

from __future__ import annotations

from typing import Any

import torch

import kgopt  # noqa: F401
from events import busy, busy_of_few, keep, parsed
from kgopt._layout import FORMATS
from kgopt.rewrite.glue import kernels

OPS = torch.ops.kgopt
# Batch, channels, sizes: by rank.
SHAPES = {2: (4, 128, (192, 192)), 3: (1, 128, (32, 64, 64))}
GROUPS = 2, 4, 8, 32
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32}
RATE = 4.2e6  # bytes of the memory in a microsecond


def measure(rank: int, groups: int, kernel: int, dtype: str, last: bool) -> dict[str, Any]:
    """One row."""
    batch, channels, sizes = SHAPES[rank]
    format = FORMATS[rank + 2] if last else torch.contiguous_format
    x = torch.randn(batch, channels, *sizes, device="cuda", dtype=DTYPES[dtype]).contiguous(memory_format=format)
    weight = torch.randn(channels, channels // groups, *[kernel] * rank, device="cuda", dtype=DTYPES[dtype])
    weight = weight.contiguous(memory_format=format)
    ones, zeros, padding = [1] * rank, [0] * rank, [kernel // 2] * rank
    op = getattr(OPS, f"conv{rank}d")

    def by(backend: str) -> torch.Tensor:
        return op(x, weight, None, ones, padding, ones, groups, backend=backend)  # type: ignore[no-any-return]

    def dense() -> torch.Tensor:
        wide = kernels.dense_weight(weight, groups, last)
        return OPS.conv_add(x, wide, None, None, ones, padding, ones, zeros, 1, False)  # type: ignore[no-any-return]

    row: dict[str, Any] = {"rank": rank, "groups": groups, "kernel": kernel, "dtype": dtype, "channels_last": last}
    row["cudnn"] = busy_of_few(lambda: by("aten"))
    try:
        row["own"] = busy_of_few(lambda: by("kgopt"))
    except RuntimeError:  # no kernel of kgopt's takes it
        row["own"] = None
    row["dense"], row["expand"] = busy_of_few(dense), busy(lambda: kernels.dense_weight(weight, groups, last))
    row["bytes"] = 2 * x.numel() * x.element_size() / RATE
    y, expected = dense(), by("aten")
    row["apart"] = float((y.double() - expected.double()).norm() / expected.double().norm())
    return row


def cases() -> list[tuple[Any, ...]]:
    """All in channels_last, and the contiguous ones of kernels of 3 in bf16."""
    found = [(r, g, k, d, True) for r in SHAPES for g in GROUPS for k in (1, 3) for d in DTYPES]
    return found + [(r, g, 3, "bf16", False) for r in SHAPES for g in GROUPS]


@torch.no_grad()
def main() -> None:
    args = parsed(__doc__, DTYPES, only="rows of so many groups")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    rows = []
    print("rank groups kernel  dtype  format     cudnn      own    dense   expand    bytes   cudnn/dense   apart")
    for rank, groups, kernel, dtype, last in cases():
        if (args.only and int(args.only) != groups) or (args.dtype and dtype not in args.dtype):
            continue
        rows.append(row := measure(rank, groups, kernel, dtype, last))
        times = [row["cudnn"], row["own"], row["dense"], row["expand"], row["bytes"]]
        text = " ".join("       -" if t is None else f"{t:8.1f}" for t in times)
        what = f"{rank:4d} {groups:6d} {kernel:6d}  {dtype:>5s}  {'last' if last else 'cont':>6s}  {text}"
        print(f"{what}   {row['cudnn'] / row['dense']:11.2f}   {row['apart']:.1e}", flush=True)
        keep(args.json, rows, args.commit)


if __name__ == "__main__":
    main()
