"""Decoders of video autoencoders, optimized: with padding and joins that wait for their convolution, and as they stand.

    python benchmarks/padded_decoders.py --json benchmarks/results/padded_decoders/h200.json
    python benchmarks/padded_decoders.py --only "Wan VAE" --frames 5

A row is a decoder of the zoo (diffusers) in bf16. Milliseconds by the clock of the model as it came, optimized with
padding as its code has it, and optimized; the last two without and with CUDA graphs. `--frames`: of the latent.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import torch

import kgopt
from kgopt.cli.environment import environment
from kgopt.cli.networks import zoo
from kgopt.rewrite.measure import clocks
from kgopt.rewrite.waiting import padding

NAMES = ("Wan VAE", "Wan 2.2 VAE", "QwenImage VAE", "Cosmos VAE")


def measure(name: str, frames: int) -> dict[str, Any]:
    """One row."""
    device = torch.device("cuda")
    row: dict[str, Any] = {"case": name}
    with zoo.find_network(name).built(device) as model, torch.no_grad():
        model = model.bfloat16()
        (z,) = zoo.find_network(name).arguments(device, torch.bfloat16)
        if frames and z.shape[2] > 1:
            z = torch.randn(*z.shape[:2], frames, *z.shape[3:], device=device, dtype=z.dtype)
        row["shape"], expected = list(z.shape), model(z)
        row["eager"] = seconds(lambda: model(z))
        for graph in (False, True):
            for waits in (False, True):
                kgopt.forget()
                kind = ("waits" if waits else "stands") + ("_graph" if graph else "")
                with contextlib.nullcontext() if waits else padding.as_it_stands():
                    fast = kgopt.optimize(copy.deepcopy(model), z, cuda_graph=graph)
                    row[kind] = seconds(lambda fast=fast: fast(z))  # type: ignore[misc]
                    row[f"{kind}_differs"] = float((fast(z) - expected).norm() / expected.norm())
                    row[f"{kind}_layout"] = kgopt.report(fast).layout
                del fast
                torch.cuda.empty_cache()
    return row


def seconds(function: Any) -> float:
    """Milliseconds of a call, the best of five."""
    device = torch.device("cuda")
    for _ in range(2):
        function()
    return round(min(clocks.seconds_once(function, device) for _ in range(5)) * 1e3, 3)


def main() -> None:
    """Prints the rows, and writes them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="names that hold this")
    parser.add_argument("--frames", type=int, default=0)
    options = parser.parse_args()
    rows = []
    for name in NAMES:
        if options.only in name:
            rows.append(measure(name, options.frames))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"environment": environment(torch.device("cuda")), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
