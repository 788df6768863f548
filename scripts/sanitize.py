"""Runs compute-sanitizer's four tools over tests/sanitize_ops.py; exits with 1 when one of them finds something.

    python scripts/sanitize.py [memcheck racecheck initcheck synccheck] [--sections=conv,pipeline]

Sections are those of sanitize_ops.py: racecheck of all takes long, and several can run side by side.

Build with KGOPT_LINEINFO=1 for source lines in the reports.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
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


def run_tool(sanitizer: str, tool: str, script: list[str], env: dict[str, str]) -> int:
    """0 when the tool finds nothing in kgopt's kernels."""
    command = [sanitizer, "--tool", tool]
    if tool == "initcheck":
        # Every kernel is watched, or what ATen wrote would count as uninitialized; only findings in ours count.
        command += ["--error-exitcode", "0", "--print-limit", "100000", *script, "--initcheck"]
        process = subprocess.run(command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        lines = process.stdout.splitlines()
        found = [i for i, line in enumerate(lines) if " at " in line and "kgopt" in line]
        for i in found[:20]:
            print("\n".join(lines[max(0, i - 1) : i + 3]))
        print("\n".join(lines[-3:]))
        return len(found) + process.returncode
    # Only this package's kernels are instrumented: cuDNN has findings of its own under racecheck.
    command += ["--error-exitcode", "1", "--kernel-name", "kernel_substring=kgopt", *script]
    if tool == "racecheck":
        command.append("--own-kernels")
    return subprocess.run(command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL).returncode


def main() -> int:
    sections = [a for a in sys.argv[1:] if a.startswith("--sections=")]
    tools = [a for a in sys.argv[1:] if a not in sections] or list(TOOLS)
    unknown = [t for t in tools if t not in TOOLS]
    if unknown:
        sys.exit(f"unknown tool {unknown[0]}, expected some of {' '.join(TOOLS)}")
    import torch

    if not torch.cuda.is_available():
        print("sanitize: no CUDA device here, nothing to run")
        return 0
    sanitizer = find_sanitizer()
    # Each tensor is an allocation of its own, so that a step over its end is seen.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    script = [sys.executable, str(ROOT / "tests/sanitize_ops.py"), *sections]
    failed = []
    for tool in tools:
        print(f"== {tool}", flush=True)
        start = time.monotonic()
        findings = run_tool(sanitizer, tool, script, env)
        outcome = "clean" if findings == 0 else f"FAILED ({findings})"
        print(f"== {tool}: {outcome}, {time.monotonic() - start:.0f} s", flush=True)
        if findings != 0:
            failed.append(tool)
    print(f"sanitize: {', '.join(failed)} FAILED" if failed else f"sanitize: {', '.join(tools)} clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
