"""Norms whose value is scaled and shifted by sample, in the source of a method: see :mod:`kgopt.rewrite.modulated`.

    h = self.norm(h)                             h = _kgopt_mod_0.begin(self.norm, h)
    if scale_shift is not None:                  if scale_shift is not None:
        scale, shift = scale_shift                   scale, shift = scale_shift
        h = h * (scale + 1) + shift                  h = _kgopt_mod_0.plus(_kgopt_mod_0.times(h, scale + 1), shift)
    h = self.act(h)                              h = _kgopt_mod_0.then(self.act, h)

From ``begin`` on, along every path, only statements run that change no tensor. In front of any other one, and of one
that reads the value otherwise, stands ``h = _kgopt_mod_0.now(h)``. A path with a sum alone is left as it is, for
:mod:`~kgopt.rewrite.source.sums`.

Written in the same way are norms and activations that only the running code knows (``norm(x)`` in a loop,
``self.norms[i](x)``, ``getattr(F, self.act)(x)``), and activations that :mod:`~kgopt.rewrite.source.chains` cannot put
behind their norm, since a branch or another statement stands in between:

    for layer in self.layers:                    for layer in self.layers:
        x = layer(x)                                 x = _kgopt_mod_0.step(layer, x)
    return x                                     x = _kgopt_mod_0.now(x)
                                                 return x
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kgopt.rewrite.chain import Chain
from kgopt.rewrite.meanings import describe_method
from kgopt.rewrite.modulated import VIEWS, Modulation
from kgopt.rewrite.modules import MORE
from kgopt.rewrite.roles import Path
from kgopt.rewrite.source.expressions import (
    as_function,
    assign,
    call_of,
    evaluated_first,
    is_plain,
    of_one_argument,
    placed,
    replace,
)
from kgopt.rewrite.source.maps import Maps
from kgopt.rewrite.source.method import Method
from kgopt.rewrite.source.names import SCOPES, blocks, copied, liveness, reads, walk, writes
from kgopt.rewrite.source.norm_calls import is_norm_call, parts_of, site_of, waiting_call
from kgopt.rewrite.source.quiet import is_quiet

_Place = tuple[list[ast.stmt], ast.stmt]  # a block, and one of its statements


class Modulations:
    """Those of one method."""

    def __init__(self, method: Method, gives: bool = False) -> None:
        self.method = method
        self.gives = gives  # what waits may be returned
        self.name = f"_kgopt_mod_{len(method.sites)}"
        self.live = liveness(method.tree.body)
        self.written: dict[int, str | None] = {}  # statements, by id: the name that waits behind them
        self.beside: dict[int, list[str]] = {}  # and the children that are called while it waits
        self.nows: set[int] = set()  # those that ask for the tensor
        self.calls: dict[int, str] = {}  # norms that are called as functions, by id: their site's name
        self._chains: list[tuple[Path, Chain]] = []

    def chains(self) -> list[tuple[Path, Chain]]:
        """Those that begin with a norm of the method's own."""
        return self._chains

    def run(self) -> None:
        """Writes them into the method's tree."""
        tree = self.method.tree
        if any(self.method.may_catch(node) for node in walk(tree)):
            return  # what handles an error may read the value
        self.of_self = self._from_self()
        self._name_values()
        maps = Maps(self.method)
        for root, loop in list(_roots(tree.body)):
            for path in list(self._assignments(root, [])):
                self._write(path, root is not tree.body, loop)
        if self.name in self.method.sites:
            maps.write(self.name)

    def _name_values(self) -> None:
        """Gives what open norms and activations make a name where it is a part of something else.

        ``x = act(norm(x)) + r`` becomes ``v = act(norm(x))``, ``x = v + r``, ``v = None``: only statements begin.
        """
        for body, _ in list(_roots(self.method.tree.body)):
            self._name_values_in(body)
        self.live = liveness(self.method.tree.body)

    def _name_values_in(self, body: list[ast.stmt]) -> None:
        for statement in list(body):
            if isinstance(statement, ast.If):
                self._name_values_in(statement.body)
                self._name_values_in(statement.orelse)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)):
                part = self._unnamed(statement)
                if part is None:
                    continue
                name = f"_kgopt_value_of_{len(self.method.locals)}"
                self.method.locals.add(name)
                replace(statement, part, ast.copy_location(ast.Name(name, ast.Load()), part))
                at = body.index(statement)
                body.insert(at, assign(name, part, statement))
                if not isinstance(statement, ast.Return):  # it lives no longer than it did
                    body.insert(at + 2, assign(name, ast.copy_location(ast.Constant(None), statement), statement))

    def _unnamed(self, s: Any) -> ast.Call | None:
        """The largest part of a statement's value that passes an open norm and its activation on, one call around the
        other, where it is not all of the value and nothing is computed ahead of it.
        """
        if s.value is None or (isinstance(s, ast.AugAssign) and not isinstance(s.target, ast.Name)):
            return None
        is_whole = isinstance(s, (ast.Assign, ast.AnnAssign, ast.Return))
        if is_whole and self._passes(s.value):
            return None
        for e in _outside_scopes(s.value):  # the outer ones first
            if self._passes(e) and evaluated_first(s.value, e):  # type: ignore[arg-type]
                return e  # type: ignore[return-value]
        return None

    def _passes(self, e: Any) -> bool:
        """Calls of one argument around each other, an open norm and its activation among them."""
        calls: list[ast.Call] = []
        while of_one_argument(e) and (self.is_open(e.func) or self._is_known(e)):
            calls.append(e)
            e = e.args[0]
        return len(calls) > 1 and any(self.is_open(call.func) for call in calls)

    def _is_known(self, call: ast.Call) -> bool:
        """A module of the method's own, or a function that is an activation."""
        if self.method.path(call.func) is not None:
            return self.method.what(call.func)[0] in ("act", "conv", "norm", "same")
        function = self.method.function(call.func)
        node = None if function is None else self.method.described(function, call)
        return node is not None and node.kind == "act"

    def _from_self(self) -> set[str]:
        """Local variables that may hold a child: what is assigned to them reads ``self``."""
        found: set[str] = set()
        for node in walk(self.method.tree):
            source = node.value if isinstance(node, ast.Assign) else node.iter if isinstance(node, ast.For) else None
            if source is not None and self.method.self_name in reads(source):
                found |= writes(node) if isinstance(node, ast.Assign) else writes(node.target)  # type: ignore[attr-defined]
        return found - self.method.hidden

    def _assignments(self, body: list[ast.stmt], outside: list[_Place]) -> Iterator[list[_Place]]:
        """Statements with a norm in them, as the blocks and places that lead to them."""
        for statement in body:
            here = [*outside, (body, statement)]
            if isinstance(statement, ast.If):
                if self._is_site(statement.test):
                    continue  # a chain's
                yield from self._assignments(statement.body, here)
                yield from self._assignments(statement.orelse, here)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return)) and statement.value is not None:
                yield here

    def _is_site(self, e: ast.expr) -> bool:
        """Whether a chain of this method asks."""
        of = e.func.value if isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) else None
        return isinstance(of, ast.Name) and of.id in self.method.sites

    def _write(self, path: list[_Place], is_inner: bool, loop: _Loop | None) -> None:
        """All that one statement begins."""
        statement: Any = path[-1][1]
        if id(statement) in self.written:
            return
        chains = {
            id(n)
            for e in _outside_scopes(statement.value)
            if isinstance(e, ast.IfExp) and self._is_site(e.test)
            for n in walk(e)
        }
        for call in reversed(list(_outside_scopes(statement.value))):  # the inner ones first
            if id(call) in chains or not isinstance(call, ast.Call) or not self._normalizes(call):
                continue
            paths = _Paths(self, loop if loop is not None and path[0][0] is loop.statement.body else None)
            paths.begin(statement, call)
            if paths.failed:
                continue
            name = paths.waits
            for block, place in reversed(path):
                if name is not None:
                    name = paths.follow(block, [s is place for s in block].index(True) + 1, name)
            if paths.loop is not None:
                # The next round begins with what waits at the end of this one.
                at_end = [] if name is None else [name]
                for waits in dict.fromkeys([*paths.goes_on, *at_end]):
                    paths.follow(path[0][0], 0, waits)
                    paths.leave(paths.loop, waits)
            elif name is not None and is_inner:
                paths.ends.append((path[0][0], name, path[0][0][-1]))
            if paths.is_modulated:
                paths.commit(call)
                return

    def _normalizes(self, e: ast.Call) -> bool:
        """A call with one argument of a norm, of a Sequential that ends in one, or of what the running code names; also
        of a norm as a function.
        """
        if is_norm_call(self.method, e):
            self.calls.setdefault(id(e), f"{self.name}_call_{len(self.calls)}")
            return True
        if self.gives_more(e):
            return True
        if not e.args or e.keywords or any(isinstance(a, ast.Starred) for a in e.args):
            return False
        if self.method.path(e.func) is not None:
            kind, name, _ = self.method.what(e.func)
            return (kind == "norm" and len(e.args) == 1) or (kind, name) == ("tail", "norm")
        return self.is_open(e.func)

    def gives_more(self, e: ast.Call) -> bool:
        """A call of a module that returns a tuple, of which the first is a norm's value."""
        path = self.method.path(e.func)
        role = None if path is None else self.method.role(path)
        if role is None or role[:2] != ("tail", MORE):
            return False
        starred = any(isinstance(a, ast.Starred) for a in e.args) or any(word.arg is None for word in e.keywords)
        return bool(e.args) and not starred

    def first_of(self, s: Any) -> str | None:
        """The variable that gets the first value of a tuple; the others go to variables, or into a dict of the
        method's.
        """
        target = s.targets[0] if isinstance(s, ast.Assign) and len(s.targets) == 1 else None
        if not isinstance(target, ast.Tuple) or not isinstance(target.elts[0], ast.Name):
            return None
        name = target.elts[0].id
        rest = [t for t in target.elts[1:] for t in (t.elts if isinstance(t, ast.Tuple) else [t])]
        ok = all(isinstance(t, ast.Name) or self._is_item_of_a_dict(t) for t in rest)
        again = name in {n.id for t in rest for n in walk(t) if isinstance(n, ast.Name)}
        return name if ok and not again and name not in self.method.hidden else None

    def _is_item_of_a_dict(self, e: ast.expr) -> bool:
        """``caches["norm"]``, where all that the method ever assigns to the variable is ``{}``."""
        if not isinstance(e, ast.Subscript) or not isinstance(e.value, ast.Name) or not is_plain(e.slice):
            return False
        name, tree = e.value.id, self.method.tree
        if name in self.method.hidden or any(a.arg == name for a in walk(tree.args) if isinstance(a, ast.arg)):
            return False
        inside = [s for s in walk(tree) if isinstance(s, ast.stmt) and s is not tree and not isinstance(s, ast.If)]
        made = [s for s in inside if name in writes(s)]
        return bool(made) and all(self.method.target(s) == name and isinstance(s.value, ast.Dict) for s in made)  # type: ignore[attr-defined]

    def is_open(self, e: ast.expr) -> bool:
        """What shows only when the code runs: a variable, or an item of one, that may hold a child; ``self.norms[i]``;
        ``getattr(F, self.act)``.
        """
        if isinstance(e, ast.Name):
            return e.id in self.of_self
        if isinstance(e, ast.Subscript) and is_quiet(self.method, e.slice, []):
            return self.method.path(e.value) is not None or self.is_open(e.value)
        if isinstance(e, ast.Attribute):
            return e.attr not in ("add", "add_") and self.is_open(e.value)
        if not isinstance(e, ast.Call) or len(e.args) != 2 or e.keywords:
            return False
        return self.method.function(e.func) is getattr and all(is_quiet(self.method, a, []) for a in e.args)

    def call(self, method: str, arguments: list[ast.expr], place: ast.AST, name: str = "") -> ast.Call:
        """``_kgopt_mod.method(...)``."""
        return call_of(name or self.name, method, arguments, place)


@dataclass
class _Loop:
    """A loop over children, and the block that it stands in."""

    block: list[ast.stmt]
    statement: ast.For


@dataclass
class _Edit:
    """A statement's new value, or the statement in its place."""

    statement: Any
    value: ast.expr
    instead: bool = False  # ``h *= e`` becomes an assignment
    waits: str | None = None


@dataclass
class _Paths:
    """Where the value of one norm goes, and what is to be written for it."""

    of: Modulations
    loop: _Loop | None = None  # in whose body they are
    goes_on: list[str] = field(default_factory=list)  # variables that wait where a round of the loop is left
    edits: dict[int, _Edit] = field(default_factory=dict)
    stops: dict[int, tuple[list[ast.stmt], ast.stmt, str]] = field(default_factory=dict)
    ends: list[tuple[list[ast.stmt], str, ast.stmt]] = field(default_factory=list)  # blocks, in which it has to be a
    # tensor behind a statement
    between: list[str] = field(default_factory=list)
    sites: list[Modulation] = field(default_factory=list)
    is_scaled: bool = False
    is_shifted: bool = False
    is_acted: bool = False  # a call takes what waits
    is_given: bool = False  # it is returned
    gives_more: bool = False  # with more
    is_function: bool = False  # a function is the norm
    act: str = "none"
    failed: bool = False
    waits: str | None = None
    base: ast.expr | None = None  # the call of the norm, or the variable that waits

    @property
    def method(self) -> Method:
        return self.of.method

    @property
    def is_modulated(self) -> bool:
        if self.is_function:  # with an activation alone it is no value that waits
            return self.is_scaled or (self.is_given and not self.is_shifted)
        return self.is_scaled or ((self.is_acted or self.is_given) and not self.is_shifted)

    def begin(self, statement: Any, call: ast.Call) -> None:
        """The statement with the norm."""
        self.base = call
        self.is_function = id(call) in self.of.calls
        is_tuple = self.of.gives_more(call)
        made = None
        if not is_tuple or (call is statement.value and self.of.first_of(statement) is not None):
            made = self._value(statement)
        if made is None:
            self.failed = True
            return
        self.edits[id(statement)] = made
        self.waits = made.waits

    def leave(self, loop: _Loop, name: str) -> None:
        """What waits at the end of a loop's rounds goes into the sum behind the loop, or is computed."""
        at = [s is loop.statement for s in loop.block].index(True) + 1
        is_last = at == len(loop.block) or not isinstance(loop.block[at], (ast.Assign, ast.Return))
        noted = self.is_scaled, self.is_shifted
        is_taken = is_last or id(loop.block[at]) in self.edits or id(loop.block[at]) in self.of.written
        edit = None if is_taken or not self.is_modulated else self._read(loop.block[at], name)
        self.is_scaled, self.is_shifted = noted
        if edit is None or edit.waits is not None:
            self.ends.append((loop.block, name, loop.statement))
        else:
            self.edits[id(loop.block[at])] = edit

    def follow(self, block: list[ast.stmt], start: int, name: str) -> str | None:
        """Goes through a block; the variable that waits at its end."""
        for s in block[start:]:
            if id(s) in self.edits:  # the round of a loop is complete
                if self._begins_with(s, name):
                    self.is_acted = True
                    return None
                self.stops[id(s)] = block, s, name
                return None
            if id(s) in self.of.written and name in reads(s) and not _is_operand(s, name, self.of.name):
                self.stops[id(s)] = block, s, name  # ``1 + gamma``, inside of what another norm's value takes
                return None
            if id(s) in self.of.written and name in reads(s):  # what another's value does here, this one's does, too
                self.between += self.of.beside.get(id(s), [])
                waits = self.of.written[id(s)]
                self.is_scaled = self.is_scaled or id(s) not in self.of.nows
                if waits is None:
                    return None
                name = waits
                continue
            if isinstance(s, ast.If) and name not in reads(s.test) and is_quiet(self.method, s.test, self.between):
                ends = [self.follow(branch, 0, name) for branch in (s.body, s.orelse)]
                if ends == [None, None]:
                    return None
                continue
            if isinstance(s, (ast.Continue, ast.Break)) and self.loop is not None:
                self.goes_on.append(name)
                return None
            if name not in reads(s):
                if isinstance(s, (ast.Return, ast.Raise)) or name in writes(s):
                    return None  # nobody reads it
                if self._is_harmless(s):
                    continue
            is_outer = block is self.method.tree.body
            made = None
            if id(s) not in self.of.written:
                made = self._in_place(s, name) or self._gated(s, name, is_outer) or self._read(s, name, is_outer)
            if made is None:
                self.stops[id(s)] = block, s, name
                return None
            self.edits[id(s)] = made
            if made.waits is None:
                return None
            name = made.waits
        return name

    def _begins_with(self, s: Any, name: str) -> bool:
        """``x = norm(x)``, as it came: what waits may go into it."""
        value = s.value
        if not isinstance(value, ast.Call) or not self.of.is_open(value.func) or len(value.args) != 1:
            return False
        return isinstance(value.args[0], ast.Name) and value.args[0].id == name and name not in reads(value.func)

    def _is_harmless(self, s: ast.stmt) -> bool:
        if isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)):
            return True
        if isinstance(s, ast.Assert):
            return all(is_quiet(self.method, e, self.between) for e in (s.test, s.msg) if e is not None)
        if not isinstance(s, ast.Assign) or not is_quiet(self.method, s.value, self.between):
            return False
        targets = [e for t in s.targets for e in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
        return all(isinstance(t, ast.Name) for t in targets)

    def _in_place(self, s: Any, name: str) -> _Edit | None:
        """``h *= 1 + scale``, ``h += shift``."""
        if not isinstance(s, ast.AugAssign) or not isinstance(s.target, ast.Name) or s.target.id != name:
            return None
        if not isinstance(s.op, (ast.Mult, ast.Add)) or name in reads(s.value):
            return None
        if not is_quiet(self.method, s.value, self.between):
            return None
        is_product = isinstance(s.op, ast.Mult)
        self._note(is_product)
        load = ast.copy_location(ast.Name(name, ast.Load()), s)
        value = self.of.call("times_in_place" if is_product else "plus_in_place", [load, s.value], s)
        return _Edit(s, value, instead=True, waits=name)

    def _gated(self, s: Any, name: str, may_rename: bool) -> _Edit | None:
        """``h = h * torch.sigmoid(h)``, which is silu."""
        if not self._ends(s, name, may_rename) or not isinstance(s.value, ast.BinOp):
            return None
        e = s.value
        for value, gate in ((e.left, e.right), (e.right, e.left)):
            if not isinstance(e.op, ast.Mult) or not isinstance(gate, ast.Call) or not _is_name(value, name):
                continue
            inside = gate.args[0] if of_one_argument(gate) else getattr(gate.func, "value", None)
            act = self._act(gate, inside) if _is_name(inside, name) else None  # type: ignore[arg-type]
            if act is None or act[0] != "sigmoid" or act[1:] == (None, ""):  # what a module is shows later
                continue
            read = ast.copy_location(ast.Name(name, ast.Load()), e)
            return _Edit(s, self._then(e, read, ("silu", *act[1:]), gate))
        return None

    def _ends(self, s: Any, name: str, may_rename: bool) -> bool:
        """A statement with a value, behind which the variable holds that, or is not read any more."""
        if not isinstance(s, (ast.Assign, ast.AnnAssign, ast.Return)) or s.value is None:
            return False
        target = None if isinstance(s, ast.Return) else self.method.target(s)
        # A path that comes from elsewhere has it under one name: all come together in the body itself.
        may_rename = may_rename and target is not None and name not in self.of.live.after.get(id(s), {name})
        return isinstance(s, ast.Return) or target == name or may_rename

    def _read(self, s: Any, name: str, may_rename: bool = False) -> _Edit | None:
        """A statement that reads the variable once, the last to do so."""
        if not self._ends(s, name, may_rename):
            return None
        loads = [n for n in walk(s) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        if len(loads) != 1 or not any(n is loads[0] for n in _outside_scopes(s.value)):
            return None
        self.base = loads[0]
        return self._value(s)

    def _value(self, s: Any) -> _Edit | None:
        """The new value of a statement that holds the base."""
        parents = {child: node for node in walk(s) for child in ast.iter_child_nodes(node)}
        assert self.base is not None
        before = self.is_scaled, self.is_shifted, self.is_acted, list(self.between)
        noted = self.is_scaled, self.is_shifted, self.is_acted, self.act
        whole: ast.expr = self.base
        made = self._waiting(whole)
        while isinstance(parent := _around(whole, parents), ast.expr):
            larger = self._waiting(parent)
            if larger is None:
                break
            whole, made = parent, larger
        assert made is not None
        self.is_scaled, self.is_shifted, self.is_acted, self.between = before  # of what was tried
        made = self._waiting(whole)
        assert made is not None
        act = self._act(parent, whole) if isinstance(parent, ast.expr) else None
        in_place = isinstance(self.base, ast.Name)
        if act is not None:
            old: ast.expr = parent  # type: ignore[assignment]
            new = self._then(old, made, act)
        else:
            target = None if isinstance(s, ast.Return) else self.method.target(s)
            if whole is s.value and target is not None:
                return _Edit(s, made, waits=target)
            first = self.of.first_of(s) if whole is s.value and whole is self.base else None
            if first is not None and isinstance(whole, ast.Call) and self.of.gives_more(whole):
                return _Edit(s, made, waits=first)
            if whole is s.value and self.of.gives and (self.is_scaled or not self.is_shifted):
                self.is_given = True
                return _Edit(s, made)
            if self._is_first_returned(s, whole) and (self.is_scaled or not self.is_shifted):
                self.is_given = self.gives_more = True
                return _Edit(s, ast.copy_location(ast.Tuple([made, *s.value.elts[1:]], ast.Load()), s.value))
            if in_place and whole is self.base:
                return None
            old, new = whole, self.of.call("now", [made], whole)
        if in_place and not evaluated_first(s.value, old):
            self.is_scaled, self.is_shifted, self.is_acted, self.act = noted
            return None
        value = new if old is s.value else _with(s.value, old, new)
        return _Edit(s, value)

    def _is_first_returned(self, s: Any, e: ast.expr) -> bool:
        """``return h, caches``, where nothing is computed beside."""
        if not self.of.gives or not isinstance(s, ast.Return) or not isinstance(s.value, ast.Tuple):
            return False
        rest = [p for t in s.value.elts[1:] for p in (t.elts if isinstance(t, ast.Tuple) else [t])]
        return bool(rest) and s.value.elts[0] is e and all(map(is_plain, rest))

    def _waiting(self, e: ast.expr) -> ast.expr | None:
        """An expression that may wait, as it is written; None for one that does not."""
        if e is self.base:
            if isinstance(e, ast.Call) and id(e) in self.of.calls:
                return waiting_call(self.method, e, self.of.calls[id(e)], "wait")
            if isinstance(e, ast.Call) and self.of.gives_more(e):
                return self.of.call("begin_more", parts_of(e), e)
            if isinstance(e, ast.Call) and len(e.args) > 1:
                args = ast.copy_location(ast.Tuple(list(e.args), ast.Load()), e)
                return self.of.call("begin_with", [e.func, args], e)
            if isinstance(e, ast.Call):  # commit adds what is called while it waits
                return self.of.call("step" if self.of.is_open(e.func) else "begin", [e.func, e.args[0]], e)
            return copied(e)
        if not any(n is self.base for n in walk(e)):
            return None
        if isinstance(e, ast.BinOp) and isinstance(e.op, (ast.Mult, ast.Add)):
            left, right = self._waiting(e.left), self._waiting(e.right)
            other = e.right if left is not None else e.left
            if (left is None and right is None) or not is_quiet(self.method, other, self.between):
                return None
            if isinstance(e.op, ast.Mult) and self.is_shifted:
                return None  # no op multiplies behind a sum; that with another tensor may be scaled (source/sums.py)
            self._note(isinstance(e.op, ast.Mult))
            method = "times" if isinstance(e.op, ast.Mult) else "plus"
            return self.of.call(method, [left or e.left, right or e.right], e)
        if isinstance(e, ast.Call) and (view := self._view(e)) is not None:
            return view
        if not isinstance(e, ast.Call) or e.keywords:
            return None
        path = self.method.path(e.func)
        if len(e.args) == 1 and self.of.is_open(e.func):
            inner = self._waiting(e.args[0])
            self.is_acted = self.is_acted or inner is not None
            return None if inner is None else self.of.call("step", [e.func, inner], e)
        if path is not None and len(e.args) == 1:
            inner = self._waiting(e.args[0])
            if self.method.what(e.func)[0] != "same" or inner is None:
                return None
            return self.of.call("skip", [e.func, inner], e)
        if len(e.args) == 3 and path is None and self.method.function(e.func) is torch.addcmul:
            parts = [self._waiting(a) for a in e.args]
            others = [a for a, part in zip(e.args, parts, strict=True) if part is None]
            if parts[0] is not None or len(others) != 2:
                return None
            if not all(is_quiet(self.method, o, self.between) for o in others):
                return None
            self.is_scaled = self.is_shifted = True
            return self.of.call("addcmul", [e.func, *(p or a for p, a in zip(parts, e.args, strict=True))], e)
        return None

    def _view(self, e: ast.Call) -> ast.expr | None:
        """A view of a value that may wait, by a method or a function; None for any other call."""
        is_method = isinstance(e.func, ast.Attribute) and any(n is self.base for n in walk(e.func.value))
        if is_method and e.func.attr in VIEWS:  # type: ignore[attr-defined]
            source, rest = e.func.value, e.args  # type: ignore[attr-defined]
            first: ast.expr = ast.Constant(e.func.attr)  # type: ignore[attr-defined]
        elif e.args and not is_method and _moves(self.method.function(e.func)):
            source, rest, first = e.args[0], e.args[1:], e.func
        else:
            return None
        inner = self._waiting(source)
        others = [*rest, *(word.value for word in e.keywords)]
        if inner is None or any(word.arg is None for word in e.keywords):
            return None
        if not all(is_quiet(self.method, o, self.between) for o in others):
            return None
        made = self.of.call("view", [inner, first, *rest], e) if is_method else None
        made = made or self.of.call("view_by", [first, inner, *rest], e)
        made.keywords = [copied(n) for n in e.keywords]
        return made

    def _note(self, is_product: bool) -> None:
        if is_product:
            self.is_scaled = True
        else:
            self.is_shifted = True

    def _act(self, e: Any, inside: ast.expr) -> tuple[str, Any, str] | None:
        """What an expression does to the waiting value: an activation's name, a function, a method's name."""
        if not isinstance(e, ast.Call):
            return None
        if isinstance(e.func, ast.Attribute) and e.func.value is inside:
            node = describe_method(e.func.attr, *self.method.constants(e))
            return (node.name, None, e.func.attr) if node is not None and node.kind == "act" else None
        if not e.args or e.args[0] is not inside:
            return None
        if self.method.path(e.func) is not None:  # what it is shows when the code runs
            kind, name, _ = self.method.what(e.func)
            if not of_one_argument(e) or kind not in ("", "act", "tail", "function"):
                return None
            self.is_acted = self.is_acted or kind in ("act", "function")
            return (name if kind == "act" else "", None, "")
        function = self.method.function(e.func)
        node = None if function is None else self.method.described(function, e)
        return (node.name, function, "") if node is not None and node.kind == "act" else None

    def _then(self, e: Any, value: ast.expr, act: tuple[str, Any, str], gate: ast.Call | None = None) -> ast.expr:
        """``act(value)`` as a call of the site's. ``gate``: the call in ``h * torch.sigmoid(h)``."""
        name, function, method = act
        self.is_acted = self.is_acted or bool(name)
        self.act = name or self.act
        if function is None and not method:
            return self.of.call("then", [e.func, value], e)
        site = f"{self.of.name}_{len(self.of.written)}_{len(self.edits)}"
        self.method.sites[site] = Modulation(function, name, method)
        made = as_function(e, method) if gate is None else _as_function_of(value, e)
        return self.of.call("then", [made, value, *([] if method else [(gate or e).func])], e, site)

    def commit(self, call: ast.Call) -> None:
        """Writes what was found."""
        of = self.of
        self.method.sites.setdefault(of.name, Modulation())
        if self.is_function:
            self.method.sites[of.calls[id(call)]] = site_of(self.method, call)
        if self.gives_more:
            self.method.gives_more = True
        else:
            self.method.gives = self.method.gives or self.is_given
        for edit in self.edits.values():
            s = edit.statement
            for node in walk(edit.value):
                if self.between and _is_begin(node, of.name, *of.calls.values()):
                    names = map(ast.Constant, dict.fromkeys(self.between))
                    more = [ast.Name(self.method.self_name, ast.Load()), *names]
                    node.args += [ast.copy_location(e, call) for e in more]  # type: ignore[attr-defined]
            if edit.instead:
                target = ast.copy_location(ast.Name(str(edit.waits), ast.Store()), s)
                _become(s, ast.copy_location(ast.Assign([target], edit.value), s))
            else:
                s.value = edit.value
            of.written[id(s)] = edit.waits
            of.beside[id(s)] = self.between
        for block, before, name in self.stops.values():
            self._now(block, [s is before for s in block].index(True), name, before)
        for block, name, last in self.ends:
            if name in of.live.after.get(id(last), {name}):
                self._now(block, [s is last for s in block].index(True) + 1, name, last)
        path, (kind, name, _) = self.method.path(call.func), self.method.what(call.func)
        if path is not None and kind == "norm":
            of._chains.append((path, Chain(name, scaled=self.is_scaled, shifted=self.is_shifted, post=self.act)))

    def _now(self, block: list[ast.stmt], at: int, name: str, place: ast.stmt) -> None:
        load = ast.copy_location(ast.Name(name, ast.Load()), place)
        now = assign(name, self.of.call("now", [load], load), place)
        self.of.written[id(now)] = None
        self.of.nows.add(id(now))
        block.insert(at, now)


_BEGINS = "begin", "begin_with", "begin_more", "step", "wait"


def _around(e: ast.expr, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    """What an expression is a part of: the call, where it is what a method is called of."""
    parent = parents[e]
    return parents[parent] if isinstance(parent, ast.Attribute) and isinstance(parents[parent], ast.Call) else parent


_MOVES = torch.flatten, torch.unflatten, torch.reshape, torch.permute, torch.transpose, torch.movedim, torch.squeeze


def _moves(function: Any) -> bool:
    """A function that gives the elements of its first argument in other dims."""
    if isinstance(function, types.FunctionType) and function.__name__ == "rearrange":
        return function.__module__.partition(".")[0] == "einops"
    return any(function is f for f in (*_MOVES, torch.unsqueeze))


def _is_begin(node: ast.AST, *names: str) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    of = function.value if isinstance(function, ast.Attribute) and function.attr in _BEGINS else None
    return isinstance(of, ast.Name) and of.id in names


# Methods of a site that take what waits as an argument.
_TAKE = {
    *("times", "plus", "times_in_place", "plus_in_place", "addcmul"),
    *("now", "then", "skip", "step", "view", "view_by"),
}


def _is_operand(s: ast.stmt, name: str, site: str) -> bool:
    """Whether all that reads a variable in a statement are such methods, or it is returned as it is."""
    taken = {id(s.value)} if isinstance(s, ast.Return) else set()
    for node in walk(s):
        function = node.func if isinstance(node, ast.Call) else None
        of = function.value if isinstance(function, ast.Attribute) and function.attr in _TAKE else None
        if isinstance(of, ast.Name) and of.id.startswith(site):
            taken |= {id(a) for a in node.args}  # type: ignore[attr-defined]
    loads = [n for n in walk(s) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
    return all(id(n) in taken for n in loads)


def _is_name(e: Any, name: str) -> bool:
    return isinstance(e, ast.Name) and e.id == name


def _as_function_of(name: Any, e: ast.expr) -> ast.Lambda:
    """What an expression makes of a variable, as a function of that."""
    arguments = ast.arguments([], [ast.arg(name.id)], None, [], [], None, [])
    return placed(ast.Lambda(arguments, copied(e)), e)


def _become(s: ast.stmt, other: ast.Assign) -> None:
    """Makes a statement another one: blocks and places that hold it stay right."""
    s.__class__ = ast.Assign
    s.__dict__.clear()
    s.__dict__.update(other.__dict__)


def _roots(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], _Loop | None]]:
    """The body, and the bodies of loops and with blocks: no value waits from one to the other, but from one round of a
    loop over children to the next.
    """
    yield body, None
    waiting = [body]
    while waiting:
        inside = waiting.pop()
        for s in inside:
            if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            for block in blocks(s):
                waiting.append(block)
                if not isinstance(s, ast.If):
                    is_plain = isinstance(s, ast.For) and not s.orelse and _only_iterates(s.iter)
                    yield block, _Loop(inside, s) if is_plain else None  # type: ignore[arg-type]


_ITERATORS = {"zip", "enumerate", "reversed", "range", "len", "list", "tuple"}
_ITEMS = {"values", "items", "keys", "children", "named_children"}


def _only_iterates(e: ast.expr) -> bool:
    """Whether no code of the user's runs between the rounds of a loop."""
    calls = [n.func for n in walk(e) if isinstance(n, ast.Call)]
    names = [f.id if isinstance(f, ast.Name) else f.attr if isinstance(f, ast.Attribute) else "" for f in calls]
    known = [_ITERATORS if isinstance(f, ast.Name) else _ITEMS for f in calls]
    are_known = all(name in of for name, of in zip(names, known, strict=True))
    return are_known and not any(isinstance(n, SCOPES) for n in walk(e))


def _outside_scopes(e: ast.AST) -> Iterator[ast.AST]:
    """The parts of an expression, those in lambdas and comprehensions left out."""
    if isinstance(e, SCOPES):
        return
    yield e
    for child in ast.iter_child_nodes(e):
        yield from _outside_scopes(child)


def _with(whole: ast.expr, old: ast.expr, new: ast.expr) -> ast.expr:
    """A copy of an expression with another part in place of one."""
    if whole is old:
        return new
    made = copy.copy(whole)
    for name, value in ast.iter_fields(whole):
        if isinstance(value, ast.AST):
            setattr(made, name, _with(value, old, new))  # type: ignore[arg-type]
        elif isinstance(value, list):
            setattr(made, name, [_with(v, old, new) if isinstance(v, ast.AST) else v for v in value])  # type: ignore[arg-type]
    return made
