"""Graphs of fake tensors, as Dynamo gives them: also of a GPU that is not here."""

from __future__ import annotations

import pytest
import torch
from torch import fx

needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="of fake tensors on a GPU a torch without CUDA refuses memory formats, and gradients end the process",
)


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
