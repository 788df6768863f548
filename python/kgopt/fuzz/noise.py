"""How far rounding may move a result: PyTorch's formulas in float64, with noise of a dtype's size after each step.

A result is judged by PyTorch's own error first. That error may be small by luck, where a sum of two values cancels for
instance; then this says what any order of the same roundings could have given. It also knows precisions that PyTorch
does not take here: an ideal TF32 product, with operands rounded or cut off.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kgopt.accuracy import round_tf32

__all__ = ["Noise", "NoisySteps", "unit"]

_UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_SMALLEST = {"float64": 2.0**-1021, "float32": 2.0**-125, "float16": 2.0**-24, "bfloat16": 2.0**-125}
_TF32 = 2.0**-11


def unit(dtype: str) -> float:
    """The largest relative error of one rounding."""
    return _UNITS[dtype]


@dataclasses.dataclass(frozen=True)
class Noise:
    """Of one evaluation.

    ``step``: relative, behind each function, what PyTorch rounds there. ``inner``: of the arithmetic inside a function.
    ``product``: of the operands of a convolution. ``cut``: these are cut off instead of rounded, which adds up.
    ``tf32``: the operands are what they are in TF32, rounded or cut, instead of disturbed. ``alike``: all elements of
    a tensor are off by the same, as those of a constant tensor are; its variance stays zero.
    """

    step: float
    inner: float
    product: float
    floor: float
    cut: bool
    tf32: bool
    alike: bool
    seed: int

    @staticmethod
    def of(dtype: str, tf32: bool, seed: int) -> Noise:
        """Of one sample; ``dtype`` is that of the tensors, or autocast's."""
        inner = _UNITS["float64"] if dtype == "float64" else _UNITS["float32"]
        tf32 = tf32 and dtype == "float32"
        product, step = _TF32 if tf32 else inner, _UNITS[dtype]
        floor, cut, rounds, alike = _SMALLEST[dtype], seed % 3 == 2, tf32 and seed % 4 == 2, seed % 6 == 1
        return Noise(2 * step, 2 * inner, 2 * product, floor, cut, rounds, alike, seed)


class _Rounded(torch.autograd.Function):
    """x times 1 + noise, and its gradient times 1 + noise of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, size: float, back: float, floor: float, cut: bool, alike: bool, generator: Any
    ) -> Tensor:
        ctx.more = back, floor, generator
        return _disturbed(x, size, floor, generator, cut, alike)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        back, floor, generator = ctx.more
        return _disturbed(dy, back, floor, generator, False), None, None, None, None, None, None


class _Tf32(torch.autograd.Function):
    """x in TF32, and its gradient times 1 + noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: float, floor: float, cut: bool, generator: Any) -> Tensor:
        ctx.more = back, floor, generator
        if not cut:
            return round_tf32(x)
        return torch.where(x.isfinite(), (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double(), x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        back, floor, generator = ctx.more
        return _disturbed(dy, back, floor, generator, False), None, None, None, None


class _Mean(torch.autograd.Function):
    """The mean over the last dim, kept. A sum loses digits of its terms' size, or of a shift taken off them.

    Of equal terms the additions all round one way, once for each doubling (Higham, The Accuracy of Floating Point
    Summation, 1993, section 3).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: float, generator: Any) -> Tensor:
        ctx.sizes = x.shape
        y = x.mean(-1, keepdim=True)
        size *= max(1.0, math.log2(max(x.shape[-1], 1)) / 4)
        return y + size * _uniform(y, generator) * _finite((x * x).mean(-1, keepdim=True).sqrt())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return dy.expand(ctx.sizes) / ctx.sizes[-1], None, None


class _Spread(torch.autograd.Function):
    """x expanded to a shape, of whose gradient it takes a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, size: float, generator: Any) -> Tensor:
        ctx.more = x.shape, size, generator
        return x.expand(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        shape, size, generator = ctx.more
        total = dy.sum_to_size(shape)
        return total + size * _uniform(total, generator) * _finite(dy.abs().sum_to_size(shape)), None, None, None


class _Normalized(torch.autograd.Function):
    """Of x, what a norm made of it, whose gradient has PyTorch's formula.

    That formula takes off the mean of the gradient and its projection on the normalized values, whose mean the
    rounding of x's mean has moved: a sum of the gradient over the group, which is zero, is that times the projection.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, rstd: Tensor, size: float, floor: float, generator: Any) -> Tensor:
        ctx.save_for_backward(y, rstd)
        ctx.more = size, floor, generator
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        y, rstd = ctx.saved_tensors
        size, floor, generator = ctx.more

        def rounded(t: Tensor) -> Tensor:
            return _disturbed(t, size, floor, generator, False)

        def mean(t: Tensor) -> Tensor:
            total = t.mean(-1, keepdim=True)
            return total + size * _uniform(total, generator) * _finite(t.abs().mean(-1, keepdim=True))

        g = rounded(dy)
        rest = rounded(rounded(g - mean(g)) - rounded(y * mean(rounded(g * y))))
        return rounded(rest * rounded(rstd)), None, None, None, None, None


class _Product(torch.autograd.Function):
    """A convolution, whose sums and whose gradients' sums lose digits of their terms' size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, run: Any, size: float, generator: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.more = run, size, generator
        y: Tensor = run(x, weight)
        return y + size * _uniform(y, generator) * _finite(run(x.abs(), weight.abs()))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        run, size, generator = ctx.more
        found = []
        for f in (lambda t: t, torch.abs):
            leaves = [f(t).detach().requires_grad_() for t in ctx.saved_tensors]
            with torch.enable_grad():
                found.append(torch.autograd.grad(run(*leaves), leaves, f(dy)))
        grads = (g + size * _uniform(g, generator) * _finite(a) for g, a in zip(*found, strict=True))
        return *grads, None, None, None


class _OfResult(torch.autograd.Function):
    """A function whose gradient is computed from its rounded result: of one near 1, 1 - y has few digits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, func: Any, slope: Any, size: float, floor: float, generator: Any) -> Tensor:
        y = _disturbed(func(x), size, floor, generator, False)
        ctx.save_for_backward(y)
        ctx.slope = slope
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return dy * ctx.slope(y), None, None, None, None, None


class _Flushed(torch.autograd.Function):
    """A function of each element, whose slope is zero where float32 has it as a subnormal number alone.

    Kernels may take it for that (docs/numerics.md), so that an infinite gradient gives NaN there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, func: Any, smallest: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.more = func, smallest
        y: Tensor = func(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        func, smallest = ctx.more
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (slope,) = torch.autograd.grad(func(x), x, torch.ones_like(x))
        return dy * slope.masked_fill(slope.abs() < smallest, 0), None, None


class _LogSumExp(torch.autograd.Function):
    """logsumexp, whose gradient is computed from its rounded result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: Any, size: float, floor: float, generator: Any) -> Tensor:
        y = _disturbed(torch.logsumexp(x, dim, True), size, floor, generator, False)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return dy * (x - y).exp(), None, None, None, None


def _uniform(x: Tensor, generator: Any) -> Tensor:
    return 2 * torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device) - 1


def _finite(size: Tensor) -> Tensor:
    """Infinities and NaN have no noise: -inf and noise of infinite size would be NaN."""
    return size.nan_to_num(0, 0, 0)


def _disturbed(x: Tensor, size: float, floor: float, generator: Any, cut: bool, alike: bool = False) -> Tensor:
    noise = torch.rand(() if alike else x.shape, generator=generator, dtype=x.dtype, device=x.device)
    noise = -noise if cut else 2 * noise - 1
    return x + _finite(x) * noise * size + noise * floor


_CONVOLUTIONS = {
    F.conv2d,
    F.conv3d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    torch.convolution,
    torch.conv2d,
    torch.conv3d,
}
_ROUNDED = {
    F.relu,
    F.leaky_relu,
    F.gelu,
    F.hardtanh,
    F.relu6,
    F.interpolate,
    F.normalize,
    torch.rsqrt,
    Tensor.add,
    Tensor.__add__,
    Tensor.__radd__,
    Tensor.mul,
    Tensor.__mul__,
    Tensor.__rmul__,
    Tensor.div,
    Tensor.__truediv__,
}


_FLUSHED = {F.logsigmoid, F.softplus, F.silu, F.mish, F.elu}

_SLOPES = {
    torch.sigmoid: lambda y: y * (1 - y),
    Tensor.sigmoid: lambda y: y * (1 - y),
    torch.tanh: lambda y: 1 - y * y,
    Tensor.tanh: lambda y: 1 - y * y,
}


class NoisySteps(TorchFunctionMode):
    """While it is on, functions of float64 tensors round as ``noise`` says, in the forward and in the backward."""

    def __init__(self, noise: Noise, device: torch.device) -> None:
        super().__init__()
        self._noise = noise
        self._generator = torch.Generator(device).manual_seed(noise.seed)
        self._follows_tf32 = False

    def _round(self, x: Any, size: float, back: float | None = None, cut: bool = False) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        back = size if back is None else back
        return _Rounded.apply(x, size, back, self._noise.floor, cut, self._noise.alike, self._generator)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        n = self._noise
        if func is F.group_norm:
            return self._round(self._group_norm(*args, **kwargs), n.step)
        if func is F.layer_norm:
            return self._round(self._layer_norm(*args, **kwargs), n.step)
        if func is torch.var_mean:
            return self._var_mean(*args, **kwargs)
        if func in _CONVOLUTIONS:
            return self._convolution(func, *args, **kwargs)
        if func in (torch.mean, Tensor.mean):
            return self._round(self._mean(*args, **kwargs), n.step)
        if func in (torch.logsumexp, Tensor.logsumexp):
            return self._logsumexp(*args, **kwargs)
        if func in _SLOPES:
            x = self._round(args[0], n.inner)
            # Behind a TF32 convolution tanh is the hardware's (docs/numerics.md).
            size = _TF32 if self._follows_tf32 else n.inner
            y = _OfResult.apply(x, func, _SLOPES[func], size, n.floor, self._generator)
            return self._round(y, n.step)
        if func is F.tanhshrink:  # near zero all of tanh's rounding is left of the difference
            x = self._round(args[0], n.inner)
            return self._round(x - self._round(torch.tanh(x), n.inner), n.step)
        if func in _FLUSHED:
            x = self._round(args[0], n.inner)
            smallest = _SMALLEST["float64" if n.inner == 2 * _UNITS["float64"] else "float32"]
            y = _Flushed.apply(x, lambda t: func(t, *args[1:], **kwargs), smallest)
            return self._round(y, n.step)
        if func in _ROUNDED:
            args = tuple(self._round(a, n.inner) for a in args)
            return self._round(func(*args, **kwargs), n.step)
        return func(*args, **kwargs)

    def _convolution(self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Any:
        n = self._noise
        self._follows_tf32 = n.product > n.inner
        if n.tf32:
            cut = n.seed % 8 == 2  # of the samples with such operands every other one
            x, weight = (_Tf32.apply(t, n.inner, n.floor, cut, self._generator) for t in (x, weight))
        else:
            x, weight = (self._round(t, n.product, n.inner, n.cut) for t in (x, weight))
        y = _Product.apply(x, weight, lambda a, b: func(a, b, None, *rest), n.inner, self._generator)
        y = self._round(y, n.inner, n.product)  # the gradient is an operand of both backward products
        if bias is not None:
            y = self._round(y + self._spread(bias.reshape(-1, *[1] * (weight.dim() - 2)), y.shape), n.inner)
        return self._round(y, n.step)

    def _spread(self, x: Tensor, shape: Any) -> Tensor:
        result: Tensor = _Spread.apply(x, shape, self._noise.inner, self._generator)
        return result

    def _mean(self, x: Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
        """Over any dims: they are moved behind the others."""
        rank = x.dim()
        dims = {d % max(rank, 1) for d in ([dim] if isinstance(dim, int) else dim or range(rank))}
        kept = [d for d in range(rank) if d not in dims]
        flat = x.permute(*kept, *sorted(dims)).reshape(
            [x.shape[d] for d in kept] + [math.prod(x.shape[d] for d in dims)]
        )
        y = _Mean.apply(self._round(flat, self._noise.inner), self._noise.inner, self._generator)
        shape = [1 if d in dims else x.shape[d] for d in range(rank)] if keepdim else [x.shape[d] for d in kept]
        return self._round(y, self._noise.inner).reshape(shape)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance over the last dim, and what is left of x."""
        inner = self._noise.inner
        mean = self._mean(x, -1, True)
        # Each element's own rounding of the mean: of the parts that are merged, or of mean * rstd * weight.
        away = self._round(x - self._round(self._spread(mean, x.shape), inner), inner)
        return mean, self._mean(self._round(away * away, inner), -1, True), away

    def _logsumexp(self, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
        n = self._noise
        dims = [dim] if isinstance(dim, int) else list(dim)
        y = _LogSumExp.apply(self._round(x, n.inner), dims, n.step, n.floor, self._generator)
        if keepdim or not x.dim():
            return self._round(y, n.step)
        gone = {d % x.dim() for d in dims}
        return self._round(y, n.step).reshape([s for d, s in enumerate(x.shape) if d not in gone])

    def _var_mean(self, x: Tensor, dim: Any, correction: int = 0, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        if correction or keepdim:
            raise NotImplementedError("var_mean: correction and keepdim")
        dims = [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]
        kept = [d for d in range(x.dim()) if d not in dims]
        shape = [x.shape[d] for d in kept]
        mean, variance, _ = self._moments(
            x.permute(*kept, *dims).reshape([*shape, math.prod(x.shape[d] for d in dims)])
        )
        return variance.reshape(shape), mean.reshape(shape)

    def _layer_norm(
        self, x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """A LayerNorm without parameters as a GroupNorm of one group; any other, and of nothing, without noise."""
        if weight is not None or bias is not None or x.numel() == 0:
            return F.layer_norm(x, shape, weight, bias, eps)
        flat = x.reshape(-1, math.prod(shape))
        return self._group_norm(flat, 1, None, None, eps).reshape(x.shape)

    def _group_norm(
        self, x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """GroupNorm as its definition has it, in steps that round."""
        inner, floor = self._noise.inner, self._noise.floor
        flat = x.reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)
        with torch.no_grad():
            _, variance, away = self._moments(flat)
            rstd = self._round(torch.rsqrt(variance + eps), inner)
            y = self._round(away * rstd, inner)
        y = _Normalized.apply(flat, y, rstd, inner, floor, self._generator).reshape(x.shape)
        shape = [1, x.shape[1], *[1] * (x.dim() - 2)]
        if weight is not None:
            y = self._round(y * self._spread(weight.reshape(shape), x.shape), inner)
        return y if bias is None else self._round(y + self._spread(bias.reshape(shape), x.shape), inner)
