"""What an entry of the tables is."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from peers import norms

Inputs = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Peer:
    """One network.

    Attributes:
        library: the distribution it is of.
        module: what has to be imported; ``build`` is given it.
        name: within the library.
        build: makes the network; random, nothing is fetched.
        inputs: makes its arguments, float64.
        norm: what its batch norms become: "group", "instance", "mixed" (every second one stays), or "" (as they are).
        entry: the method that is called, for networks whose ``forward`` is not all.
    """

    library: str
    module: str
    name: str
    build: Callable[[Any], nn.Module]
    inputs: Inputs
    norm: str = ""

    @property
    def id(self) -> str:
        """As pytest prints it."""
        return f"{self.library}-{self.name}"

    def make(self) -> nn.Module:
        """The network in float64, in train mode, its affine parameters random.

        Raises:
            ImportError: the library is not installed.
        """
        module = importlib.import_module(self.module)
        torch.manual_seed(0)
        model = self.build(module)
        if self.norm:
            model = norms.converted(model, self.norm)
        return norms.randomized(model.double()).train()


@dataclass
class Library:
    """The table of a library. ``add`` makes an entry."""

    name: str
    module: str
    peers: list[Peer] = field(default_factory=list)

    def add(self, name: str, build: Callable[[Any], nn.Module], *shapes: Any, norm: str = "", **keywords: Any) -> None:
        """A network and what it is called with.

        Args:
            name: unique in the library.
            build: makes the network from the library's module.
            shapes: of the arguments: a tuple of sizes is an image of random numbers, a callable makes the argument,
                anything else is the argument.
            norm: see :class:`Peer`.
            keywords: keyword arguments, as ``shapes``.
        """
        self.peers.append(Peer(self.name, self.module, name, build, _inputs(shapes, keywords), norm))

    def add_each(self, names: Iterable[str], build: Callable[..., nn.Module], *shapes: Any, norm: str = "") -> None:
        """Networks that differ by a name alone: ``build(module, name)``."""
        for name in names:
            self.add(name, lambda module, name=name: build(module, name), *shapes, norm=norm)


def _inputs(shapes: tuple[Any, ...], keywords: dict[str, Any]) -> Inputs:
    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(1)

        def argument(of: Any) -> Any:
            if callable(of):
                return of()
            if isinstance(of, tuple) and all(isinstance(n, int) for n in of):
                return torch.randn(of, generator=generator, dtype=torch.float64)
            return of

        return tuple(argument(s) for s in shapes), {name: argument(k) for name, k in keywords.items()}

    return make


def integers(*values: int) -> Callable[[], Tensor]:
    """An argument: time steps, labels, tokens."""
    return lambda: torch.tensor(values)


def offline() -> None:
    """Whatever a constructor would fetch is an error instead."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
