"""Faults that tests plant into kgopt in a fuzzing worker, which calls one of these before its first case."""

from __future__ import annotations

import functools
import os
import signal
import time

import torch
from torch import Tensor

from kgopt import functional


def _around(name, change):
    """Puts ``change(result, x)`` behind the op that a function of kgopt.functional calls."""
    op = getattr(functional, name)

    @functools.wraps(op)
    def faulty(x, *args, **kwargs):
        return change(op(x, *args, **kwargs), x)

    setattr(functional, name, faulty)


def one_element_off():
    """One element, the last one, is its neighbour's value."""

    def change(y, x):
        if y.numel() < 2:
            return y
        index = torch.arange(y.numel(), device=y.device)
        index[-1] -= 1
        return y.flatten()[index].view(y.shape)

    _around("_group_norm", change)


def one_unwritten():
    """The last element is what its memory held: here NaN, as the search leaves it."""

    def change(y, x):
        mask = torch.zeros(y.numel(), dtype=torch.bool, device=y.device)
        mask[-1:] = True
        return y.masked_fill(mask.view(y.shape), torch.nan)

    _around("_group_norm", change)


def scale_error():
    """Everything is 1e-3 too large."""
    _around("_conv2d", lambda y, x: y * 1.001)


def gradient_scale_error():
    """The gradient of x is 1e-3 too large."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dy):
            return dy * 1.001

    op = functional._conv3d
    functional._conv3d = lambda x, *args, **kwargs: op(Scaled.apply(x), *args, **kwargs)


def nan_dropped():
    """A NaN becomes zero."""
    _around("_activation", lambda y, x: y.nan_to_num(0.0))


def refusal_lost():
    """What is refused gives zeros."""
    op = functional._conv2d

    def faulty(x, *args, **kwargs):
        try:
            return op(x, *args, **kwargs)
        except RuntimeError:
            return torch.zeros(1)

    functional._conv2d = faulty


def refuses():
    """A batch of one is refused."""

    def change(y, x):
        if x.dim() > 1 and x.shape[0] == 1:
            raise RuntimeError("N is 1")
        return y

    _around("_group_norm", change)


def other_bits():
    """Each call gives other bits."""
    count = [0]

    def change(y, x):
        count[0] += 1
        return y * (1 + 2 * torch.finfo(y.dtype).eps * (count[0] % 2))

    _around("_logsumexp", change)


def writes_input():
    """The input changes."""

    def change(y, x):
        if x.numel() and 0 not in x.stride():
            with torch.no_grad():
                x.detach().flatten()[:1].zero_()
                x.detach().view(-1)[:1].zero_() if x.is_contiguous() else None
        return y

    _around("_activation", change)


def dies():
    """A division by zero in host code, where C is a prime above 3."""

    def change(y, x):
        if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] in (5, 7, 11, 13):
            os.kill(os.getpid(), signal.SIGFPE)
        return y

    _around("_group_norm", change)


def hangs():
    """Never comes back where a batch is 3."""

    def change(y, x):
        while x.dim() > 0 and x.shape[0] == 3:
            time.sleep(1)
        return y

    _around("_mean", change)


def unless_bf16_is_right():
    """No fault of ours: ends the worker where PyTorch's bf16 convolution of a volume one position deep is wrong."""
    x = torch.arange(20.0).view(1, 5, 1, 4, 1).to(torch.bfloat16, memory_format=torch.channels_last_3d)
    weight = torch.arange(90.0).view(10, 1, 3, 1, 3).bfloat16()
    right = torch.nn.functional.conv3d(x.double(), weight.double(), padding=1, groups=5)
    y = torch.nn.functional.conv3d(x, weight, padding=1, groups=5).double()
    if not (y - right).abs().max() < 0.01 * right.abs().max():
        os._exit(3)
