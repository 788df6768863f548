"""What the suites of bench measure, step by step."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from kgopt.cli._optional import progress_note
from kgopt.cli.cases import Case, suite_cases
from kgopt.cli.floor import Ceilings
from kgopt.cli.results import Row
from kgopt.cli.run_case import compile_case, measure_case
from kgopt.cli.runner import Compiled, Settings

__all__ = ["Suite", "make_suite"]

_Step = TypeVar("_Step")
Keep = Callable[[list[Row]], None]


@dataclasses.dataclass(frozen=True)
class Suite:
    """What a suite measures, step by step."""

    steps: list[Any]
    name: Callable[[Any], tuple[str, str, str]]  # of a step, as step_of has it
    # From a step, what `compile` made of it or None, the ceilings and facts, and what saves the rows of a step that is
    # not done yet.
    measure: Callable[[Any, Any, Ceilings, Row, Keep], list[Row]]
    compile: Callable[[Any], Any] | None = None  # None: nothing can be compiled ahead
    rates: Sequence[str] = ()  # dtypes whose matmul rate is a ceiling
    save_every: int = 1
    empty_cache: bool = False  # after every step


def make_suite(args: argparse.Namespace, settings: Settings, precisions: list[str]) -> Suite:
    """Of --suite."""
    own = {"models": _models_suite, "sweep": _sweep_suite, "convs": _convs_suite}.get(args.suite)
    if own:
        return own(args, settings, precisions)
    if args.suite == "chains":
        from kgopt.cli.chains import chain_cases

        found = chain_cases(count_of(args, 100), args.seed)
    else:
        found = suite_cases(args.suite)
    cases = _some([case for case in found if not args.case or args.case in case.name], args)
    if args.quick and args.suite in ("scaling", "chains"):
        cases = [case for case in cases if math.prod(case.shape) <= 2**18]
        if not cases:
            raise ValueError(
                f"--quick measures tensors of up to {2**18} elements, of which --count {args.count} has none"
            )
    elif args.quick:
        cases = [case.scaled(16) for case in cases]
    directions = ["forward", *(["backward"] if args.backward else [])]
    # The dtype changes slowest: a run that is cut short has the first dtype whole.
    steps = [
        (case, precision, case.backward if direction == "backward" else direction)
        for precision in precisions
        for direction in directions
        for case in cases
        if direction == "forward" or case.backward
    ]

    def tuned(precision: str) -> Settings:
        tune = settings.max_autotune and (args.max_autotune == "all" or precision == precisions[0])
        return dataclasses.replace(settings, max_autotune=tune)

    def measure(step: tuple[Case, str, str], ready: Any, ceilings: Ceilings, facts: Row, keep: Keep) -> list[Row]:
        return measure_case(*step, tuned(step[1]), ceilings, facts, ready)

    def compile_step(step: tuple[Case, str, str]) -> dict[str, Compiled]:
        return compile_case(*step, tuned(step[1]))

    # Where candidates are timed while they are compiled, processes would disturb each other.
    alone = settings.max_autotune and any(case.max_autotune for case in cases)
    return Suite(
        shard(steps, args), lambda step: (step[0].name, *step[1:]), measure, None if alone else compile_step,
        precisions, empty_cache=True,
    )  # fmt: skip


def _some(found: list[_Step], args: argparse.Namespace) -> list[_Step]:
    if not found:
        raise ValueError(f"--case is {args.case!r}, which no case of suite {args.suite} contains")
    return found


def _models_suite(args: argparse.Namespace, settings: Settings, precisions: list[str]) -> Suite:
    from kgopt.cli import bench_models

    cases = _some(bench_models.model_cases(args.case, args.quick), args)
    steps = bench_models.model_steps(cases, precisions, args.backward)
    if not steps:
        raise ValueError(f"--dtype {','.join(precisions)} measures nothing: no model here has a training step in it")
    oracles = bench_models.Oracles()

    def measure(step: Any, ready: None, ceilings: Ceilings, facts: Row, keep: Keep) -> list[Row]:
        case, precision, direction = step
        return bench_models.measure_model(
            case, precision, direction, settings, ceilings, facts, oracles, note=progress_note, keep=keep
        )

    return Suite(shard(steps, args), lambda step: (step[0].name, *step[1:]), measure, rates=precisions)


def _sweep_suite(args: argparse.Namespace, settings: Settings, precisions: list[str]) -> Suite:
    from kgopt.cli import sweep

    small = args.quick or settings.device.type == "cpu"
    max_bytes = args.max_bytes or (2.0**20 if small else 2.0**30)
    shapes = sweep.random_shapes(count_of(args, 200), args.seed, precisions, max_bytes)
    shapes = _some([shape for shape in shapes if not args.case or args.case in shape.name], args)
    settings = dataclasses.replace(settings, rep_ms=min(settings.rep_ms, 20.0))

    def measure(shape: sweep.Shape, ready: Any, ceilings: Ceilings, facts: Row, keep: Keep) -> list[Row]:
        progress_note(shape.name)
        return sweep.measure_shape(shape, settings, ceilings, facts, ready)

    def compile_step(shape: sweep.Shape) -> dict[str, Compiled]:
        return sweep.compile_shape(shape, settings)

    # Without convolutions the matmul rate plays no part.
    return Suite(shard(shapes, args), lambda shape: (shape.name, shape.precision, "both"), measure, compile_step)


def _convs_suite(args: argparse.Namespace, settings: Settings, precisions: list[str]) -> Suite:
    from kgopt.cli import convs

    small = args.quick or settings.device.type == "cpu"
    found = convs.random_convs(count_of(args, 200), args.seed, 3e7 if small else 3e10)
    found = _some([conv for conv in found if not args.case or args.case in conv.name], args)
    # The dtype changes slowest: a run that is cut short has the first dtype whole.
    steps = shard([(conv, precision) for precision in precisions for conv in found], args)
    settings = dataclasses.replace(settings, rep_ms=min(settings.rep_ms, 2.0))
    torch.backends.cudnn.benchmark_limit = 5  # its search takes most of the time; the best come first

    def measure(step: Any, ready: None, ceilings: Ceilings, facts: Row, keep: Keep) -> list[Row]:
        conv, precision = step
        progress_note(conv.name)
        return convs.measure_conv(conv, precision, settings, ceilings, facts)

    return Suite(steps, lambda step: (step[0].name, step[1], "forward"), measure, rates=precisions, save_every=10)


def count_of(args: argparse.Namespace, usual: int) -> int:
    if args.count is not None and args.count < 1:
        raise ValueError(f"--count is {args.count}, expected at least 1")
    return args.count or usual


def shard(steps: list[_Step], args: argparse.Namespace) -> list[_Step]:
    """The part of a suite's steps that --shard I/N names: every N-th from the I-th."""
    if args.shard is None:
        return steps
    match = re.fullmatch(r"(\d+)/(\d+)", args.shard)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError(f"--shard is {args.shard!r}, expected I/N with 0 <= I < N, for example 0/4")
    mine = steps[int(match[1]) :: int(match[2])]
    if not mine:
        raise ValueError(f"--shard is {args.shard!r}, which leaves nothing of {len(steps)} measurements")
    return mine
