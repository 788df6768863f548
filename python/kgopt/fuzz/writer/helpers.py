"""What every written program imports, and the classes and functions that some of them define."""

from __future__ import annotations

__all__ = ["HELPERS", "IMPORTS"]

IMPORTS = """\
import collections
import contextlib
import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
"""
HELPERS = {
    "LayerNorm2d": '''
class LayerNorm2d(nn.LayerNorm):
    """Over channels."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)
''',
    "RMSNorm": """
class RMSNorm(nn.Module):
    def __init__(self, channels, dims):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, *(1,) * dims))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * self.weight
""",
    "UnitNorm": """
class UnitNorm(nn.Module):
    def __init__(self, channels, dims, bias):
        super().__init__()
        self.scale = channels**0.5
        self.gamma = nn.Parameter(torch.ones(channels, *(1,) * dims))
        self.bias = nn.Parameter(torch.zeros(channels, *(1,) * dims)) if bias else 0.0

    def forward(self, x):
        return F.normalize(x, dim=1) * self.scale * self.gamma + self.bias
""",
    "CenteredNorm": """
class CenteredNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        y = (x - u) / torch.sqrt(s + 1e-5)
        shape = (1, -1, 1, 1) if x.dim() == 4 else (1, -1, 1, 1, 1)
        return self.weight.view(shape) * y + self.bias.view(shape)
""",
    "PixelNorm": """
class PixelNorm(nn.Module):
    def forward(self, x):
        return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-6)
""",
    "MyNorm": '''
class MyNorm(nn.GroupNorm):
    """Does more than its base class."""

    def forward(self, x):
        return super().forward(x) * 2
''',
    "BranchNorm": '''
class BranchNorm(nn.GroupNorm):
    """Is its base class, where a flag of the instance says so."""

    fast: bool

    def __init__(self, groups, channels):
        super().__init__(groups, channels)
        self.fast = False

    def forward(self, x):
        if self.fast:
            return F.group_norm(x.float(), self.num_groups, None, None, self.eps).to(x.dtype)
        else:
            return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
''',
    "ActedNorm": '''
class ActedNorm(nn.GroupNorm):
    """With an activation inside."""

    def __init__(self, groups, channels, act):
        super().__init__(groups, channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x):
        x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        x = self.drop(x)
        return self.act(x)
''',
    "DropPath": """
def drop_path(x, p=0.0, training=False):
    if p == 0.0 or not training:
        return x
    return x * x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(1 - p) / (1 - p)


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return drop_path(x, self.p, self.training)
""",
    "Result": """
@dataclasses.dataclass
class Result:
    sample: torch.Tensor
    kept: object = None
""",
    "logged": """
def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call
""",
}
