"""What an optimized network did, against what the network did: how far apart they may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.fuzz import stage
from kgopt.fuzz.judge import Judged, same_bits, verdict
from kgopt.fuzz.recording import DTYPES, Seen, unchanged

__all__ = ["Comparison", "DifferenceError", "error_text"]

Json = dict[str, Any]

EXACT = 1e-9  # of float64 values, relative to the largest one
NOISES = 3  # runs of the original with rounding noise, where that is asked for
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class DifferenceError(Exception):
    """The optimized network does something else; the text says what."""


def error_text(error: Exception) -> str:
    """One line: its class and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"


def _tensor_of(name: str) -> Callable[[Seen], Tensor]:
    return lambda seen: seen.tensors[name]


def _seen_by_hook(hook: int, value: int) -> Callable[[Seen], Tensor]:
    return lambda seen: seen.hooks[hook][1][value][1]


class Comparison:
    """Of an optimized network's calls with the original's."""

    def __init__(self, case: Json, device: str, original: nn.Module) -> None:
        self.case, self.device, self.original = case, device, original
        self.dtype = DTYPES[case["dtype"]]
        self.precision = "bfloat16" if case["how"] == "autocast" else case["dtype"]
        tf32 = case["tf32"] and device != "cpu" and case["dtype"] == "float32"
        self.eps = _EPS["tf32" if tf32 and self.precision == "float32" else self.precision]
        # A gradient that is zero but for rounding, a sum of a hundred terms perhaps, is held to the rounding of this
        # share of the largest one.
        self.share = 1e-3 if self.precision == "float64" else 10.0
        self._exact: list[Seen] | None = None
        self._noisy: list[list[Seen]] | None = None

    def reference(self) -> list[Seen]:
        """The original in float64."""
        if self._exact is None:
            stage.note("the original in float64")
            self._exact = unchanged(self.case, self.original, self.device, torch.float64).all()
        return self._exact

    def noisy(self) -> list[list[Seen]]:
        """The original with the rounding noise of the precision: in float64, and in its own dtype, whose gradients
        round within modules, too.
        """
        if self._noisy is None:
            stage.note("the original with rounding noise")
            dtypes = [torch.float64, self.dtype] if self.dtype is not torch.float64 else [torch.float64]
            noises = [(self.eps, seed) for seed in range(NOISES)]
            self._noisy = [
                unchanged(self.case, self.original, self.device, dtype, noise).all()
                for dtype in dtypes
                for noise in noises
            ]
        return self._noisy

    def compare(self, index: int, ours: Seen, theirs: Seen) -> None:
        """One call.

        Raises:
            DifferenceError: it differs.
        """
        where = f"call {index}"
        if theirs.error is not None:
            return  # what the original cannot do need not be possible
        if ours.error is not None:
            error = ours.error
            raise DifferenceError(f"{where} raises where the original runs: {error_text(error)}") from error
        if list(ours.tensors) != list(theirs.tensors):
            other = sorted(set(ours.tensors) ^ set(theirs.tensors)) or "order"
            raise DifferenceError(f"{where} has other tensors: {other}")
        names = [name for name, _ in ours.hooks]
        if names != [name for name, _ in theirs.hooks]:
            raise DifferenceError(f"other hooks ran: {names}, the original's {[n for n, _ in theirs.hooks]} in {where}")
        if not torch.equal(ours.random, theirs.random):  # type: ignore[arg-type]
            raise DifferenceError(f"other random numbers were drawn: {where}")
        gradients = [t for k, t in theirs.tensors.items() if k == "dx" or k.startswith("gradient")]
        # Of the finite ones: a NaN would allow nothing, an infinity everything.
        largest = max((float(t.nan_to_num(0, 0, 0).abs().max()) for t in gradients if t.numel()), default=0.0)
        for name, t in theirs.tensors.items():
            # The gradients that come in are of size 1: what cancels leaves their rounding (a bias ahead of a norm).
            floor = max(self.share * largest, 0.1) if name == "dx" or name.startswith("gradient") else 0.0
            if name.startswith("buffer"):  # a mean of values of either sign
                floor = 0.1
            self._tensor(name, index, ours.tensors[name], t, floor, _tensor_of(name))
        for i, (hook, values) in enumerate(theirs.hooks):
            if len(values) != len(ours.hooks[i][1]):
                raise DifferenceError(f"a hook saw other values: {hook} in {where}")
            for j, (name, t) in enumerate(values):
                floor = self.share * largest
                self._tensor(f"{hook}{name}", index, ours.hooks[i][1][j][1], t, floor, _seen_by_hook(i, j))

    def _tensor(
        self, name: str, index: int, ours: Tensor, theirs: Tensor, floor: float, of: Callable[[Seen], Tensor]
    ) -> None:
        where = f"call {index}"
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise DifferenceError(
                f"{name} has another shape or dtype in {where}: {list(ours.shape)} {ours.dtype}, the original "
                f"{list(theirs.shape)} {theirs.dtype}"
            )
        if same_bits(ours, theirs):
            return
        if not theirs.is_floating_point():
            raise DifferenceError(f"{name} differs in {where}")
        if self.precision == "float64":
            # What is zero but for rounding, as the gradient of a bias in front of a norm, is held to `floor`.
            scale = max(float(theirs.nan_to_num(0, 0, 0).abs().max()), floor)
            apart = (ours - theirs).abs()
            if not torch.equal(ours.isnan(), theirs.isnan()):
                raise DifferenceError(f"{name} has NaN in other places in {where}")
            if float(apart.nan_to_num(0, 0, 0).max()) <= EXACT * scale:
                return
        reference = self.reference()[index]
        if reference.error is not None:
            # Autocast's copies may be what an in-place function needs, which the float64 network does not have.
            return
        exact = of(reference).to(ours.device)
        if exact.shape != ours.shape:
            raise DifferenceError(f"{name} in {where}: the float64 network gives {list(exact.shape)}")
        samples = [of(run[index]).double() for run in self.noisy() if run[index].error is None]
        # Rounding decides on which side of a kink a value lies; the noise shows how much hangs on it.
        judged = Judged(name, ours, theirs, exact, self.precision, floor * self.eps)
        wrong = verdict(judged, lambda: samples)
        if wrong is not None and not self._within_noise(ours, theirs, exact, samples, floor):
            raise DifferenceError(f"{wrong}; {where}")

    def _within_noise(self, ours: Tensor, theirs: Tensor, exact: Tensor, samples: list[Tensor], floor: float) -> bool:
        """Whole networks amplify: no further away than a few times what noise does to the original."""

        def away(t: Tensor) -> float:
            return float((t.double() - exact).nan_to_num(0, 0, 0).norm())

        if not torch.equal(ours.isnan(), theirs.isnan()):
            return False
        yardstick = max([away(theirs), *map(away, samples), floor * self.eps * exact.numel() ** 0.5])
        return away(ours) <= 4 * yardstick
