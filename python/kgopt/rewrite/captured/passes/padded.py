"""Zero padding in front of a convolution, in captured graphs of inference: the convolution pads by itself.

As far as zeros are the same on both sides; what is left stays padding in front. Taps that read zeros alone along the
first dim are left out, as :mod:`kgopt.rewrite.waiting.padding` does. A join in front of the padding is the compiler's,
which puts both into one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from kgopt.rewrite.captured.passes.upsampled import given_of, is_conv
from kgopt.rewrite.captured.values import is_known, value
from kgopt.rewrite.captured.writes import is_written_between
from kgopt.rewrite.glue.calls import PAD, PLAIN_CONVS, geometry_of
from kgopt.rewrite.pytorch import originals
from kgopt.rewrite.waiting.padding import without_idle_taps
from kgopt.torch_private import nn_functions

_PADS = tuple(f for f in (PAD, getattr(nn_functions, "pad", PAD)) if originals.is_torchs(f))


def fold(graph_module: fx.GraphModule) -> list[str]:
    """Folds what can be folded in a graph of Dynamo's. Names of the convolutions' nodes."""
    graph, done = graph_module.graph, []
    if torch.is_grad_enabled():
        return []
    for node in list(graph.nodes):
        if is_conv(node) and _fold(graph, node):
            done.append(node.name)
    return done


def _fold(graph: fx.Graph, node: fx.Node) -> bool:
    """Takes the padding in front of a convolution into it, or a part of it; whether there was something to take."""
    rank, given = PLAIN_CONVS[node.target], given_of(node)
    x: Any = given["input"]
    pads, zeros = [], [(0, 0)] * rank
    while (found := _zeros(x, rank)) is not None:
        pads.append(x)
        x, more = found
        zeros = [(b + c, a + d) for (b, a), (c, d) in zip(zeros, more, strict=True)]
    weight = value(given["weight"])
    if not pads or not is_known(value(x)) or not is_known(weight) or weight.dim() != rank + 2:
        return False
    geometry = geometry_of(node.target, node.args, dict(node.kwargs), value)
    if geometry is None or is_written_between(pads[-1], node):
        return False
    _, _, stride, own, dilation, *_ = geometry[1]
    ends = [(b + p, a + p) for (b, a), p in zip(zeros, own, strict=True)]
    sizes = value(x).shape[2:]
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if min(*stride, *dilation) < 1 or min(own) < 0 or any(map(_is_short, sizes, ends, spans)):
        return False  # PyTorch refuses it
    kernel = weight.shape[2]
    first, count, *around = without_idle_taps(sizes[0], *ends[0], kernel, stride[0], dilation[0])
    ends[0] = around[0], around[1]
    both = [min(z) for z in ends]
    rest = [n for (b, a), p in zip(reversed(ends), reversed(both), strict=True) for n in (b - p, a - p)]
    if count == kernel and both == list(own) and len(pads) == 1 and any(rest):
        return False
    _write(graph, node, x, {**given, "padding": both}, rest, (first, count) if count < kernel else None)
    for pad in pads:
        graph.erase_node(pad)
    return True


def _is_short(size: int, zeros: tuple[int, int], span: int) -> bool:
    return size + sum(zeros) < span


def _write(
    graph: fx.Graph,
    node: fx.Node,
    x: fx.Node,
    given: Mapping[str, Any],
    rest: list[int],
    taps: tuple[int, int] | None,
) -> None:
    def call(function: Any, *args: Any) -> fx.Node:
        made = graph.call_function(function, args)
        made.meta["example_value"] = function(*(value(a) if isinstance(a, fx.Node) else a for a in args))
        return made

    weight, target = given["weight"], node.target
    assert callable(target)
    with graph.inserting_before(node):
        if any(rest):
            x = call(PAD, x, rest)
        if taps is not None:
            weight = call(torch.narrow, weight, 2, *taps)
        tail = (given["bias"], given["stride"], given["padding"], given["dilation"], given["groups"])
        y = graph.call_function(target, (x, weight, *tail))
    y.meta.update(node.meta)
    node.replace_all_uses_with(y)
    graph.erase_node(node)


def _zeros(pad: Any, rank: int) -> tuple[fx.Node, list[tuple[int, int]]] | None:
    """What is padded, and zeros in front of each spatial dim and behind it; None where it is no such padding."""
    if not isinstance(pad, fx.Node) or pad.op != "call_function" or len(pad.users) != 1:
        return None
    if pad.target not in _PADS or not originals.runs_as_is(pad.target):
        return None
    names = ("input", "pad", "mode", "value")
    given = {"mode": "constant", "value": None, **dict(zip(names, pad.args, strict=False)), **pad.kwargs}
    x, listed = given.get("input"), given.get("pad")
    if given.keys() - set(names) or given["mode"] != "constant" or given["value"] not in (None, 0):
        return None
    if not isinstance(x, fx.Node) or not isinstance(value(x), Tensor) or value(x).dim() != rank + 2:
        return None
    if not isinstance(listed, (tuple, list)) or not all(type(n) is int and n >= 0 for n in listed):
        return None
    if len(listed) % 2 or len(listed) > 2 * rank:
        return None
    whole = [*listed, *(0,) * (2 * rank - len(listed))]
    return x, list(zip(whole[-2::-2], whole[::-2], strict=True))
