"""The three fused pipelines: a convolution, a norm, and what follows, as one op each."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kgopt._layout import contiguous, empty, is_channels_last, memory_format, stats_dtype, wide
from kgopt.ops.autocast import cast, low
from kgopt.ops.calls import (
    PLAIN,
    given,
    in_backward,
    is_compiling,
    is_grad_enabled,
    is_watched,
    wants_gradient,
    without_grad,
)
from kgopt.ops.conv_gradients import conv_gradients
from kgopt.ops.geometry import conv_fake, conv_flops, conv_sizes, convolution
from kgopt.ops.group_norm import (
    affine_gradients,
    group_norm_backward,
    group_norm_fwd_formula,
    group_norm_mean_backward,
    group_norm_mean_fwd_formula,
    norm_formula,
    reaching,
    stats_fake,
)
from kgopt.ops.lse_backward import CHAIN
from kgopt.ops.lse_backward import NAME as LSE_BACKWARD
from kgopt.ops.precision import conv_tf32_allowed
from kgopt.ops.registry import OPS, dims, overload, record, record_public, with_defaults
from kgopt.ops.vmap import samples
from kgopt.torch_private import FORWARD_AD, LEVEL, any_requires_grad, are_functorch_transforms_active, schema_of

CONV_MEAN = "conv3d_group_norm_mean"
CONV_RELU_NORM = "conv_transpose3d_relu_group_norm"
CONV_LSE = "conv2d_group_norm_tanh_hardswish_residual_logsumexp"

_lse_backward, _lse_backward_in_place = in_backward(LSE_BACKWARD), in_backward(f"{LSE_BACKWARD}_")
_group_stats, _mean_fwd = in_backward("group_stats"), in_backward("group_norm_mean_fwd")
_mean_gradients = in_backward("conv_group_norm_mean_gradients")
_lse_gradients = in_backward("conv_group_norm_lse_gradients")
# Pairs of input and output channels up to which a forward may leave its convolution's output out (csrc/conv3d/choice).
_FEW_CHANNELS = json.loads(OPS.build_info()).get("few_channels", ())
_FEW_PRODUCTS = 96  # of an output value in fp32 that take about as long as a pass over the output, on an H200

# ----------------------------------------------------------------------------------------------------------------------
# Results without values


def _conv_mean_fwd_fake(x: Tensor, weight: Tensor, bias: Any, num_groups: int, *_: Any, **__: Any) -> Any:
    n, dtype = x.shape[0], stats_dtype(x)
    return empty(x, [n], dtype), empty(x, [n, weight.shape[0]], dtype), *stats_fake(x, num_groups)


def _conv_relu_norm_fwd_fake(x: Tensor, weight: Tensor, bias: Any, num_groups: int, *rest: Any, **_: Any) -> Any:
    _, _, stride, padding, output_padding, groups, dilation, _ = rest
    sizes = x, weight, stride, padding, dilation, output_padding, groups, True
    return conv_fake(*sizes), conv_fake(*sizes), *stats_fake(x, num_groups)


def _conv_lse_fwd_fake(x: Tensor, weight: Tensor, bias: Any, num_groups: int, *rest: Any, **_: Any) -> Any:
    _, _, stride, padding, dilation, groups, _ = rest
    sizes = conv_sizes(x.shape, weight.shape, stride, padding, dilation, [0, 0], groups, False)
    return empty(x, [sizes[0], 1, *sizes[2:]], stats_dtype(x)), *stats_fake(x, num_groups)


# ----------------------------------------------------------------------------------------------------------------------
# Autograd. The convolution's output is computed again, not kept, but for the second pipeline, whose forward gives it.


def _setup(transposed: bool = False) -> Callable[..., None]:
    def setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
        x, weight, bias, ctx.num_groups, gn_weight, gn_bias, ctx.stride, ctx.padding, *rest = inputs
        if transposed:
            ctx.output_padding, ctx.groups, ctx.dilation, ctx.eps = rest
        else:
            ctx.dilation, ctx.groups, ctx.eps = rest
            ctx.output_padding = [0] * len(ctx.stride)
        ctx.transposed = transposed
        ctx.backend, ctx.allow_tf32 = keywords["backend"], keywords["allow_tf32"]
        ctx.save_for_backward(x, weight, bias, gn_weight, gn_bias, *output[1:])

    return setup


def _leaves_out_output(ctx: Any, x: Tensor, weight: Tensor) -> bool:
    """Whether the forward may have left out what its convolution gives."""
    if not x.is_cuda or ctx.groups != 1 or ctx.transposed or ctx.backend == "aten":
        return False
    return ctx.backend != "auto" or any(
        x.shape[1] <= c_in and weight.shape[0] <= c_out for c_in, c_out in _FEW_CHANNELS
    )


def _inputs(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x and weight for what the backward computes again: contiguous where kernels of few channels do.

    They are the faster ones even with x and its gradient copied.
    """
    if not _leaves_out_output(ctx, x, weight):
        return x, weight
    return contiguous(x), contiguous(weight)


def _conv_again(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution's output, computed again instead of kept since the forward.

    Statistics are those of operands rounded to TF32, and only fit to an output of the same ones. The own kernels of
    contiguous tensors round, too, where cuDNN may not take TF32 at all, and those of channels_last tensors cut x
    off, which makes it 2^-12 smaller in the mean.
    """
    tf32 = conv_tf32_allowed() if ctx.allow_tf32 is None else ctx.allow_tf32
    own = x.dtype is torch.float32 and _leaves_out_output(ctx, x, weight)
    if not tf32:  # where cuDNN's pass for the bias takes more than its fp32 products win
        own = own and bias is not None and weight.numel() <= weight.shape[0] * _FEW_PRODUCTS
    options = {"backend": "kgopt" if own else ctx.backend, "allow_tf32": ctx.allow_tf32}
    return convolution(x, weight, bias, *_geometry(ctx), **options)


def _geometry(ctx: Any) -> tuple[Any, ...]:
    return ctx.stride, ctx.padding, ctx.dilation, ctx.output_padding, ctx.groups, ctx.transposed


def _rounds_otherwise(ctx: Any, c: Tensor) -> bool:
    """Whether statistics are to be those of the convolution computed again, not the forward's.

    A half type: the forward's are of values that were not rounded to it. Where a group is constant, as in an empty
    part of a volume, all of it is rounded to one side, by far more than its standard deviation. A group of a few
    values: hardly anything is left of a gradient once its parts along 1 and along the normalized values are taken
    off, and the difference of two kernels' roundings would be most of it.
    """
    return c.numel() > 0 and (c.dtype.itemsize < 4 or _has_tiny_groups(ctx, c.shape))


def _has_tiny_groups(ctx: Any, sizes: Sequence[int]) -> bool:
    """Of a convolution's output."""
    return math.prod(sizes[1:]) < 16 * ctx.num_groups


def _gradients(  # type: ignore[no-untyped-def]
    ctx: Any, dc: Tensor, x: Tensor, weight: Tensor, dweight: Tensor, dbias: Tensor, like=(None, None)
) -> Any:
    """``like``: tensors as which the first two gradients are to lie."""
    options = ctx.allow_tf32, ctx.backend
    gradients = conv_gradients(wants_gradient(ctx, 0, 1, 2), dc, x, weight, _geometry(ctx), *options)
    return _in_order(ctx, gradients, dweight, dbias, like)


def _in_order(ctx: Any, gradients: Sequence[Any], dweight: Tensor, dbias: Tensor, like: Sequence[Any]) -> Any:
    """The gradients of x, weight and bias and those of the norm's parameters as autograd wants them."""
    wanted = wants_gradient(ctx, 0, 1, 2)
    *both, third = (g if wants else None for g, wants in zip(gradients, wanted, strict=True))
    for i, (gradient, argument) in enumerate(zip(both, like, strict=True)):
        if gradient is not None and argument is not None and is_channels_last(argument):
            both[i] = gradient.contiguous(memory_format=memory_format(argument.dim(), True))
    return *both, third, None, *affine_gradients(ctx, (4, 5), dweight, dbias)


def _is_plain(x: Tensor) -> bool:
    """Whether ops without a derivative may run on it: nobody records, traces or transforms."""
    if type(x) not in PLAIN or is_grad_enabled() or is_compiling() or are_functorch_transforms_active():
        return False
    return FORWARD_AD[LEVEL] < 0


def _gradients_without_output(  # type: ignore[no-untyped-def]
    ctx: Any, op: Callable[..., Any], dout: Tensor, x: Tensor, weight: Tensor, *others: Tensor | None
) -> Any:
    """The gradients by kernels that make the convolution's output on chip; None where they do not apply.

    The output stays in float32 there, so that the forward's statistics fit.
    """
    if not _leaves_out_output(ctx, x, weight) or not _is_plain(x):
        return None
    sizes = conv_sizes(x.shape, weight.shape, ctx.stride, ctx.padding, ctx.dilation, ctx.output_padding, 1, False)
    if _has_tiny_groups(ctx, sizes):
        return None
    geometry, wanted = (ctx.stride, ctx.padding, ctx.dilation, ctx.groups), wants_gradient(ctx, 0, 1, 2)
    options = {"backend": ctx.backend, "allow_tf32": ctx.allow_tf32}
    gradients = op(dout, x, weight, *others, ctx.num_groups, *geometry, wanted, **options)
    return gradients if gradients[-1].numel() > 0 else None


def _conv_mean_backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
    x, weight, bias, gn_weight, gn_bias, channel_mean, mean, rstd = ctx.saved_tensors
    dout = reaching(gn_bias, dout)
    planes = _inputs(ctx, x, weight)
    made = _gradients_without_output(ctx, _mean_gradients, dout, *planes, bias, gn_weight, channel_mean, mean, rstd)
    if made is not None:
        return _in_order(ctx, made[:3], made[3], made[4], like=(x, weight))
    c = _conv_again(ctx, *planes, bias)
    if _rounds_otherwise(ctx, c):
        _, channel_mean, mean, rstd = _mean_fwd(c, ctx.num_groups, None, None, ctx.eps)
    dc, dweight, dbias = group_norm_mean_backward(dout, c, channel_mean, mean, rstd, ctx.num_groups, gn_weight)
    return _gradients(ctx, dc, *planes, dweight, dbias, like=(x, weight))


def _conv_relu_norm_backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
    x, weight, bias, gn_weight, gn_bias, c, mean, rstd = ctx.saved_tensors
    if is_grad_enabled():  # what the forward kept has no graph to x and weight
        c = _conv_again(ctx, x, weight, bias)
        if _rounds_otherwise(ctx, c):
            mean, rstd = _group_stats(c.relu(), ctx.num_groups, ctx.eps)
    dc, dweight, dbias = group_norm_backward(dy, c, mean, rstd, ctx.num_groups, gn_weight, gn_bias, "none", "relu")
    return _gradients(ctx, dc, x, weight, dweight, dbias)


def _conv_lse_backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
    x, weight, bias, gn_weight, gn_bias, mean, rstd = ctx.saved_tensors
    planes = _inputs(ctx, x, weight)
    norm = gn_weight, gn_bias, mean, rstd
    made = _gradients_without_output(ctx, _lse_gradients, dout, *planes, bias, *norm)
    if made is not None:
        return _in_order(ctx, made[:3], made[3], made[4], like=(x, weight))
    c = _conv_again(ctx, *planes, bias)
    if _rounds_otherwise(ctx, c):
        mean, rstd = _group_stats(c, ctx.num_groups, ctx.eps)
    arguments = dout, c, mean, rstd, ctx.num_groups, gn_weight, gn_bias
    if x.is_cuda and _is_plain(c):  # two tensors of that size would be the peak of the memory
        dc, (dweight, dbias) = c, _lse_backward_in_place(*arguments)
    else:
        dc, dweight, dbias = _lse_backward(*arguments)
    return _gradients(ctx, dc, *planes, dweight, dbias, like=(x, weight))


# On the CPU a convolution is what takes the time and memory is cheap: where a gradient is needed, its output is stored
# rather than computed again. So it is on CUDA where the chain stores a tensor of that size anyway: then computing it
# again saves no memory at the peak, and the wide convolution costs more than writing and reading its output.


def _conv_mean_in_steps(x, weight, bias, num_groups, gn_weight, gn_bias, *rest, **options):  # type: ignore[no-untyped-def]
    *geometry, eps = rest
    c = OPS.conv3d(x, weight, bias, *geometry, **options)
    return OPS.group_norm_mean(c, num_groups, gn_weight, gn_bias, eps)


def _conv_relu_norm_in_steps(x, weight, bias, num_groups, gn_weight, gn_bias, *rest, **options):  # type: ignore[no-untyped-def]
    *geometry, eps = rest
    if x.is_cuda and not is_watched():
        # One launch for both nodes. Where it left relu of the convolution's output, that is as good: relu of it is the
        # same, and so is relu's slope.
        forward = without_grad(f"{CONV_RELU_NORM}_fwd")
        y, c, *stats = forward(x, weight, bias, num_groups, gn_weight, gn_bias, *rest, **options)
        if any_requires_grad(x, weight, bias):
            c = given("conv_transpose3d")(c, (x, weight, bias, *geometry), options)
        norm = num_groups, gn_weight, gn_bias, eps, "none", "relu"
        return given("group_norm_fwd")((y, *stats), (c, *norm), {})[0]
    c = OPS.conv_transpose3d(x, weight, bias, *geometry, **options)
    return OPS.group_norm_fwd(c, num_groups, gn_weight, gn_bias, eps, "none", "relu")[0]


def _conv_lse_in_steps(x, weight, bias, num_groups, gn_weight, gn_bias, *rest, **options):  # type: ignore[no-untyped-def]
    *geometry, eps = rest
    c = OPS.conv2d(x, weight, bias, *geometry, **options)
    y = OPS.group_norm_fwd(c, num_groups, gn_weight, gn_bias, eps, CHAIN)[0]
    return OPS.logsumexp(c.to(stats_dtype(c)) + y, [1], True).to(x.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Formulas, by the ops of their steps


def _conv_mean_fwd_formula(x, weight, bias, num_groups, gn_weight, gn_bias, *rest, **options):  # type: ignore[no-untyped-def]
    *geometry, eps = rest
    c = OPS.conv3d(x, weight, bias, *geometry, **options)
    return group_norm_mean_fwd_formula(c, num_groups, gn_weight, gn_bias, eps)


def _conv_relu_norm_fwd_formula(x, weight, bias, num_groups, gn_weight, gn_bias, *rest, **options):  # type: ignore[no-untyped-def]
    *geometry, eps = rest
    c = OPS.conv_transpose3d(x, weight, bias, *geometry, **options)
    y, mean, rstd = group_norm_fwd_formula(c, num_groups, gn_weight, gn_bias, eps, "none", "relu")
    return y, c, mean, rstd


def _conv_lse_fwd_formula(x, weight, bias, num_groups, gn_weight, gn_bias, *rest, **options):  # type: ignore[no-untyped-def]
    *geometry, eps = rest
    c = wide(OPS.conv2d(x, weight, bias, *geometry, **options))
    y, mean, rstd = norm_formula(c, num_groups, gn_weight, gn_bias, eps, CHAIN)
    return torch.logsumexp(c + y, 1, True), mean, rstd


# ----------------------------------------------------------------------------------------------------------------------
# Autocast


def _fp32_twin(name: str) -> Callable[..., Any]:
    """The convolution in the autocast dtype, the norm's parameters and the result in fp32."""
    twin = getattr(OPS, f"{name}_fwd")

    def rule(op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
        return twin(*(cast(a, dtype) for a in args[:3]), *(cast(a, torch.float32) for a in args[3:]), **kwargs)[0]

    return rule


def _relu_norm_in_fp32(op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """The convolution in the autocast dtype, and an fp32 norm whose fp32 result the fused op could not give."""
    positional, keywords = with_defaults(schema_of(overload(CONV_RELU_NORM)), args, kwargs)
    x, weight, bias, num_groups, gn_weight, gn_bias, *geometry, eps = positional
    c = OPS.conv_transpose3d(*(cast(t, dtype) for t in (x, weight, bias)), *geometry, **keywords)
    c, gn_weight, gn_bias = (cast(t, torch.float32) for t in (c, gn_weight, gn_bias))
    return OPS.group_norm_fwd(c, num_groups, gn_weight, gn_bias, eps, "none", "relu")[0]


# ----------------------------------------------------------------------------------------------------------------------
# Records


op = record(f"{CONV_MEAN}_fwd", fake=_conv_mean_fwd_fake, formula=_conv_mean_fwd_formula)
op.dims = dims("N . . . .", "N N N N")
op.setup, op.backward, op.differentiable = _setup(), _conv_mean_backward, 1
op.vmap = samples()
op.flops = functools.partial(conv_flops, transposed=False)
op = record_public(CONV_MEAN, op)
op.in_steps = _conv_mean_in_steps
op.autocast = {"cpu": low(3), "cuda": _fp32_twin(CONV_MEAN)}

op = record(f"{CONV_RELU_NORM}_fwd", fake=_conv_relu_norm_fwd_fake, formula=_conv_relu_norm_fwd_formula)
op.setup, op.backward, op.differentiable = _setup(transposed=True), _conv_relu_norm_backward, 1
op.dims = dims("N . . . .", "N N N N")
op.vmap = samples()
op.flops = functools.partial(conv_flops, transposed=True)
op = record_public(CONV_RELU_NORM, op)
op.in_steps, op.in_steps_everywhere = _conv_relu_norm_in_steps, True
op.autocast = {"cpu": low(3), "cuda": _relu_norm_in_fp32}

op = record(f"{CONV_LSE}_fwd", fake=_conv_lse_fwd_fake, formula=_conv_lse_fwd_formula)
op.flops = functools.partial(conv_flops, transposed=False)
op.dims = dims("N . . . .", "N N N")
op.setup, op.backward, op.differentiable = _setup(), _conv_lse_backward, 1
op.vmap = samples()
op = record_public(CONV_LSE, op)
op.autocast = {"cpu": low(3), "cuda": _fp32_twin(CONV_LSE)}
op.in_steps = _conv_lse_in_steps
