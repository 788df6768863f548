"""cuda_graph= of kgopt.optimize: which calls are replayed. A fake of the GPU's part replays by calling."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

import kgopt
from fake_replays import Net, faked, net, replays, warmed, x_of
from kgopt.rewrite.measure import clocks
from kgopt.rewrite.model import race, whole


@pytest.fixture
def fake(monkeypatch):
    return faked(monkeypatch)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


# ------------------------------------------------------------------------------------------------- without a GPU


@pytest.mark.parametrize("value", ["on", 1, None, 0.5])
def test_wrong_values(value):
    with pytest.raises(ValueError, match=r"cuda_graph is .*, expected True, False or 'auto'"):
        kgopt.optimize(Net(), cuda_graph=value)


@pytest.mark.parametrize("mode", [True, "auto"])
def test_on_the_cpu(mode):
    model = Net().eval()
    expected = model(x_of())
    kgopt.optimize(model, x_of(), cuda_graph=mode, measure=False)
    torch.testing.assert_close(model(x_of()), expected)
    assert ("CUDA graphs: none: an argument is a tensor on cpu" in str(kgopt.report(model))) == (mode is True)
    kgopt.restore(model)
    assert type(model) is Net
    assert "_kgopt" not in vars(model)


def test_nobody_asked():
    model = kgopt.optimize(Net(), measure=False)
    assert kgopt.report(model).graph == ""
    assert "CUDA graphs" not in str(kgopt.report(model))


# ------------------------------------------------------------------------------------------------------ which calls


def test_kinds_of_calls(fake):
    model = net()
    warmed(fake, model, x_of())
    assert replays(fake, model, x_of(1))
    assert not replays(fake, model, x_of(n=3))  # another shape
    assert not replays(fake, model, x_of().contiguous(memory_format=torch.channels_last))
    assert not replays(fake, model, x_of(), flag=False)
    assert not replays(fake, model, x_of(), True)  # as another argument
    assert not replays(fake, model, x_of(), 1)  # which equals True
    assert replays(fake, model, x_of(2))
    model(x_of(n=3))
    assert replays(fake, model, x_of(n=3))
    assert fake.recorded == 2


def test_results_are_the_callers(fake):
    model = net()
    warmed(fake, model, x_of())
    first = model(x_of(1))
    kept = first.clone()
    model(x_of(2)).zero_()
    assert torch.equal(first, kept)
    assert replays(fake, model, x_of(1))


def test_example_inputs_record_at_once(fake, monkeypatch):
    model = net(example_inputs=x_of())
    assert fake.recorded == 1
    assert replays(fake, model, x_of(1))
    assert kgopt.report(model).graph == (
        "(2x4x6x5) float32: 1000000 us a call, 2000000 us without; 1.0 MiB of memory held"
    )


@pytest.fixture
def auto(fake, monkeypatch):
    """Optimizes with all the defaults, as on a GPU."""
    monkeypatch.setattr(clocks, "time_both", lambda *_: (2.0, 1.0))
    monkeypatch.setattr(clocks, "busy", lambda *_: 1.0)
    monkeypatch.setattr(race, "SLACK", math.inf)
    kgopt.forget()

    def optimize(model=None, x=None, **options):
        return kgopt.optimize((Net() if model is None else model).eval(), x_of() if x is None else x, **options)

    yield optimize
    kgopt.forget()


def test_auto_takes_what_is_faster(fake, auto):
    fake.times = (1.0, 0.98)
    model = auto()
    assert not replays(fake, model, x_of())
    assert "it is not faster: 980000 us with it, 1000000 us without" in kgopt.report(model).graph
    assert model._kgopt.graphs is None, "nothing is left of it"
    kgopt.forget()
    fake.times = (1.0, 0.9)
    assert replays(fake, auto(), x_of())


def test_auto_records_other_shapes_but_not_other_numbers(fake, auto):
    model = auto()
    for _ in range(3):
        model(x_of(n=3))
    assert fake.recorded == 2
    assert replays(fake, model, x_of(n=3))
    for _ in range(3):
        model(x_of(), flag=False)
    assert fake.recorded == 2
    copied = copy.deepcopy(model)
    for _ in range(2):
        copied(x_of(), flag=False)
    assert fake.recorded == 3, "a copy takes what comes first"


def test_auto_asks_once_for_equal_models(fake, auto, monkeypatch):
    model = auto()
    assert fake.recorded == 1
    monkeypatch.setattr(fake, "seconds", None)
    assert replays(fake, auto(copy.deepcopy(kgopt.restore(model))), x_of())
    kgopt.forget()
    monkeypatch.setattr(fake, "busy", True)
    model = auto(kgopt.restore(model))
    assert "its launches are over long before its work is" in kgopt.report(model).graph
    recorded = fake.recorded
    assert "of an equal model" in kgopt.report(auto(kgopt.restore(model))).graph
    assert fake.recorded == recorded


@pytest.mark.parametrize("options", [{"cuda_graph": False}, {"measure": False}])
def test_auto_needs_measurements(fake, auto, options):
    auto(**options)
    assert fake.recorded == 0


def test_auto_needs_examples_and_inference(fake, auto):
    kgopt.optimize(Net().eval())
    kgopt.optimize(Net().train(), x_of())
    assert fake.recorded == 0


def test_decisions_about_a_model_that_is_replayed_leave_launches_out(fake, auto, monkeypatch):
    """A decoder whose plain calls waited for the host kept PyTorch's passes between its norms, which replays are slower
    with.
    """
    monkeypatch.setattr(whole, "chooses", lambda device: True)
    # The CPU's clock may find both layouts equal; a torch without CUDA has no other one to ask.
    monkeypatch.setattr(clocks, "busy", lambda function, device: 1.0)
    model = auto()
    assert fake.recorded == 4, "to see whether it can be, for two questions about layouts, itself"
    assert fake.asked == 1, "the recording takes the first answer"
    assert replays(fake, model, x_of())
    kgopt.forget()
    fake.recorded = fake.asked = 0
    monkeypatch.setattr(fake, "busy", True)
    model = auto()
    assert (fake.recorded, fake.asked) == (0, 1)
    assert "its launches are over long before its work is" in kgopt.report(model).graph


def test_a_replay_is_what_the_clock_compares(fake, auto, monkeypatch):
    """The comparison of both forms moved the weights of a model that had been recorded: it was recorded again at the
    user's calls, and that was what the clock saw.
    """
    monkeypatch.setattr(race, "SLACK", 1.0)

    def clock(whole):
        forms = race._Forms(whole.root)
        forms.came()
        forms.made()
        return [1.0, 2.0]

    monkeypatch.setattr(race, "_clock", clock)
    model = auto(channels_last="auto")
    assert fake.recorded == 1
    assert not kgopt.report(model).slower
    assert "1e+03 ms a call, 1e+03 ms as it came (replayed, measured)" in kgopt.report(model).clock
    assert replays(fake, model, x_of())
    assert fake.recorded == 1


def test_a_model_that_is_slower_replayed_becomes_what_it_was(fake, auto, monkeypatch):
    monkeypatch.setattr(race, "SLACK", 1.0)
    monkeypatch.setattr(race, "_clock", lambda w: [1.0, 2.0])
    fake.times = (4.0, 2.0)
    model = auto()
    assert fake.recorded == 1
    assert kgopt.report(model).slower
    assert type(model) is Net


@dataclasses.dataclass
class Result:
    first: torch.Tensor
    others: list


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, inputs, *, more=None, kind="tuple"):
        y = self.norm(inputs["x"]) + (0 if more is None else more[0][1])
        if kind == "dataclass":
            return Result(y, [y + 1, None])
        pairs = {"same": (y, y), "pair": (y, y + 1), "list": [y, y + 1]}
        return {"tuple": (y, [y + 1], 3), "dict": {"a": y, "b": (y + 1, None)}, **pairs}[kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "same", "pair", "list"])
def test_containers(fake, kind):
    model = kgopt.optimize(Nested().eval(), cuda_graph=True, measure=False)
    original = copy.deepcopy(kgopt.restore(copy.deepcopy(model)))

    def arguments(seed):
        return ({"x": x_of(seed)},), {"more": [(None, x_of(seed + 1))], "kind": kind}

    for seed in range(4):
        args, kwargs = arguments(seed)
        y, expected = model(*args, **kwargs), original(*args, **kwargs)
        assert type(y) is type(expected)
        if kind == "dataclass":
            y, expected = (y.first, y.others), (expected.first, expected.others)
        torch.testing.assert_close(y, expected)
        assert kind != "same" or y[0] is y[1]
    assert fake.replayed == 4  # a check, the clock, and two calls


def test_arguments_that_cannot_be_compared(fake):
    class Thing:
        pass

    class Takes(Net):
        def forward(self, x, thing):
            return super().forward(x)

    model = kgopt.optimize(Takes().eval(), cuda_graph=True, measure=False)
    for _ in range(3):
        model(x_of(), Thing())
    assert fake.recorded == 0
    assert "an argument is a Thing, whose value cannot be compared" in kgopt.report(model).graph
