"""The text of ``act``: names and numbers to a chain and back, as ``csrc/common/act_names.h`` has it."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.compiler import is_compiling

MAX_ACTS, MAX_PARAMETERS = 15, 6
"""Activations of a chain, and different sets of parameters among them."""


class _Name(NamedTuple):
    parameters: tuple[str, ...] = ()
    defaults: tuple[float, ...] = ()  # of the last ones


_NAMES: dict[str, _Name] = {
    "none": _Name(),
    "relu": _Name(),
    "leaky_relu": _Name(("negative_slope",), (0.01,)),
    "silu": _Name(),
    "gelu": _Name(),
    "gelu_tanh": _Name(),
    "sigmoid": _Name(),
    "tanh": _Name(),
    "hardswish": _Name(),
    "hardtanh": _Name(("min_val", "max_val"), (-1.0, 1.0)),
    "elu": _Name(("alpha",), (1.0,)),
    "mish": _Name(),
    "softplus": _Name(("beta", "threshold"), (1.0, 20.0)),
    "relu6": _Name(),
    "selu": _Name(),
    "celu": _Name(("alpha",), (1.0,)),
    "clamp": _Name(("min", "max")),
    "threshold": _Name(("threshold", "value")),
    "hardsigmoid": _Name(),
    "logsigmoid": _Name(),
    "softsign": _Name(),
    "tanhshrink": _Name(),
    "softshrink": _Name(("lambd",), (0.5,)),
    "hardshrink": _Name(("lambd",), (0.5,)),
    "add": _Name(("other",)),
    "mul": _Name(("other",)),
}

ACTIVATIONS = tuple(name for name, is_ in _NAMES.items() if len(is_.defaults) == len(is_.parameters))
"""Names that stand alone."""

_NUMBER = re.compile(r"[+-]?(inf|nan|(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)")


class Act(NamedTuple):
    """One activation with all of its parameters."""

    name: str
    parameters: tuple[float, ...] = ()

    @property
    def text(self) -> str:
        """Canonical: without the parameters where they are the default ones, else all of them as Python prints them."""
        if not self.parameters or self.parameters == _NAMES[self.name].defaults:
            return self.name
        return f"{self.name}({','.join(map(repr, self.parameters))})"


@functools.lru_cache(4096)
def parse(act: str) -> tuple[Act, ...]:
    """The activations of a chain, in order, "none" left out.

    Raises:
        ValueError: as the ops do, without the name of op and argument in front.
    """
    found = [_parse_one(one, act) for one in split(act)] if act else []
    chain = tuple(one for one in found if one.name != "none")
    if len(chain) > MAX_ACTS:
        raise ValueError(f"has more than {MAX_ACTS} activations: '{act}'")
    if not fits(chain):
        raise ValueError(f"has activations of more than {MAX_PARAMETERS} different parameters: '{act}'")
    return chain


def parameters_of(name: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The names of an activation's parameters, and the defaults of the last ones."""
    return _NAMES[name].parameters, _NAMES[name].defaults


def split(act: str) -> list[str]:
    """The texts between the ``+`` that join them: not that of a number such as 1e+22."""
    parts, begin, inside = [], 0, False
    for at, c in enumerate(act):
        inside = c == "(" or (inside and c != ")")
        if c == "+" and not inside:
            parts.append(act[begin:at].strip(" "))
            begin = at + 1
    return [*parts, act[begin:].strip(" ")]


def fits(chain: Sequence[Act]) -> bool:
    """Whether the ops have room for it."""
    rows = {_row(one) for one in chain} - {()}
    return len(chain) <= MAX_ACTS and len(rows) <= MAX_PARAMETERS


SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
"""alpha and scale, as ATen has them."""
_OF_NAMES = {"relu6": (0.0, 6.0), "selu": (SELU[0] * SELU[1], SELU[1])}


def _row(one: Act) -> tuple[float, ...]:
    """The two numbers that kernels get; () for none."""
    if one == Act("softplus", (1.0, 20.0)):  # which has code of its own
        return ()
    numbers = [*one.parameters, *_OF_NAMES.get(one.name, ())]
    if len(numbers) == 1:
        numbers.append(1.0 if one.name == "elu" else 1 / numbers[0] if one.name == "celu" else 0.0)
    return tuple(numbers)


def text(name: str, *parameters: Any) -> str | None:
    """The canonical text of a module's or function's activation; None where the ops do not take such parameters."""
    if is_compiling():
        return _made(name, tuple([_constant(p) for p in parameters]))
    try:
        return _text(name, parameters)
    except TypeError:  # not hashable
        return None


def _constant(p: Any) -> Any:
    """A number that Dynamo may trace (``dynamic=True``: those of modules) as a constant, with a guard."""
    return float.fromhex(p.hex()) if type(p) is float else p


def _made(name: str, parameters: tuple[Any, ...]) -> str | None:
    if any(type(p) not in (int, float) for p in parameters):
        return None
    try:
        numbers = tuple(map(float, parameters))
    except OverflowError:
        return None
    return Act(name, numbers).text if numbers == parameters and not _refusal(name, numbers) else None


_text = functools.lru_cache(4096)(_made)


def _parse_one(one: str, act: str) -> Act:
    called, parenthesis, rest = one.partition("(")
    called = called.strip(" ")
    name = _NAMES.get(called)
    if name is None:
        known = " ".join(n + (f"({', '.join(i.parameters)})" if i.parameters else "") for n, i in _NAMES.items())
        raise ValueError(f"names an unknown activation '{called}' in '{act}'; expected a '+'-joined chain of {known}")
    if parenthesis and not rest.endswith(")"):
        raise ValueError(f"is '{act}', expected a ')' at the end of '{one}'")
    rest = rest[:-1]
    numbers = []
    for number in (n.strip(" ") for n in rest.split(",")) if rest.strip(" ") else ():
        if not _NUMBER.fullmatch(number):
            raise ValueError(f"is '{act}', in which {called} has the parameter '{number}', expected a number")
        numbers.append(float(number))
    least, most = len(name.parameters) - len(name.defaults), len(name.parameters)
    if not least <= len(numbers) <= most:
        expected = ("at most " if least < most else "") + str(most)
        expected += f" ({', '.join(name.parameters)})" if most else ""
        noun = "parameter" if len(numbers) == 1 else "parameters"
        raise ValueError(f"is '{act}', in which {called} has {len(numbers)} {noun}, expected {expected}")
    made = Act(called, (*numbers, *name.defaults[len(numbers) - least :]))
    reason = _refusal(called, made.parameters)
    if reason:
        raise ValueError(f"is '{act}', in which {called} has parameters that it does not take, expected {reason}")
    return made


def _refusal(name: str, parameters: tuple[float, ...]) -> str:
    if any(map(math.isnan, parameters)):
        return "numbers that are not NaN"
    if any(map(math.isinf, parameters)) and name not in ("clamp", "hardtanh"):
        return "finite numbers"
    if name == "hardtanh" and parameters[0] > parameters[1]:
        return "min_val up to max_val"
    if name == "softplus" and parameters[0] == 0:
        return "a beta other than 0"
    if name == "celu" and parameters[0] <= 0:
        return "an alpha above 0"
    if name == "softshrink" and parameters[0] < 0:
        return "a lambd of at least 0"
    return ""
