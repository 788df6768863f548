"""Convolutions and upsampling in training: which modules kgopt can run, and what comes out."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt.rewrite.gradients import training
from kgopt.rewrite.measure import clocks, measuring
from kgopt.rewrite.model import between, timed, whole
from kgopt.rewrite.optimized import classes, known


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(32, 32, 3, padding=1)
        self.norm = nn.GroupNorm(8, 32)
        self.up = nn.Upsample(scale_factor=2, mode="trilinear")
        self.conv2 = nn.Conv3d(32, 16, 1, bias=False)

    def forward(self, x):
        return self.conv2(self.up(torch.relu(self.norm(self.conv(x)))))


class AlwaysOurs(dict):
    """Verdicts, all of them for kgopt."""

    def get(self, key, default=None):
        return True


def made_ours(model):
    """The model, whose convolutions and upsampling always run on kgopt."""
    for module in model.modules():
        if training.runner_of(module) is not None or isinstance(module, nn.Upsample):
            module.__class__ = classes.make_class(type(module), (("training",),))
            known.put(module, training=training.TrainingState(ours=AlwaysOurs()))
    return model


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (nn.Conv3d(4, 4, 3), True),
        (nn.ConvTranspose2d(4, 4, 3), True),
        (nn.Conv2d(4, 4, 3, padding="same"), True),
        (nn.Conv2d(4, 4, 2, padding="same"), False),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), False),
        (nn.Conv1d(4, 4, 3), False),
        (nn.ReLU(), False),
    ],
    ids=str,
)
def test_what_kgopt_can_run(module, known):
    assert (training.runner_of(module) is not None) is known


def test_padding_by_name():
    x = torch.randn(2, 4, 9, 11, requires_grad=True)
    for conv in (nn.Conv2d(4, 6, (3, 5), padding="same", dilation=(2, 1)), nn.Conv2d(4, 6, 2, padding="valid")):
        ours, theirs = training.runner_of(conv)(conv, x), conv(x)
        torch.testing.assert_close(ours, theirs)
        wanted = x, conv.weight, conv.bias
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), wanted) for y in (ours, theirs)))


def test_a_model_that_gained_nothing_is_as_it_was():
    model = Model()
    before = [type(m) for m in model.modules()]
    training.find(model, lambda: model(torch.randn(1, 32, 4, 4, 4)), lambda name: "")
    assert [type(m) for m in model.modules()] == before
    assert not any(known.get(m, "training") for m in model.modules())


def test_who_calls_interpolate(monkeypatch):
    class Own(nn.Module):
        def forward(self, x):
            return nn.functional.interpolate(x, scale_factor=2)

    model = nn.Sequential(Own(), nn.Upsample(scale_factor=2), nn.ReLU())
    kept = []
    monkeypatch.setattr(training, "forget", lambda root, which: kept.extend(training.modules_of(root)))
    training.find(model, lambda: model(torch.randn(1, 2, 3, 4)), lambda name: "")
    assert kept == [model[0], model[1]]
    assert model(torch.randn(1, 2, 3, 4, requires_grad=True)).shape == (1, 2, 12, 16)


@pytest.mark.gpu
def test_measured_by_optimize(monkeypatch):
    # Of the whole model launches are most of the time, which other processes on the machine change.
    monkeypatch.setattr(
        whole.Whole, "seconds", lambda self, question, first, second: (first(), second(), (2.0, 1.0))[2]
    )
    torch.manual_seed(0)
    model = Model().cuda().train()
    x = torch.randn(1, 32, 64, 64, 64, device="cuda")
    original = copy.deepcopy(model)
    optimized = kgopt.optimize(model, example_inputs=x)
    assert optimized.state_dict().keys() == original.state_dict().keys()
    found = training.modules_of(optimized)
    assert found  # trilinear upsampling is several times faster
    for m in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        torch.testing.assert_close(m(x), original(x), rtol=2e-2, atol=2e-2)
    kgopt.restore(optimized)
    assert [type(m) for m in optimized.modules()] == [type(m) for m in original.modules()]


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("mode", ["fp32", "tf32", "autocast"])
def test_gradients(mode, channels_last, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", mode == "tf32")
    original = Model().cuda().train()
    model = made_ours(copy.deepcopy(original))
    x = torch.randn(1, 32, 8, 10, 12, device="cuda")
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
        for m in (model, original):
            m.to(memory_format=torch.channels_last_3d)

    def results(m, x):
        x = x.detach().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast" and x.dtype is not torch.float64):
            y = m(x)
        weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device="cuda").view(y.shape)
        (y.double() * weights).sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in m.parameters())]

    ran = results(model, x)
    theirs, exact = results(original, x), results(copy.deepcopy(original).double(), x.double())
    factor = {"fp32": 1e-5, "tf32": 4e-3, "autocast": 4e-2}[mode]
    for a, b, c in zip(ran, theirs, exact, strict=True):
        assert a.dtype is b.dtype
        error, allowed = (float((t.double() - c).norm()) for t in (a, b))
        assert error <= 2 * allowed + factor * float(c.norm()) + 1e-4


@pytest.mark.gpu
def test_inputs_that_were_not_measured():
    torch.manual_seed(0)
    model = nn.Conv2d(32, 32, 3, padding=1).cuda()
    module = made_ours(copy.deepcopy(model))
    known.put(module, training=training.TrainingState())
    x = torch.randn(1, 32, 9, 9, device="cuda")
    assert torch.equal(module(x), model(x))
    with torch.no_grad():
        assert torch.equal(module(x), model(x))
    assert known.get(module, "training").ours == {}


def accumulator(parameter):
    """The node that adds to a parameter's gradient; a new one where no graph holds the last one."""
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


def test_a_model_that_cannot_be_trained(monkeypatch):
    """A model in training mode whose forward writes to what its backward needs, and which runs without gradients: where
    whole models are timed, `optimize` raised its backward's error."""

    def times_the_model(self, layout):
        with self.trial(grad=True), timed.original_code(self.root):
            self.timed()
        return between.Choice([], "")

    monkeypatch.setattr(whole, "chooses", lambda device: True)
    monkeypatch.setattr(whole.Whole, "choose_between", times_the_model)
    monkeypatch.setattr(clocks, "busy", lambda function, device: (function(), 1.0)[1])
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.ReLU(inplace=True))
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        expected = model(x)
        kgopt.optimize(model, x)
        torch.testing.assert_close(model(x), expected)
    assert all(p.grad is None for p in model.parameters())


def test_measuring_leaves_no_graph_behind(monkeypatch):
    """Hooks that gave saved results back kept graphs alive for ever; CUDA graphs could not be captured after that."""
    monkeypatch.setattr(clocks, "busy_both", lambda first, second, device: (first(), second(), (1.0, 0.5))[2])
    conv, x = nn.Conv3d(2, 3, 3), torch.randn(1, 2, 4, 5, 6, requires_grad=True)

    def call(x):
        y = torch.relu(conv(x))
        accumulator(conv.weight).metadata["seen"] = True
        return y

    with measuring.own_saved_tensors():
        y = call(x)
        assert "seen" in accumulator(conv.weight).metadata
        del y
    assert "seen" not in accumulator(conv.weight).metadata

    def both(x):
        return training.Both((), call, call, lambda x, w, b: torch.relu(F.conv3d(x, w, b)), (conv.weight, conv.bias),
                             (conv.weight, conv.bias))  # fmt: skip

    assert training._gain(both(x), x) > 0
    assert "seen" not in accumulator(conv.weight).metadata


def test_a_model_that_waits_for_the_host_keeps_the_convolutions_that_gain_much(monkeypatch):
    """Where all of kgopt's convolutions cost the host more than they gain on the GPU, those that gain much may not."""

    def step(model):
        gains = [g for m in training.modules_of(model) for g in training.state_of(m).ours.values() if g > 0]
        return 1.0 + sum(0.3 - gain * 3e3 for gain in gains)

    def clock(first, second, device):
        times = []
        for run in (first, second):
            run()
            times.append(step(model))
        return times

    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1))
    for module, gain in zip(model, (1e-5, 2e-4, 2e-5), strict=True):
        ours = {training.key_of(torch.ones(1, 4, 2, 2)): gain}
        training._wrapped.add(module, functools.partial(training.TrainingState, ours=ours))
    decides = whole.Whole(model, torch.randn(1, 4, 2, 2), lambda name: "")
    decides._steps = False
    monkeypatch.setattr(clocks, "time_both", clock)
    monkeypatch.setattr(
        clocks,
        "busy",
        lambda run, device: (
            run(),
            0.5 - sum(map(sum, (training.state_of(m).ours.values() for m in training.modules_of(model)))),
        )[-1],
    )
    text = decides.choose_between("given").text
    assert text.startswith("kgopt's in a module, without conv small")
    assert training.modules_of(model) == [model[1]]


@pytest.mark.parametrize(
    ("clocked", "work", "taken"),
    [((1.0, 1.05), (0.6, 0.4), True), ((1.0, 0.95), (0.4, 0.6), False), ((1.0, 1.2), (0.6, 0.4), False)],
    ids=["less work", "more work", "the clock is clear"],
)
def test_where_the_clock_says_little_the_work_decides_what_stands_between(clocked, work, taken, monkeypatch):
    """nnU-Net's ResidualEncoderUNet waits for its launches: a clock of 5 % more left the GPU 48 ms, not 34."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1)).train()
    ours = {training.key_of(torch.ones(1, 4, 2, 2)): 1e-4}
    training._wrapped.add(model[0], functools.partial(training.TrainingState, ours=ours))
    decides = whole.Whole(model, torch.randn(1, 4, 2, 2), lambda name: "")
    decides._steps = False

    def busy(step, device):
        step()
        return work[training.state_of(model[0]).enabled]

    monkeypatch.setattr(clocks, "time_both", lambda first, second, device: clocked)
    monkeypatch.setattr(clocks, "busy", busy)
    assert decides.choose_between("given").text.startswith("kgopt's in a module" if taken else "left alone")
    assert bool(training.modules_of(model)) == taken


def test_a_verdict_is_looked_up_before_the_module_is_looked_at(monkeypatch):
    """Every call of a convolution in training comes here, also at sizes where PyTorch's code won."""
    asked = []
    monkeypatch.setattr(training, "_is_plain", lambda x: True)
    monkeypatch.setattr(training, "_fits", lambda *_: asked.append(True) or True)
    conv, x = nn.Conv2d(8, 8, 1), torch.randn(1, 8, 4, 4)
    key = training.key_of(x)
    for ours, runs_ours in ((0.0, False), (None, False), (1e-6, True)):
        state = training.TrainingState(ours={} if ours is None else {key: ours})
        y = training._run(state, lambda conv, x: None, conv, x)
        assert (y is not None) == runs_ours == bool(asked)
        if runs_ours:
            torch.testing.assert_close(y, F.conv2d(x, conv.weight, conv.bias))
