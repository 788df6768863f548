"""What makes two models equal for a measurement: structure, configuration, code and inputs, but no values.

Everything that a module holds and that is a plain value counts, so nothing needs to be known of any library's classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kgopt.rewrite.measure.verdicts import canonical
from kgopt.rewrite.optimized import known
from kgopt.rewrite.optimized.disguise import original_class
from kgopt.rewrite.pytorch.watching import is_hooked

_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device)
_DEPTH = 4  # of tuples, lists and dicts in a module's attributes


def of_model(root: nn.Module, *more: Any) -> str:
    """A digest of the model and of ``more``, such as the inputs. Two models whose digests agree run the same code on
    tensors of the same kinds; what is optimized in one of them is optimized in the other.
    """
    digest = hashlib.sha256()
    for line in _lines(root):
        digest.update(line.encode())
        digest.update(b"\n")
    digest.update(canonical(more).encode())
    return digest.hexdigest()


def _lines(root: nn.Module) -> Iterator[str]:
    first: dict[int, str] = {}  # a module or parameter that is used twice
    for path, module in root.named_modules(remove_duplicate=False):
        if id(module) in first:
            yield f"{path} is {first[id(module)]}"
            continue
        first[id(module)] = path or "(root)"
        cls = original_class(module) or type(module)
        state = module.training, is_hooked(module), known.get(module, "site") is not None
        yield f"{path}: {cls.__module__}.{cls.__qualname__} {_code_of(cls)} {state}"
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) in first:
                yield f"{path}.{name} is {first[id(tensor)]}"
                continue
            first[id(tensor)] = f"{path}.{name}"
            yield f"{path}.{name}: {canonical(tensor)}"
        held = {k: v for k, v in vars(module).items() if not k.startswith(("_", "training")) and _is_plain(v)}
        yield canonical(held)


def _code_of(cls: type) -> str:
    """Of its forward, so that an edited model is another one in the next process."""
    code = getattr(getattr(cls, "forward", None), "__code__", None)
    if code is None:
        return ""
    digest = hashlib.sha256(code.co_code)
    digest.update(repr((code.co_names, [c for c in code.co_consts if _is_plain(c)])).encode())
    return digest.hexdigest()[:16]


def _is_plain(value: Any, depth: int = _DEPTH) -> bool:
    if value is None or isinstance(value, _PLAIN):
        return True
    if not depth:
        return False
    if isinstance(value, dict):
        return all(_is_plain(k, 0) and _is_plain(v, depth - 1) for k, v in value.items())
    return isinstance(value, (tuple, list)) and all(_is_plain(v, depth - 1) for v in value)
