"""What bounds each kernel of the pipelines: utilization of a GPU's units, read with Nsight Compute.

    python benchmarks/roofline.py [--json F] [--ncu PATH]

Runs itself under ncu, one warm call of each pipeline and dtype at its headline shape, and prints a line for each kernel
of kgopt: time, and the fraction of the peak that its tensor cores, special function units, shared memory, FP32 pipes,
L2, memory and instruction issue reach. Needs a GPU whose performance counters may be read.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys

# Column -> metrics, in percent of the unit's peak while the kernel runs: the first that the GPU has.
METRICS = {
    "tensor": ["sm__pipe_tensor_cycles_active", "sm__inst_executed_pipe_tensor"],
    "special": ["sm__inst_executed_pipe_xu"],
    "fma": ["sm__pipe_fma_cycles_active", "sm__inst_executed_pipe_fma"],
    "alu": ["sm__pipe_alu_cycles_active", "sm__inst_executed_pipe_alu"],
    "shared": ["l1tex__data_pipe_lsu_wavefronts_mem_shared"],
    "l2": ["lts__t_sectors"],
    "memory": ["dram__throughput"],
    "issue": ["sm__inst_issued"],
}
_TIME = "gpu__time_duration.sum"
_DTYPES = ("tf32", "bf16", "fp32")


def _run_pipelines() -> None:
    """Each pipeline once, in a range that carries its name and dtype, after a call that is not looked at."""
    import torch

    from kgopt.cli.measure import DTYPES, precision_flags
    from kgopt.cli.models import PIPELINES

    torch.backends.cudnn.benchmark = True
    for pipeline in PIPELINES:
        for precision in _DTYPES:
            with precision_flags(precision), torch.no_grad():
                dtype = DTYPES[precision]
                model = pipeline.kgopt_model(pipeline.plain_model().to("cuda", dtype))
                x = torch.randn(pipeline.headline, device="cuda", dtype=dtype)
                model(x)
                torch.cuda.synchronize()
                torch.cuda.nvtx.range_push(f"{pipeline.module} {precision}")
                model(x)
                torch.cuda.synchronize()
                torch.cuda.nvtx.range_pop()


def _find_metrics(ncu: str) -> dict[str, str]:
    """Column -> a metric that this GPU has."""
    listed = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=True).stdout
    known = {line.split()[0] for line in listed.splitlines() if line.strip()}
    found = {}
    for column, names in METRICS.items():
        base = next((name for name in names if name in known), None)
        if base is not None:
            kind = "elapsed" if base.startswith(("lts", "dram")) else "active"
            found[column] = f"{base}.avg.pct_of_peak_sustained_{kind}"
    return found


def _measure(ncu: str, metrics: dict[str, str]) -> list[dict[str, object]]:
    command = [ncu, "--csv", "--print-units", "base", "--nvtx", "--nvtx-include", "regex:.*GroupNorm.*/"]
    command += ["--clock-control", "none", "--kernel-name", "regex:kgopt|conv|group|normalize"]
    command += [
        "--metrics",
        ",".join([_TIME, *metrics.values()]),
        sys.executable,
        os.path.abspath(__file__),
        "--inside",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError(f"ncu measured nothing: {(done.stdout + done.stderr)[-800:]}")
    columns = {metric: column for column, metric in metrics.items()} | {_TIME: "us"}
    rows: dict[str, dict[str, object]] = {}
    for line in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        row = rows.setdefault(line["ID"], {"kernel": line["Kernel Name"]})
        ranges = next((value for key, value in line.items() if key and "Push/Pop" in key and value), "")
        name = re.search(r"(\w*GroupNorm\w*) (tf32|bf16|fp32)", ranges)
        if name:
            row["pipeline"], row["dtype"] = name[1], name[2]
        column = columns.get(line["Metric Name"])
        if column:
            value = float(line["Metric Value"].replace(",", "") or "nan")
            row[column] = round(value / 1000 if column == "us" else value, 1)
    return list(rows.values())


def _short(kernel: str) -> str:
    """The kernel's name without namespaces, template arguments and parameters."""
    name = re.sub(r"<.*|\(.*", "", re.sub(r"void |kgopt::|::unnamed|\(anonymous namespace\)::|<unnamed>::", "", kernel))
    return name[:34]


def _fill_docs(path: str, metrics: dict[str, str], rows: list[dict[str, object]]) -> None:
    columns = ["pipeline", "dtype", "kernel", "us", *metrics]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        values = [str(row.get(column, "")) for column in columns]
        values[2] = f"`{_short(values[2])}`"
        lines.append("| " + " | ".join(values) + " |")
    with open(path) as file:
        text = file.read()
    begin, end = "<!-- rows: begin -->\n", "<!-- rows: end -->"
    head, rest = text.split(begin)
    with open(path, "w") as file:
        file.write(head + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1])


def main() -> int:
    """Runs the command line; the exit status is 1 where there is no ncu."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="F", help="write the rows here")
    parser.add_argument("--ncu", default=shutil.which("ncu"), help="the profiler (default: on PATH)")
    parser.add_argument("--from-json", metavar="F", help="measure nothing: print the rows of this file")
    parser.add_argument("--docs", metavar="F", help="put the table into this Markdown file, between its two marks")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        _run_pipelines()
        return 0
    if args.from_json:
        with open(args.from_json) as file:
            saved = json.load(file)
        metrics, rows = saved["metrics"], saved["rows"]
    elif args.ncu:
        metrics = _find_metrics(args.ncu)
        rows = _measure(args.ncu, metrics)
    else:
        print("ncu is not on PATH: give --ncu PATH", file=sys.stderr)
        return 1
    print(f"{'pipeline':44} {'dtype':5} {'kernel':34} {'us':>7} " + " ".join(f"{c:>7}" for c in metrics))
    for row in rows:
        values = " ".join(f"{row.get(c, ''):>7}" for c in metrics)
        head = f"{row.get('pipeline', ''):44} {row.get('dtype', ''):5} {_short(str(row['kernel'])):34}"
        print(f"{head} {row['us']:>7} {values}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"metrics": metrics, "rows": rows}, file, indent=1)
    if args.docs:
        _fill_docs(args.docs, metrics, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
