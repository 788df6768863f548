"""kgopt.optimize: what it finds in module code, that values and gradients stay, and what it leaves alone."""

from __future__ import annotations

import copy
import linecache
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import kgopt
import optimize_models as models
from kgopt.rewrite.measure import clocks, measuring
from kgopt.rewrite.pytorch import watching
from tolerances import assert_as_good_as_torch


class Ops(TorchDispatchMode):
    """Which of kgopt's ops ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "kgopt":
            self.names.append(func._schema.name.split("::")[1].removesuffix("_fwd"))
        return func(*args, **(kwargs or {}))


def ops_of(model, *args):
    with Ops() as ops:
        model(*args)
    return ops.names


def run(model, x, *args, **kwargs):
    """The outputs and all gradients; of a loss in which every element counts differently."""
    x = x.detach().clone().requires_grad_()
    y = model(x, *args, **kwargs)
    outputs = y if isinstance(y, tuple) else (y,)
    loss = sum(
        (o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype, device=o.device).view(o.shape)).sum() for o in outputs
    )
    leaves = [x, *model.parameters()]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(loss, leaves, allow_unused=True)]


def assert_same_results(model, original, x, *args, also=None):
    """Outputs and gradients as accurate as the original's own, or as those of ``also``, PyTorch's by another way.

    Twice PyTorch's error for outputs. Gradients of a whole model hold vectors of a few elements whose terms nearly
    cancel (biases in front of a norm): PyTorch's error in one is a single draw, so they may differ by more, the fewer
    elements there are.
    """
    double = copy.deepcopy(original).double()
    doubles = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    reference = run(double, x.double(), *doubles)
    scale = max(float(r.norm()) for r in reference if r is not None)
    gradients = 1 + sum(1 for _ in original.parameters())
    results = run(model, x, *args)
    others = [None] * len(results) if also is None else run(also, x, *args)
    rows = zip(results, run(original, x, *args), others, reference, strict=True)
    for i, (actual, expected, other, exact) in enumerate(rows):
        assert (actual is None) == (expected is None)
        # A convolution's bias before an InstanceNorm has no gradient but rounding.
        if actual is not None and float(exact.norm()) > 1e-6 * scale:
            is_output = i < len(reference) - gradients
            factor = 2 if is_output else 4 if exact.numel() > 64 else 10
            assert_as_good_as_torch(actual, expected, exact, other, factor=factor)


def optimized(make, device, **options):
    original = models.randomized(make(), device)
    model = copy.deepcopy(original)
    assert kgopt.optimize(model, measure=False, **options) is model
    return model, original


@pytest.mark.parametrize("name", models.FUSED)
def test_values_and_gradients_stay(name, device):
    model, original = optimized(models.FUSED[name], device)
    x = models.input_for(model, device)
    args = (torch.randn(2, 4, device=device),) if name.startswith("diffusers") else ()
    assert_same_results(model, original, x, *args)
    assert "group_norm" in ops_of(model, x, *args)


@pytest.mark.parametrize("name", sorted(set(models.FUSED) - {"gcr", "diffusers_scale_shift"}))
def test_every_site_is_fused(name, device):
    model, _ = optimized(models.FUSED[name], device)
    report = kgopt.report(model)
    assert len(report.fused) == len(report.sites) > 0, str(report)


def test_activation_after_a_branch():
    """diffusers' block with scale_shift: one branch ends in the norm, the other goes on computing with it."""
    model, original = optimized(lambda: models.DiffusersResnetBlock("scale_shift"), "cpu")
    x, temb = models.input_for(model), torch.randn(2, 4)
    assert ops_of(model, x, temb) == ["group_norm", "group_norm"]
    model.mode = original.mode = "default"
    assert_same_results(model, original, x, temb)
    model.mode = "scale_shift"
    with pytest.raises(ValueError, match="temb is None"):
        model(x)


@pytest.mark.parametrize(
    ("op", "make"),
    [(op, make) for op, makes in models.PIPELINES.items() for make in makes],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_pipelines_are_recognized(op, make, device):
    model, original = optimized(make, device)
    x = models.input_for(model, device)
    assert kgopt.report(model).sites[0].became == op
    with torch.no_grad():  # for gradients the CPU stores the convolution's output and runs its parts
        assert ops_of(model, x) == [op]
    assert_same_results(model, original, x)


@pytest.mark.parametrize("make", models.ALONE, ids=lambda c: c.__name__)
def test_activation_is_left_alone(make, device):
    model, original = optimized(make, device)
    row = kgopt.report(model).sites[0]
    assert row.kind == "GroupNorm"
    assert row.became == "group_norm"
    assert models.ALONE[make] in row.reason
    x = models.input_for(model, device)
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x))


def test_convolution_that_is_read_again_is_left_alone(device):
    model, original = optimized(models.ConvReadTwice, device)
    x = models.input_for(model, device)
    assert ops_of(model, x) == ["group_norm", "logsumexp"] or ops_of(model, x) == ["group_norm"]
    assert_same_results(model, original, x)


class Conditional(models.LeftAlone):
    def forward(self, x, flag=True):
        y = self.act(self.norm(self.conv(x))) if flag else x
        return flag and self.act(self.norm(self.conv(y)))


@pytest.mark.parametrize("flag", [False, True])
def test_nothing_runs_that_did_not_run_before(flag):
    """A convolution inside a conditional expression is not moved out of it."""
    model, original = optimized(Conditional, "cpu")
    calls = []
    for m in (model, original):
        m.conv.register_forward_hook(lambda *_, m=m: calls.append(m))
    x = models.input_for(model)
    torch.testing.assert_close(model(x, flag), original(x, flag))
    assert calls.count(model) == calls.count(original) == 2 * flag
    assert kgopt.report(model).sites[0].became == "group_norm(act=silu)"


@pytest.mark.parametrize(
    ("make", "reason"),
    [(models.OwnNorm, "MyGroupNorm is a subclass"), (models.RunningStats, "track_running_stats=True")],
)
def test_norm_is_left_alone(make, reason, device):
    model, original = optimized(make, device)
    row = kgopt.report(model).sites[0]
    assert row.became == ""
    assert reason in row.reason
    assert type(model.norm) is type(original.norm)
    for mode in (True, False):
        model.train(mode), original.train(mode)
        x = models.input_for(model, device)
        assert torch.equal(model(x), original(x))


def test_hooks_run_and_see_what_they_saw(device):
    """A hook on the norm or the activation forbids fusing; it may also come later."""
    model, original = optimized(models.MonaiResBlock, device)
    x = models.input_for(model, device)
    seen = {}
    for name, m in (("model", model), ("original", original)):
        seen[name] = []
        m.norm1.register_forward_hook(lambda mod, args, y, name=name: seen[name].append(y.clone()))
        m.act.register_forward_pre_hook(lambda mod, args, name=name: seen[name].append(args[0].clone()))
    model(x), original(x)
    assert len(seen["model"]) == len(seen["original"]) == 3
    for a, b in zip(seen["model"], seen["original"], strict=True):
        torch.testing.assert_close(a, b)


def test_hook_that_was_there_before_is_a_reason():
    model = models.randomized(models.MonaiResBlock())
    model.norm1.register_forward_hook(lambda *_: None)
    kgopt.optimize(model, measure=False)
    rows = {row.path: row for row in kgopt.report(model).sites}
    assert "hooks" in rows["norm1"].reason
    assert rows["norm2"].kind == "GroupNorm → relu"


def test_global_hooks_see_every_module():
    model, original = optimized(models.MonaiResBlock, "cpu")
    x = models.input_for(model)
    counts = []
    for m in (model, original):
        calls = []
        handle = nn.modules.module.register_module_forward_hook(lambda mod, args, y, calls=calls: calls.append(mod))
        m(x)
        handle.remove()
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_replaced_module_is_called():
    """The checks are at each call, so a model may be edited after it was optimized."""
    model, original = optimized(models.MonaiResBlock, "cpu")
    x = models.input_for(model)
    model.act = original.act = nn.Softsign()
    torch.testing.assert_close(model(x), original(x))
    model.norm1 = original.norm1 = nn.Identity()
    torch.testing.assert_close(model(x), original(x))
    sequential, plain = optimized(models.FUSED["sequential"], "cpu")
    for s in (sequential, plain):
        s.append(nn.Softsign())
    torch.testing.assert_close(sequential(x), plain(x))


def test_patched_function_is_called(monkeypatch):
    model, original = optimized(models.Functional, "cpu")
    x = models.input_for(model)
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x, inplace=False: x * 3)
    torch.testing.assert_close(model(x), original(x))


def test_dropout_between_norm_and_activation(device):
    model, original = optimized(lambda: models.SingleConv("cgdl"), device)
    x = models.input_for(model, device)
    for m in (model, original):
        m.dropout.p = 0.5
    outputs = []
    for m in (model, original):
        torch.manual_seed(3)
        outputs.append(m(x))
    torch.testing.assert_close(*outputs)
    assert outputs[0].eq(0).float().mean() > 0.3
    model.eval(), original.eval()
    assert_same_results(model, original, x)


def test_errors_are_pytorchs(device):
    model, original = optimized(models.MonaiResBlock, device)
    for shape in ((2, 7, 3, 3, 3), (1, 8), (8,)):
        x = torch.randn(shape, device=device)
        messages = []
        for m in (model, original):
            with pytest.raises(Exception) as caught:  # noqa: PT011
                m(x)
            messages.append(f"{caught.type.__name__}: {caught.value}")
        assert messages[0] == messages[1]


def test_traceback_points_to_the_users_source():
    model, _ = optimized(models.MonaiResBlock, "cpu")
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, 7, 3, 3, 3))
    frames = [f for f in traceback.extract_tb(caught.tb) if f.filename == models.__file__]
    assert frames
    assert "self.norm1(x)" in linecache.getline(frames[-1].filename, frames[-1].lineno)


def test_source_that_changed_since_is_not_trusted(tmp_path, monkeypatch):
    file = tmp_path / "edited_model.py"
    text = (
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norm, self.act = torch.nn.GroupNorm(2, 8), torch.nn.ReLU()\n"
        "    def forward(self, x):\n"
        "        return self.act(self.norm(x))\n"
    )
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    from edited_model import Net

    file.write_text(text.replace("self.act(self.norm(x))", "self.act(self.norm(x * 2))"))
    model = kgopt.optimize(Net(), measure=False)
    assert kgopt.report(model).sites[0].reason == "Net.forward has other source than what runs"


def test_model_without_source():
    namespace = {"torch": torch}
    exec(
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norm, self.act = torch.nn.GroupNorm(2, 8), torch.nn.ReLU()\n"
        "    def forward(self, x):\n"
        "        return self.act(self.norm(x))\n",
        namespace,
    )
    original = namespace["Net"]()
    model = kgopt.optimize(copy.deepcopy(original), measure=False)
    row = kgopt.report(model).sites[0]
    assert (row.became, row.reason) == ("group_norm", "Net.forward has no source")
    x = torch.randn(2, 8, 5)
    torch.testing.assert_close(model(x), original(x))


class Asked(nn.Module):
    """Norms that hold parameters for a function, one of which is called as well."""

    def __init__(self):
        super().__init__()
        self.held, self.both = nn.GroupNorm(4, 8), nn.GroupNorm(2, 8)

    def forward(self, x):
        y = F.group_norm(x, self.held.num_groups, self.held.weight, self.held.bias)
        return self.both(y) * self.both.weight.sum()


def test_a_norm_whose_parameters_alone_are_read(device):
    """The report said that it ran on kgopt."""
    model, original = optimized(Asked, device)
    found = {row.path: (row.became, row.reason) for row in kgopt.report(model).sites}
    assert found["held"] == ("", "Asked asks for its parameters, and does not call it")
    assert found["both"][0] == found[""][0] == "group_norm"
    assert_same_results(model, original, torch.randn(2, 8, 5, 6, device=device))


def test_instance_norm_without_a_batch(device):
    model, original = optimized(lambda: nn.Sequential(nn.InstanceNorm2d(8, affine=True), nn.ReLU()), device)
    for shape in ((8, 5, 6), (2, 8, 5, 6)):
        x = torch.randn(shape, device=device)
        torch.testing.assert_close(model(x), original(x))
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        model(torch.randn(2, 8, 1, 1, device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype, device):
    original = models.randomized(models.MonaiResBlock(), device).to(dtype)
    model = kgopt.optimize(copy.deepcopy(original), measure=False)
    x = models.input_for(model, device, dtype)
    with torch.no_grad():
        exact = copy.deepcopy(original).double()(x.double())
        assert_as_good_as_torch(model(x), original(x), exact)


def test_memory_formats_are_pytorchs(device):
    model, original = optimized(models.MonaiResBlock, device)
    x = models.input_for(model, device).contiguous(memory_format=torch.channels_last_3d)
    for block in ("norm1", "norm2"):
        assert getattr(model, block)(x).stride() == getattr(original, block)(x).stride()
    assert model(x).stride() == original(x).stride()


def test_sites_and_exclude():
    model = kgopt.optimize(
        nn.ModuleDict({"a": models.MonaiResBlock(), "b": models.MonaiResBlock()}), measure=False, sites="*.norm1"
    )
    became = {row.path: row.became for row in kgopt.report(model).sites}
    assert became == {
        "a.norm1": "group_norm(act=relu)",
        "a.norm2": "",
        "b.norm1": "group_norm(act=relu)",
        "b.norm2": "",
    }
    kgopt.optimize(model, measure=False, exclude=["b"])
    became = {row.path: row.became for row in kgopt.report(model).sites}
    assert became["b.norm2"] == ""
    assert kgopt.report(model).sites[3].reason == "in `exclude`"


def test_twice_is_once():
    model, _ = optimized(models.DiffusersResnetBlock, "cpu")
    classes, report = [type(m) for m in model.modules()], str(kgopt.report(model))
    kgopt.optimize(model, measure=False)
    assert [type(m) for m in model.modules()] == classes
    assert str(kgopt.report(model)) == report


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", models.FUSED)
def test_restore_gives_back_everything(name, channels_last):
    original = models.randomized(models.FUSED[name]())
    model = copy.deepcopy(original)
    parameters = dict(model.named_parameters())
    kgopt.optimize(model, measure=False, channels_last=channels_last)
    assert list(model.state_dict()) == list(original.state_dict())
    assert all(p is parameters[n] for n, p in model.named_parameters())
    model(models.input_for(model), *((torch.randn(2, 4),) if name.startswith("diffusers") else ()))
    assert kgopt.restore(model) is model
    for a, b in zip(model.modules(), original.modules(), strict=True):
        assert type(a) is type(b)
        assert a.__dict__.keys() == b.__dict__.keys()
    for (n, p), q in zip(model.named_parameters(), original.parameters(), strict=True):
        assert p is parameters[n]
        assert torch.equal(p, q)
        assert p.stride() == q.stride()
    with pytest.raises(ValueError, match="was not optimized"):
        kgopt.report(model)


# ------------------------------------------------------------------------------------------------ layout and measuring


@pytest.mark.parametrize("name", ["monai", "functional", "sequential"])
def test_channels_last_inside_the_callers_format_outside(name, device):
    model, original = optimized(models.FUSED[name], device, channels_last=True)
    x = models.input_for(model, device)
    inside = []
    hook = next(m for m in model.modules() if isinstance(m, nn.Conv3d)).register_forward_hook(
        lambda m, args, y: inside.append(args[0].is_contiguous(memory_format=torch.channels_last_3d))
    )
    y = model(x)
    hook.remove()
    assert inside == [True]
    assert y.is_contiguous()
    x = x.contiguous(memory_format=torch.channels_last_3d)
    assert model(x).is_contiguous(memory_format=torch.channels_last_3d)
    # The yardstick is PyTorch in the same layout: other layouts take other convolution algorithms.
    assert_same_results(model, original.to(memory_format=torch.channels_last_3d), x)


def test_example_inputs_measure_and_compare(device):
    original = models.randomized(models.MonaiResBlock(), device).eval()
    model = kgopt.optimize(copy.deepcopy(original), example_inputs=models.input_for(original, device))
    report = kgopt.report(model)
    for row in report.sites:
        assert row.us_before > 0
        assert row.us_after > 0
        # What runs is what was the faster one.
        assert row.became == ("group_norm(act=relu)" if row.us_after <= row.us_before else "")
    assert "differ from the original's by" in report.accuracy
    assert float(report.accuracy.split(" by ")[1].split()[0]) < 1e-5
    x = models.input_for(model, device)
    assert_same_results(model, original, x)


def test_what_lost_with_the_example_inputs_is_put_back(device, monkeypatch):
    """Not even a check stays; the report still tells, and restore leaves no trace."""
    monkeypatch.setattr(clocks, "time_both", lambda *_: (1.0, 2.0))
    original = models.randomized(models.MonaiResBlock(), device)
    model = kgopt.optimize(copy.deepcopy(original), models.input_for(original, device))
    assert type(model.norm1) is nn.GroupNorm
    for _ in range(2):
        rows = kgopt.report(model).sites
        assert [row.became for row in rows] == ["", ""]
        assert all("PyTorch is faster here" in row.reason for row in rows)
        kgopt.optimize(model)
        assert type(model.norm1) is nn.GroupNorm
    kgopt.restore(model)
    for a, b in zip(model.modules(), original.modules(), strict=True):
        assert type(a) is type(b)
        assert a.__dict__.keys() == b.__dict__.keys()


@pytest.mark.parametrize("faster", ["kgopt", "pytorch"])
def test_the_faster_one_runs(faster, device, monkeypatch):
    times = (2.0, 1.0) if faster == "kgopt" else (1.0, 2.0)
    calls = []
    monkeypatch.setattr(clocks, "time_both", lambda a, b, device: calls.append(1) or times)
    model = kgopt.optimize(models.randomized(models.MonaiResBlock(), device))
    x = models.input_for(model, device)
    model(x)
    measured = len(calls)
    assert measured == (2 if faster == "kgopt" else 4)  # where the fused site loses, its norm alone is tried too
    assert ops_of(model, x).count("group_norm") in ((2,) if faster == "kgopt" else (0,))
    model(x)
    assert len(calls) == measured, "measured again at a later call"
    row = kgopt.report(model).sites[0]
    assert (row.became == "") == (faster == "pytorch")
    assert ("PyTorch is faster here" in row.reason) == (faster == "pytorch")


def test_modules_that_are_not_called_any_more_count(device, monkeypatch):
    """A call of a module takes as long as a small op: with functions alone on PyTorch's side, small sites lost to it.
    What the code calls either way, the norm's own forward and a function, does not count.
    """
    if watching.any_global_hooks():
        pytest.skip("needs names of torch that are hidden here: hooks of all modules may be there")
    model = models.randomized(models.MonaiResBlock(), device)  # a norm and a module behind it
    alone = models.randomized(nn.Sequential(nn.Conv3d(8, 8, 1), nn.GroupNorm(2, 8)), device)
    for block, times in ((model, 2), (alone, 0)):
        called = []
        monkeypatch.setattr(measuring, "_NOTHING", called.append)
        monkeypatch.setattr(clocks, "time_both", lambda first, second, device: (first(), second(), (2.0, 1.0))[-1])
        kgopt.optimize(block, models.input_for(model, device), channels_last=False)  # else in both layouts
        sites = len(kgopt.report(block).sites)
        assert len(called) == times * sites


def test_a_site_that_is_less_accurate_goes_back(device, monkeypatch):
    monkeypatch.setattr(clocks, "time_both", lambda a, b, device: (2.0, 1.0))
    monkeypatch.setattr(measuring, "_errors", lambda *_: (1e-7, 1e-2))
    model = kgopt.optimize(models.randomized(models.MonaiResBlock(), device))
    x = models.input_for(model, device)
    model(x)
    assert "less accurate" in kgopt.report(model).sites[0].reason
    assert ops_of(model, x) == []


def test_example_inputs_leave_no_trace():
    """Buffers, gradients and the random state are those from before."""
    model = models.randomized(
        nn.Sequential(models.conv3(), nn.BatchNorm3d(8), models.norm(), nn.ReLU(), nn.Dropout(0.5))
    )
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    kgopt.optimize(model, example_inputs=(models.input_for(model),))
    # input_for drew numbers after `state` was taken, so compare with a run of it alone.
    torch.set_rng_state(state)
    models.input_for(model)
    expected = torch.get_rng_state()
    torch.set_rng_state(state)
    kgopt.restore(model)
    kgopt.optimize(model, example_inputs=(models.input_for(model),))
    assert torch.equal(torch.get_rng_state(), expected)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("measure", [False, True])
def test_what_a_model_writes_to_its_example_inputs_is_put_back(measure, train, device):
    """An in-place activation comes first: each trial had a tensor that the one before had changed, and so had the user
    afterwards."""
    model = nn.Sequential(nn.ELU(0.5, inplace=True), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()).train(train)
    model = model.to(device)
    x, kept = (torch.linspace(-3, 2, 2 * 4 * 9 * 8, device=device).reshape(2, 4, 9, 8) for _ in range(2))
    kgopt.optimize(model, {"input": x}, measure=measure)
    assert torch.equal(x, kept)
    kgopt.optimize(model, x, measure=measure, cuda_graph=not train)
    assert torch.equal(x, kept)
    with torch.inference_mode():
        inside = kept.clone()
        kgopt.optimize(model, inside, measure=measure)
        assert torch.equal(inside, kept)
        later = nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()).to(device)
        kgopt.optimize(later, inside[:1].expand(2, -1, -1, -1), measure=measure)  # to which nobody can write
    with torch.no_grad():
        model(x)
    assert torch.equal(x, F.elu(kept, 0.5))


def test_report_is_a_table(capsys):
    model = models.randomized(models.MonaiResBlock())
    kgopt.optimize(model, measure=False, report=True)
    text = capsys.readouterr().out
    assert "norm1" in text
    assert "GroupNorm → relu" in text
    assert "2 of 2 sites run on kgopt, 2 of them fused" in text


def test_bad_arguments():
    with pytest.raises(TypeError, match="model is a int"):
        kgopt.optimize(3)
    with pytest.raises(ValueError, match="channels_last is 'yes'"):
        kgopt.optimize(nn.ReLU(), channels_last="yes")
