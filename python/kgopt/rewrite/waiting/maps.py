"""Nearest upsampling whose value nobody stores: a norm's scale and shift read the small tensor.

In ``self.norm(f) * self.conv_y(zq) + self.conv_b(zq)`` of an upsampled ``zq`` (SpatialNorm, SPADE) the two
convolutions, of kernel 1, may run before the upsampling, and the norm's op reads what they give as it is. The front end
for source code (:mod:`~kgopt.rewrite.source.maps`) proves that nobody else sees a :class:`Map`, or asks for the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite.chains.meanings import conv_of
from kgopt.rewrite.chains.modules import is_as_is
from kgopt.rewrite.glue.calls import INTERPOLATE, interpolate_of
from kgopt.rewrite.norms.arguments import is_plain
from kgopt.rewrite.pytorch import originals, watching
from kgopt.rewrite.pytorch.watching import any_global_hooks
from kgopt.rewrite.waiting.base import Unmade

_is_interpolate_untouched = originals.untouched(*originals.of_function(INTERPOLATE))


class Map(Unmade):
    """A tensor each of whose positions is repeated, by whole factors, to a larger size."""

    __slots__ = ("sizes", "small")

    def __init__(self, small: Tensor, sizes: list[int], compute: Callable[[], Any]) -> None:
        super().__init__(compute)
        self.small = small
        self.sizes = sizes  # behind the channels


def now(value: Any) -> Any:
    """The tensor of what may be a map."""
    return value.value() if type(value) is Map else value


def may_wait() -> bool:
    """Whether maps and what they go into may wait: in eager inference, where nobody looks on."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or any_global_hooks():
        return False
    return not watching.is_watched()


def enlarge(function: Any, *args: Any, **kwargs: Any) -> Any:
    """``function(...)``, where that is nearest upsampling its value for later."""
    if function is INTERPOLATE and may_wait() and _is_interpolate_untouched():
        try:
            found = interpolate_of(is_plain, *args, **kwargs)
        except TypeError:  # arguments that the function does not have: it says so itself
            found = None
        if found is not None and found[0] == "nearest" and not torch.is_autocast_enabled(found[2].device.type):
            _, factors, x = found
            sizes = [s * f for s, f in zip(x.shape[2:], factors, strict=True)]
            return Map(x, sizes, lambda: function(*args, **kwargs))
    return function(*args, **kwargs)


def through(module: Any, value: Any) -> Any:
    """``module(value)``; that of a convolution with a kernel of 1 is a map, too."""
    if type(value) is not Map:
        return module(value)
    if isinstance(module, nn.Module) and conv_of(module) is not None and is_as_is(module) and _is_pointwise(module):
        return Map(module(value.small), value.sizes, lambda: module(value.value()))
    return module(value.value())


def _is_pointwise(conv: Any) -> bool:
    """A convolution of each position by itself."""
    if conv.transposed or isinstance(conv.padding, str):
        return False
    return all(k == 1 for k in conv.kernel_size) and all(s == 1 for s in conv.stride) and not any(conv.padding)
