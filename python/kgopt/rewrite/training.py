"""Convolutions and upsampling in training: kgopt's ops and their gradients, where they were measured faster.

A convolution, and a module whose own code calls ``F.interpolate``, gets a forward that times forward and backward of
both ways at an input it has not seen, when :func:`kgopt.optimize` runs the example inputs of a model in training mode;
afterwards it looks the verdict up. Inputs that were not measured run PyTorch's code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kgopt import _ops as _ops
from kgopt.rewrite import policy
from kgopt.rewrite.glue import innermost, interpolation
from kgopt.rewrite.patterns import CONV_MODULES, conv_of
from kgopt.rewrite.wrapped import Wrapped

_OPS = torch.ops.kgopt
SHAPES = 8  # inputs of a module that are measured
GAIN = 0.97  # of the original's time, above which a module stays as it is
# Relative rounding of a product's operands, and of a result.
_UNITS = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_TF32 = 1e-3


@dataclass
class TrainingState:
    """What a module remembers of its calls."""

    enabled: bool = True
    measuring: bool = False
    ours: dict[Any, bool] = field(default_factory=dict)  # by key_of

    def __getstate__(self) -> dict[str, Any]:
        return {"enabled": self.enabled, "measuring": False, "ours": {}}  # another machine is another measurement

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def runner_of(module: nn.Module) -> Callable[[Any, Tensor], Tensor] | None:
    """How kgopt computes what this module does; None where it cannot."""
    suits = conv_of(module) is not None and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return _convolve if suits else None


def _convolve(conv: Any, x: Tensor) -> Tensor:
    parameters = conv._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    if torch.is_autocast_enabled("cuda"):
        x, weight, bias = _ops.autocast_convolution(torch.get_autocast_dtype("cuda"), x, weight, bias)
    tail = (conv.output_padding, conv.groups, conv.dilation) if conv.transposed else (conv.dilation, conv.groups)
    y = _CONVS[conv_of(conv) or ""](x, weight, bias, conv.stride, conv.padding, *tail)
    return y  # type: ignore[no-any-return]


_CONVS = {name: _ops.direct(name) for name in CONV_MODULES.values()}


def _takes(module: Any, x: Any) -> bool:
    """A plain tensor of the module's rank, and plain parameters that go with it."""
    if not _is_plain(x):
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if x.dim() != len(module.kernel_size) + 2 or type(weight) is not nn.Parameter or weight.device != x.device:
        return False
    if bias is not None and (type(bias) is not nn.Parameter or bias.dtype is not weight.dtype):
        return False
    return x.dtype is weight.dtype or torch.is_autocast_enabled("cuda")


def _is_plain(x: Any) -> bool:
    return type(x) is Tensor and x.is_cuda and x.layout is torch.strided and x.numel() > 0 and x.is_floating_point()


def key_of(x: Tensor) -> Any:
    """What a verdict holds for."""
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, cast, torch.backends.cudnn.allow_tf32


def conv_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a convolution module, by kgopt's ops where gradients are on and they were faster."""

    @functools.wraps(forward)
    def training_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or (state := _state_now(self)) is None:
            return forward(self, *args, **kwargs)
        return policy.outside_own_modes(_run, state, forward, self, args[0])

    return training_forward


def wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module whose code calls F.interpolate, likewise."""

    @functools.wraps(forward)
    def training_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = _state_now(self)
        if state is None:
            return forward(self, *args, **kwargs)
        return policy.outside_own_modes(_interpolating, state, forward, self, *args, **kwargs)

    return training_forward


def _state_now(module: Any) -> TrainingState | None:
    """The state of a module whose call may be another one: gradients are on, and nobody looks on."""
    if not torch.is_grad_enabled() or policy.is_watched():
        return None
    state: TrainingState | None = module.__dict__.get("_kgopt_training")
    if state is None or not state.enabled or torch._C._len_torch_function_stack() > policy.own_modes.count:
        return None
    return state


def _run(state: TrainingState, forward: Callable[..., Any], conv: Any, x: Any) -> Any:
    if not _takes(conv, x):
        return forward(conv, x)
    key = key_of(x)
    ours = state.ours.get(key)
    if ours is None and state.measuring and len(state.ours) < SHAPES and runner_of(conv) is not None:
        parameters = [p for p in conv.parameters() if p.requires_grad]
        theirs = functools.partial(forward, conv)
        ours = state.ours[key] = _is_faster(theirs, functools.partial(_convolve, conv), parameters, x)
    return _convolve(conv, x) if ours and runner_of(conv) is not None else forward(conv, x)


# ----------------------------------------------------------------------------------------------------------------------
# Upsampling, by modules whose own code calls F.interpolate


def _interpolating(state: TrainingState, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    policy.own_modes.count += 1
    try:
        with _Interpolation(state):
            return forward(*args, **kwargs)
    finally:
        policy.own_modes.count -= 1


class _Interpolation(TorchFunctionMode):
    """Runs what was measured to be faster; measures it first, where the state says so."""

    def __init__(self, state: TrainingState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _interpolation_of(*args, **kwargs) if func is F.interpolate else None
        if found is None:
            return func(*args, **kwargs)
        x, kind, factors = found
        ours = functools.partial(_upsample, kind, factors)
        key = (*key_of(x), kind, factors)
        verdicts = self.state.ours
        if self.state.measuring and key not in verdicts and len(verdicts) < SHAPES:
            rest = (args[1:], kwargs) if args else ((), {k: v for k, v in kwargs.items() if k != "input"})
            verdicts[key] = _is_faster(lambda x: func(x, *rest[0], **rest[1]), ours, [], x)
        return ours(x) if verdicts.get(key) else func(*args, **kwargs)


def _interpolation_of(
    input: Any = None,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> tuple[Tensor, str, tuple[int, ...]] | None:
    if not _is_plain(input) or input.dim() not in (4, 5) or antialias:
        return None
    found = interpolation(input, size, scale_factor, mode, align_corners)
    return None if found is None else (input, *found)


def _upsample(kind: str, factors: tuple[int, ...], x: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cuda"):
        x = x.float()  # as autocast has it
    return _OPS.upsample_linear(x) if kind == "linear" else _OPS.upsample_nearest(x, list(factors))  # type: ignore[no-any-return]


class _Callers(TorchFunctionMode):
    """Finds the modules whose own code calls F.interpolate."""

    def __init__(self, modules: dict[int, nn.Module]) -> None:
        super().__init__()
        self.modules = modules
        self.found: dict[int, nn.Module] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.interpolate:
            owner = innermost(self.modules)
            if owner is not None:
                self.found[owner] = self.modules[owner]
        return func(*args, **(kwargs or {}))


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def _is_faster(
    theirs: Callable[[Tensor], Tensor], ours: Callable[[Tensor], Tensor], parameters: list[Any], x: Tensor
) -> bool:
    """Whether ours keeps the GPU busy for a shorter time, forward and backward, with values as right."""
    leaf = x.detach().requires_grad_(x.requires_grad)
    wanted = [*([leaf] if leaf.requires_grad else []), *parameters]
    if not wanted or any(p._backward_hooks for p in parameters):
        return False

    def step(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        y = function(leaf)
        return y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y))

    try:
        with policy.own_saved_tensors():
            expected, actual = step(theirs), step(ours)
            if not all(_agree(a, e) for a, e in zip(actual, expected, strict=True)):
                return False
            if actual[0].stride() != expected[0].stride():
                return False
            del expected, actual
            before, after = policy.busy_both(lambda: step(theirs), lambda: step(ours), x.device)
    except (torch.OutOfMemoryError, RuntimeError):
        return False
    return after < GAIN * before


def _agree(actual: Tensor, expected: Tensor) -> bool:
    """Apart by no more than the rounding of operands and results explains: both round them once."""
    if actual.dtype is not expected.dtype or actual.shape != expected.shape:
        return False
    unit = _UNITS[actual.dtype]
    if torch.is_autocast_enabled("cuda"):
        unit = max(unit, _UNITS[torch.get_autocast_dtype("cuda")])
    elif actual.dtype is torch.float32 and torch.backends.cudnn.allow_tf32:
        unit = _TF32
    return policy.relative_error(actual, expected) <= 4 * unit


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
    forget(root, lambda module: not any(state_of(module).ours.values()))
    return len(modules_of(root))


_wrapped: Wrapped[TrainingState] = Wrapped("training")
modules_of, state_of, forget = _wrapped.modules_of, _wrapped.state_of, _wrapped.forget
