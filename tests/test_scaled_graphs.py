"""fp32 convolutions on fp16 tensor cores in graphs of training (kgopt/rewrite/inductor/scaled.py)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

import kgopt  # noqa: F401
from kgopt._layout import FORMATS
from kgopt.rewrite import backend
from kgopt.rewrite.captured.passes import convolutions
from kgopt.rewrite.glue.calls import CONVS
from kgopt.rewrite.inductor import passes, scaled

ATEN, OPS = torch.ops.aten, torch.ops.kgopt
SCALED_HALF, CONV = OPS.scaled_half.default, OPS.conv_scaled_half.default
CONV_BACKWARD = OPS.conv_scaled_half_backward.default
NORM, ADD, CAT = OPS.group_norm_fwd.default, ATEN.add.Tensor, ATEN.cat.default


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """On this machine, where tensors are small, the pass does all that it may do."""
    less = {"LEAST_GAIN": -1e9, "LEAST_TIME": -1e9, "LAUNCH": 0.0, "PACE": 1e30, "WEIGHT_TIME": 0.0}
    for name, setting in (("DEVICES", ("cpu",)), *less.items()):
        monkeypatch.setattr(scaled, name, setting)
    yield
    torch._dynamo.reset()


def last(t):
    return t.contiguous(memory_format=FORMATS[t.dim()])


def conv(c_in=32, c_out=32, kernel=3, dims=2, **options):
    return (nn.Conv2d if dims == 2 else nn.Conv3d)(c_in, c_out, kernel, padding=kernel // 2, **options)


class Step:
    """A training step through AOTAutograd's partitioner, compiled by nothing: what it gives, keeps and calls."""

    def __init__(self, model, x, change=scaled.replace, recompute=False, wants_dx=True, form=last, moves=False):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        torch._dynamo.reset()
        model, x = copy.deepcopy(model), form(x).clone(memory_format=torch.preserve_format)
        x.requires_grad_(wants_dx)
        self.graph, kept = None, []

        def partition(joint, inputs, **options):
            change(joint.graph)
            joint.graph.lint()
            joint.recompile()
            self.graph = joint.graph
            return min_cut_rematerialization_partition(joint, inputs, **options)

        def compiler(graph_module, inputs):
            backend.rewrite_graph(graph_module, always=True, recompute=recompute)
            for node in [n for n in graph_module.graph.nodes if moves and n.target in CONVS]:
                convolutions._move_input(graph_module.graph, node, True)
            graph_module.recompile()
            return aot_autograd(fw_compiler=lambda g, _: g, partition_fn=partition)(graph_module, inputs)

        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
            y = torch.compile(model, backend=compiler)(x)
        y.sin().sum().backward()
        self.kept = [(t.dtype, t.shape[1]) for t in kept if t.dim() == x.dim() and len(t) == len(x)]
        self.results = [y.detach(), *([x.grad] if wants_dx else []), *(p.grad for p in model.parameters())]

    def calls(self, *targets):
        return [node for node in self.graph.nodes if node.target in targets]

    @property
    def counts(self):
        return [len(self.calls(op)) for op in (SCALED_HALF, CONV, CONV_BACKWARD)]


def compared(model, x, **options):
    """The rewritten step, which gives what it gave, in the same formats, and whose graph knows them."""
    before, after = Step(model, x, lambda graph: None, **options), Step(model, x, **options)
    for a, b in zip(after.results, before.results, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a - b).norm() <= 1e-2 * b.norm() + 1e-8
    for node in after.calls(SCALED_HALF, CONV, CONV_BACKWARD):
        given = fx.map_arg(node.args, lambda n: torch.ones_like(n.meta["val"], device="cpu"))
        for real, fake in zip(tree_leaves(node.target(*given)), tree_leaves(node.meta["val"]), strict=True):
            assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
    return after


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("act", [nn.Identity(), nn.SiLU(), nn.LeakyReLU(0.1)])
def test_a_norm_rounds(act, dims):
    """Norm and activations become a part of the rounding; the norm's gradient reads its mean and rstd."""
    model = nn.Sequential(nn.GroupNorm(4, 32), act, conv(c_out=40, dims=dims))
    step = compared(model, torch.randn(2, 32, *[6] * dims))
    assert step.counts == [1, 1, 1]
    assert not step.calls(NORM)
    (norm,), (half,) = step.calls(OPS.group_norm_backward.default), step.calls(SCALED_HALF)
    assert [arg.args for arg in norm.args[2:4]] == [(half, 2), (half, 3)]
    # x, for the norm's gradient, and the half instead of the norm's result.
    assert sorted(step.kept, key=str) == [(torch.float16, 32), (torch.float32, 32)]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("options", [{"stride": 2}, {"bias": False}], ids=str)
def test_without_a_norm(options, dims):
    model = nn.Sequential(conv(dims=dims, **options), nn.Tanh(), conv(dims=dims))
    assert compared(model, torch.randn(2, 32, *[8] * dims)).counts == [2, 2, 2]


@pytest.mark.parametrize("act", [nn.Threshold(0.1, -1.0), nn.Tanhshrink(), nn.LeakyReLU(-0.1)], ids=str)
def test_activations_whose_bounds_are_not_known(act):
    """The norm stays, and its result is rounded."""
    step = compared(nn.Sequential(nn.GroupNorm(4, 32), act, conv()), torch.randn(2, 32, 6, 6))
    assert (step.counts, len(step.calls(NORM))) == ([1, 1, 1], 1)


class Joined(nn.Module):
    """A concatenation of a norm's result, which another function reads as well."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, 32), conv(64, 32)

    def forward(self, x):
        z = torch.nn.functional.silu(self.norm(x))
        return self.conv(torch.cat((z, x), 1)) + z.tanh()


class Branches(nn.Module):
    """Two convolutions of one norm's result; their sum."""

    def __init__(self, c_out=32):
        super().__init__()
        self.norm, self.first, self.second = nn.GroupNorm(4, 32), conv(), conv(c_out=c_out)

    def forward(self, x):
        z = torch.nn.functional.silu(self.norm(x))
        return self.first(z) + self.second(z)


def test_a_concatenation():
    """Its parts are rounded, and their halves joined; another function reads the norm's result."""
    step = compared(Joined(), torch.randn(2, 32, 6, 6))
    assert (step.counts, len(step.calls(NORM))) == ([2, 1, 1], 1)
    assert sorted(node.meta["val"].dtype is torch.float16 for node in step.calls(CAT)) == [False, True]


class Skip(nn.Module):
    """A U-Net's: what a strided convolution reads is joined with what comes back."""

    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.GroupNorm(4, 32), nn.GroupNorm(4, 32)
        self.down, self.conv, self.up = conv(stride=2), conv(64, 32), nn.ConvTranspose2d(32, 32, 2, 2)

    def forward(self, x):
        z = torch.relu(self.norm(x))
        return self.conv(torch.cat((self.up(torch.relu(self.other(self.down(z)))), z), 1))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("moves", [False, True])
def test_a_skip_is_rounded_once(recompute, moves):
    """By its norm, for both convolutions. The transposed one stays as it is, and so does the norm in front of it.

    Copies to channels_last in front of convolutions, as the backend writes them, change nothing.
    """
    step = compared(Skip(), torch.randn(2, 32, 8, 8), recompute=recompute, moves=moves)
    assert len(step.calls(OPS.in_format.default)) == moves  # of the transposed one
    assert (step.counts, len(step.calls(NORM))) == ([2, 2, 2], 1)
    (half,) = (node for node in step.calls(SCALED_HALF) if len(node.args) > 1)
    assert len(half.users) == 4  # half and inverse, mean and rstd
    assert all(node.meta["val"].dtype is not torch.float32 for node in step.calls(CAT))


@pytest.mark.parametrize("recompute", [False, True])
def test_two_convolutions_of_one_norm(recompute):
    """They share the half. The sum of both is the residual of one."""
    step = compared(Branches(), torch.randn(2, 32, 6, 6), recompute=recompute)
    assert (step.counts, len(step.calls(NORM))) == ([1, 2, 2], 0)
    assert len(step.calls(ADD)) == 1  # of both gradients
    assert sorted(node.args[4] is None for node in step.calls(CONV)) == [False, True]
    assert ((torch.float16, 32) in step.kept) != recompute


@pytest.mark.parametrize("recompute", [False, True])
def test_a_norm_that_others_read_stays(recompute):
    """One of the two convolutions has too few channels. The half is computed again if the norm is."""
    step = compared(Branches(c_out=1), torch.randn(2, 32, 6, 6), recompute=recompute)
    assert (step.counts, len(step.calls(NORM))) == ([1, 1, 1], 1)
    assert ((torch.float16, 32) in step.kept) != recompute


class Residual(nn.Module):
    def __init__(self, behind=None):
        super().__init__()
        self.first, self.norm, self.second, self.behind = conv(), nn.GroupNorm(4, 32), conv(), behind

    def forward(self, x):
        h = self.first(x)
        h = self.second(torch.nn.functional.silu(self.norm(h))) + h
        return h if self.behind is None else self.behind(h)


@pytest.mark.parametrize("behind", [None, nn.GroupNorm(4, 32), conv(), nn.Sigmoid()], ids=type)
def test_a_sum_behind(behind):
    """It saves a pass where Inductor would write the sum alone; a pointwise function computes it on its way."""
    is_taken = not isinstance(behind, nn.Sigmoid)
    step = compared(Residual(behind), torch.randn(2, 32, 6, 6))
    assert [node.args[4].target for node in step.calls(CONV) if node.args[4]] == [CONV] * is_taken


def test_what_is_computed_again_is_a_half():
    """With the option the half is not kept either."""
    model = nn.Sequential(conv(), nn.GroupNorm(4, 32), nn.SiLU(), conv(c_out=40))
    x = torch.randn(2, 32, 6, 6)
    step = compared(model, x, recompute=True)
    assert step.counts == [2, 2, 2]
    # The first convolution's half, and its result for the norm.
    assert sorted(step.kept, key=str) == [(torch.float16, 32), (torch.float32, 32)]


def test_without_a_gradient_of_x():
    (backward,) = compared(conv(), torch.randn(2, 32, 6, 6), wants_dx=False).calls(CONV_BACKWARD)
    assert backward.args[-1] == [False, True, True]


def test_convolutions_of_kgopt():
    class Own(nn.Conv3d):
        def forward(self, x):
            return OPS.conv3d(x, self.weight, self.bias, padding=[1, 1, 1], **self.options)

    model = Own(32, 32, 3)
    for options, count in (({}, 1), ({"allow_tf32": True}, 1), ({"allow_tf32": False}, 0), ({"backend": "aten"}, 0)):
        model.options = options
        assert compared(model, torch.randn(2, 32, 6, 6, 6)).counts == [count] * 3


OTHERS = {
    "groups": conv(groups=2),
    "few channels": conv(c_out=8),
    "dilation": conv(dilation=2),
    "a kernel of 1": conv(kernel=1),
    "stride 2 over an odd width": conv(stride=2),
    "no multiple of 8": conv(c_in=36),
    "transposed": nn.ConvTranspose2d(32, 32, 3),
    "bf16": conv(dtype=torch.bfloat16),
    "contiguous": conv(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_left_alone(name):
    model, form = OTHERS[name], torch.Tensor.contiguous if name == "contiguous" else last
    x = torch.randn(2, model.in_channels, 6, 7 if "odd" in name else 6, dtype=model.weight.dtype)
    assert compared(model, x, form=form).counts == [0, 0, 0]


def test_kernels_that_have_no_gradient_of_a_weight():
    """A kernel as deep as this is none that plan_wgrad takes, which the op would say in a user's backward."""
    ones = [1, 1, 1], [1, 1, 1], [1, 1, 1]
    assert scaled._has_weight_gradient(ones, (64, 3, 3), (80, 8, 8))
    assert not scaled._has_weight_gradient(ones, (65, 3, 3), (80, 8, 8))


def test_a_graph_of_inference_is_left_alone():
    graph, t = fx.Graph(), last(torch.zeros(32, 32, 6, 6))
    x, weight = (graph.placeholder(name) for name in ("x", "weight"))
    y = graph.call_function(ATEN.convolution.default, (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))
    for node in (x, weight, y):
        node.meta["val"] = t
    graph.output((y,))
    scaled.replace(graph)
    assert y in graph.nodes


def test_an_op_that_refuses_leaves_all_as_it_was(monkeypatch):
    added = scaled.added  # which without a target raises
    monkeypatch.setattr(scaled, "added", lambda g, op, *rest: added(g, None if op is CONV_BACKWARD else op, *rest))
    step = compared(Residual(), torch.randn(2, 32, 6, 6))
    assert (step.counts, len(step.calls(NORM))) == ([0, 0, 0], 1)


def test_the_cost(monkeypatch):
    """Wide convolutions of volumes gain, the more behind a norm; one tap does not pay for the passes."""
    monkeypatch.undo()
    wide = 2, 128, 128, 27, 32**3, 32**3
    (before, fused), (same, alone) = (scaled.predicted_gain(*wide, is_fused) for is_fused in (True, False))
    assert before == same > 1.3 * fused
    assert fused < alone < before
    before, after = scaled.predicted_gain(2, 128, 128, 1, 32**3, 32**3, True)
    assert after > before
    monkeypatch.setattr(scaled, "DEVICES", ("cpu",))
    assert Step(conv(), torch.randn(2, 32, 6, 6)).counts == [0, 0, 0]


@pytest.mark.parametrize("at_first", [True, False])
def test_the_switch(at_first, monkeypatch):
    """Code that was compiled while TF32 was allowed is not called while it is not; the cache tells them apart."""
    allowed, compiled, calls = [at_first], [], []
    monkeypatch.setattr(passes, "conv_tf32_allowed", lambda: allowed[0])

    def compile_graph(graph, inputs, *rest, passes, **more):
        number = len(compiled)
        compiled.append(passes.version)
        graph = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        return lambda *given: (calls.append(number), graph(*given))[1]

    monkeypatch.setattr(backend, "compile_graph", compile_graph)
    model, x = nn.Sequential(conv(), nn.GroupNorm(4, 32)), torch.randn(2, 32, 6, 6)
    run = torch.compile(model, backend="kgopt", options={"kgopt.always": True})
    for state in (at_first, not at_first, at_first, not at_first):
        allowed[0] = state
        torch.testing.assert_close(run(x), model(x))
    assert calls == ([0, 1, 0, 1] if at_first else [0, 0, 0, 0])
    assert len(set(compiled)) == len(compiled)
    assert compiled[0].endswith(" tf32") == at_first


@pytest.mark.parametrize("allowed", [True, False])
def test_compiled_by_inductor(allowed, monkeypatch):
    """The ops are called where TF32 is allowed."""
    from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

    monkeypatch.setattr(passes, "conv_tf32_allowed", lambda: allowed)
    model, x = Residual(nn.GroupNorm(4, 32)), last(torch.randn(2, 32, 6, 6)).requires_grad_()

    def step(run):
        y = run(x)
        return y, *torch.autograd.grad(y.sin().sum(), [x, *model.parameters()])

    run = torch.compile(model, backend="kgopt", options={"kgopt.always": True})
    with fresh_inductor_cache():
        found, codes = run_and_get_code(step, run)
    for a, b in zip(found, step(model), strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm() + 1e-6
    assert ["kgopt.conv_scaled_half" in code for code in codes] == [allowed] * 2
