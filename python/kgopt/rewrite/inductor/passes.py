"""All passes over graphs that Inductor compiles, and what has to be known of them when compiled code is called."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from kgopt.ops.precision import conv_tf32_allowed
from kgopt.rewrite.captured.values import value
from kgopt.rewrite.inductor import scaled, weights
from kgopt.torch_private import Passes


def passes() -> Passes:
    """For Inductor, which finds compiled code by the text of these files, and PyTorch's TF32 switch, among others."""
    allows_tf32 = bool(conv_tf32_allowed())
    text = b"".join(Path(str(of)).read_bytes() for of in (__file__, scaled.__file__, weights.__file__))
    version = hashlib.sha256(text).hexdigest() + (" tf32" if allows_tf32 else "")
    return Passes(functools.partial(_join, allows_tf32), weights.lay_what_is_read, version)


def _join(allows_tf32: bool, graph: fx.Graph) -> None:
    if allows_tf32:
        scaled.replace(graph)
    weights.lay(graph)


def may_scale(graph: fx.Graph) -> bool:
    """Whether code that is compiled now from a graph of Dynamo's may call ops that TF32 has to be allowed for."""
    if not conv_tf32_allowed() or not torch.is_grad_enabled():
        return False
    inputs = [value(node) for node in graph.nodes if node.op == "placeholder"]
    floats = [t for t in inputs if isinstance(t, Tensor) and t.dtype is torch.float32]
    return any(t.requires_grad and t.device.type in scaled.DEVICES for t in floats)


class WhileAllowed:
    """A compiled function for calls while TF32 is allowed, of which Dynamo has no guard; one for the other calls.

    It is compiled at the first of these, on their arguments; without ``compile_one``, for sizes that change, the graph
    runs as it is.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        graph: fx.GraphModule,
        compile_one: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]] | None,
    ) -> None:
        self.run, self.graph, self.compile_one = run, graph, compile_one
        self.other: Callable[..., Any] | None = None if compile_one else graph

    def __call__(self, *inputs: Any) -> Any:
        """The function's results."""
        if conv_tf32_allowed():
            return self.run(*inputs)
        if self.other is None and self.compile_one is not None:
            self.other = self.compile_one(copied(self.graph), inputs)
        assert self.other is not None
        return self.other(*inputs)


def copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The same calls on the same attributes, for another compilation, without fake tensors of this one."""
    graph = copy.deepcopy(graph_module.graph)
    for node in graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k == "recompute"}
    return fx.GraphModule(graph_module, graph)
