"""Dispatch keys, nodes of autograd, and what an overload knows of itself."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kgopt.torch_private.lookup import ZERO, expect, private

_DISPATCH = "ops take the dispatcher's whole way; autocast is switched off around them"


def _has_keys(keys: Any) -> None:
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "AutocastCPU", "AutocastCUDA"):
        getattr(keys, name)


_keys = [
    private("torch._C.DispatchKey", None, _DISPATCH, _has_keys),
    private("torch._C.DispatchKeySet", None, _DISPATCH),
    private("torch._C._ExcludeDispatchKeyGuard", None, _DISPATCH),
]
HAS_GUARDS = None not in _keys


def exclude(*keys: str) -> Callable[[], Any]:
    """What makes a context in which ops pass over these dispatch keys. Only with :data:`HAS_GUARDS`."""
    key, key_set, guard = _keys
    found = key_set(getattr(key, keys[0]))
    for name in keys[1:]:
        found = found | key_set(getattr(key, name))
    return functools.partial(guard, found)


def without_autocast(device: str) -> Callable[[], Any]:
    """What makes a context in which autocast is off for ``device``, "cpu" or "cuda". Not in compiled code."""
    if HAS_GUARDS:
        return exclude(f"Autocast{device.upper()}")
    return functools.partial(torch.autocast, device, enabled=False)


without_autocast_on_cuda = without_autocast("cuda")


def _minus_autograd(keyset: Any) -> Any:
    """The keys below Autograd."""
    while "Autograd" in str(keyset):
        keyset = keyset.remove(keyset.highestPriorityTypeId())
    return keyset


class _Keys:
    """A set of dispatch keys whose ``&`` leaves those below Autograd, whatever it is with."""

    def __init__(self, keyset: Any) -> None:
        self.keyset = keyset

    def __and__(self, _: Any) -> Any:
        return _minus_autograd(self.keyset)


def at_autograd(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """An Autograd kernel, which gets a keyset first and goes on at ``keyset & BELOW_AUTOGRAD``, to be registered."""
    if BELOW_AUTOGRAD is not None:
        return kernel
    return lambda keyset, *args, **keywords: kernel(_Keys(keyset), *args, **keywords)


def _intersects(found: Any) -> None:
    found & found


BELOW_AUTOGRAD: Any = private(
    "torch._C._after_autograd_keyset", None, "takes keys off a set until Autograd's is gone", _intersects
)
below_autograd: Callable[[], Any] = private(
    "torch._C._AutoDispatchBelowAutograd",
    contextlib.nullcontext,
    "ops go through their Autograd kernels",
    lambda guard: guard().__enter__ and guard().__exit__,
)


def _can_record(function: Any) -> None:
    class Twice(function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy * 2

    with torch.inference_mode(False), torch.enable_grad():
        y = Twice.apply(torch.zeros((), requires_grad=True))
        # Not through the engine: with a GPU there its threads start at the first backward of a process, and no process
        # that is forked from it can run one.
        if y.grad_fn.apply(torch.ones(())).item() != 2:
            raise ValueError("another gradient")


_single: Any = private(
    "torch.autograd.function._SingleLevelFunction",
    None,
    "torch.autograd.Function; under torch.func the ops are PyTorch's formulas",
    _can_record,
)
single_level: Any = private(
    "torch._functorch.utils.enable_single_level_autograd_function",
    None,
    "under torch.func the ops are PyTorch's formulas",
    lambda make: make().__enter__ and make().__exit__,
)
# Without both, or without the keys below Autograd, a node cannot be recorded at one level of torch.func.
RECORDS_LEVELS = _single is not None and single_level is not None
Function: Any = _single if RECORDS_LEVELS else torch.autograd.Function
"""What kgopt's nodes derive from."""

_compiled_key: Any = private(
    "torch.autograd.Function._compiled_autograd_key", None, "compiled autograd refuses the backward of kgopt's ops"
)
if RECORDS_LEVELS and _compiled_key is not None:

    class _Node(_single):  # type: ignore[misc]
        _compiled_autograd_key = staticmethod(_compiled_key)

    Function = _Node


def set_backward(node: Any, backward: Callable[..., Any]) -> None:
    """Has the engine call ``backward(ctx, *grads)`` itself, without the steps of torch's own apply.

    Where the attribute is missing, the engine calls node.backward, which is the same function.
    """
    if _HAS_BACKWARD_CLASS:
        node._backward_cls.apply = backward


_HAS_BACKWARD_CLASS = (
    private(
        "torch.autograd.Function._backward_cls",
        None,
        "torch's own apply calls the backward",
        lambda cls: cls.apply,  # type: ignore[attr-defined]
    )
    is not None
)


def packed(op: Any) -> Callable[..., Any]:
    """What an overload's own ``__call__`` calls, without that frame."""
    return op._op if _HAS_OP else op  # type: ignore[no-any-return]


_ADD = "torch.ops.aten.add.Tensor"
_HAS_OP = private(f"{_ADD}._op", None, "calls the overload", lambda op: expect(op(ZERO, ZERO), Tensor)) is not None


def schema_of(op: Any) -> Any:
    """An overload's schema: arguments with name, kwarg_only and default_value, returns, and is_mutable."""
    if _HAS_SCHEMA:
        return op._schema
    from torch.fx.operator_schemas import get_signature_for_torch_op

    signatures: Any = get_signature_for_torch_op(op)
    parameters = signatures[0].parameters.values() if signatures else ()
    found = signatures[0].return_annotation if signatures else None
    # Several: a tuple of types up to torch 2.13, a type since.
    returns = found if isinstance(found, tuple) else getattr(found, "__args__", None) or (found,)
    # Whether it writes is not told there: as if it did.
    return types.SimpleNamespace(arguments=[_Argument(p) for p in parameters], returns=returns, is_mutable=True)


class _Argument:
    """A schema's argument, from a signature."""

    def __init__(self, parameter: inspect.Parameter) -> None:
        self.name = parameter.name
        self.type = parameter.annotation
        self.kwarg_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        self.default_value = None if parameter.default is inspect.Parameter.empty else parameter.default


_HAS_SCHEMA = (
    private(
        f"{_ADD}._schema",
        None,
        "torch.fx.operator_schemas",
        lambda schema: (
            [(a.name, a.kwarg_only, a.default_value) for a in schema.arguments]
            + [len(schema.returns), schema.is_mutable]
        ),
    )
    is not None
)
