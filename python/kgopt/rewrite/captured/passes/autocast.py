"""Norms of captured graphs under autocast on CUDA: which of them give half precision at once.

PyTorch's GroupNorm gives float32 there, and a convolution that reads the result converts it. Where convolutions are all
that reads it, at last, the op writes half precision: the values are the same, for half of the bytes. What stands in
between may move values (padding, concatenation, views), for it rounds nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from kgopt.rewrite.captured.functional_norms import ChannelNorm
from kgopt.rewrite.captured.values import name_of, value
from kgopt.rewrite.chains.patterns import Match
from kgopt.rewrite.pytorch import originals

_MOVES = {"cat", "concat", "flatten", "reshape", "view", "permute", "transpose", "movedim", "contiguous", "pad"}
# Their gradients are sums, which half precision would round at each addition.
_MOVES_BUT_ADDS_IN_BACKWARD = {"interpolate", "max_pool2d", "max_pool3d"}


def half_precision(
    found: Match, last: fx.Node, switches_autocast: bool, convolutions: Collection[Any]
) -> torch.dtype | None:
    """What a norm gives; None: float32, the rule of kgopt's ops. ``convolutions``: the functions that are some.

    PyTorch's instance norm has no rule of autocast.
    """
    norm, chain = found.norm, found.chain
    if isinstance(norm, ChannelNorm) or chain.has_prelu:
        return None
    x, normed, result = (value(n) for n in (norm.origin.args[0], norm.origin, last))
    if not all(isinstance(t, Tensor) and t.is_cuda for t in (x, normed, result)):
        return None
    if x.dtype not in (torch.float16, torch.bfloat16):
        return None
    if normed.dtype is x.dtype:
        return x.dtype if result.dtype is x.dtype else None  # type: ignore[no-any-return]
    if switches_autocast or torch.get_autocast_dtype("cuda") is not x.dtype:
        return None
    if chain.added or chain.reduce or chain.is_modulated:  # what they compute in float32 would be rounded before
        return None
    return x.dtype if _is_convolved(last, convolutions) else None  # type: ignore[no-any-return]


def _is_convolved(node: fx.Node, convolutions: Collection[Any]) -> bool:
    """Whether all that becomes of a value is that convolutions read it."""
    return bool(node.users) and all(
        reader.target in convolutions or (_moves(reader) and _is_convolved(reader, convolutions))
        for reader in node.users
    )


def _moves(node: fx.Node) -> bool:
    """Whether a call gives values that it was given, in other places, and zeros."""
    name, made = name_of(node), value(node)
    if not isinstance(made, Tensor) or made.dtype is not torch.float32 or "out" in node.kwargs:
        return False
    if node.op == "call_method":
        is_known = originals.untouched(*originals.methods((name,)))()
    else:
        is_known = node.op == "call_function" and originals.is_torchs(node.target)
    if not is_known:
        return False
    mode = node.kwargs.get("mode", node.args[2] if name == "pad" and len(node.args) > 2 else None)
    if name == "pad":
        number = node.kwargs.get("value", node.args[3] if len(node.args) > 3 else None)
        adds = mode == "replicate"
        return number in (None, 0) and not (adds and made.requires_grad)
    if name in _MOVES_BUT_ADDS_IN_BACKWARD:
        is_nearest = name != "interpolate" or mode in (None, "nearest", "nearest-exact")
        return is_nearest and not made.requires_grad and len(node.args) < 4
    return name in _MOVES


def say_half(node: fx.Node, dtype: torch.dtype) -> None:
    """What moves the value of ``node``, which is of ``dtype`` now, gives that dtype, too."""
    for reader in node.users:
        made = value(reader)
        if not isinstance(made, Tensor) or made.dtype is not torch.float32 or not _moves(reader):
            continue
        if all(getattr(value(t), "dtype", dtype) is dtype for t in reader.all_input_nodes):
            reader.meta["example_value"] = made.to(dtype)
            say_half(reader, dtype)
