"""fp32 convolutions of training in channels_last on fp16 tensor cores, in graphs that Inductor compiles.

fp16 has TF32's bits at twice the rate (docs/numerics.md). Where TF32 is allowed, what a convolution reads is rounded
once (``scaled_half``, a part of the norm in front of it if it reads nothing else), and forward and backward multiply
the halves (``conv_scaled_half``, ``conv_scaled_half_backward``). The backward keeps the half instead of the float.

Both directions are found in the graph of forward and backward together, before it is divided. Behind autograd: the ops
have no derivative.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from kgopt import _acts
from kgopt._layout import FORMATS, is_dense_channels_last
from kgopt.rewrite.inductor.weights import added, calls
from kgopt.torch_private import outside_of_tracing, schema_of

_LOG = logging.getLogger("kgopt.rewrite")

DEVICES = ("cuda",)
MOST_TAPS = 1024  # csrc/conv3d/norm_conv/scaled_half_params.h
MULTIPLE = 8  # of channels, that the kernels take
_ATEN, _OPS = torch.ops.aten, torch.ops.kgopt
_FORWARD = (_ATEN.convolution.default, _OPS.conv2d.default, _OPS.conv3d.default)
_BACKWARD = (_ATEN.convolution_backward.default, _OPS.conv_backward.default)
_NORM = _OPS.group_norm_fwd.default
_ADD, _CAT, _IN_FORMAT = _ATEN.add.Tensor, _ATEN.cat.default, _OPS.in_format.default
_SCALED_HALF, _CONV = _OPS.scaled_half.default, _OPS.conv_scaled_half.default
_CONV_BACKWARD = _OPS.conv_scaled_half_backward.default
_WHEN = ("recompute", "partitioner_tag")  # what AOTAutograd's partitioner is told of a node


# ----------------------------------------------------------------------------------------------------------------------
# Cost: of an H200, whose kind alone is asked (_has_kernel)

TF32_RATE, HALF_RATE = 280e6, 540e6  # operations a microsecond
PACE = 3.3e6  # bytes a microsecond
LAUNCH = 2.5  # microseconds
WEIGHT_TIME = 1.2e-5  # of scaling a weight for both directions, microseconds
LEAST_CHANNELS = 32  # fewer do not fill fp16's tensor cores
LEAST_GAIN, LEAST_TIME = 0.03, 5.0  # of what is replaced; microseconds
FORWARD_LAUNCHES, BACKWARD_LAUNCHES, ROUNDING_LAUNCHES = 4, 8, 2  # more than without


def predicted_gain(
    n: int,
    c_in: int,
    c_out: int,
    taps: int,
    positions_in: int,
    positions_out: int,
    fused: bool,
    mask: Sequence[bool] = (True, True, True),
    adds: bool = False,
) -> tuple[float, float]:
    """Microseconds of a convolution's forward and backward in TF32, and by halves with what is around them.

    Only what differs counts: products, and passes over memory that one of the two has more than the other.

    Args:
        n: samples.
        c_in: channels that it reads.
        c_out: channels of its result.
        taps: positions of its kernel.
        positions_in: positions of a sample that it reads.
        positions_out: positions of a sample of its result.
        fused: the norm in front of it rounds.
        mask: which of the gradients of x, weight and bias are asked for.
        adds: a sum behind it becomes a part of it.
    """
    before, after = convolution_times(n, c_in, c_out, taps, positions_in, positions_out, mask, adds)
    return before, after + rounding_time(n * c_in * positions_in, fused)


def convolution_times(
    n: int,
    c_in: int,
    c_out: int,
    taps: int,
    positions_in: int,
    positions_out: int,
    mask: Sequence[bool],
    adds: bool = False,
) -> tuple[float, float]:
    """:func:`predicted_gain` without what convolutions of one x share."""
    x_elements, y_elements = n * c_in * positions_in, n * c_out * positions_out
    products = 2.0 * y_elements * c_in * taps * (1 + bool(mask[0]) + bool(mask[1]))
    # A half and its float in the unscaling, for one float that is written; then dy's range, and dy as float and half.
    moved = (2 + 2 + 4 - 4) * y_elements + (4 + 4 + 2) * y_elements
    if mask[0]:
        moved += 4 * x_elements  # dx, as y
    before, after = products / TF32_RATE, products / HALF_RATE + c_in * c_out * taps * WEIGHT_TIME
    if adds:  # a kernel that reads two and writes one, for one that the unscaling reads
        before += 12 * y_elements / PACE + LAUNCH
        moved += 4 * y_elements
    return before, after + moved / PACE + (FORWARD_LAUNCHES + BACKWARD_LAUNCHES) * LAUNCH


def rounding_time(elements: int, fused: bool) -> float:
    """Microseconds that x takes more, or, below 0, less."""
    if fused:  # the norm writes a half, which the convolution reads
        return -(2 + 2) * elements / PACE
    return (4 + 4 + 2) * elements / PACE + ROUNDING_LAUNCHES * LAUNCH


# ----------------------------------------------------------------------------------------------------------------------
# What is found


@dataclass
class _Pair:
    """A convolution and its gradients."""

    forward: fx.Node
    backward: fx.Node
    geometry: tuple[list[int], ...]  # stride, padding, dilation
    mask: list[bool]

    @property
    def nodes(self) -> tuple[fx.Node, fx.Node]:
        return self.forward, self.backward

    @property
    def x(self) -> fx.Node:
        return _in_any_format(_bound(self.forward)["x"])  # type: ignore[no-any-return]

    def times(self) -> tuple[float, float]:
        given = _bound(self.forward)
        x, weight, y = (t.meta["val"].shape for t in (given["x"], given["weight"], self.forward))
        sizes = y[0], x[1], y[1], math.prod(weight[2:]), math.prod(x[2:]), math.prod(y[2:])
        return convolution_times(*sizes, self.mask, _sum_behind(self.forward) is not None)


def replace(graph: fx.Graph) -> None:
    """Changes a joint graph in place. One of inference has no gradients and stays as it is."""
    of_x: dict[fx.Node, list[_Pair]] = {}
    for pair in _pairs(graph):
        of_x.setdefault(pair.x, []).append(pair)
    readers = {x: _readers(pairs) for x, pairs in of_x.items()}
    cats = {node for x in of_x for node in _Joined(x, readers[x]).nodes}
    # Concatenations first: what they leave is read by other convolutions alone.
    for key, pairs in sorted(of_x.items(), key=lambda item: not _Joined(item[0], readers[item[0]]).parts):
        x = pairs[0].x  # another node where the one before was replaced
        joined = _Joined(x, readers[key])
        sources = [_Source(part, _norm_of(part, readers.get(part, set()) | cats)) for part in joined.parts or [x]]
        chosen = _choose(pairs, sources)
        if not chosen:
            continue
        own = readers[key] | set(joined.nodes)
        for source in sources:  # what others read is rounded apart, until they are replaced, too
            is_alone = {user for user in source.x.users if user.target is not _SCALED_HALF} <= own
            source.norm = source.norm if is_alone and len(chosen) == len(pairs) else None
        unread = [*(node for node in readers[key] if node.target is _IN_FORMAT), *joined.nodes]
        _write(graph, chosen, sources, unread)
    if count := len(calls(graph, _CONV)):
        _LOG.info("%d convolutions run on fp16 tensor cores", count)


@dataclass
class _Source:
    """What is rounded, and the norm that rounds it, if all who read it read halves."""

    x: fx.Node
    norm: fx.Node | None


def _in_any_format(x: Any) -> Any:
    """What a node copies to channels_last, or the node: it is rounded from any format."""
    is_copy = isinstance(x, fx.Node) and x.target is _IN_FORMAT and len(x.args) == 2 and not x.kwargs
    return x.args[0] if is_copy and x.args[1] is True else x


def _readers(pairs: list[_Pair]) -> set[fx.Node]:
    """Convolutions and their gradients, and copies to channels_last that nothing else reads."""
    nodes = {node for pair in pairs for node in pair.nodes}
    return nodes | {x for pair in pairs if (x := _bound(pair.forward)["x"]) is not pair.x and set(x.users) <= nodes}


class _Joined:
    """A concatenation of channels that convolutions alone read: its parts, and the nodes that make it; else none."""

    def __init__(self, cat: fx.Node, readers: set[fx.Node]) -> None:
        self.parts: list[fx.Node] = []
        self.nodes: list[fx.Node] = []
        if cat.target is not _CAT or not set(cat.users) <= readers or len(cat.args) < 2 or cat.args[1] != 1:
            return
        given: Any = cat.args[0]
        parts = [_in_any_format(part) for part in given]
        values = [_float_of(part) for part in parts]
        fit = all(t is not None and t.device.type in DEVICES and t.shape[1] % MULTIPLE == 0 for t in values)
        if fit and len(set(parts)) == len(parts):
            self.parts = parts
            self.nodes = [cat, *(copy for copy in given if copy not in parts and set(copy.users) <= {cat})]


def _pairs(graph: fx.Graph) -> list[_Pair]:
    """Those that the ops take. Not two that read the same: whose gradients are whose nobody can say."""
    backward: dict[Any, list[fx.Node]] = {}
    for node in calls(graph, *_BACKWARD):
        backward.setdefault(_key(node), []).append(node)
    forward: dict[Any, list[fx.Node]] = {}
    for node in calls(graph, *_FORWARD):
        forward.setdefault(_key(node), []).append(node)
    found = []
    for key, nodes in forward.items():
        others = backward.get(key, ())
        if key is not None and len(nodes) == len(others) == 1:
            pair = _Pair(nodes[0], others[0], tuple(map(list, key[2:])), list(map(bool, _bound(others[0])["mask"])))
            if _is_taken(pair):
                found.append(pair)
    return found


def _bound(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by name, for ATen's ops by kgopt's names."""
    arguments = schema_of(node.target).arguments
    given = {a.name: a.default_value for a in arguments}
    given.update(zip(given, node.args, strict=False))
    given.update(node.kwargs)
    for ours, theirs in (("x", "input"), ("dy", "grad_output"), ("mask", "output_mask")):
        if theirs in given:
            given[ours] = given.pop(theirs)
    return given


def _key(node: fx.Node) -> Any:
    """x, weight and geometry of one that the ops may take; None: of another one."""
    given = _bound(node)
    x, weight = given["x"], given["weight"]
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or _value(x) is None:
        return None
    if given.get("transposed") or given["groups"] != 1:
        return None
    if given.get("backend", "auto") != "auto" or given.get("allow_tf32") not in (None, True):
        return None
    dims = x.meta["val"].dim() - 2
    geometry = [_of_dims(given[name], dims) for name in ("stride", "padding", "dilation")]
    return None if None in geometry else (x, weight, *geometry)


def _of_dims(given: Any, dims: int) -> tuple[int, ...] | None:
    numbers = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    numbers = numbers * dims if len(numbers) == 1 else numbers
    return numbers if len(numbers) == dims and all(type(n) is int and n >= 0 for n in numbers) else None


def _value(node: Any) -> Tensor | None:
    """The fake tensor of an fp32 node that lies dense in channels_last on a device that has the kernels."""
    t = _float_of(node)
    if t is None or t.dim() not in FORMATS or t.device.type not in DEVICES or t.numel() == 0:
        return None
    return t if is_dense_channels_last(t) and _has_kernel(t.device) else None


def _float_of(node: Any) -> Tensor | None:
    """Of an fp32 node of known sizes."""
    t = node.meta.get("val") if isinstance(node, fx.Node) else None
    is_known = isinstance(t, Tensor) and t.dtype is torch.float32 and t.layout is torch.strided
    return t if is_known and all(type(s) is int for s in (*t.shape, *t.stride())) else None  # type: ignore[union-attr]


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    """Whether the op runs there: a build without CUDA cannot. The rates above are of one kind of GPU."""
    with outside_of_tracing() as is_outside, torch.no_grad():
        if not is_outside or (device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0)):
            return False
        x = torch.zeros(1, MULTIPLE, 2, 2, device=device).contiguous(memory_format=torch.channels_last)
        try:
            _SCALED_HALF(x)
        except RuntimeError:
            return False
    return True


def _is_taken(pair: _Pair) -> bool:
    """Whether the ops take it, and are written for so many channels."""
    given, backward = _bound(pair.forward), _bound(pair.backward)
    y, weight, dy = _value(pair.forward), _float_of(given["weight"]), _float_of(backward["dy"])
    if y is None or weight is None or dy is None or dy.shape != y.shape or not (pair.mask[0] or pair.mask[1]):
        return False
    if given["bias"] is not None and _float_of(given["bias"]) is None:
        return False
    x = given["x"].meta["val"]
    channels, taps = (x.shape[1], y.shape[1]), math.prod(weight.shape[2:])
    if tuple(weight.shape[:2]) != channels[::-1] or not 0 < taps <= MOST_TAPS:
        return False
    if min(channels) < LEAST_CHANNELS or any(c % MULTIPLE for c in channels):
        return False
    if pair.mask[1] and not _has_weight_gradient(pair.geometry, weight.shape[2:], x.shape[2:]):
        return False
    return all(_is_part(user, pair.mask) for user in pair.backward.users)


def _has_weight_gradient(geometry: tuple[list[int], ...], kernel: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether the kernel for the gradient of a weight, plan_wgrad in csrc, has a plan: else the op is an error."""
    stride, padding, dilation = geometry
    if max(*kernel, *padding) > 64 or max(sizes) > 1 << 20:
        return False
    if tuple(kernel[-2:]) != (3, 3) or any(d != 1 for d in dilation) or max(stride) > 2:
        return False
    return stride[-1] == stride[-2] and (stride[-1] == 1 or sizes[-1] % 2 == 0)


def _is_part(user: fx.Node, mask: Sequence[bool]) -> bool:
    """A gradient that was asked for, or one that nobody reads: in place of those ATen gives None."""
    return user.target is operator.getitem and (mask[user.args[1]] or not user.users)  # type: ignore[index]


def _norm_of(x: fx.Node, readers: set[fx.Node]) -> fx.Node | None:
    """The norm, with activations, whose result these nodes, and what rounds it, and nobody else reads."""
    norm: Any = x.args[0] if x.target is operator.getitem and x.args[1] == 0 else None
    if not isinstance(norm, fx.Node) or norm.target is not _NORM:
        return None
    if not all(user in readers or user.target is _SCALED_HALF for user in x.users):
        return None
    given = _bound(norm)
    if _value(given["x"]) is None or given["pre_act"] != "none" or not _keeps_bounds(given["act"]):
        return None
    if type(given["num_groups"]) is not int or type(given["eps"]) is not float:
        return None
    if any(given[name] is not None and _float_of(given[name]) is None for name in ("weight", "bias")):
        return None
    parts = [user.args[1] if user.target is operator.getitem else None for user in norm.users]
    return norm if parts.count(0) == 1 and set(parts) <= {0, 1, 2} else None


def _keeps_bounds(act: str) -> bool:
    """Whether the largest magnitude over an interval is known from its ends: scaled_half_act_refusal in csrc."""

    def keeps(name: str, numbers: tuple[float, ...]) -> bool:
        if name in ("leaky_relu", "elu"):
            return numbers[0] >= 0
        if name == "softplus":  # where it becomes a line it falls
            return numbers[0] > 0 and numbers[1] >= 10
        return name not in ("threshold", "tanhshrink")

    return all(keeps(one.name, one.parameters) for one in _acts.parse(act))


def _sum_behind(forward: fx.Node) -> fx.Node | None:
    """The sum that alone reads a convolution, and that no kernel of Inductor's would compute on its way."""
    (add,) = forward.users if len(forward.users) == 1 else (None,)
    if add is None or add.target is not _ADD or len(add.args) != 2 or add.kwargs.get("alpha", 1) != 1:
        return None
    other, y, total = _value(_other_of(add, forward)), forward.meta["val"], _value(add)
    if other is None or total is None or not other.shape == total.shape == y.shape:
        return None
    if total.stride() != y.stride() or any(add.meta.get(key) != forward.meta.get(key) for key in _WHEN):
        return None
    return add if all(map(_is_no_pointwise, add.users)) else None


def _other_of(add: fx.Node, forward: fx.Node) -> Any:
    """None where both are the convolution."""
    others = [arg for arg in add.args if arg is not forward]
    return others[0] if len(others) == 1 else None


def _is_no_pointwise(user: fx.Node) -> bool:
    if user.op == "output" or user.target in (*_FORWARD, *_BACKWARD):
        return True
    return getattr(user.target, "namespace", "") == "kgopt"


def _choose(pairs: list[_Pair], sources: list[_Source]) -> list[_Pair]:
    """Those that are replaced. Together they pay for what they share: all with norms that round, or some without."""
    times = [pair.times() for pair in pairs]
    gaining = [i for i, (before, after) in enumerate(times) if after < before]
    best, chosen = 0.0, []
    for fuses, ones in ((True, list(range(len(pairs)))), (False, gaining)):
        before = sum(times[i][0] for i in ones)
        shared = sum(
            rounding_time(source.x.meta["val"].numel(), fuses and source.norm is not None) for source in sources
        )
        if len(sources) > 1:  # halves are joined instead of floats
            shared -= (4 + 4 - 2 - 2) * sum(source.x.meta["val"].numel() for source in sources) / PACE
        gain = before - sum(times[i][1] for i in ones) - shared
        if gain >= max(LEAST_GAIN * before, LEAST_TIME) and gain > best:
            best, chosen = gain, [pairs[i] for i in ones]
    return chosen


# ----------------------------------------------------------------------------------------------------------------------
# What is written


def _write(graph: fx.Graph, pairs: list[_Pair], sources: list[_Source], unread: list[fx.Node]) -> None:
    """All of it; where an op does not take what it is given, or gives what lies otherwise, nothing.

    ``unread``: what nothing may read then, readers first.
    """
    made: list[fx.Node] = []
    rounding: list[fx.Node] = []  # of each source
    try:
        replaced = _added_calls(graph, pairs, sources, made, rounding)
        lie_as_before = all(old.meta["val"].stride() == new.meta["val"].stride() for old, new in replaced[::2])
    except Exception as error:
        _LOG.info("a convolution stays in TF32: %s", error)
        lie_as_before = False
    if not lie_as_before:
        for node in reversed(made):
            graph.erase_node(node)
        return
    for old, new in replaced:
        if new.target is _CONV_BACKWARD:
            _move_parts(old, new)
        else:
            old.replace_all_uses_with(new)
        graph.erase_node(old)
    for pair in pairs:
        if pair.forward not in (old for old, _ in replaced):  # the sum was
            graph.erase_node(pair.forward)
    for node in unread:
        if not node.users:
            graph.erase_node(node)
    for source, new in zip(sources, rounding, strict=True):
        for other in [user for user in source.x.users if user.target is _SCALED_HALF and user is not new]:
            own = {part.args[1]: part for part in new.users}
            for part in list(other.users):
                part.replace_all_uses_with(own[part.args[1]])
                graph.erase_node(part)
            graph.erase_node(other)
        if source.norm is not None:
            graph.erase_node(source.x)
            for part in list(source.norm.users):  # mean and rstd
                part.args = (new, part.args[1] + 1)  # type: ignore[operator]
            graph.erase_node(source.norm)


def _added_calls(
    graph: fx.Graph,
    pairs: list[_Pair],
    sources: list[_Source],
    made: list[fx.Node],
    rounding: list[fx.Node],
) -> list[tuple[fx.Node, fx.Node]]:
    """Calls beside those that they are to replace: for each pair forward and backward.

    ``made`` gets all new nodes, ``rounding`` those that round.
    """
    readers = {node for pair in pairs for node in pair.nodes}
    first = next(node for node in graph.nodes if node in readers)
    halves = [_rounded(graph, source, first, made, rounding) for source in sources]
    half, inverse = halves[0]
    if len(sources) > 1:
        with graph.inserting_before(first):
            for i, dim in ((0, 1), (1, 0)):
                made.append(added(graph, _CAT, ([one[i] for one in halves], dim), first.meta))
        half, inverse = made[-2], made[-1]
    replaced: list[tuple[fx.Node, fx.Node]] = []
    for pair in pairs:
        given = _bound(pair.forward)
        add = _sum_behind(pair.forward)
        if any(add is old for old, _ in replaced):  # of two of these
            add = None
        last = add or pair.forward
        residual = None if add is None else _other_of(add, pair.forward)
        with graph.inserting_before(last):
            args = (half, inverse, given["weight"], given["bias"], residual, *pair.geometry)
            made.append(added(graph, _CONV, args, last.meta))
        replaced.append((last, made[-1]))
        with graph.inserting_before(pair.backward):
            args = (_bound(pair.backward)["dy"], half, inverse, given["weight"], *pair.geometry, pair.mask)
            made.append(added(graph, _CONV_BACKWARD, args, pair.backward.meta))
        replaced.append((pair.backward, made[-1]))
    return replaced


def _move_parts(old: fx.Node, new: fx.Node) -> None:
    """Gives another call's gradients in place of these, without those that nobody reads."""
    for part in list(old.users):
        if part.users:
            part.replace_input_with(old, new)
            part.meta["val"] = new.meta["val"][part.args[1]]
        else:
            old.graph.erase_node(part)


def _rounded(
    graph: fx.Graph, source: _Source, first: fx.Node, made: list[fx.Node], rounding: list[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """The half and the inverse of its scales; what AOTAutograd shall compute again, it computes again as a half."""
    x, norm = source.x, source.norm
    args: tuple[Any, ...] = (x,)
    if norm is not None:
        given = _bound(norm)
        args = tuple(given[name] for name in ("x", "num_groups", "weight", "bias", "eps", "act"))
        place, meta = norm, norm.meta
    else:
        others = {first, *(user for user in x.users if user.target is _SCALED_HALF)}
        place = next(node for node in graph.nodes if node in others)
        meta = first.meta | {k: x.meta[k] for k in ("recompute", "ac_graph_id") if k in x.meta}
    with graph.inserting_before(place):
        made.append(added(graph, _SCALED_HALF, args, meta))
        rounding.append(made[-1])
        parts = [_part(graph, made[-1], i, meta if norm is None else x.meta) for i in (0, 1)]
    made += parts
    return parts[0], parts[1]


def _part(graph: fx.Graph, made: fx.Node, i: int, meta: Mapping[str, Any]) -> fx.Node:
    part = graph.call_function(operator.getitem, (made, i))
    part.meta.update({k: v for k, v in meta.items() if k not in ("tensor_meta", "eager_input_vals")})
    part.meta["val"] = made.meta["val"][i]
    return part
