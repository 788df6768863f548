"""Runs compute-sanitizer's four tools over tests/sanitize_ops.py; exits with 1 when one of them finds something.

    python scripts/sanitize.py                                       # every tool over every section
    python scripts/sanitize.py racecheck --sections=conv,pipeline --jobs=8

Sections are those of sanitize_ops.py. Each tool runs each section in a process of its own, --jobs of them side by side.
Results are printed as they come, so that a run which a time limit ends says how far it was; the output of each is in
build/sanitize/TOOL-SECTION.log.

Build with KGOPT_LINEINFO=1 for source lines in the reports.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def find_sanitizer() -> str:
    """compute-sanitizer of PATH, of CUDA_HOME, or of pip's nvidia-cuda-sanitizer-api."""
    places = [shutil.which("compute-sanitizer")]
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    homes += sorted(map(str, Path(sysconfig.get_path("purelib")).glob("nvidia/cu[0-9]*")), reverse=True)
    for home in filter(None, homes):
        places += [f"{home}/bin/compute-sanitizer", f"{home}/compute-sanitizer/compute-sanitizer"]
    for place in filter(None, places):
        if Path(place).exists():
            if not os.access(place, os.X_OK):
                Path(place).chmod(0o755)
            return place
    sys.exit("no compute-sanitizer on PATH, in CUDA_HOME or from pip (pip install nvidia-cuda-sanitizer-api)")


def run_tool(sanitizer: str, tool: str, section: str, log: Path) -> tuple[int, str]:
    """How many findings there are in kgopt's kernels, 0 for none, and what to print of them."""
    # Each tensor is an allocation of its own, so that a step over its end is seen.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    script = [sys.executable, str(ROOT / "tests/sanitize_ops.py"), f"--sections={section}"]
    command = [sanitizer, "--tool", tool]
    if tool == "initcheck":
        # Every kernel is watched, or what ATen wrote would count as uninitialized; only findings in ours count.
        command += ["--error-exitcode", "0", "--print-limit", "100000", *script, "--initcheck"]
    else:
        # Only this package's kernels are instrumented: cuDNN has findings of its own under racecheck.
        command += ["--error-exitcode", "1", "--kernel-name", "kernel_substring=kgopt", *script]
        if tool == "racecheck":
            command.append("--own-kernels")
        elif tool == "synccheck":
            command.append("--synccheck")
    with log.open("w") as out:
        code = subprocess.run(
            command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        ).returncode
    lines = log.read_text(errors="replace").splitlines()
    if tool != "initcheck":
        return code, "" if code == 0 else "\n".join(
            [line for line in lines if line.startswith("=====")][:40] + lines[-3:]
        )
    found = [i for i, line in enumerate(lines) if " at " in line and "kgopt" in line]
    text = [line for i in found[:20] for line in lines[max(0, i - 1) : i + 3]]
    findings = len(found) + abs(code)
    return findings, "\n".join([*text, *lines[-3:]]) if findings else ""


def run_all(sanitizer: str, tools: Sequence[str], sections: Sequence[str], jobs: int) -> list[str]:
    """Runs each tool over each section and prints each result when it is there. Returns what found something."""
    logs = ROOT / "build/sanitize"
    logs.mkdir(parents=True, exist_ok=True)

    def one(tool: str, section: str) -> tuple[str, int, str, float]:
        start = time.monotonic()
        findings, text = run_tool(sanitizer, tool, section, logs / f"{tool}-{section}.log")
        return f"{tool} {section}", findings, text, time.monotonic() - start

    failed = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as threads:
        runs = [threads.submit(one, tool, section) for tool in tools for section in sections]
        for done, run in enumerate(concurrent.futures.as_completed(runs), 1):
            name, findings, text, seconds = run.result()
            outcome = f"FAILED ({findings})" if findings else "clean"
            print(f"[{done}/{len(runs)}] {name}: {outcome}, {seconds:.0f} s", flush=True)
            if findings:
                print(text, flush=True)
                failed.append(name)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description="compute-sanitizer over every CUDA op")
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"some of {' '.join(TOOLS)} (default: all)")
    parser.add_argument("--sections", metavar="NAME,NAME", help="of tests/sanitize_ops.py (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=min(4, os.cpu_count() or 1), metavar="N", help="default: %(default)s"
    )
    args = parser.parse_args()
    import torch

    sys.path.insert(0, str(ROOT / "tests"))
    from sanitize_ops import SECTIONS

    tools, sections = args.tools or list(TOOLS), args.sections.split(",") if args.sections else list(SECTIONS)
    for given, known in ((tools, TOOLS), (sections, SECTIONS)):
        for name in given:
            if name not in known:
                parser.error(f"{name!r} is given, expected some of {', '.join(known)}")
    if not torch.cuda.is_available():
        print("sanitize: no CUDA device here, nothing to run")
        return 0
    failed = run_all(find_sanitizer(), tools, sections, args.jobs)
    print(f"sanitize: {', '.join(failed)} FAILED" if failed else f"sanitize: {', '.join(tools)} clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
