"""All that a model holds: a replay is right as long as it holds the same."""

from __future__ import annotations

import gc
import operator
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite.cuda_graphs import machine
from kgopt.rewrite.cuda_graphs.keys import CONSTANT
from kgopt.rewrite.cuda_graphs.outside import Outside
from kgopt.rewrite.optimized import known
from kgopt.torch_private import version_of

SMALL = 1024  # elements of a CPU tensor that is compared at each call; a model that holds a larger one is left alone
VALUES = 200_000  # that a model may hold
DEPTH = 4  # of objects that are no modules, in each other

_CONTENTS = frozenset(("_parameters", "_buffers", "_modules", "training"))
# What nn.Module keeps beside them says who looks on at a call, or at the state_dict.
_BESIDE = frozenset(vars(nn.Module())) - _CONTENTS
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_shape, _dtype, _bytes = map(operator.attrgetter, ("shape", "dtype", "nbytes"))


class Stamp:
    """All that a model held at one time, and what its code read beside; ``why``: what of it cannot be watched, or be
    recorded.
    """

    def __init__(self, root: nn.Module, codes: Mapping[types.CodeType, dict[str, Any]] | None = None) -> None:
        """``codes``: the functions that were seen to run, with their globals."""
        self.why = ""
        self.root = weakref.ref(root)
        self.codes = dict(codes or {})
        self.outside = Outside(self.codes)
        self.modules: list[nn.Module] = []  # but the root: it holds this
        self.hooks: list[Any] = []
        self.holders: list[Any] = []  # whatever holds values
        self.picks: list[tuple[Any, dict[str, Any]]] = []  # of a module what its forward may read, and where that is
        self.dicts: list[dict[Any, Any]] = []
        self.lists: list[Any] = []
        self.tensors: list[Tensor] = []
        self.small: list[tuple[Tensor, Tensor]] = []  # on the CPU, with its values
        self.is_outside_same = self.outside.check()
        self._collect(root)
        self._collect(*self.outside.objects, depth=DEPTH - 1)
        self._own = _pick_of(_read(root))
        self.own = self._own(vars(root))
        self.own_size = len(vars(root))
        self.root_class = type(root)
        types = {*map(type, self.modules), type(root)}
        kinds = dict.fromkeys(base for cls in types for base in cls.__mro__ if base is not object)
        self.classes = list(map(_space_of, kinds))
        self.dicts = list(filter(None, self.dicts))  # of an empty one its size is enough
        self.holders += self.classes  # where an entry moves from one to the next, sizes alone tell
        self.sizes = list(map(len, self.holders))
        self.values = self._current()
        self.places = self._places()
        self.forms = self._forms()

    def _collect(self, *roots: Any, depth: int = 0) -> None:
        waiting: deque[tuple[Any, int]] = deque((root, depth) for root in roots)
        seen, count = set(map(id, roots)) | set(map(id, self.modules)), 0
        while waiting:
            value, depth = waiting.popleft()
            inner: Any = ()
            if isinstance(value, nn.Module):
                own, names = vars(value), _read(value)
                inner = [own[name] for name in names]
                if value is not self.root():
                    self.modules.append(value)
                    self.holders.append(own)
                    self.picks.append((_pick_of(names), own))
                    self.hooks += [own[name] for name in _HOOKS if name in own]
                depth = -1  # its parameters and children are as near as itself
            elif isinstance(value, Tensor):
                self._add(value)
            elif isinstance(value, dict):
                self.holders.append(value)
                self.dicts.append(value)
                inner = value.values()
            elif isinstance(value, (list, set, deque)):
                self.holders.append(value)
                self.lists.append(value)
                inner = value
            elif isinstance(value, (tuple, frozenset)):
                inner = value
            elif depth < DEPTH and type(getattr(value, "__dict__", None)) is dict:
                self.holders.append(value.__dict__)
                self.dicts.append(value.__dict__)
                inner = value.__dict__.values()
            for item in list(inner):
                if not isinstance(item, CONSTANT) and id(item) not in seen:
                    seen.add(id(item))
                    waiting.append((item, depth + 1))
            count += len(inner)
            if count > VALUES:
                self.why = f"it holds more than {VALUES} values"
                return

    def _add(self, t: Tensor) -> None:
        if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided:
            self.why = self.why or f"it holds a {type(t).__name__}, which is no plain tensor"
            return
        if not machine.MACHINE.takes(t):
            if t.device.type != "cpu" or t.numel() > SMALL:
                self.why = self.why or f"it holds a tensor on {t.device.type} of shape {tuple(t.shape)}"
            else:
                self.small.append((t, t.detach().clone()))
        self.tensors.append(t)

    @property
    def devices(self) -> set[torch.device]:
        """Where its tensors are, but for small ones on the CPU."""
        return {t.device for t in self.tensors if machine.MACHINE.takes(t)}

    def _current(self) -> list[Any]:
        found = _values_of(self.classes)
        found += map(type, self.modules)
        for pick, own in self.picks:
            found += pick(own)
        for entries in self.dicts:
            found += _values(entries)
        for items in self.lists:
            found += items
        return found

    def _places(self) -> tuple[list[int], list[int]]:
        return list(map(Tensor.data_ptr, self.tensors)), list(map(_bytes, self.tensors))

    def _forms(self) -> tuple[list[Any], ...]:
        own = self.tensors
        return list(map(Tensor.stride, own)), list(map(_shape, own)), list(map(_dtype, own))

    def may_launch(self, root: nn.Module) -> bool:
        """Whether a replay does no harm, be its result right or not: all memory that it reads is still the model's.

        Where somebody looks on at a module inside, it would be for nothing.
        """
        return type(root) is self.root_class and not any(self.hooks) and self._has_places()

    def _has_places(self) -> bool:
        try:
            return self._places() == self.places
        except RuntimeError:  # a tensor that has none
            return False

    def holds(self, root: nn.Module) -> bool:
        """Whether the model still has all of it, in the same places."""
        return self._has_places() and self.holds_beside_places(root)

    def holds_beside_places(self, root: nn.Module) -> bool:
        """The same, where :meth:`may_launch` was asked a moment ago."""
        own = vars(root)
        if type(root) is not self.root_class or len(own) != self.own_size:
            return False
        try:
            return (
                list(map(len, self.holders)) == self.sizes
                and all(map(operator.is_, self._current(), self.values))
                and all(map(operator.is_, self._own(own), self.own))
                and self.is_outside_same()
                and self._forms() == self.forms
                and (not self.small or all(torch.equal(t, value) for t, value in self.small))
            )
        except (KeyError, ValueError, RuntimeError):  # one is gone; another thread changes something at this moment
            return False

    @property
    def is_hooked(self) -> bool:
        """Whether somebody looks on at a module inside: then nothing is replayed."""
        return any(self.hooks)

    def versions(self) -> list[int | None]:
        """How often each tensor was written to; inference tensors do not say."""
        return [0 if t.is_inference() else version_of(t) for t in self.tensors]


def are_hooked(root: nn.Module) -> bool:
    """Whether somebody looks on at a module inside."""
    return any(vars(m).get(name) for m in root.modules() if m is not root for name in _HOOKS)


def _read(module: nn.Module) -> list[str]:
    """The names of what the forward of a module may read of it. The root's hooks run around a replay as well."""
    return [name for name in vars(module) if name not in _BESIDE and name != known.ATTRIBUTE]


def _pick_of(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Gives these of a dict; a module has several."""
    return operator.itemgetter(*names)


_values = dict.values  # a dict of the user's may have its own

# Behind the proxy that is a class's vars() is a dict, and the collector gives what many of them hold at once.
_SHOWN = [type(space) for space in gc.get_referents(vars(nn.Module))] == [dict]


def _space_of(cls: type) -> Any:
    """What a class holds."""
    return gc.get_referents(vars(cls))[0] if _SHOWN else vars(cls)


def _values_of(spaces: list[Any]) -> list[Any]:
    """The values of all of these."""
    return gc.get_referents(*spaces) if _SHOWN else [value for space in spaces for value in space.values()]
