"""Norms over channels in the code of others: found by what they compute, fused, and left alone where they differ."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt

C = 6

pytestmark = pytest.mark.usefixtures("ours")


class Base(nn.Module):
    def __init__(self, dims=2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(C, *[1] * dims))
        self.bias = nn.Parameter(torch.randn(C, *[1] * dims))
        self.flat = None
        self.scale = C**0.5
        self.eps = 1e-3


class Wan(Base):
    def forward(self, x):
        return F.normalize(x, dim=1) * self.scale * self.weight + self.bias


class WanCast(nn.Module):
    """As diffusers.models.autoencoders.autoencoder_kl_wan.WanRMS_norm."""

    def __init__(self, bias=False) -> None:
        super().__init__()
        self.channel_first = True
        self.scale = C**0.5
        self.gamma = nn.Parameter(torch.randn(C, 1, 1))
        self.bias = nn.Parameter(torch.randn(C, 1, 1)) if bias else 0.0

    def forward(self, x) -> torch.Tensor:
        cast = x.dtype in (torch.float16, torch.bfloat16) or any(t in str(x.dtype) for t in ("float4_", "float8_"))
        normalized = F.normalize(x.float() if cast else x, dim=(1 if self.channel_first else -1)).to(x.dtype)
        return normalized * self.scale * self.gamma + self.bias


class OtherOrder(Base):
    def forward(self, x):
        return self.bias + self.weight * (self.scale * F.normalize(x, p=2, dim=1, eps=1e-6))


class NoParameters(nn.Module):
    def forward(self, x):
        return F.normalize(x, dim=1)


class ByLength(Base):
    def forward(self, x):
        return x / x.norm(dim=1, keepdim=True).clamp(min=1e-6) * self.weight


class PixelNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-8)


class Divided(Base):
    def forward(self, x):
        return x / torch.sqrt(torch.mean(x * x, dim=1, keepdim=True) + self.eps) * self.weight


class Sums(Base):
    def forward(self, x):
        return x * (x.pow(2).sum(1, keepdim=True) / C + self.eps).pow(-0.5) * self.weight + self.bias


class RootMeanSquare(Base):
    def forward(self, x):
        s = x.square().mean(1, True)
        y = x.mul(torch.rsqrt(s.add(self.eps)))
        return torch.add(torch.mul(self.weight[None], y), self.bias.unsqueeze(0))


class FloatAndBack(Base):
    def forward(self, x):
        dtype = x.dtype
        u = x.to(torch.promote_types(dtype, torch.float32)) if dtype is torch.float16 else x
        return (u * torch.rsqrt(u.pow(2).mean(1, keepdim=True) + self.eps)).type_as(x) * self.weight


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(C))
        self.bias = nn.Parameter(torch.randn(C))
        self.eps = 1e-3
        self.shape = (C,)


class LayerNorm2d(Flat):
    """As the LayerNorm2d of ConvNeXt and of segment-anything."""

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ByVariance(Flat):
    def forward(self, x):
        v = x.var(dim=1, keepdim=True, unbiased=False)
        return (x - x.mean(dim=1, keepdim=True)) * (v + self.eps).rsqrt() * self.weight.view(1, -1, 1, 1)


class Unbiased(Flat):
    def forward(self, x):
        v = x.var(dim=1, keepdim=True)
        return (x - x.mean(dim=1, keepdim=True)) / (v + self.eps) ** 0.5 + self.bias.reshape(1, -1, 1, 1)


class Permuted(Flat):
    """As those of timm, torchvision and transformers."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Moved(Flat):
    def forward(self, x):
        return F.layer_norm(x.movedim(1, -1), self.shape, self.weight, self.bias, self.eps).movedim(-1, 1)


class MovedRms(Flat):
    def forward(self, x):
        return F.rms_norm(x.transpose(1, -1), self.shape, self.weight, self.eps).transpose(1, -1).contiguous()


class Inherited(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(C)

    def forward(self, features):
        return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Helped(Flat):
    def forward(self, x):
        return self._scaled(_normalized(x, self.eps))

    def _scaled(self, x):
        return x * self.weight[..., None, None]


def _normalized(x, eps):
    if x.dtype is torch.bool:
        raise TypeError("no numbers")
    return x * torch.rsqrt(x.pow(2).mean(dim=1, keepdim=True) + eps)


FOUND = {
    cls: kind
    for kind, classes in {
        "l2": (Wan, WanCast, OtherOrder, NoParameters, ByLength),
        "rms": (PixelNorm, Divided, Sums, RootMeanSquare, FloatAndBack, MovedRms, Helped),
        "layer": (LayerNorm2d, ByVariance, Unbiased, Permuted, Moved, Inherited),
    }.items()
    for cls in classes
}


class Net(nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, C, 1)
        self.norm = norm
        self.act = nn.SiLU()
        self.last = nn.Sequential(nn.Conv2d(C, C, 1), copy.deepcopy(norm), nn.GELU())

    def forward(self, x):
        h = self.conv(x)
        h = self.norm(h)
        h = self.act(h)
        return self.last(h)


def grads(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return [y.detach(), *found]


def close(ours, theirs, bound=1e-9):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert a.dtype is b.dtype
        assert a.shape == b.shape
        assert (a - b).abs().max() <= bound * (1 + b.abs().max())


def pair(norm):
    torch.manual_seed(0)
    model = Net(norm).double()
    return model, kgopt.optimize(copy.deepcopy(model), measure=False)


X = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cls", FOUND, ids=lambda cls: cls.__name__)
def test_found_and_fused(cls, emitted):
    model, fused = pair(cls())
    theirs = grads(model, X)
    close(grads(fused, X), theirs)
    assert [(chain.norm, chain.post) for chain in emitted] == [(FOUND[cls], "silu"), (FOUND[cls], "gelu")]
    label = "LayerNorm" if FOUND[cls] == "layer" else "RMSNorm"
    rows = kgopt.report(fused).sites
    assert [row.kind for row in rows] == [f"{label} → silu", f"{label} → gelu"]
    assert [row.became for row in rows] == ["channel_norm(act=silu)", "channel_norm(act=gelu)"]
    with torch.no_grad():
        y = fused(X)
        assert y.stride() == model(X).stride()
        channels_last = X.to(memory_format=torch.channels_last)
        close([fused(channels_last)], [model(channels_last)])
    kgopt.restore(fused)
    emitted.clear()
    close(grads(fused, X), theirs, 0)
    assert not emitted
    assert type(fused.norm) is cls


class OtherDim(Base):
    def forward(self, x):
        return F.normalize(x, dim=2) * self.weight


class NoKeepdim(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1) + 1e-6)[:, None]


class TwoDims(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-6)


class Biased(nn.Module):
    def forward(self, x):
        return x / (x.norm(dim=1, keepdim=True) + 1e-3)


class OneNorm(nn.Module):
    def forward(self, x):
        return F.normalize(x, p=1, dim=1)


class PerRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 1, C, 1))

    def forward(self, x):
        return F.normalize(x, dim=1) * self.weight[:, :, : x.shape[2]]


class PerRowToo(PerRow):
    def forward(self, x):
        return F.normalize(x.repeat(1, 1, 2, 1)[:, :, :C], dim=1) * self.weight


class Counts(Wan):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class LooksAtSizes(Wan):
    def forward(self, x):
        return x if x.shape[2] > 100 else super().forward(x)


class LooksAtValues(Wan):
    def forward(self, x):
        return x if x.abs().max() < 1e-9 else super().forward(x)


class Constant(Wan):
    def forward(self, x):
        return F.normalize(x, dim=1) * torch.full((C, 1, 1), 2.0, dtype=x.dtype)


class OfStatistics(nn.Module):
    def forward(self, x):
        return torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6).expand_as(x)


class Detached(nn.Module):
    def forward(self, x):
        return x / x.detach().norm(dim=1, keepdim=True).clamp_min(1e-6)


class InPlace(nn.Module):
    def forward(self, x):
        s = torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)
        x *= s
        return x


class TwoResults(nn.Module):
    def forward(self, x):
        y = F.normalize(x, dim=1)
        return y.mul(1.0) if self.training else [y, x]


class Squared(Base):
    def forward(self, x):
        return F.normalize(x, dim=1) * self.weight * self.weight


class OfVariance(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.var(1, keepdim=True) + 1e-6)


class CastDown(Base):
    def forward(self, x):
        return (x.half().pow(2).mean(1, keepdim=True) + 1e-3).rsqrt().int() * x


NOT_FOUND = (
    *(OtherDim, NoKeepdim, TwoDims, Biased, OneNorm, PerRow, PerRowToo, Counts, LooksAtSizes, LooksAtValues),
    *(Constant, OfStatistics, Detached, InPlace, Squared, OfVariance, CastDown),
)


@pytest.mark.parametrize("cls", NOT_FOUND, ids=lambda cls: cls.__name__)
def test_not_found(cls, emitted):
    torch.manual_seed(0)
    model = nn.Sequential(cls(), nn.SiLU()).double()
    fused = kgopt.optimize(copy.deepcopy(model), measure=False)
    x = torch.randn(2, C, C, C, dtype=torch.float64)
    assert not kgopt.report(fused).sites
    close([fused(x.clone())], [model(x.clone())], 0)
    assert not emitted


class SumOfSquares(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).sum(1, keepdim=True) + 0.1) * (2 * self.weight) - 3 * self.bias


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e-7])
@pytest.mark.parametrize("cls", [SumOfSquares, NoParameters, ByLength, PixelNorm, LayerNorm2d, Unbiased, MovedRms])
def test_numbers_beside_the_norm(cls, scale, emitted):
    """What the code multiplies with, and its eps in whatever unit, are those of the op."""
    model, fused = pair(cls())
    x = torch.randn(2, C, 7, 3, dtype=torch.float64) * scale
    x[0, :, 1] = 0
    close(grads(fused.norm, x), grads(model.norm, x), 1e-9)
    assert len(emitted) == 1


def norm_and_act(norm):
    torch.manual_seed(0)
    model = nn.Sequential(norm, nn.SiLU()).double()
    return model, kgopt.optimize(copy.deepcopy(model), measure=False)


def both(model, fused, change, x=None):
    """After the same change to both they agree; what ran on kgopt is up to the caller."""
    for m in (model, fused):
        change(m[0])
    x = torch.randn(2, C, 3, 4, dtype=torch.float64) if x is None else x
    close([fused(x)], [model(x)])


def set_attribute(name, value):
    return lambda m: setattr(m, name, value)


CHANGES = {
    "scale": set_attribute("scale", 3.0),
    "an int": set_attribute("scale", 2),
    "scale as a tensor": set_attribute("scale", torch.tensor(3.0, dtype=torch.float64)),
    "no bias": lambda m: (delattr(m, "bias"), setattr(m, "bias", 0.0)),
    "a new weight": lambda m: setattr(m, "weight", nn.Parameter(torch.full((C, 1, 1), 2.0, dtype=torch.float64))),
    "a weight of another shape": lambda m: setattr(m, "weight", nn.Parameter(torch.full((1, 3, 4), 2.0).double())),
    "a weight that is hidden": lambda m: m.__dict__.update(weight=torch.full((C, 1, 1), 2.0, dtype=torch.float64)),
    "forward on the instance": lambda m: m.__dict__.update(forward=lambda x: x + 1),
    "a hook": lambda m: m.register_forward_hook(lambda m, a, y: y * 2),
    "a hook before": lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * 2 + 1,)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_afterwards_counts(name):
    model, fused = norm_and_act(Wan())
    both(model, fused, lambda m: None)
    both(model, fused, CHANGES[name])


def test_a_new_scale_runs_on_kgopt_again(emitted):
    model, fused = norm_and_act(Wan())
    both(model, fused, set_attribute("scale", 3.0))
    assert len(emitted) == 1


@pytest.mark.parametrize("place", [(F, "normalize"), (torch.Tensor, "__mul__"), (torch.Tensor, "add")])
def test_patched_functions_run(place, monkeypatch):
    model, fused = norm_and_act(RootMeanSquare() if place[1] == "add" else Wan())
    genuine = getattr(*place)
    x = torch.randn(2, C, 3, 4, dtype=torch.float64)
    before = fused(x)
    monkeypatch.setattr(*place, lambda *args, **kwargs: genuine(*args, **kwargs) + 1)
    y = fused(x)
    assert not torch.equal(before, y)
    close([y], [model(x)])


def test_patched_classes_and_helpers_run(monkeypatch):
    model, fused = norm_and_act(Helped())
    x = torch.randn(2, C, 3, 4, dtype=torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(Helped, "_scaled", lambda self, x: x * 5)
        close([fused(x)], [model(x)])
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "_normalized", lambda x, eps: x * 7)
        close([fused(x)], [model(x)])
    with monkeypatch.context() as patch:
        patch.setattr(Helped, "forward", lambda self, x: x * 9)
        close([fused(x)], [model(x)])
    close([fused(x)], [model(x)])


def test_other_inputs_run_the_code_itself(emitted):
    model, fused = norm_and_act(WanCast())
    for shape in ((C, 3, 4), (2, C, 0, 4), (2, C)):
        x = torch.randn(shape, dtype=torch.float64)
        assert torch.equal(fused(x), model(x))
    emitted.clear()
    whole = torch.ones(2, C, 3, 4, dtype=torch.int64)
    with pytest.raises(RuntimeError) as theirs:
        model(whole)
    with pytest.raises(RuntimeError, match=r".*") as mine:
        fused(whole)
    assert str(mine.value) == str(theirs.value)
    assert not emitted
    close([fused[0](x=torch.ones(2, C, 3, 4).double())], [model[0](torch.ones(2, C, 3, 4).double())])


def test_a_value_that_is_read_twice_stays(emitted):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Wan()

        def forward(self, x):
            h = self.norm(x)
            return F.silu(h) + h

    model = Twice().double()
    fused = kgopt.optimize(copy.deepcopy(model), measure=False)
    x = torch.randn(2, C, 3, 4, dtype=torch.float64)
    close(grads(fused, x), grads(model, x))
    (row,) = kgopt.report(fused).sites
    assert (row.kind, row.became, row.reason) == ("RMSNorm", "channel_norm", "its result is read 2 times")
    assert [chain.post for chain in emitted] == ["none"]


def test_names_that_are_left_out():
    torch.manual_seed(0)
    model = kgopt.optimize(Net(Wan()), measure=False, exclude="norm")
    row, other = kgopt.report(model).sites
    assert row.reason == "in `exclude`"
    assert not row.became
    assert type(model.norm) is Wan
    assert other.became
    kgopt.optimize(model, measure=False)
    assert [r.kind for r in kgopt.report(model).sites] == ["RMSNorm → silu", "RMSNorm → gelu"]


@pytest.mark.parametrize("cls", [WanCast, Permuted, PixelNorm, LayerNorm2d])
def test_copies_pickles_and_state(cls, emitted):
    model, fused = pair(cls())
    assert list(fused.state_dict()) == list(model.state_dict())
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), kgopt.optimize(fused, measure=False)):
        emitted.clear()
        close(grads(other, X), grads(model, X))
        assert len(emitted) == 2


def test_second_derivatives():
    for cls in (Wan, Permuted, PixelNorm):
        model, fused = pair(cls())
        found = []
        for m in (model, fused):
            x = X.clone().requires_grad_()
            (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(g.square().sum(), (x, *m.parameters()), allow_unused=True))
        close(found[1], found[0])


@pytest.mark.parametrize("cls", [WanCast, Permuted, PixelNorm, LayerNorm2d])
def test_compiled(cls):
    model, fused = pair(cls())
    found = []

    def backend(graph, inputs):
        found.extend(str(n.target) for n in graph.graph.nodes)
        return graph

    compiled = torch.compile(fused, backend=backend, fullgraph=True)
    close(grads(compiled, X), grads(model, X))
    assert sum("channel_norm" in name for name in found) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", [WanCast, Permuted, FloatAndBack, LayerNorm2d])
def test_half_precision(cls, dtype, emitted):
    torch.manual_seed(0)
    model = nn.Sequential(cls(), nn.SiLU())
    fused = kgopt.optimize(copy.deepcopy(model), measure=False).to(dtype)
    exact, model = copy.deepcopy(model).to(dtype).double(), model.to(dtype)
    x = torch.randn(2, C, 9, 9, dtype=dtype)
    y, theirs, reference = fused(x), model(x), exact(x.double())
    assert y.dtype is theirs.dtype
    assert len(emitted) == 1
    assert (y - reference).norm() <= 2 * (theirs - reference).norm() + 1e-3 * reference.norm()


def test_a_result_of_another_dtype_stays_pytorchs(emitted):
    """A float32 gamma makes a float32 result of a bfloat16 input, which the op would not."""
    torch.manual_seed(0)
    model = nn.Sequential(WanCast(), nn.SiLU())
    fused = kgopt.optimize(copy.deepcopy(model), measure=False)
    x = torch.randn(2, C, 3, 4, dtype=torch.bfloat16)
    close([fused(x)], [model(x)], 0)
    assert not emitted


class OnlyFloat(nn.Module):
    """As diffusers' RMSNorm."""

    def forward(self, x):
        return (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(1, keepdim=True) + 1e-6)).to(x.dtype)


def test_float64_that_the_code_rounds_stays_rounded(emitted):
    model = nn.Sequential(OnlyFloat(), nn.SiLU())
    fused = kgopt.optimize(copy.deepcopy(model), measure=False)
    x = torch.randn(2, C, 3, 4, dtype=torch.float64)
    assert torch.equal(fused(x), model(x))
    assert not emitted
    close([fused(x.float())], [model(x.float())], 1e-5)
    assert len(emitted) == 1
