"""Norms that compute in float32 whatever they are given, and give that dtype back (guided diffusion's GroupNorm32)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt


class Norm(nn.GroupNorm):
    pass


class Cast(Norm):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class CastAll(Norm):
    def forward(self, x):
        y = F.group_norm(x.float(), self.num_groups, self.weight.float(), self.bias.float(), self.eps)
        return y.type_as(x)


class CastAct(Norm):
    """An activation in float32, and half precision at last."""

    def forward(self, x):
        y = F.silu(super().forward(x.to(torch.float32)))
        return y.to(x.dtype)


class Wide(Norm):
    """Gives float32."""

    def forward(self, x):
        x = x.float()
        return super().forward(x).type(x.dtype)


class Early(Norm):
    """Its dtype is that of what was given, whatever is assigned afterwards."""

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        x = super().forward(x)
        return x.to(dtype)


class CastMul(Norm):
    """A number behind the norm, in float32."""

    def forward(self, x):
        return (super().forward(x.float()) * 2).to(x.dtype)


class HalfNet(nn.Module):
    """As guided diffusion has it: convolutions in half precision, norms in float32."""

    def __init__(self, norm, **options):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.block = nn.Sequential(norm(2, 8, **options), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.norm = norm(2, 8, **options)

    def forward(self, x, scale):
        h = self.block(self.first(x))
        h = self.norm(h) * (1 + scale) + 1
        return self.second(h)


def in_half(norm, dtype, **options):
    torch.manual_seed(0)
    original = HalfNet(norm, **options).to(dtype)
    for m in original.modules():
        if isinstance(m, nn.GroupNorm):
            m.float()
    return kgopt.optimize(copy.deepcopy(original), measure=False), original


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (Cast, ["silu", "scaled none"]),
        (CastAll, ["silu", "scaled none"]),
        (Early, ["silu", "scaled none"]),
        (CastMul, ["mul(2.0)", "mul(2.0)"]),
        (CastAct, ["silu", "silu"]),
    ],
)
@pytest.mark.parametrize("train", [False, True])
def test_norms_that_compute_in_float32(norm, expected, dtype, train, ran):
    """Half precision was left to PyTorch, with two copies of its size around each norm."""
    net, original = in_half(norm, dtype)
    x, scale = torch.randn(2, 4, 9, 7).to(dtype).requires_grad_(), torch.randn(2, 8, 1, 1).to(dtype)
    found = []
    for model in (net, original):
        model.train(train)
        y = model(x, scale)
        found.append([y, *torch.autograd.grad(y.float().square().mean(), [x, *model.parameters()])])
    assert ran == expected
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype is theirs.dtype
        size = theirs.float().abs().max()
        assert (ours.float() - theirs.float()).abs().max() <= 0.03 * size + 1e-3


def test_float32_that_stays_float32(ran):
    """A convolution behind it refuses that, as before."""
    for model in in_half(Wide, torch.bfloat16):
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 4, 5, 5).bfloat16(), torch.ones(1, 8, 1, 1).bfloat16())
    assert ran == []


def test_parameters_that_pytorch_refuses(ran):
    """float32 beside weights in half precision."""
    for model in in_half(Cast, torch.bfloat16):
        model.bfloat16()
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 4, 5, 5).bfloat16(), torch.ones(1, 8, 1, 1).bfloat16())
    assert ran == []
    net, original = in_half(CastAll, torch.bfloat16)
    x, scale = torch.randn(1, 4, 5, 5).bfloat16(), torch.ones(1, 8, 1, 1).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(net.bfloat16()(x, scale), original.bfloat16()(x, scale), rtol=0.03, atol=0.03)
    assert ran == ["silu", "scaled none"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("norm", [Cast, CastAct])
def test_under_autocast(norm, device, ran):
    """Half precision at last, whatever autocast has its norm give."""
    torch.manual_seed(0)
    original = HalfNet(norm).to(device).eval()
    net = kgopt.optimize(copy.deepcopy(original), measure=False)
    x, scale = torch.randn(2, 4, 9, 7, device=device), torch.randn(2, 8, 1, 1, device=device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        for first in (net.first, original.first):
            assert first(x).dtype is torch.bfloat16
        h = original.first(x)
        assert net.norm(h).dtype is original.norm(h).dtype is torch.bfloat16
        torch.testing.assert_close(net.block[:2](h), original.block[:2](h), rtol=0.03, atol=0.03)
        torch.testing.assert_close(net(x, scale), original(x, scale), rtol=0.03, atol=0.03)
    assert ran


def test_what_the_model_writes_to_is_kept():
    """PyTorch keeps the float32 copy for the backward: the model may change what was copied."""

    class Writes(HalfNet):
        def forward(self, x, scale):
            h = self.first(x)
            y = self.block[0](h)
            h.mul_(2)
            return self.second(y + h)

    torch.manual_seed(0)
    original = Writes(Cast).bfloat16()
    original.block[0].float()
    net = kgopt.optimize(copy.deepcopy(original), measure=False)
    x = torch.randn(2, 4, 9, 7).bfloat16()
    for _ in range(2):
        grads = []
        for model in (net, original):
            y = model(x, None)
            grads.append(torch.autograd.grad(y.float().square().mean(), model.first.weight)[0].float())
        torch.testing.assert_close(*grads, rtol=0.05, atol=0.01)


def test_compiled(ran):
    net, original = in_half(Cast, torch.bfloat16)
    x, scale = torch.randn(2, 4, 9, 7).bfloat16(), torch.randn(2, 8, 1, 1).bfloat16()
    with torch.no_grad():
        y = torch.compile(net, backend="eager", fullgraph=True)(x, scale)
        torch.testing.assert_close(y, original(x, scale), rtol=0.03, atol=0.03)
