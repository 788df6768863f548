"""Padding in front of a convolution, and frames that are put in front of a video, in inference.

``F.pad`` and ``torch.cat`` along time read and write the whole tensor. The value waits for the convolution behind it
instead (the front end for source code proves that nobody else reads it), which pads by itself as far as zeros are the
same on both sides. What is left, frames of a cache, repeated ones or zeros on one side, goes into one tensor in one
pass. Taps of the kernel that would read nothing but zeros are left out: of the first frame of a causal video, all but
one along time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kgopt._layout import format_of, is_channels_last, memory_format
from kgopt.rewrite import originals, watching
from kgopt.rewrite.formats import keeps
from kgopt.rewrite.glue.calls import CATS, FUNCTIONS, PAD, geometry_of
from kgopt.rewrite.glue.kernels import cat_channels_last
from kgopt.rewrite.meanings import conv_of
from kgopt.rewrite.modules import is_as_is, is_zero_padding
from kgopt.rewrite.watching import any_global_hooks

_pads_as_is = originals.untouched(*originals.of_function(PAD))
_TIME = 2  # the dim of a video [N, C, T, H, W] along which frames are joined
_CONV_FUNCTIONS: dict[int, Any] = {2: torch.conv2d, 3: torch.conv3d}
_FORWARDS = {cls.forward: cls for cls in (nn.Conv2d, nn.Conv3d)}
_CONV_FORWARDS = {cls._conv_forward: cls for cls in (nn.Conv2d, nn.Conv3d)}


# ----------------------------------------------------------------------------------------------------------------------
# A value that waits


class Padded:
    """Tensors one after the other along the first spatial dim, with zeros around them, for later."""

    __slots__ = ("after", "before", "compute", "made", "parts")

    def __init__(
        self, parts: Sequence[Tensor], before: Sequence[int], after: Sequence[int], compute: Callable[[], Tensor]
    ) -> None:
        self.parts = tuple(parts)
        self.before = tuple(before)  # zeros of each spatial dim, in front
        self.after = tuple(after)
        self.compute = compute  # the calls that stand in the code
        self.made: Tensor | None = None

    def value(self) -> Tensor:
        """The tensor: the same one whenever it is asked for."""
        if self.made is None:
            self.made = self.compute()
        return self.made


class Pads:
    """What the paddings of a method do until a convolution reads them, or something else."""

    def __repr__(self) -> str:
        return "Pads()"

    def __reduce__(self) -> Any:
        return Pads, ()

    def begin(self, function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """``function(x, ...)``, a padding or a join, or its value for later; x may be one that waits."""
        return postponed(function, x, *args, **kwargs)

    def through(self, owner: Any, conv: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """``conv(value, ...)`` in a method of ``owner``."""
        return through(owner, conv, value, *args, **kwargs)

    def now(self, value: Any) -> Any:
        """The value, for code that is no such convolution."""
        return _now(value)

    def beside(self, value: Any, changed: Any) -> Any:
        """The value in front of code that writes to ``changed``: it waits on, where no tensor can be among that."""
        numbers = changed if type(changed) is list else [changed]
        return value if all(type(n) is int for n in numbers) else _now(value)


def _now(value: Any) -> Any:
    return value.value() if type(value) is Padded else value


class _Switch(threading.local):
    off = False


_switch = _Switch()


@contextlib.contextmanager
def as_it_stands() -> Iterator[None]:
    """Nothing waits in this thread: the code runs as the user wrote it."""
    was, _switch.off = _switch.off, True
    try:
        yield
    finally:
        _switch.off = was


def postponed(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """``function(x, ...)``, or, of zero padding and of frames in front of others in inference, its value for later."""
    if not _may_wait():
        return function(_now(x), *args, **kwargs)
    try:
        if function is PAD and function in FUNCTIONS:
            found = _of_pad(x, *args, **kwargs) if _pads_as_is() else None
        elif function in CATS and function in FUNCTIONS:
            found = _of_cat(x, *args, **kwargs)
        else:
            found = _of_module(function, x, *args, **kwargs)
    except TypeError:  # arguments that it does not have: it says so itself
        found = None
    if found is None:
        return function(_now(x), *args, **kwargs)
    # Lists of the caller's may be changed until it is computed.
    args = tuple(tuple(a) if type(a) is list else a for a in args)
    kwargs = {name: tuple(a) if type(a) is list else a for name, a in kwargs.items()}
    x = tuple(x) if type(x) is list else x
    return Padded(*found, lambda: function(_now(x), *args, **kwargs))


def _may_wait() -> bool:
    if _switch.off or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not (watching.is_watched() or watching.is_foreign_mode())


def _is_plain(x: Any) -> bool:
    if type(x) is not Tensor or not x.is_floating_point() or x.layout is not torch.strided or x.dim() not in (4, 5):
        return False
    return x.numel() > 0 and not watching.is_autocast(x)


_Found = tuple[Sequence[Tensor], Sequence[int], Sequence[int]]


def _of_pad(x: Any, pad: Any, mode: Any = "constant", value: Any = None) -> _Found | None:
    waits = type(x) is Padded and x.made is None
    parts = x.parts if waits else (x,)
    if not isinstance(pad, (tuple, list)) or not all(type(p) is int and p >= 0 for p in pad) or len(pad) % 2:
        return None
    if not _is_plain(parts[0]) or len(pad) > 2 * (parts[0].dim() - 2):
        return None
    pad = [*pad, *(0,) * (2 * (parts[0].dim() - 2) - len(pad))]
    before, after = pad[-2::-2], pad[::-2]
    if mode == "replicate" and x is parts[0] and x.dim() == 5 and any(pad) and not any(before[1:] + after[1:]):
        first, last = (x.narrow(_TIME, at, 1) for at in (0, x.shape[_TIME] - 1))
        repeated = [t.expand(-1, -1, n, -1, -1) for t, n in ((first, before[0]), (last, after[0])) if n]
        parts = [*repeated[:1], x, *repeated[1:]] if before[0] else [x, *repeated]
        return parts, (0, 0, 0), (0, 0, 0)
    if mode != "constant" or not (value is None or value == 0):
        return None
    if waits:
        before = [a + b for a, b in zip(before, x.before, strict=True)]
        after = [a + b for a, b in zip(after, x.after, strict=True)]
    return parts, before, after


def _of_cat(tensors: Any, dim: Any = 0, axis: Any = None) -> _Found | None:
    dim = dim if axis is None else axis
    if not isinstance(tensors, (tuple, list)) or dim not in (_TIME, _TIME - 5):
        return None
    if not tensors or not all(isinstance(t, Tensor) and t.dim() == 5 for t in tensors):
        return None
    first = tensors[0]

    def rest(t: Tensor) -> Any:
        return t.dtype, t.device, t.shape[:_TIME], t.shape[_TIME + 1 :]

    if not all(rest(t) == rest(first) for t in tensors):
        return None
    parts = [t for t in tensors if t.shape[_TIME]]
    return (parts, (0, 0, 0), (0, 0, 0)) if parts and all(map(_is_plain, parts)) else None


def _of_module(module: Any, x: Any) -> _Found | None:
    if not is_zero_padding(module) or not is_as_is(module) or any_global_hooks():
        return None
    return _of_pad(x, module.padding, "constant", module.value)


# ----------------------------------------------------------------------------------------------------------------------
# The convolution that reads it


@dataclass(frozen=True)
class _Conv:
    """A convolution with all that it is given but its input."""

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    before: tuple[int, ...]  # zeros of each dim that it puts in front, its own and others'
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def through(owner: Any, conv: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """``conv(value, ...)``, where value may be one that waits: then as a convolution that pads by itself.

    ``owner``: the module whose code calls it.
    """
    if type(value) is not Padded:
        return conv(value, *args, **kwargs)
    made = None
    if value.made is None and _may_wait():
        made = _made_conv(conv, value, args, kwargs)
    if made is None:
        return conv(value.value(), *args, **kwargs)
    given, rest = made
    if rest is None:  # as it is: whatever else the module does
        return conv(_joined(given, keeps(owner)), *args, **kwargs)
    return _convolve(rest, given, keeps(owner))


def _made_conv(
    conv: Any, value: Padded, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Sequence[Tensor], _Conv | None] | None:
    """What the convolution is to compute, of which tensors; None for it: the same as ever."""
    own = _read(conv, value.parts[0], args, kwargs)
    if own is None:
        return None
    weight, x = own.weight, value.parts[0]
    tensors = [weight] if own.bias is None else [weight, own.bias]
    if any(type(t) not in (Tensor, nn.Parameter) or t.dtype is not x.dtype or t.device != x.device for t in tensors):
        return None
    if weight.dim() != x.dim() or len(own.stride) != x.dim() - 2:
        return None
    if min(own.before, default=0) < 0 or min(*own.stride, *own.dilation) < 1:
        return None
    if not any(value.before) and not any(value.after):
        return value.parts, None
    before = tuple(a + b for a, b in zip(own.before, value.before, strict=True))
    after = tuple(a + b for a, b in zip(own.after, value.after, strict=True))
    whole = replace(own, before=before, after=after)
    lengths = [sum(t.shape[_TIME] for t in value.parts), *x.shape[3:]]
    spans = [d * (k - 1) + 1 for d, k in zip(own.dilation, weight.shape[2:], strict=True)]
    if any(n + b + a < s for n, b, a, s in zip(lengths, before, after, spans, strict=True)):
        return None  # PyTorch refuses it
    return value.parts, _shortened(whole, lengths[0])


def _read(conv: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Conv | None:
    """The convolution that a call is, if nothing but PyTorch's code runs in it."""
    function = getattr(conv, "__func__", None)
    if function is None and isinstance(conv, nn.Module):
        if args or kwargs or conv_of(conv) not in ("conv2d", "conv3d") or any_global_hooks() or not is_as_is(conv):
            return None
        return _of_module_conv(conv, conv.weight, conv.bias)
    if function is not None:
        module, cls = conv.__self__, _FORWARDS.get(function)
        if cls is not None and not args and not kwargs and isinstance(module, cls):
            if not originals.AS_INSIDE[cls]() or not _has_own_way(module, cls):
                return None
            return _of_module_conv(module, module.weight, module.bias)
        cls = _CONV_FORWARDS.get(function)
        if cls is not None and len(args) == 2 and not kwargs and originals.AS_INSIDE[cls]():
            return _of_module_conv(module, *args)
        return None
    if conv in _CONV_FUNCTIONS.values() and conv in FUNCTIONS:
        try:
            found = geometry_of(conv, (x, *args), kwargs)
        except TypeError:
            return None
        if found is None:
            return None
        (_, weight, bias), (_, _, stride, padding, dilation, _, groups) = found
        return _Conv(weight, bias, stride, padding, padding, dilation, groups)
    return None


def _has_own_way(module: nn.Module, cls: Any) -> bool:
    """Whether PyTorch's forward of ``cls`` finds PyTorch's ``_conv_forward`` on the instance."""
    return "_conv_forward" not in module.__dict__ and getattr(type(module), "_conv_forward", None) is cls._conv_forward


def _of_module_conv(module: Any, weight: Any, bias: Any) -> _Conv | None:
    lists = module.stride, module.padding, module.dilation
    if module.padding_mode != "zeros" or not all(type(n) is tuple and all(type(v) is int for v in n) for n in lists):
        return None
    stride, padding, dilation = lists
    return _Conv(weight, bias, stride, padding, padding, dilation, module.groups)


def without_idle_taps(
    length: int, before: int, after: int, kernel: int, stride: int, dilation: int
) -> tuple[int, int, int, int]:
    """A kernel along one dim without the taps that read zeros alone: the first that is left, how many are, and the
    zeros in front and behind that give the same positions of the result.

    ``length``: of what zeros are put around; there is a result.
    """
    last = (length + before + after - dilation * (kernel - 1) - 1) // stride * stride  # position of the result
    first = min(max(0, -((last - before) // dilation)), before // dilation, kernel - 1)
    stop = max(first + 1, min(kernel, -(-(length + before) // dilation)))
    front = before - first * dilation
    behind = last + dilation * (stop - 1 - first) + 1 - front - length
    if stop - first == kernel or behind < 0:
        return 0, kernel, before, after
    return first, stop - first, front, behind


def _shortened(conv: _Conv, length: int) -> _Conv:
    """The same convolution of ``length`` positions in its first dim, without idle taps there."""
    zeros, kernel = (conv.before[0], conv.after[0]), conv.weight.shape[2]
    first, count, before, after = without_idle_taps(length, *zeros, kernel, conv.stride[0], conv.dilation[0])
    if count == kernel:
        return conv
    weight = conv.weight.narrow(2, first, count).contiguous(memory_format=format_of(conv.weight))
    return replace(conv, weight=weight, before=(before, *conv.before[1:]), after=(after, *conv.after[1:]))


def _convolve(conv: _Conv, parts: Sequence[Tensor], keeps_last: bool) -> Tensor:
    own = tuple(map(min, conv.before, conv.after))
    before = [b - p for b, p in zip(conv.before, own, strict=True)]
    after = [a - p for a, p in zip(conv.after, own, strict=True)]
    x = _joined(parts, keeps_last, before, after)
    rest = conv.stride, own, conv.dilation
    # On the CPU the two dims' convolutions differ in the formats of their results.
    keeps_format = x.is_cuda or (x.is_contiguous() and conv.weight.is_contiguous())
    if x.dim() == 5 and x.shape[_TIME] == conv.weight.shape[2] == 1 and not own[0] and keeps_format:
        # One frame: an image, for which libraries have faster kernels.
        stride, zeros, dilation = (n[1:] for n in rest)
        image, weight = x.squeeze(2), conv.weight.squeeze(2)
        return torch.conv2d(image, weight, conv.bias, stride, zeros, dilation, conv.groups).unsqueeze(2)
    y: Tensor = _CONV_FUNCTIONS[x.dim() - 2](x, conv.weight, conv.bias, *rest, conv.groups)
    return y


def _joined(parts: Sequence[Tensor], keeps_last: bool, before: Sequence[int] = (), after: Sequence[int] = ()) -> Tensor:
    """The parts with zeros around them, in one pass where these are along the first dim alone.

    In channels_last where all parts are, as PyTorch's; with ``keeps_last`` where one is.
    """
    if any(before[1:]) or any(after[1:]):
        pad = [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
        return F.pad(_joined(parts, keeps_last), pad)
    is_last = (any if keeps_last else all)(map(is_channels_last, parts))
    front, behind = ([_zeros(parts[0], n, is_last)] if n else [] for n in (sum(before[:1]), sum(after[:1])))
    pieces = [*front, *parts, *behind]
    if len(pieces) == 1:
        return pieces[0]
    return cat_channels_last(pieces, _TIME) if is_last else torch.cat(pieces, _TIME)


def _zeros(like: Tensor, count: int, is_last: bool) -> Tensor:
    sizes = (*like.shape[:_TIME], count, *like.shape[_TIME + 1 :])
    form = memory_format(like.dim(), is_last)
    return torch.empty(sizes, dtype=like.dtype, device=like.device, memory_format=form).zero_()
