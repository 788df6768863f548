"""What convolution modules do in inference: by kind of input, the way that was measured to be the fastest.

A module's forward looks its plan up; :mod:`~kgopt.rewrite.waiting.sums`, sites and paddings ask for one that takes more
along.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kgopt import ops as ops
from kgopt._layout import as_channels_last, format_of, is_dense_channels_last
from kgopt.rewrite.chains.chain import PRELU
from kgopt.rewrite.chains.emit import TORCH_CONVS, padding_in_numbers
from kgopt.rewrite.chains.meanings import activation_of, conv_of
from kgopt.rewrite.chains.modules import guard_methods, hides_parameters, is_as_is, is_own_conv, is_upsampler
from kgopt.rewrite.glue import kernels
from kgopt.rewrite.glue.calls import LARGEST_FACTOR, PAD, padding_of, recognize, upsampled_by
from kgopt.rewrite.glue.later import Upsampled, finding, postponed
from kgopt.rewrite.measure import verdicts
from kgopt.rewrite.norms import carry
from kgopt.rewrite.optimized import known
from kgopt.rewrite.pytorch import originals, watching
from kgopt.rewrite.pytorch.watching import any_global_hooks
from kgopt.rewrite.waiting.base import Unmade, Written
from kgopt.rewrite.waiting.formats import keeps
from kgopt.torch_private import below_autograd, border_of, len_torch_function_stack

_OPS = torch.ops.kgopt
_pads_as_is = originals.untouched(*originals.functional("pad"))
_is_grad_enabled = torch.is_grad_enabled


class Border(NamedTuple):
    """What a convolution module puts around its input by ``F.pad``: its ``padding_mode`` is not "zeros"."""

    sizes: tuple[int, ...]  # as F.pad has them
    mode: str
    ours: bool  # in kgopt's way

    def around(self, x: Tensor) -> Tensor:
        """x with it."""
        if not self.ours:
            return PAD(x, self.sizes, self.mode)  # type: ignore[no-any-return]
        return _OWN_PADS[self.mode](x, self.sizes)  # type: ignore[no-any-return]


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
    upsampled: tuple[Any, ...] = ()  # of x that is still to be upsampled: factors, padding, groups
    cast: torch.dtype | None = None  # autocast's: x and the parameters are cast first
    border: Border | None = None  # is put around x first
    blocks: int = 1  # of a weight that is made dense first: the convolution's groups

    def takes(self, act: str) -> bool:
        """Whether an activation behind it may be part of its op. Under autocast PyTorch's softplus gives float32."""
        return self.adds and (self.cast is None or "softplus" not in act)


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
    folds: dict[bool, str] = field(default_factory=dict)  # as `always`, of an upsampling and the convolution
    carrier: carry.Carrier = field(default_factory=carry.Carrier)

    @property
    def ways(self) -> set[str]:
        """What is replaced, by what: convolutions by several ops, the rest by one for each kind of call."""
        return {_way_of(key, option) for key, option in self.faster.items() if option}

    def only(self, ways: Set[str]) -> GlueState:
        """The same without all other ways."""
        faster = {key: option if _way_of(key, option) in ways else "" for key, option in self.faster.items()}
        made = replace(self, enabled=any(faster.values()), faster=faster, plans={})
        made.settle()
        return made

    def settle(self) -> None:
        """Says for compiled code what was measured."""
        self.always, self.folds = {}, {}
        for (kind, _, _, cast, *_, contiguous), option in self.faster.items():
            if cast is not None:
                continue  # in compiled code autocast is the compiler's
            how = self.folds if kind == "upsampled" else self.always
            how[contiguous] = option if how.get(contiguous, option) == option else ""
        self.kinds = _compiled_kinds(self.faster)
        self.plans.clear()

    def __getstate__(self) -> dict[str, Any]:
        # Plans are made anew; another machine is another measurement.
        devices = verdicts.environments(device for *_, device, _ in self.faster)
        kept = {
            "faster": self.faster,
            "always": self.always,
            "kinds": self.kinds,
            "folds": self.folds,
            "carries": self.carrier.on,
        }
        return {"enabled": self.enabled, "devices": devices, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh = GlueState(state["enabled"])
        if verdicts.are_here(state.get("devices")):
            fresh.faster, fresh.always, fresh.kinds = dict(state["faster"]), dict(state["always"]), state["kinds"]
            fresh.folds = dict(state.get("folds", {}))
            fresh.carrier.on = state["carries"]
        self.__dict__.update(fresh.__dict__)


def _way_of(key: Any, option: str) -> str:
    return f"conv {option}" if key[0] == "conv" else str(key[0])


def _compiled_kinds(faster: dict[Any, str]) -> tuple[str, ...]:
    """For GlueState.kinds: among the calls that _Upsample and sums replace, those of channels_last tensors.

    Nearest upsampling is the compiler's own in either case: what matters is that its result may be channels_last.
    """
    found: dict[str, bool] = {}
    for (kind, _, kept, cast, *_, contiguous), how in faster.items():
        if cast is None and not contiguous and kind in ("linear", "nearest"):
            found[kind] = found.get(kind, True) and kept and (kind == "nearest" or bool(how))
    return tuple(kind for kind, always in found.items() if always)


def has_room(module: nn.Module) -> bool:
    """Whether a module is a convolution whose op may take what stands behind it."""
    state: GlueState | None = known.get(module, "glue")
    if state is None or conv_of(module) is None:
        return False
    convs = (option for key, option in state.faster.items() if key[0] in ("conv", "upsampled"))
    return any(option and option not in kernels.ALONE for option in convs)


HEADS = ("pointwise", "few", "scaled")  # options whose op takes the norm in front of the convolution, too
PLANS = 64  # of a module, after which new kinds of inputs are PyTorch's


def plan_of(conv: Any, x: Any) -> ConvPlan | None:
    """The plan for this call; None where PyTorch's code must run. Only with gradients off and nobody looking on.

    x may be :class:`~kgopt.rewrite.glue.later.Upsampled`, :class:`Repeated` or :class:`Normalized`: is there one op for
    both?
    """
    if not is_own_conv(conv):
        return None
    factors: tuple[int, ...] = ()
    pad: tuple[int, ...] = ()
    if type(x) is Repeated:
        if x.made is not None or torch.compiler.is_compiling():
            return None
        x, pad = x.x, x.pad
    if type(x) is Upsampled:
        if x.made is not None or torch.compiler.is_compiling():
            return None
        x, factors = x.x, x.factors
    is_normalized = type(x) is Normalized
    if is_normalized:
        x = x.operands[-1]
    if torch.compiler.is_compiling():
        return _compiled_plan(conv, x)
    knows = conv.__dict__.get("_kgopt")
    state: GlueState | None = None if knows is None else knows.glue
    if state is None or not state.enabled or type(x) is not Tensor:
        return None
    cast = watching.autocast_of(x)
    if cast is not None and (factors or pad or is_normalized or conv.padding_mode != "zeros"):
        return None
    parameters = conv._parameters
    if "weight" not in parameters or "bias" not in parameters or hides_parameters(conv):  # pruned, parametrized
        return None
    weight, bias = parameters["weight"], parameters["bias"]
    if type(weight) is not nn.Parameter or (weight.dtype is not x.dtype and cast is None):
        return None
    if bias is not None and (type(bias) is not nn.Parameter or (bias.dtype is not x.dtype and cast is None)):
        return None
    key = (x.shape, x.stride(), x.dtype, x.device, weight.dtype, weight.stride(), factors, pad, cast)
    plan: ConvPlan | None = state.plans.get(key)
    mode = conv.padding_mode
    module: tuple[Any, ...] = (conv.stride, conv.padding, conv.dilation, conv.output_padding, conv.groups, mode)
    if mode != "zeros":
        border = border_of(conv)
        if border is None or pad or factors or is_normalized or not _pads_as_is():
            return None
        module = (*module, border)
    if plan is None or plan.module != module:
        if len(state.plans) >= PLANS:
            return None
        if factors:
            plan = _make_upsampled_plan(conv, x, module, state, factors)
        elif mode != "zeros":
            plan = _make_bordered_plan(conv, x, module, state)
        else:
            plan = _make_plan(conv, _padded_in_name(x, pad) if pad else x, module, state)
        state.plans[key] = plan
    return plan if plan.option else None


def _padded_in_name(x: Tensor, pad: tuple[int, ...]) -> Tensor:
    """A tensor of the padded sizes, without values."""
    sizes = [*x.shape[:2], *(s + sum(pad[2 * i : 2 * i + 2]) for i, s in enumerate(reversed(x.shape[2:])))]
    sizes[2:] = reversed(sizes[2:])
    return torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=format_of(x))


def _make_plan(conv: Any, x: Tensor, module: tuple[Any, ...], state: GlueState) -> ConvPlan:
    kind = conv_of(conv)
    stride, padding, dilation, output_padding, groups, mode = module
    tail = (output_padding, groups, dilation) if conv.transposed else (dilation, groups)
    call = None
    if kind is not None and mode == "zeros":
        call = recognize(TORCH_CONVS[kind], (x, conv.weight, conv.bias, stride, padding, *tail), {})
    if kind is None or call is None:
        return ConvPlan("", module, (), [], None)
    option = state.faster.get(call.key, "")
    # conv_add chooses its convolution itself; the same one, where that is kgopt's.
    carrier = None
    if option == "own" and call.cast is None and carry.is_worth(math.prod(call.sizes) * x.element_size()):
        carrier = state.carrier
    own = ops.without_grad(kind), call.own[1]
    adds = option in ("own", "bias", "scaled", "dense")
    rest, blocks = call.rest, 1
    if option == "dense":
        *windows, blocks, transposed = rest
        rest = *windows, 1, transposed
    return ConvPlan(option, module, rest, call.sizes, own, adds, carrier, cast=call.cast, blocks=blocks)


def _make_bordered_plan(conv: Any, x: Tensor, module: tuple[Any, ...], state: GlueState) -> ConvPlan:
    """Padding of its mode, and the convolution of that without padding, each in its faster way."""
    stride, _, *rest, mode, sizes = module
    border = None
    if any(sizes):  # else F.pad only copies
        call = recognize(PAD, (x, sizes, mode), {})
        border = Border(sizes, mode, call is not None and bool(state.faster.get(call.inside(keeps(conv)).key)))
        x = border.around(x)
    plan = _make_plan(conv, x, (stride, (0,) * (x.dim() - 2), *rest, "zeros"), state)
    kind = conv_of(conv)
    if not plan.option and (border is None or border.ours) and kind is not None:
        dilation, _, groups = rest
        own = TORCH_CONVS[kind], (stride, 0, dilation, groups)
        plan = ConvPlan("torch", module, (), [], own)
    return replace(plan, module=module, border=border)


def _make_upsampled_plan(
    conv: Any, x: Tensor, module: tuple[Any, ...], state: GlueState, factors: tuple[int, ...]
) -> ConvPlan:
    call = upsampled_by(x, factors, conv)
    option = "" if call is None else state.faster.get(call.inside(keeps(conv)).key, "")
    if call is None or not option:
        return ConvPlan("", module, (), [], None)
    _, padding, groups = call.argument[:3]
    return ConvPlan(option, module, (), call.sizes, None, option != "commuted", upsampled=(factors, padding, groups))


def _compiled_plan(conv: Any, x: Any) -> ConvPlan | None:
    """The plan in compiled inference: the way that was fastest whenever it was measured, for code serves many sizes.

    Where that is PyTorch's convolution with a bias of ours, all is the compiler's: it adds biases, and what follows,
    in one kernel.
    """
    state = known.get(conv, "glue")
    if state is None or not state.enabled or torch.is_grad_enabled() or not isinstance(x, Tensor):
        return None
    if watching.wants_torch():
        return None
    option = state.always.get(x.is_contiguous(), "")
    if option not in ("own", "dense", *HEADS):
        return None
    if torch.is_autocast_enabled(x.device.type) or x.dtype is not conv.weight.dtype:
        return None
    kind, transposed = conv_of(conv), conv.transposed
    own_padding = padding_in_numbers(conv.padding, conv.kernel_size, conv.dilation)
    if kind is None or conv.padding_mode != "zeros" or own_padding is None or x.dim() != len(conv.kernel_size) + 2:
        return None
    stride, padding, dilation = list(conv.stride), list(own_padding), list(conv.dilation)
    output_padding, groups = list(conv.output_padding), conv.groups
    rest = (stride, padding, dilation, output_padding, groups, transposed)
    sizes = ops.conv_sizes(x.shape, conv.weight.shape, *rest)
    of_one = 1 if option == "dense" else groups
    tail = (output_padding, of_one, dilation) if transposed else (dilation, of_one)
    if option == "dense":  # PyTorch's: the compiler adds the bias, and what follows
        return ConvPlan(option, (), rest, sizes, (TORCH_CONVS[kind], (stride, padding, *tail)), blocks=groups)
    own = getattr(_OPS, kind).default, (stride, padding, *tail)
    carrier = None if option == "scaled" else state.carrier
    return ConvPlan(option, (), rest, sizes, own, option in ("own", "scaled"), carrier)


def as_seen(x: Tensor) -> Tensor:
    """In compiled code: x in the format that it is seen in. Decompositions give others: see :meth:`Site.run`."""
    return as_channels_last(x) if is_dense_channels_last(x) else x


def _emit_plan(conv: Any, x: Tensor, plan: ConvPlan, residual: Tensor | None, divisor: float, act: str) -> Tensor:
    """:func:`run_plan` where a compiler looks on; :mod:`~kgopt.rewrite.inductor.moments` gives a norm the moments."""
    guard_methods(conv)
    weight, bias = conv.weight, conv.bias
    x, residual = as_seen(x), None if residual is None else as_seen(residual)
    tail = (*plan.rest, divisor, act)
    if plan.option == "dense":
        assert plan.own is not None
        op, rest = plan.own
        return op(x, kernels.dense_weight_for(x, weight, plan.blocks), bias, *rest)  # type: ignore[no-any-return]
    if plan.option == "scaled":
        return kernels.scaled(x, weight, bias, residual, *tail)
    if plan.option in kernels.ALONE:
        return kernels.ALONE[plan.option](x, weight, bias, plan.rest)
    if plan.carrier is not None and plan.carrier.on:
        return _OPS.conv_add_moments(x, weight, bias, residual, *tail, backend="kgopt")[0]  # type: ignore[no-any-return]
    if residual is not None or act != "none":
        return _OPS.conv_add(x, weight, bias, residual, *tail, backend="kgopt")  # type: ignore[no-any-return]
    assert plan.own is not None
    op, rest = plan.own
    return op(x, weight, bias, *rest, backend="kgopt")  # type: ignore[no-any-return]


def run_plan(
    conv: Any, x: Any, plan: ConvPlan, residual: Tensor | None = None, divisor: float = 1.0, act: str = "none"
) -> Tensor:
    """The convolution, with its bias and what else is given, by one of kgopt's ops."""
    if type(x) is Normalized:
        return x.site.run_with_head(x.norm, x.operands[-1], conv, plan.option, plan.rest, residual, divisor, act)  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        return _emit_plan(conv, x, plan, residual, divisor, act)
    if type(x) is Repeated:
        if x.joins(plan):
            return _run_repeated(conv, x, plan, residual, divisor, act)
        x = x.value()
    parameters = conv._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    if plan.cast is not None:
        x, weight, bias = (None if t is None else t.to(plan.cast) for t in (x, weight, bias))
    if plan.border is not None:
        x = plan.border.around(x)
    if plan.blocks > 1:
        with below_autograd():  # at each call: the weight may have changed
            weight = kernels.dense_weight_for(x, weight, plan.blocks)
    if plan.upsampled:
        x = x.x if type(x) is Upsampled else x
        factors, padding, groups = plan.upsampled
        how = residual, divisor, act
        return kernels.upsampled_conv(plan.option, x, weight, bias, factors, padding, groups, *how)
    carrier, moments = plan.carrier, None
    backend = "kgopt" if plan.option == "own" else "auto"
    if carrier is not None and carrier.on:
        y, moments = _conv_add_moments(x, weight, bias, residual, *plan.rest, divisor, act, backend=backend)
    elif plan.option in kernels.ALONE:
        with below_autograd():  # gradients are off; the ops' Python kernels for them take time
            y = kernels.ALONE[plan.option](x, weight, bias, plan.rest)
    elif plan.option == "scaled":
        with below_autograd():
            y = kernels.scaled(x, weight, bias, residual, *plan.rest, divisor, act)
    elif plan.option in ("bias", "dense") or residual is not None or act != "none":
        y = _conv_add(x, weight, bias, residual, *plan.rest, divisor, act, backend=backend)
    else:
        assert plan.own is not None
        op, rest = plan.own
        y = op(x, weight, bias, *rest) if plan.option == "torch" else op(x, weight, bias, *rest, backend="kgopt")
    if carrier is not None:
        carry.leave(y, carrier, moments)
    return y  # type: ignore[no-any-return]


def _run_repeated(conv: Any, x: Repeated, plan: ConvPlan, residual: Tensor | None, divisor: float, act: str) -> Tensor:
    """Padding and convolution, and a norm in front, as one op."""
    if type(x.x) is not Normalized:
        parameters, tail = conv._parameters, (*plan.rest, divisor, act)
        with below_autograd():
            return kernels.scaled(x.x, parameters["weight"], parameters["bias"], residual, *tail, replicate=x.pad)
    carrier = plan.carrier
    carries = carrier is not None and carrier.on
    how = residual, divisor, act, x.pad, carries
    y = x.x.site.run_with_head(x.x.norm, x.x.operands[-1], conv, plan.option, plan.rest, *how)
    y, moments = y if carries else (y, None)
    if carrier is not None:
        carry.leave(y, carrier, moments)
    return y  # type: ignore[no-any-return]


_conv_add, _conv_add_moments = map(ops.without_grad, ("conv_add", "conv_add_moments"))
_OWN_PADS = {"replicate": ops.without_grad("pad_replicate"), "reflect": kernels.pad_reflect}


def may_plan() -> bool:
    """Gradients are off, and no mode but ours, such as _Find, is to see the functions themselves; compilers see ops."""
    if _is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        return not watching.is_foreign_mode()
    return not watching.is_watched() and len_torch_function_stack() <= watching.own_modes.count


def head_plan(conv: Any, x: Tensor) -> ConvPlan | None:
    """Its plan, if ``conv`` reads what a norm makes of x, and one op may do both."""
    if not may_plan() or known.get(conv, "glue") is None:
        return None
    plan = plan_of(conv, x)
    return plan if plan is not None and plan.option in HEADS and plan.border is None else None


def through(conv: Any, value: Any) -> Any:
    """``conv(value)``, where value may be one that waits: then as one op, if that is the faster way."""
    if type(value) is Repeated:
        plan = plan_of(conv, value) if may_plan() and _may_read(conv) else None
        if plan is None or not value.joins(plan):
            return conv(value.value())
        return watching.outside_own_modes(run_plan, conv, value, plan)
    if type(value) is not Upsampled:
        return conv(value)
    if torch.compiler.is_compiling():
        y = _emit_upsampled(conv, value)
        return conv(value.value()) if y is None else y
    if value.made is None and _may_read(conv):
        if finding.pair is not None:
            return finding.pair(value, conv)
        plan = plan_of(conv, value)
        if plan is not None:
            return watching.outside_own_modes(run_plan, conv, value, plan)
    return conv(value.value())


class Wait(Written):
    """What the upsamplings of a method do until a convolution reads them, or something else."""

    waits = Upsampled

    def begin(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """``function(...)``, an upsampling, or its value for later."""
        return postponed(function, *args, **kwargs)

    def through(self, conv: Any, value: Any) -> Any:
        """``conv(value)``."""
        return through(conv, value)


def _emit_upsampled(conv: Any, value: Upsampled) -> Tensor | None:
    """:func:`through` where a compiler looks on, which adds the bias, and what follows, in a kernel of its own."""
    x, factors = value.x, value.factors
    state = known.get(conv, "glue") if isinstance(conv, nn.Module) else None
    if value.made is not None or state is None or not state.enabled or any_global_hooks() or not is_as_is(conv):
        return None
    if (
        not state.folds.get(x.is_contiguous(), "").startswith("folded")
        or x.dtype is not conv.weight.dtype
        or max(factors) > LARGEST_FACTOR
    ):
        return None
    padding = padding_of(conv, len(factors))
    if padding is None:
        return None
    guard_methods(conv)
    ones, zeros = [1] * len(factors), [0] * len(factors)
    summed = _OPS.upsample_conv_weight(conv.weight, list(factors), conv.groups, is_dense_channels_last(x))
    rest = [k - 1 - p for k, p in zip(conv.kernel_size, padding, strict=True)]
    return torch.convolution(as_seen(x), summed, conv.bias, list(factors), rest, ones, True, zeros, conv.groups)


def before(module: Any, following: Any, x: Any) -> Any:
    """``module(x)``, which goes to ``following`` alone: for later, if they are an upsampling and a convolution."""
    if not is_upsampler(module) or conv_of(following) is None:
        return module(x)
    if known.get(following, "glue") is None and finding.pair is None:
        return module(x)
    return postponed(module, x)


def _may_read(conv: Any) -> bool:
    if not isinstance(conv, nn.Module) or conv_of(conv) is None or not is_as_is(conv) or any_global_hooks():
        return False
    return not (_is_grad_enabled() or watching.is_watched() or watching.is_foreign_mode())


class Normalized:
    """What a norm and its activation make of x, for later: the forward of a convolution alone reads it.

    ``plan``: of that convolution, where it is known.
    """

    __slots__ = ("norm", "operands", "plan", "site")

    def __init__(self, site: Any, norm: Any, operands: tuple[Any, ...], plan: ConvPlan | None) -> None:
        self.site = site
        self.norm = norm
        self.operands = operands
        self.plan = plan

    def through(self, forward: Callable[..., Any], conv: Any) -> Any:
        """``conv`` of it, as one op if nothing has changed since."""
        x = self.operands[-1]
        plan = head_plan(conv, x)
        if plan is not None and (self.plan is None or plan.option == self.plan.option):
            return run_plan(conv, self, plan)
        return forward(conv, self.value())

    def value(self) -> Tensor:
        """The tensor."""
        return self.site.run(*self.operands)  # type: ignore[no-any-return]


class Repeated(Unmade):
    """x, a tensor or :class:`Normalized`, with its outermost positions repeated around it, for later: a convolution
    alone reads it.
    """

    __slots__ = ("pad", "x")

    def __init__(self, x: Any, pad: tuple[int, ...], compute: Callable[[], Tensor]) -> None:
        super().__init__(compute)
        self.x = x
        self.pad = pad

    def joins(self, plan: ConvPlan) -> bool:
        """Whether one op pads, and normalizes, for a convolution."""
        is_norm = type(self.x) is Normalized
        x = self.x.operands[-1] if is_norm else self.x
        fits = plan.option == "scaled" or (is_norm and plan.option in ("own", "bias"))
        return fits and is_dense_channels_last(x)


def with_activation(conv: Any, act: Any, x: Any) -> Tensor | None:
    """``act(conv(x))`` as one op, where conv_add is the way to compute the convolution; None elsewhere."""
    if not isinstance(conv, nn.Module) or known.get(conv, "glue") is None or not may_plan():
        return None
    name = activation_of(act)
    if name is None or not is_as_is(act):
        return None
    if torch.compiler.is_compiling():
        guard_methods(act)
    return with_named(conv, name, x)


def with_named(conv: Any, act: str, x: Any) -> Tensor | None:
    """:func:`with_activation`, by the activation's name."""
    if act == PRELU or conv_of(conv) is None or not is_as_is(conv) or any_global_hooks() or not may_plan():
        return None
    plan = plan_of(conv, x)
    return None if plan is None or not plan.takes(act) else run_plan(conv, x, plan, act=act)


def conv_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a convolution module, by the faster op where nothing needs a gradient and nothing is traced."""

    @functools.wraps(forward)
    def planned_forward(self: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        if type(input) is Normalized:
            return watching.outside_own_modes(input.through, forward, self)
        if torch.compiler.is_compiling():
            plan = None if args or kwargs or not may_plan() else plan_of(self, input)
            return forward(self, input, *args, **kwargs) if plan is None else run_plan(self, input, plan)
        if args or kwargs or not may_plan():
            return forward(self, input, *args, **kwargs)
        if not watching.own_modes.count:
            return _planned(forward, self, input)
        return watching.outside_own_modes(_planned, forward, self, input)

    return planned_forward


def _planned(forward: Callable[..., Any], conv: Any, x: Any) -> Any:
    plan = plan_of(conv, x)
    return forward(conv, x) if plan is None else run_plan(conv, x, plan)
