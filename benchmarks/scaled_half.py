"""A GroupNorm, SiLU and a wide convolution in fp32 where TF32 is allowed: in TF32, and in fp16 scaled by powers of two.

    python benchmarks/scaled_half.py --json benchmarks/results/scaled_half/h200.json
    python benchmarks/scaled_half.py --only 512,64,64

Microseconds of the GPU between events, the best of three rows of calls, channels_last, without CUDA graphs. `eager` is
PyTorch's, `tf32` kgopt's norm and conv_add of PyTorch's convolution, `scaled` the one op with
backend="kgopt:scaled_half"; `sum` the same with a residual, `alone` without the norm. `tf32 conv` and `fp16 conv` are
PyTorch's convolutions by themselves, without bias: what there is to gain. `optimize` is kgopt.optimize's choice.
`error`: relative to float64, of "scaled" and of eager, on the first 24 positions of each dim.

Predictions (written before the first run, for an H200): `scaled` takes 0.6 to 0.75 of `tf32` at 128 channels and more,
0.9 to 1.1 at 64 channels of a volume, where passes over memory take as long as products. Its error is 1.2 times TF32's.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from events import busy
from kgopt import accuracy, ops
from kgopt._layout import FORMATS
from kgopt.cli.environment import environment
from kgopt.rewrite import glue
from kgopt.rewrite.glue import kernels, search

# Batch, channels, sizes.
SHAPES: list[tuple[int, int, tuple[int, ...]]] = [
    (1, 128, (17, 256, 256)),
    (1, 128, (512, 512)),
    (1, 256, (512, 512)),
    (2, 512, (64, 64)),
    (8, 512, (64, 64)),
    (1, 64, (128, 128, 128)),
    (1, 256, (32, 32, 32)),
]
GROUPS = 32


def measure(shape: Any) -> dict[str, Any]:
    """One row."""
    batch, channels, sizes = shape
    rank = len(sizes)
    format = FORMATS[rank + 2]
    conv = (nn.Conv2d if rank == 2 else nn.Conv3d)(channels, channels, 3, padding=1)
    norm = nn.GroupNorm(GROUPS, channels)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    nn.init.normal_(norm.bias)
    model = nn.Sequential(norm, nn.SiLU(), conv).cuda().to(memory_format=format).eval()
    x = torch.randn(batch, channels, *sizes, device="cuda").contiguous(memory_format=format)
    residual, half, half_weight = torch.randn_like(x), x.half(), conv.weight.half()
    of_norm = GROUPS, norm.weight, norm.bias, norm.eps, "silu"
    ones, zeros = [1] * rank, [0] * rank
    geometry = ones, ones, ones, zeros, 1, False, 1.0, "none"

    def scaled(x: torch.Tensor = x, residual: torch.Tensor | None = None) -> torch.Tensor:
        args = x, None, *of_norm, conv.weight, conv.bias, residual, *geometry
        return torch.ops.kgopt.group_norm_conv(*args, backend=ops.SCALED_HALF)  # type: ignore[no-any-return]

    def tf32(residual: torch.Tensor | None = None) -> torch.Tensor:
        args = x, None, *of_norm, conv.weight, conv.bias, residual, *geometry
        return torch.ops.kgopt.group_norm_conv(*args)  # type: ignore[no-any-return]

    convolve: Any = F.conv2d if rank == 2 else F.conv3d
    row: dict[str, Any] = {"shape": shape}
    row["eager"], row["tf32"], row["scaled"] = busy(lambda: model(x)), busy(tf32), busy(scaled)
    row["tf32 sum"], row["scaled sum"] = busy(lambda: tf32(residual)), busy(lambda: scaled(x, residual))
    row["tf32 alone"] = busy(lambda: torch.ops.kgopt.conv_add(x, conv.weight, conv.bias, None, *geometry))
    row["scaled alone"] = busy(lambda: kernels.scaled(x, conv.weight, conv.bias, None, *geometry))
    row["tf32 conv"] = busy(lambda: convolve(x, conv.weight, None, padding=1))
    row["fp16 conv"] = busy(lambda: convolve(half, half_weight, None, padding=1))
    optimized = kgopt.optimize(copy.deepcopy(model), x, channels_last=True, cuda_graph=False)
    row["optimize"] = busy(lambda: optimized(x))
    report = kgopt.report(optimized)
    row["report"] = report.clock if report.slower else report.glue
    is_glued = optimized[2] in glue.modules_of(optimized)
    row["takes"] = list(glue.state_of(optimized[2]).faster.values()) if is_glued else []
    part = search.corner(x)
    with accuracy.no_autotuning():
        exact = copy.deepcopy(model).double()(part.double())
    row["error"] = [accuracy.relative_error(y, exact) for y in (scaled(part), model(part))]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help='the shape whose channels and sizes these are, as "512,64,64"')
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    rows = []
    for shape in SHAPES:
        if args.only and args.only != ",".join(map(str, (shape[1], *shape[2]))):
            continue
        with torch.no_grad():
            row = measure(shape)
        rows.append(row)
        times = "  ".join(f"{k} {v:.0f}" for k, v in row.items() if isinstance(v, float))
        errors = " ".join(f"{e:.2e}" for e in row["error"])
        print(f"{shape}: {times}  {row['takes']}  error {errors}", flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({"environment": environment(torch.device("cuda")), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
