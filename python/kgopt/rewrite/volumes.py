"""The memory format of convolutions over volumes in captured graphs, and the kernels that compute them.

Inductor computes convolutions of images in channels_last wherever it expects that to be faster; those of volumes it
leaves in the format of the model. So they are timed in both formats while a graph is compiled, and kgopt's beside
cuDNN's: in inference its own kernels in channels_last, in training its op with its gradients in either format, by the
measurement of :mod:`~kgopt.rewrite.training`. Where the sum is smaller by more than a tenth, each convolution is given
its input in channels_last; what is between them follows. Results of the graph have the format that they had.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from kgopt.rewrite import clocks, originals, training, verdicts
from kgopt.rewrite.captured import is_known, stand_in, uses_autocast, value
from kgopt.rewrite.glue import search
from kgopt.rewrite.glue.calls import CONV_FUNCTIONS, Call, geometry_of, recognize
from kgopt.torch_private import outside_of_tracing

MARGIN = 0.9  # of the time in the model's format: what is between convolutions is not measured
_FORMAT = torch.channels_last_3d
# F.conv3d is the same function.
_CONVS: dict[Any, str] = {torch.conv3d: "conv3d", torch.conv_transpose3d: "conv_transpose3d"}
_CONVS = {f: name for f, name in _CONVS.items() if originals.is_torchs(f)}
_MEASURES_ON = ("cuda",)


@dataclass
class _Times:
    """Of one convolution: seconds in the format of the graph and in channels_last, each by its faster way."""

    before: float
    after: float
    option_before: str  # of glue/calls.py; "": PyTorch's
    option: str


@dataclass
class Volumes:
    """What becomes of the convolutions of a graph."""

    channels_last: bool = False  # they are to read it
    options: dict[fx.Node, str] = field(default_factory=dict)  # how they are computed; "": by PyTorch

    def write(self, graph_module: fx.GraphModule) -> str:
        """Puts it into the graph, unless code of the model counts on the format that it had. What was done."""
        graph, added, replaced = graph_module.graph, [], []
        left = {node: option for node, option in self.options.items() if node.users}  # others became parts of sites
        for node, option in left.items():
            with graph.inserting_before(node):
                if self.channels_last:
                    x = _input(node)
                    last = graph.call_method("contiguous", (x,), {"memory_format": _FORMAT})
                    added.append(last)
                    node.replace_input_with(x, last)
                if option:
                    own = _own(graph, node, option)
                    own.meta.update(node.meta)
                    node.replace_all_uses_with(own)
                    replaced.append((node, own))
        if not left or not _runs(graph_module):
            for node, own in replaced:
                own.replace_all_uses_with(node)
                graph.erase_node(own)
            for last in added:
                last.replace_all_uses_with(last.args[0])  # type: ignore[arg-type]
                graph.erase_node(last)
            return ""
        for node, _ in replaced:
            graph.erase_node(node)
        if not self.channels_last:
            return f"{len(replaced)} convolutions of volumes by kgopt"
        return f"{len(left)} convolutions of volumes in channels_last, {len(replaced)} of them by kgopt"


def _input(node: fx.Node) -> fx.Node:
    """What a convolution reads, however its arguments are given."""
    return node.args[0] if node.args else node.kwargs["input"]  # type: ignore[return-value]


def _own(graph: fx.Graph, node: fx.Node, option: str) -> fx.Node:
    """The convolution by kgopt's op."""
    found = geometry_of(node.target, node.args, dict(node.kwargs))
    assert found is not None  # it was measured
    tracer = fx.proxy.GraphAppendingTracer(graph)
    (x, *more), argument = found
    tensors = [None if t is None else fx.Proxy(t, tracer) for t in (x, *more)]
    return Call("conv", argument, tensors[0], tuple(tensors[1:])).run(option).node  # type: ignore[arg-type, attr-defined]


def _runs(graph_module: fx.GraphModule) -> bool:
    """Whether it runs in this format and gives what it gave; its results get the strides that they had."""
    graph = graph_module.graph
    graph_module.recompile()
    inputs = [value(node) for node in graph.nodes if node.op == "placeholder"]
    modes = {t.fake_mode for t in inputs if hasattr(t, "fake_mode")}
    (output,) = (node for node in graph.nodes if node.op == "output")
    if len(modes) != 1 or any(node.op == "get_attr" for node in graph.nodes):
        return False
    made: dict[fx.Node, Any] = {}

    class Run(fx.Interpreter):
        """Notes the results."""

        def run_node(self, n: fx.Node) -> Any:
            y = super().run_node(n)
            if n in output.all_input_nodes:
                made[n] = y
            return y

    try:
        with modes.pop(), torch.set_grad_enabled(torch.is_grad_enabled()):
            Run(graph_module).run(*map(_leaf, inputs))
    except Exception:  # what a model's code raises where a view is no view any more
        return False
    tensors = [(node, value(node), y) for node, y in made.items() if isinstance(value(node), Tensor)]
    if any((before.shape, before.dtype) != (y.shape, y.dtype) for _, before, y in tensors):
        return False
    moved = [(node, before) for node, before, y in tensors if before.stride() != y.stride()]
    if not all(before.is_contiguous() for _, before in moved):
        return False
    for node, _ in moved:
        with graph.inserting_before(output):
            plain = graph.call_method("contiguous", (node,))
        plain.meta.update(node.meta)
        output.replace_input_with(node, plain)
    return True


def _leaf(t: Any) -> Any:
    """What a model's code may write to, with no trace of it in the graph's own inputs."""
    return t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t


def find(graph_module: fx.GraphModule) -> Volumes:
    """What is faster in channels_last, by measurement; nothing where sizes are not known."""
    graph, times = graph_module.graph, {}
    grad = torch.is_grad_enabled()
    if uses_autocast(graph):
        return Volumes()
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _CONVS or not originals.runs_as_is(node.target):
            continue
        found = _measured(node, grad)
        if found is None:
            return Volumes()
        times[node] = found
    before, after = (sum(getattr(t, name) for t in times.values()) for name in ("before", "after"))
    if times and after <= MARGIN * before:
        return Volumes(True, {node: t.option for node, t in times.items()})
    return Volumes(False, {node: t.option_before for node, t in times.items() if t.option_before})


def _measured(node: fx.Node, grad: bool) -> _Times | None:
    given = (node.args, dict(node.kwargs))
    tensors = [value(n) for n in node.all_input_nodes]
    if not tensors or not all(map(is_known, tensors)) or any(t.device.type not in _MEASURES_ON for t in tensors):
        return None
    if value(_input(node)).dim() != 5:
        return None
    kinds = [t if grad else t.detach() for t in tensors]
    rest = fx.map_arg(given, lambda n: f"%{node.all_input_nodes.index(n)}")
    key = verdicts.key_of("volume 2", tensors[0].device, _CONVS[node.target], rest, kinds, grad)

    def measure() -> list[Any] | None:
        # Whatever a convolution raises: PyTorch will raise it again, or memory is short.
        with contextlib.suppress(Exception), outside_of_tracing() as is_outside:
            return _measure(node, grad) if is_outside else None
        return None

    found, _ = verdicts.of_graphs().settle(key, measure)
    return None if found is None else _Times(*found)


def _measure(node: fx.Node, grad: bool) -> list[Any]:
    device = value(node.all_input_nodes[0]).device
    plain, last = (_Convolution(node, channels_last, grad) for channels_last in (False, True))
    with torch.set_grad_enabled(grad):
        before, after = clocks.busy_both(plain.step, last.step, device)
        if grad:
            gains = [convolution.gain() for convolution in (plain, last)]
            return [before - gains[0], after - gains[1], *("auto" if gain else "" for gain in gains)]
        call = last.call()
        option = search.verdict(call, last.step) if call is not None else ""
        if call is not None and option:
            after = min(clocks.busy_both(lambda: call.run(option), last.step, device))
    return [before, after, "", option]


class _Convolution:
    """A call of the graph, on tensors of its sizes. The weight lies as the graph has it: a copy of it is a call's work."""

    def __init__(self, node: fx.Node, channels_last: bool, grad: bool) -> None:
        self.function: Any = node.target
        x = _input(node)
        made = {n: stand_in(value(n), value(n).device, channels_last and n is x) for n in node.all_input_nodes}
        self.wanted = [t.requires_grad_() for n, t in made.items() if grad and value(n).requires_grad]
        self.args, self.kwargs = fx.map_arg((node.args, dict(node.kwargs)), made.__getitem__)  # type: ignore[misc, arg-type]

    def step(self) -> Any:
        y = self.function(*self.args, **self.kwargs)
        if self.wanted:
            torch.autograd.grad(y, self.wanted, torch.ones_like(y))
        return y

    def gain(self) -> float:
        """Seconds that kgopt's op saves, forward and backward."""
        found = geometry_of(self.function, self.args, self.kwargs)
        if not self.wanted or found is None:
            return 0.0
        (x, weight, bias), (name, transposed, stride, padding, dilation, output_padding, groups) = found
        if weight.dim() != x.dim() or not (x.dtype is weight.dtype or torch.is_autocast_enabled(x.device.type)):
            return 0.0
        if bias is not None and bias.dtype is not weight.dtype:
            return 0.0

        def theirs(x: Tensor) -> Tensor:
            return CONV_FUNCTIONS[name](x, weight, bias, stride, padding, *tail)  # type: ignore[no-any-return]

        def ours(x: Tensor) -> Tensor:
            return Call("conv", found[1], x, (weight, bias)).run("auto")

        tail = (output_padding, groups, dilation) if transposed else (dilation, groups)
        geometry = (stride, padding, dilation, transposed, output_padding, groups)
        both = training.both_of_convolution(name, theirs, ours, weight, bias, geometry)
        return training.gain_of(both, x, verdicts.of_graphs())

    def call(self) -> Call | None:
        """As one that kgopt may compute; the bias is the compiler's."""
        found = recognize(self.function, self.args, self.kwargs)  # type: ignore[arg-type]
        if found is None:
            return None
        options = tuple(option for option in found.options if option != "bias")
        return replace(found, options=options) if options else None
