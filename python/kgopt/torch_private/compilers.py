"""Inductor, Dynamo and AOTAutograd."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kgopt.torch_private.lookup import privates, when_needed

_inductor = when_needed(
    ("torch._inductor.compile_fx.compile_fx", "torch._inductor.list_mode_options"),
    "torch.compile of the rewritten graph",
)


class Passes(NamedTuple):
    """What changes Inductor's graphs in place."""

    joint: Callable[[torch.fx.Graph], None]
    """Forward and backward before they are divided, or a graph of inference."""
    lowered: Callable[[torch.fx.Graph], None]
    """Each of them, at last."""
    version: str
    """Another one for other functions: part of the key under which compiled code is kept."""


def compile_graph(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    passes: Passes | None = None,
    **more: Any,
) -> Callable[..., Any]:
    """The graph compiled by Inductor.

    Args:
        decompositions: of ATen's ops, beside its own.
        passes: over Inductor's graphs. Each has one place, which is the user's if the user has something there.
    """
    found = _inductor()
    if found is None:  # torch.compile takes one of them
        return torch.compile(graph, mode=None if options else mode, options=dict(options) or None)
    compile_fx, _ = found
    config = {**mode_options(mode), **options}
    if passes is not None:
        config = {**_settings_of(passes), **config}
    known = _decompositions()
    if decompositions and known is not None:
        select_table, patch = known
        with patch(config):  # what it has depends on settings
            more["decompositions"] = {**select_table(), **decompositions}
    compiled: Callable[..., Any] = compile_fx(graph, list(example_inputs), config_patches=config or None, **more)
    return compiled


_passes = when_needed(
    ("torch._inductor.custom_graph_pass.CustomGraphPass", "torch._inductor.config"),
    "weights of convolutions in channels_last are cast and copied by Inductor's and ATen's kernels",
)


def _settings_of(passes: Passes) -> dict[str, Any]:
    """Inductor's settings for passes; where the user has one already, that one stays."""
    found = _passes()
    if found is None:
        return {}
    base, config = found

    class Pass(base):  # type: ignore[misc, valid-type]
        """With a name for Inductor's cache."""

        def __init__(self, change: Callable[[torch.fx.Graph], None]) -> None:
            self.change = change

        def __call__(self, graph: torch.fx.Graph) -> None:
            self.change(graph)

        def uuid(self) -> str:
            return passes.version

    settings = {"joint_custom_post_pass": passes.joint, "post_grad_custom_post_pass": passes.lowered}
    return {name: Pass(change) for name, change in settings.items() if getattr(config, name, change) is None}


_decompositions = when_needed(
    ("torch._inductor.decomposition.select_decomp_table", "torch._inductor.config.patch"),
    "gradients of ATen's ops are ATen's kernels in compiled code",
)


# Forward and backward of images, then of volumes.
ADAPTIVE_MEANS = privates(
    [f"torch.ops.aten._adaptive_avg_pool{rank}d{of}.default" for rank in (2, 3) for of in ("", "_backward")],
    "adaptive pooling is ATen's kernels in compiled code",
)


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's settings that a mode of torch.compile stands for."""
    found = _inductor()
    return {} if found is None or not mode else dict(found[1](mode))


def is_of_module(t: Any) -> bool:
    """Whether an input of a captured graph is a parameter, or a buffer as far as Dynamo says so."""
    return isinstance(t, torch.nn.Parameter) or getattr(t, "_dynamo_static_input_type", None) is not None


_aot_eager = when_needed(("torch._dynamo.backends.debugging.aot_eager",), "the graph runs as it is")


def compile_eagerly(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The graph through AOTAutograd, with no compiler behind it."""
    found = _aot_eager()
    return graph if found is None else found[0](graph, example_inputs)  # type: ignore[no-any-return]


INDUCTOR_PATTERNS = "torch._inductor.fx_passes.post_grad"  # the module whose import says that Inductor is there
inductor_patterns = when_needed(
    (
        f"{INDUCTOR_PATTERNS}.pass_patterns",
        "torch._inductor.pattern_matcher.CallFunctionVarArgs",
        "torch._inductor.pattern_matcher.register_graph_pattern",
    ),
    "norms in compiled code read their input for statistics",
)
_IR = "torch._inductor.ir"
inductor_lowering = when_needed(
    (
        "torch._inductor.lowering.make_fallback",
        "torch._inductor.lowering.lowerings",
        f"{_IR}.IRNode",
        f"{_IR}.ExternKernel",
        f"{_IR}.FlexibleLayout",
        f"{_IR}.BaseView",
        "torch._inductor.virtualized.V",
    ),
    "norms in compiled code are given the strides of eager mode",
)
_outside = when_needed(
    ("torch._guards.tracing", "torch._subclasses.fake_tensor.unset_fake_temporarily"),
    "nothing is measured while a graph is compiled",
)


@contextlib.contextmanager
def outside_of_tracing() -> Iterator[bool]:
    """Real tensors inside a compiler's callback; gives False where there is no way to have them."""
    found = _outside()
    if found is None:
        yield False
        return
    tracing, unset_fake_temporarily = found
    with tracing(None), unset_fake_temporarily():
        yield True


_cache_dir = when_needed(
    ("torch._inductor.runtime.cache_dir_utils.cache_dir",), "what is measured while a graph is compiled is not kept"
)


def inductor_cache_dir() -> str | None:
    """Inductor's folder for compiled code."""
    found = _cache_dir()
    return None if found is None else str(found[0]())


DYNAMO = "torch._dynamo"
BACKENDS = f"{DYNAMO}.backends.registry"
_backends = when_needed(
    (f"{BACKENDS}._BACKENDS", f"{BACKENDS}.register_backend"),
    'backend="kgopt" is found by its entry point alone',
)


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """A backend's name for torch.compile; nothing, where it is known."""
    found = _backends()
    if found is not None and name not in found[0]:  # else its entry point is what is being loaded
        found[1](backend, name=name)


INDUCTOR_LOG = "torch._inductor"
_settings = when_needed(
    ("torch._dynamo.config.patch", "torch._inductor.config.patch", "torch._functorch.config.patch"),
    "benchmarks run with the compilers' own limits",
)


@contextlib.contextmanager
def compiler_settings(**settings: Any) -> Iterator[None]:
    """Settings of Dynamo, Inductor and AOTAutograd for a while, as far as one of them knows the name."""
    with contextlib.ExitStack() as stack:
        if _settings() is not None:
            for path in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"):
                config = importlib.import_module(path)
                stack.enter_context(config.patch({k: v for k, v in settings.items() if hasattr(config, k)}))
        yield
