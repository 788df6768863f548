"""The front end for Python source: chains in the methods of a module that we did not write.

A method is parsed, and in every block of statements the values that modules and functions make are described as
:mod:`~kgopt.rewrite.patterns` nodes. A chain is taken only where the values inside it are provably read by nobody else:
no other expression, no later statement on any path (:func:`_liveness`), no closure, no exception handler. The code
becomes

    if _kgopt_0.ready(self.norm, self.act, x):      # all checks, at each call
        x = _kgopt_0.run(self.norm, self.act, x)
    else:
        x = self.norm(x)                            # the user's own statements, on their own lines
        x = self.act(x)

(in an expression: ``run(...) if ready(...) else self.act(self.norm(x))``), compiled with the function's globals,
closure, file name and line numbers. Before that the source is compiled unchanged and compared with the bytecode that
runs, so a file edited since it was imported changes nothing.
"""

from __future__ import annotations
import __future__ as _future

import ast
import builtins
import copy
import functools
import inspect
import linecache
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kgopt.rewrite.disguise import original_class
from kgopt.rewrite.formats import Keep
from kgopt.rewrite.patterns import (
    OTHER,
    UNKNOWN,
    Chain,
    Match,
    Node,
    activation_of,
    conv_of,
    describe_function,
    describe_method,
    is_activation,
    is_trivial,
    match,
    may_be_identity,
    why_alone,
)
from kgopt.rewrite.sites import Site, has_own_methods, is_hooked
from kgopt.rewrite.standing import Standing
from kgopt.rewrite.sums import Sum

# The role of an expression such as ``self.norm1``: (kind, name, inplace).
Role = tuple[str, str, bool]
Roles = tuple[tuple[str, Role], ...]
Path = tuple[str | int, ...]
Replacement = Site | Sum | Keep  # what a rewritten method calls

_FUTURE_FLAGS = sum(getattr(_future, name).compiler_flag for name in _future.all_feature_names)
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# What may be asked of a tensor, or called with it, whatever its strides.
_STRIDELESS = {"contiguous", "device", "dim", "dtype", "ndim", "shape", "size", "split"}
_STRIDELESS_FUNCTIONS = (torch.cat, torch.add, torch.split)
_LOOKS_AT_LOCALS = {"locals", "vars", "dir", "eval", "exec", "globals", "breakpoint"}


class CannotRewriteError(Exception):
    """Why a method is left alone."""


@dataclass
class Found:
    """What one method holds: chains by the path of their norm (``self.a.b[0]``: a, b, 0), and reasons for none."""

    chains: dict[Path, list[Chain]] = field(default_factory=dict)
    reasons: dict[Path, str] = field(default_factory=dict)


# ----------------------------------------------------------------------------------------------------------------------
# Modules to roles


def role_of(module: Any) -> Role | None:
    """What a child does in a chain; None: something else, or somebody watches it."""
    if not isinstance(module, nn.Module):
        return None
    if is_hooked(module):
        return ("other", f"{type(module).__name__} has hooks", False) if is_activation(module) else None
    if getattr(type(module), "_kgopt_leaf", None) is type(module):
        return ("norm", "group" if isinstance(module, nn.GroupNorm) else "instance", False)
    conv = conv_of(module)
    if conv is not None:
        return None if has_own_methods(module, original_class(module) or type(module)) else ("conv", conv, False)
    name = activation_of(module)
    if name is not None:
        return ("act", name, bool(getattr(module, "inplace", False)))
    if is_activation(module):
        return ("other", f"{module} has parameters that no op takes", False)
    return ("same", "", False) if may_be_identity(module) else None


def _role_in_code(root: nn.Module, path: Path) -> Role | None:
    """:func:`role_of` what a path means, and "tail" for a Sequential that ends in a convolution, which can wait for a
    sum. Of a path that begins with "" only: is it a module, or None?
    """
    if path[:1] == ("",):
        is_none = len(path) == 2 and path[1] in root.__dict__ and root.__dict__[path[1]] is None
        return ("module", "", False) if is_none or isinstance(child_at(root, path[1:]), nn.Module) else None
    module = child_at(root, path)
    role = role_of(module)
    if role is None and isinstance(module, nn.Sequential) and not is_hooked(module):
        last: Any = module
        while isinstance(last, nn.Sequential) and last._modules:
            last = next(reversed(last._modules.values()))
        return None if conv_of(last) is None else ("tail", "", False)
    return role


def child_at(module: Any, path: Path) -> Any:
    """The child that an expression such as ``self.a.b[0]`` means; None, where that is not certain."""
    for step in path:
        if isinstance(step, str) and not hasattr(type(module), step):
            module = getattr(module, "_modules", {}).get(step)
        elif isinstance(step, int) and isinstance(module, (nn.ModuleList, nn.Sequential)):
            module = module[step] if -len(module) <= step < len(module) else None
        else:
            return None
    return module


def _path(expression: ast.expr, root: str, owner: str) -> Path | None:
    """``self.a.b[0]`` as ("a", "b", 0); ``owner`` is the class whose private names (``self.__a``) these are."""
    if isinstance(expression, ast.Name):
        return () if expression.id == root else None
    if isinstance(expression, ast.Attribute):
        base = _path(expression.value, root, owner)
        name = expression.attr
        if name.startswith("__") and not name.endswith("__"):
            name = f"_{owner.lstrip('_')}{name}"
        return None if base is None else (*base, name)
    if isinstance(expression, ast.Subscript):
        base = _path(expression.value, root, owner)
        index = _constant(expression.slice)
        return None if base is None or type(index) is not int else (*base, index)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Functions to syntax trees and back


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


_PARSED: dict[types.CodeType, ast.FunctionDef | str] = {}
_PARSED_AT_MOST = 1024  # trees: a program that makes classes as it runs never ends making them


def _parse(function: types.FunctionType) -> ast.FunctionDef:
    """The tree of a function's source, proven to be what runs. Not to be changed: it is kept."""
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
    code = function.__code__
    if code.co_flags & _GENERATORS:
        raise CannotRewriteError("is a generator or a coroutine")
    if hasattr(function, "__wrapped__"):
        raise CannotRewriteError("is wrapped by a decorator")
    try:
        lines, first = inspect.getsourcelines(code)
        text = "".join(lines)
        indented = text[:1].isspace()
        tree = ast.parse("if 1:\n" + text if indented else text)
    except (OSError, TypeError, SyntaxError, IndentationError) as error:
        raise CannotRewriteError("has no source") from error
    found: Any = tree.body[0].body[0] if indented else tree.body[0]  # type: ignore[attr-defined]
    if not isinstance(found, ast.FunctionDef):
        raise CannotRewriteError("is not a plain function")
    if found.decorator_list:
        raise CannotRewriteError("has a decorator")
    ast.increment_lineno(found, first - (2 if indented else 1))
    if not found.args.args and not found.args.posonlyargs:
        raise CannotRewriteError("has no self")
    if not _same_code(_compile(function, found, ()), code):
        raise CannotRewriteError("has other source than what runs")
    return found


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
    factory = ast.FunctionDef("_kgopt_factory", arguments, [inner], [], None)
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
    renamed: types.CodeType = _renamed(compiled, ".".join([names[0], "<locals>", *names[1:]]), function.__qualname__)
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
        waiting += [c for c in ast.iter_child_nodes(node) if not isinstance(c, (*_SCOPES, ast.ClassDef, ast.expr))]
    return frozenset(found - {"*"})


def _same_code(a: types.CodeType, b: types.CodeType) -> bool:
    if (a.co_code, a.co_names, a.co_varnames, a.co_freevars, a.co_cellvars) != (
        b.co_code,
        b.co_names,
        b.co_varnames,
        b.co_freevars,
        b.co_cellvars,
    ):
        return False
    if len(a.co_consts) != len(b.co_consts):
        return False
    for x, y in zip(a.co_consts, b.co_consts, strict=True):
        if isinstance(x, types.CodeType) and isinstance(y, types.CodeType):
            if not _same_code(x, y):
                return False
        elif type(x) is not type(y) or repr(x) != repr(y):
            return False
    return True


def _rebuild(
    function: types.FunctionType, tree: ast.FunctionDef, sites: dict[str, Replacement], standing: Standing
) -> types.FunctionType:
    more: dict[str, Any] = {
        **sites,
        "_kgopt_class": standing.original,
        "_kgopt_seen": function,
        "_kgopt_code": function.__code__,
        "_kgopt_replaced": standing.replaced,
    }
    tree.body.insert(0, _question(tree, standing.name))
    code = _compile(function, tree, tuple(more))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells.update((name, types.CellType(value)) for name, value in more.items())
    made = types.FunctionType(
        code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__annotations__ = function.__annotations__
    made.__qualname__ = function.__qualname__
    made.__doc__ = function.__doc__
    made.__module__ = function.__module__
    made.__dict__.update(function.__dict__)
    return made


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
        f"if _kgopt_class.{name} is not _kgopt_seen or _kgopt_seen.__code__ is not _kgopt_code: return None"
    ).body[0]
    question.body[0].value = ast.Call(ast.Name("_kgopt_replaced", ast.Load()), arguments, keywords)
    for node in ast.walk(question):
        if "lineno" in node._attributes:
            ast.copy_location(node, tree.body[0])
    return question  # type: ignore[no-any-return]


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


# ----------------------------------------------------------------------------------------------------------------------
# Names: what is read, what is written, what lives on

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _reads(tree: ast.AST | list[Any] | None) -> set[str]:
    """Names that code may read, nested scopes and all; deleting and ``+=`` read too."""
    found: set[str] = set()
    for part in tree if isinstance(tree, list) else [tree] if tree is not None else []:
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def _writes(tree: ast.AST) -> set[str]:
    """Names that code may write or delete."""
    found = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)):
            found.add(node.name or "")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((a.asname or a.name).split(".")[0] for a in node.names)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
    return found


@dataclass
class _Live:
    """Names whose value may still be read, before and after each statement."""

    before: dict[int, set[str]] = field(default_factory=dict)
    after: dict[int, set[str]] = field(default_factory=dict)


def _liveness(body: list[ast.stmt]) -> _Live:
    live = _Live()
    _live_block(body, set(), set(), None, live)
    return live


def _live_block(
    body: list[ast.stmt], after: set[str], always: set[str], loop: tuple[set[str], set[str]] | None, live: _Live
) -> set[str]:
    """What lives before a block; ``loop``: what lives where break and continue go; ``always``: what handlers read."""
    for statement in reversed(body):
        after = after | always
        live.after[id(statement)] = live.after.get(id(statement), set()) | after
        after = _live_statement(statement, after, always, loop, live) | always
        live.before[id(statement)] = live.before.get(id(statement), set()) | after
    return after


def _live_statement(
    s: ast.stmt, after: set[str], always: set[str], loop: tuple[set[str], set[str]] | None, live: _Live
) -> set[str]:
    if isinstance(s, (ast.Return, ast.Raise)):
        return _reads(s)
    if isinstance(s, ast.Break):
        return set(loop[0]) if loop else after
    if isinstance(s, ast.Continue):
        return set(loop[1]) if loop else after
    if isinstance(s, ast.If):
        branches = _live_block(s.body, after, always, loop, live) | _live_block(s.orelse, after, always, loop, live)
        return _reads(s.test) | branches
    if isinstance(s, (ast.For, ast.AsyncFor, ast.While)):
        head = _reads(s.test if isinstance(s, ast.While) else s.iter) | _live_block(s.orelse, after, always, loop, live)
        head |= after
        while True:
            wider = head | _live_block(s.body, head, always, (after, head), live)
            if wider == head:
                return head | (_reads(s.target) if not isinstance(s, ast.While) else set())
            head = wider
    if isinstance(s, (ast.With, ast.AsyncWith)):
        items = {name for item in s.items for name in _reads(item)}
        return items | _live_block(s.body, after, always, loop, live)
    if isinstance(s, (ast.Assign, ast.AnnAssign)):
        targets = s.targets if isinstance(s, ast.Assign) else [s.target]
        killed = {t.id for t in targets if isinstance(t, ast.Name)} if s.value is not None else set()
        return (after - killed) | _reads(s)
    inner = [b for b in ast.iter_child_nodes(s) if isinstance(b, (ast.stmt, ast.ExceptHandler, ast.match_case))]
    if inner and not isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):  # try, match, what is new
        everything = after | _reads(s)
        for block in _blocks(s):
            _live_block(block, everything, always | everything, (everything, everything), live)
        if loop:
            everything = everything | loop[0] | loop[1]
        return everything
    return after | _reads(s)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks directly inside a statement."""
    for _, value in ast.iter_fields(tree):
        if isinstance(value, list) and value:
            if isinstance(value[0], ast.stmt):
                yield value
            elif isinstance(value[0], (ast.ExceptHandler, ast.match_case)):
                for part in value:
                    yield part.body


# ----------------------------------------------------------------------------------------------------------------------
# One method


@dataclass(eq=False)
class _Origin:
    """Where a node stands in the source."""

    expression: ast.expr
    statement: int
    argument: ast.expr | None = None  # the expression of its first input
    operand: ast.expr | None = None  # what is called, if that is an object to be checked at run time
    role: Any = None
    method: str = ""  # of tensors, that it calls


class _Method:
    """Analyzes one method with given roles, and writes it anew."""

    def __init__(
        self, function: types.FunctionType, role: Callable[[Path], Role | None], tree: ast.FunctionDef
    ) -> None:
        self.function = function
        self.role = role
        self.tree = copy.deepcopy(tree)
        self.found = Found()
        self.sites: dict[str, Replacement] = {}
        self.used_roles: dict[str, Role] = {}
        arguments = self.tree.args
        self.owner = "".join(function.__qualname__.split(".")[-2:-1])
        self.self_name = (arguments.posonlyargs + arguments.args)[0].arg
        code = function.__code__
        self.hidden = set(code.co_cellvars)  # names that closures see
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                self.hidden.update(node.names)
        self.locals = set(code.co_varnames) | set(code.co_cellvars)
        called = {n.func.id for n in ast.walk(self.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        if called & _LOOKS_AT_LOCALS:
            raise CannotRewriteError(f"calls {min(called & _LOOKS_AT_LOCALS)}(), which may read any variable")
        if self.self_name in {w for s in self.tree.body for w in _writes(s)}:
            raise CannotRewriteError(f"assigns {self.self_name}")

    def run(self) -> None:
        """Finds all sites and puts them into the tree."""
        self._sink(self.tree.body)
        for _ in range(200):  # each round names one value that was computed inside a larger expression
            self.live = _liveness(self.tree.body)
            self.found = Found()
            if not self._visit(self.tree.body, None, write=False):
                break
        self.found = Found()
        self._visit(self.tree.body, None, write=True)
        self._sums(self.tree.body)
        self._formats()

    # ------------------------------------------------------------------------------------ an act after a branch

    def _sink(self, body: list[ast.stmt]) -> None:
        """``if c: h = norm(h) ...; h = act(h)``: the statement after moves to the end of each branch, as it may."""
        k = 0
        while k < len(body):
            statement = body[k]
            follower = body[k + 1] if k + 1 < len(body) else None
            if isinstance(statement, ast.If) and isinstance(follower, (ast.Assign, ast.Return)):
                tails = self._tails(statement)
                if any(self._acts_on(follower, name) for name in tails):
                    self._append(statement, follower)
                    del body[k + 1]
                    # And the convolution of what it gives, which may run with the norm: see Site.run_before.
                    if k + 1 < len(body) and self._convolves(body[k + 1], self._target(follower)):
                        self._append(statement, body[k + 1])
                        del body[k + 1]
                    continue
            for block in _blocks(statement):
                if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    self._sink(block)
            k += 1

    def _tails(self, statement: ast.If) -> set[str]:
        """Names that a branch ends by giving a norm's result."""
        found: set[str] = set()
        for block in (statement.body, statement.orelse):
            last = block[-1] if block else None
            if isinstance(last, ast.If):
                found |= self._tails(last)
            elif isinstance(last, ast.Assign) and isinstance(last.value, ast.Call) and len(last.targets) == 1:
                path = self._path(last.value.func)
                role = self._role(path) if path else None
                if role and role[0] == "norm" and isinstance(last.targets[0], ast.Name):
                    found.add(last.targets[0].id)
        return found

    def _acts_on(self, statement: ast.Assign | ast.Return, name: str) -> bool:
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call):
                continue
            path = self._path(node.func)
            role = self._role(path) if path else None
            is_act = role is not None and role[0] in ("act", "same")
            function = None if path else self._function(node.func)
            if function is not None:
                described = self._described(function, node)
                is_act = described is not None and described.kind == "act"
            if is_act and node.args and isinstance(node.args[0], ast.Name) and node.args[0].id == name:
                return True
            if (
                isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == name
                and describe_method(node.func.attr, *self._constants(node)) is not None
            ):
                return True
        return False

    def _convolves(self, statement: ast.stmt, name: str | None) -> bool:
        call = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
        if name is None or not isinstance(call, ast.Call) or call.keywords or len(call.args) != 1:
            return False
        path, argument = self._path(call.func), call.args[0]
        role = self._role(path) if path else None
        return bool(role and role[0] == "conv") and isinstance(argument, ast.Name) and argument.id == name

    def _append(self, statement: ast.If, follower: ast.stmt) -> None:
        for block in (statement.body, statement.orelse):
            last = block[-1] if block else None
            if isinstance(last, ast.If):
                self._append(last, follower)
            elif not isinstance(last, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
                block.append(copy.deepcopy(follower))

    # ------------------------------------------------------------------------------------------------ blocks

    def _visit(self, body: list[ast.stmt], obstacle: str | None, write: bool) -> bool:
        """Handles a block and the blocks in it. Without ``write``: whether a statement was split."""
        for statement in list(body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            inside = obstacle
            if isinstance(statement, ast.Try) or type(statement).__name__ == "TryStar":
                inside = "it stands in a try block, whose handlers may read the value in between"
            elif isinstance(statement, (ast.With, ast.AsyncWith)) and not self._lets_errors_pass(statement):
                inside = "it stands in a with block that may swallow an error in between"
            for block in _blocks(statement):
                if self._visit(block, inside, write):
                    return True
        matches = self._matches(body)
        plans = []
        for found in matches:
            path = self._norm_path(found)
            if is_trivial(found.chain):
                self.found.reasons.setdefault(path, why_alone(found.norm))
                continue
            reason = obstacle or self._obstacle(body, found)
            if reason:
                self.found.reasons[path] = reason
                continue
            if not write:
                if self._split(body, found):
                    return True
                continue
            plans.append(found)
        if write:
            self._write(body, plans)
        return False

    def _lets_errors_pass(self, statement: ast.With | ast.AsyncWith) -> bool:
        """Context managers of torch do not swallow exceptions."""
        for item in statement.items:
            call = item.context_expr
            base: ast.expr = call.func if isinstance(call, ast.Call) else call
            value = self._function(base)
            if str(getattr(value, "__module__", "")).split(".")[0] != "torch":
                return False
        return True

    def _matches(self, body: list[ast.stmt]) -> list[Match]:
        norms: list[Node] = []
        values: dict[str, Node] = {}
        for k, statement in enumerate(body):
            simple = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr))
            if not simple:
                for name, held in values.items():
                    if name in self.live.before.get(id(statement), set()):
                        held.read_by(OTHER)
                for name in _writes(statement):
                    values.pop(name, None)
                continue
            value = statement.value  # type: ignore[attr-defined]
            node: Node | None = None if value is None else self._build(value, k, values, norms)
            target = self._target(statement)
            if node is not None and node.kind != "value" and (target is None or isinstance(value, ast.Name)):
                node.read_by(OTHER)
                node = None
            for name in _writes(statement):
                values.pop(name, None)
            for name in _reads([t for t in getattr(statement, "targets", []) if not isinstance(t, ast.Name)]):
                if name in values:
                    values[name].read_by(OTHER)
            if target is not None and node is not None and node.kind != "value":
                values[target] = node
        if body:
            for name, held in values.items():
                if name in self.live.after.get(id(body[-1]), set()):
                    held.read_by(OTHER)
        return [match(norm) for norm in norms]

    def _target(self, statement: ast.stmt) -> str | None:
        """The one name that a statement assigns, if it is a variable that only this function sees."""
        target: Any = None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target = statement.target
        return target.id if isinstance(target, ast.Name) and target.id not in self.hidden else None

    # -------------------------------------------------------------------------------------------- expressions

    def _build(self, e: ast.expr, k: int, values: dict[str, Node], norms: list[Node]) -> Node:
        if isinstance(e, ast.Name):
            return values.get(e.id) or Node("value")
        made = self._known(e, k)
        if made is None:
            for child in ast.iter_child_nodes(e):
                if isinstance(e, _SCOPES) or not isinstance(child, (ast.expr, ast.keyword, ast.FormattedValue)):
                    for name in _reads(child):
                        if name in values:
                            values[name].read_by(OTHER)
                else:
                    inner = child.value if isinstance(child, ast.keyword) else child
                    node = self._build(inner, k, values, norms)
                    if node.kind != "value":
                        node.read_by(OTHER)
            return Node("value")
        node, tensors = made
        for t in tensors:
            source = self._build(t, k, values, norms)
            node.inputs.append(source)
            source.read_by(node)
        node.origin.argument = tensors[0]
        if node.kind == "norm":
            norms.append(node)
        return node

    def _known(self, e: ast.expr, k: int) -> tuple[Node, list[ast.expr]] | None:
        """The node of an expression that chains know, and the expressions of its inputs."""
        if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Add):
            return Node("add", origin=_Origin(e, k, method="__add__")), [e.left, e.right]
        if not isinstance(e, ast.Call) or any(isinstance(a, ast.Starred) for a in e.args):
            return None
        if any(word.arg is None for word in e.keywords):
            return None
        path = self._path(e.func)
        role = self._role(path) if path else None
        if role is not None and role[0] != "tail":
            if len(e.args) != 1 or e.keywords:
                return None
            kind, name, inplace = role
            wanted = name if kind == "act" else kind
            return Node(kind, name=name, inplace=inplace, origin=_Origin(e, k, None, e.func, wanted)), [e.args[0]]
        function = None if path else self._function(e.func)
        if function is not None:
            node = self._described(function, e)
            if node is None or not e.args:
                return None
            node.origin = _Origin(e, k, None, e.func, function)
            return node, list(e.args[:2] if node.kind == "add" else e.args[:1])
        if isinstance(e.func, ast.Attribute) and self._is_value(e.func.value):
            if e.func.attr == "add" and len(e.args) == 1 and not e.keywords:
                return Node("add", origin=_Origin(e, k, method="add")), [e.func.value, e.args[0]]
            node = describe_method(e.func.attr, *self._constants(e))
            if node is not None and node.kind != "add":
                node.origin = _Origin(e, k, method=e.func.attr)
                return node, [e.func.value]
        return None

    def _is_value(self, e: ast.expr) -> bool:
        """An expression whose value may be a tensor of the chain: a local variable, or a known call."""
        if isinstance(e, ast.Name):
            return e.id in self.locals and e.id != self.self_name
        return self._known(e, 0) is not None

    def _described(self, function: Any, call: ast.Call) -> Node | None:
        args, kwargs = self._constants(call)
        node = describe_function(function, args[1:] if args else [], kwargs)
        if node is None and len(args) == 2:
            two = describe_function(function, [], kwargs)
            return two if two is not None and two.kind == "add" else None
        return None if node is not None and node.kind == "add" else node

    @staticmethod
    def _constants(call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        return [_constant(a) for a in call.args], {str(w.arg): _constant(w.value) for w in call.keywords}

    def _path(self, e: ast.expr) -> Path | None:
        return _path(e, self.self_name, self.owner)

    def _norm_path(self, found: Match) -> Path:
        path = self._path(found.norm.origin.operand)
        assert path is not None
        return path

    def _role(self, path: Path) -> Role | None:
        role = self.role(path)
        if role is not None:
            self.used_roles[_text(path)] = role
        return role

    def _function(self, e: ast.expr) -> Any:
        """What a global name such as ``F.silu`` or ``torch.nn.functional.relu`` stands for."""
        if isinstance(e, ast.Name):
            if e.id in self.locals:
                return None
            cells = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True))
            if e.id in cells:
                try:
                    return cells[e.id].cell_contents
                except ValueError:
                    return None
            return self.function.__globals__.get(e.id, getattr(builtins, e.id, None))
        if isinstance(e, ast.Attribute):
            base = self._function(e.value)
            return getattr(base, e.attr, None) if isinstance(base, types.ModuleType) else None
        return None

    # ------------------------------------------------------------------------------------------------ proofs

    def _obstacle(self, body: list[ast.stmt], found: Match) -> str:
        """Why a chain may not be computed as one; "" if it may."""
        origins = [n.origin for n in found.nodes]
        first, last = origins[0].statement, origins[-1].statement
        members = {id(o.expression) for o in origins}
        if any(o.statement < first or o.statement > last for o in origins):
            return "its parts are computed in another order"
        for k in range(first, last):
            value = getattr(body[k], "value", None)
            if value is None or id(value) not in members or self._target(body[k]) is None:
                what = ast.unparse(body[k]).splitlines()[0]
                return f"another statement runs in between: {what[:60]}"
        if first != last and not _evaluated_first(body[last].value, origins[-1].expression):  # type: ignore[attr-defined]
            return "other code of the same statement runs in between"
        return ""

    # ------------------------------------------------------------------------------------------------ writing

    def _split(self, body: list[ast.stmt], found: Match) -> bool:
        """Gives the chain's input a name, where it is computed in place. Whether it did."""
        first, last = found.nodes[0].origin, found.nodes[-1].origin
        argument = first.argument
        if isinstance(argument, ast.Name):
            return False
        k = first.statement
        statement: Any = body[k]
        target = self._target(statement)
        load = ast.copy_location(ast.Name("", ast.Load()), argument)
        if first.statement != last.statement:
            assert target is not None
            load.id = target
            body.insert(k, _assign(target, argument, statement))
            _replace(statement, argument, load)
            return True
        if not _evaluated_first(statement.value, last.expression):
            self.found.reasons[self._norm_path(found)] = "its input is computed in a larger expression"
            return False
        name = f"_kgopt_value_{len(body)}_{k}"
        self.locals.add(name)
        whole = statement.value is last.expression
        if whole and target is not None:
            name = target
        load.id = name
        split: list[ast.stmt] = [_assign(name, argument, statement)]
        _replace(statement, argument, load)
        after: list[ast.stmt] = []
        if not (whole and target is not None) and not whole:
            result = ast.copy_location(ast.Name(name, ast.Load()), last.expression)
            split.append(_assign(name, last.expression, statement))
            _replace(statement, last.expression, result)
        if name != target and not isinstance(statement, ast.Return):
            after.append(_assign(name, ast.copy_location(ast.Constant(None), statement), statement))
        body[k : k + 1] = [*split, statement, *after]
        return True

    def _write(self, body: list[ast.stmt], plans: list[Match]) -> None:
        taken: set[int] = set()
        moved: set[int] = set()
        for found in sorted(plans, key=lambda m: -m.nodes[-1].origin.statement):
            first, last = found.nodes[0].origin, found.nodes[-1].origin
            path = self._norm_path(found)
            span = range(first.statement, last.statement + 1)
            if not isinstance(first.argument, ast.Name):
                self.found.reasons.setdefault(path, "its input is computed in a larger expression")
                continue
            inline = len(span) == 1
            if (taken if not inline else moved) & set(span):
                self.found.reasons[path] = "it shares a statement with another fused site"
                continue
            name = f"_kgopt_{len(self.sites)}"
            operands = [n.origin for n in found.nodes if n.origin.operand is not None]
            methods = tuple(dict.fromkeys(n.origin.method for n in found.nodes if n.origin.method))
            self.sites[name] = Site(found.chain, tuple(o.role for o in operands), methods)
            self.found.chains.setdefault(path, []).append(found.chain)
            arguments = [copy.deepcopy(o.operand) for o in operands] + [copy.deepcopy(first.argument)]
            place = last.expression
            ready, run = _call(name, "ready", arguments, place), _call(name, "run", arguments, place)
            whole = getattr(body[span[-1]], "value", None) is place
            follower = self._follower(body, span[-1]) if whole else None
            if follower is not None:
                run = _call(name, "run_before", [follower, *arguments], place)
            if inline:
                original = copy.copy(place)
                choice = ast.copy_location(ast.IfExp(ready, run, original), place)
                _replace(body[span[0]], place, choice)
            else:
                originals = [copy.deepcopy(body[k]) for k in span]
                final = body[span[-1]]
                self._look_up_once(ready, run, name)
                _replace(final, place, run)
                branch = ast.copy_location(ast.If(ready, [final], originals), originals[0])
                body[span[0] : span[-1] + 1] = [branch]
                moved.update(span)
            taken.update(span)

    def _look_up_once(self, ready: ast.Call, run: ast.Call, name: str) -> None:
        """What ``ready`` looked up, ``run`` takes: a module's children are found by ``__getattr__``, at 0.8 us each."""
        before = len(run.args) - len(ready.args)  # the follower
        for i, operand in enumerate(ready.args):
            if isinstance(operand, ast.Attribute):
                local = f"{name}_{i}"
                self.locals.add(local)
                store, load = ast.Name(local, ast.Store()), ast.Name(local, ast.Load())
                ready.args[i] = ast.copy_location(ast.NamedExpr(ast.copy_location(store, operand), operand), operand)
                run.args[before + i] = ast.copy_location(load, operand)

    def _may_catch(self, node: ast.AST) -> bool:
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return not self._lets_errors_pass(node)
        return isinstance(node, (ast.Try, getattr(ast, "TryStar", ast.Try)))

    def _follower(self, body: list[ast.stmt], k: int) -> ast.expr | None:
        """The module that the next statement gives the value of statement ``k`` to, where nothing else reads it."""
        target = self._target(body[k])
        if target is None or k + 1 >= len(body) or any(self._may_catch(n) for n in ast.walk(self.tree)):
            return None  # what handles an error may read the value
        statement = body[k + 1]
        call = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
        if not isinstance(call, ast.Call) or call.keywords or len(call.args) != 1 or self._path(call.func) is None:
            return None
        argument = call.args[0]
        if not isinstance(argument, ast.Name) or argument.id != target:
            return None
        read_later = isinstance(statement, ast.Assign) and self._target(statement) != target
        if read_later and target in self.live.after.get(id(statement), {target}):
            return None
        return copy.deepcopy(call.func)

    # ------------------------------------------------------------------------------------------------ sums

    def _sums(self, body: list[ast.stmt]) -> None:
        """Sums with the value of a convolution, or of a module that is known when the code runs."""
        for statement in body:
            if isinstance(statement, (ast.If, ast.For, ast.While)) or (
                isinstance(statement, ast.With) and self._lets_errors_pass(statement)
            ):
                for block in _blocks(statement):
                    self._sums(block)
        for k in range(len(body)):
            self._sum_of_call(body[k])
            self._sum_of_names(body, k)

    def _sum_of_call(self, statement: ast.stmt) -> None:
        """``x + self.conv(h)``, ``up(x) + skips[i]``."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return)):
            return
        while statement.value is not None:
            found = next(self._sums_of_calls(statement.value), None)
            if found is None:
                return
            self._write_sum(statement, *found)

    def _sums_of_calls(self, e: ast.AST) -> Iterator[tuple[ast.BinOp, ast.expr]]:
        """Sums in an expression, and which side of each is the call."""
        if isinstance(e, _SCOPES):
            return
        if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Add):
            if self._can_wait(e.right):
                yield e, e.right
            elif self._can_wait(e.left) and _is_plain(e.right):  # what is on the right is evaluated while it waits
                yield e, e.left
        for child in ast.iter_child_nodes(e):
            yield from self._sums_of_calls(child)

    def _can_wait(self, e: ast.expr) -> bool:
        """A call with one argument of a convolution, or of something in a local variable."""
        if not isinstance(e, ast.Call) or len(e.args) != 1 or e.keywords or isinstance(e.args[0], ast.Starred):
            return False
        path = self._path(e.func)
        if path is not None:
            role = self._role(path)
            return role is not None and role[0] in ("conv", "tail")
        return isinstance(e.func, ast.Name) and e.func.id in self.locals and e.func.id not in self.hidden

    def _write_sum(self, statement: ast.stmt, e: ast.BinOp, call: ast.expr) -> None:
        name = self._new_sum()
        assert isinstance(call, ast.Call)
        begin = _call(name, "begin", [call.func, call.args[0]], call)
        operands = [begin if side is call else side for side in (e.left, e.right)]
        _replace(statement, e, _call(name, "finish", operands, e))

    def _sum_of_names(self, body: list[ast.stmt], k: int) -> None:
        """``h = self.conv(h)``, some harmless statements, ``(x + h) / self.scale`` or ``h += x``."""
        target = self._target(body[k])
        call = getattr(body[k], "value", None)
        if target is None or call is None or not self._can_wait(call) or self._path(call.func) is None:
            return
        between: list[str] = []
        last = k + 1
        while last < len(body) and target not in _reads(body[last]):
            if target in _writes(body[last]) or not self._is_harmless(body[last], between):
                return
            last += 1
        if last == len(body) or not isinstance(body[last], (ast.Assign, ast.AnnAssign, ast.Return, ast.AugAssign)):
            return
        statement: Any = body[last]
        if isinstance(statement, ast.AugAssign):
            self._add_in_place(body, k, last, call, between)
            return
        found = self._sum_with(statement.value, target)
        loads = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == target]
        reads = [n for n in loads if isinstance(n.ctx, ast.Load)]
        dead = target not in _liveness(self.tree.body).after.get(id(statement), set())
        if found is None or len(reads) != 1 or not dead or not _evaluated_first(statement.value, found[0]):
            return
        whole, sides, divisor = found
        name = self._new_sum()
        _replace(body[k], call, self._begin(name, call, between))
        _replace(statement, whole, _call(name, "finish", [*sides, *([divisor] if divisor is not None else [])], whole))

    def _add_in_place(self, body: list[ast.stmt], k: int, last: int, call: Any, between: list[str]) -> None:
        """``h += x``, where h is what the call gave."""
        statement: Any = body[last]
        if not isinstance(statement.op, ast.Add) or not isinstance(statement.target, ast.Name):
            return
        if statement.target.id != self._target(body[k]) or not _is_plain(statement.value):
            return
        if statement.target.id in _reads(statement.value):
            return
        name = self._new_sum()
        _replace(body[k], call, self._begin(name, call, between))
        read = ast.copy_location(ast.Name(statement.target.id, ast.Load()), statement)
        result = _call(name, "finish_in_place", [read, statement.value], statement.value)
        body[last] = _assign(statement.target.id, result, statement)

    def _begin(self, name: str, call: Any, between: list[str]) -> ast.Call:
        more = [ast.Name(self.self_name, ast.Load()), *map(ast.Constant, between)] if between else []
        for e in more:
            ast.copy_location(e, call)
        return _call(name, "begin", [call.func, call.args[0], *more], call)

    def _sum_with(self, value: ast.expr, name: str) -> tuple[ast.expr, list[ast.expr], ast.expr | None] | None:
        """The sum of a variable and something plain, perhaps divided by an attribute, and its parts."""
        for e in ast.walk(value):
            divisor = None
            inner = e
            if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Div) and isinstance(e.right, ast.Attribute):
                inner, divisor = e.left, e.right
            if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Add):
                sides = [inner.left, inner.right]
                named = any(isinstance(s, ast.Name) and s.id == name for s in sides)
                if named and all(map(_is_plain, sides)) and (divisor is None or _is_plain(divisor)):
                    assert isinstance(e, ast.expr)
                    return e, sides, divisor
        return None

    def _is_harmless(self, s: ast.stmt, between: list[str]) -> bool:
        """Changes no tensor: tests, plain assignments, ``.contiguous()``, calls of convolutions (into ``between``)."""
        if isinstance(s, ast.If):
            return _is_test(s.test) and all(self._is_harmless(inner, between) for inner in (*s.body, *s.orelse))
        if isinstance(s, ast.Pass):
            return True
        if self._target(s) is None:
            return False
        value = s.value  # type: ignore[attr-defined]
        if _is_plain(value):
            return True
        if not isinstance(value, ast.Call) or value.keywords or not all(map(_is_plain, value.args)):
            return False
        path = self._path(value.func)
        if path is not None and len(path) == 1 and len(value.args) == 1:
            between.append(str(path[0]))  # begin looks at what it is
            return True
        is_method = isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Name)
        return is_method and value.func.attr == "contiguous" and not value.args  # type: ignore[attr-defined]

    def _new_sum(self) -> str:
        name = f"_kgopt_sum_{len(self.sites)}"
        self.sites[name] = Sum()
        return name

    # ------------------------------------------------------------------------------------------------ formats

    def _formats(self) -> None:
        """``h = h.contiguous()``, where all that becomes of h in this method takes any strides."""
        parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        for statement in [n for n in parents if isinstance(n, ast.Assign)]:
            call, target = statement.value, self._target(statement)
            if target is None or not isinstance(call, ast.Call) or call.args or call.keywords:
                continue
            if not isinstance(call.func, ast.Attribute) or call.func.attr != "contiguous":
                continue
            if isinstance(call.func.value, ast.Name) and self._takes_any_strides(target, parents):
                name = f"_kgopt_format_{len(self.sites)}"
                self.sites[name] = Keep()
                owner = ast.Name(self.self_name, ast.Load())
                _replace(statement, call, _call(name, "keep", [owner, call.func.value], call))

    def _takes_any_strides(self, name: str, parents: dict[ast.AST, ast.AST]) -> bool:
        """Whether every read of a variable, and of those that it is assigned to, takes a tensor of any strides."""
        names, waiting = {name}, [name]
        while waiting:
            current = waiting.pop()
            for read in parents:
                if not isinstance(read, ast.Name) or read.id != current or not isinstance(read.ctx, ast.Load):
                    continue
                user = parents[read]
                if isinstance(user, (ast.Assign, ast.AnnAssign)):
                    other = self._target(user)
                    if other is None:
                        return False
                    if other not in names:
                        names.add(other)
                        waiting.append(other)
                elif not self._is_strideless(read, user, parents):
                    return False
        return True

    def _is_strideless(self, value: ast.expr, user: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
        if isinstance(user, ast.Attribute):
            return user.attr in _STRIDELESS
        if isinstance(user, (ast.Tuple, ast.List)):  # of tensors, for torch.cat
            value, user = user, parents[user]
        if isinstance(user, ast.keyword):
            value, user = user.value, parents[user]
        if not isinstance(user, ast.Call) or value is user.func:
            return isinstance(user, (ast.BinOp, ast.Return))
        path = self._path(user.func)
        if path is not None:
            return self._role(("", *path)) is not None  # a module, which may be given channels_last as well
        function = self._function(user.func)
        if function is not None:
            is_functional = getattr(function, "__module__", "") == "torch.nn.functional"
            return is_functional or any(function is f for f in _STRIDELESS_FUNCTIONS)
        called = user.func.value if isinstance(user.func, ast.Attribute) else None
        return isinstance(called, ast.Name) and called.id in self.sites


def _is_plain(e: ast.expr) -> bool:
    """Names, attributes and constants, and items at such an index: evaluating them changes nothing."""
    if isinstance(e, ast.Subscript):
        return _is_plain(e.value) and _is_plain(e.slice)
    if isinstance(e, ast.BinOp):
        return _is_index(e)
    return _is_plain_load(e)


def _is_index(e: ast.expr) -> bool:
    """Arithmetic of a variable and numbers, as in ``skips[i + 1]``."""
    if isinstance(e, ast.BinOp):
        return _is_index(e.left) and _is_index(e.right)
    return isinstance(e, ast.Name) or (isinstance(e, ast.Constant) and isinstance(e.value, int))


def _is_test(e: ast.expr) -> bool:
    """``self.shortcut is not None``, ``self.training``, and what ``not``, ``and`` and ``or`` make of such."""
    if isinstance(e, ast.BoolOp):
        return all(map(_is_test, e.values))
    if isinstance(e, ast.UnaryOp):
        return isinstance(e.op, ast.Not) and _is_test(e.operand)
    if isinstance(e, ast.Compare):
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in e.ops) and all(
            map(_is_plain, [e.left, *e.comparators])
        )
    return _is_plain_load(e)


def _constant(e: ast.expr) -> Any:
    try:
        return ast.literal_eval(e)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN


def _text(path: Path) -> str:
    return "".join(f".{p}" if isinstance(p, str) else f"[{p}]" for p in path)


def _call(site: str, method: str, arguments: list[ast.expr], place: ast.AST) -> ast.Call:
    function = ast.Attribute(ast.Name(site, ast.Load()), method, ast.Load())
    call = ast.Call(function, copy.deepcopy(arguments), [])
    for node in ast.walk(call):
        if "lineno" in node._attributes:
            ast.copy_location(node, place)
    return call


def _assign(name: str, value: ast.expr, place: ast.stmt) -> ast.stmt:
    target = ast.copy_location(ast.Name(name, ast.Store()), place)
    return ast.copy_location(ast.Assign([target], value), place)


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if value is old:
                setattr(node, name, new)
                return
            if isinstance(value, list):
                for i, item in enumerate(value):
                    if item is old:
                        value[i] = new
                        return
    raise AssertionError("the expression is not in its statement")


def _evaluated_first(whole: ast.expr, part: ast.expr) -> bool:
    """Whether nothing but names, attributes and constants is evaluated in ``whole`` before ``part``."""
    if whole is part:
        return True
    if isinstance(whole, (*_SCOPES, ast.IfExp, ast.BoolOp)):
        return isinstance(whole, ast.BoolOp) and _evaluated_first(whole.values[0], part)
    children = list(ast.iter_child_nodes(whole))
    if isinstance(whole, (ast.Dict, ast.NamedExpr)):
        return False
    for child in children:
        inner = child.value if isinstance(child, ast.keyword) else child
        if any(n is part for n in ast.walk(inner)):
            return isinstance(inner, ast.expr) and _evaluated_first(inner, part)
        if not _is_plain_load(inner):
            return False
    return False


def _is_plain_load(e: ast.AST) -> bool:
    if isinstance(e, (ast.expr_context, ast.operator, ast.Constant, ast.Name)):
        return True
    return isinstance(e, ast.Attribute) and _is_plain_load(e.value)


# ----------------------------------------------------------------------------------------------------------------------
# What the rest of the package calls


def converts(module: nn.Module, cls: type) -> bool:
    """Whether a method of a module with children calls ``contiguous``."""
    return bool(module._modules) and any(
        "contiguous" in inspect.unwrap(f).__code__.co_names for _, f in own_methods(cls)
    )


def analyze(module: nn.Module, cls: type) -> tuple[tuple[tuple[str, Roles], ...], list[Found], dict[str, str]]:
    """The recipe for ``module``'s class (empty: nothing fuses), what methods hold, and children of those left alone."""
    recipe: list[tuple[str, Roles]] = []
    found: list[Found] = []
    refused: dict[str, str] = {}
    children = set(module._modules)
    for name, function in own_methods(cls):
        mentioned = children & set(inspect.unwrap(function).__code__.co_names)
        if not mentioned:
            continue
        if name in module.__dict__:
            refused.update(dict.fromkeys(mentioned, f"{cls.__name__}.{name} was replaced on the instance"))
            continue
        try:
            method = _Method(function, functools.partial(_role_in_code, module), _parse(function))
            method.run()
        except CannotRewriteError as error:
            refused.update(dict.fromkeys(mentioned, f"{cls.__name__}.{name} {error}"))
            continue
        found.append(method.found)
        if method.sites:
            recipe.append((name, tuple(sorted(method.used_roles.items()))))
    return tuple(recipe), found, refused


def rewritten_methods(
    cls: type, recipe: dict[str, Roles], stand: Callable[[str], Standing]
) -> dict[str, types.FunctionType]:
    """The methods of a recipe, written anew. One whose source has changed since is left out: it runs as it is.

    ``stand`` makes what says whether the class still has a method.
    """
    made: dict[str, types.FunctionType] = {}
    methods = dict(own_methods(cls))
    for name, listed in recipe.items():
        roles = dict(listed)
        function = methods.get(name)
        if function is None:
            continue
        try:
            method = _Method(function, lambda path, roles=roles: roles.get(_text(path)), _parse(function))  # type: ignore[misc]
            method.run()
        except CannotRewriteError:
            continue
        if method.sites:
            made[name] = _rebuild(function, method.tree, method.sites, stand(name))
    return made
