"""One record an op: what PyTorch must know of it beside its schema and its kernels, which are in the extension.

A record is data. ``install.py`` hands every record to torch, ``calls.py`` has the way of a call. The public ops that
have a ``_fwd`` twin (``group_norm``, ``group_norm_mean`` and the three pipelines) return one tensor. When a gradient is
needed they dispatch to the twin, which also returns the statistics that its backward reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kgopt.torch_private import schema_of

LIB = torch.library.Library("kgopt", "IMPL")
OPS = torch.ops.kgopt
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # of the dims of tensors of any rank


@dataclass(frozen=True)
class Dims:
    """The letters of an op's dims, for its tensors and results in order: how DTensors of it may be sharded.

    N: samples; C: channels; G: groups of a norm, sharded where C is; ".": a dim that is never sharded. What follows the
    letters of a tensor is never sharded either. ``ways``: letters that a mesh dim may be given to.
    """

    tensors: tuple[str, ...]
    results: tuple[str, ...]
    ways: str = "N"
    # Of the other arguments those that count something along a letter, as (name, letter).
    counts: tuple[tuple[str, str], ...] = ()


def dims(tensors: str, results: str, ways: str = "N") -> Dims:
    """Of letters with spaces between the tensors: of x and the result "N C", of weights ".", "-": no dims."""
    return Dims(tuple(tensors.split()), tuple(results.split()), ways)


def dims_by_group(tensors: str, results: str) -> Dims:
    """Of a norm, each of whose groups is on its own: channels are sharded by whole groups."""
    return Dims(tuple(tensors.split()), tuple(results.split()), "NC", (("num_groups", "G"),))


@dataclass
class Op:
    """What torch must know of an op: made by :func:`record`, then filled in, field by field."""

    name: str
    """In the schema, csrc/library.cpp."""
    fake: Callable[..., Any]
    """Its results without values: sizes, dtype, layout. Gets every argument."""
    formula: Callable[..., Any]
    """The op in differentiable PyTorch functions, for derivatives that no kernel gives; raises where there is none.
    Gets every argument."""
    dims: Dims | Callable[[dict[str, Any]], Dims] | None = None
    """For DTensor; as a function, of the arguments by name. Every op has them (tests/test_dtensor.py)."""
    backward: Callable[..., Any] | None = None
    """``backward(ctx, *grads)``: a gradient for each argument; None: by the formula, where there is no twin."""
    setup: Callable[..., None] | None = None
    """``setup(ctx, inputs, keywords, output)`` saves what ``backward`` reads."""
    differentiable: int | None = None
    """How many of its results, the first ones, have gradients; None: all. A twin has one such result."""
    twin: str | None = None
    """The op that runs where a gradient is needed; its first result is this op's."""
    in_steps: Callable[..., Any] | None = None
    """Runs instead of the twin on the CPU: the op by the ops of its steps."""
    in_steps_everywhere: bool = False
    """``in_steps`` runs on every device."""
    statistics: tuple[tuple[int, ...], Callable[[list[Any]], None]] | None = None
    """Of the backward of a norm: positions of the statistics among its arguments, and how they follow from x."""
    autocast: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """By device, ``rule(op, dtype, args, kwargs)``: the call with arguments of other dtypes."""
    vmap: Callable[..., Any] | None = None
    """``rule(op, info, in_dims, *args, **kwargs)``; None: one call an example."""
    flops: Callable[[dict[str, Any]], int] | None = None
    """Of the arguments by name, shapes for tensors. Norms and pointwise chains count nothing, as in PyTorch."""
    on_cpu: Callable[..., Any] | None = None
    """The kernel for CPU tensors, where the extension has none."""


RECORDS: dict[str, Op] = {}
"""Every op that takes a tensor and returns one, by name."""


def record(name: str, fake: Callable[..., Any], formula: Callable[..., Any]) -> Op:
    """A new record, to be filled in."""
    RECORDS[name] = op = Op(name, fake, formula)
    return op


def record_public(name: str, twin: Op) -> Op:
    """The record of a public op: it returns the first result of its twin, in the dtype of x."""

    def first(of: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *args, **options: of(x, *args, **options)[0].to(x.dtype)

    assert isinstance(twin.dims, Dims)
    op = record(name, first(twin.fake), first(twin.formula))
    op.dims = replace(twin.dims, results=twin.dims.results[:1])
    op.twin, op.vmap, op.flops = twin.name, twin.vmap, twin.flops
    return op


def overload(name: str) -> Any:
    """The op itself."""
    return getattr(OPS, name).default


def with_defaults(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword-only arguments with the defaults that the dispatcher leaves out."""
    positional, keywords = list(args), dict(kwargs)
    for i, a in enumerate(schema.arguments):
        if a.kwarg_only:
            keywords.setdefault(a.name, a.default_value)
        elif i >= len(positional):
            positional.append(keywords.pop(a.name) if a.name in keywords else a.default_value)
    return positional, keywords


def by_name(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call."""
    schema = schema_of(overload(name))
    positional, keywords = with_defaults(schema, args, kwargs)
    names = [a.name for a in schema.arguments if not a.kwarg_only]
    return dict(zip(names, positional, strict=True), **keywords)
