"""Gradients of resampling in compiled training graphs: kgopt's gathering beside Inductor's and ATen's.

    python benchmarks/gathered.py --json benchmarks/results/gathered/h200.json
    python benchmarks/gathered.py --only trilinear --dtype bf16

Microseconds of the GPU between events, the best of three rows of calls, of one backward: eager PyTorch's,
torch.compile's, and that of the same call with the gradient of kgopt.rewrite, compiled; beside them what the bytes of
dy and dx take at the speed of a copy in the same run. Both memory formats. Below about 40 us all wait for the host.

Predictions (before the first run): beside torch.compile, nearest by 2 is 3 to 8 times as fast, linear by 2 is 3 to 10
times, nearest to other sizes 2 to 4 times. Gathering takes 1.2 to 2 times the bytes for nearest, 2 to 4 for linear.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from events import busy_of_few, keep, parsed
from kgopt._layout import FORMATS
from kgopt.rewrite.captured.passes.resampled import resampled
from kgopt.rewrite.inductor.decomposed import DECOMPOSITIONS
from kgopt.torch_private import compile_graph, compiler_settings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Name, sizes of x, arguments of F.interpolate.
CASES: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = [
    ("nearest", (4, 320, 64, 64), (None, [2.0, 2.0], "nearest", None)),
    ("nearest", (8, 128, 128, 128), (None, [2.0, 2.0], "nearest", None)),
    ("nearest", (1, 64, 48, 48, 48), (None, [2.0, 2.0, 2.0], "nearest", None)),
    ("nearest", (8, 128, 75, 75), ([151, 151], None, "nearest", None)),
    ("bilinear", (8, 128, 128, 128), (None, [2.0, 2.0], "bilinear", False)),
    ("bilinear", (8, 128, 128, 128), (None, [2.0, 2.0], "bilinear", True)),
    ("bilinear", (8, 64, 120, 160), ([480, 640], None, "bilinear", False)),
    ("trilinear", (1, 64, 48, 48, 48), (None, [2.0, 2.0, 2.0], "trilinear", False)),
    ("trilinear", (2, 32, 64, 64, 64), (None, [2.0, 2.0, 2.0], "trilinear", True)),
]


def backward_of(function: Callable[..., Tensor], x: Tensor) -> Callable[[], Any]:
    """A call of its backward; the forward has run."""
    y = function(x)
    y = y[0] if isinstance(y, (tuple, list)) else y
    dy = torch.randn_like(y)
    return functools.partial(torch.autograd.grad, y, x, dy, retain_graph=True)


def compiled(function: Callable[..., Tensor], given: tuple[Any, ...], x: Tensor) -> Callable[..., Any]:
    """A call with these arguments after x, by Inductor."""
    graph = torch.fx.Graph()
    graph.output((graph.call_function(function, (graph.placeholder("x"), *given)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    return compile_graph(module, [x], None, {}, decompositions=DECOMPOSITIONS)


def ways(given: tuple[Any, ...], x: Tensor) -> dict[str, Callable[[], Any]]:
    """A backward of each."""
    return {
        "eager": backward_of(lambda x: F.interpolate(x, *given), x),
        "compile": backward_of(compiled(F.interpolate, given, x), x),
        "kgopt": backward_of(compiled(resampled, given, x), x),
    }


def main() -> None:
    """Every case, dtype and format."""
    args = parsed(__doc__, DTYPES, "cases whose name has this text")
    rows = []
    for name, sizes, given in CASES:
        if args.only not in name:
            continue
        for dtype_name in args.dtype or ("bf16", "fp32"):
            for form in ("contiguous", "channels_last"):
                torch.compiler.reset()
                x = torch.randn(sizes, device="cuda", dtype=DTYPES[dtype_name])
                x = x.contiguous(memory_format=FORMATS[x.dim()] if form == "channels_last" else torch.contiguous_format)
                x.requires_grad_()
                with compiler_settings(donated_buffer=False):
                    found = {way: busy_of_few(call) for way, call in ways(given, x).items()}
                results = F.interpolate(x.detach(), *given).numel()
                source = torch.empty((x.numel() + results) // 2, device="cuda", dtype=x.dtype)
                floor = busy_of_few(functools.partial(torch.empty_like(source).copy_, source))
                row = {"case": name, "shape": list(sizes), "arguments": str(given), "dtype": dtype_name, "format": form}
                rows.append({**row, **{f"{k}_us": round(v, 1) for k, v in found.items()}, "bytes_us": round(floor, 1)})
                print(
                    f"{name:10s} {sizes!s:24s} {given!s:44s} {dtype_name} {form:13s}"
                    + " ".join(f"{k} {v:8.1f}" for k, v in found.items())
                    + f"  bytes {floor:7.1f}  x compile {found['compile'] / found['kgopt']:5.2f}",
                    flush=True,
                )
                keep(args.json, rows, args.commit)


if __name__ == "__main__":
    main()
