"""act(GroupNorm(x) + r): kgopt's op beside eager PyTorch, torch.compile and a copy; and a residual U-Net's step.

    python benchmarks/norm_sums.py --json benchmarks/results/norm_sums/h200.json
    python benchmarks/norm_sums.py --without-compile --without-network

A floor is the time of a copy of x and r into y: 1.5 times that of x into y. Microseconds of the GPU between events, the
best of three rows. The network is nnU-Net's ResidualEncoderUNet (32 to 320 channels, blocks 1 3 4 6 6 6, InstanceNorm,
LeakyReLU), 2x1x128^3 under fp16 autocast: milliseconds of a step by the clock, MiB at the peak.

Predictions (written before the first run, for an H200): above 20 MB 1.25 of the floor for contiguous tensors that fit
on chip, 1.5 for channels_last, whose kernels for any chain hold less; larger tensors are read twice. Half of what
torch.compile takes. The network's step 0.65 of eager's.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from events import busy
from kgopt import functional
from kgopt.cli.environment import environment

SHAPES = [
    ((2, 32, 64, 64, 64), 32),
    ((1, 64, 96, 96, 96), 8),
    ((2, 32, 128, 128, 128), 8),
    ((8, 256, 64, 64), 32),
    ((16, 128, 128, 128), 32),
    ((2, 64, 32, 32, 32), 64),
]


def plain(x: torch.Tensor, r: torch.Tensor, g: int, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """PyTorch's code."""
    return F.leaky_relu(F.group_norm(x, g, w, b) + r, 0.01)


def op_rows(with_compile: bool) -> list[dict[str, Any]]:
    rows = []
    for shape, groups in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for last in (False, True):
                formats = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
                format = formats if last else torch.contiguous_format
                x, r = (torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=format) for _ in "xr")
                w, b = torch.randn(2, shape[1], device="cuda", dtype=dtype)
                y, dy = torch.empty_like(x), torch.randn_like(x)

                def ours(x: Any = x, r: Any = r, w: Any = w, b: Any = b, groups: int = groups) -> torch.Tensor:
                    return functional.group_norm(x, groups, w, b, 1e-5, "leaky_relu(0.01)", r)

                row: dict[str, Any] = {"shape": shape, "groups": groups, "dtype": str(dtype)[6:], "channels_last": last}
                row["floor"] = 1.5 * busy(lambda y=y, x=x: y.copy_(x))
                row["kgopt"] = busy(ours)
                row["eager"] = busy(lambda a=(x, r, groups, w, b): plain(*a))
                if with_compile:
                    torch._dynamo.reset()
                    compiled = torch.compile(plain, dynamic=False)
                    row["compile"] = busy(lambda f=compiled, a=(x, r, groups, w, b): f(*a))
                leaves = [t.detach().clone().requires_grad_() for t in (x, r)]

                def step(f: Any, leaves: Any = leaves, dy: Any = dy) -> None:
                    torch.autograd.grad(f(*leaves), leaves, dy)

                row["kgopt step"] = busy(lambda s=step, o=ours: s(o), 8)

                def eager(x: Any, r: Any, groups: int = groups, w: Any = w, b: Any = b) -> torch.Tensor:
                    return plain(x, r, groups, w, b)

                row["eager step"] = busy(lambda s=step, e=eager: s(e), 8)
                rows.append(row)
                times = "  ".join(f"{k} {v:.1f}" for k, v in row.items() if isinstance(v, float))
                print(f"{shape} {row['dtype']} {'last' if last else 'contiguous'}: {times}", flush=True)
    return rows


def network_rows(with_compile: bool) -> list[dict[str, Any]]:
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet

    affine = {"eps": 1e-5, "affine": True}
    model = ResidualEncoderUNet(
        1, 6, (32, 64, 128, 256, 320, 320), nn.Conv3d, 3, (1, 2, 2, 2, 2, 2), (1, 3, 4, 6, 6, 6), 3, (1, 1, 1, 1, 1),
        conv_bias=True, norm_op=nn.InstanceNorm3d, norm_op_kwargs=affine, nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
    ).cuda()  # fmt: skip
    x = torch.randn(2, 1, 128, 128, 128, device="cuda")
    ways: dict[str, Callable[[Any], Any]] = {
        "eager": lambda m: m,
        "optimize": lambda m: kgopt.optimize(m, measure=False),
        "optimize, channels_last": lambda m: kgopt.optimize(m, measure=False, channels_last=True),
    }
    if with_compile:
        ways["compile"] = torch.compile
    rows = []
    for way, prepare in ways.items():
        m = prepare(copy.deepcopy(model))

        def step(m: Any = m) -> None:
            with torch.autocast("cuda", torch.float16):
                loss = m(x).float().square().mean()
            loss.backward()
            m.zero_grad(set_to_none=True)

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(8):
            step()
        torch.cuda.synchronize()
        row = {
            "way": way,
            "ms": (time.perf_counter() - start) / 8 * 1e3,
            "MiB": torch.cuda.max_memory_allocated() / 2**20,
        }
        rows.append(row)
        print(f"ResidualEncoderUNet step, {way}: {row['ms']:.1f} ms, {row['MiB']:.0f} MiB", flush=True)
        del m, step
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--without-compile", action="store_true")
    parser.add_argument("--without-network", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {"environment": environment(torch.device("cuda")), "ops": op_rows(not args.without_compile)}
    if not args.without_network:
        found["network"] = network_rows(not args.without_compile)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
