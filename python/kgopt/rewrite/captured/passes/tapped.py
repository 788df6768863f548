"""Depthwise convolutions in captured graphs as products by channel, which Inductor fuses with what is around them.

Of one tap, in inference and training: cuDNN's kernels for them, and for their gradients, run far below the speed of
memory. A product with a factor of each channel, and a sum with its bias, are bound by memory alone; so are the
gradients, products and sums over positions.

Of several taps, in inference: a sum over the taps of slices of the input, padded, times factors. It is one kernel,
which reads the input through the caches. Where libraries have good kernels it is slower, so both are measured, with
what is around them, on tensors of the graph's sizes. Sizes that are not known leave the graph as it is.

Half precision is computed in float32 and rounded once, as PyTorch's convolution is.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from kgopt._layout import is_dense_channels_last, memory_format
from kgopt.rewrite.captured.contest import Contest, Region, is_elementwise
from kgopt.rewrite.captured.passes.convolutions import Convolutions, put
from kgopt.rewrite.captured.passes.upsampled import is_conv
from kgopt.rewrite.captured.values import is_known, name_of, uses_autocast, value
from kgopt.rewrite.captured.writes import statistics_written
from kgopt.rewrite.glue.calls import PAD, PLAIN_CONVS, geometry_of
from kgopt.rewrite.measure import policy
from kgopt.rewrite.pytorch import originals

MOST_TAPS = 27
SMALL = 2**20  # bytes of a result, below which launches cost more than the kernels
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NORMS = ("batch_norm", "group_norm", "instance_norm")


def swap(graph_module: fx.GraphModule, always: bool) -> list[str]:
    """Writes those of one tap of a graph of Dynamo's so. Names of their nodes. ``always``: on the CPU too."""
    graph, done = graph_module.graph, []
    for node in list(graph.nodes):
        if is_taken(node, always):
            _write(graph, node)
            done.append(node.name)
    return done


def is_taken(node: fx.Node, always: bool = False) -> bool:
    """Whether a node is such a convolution of one tap, which becomes a product without a measurement."""
    return is_conv(node) and _is_one_tap(node) and (always or policy.default(value(node).device.type))


def several(graph: fx.Graph) -> list[fx.Node]:
    """Those of several taps, which may be faster as sums; none under gradients, whose sums would be kernels each."""
    if torch.is_grad_enabled() or uses_autocast(graph):  # a region would be measured without
        return []
    return [node for node in graph.nodes if is_conv(node) and _has_several_taps(node)]


def swap_several(
    graph_module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    contest: Contest | None,
    formats: Convolutions,
    dims_last: Sequence[int] = (),
) -> list[str]:
    """Writes those of several taps so where that is faster. Names of their nodes.

    Args:
        graph_module: Dynamo's.
        nodes: what :func:`several` found in it.
        contest: says which are faster; None: all are written so.
        formats: how convolutions are computed otherwise. Those that are written are no part of it any more.
        dims_last: as the contest's.
    """
    graph, done = graph_module.graph, set()
    for node in sorted(nodes, key=lambda node: value(node).numel(), reverse=True):  # time may not suffice for all
        if contest is None or _is_faster(node, contest, formats):
            done.add(node.name)
            formats.ways.pop(node, None)
            _write(graph, node, dims_last)
    return [node.name for node in nodes if node.name in done]


def _is_faster(node: fx.Node, contest: Contest, formats: Convolutions) -> bool:
    """With what is around it, beside the faster convolution."""
    (x, *_), _ = _depthwise(node)
    way, moves = formats.ways.get(node), value(node).dim() in contest.dims_last
    # Each tap may compute anew what stands in front, which may have other sizes than the result.
    is_alone = len(x.users) == 1 and is_elementwise(x, value(x))
    core = [*(Region([x], x, value(x)).nodes if is_alone else []), node]
    norm = next(iter(node.users), None)
    if norm is not None and _normalizes(norm, node):  # Inductor's, or kgopt's with the convolution
        core.append(norm)

    def as_convolution(graph_module: fx.GraphModule) -> None:
        contest.rewrite(graph_module)
        for found in filter(is_conv, list(graph_module.graph.nodes)):
            if way is not None:
                put(graph_module.graph, found, way, moves)

    def as_sum(graph_module: fx.GraphModule) -> None:
        for found in filter(is_conv, list(graph_module.graph.nodes)):
            _write(graph_module.graph, found, contest.dims_last)
        contest.rewrite(graph_module)

    return contest.gains(core, core[-1], value(node), as_sum, as_convolution, "" if way is None else repr(way))


def _normalizes(norm: fx.Node, node: fx.Node) -> bool:
    """Whether a norm, which changes nothing else, alone reads a node."""
    if len(node.users) != 1 or norm.op != "call_function" or name_of(norm) not in _NORMS or norm.args[:1] != (node,):
        return False
    return originals.runs_as_is(norm.target) and not statistics_written(norm)


def _is_one_tap(node: fx.Node) -> bool:
    """A depthwise convolution of one tap, of samples, that does not pad."""
    found = _depthwise(node)
    if found is None:
        return False
    (_, weight, *_), (_, _, _, padding, *_) = found
    return not any(padding) and set(value(weight).shape[2:]) == {1}


def _has_several_taps(node: fx.Node) -> bool:
    """One of several, of known sizes, that is large enough to be worth it."""
    found = _depthwise(node)
    if found is None or not all(map(is_known, map(value, (node, *node.all_input_nodes)))):
        return False
    (x, weight, _), (_, _, _, padding, dilation, *_) = found
    made, kernel = value(node), value(weight).shape[2:]
    if made.dtype not in _DTYPES or value(x).dtype not in _DTYPES or made.numel() * made.element_size() < SMALL:
        return False
    return min(*padding, *dilation) >= 0 and 1 < math.prod(kernel) <= MOST_TAPS and bool(_taps(node, found))


def _depthwise(node: fx.Node) -> Any:
    """What geometry_of finds of a depthwise convolution of samples; None: it is another one, or says less."""
    found = geometry_of(node.target, node.args, dict(node.kwargs), value)
    if found is None:
        return None
    tensors, (_, _, stride, *_, groups) = found
    held, made, rank = [value(t) for t in tensors if t is not None], value(node), PLAIN_CONVS[node.target]
    if not all(map(_is_plain, (*held, made))):
        return None
    x, weight, *_ = held
    if x.dim() != rank + 2 or min(stride) < 1 or not all(type(n) is int for n in weight.shape):
        return None
    # One channel a group, of one group, too: x has one channel then.
    return found if weight.shape[1] == 1 and weight.shape[0] % groups == 0 else None


def _is_plain(t: Any) -> bool:
    """Of no other class, and not wrapped by torch.func, whose tensors hide dims and cannot be computed with here."""
    return hasattr(t, "fake_mode") and t.is_floating_point() and t.layout is torch.strided


def _taps(node: fx.Node, found: Any) -> list[tuple[tuple[int, ...], list[slice], list[int], list[slice]]]:
    """The taps that read something, row by row: where each is, what it reads, zeros around that, and every how many
    positions of the padded dims count.
    """
    (x, weight, _), (_, _, *lists, _, _) = found
    sizes, made, kernel = (value(t).shape[2:] for t in (x, node, weight))
    taps = []
    for at in itertools.product(*map(range, kernel)):
        along = [_along(*of_dim) for of_dim in zip(sizes, made, at, kernel, *lists, strict=True)]
        if None not in along:
            reads, pads, steps = zip(*along, strict=True)  # type: ignore[arg-type]
            taps.append((at, list(reads), [n for pad in reversed(pads) for n in pad], list(steps)))
    return taps


def _along(
    size: int, made: int, at: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[slice, tuple[int, int], slice] | None:
    """Of one dim, whose size need not be known where one tap does not pad; None: the tap reads zeros alone."""
    every = slice(None, None, stride if stride > 1 else None)
    if kernel == 1 and not padding:
        return every, (0, 0), slice(None)
    first = at * dilation - padding
    end = first + stride * (made - 1) + 1
    begin, stop = max(first, 0), min(end, size)
    if begin >= stop:
        return None
    pad = begin - first, end - stop
    if any(pad):  # fewer comparisons than with the same zeros for all taps
        return slice(begin, stop) if (begin, stop) != (0, size) else slice(None), pad, every
    return slice(begin, stop, every.step), pad, slice(None)


def _write(graph: fx.Graph, node: fx.Node, dims_last: Sequence[int] = ()) -> None:
    found = _depthwise(node)
    assert found is not None  # it was asked before
    (x, weight, bias), (_, _, stride, *_, channels) = found
    before, rank = value(node), len(stride)
    times = value(weight).shape[0] // channels
    # Autocast's dtype, where it casts: what it would round first is not rounded here.
    wide = torch.float64 if before.dtype is torch.float64 else torch.float32
    is_one, is_last = value(weight).shape[2:].numel() == 1, is_dense_channels_last(before)
    last = is_last or before.dim() in dims_last

    def noted(made: fx.Node, y: Tensor) -> fx.Node:
        made.meta.update({**node.meta, "example_value": y})
        return made

    def call(function: Any, *args: Any) -> fx.Node:
        return noted(graph.call_function(function, args), function(*fx.map_arg(args, value)))

    def method(name: str, of: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        return noted(graph.call_method(name, (of, *args), kwargs), getattr(value(of), name)(*args, **kwargs))

    def cast(of: fx.Node, dtype: torch.dtype) -> fx.Node:
        return of if value(of).dtype is dtype else method("to", of, dtype)

    def part(of: fx.Node, slices: list[slice]) -> fx.Node:
        return of if all(s == slice(None) for s in slices) else call(operator.getitem, of, (..., *slices))

    def joined(y: fx.Node) -> fx.Node:
        return y if times == 1 else method("flatten", y, *((-2,) if last else (1, 2)))

    # Several results of a channel are a dim behind it, in the order in which they lie in memory: no copy joins them.
    if times == 1:
        sizes = [1, channels, *[1] * rank]
    else:
        sizes = [channels, times] if last else [1, channels, times, *[1] * rank]

    def product(at: tuple[int, ...], reads: list[slice], pads: list[int], steps: list[slice]) -> fx.Node:
        # x itself is read by all taps: what takes much to compute Inductor stores ahead of padding, not behind it.
        h = part(x, reads)
        h = part(call(PAD, h, pads), steps) if any(pads) else h
        if times > 1:
            h = method("unsqueeze", method("movedim", h, 1, -1), -1) if last else method("unsqueeze", h, 2)
        w = weight if is_one else call(operator.getitem, weight, (slice(None), 0, *at))
        return call(operator.mul, cast(h, wide), cast(method("reshape", w, sizes), wide))

    with graph.inserting_before(node):
        terms = [product(*tap) for tap in _taps(node, found)]
        if not is_one:
            # Inductor stores long sums in between, and fuses that with the rest where dims are the result's, in the
            # order in which they lie: of what is read by index it knows no strides.
            terms = [joined(term) for term in terms]
            sizes = [-1] if last and times > 1 else [1, channels * times, *[1] * rank]
        if bias is not None:
            terms.append(cast(method("reshape", bias, sizes), wide))
        y = functools.reduce(functools.partial(call, operator.add), terms)
        y = cast(y, before.dtype)
        y = joined(y) if is_one else y
        y = method("movedim", y, -1, 1) if last and times > 1 else y
        if value(y).stride() != before.stride():  # the convolution gives one of two formats, whatever x lies in
            y = method("clone", y, memory_format=memory_format(before.dim(), is_last))
    node.replace_all_uses_with(y)
    graph.erase_node(node)
