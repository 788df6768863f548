"""What PyTorch's modules, functions and methods mean in a chain: tables, for all front ends.

They say what PyTorch's own code means. Whether a call at hand still is that code,
:mod:`~kgopt.rewrite.pytorch.originals` and :mod:`~kgopt.rewrite.chains.modules` say.
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kgopt._acts import parameters_of, text
from kgopt.rewrite.chains.chain import PRELU
from kgopt.rewrite.chains.patterns import Node
from kgopt.rewrite.optimized.disguise import original_class
from kgopt.rewrite.pytorch import originals
from kgopt.rewrite.pytorch.originals import ACTIVATION_CLASSES, CONV_MODULES

# What a function computes, given its arguments after the first: the text of `act`, None for parameters that the ops do
# not have, and whether it writes into its input.
Rule = Callable[..., tuple[str | None, bool]]
_SLOPED = ("leaky_relu", "elu", "celu")  # by the first parameter, below 0


def _text_of(name: str, inplace: bool, *values: Any) -> str | None:
    """PyTorch has no backward of negative slopes in place, and says so."""
    act = text(name, *values)
    return None if act is not None and inplace and name in _SLOPED and values[0] < 0 else act


def _rule(name: str, inplace: bool = False, takes_inplace: bool = False) -> Rule:
    """Of a function that takes the activation's parameters; ``inplace``: unless it is told otherwise."""
    parameters, defaults = parameters_of(name)
    names = (*parameters, *(["inplace"] if takes_inplace else []))
    known = dict(zip(reversed(parameters), reversed(defaults), strict=False)) | {"inplace": inplace}

    def act(*args: Any, **kwargs: Any) -> tuple[str | None, bool]:
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names) or len(given) != len(args) + len(kwargs) or not given.keys() <= set(names):
            raise TypeError("arguments that it does not have")
        given = known | given
        if not given.keys() >= set(parameters):
            raise TypeError("an argument is missing")
        writes = given["inplace"]
        values = [given[parameter] for parameter in parameters]
        return _text_of(name, writes, *values), writes

    return act


# The ops' gradient at a bound is 0, which PyTorch's is from 2.14 on.
CLAMP_STOPS = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 14)


def _clamped(low: float | None, high: float | None, inplace: bool) -> tuple[str | None, bool]:
    if not CLAMP_STOPS or low is high is None:  # no bound is an error
        return None, inplace
    return text("clamp", -math.inf if low is None else low, math.inf if high is None else high), inplace


def _clamp(inplace: bool = False) -> Rule:
    return lambda min=None, max=None: _clamped(min, max, inplace)


def _clamp_min(inplace: bool = False) -> Rule:
    return lambda min: _clamped(min, None, inplace)


def _clamp_max(inplace: bool = False) -> Rule:
    return lambda max: _clamped(None, max, inplace)


_CLAMPS = {"clamp": _clamp, "clip": _clamp, "clamp_min": _clamp_min, "clamp_max": _clamp_max}
_OF_TORCH = ("relu", "sigmoid", "tanh", "selu")  # beside those of torch.nn.functional
_OF_TENSORS = ("relu", "sigmoid", "tanh")
_PLACES = (("", False), ("_", True))  # what a name ends with, and whether it writes into its input
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _gelu(approximate: str = "none") -> tuple[str | None, bool]:
    return _GELU.get(approximate), False


def _functions() -> Iterator[tuple[Any, Rule]]:
    """PyTorch's functions for activations, as far as they are there."""
    for end, inplace in _PLACES:
        for name in ACTIVATION_CLASSES.keys() - {"gelu", "gelu_tanh", PRELU}:
            function = getattr(F, f"{name}{end}", None)
            code = getattr(function, "__code__", None)
            takes_inplace = code is not None and "inplace" in code.co_varnames[: code.co_argcount]
            yield function, _rule(name, inplace, takes_inplace)
        for name in _OF_TORCH:
            yield getattr(torch, f"{name}{end}"), _rule(name, inplace)
        for name, rule in _CLAMPS.items():
            yield getattr(torch, f"{name}{end}"), rule(inplace)
    yield F.gelu, _gelu


# As they are now. What stood in their place by then is not PyTorch's, and means nothing here.
ACTIVATION_FUNCTIONS: dict[Any, Rule] = {
    f: rule for f, rule in _functions() if f is not None and originals.is_torchs(f)
}
_MEAN, _LOGSUMEXP, _FLATTEN, _ADD = (
    f if originals.is_torchs(f) else None for f in (torch.mean, torch.logsumexp, torch.flatten, torch.add)
)

ACTIVATION_METHODS: dict[str, Rule] = {
    **{f"{name}{end}": _rule(name, inplace) for name in _OF_TENSORS for end, inplace in _PLACES},
    **{f"{name}{end}": rule(inplace) for name, rule in _CLAMPS.items() for end, inplace in _PLACES},
}


def _of_module(name: str) -> Callable[[Any], str | None]:
    """The text of a module's activation, by attributes of its parameters' names. Eager calls come here."""
    parameters, defaults = parameters_of(name)
    if not parameters:
        return lambda m: name
    first, *others = parameters

    def act(m: Any) -> str | None:
        values = (getattr(m, first), getattr(m, others[0])) if others else (getattr(m, first),)
        return name if values == defaults else _text_of(name, m.inplace if name in _SLOPED else False, *values)

    return act


_ACTIVATION_MODULES: dict[type, Callable[[Any], str | None]] = {
    **{cls: _of_module(name) for name, cls in ACTIVATION_CLASSES.items() if name != PRELU},
    nn.GELU: lambda m: _GELU.get(m.approximate),
    nn.ReLU6: lambda m: "relu6" if (m.min_val, m.max_val) == (0, 6) else None,
    nn.PReLU: lambda m: PRELU,
}


def activation_class(role: str) -> type | None:
    """PyTorch's class of an activation's text; None for other roles."""
    return ACTIVATION_CLASSES.get(role.partition("(")[0])


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def conv_of(module: Any) -> str | None:
    """Which convolution exactly this module is, also where its class was replaced by rewrite/glue/."""
    return CONV_MODULES.get(original_class(module) or type(module))


# By a user's class: what was read of its forward (rewrite/source/users/small.py); None: nothing that has a meaning.
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
    # Asked of functions, too: the module of their type is nothing that torch 2.11 traces.
    if not isinstance(module, nn.Module) or type(module).__module__.startswith("torch.nn."):
        return None
    found = read_of(module)
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


# What a function or a method of a tensor makes of a number, as an activation: its name, and what becomes of the number.
_WITH_NUMBER: dict[str, tuple[str, Callable[[float], float]]] = {
    **dict.fromkeys(("add", "iadd", "add_"), ("add", float)),
    **dict.fromkeys(("sub", "isub", "sub_"), ("add", operator.neg)),
    **dict.fromkeys(("mul", "imul", "mul_"), ("mul", float)),
    **dict.fromkeys(("truediv", "itruediv", "div", "div_"), ("mul", lambda number: 1 / number)),
}


def with_number(name: str, number: Any, reverse: bool = False) -> str | None:
    """A value plus, minus, times or divided by a number, as an activation; None: something else.

    ``reverse``: the number stands in front.
    """
    act, convert = _WITH_NUMBER.get(name, ("", float))
    if not act or type(number) not in (int, float) or (reverse and convert is not float):
        return None
    try:
        value = float(convert(number))
    except (OverflowError, ZeroDivisionError):  # an int beyond any float, or a division by zero
        return None
    return text(act, value) if math.isfinite(value) and (value or act == "add") else None


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
