"""Functions to syntax trees and back: the source that provably runs, and new code in its place.

Each file that reads or writes users' code begins here. What is looked for in the code is not known here.
"""

from __future__ import annotations
import __future__ as _future

import ast
import copy
import functools
import inspect
import linecache
import operator
import tokenize
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from kgopt.rewrite.optimized.disguise import as_original
from kgopt.rewrite.optimized.standing import Standing
from kgopt.rewrite.source.syntax.names import SCOPES, walk
from kgopt.rewrite.source.syntax.trees import placed

_FUTURE_FLAGS = sum(getattr(_future, name).compiler_flag for name in _future.all_feature_names)
_PARTS = operator.attrgetter("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars")
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class CannotRewriteError(Exception):
    """Why a method is left alone."""


def own_methods(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The plain methods that instances of a user's class see, without those of nn.Module."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base is nn.Module or base.__module__.startswith("torch."):
            continue
        for name, value in vars(base).items():
            if name not in seen and isinstance(value, types.FunctionType) and not name.startswith("__"):
                yield name, value
            seen.add(name)


def undecorated(function: types.FunctionType) -> types.FunctionType:
    """The function inside a decorator's that does no more with it than call it; else the function itself."""
    inside = getattr(function, "__wrapped__", None)
    if not isinstance(inside, types.FunctionType) or hasattr(inside, "__wrapped__"):
        return function
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    try:
        names = {name for name, cell in cells.items() if cell.cell_contents is inside}
    except ValueError:  # an empty cell
        return function
    return inside if len(names) == 1 and _only_calls(function, *names) else function


def _only_calls(function: types.FunctionType, name: str) -> bool:
    try:
        tree, _ = _trees_of(function)
    except CannotRewriteError:
        return False
    nodes = list(walk(tree))
    called = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
    reads = [n for n in nodes if isinstance(n, ast.Name) and n.id == name]
    # One whose own decorator (functools.wraps) reads it as well; that has run.
    decorators = {id(n) for d in tree.decorator_list for n in walk(d)}
    return all(id(n) in called or id(n) in decorators for n in reads) and not function.__code__.co_cellvars


_PARSED: dict[types.CodeType, ast.FunctionDef | str] = {}
_PARSED_AT_MOST = 1024  # trees: a program that makes classes as it runs never ends making them


def parse(function: types.FunctionType, decorated: bool = False) -> ast.FunctionDef:
    """The tree of a function's source, proven to be what runs. Not to be changed: it is kept.

    ``decorated``: it was found inside the function that its decorator made.
    """
    if decorated:
        return _trees_of(function)[1]
    known = _PARSED.get(function.__code__)
    if known is None:
        try:
            known = _parse_anew(function)
        except CannotRewriteError as error:
            known = str(error)
        if len(_PARSED) >= _PARSED_AT_MOST:
            _PARSED.clear()
        _PARSED[function.__code__] = known
    if isinstance(known, str):
        raise CannotRewriteError(known)
    return known


def _parse_anew(function: types.FunctionType) -> ast.FunctionDef:
    if function.__code__.co_flags & _GENERATORS:
        raise CannotRewriteError("is a generator or a coroutine")
    if hasattr(function, "__wrapped__"):
        raise CannotRewriteError("is wrapped by a decorator")
    # A decorator gave the function itself back (torch.jit.export): its code is what stands there.
    return _trees_of(function)[1]


def _trees_of(function: types.FunctionType) -> tuple[ast.FunctionDef, ast.FunctionDef]:
    """The tree with its decorators, and without them, which is proven to be what runs."""
    code = function.__code__
    try:
        lines, first = inspect.getsourcelines(code)
        text = "".join(lines)
        indented = text[:1].isspace()
        tree = ast.parse("if 1:\n" + text if indented else text)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError) as error:
        raise CannotRewriteError("has no source") from error
    found: Any = tree.body[0].body[0] if indented else tree.body[0]  # type: ignore[attr-defined]
    if not isinstance(found, ast.FunctionDef):
        raise CannotRewriteError("is not a plain function")
    ast.increment_lineno(found, first - (2 if indented else 1))
    if not found.args.args and not found.args.posonlyargs:
        raise CannotRewriteError("has no self")
    plain = copy.copy(found)
    plain.decorator_list = []
    if not _same_code(_compile(function, plain, ()), code):
        raise CannotRewriteError("has other source than what runs")
    return found, plain


def _compile(function: types.FunctionType, tree: ast.FunctionDef, more_free: tuple[str, ...]) -> types.CodeType:
    """Compiles a tree as the function was: closure variables as arguments around it, in its class for private names."""
    code = function.__code__
    owner = function.__qualname__.split(".")[-2:-1]
    inner: ast.stmt = tree
    if owner and owner[0] != "<locals>":
        inner = ast.ClassDef(owner[0], [], [], [tree], [])
        if "type_params" in ast.ClassDef._fields:
            setattr(inner, "type_params", [])  # noqa: B010  (Python 3.12 and later)
    free = [n for n in (*code.co_freevars, *more_free) if not (n == "__class__" and inner is not tree)]
    arguments = ast.arguments([], [ast.arg(n) for n in free], None, [], [], None, [])
    # The class's own name means what it means to the function: a global, as a rule.
    by_name = inner is not tree and owner[0] in code.co_names
    body: list[ast.stmt] = [ast.Global([owner[0]]), inner] if by_name else [inner]
    factory = ast.FunctionDef("_kgopt_factory", arguments, body, [], None)
    if "type_params" in ast.FunctionDef._fields:
        setattr(factory, "type_params", [])  # noqa: B010
    # The compiler calls functions of a module that was imported in the same file in another way.
    imports: list[ast.stmt] = [ast.Import([ast.alias(n)]) for n in sorted(_imported(code.co_filename))]
    module = ast.fix_missing_locations(ast.Module([*imports, factory], []))
    flags = code.co_flags & _FUTURE_FLAGS
    compiled = compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)
    names = ["_kgopt_factory", *(owner if inner is not tree else ()), tree.name]
    for name in names:
        compiled = next(c for c in compiled.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    inside = names[1:] if by_name else [names[0], "<locals>", *names[1:]]
    renamed: types.CodeType = _renamed(compiled, ".".join(inside), function.__qualname__)
    return renamed


@functools.lru_cache(maxsize=256)
def _imported(filename: str) -> frozenset[str]:
    """Names that the module of a file imports at its top level."""
    found: set[str] = set()
    try:
        waiting: list[ast.AST] = [ast.parse("".join(linecache.getlines(filename)))]
    except SyntaxError:
        return frozenset()
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((a.asname or a.name).split(".")[0] for a in node.names)
        waiting += [c for c in ast.iter_child_nodes(node) if not isinstance(c, (*SCOPES, ast.ClassDef, ast.expr))]
    return frozenset(found - {"*"})


def _same_code(a: types.CodeType, b: types.CodeType) -> bool:
    if _PARTS(a) != _PARTS(b) or len(a.co_consts) != len(b.co_consts):
        return False
    for x, y in zip(a.co_consts, b.co_consts, strict=True):
        if isinstance(x, types.CodeType) and isinstance(y, types.CodeType):
            if not _same_code(x, y):
                return False
        elif type(x) is not type(y) or repr(x) != repr(y):
            return False
    return True


def _with_code(function: types.FunctionType, code: types.CodeType, closure: tuple[Any, ...]) -> types.FunctionType:
    """Another function with the globals, name and defaults of one."""
    made = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def rebuild(
    function: types.FunctionType,
    tree: ast.FunctionDef,
    sites: Mapping[str, Any],
    standing: Standing,
    inside: bool = False,
) -> types.FunctionType:
    """The function with another tree, in which ``sites`` are names; ``inside``: what a decorator made calls it."""
    more: dict[str, Any] = {
        **sites,
        "_kgopt_class": standing.original,
        "_kgopt_seen": function,
        "_kgopt_code": function.__code__,
        "_kgopt_replaced": function if inside else standing.replaced,
    }
    tree.body.insert(0, _question(tree, "" if inside else standing.name))
    code = _compile(function, tree, tuple(more))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells.update((name, types.CellType(value)) for name, value in more.items())
    made = _with_code(function, code, tuple(cells[name] for name in code.co_freevars))
    for name in ("__annotations__", "__qualname__", "__doc__", "__module__"):
        setattr(made, name, getattr(function, name))
    made.__dict__.update(function.__dict__)
    return made


def redecorated(function: types.FunctionType, inside: types.FunctionType, standing: Standing) -> types.FunctionType:
    """What a decorator made, around another function than its ``__wrapped__``."""
    seen = function.__wrapped__  # type: ignore[attr-defined]
    cells = [types.CellType(inside) if cell.cell_contents is seen else cell for cell in function.__closure__ or ()]
    made = _with_code(function, function.__code__, tuple(cells))
    _kgopt_made, _kgopt_seen, _kgopt_code, _kgopt_standing = made, function, function.__code__, standing
    _kgopt_class, _kgopt_name = standing.original, standing.name

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_kgopt_class, _kgopt_name) is not _kgopt_seen or _kgopt_seen.__code__ is not _kgopt_code:
            return _kgopt_standing.replaced(self, *args, **kwargs)
        return _kgopt_made(self, *args, **kwargs)

    return as_original(method, function)  # type: ignore[no-any-return]


def _question(tree: ast.FunctionDef, name: str) -> ast.stmt:
    """The first statement of a method: where its class has another one now, or that has other code, it runs instead."""
    given = tree.args
    positional = [ast.Name(a.arg, ast.Load()) for a in (*given.posonlyargs, *given.args)]
    arguments: list[ast.expr] = [*positional]
    keywords = [ast.keyword(a.arg, ast.Name(a.arg, ast.Load())) for a in given.kwonlyargs]
    if given.vararg is not None:
        arguments.append(ast.Starred(ast.Name(given.vararg.arg, ast.Load()), ast.Load()))
    if given.kwarg is not None:
        keywords.append(ast.keyword(None, ast.Name(given.kwarg.arg, ast.Load())))
    question: Any = ast.parse(
        (f"if _kgopt_class.{name} is not _kgopt_seen or " if name else "if ")
        + "_kgopt_seen.__code__ is not _kgopt_code: return None"
    ).body[0]
    question.body[0].value = ast.Call(ast.Name("_kgopt_replaced", ast.Load()), arguments, keywords)
    return placed(question, tree.body[0])  # type: ignore[no-any-return]


def _renamed(code: Any, old: str, new: str) -> Any:
    """Code whose qualified names, and those of the code in it, begin with ``new`` instead of ``old``."""
    consts = []
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            c = _renamed(c, old, new)
        elif isinstance(c, str) and c.startswith(f"{old}.<locals>."):  # where Python 3.10 keeps them
            c = new + c[len(old) :]
        consts.append(c)
    changes: dict[str, Any] = {"co_consts": tuple(consts)}
    if hasattr(code, "co_qualname"):
        changes["co_qualname"] = new + code.co_qualname[len(old) :]
    return code.replace(**changes)
