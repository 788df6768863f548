"""``torch.compile`` of an optimized model in training: the graph has what gained in eager steps, in its formats."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
import optimize_models as models
from kgopt import accuracy
from kgopt.rewrite.gradients import joins, training
from kgopt.rewrite.measure import verdicts

LAST = torch.channels_last_3d


class Level(nn.Module):
    """A level of a U-Net: down, up by one of three ways, a concatenation."""

    def __init__(self, up="transposed"):
        super().__init__()
        self.first, self.norm = nn.Conv3d(3, 8, 3, padding=1, bias=False), nn.InstanceNorm3d(8, affine=True)
        self.act = nn.LeakyReLU()
        self.down = nn.Conv3d(8, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose3d(8, 8, 2, stride=2) if up == "transposed" else nn.Upsample(scale_factor=2, mode=up)
        self.last = nn.Conv3d(16, 2, 3, padding=1)

    def forward(self, x):
        skip = self.act(self.norm(self.first(x)))
        return self.last(torch.cat((self.up(self.down(skip)), skip), 1))


def is_plain(x):
    """As on a GPU."""
    return type(x) is torch.Tensor and x.layout is torch.strided and x.numel() > 0 and x.is_floating_point()


@pytest.fixture
def gains(device, monkeypatch):
    """Seconds that everything of kgopt's gains; in training the CPU counts as a GPU."""
    seconds = {"s": 1.0}
    if device == "cpu":
        monkeypatch.setattr(training, "_is_plain", is_plain)
    monkeypatch.setattr(training, "gain_of", lambda both, x, store=None: seconds["s"])
    monkeypatch.setattr(joins, "gain", lambda tensors: seconds["s"])
    torch._dynamo.reset()
    return seconds


def input_of(device):
    # Convolutions of contiguous tensors of the CPU are contiguous, whatever the weight's format.
    return torch.randn(2, 3, 4, 6, 8, device=device).contiguous(memory_format=LAST)


def trained(original, x, autocast=False):
    """An optimized copy that measured itself in a step."""
    model = kgopt.optimize(copy.deepcopy(original).to(x.device).train(), channels_last=True, measure=False)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        training.find(model, lambda: model(x), lambda name: "")
    return model


class Noted:
    """Compiles; the graph's calls and the format of what convolutions read."""

    def __init__(self, model, **options):
        self.calls, self.graph = Counter(), None
        self.run = torch.compile(model, backend=self, **{"fullgraph": True, **options})

    def __call__(self, graph, inputs):
        for node in graph.graph.nodes:
            if node.op in ("call_function", "call_method"):
                self.calls[getattr(node.target, "__name__", str(node.target))] += 1
        self.graph = graph
        return graph

    def convolutions(self):
        return [n for n in self.graph.graph.nodes if n.op == "call_function" and "conv" in str(n.target)]


def kgopts(calls):
    return {
        name: n for name, n in calls.items() if name.split(".")[0] in ("conv3d", "conv_transpose3d") and "." in name
    }


def results(run, x, of):
    """The output and gradients."""
    leaf = x.detach().requires_grad_()
    y = run(leaf)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y.double() * weights).sum(), [leaf, *of.parameters()])]


def assert_right(run, of, original, x, autocast=False):
    wide = copy.deepcopy(original).to(x.device).double()
    plain = copy.deepcopy(original).to(x.device)
    exact = results(wide, x.double(), wide)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        found, theirs = results(run, x, of), results(plain, x, plain)
    for a, b, c in zip(found, theirs, exact, strict=True):
        assert a.dtype is b.dtype
        errors = [accuracy.relative_error(t, c) for t in (a, b)]
        # What one op may differ by; four convolutions stand one behind the other.
        assert errors[0] <= 4 * accuracy.allowed(torch.bfloat16 if autocast else torch.float32, errors[1])


@pytest.mark.parametrize("autocast", [False, True])
def test_convolutions(autocast, gains, device):
    original, x = models.randomized(Level()), input_of(device)
    model = trained(original, x, autocast)
    noted = Noted(model)
    assert_right(noted.run, model, original, x, autocast)
    assert kgopts(noted.calls) == {"conv3d.default": 3, "conv_transpose3d.default": 1}
    assert "conv3d" not in noted.calls
    for node in noted.convolutions():
        read, weight, made = (n.meta["example_value"] for n in (*node.args[:2], node))
        assert read.is_contiguous(memory_format=LAST)
        assert made.is_contiguous(memory_format=LAST)
        assert (weight.dtype, made.dtype) == (torch.float32, torch.bfloat16 if autocast else torch.float32)


def test_by_inductor(gains, device):
    """Its graph of the backward has kgopt's gradients; on the CPU those are PyTorch's."""
    original, x = models.randomized(Level()), input_of(device)
    model = trained(original, x, autocast=True)
    graphs = []

    def backend(graph, inputs):
        from torch._inductor.compile_fx import compile_fx

        def count(graph):
            calls = [n.target.__name__ for n in graph.nodes if n.op == "call_function"]
            graphs.append(Counter(name for name in calls if "conv" in name and name != "convert_element_type.default"))

        return compile_fx(graph, inputs, config_patches={"post_grad_custom_post_pass": count, "fx_graph_cache": False})

    assert_right(torch.compile(model, backend=backend, fullgraph=True), model, original, x, autocast=True)
    forward, backward = graphs
    assert forward == {"conv3d.default": 3, "conv_transpose3d.default": 1}
    assert backward == {"conv_backward.default" if x.is_cuda else "convolution_backward.default": 4}


@pytest.mark.parametrize("up", ["nearest", "trilinear"])
def test_upsampling_and_concatenation(up, gains, device):
    original, x = models.randomized(Level(up)), input_of(device)
    model = trained(original, x)
    noted = Noted(model)
    assert_right(noted.run, model, original, x)
    assert noted.calls["upsample_linear"] == (up == "trilinear")
    assert not noted.calls["interpolate"]
    read = noted.convolutions()[-1].args[0].meta["example_value"]
    assert read.shape[1] == 16
    assert read.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("why", ["no gain", "inference", "off", "another dtype"])
def test_what_stays_pytorch_s(why, gains, device):
    gains["s"] = 1.0 if why != "no gain" else 0.0
    original, x = models.randomized(Level()), input_of(device)
    model = trained(original, x, autocast=why == "another dtype")
    for module in training.modules_of(model):
        training.state_of(module).enabled = why != "off"
    noted = Noted(model)
    with torch.set_grad_enabled(why != "inference"):
        y = noted.run(x)
        torch.testing.assert_close(y, copy.deepcopy(original).to(device)(x), rtol=1e-4, atol=1e-4)
    assert not kgopts(noted.calls)


def test_it_won_at_every_size_or_it_stays(gains, device):
    """Compiled code serves many sizes."""
    original, x = models.randomized(Level()), input_of(device)
    model = trained(original, x)
    state = training.state_of(model.first)
    (key,) = state.ours
    small = torch.empty(1, 3, 2, 2, 2, device=device).contiguous(memory_format=LAST)
    state.ours[training.key_of(small)] = 0.0
    state.settle()
    noted = Noted(model)
    noted.run(x)
    assert kgopts(noted.calls) == {"conv3d.default": 2, "conv_transpose3d.default": 1}
    state.ours[training.key_of(small)] = state.ours[key]
    state.settle()
    torch._dynamo.reset()
    noted = Noted(model, dynamic=True)
    for shape in ((2, 3, 4, 6, 8), (3, 3, 6, 4, 8)):
        other = torch.randn(shape, device=device).contiguous(memory_format=LAST)
        assert_right(noted.run, model, original, other)
    assert kgopts(noted.calls)["conv3d.default"] % 3 == 0


def test_copies_have_the_verdicts(gains, device, monkeypatch):
    model = trained(models.randomized(Level()), input_of(device))
    state = training.state_of(model.down)
    monkeypatch.setattr(verdicts, "are_here", lambda devices: True)
    assert pickle.loads(pickle.dumps(state)).always == state.always
    assert state.always == (("conv", False, torch.float32),)
    monkeypatch.setattr(verdicts, "are_here", lambda devices: False)
    assert pickle.loads(pickle.dumps(state)).always == ()


def test_a_convolution_that_is_the_users(gains, device, monkeypatch):
    """Its own forward, a method of the instance, a patched function run as ever."""
    original, x = models.randomized(Level()), input_of(device)
    model = trained(original, x)
    calls = []
    forward = model.down._conv_forward
    model.down._conv_forward = lambda *args: (calls.append(1), forward(*args))[1]
    noted = Noted(model)
    assert_right(noted.run, model, original, x)
    assert kgopts(noted.calls) == {"conv3d.default": 2, "conv_transpose3d.default": 1}
    del model.down._conv_forward
    monkeypatch.setattr(F, "conv3d", lambda *args: torch.conv3d(*args) * 2)
    torch._dynamo.reset()
    noted = Noted(model, fullgraph=False)  # Dynamo 2.11 leaves the graph where it looks at a patched module
    torch.testing.assert_close(noted.run(x), copy.deepcopy(original).to(device)(x), rtol=1e-4, atol=1e-4)
    assert "conv3d.default" not in kgopts(noted.calls)
