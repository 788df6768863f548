"""What is going on around a call: tracing, modes, autocast, torch.func, forward mode."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kgopt.torch_private.lookup import ZERO, expect, private, privates


def _any_requires_grad(*args: Any) -> bool:
    return any(isinstance(a, Tensor) and a.requires_grad for a in args)


def _is_any_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


class _NeedsSetupContext(torch.autograd.Function):
    """A function that torch.func refuses: its forward takes the ctx."""

    @staticmethod
    def forward(ctx: Any) -> None:
        """Nothing."""


def _are_transforms_active() -> bool:
    try:
        _NeedsSetupContext.apply()
    except RuntimeError:
        return True
    return False


def _function_modes() -> int:
    """0, or more than anybody pushes: torch.overrides says of a plain tensor only that some mode looks on."""
    return sys.maxsize if torch.overrides.has_torch_function((ZERO,)) else 0


_probe_library: Any = None
_seen: list[str] = []


def _dispatch_modes() -> int:
    """The same of dispatch modes: an op above them is given the dispatch keys that are on."""
    global _probe_library
    if _probe_library is None:
        _probe_library = torch.library.Library("kgopt_probe", "FRAGMENT")
        _probe_library.define("keys(Tensor x) -> Tensor")

        def keys(keyset: Any, x: Tensor) -> Tensor:
            _seen.append(str(keyset))
            return x

        _probe_library.impl("keys", keys, "Autograd", with_keyset=True)
    _seen.clear()
    with torch.inference_mode(False):  # which leaves out Autograd
        torch.ops.kgopt_probe.keys.default(ZERO)
    return sys.maxsize if "Python" in _seen[0] else 0


any_requires_grad: Callable[..., bool] = private(
    "torch._C._any_requires_grad", _any_requires_grad, "asks each tensor", lambda f: expect(f(ZERO, 1, None), bool)
)
is_tracing: Callable[[], bool] = private(
    "torch._C._is_tracing", torch.jit.is_tracing, "torch.jit.is_tracing", lambda f: expect(f(), bool)
)
is_any_autocast_enabled: Callable[[], bool] = private(
    "torch._C._is_any_autocast_enabled",
    _is_any_autocast_enabled,
    "torch.is_autocast_enabled of each device",
    lambda f: expect(f(), bool),
)
are_functorch_transforms_active: Callable[[], bool] = private(
    "torch._C._are_functorch_transforms_active",
    _are_transforms_active,
    "tries an autograd.Function that torch.func refuses",
    lambda f: expect(f(), bool),
)
len_torch_function_stack: Callable[[], int] = private(
    "torch._C._len_torch_function_stack",
    _function_modes,
    "torch.overrides.has_torch_function; modes of ours then count as somebody's",
    lambda f: expect(f(), int),
)
function_mode_at: Callable[[int], Any] | None = private(
    "torch._C._get_function_stack_at", None, "every function mode counts as the user's"
)
DeviceContext: Any = private(  # the function mode of torch.set_default_device
    "torch.utils._device.DeviceContext",
    type(None),
    "the mode of the default device counts as the user's",
    lambda c: expect(c, type),
)
nn_functions: Any = private("torch._C._nn", types.SimpleNamespace(), "whether somebody replaced them is not asked")
len_torch_dispatch_stack: Callable[[], int] = private(
    "torch._C._len_torch_dispatch_stack",
    _dispatch_modes,
    "an op of our own that sees the dispatch keys",
    lambda f: expect(f(), int),
)
_stack = privates(
    ("torch._C._pop_torch_function_stack", "torch._C._push_on_torch_function_stack"),
    "function modes of ours stay in place while modules inside run",
)
pop_torch_function_stack: Any
push_on_torch_function_stack: Any
pop_torch_function_stack, push_on_torch_function_stack = _stack or (None, None)
MODES_CAN_WAIT = _stack is not None


class _Asked(Mapping[str, int]):
    """Stands for the namespace of forward_ad: its level, found out by making a dual number."""

    def __getitem__(self, name: str) -> int:
        try:
            forward_ad.make_dual(ZERO, ZERO)
        except RuntimeError:  # no level is active
            return -1
        return 0

    def __iter__(self) -> Iterator[str]:
        return iter((LEVEL,))

    def __len__(self) -> int:
        return 1


# FORWARD_AD[LEVEL] >= 0: forward mode is on. An entry of a dict, for a function would take longer than the question.
LEVEL = "_current_level"
FORWARD_AD: Mapping[str, Any] = (
    vars(forward_ad)
    if private(
        "torch.autograd.forward_ad._current_level",
        None,
        "tries to make a dual number",
        lambda level: expect(level, int),
    )
    is not None
    else _Asked()
)


_set_forward: Any = private(
    "torch.autograd.forward_ad._set_fwd_grad_enabled",
    None,
    "forward mode runs PyTorch's functions, by whose graph its results are differentiated again",
    lambda switch: switch(True).__enter__ and switch(True).__exit__,
)
SWITCHES_TANGENTS = _set_forward is not None


def pass_tangents(on: bool) -> Any:
    """A context in which tangents are, or are not, passed on. Without SWITCHES_TANGENTS they always are, or never."""
    return contextlib.nullcontext() if _set_forward is None else _set_forward(on)
