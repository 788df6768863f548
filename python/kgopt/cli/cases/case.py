"""What each bench suite measures: shapes, models, work for the floor, and how the float64 reference is cut up.

Shapes are those of real networks: MONAI SegResNet, UNet3D, nnU-Net, the autoencoders of diffusers.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kgopt.cli.floor import Work
from kgopt.cli.measure import kink_error
from kgopt.cli.models import PIPELINES, Pipeline, randomize

__all__ = [
    "SUITES",
    "Case",
    "PlainChannelNorm",
    "PlainGroupNorm",
    "Slice",
    "group_norm_work",
    "group_slices",
    "position_slices",
    "suite_cases",
]

SUITES = ("pipelines", "groupnorm", "channelnorm", "conv", "ops", "scaling")

Index = tuple[Any, ...]

# Elements of x in one float64 piece of the reference: 256 MB, and a few times that with intermediates.
_PIECE = 2**25


@dataclasses.dataclass(frozen=True)
class Slice:
    """A piece of the float64 reference: module(x[x_index]) is y[y_index]."""

    x_index: Index
    y_index: Index
    module: nn.Module  # float64, on x's device
    params: dict[str, tuple[str, Index]] | None = None  # the whole model's parameter -> the piece's name, its place


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a suite: a plain PyTorch model and the kgopt one, for x of one shape."""

    suite: str
    name: str
    shape: tuple[int, ...]
    plain: Callable[[], nn.Module]  # fp32, on the CPU, seeded
    kgopt: Callable[[nn.Module], nn.Module]  # the same model in kgopt, device and dtype as the plain one
    work: Callable[[tuple[int, ...], int, str], Work]  # shape, bytes an element, direction
    slices: Callable[[nn.Module, torch.Tensor], Iterator[Slice]]
    backward: str = "backward"  # what --backward adds: "backward" alone, a "training" step, or "" for nothing
    layouts: bool = True  # also in channels_last
    compile: bool = True
    max_autotune: bool = False
    own_kernel: Callable[[nn.Module], nn.Module] | None = None  # kgopt, forced to its own kernel
    title: str = ""
    axis: str = ""  # what grows from case to case: "batch" or "edge"
    gpu_clock: bool = False  # timed by the GPU alone, launches hidden; a call's time beside it
    graph: bool = False  # also kgopt's launches replayed as a CUDA graph
    optimize: bool = False  # also kgopt.optimize(plain model, x), which should be no slower than the kgopt one
    kink: float = 0.0  # error of a gradient that no implementation can avoid (measure.kink_error)

    @property
    def axis_value(self) -> int:
        """The batch size or the last edge, whichever `axis` names."""
        return self.shape[0] if self.axis == "batch" else self.shape[-1]

    def scaled(self, divisor: int) -> Case:
        """The same case with its batch, or else its first spatial size, cut to about 1 / divisor."""
        shape = list(self.shape)
        cut = min(divisor, shape[0])
        shape[0] = max(1, shape[0] // divisor)
        for dim in range(2, len(shape)):
            left = divisor // cut
            if left <= 1:
                break
            small = max(min(8, shape[dim]), shape[dim] // left)
            cut *= max(1, shape[dim] // small)
            shape[dim] = small
        return dataclasses.replace(self, shape=tuple(shape))


class Chain(nn.Module):
    """A function without parameters as a module."""

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """fn(x)."""
        return self.fn(x)


def double(model: nn.Module) -> nn.Module:
    """A float64 copy."""
    return copy.deepcopy(model).double()


def whole(model: nn.Module, x: torch.Tensor, module: nn.Module, index: Index = ()) -> Slice:
    names = {name: (name, (...,)) for name, _ in model.named_parameters()}
    return Slice((*index, ...), (*index, ...), module, names)


def batch_slices(model: nn.Module, x: torch.Tensor) -> Iterator[Slice]:
    """Pieces of whole samples, for a model that treats samples one by one."""
    module = double(model)
    step = max(1, _PIECE // max(1, 8 * x[:1].numel()))
    for n in range(0, x.shape[0], step):
        yield whole(model, x, module, (slice(n, n + step),))


# ----------------------------------------------------------------------------------------------------- pipelines


def _pipeline_case(pipeline: Pipeline) -> Case:
    return Case(
        "pipelines",
        pipeline.name,
        pipeline.headline,
        plain=pipeline.plain_model,
        kgopt=pipeline.kgopt_model,
        work=lambda shape, itemsize, direction: pipeline.work(shape, itemsize, direction == "training"),
        slices=batch_slices,
        backward="training",
        max_autotune=True,
        title=pipeline.title,
        optimize=True,
    )


def _scaling_cases() -> list[Case]:
    """Cost against work: the pipelines whose convolution is never stored, at growing batches and at growing images."""
    cases = []
    for pipeline in PIPELINES:
        if pipeline.transposed:
            continue
        batch, channels, *spatial = pipeline.headline
        shapes = [("batch", (n, channels, *spatial)) for n in (1, 4, 16, 64, 256, 1024)]
        # 128 cubed needs no batch of 128 to fill a GPU.
        many = batch if len(spatial) == 2 else 16
        shapes += [("edge", (many, channels, *[edge] * len(spatial))) for edge in (8, 16, 32, 64, 128)]
        for axis, shape in shapes:
            case = dataclasses.replace(
                _pipeline_case(pipeline),
                suite="scaling",
                shape=shape,
                axis=axis,
                graph=True,
                layouts=False,
                compile=False,
                backward="",
            )
            cases.append(dataclasses.replace(case, name=f"{pipeline.name} {axis} {case.axis_value}"))
    return cases


# ----------------------------------------------------------------------------------------------------- GroupNorm

_ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "mish": F.mish,
    "tanh+hardswish": lambda x: F.hardswish(torch.tanh(x)),
}


class PlainGroupNorm(nn.GroupNorm):
    """GroupNorm and an activation as plain PyTorch."""

    def __init__(self, num_groups: int, num_channels: int, act: str = "none") -> None:
        super().__init__(num_groups, num_channels)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """act(group_norm(x))."""
        return _ACTS[self.act](super().forward(x))


def group_slices(model: nn.Module, x: torch.Tensor) -> Iterator[Slice]:
    """Whole samples where they are small, else one group of one sample at a time."""
    assert isinstance(model, PlainGroupNorm)
    if x[:1].numel() * 8 <= _PIECE:
        yield from batch_slices(model, x)
        return
    width = model.num_channels // model.num_groups
    modules = []
    for group in range(model.num_groups):
        module = PlainGroupNorm(1, width, model.act).to(x.device, torch.float64)
        module.eps = model.eps
        channels = slice(group * width, (group + 1) * width)
        with torch.no_grad():
            module.weight.copy_(model.weight[channels])
            module.bias.copy_(model.bias[channels])
        modules.append(module)
    for n in range(x.shape[0]):
        for group, module in enumerate(modules):
            channels = slice(group * width, (group + 1) * width)
            index = (slice(n, n + 1), channels)
            params = {name: (name, (channels,)) for name in ("weight", "bias")}
            yield Slice(index, index, module, params)


def group_norm_work(shape: tuple[int, ...], itemsize: int, direction: str) -> Work:
    """Bytes that a GroupNorm of `shape` cannot do without."""
    # Forward: read x, write y. Backward: read x and dy, write dx.
    return Work((3 if direction == "backward" else 2) * math.prod(shape) * itemsize)


def _group_norm_case(shape: tuple[int, ...], groups: int, act: str) -> Case:
    def plain() -> nn.Module:
        return randomize(PlainGroupNorm(groups, shape[1], act))

    def fused(model: nn.Module) -> nn.Module:
        import kgopt.nn

        like = next(model.parameters())
        out = kgopt.nn.GroupNorm(groups, shape[1], act=act, device=like.device, dtype=like.dtype)
        out.load_state_dict(model.state_dict(), strict=True)
        return out

    sizes = "x".join(map(str, shape))
    name, kink = f"{sizes} g{groups} {act}", kink_error(act, shape)
    return Case("groupnorm", name, shape, plain, fused, group_norm_work, group_slices, gpu_clock=True, kink=kink)


_GROUP_NORM = (
    ((1, 32, 128, 128, 128), 8, "relu"),
    ((1, 128, 32, 32, 32), 8, "relu"),
    ((1, 64, 80, 170, 170), 8, "none"),
    ((1, 128, 17, 256, 256), 32, "silu"),
    ((1, 128, 20, 256, 256), 32, "silu"),
    ((1, 512, 5, 32, 32), 32, "silu"),
    ((1, 128, 512, 512), 32, "silu"),
    ((8, 320, 64, 64), 32, "silu"),
    ((2, 32, 96, 96, 96), 8, "relu"),
    ((16, 128, 34, 34, 34), 8, "none"),
    ((128, 24, 22, 30, 30), 8, "none"),
    ((128, 64, 126, 126), 16, "none"),
)

# --------------------------------------------------------------------------------------------- norms over channels


class PlainChannelNorm(nn.Module):
    """A norm over channels and an activation as libraries write them in plain PyTorch.

    ``l2`` as the autoencoders of Wan and Qwen-Image, ``rms`` as that of LTX-Video, ``layer`` as timm's LayerNorm2d.
    """

    def __init__(self, kind: str, num_channels: int, act: str = "none") -> None:
        super().__init__()
        self.kind, self.act = kind, act
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """act(norm(x) * weight + bias)."""
        channels = x.shape[1]
        if self.kind == "layer":
            y = F.layer_norm(x.movedim(1, -1), (channels,), self.weight, self.bias, 1e-6).movedim(-1, 1)
            return _ACTS[self.act](y)
        weight, bias = (p.view(-1, *[1] * (x.dim() - 2)) for p in (self.weight, self.bias))
        if self.kind == "l2":
            y = F.normalize(x, dim=1) * channels**0.5
        else:
            y = x * torch.rsqrt(x.square().mean(1, True) + 1e-6)
        return _ACTS[self.act](y * weight + bias)


def position_slices(model: nn.Module, x: torch.Tensor) -> Iterator[Slice]:
    """Some rows of one sample at a time: each position has its own norm."""
    module = double(model)
    rows = x.shape[-2]
    step = max(1, min(rows, _PIECE // max(1, 8 * x[:1].numel() // max(1, rows))))
    for n in range(x.shape[0]):
        for row in range(0, rows, step):
            index = (slice(n, n + 1), *[slice(None)] * (x.dim() - 3), slice(row, row + step), slice(None))
            names = {name: (name, (...,)) for name, _ in model.named_parameters()}
            yield Slice(index, index, module, names)


def _channel_norm_case(shape: tuple[int, ...], kind: str, act: str) -> Case:
    def plain() -> nn.Module:
        return randomize(PlainChannelNorm(kind, shape[1], act))

    def fused(model: nn.Module) -> nn.Module:
        import kgopt.nn

        like = next(model.parameters())
        keywords: dict[str, Any] = {"act": act, "bias": True, "device": like.device, "dtype": like.dtype}
        if kind == "layer":
            out: nn.Module = kgopt.nn.ChannelLayerNorm(shape[1], 1e-6, **keywords)
        else:
            eps = 1e-12 if kind == "l2" else 1e-6
            out = kgopt.nn.ChannelRMSNorm(shape[1], eps, normalize=kind == "l2", **keywords)
        out.load_state_dict(model.state_dict(), strict=True)
        return out

    name, kink = f"{'x'.join(map(str, shape))} {kind} {act}", kink_error(act, shape)
    return Case("channelnorm", name, shape, plain, fused, group_norm_work, position_slices, gpu_clock=True, kink=kink)


# Written down before the kernels ran on a GPU. Above 20 MB: within 1.25 of the floor in NCHW, 1.4 in channels_last, 1.5
# backward; the first row in bf16 at 85 % of the copy bandwidth in both formats (its floor is one read and one write of
# 307 MB). The last one lies in L2, where launches and barriers count: within 3 of the floor.
_CHANNEL_NORM = (
    ((1, 96, 4, 480, 832), "l2", "silu"),
    ((1, 384, 4, 120, 208), "l2", "silu"),
    ((1, 128, 9, 256, 256), "rms", "silu"),
    ((16, 192, 56, 56), "layer", "none"),
    ((1, 1024, 4, 32, 32), "rms", "silu"),
)

# --------------------------------------------------------------------------------------------------- convolution


class _OwnKernel(nn.Module):
    """kgopt's convolution with backend="kgopt"."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.conv
        if isinstance(c, nn.ConvTranspose3d):
            return torch.ops.kgopt.conv_transpose3d(
                x, c.weight, c.bias, c.stride, c.padding, c.output_padding, c.groups, c.dilation, backend="kgopt"
            )
        op = torch.ops.kgopt.conv2d if isinstance(c, nn.Conv2d) else torch.ops.kgopt.conv3d
        return op(x, c.weight, c.bias, c.stride, c.padding, c.dilation, c.groups, backend="kgopt")


class _Slab(nn.Module):
    """A convolution of some rows of x, without the output rows that lack neighbours."""

    def __init__(self, conv: nn.Module, keep: slice) -> None:
        super().__init__()
        self.conv, self.keep = conv, keep

    def forward(self, piece: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.conv(piece)[:, :, self.keep]
        return rows


def conv_slices(model: nn.Module, x: torch.Tensor) -> Iterator[Slice]:
    """Whole samples while they are small; else slabs of output rows along the first spatial dim, with their halo.

    For a convolution of stride and dilation 1 with kernel 3 and padding 1. The piece's own padding holds at the ends;
    within, the slab is one row larger on each side and its own padded rows are cut off.
    """
    if isinstance(model, nn.ConvTranspose3d) or x[:1].numel() * 8 <= _PIECE:
        yield from batch_slices(model, x)
        return
    module = double(model)
    depth = x.shape[2]
    # Two pieces from the ends and one from the middle: a whole float64 convolution would take longer than the bench.
    for start in sorted({0, max(0, depth // 2 - 2), max(0, depth - 4)}):
        stop = min(depth, start + 4)
        low, high = max(0, start - 1), min(depth, stop + 1)
        rows = (slice(None), slice(None))
        slab = _Slab(module, slice(start - low, stop - low))
        yield Slice((*rows, slice(low, high)), (*rows, slice(start, stop)), slab)


def _conv_case(kind: str, c_in: int, c_out: int, batch: int, spatial: tuple[int, ...]) -> Case:
    transposed, flat = kind == "conv_transpose3d", kind == "conv2d"
    # The pipelines' own convolutions have no padding, those of the networks keep the size.
    padding = 0 if batch > 1 else 1
    shape = (batch, c_in, *spatial)

    def make(namespace: Any) -> nn.Module:
        name = "ConvTranspose3d" if transposed else "Conv2d" if flat else "Conv3d"
        module: nn.Module = getattr(namespace, name)(c_in, c_out, 3, padding=padding)
        return module

    def plain() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make(nn)

    def ours(model: nn.Module) -> nn.Module:
        import kgopt.nn

        like = next(model.parameters())
        out = make(kgopt.nn).to(device=like.device, dtype=like.dtype)
        out.load_state_dict(model.state_dict(), strict=True)
        return out

    def work(shape: tuple[int, ...], itemsize: int, direction: str) -> Work:
        out = [s + 2 - 2 * padding if transposed else s - 2 + 2 * padding for s in shape[2:]]
        x, y = math.prod(shape), shape[0] * c_out * math.prod(out)
        taps = 3 ** len(out)
        flops = 2.0 * shape[0] * c_in * c_out * taps * math.prod(shape[2:] if transposed else out)
        if direction == "backward":  # reads x and dy, writes dx; dgrad and wgrad
            return Work((2 * x + y) * itemsize, 2 * flops)
        return Work((x + y + c_in * c_out * taps) * itemsize, flops)

    name = f"{kind} {c_in}->{c_out} {batch}x{'x'.join(map(str, spatial))}"
    # Forward only: the gradients go through ATen.
    return Case("conv", name, shape, plain, ours, work, conv_slices, backward="", own_kernel=_OwnKernel)


_CONV = (
    ("conv3d", 32, 32, 1, (128, 128, 128)),
    ("conv3d", 64, 64, 1, (64, 64, 64)),
    ("conv3d", 128, 128, 1, (32, 32, 32)),
    ("conv3d", 32, 64, 1, (80, 170, 170)),
    ("conv3d", 128, 128, 1, (17, 256, 256)),
    ("conv3d", 512, 512, 1, (5, 32, 32)),
    ("conv3d", 3, 24, 128, (24, 32, 32)),
    ("conv_transpose3d", 64, 128, 16, (32, 32, 32)),
    ("conv2d", 8, 64, 128, (128, 128)),
)

# ----------------------------------------------------------------------------------------------------------- ops


def _op_case(
    name: str,
    shape: tuple[int, ...],
    plain: Callable[[torch.Tensor], torch.Tensor],
    ours: Callable[[torch.Tensor], torch.Tensor],
    result: Callable[[tuple[int, ...]], int],
    saves_result: bool = False,
) -> Case:
    """`result` gives the number of elements of the result; the backward of some ops reads it again."""

    def work(shape: tuple[int, ...], itemsize: int, direction: str) -> Work:
        x, y = math.prod(shape), result(shape)
        if direction == "backward":
            reads_x = 0 if name.startswith("mean") else x
            return Work((reads_x + x + y + (y if saves_result else 0)) * itemsize)
        return Work((x + y) * itemsize)

    return Case("ops", name, shape, lambda: Chain(plain), lambda model: Chain(ours), work, batch_slices, layouts=False)


def _plain_stats(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.reshape(x.shape[0], 8, -1)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    var, mean = torch.var_mean(rows, dim=-1, correction=0)
    return mean, torch.rsqrt(var + 1e-5)


def _op_cases() -> list[Case]:
    ops = torch.ops.kgopt
    big = (32, 64, 128, 128)
    cases = [
        _op_case(
            f"activation {act}",
            big,
            _ACTS[act],
            lambda x, act=act: ops.activation(x, act),  # type: ignore[misc]
            math.prod,
        )
        for act in ("relu", "silu", "gelu", "mish", "tanh+hardswish")
    ]
    cases += [
        _op_case(
            "logsumexp over channels",
            (128, 64, 126, 126),
            lambda x: torch.logsumexp(x, 1, keepdim=True),
            lambda x: ops.logsumexp(x, [1], True),
            lambda s: math.prod(s) // s[1],
            saves_result=True,
        ),
        _op_case(
            "logsumexp over the last dim",
            (8192, 4096),
            lambda x: torch.logsumexp(x, -1),
            lambda x: ops.logsumexp(x, [-1]),
            lambda s: s[0],
            saves_result=True,
        ),
        _op_case(
            "mean over all but batch",
            (128, 24, 22, 30, 30),
            lambda x: x.mean([1, 2, 3, 4]),
            lambda x: ops.mean(x, [1, 2, 3, 4]),
            lambda s: s[0],
        ),
        _op_case(
            "mean over space",
            (32, 64, 128, 128),
            lambda x: x.mean([2, 3]),
            lambda x: ops.mean(x, [2, 3]),
            lambda s: s[0] * s[1],
        ),
        # Stacked along dim 1, so that the result is one tensor whose first dim is the batch.
        _op_case(
            "group_stats of 8 groups",
            (16, 128, 34, 34, 34),
            lambda x: torch.cat(_plain_stats(x), 1),
            lambda x: torch.cat(ops.group_stats(x, 8), 1),
            lambda s: s[0] * 16,
        ),
        _op_case(
            "group_norm_mean of 8 groups",
            (128, 24, 22, 30, 30),
            lambda x: F.group_norm(x, 8, *_affine(x)).mean([1, 2, 3, 4]),
            lambda x: ops.group_norm_mean(x, 8, *_affine(x)),
            lambda s: s[0],
        ),
    ]
    return cases


def _affine(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A gamma and a beta that are not 1 and 0, in x's dtype."""
    key = (x.shape[1], x.dtype, x.device)
    if key not in _AFFINE:
        # Eighths and quarters are exact in every dtype, so the float64 reference has the same gamma and beta.
        steps = torch.arange(x.shape[1])
        _AFFINE[key] = ((steps % 8 / 8 + 0.5).to(x), (steps % 5 / 4 - 0.25).to(x))
    return _AFFINE[key]


_AFFINE: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}


def suite_cases(suite: str) -> list[Case]:
    """The cases of a suite, in the order in which they are measured."""
    if suite == "pipelines":
        return [_pipeline_case(pipeline) for pipeline in PIPELINES]
    if suite == "groupnorm":
        return [_group_norm_case(*row) for row in _GROUP_NORM]
    if suite == "channelnorm":
        return [_channel_norm_case(*row) for row in _CHANNEL_NORM]
    if suite == "conv":
        return [_conv_case(*row) for row in _CONV]
    if suite == "ops":
        return _op_cases()
    if suite == "scaling":
        return _scaling_cases()
    raise ValueError(f"suite is {suite!r}, expected one of {', '.join(SUITES)}")
