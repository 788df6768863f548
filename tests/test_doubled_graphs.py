"""Linear upsampling to twice the size in captured graphs, for backend="kgopt": rewrite/captured/passes/doubled.py."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from fake_graphs import captured, needs_cuda_build
from kgopt.rewrite import backend
from kgopt.rewrite.captured import contest, passes
from kgopt.rewrite.captured.passes.resampled import resampled
from kgopt.rewrite.measure import clocks
from kgopt.torch_private import compile_graph
from test_contest import clock as contest_clock  # noqa: F401 (a fixture)
from tolerances import assert_as_good_as_torch

OP = torch.ops.kgopt.upsample_linear.default
MODES = {4: "bilinear", 5: "trilinear"}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def up(x, **kwargs):
    return F.interpolate(x, **({"scale_factor": 2} | kwargs), mode=MODES[x.dim()])


def in_place(x, s):
    h = up(x)
    h += s
    return h


SUMS = {
    "ahead": lambda x, s: up(x) + s,
    "behind": lambda x, s: s + up(x),
    "function": lambda x, s: torch.add(up(x), s),
    "method": lambda x, s: s.add(up(x)),
    "in place": in_place,
    "method in place": lambda x, s: up(x).add_(s),
    "sizes": lambda x, s: s + up(x, scale_factor=None, size=[2 * n for n in x.shape[2:]]),
    "factors": lambda x, s: s + up(x, scale_factor=(2.0,) * (x.dim() - 2), align_corners=False),
    "module": lambda x, s: nn.Upsample(scale_factor=2, mode=MODES[x.dim()])(x) + s,
    "recomputed": lambda x, s: up(x, recompute_scale_factor=True) + s,
}


def into_skip(x, s):
    s = s * 1
    s += up(x)
    return s


def written(x, s):
    x = x * 1
    h = up(x)
    x.mul_(2)
    return h + s + x.sum()


ALONE = {
    "nothing behind": lambda x, s: up(x),
    "a product": lambda x, s: up(x) * s,
    "a factor": lambda x, s: torch.add(up(x), s, alpha=2),
    "a broadcast sum": lambda x, s: up(x) + s[:1, :1],
    "a wider sum": lambda x, s: up(x) + s.double(),
    "a number": lambda x, s: up(x) + 1,
    "into the other": into_skip,
    "what is upsampled changes": written,
    "a sum in another format": lambda x, s: up(x) + s.transpose(-1, -2),
}


def twice_itself(x, s):
    h = up(x)
    return h + h


def read_again(x, s):
    h = up(x)
    return (h + s) * h


ALONE |= {"itself": twice_itself, "read again": read_again}

STAY = {
    "nearest": lambda x, s: F.interpolate(x, scale_factor=2) + s,
    "corners": lambda x, s: up(x, align_corners=True) + s,
    "another factor": lambda x, s: up(x, scale_factor=3),
    "two factors": lambda x, s: up(x, scale_factor=(2, 1) if x.dim() == 4 else (2, 2, 1)),
    "another size": lambda x, s: up(x, scale_factor=None, size=[2 * n - 1 for n in x.shape[2:]]),
    "one dim": lambda x, s: F.interpolate(x.flatten(2), scale_factor=2, mode="linear"),
}


def tensors(dims, dtype=torch.float32, last=False, sizes=(4, 3, 6), device="cpu"):
    torch.manual_seed(0)
    sizes = sizes[-(dims - 2) :]
    x = torch.randn(2, 16, *sizes, device=device, dtype=dtype)
    s = torch.randn(2, 16, *(2 * n for n in sizes), device=device, dtype=dtype)
    return tuple(t.contiguous(memory_format=FORMATS[dims]) if last else t for t in (x, s))


def run(function, *args, dynamic=False, grad=False):
    """The result of the rewritten graph, whose other functions are PyTorch's, and its calls of kgopt's op."""
    calls = []

    def rewrite(graph, example_inputs):
        passes.doubled.swap(graph, None)
        graph.graph.lint()
        graph.recompile()
        calls.extend(node for node in graph.graph.nodes if node.target is OP)
        return graph

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        return torch.compile(function, backend=rewrite, dynamic=dynamic)(*args), calls


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dims", [4, 5])
@pytest.mark.parametrize("name", SUMS)
def test_sums(name, dims, last):
    x, s = tensors(dims, last=last)
    y, calls = run(SUMS[name], x, s)
    (call,) = calls
    assert call.args[1] is not None
    expected = SUMS[name](x, s)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("dims", [4, 5])
@pytest.mark.parametrize("name", ALONE)
def test_sums_that_are_not_the_ops(name, dims):
    x, s = tensors(dims, sizes=(4, 4, 4))
    y, calls = run(ALONE[name], x, s)
    (call,) = calls
    assert call.args[1] is None
    torch.testing.assert_close(y, ALONE[name](x, s))


@pytest.mark.parametrize("dims", [4, 5])
@pytest.mark.parametrize("name", STAY)
def test_what_stays(name, dims):
    x, s = tensors(dims)
    y, calls = run(STAY[name], x, s)
    assert not calls
    torch.testing.assert_close(y, STAY[name](x, s))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dims", [4, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(dtype, dims, last):
    def steps(x, s, function):
        x, s = (t.detach().clone().requires_grad_() for t in (x, s))
        y = function(x, s)
        return y, *torch.autograd.grad(y, (x, s), (y * 2 - 1).detach().contiguous() * 0.5)

    x, s = tensors(dims, dtype, last)
    sum_of = SUMS["ahead"]
    ours = steps(x, s, lambda *args: run(sum_of, *args, grad=True)[0])
    theirs, exact = steps(x, s, sum_of), steps(x.double(), s.double(), sum_of)
    assert_as_good_as_torch(ours[0], theirs[0], exact[0])
    # The gradients that come in differ by the results' rounding.
    tolerance = {torch.bfloat16: 5e-2, torch.float16: 5e-3}.get(dtype, 1e-5)
    for t, other in zip(ours[1:], theirs[1:], strict=True):
        assert t.dtype is dtype
        torch.testing.assert_close(t.double(), other.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 5, 1), (3, 1, 2)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dims", [4, 5])
def test_sizes_of_one(dims, channels, sizes):
    x, s = (t[:, :channels].contiguous() for t in tensors(dims, sizes=sizes))
    y, _ = run(SUMS["ahead"], x, s)
    torch.testing.assert_close(y, SUMS["ahead"](x, s))


@pytest.mark.parametrize("dims", [4, 5])
def test_tensors_with_gaps(dims):
    x, _ = tensors(dims, sizes=(4, 4, 4))
    for part in (x[..., ::2], x[:, ::2], x.transpose(-1, -2), x[:1].expand_as(x)):
        other = torch.randn(up(part).shape)
        y, _ = run(SUMS["ahead"], part, other)
        expected = up(part) + other
        assert y.stride() == expected.stride()
        torch.testing.assert_close(y, expected)


def test_second_derivatives():
    x, s = (t.double().requires_grad_() for t in tensors(4, sizes=(2, 3)))

    def loss(function):
        y = function(x, s)
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum(), (x, s))

    ours = loss(lambda x, s: run(SUMS["ahead"], x, s, grad=True)[0])
    for t, expected in zip(ours, loss(SUMS["ahead"]), strict=True):
        torch.testing.assert_close(t, expected)


def test_sizes_that_are_not_known_stay():
    x, s = tensors(4)
    y, calls = run(SUMS["ahead"], x, s, dynamic=True)
    assert not calls
    torch.testing.assert_close(y, SUMS["ahead"](x, s))


@needs_cuda_build
@pytest.mark.parametrize("wide", [False, True])
def test_autocast_upsamples_in_float32(wide):
    """On CUDA; a sum with a tensor in half precision converts, and stays."""
    with FakeTensorMode() as mode:
        x, s = (t.cuda() for t in tensors(5, torch.bfloat16))
        s = s.float() if wide else s
    enabled = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        traced = captured(lambda x, s: F.interpolate(x, scale_factor=2, mode="trilinear") + s, mode, x, s)
        assert passes.doubled.swap(traced, None) == ["interpolate"]
    finally:
        torch.set_autocast_enabled("cuda", enabled)
    traced.graph.lint()
    (call,) = (node for node in traced.graph.nodes if node.target is OP)
    assert call.args[0].target == "to"
    assert call.args[0].args[1] is torch.float32
    assert call.meta["example_value"].dtype is torch.float32
    assert (call.args[1] is not None) == wide


class Decoder(nn.Module):
    """The end of a U-Net whose skips are added."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        # No largest values: in half precision the two runs would find others.
        conv, self.pool = ((nn.Conv2d, nn.AvgPool2d(2)), (nn.Conv3d, nn.AvgPool3d(2)))[rank - 2]
        self.first, self.second, self.last = conv(2, 8, 3, padding=1), conv(8, 8, 1), conv(8, 3, 1)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.Upsample(scale_factor=2, mode=MODES[rank + 2])

    def forward(self, x):
        skip = self.first(x)
        return self.last(F.silu(self.norm(self.up(self.second(self.pool(skip))) + skip)))


@pytest.fixture
def clock(contest_clock, monkeypatch):  # noqa: F811
    """The clock of contests. The graphs that were timed are in its list."""
    timed = []

    def clock(times):
        contest_clock(times)
        return timed

    def noted(graph, inputs, mode, options):
        timed.append([node.target for node in graph.graph.nodes])
        return clock.compile(graph, inputs, mode, options)

    clock.compile = contest.compile_graph
    monkeypatch.setattr(contest, "compile_graph", noted)
    return clock


def rewritten(model, x, grad, **options):
    """The result of the graph as the backend rewrites it, and the functions that it calls."""
    calls = []

    def rewrite(graph, example_inputs):
        backend.rewrite_graph(graph)
        calls.extend(node.target for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        return torch.compile(model, backend=rewrite, **options)(x), calls


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("faster", [False, True])
def test_the_faster_one_stands_in_the_graph(faster, grad, clock):
    timed = clock((2.0, 1.0) if faster else (1.0, 2.0))
    model, x = Decoder(3), torch.randn(1, 2, 4, 4, 6)
    y, calls = rewritten(model, x, grad)
    assert calls.count(OP) == faster
    assert calls.count(resampled) == (grad and not faster), "its gradient is gathered where the op is slower"
    plain, ours = (targets for targets in timed if {OP, F.interpolate, resampled} & set(targets))
    assert (resampled in plain) == grad, "it is compared with what would run otherwise"
    assert OP in ours
    assert OP not in plain
    assert ("linear upsampling by kgopt" in backend.last_report.glue) == faster
    torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seconds", [None, -1.0])
def test_what_is_not_measured_stays(seconds, clock, monkeypatch):
    timed = clock((2.0, 1.0))
    x = torch.randn(1, 2, 4, 6)
    if seconds is None:
        torch._dynamo.mark_dynamic(x, 2)
    else:
        monkeypatch.setattr(contest, "SECONDS", seconds)
    _, calls = rewritten(Decoder(2), x, True)
    assert OP not in calls
    assert not timed


def test_equal_times_are_no_reason(clock):
    clock((1.0, 1.0))
    _, calls = rewritten(Decoder(2), torch.randn(1, 2, 4, 6), False)
    assert OP not in calls


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_inside_the_compilers_callback(autocast, grad, clock, monkeypatch):
    """Inductor compiles both regions, forward and backward, while it is asked for the whole graph."""
    clock((2.0, 1.0))
    clock.compile = compile_graph
    ran = []
    busy_both = clocks.busy_both
    monkeypatch.setattr(clocks, "busy_both", lambda *given: ran.append(given) or busy_both(*given))
    model, x = Decoder(2), torch.randn(1, 2, 4, 6)
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = torch.compile(model, backend="kgopt", dynamic=False)(x)
        expected = model(x)
    assert ran
    assert "linear upsampling by kgopt" in backend.last_report.glue
    assert y.dtype is expected.dtype
    tolerance = 5e-2 if autocast else 1e-4
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


def compared(model, x, device, autocast=None, **options):
    """A training step beside eager PyTorch's: results, and gradients of x and the parameters."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    runs = torch.compile(model, backend="kgopt", dynamic=False, options={"kgopt.cuda_graph": False} | options), twin
    found = []
    for function in runs:
        given = x.detach().clone().requires_grad_()
        with torch.autocast(device, autocast, enabled=autocast is not None):
            y = function(given)
        y.float().square().sum().backward()
        found.append((y, given.grad))
    (y, dx), (expected, gradient) = found
    assert y.dtype is expected.dtype
    assert y.stride() == expected.stride()
    tolerance = 1e-2 if device == "cuda" else 1e-3
    tolerance = tolerance if autocast is None and x.dtype is torch.float32 else 5e-2

    def close(ours, theirs):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * max(1.0, float(theirs.abs().max())))

    close(y.detach(), expected.detach())
    close(dx, gradient)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        close(p.grad, q.grad)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_steps(device, last, rank):
    from torch._inductor.utils import run_fw_bw_and_get_code

    x = torch.randn(2, 2, *[8, 4, 6][:rank], device=device)
    x = x.contiguous(memory_format=FORMATS[rank + 2]) if last else x
    model = Decoder(rank).to(device)
    options = {"kgopt.always": True, "kgopt.cuda_graph": False}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="kgopt", dynamic=False, options=options)
    _, (forward, backward) = run_fw_bw_and_get_code(lambda: compiled(x).square().sum())
    # On CUDA fake tensors say that PyTorch's result is contiguous where what it reads is in channels_last: that stays.
    if device == "cpu" or not last:
        assert "kgopt.upsample_linear.default" in forward
        assert "kgopt.upsample_linear_backward.default" in backward
    compared(Decoder(rank).to(device), x, device, **{"kgopt.always": True})


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_measured_steps(autocast, last, rank):
    """Whichever is faster computes the same."""
    x = torch.randn(2, 2, *[32, 16, 24][:rank], device="cuda")
    x = x.contiguous(memory_format=FORMATS[rank + 2]) if last else x
    model = Decoder(rank).cuda()
    compared(model.to(memory_format=FORMATS[rank + 2]) if last else model, x, "cuda", autocast)


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
def test_large_volumes_are_kgopts(grad):
    """Of the size of a U-Net's last level the compiler's kernels take several times as long."""
    x = torch.randn(1, 32, 48, 48, 48, device="cuda", dtype=torch.bfloat16)
    s = torch.randn(1, 32, 96, 96, 96, device="cuda", dtype=torch.bfloat16)
    x, s = (t.contiguous(memory_format=torch.channels_last_3d).requires_grad_(grad) for t in (x, s))
    torch._dynamo.reset()
    # Replays hide launches, so the work on the GPU decides.
    y = torch.compile(SUMS["ahead"], backend="kgopt", dynamic=False)(x, s)
    assert "linear upsampling by kgopt" in backend.last_report.glue
    torch.testing.assert_close(y, SUMS["ahead"](x, s), rtol=2e-2, atol=2e-2)
