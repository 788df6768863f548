"""Nearest upsampling and the convolution behind it: eager PyTorch, torch.compile, kgopt.optimize, and the op by itself.

    python benchmarks/upsample_conv.py --json benchmarks/results/upsample_conv/h200.json
    python benchmarks/upsample_conv.py --without-compile --only "512,64,64"

A row is nn.Sequential(nn.Upsample, convolution with a kernel of 3, padding 1 and a bias) in one precision and memory
format. Microseconds of the GPU between events, the best of three rows of calls, without CUDA graphs. "folded" is the
transposed convolution with the sums of weights, "weights" the kernel that makes these sums, "apart" kgopt's upsampling
and PyTorch's convolution with kgopt's pass for the bias: "optimize" should be the smallest of these. "folded_aten" is
PyTorch's transposed convolution whatever kgopt's choice is.
`error`: of "folded" and of eager, relative to float64, on the first 24 positions of each dim.

Predictions (written before the first run, for an H200, channels_last):

- bf16 and fp16: "folded" takes 0.3 to 0.5 of eager's time at every shape with at least 128 channels, in 3D with factors
  of 2 in all dims 0.15 to 0.25, and 0.6 to 0.8 of "apart". "optimize" takes it there.
- TF32: 0.4 to 0.5 of eager's at most shapes; 512 channels at 128 x 128 lose (0.6 of eager's, 1.1 of "apart"), and
  "optimize" leaves that one apart.
- "weights": 3 to 10 us in channels_last up to 512 x 512 channels in 2D, up to 40 us in 3D (64 taps, 34 MB), twice that
  in the contiguous format.
- torch.compile upsamples as fast as kgopt and convolves as eager does: between eager and "apart".
- error: "folded" up to 1.4 times eager's in bf16 and fp16, equal in TF32.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kgopt
from events import busy
from kgopt.accuracy import relative_error
from kgopt.cli.environment import environment
from kgopt.rewrite.glue import kernels

# Batch, channels in and out, sizes, factors.
SHAPES: list[tuple[int, int, int, tuple[int, ...], tuple[int, ...]]] = [
    (1, 512, 512, (64, 64), (2, 2)),
    (1, 512, 512, (128, 128), (2, 2)),
    (1, 256, 256, (256, 256), (2, 2)),
    (2, 1280, 1280, (32, 32), (2, 2)),
    (4, 384, 192, (120, 208), (2, 2)),
    (8, 64, 32, (128, 128), (2, 2)),
    (1, 128, 128, (24, 32, 32), (2, 2, 2)),
    (1, 512, 512, (5, 32, 32), (2, 2, 2)),
    (1, 256, 256, (8, 64, 64), (1, 2, 2)),
    (2, 64, 32, (32, 32, 32), (2, 2, 2)),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}


def measure(shape: Any, precision: str, last: bool, with_compile: bool) -> dict[str, Any]:
    """One row."""
    batch, inputs, outputs, sizes, factors = shape
    formats = torch.channels_last if len(sizes) == 2 else torch.channels_last_3d
    format = formats if last else torch.contiguous_format
    conv = (nn.Conv2d if len(sizes) == 2 else nn.Conv3d)(inputs, outputs, 3, padding=1)
    model = nn.Sequential(nn.Upsample(scale_factor=tuple(map(float, factors))), conv)
    model = model.cuda().to(DTYPES[precision], memory_format=format).eval()
    x = torch.randn(batch, inputs, *sizes, device="cuda", dtype=DTYPES[precision]).contiguous(memory_format=format)
    weight, bias = conv.weight.detach(), conv.bias.detach()
    padding = (1,) * len(sizes)
    rest = ([1] * len(sizes), [1] * len(sizes), [1] * len(sizes), [0] * len(sizes))

    def folded(x: Any = x, how: str = "folded") -> torch.Tensor:
        return kernels.upsampled_conv(how, x, weight, bias, factors, padding, 1)

    def apart() -> torch.Tensor:
        up = kernels.upsample_nearest(x, factors)
        return torch.ops.kgopt.conv_add(up, weight, bias, None, *rest, 1, False, 1.0, "none")  # type: ignore[no-any-return]

    row: dict[str, Any] = {"shape": shape, "precision": precision, "channels_last": last}
    row["eager"] = busy(lambda: model(x))
    row["folded"], row["apart"] = busy(folded), busy(apart)
    row["folded_aten"] = busy(lambda: folded(x, "folded_aten"))
    row["weights"] = busy(lambda: torch.ops.kgopt.upsample_conv_weight(weight, factors, 1, last))
    if with_compile:
        torch._dynamo.reset()
        compiled = torch.compile(copy.deepcopy(model), dynamic=False)
        row["compile"] = busy(lambda: compiled(x))
    optimized = kgopt.optimize(copy.deepcopy(model), x, channels_last=False, cuda_graph=False)
    row["optimize"] = busy(lambda: optimized(x))
    report = kgopt.report(optimized)
    row["report"] = report.clock if report.slower else report.glue
    state = (
        kgopt.rewrite.glue.state_of(optimized[1]) if optimized[1] in kgopt.rewrite.glue.modules_of(optimized) else None
    )
    row["takes"] = [how for (kind, *_), how in state.faster.items() if kind == "upsampled"] if state else []
    part = x[:1]
    for dim in range(2, x.dim()):
        part = part.narrow(dim, 0, min(24, part.shape[dim]))
    part = part.contiguous(memory_format=format)
    exact = copy.deepcopy(model).double()(part.double())
    row["error"] = [relative_error(y, exact) for y in (folded(part), model(part))]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help='shapes whose text holds this, as "512,64,64" (channels in, sizes)')
    parser.add_argument("--precision", choices=list(DTYPES))
    parser.add_argument("--without-compile", action="store_true")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    rows = []
    for shape in SHAPES:
        if args.only and args.only != ",".join(map(str, (shape[1], *shape[3]))):
            continue
        for precision in [args.precision] if args.precision else DTYPES:
            for last in (True, False):
                with torch.no_grad():
                    row = measure(shape, precision, last, not args.without_compile)
                rows.append(row)
                times = "  ".join(f"{k} {v:.1f}" for k, v in row.items() if isinstance(v, float))
                errors = " ".join(f"{e:.1e}" for e in row["error"])
                form = "last" if last else "contiguous"
                print(f"{shape} {precision} {form}: {times}  {row['takes']}  error {errors}", flush=True)
                if args.json:
                    args.json.parent.mkdir(parents=True, exist_ok=True)
                    args.json.write_text(
                        json.dumps({"environment": environment(torch.device("cuda")), "rows": rows}, indent=1)
                    )


if __name__ == "__main__":
    main()
