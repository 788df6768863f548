"""Scale and shift for each position behind norms in captured graphs: torch.compile(backend="kgopt"), in inference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses import FakeTensorMode

import kgopt.rewrite.backend as backend
from fake_graphs import captured, needs_cuda_build
from kgopt.rewrite.captured import contest
from kgopt.rewrite.captured.values import value
from kgopt.rewrite.measure import policy
from tolerances import assert_as_good_as_torch

C, Z = 8, 3
MAPS, NORM = torch.ops.kgopt.group_norm_maps.default, torch.ops.kgopt.group_norm.default


def spatial_norm(x, z, w, b, p):
    z = F.interpolate(z, size=x.shape[2:], mode="nearest")
    return F.group_norm(x, 2, w, b) * F.conv2d(z, p) + F.conv2d(z, p + 1, b)


def spade(x, z, w, b, p):
    z = F.interpolate(z, scale_factor=2)
    normed = F.instance_norm(x)
    return F.leaky_relu(normed * (1 + F.conv2d(z, p)) + F.conv2d(z, p), 0.2)


def without_convolutions(x, z, w, b, p):
    z = F.interpolate(torch.cat([z, z, z], 1)[:, :C], size=list(x.shape[2:]))
    return F.silu(F.group_norm(x, 4, w, b) * z + z)


def apart(x, z, w, b, p):
    scale = F.interpolate(F.conv2d(z, p), scale_factor=2)
    shift = F.conv2d(F.interpolate(z, scale_factor=2), p, bias=b, stride=(1, 1), padding=0)
    return torch.relu(shift + scale * F.group_norm(x, 2, w, b))


def addcmul(x, z, w, b, p):
    z = F.interpolate(z, x.shape[2:])
    return torch.addcmul(F.conv2d(z, p), F.group_norm(x, 2), F.conv2d(z, p, b))


def in_place(x, z, w, b, p):
    z = F.interpolate(z, x.shape[2:])
    scale, shift = F.conv2d(z, p), F.conv2d(z, p, b)
    h = F.group_norm(x, 2, w, b)
    h *= scale
    h += shift
    return F.relu_(h)


def wide(x, z, w, b, p):
    """A kernel of 3, which sees neighbours: the maps are of x's size."""
    z = F.interpolate(z, x.shape[2:])
    p = p.expand(C, Z, 3, 3)
    return F.gelu(F.group_norm(x, 2, w, b) * F.conv2d(z, p, padding=1) + F.conv2d(z, p, padding=1))


def two_sizes(x, z, w, b, p):
    scale = F.interpolate(F.conv2d(z, p), scale_factor=2)
    shift = F.interpolate(F.conv2d(z[:, :, ::2, ::2], p), scale_factor=4)
    return F.group_norm(x, 2, w, b) * scale + shift


def read_again(x, z, w, b, p):
    scale = F.conv2d(F.interpolate(z, x.shape[2:]), p)
    return F.group_norm(x, 2, w, b) * scale + scale.abs() + scale.mean()


def written(x, z, w, b, p):
    """What is repeated is changed afterwards."""
    z = z.clone()
    large = F.interpolate(z, x.shape[2:])
    z.mul_(3.0)
    return F.group_norm(x, 2, w, b) * F.conv2d(large, p) + F.conv2d(large, p, b)


def bilinear(x, z, w, b, p):
    z = F.interpolate(z, x.shape[2:], mode="bilinear")
    return F.group_norm(x, 2, w, b) * F.conv2d(z, p) + F.conv2d(z, p)


def prelu(x, z, w, b, p):
    """It has slopes, which the op does not take."""
    return F.prelu(F.group_norm(x, 2, w, b) * x + x, w)


SMALL = [spatial_norm, without_convolutions, apart, addcmul, in_place]
LARGE = [spade, wide, two_sizes, read_again, written, bilinear, prelu]


def product_alone(x, z, w, b, p):
    return F.silu(F.group_norm(x, 2, w, b) * F.conv2d(F.interpolate(z, x.shape[2:]), p))


def mixed(x, z, w, b, p):
    return F.group_norm(x, 2, w, b) * x + b.reshape(1, C, 1, 1)


def difference(x, z, w, b, p):
    return F.group_norm(x, 2, w, b) * x - x


APART = [product_alone, mixed, difference]


def inputs(device, dtype=torch.float64, channels_last=False):
    g = torch.Generator().manual_seed(0)
    x, z = torch.randn(2, C, 8, 12, generator=g), torch.randn(2, Z, 4, 6, generator=g)
    w, b, p = torch.randn(C, generator=g), torch.randn(C, generator=g), torch.randn(C, Z, 1, 1, generator=g)
    made = [t.to(device, dtype) for t in (x, z, w, b, p)]
    for i in range(2 if channels_last else 0):
        made[i] = made[i].contiguous(memory_format=torch.channels_last)
    return made


def sizes_of(function, args, **more):
    """Sizes of the maps that each call of the op gets, and the result, with which the original's agrees."""
    seen = []

    def watched(x, moments, scale, shift, *rest):
        seen.append((tuple(scale.shape[2:]), tuple(shift.shape[2:])))
        return MAPS(x, moments, scale, shift, *rest)

    def rewritten(graph, example_inputs):
        backend.rewrite_graph(graph, always=True)
        for node in graph.graph.nodes:
            node.target = watched if node.target is MAPS else node.target
        graph.recompile()
        return aot_eager(graph, example_inputs)

    torch.compiler.reset()
    expected = function(*args)
    y = torch.compile(function, backend=rewritten, fullgraph=True, **more)(*args)
    assert y.stride() == expected.stride()
    return list(dict.fromkeys(seen)), y


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("function", [*SMALL, *LARGE, *APART])
def test_sizes_of_the_maps(function, channels_last, device):
    args = inputs(device, channels_last=channels_last)
    seen, y = sizes_of(function, args)
    expected = [(4, 6)] if function in SMALL else [(8, 12)] if function in LARGE else []
    assert seen == [(size, size) for size in expected]
    torch.testing.assert_close(y, function(*args), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", [spatial_norm, spade, addcmul])
def test_as_good_as_torch(function, dtype, device):
    args = inputs(device, dtype)
    seen, y = sizes_of(function, args)
    assert seen
    assert_as_good_as_torch(y, function(*args), function(*(t.double() for t in args)))


def test_the_report_names_the_op(device):
    sizes_of(spade, inputs(device))
    (row,) = backend.last_report.sites
    assert row.became == "group_norm_maps(act=leaky_relu(0.2))"


def test_training_keeps_the_norm_alone(device):
    """The op keeps nothing for a backward."""
    with torch.enable_grad():
        args = [t.requires_grad_() for t in inputs(device)]
        seen, y = sizes_of(spatial_norm, args)
        assert not seen
        torch.testing.assert_close(y, spatial_norm(*args), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_keeps_the_norm_alone(inside, device):
    """What the product's dtype is there, the op does not know."""

    def function(*args):
        with torch.autocast(args[0].device.type, torch.bfloat16):
            return spatial_norm(*args)

    args = inputs(device, torch.float32)
    if inside:
        seen, y = sizes_of(function, args)
    else:
        with torch.autocast(args[0].device.type, torch.bfloat16):
            seen, y = sizes_of(spatial_norm, args)
    assert not seen
    torch.testing.assert_close(y, function(*args), rtol=3e-2, atol=3e-2)


def test_one_graph_for_all_sizes(device):
    """Of sizes that a compiler does not know the maps are those of x's size."""
    x, *rest = inputs(device)
    graphs = []

    def compiler(graph, given):
        backend.rewrite_graph(graph, always=True)
        graphs.append([row.became for row in backend.last_report.sites])
        return aot_eager(graph, given)

    torch.compiler.reset()
    run = torch.compile(lambda x, s, w: F.group_norm(x, 2, w) * s + s, backend=compiler, fullgraph=True, dynamic=True)
    for n, size in ((2, 5), (3, 7)):
        x, s = (torch.randn(n, C, size, 6, device=device, dtype=torch.float64) for _ in range(2))
        torch.testing.assert_close(run(x, s, rest[1]), F.group_norm(x, 2, rest[1]) * s + s)
    assert graphs == [["group_norm_maps"]]


@pytest.mark.parametrize("ours", [1.0, 2.0])
def test_the_faster_ops_run(ours, monkeypatch):
    """kgopt's norm, and the compiler's product and sum, are timed beside the one op, the upsampling with both."""
    timed = []

    def lost(self, core, last, like, other=None):
        if other is None:
            return ""
        region = contest.Region(core, last, like)
        found = []
        for rewrite in (self.rewrite, other):
            module = region.module()
            rewrite(module)
            found.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        timed.append((found, [tuple(value(node).shape[2:]) for node in region.inputs if value(node).dim() == 4]))
        return "slower" if ours > 1 else ""

    monkeypatch.setattr(contest.Contest, "lost", lost)
    monkeypatch.setattr(policy, "default", lambda device: True)
    calls = []

    def rewritten(graph, example_inputs):
        backend.rewrite_graph(graph)
        calls.extend(node.target for node in graph.graph.nodes)
        return aot_eager(graph, example_inputs)

    torch.compiler.reset()
    args = inputs("cpu")
    y = torch.compile(spatial_norm, backend=rewritten, fullgraph=True)(*args)
    torch.testing.assert_close(y, spatial_norm(*args), rtol=1e-9, atol=1e-9)
    ((usual, one), sizes) = timed[0]
    assert MAPS in one
    assert MAPS not in usual
    assert NORM in usual
    assert sizes == [(8, 12), (4, 6), (4, 6)]
    assert (MAPS in calls, NORM in calls) == (ours == 1, ours > 1)


def test_a_convolution_and_the_upsampling_change_places(device):
    """Also where no norm reads the result, and one convolution behind another; not where something is written."""

    def function(x, z, w, b, p):
        y = F.conv2d(F.conv2d(F.interpolate(z, scale_factor=2), p, b), w.diag()[:, :, None, None])
        z = z.clone()
        large = F.interpolate(z, None, 2)
        z.mul_(2)
        return y + F.conv2d(large, p)

    args = inputs(device)
    _, y = sizes_of(function, args)
    assert backend.last_report.glue == "convolutions ahead of nearest upsampling: conv2d, y"
    torch.testing.assert_close(y, function(*args), rtol=1e-9, atol=1e-9)


@needs_cuda_build
@pytest.mark.parametrize("map_first", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_strides_on_a_gpu(channels_last, map_first):
    """PyTorch's norm gives a contiguous tensor there, and the first of a product's operands says how it lies."""

    def function(x, s):
        normed = F.group_norm(x, 2)
        return s + s * normed if map_first else normed * s + s

    with FakeTensorMode() as mode:
        x = torch.empty(2, C, 4, 6, device="cuda")
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        graph = captured(function, mode, x, torch.empty_like(x))
        expected = function(x, torch.empty_like(x)).stride()
        backend.rewrite_graph(graph, always=True)
        assert any(node.target is MAPS for node in graph.graph.nodes)
        assert graph(x, torch.empty_like(x)).stride() == expected


@pytest.mark.parametrize("channels_last", [False, True])
def test_with_inductor(channels_last):
    args = inputs("cpu", torch.float32, channels_last)
    torch.compiler.reset()
    y = torch.compile(spatial_norm, backend="kgopt", options={"kgopt.always": True})(*args)
    assert [row.became for row in backend.last_report.sites] == ["group_norm_maps"]
    torch.testing.assert_close(y, spatial_norm(*args), rtol=1e-4, atol=1e-4)
