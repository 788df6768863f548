"""Zero padding in front of a convolution in captured graphs (rewrite/captured/passes/padded.py)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kgopt.rewrite import backend


class Net(nn.Module):
    def __init__(self, before, **conv):
        super().__init__()
        self.conv = nn.Conv3d(4, 6, 3, **conv)
        self.before = before

    def forward(self, x, cache):
        return self.conv(self.before(x, cache))


def captured(model, *args, **options):
    """The result of the rewritten graph as it stands; its paddings' lists, its convolution's kernel and padding."""
    seen = []

    def rewrite(graph, example_inputs):
        backend.rewrite_graph(graph)
        for node in graph.graph.nodes:
            if node.op == "call_function" and getattr(node.target, "__name__", "") in ("pad", "conv3d"):
                seen.append(node)
        return graph

    torch._dynamo.reset()
    result = torch.compile(model, backend=rewrite, **options)(*args)
    pads = [list(node.args[1]) for node in seen if node.target is not torch.conv3d]
    conv = next(node for node in seen if node.target is torch.conv3d)
    weight = conv.args[1].meta["example_value"] if len(conv.args) > 1 else conv.kwargs["weight"].meta["example_value"]
    return result, pads, tuple(weight.shape[2:]), conv.args[4] if len(conv.args) > 4 else None


def draw():
    return torch.randn(2, 4, 4, 6, 7, dtype=torch.float64), torch.randn(2, 4, 2, 6, 7, dtype=torch.float64)


FOLDED = {
    "causal": (lambda x, c: F.pad(x, (1, 1, 1, 1, 2, 0)), [[0, 0, 0, 0, 2, 0]], (3, 3, 3), [0, 1, 1]),
    "joined": (lambda x, c: F.pad(torch.cat([c, x], 2), (1, 1, 2, 2, 0, 0)), [], (3, 3, 3), [0, 2, 1]),
    "twice": (lambda x, c: F.pad(F.pad(x, (1, 1)), (0, 0, 0, 0, 2, 2), "constant", 0.0), [], (3, 3, 3), [2, 0, 1]),
    "one frame": (lambda x, c: F.pad(x[:, :, :1], (1, 1, 1, 1, 2, 0)), [], (1, 3, 3), [0, 1, 1]),
    "two frames": (lambda x, c: F.pad(x[:, :, :2], (1, 1, 0, 0, 1, 0)), [], (2, 3, 3), [0, 0, 1]),
    "module": (lambda x, c: nn.ZeroPad3d(1)(x), [], (3, 3, 3), [1, 1, 1]),
    "nothing": (lambda x, c: F.pad(x, (0, 0, 0, 0)), [], (3, 3, 3), [0, 0, 0]),
}


@pytest.mark.parametrize(("before", "pads", "kernel", "padding"), FOLDED.values(), ids=FOLDED)
def test_folded(before, pads, kernel, padding):
    model, args = Net(before).double(), draw()
    with torch.no_grad():
        result, *rest = captured(model, *args)
        torch.testing.assert_close(result, model(*args))
    assert rest == [pads, kernel, padding]


@pytest.mark.parametrize(("name", "padding"), [("same", [2, 2, 2]), ("valid", [1, 1, 1])])
def test_a_convolution_whose_padding_has_a_name(name, padding):
    model, args = Net(FOLDED["module"][0], padding=name).double(), draw()
    with torch.no_grad():
        result, *rest = captured(model, *args)
        torch.testing.assert_close(result, model(*args))
    assert rest == [[], (3, 3, 3), padding]


KEPT = {
    "one side": lambda x, c: F.pad(x, (0, 1, 0, 1)),
    "value": lambda x, c: F.pad(x, (1, 1, 1, 1), value=1.0),
    "reflect": lambda x, c: F.pad(x, (1, 1, 1, 1, 1, 1), mode="reflect"),
    "cropped": lambda x, c: F.pad(x, (1, 1, -1, 1)),
}


@pytest.mark.parametrize("before", KEPT.values(), ids=KEPT)
def test_kept(before):
    model, args = Net(before).double(), draw()
    with torch.no_grad():
        result, pads, _, padding = captured(model, *args)
        torch.testing.assert_close(result, model(*args))
    assert len(pads) == 1
    assert set(padding) == {0}


def test_what_others_read_or_write_is_padded():
    class Read(Net):
        def forward(self, x, cache):
            y = F.pad(x, (1, 1))
            return self.conv(y) + y.sum()

    class Written(Net):
        def forward(self, x, cache):
            x = x + 1
            y = F.pad(x, (1, 1))
            x.mul_(3)
            return self.conv(y) + x.sum()

    for cls in (Read, Written):
        model, args = cls(None).double(), draw()
        with torch.no_grad():
            result, pads, *_ = captured(model, *args)
            torch.testing.assert_close(result, model(*args))
        assert pads == [[1, 1]]


def test_training_and_sizes_that_are_not_known():
    model, args = Net(FOLDED["causal"][0]).double(), draw()
    assert captured(model, *args)[1] == [[1, 1, 1, 1, 2, 0]]
    with torch.no_grad():
        assert captured(model, *args, dynamic=True)[1] == [[1, 1, 1, 1, 2, 0]]
