"""All that a model holds: a replay is right as long as it holds the same."""

from __future__ import annotations

import operator
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite import known
from kgopt.rewrite.graphs import machine
from kgopt.rewrite.graphs.keys import CONSTANT
from kgopt.rewrite.graphs.outside import Outside
from kgopt.torch_private import version_of

SMALL = 1024  # elements of a CPU tensor that is compared at each call; a model that holds a larger one is left alone
VALUES = 200_000  # that a model may hold
DEPTH = 4  # of objects that are no modules, in each other

_CONTENTS = frozenset(("_parameters", "_buffers", "_modules", "training"))
# What nn.Module keeps beside them says who looks on at a call, or at the state_dict.
_BESIDE = frozenset(vars(nn.Module())) - _CONTENTS
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")


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
        self.own = _own(root)
        self.root_class = type(root)
        self.types = list(map(type, self.modules))
        kinds = dict.fromkeys(base for cls in {*self.types, type(root)} for base in cls.__mro__ if base is not object)
        self.classes = [vars(cls) for cls in kinds]
        self.dicts = list(filter(None, self.dicts))  # of an empty one its size is enough
        self.holders += self.classes
        self.sizes = list(map(len, self.holders))
        self.values = self._values()
        self.places = self._places()

    def _collect(self, *roots: Any, depth: int = 0) -> None:
        waiting: deque[tuple[Any, int]] = deque((root, depth) for root in roots)
        seen, count = set(map(id, roots)) | set(map(id, self.modules)), 0
        while waiting:
            value, depth = waiting.popleft()
            inner: Any = ()
            if isinstance(value, nn.Module):
                own = vars(value)
                names = [name for name in own if name not in _BESIDE and name != known.ATTRIBUTE]
                inner = [own[name] for name in names]
                if value is not self.root():
                    self.modules.append(value)
                    self.holders.append(own)
                    self.picks.append((operator.itemgetter(*names), own))
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

    def _current(self) -> Iterator[Any]:
        # A mapping of a class, unlike a dict of the user's, has its own values().
        of_classes = chain.from_iterable(c.values() for c in self.classes)
        of_modules = chain.from_iterable([pick(own) for pick, own in self.picks])
        of_dicts = chain.from_iterable(map(dict.values, self.dicts))
        return chain(of_modules, of_dicts, chain.from_iterable(self.lists), of_classes)

    def _values(self) -> list[Any]:
        return list(self._current())

    def _places(self) -> tuple[list[Any], ...]:
        own = self.tensors
        kinds: Any = (Tensor.data_ptr, Tensor.stride, _shape, _dtype)
        return tuple(list(map(kind, own)) for kind in kinds)

    def holds(self, root: nn.Module) -> bool:
        """Whether the model still has all of it, in the same places."""
        if type(root) is not self.root_class:
            return False
        try:
            return (
                list(map(len, self.holders)) == self.sizes
                and all(map(operator.is_, map(type, self.modules), self.types))
                and all(map(operator.is_, self._current(), self.values))
                and self.is_outside_same()
                and _are(_own(root), self.own)
                and self._places() == self.places
                and all(torch.equal(t, value) for t, value in self.small)
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


def _own(root: nn.Module) -> list[Any]:
    """What the root has itself. Its hooks run around its forward, and so around a replay."""
    return [v for name, v in vars(root).items() if name not in _BESIDE and name != known.ATTRIBUTE]


def _are(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))
