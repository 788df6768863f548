"""The kind of case that is a whole network: see :mod:`kgopt.fuzz.grammar`, ``writer`` and ``trial``."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from kgopt.fuzz import grammar, trial
from kgopt.fuzz.kind import Case
from kgopt.fuzz.program import write_program

__all__ = ["NetworksKind"]

_NAMES = {f"network_{how}": how for how in grammar.HOWS}


class NetworksKind:
    """Drawn networks through ``optimize``, ``restore`` and ``torch.compile``, against the networks as they were."""

    name = "networks"
    seconds = 180.0  # torch.compile of a large one on a GPU

    def names(self) -> Sequence[str]:
        """Networks by what is done with them."""
        return tuple(_NAMES)

    def draw(self, rng: random.Random, device: str, only: Sequence[str] = ()) -> Case:
        """A network; the same for the same state of ``rng``."""
        hows = tuple(how for name, how in _NAMES.items() if not only or name in only)
        case = grammar.draw_network(rng, device, hows)
        if device != "cpu" and case["dtype"] == "float64" and "hardswish" in repr(case["body"]):
            case["dtype"] = "float32"  # PyTorch's hardswish multiplies by float32's 1/6 on a GPU
        return case

    def check(self, case: Case, device: str) -> str | None:
        """None where the optimized network does what the network does."""
        return trial.check_network(case, device)

    def smaller(self, case: Case) -> Iterator[Case]:
        """Networks with a part less, or with one plain value more."""
        return grammar.simpler(case)

    def source(self, case: Case, device: str) -> str:
        """The network, what is done with it, and how far the results are apart."""
        return write_program(case, device)

    def labels(self, case: Case) -> dict[str, str]:
        """How the network is run, and its precision."""
        dtype = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[case["dtype"]]
        if case["how"] == "autocast":
            dtype = "autocast"
        elif dtype == "fp32" and case["tf32"]:
            dtype = "tf32"
        return {"op": f"network_{case['how']}", "dtype": dtype}
