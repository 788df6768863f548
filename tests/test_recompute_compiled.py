"""``torch.compile(backend="kgopt", options={"kgopt.recompute": True})``: what the compiled forward keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import kgopt
from kgopt.rewrite.captured.passes import convolutions

SIZE = 12


def a_norm(kind):
    return {
        "group": lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU()),
        "instance": lambda: nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(0.1)),
        "prelu": lambda: nn.Sequential(nn.GroupNorm(4, 4), nn.PReLU(4)),
        "in front": lambda: nn.Sequential(nn.GELU(), nn.GroupNorm(2, 4)),
    }[kind]()


def a_net(kind):
    return nn.Sequential(nn.Conv2d(3, 4, 3), a_norm(kind), nn.Conv2d(4, 4, 3), a_norm(kind), nn.Conv2d(4, 2, 3))


class Sums(nn.Module):
    """Sums behind norms, each of which adds the one before it."""

    def __init__(self, act, count, is_kept=True):
        super().__init__()
        self.is_kept = is_kept  # what a sum adds, by the convolution that reads it
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(count))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(count))
        self.act = act

    def forward(self, x):
        h = self.first(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = self.act(norm(conv(h if self.is_kept else h.square())) + h)
        return self.last(h)


def step(model, x, **options):
    """The result, gradients, and the images that autograd keeps from forward to backward."""
    torch._dynamo.reset()
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    run = torch.compile(model, backend="kgopt", options={"kgopt.always": True, **options})
    kept = []

    def pack(t):
        kept.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run(x)
    y.square().sum().backward()
    images = [shape for shape in kept if len(shape) == x.dim() and shape[0] == len(x) and shape[2] > SIZE - 6]
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())], images


@pytest.mark.parametrize("kind", ["group", "instance", "prelu", "in front"])
def test_results_of_norms_are_not_kept(kind, device):
    model, x = a_net(kind).to(device), torch.randn(2, 3, SIZE, SIZE, device=device)
    before, kept_before = step(model, x)
    after, kept_after = step(model, x, **{"kgopt.recompute": True})
    assert all(row.became for row in kgopt.rewrite.backend.last_report.sites)
    # The input, and of each of two norms its input and its result; without the results.
    assert len(kept_before) == 5
    assert len(kept_after) == 3
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b)


def test_volumes_that_move_to_channels_last(device, monkeypatch):
    """What is said of a norm's result in between, that it lies so, is computed again with it."""
    monkeypatch.setattr(convolutions, "_measured", lambda *given: convolutions._Times(2.0, 1.0, 2.0, 1.0, "", ""))
    norms = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU()), nn.Sequential(nn.GELU(), nn.GroupNorm(5, 5))
    model = nn.Sequential(nn.Conv3d(3, 4, 3), norms[0], nn.Conv3d(4, 5, 3), norms[1], nn.Conv3d(5, 2, 3))
    x = torch.randn(2, 3, SIZE, SIZE, SIZE, device=device)
    before, kept_before = step(model.to(device), x)
    after, kept_after = step(model, x, **{"kgopt.recompute": True})
    assert "convolutions of volumes in channels_last" in kgopt.rewrite.backend.last_report.glue
    assert (len(kept_before), len(kept_after)) == (5, 3)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("count", "left_out"), [(1, 1), (2, 1), (5, 3)])
@pytest.mark.parametrize("act", ["leaky_relu", "silu", "prelu", "relu", "none"])
def test_every_other_sum_is_computed_again(act, count, left_out, device):
    model = Sums(an_act(act), count)
    before, after = kept_by(model.to(device), device)
    # The input, of each sum the convolution's result and its own; the first adds what is the convolution's input.
    assert before == 2 + 2 * count
    assert after == before - left_out


@pytest.mark.parametrize("act", ["relu", "none"])
def test_a_sum_is_kept_where_nothing_keeps_what_it_adds(act, device):
    before, after = kept_by(Sums(an_act(act), 1, is_kept=False).to(device), device)
    assert before == after


def an_act(name):
    return {"prelu": nn.PReLU(4), "none": nn.Identity()}.get(name) or getattr(nn.functional, name)


def kept_by(model, device):
    """How many images are kept without and with recomputing, which changes nothing else."""
    x = torch.randn(2, 3, SIZE, SIZE, device=device)
    before, kept_before = step(model, x)
    after, kept_after = step(model, x, **{"kgopt.recompute": True})
    assert all(row.became for row in kgopt.rewrite.backend.last_report.sites)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return len(kept_before), len(kept_after)


def test_inference_takes_the_option():
    model, x = a_net("group").eval(), torch.randn(2, 3, SIZE, SIZE)
    run = torch.compile(model, backend="kgopt", options={"kgopt.always": True, "kgopt.recompute": True})
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
