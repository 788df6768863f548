"""What the search asks of a kind of case: to draw one, to check it, to make it smaller, to print it as Python."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

__all__ = ["Case", "Kind"]

# A dict of JSON values. Everything follows from it: it holds its own seed for data, and names no device.
Case = dict[str, Any]


class Kind(Protocol):
    """A family of cases. One instance serves a whole worker process, so it may keep what is dear to build.

    The search draws case ``i`` with ``random.Random(f"{seed}:{name}:{i}")``, in whatever process: ``draw`` must depend
    on ``rng``, ``device`` and ``only`` alone.
    """

    name: str
    """The name in ``--kind``, also the key ``"kind"`` that the search adds to each case."""

    seconds: float
    """How long the slowest case may take, on an idle machine, before it counts as a hang."""

    def names(self) -> Sequence[str]:
        """What ``--op`` may name."""
        ...

    def draw(self, rng: random.Random, device: str, only: Sequence[str] = ()) -> Case:
        """A case for a device of type ``"cpu"`` or ``"cuda"``; ``only``: one of these names of :meth:`names`."""
        ...

    def check(self, case: Case, device: str) -> str | None:
        """Runs the case on ``device``: None where it passed, else what is wrong, in one line or a few.

        ``torch.OutOfMemoryError`` may leave it: the case is counted apart. Any other exception is a finding.
        State that it sets (TF32, autocast, threads) it sets back.
        """
        ...

    def smaller(self, case: Case) -> Iterator[Case]:
        """Simpler candidates, the most drastic first. None may be equal to ``case``, and chains of them must end."""
        ...

    def source(self, case: Case, device: str) -> str:
        """A Python program that shows what ``case`` does, with no import but torch's and kgopt's public names."""
        ...

    def labels(self, case: Case) -> dict[str, str]:
        """``{"op": ..., "dtype": ...}``, the row and the column in which the case is counted."""
        ...
