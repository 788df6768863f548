"""Every activation that the ops know, as networks write it, in both front ends: found, named, and PyTorch's values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt.rewrite.chains import meanings
from kgopt.rewrite.pytorch import originals
from optimize_models import randomized, rewritten

# Module, and the act that stands for it.
MODULES = [
    (lambda: nn.LeakyReLU(0.2), "leaky_relu(0.2)"),
    (lambda: nn.LeakyReLU(-1), "leaky_relu(-1.0)"),
    (lambda: nn.ELU(0.7), "elu(0.7)"),
    (lambda: nn.CELU(1.5), "celu(1.5)"),
    (lambda: nn.SELU(), "selu"),
    (lambda: nn.Softplus(2, 15), "softplus(2.0,15.0)"),
    (lambda: nn.Hardtanh(-2, 3), "hardtanh(-2.0,3.0)"),
    (lambda: nn.Hardtanh(0, 6), "hardtanh(0.0,6.0)"),
    (lambda: nn.ReLU6(inplace=True), "relu6"),
    (lambda: nn.Threshold(0.1, 20), "threshold(0.1,20.0)"),
    (lambda: nn.Hardsigmoid(), "hardsigmoid"),
    (lambda: nn.LogSigmoid(), "logsigmoid"),
    (lambda: nn.Softsign(), "softsign"),
    (lambda: nn.Tanhshrink(), "tanhshrink"),
    (lambda: nn.Softshrink(0.3), "softshrink(0.3)"),
    (lambda: nn.Hardshrink(0.8), "hardshrink(0.8)"),
]

FUNCTIONS = [
    ("F.leaky_relu(x, 0.2)", "leaky_relu(0.2)"),
    ("F.leaky_relu_(x, negative_slope=0.2)", "leaky_relu(0.2)"),
    ("F.elu(x, 0.7, inplace=True)", "elu(0.7)"),
    ("F.elu_(x, 0.7)", "elu(0.7)"),
    ("F.celu(x, alpha=1.5)", "celu(1.5)"),
    ("F.celu_(x, 1.5)", "celu(1.5)"),
    ("F.selu(x)", "selu"),
    ("torch.selu(x)", "selu"),
    ("torch.selu_(x)", "selu"),
    ("F.softplus(x, 2, 15)", "softplus(2.0,15.0)"),
    ("F.hardtanh(x, -2, 3)", "hardtanh(-2.0,3.0)"),
    ("F.hardtanh_(x, -2.0, max_val=3)", "hardtanh(-2.0,3.0)"),
    ("F.relu6(x)", "relu6"),
    ("F.relu6(x, inplace=True)", "relu6"),
    ("F.threshold(x, 0.1, 20)", "threshold(0.1,20.0)"),
    ("F.threshold_(x, 0.1, 20)", "threshold(0.1,20.0)"),
    ("F.hardsigmoid(x)", "hardsigmoid"),
    ("F.logsigmoid(x)", "logsigmoid"),
    ("F.softsign(x)", "softsign"),
    ("F.tanhshrink(x)", "tanhshrink"),
    ("F.softshrink(x, 0.3)", "softshrink(0.3)"),
    ("F.hardshrink(x, lambd=0.8)", "hardshrink(0.8)"),
    ("torch.clamp(x, -0.5, 1)", "clamp(-0.5,1.0)"),
    ("torch.clamp(x, max=1)", "clamp(-inf,1.0)"),
    ("torch.clamp_min(x, -0.5)", "clamp(-0.5,inf)"),
    ("torch.clip(x, -0.5)", "clamp(-0.5,inf)"),
    ("x.clamp(min=-0.5)", "clamp(-0.5,inf)"),
    ("x.clamp_(-0.5, 1)", "clamp(-0.5,1.0)"),
    ("x.clamp_max(1)", "clamp(-inf,1.0)"),
    ("x.clamp_min_(-0.5)", "clamp(-0.5,inf)"),
]

if not meanings.CLAMP_STOPS:  # before 2.14 PyTorch's gradient at a bound is 1
    FUNCTIONS = [row for row in FUNCTIONS if not row[1].startswith("clamp")]

# Not one that the ops have, or an error of PyTorch's.
OTHERS = [
    "torch.clamp(x, x.mean(), x.max())",
    "x.clamp(min=torch.tensor(0.5))",
    "F.celu(x, -0.5)",
    "F.leaky_relu(x, -0.5, inplace=True)",
    "F.threshold(x, 0, float('inf'))",
]


def model_of(expression: str, folder, name: str) -> nn.Module:
    """A module whose forward is a norm and that expression, in a file, for its source is read."""
    path = folder / f"{name}.py"
    path.write_text(
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
        "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.norm = nn.GroupNorm(2, 8)\n\n"
        f"    def forward(self, x):\n        x = self.norm(x)\n        return {expression}\n"
    )
    namespace: dict = {"__name__": name, "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace["Block"]()


def check(model: nn.Module, act: str, device: str) -> None:
    model = randomized(model, device).eval()
    x = torch.randn(2, 8, 6, 5, device=device) * 2

    def run(f):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        y.sum().backward()
        return y.detach(), leaf.grad

    right = run(model)
    kgopt.optimize(model)
    (row,) = kgopt.report(model).sites
    assert row.kind == f"GroupNorm → {act}"
    assert row.became == f"group_norm(act={act})"
    for ours, theirs in zip(run(model), right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("make", "act"), MODULES, ids=[act for _, act in MODULES])
def test_modules(make, act, device):
    check(nn.Sequential(nn.GroupNorm(2, 8), make()), act, device)


@pytest.mark.parametrize(("expression", "act"), FUNCTIONS, ids=[e for e, _ in FUNCTIONS])
def test_code(expression, act, device, tmp_path):
    check(model_of(expression, tmp_path, f"block_{abs(hash(expression))}"), act, device)


@pytest.mark.parametrize(("expression", "act"), FUNCTIONS, ids=[e for e, _ in FUNCTIONS])
def test_graphs(expression, act, device):
    namespace = {"torch": torch, "F": F}
    exec(f"def function(x):\n    x = F.group_norm(x, 2)\n    return {expression}", namespace)
    x = torch.randn(2, 8, 6, 5, device=device) * 2
    y, report = rewritten(namespace["function"], x)
    torch.testing.assert_close(y, namespace["function"](x), rtol=1e-4, atol=1e-4)
    (row,) = report.sites
    if row.kind != "GroupNorm":  # Dynamo writes some of PyTorch's functions out
        assert row.kind == f"GroupNorm → {act}"
    else:
        assert expression.startswith(("F.softsign", "F.tanhshrink", "F.threshold("))


@pytest.mark.parametrize("expression", OTHERS)
def test_others_are_left_to_torch(expression, tmp_path):
    model = randomized(model_of(expression, tmp_path, f"other_{abs(hash(expression))}"), "cpu").eval()
    x = torch.randn(2, 8, 6, 5)
    right = model(x)
    kgopt.optimize(model)
    assert kgopt.report(model).sites[0].kind == "GroupNorm"
    torch.testing.assert_close(model(x), right, rtol=1e-4, atol=1e-4)


def test_a_parameter_that_changes_is_seen():
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.LeakyReLU(0.2)).eval()
    kgopt.optimize(model)
    x = torch.randn(2, 8, 6, 5)
    model(x)
    model[1].negative_slope = 0.5
    torch.testing.assert_close(model(x), F.leaky_relu(F.group_norm(x, 2), 0.5))


def test_all_that_activations_look_up_is_pytorchs():
    assert [cls for cls, untouched in originals.AS_CALLED.items() if not untouched()] == []


def test_more_parameters_than_an_op_takes():
    model = nn.Sequential(nn.GroupNorm(2, 8), *(nn.Hardtanh(-i, i) for i in range(9, 1, -1))).eval()
    x = torch.randn(2, 8, 6, 5) * 3
    right = model(x)
    kgopt.optimize(model)
    torch.testing.assert_close(model(x), right)
