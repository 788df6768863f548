"""Padding in front of a convolution, and frames that are put in front of a video, in inference.

``F.pad`` and ``torch.cat`` along time read and write the whole tensor. The value waits for the convolution behind it
instead (the front end for source code proves that nobody else reads it), which pads by itself as far as zeros are the
same on both sides. What is left, frames of a cache, repeated ones or zeros on one side, goes into one tensor in one
pass. Taps of the kernel that would read nothing but zeros are left out: of the first frame of a causal video, all but
one along time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kgopt._layout import format_of, is_channels_last, memory_format
from kgopt.rewrite.chains.emit import padding_in_numbers
from kgopt.rewrite.chains.meanings import conv_of
from kgopt.rewrite.chains.modules import is_as_is, is_zero_padding
from kgopt.rewrite.glue import plans
from kgopt.rewrite.glue.calls import CATS, FUNCTIONS, PAD, geometry_of
from kgopt.rewrite.glue.kernels import cat_channels_last
from kgopt.rewrite.glue.plans import Normalized, Repeated, may_plan, plan_of
from kgopt.rewrite.pytorch import originals, watching
from kgopt.rewrite.pytorch.watching import any_global_hooks
from kgopt.rewrite.waiting.base import Unmade, Written
from kgopt.rewrite.waiting.formats import keeps
from kgopt.rewrite.waiting.sums import Later, conv_later

_pads_as_is = originals.untouched(*originals.of_function(PAD))
_TIME = 2  # the dim of a video [N, C, T, H, W] along which frames are joined
_JOINS = frozenset(CATS) & FUNCTIONS
_CONV_FUNCTIONS: dict[int, Any] = {2: torch.conv2d, 3: torch.conv3d}
_FORWARDS = {cls.forward: cls for cls in (nn.Conv2d, nn.Conv3d)}
_CONV_FORWARDS = {cls._conv_forward: cls for cls in (nn.Conv2d, nn.Conv3d)}


# ----------------------------------------------------------------------------------------------------------------------
# A value that waits


class Padded(Unmade):
    """Tensors one after the other along the first spatial dim, with zeros around them, for later."""

    __slots__ = ("after", "before", "parts")

    def __init__(
        self, parts: Sequence[Tensor], before: tuple[int, ...], after: tuple[int, ...], compute: Callable[[], Tensor]
    ) -> None:
        super().__init__(compute)
        self.parts = parts
        self.before = before  # zeros of each spatial dim, in front
        self.after = after


class Pads(Written):
    """What the paddings of a method do until a convolution reads them, or something else."""

    waits = Padded, Repeated, Normalized

    def begin(self, function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """``function(x, ...)``, a padding or a join, or its value for later; x may be one that waits."""
        return postponed(function, x, *args, **kwargs)

    def through(self, owner: Any, conv: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """``conv(value, ...)`` in a method of ``owner``."""
        return through(owner, conv, value, *args, **kwargs)

    def give(self, owner: Any, conv: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """:meth:`through`, or its value for later, for a caller that adds something to it."""
        later = None if args or kwargs or type(value) is Padded else _later(conv, value)
        return through(owner, conv, value, *args, **kwargs) if later is None else later

    def beside(self, value: Any, changed: Any) -> Any:
        """The value in front of code that writes to ``changed``: it waits on, where no tensor can be among that."""
        numbers = changed if type(changed) is list else [changed]
        return value if all(type(n) is int for n in numbers) else self.now(value)


_now = Pads().now


def _later(conv: Any, value: Any) -> Later | None:
    x = value
    if type(value) is Repeated:
        plan = plan_of(conv, value) if may_plan() and isinstance(conv, nn.Module) and is_as_is(conv) else None
        x = value if plan is not None and value.joins(plan) else value.value()
    elif type(value) is Normalized and not _reads(conv, value):
        x = value.value()
    return conv_later(conv, x)


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
    if function is PAD and (pad := watching.outside_own_modes(_repeats, x, args, kwargs)) is not None:
        return Repeated(x, pad, lambda: function(_now(x), *args, **kwargs))
    found = watching.outside_own_modes(_found, function, x, args, kwargs)
    if found is None:
        return function(_now(x), *args, **kwargs)
    # Lists of the caller's may be changed until it is computed.
    x, *rest = [tuple(a) if type(a) is list else a for a in (x, *args)]
    kwargs = {name: tuple(a) if type(a) is list else a for name, a in kwargs.items()}
    parts, before, after = found
    return Padded(parts, before, after, lambda: function(_now(x), *rest, **kwargs))


_Found = tuple[Sequence[Tensor], tuple[int, ...], tuple[int, ...]]  # parts, zeros in front and behind


def _found(function: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Found | None:
    """What a call makes of what, if that may wait."""
    if not (type(x) is Padded and x.made is None) and not _may_wait():
        return None
    try:
        if function is PAD:
            return _of_pad(x, *args, **kwargs) if _pads_as_is() else None
        if function in _JOINS:
            return _of_cat(x, *args, **kwargs)
        return _of_module(function, x, *args, **kwargs)
    except TypeError:  # arguments that it does not have: it says so itself
        return None


def _repeats(x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """What a call of F.pad is given, if it repeats outermost positions and may wait."""
    given = dict(zip(("pad", "mode", "value"), args, strict=False)) | kwargs
    pad, is_norm = given.get("pad"), type(x) is Normalized
    if given.get("mode") != "replicate" or not isinstance(pad, (tuple, list)) or {*map(type, pad)} != {int}:
        return None
    if not _pads_as_is() or not (is_norm or (_may_wait() and _is_plain(x))):
        return None
    rank = (x.operands[-1] if is_norm else x).dim() - 2
    if len(given) != len(args) + len(kwargs) or given.get("value") is not None or len(pad) != 2 * rank or min(pad) < 0:
        return None
    # Of frames alone, without a norm, what is repeated goes in front in one pass with what else does: Padded.
    return tuple(pad) if is_norm or any(pad[:4]) else None


def _may_wait() -> bool:
    if _switch.off or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not (watching.is_watched() or watching.is_foreign_mode())


def _is_plain(x: Any) -> bool:
    if type(x) is not Tensor or not x.is_floating_point() or x.layout is not torch.strided or x.dim() not in (4, 5):
        return False
    return x.numel() > 0 and not watching.is_autocast(x)


_NO_ZEROS = (0, 0, 0)


def _of_pad(x: Any, pad: Any, mode: Any = "constant", value: Any = None) -> _Found | None:
    waits = type(x) is Padded
    parts = x.parts if waits else (x,)
    if not isinstance(pad, (tuple, list)) or not (waits or _is_plain(x)) or {*map(type, pad)} != {int}:
        return None
    ends = _ends(tuple(pad), parts[0].dim() - 2)
    if ends is None:
        return None
    before, after = ends
    if mode == "replicate" and not waits and len(pad) == 6 and not any(pad[:4]):
        first, last = (x.narrow(_TIME, at, 1) for at in (0, x.shape[_TIME] - 1))
        front, behind = ([t.expand(-1, -1, n, -1, -1)] if n else [] for t, n in ((first, before[0]), (last, after[0])))
        return [*front, x, *behind], _NO_ZEROS, _NO_ZEROS
    if mode != "constant" or not (value is None or (type(value) in (int, float) and value == 0)):
        return None
    if waits and (any(x.before) or any(x.after)):
        before, after = (tuple(map(sum, zip(*n, strict=True))) for n in ((before, x.before), (after, x.after)))
    return parts, before, after


@functools.lru_cache(maxsize=1024)
def _ends(pad: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What ``F.pad`` puts in front of each spatial dim and behind it; None where it does something else."""
    if len(pad) % 2 or len(pad) > 2 * rank or min(pad) < 0:
        return None
    whole = (*pad, *(0,) * (2 * rank - len(pad)))
    return whole[-2::-2], whole[::-2]


def _of_cat(tensors: Any, dim: Any = 0, axis: Any = None) -> _Found | None:
    dim = dim if axis is None else axis
    if not isinstance(tensors, (tuple, list)) or not tensors or dim not in (_TIME, _TIME - 5):
        return None
    parts, kinds = [], set()
    for t in tensors:
        if not isinstance(t, Tensor) or t.dim() != 5:
            return None
        if t.shape[_TIME]:
            if not _is_plain(t):
                return None
            parts.append(t)
        kinds.add((t.dtype, t.device, t.shape[:_TIME], t.shape[_TIME + 1 :]))
    return (parts, _NO_ZEROS, _NO_ZEROS) if parts and len(kinds) == 1 else None


def _of_module(module: Any, x: Any) -> _Found | None:
    if not is_zero_padding(module) or not is_as_is(module) or any_global_hooks():
        return None
    return _of_pad(x, module.padding, "constant", module.value)


# ----------------------------------------------------------------------------------------------------------------------
# The convolution that reads it


class _Conv(NamedTuple):
    """A convolution with all that it is given but its input."""

    weight: Any
    bias: Any
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class _Way(NamedTuple):
    """How it reads a value that waits."""

    padding: tuple[int, ...]  # its own
    before: tuple[int, ...]  # zeros that are left to be made
    after: tuple[int, ...]
    first: int  # tap along the first dim, and how many
    taps: int


def through(owner: Any, conv: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """``conv(value, ...)``, where value may be one that waits: then as a convolution that pads by itself.

    ``owner``: the module whose code calls it.
    """
    if type(value) is Normalized:
        value = value if not args and not kwargs and _reads(conv, value) else value.value()
    if type(value) is Repeated:
        return plans.through(conv, value) if not args and not kwargs else conv(value.value(), *args, **kwargs)
    if type(value) is not Padded:
        return conv(value, *args, **kwargs)
    # The convolution alone is called where modes of ours, which may compute it in another way, see it.
    given = watching.outside_own_modes(_given, owner, conv, value, args, kwargs)
    if given is None:
        return conv(value.value(), *args, **kwargs)
    function, arguments, is_image = given
    y = function(*arguments)
    return y.unsqueeze(_TIME) if is_image else y


def _reads(conv: Any, value: Normalized) -> bool:
    """Whether a convolution takes what a norm has still to compute."""
    return isinstance(conv, nn.Module) and is_as_is(conv) and plans.head_plan(conv, value.operands[-1]) is not None


def _given(
    owner: Any, conv: Any, value: Padded, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], bool] | None:
    """A function that convolves, its arguments, and whether its result is a frame without time."""
    own = None if value.made is not None else _read(conv, value.parts[0], args, kwargs)
    if own is None or not _suits(own, value.parts[0]):
        return None
    if not any(value.before) and not any(value.after):  # as it is: whatever else the module does
        x = _joined(value.parts, keeps(owner))
        return functools.partial(conv, **kwargs) if kwargs else conv, (x, *args), False
    lengths = (sum([t.shape[_TIME] for t in value.parts]), *value.parts[0].shape[3:])
    way = _way(lengths, value.before, value.after, tuple(own.weight.shape[2:]), *own[2:5])
    if way is None:  # PyTorch refuses it
        return None
    return _call(own, way, _joined(value.parts, keeps(owner), way.before, way.after))


def _read(conv: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Conv | None:
    """The convolution that a call is, if nothing but PyTorch's code runs in it."""
    function = getattr(conv, "__func__", None)
    if function is None and isinstance(conv, nn.Module):
        if args or kwargs or conv_of(conv) not in ("conv2d", "conv3d") or any_global_hooks() or not is_as_is(conv):
            return None
        return _of_conv(conv, conv.weight, conv.bias)
    if function is not None:
        module, cls = conv.__self__, _FORWARDS.get(function)
        if cls is not None and not args and not kwargs and isinstance(module, cls):
            is_as_ever = originals.AS_INSIDE[cls]() and _has_own_way(module, cls)
            return _of_conv(module, module.weight, module.bias) if is_as_ever else None
        cls = _CONV_FORWARDS.get(function)
        if cls is not None and len(args) == 2 and not kwargs and originals.AS_INSIDE[cls]():
            return _of_conv(module, *args)
        return None
    if conv not in _CONV_FUNCTIONS.values() or conv not in FUNCTIONS:
        return None
    try:
        found = geometry_of(conv, (x, *args), kwargs)
    except TypeError:  # arguments that it does not have
        return None
    if found is None:
        return None
    (_, weight, bias), (_, _, stride, own, dilation, _, groups) = found
    return _Conv(weight, bias, stride, own, dilation, groups)


def _has_own_way(module: nn.Module, cls: Any) -> bool:
    """Whether PyTorch's forward of ``cls`` finds PyTorch's ``_conv_forward`` on the instance."""
    return "_conv_forward" not in module.__dict__ and getattr(type(module), "_conv_forward", None) is cls._conv_forward


def _of_conv(module: Any, weight: Any, bias: Any) -> _Conv | None:
    stride, own, dilation = module.stride, module.padding, module.dilation
    if isinstance(own, str) and isinstance(weight, Tensor) and weight.dim() == len(dilation) + 2:
        own = padding_in_numbers(own, weight.shape[2:], dilation)
        own = own if own is None else tuple(own)
    if module.padding_mode != "zeros" or not type(stride) is type(own) is type(dilation) is tuple:
        return None
    return _Conv(weight, bias, stride, own, dilation, module.groups)


def _suits(conv: _Conv, x: Tensor) -> bool:
    """Whether its parameters are plain tensors of x's kind, and it is one of x's dims."""
    for t in (conv.weight,) if conv.bias is None else (conv.weight, conv.bias):
        if type(t) not in (Tensor, nn.Parameter) or t.dtype is not x.dtype or t.device != x.device:
            return False
    rank = x.dim() - 2
    return conv.weight.dim() == x.dim() and len(conv.stride) == len(conv.padding) == len(conv.dilation) == rank


@functools.lru_cache(maxsize=4096)
def _way(
    lengths: tuple[int, ...],
    before: tuple[int, ...],
    after: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> _Way | None:
    """Of the sizes, zeros around them and a convolution; None where PyTorch refuses it."""
    front = [a + b for a, b in zip(before, padding, strict=True)]
    behind = [a + b for a, b in zip(after, padding, strict=True)]
    if min(padding) < 0 or min(*stride, *dilation) < 1:
        return None
    sizes = zip(lengths, front, behind, kernel, dilation, strict=True)
    if any(n + b + a < d * (k - 1) + 1 for n, b, a, k, d in sizes):
        return None
    first, taps, front[0], behind[0] = without_idle_taps(
        lengths[0], front[0], behind[0], kernel[0], stride[0], dilation[0]
    )
    own = tuple(map(min, front, behind))
    rest = [tuple(n - p for n, p in zip(zeros, own, strict=True)) for zeros in (front, behind)]
    return _Way(own, rest[0], rest[1], first, taps)


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


def _call(conv: _Conv, way: _Way, x: Tensor) -> tuple[Any, tuple[Any, ...], bool]:
    weight = conv.weight
    if way.taps != weight.shape[2]:
        weight = weight.narrow(2, way.first, way.taps).contiguous(memory_format=format_of(weight))
    # On the CPU the two dims' convolutions differ in the formats of their results.
    if x.dim() == 5 and x.shape[_TIME] == way.taps == 1 and not way.padding[0] and (x.is_cuda or _are_dense(x, weight)):
        # One frame: an image, for which libraries have faster kernels.
        rest = conv.stride[1:], way.padding[1:], conv.dilation[1:], conv.groups
        return torch.conv2d, (x.squeeze(2), weight.squeeze(2), conv.bias, *rest), True
    rest = conv.stride, way.padding, conv.dilation, conv.groups
    return _CONV_FUNCTIONS[x.dim() - 2], (x, weight, conv.bias, *rest), False


def _are_dense(*tensors: Tensor) -> bool:
    return all(t.is_contiguous() for t in tensors)


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
