"""Networks that wait for the host: eager, torch.compile, and kgopt.optimize with and without a CUDA graph.

    python benchmarks/graphs.py --json benchmarks/results/graphs/h200.json     all four networks
    python benchmarks/graphs.py --only BasicUNet --without-compile             no compiler's minutes

A time is that of a whole call by the clock, with the GPU idle before and after a row of calls: the median of rows.
MiB: what a call adds to the memory that is allocated, at its peak; and what stays reserved, for graphs above all. The
time limit (--seconds) is for all of it; a way that does not fit any more is left out, and the table says so.

Predictions (written before the first run, for an H200):

- UNet2DModel and BasicUNet wait for launches: eager and kgopt without a graph take 2 to 6 times as long as the GPU
  works. A graph brings both to the GPU's work. Compiled code lies in between, "reduce-overhead" beside kgopt's.
- SD 1.5's UNet at batch 2 in fp16: eager waits, too (some 2,000 launches, 20 to 30 ms); with a graph about 10 ms.
- AutoencoderKL's decoder of one 32x32 latent: a graph saves a fifth or more; at larger latents nothing.
- The check of what the model holds takes 0.1 ms or less for BasicUNet and 1 ms or less for SD 1.5's UNet, and is
  hidden where the calls before are still running.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kgopt
from kgopt.cli.environment import environment

MIB = 2**20


class Decode(nn.Module):
    """The decoder of an autoencoder as a call of the model."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """The image of a latent."""
        return self.vae.decode(z).sample


def unet2d() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=64, in_channels=4, out_channels=4, layers_per_block=2, block_out_channels=(64, 128, 128, 256),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return model, {"sample": torch.randn(4, 4, 64, 64), "timestep": torch.tensor(500), "return_dict": False}


def stable_diffusion() -> tuple[nn.Module, dict[str, Any]]:
    """UNet2DConditionModel's defaults are those of Stable Diffusion 1.5, but for the width of the text's embedding."""
    from diffusers import UNet2DConditionModel

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768).half()
    inputs = {
        "sample": torch.randn(2, 4, 64, 64).half(),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(2, 77, 768).half(),
        "return_dict": False,
    }
    return model, inputs


def basic_unet() -> tuple[nn.Module, dict[str, Any]]:
    from monai.networks.nets import BasicUNet

    return BasicUNet(spatial_dims=3, in_channels=1, out_channels=2), {"x": torch.randn(1, 1, 32, 32, 32)}


def autoencoder() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    return Decode(vae).half(), {"z": torch.randn(1, 4, 32, 32).half()}


NETWORKS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "BasicUNet 1x1x32^3 fp32": basic_unet,
    "UNet2DModel 4x4x64x64 fp32": unet2d,
    "AutoencoderKL decode 32x32 fp16": autoencoder,
    "SD 1.5 UNet 2x4x64x64 fp16": stable_diffusion,
}


def prepared(way: str, model: nn.Module, inputs: dict[str, Any]) -> nn.Module:
    """The model in one of the ways."""
    if way == "eager":
        return model
    if way.startswith("compile"):
        torch._dynamo.reset()
        mode = "reduce-overhead" if "reduce-overhead" in way else None
        return torch.compile(model, mode=mode, dynamic=False)
    return kgopt.optimize(model, inputs, cuda_graph=False if "no graph" in way else "auto")


def clock(call: Callable[[], Any], seconds: float = 1.0) -> float:
    """Milliseconds a call: the median over rows."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    rows: list[float] = []
    end = time.perf_counter() + seconds
    while len(rows) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(10):
            call()
        torch.cuda.synchronize()
        rows.append((time.perf_counter() - start) / 10)
    return statistics.median(rows) * 1e3


def measure(way: str, model: nn.Module, inputs: dict[str, Any], expected: torch.Tensor | None) -> dict[str, Any]:
    """One row."""
    gc.collect()
    torch.cuda.empty_cache()
    start, before = time.perf_counter(), torch.cuda.memory_reserved()
    run = prepared(way, model, inputs)

    def call() -> Any:
        if "reduce-overhead" in way:
            torch.compiler.cudagraph_mark_step_begin()
        return run(**inputs)

    ms = clock(call)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - before  # graphs, and what a compiled model keeps
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    y = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - allocated
    y = (y if isinstance(y, torch.Tensor) else y[0]).float().clone()
    row = {"way": way, "ms": ms, "mib_call": peak / MIB, "mib_held": held / MIB, "seconds": time.perf_counter() - start}
    row["y"] = y
    if expected is not None:
        row["error"] = float((y - expected).norm() / expected.norm())
    if way.startswith("kgopt"):
        report = kgopt.report(model)
        row |= {key: getattr(report, key) for key in ("graph", "glue", "layout", "clock")}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="part of a network's name")
    parser.add_argument("--without-compile", action="store_true", help="leave torch.compile out, which takes minutes")
    parser.add_argument("--seconds", type=float, default=115.0, help="for all of it")
    parser.add_argument("--json", type=Path, help="store the rows here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device; torch.cuda.is_available() is False")
    ways = ["eager", "kgopt, no graph", "kgopt", "compile", "compile reduce-overhead"]
    end, rows = time.perf_counter() + args.seconds, []
    facts = environment(torch.device("cuda", torch.cuda.current_device()))
    print(f"{'':34} {'way':24} {'ms':>9} {'MiB a call':>11} {'MiB held':>9} {'error':>9}")
    # What compiles comes last, so that a time limit leaves the rest.
    for compiles in (False, True):
        for name, make in NETWORKS.items():
            if args.only not in name or (compiles and args.without_compile):
                continue
            torch.manual_seed(0)
            model, given = make()
            model = model.cuda().eval()
            inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
            expected = None
            for way in [w for w in ways if w.startswith("compile") == compiles]:
                if time.perf_counter() > end - (25 if compiles else 0):
                    print(f"{name:34} {way:24} left out: no time")
                    continue
                with torch.no_grad():
                    # On a copy: what one way changes no other one sees.
                    row = measure(way, copy.deepcopy(model), inputs, expected)
                y = row.pop("y")
                expected = y if way == "eager" else expected
                rows.append({"network": name, **row})
                error = f"{row['error']:9.1e}" if "error" in row else ""
                print(
                    f"{name:34} {way:24} {row['ms']:9.3f} {row['mib_call']:11.1f} {row['mib_held']:9.1f} {error:>9}",
                    flush=True,
                )
                for key in ("graph", "glue", "layout", "clock"):
                    if row.get(key):
                        print(f"    {key}: {row[key]}")
                if args.json:  # after each row: a time limit from outside leaves the rows before it
                    args.json.parent.mkdir(parents=True, exist_ok=True)
                    args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
            del model


if __name__ == "__main__":
    main()
