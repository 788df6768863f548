"""What a GPU has to show before a release, side by side, within a time limit; nothing is lost where the limit cuts.

    python scripts/gpu_check.py                                  all of it, with the kgopt that this Python imports
    python scripts/gpu_check.py tests --minutes 6
    python scripts/gpu_check.py fuzz networks soak memcheck racecheck initcheck synccheck --minutes 8 --out build/gpu

Each job is a process of its own that writes ``<out>/<job>.log``. Cores are shared out by weight. At the limit a job is
interrupted as by Ctrl-C, so that pytest and the search print what they have found so far; <out>/failures.log has each
failed test as it came. The last lines are a table of what became of each job. Exits with 1 unless all of them passed in
time.

Times of kernels are not taken here: a benchmark wants the machine for itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Job:
    """A command, and how many of the cores it wants beside the others; ``{n}`` becomes its number of processes."""

    command: tuple[str, ...]
    weight: int = 1
    started: float = 0.0
    seconds: float = 0.0
    outcome: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)


def _jobs(out: Path, seed: int, minutes: float) -> dict[str, Job]:
    py = sys.executable
    fuzz = (py, "-m", "kgopt", "fuzz", "--device", "cuda", "--seed", str(seed), "--workers", "{n}")
    soak = (py, str(ROOT / "benchmarks/soak.py"), "--calls", "200000", "--together", "--seconds", f"{50 * minutes:.0f}")
    pytest = (py, "-m", "pytest", "-q", "-rf", "-m", "gpu", "-p", "no:cacheprovider", "-n", "{n}", str(ROOT / "tests"))
    jobs = {
        "tests": Job(pytest, 8),
        "fuzz": Job((*fuzz, "--kind", "ops", "--calls", "100000", "--json", str(out / "fuzz.json")), 5),
        "networks": Job((*fuzz, "--kind", "networks", "--calls", "500", "--json", str(out / "networks.json")), 3),
        "soak": Job((*soak, "--json", str(out / "soak.json")), 2),
    }
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        jobs[tool] = Job((py, str(ROOT / "scripts/sanitize.py"), tool, "--jobs={n}"))
    return jobs


def _start(name: str, job: Job, processes: int, out: Path) -> None:
    command = [part.replace("{n}", str(processes)) for part in job.command]
    print(f"{name}: {' '.join(command)}", flush=True)
    job.started = time.monotonic()
    with (out / f"{name}.log").open("wb") as log:
        # A group of its own: an interrupt reaches the processes that it started.
        job.process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "KGOPT_TEST_LOG": str(out / "failures.log")},
        )


def _stop(job: Job, how: signal.Signals) -> None:
    assert job.process is not None
    try:
        if how is signal.SIGINT:
            job.process.send_signal(how)
        else:
            os.killpg(job.process.pid, how)
    except ProcessLookupError:
        pass


def _wait(jobs: dict[str, Job], deadline: float, grace: float) -> None:
    """Until all have ended: interrupted at the deadline, killed ``grace`` seconds after it."""
    interrupted: set[str] = set()
    while any(not job.outcome for job in jobs.values()):
        for name, job in jobs.items():
            assert job.process is not None
            now = time.monotonic()
            if not job.outcome and job.process.poll() is not None:
                job.seconds = now - job.started
                passed = "passed" if job.process.returncode == 0 else f"FAILED ({job.process.returncode})"
                job.outcome = "cut by the time limit" if name in interrupted else passed
                print(f"{name}: {job.outcome}, {job.seconds:.0f} s", flush=True)
            elif not job.outcome and now > deadline and name not in interrupted:
                interrupted.add(name)
                _stop(job, signal.SIGINT)
            elif not job.outcome and now > deadline + grace:
                _stop(job, signal.SIGKILL)
        time.sleep(0.2)


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:110] if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", nargs="*", help="some of those above; all where none is named")
    parser.add_argument("--minutes", type=float, default=30.0, help="limit for all of them together")
    parser.add_argument("--grace", type=float, default=20.0, help="seconds from the interrupt to the kill")
    parser.add_argument("--seed", type=int, default=1, help="of the drawn calls and networks")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check")
    args = parser.parse_args()
    out = args.out.resolve()
    known = _jobs(out, args.seed, args.minutes)
    for name in args.job:
        if name not in known:
            parser.error(f"job is {name!r}, expected some of: {' '.join(known)}")
    jobs = {name: job for name, job in known.items() if not args.job or name in args.job}
    out.mkdir(parents=True, exist_ok=True)
    (out / "failures.log").unlink(missing_ok=True)
    cores = len(os.sched_getaffinity(0))
    weights = sum(job.weight for job in jobs.values())
    begin = time.monotonic()
    for name, job in jobs.items():
        _start(name, job, max(1, cores * job.weight // weights), out)
    try:
        _wait(jobs, begin + 60 * args.minutes, args.grace)
    finally:
        for job in jobs.values():
            if not job.outcome:
                _stop(job, signal.SIGKILL)
    print()
    for name, job in jobs.items():
        print(f"{name:10} {job.outcome:22} {job.seconds:5.0f} s  {_last_line(out / f'{name}.log')}")
    return 0 if all(job.outcome == "passed" for job in jobs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
