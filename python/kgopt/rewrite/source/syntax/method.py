"""One method of a user's class: its tree, its local names, and what the children that it names do in a chain.

Whatever looks for something in code is given one, and changes its tree. Nothing here knows which class the code is for.
"""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Callable
from typing import Any

import torch

from kgopt.rewrite.chains.meanings import UNKNOWN, describe_function, describe_method
from kgopt.rewrite.chains.patterns import Node
from kgopt.rewrite.chains.roles import Number, Path, Role
from kgopt.rewrite.glue.heads import FollowedSite
from kgopt.rewrite.norms.calls import NormCall
from kgopt.rewrite.source.syntax.code import CannotRewriteError
from kgopt.rewrite.source.syntax.expressions import constant, of_one_argument, path_of, text_of
from kgopt.rewrite.source.syntax.names import SCOPES, copied, walk, writes
from kgopt.rewrite.source.syntax.trees import call_of
from kgopt.rewrite.waiting.base import Written


class Inherited:
    """A method of a class above, and what it is written anew."""

    def __init__(self, seen: types.FunctionType, ours: types.FunctionType) -> None:
        self.seen, self.ours = seen, ours

    def of(self, found: Any) -> Any:
        """``super().forward``: ours, where that is what was seen."""
        if torch.compiler.is_compiling():
            return found
        is_seen = getattr(found, "__func__", None) is self.seen
        return types.MethodType(self.ours, found.__self__) if is_seen else found


Held = list[tuple[ast.expr, Number]]  # numbers that a module holds, and where code asks for them
Replacement = Inherited | FollowedSite | Written | NormCall  # what a rewritten method calls
_LOOKS_AT_LOCALS = {"locals", "vars", "dir", "eval", "exec", "globals", "breakpoint"}


class Method:
    """One method of a class: its tree, which is changed, and what the names in it mean."""

    def __init__(
        self,
        function: types.FunctionType,
        role: Callable[[Path], Role | None],
        tree: ast.FunctionDef,
        outer: Method | None = None,
    ) -> None:
        self.code = function
        self.role_of = role
        self.tree = copied(tree)
        self.sites: dict[str, Replacement] = {} if outer is None else outer.sites
        self.used_roles: dict[str, Role] = {} if outer is None else outer.used_roles
        self.gives = False  # it may return what is no tensor yet
        self.gives_more = False  # in a tuple, as the first of several values
        self.may_give = False  # what a convolution makes
        self.takes = False  # it may be given what is no tensor yet
        self.only_convolves = False  # it pads and convolves that, and does nothing else
        arguments = self.tree.args
        self.owner: str = "".join(function.__qualname__.split(".")[-2:-1]) if outer is None else outer.owner
        self.self_name: str = (arguments.posonlyargs + arguments.args)[0].arg if outer is None else outer.self_name
        code = function.__code__
        self.hidden = set(code.co_cellvars)  # names that closures see
        for node in walk(self.tree):
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                self.hidden.update(node.names)
        self.locals = set(code.co_varnames) | set(code.co_cellvars)
        called = {n.func.id for n in walk(self.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        if called & _LOOKS_AT_LOCALS:
            raise CannotRewriteError(f"calls {min(called & _LOOKS_AT_LOCALS)}(), which may read any variable")
        if self.self_name in {w for s in self.tree.body for w in writes(s)}:
            raise CannotRewriteError(f"assigns {self.self_name}")

    def inner(self, tree: ast.FunctionDef) -> Method | None:
        """A function that the method defines and that reads its ``self``: one more method of that; None for one that
        does what a method's code does not.
        """
        codes = [c for c in self.code.__code__.co_consts if isinstance(c, types.CodeType) and c.co_name == tree.name]
        given = tree.args
        is_plain = not (tree.decorator_list or given.vararg or given.kwarg or given.kwonlyargs or given.defaults)
        if not is_plain or len(codes) != 1 or self.self_name not in codes[0].co_freevars:
            return None
        if any(isinstance(n, (*SCOPES, ast.ClassDef, ast.Nonlocal, ast.Global)) for s in tree.body for n in walk(s)):
            return None
        # What it reads of the method's own variables shows when it runs.
        cells = tuple(types.CellType() for _ in codes[0].co_freevars)
        function = types.FunctionType(codes[0], self.code.__globals__, tree.name, None, cells)
        return Method(function, self.role_of, tree, self)

    def lets_errors_pass(self, statement: ast.With | ast.AsyncWith) -> bool:
        """Context managers of torch do not swallow exceptions."""
        for item in statement.items:
            call = item.context_expr
            base: ast.expr = call.func if isinstance(call, ast.Call) else call
            value = self.function(base)
            if str(getattr(value, "__module__", "")).split(".")[0] != "torch":
                return False
        return True

    def target(self, statement: ast.stmt) -> str | None:
        """The one name that a statement assigns, if it is a variable that only this function sees."""
        target: Any = None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target = statement.target
        return target.id if isinstance(target, ast.Name) and target.id not in self.hidden else None

    def described(self, function: Any, call: ast.Call, held: Held | None = None) -> Node | None:
        """The node that a call of a function makes, without its inputs. ``held``: as :meth:`constants` has it."""
        args, kwargs = self.constants(call, held)
        node = describe_function(function, args[1:] if args else [], kwargs)
        if node is None and len(args) == 2:
            two = describe_function(function, [], kwargs)
            return two if two is not None and two.kind == "add" else None
        return None if node is not None and node.kind == "add" else node

    def constants(self, call: ast.Call, held: Held | None = None) -> tuple[list[Any], dict[str, Any]]:
        """Its arguments, as :meth:`constant` has them."""
        args = [self.constant(a, held) for a in call.args]
        return args, {str(w.arg): self.constant(w.value, held) for w in call.keywords}

    def constant(self, e: ast.expr, held: Held | None = None) -> Any:
        """Its value; UNKNOWN where it is no constant. With ``held`` numbers that the module holds are known, too, and
        noted there: who asks for them has to compare them at each call.
        """
        found = constant(e)
        number = self.number(e) if found is UNKNOWN and held is not None else None
        if number is None or held is None:
            return found
        held.append((e, number))
        return number.value

    def activation(self, call: ast.Call, value: ast.expr | None = None) -> tuple[str, Any, str] | None:
        """Of a call that is an activation, but no child's: its name, and the function that is called, or the name of
        the method if it is one of ``value``.
        """
        function, method = None, ""
        if isinstance(call.func, ast.Attribute) and call.func.value is value:
            method = call.func.attr
            node = describe_method(method, *self.constants(call))
        else:
            function = self.function(call.func)
            node = None if function is None else self.described(function, call)
        return (node.name, function, method) if node is not None and node.kind == "act" else None

    def number(self, e: ast.expr) -> Number | None:
        """What ``self.factor`` is, if that is a number."""
        kind, text, _ = self.what(e) if self.path(e) is not None else ("", "", False)
        return Number(ast.literal_eval(text)) if kind == "number" else None

    def around(self, e: Any) -> list[ast.Call]:
        """Calls of children that may do nothing, around an expression, the outer ones first: ``self.dropout(h)``."""
        found: list[ast.Call] = []
        while of_one_argument(e) and self.what(e.func)[0] == "same":
            found.append(e)
            e = e.args[0]
        return found

    def inside(self, e: Any) -> Any:
        """What is in them."""
        around = self.around(e)
        return around[-1].args[0] if around else e

    def skipped(self, site: str, e: ast.expr, value: ast.expr) -> ast.expr:
        """The same calls around another value, as calls of a site, which does what they do."""
        for part in reversed(self.around(e)):
            value = call_of(site, "skip", [part.func, value], part)
        return value

    def path(self, e: ast.expr) -> Path | None:
        """Of an expression such as ``self.a.b[0]``."""
        return path_of(e, self.self_name, self.owner)

    def role(self, path: Path) -> Role | None:
        """Of what a path means; it becomes part of the recipe."""
        role = self.role_of(path)
        if role is not None:
            self.used_roles[text_of(path)] = role
        return role

    def what(self, e: ast.expr) -> Role:
        """The role of what an expression such as ``self.conv`` means; of any other, names that are empty."""
        path = self.path(e)
        return (self.role(path) if path else None) or ("", "", False)

    def function(self, e: ast.expr) -> Any:
        """What a global name such as ``F.silu`` or ``torch.nn.functional.relu`` stands for."""
        if isinstance(e, ast.Name):
            if e.id in self.locals:
                return None
            cells = dict(zip(self.code.__code__.co_freevars, self.code.__closure__ or (), strict=True))
            if e.id in cells:
                try:
                    return cells[e.id].cell_contents
                except ValueError:
                    return None
            return self.code.__globals__.get(e.id, getattr(builtins, e.id, None))
        if isinstance(e, ast.Attribute):
            base = self.function(e.value)
            return getattr(base, e.attr, None) if isinstance(base, types.ModuleType) else None
        return None

    def may_catch(self, node: ast.AST) -> bool:
        """Whether a statement may go on after an error in it."""
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return not self.lets_errors_pass(node)
        return isinstance(node, (ast.Try, getattr(ast, "TryStar", ast.Try)))
