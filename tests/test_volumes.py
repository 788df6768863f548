"""Convolutions of volumes in captured graphs: channels_last where it was measured to be faster (rewrite/volumes.py)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kgopt.rewrite import backend, clocks, verdicts, volumes


class Net(nn.Module):
    """Two levels of a U-Net, and what a model may do with a feature map."""

    def __init__(self, way="plain"):
        super().__init__()
        self.first, self.down = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 8, 3, stride=2, padding=1)
        self.norm, self.up = nn.GroupNorm(2, 8), nn.ConvTranspose3d(8, 4, 2, stride=2)
        self.last = nn.Conv3d(4, 3, kernel_size=1)
        self.way = way

    def forward(self, x):
        if (
            self.way == "view"
        ):  # of a kernel of 3: on one thread the CPU's convolution of 1 always gives a contiguous one
            return self.first(x).view(x.shape[0], -1)
        x = F.leaky_relu(self.first(x), 0.1, inplace=True)
        y = F.silu(self.norm(self.down(x)))
        y = self.up(y) + x
        if self.way == "reshape":
            return self.last(y).reshape(y.shape[0], 3, -1).softmax(2), y
        if self.way == "written":
            y.mul_(2)
        return self.last(y), y


@pytest.fixture
def faster(monkeypatch):
    """What is measured second takes a half of the time; a dict to change that."""
    how = {"ratio": 0.5}
    monkeypatch.setattr(volumes, "_MEASURES_ON", ("cpu", "cuda"))
    monkeypatch.setattr(clocks, "busy_both", lambda first, second, device: (first(), second(), 1.0, how["ratio"])[2:])
    monkeypatch.setattr(verdicts, "compiled", verdicts.Store())
    monkeypatch.setattr(verdicts, "inductor_cache_dir", lambda: None)
    return how


def captured(model, x, **options):
    """The result of the rewritten graph as it stands, and what it calls."""
    calls = []

    def rewrite(graph, example_inputs):
        backend.rewrite_graph(graph)
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    return torch.compile(model, backend=rewrite, **options)(x), calls


def agree(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("way", ["plain", "reshape", "written"])
def test_results_lie_as_before(faster, way):
    model, x = Net(way).eval(), torch.randn(2, 2, 4, 6, 8)
    with torch.no_grad():
        found, calls = captured(model, x)
        agree(found, model(x))
    assert "contiguous" in calls
    assert "4 convolutions of volumes in channels_last" in backend.last_report.glue


def test_a_view_of_features_keeps_the_format(faster):
    """A view of a contiguous feature map is none in channels_last: PyTorch refuses it."""
    model, x = Net("view").eval(), torch.randn(2, 2, 4, 6, 8)
    with torch.no_grad():
        found, calls = captured(model, x)
        agree([found], [model(x)])
    assert "contiguous" not in calls
    assert not backend.last_report.glue


def test_what_is_no_faster_stays(faster):
    faster["ratio"] = 0.95
    model, x = Net().eval(), torch.randn(2, 2, 4, 6, 8)
    with torch.no_grad():
        found, calls = captured(model, x)
        agree(found, model(x))
    assert "contiguous" not in calls


def test_a_training_step(faster):
    model, x = Net(), torch.randn(2, 2, 4, 6, 8, requires_grad=True)
    found, calls = captured(model, x)
    assert "contiguous" in calls
    expected = model(x)
    agree(found, expected)
    wanted = [x, *model.parameters()]
    ours, theirs = (torch.autograd.grad(sum(y.square().sum() for y in ys), wanted) for ys in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_inductor(faster):
    model, x = Net().eval(), torch.randn(2, 2, 4, 6, 8)
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(model, backend="kgopt")(x)
        agree(found, model(x))


def test_sizes_that_are_not_known(faster):
    model = Net().eval()
    with torch.no_grad():
        for depth in (4, 6):
            x = torch.randn(2, 2, depth, 6, 8)
            found, calls = captured(model, x, dynamic=True)
            agree(found, model(x))
            assert "contiguous" not in calls


def test_own_kernels(faster, monkeypatch):
    """The op that is written is that of the measurement."""
    find = volumes.find

    def found(graph_module):
        formats = find(graph_module)
        formats.options = dict.fromkeys(formats.options, "own")
        return formats

    monkeypatch.setattr(volumes, "find", found)
    model, x = Net().eval(), torch.randn(2, 2, 4, 6, 8)
    seen = []

    def rewrite(graph, example_inputs):
        backend.rewrite_graph(graph)
        seen.extend((str(node.target), node.args[1:], node.kwargs) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="kgopt"):  # there is no such kernel on the CPU
        torch.compile(model, backend=rewrite)(x)
    names = [name for name, *_ in seen]
    assert names.count("kgopt.conv3d.default") == 3
    assert names.count("kgopt.conv_transpose3d.default") == 1
    convs = [(args, kwargs) for name, args, kwargs in seen if name == "kgopt.conv3d.default"]
    args, kwargs = convs[1]
    assert args[2:] == ([2, 2, 2], [1, 1, 1], [1, 1, 1], 1)
    assert kwargs == {"backend": "kgopt"}
