"""Models that train with second derivatives, before and after optimize: penalties on gradients, Hessians, jvp."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.utils.checkpoint import checkpoint

import kgopt
import optimize_models as models
from kgopt.rewrite.gradients import training
from optimize_models import FUSED
from test_optimize import optimized
from test_optimize_training import made_ours
from tolerances import assert_as_good_as_torch


class Critic(nn.Module):
    """Norms of both kinds, with activations that are fused, residuals, and one of the pipelines in plain modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.head = nn.Conv2d(8, 8, 3)
        self.head_norm = nn.GroupNorm(4, 8)

    def forward(self, x):
        h = self.stem(x)
        h = h + torch.nn.functional.gelu(self.norm(self.conv(h)))
        c = self.head(self.up(h))
        r = c + torch.nn.functional.hardswish(torch.tanh(self.head_norm(c)))
        return torch.logsumexp(r, dim=1, keepdim=True).mean((1, 2, 3))


def losses_of(critic, steps=4, **how):
    """A critic's losses while it trains with a penalty on its gradient (Gulrajani et al. 2017)."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-2)
    device = next(critic.parameters()).device
    losses = []
    for _ in range(steps):
        real, fake = torch.randn(2, 4, 3, 6, 5, dtype=torch.float64, device=device)
        between = torch.lerp(real, fake, torch.rand(4, 1, 1, 1, dtype=torch.float64, device=device)).requires_grad_()
        if how.get("checkpointed"):
            y = checkpoint(critic, between, use_reentrant=False)
        else:
            y = critic(between)
        (slope,) = torch.autograd.grad(y.sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture
def critic(device):
    return models.randomized(Critic().double(), device)


def ours_in_training(critic, monkeypatch):
    """What measurements on a GPU would have to choose first: convolutions and upsampling too, on any device."""
    monkeypatch.setattr(training, "_is_plain", lambda x: type(x) is torch.Tensor)
    return made_ours(critic)


def nodes_of(y):
    """Names of the nodes that a backward of y would run."""
    names, left, seen = [], [y.grad_fn], set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name())
            left += [following for following, _ in node.next_functions]
    return names


@pytest.mark.parametrize("how", ["optimize", "checkpointed", "channels_last", "ours in training"])
def test_training_with_a_gradient_penalty(how, critic, monkeypatch):
    """An optimized critic could not train with a gradient penalty: kgopt's ops refused a second derivative."""
    original = copy.deepcopy(critic)
    if how == "ours in training":
        ours_in_training(critic, monkeypatch)
    else:
        kgopt.optimize(critic, measure=False, channels_last=how == "channels_last")
        assert sum(bool(row.became) for row in kgopt.report(critic).sites) == 3
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64, device=next(critic.parameters()).device)
    assert any(name.startswith("Kgopt_") for name in nodes_of(critic(x)))
    expected, actual = (losses_of(c, checkpointed=how == "checkpointed") for c in (original, critic))
    assert expected[0] != pytest.approx(expected[-1], rel=1e-3), "nothing was learned"
    assert actual == pytest.approx(expected, rel=1e-8)
    for a, e in zip(critic.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-8)


def second(model, x):
    """Gradients, and those of a penalty on them, for all parameters; None where there is none."""
    x = x.detach().clone().requires_grad_()
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    leaves = [x, *model.parameters()]
    first = torch.autograd.grad((y * weights).sum(), leaves, create_graph=True, allow_unused=True)
    penalty = sum(g.sin().sum() for g in first if g is not None)
    second = torch.autograd.grad(penalty, leaves, allow_unused=True)
    return [None if g is None else g.detach() for g in (*first, *second)]


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(make, id=name) for name, make in FUSED.items() if name != "diffusers_scale_shift"),
        *(pytest.param(make, id=make.__name__) for family in models.PIPELINES.values() for make in family),
    ],
)
def test_values(make, device):
    """Where the original has a second derivative, so has the optimized model, to the same parameters."""
    model, original = optimized(lambda: make().double(), device)
    x = models.input_for(model, device, torch.float64)
    for a, e in zip(second(model, x), second(original, x), strict=True):
        if a is not None or e is not None:  # one that is zero everywhere is None in some versions of PyTorch
            a, e = (torch.zeros_like(e if a is None else a) if t is None else t for t in (a, e))
            torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-7 * max(1.0, float(e.abs().max())))


def test_torch_func(critic, device):
    """Hessians and Hessian-vector products over functional_call, per sample too, and jvp."""
    original = copy.deepcopy(critic)
    kgopt.optimize(critic, measure=False)
    x, tangent = torch.randn(2, 1, 3, 6, 5, dtype=torch.float64, device=device)
    results = []
    for model in (critic, original):
        parameters = {k: p.detach() for k, p in model.named_parameters()}
        torch.manual_seed(1)
        direction = {k: torch.randn_like(p) for k, p in parameters.items()}
        norm = {k: p for k, p in parameters.items() if k.startswith("head_norm")}

        def loss(p, x=x, model=model, parameters=parameters):
            return functional_call(model, {**parameters, **p}, (x,)).sum()

        curvature = hessian(loss)(norm)
        samples = torch.stack([x, x + tangent])
        results.append(
            [
                *(curvature[a][b] for a in norm for b in norm),
                *jvp(grad(loss), (parameters,), (direction,))[1].values(),
                *vmap(hessian(loss), (None, 0))({"head_norm.bias": norm["head_norm.bias"]}, samples)[
                    "head_norm.bias"
                ].values(),
                *jvp(lambda x, loss=loss: loss({}, x), (x,), (tangent,)),
                hessian(lambda x, loss=loss: loss({}, x))(x),
            ]
        )
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-9)
    # A convolution's bias in front of a norm has no curvature.
    assert sum(bool(e.abs().max() > 1e-6) for e in results[1]) > len(results[1]) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_penalty_as_good_as_pytorchs(dtype, device):
    model, original = optimized(FUSED["monai"], device)
    x = models.input_for(model, device)
    exact = second(copy.deepcopy(original).double(), x.double())
    expected, actual = (second(m.to(dtype), x.to(dtype)) for m in (original, model))
    scale = max(float(e.norm()) for e in exact if e is not None)
    for a, e, r in zip(actual, expected, exact, strict=True):
        if r is not None and float(r.norm()) > 1e-6 * scale:
            assert_as_good_as_torch(a, e, r, factor=4 if r.numel() > 64 else 10)
