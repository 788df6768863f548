"""A long run of an optimized model over changing shapes: does its memory grow?

    python benchmarks/soak.py --calls 200000
    python benchmarks/soak.py --seconds 60 --processes 2 --json soak.json

Two copies of a model, one as it is (eager PyTorch) and one optimized, get the same inputs: forward alone under no_grad,
and forward and backward, mixed, at shapes drawn anew from a few sizes of every dim, some of them seen once. After the
first calls (``--warm``) and at the end the memory is read, behind a call at one fixed shape: of the device, what live
tensors hold; of the host, the resident set. Passes if the device's memory is what it was, and the optimized model's
host memory has grown by at most ``--slack`` MiB more than eager's. The two run in separate processes, so that what one
leaves behind is not the other's: one after the other, or with ``--together`` at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import multiprocessing
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIB = 2**20


class Block(nn.Module):
    """Norm, activation, convolution, twice, and a residual."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, c_in), nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, c_out), nn.Conv2d(c_out, c_out, 3, padding=1)
        self.skip = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """``[N, c_in, H, W]`` to ``[N, c_out, H, W]``."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h


class Net(nn.Module):
    """A small U-Net: pooling, upsampling, concatenation, a Sequential of norm and activation, a narrow head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.inner, self.up = Block(width, 2 * width), Block(2 * width, 2 * width), Block(3 * width, width)
        self.head = nn.Sequential(nn.InstanceNorm2d(width, affine=True), nn.ReLU(), nn.Conv2d(width, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 3, H, W]`` to ``[N, 2, H, W]``; H and W even."""
        x = self.first(x)
        h = self.inner(self.down(F.max_pool2d(x, 2)))
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        return self.head(self.up(torch.cat((h, x), 1)))


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # free memory that malloc keeps does not count
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def live(device: torch.device) -> int:
    """Bytes of live tensors on the device."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    gc.collect()
    return torch.cuda.memory_allocated(device)


def shape(rng: random.Random, largest: int, step: int) -> tuple[int, int, int, int]:
    """One of a few; every hundredth one is of any size."""
    sizes = range(4, largest + 1, 2) if step % 100 == 99 else (8, 12, 16, largest)
    return rng.choice((1, 2, 3)), 3, rng.choice(sizes), rng.choice(sizes)


def run(optimized: bool, settings: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The calls of one of the two, and its memory after the first ones and after all."""
    torch.manual_seed(seed)
    torch.set_num_threads(settings.threads)
    device = torch.device(settings.device)
    model = Net(settings.width).to(device)
    fixed = torch.randn(2, 3, settings.largest, settings.largest, device=device)
    if optimized:
        import kgopt

        # As its users do: measured at an example, and at shapes that come later.
        kgopt.optimize(model, fixed, channels_last=settings.channels_last, measure=not settings.no_measure)
    rng = random.Random(seed)
    start, count = time.perf_counter(), 0
    before: dict[str, int] = {}

    def read() -> dict[str, int]:
        with torch.no_grad():
            model(fixed)  # what is kept of the last call has one size
        return {"device": live(device), "host": resident()}

    samples: list[int] = []
    while count < settings.calls and (
        count < settings.warm or not settings.seconds or time.perf_counter() - start < settings.seconds
    ):
        x = torch.randn(shape(rng, settings.largest, count), device=device)
        if rng.random() < 0.5:
            with torch.no_grad():
                model(x)
        else:
            model(x).square().mean().backward()
            model.zero_grad(set_to_none=True)
        del x
        count += 1
        if count == settings.warm:
            before = read()
            start = time.perf_counter()
        elif count % max(1, settings.calls // 20) == 0:
            samples.append(resident())
    after = read()
    return {
        "calls": count,
        "device_before": before["device"],
        "device_after": after["device"],
        "host_before": before["host"],
        "host_after": after["host"],
        "host_between": samples,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _send(pipe: Any, optimized: bool, settings: argparse.Namespace, seed: int) -> None:
    pipe.send(run(optimized, settings, seed))
    pipe.close()


def alone(optimized: bool, settings: argparse.Namespace, seed: int) -> tuple[Any, Any]:
    """Starts :func:`run` in a process of its own: the process, and where its result will be."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, optimized, settings, seed))
    process.start()
    sender.close()
    return process, receiver


def judge(eager: dict[str, Any], ours: dict[str, Any], slack: float) -> list[str]:
    """What is wrong; empty when nothing is."""
    wrong = []
    if ours["device_after"] != ours["device_before"]:
        grown = (ours["device_after"] - ours["device_before"]) / MIB
        wrong.append(f"device memory changed by {grown:+.2f} MiB")
    growth = [(r["host_after"] - r["host_before"]) / MIB for r in (eager, ours)]
    if growth[1] > max(growth[0], 0) + slack:
        wrong.append(f"host memory grew by {growth[1]:.1f} MiB, eager's by {growth[0]:.1f}")
    return wrong


def pair(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Every process's eager and optimized run."""
    out: list[dict[str, Any]] = [{"seed": settings.seed + i} for i in range(settings.processes)]
    kinds = {"eager": False, "optimized": True}

    def start(name: str) -> list[tuple[Any, Any]]:
        return [alone(kinds[name], settings, row["seed"]) for row in out]

    started = {name: start(name) for name in kinds} if settings.together else {}
    for name in kinds:
        for row, (process, receiver) in zip(out, started.get(name) or start(name), strict=True):
            try:
                row[name] = receiver.recv()
            except EOFError:
                process.join()
                raise RuntimeError(f"the {name} run ended with exit status {process.exitcode}") from None
            process.join()
        if settings.together or not settings.seconds:
            continue
        # As many calls of ours as eager made in the time, so that the two can be compared.
        settings = argparse.Namespace(**{**vars(settings), "calls": max(row[name]["calls"] for row in out)})
        settings.seconds = 0
    for row in out:
        row["wrong"] = judge(row["eager"], row["optimized"], settings.slack)
    return out


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200_000, help="of each of the two (default: 200,000)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0,
        help="end eager after so long, ours after as many calls; --together: each so long",
    )
    parser.add_argument("--warm", type=int, default=1000, help="calls before memory is read first (default: 1,000)")
    parser.add_argument("--processes", type=int, default=1, help="pairs side by side")
    parser.add_argument("--together", action="store_true", help="eager and optimized at the same time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=16, help="channels of the model (a multiple of 4)")
    parser.add_argument("--largest", type=int, default=32, help="largest height and width (even)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slack", type=float, default=5.0, help="MiB that host memory may grow more than eager's")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--no-measure", action="store_true", help="kgopt's ops at every site")
    parser.add_argument("--json", type=Path, help="where the results go, beside standard output")
    settings = parser.parse_args(arguments)
    if settings.warm >= settings.calls:
        parser.error(f"--warm is {settings.warm}, expected fewer than --calls {settings.calls}")
    return settings


def main(arguments: list[str] | None = None) -> int:
    """Runs, prints JSON and a verdict line; 1 where something grew."""
    settings = parse(arguments)
    rows = pair(settings)
    facts = {
        "torch": torch.__version__,
        "device": settings.device,
        "gpu": torch.cuda.get_device_name() if settings.device.startswith("cuda") else None,
        "settings": {k: v for k, v in vars(settings).items() if k != "json"},
        "pairs": rows,
    }
    text = json.dumps(facts, indent=2)
    print(text)
    if settings.json:
        settings.json.write_text(text + "\n")
    wrong = [f"process {i}: {w}" for i, row in enumerate(rows) for w in row["wrong"]]
    calls = min(row["optimized"]["calls"] for row in rows)
    print(f"FAILED: {'; '.join(wrong)}" if wrong else f"passed: {calls} calls, memory as it was")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
