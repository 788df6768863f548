"""What kgopt.optimize puts between norms in place of PyTorch's calls: pooling, resampling, padding, depthwise ways.

    python benchmarks/between.py --json benchmarks/results/between/h200.json
    python benchmarks/between.py --only pool --dtype bf16

Microseconds of the GPU between events, the best of three rows of calls, of PyTorch's call and of each way of kgopt's,
in both memory formats, and what the bytes of x and of the result take at the speed of a copy of x in the same run.
Below about 40 us all wait for the host.

Predictions (before the first run), in times of the bytes' at the copy's speed: pooling to 2 x 2 and 3 x 3 takes 1.3 to
3, by PyTorch 5 to 50, to 6 x 6 of small planes no less than PyTorch's; resampling to 2n - 1 takes 1.5 to 2.5, PyTorch's
of volumes 5 to 16; reflection in channels_last 1.2 to 2, PyTorch's with a copy to contiguous 3 to 8, of contiguous
images no less than PyTorch's; one tap 1.2 to 2. Two outputs a channel are 2 to 4 times as fast as PyTorch's in volumes,
and slower in images.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kgopt  # noqa: F401
from events import busy_of_few, keep, parsed
from kgopt._layout import FORMATS
from kgopt.rewrite import glue

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Kind, the function, its arguments after x (of a convolution the weight's sizes after the channels), sizes of x.
CASES: list[tuple[str, Any, tuple[Any, ...], tuple[int, ...]]] = [
    ("pool", F.adaptive_avg_pool2d, (2,), (4, 64, 512, 512)),
    ("pool", F.adaptive_avg_pool2d, (3,), (8, 512, 60, 80)),
    ("pool", F.adaptive_avg_pool2d, (6,), (8, 512, 60, 80)),
    ("pool", F.adaptive_avg_pool3d, (2,), (1, 64, 96, 96, 96)),
    ("pool", F.adaptive_avg_pool3d, ((2, 3, 3),), (2, 32, 48, 80, 80)),
    ("pool", F.avg_pool2d, (56,), (32, 256, 56, 56)),
    ("pool", F.avg_pool3d, (32,), (1, 64, 96, 96, 96)),
    ("pool", F.adaptive_max_pool2d, (1,), (32, 256, 56, 56)),
    ("pool", F.adaptive_max_pool3d, (2,), (1, 64, 96, 96, 96)),
    ("resize", F.interpolate, ((127, 127, 127),), (1, 32, 64, 64, 64)),
    ("resize", F.interpolate, ((97, 97, 65),), (2, 64, 48, 48, 32)),
    ("resize", F.interpolate, ((255, 255),), (8, 64, 128, 128)),
    ("pad", F.pad, ((3, 3, 3, 3), "reflect"), (4, 64, 256, 256)),
    ("pad", F.pad, ((1, 1, 1, 1), "reflect"), (4, 256, 64, 64)),
    ("pad", F.pad, ((1, 1, 1, 1, 1, 1), "reflect"), (1, 32, 96, 96, 96)),
    ("depthwise", F.conv2d, (1, 1, 1), (16, 256, 64, 64)),
    ("depthwise", F.conv3d, (1, 1, 1, 1), (1, 32, 128, 128, 128)),
    ("depthwise", F.conv2d, (2, 3, 3), (16, 128, 64, 64)),
    ("depthwise", F.conv3d, (2, 3, 3, 3), (1, 32, 96, 96, 96)),
]


def arguments(kind: str, given: tuple[Any, ...], x: Tensor) -> tuple[Any, ...]:
    """Those after x; of a convolution that keeps the size weight and bias, for so many outputs a channel."""
    if kind != "depthwise":
        return given
    times, *kernel = given
    channels = x.shape[1]
    weight = torch.randn(times * channels, 1, *kernel, device=x.device, dtype=x.dtype)
    bias = torch.randn(times * channels, device=x.device, dtype=x.dtype)
    return (weight, bias, 1, [k // 2 for k in kernel], 1, channels)


def measure(case: Any, dtype: str, last: bool) -> dict[str, Any]:
    """One row."""
    kind, function, given, sizes = case
    format = FORMATS[len(sizes)] if last else torch.contiguous_format
    x = torch.randn(sizes, device="cuda", dtype=DTYPES[dtype]).contiguous(memory_format=format)
    args = arguments(kind, given, x)
    y, copy = function(x, *args), torch.empty_like(x)

    call = glue.recognize(function, (x, *args), {})
    row: dict[str, Any] = {"kind": kind, "function": function.__name__, "sizes": sizes, "arguments": str(given)}
    row |= {"dtype": dtype, "channels_last": last, "torch": busy_of_few(lambda: function(x, *args))}
    row["floor"] = busy_of_few(lambda: copy.copy_(x)) * (x.numel() + y.numel()) / (2 * x.numel())
    row["ways"] = {} if call is None else {way: busy_of_few(lambda way=way: call.run(way)) for way in call.options}  # type: ignore[misc]
    return row


def main() -> None:
    args = parsed(__doc__, DTYPES, only="cases of this kind")
    torch.backends.cudnn.allow_tf32 = False
    rows = []
    for case in (case for case in CASES if args.only in ("", case[0])):
        for dtype in args.dtype or ("bf16", "fp32"):
            for last in (False, True):
                with torch.no_grad():
                    rows.append(row := measure(case, dtype, last))
                ways = "  ".join(f"{way} {us:.1f} ({row['torch'] / us:.2f})" for way, us in row["ways"].items())
                text = f"{row['function']} {list(row['sizes'])} {row['arguments']}"
                print(
                    f"{text:62s} {dtype} {'last' if last else 'cont'} floor {row['floor']:7.1f} torch "
                    f"{row['torch']:8.1f}  {ways}",
                    flush=True,
                )
                keep(args.json, rows, args.commit)


if __name__ == "__main__":
    main()
