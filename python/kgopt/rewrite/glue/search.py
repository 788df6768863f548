"""The calls that a model makes between its norms: found by running it, measured, and replaced where kgopt is faster."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kgopt import accuracy
from kgopt._layout import format_of, is_dense_channels_last
from kgopt.rewrite.glue.calls import CATS, FUNCTIONS, INTERPOLATE, Call, recognize, upsampled_by
from kgopt.rewrite.glue.kernels import cat_of_views, nearest_of_views
from kgopt.rewrite.glue.later import Upsampled, finding
from kgopt.rewrite.glue.plans import GlueState, conv_forward
from kgopt.rewrite.measure import clocks, verdicts
from kgopt.rewrite.optimized import classes, known
from kgopt.rewrite.optimized.classes import Part
from kgopt.rewrite.optimized.wrapped import Wrapped
from kgopt.rewrite.pytorch import originals, watching
from kgopt.rewrite.pytorch.originals import CONV_MODULES
from kgopt.rewrite.pytorch.watching import OwnMode
from kgopt.rewrite.waiting.formats import keeps

_OPS = torch.ops.kgopt
SMALL = 2**20  # bytes, below which several launches cost more than they save
CHANNELS = 16  # of a pooling that say what its errors are


class _Replace(OwnMode):
    """Runs what was measured to be faster."""

    def __init__(self, state: GlueState, keeps: bool = False) -> None:
        super().__init__()
        self.state = state
        self.keeps = keeps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = originals.genuine(func), kwargs or {}
        if func in FUNCTIONS:
            call = recognize(func, args, kwargs)
            call = None if call is None else call.inside(self.keeps)
            option = "" if call is None else self.state.faster.get(call.key)
            if call is not None and option:
                return call.run(option)
        return func(*args, **kwargs)


class _Upsample(OwnMode):
    """In compiled code: upsampling and joins whose results keep channels_last.

    The compiler's own give contiguous tensors of three spatial dims, which the next convolution has converted.
    """

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is INTERPOLATE or func in CATS:
            call = recognize(func, args, kwargs)
            if call is not None and call.cast is None and is_dense_channels_last(call.x):
                if call.kind == "linear" and "linear" in self.kinds:
                    return _OPS.upsample_linear(call.x)
                if call.kind == "nearest" and "nearest" in self.kinds:
                    return nearest_of_views(call.x, call.argument)
                if call.kind == "cat" and call.x.dim() == 5 and "nearest" in self.kinds:
                    return cat_of_views((call.x, *call.more), call.argument[0])
        return func(*args, **kwargs)


class _Find(OwnMode):
    """Measures the calls that can be replaced, and whose they are."""

    def __init__(self, modules: dict[int, nn.Module], always: bool, unwanted: Callable[[nn.Module], str]) -> None:
        super().__init__()
        self.modules = modules
        self.always = always
        self.unwanted = unwanted
        self.found: dict[int, dict[Any, str]] = {}
        self.is_timing = False

    def pair(self, value: Upsampled, conv: Any) -> Tensor:
        """``conv(value)``: the two are measured each on its own, and then together."""
        y: Tensor = conv(value.value())
        call = (
            None
            if id(conv) not in self.modules or self.unwanted(value.module)
            else upsampled_by(value.x, value.factors, conv)
        )
        if call is None:
            return y
        call = call.inside(keeps(conv))
        found = self.found.setdefault(id(conv), {})
        if call.key not in found:
            state = GlueState(faster={key: how for calls in self.found.values() for key, how in calls.items()})

            def apart() -> Tensor:
                with _Replace(state, keeps(conv)):
                    return conv(value.compute())  # type: ignore[no-any-return]

            self.is_timing = True
            try:
                found[call.key] = call.options[0] if self.always else verdict(call, apart)
            finally:
                self.is_timing = False
        return y

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = originals.genuine(func), kwargs or {}
        if func in FUNCTIONS and not self.is_timing:
            call = recognize(func, args, kwargs)
            owner = None if call is None else innermost(self.modules)
            if call is not None and owner is not None:
                call = call.inside(keeps(self.modules[owner]))
                found = self.found.setdefault(owner, {})
                if call.key not in found:
                    original = functools.partial(func, *args, **kwargs)
                    found[call.key] = _first(call, original) if self.always else verdict(call, original)
                if call.keeps and found[call.key]:  # what comes next will be given this format
                    return call.run(found[call.key])
        return func(*args, **kwargs)


def innermost(modules: dict[int, nn.Module]) -> int | None:
    """Whose code calls a torch function: the id of the innermost of the modules, asked by a mode."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = id(frame.f_locals.get("self"))
        if owner in modules:
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def verdict(call: Call, original: Callable[[], Tensor]) -> str:
    """:func:`_fastest`, or what it said of an equal call."""
    x = call.x
    more = [None if t is None else t.detach() for t in call.more]
    key = verdicts.key_of("glue", x.device, call.kind, call.argument, call.keeps, x.detach(), more, call.options)
    option: str = verdicts.store.settle(key, lambda: _fastest(call, original))[0]
    return option


def _first(call: Call, original: Callable[[], Tensor]) -> str:
    """Whatever is faster: autocast has some functions give float32."""
    return call.options[0] if call.cast is None or original().dtype is call.run().dtype else ""


def _fastest(call: Call, original: Callable[[], Tensor]) -> str:
    """The option that keeps the GPU busy for the shortest time; "": PyTorch's, or a result too small to matter."""
    best, least = "", float("inf")
    for option in call.options:
        try:
            expected, actual = original(), call.run(option)
            if _is_small(call, expected):
                continue
            if expected.dtype is not actual.dtype or (expected.stride() != actual.stride() and not call.keeps):
                continue
            if not _is_right(call, option, expected, actual):
                continue
            before, after = clocks.busy_both(original, functools.partial(call.run, option), call.x.device)
        except (torch.OutOfMemoryError, RuntimeError):
            continue
        if after < min(before, least):
            best, least = option, after
    return best


def _is_small(call: Call, y: Tensor) -> bool:
    """Whether a call has little to do: what it writes tells, or what pooling reads."""
    moved = call.x if call.kind == "pooled" else y
    return call.kind != "upsampled" and moved.numel() * moved.element_size() < SMALL


def _is_right(call: Call, option: str, expected: Tensor, actual: Tensor) -> bool:
    """The same bits, or as accurate as PyTorch's."""
    if call.cast is not None:
        with torch.autocast(call.x.device.type, enabled=False):
            return _is_right(call.without_autocast(), option, expected, actual)
    theirs = call.by_torch
    if theirs is None:
        return torch.equal(expected, actual)
    if call.kind == "attention":
        return _is_right_attention(call, theirs, expected, actual)
    multiplies = call.kind in ("conv", "upsampled")
    if multiplies and torch.equal(expected, actual):
        return True
    # A corner says what the errors are: convolutions in float64 are slow.
    covered: tuple[Any, ...] = ()
    if call.kind == "conv":
        covered = call.more[0].shape[2:], call.argument[4]
    elif call.kind == "upsampled":
        covered = call.more[0].shape[2:], (1,) * (call.x.dim() - 2)
    # A window of a pooling is no smaller in a corner.
    part = call.x[:1, :CHANNELS].clone() if call.kind == "pooled" else corner(call.x, *covered)
    small = replace(call, x=part)
    double = [None if t is None else t.double() for t in call.more]
    with accuracy.no_autotuning():  # the corner's sizes come once
        yardstick, own = [theirs(part, *call.more)], small.run(option)
        exact = theirs(part.double(), *double)
        if multiplies and accuracy.may_take_tf32(part):
            rounded = accuracy.round_tf32(part).double(), accuracy.round_tf32(call.more[0]).double()
            yardstick.append(theirs(*rounded, double[1]))
    yardsticks = [accuracy.relative_error(y, exact) for y in yardstick]
    allowed = accuracy.allowed(part.dtype, *yardsticks)
    # The whole by the same yardstick: both results are that close to the exact one.
    is_close = accuracy.relative_error(actual, expected) <= 2 * allowed
    return is_close and accuracy.relative_error(own, exact) <= allowed


def _is_right_attention(call: Call, theirs: Callable[..., Tensor], expected: Tensor, actual: Tensor) -> bool:
    """Some queries of the first sample and head say what the errors are."""
    q, *kv = (t.narrow(0, 0, 1).narrow(1, 0, 1) for t in (call.x, *call.more))
    small = replace(call, x=q.narrow(2, 0, min(64, q.shape[2])), more=tuple(kv))
    tensors = small.x, *kv
    exact, yardstick = theirs(*map(Tensor.double, tensors)), [theirs(*tensors)]
    if q.dtype is torch.float32:  # where products may take TF32, an ideal one
        yardstick.append(theirs(*(accuracy.round_tf32(t).double() for t in tensors)))
    allowed = accuracy.allowed(q.dtype, *(accuracy.relative_error(y, exact) for y in yardstick))
    own = accuracy.relative_error(small.run(), exact)
    return own <= allowed and accuracy.relative_error(actual, expected) <= 2 * allowed


def corner(x: Tensor, kernel: Sequence[int] = (), dilation: Sequence[int] = ()) -> Tensor:
    """Of the first sample up to 24 positions of every dim, or as many as a kernel covers, in x's format."""
    covered = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)] or [0] * (x.dim() - 2)
    form = format_of(x)
    for dim, least in enumerate(covered, 2):
        x = x.narrow(dim, 0, min(max(24, least), x.shape[dim]))
    return x[:1].contiguous(memory_format=form)


def wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with the replaced calls in it, where nothing needs a gradient and nothing is traced."""

    @functools.wraps(forward)
    def glue_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            state = known.get(self, "glue")
            if state is None or not (state.enabled and state.kinds) or torch.is_grad_enabled():
                return forward(self, *args, **kwargs)
            if watching.wants_torch() or watching.is_foreign_mode():
                return forward(self, *args, **kwargs)
            with _Upsample(state.kinds):
                return forward(self, *args, **kwargs)
        if torch.is_grad_enabled() or watching.is_watched():
            return forward(self, *args, **kwargs)
        state = known.get(self, "glue")
        if state is None or not state.enabled or not state.faster or watching.is_foreign_mode():
            return forward(self, *args, **kwargs)
        return watching.outside_own_modes(_replacing, state, forward, self, *args, **kwargs)

    return glue_forward


def _replacing(state: GlueState, forward: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    return watching.inside(_Replace(state, keeps(module)), forward, module, *args, **kwargs)


def find(root: nn.Module, call: Callable[[], Any], unwanted: Callable[[str], str], always: bool = False) -> int:
    """Runs the model, measures what its modules call, and gives those a new forward. How many calls are faster."""
    names = {id(m): name for name, m in root.named_modules()}
    modules = {id(m): m for m in root.modules()}
    with _Find(
        modules, always, lambda module: unwanted(names.get(id(module), "")) if module is not None else ""
    ) as mode:
        finding.pair = mode.pair
        try:
            call()
        finally:
            finding.pair = None
    count = 0
    for owner, found in mode.found.items():
        module = modules[owner]
        if not any(found.values()) or unwanted(names[owner]) or "forward" in module.__dict__:
            continue
        state = _wrapped.add(module, GlueState)
        state.faster.update(found)
        state.settle()
        count += sum(map(bool, found.values()))
    return count


_wrapped: Wrapped[GlueState] = Wrapped("glue")
modules_of, state_of, forget = _wrapped.modules_of, _wrapped.state_of, _wrapped.forget
adopt, swap = _wrapped.adopt, _wrapped.swap


def _wrap(original: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    return conv_forward(forward) if original in CONV_MODULES else wrapped_forward(forward)


classes.add_part("glue", Part(wrap=_wrap, place=1, around_later=True))
