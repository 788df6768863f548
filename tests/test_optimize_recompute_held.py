"""``optimize(recompute=True)``: one result for all nodes of a backward that want it, and how long it is there."""

from __future__ import annotations

import copy
import gc
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import kgopt
import optimize_models as models
from kgopt.rewrite.gradients import recompute
from kgopt.torch_private import missing

pytestmark = [
    pytest.mark.skipif(not recompute.may_hook_saved_tensors(), reason="needs names of torch that are hidden here"),
    pytest.mark.skipif(
        not {"torch._C._current_graph_task_id", "torch.Tensor._version"}.isdisjoint(missing()),
        reason="nothing is held without them",
    ),
]


class Block(nn.Module):
    """Its convolution and its sum want the input."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.LeakyReLU(0.1)

    def forward(self, x):
        out = self.norm(self.conv(x)) + x
        return self.act(out)


class Network(nn.Module):
    def __init__(self, blocks=1):
        super().__init__()
        self.stem, self.norm, self.act = nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.SiLU()
        self.blocks, self.last = nn.Sequential(*(Block() for _ in range(blocks))), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return self.last(self.blocks(self.act(self.norm(self.stem(x)))))


@pytest.fixture
def computed(monkeypatch):
    """The storages of what was computed again."""
    found = []
    compute = recompute._Recipe._computed

    def noted(self):
        y = compute(self)
        found.append(StorageWeakRef(y.untyped_storage()))
        return y

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(recompute._Recipe, "_computed", noted)
    return found


def ways(model, device):
    """Optimized, and optimized with results computed again."""
    model = models.randomized(model, device).double()
    return [kgopt.optimize(copy.deepcopy(model), measure=False, recompute=on) for on in (False, True)]


def input_of(device):
    return torch.randn(2, 8, 6, 6, device=device, dtype=torch.float64, requires_grad=True)


def gradients(model, x, **more):
    return torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()], **more)


def test_once_for_all_that_want_it(computed, device):
    kept, ours = ways(Network(), device)
    x = input_of(device)
    assert all(map(torch.equal, gradients(ours, x), gradients(kept, x)))
    # The sum for the last convolution, for which the stem's result was computed; that once more for the sum's gradient
    # and the block's convolution.
    assert len(computed) == 3
    assert all(storage.expired() for storage in computed)


def test_a_graph_that_is_kept_holds_nothing(computed, device):
    kept, ours = ways(Network(2), device)
    x = input_of(device)
    expected = gradients(kept, x)
    loss = ours(x).square().sum()
    for times in (1, 2):
        found = torch.autograd.grad(loss, [x, *ours.parameters()], retain_graph=True)
        assert all(map(torch.equal, found, expected))
        assert all(storage.expired() for storage in computed)
        assert len(computed) % times == 0


def test_a_part_of_a_backward_holds_no_longer_than_the_graph(computed, device):
    """The block's convolution, which wants the held result, never runs."""
    kept, ours = ways(Network(), device)
    x = input_of(device)
    gc.collect()
    gc.disable()
    try:
        loss = ours(x).square().sum()
        torch.autograd.grad(loss, ours.blocks[0].norm.weight, retain_graph=True)
        assert not all(storage.expired() for storage in computed)
        found = torch.autograd.grad(loss, [x, *ours.parameters()], retain_graph=True)
        assert all(storage.expired() for storage in computed)
        torch.autograd.grad(loss, ours.blocks[0].norm.weight)
        del loss
        assert all(storage.expired() for storage in computed)
    finally:
        gc.enable()
    assert all(map(torch.equal, found, gradients(kept, x)))


def test_what_is_held_is_no_excuse_for_a_changed_operand(device):
    _, ours = ways(Network(), device)
    loss = ours(input_of(device)).square().sum()
    torch.autograd.grad(loss, ours.blocks[0].norm.weight, retain_graph=True)  # and its convolution's input is held
    with torch.no_grad():
        ours.norm.weight.add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        torch.autograd.grad(loss, ours.blocks[0].conv.weight)


class Scribbles(torch.autograd.Function):
    """Its backward writes to what it kept."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return dy


class Scribbler(nn.Module):
    def __init__(self, scribbles):
        super().__init__()
        self.conv, self.norm, self.act, self.last = (
            nn.Conv2d(8, 8, 1),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 1),
        )
        self.scribbles = scribbles

    def forward(self, x):
        y = self.act(self.norm(self.conv(x)))
        return self.last(y) + (Scribbles.apply(y) if self.scribbles else y)


def test_what_a_node_writes_to_it_is_not_for_the_next(computed, device):
    torch.manual_seed(0)
    _, clean = ways(Scribbler(False), device)
    torch.manual_seed(0)
    _, ours = ways(Scribbler(True), device)
    ours.load_state_dict(clean.state_dict())
    x = input_of(device)
    expected = gradients(clean, x)
    computed.clear()
    assert all(map(torch.equal, gradients(ours, x), expected))
    assert len(computed) == 2


class Viewed(nn.Module):
    """A view of the result is kept, and the result."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act, self.last = (
            nn.Conv2d(8, 8, 1),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 1),
        )
        self.scale = nn.Parameter(torch.ones(8, 4, 6))

    def forward(self, x):
        y = self.act(self.norm(self.conv(x)))
        return self.last(y)[:, :, 1:5] + y[:, :, 1:5] * self.scale


def test_a_view(computed, device):
    kept, ours = ways(Viewed(), device)
    x = input_of(device)
    assert all(map(torch.equal, gradients(ours, x), gradients(kept, x)))
    assert len(computed) == 1


def test_second_derivatives(device):
    found = []
    x = input_of(device)
    for model in ways(Network(2), device):
        dx = gradients(model, x, create_graph=True)[0]
        found.append(torch.autograd.grad(dx.square().sum(), [x, *model.blocks.parameters()]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_threads_read_one_graph(computed, device):
    kept, ours = ways(Network(2), device)
    x = input_of(device)
    expected = gradients(kept, x)
    losses = [ours(x).square().sum()]
    found = []

    def work():
        for _ in range(10):
            found.append(torch.autograd.grad(losses[0], [x, *ours.parameters()], retain_graph=True))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    for grads in found:
        assert all(map(torch.equal, grads, expected))
    losses.clear()
    assert all(storage.expired() for storage in computed)


@pytest.mark.parametrize("tasks", [itertools.count(), itertools.repeat(-1)], ids=["another backward", "no backward"])
def test_it_is_held_within_a_backward_alone(tasks, computed, device, monkeypatch):
    """As where streams differ, and where torch does not tell which backward runs."""
    kept, ours = ways(Network(), device)
    x = input_of(device)
    monkeypatch.setattr(recompute, "current_graph_task", lambda: next(tasks))
    assert all(map(torch.equal, gradients(ours, x), gradients(kept, x)))
    assert len(computed) == 4


def test_an_operand_is_not_held(computed, device, monkeypatch):
    """A concatenation in a decoder reads what the encoder's convolutions want much later: it would lie through all
    levels below."""
    monkeypatch.setattr(recompute, "current_graph_task", lambda: 1)
    x = torch.randn(3, device=device)
    inner = recompute._Recipe(torch.sin, [recompute._kept(x)], 1, False, x.device)
    outer = recompute._Recipe(torch.cos, [inner], 1, False, x.device)
    inner.slots, outer.slots = 2, 1
    assert torch.equal(outer.value(), x.sin().cos())
    assert all(storage.expired() for storage in computed)
    y = inner.value()
    count = len(computed)
    outer.value()
    assert len(computed) == count + 1  # its own
    assert inner.value() is y
    del y
    assert all(storage.expired() for storage in computed)


@pytest.mark.gpu
def test_streams():
    """Whoever reads on another stream computes for itself."""

    class Branches(Scribbler):
        def forward(self, x):
            y = self.act(self.norm(self.conv(x)))
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                z = self.last(y)
            torch.cuda.current_stream().wait_stream(side)
            return z + y * y

    kept, ours = ways(Branches(False), "cuda")
    x = input_of("cuda")
    for _ in range(5):
        torch.testing.assert_close(gradients(ours, x), gradients(kept, x), rtol=1e-9, atol=1e-10)
