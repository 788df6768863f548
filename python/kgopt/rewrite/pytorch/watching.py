"""Who looks on while code runs: hooks of modules, function modes, tracers, transforms.

What somebody watches is PyTorch's own code, call by call. Modes of kgopt's own look on harmlessly and count as nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kgopt.torch_private import (
    FORWARD_AD,
    LEVEL,
    MODES_CAN_WAIT,
    DeviceContext,
    are_functorch_transforms_active,
    function_mode_at,
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
    is_any_autocast_enabled,
    is_tracing,
    len_torch_dispatch_stack,
    len_torch_function_stack,
    pop_torch_function_stack,
    push_on_torch_function_stack,
)

# As globals: they are asked at every call of a site.
_is_compiling, _is_autocast_enabled = torch.compiler.is_compiling, torch.is_autocast_enabled
_get_autocast_dtype = torch.get_autocast_dtype


def is_captured() -> bool:
    """Whether a CUDA graph records what runs now.

    A process that never used a GPU is not asked: it may be forked from one that did, where CUDA raises.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# ----------------------------------------------------------------------------------------------------------------------
# Modules


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward."""
    own = module.__dict__
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in own
        or "_call_impl" in own
        or own.get("_compiled_call_impl") is not None
    )


def any_global_hooks() -> bool:
    """Whether every module's call does more than its forward."""
    # A branch: torch 2.10 does not trace bool() of what stands for hooks where torch's own name is missing.
    if global_forward_hooks or global_forward_pre_hooks or global_backward_hooks or global_backward_pre_hooks:  # noqa: SIM103
        return True
    return False


# ----------------------------------------------------------------------------------------------------------------------
# Function modes


class OwnMode(TorchFunctionMode):
    """Modes of kgopt's."""


class _OwnModes(threading.local):
    """How many of the function modes of this thread are kgopt's own: they look on harmlessly."""

    count = 0


own_modes = _OwnModes()


def outside_own_modes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(...)``, at which no mode of ours looks: its calls belong to other modules, and looking takes time."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    count = own_modes.count
    if not count or not MODES_CAN_WAIT or len_torch_function_stack() != count:
        return function(*args, **kwargs)
    modes = [pop_torch_function_stack() for _ in range(count)]
    own_modes.count = 0
    try:
        return function(*args, **kwargs)
    finally:
        for mode in reversed(modes):
            push_on_torch_function_stack(mode)
        own_modes.count = count


def inside(mode: OwnMode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(...)``, at which a mode of ours looks."""
    own_modes.count += 1
    try:
        with mode:
            return function(*args, **kwargs)
    finally:
        own_modes.count -= 1


def is_foreign_mode() -> bool:
    """Whether a function mode sees PyTorch's functions here that is neither ours nor that of the default device.

    Nor those with which torch.export records a graph: it shall hold kgopt's ops.
    """
    if function_mode_at is None:
        return len_torch_function_stack() > 0 and not torch.compiler.is_exporting()
    modes = [function_mode_at(i) for i in range(len_torch_function_stack())]
    if torch.compiler.is_exporting():
        modes = [mode for mode in modes if not type(mode).__module__.startswith("torch.")]
    return any(not isinstance(mode, (OwnMode, DeviceContext)) for mode in modes)


# ----------------------------------------------------------------------------------------------------------------------
# Tracers, transforms, autocast


def is_watched() -> bool:
    """Something traces, transforms or counts what runs: it shall see PyTorch's own functions."""
    return bool(
        _is_compiling()
        or is_tracing()
        or are_functorch_transforms_active()
        or len_torch_dispatch_stack()
        or FORWARD_AD[LEVEL] >= 0
    )


def is_quiet() -> bool:
    """Whether nothing looks on at calls of modules and functions, but perhaps autocast and hooks of a module."""
    return not (is_watched() or len_torch_function_stack() or any_global_hooks())


def wants_torch() -> bool:
    """What is recorded shall hold PyTorch's own ops: a TorchScript or ONNX file goes where kgopt is not."""
    if _is_compiling():  # Dynamo cannot look at the exporter's flag
        return not torch.compiler.is_dynamo_compiling() and torch.onnx.is_in_onnx_export()
    return is_tracing()  # type: ignore[no-any-return]


def autocast_of(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on x's device; None where it is off. Not in code that is being compiled."""
    if not is_any_autocast_enabled():
        return None
    # A device's type is a new str at each question, which takes longer than all else here.
    kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type
    return _get_autocast_dtype(kind) if _is_autocast_enabled(kind) else None


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for x's device. Not in code that is being compiled."""
    return autocast_of(x) is not None
