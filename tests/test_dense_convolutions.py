"""Convolutions in groups that run as one of a single group, whose weight has zeros between the groups."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.compile_fx import compile_fx

import kgopt
from kgopt import accuracy
from kgopt._layout import FORMATS
from kgopt.rewrite import backend, glue
from kgopt.rewrite.captured.passes import convolutions
from kgopt.rewrite.glue import calls, kernels, search
from kgopt.rewrite.gradients import training
from kgopt.rewrite.measure import clocks, verdicts
from kgopt.rewrite.model import convolved
from optimize_pairs import all_faster
from test_convolution_graphs import captured, results
from tolerances import assert_as_good_as_torch

# Sizes, input and output channels, groups, kernel, stride, padding, dilation, transposed.
CASES = [
    ((7, 9), 4, 6, 2, (3, 3), 1, 1, 1, False),
    ((7, 9), 8, 8, 4, (1, 1), 1, 0, 1, False),
    ((9, 8), 6, 12, 3, (3, 5), 2, (1, 2), (2, 1), False),
    ((5, 6), 8, 4, 2, (3, 2), 2, 1, 1, True),
    ((3, 5, 6), 4, 4, 2, (3, 3, 3), 1, 1, 1, False),
    ((3, 5, 6), 6, 9, 3, (1, 1, 1), 1, 0, 1, False),
    ((4, 5, 6), 8, 8, 2, (1, 3, 3), (1, 2, 2), (0, 1, 1), 1, False),
    ((3, 4, 5), 4, 8, 2, (2, 2, 2), 2, 0, 1, True),
]


def _lie(t, last):
    return t.contiguous(memory_format=FORMATS[t.dim()]) if last else t


def _call(case, dtype, last, device="cpu", bias=True):
    """PyTorch's function, and its arguments."""
    sizes, c_in, c_out, groups, kernel, stride, padding, dilation, transposed = case
    x = _lie(torch.randn(2, c_in, *sizes, device=device).to(dtype), last)
    shape = (c_in, c_out // groups) if transposed else (c_out, c_in // groups)
    weight = torch.randn(*shape, *kernel, device=device).to(dtype)
    shift = torch.randn(c_out, device=device).to(dtype) if bias else None
    function = getattr(F, f"conv{'_transpose' * transposed}{len(sizes)}d")
    tail = (0, groups, dilation) if transposed else (dilation, groups)
    return function, (x, weight, shift, stride, padding, *tail)


@pytest.fixture
def offered(monkeypatch):
    """On the CPU as on a GPU."""
    real = calls.has_dense_form

    def has_dense_form(x, weight, groups):
        return real(SimpleNamespace(is_cuda=True, dtype=x.dtype, numel=x.numel), weight, groups)

    for module in (calls, convolutions):
        monkeypatch.setattr(module, "has_dense_form", has_dense_form)


@pytest.fixture
def faster(monkeypatch, offered):
    """What is measured second takes half of the time, and nothing is too small."""
    monkeypatch.setattr(convolutions, "may_measure", lambda device: True)
    monkeypatch.setattr(clocks, "busy_both", lambda first, second, device: (first(), second(), 1.0, 0.5)[2:])
    monkeypatch.setattr(search, "SMALL", 0)
    for store in ("store", "compiled"):
        monkeypatch.setattr(verdicts, store, verdicts.Store())
    monkeypatch.setattr(verdicts, "inductor_cache_dir", lambda: None)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_weight(case, last, device, poisoned):
    """Blocks on the diagonal, in the format that is asked for, with their gradient."""
    _, (_, weight, *_) = _call(case, torch.float32, False, device)
    weight.requires_grad_()
    groups = case[3]
    rows, columns = weight.shape[0] // groups, weight.shape[1]
    expected = weight.new_zeros(weight.shape[0], columns * groups, *weight.shape[2:])
    factors = torch.randn_like(expected)
    for i in range(groups):
        at = slice(i * rows, (i + 1) * rows)
        expected[at, i * columns : (i + 1) * columns] = weight[at]
    for lies in (False, True):
        dense = kernels.dense_weight(_lie(weight, last), groups, lies)
        assert torch.equal(dense, expected)
        assert dense.is_contiguous(memory_format=FORMATS[dense.dim()] if lies else torch.contiguous_format)
        mine, theirs = (torch.autograd.grad((y * factors).sum(), weight, retain_graph=True) for y in (dense, expected))
        assert torch.equal(mine[0], theirs[0])


def _check(function, args, y):
    expected = function(*args)
    exact = function(*(t.double() if isinstance(t, torch.Tensor) else t for t in args))
    # Of volumes the CPU's convolutions give contiguous tensors, in half precision or where they have one thread.
    if y.is_cuda or (y.dtype is torch.float32 and y.dim() == 4):
        assert y.stride() == expected.stride()
    assert_as_good_as_torch(y, expected, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls(case, last, dtype, offered, poisoned):
    """On the CPU, which is offered no such thing."""
    for bias in (False, True):
        function, args = _call(case, dtype, last, bias=bias)
        call = glue.recognize(function, args, {})
        assert call.options[-1] == "dense"
        _check(function, args, call.run("dense"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_on_a_gpu(case, last, dtype, poisoned):
    function, args = _call(case, dtype, last, "cuda")
    call = glue.recognize(function, args, {})
    assert "dense" in call.options[1:]
    _check(function, args, call.run("dense"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call.run("dense")
    args[1].mul_(0.5)  # the weight is read at each replay
    graph.replay()
    _check(function, args, y)


def test_what_has_a_dense_form():
    def like(**kind):
        return SimpleNamespace(**{"is_cuda": True, "dtype": torch.bfloat16, "numel": lambda: 2**10, **kind})

    x, on_cpu = like(), like(is_cuda=False)
    assert calls.has_dense_form(x, torch.empty(4, 2, 3, 3), 2)
    for weight, groups in (
        ((4, 2, 3, 3), 1),
        ((4, 1, 3, 3), 4),  # depthwise
        ((8, 1, 3, 3), 4),
        ((4, 2, 3, 3), 4),  # an output channel a group
        ((128, 2, 3, 3), 64),
    ):
        assert not calls.has_dense_form(x, torch.empty(weight), groups)
    assert not calls.has_dense_form(on_cpu, torch.empty(4, 2, 3, 3), 2)
    assert not calls.has_dense_form(like(dtype=torch.float64), torch.empty(4, 2, 3, 3), 2)
    wide = torch.empty(1024, 512, 3, 3, device="meta")  # more memory than what the convolution reads
    assert not calls.has_dense_form(x, wide, 2)
    assert calls.has_dense_form(like(numel=lambda: 2**24), wide, 2)


class Net(nn.Module):
    """A convolution as a module, behind padding, as a function, transposed, behind which a sum and activations are."""

    def __init__(self, rank=2):
        super().__init__()
        conv, up = ((nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d))[rank - 2]
        self.first, self.norm = conv(4, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8)
        self.act = nn.Sequential(conv(8, 8, 1, groups=4, bias=False), nn.ReLU())
        self.padded = conv(8, 8, 3, padding=1, groups=2, padding_mode="replicate")
        self.up, self.depthwise = up(8, 4, 2, stride=2, groups=2), conv(4, 4, 3, groups=4)
        self.weight = nn.Parameter(torch.randn(6, 2, *[1] * rank))
        self.function = (F.conv2d, F.conv3d)[rank - 2]

    def forward(self, x):
        y = F.silu(self.norm(self.first(x)))
        y = F.relu(self.padded(self.act(y)) + y)
        return self.depthwise(self.function(self.up(y), self.weight, groups=2)[:, :4])


def dense_of(net, *given):
    """An optimized copy whose convolutions in groups were all measured to be faster as dense ones."""
    model = kgopt.optimize(copy.deepcopy(net), measure=False)
    all_faster(model, *given)
    for module in glue.modules_of(model):
        state = glue.state_of(module)
        for key in state.faster:
            if key[0] == "conv":
                _, groups, weight = key[1][5:8]
                state.faster[key] = "dense" * (groups > 1 and weight[1] > 1)
        state.settle()
    convolved.give(model)
    return model


def counting(monkeypatch):
    """A list of the groups of weights that are expanded from here on, and of activations and sums behind them."""
    found, expand, run = [], kernels.dense_weight, glue.plans._conv_add

    def noting(*args, **kwargs):
        if len(args) > 10 and (args[11] != "none" or args[3] is not None):
            found.append((args[11], args[3] is not None))
        return run(*args, **kwargs)

    monkeypatch.setattr(kernels, "dense_weight", lambda w, g, last: found.append(g) or expand(w, g, last))
    monkeypatch.setattr(glue.plans, "_conv_add", noting)
    return found


# Not volumes in channels_last: see _check.
@pytest.mark.parametrize(("rank", "last"), [(2, False), (2, True), (3, False)])
def test_a_model(rank, last, offered, monkeypatch):
    net = Net(rank).eval()
    x = _lie(torch.randn(2, 4, *[6] * rank), last)
    if last:
        net = net.to(memory_format=FORMATS[rank + 2])
    model, found = dense_of(net, x), counting(monkeypatch)
    with torch.no_grad():
        y = model(x)
        torch.testing.assert_close(y, net(x), rtol=1e-4, atol=1e-5)
        assert y.stride() == net(x).stride()
        assert [g for g in found if type(g) is int] == [2, 4, 2, 2, 2]
        assert [how for how in found if type(how) is tuple] == [("relu", False), ("relu", True)]
        for m in (model, net):  # parameters are read at each call
            m.first.weight.mul_(2)
            m.weight.add_(1)
        torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-5)
    found.clear()
    model(x).sum().backward()  # with gradients it is PyTorch's
    assert found == []


def test_autocast(offered, monkeypatch):
    net, x = Net().eval(), torch.randn(2, 4, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        model, found = dense_of(net, x), counting(monkeypatch)
        with torch.no_grad():
            y, expected = model(x), net(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=5e-2, atol=5e-2)
    assert [g for g in found if type(g) is int] == [2, 4, 2, 2]  # one that pads in another mode is PyTorch's there


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_an_optimized_model_that_is_compiled(compiler, offered, monkeypatch):
    net, x = Net().eval(), torch.randn(2, 4, 6, 6)
    model, names = dense_of(net, x), []

    def look(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return compile_fx(graph, inputs) if compiler == "inductor" else graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend=look, fullgraph=True)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
        assert sum("diag_embed" in name for name in names) == 3  # the compiler has the function and what is padded
        for m in (model, net):
            m.first.weight.mul_(2)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)


class Volumes(nn.Module):
    """Convolutions of volumes in groups; `flat`: what counts on the format that they had."""

    def __init__(self, flat=False):
        super().__init__()
        self.first, self.last = nn.Conv3d(4, 8, 3, padding=1, groups=2), nn.Conv3d(8, 8, 3, groups=4, bias=False)
        self.up, self.flat = nn.ConvTranspose3d(8, 4, 2, stride=2, groups=2), flat

    def forward(self, x):
        y = self.last(torch.relu(self.first(x)))
        return (y.view(-1) if self.flat else self.up(y),)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_captured_graphs(last, flat, faster, monkeypatch):
    """Where the new graph does not run, nothing of it stays."""
    if last:
        times = convolutions._Times(1.0, 0.5, 0.8, 0.3, "dense", "dense")
        monkeypatch.setattr(convolutions, "_measured", lambda *_: times)
    model, x = Volumes(flat).eval(), torch.randn(2, 4, 4, 6, 8)
    with torch.no_grad():
        (y,), names = captured(model, x)
        (expected,) = model(x)
    torch.testing.assert_close(y, expected)
    assert y.stride() == expected.stride()
    stays = last and flat
    assert sum("diag_embed" in name for name in names) == (0 if stays else 3 - flat)
    assert any("unflatten" in name for name in names) is not stays
    assert bool(backend.last_report.glue) is not stays


def test_images_of_captured_graphs(faster, monkeypatch):
    times = convolutions._Times(1.0, 1.0, 1.0, 0.9, "", "dense")
    monkeypatch.setattr(convolutions, "_measured", lambda *_: times)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=2)).eval()
    x = torch.randn(2, 4, 6, 8)
    with torch.no_grad():
        compiled = torch.compile(model, backend="kgopt")
        torch.testing.assert_close(compiled(x), model(x))
        assert backend.last_report.glue == "2 convolutions of images in channels_last, 2 of them by kgopt"
        model[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))


def test_a_bias_that_the_compiler_adds(faster, monkeypatch):
    """A dense convolution is timed without it where PyTorch's is."""
    timed = []
    run = convolutions._Convolution._run

    def noted(self, call, option):
        by_function = calls.Call.by_function
        with monkeypatch.context() as patch:
            patch.setattr(calls.Call, "by_function", lambda c: timed.append(c.more[1] is None) or by_function(c))
            return run(self, call, option)

    monkeypatch.setattr(convolutions._Convolution, "_run", noted)
    model, x = nn.Conv2d(4, 8, 3, groups=2).eval(), torch.randn(2, 4, 6, 8)
    for read, free in ((torch.relu, True), (lambda y: F.group_norm(y, 2), False)):
        with torch.no_grad():
            captured(nn.Sequential(model, Read(read)), x)
        assert timed == [free]
        timed.clear()


class Read(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, y):
        return self.function(y)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_training_step(autocast, faster, monkeypatch):
    """The weight's gradient is that of the blocks."""
    monkeypatch.setattr(training, "_gain", lambda both, x: 0.5 * both.kind[0].endswith("dense"))
    model, x = Volumes(), torch.randn(2, 4, 4, 6, 8, requires_grad=True)
    names = []

    def rewritten(x):
        found, more = captured(model, x)
        names.extend(more)
        return found

    wide = copy.deepcopy(model).double()
    exact = results(wide, x.detach().double().requires_grad_(), wide)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, expected = results(rewritten, x, model), results(model, x, model)
    assert sum("diag_embed" in name for name in names) == 3
    for y, plain, right in zip(found, expected, exact, strict=True):
        assert y.dtype is plain.dtype
        errors = [accuracy.relative_error(t.detach(), right.detach()) for t in (y, plain)]
        assert errors[0] <= accuracy.allowed(torch.bfloat16 if autocast else torch.float32, errors[1])


def test_the_larger_gain_is_taken(faster, monkeypatch):
    gains = {"conv3d": 0.2, "conv3d dense": 0.1}
    monkeypatch.setattr(training, "_gain", lambda both, x: gains[both.kind[0]])
    model, x = nn.Conv3d(4, 4, 3, groups=2), torch.randn(1, 4, 4, 4, 4)
    names = captured(model, x)[1]
    assert "kgopt.conv3d.default" in names
    assert not any("diag_embed" in name for name in names)
    gains["conv3d dense"] = 0.3
    verdicts.compiled.forget()
    assert any("diag_embed" in name for name in captured(model, x)[1])
