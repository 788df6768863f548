"""What PyTorch must know of the ops beside their kernels: fake kernels, autograd, autocast, vmap and flop formulas.

Schemas and kernels are in the extension. Nothing here computes; gradients are compositions of ops.

The public ops that have a ``_fwd`` twin (``group_norm``, ``group_norm_mean`` and the three pipelines) return one
tensor. When a gradient is needed they dispatch to the twin, which also returns the statistics that its backward reads.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kgopt import _C

_LIB = torch.library.Library("kgopt", "IMPL")
_OPS = torch.ops.kgopt

_CONVS = {"conv2d": (2, False), "conv3d": (3, False), "conv_transpose2d": (2, True), "conv_transpose3d": (3, True)}
_CONV_MEAN = "conv3d_group_norm_mean"
_CONV_RELU_NORM = "conv_transpose3d_relu_group_norm"
_CONV_LSE = "conv2d_group_norm_tanh_hardswish_residual_logsumexp"
_TWINS = ("group_norm", "group_norm_mean", _CONV_MEAN, _CONV_RELU_NORM, _CONV_LSE)


def _op(name: str) -> Any:
    return getattr(_OPS, name)


# ----------------------------------------------------------------------------------------------------------------------
# Shapes and layouts


def _is_channels_last(t: Tensor) -> bool:
    """The rule of torch's suggest_memory_format, as in csrc/common/torch_utils.h."""
    if t.dim() not in (4, 5) or t.stride(1) == 0:
        return False
    smallest: Any = 0
    for d in (1, *range(t.dim() - 1, 1, -1), 0):
        if t.size(d) == 0 or t.stride(d) < smallest:
            return False
        if d == 0 and smallest == t.stride(1):
            return False
        smallest = t.stride(d)
        if t.size(d) > 1:
            smallest = smallest * t.size(d)
    return True


def _format(rank: int, channels_last: bool) -> torch.memory_format:
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last_3d if rank == 5 else torch.channels_last


def _empty(like: Tensor, sizes: Sequence[Any], dtype: torch.dtype | None = None, channels_last: bool = False) -> Tensor:
    return torch.empty(
        sizes,
        dtype=dtype or like.dtype,
        device=like.device,
        memory_format=_format(len(sizes), channels_last),
    )


def _empty_like(x: Tensor) -> Tensor:
    return _empty(x, x.shape, channels_last=_is_channels_last(x))


def _stats_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


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


def _affine_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    return weight.dtype if weight is not None else bias.dtype if bias is not None else _stats_dtype(x)


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


def _affine_grads_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
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


def _with_defaults(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake kernel that always gets every argument, as a C++ kernel does."""
    schema = _op(name).default._schema

    @functools.wraps(fake)
    def call(*args: Any, **kwargs: Any) -> Any:
        positional, keyword = list(args), dict(kwargs)
        for i, a in enumerate(schema.arguments):
            if a.kwarg_only:
                keyword.setdefault(a.name, a.default_value)
            elif i >= len(positional):
                positional.append(keyword.pop(a.name) if a.name in keyword else a.default_value)
        return fake(*positional, **keyword)

    return call


def _register_fakes() -> None:
    def register(name: str, fake: Callable[..., Any]) -> None:
        torch.library.register_fake(f"kgopt::{name}", _with_defaults(name, fake))

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
    register("activation", lambda x, act: _empty_like(x))
    register("activation_backward", lambda dy, x, act: _empty_like(x))
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
    # Reduced over channels alone, a channels_last gradient is written as it lies.
    channels = len(dim) == 1 and dim[0] % max(x.dim(), 1) == 1
    return _empty(x, x.shape, channels_last=channels and _is_channels_last(x))


# ----------------------------------------------------------------------------------------------------------------------
# Autograd


def _conv_gradients(
    ctx_needs: tuple[bool, bool, bool],
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    c_out: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    allow_tf32: bool | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias, through ATen."""

    def run() -> Any:
        return torch.ops.aten.convolution_backward(
            dy.to(x.dtype),
            x,
            weight,
            [c_out],
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            list(ctx_needs),
        )

    if not any(ctx_needs):
        return None, None, None
    if allow_tf32 is None or not x.is_cuda or torch.compiler.is_compiling():
        return run()
    with torch.backends.cudnn.flags(
        enabled=torch.backends.cudnn.enabled,
        benchmark=torch.backends.cudnn.benchmark,
        deterministic=torch.backends.cudnn.deterministic,
        allow_tf32=allow_tf32,
    ):
        return run()


def _needs(ctx: Any, *positions: int) -> tuple[bool, ...]:
    return tuple(ctx.needs_input_grad[i] for i in positions)


def _register_conv_autograd(name: str, rank: int, transposed: bool) -> None:
    def setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        if transposed:
            x, weight, _, ctx.stride, ctx.padding, ctx.output_padding, ctx.groups, ctx.dilation = inputs
        else:
            x, weight, _, ctx.stride, ctx.padding, ctx.dilation, ctx.groups = inputs
            ctx.output_padding = [0] * rank
        ctx.allow_tf32 = keyword_only_inputs["allow_tf32"]
        ctx.save_for_backward(x, weight)

    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx, dweight, dbias = _conv_gradients(
            _needs(ctx, 0, 1, 2),  # type: ignore[arg-type]
            dy,
            x,
            weight,
            dy.shape[1],
            ctx.stride,
            ctx.padding,
            ctx.dilation,
            transposed,
            ctx.output_padding,
            ctx.groups,
            ctx.allow_tf32,
        )
        return dx, dweight, dbias, *(None,) * (5 if transposed else 4)

    torch.library.register_autograd(f"kgopt::{name}", backward, setup_context=setup)


def _norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.num_groups, weight, bias, _, ctx.act, ctx.pre_act = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, bias, mean, rstd)


def _norm_backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = _OPS.group_norm_backward(
        dy, x, mean, rstd, ctx.num_groups, weight, bias, ctx.act, ctx.pre_act
    )
    return dx, None, *_affine(ctx, (2, 3), dweight, dbias), None, None, None


def _affine(ctx: Any, positions: tuple[int, int], dweight: Tensor, dbias: Tensor) -> tuple[Tensor | None, ...]:
    needs = _needs(ctx, *positions)
    return dweight if needs[0] else None, dbias if needs[1] else None


def _norm_mean_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.num_groups, weight, bias, _ = inputs
    _, channel_mean, mean, rstd = output
    ctx.mark_non_differentiable(channel_mean, mean, rstd)
    ctx.save_for_backward(x, weight, channel_mean, mean, rstd)


def _norm_mean_backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
    x, weight, channel_mean, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = _OPS.group_norm_mean_backward(dout, x, channel_mean, mean, rstd, ctx.num_groups, weight)
    return dx, None, *_affine(ctx, (2, 3), dweight, dbias), None


def _stats_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.num_groups, _ = inputs
    ctx.save_for_backward(x, *output)


def _stats_backward(ctx: Any, dmean: Tensor | None, drstd: Tensor | None) -> Any:
    x, mean, rstd = ctx.saved_tensors
    dmean = torch.zeros_like(mean) if dmean is None else dmean
    drstd = torch.zeros_like(rstd) if drstd is None else drstd
    return _OPS.group_stats_backward(dmean, drstd, x, mean, rstd, ctx.num_groups), None, None


def _activation_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.act = inputs
    ctx.save_for_backward(x)


def _logsumexp_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.dim, ctx.keepdim = inputs
    ctx.save_for_backward(x, output)


def _mean_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.dims, ctx.keepdim = inputs
    ctx.sizes = x.shape


class _FusedContext:
    """The arguments of a pipeline op, unpacked in its setup_context."""

    @staticmethod
    def setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, transposed: bool) -> None:
        x, weight, bias, ctx.num_groups, gn_weight, gn_bias, ctx.stride, ctx.padding, *rest = inputs
        if transposed:
            ctx.output_padding, ctx.groups, ctx.dilation, ctx.eps = rest
        else:
            ctx.dilation, ctx.groups, ctx.eps = rest
            ctx.output_padding = [0] * len(ctx.stride)
        ctx.inputs = len(inputs)
        ctx.transposed = transposed
        ctx.backend = keyword_only_inputs["backend"]
        ctx.allow_tf32 = keyword_only_inputs["allow_tf32"]

    @staticmethod
    def recompute(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution's output, computed again instead of kept since the forward."""
        options = {"backend": ctx.backend, "allow_tf32": ctx.allow_tf32}
        if ctx.transposed:
            return _OPS.conv_transpose3d(
                x, weight, bias, ctx.stride, ctx.padding, ctx.output_padding, ctx.groups, ctx.dilation, **options
            )
        conv = _OPS.conv2d if len(ctx.stride) == 2 else _OPS.conv3d
        return conv(x, weight, bias, ctx.stride, ctx.padding, ctx.dilation, ctx.groups, **options)

    @staticmethod
    def gradients(ctx: Any, dc: Tensor, x: Tensor, weight: Tensor, dweight: Tensor, dbias: Tensor) -> Any:
        conv = _conv_gradients(
            _needs(ctx, 0, 1, 2),  # type: ignore[arg-type]
            dc,
            x,
            weight,
            dc.shape[1],
            ctx.stride,
            ctx.padding,
            ctx.dilation,
            ctx.transposed,
            ctx.output_padding,
            ctx.groups,
            ctx.allow_tf32,
        )
        return *conv, None, *_affine(ctx, (4, 5), dweight, dbias), *(None,) * (ctx.inputs - 6)


def _conv_mean_setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    _FusedContext.setup(ctx, inputs, keyword_only_inputs, transposed=False)
    _, channel_mean, mean, rstd = output
    ctx.mark_non_differentiable(channel_mean, mean, rstd)
    ctx.save_for_backward(inputs[0], inputs[1], inputs[2], inputs[4], channel_mean, mean, rstd)


def _conv_mean_backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
    x, weight, bias, gn_weight, channel_mean, mean, rstd = ctx.saved_tensors
    c = _FusedContext.recompute(ctx, x, weight, bias)
    dc, dweight, dbias = _OPS.group_norm_mean_backward(dout, c, channel_mean, mean, rstd, ctx.num_groups, gn_weight)
    return _FusedContext.gradients(ctx, dc, x, weight, dweight, dbias)


def _conv_relu_norm_setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    _FusedContext.setup(ctx, inputs, keyword_only_inputs, transposed=True)
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(inputs[0], inputs[1], inputs[2], inputs[4], inputs[5], mean, rstd)


def _conv_relu_norm_backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, weight, bias, gn_weight, gn_bias, mean, rstd = ctx.saved_tensors
    c = _FusedContext.recompute(ctx, x, weight, bias)
    dc, dweight, dbias = _OPS.group_norm_backward(
        dy, c, mean, rstd, ctx.num_groups, gn_weight, gn_bias, "none", "relu"
    )
    return _FusedContext.gradients(ctx, dc, x, weight, dweight, dbias)


def _conv_lse_setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    _FusedContext.setup(ctx, inputs, keyword_only_inputs, transposed=False)
    lse, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(inputs[0], inputs[1], inputs[2], inputs[4], inputs[5], lse, mean, rstd)


def _conv_lse_backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
    x, weight, bias, gn_weight, gn_bias, lse, mean, rstd = ctx.saved_tensors
    act = "tanh+hardswish"
    c = _FusedContext.recompute(ctx, x, weight, bias)
    y, _, _ = _OPS.group_norm_fwd(c, ctx.num_groups, gn_weight, gn_bias, ctx.eps, act, "none")
    residual = (c + y).to(lse.dtype)
    dresidual = _OPS.logsumexp_backward(dout, residual, lse, [1], True).to(c.dtype)
    dc, dweight, dbias = _OPS.group_norm_backward(
        dresidual, c, mean, rstd, ctx.num_groups, gn_weight, gn_bias, act, "none"
    )
    return _FusedContext.gradients(ctx, dc + dresidual, x, weight, dweight, dbias)


def _refuse_double_backward(name: str) -> None:
    """A second derivative through a backward op is an error, never a silent zero."""

    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"kgopt::{name} is not differentiable: kgopt has no double backward (create_graph=True). "
            "Use the plain torch modules where second derivatives are needed."
        )

    torch.library.register_autograd(f"kgopt::{name}", backward)


def _register_autograd() -> None:
    for name, (rank, transposed) in _CONVS.items():
        _register_conv_autograd(name, rank, transposed)

    def register(name: str, backward: Callable[..., Any], setup: Callable[..., None]) -> None:
        torch.library.register_autograd(f"kgopt::{name}", backward, setup_context=setup)

    register("group_stats", _stats_backward, _stats_setup)
    register("group_norm_fwd", _norm_backward, _norm_setup)
    register("group_norm_mean_fwd", _norm_mean_backward, _norm_mean_setup)
    register(
        "activation",
        lambda ctx, dy: (_OPS.activation_backward(dy, ctx.saved_tensors[0], ctx.act), None),
        _activation_setup,
    )
    register(
        "logsumexp",
        lambda ctx, dy: (_OPS.logsumexp_backward(dy, *ctx.saved_tensors, ctx.dim, ctx.keepdim), None, None),
        _logsumexp_setup,
    )
    register(
        "mean",
        lambda ctx, dy: (_OPS.mean_backward(dy, ctx.sizes, ctx.dims, ctx.keepdim), None, None),
        _mean_setup,
    )
    register(f"{_CONV_MEAN}_fwd", _conv_mean_backward, _conv_mean_setup)
    register(f"{_CONV_RELU_NORM}_fwd", _conv_relu_norm_backward, _conv_relu_norm_setup)
    register(f"{_CONV_LSE}_fwd", _conv_lse_backward, _conv_lse_setup)
    for name in (
        "group_stats_backward",
        "group_norm_backward",
        "group_norm_mean_backward",
        "activation_backward",
        "logsumexp_backward",
        "mean_backward",
    ):
        _refuse_double_backward(name)
    for name in _TWINS:
        _LIB.impl(name, _differentiable_twin(name), "Autograd")


def _differentiable_twin(name: str) -> Callable[..., Tensor]:
    """A public op's Autograd-key kernel: its _fwd twin where a gradient is needed, else its own kernel."""
    op, twin = _op(name).default, _op(f"{name}_fwd").default

    def call(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return twin(*args, **kwargs)[0].to(args[0].dtype)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return call


# ----------------------------------------------------------------------------------------------------------------------
# Autocast


def _cast(t: Any, dtype: torch.dtype) -> Any:
    return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t


def _register_autocast() -> None:
    """Convolutions run in the autocast dtype and norms in fp32, as PyTorch's own do."""

    def register(name: str, rule: Callable[[torch.dtype, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        for device in ("CUDA", "CPU"):
            key = torch._C.DispatchKey.AutocastCUDA if device == "CUDA" else torch._C.DispatchKey.AutocastCPU
            keyset = torch._C.DispatchKeySet(key)

            def call(*args: Any, _device: str = device.lower(), _keyset: Any = keyset, **kwargs: Any) -> Any:
                with torch._C._ExcludeDispatchKeyGuard(_keyset):
                    return rule(torch.get_autocast_dtype(_device), args, kwargs)

            _LIB.impl(name, call, f"Autocast{device}")

    def low(name: str) -> Callable[..., Any]:
        return lambda dtype, args, kwargs: _op(name)(*(_cast(a, dtype) for a in args), **kwargs)

    def full(name: str) -> Callable[..., Any]:
        return lambda dtype, args, kwargs: _op(name)(*(_cast(a, torch.float32) for a in args), **kwargs)

    def fused(name: str) -> Callable[..., Any]:
        # x, weight and bias of the convolution go low; the norm's parameters and the result stay fp32.
        def rule(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            conv = [_cast(a, dtype) for a in args[:3]]
            norm = [_cast(a, torch.float32) for a in args[3:]]
            return _op(f"{name}_fwd")(*conv, *norm, **kwargs)[0]

        return rule

    def relu_norm(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = _op(_CONV_RELU_NORM).default._schema
        values = {a.name: a.default_value for a in schema.arguments}
        values.update({a.name: v for a, v in zip(schema.arguments, args, strict=False)})
        values.update(kwargs)
        c = _OPS.conv_transpose3d(
            *(_cast(values[k], dtype) for k in ("x", "weight", "bias")),
            values["stride"],
            values["padding"],
            values["output_padding"],
            values["groups"],
            values["dilation"],
            backend=values["backend"],
            allow_tf32=values["allow_tf32"],
        )
        return _OPS.group_norm_fwd(
            c.float(),
            values["num_groups"],
            _cast(values["gn_weight"], torch.float32),
            _cast(values["gn_bias"], torch.float32),
            values["eps"],
            "none",
            "relu",
        )[0]

    for name in _CONVS:
        register(name, low(name))
    for name in ("group_norm", "group_norm_mean", "group_stats", "logsumexp"):
        register(name, full(name))
    for name in (_CONV_MEAN, _CONV_LSE):
        register(name, fused(name))
    register(_CONV_RELU_NORM, relu_norm)


# ----------------------------------------------------------------------------------------------------------------------
# vmap


def _loop(op: Any, batch: int, in_dims: Sequence[int | None], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The rule that always holds: one call an example."""
    results = [
        op(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)), **kwargs)
        for i in range(batch)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(r) for r in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _vmap_samples(name: str) -> Callable[..., Any]:
    """x alone is batched: its batch joins N, and leaves it again in every output."""
    op = _op(name)

    def rule(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
        if in_dims[0] is None or any(d is not None for d in in_dims[1:]):
            return _loop(op, info.batch_size, in_dims, args, kwargs)
        x = args[0].movedim(in_dims[0], 0)
        out = op(x.flatten(0, 1), *args[1:], **kwargs)
        if isinstance(out, Tensor):
            return out.unflatten(0, x.shape[:2]), 0
        return tuple(o.unflatten(0, x.shape[:2]) for o in out), (0,) * len(out)

    return rule


def _vmap_reduce(name: str) -> Callable[..., Any]:
    op = _op(name)

    def rule(info: Any, in_dims: Any, x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Any:
        x = x.movedim(in_dims[0], 0)
        rank = x.dim() - 1
        shifted = [d % max(rank, 1) + 1 for d in dims] if dims else list(range(1, rank + 1))
        if rank == 0:
            return _loop(op, info.batch_size, (0, None, None), (x, dims, keepdim), {})
        return op(x, shifted, keepdim), 0

    return rule


def _vmap_loop(name: str) -> Callable[..., Any]:
    op = _op(name)
    return lambda info, in_dims, *args, **kwargs: _loop(op, info.batch_size, in_dims, args, kwargs)


def _register_vmap() -> None:
    samples = [*_CONVS, "group_stats", "group_norm_fwd", "group_norm_mean_fwd", *_TWINS]
    samples += [f"{name}_fwd" for name in (_CONV_MEAN, _CONV_RELU_NORM, _CONV_LSE)]
    for name in samples:
        torch.library.register_vmap(f"kgopt::{name}", _vmap_samples(name))
    for name in ("logsumexp", "mean"):
        torch.library.register_vmap(f"kgopt::{name}", _vmap_reduce(name))
    for name in (
        "activation",
        "activation_backward",
        "group_stats_backward",
        "group_norm_backward",
        "group_norm_mean_backward",
        "logsumexp_backward",
        "mean_backward",
    ):
        torch.library.register_vmap(f"kgopt::{name}", _vmap_loop(name))


# ----------------------------------------------------------------------------------------------------------------------
# Flop formulas: those of ATen's convolution; norms and pointwise chains count nothing, as in PyTorch.


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    def register(name: str, transposed: bool) -> None:
        def formula(x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
            rank = len(weight_shape) - 2
            names = [a.name for a in _op(name).default._schema.arguments]
            values = {a.name: a.default_value for a in _op(name).default._schema.arguments}
            values.update(zip(names[2:], args, strict=False))
            values.update(kwargs)

            def listed(key: str) -> list[int]:
                v = values.get(key, 0)
                return list(v) * rank if isinstance(v, (list, tuple)) and len(v) == 1 else (
                    list(v) if isinstance(v, (list, tuple)) else [v] * rank
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

    for name, (_, transposed) in _CONVS.items():
        register(name, transposed)
    for name in (_CONV_MEAN, _CONV_RELU_NORM, _CONV_LSE):
        for suffix in ("", "_fwd"):
            register(name + suffix, name == _CONV_RELU_NORM)


# ----------------------------------------------------------------------------------------------------------------------
# PyTorch's TF32 switch, for the kernels


def _conv_tf32_allowed() -> int:
    """Whether PyTorch lets convolutions use TF32; its own switch, whichever of its two interfaces set it."""
    try:
        return int(torch._C._get_cudnn_allow_tf32())
    except RuntimeError:  # set through both the old and the new interface: the new one knows
        conv = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        return int(conv == "tf32")


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
_register_flops()
_install_tf32_query()
