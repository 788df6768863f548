"""Scale and shift for each position behind norms in the code of modules, perhaps of an upsampled map: one op."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt.rewrite.norms import sites
from optimize_pairs import pair
from tolerances import assert_as_good_as_torch

C, Z = 8, 3

pytestmark = pytest.mark.usefixtures("ours")


@pytest.fixture
def done(monkeypatch):
    """What was computed as one op: the maps' sizes, and the activation."""
    found = []
    op = sites._group_norm_maps

    def watched(x, moments, scale, shift, *rest):
        found.append((tuple(scale.shape[2:]), tuple(shift.shape[2:]), rest[-1]))
        return op(x, moments, scale, shift, *rest)

    monkeypatch.setattr(sites, "_group_norm_maps", watched)
    return found


class Block(nn.Module):
    """What every form has."""

    def __init__(self, kernel=1):
        super().__init__()
        self.norm = nn.GroupNorm(2, C)
        self.conv_y = nn.Conv2d(Z, C, kernel, padding=kernel // 2)
        self.conv_b = nn.Conv2d(Z, C, kernel, padding=kernel // 2)


class SpatialNorm(Block):
    def forward(self, f, zq):
        f_size = f.shape[-2:]
        zq = F.interpolate(zq, size=f_size, mode="nearest")
        norm_f = self.norm(f)
        new_f = norm_f * self.conv_y(zq) + self.conv_b(zq)
        return new_f


class Named(Block):
    def forward(self, f, zq):
        large = F.interpolate(zq, scale_factor=f.shape[-1] // zq.shape[-1])
        scale = self.conv_y(large)
        shift = self.conv_b(large)
        f = self.norm(f)
        f = f * scale
        f = f + shift
        return F.silu(f)


class Addcmul(Block):
    def forward(self, f, zq):
        zq = F.interpolate(zq, f.shape[2:])
        return torch.relu(torch.addcmul(self.conv_b(zq), self.norm(f), self.conv_y(zq)))


class InPlace(Block):
    def forward(self, f, zq):
        zq = F.interpolate(zq, f.shape[2:])
        scale, shift = self.conv_y(zq), self.conv_b(zq)
        h = self.norm(f)
        h *= scale
        h += shift
        return h


class Guided(Block):
    """A map that is read in another way, too."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(Z, Z, 3, padding=1)
        self.add_conv = True

    def forward(self, f, zq):
        zq = F.interpolate(zq, size=f.shape[2:], mode="nearest")
        if self.add_conv:
            zq = self.conv(zq)
        h = self.norm(f)
        return h * self.conv_y(zq) + self.conv_b(zq)


class Spade(Block):
    """``1 + gamma``, of convolutions that look at neighbours."""

    def __init__(self):
        super().__init__(3)

    def forward(self, x, segmap):
        normalized = self.norm(x)
        segmap = F.interpolate(segmap, size=x.size()[2:], mode="nearest")
        gamma = self.conv_y(segmap)
        beta = self.conv_b(segmap)
        return normalized * (1 + gamma) + beta


class NormedSpade(Block):
    """Scale and shift end in norms themselves, one of which is read inside of a sum."""

    def __init__(self):
        super().__init__(3)
        self.gamma = nn.Sequential(self.conv_y, nn.InstanceNorm2d(C))
        self.beta = nn.Sequential(self.conv_b, nn.InstanceNorm2d(C))

    def forward(self, x, segmap):
        normalized = self.norm(x)
        segmap = F.interpolate(segmap, size=x.size()[2:], mode="nearest")
        gamma = self.gamma(segmap)
        beta = self.beta(segmap)
        out: torch.Tensor = normalized * (1 + gamma) + beta
        return out


class FactorAlone(Block):
    def forward(self, f, zq):
        zq = F.interpolate(zq, size=f.shape[2:])
        return F.silu(self.norm(f) * self.conv_y(zq))


class Written(Block):
    """The small tensor changes before the large one is read."""

    def forward(self, f, zq):
        large = F.interpolate(zq, size=f.shape[2:])
        zq.add_(1)
        return self.norm(f) * self.conv_y(large) + self.conv_b(large)


class Kept(Block):
    def forward(self, f, zq):
        zq = F.interpolate(zq, size=f.shape[2:])
        y = self.norm(f) * self.conv_y(zq) + self.conv_b(zq)
        self.kept = zq
        return y


def in_place(x):
    return F.relu(x, inplace=True)


class WrittenByFunction(Block):
    def forward(self, f, zq):
        large = F.interpolate(zq, size=f.shape[2:])
        other = in_place(zq)
        return self.norm(f) * self.conv_y(large) + self.conv_b(large) + other.mean()


class Linear(Block):
    def forward(self, f, zq):
        zq = F.interpolate(zq, size=f.shape[2:], mode="bilinear")
        return self.norm(f) * self.conv_y(zq) + self.conv_b(zq)


class Resnet(nn.Module):
    """The activation is in another module than the norm."""

    def __init__(self, norm=SpatialNorm):
        super().__init__()
        self.norm1 = norm()
        self.nonlinearity = nn.SiLU()
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x, zq):
        h = self.norm1(x, zq)
        h = self.nonlinearity(h)
        return self.conv(h)


class NormedResnet(Resnet):
    def __init__(self):
        super().__init__(NormedSpade)


SMALL, LARGE = (3, 2), (6, 8)
FORMS = {
    SpatialNorm: [(SMALL, SMALL, "none")],
    Addcmul: [(SMALL, SMALL, "relu")],
    InPlace: [(LARGE, LARGE, "none")],
    Guided: [(LARGE, LARGE, "none")],
    Spade: [(LARGE, LARGE, "none")],
    Resnet: [(SMALL, SMALL, "silu")],
    NormedSpade: [(LARGE, LARGE, "none")],
    NormedResnet: [(LARGE, LARGE, "silu")],
    FactorAlone: [],
    Written: [(LARGE, LARGE, "none")],
    WrittenByFunction: [(LARGE, LARGE, "none")],
    Kept: [(LARGE, LARGE, "none")],
    Linear: [(LARGE, LARGE, "none")],
}


def inputs(dtype=torch.float64, small=SMALL):
    return torch.randn(2, C, *LARGE, dtype=dtype), torch.randn(2, Z, *small, dtype=dtype)


@pytest.mark.parametrize("cls", FORMS)
def test_forms(cls, done):
    model, original = pair(cls)
    args = inputs()
    with torch.no_grad():
        torch.testing.assert_close(model(*map(torch.clone, args)), original(*map(torch.clone, args)))
    assert done == FORMS[cls]
    done.clear()
    out, expected = model(*map(torch.clone, args)), original(*map(torch.clone, args))  # with gradients
    torch.testing.assert_close(out, expected)
    for mine, theirs in zip(
        torch.autograd.grad(out.sum(), list(model.parameters()), allow_unused=True),
        torch.autograd.grad(expected.sum(), list(original.parameters()), allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
    assert not done


def test_named_maps(done):
    model, original = pair(Named)
    x, zq = torch.randn(2, C, 6, 6).double(), torch.randn(2, Z, 2, 2).double()
    with torch.no_grad():
        torch.testing.assert_close(model(x, zq), original(x, zq))
    assert done == [((2, 2), (2, 2), "silu")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_as_good_as_torch(dtype, channels_last, done):
    model, original = pair(Resnet, dtype)
    args = inputs(dtype)
    if channels_last:
        model = kgopt.optimize(model, measure=False, channels_last=True)
    with torch.no_grad():
        exact = copy.deepcopy(original).double()(*(t.double() for t in args))
        assert_as_good_as_torch(model(*args), original(*args), exact)
    assert len(done) == 1


@pytest.mark.parametrize("small", [(6, 8), (4, 3)], ids=str)
def test_what_is_no_repetition_is_pytorchs(small, done):
    model, original = pair(SpatialNorm)
    args = inputs(small=small)
    with torch.no_grad():
        torch.testing.assert_close(model(*args), original(*args), rtol=0 if small == (4, 3) else 1e-7, atol=1e-12)
    assert done == [(LARGE, LARGE, "none")]


class ScaleFirst(Block):
    def forward(self, f, zq):
        zq = F.interpolate(zq, size=f.shape[-2:])
        return self.conv_y(zq) * self.norm(f) + self.conv_b(zq)


def test_maps_in_another_format_decide_the_results(done):
    """Of a contiguous f the op's result is contiguous. PyTorch's takes the format of the map, which comes first."""
    model, original = pair(ScaleFirst, train=False)
    f, zq = inputs()
    zq = zq.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        y, expected = model(f, zq), original(f, zq)
    torch.testing.assert_close(y, expected)
    assert y.stride() == expected.stride()
    assert not done


def test_autocast_is_pytorchs(done):
    model, original = pair(SpatialNorm, torch.float32)
    args = inputs(torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = model(*args), original(*args)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
    assert not done


def test_a_hook_sees_the_upsampled_map(done):
    model, original = pair(SpatialNorm)
    args, seen = inputs(), []
    model.conv_y.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.no_grad():
        torch.testing.assert_close(model(*args), original(*args))
    assert torch.equal(seen[0], F.interpolate(args[1], size=LARGE))


@pytest.mark.parametrize("shape", [(1, C, *LARGE), (2, 1, *LARGE), (C, 1, 1)], ids=str)
def test_operands_that_broadcast(shape, done):
    class Given(Block):
        def forward(self, x, scale, shift):
            return self.norm(x) * scale + shift

    original = Given().double()
    model = kgopt.optimize(copy.deepcopy(original), measure=False)
    x, scale, shift = (torch.randn(sizes).double() for sizes in ((2, C, *LARGE), shape, (2, C, *LARGE)))
    with torch.no_grad():
        torch.testing.assert_close(model(x, scale, shift), original(x, scale, shift))
    assert not done


@pytest.mark.parametrize("cls", [SpatialNorm, Named, Addcmul, Resnet])
def test_compiled_code_is_one_graph(cls, done):
    model, original = pair(cls)
    args = torch.randn(2, C, 6, 6).double(), torch.randn(2, Z, 2, 2).double()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), original(*args))
    assert not done
