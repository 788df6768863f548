"""What captured graphs say of their tensors, and real ones of that kind to measure on.

All that rewrites captured graphs asks here. This file knows no norm, no convolution and no op of kgopt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from kgopt._layout import FORMATS
from kgopt.torch_private import outside_of_tracing


def value(node: Any) -> Any:
    """The fake tensor, or the number, that a node stands for."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def is_known(t: Any) -> bool:
    """A floating-point tensor with elements, whose sizes and strides are numbers."""
    if not isinstance(t, Tensor) or not t.is_floating_point() or t.layout is not torch.strided:
        return False
    return all(type(s) is int for s in (*t.shape, *t.stride())) and t.numel() > 0


def may_measure(device: torch.device) -> bool:
    """Whether stand-ins are timed there: on a GPU, which fake tensors may name without there being one."""
    return device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()


def stand_in(t: Tensor, device: Any, channels_last: bool = False) -> Tensor:
    """A tensor of its kind, or the same in channels_last; nothing traces it. On "meta": without values."""
    with outside_of_tracing():
        made = torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device=device)
        if channels_last and t.dim() in FORMATS:
            made = made.contiguous(memory_format=FORMATS[t.dim()])
        # The user's random numbers stay as they are.
        return made if made.is_meta else made.normal_(generator=torch.Generator(made.device).manual_seed(0))


def uses_autocast(graph: fx.Graph) -> bool:
    """Whether it begins or ends autocast somewhere inside."""
    return any("autocast" in str(node.target) for node in graph.nodes)


def name_of(node: fx.Node) -> str:
    """Of the function or the method that it calls."""
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))


def text_of(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> str:
    """Equal for equal graphs, whatever their nodes are called."""
    names = {node: f"%{i}" for i, node in enumerate([*inputs, *nodes])}
    lines = [
        f"{names[node]} = {node.op} {getattr(node.target, '__module__', '')} {name_of(node)} "
        f"{fx.map_arg((node.args, dict(node.kwargs)), names.__getitem__)}"  # type: ignore[arg-type]
        for node in nodes
    ]
    return "\n".join([*lines, " ".join(names[node] for node in outputs)])
