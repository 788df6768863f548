"""``torch.compile(model, backend="kgopt")``: the same rewrite on the captured graph, and Inductor for the rest.

The graph is Dynamo's, before AOTAutograd, so functional code (``F.silu(F.group_norm(...))``) is reached too, and
gradients come from the ops' own backward.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from kgopt._layout import is_dense_channels_last
from kgopt._scale_shift import fits
from kgopt.rewrite.captured import functional_norms, passes, whole_graphs
from kgopt.rewrite.captured.contest import Contest, convolves
from kgopt.rewrite.captured.functional_norms import ChannelNorm
from kgopt.rewrite.captured.passes import convolutions
from kgopt.rewrite.captured.passes.autocast import half_precision, say_half
from kgopt.rewrite.captured.values import uses_autocast, value
from kgopt.rewrite.captured.writes import draws_numbers, inputs_written, is_written_between, may_write
from kgopt.rewrite.chains import emit
from kgopt.rewrite.chains.chain import PRELU, Chain
from kgopt.rewrite.chains.emit import ConvArgs, NormArgs, emit_kgopt, padding_in_numbers
from kgopt.rewrite.chains.meanings import UNKNOWN, describe_function, describe_method, with_number
from kgopt.rewrite.chains.patterns import OTHER, Match, Node, match
from kgopt.rewrite.cuda_graphs import machine
from kgopt.rewrite.cuda_graphs.replayed import Replayed
from kgopt.rewrite.glue.calls import CONVS, conv_arguments
from kgopt.rewrite.inductor import passes as inductor_passes
from kgopt.rewrite.inductor.decomposed import DECOMPOSITIONS
from kgopt.rewrite.measure import policy
from kgopt.rewrite.measure.reporting import Report, SiteRow
from kgopt.rewrite.pytorch import originals
from kgopt.torch_private import compile_graph, mode_options

_LOG = logging.getLogger("kgopt.rewrite")

_NORMS: dict[Any, str] = {
    f: n for f, n in ((F.group_norm, "group"), (F.instance_norm, "instance")) if originals.is_torchs(f)
}
_NORMS[passes.plain.group_norm_in_float32] = "group"
_PRODUCTS = {f: f is operator.imul for f in (operator.mul, operator.imul, torch.mul) if originals.is_torchs(f)}
_ADDCMUL = torch.addcmul if originals.is_torchs(torch.addcmul) else None
_FUNCTIONS_WITH_NUMBER = {
    f: f.__name__
    for module, names in ((operator, "add sub mul truediv iadd isub imul itruediv"), (torch, "add sub mul div"))
    for f in (getattr(module, name) for name in names.split())
    if originals.is_torchs(f)
}
_SUB = {f for f in (operator.sub, torch.sub) if originals.is_torchs(f)}
_ARITHMETIC_METHODS = {"add": "add", "add_": "add", "mul": "mul", "mul_": "mul", "addcmul": "addcmul"}
_KEEP_THEIR_INPUT = {
    getattr(torch.ops.kgopt, name).default
    for name in ("group_norm", "group_norm_fwd", "group_norm_prelu", "group_norm_add", "channel_norm")
}
_CONVOLUTIONS = {*CONVS, *(getattr(torch.ops.kgopt, name).default for name in CONVS.values())}
_ADDS = "kgopt.adds"  # of a node that is computed again: it adds another value to a norm's
_PRELU = F.prelu if originals.is_torchs(F.prelu) else None
_LIE = {"channels_last": "in channels_last", "as it came": "as they came"}  # in reports
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

last_report = Report()
"""Of the graph that was rewritten last, for tests and debugging; also in the log ``kgopt.rewrite``, at INFO."""


def kgopt_backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """The backend: rewrites ``graph`` and compiles it with Inductor.

    Args:
        graph: what Dynamo captured.
        example_inputs: fake or real inputs of it.
        mode: as in ``torch.compile``.
        options: Inductor's, and three of kgopt's. ``{"kgopt.always": True}`` takes its ops where
            :mod:`~kgopt.rewrite.measure.policy` would not (on the CPU). ``{"kgopt.recompute": True}``: in training the
            results of norms and their activations are not kept for the backward, which computes them again, nor is
            every other one of the sums behind norms. ``{"kgopt.cuda_graph": "auto"}``: without a ``mode`` the second
            call, and in training its backward, is recorded as a CUDA graph, where its replay, with copies of arguments
            and results, is faster by the clock; True: without asking the clock; False: never.
        kwargs: what else torch.compile hands to Inductor.

    Returns:
        The compiled function.

    Raises:
        ValueError: an option of kgopt's is none that it knows.
    """
    config = dict(options or {})
    always, recompute = (bool(config.pop(f"kgopt.{name}", False)) for name in ("always", "recompute"))
    replays = config.pop("kgopt.cuda_graph", "auto")
    if replays not in (True, False, "auto"):
        raise ValueError(f'option kgopt.cuda_graph is {replays!r}, expected True, False or "auto"')
    kinds = whole_graphs.kinds_of(graph.graph)
    grad = whole_graphs.records_gradients(kinds)
    written = _changed_by_replays(graph.graph, kinds, grad)
    replays = False if mode or written is None else replays

    def rewrite(graph_module: fx.GraphModule, form: str = "") -> Report:
        return rewrite_graph(graph_module, always, recompute, form)

    chosen = whole_graphs.Chosen()
    if not always:
        chosen = whole_graphs.choose(graph, rewrite, mode_options(mode) | config, bool(replays), recompute)
    if chosen.lost:
        global last_report
        last_report = Report(clock=chosen.lost, slower=True)
        _LOG.info("%s", last_report)
    else:
        rewrite(graph, chosen.format)
    if chosen.format:
        last_report.layout = f"images {_LIE[chosen.format]}, which Inductor would not have chosen"

    def compile_one(one: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made = inductor_passes.passes()
        settings = {**config, **chosen.options}
        return compile_graph(one, inputs, mode, settings, decompositions=DECOMPOSITIONS, passes=made, **kwargs)

    kept = inductor_passes.copied(graph) if inductor_passes.may_scale(graph.graph) else None
    run = compile_one(graph, example_inputs)
    if replays:
        run = Replayed(run, replays is True, grad, written or ())
    return run if kept is None else inductor_passes.WhileAllowed(run, kept, compile_one if kinds else None)


def _changed_by_replays(graph: fx.Graph, kinds: list[Tensor], grad: bool) -> list[int] | None:
    """The arguments that a call changes, in training alone; None: it cannot be replayed."""
    written = inputs_written(graph)
    if not kinds or not machine.MACHINE.takes(kinds[0]) or written is None:
        return None
    if draws_numbers(graph) if grad else written:
        return None
    return [i for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder") if node in written]


def rewrite_graph(
    graph_module: fx.GraphModule, always: bool = False, recompute: bool = False, form: str = ""
) -> Report:
    """Replaces chains of a Dynamo graph by kgopt's ops, in place.

    Both options as in :func:`kgopt_backend`. ``form``: "as it came" where images will lie so; Inductor else runs
    them in channels_last.
    """
    global last_report
    graph = graph_module.graph
    report, glue = Report(), []
    is_changed = passes.plain.simplify(graph)
    # First: what plans, times or fuses convolutions and norms sees those that will run.
    unbiased = passes.unbiased.leave_out(graph_module, always)
    if unbiased:
        glue.append(f"biases that an instance norm takes out again left out: {', '.join(unbiased)}")
    swapped = passes.mapped.swap(graph_module, may_write)
    if swapped:
        glue.append(f"convolutions ahead of nearest upsampling: {', '.join(swapped)}")
    # Ahead of padding, which then stays the compiler's: it reads it on the way.
    products = passes.tapped.swap(graph_module, always)
    if products:
        glue.append(f"depthwise convolutions of one tap as products: {', '.join(products)}")
    padded = passes.padded.fold(graph_module)
    if padded:
        glue.append(f"padding by the convolutions behind it: {', '.join(padded)}")
    folded = passes.upsampled.fold(graph_module, always)
    if folded:
        glue.append(f"nearest upsampling and convolution as one transposed convolution: {', '.join(folded)}")
    moves_images = form != "as it came" and convolves(graph)
    formats = convolutions.find(graph_module, moves_images)
    sums = _sum_taps(graph_module, formats, moves_images, always)
    if sums:
        glue.append(f"depthwise convolutions as sums over their taps: {', '.join(sums)}")
    dims_last = _dims_last(moves_images and convolves(graph), formats)
    contest = None if always else Contest(functools.partial(_write_all, dims_last, maps=False), dims_last)
    switches_autocast = uses_autocast(graph)
    reader = _Reader(graph_module, dims_last)
    for found in reader.matches():
        if found.chain.maps and contest is not None:
            found = reader.faster(found, contest)
        row = SiteRow(found.norm.origin.name, found.chain.label, "")
        row.reason = _Writer(graph_module, found, switches_autocast, always, recompute).replace(contest)
        if not row.reason:
            reader.taken.update(node.origin for node in found.nodes)
            row.became = found.chain.becomes
        report.sites.append(row)
    passes.plain.restore(graph)
    moved = formats.write(graph_module)
    # Behind the norms, which take sums of their own; ahead of the gathered gradient, with which it is compared.
    gather = functools.partial(passes.resampled.swap, dims_last=dims_last)
    doubled = passes.doubled.swap(
        graph_module, None if always else Contest(functools.partial(gather, always=True), dims_last)
    )
    if doubled:
        glue.append(f"linear upsampling by kgopt: {', '.join(doubled)}")
    gathering = gather(graph_module, always)
    if gathering:
        glue.append(f"gradients of resampling without atomics: {', '.join(gathering)}")
    report.glue = "; ".join([*glue, *([moved] if moved else [])])
    if is_changed or report.changes:
        graph.lint()
        graph_module.recompile()
    last_report = report
    if report.glue or report.sites:
        _LOG.info("%s", report)
    return report


def _dims_last(moves_images: bool, formats: convolutions.Convolutions) -> list[int]:
    """Numbers of dims of the tensors that will lie in channels_last."""
    return [*([4] if moves_images else []), *({5} & formats.dims_last)]


def _sum_taps(
    graph_module: fx.GraphModule, formats: convolutions.Convolutions, moves_images: bool, always: bool
) -> list[str]:
    """Depthwise convolutions of several taps as sums, behind the plan of all: names of those that are faster so.

    They are measured in the format that the other convolutions ask for: with none of those all stays as it came.
    """
    nodes = passes.tapped.several(graph_module.graph)
    others = convolutions.Convolutions({node: way for node, way in formats.ways.items() if node not in nodes})
    dims_last = _dims_last(moves_images and convolves(graph_module.graph, nodes), others)
    contest = None if always else Contest(functools.partial(_write_all, dims_last, maps=False), dims_last)
    return passes.tapped.swap_several(graph_module, nodes, contest, formats, dims_last)


def _write_all(dims_last: Sequence[int], graph_module: fx.GraphModule, maps: bool = True) -> None:
    """kgopt's ops wherever they can be; without ``maps`` products with tensors of x's size are the compiler's."""
    switches_autocast = uses_autocast(graph_module.graph)
    reader = _Reader(graph_module, dims_last, maps)
    for found in reader.matches():
        if not _Writer(graph_module, found, switches_autocast, always=True).replace():
            reader.taken.update(node.origin for node in found.nodes)


class _Reader:
    """Describes a graph's nodes to the matcher."""

    def __init__(self, graph_module: fx.GraphModule, dims_last: Sequence[int], maps: bool = True) -> None:
        self.nodes = list(graph_module.graph.nodes)
        self.known: dict[fx.Node, Node] = {}
        self.taken: set[fx.Node] = set()  # by sites that were written: of a sum of two norms one alone is
        self.channel_norms = functional_norms.find(graph_module.graph)
        self.dims_last = dims_last  # as the contest's
        self.adds_scaled = not uses_autocast(graph_module.graph)
        self.takes_maps = maps and self.adds_scaled and not torch.is_grad_enabled()

    def matches(self) -> Iterator[Match]:
        """Chains around every norm of the graph, each without what is :attr:`taken` when it is asked for."""
        for node in self.nodes:
            self.known[node] = self._describe(node)
        for node in self.nodes:
            made = self.known[node]
            readers = [u for u in node.users for n in u.all_input_nodes if n is node]
            for user in readers:
                reader = self.known[user]
                made.read_by(reader if any(i is made for i in reader.inputs) else OTHER)
            # x + x reads x twice, which all_input_nodes tells once.
            for reader in {id(u): self.known[u] for u in readers}.values():
                for _ in range(sum(i is made for i in reader.inputs) - 1):
                    made.read_by(reader)
        for made in list(self.known.values()):
            if made.kind == "norm":
                yield self._match(made)

    def _match(self, norm: Node) -> Match:
        adds_scaled = self.adds_scaled and isinstance(x := value(norm.origin), Tensor)
        return match(norm, self._adds, self._modulates, adds_scaled and not torch.is_autocast_enabled(x.device.type))

    def _adds(self, add: Node, other: Node) -> bool:
        return add.origin not in self.taken and _adds(add, other)

    def faster(self, found: Match, contest: Contest) -> Match:
        """One with maps, or, where the compiler's product and sum behind kgopt's norm are faster, the norm's."""
        maps = [node.origin for node in (found.factor, found.shift) if node is not None]
        core = [n.origin for n in found.nodes]
        if _small(found, maps):  # the compiler does not store what is repeated either
            core += [node for node in maps if all(user in core for user in node.users)]
        with_maps = functools.partial(_write_all, self.dims_last)
        if not contest.lost(core, found.last.origin, value(found.norm.origin), with_maps):
            return found
        self.takes_maps = False
        try:
            return self._match(found.norm)
        finally:
            self.takes_maps = True

    def _modulates(self, norm: Node, node: Node, other: Node) -> str:
        """Of what that, which multiplies a norm's result or is added, has one value: as the matcher asks."""
        x, normed, result, given = (
            value(n) for n in (_input_of(norm), norm.origin, node.origin, _unexpanded(other.origin))
        )
        if not all(isinstance(t, Tensor) for t in (x, normed, result, given)) or not given.is_floating_point():
            return ""
        if node.origin in self.taken:
            return ""
        if (result.shape, result.dtype, result.device) != (normed.shape, normed.dtype, normed.device):
            return ""
        if given.device != normed.device:
            return ""
        if self.takes_maps and node.kind != "sub" and _is_map(given, x, result):
            gives_contiguous = _gives_contiguous(norm, Chain(norm.name), x)
            # Of a norm that keeps channels_last fake tensors say that it does not.
            lies_as_x = (result if gives_contiguous else given).stride() == x.stride()
            return "position" if lies_as_x or (gives_contiguous and result.is_contiguous()) else ""
        # Where samples differ, their channels must be seen as channels of one: not in channels_last.
        is_one_a_channel = _has_one_a_channel(given, normed) and (
            given.dim() < normed.dim()
            or given.shape[0] == 1
            or (x.is_contiguous() and not (x.dim() in self.dims_last and _lies_as_inductor_wants(x)))
        )
        return "channel" if is_one_a_channel else ""

    def _describe(self, node: fx.Node) -> Node:
        channel_norm = self.channel_norms.get(node)
        made, inputs = self._kind(node) if channel_norm is None else (channel_norm, [channel_norm.of])
        made.origin = node
        made.inputs = [self.known[i] for i in inputs]
        return made

    def _kind(self, node: fx.Node) -> tuple[Node, list[fx.Node]]:
        args, kwargs = node.args, dict(node.kwargs)
        with_number = _with_number(node)
        if with_number is not None:
            return with_number
        if node.op not in ("call_function", "call_method") or not args or not isinstance(args[0], fx.Node):
            return Node("value"), []
        x = args[0]
        constants = [UNKNOWN if _holds_node(a) else a for a in args[1:]]
        named = {k: UNKNOWN if _holds_node(v) else v for k, v in kwargs.items()}
        if node.op == "call_method":
            made = describe_method(str(node.target), constants, named)
            kind = _ARITHMETIC_METHODS.get(str(node.target), "")
            if not (made or kind) or not originals.untouched(*originals.methods((str(node.target),)))():
                return Node("value"), []
            if kind and len(args) == (3 if kind == "addcmul" else 2) and _are_nodes(args) and not kwargs:
                return Node(kind, inplace=node.target in ("add_", "mul_")), list(args)  # type: ignore[arg-type]
            return (made, [x]) if made is not None and made.kind != "add" else (Node("value"), [])
        if node.op == "call_function" and not originals.runs_as_is(node.target):
            return Node("value"), []
        if node.target in CONVS:
            return Node("conv", name=CONVS[node.target]), [x]
        if node.target in _NORMS:
            return Node("norm", name=_NORMS[node.target]), [x]
        if node.target is _PRELU:
            of_slope = [*args[1:], *kwargs.values()]
            is_one = len(of_slope) == 1 and isinstance(of_slope[0], fx.Node) and of_slope[0] is not x
            return (Node("act", name=PRELU), [x]) if is_one else (Node("value"), [])
        if node.target is _ADDCMUL and len(args) == 3 and _are_nodes(args) and not kwargs:
            return Node("addcmul"), list(args)  # type: ignore[arg-type]
        if len(args) == 2 and isinstance(args[1], fx.Node):
            if node.target in _PRODUCTS and not kwargs:
                return Node("mul", inplace=_PRODUCTS[node.target]), [x, args[1]]
            if node.target in _SUB and not kwargs:
                return Node("sub"), [x, args[1]]
            if node.target is operator.iadd and originals.untouched(*originals.methods(("__iadd__",)))():
                return Node("add", inplace=True), [x, args[1]]
            made = describe_function(node.target, [], named)
            return (made, [x, args[1]]) if made is not None and made.kind == "add" else (Node("value"), [])
        made = describe_function(node.target, constants, named)
        return (made, [x]) if made is not None and made.kind != "add" else (Node("value"), [])


def _with_number(node: fx.Node) -> tuple[Node, list[fx.Node]] | None:
    """A value plus, minus, times or divided by a number, as an activation; None: something else."""
    if len(node.args) != 2 or node.kwargs:
        return None
    if node.op == "call_function" and originals.runs_as_is(node.target):
        name = _FUNCTIONS_WITH_NUMBER.get(node.target, "")
    elif node.op == "call_method" and originals.untouched(*originals.methods((str(node.target),)))():
        name = str(node.target)
    else:
        return None
    x, number = node.args
    if name in ("add", "mul") and isinstance(number, fx.Node):
        x, number = number, x
    made, given = value(node), value(x)
    text = with_number(name, number)
    if text is None or not isinstance(x, fx.Node):
        return None
    if not isinstance(made, Tensor) or not isinstance(given, Tensor) or made.dtype is not given.dtype:
        return None  # of integers
    return Node("act", name=text, is_number=True), [x]


def _input_of(norm: Node) -> Any:
    """The node that is normalized."""
    return norm.of if isinstance(norm, ChannelNorm) else norm.origin.args[0]


def _unexpanded(node: fx.Node) -> fx.Node:
    """Of a tensor that code expands to x's size, where broadcasting would do, what is expanded."""
    is_expanded = node.op == "call_method" and node.target in ("expand", "expand_as")
    if not is_expanded or not originals.untouched(*originals.methods((str(node.target),)))():
        return node
    of = node.args[0]
    same_rank = isinstance(value(of), Tensor) and value(of).dim() == value(node).dim()
    return of if same_rank else node  # type: ignore[return-value]


def _gives_contiguous(norm: Node, chain: Chain, x: Tensor) -> bool:
    """Where PyTorch's norm gives a contiguous tensor though x is channels_last; code that writes it out does not."""
    return not isinstance(norm, ChannelNorm) and emit.as_torch_is_contiguous(chain, x.device)


def _adds(add: Node, other: Node) -> bool:
    """What is added has the sum's size and dtype: nothing is broadcast or promoted in the op."""
    result, given = value(add.origin), [value(n.origin) for n in (*add.inputs, other)]
    return isinstance(result, Tensor) and all(
        isinstance(t, Tensor) and (t.shape, t.dtype, t.device) == (result.shape, result.dtype, result.device)
        for t in given
    )


def _has_one_a_channel(operand: Tensor, x: Tensor) -> bool:
    """Whether it is, or broadcasts to, one value a channel, or a sample and channel."""
    if fits(operand, x):
        return True
    shape = (*[1] * (x.dim() - operand.dim()), *operand.shape)
    if len(shape) != x.dim() or x.dim() < 2 or not all(type(s) is int for s in (*shape[1:], x.shape[1])):
        return False
    return shape[0] in (1, x.shape[0]) and shape[1] in (1, x.shape[1]) and all(s == 1 for s in shape[2:])


def _small(found: Match, maps: Sequence[fx.Node]) -> list[fx.Node]:
    """What both maps of a match repeat, each position as often; else nothing."""
    inside = {n.origin for n in found.nodes}
    small = [passes.mapped.small_of(node, found.last.origin, may_write, inside) for node in maps]
    sizes = {value(node).shape[2:] for node in small if node is not None}
    return [node for node in small if node is not None] if len(sizes) == 1 and None not in small else []


def _is_map(operand: Tensor, x: Tensor, result: Tensor) -> bool:
    """Whether it has one value each position of x, of the dtype that x, the norm and their product have."""
    if operand.shape != x.shape or x.dim() not in (4, 5) or torch.is_autocast_enabled(x.device.type):
        return False
    if not x.dtype is result.dtype is operand.dtype or not (x.is_contiguous() or is_dense_channels_last(x)):
        return False
    return any(type(s) is not int or s > 1 for s in x.shape[2:])


def _lies_as_inductor_wants(x: Tensor) -> bool:
    return x.is_cuda


def _are_nodes(args: Sequence[Any]) -> bool:
    return all(isinstance(a, fx.Node) for a in args)


def _holds_node(argument: Any) -> bool:
    found: list[Any] = []
    fx.map_arg((argument,), found.append)
    return bool(found)


class _Writer:
    """Replaces one chain in the graph, or says why not."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        found: Match,
        switches_autocast: bool,
        always: bool,
        recompute: bool = False,
    ) -> None:
        self.graph = graph_module.graph
        self.switches_autocast = switches_autocast  # the graph, somewhere inside
        self.found = found
        self.always = always
        self.recompute = recompute
        self.first: fx.Node = found.nodes[0].origin
        self.last: fx.Node = found.last.origin
        self.x: fx.Node = self.first.args[0]  # type: ignore[assignment]
        self.others: list[fx.Node] = []  # that the norm is made of, beside its last one
        self.dead: list[fx.Node] = []  # other values, which perhaps nothing reads any more
        if isinstance(found.norm, ChannelNorm):
            self.first, self.x = found.norm.members[0], found.norm.input
            self.others = found.norm.members[:-1]

    def replace(self, contest: Contest | None = None) -> str:
        """ "" when it is done, else the reason. ``contest``: says where the compiler's own kernels are faster."""
        x, chain = value(self.x), self.found.chain
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.device.type not in ("cpu", "cuda"):
            return "its input is no dense floating-point tensor"
        try:
            made = self.found.norm
            if isinstance(made, ChannelNorm):
                norm = self._channel_args(made, x)
            else:
                norm = self._norm_args(value(made.origin.args[0]))
            conv = self._conv_args(x) if chain.conv else None
            norm.slope = self._slope(x) if chain.has_prelu else None
        except _NotOursError as error:
            return str(error)
        reason = self._obstacle()
        if reason:
            return reason
        if not self.always and not policy.default(x.device.type):
            return "on the CPU, where PyTorch's kernels are the faster ones"
        if contest is not None:
            core = [*self.others, *(n.origin for n in self.found.nodes)]
            reason = contest.lost(core, self.last, value(self.found.norm.origin))
            if reason:
                return reason
        self._write(x, conv, norm)
        return ""

    @staticmethod
    def _channel_args(made: ChannelNorm, x: Tensor) -> NormArgs:
        norm = made.arguments()
        if [bool(made.formula.weight), bool(made.formula.bias)] != [p is not None for p in (norm.weight, norm.bias)]:
            raise _NotOursError("its weight or bias is what another site gives")
        dtypes = {value(p).dtype for p in (norm.weight, norm.bias) if p is not None}
        if len(dtypes) > 1 or dtypes - {x.dtype, torch.float32}:
            raise _NotOursError("its weight or bias has a dtype that PyTorch alone takes")
        return norm

    def _norm_args(self, x: Any) -> NormArgs:
        node: fx.Node = self.found.norm.origin
        if self.found.norm.name == "group":
            given = _bind(("num_groups", "weight", "bias", "eps"), node, {"weight": None, "bias": None, "eps": 1e-5})
            groups, weight, bias, eps = (given[k] for k in ("num_groups", "weight", "bias", "eps"))
        else:
            names = ("running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
            defaults = dict.fromkeys(names[:4]) | {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5}
            given = _bind(names, node, defaults)
            if given["running_mean"] is not None or given["use_input_stats"] is not True:
                raise _NotOursError("it normalizes with, or updates, running statistics")
            # Where the number of channels is symbolic, this makes it a constant, with a guard.
            groups, weight, bias, eps = int(x.shape[1]), given["weight"], given["bias"], given["eps"]
        if type(groups) is not int or not isinstance(eps, float):
            raise _NotOursError("its number of groups or its eps is no constant")
        if x is None or x.dim() < 2 or any(type(s) is int and s == 0 for s in x.shape) or _is_onevalue(x, groups):
            raise _NotOursError("its groups hold no value or one")
        for p in (weight, bias):
            v = value(p)
            if p is not None and (v is None or (v.dtype is not x.dtype and v.dtype is not torch.float32)):
                raise _NotOursError("its weight or bias has a dtype that PyTorch alone takes")
        return NormArgs(groups, weight, bias, eps)

    def _slope(self, x: Tensor) -> fx.Node:
        """The slopes of the chain's PReLU."""
        node = next(n.origin for n in self.found.nodes if n.name == PRELU)
        slope = (*node.args[1:], *node.kwargs.values())[0]
        given, channels = value(slope), value(node).shape[1] if value(node) is not None else None
        if not isinstance(given, Tensor) or given.dim() > 1 or given.numel() not in (1, channels):
            raise _NotOursError("the slopes of its PReLU are not one or one a channel")
        if given.dtype is not x.dtype and given.dtype is not torch.float32:
            raise _NotOursError("the slopes of its PReLU have a dtype that PyTorch alone takes")
        return slope  # type: ignore[no-any-return]

    def _conv_args(self, x: Tensor) -> ConvArgs:
        given = conv_arguments(self.first.target, self.first.args, self.first.kwargs)
        rank = 3 if self.found.chain.conv.endswith("3d") else 2
        weight = value(given["weight"])
        if weight is None or x.dim() != rank + 2:
            raise _NotOursError("its convolution has no batch")

        def numbers(key: str) -> list[int]:
            value = given[key]
            listed = [value] if isinstance(value, int) else list(value)
            if not all(type(v) is int for v in listed):
                raise _NotOursError(f"the {key} of its convolution is no constant")
            return listed * rank if len(listed) == 1 else listed

        given["padding"] = padding_in_numbers(given["padding"], weight.shape[2:], numbers("dilation"))
        if given["padding"] is None:
            raise _NotOursError("its convolution pads one side more than the other")
        stride, padding, dilation = map(numbers, ("stride", "padding", "dilation"))
        output_padding = numbers("output_padding") if "output_padding" in given else None
        return ConvArgs(given["weight"], given["bias"], stride, padding, dilation, given["groups"], output_padding)

    def _obstacle(self) -> str:
        """The chain is computed where its last node stands: nothing in between may change what it reads."""
        inside = {*self.others, *(n.origin for n in self.found.nodes)}
        name = is_written_between(self.first, self.last, inside)
        return f"{name} runs in between and may change what it reads" if name else ""

    def _write(self, x: Tensor, conv: ConvArgs | None, norm: NormArgs) -> None:
        chain, before = self.found.chain, value(self.last)
        autocast = torch.is_autocast_enabled(x.device.type) or self.switches_autocast
        with self.graph.inserting_before(self.last):
            operands = self.found.factor, self.found.shift
            norm.multiplier, norm.addend = self._maps() if chain.maps else map(self._one_a_channel, operands)
            half = half_precision(self.found, self.last, self.switches_autocast, CONVS) if autocast else None
            call_norm = None if half is None else self._call_without_autocast
            given = (self.x, x.dim(), conv, norm)
            y = emit_kgopt(chain, self._call, *given, not autocast, call_norm, self._added())
            # PyTorch's GroupNorm on CUDA gives a contiguous tensor, which later nodes may count on. Times a map in
            # channels_last, which comes first, it is in channels_last.
            as_it_was = _gives_contiguous(self.found.norm, chain, x) and (not chain.maps or before.is_contiguous())
            if as_it_was and not x.is_contiguous():
                y = self.graph.call_method("contiguous", (y,))
        y.meta["example_value"] = before if half is None else before.to(half)
        self.last.replace_all_uses_with(y)
        if half is not None:
            say_half(y, half)
        for found in reversed(self.found.nodes):
            if not found.origin.users:
                self.graph.erase_node(found.origin)
        for node in dict.fromkeys((*self.dead, *reversed(self.others))):
            if not node.users:
                self.graph.erase_node(node)

    def _added(self) -> Any:
        """What a sum adds."""
        return self._operand(self.found.added)

    def _operand(self, operand: Node | None) -> Any:
        """A sum's or product's other value, as it is now: sites before this one have put other nodes in places."""
        for node in self.found.nodes:
            if operand is not None and node.kind in ("add", "sub", "mul", "addcmul"):
                for i, value in enumerate(node.inputs):
                    if value is operand:
                        return node.origin.args[i]
        return None

    def _maps(self) -> Sequence[Any]:
        """Factor and shift; where both are repeated to x's size in the same way, what is repeated."""
        maps = [self._operand(self.found.factor), self._operand(self.found.shift)]
        small = _small(self.found, maps)
        self.dead = maps if small else []
        return small or maps

    def _one_a_channel(self, operand: Node | None) -> Any:
        """A factor or a shift, of the rank and the channels of what the norm gives."""
        node = self._operand(operand)
        if node is None:
            return None
        node = _unexpanded(node)
        given, normed = value(node), value(self.found.norm.origin)
        if operand is self.found.shift and any(n.kind == "sub" for n in self.found.nodes):
            node = self.graph.call_function(operator.neg, (node,))
        if given.dim() == normed.dim() and given.shape[1] == normed.shape[1]:
            return node
        sizes = [-1 if given.dim() == normed.dim() else 1] * normed.dim()
        sizes[1] = normed.shape[1]
        return self.graph.call_method("expand", (node, *sizes))

    def _call_without_autocast(self, function: Any, *args: Any) -> fx.Node:
        if function is emit.modulated_norm:
            return self._call(emit.modulated_norm_without_autocast, *args)
        return self._call(emit.without_autocast, function, *args)

    def _call(self, function: Any, *args: Any) -> fx.Node:
        op = args[0] if function is emit.without_autocast else function
        again = self.recompute and op in _KEEP_THEIR_INPUT and self._is_kept_what_it_adds()
        # Caches of compiled code know the names of nodes, and not what else is said of them.
        node = self.graph.create_node("call_function", function, args, name="computed_again" if again else None)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.last.meta:
                node.meta[key] = self.last.meta[key]
        if again:  # for AOTAutograd's partitioner
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            if self.found.added:
                node.meta[_ADDS] = True
        return node

    def _is_kept_what_it_adds(self) -> bool:
        """Whether a sum's other part is there in the backward, as a norm's input is for its own gradient.

        The slope of most activations follows from both parts; ReLU's follows from the result. Of sums that add sums
        every other one is computed again: else the last one of a chain would call for all of them.
        """
        if not self.found.added:
            return True
        added = self._added()
        if _ADDS in added.meta:
            return False
        return self.found.chain.post not in ("none", "relu") or "recompute" in added.meta or _is_convolved(added)


class _NotOursError(Exception):
    """Why kgopt's ops do not take a node."""


def _bind(names: tuple[str, ...], node: fx.Node, defaults: Mapping[str, Any]) -> dict[str, Any]:
    given = {**defaults, **dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    if any(name not in given for name in names) or set(given) - set(names) - set(defaults):
        raise _NotOursError("its arguments are given in a way that is not known")
    return given


def _is_convolved(node: fx.Node) -> bool:
    """Whether a convolution keeps a value for the gradient of its weight."""
    return any(user.target in _CONVOLUTIONS for user in node.users)


def _is_onevalue(x: Tensor, groups: int) -> bool:
    """PyTorch refuses this, and says how. Sizes that are not known are more than one."""
    spatial = [s for s in x.shape[2:] if not (type(s) is int and s == 1)]
    return not spatial and x.shape[1] == groups
