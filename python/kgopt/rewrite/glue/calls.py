"""Calls of PyTorch's functions that kgopt can compute, as :class:`Call`; :func:`recognize` finds out.

For calls that run (:mod:`~kgopt.rewrite.glue.search`) and for the nodes of captured graphs. Which way is the faster one
is not known here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kgopt import accuracy
from kgopt import ops as ops
from kgopt._layout import is_dense_channels_last
from kgopt.rewrite.chains.emit import TORCH_CONVS, numbers, padding_in_numbers
from kgopt.rewrite.chains.meanings import conv_of
from kgopt.rewrite.glue import kernels, pools
from kgopt.rewrite.pytorch import originals

_OPS = torch.ops.kgopt
LINEAR = {"linear": 3, "bilinear": 4, "trilinear": 5}
# As they are now: a user may replace them.
INTERPOLATE, PAD, ATTENTION = F.interpolate, F.pad, F.scaled_dot_product_attention
BATCH_NORM = F.batch_norm
CATS = (torch.cat, torch.concat, torch.concatenate)
_POOLS = {F.max_pool2d: 2, F.max_pool3d: 3}
_CONVS: dict[Any, tuple[str, int, bool]] = {  # the op, dims, transposed
    function: (op, int(op[-2]), "transpose" in op) for op, function in TORCH_CONVS.items()
}
# The op's name by function; of those with a kernel that is not transposed; where they are PyTorch's own.
CONVS = {function: op for function, (op, *_) in _CONVS.items() if originals.is_torchs(function)}
PLAIN_CONVS = {function: rank for function, (_, rank, transposed) in _CONVS.items() if not transposed}
# By function: whether what it calls is PyTorch's own.
_UNTOUCHED = {
    **{
        f: originals.untouched(*originals.of_function(f))
        for f in (INTERPOLATE, PAD, BATCH_NORM, *_POOLS, *pools.FUNCTIONS)
    },
    **dict.fromkeys((ATTENTION, *CATS, *_CONVS), originals.untouched()),
}
FUNCTIONS = frozenset(f for f in _UNTOUCHED if originals.is_torchs(f))
# Channels of input or output, up to which kgopt's own convolution can be the faster one: in general, in channels_last.
NARROW, NARROW_LAST = 32, 128
FEW = 4  # output channels of group_norm_conv1x1's kernel
# Of upsampling in front of a convolution: PyTorch rounds the inverse, which the next ones may notice.
LARGEST_FACTOR = 8
# Positions of a dim, up to which PyTorch's float32 finds the same source as exact arithmetic, with some room.
LARGEST_RESIZED = 2048
MOST_RUNS = 2  # of a dim of what is resized: each combination is a copy
# Taps times input channels, and output channels, from which fp16's rate can make up for the passes of scaled_half.
WIDE_COLUMNS, WIDE = 512, 64
# Channels of a head, up to which PyTorch has fast kernels for attention; products of queries and keys, below which
# several launches cost more than they save.
WIDEST_HEAD, MANY_SCORES = 256, 2**20
FEW_COLUMNS = 40  # taps times output channels of group_norm_conv's kernel for few channels
# Groups that a dense convolution may stand for, which has so many times the products, and values of its weight, which
# may otherwise be as many as x has.
MOST_GROUPS, DENSE = 32, 2**19


@dataclass(frozen=True)
class Call:
    """A call that can be replaced."""

    kind: str
    argument: tuple[Any, ...]
    x: Tensor
    more: tuple[Any, ...] = ()  # the other tensors, of cat; weight and bias
    options: tuple[str, ...] = ("kgopt",)  # ways to replace it
    keeps: bool = False  # the result has x's memory format, whichever PyTorch would give
    cast: torch.dtype | None = None  # of autocast, where that is on: a convolution's tensors are still to be cast

    @property
    def key(self) -> Any:
        """What a verdict holds for."""
        x = self.x
        return self.kind, self.argument, self.keeps, self.cast, x.shape, x.dtype, x.device, x.is_contiguous()

    def without_autocast(self) -> Call:
        """What autocast makes of the call."""
        if self.cast is None or self.kind != "conv":
            return replace(self, cast=None)
        more = tuple(None if t is None else t.to(self.cast) for t in self.more)
        return replace(self, x=self.x.to(self.cast), more=more, cast=None)

    def run(self, option: str = "") -> Tensor:
        """The result in one of the ways; the first one by default."""
        if self.cast is not None:
            with torch.autocast(self.x.device.type, enabled=False):
                return self.without_autocast().run(option)
        return _KINDS[self.kind].run(self, option or self.options[0])

    @property
    def by_torch(self) -> Callable[..., Tensor] | None:
        """PyTorch's function, of other tensors than the call's; None where the bits must be the same."""
        function = None if self.kind == "pooled" and self.argument[0] != "mean" else _KINDS[self.kind].by_torch
        return None if function is None else functools.partial(function, self)

    def inside(self, keeps: bool) -> Call:
        """The call as it may run in a model that keeps channels_last, where the format is no part of what it means:
        contiguous results are converted back by the next convolution.
        """
        loses = self.kind in _LOSE_FORMAT and is_dense_channels_last(self.x)
        return replace(self, keeps=True) if keeps and loses else self

    @property
    def sizes(self) -> list[int]:
        """Of the result of upsampling and of a convolution."""
        if self.kind == "linear":
            return [*self.x.shape[:2], *(2 * s for s in self.x.shape[2:])]
        if self.kind == "upsampled":
            factors, padding, _, weight, *_ = self.argument
            dims = zip(self.x.shape[2:], factors, padding, weight[2:], strict=True)
            return [self.x.shape[0], weight[0], *(s * f + 2 * p - k + 1 for s, f, p, k in dims)]
        _, transposed, stride, padding, dilation, output_padding, groups, *_ = self.argument
        rest = (stride, padding, dilation, output_padding, groups, transposed)
        return ops.conv_sizes(self.x.shape, self.more[0].shape, *rest)

    @property
    def rest(self) -> tuple[Any, ...]:
        """A convolution's arguments of conv_add after its tensors."""
        _, transposed, *lists, groups = self.argument[:7]
        return (*map(list, lists), groups, transposed)

    @property
    def own(self) -> tuple[Any, tuple[Any, ...]]:
        """kgopt's op of a convolution, and its arguments after its tensors."""
        op, transposed, stride, padding, dilation, output_padding, groups, *_ = self.argument
        tail = (list(output_padding), groups, list(dilation)) if transposed else (list(dilation), groups)
        return getattr(_OPS, op).default, (list(stride), list(padding), *tail)

    def dense(self, last: bool | None = None) -> Call:
        """A convolution in groups as one of a single group. ``last``: whether the new weight lies in channels_last, for
        a graph's proxies, which do not say how they lie.
        """
        weight, bias = self.more
        *geometry, groups = self.argument[:7]
        if last is None:
            wide = kernels.dense_weight_for(self.x, weight, groups)
        else:
            wide = kernels.dense_weight(weight, groups, last)
        return replace(self, argument=(*geometry, 1), more=(wide, bias))

    def by_function(self) -> Tensor:
        """A convolution by PyTorch's function."""
        return TORCH_CONVS[self.argument[0]](self.x, *self.more, *self.own[1])  # type: ignore[no-any-return]

    def _convolve(self, option: str) -> Tensor:
        if option == "dense":
            return self.dense()._convolve("bias")
        weight, bias = self.more
        if option == "bias":
            return _OPS.conv_add(self.x, weight, bias, None, *self.rest)  # type: ignore[no-any-return]
        if option in kernels.ALONE:
            return kernels.ALONE[option](self.x, weight, bias, self.rest)
        if option == "scaled":
            return kernels.scaled(self.x, weight, bias, None, *self.rest)
        op, rest = self.own
        if option == "auto":  # the op, and its gradients, by the kernels that it chooses
            return op(self.x, *self.more, *rest)  # type: ignore[no-any-return]
        return op(self.x, *self.more, *rest, backend="kgopt")  # type: ignore[no-any-return]


class _Kind(NamedTuple):
    """What kgopt runs for a kind of calls, in one of the ways; and PyTorch's function, to compare with on other tensors
    than the call's, None where the bits must be the same.
    """

    run: Callable[[Call, str], Tensor]
    by_torch: Callable[..., Tensor] | None = None


def _linear_by_torch(call: Call, x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode=f"{['', 'bi', 'tri'][x.dim() - 3]}linear")


def _batch_norm_by_torch(call: Call, x: Tensor, mean: Tensor, var: Tensor, weight: Any, bias: Any) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, eps=call.argument[0])


def _conv_by_torch(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _, transposed, stride, padding, dilation, output_padding, groups = call.argument[:7]
    return torch.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _upsampled_by_torch(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    factors, padding, groups = call.argument[:3]
    ones, zeros = (1,) * len(factors), (0,) * len(factors)
    x = F.interpolate(x, scale_factor=tuple(map(float, factors)))
    return torch.convolution(x, weight, bias, ones, padding, ones, False, zeros, groups)


_KINDS: dict[str, _Kind] = {
    "conv": _Kind(lambda call, option: call._convolve(option), _conv_by_torch),
    "upsampled": _Kind(
        lambda call, option: kernels.upsampled_conv(option, call.x, *call.more, *call.argument[:3]), _upsampled_by_torch
    ),
    "attention": _Kind(
        lambda call, _: kernels.attention(call.x, call.more[0], call.more[1], call.argument[0]),
        lambda call, q, k, v: F.scaled_dot_product_attention(q, k, v, scale=call.argument[0]),
    ),
    "batch_norm": _Kind(
        lambda call, _: kernels.batch_norm(call.x, *call.more, call.argument[0]),  # type: ignore[call-arg]
        _batch_norm_by_torch,
    ),
    "cat": _Kind(lambda call, _: kernels.cat_channels_last((call.x, *call.more), call.argument[0])),
    "nearest": _Kind(lambda call, _: kernels.upsample_nearest(call.x, call.argument)),
    "resized": _Kind(lambda call, _: kernels.repeated(call.x, call.argument)),
    "linear": _Kind(lambda call, _: _OPS.upsample_linear(call.x), _linear_by_torch),
    "max_pool": _Kind(lambda call, _: _OPS.max_pool(call.x, *map(list, call.argument))),
    "pooled": _Kind(
        lambda call, _: pools.pooled_as_torch(call.x, pools.Pool(*call.argument), call.keeps),
        lambda call, x: pools.pooled_by_torch(x, pools.Pool(*call.argument)),
    ),
    "replicate": _Kind(lambda call, _: _OPS.pad_replicate(call.x, list(call.argument))),
    "repeated": _Kind(lambda call, _: _OPS.pad_replicate(call.x, list(call.argument))),
    "reflect": _Kind(lambda call, _: kernels.pad_reflect(call.x, call.argument)),
}
# Of some tensors PyTorch's kernels for these give contiguous ones.
_LOSE_FORMAT = frozenset(_KINDS) - {"conv", "attention", "batch_norm", "cat"}


def recognize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The call as one that can be replaced; None where PyTorch must run it, or refuse it."""
    untouched = _UNTOUCHED.get(func)
    if untouched is None or not untouched():
        return None
    found = _recognize(func, args, kwargs)
    if found is None or func in _CONVS:  # what a convolution takes depends on autocast
        return found
    cast = _autocast_of(found.x)
    return found if cast is None else replace(found, cast=cast)


def _autocast_of(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _recognize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    try:
        if func is INTERPOLATE:
            found = interpolate_of(_takes, *args, **kwargs)
            return _resized(*args, **kwargs) if found is None else Call(*found)
        if func is PAD:
            return _pad(*args, **kwargs)
        if func is ATTENTION:
            return _attention(*args, **kwargs)
        if func is BATCH_NORM:
            return _batch_norm(*args, **kwargs)
        if func in _POOLS:
            return _max_pool(_POOLS[func], *args, **kwargs)
        if func in pools.FUNCTIONS:
            pool = pools.pool_of(_takes, func, args, kwargs)
            return None if pool is None else Call("pooled", *pool)
        if func in _CONVS:
            return _conv(func, args, kwargs)
    except TypeError:  # arguments that the function does not have: it says so itself
        return None
    return cat_of(_takes, args, kwargs) if func in CATS else None


def _max_pool(
    rank: int,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Call | None:
    if ceil_mode or return_indices or not _takes(input) or input.dim() != rank + 2:
        return None
    if isinstance(stride, (tuple, list)) and not stride:
        stride = None
    window = [numbers(v, rank) for v in (kernel_size, kernel_size if stride is None else stride, padding)]
    kernel, step, pad = window
    if kernel is None or step is None or pad is None or numbers(dilation, rank) != (1,) * rank:
        return None
    if min(kernel) < 1 or min(step) < 1 or any(p < 0 or 2 * p > k for p, k in zip(pad, kernel, strict=True)):
        return None
    if any(s + 2 * p < k for s, p, k in zip(input.shape[2:], pad, kernel, strict=True)):
        return None
    return Call("max_pool", (kernel, step, pad), input)


# By whether it is a transposed one.
_CONV_PARAMETERS = {
    False: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    True: ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
}
_CONV_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "groups": 1}


def conv_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Of a call of one of PyTorch's convolutions, by name, with the defaults.

    Raises:
        TypeError: arguments that it does not have.
    """
    names = _CONV_PARAMETERS[_CONVS[func][2]]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(given) != len(args) + len(kwargs) or not {"input", "weight"} <= given.keys() <= set(names):
        raise TypeError("arguments that it does not have")
    return {name: given.get(name, _CONV_DEFAULTS.get(name)) for name in names}


def geometry_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], held: Callable[[Any], Any] = lambda weight: weight
) -> tuple[Any, tuple[Any, ...]] | None:
    """A convolution's input, weight and bias, and what :attr:`Call.argument` has of the rest; None: it says less.

    ``held`` is the tensor that stands for the weight, whose sizes say what padding by name is.
    """
    op, rank, transposed = _CONVS[func]
    given = {"output_padding": 0, **conv_arguments(func, args, kwargs)}
    stride, dilation, output_padding = (numbers(given[name], rank) for name in ("stride", "dilation", "output_padding"))
    padding = given["padding"]
    if padding in ("same", "valid") and not transposed and dilation is not None:
        kernel = getattr(held(given["weight"]), "shape", ())[2:]
        is_taken = len(kernel) == rank and (padding == "valid" or stride == (1,) * rank)
        padding = padding_in_numbers(padding, kernel, dilation) if is_taken else None
    padding = numbers(padding, rank)
    if None in (stride, padding, dilation, output_padding) or type(given["groups"]) is not int:
        return None
    rest = (op, transposed, stride, padding, dilation, output_padding, given["groups"])
    return [given[name] for name in ("input", "weight", "bias")], rest


def _conv(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    found = geometry_of(func, args, kwargs)
    if found is None:
        return None
    (x, weight, bias), geometry = found
    rank = len(geometry[2])
    if not _takes(x) or x.dim() != rank + 2:
        return None
    cast = _autocast_of(x)
    if not _is_parameter_of(weight, x, cast) or weight.dim() != rank + 2:
        return None
    if bias is not None and not _is_parameter_of(bias, x, cast):
        return None
    options = _ways(x, weight, bias is not None, geometry, cast is not None)
    if not options:
        return None
    # Two models may share a function, so its key says which weight it is about as far as that matters.
    of_weight = (weight.shape, weight.stride(), bias is None)
    return Call("conv", (*geometry, *of_weight), x, (weight, bias), options, cast=cast)


def _ways(x: Tensor, weight: Tensor, biased: bool, geometry: tuple[Any, ...], is_cast: bool) -> tuple[str, ...]:
    """To compute a convolution; ``is_cast``: of what autocast makes of its tensors."""
    _, transposed, stride, padding, dilation, _, groups = geometry
    rank, last = len(stride), is_dense_channels_last(x)
    ones, zeros = (1,) * rank, (0,) * rank
    limit = NARROW_LAST if last else NARROW
    narrow = min(weight.shape[0], weight.shape[1] * groups) <= limit and x.is_cuda
    depthwise = x.is_cuda and 1 < groups == x.shape[1] and x.dtype is not torch.float64
    forward = depthwise and not transposed
    single = forward and weight.numel() == groups and (stride, padding) == (ones, zeros)
    # One kernel reads x once for a few output channels.
    head = x.is_cuda and last and (stride, groups) == (ones, 1) and not transposed and not is_cast
    head = head and weight.shape[0] <= FEW
    pointwise = head and weight.shape[2:] == ones and (padding, dilation) == (zeros, ones)
    few = head and not pointwise and math.prod(weight.shape[2:]) * weight.shape[0] <= FEW_COLUMNS
    few = few and (rank == 2 or (weight.shape[2] == 1 and padding is not None and padding[0] == 0))
    wide = last and not is_cast and accuracy.may_take_tf32(x) and groups == 1 and not transposed
    wide = wide and weight.shape[0] >= WIDE and math.prod(weight.shape[1:]) >= WIDE_COLUMNS
    ways = {
        "bias": biased,
        "own": narrow or depthwise,
        "each channel": single,
        "repeated channels": forward and weight.shape[0] > groups,
        "pointwise": pointwise,
        "few": few,
        "scaled": wide,
        "dense": has_dense_form(x, weight, groups),
    }
    return tuple(way for way, is_one in ways.items() if is_one)


def has_dense_form(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether a convolution may run as one of a single group, whose weight has zeros between the groups: cuDNN's
    kernels for groups, and kgopt's, can take several times as long.
    """
    several = 2 <= groups <= MOST_GROUPS and weight.shape[1] >= 2 and weight.shape[0] >= 2 * groups
    # The dense weight is memory of the call's.
    fits = several and groups * weight.numel() <= max(x.numel(), DENSE)
    return fits and x.is_cuda and x.dtype is not torch.float64


def padding_of(conv: Any, rank: int) -> tuple[int, ...] | None:
    """Of a convolution module that can be folded with an upsampling in front of it; None for any other."""
    if conv_of(conv) not in ("conv2d", "conv3d") or conv.padding_mode != "zeros" or type(conv.groups) is not int:
        return None
    return foldable_padding(tuple(conv.kernel_size), conv.stride, conv.padding, conv.dilation, rank)


def foldable_padding(
    kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, rank: int
) -> tuple[int, ...] | None:
    """The same of a convolution with such arguments."""
    ones = (1,) * rank
    if len(kernel) != rank or {numbers(stride, rank), numbers(dilation, rank)} != {ones}:
        return None
    given = numbers(padding_in_numbers(padding, kernel, ones), rank)
    return given if given is not None and all(0 <= p < k for p, k in zip(given, kernel, strict=True)) else None


def upsampled_by(x: Tensor, factors: tuple[int, ...], conv: Any) -> Call | None:
    """:func:`upsampled` with the convolution module behind it."""
    padding = padding_of(conv, x.dim() - 2)
    if padding is None or tuple(conv.weight.shape[2:]) != tuple(conv.kernel_size):
        return None
    return upsampled(x, factors, conv.weight, conv.bias, padding, conv.groups)


def upsampled(
    x: Tensor, factors: tuple[int, ...], weight: Tensor, bias: Tensor | None, padding: tuple[int, ...], groups: int
) -> Call | None:
    """Nearest upsampling by ``factors``, and the convolution behind it, as one transposed convolution.

    Its weights are sums of the convolution's, and it reads x itself: with a factor of 2, 8 of the 27 products of a
    kernel of 3 x 3 x 3 are left. A convolution with a kernel of 1 is computed first, and its result is upsampled.
    """
    if weight.dim() != x.dim():
        return None
    ones, kernel = (1,) * len(factors), tuple(weight.shape[2:])
    if not _is_parameter_of(weight, x) or not (bias is None or _is_parameter_of(bias, x)):
        return None
    if any(s * f + 2 * p < k for s, f, p, k in zip(x.shape[2:], factors, padding, kernel, strict=True)):
        return None  # PyTorch refuses it
    of_weight = (weight.shape, weight.stride(), bias is None, x.stride())
    options = ("commuted",) if kernel == ones else ("folded", "folded_aten")
    sums = math.prod(k + f - 1 for k, f in zip(kernel, factors, strict=True)) * weight.shape[0] * weight.shape[1]
    if max(factors) > LARGEST_FACTOR or (kernel != ones and sums > x.numel() * math.prod(factors)):
        return None  # the sums would take more memory than what they save
    return Call("upsampled", (factors, padding, groups, *of_weight), x, (weight, bias), options)


def _is_parameter_of(p: Any, x: Tensor, cast: torch.dtype | None = None) -> bool:
    """A plain tensor of x's dtype and device, of which nobody wants a gradient now. ``cast``: both will be cast to it,
    as autocast does with all but float64.
    """
    if type(p) not in (Tensor, nn.Parameter) or p.layout is not torch.strided:
        return False
    alike = p.dtype is x.dtype if cast is None else torch.float64 not in (p.dtype, x.dtype)
    return alike and p.device == x.device and not (torch.is_grad_enabled() and p.requires_grad)


def _takes(x: Any) -> bool:
    """A plain tensor, of which nobody wants a gradient now."""
    if type(x) is not Tensor or not x.is_floating_point() or x.layout is not torch.strided or x.dim() not in (4, 5):
        return False
    if torch.is_grad_enabled() and x.requires_grad:
        return False
    return x.numel() > 0 and (x.is_contiguous() or is_dense_channels_last(x))


def resize_arguments(
    input: Any = None,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> tuple[Any, Any, Any, str, bool | None, bool | None, bool]:
    """The arguments of a call of ``F.interpolate``."""
    return input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias


def interpolate_of(
    takes: Callable[[Any], bool], *args: Any, **kwargs: Any
) -> tuple[str, tuple[int, ...], Tensor] | None:
    """:func:`interpolation` of a call's arguments, and the input, if ``takes`` says that it is one."""
    input, size, scale_factor, mode, align_corners, _, antialias = resize_arguments(*args, **kwargs)
    if antialias or not takes(input):
        return None
    found = interpolation(input, size, scale_factor, mode, align_corners)
    return None if found is None else (*found, input)


def interpolation(
    x: Tensor, size: Any, scale_factor: Any, mode: Any, align_corners: bool | None
) -> tuple[str, tuple[int, ...]] | None:
    """("nearest" or "linear", the factors) of a call of ``F.interpolate`` that kgopt can compute; else None."""
    spatial = x.shape[2:]
    given = size if size is not None else scale_factor
    if (size is None) == (scale_factor is None):
        return None
    values = list(given) if isinstance(given, (tuple, list)) else [given] * len(spatial)
    if len(values) != len(spatial) or not all(isinstance(v, (int, float)) for v in values):
        return None
    if size is not None:
        if any(not isinstance(v, int) or v % s for v, s in zip(values, spatial, strict=True)):
            return None
        values = [v // s for v, s in zip(values, spatial, strict=True)]
    if any(v != int(v) or v < 1 for v in values):
        return None
    factors = tuple(int(v) for v in values)
    if all(f == 1 for f in factors):
        return None
    if mode in ("nearest", "nearest-exact"):  # which differ at other factors only
        return "nearest", factors
    return ("linear", factors) if LINEAR.get(mode) == x.dim() and not align_corners and set(factors) == {2} else None


def _resized(*args: Any, **kwargs: Any) -> Call | None:
    """Nearest resampling to sizes that are no multiples, of which decoders ask for what their encoder has halved.

    To one position more, position i of n + 1 is position max(i - 1, 0) of n ("repeated"). To 2n - 1 and 2n + 1
    ("resized") all positions but the last or the first are repeated as often as each other.
    """
    input, size, scale_factor, mode, _, _, antialias = resize_arguments(*args, **kwargs)
    if size is None or scale_factor is not None or mode != "nearest" or antialias or not _takes(input):
        return None
    rank = input.dim() - 2
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,) * rank
    if len(sizes) != rank or not all(type(v) is int and 1 <= v <= LARGEST_RESIZED for v in sizes):
        return None
    more = [v - s for v, s in zip(sizes, input.shape[2:], strict=True)]
    if set(more) <= {0, 1}:
        return Call("repeated", tuple(n for extra in reversed(more) for n in (extra, 0)), input) if any(more) else None
    if min(more) < 0:
        return None
    runs = tuple(kernels.runs_to(s, v) for s, v in zip(input.shape[2:], sizes, strict=True))
    return Call("resized", runs, input) if max(map(len, runs)) <= MOST_RUNS else None


def _pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Call | None:
    if mode not in ("replicate", "reflect") or not _takes(input) or not isinstance(pad, (tuple, list)):
        return None
    if len(pad) != 2 * (input.dim() - 2) or any(not isinstance(p, int) or p < 0 for p in pad):
        return None
    if mode == "reflect" and any(p >= input.shape[-1 - i // 2] for i, p in enumerate(pad)):
        return None  # PyTorch refuses it
    return Call(mode, tuple(pad), input)


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Call | None:
    """By running statistics, on a GPU: in half types PyTorch's kernel takes several times what a pass over x does."""
    # The op reads on the CPU what moments x has, whichever it is given.
    if training or not _takes(input) or not input.is_cuda or type(eps) is not float:
        return None
    for p in (running_mean, running_var, weight, bias):
        is_given = p is not None
        if not is_given and (p is running_mean or p is running_var):
            return None
        if is_given and (not _is_parameter_of(p, input) or p.shape != input.shape[1:2]):
            return None
    return Call("batch_norm", (eps, weight is None, bias is None), input, (running_mean, running_var, weight, bias))


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
    enable_gqa: Any = False,
) -> Call | None:
    """Of heads that are wider than PyTorch's fast kernels take, among many positions."""
    if attn_mask is not None or dropout_p != 0 or is_causal or enable_gqa or type(scale) not in (float, int, NoneType):
        return None
    for t in (query, key, value):
        if type(t) is not Tensor or not t.is_cuda or t.layout is not torch.strided or t.dim() != 4:
            return None
        if t.dtype is not query.dtype or t.device != query.device or (torch.is_grad_enabled() and t.requires_grad):
            return None
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if torch.is_autocast_enabled("cuda") or not (is_half or accuracy.may_multiply_in_tf32(query)):
        return None
    *batch, length, channels = query.shape
    *_, keys, width = key.shape
    if any(t.shape[:3] != (*batch, keys) for t in (key, value)) or width != channels:
        return None  # broadcast, or refused
    if channels <= WIDEST_HEAD or length * keys < MANY_SCORES or value.numel() == 0:
        return None
    factor = channels**-0.5 if scale is None else float(scale)
    of_rest = query.stride(), key.shape, key.stride(), value.shape, value.stride()
    return Call("attention", (factor, *of_rest), query, (key, value))


def cat_of(takes: Callable[[Any], bool], args: Any, kwargs: Any) -> Call | None:
    """A call of torch.cat of channels_last tensors that ``takes`` allows."""
    if len(args) + len(kwargs) > 2 or kwargs.keys() - {"tensors", "dim", "axis"}:
        return None
    tensors = args[0] if args else kwargs.get("tensors")
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    if not isinstance(tensors, (tuple, list)) or len(tensors) < 2 or type(dim) is not int:
        return None
    if not all(takes(t) and is_dense_channels_last(t) for t in tensors):
        return None
    first, *more = tensors
    rank = first.dim()
    dim = dim + rank if dim < 0 else dim
    if not 0 <= dim < rank:
        return None

    def rest(t: Tensor) -> Any:
        return t.dtype, t.device, t.shape[:dim], t.shape[dim + 1 :]

    if not all(rest(t) == rest(first) for t in more):
        return None
    return Call("cat", (dim, *(t.shape[dim] for t in more)), first, tuple(more))
