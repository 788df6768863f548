"""Captured graphs in fewer nodes, before norms are looked for: casts that do nothing are left out, a norm that computes
half precision in float32 is one function, and so is SiLU.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from kgopt.rewrite.captured.values import value
from kgopt.rewrite.captured.writes import is_written_between
from kgopt.rewrite.pytorch import originals

_CASTS = ("float", "double", "half", "bfloat16", "to", "type", "type_as")
_HALVES = (torch.float16, torch.bfloat16)
_SIGMOIDS = {f for f in (torch.sigmoid, F.sigmoid) if originals.is_torchs(f)}
_MULTIPLY = {f for f in (operator.mul, torch.mul) if originals.is_torchs(f)}
_casts_as_is = originals.untouched(*originals.methods(_CASTS))
_norms_as_is = originals.untouched(*originals.of_function(F.group_norm))


def simplify(graph: fx.Graph) -> bool:
    """Whether there was anything of the kind."""
    done = [_leave_out_casts(graph), _join_casts_and_norms(graph), _join_silu(graph)]
    return any(done)


def restore(graph: fx.Graph) -> None:
    """Writes norms in float32, as far as they are left, as PyTorch's functions, which caches of compiled code know."""
    for node in list(graph.nodes):
        if node.target is group_norm_in_float32:
            x, *rest = node.args
            with graph.inserting_before(node):
                up = graph.call_method("float", (x,))
                norm = graph.call_function(F.group_norm, (up, *rest), dict(node.kwargs))
                down = graph.call_method("to", (norm, value(node).dtype))
            for made in (up, norm):
                made.meta["example_value"] = value(node).float()
            down.meta.update(node.meta)
            node.replace_all_uses_with(down)
            graph.erase_node(node)


# ----------------------------------------------------------------------------------------------------------------------
# Casts


def cast_of(node: Any) -> tuple[fx.Node, torch.dtype] | None:
    """What a node casts, and to which dtype, if it does nothing else; None: it is no cast."""
    if not isinstance(node, fx.Node) or node.op != "call_method" or node.target not in _CASTS or not _casts_as_is():
        return None
    x, made = node.args[0] if node.args else None, value(node)
    given = value(x)
    if not isinstance(x, fx.Node) or not isinstance(given, Tensor) or not isinstance(made, Tensor):
        return None
    rest = (*node.args[1:], *node.kwargs.values())
    of_tensor = len(rest) == 1 and isinstance(value(rest[0]), Tensor)
    if not set(node.kwargs) <= {"dtype"} or not (of_tensor or all(isinstance(a, torch.dtype) for a in rest)):
        return None
    return (x, made.dtype) if made.device == given.device else None


def _leave_out_casts(graph: fx.Graph) -> bool:
    """Of tensors that have the dtype: PyTorch gives the tensor itself."""
    found = False
    for node in list(graph.nodes):
        cast = cast_of(node)
        if cast is not None and value(cast[0]).dtype is cast[1]:
            node.replace_all_uses_with(cast[0])
            graph.erase_node(node)
            found = True
    return found


def group_norm_in_float32(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """``F.group_norm(x.float(), ...)`` in x's dtype, which kgopt's op computes without the copies."""
    return F.group_norm(x.float(), num_groups, weight, bias, eps).to(x.dtype)


def _join_casts_and_norms(graph: fx.Graph) -> bool:
    """``group_norm(x.float(), ...).type(x.dtype)`` as one function."""
    found = False
    for node in list(graph.nodes):
        if node.target is not F.group_norm or not _norms_as_is() or not node.args or len(node.users) != 1:
            continue
        (down,) = node.users
        up, back = cast_of(node.args[0]), cast_of(down)
        if up is None or back is None or back[0] is not node or up[1] is not torch.float32:
            continue
        x = value(up[0])
        if x.dtype not in _HALVES or x.dtype is not back[1] or is_written_between(node.args[0], node):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(group_norm_in_float32, (up[0], *node.args[1:]), dict(node.kwargs))
        made.meta.update(down.meta)
        down.replace_all_uses_with(made)
        for old in (down, node, node.args[0]):
            if not old.users:
                graph.erase_node(old)
        found = True
    return found


# ----------------------------------------------------------------------------------------------------------------------
# SiLU


def _join_silu(graph: fx.Graph) -> bool:
    """``x * sigmoid(x)``."""
    found = False
    for node in list(graph.nodes):
        if node.target not in _MULTIPLY or len(node.args) != 2 or node.kwargs or not _are_nodes(node.args):
            continue
        for x, gate in (node.args, node.args[::-1]):
            if not _is_sigmoid(gate) or gate.args[0] is not x or list(gate.users) != [node]:
                continue
            given = value(x)
            if not isinstance(given, Tensor) or not given.is_floating_point():  # which is SiLU's alone
                continue
            if not is_written_between(gate, node):
                with graph.inserting_before(node):
                    made = graph.call_function(F.silu, (x,))
                made.meta = dict(node.meta)
                node.replace_all_uses_with(made)
                graph.erase_node(node)
                graph.erase_node(gate)
                found = True
                break
    return found


def _is_sigmoid(node: fx.Node) -> bool:
    if len(node.args) != 1 or node.kwargs:
        return False
    if node.op == "call_method":
        return node.target == "sigmoid" and originals.untouched(*originals.methods(("sigmoid",)))()
    return node.op == "call_function" and node.target in _SIGMOIDS and originals.runs_as_is(node.target)


def _are_nodes(args: Sequence[Any]) -> bool:
    return all(isinstance(a, fx.Node) for a in args)
