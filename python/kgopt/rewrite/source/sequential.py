"""The front end for ``nn.Sequential``: chains among its children, and the forward that runs them as sites."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn

from kgopt.rewrite.chains.modules import (
    PADDINGS,
    Path,
    child,
    is_upsampler,
    is_zero_padding,
    only_conv,
    runs_like_sequential,
)
from kgopt.rewrite.chains.patterns import OTHER, Match, Node, is_trivial, match, why_alone
from kgopt.rewrite.chains.roles import role_of
from kgopt.rewrite.glue import plans
from kgopt.rewrite.glue.heads import FollowedSite
from kgopt.rewrite.glue.later import Upsampled
from kgopt.rewrite.gradients import training
from kgopt.rewrite.measure.reporting import SiteRow
from kgopt.rewrite.norms.arguments import keeps_format
from kgopt.rewrite.optimized import classes, disguise, known
from kgopt.rewrite.optimized.classes import Part
from kgopt.rewrite.optimized.standing import Standing
from kgopt.rewrite.pytorch import originals, watching
from kgopt.rewrite.pytorch.watching import any_global_hooks, is_hooked
from kgopt.rewrite.waiting import padding
from kgopt.rewrite.waiting.padding import Padded

# ----------------------------------------------------------------------------------------------------------------------
# Finding


def _leaves(parent: nn.Sequential, deep: bool) -> Iterator[tuple[Path, nn.Module | None]]:
    """The children; with ``deep`` those of Sequentials inside instead of these."""
    for name, module in parent._modules.items():
        if deep and module is not None and runs_like_sequential(module) and not is_hooked(module):
            yield from (((name, *path), leaf) for path, leaf in _leaves(module, True))  # type: ignore[arg-type]
        else:
            yield (name,), module


def _matches(leaves: list[tuple[Path, nn.Module | None]]) -> tuple[list[Node], list[Match]]:
    nodes: list[Node] = []
    for path, module in leaves:
        role = role_of(module)
        node = Node("value") if role is None else Node(role[0], name=role[1], inplace=role[2])
        node.origin = path
        previous = nodes[-1] if nodes else Node("value")
        node.inputs.append(previous)
        previous.read_by(node)
        nodes.append(node)
    if nodes:
        nodes[-1].read_by(OTHER)
    return nodes, [match(n) for n in nodes if n.kind == "norm"]


def rewrite(parent: nn.Sequential, rows: dict[int, SiteRow], convs: bool = False) -> None:
    """Gives a Sequential with chains in it a class that runs them as sites; fills in the rows of its norms.

    ``convs``: also one with an activation behind a convolution.
    """
    nodes, matches = _matches(list(_leaves(parent, True)))
    # Sequentials inside see to themselves, unless a chain reaches from one into the next.
    deep = any(len({n.origin[0] for n in m.nodes}) > 1 and any(len(n.origin) > 1 for n in m.nodes) for m in matches)
    if not deep:
        nodes, matches = _matches(list(_leaves(parent, False)))
    at = {id(n): i for i, n in enumerate(nodes)}
    names = [n.origin for n in nodes]
    steps: list[tuple[tuple[Path, ...], FollowedSite | None]] = []
    done = 0
    for m in matches:
        start, stop = at[id(m.nodes[0])], at[id(m.last)] + 1
        row = rows.get(id(child(parent, m.norm.origin)))
        alone = is_trivial(m.chain)
        if (alone or start < done) and row is not None and row.became and not row.reason:
            row.reason = why_alone(m.norm)
        # A norm alone is its module's business, unless a convolution comes next: see Site.run_before.
        if start < done or (alone and not (stop < len(nodes) and nodes[stop].kind == "conv")):
            continue
        roles = tuple(n.name if n.kind == "act" else n.kind for n in m.nodes)
        steps += [((name,), None) for name in names[done:start]]
        steps.append((tuple(names[start:stop]), FollowedSite(m.chain, roles)))
        done = stop
        if row is not None and row.became and not alone:
            row.fill(m.chain)
    steps += [((name,), None) for name in names[done:]]
    joins = convs and any(m.kind == "conv" and n.kind == "act" for m, n in itertools.pairwise(nodes))
    if done or joins or _may_wait(parent, [paths[0] for paths, site in steps if site is None]):
        inner = tuple(dict.fromkeys(path[:i] for path in names for i in range(1, len(path))))
        parts = tuple((path, tuple(child(parent, path)._modules)) for path in inner)
        plan = Steps(tuple(parent._modules), tuple(steps), parts)
        original, recipe = classes.recipe_of(parent)
        classes.give(parent, original, (*recipe, ("sequential",)), steps=plan)


def _may_wait(parent: nn.Sequential, names: list[Path]) -> bool:
    """Whether an upsampling, or zero padding, stands in front of a convolution."""
    modules = [child(parent, name) for name in names]
    pairs = itertools.pairwise(modules)
    return any((is_upsampler(m) or is_zero_padding(m)) and only_conv(n) is not None for m, n in pairs)


# ----------------------------------------------------------------------------------------------------------------------
# Running


class Steps:
    """What a Sequential does: its children's names, and which runs of them are one site.

    Children of Sequentials inside are named by their path, where a site reaches from one into the next; ``inner`` has
    those Sequentials and their children's names.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        steps: tuple[tuple[tuple[Path, ...], FollowedSite | None], ...],
        inner: tuple[tuple[Path, tuple[str, ...]], ...] = (),
    ) -> None:
        self.names = names
        self.steps = steps
        self.inner = inner
        self.is_plain = not inner and all(site is None for _, site in steps)
        self._slices: dict[tuple[str, ...], Steps | None] = {}

    def among(self, names: tuple[str, ...]) -> Steps | None:
        """Those of a slice with children of these names, where it has sites: what reaches out of it is none there."""
        if names not in self._slices:
            self._slices[names] = self._among(names)
        return self._slices[names]

    def _among(self, names: tuple[str, ...]) -> Steps | None:
        start = self.names.index(names[0]) if names else 0
        if not names or self.names[start : start + len(names)] != names:
            return None  # every second one, the last ones first
        steps: list[tuple[tuple[Path, ...], FollowedSite | None]] = []
        for paths, site in self.steps:
            inside = tuple(path for path in paths if path[0] in names)
            steps += [(paths, site)] if inside == paths else [((path,), None) for path in inside]
        found = Steps(names, tuple(steps), tuple(part for part in self.inner if part[0][0] in names))
        return None if found.is_plain else found

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

    def last_of(self, sequential: Any) -> Any:
        """The last module, where it is no part of a site; else None."""
        paths, site = self.steps[-1]
        return child(sequential, paths[0]) if site is None and self.hold(sequential) else None

    def but_last(self, sequential: Any, input: Any) -> Any:
        """What the module of :meth:`last_of` is given."""
        return watching.outside_own_modes(_run_steps, sequential, self, input, len(self.steps) - 1)


def _sequential_forward(_kgopt_standing: Standing) -> Any:
    _kgopt_outside, _kgopt_run, _kgopt_seen = watching.outside_own_modes, _run_steps, _kgopt_standing.seen
    _kgopt_class, _kgopt_untouched = _kgopt_standing.original, originals.AS_INSIDE[nn.Sequential]

    def forward(self: Any, input: Any) -> Any:
        if _kgopt_class.forward is not _kgopt_seen:
            return _kgopt_standing.replaced(self, input)
        known = self.__dict__.get("_kgopt")
        plan = None if known is None else known.steps
        # A layer came or went, or Sequentials do something else now.
        if plan is None or not _kgopt_untouched() or not plan.hold(self):
            return _kgopt_seen(self, input)
        return _kgopt_outside(_kgopt_run, self, plan, input)

    return disguise.as_original(forward, _kgopt_seen)


def _run_steps(sequential: Any, plan: Steps, input: Any, stop: int | None = None) -> Any:
    """``stop``: the number of steps to run; all by default."""
    steps, done = plan.steps, 0
    last = len(steps) if stop is None else stop
    quiet, cast = False, None
    for i in range(last):
        if i < done:
            continue
        paths, site = steps[i]
        joins = i + 1 < last  # may it run together with the next step?
        # Ops follow each other without anybody's code in between: one look around serves them all.
        if not quiet and type(input) is Tensor and is_grad_enabled() and watching.is_quiet():
            quiet, cast = True, watching.autocast_of(input)
        if site is None and type(input) is Tensor and _runs_alone(module := child(sequential, paths[0]), joins):
            y = training.at_once(module, input, cast) if quiet else None
            if y is None:
                y, quiet = module(input), False
            input = y
            continue
        operands = [child(sequential, path) for path in paths]
        if (
            site is not None
            and not isinstance(input, (Upsampled, Padded))
            and (site.ready_in_quiet(operands, input, cast) if quiet else site.ready(*operands, input))
        ):
            norm = operands[site.norm_at]
            head = _head_behind(sequential, plan, i, site, norm, input) if joins else None
            if head is not None:
                input, done = site.run_with_head(norm, input, *head), i + 2
                continue
            following = child(sequential, plan.steps[i + 1][0][0]) if i + 1 < len(plan.steps) else None
            input = site.run_before(following, *operands, input)
            continue
        quiet = False
        if joins and (y := _with_activation(sequential, plan, i, operands, input)) is not None:
            input, done = y, i + 2
        else:
            pads = is_zero_padding(operands[0])
            following = _next_conv(sequential, plan, i) if pads or isinstance(operands[0], nn.Upsample) else None
            for module in operands:
                if type(input) is Upsampled:
                    input = plans.through(only_conv(module) or module, input)
                elif type(input) is Padded:
                    input = padding.through(sequential, only_conv(module) or module, input)
                elif pads and following is not None:
                    input = padding.postponed(module, input)
                else:
                    input = module(input) if following is None else plans.before(module, following, input)
    return input


def _runs_alone(module: Any, joins: bool) -> bool:
    """Whether a step of one module may be nothing but its call, whatever comes next: most of them, in training."""
    return not isinstance(module, _WAITING) and not (joins and known.get(module, "glue") is not None)


_WAITING = (type(None), nn.Upsample, *PADDINGS)


def _next_conv(self: Any, plan: Steps, i: int) -> Any:
    """The convolution that is the next step, where it is alone and this one as well."""
    paths = plan.steps[i + 1][0] if i + 1 < len(plan.steps) and plan.steps[i + 1][1] is None else ()
    is_alone = len(paths) == 1 and plan.steps[i][1] is None and len(plan.steps[i][0]) == 1
    return only_conv(child(self, paths[0])) if is_alone else None


def _with_activation(self: Any, plan: Steps, i: int, operands: list[Any], x: Any) -> Any:
    """A convolution and the activation that is the next step, where they can run as one; else None."""
    if len(operands) != 1:
        return None
    paths, site = plan.steps[i + 1]
    if site is not None or len(paths) != 1 or not isinstance(operands[0], nn.Module):
        return None
    if known.get(operands[0], "glue") is None:
        return None
    return plans.with_activation(operands[0], child(self, paths[0]), x)


def _head_behind(self: Any, plan: Steps, i: int, site: FollowedSite, norm: Any, x: Tensor) -> Any:
    """The convolution that is the next step, where one op can run it with step i, and how."""
    if not site.short or not keeps_format(norm):
        return None
    paths, other = plan.steps[i + 1]
    conv = only_conv(child(self, paths[0])) if other is None and len(paths) == 1 else None
    head = None if conv is None else plans.head_plan(conv, x)
    return None if head is None else (conv, head.option, head.rest)


def _sequential_getitem(_kgopt_standing: Standing) -> Any:
    _kgopt_class, _kgopt_seen = _kgopt_standing.original, _kgopt_standing.seen
    _kgopt_compiles, _kgopt_part = torch.compiler.is_compiling, _part_of

    def getitem(self: Any, idx: Any) -> Any:
        if _kgopt_class.__getitem__ is not _kgopt_seen:
            return _kgopt_standing.replaced(self, idx)
        if not isinstance(idx, slice):
            return _kgopt_seen(self, idx)
        children = OrderedDict(list(self._modules.items())[idx])
        # Traced code knows no instance of a made class but those that were there.
        part = _kgopt_class(children)
        return part if _kgopt_compiles() else _kgopt_part(self, part)

    return disguise.as_original(getitem, _kgopt_seen)


def _part_of(whole: Any, part: Any) -> Any:
    """Gives a slice of a Sequential the sites that are in it."""
    plan = known.get(whole, "steps")
    steps = plan.among(tuple(part._modules)) if plan is not None and plan.hold(whole) else None
    if steps is not None:
        classes.give(part, type(part), (("sequential",),), steps=steps)
    return part


def _methods(original: Any, _: tuple[Any, ...], stand: classes.Stand) -> dict[str, Any]:
    made = {"forward": _sequential_forward(stand("forward"))}
    if original.__getitem__ is nn.Sequential.__getitem__ and original.__init__ is nn.Sequential.__init__:
        made["__getitem__"] = _sequential_getitem(stand("__getitem__"))
    return made


classes.add_part("sequential", Part(methods=_methods))
