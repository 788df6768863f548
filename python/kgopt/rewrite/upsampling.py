"""Nearest upsampling and the convolution behind it, in a method: see :mod:`kgopt.rewrite.glue.later`."""

from __future__ import annotations

from typing import Any

from kgopt.rewrite.glue import plans
from kgopt.rewrite.glue.later import Upsampled, postponed


class Wait:
    """What the upsamplings of a method do until a convolution reads them, or something else."""

    def __repr__(self) -> str:
        return "Wait()"

    def __reduce__(self) -> Any:
        return Wait, ()

    def begin(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """``function(...)``, an upsampling, or its value for later."""
        return postponed(function, *args, **kwargs)

    def through(self, conv: Any, value: Any) -> Any:
        """``conv(value)``."""
        return plans.through(conv, value)

    def beside(self, value: Any, changed: Any) -> Any:
        """The value in front of code that writes to ``changed``."""
        return self.now(value)

    def now(self, value: Any) -> Any:
        """The value, for code that is no such convolution."""
        return value.value() if type(value) is Upsampled else value
