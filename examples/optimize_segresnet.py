"""MONAI's SegResNet, made faster without touching its code: the report, and the time and output before and after.

    python examples/optimize_segresnet.py [--size 128] [--filters 32] [--channels-last auto]

Needs `pip install monai`. Runs on the CPU too, at small sizes.
"""

from __future__ import annotations

import argparse
import time

import torch

import kgopt


def milliseconds(model: torch.nn.Module, x: torch.Tensor, calls: int = 5) -> float:
    """The fastest of a few calls."""
    best = float("inf")
    for _ in range(calls + 1):  # the first also warms up
        start = time.perf_counter()
        model(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def main() -> None:
    try:
        from monai.networks.nets import SegResNet
    except ImportError:
        print("this example needs MONAI: pip install monai")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=128 if device == "cuda" else 32)
    parser.add_argument("--filters", type=int, default=32 if device == "cuda" else 8)
    parser.add_argument("--channels-last", choices=["auto", "yes", "no"], default="auto")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = SegResNet(spatial_dims=3, init_filters=args.filters, in_channels=4, out_channels=3).to(device).eval()
    x = torch.randn(1, 4, args.size, args.size, args.size, device=device)
    with torch.no_grad():
        expected, before = model(x), milliseconds(model, x)

        channels_last = {"auto": "auto", "yes": True, "no": False}[args.channels_last]
        kgopt.optimize(model, example_inputs=x, channels_last=channels_last, report=True)

        y, after = model(x), milliseconds(model, x)
    error = float((y - expected).norm() / expected.norm())
    print(f"\n{device}: {before:.2f} ms before, {after:.2f} ms after; outputs differ by {error:.1e} (relative 2-norm)")


if __name__ == "__main__":
    main()
