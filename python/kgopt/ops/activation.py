"""Chains of activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kgopt import _acts, reference
from kgopt._layout import as_x_lies, empty_like, wide
from kgopt.ops.autocast import cast
from kgopt.ops.calls import in_backward
from kgopt.ops.registry import LETTERS, OPS, Dims, record
from kgopt.ops.vmap import pointwise

_ATEN = torch.ops.aten
activation_backward = in_backward("activation_backward")  # as nodes call it
# Derivatives for which the result spares evaluating the function again. On CUDA it is reading that takes the time.
_FROM_RESULT = {"tanh": _ATEN.tanh_backward, "sigmoid": _ATEN.sigmoid_backward}


def _setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
    x, ctx.act = inputs
    ctx.from_result = _FROM_RESULT.get(ctx.act) if x.is_cpu else None
    # ReLU's slope follows from its result, which whoever reads it keeps; x then is nobody's.
    ctx.save_for_backward(x if ctx.from_result is None and ctx.act != "relu" else output)


def _backward(ctx: Any, dy: Tensor) -> Any:
    (saved,) = ctx.saved_tensors
    if ctx.from_result is not None:
        return (ctx.from_result(dy, saved),)
    return (activation_backward(dy, saved, ctx.act),)


def _softplus_in_fp32(op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """softplus is the one activation on torch's fp32 list; what follows it in a chain is fp32 too."""
    x, act = args
    return OPS.activation(cast(x, torch.float32) if "softplus" in act else x, act)


def _silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def _sigmoid_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return dy * s * (1 - s)


def _tanh_backward(dy: Tensor, x: Tensor) -> Tensor:
    return dy * (1 - torch.tanh(x).square())


def _mish_backward(dy: Tensor, x: Tensor) -> Tensor:
    t = torch.tanh(F.softplus(x))
    return dy * (t + x * torch.sigmoid(x) * (1 - t.square()))


def _hardswish_backward(dy: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0, torch.where(x < 3, dy * (x / 3 + 0.5), dy))


def _clamp_backward(dy: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    inside = (x > low) | (low == -math.inf)
    return torch.where(inside & ((x < high) | (high == math.inf)), dy, 0)


_DERIVATIVES: dict[str, Callable[..., Tensor]] = {
    "relu": lambda dy, x: _ATEN.threshold_backward(dy, x, 0),
    "leaky_relu": lambda dy, x, slope: _ATEN.leaky_relu_backward(dy, x, slope, False),
    "silu": _silu_backward,
    "gelu": lambda dy, x: _ATEN.gelu_backward(dy, x, approximate="none"),
    "gelu_tanh": lambda dy, x: _ATEN.gelu_backward(dy, x, approximate="tanh"),
    "sigmoid": _sigmoid_backward,
    "tanh": _tanh_backward,
    "hardswish": _hardswish_backward,
    "hardtanh": _ATEN.hardtanh_backward,
    "elu": lambda dy, x, alpha: _ATEN.elu_backward(dy, alpha, 1.0, 1.0, False, x),
    "mish": _mish_backward,
    "softplus": _ATEN.softplus_backward,
    "relu6": lambda dy, x: _ATEN.hardtanh_backward(dy, x, 0.0, 6.0),
    "selu": lambda dy, x: _ATEN.elu_backward(dy, *_acts.SELU, 1.0, False, x),
    "celu": lambda dy, x, alpha: _ATEN.elu_backward(dy, alpha, 1.0, 1 / alpha, False, x),
    "clamp": _clamp_backward,
    "threshold": lambda dy, x, threshold, value: _ATEN.threshold_backward(dy, x, threshold),
    "hardsigmoid": lambda dy, x: torch.where((x > -3) & (x < 3), dy / 6, 0),
    "logsigmoid": lambda dy, x: dy * torch.sigmoid(-x),
    "softsign": lambda dy, x: dy * (1 + x.abs()).reciprocal().square(),
    "tanhshrink": lambda dy, x: dy * torch.tanh(x).square(),
    "softshrink": lambda dy, x, limit: torch.where((x < -limit) | (x > limit), dy, 0),
    "hardshrink": lambda dy, x, limit: torch.where((x < -limit) | (x > limit), dy, 0),
    "add": lambda dy, x, other: dy,
    "mul": lambda dy, x, other: dy * other,
}


def chain_backward(dy: Tensor, x: Tensor, act: str) -> Tensor:
    """Gradient of a chain's argument, from that of its result."""
    arguments = []
    for one in _acts.parse(act):
        arguments.append((one, x))
        x = reference.activation_ref(x, one.text)
    for (name, parameters), x in reversed(arguments):
        dy = _DERIVATIVES[name](dy, x, *parameters)
    return dy


def _formula(x: Tensor, act: str) -> Tensor:
    return as_x_lies(reference.activation_ref(wide(x), act), x)


def _backward_formula(dy: Tensor, x: Tensor, act: str) -> Tensor:
    return as_x_lies(chain_backward(wide(dy), wide(x), act), x)


def _dims(tensors: int) -> Callable[[dict[str, Any]], Dims]:
    """Every dim may be sharded."""

    def of(given: dict[str, Any]) -> Dims:
        letters = LETTERS[: given["x"].dim()]
        return Dims((letters,) * tensors, (letters,), letters)

    return of


op = record("activation", fake=lambda x, act: empty_like(x), formula=_formula)
op.dims = _dims(1)
op.setup, op.backward = _setup, _backward
op.autocast = {"cuda": _softplus_in_fp32}
op.vmap = pointwise(1)

op = record("activation_backward", fake=lambda dy, x, act: empty_like(x), formula=_backward_formula)
op.dims = _dims(2)
op.vmap = pointwise(2)
