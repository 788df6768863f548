"""DTensor: how each op runs on tensors that several processes hold parts of.

An op is described by letters for the dims of its tensors. A mesh dim may be given to one letter: then every tensor that
has it is sharded along it, the others are replicated, and a result without it is a partial sum. Of the ways an op has,
the one for which the least data moves is taken; with none of them, or where nothing is sharded, all is replicated.
Then the op runs on the local tensors, through its own autograd: the gradient of a tensor that was replicated for a
sharded letter is a partial sum.

Everything here is torch's public interface (DTensor's own, and torch.library). Registered once
``torch.distributed.tensor`` is imported, which nothing here imports before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kgopt._layout import is_channels_last
from kgopt.ops import calls
from kgopt.ops.registry import RECORDS, Dims, by_name, overload
from kgopt.torch_private import schema_of


def _at(letters: str, letter: str) -> int | None:
    """The dim of a letter."""
    place = letters.find(letter)
    return None if place < 0 else place


def _of(letter: str, way: str) -> bool:
    """Whether a mesh dim given to ``way`` shards ``letter``."""
    return letter == way or (letter == "G" and way == "C")


def _dim(letters: str, way: str) -> int | None:
    return next((d for d, letter in enumerate(letters) if _of(letter, way)), None)


class _Call:
    """A call with DTensors among its arguments, by name."""

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        from torch.distributed.tensor import DTensor

        self.name = name
        self.op = overload(name)
        self.arguments = schema_of(self.op).arguments
        self.given = by_name(name, args, kwargs)
        self.kwarg_only = {a.name for a in self.arguments if a.kwarg_only}
        dims = RECORDS[name].dims
        assert dims is not None, name
        self.dims = dims if isinstance(dims, Dims) else dims(self.given)
        # Optional tensors count when they are None, too.
        self.tensors = [a.name for a in self.arguments if "Tensor" in str(a.type)]
        found = {n: self.given[n] for n in self.tensors if self.given[n] is not None}
        plain = [n for n, t in found.items() if not isinstance(t, DTensor)]
        if plain:
            raise RuntimeError(
                f"kgopt::{name}: got mixed torch.Tensor and DTensor, expected DTensors only: {', '.join(plain)} "
                "is a torch.Tensor"
            )
        meshes = [t.device_mesh for t in found.values()]
        if any(mesh != meshes[0] for mesh in meshes):
            raise RuntimeError(f"kgopt::{name}: the tensors are on different meshes, expected one: {meshes}")
        self.mesh = meshes[0]
        self.found: dict[str, Any] = found
        self.letters = dict(zip(self.tensors, self.dims.tensors, strict=True))
        self.sizes = self._sizes()

    def _sizes(self) -> dict[str, Any]:
        """How many there are of each letter."""
        sizes: dict[str, Any] = {}
        for name, tensor in self.found.items():
            letters = self.letters[name]
            if tensor.dim() < len(letters):
                expected = f"expected {len(letters)} dims or more"
                raise RuntimeError(f"kgopt::{self.name}: {name} has shape {list(tensor.shape)}, {expected}")
            for d, letter in enumerate(letters):
                if letter != ".":
                    sizes[letter] = tensor.shape[d]
        for name, letter in self.dims.counts:
            base, _, index = name.partition(".")
            sizes[letter] = self.given[base][int(index)] if index else self.given[base]
        return sizes

    def ways(self) -> list[str]:
        """The letter that each dim of the mesh is given to; "": replicated."""
        chosen: list[str] = []
        for i in range(self.mesh.ndim):
            options = ["", *(way for way in self.dims.ways if self._fits(way, i, chosen))]
            chosen.append(min(options, key=lambda way: self._moved(way, i)))
        return chosen

    def _fits(self, way: str, i: int, before: list[str]) -> bool:
        """Whether each process gets some of a letter; of channels, the same number of whole groups."""
        parts = self.mesh.size(i) * math.prod(self.mesh.size(j) for j, other in enumerate(before) if other == way)
        size = self.sizes[way]
        if way == "C" and "G" in self.sizes:
            return bool(size % parts == 0 and self.sizes["G"] % parts == 0)
        return bool(size >= parts and (parts - 1) * -(-size // parts) < size)

    def _moved(self, way: str, i: int) -> float:
        """About how many bytes go through the network."""
        from torch.distributed.tensor import Replicate

        total = 0.0
        for name, tensor in self.found.items():
            old, new = tensor.placements[i], self._placement(self.letters[name], way)
            size = tensor.numel() * tensor.dtype.itemsize
            if old == new:
                continue
            if old.is_partial():
                total += size * (2 if isinstance(new, Replicate) else 1)
            elif not old.is_replicate():
                total += size * (1 if isinstance(new, Replicate) else 1 / self.mesh.size(i))
            else:
                total += size * 1e-3  # a part is taken: nothing moves, but what was there is copied
        return total

    def _placement(self, letters: str, way: str) -> Any:
        """Of a tensor with these letters."""
        from torch.distributed.tensor import Replicate, Shard

        dim = _dim(letters, way) if way else None
        return Replicate() if dim is None else Shard(dim)

    def _partial(self, letters: str, way: str) -> Any:
        """Of a sum over what a letter stands for, unless it has the letter."""
        from torch.distributed.tensor import Partial

        return Partial() if way and _dim(letters, way) is None else self._placement(letters, way)

    def run(self) -> Any:
        """The op's results."""
        ways = self.ways()
        local = dict(self.given)
        for name, tensor in self.found.items():
            letters = self.letters[name]
            placements = [self._placement(letters, way) for way in ways]
            gradients = [self._partial(letters, way) for way in ways]
            local[name] = _Local.apply(tensor, placements, gradients)
        for name, letter in self.dims.counts:
            if any(_of(letter, way) for way in ways):
                self._localize(local, name, letter)
        positional = [v for n, v in local.items() if n not in self.kwarg_only]
        out = self.op(*positional, **{n: local[n] for n in self.kwarg_only})
        if isinstance(out, Tensor):
            return self._whole(out, 0, ways)
        return tuple(self._whole(t, i, ways) if isinstance(t, Tensor) else t for i, t in enumerate(out))

    def _localize(self, local: dict[str, Any], name: str, letter: str) -> None:
        """Has a count be that of this process."""
        base, _, index = name.partition(".")
        if not index:  # groups, as many of the whole as there are channels here
            local[base] = self.sizes[letter] * local["x"].shape[1] // self.sizes["C"]
            return
        for tensor, letters in self.letters.items():
            dim = _at(letters, letter)
            if dim is not None:
                sizes = list(local[base])
                sizes[int(index)] = local[tensor].shape[dim]
                local[base] = sizes

    def _whole(self, t: Tensor, i: int, ways: list[str]) -> Any:
        """The DTensor of which t is this process's part."""
        letters = self.dims.results[i]
        if t.dim() < len(letters) or (t.dim() == 1 and t.numel() == 0 and self.name == "conv_backward"):
            letters, ways = "", [""] * len(ways)  # a gradient that nobody asked for
        placements = [self._partial(letters, way) for way in ways]
        shape = list(t.shape)
        for d, letter in enumerate(letters):
            if any(way and _of(letter, way) for way in ways):
                shape[d] = self.sizes[letter]
        return _whole(t, self.mesh, placements, shape)


def _strides(t: Tensor, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Of a dense tensor of this shape that lies as t does: channels_last or contiguous."""
    order = list(range(len(shape)))
    if is_channels_last(t):
        order = [0, *order[2:], 1]
    strides, step = [1] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step = step * max(shape[d], 1)
    return tuple(strides)


def _whole(t: Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[Any]) -> Any:
    from torch.distributed.tensor import DTensor

    shape = torch.Size(shape)
    return DTensor.from_local(t, mesh, placements, run_check=False, shape=shape, stride=_strides(t, shape))


class _Local(torch.autograd.Function):
    """This process's part of a DTensor under other placements; its gradient has placements of its own.

    DTensor.redistribute and to_local do the same in two steps. Their gradients go back to where the tensor was, which
    moves data that nobody may need there, and must have its strides.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Any, placements: list[Any], gradients: list[Any]) -> Tensor:
        """The part."""
        ctx.mesh, ctx.shape, ctx.gradients = tensor.device_mesh, tensor.shape, gradients
        tensor = tensor.detach()  # in torch 2.10 redistribute refuses a tensor with gradients in inference mode
        if list(tensor.placements) != placements:
            tensor = tensor.redistribute(tensor.device_mesh, placements)
        local: Tensor = tensor.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """The gradient, as a DTensor."""
        return _whole(dy, ctx.mesh, ctx.gradients, ctx.shape), None, None


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``torch.ops.kgopt.<name>(*args, **kwargs)`` with DTensors among the arguments.

    Raises:
        RuntimeError: DTensors and plain tensors are mixed, or DTensors of several meshes.
    """
    return _Call(name, args, kwargs).run()


def _explain(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the op says of this process's part."""
    from torch.distributed.tensor import DTensor

    return op(*(a.to_local() if isinstance(a, DTensor) else a for a in args), **kwargs)


def install() -> None:
    """Tells torch, once ``torch.distributed.tensor`` is there."""
    from torch.distributed.tensor import DTensor

    for name in RECORDS:

        def rule(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None, name: str = name) -> Any:
            return call(name, args, kwargs or {})

        torch.library.register_torch_dispatch(f"kgopt::{name}", DTensor, rule)
    for name in ("explain_conv", "explain_group_norm", "explain_group_norm_conv"):
        torch.library.register_torch_dispatch(
            f"kgopt::{name}", DTensor, lambda cls, func, types, args=(), kwargs=None: _explain(func, args, kwargs or {})
        )
    calls.set_sharded(DTensor, call)
