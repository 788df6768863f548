"""Which norm a value is: over channels, or in groups of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kgopt.rewrite.chains.chain import WRITTEN
from kgopt.rewrite.formulas.values import Atom, Term, U, UnknownFormulaError, Value, X


@dataclass(frozen=True)
class Formula:
    """A norm: ``norm(x) * factor * weight + bias_factor * bias``, in the terms of the op."""

    kind: str
    eps: float
    factor: float  # beside the op's own norm
    weight: str  # a parameter's name; "": none
    bias: str
    bias_factor: float
    axis: int  # the dim of the channels
    dtype: torch.dtype  # of the result
    lies: tuple[int, ...] | None  # the order of dims in which the result is contiguous; None: as x lies
    groups: int = 0  # of channels; -1: as many as channels; 0: it is a norm over channels

    @property
    def norm(self) -> str:
        """As in :class:`~kgopt.rewrite.chains.chain.Chain`."""
        return WRITTEN if self.groups else self.kind


_NORMS: dict[tuple[Atom, str, Atom], tuple[str, float]] = {
    (X, "floored", X): ("rms", -0.5),
    (X, "square", X): ("rms", -0.5),
    (X, "longest", X): ("l2", -1.0),
    (U, "floored", U): ("layer", -0.5),
    (U, "square", U): ("layer", -0.5),
}


def recognize(value: Any) -> Formula:
    """The norm that a value is.

    Raises:
        UnknownFormulaError: it is none.
    """
    if not isinstance(value, Value) or value.order is None or value.is_reduced:
        raise UnknownFormulaError("its result is no tensor of the input's size")
    if value.order != value.whole:
        raise UnknownFormulaError("its result has its dims in another order")
    main = [t for t in value.terms if any(atom[0] != "parameter" for atom, _ in t.powers)]
    rest = [t for t in value.terms if t not in main]
    if len(main) != 1 or len(rest) > 1:
        raise UnknownFormulaError("it is no product of the input and its scale")
    weight, others = _parameter_of(main[0])
    bias, left = _parameter_of(rest[0]) if rest else ("", [])
    if left or (rest and not bias):
        raise UnknownFormulaError("it adds something else than a parameter")
    base = [(a, p) for a, p in others if a in (X, U)]
    scale = [(a, p) for a, p in others if a not in (X, U)]
    if len(base) != 1 or base[0][1] != 1.0 or len(scale) != 1 or len(scale[0][0]) < 2:
        raise UnknownFormulaError("it is no product of the input and its scale")
    atom, p = scale[0]
    found = _NORMS.get((base[0][0], atom[0], atom[1]))
    if found is None or found[1] != p:
        raise UnknownFormulaError("it is no product of the input and its scale")
    if value.sizes and found[0] != "layer":
        raise UnknownFormulaError("it divides by a length over positions")
    kind, eps = found[0], float(atom[2]) if len(atom) > 2 else 0.0
    factor = main[0].factor * (1.0 if kind != "l2" else value.channels**-0.5)
    assert value.dtype is not None
    return Formula(
        kind,
        eps,
        1.0 if abs(factor - 1.0) < 1e-13 else factor,
        weight,
        bias,
        rest[0].factor if rest else 1.0,
        1 if value.sizes else value.axis[0],
        value.dtype,
        None if value.lies is None else tuple(range(value.rank)) if value.sizes else tuple(d for (d,) in value.lies),
        0 if not value.sizes else -1 if value.sizes[2] == 1 else value.sizes[1],
    )


def _parameter_of(term: Term) -> tuple[str, list[tuple[Atom, float]]]:
    own = [(a, p) for a, p in term.powers if a[0] == "parameter"]
    if len(own) > 1 or any(p != 1.0 for _, p in own):
        raise UnknownFormulaError("it has several parameters in one product")
    return (own[0][0][1] if own else ""), [(a, p) for a, p in term.powers if a[0] != "parameter"]
