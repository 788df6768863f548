"""Arguments and results: which calls can share a recording, and what is copied into it and out of it."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kgopt._layout import is_expanded
from kgopt.rewrite.cuda_graphs import machine
from kgopt.torch_private import (
    conv_precision,
    is_any_autocast_enabled,
    len_torch_function_stack,
    matmul_precision,
    matmul_reductions,
    tree_map,
)

# Values that are compared, or are always the same: none of them hides a tensor.
CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, type, enum.Enum, range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.GeneratorType),
)


class RefusedError(Exception):
    """A call that is not recorded; says why."""


def key_of(value: Any, tensors: list[Tensor]) -> Any:
    """What calls must share to take one recording; tensors are added to ``tensors``, in order.

    Raises:
        RefusedError: an argument whose values may change unseen.
    """
    kind = type(value)
    if kind is Tensor:
        for i, other in enumerate(tensors):
            if other is value:
                return kind, i
        if not machine.MACHINE.takes(value):
            raise RefusedError(f"an argument is a tensor on {value.device.type}")
        if value.layout is not torch.strided or value.is_conj() or value.is_neg() or value.requires_grad:
            raise RefusedError("an argument is sparse, a lazy conjugate, or requires a gradient")
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device
    if value is None or kind in (bool, int, str, bytes):
        return kind, value
    if kind in (float, complex):
        return kind, repr(value)  # NaN equals itself there, and -0.0 is not 0.0
    if kind in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return kind, *(key_of(v, tensors) for v in value)
    if kind is dict and all(type(k) in (str, int) for k in value):
        return kind, *((k, key_of(v, tensors)) for k, v in value.items())
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum)):
        return kind, value
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not isinstance(value, dict):
        return kind, *((name, key_of(v, tensors)) for name, v in vars(value).items())
    raise RefusedError(f"an argument is a {kind.__name__}, whose value cannot be compared")


def form_of(key: Any) -> Any:
    """A key without the kinds of its tensors."""
    if not isinstance(key, tuple) or isinstance(key, torch.Size):
        return key
    return "tensor" if key and isinstance(key[0], torch.Size) else tuple(map(form_of, key))


def with_tensors(value: Any, take: Callable[[Tensor], Tensor]) -> Any:
    """Arguments that :func:`key_of` knows, or results, with other tensors.

    Raises:
        RefusedError: a value that may hide a tensor.
    """

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return take(x)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            made = copy.copy(x)
            for name, item in vars(x).items():
                object.__setattr__(made, name, with_tensors(item, take))
            return made
        if not isinstance(x, CONSTANT):
            raise RefusedError(f"its result holds a {type(x).__name__}")
        return x

    return take(value) if isinstance(value, Tensor) else tree_map(leaf, value)


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a result, each once."""
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        if not any(other is t for other in found):
            found.append(t)
        return t

    with_tensors(value, note)
    return found


def like(t: Tensor) -> Tensor:
    """A tensor of the same strides, of its own.

    Raises:
        RefusedError: elements of t share memory.
    """
    if is_expanded(t):
        raise RefusedError("a tensor is expanded: its elements share memory")
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def places_of(tensors: Sequence[Any]) -> list[int]:
    """Where they lie; 0 for those that a recording copies in any case."""
    return list(map(machine.MACHINE.place, tensors))


def staying(before: Sequence[int], now: Sequence[int]) -> dict[int, int]:
    """Which tensors lie where they lay, by number, and where."""
    return {i: place for i, (place, then) in enumerate(zip(now, before, strict=False)) if place and place == then}


def switches() -> Any:
    """What decides, beside the arguments, which kernels a call runs."""
    mode = str(torch.get_default_device()) if len_torch_function_stack() else ""
    return (
        torch.is_grad_enabled(),
        is_any_autocast_enabled() and tuple(map(_autocast, ("cuda", "cpu"))),
        torch.get_default_dtype(),
        mode,
        conv_precision(),
        matmul_precision(),
        matmul_reductions(),
        (_cudnn.enabled, _cudnn.benchmark, _cudnn.deterministic, torch.are_deterministic_algorithms_enabled()),
        (_cuda.flash_sdp_enabled(), _cuda.mem_efficient_sdp_enabled(), _cuda.math_sdp_enabled()),
        _cuda.cudnn_sdp_enabled(),
    )


def _autocast(kind: str) -> Any:
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)


_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn
