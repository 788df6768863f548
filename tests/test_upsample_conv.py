"""Nearest upsampling and the convolution behind it as one: values, who may see them, and what keeps the two apart."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt.rewrite import glue
from kgopt.rewrite.glue import calls, kernels, later, plans, search
from kgopt.rewrite.measure import clocks
from optimize_pairs import all_faster

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
layouts = pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])


def draw(shape, dtype=torch.float32, channels_last=False, device="cpu"):
    x = torch.randn(shape, device=device).to(dtype)
    return x.contiguous(memory_format=FORMATS[x.dim()]) if channels_last else x


def test_nearest_exact_of_integer_factors_is_nearest():
    x = torch.randn(1, 2, 50, 60)
    for factors in ((2, 3), (5, 7), (8, 6)):
        scale = tuple(map(float, factors))
        call = glue.recognize(F.interpolate, (x,), {"scale_factor": scale, "mode": "nearest-exact"})
        assert torch.equal(call.run(), F.interpolate(x, scale_factor=scale, mode="nearest-exact"))
        assert torch.equal(call.run(), F.interpolate(x, scale_factor=scale))


def test_what_is_taken():
    x = torch.randn(1, 4, 20, 22)

    def options(factors=(2, 2), x=x, channels=4, **more):
        conv = nn.Conv2d(channels, 4, **{"kernel_size": 3, **more}).requires_grad_(False)
        call = calls.upsampled_by(x, factors, conv)
        return None if call is None else (call.options[:1], call.argument[1], tuple(call.sizes[2:]))

    assert options() == (("folded",), (0, 0), (38, 42))
    assert options(padding=1) == (("folded",), (1, 1), (40, 44))
    assert options(padding="same", kernel_size=(3, 5)) == (("folded",), (1, 2), (40, 44))
    assert options(padding="valid") == (("folded",), (0, 0), (38, 42))
    assert options(kernel_size=1) == (("commuted",), (0, 0), (40, 44))
    assert options(kernel_size=2, padding=1, groups=2) == (("folded",), (1, 1), (41, 45))
    for refused in (
        {"stride": 2},
        {"dilation": 2},
        {"padding": 3},
        {"padding": 1, "padding_mode": "replicate"},
        {"kernel_size": 4, "padding": "same"},
        {"kernel_size": 1, "padding": 1},
        {"factors": (9, 2)},
        {"x": x.double()},
        {"x": x[:, :, :1, :1]},  # smaller than the kernel
        {"x": x[:, :, :2, :2]},  # the sums would be larger than the upsampled tensor
    ):
        assert options(**refused) is None, refused
    assert calls.upsampled_by(x, (2, 2), nn.ConvTranspose2d(4, 4, 3)) is None


# ---------------------------------------------------------------------------------------------------------- the models


class InFloat(nn.Upsample):
    def forward(self, x):
        return super().forward(x.float()).type_as(x)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.conv = nn.Conv2d(4, 6, 3, padding=1)
        self.same = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.point = nn.Conv2d(4, 4, 1)
        self.wide = nn.Conv2d(4, 4, 5, padding="same", groups=2)
        self.deep = nn.Conv3d(4, 4, 3, padding=1)
        self.seq = nn.Sequential(InFloat(scale_factor=(2.0, 2.0), mode="nearest-exact"), nn.Conv2d(4, 4, 3, padding=1))
        self.use_conv, self.name, self.none, self.mode = True, "conv", None, "nearest"


class Branches(Base):
    """As diffusers' Upsample2D."""

    def forward(self, x, size=None):
        dtype = x.dtype
        if self.use_conv:
            if size is None:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            else:
                x = F.interpolate(x, size=size, mode="nearest")
        if dtype == torch.bfloat16 and hasattr("", "nothing"):
            x = x.to(dtype)
        if self.use_conv:
            if self.name == "conv":
                x = self.conv(x)
            else:
                x = self.other(x)
        return x


class Straight(Base):
    def forward(self, x):
        h = self.up(x)
        b, c = x.shape[0], 2
        y = self.conv(h)
        return y * (b + c)


class Nested(Base):
    def forward(self, x):
        return self.conv(F.interpolate(self.same(self.up(x)), scale_factor=(3.0, 1.0), mode="nearest-exact"))


class Sized(Base):
    def forward(self, x):
        return self.wide(F.interpolate(x, [3 * s for s in x.shape[2:]], mode=self.mode))


class Point(Base):
    def forward(self, x):
        x = self.up(x)
        return torch.relu(self.point(x))


class Plus(Base):
    """The sum runs as one with them."""

    def forward(self, x):
        skip = torch.cat([torch.cat([x, x], 2)] * 2, 3)
        h = self.up(x)
        return skip + self.same(h)


class Tail(Base):
    def forward(self, x):
        skip = torch.cat([torch.cat([x, x], 2)] * 2, 3)
        h = self.seq(x)
        h += skip
        return h


class Row(Base):
    def forward(self, x):
        return self.seq(x)


class Normed(Base):
    """As in a U-Net: a norm's site is next."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(self.up, self.same, nn.GroupNorm(2, 4), nn.SiLU(), self.point, nn.ReLU())

    def forward(self, x):
        return self.block(x)


class Frames(Base):
    """A view of other strides, and factors for some dims."""

    def forward(self, x):
        x = torch.stack([x, x + 1], 1).permute(0, 2, 1, 3, 4)
        x = F.interpolate(x, scale_factor=(1, 2, 2), mode="nearest")
        return self.deep(x)


FOLDED = {Branches: 1, Straight: 1, Nested: 2, Sized: 1, Point: 1, Plus: 1, Tail: 1, Row: 1, Normed: 1, Frames: 1}


class ReadTwice(Base):
    def forward(self, x):
        h = self.up(x)
        return self.conv(h).mean() + h.mean()


class ReadLater(Base):
    def forward(self, x):
        h = self.up(x)
        y = self.same(h)
        return y + h


class ReadBefore(Base):
    def forward(self, x):
        h = self.up(x)
        m = h.mean()
        return self.conv(h) * m


class ChangedBetween(Base):
    def forward(self, x):
        x = x.clone()
        h = F.interpolate(x, scale_factor=2)
        x.add_(1)
        return self.conv(h)


class ChangedAfter(Base):
    def forward(self, x):
        x = x.clone()
        h = F.interpolate(x, scale_factor=2)
        y = self.same(h)
        x.zero_()
        return y * h


class InLoop(Base):
    def forward(self, x):
        for _ in range(2):
            x = self.up(x)
            x = self.same(x)
        return x


class Kept(Base):
    def forward(self, x):
        h = self.up(x)
        self.kept = h
        return self.conv(h)


class Closed(Base):
    def forward(self, x):
        h = self.up(x)
        return (lambda: self.conv(h) + h.mean())()


class InTry(Base):
    def forward(self, x):
        try:
            h = self.up(x)
            return self.conv(h)
        except RuntimeError:
            return h


class Returned(Base):
    def forward(self, x):
        h = F.interpolate(x, scale_factor=2)
        if self.none is not None:
            h = self.conv(h)
        return h


class Linear(Base):
    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2, mode="bilinear"))


class Fraction(Base):
    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=1.5))


class OtherForward(nn.Upsample):
    def forward(self, x):
        return super().forward(x.float()).type_as(x) * 2


class Subclass(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seq[0] = OtherForward(scale_factor=2)

    def forward(self, x):
        return self.seq(x)


APART = [
    *(ReadTwice, ReadLater, ReadBefore, ChangedBetween, ChangedAfter, InLoop, Kept, Closed, InTry),
    *(Returned, Linear, Fraction, Subclass),
]


def optimized(make, x, exclude=()):
    """The original, and a copy whose calls were all found to be faster."""
    original = make().to(x.device, x.dtype).eval()
    model = kgopt.optimize(copy.deepcopy(original), measure=False, exclude=exclude)
    all_faster(model, x, unwanted=lambda path: "no" if path in exclude else "")
    return original, model


def folds(model, x, monkeypatch):
    """How many pairs ran as one, and the result."""
    seen = []
    run = kernels.upsampled_conv
    monkeypatch.setattr(kernels, "upsampled_conv", lambda *args, **more: (seen.append(args[0]), run(*args, **more))[1])
    y = model(x)
    monkeypatch.setattr(kernels, "upsampled_conv", run)
    return len(seen), y


def assert_alike(model, original, x, monkeypatch, expected):
    count, y = folds(model, x.clone(), monkeypatch)
    assert count == expected
    z = original(x.clone())
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-4)
    assert type(y) is torch.Tensor
    assert y.stride() == z.stride()


@layouts
@pytest.mark.parametrize("cls", FOLDED)
def test_one_op_in_inference(cls, channels_last, device, monkeypatch, poisoned):
    x = draw((2, 4, 8, 9), torch.float32, channels_last, device)
    original, model = optimized(cls, x)
    with torch.no_grad():
        assert_alike(model, original, x, monkeypatch, FOLDED[cls])
        for conv in (m for m in (*model.modules(), *original.modules()) if isinstance(m, (nn.Conv2d, nn.Conv3d))):
            conv.weight.copy_(conv.weight.abs())  # in place, as an optimizer does
        assert_alike(model, original, x, monkeypatch, FOLDED[cls])
        assert_alike(model, original, draw((1, 4, 7, 9), device=device), monkeypatch, 0)  # not measured
        with torch.autocast(x.device.type, torch.bfloat16):
            assert folds(model, x, monkeypatch)[0] == 0
            assert model(x).dtype is original(x).dtype
    with torch.inference_mode():
        assert_alike(model, original, x, monkeypatch, FOLDED[cls])
    assert folds(model, x, monkeypatch)[0] == 0
    assert list(model.state_dict()) == list(original.state_dict())
    assert all(v.shape == original.state_dict()[k].shape for k, v in model.state_dict().items())


@pytest.mark.parametrize("cls", FOLDED)
def test_copies_restore_and_tools(cls, monkeypatch):
    x = draw((2, 4, 8, 9))
    original, model = optimized(cls, x)
    with torch.no_grad():
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_alike(twin, original, x, monkeypatch, FOLDED[cls])
        expected = original(x)
        for run in (
            torch.compile(model, backend="eager", fullgraph=True),
            torch.jit.trace(model, (x,), check_trace=False),
            lambda x: torch.func.vmap(model)(x[None])[0],
        ):
            torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-4)
    for m in (original, model):
        m.train().zero_grad()
        m(x).square().sum().backward()
    for p, q in zip(original.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    kgopt.restore(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("cls", [Branches, Nested, Plus, Tail, Frames])
def test_compiled_inference_takes_what_was_faster(cls, dynamic):
    x = draw((2, 4, 8, 9))
    original, model = optimized(cls, x)
    targets = []

    def backend(graph, example_inputs):
        targets.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), original(x), rtol=1e-4, atol=1e-4)
        assert sum("upsample_conv_weight" in t for t in targets) == FOLDED[cls]
        assert not any("interpolate" in t for t in targets)
        other = draw((1, 4, 6, 9))
        torch.testing.assert_close(compiled(other), original(other), rtol=1e-4, atol=1e-4)
        for module in glue.modules_of(model):
            glue.state_of(module).folds.clear()
        torch._dynamo.reset()
        targets.clear()
        torch.testing.assert_close(compiled(x), original(x), rtol=1e-4, atol=1e-4)
        assert not any("upsample_conv_weight" in t for t in targets)


@pytest.mark.parametrize("cls", APART)
def test_what_keeps_them_apart(cls, monkeypatch):
    x = draw((2, 4, 8, 9))
    original, model = optimized(cls, x)
    with torch.no_grad():
        assert_alike(model, original, x, monkeypatch, 0)
    if cls is Kept:
        assert type(model.kept) is torch.Tensor


@pytest.mark.parametrize("cls", [Straight, Row, Plus])
def test_hooks_and_patches_see_pytorchs_code(cls, monkeypatch):
    x = draw((2, 4, 8, 9))
    original, model = optimized(cls, x)
    names = ("seq.0", "seq.1") if cls is Row else ("up", "same" if cls is Plus else "conv")
    with torch.no_grad():
        for name in names:
            seen = []
            hooks = [
                m.get_submodule(name).register_forward_hook(
                    lambda module, args, y, seen=seen: seen.append((args[0], y))
                )
                for m in (original, model)
            ]
            assert_alike(model, original, x, monkeypatch, 0)
            for a, b in zip(*seen, strict=True):
                assert type(b) is torch.Tensor
                torch.testing.assert_close(a, b)
            for hook in hooks:
                hook.remove()
            assert_alike(model, original, x, monkeypatch, FOLDED[cls])
        seen = []

        class Watch(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        with Watch():
            assert_alike(model, original, x, monkeypatch, 0)
        assert F.interpolate in seen
        interpolate = F.interpolate
        monkeypatch.setattr(F, "interpolate", lambda *args, **more: interpolate(*args, **more) + 1)
        assert_alike(model, original, x, monkeypatch, 0)


def test_what_is_excluded_is_left_alone(monkeypatch):
    x = draw((2, 4, 8, 9))
    for name in ("seq.0", "seq.1"):
        original, model = optimized(Row, x, exclude=(name,))
        with torch.no_grad():
            assert_alike(model, original, x, monkeypatch, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.conv, "stride", (2, 2)),
        lambda m: setattr(m.conv, "padding", (2, 2)),
        lambda m: setattr(m, "conv", nn.Conv2d(4, 6, 3).requires_grad_(False)),
        lambda m: setattr(m, "conv", nn.Identity()),
        lambda m: setattr(m.up, "mode", "bilinear"),
        lambda m: setattr(m, "up", nn.Identity()),
        lambda m: setattr(m.conv, "weight", nn.Parameter(m.conv.weight.clone(memory_format=torch.channels_last))),
    ],
)
def test_a_module_may_change_after_all(change, monkeypatch):
    x = draw((2, 4, 8, 9))
    original, model = optimized(Straight, x)
    torch.manual_seed(0)
    change(original)
    torch.manual_seed(0)
    change(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)


def test_upsamplers_of_libraries(monkeypatch):
    diffusers = pytest.importorskip("diffusers.models.upsampling")
    wan = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_wan")
    blocks = pytest.importorskip("monai.networks.blocks")
    conv = blocks.Convolution(2, 4, 4, conv_only=True, padding=1)
    more = {"mode": "nontrainable", "interp_mode": "nearest", "align_corners": None, "post_conv": conv}
    for make, shape in (
        (lambda: diffusers.Upsample2D(4, use_conv=True), (2, 4, 9, 8)),
        (lambda: wan.WanResample(8, "upsample2d"), (1, 8, 3, 6, 7)),
        (lambda: wan.WanResample(8, "upsample3d"), (2, 8, 3, 6, 7)),
        (lambda: blocks.UpSample(2, 4, 4, **more), (2, 4, 9, 8)),
    ):
        x = draw(shape)
        original, model = optimized(make, x)
        with torch.no_grad():
            assert_alike(model, original, x, monkeypatch, 1)
            half = draw(shape, torch.bfloat16)
            assert model.bfloat16()(half).dtype is torch.bfloat16


def test_the_value_is_one_tensor():
    """However often code asks, and whoever wrote to it in between."""
    wait, x = plans.Wait(), draw((1, 4, 8, 9))
    with torch.no_grad():
        value = wait.begin(F.interpolate, x, scale_factor=2)
        assert type(value) is later.Upsampled
        tensor = wait.now(value)
        tensor.zero_()
        assert wait.now(value) is tensor
        assert torch.equal(wait.through(nn.Identity(), value), torch.zeros_like(tensor))
        assert wait.now(x) is x
    assert type(wait.begin(F.interpolate, x, scale_factor=2)) is torch.Tensor  # gradients are on
    with torch.no_grad(), pytest.raises(TypeError):
        wait.begin(F.interpolate, x, scale=2)


@pytest.mark.parametrize(("times", "option"), [((2e-3, 1e-3), "folded"), ((1e-3, 2e-3), "")])
def test_the_pair_is_measured(times, option, monkeypatch):
    """Against both as they would run else."""
    monkeypatch.setattr(clocks, "busy_both", lambda first, second, device: (first(), second()) and times)
    model, x = kgopt.optimize(Row().eval(), measure=False), draw((2, 4, 8, 9))
    kgopt.forget()
    with torch.no_grad():
        glue.find(model, lambda: model(x), lambda path: "")
    state = glue.state_of(model.seq[1]) if option else None
    assert bool(option) is (model.seq[1] in glue.modules_of(model))
    if state is not None:
        assert [how for (kind, *_), how in state.faster.items() if kind == "upsampled"] == [option]
        assert "folded" not in state.always.values()  # it says nothing about the convolution on its own
    kgopt.forget()


def test_what_is_less_accurate_or_lies_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(clocks, "busy_both", lambda first, second, device: (2.0, 1.0))
    conv, x = nn.Conv2d(4, 6, 3, padding=1).requires_grad_(False), draw((2, 4, 8, 9))
    call = calls.upsampled_by(x, (2, 2), conv)
    apart = lambda: conv(F.interpolate(x, scale_factor=2))  # noqa: E731
    assert search._fastest(call, apart) == "folded"
    run = kernels.upsampled_conv
    for wrong in (lambda y: y * 1.001, lambda y: y.contiguous(memory_format=torch.channels_last)):
        monkeypatch.setattr(kernels, "upsampled_conv", lambda *args, wrong=wrong: wrong(run(*args)))
        assert search._fastest(call, apart) == ""


def test_what_is_in_between_never_escapes_from_drawn_methods(monkeypatch):
    """A plan is asked for the waiting value alone, and only by what knows it."""
    x = draw((1, 4, 8, 9))
    given = []
    forward = nn.Conv2d._conv_forward
    for cls in (*FOLDED, *APART):
        _, model = optimized(cls, x)
        for m in model.modules():
            m.register_forward_pre_hook(lambda module, args: given.extend(args))
        with torch.no_grad():
            model(x)
    assert given
    assert {type(t) for t in given} == {torch.Tensor}
    assert nn.Conv2d._conv_forward is forward
    assert plans.finding.pair is None
