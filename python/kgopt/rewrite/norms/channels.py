"""What a module that normalizes over channels, or writes a norm in groups out, computes of an input at hand.

Such a module may be of any class: its forward says what it is (:mod:`~kgopt.rewrite.formulas.interpret`). That is asked
once for each kind of input, and what the answer rested on is compared at each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kgopt._layout import is_channels_last
from kgopt.rewrite.chains.chain import WRITTEN
from kgopt.rewrite.chains.emit import NormArgs, flattened, written
from kgopt.rewrite.formulas import Formula, UnknownFormulaError
from kgopt.rewrite.formulas.interpret import Recognized, recognize
from kgopt.rewrite.optimized.disguise import original_class
from kgopt.rewrite.pytorch import originals
from kgopt.rewrite.pytorch.originals import CONV_MODULES
from kgopt.rewrite.pytorch.watching import is_hooked

_UNSEEN: Any = object()
_RANKS = (3, 4, 5)
_GUESS = 8  # channels, where no parameter tells
_ANSWERS = 64  # after which a module that keeps changing runs its own code
_is_compiling = torch.compiler.is_compiling
_untouched_call = originals.AS_CALLED[nn.Identity]


class Meanings:
    """What one module's forward was found to compute, by the kind of input."""

    def __init__(self, kind: str, axis: int, any_number: bool = False) -> None:
        self.kind = kind
        self.axis = axis  # the dim of channels: 1 or -1
        self.any_number = any_number  # of channels, in what was found
        self.found: dict[Any, Recognized | None] = {}
        self.answers = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Meanings) and (self.kind, self.axis) == (other.kind, other.axis)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:  # copies and pickles ask anew
        return type(self), (self.kind, self.axis, self.any_number)

    def of(self, module: nn.Module, x: Tensor) -> Formula | None:
        """The norm that the module computes of x; None: it is not certain."""
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        key = x.dim(), 0 if self.any_number else x.shape[self.axis], x.dtype, device, autocast
        found = self.found.get(key, _UNSEEN)
        if found is None:
            return None
        if found is _UNSEEN or not found.holds(module.__dict__, module._parameters):
            if _is_compiling() or self.answers >= _ANSWERS:
                return None
            found = self.learn(module, key)
        return None if found is None else found.formula

    def learn(self, module: nn.Module, key: Any, parameters: torch.dtype | None = None) -> Recognized | None:
        """Asks the module's forward; ``parameters``: if they had another dtype."""
        rank, channels, dtype, device, autocast = key
        channels = channels or _GUESS
        self.answers += 1
        found: Recognized | None = None
        if not autocast or device == "cuda":
            try:
                kind = torch.device(device), autocast, parameters, self.kind == WRITTEN
                found = recognize(module, rank, channels, self.axis, dtype, *kind)
            except UnknownFormulaError:
                found = None
        if found is not None and not _is_ours(found, self.kind, self.axis, dtype, autocast):
            found = None
        self.found[key] = found
        return found


def _is_ours(found: Recognized, kind: str, axis: int, dtype: torch.dtype, autocast: bool) -> bool:
    formula = found.formula
    if formula.norm != kind or (autocast and (found.looks_at_autocast or dtype is torch.float64)):
        return False
    if axis == -1 and formula.lies is not None:
        return False  # PyTorch's kernel for the last dim, whose result is contiguous
    return formula.dtype is (torch.float32 if autocast else dtype)


def _is_of_any_number(module: nn.Module, found: Recognized, rank: int, axis: int, device: str) -> bool:
    """Whether a norm without parameters is that of any number of channels."""
    try:
        is_written = bool(found.formula.groups)
        other = recognize(
            module, rank, _GUESS + 3, axis, torch.float32, torch.device(device), False, in_groups=is_written
        )
    except UnknownFormulaError:  # F.layer_norm is told its number
        return False
    return other.formula == found.formula


def meanings_of(module: nn.Module) -> Meanings | None:
    """What a module is found to be, before there is an input; None: no norm over channels."""
    cls = original_class(module) or type(module)
    if module._modules or module._buffers or cls.__module__.startswith("torch.nn.modules."):
        return None
    parameters = [p for p in module._parameters.values() if p is not None]
    if any(type(p) is not nn.Parameter for p in parameters):
        return None
    counts = {p.numel() for p in parameters}
    if len(counts) > 1 or len(parameters) > 2 or not hasattr(cls.forward, "__code__"):
        return None
    channels = min(counts) if counts else _GUESS
    dtype = parameters[0].dtype if parameters else torch.float32
    if not dtype.is_floating_point or not channels:
        return None
    device = parameters[0].device.type if parameters else "cpu"
    for axis, ranks, in_groups in ((1, (4, 5, 3), False), (-1, (4, 5), False), (1, (4, 5), True)):
        for rank in ranks:
            try:
                found = recognize(module, rank, channels, axis, dtype, torch.device(device), False, in_groups=in_groups)
            except UnknownFormulaError:
                continue
            meanings = Meanings(found.formula.norm, axis)
            if not _is_ours(found, meanings.kind, axis, dtype, False):
                continue
            if not counts:
                meanings.any_number = _is_of_any_number(module, found, rank, axis, device)
            # Compiled code can ask nothing, and a model may be cast before it is compiled.
            more = (torch.bfloat16, torch.float16, torch.float64)
            for each in (dtype, *(d for d in more if d is not dtype and dtype is torch.float32)):
                for rank_ in ranks:
                    key = rank_, 0 if meanings.any_number else channels, each, device, False
                    meanings.learn(module, key, each if counts else None)
            meanings.answers = 0
            return meanings
    return None


def is_in_feature_maps(parent: nn.Module) -> bool:
    """Whether a module whose child normalizes over the last dim does so with feature maps: it convolves, too.

    Tokens of attention are left to PyTorch's own kernels.
    """
    return any(type(m) in CONV_MODULES or original_class(m) in CONV_MODULES for m in _near(parent))


def _near(parent: nn.Module) -> Iterator[nn.Module]:
    for child in parent.children():
        yield child
        yield from child.children()


def is_called_plainly(norm: Any, kind: str) -> bool:
    """Whether a call of a norm over channels is its forward and no more, and that is of this kind."""
    made = type(norm)
    known = norm.__dict__.get("_kgopt")
    if known is None or known.channel is None or known.channel.kind != kind or is_hooked(norm):
        return False
    if not _untouched_call() or getattr(made, "_kgopt_made", None) is not made:
        return False
    if made.__call__ is not nn.Module.__call__ or made._call_impl is not nn.Module._call_impl:
        return False
    return made.forward is made._kgopt_forward


def _keeps_strides(x: Tensor, axis: int) -> bool:
    """Whether the op's result lies as that of sums and products of x: not of an x in a third order of dims, nor of one
    sample in channels_last with another batch stride, as views of it may have. What draws random numbers sees it.
    """
    x = x if axis == 1 else x.movedim(axis, 1)
    return _is_compiling() or x.is_contiguous() or is_channels_last(x)


def arguments(norm: Any, meanings: Meanings, x: Tensor) -> NormArgs | None:
    """The op's arguments for x; None where the norm's own code must see it."""
    rank = x.dim()
    if rank not in _RANKS or (rank == 3 and meanings.axis != 1) or x.numel() == 0:
        return None
    formula = meanings.of(norm, x)
    if formula is None or not (x.is_contiguous() or formula.lies is not None or _keeps_strides(x, meanings.axis)):
        return None
    parameters = norm._parameters
    weight = parameters[formula.weight] if formula.weight else None
    bias = parameters[formula.bias] if formula.bias else None
    if weight is not None and bias is not None and weight.dtype is not bias.dtype:
        return None
    if formula.groups:
        made = written(weight, bias, formula, x.shape[1])
        # What views are taken of is contiguous; a group of one value is PyTorch's.
        lies = x.is_contiguous() if formula.lies is not None else True
        return flattened(x, made) if lies and x.numel() != made.num_groups * x.shape[0] else None
    factors = formula.factor, formula.bias_factor
    return NormArgs(0, weight, bias, formula.eps, *factors, formula.axis, formula.lies)
