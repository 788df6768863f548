"""CUDA graphs of whole models: a call whose launches take longer than their work is recorded once and replayed.

The root gets a forward (the outermost part of its class) that looks a call up: by the kinds of its tensors, the values
of its other arguments, and PyTorch's switches. A call that was recorded copies its tensors to the recording's own,
replays, and returns copies of the results. Every other call runs the plain path.

A replay runs no Python. So a model is recorded only where repeating its call showed no effect but its results (no
write to its state or its inputs, no random number, no copy between CPU and GPU), and each call compares all that the
model holds with what it held then (:class:`Stamp`). Values of GPU tensors may change, their addresses may not.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import gc
import operator
import random
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite import classes, known, policy
from kgopt.rewrite.classes import Part
from kgopt.rewrite.outside import Listener, Outside
from kgopt.rewrite.transaction import LOCK, snapshot
from kgopt.rewrite.watching import any_global_hooks, is_foreign_mode, is_watched
from kgopt.torch_private import (
    any_requires_grad,
    clear_blas_workspaces,
    conv_precision,
    dispatch_mode,
    end_allocation_to_pool,
    len_torch_function_stack,
    tree_leaves,
    tree_map,
    version_of,
)

CALLS = 8  # that are recorded of a model, of different kinds
RENEWALS = 8  # how often a model may change before it is left alone
LONG = 0.03  # seconds of a call whose launches "auto" looks at first
GAIN = 0.97  # of the plain path's time, above which "auto" records nothing
SMALL = 1024  # elements of a CPU tensor that is compared at each call; a model that holds a larger one is left alone
VALUES = 200_000  # that a model may hold
DEPTH = 4  # of objects that are no modules, in each other


# ----------------------------------------------------------------------------------------------------------------------
# What a model holds

_CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, type, enum.Enum, range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.GeneratorType),
)
_CONTENTS = frozenset(("_parameters", "_buffers", "_modules", "training"))
# What nn.Module keeps beside them says who looks on at a call, or at the state_dict.
_BESIDE = frozenset(vars(nn.Module())) - _CONTENTS
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")


class Stamp:
    """All that a model held at one time, and what its code read beside; ``why``: what of it cannot be watched, or be
    recorded.
    """

    def __init__(self, root: nn.Module, codes: Mapping[types.CodeType, dict[str, Any]] | None = None) -> None:
        """``codes``: the functions that were seen to run, with their globals."""
        self.why = ""
        self.root = weakref.ref(root)
        self.codes = dict(codes or {})
        self.outside = Outside(self.codes)
        self.modules: list[nn.Module] = []  # but the root: it holds this
        self.hooks: list[Any] = []
        self.holders: list[Any] = []  # whatever holds values
        self.picks: list[tuple[Any, dict[str, Any]]] = []  # of a module what its forward may read, and where that is
        self.dicts: list[dict[Any, Any]] = []
        self.lists: list[Any] = []
        self.tensors: list[Tensor] = []
        self.small: list[tuple[Tensor, Tensor]] = []  # on the CPU, with its values
        self._collect(root)
        self._collect(*self.outside.objects, depth=DEPTH - 1)
        self.own = _own(root)
        self.root_class = type(root)
        self.types = list(map(type, self.modules))
        kinds = dict.fromkeys(base for cls in {*self.types, type(root)} for base in cls.__mro__ if base is not object)
        self.classes = [vars(cls) for cls in kinds]
        self.dicts = list(filter(None, self.dicts))  # of an empty one its size is enough
        self.holders += self.classes
        self.sizes = list(map(len, self.holders))
        self.values = self._values()
        self.places = self._places()

    def _collect(self, *roots: Any, depth: int = 0) -> None:
        waiting: deque[tuple[Any, int]] = deque((root, depth) for root in roots)
        seen, count = set(map(id, roots)) | set(map(id, self.modules)), 0
        while waiting:
            value, depth = waiting.popleft()
            inner: Any = ()
            if isinstance(value, nn.Module):
                own = vars(value)
                names = [name for name in own if name not in _BESIDE and name != known.ATTRIBUTE]
                inner = [own[name] for name in names]
                if value is not self.root():
                    self.modules.append(value)
                    self.holders.append(own)
                    self.picks.append((operator.itemgetter(*names), own))
                    self.hooks += [own[name] for name in _HOOKS if name in own]
                depth = -1  # its parameters and children are as near as itself
            elif isinstance(value, Tensor):
                self._add(value)
            elif isinstance(value, dict):
                self.holders.append(value)
                self.dicts.append(value)
                inner = value.values()
            elif isinstance(value, (list, set, deque)):
                self.holders.append(value)
                self.lists.append(value)
                inner = value
            elif isinstance(value, (tuple, frozenset)):
                inner = value
            elif depth < DEPTH and type(getattr(value, "__dict__", None)) is dict:
                self.holders.append(value.__dict__)
                self.dicts.append(value.__dict__)
                inner = value.__dict__.values()
            for item in list(inner):
                if not isinstance(item, _CONSTANT) and id(item) not in seen:
                    seen.add(id(item))
                    waiting.append((item, depth + 1))
            count += len(inner)
            if count > VALUES:
                self.why = f"it holds more than {VALUES} values"
                return

    def _add(self, t: Tensor) -> None:
        if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided:
            self.why = self.why or f"it holds a {type(t).__name__}, which is no plain tensor"
            return
        if not MACHINE.takes(t):
            if t.device.type != "cpu" or t.numel() > SMALL:
                self.why = self.why or f"it holds a tensor on {t.device.type} of shape {tuple(t.shape)}"
            else:
                self.small.append((t, t.detach().clone()))
        self.tensors.append(t)

    @property
    def devices(self) -> set[torch.device]:
        """Where its tensors are, but for small ones on the CPU."""
        return {t.device for t in self.tensors if MACHINE.takes(t)}

    def _current(self) -> Iterator[Any]:
        # A mapping of a class, unlike a dict of the user's, has its own values().
        of_classes = chain.from_iterable(c.values() for c in self.classes)
        of_modules = chain.from_iterable([pick(own) for pick, own in self.picks])
        of_dicts = chain.from_iterable(map(dict.values, self.dicts))
        return chain(of_modules, of_dicts, chain.from_iterable(self.lists), of_classes, self.outside.values())

    def _values(self) -> list[Any]:
        return list(self._current())

    def _places(self) -> tuple[list[Any], ...]:
        own = self.tensors
        kinds: Any = (Tensor.data_ptr, Tensor.stride, _shape, _dtype)
        return tuple(list(map(kind, own)) for kind in kinds)

    def holds(self, root: nn.Module) -> bool:
        """Whether the model still has all of it, in the same places."""
        if type(root) is not self.root_class:
            return False
        try:
            return (
                list(map(len, self.holders)) == self.sizes
                and all(map(operator.is_, map(type, self.modules), self.types))
                and all(map(operator.is_, self._current(), self.values))
                and _are(_own(root), self.own)
                and self._places() == self.places
                and all(torch.equal(t, value) for t, value in self.small)
            )
        except (KeyError, ValueError, RuntimeError):  # one is gone; another thread changes something at this moment
            return False

    @property
    def is_hooked(self) -> bool:
        """Whether somebody looks on at a module inside: then nothing is replayed."""
        return any(self.hooks)

    def versions(self) -> list[int | None]:
        """How often each tensor was written to; inference tensors do not say."""
        return [0 if t.is_inference() else version_of(t) for t in self.tensors]


def _are_hooked(root: nn.Module) -> bool:
    """Whether somebody looks on at a module inside."""
    return any(vars(m).get(name) for m in root.modules() if m is not root for name in _HOOKS)


def _own(root: nn.Module) -> list[Any]:
    """What the root has itself. Its hooks run around its forward, and so around a replay."""
    return [v for name, v in vars(root).items() if name not in _BESIDE and name != known.ATTRIBUTE]


def _are(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


# ----------------------------------------------------------------------------------------------------------------------
# Arguments and results


class RefusedError(Exception):
    """A call that is not recorded; says why."""


class ChangesError(RefusedError):
    """The same of a model whose calls change it: what it holds would be another at each call."""

    def __init__(self) -> None:
        super().__init__("its forward changes what the model holds")


def key_of(value: Any, tensors: list[Tensor]) -> Any:
    """What calls must share to take one recording; tensors are added to ``tensors``, in order.

    Raises:
        RefusedError: an argument whose values may change unseen.
    """
    kind = type(value)
    if kind is Tensor:
        for i, other in enumerate(tensors):
            if other is value:
                return kind, i
        if not MACHINE.takes(value):
            raise RefusedError(f"an argument is a tensor on {value.device.type}")
        if value.layout is not torch.strided or value.is_conj() or value.is_neg() or value.requires_grad:
            raise RefusedError("an argument is sparse, a lazy conjugate, or requires a gradient")
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device
    if value is None or kind in (bool, int, str, bytes):
        return kind, value
    if kind in (float, complex):
        return kind, repr(value)  # NaN equals itself there, and -0.0 is not 0.0
    if kind in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return kind, *(key_of(v, tensors) for v in value)
    if kind is dict and all(type(k) in (str, int) for k in value):
        return kind, *((k, key_of(v, tensors)) for k, v in value.items())
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum)):
        return kind, value
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not isinstance(value, dict):
        return kind, *((name, key_of(v, tensors)) for name, v in vars(value).items())
    raise RefusedError(f"an argument is a {kind.__name__}, whose value cannot be compared")


def _form(key: Any) -> Any:
    """A key without the kinds of its tensors."""
    if not isinstance(key, tuple) or isinstance(key, torch.Size):
        return key
    return "tensor" if key and isinstance(key[0], torch.Size) else tuple(map(_form, key))


def with_tensors(value: Any, take: Callable[[Tensor], Tensor]) -> Any:
    """Arguments that :func:`key_of` knows, or results, with other tensors.

    Raises:
        RefusedError: a value that may hide a tensor.
    """

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return take(x)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            made = copy.copy(x)
            for name, item in vars(x).items():
                object.__setattr__(made, name, with_tensors(item, take))
            return made
        if not isinstance(x, _CONSTANT):
            raise RefusedError(f"its result holds a {type(x).__name__}")
        return x

    return take(value) if isinstance(value, Tensor) else tree_map(leaf, value)


def _leaves(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        if not any(other is t for other in found):
            found.append(t)
        return t

    with_tensors(value, note)
    return found


def _like(t: Tensor) -> Tensor:
    """A tensor of the same strides, of its own.

    Raises:
        RefusedError: elements of t share memory.
    """
    if any(step == 0 and size > 1 for size, step in zip(t.shape, t.stride(), strict=True)):
        raise RefusedError("a tensor is expanded: its elements share memory")
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def _bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(-1).view(torch.uint8)


def _switches() -> Any:
    """What decides, beside the arguments, which kernels a call runs."""
    backends, cudnn = torch.backends.cuda, torch.backends.cudnn
    mode = str(torch.get_default_device()) if len_torch_function_stack() else ""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        mode,
        conv_precision(),
        getattr(backends.matmul, "fp32_precision", None),
        backends.matmul.allow_fp16_reduced_precision_reduction,
        backends.matmul.allow_bf16_reduced_precision_reduction,
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()),
        (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled()),
        backends.cudnn_sdp_enabled(),
    )


def _random_states(device: torch.device) -> Any:
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state()[1:3] if numpy is not None else ()
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return [bytes(s.numpy().tobytes()) for s in states], random.getstate(), [str(part) for part in drawn]


# ----------------------------------------------------------------------------------------------------------------------
# The device


class Cuda:
    """Recording and replaying on a GPU. Tests put another one in its place."""

    def takes(self, t: Tensor) -> bool:
        """Whether a tensor is where calls can be recorded."""
        return t.is_cuda

    def is_recording(self) -> bool:
        """Whether somebody records what runs now."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def seconds(self, first: Callable[[], Any], second: Callable[[], Any], device: torch.device) -> tuple[float, float]:
        """Of a call of each."""
        return policy.clock_both(first, second, device)

    def is_busy(self, call: Callable[[], Any], device: torch.device) -> bool:
        """Whether a long call's work takes much longer than its launches: a recording would hold memory for nothing."""
        call()
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        launched = time.perf_counter() - start
        torch.cuda.synchronize(device)
        worked = time.perf_counter() - start
        return worked > LONG and launched < 0.5 * worked

    def lane(self, device: torch.device) -> Lane:
        """Where the calls of one model are recorded and replayed."""
        return Lane(device)


class Lane:
    """The recordings of one model on one GPU: one memory pool, and one replay after the other.

    They share memory, so a replay waits for the one before it, on whichever stream that ran.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.pool = torch.cuda.graph_pool_handle()
            self.side = torch.cuda.Stream(device)
            self.done = torch.cuda.Event()
        self.last: Any = None  # the stream of the last replay

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """On a stream of its own, as what is recorded afterwards. The replays before are over."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            self.wait(current)
            self.side.wait_stream(current)
            try:
                with torch.cuda.stream(self.side):
                    yield
            finally:
                current.wait_stream(self.side)

    def wait(self, current: Any) -> None:
        """Has a stream wait for the last replay."""
        if self.last is not None and self.last != current:
            current.wait_event(self.done)

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What replays a call, and its result, which each replay writes anew.

        A capture that fails is ended, and the allocator is told so.
        """
        gc.collect()  # a graph that is freed within a capture ends it
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self.device):
                torch.cuda.synchronize(self.device)
                # In the capture cuBLAS's workspaces come from the pool then: no other graph has them. A thread beside
                # this one may be about to use the one that it has.
                alone = threading.active_count() == 1
                if alone:
                    clear_blas_workspaces()
                torch.cuda.empty_cache()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(self.side):
                    result = self._capture(graph, call)
                if alone:
                    clear_blas_workspaces()
        finally:
            if collects:
                gc.enable()
        return graph.replay, result

    def _capture(self, graph: Any, call: Callable[[], Any]) -> Any:
        graph.capture_begin(self.pool, capture_error_mode="thread_local")
        try:
            result = call()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what failed may have made the capture void
                self._end(graph)
            raise
        self._end(graph)
        return result

    def _end(self, graph: Any) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            if not _has_ended(graph):  # of a void capture PyTorch does not tell its allocator
                end_allocation_to_pool(self.device, self.pool)
            raise

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One replay, with what comes before and after it, on the caller's stream."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            self.wait(current)
            try:
                yield
            finally:
                self.last = current
                self.done.record(current)

    def settle(self) -> None:
        """Waits for the last replay, whose memory may be given back then."""
        if self.last is not None:
            with contextlib.suppress(RuntimeError):
                self.done.synchronize()

    @property
    def held(self) -> int:
        """Bytes of the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self.pool))


def _has_ended(graph: Any) -> bool:
    """Whether a capture was ended as PyTorch means it: then the graph gives its pool back itself."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


MACHINE: Any = Cuda()


# ----------------------------------------------------------------------------------------------------------------------
# One recording


class Recording:
    """One kind of call."""

    def __init__(
        self, replay: Callable[[], None], inputs: list[Tensor], outputs: Any, given: dict[int, int], text: str
    ) -> None:
        self.replay = replay
        self.inputs = inputs
        self.outputs = outputs
        self.given = given  # of outputs that are inputs, by id: which
        self.text = text  # shapes, for the report
        self.before = self.after = 0.0  # seconds of a call without and with it

    def run(self, lane: Any, tensors: list[Tensor]) -> Any:
        """The results for these tensors, which the next call leaves alone."""
        made: dict[int, Tensor] = {}

        def take(t: Tensor) -> Tensor:
            found = made.get(id(t))
            if found is None:
                at = self.given.get(id(t))
                found = made[id(t)] = _like(t) if at is None else tensors[at]
            return found

        with lane.turn():
            for own, given in zip(self.inputs, tensors, strict=True):
                own.copy_(given)
            self.replay()
            return with_tensors(self.outputs, take)


class Graphs:
    """What the root of a model knows of its recordings."""

    def __init__(self, mode: bool | str) -> None:
        self.mode = mode
        self.lock = threading.Lock()  # who does not get it takes the plain path
        self.owner: Any = None  # of the model: copies that share this object (copy.copy, replicas) do not replay
        self.reset()
        self.renewals = 0
        self.off = ""  # why nothing is recorded any more

    def __reduce__(self) -> Any:
        return Graphs, (self.mode,)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process parts of torch are gone
            if not MACHINE.is_recording():
                self.reset()

    def reset(self) -> None:
        """Drops every recording, and what they hold."""
        lane = getattr(self, "lane", None)
        if lane is not None:
            lane.settle()
        self.stamp: Stamp | None = None
        self.lane: Any = None
        self.calls: dict[Any, Recording | str | None] = {}  # a reason why not; None: seen once
        self.last_reason = ""

    # -------------------------------------------------------------------------------------------------------- calls

    def call(
        self,
        forward: Callable[..., Any],
        root: nn.Module,
        args: Any,
        kwargs: Any,
        seen: bool = False,
        timed: bool = True,
    ) -> Any:
        """The model's forward.

        ``seen``: a kind of call that is new is recorded at once, else when it comes again; ``timed``: and compared with
        the plain path by the clock.
        """
        if self.off or root.training or not self._may_replay(root):
            return forward(root, *args, **kwargs)
        tensors: list[Tensor] = []
        try:
            key = key_of(args, tensors), key_of(kwargs, tensors), _switches()
            if not tensors:
                raise RefusedError("no argument is a tensor")
            if torch.is_grad_enabled() and self._records(root, tensors):
                raise RefusedError("a gradient is recorded")
        except RefusedError as reason:
            self.last_reason = str(reason)
            return forward(root, *args, **kwargs)
        if not self.lock.acquire(blocking=False):
            return forward(root, *args, **kwargs)
        try:
            if self.stamp is not None and not self.stamp.holds(root):
                self._renew()
            if _are_hooked(root) if self.stamp is None else self.stamp.is_hooked:
                self.last_reason = "modules inside have hooks"
                return forward(root, *args, **kwargs)
            found = self.calls.get(key)
            if isinstance(found, Recording):
                return found.run(self.lane, tensors)
            if found is None and (seen or (key in self.calls and self._takes(key))):
                found = self.calls[key] = self._try(forward, root, args, kwargs, tensors, timed)
            elif found is None and len(self.calls) < 4 * CALLS:
                self.calls[key] = None
        finally:
            self.lock.release()
        return forward(root, *args, **kwargs)

    def _may_replay(self, root: nn.Module) -> bool:
        if self.owner is None:
            self.owner = weakref.ref(root)
        if self.owner() is not root or is_watched() or any_global_hooks():
            return False
        if len_torch_function_stack() and is_foreign_mode():
            return False
        return not MACHINE.is_recording()

    def _takes(self, key: Any) -> bool:
        """Whether a kind of call that comes again is recorded. "auto" does so where only its tensors are others than in
        a call that was: a timestep that is a number would be recorded for each of its values, seconds at a time.
        """
        kept = [other for other, c in self.calls.items() if isinstance(c, Recording)]
        return self.mode is True or not kept or any(_form(other) == _form(key) for other in kept)

    def _records(self, root: nn.Module, tensors: list[Tensor]) -> bool:
        own = self.stamp.tensors if self.stamp is not None else list(root.parameters())
        return any_requires_grad(*own, *tensors)

    def _renew(self) -> None:
        self.reset()
        self.renewals += 1
        if self.renewals > RENEWALS:
            self.off = f"the model changed {self.renewals} times after a call was recorded"

    # ---------------------------------------------------------------------------------------------------- recording

    def _try(
        self,
        forward: Callable[..., Any],
        root: nn.Module,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        timed: bool,
    ) -> Recording | str:
        if sum(isinstance(c, Recording) for c in self.calls.values()) >= CALLS:
            return f"{CALLS} kinds of calls are recorded already"
        try:
            found = self._record(forward, root, args, kwargs, tensors, asks := self.mode == "auto" and timed)
            if timed:
                found.before, found.after = self._seconds(found, forward, root, args, kwargs, tensors)
        except ChangesError as reason:
            self.reset()
            self.off = str(reason)
            return self.off
        except RefusedError as reason:
            return self._without(str(reason))
        except Exception as error:  # the model's own, too: the plain call that follows raises it if it must
            return self._without(f"recording fails: {(str(error) or repr(error)).splitlines()[0]}")
        if asks and found.after >= GAIN * found.before:
            return self._without(f"it is not faster: {_us(found.after)} with it, {_us(found.before)} without")
        return found

    def _without(self, reason: str) -> str:
        """A call that failed leaves no memory behind, unless other calls have their recordings there. The stamp stays:
        once the model has changed, the call may be tried again.
        """
        if not any(isinstance(c, Recording) for c in self.calls.values()):
            if self.lane is not None:
                self.lane.settle()
            self.lane = None
        self.last_reason = reason
        return reason

    def _record(
        self,
        forward: Callable[..., Any],
        root: nn.Module,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        asks: bool,
    ) -> Recording:
        device, grad = tensors[0].device, torch.is_grad_enabled()
        if any(t.device != device for t in tensors):
            raise RefusedError("its arguments are on several devices")
        if dispatch_mode is None or version_of(tensors[0].detach().clone()) is None:
            raise RefusedError("this torch does not say what a call does")
        put_back, drawn = snapshot(root), random.getstate()
        numpy = sys.modules.get("numpy")
        state = None if numpy is None else numpy.random.get_state()
        try:
            # Out of inference mode: its tensors could not be written to by calls that are not in it.
            with torch.inference_mode(False), torch.set_grad_enabled(grad), _no_casts_kept():
                if asks and MACHINE.is_busy(lambda: forward(root, *args, **kwargs), device):
                    raise RefusedError("its launches are over long before its work is")
                if self.lane is None:
                    self.lane = MACHINE.lane(device)
                return self._record_at(forward, root, args, kwargs, tensors)
        finally:
            random.setstate(drawn)
            if numpy is not None:
                numpy.random.set_state(state)
            put_back()

    def _record_at(
        self, forward: Callable[..., Any], root: nn.Module, args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> Recording:
        lane = self.lane
        with lane.aside():
            inputs = [_like(t) for t in tensors]
            by_id = {id(given): own for given, own in zip(tensors, inputs, strict=True)}
            own_args, own_kwargs = (with_tensors(v, lambda t: by_id[id(t)]) for v in (args, kwargs))

            def call() -> Any:
                return forward(root, *own_args, **own_kwargs)

            call()  # sites measure themselves; what the model makes at its first call is there
            self._listen(root, call)
            expected = self._look(root, call, inputs, (own_args, own_kwargs))
        replay, outputs = lane.record(call)
        assert self.stamp is not None
        if not self.stamp.holds(root):
            raise ChangesError
        given = self._check(outputs, inputs)
        shapes = ", ".join("x".join(map(str, t.shape)) or "scalar" for t in tensors)
        recording = Recording(replay, inputs, outputs, given, f"({shapes}) {tensors[0].dtype}".replace("torch.", ""))
        result = recording.run(lane, tensors)
        if not _agree(expected, result):
            raise RefusedError("a replay gives another result than the call")
        return recording

    def _listen(self, root: nn.Module, call: Callable[[], Any]) -> None:
        """Has the stamp watch what the code of a call reads, too."""
        with Listener() as listener:
            call()
        if listener.writes:
            raise RefusedError(f"its forward writes to {listener.writes}, a variable outside of it")
        if self.mode == "auto" and (listener.effect or listener.is_blind):
            raise RefusedError(listener.effect or "this thread is profiled, so what its forward does is not seen")
        codes = self.stamp.codes if self.stamp is not None else {}
        if self.stamp is None or listener.codes.keys() - codes.keys():
            self.stamp = Stamp(root, codes | listener.codes)

    def _look(self, root: nn.Module, call: Callable[[], Any], inputs: list[Tensor], arguments: Any) -> Any:
        """Repeats the call, and sees that it does nothing but return its result, which is returned."""
        stamp = self.stamp
        assert stamp is not None
        if stamp.why:
            raise RefusedError(stamp.why)
        if len({*stamp.devices, inputs[0].device}) > 1:
            raise RefusedError("its tensors are on several devices")
        if not stamp.holds(root):
            raise ChangesError
        values, again = [t.clone() for t in inputs], key_of(arguments, [])
        before = stamp.versions(), [version_of(t) for t in inputs], _random_states(inputs[0].device)
        result = call()
        looking = _Looking()
        with looking.mode():
            call()
        if looking.why:
            raise RefusedError(looking.why)
        if (stamp.versions(), [version_of(t) for t in inputs])[0] != before[0] or not stamp.holds(root):
            raise ChangesError
        written = [version_of(t) for t in inputs] != before[1]
        written = written or not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(values, inputs, strict=True))
        if written or key_of(arguments, []) != again:
            raise RefusedError("its forward writes to its arguments")
        if _random_states(inputs[0].device) != before[2]:
            raise RefusedError("its forward draws random numbers")
        return result

    def _check(self, outputs: Any, inputs: list[Tensor]) -> dict[int, int]:
        """Of results that are arguments, by id: which of them.

        Raises:
            RefusedError: a result that cannot be copied without a difference.
        """
        places = {t.untyped_storage().data_ptr() for t in (*inputs, *(self.stamp.tensors if self.stamp else ()))}
        given = {}
        for t in _leaves(outputs):
            at = next((i for i, own in enumerate(inputs) if own is t), None)
            if at is not None:
                given[id(t)] = at
            elif type(t) is not Tensor or not MACHINE.takes(t) or t.requires_grad or t.is_conj() or t.is_neg():
                raise RefusedError("its result is no plain tensor on the GPU")
            elif t.numel() and t.untyped_storage().data_ptr() in places:
                raise RefusedError("its result shares memory with its arguments or parameters")
            else:
                _like(t)
        return given

    def _seconds(
        self, recording: Recording, forward: Callable[..., Any], root: nn.Module, args: Any, kwargs: Any, tensors: Any
    ) -> tuple[float, float]:
        stamp = self.stamp
        assert stamp is not None

        def replayed() -> Any:
            key_of((args, kwargs), [])
            _switches()
            stamp.holds(root)
            return recording.run(self.lane, tensors)

        put_back = snapshot(root)
        try:
            return MACHINE.seconds(  # type: ignore[no-any-return]
                lambda: forward(root, *args, **kwargs), replayed, tensors[0].device
            )
        finally:
            put_back()

    # ------------------------------------------------------------------------------------------------------- report

    def text(self) -> str:
        """For the report."""
        if self.off:
            return f"none: {self.off}"
        kept = [c for c in self.calls.values() if isinstance(c, Recording)]
        reasons = list(dict.fromkeys(c for c in self.calls.values() if isinstance(c, str)))
        if not kept:
            return f"none: {'; '.join(reasons) or self.last_reason or 'no call was seen twice in inference'}"
        calls = [r.text + (f": {_us(r.after)} a call, {_us(r.before)} without" if r.after else "") for r in kept]
        pool = f"{self.lane.held / 2**20:.1f} MiB of memory held"
        return "; ".join([*calls, pool, *(f"not for another call: {reason}" for reason in reasons)])


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


def _agree(expected: Any, result: Any) -> bool:
    """Whether results are equal up to what kernels that sum in another order make of them."""
    pairs = list(zip(_leaves(expected), _leaves(result), strict=False))
    for a, b in pairs:
        if a.shape != b.shape or a.dtype is not b.dtype:
            return False
        if not a.dtype.is_floating_point:
            if not torch.equal(a, b):
                return False
            continue
        a, b = a.double(), b.double()
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return False
        a, b = a[finite], b[finite]
        if a.numel() and not float((a - b).norm()) <= 0.02 * float(a.norm()):
            return False
    return len(_leaves(expected)) == len(_leaves(result))


@contextlib.contextmanager
def _no_casts_kept() -> Iterator[None]:
    """Autocast keeps casts of the weights for a while; in a recording they would not follow the weights."""
    if not torch.is_autocast_enabled("cuda"):
        yield
        return
    with torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False):
        yield


class _Looking:
    """Sees every op of a call; ``why``: one that a replay would not repeat."""

    def __init__(self) -> None:
        self.why = ""

    def mode(self) -> Any:
        """A dispatch mode."""
        looking = self

        class Mode(dispatch_mode):  # type: ignore[misc, valid-type]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                looking.why = looking.why or looking.reason(func, args, kwargs, result)
                return result

        return Mode()

    def reason(self, func: Any, args: Any, kwargs: Any, result: Any) -> str:
        """Why an op cannot be replayed."""
        taken = [t for t in tree_leaves([list(args), dict(kwargs or {})]) if isinstance(t, Tensor)]
        given = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        here = any(MACHINE.takes(t) for t in taken)
        tags = getattr(func, "tags", ())
        if torch.Tag.data_dependent_output in tags and here:
            return f"it reads values of the GPU: {func}"
        if torch.Tag.dynamic_output_shape in tags and here and _is_masked(func, args):
            return f"the shape of a result hangs on values: {func}"
        # A tensor of the CPU with one element is an argument of a kernel, and so a constant.
        there = [t for t in taken if not MACHINE.takes(t) and (t.dim() or "copy" in str(func))]
        if str(func).startswith(_ATTENTION):  # without dropout nobody reads the random state that it gives on the CPU
            given = [t for t in given if MACHINE.takes(t)]
        if (here and any(not MACHINE.takes(t) for t in given)) or (there and any(map(MACHINE.takes, given))):
            return f"it copies between the CPU and the GPU: {func}"
        return ""


_ATTENTION = "aten._scaled_dot_product_"


def _is_masked(func: Any, args: Any) -> bool:
    """Indexing by numbers has a known shape; by a mask it has not."""
    if not str(func).startswith(("aten.index", "aten._unsafe_index")):
        return True
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in tree_leaves(list(args[1:])))


# ----------------------------------------------------------------------------------------------------------------------
# The part of a class


def wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, replayed where it was recorded."""

    @functools.wraps(forward)
    def graphed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        state: Graphs | None = known.get(self, "graphs")
        if state is None:
            return forward(self, *args, **kwargs)
        return state.call(forward, self, args, kwargs)

    return graphed_forward


def set_mode(root: nn.Module, mode: bool | str) -> str:
    """Turns recording on (True, "auto") or off; recordings from before are dropped. Returns why it cannot be on."""
    with LOCK:
        state: Graphs | None = known.get(root, "graphs")
        original, recipe = classes.recipe_of(root)
        without = tuple(part for part in recipe if part[0] != "graphs")
        if state is not None:
            state.off = "it was turned off"
            classes.give(root, original, without)
            known.drop(root, "graphs")
            # A thread that records may be waiting for LOCK; what it holds goes when it is done.
            if state.lock.acquire(timeout=1.0):
                state.reset()
                state.lock.release()
        return classes.give(root, original, (*without, ("graphs",)), graphs=Graphs(mode)) if mode else ""


def may_pay(root: nn.Module, arguments: Any) -> bool:
    """Whether a call of these arguments is one that can be recorded at all: inference on a GPU."""
    if root.training:
        return False
    leaves = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    return any(map(MACHINE.takes, leaves))


def can_record(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> bool:
    """Whether a call can be recorded, and may be faster so. Nothing is kept."""
    state = Graphs("auto")
    forward = type(root).forward
    with torch.no_grad():
        try:
            if MACHINE.is_busy(lambda: forward(root, *args, **kwargs), device):
                return False
            state.call(forward, root, args, kwargs, seen=True, timed=False)
            return any(isinstance(c, Recording) for c in state.calls.values())
        finally:
            state.reset()


def seconds_of_replays(
    first: Callable[[], Any], second: Callable[[], Any], device: torch.device
) -> tuple[float, float] | None:
    """Of two calls without their launches; None where one of them cannot be recorded."""
    lane = MACHINE.lane(device)

    def replay_of(call: Callable[[], Any]) -> Callable[[], None]:
        with lane.aside():
            call()
        replay, _ = lane.record(call)
        return replay  # type: ignore[no-any-return]

    try:
        with _no_casts_kept():
            return policy.time_both(replay_of(first), replay_of(second), device)
    except RuntimeError:
        return None
    finally:
        lane.settle()


def record(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], known_seconds: float = 0.0) -> float:
    """Records a call now, where that pays: seconds of a replay by the clock, 0 where it does not.

    ``known_seconds``: those of an equal model, which are not measured again.
    """
    state: Graphs | None = known.get(root, "graphs")
    if state is None or root.training:
        return 0.0
    # Below the part of the class, so that hooks of the root are not called.
    plain = classes.make_class(*_without(root)).forward
    with torch.no_grad():
        state.call(plain, root, args, kwargs, seen=True, timed=not known_seconds)
    made = [c for c in state.calls.values() if isinstance(c, Recording)]
    return (known_seconds or made[-1].after) if made else 0.0


def _without(root: nn.Module) -> tuple[Any, Any]:
    original, recipe = classes.recipe_of(root)
    return original, tuple(part for part in recipe if part[0] != "graphs")


def text_of(root: nn.Module) -> str | None:
    """What the report says of them; None where nobody asked for any."""
    state: Graphs | None = known.get(root, "graphs")
    if state is None:
        return None
    if root.training and not state.calls:
        return "none: the model is in training mode"
    return state.text()


classes.add_part("graphs", Part(wrap=lambda _, forward: wrapped_forward(forward), place=3))
