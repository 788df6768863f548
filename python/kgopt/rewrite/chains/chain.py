"""The structure of a site: what one op, or a few, compute in place of a model's code.

convolution → pointwise chain → norm → pointwise chain → nothing, residual add, mean or logsumexp
norm → sum with another tensor → pointwise chain
norm → product with, sum with, one value a sample and channel → pointwise chain
norm → product with, sum with, one value each position → pointwise chain
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kgopt import _acts

CHANNELS = ("rms", "l2", "layer")  # norms over channels, by the kind of the op
WRITTEN = "written"  # a norm in groups that a module's own code computes
BY_FORMULA = (*CHANNELS, WRITTEN)  # norms of modules that are known by what they compute, whatever their class

PRELU = "prelu"  # the activation whose slopes are a parameter: alone behind a norm or its sum, by an op of its own

CONV_MEAN = "conv3d_group_norm_mean"
CONV_RELU_NORM = "conv_transpose3d_relu_group_norm"
CONV_LSE = "conv2d_group_norm_tanh_hardswish_residual_logsumexp"


@dataclass(frozen=True)
class Chain:
    """The structure of a site, with no tensor in it: hashable, picklable, the key of what was measured."""

    norm: str = "group"  # or "instance": as many groups as channels; or one of BY_FORMULA
    conv: str = ""  # "conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d"; "": the chain starts at the norm
    pre: str = "none"  # activations between convolution and norm
    added: bool = False  # another tensor is added to what the norm gives, ahead of the activations
    scaled: bool = False  # it is multiplied with one value a sample and channel, ahead of them
    shifted: bool = False  # one value a sample and channel is added, behind the product
    maps: bool = False  # both have one value each position instead
    post: str = "none"  # activations after the norm
    residual: bool = False  # the convolution's output is added to the activations' result
    reduce: str = ""  # "mean" or "logsumexp"
    dims: tuple[int, ...] | None = None  # of the reduction; None: every dim but the batch
    keepdim: bool = False
    # The one op that computes all of it, where there is one (and where the input has the usual rank).
    fused_op: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "fused_op", self._find_fused_op())  # once: eager calls ask for it

    def _find_fused_op(self) -> str:
        if self.norm != "group":
            return ""
        if self.added or self.is_modulated:
            return ""
        plain = not self.residual and self.post == "none"
        if self.conv == "conv3d" and self.pre == "none" and plain and self.reduces_all(5) and not self.keepdim:
            return CONV_MEAN
        if self.conv == "conv_transpose3d" and self.pre == "relu" and plain and not self.reduce:
            return CONV_RELU_NORM
        if self.conv == "conv2d" and self.pre == "none" and self.post == "tanh+hardswish" and self.residual:
            return CONV_LSE if self.reduce == "logsumexp" and self.keepdim and self._channels_only(4) else ""
        return ""

    def reduces_all(self, rank: int) -> bool:
        """Whether it ends in a mean over every dim but the batch."""
        if self.reduce != "mean":
            return False
        if self.dims is None:
            return True
        if not all(-rank <= d < rank for d in self.dims):
            return False
        # Not sorted: Dynamo may trace them.
        return len(self.dims) == rank - 1 and {d % rank for d in self.dims} == set(range(1, rank))

    def _channels_only(self, rank: int) -> bool:
        return self.dims in ((1,), (1 - rank,))

    @property
    def is_modulated(self) -> bool:
        """Whether a scale or a shift by sample follows the norm."""
        return self.scaled or self.shifted

    @property
    def has_prelu(self) -> bool:
        """Whether a PReLU follows the norm, or its sum."""
        return self.post == PRELU

    @property
    def label(self) -> str:
        """For people: ``Conv3d → GroupNorm → mean``."""
        names = {"conv2d": "Conv2d", "conv3d": "Conv3d"}
        names |= {"conv_transpose2d": "ConvTranspose2d", "conv_transpose3d": "ConvTranspose3d"}
        parts = [names[self.conv]] if self.conv else []
        parts += [] if self.pre == "none" else _acts.split(self.pre)
        norms = {"group": "GroupNorm", "instance": "InstanceNorm", "layer": "LayerNorm", WRITTEN: "GroupNorm"}
        parts.append(norms.get(self.norm, "RMSNorm"))
        parts += self._behind_norm
        parts += ["sum"] if self.added else []
        parts += [] if self.post == "none" else _acts.split(self.post)
        parts += ["residual"] if self.residual else []
        parts += [self.reduce] if self.reduce else []
        return " → ".join(parts)

    @property
    def _behind_norm(self) -> list[str]:
        return [word for word, is_there in (("scale", self.scaled), ("shift", self.shifted)) if is_there]

    @property
    def becomes(self) -> str:
        """The op or ops that run instead, for the report."""
        if self.fused_op:
            return self.fused_op
        ops = [self.conv] if self.conv else []
        if (
            not (self.added or self.is_modulated)
            and self.post == "none"
            and not self.keepdim
            and any(self.reduces_all(rank) for rank in (3, 4, 5))
        ):
            ops += [] if self.pre == "none" else [f"activation({self.pre})"]
            return " + ".join([*ops, "group_norm_mean"])
        if self.has_prelu:
            pre = [] if self.pre == "none" else [f"activation({self.pre})"]
            more = [*self._behind_norm, *(["sum"] if self.added else [])]
            op = f"group_norm_prelu({', '.join(more)})".removesuffix("()")
            return " + ".join([*ops, *pre, op, *([self.reduce] if self.reduce else [])])
        acts = [] if self.maps else self._behind_norm
        acts += [f"{key}={value}" for key, value in (("pre_act", self.pre), ("act", self.post)) if value != "none"]
        name = "channel_norm" if self.norm in CHANNELS else "group_norm_add" if self.added else "group_norm"
        name = "group_norm_maps" if self.maps else name
        ops.append(f"{name}({', '.join(acts)})" if acts else name)
        ops += [self.reduce] if self.reduce else []
        return " + ".join(ops)


def takes_another(acts: Sequence[str], one: str) -> bool:
    """Whether an op behind whose norm these activations stand has room for another one behind them."""
    if PRELU in (one, *acts):
        return not acts
    return _acts.fits([act for text in (*acts, one) for act in _acts.parse(text)])
