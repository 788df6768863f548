"""fp32 convolutions on fp16 tensor cores, scaled by powers of two: errors beside TF32's, by simulation and on a GPU."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from kgopt._layout import FORMATS
from kgopt.reference import conv_add_ref, group_norm_conv_ref, group_norm_ref, scaled_half_conv_ref
from tolerances import assert_as_good_as_torch, round_tf32

OPS = torch.ops.kgopt
BACKEND = "kgopt:scaled_half"


def conv_args(rank: int, padding: int = 1, stride: int = 1) -> tuple[list[int], ...]:
    return [stride] * rank, [padding] * rank, [1] * rank, [0] * rank


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def silu_of_norm(x: Tensor) -> Tensor:
    return group_norm_ref(x, 4, 1 + 0.5 * normal(x.shape[1], seed=5), normal(x.shape[1], seed=6), act="silu")


def spread(count: int) -> Tensor:
    """Powers of ten from 1e-6 to 1e6."""
    return 10.0 ** torch.linspace(-6, 6, count)


def with_outlier(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 3, 5, 5] = 1e5
    return x


C, OUT, SIZE = 64, 48, 24
X, W = normal(2, C, SIZE, SIZE), normal(OUT, C, 3, 3, seed=1) / 24
CASES = {
    "normal": (X, W),
    "behind a norm": (silu_of_norm(X), W),
    "behind relu": (X.relu(), W),
    "offset": (X + 100, W),
    "large": (X * 1e30, W * 1e6),
    "small": (X * 1e-30, W * 1e-7),
    "subnormal": (X * 1e-20, W * 1e-21),
    "input channels apart": (X * spread(C).view(1, -1, 1, 1), W),
    "input channels apart and weights that make up for it": (
        X * spread(C).view(1, -1, 1, 1),
        W / spread(C).view(1, -1, 1, 1),
    ),
    "output channels apart": (X, W * spread(OUT).view(-1, 1, 1, 1)),
    "an outlier": (with_outlier(X), W),
    "heavy tails": (X**5, W**3 * 500),
    "a channel of zeros": (torch.cat([torch.zeros(2, 1, SIZE, SIZE), X[:, 1:]], 1), W),
    "a dead channel of large weights": (
        torch.cat([torch.zeros(2, 1, SIZE, SIZE), X[:, 1:]], 1),
        torch.cat([1e6 * W[:, :1], W[:, 1:]], 1),
    ),
    "one weight above all": (X, torch.where(torch.arange(C).view(1, -1, 1, 1) == 7, 1e3 * W, W)),
    "kernel of 1": (X, W[:, :, :1, :1]),
}


@pytest.mark.parametrize("name", CASES)
def test_rounding_stays_below_one_and_a_half_times_tf32s(name):
    """With operands that are rounded, and products that are exact.

    Operands lose what TF32's lose, and the result is rounded once more: no output channel loses more than that.
    """
    x, weight = CASES[name]
    geometry = conv_args(2, weight.shape[-1] // 2)
    exact = conv_add_ref(x.double(), weight.double(), None, None, *geometry)
    tf32 = conv_add_ref(round_tf32(x).double(), round_tf32(weight).double(), None, None, *geometry) - exact
    mine = scaled_half_conv_ref(x, weight, None, None, *geometry[:3]).double() - exact
    tiny = 2.0**-149  # fp32's own spacing
    assert mine.norm() <= 1.5 * tf32.norm() + tiny * mine.numel()
    assert mine.abs().max() <= 2 * tf32.abs().max() + tiny
    own, theirs, whole = (t.movedim(1, 0).flatten(1).norm(dim=1) for t in (mine, tf32, exact))
    assert (own <= 1.1 * theirs + 2.0**-11 * whole + tiny * mine.numel()).all()


def test_the_output_is_below_half_of_what_fp16_holds():
    """All magnitudes at their bounds and of one sign: the largest output that there can be."""
    x, weight = torch.full((1, 512, 5, 5), 1.9999999), torch.full((8, 512, 3, 3), 0.0139)
    y = scaled_half_conv_ref(x, weight, None, None, *conv_args(2)[:3])
    exact = conv_add_ref(x.double(), weight.double(), None, None, *conv_args(2))
    torch.testing.assert_close(y.double(), exact, rtol=2**-10, atol=0)


def test_what_is_not_finite_is_nan_where_it_is():
    x, weight = X.clone(), W.clone()
    x[0, 2, 3, 4], x[1, 9, 20, 20], weight[5, 1, 1, 1], weight[6, 1, 0, 0] = math.inf, math.nan, -math.inf, math.nan
    mine = scaled_half_conv_ref(x, weight, None, None, *conv_args(2)[:3])
    theirs = conv_add_ref(round_tf32(x).double(), round_tf32(weight).double(), None, None, *conv_args(2))
    assert torch.equal(mine.isnan(), ~theirs.isfinite())
    assert torch.equal(mine.isfinite(), theirs.isfinite())


def test_the_cpu_and_what_follows_from_the_formula_take_the_backend():
    """It is one of CUDA's: elsewhere, and in second derivatives, it is the ops that it stands for."""
    x, weight = X[:, :8, :6, :6].requires_grad_(), W[:8, :8].clone().requires_grad_()
    args = x, None, 2, None, None, 1e-5, "silu", weight, None, None, *conv_args(2)
    y = OPS.group_norm_conv(*args, backend=BACKEND)
    assert torch.equal(y, OPS.group_norm_conv(*args))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.autograd.grad(dx.sum(), weight)[0].isfinite().all()
    with pytest.raises(RuntimeError, match="backend is 'kgopt:scaled'"):
        OPS.group_norm_conv(*args, backend="kgopt:scaled")


# --------------------------------------------------------------------------------------------------------------- CUDA


def on_gpu(x: Tensor) -> Tensor:
    return x.cuda().contiguous(memory_format=FORMATS[x.dim()])


def explain(x: Tensor, weight: Tensor, *more: str, stride: int = 1, groups: int = 1) -> str:
    geometry = conv_args(x.dim() - 2, stride=stride)
    return OPS.explain_group_norm_conv(x, weight, *geometry, groups, False, *more, backend=BACKEND)


@pytest.fixture
def tf32():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_is_as_good_as_tf32(name, tf32, poisoned):
    x, weight = (on_gpu(t) for t in CASES[name])
    geometry = conv_args(2, weight.shape[-1] // 2)
    assert explain(x, weight).startswith("fp16")
    call = functools.partial(OPS.group_norm_conv, x, None, 0, None, None, 0.0, "none", weight, None, None, *geometry)
    y, torchs = call(backend=BACKEND), torch.convolution(x, weight, None, *geometry[:3], False, geometry[3], 1)
    exact = conv_add_ref(x.double(), weight.double(), None, None, *geometry)
    ideal = conv_add_ref(round_tf32(x).double(), round_tf32(weight).double(), None, None, *geometry).float()
    assert y.stride() == torchs.stride()
    assert_as_good_as_torch(y, torchs, exact, ideal)
    assert torch.equal(y, call(backend=BACKEND))


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["none", "relu", "silu", "gelu", "tanh+hardswish", "sigmoid", "leaky_relu(0.2)"])
@pytest.mark.parametrize("shape", [(2, 64, 17, 19), (1, 32, 7, 9, 11), (3, 24, 1, 33), (1, 512, 8, 8)], ids=str)
def test_gpu_behind_a_norm(act, shape, tf32, poisoned):
    x, weight = on_gpu(normal(*shape) * 3 + 1), on_gpu(normal(40, shape[1], *[3] * (len(shape) - 2), seed=1) / 20)
    gamma, beta, bias = (normal(n, seed=n).cuda() for n in (shape[1], shape[1], 40))
    geometry = conv_args(len(shape) - 2)
    residual = on_gpu(normal(shape[0], 40, *shape[2:], seed=3))
    norm = 8, gamma, beta, 1e-5, act
    tail = bias, residual, *geometry, 1, False, 2.0, "relu"
    y, moments = OPS.group_norm_conv_moments(x, None, *norm, weight, *tail, backend=BACKEND)
    torchs = OPS.group_norm_conv(x, None, *norm, weight, *tail, backend="aten")
    double = [t.double() if isinstance(t, Tensor) else t for t in (*norm, weight, *tail)]
    exact = group_norm_conv_ref(x.double(), None, *double)
    z = group_norm_ref(x.double(), *double[:5])
    ideal = conv_add_ref(round_tf32(z), round_tf32(weight).double(), *double[6:]).float()
    assert_as_good_as_torch(y, torchs, exact, ideal)
    positions = list(range(2, x.dim()))
    torch.testing.assert_close(moments[..., 0], y.mean(positions), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moments[..., 1], y.var(positions, correction=0), rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
def test_gpu_refuses_what_it_is_not_for(tf32):
    x, weight = on_gpu(X), on_gpu(W)
    assert "not fp32" in explain(x.bfloat16(), weight.bfloat16())
    assert "channels_last" in explain(X.cuda(), W.cuda())
    assert "channels_last" in explain(x, on_gpu(W[:, :32]), groups=2)
    assert "multiple of 8" in explain(x, weight[:43])
    assert "monotonic" in explain(x, weight, "leaky_relu(-0.5)")
    torch.backends.cudnn.allow_tf32 = False
    assert "fp32 accuracy" in explain(x, weight)
    args = x, None, 0, None, None, 0.0, "none", weight, None, None, *conv_args(2)
    assert torch.equal(OPS.group_norm_conv(*args, backend=BACKEND), OPS.group_norm_conv(*args))


@pytest.mark.gpu
def test_gpu_keeps_what_is_not_finite(tf32):
    x, weight, geometry = on_gpu(X), on_gpu(W), conv_args(2)
    x[0, 2, 3, 4], x[1, 9, 20, 20] = math.inf, math.nan
    weight[5, 1, 1, 1] = math.nan
    y = OPS.group_norm_conv(x, None, 0, None, None, 0.0, "none", weight, None, None, *geometry, backend=BACKEND)
    torchs = torch.convolution(x, weight, None, *geometry[:3], False, geometry[3], 1)
    assert torch.equal(y.isnan(), ~torchs.isfinite())  # cuDNN's fp16 loses some infinities, but no NaN
    assert torch.equal(y.isfinite(), torchs.isfinite())


@pytest.mark.gpu
def test_gpu_follows_weights_that_change_in_place(tf32):
    x, weight, gamma = on_gpu(X), on_gpu(W), torch.ones(C, device="cuda")

    def call() -> Tensor:
        args = x, None, 4, gamma, None, 1e-5, "silu", weight, None, None, *conv_args(2)
        return OPS.group_norm_conv(*args, backend=BACKEND)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    weight.mul_(1e5)
    gamma.mul_(1e-4)
    graph.replay()
    assert torch.equal(y, call())
