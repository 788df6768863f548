"""Weights of PyTorch's convolutions under autocast: the backward rounds them again instead of keeping the copies.

Autocast keeps its copy of a weight until its context ends, the convolution's node keeps it until its gradients are
computed: at the peak of a step all of them are there. So a convolution that PyTorch computes, in a root of
:mod:`~kgopt.rewrite.gradients.recompute`, is given a copy of which autocast does not know, and the node a recipe for
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite.chains.emit import TORCH_CONVS
from kgopt.rewrite.chains.meanings import conv_of
from kgopt.rewrite.gradients import recompute, training
from kgopt.rewrite.optimized import classes
from kgopt.rewrite.optimized.classes import Part
from kgopt.rewrite.pytorch import watching
from kgopt.torch_private import len_torch_function_stack

_PART = ("casts",)
BYTES = 2**20  # of a weight; a smaller one's copy is not worth a launch
_HALF = {dtype: functools.partial(Tensor.to, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)}


def set_mode(root: nn.Module, on: bool) -> str:
    """:func:`recompute.set_mode`, and the same for the convolutions of the root."""
    failed = recompute.set_mode(root, on)
    on = on and not failed
    for module in root.modules():
        original, recipe = classes.recipe_of(module)
        wanted = tuple(part for part in recipe if part != _PART)
        if on and module is not root and training.runner_of(module) is not None and "forward" not in module.__dict__:
            weight = module._parameters.get("weight")
            wanted = (*wanted, _PART) if weight is not None and weight.nbytes >= BYTES else wanted
        if wanted != recipe:
            classes.give(module, original, wanted)
    return failed


def _casting(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def casting_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) != 1 or kwargs:
            return forward(self, *args, **kwargs)
        x, now = args[0], recompute.now()
        if now is None or type(x) is not Tensor or not torch.is_grad_enabled() or not watching.is_autocast(x):
            return forward(self, x)
        dtype = torch.get_autocast_dtype(x.device.type)
        weight = self._parameters.get("weight")
        if dtype not in _HALF or weight is None or weight.dtype is not torch.float32 or not weight.requires_grad:
            return forward(self, x)
        watched = watching.is_watched() or len_torch_function_stack() > watching.own_modes.count
        if watched or x.dtype is torch.float64 or not training.takes(self, x):
            return forward(self, x)
        copy = _HALF[dtype](weight)
        now.offer_copy(copy, _HALF[dtype], weight)
        tail = (self.output_padding, self.groups, self.dilation) if self.transposed else (self.dilation, self.groups)
        convolution = TORCH_CONVS[conv_of(self) or ""]
        return convolution(x, copy, self._parameters["bias"], self.stride, self.padding, *tail)

    return casting_forward


classes.add_part("casts", Part(wrap=lambda _, forward: _casting(forward), place=-1))
