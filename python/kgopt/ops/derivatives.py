"""Derivatives that no kernel gives: an op's formula, in differentiable PyTorch functions.

A formula takes the op's arguments, all of them, and returns what the op returns. Forward mode runs it on dual numbers;
the second derivative is the vector-Jacobian product of a backward op's formula. Speed does not matter here. Inside,
half types are float32, as in the kernels.

A formula must not use torch.func: it runs inside the dispatcher, where no further transform can begin. That is why the
derivatives of activations are written out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kgopt import torch_private
from kgopt.ops.registry import RECORDS, overload, with_defaults
from kgopt.torch_private import are_functorch_transforms_active, schema_of


def formula(name: str, args: Sequence[Any], keywords: dict[str, Any], varies: Callable[[int], bool]) -> Any:
    """The op by its formula, with every argument given. ``varies(i)``: argument i is differentiated.

    The backward of a norm is given statistics that the forward computed from x. Where these vary themselves, they are
    arguments like any other. Where they do not, as a node saved them, they count as what they are, functions of x: as
    constants they would leave a part of the derivative out.
    """
    op = RECORDS[name]
    if op.statistics is not None:
        positions, replace = op.statistics
        if not any(map(varies, positions)):
            args = list(args)
            replace(args)
    return op.formula(*args, **keywords)


def has_tangent(args: Sequence[Any]) -> bool:
    """At a level of forward mode: whether any argument is differentiated there."""
    return any(map(_tangent, args))


def _tangent(a: Any) -> bool:
    return isinstance(a, Tensor) and a.is_floating_point() and forward_ad.unpack_dual(a, level=0).tangent is not None


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """The dtypes of an op's arguments are settled before its formula runs."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def by_formula(name: str, args: Sequence[Any], keywords: dict[str, Any], varies: Callable[[Any], bool]) -> Any:
    """The op of arguments of which those that ``varies`` says are differentiated."""
    positional, keywords = with_defaults(schema_of(overload(name)), args, keywords)
    with without_autocast():
        return formula(name, positional, keywords, lambda i: varies(positional[i]))


def in_forward_mode(name: str, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """The op of dual numbers. A tangent that a kernel dropped would be a derivative of zero."""
    return by_formula(name, args, keywords, _tangent)


def vector_jacobian(
    name: str, args: list[Any], keywords: dict[str, Any], wanted: Sequence[int], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of the arguments ``wanted``, None for all others, from those of the op's results; by its formula.

    They can be differentiated again where grad mode is on.
    """

    def run(*tensors: Tensor) -> list[Tensor]:
        given = list(args)
        for i, t in zip(wanted, tensors, strict=True):
            given[i] = t
        results = formula(name, given, keywords, lambda i: i in wanted)
        results = (results,) if isinstance(results, Tensor) else results
        return [r for r, g in zip(results, grads, strict=True) if g is not None]

    cotangents = [g for g in grads if g is not None]
    tensors = [args[i] for i in wanted]
    with without_autocast():
        if are_functorch_transforms_active():
            found = torch.func.vjp(run, *tensors)[1](cotangents)
        else:
            found = _pull(run, tensors, cotangents)
    gradients: list[Tensor | None] = [None] * len(args)
    for i, gradient in zip(wanted, found, strict=True):
        gradients[i] = gradient
    return gradients


def _pull(
    run: Callable[..., list[Tensor]], tensors: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> Sequence[Tensor]:
    """torch.func.vjp, that hooks on saved tensors may stand around."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: one argument may be computed from another, and the way between them is not this op's. Those that do
        # not require a gradient are what torch.func.vjp left behind.
        aliases = [t.view_as(t) for t in tensors]
        aliases = [a if a.requires_grad else a.detach().requires_grad_() for a in aliases]
        pairs = [(y, g) for y, g in zip(run(*aliases), cotangents, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(t) for t in tensors]
    results, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(results, aliases, grads, create_graph=again, allow_unused=True, materialize_grads=True)


# ----------------------------------------------------------------------------------------------------------------------
# Formulas that call the op itself, for ops that are linear in each tensor

# The ops in their own formulas would be asked for these again.
BY_PYTORCH = not (torch_private.SWITCHES_TANGENTS and torch_private.RECORDS_LEVELS)


def duals(*tensors: Tensor | None) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Primals and tangents."""
    pairs = [(None, None) if t is None else tuple(forward_ad.unpack_dual(t, level=0)) for t in tensors]
    return [p for p, _ in pairs], [t for _, t in pairs]


def op_of_primals(op: Any, tensors: Sequence[Tensor | None], *args: Any, **options: Any) -> Any:
    """The op as if its tensors had no tangents.

    A node that is recorded on the way saves the dual numbers all the same, for forward mode over reverse. Under
    torch.func the two are levels of their own, and the other levels of forward mode must stay on.
    """
    if are_functorch_transforms_active():
        return op(*duals(*tensors)[0], *args, **options)
    with torch_private.pass_tangents(False):
        return op(*tensors, *args, **options)


def with_tangent(primal: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The dual number whose tangent is the sum of parts; the primal, where there are none."""
    if not parts:
        return primal
    return forward_ad.make_dual(primal, sum(parts[1:], parts[0]).to(primal.dtype), level=0)
