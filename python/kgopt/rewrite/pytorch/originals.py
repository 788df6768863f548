"""PyTorch's own functions and methods, and whether they are still what a call runs.

A site stands for calls of PyTorch's modules and functions. Python lets a user replace each of them, and what those call
in turn: ``nn.GroupNorm.forward``, ``nn.Module.__call__``, ``F.group_norm``, ``torch.Tensor.relu_``. What was replaced
runs: :func:`untouched` compares the places that such a call looks up with the objects that were there when kgopt was
imported. An object that was no part of PyTorch by then counts as replaced for ever.

The comparison is that of :mod:`~kgopt.rewrite.pytorch.places`: it runs at every call of a site.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kgopt.rewrite.pytorch.places import Places
from kgopt.torch_private import nn_functions

Place = tuple[Any, str]  # an object, and the attribute of it that a call looks up

_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_REPLACED = object()  # is nothing's value
_NN = nn_functions
_VALUES: dict[tuple[int, str], Any] = {}  # PyTorch's own, by the owner's id and the name; owners live as long as torch


# What PyTorch calls some functions inside.
_BUILT_IN_NAMES = {"logsigmoid": "log_sigmoid"}
_CODE_NAMES = {"threshold": "_threshold", "__call__": "_wrapped_call_impl"}


def _is_torchs(value: Any, name: str) -> bool:
    """Whether an object that is found under a name is the one that PyTorch put there."""
    if value is None:
        return name == "_compiled_call_impl"
    if isinstance(value, types.ModuleType):
        return value is sys.modules.get("torch.nn.functional")
    if isinstance(value, _BUILT_IN):
        return value.__name__ == _BUILT_IN_NAMES.get(name, name)
    if not isinstance(value, types.FunctionType):
        return False
    code = value.__code__
    if code.co_name not in (name, _CODE_NAMES.get(name, name)):
        return False
    return is_torchs(value)


def is_torchs(function: Any) -> bool:
    """Whether a function that was found in PyTorch is PyTorch's: built in, or from its files."""
    if isinstance(function, _BUILT_IN):
        return True
    code = getattr(function, "__code__", None)
    # Frozen programs have relative names.
    return code is not None and code.co_filename.startswith((_TORCH, f"torch{os.sep}"))


def _value(place: Place) -> Any:
    owner, name = place
    key = id(owner), name
    if key not in _VALUES:
        if isinstance(owner, types.FunctionType):  # its code or its defaults; whose it is says its own place
            _VALUES[key] = getattr(owner, name)
        else:
            value = getattr(owner, name, _REPLACED)
            _VALUES[key] = value if _is_torchs(value, name) else _REPLACED
    return _VALUES[key]


# ----------------------------------------------------------------------------------------------------------------------
# What calls look up

# By calling a module. The last one is None, unless somebody sets it for a class.
_CALLED = ("__call__", "_call_impl", "_compiled_call_impl")


def _found(owner: Any, *names: str) -> tuple[Place, ...]:
    """Those names that this torch has, and the code of functions, which may be set while the function stays."""
    places = []
    for name in names:
        if hasattr(owner, name):
            places.append((owner, name))
            value = getattr(owner, name)
            if isinstance(value, types.FunctionType):
                places.append((value, "__code__"))
    return tuple(places)


def _twice(name: str) -> tuple[Place, ...]:
    """A function of torch._C._nn, and the one that writes into its input."""
    return _found(_NN, name, f"{name}_")


_UPSAMPLE = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d")
_EXACT = tuple(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3))

# By the function: what it calls.
_FUNCTIONS: dict[str, tuple[Place, ...]] = {
    "relu": _found(torch, "relu", "relu_"),
    **{name: _twice(name) for name in ("leaky_relu", "silu", "hardswish", "hardtanh", "elu", "mish", "relu6")},
    "hardsigmoid": _twice("hardsigmoid"),
    **{name: _found(torch, name, f"{name}_") for name in ("selu", "celu")},
    "threshold": _found(vars(F).get("_VF", torch), "threshold", "threshold_"),
    "softsign": _found(torch.Tensor, "abs", "__add__", "__truediv__"),
    "tanhshrink": _found(torch.Tensor, "tanh", "__sub__"),
    **{name: _found(torch.Tensor, name) for name in ("sigmoid", "tanh")},
    "group_norm": (*_found(torch, "group_norm"), *_found(F, "_verify_batch_size")),
    "instance_norm": (*_found(torch, "instance_norm"), *_found(F, "_verify_spatial_size")),
    "interpolate": _found(_NN, *(f"upsample_{name}" for name in _UPSAMPLE), *_EXACT),
    "pad": _found(_NN, "pad"),
    "batch_norm": (*_found(torch, "batch_norm"), *_found(F, "_verify_batch_size")),
    **{f"max_pool{n}d": (*_found(F, f"_max_pool{n}d"), *_found(torch, f"max_pool{n}d")) for n in (2, 3)},
    **{
        f"adaptive_avg_pool{n}d": (*_found(F, "_list_with_default"), *_found(_NN, f"adaptive_avg_pool{n}d"))
        for n in (2, 3)
    },
    **{
        f"adaptive_max_pool{n}d": (
            *_found(F, f"_adaptive_max_pool{n}d", f"adaptive_max_pool{n}d_with_indices", "_list_with_default"),
            *_found(_NN, f"adaptive_max_pool{n}d"),
        )
        for n in (2, 3)
    },
}


def _with_defaults(function: Any, places: tuple[Place, ...]) -> tuple[Place, ...]:
    """Of a function that code calls by itself: what it is taken to mean hangs on its defaults, too."""
    if not isinstance(function, types.FunctionType):
        return places
    return (*places, (function, "__code__"), (function, "__defaults__"))


_BY_FUNCTION = {
    getattr(F, name): _with_defaults(getattr(F, name), places)
    for name, places in _FUNCTIONS.items()
    if hasattr(F, name)
}


def functional(name: str) -> tuple[Place, ...]:
    """What a call of ``F.name`` looks up."""
    return (*_found(F, name), *_FUNCTIONS.get(name, ()))


_CONV, _TRANSPOSED = ("_conv_forward",), ("_output_padding",)
_INSTANCE = ("_check_input_dim", "_get_no_batch_dim", "_handle_no_batch_input", "_apply_instance_norm")

# By class: methods that its forward looks up on the instance, beside those that every module's call does.
METHODS: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((nn.Conv2d, nn.Conv3d), _CONV),
    **dict.fromkeys((nn.ConvTranspose2d, nn.ConvTranspose3d), _TRANSPOSED),
    **dict.fromkeys((nn.InstanceNorm2d, nn.InstanceNorm3d), _INSTANCE),
}


def _inside(cls: type, function: str, reads: bool = False) -> tuple[Place, ...]:
    """``function``: of torch.nn.functional, by the name F of the class's module; ``reads``: it has parameters."""
    looked_up = functional(function) if function else ()
    owner = sys.modules[cls.__module__]
    of_parameters = _found(cls, "__getattr__") if reads else ()
    return (*_found(cls, "forward", *METHODS.get(cls, ())), *_found(owner, "F"), *looked_up, *of_parameters)


# By the name that ops have; GELU's two ways are one class's. The parameters are attributes of a module's, by the names
# of kgopt/_acts.py.
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
    "prelu": nn.PReLU,
}

# Convolutions, and the names that ops have for them.
CONV_MODULES: dict[type, str] = {
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
}
_CALLS = {"relu6": "hardtanh", "gelu_tanh": "gelu"}  # another function than that of its name

# By class: what its forward looks up.
_INSIDE: dict[type, tuple[Place, ...]] = {
    nn.GroupNorm: _inside(nn.GroupNorm, "group_norm", True),
    **{cls: _inside(cls, "instance_norm", True) for cls in (nn.InstanceNorm2d, nn.InstanceNorm3d)},
    **{getattr(nn, f"Conv{n}d"): _inside(getattr(nn, f"Conv{n}d"), f"conv{n}d", True) for n in (2, 3)},
    nn.ConvTranspose2d: _inside(nn.ConvTranspose2d, "conv_transpose2d", True),
    nn.ConvTranspose3d: _inside(nn.ConvTranspose3d, "conv_transpose3d", True),
    **{cls: _inside(cls, _CALLS.get(name, name)) for name, cls in ACTIVATION_CLASSES.items()},
    nn.Sigmoid: (*_found(nn.Sigmoid, "forward"), *_found(torch, "sigmoid")),
    nn.Tanh: (*_found(nn.Tanh, "forward"), *_found(torch, "tanh")),
    nn.PReLU: _inside(nn.PReLU, "prelu", True),
    nn.Identity: _inside(nn.Identity, ""),
    **{getattr(nn, f"Dropout{n}"): _inside(getattr(nn, f"Dropout{n}"), f"dropout{n}") for n in ("", "1d", "2d", "3d")},
    nn.AlphaDropout: _inside(nn.AlphaDropout, "alpha_dropout"),
    nn.FeatureAlphaDropout: _inside(nn.FeatureAlphaDropout, "feature_alpha_dropout"),
    nn.Upsample: _inside(nn.Upsample, "interpolate"),
    **{cls: _inside(cls, "pad") for cls in (nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad2d, nn.ConstantPad3d)},
    nn.Sequential: _found(nn.Sequential, "forward", "__iter__"),
}


def inside(cls: type) -> tuple[Place, ...]:
    """What the forward of one of PyTorch's classes looks up."""
    return _INSIDE[cls]


def called(cls: type, made: type | None = None) -> tuple[Place, ...]:
    """What a call of a module looks up. ``made``: the subclass of ``cls`` that it has."""
    places = _found(cls, *_CALLED)
    if made is not None:
        places = tuple(
            own((made, name), _value((cls, name))) if owner is cls else (owner, name) for owner, name in places
        )
    return (*places, *_INSIDE[cls])


def of_function(function: Any) -> tuple[Place, ...]:
    """What a function that code was given by name looks up, beside its own name, which the code looks up itself."""
    try:
        return _BY_FUNCTION.get(function, ())
    except TypeError:  # not hashable
        return ()


_OPERATORS: dict[Any, str] = {operator.add: "__add__", operator.mul: "__mul__", operator.imul: "__imul__"}


def runs_as_is(function: Any) -> bool:
    """Whether what one of PyTorch's functions calls is PyTorch's own now, and so is ``operator.add`` or its kind."""
    if function in _OPERATORS:
        return untouched(*methods((_OPERATORS[function],)))()
    return untouched(*of_function(function))()


def methods(names: Iterable[str]) -> tuple[Place, ...]:
    """Methods of tensors."""
    return tuple((torch.Tensor, name) for name in names)


# ----------------------------------------------------------------------------------------------------------------------
# The question


def untouched(*places: Place) -> Callable[[], bool]:
    """A function that says whether all of these are PyTorch's own now."""
    return _untouched(tuple(dict.fromkeys((_Owner(owner), name) for owner, name in places)))


class _Owner:
    """An owner by its identity: modules and classes may define equality."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Owner) and self.owner is other.owner

    def __hash__(self) -> int:
        return id(self.owner)


@functools.cache
def _untouched(places: tuple[tuple[_Owner, str], ...]) -> Callable[[], bool]:
    looked_up = [(owner.owner, name) for owner, name in places]
    recorded = functools.partial(_are_recorded, looked_up)
    held = Places((owner, name, _value((owner, name))) for owner, name in looked_up)
    return held.check(otherwise="exporting() and recorded()", exporting=torch.compiler.is_exporting, recorded=recorded)


def _are_recorded(places: list[Place]) -> bool:
    """Whether all is PyTorch's own, but for the ``nn.Module.__call__`` and ``__getattr__`` of torch.export.

    With these it notes who calls whom, and which parameter is read.
    """
    for owner, name in places:
        now, genuine = getattr(owner, name, None), _value((owner, name))
        if now is genuine:
            continue
        code = getattr(now, "__code__", None)
        if name not in ("__call__", "__getattr__") or getattr(now, "__wrapped__", None) is not genuine or code is None:
            return False
        if not code.co_filename.startswith(_TORCH):
            return False
    return True


def own(place: Place, value: Any) -> Place:
    """Has an object of kgopt's count as what belongs there."""
    _VALUES[id(place[0]), place[1]] = value
    return place


# Now: what is replaced later is to be known from what was there.
for _place in (
    *(place for places in (*_FUNCTIONS.values(), *_BY_FUNCTION.values()) for place in places),
    *methods(("relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_", "mean", "logsumexp", "flatten", "add")),
    *methods(f"{name}{end}" for name in ("clamp", "clamp_min", "clamp_max", "clip") for end in ("", "_")),
    *methods(("__add__", "__iadd__", "__mul__", "__imul__", "__rmul__", "__radd__", "__truediv__")),
    *methods(("add_", "mul", "mul_", "addcmul", "contiguous", "float", "type_as", "expand", "expand_as")),
):
    _value(_place)

AS_CALLED: dict[type, Callable[[], bool]] = {cls: untouched(*called(cls)) for cls in _INSIDE}
AS_INSIDE: dict[type, Callable[[], bool]] = {cls: untouched(*inside(cls)) for cls in _INSIDE}


def why_replaced(cls: type) -> str:
    """For the report: what somebody replaced of what a class's modules run; "" where nothing."""
    for owner, name in called(cls):
        if getattr(owner, name, None) is not _value((owner, name)):
            return f"{getattr(owner, '__name__', owner)}.{name} was replaced"
    return ""


# ----------------------------------------------------------------------------------------------------------------------
# What function modes are given


def genuine(func: Any) -> Any:
    """PyTorch's own function, where a mode is given the one that a user put in its place.

    ``F.pad``, called by what replaced it, looks its own name up and hands that to the mode: to call it would be the
    second time.
    """
    if type(func) in _BUILT_IN or type(func) is _METHOD_WRAPPER:
        return func
    code = getattr(func, "__code__", None)
    if code is not None and code.co_filename.startswith(_TORCH):
        return func
    for owner, values in _GENUINE:
        for name, value in values.items():
            if getattr(owner, name, None) is func:
                return value
    return func


_METHOD_WRAPPER = type(object().__str__)


def _python_functions(owner: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(owner).items()
        if isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(_TORCH)
    }


def _methods() -> dict[str, Any]:
    found = {n: v for n, v in vars(torch.Tensor.__mro__[1]).items() if isinstance(v, _BUILT_IN)}
    return {**found, **_python_functions(torch.Tensor)}


_GENUINE = ((F, _python_functions(F)), (torch, _python_functions(torch)), (torch.Tensor, _methods()))
