"""Every private name of torch that this package uses, each with a public fallback.

A private name may be gone, or mean something else, in the next torch. So each is looked up here, once, and called once
without harm; where that fails its fallback takes its place, built on torch's public interface. It is slower, or leaves
something to PyTorch; it is never wrong. No other module of the package names one (tests/test_torch_private.py).

``KGOPT_WITHOUT_PRIVATE=1`` in the environment makes all of them count as missing, a list of names (with commas) those.
What torch.nn.Module keeps under an underscore (its parameters, children and hooks) has been an interface for many
years; it is used where it is needed, and without it :func:`kgopt.optimize` leaves a model as it is. ``1`` does not
stand for it, the name ``torch.nn.Module`` does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules import module as _nn_module

_wanted = os.environ.get("KGOPT_WITHOUT_PRIVATE", "")
_WITHOUT = frozenset(name.strip() for name in _wanted.split(",")) - {"", "0"}
_MODULE = "torch.nn.Module"
_missing: dict[str, str] = {}  # what stands in for a name
_NAMES: dict[str, str] = {}  # every name, with its fallback in words
_lazy: dict[str, Callable[[], Any]] = {}  # names that are looked up when something needs them


def missing(everything: bool = False) -> dict[str, str]:
    """The private names of this torch that are not what they were, and what is done instead.

    Args:
        everything: look up those of the compilers, too, which takes the time that their import does. Without it they
            are listed once something has needed them.
    """
    if everything:
        for look_up in _lazy.values():
            look_up()
    return dict(_missing)


def names() -> list[str]:
    """Every name that ``KGOPT_WITHOUT_PRIVATE`` may list."""
    return list(_NAMES)


def _look_up(path: str) -> Any:
    """``torch.a.b.c``, whose first parts are modules."""
    found: Any = torch
    done = "torch"
    for part in path.split(".")[1:]:
        done = f"{done}.{part}"
        if isinstance(found, types.ModuleType) and not hasattr(found, part):
            found = importlib.import_module(done)
        else:
            found = getattr(found, part)
    return found


def _private(path: str, fallback: Any, instead: str, probe: Callable[[Any], object] | None = None) -> Any:
    """What torch has at ``path``; ``fallback``, where it is missing or ``probe(found)`` raises."""
    _NAMES[path] = instead
    try:
        if path in _WITHOUT or ("1" in _WITHOUT and path != _MODULE):
            raise AttributeError("hidden by KGOPT_WITHOUT_PRIVATE")
        found = _look_up(path)
        if probe is not None:
            probe(found)
    except Exception:  # whatever a changed name raises: importing this package never fails because of one
        _missing[path] = instead
        return fallback
    return found


def _privates(paths: Iterable[str], instead: str) -> list[Any] | None:
    """Names of which each is useless without the others; None where one is missing."""
    found = [_private(path, None, instead) for path in paths]
    return None if None in found else found


def _when_needed(paths: Sequence[str], instead: str) -> Callable[[], list[Any] | None]:
    """:func:`_privates` that import something big."""
    known: list[Any] = []

    def look_up() -> list[Any] | None:
        if not known:
            known.append(_privates(paths, instead))
        found: list[Any] | None = known[0]
        return found

    for path in paths:
        _NAMES[path] = instead
    _lazy[paths[0]] = look_up
    return look_up


def _expect(value: Any, *kinds: type) -> None:
    if type(value) not in kinds:
        raise TypeError(f"a {type(value).__name__}, expected {kinds}")


_ZERO = torch.zeros(())

# ----------------------------------------------------------------------------------------------------------------------
# What is going on around a call


def _any_requires_grad(*args: Any) -> bool:
    return any(isinstance(a, Tensor) and a.requires_grad for a in args)


def _is_any_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


class _NeedsSetupContext(torch.autograd.Function):
    """A function that torch.func refuses: its forward takes the ctx."""

    @staticmethod
    def forward(ctx: Any) -> None:
        """Nothing."""


def _are_transforms_active() -> bool:
    try:
        _NeedsSetupContext.apply()
    except RuntimeError:
        return True
    return False


def _function_modes() -> int:
    """0, or more than anybody pushes: torch.overrides says of a plain tensor only that some mode looks on."""
    return sys.maxsize if torch.overrides.has_torch_function((_ZERO,)) else 0


_probe_library: Any = None
_seen: list[str] = []


def _dispatch_modes() -> int:
    """The same of dispatch modes: an op above them is given the dispatch keys that are on."""
    global _probe_library
    if _probe_library is None:
        _probe_library = torch.library.Library("kgopt_probe", "FRAGMENT")
        _probe_library.define("keys(Tensor x) -> Tensor")

        def keys(keyset: Any, x: Tensor) -> Tensor:
            _seen.append(str(keyset))
            return x

        _probe_library.impl("keys", keys, "Autograd", with_keyset=True)
    _seen.clear()
    with torch.inference_mode(False):  # which leaves out Autograd
        torch.ops.kgopt_probe.keys.default(_ZERO)
    return sys.maxsize if "Python" in _seen[0] else 0


any_requires_grad: Callable[..., bool] = _private(
    "torch._C._any_requires_grad", _any_requires_grad, "asks each tensor", lambda f: _expect(f(_ZERO, 1, None), bool)
)
is_tracing: Callable[[], bool] = _private(
    "torch._C._is_tracing", torch.jit.is_tracing, "torch.jit.is_tracing", lambda f: _expect(f(), bool)
)
is_any_autocast_enabled: Callable[[], bool] = _private(
    "torch._C._is_any_autocast_enabled",
    _is_any_autocast_enabled,
    "torch.is_autocast_enabled of each device",
    lambda f: _expect(f(), bool),
)
are_functorch_transforms_active: Callable[[], bool] = _private(
    "torch._C._are_functorch_transforms_active",
    _are_transforms_active,
    "tries an autograd.Function that torch.func refuses",
    lambda f: _expect(f(), bool),
)
KNOWS_TRANSFORMS = are_functorch_transforms_active is not _are_transforms_active
len_torch_function_stack: Callable[[], int] = _private(
    "torch._C._len_torch_function_stack",
    _function_modes,
    "torch.overrides.has_torch_function; modes of ours then count as somebody's",
    lambda f: _expect(f(), int),
)
function_mode_at: Callable[[int], Any] | None = _private(
    "torch._C._get_function_stack_at", None, "every function mode counts as the user's"
)
DeviceContext: Any = _private(  # the function mode of torch.set_default_device
    "torch.utils._device.DeviceContext",
    type(None),
    "the mode of the default device counts as the user's",
    lambda c: _expect(c, type),
)
nn_functions: Any = _private("torch._C._nn", types.SimpleNamespace(), "whether somebody replaced them is not asked")
len_torch_dispatch_stack: Callable[[], int] = _private(
    "torch._C._len_torch_dispatch_stack",
    _dispatch_modes,
    "an op of our own that sees the dispatch keys",
    lambda f: _expect(f(), int),
)
_stack = _privates(
    ("torch._C._pop_torch_function_stack", "torch._C._push_on_torch_function_stack"),
    "function modes of ours stay in place while modules inside run",
)
pop_torch_function_stack: Any
push_on_torch_function_stack: Any
pop_torch_function_stack, push_on_torch_function_stack = _stack or (None, None)
MODES_CAN_WAIT = _stack is not None


class _Asked(Mapping[str, int]):
    """Stands for the namespace of forward_ad: its level, found out by making a dual number."""

    def __getitem__(self, name: str) -> int:
        try:
            forward_ad.make_dual(_ZERO, _ZERO)
        except RuntimeError:  # no level is active
            return -1
        return 0

    def __iter__(self) -> Iterator[str]:
        return iter((LEVEL,))

    def __len__(self) -> int:
        return 1


# FORWARD_AD[LEVEL] >= 0: forward mode is on. An entry of a dict, for a function would take longer than the question.
LEVEL = "_current_level"
FORWARD_AD: Mapping[str, Any] = (
    vars(forward_ad)
    if _private(
        "torch.autograd.forward_ad._current_level",
        None,
        "tries to make a dual number",
        lambda level: _expect(level, int),
    )
    is not None
    else _Asked()
)


_set_forward: Any = _private(
    "torch.autograd.forward_ad._set_fwd_grad_enabled",
    None,
    "forward mode runs PyTorch's functions, by whose graph its results are differentiated again",
    lambda switch: switch(True).__enter__ and switch(True).__exit__,
)
SWITCHES_TANGENTS = _set_forward is not None


def pass_tangents(on: bool) -> Any:
    """A context in which tangents are, or are not, passed on. Without SWITCHES_TANGENTS they always are, or never."""
    return contextlib.nullcontext() if _set_forward is None else _set_forward(on)


# ----------------------------------------------------------------------------------------------------------------------
# Dispatch keys, and nodes of autograd

_DISPATCH = "ops take the dispatcher's whole way; autocast is switched off around them"


def _has_keys(keys: Any) -> None:
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "AutocastCPU", "AutocastCUDA"):
        getattr(keys, name)


_keys = [
    _private("torch._C.DispatchKey", None, _DISPATCH, _has_keys),
    _private("torch._C.DispatchKeySet", None, _DISPATCH),
    _private("torch._C._ExcludeDispatchKeyGuard", None, _DISPATCH),
]
HAS_GUARDS = None not in _keys


def exclude(*keys: str) -> Callable[[], Any]:
    """What makes a context in which ops pass over these dispatch keys. Only with :data:`HAS_GUARDS`."""
    key, key_set, guard = _keys
    found = key_set(getattr(key, keys[0]))
    for name in keys[1:]:
        found = found | key_set(getattr(key, name))
    return functools.partial(guard, found)


def without_autocast(device: str) -> Callable[[], Any]:
    """What makes a context in which autocast is off for ``device``, "cpu" or "cuda". Not in compiled code."""
    if HAS_GUARDS:
        return exclude(f"Autocast{device.upper()}")
    return functools.partial(torch.autocast, device, enabled=False)


without_autocast_on_cuda = without_autocast("cuda")


def _minus_autograd(keyset: Any) -> Any:
    """The keys below Autograd."""
    while "Autograd" in str(keyset):
        keyset = keyset.remove(keyset.highestPriorityTypeId())
    return keyset


class _Keys:
    """A set of dispatch keys whose ``&`` leaves those below Autograd, whatever it is with."""

    def __init__(self, keyset: Any) -> None:
        self.keyset = keyset

    def __and__(self, _: Any) -> Any:
        return _minus_autograd(self.keyset)


def at_autograd(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """An Autograd kernel, which gets a keyset first and goes on at ``keyset & BELOW_AUTOGRAD``, to be registered."""
    if BELOW_AUTOGRAD is not None:
        return kernel
    return lambda keyset, *args, **keywords: kernel(_Keys(keyset), *args, **keywords)


def _intersects(found: Any) -> None:
    found & found


BELOW_AUTOGRAD: Any = _private(
    "torch._C._after_autograd_keyset", None, "takes keys off a set until Autograd's is gone", _intersects
)
below_autograd: Callable[[], Any] = _private(
    "torch._C._AutoDispatchBelowAutograd",
    contextlib.nullcontext,
    "ops go through their Autograd kernels",
    lambda guard: guard().__enter__ and guard().__exit__,
)


def _can_record(function: Any) -> None:
    class Twice(function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy * 2

    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), requires_grad=True)
        Twice.apply(x).backward()
    if x.grad is None or x.grad.item() != 2:
        raise ValueError("another gradient")


_single: Any = _private(
    "torch.autograd.function._SingleLevelFunction",
    None,
    "torch.autograd.Function; under torch.func the ops are PyTorch's formulas",
    _can_record,
)
single_level: Any = _private(
    "torch._functorch.utils.enable_single_level_autograd_function",
    None,
    "under torch.func the ops are PyTorch's formulas",
    lambda make: make().__enter__ and make().__exit__,
)
# Without both, or without the keys below Autograd, a node cannot be recorded at one level of torch.func.
RECORDS_LEVELS = _single is not None and single_level is not None
Function: Any = _single if RECORDS_LEVELS else torch.autograd.Function


def set_backward(node: Any, backward: Callable[..., Any]) -> None:
    """Has the engine call ``backward(ctx, *grads)`` itself, without the steps of torch's own apply.

    Where the attribute is missing, the engine calls node.backward, which is the same function.
    """
    if _HAS_BACKWARD_CLASS:
        node._backward_cls.apply = backward


_HAS_BACKWARD_CLASS = (
    _private(
        "torch.autograd.Function._backward_cls",
        None,
        "torch's own apply calls the backward",
        lambda cls: cls.apply,  # type: ignore[attr-defined]
    )
    is not None
)


def packed(op: Any) -> Callable[..., Any]:
    """What an overload's own ``__call__`` calls, without that frame."""
    return op._op if _HAS_OP else op  # type: ignore[no-any-return]


_ADD = "torch.ops.aten.add.Tensor"
_HAS_OP = _private(f"{_ADD}._op", None, "calls the overload", lambda op: _expect(op(_ZERO, _ZERO), Tensor)) is not None


def schema_of(op: Any) -> Any:
    """An overload's schema: arguments with name, kwarg_only and default_value, returns, and is_mutable."""
    if _HAS_SCHEMA:
        return op._schema
    from torch.fx.operator_schemas import get_signature_for_torch_op

    signatures: Any = get_signature_for_torch_op(op)
    parameters = signatures[0].parameters.values() if signatures else ()
    found = signatures[0].return_annotation if signatures else None
    returns = getattr(found, "__args__", None) or (found,)
    # Whether it writes is not told there: as if it did.
    return types.SimpleNamespace(arguments=[_Argument(p) for p in parameters], returns=returns, is_mutable=True)


class _Argument:
    """A schema's argument, from a signature."""

    def __init__(self, parameter: inspect.Parameter) -> None:
        self.name = parameter.name
        self.type = parameter.annotation
        self.kwarg_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        self.default_value = None if parameter.default is inspect.Parameter.empty else parameter.default


_HAS_SCHEMA = (
    _private(
        f"{_ADD}._schema",
        None,
        "torch.fx.operator_schemas",
        lambda schema: (
            [(a.name, a.kwarg_only, a.default_value) for a in schema.arguments]
            + [len(schema.returns), schema.is_mutable]
        ),
    )
    is not None
)

# ----------------------------------------------------------------------------------------------------------------------
# Modules and tensors


def _hooks_of(register: Any) -> Any:
    """The dict that a public function puts global hooks into."""
    handle = register(lambda *_: None)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


class _WhereGradientsAre:
    """Stands for hooks that might be there: none of them runs without gradients."""

    def __bool__(self) -> bool:
        return torch.is_grad_enabled()


def _global_hooks(name: str, register: Any) -> Any:
    path = f"torch.nn.modules.module.{name}"
    instead = "the dict that a handle of a hook refers to" if register else "as if there were some with gradients on"
    found = _private(path, None, instead, lambda hooks: hooks.items())
    if found is not None:
        return found
    try:
        return _hooks_of(register) if register else _WhereGradientsAre()
    except Exception:
        return True  # somebody may look on: PyTorch's code runs


global_forward_hooks = _global_hooks("_global_forward_hooks", _nn_module.register_module_forward_hook)
global_forward_pre_hooks = _global_hooks("_global_forward_pre_hooks", _nn_module.register_module_forward_pre_hook)
# Registering a backward hook of one kind forbids the other kind ever after.
global_backward_hooks = _global_hooks("_global_backward_hooks", None)
global_backward_pre_hooks = _global_hooks(
    "_global_backward_pre_hooks", _nn_module.register_module_full_backward_pre_hook
)

MODULE_ATTRIBUTES = (
    "_parameters",
    "_modules",
    "_buffers",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
MODULE_METHODS = ("_call_impl",)  # what its __call__ calls, which users replace


def _are_dicts(cls: Any) -> None:
    module = cls()
    for name in MODULE_ATTRIBUTES:
        vars(module)[name].items()
    for name in MODULE_METHODS:
        inspect.signature(getattr(cls, name))


MODULES_ARE_KNOWN = _private(_MODULE, None, "kgopt.optimize leaves models as they are", _are_dicts) is not None


def has_backward_hooks(t: Tensor) -> bool:
    """Whether somebody is told of a tensor's gradient; True where that cannot be known."""
    return bool(t._backward_hooks) if _HAS_TENSOR_HOOKS else True


_HAS_TENSOR_HOOKS = hasattr(_ZERO, "_backward_hooks") and (
    _private("torch.Tensor._backward_hooks", None, "as if every tensor had hooks") is not None
)


def output_padding_of(conv: Any, input: Tensor, output_size: Sequence[int] | None) -> Any:
    """The output padding of a transposed convolution whose result has ``output_size``, if that is given.

    Raises:
        ValueError: no output padding gives that size.
    """
    if output_size is None:
        return conv.output_padding
    rank = len(conv.kernel_size)
    if _HAS_OUTPUT_PADDING:
        return conv._output_padding(
            input, output_size, conv.stride, conv.padding, conv.kernel_size, rank, conv.dilation
        )
    sizes = list(output_size)[-rank:]
    if len(output_size) not in (rank, input.dim()):
        raise ValueError(f"output_size has {len(output_size)} elements, expected {rank} or {input.dim()}")
    geometry = zip(input.shape[-rank:], conv.stride, conv.padding, conv.kernel_size, conv.dilation, strict=True)
    least = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, s, p, k, d in geometry]
    most = [size + s - 1 for size, s in zip(least, conv.stride, strict=True)]
    if any(not low <= size <= high for low, size, high in zip(least, sizes, most, strict=True)):
        raise ValueError(f"output_size is {sizes}, expected sizes from {least} to {most} for an input of {input.shape}")
    return [size - low for size, low in zip(sizes, least, strict=True)]


_HAS_OUTPUT_PADDING = (
    _private(
        "torch.nn.ConvTranspose2d._output_padding",
        None,
        "the same arithmetic",
        lambda method: inspect.signature(method).bind(*range(8)),
    )
    is not None
)


def version_of(t: Tensor) -> int | None:
    """How often a tensor was changed in place; None where that cannot be known."""
    return t._version if _HAS_VERSION else None


_HAS_VERSION = (
    _private("torch.Tensor._version", None, "moments are not carried from convolutions; values are compared")
    is not None
)


_AUTOGRAD, _NO_HOOKS = "torch._C._autograd", "results of norms are not computed again in the backward, but kept"
_saved_hooks = _privates(
    (
        f"{_AUTOGRAD}._top_saved_tensors_default_hooks",
        f"{_AUTOGRAD}._saved_tensors_hooks_get_disabled_error_message",
    ),
    _NO_HOOKS,
)


def may_hook_saved_tensors() -> bool:
    """Whether hooks for saved tensors would be the only ones: of several, autograd calls the innermost alone."""
    if _saved_hooks is None:
        return False
    top, disabled = _saved_hooks
    return top(True) is None and disabled() is None


def stands_for_a_plain_tensor(x: Any) -> bool:
    """What PyTorch traces with: FakeTensor and FunctionalTensor."""
    found = _tracing_types()
    if found is not None:
        return isinstance(x, tuple(found))
    return type(x).__name__ in ("FakeTensor", "FunctionalTensor") and type(x).__module__.startswith("torch.")


_tracing_types = _when_needed(
    ("torch._subclasses.fake_tensor.FakeTensor", "torch._subclasses.functional_tensor.FunctionalTensor"),
    "known by the names of their classes",
)


def _tree_leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for part in tree for leaf in _tree_leaves(part)]
    return [leaf for part in tree.values() for leaf in _tree_leaves(part)] if isinstance(tree, dict) else [tree]


def _tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        parts = [_tree_map(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return {k: _tree_map(function, v) for k, v in tree.items()} if type(tree) is dict else function(tree)


_TREES = "lists, tuples and dicts; nothing that libraries registered"
tree_leaves: Callable[[Any], list[Any]] = _private(
    "torch.utils._pytree.tree_leaves", _tree_leaves, _TREES, lambda f: _expect(f([1, {"a": 2}]), list)
)
tree_map: Callable[[Callable[[Any], Any], Any], Any] = _private(
    "torch.utils._pytree.tree_map", _tree_map, _TREES, lambda f: _expect(f(float, [1]), list)
)

# ----------------------------------------------------------------------------------------------------------------------
# CUDA


def _conv_precision() -> str:
    """The switch of cuDNN's convolutions; reading allow_tf32 warns, or raises where both interfaces were used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", None)
        return found if isinstance(found, str) else "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _set_conv_precision(precision: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conv = getattr(torch.backends.cudnn, "conv", None)
        if hasattr(conv, "fp32_precision"):
            setattr(conv, "fp32_precision", precision)  # noqa: B010  (torch 2.10's type says nothing of it)
        else:
            torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _of_convolutions(path: str, probe: Callable[[Any], object]) -> Any:
    found = _private(path, None, "torch.backends.cudnn.conv.fp32_precision", probe)
    return None if found is None else functools.partial(found, "cuda", "conv")


# PyTorch's switch for cuDNN's convolutions in fp32: "tf32", "ieee" or "none".
conv_precision: Callable[[], str] = (
    _of_convolutions("torch._C._get_fp32_precision_getter", lambda get: _expect(get("cuda", "conv"), str))
    or _conv_precision
)
set_conv_precision: Callable[[str], None] = (
    _of_convolutions("torch._C._set_fp32_precision_setter", lambda put: put("cuda", "conv", conv_precision()))
    or _set_conv_precision
)


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# In a torch without CUDA it is not there, and never called.
current_stream: Callable[[int], int] = (
    _private("torch._C._cuda_getCurrentRawStream", _current_stream, "torch.cuda.current_stream")
    if torch.version.cuda
    else _current_stream
)


def _keep_busy(cycles: int) -> None:
    """Passes over 64 MiB, each of which takes at least 20 us at the memory of today's GPUs."""
    waste = torch.empty(2**24, device="cuda")
    for _ in range(1 + int(cycles / 2e9 / 20e-6)):
        waste.zero_()


keep_busy: Callable[[int], None] = _private("torch.cuda._sleep", _keep_busy, "writes to memory instead")


def _of_cuda(name: str, instead: str) -> Any:
    """A function that a torch without CUDA does not have, and never calls."""
    return _private(f"torch._C.{name}", None, instead) if torch.version.cuda else None


_clear_blas = _of_cuda("_cuda_clearCublasWorkspaces", "graphs share cuBLAS's workspace with the calls beside them")
_end_pool = _of_cuda("_cuda_endAllocateToPool", "a capture that failed stays on the allocator's list")
_release_pool = _of_cuda("_cuda_releasePool", "memory of a capture that failed is kept")


def clear_blas_workspaces() -> None:
    """Has cuBLAS allocate its workspaces anew: within a capture from the graph's pool."""
    if _clear_blas is not None:
        _clear_blas()


def end_allocation_to_pool(device: torch.device, pool: Any) -> None:
    """What ``capture_end`` leaves out where the capture is void."""
    for function in (_end_pool, _release_pool):
        if function is not None:
            with contextlib.suppress(RuntimeError):  # it was not left out
                function(torch.cuda.current_device() if device.index is None else device.index, pool)


dispatch_mode: Any = _private(
    "torch.utils._python_dispatch.TorchDispatchMode",
    None,
    "kgopt.optimize records no CUDA graphs",
    lambda mode: _expect(mode, type),
)

# ----------------------------------------------------------------------------------------------------------------------
# The compilers

_inductor = _when_needed(
    ("torch._inductor.compile_fx.compile_fx", "torch._inductor.list_mode_options"),
    "torch.compile of the rewritten graph",
)


def compile_graph(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any],
    **more: Any,
) -> Callable[..., Any]:
    """The graph compiled by Inductor."""
    found = _inductor()
    if found is None:  # torch.compile takes one of them
        return torch.compile(graph, mode=None if options else mode, options=dict(options) or None)
    compile_fx, list_mode_options = found
    config = {**(list_mode_options(mode) if mode else {}), **options}
    compiled: Callable[..., Any] = compile_fx(graph, list(example_inputs), config_patches=config or None, **more)
    return compiled


_aot_eager = _when_needed(("torch._dynamo.backends.debugging.aot_eager",), "the graph runs as it is")


def compile_eagerly(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The graph through AOTAutograd, with no compiler behind it."""
    found = _aot_eager()
    return graph if found is None else found[0](graph, example_inputs)  # type: ignore[no-any-return]


INDUCTOR_PATTERNS = "torch._inductor.fx_passes.post_grad"  # the module whose import says that Inductor is there
inductor_patterns = _when_needed(
    (
        f"{INDUCTOR_PATTERNS}.pass_patterns",
        "torch._inductor.pattern_matcher.CallFunctionVarArgs",
        "torch._inductor.pattern_matcher.register_graph_pattern",
    ),
    "norms in compiled code read their input for statistics",
)
BACKENDS = "torch._dynamo.backends.registry"
_backends = _when_needed(
    (f"{BACKENDS}._BACKENDS", f"{BACKENDS}.register_backend"),
    'backend="kgopt" is found by its entry point alone',
)


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """A backend's name for torch.compile; nothing, where it is known."""
    found = _backends()
    if found is not None and name not in found[0]:  # else its entry point is what is being loaded
        found[1](backend, name=name)


INDUCTOR_LOG = "torch._inductor"
_settings = _when_needed(
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
