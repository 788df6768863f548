"""The modules that a front end gave another forward, and what each of them remembers of its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import nn

from kgopt.rewrite.optimized import classes, known

State = TypeVar("State")


class Wrapped(Generic[State]):
    """Those whose class has one part, such as ("glue",), in its recipe."""

    def __init__(self, name: str) -> None:
        self.name = name  # of the part, and of the state among what a module knows
        self.part = (name,)

    def modules_of(self, root: nn.Module) -> list[nn.Module]:
        """Every module that has a state."""
        return [m for m in root.modules() if known.get(m, self.name) is not None]

    def state_of(self, module: nn.Module) -> State:
        """The state of one of them."""
        state: State = known.get(module, self.name)
        return state

    def add(self, module: nn.Module, make: Callable[[], State]) -> State:
        """Wraps a module, if it is not yet; its state. Of a module whose class cannot be replaced nobody reads it."""
        state: State | None = known.get(module, self.name)
        if state is None:
            state = make()
            known.put(module, **{self.name: state})
        original, recipe = classes.recipe_of(module)
        if self.part not in recipe and classes.give(module, original, (*recipe, self.part)):
            known.drop(module, self.name)
        return state

    def adopt(self, module: nn.Module, state: State) -> None:
        """Wraps a module again, with the state that it had."""
        known.drop(module, self.name)
        self.add(module, lambda: state)

    def swap(self, module: nn.Module, state: State) -> None:
        """Gives a wrapped module another state."""
        known.put(module, **{self.name: state})

    def forget(self, root: nn.Module, which: Callable[[nn.Module], bool] = lambda module: True) -> None:
        """Gives modules their own forward back."""
        for module in self.modules_of(root):
            if not which(module):
                continue
            original, recipe = classes.recipe_of(module)
            # The class first: a call that another thread has begun finds its state.
            classes.give(module, original, tuple(part for part in recipe if part != self.part))
            known.drop(module, self.name)
