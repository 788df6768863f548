"""Names in code: what is read, what is written, what lives on. It knows Python alone, neither torch nor kgopt."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

Node = TypeVar("Node", bound=ast.AST)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# Fields that hold no tree: ``ctx`` holds a node, but one that says no more than its class.
_NO_TREE = {"ctx", "id", "attr", "arg", "kind", "type_comment"}
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {}


def walk(tree: ast.AST) -> Iterator[Any]:
    """``ast.walk`` without contexts, at a quarter of its time: of reading code most is spent here."""
    waiting = [tree]
    for node in waiting:
        kind = type(node)
        fields = _FIELDS.get(kind)
        if fields is None:
            fields = _FIELDS[kind] = tuple(name for name in kind._fields if name not in _NO_TREE)
        for name in fields:
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                waiting.append(value)
            elif type(value) is list:
                waiting += [item for item in value if isinstance(item, ast.AST)]
        yield node


def copied(tree: Node) -> Node:
    """``copy.deepcopy`` of a tree, at a fraction of its time; contexts and operators, which stay, are shared."""
    made = type(tree).__new__(type(tree))  # a constructor asks for fields from Python 3.13 on
    for name, value in vars(tree).items():
        if type(value) is list:
            value = [copied(item) if isinstance(item, ast.AST) else item for item in value]
        elif isinstance(value, ast.AST) and not isinstance(value, (ast.expr_context, ast.operator)):
            value = copied(value)
        setattr(made, name, value)
    return made


def reads(tree: ast.AST | list[Any] | None) -> set[str]:
    """Names that code may read, nested scopes and all; deleting and ``+=`` read too."""
    found: set[str] = set()
    for part in tree if isinstance(tree, list) else [tree] if tree is not None else []:
        for node in walk(part):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def loads(tree: ast.AST, name: str) -> list[ast.Name]:
    """The places where code reads a variable."""
    return [n for n in walk(tree) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]


def outside_scopes(e: ast.AST) -> Iterator[Any]:
    """The parts of an expression, the outer ones first, without those that run later or elsewhere."""
    if isinstance(e, SCOPES):
        return
    yield e
    for child in ast.iter_child_nodes(e):
        yield from outside_scopes(child)


def writes(tree: ast.AST) -> set[str]:
    """Names that code may write or delete."""
    found: set[str] = set()
    for node in walk(tree):
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)):
            found.add(node.name or "")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((a.asname or a.name).split(".")[0] for a in node.names)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
    return found


def forgets(s: ast.stmt, name: str) -> bool:
    """Whether nobody reads behind a statement what a variable held in front of it."""
    if isinstance(s, (ast.Return, ast.Raise)):
        return True
    may_skip = any(blocks(s)) or (isinstance(s, ast.AnnAssign) and s.value is None)
    return name in writes(s) and not may_skip  # of what a loop, a branch or a with block assigns perhaps nothing runs


@dataclass
class Live:
    """Names whose value may still be read, before and after each statement."""

    before: dict[int, set[str]] = field(default_factory=dict)
    after: dict[int, set[str]] = field(default_factory=dict)


def liveness(body: list[ast.stmt]) -> Live:
    """Of the body of a function."""
    live = Live()
    _live_block(body, set(), set(), None, live)
    return live


def _live_block(
    body: list[ast.stmt], after: set[str], always: set[str], loop: tuple[set[str], set[str]] | None, live: Live
) -> set[str]:
    """What lives before a block; ``loop``: what lives where break and continue go; ``always``: what handlers read."""
    for statement in reversed(body):
        after = after | always
        live.after[id(statement)] = live.after.get(id(statement), set()) | after
        after = _live_statement(statement, after, always, loop, live) | always
        live.before[id(statement)] = live.before.get(id(statement), set()) | after
    return after


def _live_statement(
    s: ast.stmt, after: set[str], always: set[str], loop: tuple[set[str], set[str]] | None, live: Live
) -> set[str]:
    if isinstance(s, (ast.Return, ast.Raise)):
        return reads(s)
    if isinstance(s, ast.Break):
        return set(loop[0]) if loop else after
    if isinstance(s, ast.Continue):
        return set(loop[1]) if loop else after
    if isinstance(s, ast.If):
        branches = _live_block(s.body, after, always, loop, live) | _live_block(s.orelse, after, always, loop, live)
        return reads(s.test) | branches
    if isinstance(s, (ast.For, ast.AsyncFor, ast.While)):
        head = reads(s.test if isinstance(s, ast.While) else s.iter) | _live_block(s.orelse, after, always, loop, live)
        head |= after
        while True:
            wider = head | _live_block(s.body, head, always, (after, head), live)
            if wider == head:
                return head | (reads(s.target) if not isinstance(s, ast.While) else set())
            head = wider
    if isinstance(s, (ast.With, ast.AsyncWith)):
        items = {name for item in s.items for name in reads(item)}
        return items | _live_block(s.body, after, always, loop, live)
    if isinstance(s, (ast.Assign, ast.AnnAssign)):
        targets = s.targets if isinstance(s, ast.Assign) else [s.target]
        killed = {t.id for t in targets if isinstance(t, ast.Name)} if s.value is not None else set()
        return (after - killed) | reads(s)
    inner = [b for b in ast.iter_child_nodes(s) if isinstance(b, (ast.stmt, ast.ExceptHandler, ast.match_case))]
    if inner and not isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):  # try, match, what is new
        everything = after | reads(s)
        for block in blocks(s):
            _live_block(block, everything, always | everything, (everything, everything), live)
        if loop:
            everything = everything | loop[0] | loop[1]
        return everything
    return after | reads(s)


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks directly inside a statement."""
    for _, value in ast.iter_fields(tree):
        if isinstance(value, list) and value:
            if isinstance(value[0], ast.stmt):
                yield value
            elif isinstance(value[0], (ast.ExceptHandler, ast.match_case)):
                for part in value:
                    yield part.body


def counters(tree: ast.FunctionDef) -> set[str]:
    """Variables that hold whole numbers: all that is ever assigned to them, or added, is written so."""
    known: set[ast.AST] = set()
    for node in walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        if len(targets) == 1 and isinstance(node.value, ast.Constant) and type(node.value.value) is int:  # type: ignore[attr-defined]
            known.update(targets)
    stores = [n for n in walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
    others = {n.id for n in stores if n not in known} | {n.arg for n in walk(tree.args) if isinstance(n, ast.arg)}
    return {n.id for n in stores} - others
