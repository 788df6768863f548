"""What reaches beyond one site: nested Sequentials, upsampling and padding from copies, launches that are hidden."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt import accuracy
from kgopt.rewrite import glue
from kgopt.rewrite.glue import plans, search
from kgopt.rewrite.measure import clocks, measuring, policy
from kgopt.rewrite.model import between, convolved, layout, whole
from kgopt.rewrite.optimized import classes, known
from kgopt.rewrite.optimized.disguise import original_class
from kgopt.rewrite.pytorch import watching
from optimize_pairs import all_faster
from shapes import make
from test_optimize import assert_same_results, ops_of, optimized


class Up(nn.Module):
    """As some libraries have it: the function hides in a partial."""

    def __init__(self) -> None:
        super().__init__()
        self.up = functools.partial(self._up, mode="nearest")

    @staticmethod
    def _up(x, size, mode):
        return F.interpolate(x, size=size, mode=mode)

    def forward(self, x):
        return self.up(x, [2 * s for s in x.shape[2:]])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.up1, self.up2 = Up(), nn.Upsample(scale_factor=2, mode="bilinear")
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        y = self.up1(torch.relu(self.norm(x)))
        return self.conv(F.pad(self.up2(y), (1, 1, 1, 1), mode="replicate"))


def whole_of(model, x):
    return whole.Whole(model, x, lambda path: "")


def kinds_run(model, x, monkeypatch):
    kinds = []
    run = glue.Call.run
    monkeypatch.setattr(glue.Call, "run", lambda call, option="": (kinds.append(call.kind), run(call, option))[1])
    y = model(x)
    monkeypatch.setattr(glue.Call, "run", run)
    return kinds, y


def test_calls_are_replaced_in_inference_only(monkeypatch):
    torch.manual_seed(0)
    original = Net().eval()
    model = kgopt.optimize(copy.deepcopy(original), measure=False)
    x = torch.randn(1, 4, 5, 6)
    assert all_faster(model, x) == 4
    assert isinstance(model.up1, Up)
    assert isinstance(model.up2, nn.Upsample)
    with torch.no_grad():
        kinds, y = kinds_run(model, x, monkeypatch)
        torch.testing.assert_close(y, original(x))
        assert kinds == ["nearest", "linear", "replicate"]
        other = torch.randn(1, 4, 7, 6)
        kinds, y = kinds_run(model, other, monkeypatch)
        assert kinds == []  # not measured at this shape
        torch.testing.assert_close(y, original(other))
    kinds, y = kinds_run(model, x, monkeypatch)
    assert kinds == []
    y.sum().backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        with torch.no_grad():
            torch.testing.assert_close(twin(x), original(x))
    kgopt.restore(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert not any(name.startswith("_kgopt") for m in model.modules() for name in m.__dict__)


def test_what_traces_or_transforms_sees_pytorchs_functions(monkeypatch):
    model, x = Net().eval(), torch.randn(1, 4, 5, 6)
    all_faster(model, x)
    with torch.no_grad():
        assert kinds_run(model, x, monkeypatch)[0] == ["nearest", "linear", "replicate"]
        expected = model(x)
        kinds, y = kinds_run(torch.func.vmap(model), x[None], monkeypatch)
        assert kinds == []
        torch.testing.assert_close(y[0], expected)
        kinds, traced = kinds_run(lambda t: torch.jit.trace(model, (t,), check_trace=False), x, monkeypatch)
        assert kinds == []
        torch.testing.assert_close(traced(x), expected)
        kinds, (y, _) = kinds_run(lambda t: torch.func.jvp(model, (t,), (t,)), x, monkeypatch)
        assert kinds == []
        torch.testing.assert_close(y, expected)
        compiled = torch.compile(model, backend="eager")
        kinds, y = kinds_run(compiled, x, monkeypatch)
        assert kinds == []
        torch.testing.assert_close(y, expected)


def test_glue_and_layout_of_one_module():
    """Both wrap the forward; either can go first and leave first."""
    model = nn.Upsample(scale_factor=2)
    x = torch.randn(1, 4, 5, 6)
    all_faster(model, x)
    layout.set_layout(model, True)
    with torch.no_grad():
        assert torch.equal(model(x), F.interpolate(x, scale_factor=2))
    glue.forget(model)
    assert original_class(model) is nn.Upsample
    layout.set_layout(model, False)
    assert type(model) is nn.Upsample


def test_excluded_modules_keep_their_forward():
    model = Net().eval()
    assert all_faster(model, torch.randn(1, 4, 5, 6), unwanted=lambda path: "no" if path == "up1" else "") == 3
    assert type(model) is not Net
    assert type(model.up1) is Up
    assert type(model.up2) is not nn.Upsample


MODES = "replicate", "reflect", "circular"


@pytest.mark.parametrize("padding", [0, 1, (2, 0), "same"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_convolutions_that_pad_in_another_mode(mode, bias, padding, monkeypatch):
    """Such modules were PyTorch's, whatever was measured; a padding of nothing was a copy."""
    x = torch.randn(2, 4, 7, 9)
    original = nn.Conv2d(4, 6, 3, padding=padding, padding_mode=mode, bias=bias).eval()
    model = copy.deepcopy(original)
    with torch.no_grad():
        if not all_faster(model, x):
            assert not bias
            assert mode == "circular"
            return
        pads, around = [], plans.Border.around
        monkeypatch.setattr(plans.Border, "around", lambda self, x: (pads.append(self.ours), around(self, x))[1])
        assert torch.equal(model(x), original(x))
        (plan,) = glue.state_of(model).plans.values()
        assert plan.option == ("bias" if bias else "torch")
        assert plan.sizes == ([*original(x).shape] if bias else [])
        assert pads == ([mode != "circular"] * 2 if padding else [])  # the first one to make the plan
        model.padding_mode = original.padding_mode = "zeros"
        torch.testing.assert_close(model(x), original(x))


@pytest.mark.parametrize("mode", MODES)
def test_an_activation_joins_a_convolution_that_pads_in_another_mode(mode, monkeypatch):
    x = torch.randn(2, 4, 7, 9)
    original = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode), nn.ReLU()).eval()
    model = copy.deepcopy(original)
    with torch.no_grad():
        all_faster(model, x)
        convolved.give(model)
        acts, run = [], plans.run_plan
        seen = lambda *args, act="none", **more: (acts.append(act), run(*args, act=act, **more))[1]  # noqa: E731
        monkeypatch.setattr(plans, "run_plan", seen)
        torch.testing.assert_close(model(x), original(x))
        assert acts == ["relu"]


class Residual(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode)

    def forward(self, x):
        h = self.conv(F.silu(self.norm(x)))
        return x + h


@pytest.mark.parametrize("mode", MODES)
def test_a_sum_joins_a_convolution_that_pads_in_another_mode(mode, monkeypatch):
    x = torch.randn(2, 4, 7, 9)
    original = Residual(mode).eval()
    model = kgopt.optimize(copy.deepcopy(original), measure=False)
    with torch.no_grad():
        all_faster(model, x)
        residuals, run = [], plans.run_plan

        def seen(conv, x, plan, residual=None, *more, **named):
            residuals.append(residual)
            return run(conv, x, plan, residual, *more, **named)

        monkeypatch.setattr(plans, "run_plan", seen)
        torch.testing.assert_close(model(x), original(x))
        assert [r is x for r in residuals] == [True]


def test_padding_modes_of_what_was_replaced_and_of_other_inputs(monkeypatch):
    x = torch.randn(2, 4, 7, 9)
    original = nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate").eval()
    model = copy.deepcopy(original)
    with torch.no_grad():
        all_faster(model, x)
        for other in (x[0], x[:1], x.contiguous(memory_format=torch.channels_last)):
            torch.testing.assert_close(model(other), original(other))
        asked, pad = [], F.pad
        monkeypatch.setattr(F, "pad", lambda *args, **more: (asked.append(1), pad(*args, **more))[1])
        torch.testing.assert_close(model(x), original(x))
        assert len(asked) == 2
        monkeypatch.undo()
        monkeypatch.setattr(plans, "border_of", lambda conv: None)
        torch.testing.assert_close(model(x), original(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_by_running_statistics(affine, channels_last, dtype, monkeypatch):
    norm = nn.BatchNorm2d(6, eps=1e-3, affine=affine).to("cuda", dtype).eval()
    for t in (norm.running_mean, norm.running_var, *norm.parameters()):
        t.data.uniform_(0.5, 2.0)
    x = make((3, 6, 33, 20), dtype, "cuda", "channels_last" if channels_last else "contiguous", 3.0, 1.0)[0]
    original = copy.deepcopy(norm)
    with torch.no_grad():
        assert all_faster(norm, x) == 1
        for change in (lambda m: None, lambda m: m.running_mean.add_(1.0), lambda m: m.running_var.data.mul_(2.0)):
            for m in (norm, original):
                change(m)
            kinds, y = kinds_run(norm, x, monkeypatch)
            assert kinds == ["batch_norm"]
            exact = copy.deepcopy(original).double()(x.double())
            allowed = accuracy.allowed(dtype, accuracy.relative_error(original(x), exact))
            assert accuracy.relative_error(y, exact) <= allowed
            assert y.stride() == original(x).stride()
    norm.train()
    assert kinds_run(norm, x, monkeypatch)[0] == []


class Clocks:
    """A model's times, by the ways that run in it: of a convolution's bias, nearest and linear upsampling, padding."""

    def __init__(self, monkeypatch, model, work, host):
        self.model, self.work, self.host, self.asked = model, work, host, 0
        monkeypatch.setattr(clocks, "busy", self.busy)
        monkeypatch.setattr(clocks, "time_both", self.both)

    @property
    def ways(self):
        return set().union(*(glue.state_of(m).ways for m in glue.modules_of(self.model)))

    def busy(self, run, device):
        self.asked += 1
        run()
        return 10.0 + sum(self.work[way] for way in self.ways)

    def both(self, first, second, device):
        times = []
        for run in (first, second):
            times.append(max(self.busy(run, device), self.host + sum(1.0 for way in self.ways)))
        return times


def decided(monkeypatch, work, host=0.0, budget=1e6):
    model, x = Net().eval(), torch.randn(1, 4, 5, 6)
    kgopt.optimize(model, measure=False)
    kgopt.forget()
    decides = whole_of(model, x)
    expected = decides.call()
    all_faster(model, x)
    timed = Clocks(
        monkeypatch, model, dict(zip(("conv bias", "nearest", "linear", "replicate"), work, strict=True)), host
    )
    monkeypatch.setattr(between, "BUDGET", budget)
    text = decides.choose_between("given").text
    torch.testing.assert_close(decides.call(), expected)
    assert all(glue.state_of(m).enabled for m in glue.modules_of(model))
    return timed, text


def test_the_whole_model_decides(monkeypatch):
    timed, text = decided(monkeypatch, (-1, -1, -1, -1))
    assert len(timed.ways) == 4
    assert text == "kgopt's in 4 modules: 6000.00 ms with them, 10000.00 ms without"
    timed, text = decided(monkeypatch, (1, 1, 1, 1))
    assert not glue.modules_of(timed.model)
    assert text.startswith("left alone")


@pytest.mark.parametrize("loses", ["conv bias", "nearest", "linear", "replicate"])
def test_a_way_that_loses_in_the_model_is_left_out_alone(loses, monkeypatch):
    """All of them ran, or none: one network took 3.9 ms with and 3.2 ms without."""
    ways = "conv bias", "nearest", "linear", "replicate"
    timed, text = decided(monkeypatch, [6 if way == loses else -1 for way in ways])
    assert timed.ways == {*ways} - {loses}
    assert f"without {loses}: 7000.00 ms with them" in text
    assert timed.asked <= 5 + 4


def test_a_long_call_is_taken_apart_only_where_all_ways_lose(monkeypatch):
    timed, _ = decided(monkeypatch, (-1, -1, -1, 0.5), budget=1.0)
    assert len(timed.ways) == 4
    assert timed.asked == 2 + 2, "with them and without, of the GPU and by the clock"
    timed, _ = decided(monkeypatch, (-1, -1, -1, 6), budget=1.0)
    assert len(timed.ways) == 3


def test_a_first_call_is_no_measure_of_a_models_launches(monkeypatch):
    """One that chose algorithms for a second kept the GPU busy for as long at each of the calls behind it."""
    called = []
    monkeypatch.setattr(clocks, "_busy", lambda functions, *_: [float(len(called))])
    assert clocks.busy(lambda: called.append(1), torch.device("cuda")) == 1.0


def test_where_the_host_is_late_the_work_decides(monkeypatch):
    """By the clock there was no difference, and all was left alone."""
    timed, text = decided(monkeypatch, (-1, -1, -1, -1), host=400.0)
    assert len(timed.ways) == 4
    assert "6000.00 ms of the GPU's work with them, 10000.00 ms without" in text


def test_a_host_that_is_late_does_without_many_checks(monkeypatch):
    timed, _ = decided(monkeypatch, (-1, -1, -1, -1), host=20.0)
    assert not timed.ways
    timed, _ = decided(monkeypatch, (-5, 0.1, 0.1, -0.5), host=9.0)
    assert timed.ways == {"conv bias"}
    timed, _ = decided(monkeypatch, (-0.01, -0.01, -0.01, -2), host=6.0)
    assert timed.ways == {"linear", "nearest", "replicate"}


def test_sites_are_measured_under_kgopts_own_mode_only():
    x = torch.randn(2, 4, 3)
    assert policy.may_measure(x)
    with search._Replace(glue.GlueState()):
        assert not policy.may_measure(x)
        watching.own_modes.count += 1
        try:
            assert policy.may_measure(x)
        finally:
            watching.own_modes.count -= 1


@pytest.mark.gpu
def test_optimize_measures_glue_on_a_gpu():
    model = Net().cuda().eval()
    x = torch.randn(4, 4, 256, 256, device="cuda")
    with torch.no_grad():
        expected = model(x)
        kgopt.optimize(model, example_inputs=x)
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------------------------------- launches that are hidden


def test_hidden_launches_take_sites_that_lose_by_launch_alone():
    slow_launch = measuring.Measured(40e-6, 60e-6, 0.0, 0.0, "PyTorch is faster here", 30e-6, 10e-6)
    slow_work = measuring.Measured(40e-6, 60e-6, 0.0, 0.0, "PyTorch is faster here", 30e-6, 35e-6)
    faster = measuring.Measured(40e-6, 20e-6, 0.0, 0.0)
    assert [m.ours(False) for m in (slow_launch, slow_work, faster)] == [False, False, True]
    assert [m.ours(True) for m in (slow_launch, slow_work, faster)] == [True, False, True]
    state = policy.SiteState(results={"key": slow_launch})
    assert state.undecided
    assert state.lost_everywhere
    state.hidden = True
    assert not state.lost_everywhere
    state.forget()
    assert not state.hidden
    assert not policy.SiteState(results={"key": slow_work}).undecided


@pytest.mark.parametrize(("times", "hidden"), [((2e-3, 1e-3), True), ((1e-3, 2e-3), False)])
def test_the_whole_model_decides_whether_launches_are_hidden(monkeypatch, times, hidden):
    state = policy.SiteState(results={"key": measuring.Measured(4e-5, 6e-5, 0.0, 0.0, "PyTorch", 3e-5, 1e-5)})
    seen = []

    def timed(first, second, device):
        for function in (first, second):
            function()
            seen.append(state.hidden)
        return times

    monkeypatch.setattr(clocks, "time_both", timed)
    model = nn.Identity()
    known.put(model, site=state)
    whole_of(model, torch.zeros(1)).choose_hidden("given")
    assert seen == [False, True]
    assert state.hidden is hidden


def test_the_layout_of_a_model_in_training_is_chosen_with_its_backward():
    model = Net().train()
    x = torch.randn(1, 4, 5, 6)
    backward = []
    model.conv.weight.grad = torch.zeros_like(model.conv.weight)

    def watched(model, args, y):
        y.register_hook(lambda g: backward.append(tuple(g.shape)))
        return {"out": y}

    model.register_forward_hook(watched)
    whole_of(model, x).timed()
    assert len(backward) == 2  # tried once, then called
    assert not model.conv.weight.grad.any()
    assert model.norm.weight.grad is None
    model.conv.weight.register_hook(lambda g: g)  # somebody watches: no backward
    whole_of(model, x).timed()
    assert len(backward) == 2  # tried once, then called


# --------------------------------------------------------------------------------------------- nested Sequentials


class Single(nn.Sequential):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.add_module("norm", nn.GroupNorm(2, channels))
        self.add_module("conv", nn.Conv3d(channels, channels, 3, padding=1, bias=False))
        self.add_module("relu", nn.ReLU(inplace=True))


def double_conv():
    """pytorch3dunet's DoubleConv: the second norm reads the first one's activation."""
    model = nn.Sequential()
    model.add_module("one", Single(8))
    model.add_module("two", Single(8))
    return model


CROSSED = ["group_norm", "conv3d", "group_norm"]


def kgopt_ops(model, x):
    return [name for name in ops_of(model, x) if name in ("group_norm", "conv3d")]


def test_a_chain_reaches_from_one_sequential_into_the_next(device):
    model, original = optimized(double_conv, device)
    x = torch.randn(2, 8, 4, 5, 6, device=device)
    assert kgopt_ops(model, x) == CROSSED
    rows = {row.path: row for row in kgopt.report(model).sites}
    assert rows["two.norm"].kind == "Conv3d → relu → GroupNorm"
    assert rows["two.norm"].became == "conv3d + group_norm(pre_act=relu)"
    assert rows["one.norm"].kind == "GroupNorm"
    assert_same_results(model, original, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert kgopt_ops(twin, x) == CROSSED
    kgopt.restore(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert torch.equal(model(x), original(x))


def test_who_looks_between_two_sequentials_sees_what_there_was():
    model, original = optimized(double_conv, "cpu")
    x = torch.randn(2, 8, 4, 5, 6)
    seen = []
    handle = model.one.register_forward_hook(lambda m, args, y: seen.append(y.clone()))
    torch.testing.assert_close(model(x), original(x))
    torch.testing.assert_close(seen[0], original.one(x))
    handle.remove()
    assert kgopt_ops(model, x) == CROSSED
    model.one.relu = original.one.relu = nn.SiLU()
    torch.testing.assert_close(model(x), original(x))
    model.one.add_module("more", nn.Conv3d(8, 8, 1))
    original.one.add_module("more", model.one.more)
    torch.testing.assert_close(model(x), original(x))
    model.two, original.two = nn.Identity(), nn.Identity()
    torch.testing.assert_close(model(x), original(x))


def test_a_nested_chain_compiles_as_one_graph():
    model, original = optimized(double_conv, "cpu")
    x = torch.randn(2, 8, 4, 5, 6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), original(x))


def compiled_nodes(model, x):
    """The compiled model's result, and each call of its graph: the operator, and whether it reads channels_last."""
    calls = []

    def backend(graph, example_inputs):
        for node in graph.graph.nodes:
            value = (
                node.args[0].meta.get("example_value")
                if node.args and isinstance(node.args[0], torch.fx.Node)
                else None
            )
            if node.op == "call_function":
                last = isinstance(value, torch.Tensor) and value.dim() == 5 and not value.is_contiguous()
                calls.append((str(node.target), last))
                if node.kwargs.get("backend") == "kgopt" and not x.is_cuda:  # which has none of its own
                    node.kwargs = {**node.kwargs, "backend": "auto"}
        graph.recompile()
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(model, backend=backend, fullgraph=True)(x), calls


def test_compiled_inference_runs_the_convolutions_that_were_faster(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.ConvTranspose3d(8, 3, 2, stride=2, bias=False))
    model = model.to(device).eval()
    x = torch.randn(1, 2, 5, 6, 7, device=device)
    with torch.no_grad():
        expected = model(x)
    all_faster(model, x)
    for conv in model:
        if known.get(conv, "glue") is None:
            known.put(conv, glue=glue.GlueState())
        state = glue.state_of(conv)
        state.always = {True: "own", False: "own"}
        if original_class(conv) is None:
            conv.__class__ = classes.make_class(type(conv), (("glue",),))
    y, calls = compiled_nodes(model, x)
    assert [name for name, _ in calls] == ["kgopt.conv3d.default", "kgopt.conv_transpose3d.default"]
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=2e-3)
    glue.state_of(model[0]).always[True] = "bias"  # the compiler's
    assert [name.startswith("kgopt") for name, _ in compiled_nodes(model, x)[1]] == [False, True]
    with torch.enable_grad():
        assert plans._compiled_plan(model[1], torch.randn(1, 8, 5, 6, 7, device=device)) is None


class Contiguous(nn.Module):
    """A decomposition, in a model that computes in channels_last, that forgets about it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x).contiguous()))


def test_compiled_norms_read_the_format_that_the_model_computes_in(device):
    torch.manual_seed(0)
    model = Contiguous().to(device).eval()
    x = torch.randn(1, 8, 4, 5, 6, device=device)
    with torch.no_grad():
        expected = model(x)
    kgopt.optimize(model, channels_last=True, measure=False)
    y, calls = compiled_nodes(model, x)
    assert [last for name, last in calls if "group_norm" in name] == [True]
    assert y.is_contiguous()
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=2e-3)


class Upsampled(nn.Module):
    """As a video decoder upsamples: one frame on its own, the others in time too."""

    def forward(self, x):
        first, others = x.split((1, x.shape[2] - 1), dim=2)
        first = F.interpolate(first.squeeze(2), scale_factor=(2, 2), mode="nearest").unsqueeze(2)
        others = F.interpolate(others, scale_factor=(2, 2, 2), mode="nearest")
        return torch.cat((first, others), dim=2)


def test_compiled_upsampling_keeps_the_format_that_the_model_computes_in(device):
    model = nn.Sequential(Upsampled()).eval()
    x = make((1, 8, 4, 5, 6), torch.float32, device, "channels_last")[0]
    known.put(model[0], keeps=True)
    with torch.no_grad():
        expected = model(x)
        all_faster(model, x)
    y, calls = compiled_nodes(model, x)
    assert not any("interpolate" in name for name, _ in calls)  # but views
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(y, expected)
    with torch.enable_grad():  # PyTorch's, which have gradients
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
    dense = []

    def backend(graph, example_inputs):
        dense.extend(
            n.meta["example_value"].is_contiguous() for n in graph.graph.nodes if "built-in method cat" in str(n.target)
        )
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend)(x), expected)
    assert dense == [True]  # channels are its last dim, so that they are innermost whatever the compiler does
    state = glue.state_of(model[0])
    state.kinds = ()  # as in a model that does not keep the format
    assert sum("interpolate" in name for name, _ in compiled_nodes(model, x)[1]) == 2
