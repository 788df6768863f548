"""Convolutions, upsampling and concatenation in training: kgopt's ops and their gradients, where they were measured
faster. Convolutions of captured graphs are judged by the same measurement
(:mod:`~kgopt.rewrite.captured.passes.convolutions`).

A convolution, and a module whose own code calls ``F.interpolate`` or ``torch.cat``, gets a forward that times forward
and backward of both ways at an input it has not seen, when :func:`kgopt.optimize` runs the example inputs of a model in
training mode; afterwards it looks the verdict up. Inputs that were not measured run PyTorch's code. A compiler
gets the same op in the graph, where it won in every measurement of the module: compiled code serves many sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kgopt import accuracy
from kgopt import ops as ops
from kgopt._layout import FORMATS, format_of, is_dense_channels_last
from kgopt.rewrite.chains.emit import padding_in_numbers
from kgopt.rewrite.chains.meanings import conv_of
from kgopt.rewrite.chains.modules import guard_methods, is_own_conv, runs_as_is
from kgopt.rewrite.glue.calls import CATS, Call, interpolate_of
from kgopt.rewrite.glue.kernels import cat_of_views, nearest_of_views
from kgopt.rewrite.glue.plans import as_seen
from kgopt.rewrite.glue.search import corner, innermost
from kgopt.rewrite.gradients import joins, recompute
from kgopt.rewrite.measure import clocks, measuring, verdicts
from kgopt.rewrite.optimized import classes, known
from kgopt.rewrite.optimized.classes import Part
from kgopt.rewrite.optimized.disguise import original_class
from kgopt.rewrite.optimized.wrapped import Wrapped
from kgopt.rewrite.pytorch import originals, watching
from kgopt.rewrite.pytorch.originals import CONV_MODULES
from kgopt.rewrite.pytorch.watching import OwnMode, own_modes
from kgopt.torch_private import any_requires_grad, has_backward_hooks, len_torch_function_stack

_OPS = torch.ops.kgopt
_STRIDED = torch.strided
SHAPES = 8  # inputs of a module that are measured
GAIN = 0.97  # of the original's time, above which a module stays as it is
LARGE = 50e-6  # seconds of the GPU that are worth more than what an op costs the host


@dataclass
class TrainingState:
    """What a module remembers of its calls."""

    enabled: bool = True
    measuring: bool = False
    ours: dict[Any, float] = field(default_factory=dict)  # by key_of: seconds of the GPU that it gains, 0 for PyTorch's
    always: tuple[Any, ...] = ()  # for compiled code, which serves many sizes: what gained in every measurement

    @property
    def ways(self) -> set[str]:
        """What is replaced."""
        return {_way_of(key, gain) for key, gain in self.ours.items() if gain > 0}

    def only(self, ways: Set[str]) -> TrainingState:
        """The same without all other ways."""
        ours = {key: gain if _way_of(key, gain) in ways else 0.0 for key, gain in self.ours.items()}
        made = replace(self, enabled=any(ours.values()), ours=ours)
        made.settle()
        return made

    def settle(self) -> None:
        """Says for compiled code what was measured."""
        found: dict[Any, bool] = {}
        for (shape, stride, dtype, _, _, cast, _, *call), gain in self.ours.items():
            is_contiguous = torch.empty_strided(shape, stride, device="meta").is_contiguous()
            kind = call[0] if call else "conv", is_contiguous, cast or dtype
            found[kind] = found.get(kind, True) and gain > 0
        self.always = tuple(kind for kind, gains in found.items() if gains)

    def gains(self, what: str, x: Tensor) -> bool:
        """Whether "conv", "cat", "nearest" or "linear" gained in every measurement; traced code asks."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        return (what, x.is_contiguous(), dtype) in self.always

    def __getstate__(self) -> dict[str, Any]:
        devices = verdicts.environments(device for _, _, _, device, *_ in self.ours)
        return {"enabled": self.enabled, "devices": devices, "ours": self.ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Another machine is another measurement.
        ours = dict(state["ours"]) if verdicts.are_here(state.get("devices")) else {}
        self.__dict__.update(TrainingState(state["enabled"], ours=ours).__dict__)
        self.settle()


def _way_of(key: Any, gain: float) -> str:
    call = key[_INPUT:]
    return str(call[0]) if call else "conv large" if gain >= LARGE else "conv small"


def runner_of(module: nn.Module) -> Callable[[Any, Tensor], Tensor] | None:
    """How kgopt computes what this module does; None where it cannot."""
    suits = conv_of(module) is not None and module.padding_mode == "zeros" and _padding(module) is not None
    return _convolve if suits else None


def _padding(conv: Any) -> Any:
    """In numbers; None where one side is padded more, which kgopt's ops do not do."""
    return padding_in_numbers(conv.padding, conv.kernel_size, conv.dilation)


def _convolve(conv: Any, x: Tensor) -> Tensor:
    return _convolve_now(conv, x, watching.autocast_of(x))


def _convolve_now(conv: Any, x: Tensor, cast: torch.dtype | None) -> Tensor:
    """Of a call that :func:`takes` lets through, with nobody looking on but autocast to ``cast``."""
    parameters = conv._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    if cast is not None and (x.dtype is not cast or weight.dtype is not cast):
        x, weight, bias = ops.autocast_convolution(cast, x, weight, bias)
    # By what it has, not by its class: made classes are hashed by a function of Python's.
    record, below = (_TRANSPOSED if conv.transposed else _REGULAR)[x.dim()]
    call = record if torch.is_grad_enabled() and any_requires_grad(x, weight, bias) else below
    if conv.transposed:
        tail = conv.output_padding, conv.groups, conv.dilation
        return call(x, weight, bias, conv.stride, conv.padding, *tail)  # type: ignore[no-any-return]
    padding = _padding(conv) if type(conv.padding) is str else conv.padding
    return call(x, weight, bias, conv.stride, padding, conv.dilation, conv.groups)  # type: ignore[no-any-return]


def _emit(conv: Any, x: Tensor) -> Tensor:
    """:func:`_convolve` where a compiler looks on: autocast and autograd are the op's own."""
    guard_methods(conv)
    geometry = conv.stride, tuple(_padding(conv)), conv.dilation, conv.output_padding, conv.groups
    return Call("conv", (conv_of(conv), conv.transposed, *geometry), as_seen(x), (conv.weight, conv.bias)).run("auto")


# By the number of dims: with a gradient, and without.
_REGULAR, _TRANSPOSED = (
    {n + 2: (ops.node_of(f"{name}{n}d"), ops.without_grad(f"{name}{n}d")) for n in (2, 3)}
    for name in ("conv", "conv_transpose")
)


def takes(module: Any, x: Any) -> bool:
    """A tensor of the module's rank, plain parameters that go with it, and a padding that kgopt's ops have."""
    return is_own_conv(module) and _fits(module, x, False)


def _fits(module: Any, x: Tensor, is_cast: bool) -> bool:
    """:func:`takes` of a convolution whose forward is PyTorch's. ``is_cast``: autocast is known to be on."""
    if module.padding_mode != "zeros" or (type(module.padding) is str and _padding(module) is None):
        return False
    parameters, own = module._parameters, module.__dict__
    if "weight" not in parameters or "bias" not in parameters or "weight" in own or "bias" in own:  # parametrized
        return False
    weight, bias = parameters["weight"], parameters["bias"]
    if type(weight) is not nn.Parameter or weight.device != x.device:
        return False
    return (bias is None or type(bias) is nn.Parameter) and suits(x, weight, bias, is_cast)


def suits(x: Tensor, weight: Tensor, bias: Tensor | None, is_cast: bool = False) -> bool:
    """Whether kgopt's op takes samples and parameters that PyTorch's convolution takes."""
    dtype = weight.dtype
    if x.dim() != weight.dim() or (bias is not None and bias.dtype is not dtype):
        return False
    return is_cast or x.dtype is dtype or torch.is_autocast_enabled(x.device.type)


def _is_plain(x: Any) -> bool:
    return type(x) is Tensor and x.is_cuda and x.layout is torch.strided and x.numel() > 0 and x.is_floating_point()


def key_of(x: Tensor) -> Any:
    """What a verdict holds for."""
    return _key_of(x, watching.autocast_of(x))


_INPUT = 7  # of a key: what it says of x; of a convolution that is all


def _key_of(x: Tensor, cast: torch.dtype | None) -> Any:
    dtype = x.dtype
    # The switch is of single precision alone.
    tf32 = (cast or dtype) is torch.float32 and bool(ops.conv_tf32_allowed())
    return x.shape, x.stride(), dtype, x.device, x.requires_grad, cast, tf32


def conv_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a convolution module, by kgopt's ops where gradients are on and they were faster."""

    @functools.wraps(forward)
    def training_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            ours = len(args) == 1 and not kwargs and _compiles(self, args[0])
            return _emit(self, args[0]) if ours else forward(self, *args, **kwargs)
        if len(args) != 1 or kwargs or (state := _state_now(self)) is None:
            return forward(self, *args, **kwargs)
        if len_torch_function_stack():
            return watching.outside_own_modes(_run, state, forward, self, args[0])
        return _run(state, forward, self, args[0])

    return training_forward


def wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module whose code calls F.interpolate or torch.cat, likewise."""

    @functools.wraps(forward)
    def training_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            state = _state_compiled(self)
            if state is None or not state.always:
                return forward(self, *args, **kwargs)
            with _LookCompiled(state):
                return forward(self, *args, **kwargs)
        state = _state_now(self)
        if state is None:
            return forward(self, *args, **kwargs)
        return watching.outside_own_modes(_looking, state, forward, self, *args, **kwargs)

    return training_forward


def _state_now(module: Any) -> TrainingState | None:
    """The state of a module whose call may be another one: gradients are on, and nobody looks on."""
    if not torch.is_grad_enabled() or watching.is_watched():
        return None
    knows = module.__dict__.get("_kgopt")
    state: TrainingState | None = None if knows is None else knows.training
    if state is None or not state.enabled:
        return None
    # A thread's own number takes longer to look up than whether there are modes at all.
    modes = len_torch_function_stack()
    return None if modes and modes > own_modes.count else state


def _state_compiled(module: Any) -> TrainingState | None:
    """The same of a call that a compiler looks at."""
    state: TrainingState | None = known.get(module, "training")
    if state is None or not state.enabled or not torch.is_grad_enabled():
        return None
    return None if watching.wants_torch() or watching.is_foreign_mode() else state


def _compiles(conv: Any, x: Any) -> bool:
    """Whether a compiled convolution is kgopt's."""
    state = _state_compiled(conv)
    if state is None or not _is_plain(x) or not state.gains("conv", x):
        return False
    return takes(conv, x)


def at_once(module: Any, x: Tensor, cast: torch.dtype | None) -> Tensor | None:
    """What a module gives that is a convolution on kgopt's op; None: call it.

    Gradients are on, and nothing looks on but autocast to ``cast``.
    """
    knows = module.__dict__.get("_kgopt")
    state: TrainingState | None = None if knows is None else knows.training
    if state is None or not state.enabled or x.layout is not _STRIDED or not state.ours.get(_key_of(x, cast)):
        return None
    if knows.layout is not None or knows.graphs is not None:  # a root
        return None
    as_is = runs_as_is(module, type(module), original_class(module)) and _fits(module, x, cast is not None)
    return _convolve_now(module, x, cast) if as_is else None


def _run(state: TrainingState, forward: Callable[..., Any], conv: Any, x: Any) -> Any:
    if type(x) is not Tensor or x.layout is not _STRIDED:
        return forward(conv, x)
    cast = watching.autocast_of(x)
    key = _key_of(x, cast)
    ours = state.ours.get(key)
    if ours is None and state.measuring and _is_plain(x) and len(state.ours) < SHAPES and takes(conv, x):
        ours = state.ours[key] = gain_of(_both_of_conv(forward, conv), x)
    # Of the verdict's key the rest of _is_plain follows.
    if ours and is_own_conv(conv) and _fits(conv, x, cast is not None):
        return _convolve_now(conv, x, cast)
    return forward(conv, x)


# ----------------------------------------------------------------------------------------------------------------------
# Upsampling and concatenation, by modules whose own code calls these functions


def _looking(state: TrainingState, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return watching.inside(_Look(state), forward, *args, **kwargs)


_INTERPOLATE = F.interpolate
_is_untouched = originals.untouched(*originals.of_function(_INTERPOLATE))
_are_functions_untouched = originals.untouched()


class _Look(OwnMode):
    """Runs what was measured to be faster; measures it first, where the state says so."""

    def __init__(self, state: TrainingState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = originals.genuine(func), kwargs or {}
        if func in CATS and _are_functions_untouched():
            return self._cat(func, args, kwargs)
        found = _interpolate_of(args, kwargs) if func is _INTERPOLATE and _is_untouched() else None
        if found is None:
            return func(*args, **kwargs)
        kind, factors, x = found
        ours = functools.partial(_upsample, kind, factors)
        key = (*key_of(x), kind, factors)
        settled = self.state.ours
        if self.state.measuring and key not in settled and len(settled) < SHAPES:
            rest = (args[1:], kwargs) if args else ((), {k: v for k, v in kwargs.items() if k != "input"})

            def theirs(x: Tensor) -> Tensor:
                return func(x, *rest[0], **rest[1])  # type: ignore[no-any-return]

            def exact(x: Tensor) -> Tensor:  # also of a corner, whatever size the call asks for
                mode = "nearest" if kind == "nearest" else ("bilinear", "trilinear")[x.dim() - 4]
                return F.interpolate(x, scale_factor=[float(f) for f in factors], mode=mode)

            settled[key] = gain_of(Both((kind, factors), theirs, ours, exact), x)
        return ours(x) if settled.get(key) else func(*args, **kwargs)

    def _cat(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        tensors = joins.tensors_of(_is_plain, args, kwargs)
        if tensors is not None:
            settled = self.state.ours
            key = (*key_of(tensors[0]), "cat", *((t.shape[1], t.requires_grad) for t in tensors))
            if self.state.measuring and key not in settled and len(settled) < SHAPES:
                settled[key] = joins.gain(tensors)
            if settled.get(key):
                y = joins.join(tensors)
                if (forward := recompute.now()) is not None:
                    forward.offer_join(y, joins.again, tensors)
                return y
        return func(*args, **kwargs)  # type: ignore[no-any-return]


class _LookCompiled(OwnMode):
    """In compiled code: what gained, and of channels_last tensors in their format.

    The compiler's own upsampling and concatenation of volumes give contiguous tensors, which the next convolution has
    converted. What is left of the gain without that is the compiler's.
    """

    def __init__(self, state: TrainingState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in CATS:
            tensors = joins.tensors_of(_is_plain, args, kwargs)
            if tensors is not None and self.state.gains("cat", tensors[0]):
                return cat_of_views(tensors)
        elif func is _INTERPOLATE and (found := _interpolate_of(args, kwargs)) is not None:
            kind, factors, x = found
            if self.state.gains(kind, x):
                if kind == "linear":
                    return _upsample(kind, factors, as_seen(x))
                if is_dense_channels_last(x):
                    x = x.float() if torch.is_autocast_enabled(x.device.type) else x
                    return nearest_of_views(x, factors)
        return func(*args, **kwargs)


def _interpolate_of(args: Any, kwargs: Any) -> Any:
    return interpolate_of(lambda x: _is_plain(x) and x.dim() in FORMATS, *args, **kwargs)


def _upsample(kind: str, factors: tuple[int, ...], x: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.float()  # as autocast has it
    return _OPS.upsample_linear(x) if kind == "linear" else _OPS.upsample_nearest(x, list(factors))  # type: ignore[no-any-return]


class _Callers(OwnMode):
    """Finds the modules whose own code calls F.interpolate or torch.cat."""

    def __init__(self, modules: dict[int, nn.Module]) -> None:
        super().__init__()
        self.modules = modules
        self.found: dict[int, nn.Module] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = originals.genuine(func)
        if func is _INTERPOLATE or func in CATS:
            owner = innermost(self.modules)
            if owner is not None:
                self.found[owner] = self.modules[owner]
        return func(*args, **(kwargs or {}))


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


@dataclass(frozen=True)
class Both:
    """Two ways to compute something, and what is needed to judge them."""

    kind: tuple[Any, ...]  # what a verdict depends on beside x
    theirs: Callable[[Tensor], Tensor]
    ours: Callable[[Tensor], Tensor]
    exact: Callable[..., Tensor]  # PyTorch's function of x and `operands`, for parts of x and for float64
    operands: tuple[Any, ...] = ()  # of a convolution: weight and bias
    parameters: tuple[Any, ...] = ()  # those of them that want a gradient
    kernel: tuple[tuple[int, ...], ...] = ()  # of a convolution: its sizes and dilation


def both_of_convolution(
    name: str,
    theirs: Callable[[Tensor], Tensor],
    ours: Callable[[Tensor], Tensor],
    weight: Tensor,
    bias: Tensor | None,
    geometry: tuple[Any, ...],
) -> Both:
    """Of kgopt's op ``name``. ``geometry``: stride, padding, dilation, transposed, output_padding, groups."""

    def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *geometry)

    return Both(
        (name, geometry, verdicts.canonical([weight, bias])),
        theirs,
        ours,
        exact,
        (weight, bias),
        tuple(p for p in (weight, bias) if p is not None and p.requires_grad),
        (tuple(weight.shape[2:]), tuple(geometry[2])),
    )


def _both_of_conv(forward: Callable[..., Any], conv: Any) -> Both:
    weight, bias = conv._parameters["weight"], conv._parameters["bias"]
    geometry = (conv.stride, _padding(conv), conv.dilation, conv.transposed, conv.output_padding, conv.groups)
    ways = functools.partial(forward, conv), functools.partial(_convolve, conv)
    return both_of_convolution(conv_of(conv) or "", *ways, weight, bias, geometry)


def gain_of(both: Both, x: Tensor, store: verdicts.Store | None = None) -> float:
    """Seconds of the GPU that ours saves, forward and backward, or what was said of equal calls; 0: theirs runs."""
    if any(map(has_backward_hooks, both.parameters)):
        return 0.0  # measuring would call them
    key = verdicts.key_of("training gain", x.device, both.kind, verdicts.canonical(x))
    store = verdicts.store if store is None else store
    gain: float = store.settle(key, lambda: _gain(both, x))[0]
    return gain


def _gain(both: Both, x: Tensor) -> float:
    """Seconds of the GPU that ours saves, forward and backward; 0 where it is not faster or its values not as right."""
    leaf = x.detach().requires_grad_(x.requires_grad)
    wanted = [*([leaf] if leaf.requires_grad else []), *both.parameters]
    if not wanted:
        return 0.0

    def step(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        y = function(leaf)
        return y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y))

    try:
        with measuring.own_saved_tensors():
            expected, actual = step(both.theirs), step(both.ours)
            if actual[0].stride() != expected[0].stride() or not _is_right(both, x, expected, actual):
                return 0.0
            del expected, actual
            before, after = clocks.busy_both(lambda: step(both.theirs), lambda: step(both.ours), x.device)
    except (torch.OutOfMemoryError, RuntimeError):
        return 0.0
    return before - after if after < GAIN * before else 0.0


def _is_right(both: Both, x: Tensor, expected: tuple[Tensor, ...], actual: tuple[Tensor, ...]) -> bool:
    """Result and gradients by the rule of :mod:`kgopt.accuracy` on a corner of x, and both ways close on the whole."""
    if any(a.dtype is not e.dtype or a.shape != e.shape for a, e in zip(actual, expected, strict=True)):
        return False
    part = corner(x.detach(), *both.kernel)
    dy: list[Tensor] = []  # the same for all, of both signs

    def results(function: Callable[..., Tensor], x: Tensor, operands: Any = (), parameters: Any = None) -> Any:
        leaf = x.requires_grad_(needed)
        y = function(leaf, *operands)
        if not dy:
            dy.append(torch.arange(y.numel(), device=y.device).double().mul(0.7).cos().view(y.shape).to(y.dtype))
        wanted = [*([leaf] if needed else []), *(both.parameters if parameters is None else parameters)]
        return y.detach(), *torch.autograd.grad(y, wanted, dy[0].to(y.dtype).contiguous(memory_format=format_of(y)))

    def in_double(x: Tensor, *operands: Any) -> Any:
        values = [t.detach().double().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in operands]
        return results(both.exact, x.double(), values, [t for t in values if t is not None and t.requires_grad])

    needed = x.requires_grad
    with accuracy.no_autotuning():  # the corner's sizes come once
        theirs, ours = results(both.exact, part.clone(), both.operands), results(both.ours, part.clone())
    yardsticks = [theirs]
    with torch.autocast(x.device.type, enabled=False), accuracy.no_autotuning():
        exact = in_double(part, *both.operands)
        if both.operands and accuracy.may_take_tf32(part):
            weight, bias = both.operands
            dy[0] = accuracy.round_tf32(dy[0])
            rounded = accuracy.round_tf32(weight.detach()).requires_grad_(weight.requires_grad)
            yardsticks.append(in_double(accuracy.round_tf32(part), rounded, bias))
    for i, reference in enumerate(exact):
        errors = [accuracy.relative_error(y[i], reference) for y in yardsticks]
        bar = accuracy.allowed(actual[0].dtype, *errors)
        # The whole by the same yardstick: both results are that close to the exact one.
        apart = accuracy.relative_error(actual[i], expected[i])
        if not (accuracy.relative_error(ours[i], reference) <= bar and apart <= 2 * bar):
            return False
    return True


def find(root: nn.Module, call: Callable[[], Any], unwanted: Callable[[str], str]) -> int:
    """Runs the model, in which modules measure themselves; those that gained nothing become what they were.

    Returns how many modules gained.
    """
    with _Callers({id(m): m for m in root.modules()}) as mode:
        call()
    for name, module in root.named_modules():
        if (
            (runner_of(module) is None and id(module) not in mode.found)
            or unwanted(name)
            or "forward" in module.__dict__
        ):
            continue
        _wrapped.add(module, TrainingState).measuring = True
    try:
        call()
    finally:
        for module in modules_of(root):
            state_of(module).measuring = False
            state_of(module).settle()
    forget(root, lambda module: not any(state_of(module).ours.values()))
    return len(modules_of(root))


_wrapped: Wrapped[TrainingState] = Wrapped("training")
modules_of, state_of, forget = _wrapped.modules_of, _wrapped.state_of, _wrapped.forget
adopt, swap = _wrapped.adopt, _wrapped.swap


def _wrap(original: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    return conv_forward(forward) if original in CONV_MODULES else wrapped_forward(forward)


classes.add_part("training", Part(wrap=_wrap, place=1))
