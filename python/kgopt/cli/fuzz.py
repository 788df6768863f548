"""``python -m kgopt fuzz``: random calls and networks, each checked against PyTorch and float64."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from kgopt.cli.environment import environment, pick_device
from kgopt.cli.text import table
from kgopt.fuzz.kinds import KINDS, make_kind
from kgopt.fuzz.pool import Settings, cores
from kgopt.fuzz.search import Report, search

__all__ = ["columns", "count_table", "run_fuzz"]

_SHARES = {"ops": 60.0, "networks": 1.0}  # of the cases of --kind all
_COLUMNS = ("tf32", "fp32", "bf16", "fp16", "fp64", "autocast")


def columns(counts: dict[str, dict[str, int]]) -> list[str]:
    """The dtypes that were drawn, in their order."""
    seen = {d for row in counts.values() for d in row}
    return [c for c in _COLUMNS if c in seen] + sorted(seen.difference(_COLUMNS))


def count_table(counts: dict[str, dict[str, int]]) -> str:
    """Cases by op and dtype."""
    shown = columns(counts)
    rows = [[op, *(str(row.get(c, 0)) for c in shown), str(sum(row.values()))] for op, row in counts.items()]
    sums = [sum(row.get(c, 0) for row in counts.values()) for c in shown]
    return table(["op", *shown, "all"], [*rows, ["all", *map(str, sums), str(sum(sums))]])


def _known_names(args: argparse.Namespace, kinds: list[str]) -> tuple[str, ...]:
    known = {n for k in kinds for n in make_kind(k).names()}
    for name in args.op or []:
        if name not in known:
            raise ValueError(f"--op is {name!r}, expected one of: {', '.join(sorted(known))}")
    return tuple(args.op or [])


def _given_case(text: str) -> dict[str, Any]:
    """JSON, or a file of it."""
    if not text.lstrip().startswith("{"):
        text = Path(text).read_text()
    case: dict[str, Any] = json.loads(text)
    case = case.get("smallest", case)  # an entry of "findings"
    case.setdefault("kind", "ops")
    if case["kind"] not in KINDS:
        raise ValueError(f"the case's kind is {case['kind']!r}, expected one of: {', '.join(KINDS)}")
    return case


def _report_json(report: Report, args: argparse.Namespace, workers: int) -> dict[str, Any]:
    return {
        "seed": args.seed,
        "first": args.first,
        "next": report.next,
        "kind": args.kind,
        "workers": workers,
        "seconds": round(report.seconds, 1),
        "cases": report.cases,
        "failed": report.failed,
        "out_of_memory": report.no_memory,
        "counts": dict(sorted(report.counts.items())),
        "findings": [dataclasses.asdict(f) for f in report.findings],
    }


def without_machine(text: str) -> str:
    """Tracebacks and native frames without the folders of this machine's Python, from the packages' names on."""
    for folder in (sysconfig.get_path("purelib"), str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix):
        text = text.replace(f"{folder}/", "")
    return text


def _write(path: Path, text: str) -> None:
    """Whole or not at all: the search may be ended by force at any time."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text)
    beside.replace(path)


def _print_findings(report: Report) -> None:
    for n, f in enumerate(report.findings, 1):
        print(f"\n{'=' * 100}\nfinding {n} of {len(report.findings)}: case {f.index}", end="")
        print(f", and {f.alike - 1} alike ({', '.join(map(str, f.also[1:]))})" if f.alike > 1 else "")
        print(f.smallest_text if f.shrunk else f"{f.smallest_text}\n# as it was drawn: there may be a smaller case")
        print(f"\n# --case '{json.dumps(f.smallest)}'\n")
        print(f.source)


def _print_report(report: Report, seed: int) -> None:
    print(count_table(dict(sorted(report.counts.items()))))
    _print_findings(report)
    rate = report.cases / max(report.seconds, 1e-9)
    memory = f", {report.no_memory} ran out of memory" if report.no_memory else ""
    print(f"\nseed {seed}: {report.cases} cases in {report.seconds:.0f} s ({rate:.0f} a second){memory}; "
          f"{report.failed} failed in {len(report.findings)} ways; --first {report.next} goes on")  # fmt: skip


def _gpus(args: argparse.Namespace, device: torch.device) -> tuple[int, ...]:
    """The devices of the workers; on the CPU a number that nothing reads."""
    if device.type != "cuda":
        return (0,)
    gpus = tuple(int(g) for g in args.gpus.split(",")) if args.gpus else (device.index or 0,)
    if max(gpus) >= torch.cuda.device_count():
        raise ValueError(f"--gpus is {args.gpus}, but there are {torch.cuda.device_count()} GPUs")
    return gpus


def run_fuzz(args: argparse.Namespace) -> int:
    """Runs the search that the command line asks for. Returns 1 where something was found."""
    device = pick_device(args.device)
    case = _given_case(args.case) if args.case else None
    chosen = list(KINDS) if args.kind == "all" else [args.kind]
    if case is not None:
        chosen = [case["kind"]]
    only = () if case is not None else _known_names(args, chosen)
    if only:
        chosen = [k for k in chosen if set(only) & set(make_kind(k).names())]
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(2**31)
    gpus = _gpus(args, device)
    if args.workers is not None and args.workers < 1:
        raise ValueError(f"--workers is {args.workers}, expected at least 1")
    workers = args.workers or max(1, min(cores(), 12 * len(gpus) if device.type == "cuda" else cores()))
    if case is not None:
        workers = 1
    calls = args.calls
    if calls is None and args.seconds is None and case is None:
        calls = 2000
    settings = Settings(device.type, gpus, args.seed, only, patience=max(1.0, 2.0 * workers / cores()))
    if args.first < 0:
        raise ValueError(f"--first is {args.first}, expected 0 or more")
    where = f" from case {args.first} on" if args.first else ""
    print(f"seed {args.seed}{where}, {device.type}, {workers} processes", flush=True)
    said = environment(device)

    def keep(report: Report) -> None:
        if args.json:
            text = json.dumps({"environment": said, **_report_json(report, args, workers)}, indent=1) + "\n"
            _write(Path(args.json), without_machine(text))

    report = search(
        [(k, _SHARES[k]) for k in chosen],
        settings,
        workers,
        calls,
        args.seconds,
        None if case is None else [case],
        lambda text: print(text, file=sys.stderr, flush=True),
        args.first,
        args.shrink_seconds,
        keep,
    )
    keep(report)
    _print_report(report, args.seed)
    if case is not None and not report.findings:
        print(make_kind(case["kind"]).source(case, device.type))
    return 1 if report.findings else 0
