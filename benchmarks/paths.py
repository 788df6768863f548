"""Times the problems of a file with the kgopt that is importable, to compare two builds.

    python benchmarks/paths.py --rows benchmarks/results/paths/rows.json --json before.json    one wheel
    python benchmarks/paths.py --rows benchmarks/results/paths/rows.json --json after.json    the other
    python benchmarks/paths.py --compare before.json after.json

A row names a problem: what removal it stands for, an op (group_norm, mean, relu_norm, logsumexp, conv, head), the shape
of x, a precision, a memory format, and what the op needs. `backward` times the backward op of a norm alone. Times are
the GPU's, the L2 emptied before each call and launches hidden; every row is timed in each round, and the median of the
rounds counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import kgopt
from kgopt import functional
from kgopt.cli.environment import environment
from kgopt.cli.measure import DTYPES, gpu_time, precision_flags

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_PIPELINES = {
    "mean": functional.conv3d_group_norm_mean,
    "relu_norm": functional.conv_transpose3d_relu_group_norm,
    "logsumexp": functional.conv2d_group_norm_tanh_hardswish_residual_logsumexp,
}


def problem(row: dict[str, Any], device: torch.device) -> tuple[Callable[[], Any], str]:
    """The call of a row, and in words which path it takes."""
    torch.manual_seed(1)
    dtype, shape = DTYPES[row["precision"]], row["shape"]
    rank, groups = len(shape) - 2, row.get("groups", 1)

    def tensor(sizes: list[int], scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(sizes, device=device) * scale).to(dtype)

    x = tensor(shape)
    if row.get("format") == "channels_last":
        x = x.contiguous(memory_format=_FORMATS[len(shape)])
    act, pre = row.get("act", "none"), row.get("pre_act", "none")
    if row["op"] == "group_norm":
        weight, bias = tensor([shape[1]]), tensor([shape[1]])
        y, mean, rstd = torch.ops.kgopt.group_norm_fwd(x, groups, weight, bias, 1e-5, act, pre)
        words = functional.explain_group_norm(x, groups, act=act, pre_act=pre, backward=row.get("backward", False))
        if row.get("backward"):
            dy = torch.randn_like(y)
            backward = torch.ops.kgopt.group_norm_backward
            return lambda: backward(dy, x, mean, rstd, groups, weight, bias, act, pre), words
        return lambda: torch.ops.kgopt.group_norm_fwd(x, groups, weight, bias, 1e-5, act, pre), words

    c_out, kernel = row["c_out"], [row["kernel"]] * rank if isinstance(row["kernel"], int) else row["kernel"]
    transposed = row["op"] == "relu_norm" or bool(row.get("transposed"))
    weight = tensor([shape[1], c_out, *kernel] if transposed else [c_out, shape[1], *kernel], 0.1)
    if row.get("format") == "channels_last":
        weight = weight.contiguous(memory_format=_FORMATS[len(shape)])
    stride, padding = row.get("stride", 1), row.get("padding", 0)
    dilation = row.get("dilation", 1)
    gamma, beta = tensor([c_out]), tensor([c_out])

    def ints(v: int | list[int]) -> list[int]:
        return [v] * rank if isinstance(v, int) else v

    explain = torch.ops.kgopt.explain_conv
    geometry = (ints(stride), ints(padding), ints(dilation), [0] * rank, 1, transposed)
    if row["op"] in _PIPELINES:
        function = _PIPELINES[row["op"]]
        options = {"stride": stride, "padding": padding, "dilation": dilation}
        words = explain(x, weight, *geometry, {"mean": "stats"}.get(row["op"], row["op"]), num_groups=groups)
        return lambda: function(x, weight, None, groups, gamma, beta, **options), words
    if row["op"] == "head":
        own, other = tensor([shape[1]]), tensor([shape[1]])
        bias = tensor([c_out])
        call = functional.group_norm_conv
        return lambda: call(x, groups, own, other, weight, bias, stride, padding, gn_act=act), "norm and head"
    if row["op"] != "conv":
        raise ValueError(f"op is '{row['op']}', expected group_norm, conv, head or one of {', '.join(_PIPELINES)}")
    backend = row.get("backend", "auto")
    words = explain(x, weight, *geometry, backend=backend)
    if transposed:
        function = functional.conv_transpose2d if rank == 2 else functional.conv_transpose3d
    else:
        function = functional.conv2d if rank == 2 else functional.conv3d
    return lambda: function(x, weight, None, stride, padding, dilation=dilation, backend=backend), words


def measure(rows: list[dict[str, Any]], rounds: int, rep_ms: float) -> list[dict[str, Any]]:
    """The rows with their time, its spread over the rounds, and their path; one that fails says why."""
    device = torch.device("cuda")
    times: list[list[float]] = [[] for _ in rows]
    for number in range(rounds):
        for row, took in zip(rows, times, strict=True):
            if "error" in row:
                continue
            try:
                with precision_flags(row["precision"]):
                    call, row["path"] = problem(row, device)
                    took.append(gpu_time(call, device, rep_ms).median_us)
            except Exception as error:  # a row must not end the others' run
                row["error"] = f"{type(error).__name__}: {error}"
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    for row, took in zip(rows, times, strict=True):
        if took and "error" not in row:
            row["us"] = round(statistics.median(took), 2)
            row["spread"] = round((max(took) - min(took)) / row["us"], 3)
    return rows


def name_of(row: dict[str, Any]) -> str:
    """A row in words, without what was measured."""
    known = {k: v for k, v in row.items() if k not in ("removal", "us", "spread", "path", "error", "shape", "op")}
    return f"{row['op']} {'x'.join(map(str, row['shape']))} " + " ".join(f"{k}={v}" for k, v in known.items())


def compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Prints both times of each row, by removal, and what the median row of each removal loses."""
    known = {name_of(row): row for row in before["rows"]}
    for removal in dict.fromkeys(row["removal"] for row in after["rows"]):
        print(f"\n{removal}")
        ratios = []
        for row in after["rows"]:
            old = known.get(name_of(row), {})
            if row["removal"] != removal:
                continue
            if "us" not in row or "us" not in old:
                print(f"  {name_of(row)}: {old.get('error') or row.get('error') or 'in one file alone'}")
                continue
            ratios.append(row["us"] / old["us"])
            print(f"  {old['us']:9.2f} {row['us']:9.2f} us  {ratios[-1]:5.2f}  {name_of(row)}")
        if ratios:
            print(f"  median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}")


def main() -> int:
    """Runs the command line; the exit status is 1 where a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="F", help="the problems: a JSON list")
    parser.add_argument("--json", metavar="F", help="write what was measured here; else it is printed")
    parser.add_argument("--rounds", type=int, default=5, help="how often every row is timed (default 5)")
    parser.add_argument("--rep-ms", type=float, default=20.0, help="milliseconds a row and round (default 20)")
    parser.add_argument("--compare", nargs=2, metavar="F", help="measure nothing: compare two such files")
    args = parser.parse_args()
    if args.compare:
        files = []
        for path in args.compare:
            with open(path) as file:
                files.append(json.load(file))
        compare(*files)
        return 0
    if not args.rows or not torch.cuda.is_available():
        print("needs --rows F, and a GPU to time them on", file=sys.stderr)
        return 1
    with open(args.rows) as file:
        rows = measure(json.load(file), args.rounds, args.rep_ms)
    result = {"environment": environment(torch.device("cuda")), "kgopt": kgopt.__version__, "rows": rows}
    text = json.dumps(result, indent=1)
    if args.json:
        with open(args.json, "w") as file:
            file.write(text + "\n")
    else:
        print(text)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
