"""What can be fused, said once for module code and for captured graphs.

A front end (:mod:`~kgopt.rewrite.source` for Python source and ``nn.Sequential``, :mod:`~kgopt.rewrite.backend` for
graphs) describes values as :class:`Node`; :func:`match` finds the largest chain around a norm:

    convolution → pointwise chain → norm → pointwise chain → nothing, residual add, mean or logsumexp

No front end decides what fuses, and this file knows neither syntax trees nor graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kgopt.rewrite import originals
from kgopt.rewrite.disguise import original_class

CONV_MEAN = "conv3d_group_norm_mean"
CONV_RELU_NORM = "conv_transpose3d_relu_group_norm"
CONV_LSE = "conv2d_group_norm_tanh_hardswish_residual_logsumexp"


@dataclass(frozen=True)
class Chain:
    """The structure of a site, with no tensor in it: hashable, picklable, the key of what was measured."""

    norm: str = "group"  # or "instance": as many groups as channels
    conv: str = ""  # "conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d"; "": the chain starts at the norm
    pre: str = "none"  # activations between convolution and norm
    post: str = "none"  # activations after the norm
    residual: bool = False  # the convolution's output is added to the activations' result
    reduce: str = ""  # "mean" or "logsumexp"
    dims: tuple[int, ...] | None = None  # of the reduction; None: every dim but the batch
    keepdim: bool = False
    # The one op that computes all of it, where there is one (and where the input has the usual rank).
    fused_op: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "fused_op", self._find_fused_op())  # once: eager calls ask for it

    def _find_fused_op(self) -> str:
        if self.norm != "group":
            return ""
        plain = not self.residual and self.post == "none"
        if self.conv == "conv3d" and self.pre == "none" and plain and self.reduces_all(5) and not self.keepdim:
            return CONV_MEAN
        if self.conv == "conv_transpose3d" and self.pre == "relu" and plain and not self.reduce:
            return CONV_RELU_NORM
        if self.conv == "conv2d" and self.pre == "none" and self.post == "tanh+hardswish" and self.residual:
            return CONV_LSE if self.reduce == "logsumexp" and self.keepdim and self._channels_only(4) else ""
        return ""

    def reduces_all(self, rank: int) -> bool:
        """Whether it ends in a mean over every dim but the batch."""
        if self.reduce != "mean":
            return False
        if self.dims is None:
            return True
        valid = all(-rank <= d < rank for d in self.dims)
        return valid and sorted(d % rank for d in self.dims) == list(range(1, rank))

    def _channels_only(self, rank: int) -> bool:
        return self.dims in ((1,), (1 - rank,))

    @property
    def label(self) -> str:
        """For people: ``Conv3d → GroupNorm → mean``."""
        names = {"conv2d": "Conv2d", "conv3d": "Conv3d"}
        names |= {"conv_transpose2d": "ConvTranspose2d", "conv_transpose3d": "ConvTranspose3d"}
        parts = [names[self.conv]] if self.conv else []
        parts += [] if self.pre == "none" else self.pre.split("+")
        parts.append("GroupNorm" if self.norm == "group" else "InstanceNorm")
        parts += [] if self.post == "none" else self.post.split("+")
        parts += ["residual"] if self.residual else []
        parts += [self.reduce] if self.reduce else []
        return " → ".join(parts)

    @property
    def becomes(self) -> str:
        """The op or ops that run instead, for the report."""
        if self.fused_op:
            return self.fused_op
        ops = [self.conv] if self.conv else []
        if self.post == "none" and not self.keepdim and any(self.reduces_all(rank) for rank in (3, 4, 5)):
            ops += [] if self.pre == "none" else [f"activation({self.pre})"]
            return " + ".join([*ops, "group_norm_mean"])
        acts = [f"{key}={value}" for key, value in (("pre_act", self.pre), ("act", self.post)) if value != "none"]
        ops.append(f"group_norm({', '.join(acts)})" if acts else "group_norm")
        ops += [self.reduce] if self.reduce else []
        return " + ".join(ops)


# ----------------------------------------------------------------------------------------------------------------------
# The graph that front ends build


@dataclass(eq=False)
class Node:
    """One value. ``kind`` is what made it; every reader is in ``users``, those that are not understood as OTHER."""

    kind: str  # conv, norm, act, same, add, mean, logsumexp, flatten; other: known, but in the way; value
    inputs: list[Node] = field(default_factory=list)
    name: str = ""  # conv: which; norm: group or instance; act: its name
    dims: tuple[int, ...] | None = None
    keepdim: bool = False
    inplace: bool = False
    origin: Any = None  # the front end's own
    users: list[Node] = field(default_factory=list)

    def read_by(self, user: Node) -> None:
        """Counts a use; a value read twice by one reader is counted twice."""
        self.users.append(user)


OTHER = Node("value")


@dataclass
class Match:
    """A chain that was found, and the nodes it is made of, first to last."""

    chain: Chain
    nodes: list[Node]
    input: Node
    norm: Node

    @property
    def last(self) -> Node:
        """The node whose value the whole chain gives."""
        return self.nodes[-1]


def _sole_user(node: Node) -> Node | None:
    return node.users[0] if len(node.users) == 1 else None


def _chain_name(nodes: Sequence[Node]) -> str:
    return "+".join(n.name for n in nodes if n.kind == "act") or "none"


_MAX_ACTIVATIONS = 15  # of the ops' act argument


def match(norm: Node) -> Match:
    """The largest chain around a norm; of one node, where nothing joins it."""
    before = norm.inputs[0]
    pre: list[Node] = []
    while before.kind in ("act", "same") and _sole_user(before) is not None and len(pre) < _MAX_ACTIVATIONS:
        pre.insert(0, before)
        before = before.inputs[0]
    conv = before if before.kind == "conv" else None
    if before.kind == "norm":
        pre = []  # they belong to that one

    post: list[Node] = []
    last = norm
    while (user := _sole_user(last)) is not None and user.kind in ("act", "same") and len(post) < _MAX_ACTIVATIONS:
        post.append(user)
        last = user

    whole = _residual(norm, conv, pre, post, last)  # dropouts that are none may stand anywhere in it
    if whole is not None:
        return whole
    if conv is not None and len(conv.users) != 1:
        conv = None
    # An activation that writes into its input may only be dropped together with what made that input.
    if conv is None and any(n.inplace for n in pre):
        pre = []
    tail = _reduction(last)
    while not tail and post and post[-1].kind == "same":
        post.pop()  # nothing follows that would be gained by passing over it
    fused = _build(norm, conv, pre, post, tail)
    if fused.chain.fused_op or tail or (conv is not None and fused.chain.pre != "none"):
        return fused
    # No op gains from the convolution here: it stays as it is.
    return _build(norm, None, pre if conv is None and fused.chain.pre != "none" else [], post, tail)


def _build(norm: Node, conv: Node | None, pre: list[Node], post: list[Node], tail: list[Node]) -> Match:
    nodes = [*([conv] if conv else []), *pre, norm, *post, *tail]
    reduction = tail[-1] if tail else None
    chain = Chain(
        norm=norm.name,
        conv=conv.name if conv else "",
        pre=_chain_name(pre),
        post=_chain_name(post),
        reduce=reduction.kind if reduction else "",
        dims=reduction.dims if reduction and len(tail) == 1 else None,
        keepdim=reduction.keepdim if reduction else False,
    )
    return Match(chain, nodes, nodes[0].inputs[0], norm)


def _reduction(last: Node) -> list[Node]:
    """The mean or logsumexp that alone reads ``last``; also ``flatten(1).mean(1)``."""
    user = _sole_user(last)
    if user is None:
        return []
    if user.kind in ("mean", "logsumexp"):
        return [user]
    after = _sole_user(user)
    if user.kind == "flatten" and after is not None and after.kind == "mean" and not after.keepdim:
        return [user, after] if after.dims is not None and [d % 2 for d in after.dims] == [1] else []
    return []


def _residual(norm: Node, conv: Node | None, pre: list[Node], post: list[Node], last: Node) -> Match | None:
    """The pipeline whose convolution is read twice: by the norm and by the addition at the end."""
    add = _sole_user(last)
    if conv is None or pre or add is None or add.kind != "add":
        return None
    if len(conv.users) != 2 or sorted(map(id, conv.users)) != sorted((id(norm), id(add))):
        return None
    tail = _reduction(add)
    found = _build(norm, conv, pre, post, tail)
    chain = replace(found.chain, residual=True)
    if not chain.fused_op:
        return None
    return Match(chain, [conv, norm, *post, add, *tail], conv.inputs[0], norm)


def is_trivial(chain: Chain) -> bool:
    """The norm alone, which its own forward does as well."""
    return chain == Chain(chain.norm)


def why_alone(norm: Node) -> str:
    """Why no activation joined a norm that something reads: for the report."""
    if len(norm.users) > 1:
        return f"its result is read {len(norm.users)} times"
    user = _sole_user(norm)
    return user.name if user is not None and user.kind == "other" else ""


# ----------------------------------------------------------------------------------------------------------------------
# What PyTorch's modules, functions and methods mean


def _fixed(name: str, inplace: bool = False) -> Callable[..., tuple[str | None, bool]]:
    return lambda: (name, inplace)


def _switch(name: str) -> Callable[..., tuple[str | None, bool]]:
    def act(inplace: bool = False) -> tuple[str | None, bool]:
        return name, inplace

    return act


def _leaky(inplace_default: bool = False) -> Callable[..., tuple[str | None, bool]]:
    def act(negative_slope: float = 0.01, inplace: bool = inplace_default) -> tuple[str | None, bool]:
        return ("leaky_relu" if negative_slope == 0.01 else None), inplace

    return act


def _elu(inplace_default: bool = False) -> Callable[..., tuple[str | None, bool]]:
    def act(alpha: float = 1.0, inplace: bool = inplace_default) -> tuple[str | None, bool]:
        return ("elu" if alpha == 1 else None), inplace

    return act


def _hardtanh(inplace_default: bool = False) -> Callable[..., tuple[str | None, bool]]:
    def act(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = inplace_default) -> tuple[str | None, bool]:
        return ("hardtanh" if (min_val, max_val) == (-1, 1) else None), inplace

    return act


def _gelu(approximate: str = "none") -> tuple[str | None, bool]:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate), False


def _softplus(beta: float = 1.0, threshold: float = 20.0) -> tuple[str | None, bool]:
    return ("softplus" if (beta, threshold) == (1, 20) else None), False


# Function -> what it computes, given its arguments after the first. Parameters that the ops do not have give None.
ACTIVATION_FUNCTIONS: dict[Any, Callable[..., tuple[str | None, bool]]] = {
    F.relu: _switch("relu"),
    F.relu_: _fixed("relu", inplace=True),
    torch.relu: _fixed("relu"),
    torch.relu_: _fixed("relu", inplace=True),
    F.leaky_relu: _leaky(),
    F.leaky_relu_: _leaky(True),
    F.silu: _switch("silu"),
    F.gelu: _gelu,
    F.sigmoid: _fixed("sigmoid"),
    torch.sigmoid: _fixed("sigmoid"),
    torch.sigmoid_: _fixed("sigmoid", inplace=True),
    F.tanh: _fixed("tanh"),
    torch.tanh: _fixed("tanh"),
    torch.tanh_: _fixed("tanh", inplace=True),
    F.hardswish: _switch("hardswish"),
    F.hardtanh: _hardtanh(),
    F.hardtanh_: _hardtanh(True),
    F.elu: _elu(),
    F.elu_: _elu(True),
    F.mish: _switch("mish"),
    F.softplus: _softplus,
}
# As they are now. What stood in their place by then is not PyTorch's, and means nothing here.
ACTIVATION_FUNCTIONS = {f: rule for f, rule in ACTIVATION_FUNCTIONS.items() if originals.is_torchs(f)}
_MEAN, _LOGSUMEXP, _FLATTEN, _ADD = (
    f if originals.is_torchs(f) else None for f in (torch.mean, torch.logsumexp, torch.flatten, torch.add)
)

ACTIVATION_METHODS: dict[str, Callable[..., tuple[str | None, bool]]] = {
    "relu": _fixed("relu"),
    "relu_": _fixed("relu", inplace=True),
    "sigmoid": _fixed("sigmoid"),
    "sigmoid_": _fixed("sigmoid", inplace=True),
    "tanh": _fixed("tanh"),
    "tanh_": _fixed("tanh", inplace=True),
}

_ACTIVATION_MODULES: dict[type, Callable[[Any], str | None]] = {
    nn.ReLU: lambda m: "relu",
    nn.LeakyReLU: lambda m: "leaky_relu" if m.negative_slope == 0.01 else None,
    nn.SiLU: lambda m: "silu",
    nn.GELU: lambda m: {"none": "gelu", "tanh": "gelu_tanh"}.get(m.approximate),
    nn.Sigmoid: lambda m: "sigmoid",
    nn.Tanh: lambda m: "tanh",
    nn.Hardswish: lambda m: "hardswish",
    nn.Hardtanh: lambda m: "hardtanh" if (m.min_val, m.max_val) == (-1, 1) else None,
    nn.ELU: lambda m: "elu" if m.alpha == 1 else None,
    nn.Mish: lambda m: "mish",
    nn.Softplus: lambda m: "softplus" if (m.beta, m.threshold) == (1, 20) else None,
}

# By what a role says; GELU's two ways are one class's.
ACTIVATION_CLASSES: dict[str, type] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh,
    "elu": nn.ELU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
}

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

CONV_MODULES: dict[type, str] = {
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
}


def conv_of(module: Any) -> str | None:
    """Which convolution exactly this module is, also where its class was replaced by rewrite/glue.py."""
    return CONV_MODULES.get(original_class(module) or type(module))


def activation_of(module: Any) -> str | None:
    """The name of exactly this activation; None for any other module and for parameters that the ops do not have."""
    rule = _ACTIVATION_MODULES.get(type(module))
    return None if rule is None else rule(module)


def is_activation(module: Any) -> bool:
    """An activation that is known, perhaps with parameters that the ops do not have."""
    return type(module) in _ACTIVATION_MODULES


def may_be_identity(module: Any) -> bool:
    """nn.Identity, and dropout, which is one in eval mode."""
    return type(module) is nn.Identity or type(module) in _DROPOUTS


def is_identity(module: Any) -> bool:
    """Now."""
    return type(module) is nn.Identity or (type(module) in _DROPOUTS and (not module.training or module.p == 0))


class _Unknown:
    """An argument that is not a constant."""


UNKNOWN = _Unknown()


def describe_function(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Node | None:
    """The node that a call makes, without its inputs; ``args`` are those after the tensors."""
    if any(a is UNKNOWN for a in (*args, *kwargs.values())):
        return None
    if function is None:
        return None
    try:
        rule = ACTIVATION_FUNCTIONS.get(function)
    except TypeError:  # not hashable
        return None
    try:
        if rule is not None:
            return _activation(rule, args, kwargs)
        if function is _MEAN:
            return _reduce("mean", *args, **kwargs)
        if function is _LOGSUMEXP:
            return _reduce("logsumexp", *args, **kwargs)
        if function is _FLATTEN:
            return _flatten(*args, **kwargs)
        if function in (_ADD, operator.add) and not args and kwargs.get("alpha", 1) == 1 and len(kwargs) <= 1:
            return Node("add") if not kwargs or "alpha" in kwargs else None
    except TypeError:  # arguments that the function does not have: it says so itself when it runs
        return None
    return None


def describe_method(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Node | None:
    """The same for a method of the tensor."""
    if any(a is UNKNOWN for a in (*args, *kwargs.values())):
        return None
    try:
        if name in ACTIVATION_METHODS:
            return _activation(ACTIVATION_METHODS[name], args, kwargs)
        if name in ("mean", "logsumexp"):
            return _reduce(name, *args, **kwargs)
        if name == "flatten":
            return _flatten(*args, **kwargs)
        if name == "add" and not args and not kwargs:
            return Node("add")
    except TypeError:
        return None
    return None


def _activation(rule: Callable[..., tuple[str | None, bool]], args: Sequence[Any], kwargs: Any) -> Node | None:
    name, inplace = rule(*args, **kwargs)
    return None if name is None else Node("act", name=name, inplace=inplace)


def _reduce(kind: str, dim: Any = None, keepdim: bool = False) -> Node | None:
    dims = (dim,) if isinstance(dim, int) else dim
    if not isinstance(dims, (tuple, list)) or not dims or not all(type(d) is int for d in dims):
        return None  # a mean over everything, names, or an empty list, which means different things in different ops
    return Node(kind, dims=tuple(dims), keepdim=bool(keepdim))


def _flatten(start_dim: int = 0, end_dim: int = -1) -> Node | None:
    return Node("flatten") if (start_dim, end_dim) == (1, -1) else None
