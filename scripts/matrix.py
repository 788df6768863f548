"""Installs one built wheel into fresh environments and runs the CPU tests in each.

    python scripts/matrix.py dist/kgopt-*.whl
    python scripts/matrix.py dist/kgopt-*.whl --entries 3.10=2.10.0 3.11=2.13.0+cpu -- -q -x

An entry is PYTHON=TORCH. PYTHON is a version, found as pythonX.Y on PATH or among pyenv's versions; TORCH is a version
of torch, or "latest". The environment variable KGOPT_MATRIX replaces the default entries. Arguments after -- go to
pytest.

The environments are made one after another and deleted again, since a torch with CUDA takes several GB.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Oldest Python and oldest torch that the wheel's two ABIs allow, newest of both, a torch without CUDA, and one between:
# 2.11 refuses and computes what neither its predecessor nor its successors do.
DEFAULT_ENTRIES = "3.10=2.10.0 3.13=latest 3.11=2.13.0+cpu 3.12=2.11.0"
FACTS = "import sys, torch, kgopt; print(sys.version.split()[0], torch.__version__, torch.ops.kgopt.build_info())"
TEST_REQUIREMENTS = ["pytest>=9", "pytest-xdist>=3.5", "hypothesis>=6", "numpy", "setuptools"]


class StepError(Exception):
    """A step of an entry did not succeed; the text says which."""


def find_python(version: str) -> str:
    found = shutil.which(f"python{version}")
    # pyenv puts a shim on PATH for every version it has, also for those that are not switched on.
    if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
        return found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = sorted(root.glob(f"{version}.*/bin/python{version}")) + sorted(root.glob(f"{version}/bin/python"))
    if not candidates:
        raise StepError(f"no python{version} on PATH or in {root}")
    return str(candidates[-1])


def run(step: str, command: list[str], log: Path, env: dict[str, str]) -> str:
    """Runs a command with its output in the log; says every 15 seconds how it goes. Returns the output."""
    start = time.monotonic()
    print(f"    {step} ...", flush=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, cwd=ROOT
        )
        while True:
            try:
                process.wait(15)
                break
            except subprocess.TimeoutExpired:
                lines = log.read_text(errors="replace").strip().splitlines()
                last = re.sub(r"\s+", " ", lines[-1])[-80:] if lines else ""
                print(f"      {time.monotonic() - start:4.0f} s  {last}", flush=True)
    text = log.read_text(errors="replace")
    if process.returncode != 0:
        print("      " + "\n      ".join(text.strip().splitlines()[-25:]))
        raise StepError(f"{step} failed, see {log}")
    return text


def test_entry(entry: str, wheel: Path, folder: Path, logs: Path, pytest_args: list[str]) -> str:
    version, torch = entry.split("=", 1)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env.update(PIP_NO_CACHE_DIR="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_PROGRESS_BAR="off")
    env.update(PIP_COMPILE="0")  # Python compiles what is imported, which of torch is a part
    name = re.sub(r"[^\w.]+", "-", entry)

    def log(step: str) -> Path:
        return logs / f"{name}-{step}.log"

    python = str(folder / "bin/python")
    run("making the environment", [find_python(version), "-m", "venv", str(folder)], log("venv"), env)
    pip = [python, "-m", "pip", "install"]
    spec = "torch" if torch == "latest" else f"torch=={torch}"
    run(f"installing {spec}", [*pip, spec, *TEST_REQUIREMENTS], log("torch"), env)
    # From here on nothing may come from an index: the wheel must be satisfied with what is there.
    run("installing the wheel", [*pip, "--no-deps", "--no-index", str(wheel)], log("wheel"), env)
    run("checking requirements", [python, "-m", "pip", "check"], log("check"), env)
    facts = run("importing the package", [python, "-c", FACTS], log("import"), env).strip().splitlines()[-1]
    print(f"      Python, torch, build: {facts}")
    # Without PYTHONPATH, and with the package under python/, the tests see the installed package only.
    text = run("running the CPU tests", [python, "-m", "pytest", "-m", "not gpu", *pytest_args], log("tests"), env)
    return text.strip().splitlines()[-1].strip("= ")


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests one wheel in fresh environments.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--entries", nargs="+", metavar="PYTHON=TORCH", default=os.environ.get("KGOPT_MATRIX", DEFAULT_ENTRIES).split()
    )
    parser.add_argument("--keep", action="store_true", help="keep the environments in .matrix/")
    parser.add_argument("pytest_args", nargs="*", help="arguments for pytest, after --")
    argv = sys.argv[1:]
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    jobs = os.environ.get("TEST_JOBS") or min(4, len(os.sched_getaffinity(0)))
    pytest_args = ["-n", str(jobs), *(argv[split + 1 :] or ["-q"])]
    wheel = args.wheel.resolve()
    logs = ROOT / "build/matrix"
    logs.mkdir(parents=True, exist_ok=True)

    results: list[tuple[str, str, bool, float]] = []
    for number, entry in enumerate(args.entries, 1):
        if not re.fullmatch(r"\d+\.\d+=\S+", entry):
            parser.error(f"entry '{entry}', expected PYTHON=TORCH such as 3.11=2.13.0")
        print(f"[{number}/{len(args.entries)}] Python {entry.replace('=', ', torch ')}", flush=True)
        start = time.monotonic()
        if args.keep:
            folder = ROOT / ".matrix" / re.sub(r"[^\w.]+", "-", entry)
            shutil.rmtree(folder, ignore_errors=True)
        else:
            folder = Path(tempfile.mkdtemp(prefix="kgopt-matrix-"))
        try:
            outcome, ok = test_entry(entry, wheel, folder, logs, pytest_args), True
        except StepError as failure:
            outcome, ok = str(failure), False
        finally:
            if not args.keep:
                shutil.rmtree(folder, ignore_errors=True)
        results.append((entry, outcome, ok, time.monotonic() - start))

    print(f"\n{wheel.name}")
    for entry, outcome, ok, seconds in results:
        version, torch = entry.split("=", 1)
        print(f"  {'ok    ' if ok else 'FAILED'}  Python {version:5} torch {torch:12} {seconds:5.0f} s  {outcome}")
    return 0 if all(ok for _, _, ok, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
