"""The classes that kgopt.optimize makes, as those see them who look at a module's class or at its code.

Tools judge a module by what it is: quantization looks its type up in a table, torch.fx and TorchScript read its
forward, libraries keep registries of their subclasses, and anybody may write ``type(model)(config)``. So a made class
answers as the original wherever Python lets it: by its name and module, by the source, signature and globals of its
functions, and an instance that is created from it is one of the original. What an optimized module knows lies in its
``__dict__``, and each function of a made class does what the original's does where it finds nothing there.
"""

from __future__ import annotations

import abc
import copyreg
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kgopt.rewrite.optimized import known
from kgopt.rewrite.optimized.standing import Standing

# Sets a class past the `__setattr__` of nn.Module and of the user.
_set_class: Callable[[Any, type], None] = object.__dict__["__class__"].__set__


class Optimized:
    """First base of every made class."""

    # No __slots__: with a __dict__ of its own it has the object layout of an nn.Module, which __class__ demands.
    _kgopt_original: Any = None
    _kgopt_recipe: Any = ()
    _kgopt_rebuild: Any = None  # what a pickle calls with both: for __new__ without keywords, and with them
    _kgopt_stands: Mapping[str, Standing] = types.MappingProxyType({})  # what each method stands for
    _kgopt_made: Any = None  # the class itself: one that something else makes from it (FSDP2 does) does not pass for it

    def __init_subclass__(cls, **keywords: Any) -> None:
        """A registry of the user's subclasses hears of all but those that are made here."""
        if "_kgopt_original" not in cls.__dict__:
            super().__init_subclass__(**keywords)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(max(protocol, 2))
        made = type(self)
        if not is_made(made) or not isinstance(reduced, tuple):
            return reduced
        function, arguments, *rest = reduced
        how = made._kgopt_original, made._kgopt_recipe
        new, new_ex = made._kgopt_rebuild
        if function is copyreg.__newobj__ and arguments[0] is made:  # type: ignore[attr-defined]
            return (new, (*how, *arguments[1:]), *rest)
        if function is copyreg.__newobj_ex__ and arguments[0] is made:  # type: ignore[attr-defined]
            return (new_ex, (*how, *arguments[1:]), *rest)
        # A __reduce__ of the user's: it says by itself how an object of the original class is made.
        function, *arguments = (how[0] if part is made else part for part in (function, *arguments))
        return (function, tuple(arguments), *rest)


_MISSING = object()


class Transparent(type):
    """Of made classes: ``type(model).forward = other`` sets what it would set without kgopt, on the original class,
    so that all its objects have it. ``del`` takes back.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith("_kgopt_") or not is_made(cls):
            type.__setattr__(cls, name, value)
            return
        made: Any = cls
        original, standing = made._kgopt_original, made._kgopt_stands.get(name)
        if standing is None:
            # Who finds nothing in this class's __dict__ deletes at the end, and does not set what was there.
            made._kgopt_stash.setdefault(name, vars(original).get(name, _MISSING))
            setattr(original, name, value)
        elif standing.is_its(value):
            if standing.inherited:
                if name in vars(original):
                    delattr(original, name)
            else:
                setattr(original, name, standing.seen)
            type.__setattr__(cls, name, standing.ours)
        else:
            setattr(original, name, value)
            if name in vars(cls):
                type.__delattr__(cls, name)

    def __delattr__(cls, name: str) -> None:
        if name.startswith("_kgopt_") or not is_made(cls):
            type.__delattr__(cls, name)
            return
        made: Any = cls
        before = made._kgopt_stash.pop(name, _MISSING)
        if before is _MISSING:
            delattr(made._kgopt_original, name)
        else:
            setattr(made._kgopt_original, name, before)
        if name in vars(cls):
            type.__delattr__(cls, name)


class EqualsOriginal(Transparent):
    """Of made classes of torch.nn's own leaf modules: what looks a type up in a table (``type(m) in mapping``, as
    quantization and counters of operations do) finds the entry of the original.
    """

    def __eq__(cls, other: object) -> bool:
        return cls is other or (is_made(cls) and other is cls._kgopt_original)  # type: ignore[attr-defined]

    def __hash__(cls) -> int:
        return hash(cls._kgopt_original) if is_made(cls) else type.__hash__(cls)  # type: ignore[attr-defined]


@functools.cache
def _transparent(metaclass: Any) -> Any:
    """A metaclass of the user's that is transparent as well."""
    own = {name: vars(Transparent)[name] for name in ("__setattr__", "__delattr__")}
    return Transparent if metaclass is type else type(metaclass.__name__, (metaclass,), own)


def is_made(cls: Any) -> bool:
    """Whether exactly this class was made here. Asked in traced code too: Dynamo refuses a class's ``__dict__``."""
    return getattr(cls, "_kgopt_made", None) is cls


def original_class(module: Any) -> Any:
    """The class that the module had before optimize; None, where it was not changed."""
    made = type(module)
    return made._kgopt_original if getattr(made, "_kgopt_made", None) is made else None  # is_made, without its frame


def become(module: Any, cls: type) -> None:
    """``module.__class__ = cls``, whatever the module makes of assignments.

    Raises:
        TypeError: its objects are laid out in another way.
    """
    _set_class(module, cls)


def new_class(original: Any, recipe: Any, namespace: dict[str, Any], rebuild: Any, equal: bool) -> Any:
    """A subclass of ``original`` that passes for it; ``equal``: also in comparisons.

    ``rebuild``: two functions that make an instance from ``original``, ``recipe`` and arguments, for pickles.

    Nobody hears of it: neither ``__init_subclass__`` nor the code of a metaclass runs, which may register what it
    makes, refuse it, or want keywords.
    """
    namespace = {
        "__init__": _initializer(original),
        **namespace,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_kgopt_original": original,
        "_kgopt_recipe": recipe,
        "_kgopt_rebuild": rebuild,
        "_kgopt_stash": {},
    }
    metaclass = EqualsOriginal if equal and type(original) is type else _transparent(type(original))  # type: ignore[arg-type]
    # An ABC needs the caches that ABCMeta makes; else it would fill those of the original.
    maker = abc.ABCMeta if issubclass(metaclass, abc.ABCMeta) else type
    made = maker.__new__(metaclass, original.__name__, (Optimized, original), namespace)
    type.__setattr__(made, "_kgopt_made", made)
    return made


def _initializer(original: Any) -> Any:
    """An ``__init__`` that gives an object of the original class: nothing of it was looked at."""

    function = original.__init__

    @functools.wraps(function)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        # No class can be set in traced code; there the methods find nothing of ours, and do what the original's do.
        if torch.compiler.is_compiling():
            function(self, *args, **kwargs)  # torch 2.11 does not trace it as an attribute of its class
            return
        if not is_made(type(self)):
            original.__init__(self, *args, **kwargs)
            return
        become(self, original)
        known.clear(self)
        self.__init__(*args, **kwargs)

    return initialize


def as_original(function: Any, original: Any) -> Any:
    """``function`` with the name, source, signature, annotations and globals of ``original``.

    TorchScript and ``inspect`` follow ``__wrapped__`` to the source, and resolve its names where the function stands.
    ``function`` must reach what it needs through its closure, by names that no source uses (``_kgopt_...``).
    """
    code = inspect.unwrap(original)
    made = types.FunctionType(
        function.__code__,
        getattr(code, "__globals__", function.__globals__),
        getattr(original, "__name__", function.__name__),
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(made, original)


def running(_kgopt_run: Callable[..., Any], _kgopt_standing: Standing) -> Any:
    """``_kgopt_run``, whose code may use its own globals, as :func:`as_original` has it, while the class has what it
    stands for.
    """
    _kgopt_class, _kgopt_seen = _kgopt_standing.original, _kgopt_standing.seen

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _kgopt_class.forward is not _kgopt_seen:
            return _kgopt_standing.replaced(self, *args, **kwargs)
        return _kgopt_run(self, *args, **kwargs)

    return as_original(forward, _kgopt_seen)
