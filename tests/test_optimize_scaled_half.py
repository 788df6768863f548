"""What kgopt.optimize makes of wide fp32 convolutions that are faster in scaled fp16."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt import accuracy
from kgopt._layout import FORMATS
from kgopt.rewrite import glue
from kgopt.rewrite.glue import heads, kernels
from optimize_pairs import all_faster
from tolerances import assert_as_good_as_torch, round_tf32

C = 64
CONVS = nn.Conv2d, nn.Conv3d


class Block(nn.Module):
    """x + conv2(act(norm2(conv1(act(norm1(x))))))."""

    def __init__(self, bias=True):
        super().__init__()
        self.norm1, self.norm2, self.act = nn.GroupNorm(8, C), nn.GroupNorm(4, C), nn.SiLU()
        self.conv1, self.conv2 = (nn.Conv2d(C, C, 3, padding=1, bias=bias) for _ in range(2))

    def forward(self, x):
        h = self.norm1(x)
        h = self.act(h)
        h = self.conv1(h)
        h = self.norm2(h)
        h = self.act(h)
        h = self.conv2(h)
        return x + h


class Scaled(Block):
    def forward(self, x):
        h = self.conv1(self.act(self.norm1(x)))
        return (x + self.conv2(self.act(self.norm2(h)))) / 2.0


class Dropped(Block):
    """With what does nothing in between: as in diffusers, guided-diffusion and their kind."""

    def __init__(self):
        super().__init__()
        self.dropout, self.up, self.kind, self.drop_path = nn.Dropout(0.3), None, "default", nn.Identity()

    def forward(self, x):
        h = x
        h = self.norm1(h)
        h = self.act(h)
        if self.up is not None:
            if h.shape[0] >= 64:
                h = h.contiguous()
            x, h = self.up(x), self.up(h)
        h = self.conv1(h)
        if self.kind == "default":
            h = self.norm2(h)
        elif self.kind == "none":
            h = self.drop_path(h)
        h = self.act(h)
        h = self.dropout(h)
        h = self.drop_path(h)
        h = self.conv2(h)
        return x + h


class Inline(Dropped):
    def forward(self, x):
        h = self.conv1(self.drop_path(F.silu(self.norm1(x))))
        h = F.silu(self.norm2(h))
        if self.dropout is not None:
            h = self.dropout(h)
        return (x + self.conv2(self.drop_path(h))) / 2.0


class Upsampled(Dropped):
    """The branch reads the value."""

    def __init__(self):
        super().__init__()
        self.up = nn.AvgPool2d(1)


class Causal(nn.Module):
    """As video autoencoders have it: the padding repeats what is outermost, and looks backward along time."""

    def __init__(self):
        super().__init__()
        self.conv, self.pad, self.mode = nn.Conv3d(C, C, 3), (1, 1, 1, 1, 2, 0), "replicate"

    def forward(self, x):
        x = F.pad(x, self.pad, mode=self.mode)
        return self.conv(x)


class CausalInline(Causal):
    def forward(self, x):
        return self.conv(F.pad(x, self.pad, self.mode))


class Video(nn.Module):
    def __init__(self, conv=Causal):
        super().__init__()
        self.norm1, self.norm2, self.act = nn.GroupNorm(8, C), nn.GroupNorm(4, C), nn.SiLU()
        self.conv0, self.conv1, self.conv2, self.dropout, self.shortcut = conv(), conv(), conv(), nn.Dropout(0.1), None

    def forward(self, x):
        x = self.conv0(x)
        h = self.norm1(x)
        h = self.act(h)
        h = self.conv1(h)
        h = self.dropout(self.act(self.norm2(h)))
        h = self.conv2(h)
        if self.shortcut is not None:
            x = self.shortcut(x)
        return h + x


class CausalOfTwo(Causal):
    def forward(self, x, scale=None):
        h = F.pad(x, self.pad, mode=self.mode)
        return self.conv(h)


class Loop(nn.Module):
    """What is called shows when the code runs, and it is given two arguments."""

    def __init__(self):
        super().__init__()
        self.norm, self.convs = nn.GroupNorm(8, C), nn.ModuleList([CausalOfTwo(), CausalOfTwo()])

    def forward(self, x):
        for conv in self.convs:
            x = conv(x, None)
            x = F.relu(x)
        h = F.relu(self.norm(x))
        h = self.convs[0](h)
        return x + h


class Shortcut(Video):
    def __init__(self):
        super().__init__()
        self.shortcut = Causal()


class Counting(Causal):
    """Its forward may do more than pad and convolve."""

    def __init__(self):
        super().__init__()
        self.counts, self.calls = True, torch.zeros(())

    def forward(self, x):
        x = F.pad(x, self.pad, mode=self.mode)
        if not self.counts:
            return self.conv(x)
        y = self.conv(x)
        self.calls.add_(1)
        return y


class Counted(Video):
    def __init__(self):
        super().__init__()
        self.shortcut = Counting()


def sequential():
    return nn.Sequential(nn.GroupNorm(8, C), nn.ReLU(), nn.Conv2d(C, C, 3, padding=1), nn.ELU(), nn.Conv2d(C, C, 1))


# (model, convolutions that take the norm in front, that run alone, that have a residual or an activation)
MODELS = {"block": (Block, 2, 0, 1), "in one expression": (Scaled, 2, 0, 1), "sequential": (sequential, 1, 1, 0)}
MODELS |= {"dropped": (Dropped, 2, 0, 1), "dropped inline": (Inline, 2, 0, 1), "upsampled": (Upsampled, 1, 1, 1)}
VIDEOS = {
    "video": (Video, 2, 1, 1),
    "shortcut": (Shortcut, 2, 2, 1),
    "loop": (Loop, 1, 2, 1),
    "counted": (Counted, 2, 2, 0),
    "padded inline": (lambda: Video(CausalInline), 2, 1, 1),
}


@pytest.fixture
def calls(monkeypatch):
    """What is done in scaled fp16: ("norm" or "conv", has it a residual)."""
    seen = []
    norm_conv, scaled = heads._group_norm_conv, kernels.scaled

    def of_norm(*args, **options):
        if options["backend"] == "kgopt:scaled_half":
            seen.append(("norm", args[9] is not None))
        return norm_conv(*args, **options)

    def alone(*args, **options):
        seen.append(("conv", args[3] is not None))
        return scaled(*args, **options)

    monkeypatch.setattr(heads, "_group_norm_conv", of_norm)
    monkeypatch.setattr(kernels, "scaled", alone)
    return seen


def random_affine(model):
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias)
    return model


def made_scaled(original, x):
    """A copy whose convolutions all have measured scaled fp16 as the faster way."""
    model = kgopt.optimize(copy.deepcopy(original), measure=False, channels_last=True)
    all_faster(model, x)
    for module in model.modules():
        state = glue.state_of(module) if isinstance(module, CONVS) else None
        if state is not None:
            state.faster = dict.fromkeys(state.faster, "scaled")
            state.always = dict.fromkeys(state.always, "scaled")
            state.plans.clear()
    return model


def assert_right(y, original, x):
    exact = copy.deepcopy(original).double()(x.double())
    rounded = copy.deepcopy(original).double()
    for module in rounded.modules():
        if isinstance(module, CONVS):
            module.weight.data = round_tf32(module.weight.data)
            module.register_forward_pre_hook(lambda module, inputs: (round_tf32(inputs[0]),))
    assert_as_good_as_torch(y, original(x), exact, rounded(x.double()).float())


def drawn(device, *size):
    x = torch.randn(2, C, *(size or (12, 10)), device=device)
    return x.contiguous(memory_format=FORMATS[x.dim()])


@pytest.mark.parametrize("name", [*MODELS, *VIDEOS])
def test_it_takes_the_norm_in_front_and_the_sum_behind(name, device, calls, poisoned):
    torch.manual_seed(0)
    make, of_norms, alone, residuals = {**MODELS, **VIDEOS}[name]
    original, x = random_affine(make()).to(device).eval(), drawn(device, *((3, 6, 5) if name in VIDEOS else ()))
    model = made_scaled(original, x)
    calls.clear()
    with torch.no_grad():
        assert_right(model(x), original, x)
        assert sum(kind == "norm" for kind, _ in calls) == of_norms
        assert sum(kind == "conv" for kind, _ in calls) == alone
        assert sum(residual for _, residual in calls) == residuals
        for parameter in model.parameters():  # in place: followed
            parameter.mul_(3)
        for parameter in original.parameters():
            parameter.mul_(3)
        assert_right(model(x), original, x)
    calls.clear()
    model(x).sum().backward()  # with gradients the modules run
    assert not calls


@pytest.mark.parametrize("name", MODELS)
def test_compiled_inference_has_it(name, device, calls):
    torch.manual_seed(0)
    make, of_norms, alone, _ = MODELS[name]
    original, x = random_affine(make()).to(device).eval(), drawn(device)
    model, graphs = made_scaled(original, x), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        assert_right(torch.compile(model, backend=backend, fullgraph=True)(x), original, x)
    nodes = [n for n in graphs[0].graph.nodes if n.kwargs.get("backend") == "kgopt:scaled_half"]
    assert sum(n.args[2] > 0 for n in nodes) == of_norms
    assert sum(n.args[2] == 0 for n in nodes) == alone


def test_hooks_see_what_the_code_gives_them(device, calls):
    torch.manual_seed(0)
    original, x = random_affine(Block()).to(device).eval(), drawn(device)
    model = made_scaled(original, x)
    with torch.no_grad():
        for module in (model.norm2, model.act, model.conv2):
            calls.clear()
            seen = []
            handle = module.register_forward_hook(lambda module, inputs, y, seen=seen: seen.append(y))
            assert_right(model(x), original, x)
            assert len(seen) == (2 if module is model.act else 1)
            assert all(type(y) is torch.Tensor for y in seen)
            handle.remove()


@pytest.mark.parametrize("make", [Dropped, Inline])
def test_what_stands_in_between_runs_where_it_does_something(make, device, calls):
    torch.manual_seed(0)
    original, x = random_affine(make()).to(device).eval(), drawn(device)
    model, seen = made_scaled(original, x), []
    with torch.no_grad():
        for change in ("mode", "hook", "replaced"):
            for net in (original, model):
                net.dropout.train(change == "mode")
                net.dropout.p = 1.0  # random numbers fall on other elements in another memory format
                if change == "hook":
                    net.dropout.register_forward_hook(lambda module, inputs, y: seen.append(inputs[0]))
                if change == "replaced":
                    net.dropout = nn.ReLU()
            calls.clear()
            torch.manual_seed(1)
            y = model(x)
            assert [kind for kind, _ in calls] == ["norm", "conv"]
            torch.manual_seed(1)
            torch.testing.assert_close(y, original(x), rtol=1e-2, atol=1e-2)
    assert [type(t) for t in seen] == 2 * [torch.Tensor]


@pytest.mark.parametrize(
    "change", ["hook", "hook inside", "forward", "class", "zeros", "no padding", "conv", "pad", "training", "pickled"]
)
def test_a_module_that_pads_may_change(change, device, calls, monkeypatch):
    """What waits goes into its forward only while that is the one that was read."""
    torch.manual_seed(0)
    original, x = random_affine(Video()).to(device).eval(), drawn(device, 3, 6, 5)
    model, seen = made_scaled(original, x), []
    note = lambda module, inputs, y: seen.extend([inputs[0], y])  # noqa: E731
    if change == "pickled":
        model = pickle.loads(pickle.dumps(model))
    if change == "class":
        forward = Causal.forward
        monkeypatch.setattr(Causal, "forward", lambda self, x: seen.append(x) or forward(self, x))
    if change == "pad":
        pad = F.pad
        monkeypatch.setattr(F, "pad", lambda *args, **options: seen.append(args[0]) or pad(*args, **options))
    for net in (original, model):
        net.dropout.train(False)
        for conv in (net.conv1, net.conv2):
            if change == "hook":
                conv.register_forward_hook(note)
            if change == "hook inside":
                conv.conv.register_forward_hook(note)
            if change == "forward":
                conv.forward = lambda x, conv=conv: seen.append(x) or Causal.forward(conv, x)
            if change == "zeros":
                conv.mode = "constant"
            if change == "no padding":
                conv.pad, conv.conv.padding = (0,) * 6, (1, 1, 1)
            if change == "conv":
                conv.conv = nn.Sequential(conv.conv, nn.Tanh())
    with torch.no_grad():
        expected = original(x)
        calls.clear()
        if change == "training":
            model.dropout.p = 0.0
            model.train()
        torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)
    assert all(type(t) is torch.Tensor for t in seen)
    assert bool(seen) == (change in ("hook", "hook inside", "forward", "class", "pad"))
    joined = sum(kind == "norm" for kind, _ in calls)
    assert joined == {"training": 2, "pickled": 2}.get(change, 0)


def test_a_value_that_somebody_else_reads_is_a_tensor(device, calls):
    class Kept(Dropped):
        def forward(self, x):
            h = F.silu(self.norm1(x))
            h = self.dropout(h)
            y = self.conv1(h)
            return y, h

    torch.manual_seed(0)
    original, x = random_affine(Kept()).to(device).eval(), drawn(device)
    model = made_scaled(original, x)
    calls.clear()
    with torch.no_grad():
        _, h = model(x)
        assert [kind for kind, _ in calls] == ["conv"]
        torch.testing.assert_close(h, original(x)[1])
    assert type(h) is torch.Tensor


def test_which_convolutions_may_be_faster_so(monkeypatch):
    def options(x, weight, **more):
        call = glue.recognize(F.conv2d, (x, weight, None, 1, 1), more)
        return () if call is None else call.options

    x, weight = drawn("cpu"), torch.randn(C, C, 3, 3)
    assert options(x, weight) == ()  # no TF32 on the CPU
    monkeypatch.setattr(accuracy, "may_take_tf32", lambda x: x.dtype is torch.float32)
    assert options(x, weight) == ("scaled",)
    assert options(x.contiguous(), weight) == ()
    assert options(x, weight[:32]) == ()
    assert options(x[:, :32].contiguous(memory_format=torch.channels_last), weight[:, :32]) == ()
    assert options(x, weight[:, :16], groups=4) == ()
    assert options(x.double(), weight.double()) == ()


@pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 4, reason="it is timed, while other processes use the GPU"
)
@pytest.mark.gpu
def test_the_measurement_takes_it_where_it_is_faster(monkeypatch):
    """The larger side of what it is for: 512 channels of an image, where fp16 takes half of TF32's time."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with the rates of Hopper")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    conv = nn.Conv2d(512, 512, 3, padding=1).cuda().eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 512, 192, 192, device="cuda").contiguous(memory_format=torch.channels_last)
    model = kgopt.optimize(nn.Sequential(nn.GroupNorm(32, 512).cuda(), conv), measure=False, channels_last=True)
    with torch.no_grad():
        glue.find(model, lambda: model(x), lambda path: "")
    assert set(glue.state_of(model[1]).faster.values()) == {"scaled"}
