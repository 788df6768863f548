"""Nearest upsampling in captured graphs of inference, of which only what reads it makes a large tensor.

A convolution with a kernel of 1 behind the upsampling runs before it: of what it gives then the compiler repeats the
values where they are read. kgopt's op for a norm's scale and shift by position reads the small tensor, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx

from kgopt.rewrite.captured.passes.upsampled import CONVS, given_of, nearest_of
from kgopt.rewrite.captured.values import uses_autocast, value
from kgopt.rewrite.pytorch import originals


def swap(graph_module: fx.GraphModule, may_write: Callable[[fx.Node], bool]) -> list[str]:
    """Computes such convolutions of the small tensors. Names of their nodes.

    Args:
        graph_module: Dynamo's graph, with fake tensors as ``example_value``.
        may_write: whether a node may change a tensor, or the state under which later ones run.
    """
    graph, done = graph_module.graph, []
    if torch.is_grad_enabled() or uses_autocast(graph):
        return []
    for conv in list(graph.nodes):
        if conv.op != "call_function" or conv.target not in CONVS or not originals.runs_as_is(conv.target):
            continue
        up: Any = given_of(conv).get("input")
        small = None if not _is_pointwise(conv) else small_of(up, conv, may_write)
        if small is not None and _swap(graph, conv, up, small):
            done.append(conv.name)
    return done


def small_of(
    up: Any, reader: fx.Node, may_write: Callable[[fx.Node], bool], inside: Collection[fx.Node] = ()
) -> fx.Node | None:
    """What ``up`` repeats, if it is nearest upsampling and ``reader`` may read that. ``inside``: nodes that vanish."""
    found = nearest_of(up)
    if found is None:
        return None
    between = up
    while (between := between.next) is not reader:
        if between not in inside and may_write(between):
            return None
    return found[0]


def _is_pointwise(conv: fx.Node) -> bool:
    """A convolution of each position by itself, of a batch."""
    given = given_of(conv)
    weight, made = value(given.get("weight")), value(conv)
    if not isinstance(weight, Tensor) or not isinstance(made, Tensor) or made.dim() != weight.dim():
        return False
    if isinstance(given["padding"], str) or torch.is_autocast_enabled(made.device.type):
        return False
    strides, padding = ([n] if isinstance(n, int) else list(n) for n in (given["stride"], given["padding"]))
    return all(k == 1 for k in (*weight.shape[2:], *strides)) and not any(padding)


def _swap(graph: fx.Graph, conv: fx.Node, up: fx.Node, small: fx.Node) -> bool:
    """Unless the result would lie in another format, which later nodes may count on."""
    given = {**given_of(conv), "input": small}
    rest = {**up.kwargs, **dict(zip(("size", "scale_factor", "mode"), up.args[1:], strict=False))}
    rest.pop("input", None)
    if len(up.args) > 4:  # switches that are given by place
        return False
    of_small = conv.target(**{k: value(v) if isinstance(v, fx.Node) else v for k, v in given.items()})  # type: ignore[operator]
    large = up.target(of_small, **{k: value(v) if isinstance(v, fx.Node) else v for k, v in rest.items()})  # type: ignore[operator]
    if large.stride() != value(conv).stride():
        return False
    with graph.inserting_before(conv):
        first = graph.call_function(conv.target, (), given)  # type: ignore[arg-type]
        second = graph.call_function(up.target, (first,), rest)  # type: ignore[arg-type]
    first.meta.update({**conv.meta, "example_value": of_small})
    second.meta.update({**up.meta, "example_value": large})
    conv.replace_all_uses_with(second)
    graph.erase_node(conv)
    if not up.users:
        graph.erase_node(up)
    return True
