"""Norms on kgopt's kernels: a class for each of PyTorch's, whose forward is a chain of the norm alone.

:mod:`~kgopt.rewrite.api` gives it, whatever the code around the norm is: that, a front end rewrites for itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kgopt.rewrite.chains.chain import WRITTEN, Chain
from kgopt.rewrite.chains.modules import has_own_methods
from kgopt.rewrite.norms import sites
from kgopt.rewrite.norms.sites import Site
from kgopt.rewrite.optimized import classes, disguise
from kgopt.rewrite.optimized.standing import Standing
from kgopt.rewrite.pytorch import originals, watching
from kgopt.rewrite.pytorch.watching import is_hooked

RECIPE = (("leaf",),)
NORMS = (nn.GroupNorm, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _norm(norm: Any, site: Site, standing: Standing, x: Tensor) -> Tensor:
    if site.ready_inside(norm, x):
        return site.run(norm, x)
    if standing.is_replaced():
        return standing.replaced(norm, x)  # type: ignore[no-any-return]
    return standing.seen(norm, x)  # type: ignore[no-any-return]


def _leaf_forward(_kgopt_site: Site, _kgopt_standing: Standing) -> Any:
    _kgopt_outside, _kgopt_norm = watching.outside_own_modes, _norm

    def forward(self: Any, input: Tensor) -> Tensor:
        # Hooks run around this forward, so here they are no obstacle.
        return _kgopt_outside(_kgopt_norm, self, _kgopt_site, _kgopt_standing, input)  # type: ignore[no-any-return]

    return disguise.as_original(forward, _kgopt_standing.seen)


def _leaf(original: Any, norm: str) -> Any:
    """The class of a norm on kgopt's kernels."""
    site, standing = Site(Chain(norm), ("norm",), inside=original), Standing(original, "forward")
    forward = _leaf_forward(site, standing)
    made = classes.new_class(original, RECIPE, {"forward": forward}, {"forward": standing}, equal=True)
    made._kgopt_leaf = made  # a class made from it, as FSDP2 makes them, does not pass for it
    classes.keep(original, RECIPE, made)
    originals.own((made, "forward"), forward)
    sites.LEAVES[norm].append(made)
    return made


OptimizedGroupNorm = _leaf(nn.GroupNorm, "group")
OptimizedInstanceNorm2d = _leaf(nn.InstanceNorm2d, "instance")
OptimizedInstanceNorm3d = _leaf(nn.InstanceNorm3d, "instance")
LEAVES: dict[type, Any] = {
    nn.GroupNorm: OptimizedGroupNorm,
    nn.InstanceNorm2d: OptimizedInstanceNorm2d,
    nn.InstanceNorm3d: OptimizedInstanceNorm3d,
}
# Sites of norms alone, by kind: behind the classes, which a site looks up when it is made.
ALONE: dict[str, Site] = {kind: Site(Chain(kind), ("norm",)) for kind in (*sites.LEAVES, WRITTEN)}


def leaf_reason(norm: nn.Module) -> str:
    """Why a norm cannot get a leaf class; "" if it can."""
    cls = type(norm)
    if cls not in LEAVES:
        return ""  # rewrite/source/users/derived.py has read it
    if "forward" in norm.__dict__ or has_own_methods(norm, cls):
        return "its forward was replaced on the instance"
    if reason := originals.why_replaced(cls):
        return reason
    if getattr(norm, "track_running_stats", False):
        return "track_running_stats=True: eval normalizes with running statistics, which is no GroupNorm"
    return ""


def hook_reason(norm: nn.Module) -> str:
    """Why code around a norm must see its own result."""
    return "it has hooks, which see its own result" if is_hooked(norm) else ""
