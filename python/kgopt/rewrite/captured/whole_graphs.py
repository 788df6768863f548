"""Whether a captured graph runs with kgopt's ops at all, or as it came: both are compiled and timed as a whole.

A site's own measurement (:mod:`~kgopt.rewrite.captured.contest`) knows the elementwise functions around it. Inductor
may do more with a norm that it computes itself: write the normalized values straight into what upsamples, pads, joins
or reduces them; and each call of an op costs the host more than the launch of a kernel. So the graph is compiled as it
came, too, and where it is faster it stays so. That takes about the time of a second compilation, once: the verdict lies
beside Inductor's cache, and the compiled code of the winner in it.

Inductor runs the convolutions of images in channels_last or as they came by rules that it made for other networks. For
some the other format is much faster, by what cuDNN converts and by kernels that it has in one format alone. So the
graph is compiled once more, in the format that Inductor does not take: with kgopt's ops, for what lost to Inductor's
norms in one format may win in the other, and each site has been measured there by itself.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from kgopt.rewrite.captured import passes
from kgopt.rewrite.captured.values import is_known, may_measure, name_of, stand_in, text_of, value
from kgopt.rewrite.inductor import passes as inductor_passes
from kgopt.rewrite.inductor.decomposed import DECOMPOSITIONS
from kgopt.rewrite.measure import clocks, measuring, verdicts
from kgopt.rewrite.measure.reporting import Report
from kgopt.torch_private import compile_graph, compiler_settings, outside_of_tracing

SECONDS = 60.0  # of one compilation, after which the other is not begun
SLACK = 1.03  # kgopt's may take so much longer: clocks differ by that, and in training it keeps less
_GRAPHS = "triton.cudagraphs"  # Inductor's setting
# Its settings for the formats of images.
_FORMATS = {"channels_last": {"force_layout_optimization": True}, "as it came": {"layout_optimization": False}}
# What Inductor's rule for inference expects channels_last to save of a convolution's time, by its kind.
_GAINS = {"grouped": -0.358, "small": 0.217, "narrowing": 0.275, "other": 0.177}
FORMAT_GAIN = 0.97  # of the time in the format that Inductor chooses, above which that stays
# Whose functions are called twice without harm. Those of others may do what nobody knows of.
_KNOWN = ("aten", "prims", "kgopt", "torch", "_operator", "operator", "math", "builtins")


class Chosen(NamedTuple):
    """How a graph is compiled."""

    lost: str = ""  # why it stays as it came; "": with kgopt's ops it is no slower, or nothing is known
    format: str = ""  # of images, where it is not what Inductor chooses: "channels_last" or "as it came"; with the ops

    @property
    def options(self) -> Mapping[str, Any]:
        """Inductor's, beside those that were given."""
        return _FORMATS.get(self.format, {})


def choose(
    graph_module: fx.GraphModule,
    rewrite: Callable[..., Report],
    options: Mapping[str, Any],
    replays: bool,
    *more: Any,
) -> Chosen:
    """The fastest way to compile a graph.

    Args:
        graph_module: as it came; it is left alone.
        rewrite: puts kgopt's ops into such a graph; its second argument is a :attr:`Chosen.format`.
        options: Inductor's, with which it will be compiled.
        replays: what waits for its launches will be replayed, so the work on the GPU counts alone.
        more: what else decides what ``rewrite`` does.
    """
    graph = graph_module.graph
    kinds = kinds_of(graph)
    if not kinds or not may_measure(kinds[0].device):
        return Chosen()
    grad = records_gradients(kinds)
    kinds = kinds if grad else [t.detach() for t in kinds]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    text = text_of(inputs, [n for n in graph.nodes if n.op.startswith("call")], output.all_input_nodes)
    key = verdicts.key_of(
        "graph in both formats", kinds[0].device, text, kinds, grad, replays, sorted(map(str, options.items())), more
    )

    is_given = any(name in options for settings in _FORMATS.values() for name in settings)
    other = "" if is_given else other_format(graph, grad)

    def rewritten(form: str) -> fx.GraphModule | None:
        made = fx.GraphModule(graph_module, copy.deepcopy(graph))
        return made if rewrite(made, form).changes else None

    def measure() -> list[float] | None:
        made = rewritten("")
        if made is None:
            return None
        trial = _Trial(kinds, grad, options, replays)
        # Whatever the compiler raises: nothing is known then.
        with contextlib.suppress(Exception), measuring.own_saved_tensors():
            with trial.running():
                steps = trial.step(made), trial.step(graph_module)
                after, before = trial.times(*steps)
            if not other:
                return [before, after]
            best = steps[int(after > SLACK * before)]
            moved = rewritten(other) or graph_module
            with contextlib.suppress(Exception), trial.running():
                return [before, after, *trial.times(best, trial.step(moved, other))]
            return [before, after]
        return None

    found, _ = verdicts.of_graphs().settle(key, measure)
    if found is None:
        return Chosen()
    before, after, *formats = found
    if formats and formats[1] < FORMAT_GAIN * formats[0]:
        return Chosen(format=other)
    if after <= SLACK * before:
        return Chosen()
    return Chosen(f"{1e6 * before:.0f} us as it came, {1e6 * after:.0f} us with kgopt")


def kinds_of(graph: fx.Graph) -> list[Tensor]:
    """What a graph's inputs are like, if it may be called twice: all of known sizes, on one device. Else nothing."""
    kinds = [value(node) for node in graph.nodes if node.op == "placeholder"]
    if not all(map(_is_known, kinds)) or not all(map(_is_repeatable, graph.nodes)):
        return []
    return kinds if len({t.device for t in kinds}) == 1 else []


def records_gradients(kinds: list[Tensor]) -> bool:
    """Whether a call with such inputs has a backward."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in kinds)


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


class _Trial:
    """Compiles and times graphs on tensors of their kinds."""

    def __init__(self, kinds: list[Tensor], grad: bool, options: Mapping[str, Any], replays: bool) -> None:
        self.kinds, self.grad, self.device = kinds, grad, kinds[0].device
        # Of Inductor's CUDA graphs tensors of a measurement are no part.
        has_graphs = bool(options.get(_GRAPHS))
        self.config = {**options, _GRAPHS: False} if has_graphs else options
        self.is_busy = has_graphs or replays

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Outside of the compilation under way, whose random numbers stay as they were.

        Raises:
            RuntimeError: there is no way outside.
        """
        state = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        # A backward that is lowered at its first call would write into the records of the compilation under way.
        with outside_of_tracing() as is_outside, compiler_settings(force_non_lazy_backward_lowering=True):
            if not is_outside:
                raise RuntimeError("a tracer would see the measurement")
            try:
                with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(self.grad):
                    yield
            finally:
                if state is not None:
                    torch.cuda.set_rng_state(state, self.device)

    def step(self, module: fx.GraphModule, form: str = "") -> Callable[[], Any]:
        """A call of it, with its backward where a gradient is needed, that has run once.

        Raises:
            TimeoutError: that took too long for another compilation.
        """
        start = time.monotonic()
        made = _step(module, self.kinds, self.grad, {**self.config, **_FORMATS.get(form, {})})
        made()
        if time.monotonic() - start > SECONDS:
            raise TimeoutError("one compilation took too long")
        return made

    def times(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of both, in turns; of work on the GPU alone where launches will be replayed."""
        if self.is_busy:
            return clocks.busy_both(first, second, self.device)
        with clocks.alone():
            return clocks.clock_both(first, second, self.device)


def other_format(graph: fx.Graph, grad: bool) -> str:
    """That in which Inductor, by the rules of its ``decide_layout_opt``, does not run images; "": no other."""
    flops, is_contiguous, narrows = dict.fromkeys(_GAINS, 0.0), False, False
    for node in graph.nodes:
        if name_of(node) not in ("conv2d", "conv_transpose2d") or len(node.args) < 2:
            continue
        if passes.tapped.is_taken(node):  # Inductor sees a product
            continue
        x, weight, y = value(node.args[0]), value(node.args[1]), value(node)
        if not all(is_known(t) and t.dim() == 4 and t.is_cuda for t in (x, weight, y)):
            return ""
        is_contiguous = is_contiguous or x.is_contiguous()
        groups = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
        transposed = name_of(node) == "conv_transpose2d"
        rows, columns, height = weight.shape[:3]
        is_narrowing = 2 * rows <= columns and height > 1
        narrows = narrows or is_narrowing
        if groups > 1 and columns > 1:
            kind = "grouped"
        elif max(rows, columns) <= 64:
            kind = "small"
        else:
            kind = "narrowing" if is_narrowing else "other"
        flops[kind] += (x if transposed else y).numel() * weight.numel() / rows
    if not is_contiguous or not any(flops.values()):
        return ""
    if grad:
        moves = not flops["grouped"] and not narrows and flops["other"] > 0
    else:
        moves = sum(gain * flops[kind] for kind, gain in _GAINS.items()) >= 0
    return "as it came" if moves else "channels_last"


def _step(module: fx.GraphModule, kinds: list[Tensor], grad: bool, options: Mapping[str, Any]) -> Callable[[], Any]:
    """A call of it, with its backward where a gradient is needed, on tensors of their kinds."""
    inputs = [_stand_in(t).requires_grad_(grad and t.requires_grad) for t in kinds]
    wanted = [t for t in inputs if t.requires_grad]
    more: Any = {"decompositions": DECOMPOSITIONS, "passes": inductor_passes.passes()}
    run = compile_graph(inductor_passes.copied(module), inputs, None, options, **more)

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
