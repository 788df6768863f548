"""Whether kgopt's op or the compiler's own kernels compute a site of a captured graph, with what is around it.

Inductor writes the elementwise functions in front of a norm and behind it into the norm's own kernels. What kgopt's op
does not take of them costs a pass over memory each. So where such functions are left, the site and they are compiled
both ways while the graph is compiled, on tensors of its sizes, and the shorter work on the GPU decides, forward and
backward in training. A verdict holds for equal graphs and lies beside Inductor's cache, so that another process need
not measure. Nothing is measured where sizes are unknown or the time for it (:data:`SECONDS`) is over: kgopt's op runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from kgopt.rewrite.captured.values import may_measure, name_of, stand_in, text_of, value
from kgopt.rewrite.measure import clocks, measuring, verdicts
from kgopt.torch_private import compile_graph, compiler_settings, outside_of_tracing

SECONDS = 60.0  # for all sites of a graph
NODES = 8  # elementwise functions on either side of a site
SLACK = 1.03  # kgopt's op may take so much longer: in training it keeps less

_ARITHMETIC = (
    *("add", "sub", "rsub", "mul", "truediv", "div", "neg", "abs", "pow"),
    *("exp", "sqrt", "rsqrt", "square", "reciprocal", "maximum", "minimum", "where", "lerp"),
    "addcmul",
)
_ACTIVATIONS = (
    *("clamp", "clamp_min", "clamp_max", "relu", "relu6", "leaky_relu", "elu", "selu", "celu"),
    *("silu", "gelu", "mish", "sigmoid", "logsigmoid", "hardsigmoid", "hardswish", "hardtanh", "tanh"),
    *("softplus", "softsign", "tanhshrink", "threshold"),
)
_CASTS = ("float", "half", "bfloat16", "double", "to", "type", "type_as")
_NAMES = frozenset((*_ARITHMETIC, *_ACTIVATIONS, *_CASTS))
COMPUTED = frozenset((*_ARITHMETIC, *_ACTIVATIONS))  # unless in place, what they give is no view
_CONVOLUTIONS = ("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "convolution")


def is_elementwise(node: Any, like: Tensor) -> bool:
    """One that a kernel of the norm may compute on the way: of the norm's size, with no effect of its own."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    made = value(node)
    if not isinstance(made, Tensor) or made.shape != like.shape or not made.is_floating_point():
        return False
    return name_of(node) in _NAMES and not node.kwargs.get("inplace") and "out" not in node.kwargs


def convolves(graph: fx.Graph, without: Collection[fx.Node] = ()) -> bool:
    """Whether it has convolutions of images: on a GPU Inductor runs them, and what is between, in channels_last."""
    return any(name_of(node) in _CONVOLUTIONS and _dims(node) != 5 and node not in without for node in graph.nodes)


def _dims(node: fx.Node) -> int:
    made = value(node)
    return made.dim() if isinstance(made, Tensor) else 0


Rewrite = Callable[[fx.GraphModule], Any]


class Region:
    """A site, and the elementwise functions around it that only it connects."""

    def __init__(self, core: Sequence[fx.Node], last: fx.Node, like: Tensor) -> None:
        self.core = set(core)
        self.around: set[fx.Node] = set()
        self._absorb_in_front(like)
        while len(last.users) == 1 and len(self.around) < 2 * NODES:
            (reader,) = last.users
            if reader in self.core or not is_elementwise(reader, like):
                break
            self.around.add(reader)
            last = reader
        inside = self.core | self.around
        self.nodes = [node for node in last.graph.nodes if node in inside]
        self.inputs = list(
            dict.fromkeys(i for node in self.nodes for i in node.all_input_nodes if i not in inside),
        )
        self.outputs = [node for node in self.nodes if any(user not in inside for user in node.users)]

    def _absorb_in_front(self, like: Tensor) -> None:
        waiting = [i for node in self.core for i in node.all_input_nodes]
        while waiting and len(self.around) < NODES:
            node = waiting.pop()
            inside = self.core | self.around
            if node in inside or not is_elementwise(node, like) or any(user not in inside for user in node.users):
                continue
            self.around.add(node)
            waiting.extend(node.all_input_nodes)

    def module(self) -> fx.GraphModule:
        """A graph of its own."""
        graph, copies = fx.Graph(), {}
        for i, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"x{i}")
            copies[node].meta = dict(node.meta)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in self.outputs))
        return fx.GraphModule({}, graph)

    @property
    def text(self) -> str:
        """Equal for equal regions, whatever their nodes are called."""
        return text_of(self.inputs, self.nodes, self.outputs)


class Contest:
    """Of the sites of one graph."""

    def __init__(self, rewrite: Rewrite, dims_last: Sequence[int]) -> None:
        self.rewrite = rewrite  # puts kgopt's usual ops into a region's graph
        self.until = time.monotonic() + SECONDS
        self.dims_last = dims_last  # numbers of dims of the tensors that will lie in channels_last

    def lost(self, core: Sequence[fx.Node], last: fx.Node, like: Tensor, other: Rewrite | None = None) -> str:
        """Why the site stays the compiler's; "": kgopt's op runs. ``other``: puts in ops to compare with usual ones."""
        found = self._measured(core, last, like, other)
        if found is None or found[1] <= SLACK * found[0]:
            return ""
        before, after = (1e6 * seconds for seconds in found)
        return f"the compiler's kernels are faster with what is around it: {before:.0f} us, kgopt {after:.0f} us"

    def gains(
        self,
        core: Sequence[fx.Node],
        last: fx.Node,
        like: Tensor,
        other: Rewrite,
        usual: Rewrite | None = None,
        about: str = "",
    ) -> bool:
        """Whether ``other``'s ops are faster at the site than the usual ones. False: or nothing is known.

        ``usual``: puts those in, instead of the contest's own; ``about``: what it does that the site does not say.
        """
        found = self._measured(core, last, like, other, usual, about)
        return found is not None and found[1] < found[0]

    def _measured(
        self,
        core: Sequence[fx.Node],
        last: fx.Node,
        like: Tensor,
        other: Rewrite | None,
        usual: Rewrite | None = None,
        about: str = "",
    ) -> tuple[float, float] | None:
        """Seconds of the compiler's kernels, or the usual ops, and of kgopt's, or ``other``'s. None: not known."""
        if not may_measure(like.device):
            return None
        region = Region(core, last, like)
        if not (region.around or other) or not self._is_known(region):
            return None
        return self._times(region, like.device, other, usual or self.rewrite, about)

    @staticmethod
    def _is_known(region: Region) -> bool:
        values = [value(node) for node in region.inputs]
        return all(
            isinstance(t, Tensor)
            and t.layout is torch.strided
            and t.is_floating_point()
            and all(type(s) is int for s in (*t.shape, *t.stride()))
            for t in values
        )

    def _times(
        self, region: Region, device: torch.device, other: Rewrite | None, usual: Rewrite, about: str
    ) -> tuple[float, float] | None:
        grad = torch.is_grad_enabled() and any(value(node).requires_grad for node in region.inputs)
        kinds = [value(node) if grad else value(node).detach() for node in region.inputs]
        name = "region" if other is None else f"ops of a region{about and ', '}{about}"
        key = verdicts.key_of(name, device, region.text, kinds, grad, self.dims_last)

        def measure() -> list[float] | None:
            if time.monotonic() > self.until:
                return None
            # Whatever the compiler raises: nothing is known then.
            with contextlib.suppress(Exception), measuring.own_saved_tensors():
                return self._measure(region, device, grad, other, usual)
            return None

        found, _ = verdicts.of_graphs().settle(key, measure)
        return None if found is None else (found[0], found[1])

    def _measure(
        self, region: Region, device: torch.device, grad: bool, other: Rewrite | None, usual: Rewrite
    ) -> list[float] | None:
        plain, ours = region.module(), region.module()
        if other is not None:
            usual(plain)
        (other or self.rewrite)(ours)
        # A backward that is lowered at its first call would write into the records of the compilation under way.
        with outside_of_tracing() as is_outside, compiler_settings(force_non_lazy_backward_lowering=True):
            if not is_outside:
                return None
            steps = [self._step(module, region, grad) for module in (plain, ours)]
            with torch.set_grad_enabled(grad):
                for step in steps:
                    step()
                return [*clocks.busy_both(steps[0], steps[1], device)]

    def _step(self, module: fx.GraphModule, region: Region, grad: bool) -> Callable[[], Any]:
        for node in module.graph.nodes:
            node.meta = {}  # of fake tensors of another graph
        module.recompile()
        inputs = [self._stand_in(value(node), grad) for node in region.inputs]
        wanted = [t for t in inputs if t.requires_grad]
        with torch.set_grad_enabled(grad):
            run = compile_graph(module, inputs, None, {})

        def step() -> None:
            outputs = [y for y in run(*inputs) if y.requires_grad] if wanted else run(*inputs)
            if wanted:
                torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs], allow_unused=True)

        return step

    def _stand_in(self, t: Tensor, grad: bool) -> Tensor:
        """A tensor of its kind, in the format in which it will lie."""
        made = stand_in(t, t.device, channels_last=t.dim() in self.dims_last and t.is_contiguous())
        return made.requires_grad_(grad and t.requires_grad)
