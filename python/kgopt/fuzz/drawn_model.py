"""A drawn network as a model: its class with a source, its parameters and the inputs of its calls."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.fuzz.writer import write_network

__all__ = ["CHANNELS_LAST", "input_of", "network_class", "randomized"]

Json = dict[str, Any]

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_numbers = itertools.count()


@contextlib.contextmanager
def network_class(case: Json) -> Iterator[Any]:
    """The class ``Net`` of a case, with its source where :mod:`inspect` finds it."""
    text, number = write_network(case), next(_numbers)
    name = f"kgopt_drawn_{number}"
    file = f"<drawn network {number}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    try:
        exec(compile(text, file, "exec", dont_inherit=True), module.__dict__)
        if case["home"] == "executed" and case["copy"] != "pickle":
            del sys.modules[name]  # as of a module that was loaded from a file by hand
        yield module.__dict__["Net"]
    finally:
        sys.modules.pop(name, None)
        linecache.cache.pop(file, None)


def randomized(model: nn.Module, seed: int) -> nn.Module:
    """``model`` with parameters from a seed, all of them away from what constructors give."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if p.dim() > 1 and p.numel() > max(p.shape):
                noise = noise / max(1, p[0].numel()) ** 0.5
            else:
                noise = 0.3 * noise + (1.0 if name.endswith("weight") else 0.0)
            p.copy_(noise)
    return model


def input_of(case: Json, call: Json, index: int, dtype: torch.dtype) -> Tensor:
    """What a call is given, on the CPU."""
    generator = torch.Generator().manual_seed(case["seed"] + index)
    batch = call["batch"] or case["batch"]
    shape = [batch, case["channels"], *(s + call["grow"] for s in case["size"])]
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if call["format"] == "channels_last":
        x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    elif call["format"] == "slice":
        x = torch.cat([x, x], 1)[:, : shape[1]]
    elif call["format"] == "transposed":
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return x
