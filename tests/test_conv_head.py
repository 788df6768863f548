"""Gradients of 1 x 1 convolutions to a few channels, and sums over positions, as the gradient of a bias is."""

from __future__ import annotations

import pytest
import torch

from kgopt._layout import FORMATS
from tolerances import assert_all_as_good, assert_as_good_as_torch, round_tf32

HEADS = [  # rank, x's channels, outputs, samples, size
    (3, 32, 3, 2, (16, 18, 20)),
    (3, 40, 1, 1, (17, 19, 23)),
    (3, 8, 6, 1, (16, 16, 17)),
    (2, 96, 8, 1, (65, 67)),
    (2, 256, 2, 3, (40, 41)),
    (2, 1024, 4, 1, (64, 64)),
]


def _channels_last(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).contiguous(memory_format=FORMATS[len(shape)])


def _backward(dy, x, weight, bias=True, backend="auto", transposed=False, stride=1, padding=0, **options):
    rank = x.dim() - 2
    geometry = [stride] * rank, [padding] * rank, [1] * rank, [0] * rank, 1, transposed
    return torch.ops.kgopt.conv_backward(dy, x, weight, *geometry, [True, True, bias], backend=backend, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_heads(case, dtype, poisoned):
    rank, c_in, c_out, n, size = case
    x, dy = _channels_last(n, c_in, *size, dtype=dtype), _channels_last(n, c_out, *size, dtype=dtype)
    weight = torch.randn(c_out, c_in, *[1] * rank, device="cuda").to(dtype)
    geometry = [1] * rank, [0] * rank, [1] * rank, [0] * rank, 1, False
    choice = torch.ops.kgopt.explain_conv(x, weight, *geometry, "backward")
    assert choice == "dx kgopt; dweight kgopt"
    mine = _backward(dy, x, weight)
    theirs = _backward(dy, x, weight, backend="aten")
    exact = _backward(dy.double(), x.double(), weight.double())
    assert mine[0].stride() == x.stride()
    assert_all_as_good(mine, theirs, exact)
    assert all(torch.equal(a, b) for a, b in zip(_backward(dy, x, weight), mine, strict=True))


@pytest.mark.gpu
def test_gradients_of_heads_keep_nan_and_infinities():
    x, dy = _channels_last(1, 32, 70, 70, dtype=torch.float32), _channels_last(1, 3, 70, 70, dtype=torch.float32)
    weight = torch.randn(3, 32, 1, 1, device="cuda")
    x[0, 5, 3, 4], x[0, 7, 1, 1] = float("nan"), float("inf")
    dy[0, 1, 60, 60], dy[0, 2, 9, 9] = float("nan"), float("-inf")
    for actual, expected in zip(_backward(dy, x, weight), _backward(dy, x, weight, backend="aten"), strict=True):
        for places in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(places(actual), places(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("c_out", "size"), [(32, (33, 35)), (24, (9, 11, 13)), (512, (20, 20)), (7, (9, 9))], ids=str)
def test_gradients_of_biases(c_out, size, dtype, poisoned):
    """Of channels_last tensors, whichever kernel makes the other gradients."""
    rank = len(size)
    x, dy = _channels_last(2, 16, *size, dtype=dtype), _channels_last(2, c_out, *size, dtype=dtype)
    weight = torch.randn(c_out, 16, *[3] * rank, device="cuda").to(dtype)
    mine, theirs, exact = (
        _backward(g, a, w, backend=backend, padding=1)
        for backend, (g, a, w) in (
            ("auto", (dy, x, weight)),
            ("aten", (dy, x, weight)),
            ("auto", (dy.double(), x.double(), weight.double())),
        )
    )
    assert_as_good_as_torch(mine[2], theirs[2], exact[2])
    wanted = torch.ops.kgopt.conv_backward(
        dy, x, weight, [1] * rank, [1] * rank, [1] * rank, [0] * rank, 1, False, [False, False, True]
    )
    assert torch.equal(wanted[2], mine[2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("c_out", "size"), [(4, (39, 6)), (4, (700, 900)), (64, (300, 300)), (512, (256, 192))], ids=str
)
def test_gradients_of_biases_of_equal_values(c_out, size, poisoned):
    """As of a mean. Each addition to a long sum of equal values rounds the same way as the one before it."""
    dy = torch.full((3, c_out, *size), 0.7, device="cuda").to(memory_format=torch.channels_last)
    x = torch.zeros(3, 4, *size, device="cuda").to(memory_format=torch.channels_last)
    geometry = [1, 1], [0, 0], [1, 1], [0, 0], 1, False, [False, False, True]
    bias = torch.ops.kgopt.conv_backward(dy, x, torch.zeros(c_out, 4, 1, 1, device="cuda"), *geometry)[2]
    exact = dy[:, 0].double().sum()
    assert float((bias.double() / exact - 1).abs().max()) <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_bias_behind_cudnn(dtype, transposed):
    """It is added in a pass of kgopt's: PyTorch's values."""
    torch.backends.cudnn.allow_tf32 = False
    x = _channels_last(2, 96, 30, 30, dtype=dtype)
    weight = torch.randn(96, 160, 2, 2, device="cuda").to(dtype)
    weight = weight if transposed else weight.transpose(0, 1).contiguous()
    bias = torch.randn(160, device="cuda").to(dtype)
    ours, theirs = (
        (torch.ops.kgopt.conv_transpose2d, torch.conv_transpose2d)
        if transposed
        else (torch.ops.kgopt.conv2d, torch.conv2d)
    )
    y = ours(x, weight, bias, [2, 2], backend="aten")
    expected, exact = theirs(x, weight, bias, 2), theirs(x.double(), weight.double(), bias.double(), 2)
    assert y.stride() == expected.stride()
    assert_as_good_as_torch(y, expected, exact)


@pytest.mark.gpu
def test_heads_under_tf32_are_no_worse_than_tf32():
    torch.backends.cudnn.allow_tf32 = True
    x, dy = _channels_last(1, 64, 80, 80, dtype=torch.float32), _channels_last(1, 4, 80, 80, dtype=torch.float32)
    weight = torch.randn(4, 64, 1, 1, device="cuda")
    mine, exact = _backward(dy, x, weight), _backward(dy.double(), x.double(), weight.double())
    rounded = _backward(*(round_tf32(t).double() for t in (dy, x, weight)))
    assert_all_as_good(mine, (ideal.float() for ideal in rounded), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case", [(3, 32, 3, 2, (16, 18, 20)), (2, 64, 1, 1, (65, 67)), (2, 8, 4, 3, (40, 41))], ids=str
)
def test_heads(case, dtype, poisoned):
    rank, c_in, c_out, n, size = case
    torch.backends.cudnn.allow_tf32 = False
    x, bias = _channels_last(n, c_in, *size, dtype=dtype), torch.randn(c_out, device="cuda").to(dtype)
    weight = torch.randn(c_out, c_in, *[1] * rank, device="cuda").to(dtype)
    ours, theirs = (torch.ops.kgopt.conv2d, torch.conv2d) if rank == 2 else (torch.ops.kgopt.conv3d, torch.conv3d)
    geometry = [1] * rank, [0] * rank, [1] * rank, [0] * rank, 1, False
    assert "1 x 1 convolution to a few channels" in torch.ops.kgopt.explain_conv(x, weight, *geometry)
    y, expected, exact = (
        ours(x, weight, bias),
        theirs(x, weight, bias),
        theirs(x.double(), weight.double(), bias.double()),
    )
    assert y.stride() == expected.stride()
    assert_as_good_as_torch(y, expected, exact)
    wide = x.new_empty(n, 2 * c_in, *size).contiguous(memory_format=FORMATS[x.dim()])[:, :c_in]
    wide.copy_(x)
    assert torch.equal(ours(wide, weight, bias), y)
