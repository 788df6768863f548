"""The way of a call: an op's autograd node, and past the dispatcher where nothing else looks on.

An eager call crosses Python's autograd once: one node, whose forward and backward call ops below autograd and autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kgopt import torch_private
from kgopt.ops.derivatives import by_formula, has_tangent, in_forward_mode, vector_jacobian
from kgopt.ops.registry import LIB, RECORDS, Op, overload, with_defaults
from kgopt.torch_private import (
    BELOW_AUTOGRAD,
    FORWARD_AD,
    LEVEL,
    any_requires_grad,
    are_functorch_transforms_active,
    is_any_autocast_enabled,
    is_tracing,
    len_torch_dispatch_stack,
    len_torch_function_stack,
    packed,
    schema_of,
)

# What stands above an op's kernel of a plain tensor.
_ABOVE = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "AutocastCPU", "AutocastCUDA")
_exclude_above = torch_private.exclude(*_ABOVE) if torch_private.HAS_GUARDS else None
_idle: list[Any] = []  # guards to enter again: making one takes as long as entering it
# Names of their own: a small call's time is Python's, attributes of modules included.
is_grad_enabled = torch.is_grad_enabled
is_compiling = torch.compiler.is_compiling
is_autocast_enabled = torch.is_autocast_enabled


def _guard() -> Any:
    """A guard that excludes what stands above an op's kernel; whoever is done puts it back: ``_idle.append(guard)``."""
    try:
        return _idle.pop()
    except IndexError:
        assert _exclude_above is not None
        return _exclude_above()


def _below(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` as if nothing stood above an op's kernel of a plain tensor."""
    if _exclude_above is None:
        return _without_any_autocast(run)

    def call(*args: Any, **keywords: Any) -> Any:
        guard = _guard()
        with guard:
            result = run(*args, **keywords)
        _idle.append(guard)
        return result

    return call


PLAIN = (Tensor, torch.nn.Parameter)
# Of arguments that are no tensors of a type of their own; asking by type is quicker than isinstance.
_USUAL = frozenset((*PLAIN, type(None), bool, int, float, str, list, tuple, torch.Size))

_sharded: tuple[type, Callable[..., Any]] | None = None  # DTensor, and how an op runs on it: sharding.py


def set_sharded(cls: type, call: Callable[..., Any]) -> None:
    """From now on ``call(name, args, keywords)`` is what an op does with arguments of this class."""
    global _sharded
    _sharded = cls, call


def _is_sharded(args: Sequence[Any]) -> bool:
    assert _sharded is not None
    cls = _sharded[0]
    # By type first: it is set in every process that has imported DTensor, and asked at every call.
    return not _USUAL.issuperset(map(type, args)) and any([isinstance(a, cls) for a in args])


def _without_any_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """:func:`_below` without guards, of a call that Autograd's kernel has behind it."""

    def call(*args: Any, **keywords: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return run(*args, **keywords)

    return call


def in_backward(name: str) -> Callable[..., Any]:
    """An op as a node's backward calls it: where nothing is recorded, without the way through its Autograd kernel."""
    op = overload(name)
    if _exclude_above is None:
        return op  # type: ignore[no-any-return]
    run = packed(op)

    def call(*args: Any, **keywords: Any) -> Any:
        # Where the Autograd kernel has something to do.
        if is_grad_enabled() or is_compiling() or are_functorch_transforms_active() or FORWARD_AD[LEVEL] >= 0:
            return op(*args, **keywords)
        # Around the op alone: what unpacks saved tensors may compute them again, with gradients.
        guard = _guard()
        with guard:
            result = run(*args, **keywords)
        _idle.append(guard)
        return result

    return call


# What an op does when the dispatcher has come to Autograd: with the arguments and keywords where a gradient is needed,
# and elsewhere.
_AT_AUTOGRAD: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
_APPLY_FIRST: dict[str, Callable[..., Any]] = {}  # of twins: with the arguments and the keywords last, the first result
_RECORDED: dict[str, Callable[..., Any]] = {}  # where a gradient is needed: with all arguments by their place
_GIVEN: dict[str, Callable[..., Any]] = {}  # the same of a result that is there: with it, the arguments and keywords
_NOTHING: dict[str, Any] = {}  # keywords
_AT_AUTOCAST: dict[str, dict[str, Callable[..., Any]]] = {}  # by device: what it does at autocast


class _Defaults:
    """Values of the arguments that a call may leave out."""

    def __init__(self, schema: Any) -> None:
        self.positional = tuple(a.default_value for a in schema.arguments if not a.kwarg_only)
        self.keywords = {a.name: a.default_value for a in schema.arguments if a.kwarg_only}


def _node(
    name: str, backward: Callable[..., Any], setup: Callable[..., None] | None, differentiable: int | None
) -> None:
    """The op's Autograd-key kernel: ``setup(ctx, inputs, keywords, output)`` saves, ``backward(ctx, *grads)`` reads.

    torch.library.register_autograd does the same, but its ops cannot be used under torch.func.grad. This one records a
    node at the level that is being differentiated, as a built-in op does, and redispatches to the levels below.
    """
    op = overload(name)
    run = packed(op)
    below, redispatch = _below(run), _below(op.redispatch)
    defaults = _Defaults(schema_of(op))
    count = len(defaults.positional)
    # Arguments left at their default are not given to the node; their gradients are None, and so is the last one's.
    nones = (None,) * (count + 1)

    def keep(ctx: Any, args: Any, keywords: dict[str, Any], output: Any) -> None:
        # No zeros for the gradients of statistics, which nobody differentiates: what set_materialize_grads(False) does.
        ctx.materialize_grads = False
        if setup is not None:
            if len(args) < count:
                args += defaults.positional[len(args) :]
            setup(ctx, args, {**defaults.keywords, **keywords} if keywords else defaults.keywords, output)

    def forward_below(ctx: Any, *args: Any) -> Any:
        """Where the dispatcher has come to Autograd."""
        keyset, keywords = args[-1]
        args = args[:-1]
        if are_functorch_transforms_active():
            # Below are other levels of torch.func.grad and jvp: with gradients off, as in any forward, they would see
            # a constant.
            with torch.enable_grad(), torch_private.pass_tangents(True):
                output = redispatch(keyset & BELOW_AUTOGRAD, *args, **keywords)
        else:
            output = redispatch(keyset & BELOW_AUTOGRAD, *args, **keywords)
        if differentiable is not None:
            ctx.mark_non_differentiable(*output[differentiable:])
        keep(ctx, args, keywords, output)
        return output

    def forward_now(ctx: Any, *args: Any) -> Any:
        """Where nothing looks on, and guards are to be had. :func:`_below` would be a call more."""
        keywords, args = args[-1], args[:-1]
        guard = _guard()
        with guard:
            output = run(*args, **keywords)
        _idle.append(guard)
        if differentiable is not None:
            ctx.mark_non_differentiable(*output[differentiable:])
        keep(ctx, args, keywords, output)
        return output

    def forward_given(ctx: Any, *args: Any) -> Any:
        """Another op has made the result."""
        output, keywords = args[-1]
        if differentiable is not None:
            ctx.mark_non_differentiable(*output[differentiable:])
        keep(ctx, args[:-1], keywords, output)
        return output

    def forward_first(ctx: Any, *args: Any) -> Any:
        """The first result alone: each one more costs the host a microsecond, forward and backward."""
        keywords, args = args[-1], args[:-1]
        guard = _guard()
        with guard:
            output = run(*args, **keywords)
        _idle.append(guard)
        keep(ctx, args, keywords, output)
        return output[0]

    def backward_of_all(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None and all(g is None for g in grads):
            return nones
        return padded(without_autocast(ctx, *grads) if is_any_autocast_enabled() else backward(ctx, *grads))

    def backward_of_one(ctx: Any, grad: Any) -> Any:
        """The same of a node with one result: to give arguments on in a tuple takes longer than the rest of this."""
        if grad is None:
            return nones
        grads = without_autocast(ctx, grad) if is_any_autocast_enabled() else backward(ctx, grad)
        return grads if len(grads) == len(nones) else padded(grads)

    def without_autocast(ctx: Any, *grads: Any) -> Any:
        """The forward has cast: what is computed again must not be cast otherwise."""
        device = next(g.device.type for g in grads if g is not None)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    def padded(grads: Any) -> Any:
        return (*grads, *nones[len(grads) :])

    def apply_of(forward: Callable[..., Any], call_backward: Callable[..., Any]) -> Callable[..., Any]:
        methods = {"forward": staticmethod(forward), "backward": staticmethod(call_backward)}
        node: Any = type(f"Kgopt_{name}", (torch_private.Function,), methods)
        # The engine's thread runs this, to which Python's objects are strange: without the steps of torch's own apply.
        torch_private.set_backward(node, call_backward)
        return node.apply  # type: ignore[no-any-return]

    backward_of_its = backward_of_one if len(schema_of(op).returns) == 1 else backward_of_all
    # Of the forwards, once they are needed: a class takes 0.1 ms of the import.
    applies: list[Any] = [None, None, None]
    single_level = torch_private.single_level

    def made(at: int) -> Any:
        applies[at] = apply_of((forward_below, forward_now, forward_given)[at], backward_of_its)
        return applies[at]

    def kernel(keyset: Any, *args: Any, **keywords: Any) -> Any:
        if _sharded is not None and _is_sharded(args):
            return _sharded[1](name, args, keywords)
        if (FORWARD_AD[LEVEL] >= 0 or _levels_are_hidden()) and has_tangent(args):
            return in_forward_mode(name, args, keywords)
        if is_grad_enabled() and any_requires_grad(*args):
            if not are_functorch_transforms_active():
                return (applies[0] or made(0))(*args, (keyset, keywords))
            if _LEVELS_NEED_FORMULAS or (_LOSES_TANGENTS and FORWARD_AD[LEVEL] >= 0):
                return by_formula(name, args, keywords, lambda a: isinstance(a, Tensor) and a.requires_grad)
            with single_level():
                return (applies[0] or made(0))(*args, (keyset, keywords))
        return redispatch(keyset & BELOW_AUTOGRAD, *args, **keywords)

    def record(args: Any, keywords: dict[str, Any]) -> Any:
        return (applies[1] or made(1))(*args, keywords)

    def record_given(output: Any, args: Any, keywords: dict[str, Any]) -> Any:
        return (applies[2] or made(2))(*args, (output, keywords))

    def record_by_place(*args: Any) -> Any:
        return (applies[1] or made(1))(*args, _NOTHING)

    _RECORDED[name], _GIVEN[name] = record_by_place, record_given
    _AT_AUTOGRAD[name] = record, below
    if differentiable == 1:
        _APPLY_FIRST[name] = apply_of(forward_first, backward_of_one)
    LIB.impl(name, torch_private.at_autograd(kernel), "Autograd", with_keyset=True)


_LEVELS_NEED_FORMULAS = not torch_private.RECORDS_LEVELS
_LOSES_TANGENTS = not torch_private.SWITCHES_TANGENTS  # of the levels below that of a node


def _levels_are_hidden() -> bool:
    """Whether there may be a level that Python does not count: a graph of Dynamo's enters them by C++ functions."""
    return is_compiling() or are_functorch_transforms_active()


def wants_gradient(ctx: Any, *positions: int) -> tuple[bool, ...]:
    """Which arguments need a gradient; those left at their default are not in needs_input_grad at all."""
    needs = ctx.needs_input_grad
    return tuple(i < len(needs) and needs[i] for i in positions)


def _second_derivative(name: str) -> None:
    """Autograd of a backward op: its kernel forward, backward the vector-Jacobian product of its formula."""

    def setup(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
        ctx.tensors = [i for i, a in enumerate(inputs) if isinstance(a, Tensor)]
        ctx.rest = [None if isinstance(a, Tensor) else a for a in inputs]
        ctx.keywords = keywords
        ctx.save_for_backward(*(inputs[i] for i in ctx.tensors))

    def backward(ctx: Any, *grads: Any) -> Any:
        args = list(ctx.rest)
        for i, t in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            args[i] = t
        wanted = [i for i in ctx.tensors if wants_gradient(ctx, i)[0]]
        return vector_jacobian(name, args, ctx.keywords, wanted, grads)

    _node(name, backward, setup, None)


def _public(of: Op, twin_name: str) -> None:
    """A public op's Autograd-key kernel: its _fwd twin where a gradient is needed, else its own kernel."""
    name, in_steps, everywhere = of.name, of.in_steps, of.in_steps_everywhere
    op, twin = overload(name), overload(twin_name)
    apply_twin = _APPLY_FIRST[twin_name]
    below = _below(packed(op))
    redispatch = _below(op.redispatch)

    def record(args: Any, kwargs: dict[str, Any]) -> Tensor:
        if in_steps is not None and (everywhere or args[0].is_cpu):
            positional, keywords = with_defaults(schema_of(op), args, kwargs)
            return in_steps(*positional, **keywords)
        if _exclude_above is None or are_functorch_transforms_active() or is_tracing():
            y: Tensor = twin(*args, **kwargs)[0]
        else:
            y = apply_twin(*args, kwargs)
        return y if y.dtype is args[0].dtype else y.to(args[0].dtype)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _sharded is not None and _is_sharded(args):
            return _sharded[1](name, args, kwargs)
        if (FORWARD_AD[LEVEL] >= 0 or _levels_are_hidden()) and has_tangent(args):
            return in_forward_mode(name, args, kwargs)
        if is_grad_enabled() and any_requires_grad(*args):
            return record(args, kwargs)
        return below(*args, **kwargs)

    def kernel_without_guards(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if (is_grad_enabled() and any_requires_grad(*args)) or (_sharded is not None and _is_sharded(args)):
            return kernel(*args, **kwargs)
        if (FORWARD_AD[LEVEL] >= 0 or _levels_are_hidden()) and has_tangent(args):
            return in_forward_mode(name, args, kwargs)
        return redispatch(keyset & BELOW_AUTOGRAD, *args, **kwargs)

    _AT_AUTOGRAD[name] = record, below
    if _exclude_above is None:
        LIB.impl(name, torch_private.at_autograd(kernel_without_guards), "Autograd", with_keyset=True)
    else:
        LIB.impl(name, kernel, "Autograd")


def install() -> None:
    """Registers every op's Autograd kernel; those of public ops need their twins' nodes."""
    for op in RECORDS.values():
        if op.backward is not None:
            _node(op.name, op.backward, op.setup, op.differentiable)
        elif op.twin is None:
            _second_derivative(op.name)
    for op in RECORDS.values():
        if op.twin is not None:
            _public(op, op.twin)
    for name in RECORDS:
        overload(name).below = without_grad(name)  # for code that compilers write: rewrite/inductor/lowering.py


def set_autocast(name: str, device: str, kernel: Callable[..., Any]) -> None:
    """From now on functions of the package call ``kernel`` where autocast is on."""
    _AT_AUTOCAST.setdefault(device, {})[name] = kernel


def node_of(name: str) -> Callable[..., Any]:
    """The op of tensors of which one needs a gradient, all arguments by their place, where nothing looks on.

    Autocast is as if it were off. The fewest steps that there are: for code that runs at each step of a training.
    """
    op = overload(name)
    if _exclude_above is None:
        return op  # type: ignore[no-any-return]
    return _RECORDED[name]


def given(name: str) -> Callable[..., Any]:
    """Records the op's node for a result that another op has made with its own: ``(result, args, keywords)``.

    So one launch can do what ops of several nodes do, and each node frees what it saved as soon as it has run. For
    callers who know that nothing looks on; the result's tensors must be new ones.
    """
    return _GIVEN[name]


def is_watched() -> bool:
    """Whether code that traces, transforms or compiles looks on, to which a node must be the op's own."""
    return _exclude_above is None or are_functorch_transforms_active() or is_tracing() or is_compiling()


def direct(name: str) -> Callable[..., Any]:
    """The op for callers in Python: spares the dispatcher's way to its Autograd kernel, half the time of a small call.

    For plain tensors, where no mode sees what stands above Autograd; autocast is as if it were off.
    """
    op = overload(name)
    if _exclude_above is None:
        return op  # type: ignore[no-any-return]
    record, below = _AT_AUTOGRAD[name]

    def call(*args: Any, **keywords: Any) -> Any:
        if are_functorch_transforms_active() or is_tracing() or (_sharded is not None and _is_sharded(args)):
            return op(*args, **keywords)
        if FORWARD_AD[LEVEL] >= 0 and has_tangent(args):
            return in_forward_mode(name, args, keywords)
        if is_grad_enabled() and any_requires_grad(*args):
            return record(args, keywords)
        return below(*args, **keywords)

    return call


def without_grad(name: str) -> Callable[..., Any]:
    """As :func:`direct` for callers who know that gradients are off and that nothing looks on."""
    return overload(name) if _exclude_above is None else _AT_AUTOGRAD[name][1]  # type: ignore[no-any-return]


def recorded(name: str) -> Callable[..., Any]:
    """As :func:`direct` for callers who know that a public op needs a gradient and that nothing looks on."""
    op, twin = overload(name), RECORDS[name].twin
    if _exclude_above is None or twin is None:
        return op  # type: ignore[no-any-return]
    apply = _APPLY_FIRST[twin]

    def call(x: Tensor, *args: Any) -> Tensor:
        y: Tensor = apply(x, *args, {})
        return y if y.dtype is x.dtype else y.to(x.dtype)

    return call


def from_python(name: str) -> Callable[..., Any]:
    """The op as functions of the package call it: past the dispatcher where only autograd and autocast look on."""
    op = overload(name)
    if _exclude_above is None:
        return op  # type: ignore[no-any-return]
    record, below = _AT_AUTOGRAD[name]
    at_autocast = {device: kernels[name] for device, kernels in _AT_AUTOCAST.items() if name in kernels}

    def call(*args: Any, **keywords: Any) -> Any:
        if (
            is_compiling()
            or len_torch_function_stack()
            or len_torch_dispatch_stack()
            or are_functorch_transforms_active()
            or is_tracing()
            or type(args[0]) not in PLAIN
        ):
            return op(*args, **keywords)
        for a in args:
            if type(a) not in _USUAL and isinstance(a, Tensor):
                return op(*args, **keywords)
        if is_any_autocast_enabled():
            device = args[0].device.type
            if device in at_autocast and is_autocast_enabled(device):
                return at_autocast[device](*args, **keywords)
        if FORWARD_AD[LEVEL] >= 0 and has_tangent(args):
            return in_forward_mode(name, args, keywords)
        if is_grad_enabled() and any_requires_grad(*args):
            return record(args, keywords)
        return below(*args, **keywords)

    return call
