"""kgopt.optimize, kgopt.restore, kgopt.report: in which order all that happens.

The front ends say what a module's class becomes, :mod:`~kgopt.rewrite.model.whole` and :mod:`~kgopt.rewrite.model.race`
what the whole model decides, and all of it goes into the report.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kgopt.rewrite import cuda_graphs, source
from kgopt.rewrite.chains.chain import CHANNELS, Chain
from kgopt.rewrite.chains.modules import runs_like_sequential
from kgopt.rewrite.chains.roles import child_at
from kgopt.rewrite.gradients import casts
from kgopt.rewrite.gradients import recompute as forgetful
from kgopt.rewrite.measure.policy import SiteState
from kgopt.rewrite.measure.reporting import Report, SiteRow
from kgopt.rewrite.measure.verdicts import store
from kgopt.rewrite.model import layout, race
from kgopt.rewrite.model.timed import arguments_of
from kgopt.rewrite.model.whole import Whole
from kgopt.rewrite.norms import channel_norms, torch_norms
from kgopt.rewrite.norms.torch_norms import NORMS
from kgopt.rewrite.optimized import classes, known
from kgopt.rewrite.optimized.disguise import original_class
from kgopt.rewrite.optimized.transaction import LOCK, all_or_nothing
from kgopt.rewrite.pytorch.watching import is_captured, is_hooked
from kgopt.rewrite.source import sequential
from kgopt.torch_private import MODULES_ARE_KNOWN


def optimize(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    channels_last: bool | str = "auto",
    sites: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    measure: bool = True,
    cuda_graph: bool | str = "auto",
    recompute: bool | str = False,
    verdicts: str | os.PathLike[str] | None = None,
    report: bool = False,
) -> Any:
    """Makes GroupNorm and InstanceNorm networks faster, in place; returns the same model.

    Every ``nn.GroupNorm``, ``nn.InstanceNorm2d`` and ``nn.InstanceNorm3d`` of the model runs on kgopt's kernels, fused
    with the activation that the model's code applies to it, and the pipelines of :mod:`kgopt.nn` are recognized. Values
    and gradients stay those of the model, up to rounding; so do parameters, ``state_dict`` keys, hooks and the
    ``isinstance`` relations of every module. Calling it again adds sites that are new; :func:`kgopt.restore` undoes it.

    Args:
        model: any module, also one inside ``torch.compile``, ``DistributedDataParallel`` or ``fully_shard``.
        example_inputs: what the model is called with: a tensor, a tuple of arguments, or a dict of keywords. With it,
            everything is measured now, else each site on its first call, and a model that is slower than it came is
            left as it came. The model runs under its current mode; buffers and random state are put back.
        channels_last: True: the model computes in channels_last (2D) or channels_last_3d, and the caller notices
            nothing. ``"auto"``: where the whole model is measured faster so, which needs ``example_inputs`` on CUDA.
            False: never.
        sites: names (as in ``named_modules()``, with ``*`` and ``?``) of the norms to handle; all by default.
        exclude: names to leave alone, of norms or of modules that hold them.
        measure: False: take kgopt's ops wherever they apply, without timing anything.
        cuda_graph: True: in inference, calls of the whole model are recorded as CUDA graphs and replayed: with
            ``example_inputs`` now, else when a call of the same kind comes for the second time. ``"auto"``, with
            ``example_inputs`` in eval mode on CUDA: where that is measured to be faster. False: never. A replay runs no
            Python of the model and keeps the memory of its activations: docs/optimize.md has the limits.
        recompute: True: in training, results of norms on kgopt's kernels are not kept for the backward, which computes
            them again from the norms' inputs: less memory for one more pass over them. ``"auto"``, with
            ``example_inputs`` in train mode: where a step takes at most 3 % longer so. False: all is kept.
        verdicts: a folder where measurements are kept for other processes, from now on by all of this one; as the
            environment variable ``KGOPT_VERDICTS``. In this process they are kept anyway, until :func:`kgopt.forget`:
            an equal model takes the same paths, and is not measured again.
        report: print :func:`kgopt.report` at the end.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``channels_last``, ``cuda_graph`` or ``recompute`` is not True, False or "auto"; ``verdicts`` is no
            folder, and cannot become one.
        RuntimeError: ``example_inputs`` were given while a CUDA graph is captured.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected an nn.Module")
    if channels_last not in (True, False, "auto"):
        raise ValueError(f"channels_last is {channels_last!r}, expected True, False or 'auto'")
    for name, value in (("cuda_graph", cuda_graph), ("recompute", recompute)):
        if not (isinstance(value, bool) or value == "auto"):
            raise ValueError(f"{name} is {value!r}, expected True, False or 'auto'")
    if example_inputs is not None and is_captured():
        raise RuntimeError("example_inputs are measured, which a CUDA graph capture forbids: call optimize before it")
    if not MODULES_ARE_KNOWN:
        if known.get(model, "report") is None:
            known.put(model, report=Report(layout="as it was: this torch's modules are not known"))
        return model
    root = _root(model)
    sites = sites if sites is None or isinstance(sites, str) else list(sites)
    exclude = exclude if isinstance(exclude, str) else list(exclude)
    if verdicts is not None:
        store.attach(verdicts)
    was_on = layout.is_on(root)
    with LOCK, all_or_nothing(root, lambda: layout.set_layout(root, was_on)):
        cuda_graphs.set_mode(root, False)  # of an earlier call: what they hold is about to change
        whole = _optimize(root, example_inputs, channels_last, sites, exclude, measure, bool(cuda_graph))
        found = known.get(root, "report")
        found.recompute = casts.set_mode(root, bool(recompute))
        if recompute == "auto":
            race.choose_recompute(whole, root, found)
        asked = channels_last is True or cuda_graph is True or recompute is True
        times = race.compare(whole) if whole is not None and measure and not asked else None
        replay = _record(root, whole, example_inputs, cuda_graph, measure, times)
        if whole is not None and times is not None:
            race.undo_if_slower(whole, found, times, replay)
    if report:
        print(report_of(model))
    return model


def _optimize(
    root: nn.Module,
    example_inputs: Any,
    channels_last: bool | str,
    sites: Any,
    exclude: Any,
    measure: bool,
    replays: bool,
) -> Whole | None:
    found = known.get(root, "report")
    if found is not None and found.slower and example_inputs is not None:
        race.undo(root)  # it may be faster on other inputs
        found = None
    rows = _swap(root, _selector(sites, exclude), _selector(None, exclude), measure)
    if found is None:
        found = Report()
        known.put(root, report=found)
    # A second call sees what the first one swapped, and keeps what it said about it.
    found.sites = [row for row in found.sites if row.path not in {r.path for r in rows}] + rows
    order = {path: i for i, (path, _) in enumerate(root.named_modules())}
    found.sites.sort(key=lambda row: order.get(row.path, len(order)))
    whole = None
    if example_inputs is not None:
        whole = Whole(root, example_inputs, _selector(None, exclude), (sites, exclude, channels_last))
        whole.decide(channels_last, measure, found, replays)
    elif channels_last is True:
        found.layout = layout.ask_for(root)
    if layout.is_on(root):  # also where it was the faster one: other calls may take other ways
        known.get(root, "layout").falls_back = True
    return whole


def _record(
    root: nn.Module,
    whole: Whole | None,
    example_inputs: Any,
    cuda_graph: bool | str,
    measure: bool,
    times: race.Times | None,
) -> float:
    """Turns CUDA graphs on, where they are asked for or pay, and records the call of the example inputs.

    Seconds of a replay, where that was asked; else 0. ``times``: of a call without one, if that was asked.
    """
    found = known.get(root, "report")
    found.graph = ""
    arguments = None if example_inputs is None else arguments_of(example_inputs)
    auto = cuda_graph == "auto"
    if not cuda_graph or (auto and not (measure and arguments is not None and cuda_graphs.may_pay(root, arguments))):
        return 0.0
    failed = cuda_graphs.set_mode(root, cuda_graph)
    if failed:
        found.graph = f"none: {failed}"
    elif auto and whole is not None and arguments is not None:
        return race.choose_graph(whole, root, found, *arguments, times)
    elif arguments is not None:
        cuda_graphs.record(root, *arguments)
    return 0.0


def restore(model: nn.Module) -> Any:
    """Undoes :func:`kgopt.optimize`: classes and memory formats are those from before, and the memory of CUDA graphs
    is free. Returns the same model.

    A module that something else has subclassed since (``fully_shard`` does) keeps its class and runs PyTorch's code.
    """
    root = _root(model)
    with LOCK:
        race.undo(root)
    return model


def report_of(model: nn.Module) -> Report:
    """What :func:`kgopt.optimize` made of each site, and why one was left alone.

    Sites that are measured on their first call show the result once that has happened.

    Raises:
        ValueError: the model was not optimized.
    """
    root = _root(model)
    found = known.get(root, "report")
    if found is None:
        raise ValueError(f"this {type(root).__name__} was not optimized: call kgopt.optimize(model) first")
    modules = dict(root.named_modules())
    rows = [_measured_row(row, modules.get(row.path)) for row in found.sites]
    graph = cuda_graphs.text_of(root)
    graph = found.graph if graph is None else graph
    count = sum(bool(known.get(m, "pads")) for m in root.modules())
    padding = f"of {count} module{'s' * (count > 1)} waits for the convolution behind it" if count else ""
    recompute = forgetful.text_of(root, found.recompute)
    return replace(found, sites=rows, padding=padding, graph=graph, recompute=recompute)


def _measured_row(row: SiteRow, norm: nn.Module | None) -> SiteRow:
    state = None if norm is None else known.get(norm, "site") or known.get(norm, "calls")
    if state is None or not state.results:
        return row
    # The largest chain that was measured, at the shape seen last, is what the row is about.
    trivial = tuple(repr(Chain(norm)) for norm in ("group", "instance", *CHANNELS))
    results = list(state.results.items())  # another thread may be measuring
    measured = [(name not in trivial, i, m) for i, ((name, *_), m) in enumerate(results) if m is not None]
    if not measured:
        return row
    result = max(measured, key=lambda item: item[:2])[2]
    times: dict[str, Any] = {"us_before": result.before * 1e6, "us_after": result.after * 1e6}
    times["verdict"] = "known" if result.known else "measured"
    if result.ours(state.hidden):
        if result.busy_before is not None and result.busy_after is not None and result.reason:
            times |= {"us_before": result.busy_before * 1e6, "us_after": result.busy_after * 1e6}
            return SiteRow(
                row.path, row.kind, row.became, row.reason or "times on the GPU: launches are hidden", **times
            )
        return SiteRow(row.path, row.kind, row.became, row.reason, **times)
    return SiteRow(row.path, row.kind, "", result.reason, **times)


# ----------------------------------------------------------------------------------------------------------------------
# Swapping


def _root(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile's and the data-parallel wrappers."""
    while True:
        inner = model.__dict__.get("_modules", {}).get("_orig_mod")
        if inner is None and isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _selector(sites: Any, exclude: Any) -> Callable[[str], str]:
    wanted = [sites] if isinstance(sites, str) else None if sites is None else list(sites)
    unwanted = [exclude] if isinstance(exclude, str) else list(exclude)

    def refuse(path: str) -> str:
        if wanted is not None and not any(fnmatch.fnmatchcase(path, w) for w in wanted):
            return "not among `sites`"
        parts = path.split(".")
        prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
        if any(fnmatch.fnmatchcase(p, u) for p in prefixes for u in unwanted):
            return "in `exclude`"
        return ""

    return refuse


def _walk(module: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """named_modules, without what is compiled by TorchScript."""
    seen = set() if seen is None else seen
    if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
        return
    seen.add(id(module))
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{path}.{name}" if path else name, seen)


def _swap(
    root: nn.Module, refuse: Callable[[str], str], excluded: Callable[[str], str], measure: bool
) -> list[SiteRow]:
    modules = list(_walk(root))
    rows: dict[int, SiteRow] = {}
    for path, module in modules:
        if not isinstance(module, NORMS):
            continue
        if known.get(module, "site") is not None:
            continue  # from an earlier call
        kind = "GroupNorm" if isinstance(module, nn.GroupNorm) else type(module).__name__
        recipe: tuple[Any, ...] = torch_norms.RECIPE
        reason = refuse(path)
        if not reason and type(module) not in torch_norms.LEAVES:
            recipe, reason = source.derived.recipe_of(module)
        reason = reason or torch_norms.leaf_reason(module)
        if not reason:
            reason = classes.give(module, type(module), recipe, site=SiteState(measure=measure))
        rows[id(module)] = SiteRow(path, kind, "" if reason else "group_norm", reason)
        if not reason and recipe is not torch_norms.RECIPE:
            rows[id(module)].fill(source.derived.chain_of(module))
    _swap_channel_norms(modules, rows, refuse, measure)
    analyses = source.Analyses()
    for path, module in reversed(modules):  # a module knows whether its children's forwards end in a norm
        if original_class(module) is None and not isinstance(module, (torch.fx.GraphModule, *NORMS)):
            calls = SiteState(measure=measure) if source.calls_norms(type(module)) and not refuse(path) else None
            _rewrite_parent(path, module, rows, bool(excluded(path)), calls, analyses)
    for _, module in modules:
        if id(module) in rows and is_hooked(module) and not rows[id(module)].reason:
            rows[id(module)].reason = torch_norms.hook_reason(module)
    return list(rows.values())


def _swap_channel_norms(
    modules: list[tuple[str, nn.Module]], rows: dict[int, SiteRow], refuse: Callable[[str], str], measure: bool
) -> None:
    parents = {id(child): parent for _, parent in modules for child in parent.children()}
    for path, module in modules:
        if id(module) in rows or known.get(module, "site") is not None or original_class(module) is not None:
            continue
        meanings = channel_norms.found_in(parents.get(id(module)), module)
        if meanings is None:
            continue
        reason = refuse(path) or channel_norms.reason_against(module)
        reason = reason or channel_norms.give(module, meanings, SiteState(measure=measure))
        chain = Chain(meanings.kind)
        rows[id(module)] = SiteRow(path, chain.label, "" if reason else chain.becomes, reason)


def _rewrite_parent(
    name: str,
    parent: nn.Module,
    rows: dict[int, SiteRow],
    excluded: bool,
    calls: SiteState | None,
    analyses: source.Analyses,
) -> None:
    """Gives a module whose code fuses a class of its own, and fills in the rows of the norms in it.

    ``calls``: for norms that its code calls as functions, which have no row before.
    """
    cls = type(parent)
    if isinstance(parent, nn.Sequential) and runs_like_sequential(parent):
        sequential.rewrite(parent, rows)
        return
    has_norms = any(id(m) in rows for m in parent.modules() if m is not parent)
    pads = not excluded and source.pads(parent, cls)
    if not (has_norms or pads or calls or source.converts(parent, cls) or source.upsamples(parent, cls)):
        return
    recipe, found, refused, only_asked = analyses.of(parent, cls)
    failed = classes.give(parent, cls, (("source", recipe),)) if recipe else ""
    if any(in_method.pads for in_method in found) and not failed:
        known.put(parent, pads=True)
    if calls is not None and any(in_method.calls_norms for in_method in found):
        rows[id(parent)] = SiteRow(name, "norm as a function", "" if failed else "group_norm", failed)
        if not failed:
            known.put(parent, calls=calls)
    for in_method in found:
        for path, chains in in_method.chains.items():
            row = rows.get(id(child_at(parent, path)))
            if row is not None and row.became and failed:
                row.reason = failed
            elif row is not None and row.became:
                row.fill(chains[0])
        for path, reason in in_method.reasons.items():
            row = rows.get(id(child_at(parent, path)))
            if row is not None and row.became and "→" not in row.kind and reason:
                row.reason = reason
    for name in only_asked:
        row = rows.get(id(parent._modules[name]))
        if row is not None and row.became:
            row.became, row.reason = "", f"{cls.__name__} asks for its parameters, and does not call it"
    for name, reason in refused.items():
        row = rows.get(id(parent._modules[name]))
        if row is not None and row.became and "→" not in row.kind and not row.reason:
            row.reason = reason
