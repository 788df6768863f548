"""Chains in a method: found, proven to be nobody else's business, and written as sites.

What a chain is says :mod:`~kgopt.rewrite.chains.patterns`, which is given the method's values as nodes. The proofs are
about names and the order of statements alone.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field
from typing import Any

from kgopt.rewrite.chains.chain import Chain
from kgopt.rewrite.chains.meanings import describe_method
from kgopt.rewrite.chains.patterns import OTHER, Match, Node, is_trivial, match, why_alone
from kgopt.rewrite.chains.roles import Path
from kgopt.rewrite.glue.heads import FollowedSite
from kgopt.rewrite.source.syntax.expressions import (
    arithmetic,
    evaluated_first,
    gate_of,
    is_listed,
    is_name,
    of_one_argument,
)
from kgopt.rewrite.source.syntax.method import Held, Method
from kgopt.rewrite.source.syntax.names import SCOPES, blocks, copied, liveness, reads, walk, writes
from kgopt.rewrite.source.syntax.trees import call_of, forgotten, moved_out, replace


@dataclass
class Found:
    """What one method holds: chains by the path of their norm (``self.a.b[0]``: a, b, 0), and reasons for none;
    whether padding or joins wait for a convolution; and whether it calls norms as functions.
    """

    chains: dict[Path, list[Chain]] = field(default_factory=dict)
    reasons: dict[Path, str] = field(default_factory=dict)
    pads: bool = False
    calls_norms: bool = False


@dataclass(eq=False)
class _Origin:
    """Where a node stands in the source."""

    expression: ast.expr
    statement: int
    argument: ast.expr | None = None  # the expression of its first input
    operand: ast.expr | None = None  # what is called, if that is an object to be checked at run time
    role: Any = None
    methods: tuple[str, ...] = ()  # of tensors, that it calls
    numbers: Held = field(default_factory=list)  # that it computes with

    def operands(self) -> list[tuple[ast.expr, Any]]:
        """What is to be checked at run time, and as what."""
        return [*([] if self.operand is None else [(self.operand, self.role)]), *self.numbers]


class Chains:
    """Those of one method."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.found = Found()
        self.live = liveness(method.tree.body)

    def run(self) -> Found:
        """Puts them into the tree as sites; what the method holds."""
        body = self.method.tree.body
        for _ in range(200):  # each round names one value that was computed inside a larger expression
            self.live = liveness(body)
            self.found = Found()
            if not self._visit(body, None, write=False):
                break
        self.found = Found()
        self._visit(body, None, write=True)
        return self.found

    def _visit(self, body: list[ast.stmt], obstacle: str | None, write: bool) -> bool:
        """Handles a block and the blocks in it. Without ``write``: whether a statement was split."""
        for statement in list(body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            inside = obstacle
            if isinstance(statement, ast.Try) or type(statement).__name__ == "TryStar":
                inside = "it stands in a try block, whose handlers may read the value in between"
            elif isinstance(statement, (ast.With, ast.AsyncWith)) and not self.method.lets_errors_pass(statement):
                inside = "it stands in a with block that may swallow an error in between"
            for block in blocks(statement):
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

    def _matches(self, body: list[ast.stmt]) -> list[Match]:
        norms: list[Node] = []
        values: dict[str, Node] = {}
        for k, statement in enumerate(body):
            simple = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr))
            if not simple:
                for name, held in values.items():
                    if name in self.live.before.get(id(statement), set()):
                        held.read_by(OTHER)
                for name in writes(statement):
                    values.pop(name, None)
                continue
            value = statement.value  # type: ignore[attr-defined]
            node: Node | None = None if value is None else self._build(value, k, values, norms)
            target = self.method.target(statement)
            if node is not None and node.kind != "value" and (target is None or isinstance(value, ast.Name)):
                node.read_by(OTHER)
                node = None
            for name in writes(statement):
                values.pop(name, None)
            for name in reads([t for t in getattr(statement, "targets", []) if not isinstance(t, ast.Name)]):
                if name in values:
                    values[name].read_by(OTHER)
            if target is not None and node is not None and node.kind != "value":
                values[target] = node
        if body:
            for name, held in values.items():
                if name in self.live.after.get(id(body[-1]), set()):
                    held.read_by(OTHER)
        return [match(norm) for norm in norms]

    # ------------------------------------------------------------------------------------------- expressions

    def _build(self, e: ast.expr, k: int, values: dict[str, Node], norms: list[Node]) -> Node:
        if isinstance(e, ast.Name):
            return values.get(e.id) or Node("value")
        made = self._known(e, k)
        if made is None:
            for child in ast.iter_child_nodes(e):
                if isinstance(e, SCOPES) or not isinstance(child, (ast.expr, ast.keyword, ast.FormattedValue)):
                    for name in reads(child):
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
        if isinstance(e, ast.BinOp) and (made := self._with_number(e, k)) is not None:
            return made
        if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Add):
            return Node("add", origin=_Origin(e, k, methods=("__add__",))), [e.left, e.right]
        if isinstance(e, ast.BinOp):
            return self._gated(e, k)
        if not isinstance(e, ast.Call) or not is_listed(e):
            return None
        path = self.method.path(e.func)
        kind, name, inplace = self.method.what(e.func)
        if kind not in ("", "tail", "up", "function"):
            if not of_one_argument(e):
                return None
            wanted = name if kind == "act" else kind
            return Node(kind, name=name, inplace=inplace, origin=_Origin(e, k, None, e.func, wanted)), [e.args[0]]
        function = None if path else self.method.function(e.func)
        if function is not None:
            held: Held = []
            node = self.method.described(function, e, held)
            if node is None or not e.args:
                return None
            node.origin = _Origin(e, k, None, e.func, function, numbers=held)
            return node, list(e.args[:2] if node.kind == "add" else e.args[:1])
        if isinstance(e.func, ast.Attribute) and self._is_value(e.func.value):
            if e.func.attr == "add" and len(e.args) == 1 and not e.keywords:
                return Node("add", origin=_Origin(e, k, methods=("add",))), [e.func.value, e.args[0]]
            held = []
            node = describe_method(e.func.attr, *self.method.constants(e, held))
            if node is not None and node.kind != "add":
                node.origin = _Origin(e, k, methods=(e.func.attr,), numbers=held)
                return node, [e.func.value]
        return None

    def _with_number(self, e: ast.BinOp, k: int) -> tuple[Node, list[ast.expr]] | None:
        """``h / 2``, ``h * self.scale``: a value and a number, which stands there or is held by the module."""
        held: Held = []
        found = arithmetic(e, lambda other: self.method.constant(other, held))
        if found is None:
            return None
        name, called, value, number = found
        origin = _Origin(e, k, methods=(called,), numbers=[pair for pair in held if pair[0] is number])
        return Node("act", name=name, is_number=True, origin=origin), [value]

    def _gated(self, e: ast.BinOp, k: int) -> tuple[Node, list[ast.expr]] | None:
        """``h * torch.sigmoid(h)``, which is silu."""
        found = gate_of(e)
        if found is None or not self._is_value(found[0]):
            return None
        value, gate = found
        known = self._known(gate, k)
        if known is None or known[0].kind != "act" or known[0].name != "sigmoid" or known[0].inplace:
            return None
        origin, (given,) = known[0].origin, known[1]
        if not is_name(given, value.id):
            return None
        made = _Origin(e, k, None, origin.operand, origin.role, ("__mul__", *origin.methods))
        return Node("act", name="silu", origin=made), [value]

    def _is_value(self, e: ast.expr) -> bool:
        """An expression whose value may be a tensor of the chain: a local variable, or a known call."""
        if isinstance(e, ast.Name):
            return e.id in self.method.locals and e.id != self.method.self_name
        return self._known(e, 0) is not None

    def _norm_path(self, found: Match) -> Path:
        path = self.method.path(found.norm.origin.operand)
        assert path is not None
        return path

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
            if value is None or id(value) not in members or self.method.target(body[k]) is None:
                what = ast.unparse(body[k]).splitlines()[0]
                return f"another statement runs in between: {what[:60]}"
        if first != last and not evaluated_first(body[last].value, origins[-1].expression):  # type: ignore[attr-defined]
            return "other code of the same statement runs in between"
        return ""

    # ----------------------------------------------------------------------------------------------- writing

    def _split(self, body: list[ast.stmt], found: Match) -> bool:
        """Gives the chain's input a name, where it is computed in place. Whether it did."""
        first, last = found.nodes[0].origin, found.nodes[-1].origin
        argument = first.argument
        if isinstance(argument, ast.Name):
            return False
        k = first.statement
        statement: Any = body[k]
        target = self.method.target(statement)
        if first.statement != last.statement:
            assert target is not None
            body.insert(k, moved_out(statement, argument, target))
            return True
        if not evaluated_first(statement.value, last.expression):
            self.found.reasons[self._norm_path(found)] = "its input is computed in a larger expression"
            return False
        name = f"_kgopt_value_{len(body)}_{k}"
        self.method.locals.add(name)
        whole = statement.value is last.expression
        if whole and target is not None:
            name = target
        split = [moved_out(statement, argument, name)]
        if not whole:
            split.append(moved_out(statement, last.expression, name))
        body[k : k + 1] = [*split, statement, *(forgotten(name, statement) if name != target else [])]
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
            name = f"_kgopt_{len(self.method.sites)}"
            operands = [pair for n in found.nodes for pair in n.origin.operands()]
            methods = tuple(dict.fromkeys(m for n in found.nodes for m in n.origin.methods))
            self.method.sites[name] = FollowedSite(found.chain, tuple(role for _, role in operands), methods)
            self.found.chains.setdefault(path, []).append(found.chain)
            arguments = [*(copied(operand) for operand, _ in operands), copied(first.argument)]
            place = last.expression
            ready, run = call_of(name, "ready", arguments, place), call_of(name, "run", arguments, place)
            whole = getattr(body[span[-1]], "value", None) is place
            follower = self._follower(body, span[-1]) if whole else None
            if follower is not None:
                run = call_of(name, "run_before", [follower, *arguments], place)
            self._look_up_once(ready, run, name)
            if inline:
                choice = ast.copy_location(ast.IfExp(ready, run, copy.copy(place)), place)
                replace(body[span[0]], place, choice)
            else:
                originals = [copied(body[k]) for k in span]
                final = body[span[-1]]
                replace(final, place, run)
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
                self.method.locals.add(local)
                store, load = ast.Name(local, ast.Store()), ast.Name(local, ast.Load())
                ready.args[i] = ast.copy_location(ast.NamedExpr(ast.copy_location(store, operand), operand), operand)
                run.args[before + i] = ast.copy_location(load, operand)

    def _follower(self, body: list[ast.stmt], k: int) -> ast.expr | None:
        """The module that the next statement gives the value of statement ``k`` to, where nothing else reads it."""
        target = self.method.target(body[k])
        if target is None or k + 1 >= len(body) or any(self.method.may_catch(n) for n in walk(self.method.tree)):
            return None  # what handles an error may read the value
        statement = body[k + 1]
        call: Any = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
        if not of_one_argument(call) or self.method.path(call.func) is None or not is_name(call.args[0], target):
            return None
        read_later = isinstance(statement, ast.Assign) and self.method.target(statement) != target
        if read_later and target in self.live.after.get(id(statement), {target}):
            return None
        return copied(call.func)
