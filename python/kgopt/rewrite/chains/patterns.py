"""What can be fused, said once for module code and for captured graphs.

A front end (:mod:`~kgopt.rewrite.source`, :mod:`~kgopt.rewrite.source.sequential`, :mod:`~kgopt.rewrite.backend`)
describes values as :class:`Node`; :func:`match` finds the largest :class:`~kgopt.rewrite.chains.chain.Chain` around a
norm. No front end decides what fuses, and this file knows neither syntax trees nor graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kgopt.rewrite.chains.chain import BY_FORMULA, PRELU, Chain, takes_another


@dataclass(eq=False)
class Node:
    """One value. ``kind`` is what made it; every reader is in ``users``, those that are not understood as OTHER."""

    # conv, norm, act, same, add, sub and mul (of two values), addcmul (of three), mean, logsumexp, flatten;
    # other: known, but in the way; value
    kind: str
    inputs: list[Node] = field(default_factory=list)
    name: str = ""  # conv: which; norm: as in Chain; act: its name
    dims: tuple[int, ...] | None = None
    keepdim: bool = False
    inplace: bool = False
    is_number: bool = False  # of an act: arithmetic with a number, which joins what is in front of it alone
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
    added: Node | None = None  # the other value of a sum behind the norm
    factor: Node | None = None  # one value a sample and channel, or a map, with which it is multiplied
    shift: Node | None = None  # and what is added then

    @property
    def last(self) -> Node:
        """The node whose value the whole chain gives."""
        return self.nodes[-1]


def _sole_user(node: Node) -> Node | None:
    return node.users[0] if len(node.users) == 1 else None


def _chain_name(nodes: Sequence[Node]) -> str:
    return "+".join(n.name for n in nodes if n.kind == "act") or "none"


def _has_room(nodes: Sequence[Node], one: Node, prelu: bool = True) -> bool:
    """Whether the ops take another activation. ``prelu``: also one with slopes."""
    if one.kind != "act":
        return True
    return (prelu or one.name != PRELU) and takes_another([n.name for n in nodes if n.kind == "act"], one.name)


def match(
    norm: Node,
    adds: Callable[[Node, Node], bool] | None = None,
    modulates: Callable[[Node, Node, Node], str] | None = None,
    adds_scaled: bool = False,
) -> Match:
    """The largest chain around a norm; of one node, where nothing joins it.

    ``adds(sum, other)``: whether a sum with another value may be part of it; ``modulates(norm, node, other)``: of what
    other has one value, a "channel" (of a sample) of what the norm gives or a "position" (a map); "": of nothing that
    is known, or ``node``, their product or sum, is not as large. ``adds_scaled``: also a sum behind products.
    """
    before = norm.inputs[0]
    pre: list[Node] = []
    while before.kind in ("act", "same") and _sole_user(before) is not None and _has_room(pre, before, False):
        if before.is_number:
            break
        pre.insert(0, before)
        before = before.inputs[0]
    conv = before if before.kind == "conv" else None
    source = before
    while source.kind in ("act", "same") and source.inputs:
        source = source.inputs[0]
    if source.kind == "norm":
        pre = []  # they belong to that one

    post: list[Node] = []
    last = norm
    prelu = norm.name not in BY_FORMULA
    while (user := _sole_user(last)) is not None and user.kind in ("act", "same") and _has_room(post, user, prelu):
        post.append(user)
        last = user

    if norm.name in BY_FORMULA:  # the op takes the activations behind it
        while post and post[-1].kind == "same":
            post.pop()
        return _build(norm, None, [], post, [])
    whole = _residual(norm, conv, pre, post, last)  # dropouts that are none may stand anywhere in it
    if whole is not None:
        return whole
    modulated = None if modulates is None else _modulated(norm, modulates, adds if adds_scaled else None)
    if modulated is not None:
        return modulated
    summed = None if adds is None else _sum(norm, adds)
    if summed is not None:
        return summed
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


def _passed(node: Node) -> list[Node]:
    """What passes a value on as it is, dropouts that are none."""
    found: list[Node] = []
    while (user := _sole_user(found[-1] if found else node)) is not None and user.kind == "same":
        found.append(user)
    return found


def _sum(norm: Node, adds: Callable[[Node, Node], bool]) -> Match | None:
    """``act(norm(x) + other)``. Of a sum of two norms it is the first one's."""
    same = _passed(norm)
    mine = same[-1] if same else norm
    add = _sole_user(mine)
    if add is None or add.kind != "add":
        return None
    first, second = add.inputs
    other = second if mine is first else first
    if other is mine or (mine is second and (add.inplace or _gives_norm(first, add))):
        return None
    if not adds(add, other):
        return None
    post: list[Node] = []
    last = add
    while (user := _sole_user(last)) is not None and user.kind in ("act", "same") and _has_room(post, user):
        post.append(user)
        last = user
    while post and post[-1].kind == "same":
        post.pop()
    chain = Chain(norm=norm.name, added=True, post=_chain_name(post))
    return Match(chain, [norm, *same, add, *post], norm.inputs[0], norm, other)


def _modulated(
    norm: Node, modulates: Callable[[Node, Node, Node], str], adds: Callable[[Node, Node], bool] | None
) -> Match | None:
    """``act(norm(x) * factor + shift)``, or one of the two; of maps both. With ``adds`` also plus another tensor."""
    nodes, last = [norm], norm
    factor: Node | None = None
    shift: Node | None = None
    kinds: set[str] = set()
    while shift is None:
        same = _passed(last)
        mine = same[-1] if same else last
        user = _sole_user(mine)
        if user is None or user.kind not in ("mul", "add", "sub", "addcmul"):
            break
        if (factor and user.kind not in ("add", "sub")) or (user.kind == "sub" and mine is not user.inputs[0]):
            break
        others = [value for value in user.inputs if value is not mine]
        if len(others) != len(user.inputs) - 1 or (mine is not user.inputs[0] and user.inplace):
            break
        if user.kind == "addcmul" and mine is user.inputs[0]:
            break
        found = {modulates(norm, user, o) for o in others}
        if "" in found or len(kinds | found) > 1:
            break
        kinds = found
        if user.kind == "addcmul":
            shift, factor = others
        elif user.kind == "mul":
            factor = others[0]
        else:
            shift = others[0]
        nodes += [*same, user]
        last = user
    maps = kinds == {"position"}
    if last is norm or (maps and not (factor and shift)):
        return None
    added: Node | None = None
    add = _sole_user(last)
    if adds is not None and not maps and add is not None and add.kind == "add":
        other = add.inputs[1 - add.inputs.index(last)]
        if other is not last and not (other is add.inputs[0] and add.inplace) and adds(add, other):
            added, last = other, add
            nodes.append(add)
    post: list[Node] = []
    prelu = not (maps or added)
    while (user := _sole_user(last)) is not None and user.kind in ("act", "same") and _has_room(post, user, prelu):
        post.append(user)
        last = user
    while post and post[-1].kind == "same":
        post.pop()
    is_scaled, is_shifted = factor is not None, shift is not None
    acts = _chain_name(post)
    chain = Chain(norm.name, added=added is not None, scaled=is_scaled, shifted=is_shifted, maps=maps, post=acts)
    return Match(chain, [*nodes, *post], norm.inputs[0], norm, added, factor, shift)


def _gives_norm(value: Node, reader: Node) -> bool:
    """Whether this is a norm's value that nothing else reads."""
    while value.kind == "same" and _sole_user(value) is reader:
        reader, value = value, value.inputs[0]
    return value.kind == "norm" and _sole_user(value) is reader


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
    if conv is None or pre or add is None or add.kind != "add" or add.inplace:
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
