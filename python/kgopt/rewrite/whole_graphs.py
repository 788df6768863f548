"""Whether a captured graph runs with kgopt's ops at all, or as it came: both are compiled and timed as a whole.

A site's own measurement (:mod:`~kgopt.rewrite.contest`) knows the elementwise functions around it. Inductor may do more
with a norm that it computes itself: write the normalized values straight into what upsamples, pads, joins or reduces
them; and each call of an op costs the host more than the launch of a kernel. So the graph is compiled as it came,
too, and where it is faster it stays so. That takes about the time of a second compilation, once: the
verdict lies beside Inductor's cache, and the compiled code of the winner in it.

In training Inductor leaves some networks in the format that they came in, by rules that it made for other networks:
a quarter of a step went into cuDNN's conversions in one of them. There the winner is compiled once more, in
channels_last.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from kgopt.rewrite import clocks, measuring, verdicts
from kgopt.rewrite.captured import may_measure, name_of, stand_in, text_of, value
from kgopt.rewrite.decomposed import DECOMPOSITIONS
from kgopt.rewrite.reporting import Report
from kgopt.torch_private import compile_graph, compiler_settings, outside_of_tracing

SECONDS = 60.0  # of one compilation, after which the other is not begun
SLACK = 1.03  # kgopt's may take so much longer: clocks differ by that, and in training it keeps less
_GRAPHS = "triton.cudagraphs"  # Inductor's setting
_CHANNELS_LAST = {"force_layout_optimization": True}  # and this one has all convolutions of images run so
LAYOUT_GAIN = 0.97  # of the time in the format that Inductor chooses, above which that stays
# Whose functions are called twice without harm. Those of others may do what nobody knows of.
_KNOWN = ("aten", "prims", "kgopt", "torch", "_operator", "operator", "math", "builtins")


class Chosen(NamedTuple):
    """How a graph is compiled."""

    lost: str = ""  # why it stays as it came; "": with kgopt's ops it is no slower, or nothing is known
    options: Mapping[str, Any] = {}  # Inductor's, beside those that were given


def choose(
    graph_module: fx.GraphModule,
    rewrite: Callable[[fx.GraphModule], Report],
    options: Mapping[str, Any],
    replays: bool,
    *more: Any,
) -> Chosen:
    """The fastest way to compile a graph.

    Args:
        graph_module: as it came; it is left alone.
        rewrite: puts kgopt's ops into such a graph.
        options: Inductor's, with which it will be compiled.
        replays: what waits for its launches will be replayed, so the work on the GPU counts alone.
        more: what else decides what ``rewrite`` does.
    """
    graph = graph_module.graph
    kinds = kinds_of(graph)
    if not kinds or not may_measure(kinds[0].device):
        return Chosen()
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in kinds)
    kinds = kinds if grad else [t.detach() for t in kinds]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    text = text_of(inputs, [n for n in graph.nodes if n.op.startswith("call")], output.all_input_nodes)
    key = verdicts.key_of(
        "graph and format", kinds[0].device, text, kinds, grad, replays, sorted(map(str, options.items())), more
    )

    def measure() -> list[float] | None:
        made = fx.GraphModule(graph_module, copy.deepcopy(graph))
        if not rewrite(made).changes:
            return None
        # Whatever the compiler raises: nothing is known then.
        with contextlib.suppress(Exception), measuring.own_saved_tensors():
            return _measure(graph_module, made, kinds, grad, options, replays)
        return None

    found, _ = verdicts.of_graphs().settle(key, measure)
    if found is None:
        return Chosen()
    before, after, *formats = found
    more_options = _CHANNELS_LAST if formats and formats[1] < LAYOUT_GAIN * formats[0] else {}
    if after <= SLACK * before:
        return Chosen(options=more_options)
    return Chosen(f"{1e6 * before:.0f} us as it came, {1e6 * after:.0f} us with kgopt", more_options)


def kinds_of(graph: fx.Graph) -> list[Tensor]:
    """What a graph's inputs are like, if it may be called twice: all of known sizes, on one device. Else nothing."""
    kinds = [value(node) for node in graph.nodes if node.op == "placeholder"]
    if not all(map(_is_known, kinds)) or not all(map(_is_repeatable, graph.nodes)):
        return []
    return kinds if len({t.device for t in kinds}) == 1 else []


def _is_known(t: Any) -> bool:
    if not isinstance(t, Tensor) or t.layout is not torch.strided or t.is_complex():
        return False
    return all(type(s) is int for s in (*t.shape, *t.stride()))


def _is_repeatable(node: fx.Node) -> bool:
    """Whether a call leaves nothing behind but its result and what it writes to its tensors."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output", "call_method")
    first, *inner = str(getattr(node.target, "__module__", "")).split(".")
    if inner[:1] == ["distributed"]:
        return False
    # An op's module names the library that it is of.
    return (inner[1] if len(inner) > 1 and inner[0] == "_ops" else first) in _KNOWN


def _measure(
    came: fx.GraphModule,
    made: fx.GraphModule,
    kinds: list[Tensor],
    grad: bool,
    options: Mapping[str, Any],
    replays: bool,
) -> list[float] | None:
    device = kinds[0].device
    # Of Inductor's CUDA graphs tensors of a measurement are no part.
    has_graphs = bool(options.get(_GRAPHS))
    config = {**options, _GRAPHS: False} if has_graphs else options
    steps: list[Callable[[], Any]] = []
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    # A backward that is lowered at its first call would write into the records of the compilation under way.
    with outside_of_tracing() as is_outside, compiler_settings(force_non_lazy_backward_lowering=True):
        if not is_outside:
            return None
        try:
            with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(grad):
                for module in (made, came):
                    start = time.monotonic()
                    steps.append(_step(module, kinds, grad, config))
                    steps[-1]()
                    if time.monotonic() - start > SECONDS:
                        return None
                time_both = clocks.busy_both if has_graphs or replays else _clock_alone
                after, before = time_both(steps[0], steps[1], device)
                if not grad or not leaves_format(came.graph):
                    return [before, after]
                at = int(after > SLACK * before)
                steps.append(_step((made, came)[at], kinds, grad, {**config, **_CHANNELS_LAST}))
                steps[-1]()
                return [before, after, *time_both(steps[at], steps[-1], device)]
        finally:
            if state is not None:
                torch.cuda.set_rng_state(state, device)


def _clock_alone(first: Callable[[], Any], second: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    with clocks.alone():
        return clocks.clock_both(first, second, device)


def leaves_format(graph: fx.Graph) -> bool:
    """Whether Inductor, by its rules for training, runs convolutions of images in the format that they came in."""
    weights = []
    for node in graph.nodes:
        if name_of(node) not in ("conv2d", "conv_transpose2d") or len(node.args) < 2:
            continue
        weight = value(node.args[1])
        if not isinstance(weight, Tensor) or weight.dim() != 4 or not weight.is_cuda:
            continue
        groups = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
        weights.append((*weight.shape[:3], groups))
    grouped = any(groups > 1 and columns > 1 for _, columns, _, groups in weights)
    narrows = any(2 * rows <= columns and height > 1 for rows, columns, height, _ in weights)
    return grouped or narrows or (bool(weights) and all(max(rows, columns) <= 64 for rows, columns, *_ in weights))


def _step(module: fx.GraphModule, kinds: list[Tensor], grad: bool, options: Mapping[str, Any]) -> Callable[[], Any]:
    """A call of it, with its backward where a gradient is needed, on tensors of their kinds."""
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        # The rest is of fake tensors of another graph.
        node.meta = {k: v for k, v in node.meta.items() if k == "recompute"}
    inputs = [_stand_in(t).requires_grad_(grad and t.requires_grad) for t in kinds]
    wanted = [t for t in inputs if t.requires_grad]
    run = compile_graph(fx.GraphModule(module, graph), inputs, None, options, decompositions=DECOMPOSITIONS)

    def step() -> None:
        made = run(*inputs)
        outputs = [y for y in made if isinstance(y, Tensor) and y.requires_grad] if wanted else []
        if outputs:
            torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs], allow_unused=True)

    return step


def _stand_in(t: Tensor) -> Tensor:
    """Numbers that may be indices are 0."""
    if t.is_floating_point():
        return stand_in(t, t.device)
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).zero_()
