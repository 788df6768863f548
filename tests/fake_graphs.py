"""Graphs of fake tensors, as Dynamo gives them: also of a GPU that is not here."""

from __future__ import annotations

from torch import fx


def captured(function, mode, *tensors):
    """A graph as Dynamo gives it: fake tensors as examples."""
    traced = fx.symbolic_trace(function)
    made = {}

    class Run(fx.Interpreter):
        def run_node(self, n):
            made[n] = super().run_node(n)
            return made[n]

    with mode:
        Run(traced).run(*tensors)
    for node, y in made.items():
        if node.op != "output":
            node.meta["example_value"] = y
    return traced
