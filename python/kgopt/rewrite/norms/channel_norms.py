"""Norms over channels, and norms in groups that a module's code writes out, on kgopt's kernels: a class for each class
of such modules, whose forward asks a site.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from kgopt.rewrite.chains.chain import BY_FORMULA, Chain
from kgopt.rewrite.norms import channels
from kgopt.rewrite.norms.sites import Site
from kgopt.rewrite.optimized import classes, disguise
from kgopt.rewrite.optimized.classes import Part
from kgopt.rewrite.optimized.standing import Standing
from kgopt.rewrite.pytorch import watching

RECIPE = (("channel",),)
_ALONE = {kind: Site(Chain(kind), ("norm",)) for kind in BY_FORMULA}


def _forward(_kgopt_standing: Standing) -> Any:
    _kgopt_outside, _kgopt_norm = watching.outside_own_modes, _norm

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Hooks run around this forward, so here they are no obstacle.
        return _kgopt_outside(_kgopt_norm, self, _kgopt_standing, args, kwargs)

    return disguise.as_original(forward, _kgopt_standing.seen)


def _norm(norm: Any, standing: Standing, args: Any, kwargs: Any) -> Any:
    if standing.is_replaced():
        return standing.replaced(norm, *args, **kwargs)
    known = norm.__dict__.get("_kgopt")
    if known is not None and known.channel is not None and len(args) == 1 and not kwargs:
        site = _ALONE[known.channel.kind]
        if site.ready_inside(norm, args[0]):
            return site.run(norm, args[0])
    return standing.seen(norm, *args, **kwargs)


def _methods(original: Any, _: tuple[Any, ...], stand: classes.Stand) -> dict[str, Any]:
    return {"forward": _forward(stand("forward"))}


classes.add_part("channel", Part(methods=_methods))


def found_in(parent: nn.Module | None, module: nn.Module) -> channels.Meanings | None:
    """What a module that nobody has looked at normalizes; None where it is no norm over channels."""
    meanings = channels.meanings_of(module)
    if meanings is None or (meanings.axis != 1 and (parent is None or not channels.is_in_feature_maps(parent))):
        return None
    return meanings


def reason_against(norm: nn.Module) -> str:
    """Why a norm over channels cannot get a class of its own; "" if it can."""
    return "its forward was replaced on the instance" if "forward" in norm.__dict__ else ""


def give(norm: nn.Module, meanings: channels.Meanings, state: Any) -> str:
    """Gives a norm its class; why not, else ""."""
    return classes.give(norm, type(norm), RECIPE, site=state, channel=meanings)
