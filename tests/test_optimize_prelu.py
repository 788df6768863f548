"""PReLU behind norms and their sums, as networks write it, in both front ends: its slopes stay the user's parameter."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from optimize_models import randomized, rewritten

pytestmark = pytest.mark.usefixtures("ours")


class Block(nn.Module):
    """As MONAI's blocks: a Sequential of convolution, norm and PReLU, a residual sum, and a PReLU behind that."""

    def __init__(self, slopes: int = 1) -> None:
        super().__init__()
        self.adn = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.Dropout(0.0), nn.PReLU(slopes)
        )
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.act = nn.PReLU(slopes)
        self.last = nn.Conv2d(4, 4, 3, padding=1)
        self.last_norm = nn.GroupNorm(4, 4)

    def forward(self, x):
        h = self.adn(x)
        h = self.conv(h)
        h = self.norm(h)
        h = h + x
        h = self.act(h)
        return self.act(self.last_norm(self.last(h)))  # shared


BECAME = ["group_norm_prelu", "group_norm_prelu(sum)", "group_norm_prelu"]


def pair(make, device, layout="contiguous", shape=(2, 4, 9, 10)):
    original = randomized(make(), device)
    x = torch.randn(shape, device=device)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    model = copy.deepcopy(original)
    kgopt.optimize(model, measure=False)
    return original, model, x


def assert_same(original, model, x):
    """Values, and the gradients of x and of every parameter."""
    results = []
    for m in (model, original):
        given = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = m(given)
        wanted = {"x": given, **{n: p for n, p in m.named_parameters() if p.requires_grad}}
        dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
        gradients = torch.autograd.grad(y, [*wanted.values()], dy)
        results.append((y, dict(zip(wanted, gradients, strict=True))))
    (y, mine), (expected, right) = results
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    for name, gradient in mine.items():
        if name != "adn.0.bias":  # an instance norm takes it away: what is left is rounding
            torch.testing.assert_close(gradient, right[name], rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("slopes", [1, 4])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_code_sums_and_sequentials(slopes, layout, device):
    original, model, x = pair(lambda: Block(slopes), device, layout)
    assert sorted(row.became for row in kgopt.report(model).sites) == sorted(BECAME), str(kgopt.report(model))
    if layout == "contiguous" or device == "cpu":
        assert_same(original, model, x)
    assert_same(original.eval(), model.eval(), x)


def test_the_report_names_it(device):
    _, model, _ = pair(Block, device)
    text = str(kgopt.report(model))
    for label in ("InstanceNorm2d → prelu", "GroupNorm → sum → prelu", "GroupNorm → prelu"):
        assert label in text, text


def test_slopes_stay_the_users_and_are_followed(device):
    original, model, x = pair(Block, device)
    assert model.state_dict().keys() == original.state_dict().keys()
    assert type(model.act) is nn.PReLU
    assert isinstance(model.act.weight, nn.Parameter)
    for m in (original, model):
        with torch.no_grad():
            m.act.weight.fill_(-3.0)
        m.adn[3].weight = nn.Parameter(torch.full([1], 2.0, device=device))
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (original, model)]
    for _ in range(2):
        for m, o in zip((original, model), optimizers, strict=True):
            o.zero_grad()
            m(x).square().mean().backward()
            o.step()
    torch.testing.assert_close(model.act.weight, original.act.weight, rtol=1e-4, atol=1e-4)
    model.load_state_dict({n: t + 0.5 for n, t in original.state_dict().items()})
    original.load_state_dict({n: t + 0.5 for n, t in original.state_dict().items()})
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(x), original(x), rtol=1e-4, atol=1e-4)


def test_what_keeps_them_apart(device):
    """Hooks, another forward, slopes that PyTorch refuses, frozen slopes: what PyTorch's code gives comes out."""
    original, model, x = pair(Block, device)
    seen = []
    handle = model.act.register_forward_hook(lambda m, args, y: seen.append(y))
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)
    assert len(seen) == 2
    handle.remove()
    model.act.forward = lambda t: t * 2
    original.act.forward = model.act.forward
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)
    del model.act.forward, original.act.forward
    model.act.weight = nn.Parameter(torch.zeros(3, device=device))
    with pytest.raises(RuntimeError, match="Mismatch of parameter numbers"):
        model(x)
    model.act.weight = nn.Parameter(torch.zeros(4, device=device, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="promoting"):
        model(x)
    model.act.weight = nn.Parameter(original.act.weight.detach().clone(), requires_grad=False)
    original.act.weight.requires_grad_(False)
    assert_same(original, model, x)


def test_a_replaced_function_runs(device, monkeypatch):
    original, model, x = pair(Block, device)
    calls = []

    def prelu(x, weight):
        calls.append(weight)
        return torch.prelu(x, weight) * 2

    monkeypatch.setattr(F, "prelu", prelu)
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)
    assert len(calls) == 6


class InFront(nn.Module):
    """The PReLU stands in front of a norm and behind a convolution, and one behind another activation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 1),
            nn.PReLU(4),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.PReLU(),
            nn.GroupNorm(2, 4),
            nn.PReLU(4),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.body(x)


def test_elsewhere_it_is_pytorchs(device):
    original, model, x = pair(InFront, device)
    became = [row.became for row in kgopt.report(model).sites]
    assert became == ["group_norm(act=relu)", "group_norm_prelu"]
    assert_same(original, model, x)
    assert_same(original.eval(), model.eval(), x)


class Norm(nn.GroupNorm):
    """As timm's GroupNormAct."""

    def __init__(self) -> None:
        super().__init__(2, 4)
        self.act = nn.PReLU()

    def forward(self, x):
        return self.act(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


def test_a_norm_that_has_one(device):
    original, model, x = pair(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), Norm()), device)
    assert [row.became for row in kgopt.report(model).sites] == ["group_norm_prelu"]
    assert_same(original, model, x)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(low, device):
    original, model, x = pair(Block, device)
    with torch.autocast(device, low):
        y, expected = model(x), original(x)
        y.float().mean().backward()
        expected.float().mean().backward()
    assert y.dtype is expected.dtype is low
    torch.testing.assert_close(y, expected, rtol=0.1, atol=0.1)
    torch.testing.assert_close(model.act.weight.grad, original.act.weight.grad, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype, device):
    original, model, x = pair(Block, device)
    original, model, x = original.to(dtype), model.to(dtype), x.to(dtype)
    y, expected = model(x), original(x)
    assert y.dtype is dtype
    tolerance = 0.1 if dtype is torch.bfloat16 else 1e-9
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


def test_measured(device):
    """With measurements the site's question holds the slope, and its backward is timed."""
    original = randomized(Block(4), device)
    model, x = copy.deepcopy(original), torch.randn(2, 4, 9, 10, device=device)
    model = kgopt.optimize(model, example_inputs=(x,))
    assert all("accurate" not in row.reason for row in kgopt.report(model).sites), str(kgopt.report(model))
    assert_same(original, model, x)


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_by_any_backend(grad, device):
    original, model, x = pair(Block, device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        y, expected = compiled(x), original(x)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    if grad:
        y.square().mean().backward()
        expected.square().mean().backward()
        torch.testing.assert_close(model.act.weight.grad, original.act.weight.grad, rtol=1e-3, atol=1e-4)


def functional(x, slope, one, residual):
    h = F.prelu(F.group_norm(x, 2), slope)
    h = torch.prelu(F.instance_norm(h), weight=one)
    return F.prelu(F.group_norm(h, 4) + residual, slope)


def test_captured_graphs(device):
    x, residual = torch.randn(2, 2, 4, 9, 10, device=device)
    given = [x, torch.randn(4, device=device), torch.randn(1, device=device), residual]
    y, report = rewritten(functional, *given)
    torch.testing.assert_close(y, functional(*given), rtol=1e-4, atol=1e-4)
    assert [row.became for row in report.sites] == ["group_norm_prelu", "group_norm_prelu", "group_norm_prelu(sum)"]


def test_captured_modules(device):
    original = randomized(Block(4), device)
    x = torch.randn(2, 4, 9, 10, device=device)
    y, report = rewritten(original.eval(), x)
    torch.testing.assert_close(y, original(x), rtol=1e-4, atol=1e-4)
    # A dropout, though it does nothing, is a function in the graph.
    assert [row.became for row in report.sites] == ["group_norm", *BECAME[1:]]
