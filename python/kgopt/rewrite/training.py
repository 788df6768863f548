"""Convolutions and linear upsampling in training: kgopt's ops and their gradients, where they were measured faster.

A module of these kinds gets a forward that, at an input it has not seen, times forward and backward of both ways, when
:func:`kgopt.optimize` runs the example inputs of a model in training mode; afterwards it looks the verdict up. Inputs
that were not measured run PyTorch's code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kgopt import _ops as _ops
from kgopt.rewrite import policy
from kgopt.rewrite.patterns import conv_of

_OPS = torch.ops.kgopt
SHAPES = 8  # inputs of a module that are measured
GAIN = 0.97  # of the original's time, above which a module stays as it is
_LINEAR = {"bilinear": 4, "trilinear": 5}
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
    if conv_of(module) is not None:
        suits = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return _convolve if suits else None
    if type(module) is nn.Upsample or getattr(type(module), "_kgopt_original", None) is nn.Upsample:
        factors = module.scale_factor if isinstance(module.scale_factor, tuple) else (module.scale_factor,)
        suits = module.mode in _LINEAR and not module.align_corners and not module.recompute_scale_factor
        return _upsample if suits and module.size is None and set(factors) == {2.0} else None
    return None


def _convolve(conv: Any, x: Tensor) -> Tensor:
    tail = (conv.output_padding, conv.groups, conv.dilation) if conv.transposed else (conv.dilation, conv.groups)
    op = getattr(_OPS, conv_of(conv) or "").default
    return op(x, conv.weight, conv.bias, conv.stride, conv.padding, *tail)  # type: ignore[no-any-return]


def _upsample(module: Any, x: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type) and x.is_cuda:
        x = x.float()  # as autocast has it
    return _OPS.upsample_linear(x)  # type: ignore[no-any-return]


def _takes(module: Any, x: Any) -> bool:
    """A plain tensor of the module's rank, and plain parameters that go with it."""
    if type(x) is not Tensor or not x.is_cuda or x.layout is not torch.strided or x.numel() == 0:
        return False
    if conv_of(module) is None:
        return x.dim() == _LINEAR[module.mode] and x.is_floating_point()
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if x.dim() != len(module.kernel_size) + 2 or type(weight) is not nn.Parameter or weight.device != x.device:
        return False
    if bias is not None and (type(bias) is not nn.Parameter or bias.dtype is not weight.dtype):
        return False
    return x.dtype is weight.dtype or torch.is_autocast_enabled("cuda")


def key_of(x: Tensor) -> Any:
    """What a verdict holds for."""
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, cast, torch.backends.cudnn.allow_tf32


def wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that :func:`runner_of` knows, by kgopt's op where gradients are on and it was faster."""

    @functools.wraps(forward)
    def training_forward(self: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(self, input, *args, **kwargs)
        return policy.outside_own_modes(_run, forward, self, input)

    return training_forward


def _run(forward: Callable[..., Any], module: Any, x: Any) -> Any:
    from kgopt.rewrite.glue import is_watched

    state = module.__dict__.get("_kgopt_training")
    if state is None or not state.enabled or is_watched() or torch._C._len_torch_function_stack():
        return forward(module, x)
    if not _takes(module, x):
        return forward(module, x)
    runner = runner_of(module)
    if runner is None:
        return forward(module, x)
    key = key_of(x)
    if state.measuring and key not in state.ours and len(state.ours) < SHAPES:
        state.ours[key] = _is_faster(functools.partial(forward, module), functools.partial(runner, module), module, x)
    return runner(module, x) if state.ours.get(key) else forward(module, x)


def _is_faster(theirs: Callable[[Tensor], Tensor], ours: Callable[[Tensor], Tensor], module: Any, x: Tensor) -> bool:
    """Whether ours keeps the GPU busy for a shorter time, forward and backward, with values as right."""
    leaf = x.detach().requires_grad_(x.requires_grad)
    parameters = [p for p in module.parameters() if p.requires_grad]
    wanted = [*([leaf] if leaf.requires_grad else []), *parameters]
    if not wanted or any(p._backward_hooks for p in parameters):
        return False

    def step(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        y = function(leaf)
        return y, *torch.autograd.grad(y, wanted, torch.ones_like(y))

    try:
        # Saved tensors of these calls are no business of an activation checkpoint around them.
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
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
    """Runs the model, in which modules measure themselves; those that gained nothing become what they were."""
    from kgopt.rewrite import classes

    for name, module in root.named_modules():
        if runner_of(module) is None or unwanted(name) or "forward" in module.__dict__:
            continue
        state = module.__dict__.setdefault("_kgopt_training", TrainingState())
        state.measuring = True
        original = classes.original_class(module)
        recipe = type(module).__dict__["_kgopt_recipe"] if original is not None else ()
        if ("training",) not in recipe:
            module.__class__ = classes.make_class(original or type(module), (*recipe, ("training",)))
    try:
        call()
    finally:
        for module in modules_of(root):
            state_of(module).measuring = False
    forget(root, lambda module: not any(state_of(module).ours.values()))
    return len(modules_of(root))


def forget(root: nn.Module, which: Callable[[nn.Module], bool] = lambda module: True) -> None:
    """Gives modules their own forward back."""
    from kgopt.rewrite import classes

    for module in modules_of(root):
        if not which(module):
            continue
        del module.__dict__["_kgopt_training"]
        original = classes.original_class(module)
        if original is not None:
            recipe = tuple(part for part in type(module).__dict__["_kgopt_recipe"] if part != ("training",))
            module.__class__ = classes.make_class(original, recipe) if recipe else original


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Every module that has a state."""
    return [m for m in root.modules() if "_kgopt_training" in m.__dict__]


def state_of(module: nn.Module) -> TrainingState:
    """The state of one of them."""
    state: TrainingState = module.__dict__["_kgopt_training"]
    return state
