"""Depthwise convolutions of several taps in captured graphs as sums (rewrite/captured/passes/tapped.py)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_graphs import captured, needs_cuda_build
from kgopt.rewrite import backend
from kgopt.rewrite.captured import contest, passes
from kgopt.rewrite.captured.passes import convolutions, tapped
from test_contest import clock  # noqa: F401 (a fixture)
from tolerances import assert_as_good_as_torch

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALWAYS = {"kgopt.always": True, "kgopt.cuda_graph": False}
SUMS = "depthwise convolutions as sums over their taps"


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Small results count, too."""
    monkeypatch.setattr(tapped, "SMALL", 0)
    torch._dynamo.reset()


class Conv(nn.Module):
    """A depthwise convolution."""

    def __init__(self, rank=2, channels=4, times=1, kernel=3, **more):
        super().__init__()
        torch.manual_seed(0)
        kind = (nn.Conv2d, nn.Conv3d)[rank - 2]
        self.conv = kind(channels, channels * times, kernel, groups=channels, **more)

    def forward(self, x):
        return self.conv(x)


def tensor(rank, channels, last=False, dtype=torch.float32, device="cpu"):
    torch.manual_seed(1)
    x = torch.randn(2, channels, *(9, 8, 7)[:rank], device=device).to(dtype)
    return x.contiguous(memory_format=FORMATS[rank]) if last else x


def rewritten(run, *args, always=True, **options):
    """The result of the rewritten graph as it stands, and the functions that it calls."""
    calls = []

    def rewrite(graph, inputs):
        backend.rewrite_graph(graph, always)
        calls.extend(node.target for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(run, backend=rewrite, **options)(*args), calls


def agrees(model, x):
    """The rewritten graph beside PyTorch's convolution and one in float64."""
    y, calls = rewritten(model, x, dynamic=False)
    assert not [target for target in calls if target in (torch.conv2d, torch.conv3d)]
    assert SUMS in backend.last_report.glue
    with torch.no_grad():
        theirs, exact = model(x), copy.deepcopy(model).double()(x.double())
    assert y.stride() == theirs.stride()
    assert_as_good_as_torch(y, theirs, exact)


CASES = {
    "3": (2, {"padding": 1}),
    "2": (2, {"kernel": 2}),
    "one row": (2, {"kernel": (1, 3), "padding": (0, 1)}),
    "5, without a bias": (2, {"kernel": 5, "padding": 2, "bias": False}),
    "stride": (2, {"padding": 1, "stride": 2}),
    "strides": (2, {"kernel": (3, 2), "stride": (3, 2), "padding": (1, 0), "bias": False}),
    "dilation": (2, {"dilation": 2, "padding": 2}),
    "dilation and stride": (2, {"dilation": (3, 1), "padding": (4, 2), "stride": 2}),
    "more zeros than positions": (2, {"kernel": 5, "dilation": 5, "padding": 10}),
    "zeros around a row": (2, {"kernel": (1, 2), "padding": 1, "stride": 2}),
    "not square, same": (2, {"kernel": (3, 5), "padding": "same", "dilation": (1, 2)}),
    "valid": (2, {"kernel": (3, 2), "padding": "valid"}),
    "volumes, 3": (3, {"padding": 1, "stride": (1, 2, 2)}),
    "volumes, planes": (3, {"kernel": (1, 3, 3), "padding": (0, 1, 1)}),
    "volumes, 2": (3, {"kernel": 2, "bias": False, "stride": 2}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("last", [False, True])
def test_values(last, case):
    rank, given = CASES[case]
    for dtype in DTYPES:
        for times in (1, 2):
            agrees(Conv(rank, times=times, **given).to(dtype), tensor(rank, 4, last, dtype))


@pytest.mark.parametrize("times", [1, 5])
def test_one_channel(times):
    for rank in (2, 3):
        agrees(Conv(rank, 1, times, padding=1), tensor(rank, 1))


@pytest.mark.parametrize("dims", [(0, 3, 1, 2), (0, 2, 3, 1), (3, 1, 2, 0)])
def test_x_in_another_order(dims):
    x = torch.randn(4, 4, 4, 4).permute(dims)
    agrees(Conv(times=2, padding=1), x)
    agrees(Conv(stride=2, padding=1), x[:, :, 1:, ::2])


@pytest.mark.parametrize("given", DTYPES)
def test_autocast_gives_its_dtype(given):
    model, x = Conv(padding=1), tensor(2, 4, False, given)
    with torch.autocast("cpu", torch.bfloat16):
        y, calls = rewritten(model, x)
        theirs = model(x).detach()
    assert torch.conv2d not in calls
    assert_as_good_as_torch(y, theirs, copy.deepcopy(model).double()(x.double()).detach())


W, B = torch.randn(4, 1, 3, 3), torch.randn(4)
CALLS = {
    "by place": (True, lambda x: F.conv2d(x, W, B, 2, 1, 1, 4)),
    "by name": (True, lambda x: torch.conv2d(weight=W, groups=4, input=x, padding=(2, 1))),
    "in the middle": (True, lambda x: F.relu(F.conv2d(x + 1, W, B, groups=4), inplace=True) * 2),
    "behind padding": (True, lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), W, B, groups=4)),
    "behind uneven padding": (True, lambda x: F.conv2d(F.pad(x, (1, 0, 2, 1)), W, B, groups=4)),
    "49 taps": (False, lambda x: F.conv2d(x, W[:, :, :1, :1].expand(4, 1, 7, 7), B, groups=4)),
    "two channels a group": (False, lambda x: F.conv2d(x, W.expand(4, 2, 3, 3), B, groups=2)),
    "one group": (False, lambda x: F.conv2d(x, W.expand(4, 4, 3, 3), B)),
    "zeros alone": (False, lambda x: F.conv2d(x[..., :1, :], W[..., :2, :], B, 1, 2, 4, 4)),
    "more zeros behind": (False, lambda x: F.conv2d(x, W[..., :2], B, padding="same", groups=4)),
    "float64": (False, lambda x: F.conv2d(x.double(), W.double(), groups=4).float()),
    "transposed": (False, lambda x: F.conv_transpose2d(x, W, B, groups=4)),
    "without samples": (False, lambda x: F.conv2d(x[0], W, B, groups=4)),
    "1d": (False, lambda x: F.conv1d(x[0, :, 0][None], W[..., 0], B, groups=4)),
}


@pytest.mark.parametrize("case", CALLS)
def test_which_calls(case):
    taken, call = CALLS[case]
    x = tensor(2, 4)
    y, calls = rewritten(call, x)
    torch.testing.assert_close(y, call(x), rtol=1e-4, atol=1e-4)
    assert (SUMS in backend.last_report.glue) is taken
    assert any("conv" in str(target) for target in calls) is not taken


def test_gradients_leave_it_alone():
    seen = []

    def rewrite(graph, inputs):
        seen.append(backend.rewrite_graph(graph, True))
        return graph

    torch.compile(Conv(), backend=rewrite)(tensor(2, 4))
    assert SUMS not in seen[0].glue


def test_sizes_that_are_not_known():
    _, calls = rewritten(Conv(), tensor(2, 4), dynamic=True)
    assert torch.conv2d in calls


@pytest.mark.parametrize("size", [63, 64])
def test_small_results(size, monkeypatch):
    monkeypatch.setattr(tapped, "SMALL", 2 * 4 * 64 * 64 * 4)
    _, calls = rewritten(Conv(padding=1), torch.randn(2, 4, 64, size))
    assert (torch.conv2d in calls) == (size < 64)


def test_a_graph_that_turns_autocast_on_itself():
    class Net(Conv):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.conv(x)

    _, calls = rewritten(Net(), tensor(2, 4))
    assert torch.conv2d in calls


def test_on_the_cpu_nothing_is_measured():
    _, calls = rewritten(Conv(), tensor(2, 4), always=False)
    assert torch.conv2d in calls


# ----------------------------------------------------------------------------------------------------------------------
# What is measured


class Block(nn.Module):
    """An activation in front, a norm and another activation behind."""

    def __init__(self, norm=nn.BatchNorm2d, ending=False):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 8, 3, 2, 1, groups=4)
        self.norm = nn.GroupNorm(2, 8) if norm is nn.GroupNorm else norm(8)
        self.ending = nn.Conv2d(8, 8, 1) if ending else nn.Identity()
        self.eval()

    def forward(self, x):
        return self.ending(F.hardswish(self.norm(self.conv(F.silu(x)))))


@pytest.fixture
def timed(clock, monkeypatch):  # noqa: F811
    """Sets the times that are found, and gives the graphs that were timed, with the tensors that they were given."""
    found = []

    def noted(graph, inputs, mode, options):
        found.append(([node.target for node in graph.graph.nodes], inputs))
        return graph

    def times(*both):
        clock(both)
        monkeypatch.setattr(contest, "compile_graph", noted)
        return found

    return times


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d])
@pytest.mark.parametrize("faster", [False, True])
def test_the_verdict_decides(faster, norm, timed):
    found = timed(2.0, 1.0) if faster else timed(1.0, 2.0)
    model, x = Block(norm), tensor(2, 4)
    y, calls = rewritten(model, x, always=False)
    torch.testing.assert_close(y, model(x).detach(), rtol=1e-4, atol=1e-4)
    assert (torch.conv2d in calls) is not faster
    assert (f"{SUMS}: " in backend.last_report.glue) is faster
    (plain, _), (ours, _) = found[:2]
    assert torch.conv2d in plain or torch.ops.kgopt.conv2d.default in plain
    assert torch.conv2d not in ours
    for targets in (plain, ours):
        assert F.silu in targets
        is_ours = norm is not nn.BatchNorm2d  # whose activation is the op's, too
        assert (F.hardswish in targets) is not is_ours
        assert any("norm" in str(target) for target in targets)


@pytest.mark.parametrize("ending", [False, True])
def test_the_format_is_what_other_convolutions_ask_for(ending, timed):
    found = timed(2.0, 1.0)
    model, x = Block(ending=ending), tensor(2, 4)
    y, calls = rewritten(model, x, always=False)
    torch.testing.assert_close(y, model(x).detach(), rtol=1e-4, atol=1e-4)
    assert ("movedim" in calls) is ending, "results of one channel are summed as they lie"
    inputs = [t for _, given in found for t in given if t.dim() == 4 and t.shape[0] == 2]
    assert inputs
    assert {t.is_contiguous(memory_format=torch.channels_last) for t in inputs} == {ending}


@pytest.mark.parametrize("ending", [False, True])
def test_it_is_compared_with_the_way_that_was_planned(ending, timed, monkeypatch):
    """In channels_last by kgopt's kernel: where nothing else moves, a copy is a part of it."""
    plan = convolutions.Convolutions()

    def find(graph_module, moves_images):
        for node in graph_module.graph.nodes:
            if node.target is torch.conv3d:
                is_deep = node.meta["example_value"].shape[1] == 4
                plan.ways[node] = convolutions._Way("auto" if is_deep else "", True)
        return plan

    monkeypatch.setattr(convolutions, "find", find)
    found = timed(2.0, 1.0)
    layers = [nn.Conv3d(4, 4, (1, 3, 3), groups=4), *([nn.Conv3d(4, 8, 1)] if ending else [])]
    model, x = nn.Sequential(*layers), tensor(3, 4)
    y, calls = rewritten(model, x, always=False)
    torch.testing.assert_close(y, model(x).detach(), rtol=1e-4, atol=1e-4)
    (plain, _), (ours, (given, *_)) = found[:2]
    assert torch.ops.kgopt.conv3d.default in plain
    assert torch.ops.kgopt.in_format.default in plain
    assert not any("conv" in str(target) for target in ours)
    assert given.is_contiguous(memory_format=torch.channels_last_3d) is ending
    assert len(plan.ways) == ending, "what became a sum is not planned any more"
    assert torch.ops.kgopt.conv3d.default not in calls


def test_no_time_leaves_it_alone(timed, monkeypatch):
    found = timed(2.0, 1.0)
    monkeypatch.setattr(contest, "SECONDS", -1.0)
    _, calls = rewritten(Conv(), tensor(2, 4), always=False)
    assert torch.conv2d in calls
    assert not found


def test_equal_times_are_no_reason(timed):
    timed(1.0, 1.0)
    _, calls = rewritten(Conv(), tensor(2, 4), always=False)
    assert torch.conv2d in calls


def test_a_batch_norm_in_training_is_not_called_twice(timed):
    found = timed(2.0, 1.0)
    model = Block().train()
    rewritten(model, tensor(2, 4), always=False)
    assert int(model.norm.num_batches_tracked) == 1
    assert not [target for targets, _ in found for target in targets if "norm" in str(target)]


# ----------------------------------------------------------------------------------------------------------------------
# As Inductor compiles it


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("last", "times", "dtype"),
    [(False, 2, torch.bfloat16), (True, 1, torch.float16), (True, 2, torch.float32), (False, 1, torch.float32)],
)
def test_one_kernel(device, last, times, dtype):
    from torch._inductor.utils import run_and_get_code

    model = Conv(times=times, stride=2, padding=1).to(device, dtype)
    x = tensor(2, 4, last, dtype, device)
    run = torch.compile(lambda x: F.silu(model(x)), backend="kgopt", options=ALWAYS)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        y, codes = run_and_get_code(run, x)
        theirs, exact = F.silu(model(x)), F.silu(copy.deepcopy(model).double()(x.double()))
    assert SUMS in backend.last_report.glue
    assert y.stride() == theirs.stride()
    assert_as_good_as_torch(y, theirs, exact)
    code = "\n".join(codes)
    assert "extern_kernels.conv" not in code
    assert code.count("triton_poi_fused" if device == "cuda" else 'extern "C"') >= 1
    if device == "cuda" or not (last and times > 1):  # on the CPU loops over other dims are not fused
        assert code.count("= empty_strided_") == 1, "nothing but the result is stored"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("last", [False, True])
def test_values_on_a_gpu(last, case):
    rank, given = CASES[case]
    for dtype in DTYPES:
        model, x = Conv(rank, 4, **given).to("cuda", dtype), tensor(rank, 4, last, dtype, "cuda")
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            agrees(model, x)


@pytest.mark.gpu
def test_a_large_one_is_measured_on_a_gpu():
    """Whatever the verdict: it gives PyTorch's result."""
    model, x = Conv(2, 32, kernel=2).to("cuda", torch.float16), torch.randn(1, 32, 301, 301, device="cuda").half()
    run = torch.compile(model, backend="kgopt")
    with torch.no_grad():
        y, theirs, exact = run(x), model(x), copy.deepcopy(model).double()(x.double())
    assert y.stride() == theirs.stride()
    assert_as_good_as_torch(y, theirs, exact)


@needs_cuda_build
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
def test_strides_of_fake_tensors_on_a_gpu(last, dtype):
    def function(x, w):
        return torch.conv2d(x, w, None, 2, 1, 1, 4) * 2

    with FakeTensorMode() as mode, torch.no_grad():
        x = torch.empty(2, 4, 7, 8, device="cuda", dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        graph = captured(function, mode, x, torch.empty(8, 1, 3, 3, device="cuda", dtype=dtype))
        before = next(n.meta["example_value"] for n in graph.graph.nodes if n.target is torch.conv2d)
        nodes = tapped.several(graph.graph)
        assert passes.tapped.swap_several(graph, nodes, None, convolutions.Convolutions()) == ["conv2d"]
        graph.graph.lint()
        after = list(graph.graph.nodes)[-2].args[0].meta["example_value"]
        assert (after.shape, after.stride(), after.dtype) == (before.shape, before.stride(), before.dtype)
