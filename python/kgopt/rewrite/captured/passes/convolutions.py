"""The convolutions of captured graphs: the memory format that they read, and the kernels that compute them.

Inductor computes convolutions of images in channels_last wherever it expects that to be faster; those of volumes it
leaves in the format of the model. While a graph is compiled they are timed in both formats, and kgopt's beside cuDNN's:
in inference its own kernels in channels_last, in training its op with its gradients, by the measurement of
:mod:`~kgopt.rewrite.gradients.training`.

Volumes: where the sum is smaller by more than a tenth in channels_last, each convolution is given its input so, and so
is each norm of kgopt's; what is between them follows. One that is faster as it came by more than the copies around it
stays so. Images: where the sum in channels_last, with kgopt's, is smaller than cuDNN's in either format: which of them
Inductor takes is not known yet. Results of the graph have the format that they had.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from kgopt._layout import FORMATS, is_dense_channels_last
from kgopt.rewrite.captured import contest
from kgopt.rewrite.captured.values import is_known, may_measure, stand_in, uses_autocast, value
from kgopt.rewrite.glue import search
from kgopt.rewrite.glue.calls import CONVS, Call, geometry_of, has_dense_form, recognize
from kgopt.rewrite.gradients import training
from kgopt.rewrite.inductor import lowering
from kgopt.rewrite.measure import clocks, measuring, verdicts
from kgopt.rewrite.pytorch import originals
from kgopt.torch_private import outside_of_tracing

MARGIN = 0.9  # of the time in the model's format: what is between convolutions is not measured
# Of measurements for a graph, as this thread works: waiting for another process that measures is no part. The largest
# come first; what is left over follows them.
SECONDS = 60.0
COPY_RATE = 1e12  # bytes that a copy to the other format reads and writes in a second, at the least
_NAMES = {4: "images", 5: "volumes"}
_IN_FORMAT = torch.ops.kgopt.in_format.default
# Volumes' convolutions as sites write them, beside a norm.
_OF_VOLUMES = (torch.ops.kgopt.conv3d.default, torch.ops.kgopt.conv_transpose3d.default)
# Ways of glue/calls.py that a graph can hold; a bias is the compiler's, and "each channel" is a product by then.
_IN_GRAPHS = ("own", "pointwise", "few", "scaled", "dense")


@dataclass
class _Times:
    """Of one convolution, as the graph has it and in channels_last: seconds by PyTorch, and by the faster way."""

    plain: float
    last: float
    best_plain: float
    best_last: float
    option_plain: str  # the faster way, of glue/calls.py; "": PyTorch's
    option_last: str


_UNKNOWN = _Times(0.0, 0.0, 0.0, 0.0, "", "")  # of one that there was no time for


@dataclass(frozen=True)
class _Way:
    """How a convolution is computed."""

    option: str
    channels_last: bool


@dataclass
class Convolutions:
    """What becomes of the convolutions of a graph."""

    ways: dict[fx.Node, _Way] = field(default_factory=dict)

    @property
    def dims_last(self) -> set[int]:
        """Numbers of dims of the tensors that will lie in channels_last."""
        return {_dims(node) for node, way in self.ways.items() if way.channels_last}

    def write(self, graph_module: fx.GraphModule) -> str:
        """Puts it into the graph, unless code of the model counts on the format that it had. What was done."""
        graph, added = graph_module.graph, []
        replaced: list[tuple[fx.Node, list[fx.Node]]] = []  # a node, and what stands for it: the last ones first
        left = {node: way for node, way in self.ways.items() if node.users}  # others became parts of sites
        moves_volumes = 5 in self.dims_last
        for node, way in left.items():
            ours, more = put(graph, node, way, moves=moves_volumes and _dims(node) == 5)
            added += more
            if ours:
                replaced.append((node, ours))
        if moves_volumes:
            added += self._move_sites(graph, {ours[0] for _, ours in replaced})
        if (not added and not left) or not _runs(graph_module):
            for node, ours in replaced:
                ours[0].replace_all_uses_with(node)
                for own in ours:
                    graph.erase_node(own)
            for last in added:
                last.replace_all_uses_with(last.args[0])  # type: ignore[arg-type]
                graph.erase_node(last)
            return ""
        said = [
            _said(name, [way for node, way in left.items() if _dims(node) == dims]) for dims, name in _NAMES.items()
        ]
        for node, _ in replaced:
            graph.erase_node(node)
        return "; ".join(filter(None, said))

    def _move_sites(self, graph: fx.Graph, others: set[fx.Node]) -> list[fx.Node]:
        """The volumes that sites read: those of their convolutions, and those of norms, such as a concatenation, which
        Inductor would else write contiguous.
        """
        ways = {_weight(node): way for node, way in self.ways.items()}
        added = []
        for node in list(graph.nodes):
            if node.target in _OF_VOLUMES and node not in others:
                added += _move_input(graph, node, getattr(ways.get(_weight(node)), "channels_last", True))
            elif node.target in lowering.NORMS and _dims_of(x := _input(node)) == 5 and not _is_ours(x):
                added += _move_input(graph, node, channels_last=True)
        return added


def put(graph: fx.Graph, node: fx.Node, way: _Way, moves: bool = True) -> tuple[list[fx.Node], list[fx.Node]]:
    """Has a convolution computed so. What stands for it, the last node first, and what was added around that.

    ``moves``: what it reads may lie in channels_last, also where it is to be contiguous.
    """
    added = _move_input(graph, node, way.channels_last) if way.channels_last or moves else []
    made = node
    ours: list[fx.Node] = []
    if way.option:
        before = node.prev
        with graph.inserting_before(node):
            made = _own(graph, node, way)
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        ours = [made]
        while ours[-1].prev is not before:
            ours.append(ours[-1].prev)
    if way.channels_last:  # of one channel in either format some give a contiguous tensor
        with graph.inserting_after(made):
            given = graph.call_method("contiguous", (made,), {"memory_format": FORMATS[_dims(node)]})
        given.meta.update(node.meta)
        made.replace_all_uses_with(given, delete_user_cb=lambda user: user is not given)
        added.append(given)
    return ours, added


def _dims_of(node: fx.Node) -> int:
    return t.dim() if isinstance(t := value(node), Tensor) else 0


def _is_ours(node: fx.Node) -> bool:
    """Whether an op of kgopt's gives a value: it lies as what the op read, and a norm may take the op's moments."""
    return getattr(_made_by(node).target, "namespace", "") == "kgopt"


def _made_by(node: fx.Node) -> fx.Node:
    """The call that gives a value, if that is one of several."""
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def _move_input(graph: fx.Graph, node: fx.Node, channels_last: bool) -> list[fx.Node]:
    """Has a node read its input in a format; what was added for that."""
    x = _input(node)
    if isinstance(t := value(x), Tensor) and t.shape[1] == 1:  # it lies in both
        return []
    # AOTAutograd's cache takes ops alone; with gradients it has none of such graphs.
    target = lies if torch.is_grad_enabled() else _IN_FORMAT
    again = _made_by(x).meta.get("recompute")
    with graph.inserting_before(node):
        # A norm's result that is computed again for the backward (backend.py) is not kept in its format either.
        name = None if again is None else "computed_again"
        moved = graph.create_node("call_function", target, (x, channels_last), name=name)
    if again is not None:
        moved.meta["recompute"] = again
    node.replace_input_with(x, moved)
    return [moved]


class _Lies(torch.autograd.Function):
    """A tensor in a format, whose gradient stays in that in which it comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels_last: bool) -> Tensor:
        return _IN_FORMAT(x, channels_last)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return dy, None


def lies(x: Tensor, channels_last: bool) -> Tensor:
    """``x`` in channels_last, or contiguous, for what reads it in code that Inductor compiles.

    Of ``x.contiguous(memory_format=...)`` Inductor makes a pointwise copy that is free to lie as it likes, which for
    volumes is contiguous; ATen then transposes it for cuDNN time and again. It lowers this op by
    :mod:`~kgopt.rewrite.inductor.lowering`: what is still to be written is written so, and what lies so is no copy.
    """
    return _Lies.apply(x, channels_last)  # type: ignore[no-any-return, no-untyped-call]


def _said(name: str, ways: list[_Way]) -> str:
    ours = sum(bool(way.option) for way in ways)
    if any(way.channels_last for way in ways):
        return f"{len(ways)} convolutions of {name} in channels_last, {ours} of them by kgopt"
    return f"{ours} convolutions of {name} by kgopt" if ways else ""


def _input(node: fx.Node) -> fx.Node:
    """What a convolution reads, however its arguments are given."""
    return node.args[0] if node.args else node.kwargs["input"]  # type: ignore[return-value]


def _weight(node: fx.Node) -> fx.Node:
    return node.args[1] if len(node.args) > 1 else node.kwargs["weight"]  # type: ignore[return-value]


def _dims(node: fx.Node) -> int:
    """Of a convolution with samples."""
    return 5 if CONVS[node.target].endswith("3d") else 4


def _own(graph: fx.Graph, node: fx.Node, way: _Way) -> fx.Node:
    """The convolution by kgopt's op, or as a dense one of PyTorch's."""
    found = geometry_of(node.target, node.args, dict(node.kwargs), value)
    assert found is not None  # it was measured
    tracer = fx.proxy.GraphAppendingTracer(graph)
    (x, *more), argument = found
    tensors = [None if t is None else fx.Proxy(t, tracer) for t in (x, *more)]
    call = Call("conv", argument, tensors[0], tuple(tensors[1:]))  # type: ignore[arg-type]
    if way.option != "dense":
        return call.run(way.option).node  # type: ignore[attr-defined, no-any-return]
    last = way.channels_last or any(is_dense_channels_last(value(t)) for t in (x, more[0]))
    return call.dense(last).by_function().node  # type: ignore[attr-defined, no-any-return]


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
        with modes.pop(), torch.set_grad_enabled(torch.is_grad_enabled()), measuring.own_saved_tensors():
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


def find(graph_module: fx.GraphModule, moves_images: bool = True) -> Convolutions:
    """What is faster otherwise, by measurement; nothing where sizes are not known.

    Without ``moves_images`` those of images are left alone: they will run in the format that they came in.
    """
    graph, until = graph_module.graph, time.thread_time() + SECONDS
    if uses_autocast(graph):
        return Convolutions()
    nodes = [
        node
        for node in graph.nodes
        if node.op == "call_function" and node.target in CONVS and originals.runs_as_is(node.target)
    ]
    found = Convolutions()
    for dims, choose in (*([(4, _of_images)] if moves_images else []), (5, _of_volumes)):
        times: dict[fx.Node, _Times] = {}
        for node in sorted((n for n in nodes if _dims(n) == dims), key=_work, reverse=True):
            of_node = _measured(node, torch.is_grad_enabled(), until)
            if of_node is None:
                break
            times[node] = of_node
        else:
            if any(t is not _UNKNOWN for t in times.values()):
                found.ways.update(choose({node: times[node] for node in nodes if node in times}))
    return found


def _work(node: fx.Node) -> int:
    """Products, or near to it; what has no known sizes comes first, for it settles that nothing changes."""
    x, y = value(_input(node)), value(node)
    if not (is_known(x) and is_known(y)):
        return 2**63
    weight = value(_weight(node))
    return max(x.numel(), y.numel()) * weight.numel() // max(weight.shape[0], 1) if is_known(weight) else 2**63


def _of_volumes(times: Mapping[fx.Node, _Times]) -> dict[fx.Node, _Way]:
    if sum(t.best_last for t in times.values()) <= MARGIN * sum(t.best_plain for t in times.values()):
        return {node: _of_moved(node, t) for node, t in times.items()}
    return {node: _Way(t.option_plain, False) for node, t in times.items() if t.option_plain}


def _of_moved(node: fx.Node, t: _Times) -> _Way:
    """One among volumes in channels_last: some, of a single channel for one, are worth the copies around them."""
    tensors = [t for t in (value(_input(node)), value(node)) if isinstance(t, Tensor) and t.shape[1] > 1]
    copied = sum(2 * t.numel() * t.element_size() for t in tensors) * (2 if torch.is_grad_enabled() else 1)
    if t.best_plain + copied / COPY_RATE < t.best_last:
        return _Way(t.option_plain, False)
    return _Way(t.option_last, True)


def _of_images(times: Mapping[fx.Node, _Times]) -> dict[fx.Node, _Way]:
    theirs = min(sum(t.plain for t in times.values()), sum(t.last for t in times.values()))
    ours = sum(t.best_last for t in times.values())
    if not any(t.option_last for t in times.values()) or ours > training.GAIN * theirs:
        return {}
    # Also those that stay PyTorch's: Inductor asks how many those are, and would leave a few in the model's format.
    return {node: _Way(t.option_last, True) for node, t in times.items()}


def _measured(node: fx.Node, grad: bool, until: float) -> _Times | None:
    given = (node.args, dict(node.kwargs))
    tensors = [value(n) for n in node.all_input_nodes]
    if not tensors or not all(map(is_known, tensors)) or not all(may_measure(t.device) for t in tensors):
        return None
    if value(_input(node)).dim() != _dims(node):
        return None
    kinds = [t if grad else t.detach() for t in tensors]
    rest = fx.map_arg(given, lambda n: f"%{node.all_input_nodes.index(n)}")
    is_free = not grad and _is_bias_free(node)
    key = verdicts.key_of("convolution", tensors[0].device, CONVS[node.target], rest, kinds, grad, is_free)

    def measure() -> list[Any] | None:
        # Whatever a convolution raises: PyTorch will raise it again, or memory is short.
        with contextlib.suppress(Exception), measuring.own_saved_tensors(), outside_of_tracing() as is_outside:
            return _measure(node, grad, is_free) if is_outside else None
        return None

    known = verdicts.of_graphs()
    if time.thread_time() > until and known.known(key) is None:
        return _UNKNOWN
    found, _ = known.settle(key, measure)
    return None if found is None else _Times(*found)


def _is_bias_free(node: fx.Node) -> bool:
    """Whether Inductor adds the bias on the way, in a kernel for what follows."""
    made = value(node)
    return isinstance(made, Tensor) and all(contest.is_elementwise(reader, made) for reader in node.users)


def _measure(node: fx.Node, grad: bool, is_bias_free: bool) -> list[Any]:
    device = value(node.all_input_nodes[0]).device
    plain, last = (_Convolution(node, channels_last, grad, is_bias_free) for channels_last in (False, True))
    with torch.set_grad_enabled(grad):
        before, after = clocks.busy_both(plain.step, last.step, device)
        if grad:
            # Nothing asks for the first of images.
            (gain, option), (gain_last, option_last) = plain.gain() if _dims(node) == 5 else (0.0, ""), last.gain()
            return [before, after, before - gain, after - gain_last, option, option_last]
        # Images that stay in the graph's format are Inductor's, which may choose another one.
        of_plain = plain.faster() if _dims(node) == 5 else None
        (best_plain, option_plain), (best_last, option_last) = of_plain or (before, ""), last.faster() or (after, "")
    return [before, after, best_plain, best_last, option_plain, option_last]


class _Convolution:
    """A call of the graph, on tensors of its sizes.

    The weight lies as the graph has it: a copy of it is part of a call.
    """

    def __init__(self, node: fx.Node, channels_last: bool, grad: bool, is_bias_free: bool) -> None:
        self.function: Any = node.target
        x = _input(node)
        made = {n: stand_in(value(n), value(n).device, channels_last and n is x) for n in node.all_input_nodes}
        self.wanted = [t.requires_grad_() for n, t in made.items() if grad and value(n).requires_grad]
        given = node.args, dict(node.kwargs)
        self.args, self.kwargs = fx.map_arg(given, made.__getitem__)  # type: ignore[misc, arg-type]
        found = geometry_of(node.target, *given, value) if is_bias_free else None
        bias = None if found is None else found[0][2]
        self.timed = fx.map_arg(given, lambda n: None if n is bias else made[n])  # type: ignore[arg-type, return-value]

    def step(self) -> Any:
        """What is timed."""
        args, kwargs = self.timed  # type: ignore[misc]
        y = self.function(*args, **kwargs)
        if self.wanted:
            torch.autograd.grad(y, self.wanted, torch.ones_like(y))
        return y

    def whole(self) -> Any:
        """With its bias in any case."""
        return self.function(*self.args, **self.kwargs)

    def gain(self) -> tuple[float, str]:
        """Seconds that kgopt's op saves, or a dense convolution, forward and backward, and which it is."""
        found = geometry_of(self.function, self.args, self.kwargs)
        if not self.wanted or found is None:
            return 0.0, ""
        (x, weight, bias), (name, transposed, stride, padding, dilation, output_padding, groups) = found
        if not training.suits(x, weight, bias):
            return 0.0, ""

        def call(x: Tensor) -> Call:
            return Call("conv", found[1], x, (weight, bias))

        ways: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {"auto": (name, lambda x: call(x).run("auto"))}
        if has_dense_form(x, weight, groups):
            ways["dense"] = f"{name} dense", lambda x: call(x).dense().by_function()
        geometry = (stride, padding, dilation, transposed, output_padding, groups)
        gains = {"": 0.0}
        for option, (kind, ours) in ways.items():
            both = training.both_of_convolution(kind, lambda x: call(x).by_function(), ours, weight, bias, geometry)
            gains[option] = training.gain_of(both, x, verdicts.of_graphs())
        best = max(gains, key=gains.__getitem__)  # the first of equal ones
        return gains[best], best

    def faster(self) -> tuple[float, str] | None:
        """Seconds of kgopt's fastest way, and which it is; None where PyTorch's is faster."""
        call = self.call()
        option = "" if call is None else search.verdict(call, self.whole)
        if call is None or not option:
            return None
        theirs, ours = clocks.busy_both(self.step, lambda: self._run(call, option), call.x.device)
        return (ours, option) if ours < theirs else None

    def _run(self, call: Call, option: str) -> Tensor:
        """As the graph will have it: a dense one is PyTorch's, whose bias may be the compiler's."""
        if option != "dense":
            return call.run(option)
        (_, *more), _ = geometry_of(self.function, *self.timed)  # type: ignore[misc]
        return replace(call, more=tuple(more)).dense().by_function()

    def call(self) -> Call | None:
        """As one that kgopt may compute; the bias is the compiler's."""
        found = recognize(self.function, self.args, self.kwargs)  # type: ignore[arg-type]
        if found is None or found.cast is not None:
            return None
        options = tuple(option for option in found.options if option in _IN_GRAPHS)
        return replace(found, options=options) if options else None
