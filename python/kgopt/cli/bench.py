"""``python -m kgopt bench``: measures suites of cases and writes rows, a table and a chart."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from kgopt.cli import results
from kgopt.cli._optional import MissingPackageError, progress, require
from kgopt.cli.environment import environment, pick_device
from kgopt.cli.floor import Ceilings, measure_ceilings
from kgopt.cli.jobs import Turn, run_jobs
from kgopt.cli.results import Group, Row, group_rows
from kgopt.cli.runner import Settings
from kgopt.cli.suites import Suite, make_suite
from kgopt.cli.tables import LEGEND, MODELS_LEGEND, bench_table, headline, notes_of

__all__ = ["measure_suite", "run_bench"]


def _print_suite(groups: list[Group], rows: list[Row]) -> None:
    """The suite's table and what its columns mean."""
    if groups[0].suite == "sweep":
        from kgopt.cli.sweep import LIMIT, sweep_summary

        print(sweep_summary(rows))
        print(
            f"ratio: time of kgopt over the better of eager and torch.compile in the same layout; over {LIMIT}: slower."
        )
        print("On a GPU: its own time, L2 flushed, launches hidden. What looks slower is timed three times.")
    elif groups[0].suite == "convs":
        from kgopt.cli.convs import convs_summary

        print(convs_summary(rows))
        print("median, mean (geometric), best: times faster than cuDNN, autotuned, in the same memory format;")
        print("worst: time over cuDNN's. GPU time, L2 flushed, launches hidden; what looks slower is timed thrice.")
    elif groups[0].suite == "models":
        from kgopt.cli.bench_models import models_table

        print(models_table(groups))
        print(MODELS_LEGEND)
    else:
        print(bench_table(groups))
        print(LEGEND)
        if any("call_us" in row for row in rows):
            print("times: of the GPU alone, launches hidden; call_us in the rows: with what launching costs.")
        if groups[0].suite == "chains":
            from kgopt.cli.chains import chains_summary

            print(chains_summary(rows))


def _report(rows: list[Row], args: argparse.Namespace) -> int:
    """Prints the table and writes the chart. 1 when a kgopt row failed or is out of tolerance."""
    groups = group_rows(rows)
    if not groups:
        raise ValueError("there are no rows to show")
    facts = rows[0]
    print(headline(facts))
    matmul = {r["dtype"]: r["matmul_tflops"] for r in rows if r.get("matmul_tflops")}
    rates = "; matmul " + ", ".join(f"{d} {f:.3g} TFLOP/s" for d, f in matmul.items()) if matmul else ""
    print(f"ceilings: copy {facts['copy_gbytes_per_s'] / 1e3:.2f} TB/s{rates}")
    print()
    _print_suite(groups, rows)
    for note in notes_of(groups):
        print(f"note: {note}")
    if args.plot:
        from kgopt.cli.plot import plot_rows

        plot_rows(rows, args.plot, args.plot_dtype)
        print(f"chart: {args.plot}")
    bad = [row for row in rows if row["implementation"].startswith("kgopt")]
    bad = [row for row in bad if row.get("out_of_tolerance") or "failed" in row]
    for row in bad:
        why = row.get("failed") or f"error {row['error']:.2e}, {row['error_ratio'] or 0:.1f} times eager's"
        print(f"NOT OK: {row['case']} {row['dtype']} {row['direction']} {row['implementation']}: {why}")
    return 1 if bad else 0


def _implementations(args: argparse.Namespace) -> tuple[str, ...]:
    for name in args.impl or ():
        if name not in results.IMPLEMENTATIONS:
            raise ValueError(f"--impl has {name!r}, expected some of {', '.join(results.IMPLEMENTATIONS)}")
    return tuple(args.impl or ())


def _precisions(args: argparse.Namespace, device: torch.device) -> list[str]:
    if args.dtype is None:
        if device.type == "cpu":
            return ["fp32", "bf16", "fp16"] if args.suite == "sweep" else ["fp32"]
        more = {"pipelines": ["fp32"], "models": ["autocast"] if args.backward else [], "sweep": ["fp16"]}
        first = "fp32" if args.suite == "sweep" else "tf32"
        return [first, "bf16", *more.get(args.suite, [])]
    known = ("tf32", "fp32", "bf16", "fp16")
    for name in args.dtype:
        if name == "autocast" and args.suite == "models":
            if not args.backward:
                raise ValueError("--dtype has autocast, which is measured in training steps: add --backward")
        elif name not in known:
            raise ValueError(f"--dtype has {name!r}, expected {', '.join(known[:-1])} or {known[-1]}")
    if device.type == "cpu" and "tf32" in args.dtype:
        raise ValueError("--dtype has tf32, which the CPU does not have; use fp32")
    return list(args.dtype)


def _prepare_device(args: argparse.Namespace) -> torch.device:
    device = pick_device(args.device)
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise MissingPackageError("triton is missing, whose do_bench is the clock on a GPU; pip install triton")
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    return device


def _settings(args: argparse.Namespace, device: torch.device) -> Settings:
    return Settings(
        device,
        quick=args.quick,
        compile=not (args.no_compile or args.quick),
        max_autotune=args.max_autotune != "none" and device.type == "cuda",
        rep_ms=20.0 if args.quick else 100.0,
        input_sets=1 if args.quick else 3,
        deadline=None if args.budget is None else time.monotonic() + args.budget,
        stop_at=args.stop_at,
        only=_implementations(args),
    )


def run_bench(args: argparse.Namespace) -> int:
    """Runs ``python -m kgopt bench`` with parsed arguments. Returns the exit status."""
    if args.suite == "zoo":
        from kgopt.cli.networks.suite import run_zoo

        return run_zoo(args)
    if args.plot:
        require("matplotlib", "demo")
    if args.from_json:
        joined = results.join_shards([results.load_rows(path) for path in args.from_json])
        if args.json:
            results.save_rows(args.json, joined)
        return _report(joined, args)
    args.stop_at = None if args.stop is None else time.monotonic() + args.stop
    device = _prepare_device(args)
    for name in ("json", "plot"):
        folder = os.path.dirname(getattr(args, name) or "")
        if folder:
            os.makedirs(folder, exist_ok=True)
    settings, precisions = _settings(args, device), _precisions(args, device)
    if args.resume and not args.json:
        raise ValueError("--resume continues the file of --json, which is missing")
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs is {args.jobs}, expected at least 1")
    if args.jobs and args.shard:
        raise ValueError(
            f"--jobs is {args.jobs} and --shard {args.shard}, expected one of them: --jobs makes its own shards"
        )
    suite = make_suite(args, settings, precisions)
    gpus = 1 if args.device or device.type == "cpu" else torch.cuda.device_count()
    if args.jobs and suite.compile is None and args.jobs > gpus:
        raise ValueError(
            f"--jobs is {args.jobs}, but suite {args.suite} compiles nothing ahead of its measurements: "
            f"more processes than GPUs ({gpus}) gain nothing"
        )
    earlier = results.load_rows(args.json) if args.resume and os.path.exists(args.json) else []
    earlier = [row for row in earlier if not row.get("partial")]
    args.done = {_step_of(row) for row in earlier}
    facts, ceilings = _before(args, device, suite.rates)
    if args.jobs:
        return _report(run_jobs(args, len(suite.steps), ceilings, facts, earlier, measure_suite), args)
    return _report(_measure(suite, args, ceilings, facts, None, earlier), args)


def measure_suite(args: argparse.Namespace, ceilings: Ceilings, facts: Row, turn: Turn) -> None:
    """One of --jobs' processes: compiles its --shard, waits for its turn, measures, writes --json."""
    device = _prepare_device(args)
    suite = make_suite(args, _settings(args, device), _precisions(args, device))
    _measure(suite, args, ceilings, facts, turn, [])


def _step_of(row: Row) -> tuple[str, str, str]:
    """By what a step is known in the rows that it gave."""
    return row["case"], row["dtype"], "both" if row["suite"] == "sweep" else row["direction"]


def _measure(
    suite: Suite, args: argparse.Namespace, ceilings: Ceilings, facts: Row, turn: Turn | None, earlier: list[Row]
) -> list[Row]:
    """`earlier` rows and those of the steps that they lack, until --stop."""
    steps = [step for step in suite.steps if suite.name(step) not in args.done]
    ready: list[Any] = [None] * len(steps)
    if turn:
        if suite.compile:
            ready = [suite.compile(step) for step in steps]
        if facts["device"] == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        turn.wait()
    rows, saved = list(earlier), len(earlier)

    def keep(partial: list[Row]) -> None:
        if args.json:
            results.save_rows(args.json, rows + partial)

    try:
        for index, step in progress(list(enumerate(steps)), len(steps), f"bench {args.suite}"):
            if args.stop_at is not None and time.monotonic() > args.stop_at:
                print(f"stopped: {len(steps) - index} of {len(steps)} steps are left", file=sys.stderr, flush=True)
                break
            rows += suite.measure(step, ready[index], ceilings, facts, keep)
            if args.json and index % suite.save_every == suite.save_every - 1:
                results.save_rows(args.json, rows)
                saved = len(rows)
            if facts["device"] == "cuda" and suite.empty_cache:
                torch.cuda.empty_cache()
    finally:  # an interrupted run leaves what it has
        if args.json and len(rows) > saved:
            results.save_rows(args.json, rows)
    return rows


def _before(args: argparse.Namespace, device: torch.device, precisions: Sequence[str]) -> tuple[Row, Ceilings]:
    """What every row carries, and the ceilings of this run."""
    facts = environment(device, args.commit)
    print(f"measuring copy and matmul rates of {facts['gpu'] or facts['cpu']}", file=sys.stderr, flush=True)
    wanted = ["bf16" if precision == "autocast" else precision for precision in precisions]
    return facts, measure_ceilings(device, wanted, args.quick)
