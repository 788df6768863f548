"""Depthwise convolutions of one tap in captured graphs, of inference and training: products by channel.

cuDNN's kernels for them, and for their gradients, run far below the speed of memory. As a product with a factor of each
channel, and a sum with its bias, they are Inductor's, which fuses them with what is around them; so are the gradients,
products and sums over positions. Half precision is computed in float32 and rounded once, as PyTorch's convolution is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from kgopt._layout import is_dense_channels_last, memory_format
from kgopt.rewrite.captured.passes.upsampled import is_conv
from kgopt.rewrite.captured.values import value
from kgopt.rewrite.glue.calls import PLAIN_CONVS, geometry_of
from kgopt.rewrite.measure import policy


def swap(graph_module: fx.GraphModule, always: bool) -> list[str]:
    """Writes such convolutions of a graph of Dynamo's as products. Names of their nodes. ``always``: on the CPU too."""
    graph, done = graph_module.graph, []
    for node in list(graph.nodes):
        if is_taken(node, always):
            _write(graph, node)
            done.append(node.name)
    return done


def is_taken(node: fx.Node, always: bool = False) -> bool:
    """Whether a node is such a convolution and becomes a product."""
    return is_conv(node) and _is_one_tap(node) and (always or policy.default(value(node).device.type))


def _is_one_tap(node: fx.Node) -> bool:
    """A depthwise convolution of one tap, of samples, that does not pad."""
    found = geometry_of(node.target, node.args, dict(node.kwargs), value)
    if found is None:
        return False
    tensors, (_, _, stride, padding, _, _, groups) = found
    held, made, rank = [value(t) for t in tensors if t is not None], value(node), PLAIN_CONVS[node.target]
    if not all(map(_is_plain, (*held, made))):
        return False
    x, weight, *_ = held
    if x.dim() != rank + 2 or any(padding) or min(stride) < 1 or not all(type(n) is int for n in weight.shape):
        return False
    # One channel a group, of one group, too: x has one channel then.
    return set(weight.shape[1:]) == {1} and weight.shape[0] % groups == 0


def _is_plain(t: Any) -> bool:
    """Of no other class, and not wrapped by torch.func, whose tensors hide dims and cannot be computed with here."""
    return hasattr(t, "fake_mode") and t.is_floating_point() and t.layout is torch.strided


def _write(graph: fx.Graph, node: fx.Node) -> None:
    found = geometry_of(node.target, node.args, dict(node.kwargs), value)
    assert found is not None  # it was asked before
    (x, weight, bias), (_, _, stride, *_, channels) = found
    before, rank = value(node), len(stride)
    times = value(weight).shape[0] // channels
    # Autocast's dtype, where it casts: what it would round first is not rounded here.
    wide = torch.float64 if before.dtype is torch.float64 else torch.float32
    last = is_dense_channels_last(before)

    def noted(made: fx.Node, y: Tensor) -> fx.Node:
        made.meta.update({**node.meta, "example_value": y})
        return made

    def call(function: Any, *args: Any) -> fx.Node:
        return noted(graph.call_function(function, args), function(*fx.map_arg(args, value)))

    def method(name: str, of: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        return noted(graph.call_method(name, (of, *args), kwargs), getattr(value(of), name)(*args, **kwargs))

    def cast(of: fx.Node, dtype: torch.dtype) -> fx.Node:
        return of if value(of).dtype is dtype else method("to", of, dtype)

    # Several results of a channel are a dim behind it, in the order in which they lie in memory: no copy joins them.
    if times == 1:
        sizes = [1, channels, *[1] * rank]
    else:
        sizes = [channels, times] if last else [1, channels, times, *[1] * rank]
    with graph.inserting_before(node):
        if any(n > 1 for n in stride):
            x = call(operator.getitem, x, (..., *(slice(None, None, n) for n in stride)))
        if times > 1:
            x = method("unsqueeze", method("movedim", x, 1, -1), -1) if last else method("unsqueeze", x, 2)
        y = call(operator.mul, cast(x, wide), cast(method("reshape", weight, sizes), wide))
        if bias is not None:
            y = call(operator.add, y, cast(method("reshape", bias, sizes), wide))
        y = cast(y, before.dtype)
        if times > 1:
            y = method("movedim", method("flatten", y, -2), -1, 1) if last else method("flatten", y, 1, 2)
        if value(y).stride() != before.stride():  # the convolution gives one of two formats, whatever x lies in
            y = method("clone", y, memory_format=memory_format(before.dim(), last))
    node.replace_all_uses_with(y)
    graph.erase_node(node)
