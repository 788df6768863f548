"""What a call does beside its result: what a replay would leave out, or repeat wrongly."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite.cuda_graphs import machine
from kgopt.rewrite.optimized.transaction import snapshot
from kgopt.torch_private import dispatch_mode, tree_leaves


def random_states(device: torch.device) -> Any:
    """Of all generators that a call may draw from, as values that can be compared."""
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state()[1:3] if numpy is not None else ()
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return [bytes(s.numpy().tobytes()) for s in states], random.getstate(), [str(part) for part in drawn]


@contextlib.contextmanager
def undone(root: nn.Module, given: Any = None) -> Iterator[None]:
    """Afterwards the calls of a model have changed neither its buffers, nor what it was given, nor a random state."""
    put_back, drawn = snapshot(root, given), random.getstate()
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.random.set_state(state)
        put_back()


@contextlib.contextmanager
def no_casts_kept() -> Iterator[None]:
    """Autocast keeps casts of the weights for a while; in a recording they would not follow the weights."""
    if not torch.is_autocast_enabled("cuda"):
        yield
        return
    with torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False):
        yield


class Looking:
    """Sees every op of a call.

    ``why``: one that a replay would not repeat; ``is_harmless``: whatever values it gets, no op stops the device, reads
    where values say, or waits for other processes.
    """

    def __init__(self) -> None:
        self.why = ""
        self.is_harmless = True

    def mode(self) -> Any:
        """A dispatch mode."""
        looking = self

        class Mode(dispatch_mode):  # type: ignore[misc, valid-type]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                looking.why = looking.why or looking.reason(func, args, kwargs, result)
                looking.is_harmless = looking.is_harmless and _is_harmless(func, args, kwargs)
                return result

        return Mode()

    def reason(self, func: Any, args: Any, kwargs: Any, result: Any) -> str:
        """Why an op cannot be replayed."""
        taken = [t for t in tree_leaves([list(args), dict(kwargs or {})]) if isinstance(t, Tensor)]
        given = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        is_here = machine.MACHINE.takes
        here = any(map(is_here, taken))
        tags = getattr(func, "tags", ())
        if torch.Tag.data_dependent_output in tags and here:
            return f"it reads values of the GPU: {func}"
        if torch.Tag.dynamic_output_shape in tags and here and _is_masked(func, args):
            return f"the shape of a result hangs on values: {func}"
        # A tensor of the CPU with one element is an argument of a kernel, and so a constant.
        there = [t for t in taken if not is_here(t) and (t.dim() or "copy" in str(func))]
        if str(func).startswith(_ATTENTION):  # without dropout nobody reads the random state that it gives on the CPU
            given = [t for t in given if is_here(t)]
        if (here and not all(map(is_here, given))) or (there and any(map(is_here, given))):
            return f"it copies between the CPU and the GPU: {func}"
        return ""


def _is_harmless(func: Any, args: Any, kwargs: Any) -> bool:
    """An op of ours or of PyTorch without integers: they may be places in a table that is shorter by now."""
    if getattr(func, "namespace", "") not in _KNOWN or str(func).startswith(_CHECKS):
        return False
    if torch.Tag.pointwise in func.tags or str(func).startswith(_KEEPS):
        return True
    return not any(isinstance(t, Tensor) and is_integer(t) for t in tree_leaves([list(args), dict(kwargs or {})]))


def is_integer(t: Tensor) -> bool:
    """Whether its values may be places."""
    return not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)


_KNOWN = ("aten", "prim", "kgopt")
_CHECKS = ("aten._assert", "aten.masked_scatter", "aten.binary_cross_entropy", "aten.fractional_max_pool")
_KEEPS = (  # of integers other numbers or strides, whatever they are
    *("aten._to_copy.", "aten.view.", "aten.unsqueeze.", "aten.expand.", "aten.slice.", "aten.select.", "aten.alias."),
    *("aten.t.", "aten.transpose.", "aten.permute.", "aten.squeeze.", "aten.detach.", "aten._unsafe_view."),
)
_ATTENTION = "aten._scaled_dot_product_"


def _is_masked(func: Any, args: Any) -> bool:
    """Indexing by numbers has a known shape; by a mask it has not."""
    if not str(func).startswith(("aten.index", "aten._unsafe_index")):
        return True
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in tree_leaves(list(args[1:])))
