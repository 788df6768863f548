"""What kgopt.optimize puts together without a compiler is put together under torch.compile as well, in inference."""

from __future__ import annotations

import copy
import math
import operator
from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import kgopt
import optimize_models as models
from kgopt.rewrite import glue
from kgopt.rewrite.chains.meanings import activation_of, conv_of
from kgopt.rewrite.glue import search
from modulated_models import C, Diffusers, E
from tolerances import assert_as_good_as_torch


def fused(original, device, option=None, carries=False):
    """A copy in channels_last, whose convolutions and upsamplings all have measured kgopt's as the faster ones.

    ``option``: of convolutions of more than a few channels; for those of a few it is the kernel that they have.
    """
    model = kgopt.optimize(copy.deepcopy(original).to(device).eval(), channels_last=True, measure=False)
    for module in list(model.modules()):
        kind = conv_of(module)
        if kind is None and not isinstance(module, nn.Upsample):
            continue
        state = search._wrapped.add(module, glue.GlueState)
        state.kinds = ("linear",) if kind is None else ()
        if kind is not None:
            few = module.out_channels <= glue.FEW
            way = (option or "own") if not few else "pointwise" if math.prod(module.kernel_size) == 1 else "few"
            state.always = dict.fromkeys((True, False), way)
            state.carrier.on = carries and way == "own"
    return model


def graph_of(model, *args, inductor=False, **options):
    """The compiled model's result, and how often its graph, or Inductor's, has each of kgopt's ops."""
    calls = Counter()

    def count(graph):
        names = (n.target.__name__.split(".")[0] for n in graph.nodes if "kgopt" in str(n.target))
        calls.update(name + ".residual" * has_residual(n) for name, n in zip(names, ours(graph), strict=True))

    def ours(graph):
        return [n for n in graph.nodes if "kgopt" in str(n.target)]

    def has_residual(n):
        at = {"conv_add": 3, "conv_add_moments": 3, "upsample_linear": 1}.get(n.target.__name__.split(".")[0])
        return at is not None and len(n.args) > at and n.args[at] is not None

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.kwargs.get("backend") == "kgopt" and not args[0].is_cuda:  # the CPU has no convolution of ours
                node.kwargs = {**node.kwargs, "backend": "auto"}
        graph.recompile()
        if not inductor:
            count(graph.graph)
            return graph.forward
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, config_patches={"post_grad_custom_post_pass": count, "fx_graph_cache": False})

    with torch.no_grad():
        y = torch.compile(model, backend=backend, fullgraph=True, **options)(*args)
    return y, calls


def assert_right(model, original, y, *args):
    device = args[0].device
    with torch.no_grad():
        exact = copy.deepcopy(original).to(device).double()(*(a.double() for a in args))
        assert_as_good_as_torch(y, copy.deepcopy(original).to(device)(*args), exact)


class Decoder(nn.Module):
    """A level of a U-Net: blocks with skip connections, upsampling that meets one, and a head of a few channels."""

    def __init__(self, head=1):
        super().__init__()
        self.first = nn.Conv3d(4, models.C, 3, padding=1)
        self.block, self.last = models.MonaiResBlock(), models.MonaiResBlock()
        self.down = nn.Conv3d(models.C, models.C, 3, stride=2, padding=1)
        up = nn.Upsample(scale_factor=2, mode="trilinear", align_corners=False)
        self.ups = nn.ModuleList([nn.Sequential(nn.Conv3d(models.C, models.C, 1, bias=False), up)])
        head = nn.Conv3d(models.C, 3, (1, head, head), padding=(0, head // 2, head // 2))
        self.head = nn.Sequential(nn.GroupNorm(2, models.C), nn.ReLU(), head)

    def forward(self, x):
        skip = self.block(self.first(x))
        x = self.down(skip)
        for up in self.ups:
            x = up(x) + skip
        return self.head(self.last(x))


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("carries", [False, True])
def test_a_compiled_model_has_what_an_eager_one_has(carries, kernel, device):
    torch.manual_seed(0)
    original = models.randomized(Decoder(kernel)).eval()
    x = torch.randn(1, 4, 4, 6, 8, device=device)
    model = fused(original, device, carries=carries)
    y, calls = graph_of(model, x)
    conv = "conv_add_moments" if carries else "conv3d"
    added = "conv_add_moments.residual" if carries else "conv_add.residual"
    head = "group_norm_conv" if kernel > 1 else "group_norm_conv1x1"
    # Of six convolutions beside the head the last one of each block has its sum.
    assert calls == {conv: 5, added: 2, "group_norm": 4, "upsample_linear.residual": 1, head: 1}
    assert y.is_contiguous()  # the caller's own format
    assert_right(model, original, y, x)


def test_a_bias_alone_is_left_to_the_compiler(device):
    torch.manual_seed(0)
    original = models.randomized(Decoder()).eval()
    x = torch.randn(1, 4, 4, 6, 8, device=device)
    model = fused(original, device, "bias")
    y, calls = graph_of(model, x)
    # The CPU's convolutions give contiguous tensors, which PyTorch upsamples.
    assert calls - Counter({"upsample_linear.residual": 1}) == {"group_norm": 4, "group_norm_conv1x1": 1}
    assert_right(model, original, y, x)


def test_activations_behind_convolutions(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.GroupNorm(2, 8), nn.Conv3d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 1), nn.SiLU())
    original = models.randomized(net).eval()
    x = torch.randn(2, 8, 4, 5, 6, device=device)
    model = fused(original, device)
    y, calls = graph_of(model, x)
    assert calls == {"group_norm": 1, "conv_add": 2}
    assert_right(model, original, y, x)


def test_norms_take_moments_in_inductors_graph(device):
    torch.manual_seed(0)
    original = models.randomized(Decoder()).eval()
    x = torch.randn(1, 4, 4, 6, 8, device=device)
    model = fused(original, device, carries=True)
    y, calls = graph_of(model, x, inductor=True)
    # The norm behind the upsampling has none to take.
    assert (calls["group_norm_moments"], calls["group_norm"]) == (3, 1)
    assert_right(model, original, y, x)


class InPlace(nn.Module):
    """A norm's input that is not what the convolution gave, though it is the same tensor."""

    def __init__(self, change):
        super().__init__()
        self.conv, self.norm, self.change = nn.Conv3d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), change

    def forward(self, x):
        h = self.conv(x)
        self.change(h)
        return self.norm(h)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.mul_(2).add_(3),
        lambda h: h[:, :4].zero_(),
        lambda h: h.view(-1).add_(1) if h.is_contiguous() else h.add_(1),
    ],
    ids=["all", "a part", "a view"],
)
def test_moments_do_not_outlive_a_change(change, device):
    torch.manual_seed(0)
    original = models.randomized(InPlace(change)).eval()
    x = torch.randn(2, 8, 4, 5, 6, device=device)
    model = fused(original, device, carries=True)
    y, calls = graph_of(model, x, inductor=True)
    assert calls == {"conv_add_moments": 1, "group_norm": 1}
    assert_right(model, original, y, x)


def test_the_pass_gives_a_head_its_moments():
    from torch._inductor.fx_passes import post_grad
    from torch.fx.experimental.proxy_tensor import make_fx

    ops = torch.ops.kgopt

    def heads(x, weight, scale, few):
        made = ops.conv_add_moments(x, weight, None, None, [1, 1], [1, 1], [1, 1], [0, 0], 1, False)
        y = made[0]
        norm = (2, scale, scale, 1e-5, "relu")
        wide = few.expand(3, 8, 3, 3).contiguous()
        geometry = ([1, 1], [1, 1], [1, 1], [0, 0], 1, False)
        plain = ops.group_norm_conv1x1(y, None, 0, None, None, 0.0, "none", few, None)  # no norm, no statistics
        return (
            plain,
            ops.group_norm_conv1x1(y, None, *norm, few, None),
            ops.group_norm_conv(y, None, *norm, wide, None, None, *geometry),
            ops.group_norm(y, 2, scale, scale),
        )

    x = torch.randn(2, 8, 5, 6).contiguous(memory_format=torch.channels_last)
    args = (x, torch.randn(8, 8, 3, 3), torch.randn(8), torch.randn(3, 8, 1, 1))
    with torch.no_grad():
        graph = make_fx(heads)(*args)
        post_grad.pass_patterns[0].apply(graph.graph)
        graph.graph.lint()
        graph.recompile()
        for y, expected in zip(graph(*args), heads(*args), strict=True):
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    moments = [n for n in graph.graph.nodes if n.target is operator.getitem and n.args[1] == 1]
    assert len(moments) == 1
    assert {n.target.__name__.split(".")[0] for n in moments[0].users} == {
        "group_norm_conv1x1",
        "group_norm_conv",
        "group_norm_moments",
    }
    assert len(moments[0].users) == 3


def test_other_sizes_and_what_is_watched(device):
    """Compiled code serves sizes that were never measured; gradients and hooks have PyTorch's code."""
    torch.manual_seed(0)
    original = models.randomized(Decoder()).eval()
    model = fused(original, device)
    seen = []

    def backend(graph, inputs):
        seen.append(sum("conv" in str(n.target) and "kgopt" in str(n.target) for n in graph.graph.nodes))
        for node in graph.graph.nodes:
            if node.kwargs.get("backend") == "kgopt" and device == "cpu":
                node.kwargs = {**node.kwargs, "backend": "auto"}
        graph.recompile()
        return graph.forward

    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for shape in ((2, 4, 6, 8, 10), (3, 4, 8, 10, 12)):
        x = torch.randn(shape, device=device)
        with torch.no_grad():
            assert_right(model, original, compiled(x), x)
    assert seen == [8]
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert seen == [8, 0]
    hook = model.block.conv2.register_forward_hook(lambda module, args, y: y * 2)
    torch._dynamo.reset()  # PyTorch compiles without guards on hooks unless told otherwise
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    hook.remove()


LIBRARIES = {
    "SegResNet": {"conv_add.residual": 12, "upsample_linear.residual": 3, "group_norm_conv1x1": 1},
    "UNet3D": {"conv_add": 5},
    "AutoencoderKL": {"conv_add.residual": 6, "group_norm_conv": 1},
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_models_of_libraries(name, device):
    from kgopt.cli._optional import MissingPackageError
    from kgopt.cli.bench_models import model_cases

    (case,) = model_cases(name, small=True)[:1]
    try:
        original = case.build()
    except MissingPackageError as error:
        pytest.skip(str(error))
    x = case.inputs(torch.device(device))
    model = fused(original, device)
    y, calls = graph_of(model, x)
    assert {op: calls[op] for op in LIBRARIES[name]} == LIBRARIES[name]
    assert_right(model, original, y, x)


class Code(nn.Module):
    """A norm and an activation as statements."""

    def __init__(self, act):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, 8), act

    def forward(self, x):
        h = self.norm(x)
        h = self.act(h)
        return h + 1


@pytest.mark.parametrize(
    "act",
    [nn.LeakyReLU(0.1), nn.ELU(0.7, inplace=True), nn.Hardtanh(-2, 3.5), nn.Softplus(2, 15), nn.Hardshrink(0.8)],
    ids=str,
)
@pytest.mark.parametrize("make", [Code, lambda act: nn.Sequential(nn.GroupNorm(2, 8), act)], ids=["code", "sequential"])
def test_numbers_of_activations_where_dynamo_traces_numbers(make, act):
    """``dynamic=True`` traces floats that modules hold."""
    model, called = make(act).eval(), []

    def backend(graph, inputs):
        called.extend(node.args[-1] for node in graph.graph.nodes if node.target is torch.ops.kgopt.group_norm.default)
        return graph

    torch._dynamo.reset()
    mine = kgopt.optimize(copy.deepcopy(model), measure=False)
    compiled = torch.compile(mine, backend=backend, dynamic=True, fullgraph=True)
    for size in (5, 7):
        x = torch.randn(2, 8, size, 6)
        torch.testing.assert_close(compiled(x), model(x))
    assert [text.partition("(")[0] for text in called] == [activation_of(act).partition("(")[0]]


def test_a_changed_number_is_compiled_anew():
    model = kgopt.optimize(nn.Sequential(nn.GroupNorm(2, 8), nn.LeakyReLU(0.1)).eval(), measure=False)
    torch._dynamo.reset()
    compiled, x = torch.compile(model, backend="eager", dynamic=True, fullgraph=True), torch.randn(2, 8, 5, 6)
    compiled(x)
    model[1].negative_slope = 0.3
    torch.testing.assert_close(compiled(x), nn.functional.leaky_relu(nn.functional.group_norm(x, 2), 0.3))


def test_dims_of_a_mean_where_dynamo_traces_numbers():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.GroupNorm(2, 8)

        def forward(self, x):
            x = self.norm(x)
            return torch.mean(x, dim=[2, 3])

    torch._dynamo.reset()
    model, x = Mean().eval(), torch.randn(2, 8, 5, 6)
    mine = kgopt.optimize(copy.deepcopy(model), measure=False)
    compiled = torch.compile(mine, backend="eager", dynamic=True, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("dynamic", [None, True])
def test_as_many_graphs_for_numbers_of_samples(dynamic):
    """The op takes no symbolic number of groups, of which scale and shift by sample have N times as many."""
    model = Diffusers().eval()

    def graphs(compiled):
        made = []

        def backend(graph, inputs):
            made.append(graph)
            return aot_eager(graph, inputs)

        torch._dynamo.reset()
        compiled = torch.compile(compiled, backend=backend, dynamic=dynamic, fullgraph=True)
        with torch.no_grad():
            for n in (2, 3, 4, 5):
                given = torch.randn(n, C, 6, 5), torch.randn(n, E)
                torch.testing.assert_close(compiled(*given), model(*given))
        return len(made)

    mine = kgopt.optimize(copy.deepcopy(model), measure=False)
    assert graphs(mine) == graphs(model) < 3
