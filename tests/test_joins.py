"""Concatenation in training: PyTorch's values and gradients, bit for bit, and gradients that are dense."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kgopt._layout import FORMATS, is_dense_channels_last
from kgopt.rewrite.gradients import joins, training
from kgopt.rewrite.optimized import classes, known


def _tensors(dtype, sizes=(16, 32, 8), rank=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spatial = (3, 4, 5)[: rank - 2]
    made = [torch.randn(2, c, *spatial, generator=generator).to(dtype) for c in sizes]
    return [t.contiguous(memory_format=FORMATS[rank]).requires_grad_() for t in made]


@pytest.mark.parametrize("rank", [4, 5])
@pytest.mark.parametrize("sizes", [(16, 32, 8), (5, 3), (7, 9, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients_are_those_of_torch(dtype, sizes, rank):
    tensors = _tensors(dtype, sizes, rank)
    expected, actual = torch.cat(tensors, 1), joins.join(tensors)
    assert torch.equal(expected, actual)
    assert expected.stride() == actual.stride()
    dy = torch.randn(expected.shape).to(dtype).contiguous(memory_format=FORMATS[rank])
    theirs, ours = torch.autograd.grad(expected, tensors, dy), torch.autograd.grad(actual, tensors, dy)
    for e, a, t in zip(theirs, ours, tensors, strict=True):
        assert torch.equal(e, a)
        assert is_dense_channels_last(a)
        assert a.stride() == t.stride()


def test_a_gradient_of_other_strides_and_operands_without_one():
    first, second = _tensors(torch.float32, (4, 8))
    second = second.detach()
    y = joins.join([first, second])
    y.sum().backward()  # an expanded gradient
    assert torch.equal(first.grad, torch.ones_like(first))
    assert second.grad is None


def test_second_derivatives():
    a, b = _tensors(torch.float64, (4, 2), 4)
    assert torch.autograd.gradgradcheck(lambda *t: joins.join(t).square(), (a, b))


@pytest.mark.parametrize(
    ("call", "takes"),
    [
        (lambda a, b: (([a, b], 1), {}), True),
        (lambda a, b: (((a, b),), {"dim": 1}), True),
        (lambda a, b: (([a, b],), {"axis": -3}), True),
        (lambda a, b: ((), {"tensors": [a, b], "dim": 1}), True),
        (lambda a, b: (([a, b],), {}), False),  # dim 0
        (lambda a, b: (([a, b], 2), {}), False),
        (lambda a, b: (([a, b], True), {}), False),
        (lambda a, b: (([a], 1), {}), False),
        (lambda a, b: (([a, b.double()], 1), {}), False),  # torch promotes
        (lambda a, b: (([a, b.contiguous()], 1), {}), False),
        (lambda a, b: (([a, b], 1), {"out": torch.empty(0)}), False),
        (lambda a, b: (([a, torch.empty(0)], 1), {}), False),
    ],
)
def test_which_calls_it_takes(call, takes):
    a, b = _tensors(torch.float32, (8, 4), 4)
    args, kwargs = call(a, b)
    found = joins.tensors_of(lambda t: isinstance(t, torch.Tensor), args, kwargs)
    assert (found is not None) is takes


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(12, 4, 3, padding=1)

    def forward(self, x, skip):
        return self.conv(torch.cat((x, skip), dim=1))


def test_a_module_that_joins_in_training(monkeypatch):
    """Measured once for each kind of call; afterwards looked up, and PyTorch's where it was not measured."""
    asked, joined = [], []
    monkeypatch.setattr(training, "_is_plain", lambda x: type(x) is torch.Tensor)
    monkeypatch.setattr(joins, "gain", lambda tensors: asked.append(tensors) or 1e-3)
    monkeypatch.setattr(joins, "join", lambda tensors: joined.append(tensors) or torch.cat(tensors, 1))
    model = Decoder()
    model.__class__ = classes.make_class(Decoder, (("training",),))
    known.put(model, training=training.TrainingState(measuring=True))
    x, skip = _tensors(torch.float32, (8, 4), 4)
    model(x, skip)
    known.get(model, "training").measuring = False
    model(x, skip)
    other = [t.detach()[:1].contiguous(memory_format=torch.channels_last).requires_grad_() for t in (x, skip)]
    model(*other)
    assert (len(asked), len(joined)) == (1, 2)
    with torch.no_grad():
        model(x, skip)
    assert len(joined) == 2
