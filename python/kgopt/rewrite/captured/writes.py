"""What the nodes of a captured graph write to: asked before one is computed in another place."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from kgopt.rewrite.captured.contest import COMPUTED
from kgopt.rewrite.captured.values import name_of
from kgopt.torch_private import schema_of

_OVERLOAD = type(torch.ops.aten.relu.default)
_RANDOM = frozenset(
    (
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "rrelu", "bernoulli"),
        *("multinomial", "normal", "poisson", "uniform", "exponential", "geometric", "cauchy", "log_normal"),
    )
)
_STATE = ("autocast", "set_grad_enabled", "enter", "exit", "functorch")
# Functions whose result is a tensor of its own, if not in place. Of others it may be a view of what they are given.
_FRESH = COMPUTED | frozenset(
    (
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("group_norm", "instance_norm", "batch_norm", "layer_norm", "rms_norm", "linear", "matmul", "bmm", "mm"),
        *("cat", "stack", "interpolate", "clone", "softmax", "scaled_dot_product_attention"),
        *("max_pool2d", "max_pool3d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    )
)


def may_write(node: fx.Node) -> bool:
    """Whether a node may change a tensor, or the state under which later ones run."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.op != "call_function" and node.op != "call_method":
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if node.target is operator.setitem or "out" in node.kwargs or _is_in_place(node):
        return True
    if node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "operator"):
        return str(name).startswith("i") and str(name) not in ("inv", "invert", "index", "indexOf", "is_", "is_not")
    if isinstance(node.target, _OVERLOAD):
        return bool(schema_of(node.target).is_mutable)
    if any(word in str(name) for word in _STATE):
        return True
    return str(name).endswith("_") or getattr(node.target, "namespace", "") == "higher_order"


def is_written_between(first: fx.Node, last: fx.Node, inside: Collection[fx.Node] = ()) -> str:
    """The node behind ``first``, and ahead of ``last``, that may change what others read; "" for none.

    ``inside``: nodes that do not count.
    """
    node = first
    while first is not last and (node := node.next) is not last:
        if node not in inside and may_write(node):
            return node.name
    return ""


def _is_in_place(node: fx.Node) -> bool:
    if "inplace" in node.kwargs:
        return node.kwargs["inplace"] is not False
    code = getattr(node.target, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    at = names.index("inplace") if "inplace" in names else len(node.args)
    return at < len(node.args) and node.args[at] is not False


def draws_numbers(graph: fx.Graph) -> bool:
    """Whether its calls take random numbers, as far as names say so. Dropout of none, or not in training, does not."""
    return any(node.op.startswith("call") and _draws(node) for node in graph.nodes)


def _draws(node: fx.Node) -> bool:
    name = name_of(node)
    if "dropout" not in name:
        return name.rstrip("_") in _RANDOM
    given = dict(zip(("p", "training"), node.args[1:], strict=False)) | dict(node.kwargs)
    return bool(given.get("p", 0.5) != 0) and given.get("training", True) is not False


def inputs_written(graph: fx.Graph) -> set[fx.Node] | None:
    """The arguments that it may change; None: something of the caller's that is not known, or the state under which
    later nodes run.
    """
    own: dict[fx.Node, bool] = {}  # whether nobody else holds its memory
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            own[node] = False
            continue
        if node.op == "call_module" or any(word in name_of(node) for word in _STATE):
            return None
        written = _written(node) if may_write(node) else []
        for i in (*written, *statistics_written(node)):
            if i.op == "placeholder":
                found.add(i)
            elif not own[i]:
                return None
        # Who writes gives what was written to; others that are not known may give a view of anything they read.
        is_own = bool(written) and not found.intersection(written)
        own[node] = is_own or name_of(node) in _FRESH or all(own[i] for i in node.all_input_nodes)
    return found


def _written(node: fx.Node) -> list[fx.Node]:
    """What it writes to, if it writes; all that it reads, where that is not known."""
    out: Any = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return [out]
    if out is None and node.args and isinstance(node.args[0], fx.Node) and not isinstance(node.target, _OVERLOAD):
        return [node.args[0]]
    return list(node.all_input_nodes)


def statistics_written(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a norm moves along."""
    if name_of(node) not in ("batch_norm", "instance_norm"):
        return []
    names = ("running_mean", "running_var", "weight", "bias", "training", "momentum")
    given = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
    flag = given.get("training", given.get("use_input_stats", name_of(node) == "instance_norm"))
    moved = (given.get("running_mean"), given.get("running_var"))
    return [] if flag is False else [t for t in moved if isinstance(t, fx.Node)]
