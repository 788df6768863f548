"""Sums of what a convolution or an upsampling gives and something else, in inference: one pass instead of three.

In ``x + self.conv(h)``, or ``h = self.conv(h)`` and later ``(x + h) / scale``, the front end for source code
(:mod:`~kgopt.rewrite.source`) has :meth:`Sum.begin` called in place of the module and :meth:`Sum.finish` in place of
the addition. ``begin`` may put the module off, where ``finish`` can then compute both at once; everywhere else the two
do what stands in the code. The front end proves that nobody sees the value in between and that nothing there changes
what the module reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kgopt import _ops as _ops
from kgopt.rewrite import classes, glue
from kgopt.rewrite.patterns import conv_of
from kgopt.rewrite.sites import any_global_hooks, is_hooked

_OPS = torch.ops.kgopt


class _Later:
    """A module's value that is not computed yet."""

    def __init__(self, call: glue.Call, value: Callable[[], Any]) -> None:
        self.call = call
        self.value = value  # what the module itself gives


class Sum:
    """One ``a + b``, perhaps ``/ c``, in a method."""

    def __repr__(self) -> str:
        return "Sum()"

    def __reduce__(self) -> Any:
        return Sum, ()

    def begin(self, module: Any, x: Any, owner: Any = None, *between: str) -> Any:
        """``module(x)``, or its value for later. ``between``: children of ``owner`` called before :meth:`finish`."""
        if isinstance(module, nn.Module) and _may_wait(module) and type(x) is Tensor:
            if conv_of(module) is not None:
                later = _conv_later(module, x)
            else:
                later = _upsampling_later(module, x) if isinstance(module, nn.Sequential) else None
            if later is not None and all(_changes_nothing(getattr(owner, name, None)) for name in between):
                return later
        return module(x)

    def finish(self, a: Any, b: Any, divisor: Any = None) -> Any:
        """``a + b``, or ``(a + b) / divisor``."""
        if isinstance(a, _Later) or isinstance(b, _Later):
            later, other = (a, b) if isinstance(a, _Later) else (b, a)
            y = _at_once(later, other, divisor)
            if y is not None:
                return y
            a, b = (t.value() if isinstance(t, _Later) else t for t in (a, b))
        y = a + b
        # x / 1 has the values of x; a sum of two tensors is nobody else's.
        if divisor is None or (_is_one(divisor) and _are_floats(a, b)):
            return y
        return y / divisor


def _changes_nothing(module: Any) -> bool:
    """A convolution that nobody watches; where there is none, nothing is called."""
    return module is None or (conv_of(module) is not None and not is_hooked(module))


def _is_one(divisor: Any) -> bool:
    return type(divisor) in (int, float) and divisor == 1


def _are_floats(*tensors: Any) -> bool:
    return all(type(t) is Tensor and t.is_floating_point() for t in tensors)


def _may_wait(module: nn.Module) -> bool:
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return not (is_hooked(module) or any_global_hooks() or glue.is_watched())


def _verdict(module: Any, call: glue.Call | None) -> str:
    """What was measured to be faster for this call of the module."""
    state = module.__dict__.get("_kgopt_glue")
    return "" if call is None or state is None or not state.enabled else state.faster.get(call.key, "")


def _conv_later(conv: Any, x: Tensor) -> _Later | None:
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str) or (conv.transposed and x.dim() == 3):
        return None
    function = glue.CONV_FUNCTIONS[str(conv_of(conv))]
    shared = (x, conv.weight, conv.bias, conv.stride, conv.padding)
    tail = (conv.output_padding, conv.groups, conv.dilation) if conv.transposed else (conv.dilation, conv.groups)
    call = glue.recognize(function, (*shared, *tail), {})
    return _Later(call, lambda: conv(x)) if call is not None and _verdict(conv, call) == "bias" else None


def _upsampling_later(whole: nn.Sequential, x: Tensor) -> _Later | None:
    """A Sequential, perhaps of Sequentials, that ends in nn.Upsample: all but that is computed now."""
    path: list[Any] = [whole]
    while isinstance(path[-1], nn.Sequential):
        inside = path[-1]
        if not classes.runs_like_sequential(inside) or is_hooked(inside) or "_kgopt_steps" in inside.__dict__:
            return None
        if not inside._modules:
            return None
        path.append(next(reversed(inside._modules.values())))
    last = path[-1]
    if (classes.original_class(last) or type(last)) is not nn.Upsample or is_hooked(last):
        return None
    state = last.__dict__.get("_kgopt_glue")
    if state is None or not state.enabled or not any(state.faster.values()):
        return None  # before anything is computed twice
    for inside in path[:-1]:
        for module in list(inside._modules.values())[:-1]:
            x = module(x)
    arguments = {"size": last.size, "scale_factor": last.scale_factor, "mode": last.mode}
    arguments |= {"align_corners": last.align_corners, "recompute_scale_factor": last.recompute_scale_factor}
    call = glue.recognize(F.interpolate, (x,), arguments) if type(x) is Tensor else None
    if call is None or call.kind != "linear" or not _verdict(last, call):
        return _Done(last(x))
    return _Later(call, lambda: last(x))


class _Done(_Later):
    """A value after all."""

    def __init__(self, y: Any) -> None:
        self.call = None  # type: ignore[assignment]
        self.value = lambda: y


def _at_once(later: _Later, other: Any, divisor: Any) -> Tensor | None:
    """The sum in one op; None where it takes PyTorch's rules of shapes, dtypes and layouts."""
    call = later.call
    if call is None or type(other) is not Tensor or (divisor is not None and type(divisor) not in (int, float)):
        return None
    if other.dtype is not call.x.dtype or other.device != call.x.device or list(other.shape) != call.sizes:
        return None
    if other.dim() < 4 or not glue.lies_as(other, call.x) or divisor == 0:
        return None
    if call.kind == "linear":
        if divisor is not None and not _is_one(divisor):
            return None
        return _OPS.upsample_linear(call.x, other)  # type: ignore[no-any-return]
    return call.convolve_and_add(other, 1.0 if divisor is None else float(divisor))
