"""What a target of the search is, and the words of which the text of calls is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kgopt.fuzz.draw import Args, Draw, Tensors
from kgopt.fuzz.kind import Case

__all__ = [
    "AFFINE",
    "GN",
    "REF",
    "Args",
    "Target",
    "Tensors",
    "called_with",
    "geometry_text",
    "home_of",
    "keyword_text",
    "name_of",
    "of_op",
    "vjp_text",
    "with_dy",
]


@dataclasses.dataclass(frozen=True)
class Target:
    """One op and all that calls it."""

    name: str
    weight: float  # how often it is drawn, beside the others
    draw: Callable[[Draw], tuple[Tensors, Args]]
    ours: Callable[[Case], str]  # an expression
    theirs: Callable[[Case], str]
    vias: tuple[str, ...] = ("functional", "op")
    before: Callable[[Case], list[str]] = lambda case: []  # lines that make what both are given
    differentiable: int = 1  # results that have gradients, the first ones
    grads: tuple[str, ...] = ("x", "weight", "bias")  # tensors that may need a gradient
    autocast: bool = False
    products: bool = False  # has a convolution: TF32 counts, and cuDNN's own order of sums
    wide: tuple[str, ...] = ()  # tensors that may be float32 beside halves
    statistics: bool = False  # the first result, too, has the dtype of statistics
    border: bool = False  # PyTorch multiplies what it does not need by zero, which makes NaN of NaN and Inf


def name_of(case: Case, name: str) -> str:
    """The tensor's name where the call has it, else None: an argument."""
    return name if name in case["tensors"] else "None"


def keyword_text(args: Args, names: Sequence[str]) -> str:
    """``, name=value`` for each of these arguments that the call has."""
    return "".join(f", {n}={args[n]!r}" for n in names if n in args)


def called_with(module: str, case: Case, names: dict[str, str], bias: str, arguments: str) -> str:
    """The call of a module with tensors as its parameters, by name; ``bias``: the name of the convolution's."""
    if "bias" in case["tensors"]:
        names[bias] = "bias"
    given = ", ".join(f'"{k}": {v}' for k, v in names.items())
    return f"torch.func.functional_call({module}, {{{given}}}, ({arguments}))"


def home_of(case: Case) -> str:
    """Where the function of an op is called."""
    return "kgopt.functional" if case["via"] == "functional" else "torch.ops.kgopt"


REF = "kgopt.reference"
GN = ("gn_weight", "gn_bias")
AFFINE = ("weight", "bias")


def of_op(
    name: str,
    weight: float,
    draw: Callable[[Draw], tuple[Tensors, Args]],
    arguments: Callable[[Case], str],
    theirs: Callable[[Case], str],
    results: Sequence[str] = (),
    **more: Any,
) -> Target:
    """A target that is called as an op alone; ``results``: the tensors whose gradients it gives, as far as they are."""

    def ours(case: Case) -> str:
        call = f"torch.ops.kgopt.{name}({arguments(case)})"
        given = [n in case["tensors"] for n in results]
        return call if all(given) else f"[g for g, m in zip({call}, {given!r}) if m]"

    return Target(name, weight, draw, ours, theirs, ("op",), **more)


def vjp_text(case: Case, call: str, names: Sequence[str], dy: str = "dy") -> str:
    """The gradients of those of these tensors that the case has."""
    given = ", ".join(f"{n}={n}" for n in names if n in case["tensors"])
    return f"vjp(lambda {given}: {call}, dict({given}), {dy})"


def with_dy(draw: Callable[[Draw], tuple[Tensors, Args]]) -> Callable[[Draw], tuple[Tensors, Args]]:
    """The same with a gradient of x's size."""

    def drawn(d: Draw) -> tuple[Tensors, Args]:
        tensors, args = draw(d)
        tensors["dy"] = d.tensor(tensors["x"]["shape"])
        return tensors, args

    return drawn


def geometry_text(case: Case) -> str:
    """stride to transposed, as conv_add takes them."""
    args = case["args"]
    zeros = [0] * len(args["stride"])
    return ", ".join(
        repr(v)
        for v in (
            args["stride"],
            args["padding"],
            args["dilation"],
            args.get("output_padding", zeros),
            args["groups"],
            args.get("transposed", False),
        )
    )
