"""Nearest upsampling and the convolution behind it in captured graphs (rewrite/captured/passes/upsampled.py)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kgopt.rewrite import backend
from kgopt.rewrite.captured import passes


class Up(nn.Module):
    """One of the ways in which it is written."""

    def __init__(self, way="scale", dims=2, **conv):
        super().__init__()
        kind = nn.Conv2d if dims == 2 else nn.Conv3d
        self.conv = kind(4, 6, **{"kernel_size": 3, "padding": 1, **conv})
        self.up = nn.Upsample(scale_factor=2)
        self.way = way

    def forward(self, x):
        if self.way == "module":
            x = self.up(x)
        elif self.way == "size":
            x = F.interpolate(x, size=[2 * s for s in x.shape[2:]], mode="nearest")
        elif self.way == "exact":
            x = F.interpolate(x, scale_factor=2.0, mode="nearest-exact")
        elif self.way == "linear":
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear")
        else:
            x = F.interpolate(x, scale_factor=2.0)
        if self.way == "read twice":
            return self.conv(x) + x.mean()
        if self.way == "activation":
            x = x.relu()
        if self.way == "written":
            self.conv.weight.mul_(1)
        return self.conv(x)


def captured(model, x, **options):
    """The result of the rewritten graph as it stands, and the functions that it calls."""
    calls = []

    def rewrite(graph, example_inputs):
        backend.rewrite_graph(graph, always=True)
        calls.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    return torch.compile(model, backend=rewrite, **options)(x), calls


OP = torch.ops.kgopt.upsample_conv_weight.default


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("way", ["scale", "module", "size", "exact"])
def test_graphs(way, channels_last):
    model = Up(way).eval()
    x = torch.randn(2, 4, 7, 9)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    with torch.no_grad():
        y, calls = captured(model, x)
        torch.testing.assert_close(y, model(x))
    assert OP in calls
    assert F.interpolate not in calls
    assert "transposed convolution" in backend.last_report.glue


@pytest.mark.parametrize(
    "conv",
    [
        {"kernel_size": 5, "padding": (2, 0)},
        {"groups": 2, "bias": False},
        {"padding": "same"},
        {"kernel_size": 2, "padding": 1},
    ],
)
def test_convolutions(conv):
    model = Up(**conv).eval()
    x = torch.randn(1, 4, 12, 11)
    with torch.no_grad():
        y, calls = captured(model, x)
        torch.testing.assert_close(y, model(x))
    assert OP in calls


def test_volumes():
    model = Up(dims=3).eval()
    x = torch.randn(1, 4, 3, 6, 5)
    with torch.no_grad():
        y, calls = captured(model, x)
        torch.testing.assert_close(y, model(x))
    assert OP in calls


@pytest.mark.parametrize(
    ("way", "conv"),
    [
        ("linear", {}),
        ("read twice", {}),
        ("activation", {}),
        ("written", {}),
        ("scale", {"stride": 2}),
        ("scale", {"dilation": 2, "padding": 2}),
        ("scale", {"kernel_size": 1, "padding": 0}),
        ("scale", {"padding_mode": "circular"}),
    ],
)
def test_what_stays_as_it_is(way, conv):
    model = Up(way, **conv).eval()
    x = torch.randn(2, 4, 7, 9)
    with torch.no_grad():
        y, calls = captured(model, x)
        assert torch.equal(y, model(x))
    assert OP not in calls


def test_training_and_unknown_sizes_stay_as_they_are():
    model, x = Up(), torch.randn(2, 4, 7, 9)
    _, calls = captured(model, x)
    assert OP not in calls
    with torch.no_grad():
        _, calls = captured(model, x, dynamic=True)
    assert OP not in calls


def test_autocast_stays_as_it_is():
    model, x = Up(), torch.randn(2, 4, 7, 9)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, calls = captured(model, x)
    assert OP not in calls


@pytest.mark.parametrize("faster", [True, False])
def test_measured(faster, monkeypatch):
    """The decision is that of two ways on tensors like the graph's, which are measured once for equal sizes."""
    asked = []

    def verdict(call, apart):
        folded = call.run("folded_aten")
        asked.append((tuple(call.x.shape), apart().shape, folded.shape))
        torch.testing.assert_close(folded, apart(), rtol=1e-3, atol=1e-3)
        return "folded_aten" if faster else ""

    monkeypatch.setattr(passes.upsampled.search, "verdict", verdict)
    monkeypatch.setattr(passes.upsampled, "may_measure", lambda device: True)
    model, x = Up().eval(), torch.randn(2, 4, 7, 9)

    def rewrite(graph, example_inputs):
        backend.rewrite_graph(graph)
        assert (OP in {node.target for node in graph.graph.nodes}) == faster
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=rewrite)(x), model(x))
    assert asked == [((2, 4, 7, 9), (2, 6, 14, 18), (2, 6, 14, 18))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype):
    """Measured for real while the graph is compiled, inside the compiler's callback."""
    model = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(256, 256, 3, padding=1)).cuda().to(dtype).eval()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(1, 256, 128, 128, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    with torch.no_grad():
        y = torch.compile(model, backend="kgopt")(x)
        exact = F.conv2d(
            F.interpolate(x.double(), scale_factor=2.0), *(p.double() for p in model[1].parameters()), padding=1
        )
        theirs = model(x)
    assert "transposed convolution" in backend.last_report.glue
    error, allowed = ((t.double() - exact).norm() / exact.norm() for t in (y, theirs))
    assert error <= 2 * allowed + 1e-6
