"""The classes that a module gets instead of its own; ``module.__class__ = ...`` keeps everything the instance holds.

A norm gets one of the importable leaf classes. A container or a parent whose code fuses gets a subclass of its own
class, made here, with the same name; it pickles as (original class, how to make it again).
"""

from __future__ import annotations

import copyreg
import weakref
from typing import Any

from torch import Tensor, nn

from kgopt.rewrite import policy
from kgopt.rewrite.patterns import CONV_MODULES, Chain
from kgopt.rewrite.sites import Site, is_hooked

_GROUP = Site(Chain("group"), ("norm",))
_INSTANCE = Site(Chain("instance"), ("norm",))


class OptimizedGroupNorm(nn.GroupNorm):
    """nn.GroupNorm on kgopt's kernels. Made by :func:`kgopt.optimize`, undone by :func:`kgopt.restore`."""

    _kgopt_original: Any = nn.GroupNorm
    _kgopt_leaf: Any = None

    def forward(self, input: Tensor) -> Tensor:
        """nn.GroupNorm's."""
        return _leaf_forward(self, _GROUP, nn.GroupNorm.forward, input)


class OptimizedInstanceNorm2d(nn.InstanceNorm2d):
    """nn.InstanceNorm2d, as a GroupNorm with a group a channel. Made by :func:`kgopt.optimize`."""

    _kgopt_original: Any = nn.InstanceNorm2d
    _kgopt_leaf: Any = None
    _kgopt_rank = 4

    def forward(self, input: Tensor) -> Tensor:
        """nn.InstanceNorm2d's."""
        return _leaf_forward(self, _INSTANCE, nn.InstanceNorm2d.forward, input)


class OptimizedInstanceNorm3d(nn.InstanceNorm3d):
    """nn.InstanceNorm3d, as a GroupNorm with a group a channel. Made by :func:`kgopt.optimize`."""

    _kgopt_original: Any = nn.InstanceNorm3d
    _kgopt_leaf: Any = None
    _kgopt_rank = 5

    def forward(self, input: Tensor) -> Tensor:
        """nn.InstanceNorm3d's."""
        return _leaf_forward(self, _INSTANCE, nn.InstanceNorm3d.forward, input)


LEAVES: dict[type, Any] = {
    nn.GroupNorm: OptimizedGroupNorm,
    nn.InstanceNorm2d: OptimizedInstanceNorm2d,
    nn.InstanceNorm3d: OptimizedInstanceNorm3d,
}
for _leaf in LEAVES.values():
    _leaf._kgopt_leaf = _leaf  # a class made from it, as FSDP2 makes them, does not pass for it


def _leaf_forward(norm: Any, site: Site, original: Any, x: Tensor) -> Tensor:
    # Hooks run around this forward, so here they are no obstacle.
    return policy.outside_own_modes(_norm, norm, site, original, x)


def _norm(norm: Any, site: Site, original: Any, x: Tensor) -> Tensor:
    return site.run(norm, x) if site.ready_inside(norm, x) else original(norm, x)  # type: ignore[no-any-return]


Path = tuple[str, ...]


class Steps:
    """What a Sequential does: its children's names, and which runs of them are one site.

    Children of Sequentials inside are named by their path, where a site reaches from one into the next; ``inner`` has
    those Sequentials and their children's names.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        steps: tuple[tuple[tuple[Path, ...], Site | None], ...],
        inner: tuple[tuple[Path, tuple[str, ...]], ...] = (),
    ) -> None:
        self.names = names
        self.steps = steps
        self.inner = inner

    def hold(self, sequential: Any) -> bool:
        """Whether the children are still those, and nobody looks at what goes into or comes out of one inside."""
        if tuple(sequential._modules) != self.names:
            return False
        for path, names in self.inner:
            module = child(sequential, path)
            if module is None or not runs_like_sequential(module) or is_hooked(module):
                return False
            if tuple(module._modules) != names:
                return False
        return True


def child(module: Any, path: Path) -> Any:
    """The module at a path of names; None where there is none."""
    for name in path:
        module = module._modules.get(name)
        if module is None:
            return None
    return module


def runs_like_sequential(module: Any) -> bool:
    """A Sequential that does what nn.Sequential does, by itself or through :func:`sequential_forward`."""
    if not isinstance(module, nn.Sequential) or "forward" in module.__dict__:
        return False
    cls: Any = original_class(module) or type(module)
    return cls.forward is nn.Sequential.forward and getattr(cls, "__iter__", None) is nn.Sequential.__iter__


def sequential_forward(self: Any, input: Any) -> Any:
    """nn.Sequential's forward, with neighbours fused where that is possible at this call."""
    plan = self._kgopt_steps
    if not plan.hold(self):  # a layer came or went
        return nn.Sequential.forward(self, input)
    return policy.outside_own_modes(_run_steps, self, plan, input)


def _run_steps(sequential: Any, plan: Steps, input: Any) -> Any:
    done = 0
    for i, (paths, site) in enumerate(plan.steps):
        if i < done:
            continue
        operands = [child(sequential, path) for path in paths]
        if site is not None and site.ready(*operands, input):
            norm = operands[site.norm_at]
            head = _head_behind(sequential, plan, i, site, norm, input)
            if head is not None:
                input, done = site.run_with_head(norm, input, *head), i + 2
                continue
            following = child(sequential, plan.steps[i + 1][0][0]) if i + 1 < len(plan.steps) else None
            input = site.run_before(following, *operands, input)
        elif (y := _with_activation(sequential, plan, i, operands, input)) is not None:
            input, done = y, i + 2
        else:
            for module in operands:
                input = module(input)
    return input


def _with_activation(self: Any, plan: Steps, i: int, operands: list[Any], x: Any) -> Any:
    """A convolution and the activation that is the next step, where they can run as one; else None."""
    if len(operands) != 1 or i + 1 == len(plan.steps):
        return None
    paths, site = plan.steps[i + 1]
    if site is not None or len(paths) != 1 or "_kgopt_glue" not in getattr(operands[0], "__dict__", {}):
        return None
    from kgopt.rewrite import glue

    return glue.with_activation(operands[0], child(self, paths[0]), x)


def _head_behind(self: Any, plan: Steps, i: int, site: Site, norm: Any, x: Tensor) -> Any:
    """The convolution to a few channels that is the next step, where it can run with step i, and its arguments."""
    if not site.short or not norm._kgopt_state.keep_format or i + 1 == len(plan.steps):
        return None
    from kgopt.rewrite import glue

    paths, other = plan.steps[i + 1]
    conv = glue.only_conv(child(self, paths[0])) if other is None and len(paths) == 1 else None
    head = None if conv is None else glue.head_plan(conv, x)
    return None if head is None else (conv, glue.head_arguments(head))


class Optimized:
    """First base of every class made here: pickling, and silence towards ``__init_subclass__`` of the user's."""

    # No __slots__: with a __dict__ of its own it has the object layout of an nn.Module, which __class__ demands.
    _kgopt_original: Any
    _kgopt_recipe: Any

    def __init_subclass__(cls, **_: Any) -> None:
        """A registry of the user's subclasses does not hear of this one."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        made = type(self)
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__ and reduced[1][0] is made:  # type: ignore[attr-defined]
            arguments = (made._kgopt_original, made._kgopt_recipe, *reduced[1][1:])
            return (_new, arguments, *reduced[2:])
        return reduced


def _new(original: type, recipe: Any, *args: Any) -> Any:
    """Unpickles an instance; of the original class, where the recipe does not fit the source any more."""
    made = make_class(original, recipe)
    return made.__new__(made, *args)


_MADE: weakref.WeakKeyDictionary[type, dict[Any, type]] = weakref.WeakKeyDictionary()


def make_class(original: Any, recipe: Any) -> Any:
    """The optimized subclass of ``original``; the same for the same recipe.

    A recipe is a tuple of parts: ("glue",), ("training",), ("sequential",), ("source", roles by method),
    ("layout",); hashable and
    picklable.
    """
    known = _MADE.setdefault(original, {})
    if recipe not in known:
        namespace: dict[str, Any] = {}
        # Wrappers last, whatever the order in which the parts came.
        for part in sorted(recipe, key=lambda part: {"glue": 1, "training": 1, "layout": 2}.get(part[0], 0)):
            if part[0] == "sequential":
                namespace["forward"] = sequential_forward
            elif part[0] == "source":
                from kgopt.rewrite import source

                namespace.update(source.rewritten_methods(original, dict(part[1])))
            elif part[0] == "glue":
                from kgopt.rewrite import glue

                wrap = glue.conv_forward if original in CONV_MODULES else glue.wrapped_forward
                namespace["forward"] = wrap(namespace.get("forward", original.forward))
            elif part[0] == "training":
                from kgopt.rewrite import training

                wrap = training.conv_forward if original in CONV_MODULES else training.wrapped_forward
                namespace["forward"] = wrap(namespace.get("forward", original.forward))
            elif part[0] == "layout":
                from kgopt.rewrite import layout

                namespace["forward"] = layout.wrapped_forward(namespace.get("forward", original.forward))
        if not namespace:
            return original
        namespace.update(
            __module__=original.__module__,
            __qualname__=original.__qualname__,
            __doc__=original.__doc__,
            _kgopt_original=original,
            _kgopt_recipe=recipe,
        )
        known[recipe] = type(original)(original.__name__, (Optimized, original), namespace)
    return known[recipe]


def original_class(module: nn.Module) -> Any:
    """The class that the module had before optimize; None, where it was not changed."""
    made = type(module)
    return made.__dict__.get("_kgopt_original") if "_kgopt_original" in made.__dict__ else None


def leaf_reason(norm: nn.Module) -> str:
    """Why a norm cannot get a leaf class; "" if it can."""
    cls = type(norm)
    if cls not in LEAVES:
        return f"{cls.__qualname__} is a subclass of {cls.__mro__[1].__qualname__}, which may do more"
    if "forward" in norm.__dict__:
        return "its forward was replaced on the instance"
    if getattr(norm, "track_running_stats", False):
        return "track_running_stats=True: eval normalizes with running statistics, which is no GroupNorm"
    return ""


def hook_reason(norm: nn.Module) -> str:
    """Why code around a norm must see its own result."""
    return "it has hooks, which see its own result" if is_hooked(norm) else ""
