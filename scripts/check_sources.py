"""Checks the rules that csrc/ lives by; prints each breach and exits with 1 when there is one.

    python scripts/check_sources.py

1. Kernels, launchers and parameter structs (.cu, .cuh, *params.h) include no torch header, nor any header that does.
2. Nothing in csrc/ prints or exits: kernels return a status, the api raises (csrc/dev/ is for developers and may).
3. Every source file is built: a .cu or .cpp that no line of sources.txt matches is forgotten.
4. What sources.txt compiles to PTX once for all architectures does not ask for the architecture.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.M)
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^Python\.h$")
PRINTS = re.compile(r"\b(printf|fprintf|std::cout|std::cerr|std::exit|exit|abort|std::abort|std::terminate)\b\s*[(<]")


def code_of(path: Path) -> str:
    """The file without comments, line breaks kept so that line numbers stay right."""
    text = path.read_text()
    text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def headers_of(path: Path) -> list[Path]:
    """The headers of csrc/ that the file includes itself. As the compilers look: beside the file, then in csrc/."""
    places = [(path.parent / name, CSRC / name) for quote, name in INCLUDE.findall(code_of(path)) if quote == '"']
    return [next(p for p in place if p.is_file()).resolve() for place in places if any(p.is_file() for p in place)]


def arch_chain(path: Path, seen: set[Path]) -> list[str] | None:
    """The chain of includes that leads from this file to one that asks for the architecture, or None."""
    seen.add(path)
    if "__CUDA_ARCH" in code_of(path):
        return [path.name]
    for header in headers_of(path):
        chain = None if header in seen else arch_chain(header, seen)
        if chain:
            return [path.name, *chain]
    return None


def torch_chain(path: Path, seen: dict[Path, list[str] | None]) -> list[str] | None:
    """The chain of includes that leads from this file to a torch header, or None."""
    if path in seen:
        return seen[path]
    seen[path] = [name for _, name in INCLUDE.findall(code_of(path)) if TORCH_HEADER.search(name)][:1] or None
    for header in headers_of(path):
        chain = None if seen[path] else torch_chain(header, seen)
        if chain:
            seen[path] = [header.name, *chain]
    return seen[path]


def main() -> int:
    breaches: list[str] = []
    files = sorted(p for p in CSRC.rglob("*") if p.suffix in {".cu", ".cuh", ".h", ".cpp"})
    seen: dict[Path, list[str] | None] = {}

    for path in files:
        name = path.relative_to(ROOT)
        if path.suffix in {".cu", ".cuh"} or path.name.endswith("params.h"):
            chain = torch_chain(path.resolve(), seen)
            if chain:
                breaches.append(f"{name}: includes {' -> '.join(chain)}; kernel files see no torch header")
        if "dev" not in path.relative_to(CSRC).parts:
            for number, line in enumerate(code_of(path).splitlines(), 1):
                match = PRINTS.search(line)
                if match:
                    breaches.append(f"{name}:{number}: {match.group(1)}; return a status or raise instead")

    built: set[Path] = set()
    for line in (ROOT / "sources.txt").read_text().splitlines():
        line = line.split("#")[0].strip()
        if line:
            part, folder, pattern = line.split()
            matched = list((ROOT / folder).rglob(pattern))
            built.update(matched)
            chains = [arch_chain(p.resolve(), set()) for p in matched] if part == "one_ptx" else []
            breaches += [f"sources.txt: one_ptx, but {' -> '.join(c)} asks for the architecture" for c in chains if c]
    for path in files:
        name = path.relative_to(ROOT)
        if path.suffix in {".cu", ".cpp"} and path not in built and "dev" not in path.relative_to(CSRC).parts:
            breaches.append(f"{name}: no line of sources.txt builds it; expected *_api.cpp or *_cpu.cpp")

    for breach in breaches:
        print(breach)
    print(f"{len(files)} source files checked, {len(breaches)} breaches of the rules")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
