"""What a worker is doing, in memory that its parent reads after the worker has died."""

from __future__ import annotations

from typing import Any

__all__ = ["attach", "note"]

LENGTH = 160
_board: Any = None


def attach(board: Any) -> None:
    """Notes go to ``board``, a shared array of ``LENGTH`` bytes."""
    global _board
    _board = board


def note(text: str) -> None:
    """Says what comes next, for example ``"kgopt, backward"``. Outside of a worker it does nothing."""
    if _board is not None:
        _board.value = text.encode(errors="replace")[: LENGTH - 1]
