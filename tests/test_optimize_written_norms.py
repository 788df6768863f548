"""Instance norms and group norms that code writes out: found by what they compute, in modules and captured graphs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
import optimize_models as models
from kgopt.rewrite.formulas.interpret import recognize
from tolerances import assert_as_good_as_torch

C = 8
SHAPES = {4: (2, C, 6, 5), 5: (2, C, 3, 4, 5)}

pytestmark = pytest.mark.usefixtures("ours")


class Affine(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        shape = shape or (1, C, 1, 1)
        self.gamma, self.beta = (nn.Parameter(torch.randn(shape)) for _ in range(2))
        self.eps, self.groups = 1e-3, 4


class Variance(Affine):
    def forward(self, x):
        m = x.mean((2, 3), keepdim=True)
        v = x.var((2, 3), unbiased=False, keepdim=True)
        return (x - m) / torch.sqrt(v + self.eps) * self.gamma + self.beta


class Squares(nn.Module):
    """As in SimSwap."""

    def forward(self, x):
        x = x - torch.mean(x, (2, 3), True)
        squares = torch.mul(x, x)
        return x * torch.rsqrt(torch.mean(squares, (2, 3), True) + 1e-8)


class Power(Affine):
    def forward(self, x):
        m = torch.mean(x, dim=[-1, -2], keepdim=True)
        v = ((x - m) ** 2).mean(dim=[-2, -1], keepdim=True)
        return self.beta + self.gamma * ((x - m) * (v + self.eps) ** -0.5)


class Together(nn.Module):
    def forward(self, x):
        v, m = torch.var_mean(x, dim=(2, 3), keepdim=True, correction=0)
        return (x - m).div(v.add(1e-5).sqrt())


class Volumes(Affine):
    def __init__(self):
        super().__init__(C)

    def forward(self, x):
        m = x.mean(dim=(2, 3, 4), keepdim=True)
        v = (x - m).pow(2).mean(dim=(2, 3, 4), keepdim=True)
        x = (x - m) / (v + self.eps).sqrt()
        return x * self.gamma[:, None, None, None] + self.beta[:, None, None, None]


class Unflattened(nn.Module):
    """Reduced without ``keepdim``."""

    def forward(self, x):
        n, c = x.size()[:2]
        m = x.view(n, c, -1).mean(dim=2).view(n, c, 1, 1)
        v = x.view(n, c, -1).var(dim=2, unbiased=False).view(n, c, 1, 1)
        return (x - m.expand(x.size())) / (v + 1e-5).sqrt().expand_as(x)


class Indexed(nn.Module):
    def forward(self, x):
        u = x - x.flatten(2).mean(-1)[:, :, None, None]
        v = u.square().mean((2, 3)).unsqueeze(-1).unsqueeze(-1)
        return u * torch.rsqrt(v + 1e-5)


class OfLayers(nn.Module):
    def forward(self, x):
        return F.layer_norm(x, x.shape[1:], eps=1e-4)


class OfLayersBySample(Affine):
    """As MUNIT's, with the eps inside."""

    def forward(self, x):
        n = x.size(0)
        m = x.view(n, -1).mean(1).view(n, 1, 1, 1)
        v = ((x - m) ** 2).view(n, -1).mean(1).view(n, 1, 1, 1)
        return self.gamma * ((x - m) / torch.sqrt(v + self.eps)) + self.beta


class Groups(Affine):
    def forward(self, x):
        n, c, h, w = x.size()
        x = x.view(n, self.groups, -1)
        m, v = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        x = (x - m) / (v + self.eps).sqrt()
        return x.view(n, c, h, w) * self.gamma + self.beta


class GroupsOfVolumes(Affine):
    def __init__(self):
        super().__init__(1, C, 1, 1, 1)

    def forward(self, x):
        n, c = x.shape[:2]
        h = x.reshape(n, self.groups, c // self.groups, *x.shape[2:])
        h = (h - h.mean((2, 3, 4, 5), True)) * torch.rsqrt(h.var((2, 3, 4, 5), False, True) + self.eps)
        return h.reshape(x.shape) * self.gamma + self.beta


FOUND = {
    cls: dims
    for dims, classes in {
        4: (Variance, Squares, Power, Together, Unflattened, Indexed, OfLayers, OfLayersBySample, Groups),
        5: (Volumes, OfLayers, GroupsOfVolumes),
    }.items()
    for cls in classes
}
FOUND[OfLayers] = 4


class OtherDims(nn.Module):
    def forward(self, x):
        m = x.mean((2, 3), keepdim=True)
        return (x - m) / torch.sqrt(x.var((1, 2, 3), unbiased=False, keepdim=True) + 1e-5)


class OneDim(nn.Module):
    def forward(self, x):
        m = x.mean(2, keepdim=True)
        return (x - m) / torch.sqrt(x.var(2, unbiased=False, keepdim=True) + 1e-5)


class EpsOutside(nn.Module):
    def forward(self, x):
        m = x.mean((2, 3), keepdim=True)
        return (x - m) / (x.var((2, 3), unbiased=False, keepdim=True).sqrt() + 1e-5)


class WithoutMean(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean((2, 3), keepdim=True) + 1e-5)


class OfBatches(nn.Module):
    def forward(self, x):
        m = x.mean((0, 2, 3), keepdim=True)
        return (x - m) / torch.sqrt(x.var((0, 2, 3), unbiased=False, keepdim=True) + 1e-5)


class OtherMoment(nn.Module):
    """E[x^2] - m^2 loses digits, and is PyTorch's own business."""

    def forward(self, x):
        m = x.mean((2, 3), keepdim=True)
        return (x - m) / torch.sqrt(x.pow(2).mean((2, 3), keepdim=True) - m**2 + 1e-5)


class WrongWay(nn.Module):
    """The view has the channels' statistics beside other channels."""

    def forward(self, x):
        n, c = x.shape[:2]
        m = x.mean((2, 3)).view(n, c // 2, 2).mean(2, keepdim=True).expand(n, c // 2, 2).reshape(n, c, 1, 1)
        return (x - m) / torch.sqrt(x.var((2, 3), unbiased=False, keepdim=True) + 1e-5)


class Transposed(nn.Module):
    def forward(self, x):
        h = x.transpose(2, 3)
        m = h.mean((2, 3), keepdim=True)
        return (h - m) / torch.sqrt(h.var((2, 3), unbiased=False, keepdim=True) + 1e-5)


class ByPosition(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SHAPES[4][1:]))

    def forward(self, x):
        return F.layer_norm(x, x.shape[1:], self.weight)


NOT_FOUND = (OtherDims, OneDim, EpsOutside, WithoutMean, OfBatches, OtherMoment, WrongWay, Transposed, ByPosition)


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return F.silu(self.norm(x))


def made(cls, dims=4, dtype=torch.float64):
    torch.manual_seed(0)
    return Net(cls()).to(dtype), 2 * torch.randn(SHAPES[dims], dtype=dtype) + 0.5


def grads(net, x):
    x = x.clone().requires_grad_()
    y = net(x)
    return [y, *torch.autograd.grad(y.cos().sum(), [x, *net.parameters()])]


def close(ours, theirs, tolerance=1e-9):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("cls", FOUND, ids=lambda cls: cls.__name__)
def test_a_module_is_one_op_with_its_activation(cls, emitted):
    net, x = made(cls, FOUND[cls])
    model = kgopt.optimize(copy.deepcopy(net), measure=False)
    close(grads(model, x), grads(net, x))
    assert [chain.label for chain in emitted] == ["GroupNorm → silu"]
    assert [row.kind for row in kgopt.report(model).sites] == ["GroupNorm → silu"]
    more = torch.randn(3, C, *[4] * (FOUND[cls] - 2), dtype=torch.float64)
    close([model(more)], [net(more)])
    assert len(emitted) == 2


@pytest.mark.parametrize("cls", FOUND, ids=lambda cls: cls.__name__)
def test_in_captured_graphs(cls):
    net, x = made(cls, FOUND[cls])
    y, report = models.rewritten(net, x)
    close([y], [net(x)])
    kinds = {"GroupNorm → silu", "GroupNorm → scale → shift → silu"}
    assert len(report.sites) == 1
    assert report.sites[0].kind in kinds


@pytest.mark.parametrize("cls", NOT_FOUND, ids=lambda cls: cls.__name__)
def test_other_computations_are_pytorchs(cls, emitted):
    net, x = made(cls)
    model = kgopt.optimize(copy.deepcopy(net), measure=False)
    assert torch.equal(model(x), net(x))
    assert not emitted
    y, report = models.rewritten(net, x)
    close([y], [net(x)])
    assert not report.sites


@pytest.mark.parametrize("cls", [Variance, Groups, OfLayers, Unflattened], ids=lambda cls: cls.__name__)
def test_channels_last(cls, emitted):
    """What takes views of it, or copies it, is left to its own code."""
    net, x = made(cls)
    x = x.contiguous(memory_format=torch.channels_last)
    model = kgopt.optimize(copy.deepcopy(net), measure=False)
    if cls is Groups:
        with pytest.raises(RuntimeError, match="view"):
            model(x)
        return
    close([model(x)], [net(x)])
    assert bool(emitted) is (cls is Variance)


@pytest.mark.parametrize("cls", [Variance, Squares, Groups], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_as_accurate(cls, dtype, emitted):
    net, x = made(cls, dtype=dtype)
    model = kgopt.optimize(copy.deepcopy(net), measure=False)
    exact = copy.deepcopy(net).double()(x.double())
    assert_as_good_as_torch(model(x), net(x), exact)
    assert emitted


def test_one_value_is_pytorchs(emitted):
    net, _ = made(Variance)
    model = kgopt.optimize(copy.deepcopy(net), measure=False)
    x = torch.randn(2, C, 1, 1, dtype=torch.float64)
    close([model(x)], [net(x)])
    assert not emitted


def test_it_follows_its_module(emitted):
    """Its eps, its number of groups and its parameters may change."""
    net, x = made(Groups)
    model = kgopt.optimize(copy.deepcopy(net), measure=False)
    for change in ("eps", "groups", "gamma", "hook"):
        for m in (net, model):
            if change == "gamma":
                m.norm.gamma.data.mul_(2)
            elif change == "hook":
                m.norm.register_forward_hook(lambda module, inputs, y: y + 1)
            else:
                setattr(m.norm, change, {"eps": 0.5, "groups": 2}[change])
        close([model(x)], [net(x)])
    assert len(emitted) == 4


class Behind(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.act, self.style = norm(), nn.SiLU(), nn.Linear(C, 2 * C)


class Sum(Behind):
    def forward(self, x):
        return self.act(x + self.norm(x))


class Styled(Behind):
    def forward(self, x):
        scale, shift = self.style(x.mean((2, 3)))[:, :, None, None].chunk(2, 1)
        h = self.norm(x)
        h = h * (1 + scale) + shift
        return self.act(h)


class Both(Styled):
    def forward(self, x):
        scale, shift = self.style(x.mean((2, 3)))[:, :, None, None].chunk(2, 1)
        return self.act(x + (self.norm(x) * scale + shift))


class WrittenTo(Behind):
    """PyTorch's code keeps x without its mean, so x may be written to."""

    def forward(self, x):
        x = x * 1
        h = self.norm(x) * 2 + self.style.bias[:C, None, None]
        x += 1
        return self.act(h) + x


@pytest.mark.parametrize("norm", [Variance, Squares, Groups], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    ("cls", "what"), [(Sum, "sum silu"), (Styled, "scaled silu"), (Both, "scaled sum silu"), (WrittenTo, None)]
)
def test_what_follows_a_module(cls, what, norm, ran):
    torch.manual_seed(0)
    net = cls(norm).double()
    model = kgopt.optimize(copy.deepcopy(net), measure=False)
    x = torch.randn(SHAPES[4], dtype=torch.float64)
    may_train = cls is not WrittenTo or norm is Squares  # PyTorch's variance keeps x
    for _ in range(2 if may_train else 0):
        leaf = x.clone().requires_grad_()
        given = [leaf, *net.parameters()], [leaf, *model.parameters()]
        y, expected = model(leaf), net(leaf)
        close([y], [expected])
        theirs = torch.autograd.grad(expected.cos().sum(), given[0], allow_unused=True)
        torch.testing.assert_close(torch.autograd.grad(y.cos().sum(), given[1], allow_unused=True), theirs)
    with torch.no_grad():
        close([model(x)], [net(x)])
        assert what is None or set(ran) == {what}
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), net(x))


def mean_and_deviation(features, eps=1e-5):
    n, c = features.size()[:2]
    variance = features.view(n, c, -1).var(dim=2) + eps
    return features.view(n, c, -1).mean(dim=2).view(n, c, 1, 1), variance.sqrt().view(n, c, 1, 1)


def adain(content, style):
    """As in Huang and Belongie's code: the variance is the unbiased one."""
    size = content.size()
    style_mean, style_std = mean_and_deviation(style)
    content_mean, content_std = mean_and_deviation(content)
    normalized = (content - content_mean.expand(size)) / content_std.expand(size)
    return F.relu(normalized * style_std.expand(size) + style_mean.expand(size))


def styled(x, style):
    m, deviation = x.mean([2, 3], keepdim=True), (x.var([2, 3], keepdim=True, correction=0) + 1e-5).sqrt()
    gamma, beta = style.view(-1, 2, C, 1, 1).unbind(1)
    return F.leaky_relu(gamma * ((x - m) / deviation) + beta, 0.2)


def residual(x, other):
    m = x.mean([2, 3], keepdim=True)
    return F.relu((x - m) * torch.rsqrt((x - m).pow(2).mean([2, 3], keepdim=True) + 1e-5) + other)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (adain, "GroupNorm → scale → shift → relu"),
        (styled, "GroupNorm → scale → shift → leaky_relu(0.2)"),
        (residual, "GroupNorm → sum → relu"),
    ],
    ids=["adain", "styled", "residual"],
)
def test_what_follows_in_captured_graphs(function, kind):
    torch.manual_seed(0)
    x = torch.randn(SHAPES[4], dtype=torch.float64, requires_grad=True)
    other = torch.randn((2, 2 * C) if function is styled else SHAPES[4], dtype=torch.float64, requires_grad=True)
    y, report = models.rewritten(function, x, other)
    expected = function(x, other)
    close([y], [expected])
    close(torch.autograd.grad(y.cos().sum(), [x, other]), torch.autograd.grad(expected.cos().sum(), [x, other]))
    assert [row.kind for row in report.sites] == [kind]


def test_a_mean_that_something_else_reads():
    def code(x):
        m = x.mean((2, 3), keepdim=True)
        return (x - m) / torch.sqrt(x.var((2, 3), unbiased=False, keepdim=True) + 1e-5), m

    x = torch.randn(SHAPES[4], dtype=torch.float64)
    y, report = models.rewritten(code, x)
    close(y, code(x))
    assert not report.sites


def test_channels_last_in_graphs_keeps_its_format():
    x = torch.randn(SHAPES[4], dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    y, report = models.rewritten(residual, x, x + 1)
    close([y], [residual(x, x + 1)])
    assert report.sites


@pytest.mark.parametrize(
    ("scaled", "dtype"),
    [
        (lambda u, v: u / torch.sqrt(v), torch.float16),
        (lambda u, v: u * torch.rsqrt(v), torch.float32),
        (lambda u, v: u * (1 / v.sqrt()), torch.float32),
        (lambda u, v: u / v**0.5, torch.float32),
    ],
    ids=["sqrt", "rsqrt", "reciprocal", "power"],
)
@pytest.mark.parametrize("dims", [1, (2, 3)])
def test_dtypes_under_autocast(scaled, dtype, dims):
    """What the forward gives of half precision, where autocast computes some functions in float32, variances not."""

    class Norm(nn.Module):
        def forward(self, x):
            u = x - x.mean(self.dims, keepdim=True)
            return self.scaled(u, x.var(self.dims, unbiased=False, keepdim=True) + 1e-5)

    Norm.dims, Norm.scaled = dims, staticmethod(scaled)
    given = (4, C, 1, torch.float16, torch.device("cuda"), True)
    assert recognize(Norm(), *given, in_groups=dims != 1).formula.dtype is dtype


def test_inductor():
    net, x = made(Variance, dtype=torch.float32)
    compiled = torch.compile(net, backend="kgopt", options={"kgopt.always": True})
    for ours, theirs in zip(grads(compiled, x), grads(net, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
