"""Sums of what a norm, a convolution or an upsampling gives and something else: one pass instead of three.

In ``x + self.conv(h)``, or ``h = self.conv(h)`` and later ``(x + h) / scale`` or ``h += x``, the front end for source
code (:mod:`~kgopt.rewrite.source`) has :meth:`Sum.begin` called in place of the module and :meth:`Sum.finish` in place
of the addition. ``begin`` may put the module off, where ``finish`` can then compute both at once, for norms with the
activation behind the sum; everywhere else the two do what stands in the code. Convolutions and upsamplings wait in
inference alone. The front end proves that nobody sees the value in between and that nothing there
changes what the module reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kgopt import ops as ops
from kgopt.rewrite.chains.chain import PRELU, WRITTEN, takes_another
from kgopt.rewrite.chains.emit import NormArgs
from kgopt.rewrite.chains.meanings import activation_of, conv_of, untouched, with_number
from kgopt.rewrite.chains.modules import (
    gives_later,
    guard_methods,
    is_as_is,
    only_convolves,
    passed_on,
    runs_like_sequential,
)
from kgopt.rewrite.chains.roles import kind_of
from kgopt.rewrite.glue import plans
from kgopt.rewrite.glue.calls import INTERPOLATE, recognize
from kgopt.rewrite.glue.kernels import lies_as
from kgopt.rewrite.glue.later import Upsampled
from kgopt.rewrite.norms.sites import Site
from kgopt.rewrite.norms.torch_norms import ALONE
from kgopt.rewrite.optimized import known
from kgopt.rewrite.optimized.disguise import original_class
from kgopt.rewrite.pytorch import originals, watching
from kgopt.rewrite.pytorch.watching import any_global_hooks, is_hooked
from kgopt.rewrite.waiting.base import Written
from kgopt.rewrite.waiting.formats import keeps
from kgopt.rewrite.waiting.maps import Map, now


class Later:
    """A module's value that is not computed yet."""

    __slots__ = ("module", "plan", "x")

    def __init__(self, module: Any, x: Any, plan: plans.ConvPlan | None = None) -> None:
        self.module = module
        self.x = x
        self.plan = plan  # of a convolution; None: nn.Upsample

    def value(self) -> Any:
        """What the module itself gives."""
        return plans.through(self.module, self.x)

    def _kind(self) -> tuple[Tensor, list[int], torch.dtype]:
        """The tensor that is read; the result's sizes and dtype."""
        x, plan = self.x, self.plan
        x = x.x if type(x) in (Upsampled, plans.Repeated) else x
        x = x.operands[-1] if type(x) is plans.Normalized else x
        sizes = plan.sizes if plan is not None else [*x.shape[:2], *(2 * s for s in x.shape[2:])]
        return x, sizes, x.dtype if plan is None or plan.cast is None else plan.cast

    def like(self) -> Tensor:
        """A tensor of its sizes, dtype and device that has no elements of its own."""
        x, sizes, dtype = self._kind()
        return x.new_empty((), dtype=dtype).expand(sizes)

    def plus(self, other: Any, divisor: Any, act: str = "none", prelu: Any = None) -> Tensor | None:
        """The sum and the activation behind it in one op; None where no op does that, or PyTorch's rules of shapes,
        dtypes and layouts have something to do.
        """
        (x, sizes, dtype), plan = self._kind(), self.plan
        if type(other) is not Tensor or other.dtype is not dtype or other.device != x.device:
            return None
        if list(other.shape) != sizes or not lies_as(other, x):
            return None
        if plan is None:
            is_sum = act == "none" and (divisor is None or _is_one(divisor))
            return _upsample_linear(x, other) if is_sum else None
        if prelu is not None or not plan.takes(act):
            return None
        if divisor is None:
            return plans.run_plan(self.module, self.x, plan, other, act=act)
        if not _is_number(divisor) or divisor == 0:
            return None
        return plans.run_plan(self.module, self.x, plan, other, float(divisor), act)


def _upsample_linear(x: Tensor, residual: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        x, residual = plans.as_seen(x), plans.as_seen(residual)
    return torch.ops.kgopt.upsample_linear(x, residual)  # type: ignore[no-any-return]


class LaterNorm(Later):
    """A norm that waits, with the activation that is known to follow."""

    __slots__ = ("begun", "site")

    def __init__(self, norm: Any, x: Any, site: Site, begun: NormArgs | bool) -> None:
        self.module, self.x, self.plan = norm, x, None
        self.site, self.begun = site, begun

    def _kind(self) -> tuple[Tensor, list[int], torch.dtype]:
        return self.x, list(self.x.shape), self.site.dtype_of(self.module, self.x)

    def plus(self, other: Any, divisor: Any, act: str = "none", prelu: Any = None) -> Tensor | None:
        """Also the sum of one value a sample and channel."""
        if divisor is not None and not _is_one(divisor):
            number = float(divisor) if isinstance(divisor, float) else divisor  # NumPy's are other ones to the ops
            scaled = with_number("truediv", number)
            if scaled is None or not takes_another([scaled], act):
                return None
            act = scaled if act == "none" else f"{scaled}+{act}"
        y = self.site.run_added(self.module, self.x, other, act, prelu, self.begun)
        if y is None and self.site.may_modulate(self.module, self.x, other):
            # One value a sample and channel.
            y = self.site.run_modulated(self.module, self.x, None, other, act, prelu, self.begun)
        return y


class Waiting:
    """A norm's value that is not computed yet, times ``factor``, plus ``shift``, where these are not None.

    ``of_maps``: they have a value for each position, or a map of it; without a shift that is no op's. Otherwise plus
    ``added``, a tensor like the norm's input; ``is_second``: the code has that one first, whose memory format the sum
    takes where the two lie apart. ``views`` are then taken of it, one of the other.
    """

    __slots__ = ("added", "factor", "is_second", "later", "of_maps", "shift", "views")

    def __init__(
        self,
        later: LaterNorm,
        factor: Any = None,
        shift: Any = None,
        of_maps: bool = False,
        views: tuple[Callable[[Any], Any], ...] = (),
        added: Any = None,
        is_second: bool = False,
    ) -> None:
        self.later = later
        self.added = added
        self.is_second = is_second
        self.factor = factor
        self.shift = shift
        self.of_maps = of_maps
        self.views = views

    @property
    def is_plain(self) -> bool:
        """Whether it is the norm's own value."""
        return self.factor is None and self.shift is None and self.added is None and not self.views

    def without_views(self) -> Waiting:
        """What the views are taken of."""
        return Waiting(self.later, self.factor, self.shift, self.of_maps, (), self.added, self.is_second)

    def viewed(self, view: Callable[[Any], Any]) -> Waiting:
        """A view of it."""
        views = (*self.views, view)
        return Waiting(self.later, self.factor, self.shift, self.of_maps, views, self.added, self.is_second)

    def through_views(self, y: Any) -> Any:
        """The views of a tensor."""
        for view in self.views:
            y = view(y)
        return y

    def value(self) -> Any:
        """The tensor."""
        if self.views:
            return self.through_views(self.without_views().value())
        if self.is_plain:
            return self.later.value()
        y = self.with_act("none")
        if y is not None:
            return y
        if self.added is not None:
            y = Waiting(self.later, self.factor, self.shift).value()
            return self.added + y if self.is_second else y + self.added
        assert self.of_maps
        y = self.later.value() * now(self.factor)
        return y if self.shift is None else y + now(self.shift)

    def with_act(self, act: str, prelu: Any = None) -> Tensor | None:
        """With an activation, in one op; None where that has rules of its own."""
        later = self.later
        if self.added is not None and not self.factor is self.shift is None:
            more = self.factor, self.shift, act, later.begun
            return None if prelu is not None else later.site.run_scaled_sum(later.module, later.x, self.added, *more)
        if self.added is not None:
            return later.plus(self.added, None, act, prelu)
        if self.of_maps:
            if self.shift is None or prelu is not None:
                return None
            return later.site.run_maps(later.module, later.x, self.factor, self.shift, act, later.begun)
        return later.site.run_modulated(later.module, later.x, self.factor, self.shift, act, prelu, later.begun)

    def may_take(self, operand: Any) -> bool:
        """Whether the op can multiply with, or add, an operand."""
        if self.of_maps or self.views or self.added is not None or type(operand) is Map:
            return False
        return self.later.site.may_modulate(self.later.module, self.later.x, operand)

    def may_map(self, operand: Any) -> bool:
        """The same of an operand with a value for each position."""
        return (
            not self.views and self.added is None and self.later.site.may_map(self.later.module, self.later.x, operand)
        )


def given_later(
    module: Any,
    args: tuple[Any, ...],
    owner: Any = None,
    *between: str,
    with_more: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """What a module gives whose forward ends in a norm, or a convolution: that one's value for later, or a tensor; None
    of any other.

    ``between``: children of ``owner`` that are called while it waits. ``with_more``: of a forward that returns a tuple,
    that tuple.
    """
    if not gives_later(module, with_more) or not adds_as_is() or not all_change_nothing(owner, between):
        return None
    if not torch.compiler.is_compiling() and watching.is_watched():
        return None
    return type(module)._kgopt_later(module, *args, **(kwargs or {}))  # type: ignore[attr-defined]


def conv_later(conv: Any, x: Any) -> Later | None:
    """What a convolution makes of x, for later, where kgopt adds its bias or computes it."""
    may_wait = isinstance(conv, nn.Module) and known.get(conv, "glue") is not None and conv_of(conv) is not None
    plan = plans.plan_of(conv, x) if may_wait and _may_wait(conv) and is_as_is(conv) else None
    return Later(conv, x, plan) if plan is not None and plan.adds else None


def _norm_later(norm: Any, x: Any, kind: str) -> Any:
    """A norm of ours, later where it may wait and is the faster one here; else what it gives."""
    site = ALONE[kind]
    begun = site.begin(norm, x) if adds_as_is() else False
    return LaterNorm(norm, x, site, begun) if begun else norm(x)


class Behind(Written):
    """An activation behind something in a method: the function that it is, or a tensor's method by its name, and its
    name for the ops.
    """

    def __init__(self, function: Any = None, act: str = "") -> None:
        self.function, self.act = function, act
        if isinstance(function, str):
            self.is_untouched = originals.untouched(*originals.methods((function,)))
        else:
            self.is_untouched = originals.untouched() if function is None else untouched(function)

    def __reduce__(self) -> Any:
        return type(self), (self.function, self.act)

    def name_of(self, act: Any, function: Any) -> str | None:
        """What the ops call it now; None where it must run by itself. ``act`` is a module, or calls ``function``."""
        if not isinstance(act, nn.Module):
            is_it = function is not None and (function is self.function or isinstance(function, str))
            return self.act if is_it and self.is_untouched() else None
        if torch.compiler.is_compiling():
            guard_methods(act)
        return activation_of(act) if is_as_is(act) else None


class Activated(Behind):
    """One ``act(conv(x))`` in a method."""

    def run(self, act: Any, conv: Any, x: Any, function: Any = None) -> Any:
        """``act(conv(x))``, as one op where the convolution's has room for both."""
        if isinstance(conv, nn.Module) and known.get(conv, "glue") is not None:
            name = self.name_of(act, function)
            y = None if name is None else plans.with_named(conv, name, x)
            if y is not None:
                return y
        return act(conv(x))


class Sum(Behind):
    """One ``a + b``, perhaps ``/ c``, in a method, and the activation behind it."""

    waits = Later

    def begin(self, module: Any, x: Any, owner: Any = None, *between: str) -> Any:
        """``module(x)``, or its value for later. ``between``: children of ``owner`` called before :meth:`finish`."""
        if type(x) is Upsampled and conv_of(module) is None:
            x = x.value()
        if (kind := kind_of(type(module))) is not None:
            return _norm_later(module, x, kind) if all_change_nothing(owner, between) else module(x)
        if conv_of(module) is not None:
            later = conv_later(module, x)
            if later is not None and all_change_nothing(owner, between):
                return later
        elif isinstance(module, nn.Module) and not is_hooked(module) and not any_global_hooks():
            channel = known.get(module, "channel")
            if channel is not None and channel.kind == WRITTEN and all_change_nothing(owner, between):
                return _norm_later(module, x, WRITTEN)
            given = given_later(module, (x,), owner, *between)
            if given is not None:
                return given if type(given) is not Waiting else given.later if given.is_plain else given.value()
            inside = passed_on(module)
            kind = None if inside is module else kind_of(type(inside))
            if kind is not None and all_change_nothing(owner, between):
                return _norm_later(inside, x, kind)
            if isinstance(inside, nn.Sequential) and not is_hooked(inside) and all_change_nothing(owner, between):
                return _last_later(inside, x)
        return plans.through(module, x)

    def like(self, value: Any) -> Any:
        """A tensor that has the sizes and the device of what waits."""
        return value.like() if isinstance(value, Later) else value

    def dtype_of(self, value: Any) -> Any:
        """``value.dtype``."""
        return self.like(value).dtype

    def finish(self, a: Any, b: Any) -> Any:
        """``a + b``."""
        if isinstance(a, Later) or isinstance(b, Later):
            later, other = (a, b) if isinstance(a, Later) else (b, a)
            y = later.plus(other, None)
            if y is not None:
                return y
            a, b = self.now(a), self.now(b)
        return a + b

    def finish_over(self, a: Any, b: Any, divisor: Any) -> Any:
        """``(a + b) / divisor``."""
        y = self._scaled(a, b, divisor)
        if y is not None:
            return y
        y = self.finish(a, b)
        # y / 1 has the values of y; a sum is nobody else's.
        return y if _is_one(divisor) and type(y) is Tensor and y.is_floating_point() else y / divisor

    def finish_over_then(self, act: Any, a: Any, b: Any, divisor: Any, function: Any = None) -> Any:
        """``act((a + b) / divisor)``."""
        name = self.name_of(act, function)
        y = None if name is None else self._scaled(a, b, divisor, name, act)
        return act(self.finish_over(a, b, divisor)) if y is None else y

    def finish_times(self, a: Any, b: Any, factor: Any, is_left: bool) -> Any:
        """``(a + b) * factor``; ``is_left``: ``factor * (a + b)``."""
        y = self._scaled(a, b, 1 / factor) if _is_number(factor) and factor else None
        if y is not None:
            return y
        total = self.finish(a, b)
        return factor * total if is_left else total * factor

    def finish_times_then(self, act: Any, a: Any, b: Any, factor: Any, is_left: bool, function: Any = None) -> Any:
        """``act((a + b) * factor)``, or ``act(factor * (a + b))``."""
        name = self.name_of(act, function) if _is_number(factor) and factor else None
        y = None if name is None else self._scaled(a, b, 1 / factor, name, act)
        return act(self.finish_times(a, b, factor, is_left)) if y is None else y

    def _scaled(self, a: Any, b: Any, divisor: Any, name: str = "none", act: Any = None) -> Tensor | None:
        """``act((a + b) / divisor)`` in one op; None where nothing waits, or no op does that."""
        later, other = (a, b) if isinstance(a, Later) else (b, a)
        if not isinstance(later, Later) or isinstance(other, Later) or not _is_number(divisor):
            return None
        return later.plus(other, divisor, name, act if name == PRELU else None)

    def finish_by(self, add: Any, a: Any, b: Any) -> Any:
        """``add(a, b)``: ``torch.add``, or the name of a tensor's method, ``add`` or ``add_``."""
        y = self._by(add, a, b, "none")
        if y is None:
            a, b = (t.value() if isinstance(t, Later) else t for t in (a, b))
            y = getattr(a, add)(b) if isinstance(add, str) else add(a, b)
        return y

    def finish_by_then(self, act: Any, add: Any, a: Any, b: Any, function: Any = None) -> Any:
        """``act(add(a, b))``."""
        name = self.name_of(act, function)
        y = None if name is None else self._by(add, a, b, name, act if name == PRELU else None)
        return act(self.finish_by(add, a, b)) if y is None else y

    def _by(self, add: Any, a: Any, b: Any, act: str, prelu: Any = None) -> Tensor | None:
        if not (isinstance(add, str) or add is torch.add) or not _adds_by_name():
            return None
        later, other = (a, b) if isinstance(a, Later) else (b, a)
        if not isinstance(later, Later) or isinstance(other, Later) or (add == "add_" and later is not a):
            return None
        return later.plus(other, None, act, prelu)

    def finish_then(self, act: Any, a: Any, b: Any, function: Any = None) -> Any:
        """``act(a + b)``. ``act`` is a module, or calls ``function``."""
        y = self._fused(act, a, b, function)
        return act(self.finish(a, b)) if y is None else y

    def finish_in_place_then(self, act: Any, a: Any, b: Any, function: Any = None) -> Any:
        """``a += b``, then ``act(a)``, where a is what :meth:`begin` gave."""
        y = self._fused(act, a, b, function)
        return act(self.finish_in_place(a, b)) if y is None else y

    def _fused(self, act: Any, a: Any, b: Any, function: Any) -> Tensor | None:
        later, other = (a, b) if isinstance(a, Later) else (b, a)
        if not isinstance(later, Later) or isinstance(other, Later):
            return None
        name = self.name_of(act, function)
        return None if name is None else later.plus(other, None, name, act if name == PRELU else None)

    def finish_in_place(self, a: Any, b: Any) -> Any:
        """``a += b``, where a is what :meth:`begin` gave."""
        if isinstance(a, Later):
            y = a.plus(b, None)
            if y is not None:
                return y
            a = a.value()
        a += b
        return a


def all_change_nothing(owner: Any, names: tuple[str, ...]) -> bool:
    """Whether children of ``owner`` may be called while something waits: they write nowhere, and nobody looks on."""
    return not names or all(_changes_nothing(getattr(owner, name, None)) for name in names)


_WRITES_NOTHING = (nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool2d, nn.MaxPool3d, nn.Identity, nn.Linear, nn.Embedding)


def _changes_nothing(module: Any) -> bool:
    """A convolution, perhaps padded, a norm of ours, a pooling, a linear layer, an activation that is not inplace, or
    Sequentials of such; where there is none, nothing is called.
    """
    if module is None or (conv_of(module) is not None and is_as_is(module)):
        return True
    if kind_of(type(module)) is not None or type(module) in _WRITES_NOTHING:
        return not is_hooked(module)
    if not isinstance(module, nn.Module):
        return False
    if only_convolves(module):
        return True
    if activation_of(module) is not None:
        return is_as_is(module) and not getattr(module, "inplace", False)
    module = passed_on(module)
    if not isinstance(module, nn.Sequential) or not runs_like_sequential(module) or is_hooked(module):
        return False
    return all(map(_changes_nothing, module._modules.values()))


def _is_number(value: Any) -> bool:
    """One of Python's, or NumPy's float64, which is one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_one(divisor: Any) -> bool:
    return _is_number(divisor) and bool(divisor == 1)


adds_as_is = originals.untouched(*originals.methods(("__add__", "__iadd__", "__truediv__", "__mul__", "__rmul__")))
_adds_by_name = originals.untouched((torch, "add"), *originals.methods(("add", "add_")))


def _may_wait(module: nn.Module) -> bool:
    if torch.is_grad_enabled() or is_hooked(module) or any_global_hooks() or not adds_as_is():
        return False
    if watching.is_foreign_mode():
        return False
    return not watching.wants_torch() if torch.compiler.is_compiling() else not watching.is_watched()


def _before_last(path: list[Any], x: Any) -> Any:
    """What the last module of nested Sequentials is given. Nearest upsampling waits for a convolution."""
    for inside in path:
        steps = known.get(inside, "steps")
        if steps is not None and steps.hold(inside):
            x = steps.but_last(inside, x)
            continue
        for module, following in itertools.pairwise(inside._modules.values()):
            x = plans.before(module, following, x)
    return x


def runs_in_order(sequential: Any) -> bool:
    """Whether its children are called one after the other, whatever upsampling waits for."""
    steps = known.get(sequential, "steps")
    return steps is None or steps.is_plain


def _last_later(whole: nn.Sequential, x: Any) -> Any:
    """A Sequential, perhaps of Sequentials, that ends in a norm, a convolution or nn.Upsample: all but that is computed
    now.
    """
    path: list[Any] = []
    last: Any = whole
    while isinstance(last, nn.Sequential):
        if not runs_like_sequential(last) or is_hooked(last) or not last._modules:
            return whole(x)
        path.append(last)
        in_order = runs_in_order(last)
        last = next(reversed(last._modules.values())) if in_order else known.get(last, "steps").last_of(last)
    kind = kind_of(type(last))
    if kind is not None:
        return _norm_later(last, _before_last(path, x), kind)
    if not _may_wait(whole):
        return whole(x)
    state = known.get(last, "glue") if isinstance(last, nn.Module) else None
    is_conv = conv_of(last) is not None
    if state is None or not (is_conv or original_class(last) is nn.Upsample) or is_hooked(last):
        return whole(x)
    if not (is_as_is(last) if is_conv else originals.AS_CALLED[nn.Upsample]()):
        return whole(x)
    x = _before_last(path, x)
    if type(x) is plans.Normalized and not is_conv:
        return last(x)
    if is_conv:
        plan = plans.plan_of(last, x)
        return plans.through(last, x) if plan is None or not plan.adds else Later(last, x, plan)
    arguments = {"size": last.size, "scale_factor": last.scale_factor, "mode": last.mode}
    arguments |= {"align_corners": last.align_corners, "recompute_scale_factor": last.recompute_scale_factor}
    call = recognize(INTERPOLATE, (x,), arguments)
    if call is None or call.kind != "linear" or call.cast is not None or not state.enabled:
        return last(x)
    if torch.compiler.is_compiling():
        return Later(last, x) if "linear" in state.kinds and not x.is_contiguous() else last(x)
    if not state.faster.get(call.inside(keeps(last)).key):
        return last(x)
    return Later(last, x)
