"""Moments that reach the norm behind a convolution in compiled code: a pass over Inductor's graphs.

While a model is traced nobody can say whether the tensor that a norm is given still has the values that a convolution
returned: an in-place change leaves no mark that a trace could ask for. In the graph that Inductor lowers nothing is
changed in place, and the norm reads the convolution's result or another node. So the convolution gives its moments
(``conv_add_moments``), and here a norm of its result takes them. Whether a convolution shall is in the graph, which is
Inductor's key for compiled code; nothing else decides here.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kgopt._after_import import after_import
from kgopt.rewrite.inductor import lowering
from kgopt.torch_private import INDUCTOR_PATTERNS, inductor_patterns

_OPS = torch.ops.kgopt
_MADE = _OPS.conv_add_moments.default
_NORM, _NORM_MOMENTS = _OPS.group_norm.default, _OPS.group_norm_moments.default
# A norm and a convolution in one op, whose second argument is the moments.
_HEADS = (_OPS.group_norm_conv1x1.default, _OPS.group_norm_conv.default)


def _takes(node: fx.Node) -> bool:
    """Whether a norm's input is what a convolution made together with its moments."""
    x = node.args[0] if node.args else None
    if not isinstance(x, fx.Node) or x.target is not operator.getitem or x.args[1] != 0:
        return False
    made = x.args[0]
    if not isinstance(made, fx.Node) or made.target is not _MADE:
        return False
    # A head without a norm (no groups) has no use for them.
    return node.target is _NORM or bool(len(node.args) > 2 and node.args[1] is None and node.args[2] != 0)


def _give(graph: fx.Graph, node: fx.Node) -> None:
    """Has a norm take them."""
    x: Any = node.args[0]
    made = x.args[0]
    moments = next((u for u in made.users if u.target is operator.getitem and u.args[1] == 1), None)
    if moments is None:
        with graph.inserting_after(x):
            moments = graph.call_function(operator.getitem, (made, 1))
        if "val" in made.meta:
            moments.meta["val"] = made.meta["val"][1]
    # What Inductor keeps of the call as it was: strides for each argument, which it takes from the nodes without it.
    node.meta.pop("eager_input_vals", None)
    if node.target is not _NORM:
        node.args = (x, moments, *node.args[2:])
        return
    with graph.inserting_before(node):
        new = graph.call_function(_NORM_MOMENTS, (x, moments, *node.args[1:]), dict(node.kwargs))
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _register() -> None:
    """As patterns of Inductor's own pass: its hooks for passes of others hold one each, which is the user's."""
    found = inductor_patterns()
    if found is None:
        return
    lowering.install()
    pass_patterns, call_of, register_graph_pattern = found

    @register_graph_pattern(
        call_of(torch.ops.aten.clone.default),
        extra_check=lambda match: lowering.is_needless(match.output_node()),
        pass_dict=pass_patterns[0],
    )
    def leave_out(match: Any, *args: Any, **kwargs: Any) -> None:
        lowering.leave_out(match.graph, match.output_node())

    def replace(match: Any, *args: Any, **kwargs: Any) -> None:
        _give(match.graph, match.output_node())

    for target in (_NORM, *_HEADS):
        register_graph_pattern(
            call_of(target),
            extra_check=lambda match: _takes(match.output_node()),
            pass_dict=pass_patterns[0],
        )(replace)


def install() -> None:
    """Once Inductor is there: importing it takes a second."""
    after_import(INDUCTOR_PATTERNS, _register)
