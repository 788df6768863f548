"""torch.compile(backend="kgopt"): the rewrite on captured graphs, in inference and training."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import kgopt  # noqa: F401  (registers the backend)
import optimize_models as models
from kgopt.rewrite import backend
from optimize_models import rewritten
from test_optimize import assert_same_results
from tolerances import assert_as_good_as_torch

ALWAYS = {"kgopt.always": True}


def test_is_known_to_torch():
    assert "kgopt" in torch._dynamo.list_backends()
    code = "import torch, kgopt\ntorch.compile(abs, backend='kgopt')\nassert 'kgopt' in torch._dynamo.list_backends()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["monai", "functional", "two_statements", "cgr", "crg", "diffusers"])
def test_modules_are_rewritten(name, device):
    original = models.randomized(models.FUSED[name](), device).eval()
    x = models.input_for(original, device)
    y, report = rewritten(original, x)
    torch.testing.assert_close(y, original(x), rtol=1e-4, atol=1e-4)
    assert len(report.fused) == len(report.sites) > 0, str(report)


@pytest.mark.parametrize(("op", "make"), [(op, make) for op, makes in models.PIPELINES.items() for make in makes])
def test_pipelines_are_recognized(op, make, device):
    original = models.randomized(make(), device)
    x = models.input_for(original, device)
    y, report = rewritten(original, x)
    torch.testing.assert_close(y, original(x), rtol=1e-4, atol=1e-4)
    assert [row.became for row in report.sites] == [op]


def functional(x, w, b):
    h = F.silu(F.group_norm(x, 2, w, b), inplace=True)
    h = torch.relu_(F.group_norm(h, num_groups=4, eps=1e-3))
    h = F.leaky_relu(F.instance_norm(h, weight=w, bias=b))
    return F.group_norm(h, 4).flatten(1).mean(1)


def twice(x, w, b):
    h = F.group_norm(x, 2, w, b)
    return F.silu(h) + h


def changed_in_between(x, w, b):
    x = x * 1
    h = F.group_norm(x, 2, w, b)
    x.add_(1)
    return F.silu(h) + x


def in_place_on_what_is_returned(x, w, b):
    h = F.group_norm(x, 2, w, b)
    F.relu(h, inplace=True)
    return h


def in_place_before(x, w, b):
    y = x * 1
    z = F.group_norm(F.relu(y, inplace=True), 2, w, b)
    return z + y


@pytest.mark.parametrize(
    ("function", "fused"),
    [(functional, 4), (twice, 0), (changed_in_between, 0), (in_place_on_what_is_returned, None), (in_place_before, 1)],
)
def test_functional_code(function, fused, device):
    x, w, b = torch.randn(2, 8, 5, 6, device=device), torch.randn(8, device=device), torch.randn(8, device=device)
    expected = function(x.clone(), w, b)
    y, report = rewritten(function, x.clone(), w, b)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    if fused is not None:
        assert len(report.fused) == fused, str(report)


def adds(x, w, b):
    """Sums as libraries write them, with and without an activation behind."""
    h = F.relu(F.group_norm(x, 2, w, b) + x)
    h = torch.add(h, F.group_norm(h, 4))
    r = h
    h = F.instance_norm(h * 2, weight=w, bias=b)
    h += r
    h = F.leaky_relu_(h, 0.2)
    h = F.group_norm(h, 1, w, b).add_(F.group_norm(r * 3, 2))
    return F.silu(h)


def adds_otherwise(x, w, b):
    """What the op does not do: a smaller tensor, in place on the other one, twice the norm's own value."""
    h = F.group_norm(x, 2, w, b) + x.mean((2, 3), keepdim=True)
    h = F.group_norm(h, 2) + x.double().sum()
    r = h * 1
    r += F.group_norm(h, 2, w, b)
    n = F.group_norm(r, 4)
    return F.relu(n + n)


@pytest.mark.parametrize(
    ("function", "sums", "alone"), [(adds, 4, 1), (adds_otherwise, 0, 4)], ids=["ours", "not ours"]
)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_sums_behind_norms(function, sums, alone, format, device):
    """act(norm(x) + r) is one op, forward and backward."""
    x = torch.randn(2, 8, 6, 5, device=device, dtype=torch.float64).contiguous(memory_format=format)
    given = [x.requires_grad_(), *(torch.randn(8, device=device, dtype=x.dtype, requires_grad=True) for _ in range(2))]
    (y, report), expected = rewritten(function, *given), function(*given)
    dy = torch.randn_like(expected)
    torch.testing.assert_close(y, expected)
    for mine, right in zip(torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, given, dy), strict=True):
        torch.testing.assert_close(mine, right)
    became = [row.became.partition("(")[0] for row in report.sites]
    assert sorted(became) == ["group_norm"] * alone + ["group_norm_add"] * sums, str(report)


def test_autocast_regions_are_not_crossed(device):
    def function(x, w, b):
        with torch.autocast(x.device.type, torch.bfloat16):
            c = F.conv2d(x, w)
            h = F.group_norm(F.relu(c), 2, b, b)
        return F.silu(h)

    x, w, b = (
        torch.randn(2, 4, 9, 9, device=device),
        torch.randn(8, 4, 3, 3, device=device),
        torch.randn(8, device=device),
    )
    expected = function(x, w, b)
    y, _ = rewritten(function, x, w, b)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["monai", "functional"])
def test_inductor_inference(name, device):
    original = models.randomized(models.FUSED[name](), device).eval()
    compiled = torch.compile(copy.deepcopy(original), backend="kgopt", options=ALWAYS)
    x = models.input_for(original, device)
    with torch.no_grad():
        y = compiled(x)
        torch.testing.assert_close(y, original(x), rtol=1e-4, atol=1e-4)
    assert y.stride() == original(x).stride()
    assert len(backend.last_report.fused) == len(backend.last_report.sites) > 0


@pytest.mark.slow
@pytest.mark.parametrize("always", [False, True])
def test_inductor_training(always, device):
    original = models.randomized(models.MonaiResBlock(), device)
    compiled = torch.compile(copy.deepcopy(original), backend="kgopt", options=ALWAYS if always else None)
    # What is left to Inductor has its errors: on the CPU up to 15 times those of eager code.
    alone = torch.compile(copy.deepcopy(original))
    assert_same_results(compiled, original, models.input_for(original, device), also=alone)
    took = [row.became for row in backend.last_report.sites]
    assert took == (["group_norm(act=relu)"] * 2 if always or device == "cuda" else ["", ""])


@pytest.mark.slow
def test_inductor_dynamic_shapes_and_options(device):
    w, b = torch.randn(8, device=device, requires_grad=True), torch.randn(8, device=device)
    compiled = torch.compile(functional, backend="kgopt", dynamic=True, options={**ALWAYS, "max_autotune": False})
    for size in (5, 6, 9):
        x = torch.randn(2, 8, size, 4, device=device)
        grads = [torch.autograd.grad(f(x, w, b).square().sum(), w)[0] for f in (compiled, functional)]
        torch.testing.assert_close(compiled(x, w, b), functional(x, w, b), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
    assert len(backend.last_report.fused) == 4


@pytest.mark.slow
def test_inductor_mode(device):
    compiled = torch.compile(functional, backend="kgopt", mode="max-autotune-no-cudagraphs")
    x, w, b = torch.randn(2, 8, 5, 4, device=device), torch.randn(8, device=device), torch.randn(8, device=device)
    torch.testing.assert_close(compiled(x, w, b), functional(x, w, b), rtol=1e-4, atol=1e-5)


def halved(x, w):
    return F.group_norm(x, 2, w) / 2


def arithmetic(x, w):
    return (0.25 * F.silu(F.group_norm(x, 2, w)) - 1).add(3).mul(2)


def arithmetic_in_place(x, w):
    h = F.group_norm(x, 2, w)
    h *= 3
    h -= 0.5
    return torch.relu(h.div_(2))


def of_a_bool(x, w):
    return F.group_norm(x, 2, w) * True


def by_zero(x, w):
    return F.group_norm(x, 2, w) / 0


def with_alpha(x, w):
    return torch.add(F.group_norm(x, 2, w), 1, alpha=2)


def in_front(x, w):
    """Arithmetic in front of a norm does not make the convolution kgopt's."""
    return F.group_norm(F.conv2d(x, w[:, None, None, None].expand(8, 8, 1, 1)) * 2, 2)


@pytest.mark.parametrize(
    ("function", "became"),
    [
        (halved, "group_norm(act=mul(0.5))"),
        (arithmetic, "group_norm(act=silu+mul(0.25)+add(-1.0)+add(3.0)+mul(2.0))"),
        (arithmetic_in_place, "group_norm(act=mul(3.0)+add(-0.5)+mul(0.5)+relu)"),
        *((function, "group_norm") for function in (of_a_bool, by_zero, with_alpha, in_front)),
    ],
    ids=lambda argument: getattr(argument, "__name__", ""),
)
def test_arithmetic_with_numbers(function, became, device):
    given = torch.randn(2, 8, 6, 5, device=device), torch.randn(8, device=device)

    def gradients(function, dtype=torch.float32):
        leaves = [t.detach().to(dtype).requires_grad_() for t in given]
        y = function(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, torch.full_like(y, 0.3).cumsum(-1))

    mine = gradients(lambda *leaves: rewritten(function, *leaves)[0])
    for a, b, right in zip(mine, gradients(function), gradients(function, torch.float64), strict=True):
        if right.isfinite().all():
            assert_as_good_as_torch(a, b, right)
    (row,) = rewritten(function, *given)[1].sites
    assert row.became == became


def written_out(x, w):
    h = F.group_norm(x, 2, w)
    return h * torch.sigmoid(h)


def written_out_otherwise(x, w):
    h = F.group_norm(x, 2, w)
    return torch.mul(h.sigmoid(), h)


def another_gate(x, w):
    h = F.group_norm(x, 2, w)
    return h * torch.sigmoid(x)


def gate_read_twice(x, w):
    h = F.group_norm(x, 2, w)
    gate = torch.sigmoid(h)
    return h * gate + gate


def changed_behind_the_gate(x, w):
    h = F.group_norm(x, 2, w)
    gate = torch.sigmoid(h)
    h.add_(1)
    return h * gate


@pytest.mark.parametrize(
    ("function", "became"),
    [
        (written_out, "group_norm(act=silu)"),
        (written_out_otherwise, "group_norm(act=silu)"),
        *((function, "group_norm") for function in (another_gate, gate_read_twice, changed_behind_the_gate)),
    ],
    ids=lambda argument: getattr(argument, "__name__", ""),
)
def test_silu_written_out(function, became, device):
    given = torch.randn(2, 8, 6, 5, device=device), torch.randn(8, device=device)
    y, report = rewritten(function, *given)
    torch.testing.assert_close(y, function(*given), rtol=1e-5, atol=1e-5)
    (row,) = report.sites
    assert row.became == became


def test_silu_takes_no_integers(device):
    def function(x):
        n = x.long()
        return n * torch.sigmoid(n)

    x = torch.randn(2, 8, device=device)
    torch.testing.assert_close(rewritten(function, x)[0], function(x))
