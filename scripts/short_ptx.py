"""PTX with few register names, which takes less than half of the compressed bytes.

    python scripts/short_ptx.py FILE.ptx ...  # rewrites the files

The compiler gives each value of a kernel a register and numbers them through, so no two pieces of PTX are equal, and
most of a compressed image is numbers. Here a register that lives within one basic block takes the smallest number that
is free there. ptxas computes live ranges itself: it makes the same machine code of both.
"""

from __future__ import annotations

import heapq
import re
import sys
from collections import defaultdict
from pathlib import Path

DECLARED = re.compile(r"\.reg\s+(\.\w+)\s+%([a-z]+)<\d+>;")
BRANCH_TARGET = re.compile(r"\$L__BB\d+_(\d+)")
# Where a basic block starts, and what ends one. More than there are only make a register live across blocks.
LABEL = re.compile(r"(?:^|[;{])\s*[$%\w]+:(?!:)")
LEAVES = re.compile(r"\b(?:bra|brx|ret|exit|trap)\b")
# An instruction without a predicate, up to the comma behind its first operand, which it writes or it is none of these.
RESULT = re.compile(r"[a-z][\w.:]*\s+(?:[%\w|]+|\{[^}]*\})\s*,")


def local_registers(body: list[str], register: re.Pattern[str]) -> dict[str, int]:
    """The registers that live within one basic block, each with the line of its last use."""
    block = 0
    home: dict[str, int] = {}  # its block, or -1 if it lives across blocks
    last: dict[str, int] = {}
    for at, line in enumerate(body):
        if ":" in line and LABEL.search(line):
            block += 1
        if "%" in line:
            # Inline assembly may have several instructions in a line.
            result = RESULT.match(line) if line.count(";") <= 1 else None
            written = result.end() if result else 0
            for found in register.finditer(line):
                name = found.group()
                if name not in home:
                    # One that is read first has its value from elsewhere, perhaps from a loop's last round.
                    home[name] = block if found.start() < written else -1
                elif home[name] != block:
                    home[name] = -1
                last[name] = at
        if LEAVES.search(line):
            block += 1
    return {name: at for name, at in last.items() if home[name] >= 0}


def shorten_body(body: list[str]) -> list[str]:
    """A function's lines between its braces: %r70 becomes %r2 or, if it lives across blocks, %rx2."""
    declared = [found.groups() for line in body if ".reg" in line for found in DECLARED.finditer(line)]
    kinds = {kind for _, kind in declared}
    if not kinds:
        return body
    register = re.compile(rf"%({'|'.join(sorted(kinds))})\d+\b")
    last_use = local_registers(body, register)
    # Of a predicate with two definitions ptxas knows less.
    predicates = tuple(f"%{kind}" for of_type, kind in declared if of_type == ".pred")
    last_use = {name: at for name, at in last_use.items() if name.rstrip("0123456789") not in predicates}
    ends: dict[int, list[str]] = defaultdict(list)
    for name, at in last_use.items():
        ends[at].append(name)
    free: dict[str, list[int]] = defaultdict(list)
    used: dict[str, int] = defaultdict(int)
    given: dict[str, str] = {}

    def rename(found: re.Match[str]) -> str:
        name = found.group()
        new = given.get(name)
        if new is None:
            group = found.group(1) if name in last_use else found.group(1) + "x"
            if free[group]:
                number = heapq.heappop(free[group])
            else:
                used[group] = number = used[group] + 1
            new = given[name] = f"%{group}{number}"
        return new

    lines = []
    for at, line in enumerate(body):
        lines.append(register.sub(rename, line) if "%" in line else line)
        for name in ends.get(at, ()):
            group = name.rstrip("0123456789")
            heapq.heappush(free[group[1:]], int(given[name][len(group) :]))

    def declare(found: re.Match[str]) -> str:
        groups = [group for group in (found.group(2), found.group(2) + "x") if used[group]]
        return " ".join(f".reg {found.group(1)} %{group}<{used[group] + 1}>;" for group in groups)

    return [DECLARED.sub(declare, line) if ".reg" in line else line for line in lines]


def shorten(ptx: str) -> str:
    """The module with other names for registers and branch targets, without comments and indentation."""
    lines = [(line.split("//")[0] if "//" in line and '"' not in line else line).strip() for line in ptx.split("\n")]
    lines = [BRANCH_TARGET.sub(r"$\1", line) if "$L" in line else line for line in lines if line]
    out: list[str] = []
    begin = depth = 0  # of the function's body that is being read, if there is one
    for at, line in enumerate(lines):
        if begin:
            depth += line.count("{") - line.count("}")
            if depth < 0:
                out += [*shorten_body(lines[begin:at]), line]
                begin = 0
        else:
            out.append(line)
            if line == "{":
                begin, depth = at + 1, 0
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        file.write_text(shorten(file.read_text()))
