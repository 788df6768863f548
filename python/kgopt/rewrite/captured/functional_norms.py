"""Norms over channels, and norms in groups that are written out, in captured graphs: nodes whose values, of one node's,
are such a norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from kgopt._layout import is_dense_channels_last
from kgopt.rewrite import formulas
from kgopt.rewrite.captured.values import uses_autocast, value
from kgopt.rewrite.chains.emit import NormArgs, written
from kgopt.rewrite.chains.patterns import Node
from kgopt.rewrite.formulas import Formula, UnknownFormulaError, Value
from kgopt.rewrite.pytorch import originals

_RANKS = {1: (3, 4, 5), -1: (4, 5)}  # by the dim of channels: tokens of attention are PyTorch's
# What a norm starts with.
_FIRST = {"pow", "square", "mul", "mean", "norm", "vector_norm", "linalg_vector_norm", "normalize", "var", "std", "sub"}
_FIRST |= {"var_mean", "layer_norm", "view", "reshape", "flatten"}
_FIRST |= {"permute", "movedim", "moveaxis", "transpose", "to", "float", "type"}


@dataclass(eq=False)
class ChannelNorm(Node):
    """A norm that several nodes compute."""

    of: Any = None  # the node that is normalized
    at: int = 0  # among the inputs of the first member
    formula: Any = None
    members: list[fx.Node] = field(default_factory=list)  # in their order; the last one is the origin

    @property
    def input(self) -> fx.Node:
        """What is normalized, as it is now: sites before this one have put other nodes in their places."""
        return self.members[0].all_input_nodes[self.at]

    def arguments(self) -> NormArgs:
        """The op's arguments, parameters as nodes."""
        f: Formula = self.formula
        named = {n.name: n for member in self.members for n in member.all_input_nodes}
        weight, bias = (named.get(name) for name in (f.weight, f.bias))
        if f.groups:
            return written(weight, bias, f, value(self.of).shape[1])
        return NormArgs(0, weight, bias, f.eps, f.factor, f.bias_factor, f.axis, f.lies)


def find(graph: fx.Graph) -> dict[fx.Node, ChannelNorm]:
    """Those of a graph, by the node that gives their value."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[fx.Node, ChannelNorm] = {}
    in_groups = not uses_autocast(graph)  # whose op has a rule of its own
    taken: set[fx.Node] = set()
    for node in place:
        if (node in taken and node not in found) or not any(_name_of(user) in _FIRST for user in node.users):
            continue
        for norm in _norms_of(node, place, in_groups):
            if not taken & set(norm.members):
                found[norm.members[-1]] = norm
                taken.update(norm.members)
    return found


def _tensor(node: Any) -> Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _name_of(node: fx.Node) -> str:
    """The function or method that a node calls, by its name; "" for any other node, and for what is not PyTorch's."""
    if node.op == "call_method":
        name = str(node.target)
        return name if originals.is_torchs(getattr(Tensor, name, None)) else ""
    if node.op != "call_function" or not originals.is_torchs(node.target):
        return ""
    return getattr(node.target, "__name__", "")


def _norms_of(of: fx.Node, place: dict[fx.Node, int], in_groups: bool) -> Iterator[ChannelNorm]:
    """The largest ones first."""
    x = _tensor(of)
    if x is None or not x.dtype.is_floating_point or torch.is_autocast_enabled(x.device.type):
        return
    for given in _inputs(of, x, in_groups):
        values = _values(of, given, place)
        for last in sorted(values.keys() - {of}, key=place.__getitem__, reverse=True):
            try:
                formula = formulas.recognize(values[last])
            except UnknownFormulaError:
                continue
            members = sorted(_between(of, last, values), key=place.__getitem__)
            made = value(last)
            if not isinstance(made, Tensor) or made.dtype is not x.dtype or made.shape != x.shape:
                continue
            if formula.dtype is not x.dtype or (formula.axis != 1 and formula.lies is not None):
                continue
            if formula.groups and not (x.is_contiguous() or (formula.lies is None and is_dense_channels_last(x))):
                continue
            if all(user in members for member in members[:-1] for user in member.users):
                at = members[0].all_input_nodes.index(of)
                name = "group" if formula.groups else formula.kind
                yield ChannelNorm("norm", name=name, of=of, at=at, formula=formula, members=members)


def _inputs(of: fx.Node, x: Tensor, in_groups: bool) -> Iterator[Value]:
    """What a node is taken for, one after the other."""
    for axis, ranks in _RANKS.items():
        channels = x.shape[axis] if x.dim() in ranks else None
        if type(channels) is int:
            yield formulas.input_value(x.dim(), channels, axis, x.dtype, False)
    if not in_groups or x.dim() not in (4, 5) or type(x.shape[1]) is not int:
        return
    channels, groups = x.shape[1], {x.shape[1], 1}
    for shape in (t.shape for user in of.users if (t := _tensor(user)) is not None and t.dim() > 1):
        groups |= {s for s in (shape[1], shape[0] // x.shape[0]) if type(s) is int and s > 0 and channels % s == 0}
    for count in sorted(groups):
        given = formulas.grouped_input(x.shape, count, x.dtype, False)
        if given.count != 1:
            yield given


def _values(of: fx.Node, x: Value, place: dict[fx.Node, int]) -> dict[fx.Node, Any]:
    """What nodes compute of one, as far as norms go."""
    values: dict[fx.Node, Any] = {of: x}
    waiting = set(of.users)
    while waiting:
        node = min(waiting, key=place.__getitem__)
        waiting.discard(node)
        name = _name_of(node)
        if not name:
            continue
        try:
            args, kwargs = _given((node.args, node.kwargs), values)
            values[node] = formulas.apply(name, args, kwargs)
        except UnknownFormulaError:
            continue
        waiting.update(node.users)
    return values


def _given(arguments: Any, values: dict[fx.Node, Any]) -> Any:
    def value_of(node: fx.Node) -> Any:
        if node in values:
            return values[node]
        p = _tensor(node)
        if p is None or not all(type(s) is int for s in p.shape):
            raise UnknownFormulaError("it computes with what is no constant")
        return formulas.parameter(node.name, p.shape, p.dtype)

    return fx.map_arg(arguments, value_of)


def _between(of: fx.Node, last: fx.Node, values: dict[fx.Node, Any]) -> Iterator[fx.Node]:
    seen, waiting = {of}, [last]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [n for n in node.all_input_nodes if n in values]
