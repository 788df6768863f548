"""The front end for Python source: chains in the methods of a module that we did not write.

A method is parsed, and in every block of statements the values that modules and functions make are described as
:mod:`~kgopt.rewrite.chains.patterns` nodes. A chain is taken only where the values inside it are provably read by
nobody else: no other expression, no later statement on any path, no closure, no exception handler. The code becomes

    if _kgopt_0.ready(self.norm, self.act, x):      # all checks, at each call
        x = _kgopt_0.run(self.norm, self.act, x)
    else:
        x = self.norm(x)                            # the user's own statements, on their own lines
        x = self.act(x)

(in an expression: ``run(...) if ready(...) else self.act(self.norm(x))``), compiled with the function's globals,
closure, file name and line numbers. Before that the source is compiled unchanged and compared with the bytecode that
runs, so a file edited since it was imported changes nothing.

==========  ================================================================================
syntax      Python's trees: code, names, expressions, changes; one method, and what names mean in it
sink        an activation behind a branch moves into it; expressions that are branches
chains      chains become sites
modulated   norms whose value is scaled and shifted by sample
maps        upsampling that such a scale or shift reads
sums        sums of what convolutions give
waiting     values that may wait for the convolution that reads them
heads       norms whose value a convolution reads
upsampled   nearest upsampling whose value a convolution reads
padded      padding, and frames in front, that a convolution reads
formats     ``x.contiguous()`` that may keep channels_last
norm_calls  norms that are called as functions
inherited   methods that are called through super()
users       subclasses of PyTorch's norms; users' modules that are an activation, or nothing
sequential  the code of ``nn.Sequential``, which needs no reading: chains among its children
==========  ================================================================================
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from kgopt.rewrite.chains.meanings import conv_of
from kgopt.rewrite.chains.modules import MORE, is_upsampler
from kgopt.rewrite.chains.roles import Path, Role, role_in_code
from kgopt.rewrite.optimized import classes
from kgopt.rewrite.optimized.classes import Part, Stand
from kgopt.rewrite.optimized.standing import Standing
from kgopt.rewrite.source.chains import Chains, Found
from kgopt.rewrite.source.formats import keep_formats
from kgopt.rewrite.source.heads import Heads
from kgopt.rewrite.source.inherited import inherit, inherited_calls
from kgopt.rewrite.source.modulated.modulations import Modulations
from kgopt.rewrite.source.norm_calls import calls_norms as calls_norms
from kgopt.rewrite.source.norm_calls import calls_norms_in, replace_norm_calls
from kgopt.rewrite.source.padded import Paddings, pads_in
from kgopt.rewrite.source.padded import pads as pads
from kgopt.rewrite.source.sink import sink, spread
from kgopt.rewrite.source.sums import Sums
from kgopt.rewrite.source.syntax.code import CannotRewriteError, own_methods, parse, rebuild, redecorated, undecorated
from kgopt.rewrite.source.syntax.expressions import text_of
from kgopt.rewrite.source.syntax.method import Method
from kgopt.rewrite.source.syntax.names import walk
from kgopt.rewrite.source.upsampled import Upsamplings
from kgopt.rewrite.source.users import derived as derived
from kgopt.rewrite.source.users import small as small

Roles = tuple[tuple[str, Role], ...]


def converts(module: nn.Module, cls: type) -> bool:
    """Whether a method of a module with children calls ``contiguous``."""
    return bool(module._modules) and any(
        "contiguous" in inspect.unwrap(f).__code__.co_names for _, f in own_methods(cls)
    )


def upsamples(module: nn.Module, cls: type) -> bool:
    """Whether a module has a convolution, and a method or a child that may upsample in front of it."""
    if not any(map(conv_of, module._modules.values())):
        return False
    if any(map(is_upsampler, module._modules.values())):
        return True
    return any("interpolate" in inspect.unwrap(f).__code__.co_names for _, f in own_methods(cls))


def _method(function: types.FunctionType, role: Callable[[Path], Role | None]) -> Method:
    inside = undecorated(function)
    return Method(inside, role, parse(inside, decorated=inside is not function))


def _rewrite(method: Method, gives: bool = False) -> list[Found]:
    """Puts all sites into a method's tree; what it holds, and what the functions do that it defines for itself, to
    checkpoint them, say. ``gives``: it may return a value for later.
    """
    inside: list[Found] = []
    for tree in (s for s in method.tree.body if isinstance(s, ast.FunctionDef)):
        inner = method.inner(tree)
        if inner is not None:
            inside += _rewrite(inner)
            tree.body = inner.tree.body
    spread(method.tree.body)
    sink(method, method.tree.body)
    found = Chains(method).run()
    Heads(method).run()
    modulated = Modulations(method, gives).run()
    sums = Sums(method)
    sums.run(method.tree.body)
    Upsamplings(method).run()
    found.pads = Paddings(method, gives).run()
    sums.activate(method.tree.body)
    for path, chain in (*modulated, *sums.chains()):
        found.chains.setdefault(path, []).append(chain)
    keep_formats(method)
    found.calls_norms = replace_norm_calls(method)
    return [*inside, found]


def _giving(name: str, method: Method, role: Callable[[Path], Role | None]) -> Method | None:
    """The same forward, with the value of a norm or a convolution at its end for later; None where there is none."""
    has_norm = any(kind == "norm" or (kind, what) == ("tail", "norm") for kind, what, _ in method.used_roles.values())
    has_norm = has_norm or calls_norms_in(method.code)
    if name != "forward" or not (has_norm or method.may_give):
        return None
    other = Method(method.code, role, parse(method.code))
    _rewrite(other, gives=True)
    if other.gives_more and (other.may_give or other.gives):
        return None  # now this, now that
    return other if other.gives or other.gives_more else None


def _inherit(method: Method, cls: type) -> list[Found]:
    """Has a method run those of the classes above, where sites are in them; what these hold."""
    found: list[Found] = []
    for call, function in inherited_calls(method, cls):
        try:
            inner = Method(function, method.role_of, parse(function))
            inside = [*_rewrite(inner), *_inherit(inner, cls)]
        except CannotRewriteError:
            continue
        method.used_roles |= inner.used_roles
        if inner.sites:
            found += inside
            standing = Standing(cls, function.__name__)
            inherit(method, call, function, rebuild(function, inner.tree, inner.sites, standing, inside=True))
    return found


class Analysis(NamedTuple):
    """What the methods of a module's class hold."""

    recipe: tuple[tuple[str, Roles], ...]  # for its class; empty: nothing fuses
    found: list[Found]
    refused: dict[str, str]  # children in methods that are left alone, and why these are
    only_asked: set[str]  # children of which methods read parameters and numbers alone, as in F.group_norm


_ASKED = {"weight", "bias", "eps", "num_groups", "num_channels", "num_features", "affine"}
_ANY_CHILD = {"children", "named_children", "modules", "named_modules", "_modules", "getattr", "super"}


def _called(method: Method, children: set[str]) -> set[str]:
    """Those of which a method may do more than ask for their parameters."""
    tree, path = method.tree, method.path
    asked = {id(n.value) for n in walk(tree) if isinstance(n, ast.Attribute) and n.attr in _ASKED}
    owners = [n for n in walk(tree) if isinstance(n, ast.Attribute) and id(n) not in asked]
    return {own[0] for n in owners if (own := path(n)) is not None and len(own) == 1 and own[0] in children}  # type: ignore[misc]


def _names_in(code: types.CodeType) -> set[str]:
    """What a function names, and the functions in it."""
    inner = [_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


class Analyses:
    """Those of the modules of one network: blocks of a class are read once, as long as their children do the same."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[dict[Path, Role | None], Analysis]]] = {}

    def of(self, module: nn.Module, cls: type) -> Analysis:
        """What the methods of a module's class hold."""
        replaced = frozenset(name for name, _ in own_methods(cls) if name in module.__dict__)
        known = self._known.setdefault((cls, frozenset(module._modules), replaced), [])
        for roles, found in known:
            if all(role_in_code(module, path) == role for path, role in roles.items()):
                return found
        asked: dict[Path, Role | None] = {}

        def role(path: Path) -> Role | None:
            asked[path] = role_in_code(module, path)
            return asked[path]

        known.append((asked, _analyze(module, cls, role)))
        return known[-1][1]


def _analyze(module: nn.Module, cls: type, role: Callable[[Path], Role | None]) -> Analysis:
    recipe: list[tuple[str, Roles]] = []
    found: list[Found] = []
    refused: dict[str, str] = {}
    children = set(module._modules)
    seen: set[str] = set()
    called: set[str] = set()
    for name, function in own_methods(cls):
        names = _names_in(inspect.unwrap(function).__code__)
        mentioned = children & names
        seen |= mentioned
        called |= children if names & _ANY_CHILD else set()
        by_name = pads_in(function) or calls_norms_in(function)
        if not mentioned and not by_name and not (children and names & {"getattr", "super"}):
            continue
        if name in module.__dict__:
            refused.update(dict.fromkeys(mentioned, f"{cls.__name__}.{name} was replaced on the instance"))
            continue
        try:
            method = _method(function, role)
            called |= _called(method, mentioned)
            in_methods = [*_rewrite(method), *_inherit(method, cls)]
        except CannotRewriteError as error:
            refused.update(dict.fromkeys(mentioned, f"{cls.__name__}.{name} {error}"))
            continue
        found += in_methods
        giving = None if undecorated(function) is not function else _giving(name, method, method.role_of)
        if method.sites or giving is not None:
            roles = method.used_roles | ({} if giving is None else giving.used_roles)
            recipe.append((name, tuple(sorted(roles.items()))))
    return Analysis(tuple(recipe), found, refused, seen - called - refused.keys())


def rewritten_methods(cls: type, recipe: dict[str, Roles], stand: Stand) -> dict[str, Any]:
    """The methods of a recipe, written anew. One whose source has changed since is left out: it runs as it is.

    ``stand`` makes what says whether the class still has a method.
    """
    made: dict[str, Any] = {}
    methods = dict(own_methods(cls))
    for name, listed in recipe.items():
        roles = dict(listed)
        function = methods.get(name)
        if function is None:
            continue
        try:
            method = _method(function, lambda path, roles=roles: roles.get(text_of(path)))  # type: ignore[misc]
            _rewrite(method)
            _inherit(method, cls)
            giving = None if undecorated(function) is not function else _giving(name, method, method.role_of)
        except CannotRewriteError:
            continue
        if giving is not None:
            made["_kgopt_later"] = rebuild(giving.code, giving.tree, giving.sites, stand(name), inside=True)
            made["_kgopt_later_of"] = function, function
            made["_kgopt_gives"] = "conv" if giving.may_give else MORE if giving.gives_more else "norm"
            made["_kgopt_only_convolves"] = giving.only_convolves
            made["_kgopt_takes"] = function.__code__ if giving.takes else None
        if method.sites:
            inside, standing = method.code is not function, stand(name)
            new = rebuild(method.code, method.tree, method.sites, standing, inside)
            made[name] = redecorated(function, new, standing) if inside else new
            if giving is not None:
                made["_kgopt_later_of"] = new, function
    return made


def _methods(original: Any, listed: tuple[Any, ...], stand: Stand) -> dict[str, Any]:
    return dict(rewritten_methods(original, dict(listed[0]), stand))


classes.add_part("source", Part(methods=_methods))
