"""Who imports whom: no circles in the package, and the layers of kgopt.rewrite, which its docstring has."""

import ast
import re
from pathlib import Path

import kgopt
from kgopt import rewrite

ROOT = Path(kgopt.__file__).parent


def imports():
    """module -> the modules of the package that it imports, also inside functions; not those for type checkers."""
    files = {}
    for path in ROOT.rglob("*.py"):
        parts = ["kgopt", *path.relative_to(ROOT).with_suffix("").parts]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: _imported(ast.parse(path.read_text()), set(files) - {name}) for name, path in files.items()}


def _imported(tree, modules):
    found, waiting = set(), [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module != "kgopt":
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(inner & modules or {node.module})
        elif isinstance(node, ast.ImportFrom):  # `from kgopt import _C` takes no name that kgopt itself makes
            found.update(f"kgopt.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)
    return found & modules


def test_nothing_imports_itself_through_others():
    """Seven files of rewrite/ and seven of cli/ imported each other, partly inside functions, so none could be read or
    changed alone.
    """
    left = imports()
    while True:
        leaves = {name for name, needed in left.items() if not needed & left.keys()}
        if not leaves:
            break
        left = {name: needed for name, needed in left.items() if name not in leaves}
    circle = {name: sorted(needed & left.keys()) for name, needed in left.items()}
    assert not circle


def layers():
    """The folders of each layer, first to last, from the table in the docstring of kgopt.rewrite."""
    found = []
    for row in rewrite.__doc__.split("=\n")[2].splitlines()[:-1]:
        if not row.startswith(" "):
            found.append(set())
        found[-1].update(row[9:38].split())
    return found


def test_each_folder_of_rewrite_imports_from_its_layer_or_those_before():
    place = {folder: i for i, folders in enumerate(layers()) for folder in folders}
    assert place.keys() == {p.stem for p in (ROOT / "rewrite").iterdir() if not p.name.startswith("__")}

    def layer(module):
        return place[module.split(".")[2]]

    for module, needed in imports().items():
        if module.startswith("kgopt.rewrite."):
            later = [n for n in needed if n.startswith("kgopt.rewrite.") and layer(n) > layer(module)]
            assert not later, f"{module} imports {later}, of a later layer"


def test_folders_of_rewrite_stay_small():
    """71 files lay in one."""
    folders = [ROOT / "rewrite", *(p for p in (ROOT / "rewrite").rglob("*") if p.is_dir())]
    assert not {str(f): n for f in folders if (n := len(list(f.glob("*.py")))) > 15}


def test_the_documentation_has_the_same_layers():
    """Its table lacked six files."""
    text = (Path(__file__).parents[1] / "docs/optimize_inside.md").read_text()
    rows = text.split("| layer | folders | question |")[1].split("\n\n")[0].splitlines()[2:]
    assert [set(re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[2])) for row in rows] == layers()


def test_the_code_that_the_documentation_names_for_a_reason_is_there():
    text = (Path(__file__).parents[1] / "docs/optimize_inside.md").read_text()
    rows = text.split('| "why" says |')[1].split("\n\n")[0].splitlines()[2:]
    named = [re.findall(r"`([\w/.]+)`", row.split("|")[2]) for row in rows]
    assert len(named) > 10
    for names in named:
        file = ""
        for name in names:
            if name.endswith(".py"):
                file = (ROOT / "rewrite" / name).read_text()
            else:
                assert all(re.search(rf"(def |class |    ){part}\b", file) for part in name.split(".")), name
