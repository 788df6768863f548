"""All targets of the search, by the op's name."""

from __future__ import annotations

from kgopt.fuzz.targets import between, chains, convolutions, norms, pointwise

__all__ = ["TARGETS"]

TARGETS = {t.name: t for m in (convolutions, norms, pointwise, between, chains) for t in m.TARGETS}
