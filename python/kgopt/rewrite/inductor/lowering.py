"""Memory formats of kgopt's ops in code that Inductor compiles.

Inductor computes convolutions in channels_last where it expects that to be faster, whatever the format of the model. It
gives a custom op the strides that the op saw in eager mode. So each norm between two convolutions of a contiguous model
would cost two copies of its input's size: one in front of it, one behind it. The ops listed here work in either format
and return the format that they are given, so their activations stay as they lie. All other tensors of a call, and
activations that lie in neither format, get the strides of eager mode.

The second cost is of the same kind: PyTorch's GroupNorm on CUDA returns a contiguous tensor for one in channels_last,
and the graph that Dynamo captures says so (``contiguous()`` behind kgopt's norm). In Inductor's graph nothing depends
on strides any more, and the copy goes.

Convolutions keep the format of what they read, too; their weights get the strides of eager mode.

Autograd and autocast have nothing to do in code that Inductor wrote. Their kernels of kgopt's ops are Python's, so the
code calls ``below`` of an op, which passes them by: on the CPU half the time of a small call.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from kgopt.ops.registry import RECORDS
from kgopt.torch_private import inductor_lowering

_NORMS = (
    *("group_norm", "group_norm_add", "group_norm_prelu", "group_norm_maps", "group_norm_moments"),
    *("group_norm_by_sample", "channel_norm", "activation"),
)
_NORMS_FORWARD = ("group_norm_fwd", "group_norm_add_fwd", "group_norm_prelu_fwd", "group_norm_by_sample_fwd")
_OTHERS = (
    *("group_norm_backward", "group_norm_prelu_backward", "channel_norm_backward", "activation_backward"),
    *("group_norm_by_sample_backward", "group_norm_add_leaky_relu_backward"),
    *("group_norm_mean", "group_norm_mean_fwd", "group_norm_mean_backward", "group_stats", "group_stats_backward"),
    *("max_pool", "pad_replicate", "upsample_linear", "upsample_nearest"),
    *("upsample_linear_backward", "upsample_nearest_backward"),
)
# Of these x alone: nothing tells a residual's format from a weight's.
_CONVOLUTIONS = ("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d")
# Arguments that are given in channels_last whatever eager mode gave.
_LAST = {"scaled_half": (0,), "conv_scaled_half": (0, 4), "conv_scaled_half_backward": (0, 1)}
_IN_FORMAT = torch.ops.kgopt.in_format.default
_CLONE = torch.ops.aten.clone.default


def _overload(name: str) -> Any:
    return getattr(torch.ops.kgopt, name).default


_GIVE_A_TENSOR = {_overload(name) for name in _NORMS}
_GIVE_SEVERAL = {_overload(name) for name in _NORMS_FORWARD}
NORMS = _GIVE_A_TENSOR | _GIVE_SEVERAL  # the first argument is the tensor


# ----------------------------------------------------------------------------------------------------------------------
# Inputs


def _dense(size: Any, channels_last: bool) -> list[Any]:
    """Strides of a tensor of four or five dims."""
    strides: list[Any] = [math.prod(size[i + 1 :]) for i in range(len(size))]
    if channels_last:
        inner = [size[1] * math.prod(size[i + 1 :]) for i in range(2, len(size))]
        strides = [size[1] * math.prod(size[2:]), 1, *inner]
    return strides


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


class _Formats:
    """The constraint that Inductor asks before it lowers a call."""

    def __init__(self, parts: Sequence[Any], count: int | None = None) -> None:
        self.ir_node, self.external, self.flexible, self.view, self.virtual = parts
        self.count = count  # of arguments that may be activations; None: all

    def __call__(self, node: fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The arguments, copied where they have to be."""
        given = [*node.args, *node.kwargs.values()]
        found = [*args, *kwargs.values()]
        activations = self._activations(given, found)
        channels_last = self._channels_last([(given[i], found[i]) for i in activations])
        for i, (fx_arg, arg) in enumerate(zip(given, found, strict=True)):
            if not isinstance(arg, self.ir_node):
                continue
            if i in activations and channels_last is not None:
                strides = _dense(list(arg.get_size()), channels_last)
            elif isinstance(_value(fx_arg), Tensor):
                strides = list(_value(fx_arg).stride())
            else:
                continue
            found[i] = self.external.require_exact_strides(arg, strides)
        return tuple(found[: len(args)]), dict(zip(kwargs, found[len(args) :], strict=True))

    def _activations(self, given: list[Any], found: list[Any]) -> list[int]:
        """Those that share a format: of the rank, the samples and the channels of the first one."""
        asked = found[: self.count]
        ranked = [i for i, arg in enumerate(asked) if isinstance(arg, self.ir_node) and len(arg.get_size()) in (4, 5)]
        if not ranked:
            return []
        size = found[ranked[0]].get_size()

        def is_alike(arg: Any) -> bool:
            if len(arg.get_size()) != len(size):
                return False
            return all(self._equal(a, b) for a, b in zip(arg.get_size()[:2], size[:2], strict=True))

        return [i for i in ranked if is_alike(found[i]) and isinstance(_value(given[i]), Tensor)]

    def _equal(self, a: Any, b: Any) -> bool:
        return bool(self.virtual.graph.sizevars.statically_known_equals(a, b))

    def _channels_last(self, pairs: list[tuple[Any, Any]]) -> bool | None:
        """Whether the first tensor that is in memory lies so; where none is, what Inductor prefers. None: eager's."""
        free = False
        for _, arg in pairs:
            strides, size = _fixed_strides(arg, self.flexible), list(arg.get_size())
            if strides is None:
                free = free or not isinstance(getattr(arg, "data", None), self.view)
                continue
            for channels_last in (False, True):
                if _is_strided(self.virtual.graph, strides, _dense(size, channels_last), size):
                    return channels_last
            return None
        graph = self.virtual.graph
        preferred = getattr(graph, "nodes_prefer_channels_last", ())
        prefers = getattr(graph, "layout_opt", False) and any(node in preferred for node, _ in pairs)
        return True if free and prefers else None


class _ChannelsLast(_Formats):
    """The constraint of an op that works in channels_last alone."""

    def __init__(self, parts: Sequence[Any], places: Sequence[int]) -> None:
        super().__init__(parts)
        self.places = places

    def _activations(self, given: list[Any], found: list[Any]) -> list[int]:
        return [i for i in self.places if i < len(found) and isinstance(found[i], self.ir_node)]

    def _channels_last(self, pairs: list[tuple[Any, Any]]) -> bool | None:
        return True


def _as_it_lies(node: fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The constraint of an op that reads any format."""
    return args, kwargs


def install() -> None:
    """Once Inductor's lowerings are there."""
    found = inductor_lowering()
    if found is None:
        return
    make_fallback, lowerings, *parts = found
    flexible: dict[str, Any] = dict.fromkeys((*_NORMS, *_NORMS_FORWARD, *_OTHERS), _Formats(parts))
    flexible.update(dict.fromkeys(_CONVOLUTIONS, _Formats(parts, 1)))
    flexible.update({name: _ChannelsLast(parts, places) for name, places in _LAST.items()})
    flexible["in_format"] = _as_it_lies
    fixed = _Formats(parts, 0)
    for name in RECORDS:
        op = _overload(name)
        make_fallback(op, layout_constraint=flexible.get(name, fixed), warn=False)
        lowerings[op] = _below(op, lowerings[op], parts[-1])
    _, external, free, _, virtual = parts
    lowerings[_IN_FORMAT] = _in_format(lowerings[_IN_FORMAT], external, free, virtual)


def _in_format(lower: Callable[..., Any], external: Any, flexible: Any, virtual: Any) -> Callable[..., Any]:
    """``lower``, the lowering of ``in_format``, which copies; what is still to be written is written so at once."""

    @functools.wraps(lower)
    def lowered(x: Any, channels_last: Any, dtype: Any = None) -> Any:
        graph = virtual.graph
        # A result of the graph that a caller sees is a tensor of its own, as the op's is.
        if graph.current_node in graph.user_visible_output_strides or dtype not in (None, x.get_dtype()):
            return lower(x, channels_last, dtype)
        size, strides = list(x.get_size()), _fixed_strides(x, flexible)
        # What lies in the other format has to be copied, which the op does faster than Inductor's kernel.
        lies = [strides is not None and _is_strided(graph, strides, _dense(size, f), size) for f in (False, True)]
        if lies[not channels_last] and not lies[channels_last]:
            return lower(x, channels_last, dtype)
        return external.require_exact_strides(x, _dense(size, channels_last))

    return lowered


def _fixed_strides(arg: Any, flexible: Any) -> Any:
    """Strides of what is in memory already; None: it can be written in any format."""
    try:
        layout = arg.get_layout()
    except (AttributeError, NotImplementedError):
        return None
    return None if isinstance(layout, flexible) else layout.stride


def _is_strided(graph: Any, strides: Any, wanted: Any, size: Any) -> bool:
    """Whether these are the strides, but for those of dims of one."""

    def equal(a: Any, b: Any) -> bool:
        return bool(graph.sizevars.statically_known_equals(a, b))

    return all(equal(a, b) or equal(n, 1) for a, b, n in zip(strides, wanted, size, strict=True))


def _below(op: Any, lower: Callable[..., Any], virtual: Any) -> Callable[..., Any]:
    """``lower``, the lowering of an op, whose call in the code is that of ``op.below``: see ops/calls.py."""

    @functools.wraps(lower)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        graph = virtual.graph
        known = len(graph.operations)
        made = lower(*args, **kwargs)
        if graph.cpp_wrapper or getattr(graph, "fx_wrapper", False):  # the code is no Python
            return made
        for operation in graph.operations[known:]:
            if getattr(operation, "op_overload", None) is op:
                operation.python_kernel_name = f"{operation.python_kernel_name}.below"
        return made

    return lowered


# ----------------------------------------------------------------------------------------------------------------------
# Results


def is_needless(node: fx.Node) -> bool:
    """Whether a node copies a norm's result, which nothing else reads, to another format."""
    y = node.args[0] if node.args else None
    if not isinstance(y, fx.Node) or len(y.users) != 1:
        return False
    if node.kwargs.get("memory_format") is not torch.contiguous_format:
        return False
    if y.target in _GIVE_A_TENSOR:
        return True
    made = y.args[0] if y.target is operator.getitem and y.args[1] == 0 else None
    return isinstance(made, fx.Node) and made.target in _GIVE_SEVERAL


def leave_out(graph: fx.Graph, node: fx.Node) -> None:
    """Takes such a copy out of a graph."""
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.erase_node(node)
