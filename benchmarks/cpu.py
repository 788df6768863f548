"""kgopt against eager PyTorch on the CPU: one row a case, and how many times faster kgopt is.

    python benchmarks/cpu.py                          # every row
    python benchmarks/cpu.py --only "group_norm .*bf16" --json F --threads 1

The two are called in turn, and the fastest call of each counts: other programs make a call slower, never faster.
Exits with 1 when a row is more than --slack slower than PyTorch.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kgopt import functional, reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NORM_SHAPES = {"16x64x56x56, 8 groups": ((16, 64, 56, 56), 8), "1x32x32x64x64, 4 groups": ((1, 32, 32, 64, 64), 4)}
NORM_ACTS = ["none", "relu", "silu", "gelu", "mish"]
SMALL = ((2, 32, 16, 16), 8)  # what a call costs besides arithmetic
REDUCTIONS = {"4x64x112x112": ((4, 64, 112, 112), [[1], [2, 3], [0, 2, 3], [1, 2, 3], []])}

Case = tuple[str, Callable[[], Any], Callable[[], Any]]


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "contiguous":
        return x
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def forward_and_backward(name: str, ours: Callable, theirs: Callable, tensors: list[Tensor]) -> Iterator[Case]:
    """The forward without gradients, and the backward alone."""

    def without_gradient(run: Callable) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return run(*tensors)

        return call

    yield f"{name}, forward", without_gradient(ours), without_gradient(theirs)

    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    dy: Tensor | None = None

    def backward(run: Callable) -> Callable[[], Any]:
        nonlocal dy
        y = run(*leaves)
        dy = torch.randn_like(y) if dy is None else dy
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    yield f"{name}, backward", backward(ours), backward(theirs)


def training_step(name: str, ours: Callable, theirs: Callable, tensors: list[Tensor]) -> Case:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    dy = torch.randn_like(theirs(*leaves))

    def step(run: Callable) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(run(*leaves), leaves, dy)

    return f"{name}, training step", step(ours), step(theirs)


def norm_cases() -> Iterator[Case]:
    for title, (shape, groups) in {**NORM_SHAPES, "2x32x16x16, 8 groups": SMALL}.items():
        for layout in ("contiguous", "channels_last"):
            for dtype in ("fp32", "bf16", "fp16"):
                for act in NORM_ACTS if dtype != "fp16" else ["silu"]:
                    x = laid_out(torch.randn(shape).to(DTYPES[dtype]), layout)
                    weight, bias = (torch.randn(shape[1]).to(DTYPES[dtype]) for _ in range(2))
                    yield from forward_and_backward(
                        f"group_norm {title}, {layout}, {dtype}, {act}",
                        lambda x, w, b, g=groups, a=act: functional.group_norm(x, g, w, b, act=a),
                        lambda x, w, b, g=groups, a=act: reference.group_norm_ref(x, g, w, b, act=a),
                        [x, weight, bias],
                    )


def activation_cases() -> Iterator[Case]:
    for act in (a for a in reference.ACTIVATIONS if a != "none"):
        for dtype in ("fp32", "bf16"):
            yield from forward_and_backward(
                f"activation 3.2 M, {dtype}, {act}",
                lambda x, a=act: functional.activation(x, a),
                lambda x, a=act: reference.activation_ref(x, a),
                [(torch.randn(3211264) * 2).to(DTYPES[dtype])],
            )


def reduction_cases() -> Iterator[Case]:
    for title, (shape, every) in REDUCTIONS.items():
        for layout in ("contiguous", "channels_last"):
            for dtype in ("fp32", "bf16"):
                x = laid_out(torch.randn(shape).to(DTYPES[dtype]), layout)
                for dims in every:
                    axes = dims or list(range(len(shape)))
                    for op in ("mean", "logsumexp"):
                        yield from forward_and_backward(
                            f"{op} {title} over {axes}, {layout}, {dtype}",
                            lambda x, op=op, d=axes: getattr(functional, op)(x, d),
                            lambda x, op=op, d=axes: getattr(torch, op)(x, d),
                            [x],
                        )


def pipeline_cases() -> Iterator[Case]:
    shapes = {
        "conv3d_group_norm_mean": ((8, 3, 24, 32, 32), (24, 3, 3, 3, 3), 8),
        "conv_transpose3d_relu_group_norm": ((1, 64, 16, 32, 32), (64, 128, 3, 3, 3), 8),
        "conv2d_group_norm_tanh_hardswish_residual_logsumexp": ((8, 8, 128, 128), (64, 8, 3, 3), 16),
    }
    for name, (shape, weight, groups) in shapes.items():
        for layout in ("contiguous", "channels_last"):
            for dtype in ("fp32", "bf16"):
                c_out = weight[1] if "transpose" in name else weight[0]
                tensors = [torch.randn(s).to(DTYPES[dtype]) for s in (shape, weight, (c_out,), (c_out,), (c_out,))]
                tensors[0] = laid_out(tensors[0], layout)
                ours, theirs = (
                    lambda x, w, b, gw, gb, f=f, g=groups: f(x, w, b, g, gw, gb)
                    for f in (getattr(functional, name), getattr(reference, f"{name}_ref"))
                )
                title = f"{name} {'x'.join(map(str, shape))}, {layout}, {dtype}"
                forward, _ = forward_and_backward(title, ours, theirs, tensors)
                yield forward
                yield training_step(title, ours, theirs, tensors)


def measure(ours: Callable[[], Any], theirs: Callable[[], Any], seconds: float) -> tuple[float, float, int]:
    """Fastest call of each, in seconds, and how often each was called."""
    ours(), theirs()
    best, calls, end = [float("inf"), float("inf")], 0, time.perf_counter() + seconds
    while calls < 5 or time.perf_counter() < end:
        for i, run in enumerate((ours, theirs)):
            start = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - start)
        calls += 1
    return best[0], best[1], calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="regular expression that a row's name must contain")
    parser.add_argument("--json", type=Path, help="store the rows here")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads")
    parser.add_argument("--seconds", type=float, default=0.4, help="time for a row")
    parser.add_argument("--slack", type=float, default=0.05, help="how much slower than PyTorch is still noise")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows, slower = [], 0
    print(f"{'':88} {'kgopt ms':>10} {'torch ms':>10} {'speedup':>8}")
    for cases in (norm_cases, activation_cases, reduction_cases, pipeline_cases):
        for name, ours, theirs in cases():
            if not re.search(args.only, name):
                continue
            mine, torchs, calls = measure(ours, theirs, args.seconds)
            is_slower = mine > torchs * (1 + args.slack)
            if is_slower:  # once more, in case something else ran meanwhile
                again = measure(ours, theirs, 2 * args.seconds)
                mine, torchs = min(mine, again[0]), min(torchs, again[1])
                is_slower = mine > torchs * (1 + args.slack)
            slower += is_slower
            mark = "  slower" if is_slower else ""
            print(f"{name:88} {mine * 1e3:10.3f} {torchs * 1e3:10.3f} {torchs / mine:8.2f}{mark}", flush=True)
            rows.append({"name": name, "kgopt_ms": mine * 1e3, "torch_ms": torchs * 1e3, "calls": calls})
    print(f"{len(rows)} rows, {slower} slower than PyTorch")
    if args.json:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.processor()}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
