"""Places that an answer rests on, and what they held: is the code still what was read?

An answer about somebody's code (it is a norm, it is an activation, a replay does the same) holds as long as the
methods, their code, the global names and the attributes that were read are the same objects. That is asked at each
call, so the question is one expression without a loop, in a function whose globals are the owners and the objects:
lists and closures are looked up more slowly. A compiler that traces it guards the same places.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

_SPACES = (dict, types.MappingProxyType)  # what owns entries; everything else owns attributes


class Places:
    """Attributes of objects and entries of dicts, each with the object that it held when it was read."""

    def __init__(self, places: Iterable[tuple[Any, str, Any]] = ()) -> None:
        self._held = {(id(owner), name): (owner, name, value) for owner, name, value in places}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, owner: Any, name: str, value: Any) -> Any:
        """Adds one; returns its value."""
        self._held[id(owner), name] = owner, name, value
        return value

    def read(self, owner: Any, name: str) -> Any:
        """Adds what a place holds now, and returns it."""
        return self.add(owner, name, owner[name] if isinstance(owner, _SPACES) else getattr(owner, name))

    def values(self) -> list[Any]:
        """What they held."""
        return [value for _, _, value in self._held.values()]

    def check(self, *more: str, given: str = "", otherwise: str = "False", **names: Any) -> Callable[..., bool]:
        """A function that says whether all of them hold the same. One that is gone does not.

        ``more``: further conditions, on the arguments ``given`` and on ``names``; ``otherwise``: what counts where
        the places or these say no.
        """
        owners: dict[int, str] = {}
        terms = []
        for i, (owner, name, value) in enumerate(self._held.values()):
            at = owners.setdefault(id(owner), f"owner_{len(owners)}")
            names[at], names[f"held_{i}"] = owner, value
            found = f"{at}[{name!r}]" if isinstance(owner, _SPACES) else f"{at}.{name}"
            same = "==" if name == "__defaults__" else "is"  # in traced code a tuple is another one
            terms.append(f"{found} {same} held_{i}")
        text = _TEXT.format(given=given, terms=" and ".join((*terms, *more)) or "True", otherwise=otherwise)
        names["__builtins__"] = builtins  # the compiler looks for it
        # Code of its own: what Python learns of its globals as it runs would be forgotten at the next function's call.
        check: Callable[..., bool] = types.FunctionType(_code_of(text).replace(), names)
        return check


_TEXT = """def unchanged({given}):
    try:
        return ({terms}) or {otherwise}
    except (AttributeError, KeyError, ValueError):
        return False
"""


@functools.lru_cache(maxsize=256)
def _code_of(text: str) -> types.CodeType:
    made = compile(text, __file__, "exec")
    return next(code for code in made.co_consts if isinstance(code, types.CodeType))
