"""What stands between norms in inference: equal values from faster kernels, or from a few strided copies.

PyTorch's own kernels for upsampling, pooling and padding run far below the speed of the memory (3D upsampling in
channels_last at a tenth, 3D replicate padding at a fortieth of it on an H200), a convolution's bias is added in a pass
of its own, in half types at a third of it, and cuDNN has no good kernel for a few channels.

Calls of the functions below are found by running the model; the module that makes one, however its code gets there,
receives a forward that looks at these functions while it runs. A call is replaced where nothing needs a gradient, at
the arguments that were measured to be faster so; every other call goes to PyTorch.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kgopt import accuracy
from kgopt import ops as ops
from kgopt.ops.calls import is_grad_enabled as _is_grad_enabled
from kgopt.ops.calls import len_torch_function_stack as _len_torch_function_stack
from kgopt.rewrite import carry, classes, formats, originals, policy, sites, verdicts
from kgopt.rewrite.disguise import original_class
from kgopt.rewrite.layout import FORMATS as _FORMATS
from kgopt.rewrite.layout import as_channels_last
from kgopt.rewrite.originals import OwnMode
from kgopt.rewrite.patterns import activation_of, conv_of
from kgopt.rewrite.sites import Site, any_global_hooks, has_own_methods, is_as_is, is_hooked, keeps_format
from kgopt.rewrite.wrapped import Wrapped
from kgopt.torch_private import below_autograd

_OPS = torch.ops.kgopt
SMALL = 2**20  # bytes of the result, below which several launches cost more than they save
_LINEAR = {"linear": 3, "bilinear": 4, "trilinear": 5}


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() in _FORMATS and not x.is_contiguous() and x.is_contiguous(memory_format=_FORMATS[x.dim()])


def lies_as(y: Tensor, x: Tensor) -> bool:
    """Both channels_last, or both contiguous."""
    return _is_channels_last(y) if _is_channels_last(x) else y.is_contiguous() and x.is_contiguous()


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
    if x.is_cuda and _is_channels_last(x):
        return _OPS.upsample_nearest(x, list(factors))  # type: ignore[no-any-return]
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


def cat_channels_last(tensors: Sequence[Tensor], dim: int = 1) -> Tensor:
    """``torch.cat(tensors, dim)`` of channels_last tensors, bit for bit: copies of 16 bytes at a time."""
    first = tensors[0]
    sizes = list(first.shape)
    sizes[dim] = sum(t.shape[dim] for t in tensors)
    out = torch.empty(sizes, dtype=first.dtype, device=first.device, memory_format=_FORMATS[first.dim()])
    start = 0
    for t in tensors:
        source, target = _wide(t.movedim(1, -1), out.narrow(dim, start, t.shape[dim]).movedim(1, -1))
        target.copy_(source)
        start += t.shape[dim]
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Which calls

INTERPOLATE, _PAD = F.interpolate, F.pad  # as they are now: a user may replace them
_CATS = (torch.cat, torch.concat, torch.concatenate)
_POOLS = {F.max_pool2d: 2, F.max_pool3d: 3}
_CONVS: dict[Any, tuple[str, int, bool]] = {  # the op, dims, transposed
    torch.conv2d: ("conv2d", 2, False),
    torch.conv3d: ("conv3d", 3, False),
    torch.conv_transpose2d: ("conv_transpose2d", 2, True),
    torch.conv_transpose3d: ("conv_transpose3d", 3, True),
}
CONV_FUNCTIONS = {op: function for function, (op, _, _) in _CONVS.items()}
_FUNCTIONS = frozenset(f for f in (INTERPOLATE, _PAD, *_CATS, *_POOLS, *_CONVS) if originals.is_torchs(f))
# By function: whether what it calls is PyTorch's own.
_UNTOUCHED = {
    **{f: originals.untouched(*originals.of_function(f)) for f in (INTERPOLATE, _PAD, *_POOLS)},
    **dict.fromkeys((*_CATS, *_CONVS), originals.untouched()),
}
# Channels of input or output, up to which kgopt's own convolution can be the faster one: in general, in channels_last.
NARROW, NARROW_LAST = 32, 128
FEW = 4  # output channels of group_norm_conv1x1's kernel
FEW_COLUMNS = 40  # taps times output channels of group_norm_conv's kernel for few channels


@dataclass(frozen=True)
class Call:
    """A call that can be replaced."""

    kind: str
    argument: tuple[Any, ...]
    x: Tensor
    more: tuple[Any, ...] = ()  # the other tensors, of cat; weight and bias
    options: tuple[str, ...] = ("kgopt",)  # ways to replace it
    keeps: bool = False  # the result has x's memory format, whichever PyTorch would give

    @property
    def key(self) -> Any:
        """What a verdict holds for."""
        x = self.x
        return self.kind, self.argument, self.keeps, x.shape, x.dtype, x.device, x.is_contiguous()

    def run(self, option: str = "") -> Tensor:
        """The result in one of the ways; the first one by default."""
        if self.kind == "conv":
            return self._convolve(option or self.options[0])
        if self.kind == "cat":
            return cat_channels_last((self.x, *self.more), self.argument[0])
        if self.kind == "nearest":
            return upsample_nearest(self.x, self.argument)
        if self.kind == "max_pool":
            return _OPS.max_pool(self.x, *map(list, self.argument))  # type: ignore[no-any-return]
        if self.kind == "linear":
            return _OPS.upsample_linear(self.x)  # type: ignore[no-any-return]
        return _OPS.pad_replicate(self.x, list(self.argument))  # type: ignore[no-any-return]

    def inside(self, keeps: bool) -> Call:
        """The call as it may run in a model that keeps channels_last, where the format is no part of what it means: of
        some tensors PyTorch's upsampling and padding give contiguous ones, which the next convolution converts back.
        """
        of_kind = self.kind in ("nearest", "linear", "replicate", "max_pool")
        return replace(self, keeps=True) if keeps and of_kind and _is_channels_last(self.x) else self

    @property
    def sizes(self) -> list[int]:
        """Of the result of upsampling and of a convolution."""
        if self.kind == "linear":
            return [*self.x.shape[:2], *(2 * s for s in self.x.shape[2:])]
        _, transposed, stride, padding, dilation, output_padding, groups, *_ = self.argument
        rest = (stride, padding, dilation, output_padding, groups, transposed)
        return ops.conv_sizes(self.x.shape, self.more[0].shape, *rest)

    @property
    def rest(self) -> tuple[Any, ...]:
        """A convolution's arguments of conv_add after its tensors."""
        _, transposed, *lists, groups = self.argument[:7]
        return (*map(list, lists), groups, transposed)

    @property
    def own(self) -> tuple[Any, tuple[Any, ...]]:
        """kgopt's op of a convolution, and its arguments after its tensors."""
        op, transposed, stride, padding, dilation, output_padding, groups, *_ = self.argument
        tail = (list(output_padding), groups, list(dilation)) if transposed else (list(dilation), groups)
        return getattr(_OPS, op).default, (list(stride), list(padding), *tail)

    def _convolve(self, option: str) -> Tensor:
        if option == "bias":
            return _OPS.conv_add(self.x, *self.more, None, *self.rest)  # type: ignore[no-any-return]
        if option == "pointwise":
            return _pointwise(self.x, *self.more)
        if option == "few":
            weight, bias = self.more
            return _few(self.x, weight, bias, self.rest)
        op, rest = self.own
        return op(self.x, *self.more, *rest, backend="kgopt")  # type: ignore[no-any-return]


def recognize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The call as one that can be replaced; None where PyTorch must run it, or refuse it."""
    untouched = _UNTOUCHED.get(func)
    if untouched is None or not untouched():
        return None
    try:
        if func is INTERPOLATE:
            return _interpolate(*args, **kwargs)
        if func is _PAD:
            return _pad(*args, **kwargs)
        if func in _POOLS:
            return _max_pool(_POOLS[func], *args, **kwargs)
        if func in _CONVS:
            op, rank, transposed = _CONVS[func]
            return (_conv_transpose if transposed else _conv)(op, rank, *args, **kwargs)
    except TypeError:  # arguments that the function does not have: it says so itself
        return None
    return _cat(*args, **kwargs) if func in _CATS and len(args) + len(kwargs) <= 2 and "out" not in kwargs else None


def _numbers(value: Any, rank: int) -> tuple[int, ...] | None:
    """One number, or a list of one, for every dim; None where it is something else."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    values = values * rank if len(values) == 1 else values
    return values if len(values) == rank and all(type(v) is int for v in values) else None


def _max_pool(
    rank: int,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Call | None:
    if ceil_mode or return_indices or not _takes(input) or input.dim() != rank + 2:
        return None
    if isinstance(stride, (tuple, list)) and not stride:
        stride = None
    window = [_numbers(v, rank) for v in (kernel_size, kernel_size if stride is None else stride, padding)]
    kernel, step, pad = window
    if kernel is None or step is None or pad is None or _numbers(dilation, rank) != (1,) * rank:
        return None
    if min(kernel) < 1 or min(step) < 1 or any(p < 0 or 2 * p > k for p, k in zip(pad, kernel, strict=True)):
        return None
    if any(s + 2 * p < k for s, p, k in zip(input.shape[2:], pad, kernel, strict=True)):
        return None
    return Call("max_pool", (kernel, step, pad), input)


def _conv(
    op: str,
    rank: int,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
) -> Call | None:
    return _convolution(op, rank, False, input, weight, bias, stride, padding, dilation, 0, groups)


def _conv_transpose(
    op: str,
    rank: int,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: Any = 1,
    dilation: Any = 1,
) -> Call | None:
    return _convolution(op, rank, True, input, weight, bias, stride, padding, dilation, output_padding, groups)


def _convolution(op: str, rank: int, transposed: bool, x: Any, weight: Any, bias: Any, *rest: Any) -> Call | None:
    if not _takes(x) or x.dim() != rank + 2 or not _is_parameter_of(weight, x) or weight.dim() != rank + 2:
        return None
    if bias is not None and not _is_parameter_of(bias, x):
        return None
    *lists, groups = rest
    numbers = [_numbers(v, rank) for v in lists]
    if None in numbers or type(groups) is not int:
        return None
    stride, padding, dilation, output_padding = numbers
    limit = NARROW_LAST if _is_channels_last(x) else NARROW
    narrow = min(weight.shape[0], weight.shape[1] * groups) <= limit and x.is_cuda
    # One kernel reads x once for a few output channels.
    ones, zeros = (1,) * rank, (0,) * rank
    head = x.is_cuda and _is_channels_last(x) and (stride, groups) == (ones, 1) and not transposed
    head = head and weight.shape[0] <= FEW
    pointwise = head and weight.shape[2:] == ones and (padding, dilation) == (zeros, ones)
    few = head and not pointwise and math.prod(weight.shape[2:]) * weight.shape[0] <= FEW_COLUMNS
    few = few and (rank == 2 or (weight.shape[2] == 1 and padding is not None and padding[0] == 0))
    options = (
        *(("bias",) if bias is not None else ()),
        *(("own",) if narrow else ()),
        *(("pointwise",) if pointwise else ()),
        *(("few",) if few else ()),
    )
    if not options:
        return None
    # Two models may share a function, so its key says which weight it is about as far as that matters.
    of_weight = (weight.shape, weight.stride(), bias is None)
    argument = (op, transposed, stride, padding, dilation, output_padding, groups, *of_weight)
    return Call("conv", argument, x, (weight, bias), options)


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _OPS.group_norm_conv1x1(x, None, 0, None, None, 0.0, "none", weight, bias)  # type: ignore[no-any-return]


def _few(x: Tensor, weight: Tensor, bias: Tensor | None, rest: Sequence[Any]) -> Tensor:
    return _OPS.group_norm_conv(x, None, 0, None, None, 0.0, "none", weight, bias, None, *rest)  # type: ignore[no-any-return]


def _is_parameter_of(p: Any, x: Tensor) -> bool:
    """A plain tensor of x's dtype and device, of which nobody wants a gradient now."""
    if type(p) not in (Tensor, nn.Parameter) or p.layout is not torch.strided:
        return False
    return p.dtype is x.dtype and p.device == x.device and not (torch.is_grad_enabled() and p.requires_grad)


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
    found = interpolation(input, size, scale_factor, mode, align_corners) if _takes(input) and not antialias else None
    return None if found is None else Call(*found, input)


def interpolation(
    x: Tensor, size: Any, scale_factor: Any, mode: Any, align_corners: bool | None
) -> tuple[str, tuple[int, ...]] | None:
    """("nearest" or "linear", the factors) of a call of ``F.interpolate`` that kgopt can compute; else None."""
    spatial = x.shape[2:]
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
        return "nearest", factors
    return ("linear", factors) if _LINEAR.get(mode) == x.dim() and not align_corners and set(factors) == {2} else None


def _pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Call | None:
    if mode != "replicate" or not _takes(input) or not isinstance(pad, (tuple, list)):
        return None
    if len(pad) != 2 * (input.dim() - 2) or any(not isinstance(p, int) or p < 0 for p in pad):
        return None
    return Call("replicate", tuple(pad), input)


def _cat(tensors: Any = None, dim: Any = 0, axis: Any = None) -> Call | None:
    dim = dim if axis is None else axis
    if not isinstance(tensors, (tuple, list)) or len(tensors) < 2 or not isinstance(dim, int):
        return None
    if not all(_takes(t) and _is_channels_last(t) for t in tensors):
        return None
    first, *more = tensors
    rank = first.dim()
    dim = dim + rank if dim < 0 else dim
    if not 0 <= dim < rank:
        return None

    def rest(t: Tensor) -> Any:
        return t.dtype, t.device, t.shape[:dim], t.shape[dim + 1 :]

    if not all(rest(t) == rest(first) for t in more):
        return None
    return Call("cat", (dim, *(t.shape[dim] for t in more)), first, tuple(more))


# ----------------------------------------------------------------------------------------------------------------------
# In a model


@dataclass
class ConvPlan:
    """What a convolution module does with inputs of one kind: looking that up anew took longer than launching it."""

    option: str
    module: tuple[Any, ...]  # the module's attributes that this is about
    rest: tuple[Any, ...]  # arguments of conv_add after its tensors
    sizes: list[int]  # of the result
    own: tuple[Any, tuple[Any, ...]] | None  # kgopt's own convolution, and its arguments after its tensors
    adds: bool = False  # conv_add is the way to add something to the result
    carrier: carry.Carrier | None = None  # where the result is large enough for its moments to pay


PLANS = 64  # of a module, after which new kinds of inputs are PyTorch's


def is_own_conv(conv: Any) -> bool:
    """Whether the forward of a convolution module is PyTorch's, for its class and for the instance."""
    cls = original_class(conv) or type(conv)
    untouched = originals.AS_INSIDE.get(cls)
    return untouched is not None and untouched() and not has_own_methods(conv, cls)


def plan_of(conv: Any, x: Any) -> ConvPlan | None:
    """The plan for this call; None where PyTorch's code must run. Only with gradients off and nobody looking on."""
    if not is_own_conv(conv):
        return None
    if torch.compiler.is_compiling():
        return _compiled_plan(conv, x)
    state = conv.__dict__.get("_kgopt_glue")
    if state is None or not state.enabled or type(x) is not Tensor or policy.is_autocast(x):
        return None
    parameters = conv._parameters
    if "weight" not in parameters or "bias" not in parameters:  # pruned, parametrized
        return None
    weight, bias = parameters["weight"], parameters["bias"]
    if type(weight) is not nn.Parameter or weight.dtype is not x.dtype:
        return None
    if bias is not None and (type(bias) is not nn.Parameter or bias.dtype is not x.dtype):
        return None
    key = (x.shape, x.stride(), x.dtype, x.device, weight.stride())
    plan: ConvPlan | None = state.plans.get(key)
    module = (conv.stride, conv.padding, conv.dilation, conv.output_padding, conv.groups, conv.padding_mode)
    if plan is None or plan.module != module:
        if len(state.plans) >= PLANS:
            return None
        plan = state.plans[key] = _make_plan(conv, x, module, state)
    return plan if plan.option else None


def _make_plan(conv: Any, x: Tensor, module: tuple[Any, ...], state: GlueState) -> ConvPlan:
    kind = conv_of(conv)
    stride, padding, dilation, output_padding, groups, mode = module
    tail = (output_padding, groups, dilation) if conv.transposed else (dilation, groups)
    call = None
    if kind is not None and mode == "zeros":
        call = recognize(CONV_FUNCTIONS[kind], (x, conv.weight, conv.bias, stride, padding, *tail), {})
    if kind is None or call is None:
        return ConvPlan("", module, (), [], None)
    option = state.faster.get(call.key, "")
    # conv_add chooses its convolution itself; the same one, where that is kgopt's.
    carrier = None
    if option == "own" and carry.is_worth(math.prod(call.sizes) * x.element_size()):
        carrier = state.carrier
    _, rest = call.own
    own = ops.without_grad(kind), rest
    return ConvPlan(option, module, call.rest, call.sizes, own, option in ("own", "bias"), carrier)


def _compiled_plan(conv: Any, x: Any) -> ConvPlan | None:
    """The plan in compiled inference: the way that was fastest whenever it was measured, for code serves many sizes.

    Where that is PyTorch's convolution with a bias of ours, all is the compiler's: it adds biases, and what follows,
    in one kernel.
    """
    state = conv.__dict__.get("_kgopt_glue")
    if state is None or not state.enabled or torch.is_grad_enabled() or not isinstance(x, Tensor):
        return None
    if policy.wants_torch():
        return None
    option = state.always.get(x.is_contiguous(), "")
    if option not in ("own", "pointwise", "few"):
        return None
    if torch.is_autocast_enabled(x.device.type) or x.dtype is not conv.weight.dtype or isinstance(conv.padding, str):
        return None
    kind, transposed = conv_of(conv), conv.transposed
    if kind is None or conv.padding_mode != "zeros" or x.dim() != len(conv.kernel_size) + 2:
        return None
    stride, padding, dilation = list(conv.stride), list(conv.padding), list(conv.dilation)
    output_padding, groups = list(conv.output_padding), conv.groups
    rest = (stride, padding, dilation, output_padding, groups, transposed)
    sizes = ops.conv_sizes(x.shape, conv.weight.shape, *rest)
    tail = (output_padding, groups, dilation) if transposed else (dilation, groups)
    own = getattr(_OPS, kind).default, (stride, padding, *tail)
    return ConvPlan(option, (), rest, sizes, own, option == "own", state.carrier)


def as_seen(x: Tensor) -> Tensor:
    """In compiled code: x in the format that it is seen in. Decompositions give others: see :meth:`Site.run`."""
    return as_channels_last(x) if _is_channels_last(x) else x


def _emit_plan(conv: Any, x: Tensor, plan: ConvPlan, residual: Tensor | None, divisor: float, act: str) -> Tensor:
    """:func:`run_plan` where a compiler looks on. That a norm takes the moments is :mod:`~kgopt.rewrite.inductor`'s."""
    sites.guard_methods(conv)
    weight, bias = conv.weight, conv.bias
    x, residual = as_seen(x), None if residual is None else as_seen(residual)
    if plan.option == "pointwise":
        return _pointwise(x, weight, bias)
    if plan.option == "few":
        return _few(x, weight, bias, plan.rest)
    tail = (*plan.rest, divisor, act)
    if plan.carrier is not None and plan.carrier.on:
        return _OPS.conv_add_moments(x, weight, bias, residual, *tail, backend="kgopt")[0]  # type: ignore[no-any-return]
    if residual is not None or act != "none":
        return _OPS.conv_add(x, weight, bias, residual, *tail, backend="kgopt")  # type: ignore[no-any-return]
    assert plan.own is not None
    op, rest = plan.own
    return op(x, weight, bias, *rest, backend="kgopt")  # type: ignore[no-any-return]


def run_plan(
    conv: Any, x: Tensor, plan: ConvPlan, residual: Tensor | None = None, divisor: float = 1.0, act: str = "none"
) -> Tensor:
    """The convolution, with its bias and what else is given, by one of kgopt's ops."""
    if torch.compiler.is_compiling():
        return _emit_plan(conv, x, plan, residual, divisor, act)
    parameters = conv._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    carrier, moments = plan.carrier, None
    backend = "kgopt" if plan.option == "own" else "auto"
    if carrier is not None and carrier.on:
        y, moments = _conv_add_moments(x, weight, bias, residual, *plan.rest, divisor, act, backend=backend)
    elif plan.option in ("pointwise", "few"):
        with below_autograd():  # gradients are off; the ops' Python kernels for them take time
            y = _pointwise(x, weight, bias) if plan.option == "pointwise" else _few(x, weight, bias, plan.rest)
    elif plan.option == "bias" or residual is not None or act != "none":
        y = _conv_add(x, weight, bias, residual, *plan.rest, divisor, act, backend=backend)
    else:
        assert plan.own is not None
        op, rest = plan.own
        y = op(x, weight, bias, *rest, backend="kgopt")
    if carrier is not None:
        carry.leave(y, carrier, moments)
    return y  # type: ignore[no-any-return]


_conv_add, _conv_add_moments = map(ops.without_grad, ("conv_add", "conv_add_moments"))


def _may_plan() -> bool:
    """Gradients are off, and no mode but ours, such as _Find, is to see the functions themselves; compilers see ops."""
    if _is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        return not originals.is_foreign_mode()
    return not policy.is_watched() and _len_torch_function_stack() <= policy.own_modes.count


def only_conv(module: Any) -> Any:
    """The convolution that is all of a module, perhaps in Sequentials; None for any other, or where somebody looks."""
    while isinstance(module, nn.Sequential) and classes.runs_like_sequential(module):
        if is_hooked(module) or len(module._modules) != 1 or "_kgopt_steps" in module.__dict__:
            return None
        module = next(iter(module._modules.values()))
    return module if conv_of(module) is not None and is_as_is(module) else None


def head_plan(conv: Any, x: Tensor) -> ConvPlan | None:
    """Its plan, if ``conv`` reads what a norm makes of x, and one op may do both."""
    if not _may_plan() or "_kgopt_glue" not in conv.__dict__:
        return None
    plan = plan_of(conv, x)
    return plan if plan is not None and plan.option in ("pointwise", "few") else None


def head_arguments(plan: ConvPlan) -> tuple[Any, ...] | None:
    """What :meth:`Site.run_with_head` wants to know of the convolution."""
    return plan.rest if plan.option == "few" else None


class _Normalized:
    """What a norm and its activation make of x, for later: the forward of a convolution alone reads it."""

    __slots__ = ("norm", "operands", "plan", "site")

    def __init__(self, site: Site, norm: Any, operands: tuple[Any, ...], plan: ConvPlan) -> None:
        self.site = site
        self.norm = norm
        self.operands = operands
        self.plan = plan

    def through(self, forward: Callable[..., Any], conv: Any) -> Any:
        """``conv`` of it, as one op if nothing has changed since."""
        x = self.operands[-1]
        plan = head_plan(conv, x)
        if plan is not None and plan.option == self.plan.option:
            return self.site.run_with_head(self.norm, x, conv, head_arguments(plan))
        return forward(conv, self.site.run(*self.operands))


def _defer(site: Site, follower: Any, *operands: Any) -> _Normalized | None:
    """A chain's value for later, where ``follower``, which alone reads it, is a convolution that computes both."""
    x, norm = operands[-1], operands[site.norm_at]
    if not keeps_format(norm) or type(x) is not Tensor:
        return None
    if "_kgopt_glue" not in getattr(follower, "__dict__", {}) or conv_of(follower) is None or not is_as_is(follower):
        return None
    plan = head_plan(follower, x)
    return None if plan is None else _Normalized(site, norm, operands, plan)


sites.deferring = _defer


def with_activation(conv: Any, act: Any, x: Any) -> Tensor | None:
    """``act(conv(x))`` as one op, where conv_add is the way to compute the convolution; None elsewhere."""
    if "_kgopt_glue" not in getattr(conv, "__dict__", {}) or conv_of(conv) is None or not _may_plan():
        return None
    name = activation_of(act)
    if name is None or not is_as_is(conv) or not is_as_is(act) or any_global_hooks():
        return None
    plan = plan_of(conv, x)
    if plan is None or not plan.adds:
        return None
    if torch.compiler.is_compiling():
        sites.guard_methods(act)
    return run_plan(conv, x, plan, act=name)


def conv_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a convolution module, by the faster op where nothing needs a gradient and nothing is traced."""

    @functools.wraps(forward)
    def planned_forward(self: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        if type(input) is _Normalized:
            return policy.outside_own_modes(input.through, forward, self)
        if torch.compiler.is_compiling():
            plan = None if args or kwargs or not _may_plan() else plan_of(self, input)
            return forward(self, input, *args, **kwargs) if plan is None else run_plan(self, input, plan)
        if args or kwargs or not _may_plan():
            return forward(self, input, *args, **kwargs)
        if not policy.own_modes.count:
            return _planned(forward, self, input)
        return policy.outside_own_modes(_planned, forward, self, input)

    return planned_forward


def _planned(forward: Callable[..., Any], conv: Any, x: Any) -> Any:
    plan = plan_of(conv, x)
    return forward(conv, x) if plan is None else run_plan(conv, x, plan)


@dataclass
class GlueState:
    """What a module remembers of its calls."""

    enabled: bool = True
    faster: dict[Any, str] = field(default_factory=dict)  # by Call.key: the option that is; "": PyTorch's
    plans: dict[Any, ConvPlan] = field(default_factory=dict)  # of a convolution module, by x's shape, strides, ...
    # For compiled code: of a convolution module, the option that was always the fastest, by x.is_contiguous(); of any
    # module, the kinds of calls that _Upsample replaces.
    always: dict[bool, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    carrier: carry.Carrier = field(default_factory=carry.Carrier)

    def __getstate__(self) -> dict[str, Any]:
        # Plans are made anew; another machine is another measurement.
        devices = verdicts.environments(device for *_, device, _ in self.faster)
        kept = {"faster": self.faster, "always": self.always, "kinds": self.kinds, "carries": self.carrier.on}
        return {"enabled": self.enabled, "devices": devices, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh = GlueState(state["enabled"])
        if verdicts.are_here(state.get("devices")):
            fresh.faster, fresh.always, fresh.kinds = dict(state["faster"]), dict(state["always"]), state["kinds"]
            fresh.carrier.on = state["carries"]
        self.__dict__.update(fresh.__dict__)


class _Replace(OwnMode):
    """Runs what was measured to be faster."""

    def __init__(self, state: GlueState, keeps: bool = False) -> None:
        super().__init__()
        self.state = state
        self.keeps = keeps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = originals.genuine(func), kwargs or {}
        if func in _FUNCTIONS:
            call = recognize(func, args, kwargs)
            call = None if call is None else call.inside(self.keeps)
            option = "" if call is None else self.state.faster.get(call.key)
            if call is not None and option:
                return call.run(option)
        return func(*args, **kwargs)


def _nearest_of_views(x: Tensor, factors: Sequence[int]) -> Tensor:
    """:func:`upsample_nearest` of a channels_last tensor, as views and one copy.

    A compiler has the join or the padding behind it read x itself; on its own the copy takes as long as kgopt's op.
    """
    count, *sizes, channels = x.movedim(1, -1).shape
    single = [n for size in sizes for n in (size, 1)]
    repeated = [n for pair in zip(sizes, factors, strict=True) for n in pair]
    whole = [size * factor for size, factor in zip(sizes, factors, strict=True)]
    y = x.movedim(1, -1).reshape(count, *single, channels).expand(count, *repeated, channels)
    return y.reshape(count, *whole, channels).movedim(-1, 1)


class _Upsample(OwnMode):
    """In compiled code: upsampling and joins whose results keep channels_last.

    The compiler's own give contiguous tensors of three spatial dims, which the next convolution has converted.
    """

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is INTERPOLATE or func in _CATS:
            call = recognize(func, args, kwargs)
            if call is not None and _is_channels_last(call.x):
                if call.kind == "linear" and "linear" in self.kinds:
                    return _OPS.upsample_linear(call.x)
                if call.kind == "nearest" and "nearest" in self.kinds:
                    return _nearest_of_views(call.x, call.argument)
                if call.kind == "cat" and call.x.dim() == 5 and "nearest" in self.kinds:
                    dim = (0, 4, 1, 2, 3)[call.argument[0]]  # of tensors whose innermost dim is their last
                    return torch.cat([t.movedim(1, -1) for t in (call.x, *call.more)], dim).movedim(-1, 1)
        return func(*args, **kwargs)


class _Find(OwnMode):
    """Measures the calls that can be replaced, and whose they are."""

    def __init__(self, modules: dict[int, nn.Module], always: bool) -> None:
        super().__init__()
        self.modules = modules
        self.always = always
        self.found: dict[int, dict[Any, str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = originals.genuine(func), kwargs or {}
        if func in _FUNCTIONS:
            call = recognize(func, args, kwargs)
            owner = None if call is None else innermost(self.modules)
            if call is not None and owner is not None:
                call = call.inside(formats.keeps(self.modules[owner]))
                found = self.found.setdefault(owner, {})
                if call.key not in found:
                    original = functools.partial(func, *args, **kwargs)
                    found[call.key] = call.options[0] if self.always else _verdict(call, original)
                if call.keeps and found[call.key]:  # what comes next will be given this format
                    return call.run(found[call.key])
        return func(*args, **kwargs)


def innermost(modules: dict[int, nn.Module]) -> int | None:
    """Whose code calls a torch function: the id of the innermost of the modules, asked by a mode."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = id(frame.f_locals.get("self"))
        if owner in modules:
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _verdict(call: Call, original: Callable[[], Tensor]) -> str:
    """:func:`_fastest`, or what it said of an equal call."""
    x = call.x
    more = [None if t is None else t.detach() for t in call.more]
    key = verdicts.key_of("glue", x.device, call.kind, call.argument, call.keeps, x.detach(), more, call.options)
    option: str = verdicts.store.settle(key, lambda: _fastest(call, original))[0]
    return option


def _fastest(call: Call, original: Callable[[], Tensor]) -> str:
    """The option that keeps the GPU busy for the shortest time; "": PyTorch's, or a result too small to matter."""
    best, least = "", float("inf")
    for option in call.options:
        try:
            expected, actual = original(), call.run(option)
            if expected.numel() * expected.element_size() < SMALL:
                continue
            if expected.stride() != actual.stride() and not call.keeps:
                continue
            if not _is_right(call, option, expected, actual, original):
                continue
            before, after = policy.busy_both(original, functools.partial(call.run, option), call.x.device)
        except (torch.OutOfMemoryError, RuntimeError):
            continue
        if after < min(before, least):
            best, least = option, after
    return best


def _is_right(call: Call, option: str, expected: Tensor, actual: Tensor, original: Callable[[], Tensor]) -> bool:
    """The same bits, or as accurate as PyTorch's."""
    if call.kind not in ("linear", "conv"):
        return torch.equal(expected, actual)
    if call.kind == "conv" and torch.equal(expected, actual):
        return True
    # A corner says what the errors are: convolutions in float64 are slow.
    part = corner(call.x, *((call.more[0].shape[2:], call.argument[4]) if call.kind == "conv" else ()))
    small = replace(call, x=part)
    if call.kind == "linear":
        mode = f"{['', 'bi', 'tri'][call.x.dim() - 3]}linear"

        def theirs(x: Tensor, *more: Any) -> Tensor:
            return F.interpolate(x, scale_factor=2, mode=mode)
    else:
        _, transposed, stride, padding, dilation, output_padding, groups = call.argument[:7]

        def theirs(x: Tensor, *more: Any) -> Tensor:
            return torch.convolution(x, more[0], more[1], stride, padding, dilation, transposed, output_padding, groups)

    double = [None if t is None else t.double() for t in call.more]
    yardstick = [theirs(part, *call.more)]
    with accuracy.no_autotuning():
        exact = theirs(part.double(), *double)
        if call.kind == "conv" and accuracy.may_take_tf32(part):
            rounded = accuracy.round_tf32(part).double(), accuracy.round_tf32(call.more[0]).double()
            yardstick.append(theirs(*rounded, double[1]))
    yardsticks = [accuracy.relative_error(y, exact) for y in yardstick]
    allowed = accuracy.allowed(part.dtype, *yardsticks)
    # The whole by the same yardstick: both results are that close to the exact one.
    is_close = accuracy.relative_error(actual, expected) <= 2 * allowed
    return is_close and accuracy.relative_error(small.run(option), exact) <= allowed


def corner(x: Tensor, kernel: Sequence[int] = (), dilation: Sequence[int] = ()) -> Tensor:
    """Of the first sample up to 24 positions of every dim, or as many as a kernel covers, in x's format."""
    covered = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)] or [0] * (x.dim() - 2)
    for dim, least in enumerate(covered, 2):
        x = x.narrow(dim, 0, min(max(24, least), x.shape[dim]))
    return x[:1].contiguous(memory_format=_FORMATS[x.dim()] if _is_channels_last(x) else torch.contiguous_format)


def wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with the replaced calls in it, where nothing needs a gradient and nothing is traced."""

    @functools.wraps(forward)
    def glue_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            state = self.__dict__.get("_kgopt_glue")
            if state is None or not (state.enabled and state.kinds) or torch.is_grad_enabled() or policy.wants_torch():
                return forward(self, *args, **kwargs)
            if originals.is_foreign_mode():
                return forward(self, *args, **kwargs)
            with _Upsample(state.kinds):
                return forward(self, *args, **kwargs)
        if torch.is_grad_enabled() or policy.is_watched():
            return forward(self, *args, **kwargs)
        state = self.__dict__.get("_kgopt_glue")
        if state is None or not state.enabled or not state.faster or originals.is_foreign_mode():
            return forward(self, *args, **kwargs)
        return policy.outside_own_modes(_replacing, state, forward, self, *args, **kwargs)

    return glue_forward


def _replacing(state: GlueState, forward: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    policy.own_modes.count += 1
    try:
        with _Replace(state, formats.keeps(module)):
            return forward(module, *args, **kwargs)
    finally:
        policy.own_modes.count -= 1


def find(root: nn.Module, call: Callable[[], Any], unwanted: Callable[[str], str], always: bool = False) -> int:
    """Runs the model, measures what its modules call, and gives those a new forward. How many calls are faster."""
    names = {id(m): name for name, m in root.named_modules()}
    modules = {id(m): m for m in root.modules()}
    with _Find(modules, always) as mode:
        call()
    count = 0
    for owner, found in mode.found.items():
        module = modules[owner]
        if not any(found.values()) or unwanted(names[owner]) or "forward" in module.__dict__:
            continue
        state = _wrapped.add(module, GlueState)
        state.faster.update(found)
        state.always = {}
        for (*_, contiguous), option in state.faster.items():
            state.always[contiguous] = option if state.always.get(contiguous, option) == option else ""
        state.kinds = _compiled_kinds(state.faster)
        state.plans.clear()
        count += sum(map(bool, found.values()))
    return count


def _compiled_kinds(faster: dict[Any, str]) -> tuple[str, ...]:
    """For GlueState.kinds: among the calls that _Upsample and sums replace, those of channels_last tensors.

    Nearest upsampling is the compiler's own in either case: what matters is that its result may be channels_last.
    """
    found: dict[str, bool] = {}
    for (kind, _, keeps, *_, contiguous), how in faster.items():
        if not contiguous and kind in ("linear", "nearest"):
            found[kind] = found.get(kind, True) and keeps and (kind == "nearest" or bool(how))
    return tuple(kind for kind, always in found.items() if always)


_wrapped: Wrapped[GlueState] = Wrapped("glue")
modules_of, state_of, forget, adopt = _wrapped.modules_of, _wrapped.state_of, _wrapped.forget, _wrapped.adopt
