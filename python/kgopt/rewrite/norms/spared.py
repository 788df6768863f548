"""Inputs of norms that a model may write to after the call, as ``x += self.block(x)`` does.

A norm's gradient needs its input. PyTorch's code often keeps something else for it: the copy of an input that was not
contiguous, autocast's float32 copy, the result of the ReLU in front, differences from a mean. kgopt's ops keep the
input itself, and autograd refuses the backward of one that was written to. So the first time that a module is given
such an input in training the op gets a copy of it, and the backward finds out whether the input was written to. If not,
later calls of that kind need no copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kgopt.torch_private import version_of

RESULT_IS_KEPT = ("relu", "sigmoid", "tanh")  # activations whose gradient PyTorch computes from their result
KINDS = 64  # of inputs that one module remembers; it is asked of none beyond

Written = dict[Any, bool]
"""By the kind of input: was it written to after a call?"""


class _Watch:
    """Finds out once, in the backward or when its graph is freed, whether a tensor was written to."""

    def __init__(self, written: Written, kind: Any, x: Tensor) -> None:
        self.written, self.kind = written, kind
        # Shares the count of writes with x, and not its memory.
        self.twin: Tensor | None = x.detach()
        self.twin.data = x.new_empty(0)
        self.version = version_of(x)

    def look(self) -> None:
        """Takes it down. That an input of this kind was written to once is never forgotten."""
        if self.twin is not None and self.version is not None:
            now = self.written.get(self.kind, False) or version_of(self.twin) != self.version
            self.written[self.kind] = now
        self.twin = None

    def __del__(self) -> None:
        self.look()


class _Copy(torch.autograd.Function):
    """A copy of x; its backward comes when all that the copy was kept for has run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: _Watch) -> Tensor:
        ctx.watch = watch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        ctx.watch.look()
        return dy, None


def copied(written: Written, kind: Any, x: Tensor) -> Tensor:
    """What an op is given for x, where gradients are on, PyTorch's code would not keep x itself, and it is not known
    that inputs of this kind are left alone.
    """
    known = written.get(kind)
    if known is None and len(written) >= KINDS:
        known = any(written.values())
        if not known:
            return x
    # Of an x without a gradient no backward runs, which could look.
    return x.clone() if known or not x.requires_grad else _Copy.apply(x, _Watch(written, kind, x))  # type: ignore[no-any-return,no-untyped-call]
