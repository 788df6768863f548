"""Scale and shift by sample behind norms in the code of modules: one op, and what keeps its parts apart."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import kgopt
import optimize_pairs
from kgopt.rewrite.norms import sites
from modulated_models import (
    APART,
    FUSED,
    AroundSeveralValues,
    C,
    ChangesInput,
    Diffusers,
    Dropped,
    E,
    GuidedDiffusion,
    InOneExpression,
    Layers,
    Lucidrains,
    PerhapsReplaced,
    TwoNorms,
    TwoNormsBesideLayers,
    Wider,
)
from tolerances import assert_all_as_good

pytestmark = pytest.mark.usefixtures("ours")


@pytest.fixture
def done(monkeypatch):
    """What was computed as one op: with a factor? with a shift? and the activation."""

    def note(site, norm, x, factor, shift, act="none", *_):
        return factor is not None, shift is not None, act

    return optimize_pairs.note_sites(monkeypatch, run_modulated=note)


pair = functools.partial(optimize_pairs.pair, std=0.4)


def sample(dtype=torch.float64, n=3):
    return torch.randn(n, C, 6, 5, dtype=dtype), torch.randn(n, E, dtype=dtype)


def run(model, *given):
    """The result, and gradients of the inputs and the parameters."""
    given = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in given]
    y = model(*given)
    model.zero_grad()
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in given), *(p.grad for p in model.parameters())]


def compare(original, model, *given):
    # Of a float32 norm whose product is float64 the values are still float32's.
    close = {"rtol": 1e-4, "atol": 1e-5} if given[0].dtype is torch.float32 else {}
    for mine, right in zip(run(model, *given), run(original, *given), strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            torch.testing.assert_close(mine, right, **close)
    with torch.no_grad():
        torch.testing.assert_close(model(*given), original(*given), **close)


def _double(x, *_):
    x.mul_(2)


@pytest.mark.parametrize("cls", FUSED)
def test_one_op(cls, done):
    model, original = pair(cls)
    compare(original, model, *sample())
    assert done == FUSED[cls] * 2


@pytest.mark.parametrize("cls", APART)
def test_what_cannot_be_one_op(cls, done):
    dtype = torch.float32 if cls is Wider else torch.float64
    model, original = pair(cls, dtype)
    compare(original, model, *sample(dtype))
    assert not done


@pytest.mark.parametrize("cls", [*FUSED, *APART])
def test_compiled(cls, done):
    dtype = torch.float32 if cls is Wider else torch.float64
    model, original = pair(cls, dtype)
    given = sample(dtype)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=cls.__name__ != "Handled")
    torch.testing.assert_close(compiled(*given), original(*given), rtol=1e-5, atol=1e-5)
    assert done == FUSED.get(cls, [])


@pytest.mark.parametrize("cls", [GuidedDiffusion, Diffusers, Layers])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_good_as_pytorch(cls, dtype, done):
    model, original = pair(cls, dtype)
    given = sample(dtype)
    exact = run(copy.deepcopy(original).double(), *(t.double() for t in given))
    assert_all_as_good(run(model, *given), run(original, *given), exact, factor=3)  # convolutions have errors, too
    assert done == FUSED[cls]


def test_the_input_changes_in_between(done):
    model, original = pair(ChangesInput)
    given = sample()
    with torch.no_grad():
        torch.testing.assert_close(model(*given), original(*given))
    assert not done


@pytest.mark.parametrize("times", [0, 1])
@pytest.mark.parametrize("most", [-1e9, 1e9])
def test_a_value_that_may_be_replaced(times, most):
    """What a loop or a branch assigns, perhaps nothing assigns: what waited was given to code that takes tensors."""
    model, original = pair(PerhapsReplaced)
    for net in (model, original):
        net.times, net.most = times, most
    given = sample()
    with torch.no_grad():
        torch.testing.assert_close(model(*given), original(*given))


def test_without_a_scale_the_activation_joins_the_norm(done, monkeypatch):
    """One path of the code scales, the other does not."""
    chains = []
    run_site = sites.Site.run
    monkeypatch.setattr(
        sites.Site, "run", lambda self, *a, **k: (chains.append(self.chain.post), run_site(self, *a, **k))[1]
    )
    model, original = pair(Lucidrains)
    x, _ = sample()
    torch.testing.assert_close(model(x), original(x))
    assert chains == ["silu"]
    assert not done


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("cls", [TwoNorms, TwoNormsBesideLayers])
def test_either_norm(first, cls, done):
    model, original = pair(cls)
    original.first = model.first = first
    compare(original, model, *sample())
    assert done == FUSED[cls] * 2


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.GroupNorm(4, C, affine=False),
        lambda: nn.InstanceNorm2d(C),
        lambda: nn.InstanceNorm2d(C, affine=True),
        lambda: nn.GroupNorm(1, C, eps=0.1),
    ],
    ids=["no affine", "instance", "instance affine", "eps"],
)
def test_other_norms(norm, done):
    model, original = pair(lambda: Diffusers(norm=norm()))
    compare(original, model, *sample())
    assert done == FUSED[Diffusers] * 2


@pytest.mark.parametrize("n", [1, 3])
def test_channels_last(n, done):
    """Of one sample it is one op. Of more the channels of all are no channels of one, so the code runs as it stands."""
    model, original = pair(Diffusers)
    x, e = sample(n=n)
    x = x.contiguous(memory_format=torch.channels_last)
    compare(original, model, x, e)
    assert done == (FUSED[Diffusers] * 2 if n == 1 else [])
    assert model(x, e).stride() == original(x, e).stride()


@pytest.mark.parametrize("training", [True, False])
def test_dropout_in_between(training, done):
    model, original = pair(Dropped)
    for m in (original, model):
        m.drop.p = 0.5
        m.train(training)
    given = sample()
    results = []
    for m in (original, model):
        torch.manual_seed(5)
        results.append(m(*given))
    torch.testing.assert_close(*results)
    assert bool(done) is not training


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("where", ["to_scale", "to_shift"])
def test_hooks_of_layers_beside_either_norm(first, where, done):
    """Both norms are computed before a layer runs whose hook may do anything."""
    model, original = pair(TwoNormsBesideLayers)
    original.first = model.first = first
    x, e = sample()
    results = []
    for m in (original, model):
        mine = x.clone()
        getattr(m, where).register_forward_hook(functools.partial(_double, mine))
        with torch.no_grad():
            results.append(m(mine, e))
    torch.testing.assert_close(*results)
    assert not done


@pytest.mark.parametrize("where", ["norm", "act", "to_scale", "to_shift"])
def test_hooks_see_what_they_saw(where, done):
    """A hook of a layer that is called while the norm waits may do anything: the norm runs first."""
    cls = Diffusers if where in ("norm", "act") else Layers
    model, original = pair(cls)
    seen = []
    for m in (original, model):
        getattr(m, where).register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    compare(original, model, *sample())
    assert len(seen) == 4
    torch.testing.assert_close(seen[::2][0], seen[1::2][0])
    assert [act for *_, act in done] == (["none"] * 2 if where == "act" else [])


def test_several_values_outside_of_such_a_call(done):
    """A tuple that is not taken apart in the same statement has tensors in it; hooks see them."""

    class Net(AroundSeveralValues):
        def forward(self, x, e):
            both = self.film(x, e)
            h, rest = both
            kept = {}
            h, kept[self] = self.film(self.act(h), e)
            return self.act(h) + both[0] + rest[0] + kept[self][1]

    original, model = pair(Net)
    compare(original, model, *sample())
    assert done == [(True, True, "none"), (True, True, "silu")] * 2
    done.clear()
    original, model = pair(AroundSeveralValues)
    seen = []
    for m in (original, model):
        m.film.register_forward_hook(lambda module, args, out: seen.append(out[0].detach().clone()))
    compare(original, model, *sample())
    assert len(seen) == 8
    assert all(type(t) is torch.Tensor for t in seen)
    assert [act for *_, act in done] == ["none"] * 4


def test_a_layer_that_writes_into_the_input(done):
    """While the norm waits, a module of the user's changes x."""

    class Writes(nn.Module):
        def forward(self, e):
            self.x.mul_(2)
            return e[:, :C]

    model, original = pair(Layers)
    x, e = sample()
    for m in (original, model):
        m.to_scale = Writes()
    with torch.no_grad():
        results = []
        for m in (original, model):
            m.to_scale.x = x.clone()
            results.append(m(m.to_scale.x, e))
    torch.testing.assert_close(*results)
    assert not done


def test_another_activation_later(done):
    model, original = pair(Diffusers)
    for m in (original, model):
        m.act = nn.Tanh()
    compare(original, model, *sample())
    assert done == [(True, True, "tanh")] * 2
    done.clear()
    for m in (original, model):
        m.act = nn.LogSoftmax(1)
    compare(original, model, *sample())
    assert done == [(True, True, "none")] * 2


def test_replaced_arithmetic_runs(done, monkeypatch):
    model, original = pair(Diffusers)
    given = sample()
    times = torch.Tensor.__mul__
    monkeypatch.setattr(torch.Tensor, "__mul__", lambda a, b: times(a, b) + 1)
    torch.testing.assert_close(model(*given), original(*given))
    assert not done


def test_wrong_shapes_raise_as_they_did(done):
    model, original = pair(Diffusers)
    x, e = sample()
    errors = []
    for m in (original, model):
        with pytest.raises(RuntimeError) as error:
            m(x, e[:2])
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert not done


def test_copies_pickles_and_restore(done):
    for cls in (Diffusers, Layers, GuidedDiffusion):
        model, original = pair(cls)
        given = sample()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            compare(original, other, *given)
        assert done == FUSED[cls] * 4
        kgopt.restore(model)
        done.clear()
        compare(original, model, *given)
        assert not done
        assert type(model) is cls


def test_report_names_scale_and_shift():
    model, _ = pair(InOneExpression)
    (row,) = [row for row in kgopt.report(model).sites if row.path == "norm"]
    assert row.kind == "GroupNorm → scale → shift → silu"
    assert row.became == "group_norm(scale, shift, act=silu)"


@pytest.mark.parametrize("cls", [Diffusers, Layers])
def test_autocast_on_the_cpu(cls, done):
    model, original = pair(cls, torch.float32)
    given = sample(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model(*given), original(*given)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "cls",
    [
        Diffusers,
        Layers,
        GuidedDiffusion,
    ],
)
@pytest.mark.parametrize("norm", [None, nn.InstanceNorm2d(C, affine=True)], ids=["group", "instance"])
def test_autocast(cls, low, norm, done):
    """GroupNorm gives float32 under autocast, InstanceNorm what it is given."""
    model, original = (m.cuda() for m in pair(lambda: cls(norm=copy.deepcopy(norm)), torch.float32))
    given = [t.cuda() for t in sample(torch.float32)]
    with torch.autocast("cuda", low):
        y, expected = model(*given), original(*given)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    assert done == FUSED[cls]


@pytest.mark.gpu
@pytest.mark.parametrize("cls", FUSED)
def test_on_the_gpu(cls, done):
    model, original = (m.cuda() for m in pair(cls))
    compare(original, model, *(t.cuda() for t in sample()))
    assert done == FUSED[cls] * 2


def test_diffusers_blocks(done):
    resnet = pytest.importorskip("diffusers.models.resnet")
    block = resnet.ResnetBlock2D(in_channels=32, temb_channels=16, groups=8, time_embedding_norm="scale_shift")
    for p in block.parameters():
        nn.init.normal_(p, std=0.2)
    given = torch.randn(2, 32, 6, 5), torch.randn(2, 16)
    model = kgopt.optimize(copy.deepcopy(block), measure=False)
    exact = run(copy.deepcopy(block).double(), *(t.double() for t in given))
    assert_all_as_good(run(model, *given), run(block, *given), exact, factor=3)
    assert done == [(True, True, "silu")]


class Frames(nn.Module):
    """A norm for each frame of a video; the activation follows when it is a video again."""

    def __init__(self, back="unflatten"):
        super().__init__()
        self.norm, self.act, self.back, self.by_frame = nn.GroupNorm(2, C), nn.SiLU(), back, True

    def forward(self, x):
        if self.by_frame:
            n = x.size(0)
            x = x.permute(0, 2, 1, 3, 4).flatten(0, 1)
            x = self.norm(x)
            if self.back == "unflatten":
                x = x.unflatten(0, (n, -1)).permute(0, 2, 1, 3, 4)
            elif self.back == "reshape":
                x = x.reshape(n, -1, *x.shape[1:]).transpose(1, 2)
            else:
                x = torch.movedim(torch.unflatten(x, 0, (n, -1)), 2, 1).contiguous()
        else:
            x = self.norm(x)
        x = self.act(x)
        return x


class FramesNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(1, C)

    def forward(self, x):
        frames = x.permute(0, 2, 1, 3, 4).flatten(0, 1)
        frames = self.norm(frames)
        return frames.unflatten(0, (x.size(0), -1)).permute(0, 2, 1, 3, 4)


class BehindFrames(nn.Module):
    def __init__(self, act=torch.nn.functional.silu):
        super().__init__()
        self.norm, self.act = FramesNorm(), act

    def forward(self, x):
        h = self.norm(x)
        h = self.act(h)
        return h


class ScaledFrames(Frames):
    """What follows the views is no activation, and looks at their dims."""

    def forward(self, x, scale):
        x = self.norm(x.transpose(1, 2).flatten(0, 1))
        x = x.unflatten(0, (2, -1))
        x = x * scale
        return self.act(x)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (Frames, True),
        (lambda: Frames("movedim"), True),
        (lambda: Frames("reshape"), True),
        (BehindFrames, True),
        (lambda: BehindFrames(nn.Sequential(nn.SiLU(), nn.Conv3d(C, C, 1))), False),
        (lambda: BehindFrames(nn.PReLU(C)), False),
    ],
)
def test_an_activation_behind_views(make, fused, last, monkeypatch):
    model, original = pair(make)
    x = torch.randn(2, C, 3, 4, 5, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
    seen = []
    chosen = sites.Site._chosen
    monkeypatch.setattr(sites.Site, "_chosen", lambda s, *args: seen.append(s.chain.post) or chosen(s, *args))
    y, expected = model(x), original(x)
    assert torch.allclose(y, expected, rtol=1e-12)
    assert y.stride() == expected.stride()
    assert ("silu" in seen) == fused
    for mine, theirs in zip(
        torch.autograd.grad(y.square().sum(), list(model.parameters())),
        # Contiguous: the gradient of PyTorch 2.11's group norm of frames in channels_last ends the process, on the CPU.
        torch.autograd.grad(original(x.contiguous()).square().sum(), list(original.parameters())),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, rtol=1e-9)


def test_a_product_behind_views(done):
    model, original = pair(ScaledFrames)
    x, scale = torch.randn(2, C, 3, 4, 5, dtype=torch.float64), torch.randn(2, 3, 1, 1, 1, dtype=torch.float64)
    assert torch.allclose(model(x, scale), original(x, scale), rtol=1e-12)
    assert not done


@pytest.mark.parametrize("make", [Frames, lambda: Frames("movedim"), BehindFrames])
def test_views_in_compiled_code(make):
    model, original = pair(make)
    x = torch.randn(2, C, 3, 4, 5, dtype=torch.float64)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), original(x), rtol=1e-12)
