"""A norm whose result is scaled and shifted by sample: ``act(norm(x) * (1 + scale) + shift)`` as one op; and norms and
activations that only the running code names: ``for norm in self.norms: x = F.relu(norm(x))``, ``self.act_fn(norm(x))``.

The front end for source code (:mod:`~kgopt.rewrite.source.modulated.modulations`) has :meth:`Modulation.begin` called
in place of the norm, whose value then waits for the product, the sum and the activation that follow, each of which is
one of these methods. What waits is no tensor: the front end proves that nobody else sees it, or asks for the tensor by
:meth:`Modulation.now`. Whether an operand has one value a sample and channel is known at run time; every method does
what stands in the code where it has not, or where nothing waits.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite.chains.chain import PRELU, Chain
from kgopt.rewrite.chains.meanings import activation_of, activation_of_function, untouched
from kgopt.rewrite.chains.modules import does_nothing, is_as_is, runs_like_sequential
from kgopt.rewrite.glue import plans
from kgopt.rewrite.norms.sites import Site
from kgopt.rewrite.pytorch import originals
from kgopt.rewrite.pytorch.watching import any_global_hooks, is_hooked
from kgopt.rewrite.waiting import maps
from kgopt.rewrite.waiting.base import Written
from kgopt.rewrite.waiting.sums import (
    Later,
    LaterNorm,
    Sum,
    Waiting,
    all_change_nothing,
    given_later,
    runs_in_order,
)

_SUM = Sum()
_KEPT = types.FunctionType, types.BuiltinFunctionType
_ADDCMUL = torch.addcmul
_multiplies_as_is = originals.untouched(*originals.methods(("__mul__", "__imul__", "__add__", "__iadd__")))
VIEWS = (
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "flatten",
    "unflatten",
    "permute",
    "transpose",
    "movedim",
    "contiguous",
)
_views_as_is = originals.untouched(*originals.methods(VIEWS))
_is_addcmul_untouched = originals.untouched((torch, "addcmul"))
_BY_NAME = {"times": (torch.mul, "mul", "mul_"), "plus": (torch.add, "add", "add_")}
_is_by_name_untouched = originals.untouched(
    (torch, "mul"), (torch, "add"), *originals.methods(("mul", "mul_", "add", "add_"))
)


@functools.lru_cache(maxsize=256)
def _followed(kind: str, act: str, role: Any, method: str) -> Site:
    """The site of a norm and the activation behind it."""
    roles = ("norm",) if method else ("norm", role)
    return Site(Chain(kind, post=act), roles, (method,) if method else ())


class Modulation(Written):
    """Products and sums behind norms in a method; ``act``: the activation of the function or method behind one."""

    waits = Waiting, maps.Map

    def __init__(self, function: Any = None, act: str = "", method: str = "") -> None:
        self.function, self.act, self.method = function, act, method
        places = originals.methods((method,) if method else ())
        self.is_untouched = originals.untouched(*places) if function is None else untouched(function, *places)

    def __reduce__(self) -> Any:
        return type(self), (self.function, self.act, self.method)

    def begin(self, module: Any, x: Any, owner: Any = None, *between: str) -> Any:
        """``module(x)``, or its value for later. ``between``: children of ``owner`` that are called while it waits."""
        given = given_later(module, (x,), owner, *between)
        value = _SUM.begin(module, x, owner, *between) if given is None else given
        if type(value) is Waiting:
            return value if _multiplies_as_is() else value.value()
        if type(value) is LaterNorm:
            return Waiting(value) if _multiplies_as_is() else value.value()
        return value.value() if isinstance(value, Later) else value

    def begin_with(self, module: Any, args: tuple[Any, ...], owner: Any = None, *between: str) -> Any:
        """``module(*args)``, or its value for later."""
        value = given_later(module, tuple(map(self.now, args)), owner, *between)
        if value is None:
            return module(*map(self.now, args))
        is_waiting = type(value) is Waiting and _multiplies_as_is()
        return value if is_waiting or not isinstance(value, (Waiting, Later)) else value.value()

    def begin_more(self, module: Any, args: Any, kwargs: Any, owner: Any = None, *between: str) -> Any:
        """``module(*args, **kwargs)``, a tuple, of which the first may be a value for later."""
        given = tuple(map(self.now, args))
        found = given_later(module, given, owner, *between, with_more=True, kwargs=kwargs)
        if found is None:
            return module(*given, **kwargs)
        if type(found) is not tuple or not found or not isinstance(found[0], (Waiting, Later)):
            return found
        waits = type(found[0]) is Waiting and _multiplies_as_is()
        return found if waits else (found[0].value(), *found[1:])

    def step(self, module: Any, value: Any, owner: Any = None, *between: str) -> Any:
        """``module(value)`` of whatever the code has there: an activation behind a norm that waits, a norm that waits
        from now on, or anything else.
        """
        if type(value) is Waiting:
            y = self._acted(module, value)
            if y is not None:
                return y
            if does_nothing(module):
                return value
            value = value.value()
        return self.begin(module, value, owner, *between) if isinstance(module, nn.Module) else module(value)

    def enlarge(self, function: Any, args: Any, kwargs: Any, owner: Any = None, *between: str) -> Any:
        """``function(*args, **kwargs)``, an upsampling, or its value for later."""
        if not all_change_nothing(owner, between):
            return function(*args, **kwargs)
        return maps.enlarge(function, *args, **kwargs)

    def of_map(self, module: Any, value: Any) -> Any:
        """``module(value)``, or a map of its value for later."""
        return maps.through(module, value)

    def view(self, value: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """``value.method(...)``, which moves elements and computes nothing: activations may be computed before."""
        view = operator.methodcaller(method, *args, **kwargs)
        return value.viewed(view) if type(value) is Waiting and _views_as_is() else view(self.now(value))

    def view_by(self, function: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """``function(value, ...)``, the same as a function."""
        if type(value) is Waiting and _views_as_is():
            return value.viewed(lambda t: function(t, *args, **kwargs))
        return function(self.now(value), *args, **kwargs)

    def like(self, value: Any) -> Any:
        """A tensor that has the sizes and the device of what waits."""
        return value.through_views(value.later.x) if type(value) is Waiting else self.now(value)

    def dtype_of(self, value: Any) -> Any:
        """``value.dtype``."""
        if type(value) is not Waiting:
            return self.now(value).dtype
        return value.later.site.dtype_of(value.later.module, value.later.x)

    def times(self, a: Any, b: Any) -> Any:
        """``a * b``."""
        if Waiting in (type(a), type(b)) and (y := _times(a, b)) is not None:
            return y
        return self.now(a) * self.now(b)

    def times_in_place(self, a: Any, b: Any) -> Any:
        """``a *= b``."""
        if type(a) is Waiting:
            if (y := _times(a, b)) is not None:
                return y
            a = a.value()
        a *= self.now(b)
        return a

    def plus(self, a: Any, b: Any) -> Any:
        """``a + b``."""
        if type(a) is Waiting and type(b) is Waiting:  # a shift may be a norm's value itself
            a, b = (a, b.value()) if a.of_maps else (a.value(), b) if b.of_maps else (a, b)
        if Waiting in (type(a), type(b)) and (y := _plus(a, b)) is not None:
            return y
        return self.now(a) + self.now(b)

    def plus_in_place(self, a: Any, b: Any) -> Any:
        """``a += b``."""
        if type(a) is Waiting:
            if (y := _plus(a, b)) is not None:
                return y
            a = a.value()
        a += self.now(b)
        return a

    def times_by(self, how: Any, a: Any, b: Any) -> Any:
        """``torch.mul(a, b)``, or a's method that ``how`` names: ``mul``, ``mul_``."""
        return self._by("times", _times, how, a, b)

    def plus_by(self, how: Any, a: Any, b: Any) -> Any:
        """``torch.add(a, b)``, or a's method ``add`` or ``add_``."""
        return self._by("plus", _plus, how, a, b)

    def _by(self, kind: str, operation: Any, how: Any, a: Any, b: Any) -> Any:
        later, other = (a, b) if type(a) is Waiting else (b, a)
        may_wait = type(later) is Waiting and not isinstance(other, Waiting) and _is_by_name_untouched()
        if may_wait and any(how is known or how == known for known in _BY_NAME[kind]):
            y = operation(a, b)
            if y is not None:
                return y
        a, b = self.now(a), self.now(b)
        return getattr(a, how)(b) if isinstance(how, str) else how(a, b)

    def addcmul(self, function: Any, shift: Any, a: Any, b: Any) -> Any:
        """``torch.addcmul(shift, a, b)``."""
        later, other = (a, b) if type(a) is Waiting else (b, a)
        if type(later) is Waiting:
            is_known = function is _ADDCMUL and _is_addcmul_untouched() and later.is_plain
            if is_known and later.may_take(other) and later.may_take(shift):
                return Waiting(later.later, other, shift)
            if is_known and later.may_map(other) and later.may_map(shift):
                return Waiting(later.later, other, shift, of_maps=True)
        return function(self.now(shift), self.now(a), self.now(b))

    def then(self, act: Any, value: Any, function: Any = None) -> Any:
        """``act(value)``. ``act`` is a module, perhaps a Sequential that begins with one, or calls ``function``."""
        if type(value) is not Waiting:
            return act(value)
        y = self._acted(act, value, function)
        return act(value.value()) if y is None else y

    def _acted(self, act: Any, value: Waiting, function: Any = None) -> Any:
        """What an activation gives, computed with what waits; None where it has to be called."""
        if value.views:
            if _is_sequential(act) or activation_of(act) == PRELU:
                return None  # its slopes lie along a dim that the views may have moved
            y = self._acted(act, value.without_views(), function)
            return None if y is None else value.through_views(y)
        if _is_sequential(act):
            modules = list(act._modules.values())
            y = self.then(modules[0], value)
            for module, following in itertools.pairwise(modules[1:]):
                y = plans.before(module, following, y)
            return plans.through(modules[-1], y) if len(modules) > 1 else y
        is_module = isinstance(act, nn.Module)
        name: str | None
        if is_module:
            name = activation_of(act) if is_as_is(act) and not any_global_hooks() else None
        elif function is None and self.function is None and not self.method:
            name = None if torch.compiler.is_compiling() else activation_of_function(act)
        else:
            name = self.act if function is self.function and self.is_untouched() else None
        if not name:
            return None
        if value.is_plain:
            return self._norm_then(value.later, name, act if is_module or function is None else function)
        return value.with_act(name, act if name == PRELU else None)

    def _norm_then(self, later: LaterNorm, name: str, operand: Any) -> Tensor | None:
        """The norm and its activation, where nothing stands between the two."""
        is_module = isinstance(operand, nn.Module)
        if type(later) is not LaterNorm:  # a function's call
            prelu = operand if name == PRELU else None
            return later.site.run_modulated(later.module, later.x, None, None, name, prelu, later.begun)
        is_new = not (is_module or self.method or isinstance(operand, _KEPT))  # a partial, a method: at each call
        if is_new or (torch.compiler.is_compiling() and name != PRELU):
            return later.site.run_modulated(later.module, later.x, None, None, name)
        site = _followed(later.site.chain.norm, name, name if is_module else operand, "" if is_module else self.method)
        operands = (later.module, later.x) if self.method and not is_module else (later.module, operand, later.x)
        return site.run(*operands) if site.ready(*operands) else None


class Operand:
    """What waits, for a function of the user's that multiplies it and adds to it."""

    __slots__ = ("waits",)

    def __init__(self, waits: Waiting) -> None:
        self.waits = waits

    def __mul__(self, other: Any) -> Any:
        return _operand(_MODULATION.times(self.waits, other))

    def __rmul__(self, other: Any) -> Any:
        return _operand(_MODULATION.times(other, self.waits))

    def __add__(self, other: Any) -> Any:
        return _operand(_MODULATION.plus(self.waits, other))

    def __radd__(self, other: Any) -> Any:
        return _operand(_MODULATION.plus(other, self.waits))

    def __getattr__(self, name: str) -> Any:  # a question, such as ndim
        return _MODULATION.dtype_of(self.waits) if name == "dtype" else getattr(_MODULATION.like(self.waits), name)


def _operand(value: Any) -> Any:
    return Operand(value) if type(value) is Waiting else value


class Helper(Written):
    """A call of a user's function, ``modulate(h, shift, scale)``, that was read: it multiplies one argument, adds to
    it, and asks it for sizes.
    """

    def __init__(self, function: Any) -> None:
        self.function, self.code = function, function.__code__

    def __reduce__(self) -> Any:
        return type(self), (self.function,)

    def of(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, or its value for later."""
        is_known = function is self.function and function.__code__ is self.code
        if not is_known or torch.compiler.is_compiling():
            args, kwargs = tuple(map(_MODULATION.now, args)), {k: _MODULATION.now(v) for k, v in kwargs.items()}
            return function(*args, **kwargs)
        y = function(*map(_operand, args), **{k: _operand(v) for k, v in kwargs.items()})
        return y.waits if type(y) is Operand else y


def _of_rank(later: Waiting, other: Any) -> Any:
    """A parameter of fewer dims, ``[C, 1, 1]``, as broadcasting takes it; anything else as it is."""
    x = later.later.x
    return other[None] if isinstance(other, Tensor) and other.dim() == x.dim() - 1 else other


def _times(a: Any, b: Any) -> Waiting | None:
    """The product for later, of which one operand waits; None where it cannot wait."""
    later, other = (a, b) if type(a) is Waiting else (b, a)
    other = _of_rank(later, other)
    if later.is_plain and later.may_take(other):
        return Waiting(later.later, other)
    if later.is_plain and later.may_map(other):
        return Waiting(later.later, other, of_maps=True)
    # A compiler computes the small products with what reads them.
    if later.is_plain or torch.compiler.is_compiling() or not later.may_take(other):
        return None
    wide = other.to(torch.promote_types(other.dtype, torch.float32))
    factor = wide if later.factor is None else later.factor * wide
    return Waiting(later.later, factor, None if later.shift is None else later.shift * wide)


def _plus(a: Any, b: Any) -> Any:
    """The sum in one op, or for later, of which one operand waits; None where neither can be."""
    later, other = (a, b) if type(a) is Waiting else (b, a)
    if later.of_maps:
        if later.shift is None and later.may_map(other):
            return Waiting(later.later, later.factor, other, of_maps=True)
        return None
    if later.shift is None and later.may_take(shift := _of_rank(later, other)):
        return Waiting(later.later, later.factor, shift)
    if later.views or later.added is not None or isinstance(other, (Waiting, maps.Map)):
        return None
    x = later.later.x
    if type(other) is Tensor and other.shape == x.shape and other.dtype is x.dtype and other.device == x.device:
        return Waiting(later.later, later.factor, later.shift, added=other, is_second=later is not a)
    return later.later.plus(other, None) if later.is_plain else None


def _is_sequential(act: Any) -> bool:
    """A Sequential whose modules can be called one after the other."""
    if not isinstance(act, nn.Sequential) or not act._modules or is_hooked(act) or any_global_hooks():
        return False
    return runs_like_sequential(act) and runs_in_order(act) and isinstance(next(iter(act._modules.values())), nn.Module)


_MODULATION = Modulation()
