"""Nearest upsampling that waits for the convolution behind it, which may read the small tensor instead.

A front end that has seen a value go from an upsampling to a convolution calls :func:`postponed` in place of the first
and :func:`~kgopt.rewrite.glue.plans.through` in place of the second. What is in between is no tensor, and nobody sees
it: the front end proves that, or asks for the value itself. Where no op computes both, each runs as it stands.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite.chains.modules import has_own_methods, is_upsampler
from kgopt.rewrite.glue.calls import INTERPOLATE, interpolate_of
from kgopt.rewrite.pytorch import originals, watching
from kgopt.rewrite.pytorch.watching import any_global_hooks, is_hooked
from kgopt.rewrite.waiting.base import Unmade

_interpolates_as_is = originals.untouched(*originals.of_function(INTERPOLATE))


class Upsampled(Unmade):
    """What nearest upsampling makes of x, for later."""

    __slots__ = ("factors", "module", "x")

    def __init__(self, x: Tensor, factors: tuple[int, ...], compute: Callable[[], Tensor], module: Any = None) -> None:
        super().__init__(compute)
        self.x = x
        self.factors = factors
        self.module = module  # that the code calls; None: F.interpolate


def _is_plain(x: Any) -> bool:
    if (
        not (type(x) is Tensor or (torch.compiler.is_compiling() and isinstance(x, Tensor)))
        or not x.is_floating_point()
        or x.layout is not torch.strided
        or x.dim() not in (4, 5)
    ):
        return False
    return x.numel() > 0 and not torch.is_autocast_enabled(x.device.type)


def _looks_on() -> bool:
    return watching.wants_torch() if torch.compiler.is_compiling() else watching.is_watched()


def postponed(function: Any, *args: Any, **kwargs: Any) -> Any:
    """``function(...)``, or, of an upsampling by integer factors in inference, its value for later."""
    if torch.is_grad_enabled() or _looks_on() or watching.is_foreign_mode():
        return function(*args, **kwargs)
    module = None
    try:
        if function is INTERPOLATE:
            found = interpolate_of(_is_plain, *args, **kwargs) if _interpolates_as_is() else None
        else:
            found = _of_module(function, *args, **kwargs)
            module = function
    except TypeError:  # arguments that it does not have: it says so itself
        found = None
    if found is None or found[0] != "nearest":
        return function(*args, **kwargs)
    _, factors, x = found
    return Upsampled(x, factors, functools.partial(function, *args, **kwargs), module)


def _of_module(module: Any, x: Any) -> tuple[str, tuple[int, ...], Tensor] | None:
    if not is_upsampler(module) or is_hooked(module) or any_global_hooks() or has_own_methods(module, nn.Upsample):
        return None
    if not isinstance(x, Tensor) or x.dtype is torch.float64:  # which some subclasses round to float32
        return None
    size, scale = module.size, module.scale_factor
    return interpolate_of(_is_plain, x, size, scale, module.mode, module.align_corners, module.recompute_scale_factor)


# ----------------------------------------------------------------------------------------------------------------------
# Who measures


class _Finding(threading.local):
    """What :func:`~kgopt.rewrite.glue.search.find` wants to hear of this thread's pairs."""

    pair: Callable[[Upsampled, Any], Any] | None = None


finding = _Finding()
