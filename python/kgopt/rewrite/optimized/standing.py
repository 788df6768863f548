"""A method of a class made by rewrite/optimized/classes.py stands for one of the user's class, as long as that is
there.

``Block.forward = other`` after :func:`kgopt.optimize` sets an attribute that the made class hides. So each method of a
made class looks, at each call, whether the class that it was made from still has the function that it stands for. If
not, the class's own runs: the made class then gets a method that calls whatever the user's class has, until that is the
old one again. A replacement may call the method that it found on the made class; that runs what it stood for.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


class Standing:
    """One method of a made class."""

    def __init__(self, original: Any, name: str) -> None:
        self.original = original
        self.name = name
        self.seen: Any = getattr(original, name)  # what it stands for
        self.inherited = name not in vars(original)
        self.follower: Any = None
        self.made: Any = None  # the class, and its method: when it is made
        self.ours: Any = None

    def hold(self, made: Any) -> None:
        """``made`` is the class."""
        self.made, self.ours = made, vars(made)[self.name]
        type.__setattr__(made, "_kgopt_stands", {**made._kgopt_stands, self.name: self})

    def is_its(self, value: Any) -> bool:
        """Whether a function is the one that it stands for, or stands for that."""
        return value is self.seen or value is self.ours or (value is not None and value is self.follower)

    def is_replaced(self) -> bool:
        """Whether the class has another method now."""
        return getattr(self.original, self.name, None) is not self.seen

    def replaced(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """By ``ours``, where the class has another method now: runs that."""
        if torch.compiler.is_compiling():
            return getattr(self.original, self.name)(module, *args, **kwargs)
        now = self._now()
        if now is self.seen or vars(self.made).get(self.name) is not self.ours:
            return self.seen(module, *args, **kwargs)  # its code was replaced; or the replacement calls ours
        type.__setattr__(self.made, self.name, self._follower())
        return _bound(now, module)(*args, **kwargs)

    def _now(self) -> Any:
        for base in self.original.__mro__:
            if self.name in vars(base):
                return vars(base)[self.name]
        raise AttributeError(f"{self.original.__qualname__} has no attribute {self.name!r}")

    def _follower(self) -> Any:
        @functools.wraps(self.seen)
        def follow(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return getattr(self.original, self.name)(module, *args, **kwargs)
            now = self._now()
            if now is not self.seen:
                return _bound(now, module)(*args, **kwargs)
            if vars(self.made).get(self.name) is follow:
                type.__setattr__(self.made, self.name, self.ours)
            return self.ours(module, *args, **kwargs)

        self.follower = follow
        return follow


def _bound(method: Any, module: Any) -> Any:
    get = getattr(type(method), "__get__", None)
    return method if get is None else get(method, module, type(module))
