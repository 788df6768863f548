"""Convolutions of fp32 tensors in training where TF32 is allowed: in TF32, and in fp16 scaled by powers of two.

    python benchmarks/scaled_training.py --json benchmarks/results/scaled_half/h200_training.json
    python benchmarks/scaled_training.py --only 64,64

Microseconds of the GPU between events, the best of three rows of replays of a CUDA graph, channels_last. `tf32`:
kgopt's GroupNorm with ReLU, its conv2d or conv3d, and conv_backward, each as it chooses; `scaled`: scaled_half with the
norm, conv_scaled_half and conv_scaled_half_backward; with `apart` the convolution reads a tensor that no norm gives.
The norm's own backward, which is the same, is left out. `forecast` is what the pass over compiled graphs predicts of
both (`python/kgopt/rewrite/inductor/scaled.py`). `error`: of y, dx and dweight, relative to float64 in the 2-norm,
scaled over TF32's, where x has at most 2^25 elements.

Predictions (written before the first run, for an H200, forward and backward together): `scaled` takes 0.85 of `tf32` at
32 channels of 128^3, 0.75 at 64 of 64^3, 0.65 at 128 of 32^3, 0.6 at 256 of 16^3, 0.55 at 512 channels of images.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import events
import kgopt
from kgopt._layout import FORMATS
from kgopt.cli.environment import environment
from kgopt.rewrite.inductor import scaled

# Batch, channels in and out, sizes, kernel, stride, whether a norm is in front.
Shape = tuple[int, int, int, tuple[int, ...], int, int, bool]
SHAPES: list[Shape] = [
    (1, 32, 32, (128, 128, 128), 3, 1, True),
    (1, 64, 32, (128, 128, 128), 3, 1, False),
    (1, 32, 64, (128, 128, 128), 3, 2, True),
    (1, 64, 64, (64, 64, 64), 3, 1, True),
    (1, 128, 64, (64, 64, 64), 3, 1, False),
    (1, 64, 128, (64, 64, 64), 3, 2, True),
    (1, 128, 128, (32, 32, 32), 3, 1, True),
    (1, 256, 128, (32, 32, 32), 3, 1, False),
    (1, 256, 256, (16, 16, 16), 3, 1, True),
    (1, 512, 256, (16, 16, 16), 3, 1, False),
    (2, 320, 320, (8, 8, 8), 3, 1, True),
    (4, 48, 96, (32, 48, 40), 3, 1, True),
    (2, 64, 64, (256, 256), 3, 1, True),
    (4, 128, 128, (128, 128), 3, 1, True),
    (4, 256, 256, (64, 64), 3, 1, True),
    (8, 512, 512, (32, 32), 3, 1, True),
    (8, 512, 512, (32, 32), 3, 1, False),
    (4, 512, 512, (16, 16), 3, 1, True),
]
OPS = torch.ops.kgopt


def busy(call: Callable[[], Any]) -> float:
    """Microseconds of a call in a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return events.busy(graph.replay)


def relative(t: torch.Tensor, exact: torch.Tensor) -> float:
    """Error in the 2-norm."""
    return float((t.double() - exact).norm() / exact.norm())


def measure(shape: Shape) -> dict[str, Any]:
    """One row."""
    batch, c_in, c_out, sizes, kernel, stride, has_norm = shape
    rank = len(sizes)
    format = FORMATS[rank + 2]
    groups = 8 if has_norm else 0
    x = torch.randn(batch, c_in, *sizes, device="cuda").contiguous(memory_format=format)
    weight = torch.randn(c_out, c_in, *[kernel] * rank, device="cuda") / math.sqrt(c_in * kernel**rank)
    gamma, beta = torch.rand(c_in, device="cuda") + 0.5, torch.randn(c_in, device="cuda")
    of_norm = groups, gamma, beta, 1e-5, "relu"
    strides, padding, ones, zeros = [stride] * rank, [kernel // 2] * rank, [1] * rank, [0] * rank
    conv = OPS.conv2d if rank == 2 else OPS.conv3d
    mask = [True, True, False]

    def normalized() -> torch.Tensor:
        return OPS.group_norm_fwd(x, *of_norm, "none")[0] if groups else x  # type: ignore[no-any-return]

    def rounded() -> Any:
        return OPS.scaled_half(x, *of_norm) if groups else OPS.scaled_half(x)

    z = normalized()
    dy = torch.randn_like(conv(z, weight, None, strides, padding)) * 1e-3

    def backward(of: torch.Tensor = z, dy: torch.Tensor = dy, w: torch.Tensor = weight) -> Any:
        return OPS.conv_backward(dy, of, w, strides, padding, ones, zeros, 1, False, mask)

    half, inverse = rounded()[:2]
    geometry = strides, padding, ones
    row: dict[str, Any] = {"shape": shape}
    row["tf32 fwd"] = busy(lambda: conv(normalized(), weight, None, strides, padding))
    row["scaled fwd"] = busy(lambda: OPS.conv_scaled_half(*rounded()[:2], weight, None, None, *geometry))
    row["rounding"] = busy(rounded)
    row["tf32 bwd"] = busy(backward)
    row["scaled bwd"] = busy(lambda: OPS.conv_scaled_half_backward(dy, half, inverse, weight, *geometry, mask))
    row["gain"] = (row["tf32 fwd"] + row["tf32 bwd"]) / (row["scaled fwd"] + row["scaled bwd"])
    taps = kernel**rank
    row["forecast"] = scaled.predicted_gain(
        batch, c_in, c_out, taps, math.prod(sizes), math.prod(dy.shape[2:]), bool(groups), mask
    )
    if z.numel() <= 1 << 25:
        exact = (
            conv(z.double(), weight.double(), None, strides, padding),
            *backward(z.double(), dy.double(), weight.double())[:2],
        )
        ours = (
            OPS.conv_scaled_half(half, inverse, weight, None, None, *geometry),
            *OPS.conv_scaled_half_backward(dy, half, inverse, weight, *geometry, mask)[:2],
        )
        tf32 = conv(z, weight, None, strides, padding, backend="aten"), *backward()[:2]
        row["error"] = [relative(t, e) for t, e in zip(ours, exact, strict=True)]
        row["tf32 error"] = [relative(t, e) for t, e in zip(tf32, exact, strict=True)]
    return row


def show(row: dict[str, Any]) -> None:
    """Prints a row."""
    batch, c_in, c_out, sizes, kernel, stride, has_norm = row["shape"]
    name = f"{batch} {c_in}->{c_out} {'x'.join(map(str, sizes))} k{kernel} s{stride}{'' if has_norm else ' apart'}"
    times = " ".join(f"{row[k]:7.0f}" for k in ("tf32 fwd", "scaled fwd", "rounding", "tf32 bwd", "scaled bwd"))
    before, after = row["forecast"]
    errors = " ".join(f"{a / b:.2f}" for a, b in zip(row.get("error", []), row.get("tf32 error", []), strict=True))
    print(
        f"{name:34s} {times}  gain {row['gain']:.2f} forecast {before:.0f}/{after:.0f}={before / after:.2f}  {errors}"
    )


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="channels in and out")
    parser.add_argument("--commit", help="of kgopt, where it is no git checkout")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    found: dict[str, Any] = {"environment": environment(torch.device("cuda"), args.commit), "rows": []}
    print(f"kgopt {kgopt.__version__}: tf32 fwd, scaled fwd, rounding of it, tf32 bwd, scaled bwd; errors over TF32's")
    for shape in SHAPES:
        if args.only and args.only != f"{shape[1]},{shape[2]}":
            continue
        row = measure(shape)
        found["rows"].append(row)
        show(row)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
