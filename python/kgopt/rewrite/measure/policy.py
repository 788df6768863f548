"""Which of two equal computations runs: PyTorch's or kgopt's.

The rule, in the order in which it is applied:

1. Measured at this shape, dtype, layout and need of a gradient: the faster one, if ours is accurate by the rule of
   :mod:`kgopt.accuracy`. A call lasts as long as the slower of its launch and its work on the GPU. In a model that
   keeps the GPU busy launches are hidden, and only the work counts: in compiled code always, in eager code where the
   whole model was measured faster so (``SiteState.hidden``).
2. Not measured, on CUDA: ours.
3. Not measured, on the CPU: PyTorch's, which a compiler fuses with what is around it.

A site is measured when it first sees a shape (with ``example_inputs``: theirs), at most :data:`SHAPES` times, unless an
equal one was before (:mod:`~kgopt.rewrite.measure.verdicts`). Later calls read a dictionary: nothing is timed and no
stream is synchronized.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kgopt.ops import conv_tf32_allowed
from kgopt.rewrite.chains.chain import Chain
from kgopt.rewrite.chains.emit import ConvArgs, NormArgs
from kgopt.rewrite.measure import measuring, verdicts
from kgopt.rewrite.measure.measuring import Measured, Question
from kgopt.rewrite.pytorch.watching import own_modes
from kgopt.torch_private import (
    are_functorch_transforms_active,
    is_tracing,
    len_torch_dispatch_stack,
    len_torch_function_stack,
)

_is_compiling = torch.compiler.is_compiling

SHAPES = 8  # at which a chain is measured; a model that sees a new size at every call is not held up at each


_claiming = threading.Lock()


@dataclass
class SiteState:
    """What a norm of an optimized model remembers. Not part of its state_dict; pickled without the measurements."""

    measure: bool | None = True  # may calls measure? None: one is measuring
    enabled: bool = True
    hidden: bool = False  # the model keeps the GPU busy, so a launch costs nothing
    results: dict[Any, Measured | None] = field(default_factory=dict)  # by _key; None: it could not be measured
    seen: dict[str, int] = field(default_factory=dict)  # how often each chain was measured
    kept_back: set[str] = field(default_factory=set)  # chains for which PyTorch's work was the shorter one, somewhere
    written: dict[Any, bool] = field(default_factory=dict)  # inputs that the model writes to: rewrite/norms/spared.py

    def claim(self) -> bool:
        """Whether this thread may measure now: one at a time, and what is called meanwhile does not."""
        with _claiming:
            claimed = self.measure is True
            if claimed:
                self.measure = None
            return claimed

    @property
    def lost_everywhere(self) -> bool:
        """Whether PyTorch's code was the better one in every measurement."""
        measured = [m for m in list(self.results.values()) if m is not None]
        return bool(measured) and not any(m.ours(self.hidden) for m in measured)

    @property
    def undecided(self) -> bool:
        """Whether it matters here if launches are hidden."""
        return any(m is not None and m.reason and m.ours_if_hidden for m in list(self.results.values()))

    def forget(self) -> None:
        """Measures again at the next call."""
        self.results, self.seen, self.kept_back, self.hidden = {}, {}, set(), False

    def __getstate__(self) -> dict[str, Any]:
        # A copy finds the measurements among the verdicts, as an equal model does. Another machine is another
        # measurement, of the whole model too.
        state: dict[str, Any] = {
            "measure": self.measure is not False,
            "enabled": self.enabled,
        }
        if self.hidden:
            state["hidden"] = verdicts.environments(device for _, _, _, device, *_ in self.results)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(SiteState().__dict__)
        self.__dict__.update(state)
        self.hidden = verdicts.are_here(state.get("hidden"))


_UNSEEN: Any = object()


def default(device: str) -> bool:
    """Ours, where nothing was measured?"""
    return device == "cuda"


def needs_grad(x: Tensor, norm: NormArgs, conv: ConvArgs | None) -> bool:
    """Will a backward go through this?"""
    if not torch.is_grad_enabled():
        return False
    if x.requires_grad:  # as a rule
        return True
    parameters: tuple[Any, ...] = (norm.weight, norm.bias, norm.slope)
    parameters = parameters if conv is None else (*parameters, conv.weight, conv.bias)
    return any(p is not None and p.requires_grad for p in parameters)


def choose(
    state: SiteState,
    name: str,
    keeps: bool,
    chain: Chain,
    x: Tensor,
    conv: ConvArgs | None,
    norm: NormArgs,
    cast: torch.dtype | None,
    checks: tuple[Callable[..., Any], Sequence[Any]],
    call: Callable[..., Any],
) -> bool:
    """Ours for this call? Measures, where this shape is new to the chain ``name`` and measuring is harmless.

    ``cast``: autocast's dtype, where nothing compiles. ``checks``: a function, and what it is called with. The rest as
    in :class:`Question`.
    """
    if not state.measure:
        return state.measure is False
    if _is_compiling():  # compiled code serves many sizes, so any verdict on the chain counts
        return name not in state.kept_back if name in state.seen else default(x.device.type)
    grad = needs_grad(x, norm, conv)
    # Norms take no TF32, and ask no switch at each call.
    tf32 = conv is not None and x.dtype is torch.float32 and bool(conv_tf32_allowed())
    key = (name, x.shape, x.dtype, x.device, x.is_contiguous(), grad, cast, tf32)
    found = state.results.get(key, _UNSEEN)
    if found is not _UNSEEN:
        return default(x.device.type) if found is None else found.ours(state.hidden)
    if state.seen.get(name, 0) >= SHAPES or not may_measure(x):
        return default(x.device.type)
    if not state.claim():
        return default(x.device.type)
    state.seen[name] = state.seen.get(name, 0) + 1
    try:
        measured = state.results[key] = _verdict(Question(chain, x, conv, norm, grad, keeps, *checks, call))
    finally:
        state.measure = True if state.measure is None else state.measure
    if measured is None:
        return default(x.device.type)
    if not measured.ours(hidden=True):
        state.kept_back.add(name)
    return measured.ours(state.hidden)


def may_measure(x: Tensor) -> bool:
    """Not while something looks on: tracing, a dispatch mode, a functorch transform, a CUDA graph capture."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.numel() == 0:
        return False
    if is_tracing() or are_functorch_transforms_active():
        return False
    if len_torch_dispatch_stack():
        return False
    if len_torch_function_stack() > own_modes.count:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _verdict(question: Question) -> Measured | None:
    """:func:`measuring.measure`, or what it said of an equal site."""

    def anew() -> dict[str, Any] | None:
        measured = measuring.measure(question)
        return None if measured is None else asdict(measured)

    found, known = verdicts.store.settle(question.key, anew)
    return None if found is None else Measured(**{**found, "known": known})
