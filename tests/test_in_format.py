"""A tensor in the other memory format and in another dtype, as an op and where optimized models convert inputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import kgopt
from kgopt._layout import FORMATS
from kgopt.rewrite.model import layout

OPS = torch.ops.kgopt
SHAPES = [
    *[(2, 64, 16, 16), (3, 5, 7, 9), (1, 130, 1, 67), (2, 1, 6, 7), (2, 6, 1, 1), (0, 3, 4, 5), (2, 3, 0, 5)],
    *[(2, 16, 4, 5, 8), (1, 67, 3, 5, 13), (5, 3, 1, 1, 70), (1, 4, 8, 8, 8)],
]


def lying(x, how):
    """The same values: contiguous, channels_last, a slice, transposed, expanded, off a multiple of 16 bytes."""
    if how == "channels_last":
        return x.contiguous(memory_format=FORMATS[x.dim()])
    if how == "slice":
        return torch.cat((x, x), 1)[:, x.shape[1] :]
    if how == "transposed":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if how == "expanded":
        return x[:, :1].expand(x.shape)
    if how == "offset":
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    return x


@pytest.mark.parametrize("how", ["contiguous", "channels_last", "slice", "transposed", "expanded", "offset"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_strides(shape, dtype, how, device):
    x = lying(torch.randn(shape).to(device, dtype), how)
    for last, form in ((True, FORMATS[x.dim()]), (False, torch.contiguous_format)):
        y = OPS.in_format(x, last)
        assert torch.equal(y, x)
        assert y.stride() == torch.empty(shape, memory_format=form).stride()
        assert y.data_ptr() != x.data_ptr() or not y.numel()


@pytest.mark.parametrize("how", ["contiguous", "channels_last", "slice", "transposed", "expanded", "offset"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [*SHAPES, (65, 40, 3, 3, 3), (3, 64, 2, 2, 2), (2, 131, 7, 9), (2, 70, 63, 1)])
def test_another_dtype(shape, dtype, how, device):
    """Each value is rounded once, as `to` rounds it; infinities and NaN stay, what half precision has no number for."""
    values = torch.randn(shape) * 10 ** torch.empty(shape).uniform_(-9, 6)
    values.view(-1)[:3] = torch.tensor([float("inf"), float("nan"), -0.0])[: values.numel()]
    x = lying(values.to(device, dtype), how)
    for to in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for last, form in ((True, FORMATS[x.dim()]), (False, torch.contiguous_format)):
            y = OPS.in_format(x, last, to)
            torch.testing.assert_close(y, x.to(to), rtol=0, atol=0, equal_nan=True)
            assert torch.equal(y.signbit(), x.to(to).signbit()) or y.isnan().any()
            assert y.stride() == torch.empty(shape, memory_format=form).stride()
            assert y.data_ptr() != x.data_ptr() or not y.numel()


@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.bfloat16])
def test_gradient_of_another_dtype(to, device):
    """It comes back in the dtype of x, and lies as x does."""
    x = torch.randn(3, 32, 4, 5, device=device, requires_grad=True)
    dy = torch.randn(3, 32, 4, 5, device=device).to(to)
    (dx,) = torch.autograd.grad(OPS.in_format(x, True, to), x, dy.contiguous(memory_format=torch.channels_last))
    assert dx.dtype is torch.float32
    assert dx.is_contiguous()
    assert torch.equal(dx, dy.float())


def test_gradient(device):
    x = torch.randn(2, 5, 6, 7, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: OPS.in_format(x, True), x)
    assert torch.autograd.gradgradcheck(lambda x: OPS.in_format(x, True) ** 2, x)
    (dx,) = torch.autograd.grad(OPS.in_format(x, True).sum(), x)
    assert dx.is_contiguous()


@pytest.mark.parametrize(
    ("x", "message"),
    [(torch.zeros(3, 4, 5), "4 or 5 dimensions"), (torch.zeros(1, 2, 3, 4, dtype=torch.int32), "dtype")],
)
def test_what_it_refuses(x, message, device):
    with pytest.raises(RuntimeError, match=message):
        OPS.in_format(x.to(device), True)


def test_dtypes_that_it_refuses(device):
    with pytest.raises(RuntimeError, match="dtype is int32, expected float32"):
        OPS.in_format(torch.zeros(1, 2, 3, 4, device=device), True, torch.int32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
def test_large_tensors_of_a_model_in_channels_last_are_the_ops(grad, monkeypatch):
    """PyTorch's copy takes several times as long; what is small, and what lies so, is left alone."""
    called, op = [], OPS.in_format

    def noted(x, last, *dtype):
        called.append((tuple(x.shape), last))
        return op(x, last, *dtype)

    monkeypatch.setattr(layout.torch.ops.kgopt, "in_format", noted)
    original = Net().cuda()
    net = kgopt.optimize(copy.deepcopy(original), channels_last=True, measure=False)
    for size, moves in ((256, True), (8, False)):
        x, other = (torch.randn(1, 16, size, size, device="cuda").requires_grad_(grad) for _ in range(2))
        called.clear()
        with torch.set_grad_enabled(grad):
            y, expected = net(x), original(x)
        assert y.is_contiguous()
        assert called == ([((1, 16, size, size), True), ((1, 16, size, size), False)] if moves else [])
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
        if grad:
            for model in (net, original):
                model.zero_grad()
            ours, theirs = (torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]) for m in (net, original))
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)
        called.clear()
        net(other.contiguous(memory_format=torch.channels_last))
        assert called == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [4, 8, 16, 24, 36, 40, 48, 56, 72, 88, 96, 104, 320, 1000])
def test_large_tensors_through_registers(channels, dtype):
    """Blocks of a warp that come out even and that do not, positions that are whole vectors and that are not."""
    for samples, width in ((1, 128), (2, 129), (3, 130)):
        height = 2**21 // (samples * channels * width) + 3
        x = torch.randint(-(2**15), 2**15, (samples, channels, height, width), dtype=torch.int16, device="cuda")
        x = (x.to(torch.float32) if dtype is torch.float32 else x.view(dtype).nan_to_num()).contiguous()
        for lies in (x, x.contiguous(memory_format=torch.channels_last)):
            y = OPS.in_format(lies, lies is x)
            assert y.is_contiguous(memory_format=torch.channels_last if lies is x else torch.contiguous_format)
            assert torch.equal(y, x)
