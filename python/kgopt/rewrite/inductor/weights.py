"""Weights of convolutions that run in channels_last, and their gradients, in graphs that Inductor compiles.

A convolution in channels_last reads a weight that lies so, but a model's parameters are contiguous, and under autocast
float32. Inductor then writes the half copy twice in one kernel, contiguous for the backward and in channels_last for
the forward. Both of its sides cannot be read and written in whole lines, so it takes ten times what the bytes need. The
backward makes its contiguous one channels_last again. The gradient comes in channels_last, too, and autograd copies it
to the parameter's format.

Here the cast is kgopt's ``in_format`` once, for forward and backward, and so is the cast of the gradient back.

The gradient of a convolution's result may be a part of a concatenation's gradient. In channels_last that is no dense
tensor, which ATen's convolution makes dense by single elements; a clone in front is a kernel of Inductor's.

Casts and gradients are found in the graph of forward and backward together, before it is divided: only there is the
format of a gradient's parameter known.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor, fx

from kgopt._layout import FORMATS
from kgopt.torch_private import outside_of_tracing

BYTES = 1 << 16  # of a float32 weight; a launch costs more than a smaller one
CHANNELS = 24  # of a weight, from which on in_format is no copy of ATen's (csrc/layout/layout_api.cpp)
DEVICES = ("cuda",)
_HALF = (torch.float16, torch.bfloat16)
_ATEN = torch.ops.aten
_FORWARD, _BACKWARD = _ATEN.convolution.default, _ATEN.convolution_backward.default
_OWN_BACKWARD = torch.ops.kgopt.conv_backward.default, torch.ops.kgopt.conv_scaled_half_backward.default
_IN_FORMAT = torch.ops.kgopt.in_format.default


def lay(graph: fx.Graph) -> None:
    """Changes a joint graph, or one of inference, in place."""
    parameters: dict[fx.Node, fx.Node] = {}  # of weights as convolutions read them
    for cast in calls(graph, torch.ops.prims.convert_element_type.default):
        if _is_cast_of_weight(cast):
            parameter = cast.args[0]
            parameters[_replace(graph, cast, (parameter, True, cast.args[1]))] = parameter
    for backward in calls(graph, _BACKWARD):
        weight = backward.args[2]
        parameter = weight if weight.op == "placeholder" else parameters.get(weight)
        if parameter is not None:
            _lay_gradient(graph, backward, parameter)
    for backward in calls(graph, _BACKWARD, *_OWN_BACKWARD):
        _make_dense(graph, backward)


def lay_what_is_read(graph: fx.Graph) -> None:
    """Weights that convolutions read as they are, without a cast, in the graph of a forward or a backward.

    Not in the joint graph: there the copy would be kept from the forward to the backward, beside the parameter.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in calls(graph, _FORWARD, _BACKWARD):
        weight = node.args[1 if node.target is _FORWARD else 2]
        is_read = node.target is _FORWARD or node.args[10][0]
        if not is_read or not _is_parameter(weight) or not _reads_weight_last(node, weight):
            continue
        if weight not in copies:
            with graph.inserting_before(node):
                copies[weight] = added(graph, _IN_FORMAT, (weight, True), {})
        node.replace_input_with(weight, copies[weight])


def calls(graph: fx.Graph, *targets: Any) -> list[Any]:
    """A graph's calls of these functions, in order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def _value(node: Any) -> Tensor | None:
    """The fake tensor of a node, if it is on a device that has the kernels, in one of the formats, of known rank."""
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(found, Tensor) or found.dim() not in FORMATS or found.device.type not in DEVICES:
        return None
    return found if _has_kernel(found.device) else None


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    """Whether the op runs there: a build without CUDA, and one without the GPU's architecture, cannot."""
    with outside_of_tracing() as is_outside, torch.no_grad():
        if not is_outside:
            return False
        try:
            _IN_FORMAT(torch.zeros(1, CHANNELS, 1, 2, device=device), True, torch.float16)
        except RuntimeError:
            return False
    return True


def _lies_last(t: Tensor | None) -> bool:
    """Whether it is in channels_last and not contiguous as well. Sizes that are not known are not asked for."""
    return _channels_apart(t) == 1


def _channels_apart(t: Tensor | None) -> int:
    """How many times a position's channels fit between it and the next one, if the channels are innermost; 0: else.

    More than once: it is a part of the channels of a larger tensor.
    """
    if t is None or all(type(s) is int and s == 1 for s in t.shape[2:]):
        return 0
    channels, innermost, step = t.shape[1], t.stride(1), t.stride(-1)
    if not all(type(n) is int for n in (channels, innermost, step)) or channels == 1 or innermost != 1:
        return 0
    return 1 if step == channels else 2 if step > channels else 0


def _is_parameter(node: Any) -> bool:
    """Whether it is an input that lies contiguous, large enough for a kernel of its own."""
    t = _value(node)
    if t is None or node.op != "placeholder" or not all(type(s) is int for s in t.shape):
        return False
    positions = t.shape[2:].numel()
    return bool(
        t.is_contiguous() and positions > 1 and t.shape[1] >= CHANNELS and t.numel() * t.element_size() >= BYTES
    )


def _is_cast_of_weight(cast: fx.Node) -> bool:
    """Whether it is one of autocast's, which convolutions in channels_last alone read."""
    parameter, dtype = cast.args
    if not _is_parameter(parameter) or parameter.meta["val"].dtype is not torch.float32 or dtype not in _HALF:  # type: ignore[union-attr]
        return False
    return bool(cast.users) and all(_reads_weight_last(user, cast) for user in cast.users)


def _reads_weight_last(user: fx.Node, weight: fx.Node) -> bool:
    """Whether a node is a convolution, or its gradients, in channels_last, and this is its weight and no more."""
    if user.target is _FORWARD:
        place, is_last = 1, _lies_last(_value(user))
    elif user.target is _BACKWARD:
        # Without a gradient of x nobody reads the weight.
        place, is_last = 2, not user.args[10][0] or _lies_last(_value(user.args[1]))  # type: ignore[index]
    else:
        return False
    return is_last and [i for i, arg in enumerate(user.args) if arg is weight] == [place]


def _replace(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    """``in_format`` of these arguments in a node's place."""
    with graph.inserting_before(node):
        new = added(graph, _IN_FORMAT, args, node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def added(graph: fx.Graph, target: Any, args: tuple[Any, ...], meta: dict[str, Any], **kwargs: Any) -> fx.Node:
    """A call at the graph's place, with what is known of another node beside its values."""
    with torch.no_grad():
        made = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)  # type: ignore[misc]
    new = graph.call_function(target, args, kwargs)
    new.meta.update({k: v for k, v in meta.items() if k not in ("tensor_meta", "eager_input_vals")})
    new.meta["val"] = made
    return new


def _lay_gradient(graph: fx.Graph, backward: fx.Node, parameter: fx.Node) -> None:
    """The gradient of a parameter as a contiguous tensor, where the graph returns it, and nobody else reads it."""
    made = next((u for u in backward.users if u.target is operator.getitem and u.args[1] == 1), None)
    if made is None or not _is_parameter(parameter) or not _lies_last(_value(made)):
        return
    dtype = parameter.meta["val"].dtype
    (output,) = (node for node in graph.nodes if node.op == "output")
    if made.meta["val"].dtype is dtype:
        if set(made.users) == {output}:
            with graph.inserting_after(made):
                new = added(graph, _IN_FORMAT, (made, False), made.meta)
            output.replace_input_with(made, new)
        return
    casts = list(made.users)
    if len(casts) != 1 or casts[0].target is not torch.ops.prims.convert_element_type.default:
        return
    if casts[0].args[1] is dtype is torch.float32 and set(casts[0].users) == {output}:
        _replace(graph, casts[0], (made, False, dtype))


def _make_dense(graph: fx.Graph, backward: fx.Node) -> None:
    """The gradient of the result, where it is a part of the channels of a tensor in channels_last."""
    dy: Any = backward.args[0]
    t = _value(dy)
    if t is not None and _channels_apart(t) > 1:
        with graph.inserting_before(backward):
            dense = added(graph, _ATEN.clone.default, (dy,), dy.meta, memory_format=FORMATS[t.dim()])
        backward.update_arg(0, dense)
