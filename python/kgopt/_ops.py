"""What PyTorch must know of the ops beside their kernels: fake kernels, autograd, autocast, vmap and flop formulas.

Schemas and kernels are in the extension. Nothing here computes; gradients are compositions of ops.

The public ops that have a ``_fwd`` twin (``group_norm``, ``group_norm_mean`` and the three pipelines) return one
tensor. When a gradient is needed they dispatch to the twin, which also returns the statistics that its backward reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kgopt import _C, _formulas, torch_private
from kgopt._after_import import after_import
from kgopt._layout import affine_dtype as _affine_dtype
from kgopt._layout import contiguous as _contiguous
from kgopt._layout import is_channels_last as _is_channels_last
from kgopt._layout import memory_format as _format
from kgopt._layout import stats_dtype as _stats_dtype
from kgopt.torch_private import BELOW_AUTOGRAD as _BELOW_AUTOGRAD
from kgopt.torch_private import FORWARD_AD as _FORWARD_AD
from kgopt.torch_private import LEVEL as _LEVEL
from kgopt.torch_private import any_requires_grad as _any_requires_grad
from kgopt.torch_private import are_functorch_transforms_active as _are_functorch_transforms_active
from kgopt.torch_private import is_any_autocast_enabled as _is_any_autocast_enabled
from kgopt.torch_private import is_tracing as _is_tracing
from kgopt.torch_private import len_torch_dispatch_stack as _len_torch_dispatch_stack
from kgopt.torch_private import len_torch_function_stack as _len_torch_function_stack
from kgopt.torch_private import packed, schema_of

_LIB = torch.library.Library("kgopt", "IMPL")
_OPS = torch.ops.kgopt

_CONVS = {"conv2d": (2, False), "conv3d": (3, False), "conv_transpose2d": (2, True), "conv_transpose3d": (3, True)}
_CONV_MEAN = "conv3d_group_norm_mean"
_CONV_RELU_NORM = "conv_transpose3d_relu_group_norm"
_CONV_LSE = "conv2d_group_norm_tanh_hardswish_residual_logsumexp"
_LSE_BACKWARD = "group_norm_tanh_hardswish_residual_logsumexp_backward"
_TWINS = ("group_norm", "group_norm_mean", _CONV_MEAN, _CONV_RELU_NORM, _CONV_LSE)


def _op(name: str) -> Any:
    return getattr(_OPS, name)


def _with_defaults(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword-only arguments with the defaults that the dispatcher leaves out."""
    positional, keywords = list(args), dict(kwargs)
    for i, a in enumerate(schema.arguments):
        if a.kwarg_only:
            keywords.setdefault(a.name, a.default_value)
        elif i >= len(positional):
            positional.append(keywords.pop(a.name) if a.name in keywords else a.default_value)
    return positional, keywords


# ----------------------------------------------------------------------------------------------------------------------
# Shapes and layouts


def _empty(like: Tensor, sizes: Sequence[Any], dtype: torch.dtype | None = None, channels_last: bool = False) -> Tensor:
    return torch.empty(
        sizes,
        dtype=dtype or like.dtype,
        device=like.device,
        memory_format=_format(len(sizes), channels_last),
    )


def _empty_like(x: Tensor) -> Tensor:
    return _empty(x, x.shape, channels_last=_is_channels_last(x))


def _conv_sizes(
    x: Sequence[Any],
    weight: Sequence[Any],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    transposed: bool,
) -> list[Any]:
    """Output sizes of a convolution from those of its input and weight."""
    rank = len(stride)
    if len(x) != rank + 2 or len(weight) != rank + 2:
        raise RuntimeError(f"x has shape {list(x)} and weight {list(weight)}, expected {rank + 2} dimensions of each")
    if (weight[0] if transposed else weight[1] * groups) != x[1]:
        raise RuntimeError(f"weight has shape {list(weight)}, expected it to fit C = {x[1]} with groups = {groups}")
    sizes = [x[0], weight[1] * groups if transposed else weight[0]]
    for i, (s, p, d, o) in enumerate(zip(stride, padding, dilation, output_padding, strict=True)):
        reach = d * (weight[2 + i] - 1)
        if transposed:
            sizes.append((x[2 + i] - 1) * s - 2 * p + reach + o + 1)
        else:
            sizes.append((x[2 + i] + 2 * p - reach - 1) // s + 1)
    return sizes


def _reduced_sizes(sizes: Sequence[Any], dims: Sequence[int], keepdim: bool) -> list[Any]:
    rank = len(sizes)
    reduced = {d % max(rank, 1) for d in dims} if dims else set(range(rank))
    if keepdim:
        return [1 if d in reduced else s for d, s in enumerate(sizes)]
    return [s for d, s in enumerate(sizes) if d not in reduced]


# ----------------------------------------------------------------------------------------------------------------------
# Fake kernels


def _conv_fake(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    transposed: bool,
) -> Tensor:
    sizes = _conv_sizes(x.shape, weight.shape, stride, padding, dilation, output_padding, groups, transposed)
    return _empty(x, sizes, channels_last=_is_channels_last(x) or _is_channels_last(weight))


def _regular_fake(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, *, backend="auto", allow_tf32=None):  # type: ignore[no-untyped-def]
    return _conv_fake(x, weight, stride, padding, dilation, [0] * len(stride), groups, False)


def _transposed_fake(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias=None,
    stride=1,
    padding=0,
    output_padding=0,
    groups=1,
    dilation=1,
    *,
    backend="auto",
    allow_tf32=None,
):
    return _conv_fake(x, weight, stride, padding, dilation, output_padding, groups, True)


def _stats_fake(x: Tensor, num_groups: int, *_: Any) -> tuple[Tensor, Tensor]:
    return tuple(_empty(x, [x.shape[0], num_groups], _stats_dtype(x)) for _ in range(2))  # type: ignore[return-value]


def _affine_grads_fake(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _affine_dtype(x, weight, bias)
    return _empty_like(x), _empty(x, [x.shape[1]], dtype), _empty(x, [x.shape[1]], dtype)


def _group_norm_mean_fwd_fake(x: Tensor, num_groups: int, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = _stats_dtype(x)
    return _empty(x, [x.shape[0]], dtype), _empty(x, [x.shape[0], x.shape[1]], dtype), *_stats_fake(x, num_groups)


def _conv_mean_fwd_fake(  # type: ignore[no-untyped-def]
    x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding, dilation, groups, eps, **_
):
    n, dtype = x.shape[0], _stats_dtype(x)
    return _empty(x, [n], dtype), _empty(x, [n, weight.shape[0]], dtype), *_stats_fake(x, num_groups)


def _conv_relu_norm_fwd_fake(  # type: ignore[no-untyped-def]
    x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding, output_padding, groups, dilation, eps, **_
):
    y = _conv_fake(x, weight, stride, padding, dilation, output_padding, groups, True)
    return y, *_stats_fake(x, num_groups)


def _conv_lse_fwd_fake(  # type: ignore[no-untyped-def]
    x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding, dilation, groups, eps, **_
):
    sizes = _conv_sizes(x.shape, weight.shape, stride, padding, dilation, [0, 0], groups, False)
    return _empty(x, [sizes[0], 1, *sizes[2:]], _stats_dtype(x)), *_stats_fake(x, num_groups)


def _conv_add_fake(  # type: ignore[no-untyped-def]
    x, weight, bias, residual, stride, padding, dilation, output_padding, groups, transposed, divisor, act, **_
):
    return _conv_fake(x, weight, stride, padding, dilation, output_padding, groups, transposed)


def _conv_backward_fake(  # type: ignore[no-untyped-def]
    dy, x, weight, stride, padding, dilation, output_padding, groups, transposed, mask, *, backend, allow_tf32
):
    none = [0]
    return (
        _empty_like(x) if mask[0] else _empty(x, none),
        _empty_like(weight) if mask[1] else _empty(x, none),
        _empty(x, [dy.shape[1]] if mask[2] else none),
    )


def _conv_add_moments_fake(x: Tensor, *args: Any, **_: Any) -> tuple[Tensor, Tensor]:
    y = _conv_add_fake(x, *args)
    return y, _empty(x, [*y.shape[:2], 2], _stats_dtype(x))


def _norm_conv1x1_fake(x, moments, num_groups, gn_weight, gn_bias, eps, act, weight, bias):  # type: ignore[no-untyped-def]
    return _empty(x, [x.shape[0], weight.shape[0], *x.shape[2:]], channels_last=_is_channels_last(x))


def _norm_conv_fake(x: Tensor, *args: Any, **_: Any) -> Tensor:
    _, _, _, _, _, _, weight, _, _, *geometry = args[:15]
    return _conv_fake(x, weight, *geometry)


def _norm_conv_moments_fake(x: Tensor, *args: Any, **_: Any) -> tuple[Tensor, Tensor]:
    y = _norm_conv_fake(x, *args)
    return y, _empty(x, [*y.shape[:2], 2], _stats_dtype(x))


def _spatial_fake(x: Tensor, spatial: Sequence[Any]) -> Tensor:
    return _empty(x, [*x.shape[:2], *spatial], channels_last=_is_channels_last(x))


def _scaled(x: Tensor, factors: Sequence[int], scale: Callable[[Any, int], Any]) -> list[Any]:
    return [scale(s, f) for s, f in zip(x.shape[2:], factors, strict=True)]


def _max_pool_fake(x: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    windows = zip(x.shape[2:], kernel_size, stride, padding, strict=True)
    return _spatial_fake(x, [(size + 2 * p - k) // s + 1 for size, k, s, p in windows])


def _pad_replicate_fake(x: Tensor, pad: Sequence[int]) -> Tensor:
    dims = range(len(pad) // 2 - 1, -1, -1)  # pad has the last dim first
    return _spatial_fake(x, [s + pad[2 * i] + pad[2 * i + 1] for s, i in zip(x.shape[2:], dims, strict=True)])


def _given_every_argument(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake kernel that always gets every argument, as a C++ kernel does, all of them on one device.

    It runs for meta tensors, too, and one of these beside real tensors is enough for that.
    """
    schema = schema_of(_op(name).default)
    names = [a.name for a in schema.arguments if not a.kwarg_only]
    whose = "x" if "x" in names else names[0]

    @functools.wraps(fake)
    def call(*args: Any, **kwargs: Any) -> Any:
        positional, keywords = _with_defaults(schema, args, kwargs)
        device = positional[names.index(whose)].device
        for argument, value in zip(names, positional, strict=True):
            if isinstance(value, Tensor) and value.device != device:
                raise RuntimeError(f"{name}: {argument} is on {value.device}, expected the device of {whose}, {device}")
        return fake(*positional, **keywords)

    return call


def _register_fakes() -> None:
    def register(name: str, fake: Callable[..., Any]) -> None:
        torch.library.register_fake(f"kgopt::{name}", _given_every_argument(name, fake))

    for name, (_, transposed) in _CONVS.items():
        register(name, _transposed_fake if transposed else _regular_fake)
    register("group_stats", _stats_fake)
    register("group_stats_backward", lambda dmean, drstd, x, mean, rstd, num_groups: _empty_like(x))
    register("group_norm", lambda x, *_: _empty_like(x))
    register("group_norm_fwd", lambda x, num_groups, *_: (_empty_like(x), *_stats_fake(x, num_groups)))
    register(
        "group_norm_backward",
        lambda dy, x, mean, rstd, num_groups, weight, bias, act, pre_act: _affine_grads_fake(x, weight, bias),
    )
    register("group_norm_mean", lambda x, *_: _empty(x, [x.shape[0]]))
    register("group_norm_mean_fwd", _group_norm_mean_fwd_fake)
    register(
        "group_norm_mean_backward",
        lambda dout, x, channel_mean, mean, rstd, num_groups, weight: _affine_grads_fake(x, weight),
    )
    register(
        _LSE_BACKWARD,
        lambda dlse, x, lse, mean, rstd, num_groups, weight, bias: _affine_grads_fake(x, weight, bias),
    )
    register("activation", lambda x, act: _empty_like(x))
    register("activation_backward", lambda dy, x, act: _empty_like(x))
    register("conv_add", _conv_add_fake)
    register("conv_backward", _conv_backward_fake)
    register("conv_add_moments", _conv_add_moments_fake)
    register("group_norm_moments", lambda x, *_: _empty_like(x))
    register("group_norm_conv1x1", _norm_conv1x1_fake)
    register("group_norm_conv", _norm_conv_fake)
    register("group_norm_conv_moments", _norm_conv_moments_fake)
    register("upsample_linear", lambda x, residual: _spatial_fake(x, [2 * s for s in x.shape[2:]]))
    register("upsample_linear_backward", lambda dy: _spatial_fake(dy, [s // 2 for s in dy.shape[2:]]))
    register("upsample_nearest", lambda x, factors: _spatial_fake(x, _scaled(x, factors, lambda s, f: s * f)))
    register(
        "upsample_nearest_backward",
        lambda dy, factors: _spatial_fake(dy, _scaled(dy, factors, lambda s, f: s // f)),
    )
    register("pad_replicate", _pad_replicate_fake)
    register("max_pool", _max_pool_fake)
    register("logsumexp", lambda x, dim, keepdim: _empty(x, _reduced_sizes(x.shape, dim, keepdim)))
    register("mean", lambda x, dims, keepdim: _empty(x, _reduced_sizes(x.shape, dims, keepdim)))
    register("logsumexp_backward", _logsumexp_backward_fake)
    register("mean_backward", lambda dy, sizes, dims, keepdim: _empty(dy, sizes))
    register(f"{_CONV_MEAN}_fwd", _conv_mean_fwd_fake)
    register(f"{_CONV_RELU_NORM}_fwd", _conv_relu_norm_fwd_fake)
    register(f"{_CONV_LSE}_fwd", _conv_lse_fwd_fake)
    register(_CONV_MEAN, lambda x, *_, **__: _empty(x, [x.shape[0]]))
    register(_CONV_RELU_NORM, lambda *a, **k: _conv_relu_norm_fwd_fake(*a, **k)[0])
    register(_CONV_LSE, lambda x, *a, **k: _conv_lse_fwd_fake(x, *a, **k)[0].to(x.dtype))


def _logsumexp_backward_fake(dy: Tensor, x: Tensor, y: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    # Where what is kept lies in the order of the result, a channels_last gradient is written as it lies.
    reduced = {d % max(x.dim(), 1) for d in dim} if dim else set(range(x.dim()))
    as_it_lies = 1 in reduced or reduced.issuperset(range(2, x.dim()))
    return _empty(x, x.shape, channels_last=as_it_lies and _is_channels_last(x))


# ----------------------------------------------------------------------------------------------------------------------
# Autograd


_FEW_CHANNELS = 16  # of a contiguous x: more have no kernels of their own in conv_backward
_FEW_PRODUCTS = 96  # of an output value in fp32 that take about as long as a pass over the output, on an H200
# What stands above an op's kernel of a plain tensor.
_ABOVE = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "AutocastCPU", "AutocastCUDA")
_exclude_above = torch_private.exclude(*_ABOVE) if torch_private.HAS_GUARDS else None
_idle: list[Any] = []  # guards to enter again: making one takes as long as entering it
# Names of their own: a small call's time is Python's, attributes of modules included.
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_is_autocast_enabled = torch.is_autocast_enabled
_conv_fp32_precision = torch_private.conv_precision


def _below(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` as if nothing stood above an op's kernel of a plain tensor."""
    if _exclude_above is None:
        return _without_any_autocast(run)

    def call(*args: Any, **keywords: Any) -> Any:
        try:
            guard = _idle.pop()
        except IndexError:
            guard = _exclude_above()
        with guard:
            result = run(*args, **keywords)
        _idle.append(guard)
        return result

    return call


_sharded: tuple[type, Callable[..., Any]] | None = None  # DTensor, and how an op runs on it: kgopt/_sharding.py


def set_sharded(cls: type, call: Callable[..., Any]) -> None:
    """From now on ``call(name, args, keywords)`` is what an op does with arguments of this class."""
    global _sharded
    _sharded = cls, call


def _is_sharded(args: Sequence[Any]) -> bool:
    cls = _sharded[0] if _sharded is not None else ()
    return any([isinstance(a, cls) for a in args])


def _without_any_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """:func:`_below` without guards, of a call that Autograd's kernel has behind it."""

    def call(*args: Any, **keywords: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if _is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return run(*args, **keywords)

    return call


def _in_backward(name: str) -> Callable[..., Any]:
    """An op as a node's backward calls it: where nothing is recorded, without the way through its Autograd kernel."""
    op = _op(name).default
    if _exclude_above is None:
        return op  # type: ignore[no-any-return]
    # Around the op alone: what unpacks saved tensors may compute them again, with gradients.
    below = _below(packed(op))

    def call(*args: Any, **keywords: Any) -> Any:
        # Where the Autograd kernel has something to do.
        if _is_grad_enabled() or _is_compiling() or _are_functorch_transforms_active() or _FORWARD_AD[_LEVEL] >= 0:
            return op(*args, **keywords)
        return below(*args, **keywords)

    return call


_BACKWARD_OPS = (
    "conv_backward",
    "group_stats_backward",
    "group_norm_backward",
    "group_norm_mean_backward",
    _LSE_BACKWARD,
    "activation_backward",
    "logsumexp_backward",
    "mean_backward",
    "upsample_linear_backward",
    "upsample_nearest_backward",
)
_BACKWARD = types.SimpleNamespace(**{name: _in_backward(name) for name in _BACKWARD_OPS})
_group_norm_backward, _conv_backward = _BACKWARD.group_norm_backward, _BACKWARD.conv_backward


def _own_conv_gradients(dy: Tensor, x: Tensor) -> bool:
    """Whether conv_backward may have kernels of its own. ATen's op can be differentiated again, and batched by vmap."""
    if not x.is_cuda or _is_grad_enabled() or _are_functorch_transforms_active():
        return False
    # Dense in one of both formats: the usual cases, and quick questions.
    if not x.is_contiguous():
        if x.is_contiguous(memory_format=torch.channels_last_3d if x.dim() == 5 else torch.channels_last):
            return True
    elif x.shape[-1] > 1 and dy.shape[1] > 1 and dy.shape[-1] > 1 and dy.is_contiguous():
        return x.shape[1] <= _FEW_CHANNELS
    return _is_channels_last(x) or _is_channels_last(dy) or x.shape[1] <= _FEW_CHANNELS


def _conv_gradients(
    needs: Sequence[bool],
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    geometry: tuple[Any, ...],
    allow_tf32: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias: by conv_backward where it has kernels for them, else through ATen.

    ``geometry``: stride, padding, dilation, output_padding, groups, transposed.
    """
    if not (needs[0] or needs[1] or needs[2]):
        return None, None, None
    if dy.dtype is not x.dtype:
        dy = dy.to(x.dtype)
    # A graph that is being compiled runs later, where this switch would have no effect.
    if allow_tf32 is not None and x.is_cuda and not torch.compiler.is_compiling():
        with _formulas.conv_precision(allow_tf32):
            return _any_conv_gradients(needs, dy, x, weight, geometry, allow_tf32, backend)
    return _any_conv_gradients(needs, dy, x, weight, geometry, allow_tf32, backend)


def _aligned(t: Tensor) -> Tensor:
    """At a multiple of 16 bytes: cuDNN has kernels of gradients that fail elsewhere, and with them the CUDA context."""
    return t.clone() if type(t) in _PLAIN and t.data_ptr() % 16 else t


def _any_conv_gradients(needs, dy, x, weight, geometry, allow_tf32, backend):  # type: ignore[no-untyped-def]
    # ATen's op does not keep the precision for a second derivative.
    again = allow_tf32 is not None and x.is_cuda and _is_grad_enabled()
    if again or (backend != "aten" and _own_conv_gradients(dy, x)):
        grads = _conv_backward(dy, x, weight, *geometry, needs, backend=backend, allow_tf32=allow_tf32)
        dx, dweight, dbias = grads
        return dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None
    if weight.dtype is not x.dtype:
        weight = weight.to(x.dtype)
    if x.is_cuda and not _is_compiling():
        dy, x, weight = _aligned(dy), _aligned(x), _aligned(weight)
    stride, padding, dilation, output_padding, groups, transposed = geometry
    # Of the weight, not of dy: x without channels gives a result without channels, to which the bias is not added.
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return torch.ops.aten.convolution_backward.default(
        dy, x, weight, [channels], stride, padding, dilation, transposed, output_padding, groups, needs
    )


class _Defaults:
    """Values of the arguments that a call may leave out."""

    def __init__(self, schema: Any) -> None:
        self.positional = tuple(a.default_value for a in schema.arguments if not a.kwarg_only)
        self.keywords = {a.name: a.default_value for a in schema.arguments if a.kwarg_only}


def _register_backward(name: str, backward: Callable[..., Any], setup: Callable[..., None] | None = None) -> None:
    """The op's Autograd-key kernel: ``setup(ctx, inputs, keywords, output)`` saves, ``backward(ctx, *grads)`` reads.

    torch.library.register_autograd does the same, but its ops cannot be used under torch.func.grad. This one records a
    node at the level that is being differentiated, as a built-in op does, and redispatches to the levels below.
    """
    op = _op(name).default
    below = _below(packed(op))
    redispatch = _below(op.redispatch)
    defaults = _Defaults(schema_of(op))
    # Arguments left at their default are not given to the node; their gradients are None, and so is the last one's.
    nones = (None,) * (len(defaults.positional) + 1)

    def forward(ctx: Any, *args: Any) -> Any:
        keyset, keywords = args[-1]
        args = args[:-1]
        if keyset is None:
            output = below(*args, **keywords)
        elif _are_functorch_transforms_active():
            # Below are other levels of torch.func.grad and jvp: with gradients off, as in any forward, they would see
            # a constant.
            with torch.enable_grad(), torch_private.pass_tangents(True):
                output = redispatch(keyset & _BELOW_AUTOGRAD, *args, **keywords)
        else:
            output = redispatch(keyset & _BELOW_AUTOGRAD, *args, **keywords)
        # No zeros for the gradients of statistics, which nobody differentiates.
        ctx.set_materialize_grads(False)
        if setup is not None:
            if len(args) < len(defaults.positional):
                args += defaults.positional[len(args) :]
            setup(ctx, args, {**defaults.keywords, **keywords} if keywords else defaults.keywords, output)
        return output

    def call_backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None and all(g is None for g in grads):
            return nones
        grads = backward(ctx, *grads)
        return grads if len(grads) == len(nones) else (*grads, *nones[len(grads) :])

    node: Any = type(
        f"Kgopt_{name}",
        (torch_private.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(call_backward)},
    )
    # The engine's thread runs this, to which Python's objects are strange: without the steps of torch's own apply.
    torch_private.set_backward(node, call_backward)
    apply, single_level = node.apply, torch_private.single_level

    def kernel(keyset: Any, *args: Any, **keywords: Any) -> Any:
        if _sharded is not None and _is_sharded(args):
            return _sharded[1](name, args, keywords)
        if (_FORWARD_AD[_LEVEL] >= 0 or _levels_are_hidden()) and _has_tangent(args):
            return _in_forward_mode(name, args, keywords)
        if _is_grad_enabled() and _any_requires_grad(*args):
            if not _are_functorch_transforms_active():
                return apply(*args, (keyset, keywords))
            if _LEVELS_NEED_FORMULAS or (_LOSES_TANGENTS and _FORWARD_AD[_LEVEL] >= 0):
                return _by_formula(name, args, keywords, lambda a: isinstance(a, Tensor) and a.requires_grad)
            with single_level():
                return apply(*args, (keyset, keywords))
        return redispatch(keyset & _BELOW_AUTOGRAD, *args, **keywords)

    def record(args: Any, keywords: dict[str, Any]) -> Any:
        return apply(*args, (None, keywords))

    _AT_AUTOGRAD[name] = record, below
    _LIB.impl(name, torch_private.at_autograd(kernel), "Autograd", with_keyset=True)


# What an op does when the dispatcher has come to Autograd: with the arguments and keywords where a gradient is needed,
# and elsewhere.
_AT_AUTOGRAD: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
_AT_AUTOCAST: dict[str, dict[str, Callable[..., Any]]] = {}  # by device: what it does at autocast


def direct(name: str) -> Callable[..., Any]:
    """The op for callers in Python: spares the dispatcher's way to its Autograd kernel, half the time of a small call.

    For plain tensors, where no mode sees what stands above Autograd; autocast is as if it were off.
    """
    op = _op(name).default
    if _exclude_above is None:
        return op  # type: ignore[no-any-return]
    record, below = _AT_AUTOGRAD[name]

    def call(*args: Any, **keywords: Any) -> Any:
        if _are_functorch_transforms_active() or _is_tracing() or (_sharded is not None and _is_sharded(args)):
            return op(*args, **keywords)
        if _FORWARD_AD[_LEVEL] >= 0 and _has_tangent(args):
            return _in_forward_mode(name, args, keywords)
        if _is_grad_enabled() and _any_requires_grad(*args):
            return record(args, keywords)
        return below(*args, **keywords)

    return call


def without_grad(name: str) -> Callable[..., Any]:
    """As :func:`direct` for callers who know that gradients are off and that nothing looks on."""
    return _op(name).default if _exclude_above is None else _AT_AUTOGRAD[name][1]  # type: ignore[no-any-return]


_PLAIN = (Tensor, torch.nn.Parameter)
# Of arguments that are no tensors of a type of their own; asking by type is quicker than isinstance.
_USUAL = frozenset((*_PLAIN, type(None), bool, int, float, str, list, tuple, torch.Size))


def from_python(name: str) -> Callable[..., Any]:
    """The op as functions of the package call it: past the dispatcher where only autograd and autocast look on."""
    op = _op(name).default
    if _exclude_above is None:
        return op  # type: ignore[no-any-return]
    record, below = _AT_AUTOGRAD[name]
    at_autocast = {device: kernels[name] for device, kernels in _AT_AUTOCAST.items() if name in kernels}

    def call(*args: Any, **keywords: Any) -> Any:
        if (
            _is_compiling()
            or _len_torch_function_stack()
            or _len_torch_dispatch_stack()
            or _are_functorch_transforms_active()
            or _is_tracing()
            or type(args[0]) not in _PLAIN
        ):
            return op(*args, **keywords)
        for a in args:
            if type(a) not in _USUAL and isinstance(a, Tensor):
                return op(*args, **keywords)
        if _is_any_autocast_enabled():
            device = args[0].device.type
            if device in at_autocast and _is_autocast_enabled(device):
                return at_autocast[device](*args, **keywords)
        if _FORWARD_AD[_LEVEL] >= 0 and _has_tangent(args):
            return _in_forward_mode(name, args, keywords)
        if _is_grad_enabled() and _any_requires_grad(*args):
            return record(args, keywords)
        return below(*args, **keywords)

    return call


_LEVELS_NEED_FORMULAS = not torch_private.RECORDS_LEVELS
_LOSES_TANGENTS = not torch_private.SWITCHES_TANGENTS  # of the levels below that of a node


def _levels_are_hidden() -> bool:
    """Whether there may be a level that Python does not count: a graph of Dynamo's enters them by C++ functions."""
    return _is_compiling() or _are_functorch_transforms_active()


def _has_tangent(args: Sequence[Any]) -> bool:
    """At a level of forward mode: whether any argument is differentiated there."""
    return any(map(_tangent, args))


def _tangent(a: Any) -> bool:
    return isinstance(a, Tensor) and a.is_floating_point() and forward_ad.unpack_dual(a, level=0).tangent is not None


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """The dtypes of an op's arguments are settled before its formula runs."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _by_formula(name: str, args: Sequence[Any], keywords: dict[str, Any], varies: Callable[[Any], bool]) -> Any:
    positional, keywords = _with_defaults(schema_of(_op(name).default), args, keywords)
    with _without_autocast():
        return _formulas.formula(name, positional, keywords, lambda i: varies(positional[i]))


def _in_forward_mode(name: str, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """The op of dual numbers. A tangent that a kernel dropped would be a derivative of zero."""
    return _by_formula(name, args, keywords, _tangent)


def _vector_jacobian(
    name: str, args: list[Any], keywords: dict[str, Any], wanted: Sequence[int], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of the arguments ``wanted``, None for all others, from those of the op's results; by its formula.

    They can be differentiated again where grad mode is on.
    """

    def run(*tensors: Tensor) -> list[Tensor]:
        given = list(args)
        for i, t in zip(wanted, tensors, strict=True):
            given[i] = t
        results = _formulas.formula(name, given, keywords, lambda i: i in wanted)
        results = (results,) if isinstance(results, Tensor) else results
        return [r for r, g in zip(results, grads, strict=True) if g is not None]

    cotangents = [g for g in grads if g is not None]
    tensors = [args[i] for i in wanted]
    with _without_autocast():
        if _are_functorch_transforms_active():
            found = torch.func.vjp(run, *tensors)[1](cotangents)
        else:
            found = _pull(run, tensors, cotangents)
    gradients: list[Tensor | None] = [None] * len(args)
    for i, gradient in zip(wanted, found, strict=True):
        gradients[i] = gradient
    return gradients


def _pull(
    run: Callable[..., list[Tensor]], tensors: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> Sequence[Tensor]:
    """torch.func.vjp, that hooks on saved tensors may stand around."""
    again = _is_grad_enabled()
    with torch.enable_grad():
        # Aliases: one argument may be computed from another, and the way between them is not this op's. Those that do
        # not require a gradient are what torch.func.vjp left behind.
        aliases = [t.view_as(t) for t in tensors]
        aliases = [a if a.requires_grad else a.detach().requires_grad_() for a in aliases]
        pairs = [(y, g) for y, g in zip(run(*aliases), cotangents, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(t) for t in tensors]
    results, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(results, aliases, grads, create_graph=again, allow_unused=True, materialize_grads=True)


def _needs(ctx: Any, *positions: int) -> tuple[bool, ...]:
    """Which arguments need a gradient; those left at their default are not in needs_input_grad at all."""
    needs = ctx.needs_input_grad
    return tuple(i < len(needs) and needs[i] for i in positions)


def _register_conv_autograd(name: str, rank: int, transposed: bool) -> None:
    zeros = [0] * rank

    def setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
        if transposed:
            x, weight, _, stride, padding, output_padding, groups, dilation = inputs
        else:
            x, weight, _, stride, padding, dilation, groups = inputs
            output_padding = zeros
        ctx.geometry = stride, padding, dilation, output_padding, groups, transposed
        ctx.options = keywords["allow_tf32"], keywords["backend"]
        ctx.save_for_backward(x, weight)

    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if len(needs) == 2:  # without an argument for the bias
            needs = (*needs, False)
        return _conv_gradients(needs, dy, x, weight, ctx.geometry, *ctx.options)

    _register_backward(name, backward, setup)


def _norm_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, groups, weight, bias, _, act, pre_act = inputs
    ctx.options = groups, act, pre_act
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, bias, mean, rstd)


def _norm_backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    groups, act, pre_act = ctx.options
    dx, dweight, dbias = _group_norm_backward(dy, x, mean, rstd, groups, weight, bias, act, pre_act)
    if weight is None or bias is None:  # else a gradient that nobody asked for is dropped by the engine
        dweight, dbias = _affine(ctx, (2, 3), dweight, dbias)
    return dx, None, dweight, dbias, None, None, None, None


def _affine(ctx: Any, positions: tuple[int, int], dweight: Tensor, dbias: Tensor) -> tuple[Tensor | None, ...]:
    needs, (weight, bias) = ctx.needs_input_grad, positions
    given = len(needs)
    return dweight if weight < given and needs[weight] else None, dbias if bias < given and needs[bias] else None


def _norm_mean_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, ctx.num_groups, weight, bias, _ = inputs
    _, channel_mean, mean, rstd = output
    ctx.mark_non_differentiable(channel_mean, mean, rstd)
    ctx.save_for_backward(x, weight, bias, channel_mean, mean, rstd)


def _reaching(bias: Tensor | None, dout: Tensor) -> Tensor:
    """dout. With a graph it also depends on the bias, by zeros, as in PyTorch's second derivative.

    Else the bias had no gradient there, and torch.autograd.grad of a penalty for all parameters were an error.
    """
    return dout if bias is None or not _is_grad_enabled() else dout + bias[:0].sum().to(dout.dtype)


def _norm_mean_backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
    x, weight, bias, channel_mean, mean, rstd = ctx.saved_tensors
    dout = _reaching(bias, dout)
    dx, dweight, dbias = _BACKWARD.group_norm_mean_backward(dout, x, channel_mean, mean, rstd, ctx.num_groups, weight)
    return dx, None, *_affine(ctx, (2, 3), dweight, dbias)


def _stats_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, ctx.num_groups, _ = inputs
    ctx.save_for_backward(x, *output)


def _stats_backward(ctx: Any, dmean: Tensor | None, drstd: Tensor | None) -> Any:
    x, mean, rstd = ctx.saved_tensors
    dmean = torch.zeros_like(mean) if dmean is None else dmean
    drstd = torch.zeros_like(rstd) if drstd is None else drstd
    return (_BACKWARD.group_stats_backward(dmean, drstd, x, mean, rstd, ctx.num_groups),)


# Derivatives for which the result spares evaluating the function again. On CUDA it is reading that takes the time.
_FROM_RESULT = {"tanh": torch.ops.aten.tanh_backward, "sigmoid": torch.ops.aten.sigmoid_backward}


def _activation_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, ctx.act = inputs
    ctx.from_result = _FROM_RESULT.get(ctx.act) if x.is_cpu else None
    ctx.save_for_backward(x if ctx.from_result is None else output)


def _activation_backward(ctx: Any, dy: Tensor) -> Any:
    (saved,) = ctx.saved_tensors
    if ctx.from_result is not None:
        return (ctx.from_result(dy, saved),)
    return (_BACKWARD.activation_backward(dy, saved, ctx.act),)


def _conv_add_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, weight, bias, residual, *geometry, ctx.divisor, ctx.act = inputs
    ctx.geometry = tuple(geometry)
    needed = () if ctx.act == "none" else (bias, residual)  # for the activations' argument
    ctx.save_for_backward(x, weight, *needed)


def _conv_add_backward(ctx: Any, dy: Tensor) -> Any:
    x, weight, *more = ctx.saved_tensors
    if more:
        y = _OPS.conv_add(x, weight, *more, *ctx.geometry, ctx.divisor)
        dy = _BACKWARD.activation_backward(dy, y, ctx.act)
    dy = dy if ctx.divisor == 1 else dy / ctx.divisor
    dx, dweight, dbias = _conv_gradients(_needs(ctx, 0, 1, 2), dy, x, weight, ctx.geometry)
    return dx, dweight, dbias, dy if _needs(ctx, 3)[0] else None


def _nearest_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    ctx.factors = inputs[1]


def _norm_conv_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, _, ctx.num_groups, gn_weight, gn_bias, ctx.eps, ctx.gn_act, weight, bias, residual, *geometry = inputs
    *ctx.geometry, ctx.divisor, ctx.act = geometry
    needed = () if ctx.act == "none" else (bias, residual)  # for the activations' argument
    ctx.save_for_backward(x, gn_weight, gn_bias, weight, *needed)


def _norm_conv_moments_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    _norm_conv_setup(ctx, inputs, keywords, output)
    ctx.mark_non_differentiable(output[1])


def _norm_conv_backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
    """What the convolution reads is computed again, and for activations behind it what it gave."""
    x, gn_weight, gn_bias, weight, *more = ctx.saved_tensors
    norm, z = (ctx.num_groups, gn_weight, gn_bias), x
    if ctx.num_groups:
        z, mean, rstd = _OPS.group_norm_fwd(x, *norm, ctx.eps, ctx.gn_act, "none")
    if more:
        y = _OPS.conv_add(z, weight, *more, *ctx.geometry, ctx.divisor)
        dy = _BACKWARD.activation_backward(dy, y, ctx.act)
    dy = dy if ctx.divisor == 1 else dy / ctx.divisor
    needs: Any = (any(_needs(ctx, 0, 3, 4)), *_needs(ctx, 7, 8))
    dz, dweight, dbias = _conv_gradients(needs, dy, z, weight, tuple(ctx.geometry))
    dx, dgamma, dbeta = dz, None, None
    if dz is not None and ctx.num_groups:
        dx, dgamma, dbeta = _group_norm_backward(dz, x, mean, rstd, *norm, ctx.gn_act, "none")
        dgamma, dbeta = _affine(ctx, (3, 4), dgamma, dbeta)
    return dx, None, None, dgamma, dbeta, None, None, dweight, dbias, dy if _needs(ctx, 9)[0] else None


def _norm_conv1x1_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, _, ctx.num_groups, gn_weight, gn_bias, ctx.eps, ctx.act, weight, _ = inputs
    ctx.save_for_backward(x, gn_weight, gn_bias, weight)


def _norm_conv1x1_backward(ctx: Any, dy: Tensor) -> Any:
    """What the convolution reads is computed again."""
    x, gn_weight, gn_bias, weight = ctx.saved_tensors
    groups, z = ctx.num_groups, x
    if groups:
        z, mean, rstd = _OPS.group_norm_fwd(x, groups, gn_weight, gn_bias, ctx.eps, ctx.act, "none")
    rank = x.dim() - 2
    ones, zeros = [1] * rank, [0] * rank
    needs: Any = (any(_needs(ctx, 0, 3, 4)), *_needs(ctx, 7, 8))
    dz, dweight, dbias = _conv_gradients(needs, dy, z, weight, (ones, zeros, ones, zeros, 1, False))
    if not groups or dz is None:
        return dz, None, None, None, None, None, None, dweight, dbias
    dx, dgamma, dbeta = _BACKWARD.group_norm_backward(dz, x, mean, rstd, groups, gn_weight, gn_bias, ctx.act, "none")
    return dx, None, None, *_affine(ctx, (3, 4), dgamma, dbeta), None, None, dweight, dbias


def _conv_add_moments_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    _conv_add_setup(ctx, inputs, keywords, output)
    ctx.mark_non_differentiable(output[1])


def _norm_moments_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, _, ctx.num_groups, weight, bias, ctx.eps, ctx.act = inputs
    ctx.save_for_backward(x, weight, bias)


def _norm_moments_backward(ctx: Any, dy: Tensor) -> Any:
    """That of a group_norm of x: the moments are x's."""
    x, weight, bias = ctx.saved_tensors
    mean, rstd = _OPS.group_stats(x, ctx.num_groups, ctx.eps)
    more = (ctx.num_groups, weight, bias, ctx.act, "none")
    dx, dweight, dbias = _BACKWARD.group_norm_backward(dy, x, mean, rstd, *more)
    return dx, None, None, *_affine(ctx, (3, 4), dweight, dbias)


def _upsample_backward(ctx: Any, dy: Tensor) -> Any:
    x, residual = _needs(ctx, 0, 1)
    return _BACKWARD.upsample_linear_backward(dy) if x else None, dy if residual else None


def _pad_replicate_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, ctx.pad = inputs
    ctx.sizes = x.shape


def _pad_replicate_backward(ctx: Any, dy: Tensor) -> Any:
    """Each position is the sum of those that it was repeated at, dim by dim: ATen's own adds them with atomics."""
    dtype = dy.dtype
    if dtype in (torch.bfloat16, torch.float16):
        dy = dy.float()
    for i in range(len(ctx.pad) // 2):
        before, after = ctx.pad[2 * i : 2 * i + 2]
        dim, size = dy.dim() - 1 - i, ctx.sizes[-1 - i]
        if size == 1:
            dy = dy.sum(dim, keepdim=True)
        elif before or after:
            first = dy.narrow(dim, 0, before + 1).sum(dim, keepdim=True)
            last = dy.narrow(dim, before + size - 1, after + 1).sum(dim, keepdim=True)
            dy = torch.cat((first, dy.narrow(dim, before + 1, size - 2), last), dim)
    return dy.to(dtype), None


def _max_pool_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, *ctx.window = inputs
    ctx.save_for_backward(x)


def _max_pool_backward(ctx: Any, dy: Tensor) -> Any:
    """Where each largest value was is found again: the forward is for inference."""
    (x,) = ctx.saved_tensors
    window = (*ctx.window, [1] * len(ctx.window[0]), False)
    aten = torch.ops.aten
    if x.dim() == 5:
        _, indices = aten.max_pool3d_with_indices(x, *window)
        return (aten.max_pool3d_with_indices_backward(dy, x, *window, indices),)
    _, indices = aten.max_pool2d_with_indices(x, *window)
    return (aten.max_pool2d_with_indices_backward(dy, x, *window, indices),)


def _logsumexp_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, ctx.dim, ctx.keepdim = inputs
    ctx.save_for_backward(x, output)


def _mean_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, ctx.dims, ctx.keepdim = inputs
    ctx.sizes = x.shape


class _FusedContext:
    """The arguments of a pipeline op, unpacked in its setup_context."""

    @staticmethod
    def setup(ctx: Any, inputs: Any, keywords: Any, transposed: bool) -> None:
        ctx.num_groups, ctx.stride, ctx.padding, rest = inputs[3], inputs[6], inputs[7], inputs[8:]
        if transposed:
            ctx.output_padding, ctx.groups, ctx.dilation, ctx.eps = rest
        else:
            ctx.dilation, ctx.groups, ctx.eps = rest
            ctx.output_padding = [0] * len(ctx.stride)
        ctx.transposed = transposed
        ctx.backend = keywords["backend"]
        ctx.allow_tf32 = keywords["allow_tf32"]

    @staticmethod
    def leaves_out_output(ctx: Any, x: Tensor, weight: Tensor) -> bool:
        """Whether the forward may have left out what its convolution gives: choose_conv's rule."""
        if not x.is_cuda or ctx.groups != 1 or ctx.transposed or ctx.backend == "aten":
            return False
        return ctx.backend != "auto" or x.shape[1] <= 16 or (x.shape[1] <= 32 and weight.shape[0] <= 64)

    @staticmethod
    def inputs(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x and weight for what the backward computes again: contiguous where kernels of few channels do.

        They are the faster ones even with x and its gradient copied.
        """
        if not _FusedContext.leaves_out_output(ctx, x, weight):
            return x, weight
        return _contiguous(x), _contiguous(weight)

    @staticmethod
    def recompute(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution's output, computed again instead of kept since the forward.

        Statistics are those of operands rounded to TF32, and only fit to an output of the same ones. The own kernels of
        contiguous tensors round, too, where cuDNN may not take TF32 at all, and those of channels_last tensors cut x
        off, which makes it 2^-12 smaller in the mean.
        """
        tf32 = _conv_tf32_allowed() if ctx.allow_tf32 is None else ctx.allow_tf32
        own = x.dtype is torch.float32 and _FusedContext.leaves_out_output(ctx, x, weight)
        if not tf32:  # where cuDNN's pass for the bias takes more than its fp32 products win
            own = own and bias is not None and weight.numel() <= weight.shape[0] * _FEW_PRODUCTS
        options = {"backend": "kgopt" if own else ctx.backend, "allow_tf32": ctx.allow_tf32}
        if ctx.transposed:
            return _OPS.conv_transpose3d(
                x, weight, bias, ctx.stride, ctx.padding, ctx.output_padding, ctx.groups, ctx.dilation, **options
            )
        conv = _OPS.conv2d if len(ctx.stride) == 2 else _OPS.conv3d
        return conv(x, weight, bias, ctx.stride, ctx.padding, ctx.dilation, ctx.groups, **options)

    @staticmethod
    def few_values(ctx: Any, c: Tensor) -> bool:
        """Whether statistics are to be those of the convolution computed again, not the forward's.

        Its rounding is another one. In a group of a few values hardly anything is left of a gradient once its parts
        along 1 and along the normalized values are taken off: the difference of the roundings would be most of it.
        """
        return 0 < c.numel() < 16 * c.shape[0] * ctx.num_groups

    @staticmethod
    def gradients(  # type: ignore[no-untyped-def]
        ctx: Any, dc: Tensor, x: Tensor, weight: Tensor, dweight: Tensor, dbias: Tensor, like=(None, None)
    ) -> Any:
        """``like``: tensors as which the first two gradients are to lie."""
        geometry = ctx.stride, ctx.padding, ctx.dilation, ctx.output_padding, ctx.groups, ctx.transposed
        needs = _needs(ctx, 0, 1, 2)
        *both, third = _conv_gradients(needs, dc, x, weight, geometry, ctx.allow_tf32, ctx.backend)
        for i, (gradient, given) in enumerate(zip(both, like, strict=True)):
            if gradient is not None and given is not None and _is_channels_last(given):
                both[i] = gradient.contiguous(memory_format=_format(given.dim(), True))
        return *both, third, None, *_affine(ctx, (4, 5), dweight, dbias)


def _conv_mean_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    _FusedContext.setup(ctx, inputs, keywords, transposed=False)
    _, channel_mean, mean, rstd = output
    ctx.mark_non_differentiable(channel_mean, mean, rstd)
    ctx.save_for_backward(inputs[0], inputs[1], inputs[2], inputs[4], inputs[5], channel_mean, mean, rstd)


def _conv_mean_backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
    x, weight, bias, gn_weight, gn_bias, channel_mean, mean, rstd = ctx.saved_tensors
    dout = _reaching(gn_bias, dout)
    planes = _FusedContext.inputs(ctx, x, weight)
    c = _FusedContext.recompute(ctx, *planes, bias)
    if _FusedContext.few_values(ctx, c):
        channel_mean = c.to(mean.dtype).flatten(2).mean(2)
        mean, rstd = _OPS.group_stats(c, ctx.num_groups, ctx.eps)
    dc, dweight, dbias = _BACKWARD.group_norm_mean_backward(
        dout, c, channel_mean, mean, rstd, ctx.num_groups, gn_weight
    )
    return _FusedContext.gradients(ctx, dc, *planes, dweight, dbias, like=(x, weight))


def _conv_relu_norm_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    _FusedContext.setup(ctx, inputs, keywords, transposed=True)
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(inputs[0], inputs[1], inputs[2], inputs[4], inputs[5], mean, rstd)


def _conv_relu_norm_backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, weight, bias, gn_weight, gn_bias, mean, rstd = ctx.saved_tensors
    c = _FusedContext.recompute(ctx, x, weight, bias)
    if _FusedContext.few_values(ctx, c):
        mean, rstd = _OPS.group_stats(c.relu(), ctx.num_groups, ctx.eps)
    dc, dweight, dbias = _BACKWARD.group_norm_backward(
        dy, c, mean, rstd, ctx.num_groups, gn_weight, gn_bias, "none", "relu"
    )
    return _FusedContext.gradients(ctx, dc, x, weight, dweight, dbias)


def _conv_lse_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    _FusedContext.setup(ctx, inputs, keywords, transposed=False)
    lse, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(inputs[0], inputs[1], inputs[2], inputs[4], inputs[5], lse, mean, rstd)


def _conv_lse_backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
    x, weight, bias, gn_weight, gn_bias, lse, mean, rstd = ctx.saved_tensors
    planes = _FusedContext.inputs(ctx, x, weight)
    c = _FusedContext.recompute(ctx, *planes, bias)
    if _FusedContext.few_values(ctx, c):
        mean, rstd = _OPS.group_stats(c, ctx.num_groups, ctx.eps)
    backward = getattr(_BACKWARD, _LSE_BACKWARD)
    dc, dweight, dbias = backward(dout, c, lse, mean, rstd, ctx.num_groups, gn_weight, gn_bias)
    return _FusedContext.gradients(ctx, dc, *planes, dweight, dbias, like=(x, weight))


def _lse_backward_in_steps(  # type: ignore[no-untyped-def]
    dlse, x, lse, mean, rstd, num_groups, weight=None, bias=None
):
    """The CPU's, with tensors of x's size in between."""
    for name, t in (("dlse", dlse), ("lse", lse)):
        expected = [x.shape[0], 1, *x.shape[2:]]
        if list(t.shape) != expected:
            raise RuntimeError(f"{_LSE_BACKWARD}: {name} has shape {list(t.shape)}, expected {expected}")
        if t.dtype != _stats_dtype(x):
            kinds = [str(d).removeprefix("torch.") for d in (t.dtype, _stats_dtype(x))]
            raise RuntimeError(
                f"{_LSE_BACKWARD}: {name} has dtype {kinds[0]}, expected the dtype of statistics, {kinds[1]}"
            )
    act, groups, channels = "tanh+hardswish", [x.shape[0], num_groups, 1], x.shape[1] // num_groups
    positions = math.prod(x.shape[2:])  # by name: -1 says nothing of a tensor without elements
    grouped = x.to(lse.dtype).reshape(*groups[:2], channels * positions)
    u = ((grouped - mean.view(groups)) * rstd.view(groups)).reshape(x.shape[0], num_groups * channels, positions)
    if weight is not None:
        u = u * weight.to(u.dtype).view(1, -1, 1)
    if bias is not None:
        u = u + bias.to(u.dtype).view(1, -1, 1)
    residual = x.to(lse.dtype) + _OPS.activation(u, act).reshape(x.shape)
    shift = lse.masked_fill(lse == -math.inf, 0)  # x may not be, to the last bit, what lse is of: its own sum counts
    residual = residual - shift
    dresidual = _OPS.logsumexp_backward(dlse, residual, _OPS.logsumexp(residual, [1], True), [1], True).to(x.dtype)
    dx, dweight, dbias = _OPS.group_norm_backward(dresidual, x, mean, rstd, num_groups, weight, bias, act, "none")
    return dx + dresidual, dweight, dbias


def _conv_backward_setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    *tensors, stride, padding, dilation, output_padding, groups, transposed, _ = inputs
    ctx.geometry = stride, padding, dilation, output_padding, groups, transposed
    ctx.options = keywords
    ctx.save_for_backward(*tensors)


def _conv_backward_backward(ctx: Any, ddx: Tensor | None, ddweight: Tensor | None, ddbias: Tensor | None) -> Any:
    """A convolution's gradients are linear in dy, x and weight: what is left are convolutions of the same precision."""
    dy, x, weight = ctx.saved_tensors
    needs_dy, needs_x, needs_weight = _needs(ctx, 0, 1, 2)
    ddy = dx = dweight = None
    if needs_dy:
        parts = []
        if ddx is not None:
            parts.append(_formulas.convolution(ddx, weight, None, *ctx.geometry, **ctx.options))
        if ddweight is not None:
            parts.append(_formulas.convolution(x, ddweight, None, *ctx.geometry, **ctx.options))
        if ddbias is not None:
            parts.append(ddbias.view(1, -1, *[1] * (dy.dim() - 2)).expand_as(dy))
        ddy = functools.reduce(operator.add, parts)
    options = ctx.options["allow_tf32"], ctx.options["backend"]
    if needs_x and ddweight is not None:
        dx, _, _ = _conv_gradients((True, False, False), dy, x, ddweight, ctx.geometry, *options)
    if needs_weight and ddx is not None:
        _, dweight, _ = _conv_gradients((False, True, False), dy, ddx, weight, ctx.geometry, *options)
    return ddy, dx, dweight


def _register_second_derivative(name: str) -> None:
    """Autograd of a backward op: its kernel forward, backward the vector-Jacobian product of its formula."""

    def setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
        ctx.tensors = [i for i, a in enumerate(inputs) if isinstance(a, Tensor)]
        ctx.rest = [None if isinstance(a, Tensor) else a for a in inputs]
        ctx.keywords = keywords
        ctx.save_for_backward(*(inputs[i] for i in ctx.tensors))

    def backward(ctx: Any, *grads: Any) -> Any:
        args = list(ctx.rest)
        for i, t in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            args[i] = t
        wanted = [i for i in ctx.tensors if _needs(ctx, i)[0]]
        return _vector_jacobian(name, args, ctx.keywords, wanted, grads)

    _register_backward(name, backward, setup)


def _register_autograd() -> None:
    for name, (rank, transposed) in _CONVS.items():
        _register_conv_autograd(name, rank, transposed)

    register = _register_backward
    register("group_stats", _stats_backward, _stats_setup)
    register("group_norm_fwd", _norm_backward, _norm_setup)
    register("group_norm_mean_fwd", _norm_mean_backward, _norm_mean_setup)
    register("activation", _activation_backward, _activation_setup)
    register("conv_add", _conv_add_backward, _conv_add_setup)
    register("conv_add_moments", lambda ctx, dy, _: _conv_add_backward(ctx, dy), _conv_add_moments_setup)
    register("group_norm_moments", _norm_moments_backward, _norm_moments_setup)
    register("group_norm_conv1x1", _norm_conv1x1_backward, _norm_conv1x1_setup)
    register("group_norm_conv", _norm_conv_backward, _norm_conv_setup)
    register("group_norm_conv_moments", _norm_conv_backward, _norm_conv_moments_setup)
    register("upsample_linear", _upsample_backward)
    register(
        "upsample_nearest",
        lambda ctx, dy: (_BACKWARD.upsample_nearest_backward(dy, ctx.factors), None),
        _nearest_setup,
    )
    register("pad_replicate", _pad_replicate_backward, _pad_replicate_setup)
    register("max_pool", _max_pool_backward, _max_pool_setup)
    register(
        "logsumexp",
        lambda ctx, dy: (_BACKWARD.logsumexp_backward(dy, *ctx.saved_tensors, ctx.dim, ctx.keepdim),),
        _logsumexp_setup,
    )
    register(
        "mean",
        lambda ctx, dy: (_BACKWARD.mean_backward(dy, ctx.sizes, ctx.dims, ctx.keepdim),),
        _mean_setup,
    )
    register(f"{_CONV_MEAN}_fwd", _conv_mean_backward, _conv_mean_setup)
    register(f"{_CONV_RELU_NORM}_fwd", _conv_relu_norm_backward, _conv_relu_norm_setup)
    register(f"{_CONV_LSE}_fwd", _conv_lse_backward, _conv_lse_setup)
    register("conv_backward", _conv_backward_backward, _conv_backward_setup)
    for name in _BACKWARD_OPS:
        if name != "conv_backward":
            _register_second_derivative(name)
    for name in _TWINS:
        _register_twin(name)
    _LIB.impl(_LSE_BACKWARD, _lse_backward_in_steps, "CPU")


def _conv_mean_in_steps(  # type: ignore[no-untyped-def]
    x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding, dilation, groups, eps, **options
):
    c = _OPS.conv3d(x, weight, bias, stride, padding, dilation, groups, **options)
    return _OPS.group_norm_mean(c, num_groups, gn_weight, gn_bias, eps)


def _conv_relu_norm_in_steps(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    num_groups,
    gn_weight,
    gn_bias,
    stride,
    padding,
    output_padding,
    groups,
    dilation,
    eps,
    **options,
):
    c = _OPS.conv_transpose3d(x, weight, bias, stride, padding, output_padding, groups, dilation, **options)
    return _OPS.group_norm_fwd(c, num_groups, gn_weight, gn_bias, eps, "none", "relu")[0]


def _conv_lse_in_steps(  # type: ignore[no-untyped-def]
    x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding, dilation, groups, eps, **options
):
    c = _OPS.conv2d(x, weight, bias, stride, padding, dilation, groups, **options)
    y = _OPS.group_norm_fwd(c, num_groups, gn_weight, gn_bias, eps, "tanh+hardswish")[0]
    return _OPS.logsumexp(c.to(_stats_dtype(c)) + y, [1], True).to(x.dtype)


# On the CPU a convolution is what takes the time and memory is cheap: where a gradient is needed, its output is stored
# rather than computed again. So it is on CUDA where the chain stores a tensor of that size anyway: then computing it
# again saves no memory at the peak, and the wide convolution costs more than writing and reading its output.
_STORED_ON_CUDA = (_CONV_RELU_NORM,)
_IN_STEPS: dict[str, Callable[..., Tensor]] = {
    _CONV_MEAN: _conv_mean_in_steps,
    _CONV_RELU_NORM: _conv_relu_norm_in_steps,
    _CONV_LSE: _conv_lse_in_steps,
}


def _register_twin(name: str) -> None:
    """A public op's Autograd-key kernel: its _fwd twin where a gradient is needed, else its own kernel."""
    op, twin, in_steps = _op(name).default, _op(f"{name}_fwd").default, _IN_STEPS.get(name)
    record_twin, _ = _AT_AUTOGRAD[f"{name}_fwd"]
    below = _below(packed(op))
    redispatch = _below(op.redispatch)

    def record(args: Any, kwargs: dict[str, Any]) -> Tensor:
        if in_steps is not None and (args[0].is_cpu or name in _STORED_ON_CUDA):
            positional, keywords = _with_defaults(schema_of(op), args, kwargs)
            return in_steps(*positional, **keywords)
        if _exclude_above is None or _are_functorch_transforms_active() or _is_tracing():
            y: Tensor = twin(*args, **kwargs)[0]
        else:
            y = record_twin(args, kwargs)[0]
        return y if y.dtype is args[0].dtype else y.to(args[0].dtype)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _sharded is not None and _is_sharded(args):
            return _sharded[1](name, args, kwargs)
        if (_FORWARD_AD[_LEVEL] >= 0 or _levels_are_hidden()) and _has_tangent(args):
            return _in_forward_mode(name, args, kwargs)
        if _is_grad_enabled() and _any_requires_grad(*args):
            return record(args, kwargs)
        return below(*args, **kwargs)

    def kernel_without_guards(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if (_is_grad_enabled() and _any_requires_grad(*args)) or (_sharded is not None and _is_sharded(args)):
            return kernel(*args, **kwargs)
        if (_FORWARD_AD[_LEVEL] >= 0 or _levels_are_hidden()) and _has_tangent(args):
            return _in_forward_mode(name, args, kwargs)
        return redispatch(keyset & _BELOW_AUTOGRAD, *args, **kwargs)

    _AT_AUTOGRAD[name] = record, below
    if _exclude_above is None:
        _LIB.impl(name, torch_private.at_autograd(kernel_without_guards), "Autograd", with_keyset=True)
    else:
        _LIB.impl(name, kernel, "Autograd")


# ----------------------------------------------------------------------------------------------------------------------
# Autocast


def _cast(t: Any, dtype: torch.dtype) -> Any:
    if not isinstance(t, Tensor) or t.dtype is dtype:
        return t
    return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t


def _low_convolution(name: str) -> Callable[..., Any]:
    """x, weight and bias (of a pipeline: the convolution's) in the autocast dtype, the rest as it is."""
    op = direct(name)
    return lambda dtype, args, kwargs: op(*(_cast(a, dtype) for a in args[:3]), *args[3:], **kwargs)


def autocast_convolution(dtype: torch.dtype, x: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """What a convolution is given under autocast.

    fp32 weights stay: the op rounds them where it reads them, to half types alone, and their gradients are fp32.
    """
    x = _cast(x, dtype)
    if weight.dtype is torch.float32 and (bias is None or bias.dtype is torch.float32) and dtype.itemsize == 2:
        return x, weight, bias
    return x, _cast(weight, dtype), _cast(bias, dtype)


def _convolution_low(name: str) -> Callable[..., Any]:
    op = direct(name)
    return lambda dtype, args, kwargs: op(*autocast_convolution(dtype, *args[:3]), *args[3:], **kwargs)


def _conv_add_low(name: str) -> Callable[..., Any]:
    """The residual too: a wider one is a sum in its own dtype, which is not this op's."""
    op = direct(name)
    return lambda dtype, args, kwargs: op(*(_cast(a, dtype) for a in args[:4]), *args[4:], **kwargs)


def _norm_conv1x1_low(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """The norm in fp32, the convolution in the autocast dtype: two ops."""
    x, _, groups, gn_weight, gn_bias, eps, act, weight, bias = args
    if groups:
        x, gn_weight, gn_bias = (_cast(t, torch.float32) for t in (x, gn_weight, gn_bias))
        x = _OPS.group_norm(x, groups, gn_weight, gn_bias, eps, act)
    return _OPS.group_norm_conv1x1(
        _cast(x, dtype), None, 0, None, None, 0.0, "none", _cast(weight, dtype), _cast(bias, dtype)
    )


def _norm_conv_low(name: str) -> Callable[..., Any]:
    """The convolution in the autocast dtype, and the norm in x's, where that is float32 or the same.

    Whatever a norm reads and writes, its arithmetic is float32: of a half x it gives the convolution the values that a
    float32 norm would, without copies.
    """
    op, conv = direct(name), _op("conv_add_moments" if name.endswith("moments") else "conv_add")

    def rule(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
        x, moments, groups, gn_weight, gn_bias, eps, act, *tensors = args[:10]
        tensors = [_cast(t, dtype) for t in tensors]
        if not groups or x.dtype is dtype or x.dtype is torch.float64:
            return op(_cast(x, dtype), *args[1:7], *tensors, *args[10:], **kwargs)
        affine = (groups, _cast(gn_weight, torch.float32), _cast(gn_bias, torch.float32), eps, act)
        x = _cast(x, torch.float32)
        z = _OPS.group_norm(x, *affine) if moments is None else _OPS.group_norm_moments(x, moments, *affine)
        return conv(_cast(z, dtype), *tensors, *args[10:], **kwargs)

    return rule


def _in_fp32(name: str) -> Callable[..., Any]:
    op = direct(name)
    return lambda dtype, args, kwargs: op(*(_cast(a, torch.float32) for a in args), **kwargs)


def _softplus_in_fp32(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """softplus is the one activation on torch's fp32 list; what follows it in a chain is fp32 too."""
    x, act = args
    return _OPS.activation(_cast(x, torch.float32) if "softplus" in act else x, act)


def _fp32_twin(name: str, low: int) -> Callable[..., Any]:
    """The first ``low`` arguments in the autocast dtype, the norm's parameters and the result in fp32."""
    twin = _op(f"{name}_fwd")

    def rule(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
        return twin(*(_cast(a, dtype) for a in args[:low]), *(_cast(a, torch.float32) for a in args[low:]), **kwargs)[0]

    return rule


def _norm_mean_in_fp32(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """The fp32 result of a half x needs no fp32 copy of x."""
    x, *rest = args
    return _OPS.group_norm_mean_fwd(x, *(_cast(a, torch.float32) for a in rest), **kwargs)[0]


def _relu_norm_in_fp32(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """The convolution in the autocast dtype, and an fp32 norm whose fp32 result the fused op could not give."""
    positional, keywords = _with_defaults(schema_of(_op(_CONV_RELU_NORM).default), args, kwargs)
    x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding, output_padding, groups, dilation, eps = positional
    low = (_cast(t, dtype) for t in (x, weight, bias))
    c = _OPS.conv_transpose3d(*low, stride, padding, output_padding, groups, dilation, **keywords)
    c, gn_weight, gn_bias = (_cast(t, torch.float32) for t in (c, gn_weight, gn_bias))
    return _OPS.group_norm_fwd(c, num_groups, gn_weight, gn_bias, eps, "none", "relu")[0]


def _register_autocast() -> None:
    """The dtypes of PyTorch's own ops: torch lists norms and logsumexp as fp32 on CUDA, and not at all on CPU."""
    shared = {name: _convolution_low(name) for name in _CONVS}
    shared |= {name: _conv_add_low(name) for name in ("conv_add", "conv_add_moments")}
    shared |= {name: _norm_conv_low(name) for name in ("group_norm_conv", "group_norm_conv_moments")}
    cpu = {name: _low_convolution(name) for name in (_CONV_MEAN, _CONV_RELU_NORM, _CONV_LSE)}
    cuda = {
        "group_norm": _in_fp32("group_norm"),
        "group_norm_moments": _in_fp32("group_norm_moments"),
        "group_norm_conv1x1": _norm_conv1x1_low,
        "group_norm_mean": _norm_mean_in_fp32,
        "logsumexp": _in_fp32("logsumexp"),
        "activation": _softplus_in_fp32,
        _CONV_MEAN: _fp32_twin(_CONV_MEAN, 3),
        _CONV_RELU_NORM: _relu_norm_in_fp32,
        _CONV_LSE: _fp32_twin(_CONV_LSE, 3),
    }
    for device, rules in (("cpu", shared | cpu), ("cuda", shared | cuda)):
        off = torch_private.without_autocast(device)
        _AT_AUTOCAST[device] = {name: _autocast_kernel(rule, device, off) for name, rule in rules.items()}
        for name, kernel in _AT_AUTOCAST[device].items():
            _LIB.impl(name, kernel, f"Autocast{device.upper()}")


def _autocast_kernel(rule: Callable[..., Any], device: str, off: Callable[[], Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with off():
            return rule(torch.get_autocast_dtype(device), args, kwargs)

    return kernel


# ----------------------------------------------------------------------------------------------------------------------
# vmap


def _loop(op: Any, batch: int, in_dims: Sequence[int | None], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The rule that always holds: one call an example."""
    results = [
        op(*(a.select(d, i) if isinstance(d, int) else a for a, d in zip(args, in_dims, strict=True)), **kwargs)
        for i in range(batch)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(r) for r in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _batch_first(t: Tensor, dim: int | None, batch: int) -> Tensor:
    return t.unsqueeze(0).expand(batch, *t.shape) if dim is None else t.movedim(dim, 0)


def _vmap_samples(name: str, per_sample: int = 1) -> Callable[..., Any]:
    """The first ``per_sample`` arguments begin with N: the new batch joins it, and leaves it again in every output."""
    op = _op(name)

    def rule(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
        batch = info.batch_size
        if any(isinstance(d, int) for d in in_dims[per_sample:]):  # of a list of numbers it is a list of None
            return _loop(op, batch, in_dims, args, kwargs)
        tensors = [_batch_first(t, d, batch) for t, d in zip(args[:per_sample], in_dims[:per_sample], strict=True)]
        sizes = tensors[0].shape[:2]
        out = op(*(t.flatten(0, 1) for t in tensors), *args[per_sample:], **kwargs)
        if isinstance(out, Tensor):
            return out.unflatten(0, sizes), 0
        return tuple(o.unflatten(0, sizes) for o in out), (0,) * len(out)

    return rule


def _vmap_pointwise(name: str, tensors: int) -> Callable[..., Any]:
    op = _op(name)

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        batched = (_batch_first(t, d, info.batch_size) for t, d in zip(args[:tensors], in_dims[:tensors], strict=True))
        return op(*batched, *args[tensors:]), 0

    return rule


def _vmap_reduce(name: str, tensors: int) -> Callable[..., Any]:
    """The new batch comes first, and every reduced dim moves by one."""
    op = _op(name)

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        args, keywords = _with_defaults(schema_of(op.default), args, {})  # type: ignore[assignment]
        x_at = 1 if name == "logsumexp_backward" else 0
        sizes = args[1] if name == "mean_backward" else None
        rank = len(sizes) if sizes is not None else args[x_at].dim() - (in_dims[x_at] is not None)
        if rank == 0:
            return _loop(op, info.batch_size, (*in_dims, *(None,) * (len(args) - len(in_dims))), args, keywords)
        batched = [_batch_first(t, d, info.batch_size) for t, d in zip(args[:tensors], in_dims[:tensors], strict=True)]
        if sizes is not None:
            batched.append([info.batch_size, *sizes])  # type: ignore[arg-type]
        *_, dims, keepdim = args
        moved = [d + 1 if d >= 0 else d for d in dims] if dims else list(range(1, rank + 1))
        return op(*batched, moved, keepdim), 0

    return rule


def _vmap_loop(name: str) -> Callable[..., Any]:
    op = _op(name)
    return lambda info, in_dims, *args, **kwargs: _loop(op, info.batch_size, in_dims, args, kwargs)


_BETWEEN = (
    "upsample_linear",
    "upsample_linear_backward",
    "upsample_nearest",
    "upsample_nearest_backward",
    "pad_replicate",
    "max_pool",
)


def _register_vmap() -> None:
    rules = {name: _vmap_samples(name) for name in (*_CONVS, "group_stats", *_TWINS, *(f"{n}_fwd" for n in _TWINS))}
    rules["group_stats_backward"] = _vmap_samples("group_stats_backward", 5)
    rules["activation"] = _vmap_pointwise("activation", 1)
    for name in (
        "conv_add",
        "conv_add_moments",
        "conv_backward",
        "group_norm_moments",
        "group_norm_conv",
        "group_norm_conv_moments",
        "group_norm_conv1x1",
        *_BETWEEN,
    ):
        rules[name] = _vmap_loop(name)
    rules["activation_backward"] = _vmap_pointwise("activation_backward", 2)
    for name, tensors in (("logsumexp", 1), ("mean", 1), ("logsumexp_backward", 3), ("mean_backward", 1)):
        rules[name] = _vmap_reduce(name, tensors)
    # Their dweight and dbias are sums over N, so the examples cannot share one call.
    for name in ("group_norm_backward", "group_norm_mean_backward", _LSE_BACKWARD):
        rules[name] = _vmap_loop(name)
    for name, rule in rules.items():
        torch.library.register_vmap(f"kgopt::{name}", rule)


# ----------------------------------------------------------------------------------------------------------------------
# Flop formulas: those of ATen's convolution; norms and pointwise chains count nothing, as in PyTorch.


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    def register(name: str, transposed: bool) -> None:
        def formula(x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
            rank = len(weight_shape) - 2
            names = [a.name for a in schema_of(_op(name).default).arguments]
            values = {a.name: a.default_value for a in schema_of(_op(name).default).arguments}
            values.update(zip(names[2:], args, strict=False))
            values.update(kwargs)

            def listed(key: str) -> list[int]:
                v = values.get(key, 0)
                return (
                    list(v) * rank
                    if isinstance(v, (list, tuple)) and len(v) == 1
                    else (list(v) if isinstance(v, (list, tuple)) else [v] * rank)
                )

            sizes = _conv_sizes(
                x_shape,
                weight_shape,
                listed("stride"),
                listed("padding"),
                listed("dilation"),
                listed("output_padding") if transposed else [0] * rank,
                values["groups"],
                transposed,
            )
            # Every output (transposed: every input) element meets one column of the weight.
            positions = math.prod(x_shape[2:]) if transposed else math.prod(sizes[2:])
            return 2 * int(x_shape[0]) * positions * math.prod(weight_shape)

        register_flop_formula(_op(name))(formula)

    def of_conv_add(x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        names = [a.name for a in schema_of(_OPS.conv_add.default).arguments]
        transposed = dict(zip(names[2:], args, strict=False), **kwargs).get("transposed", False)
        sizes = out_shape[0] if isinstance(out_shape[0], (list, tuple)) else out_shape  # with moments
        positions = math.prod(x_shape[2:]) if transposed else math.prod(sizes[2:])
        return 2 * int(x_shape[0]) * positions * math.prod(weight_shape)

    register_flop_formula(_OPS.conv_add)(of_conv_add)
    register_flop_formula(_OPS.conv_add_moments)(of_conv_add)

    def of_norm_conv(x_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        names = [a.name for a in schema_of(_OPS.group_norm_conv.default).arguments]
        values = dict(zip(names[1:], args, strict=False), **kwargs)
        more = {"transposed": values.get("transposed", False)}
        return of_conv_add(x_shape, values["weight"], out_shape=out_shape, **more)

    register_flop_formula(_OPS.group_norm_conv)(of_norm_conv)
    register_flop_formula(_OPS.group_norm_conv_moments)(of_norm_conv)

    def of_conv1x1(x_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * int(x_shape[1]) * math.prod(out_shape)

    register_flop_formula(_OPS.group_norm_conv1x1)(of_conv1x1)

    def of_conv_backward(dy_shape: Any, x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
        transposed, mask = args[5], args[6]
        positions = math.prod(x_shape[2:]) if transposed else math.prod(dy_shape[2:])
        return 2 * int(x_shape[0]) * positions * math.prod(weight_shape) * (int(mask[0]) + int(mask[1]))

    register_flop_formula(_OPS.conv_backward)(of_conv_backward)
    for name, (_, transposed) in _CONVS.items():
        register(name, transposed)
    for name in (_CONV_MEAN, _CONV_RELU_NORM, _CONV_LSE):
        for suffix in ("", "_fwd"):
            register(name + suffix, name == _CONV_RELU_NORM)


# ----------------------------------------------------------------------------------------------------------------------
# PyTorch's TF32 switch, for the kernels


def _conv_tf32_allowed() -> int:
    """Whether PyTorch lets convolutions use TF32.

    What torch.backends.cudnn.conv.fp32_precision reads: it knows of allow_tf32 too, and neither warns nor raises when
    both interfaces were used, as reading allow_tf32 does.
    """
    return int(_conv_fp32_precision() == "tf32")


_TF32_QUERY = ctypes.CFUNCTYPE(ctypes.c_int)(_conv_tf32_allowed)


def _install_tf32_query() -> None:
    setter = ctypes.CDLL(_C.__file__).kgopt_set_tf32_query
    setter.argtypes = [ctypes.CFUNCTYPE(ctypes.c_int)]
    setter.restype = None
    setter(_TF32_QUERY)


_register_fakes()
_register_autograd()
_register_autocast()
_register_vmap()
# With the flop counter, when that is imported: importing it here costs 100 ms, most of it triton.
after_import("torch.utils.flop_counter", _register_flops)
_install_tf32_query()
