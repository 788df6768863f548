"""What is written so far: the program, a class of it, and the shape of the value that the code handles."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["ClassDraft", "Draft", "Json", "Made", "Shape", "comma"]

Json = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Of the value that the code handles: channels, and the sizes behind them."""

    channels: int
    sizes: tuple[int, ...]

    @property
    def positions(self) -> int:
        """In one channel."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Made:
    """A layer: the module to construct (None: the code alone), and the expression with ``{m}`` and ``{x}``."""

    module: str | None
    call: str
    shape: Shape


class ClassDraft:
    """A class that is being written."""

    def __init__(self, name: str, base: str = "nn.Module") -> None:
        self.name, self.base = name, base
        self.init: list[str] = []
        self.lines: list[str] = []
        self.methods: list[str] = []
        self.decorators: list[str] = []
        self.arguments = "self, x"
        self.indent = 2
        self.count = 0
        self.norm = ""  # a shared one: its name, and for how many channels
        self.norm_channels = 0

    def say(self, line: str) -> None:
        """A line of the forward."""
        self.lines.append("    " * self.indent + line)

    @contextlib.contextmanager
    def under(self, line: str) -> Iterator[None]:
        """A compound statement."""
        self.say(line)
        self.indent += 1
        yield
        self.indent -= 1

    def fresh(self, prefix: str) -> str:
        """A name."""
        self.count += 1
        return f"{prefix}{self.count}"

    def attribute(self, prefix: str, module: str) -> str:
        """Constructs a module; returns how the code calls it."""
        name = self.fresh(prefix)
        self.init.append(f"        self.{name} = {module}")
        return f"self.{name}"

    def text(self) -> str:
        """The class."""
        out = [f"class {self.name}({self.base}):", "    def __init__(self):", "        super().__init__()", *self.init]
        out += ["", *(f"    {d}" for d in self.decorators), f"    def forward({self.arguments}):", *self.lines]
        for method in self.methods:
            out += ["", method]
        return "\n".join(out) + "\n"


class Draft:
    """A network's program that is being written: its classes, and the helpers that they need."""

    def __init__(self, case: Json) -> None:
        self.case = case
        self.dims = case["dims"]
        self.classes: list[str] = []
        self.checkpoints = 0  # around what is written now
        self.helpers: list[str] = []
        self.count = 0
        # Random numbers go to elements in the order of memory, and lower precisions draw others.
        self.drops = case["dtype"] == "float64" and case["channels_last"] is False and case["how"] == "eager"

    @property
    def input_shape(self) -> Shape:
        """Of the network's input."""
        return Shape(self.case["channels"], tuple(self.case["size"]))

    def need(self, helper: str) -> str:
        """Makes a helper part of the program."""
        if helper not in self.helpers:
            self.helpers.append(helper)
        return helper

    def class_name(self, prefix: str) -> str:
        """A new one."""
        self.count += 1
        return f"{prefix}{self.count}"

    def finish(self, inner: ClassDraft) -> str:
        """Makes a class whose forward has ``x`` part of the program; the expression that constructs it."""
        inner.say("return x")
        self.classes.append(inner.text())
        return f"{inner.name}()"


def comma(items: list[str]) -> str:
    """The items in a row."""
    return ", ".join(items)
