"""Biases in front of instance norms in captured graphs (captured/passes/unbiased.py), beside eager PyTorch's."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_graphs import captured, needs_cuda_build
from kgopt import accuracy
from kgopt.rewrite import backend
from kgopt.rewrite.captured import passes
from test_tapped_graphs import results

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALVES = [torch.float16, torch.bfloat16]
ALWAYS = {"kgopt.always": True, "kgopt.cuda_graph": False}
CONVS = {
    (rank, transposed): getattr(nn, f"Conv{'Transpose' * transposed}{rank}d")
    for rank, transposed in itertools.product((1, 2, 3), (False, True))
}
NORMS = {
    "instance": lambda rank: getattr(nn, f"InstanceNorm{rank}d")(6, affine=True),
    "plain instance": lambda rank: getattr(nn, f"InstanceNorm{rank}d")(6),
    "group": lambda rank: nn.GroupNorm(6, 6),
    "plain group": lambda rank: nn.GroupNorm(6, 6, affine=False),
}
KINDS = {
    "strided": {"stride": 2, "padding": 1},
    "grouped": {"padding": 1, "groups": 2},
    "as it is": {},
}


class Block(nn.Module):
    """A convolution with a bias, a norm and an activation without a kink, where rounding would decide; and one more."""

    def __init__(self, rank=2, norm="instance", transposed=False, size=1.0, **kind):
        super().__init__()
        torch.manual_seed(0)
        self.conv = CONVS[rank, transposed](4, 6, 3, **kind)
        self.norm, self.last = NORMS[norm](rank), CONVS[rank, False](6, 2, 1)
        with torch.no_grad():
            self.conv.bias.normal_().mul_(size)
            for p in self.norm.parameters():
                p.uniform_(0.5, 1.5)

    def forward(self, x):
        return self.last(F.silu(self.norm(self.conv(x))))


def tensor(rank, dtype, device="cpu", last=False):
    torch.manual_seed(1)
    x = torch.randn(2, 4, *(9, 8, 7)[:rank], device=device).to(dtype)
    return x.contiguous(memory_format=FORMATS[rank]) if last else x


def rewritten(seen, always=True):
    """A backend that runs the rewritten graph as it stands."""

    def run(graph, inputs):
        seen.append(backend.rewrite_graph(graph, always))
        return graph

    return run


def agrees(model, x, grad=True, autocast=None, compiled=False, dynamic=False):
    """Values and gradients, as near to float64 as PyTorch's are; the bias's gradient is zeros."""
    torch._dynamo.reset()
    wide, seen = copy.deepcopy(model).double(), []
    right = x.detach().double()
    for t in (x, right) if grad else ():
        t.requires_grad_()
    wanted = [x, *model.parameters()] if grad else []
    exact = results(wide, right, [right, *wide.parameters()] if grad else [])
    of_backend = {"backend": "kgopt", "options": ALWAYS} if compiled else {"backend": rewritten(seen)}
    run = torch.compile(model, dynamic=dynamic, **of_backend)
    with (
        torch.set_grad_enabled(grad),
        torch.autocast(x.device.type, autocast or torch.bfloat16, enabled=autocast is not None),
    ):
        ours, theirs = results(run, x, wanted), results(model, x, wanted)
    assert "biases that an instance norm takes out again left out: " in backend.last_report.glue
    assert ours[0].stride() == theirs[0].stride()
    for t, found, plain, expected in zip([None, *wanted], ours, theirs, exact, strict=True):
        assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
        if t is model.conv.bias:
            assert not found.any()
            continue
        errors = [accuracy.relative_error(t.detach(), expected.detach()) for t in (found, plain)]
        assert errors[0] <= accuracy.allowed(autocast or x.dtype, errors[1]), errors
    return ours, theirs, exact


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_values_and_gradients(rank, transposed, kind, norm, grad):
    agrees(Block(rank, norm, transposed, **KINDS[kind]), tensor(rank, torch.float32), grad)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, *HALVES])
@pytest.mark.parametrize(("rank", "last"), [(2, False), (2, True), (3, False), (3, True)])
def test_every_dtype_in_both_formats(rank, last, dtype, norm):
    for grad in (False, True):
        agrees(Block(rank, norm, padding=1).to(dtype), tensor(rank, dtype, last=last), grad)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", HALVES)
def test_under_autocast(dtype, norm):
    for grad in (False, True):
        agrees(Block(2, norm), tensor(2, torch.float32), grad, dtype)


@pytest.mark.parametrize("norm", ["instance", "plain group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digits_that_a_large_bias_takes_from_eager_results_are_kept(dtype, norm):
    model, x = Block(2, norm, size=1e3).to(dtype), tensor(2, dtype)
    ours, theirs, exact = agrees(model, x)
    small, right = model.conv.weight.grad, exact[2]
    assert small is None
    errors = [accuracy.relative_error(found[2], right) for found in (ours, theirs)]
    assert errors[0] < errors[1] / 10


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_not_finite_reaches_the_result(grad, norm, number):
    model, x, seen = Block(2, norm), tensor(2, torch.float32), []
    model.last = nn.Identity()
    with torch.no_grad():
        model.conv.bias[3] = number
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        y, expected = torch.compile(model, backend=rewritten(seen))(x), model(x)
    assert "left out" in seen[0].glue
    assert torch.equal(y.isnan(), expected.isnan())
    assert y[:, 3].isnan().all()
    assert not y[:, :3].isnan().any()


def test_sums_that_overflow_leave_the_gradient_zero():
    """Of a norm without parameters the shift's gradient is a sum in half precision; inf times 0 is NaN."""
    model, x = Block(2, "plain instance").half(), tensor(2, torch.float16)
    model.last = nn.Identity()
    torch._dynamo.reset()
    y = torch.compile(model, backend=rewritten([]))(x)
    y.backward(torch.full_like(y, 3e4))
    assert torch.equal(model.conv.bias.grad, torch.zeros(6).half())


def test_frozen_parameters():
    for name in ("bias", "weight"):
        model, x = Block(), tensor(2, torch.float32)
        getattr(model.conv, name).requires_grad_(False)
        torch._dynamo.reset()
        seen = []
        torch.compile(model, backend=rewritten(seen))(x).sum().backward()
        assert "left out" in seen[0].glue
        assert getattr(model.conv, name).grad is None
        assert model.norm.bias.grad.any()
        assert model.conv.bias.grad is None if name == "bias" else not model.conv.bias.grad.any()


@pytest.mark.parametrize("norm", NORMS)
def test_sizes_that_are_not_known(norm):
    model, seen = Block(2, norm, padding=1, stride=2), []
    torch._dynamo.reset()
    run = torch.compile(model, backend=rewritten(seen), dynamic=True)
    for sizes in ((2, 4, 7, 8), (3, 4, 10, 5), (5, 4, 6, 9)):
        x = torch.randn(sizes)
        torch.testing.assert_close(run(x), model(x))
    assert len(seen) <= 2
    assert all("left out" in report.glue for report in seen)


W, B, C = torch.randn(6, 4, 3, 3), torch.randn(6), torch.randn(6)
M, V = torch.zeros(6), torch.ones(6)


def conv(x, weight=W, bias=B):
    return F.conv2d(x, weight, bias)


def read_twice(x):
    y = conv(x)
    return F.instance_norm(y) + y


def its_own_scale(x):
    y = F.conv2d(x[:1, :, :3, :3].expand(6, 4, 3, 3), W[:6], B)  # 6 samples of one position
    return F.group_norm(y, 6, weight=y.flatten()[:6])


CALLS = {
    "by place": (True, lambda x: F.instance_norm(conv(x), None, None, C, C, True, 0.1, 1e-3)),
    "by name": (True, lambda x: F.instance_norm(input=F.conv2d(x, weight=W, bias=B), bias=C)),
    "groups by name": (True, lambda x: F.group_norm(input=conv(x), num_groups=6, eps=1e-3, weight=C)),
    "cast": (True, lambda x: F.instance_norm(conv(x).double().float(), weight=C)),
    "cast as another": (True, lambda x: F.instance_norm(conv(x).type_as(x.double()))),
    "in float32": (True, lambda x: F.group_norm(conv(x, W.half(), B.half()).float(), 6, C, C).type(torch.float16)),
    "in float32, plain": (True, lambda x: F.group_norm(conv(x, W.half(), B.half()).float(), 6).type(torch.float16)),
    "a view of parameters": (True, lambda x: F.instance_norm(conv(x, W, B[:] * 2), bias=C + 1)),
    "two of a bias": (True, lambda x: F.instance_norm(conv(x)) + F.instance_norm(conv(x + 1)) * B[:, None, None]),
    "running statistics": (False, lambda x: F.instance_norm(conv(x), M.clone(), V.clone())),
    "given statistics": (False, lambda x: F.instance_norm(conv(x), M, V, use_input_stats=False)),
    "two channels a group": (False, lambda x: F.group_norm(conv(x), 3)),
    "integers": (False, lambda x: F.instance_norm(conv(x).int().float())),
    "read twice": (False, read_twice),
    "returned": (False, lambda x: (y := conv(x), F.instance_norm(y))[1] + y.mean()),
    "an activation first": (False, lambda x: F.instance_norm(F.relu(conv(x)))),
    "another norm": (False, lambda x: F.layer_norm(conv(x), [7, 6])),
    "without samples": (False, lambda x: F.instance_norm(conv(x[0]))),
    "without a bias": (False, lambda x: F.instance_norm(conv(x, W, None))),
    "its own scale": (False, its_own_scale),
    "under vmap": (False, lambda x: torch.func.vmap(lambda t: F.instance_norm(conv(t[None])))(x)),
}


@pytest.mark.parametrize("case", CALLS)
def test_which_calls(case):
    taken, call = CALLS[case]
    x, seen = tensor(2, torch.float16 if "float32" in case else torch.float32), []
    torch._dynamo.reset()
    y, expected = torch.compile(call, backend=rewritten(seen))(x), call(x)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=2e-3 if x.dtype is torch.float16 else 1e-4, atol=5e-3)
    assert any("left out" in report.glue for report in seen) is taken


def test_on_the_cpu_it_stays():
    torch._dynamo.reset()
    seen = []
    torch.compile(Block(), backend=rewritten(seen, always=False))(tensor(2, torch.float32))
    assert not seen[0].changes


def test_what_somebody_replaced_stays(monkeypatch):
    monkeypatch.setattr(torch, "instance_norm", lambda *args: args[0] * 2)
    graph = torch.fx.symbolic_trace(lambda x, w, b: F.instance_norm(F.conv2d(x, w, b)))
    with FakeTensorMode() as mode:
        made = captured(graph, mode, torch.empty(2, 4, 9, 8), torch.empty(6, 4, 3, 3), torch.empty(6))
    assert passes.unbiased.leave_out(made, always=True) == []


@needs_cuda_build
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
def test_on_a_gpu_it_is_the_default(dtype, grad, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def function(x, w, b, c):
        return F.instance_norm(F.conv2d(x, w, b), weight=c) * 2

    with FakeTensorMode() as mode, torch.set_grad_enabled(grad):
        given = (2, 4, 7, 8), (6, 4, 3, 3), (6,), (6,)
        tensors = [torch.empty(sizes, device="cuda", dtype=dtype, requires_grad=grad) for sizes in given]
        graph = captured(function, mode, *tensors)
        assert passes.unbiased.leave_out(graph, always=False) == ["conv2d"]
        graph.graph.lint()
        graph.recompile()
        y = graph(*tensors)
        assert (y.shape, y.dtype) == ((2, 6, 5, 6), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", ["instance", "plain instance", "group"])
@pytest.mark.parametrize(("rank", "last"), [(2, False), (2, True), (3, False)])
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, None), (torch.float32, torch.bfloat16)])
def test_compiled(device, dtype, autocast, rank, last, norm):
    model, x = Block(rank, norm, padding=1).to(device), tensor(rank, dtype, device, last)
    for grad in (False, True):
        agrees(model, x.detach(), grad, autocast, compiled=True)
    assert [bool(row.became) for row in backend.last_report.sites] == [True]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("rank", "transposed"), [(1, False), (2, False), (2, True), (3, False)])
def test_nothing_is_added_or_summed_for_the_bias(device, rank, transposed, norm):
    from torch._inductor.utils import run_fw_bw_and_get_code

    model, x = Block(rank, norm, transposed).to(device), tensor(rank, torch.float32, device)
    model.last = nn.Identity()
    torch._dynamo.reset()
    run = torch.compile(model, backend="kgopt", options=ALWAYS)
    _, codes = run_fw_bw_and_get_code(lambda: run(x.requires_grad_()).square().sum())
    # Of ATen, or of kgopt where that was measured to be faster.
    calls = [line for code in codes for line in code.splitlines() if "conv" in line and "=" in line]
    masks = [line for line in calls if "_backward" in line and "[True, True, " in line]
    assert masks
    assert not [line for line in masks if "[True, True, True]" in line]
    assert not [line for line in calls if "extern_kernels.convolution" in line and "bias=None" not in line]


def test_steps_of_training_and_weight_decay():
    """Optimizers leave a parameter alone whose gradient is None: weight decay would not reach the bias."""
    model, x = Block(2), tensor(2, torch.float32)
    expected = copy.deepcopy(model)
    torch._dynamo.reset()
    run = torch.compile(model, backend="kgopt", options=ALWAYS)
    for made, call in ((model, run), (expected, expected)):
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, weight_decay=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            call(x).square().sum().backward()
            made.conv.bias.grad.mul_(0)  # eager's is what rounding leaves, which Adam makes large steps of
            optimizer.step()
    torch.testing.assert_close(model.conv.bias, expected.conv.bias)
    torch.testing.assert_close(run(x), expected(x), rtol=1e-3, atol=1e-3)
