"""How far results and gradients of a case are from float64, and whether that is too far."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kgopt.accuracy import no_autotuning, round_tf32
from kgopt.cli.cases import Case, Slice
from kgopt.cli.measure import ErrorMeter, note_error_ratio, rounded_convolutions
from kgopt.cli.results import Row

__all__ = ["IDEAL", "eager_of", "judge", "result_errors"]

# Stands among the implementations for a convolution whose operands are rounded to TF32 and which is exact otherwise.
IDEAL = "ideal_tf32"


def _gradients(module: nn.Module, part: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = part.clone().requires_grad_()
    return torch.autograd.grad(module(part), [part, *module.parameters()], dy)


class _Comparison:
    """Of all implementations with float64 at one input set, piece by piece."""

    def __init__(self, members: list[str], parameters: dict[str, nn.Parameter], ideal: bool) -> None:
        self.meters: dict[str, dict[str, ErrorMeter]] = {name: {} for name in members}
        self.parameters = parameters
        self.ideal = ideal
        # Gradients of parameters, over all pieces: exact, and those of the ideal.
        self.sums: dict[str, dict[str, torch.Tensor]] = {"": {}, IDEAL: {}}

    def compare(self, name: str, key: str, value: torch.Tensor, wanted: torch.Tensor) -> None:
        self.meters[name].setdefault(key, ErrorMeter()).add(value, wanted)

    def forward(self, piece: Slice, part: torch.Tensor, outputs: dict[str, Any]) -> None:
        """Results of one piece."""
        with torch.no_grad():
            wanted = piece.module(part)
            if self.ideal:
                self.compare(IDEAL, "y", rounded_convolutions(piece.module)(round_tf32(part)), wanted)
        for name, out in outputs.items():
            self.compare(name, "y", out[0][piece.y_index], wanted)

    def backward(self, piece: Slice, part: torch.Tensor, outputs: dict[str, Any], dy: torch.Tensor) -> None:
        """Gradients of x of one piece; those of parameters are added up."""
        exact = {"": _gradients(piece.module, part, dy)}
        if self.ideal:
            exact[IDEAL] = _gradients(rounded_convolutions(piece.module), round_tf32(part), dy)
            self.compare(IDEAL, "dx", exact[IDEAL][0], exact[""][0])
        for name, out in outputs.items():
            self.compare(name, "dx", out[0][piece.x_index], exact[""][0])
        local_names = [name for name, _ in piece.module.named_parameters()]
        for kind, grads in exact.items():
            by_name = dict(zip(local_names, grads[1:], strict=True))
            for whole, (local, place) in (piece.params or {}).items():
                zeros = torch.zeros(self.parameters[whole].shape, dtype=torch.float64, device=part.device)
                self.sums[kind].setdefault(whole, zeros)[place] += by_name[local]

    def of_parameters(self, outputs: dict[str, Any]) -> None:
        """Gradients of parameters, once every piece was there."""
        for position, parameter in enumerate(self.parameters):
            if parameter not in self.sums[""]:
                continue
            for name, out in outputs.items():
                self.compare(name, parameter, out[1 + position], self.sums[""][parameter])
            if self.ideal:
                self.compare(IDEAL, parameter, self.sums[IDEAL][parameter], self.sums[""][parameter])


def result_errors(
    case: Case, plain: nn.Module, runners: dict[str, Any], inputs: list[torch.Tensor], direction: str, ideal: bool
) -> dict[str, dict[str, float]]:
    """implementation -> error and error_max, of the worst input set and the worst tensor; `ideal` adds IDEAL's."""
    members = [*runners, *([IDEAL] if ideal else [])]
    worst: dict[str, dict[str, float]] = {name: {} for name in members}

    def note(name: str, key: str, value: float) -> None:
        before = worst[name].get(key, 0.0)
        worst[name][key] = value if value != value else max(before, value)  # NaN stays visible

    for index, x in enumerate(inputs):
        outputs = {name: runner.run(index) for name, runner in runners.items()}
        found = _Comparison(members, dict(plain.named_parameters()), ideal)
        for piece in case.slices(plain, x):
            part = x[piece.x_index].double()
            with no_autotuning():
                if direction == "forward":
                    found.forward(piece, part, outputs)
                    continue
                dy = next(iter(runners.values())).gradients[index][piece.y_index].double()
                found.backward(piece, part, outputs, dy)
        found.of_parameters(outputs)
        for name in members:
            for meter in found.meters[name].values():
                note(name, "error", meter.error)
                note(name, "error_max", meter.error_max)
    return worst


def eager_of(row: Row) -> str:
    """The eager implementation of the same layout."""
    return "eager_channels_last" if row["layout"] == "channels_last" else "eager"


def judge(rows: dict[str, Row], dtype: torch.dtype, kink: float) -> None:
    """Adds error_ratio, to the error of eager in the same layout, and out_of_tolerance where it is too large.

    kink: the error that is allowed in any case.

    Under TF32 the yardstick is the larger of eager's error and that of an ideal TF32 convolution: PyTorch takes TF32
    for some convolutions and not for others under the same flag.
    """
    for row in rows.values():
        bar = rows.get(eager_of(row), {}).get("error", rows["eager"].get("error"))
        if bar is not None:
            note_error_ratio(row, bar, max(kink, row.get("error_ideal_tf32", 0.0)), dtype)
