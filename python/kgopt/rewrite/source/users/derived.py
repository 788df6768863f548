"""Subclasses of PyTorch's norms whose forward is a norm, and perhaps modules, activations or numbers behind it.

    def forward(self, x):
        if self._fast_norm:                       # the instance says which branch runs
            x = fast_group_norm(...)
        else:
            x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return self.act(self.drop(x))

The forward is read, not its class's name. What the reading rests on is asked again at each call: the function and its
code, the names in it, the attributes that decide the branches. Where the children do nothing (nn.Identity), such a
module counts as a norm in the code around it; else its own forward runs the norm with its activations as one site.
"""

from __future__ import annotations

import ast
import inspect
import types
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kgopt.rewrite.chains.chain import Chain, takes_another
from kgopt.rewrite.chains.meanings import UNKNOWN, describe_function
from kgopt.rewrite.chains.modules import does_nothing, has_own_methods
from kgopt.rewrite.chains.roles import role_of
from kgopt.rewrite.norms.sites import Site
from kgopt.rewrite.norms.torch_norms import LEAVES
from kgopt.rewrite.optimized import classes, disguise
from kgopt.rewrite.optimized.classes import Part, Stand
from kgopt.rewrite.optimized.standing import Standing
from kgopt.rewrite.pytorch import originals, watching
from kgopt.rewrite.pytorch.places import Places
from kgopt.rewrite.source.syntax.code import CannotRewriteError, parse
from kgopt.rewrite.source.syntax.expressions import arithmetic, constant, is_name
from kgopt.rewrite.source.users.reading import Reading, UnreadError

_ARGUMENTS = ("num_groups", "weight", "bias", "eps")  # of F.group_norm after x, and attributes of nn.GroupNorm
_CASTS = ("float", "to", "type", "type_as")
_HALVES = (torch.float16, torch.bfloat16)
_MISSING = object()

# What an instance must say for a branch to run: the attribute, whether it is compared with None, the answer.
Test = tuple[str, bool, bool]
# What follows the norm: a child's name and its role ("" for one that is not known), or "" and an activation's name, of
# a function or of arithmetic with a number.
Step = tuple[str, str]


@dataclass(frozen=True)
class Form:
    """What a forward does on an instance; hashable and picklable."""

    tests: tuple[Test, ...]
    steps: tuple[Step, ...]


def _answer(module: Any, test: tuple[str, bool]) -> Any:
    """What an instance says to a test; None: that is not certain."""
    name, none = test
    value = module.__dict__.get(name, _MISSING)
    if value is _MISSING and none:
        value = module._modules.get(name, _MISSING)
    if value is _MISSING or hasattr(type(module), name):
        return None
    return value is None if none else value if type(value) is bool else None


@dataclass(frozen=True)
class _Value:
    """What an expression gives: the forward's argument after so many steps, the norm counted, or its dtype."""

    steps: int
    is_wide: bool = False  # in float32, whatever the argument's dtype is
    is_dtype: bool = False


class _Reading(Reading):
    """A forward, run on the one value that it is given."""

    def __init__(self, base: Any, cls: Any, function: types.FunctionType, ask: Any) -> None:
        tree = parse(function)
        arguments = tree.args
        given = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        if len(given) != 2 or arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
            raise UnreadError
        # Of the places: global names, attributes of modules, what super() reaches.
        super().__init__(function, Places(), {given[1]: _Value(0)}, self_name=given[0])
        self.base, self.cls, self.ask = base, cls, ask
        self.tests: dict[tuple[str, bool], bool] = {}
        # A child's name, or "" and the function, None of arithmetic, with its activation's name.
        self.steps: list[tuple[str, Any]] = []
        self.methods: list[str] = []  # of tensors, by which there is arithmetic
        self.is_normed = self.casts = self.casts_parameters = self.calls_base = self.is_wide = False
        self.done = 0
        returns, given_back = self.run(tree.body)
        if function.__code__.co_cellvars or not returns or not self.is_normed or not self._is_value(given_back):
            raise UnreadError
        # Computed in float32, and given back in the argument's dtype.
        self.narrows = self.is_wide and not given_back.is_wide

    def own(self, e: ast.expr) -> str:
        """The name of ``self.name``; "" for anything else."""
        return e.attr if isinstance(e, ast.Attribute) and is_name(e.value, self.self_name) else ""

    def test(self, e: ast.expr) -> bool:
        if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.Not):
            return not self.test(e.operand)
        none = isinstance(e, ast.Compare) and len(e.ops) == 1 and isinstance(e.ops[0], (ast.Is, ast.IsNot))
        if none:
            assert isinstance(e, ast.Compare)
            if constant(e.comparators[0]) is not None:
                raise UnreadError
            name, turned = self.own(e.left), isinstance(e.ops[0], ast.IsNot)
        else:
            name, turned = self.own(e), False
        answer = self.ask((name, none)) if name else None
        if answer is None:
            raise UnreadError
        self.tests[name, none] = answer
        return answer is not turned

    def value(self, e: ast.expr) -> _Value:
        """Of an expression; each step's value may be read by the next one alone."""
        if isinstance(e, ast.Name) and e.id in self.values:
            return self.values[e.id]  # type: ignore[no-any-return]
        if isinstance(e, ast.IfExp):
            return self.value(e.body if self.test(e.test) else e.orelse)
        if isinstance(e, ast.Attribute) and e.attr == "dtype" and not (of := self.value(e.value)).is_dtype:
            return replace(of, is_dtype=True)
        if isinstance(e, ast.BinOp):
            return self.with_number(e)
        if not isinstance(e, ast.Call) or any(isinstance(a, ast.Starred) for a in e.args):
            raise UnreadError
        called = e.func
        if isinstance(called, ast.Attribute) and called.attr in _CASTS and not e.keywords:
            return self.cast(called, e.args)
        if isinstance(called, ast.Attribute) and called.attr == "forward" and self.is_super(called.value):
            self.calls_base = True
            return self.norm(e.args, [], len(e.args) == 1 and not e.keywords)
        if name := self.own(called):
            if len(e.args) != 1 or e.keywords:
                raise UnreadError
            return self.step(e.args[0], name, None)
        function = self.resolved(called)
        if function is F.group_norm and issubclass(self.base, nn.GroupNorm):
            return self.norm(e.args, e.keywords, True)
        rest = [constant(a) for a in e.args[1:]]
        words = {str(w.arg): constant(w.value) for w in e.keywords}
        node = None if UNKNOWN in rest else describe_function(function, rest, words)
        if node is None or node.kind != "act" or not e.args:
            raise UnreadError
        return self.step(e.args[0], "", (function, node.name))

    def with_number(self, e: ast.BinOp) -> _Value:
        """``norm(x) * 2``."""
        found = arithmetic(e)
        if found is None:
            raise UnreadError
        act, method, value, *_ = found
        self.methods.append(method)
        return self.step(value, "", (None, act))

    def _is_value(self, v: Any) -> bool:
        """Of all the steps so far."""
        return isinstance(v, _Value) and not v.is_dtype and v.steps == self.done

    def step(self, e: ast.expr, name: str, what: Any) -> _Value:
        """One behind the norm, of what ``e`` is."""
        given = self.value(e)
        if not self.is_normed or not self._is_value(given):
            raise UnreadError
        self.steps.append((name, what))
        self.done += 1
        return replace(given, steps=self.done)

    def cast(self, called: ast.Attribute, args: list[ast.expr]) -> _Value:
        """``x.float()``, ``y.type(x.dtype)``: nothing, where all is float32."""
        given = self.value(called.value)
        if given.is_dtype or len(args) != (called.attr != "float"):
            raise UnreadError
        self.casts = True
        if called.attr == "float" or (called.attr != "type_as" and self.resolved(args[0]) is torch.float32):
            return replace(given, is_wide=True)
        like = self.value(args[0])
        if like.is_dtype is (called.attr == "type_as"):
            raise UnreadError
        return replace(given, is_wide=like.is_wide)

    def is_super(self, e: ast.expr) -> bool:
        if not isinstance(e, ast.Call) or not isinstance(e.func, ast.Name) or e.func.id != "super" or e.keywords:
            return False
        owner = next((c for c in self.cls.__mro__ if any(v is self.function for v in vars(c).values())), None)
        if e.args and (len(e.args) != 2 or self.own(ast.Attribute(e.args[1], "x")) != "x"):
            return False
        if e.args and (not isinstance(e.args[0], ast.Name) or self.function.__globals__.get(e.args[0].id) is not owner):
            return False
        if owner is None or "super" in self.function.__globals__:
            return False
        mro, own = self.cls.__mro__, self.base.forward
        between = mro[mro.index(owner) + 1 : mro.index(self.base)]
        for cls in between:
            self.places.add(cls, "forward", own)
        return all(cls.forward is own for cls in between)

    def norm(self, args: list[ast.expr], keywords: list[ast.keyword], certain: bool) -> _Value:
        given = dict(zip(_ARGUMENTS, args[1:], strict=False)) | {str(w.arg): w.value for w in keywords}
        if not certain or not args:
            raise UnreadError
        of = self.value(args[0])
        if not self._is_value(of) or self.is_normed:  # by its own argument
            raise UnreadError
        if not self.calls_base and set(given) != set(_ARGUMENTS):
            raise UnreadError
        for name, value in given.items():
            is_cast = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.args
            if is_cast and value.func.attr == "float" and not value.keywords:  # type: ignore[attr-defined]
                self.casts = self.casts_parameters = True
                value = value.func.value  # type: ignore[attr-defined]
            if self.own(value) != name:
                raise UnreadError
        self.is_normed, self.is_wide = True, of.is_wide
        self.done = 1
        return replace(of, steps=1)


def _base(cls: type) -> Any:
    """The class of PyTorch's norms that a class is made from."""
    return next(base for base in cls.__mro__ if base in LEAVES)


def _read(cls: Any, ask: Any) -> _Reading | None:
    """A class's own forward; None for one that it has from PyTorch."""
    forward = cls.forward
    if forward is _base(cls).forward:
        return None
    if not isinstance(forward, types.FunctionType) or inspect.unwrap(forward) is not forward:
        raise UnreadError
    return _Reading(_base(cls), cls, forward, ask)


def _looked_up(base: Any) -> tuple[str, ...]:
    """What a call looks up in a class beside its forward."""
    return ("__call__", "_call_impl", "__getattr__", "__getattribute__", *originals.METHODS.get(base, ()))


def _is_plain(cls: Any) -> bool:
    """Whether calls and attributes of a class's instances are those of every module's."""
    base = _base(cls)
    hidden = ("_compiled_call_impl", "num_features", "num_channels", *_ARGUMENTS)
    same = all(getattr(cls, n) is getattr(base, n) for n in _looked_up(base))
    return same and all(getattr(cls, n, None) is None for n in hidden)


class Derived:
    """Of a made class: what its norm is, and whether it is still that."""

    def __init__(self, cls: Any, form: Form, reading: _Reading | None) -> None:
        base = _base(cls)
        self.base, self.cls, self.form = base, cls, form
        self.kind = "group" if issubclass(base, nn.GroupNorm) else "instance"
        seen = cls.forward
        places = Places() if reading is None else reading.places
        places.add(cls, "forward", seen)
        places.read(seen, "__code__")
        for name in _looked_up(base):
            places.add(cls, name, getattr(base, name))
        self.is_unchanged = places.check()
        self.casts = reading is not None and reading.casts
        self.narrows = reading is not None and reading.narrows
        self.casts_parameters = reading is not None and reading.casts_parameters
        methods = originals.methods(_CASTS) if self.casts else ()
        self.is_torch_untouched = originals.untouched(*originals.called(base), *methods)
        # Modules around it may take it for a norm.
        self.is_leaf = all(role == "same" for _, role in form.steps)
        functions = [what[0] for name, what in reading.steps if not name] if reading else []
        self.can_step = not functions
        acts: list[str] = []
        roles: list[Any] = []
        self.operands: list[tuple[str, Any]] = []  # of the site behind the norm: a child's name, or "" and a function
        self.count = 0  # of the steps that the site does
        for name, role in form.steps:
            if not role or (role != "same" and not takes_another(acts, role)):
                break
            self.count += 1
            acts += [] if role == "same" else [role]
            function = None if name else functions.pop(0)
            if name or function is not None:
                roles.append(role if name else function)
                self.operands.append((name, function))
        called = () if reading is None else tuple(reading.methods)
        self.site = Site(Chain(self.kind, post="+".join(acts) or "none"), ("norm", *roles), called)
        self.alone = Site(Chain(self.kind), ("norm",), inside=base)

    def holds(self, norm: Any, x: Any) -> bool:
        """Whether a call of the norm, one of this class, does what was read."""
        if not self.is_unchanged() or not self.is_torch_untouched() or has_own_methods(norm, self.base):
            return False
        for name, none, answer in self.form.tests:
            if _answer(norm, (name, none)) is not answer:
                return False
        if not self.casts:
            return True
        return isinstance(x, Tensor) and (x.dtype is torch.float32 or self.is_narrowed(norm, x))

    def is_narrowed(self, norm: Any, x: Tensor) -> bool:
        """Whether half precision is computed in float32, as kgopt's op does, and given back. Parameters that PyTorch
        would refuse there are PyTorch's.
        """
        if not self.narrows or x.dtype not in _HALVES:
            return False
        given = norm._parameters.get("weight"), norm._parameters.get("bias")
        return self.casts_parameters or all(p is None or p.dtype is torch.float32 for p in given)

    def holds_alone(self, norm: Any, x: Any) -> bool:
        """The same, of one whose children do nothing."""
        return self.is_leaf and self.holds(norm, x) and all(map(does_nothing, self.children(norm)))

    def children(self, norm: Any) -> list[Any]:
        """What is called after the norm."""
        return [norm._modules.get(name) for name, _ in self.form.steps]

    def run(self, norm: Any, standing: Standing, x: Any) -> Any:
        """The forward."""
        if standing.is_replaced():
            return standing.replaced(norm, x)
        if not self.holds(norm, x):
            return standing.seen(norm, x)
        # A step behind the site would read float32, where half precision is given back only at the end.
        can_step = self.can_step and not (self.narrows and x.dtype in _HALVES)
        if self.count:
            operands = [function or norm._modules.get(name) for name, function in self.operands]
            all_done = self.count == len(self.form.steps)
            if (can_step or all_done) and self.site.ready(norm, *operands, x):
                return self._rest(norm, self.site.run(norm, *operands, x), self.count)
        if (can_step or not self.form.steps) and self.alone.ready_inside(norm, x):
            return self._rest(norm, self.alone.run(norm, x), 0)
        return standing.seen(norm, x)

    def _rest(self, norm: Any, x: Any, start: int) -> Any:
        for name, _ in self.form.steps[start:]:
            x = getattr(norm, name)(x)
        return x


def recipe_of(norm: nn.Module) -> tuple[tuple[Any, ...], str]:
    """The recipe of a class for an instance of a subclass of PyTorch's norms; or why there is none."""
    cls = type(norm)
    more = f"{cls.__qualname__} is a subclass of {cls.__mro__[1].__qualname__}, which may do more"
    if "forward" in norm.__dict__ or has_own_methods(norm, _base(cls)):
        return (), "its forward was replaced on the instance"
    if not _is_plain(cls):
        return (), more
    if getattr(norm, "track_running_stats", False):
        return (), "track_running_stats=True: eval normalizes with running statistics, which is no GroupNorm"
    try:
        reading = _read(cls, lambda test: _answer(norm, test))
    except (UnreadError, CannotRewriteError):
        return (), more
    if reading is None:
        return (("derived", Form((), ())),), originals.why_replaced(_base(cls))
    steps: list[Step] = []
    for name, what in reading.steps:
        if what is not None:
            steps.append(("", what[1]))
        elif isinstance(norm._modules.get(name), nn.Module) and not hasattr(cls, name):
            role = role_of(norm._modules[name])
            kind = role[0] if role is not None else ""
            steps.append((name, role[1] if kind == "act" else kind if kind == "same" else ""))  # type: ignore[index]
        else:
            return (), more
    return (("derived", Form(tuple((*test, answer) for test, answer in reading.tests.items()), tuple(steps))),), ""


def chain_of(norm: Any) -> Chain:
    """What the forward of a norm with a class of such a recipe computes at once."""
    chain: Chain = type(norm)._kgopt_derived.site.chain
    return chain


def _methods(original: Any, listed: tuple[Any, ...], stand: Stand) -> dict[str, Any]:
    (form,) = listed
    answers = {(name, none): answer for name, none, answer in form.tests}
    try:
        reading = _read(original, answers.get)
    except (UnreadError, CannotRewriteError):
        return {}
    now = [(name, "" if what is None else what[1]) for name, what in reading.steps] if reading else []
    if [(name, "" if name else role) for name, role in form.steps] != now:
        return {}  # unpickled beside other source
    derived, standing = Derived(original, form, reading), stand("forward")
    return {"forward": _forward(derived, standing), "_kgopt_derived": derived}


def _forward(_kgopt_derived: Derived, _kgopt_standing: Standing) -> Any:
    _kgopt_outside, _kgopt_run = watching.outside_own_modes, _kgopt_derived.run

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:  # the user's name for the argument
            run = _kgopt_standing.replaced if _kgopt_standing.is_replaced() else _kgopt_standing.seen
            return run(self, *args, **kwargs)
        return _kgopt_outside(_kgopt_run, self, _kgopt_standing, *args)

    return disguise.as_original(forward, _kgopt_standing.seen)


classes.add_part("derived", Part(methods=_methods))
