"""Convolutions of scaled fp16 in training: the three ops beside an ideal TF32, by their formulas and on a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kgopt  # noqa: F401  (registers the ops)
from kgopt._layout import FORMATS
from kgopt.accuracy import allowed, relative_error, round_tf32
from kgopt.reference import group_norm_ref

OPS = torch.ops.kgopt
ALL = [True, True, True]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def last(t: Tensor, device: str = "cpu") -> Tensor:
    return t.to(device).contiguous(memory_format=FORMATS[t.dim()])


def along(values: Tensor, t: Tensor) -> Tensor:
    """A value for each channel of t."""
    return values.view(-1, *[1] * (t.dim() - 2))


def apart(t: Tensor) -> Tensor:
    """With channels whose scales differ by 10**6, in a drawn order."""
    scales = 10.0 ** torch.linspace(-3, 3, t.shape[1])
    return t * along(scales[torch.randperm(t.shape[1], generator=torch.Generator().manual_seed(9))], t)


def with_outlier(t: Tensor) -> Tensor:
    t = t.clone()
    t[0, t.shape[1] // 2].view(-1)[3] = 1e5 * float(t.std())
    return t


def with_dead_channel(t: Tensor) -> Tensor:
    return t * along((torch.arange(t.shape[1]) != 5).float(), t)


class Case(NamedTuple):
    """A convolution of a result of ``shape``; the GPU has no gradient of a weight for each of them."""

    shape: tuple[int, ...]
    out: int
    kernel: int = 3
    stride: int = 1
    dilation: int = 1

    def lists(self) -> tuple[list[int], ...]:
        rank = len(self.shape) - 2
        padding = self.dilation * (self.kernel // 2)
        return [self.stride] * rank, [padding] * rank, [self.dilation] * rank

    def weight(self) -> Tensor:
        taps = [self.kernel] * (len(self.shape) - 2)
        return normal(self.out, self.shape[1], *taps, seed=1) / math.sqrt(self.shape[1] * math.prod(taps))

    @property
    def has_dweight(self) -> bool:
        return self.kernel == 3 and self.dilation == 1


def gradients(dy: Tensor, z: Tensor, weight: Tensor, lists: tuple[list[int], ...], mask: list[bool]) -> list[Tensor]:
    geometry = *lists, False, [0] * len(lists[0]), 1
    return list(torch.ops.aten.convolution_backward(dy, z, weight, [len(weight)], *geometry, mask))


def assert_as_good(name: str, mine: Tensor, ideal: Tensor, exact: Tensor, dims: Sequence[int] = ()) -> None:
    """The rule of kgopt.accuracy beside an ideal TF32, and nearly that of each channel along these dims.

    The result's rounding to fp16 may count for more in one of these, whose operands happen to be rounded by little.
    """
    assert (mine.dtype, mine.shape) == (torch.float32, exact.shape)
    assert mine.isfinite().all()
    more = 0.0 if name == "dweight" else 2.0**-12
    parts = [((mine, ideal, exact), 0.0)]
    for d in dims:
        parts += [(part, more) for part in zip(mine.unbind(d), ideal.unbind(d), exact.unbind(d), strict=True)]
    for (m, i, e), rounding in parts:
        error, bar = relative_error(m, e), allowed(torch.float32, relative_error(i.float(), e)) + rounding
        assert error <= bar, f"{name}: error {error:.3e}, allowed {bar:.3e}"


def check(
    case: Case,
    x: Tensor,
    dy: Tensor | None = None,
    norm: tuple[object, ...] | None = None,
    device: str = "cpu",
    mask: list[bool] = ALL,
    by_channel: bool = True,
) -> None:
    """Result and gradients against float64, layouts against the fake kernels', bits against those of a second run."""
    if device == "cuda" and not case.has_dweight:
        mask = [mask[0], False, mask[2]]
    x, lists = last(x, device), case.lists()
    weight, bias = case.weight().to(device), normal(case.out, seed=2).to(device)
    given = tuple(a.to(device) if isinstance(a, Tensor) else a for a in norm or ())
    call = functools.partial(OPS.scaled_half, x, *given)
    half, inverse, mean, rstd = call()
    double = [a.double() if isinstance(a, Tensor) else a for a in given]
    z = group_norm_ref(x.double(), *double) if norm else x.double()

    assert (half.dtype, inverse.dtype) == (torch.float16, torch.float64)
    assert half.is_contiguous(memory_format=FORMATS[x.dim()])
    assert half.abs().max() <= 16
    assert torch.equal(torch.frexp(inverse).mantissa, torch.full_like(inverse, 0.5))
    assert relative_error(half.double() * along(inverse, x), z) <= allowed(
        torch.float32, relative_error(round_tf32(z), z)
    )
    assert mean.shape == rstd.shape == (len(x), given[0] if norm else 0)
    if norm:
        _, *statistics = OPS.group_norm_fwd(x, *given)
        torch.testing.assert_close([mean, rstd], statistics, rtol=1e-5, atol=1e-5)

    exact = torch.convolution(z, weight.double(), None, *lists, False, [0] * len(lists[0]), 1)
    residual = last(normal(*exact.shape, seed=3), device)
    forward = functools.partial(OPS.conv_scaled_half, half, inverse, weight, bias, residual, *lists)
    y, none = forward(), OPS.conv_scaled_half(half, inverse, weight, None, None, *lists)
    tf32 = round_tf32(z), round_tf32(weight).double()
    ideal = torch.convolution(*tf32, None, *lists, False, [0] * len(lists[0]), 1)
    assert_as_good("y", none, ideal, exact, [1] if by_channel else [])
    torch.testing.assert_close(y, none + along(bias, y) + residual, rtol=1e-6, atol=1e-6 * float(none.abs().max()))

    dy = last(gradient_of(case) if dy is None else dy, device)
    assert dy.shape == exact.shape
    backward = functools.partial(OPS.conv_scaled_half_backward, dy, half, inverse, weight, *lists, mask)
    found = backward()
    exacts = gradients(dy.double(), z, weight.double(), lists, ALL)
    ideals = gradients(round_tf32(dy).double(), *tf32, lists, ALL)
    ideals[2] = exacts[2]  # a sum, without products
    dims = ([1], [0, 1], [0]) if by_channel else ([], [], [])
    for name, wanted, *tensors, of in zip(("dx", "dweight", "dbias"), mask, found, ideals, exacts, dims, strict=True):
        if wanted and name == "dbias":  # beside the sum of magnitudes, as its terms cancel
            scale = dy.double().abs().sum([0, *range(2, dy.dim())])
            assert relative_error(tensors[0], tensors[2], scale) <= 1e-6
        elif wanted:
            assert_as_good(name, *tensors, of)
        else:
            assert tensors[0].shape == (0,)

    for run in (call, forward, backward):
        first, second = (several(run()) for _ in range(2))
        with FakeTensorMode() as mode:
            args = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in run.args]
            fakes = several(run.func(*args))
        for a, b, fake in zip(first, second, fakes, strict=True):
            assert torch.equal(a, b)
            assert (a.shape, a.stride(), a.dtype) == (fake.shape, fake.stride(), fake.dtype)


def several(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def affine(channels: int, act: str) -> tuple[object, ...]:
    return 4, 1 + 0.5 * normal(channels, seed=5), normal(channels, seed=6), 1e-5, act


def gradient_of(case: Case) -> Tensor:
    """Drawn, of the result's shape: the padding makes up for the kernel."""
    return normal(case.shape[0], case.out, *((s - 1) // case.stride + 1 for s in case.shape[2:]), seed=4)


CASES = {
    "2D": Case((2, 96, 40, 33), 48),
    "2D, stride 2": Case((2, 24, 34, 32), 64, stride=2),
    "2D, dilation 2": Case((2, 64, 19, 21), 40, dilation=2),
    "2D, kernel of 1": Case((2, 16, 9, 8), 24, kernel=1),
    "3D": Case((1, 32, 24, 20, 16), 32),
    "3D, two samples": Case((2, 64, 12, 12, 12), 96),
    "3D, stride 2": Case((1, 32, 13, 12, 16), 64, stride=2),
    "3D, kernel of 1": Case((2, 40, 7, 9, 11), 32, kernel=1),
    "3D, few positions": Case((2, 16, 3, 4, 5), 24),
}
ACTS = ("none", "relu", "leaky_relu", "leaky_relu(0.2)", "silu")
ONE_OF_THREE = [True, False, False], [False, True, False], [False, False, True]


@pytest.fixture(autouse=True)
def tf32():
    torch.backends.cudnn.allow_tf32 = True  # conftest.py turns it off again


@pytest.mark.parametrize("name", CASES)
def test_channels_apart(name, device, poisoned):
    """Of what it reads and of its gradient."""
    case = CASES[name]
    check(case, apart(normal(*case.shape)), apart(gradient_of(case)), device=device)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", ["2D", "2D, stride 2", "3D, two samples", "3D, stride 2", "3D, kernel of 1"])
def test_behind_a_norm(name, act, device, poisoned):
    case = CASES[name]
    check(case, 3 * normal(*case.shape) + 1, apart(gradient_of(case)), affine(case.shape[1], act), device)


@pytest.mark.parametrize("mask", ONE_OF_THREE, ids=str)
def test_gradients_that_nobody_asks_for(mask, device, poisoned):
    check(CASES["3D, few positions"], normal(2, 16, 3, 4, 5), device=device, mask=mask)


def hard(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """What would overflow fp16, or vanish, without scales."""
    x, dy = normal(*case.shape), gradient_of(case)
    return {
        "outliers": (with_outlier(x), with_outlier(dy)),
        "one sign": (x.relu() + 1, 1000 * dy.abs()),
        "zero channels": (with_dead_channel(apart(x)), with_dead_channel(apart(dy))),
        "tiny": (1e-20 * x, 1e-20 * dy),
        "huge": (1e15 * x, 1e15 * dy),
    }


HARD = "outliers", "one sign", "zero channels", "tiny", "huge"


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("name", ["2D", "2D, stride 2", "3D, two samples", "3D, stride 2"])
def test_hard_values(name, kind, device, poisoned):
    case = CASES[name]
    check(case, *hard(case)[kind], device=device, by_channel=kind not in ("outliers", "zero channels"))


def test_what_is_not_finite_is_nan_in_the_half(device):
    x = last(normal(2, 16, 9, 10), device)
    x[0, 1, 2, 3], x[1, 4, 0, 0] = math.inf, math.nan
    half, inverse, *_ = OPS.scaled_half(x)
    assert torch.equal(half.isnan(), ~x.isfinite())
    assert inverse.isfinite().all()


def test_without_derivatives(device):
    x = last(normal(1, 8, 6, 6), device).requires_grad_()
    with pytest.raises(RuntimeError, match="scaled_half: has no derivative"):
        OPS.scaled_half(x)[0].float().sum().backward()


def refused(device: str) -> dict[str, Callable[[], object]]:
    """Calls by what their errors say."""
    x, weight = last(normal(1, 16, 8, 8), device), normal(16, 16, 3, 3).to(device)
    half, inverse, *_ = OPS.scaled_half(x)

    def forward(x: Tensor, inverse: Tensor, weight: Tensor) -> object:
        return OPS.conv_scaled_half(x, inverse, weight, None, None, [1, 1], [1, 1], [1, 1])

    def backward(dy: Tensor, weight: Tensor, padding: int = 1) -> object:
        lists = [1, 1], [padding, padding], [1, 1]
        return OPS.conv_scaled_half_backward(dy, half, inverse, weight, *lists, ALL)

    return {
        "scaled_half: x has dtype": lambda: OPS.scaled_half(x.half()),
        "conv_scaled_half: x has dtype": lambda: forward(x, inverse, weight),
        "conv_scaled_half_backward: dy has dtype": lambda: backward(x.half(), weight),
        "scaled_half: x has shape": lambda: OPS.scaled_half(x[:, :12]),
        "scaled_half: act is": lambda: OPS.scaled_half(x, 4, act="tanhshrink"),
        "conv_scaled_half: weight has shape": lambda: forward(half, inverse, weight[:12]),
        "conv_scaled_half: inverse has shape": lambda: forward(half, inverse[:8], weight),
        "conv_scaled_half_backward: no kernel": lambda: backward(x, weight[:, :, :1, :1], padding=0),
        "^scaled_half: .*allow_tf32": lambda: OPS.scaled_half(x),
        "^conv_scaled_half: .*allow_tf32": lambda: forward(half, inverse, weight),
        "^conv_scaled_half_backward: .*allow_tf32": lambda: backward(x, weight),
    }


def test_refuses_other_dtypes(device):
    for message, call in list(refused(device).items())[:3]:
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.gpu
def test_gpu_refuses():
    for message, call in refused("cuda").items():
        torch.backends.cudnn.allow_tf32 = "allow_tf32" not in message
        with pytest.raises(RuntimeError, match=message):
            call()
