"""What the code of a call reads outside of the model: globals, attributes behind them, variables of closures.

A replay runs no Python, so it would not notice that ``F.silu`` or a global of the model's file is another one now.
:class:`Listener` notes which functions a call runs, and what a replay would leave out (output, the clock);
:class:`Outside` is what the bytecode of these functions reads, as places and the values that they hold.

Not seen: files, the environment, values deeper inside of objects than the code's own ``name.attribute`` chains, and
what C++ reads.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import io
import logging
import os
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from kgopt.rewrite.pytorch.places import Places

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_CODE_LIKE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_CLOCKS = ("time", "posix", "nt", "select", "_socket")  # modules whose functions a replay cannot stand for
MOST = 256  # entries of a container that is compared; larger ones are registers, such as sys.modules
_OUTPUT = frozenset((builtins.print, builtins.input, builtins.open))


@functools.lru_cache(maxsize=4096)
def _chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """The names that a function looks up outside of it: of ``F.silu(x)`` ("F", "silu")."""
    found: dict[tuple[str, ...], None] = {}
    steps = list(dis.get_instructions(code))
    for i, step in enumerate(steps):
        if step.opname in _LOADS:
            names = [step.argval]
            for after in steps[i + 1 :]:
                if after.opname not in _ATTRIBUTES:
                    break
                names.append(after.argval)
            found[tuple(names)] = None
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _written(code: types.CodeType) -> str:
    """A variable outside of it that a function writes to; "" for none."""
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return str(step.argval)
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars:
            return str(step.argval)
    return ""


class Listener:
    """While it is entered: the functions that this thread runs, and why a replay would not do for them."""

    def __init__(self) -> None:
        self.codes: dict[types.CodeType, dict[str, Any]] = {}  # and their globals
        self.effect = ""  # what the first of them does that a replay does not
        self.is_blind = False  # somebody else profiles this thread
        self._before: Any = None

    def __enter__(self) -> Listener:
        self._before = sys.getprofile()
        self.is_blind = self._before is not None
        if not self.is_blind:
            sys.setprofile(self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        if not self.is_blind:
            sys.setprofile(None)

    def _note(self, frame: types.FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call":
            if code in self.codes or code.co_filename.startswith(_OWN):
                return
            name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if name not in sys.stdlib_module_names or name == "__main__":
                self.codes.setdefault(code, frame.f_globals)
        elif event == "c_call" and not self.effect and not code.co_filename.startswith((_OWN, _TORCH)):
            self.effect = _effect(arg)

    @property
    def writes(self) -> str:
        """A variable outside of the model that its code writes to; "" for none."""
        return next((w for code in self.codes if not code.co_filename.startswith(_TORCH) and (w := _written(code))), "")


def _effect(function: Any) -> str:
    """What a C function does that a replay leaves out."""
    try:
        if function in _OUTPUT or isinstance(getattr(function, "__self__", None), io.IOBase):
            return f"it calls {function.__name__}"
        if getattr(function, "__module__", None) in _CLOCKS:
            return f"it calls {function.__module__}.{function.__name__}"
    except Exception:  # a callable of C++ may have no name, or refuse to be hashed
        return ""
    return ""


class Outside(Places):
    """Places outside of a model that its code reads."""

    def __init__(self, codes: Mapping[types.CodeType, dict[str, Any]]) -> None:
        super().__init__()
        self.objects: list[Any] = []  # that the names mean, whose contents matter, too
        for code, variables in codes.items():
            is_torch = code.co_filename.startswith(_TORCH)
            for chain in _chains(code):
                self._follow(chain, variables, is_torch)
        for cell in _cells(codes):
            value = self.read(cell, "cell_contents")
            if _has_contents(value):
                self.objects.append(value)

    def _follow(self, chain: tuple[str, ...], variables: Any, is_torch: bool) -> None:
        held: Any = None
        space: Any = variables if chain[0] in variables else vars(builtins)
        for i, name in enumerate(chain):
            if space is None or name not in space:
                break  # its attribute is computed, or is a method of a built-in type
            value = space[name]
            if is_torch and not isinstance(value, _CODE_LIKE):
                return  # PyTorch's own state: its switches are compared by name
            self.add(space, name, value)
            if not _is_method_of(value, held):
                held = value
            space = _place(value, chain[i + 1]) if i + 1 < len(chain) else None
        if not is_torch and _has_contents(held):
            self.objects.append(held)


def _place(value: Any, name: str) -> Any:
    """Where ``value.name`` is found, if that is a mere look-up; else None."""
    if isinstance(value, types.ModuleType):
        return vars(value)
    own = getattr(value, "__dict__", None)
    if type(own) is dict and name in own:
        return own
    cls = value if isinstance(value, type) else type(value)
    return next((vars(base) for base in cls.__mro__ if name in vars(base)), None)


def _is_method_of(value: Any, held: Any) -> bool:
    """Whether it is a method or property of an object's class: what it reads is the object."""
    return hasattr(type(value), "__get__") and _has_contents(held)


def _has_contents(value: Any) -> bool:
    """Whether it is an object that may change while it stays the same object, as code of a model has them."""
    if isinstance(value, (*_CODE_LIKE, types.MethodType, logging.Logger)):
        return False
    if isinstance(value, (dict, list, set, deque)):
        return len(value) <= MOST
    if type(value).__module__.partition(".")[0] in ("kgopt", "builtins", "functools"):
        return False
    return isinstance(value, torch.Tensor) or type(getattr(value, "__dict__", None)) is dict


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _cells(codes: Mapping[types.CodeType, dict[str, Any]]) -> list[Any]:
    """Of the closures of these functions that outlive a call."""
    closed = {c: g for c, g in codes.items() if c.co_freevars and not c.co_filename.startswith(_TORCH)}
    found: dict[int, Any] = {}
    for function in _functions_of(closed) if closed else ():
        found.update((id(cell), cell) for cell in function.__closure__ or () if _content(cell) is not None)
    return list(found.values())


def _functions_of(codes: Mapping[types.CodeType, dict[str, Any]]) -> Iterator[types.FunctionType]:
    """All functions with one of these codes that are alive."""
    holders: Iterable[Any] = gc.get_referrers(*codes)
    if gc.get_freeze_count() and not {id(g) for g in codes.values()} <= {id(x) for x in gc.get_objects()}:
        # The collector does not show what gc.freeze() gave it. Globals that it shows are not frozen, and a function
        # is younger than its globals. Otherwise all that can be reached from here is looked at, which takes a second.
        holders = _reached(sys.modules, *codes.values(), *_locals(sys._getframe()))
    return (x for x in holders if isinstance(x, types.FunctionType) and x.__code__ in codes)


def _locals(frame: types.FrameType | None) -> Iterator[dict[str, Any]]:
    """Of a frame and of those that called it."""
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def _reached(*roots: Any) -> Iterator[Any]:
    """What these hold that may hold something itself, and what that holds, and so on; each once."""
    seen: set[int] = set()
    level: Iterable[Any] = roots
    while level:
        held = {id(x): x for x in gc.get_referents(*level)}
        level = [x for i, x in held.items() if i not in seen and gc.is_tracked(x)]
        seen.update(held)
        yield from level
