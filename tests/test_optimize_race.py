"""The last comparison of ``optimize`` with example inputs: a model that is slower than it came becomes what it was."""

from __future__ import annotations

import copy
import dataclasses
import time

import pytest
import torch
from torch import nn

import kgopt
import optimize_models as models
from kgopt.rewrite import glue
from kgopt.rewrite.glue import search
from kgopt.rewrite.measure import clocks, measuring
from kgopt.rewrite.model import layout, race, whole
from kgopt.rewrite.optimized.transaction import LOCK

TIME_BOTH = clocks.time_both


@pytest.fixture(autouse=True)
def sites_win(monkeypatch):
    """Each site is faster on kgopt, so that only the whole model decides."""
    monkeypatch.setattr(race, "SLACK", 1.01)
    monkeypatch.setattr(clocks, "time_both", lambda first, second, device: (2.0, 1.0))
    monkeypatch.setattr(clocks, "busy", lambda function, device: 1.0)
    monkeypatch.setattr(measuring, "_errors", lambda question: (0.0, 0.0))


@pytest.fixture
def clock(monkeypatch):
    """Sets what the whole model's clock says, and counts how often it is asked."""

    def says(before, after):
        asked = []

        def clock_both(first, second, device, ready=None):
            asked.append(device)
            for prepare, function in zip(ready, (first, second), strict=True):
                prepare()
                function()
            return before, after

        monkeypatch.setattr(clocks, "clock_both", clock_both)
        return asked

    return says


def made(model):
    """How many of its modules are kgopt's."""
    return sum(isinstance(m, kgopt.rewrite.optimized.disguise.Optimized) for m in model.modules())


def test_a_slower_model_becomes_what_it_was(device, clock):
    clock(1.0, 1.5)
    original = models.randomized(models.MonaiResBlock(), device).eval()
    model = copy.deepcopy(original)
    x = models.input_for(model, device)
    kgopt.optimize(model, x)
    assert made(model) == 0
    report = kgopt.report(model)
    assert [row.became for row in report.sites] == ["", ""]
    assert {row.reason for row in report.sites} == {"the whole model is slower"}
    assert report.clock == "left as it came: 1.5e+03 ms a call, 1e+03 ms as it came (measured)"
    assert report.clock in str(report)
    assert torch.equal(model(x), original(x))
    kgopt.optimize(model)
    assert made(model) == 0, "what lost is no new site"
    kgopt.restore(model)
    for a, b in zip(model.modules(), original.modules(), strict=True):
        assert a.__dict__.keys() == b.__dict__.keys()


@pytest.mark.parametrize("after", [0.5, 1.0, 1.005])
def test_one_that_is_not_slower_stays(after, device, clock):
    clock(1.0, after)
    model = models.randomized(models.MonaiResBlock(), device)
    kgopt.optimize(model, models.input_for(model, device))
    report = kgopt.report(model)
    assert made(model) > 0
    assert all(row.became for row in report.sites)
    assert report.clock.endswith("1e+03 ms as it came (measured)")
    assert not report.slower


@pytest.mark.parametrize(("lost", "norms_alone", "left"), [(1.02, 1.0, True), (1.02, 1.02, False), (1.2, 1.0, False)])
def test_a_model_that_lost_by_little_loses_what_stands_between_its_norms(lost, norms_alone, left, monkeypatch):
    """One that lost by 3 % became what it was, with norms that gained 20."""
    monkeypatch.setattr(whole, "chooses", lambda device: True)
    monkeypatch.setattr(clocks, "busy_both", lambda first, second, device: (2.0, 1.0))
    monkeypatch.setattr(search, "SMALL", 1)
    seen = []

    def clock_both(first, second, device, ready):
        ready[1]()
        seen.append(len(glue.modules_of(model)))
        return 1.0, norms_alone if len(seen) > 1 else lost

    monkeypatch.setattr(clocks, "clock_both", clock_both)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Upsample(scale_factor=2)).eval()
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        expected = model(x)
        kgopt.optimize(model, x)
        torch.testing.assert_close(model(x), expected)
    assert seen[0]
    assert seen[1:] == ([0] if lost < 1.1 else [])
    assert not glue.modules_of(model)
    report = kgopt.report(model)
    assert (made(model) > 0) is left is not report.slower
    if left:
        assert report.glue == "left alone: the whole model is slower with it: 1.02e+03 ms a call"
        assert report.clock == "1e+03 ms a call, 1e+03 ms as it came (measured)"


def test_other_inputs_are_another_question(device, clock):
    """A model that lost on a small input gets another chance on a large one."""
    clock(1.0, 1.5)
    model = models.randomized(models.MonaiResBlock(), device)
    x = models.input_for(model, device)
    kgopt.optimize(model, x)
    assert made(model) == 0
    clock(1.0, 0.5)
    kgopt.optimize(model, torch.cat([x, x]))
    assert made(model) > 0
    assert all(row.became for row in kgopt.report(model).sites)


def test_an_equal_model_is_not_measured_again(device, clock):
    asked = clock(1.0, 1.5)
    pair = [models.randomized(models.MonaiResBlock(), device) for _ in range(2)]
    for model in pair:
        kgopt.optimize(model, models.input_for(model, device))
        assert made(model) == 0
    assert len(asked) == 1
    assert "(known)" in kgopt.report(pair[1]).clock


@pytest.mark.parametrize("options", [{"measure": False}, {"channels_last": True}], ids=["measure", "channels_last"])
def test_who_asks_for_something_gets_it(options, device, clock):
    asked = clock(1.0, 1.5)
    model = models.randomized(models.MonaiResBlock(), device)
    kgopt.optimize(model, models.input_for(model, device), **options)
    assert not asked
    assert made(model) > 0


@pytest.mark.parametrize("last", [0, 1])
def test_both_forms_run_in_turn(last, device, monkeypatch):
    """The original has its classes and its layout, the other one those that were decided.

    Where the last row was the optimized model's, the root lost the class that converts what the model is given, and
    gives: one such network took 3.8 ms instead of 3.1, and its results were channels_last.
    """
    seen = []
    model = models.randomized(models.MonaiResBlock(), device)
    x = models.input_for(model, device)

    def look(first, second, device, ready):
        for at in (0, 1, 0, 1):
            ready[at]()
            (first, second)[at]()
            weight = model.conv1.weight
            dense = weight.is_contiguous(memory_format=torch.channels_last_3d)
            seen.append((at, made(model) > 0, layout.is_on(model), dense))
        ready[last]()
        return 1.0, 0.5

    monkeypatch.setattr(clocks, "clock_both", look)
    monkeypatch.setattr(whole, "chooses", lambda device: True)
    monkeypatch.setattr(whole.Whole, "layout_seconds", lambda self, layout: 1.0 if "given" in layout else 0.5)
    monkeypatch.setattr(whole.Whole, "find_between", lambda self: None)
    kgopt.optimize(model, x)
    assert seen == [(0, False, False, False), (1, True, True, True)] * 2
    assert made(model) > 0
    assert layout.is_on(model)
    assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last_3d)
    given = []
    handle = model.conv1.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    y = model(x)
    handle.remove()
    assert given[0].is_contiguous(memory_format=torch.channels_last_3d)
    assert y.is_contiguous()


@pytest.mark.parametrize(
    ("clocked", "work", "taken"),
    [((1.0, 1.05), (0.6, 0.4), True), ((1.0, 0.95), (0.4, 0.6), False), ((1.0, 1.2), (0.6, 0.4), False)],
    ids=["less work", "more work", "the clock is clear"],
)
def test_where_the_clock_says_little_the_work_decides_the_layout(clocked, work, taken, device, clock, monkeypatch):
    """A step that waits for its launches takes as long in either layout."""
    clock(1.0, 0.5)
    monkeypatch.setattr(whole, "chooses", lambda device: True)
    monkeypatch.setattr(whole.Whole, "layout_seconds", lambda self, layout: clocked["given" not in layout])
    monkeypatch.setattr(whole.Whole, "find_between", lambda self: None)
    model = models.randomized(models.MonaiResBlock(), device).train()

    def busy(step, device):
        step()
        return work[layout.is_on(model)]

    monkeypatch.setattr(clocks, "busy", busy)
    kgopt.optimize(model, models.input_for(model, device))
    assert layout.is_on(model) == taken
    text = kgopt.report(model).layout
    assert text.startswith("channels_last" if taken else "as it was")
    assert ("ms of the GPU's work" in text) == (max(clocked) < 1.1)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("last", "inside", "between", "form"),
    [
        (101, 0, 101, layout.LAST),
        (120, 101, 101, layout.INSIDE),
        (120, 120, 101, layout.GIVEN),
        (101, 0, 120, layout.LAST),
    ],
    ids=["no more", "a copy of what comes in is too much", "channels_last takes more", "between takes more"],
)
def test_a_form_that_takes_more_memory_is_not_taken(last, inside, between, form, train, device, clock, monkeypatch):
    """Faster, with a copy of x in channels_last that lives as long as the step: 514 MiB of 2.4 GiB more than eager."""
    clock(1.0, 0.5)
    monkeypatch.setattr(whole, "chooses", lambda device: True)
    monkeypatch.setattr(whole.Whole, "layout_seconds", lambda self, layout: 1.0 if "given" in layout else 0.5)
    monkeypatch.setattr(whole.Whole, "find_between", lambda self: None)
    held = whole.Whole.held
    monkeypatch.setattr(whole.Whole, "held", lambda self, *args: dataclasses.replace(held(self, *args), between=[()]))
    monkeypatch.setattr(
        whole.Whole, "take", lambda self, form: layout.set_layout(self.root, "last" in form.layout, moves=True)
    )
    model = models.randomized(models.MonaiResBlock(), device).train(train)
    asked = []

    def peak(self, question):
        asked.append(question)
        if question == "as it came":
            return 2**30 * 100
        if "between" in question:
            assert question.startswith(form)
            return 2**30 * between
        assert layout.form_of(model) == question.split(", ")[0]
        return 2**30 * (last if question == layout.LAST else inside)

    monkeypatch.setattr(whole.Whole, "peak", peak)
    x = models.input_for(model, device)
    kgopt.optimize(model, x)
    found = kgopt.report(model)
    assert layout.form_of(model) == form
    assert made(model) > 0
    assert asked[:2] == ["as it came", layout.LAST]
    assert (layout.INSIDE in asked) == (form != layout.LAST)
    assert ("call takes 122880 MiB, as it came 102400" in found.layout) == (last == 120)
    assert found.layout.startswith("as it was" if form == layout.GIVEN else form)
    assert ("left alone: with it a call takes 122880 MiB" in found.glue) == (between == 120)
    assert model(x).is_contiguous(), "as the caller's tensors are"


@pytest.mark.parametrize("writes", [False, True])
def test_what_comes_in_may_stay_as_it_is(writes, device):
    """From the first convolution on everything is in channels_last; the model's writes reach the caller's tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(writes), nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)).to(device).eval()
    expected, x = copy.deepcopy(model), torch.randn(2, 3, 9, 7, device=device)
    assert not layout.set_layout(model, True, moves=False)
    seen = []
    model[1].register_forward_hook(lambda _, args, y: seen.append((args[0].stride(), y.stride())))
    given = x.clone()
    with torch.no_grad():
        y, right = model(given), expected(x)
    torch.testing.assert_close(y, right)
    torch.testing.assert_close(given, x, rtol=0, atol=0)
    assert y.is_contiguous()
    assert seen == [(x.stride(), torch.empty(2, 8, 7, 5).to(memory_format=torch.channels_last).stride())]
    assert layout.form_of(copy.deepcopy(model)) == layout.INSIDE
    layout.set_layout(model, True)
    assert layout.form_of(model) == layout.INSIDE, "it stays what it was"
    layout.set_layout(model, False)
    layout.set_layout(model, True)
    assert layout.form_of(model) == layout.LAST


@pytest.mark.gpu
def test_memory_of_a_call():
    x = torch.ones(2**20, device="cuda")
    assert clocks.peak_bytes(lambda: [x + 1, x + 2], x.device) == 2 * x.nbytes
    assert clocks.peak_bytes(lambda: x.add_(1), x.device) == 0
    assert clocks.peak_bytes(lambda: None, torch.device("cpu")) == 0


class Wide(nn.Module):
    """In training, a copy of x in channels_last lives as long as the step; no norm saves what it costs."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv3d(64, 64, 3, stride=2, padding=1), nn.Upsample(scale_factor=2, mode="trilinear")
        self.norm, self.narrow = nn.GroupNorm(8, 8), nn.Conv3d(128, 8, 1)

    def forward(self, x):
        return self.norm(self.narrow(torch.cat((x, self.up(self.down(x))), 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("train", [False, True])
def test_memory_is_never_above_eagers(dtype, train, monkeypatch):
    monkeypatch.undo()
    model, x = Wide().cuda().train(train), torch.randn(2, 64, 56, 48, 40, device="cuda")

    def step():
        with torch.set_grad_enabled(train), torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
            y = model(x)
        if train:
            torch.autograd.grad(y.sum(), list(model.parameters()))

    before = clocks.peak_bytes(step, x.device)
    with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
        kgopt.optimize(model, x, cuda_graph=False)
    step()
    assert clocks.peak_bytes(step, x.device) <= 1.02 * before + 2**21, kgopt.report(model)


def test_lost_in_channels_last_is_back_in_its_layout(device, clock, monkeypatch):
    clock(1.0, 1.5)
    monkeypatch.setattr(whole, "chooses", lambda device: True)
    monkeypatch.setattr(whole.Whole, "layout_seconds", lambda self, layout: 1.0 if "given" in layout else 0.5)
    monkeypatch.setattr(whole.Whole, "find_between", lambda self: None)
    model = models.randomized(models.MonaiResBlock(), device)
    strides = [p.stride() for p in model.parameters()]
    kgopt.optimize(model, models.input_for(model, device))
    assert not layout.is_on(model)
    assert [p.stride() for p in model.parameters()] == strides
    assert kgopt.report(model).layout == ""


def test_training_is_timed_with_its_backward_and_leaves_no_trace(device, clock):
    clock(1.0, 1.5)
    model = models.randomized(nn.Sequential(models.MonaiResBlock(), nn.BatchNorm3d(8), nn.Dropout(0.5)), device).train()
    before = copy.deepcopy(model.state_dict())
    x = models.input_for(model, device)
    random = torch.get_rng_state()
    kgopt.optimize(model, x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_a_clock_that_fails_leaves_the_model_as_it_was(device, monkeypatch):
    def fails(first, second, device, ready):
        ready[0]()
        raise RuntimeError("no clock")

    monkeypatch.setattr(clocks, "clock_both", fails)
    original = models.randomized(models.MonaiResBlock(), device)
    model = copy.deepcopy(original)
    with pytest.raises(RuntimeError, match="no clock"):
        kgopt.optimize(model, models.input_for(model, device))
    for a, b in zip(model.modules(), original.modules(), strict=True):
        assert type(a) is type(b)
        assert a.__dict__.keys() == b.__dict__.keys()
    assert LOCK.acquire(blocking=False)
    LOCK.release()


def test_the_clock_is_a_clock():
    """Functions that wait on the host: 1 ms and 3; what is done before a row, and the call after it, do not count."""
    done = []

    def waits(seconds, name):
        def wait():
            done.append(name)
            time.sleep(seconds)

        return wait

    ready = waits(0.005, "A"), waits(0.005, "B")
    before, after = clocks.clock_both(waits(0.001, "a"), waits(0.003, "b"), torch.device("cpu"), ready)
    assert 0.001 <= before < 0.0025
    assert 0.003 <= after < 0.0045
    assert done[:3] == ["A", "a", "a"]
    rows = "".join(done).replace("A", " A").replace("B", " B").split()
    assert {row[0] + row[1] for row in rows} == {"Aa", "Bb"}
    assert [row[0] for row in rows] == ["A", "B"] * (len(rows) // 2)


@pytest.mark.parametrize(
    ("seconds", "calls"),
    [((0.03, 0.02), 4), ((0.022, 0.0215), 5), ((0.022, 0.022), 8), ((0.01, 0.015), 9), ((0.015, 0.015), 12)],
)
def test_a_difference_that_is_clear_ends_the_timing(seconds, calls, monkeypatch):
    """Training of a large model was called 54 times for each question: half a minute."""
    monkeypatch.setattr(clocks, "_cuda_seconds", lambda function, device: function())
    done = [0, 0]

    def called(at):
        done[at] += 1
        return seconds[at]

    assert TIME_BOTH(lambda: called(0), lambda: called(1), torch.device("cuda")) == seconds
    assert done == [calls, calls]


def test_one_function_is_timed_once(monkeypatch):
    """The clock of a layout was that of one form against itself."""
    monkeypatch.setattr(clocks, "_cuda_seconds", lambda function, device: function())
    done = []
    function = lambda: done.append(1) or 0.01  # noqa: E731
    assert TIME_BOTH(function, function, torch.device("cuda")) == (0.01, 0.01)
    assert len(done) == 2 + 7
