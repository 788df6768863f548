"""Norms of networks that have no GroupNorm are turned into one, so that kgopt has something to do in them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_INSTANCE = {nn.BatchNorm1d: nn.InstanceNorm1d, nn.BatchNorm2d: nn.InstanceNorm2d, nn.BatchNorm3d: nn.InstanceNorm3d}


def converted(model: nn.Module, kind: str) -> nn.Module:
    """``model`` with its batch norms replaced, in place where it is not one itself.

    A subclass that does more (timm's has a dropout and an activation inside) becomes a Sequential of the norm and its
    children, which is what such classes compute.

    Args:
        model: any network.
        kind: "group", "instance", or "mixed": a GroupNorm, an InstanceNorm, and one left as it is, in turn.

    Raises:
        ValueError: another kind.
    """
    if kind not in ("group", "instance", "mixed"):
        raise ValueError(f"kind is {kind!r}, expected 'group', 'instance' or 'mixed'")
    made: dict[int, nn.Module] = {}  # a shared norm stays shared

    def of(norm: nn.Module) -> nn.Module:
        if id(norm) not in made:
            turn = ("group", "instance", "")[len(made) % 3] if kind == "mixed" else kind
            made[id(norm)] = _one(norm, turn)
        return made[id(norm)]

    if isinstance(model, _BatchNorm):
        return of(model)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm):
                parent._modules[name] = of(child)
    return model


def _one(norm: _BatchNorm, kind: str) -> nn.Module:
    if not kind:
        return norm
    channels = norm.num_features
    rank = next(base for base in type(norm).__mro__ if base in _INSTANCE or base is _BatchNorm)
    new: nn.Module
    if kind == "instance" and rank in (nn.BatchNorm2d, nn.BatchNorm3d):
        new = _INSTANCE[rank](channels, eps=norm.eps, affine=norm.affine)
    else:
        groups = next(g for g in (8, 6, 4, 3, 2, 1) if channels % g == 0 and (channels > g or g == 1))
        new = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    inside = [child for child in norm._modules.values() if child is not None]
    return nn.Sequential(new, *inside) if inside else new


def randomized(model: nn.Module) -> nn.Module:
    """``model`` with random scales and shifts: those that a constructor gives (1 and 0) would hide mistakes.

    Scales that are zero at first, as of the last norm of a residual block, would hide a whole branch.
    """
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for module in model.modules():
            if "Norm" not in type(module).__name__ and not isinstance(module, _BatchNorm):
                continue
            for name, p in module._parameters.items():
                if p is None or p.dim() != 1:
                    continue
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2
                p.copy_(noise + (1 if name == "weight" else 0))
    return model
