"""A chain and the convolution behind it: one op for both where its output channels are few or where fp16 computes it,
and half precision between them under autocast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kgopt import ops as ops
from kgopt._layout import as_channels_last
from kgopt.rewrite.chains.meanings import conv_of
from kgopt.rewrite.chains.modules import does_nothing, first_is_conv, guard_methods, is_as_is, takes_later
from kgopt.rewrite.glue.plans import Normalized, as_seen, head_plan, may_plan
from kgopt.rewrite.norms.arguments import keeps_format, norm_args
from kgopt.rewrite.norms.sites import Site
from kgopt.rewrite.optimized import known
from kgopt.rewrite.pytorch import watching
from kgopt.rewrite.waiting.base import Written

_group_norm_conv = torch.ops.kgopt.group_norm_conv.default
_group_norm_conv_moments = torch.ops.kgopt.group_norm_conv_moments.default
_group_norm_conv1x1 = torch.ops.kgopt.group_norm_conv1x1.default


class FollowedSite(Site):
    """A site in code that shows what becomes of its value."""

    def run_before(self, follower: Any, *operands: Any) -> Tensor:
        """:meth:`run`, where the value goes to ``follower`` alone.

        Under autocast a convolution rounds what it is given to half precision, which a norm's kernel, whose sums are
        fp32 whatever it reads and writes, does as well: the same values, without copies of x and of the result.
        """
        # Every call of a site comes here: one function less than self._later.
        if self.short and keeps_format(operands[self.norm_at]):
            later = self._defer(follower, *operands)
            if later is not None:
                return later  # type: ignore[return-value]
        keeps_dtype = self.short and self.keeps_dtype  # whatever follows
        return self.run(*operands, half=not keeps_dtype and self._is_halved_by(follower, operands[-1]))

    def run_later(self, follower: Any, alone: bool, between: tuple[Any, ...], *operands: Any) -> Tensor:
        """:meth:`run_before`, where modules ``between`` are given the value first.

        ``alone``: nobody else may read it.
        """
        if all(map(does_nothing, between)):
            if alone:
                return self.run_before(follower, *operands)
            if (later := self._later(follower, *operands)) is not None:
                return later  # type: ignore[return-value]
        return self.run(*operands)

    def _later(self, follower: Any, *operands: Any) -> Normalized | None:
        is_norm = self.short and keeps_format(operands[self.norm_at])
        return self._defer(follower, *operands) if is_norm else None

    def _defer(self, follower: Any, *operands: Any) -> Normalized | None:
        """The value for later, where ``follower`` is a convolution that computes both."""
        x, norm = operands[-1], operands[self.norm_at]
        if type(x) is not Tensor:
            return None
        if not isinstance(follower, nn.Module):
            return None
        if conv_of(follower) is None:
            may_wait = takes_later(follower) and may_plan() and not watching.is_autocast(x)
            return Normalized(self, norm, operands, None) if may_wait else None
        if known.get(follower, "glue") is None or not is_as_is(follower):
            return None
        plan = head_plan(follower, x)
        return None if plan is None else Normalized(self, norm, operands, plan)

    def _is_halved_by(self, follower: Any, x: Tensor) -> bool:
        if not x.is_cuda or not torch.is_autocast_enabled("cuda") or x.dtype is torch.float64:
            return False
        chain = self.chain
        if chain.fused_op or chain.reduce or chain.residual or "softplus" in chain.pre:
            return False
        # A convolution before the norm gives half precision whatever it is given.
        return bool(chain.conv or x.dtype is torch.get_autocast_dtype("cuda")) and first_is_conv(follower)

    def run_with_head(
        self,
        norm: Any,
        x: Tensor,
        conv: Any,
        option: str,
        rest: Sequence[Any],
        residual: Tensor | None = None,
        divisor: float = 1.0,
        act: str = "none",
        replicate: Sequence[int] = (),
        carries: bool = False,
    ) -> Any:
        """The chain, a norm and activations, and a convolution of what it gives, as one op.

        ``option``: the convolution's, one of :data:`~kgopt.rewrite.glue.plans.HEADS`, of which "scaled" alone may have
        something behind it; any one that adds, where the outermost positions are repeated in between (``replicate``).
        ``rest``: the convolution's arguments after its tensors. ``carries``: with moments of the result.
        """
        args = norm_args(norm, None)
        assert args is not None
        if torch.compiler.is_compiling():
            guard_methods(norm)
            guard_methods(conv)
            x = as_channels_last(x)  # as in run
            residual = None if residual is None else as_seen(residual)
        moments = self.carried(x)
        both = (args.num_groups, args.weight, args.bias, args.eps, self.chain.post, conv.weight, conv.bias)
        if option == "pointwise":
            return _group_norm_conv1x1(x, moments, *both)
        backend = {"scaled": ops.SCALED_HALF, "own": "kgopt"}.get(option, "auto")
        op = _group_norm_conv_moments if carries else _group_norm_conv
        more = {"replicate": list(replicate)} if replicate else {}
        return op(x, moments, *both, residual, *rest, divisor, act, **more, backend=backend)


class Normalizations(Written):
    """What becomes of the values in a method that :meth:`FollowedSite.run_later` gave."""

    waits = Normalized
