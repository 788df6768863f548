"""A module's forward, run once on a stand-in for its input: which norm it computes.

The forward runs with an object in the place of ``self`` that notes which attributes are read, and with symbolic values
(:mod:`~kgopt.rewrite.formulas`) in the place of the input and the parameters. A forward that looks at sizes or values
of the input, writes to attributes or calls what is not known is not recognized. What the result rests on is compared
at each call (:attr:`Recognized.holds`): attributes, global names and methods that the code looks up, and the code.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kgopt.rewrite import formulas
from kgopt.rewrite.formulas import Formula, UnknownFormulaError, Value
from kgopt.rewrite.optimized.disguise import original_class
from kgopt.rewrite.pytorch import originals
from kgopt.rewrite.pytorch.places import Places

_SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device, slice)
_MISSING: Any = object()
_CACHED: Any = type(functools.lru_cache(lambda: None))
# Of Python's own functions those that change nothing.
_HARMLESS_NAMES = (
    *("str", "any", "all", "tuple", "list", "len", "isinstance", "int", "float", "bool", "range", "min", "max", "abs"),
    *("super", "getattr", "hasattr", "slice", "type"),
)
_HARMLESS = {getattr(builtins, name) for name in _HARMLESS_NAMES}
_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "DELETE_SUBSCR", "STORE_DEREF")
_STATES = {"is_grad_enabled", "is_inference_mode_enabled", "no_grad", "set_grad_enabled", "inference_mode", "detach"}


@dataclass(frozen=True)
class Recognized:
    """A module's norm, and whether the module still computes it."""

    formula: Formula
    holds: Callable[[Any, Any], bool]  # of what the module holds, and of its parameters
    looks_at_autocast: bool  # its code asks for autocast, or turns it off


class _Notes:
    """What one run of a forward rested on."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.cls: Any = original_class(module) or type(module)
        self.attributes: dict[str, Any] = {}  # of the instance
        self.parameters: dict[str, Any] = {}  # shape and dtype; None where there is none
        self.parameters_as: torch.dtype | None = None
        self.classes: set[str] = set()  # names that were found in the class, not in the instance
        self.places = Places()
        self.looks_at_autocast = False
        self.known: set[types.CodeType] = set()

    def torchs(self, owner: Any, name: str) -> None:
        """Notes something of PyTorch's, which must be genuine."""
        value = self.places.read(owner, name)
        if isinstance(value, types.FunctionType):
            self.places.read(value, "__code__")
        if not originals.is_torchs(value):
            raise UnknownFormulaError(f"{getattr(owner, '__name__', owner)}.{name} was replaced")

    def function(self, function: Any) -> None:
        """Notes what a Python function looks up, after a look at its code.

        Raises:
            UnknownFormulaError: it may do more than compute a result.
        """
        if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
            raise UnknownFormulaError("its forward is no plain function")
        code = function.__code__
        if code in self.known:
            return
        self.known.add(code)
        if code.co_freevars not in ((), ("__class__",)):
            raise UnknownFormulaError("its forward has a closure")
        self.places.read(function, "__code__")
        if function.__defaults__ is not None:
            self.places.read(function, "__defaults__")
        if function.__kwdefaults__:
            raise UnknownFormulaError("its forward has keyword-only arguments")
        owner = sys.modules.get(function.__module__)
        if owner is None or vars(owner) is not function.__globals__:
            raise UnknownFormulaError("its code belongs to no module")
        names, globals_read = _names_of(code)
        if names & _STATES:
            raise UnknownFormulaError("it looks at what is recorded")
        self.looks_at_autocast |= any("autocast" in name for name in names)
        for name in globals_read:
            self._global(owner, name)

    def _global(self, owner: Any, name: str) -> None:
        value = getattr(owner, name, _MISSING)
        if value is _MISSING:
            value = getattr(builtins, name, _MISSING)
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            if value is not _MISSING and not is_error and value not in _HARMLESS:
                raise UnknownFormulaError(f"it calls {name}")
            return
        self.places.read(owner, name)
        if isinstance(value, (types.ModuleType, type, *_SIMPLE)) or originals.is_torchs(value):
            return
        if getattr(value, "__module__", "").split(".")[0] == "torch":
            return
        while isinstance(value, _CACHED):
            value = value.__wrapped__
        if not isinstance(value, types.FunctionType):
            raise UnknownFormulaError(f"it reads {name}")
        if value.__code__.co_argcount:  # what takes no arguments sees no tensor: it answers a question
            self.function(value)


@functools.lru_cache(maxsize=1024)
def _names_of(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """All names in some code, and the global ones; those of functions in it as well."""
    names: set[str] = set(code.co_names)
    found: set[str] = set()
    for i in dis.get_instructions(code):
        if i.opname in _WRITES:
            raise UnknownFormulaError("its forward writes to more than its variables")
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.add(i.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more, globals_read = _names_of(inner)
            names |= more
            found |= globals_read
    return frozenset(names), frozenset(found)


# ----------------------------------------------------------------------------------------------------------------------
# Stand-ins


class _Unasked:
    """A size of x that says nothing."""

    def _refuse(self, *_: Any) -> Any:
        raise UnknownFormulaError("it looks at sizes of the input")

    __bool__ = __int__ = __index__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __floordiv__ = __mod__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class _Symbol:
    """Stands for a tensor in a forward that is run to see what it does."""

    def __init__(self, value: Value, notes: _Notes, device: torch.device) -> None:
        self._value, self._notes, self._device = value, notes, device

    @property
    def shape(self) -> tuple[Any, ...]:
        """Of the input only the channels are known."""
        v = self._value
        if v.shape is not None:
            return torch.Size(v.shape)
        assert v.order is not None
        if v.sizes:
            return tuple(_Unasked() if size is None else size for size in v.sizes_of(v.order))
        return tuple((1 if v.is_reduced else v.channels) if d == v.axis else _Unasked() for d in v.order)

    def size(self, dim: int | None = None) -> Any:
        """As of tensors."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> Any:
        """As of tensors."""
        return self._value.dtype

    @property
    def device(self) -> torch.device:
        """As of tensors."""
        return self._device

    @property
    def ndim(self) -> int:
        """As of tensors."""
        return self._value.rank

    def dim(self) -> int:
        """As of tensors."""
        return self._value.rank

    def is_floating_point(self) -> bool:
        """As of tensors."""
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in formulas.OPERATIONS:
            raise UnknownFormulaError(f"it calls {name}")
        return functools.partial(self._method, name)

    def _method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._notes.torchs(Tensor, name)
        return self._apply(name, self, *args, **kwargs)

    def _apply(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = formulas.apply(name, [_plain(a) for a in args], {k: _plain(v) for k, v in kwargs.items()})
        if isinstance(result, tuple):
            return tuple(_Symbol(value, self._notes, self._device) for value in result)
        return _Symbol(result, self._notes, self._device)

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        symbol = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, _Symbol))
        name = getattr(function, "__name__", "")
        for owner in (torch, F, torch.linalg, Tensor):
            found = getattr(owner, name, None)
            if found is function:
                symbol._notes.torchs(owner, name)
                if owner is F and hasattr(torch, name):
                    symbol._notes.torchs(torch, name)
                break
        else:
            if getattr(torch.linalg, name.removeprefix("linalg_"), None) is not function:
                raise UnknownFormulaError(f"it calls {name}")
        return symbol._apply(name, *args, **(kwargs or {}))

    def _refuse(self, *_: Any) -> Any:
        raise UnknownFormulaError("it does something to a tensor that is not known")

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __setitem__ = __contains__ = _refuse  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __matmul__ = __abs__ = _refuse  # type: ignore[assignment]
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __rpow__ = __floordiv__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: _Symbol, *args: Any) -> Any:
        return self._method(name, *args)

    return operator


_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "getitem")
for _name in _OPERATORS:
    setattr(_Symbol, f"__{_name}__", _operator(f"__{_name}__"))


def _plain(argument: Any) -> Any:
    if isinstance(argument, _Symbol):
        return argument._value
    if isinstance(argument, Tensor):
        raise UnknownFormulaError("it computes with a tensor that is no parameter")
    return argument


class _Self:
    """Stands for the module."""

    def __init__(self, notes: _Notes, device: torch.device) -> None:
        object.__setattr__(self, "_kgopt_notes", notes)
        object.__setattr__(self, "_kgopt_device", device)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for super()
        return object.__getattribute__(self, "_kgopt_notes").cls

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return object.__getattribute__(self, "_kgopt_notes").cls
        return _read(object.__getattribute__(self, "_kgopt_notes"), self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnknownFormulaError("its forward writes to attributes")


def _read(notes: _Notes, stand_in: _Self, name: str) -> Any:
    module = notes.module
    if name in module.__dict__:
        value = module.__dict__[name]
        if not _is_simple(value):
            raise UnknownFormulaError(f"it reads {name}")
        notes.attributes[name] = value
        return value
    parameters = module._parameters
    if name in parameters:
        parameter = parameters[name]
        if parameter is None:
            notes.parameters[name] = None
            return None
        shape, dtype = tuple(parameter.shape), notes.parameters_as or parameter.dtype
        notes.parameters[name] = shape, dtype
        device = object.__getattribute__(stand_in, "_kgopt_device")
        return _Symbol(formulas.parameter(name, shape, dtype), notes, device)
    for base in notes.cls.__mro__:
        if name in vars(base):
            value = vars(base)[name]
            notes.classes.add(name)
            if isinstance(value, types.FunctionType) and base is not nn.Module:
                notes.places.read(base, name)
                notes.function(value)
                return types.MethodType(value, stand_in)
            if isinstance(value, staticmethod):
                notes.places.read(base, name)
                notes.function(value.__func__)
                return value.__func__
            if _is_simple(value):
                notes.places.read(base, name)
                return value
            break
    raise UnknownFormulaError(f"it reads {name}")


def _is_simple(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_simple, value))
    return isinstance(value, _SIMPLE)


# ----------------------------------------------------------------------------------------------------------------------
# The question


def recognize(
    module: nn.Module,
    rank: int,
    channels: int,
    axis: int,
    dtype: torch.dtype,
    device: torch.device,
    autocast: bool,
    parameters: torch.dtype | None = None,
    in_groups: bool = False,
) -> Recognized:
    """The norm over dim ``axis`` that a module computes of an input; ``parameters``: if they had another dtype;
    ``in_groups``: over positions instead, and groups of channels.

    Raises:
        UnknownFormulaError: it computes something else, as far as can be seen.
    """
    if not in_groups:
        given = formulas.input_value(rank, channels, axis, dtype, autocast)
        return _recognize(module, given, device, parameters)
    sizes = (_Unasked(), channels, *(_Unasked() for _ in range(rank - 2)))
    tried = [channels, 1]
    for groups in tried:
        try:
            return _recognize(module, formulas.grouped_input(sizes, groups, dtype, autocast), device, parameters)
        except formulas.GroupsError as error:
            tried += [] if error.groups in tried else [error.groups]
        except UnknownFormulaError:
            continue
    raise UnknownFormulaError("it is no norm in groups of channels")


def _recognize(module: nn.Module, given: Value, device: torch.device, parameters: torch.dtype | None) -> Recognized:
    notes = _Notes(module)
    notes.parameters_as = parameters
    x = _Symbol(given, notes, device)
    for base in notes.cls.__mro__:
        if base is not nn.Module and "forward" in vars(base):
            notes.places.read(base, "forward")
    forward = notes.cls.forward
    notes.function(forward)
    if forward.__code__.co_argcount - len(forward.__defaults__ or ()) > 2 or forward.__code__.co_argcount < 2:
        raise UnknownFormulaError("its forward takes more than a tensor")
    for base in notes.cls.__mro__:  # what super() reaches
        if base is not nn.Module and isinstance(vars(base).get("forward"), types.FunctionType):
            notes.function(vars(base)["forward"])
    try:
        result = forward(_Self(notes, device), x)
    except UnknownFormulaError:
        raise
    except Exception as error:  # whatever the user's code makes of a stand-in
        raise UnknownFormulaError(f"its forward does not take a stand-in: {type(error).__name__}") from error
    if not isinstance(result, _Symbol):
        raise UnknownFormulaError("its result is no tensor")
    formula = formulas.recognize(result._value)
    return Recognized(formula, _checks(notes), notes.looks_at_autocast)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _checks(notes: _Notes) -> Callable[[Any, Any], bool]:
    """Whether all that was read of a module (its ``__dict__`` and ``_parameters``) and of others is what it was."""
    names: dict[str, Any] = {"same": _same, "missing": _MISSING}
    terms = list(_terms(notes, names))
    return notes.places.check(*terms, given="own, parameters", **names)


def _terms(notes: _Notes, names: dict[str, Any]) -> Iterator[str]:
    for i, (name, value) in enumerate(notes.attributes.items()):
        names[f"attribute_{i}"] = value
        found = f"own.get({name!r}, missing)"
        yield f"({found} is attribute_{i} or same({found}, attribute_{i}))"
    for name, parameter in notes.parameters.items():
        yield f"{name!r} not in own and {name!r} in parameters"
        if parameter is None:
            yield f"parameters[{name!r}] is None"
            continue
        names[f"shape_{name}"], names[f"dtype_{name}"] = parameter
        yield f"parameters[{name!r}] is not None and parameters[{name!r}].shape == shape_{name}"
        yield f"parameters[{name!r}].dtype is dtype_{name}"
    for name in notes.classes:
        yield f"{name!r} not in own"
