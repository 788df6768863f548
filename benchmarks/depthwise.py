"""Depthwise convolutions and their gradients: kgopt's kernels beside PyTorch's.

    python benchmarks/depthwise.py --json benchmarks/results/depthwise/h200.json
    python benchmarks/depthwise.py --only MedNeXt --dtype bf16

Microseconds of the GPU between events, the best of three rows of calls, for the result, dx and dweight, in both
memory formats; below about 40 us both wait for the host. "auto" says what kgopt's ops take, "predicted" what the plan
expects. Volumes are those of MedNeXt, images those of ConvNeXt, MobileNet and EfficientNet.

Predictions (written before this script's first run, after a first look at fourteen of the shapes): volumes 3 to 30
times as fast as PyTorch, more in channels_last; contiguous images 1.3 to 3 times, but planes of 14 x 14 and below
slower, which "auto" leaves to PyTorch at 7 x 7; images in channels_last between 0.7 and 1.3 in half types, 1 to 2.5 in
fp32. Dilated ones (before their first run; a drawn network had shown 5 ms of cuDNN's for 0.1 ms of bytes): 5 to 20
times as fast in channels_last images, 3 to 30 in volumes, 0.7 to 2 in contiguous images, whose rows come by elements;
with 27 passes launches count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kgopt  # noqa: F401
from events import busy_of_few, keep, parsed
from kgopt._layout import FORMATS

OPS = torch.ops.kgopt
# Name, batch, channels, sizes, kernel, stride, transposed; where it is not 1, the dilation.
SHAPES: list[tuple[Any, ...]] = [
    ("MedNeXt", 1, 32, (128, 128, 128), 3, 1, False),
    ("MedNeXt", 1, 32, (128, 128, 128), 5, 1, False),
    ("MedNeXt", 2, 64, (64, 64, 64), 3, 1, False),
    ("MedNeXt", 2, 128, (32, 32, 32), 5, 1, False),
    ("MedNeXt", 2, 256, (16, 16, 16), 3, 1, False),
    ("MedNeXt", 2, 512, (8, 8, 8), 5, 1, False),
    ("MedNeXt", 1, 32, (128, 128, 128), 3, 2, False),
    ("MedNeXt", 2, 64, (64, 64, 64), 5, 2, False),
    ("MedNeXt", 1, 64, (64, 64, 64), 3, 2, True),
    ("MedNeXt", 2, 128, (32, 32, 32), 5, 2, True),
    ("large", 1, 64, (64, 64, 64), 7, 1, False),
    ("large", 4, 16, (144, 144, 144), 5, 2, False),
    ("ConvNeXt", 32, 96, (56, 56), 7, 1, False),
    ("ConvNeXt", 32, 192, (28, 28), 7, 1, False),
    ("ConvNeXt", 32, 384, (14, 14), 7, 1, False),
    ("ConvNeXt", 32, 768, (7, 7), 7, 1, False),
    ("MobileNet", 32, 32, (112, 112), 3, 1, False),
    ("EfficientNet", 32, 96, (112, 112), 3, 2, False),
    ("EfficientNet", 32, 144, (56, 56), 5, 2, False),
    ("EfficientNet", 32, 240, (28, 28), 5, 1, False),
    ("EfficientNet", 32, 672, (14, 14), 5, 1, False),
    ("EfficientNet", 32, 1152, (7, 7), 3, 1, False),
    ("dilated", 8, 64, (56, 56), 7, 1, False, 3),
    ("dilated", 8, 256, (28, 28), 7, 1, False, 3),
    ("dilated", 8, 16, (449, 449), 5, 1, False, 2),
    ("dilated", 4, 512, (33, 33), 3, 1, False, 4),
    ("dilated", 2, 64, (128, 128), 3, 1, False, 2),
    ("dilated", 1, 32, (96, 96, 96), 3, 1, False, 2),
    ("dilated", 2, 64, (32, 32, 32), 7, 1, False, 3),
    ("dilated", 1, 16, (64, 64, 64), 5, 1, False, 2),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def measure(shape: Any, dtype: str, last: bool) -> dict[str, Any]:
    """One row."""
    _, batch, channels, sizes, kernel, stride, transposed, *dilation = shape
    rank, (apart,) = len(sizes), dilation or [1]
    format = FORMATS[rank + 2] if last else torch.contiguous_format
    x = torch.randn(batch, channels, *sizes, device="cuda", dtype=DTYPES[dtype]).contiguous(memory_format=format)
    weight = torch.randn(channels, 1, *[kernel] * rank, device="cuda", dtype=DTYPES[dtype])
    strides, padding, apart = [stride] * rank, [apart * (kernel // 2)] * rank, [apart] * rank
    extra = [stride - 1 if transposed else 0] * rank
    geometry = (strides, padding, apart, extra, channels, transposed)

    def ours() -> Tensor:
        if transposed:
            op = getattr(OPS, f"conv_transpose{rank}d")
            return op(x, weight, None, strides, padding, extra, channels, apart, backend="kgopt")  # type: ignore[no-any-return]
        return getattr(OPS, f"conv{rank}d")(x, weight, None, strides, padding, apart, channels, backend="kgopt")  # type: ignore[no-any-return]

    def theirs() -> Tensor:
        if transposed:
            return getattr(F, f"conv_transpose{rank}d")(x, weight, None, strides, padding, extra, channels, apart)  # type: ignore[no-any-return]
        return getattr(F, f"conv{rank}d")(x, weight, None, strides, padding, apart, channels)  # type: ignore[no-any-return]

    dy = torch.randn_like(theirs())

    def gradient(which: int, backend: str) -> Callable[[], Any]:
        mask = [which == 0, which == 1, False]
        return lambda: OPS.conv_backward(dy, x, weight, *geometry, mask, backend=backend)

    row: dict[str, Any] = {"shape": shape, "dtype": dtype, "channels_last": last}
    row["y"] = [busy_of_few(ours), busy_of_few(theirs)]
    row["dx"], row["dweight"] = ([busy_of_few(gradient(i, backend)) for backend in ("kgopt", "aten")] for i in (0, 1))
    row["auto"] = [OPS.explain_conv(x, weight, *geometry), OPS.explain_conv(x, weight, *geometry, "backward")]
    row["predicted"] = OPS.explain_conv(x, weight, *geometry, backend="kgopt")
    return row


def main() -> None:
    args = parsed(__doc__, DTYPES, only="shapes of this name")
    torch.backends.cudnn.allow_tf32 = False
    rows = []
    for shape in SHAPES:
        for dtype in args.dtype or ("bf16", "fp32"):
            for last in (False, True):
                if args.only and args.only != shape[0]:
                    continue
                rows.append(row := measure(shape, dtype, last))
                times = "  ".join(
                    f"{what} {row[what][0]:8.1f} {row[what][1]:9.1f} ({row[what][1] / row[what][0]:5.2f})"
                    for what in ("y", "dx", "dweight")
                )
                text = f"{shape[0]} {list(shape[1:4])} k{shape[4]} s{shape[5]}{' transposed' if shape[6] else ''}"
                text += f" d{shape[7]}" if len(shape) > 7 else ""
                print(f"{text:52s} {dtype} {'last' if last else 'cont'}  {times}", flush=True)
                keep(args.json, rows, args.commit)


if __name__ == "__main__":
    main()
