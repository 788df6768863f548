"""Biases in front of instance norms in captured graphs: convolutions are computed without them.

A norm of each channel by itself takes out what is constant in a channel, so such a bias changes nothing and its
gradient is zero. PyTorch and Inductor add it in a pass over the convolution's result, and sum that result's gradient in
another.

Without the bias the values are as accurate or better: digits that a large bias would take from the convolution's result
are kept. Where the bias is not finite eager results are NaN. That is kept by the norm's own shift, to which 0 times the
bias is added: work on one value a channel, through which the bias also gets its gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from kgopt.rewrite.captured.passes.plain import cast_of, group_norm_in_float32
from kgopt.rewrite.captured.values import value
from kgopt.rewrite.measure import policy
from kgopt.rewrite.pytorch import originals

_BIAS_OF_CONV = 2  # its place among the arguments
_CONVS = frozenset(
    f
    for f in (
        *(F.conv1d, F.conv2d, F.conv3d),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    )
    if originals.is_torchs(f)
)
_OF_GROUPS = ("input", "num_groups", "weight", "bias", "eps")
_OF_INSTANCES = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
# The arguments of norms, by function; kgopt's own stands for PyTorch's with a cast around it.
_NORMS: dict[Any, tuple[str, ...]] = {
    f: names for f, names in ((F.group_norm, _OF_GROUPS), (F.instance_norm, _OF_INSTANCES)) if originals.is_torchs(f)
}
_NORMS[group_norm_in_float32] = _OF_GROUPS


def leave_out(graph_module: fx.GraphModule, always: bool) -> list[str]:
    """Leaves such biases out of a graph of Dynamo's. Names of the convolutions' nodes. ``always``: on the CPU, too,
    where PyTorch adds them on the way.
    """
    graph, done = graph_module.graph, []
    for conv in list(graph.nodes):
        bias = _bias_of(conv)
        if bias is None or not (always or policy.default(value(conv).device.type)):
            continue
        norm = _norm_behind(conv)
        if norm is not None and value(bias).shape[0] == value(norm).shape[1]:
            _write(graph, conv, bias, norm)
            done.append(conv.name)
    return done


def _bias_of(conv: fx.Node) -> fx.Node | None:
    """Of a convolution of samples, which is all that is known to have channels in dim 1."""
    if conv.op != "call_function" or conv.target not in _CONVS or not originals.runs_as_is(conv.target):
        return None
    args, kwargs = conv.args, conv.kwargs
    bias: Any = args[_BIAS_OF_CONV] if len(args) > _BIAS_OF_CONV else kwargs.get("bias")
    weight: Any = args[1] if len(args) > 1 else kwargs.get("weight")
    if not all(_is_plain(value(node)) for node in (bias, weight, conv)):
        return None
    return bias if value(bias).dim() == 1 and value(conv).dim() == value(weight).dim() else None


def _is_plain(t: Any) -> bool:
    """Of no other class, and not wrapped by torch.func, whose tensors hide dims and cannot be computed with here."""
    return isinstance(t, Tensor) and hasattr(t, "fake_mode") and t.is_floating_point() and t.layout is torch.strided


def _norm_behind(conv: fx.Node) -> fx.Node | None:
    """The norm that alone reads a convolution's result, perhaps through casts that nobody else reads."""
    node = conv
    while len(node.users) == 1:
        (reader,) = node.users
        if reader.target in _NORMS:
            return reader if _takes_out(reader, node) else None
        cast = cast_of(reader)
        # As what it casts, not as the tensor whose dtype it takes. Integers would be other ones.
        if cast is None or any(a is node for a in reader.args[1:]) or not cast[1].is_floating_point:
            return None
        node = reader
    return None


def _takes_out(norm: fx.Node, x: fx.Node) -> bool:
    """Whether a norm of x takes out what is constant in a channel, and x is only what it normalizes."""
    given = _given(norm)
    if norm.op != "call_function" or not originals.runs_as_is(norm.target) or given is None:
        return False
    others = {name: argument for name, argument in given.items() if name != "input"}
    if given.get("input") is not x or any(argument is x for argument in others.values()):
        return False
    held, made, shift = value(x), value(norm), given.get("bias")
    if not _is_plain(held) or not _is_plain(made) or made.shape != held.shape:
        return False
    if shift is not None and not (_is_plain(value(shift)) and value(shift).shape == held.shape[1:2]):
        return False
    if norm.target is F.instance_norm:
        # Running statistics hold the mean with the bias.
        has_own = given.get("running_mean") is None and given.get("running_var") is None
        return has_own and given.get("use_input_stats", True) is True
    channels, groups = held.shape[1], given.get("num_groups")
    return type(channels) is int and type(groups) is int and groups == channels


def _given(norm: fx.Node) -> Mapping[str, Any] | None:
    """The arguments of a norm by name; None: in a way that is not known."""
    names = _NORMS[norm.target]
    given = {**dict(zip(names, norm.args, strict=False)), **norm.kwargs}
    is_known = len(given) == len(norm.args) + len(norm.kwargs) and given.keys() <= set(names)
    return given if is_known else None


def _write(graph: fx.Graph, conv: fx.Node, bias: fx.Node, norm: fx.Node) -> None:
    given = _given(norm)
    assert given is not None  # it was asked before
    shift = given.get("bias")
    # The dtype in which the norm takes parameters in any case: that of what it normalizes.
    dtype = value(given["input"]).dtype if norm.target is not group_norm_in_float32 else torch.float32
    if shift is not None:
        dtype = value(shift).dtype

    def noted(made: fx.Node, by: fx.Node, y: Tensor) -> fx.Node:
        made.meta.update({**by.meta, "example_value": y})
        return made

    def method(name: str, by: fx.Node, of: fx.Node, *args: Any) -> fx.Node:
        y = getattr(value(of), name)(*fx.map_arg(args, value))
        return noted(graph.call_method(name, (of, *args)), by, y)

    with graph.inserting_before(conv):
        # 0 where the bias is finite. Filling stops the gradient, which times 0 would not be 0 where a sum in half
        # precision has overflowed.
        none = method("masked_fill", conv, method("mul", conv, bias, 0), method("isfinite", conv, bias), 0)
        if value(none).dtype is not dtype:
            none = method("to", conv, none, dtype)
    if shift is not None:
        with graph.inserting_before(norm):
            y = operator.add(value(shift), value(none))
            none = noted(graph.call_function(operator.add, (shift, none)), norm, y)
    _replace(conv, _BIAS_OF_CONV, "bias", None)
    _replace(norm, _NORMS[norm.target].index("bias"), "bias", none)


def _replace(node: fx.Node, place: int, name: str, argument: Any) -> None:
    if len(node.args) > place:
        node.update_arg(place, argument)
    else:
        node.update_kwarg(name, argument)
