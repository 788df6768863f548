"""Depthwise convolutions of one tap in captured graphs as products (rewrite/captured/passes/tapped.py)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_graphs import captured, needs_cuda_build
from kgopt import accuracy
from kgopt.rewrite import backend
from kgopt.rewrite.captured import passes, whole_graphs

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALVES = [torch.float16, torch.bfloat16]
ALWAYS = {"kgopt.always": True, "kgopt.cuda_graph": False}


class Conv(nn.Module):
    """A convolution of one tap."""

    def __init__(self, rank=2, channels=4, times=1, stride=1, bias=True, **more):
        super().__init__()
        torch.manual_seed(0)
        kind = (nn.Conv2d, nn.Conv3d)[rank - 2]
        self.conv = kind(channels, channels * times, 1, stride, groups=channels, bias=bias, **more)

    def forward(self, x):
        return self.conv(x)


def tensor(rank, channels, last, dtype, device="cpu"):
    torch.manual_seed(1)
    x = torch.randn(2, channels, *(7, 8, 5)[:rank], device=device).to(dtype)
    return x.contiguous(memory_format=FORMATS[rank]) if last else x


def rewritten(seen, always=True):
    """A backend that runs the rewritten graph as it stands and notes what it calls."""

    def run(graph, inputs):
        seen.append(backend.rewrite_graph(graph, always))
        seen.extend(node.target for node in graph.graph.nodes)
        return graph

    return run


def results(run, x, wanted):
    """What it gives, and gradients of x and the parameters that are wanted."""
    y = run(x)
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view(y.shape)
    return [y, *torch.autograd.grad(y, wanted, dy.to(y.dtype))] if wanted else [y]


def agrees(model, x, grad, autocast=None, compiled="rewritten"):
    """The rewritten graph beside PyTorch's convolution: where it lies, its dtypes, and its error beside theirs."""
    torch._dynamo.reset()
    wide, seen = copy.deepcopy(model).double(), []
    right = x.detach().double()
    of_backend = {"backend": "kgopt", "options": ALWAYS} if compiled == "kgopt" else {"backend": rewritten(seen)}
    for t in (x, right) if grad else ():
        t.requires_grad_()
    wanted = [x, *model.parameters()] if grad else []
    exact = results(wide, right, [right, *wide.parameters()] if grad else [])
    run = torch.compile(model, dynamic=False, **of_backend)
    with (
        torch.set_grad_enabled(grad),
        torch.autocast(x.device.type, autocast or torch.bfloat16, enabled=autocast is not None),
    ):
        ours, theirs = results(run, x, wanted), results(model, x, wanted)
    assert not [target for target in seen if target in (torch.conv2d, torch.conv3d)]
    assert "as products" in backend.last_report.glue
    assert ours[0].stride() == theirs[0].stride()
    for found, plain, expected in zip(ours, theirs, exact, strict=True):
        assert found.dtype is plain.dtype
        errors = [accuracy.relative_error(t.detach(), expected.detach()) for t in (found, plain)]
        assert errors[0] <= accuracy.allowed(autocast or x.dtype, errors[1]), errors


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rank", [2, 3])
def test_values_and_gradients(rank, last, times, dtype, grad):
    for stride, bias in ((1, True), (2, False), (2, True), ((1, 3, 2)[:rank], True)):
        agrees(Conv(rank, 4, times, stride, bias).to(dtype), tensor(rank, 4, last, dtype), grad)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rank", "last", "times"), [(2, False, 2), (2, True, 1), (3, True, 2)])
def test_autocast_gives_its_dtype(rank, last, times, dtype, grad):
    for given in (torch.float32, dtype):
        agrees(Conv(rank, 4, times, 2), tensor(rank, 4, last, given), grad, dtype)
    agrees(Conv(rank, 4, times).double(), tensor(rank, 4, last, torch.float64), grad, dtype)


def test_a_graph_that_turns_autocast_on_itself():
    class Net(Conv):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = self.conv(x)
            return y * 2

    agrees(Net(times=2), tensor(2, 4, False, torch.float32), grad=True)


@pytest.mark.parametrize("times", [1, 5])
def test_one_channel(times):
    """With groups=1 it is a product as well."""
    for rank in (2, 3):
        agrees(Conv(rank, 1, times, dilation=3), tensor(rank, 1, False, torch.bfloat16).float(), grad=True)


@pytest.mark.parametrize("padding", ["valid", "same", 0])
def test_padding_of_none_by_name(padding):
    agrees(Conv(padding=padding), tensor(2, 4, False, torch.float32), grad=False)


@pytest.mark.parametrize("dims", [(0, 3, 1, 2), (0, 2, 3, 1), (3, 1, 2, 0)])
def test_x_in_another_order(dims):
    x = torch.randn(4, 4, 4, 4).permute(dims)
    agrees(Conv(times=2), x, grad=True)
    agrees(Conv(times=1, stride=2), x[:, :, 1:, ::2], grad=True)


W, B = torch.randn(8, 1, 1, 1), torch.randn(8)
CALLS = {
    "by place": (True, lambda x: F.conv2d(x, W, B, 2, 0, 1, 4)),
    "by name": (True, lambda x: torch.conv2d(input=x, weight=W, groups=4, stride=(2, 1), dilation=2)),
    "in the middle": (True, lambda x: F.relu(F.conv2d(x + 1, W, B, groups=4), inplace=True) * 2),
    "behind padding": (True, lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), W, B, groups=4)),
    "padded": (False, lambda x: F.conv2d(x, W, B, padding=1, groups=4)),
    "padded in one dim": (False, lambda x: F.conv2d(x, W, B, padding=(0, 1), groups=4)),
    "three taps": (False, lambda x: F.conv2d(x, W.expand(8, 1, 3, 1), B, groups=4)),
    "two channels a group": (False, lambda x: F.conv2d(x, W.expand(8, 2, 1, 1), B, groups=2)),
    "one group": (False, lambda x: F.conv2d(x, W.expand(8, 4, 1, 1), B)),
    "transposed": (False, lambda x: F.conv_transpose2d(x, W[:4], B[:4], groups=4)),
    "without samples": (False, lambda x: F.conv2d(x[0], W, B, groups=4)),
    "1d": (False, lambda x: F.conv1d(x[0, :, 0][None], W[..., 0], B, groups=4)),
    "under vmap": (False, lambda x: torch.func.vmap(lambda t: F.conv2d(t[None], W, B, groups=4))(x)),
}


@pytest.mark.parametrize("case", CALLS)
def test_which_calls(case):
    taken, call = CALLS[case]
    x, seen = tensor(2, 4, False, torch.float32), []
    torch._dynamo.reset()
    y = torch.compile(call, backend=rewritten(seen))(x)
    torch.testing.assert_close(y, call(x))
    assert ("as products" in seen[0].glue) is taken
    assert any("conv" in str(target) for target in seen[1:]) is not taken


def test_sizes_that_are_not_known():
    model, seen = Conv(times=2, stride=2), []
    torch._dynamo.reset()
    run = torch.compile(model, backend=rewritten(seen), dynamic=True)
    for sizes in ((2, 4, 7, 8), (3, 4, 10, 5), (5, 4, 6, 9)):
        for form in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(sizes).contiguous(memory_format=form)
            y = model(x)
            torch.testing.assert_close(run(x), y)
            assert run(x).stride() == y.stride()
    assert len([report for report in seen if isinstance(report, backend.Report)]) <= 2
    assert torch.conv2d not in seen


def test_on_the_cpu_it_stays():
    torch._dynamo.reset()
    seen = []
    torch.compile(Conv(), backend=rewritten(seen, always=False))(tensor(2, 4, False, torch.float32))
    assert not seen[0].changes
    assert torch.conv2d in seen


class Between(nn.Module):
    """Such convolutions around a norm, which may take them as its scale and shift, and around others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.wide = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 8, 1, groups=4)
        self.norm, self.scale = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1, groups=8)
        self.last = nn.Conv2d(8, 2, 3)

    def forward(self, x):
        h = self.wide(F.relu(self.first(x)))
        return self.last(F.silu(self.scale(self.norm(h))) + h)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
def test_beside_norms(last, autocast, grad):
    model, x = Between(), tensor(2, 2, last, torch.float32)
    torch._dynamo.reset()
    wide, right = copy.deepcopy(model).double(), x.double()
    for t in (x, right) if grad else ():
        t.requires_grad_()
    exact = results(wide, right, [right, *wide.parameters()] if grad else [])
    run = torch.compile(model, backend="kgopt", options=ALWAYS)
    wanted = [x, *model.parameters()] if grad else []
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        ours, theirs = results(run, x, wanted), results(model, x, wanted)
    assert "as products: h, " in backend.last_report.glue
    assert [bool(row.became) for row in backend.last_report.sites] == [True]
    for found, plain, expected in zip(ours, theirs, exact, strict=True):
        assert found.dtype is plain.dtype
        errors = [accuracy.relative_error(t.detach(), expected.detach()) for t in (found, plain)]
        assert errors[0] <= accuracy.allowed(autocast or x.dtype, errors[1]), errors


@needs_cuda_build
def test_what_inductor_decides_of_formats_does_not_count_them():
    def function(x, w, k):
        return torch.conv2d(torch.conv2d(x, w, groups=128), k)

    with FakeTensorMode() as mode:
        x, w = torch.empty(2, 128, 9, 9, device="cuda"), torch.empty(128, 1, 1, 1, device="cuda")
        graph = captured(function, mode, x, w, torch.empty(32, 128, 1, 1, device="cuda"))
        alone = captured(lambda x, w: torch.conv2d(x, w, groups=128), mode, x, w)
    assert whole_graphs.other_format(graph.graph, grad=False) == "as it came"
    assert whole_graphs.other_format(alone.graph, grad=False) == ""


@needs_cuda_build
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("last", [False, True])
def test_on_a_gpu_it_is_the_default(last, dtype, grad, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def function(x, w):
        return torch.conv2d(x, w, None, 2, 0, 1, 4) * 2

    with FakeTensorMode() as mode, torch.set_grad_enabled(grad):
        x = torch.empty(2, 4, 7, 8, device="cuda", dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        w = torch.empty(8, 1, 1, 1, device="cuda", dtype=dtype, requires_grad=grad)
        graph = captured(function, mode, x.requires_grad_(grad), w)
        before = next(n.meta["example_value"] for n in graph.graph.nodes if n.target is torch.conv2d)
        assert passes.tapped.swap(graph, always=False) == ["conv2d"]
        graph.graph.lint()
        after = list(graph.graph.nodes)[-2].args[0].meta["example_value"]
        assert (after.shape, after.stride(), after.dtype) == (before.shape, before.stride(), before.dtype)
        graph.recompile()
        assert graph(x, w).stride() == before.stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.bfloat16, None), (torch.float32, torch.bfloat16)])
def test_inductor_has_no_convolution_left(device, last, dtype, autocast):
    from torch._inductor.utils import run_fw_bw_and_get_code

    model, x = Conv(times=2).to(device, dtype), tensor(2, 4, last, dtype, device)
    agrees(model, x, grad=True, autocast=autocast, compiled="kgopt")
    torch._dynamo.reset()
    run = torch.compile(model, backend="kgopt", options=ALWAYS)
    with torch.autocast(device, torch.bfloat16, enabled=autocast is not None):
        _, codes = run_fw_bw_and_get_code(lambda: run(x).float().square().sum())
    assert codes
    assert not [code for code in codes if "extern_kernels.conv" in code or "aten.convolution" in code]
