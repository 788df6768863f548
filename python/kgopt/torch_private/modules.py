"""What torch.nn.Module and tensors keep, and trees of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as _nn_module

from kgopt.torch_private.lookup import MODULE, ZERO, expect, private, privates, when_needed


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
    found = private(path, None, instead, lambda hooks: hooks.items())
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


MODULES_ARE_KNOWN = private(MODULE, None, "kgopt.optimize leaves models as they are", _are_dicts) is not None


def has_backward_hooks(t: Tensor) -> bool:
    """Whether somebody is told of a tensor's gradient; True where that cannot be known."""
    return bool(t._backward_hooks) if _HAS_TENSOR_HOOKS else True


_HAS_TENSOR_HOOKS = hasattr(ZERO, "_backward_hooks") and (
    private("torch.Tensor._backward_hooks", None, "as if every tensor had hooks") is not None
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
    private(
        "torch.nn.ConvTranspose2d._output_padding",
        None,
        "the same arithmetic",
        lambda method: inspect.signature(method).bind(*range(8)),
    )
    is not None
)


def border_of(conv: Any) -> tuple[int, ...] | None:
    """What the forward of a convolution gives ``F.pad``, if its padding_mode is not "zeros"; None: it is not known."""
    border = conv.__dict__.get("_reversed_padding_repeated_twice") if _HAS_BORDER else None
    return tuple(border) if isinstance(border, (tuple, list)) and {*map(type, border)} == {int} else None


_HAS_BORDER = (
    private("torch.nn.modules.conv._ConvNd", None, "convolutions with a padding_mode other than zeros are PyTorch's")
    is not None
)


def version_of(t: Tensor) -> int | None:
    """How often a tensor was changed in place; None where that cannot be known."""
    return t._version if _HAS_VERSION else None


_HAS_VERSION = (
    private("torch.Tensor._version", None, "moments are not carried from convolutions; values are compared") is not None
)


current_graph_task: Callable[[], int] = private(  # which backward runs in this thread; -1: none
    "torch._C._current_graph_task_id",
    lambda: -1,
    "a result that is computed again is computed for each of its readers",
    lambda f: expect(f(), int),
)


_keeps_graph: Callable[[], bool] | None = private(
    "torch._C._autograd._get_current_graph_task_keep_graph",
    None,
    "training steps of compiled code are not replayed",
    lambda f: expect(f(), bool),
)
KNOWS_IF_GRAPH_STAYS = _keeps_graph is not None


def graph_stays() -> bool:
    """Whether the backward in this thread may come again. Only with :data:`KNOWS_IF_GRAPH_STAYS`."""
    return _keeps_graph is None or _keeps_graph()


_AUTOGRAD, _NO_HOOKS = "torch._C._autograd", "results of norms are not computed again in the backward, but kept"
_saved_hooks = privates(
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


_moves = privates(
    (f"{_AUTOGRAD}._pop_saved_tensors_default_hooks", f"{_AUTOGRAD}._push_saved_tensors_default_hooks"),
    "hooks for saved tensors see all that autograd keeps",
)


def unhooked(hooks: tuple[Any, Any], function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` without these hooks for saved tensors, where they are the innermost."""
    if _saved_hooks is None or _moves is None:
        return function(*args)
    found = _saved_hooks[0](True)
    if found is None or found[0] is not hooks[0]:
        return function(*args)
    pop, push = _moves
    pop()
    try:
        return function(*args)
    finally:
        push(*hooks)


def stands_for_a_plain_tensor(x: Any) -> bool:
    """What PyTorch traces with: FakeTensor and FunctionalTensor."""
    found = _tracing_types()
    if found is not None:
        return isinstance(x, tuple(found))
    return type(x).__name__ in ("FakeTensor", "FunctionalTensor") and type(x).__module__.startswith("torch.")


_tracing_types = when_needed(
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
tree_leaves: Callable[[Any], list[Any]] = private(
    "torch.utils._pytree.tree_leaves", _tree_leaves, _TREES, lambda f: expect(f([1, {"a": 2}]), list)
)
tree_map: Callable[[Callable[[Any], Any], Any], Any] = private(
    "torch.utils._pytree.tree_map", _tree_map, _TREES, lambda f: expect(f(float, [1]), list)
)
