"""One row of a suite: two models, an input, the work, and the float64 reference in pieces."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kgopt.cli.floor import Work

Index = tuple[Any, ...]

# Elements of x in one float64 piece of the reference: 256 MB, and a few times that with intermediates.
_PIECE = 2**25


@dataclasses.dataclass(frozen=True)
class Slice:
    """A piece of the float64 reference: module(x[x_index]) is y[y_index]."""

    x_index: Index
    y_index: Index
    module: nn.Module  # float64, on x's device
    params: dict[str, tuple[str, Index]] | None = None  # the whole model's parameter -> the piece's name, its place


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a suite: a plain PyTorch model and the kgopt one, for x of one shape."""

    suite: str
    name: str
    shape: tuple[int, ...]
    plain: Callable[[], nn.Module]  # fp32, on the CPU, seeded
    kgopt: Callable[[nn.Module], nn.Module]  # the same model in kgopt, device and dtype as the plain one
    work: Callable[[tuple[int, ...], int, str], Work]  # shape, bytes an element, direction
    slices: Callable[[nn.Module, torch.Tensor], Iterator[Slice]]
    backward: str = "backward"  # what --backward adds: "backward" alone, a "training" step, or "" for nothing
    layouts: bool = True  # also in channels_last
    compile: bool = True
    max_autotune: bool = False
    own_kernel: Callable[[nn.Module], nn.Module] | None = None  # kgopt, forced to its own kernel
    title: str = ""
    axis: str = ""  # what grows from case to case: "batch" or "edge"
    gpu_clock: bool = False  # timed by the GPU alone, launches hidden; a call's time beside it
    graph: bool = False  # also kgopt's launches replayed as a CUDA graph
    optimize: bool = False  # also kgopt.optimize(plain model, x), which should be no slower than the kgopt one
    kink: float = 0.0  # error of a gradient that no implementation can avoid (measure.kink_error)

    @property
    def axis_value(self) -> int:
        """The batch size or the last edge, whichever `axis` names."""
        return self.shape[0] if self.axis == "batch" else self.shape[-1]

    def scaled(self, divisor: int) -> Case:
        """The same case with its batch, or else its first spatial size, cut to about 1 / divisor."""
        shape = list(self.shape)
        cut = min(divisor, shape[0])
        shape[0] = max(1, shape[0] // divisor)
        for dim in range(2, len(shape)):
            left = divisor // cut
            if left <= 1:
                break
            small = max(min(8, shape[dim]), shape[dim] // left)
            cut *= max(1, shape[dim] // small)
            shape[dim] = small
        return dataclasses.replace(self, shape=tuple(shape))


class Chain(nn.Module):
    """A function without parameters as a module."""

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """fn(x)."""
        return self.fn(x)


def double(model: nn.Module) -> nn.Module:
    """A float64 copy."""
    return copy.deepcopy(model).double()


def per_piece(elements: int) -> int:
    """How many things of so many elements each make a piece."""
    return max(1, _PIECE // max(1, 8 * elements))


def is_small(x: torch.Tensor) -> bool:
    """Whether a piece has room for a whole sample."""
    return x[:1].numel() * 8 <= _PIECE


def batch_slices(model: nn.Module, x: torch.Tensor) -> Iterator[Slice]:
    """Pieces of whole samples, for a model that treats samples one by one."""
    module = double(model)
    step = per_piece(x[:1].numel())
    for n in range(0, x.shape[0], step):
        index = (slice(n, n + step), ...)
        yield Slice(index, index, module, all_of_each(model))


def all_of_each(model: nn.Module) -> dict[str, tuple[str, Index]]:
    """Of each parameter all: the piece's module has the same ones."""
    return {name: (name, (...,)) for name, _ in model.named_parameters()}


ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "mish": F.mish,
    "tanh+hardswish": lambda x: F.hardswish(torch.tanh(x)),
}
