"""GroupNorm of small tensors as networks meet it: in a CUDA graph, x in L2, launches hidden.

    python benchmarks/warm_norms.py --json benchmarks/results/warm_norms/h200.json
    python benchmarks/warm_norms.py --compile

Suite groupnorm of ``bench`` empties L2 before each call, which is right for large tensors; a tensor of a few MB was
written by the kernel before. Shapes are those of ResNets and of diffusion U-Nets, in channels_last, where a group's
channels may be fewer than a sector has. Microseconds of a call among twenty of a graph, the best of four rows:
``kgopt`` (GroupNorm and ReLU), ``family`` that ran, ``eager``, and ``compile``, if that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from events import keep, parsed
from kgopt import functional

DTYPES = ("bfloat16", "float32")
CALLS = 20
SHAPES: list[tuple[tuple[int, ...], int]] = [
    ((1, 64, 112, 112), 32),
    ((1, 64, 56, 56), 32),
    ((1, 256, 56, 56), 32),
    ((1, 128, 28, 28), 32),
    ((1, 512, 28, 28), 32),
    ((1, 1024, 14, 14), 32),
    ((1, 2048, 7, 7), 32),
    ((2, 64, 64, 64), 32),
    ((2, 320, 64, 64), 32),
    ((2, 640, 32, 32), 32),
    ((2, 1280, 16, 16), 32),
    ((2, 1280, 8, 8), 32),
    ((2, 1920, 16, 16), 32),
    ((4, 96, 32, 32), 8),
    ((1, 96, 64, 64), 8),
    ((1, 48, 16, 40, 40), 6),
    ((1, 64, 16, 16, 16), 32),
    ((1, 32, 128, 128), 32),
]


def microseconds(call: Callable[[], Any]) -> float:
    """Of a call in a graph of them."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    times = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (3 * CALLS))
    return min(times)


def row_of(shape: tuple[int, ...], groups: int, dtype: torch.dtype, compiles: bool) -> dict[str, Any]:
    """What one shape takes."""
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=form)
    weight, bias = torch.rand(2, shape[1], device="cuda", dtype=dtype)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return F.relu(F.group_norm(x, groups, weight, bias))

    why = functional.explain_group_norm(x, groups, act="relu")
    row: dict[str, Any] = {"shape": shape, "groups": groups, "dtype": str(dtype).removeprefix("torch.")}
    row["family"] = why.split("; family ")[1].split(" ")[0]
    row["kgopt"] = microseconds(lambda: functional.group_norm(x, groups, weight, bias, act="relu"))
    row["eager"] = microseconds(lambda: plain(x))
    if compiles:
        torch.compiler.reset()  # or shapes count as recompilations, of which there may be eight
        compiled = torch.compile(plain, dynamic=False)
        row["compile"] = microseconds(lambda: compiled(x))
    return row


def main() -> None:
    """See the top."""
    args = parsed(__doc__, DTYPES, "shapes that contain this text", compiles="some 3 s a shape and dtype")
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for dtype in args.dtype or DTYPES:
            for shape, groups in SHAPES:
                name = "x".join(map(str, shape))
                if args.only not in name:
                    continue
                rows.append(row := row_of(shape, groups, getattr(torch, dtype), args.compile))
                times = ", ".join(f"{way} {row[way]:.2f}" for way in ("kgopt", "compile", "eager") if way in row)
                print(f"{dtype} {name} g{groups} ({row['family']}): {times}", flush=True)
                keep(args.json, rows, args.commit)


if __name__ == "__main__":
    main()
