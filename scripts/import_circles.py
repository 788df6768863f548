"""Finds import circles within python/kgopt; prints each and exits with 1 when there is one.

    python scripts/import_circles.py

Imports under ``if TYPE_CHECKING`` do not count, nor does a package for its own modules. Circles through imports inside
functions, which work but are as hard to read, are listed apart from those at module level.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "kgopt"
Graph = dict[str, set[str]]


def modules_of(package: Path) -> dict[str, Path]:
    """Every module by its dotted name; of an extension the stub."""
    found = {}
    for path in sorted(package.rglob("*.py*")):
        if path.suffix not in (".py", ".pyi"):
            continue
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(node: ast.AST, in_function: bool = False) -> Iterator[tuple[str, list[str], bool]]:
    """``(module, names, inside a function)`` of each import statement."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, [], in_function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield child.module, [alias.name for alias in child.names], in_function
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports_of(child, in_function or function)


def graphs_of(modules: dict[str, Path]) -> tuple[Graph, Graph]:
    """What each module imports at module level, and what it imports anywhere."""
    at_module_level: Graph = {name: set() for name in modules}
    anywhere: Graph = {name: set() for name in modules}
    for name, path in modules.items():
        for module, names, in_function in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
            parts = [f"{module}.{n}" for n in names]
            found = {p for p in parts if p in modules}
            if module in modules and (len(found) < len(parts) or not parts):
                found.add(module)
            for target in found:
                if target != name:
                    anywhere[name].add(target)
                    if not in_function:
                        at_module_level[name].add(target)
    return at_module_level, anywhere


def circles_of(graph: Graph) -> list[list[str]]:
    """Sets of modules each of which reaches all others of its set (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in number:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], number[target])
        if low[name] == number[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                circles.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(graph):
        if name not in number:
            visit(name)
    return circles


def main() -> int:
    modules = modules_of(PACKAGE)
    at_module_level, anywhere = graphs_of(modules)
    circles = circles_of(at_module_level)
    for circle in circles:
        print("import circle:", ", ".join(circle))
    in_functions = [circle for circle in circles_of(anywhere) if circle not in circles]
    for circle in in_functions:
        print("import circle through functions:", ", ".join(circle))
    count = len(circles) + len(in_functions)
    print(f"{len(modules)} modules, {count} import circles")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
