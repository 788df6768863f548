"""Writes a drawn network (:mod:`kgopt.fuzz.grammar`) as Python: classes as people write them.

It follows the shape of the value while it writes, and gives a layer less where it asks for more than the shape allows:
a stride where one position is left becomes 1. Anything that the grammar draws, and any part of it, becomes code that
runs.
"""

from __future__ import annotations

from kgopt.fuzz.writer.blocks import write_block, write_body
from kgopt.fuzz.writer.draft import ClassDraft, Draft, Json, Shape
from kgopt.fuzz.writer.helpers import HELPERS, IMPORTS

__all__ = ["write_network"]


def write_network(case: Json) -> str:
    """The Python program that defines ``Net`` of a drawn case."""
    w = Draft(case)
    net = _sequential(w) if case["root"] == "sequential" else _module(w)
    parts = [IMPORTS, *(HELPERS[h].lstrip("\n") for h in w.helpers), *w.classes, net]
    return "\n\n".join(parts)


def _module(w: Draft) -> str:
    net = ClassDraft("Net")
    shape = write_body(w, net, w.case["body"], "x", "x", w.input_shape)
    _tail(w, net, shape)
    return net.text()


def _sequential(w: Draft) -> str:
    names, shape = [], w.input_shape
    for block in w.case["body"]:
        inner = ClassDraft(w.class_name("Stage"))
        shape = write_block(w, inner, block | {"own": False}, "x", "x", shape)
        names.append(w.finish(inner))
    tail = ClassDraft("Tail")
    _tail(w, tail, shape)
    w.classes.append(tail.text())
    body = "".join(f"            {n},\n" for n in [*names, "Tail()"])
    return f"class Net(nn.Sequential):\n    def __init__(self):\n        super().__init__(\n{body}        )\n"


def _tail(w: Draft, at: ClassDraft, shape: Shape) -> None:
    tail, dims = w.case["tail"], tuple(range(1, 2 + w.dims))
    if tail == "linear":
        at.say(f"x = {at.attribute('head', f'nn.Linear({shape.channels}, 3)')}(x.flatten(2).mean(2))")
    elif tail == "adaptive":
        at.say(f"x = {at.attribute('pool', f'nn.AdaptiveAvgPool{w.dims}d(1)')}(x).flatten(1)")
    elif tail:
        at.say(
            {
                "mean": f"x = x.mean({dims})",
                "mean_keep": f"x = torch.mean(x, dim={dims[1:]}, keepdim=True)",
                "logsumexp": "x = torch.logsumexp(x, dim=1, keepdim=True)",
                "sum": f"x = x.sum({dims[1:]})",
                "amax": f"x = x.amax({dims[1:]})",
            }[tail]
        )
    at.say({"tensor": "return x", "tuple": "return x, x * 2", "dict": "return {'sample': x}"}[w.case["returns"]])
