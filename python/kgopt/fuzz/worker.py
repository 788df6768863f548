"""A worker process: it reads cases from a pipe, checks each, and writes what came of it."""

from __future__ import annotations

import os
import random
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

import kgopt  # noqa: F401  (imported once by the fork server, for all workers)
from kgopt.fuzz import stage
from kgopt.fuzz.kind import Case, Kind
from kgopt.fuzz.kinds import make_kind

__all__ = ["CHECKED", "FINDING", "NO_MEMORY", "draw_case", "serve"]

CHECKED, FINDING, NO_MEMORY = "checked", "finding", "out of memory"

# oneDNN's bf16 convolutions of volumes one position deep read memory that nobody wrote where they use the CPU's
# instructions for bf16 (docs/log/findings.md), so PyTorch is asked without them. Read at oneDNN's first call.
ONEDNN_MAX_CPU_ISA = "AVX512_CORE"


def draw_case(kind: Kind, seed: int, index: int, device: str, only: tuple[str, ...]) -> Case:
    """Case ``index`` of a seed: the same in every process."""
    rng = random.Random(f"{seed}:{kind.name}:{index}")
    return {"kind": kind.name, **kind.draw(rng, device, only)}


def _no_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return "out of memory" in text or "can't allocate memory" in text or "ALLOC_FAILED" in text


def _outcome(kind: Kind, case: Case, device: str) -> tuple[str, str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = kind.check(case, device)
    except Exception as error:  # whatever it is, the search goes on
        if _no_memory(error):
            return NO_MEMORY, ""
        last = traceback.format_exc().strip().splitlines()[-8:]
        return FINDING, "the check raised: " + f"{type(error).__name__}: {error}\n" + "\n".join(last)
    return (CHECKED, "") if wrong is None else (FINDING, wrong)


def _device_error(device: str) -> str | None:
    """What an error in a kernel leaves: the context refuses everything from then on."""
    try:
        torch.cuda.synchronize(device)
        if int(torch.ones(4, device=device).sum()) != 4:
            return "4 ones on the device do not sum up to 4"
    except Exception as error:
        return str(error).splitlines()[0]
    return None


def serve(
    pipe: Any,
    board: Any,
    log: str,
    device: str,
    seed: int,
    only: tuple[str, ...],
    threads: int,
    prepare: Callable[[], None] | None,
) -> None:
    """Runs until the pipe closes.

    Reads ``(kind, index)`` or ``(kind, case)``; writes None when it is ready, then ``(outcome, text, labels, seconds)``
    for each case. After an error that the
    CUDA context keeps, the process ends: its parent starts another one.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", ONEDNN_MAX_CPU_ISA)
    stage.attach(board)
    torch.set_num_threads(threads)
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
        torch.ones(1, device=device).item()
    if prepare is not None:
        prepare()
    pipe.send(None)
    while True:
        try:
            name, what = pipe.recv()
        except (EOFError, OSError):
            return
        kind, start = make_kind(name), time.monotonic()
        stage.note("drawing the case")
        case = what if isinstance(what, dict) else draw_case(kind, seed, what, torch.device(device).type, only)
        stage.note("before the first call")
        outcome, text = _outcome(kind, case, device)
        broken = _device_error(device) if cuda else None
        if broken is not None:
            where = board.value.decode(errors="replace")
            outcome, text = FINDING, f"CUDA error: {broken}; in: {where}" + (f"\n{text}" if text else "")
        elif outcome == NO_MEMORY and cuda:
            torch.cuda.empty_cache()
        try:
            pipe.send((outcome, text, kind.labels(case), time.monotonic() - start))
        except (BrokenPipeError, OSError):
            return
        if broken is not None:
            os._exit(0)  # the context's destructor would abort
