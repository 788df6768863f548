"""Modules without norms: their code is rewritten for the sums and activations behind their convolutions.

Only where a convolution was measured and its op takes what stands behind it, so a model that gains nothing keeps its
classes.
"""

from __future__ import annotations

import torch
from torch import nn

from kgopt.rewrite import source
from kgopt.rewrite.chains.modules import runs_like_sequential
from kgopt.rewrite.glue.plans import has_room
from kgopt.rewrite.norms.torch_norms import NORMS
from kgopt.rewrite.optimized import classes, known
from kgopt.rewrite.source import sequential

_PARTS = ("source", "sequential")


def give(root: nn.Module) -> None:
    """Rewrites the code of modules around convolutions that have room for more, unless that was done for a norm."""
    analyses = source.Analyses()
    for module in list(root.modules()):
        original, recipe = classes.recipe_of(module)
        is_done = any(part[0] in _PARTS for part in recipe)
        if is_done or isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule, *NORMS)):
            continue
        if not any(map(has_room, module.modules())):
            continue
        if isinstance(module, nn.Sequential) and runs_like_sequential(module):
            sequential.rewrite(module, {}, convs=True)
        elif methods := analyses.of(module, original).recipe:
            classes.give(module, original, (*recipe, ("source", methods)))
        if classes.recipe_of(module)[1] != recipe:
            known.put(module, joins=True)


def take_back(root: nn.Module) -> None:
    """Undoes it where no convolution has room for more after all: the whole model decides what they run."""
    for module in root.modules():
        if known.get(module, "joins") and not any(map(has_room, module.modules())):
            original, recipe = classes.recipe_of(module)
            classes.give(module, original, tuple(part for part in recipe if part[0] not in _PARTS))
            known.drop(module, "joins", "steps")
