"""Calls whose value may wait for a product, a sum or an activation: norms, and open calls: of what only the running
code names (``norm(x)`` in a loop over children, ``self.norms[i](x)``, ``getattr(F, self.act)(x)``).
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from kgopt.rewrite.chains.modules import MORE
from kgopt.rewrite.source.norm_calls import is_norm_call, parts_of, waiting_call
from kgopt.rewrite.source.syntax.expressions import (
    called_of,
    elements_of,
    evaluated_first,
    is_listed,
    is_plain,
    of_one_argument,
)
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.names import outside_scopes, reads, walk, writes
from kgopt.rewrite.source.syntax.quiet import is_quiet
from kgopt.rewrite.source.syntax.trees import call_of, forgotten, moved_out

# Of ``gamma.unsqueeze(2)``, where self was read to make gamma; the other names are those of layers as a rule.
_OF_TENSORS = set(dir(torch.Tensor)) - {"norm", "relu", "prelu", "sigmoid", "tanh", "softmax"}
_VERBS = "begin", "begin_with", "begin_more", "step", "wait"


class OpenCalls:
    """Those of one method."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self._of_self = self._from_self()

    def _from_self(self) -> set[str]:
        """Local variables that may hold a child: what is assigned to them reads ``self``."""
        found: set[str] = set()
        for node in walk(self.method.tree):
            source = node.value if isinstance(node, ast.Assign) else node.iter if isinstance(node, ast.For) else None
            if source is not None and self.method.self_name in reads(source):
                found |= writes(node) if isinstance(node, ast.Assign) else writes(node.target)  # type: ignore[attr-defined]
        return found - self.method.hidden

    def is_open(self, e: ast.expr) -> bool:
        """What shows only when the code runs: a variable, or an item of one, that may hold a child; ``self.norms[i]``;
        a property; ``getattr(F, self.act)``.
        """
        if isinstance(e, ast.Name):
            return e.id in self._of_self
        if isinstance(e, ast.Subscript) and is_quiet(self.method, e.slice, []):
            return self.method.path(e.value) is not None or self.is_open(e.value)
        if isinstance(e, ast.Attribute):
            if self.method.path(e) is not None:
                return self.method.what(e)[0] == "open"
            return e.attr not in _OF_TENSORS and self.is_open(e.value)
        if not isinstance(e, ast.Call) or len(e.args) != 2 or e.keywords:
            return False
        return self.method.function(e.func) is getattr and all(is_quiet(self.method, a, []) for a in e.args)

    def name_values(self, body: list[ast.stmt]) -> None:
        """Gives what open norms and activations make a name where it is a part of something else, in a block.

        ``x = act(norm(x)) + r`` becomes ``v = act(norm(x))``, ``x = v + r``, ``v = None``: only statements begin.
        """
        for statement in list(body):
            if isinstance(statement, ast.If):
                self.name_values(statement.body)
                self.name_values(statement.orelse)
            part = self._unnamed(statement)
            if part is None:
                continue
            name = f"_kgopt_value_of_{len(self.method.locals)}"
            self.method.locals.add(name)
            at = body.index(statement)
            body[at : at + 1] = [moved_out(statement, part, name), statement, *forgotten(name, statement)]

    def _unnamed(self, s: Any) -> ast.Call | None:
        """The largest part of a statement's value that passes an open norm and its activation on, one call around the
        other, where it is not all of the value and nothing is computed ahead of it.
        """
        has_target = isinstance(s, ast.AugAssign) and isinstance(s.target, ast.Name)
        may_be_whole = isinstance(s, (ast.Assign, ast.AnnAssign, ast.Return))
        if not (has_target or may_be_whole or isinstance(s, ast.Expr)) or s.value is None:
            return None
        if may_be_whole and self._passes(s.value):
            return None
        parts = (e for e in outside_scopes(s.value) if self._passes(e) and evaluated_first(s.value, e))
        return next(parts, None)

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
        return self.method.activation(call) is not None


class Begins:
    """Those of one method, and how they are written as calls of its site."""

    def __init__(self, method: Method, site: str, open_calls: OpenCalls) -> None:
        self.method, self.site = method, site
        self.is_open = open_calls.is_open
        self.functions: dict[ast.Call, str] = {}  # norms that are called as functions: the names of their sites

    def is_one(self, e: ast.Call) -> bool:
        """A call with one argument of a norm, of a Sequential that ends in one, or of what the running code names; also
        of a norm as a function.
        """
        if is_norm_call(self.method, e):
            self.functions.setdefault(e, f"{self.site}_call_{len(self.functions)}")
            return True
        if self.gives_more(e):
            return True
        if not e.args or e.keywords or not is_listed(e):
            return False
        if self.method.path(e.func) is not None:
            kind, name, _ = self.method.what(e.func)
            return kind == "open" or (kind == "norm" and len(e.args) == 1) or (kind, name) == ("tail", "norm")
        return self.is_open(e.func)

    def gives_more(self, e: ast.Call) -> bool:
        """A call of a module that returns a tuple, of which the first is a norm's value."""
        return self.method.what(e.func)[:2] == ("tail", MORE) and bool(e.args) and is_listed(e)

    def first_of(self, s: Any) -> str | None:
        """The variable that gets the first value of a tuple; the others go to variables, or into a dict of the
        method's.
        """
        target = s.targets[0] if isinstance(s, ast.Assign) and len(s.targets) == 1 else None
        if not isinstance(target, ast.Tuple) or not isinstance(target.elts[0], ast.Name):
            return None
        name = target.elts[0].id
        rest = [part for t in target.elts[1:] for part in elements_of(t)]
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

    def written(self, e: ast.Call) -> ast.Call:
        """Such a call, as a call of the site; ``tell`` adds what is called while its value waits."""
        if e in self.functions:
            return waiting_call(self.method, e, self.functions[e], "wait")
        if self.gives_more(e):
            return call_of(self.site, "begin_more", parts_of(e), e)
        if len(e.args) > 1:
            return call_of(self.site, "begin_with", [e.func, ast.Tuple(e.args, ast.Load())], e)
        return call_of(self.site, "step" if self.is_open(e.func) else "begin", [e.func, e.args[0]], e)

    def tell(self, tree: ast.AST, between: list[str], place: ast.AST) -> None:
        """Adds to each of them in a tree which children are called while its value waits."""
        for node in walk(tree) if between else ():
            name, verb = called_of(node)
            if verb in _VERBS and name in (self.site, *self.functions.values()):
                names = map(ast.Constant, dict.fromkeys(between))
                more = [ast.Name(self.method.self_name, ast.Load()), *names]
                node.args += [ast.copy_location(e, place) for e in more]
