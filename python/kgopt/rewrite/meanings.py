"""What PyTorch's modules, functions and methods mean in a chain."""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kgopt._acts import text
from kgopt.rewrite import originals
from kgopt.rewrite.chain import PRELU
from kgopt.rewrite.disguise import original_class
from kgopt.rewrite.patterns import Node

# What a function computes, given its arguments after the first: the text of `act`, None for parameters that the ops do
# not have, and whether it writes into its input.
Rule = Callable[..., tuple[str | None, bool]]


def _fixed(name: str, inplace: bool = False) -> Rule:
    return lambda: (name, inplace)


def _switch(name: str) -> Rule:
    def act(inplace: bool = False) -> tuple[str | None, bool]:
        return name, inplace

    return act


def _unless_refused(inplace: bool, name: str, factor: float) -> str | None:
    """PyTorch has no backward of negative slopes in place, and says so."""
    act = text(name, factor)
    return None if act is not None and inplace and factor < 0 else act


def _leaky(inplace_default: bool = False) -> Rule:
    def act(negative_slope: float = 0.01, inplace: bool = inplace_default) -> tuple[str | None, bool]:
        return _unless_refused(inplace, "leaky_relu", negative_slope), inplace

    return act


def _alpha(name: str, inplace_default: bool = False) -> Rule:
    def act(alpha: float = 1.0, inplace: bool = inplace_default) -> tuple[str | None, bool]:
        return _unless_refused(inplace, name, alpha), inplace

    return act


def _hardtanh(inplace_default: bool = False) -> Rule:
    def act(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = inplace_default) -> tuple[str | None, bool]:
        return text("hardtanh", min_val, max_val), inplace

    return act


def _threshold(inplace_default: bool = False) -> Rule:
    def act(threshold: float, value: float, inplace: bool = inplace_default) -> tuple[str | None, bool]:
        return text("threshold", threshold, value), inplace

    return act


def _shrink(name: str) -> Rule:
    def act(lambd: float = 0.5) -> tuple[str | None, bool]:
        return text(name, lambd), False

    return act


# The ops' gradient at a bound is 0, which PyTorch's is from 2.14 on.
CLAMP_STOPS = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 14)


def _clamp_text(low: float, high: float) -> str | None:
    return text("clamp", low, high) if CLAMP_STOPS else None


def _clamp(inplace: bool = False) -> Rule:
    def act(min: float | None = None, max: float | None = None) -> tuple[str | None, bool]:
        if min is None and max is None:
            return None, inplace  # an error
        return _clamp_text(-math.inf if min is None else min, math.inf if max is None else max), inplace

    return act


def _clamp_min(inplace: bool = False) -> Rule:
    return lambda min: (_clamp_text(min, math.inf), inplace)


def _clamp_max(inplace: bool = False) -> Rule:
    return lambda max: (_clamp_text(-math.inf, max), inplace)


def _gelu(approximate: str = "none") -> tuple[str | None, bool]:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate), False


def _softplus(beta: float = 1.0, threshold: float = 20.0) -> tuple[str | None, bool]:
    return text("softplus", beta, threshold), False


ACTIVATION_FUNCTIONS: dict[Any, Rule] = {
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
    F.elu: _alpha("elu"),
    F.elu_: _alpha("elu", True),
    F.mish: _switch("mish"),
    F.softplus: _softplus,
    F.relu6: _switch("relu6"),
    F.selu: _switch("selu"),
    F.selu_: _fixed("selu", inplace=True),
    torch.selu: _fixed("selu"),
    torch.selu_: _fixed("selu", inplace=True),
    F.celu: _alpha("celu"),
    F.celu_: _alpha("celu", True),
    F.threshold: _threshold(),
    F.threshold_: _threshold(True),  # type: ignore[attr-defined]
    F.hardsigmoid: _switch("hardsigmoid"),
    F.logsigmoid: _fixed("logsigmoid"),
    F.softsign: _fixed("softsign"),
    F.tanhshrink: _fixed("tanhshrink"),
    F.softshrink: _shrink("softshrink"),
    F.hardshrink: _shrink("hardshrink"),
    torch.clamp: _clamp(),
    torch.clamp_: _clamp(True),
    torch.clamp_min: _clamp_min(),
    torch.clamp_min_: _clamp_min(True),
    torch.clamp_max: _clamp_max(),
    torch.clamp_max_: _clamp_max(True),
    torch.clip: _clamp(),
    torch.clip_: _clamp(True),
}
# As they are now. What stood in their place by then is not PyTorch's, and means nothing here.
ACTIVATION_FUNCTIONS = {f: rule for f, rule in ACTIVATION_FUNCTIONS.items() if originals.is_torchs(f)}
_MEAN, _LOGSUMEXP, _FLATTEN, _ADD = (
    f if originals.is_torchs(f) else None for f in (torch.mean, torch.logsumexp, torch.flatten, torch.add)
)

ACTIVATION_METHODS: dict[str, Rule] = {
    "relu": _fixed("relu"),
    "relu_": _fixed("relu", inplace=True),
    "sigmoid": _fixed("sigmoid"),
    "sigmoid_": _fixed("sigmoid", inplace=True),
    "tanh": _fixed("tanh"),
    "tanh_": _fixed("tanh", inplace=True),
    "clamp": _clamp(),
    "clamp_": _clamp(True),
    "clamp_min": _clamp_min(),
    "clamp_min_": _clamp_min(True),
    "clamp_max": _clamp_max(),
    "clamp_max_": _clamp_max(True),
    "clip": _clamp(),
    "clip_": _clamp(True),
}

_ACTIVATION_MODULES: dict[type, Callable[[Any], str | None]] = {
    nn.ReLU: lambda m: "relu",
    nn.LeakyReLU: lambda m: (
        "leaky_relu" if m.negative_slope == 0.01 else _unless_refused(m.inplace, "leaky_relu", m.negative_slope)
    ),
    nn.SiLU: lambda m: "silu",
    nn.GELU: lambda m: {"none": "gelu", "tanh": "gelu_tanh"}.get(m.approximate),
    nn.Sigmoid: lambda m: "sigmoid",
    nn.Tanh: lambda m: "tanh",
    nn.Hardswish: lambda m: "hardswish",
    nn.Hardtanh: lambda m: text("hardtanh", m.min_val, m.max_val),
    nn.ELU: lambda m: _unless_refused(m.inplace, "elu", m.alpha),
    nn.Mish: lambda m: "mish",
    nn.Softplus: lambda m: text("softplus", m.beta, m.threshold),
    nn.ReLU6: lambda m: "relu6" if (m.min_val, m.max_val) == (0, 6) else None,
    nn.SELU: lambda m: "selu",
    nn.CELU: lambda m: text("celu", m.alpha),
    nn.Threshold: lambda m: text("threshold", m.threshold, m.value),
    nn.Hardsigmoid: lambda m: "hardsigmoid",
    nn.LogSigmoid: lambda m: "logsigmoid",
    nn.Softsign: lambda m: "softsign",
    nn.Tanhshrink: lambda m: "tanhshrink",
    nn.Softshrink: lambda m: text("softshrink", m.lambd),
    nn.Hardshrink: lambda m: text("hardshrink", m.lambd),
    nn.PReLU: lambda m: PRELU,
}

# By the name in what a role says; GELU's two ways are one class's.
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
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "celu": nn.CELU,
    "threshold": nn.Threshold,
    "hardsigmoid": nn.Hardsigmoid,
    "logsigmoid": nn.LogSigmoid,
    "softsign": nn.Softsign,
    "tanhshrink": nn.Tanhshrink,
    "softshrink": nn.Softshrink,
    "hardshrink": nn.Hardshrink,
    PRELU: nn.PReLU,
}


def activation_class(role: str) -> type | None:
    """PyTorch's class of an activation's text; None for other roles."""
    return ACTIVATION_CLASSES.get(role.partition("(")[0])


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


# By a user's class: what was read of its forward (rewrite/source/small.py); None: nothing that has a meaning here.
_READ: dict[type, Any] = {}
_READ_AT_MOST = 4096  # a program that makes classes as it runs never ends making them
_READ_FUNCTIONS: dict[Any, Any] = {}  # the same, by a user's function
_reader: list[tuple[Callable[[nn.Module], Any], Callable[[Any], Any]]] = []


def read_by(module: Callable[[nn.Module], Any], function: Callable[[Any], Any]) -> None:
    """Has these read the forwards of users' modules, and users' functions."""
    _reader.append((module, function))


def read_of(module: Any) -> Any:
    """What was read of a module's class, if that is still so."""
    cls = type(module)
    if cls not in _READ:
        if not _reader or not isinstance(module, nn.Module) or torch.compiler.is_compiling():
            return None
        if len(_READ) >= _READ_AT_MOST:
            _READ.clear()
        _READ[cls] = _reader[0][0](module)
    found = _READ[cls]
    return found if found is not None and found.is_unchanged() else None


def _read_of_function(function: Any) -> Any:
    """What was read of a user's function; None of any other."""
    if type(function) is not types.FunctionType or str(function.__module__).partition(".")[0] in ("torch", "kgopt"):
        return None
    if function not in _READ_FUNCTIONS:
        if not _reader or torch.compiler.is_compiling():
            return None
        if len(_READ_FUNCTIONS) >= _READ_AT_MOST:
            _READ_FUNCTIONS.clear()
        _READ_FUNCTIONS[function] = _reader[0][1](function)
    return _READ_FUNCTIONS[function]


def untouched(function: Any, *places: originals.Place) -> Callable[[], bool]:
    """A function that says whether a function that :func:`describe_function` knows still is that, and so are places."""
    found = _read_of_function(function)
    if found is None:
        return originals.untouched(*originals.of_function(function), *places)
    others = originals.untouched(*places)
    return lambda: found.is_unchanged() and others()


def _read_meaning(module: Any, training: bool | None = None) -> Any:
    found = None if type(module).__module__.startswith("torch.nn.") else read_of(module)
    return None if found is None else found.means(module, training)


def activation_of(module: Any) -> str | None:
    """The name of exactly this activation; None for any other module and for parameters that the ops do not have."""
    rule = _ACTIVATION_MODULES.get(type(module))
    if rule is not None:
        return rule(module)
    meaning = _read_meaning(module)
    # What writes into its input says so by this name, which others ask.
    is_act = type(meaning) is tuple and meaning[1] is bool(module.__dict__.get("inplace", False) and meaning[1])
    return meaning[0] if is_act else None


def activation_of_function(function: Any) -> str | None:
    """The name of what is called with a tensor alone: a function, functools.partial of one, a method that reads no
    attribute; None where that is no activation that the ops have.
    """
    words: dict[str, Any] = {}
    if type(function) is functools.partial:
        if function.args:
            return None
        function, words = function.func, function.keywords
    is_method = type(function) is types.MethodType
    read = _read_of_function(function.__func__ if is_method else function)
    if read is not None:
        meaning = read.means((), words, is_method) if read.is_unchanged() else None
        return meaning[0] if type(meaning) is tuple else None
    if is_method:
        return None
    node = describe_function(function, (), words, users=False)
    return node.name if node is not None and node.kind == "act" and untouched(function)() else None


def is_activation(module: Any) -> bool:
    """An activation that is known, perhaps with parameters that the ops do not have."""
    return type(module) in _ACTIVATION_MODULES


def may_be_identity(module: Any) -> bool:
    """nn.Identity, and dropout, which is one in eval mode."""
    if type(module) is nn.Identity or type(module) in _DROPOUTS:
        return True
    return "x" in (_read_meaning(module), _read_meaning(module, False))


def is_identity(module: Any) -> bool:
    """Now."""
    if type(module) is nn.Identity or (type(module) in _DROPOUTS and (not module.training or module.p == 0)):
        return True
    return bool(_read_meaning(module) == "x")


class _Unknown:
    """An argument that is not a constant."""


UNKNOWN = _Unknown()


def describe_function(function: Any, args: Sequence[Any], kwargs: dict[str, Any], users: bool = True) -> Node | None:
    """The node that a call makes, without its inputs; ``args`` are those after the tensors.

    ``users``: of users' functions, too. Whether these still are what was read :func:`untouched` knows.
    """
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
        read = _read_of_function(function) if users else None
        meaning = read.means(args, kwargs) if read is not None and read.is_unchanged() else None
        return Node("act", name=meaning[0], inplace=meaning[1]) if type(meaning) is tuple else None
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
