"""A function of the user's, run on names: the statements that :mod:`~kgopt.rewrite.source.users.small` and
:mod:`~kgopt.rewrite.source.users.derived` understand, and what global names mean.

What an expression is worth, and which branch a test takes, is theirs.
"""

from __future__ import annotations

import ast
import types
from abc import ABC, abstractmethod
from typing import Any

from kgopt.rewrite.pytorch.places import Places


class UnreadError(Exception):
    """The function does something else."""


class Reading(ABC):
    """One function; ``values``: of its local variables, by name."""

    def __init__(self, function: Any, places: Places, values: dict[str, Any], self_name: str = "") -> None:
        self.function, self.places, self.values, self.self_name = function, places, values, self_name

    @abstractmethod
    def value(self, e: ast.expr) -> Any:
        """Of an expression."""

    @abstractmethod
    def test(self, e: ast.expr) -> Any:
        """Whether the branch behind a test is taken."""

    def run(self, body: list[ast.stmt]) -> tuple[bool, Any]:
        """Whether a block returns, and what.

        Raises:
            UnreadError: a statement that is none of those that are understood.
        """
        for statement in body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return True, self.value(statement.value)
            if isinstance(statement, ast.If):
                found = self.run(statement.body if self.test(statement.test) else statement.orelse)
                if found[0]:
                    return found
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                value = self.value(statement.value)
                for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                    if not isinstance(target, ast.Name) or target.id == self.self_name:
                        raise UnreadError
                    self.values[target.id] = value
            elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                raise UnreadError
        return False, None

    def resolved(self, e: ast.expr) -> Any:
        """What a global name such as ``F.group_norm`` stands for; None for none."""
        names = self.function.__globals__
        if isinstance(e, ast.Name) and e.id not in self.function.__code__.co_varnames and e.id in names:
            return self.places.read(names, e.id)
        if isinstance(e, ast.Attribute):
            owner = self.resolved(e.value)
            if isinstance(owner, types.ModuleType) and hasattr(owner, e.attr):
                return self.places.read(owner, e.attr)
        return None
