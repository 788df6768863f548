"""Convolutions at U-Nets' shapes, beside cuDNN: forward, both gradients, and a block around one.

    python benchmarks/engine.py [--json F] [--commit HASH]

For each shape and precision, in one run: cuDNN (autotuned, in both memory formats) and kgopt as it chooses by itself
("auto"), forward and the gradients of input and weight together; then GroupNorm -> ReLU -> convolution -> + x: kgopt's
GroupNorm with cuDNN, torch.compile in both memory formats, and the plain block through kgopt.optimize. All tensors are
channels_last where nothing else is said. Medians of the GPU's time, launches hidden, the L2 flushed before every call.
`apart` is the 2-norm of the difference to cuDNN's result (of the gradients: the larger of both), relative to it.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kgopt
import kgopt.nn
from kgopt.accuracy import relative_error
from kgopt.cli.environment import environment
from kgopt.cli.measure import DTYPES, gpu_time, precision_flags
from kgopt.cli.results import save_rows

# (batch, channels in and out, spatial, kernel)
SHAPES = (
    (1, 32, 32, (128, 128, 128), 3),
    (2, 32, 32, (96, 96, 96), 3),
    (1, 64, 64, (64, 64, 64), 3),
    (1, 32, 64, (80, 170, 170), 3),
    (1, 128, 128, (32, 32, 32), 3),
    (1, 128, 128, (17, 256, 256), 3),
    (1, 4, 32, (128, 128, 128), 3),
    (1, 64, 32, (96, 96, 96), 3),
    (4, 64, 64, (256, 256), 3),
)
BLOCKS = ((32, (128, 128, 128)), (64, (64, 64, 64)))  # channels, spatial


class Block(nn.Module):
    """GroupNorm, ReLU, convolution, residual."""

    def __init__(self, channels: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(8, channels)
        self.conv = nn.Conv3d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x + conv(relu(norm(x)))."""
        identity = x
        x = self.norm(x)
        x = F.relu(x)
        x = self.conv(x)
        return x + identity


def _format(x: Tensor, last: bool) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()] if last else torch.contiguous_format)


def _apart(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True))


def _row(what: str, shape: Any, precision: str, times: dict[str, float], apart: float, flops: float) -> dict[str, Any]:
    best = min(us for name, us in times.items() if name != "kgopt")
    row = {"suite": "engine", "case": what, "shape": list(shape), "dtype": precision}
    row |= {f"{name}_us": round(us, 1) for name, us in times.items()}
    row |= {"times_faster": round(best / times["kgopt"], 2), "apart": apart}
    row |= {"tflops": round(flops / times["kgopt"] * 1e-6, 1)}
    text = "  ".join(f"{name} {us:.0f}" for name, us in times.items())
    print(f"{what:<46} {precision:<5} {text}  us: {row['times_faster']:.2f} times, apart {apart:.1e}", flush=True)
    return row


def _convolutions(device: torch.device, precision: str) -> list[dict[str, Any]]:
    rows = []
    dtype = DTYPES[precision]
    for n, c_in, c_out, spatial, kernel in SHAPES:
        rank = len(spatial)
        conv, op = (F.conv2d, torch.ops.kgopt.conv2d) if rank == 2 else (F.conv3d, torch.ops.kgopt.conv3d)
        x = torch.randn(n, c_in, *spatial, device=device, dtype=dtype)
        w = torch.randn(c_out, c_in, *(kernel,) * rank, device=device, dtype=dtype) / (c_in * kernel**rank) ** 0.5
        padding = [kernel // 2] * rank
        times: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
        results: dict[str, list[Tensor]] = {}
        for name, last in (("cudnn_contiguous", False), ("cudnn", True), ("kgopt", True)):
            xs, ws = (_format(t, last).requires_grad_() for t in (x, w))

            def run(
                xs: Tensor = xs, ws: Tensor = ws, name: str = name, conv: Any = conv, op: Any = op, pad: Any = padding
            ) -> Tensor:
                return op(xs, ws, None, [1] * len(pad), pad) if name == "kgopt" else conv(xs, ws, padding=pad)

            with torch.no_grad():
                times["forward"][name] = gpu_time(run, device, 100.0).median_us
            y = run()
            dy = torch.randn(y.shape, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(1))
            dy = _format(dy, last)

            def back(y: Tensor = y, dy: Tensor = dy, xs: Tensor = xs, ws: Tensor = ws) -> Any:
                return torch.autograd.grad(y, (xs, ws), dy, retain_graph=True)

            times["backward"][name] = gpu_time(back, device, 100.0).median_us
            results[name] = [y.detach(), *back()]
        flops = 2.0 * n * c_in * c_out * kernel**rank * torch.Size(spatial).numel()
        apart = [_apart([a], [b]) for a, b in zip(results["kgopt"], results["cudnn"], strict=True)]
        label = f"conv {c_in}->{c_out} {n}x{'x'.join(map(str, spatial))}"
        rows.append(_row(label, x.shape, precision, times["forward"], apart[0], flops))
        rows.append(_row(label + " dgrad + wgrad", x.shape, precision, times["backward"], max(apart[1:]), 2 * flops))
    return rows


def _blocks(device: torch.device, precision: str) -> list[dict[str, Any]]:
    rows = []
    dtype = DTYPES[precision]
    for channels, spatial in BLOCKS:
        torch.manual_seed(0)
        plain = Block(channels, nn.GroupNorm).to(device, dtype).eval()
        ours = Block(channels, kgopt.nn.GroupNorm).to(device, dtype).eval()
        ours.load_state_dict(plain.state_dict())
        x = torch.randn(1, channels, *spatial, device=device, dtype=dtype)
        last = _format(x, True)
        ours.to(memory_format=torch.channels_last_3d)
        with torch.no_grad():
            optimized = kgopt.optimize(copy.deepcopy(plain), example_inputs=last, channels_last=True)
            compiled = torch.compile(copy.deepcopy(plain), dynamic=False)
            compiled_last = torch.compile(
                copy.deepcopy(plain).to(memory_format=torch.channels_last_3d),  # type: ignore[call-overload]
                dynamic=False,
            )
            ways: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
                "groupnorm_cudnn": (ours, last),
                "compile": (compiled, x),
                "compile_channels_last": (compiled_last, last),
                "kgopt": (optimized, last),
            }
            times = {}
            for name, (model, given) in ways.items():
                model(given)
                times[name] = gpu_time(lambda model=model, given=given: model(given), device, 100.0).median_us  # type: ignore[misc]
            apart = _apart([optimized(last)], [ours(last)])
        flops = 2.0 * channels * channels * 27 * torch.Size(spatial).numel()
        label = f"block of {channels} at {'x'.join(map(str, spatial))}"
        rows.append(_row(label, x.shape, precision, times, apart, flops))
    return rows


def main() -> None:
    """Measures, prints a line a case, and writes the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows here")
    parser.add_argument("--commit", metavar="HASH", help="kgopt's commit, for the rows")
    parser.add_argument("--dtype", default="tf32,bf16", help="precisions, comma-separated")
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.backends.cudnn.benchmark = True
    where = environment(device)
    if args.commit:
        where["commit"] = args.commit
    rows: list[dict[str, Any]] = []
    for precision in args.dtype.split(","):
        with precision_flags(precision):
            for measure in (_blocks, _convolutions):
                rows += [row | where for row in measure(device, precision)]
                if args.json:
                    save_rows(args.json, rows)


if __name__ == "__main__":
    main()
