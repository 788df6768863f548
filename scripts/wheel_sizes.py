"""What the CUDA kernels cost: bytes of the wheel and seconds of the compiler, by source file and by kernel.

    python scripts/wheel_sizes.py                        # of the newest build in build/objects
    python scripts/wheel_sizes.py --kernels 40           # and the 40 largest kernel templates with their instances
    python scripts/wheel_sizes.py --before OLD_OBJECTS   # machine code of two builds, compared function by function

The stored size is what the wheel holds: nvcc compresses each image, and the wheel's own compression gains nothing on
top. Seconds are by the clock, of each file's last compilation. --kernels and --before need cuobjdump, which comes with
the CUDA toolkit and with triton (--cuobjdump PATH).
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FATBIN_MAGIC = b"\x50\xed\x55\xba"
TEXT = ".text."
# nvcc names anonymous namespaces after the file and hashes of its path and content.
FILE_HASH = re.compile(r"(?<=_GLOBAL__N__)[0-9a-f]{8}_(\d+_\w+?_cu)_[0-9a-f]{8}")


def images(data: bytes) -> Iterator[tuple[str, int]]:
    """(architecture, stored bytes) of each image in the fat binaries of an object file or a library."""
    at = data.find(FATBIN_MAGIC)
    while at >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, entry_header, stored = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            yield f"{'PTX' if kind == 1 else 'sm'}_{arch}", stored
            entry += entry_header + stored
        at = data.find(FATBIN_MAGIC, end)


def elf_sections(data: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each section of a 64-bit ELF file that has content."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, length in headers:
        start = names + name
        if kind != 8:  # SHT_NOBITS
            yield data[start : data.index(b"\0", start)].decode(), data[offset : offset + length]


def find_cuobjdump(given: str | None) -> str:
    beside = Path(sysconfig.get_path("purelib")) / "triton/backends/nvidia/bin/cuobjdump"
    found = given or shutil.which("cuobjdump") or (str(beside) if beside.exists() else None)
    if found is None:
        sys.exit("no cuobjdump on PATH or in triton: pass --cuobjdump PATH")
    return found


def functions(obj: Path, cuobjdump: str) -> dict[str, dict[str, bytes]]:
    """architecture -> mangled name -> machine code."""
    found: dict[str, dict[str, bytes]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump, "-xelf", "all", str(obj.resolve())], cwd=folder, check=True, capture_output=True)
        for cubin in sorted(Path(folder).glob("*.cubin")):
            arch = cubin.name.split(".")[-2]
            for name, code in elf_sections(cubin.read_bytes()):
                if name.startswith(TEXT):
                    found[arch][FILE_HASH.sub(r"\1", name[len(TEXT) :])] = code
    return found


def demangled(names: list[str]) -> list[str]:
    if not names or shutil.which("c++filt") is None:
        return names
    done = subprocess.run(["c++filt"], input="\n".join(names), text=True, capture_output=True, check=True)
    return done.stdout.rstrip("\n").split("\n")


def template_of(name: str) -> str:
    match = re.search(r"\w*kernel\w*", name)
    return match.group(0) if match else name


def objects_of(folder: Path) -> dict[str, Path]:
    return {str(p.relative_to(folder))[:-2]: p for p in sorted(folder.rglob("*.cu.o"))}


def newest_build() -> Path:
    builds = sorted((ROOT / "build/objects").glob("cuda-*"), key=lambda p: p.stat().st_mtime)
    if not builds:
        sys.exit("no build/objects/cuda-*: run `make build` with an nvcc first")
    return builds[-1]


def seconds_of(obj: Path) -> float:
    stamp = obj.with_suffix(".cmd")
    return float(stamp.read_text().split("\n")[0]) if stamp.exists() else 0.0


def print_table(title: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [title, *rows]) for i in range(len(title))]
    for row in [title, *rows]:
        print(
            "  ".join(
                f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}"
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
        )


def report_files(folder: Path) -> None:
    sizes = {source: Counter[str]() for source in objects_of(folder)}
    for source, obj in objects_of(folder).items():
        for arch, stored in images(obj.read_bytes()):
            sizes[source][arch] += stored
    total: Counter[str] = sum(sizes.values(), Counter())
    archs = sorted(total)
    seconds = {source: seconds_of(obj) for source, obj in objects_of(folder).items()}

    def row(name: str, size: Counter[str], time: float) -> list[str]:
        return [name, *(f"{size[a] / 1024:.0f}" for a in archs), f"{size.total() / 1024:.0f}", f"{time:.1f}"]

    rows = [row(s, sizes[s], seconds[s]) for s in sorted(sizes, key=lambda s: -sizes[s].total())]
    rows.append(row("all", total, sum(seconds.values())))
    print_table(["stored KiB", *archs, "sum", "seconds"], rows)


def report_kernels(folder: Path, cuobjdump: str, most: int) -> None:
    count: Counter[tuple[str, str, str]] = Counter()
    size: Counter[tuple[str, str, str]] = Counter()
    for source, obj in objects_of(folder).items():
        for arch, found in functions(obj, cuobjdump).items():
            for name, code in zip(demangled(list(found)), found.values(), strict=True):
                key = (arch, source, template_of(name))
                count[key] += 1
                size[key] += len(code)
    for arch in sorted({key[0] for key in size}):
        of_arch = [(key, bytes_) for key, bytes_ in size.most_common() if key[0] == arch]
        instances = sum(count[key] for key, _ in of_arch)
        print(f"\n{arch}: {instances} instances, {sum(b for _, b in of_arch) / 2**20:.1f} MiB of machine code")
        rows = [
            [key[2], str(count[key]), f"{bytes_ / 1024:.0f}", f"{bytes_ / 1024 / count[key]:.1f}", key[1]]
            for key, bytes_ in of_arch[:most]
        ]
        print_table(["kernel", "instances", "KiB", "KiB each", "file"], rows)


def compare(before: Path, after: Path, cuobjdump: str) -> int:
    """Counts functions by what became of them; 1 if a function that is in both builds changed."""
    fates: dict[str, Counter[str]] = defaultdict(Counter)
    old_objects, new_objects = objects_of(before), objects_of(after)
    for source in sorted({*old_objects, *new_objects}):
        old = functions(old_objects[source], cuobjdump) if source in old_objects else {}
        new = functions(new_objects[source], cuobjdump) if source in new_objects else {}
        for arch in {*old, *new}:
            was, now = old.get(arch, {}), new.get(arch, {})
            for name in {*was, *now}:
                fate = "new" if name not in was else "gone" if name not in now else "equal"
                if fate == "equal" and was[name] != now[name]:
                    fate = "changed"
                    print(f"changed: {arch} {source} {name}: {len(was[name])} to {len(now[name])} bytes")
                fates[arch][fate] += 1
    for arch, counts in sorted(fates.items()):
        print(arch, ", ".join(f"{counts[fate]} {fate}" for fate in ("equal", "changed", "new", "gone")))
    return 1 if any(counts["changed"] for counts in fates.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Sizes of the kernels in a build, and the seconds that they took.")
    parser.add_argument("objects", type=Path, nargs="?", help="folder of object files (default: the newest build)")
    parser.add_argument("--kernels", type=int, metavar="N", help="list the N largest kernel templates, too")
    parser.add_argument("--before", type=Path, metavar="OBJECTS", help="compare machine code with this earlier build")
    parser.add_argument("--cuobjdump", help="where cuobjdump is")
    args = parser.parse_args()
    folder = args.objects or newest_build()
    if args.before:
        return compare(args.before, folder, find_cuobjdump(args.cuobjdump))
    report_files(folder)
    if args.kernels:
        report_kernels(folder, find_cuobjdump(args.cuobjdump), args.kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
