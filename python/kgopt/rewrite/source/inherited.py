"""Methods of the classes above, that a method calls through ``super()``: written anew, too."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from kgopt.rewrite.source.syntax.code import undecorated
from kgopt.rewrite.source.syntax.method import Inherited, Method
from kgopt.rewrite.source.syntax.names import walk
from kgopt.rewrite.source.syntax.trees import placed


def inherited_calls(method: Method, cls: type) -> Iterator[tuple[ast.Call, types.FunctionType]]:
    """The calls ``super().name(...)`` in a method of ``cls``, each with the user's function that it runs."""
    code = method.code.__code__
    if "__class__" not in code.co_freevars or method.function(ast.Name("super", ast.Load())) is not super:
        return
    owner: Any = (method.code.__closure__ or ())[code.co_freevars.index("__class__")].cell_contents
    if owner not in cls.__mro__:
        return
    above = cls.__mro__[cls.__mro__.index(owner) + 1 :]
    for call in [n for n in walk(method.tree) if isinstance(n, ast.Call)]:
        of = call.func.value if isinstance(call.func, ast.Attribute) else None
        if not isinstance(of, ast.Call) or not isinstance(of.func, ast.Name) or of.func.id != "super" or of.args:
            continue
        name = call.func.attr  # type: ignore[attr-defined]
        base = next((b for b in above if name in vars(b)), nn.Module)
        function = vars(base).get(name)
        is_users = base is not nn.Module and not base.__module__.startswith("torch.")
        if is_users and isinstance(function, types.FunctionType) and undecorated(function) is function:
            yield call, function


def inherit(method: Method, call: ast.Call, seen: types.FunctionType, ours: types.FunctionType) -> None:
    """Has a call run ``ours`` as long as ``super()`` finds ``seen``."""
    name = f"_kgopt_base_{len(method.sites)}"
    method.sites[name] = Inherited(seen, ours)
    of = ast.Attribute(ast.Name(name, ast.Load()), "of", ast.Load())
    call.func = placed(ast.Call(of, [call.func], []), call)
