"""The classes that a module gets instead of its own; ``module.__class__ = ...`` keeps everything the instance holds.

Each is a subclass of the module's class, made here, with the same name, and pickles as (original class, how to make it
again). What tools see of it is :mod:`~kgopt.rewrite.optimized.disguise`'s business, and what its methods do that of the
file which :func:`add_part` was called from.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from kgopt.rewrite.optimized import disguise, known
from kgopt.rewrite.optimized.disguise import original_class
from kgopt.rewrite.optimized.standing import Standing
from kgopt.rewrite.pytorch.originals import CONV_MODULES

Stand = Callable[[str], Standing]  # by a method's name


@dataclass(frozen=True)
class Part:
    """One thing that a made class does."""

    # Its methods, from the original class, what follows the name in the recipe, and what they stand for.
    methods: Callable[[Any, tuple[Any, ...], Stand], dict[str, Any]] | None = None
    # What stands around the forward of an original class.
    wrap: Callable[[Any, Callable[..., Any]], Callable[..., Any]] | None = None
    place: int = 0  # those of a higher one stand around the others
    around_later: bool = False  # it may stand around the second forward, _kgopt_later, as well


_PARTS: dict[str, Part] = {}


def add_part(name: str, part: Part) -> None:
    """Has recipes with ``name`` make classes with this part."""
    _PARTS[name] = part


def _new(original: type, recipe: Any, *args: Any) -> Any:
    """Unpickles an instance; of the original class, where the recipe does not fit the source any more."""
    made = make_class(original, recipe)
    return made.__new__(made, *args)


def _new_ex(original: type, recipe: Any, args: Any, kwargs: Any) -> Any:
    """The same, of a class whose ``__new__`` takes keywords."""
    made = make_class(original, recipe)
    return made.__new__(made, *args, **kwargs)


_REBUILD = _new, _new_ex

# Weak on both sides: once no module has a made class any more it goes, also from the original's __subclasses__().
_MADE: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[Any, type]] = weakref.WeakKeyDictionary()


def make_class(original: Any, recipe: Any) -> Any:
    """The optimized subclass of ``original``; the same for the same recipe.

    A recipe is a tuple of parts, each with its name first: ("leaf",), ("sequential",), ("source", roles by method),
    ("glue",), ("training",), ("casts",), ("layout",), ("graphs",); hashable and picklable. Without a part, and where
    none fits the code any more, the original.
    """
    if not recipe:
        return original
    held = _MADE.setdefault(original, weakref.WeakValueDictionary())
    made = held.get(recipe)
    if made is None:
        stands: dict[str, Standing] = {}
        namespace = _namespace(original, recipe, lambda name: stands.setdefault(name, Standing(original, name)))
        if not namespace:
            return original
        made = held[recipe] = new_class(original, recipe, namespace, stands, equal=original in CONV_MODULES)
    return made


def new_class(original: Any, recipe: Any, namespace: dict[str, Any], stands: dict[str, Standing], equal: bool) -> Any:
    """Makes one, with methods of which some stand for those of the original; ``equal``: it compares so, too."""
    if "forward" in namespace:
        namespace["_kgopt_forward"] = namespace["forward"]
    made = disguise.new_class(original, recipe, namespace, _REBUILD, equal=equal)
    for name in stands.keys() & namespace.keys():
        stands[name].hold(made)
    return made


def keep(original: Any, recipe: Any, made: Any) -> None:
    """Has :func:`make_class` give a class that was made elsewhere."""
    _MADE.setdefault(original, weakref.WeakValueDictionary())[recipe] = made


def _namespace(original: Any, recipe: Any, stand: Stand) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    is_wrapped, is_around_later = False, True
    # Wrappers last, whatever the order in which the parts came.
    for name, *rest in sorted(recipe, key=lambda part: _PARTS[part[0]].place):
        part = _PARTS[name]
        if part.methods is not None:
            namespace.update(part.methods(original, tuple(rest), stand))
        if part.wrap is not None:
            namespace["forward"] = part.wrap(original, namespace.get("forward", original.forward))
            is_wrapped = True
            is_around_later = is_around_later and part.around_later
            if "_kgopt_later" in namespace:
                namespace["_kgopt_later"] = part.wrap(original, namespace["_kgopt_later"])
    if is_wrapped:
        namespace["forward"] = disguise.running(namespace["forward"], stand("forward"))
        if "_kgopt_later" in namespace and is_around_later:
            namespace["_kgopt_later_of"] = namespace["forward"], original.forward
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
        known.put(module, **knows)
        disguise.become(module, made)
    except Exception as error:  # whatever a metaclass of the user's comes up with
        known.drop(module, *knows)
        return f"the class of a {original.__name__} cannot be replaced: {(str(error) or repr(error)).splitlines()[0]}"
    return ""
