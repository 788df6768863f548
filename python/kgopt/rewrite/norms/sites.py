"""What runs in place of a chain, and the checks before it, at every call.

A site's meaning is always that of the code it stands for. :meth:`Site.ready` says whether kgopt's ops may compute it
now: the modules are still the ones that were seen, nobody watches the values in between, and the input is a plain
tensor. Where it says no, the caller runs the original code.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kgopt import _scale_shift
from kgopt import ops as ops
from kgopt._layout import as_channels_last, is_channels_last, is_dense_channels_last
from kgopt.rewrite.chains.chain import BY_FORMULA, CONV_LSE, CONV_MEAN, CONV_RELU_NORM, PRELU, Chain
from kgopt.rewrite.chains.emit import (
    ConvArgs,
    NormArgs,
    as_torch,
    call_now,
    emit_kgopt,
    modulated_norm,
    modulated_sum,
    without_autocast,
)
from kgopt.rewrite.chains.meanings import activation_class, activation_of, is_identity, untouched
from kgopt.rewrite.chains.modules import guard_methods, has_own_methods, is_as_is, runs_as_is
from kgopt.rewrite.chains.roles import Number
from kgopt.rewrite.glue.kernels import lies_as
from kgopt.rewrite.gradients import recompute
from kgopt.rewrite.measure import policy
from kgopt.rewrite.norms import carry, channels, spared
from kgopt.rewrite.norms.arguments import channels_of, conv_args, fits, is_plain, keeps_format, norm_args, slope_of
from kgopt.rewrite.optimized.disguise import original_class
from kgopt.rewrite.optimized.known import Known
from kgopt.rewrite.pytorch import originals, watching
from kgopt.rewrite.pytorch.originals import CONV_MODULES
from kgopt.rewrite.pytorch.watching import any_global_hooks, is_hooked
from kgopt.rewrite.waiting import maps
from kgopt.torch_private import any_requires_grad, len_torch_function_stack

_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled


_Args = tuple[ConvArgs | None, NormArgs]
_Call = tuple[Any, _Args, torch.dtype | None]  # the norm, the arguments of the ops, and autocast's dtype


class _Handed(threading.local):
    """From :meth:`Site.ready` to :meth:`Site.run`, which comes next in the thread: a call at which nothing looks on."""

    call: _Call | None = None


_handed = _Handed()


LEAVES: dict[str, list[Any]] = {"group": [], "instance": []}  # filled by rewrite/norms/torch_norms.py


class Site:
    """One chain in a forward.

    ``roles`` says what the operands before x are: "conv", "norm", "same", an activation's name, a function itself, or
    the :class:`~kgopt.rewrite.chains.roles.Number` that a module holds; ``methods`` are those of tensors that the code
    calls.
    """

    inside: Any = None  # PyTorch's class, of the site in the forward of a norm

    def __init__(self, chain: Chain, roles: tuple[Any, ...], methods: tuple[str, ...] = (), inside: Any = None) -> None:
        if inside is not None:
            self.inside = inside
        elif LEAVES.get(chain.norm) == []:  # it would never take any norm, and say nothing
            raise RuntimeError("this site is made before the classes of norms that it takes: import torch_norms first")
        self.chain = chain
        self.roles = roles
        self.methods = methods
        self.key = repr(chain)  # a str hashes once
        self.norm_at = roles.index("norm")
        self.others = tuple((i, role) for i, role in enumerate(roles) if role != "norm")
        # The usual site, a norm and its activation, takes a short way: eager calls cost microseconds.
        self.is_channel = chain.norm in BY_FORMULA
        self.short = chain == Chain(norm=chain.norm, post=chain.post) and not (self.is_channel or chain.has_prelu)
        self.short_prelu = chain == Chain(norm=chain.norm, post=chain.post) and chain.has_prelu and not self.is_channel
        # PyTorch's instance norm has no rule under autocast: it gives what it is given. Softplus has: float32. So has
        # PReLU: half precision.
        self.keeps_dtype = chain.norm == "instance" and "softplus" not in chain.pre + chain.post and not chain.has_prelu
        self.prelu_at = roles.index(PRELU) if chain.has_prelu else -1
        # PyTorch's code keeps something else than x for the backward, however x lies. A convolution keeps its input.
        self.spares_x = self.is_channel or chain.pre.split("+")[0] in spared.RESULT_IS_KEPT
        # And the fused ops: one call, of arguments that are known already.
        self.fused = _DIRECT[getattr(torch.ops.kgopt, chain.fused_op).default] if chain.fused_op else None
        # By the class of the norm, whether all that the code looks up is PyTorch's own.
        self.untouched = [(leaf, originals.untouched(*self._places(leaf))) for leaf in LEAVES.get(chain.norm, ())]
        self.are_others_untouched = originals.untouched(*self._places_beside())
        self.leaf: Any
        self.leaf, self.is_untouched = self.untouched[0] if self.untouched else (None, self._without_leaf())
        # Functions of the user's that were read.
        functions = [(i, role) for i, role in self.others if not isinstance(role, (str, Number))]
        self.read = {i: untouched(f) for i, f in functions if not originals.of_function(f)}
        # Operands before this one may be activations that write into the input of the chain.
        self.in_front = 0 if chain.conv else self.norm_at

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.chain.label})"

    def __reduce__(self) -> Any:
        return type(self), (self.chain, self.roles, self.methods)

    def _places(self, leaf: Any) -> Iterator[originals.Place]:
        yield from originals.called(leaf._kgopt_original, leaf)
        yield leaf, "forward"
        yield from self._places_beside()

    def _without_leaf(self) -> Callable[[], bool]:
        """Of a norm over channels, whose class may be any."""
        return originals.untouched(*originals.called(nn.Identity), *self._places_beside())

    def _places_beside(self) -> Iterator[originals.Place]:
        for _, role in self.others:
            if not isinstance(role, str):
                yield from originals.of_function(role)  # of a Number nothing
            elif (cls := activation_class(role)) is not None:
                yield from originals.called(cls)
        yield from originals.methods(self.methods)

    def ready(self, *operands: Any) -> bool:
        """May kgopt compute it now? ``operands``: the objects that the code calls, in order, and the input."""
        if any_global_hooks() or (len_torch_function_stack() and watching.is_foreign_mode()):
            return False
        norm, x = operands[self.norm_at], operands[-1]
        return self._hand_over(operands, norm, x, self.holds(operands, norm, x))

    def ready_in_quiet(self, operands: Any, x: Any, cast: torch.dtype | None) -> bool:
        """:meth:`ready`, where nothing looks on but autocast to ``cast``. ``operands``: without x."""
        norm = operands[self.norm_at]
        args = None
        if self.holds(operands, norm, x) and is_plain(x):
            args = self._chosen((*operands, x), norm, x, cast)
        _handed.call = None if args is None else (norm, args, cast)
        return args is not None

    def holds(self, operands: Any, norm: Any, x: Any) -> bool:
        """Whether the modules and functions are still what was seen, without hooks.

        ``norm``: None of one that is called as a function; then it is about what is called beside it.
        """
        leaf = type(norm)
        if norm is None:
            if not self.are_others_untouched():
                return False
        elif self.is_channel:
            if not self.is_untouched() or not channels.is_called_plainly(norm, self.chain.norm):
                return False
        elif not (self.is_untouched() if leaf is self.leaf else self._is_other_untouched(norm, x)):
            return False
        if norm is not None and is_hooked(norm):
            return False
        for i, role in self.others:
            operand = operands[i]
            if not isinstance(role, str):
                if isinstance(role, Number):
                    is_still = role.is_still(operand)
                else:
                    is_still = operand is role and (i not in self.read or self.read[i]())
                if not is_still:
                    return False
            elif role == "conv":
                original = original_class(operand)
                made = type(operand)
                if CONV_MODULES.get(original or made) != self.chain.conv or not runs_as_is(operand, made, original):
                    return False
            elif role == "same":
                if not is_identity(operand) or not is_as_is(operand):
                    return False
            elif (
                not isinstance(operand, nn.Module)
                or activation_of(operand) != role
                or is_hooked(operand)
                or (i < self.in_front and getattr(operand, "inplace", False))
            ):
                return False
        return self.chain.norm != "instance" or norm is None or not has_own_methods(norm, leaf._kgopt_original)

    def begin(self, norm: Any, x: Any) -> NormArgs | bool:
        """:meth:`ready` of a norm alone whose value may wait for a sum: its arguments, in code that compiles True.

        False also where something else looks on.
        """
        if not self.ready(norm, x):
            return False
        if _is_compiling():
            return True
        call = self._handed(norm)
        return call is not None and call[1][1]

    def _is_other_untouched(self, norm: Any, x: Any) -> bool:
        leaf: Any = type(norm)
        for other, is_untouched in self.untouched[1:]:
            if other is leaf:
                return is_untouched()
        # Of a subclass of the user's: what that class looks up, and what the rest of the chain does.
        derived = getattr(leaf, "_kgopt_derived", None)
        if derived is None or leaf._kgopt_made is not leaf or derived.kind != self.chain.norm:
            return False
        holds = derived.holds if derived.site is self else derived.holds_alone
        if not self.are_others_untouched() or not holds(norm, x):
            return False
        # Under autocast the other ops have a rule of their own.
        is_autocast = not self.short and isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type)
        return not (is_autocast and derived.is_narrowed(norm, x))

    def ready_inside(self, norm: Any, x: Any) -> bool:
        """:meth:`ready` for a chain of the norm alone, asked by its own forward: hooks run around that."""
        if len_torch_function_stack() and watching.is_foreign_mode():
            return False
        original = self.inside
        holds = self.is_channel or (originals.AS_INSIDE[original]() and not has_own_methods(norm, original))
        return self._hand_over(None, norm, x, holds)

    def _hand_over(self, operands: Any, norm: Any, x: Any, holds: bool) -> bool:
        """Whether ours runs; where nothing looks on, :meth:`run` is left what was found out. ``operands``: or None."""
        if not holds or not is_plain(x):
            return False
        watched = watching.is_watched()
        if watched and watching.wants_torch():
            return False
        if watched and _is_compiling():
            return self._chosen(operands, norm, x, None) is not None
        cast = watching.autocast_of(x)
        args = self._chosen(operands, norm, x, cast)
        _handed.call = None if watched or args is None else (norm, args, cast)
        return args is not None

    def _chosen(self, operands: Any, norm: Any, x: Tensor, cast: torch.dtype | None) -> _Args | None:
        """The arguments of the ops, where they take x and the verdict says so; else None."""
        known: Known | None = norm.__dict__.get("_kgopt")
        state = None if known is None else known.site
        if known is None or state is None or not state.enabled:
            return None
        conv = operands[0] if self.chain.conv else None
        args = self._args(x, conv, norm, operands)
        if args is None:
            return None
        # What a call costs beside the ops, for the measurement.
        checks = (self.ready_inside, (norm, x)) if operands is None else (self.ready, operands)
        ours = policy.choose(state, self.key, known.keeps, self.chain, x, *args, cast, checks, _call_directly)
        return args if ours else None

    def run(self, *operands: Any, half: bool = False) -> Tensor:
        """The chain's value. Only after :meth:`ready` with the same operands.

        ``half``: under autocast, the norm keeps the dtype of what it is given; so does one that computes in float32.
        """
        x, norm = operands[-1], operands[self.norm_at]
        call = None if _is_compiling() else self._handed(norm)
        is_narrowed = hasattr(type(norm), "_kgopt_derived") and _is_narrowed(norm, x)
        if call is not None:
            (_, n), cast = call[1], call[2]
            half = half or is_narrowed
            if _is_grad_enabled() and not self.chain.conv and (half or self.spares_x or not x.is_contiguous()):
                x = self.kept(norm, n, x)
            if self.short:
                return self.run_now(x, norm, n, cast, half)
            if self.short_prelu:
                op = _direct_group_norm_prelu if half else _prelu_op(x, cast)
                y = op(x, n.slope, n.num_groups, n.weight, n.bias, n.eps)
                return y if y.is_contiguous() or keeps_format(norm) else as_torch(self.chain, x, y)
            if self.fused is not None and cast is None:
                y = emit_kgopt(self.chain, self._call_fused, x, 0, *call[1])
                return y if keeps_format(norm) else as_torch(self.chain, x, y)
        half = half or ((self.keeps_dtype or is_narrowed) and torch.is_autocast_enabled(x.device.type))
        if torch.compiler.is_compiling():
            for operand in operands[:-1]:
                guard_methods(operand)
        if torch.compiler.is_compiling() and keeps_format(norm):
            # A decomposition may have made it contiguous (Inductor's upsampling does). The compiler writes it as the
            # convolutions want it in the kernel that computes it; otherwise one of them would convert it.
            x = as_channels_last(x)
        if self.short:
            parameters = norm._parameters
            groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else norm.num_features
            return self.run_watched(x, norm, NormArgs(groups, parameters["weight"], parameters["bias"], norm.eps), half)
        watched = call is None
        both = self._args(x, operands[0] if self.chain.conv else None, norm, operands) if call is None else call[1]
        assert both is not None
        fold = half or not torch.is_autocast_enabled(x.device.type)
        run = call_now if watched else _call_directly
        run_norm = run if not half else without_autocast if watched else _call_norm_without_autocast
        y = emit_kgopt(self.chain, run, x, x.dim(), *both, fold, run_norm)
        if self.is_channel:
            self._offer_channel_norm(x, both[1], y)
        return y if keeps_format(norm) else as_torch(self.chain, x, y)

    def _offer_channel_norm(self, x: Tensor, n: NormArgs, y: Tensor) -> None:
        """The backward may have it computed again."""
        forward = None if _is_compiling() else recompute.now()
        if forward is None or y.dtype is not x.dtype:
            return

        def again(x: Tensor, weight: Any, bias: Any) -> Tensor:
            args = replace(n, weight=weight, bias=bias)
            # The backward may run under autocast, which would give another dtype.
            return emit_kgopt(self.chain, call_now, x, x.dim(), None, args, call_norm=without_autocast)  # type: ignore[no-any-return]

        forward.offer(y, y, again, (forward.found(x) or x, n.weight, n.bias))

    def _call_fused(self, _: Any, *args: Any) -> Tensor:
        return self.fused(*args)  # type: ignore[misc,no-any-return]

    def _handed(self, norm: Any) -> _Call | None:
        """What :meth:`ready` left for this call; it is taken away."""
        call = _handed.call
        if call is None:
            return None
        _handed.call = None
        return call if call[0] is norm else None

    def kept(self, norm: Any, n: NormArgs, x: Tensor, what: str = "x") -> Tensor:
        """What an op is given for x that PyTorch's code would not keep: a copy, where the model may write to x."""
        known: Known = norm._kgopt
        written = (known.site or known.calls).written
        kind = what, self.key, norm.training, x.shape, x.is_contiguous()
        if written.get(kind) is False or not any_requires_grad(x, n.weight, n.bias):
            return x
        return spared.copied(written, kind, x)

    def run_now(self, x: Tensor, norm: Any, n: NormArgs, cast: torch.dtype | None, half: bool = False) -> Tensor:
        """A norm and its activation, where nothing looks on: eager calls come here for every site.

        ``norm``: the module, or the one whose code calls the norm as a function.
        """
        groups, weight, bias, eps, act = n.num_groups, n.weight, n.bias, n.eps, self.chain.post
        if cast is not None and not (half or self.keeps_dtype):  # an instance norm's kernels know nothing of autocast
            op = _group_norm_from_python
        elif cast is None and not carry.is_empty() and (moments := carry.take(x)) is not None:
            op = functools.partial(_with_moments, moments)
        elif _is_grad_enabled() and any_requires_grad(x, weight, bias):
            op = _recorded_group_norm
        else:
            op = _group_norm_without_grad
        args = x, groups, weight, bias, eps, act
        forward = recompute.now()
        if forward is None:
            y = op(*args)
            return y if y.is_contiguous() or keeps_format(norm) else as_torch(self.chain, x, y)
        of_x = forward.found(x)
        # The node keeps five tensors, and each call of a hook costs microseconds.
        y = recompute.without_hooks(op, *args) if of_x is None else op(*args)
        z = y if y.is_contiguous() or keeps_format(norm) else as_torch(self.chain, x, y)
        if y.dtype is x.dtype:  # autocast would make y of a float32 copy of x
            forward.offer(z, y, _norm_again(groups, eps, act), (of_x or x, weight, bias))
        return z

    def run_watched(self, x: Tensor, norm: Any, n: NormArgs, half: bool) -> Tensor:
        """:meth:`run_now` where something looks on."""
        rest = (n.num_groups, n.weight, n.bias, n.eps, self.chain.post)
        if half:
            y = without_autocast(_group_norm, x, *rest)
        elif (moments := self.carried(x)) is not None:
            y = _group_norm_moments(x, moments, *rest)
        else:
            y = _group_norm(x, *rest)
        return y if keeps_format(norm) else as_torch(self.chain, x, y)

    def run_added(
        self, norm: Any, x: Tensor, other: Any, act: str, prelu: Any = None, begun: NormArgs | bool = True
    ) -> Tensor | None:
        """``act(norm(x) + other)`` in one op, of a site of the norm alone that is :meth:`ready`.

        ``prelu``: the nn.PReLU that act is. ``begun``: by :meth:`begin`. None where PyTorch's rules of sizes, dtypes
        and layouts have something to do.
        """
        if not is_plain(other) or other.shape != x.shape or other.device != x.device or not lies_as(other, x):
            return None
        if not (x.is_contiguous() or keeps_format(norm)):
            return None  # PyTorch's norm gives a contiguous tensor, and what the sum is depends on both
        autocast = torch.is_autocast_enabled(x.device.type) and x.is_cuda
        is_narrowed = hasattr(type(norm), "_kgopt_derived") and _is_narrowed(norm, x)
        if autocast and is_narrowed and prelu is not None:
            return None
        half = autocast and (self.keeps_dtype or is_narrowed) and prelu is None
        if other.dtype is not x.dtype and (half or not autocast or torch.float64 in (x.dtype, other.dtype)):
            return None
        if half and "softplus" in act:
            return None
        n = begun if isinstance(begun, NormArgs) else norm_args(norm, x)
        if n is None:
            return None
        watched = watching.is_watched()
        compiling = watched and _is_compiling()
        forward = None if compiling or prelu is not None else recompute.now()
        if not watched and _is_grad_enabled():
            if half or is_narrowed or self.spares_x or not x.is_contiguous():
                x = self.kept(norm, n, x)
            # These gradients need the sum, which PyTorch keeps. What is computed again is not to be kept at all.
            if act not in ("none", "relu") and forward is None:
                other = self.kept(norm, n, other, "other")
        args: tuple[Any, ...] = (x, other, n.num_groups, n.weight, n.bias, n.eps, act)
        if compiling:
            guard_methods(norm)
            guard_methods(prelu)
        if prelu is not None:
            slope = slope_of(prelu, x, x.shape[1])
            if slope is None:
                return None
            args = (x, slope, *args[2:6], other)
            op = _group_norm_prelu if watched else _prelu_op(x, watching.autocast_of(x), other)
            return op(*args)  # type: ignore[no-any-return]
        op = _group_norm_add_without_grad
        if watched:
            op = functools.partial(without_autocast, _group_norm_add) if half else _group_norm_add
        elif autocast and not half:
            op = _group_norm_add_from_python
        elif _is_grad_enabled() and any_requires_grad(x, other, n.weight, n.bias):
            op = _recorded_group_norm_add
        if forward is None:
            return op(*args)  # type: ignore[no-any-return]
        of_x, of_other = forward.found(x), forward.found(other)
        y = recompute.without_hooks(op, *args) if of_x is of_other is None else op(*args)
        # ReLU's sum is kept by its own gradient; that of a sum alone keeps no operand.
        if act != "relu" and y.dtype is x.dtype:
            operands = of_x or x, n.weight, n.bias, of_other or other
            forward.offer(y, y, _sum_again(n.num_groups, n.eps, act), operands, alone=act == "none")
        return y

    def may_modulate(self, norm: Any, x: Tensor, operand: Any) -> bool:
        """Whether the norm's result times ``operand``, or plus it, can be one op; of a site that is :meth:`ready`.

        It has one value a sample and channel, or a channel, and leaves the result's size, dtype and format as they are.
        """
        if not is_plain(operand) or operand.device != x.device or not _scale_shift.fits(operand, x):
            return False
        # Samples' channels are seen as channels of one, and in channels_last a CUDA kernel takes parameters by sample.
        # Inductor, which runs convolutions on a GPU and what is between them in channels_last, has its own code.
        if operand.shape[0] != 1:
            if x.is_cuda and x.dim() > 3 and _is_compiling():
                return False
            if not x.is_contiguous() and not (x.is_cuda and is_dense_channels_last(x)):
                return False
        autocast = torch.is_autocast_enabled(x.device.type) and x.is_cuda
        if autocast and x.dtype is torch.float64:
            return False
        dtype = self.dtype_of(norm, x)
        return operand.dtype is dtype or torch.promote_types(dtype, operand.dtype) is dtype

    def dtype_of(self, norm: Any, x: Tensor) -> torch.dtype:
        """Of the norm's value."""
        keeps = self.keeps_dtype or _is_narrowed(norm, x) or x.dtype is torch.float64
        return x.dtype if keeps or not (x.is_cuda and torch.is_autocast_enabled("cuda")) else torch.float32

    def run_modulated(
        self,
        norm: Any,
        x: Tensor,
        factor: Any,
        shift: Any,
        act: str = "none",
        prelu: Any = None,
        begun: NormArgs | bool = True,
    ) -> Tensor | None:
        """``act(norm(x) * factor + shift)`` in one op. ``prelu``, ``begun``: as in :meth:`run_added`.

        Each of the two is None, or :meth:`may_modulate` said yes. None where act runs by rules of its own.
        """
        autocast = torch.is_autocast_enabled(x.device.type)
        is_narrowed = hasattr(type(norm), "_kgopt_derived") and _is_narrowed(norm, x)
        half = autocast and x.is_cuda and (self.keeps_dtype or is_narrowed)
        if autocast and (prelu is not None or (half and "softplus" in act)):
            return None
        n = begun if isinstance(begun, NormArgs) else norm_args(norm, x)
        if n is None:
            return None
        slope = None
        if prelu is not None and (slope := slope_of(prelu, x, x.shape[1])) is None:
            return None
        if _is_compiling():
            guard_methods(norm)
            guard_methods(prelu)
        is_kept = half or is_narrowed or self.spares_x or not x.is_contiguous()
        if _is_grad_enabled() and is_kept and not watching.is_watched():
            x = self.kept(norm, n, x)
        args: tuple[Any, ...] = (x, n.num_groups, n.weight, n.bias, n.eps, act, slope, factor, shift)
        if half:
            y = without_autocast(modulated_norm, *args)
        elif autocast or watching.is_watched():
            y = modulated_norm(*args)
        else:
            y = _direct_modulated_norm(*args)
        return y if keeps_format(norm) else as_torch(self.chain, x, y)

    def run_scaled_sum(
        self,
        norm: Any,
        x: Tensor,
        other: Any,
        factor: Any,
        shift: Any,
        act: str = "none",
        begun: NormArgs | bool = True,
    ) -> Tensor | None:
        """``act(norm(x) * factor + shift + other)`` in one op, where :meth:`may_modulate` said yes of factor and shift.

        ``begun``, and where it is None: as of :meth:`run_added`.
        """
        count = _scale_shift.rows(factor, shift)
        if torch.is_autocast_enabled(x.device.type) or not _scale_shift.is_number(count):
            return None
        if (
            not is_plain(other)
            or not lies_as(other, x)
            or not (x.is_contiguous() or (keeps_format(norm) and count == 1))
        ):
            return None
        n = begun if isinstance(begun, NormArgs) else norm_args(norm, x)
        if n is None:
            return None
        watched = watching.is_watched()
        if _is_compiling():
            guard_methods(norm)
        if not watched and _is_grad_enabled():
            is_narrowed = hasattr(type(norm), "_kgopt_derived") and _is_narrowed(norm, x)
            if is_narrowed or self.spares_x or not x.is_contiguous():
                x = self.kept(norm, n, x)
            if act not in ("none", "relu"):  # as in run_added
                other = self.kept(norm, n, other, "other")
        args = x, other, n.num_groups, n.weight, n.bias, n.eps, act, factor, shift
        return modulated_sum(*args) if watched else modulated_sum(*args, group_norm_add=_direct_group_norm_add)

    def may_map(self, norm: Any, x: Tensor, operand: Any) -> bool:
        """Whether ``norm(x) * operand``, plus another such one, can be one op; of a site that is :meth:`ready`.

        In eager inference, of a tensor of x's size, or a map that is enlarged to it.
        """
        if x.dim() not in (4, 5) or not maps.may_wait() or torch.is_autocast_enabled(x.device.type):
            return False
        t = operand.small if type(operand) is maps.Map else operand
        sizes = operand.sizes if type(operand) is maps.Map else t.shape[2:] if is_plain(t) else None
        if t is operand and sizes is not None and not lies_as(t, x):
            return False
        if t is not operand and x.is_contiguous() and is_channels_last(t):
            return False  # enlarged it is channels_last, too, and so may be what PyTorch makes of both
        if sizes is None or t.shape[:2] != x.shape[:2] or list(sizes) != list(x.shape[2:]):
            return False
        if not (x.is_contiguous() or keeps_format(norm)):
            return False  # PyTorch's norm gives a contiguous tensor, and what the product is depends on both
        return t.dtype is x.dtype and t.device == x.device

    def run_maps(
        self, norm: Any, x: Tensor, factor: Any, shift: Any, act: str = "none", begun: NormArgs | bool = True
    ) -> Tensor | None:
        """``act(norm(x) * factor + shift)`` in one op, where :meth:`may_map` said yes of both.

        None where PyTorch's norm must see x.
        """
        n = begun if isinstance(begun, NormArgs) else norm_args(norm, x)
        if n is None:
            return None
        if type(factor) is maps.Map and type(shift) is maps.Map and factor.small.shape == shift.small.shape:
            factor, shift = factor.small, shift.small
        operands = (maps.now(factor), maps.now(shift), n.num_groups, n.weight, n.bias, n.eps, act)
        y = _group_norm_maps(x, self.carried(x), *operands)
        return y if keeps_format(norm) else as_torch(self.chain, x, y)

    def carried(self, x: Tensor) -> Tensor | None:
        """The moments of x, where the convolution that made it kept them."""
        if torch.compiler.is_compiling() or carry.is_empty() or torch.is_autocast_enabled(x.device.type):
            return None
        return carry.take(x)

    def _args(self, x: Tensor, conv: Any, norm: Any, operands: Any) -> tuple[ConvArgs | None, NormArgs] | None:
        args: tuple[ConvArgs | None, NormArgs] | None
        if conv is not None:
            args = self._args_of_both(x, conv, norm)
        else:
            if self.chain.norm == "instance" and x.dim() != (5 if isinstance(norm, nn.InstanceNorm3d) else 4):
                return None
            of_norm = norm_args(norm, x)
            if of_norm is None or (self.is_channel and not (fits(of_norm.weight, x) and fits(of_norm.bias, x))):
                return None
            args = None, of_norm
        if args is None or self.prelu_at < 0:
            return args
        args[1].slope = slope_of(operands[self.prelu_at], x, channels_of(norm))
        return None if args[1].slope is None else args

    def _args_of_both(self, x: Tensor, conv: Any, norm: Any) -> tuple[ConvArgs | None, NormArgs] | None:
        of_conv, of_norm = conv_args(conv, x), norm_args(norm, None)
        if of_conv is None or of_norm is None:
            return None
        if conv.out_channels != (norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features):
            return None
        if not fits(of_norm.weight, x) or not fits(of_norm.bias, x):
            return None
        return of_conv, of_norm


def _is_narrowed(norm: Any, x: Tensor) -> bool:
    """Whether a norm of a user's class computes x in float32 and gives x's half precision back, under autocast, too.

    Eager calls ask first whether it is one: a call of a function takes time.
    """
    derived = getattr(type(norm), "_kgopt_derived", None)
    return derived is not None and derived.is_narrowed(norm, x)


def _prelu_op(x: Tensor, cast: torch.dtype | None, other: Any = None) -> Any:
    """Where nothing looks on but autocast to ``cast``, which casts no parameter that fits an x of its dtype."""
    if cast is None:
        return _direct_group_norm_prelu
    is_cast = x.dtype is cast and (other is None or other.dtype is x.dtype)
    return _direct_group_norm_prelu if is_cast else _group_norm_prelu_from_python


_group_norm = torch.ops.kgopt.group_norm.default
_group_norm_from_python = ops.from_python("group_norm")
_group_norm_add = torch.ops.kgopt.group_norm_add.default
_group_norm_add_without_grad = ops.without_grad("group_norm_add")
_direct_group_norm_add = ops.direct("group_norm_add")
_recorded_group_norm_add = ops.recorded("group_norm_add")
_group_norm_prelu = torch.ops.kgopt.group_norm_prelu.default
_direct_group_norm_prelu = ops.direct("group_norm_prelu")
_group_norm_prelu_from_python = ops.from_python("group_norm_prelu")
_group_norm_add_from_python = ops.from_python("group_norm_add")
_direct_modulated_norm = functools.partial(
    modulated_norm,
    group_norm=ops.direct("group_norm"),
    group_norm_prelu=_direct_group_norm_prelu,
    group_norm_by_sample=ops.direct("group_norm_by_sample"),
)
_group_norm_maps = ops.without_grad("group_norm_maps")
_group_norm_moments = torch.ops.kgopt.group_norm_moments.default


def _with_moments(moments: Tensor, x: Tensor, *norm: Any) -> Tensor:
    return _group_norm_moments(x, moments, *norm)  # type: ignore[no-any-return]


_group_norm_without_grad = ops.without_grad("group_norm")
_recorded_group_norm = ops.recorded("group_norm")
_DIRECT = {
    getattr(torch.ops.kgopt, name).default: ops.direct(name)
    for name in (
        *("group_norm", "group_norm_fwd", "group_norm_prelu", "channel_norm"),
        *(CONV_LSE, CONV_MEAN, CONV_RELU_NORM),
    )
}
_DIRECT_CONVS = {getattr(torch.ops.kgopt, name).default: ops.direct(name) for name in CONV_MODULES.values()}
_DIRECT |= _DIRECT_CONVS


def _norm_again(groups: int, eps: float, act: str) -> Callable[..., Tensor]:
    return lambda x, weight, bias: _group_norm_without_grad(x, groups, weight, bias, eps, act)  # type: ignore[no-any-return]


def _sum_again(groups: int, eps: float, act: str) -> Callable[..., Tensor]:
    return lambda x, weight, bias, other: _group_norm_add_without_grad(x, other, groups, weight, bias, eps, act)  # type: ignore[no-any-return]


def _call_directly(function: Any, x: Any, *args: Any) -> Any:
    """A ``call`` that spares ops of plain tensors the dispatcher's way through Python."""
    direct = _DIRECT.get(function)
    if direct is None:  # operator.getitem, for what an op gave, and small ops
        return function(x, *args)
    cast = watching.autocast_of(x)
    if cast is None:
        return direct(x, *args)
    conv = _DIRECT_CONVS.get(function)
    if conv is None:
        return function(x, *args)
    weight, bias, *rest = args
    return conv(*ops.autocast_convolution(cast, x, weight, bias), *rest)


def _call_norm_without_autocast(function: Any, *args: Any) -> Any:
    return without_autocast(_DIRECT.get(function, function), *args)
