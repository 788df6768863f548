"""What is done to a model after ``optimize``: storage, parameters, modules and attributes exchanged in every way."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import kgopt


class Block(nn.Module):
    """A residual block in statements."""

    def __init__(self, channels):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.act = nn.SiLU()

    def forward(self, x):
        h = self.norm1(x)
        h = self.act(h)
        h = self.conv1(h)
        h = self.norm2(h)
        h = self.act(h)
        return x + self.conv2(h)


class Net(nn.Module):
    """Such blocks between Sequentials."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.body = nn.Sequential(Block(8), Block(8))
        self.head = nn.Sequential(nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.1), nn.Conv2d(8, 2, 1))

    def forward(self, x):
        return self.head(self.body(self.first(x)))


def make(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = Net().to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


X = torch.randn(2, 3, 6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def optimized(model):
    """One that has run: what it looks up for a call, it has looked up."""
    model = kgopt.optimize(model, measure=False)
    assert sum(bool(row.became) for row in kgopt.report(model).sites) == 6
    return model


def agree(model, original, x=X):
    """Results and the input's gradients, in float64."""
    found = []
    for m in (model, original):
        leaf = x.clone().requires_grad_()
        y = m(leaf)
        y.square().sum().backward()
        found.append((y.detach(), leaf.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("swap", [False, True])
def test_dtype_and_memory_format(swap):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model, original = optimized(make(dtype=torch.float32)), make(dtype=torch.float32)
        model(X.float())
        for m in (model, original):
            m.double().to(memory_format=torch.channels_last)
        agree(model, original)
        x = X.to(memory_format=torch.channels_last)
        assert model(x).stride() == original(x).stride()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("how", ["assign", "to_empty"])
def test_optimized_without_storage(how):
    with torch.device("meta"):
        model = Net().double().eval()
    optimized(model)
    if how == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(make().state_dict(), assign=how == "assign")
    agree(model, make())


def test_weights_of_another_are_assigned():
    model = optimized(make())
    model(X)
    model.load_state_dict(make(1).state_dict(), assign=True)
    agree(model, make(1))


def test_to_another_process():
    model = optimized(make()).share_memory()
    agree(pickle.loads(ForkingPickler.dumps(model)), make())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    agree(kgopt.restore(torch.load(file, weights_only=False)), make())


def test_average_of_weights():
    model, original = optimized(make()), make()
    of_both = [AveragedModel(m) for m in (model, original)]
    for m, average in zip((model, original), of_both, strict=True):
        average.update_parameters(m)
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(1.1)
        average.update_parameters(m)
    agree(*of_both)


def test_an_ensemble():
    """One model called with the stacked parameters of several."""
    originals = [make(seed) for seed in range(3)]
    models = [optimized(copy.deepcopy(m)) for m in originals]
    state = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    y = torch.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (X,)))(*state)
    torch.testing.assert_close(y, torch.stack([m(X) for m in originals]), rtol=1e-9, atol=1e-9)


class LoRA(nn.Module):
    """An adapter, as peft's: in place of the layer, whose attributes it has."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Conv2d(base.in_channels, 1, 1, bias=False, dtype=torch.float64)
        self.up = nn.Conv2d(1, base.out_channels, 1, bias=False, dtype=torch.float64)
        for conv in (self.down, self.up):
            nn.init.constant_(conv.weight, 0.3)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapters(model):
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d) and not isinstance(parent, LoRA):
                setattr(parent, name, LoRA(child))


def other_modules(model):
    model.body[0].act = nn.GELU()
    model.body[0].norm2 = nn.BatchNorm2d(8, dtype=torch.float64).eval()
    model.first[1] = nn.GroupNorm(8, 8, dtype=torch.float64)
    model.body[1] = nn.Sequential(model.body[1], nn.Tanh())


def longer_and_shorter(model):
    model.first.insert(1, nn.Tanh())
    model.body.append(nn.Sigmoid())
    del model.head[1]


def other_attributes(model):
    model.first[1].num_groups, model.first[1].eps = 4, 0.5
    model.first[0].padding, model.first[0].stride = (0, 0), (2, 2)
    model.body[0].norm1.num_groups = 8
    model.head[1].negative_slope = 0.7


def other_parameters(model):
    model.first[1].weight = model.first[1].bias = None
    model.body[0].conv1.bias = None
    del model.body[0].norm1.weight
    model.body[0].norm1.weight = torch.full((8,), 2.0, dtype=torch.float64)
    del model.head[0].bias
    model.head[0].register_buffer("bias", torch.ones(8, dtype=torch.float64))


CHANGES = (adapters, other_modules, longer_and_shorter, other_attributes, other_parameters)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_is_changed(change):
    """Before the next call, and after restore; optimized once more it is found again."""
    model, original = optimized(make()), make()
    model(X)
    for m in (model, original):
        change(m)
    agree(model, original)
    agree(kgopt.optimize(copy.deepcopy(model), measure=False), original)
    agree(kgopt.restore(model), original)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
