"""What is undone: calls that are only trials, and all that kgopt.optimize did, where it fails."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kgopt._layout import is_expanded
from kgopt.rewrite.optimized import known
from kgopt.rewrite.optimized.disguise import become, original_class
from kgopt.torch_private import tree_leaves, version_of

# Two threads that optimize or restore one model take turns; those that call it do not wait.
LOCK = threading.RLock()


def _said(value: Any) -> Any:
    """What a state or a report says now. (copy.copy leaves a state's measurements out.)"""
    if not hasattr(value, "__dict__"):
        return {}
    return {k: copy.copy(v) if isinstance(v, (dict, list, set)) else v for k, v in vars(value).items()}


class _Before:
    """A module before it was optimized: its class, what it holds, and what it knew from an earlier call."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.cls = type(module)
        self.original = original_class(module) or self.cls
        self.attributes = dict(module.__dict__)
        self.known = known.known_of(module)
        self.knew = [] if self.known is None else [(n, getattr(self.known, n)) for n in known.NAMES]
        self.said = [_said(value) for _, value in self.knew]
        # Parameters, buffers, children and hooks.
        self.held = [(v, dict(v)) for v in self.attributes.values() if isinstance(v, dict)]

    def put_back(self) -> None:
        module = self.module
        current = original_class(module)
        if (current or type(module)) is not self.original:
            # The module itself became something else, as lazy modules do at their first call: that stays.
            if current is not None:
                become(module, current)
            known.clear(module)
            return
        # The objects that it knew, with what they said: other threads may hold them.
        for (name, value), said in zip(self.knew, self.said, strict=True):
            setattr(self.known, name, value)
            if said:
                vars(value).update(said)
        for holder, items in self.held:
            if [(k, id(v)) for k, v in holder.items()] != [(k, id(v)) for k, v in items.items()]:
                holder.clear()
                holder.update(items)
        # A made class first finds what it looks for; the original one does not look.
        module.__dict__.update(self.attributes)
        if type(module) is not self.cls:
            become(module, self.cls)
        for name in [n for n in module.__dict__ if n not in self.attributes]:
            module.__dict__.pop(name, None)


@contextlib.contextmanager
def all_or_nothing(root: nn.Module, undo: Callable[[], Any]) -> Iterator[None]:
    """Where the block fails, every module of ``root`` becomes what it was; ``undo`` goes first."""
    before = [_Before(module) for module in root.modules()]
    grads = [(p, p.grad) for p in root.parameters()]
    try:
        yield
    except BaseException:
        undo()
        for module in before:
            module.put_back()
        for p, grad in grads:
            if p.grad is not grad:
                p.grad = grad
        raise


def snapshot(root: nn.Module, given: Any = None) -> Callable[[], None]:
    """Puts back a model's buffers, what it wrote to the tensors in ``given``, and the random state of all devices."""
    buffers = {name: b.detach().clone() for name, b in root.named_buffers() if not is_lazy(b)}
    tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    written = [t for t in tensors if t.layout is not torch.strided or not is_expanded(t)]  # nobody may write to others
    held = [(t, None if t.is_inference() else version_of(t), t.detach().clone()) for t in written]
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def put_back() -> None:
        with torch.no_grad():
            for name, b in root.named_buffers():
                if name in buffers and b.shape == buffers[name].shape:
                    b.copy_(buffers[name])
        for t, version, value in held:
            if version is None or version_of(t) != version:
                with torch.no_grad(), torch.inference_mode(t.is_inference()):
                    t.copy_(value)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return put_back
