"""Which of two equal computations runs: PyTorch's or kgopt's.

The rule, in the order in which it is applied:

1. Measured at this shape, dtype, layout and need of a gradient: the faster one, if ours is accurate by the rule of
   :mod:`kgopt.accuracy`. A call lasts as long as the slower of its launch and its work on the GPU. In a model that
   keeps the GPU busy launches are hidden, and only the work counts: in compiled code always, in eager code where the
   whole model was measured faster so (``SiteState.hidden``).
2. Not measured, on CUDA: ours.
3. Not measured, on the CPU: PyTorch's, which a compiler fuses with what is around it.

A site is measured when it first sees a shape (with ``example_inputs``: theirs), at most :data:`SHAPES` times, unless
an equal one was before (:mod:`~kgopt.rewrite.verdicts`). Later calls read a dictionary: nothing is timed and no stream
is synchronized.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kgopt import accuracy
from kgopt._layout import format_of
from kgopt.ops import conv_tf32_allowed
from kgopt.rewrite import verdicts
from kgopt.rewrite.chain import CHANNELS, Chain
from kgopt.rewrite.emit import ConvArgs, NormArgs, emit_kgopt, run_torch
from kgopt.rewrite.watching import is_autocast, own_modes
from kgopt.torch_private import (
    are_functorch_transforms_active,
    is_tracing,
    keep_busy,
    len_torch_dispatch_stack,
    len_torch_function_stack,
)

_is_compiling = torch.compiler.is_compiling

REFERENCE_ELEMENTS = 2**26  # of x, above which a float64 reference is too dear: a part of x says what the errors are
SHAPES = 8  # at which a chain is measured; a model that sees a new size at every call is not held up at each
LONG = 0.2  # seconds: what takes longer is timed once
SHORT = 0.02  # seconds: what takes longer waits for no launches, so it is timed alone, and in fewer rounds


_claiming = threading.Lock()


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


@dataclass
class SiteState:
    """What a norm of an optimized model remembers. Not part of its state_dict; pickled without the measurements."""

    measure: bool | None = True  # may calls measure? None: one is measuring
    enabled: bool = True
    hidden: bool = False  # the model keeps the GPU busy, so a launch costs nothing
    results: dict[Any, Measured | None] = field(default_factory=dict)  # by _key; None: it could not be measured
    seen: dict[str, int] = field(default_factory=dict)  # how often each chain was measured
    kept_back: set[str] = field(default_factory=set)  # chains for which PyTorch's work was the shorter one, somewhere

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
_NOTHING = nn.Identity()


def default(device: str) -> bool:
    """Ours, where nothing was measured?"""
    return device == "cuda"


def needs_grad(x: Tensor, norm: NormArgs, conv: ConvArgs | None) -> bool:
    """Will a backward go through this?"""
    if not torch.is_grad_enabled():
        return False
    parameters: tuple[Any, ...] = (norm.weight, norm.bias, norm.slope)
    parameters = parameters if conv is None else (*parameters, conv.weight, conv.bias)
    # As a rule the first of them says yes, before there is a generator.
    return x.requires_grad or any(p is not None and p.requires_grad for p in parameters)


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


def choose(
    state: SiteState,
    name: str,
    keeps: bool,
    chain: Chain,
    x: Tensor,
    conv: ConvArgs | None,
    norm: NormArgs,
    checks: tuple[Callable[..., Any], Sequence[Any]],
    call: Callable[..., Any],
) -> bool:
    """Ours for this call? Measures, where this shape is new to the chain ``name`` and measuring is harmless.

    ``checks``: a function, and what it is called with. The rest as in :class:`Question`.
    """
    if not state.measure:
        return state.measure is False
    if _is_compiling():  # compiled code serves many sizes, so any verdict on the chain counts
        return name not in state.kept_back if name in state.seen else default(x.device.type)
    grad, device = needs_grad(x, norm, conv), x.device
    cast = torch.get_autocast_dtype(device.type) if is_autocast(x) else None
    # Norms take no TF32, and ask no switch at each call.
    tf32 = conv is not None and x.dtype is torch.float32 and bool(conv_tf32_allowed())
    key = (name, x.shape, x.dtype, device, x.is_contiguous(), grad, cast, tf32)
    found = state.results.get(key, _UNSEEN)
    if found is not _UNSEEN:
        return default(device.type) if found is None else found.ours(state.hidden)
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


def own_saved_tensors() -> Any:
    """Saved tensors of calls that measure are no business of an activation checkpoint around them.

    Detached: a result that its own node saves would keep the graph alive, and with it what accumulates the parameters'
    gradients, on this stream. A CUDA graph could not be captured from another one then.
    """
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda t: t)


def _verdict(question: Question) -> Measured | None:
    """:func:`measure`, or what it said of an equal site."""

    def anew() -> dict[str, Any] | None:
        measured = measure(question)
        return None if measured is None else asdict(measured)

    found, known = verdicts.store.settle(question.key, anew)
    return None if found is None else Measured(**{**found, "known": known})


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
        before, after = time_both(step(q.called), step(q.checked), x.device)
        if after > before and x.is_cuda:
            busy = busy_both(step(q.theirs), step(q.checked), x.device)
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


def time_both(first: Callable[[], Any], second: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds a call of two functions, taken in turn; the smallest of a few.

    On CUDA for 0.15 s, or until every time of the one is below every time of the other. Of what may wait for its
    launches seven at least: a process that has just started launches slowly, and would be taken for a model that does.
    """
    timer = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    once = []
    for function in (first, second):  # also warms both up
        function()
        once.append(timer(function, device))
    if max(once) > LONG:
        return once[0], once[1]
    best = once
    rounds: list[list[float]] = []
    while not _are_enough(rounds, max(best), device):
        rounds.append([timer(function, device) for function in (first, second)])
        best = [min(pair) for pair in zip(best, rounds[-1], strict=True)]
    return best[0], best[1]


def _are_enough(rounds: list[list[float]], seconds: float, device: torch.device) -> bool:
    """Whether two functions, the longer of which takes so long, have been timed often enough."""
    if device.type != "cuda":
        return len(rounds) >= 3
    if len(rounds) >= max(3, min(40, int(0.15 / max(seconds, 1e-6)))):
        return True
    if len(rounds) < (7 if seconds < SHORT else 3):
        return False
    first, second = zip(*rounds, strict=True)
    return max(first) < min(second) or max(second) < min(first)


def seconds_once(function: Callable[[], Any], device: torch.device) -> float:
    """Of one call."""
    return (_cuda_seconds if device.type == "cuda" else _cpu_seconds)(function, device)


def _cpu_seconds(function: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _cuda_seconds(function: Callable[[], Any], device: torch.device) -> float:
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    function()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def clock_both(
    first: Callable[[], Any],
    second: Callable[[], Any],
    device: torch.device,
    ready: tuple[Callable[[], Any], Callable[[], Any]] | None = None,
) -> tuple[float, float]:
    """Seconds a call of two functions by the clock, with all that the host does: medians of rows of calls in turn.

    The device is idle before and after a row. Rows are repeated until the two are further apart than half of the
    rows are from each other, or one second is over; 7 rows of each at least, 3 of one call each where a call takes more
    than :data:`SHORT`, and one where it takes more than :data:`LONG`.
    ``ready``: what is done before a row of each, and one more call of it, whose time does not count.
    """
    synchronize = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else _nothing
    functions = first, second

    def clock(at: int, calls: int) -> float:
        function = functions[at]
        if ready is not None:
            ready[at]()
            function()
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize()
        return (time.perf_counter() - start) / calls

    once = []
    for at, function in enumerate(functions):
        if ready is None:
            function()  # warms it up
        once.append(clock(at, 1))
    if max(once) > LONG:
        return clock(0, 1), clock(1, 1)
    calls = max(3, min(50, int(0.01 / max(*once, 1e-6)))) if max(once) < SHORT else 1
    rows: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + 1.0
    while True:
        for at, found in enumerate(rows):
            found.append(clock(at, calls))
        if len(rows[0]) < (3 if min(*rows[0], *rows[1]) > SHORT else 7):
            continue
        a, b = (sorted(found) for found in rows)
        half = len(a) // 2
        spread = max(found[(3 * len(found)) // 4] - found[len(found) // 4] for found in (a, b))
        if abs(a[half] - b[half]) > spread or time.perf_counter() > end:
            return a[half], b[half]


def _nothing() -> None:
    """What a device that is never behind waits for."""


def busy_both(first: Callable[[], Any], second: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds of work on the GPU of two functions: they are launched while it is kept busy with something else."""
    best: list[float] = []
    for function in (first, second):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        launch = time.perf_counter() - start
        cycles = int(2e9 * min(1.5 * launch + 1e-4, 0.01))  # of a clock of at most 2 GHz

        def behind(function: Callable[[], Any] = function, cycles: int = cycles) -> float:
            keep_busy(cycles)
            return _cuda_seconds(function, device)

        found = behind()
        if not best or found < 2 * best[0]:  # else more of them would not help it
            found = min(found, behind(), behind())
        best.append(found)
    return best[0], best[1]


def as_torch_is_contiguous(chain: Chain, device: torch.device) -> bool:
    """Where PyTorch gives a contiguous tensor though x is channels_last, and kgopt would keep channels_last."""
    if chain.norm in CHANNELS:
        return False  # emit_kgopt sees to it
    return not chain.reduce and (chain.norm == "instance" or device.type == "cuda")


def as_torch(chain: Chain, x: Tensor, y: Tensor) -> Tensor:
    """The result in the memory format that PyTorch's own modules give."""
    if not as_torch_is_contiguous(chain, y.device) or (not torch.compiler.is_compiling() and y.is_contiguous()):
        return y
    return y.contiguous()
