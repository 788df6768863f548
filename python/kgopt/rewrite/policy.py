"""Which of two equal computations runs: PyTorch's or kgopt's.

The rule, in the order in which it is applied:

1. Measured at this shape, dtype, layout and need of a gradient: the faster one, if ours is as accurate as PyTorch's
   own error (``e(kgopt) <= 2 e(PyTorch) + tiny`` against float64). A call lasts as long as the slower of its launch and
   its work on the GPU. In a model that keeps the GPU busy launches are hidden, and only the work counts: in compiled
   code always, in eager code where the whole model was measured faster so (``SiteState.hidden``).
2. Not measured, on CUDA: ours.
3. Not measured, on the CPU: PyTorch's, which a compiler fuses with what is around it.

A site is measured when it first sees a shape (with ``example_inputs``: theirs), at most :data:`SHAPES` times. Later
calls read a dictionary: nothing is timed and no stream is synchronized.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kgopt._ops import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _is_autocast_enabled,
    _is_compiling,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from kgopt.rewrite.emit import ConvArgs, NormArgs, emit_kgopt, run_torch
from kgopt.rewrite.patterns import Chain

# What rounding alone explains where PyTorch happens to be exact.
TINY = {torch.float64: 1e-11, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
REFERENCE_ELEMENTS = 2**26  # of x, above which a float64 reference is too dear and the two results are compared
SHAPES = 8  # at which a chain is measured; a model that sees a new size at every call is not held up at each
LONG = 0.2  # seconds: what takes longer is timed once


class _OwnModes(threading.local):
    """How many of the function modes of this thread are kgopt's own (rewrite/glue.py): they look on harmlessly."""

    count = 0


own_modes = _OwnModes()


def outside_own_modes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(...)``, at which no mode of ours looks: its calls belong to other modules, and looking takes time."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    count = own_modes.count
    if not count or torch._C._len_torch_function_stack() != count:
        return function(*args, **kwargs)
    modes = [torch._C._pop_torch_function_stack() for _ in range(count)]
    own_modes.count = 0
    try:
        return function(*args, **kwargs)
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)
        own_modes.count = count


def is_watched() -> bool:
    """Something traces, transforms or counts what runs: it shall see PyTorch's own functions."""
    return bool(
        _is_compiling()
        or _is_tracing()
        or _are_functorch_transforms_active()
        or _len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
    )


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for x's device. Not in code that is being compiled."""
    return _is_any_autocast_enabled() and _is_autocast_enabled(x.device.type)


@dataclass
class Measured:
    """Of one chain at one key: seconds a call and relative errors against float64."""

    before: float
    after: float
    error_before: float
    error_after: float
    reason: str = ""  # why ours was not taken; "": it was
    # Work on the GPU alone, where ours lost by the time of a call.
    busy_before: float | None = None
    busy_after: float | None = None

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
    keep_format: bool = False  # channels_last stays where PyTorch's GroupNorm would return a contiguous tensor
    results: dict[Any, Measured | None] = field(default_factory=dict)  # by _key; None: it could not be measured
    seen: dict[str, int] = field(default_factory=dict)  # how often each chain was measured
    kept_back: set[str] = field(default_factory=set)  # chains for which PyTorch's work was the shorter one, somewhere

    @property
    def lost_everywhere(self) -> bool:
        """Whether PyTorch's code was the better one in every measurement."""
        measured = [m for m in self.results.values() if m is not None]
        return bool(measured) and not any(m.ours(self.hidden) for m in measured)

    @property
    def undecided(self) -> bool:
        """Whether it matters here if launches are hidden."""
        return any(m is not None and m.reason and m.ours_if_hidden for m in self.results.values())

    def forget(self) -> None:
        """Measures again at the next call."""
        self.results, self.seen, self.kept_back, self.hidden = {}, {}, set(), False

    def __getstate__(self) -> dict[str, Any]:
        # Another machine is another measurement.
        return {"measure": self.measure is not False, "enabled": self.enabled, "keep_format": self.keep_format}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(SiteState().__dict__)
        self.__dict__.update(state)


_UNSEEN: Any = object()


def default(device: str) -> bool:
    """Ours, where nothing was measured?"""
    return device == "cuda"


def needs_grad(x: Tensor, norm: NormArgs, conv: ConvArgs | None) -> bool:
    """Will a backward go through this?"""
    if not torch.is_grad_enabled():
        return False
    parameters = (norm.weight, norm.bias) if conv is None else (norm.weight, norm.bias, conv.weight, conv.bias)
    # As a rule the first of them says yes, before there is a generator.
    return x.requires_grad or any(p is not None and p.requires_grad for p in parameters)


def choose(
    state: SiteState,
    name: str,
    chain: Chain,
    x: Tensor,
    conv: ConvArgs | None,
    norm: NormArgs,
    checks: Callable[[], None],
    call: Callable[..., Any],
) -> bool:
    """Ours for this call? Measures, where this shape is new to the chain ``name`` and measuring is harmless.

    ``checks`` does what every call of ours does before its ops, so that its time counts too; ``call`` calls the ops.
    """
    if not state.measure:
        return state.measure is False
    if _is_compiling():  # compiled code serves many sizes, so any verdict on the chain counts
        return name not in state.kept_back if name in state.seen else default(x.device.type)
    grad, device = needs_grad(x, norm, conv), x.device
    key = (name, x.shape, x.dtype, device, x.is_contiguous(), grad, is_autocast(x))
    found = state.results.get(key, _UNSEEN)
    if found is not _UNSEEN:
        return default(device.type) if found is None else found.ours(state.hidden)
    if state.seen.get(name, 0) >= SHAPES or not may_measure(x):
        return default(x.device.type)
    state.seen[name] = state.seen.get(name, 0) + 1
    state.measure = None  # what is called while measuring does not measure
    try:
        measured = state.results[key] = measure(chain, x, conv, norm, grad, state.keep_format, checks, call)
    finally:
        state.measure = True
    if measured is None:
        return default(x.device.type)
    if not measured.ours(hidden=True):
        state.kept_back.add(name)
    return measured.ours(state.hidden)


def may_measure(x: Tensor) -> bool:
    """Not while something looks on: tracing, a dispatch mode, a functorch transform, a CUDA graph capture."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.numel() == 0:
        return False
    if torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    if torch.utils._python_dispatch._len_torch_dispatch_stack():
        return False
    if torch._C._len_torch_function_stack() > own_modes.count:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def own_saved_tensors() -> Any:
    """Saved tensors of calls that measure are no business of an activation checkpoint around them.

    Detached: a result that its own node saves would keep the graph alive, and with it what accumulates the parameters'
    gradients, on this stream. A CUDA graph could not be captured from another one then.
    """
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda t: t)


def measure(
    chain: Chain,
    x: Tensor,
    conv: ConvArgs | None,
    norm: NormArgs,
    grad: bool,
    keep_format: bool,
    checks: Callable[[], None],
    call: Callable[..., Any],
) -> Measured | None:
    """Both ways at these inputs, forward, and backward where a gradient is needed. None: it could not be measured."""
    try:
        with own_saved_tensors():
            return _measure(chain, x, conv, norm, grad, keep_format, checks, call)
    except (torch.OutOfMemoryError, RuntimeError):
        return None


def _measure(
    chain: Chain,
    x: Tensor,
    conv: ConvArgs | None,
    norm: NormArgs,
    grad: bool,
    keep_format: bool,
    checks: Callable[[], None],
    call: Callable[..., Any],
) -> Measured:
    leaf = _detached(grad)
    x = leaf(x)
    conv = None if conv is None else replace(conv, weight=leaf(conv.weight), bias=leaf(conv.bias))
    norm = replace(norm, weight=leaf(norm.weight), bias=leaf(norm.bias))
    tensors = [x, norm.weight, norm.bias, *((conv.weight, conv.bias) if conv else ())]
    wanted = [t for t in tensors if t is not None and t.requires_grad]

    def theirs() -> Tensor:
        return run_torch(chain, x, conv, norm)

    def ours() -> Tensor:
        checks()
        y = emit_kgopt(chain, call, x, x.dim(), conv, norm, not torch.is_autocast_enabled(x.device.type))
        return y if keep_format else as_torch(chain, x, y)

    def step(function: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            y = function()
            if wanted:
                torch.autograd.grad(y, wanted, torch.ones_like(y))

        return run

    with torch.set_grad_enabled(bool(wanted)):
        before, after = time_both(step(theirs), step(ours), x.device)
    busy: tuple[float, float] | tuple[None, None] = (None, None)
    if after > before and x.is_cuda:
        with torch.set_grad_enabled(bool(wanted)):
            busy = busy_both(step(theirs), step(ours), x.device)
    with torch.no_grad():
        errors = _errors(chain, x, conv, norm, theirs(), ours())
    dtype_tiny = TINY.get(x.dtype, 1e-2)
    reason = ""
    if errors[1] > 2 * errors[0] + dtype_tiny:
        reason = f"less accurate: error {errors[1]:.1e}, PyTorch's {errors[0]:.1e}"
        busy = (None, None)
    elif after > before:
        reason = f"PyTorch is faster here: {before * 1e6:.0f} us, kgopt {after * 1e6:.0f} us"
    return Measured(before, after, *errors, reason, *busy)


def _detached(grad: bool) -> Callable[[Any], Any]:
    def leaf(t: Any) -> Any:
        return t.detach().requires_grad_(grad and t.requires_grad) if isinstance(t, Tensor) else t

    return leaf


def _errors(
    chain: Chain, x: Tensor, conv: ConvArgs | None, norm: NormArgs, theirs: Tensor, ours: Tensor
) -> tuple[float, float]:
    if x.numel() > REFERENCE_ELEMENTS:
        reference = theirs.double()
    else:
        with torch.autocast(x.device.type, enabled=False):
            double = _double
            conv = None if conv is None else replace(conv, weight=double(conv.weight), bias=double(conv.bias))
            norm = replace(norm, weight=double(norm.weight), bias=double(norm.bias))
            reference = run_torch(chain, x.double(), conv, norm)
    return relative_error(theirs, reference), relative_error(ours, reference)


def _double(t: Any) -> Any:
    return t.double() if isinstance(t, Tensor) else t


def relative_error(y: Tensor, reference: Tensor) -> float:
    """In the 2-norm; of positions that are not finite in the reference, none."""
    reference = reference.double()
    difference = torch.where(reference.isfinite(), y.double() - reference, 0.0)
    scale = torch.where(reference.isfinite(), reference, 0.0).norm()
    return float(difference.norm() / scale.clamp_min(1e-30))


def time_both(first: Callable[[], Any], second: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds a call of two functions, taken in turn; the smallest of a few.

    On CUDA of seven at least, and for 0.15 s: a process that has just started launches slowly, and would be taken for a
    model that waits for its launches.
    """
    timer = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    once = []
    for function in (first, second):  # also warms both up
        function()
        once.append(timer(function, device))
    if max(once) > LONG:
        return once[0], once[1]
    rounds = max(7, min(40, int(0.15 / max(*once, 1e-6)))) if device.type == "cuda" else 3
    best = once
    for _ in range(rounds):
        best = [min(b, timer(f, device)) for b, f in zip(best, (first, second), strict=True)]
    return best[0], best[1]


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


def busy_both(first: Callable[[], Any], second: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds of work on the GPU of two functions: they are launched while it is kept busy with something else."""
    best = []
    for function in (first, second):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        launch = time.perf_counter() - start
        cycles = int(2e9 * min(1.5 * launch + 1e-4, 0.01))  # of a clock of at most 2 GHz

        def behind(function: Callable[[], Any] = function, cycles: int = cycles) -> float:
            torch.cuda._sleep(cycles)
            return _cuda_seconds(function, device)

        best.append(min(behind() for _ in range(3)))
    return best[0], best[1]


def as_torch_is_contiguous(chain: Chain, device: torch.device) -> bool:
    """Where PyTorch gives a contiguous tensor though x is channels_last, and kgopt would keep channels_last."""
    return not chain.reduce and (chain.norm == "instance" or device.type == "cuda")


def as_torch(chain: Chain, x: Tensor, y: Tensor) -> Tensor:
    """The result in the memory format that PyTorch's own modules give."""
    if not as_torch_is_contiguous(chain, y.device) or (not torch.compiler.is_compiling() and y.is_contiguous()):
        return y
    return y.contiguous()
