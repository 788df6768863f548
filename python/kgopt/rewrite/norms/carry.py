"""Moments that a convolution's kernel keeps of what it stores, carried to the norm behind it, in inference.

Who follows whom is seen while the model runs: a convolution leaves what it made here, and a norm that finds its input
among it says so. From then on the convolution computes the moments too, and the norm reads its input once. They hold
only for the very tensor that the convolution returned, at the version that it had: whatever else reaches the norm, or
was changed in place since, is normalized with statistics of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from kgopt.torch_private import current_stream, version_of

SMALL = 2**25  # bytes of a tensor, below which its second read comes from L2 and one launch more costs as much
KEPT = 4  # results that are remembered; a norm comes soon after its convolution


@dataclass
class Carrier:
    """What a convolution module knows of the norms behind it."""

    wanted: bool = False  # a norm took its result
    on: bool = False  # moments are computed


@dataclass
class _Made:
    """A convolution's result."""

    tensor: weakref.ref[Tensor]
    version: int
    stream: int  # on which it was made; on another one the allocator would not know that the moments are read
    carrier: Carrier
    moments: Tensor | None


class _Recent(threading.local):
    def __init__(self) -> None:
        self.made: deque[_Made] = deque(maxlen=KEPT)


_recent = _Recent()


def is_worth(y_bytes: int) -> bool:
    """Whether moments of a tensor of that size can pay."""
    return y_bytes >= SMALL


def leave(y: Tensor, carrier: Carrier, moments: Tensor | None) -> None:
    """By a convolution: y is its result."""
    if y.is_inference():  # it does not say when it changes
        return
    version = version_of(y)
    if version is not None:
        _recent.made.append(_Made(weakref.ref(y), version, _stream_of(y), carrier, moments))


def take(x: Tensor) -> Tensor | None:
    """By a norm: the moments of its input; None where nobody kept them."""
    for made in _recent.made:
        if made.tensor() is x:
            if version_of(x) != made.version or _stream_of(x) != made.stream:
                return None
            made.carrier.wanted = True
            return made.moments
    return None


def _stream_of(x: Tensor) -> int:
    return current_stream(x.get_device()) if x.is_cuda else 0


def is_empty() -> bool:
    """Nothing was left; asked first, for it is the usual case."""
    return not _recent.made
