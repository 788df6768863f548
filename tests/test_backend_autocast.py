"""``torch.compile(backend="kgopt")`` under autocast on CUDA: which norms give half precision."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_graphs import captured, needs_cuda_build
from kgopt.rewrite import backend
from kgopt.rewrite.captured.passes import convolutions


def instance(x, w, b, k):
    return F.leaky_relu(F.instance_norm(x, weight=w, bias=b))


def instance_and_conv(x, w, b, k):
    return F.conv2d(F.relu(F.instance_norm(x, weight=w, bias=b)), k)


def instance_scaled(x, w, b, k):
    """The graph held a function in its arguments, which is no code."""
    return F.relu(F.instance_norm(x, weight=w, bias=b) * (1 + x[:, :, :1, :1]) + x[:, :, 1:2, 1:2])


def instance_in_fp32(x, w, b, k):
    return F.softplus(F.instance_norm(x, weight=w, bias=b))


def group(x, w, b, k):
    return F.silu(F.group_norm(x, 4, w, b))


def group_and_conv(x, w, b, k):
    return F.conv2d(F.silu(F.group_norm(x, 4, w, b)), k)


def group_read_twice(x, w, b, k):
    y = F.silu(F.group_norm(x, 4, w, b))
    return F.conv2d(y, k) + y


def group_as_weight(x, w, b, k):
    y = F.silu(F.group_norm(x, 4, w, b))
    return F.conv2d(y, y)


def group_in_float32(x, w, b, k):
    """Latent diffusion's: half precision, whatever reads it."""
    return F.silu(F.group_norm(x.float(), 4, w, b).type(torch.float16)) + 1


def group_in_float32_scaled(x, w, b, k):
    return F.silu(F.group_norm(x.float(), 4, w, b).type(torch.float16) * (1 + x[:, :, :1, :1]))


def group_in_float32_and_sum(x, w, b, k):
    return F.silu(F.group_norm(x.float(), 4, w, b).type(torch.float16) + x)


def group_padded(x, w, b, k):
    return F.conv2d(F.pad(F.silu(F.group_norm(x, 4, w, b)), (1, 1, 1, 1), mode="reflect"), k)


def group_joined(x, w, b, k):
    """The skip connection of a U-Net: two norms, each convolved, and joined for a third convolution."""
    first, second = F.group_norm(x, 4, w, b), F.relu(F.group_norm(x, 2, w, b))
    joined = torch.cat([first, second], 1).reshape(4, 8, 6, 6)
    return F.conv2d(joined, k) + F.conv2d(first, k)[:1]


def group_padded_with_ones(x, w, b, k):
    return F.conv2d(F.pad(F.silu(F.group_norm(x, 4, w, b)), (1, 1, 1, 1), value=0.1), k)


def group_padded_and_read(x, w, b, k):
    y = F.pad(F.silu(F.group_norm(x, 4, w, b)), (1, 1, 1, 1))
    return F.conv2d(y, k) + y


def group_enlarged(x, w, b, k):
    return F.conv2d(F.interpolate(F.silu(F.group_norm(x, 4, w, b)), scale_factor=2), k)


def group_smoothly_enlarged(x, w, b, k):
    return F.conv2d(F.interpolate(F.silu(F.group_norm(x, 4, w, b)), scale_factor=2, mode="bilinear"), k)


@pytest.fixture
def autocast_without_a_gpu():
    """The state that ``torch.autocast("cuda", torch.float16)`` sets where there is a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize(
    ("function", "halves"),
    [
        (instance, True),
        (instance_and_conv, True),
        (instance_scaled, True),
        (instance_in_fp32, False),
        (group, False),
        (group_and_conv, True),
        (group_read_twice, False),
        (group_as_weight, True),
        (group_in_float32, True),
        (group_in_float32_scaled, True),
        (group_in_float32_and_sum, True),
        (group_padded, True),
        (group_joined, True),
        (group_padded_with_ones, False),
        (group_padded_and_read, False),
        (group_enlarged, True),
        (group_smoothly_enlarged, False),
    ],
)
def test_dtypes_are_pytorch_s(function, halves, autocast_without_a_gpu):
    if function is group_joined and torch.version.cuda is None:
        pytest.skip("a torch without CUDA refuses such a view of a fake tensor on a GPU")
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(2, 8, 6, 6, dtype=torch.float16, device="cuda")
        w, k = torch.empty(8, device="cuda"), torch.empty(8, 8, 1, 1, device="cuda")
        wanted = function(x, w, w, k)
    graph = captured(function, mode, x, w, w, k)
    report = backend.rewrite_graph(graph, always=True)
    assert all(row.became for row in report.sites), report
    seen = []

    class Run(fx.Interpreter):
        def call_function(self, target, args, kwargs):
            y = super().call_function(target, args, kwargs)
            of_site = "kgopt" in str(target) and "upsample_linear" not in str(target)
            if of_site or "without_autocast" in str(target):
                seen.append(y.dtype)
            return y

    with mode:
        y = Run(graph).run(x, w, w, k)
    assert y.dtype is wanted.dtype
    assert seen == [torch.float16 if halves else torch.float32] * len(report.sites)


@needs_cuda_build
def test_sums_in_backward_stay_in_float32(autocast_without_a_gpu):
    """Each position of a padding that repeats adds to the same gradient: in half precision each sum would round."""

    def function(x, w, b, k):
        return F.conv2d(F.pad(F.group_norm(x, 4, w, b), (1, 1, 1, 1), mode="replicate"), k)

    mode = FakeTensorMode()
    for grad in (False, True):
        with mode:
            x = torch.empty(2, 8, 6, 6, dtype=torch.float16, device="cuda")
            w, k = torch.empty(8, device="cuda", requires_grad=grad), torch.empty(8, 8, 1, 1, device="cuda")
        graph = captured(function, mode, x, w, w, k)
        assert backend.rewrite_graph(graph, always=True).sites[0].became
        (padded,) = (node for node in graph.graph.nodes if "pad" in node.name)
        assert padded.meta["example_value"].dtype is (torch.float32 if grad else torch.float16)


@needs_cuda_build
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_convolutions_in_training(dtype, last, monkeypatch, autocast_without_a_gpu):
    """kgopt's convolution of a norm's result in half precision, and in float32; its weight stays float32."""

    def function(x, w, b, k):
        return torch.conv3d(F.relu(F.instance_norm(x, weight=w, bias=b)), k, b, padding=1)

    times = convolutions._Times(1.0, 1.0, 1.0, 0.5 if last else 2.0, "auto", "auto")
    monkeypatch.setattr(convolutions, "_measured", lambda node, grad, until: times)
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(2, 8, 6, 6, 6, dtype=dtype, device="cuda")
        w, k = (torch.empty(sizes, device="cuda", requires_grad=True) for sizes in ((8,), (8, 8, 3, 3, 3)))
        wanted = function(x, w, w, k)
    graph = captured(function, mode, x, w, w, k)
    backend.rewrite_graph(graph, always=True)
    (conv,) = (node for node in graph.graph.nodes if "conv" in str(node.target))
    assert conv.target is torch.ops.kgopt.conv3d.default
    assert conv.args[1].op == "placeholder"
    read = []

    class Run(fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is conv.target:
                read.append(args[0])
            return super().call_function(target, args, kwargs)

    with mode:
        y = Run(graph).run(x, w, w, k)
    assert (y.dtype, y.stride()) == (wanted.dtype, wanted.stride())
    assert read[0].dtype is dtype
    assert read[0].is_contiguous(memory_format=torch.channels_last_3d) is last


class Net(nn.Module):
    """Two norms of a kind: one that a convolution reads, one that gives the result."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.second = nn.Conv3d(2, 8, 3), nn.Conv3d(8, 4, 3)
        self.norm, self.last = norm(8), norm(4)

    def forward(self, x):
        return F.silu(self.last(self.second(F.leaky_relu(self.norm(self.first(x))))))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("norm", [lambda c: nn.GroupNorm(2, c), lambda c: nn.InstanceNorm3d(c, affine=True)])
def test_training_under_autocast(norm, recompute):
    model = Net(norm).cuda()
    x = torch.randn(2, 2, 12, 12, 12, device="cuda")

    def step(run, of, dtype=torch.float16):
        of.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is torch.float16):
            y = run(x.to(torch.float64) if dtype is torch.float64 else x)
        y.double().square().mean().backward()
        return [y.detach(), *(p.grad.clone() for p in of.parameters())]

    compiled = torch.compile(model, backend="kgopt", options={"kgopt.recompute": recompute})
    expected = step(model, model)
    found = step(compiled, model)
    wide = copy.deepcopy(model).double()
    exact = step(wide, wide, torch.float64)
    for y, plain, right in zip(found, expected, exact, strict=True):
        assert y.dtype is plain.dtype
        error, allowed = ((t.double() - right).abs().max() for t in (y, plain))
        assert error <= 2 * allowed + 1e-3 * right.abs().max()
