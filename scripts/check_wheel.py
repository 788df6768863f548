"""Audits a built wheel: what it may call, link, export, and how large it is. Exits with 1 when a check fails.

    python scripts/check_wheel.py dist/kgopt-*.whl

Needs abi3audit, torch-abi-audit and auditwheel (pip install abi3audit torch-abi-audit auditwheel), and binutils.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

MAX_MIB = 18.0
OLDEST_TORCH = (2, 10)
# libtorch* and libc10 are torch's, the rest is every Linux's. libcudart, libtorch_cuda or libtorch_python here would
# tie the wheel to one build of torch.
ALLOWED_LIBRARIES = re.compile(
    r"^(libtorch|libtorch_cpu|libc10|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux-[\w-]+)\.so(\.\d+)?$"
)
EXPORTS = {"PyInit__C", "kgopt_forget_measurements", "kgopt_set_cache_prefix", "kgopt_set_tf32_switch"}


def tool(name: str) -> str:
    """A command-line tool, from this Python's environment first."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is not installed (pip install abi3audit torch-abi-audit auditwheel; apt install binutils)")
    return found


def run(*command: str) -> tuple[int, str]:
    done = subprocess.run([tool(command[0]), *command[1:]], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout.strip()


class Report:
    def __init__(self) -> None:
        self.failed = 0

    def add(self, ok: bool, what: str, detail: str = "") -> None:
        self.failed += not ok
        print(f"{'ok    ' if ok else 'FAILED'}  {what}")
        if detail and not ok:
            print("        " + detail.replace("\n", "\n        "))


def check(wheel: Path) -> int:
    report = Report()
    size = wheel.stat().st_size / 2**20
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        modules = sorted(Path(folder).rglob("*.so"))
        unpacked = sum(p.stat().st_size for p in modules) / 2**20
        report.add(size <= MAX_MIB, f"size {size:.2f} MiB, {unpacked:.2f} MiB unpacked (limit {MAX_MIB:g} MiB packed)")
        report.add("-cp310-abi3-" in wheel.name, f"tag cp310-abi3 ({wheel.name})")
        names = [str(p.relative_to(folder)) for p in modules]
        report.add(names == ["kgopt/_C.abi3.so"], "one module, kgopt/_C.abi3.so", f"has {names}")
        report.add("kgopt/py.typed" in archive.namelist(), "kgopt/py.typed is in")
        if not modules:
            return 1
        module = str(modules[0])

        code, text = run("abi3audit", "--strict", "--summary", str(wheel))
        report.add(code == 0, "abi3audit --strict", text)

        code, text = run("torch-abi-audit", "--check", "both", "--json", module)
        report.add(code == 0, "torch-abi-audit --check both", text)
        oldest = re.search(r'"min_torch[\w]*":\s*"(\d+)\.(\d+)', text)
        if oldest:
            needs = (int(oldest.group(1)), int(oldest.group(2)))
            report.add(
                needs <= OLDEST_TORCH,
                f"stable symbols are those of torch {needs[0]}.{needs[1]}",
                f"expected {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} at most",
            )

        code, text = run("readelf", "-dW", module)
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", text)
        strangers = [n for n in needed if not ALLOWED_LIBRARIES.match(n)]
        report.add(code == 0 and not strangers, f"links only {' '.join(needed)}", f"not allowed: {strangers}")
        report.add(not re.search(r"\((RPATH|RUNPATH)\)", text), "no rpath", text)

        code, text = run("nm", "-D", "--defined-only", module)
        exported = {line.split()[-1].split("@")[0] for line in text.splitlines()}
        report.add(
            code == 0 and exported == EXPORTS,
            f"exports only {' '.join(sorted(EXPORTS))}",
            f"exports {sorted(exported)[:20]}",
        )

        code, text = run("nm", "-D", "--undefined-only", module)
        report.add(code == 0 and "kgopt" not in text, "every symbol of its own is defined", text)
        for name in sorted(set(re.findall(r"\baoti_torch_(?:get_current_)?cuda_\w+", text))):
            report.add(bool(re.search(rf"\sw {name}\b", text)), f"{name} is weak, as a CPU-only torch lacks it")

    code, text = run("auditwheel", "show", str(wheel))
    report.add(code == 0, "auditwheel show", text)
    print("        " + text.replace("\n", "\n        "))
    print(f"{wheel.name}: {size:.2f} MiB, " + ("all checks passed" if not report.failed else f"{report.failed} FAILED"))
    return 1 if report.failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Audits a built kgopt wheel.")
    parser.add_argument("wheel", type=Path)
    return check(parser.parse_args().wheel)


if __name__ == "__main__":
    sys.exit(main())
