"""Gradients of convolutions: by the extension's op where it has kernels for them, else by ATen's."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kgopt._layout import FORMATS, empty, empty_like, is_channels_last
from kgopt.ops.calls import PLAIN, in_backward, is_compiling, is_grad_enabled, wants_gradient
from kgopt.ops.derivatives import BY_PYTORCH, duals, op_of_primals, with_tangent
from kgopt.ops.geometry import convolution
from kgopt.ops.precision import conv_precision, precision_of
from kgopt.ops.registry import OPS, dims, record
from kgopt.torch_private import are_functorch_transforms_active

_FEW_CHANNELS = 16  # of a contiguous x, which have kernels of their own in conv_backward
# Elements of a contiguous dy from which on more channels may pay for copies in channels_last, in conv_backward.
_LARGE = 1 << 20

_conv_backward = in_backward("conv_backward")


def _own_gradients(dy: Tensor, x: Tensor) -> bool:
    """Whether conv_backward may have kernels of its own. ATen's op can be differentiated again, and batched by vmap."""
    if not x.is_cuda or is_grad_enabled() or are_functorch_transforms_active():
        return False
    # Dense in one of both formats: the usual cases, and quick questions.
    if not x.is_contiguous():
        if x.is_contiguous(memory_format=torch.channels_last_3d if x.dim() == 5 else torch.channels_last):
            return True
    elif x.shape[-1] > 1 and dy.shape[1] > 1 and dy.shape[-1] > 1 and dy.is_contiguous():
        if x.shape[1] <= _FEW_CHANNELS:
            return True
        elements = dy.numel()  # of a graph it may be a symbol, which a question would make a guard of
        return not isinstance(elements, int) or elements >= _LARGE
    return is_channels_last(x) or is_channels_last(dy) or x.shape[1] <= _FEW_CHANNELS


def conv_gradients(
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
    if allow_tf32 is not None and x.is_cuda and not is_compiling():
        with conv_precision(allow_tf32):
            return _gradients(needs, dy, x, weight, geometry, allow_tf32, backend)
    return _gradients(needs, dy, x, weight, geometry, allow_tf32, backend)


def _aligned(t: Tensor) -> Tensor:
    """At a multiple of 16 bytes: cuDNN has kernels of gradients that fail elsewhere, and with them the CUDA context."""
    if type(t) not in PLAIN:
        return t
    try:
        return t.clone() if t.data_ptr() % 16 else t
    except RuntimeError:  # a tensor of torch.func, which has no address
        return t


def _laid_like(t: Tensor, other: Tensor) -> Tensor:
    """With channels_last strides beside a channels_last tensor, where sizes of 1 leave a choice: as in checks.h."""
    if type(t) not in PLAIN or not t.is_contiguous() or are_functorch_transforms_active():
        return t
    if not t.is_contiguous(memory_format=FORMATS[t.dim()]) or is_channels_last(t) or not is_channels_last(other):
        return t
    strides = [0, 1, *[0] * (t.dim() - 2)]
    following = t.shape[1]
    for d in (*range(t.dim() - 1, 1, -1), 0):
        strides[d] = following
        following *= t.shape[d]
    return t.as_strided(t.shape, strides)


def _gradients(needs, dy, x, weight, geometry, allow_tf32, backend):  # type: ignore[no-untyped-def]
    # ATen's op does not keep the precision for a second derivative.
    again = allow_tf32 is not None and x.is_cuda and is_grad_enabled()
    if again or (backend != "aten" and _own_gradients(dy, x)):
        grads = _conv_backward(dy, x, weight, *geometry, needs, backend=backend, allow_tf32=allow_tf32)
        dx, dweight, dbias = grads
        return dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None
    if weight.dtype is not x.dtype:
        weight = weight.to(x.dtype)
    if x.is_cuda and not is_compiling():
        dy, x = _aligned(_laid_like(dy, x)), _aligned(_laid_like(x, dy))
        weight = _aligned(weight)
    stride, padding, dilation, output_padding, groups, transposed = geometry
    # Of the weight, not of dy: x without channels gives a result without channels, to which the bias is not added.
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return torch.ops.aten.convolution_backward.default(
        dy, x, weight, [channels], stride, padding, dilation, transposed, output_padding, groups, needs
    )


def _fake(  # type: ignore[no-untyped-def]
    dy, x, weight, stride, padding, dilation, output_padding, groups, transposed, mask, *, backend, allow_tf32
):
    none = [0]
    return (
        empty_like(x) if mask[0] else empty(x, none),
        empty_like(weight) if mask[1] else empty(x, none),
        empty(x, [dy.shape[1]] if mask[2] else none),
    )


def _setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    *tensors, stride, padding, dilation, output_padding, groups, transposed, _ = inputs
    ctx.geometry = stride, padding, dilation, output_padding, groups, transposed
    ctx.options = keywords
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, ddx: Tensor | None, ddweight: Tensor | None, ddbias: Tensor | None) -> Any:
    """A convolution's gradients are linear in dy, x and weight: what is left are convolutions of the same precision."""
    dy, x, weight = ctx.saved_tensors
    needs_dy, needs_x, needs_weight = wants_gradient(ctx, 0, 1, 2)
    ddy = dx = dweight = None
    if needs_dy:
        parts = []
        if ddx is not None:
            parts.append(convolution(ddx, weight, None, *ctx.geometry, **ctx.options))
        if ddweight is not None:
            parts.append(convolution(x, ddweight, None, *ctx.geometry, **ctx.options))
        if ddbias is not None:
            parts.append(ddbias.view(1, -1, *[1] * (dy.dim() - 2)).expand_as(dy))
        ddy = functools.reduce(operator.add, parts)
    options = ctx.options["allow_tf32"], ctx.options["backend"]
    if needs_x and ddweight is not None:
        dx, _, _ = conv_gradients((True, False, False), dy, x, ddweight, ctx.geometry, *options)
    if needs_weight and ddx is not None:
        _, dweight, _ = conv_gradients((False, True, False), dy, ddx, weight, ctx.geometry, *options)
    return ddy, dx, dweight


def _formula_by_pytorch(
    dy: Tensor, x: Tensor, weight: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    stride, padding, dilation, output_padding, groups, transposed, mask = rest
    geometry = [dy.shape[1]], stride, padding, dilation, transposed, output_padding, groups, mask
    with precision_of(x, options["allow_tf32"]):
        gradients = torch.ops.aten.convolution_backward(dy.to(x.dtype), x, weight.to(x.dtype), *geometry)
    dx, dweight, dbias = (x.new_empty(0) if g is None else g for g in gradients)
    return dx, dweight.to(weight.dtype), dbias


def _formula(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *geometry, mask = rest
    primals = op_of_primals(OPS.conv_backward, (dy, x, weight), *geometry, mask, **options)
    (pdy, px, pw), (tdy, tx, tw) = duals(dy, x, weight)
    parts: list[list[Tensor]] = [[], [], []]

    def add(of: Sequence[bool], *tensors: Tensor | None) -> None:
        if any(of):
            gradients = OPS.conv_backward(*tensors, *geometry, of, **options)
            for part, gradient, wanted in zip(parts, gradients, of, strict=True):
                if wanted:
                    part.append(gradient)

    if tdy is not None:
        add(mask, tdy, px, pw)
    of_operands = mask[0] and tw is not None, mask[1] and tx is not None, False
    add(of_operands, pdy, px if tx is None else tx, pw if tw is None else tw)
    dx, dweight, dbias = (with_tangent(p, t) for p, t in zip(primals, parts, strict=True))
    return dx, dweight, dbias


def _flops(given: dict[str, Any]) -> int:
    positions = given["x"][2:] if given["transposed"] else given["dy"][2:]
    gradients = int(given["mask"][0]) + int(given["mask"][1])
    return 2 * int(given["x"][0]) * math.prod(positions) * math.prod(given["weight"]) * gradients


op = record("conv_backward", fake=_fake, formula=_formula_by_pytorch if BY_PYTORCH else _formula)
op.dims = dims("N N .", "N . .")
op.setup, op.backward = _setup, _backward
op.flops = _flops
