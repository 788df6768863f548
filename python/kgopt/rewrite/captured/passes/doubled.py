"""Linear upsampling to twice the size, and the sum behind it, in captured graphs of training and inference.

Inductor computes it from reads by index: up to eight for each result, which it does not share between results, and in
training the gathers of :mod:`~kgopt.rewrite.captured.passes.resampled`, in up to two passes over memory. kgopt's op
reads and writes each value about once, forward and backward, and adds another tensor on the way. But it fuses with
nothing else. So both are measured, with the elementwise functions around them, on tensors of the graph's sizes. Sizes
that are not known leave the graph as it is.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from kgopt.rewrite.captured.contest import Contest
from kgopt.rewrite.captured.passes.upsampled import upsampled_by
from kgopt.rewrite.captured.values import uses_autocast, value
from kgopt.rewrite.captured.writes import is_written_between
from kgopt.rewrite.chains.meanings import describe_function, describe_method
from kgopt.rewrite.pytorch import originals

_UPSAMPLE = torch.ops.kgopt.upsample_linear.default
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class _Doubled:
    """An upsampling, and the sum that alone reads it."""

    x: fx.Node  # what is upsampled
    up: fx.Node
    total: fx.Node | None = None
    residual: fx.Node | None = None  # what the sum adds

    @property
    def last(self) -> fx.Node:
        """The node that the op stands for."""
        return self.total or self.up

    @property
    def core(self) -> list[fx.Node]:
        """All nodes that the op stands for."""
        return [self.up] if self.total is None else [self.up, self.total]


def swap(graph_module: fx.GraphModule, contest: Contest | None) -> list[str]:
    """Puts kgopt's op into a graph of Dynamo's. Names of the upsamplings' nodes.

    Args:
        graph_module: with fake tensors as ``example_value``.
        contest: says where the op is faster; None: it is taken wherever it computes the same.
    """
    graph, done = graph_module.graph, []
    for node in list(graph.nodes):
        found = _doubled(node)
        if found is None:
            continue
        if contest is None or contest.gains(found.core, found.last, value(found.last), _everywhere):
            done.append(node.name)
            _write(graph, found)
    return done


def _everywhere(graph_module: fx.GraphModule) -> None:
    swap(graph_module, None)


def _doubled(node: fx.Node) -> _Doubled | None:
    """What the op computes at a node; None: nothing."""
    found = upsampled_by(node)
    if found is None or found[1] != "linear":
        return None
    x, made = value(found[0]), value(node)
    if not isinstance(made, Tensor) or x.dim() not in (4, 5) or x.device.type not in ("cpu", "cuda"):
        return None
    if x.dtype not in _DTYPES or made.dtype not in _DTYPES:
        return None
    # Autocast on CUDA upsamples in float32. Where the graph switches it, a region would be measured without.
    if made.dtype is not x.dtype and uses_autocast(node.graph):
        return None
    alone = _Doubled(found[0], node)
    for candidate in (_with_sum(alone), alone):
        if candidate is not None and _lies_as_it_was(candidate):
            return candidate
    return None


def _with_sum(alone: _Doubled) -> _Doubled | None:
    """With the sum that alone reads it, if neither broadcasts nor converts."""
    up = alone.up
    if len(up.users) != 1:
        return None
    (total,) = up.users
    if len(total.args) != 2 or not _adds(total):
        return None
    first, second = total.args
    other = second if first is up else first
    if not isinstance(other, fx.Node) or other is up:
        return None
    if _is_in_place(total) and first is not up:  # what it writes to has other readers
        return None
    result, added, made = value(total), value(other), value(up)
    if not isinstance(result, Tensor) or not isinstance(added, Tensor):
        return None
    # A residual that lies in another way would be copied first.
    kinds = {(t.shape, t.dtype, t.device) for t in (result, added, made)}
    if len(kinds) != 1 or added.layout is not torch.strided or added.stride() != made.stride():
        return None
    # The op runs where the sum stood.
    return None if is_written_between(up, total) else _Doubled(alone.x, up, total, other)


def _adds(node: fx.Node) -> bool:
    """Whether a node is PyTorch's sum of two values."""
    if node.op == "call_function":
        if node.target is operator.iadd:
            return originals.untouched(*originals.methods(("__iadd__",)))()
        made = describe_function(node.target, [], dict(node.kwargs), users=False)
        return made is not None and made.kind == "add" and originals.runs_as_is(node.target)
    if node.op != "call_method" or node.kwargs or not originals.untouched(*originals.methods((str(node.target),)))():
        return False
    made = describe_method(str(node.target), [], {})
    return node.target == "add_" or (made is not None and made.kind == "add")


def _is_in_place(total: fx.Node) -> bool:
    return total.target in (operator.iadd, "add_")


def _lies_as_it_was(found: _Doubled) -> bool:
    """Whether the op's result has the strides of PyTorch's, which later nodes may count on."""
    before = value(found.last)
    with torch.no_grad():
        y = _UPSAMPLE(value(found.x).to(value(found.up).dtype), value(found.residual))
    return (y.shape, y.dtype, y.stride()) == (before.shape, before.dtype, before.stride())


def _write(graph: fx.Graph, found: _Doubled) -> None:
    x, last, made = found.x, found.last, value(found.up)
    with graph.inserting_before(last):
        if value(x).dtype is not made.dtype:
            wide = graph.call_method("to", (x, made.dtype))
            wide.meta.update({**x.meta, "example_value": value(x).to(made.dtype)})
            x = wide
        y = graph.call_function(_UPSAMPLE, (x, found.residual))
    y.meta.update(last.meta)
    last.replace_all_uses_with(y)
    for node in reversed(found.core):
        graph.erase_node(node)
