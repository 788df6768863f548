"""``F.group_norm`` and ``F.instance_norm`` in a user's code: kgopt's op, where that was measured to be the faster one.

The front end for source code (:mod:`~kgopt.rewrite.source`) has :meth:`NormCall.run` called in their place, with the
function that the code looked up and its arguments; where an activation of the result is all that is read of it,
:meth:`NormCall.run_then`; where products or sums follow, :meth:`NormCall.wait` or :meth:`NormCall.begin`, whose value
waits for them as that of a module does. In compiled code the function itself is called:
``torch.compile(backend="kgopt")`` sees functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt.rewrite.chains.chain import Chain
from kgopt.rewrite.chains.emit import NormArgs, call_now
from kgopt.rewrite.measure import policy
from kgopt.rewrite.norms.arguments import fits, is_plain
from kgopt.rewrite.norms.sites import Site
from kgopt.rewrite.optimized import known
from kgopt.rewrite.pytorch import originals, watching
from kgopt.rewrite.waiting.sums import Later, LaterNorm, Waiting, adds_as_is, all_change_nothing
from kgopt.torch_private import len_torch_function_stack

_Bound = tuple[Tensor, NormArgs]


def _of_group_norm(input: Any, num_groups: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5) -> _Bound | None:
    return _bound(input, num_groups, weight, bias, eps)


def _of_instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: Any = True,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> _Bound | None:
    if running_mean is not None or running_var is not None or use_input_stats is not True:
        return None
    if not isinstance(input, Tensor) or input.dim() not in (4, 5):
        return None
    return _bound(input, input.shape[1], weight, bias, eps)


def _bound(x: Any, groups: Any, weight: Any, bias: Any, eps: Any) -> _Bound | None:
    """What the op is given; None where PyTorch's function must see it, or refuse it."""
    if not is_plain(x) or x.dim() < 2 or type(groups) is not int or groups < 1 or type(eps) not in (float, int):
        return None
    channels = x.shape[1]
    if channels % groups or x.numel() in (0, groups * x.shape[0]):  # one value a group: PyTorch refuses some of these
        return None
    for p in (weight, bias):
        if p is not None and not (fits(p, x) and p.dim() == 1 and p.numel() == channels):
            return None
    return x, NormArgs(groups, weight, bias, float(eps))


NORM_CALLS: dict[Callable[..., Any], tuple[str, str, Callable[..., _Bound | None]]] = {
    F.group_norm: ("group", "group_norm", _of_group_norm),
    F.instance_norm: ("instance", "instance_norm", _of_instance_norm),
}


class LaterCall(LaterNorm):
    """Such a call that waits; its module is the one whose code it stands in."""

    __slots__ = ("call",)

    def __init__(self, site: Site, owner: Any, x: Tensor, norm: NormArgs, call: Callable[[], Any]) -> None:
        super().__init__(owner, x, site, norm)
        self.call = call

    def value(self) -> Any:
        """What the function gives."""
        return self.call()


class NormCall:
    """One such call in a method.

    ``act``: the activation of its result, as ops name it; ``role``: what :class:`~kgopt.rewrite.norms.sites.Site` knows
    that by, a name or a function; ``rest``: the arguments of its call after the tensor.
    """

    def __init__(
        self, function: Callable[..., Any], act: str = "none", role: Any = None, rest: tuple[Any, Any] = ((), {})
    ) -> None:
        norm, name, self.bind = NORM_CALLS[function]
        self.function, self.role, self.rest = function, role, rest
        self.site = Site(Chain(norm, post=act), ("norm",) if role is None else ("norm", role))
        self.is_untouched = originals.untouched(*originals.functional(name))

    def __repr__(self) -> str:
        return f"NormCall({self.site.chain.label})"

    def __reduce__(self) -> Any:
        return NormCall, (self.function, self.site.chain.post, self.role, self.rest)

    def run(self, owner: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, which stands in a method of the module ``owner``."""
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        y = watching.outside_own_modes(self._run, owner, None, function, args, kwargs)
        return function(*args, **kwargs) if y is None else y

    def run_then(self, owner: Any, act: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """``act(function(*args, **kwargs))``, which stands there."""
        more, named = self.rest
        if torch.compiler.is_compiling():
            return act(function(*args, **kwargs), *more, **named)
        y = watching.outside_own_modes(self._run, owner, act, function, args, kwargs)
        return act(function(*args, **kwargs), *more, **named) if y is None else y

    def begin(self, owner: Any, function: Any, args: Any, kwargs: Any, beside: Any = None, *between: str) -> Any:
        """``function(*args, **kwargs)``, or its value for later. ``between``: children of the module that are called
        while it waits.
        """
        later = None
        if not torch.compiler.is_compiling() and all_change_nothing(beside, between):
            later = watching.outside_own_modes(self._later, owner, function, args, kwargs)
        return self.run(owner, function, *args, **kwargs) if later is None else later

    def wait(self, owner: Any, function: Any, args: Any, kwargs: Any, beside: Any = None, *between: str) -> Any:
        """The same for products and sums of tensors of one value a sample and channel."""
        value = self.begin(owner, function, args, kwargs, beside, *between)
        return Waiting(value) if type(value) is LaterCall else value

    def now(self, value: Any) -> Any:
        """What :meth:`begin` gave, as a tensor."""
        return value.value() if isinstance(value, Later) else value

    def _later(self, owner: Any, function: Any, args: Any, kwargs: Any) -> LaterCall | None:
        if watching.is_watched() or not adds_as_is():
            return None
        chosen = self._chosen(owner, None, function, args, kwargs)
        if chosen is None:
            return None
        x, norm, _ = chosen
        return LaterCall(self.site, owner, x, norm, lambda: self.run(owner, function, *args, **kwargs))

    def _run(self, owner: Any, act: Any, function: Any, args: Any, kwargs: Any) -> Tensor | None:
        """By the op; None where PyTorch's code runs."""
        chosen = self._chosen(owner, act, function, args, kwargs)
        if chosen is None:
            return None
        x, norm, cast = chosen
        if not watching.is_watched():
            if not x.is_contiguous() and torch.is_grad_enabled():
                x = self.site.kept(owner, norm, x)
            return self.site.run_now(x, owner, norm, cast)
        return self.site.run_watched(x, owner, norm, cast is not None and self.site.keeps_dtype)

    def _chosen(
        self, owner: Any, act: Any, function: Any, args: Any, kwargs: Any
    ) -> tuple[Tensor, NormArgs, torch.dtype | None] | None:
        """What the op is given, where the verdict says so, and autocast's dtype."""
        bound = self._bind(act, function, args, kwargs)
        found: known.Known | None = None if bound is None else known.known_of(owner)
        if bound is None or found is None or found.calls is None or not found.calls.enabled:
            return None
        x, norm = bound
        cast = watching.autocast_of(x)
        # Calls of one module may differ in their groups.
        name = f"{self.site.key} {norm.num_groups}"
        checks = self._bind, (act, function, args, kwargs)
        ours = policy.choose(found.calls, name, found.keeps, self.site.chain, x, None, norm, cast, checks, call_now)
        return (x, norm, cast) if ours else None

    def _bind(self, act: Any, function: Any, args: Any, kwargs: Any) -> _Bound | None:
        """The op's arguments, where nobody looks on and the functions are PyTorch's own."""
        if act is not None and (watching.any_global_hooks() or not self.site.holds((None, act), None, None)):
            return None
        if function is not self.function or not self.is_untouched() or watching.wants_torch():
            return None
        if len_torch_function_stack() and watching.is_foreign_mode():
            return None
        try:
            return self.bind(*args, **kwargs)
        except TypeError:  # arguments that the function does not have: it says so itself
            return None
