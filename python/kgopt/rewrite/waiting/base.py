"""What waits to be computed, and what rewritten code calls while it does: the base classes.

:mod:`~kgopt.rewrite.source` writes calls of a :class:`Written` object into a user's method. What such a call gives may
be no tensor yet. This file knows neither which values wait nor for what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from kgopt.rewrite.chains.modules import does_nothing


class Unmade:
    """A value that is computed when it is asked for, by the call that stands in the user's code."""

    __slots__ = ("compute", "made")

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute = compute
        self.made: Any = None

    def value(self) -> Any:
        """The tensor: the same one whenever it is asked for."""
        if self.made is None:
            self.made = self.compute()
        return self.made


class Written:
    """What a method that was written anew calls by a name such as ``_kgopt_pad_0``."""

    waits: ClassVar[Any] = ()  # classes of the values that it lets wait

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __reduce__(self) -> Any:
        return type(self), ()

    def now(self, value: Any) -> Any:
        """The tensor, for code that does not know of what waits."""
        return value.value() if isinstance(value, self.waits) else value

    def beside(self, value: Any, changed: Any) -> Any:
        """The value in front of code that writes to ``changed``."""
        return self.now(value)

    def skip(self, module: Any, value: Any) -> Any:
        """``module(value)``; a module that does nothing lets it wait."""
        if isinstance(value, self.waits):
            if does_nothing(module):
                return value
            value = value.value()
        return module(value)
