"""The functions and methods of tensors that have a part in norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kgopt.rewrite.formulas.dims import (
    contiguous,
    expand,
    expand_as,
    flatten,
    getitem,
    movedim,
    permute,
    to,
    transpose,
    unsqueeze,
    view,
)
from kgopt.rewrite.formulas.reductions import (
    at_least,
    layer_norm,
    length,
    mean,
    normalize,
    rms_norm,
    total,
    variance,
    variance_and_mean,
    vector_length,
)
from kgopt.rewrite.formulas.values import UnknownFormulaError, Value, add, cast, multiply, power


def _to(dtype: torch.dtype) -> Callable[..., Value]:
    return lambda a: cast(a, dtype)


def _scaled_add(sign: float) -> Callable[..., Value]:
    def function(a: Any, b: Any, *, alpha: Any = 1) -> Value:
        return add(a, b, sign * float(alpha))

    return function


def _divided(a: Any, b: Any, *, rounding_mode: Any = None) -> Value:
    if rounding_mode is not None:
        raise UnknownFormulaError("it rounds a quotient")
    return multiply(a, b, -1.0)


def _root(a: Value) -> Value:
    found = power(a, 0.5)
    return replace(found, dtype=a.dtype)


def _names(function: Callable[..., Value], *names: str) -> dict[str, Callable[..., Value]]:
    return dict.fromkeys(names, function)


OPERATIONS: dict[str, Callable[..., Value]] = {
    **_names(lambda a, b: multiply(a, b), "mul", "multiply", "__mul__", "__rmul__"),
    **_names(_divided, "div", "divide", "true_divide", "__truediv__", "truediv"),
    **_names(lambda a, b: multiply(power(a, -1), b), "__rtruediv__", "__rdiv__"),  # so does PyTorch
    **_names(_scaled_add(1.0), "add", "__add__", "__radd__"),
    **_names(_scaled_add(-1.0), "sub", "subtract", "__sub__"),
    **_names(lambda a, b: add(b, a, -1.0), "__rsub__", "rsub"),
    **_names(power, "pow", "__pow__"),
    "square": lambda a: power(a, 2),
    "sqrt": _root,
    "rsqrt": lambda a: power(a, -0.5),
    "reciprocal": lambda a: power(a, -1),
    "mean": mean,
    "sum": total,
    "var": variance,
    "std": lambda *args, **kwargs: _root(variance(*args, **kwargs)),
    "var_mean": variance_and_mean,
    "norm": length,
    **_names(vector_length, "vector_norm", "linalg_vector_norm"),
    "clamp": at_least,
    "clamp_min": at_least,
    "normalize": normalize,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "permute": permute,
    **_names(movedim, "movedim", "moveaxis"),
    **_names(transpose, "transpose", "swapaxes", "swapdims"),
    "contiguous": contiguous,
    "to": to,
    "type": to,
    "type_as": to,
    "float": _to(torch.float32),
    "double": _to(torch.float64),
    "half": _to(torch.float16),
    "bfloat16": _to(torch.bfloat16),
    **_names(view, "view", "reshape"),
    "unsqueeze": unsqueeze,
    **_names(getitem, "__getitem__", "getitem"),
    "flatten": flatten,
    "expand": expand,
    "expand_as": expand_as,
}


def apply(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a function or method of tensors gives: a value, or several.

    Raises:
        UnknownFormulaError: it has no part in norms, or not with these arguments.
    """
    operation = OPERATIONS.get(name)
    if operation is None:
        raise UnknownFormulaError(f"it calls {name}")
    try:
        return operation(*args, **kwargs)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnknownFormulaError(f"it calls {name} in a way that is not known") from error
