"""The classes that a module gets instead of its own; ``module.__class__ = ...`` keeps everything the instance holds.

Each is a subclass of the module's class, made here, with the same name, and pickles as (original class, how to make it
again). What tools see of it is :mod:`~kgopt.rewrite.disguise`'s business.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from kgopt.rewrite import disguise, originals, policy, sites
from kgopt.rewrite.disguise import original_class
from kgopt.rewrite.patterns import CONV_MODULES, Chain
from kgopt.rewrite.sites import Site, any_global_hooks, has_own_methods, is_hooked, keeps_format
from kgopt.rewrite.standing import Standing


def _norm(norm: Any, site: Site, standing: Standing, x: Tensor) -> Tensor:
    if site.ready_inside(norm, x):
        return site.run(norm, x)
    if standing.is_replaced():
        return standing.replaced(norm, x)  # type: ignore[no-any-return]
    return standing.seen(norm, x)  # type: ignore[no-any-return]


def _leaf_forward(_kgopt_site: Site, _kgopt_standing: Standing) -> Any:
    _kgopt_outside, _kgopt_norm = policy.outside_own_modes, _norm

    def forward(self: Any, input: Tensor) -> Tensor:
        # Hooks run around this forward, so here they are no obstacle.
        return _kgopt_outside(_kgopt_norm, self, _kgopt_site, _kgopt_standing, input)  # type: ignore[no-any-return]

    return disguise.as_original(forward, _kgopt_standing.seen)


def _leaf(original: Any, norm: str) -> Any:
    """The class of a norm on kgopt's kernels."""
    site, standing = Site(Chain(norm), ("norm",)), Standing(original, "forward")
    site.inside = original
    forward = _leaf_forward(site, standing)
    made = disguise.new_class(original, (("leaf",),), {"forward": forward}, equal=True)
    made._kgopt_leaf = made  # a class made from it, as FSDP2 makes them, does not pass for it
    standing.hold(made)
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
        if tuple(sequential._modules) != self.names or (self.inner and any_global_hooks()):
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
    if not isinstance(module, nn.Sequential) or "forward" in module.__dict__ or "_call_impl" in module.__dict__:
        return False
    cls: Any = original_class(module) or type(module)
    if not originals.AS_CALLED[nn.Sequential]() or cls.forward is not nn.Sequential.forward:
        return False
    if cls.__call__ is not nn.Sequential.__call__ or cls._call_impl is not nn.Sequential._call_impl:
        return False
    return getattr(cls, "__iter__", None) is nn.Sequential.__iter__


def _sequential_forward(_kgopt_standing: Standing) -> Any:
    _kgopt_outside, _kgopt_run, _kgopt_seen = policy.outside_own_modes, _run_steps, _kgopt_standing.seen
    _kgopt_class, _kgopt_untouched = _kgopt_standing.original, originals.AS_INSIDE[nn.Sequential]

    def forward(self: Any, input: Any) -> Any:
        if _kgopt_class.forward is not _kgopt_seen:
            return _kgopt_standing.replaced(self, input)
        plan = self.__dict__.get("_kgopt_steps")
        # A layer came or went, or Sequentials do something else now.
        if plan is None or not _kgopt_untouched() or not plan.hold(self):
            return _kgopt_seen(self, input)
        return _kgopt_outside(_kgopt_run, self, plan, input)

    return disguise.as_original(forward, _kgopt_seen)


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
    if not site.short or not keeps_format(norm) or i + 1 == len(plan.steps):
        return None
    from kgopt.rewrite import glue

    paths, other = plan.steps[i + 1]
    conv = glue.only_conv(child(self, paths[0])) if other is None and len(paths) == 1 else None
    head = None if conv is None else glue.head_plan(conv, x)
    return None if head is None else (conv, glue.head_arguments(head))


def _new(original: type, recipe: Any, *args: Any) -> Any:
    """Unpickles an instance; of the original class, where the recipe does not fit the source any more."""
    made = make_class(original, recipe)
    return made.__new__(made, *args)


def _new_ex(original: type, recipe: Any, args: Any, kwargs: Any) -> Any:
    """The same, of a class whose ``__new__`` takes keywords."""
    made = make_class(original, recipe)
    return made.__new__(made, *args, **kwargs)


# Weak on both sides: once no module has a made class any more it goes, also from the original's __subclasses__().
_MADE: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[Any, type]] = weakref.WeakKeyDictionary()


def make_class(original: Any, recipe: Any) -> Any:
    """The optimized subclass of ``original``; the same for the same recipe.

    A recipe is a tuple of parts: ("leaf",), ("glue",), ("training",), ("sequential",), ("source", roles by method),
    ("layout",); hashable and picklable. Without a part, and where none fits the code any more, the original.
    """
    if not recipe:
        return original
    if recipe == (("leaf",),):
        return LEAVES[original]
    known = _MADE.setdefault(original, weakref.WeakValueDictionary())
    made = known.get(recipe)
    if made is None:
        stands: dict[str, Standing] = {}
        namespace = _namespace(original, recipe, lambda name: stands.setdefault(name, Standing(original, name)))
        if not namespace:
            return original
        if "forward" in namespace:
            namespace["_kgopt_forward"] = namespace["forward"]
        made = disguise.new_class(original, recipe, namespace, equal=original in CONV_MODULES)
        for name in stands.keys() & namespace.keys():
            stands[name].hold(made)
        known[recipe] = made
    return made


def _namespace(original: Any, recipe: Any, stand: Callable[[str], Standing]) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    wrap: Any = None
    # Wrappers last, whatever the order in which the parts came.
    for part in sorted(recipe, key=lambda part: {"glue": 1, "training": 1, "layout": 2}.get(part[0], 0)):
        if part[0] == "sequential":
            namespace["forward"] = _sequential_forward(stand("forward"))
            continue
        if part[0] == "source":
            from kgopt.rewrite import source

            namespace.update(source.rewritten_methods(original, dict(part[1]), stand))
            continue
        if part[0] == "glue":
            from kgopt.rewrite import glue

            wrap = glue.conv_forward if original in CONV_MODULES else glue.wrapped_forward
        elif part[0] == "training":
            from kgopt.rewrite import training

            wrap = training.conv_forward if original in CONV_MODULES else training.wrapped_forward
        elif part[0] == "layout":
            from kgopt.rewrite import layout

            wrap = layout.wrapped_forward
        namespace["forward"] = wrap(namespace.get("forward", original.forward))
    if wrap is not None:
        namespace["forward"] = disguise.running(namespace["forward"], stand("forward"))
    return namespace


def recipe_of(module: nn.Module) -> tuple[Any, tuple[Any, ...]]:
    """The original class of a module, and how the class that it has was made from it."""
    original = original_class(module)
    return (type(module), ()) if original is None else (original, type(module)._kgopt_recipe)  # type: ignore[attr-defined]


def give(module: nn.Module, original: Any, recipe: tuple[Any, ...], **knows: Any) -> str:
    """Gives a module the class of a recipe, and what that class looks for in it.

    Returns why that is impossible, and then nothing has changed; "" when it is done. Other threads may be calling the
    module: at every moment they find a class and what it looks for.
    """
    if recipe and parametrize.is_parametrized(module):  # whose removal deletes from the class that it made
        return "its tensors are parametrized"
    try:
        made = make_class(original, recipe)
        module.__dict__.update(knows)
        disguise.become(module, made)
    except Exception as error:  # whatever a metaclass of the user's comes up with
        for name in knows:
            module.__dict__.pop(name, None)
        return f"the class of a {original.__name__} cannot be replaced: {(str(error) or repr(error)).splitlines()[0]}"
    return ""


def leaf_reason(norm: nn.Module) -> str:
    """Why a norm cannot get a leaf class; "" if it can."""
    cls = type(norm)
    if cls not in LEAVES:
        return f"{cls.__qualname__} is a subclass of {cls.__mro__[1].__qualname__}, which may do more"
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
