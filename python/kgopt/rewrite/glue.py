"""Upsampling, replicate padding and channels_last ``cat`` in inference: equal values from a few strided copies.

PyTorch's own kernels for them run far below the speed of the memory (3D upsampling in channels_last at a tenth, 3D
replicate padding at a fortieth of it on an H200), so between fused norms and convolutions they are what is left.

Calls of ``F.interpolate``, ``F.pad`` and ``torch.cat`` are found by running the model; the module that makes one,
however its code gets there, receives a forward that looks at these functions while it runs. A call is replaced where
nothing needs a gradient, at the arguments that were measured to be faster so; every other call goes to PyTorch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from kgopt.rewrite import policy

SMALL = 2**20  # bytes of the result, below which several launches cost more than they save
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_LINEAR = {"linear": 3, "bilinear": 4, "trilinear": 5}


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() in _FORMATS and not x.is_contiguous() and x.is_contiguous(memory_format=_FORMATS[x.dim()])


def _empty(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Like x, of other spatial sizes."""
    memory_format = _FORMATS[x.dim()] if _is_channels_last(x) else torch.contiguous_format
    return torch.empty((*x.shape[:2], *sizes), dtype=x.dtype, device=x.device, memory_format=memory_format)


def _wide(x: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors with a contiguous last dim of the same length, as elements of 16 bytes where that is possible."""
    for dtype in (torch.complex128, torch.int64, torch.int32):
        count = dtype.itemsize // x.element_size()
        if count > 1 and all(
            t.shape[-1] % count == 0
            and t.storage_offset() % count == 0
            and t.data_ptr() % dtype.itemsize == 0
            and all(stride % count == 0 for stride in t.stride()[:-1])
            for t in (x, like)
        ):
            return x.view(dtype), like.view(dtype)
    return x, like


def upsample_nearest(x: Tensor, factors: Sequence[int]) -> Tensor:
    """``F.interpolate(x, scale_factor=factors, mode="nearest")`` for integer factors, bit for bit.

    x [N, C, *S], contiguous or channels_last; the result [N, C, *(s * f)] in the same memory format.
    """
    if not _is_channels_last(x) and factors[-1] > 1:
        # The last dim first, on the small tensor, so that whole rows can be copied after it.
        wide = torch.empty((*x.shape, factors[-1]), dtype=x.dtype, device=x.device)
        wide.copy_(x.unsqueeze(-1).expand(wide.shape))
        x, factors = wide.flatten(-2), [*factors[:-1], 1]
    if all(f == 1 for f in factors):
        return x.contiguous() if not _is_channels_last(x) else x.clone()
    out = _empty(x, [s * f for s, f in zip(x.shape[2:], factors, strict=True)])
    last = _is_channels_last(x)
    source, target = (t.movedim(1, -1) if last else t for t in (x, out))
    source, target = _wide(source, target)
    first = 1 if last else 2
    for i, factor in reversed(list(enumerate(factors))):
        if factor > 1:
            target = target.unflatten(first + i, (source.shape[first + i], factor))
            source = source.unsqueeze(first + i + 1)
    target.copy_(source.expand(target.shape))
    return out


def upsample_linear(x: Tensor) -> Tensor:
    """``F.interpolate(x, scale_factor=2, mode="trilinear", align_corners=False)``, also linear and bilinear.

    x [N, C, *S], contiguous or channels_last; the result [N, C, *(2 s)] in the same memory format. One dim after the
    other, as products of the same weights: equal up to rounding.
    """
    for dim in range(2, x.dim()):
        size = x.shape[dim]
        sizes = list(x.shape[2:])
        sizes[dim - 2] *= 2
        out = _empty(x, sizes)
        even, odd = out.unflatten(dim, (size, 2)).unbind(dim + 1)
        low, high = x.narrow(dim, 0, size - 1), x.narrow(dim, 1, size - 1)
        torch.lerp(high, low, 0.25, out=even.narrow(dim, 1, size - 1))
        torch.lerp(low, high, 0.25, out=odd.narrow(dim, 0, size - 1))
        even.narrow(dim, 0, 1).copy_(x.narrow(dim, 0, 1))
        odd.narrow(dim, size - 1, 1).copy_(x.narrow(dim, size - 1, 1))
        x = out
    return x


def pad_replicate(x: Tensor, pad: Sequence[int]) -> Tensor:
    """``F.pad(x, pad, mode="replicate")`` for pads of at least 0, bit for bit.

    x [N, C, *S], contiguous or channels_last; the result in the same memory format.
    """
    before, after = list(pad[0::2])[::-1], list(pad[1::2])[::-1]
    out = _empty(x, [s + b + a for s, b, a in zip(x.shape[2:], before, after, strict=True)])
    inside = out
    for i, size in enumerate(x.shape[2:]):
        inside = inside.narrow(2 + i, before[i], size)
    inside.copy_(x)
    # The slabs of a dim have the full size of the dims after it, which are filled already.
    for i in reversed(range(len(before))):
        dim, size = 2 + i, x.shape[2 + i]
        part = out
        for j in range(i):
            part = part.narrow(2 + j, before[j], x.shape[2 + j])
        for start, count, edge in ((0, before[i], before[i]), (before[i] + size, after[i], before[i] + size - 1)):
            if count:
                slab = part.narrow(dim, start, count)
                slab.copy_(part.narrow(dim, edge, 1).expand(slab.shape))
    return out


def cat_channels_last(tensors: Sequence[Tensor]) -> Tensor:
    """``torch.cat(tensors, dim=1)`` of channels_last tensors, bit for bit: copies of 16 bytes at a time."""
    first = tensors[0]
    out = torch.empty(
        (first.shape[0], sum(t.shape[1] for t in tensors), *first.shape[2:]),
        dtype=first.dtype,
        device=first.device,
        memory_format=_FORMATS[first.dim()],
    )
    start = 0
    for t in tensors:
        source, target = _wide(t.movedim(1, -1), out.narrow(1, start, t.shape[1]).movedim(1, -1))
        target.copy_(source)
        start += t.shape[1]
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Which calls

_CATS = (torch.cat, torch.concat, torch.concatenate)
_FUNCTIONS = frozenset({F.interpolate, F.pad, *_CATS})


@dataclass(frozen=True)
class Call:
    """A call that can be replaced."""

    kind: str
    argument: tuple[Any, ...]
    x: Tensor
    more: tuple[Tensor, ...] = ()  # of cat

    @property
    def key(self) -> Any:
        """What a verdict holds for."""
        return self.kind, self.argument, self.x.shape, self.x.dtype, self.x.device, self.x.is_contiguous()

    def run(self) -> Tensor:
        """The result from copies."""
        if self.kind == "cat":
            return cat_channels_last((self.x, *self.more))
        if self.kind == "nearest":
            return upsample_nearest(self.x, self.argument)
        return upsample_linear(self.x) if self.kind == "linear" else pad_replicate(self.x, self.argument)


def recognize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The call as one that can be replaced; None where PyTorch must run it, or refuse it."""
    if func is F.interpolate:
        return _interpolate(*args, **kwargs)
    if func is F.pad:
        return _pad(*args, **kwargs)
    return _cat(*args, **kwargs) if func in _CATS and len(args) + len(kwargs) <= 2 and "out" not in kwargs else None


def _takes(x: Any) -> bool:
    """A plain tensor whose result has its own dtype: autocast gives float32 for some of these functions."""
    if type(x) is not Tensor or not x.is_floating_point() or x.layout is not torch.strided or x.dim() not in (4, 5):
        return False
    if (torch.is_grad_enabled() and x.requires_grad) or torch.is_autocast_enabled(x.device.type):
        return False
    return x.numel() > 0 and (x.is_contiguous() or _is_channels_last(x))


def _interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Call | None:
    if antialias or not _takes(input):
        return None
    spatial = input.shape[2:]
    given = size if size is not None else scale_factor
    if (size is None) == (scale_factor is None):
        return None
    values = list(given) if isinstance(given, (tuple, list)) else [given] * len(spatial)
    if len(values) != len(spatial) or not all(isinstance(v, (int, float)) for v in values):
        return None
    if size is not None:
        if any(not isinstance(v, int) or v % s for v, s in zip(values, spatial, strict=True)):
            return None
        values = [v // s for v, s in zip(values, spatial, strict=True)]
    if any(v != int(v) or v < 1 for v in values):
        return None
    factors = tuple(int(v) for v in values)
    if all(f == 1 for f in factors):
        return None
    if mode == "nearest":
        return Call("nearest", factors, input)
    if _LINEAR.get(mode) == input.dim() and not align_corners and set(factors) == {2}:
        return Call("linear", factors, input)
    return None


def _pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Call | None:
    if mode != "replicate" or not _takes(input) or not isinstance(pad, (tuple, list)):
        return None
    if len(pad) != 2 * (input.dim() - 2) or any(not isinstance(p, int) or p < 0 for p in pad) or not any(pad):
        return None
    return Call("replicate", tuple(pad), input)


def _cat(tensors: Any = None, dim: Any = 0, axis: Any = None) -> Call | None:
    dim = dim if axis is None else axis
    if not isinstance(tensors, (tuple, list)) or len(tensors) < 2 or not isinstance(dim, int):
        return None
    if not all(_takes(t) and _is_channels_last(t) for t in tensors):
        return None
    first, *more = tensors
    alike = all(
        (t.dtype, t.device, t.shape[0], t.shape[2:]) == (first.dtype, first.device, first.shape[0], first.shape[2:])
        for t in more
    )
    if not alike or dim not in (1, 1 - first.dim()):
        return None
    return Call("cat", tuple(t.shape[1] for t in more), first, tuple(more))


# ----------------------------------------------------------------------------------------------------------------------
# In a model


@dataclass
class GlueState:
    """What a module remembers of its calls."""

    enabled: bool = True
    faster: dict[Any, bool] = field(default_factory=dict)  # by Call.key

    def __getstate__(self) -> dict[str, Any]:
        return {"enabled": self.enabled, "faster": {}}  # another machine is another measurement

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class _Replace(TorchFunctionMode):
    """Runs what was measured to be faster from copies."""

    def __init__(self, state: GlueState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONS:
            call = recognize(func, args, kwargs)
            if call is not None and self.state.faster.get(call.key):
                return call.run()
        return func(*args, **kwargs)


class _Find(TorchFunctionMode):
    """Measures the calls that can be replaced, and whose they are."""

    def __init__(self, modules: dict[int, nn.Module], always: bool) -> None:
        super().__init__()
        self.modules = modules
        self.always = always
        self.found: dict[int, dict[Any, bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONS:
            call = recognize(func, args, kwargs)
            owner = None if call is None else self._caller()
            if call is not None and owner is not None:
                verdicts = self.found.setdefault(owner, {})
                if call.key not in verdicts:
                    verdicts[call.key] = self.always or _is_faster(call, functools.partial(func, *args, **kwargs))
        return func(*args, **kwargs)

    def _caller(self) -> int | None:
        """The innermost module whose code runs."""
        frame = sys._getframe(2)
        while frame is not None:
            owner = id(frame.f_locals.get("self"))
            if owner in self.modules:
                return owner
            frame = frame.f_back  # type: ignore[assignment]
        return None


def _is_faster(call: Call, original: Callable[[], Tensor]) -> bool:
    """On the GPU: a result this large keeps it busier than the launches take."""
    try:
        expected, actual = original(), call.run()
        if expected.numel() * expected.element_size() < SMALL or expected.stride() != actual.stride():
            return False
        if call.kind == "linear":
            exact = F.interpolate(call.x.double(), scale_factor=2, mode=f"{['', 'bi', 'tri'][call.x.dim() - 3]}linear")
            theirs, ours = (policy.relative_error(y, exact) for y in (expected, actual))
            if ours > 2 * theirs + policy.TINY.get(call.x.dtype, 1e-2):
                return False
        elif not torch.equal(expected, actual):
            return False
        before, after = policy.busy_both(original, call.run, call.x.device)
    except (torch.OutOfMemoryError, RuntimeError):
        return False
    return after < before


def _is_watched() -> bool:
    """Something traces, transforms or counts what runs: it shall see PyTorch's own functions."""
    return bool(
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.utils._python_dispatch._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
    )


def wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with the replaced calls in it, where nothing needs a gradient and nothing is traced."""

    @functools.wraps(forward)
    def glue_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or _is_watched():
            return forward(self, *args, **kwargs)
        state = self.__dict__.get("_kgopt_glue")
        if state is None or not state.enabled or not state.faster:
            return forward(self, *args, **kwargs)
        policy.own_modes.count += 1
        try:
            with _Replace(state):
                return forward(self, *args, **kwargs)
        finally:
            policy.own_modes.count -= 1

    return glue_forward


def find(root: nn.Module, call: Callable[[], Any], unwanted: Callable[[str], str], always: bool = False) -> int:
    """Runs the model, measures what its modules call, and gives those a new forward. How many calls are faster."""
    from kgopt.rewrite import classes

    names = {id(m): name for name, m in root.named_modules()}
    modules = {id(m): m for m in root.modules()}
    with _Find(modules, always) as mode:
        call()
    count = 0
    for owner, verdicts in mode.found.items():
        module = modules[owner]
        if not any(verdicts.values()) or unwanted(names[owner]) or "forward" in module.__dict__:
            continue
        state = module.__dict__.setdefault("_kgopt_glue", GlueState())
        state.faster.update(verdicts)
        count += sum(verdicts.values())
        original = classes.original_class(module)
        recipe = type(module).__dict__["_kgopt_recipe"] if original is not None else ()
        if ("glue",) not in recipe:
            module.__class__ = classes.make_class(original or type(module), (("glue",), *recipe))
    return count


def forget(root: nn.Module) -> None:
    """Gives every module its own forward back."""
    from kgopt.rewrite import classes

    for module in root.modules():
        if "_kgopt_glue" not in module.__dict__:
            continue
        del module.__dict__["_kgopt_glue"]
        original = classes.original_class(module)
        if original is not None:
            recipe = tuple(part for part in type(module).__dict__["_kgopt_recipe"] if part != ("glue",))
            module.__class__ = classes.make_class(original, recipe) if recipe else original


def states_of(root: nn.Module) -> list[GlueState]:
    """Of every module that has one."""
    return [m.__dict__["_kgopt_glue"] for m in root.modules() if "_kgopt_glue" in m.__dict__]
