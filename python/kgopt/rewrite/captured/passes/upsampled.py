"""Nearest upsampling and the convolution behind it, in captured graphs of inference.

Both become one transposed convolution, PyTorch's own, whose weights are sums of the convolution's
(:func:`kgopt.rewrite.glue.kernels.upsampled_conv`). Inductor plans its format and fuses its bias as with any other.
Whether that is faster is measured on tensors of the graph's sizes while it is compiled. Sizes that are not known by
then leave the graph as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from kgopt._layout import is_dense_channels_last
from kgopt.rewrite.captured.values import is_known, may_measure, stand_in, uses_autocast, value
from kgopt.rewrite.captured.writes import is_written_between
from kgopt.rewrite.glue import calls, kernels, search
from kgopt.rewrite.glue.calls import INTERPOLATE, Call, interpolate_of
from kgopt.rewrite.pytorch import originals
from kgopt.torch_private import outside_of_tracing

CONVS = frozenset(calls.CONVS).intersection(calls.PLAIN_CONVS)


def fold(graph_module: fx.GraphModule, always: bool) -> list[str]:
    """Folds what is faster folded in a graph of Dynamo's. Names of the convolutions' nodes. ``always``: unmeasured."""
    graph, done = graph_module.graph, []
    if torch.is_grad_enabled() or uses_autocast(graph):
        return []
    for node in list(graph.nodes):
        if is_conv(node):
            found = _pair(node)
            if found is not None and (always or _is_faster(found)):
                _write(graph, node, found)
                done.append(node.name)
    return done


def is_conv(node: fx.Node) -> bool:
    """Whether a node is one of PyTorch's convolutions, not a transposed one."""
    return node.op == "call_function" and node.target in CONVS and originals.runs_as_is(node.target)


def given_of(node: fx.Node) -> dict[str, Any]:
    """A convolution's arguments by name."""
    return calls.conv_arguments(node.target, node.args, node.kwargs)


def nearest_of(up: Any) -> tuple[fx.Node, tuple[int, ...]] | None:
    """What a node repeats, and how often in each dim, if it is nearest upsampling by whole factors."""
    found = upsampled_by(up)
    return (found[0], found[2]) if found is not None and found[1] == "nearest" else None


def upsampled_by(up: Any) -> tuple[fx.Node, str, tuple[int, ...]] | None:
    """What a node upsamples, "nearest" or "linear", and the factors; None where no op of kgopt computes it."""
    if not isinstance(up, fx.Node) or up.target is not INTERPOLATE or up.op != "call_function":
        return None
    x = up.kwargs.get("input", up.args[0] if up.args else None)
    if not isinstance(x, fx.Node) or not originals.runs_as_is(up.target):
        return None
    args, kwargs = (fx.map_arg(a, value) for a in (up.args, dict(up.kwargs)))
    try:
        found = interpolate_of(is_known, *args, **kwargs)  # type: ignore[misc, arg-type]
    except (TypeError, ValueError):  # arguments that PyTorch itself refuses
        return None
    return None if found is None else (x, *found[:2])


@dataclass
class _Pair:
    """An upsampling and the convolution behind it."""

    x: fx.Node  # what is upsampled
    up: fx.Node
    given: Mapping[str, Any]  # the convolution's arguments
    call: Call  # both as one call, of stand-ins


def _pair(node: fx.Node) -> _Pair | None:
    given = given_of(node)
    up: Any = given["input"]
    found = nearest_of(up)
    if found is None or len(up.users) != 1:
        return None
    x, factors = found
    held, weight, bias = value(x), value(given["weight"]), value(given["bias"])
    if not is_known(weight):
        return None
    if given["bias"] is not None and not is_known(bias):
        return None
    if held.dim() not in (4, 5) or weight.dim() != held.dim() or torch.is_autocast_enabled(held.device.type):
        return None
    if {t.dtype for t in (held, weight, bias) if t is not None} != {held.dtype}:
        return None
    geometry = tuple(weight.shape[2:]), given["stride"], given["padding"], given["dilation"]
    padding = calls.foldable_padding(*geometry, held.dim() - 2)
    if padding is None or type(given["groups"]) is not int or is_written_between(up, node):
        return None
    # Plain tensors of the same kinds, for code that knows no fake ones; nothing computes with them.
    more = stand_in(weight, "meta"), None if bias is None else stand_in(bias, "meta")
    call = calls.upsampled(stand_in(held, "meta"), factors, *more, padding, given["groups"])
    return None if call is None or "folded_aten" not in call.options else _Pair(x, up, given, call)


def _is_faster(pair: _Pair) -> bool:
    """Measured, or known of an equal pair."""
    held = value(pair.x)
    if not may_measure(held.device):
        return False
    with outside_of_tracing() as is_outside:
        if not is_outside:
            return False
        try:
            x = stand_in(held, held.device)
            more = [None if t is None else stand_in(t, held.device) for t in pair.call.more]
        except torch.OutOfMemoryError:
            return False
        factors, padding, groups, *_ = pair.call.argument
        call = Call("upsampled", pair.call.argument, x, tuple(more), ("folded_aten",), keeps=True)
        ones, zeros = (1,) * len(factors), (0,) * len(factors)

        def apart() -> Tensor:
            up = kernels.upsample_nearest(x, factors)
            return torch.convolution(up, more[0], more[1], ones, padding, ones, False, zeros, groups)  # type: ignore[arg-type]

        return bool(search.verdict(call, apart))


def _write(graph: fx.Graph, node: fx.Node, pair: _Pair) -> None:
    factors, padding, groups, *_ = pair.call.argument
    weight, bias = pair.given["weight"], pair.given["bias"]
    rest = [k - 1 - p for k, p in zip(value(weight).shape[2:], padding, strict=True)]
    ones, zeros = [1] * len(factors), [0] * len(factors)
    last = is_dense_channels_last(value(pair.x))
    with graph.inserting_before(node):
        summed = graph.call_function(
            torch.ops.kgopt.upsample_conv_weight.default, (weight, list(factors), groups, last)
        )
        y = graph.call_function(
            torch.convolution, (pair.x, summed, bias, list(factors), rest, ones, True, zeros, groups)
        )
    y.meta.update(node.meta)
    node.replace_all_uses_with(y)
    graph.erase_node(node)
    graph.erase_node(pair.up)
