"""What stands around a GroupNorm, each in one op, forward and backward, beside a copy.

    python benchmarks/around_norms.py --json benchmarks/results/around_norms/h200.json

A floor is what the tensors take that a call cannot do without, each at half the time of a copy of x: forward x, y, and
the residual; backward x, dy, dx, and the residual with its gradient. ``share``: the time over the floor. ``walked``
computes ReLU by the chain that kernels look up at run time (``clamp(0,1e30)``), ``relu`` by the instance that has it
compiled in. Microseconds of the GPU between events, the best of three rows of calls; all tensors are larger than 20 MB.

Bars: forward 1.25 of the floor for contiguous tensors, 1.4 in channels_last, backward 1.5; walked within 3 % of relu.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from events import busy
from kgopt import functional
from kgopt.cli.environment import environment

SHAPES = [
    ((1, 64, 96, 96, 96), 8, torch.bfloat16),
    ((1, 128, 17, 256, 256), 32, torch.bfloat16),
    ((2, 32, 128, 128, 128), 32, torch.bfloat16),
    ((16, 128, 128, 128), 32, torch.bfloat16),
    ((1, 64, 96, 96, 96), 8, torch.float32),
    ((16, 128, 128, 128), 32, torch.float32),
]
# Beside x: tensors of its size that the forward reads, and those that the backward reads and writes.
KINDS: dict[str, tuple[int, int]] = {
    "none": (0, 0),
    "relu": (0, 0),
    "walked": (0, 0),
    "silu": (0, 0),
    "leaky": (0, 0),
    "gelu": (0, 0),
    "residual": (1, 2),  # and LeakyReLU
    "residual_relu": (1, 2),
    "prelu": (0, 0),
    "modulated": (0, 0),  # by a scale and a shift of each sample and channel, then SiLU
}


def call_of(kind: str, x: torch.Tensor, groups: int) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """The op, and the tensors that it is given and whose gradients are taken."""
    n, c = x.shape[:2]
    weight, bias = torch.rand(2, c, device=x.device).add_(0.5)
    leaves = [x, weight, bias]
    if kind.startswith("residual"):
        leaves.append(torch.randn_like(x))
        after = "relu" if kind == "residual_relu" else "leaky_relu"
        return (lambda x, w, b, r: functional.group_norm(x, groups, w, b, 1e-5, after, r)), leaves
    if kind == "prelu":
        leaves.append(torch.rand(c, device=x.device).to(x.dtype))
        return (lambda x, w, b, s: functional.group_norm(x, groups, w, b, 1e-5, "prelu", slope=s)), leaves
    if kind == "modulated":
        leaves += [torch.randn(n, c, device=x.device, dtype=x.dtype) for _ in "ab"]
        return (lambda x, w, b, s, t: functional.group_norm(x, groups, w, b, 1e-5, "silu", scale=s, shift=t)), leaves
    act = {"walked": "clamp(0,1e30)", "leaky": "leaky_relu"}.get(kind, kind)
    return (lambda x, w, b: functional.group_norm(x, groups, w, b, 1e-5, act)), leaves


def rows_of(shape: tuple[int, ...], groups: int, dtype: torch.dtype, last: bool, kinds: list[str]) -> list[dict]:
    """A row for each kind."""
    formats = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = torch.randn(shape, device="cuda", dtype=dtype)
    x = x.contiguous(memory_format=formats if last else torch.contiguous_format)
    y = torch.empty_like(x)
    tensor = busy(lambda: y.copy_(x)) / 2
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        more, more_backward = KINDS[kind]
        call, leaves = call_of(kind, x, groups)
        row: dict[str, Any] = {"shape": shape, "groups": groups, "dtype": str(dtype)[6:], "channels_last": last}
        row |= {"kind": kind, "copy_us": 2 * tensor}
        with torch.no_grad():
            row["forward_us"] = busy(lambda call=call, leaves=leaves: call(*leaves))
        row["forward_share"] = row["forward_us"] / (tensor * (2 + more))
        given = [t.detach().requires_grad_() for t in leaves]
        z, dz = call(*given), torch.randn_like(x)
        row["backward_us"] = busy(lambda z=z, g=given, d=dz: torch.autograd.grad(z, g, d, retain_graph=True), 10)
        row["backward_share"] = row["backward_us"] / (tensor * (3 + more_backward))
        rows.append(row)
        del z, dz, given, leaves, call
    return rows


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of them (default: %(default)s)")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    found: dict[str, Any] = {"environment": environment(torch.device("cuda")), "rows": []}
    for shape, groups, dtype in SHAPES:
        for last in (False, True):
            rows = rows_of(shape, groups, dtype, last, kinds)
            found["rows"] += rows
            print(f"{shape} {str(dtype)[6:]} {'last' if last else 'contiguous'}: copy {rows[0]['copy_us']:.1f} us")
            for row in rows:
                forward = f"{row['forward_us']:8.1f} ({row['forward_share']:.2f})"
                backward = f"{row['backward_us']:9.1f} ({row['backward_share']:.2f})"
                print(f"  {row['kind']:13s}{forward}{backward}", flush=True)
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
