"""``optimize(recompute=True)`` under autocast: weights of PyTorch's convolutions, rounded again in the backward."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import kgopt
import optimize_models as models
from kgopt.rewrite.gradients import casts, recompute
from kgopt.torch_private import missing

pytestmark = pytest.mark.skipif(
    not recompute.may_hook_saved_tensors() or any(name.endswith("._version") for name in missing()),
    reason="needs names of torch that are hidden here",
)


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(casts, "BYTES", 0)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.GroupNorm(2, 8), nn.SiLU()
        self.second = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2, bias=False)
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2, output_padding=1)
        self.last = nn.Conv2d(8, 4, 3, padding="same", padding_mode="circular")

    def forward(self, x):
        return self.last(self.up(self.second(self.act(self.norm(self.first(x))))))


@pytest.fixture
def copies(monkeypatch):
    """The storages of copies of weights that a forward made."""
    found = []

    def offer_copy(self, y, again, of, offer=recompute.Forward.offer_copy):
        found.append(StorageWeakRef(y.untyped_storage()))
        offer(self, y, again, of)

    monkeypatch.setattr(recompute.Forward, "offer_copy", offer_copy)
    return found


def pair(device, model=None):
    model = models.randomized(Network() if model is None else model, device)
    return [kgopt.optimize(copy.deepcopy(model), measure=False, recompute=on) for on in (False, True)]


def input_of(device):
    return torch.randn(2, 8, 6, 6, device=device)


def forward(model, x, dtype=torch.bfloat16):
    with torch.autocast(x.device.type, dtype):
        return model(x)


def gradients(model, x, **more):
    x = x.detach().requires_grad_()
    y = forward(model, x).float()
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
    return torch.autograd.grad(y, [x, *model.parameters()], dy, **more)


def test_copies_are_gone_within_the_forward_and_the_gradients_are_the_same_bits(copies, device):
    kept, ours = pair(device)
    x = input_of(device)
    assert all(map(torch.equal, gradients(ours, x), gradients(kept, x)))
    copies.clear()
    with torch.autocast(device, torch.bfloat16):
        y = ours(x)
        assert len(copies) == 3  # "same" and circular padding are PyTorch's
        assert all(storage.expired() for storage in copies)
    del y
    # The three copies, and the norm's result where a convolution keeps it as the norm gave it.
    assert recompute.known.get(ours, "recompute").results in (3, 4)


def test_where_nothing_is_rounded_nothing_is_copied(copies, device):
    kept, ours = pair(device)
    x = input_of(device)
    expected = kept(x)
    assert torch.equal(ours(x), expected)
    with torch.no_grad():
        forward(ours, x)
    ours.requires_grad_(False)
    forward(ours, x.requires_grad_())
    assert not copies


def test_small_weights_are_left_to_autocast(device, monkeypatch):
    monkeypatch.setattr(casts, "BYTES", 2**20)
    _, ours = pair(device)
    assert type(ours.first) is nn.Conv2d


def test_what_is_no_plain_convolution_any_more_runs_as_it_is(copies, device):
    kept, ours = pair(device)
    x = input_of(device)
    for model in (kept, ours):
        model.second.forward = lambda x: x * 2
        model.first.__dict__["weight"] = model.first.weight.detach() * 2
    assert torch.equal(forward(ours, x), forward(kept, x))
    assert len(copies) == 1


def test_a_changed_weight_is_refused(device):
    _, ours = pair(device)
    y = forward(ours, input_of(device))
    with torch.no_grad():
        ours.second.weight.add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.sum().backward()


def test_a_module_that_is_called_twice(copies, device):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)

        def forward(self, x):
            return self.conv(torch.relu(self.norm(self.conv(x))))

    kept, ours = pair(device, Twice())
    x = input_of(device)
    # Autocast's one copy adds up both gradients in half precision, ours in single.
    for a, b in zip(gradients(ours, x), gradients(kept, x), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))
    assert len(copies) == 2


def test_second_derivatives(device):
    found = []
    x = input_of(device)
    for model in pair(device):
        dx, *_ = gradients(model, x, create_graph=True)
        found.append(torch.autograd.grad(dx.float().square().sum(), [model.first.weight, model.up.weight]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * float(b.abs().max()))


def test_it_goes_with_the_mode_and_with_copies(copies, device):
    kept, ours = pair(device)
    x = input_of(device)
    expected = gradients(kept, x)
    for model in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        copies.clear()
        assert all(map(torch.equal, gradients(model, x), expected))
        assert len(copies) == 3
    kgopt.optimize(ours, measure=False)
    assert type(ours.first) is nn.Conv2d
    kgopt.optimize(ours, measure=False, recompute=True)
    assert type(ours.first) is not nn.Conv2d
    kgopt.restore(ours)
    assert type(ours.first) is nn.Conv2d


def test_compiled_code_has_autocasts_copies(copies, device):
    kept, ours = pair(device)
    x = input_of(device)
    expected = gradients(kept, x)
    compiled = torch.compile(ours, backend="aot_eager")
    for a, b in zip(gradients(compiled, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))
    assert not copies
