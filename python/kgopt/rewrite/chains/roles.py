"""What a child of a module does in a chain, for the front ends that find chains in code."""

from __future__ import annotations

import inspect
import math
import types
from dataclasses import dataclass
from typing import Any

from torch import nn

from kgopt.rewrite.chains.meanings import activation_of, activation_of_function, conv_of, is_activation, may_be_identity
from kgopt.rewrite.chains.modules import has_own_methods, is_upsampler, is_zero_padding, passed_on
from kgopt.rewrite.optimized import known
from kgopt.rewrite.optimized.disguise import is_made, original_class
from kgopt.rewrite.pytorch.watching import is_hooked

# The role of an expression such as ``self.norm1``: (kind, name, inplace).
Role = tuple[str, str, bool]
Path = tuple[str | int, ...]  # ``self.a.b[0]`` is ("a", "b", 0)


@dataclass(frozen=True)
class Number:
    """A number that a module holds, with which its code calculates (``h / self.divisor``)."""

    value: float

    def is_still(self, value: Any) -> bool:
        """Whether that is what the module holds now."""
        return type(value) is type(self.value) and bool(value == self.value)


def _is_norm(module: nn.Module) -> bool:
    """A norm on kgopt's kernels."""
    return kind_of(type(module)) is not None or known.get(module, "channel") is not None


def kind_of(cls: type) -> str | None:
    """Which norm on kgopt's kernels, and no more, a class is: "group", "instance" or none."""
    if getattr(cls, "_kgopt_leaf", None) is cls:
        return "group" if issubclass(cls, nn.GroupNorm) else "instance"
    derived: Any = getattr(cls, "_kgopt_derived", None)
    return derived.kind if derived is not None and derived.is_leaf and is_made(cls) else None


def role_of(module: Any) -> Role | None:
    """What a child does in a chain; None: something else, or somebody watches it."""
    if not isinstance(module, nn.Module):
        return None
    if is_hooked(module):
        return ("other", f"{type(module).__name__} has hooks", False) if is_activation(module) else None
    if _is_norm(module):
        channel = known.get(module, "channel")
        return ("norm", str(kind_of(type(module)) if channel is None else channel.kind), False)
    conv = conv_of(module)
    if conv is not None:
        return None if has_own_methods(module, original_class(module) or type(module)) else ("conv", conv, False)
    name = activation_of(module)
    if name is not None:
        return ("act", name, bool(getattr(module, "inplace", False)))
    if is_activation(module):
        return ("other", f"{module} has parameters that no op takes", False)
    return ("same", "", False) if may_be_identity(module) else None


def role_in_code(root: nn.Module, path: Path) -> Role | None:
    """:func:`role_of` what a path means. Beside that: "up", an upsampling; "pad", zero padding; "tail", a Sequential;
    "function", an attribute or a method that is an activation, and no module; "number", one that the module holds;
    "open", a property, which may give a child (OpenMMLab's ``self.norm1``).

    A tail ends in a convolution or a norm (as a forward may, see :mod:`~kgopt.rewrite.source`), or passes its input on
    to one, and can wait for a sum. Of a path that begins with "" only: is it a module, or None?
    """
    if path[:1] == ("",):
        is_none = len(path) == 2 and path[1] in root.__dict__ and root.__dict__[path[1]] is None
        return ("module", "", False) if is_none or isinstance(child_at(root, path[1:]), nn.Module) else None
    module = child_at(root, path)
    role = role_of(module)
    if module is None and len(path) == 1 and isinstance(path[0], str):
        number: Any = root.__dict__.get(path[0])
        if type(number) in (int, float) and abs(number) < math.inf:
            return ("number", repr(number), False)
        if isinstance(inspect.getattr_static(type(root), path[0], None), property):
            return ("open", "", False)
        return ("function", "", False) if activation_of_function(_attribute(root, path[0])) else None
    if role is None and isinstance(module, nn.Module) and not is_hooked(module):
        if is_upsampler(module):
            return ("up", "", False)
        if is_zero_padding(module):
            return ("pad", "", False)
        if getattr(type(module), "_kgopt_later_of", None) is not None:
            return ("tail", type(module)._kgopt_gives, False)  # type: ignore[attr-defined]
        last: Any = passed_on(module)
        if last is module and not isinstance(last, nn.Sequential):
            return None
        while isinstance(last, nn.Sequential) and last._modules:
            last = next(reversed(last._modules.values()))
        if conv_of(last) is not None:
            return ("tail", "conv", False)
        is_tail = isinstance(last, nn.Module) and _is_norm(last) and known.get(last, "channel") is None
        return ("tail", "norm", False) if is_tail else None
    return role


def _attribute(module: nn.Module, name: str) -> Any:
    """What an instance or its class holds under a name; None for what has to be computed."""
    if name in module.__dict__:
        return module.__dict__[name]
    found = None if name in module._modules else inspect.getattr_static(type(module), name, None)
    if isinstance(found, staticmethod):
        return found.__func__
    return types.MethodType(found, module) if type(found) is types.FunctionType else None


def child_at(module: Any, path: Path) -> Any:
    """The child that an expression such as ``self.a.b[0]`` means; None, where that is not certain."""
    for step in path:
        if isinstance(step, str) and not hasattr(type(module), step):
            module = getattr(module, "_modules", {}).get(step)
        elif isinstance(step, int) and isinstance(module, (nn.ModuleList, nn.Sequential)):
            module = module[step] if -len(module) <= step < len(module) else None
        else:
            return None
    return module
