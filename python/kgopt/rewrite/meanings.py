"""What PyTorch's modules, functions and methods mean in a chain."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kgopt.rewrite import originals
from kgopt.rewrite.disguise import original_class
from kgopt.rewrite.patterns import Node


def _fixed(name: str, inplace: bool = False) -> Callable[..., tuple[str | None, bool]]:
    return lambda: (name, inplace)


def _switch(name: str) -> Callable[..., tuple[str | None, bool]]:
    def act(inplace: bool = False) -> tuple[str | None, bool]:
        return name, inplace

    return act


def _leaky(inplace_default: bool = False) -> Callable[..., tuple[str | None, bool]]:
    def act(negative_slope: float = 0.01, inplace: bool = inplace_default) -> tuple[str | None, bool]:
        return ("leaky_relu" if negative_slope == 0.01 else None), inplace

    return act


def _elu(inplace_default: bool = False) -> Callable[..., tuple[str | None, bool]]:
    def act(alpha: float = 1.0, inplace: bool = inplace_default) -> tuple[str | None, bool]:
        return ("elu" if alpha == 1 else None), inplace

    return act


def _hardtanh(inplace_default: bool = False) -> Callable[..., tuple[str | None, bool]]:
    def act(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = inplace_default) -> tuple[str | None, bool]:
        return ("hardtanh" if (min_val, max_val) == (-1, 1) else None), inplace

    return act


def _gelu(approximate: str = "none") -> tuple[str | None, bool]:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate), False


def _softplus(beta: float = 1.0, threshold: float = 20.0) -> tuple[str | None, bool]:
    return ("softplus" if (beta, threshold) == (1, 20) else None), False


# Function -> what it computes, given its arguments after the first. Parameters that the ops do not have give None.
ACTIVATION_FUNCTIONS: dict[Any, Callable[..., tuple[str | None, bool]]] = {
    F.relu: _switch("relu"),
    F.relu_: _fixed("relu", inplace=True),
    torch.relu: _fixed("relu"),
    torch.relu_: _fixed("relu", inplace=True),
    F.leaky_relu: _leaky(),
    F.leaky_relu_: _leaky(True),
    F.silu: _switch("silu"),
    F.gelu: _gelu,
    F.sigmoid: _fixed("sigmoid"),
    torch.sigmoid: _fixed("sigmoid"),
    torch.sigmoid_: _fixed("sigmoid", inplace=True),
    F.tanh: _fixed("tanh"),
    torch.tanh: _fixed("tanh"),
    torch.tanh_: _fixed("tanh", inplace=True),
    F.hardswish: _switch("hardswish"),
    F.hardtanh: _hardtanh(),
    F.hardtanh_: _hardtanh(True),
    F.elu: _elu(),
    F.elu_: _elu(True),
    F.mish: _switch("mish"),
    F.softplus: _softplus,
}
# As they are now. What stood in their place by then is not PyTorch's, and means nothing here.
ACTIVATION_FUNCTIONS = {f: rule for f, rule in ACTIVATION_FUNCTIONS.items() if originals.is_torchs(f)}
_MEAN, _LOGSUMEXP, _FLATTEN, _ADD = (
    f if originals.is_torchs(f) else None for f in (torch.mean, torch.logsumexp, torch.flatten, torch.add)
)

ACTIVATION_METHODS: dict[str, Callable[..., tuple[str | None, bool]]] = {
    "relu": _fixed("relu"),
    "relu_": _fixed("relu", inplace=True),
    "sigmoid": _fixed("sigmoid"),
    "sigmoid_": _fixed("sigmoid", inplace=True),
    "tanh": _fixed("tanh"),
    "tanh_": _fixed("tanh", inplace=True),
}

_ACTIVATION_MODULES: dict[type, Callable[[Any], str | None]] = {
    nn.ReLU: lambda m: "relu",
    nn.LeakyReLU: lambda m: "leaky_relu" if m.negative_slope == 0.01 else None,
    nn.SiLU: lambda m: "silu",
    nn.GELU: lambda m: {"none": "gelu", "tanh": "gelu_tanh"}.get(m.approximate),
    nn.Sigmoid: lambda m: "sigmoid",
    nn.Tanh: lambda m: "tanh",
    nn.Hardswish: lambda m: "hardswish",
    nn.Hardtanh: lambda m: "hardtanh" if (m.min_val, m.max_val) == (-1, 1) else None,
    nn.ELU: lambda m: "elu" if m.alpha == 1 else None,
    nn.Mish: lambda m: "mish",
    nn.Softplus: lambda m: "softplus" if (m.beta, m.threshold) == (1, 20) else None,
}

# By what a role says; GELU's two ways are one class's.
ACTIVATION_CLASSES: dict[str, type] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh,
    "elu": nn.ELU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
}

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

CONV_MODULES: dict[type, str] = {
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
}


def conv_of(module: Any) -> str | None:
    """Which convolution exactly this module is, also where its class was replaced by rewrite/glue/."""
    return CONV_MODULES.get(original_class(module) or type(module))


def activation_of(module: Any) -> str | None:
    """The name of exactly this activation; None for any other module and for parameters that the ops do not have."""
    rule = _ACTIVATION_MODULES.get(type(module))
    return None if rule is None else rule(module)


def is_activation(module: Any) -> bool:
    """An activation that is known, perhaps with parameters that the ops do not have."""
    return type(module) in _ACTIVATION_MODULES


def may_be_identity(module: Any) -> bool:
    """nn.Identity, and dropout, which is one in eval mode."""
    return type(module) is nn.Identity or type(module) in _DROPOUTS


def is_identity(module: Any) -> bool:
    """Now."""
    return type(module) is nn.Identity or (type(module) in _DROPOUTS and (not module.training or module.p == 0))


class _Unknown:
    """An argument that is not a constant."""


UNKNOWN = _Unknown()


def describe_function(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Node | None:
    """The node that a call makes, without its inputs; ``args`` are those after the tensors."""
    if any(a is UNKNOWN for a in (*args, *kwargs.values())):
        return None
    if function is None:
        return None
    try:
        rule = ACTIVATION_FUNCTIONS.get(function)
    except TypeError:  # not hashable
        return None
    try:
        if rule is not None:
            return _activation(rule, args, kwargs)
        if function is _MEAN:
            return _reduce("mean", *args, **kwargs)
        if function is _LOGSUMEXP:
            return _reduce("logsumexp", *args, **kwargs)
        if function is _FLATTEN:
            return _flatten(*args, **kwargs)
        if function in (_ADD, operator.add) and not args and kwargs.get("alpha", 1) == 1 and len(kwargs) <= 1:
            return Node("add") if not kwargs or "alpha" in kwargs else None
    except TypeError:  # arguments that the function does not have: it says so itself when it runs
        return None
    return None


def describe_method(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Node | None:
    """The same for a method of the tensor."""
    if any(a is UNKNOWN for a in (*args, *kwargs.values())):
        return None
    try:
        if name in ACTIVATION_METHODS:
            return _activation(ACTIVATION_METHODS[name], args, kwargs)
        if name in ("mean", "logsumexp"):
            return _reduce(name, *args, **kwargs)
        if name == "flatten":
            return _flatten(*args, **kwargs)
        if name == "add" and not args and not kwargs:
            return Node("add")
    except TypeError:
        return None
    return None


def _activation(rule: Callable[..., tuple[str | None, bool]], args: Sequence[Any], kwargs: Any) -> Node | None:
    name, inplace = rule(*args, **kwargs)
    return None if name is None else Node("act", name=name, inplace=inplace)


def _reduce(kind: str, dim: Any = None, keepdim: bool = False) -> Node | None:
    dims = (dim,) if isinstance(dim, int) else dim
    if not isinstance(dims, (tuple, list)) or not dims or not all(type(d) is int for d in dims):
        return None  # a mean over everything, names, or an empty list, which means different things in different ops
    return Node(kind, dims=tuple(dims), keepdim=bool(keepdim))


def _flatten(start_dim: int = 0, end_dim: int = -1) -> Node | None:
    return Node("flatten") if (start_dim, end_dim) == (1, -1) else None
