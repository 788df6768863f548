"""One chain at one input, by PyTorch's functions and by kgopt's ops: how long each takes, and how accurate it is.

:mod:`~kgopt.rewrite.measure.policy` asks for sites, and says which runs. Nothing here knows where in a model the chain
stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kgopt import accuracy
from kgopt._layout import format_of
from kgopt.rewrite.chains.chain import CHANNELS, Chain
from kgopt.rewrite.chains.emit import ConvArgs, NormArgs, as_torch, emit_kgopt, run_torch
from kgopt.rewrite.measure import clocks, verdicts

REFERENCE_ELEMENTS = 2**26  # of x, above which a float64 reference is too dear: a part of x says what the errors are
_NOTHING = nn.Identity()


@dataclass
class Measured:
    """Of one chain at one key: seconds a call and relative errors against float64."""

    before: float
    after: float
    error_before: float  # the yardstick of kgopt.accuracy: PyTorch's, or that of an ideal TF32 product
    error_after: float
    reason: str = ""  # why ours was not taken; "": it was
    # Work on the GPU alone, where ours lost by the time of a call.
    busy_before: float | None = None
    busy_after: float | None = None
    known: bool = False  # by an earlier measurement of an equal site

    def ours(self, hidden: bool) -> bool:
        """Whether ours runs; ``hidden``: where launches are."""
        return not self.reason or (hidden and self.ours_if_hidden)

    @property
    def ours_if_hidden(self) -> bool:
        """Whether ours lost by its launch alone."""
        return self.busy_before is not None and self.busy_after is not None and self.busy_after <= self.busy_before


@dataclass(frozen=True)
class Question:
    """One chain at one input, which PyTorch's functions or kgopt's ops may compute."""

    chain: Chain
    x: Tensor
    conv: ConvArgs | None
    norm: NormArgs
    grad: bool  # a backward will go through it
    keeps: bool  # channels_last stays where PyTorch's GroupNorm would return a contiguous tensor
    checks: Callable[..., Any]  # what every call of ours does before its ops, so that its time counts too
    operands: Sequence[Any]  # what the checks are called with
    call: Callable[..., Any]  # calls the ops

    def theirs(self, x: Tensor) -> Tensor:
        """By PyTorch's functions."""
        return run_torch(self.chain, x, self.conv, self.norm)

    def ours(self, x: Tensor) -> Tensor:
        """By kgopt's ops."""
        fold = not torch.is_autocast_enabled(x.device.type)
        y = emit_kgopt(self.chain, self.call, x, x.dim(), self.conv, self.norm, fold)
        return y if self.keeps else as_torch(self.chain, x, y)

    def checked(self, x: Tensor) -> Tensor:
        """By kgopt's ops, as a call does it."""
        self.checks(*self.operands)
        return self.ours(x)

    def called(self, x: Tensor) -> Tensor:
        """By PyTorch's functions, as a call does it: each module that a chain stands for is called."""
        if len(self.operands) > 2:  # else it is a norm's own forward, which is called for both
            for operand in self.operands:
                if isinstance(operand, nn.Module):
                    _NOTHING(x)
        return self.theirs(x)

    def detached(self) -> Question:
        """The same of leaves of a graph of its own."""

        def leaf(t: Any) -> Any:
            return t.detach().requires_grad_(self.grad and t.requires_grad) if isinstance(t, Tensor) else t

        conv = self.conv and replace(self.conv, weight=leaf(self.conv.weight), bias=leaf(self.conv.bias))
        n = self.norm
        norm = replace(n, weight=leaf(n.weight), bias=leaf(n.bias), slope=leaf(n.slope))
        return replace(self, x=leaf(self.x), conv=conv, norm=norm)

    @property
    def tensors(self) -> list[Any]:
        """All that it reads; None where there is no bias."""
        n = self.norm
        more = ([] if n.slope is None else [n.slope]) + ([self.conv.weight, self.conv.bias] if self.conv else [])
        return [self.x, n.weight, n.bias, *more]

    @property
    def key(self) -> str:
        """Of its verdict."""
        # Without a backward it does not matter who could have a gradient.
        kinds = [t.detach() if isinstance(t, Tensor) and not self.grad else t for t in self.tensors]
        rest = [v for v in vars(self.conv).values() if not isinstance(v, Tensor)] if self.conv else []
        n = self.norm
        groups = (n.axis, n.lies, n.weight is None, n.factor) if self.chain.norm in CHANNELS else n.num_groups
        about = (kinds, rest, groups, self.grad, self.keeps)
        return verdicts.key_of("site", self.x.device, repr(self.chain), *about)


def own_saved_tensors() -> Any:
    """Saved tensors of calls that measure are no business of an activation checkpoint around them.

    Detached: a result that its own node saves would keep the graph alive, and with it what accumulates the parameters'
    gradients, on this stream. A CUDA graph could not be captured from another one then.
    """
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda t: t)


def measure(question: Question) -> Measured | None:
    """Both ways at these inputs, forward, and backward where a gradient is needed. None: it could not be measured."""
    try:
        with own_saved_tensors():
            return _measure(question.detached())
    except (torch.OutOfMemoryError, RuntimeError):
        return None


def _measure(q: Question) -> Measured:
    wanted = [t for t in q.tensors if t is not None and t.requires_grad]
    x = q.x

    def step(function: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            y = function(x)
            if wanted:
                torch.autograd.grad(y, wanted, torch.ones_like(y))

        return run

    busy: tuple[float, float] | tuple[None, None] = (None, None)
    with torch.set_grad_enabled(bool(wanted)):
        before, after = clocks.time_both(step(q.called), step(q.checked), x.device)
        if after > before and x.is_cuda:
            busy = clocks.busy_both(step(q.theirs), step(q.checked), x.device)
    with torch.no_grad():
        errors = _errors(q)
    reason = ""
    if not errors[1] <= accuracy.allowed(x.dtype, errors[0]):
        reason = f"less accurate: error {errors[1]:.1e}, PyTorch's {errors[0]:.1e}"
        busy = (None, None)
    elif after > before:
        reason = f"PyTorch is faster here: {before * 1e6:.0f} us, kgopt {after * 1e6:.0f} us"
    return Measured(before, after, *errors, reason, *busy)


def _errors(q: Question) -> tuple[float, float]:
    """The yardstick of :mod:`kgopt.accuracy`, and the error of ours."""
    chain, x, conv, norm = q.chain, q.x, q.conv, q.norm
    part = part_of(x, REFERENCE_ELEMENTS)
    with accuracy.no_autotuning():  # of a part, whose sizes come once; for x itself algorithms were chosen before
        before, after = q.theirs(part), q.ours(part)
    tf32 = conv is not None and accuracy.may_take_tf32(x)
    ideal = 0.0
    with torch.autocast(x.device.type, enabled=False), accuracy.no_autotuning():
        double = replace(norm, weight=_double(norm.weight), bias=_double(norm.bias), slope=_double(norm.slope))
        exact_conv = None if conv is None else replace(conv, weight=_double(conv.weight), bias=_double(conv.bias))
        reference, scale = _reference(chain, part.double(), exact_conv, double)
        if tf32 and conv is not None and exact_conv is not None:
            rounded = replace(exact_conv, weight=accuracy.round_tf32(conv.weight).double())
            y = run_torch(chain, accuracy.round_tf32(part).double(), rounded, double)
            ideal = accuracy.relative_error(y, reference, scale)
            del y
    yardstick = max(accuracy.relative_error(before, reference, scale), ideal)
    error = accuracy.relative_error(after, reference, scale)
    if part is not x:  # the whole, by the same yardstick: both results are that close to the exact one
        apart = accuracy.relative_error(q.ours(x), *_reference(chain, x, conv, norm))
        error = error if apart <= 2 * accuracy.allowed(x.dtype, yardstick) else max(error, apart)
    return yardstick, error


def _reference(chain: Chain, x: Tensor, conv: ConvArgs | None, norm: NormArgs) -> tuple[Tensor, Tensor | None]:
    """The chain in float64, and where it ends in a mean the mean of the magnitudes: see relative_error."""
    if chain.reduce != "mean":
        return run_torch(chain, x, conv, norm), None
    terms = run_torch(replace(chain, reduce=""), x, conv, norm)
    dims = list(range(1, terms.dim())) if chain.dims is None else list(chain.dims)
    return terms.mean(dims, chain.keepdim), terms.abs().mean(dims, chain.keepdim)


def part_of(x: Tensor, elements: int) -> Tensor:
    """x, or of a large one the first samples, or the first positions of the first sample, in the same format."""
    if x.numel() <= elements:
        return x
    part = x[: max(1, elements // max(1, x[:1].numel()))]
    while part.numel() > elements and max(part.shape[2:], default=1) > 1:
        longest = max(range(2, part.dim()), key=lambda dim: part.shape[dim])
        part = part.narrow(longest, 0, (part.shape[longest] + 1) // 2)
    return part.contiguous(memory_format=format_of(x))


def _double(t: Any) -> Any:
    return t.double() if isinstance(t, Tensor) else t
