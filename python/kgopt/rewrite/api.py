"""kgopt.optimize, kgopt.restore, kgopt.report."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kgopt.rewrite import classes, formats, glue, layout, policy, source, training
from kgopt.rewrite.patterns import OTHER, Chain, Match, Node, conv_of, is_trivial, match, why_alone
from kgopt.rewrite.policy import SiteState
from kgopt.rewrite.reporting import Report, SiteRow
from kgopt.rewrite.sites import Site, is_hooked

_NORMS = (nn.GroupNorm, nn.InstanceNorm2d, nn.InstanceNorm3d)


def optimize(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    channels_last: bool | str = "auto",
    sites: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    measure: bool = True,
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
            everything is measured now, else each site on its first call. The model runs under its current mode;
            buffers and random state are put back.
        channels_last: True: the model computes in channels_last (2D) or channels_last_3d, and the caller notices
            nothing. ``"auto"``: where the whole model is measured faster so, which needs ``example_inputs`` on CUDA.
            False: never.
        sites: names (as in ``named_modules()``, with ``*`` and ``?``) of the norms to handle; all by default.
        exclude: names to leave alone, of norms or of modules that hold them.
        measure: False: take kgopt's ops wherever they apply, without timing anything.
        report: print :func:`kgopt.report` at the end.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``channels_last`` is not True, False or "auto".
        RuntimeError: ``example_inputs`` were given while a CUDA graph is captured.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected an nn.Module")
    if channels_last not in (True, False, "auto"):
        raise ValueError(f"channels_last is {channels_last!r}, expected True, False or 'auto'")
    if example_inputs is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("example_inputs are measured, which a CUDA graph capture forbids: call optimize before it")
    root = _root(model)
    refuse = _selector(sites, exclude)
    rows = _swap(root, refuse, measure)
    found = root.__dict__.setdefault("_kgopt_report", Report())
    # A second call sees what the first one swapped, and keeps what it said about it.
    found.sites = [row for row in found.sites if row.path not in {r.path for r in rows}] + rows
    order = {path: i for i, (path, _) in enumerate(root.named_modules())}
    found.sites.sort(key=lambda row: order.get(row.path, len(order)))
    if example_inputs is not None:
        _try_out(root, example_inputs, channels_last, measure, found, _selector(None, exclude))
    elif channels_last is True:
        _set_layout(root, True)
        found.layout = "channels_last, as asked for"
    if report:
        print(report_of(model))
    return model


def restore(model: nn.Module) -> Any:
    """Undoes :func:`kgopt.optimize`: the classes and memory formats from before. Returns the same model.

    A module that something else has subclassed since (``fully_shard`` does) keeps its class and runs PyTorch's code.
    """
    root = _root(model)
    _set_layout(root, False)
    for module in root.modules():
        original = classes.original_class(module)
        if original is not None:
            module.__class__ = original
        state = module.__dict__.get("_kgopt_state")
        if original is None and state is not None and hasattr(type(module), "_kgopt_leaf"):
            state.enabled = False
            continue
        for name in [n for n in module.__dict__ if n.startswith("_kgopt_")]:
            del module.__dict__[name]
    return model


def report_of(model: nn.Module) -> Report:
    """What :func:`kgopt.optimize` made of each site, and why one was left alone.

    Sites that are measured on their first call show the result once that has happened.

    Raises:
        ValueError: the model was not optimized.
    """
    root = _root(model)
    found = root.__dict__.get("_kgopt_report")
    if found is None:
        raise ValueError(f"this {type(root).__name__} was not optimized: call kgopt.optimize(model) first")
    modules = dict(root.named_modules())
    rows = [_measured_row(row, modules.get(row.path)) for row in found.sites]
    return Report(rows, found.layout, found.glue, found.accuracy)


def _measured_row(row: SiteRow, norm: nn.Module | None) -> SiteRow:
    state = None if norm is None else norm.__dict__.get("_kgopt_state")
    if state is None or not state.results:
        return row
    # The largest chain that was measured, at the shape seen last, is what the row is about.
    trivial = repr(Chain("group")), repr(Chain("instance"))
    measured = [(name not in trivial, i, m) for i, ((name, *_), m) in enumerate(state.results.items()) if m is not None]
    if not measured:
        return row
    result = max(measured, key=lambda item: item[:2])[2]
    times = {"us_before": result.before * 1e6, "us_after": result.after * 1e6}
    if result.ours(state.hidden):
        if result.busy_before is not None and result.busy_after is not None and result.reason:
            times = {"us_before": result.busy_before * 1e6, "us_after": result.busy_after * 1e6}
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


def _swap(root: nn.Module, refuse: Callable[[str], str], measure: bool) -> list[SiteRow]:
    modules = list(_walk(root))
    rows: dict[int, SiteRow] = {}
    fresh: set[int] = set()
    for path, module in modules:
        if not isinstance(module, _NORMS):
            continue
        if "_kgopt_state" in module.__dict__:
            continue  # from an earlier call
        kind = "GroupNorm" if isinstance(module, nn.GroupNorm) else type(module).__name__
        reason = refuse(path) or classes.leaf_reason(module)
        rows[id(module)] = SiteRow(path, kind, "" if reason else "group_norm", reason)
        if not reason:
            fresh.add(id(module))
            module.__class__ = classes.LEAVES[type(module)]
            module.__dict__["_kgopt_state"] = SiteState(measure=measure)
    for _, module in modules:
        if classes.original_class(module) is None and not isinstance(module, (torch.fx.GraphModule, *_NORMS)):
            _rewrite_parent(module, rows)
    for _, module in modules:
        if id(module) in rows and is_hooked(module) and not rows[id(module)].reason:
            rows[id(module)].reason = classes.hook_reason(module)
    return list(rows.values())


def _rewrite_parent(parent: nn.Module, rows: dict[int, SiteRow]) -> None:
    """Gives a module whose code fuses a class of its own, and fills in the rows of the norms in it."""
    cls = type(parent)
    if isinstance(parent, nn.Sequential) and classes.runs_like_sequential(parent):
        _rewrite_sequential(parent, rows)
        return
    if not any(id(m) in rows for m in parent.modules() if m is not parent) and not source.converts(parent, cls):
        return
    recipe, found, refused = source.analyze(parent, cls)
    for in_method in found:
        for path, chains in in_method.chains.items():
            row = rows.get(id(source.child_at(parent, path)))
            if row is not None and row.became:
                _fill(row, chains[0])
        for path, reason in in_method.reasons.items():
            row = rows.get(id(source.child_at(parent, path)))
            if row is not None and row.became and "→" not in row.kind and reason:
                row.reason = reason
    for name, reason in refused.items():
        row = rows.get(id(parent._modules[name]))
        if row is not None and row.became and "→" not in row.kind and not row.reason:
            row.reason = reason
    if recipe:
        parent.__class__ = classes.make_class(cls, (("source", recipe),))


def _fill(row: SiteRow, chain: Chain) -> None:
    kind = chain.label if chain.norm == "group" else chain.label.replace("InstanceNorm", row.kind.split(" ")[0])
    row.kind, row.became, row.reason = kind, chain.becomes, ""


def _leaves(parent: nn.Sequential, deep: bool) -> Iterator[tuple[classes.Path, nn.Module | None]]:
    """The children; with ``deep`` those of Sequentials inside instead of these."""
    for name, module in parent._modules.items():
        if deep and module is not None and classes.runs_like_sequential(module) and not is_hooked(module):
            yield from (((name, *path), leaf) for path, leaf in _leaves(module, True))  # type: ignore[arg-type]
        else:
            yield (name,), module


def _matches(leaves: list[tuple[classes.Path, nn.Module | None]]) -> tuple[list[Node], list[Match]]:
    nodes: list[Node] = []
    for path, module in leaves:
        role = source.role_of(module)
        node = Node("value") if role is None else Node(role[0], name=role[1], inplace=role[2])
        node.origin = path
        previous = nodes[-1] if nodes else Node("value")
        node.inputs.append(previous)
        previous.read_by(node)
        nodes.append(node)
    if nodes:
        nodes[-1].read_by(OTHER)
    return nodes, [match(n) for n in nodes if n.kind == "norm"]


def _rewrite_sequential(parent: nn.Sequential, rows: dict[int, SiteRow]) -> None:
    nodes, matches = _matches(list(_leaves(parent, True)))
    # Sequentials inside see to themselves, unless a chain reaches from one into the next.
    deep = any(len({n.origin[0] for n in m.nodes}) > 1 and any(len(n.origin) > 1 for n in m.nodes) for m in matches)
    if not deep:
        nodes, matches = _matches(list(_leaves(parent, False)))
    at = {id(n): i for i, n in enumerate(nodes)}
    names = [n.origin for n in nodes]
    steps: list[tuple[tuple[classes.Path, ...], Site | None]] = []
    done = 0
    for m in matches:
        start, stop = at[id(m.nodes[0])], at[id(m.last)] + 1
        row = rows.get(id(classes.child(parent, m.norm.origin)))
        alone = is_trivial(m.chain)
        if (alone or start < done) and row is not None and row.became and not row.reason:
            row.reason = why_alone(m.norm)
        # A norm alone is its module's business, unless a convolution comes next: see Site.run_before.
        if start < done or (alone and not (stop < len(nodes) and nodes[stop].kind == "conv")):
            continue
        roles = tuple(n.name if n.kind == "act" else n.kind for n in m.nodes)
        steps += [((name,), None) for name in names[done:start]]
        steps.append((tuple(names[start:stop]), Site(m.chain, roles)))
        done = stop
        if row is not None and row.became and not alone:
            _fill(row, m.chain)
    if done:
        steps += [((name,), None) for name in names[done:]]
        inner = tuple(dict.fromkeys(path[:i] for path in names for i in range(1, len(path))))
        parts = tuple((path, tuple(classes.child(parent, path)._modules)) for path in inner)
        parent.__dict__["_kgopt_steps"] = classes.Steps(tuple(parent._modules), tuple(steps), parts)
        parent.__class__ = classes.make_class(type(parent), (("sequential",),))


# ----------------------------------------------------------------------------------------------------------------------
# Layout, measurement and accuracy of the whole


def _set_layout(root: nn.Module, on: bool) -> None:
    """Turns channels_last inside on or off; the class that does the conversion comes and goes with it."""
    if on == ("_kgopt_layout" in root.__dict__):
        return
    made = type(root)
    original = classes.original_class(root)
    if on:
        recipe = made.__dict__["_kgopt_recipe"] if original is not None else ()
        if isinstance(root, _NORMS):
            return  # a model of one norm has nothing to gain
        root.__class__ = classes.make_class(original or made, (*recipe, ("layout",)))
        root.__dict__["_kgopt_layout"] = layout.convert_parameters(root) or [""]
    else:
        layout.restore_parameters(root, root.__dict__.pop("_kgopt_layout"))
        rest = tuple(part for part in made.__dict__.get("_kgopt_recipe", ()) if part[0] != "layout")
        if original is not None:
            root.__class__ = classes.make_class(original, rest) if rest else original
    for module in root.modules():
        state = module.__dict__.get("_kgopt_state")
        if state is not None:
            state.keep_format = on
        formats.set_keeps(module, on)


def _call_model(root: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return root(**example)
    return root(*example) if isinstance(example, (tuple, list)) else root(example)


@contextlib.contextmanager
def _trial(root: nn.Module, grad: bool) -> Iterator[None]:
    """The model may be called, and afterwards nothing has happened to it."""
    buffers = {name: b.clone() for name, b in root.named_buffers()}
    devices = sorted({p.device.index or 0 for p in root.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices), torch.set_grad_enabled(grad):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, b in root.named_buffers():
                    if name in buffers and b.shape == buffers[name].shape:
                        b.copy_(buffers[name])


@contextlib.contextmanager
def _original_code(root: nn.Module) -> Iterator[None]:
    states: list[Any] = [m.__dict__["_kgopt_state"] for m in root.modules() if "_kgopt_state" in m.__dict__]
    states += map(glue.state_of, glue.modules_of(root))
    states += map(training.state_of, training.modules_of(root))
    for state in states:
        state.enabled = False
    try:
        yield
    finally:
        for state in states:
            state.enabled = True


def _try_out(
    root: nn.Module,
    example: Any,
    channels_last: bool | str,
    measure: bool,
    found: Report,
    refuse: Callable[[str], str],
) -> None:
    """Runs the example inputs: sites measure themselves, layouts are compared, and so is the result."""
    grad = root.training
    seed = torch.initial_seed()

    def call() -> Any:
        with _trial(root, grad):
            torch.manual_seed(seed)
            return _call_model(root, example)

    with _original_code(root):
        expected = call()
    tensors = [t for t in tree_leaves(expected) if isinstance(t, Tensor)]
    device = next((t.device for t in tensors), torch.device("cpu"))
    result = call()
    states = [m.__dict__["_kgopt_state"] for m in root.modules() if "_kgopt_state" in m.__dict__]

    def bare() -> Any:  # what _time_models calls, within one _trial
        return _call_model(root, example)

    timed = _with_backward(root, bare) if root.training else bare
    choosing = device.type == "cuda" and measure
    if channels_last is True:
        _set_layout(root, True)
        for state in states:
            state.forget()
        found.layout = "channels_last, as asked for"
        result = call()  # sites measure themselves in this layout
    if choosing:
        _find_between(root, call, states, refuse)
        before = _choose_hidden(root, states, timed, device, always=channels_last == "auto")
        if channels_last == "auto":
            result = _try_layout(root, call, timed, before, device, found, result, refuse)
        result = _try_glue(root, call, timed, device, found, result)
    found.accuracy = _compare(expected, result)
    for module in root.modules():
        # Where nothing was gained the module becomes what it was, so that not even a check stays.
        state = module.__dict__.get("_kgopt_state")
        if state is not None and classes.original_class(module) is not None and state.lost_everywhere:
            module.__class__ = classes.original_class(module)


def _find_between(
    root: nn.Module, call: Callable[[], Any], states: list[policy.SiteState], refuse: Callable[[str], str]
) -> None:
    """Measures what stands between the norms, on what it is given where launches are hidden: a norm that runs on
    PyTorch's code gives other formats and dtypes, at which the measurements would say nothing of a model on kgopt's.
    """
    before = [state.hidden for state in states]
    for state in states:
        state.hidden = True
    try:
        (training if root.training else glue).find(root, call, refuse)
    finally:
        for state, hidden in zip(states, before, strict=True):
            state.hidden = hidden


def _time_models(
    root: nn.Module, first: Callable[[], Any], second: Callable[[], Any], device: torch.device
) -> tuple[float, float]:
    """Seconds a call of two forms of the model. On CUDA of a few calls in a row, as models are used: of a single one
    that finds the GPU idle, the launches of what comes first are most.
    """
    row = 3 if device.type == "cuda" else 1

    def in_a_row(form: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            for _ in range(row):
                form()

        return run

    with _trial(root, root.training):
        before, after = policy.time_both(in_a_row(first), in_a_row(second), device)
    return before / row, after / row


def _choose_hidden(
    root: nn.Module,
    states: list[policy.SiteState],
    timed: Callable[[], Any],
    device: torch.device,
    always: bool = True,
) -> float:
    """Whether launches are hidden in this model: where sites depend on it, both are timed and the better one stays.

    Returns the model's seconds; without sites that depend on it only if ``always``, else 0.
    """
    undecided = [state for state in states if state.undecided]
    if not undecided:
        return _time_models(root, timed, timed, device)[0] if always else 0.0

    def shown() -> Any:
        for state in undecided:
            state.hidden = False
        return timed()

    def hidden() -> Any:
        for state in undecided:
            state.hidden = True
        return timed()

    before, after = _time_models(root, shown, hidden, device)
    for state in undecided:
        state.hidden = after < before
    return min(before, after)


def _try_layout(
    root: nn.Module,
    call: Callable[[], Any],
    timed: Callable[[], Any],
    before: float,
    device: torch.device,
    found: Report,
    result: Any,
    refuse: Callable[[str], str],
) -> Any:
    states = [m.__dict__["_kgopt_state"] for m in root.modules() if "_kgopt_state" in m.__dict__]
    verdicts = [(state.results, state.seen, state.kept_back, state.hidden) for state in states]
    _set_layout(root, True)
    for state in states:
        state.forget()
    try:
        other = call()  # sites measure themselves in this layout
        _find_between(root, call, states, refuse)
        after = _choose_hidden(root, states, timed, device)
        why = ""
    except RuntimeError as error:
        other, after, why = None, 0.0, str(error).splitlines()[0]
    times = f"channels_last {after * 1e3:.2f} ms, as it was {before * 1e3:.2f} ms"
    if not why and after < before:
        found.layout = f"channels_last: {times}"
        return other
    _set_layout(root, False)
    for state, verdict in zip(states, verdicts, strict=True):
        state.results, state.seen, state.kept_back, state.hidden = verdict
    found.layout = f"as it was: channels_last fails: {why}" if why else f"as it was: {times}"
    return result


def _try_glue(
    root: nn.Module, call: Callable[[], Any], timed: Callable[[], Any], device: torch.device, found: Report, result: Any
) -> Any:
    """Whether what stands between the norms makes the whole model faster, in the layout that was chosen.

    A model of many small convolutions may lose more time to looking them up than their biases take: the rest is tried
    without them, too.
    """
    front: Any = training if root.training else glue
    every = front.modules_of(root)
    found.glue = ""
    if not every:
        return result
    rest = [m for m in every if conv_of(m) is None]

    def switched(on: list[nn.Module]) -> Callable[[], Any]:
        switches = [(front.state_of(m), any(m is kept for kept in on)) for m in every]

        def run() -> Any:
            for state, enabled in switches:
                state.enabled = enabled
            return timed()

        return run

    before, after = _time_models(root, switched([]), switched(every), device)
    kept = every
    if rest and len(rest) < len(every):
        again, without = _time_models(root, switched([]), switched(rest), device)
        before = min(before, again)
        if without < after:
            kept, after = rest, without
    times = f"{after * 1e3:.2f} ms with them, {before * 1e3:.2f} ms without"
    if after >= before:
        front.forget(root)
        found.glue = f"left alone: kgopt's are not faster: {times}"
        return result
    for module in every:
        if module not in kept:
            front.forget(module)
    for module in kept:
        front.state_of(module).enabled = True
    carried = "" if root.training else _try_carrying(root, kept, timed, device)
    count = "a module" if len(kept) == 1 else f"{len(kept)} modules"
    found.glue = f"kgopt's in {count}: {times}{carried}"
    return call()


def _try_carrying(root: nn.Module, modules: list[nn.Module], timed: Callable[[], Any], device: torch.device) -> str:
    """Whether convolutions that compute the moments of their results for the norms behind them make the model faster.

    The calls before have shown whose results norms take.
    """
    carriers = [glue.state_of(m).carrier for m in modules if glue.state_of(m).carrier.wanted]

    def switched(on: bool) -> Callable[[], Any]:
        def run() -> Any:
            for carrier in carriers:
                carrier.on = on
            return timed()

        return run

    if not carriers:
        return ""
    before, after = _time_models(root, switched(False), switched(True), device)
    for carrier in carriers:
        carrier.on = after < before
    if after >= before:
        return ""
    return f"; moments carried from {len(carriers)} of them: {after * 1e3:.2f} ms, {before * 1e3:.2f} ms without"


def _with_backward(root: nn.Module, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call and its backward, which takes two thirds of a training step; alone where somebody watches gradients."""
    parameters = [p for p in root.parameters() if p.requires_grad]
    watched = any(p._backward_hooks or type(p.data) is not Tensor for p in parameters)
    if not parameters or watched or any(m._backward_hooks or m._backward_pre_hooks for m in root.modules()):
        return call

    def step() -> Any:
        out = [t for t in tree_leaves(call()) if isinstance(t, Tensor) and t.requires_grad]
        if out:  # no .grad is written
            torch.autograd.grad(out, parameters, [torch.ones_like(t) for t in out], allow_unused=True)

    return step


def _compare(expected: Any, actual: Any) -> str:
    """How far the model's outputs on the example inputs are from those of the original code."""
    pairs = [
        (e, a)
        for e, a in zip(tree_leaves(expected), tree_leaves(actual), strict=True)
        if isinstance(e, Tensor) and e.is_floating_point()
    ]
    if not pairs:
        return "no tensor in the output to compare"
    worst = max(policy.relative_error(a.detach(), e.detach()) for e, a in pairs)
    return f"outputs differ from the original's by {worst:.1e} (relative 2-norm)"
