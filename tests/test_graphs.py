"""cuda_graph= of kgopt.optimize: which calls are replayed. A fake of the GPU's part replays by calling."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import pickle
import random
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt.rewrite.cuda_graphs import calls as graph_calls
from kgopt.rewrite.cuda_graphs import effects, keys, machine
from kgopt.rewrite.cuda_graphs.stamp import Stamp
from kgopt.rewrite.measure import clocks
from kgopt.rewrite.model import race, whole


class FakeLane:
    """Replays what was recorded by calling it again, without the model's forward being asked for."""

    held = 2**20

    def __init__(self, machine):
        self.machine = machine

    @contextlib.contextmanager
    def aside(self):
        yield

    @contextlib.contextmanager
    def turn(self):
        yield

    def settle(self):
        self.machine.settled += 1

    def record(self, call, room=0):
        if self.machine.fails:
            raise RuntimeError(self.machine.fails)
        with torch.no_grad():
            result = call()
        self.machine.recorded += 1
        static = keys.leaves(result)

        def replay():
            self.machine.replayed += 1
            if self.machine.replay_fails:
                raise RuntimeError(self.machine.replay_fails)
            if self.machine.wrong:
                for own in static:
                    own.fill_(math.nan)
                return
            with torch.no_grad():
                again = call()
            for own, new in zip(static, keys.leaves(again), strict=True):
                if own is not new:
                    own.copy_(new)

        return replay, result


class Fake:
    def __init__(self):
        self.recorded = self.replayed = self.settled = self.asked = self.reclaimed = 0
        self.fails = self.replay_fails = ""
        self.wrong = False  # what replays give from now on
        self.times = (2.0, 1.0)
        self.recording = self.busy = False

    def takes(self, t):
        return t.device.type == "cpu" and t.dtype is not torch.float16  # half tensors stand for those elsewhere

    def place(self, t):
        return 0  # of a test's tensors some would lie where others lay, by chance

    def is_recording(self):
        return self.recording

    def seconds(self, first, second, device):
        first(), second()
        return self.times

    def memory(self, device):
        return 2**35

    def peak(self, call, device):
        call()
        return 2**27

    def reclaim(self):
        self.reclaimed += 1

    def is_busy(self, call, device, long=0.03, launches=0.5):
        self.asked += 1
        call()
        return self.busy

    def lane(self, device):
        return FakeLane(self)


@pytest.fixture
def fake(monkeypatch):
    found = Fake()
    monkeypatch.setattr(machine, "MACHINE", found)
    return found


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()
        self.scale, self.options = 1.0, {"shift": [0.0]}
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, x, flag=True):
        h = self.act(self.norm(self.conv(x)))
        return h * self.scale + self.offset + self.options["shift"][0] if flag else h - 1


def net(**options):
    model = Net().eval()
    options = {"cuda_graph": True, "measure": False, **options}
    return kgopt.optimize(model, **options)


def x_of(seed=0, n=2):
    return torch.randn(n, 4, 6, 5, generator=torch.Generator().manual_seed(seed))


def replays(fake, model, *args, **kwargs):
    """Whether a call's result is a replay's; it is checked against the plain path."""
    before, settled = fake.replayed, fake.settled
    y = model(*args, **kwargs)
    replayed = fake.replayed > before and fake.settled == settled  # a replay that is dropped takes all others along
    twin = copy.deepcopy(model)
    kgopt.restore(twin)
    torch.testing.assert_close(y, twin(*args, **kwargs), rtol=1e-4, atol=1e-4)
    return replayed


def warmed(fake, model, *args, **kwargs):
    """The second call records, so the third one replays."""
    with torch.no_grad():
        model(*args, **kwargs)
        assert fake.recorded == 0
        model(*args, **kwargs)
        assert fake.recorded == 1
        assert replays(fake, model, *args, **kwargs)


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


# ----------------------------------------------------------------------------------------------------- invalidation


def in_place(model):
    model.conv.weight.mul_(2)
    model.offset.add_(3)


def data_of_a_parameter(model):
    model.conv.weight.data = model.conv.weight.data * 2


def another_parameter(model):
    model.norm.weight = nn.Parameter(model.norm.weight * 2)


def a_strided_parameter(model):
    model.conv.weight.data = model.conv.weight.data.transpose(2, 3)


def assigned(model):
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)


def to_double_and_back(model):
    model.double().float()


def a_submodule(model):
    model.act = nn.ReLU()


def an_attribute(model):
    model.scale = 2.0


def inside_an_attribute(model):
    model.options["shift"][0] = 5.0


def an_attribute_of_a_submodule(model):
    model.norm.eps = 0.5


CHANGES = [
    data_of_a_parameter,
    another_parameter,
    a_strided_parameter,
    assigned,
    to_double_and_back,
    a_submodule,
    an_attribute,
    inside_an_attribute,
    an_attribute_of_a_submodule,
]


def test_weights_are_followed(fake):
    model = net()
    warmed(fake, model, x_of())
    in_place(model)
    assert replays(fake, model, x_of())
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    assert replays(fake, model, x_of())


@pytest.mark.parametrize("change", CHANGES)
def test_changes_drop_recordings(fake, change):
    model = net()
    warmed(fake, model, x_of())
    change(model)
    assert not replays(fake, model, x_of())
    assert fake.settled == 1
    replays(fake, model, x_of())
    assert replays(fake, model, x_of())  # recorded anew
    assert fake.recorded == 2


class Scaled(Net):
    gain = 1.0

    def forward(self, x):
        return super().forward(x) * self.gain


def a_hook_inside(model):
    model.conv.register_forward_hook(lambda module, args, y: y * 2)


def an_attribute_of_the_class(model):
    Scaled.gain = 2.0


def an_attribute_of_the_class_that_equals(model):
    Scaled.gain = True


def a_new_attribute_of_a_class(model):
    Net.forward_pre_hook = None


def code_of_torch(model):
    nn.SiLU.forward = lambda self, x: x * 3


def the_class_of_a_submodule(model):
    model.act.__class__ = nn.ReLU


def the_attribute_and_its_shadow(model):
    model.gain = 3.0


# Of these no replay is launched: it might read what is freed, or somebody looks on.
UNLAUNCHED = [data_of_a_parameter, to_double_and_back, a_hook_inside]


@pytest.fixture
def classes_as_they_were(monkeypatch):
    monkeypatch.setattr(Scaled, "gain", 1.0)
    monkeypatch.setattr(nn.SiLU, "forward", nn.SiLU.forward)
    yield
    if "forward_pre_hook" in vars(Net):
        del Net.forward_pre_hook


@pytest.mark.parametrize(
    "change",
    [
        *CHANGES,
        a_hook_inside,
        an_attribute_of_the_class,
        an_attribute_of_the_class_that_equals,
        a_new_attribute_of_a_class,
        code_of_torch,
        the_class_of_a_submodule,
        the_attribute_and_its_shadow,
    ],
)
def test_the_first_call_after_a_change_is_a_plain_one(fake, change, classes_as_they_were):
    """A replay is launched before all is compared: that of a model that changed is not what the caller gets."""
    model = kgopt.optimize(Scaled().eval(), cuda_graph=True, measure=False)
    warmed(fake, model, x_of())
    fake.wrong = True
    assert model(x_of(1)).isnan().all(), "what a replay gives is the result"
    kept = [p.data for p in model.parameters()]  # their addresses are not taken again
    launched = fake.replayed
    change(model)
    y = model(x_of(1))
    del kept
    assert fake.replayed == launched + (change not in UNLAUNCHED)
    twin = kgopt.restore(copy.deepcopy(model))
    torch.testing.assert_close(y, twin(x_of(1)), rtol=1e-4, atol=1e-4)
    assert model._kgopt.graphs.lock.acquire(blocking=False)


def test_a_smaller_parameter_at_the_same_address_is_not_read(fake):
    model = net()
    warmed(fake, model, x_of())
    stamp, weight = model._kgopt.graphs.stamp, model.conv.weight
    assert stamp.may_launch(model)
    weight.data = weight.data.view(-1)[:3]
    assert weight.data_ptr() in stamp.places[0]
    assert not stamp.may_launch(model)


def test_errors_of_a_replay(fake):
    """They are the caller's where the model is as it was; else the plain path gives the result."""
    model = net()
    warmed(fake, model, x_of())
    fake.replay_fails = "out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        model(x_of())
    fake.replay_fails = ""
    assert replays(fake, model, x_of())
    fake.replay_fails = "of shapes that are gone"
    model.scale = 2.0
    assert not replays(fake, model, x_of())


def test_an_interruption_while_the_model_is_compared(fake, monkeypatch):
    model = net()
    warmed(fake, model, x_of())

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Stamp, "holds_beside_places", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x_of())
    assert replays(fake, model, x_of())


class Reading(Net):
    """With something that a replay may be harmful for, if the model is another one by now."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.register_buffer("places", torch.arange(6))

    def forward(self, x, places=None):
        y = super().forward(x)
        return {
            "places": lambda: y[:, self.places],
            "argument": lambda: y,
            "checks": lambda: F.binary_cross_entropy(y.sigmoid(), y.sigmoid()) + y,
            "numbers": lambda: y + self.places[:, None].float() * 2,
            "norm": lambda: y,
        }[self.what]()


@pytest.mark.parametrize("what", ["places", "argument", "checks", "numbers", "norm"])
def test_where_a_replay_may_do_harm_all_is_compared_first(fake, what):
    """A table that is longer now would have been read behind its old end, which ends a process on a GPU."""
    model = kgopt.optimize(Reading(what).eval(), cuda_graph=True, measure=False)
    args = (x_of(), torch.zeros(1, dtype=torch.int64)) if what == "argument" else (x_of(),)
    warmed(fake, model, *args)
    assert replays(fake, model, *args)
    launched = fake.replayed
    model.scale = 2.0
    assert not replays(fake, model, *args)
    assert fake.replayed == launched + (what in ("numbers", "norm"))


def test_ops_that_may_do_harm():
    x = torch.ones(2)
    assert effects._is_harmless(torch.ops.aten.add.Tensor, (x, x.long()), None)
    assert not effects._is_harmless(torch.ops.aten.gather.default, (x, 0, x.long()), None)
    assert not effects._is_harmless(torch.ops.aten._assert_async.default, (x,), None)
    assert not effects._is_harmless(torch.ops.prims.sin.default, (x,), None), "nor those of others, as collectives"


class Passing(nn.Module):
    """Gives an argument back beside its result."""

    def __init__(self):
        super().__init__()
        self.norm, self.swaps = nn.GroupNorm(2, 4), False

    def forward(self, x):
        y = self.norm(x)
        return (x, y) if self.swaps else (y, x)


def test_a_dropped_result_that_is_an_argument(fake):
    model = kgopt.optimize(Passing().eval(), cuda_graph=True, measure=False)
    for _ in range(3):
        y, same = model(x := x_of())
        assert same is x
    model.swaps = True
    same, again = model(x := x_of())
    assert same is x
    torch.testing.assert_close((x, again), (x_of(), y))


def test_hooks_inside_and_on_the_root(fake):
    model, seen = net(), []
    warmed(fake, model, x_of())
    handle = model.register_forward_hook(lambda *_: seen.append("root"))
    assert replays(fake, model, x_of())
    assert seen
    handle.remove()
    seen.clear()
    handle = model.conv.register_forward_hook(lambda *_: seen.append("conv"))
    for _ in range(3):
        before = fake.replayed
        model(x_of())
        assert fake.replayed == before
    assert seen == ["conv"] * 3 + seen[3:]
    handle.remove()
    model(x_of())
    model(x_of())
    assert replays(fake, model, x_of())


def test_modes(fake):
    model = net()
    warmed(fake, model, x_of())
    model.train()
    assert not replays(fake, model, x_of())
    model.eval()
    model(x_of())
    model(x_of())
    assert replays(fake, model, x_of())
    with torch.enable_grad():
        y = model(x_of())
        assert y.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        before = fake.replayed
        assert model(x_of()).dtype is not None
        assert fake.replayed == before
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if precision == "highest" else "highest")
        assert not replays(fake, model, x_of())
    finally:
        torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = True
    assert not replays(fake, model, x_of())
    torch.backends.cudnn.allow_tf32 = False
    assert replays(fake, model, x_of())
    fake.recording = True
    assert not replays(fake, model, x_of())
    fake.recording = False
    with torch.inference_mode():
        before = fake.replayed
        assert model(x_of()).is_inference()
        assert fake.replayed == before + 1


def test_with_gradients_on_where_nothing_records(fake):
    model = net().requires_grad_(False)
    with torch.enable_grad():
        for _ in range(3):
            y = model(x_of())
        assert fake.replayed == 3
        assert not y.requires_grad
        model.norm.weight.requires_grad_(True)
        assert model(x_of()).requires_grad
        assert fake.replayed == 3
        model.norm.weight.requires_grad_(False)
        assert model(x_of().requires_grad_()).requires_grad


def test_a_model_that_always_changes(fake):
    model = net()
    for i in range(4 * graph_calls.RENEWALS):
        model(x_of())
        model.scale = float(i) + 0.5 if i % 2 else model.scale
    recorded = fake.recorded
    for i in range(10):
        model.scale = float(i) + 0.25
        model(x_of())
        model(x_of())
    assert fake.recorded <= graph_calls.RENEWALS + 1
    assert fake.recorded >= recorded
    assert "the model changed" in kgopt.report(model).graph


# ---------------------------------------------------------------------------------------------------------- refusals


class Broken(nn.Module):
    """A forward with an effect that a replay would not have."""

    def __init__(self, effect):
        super().__init__()
        self.norm, self.effect, self.calls, self.log = nn.GroupNorm(2, 4), effect, 0, []
        self.half = torch.zeros(3, dtype=torch.float16)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        y = self.norm(x)
        return {
            "counts": self.count,
            "logs": self.append,
            "buffer": lambda y, x: (self.mean.add_(1), y)[1],
            "input": lambda y, x: (x.add_(1), y)[1],
            "random": lambda y, x: y + torch.rand_like(y),
            "python random": lambda y, x: y + random.random(),
            "dropout": lambda y, x: torch.dropout(y, 0.5, True),
            "item": lambda y, x: y + 1 if x.sum().item() > 0 else y - 1,
            "branch": lambda y, x: y + 1 if x.sum() > 0 else y - 1,
            "nonzero": lambda y, x: y[y > 0],
            "copy": lambda y, x: y + self.half.to(torch.float32).sum(),
            "view": lambda y, x: x[:1],
            "parameter": lambda y, x: self.norm.weight,
            "expanded": lambda y, x: y[:, :1].expand(-1, 4, -1, -1),
            "object": lambda y, x: (y, object()),
        }[self.effect](y, x)

    def count(self, y, x):
        self.calls += 1
        return y + self.calls

    def append(self, y, x):
        self.log.append(1)
        return y


REASONS = {
    "counts": "its forward changes what the model holds",
    "logs": "its forward changes what the model holds",
    "buffer": "its forward changes what the model holds",
    "input": "its forward writes to its arguments",
    "random": "its forward draws random numbers",
    "python random": "its forward draws random numbers",
    "dropout": "its forward draws random numbers",
    "item": "it reads values of the GPU: aten._local_scalar_dense.default",
    "branch": "it reads values of the GPU: aten._local_scalar_dense.default",
    "nonzero": "the shape of a result hangs on values: aten.index.Tensor",
    "copy": "it copies between the CPU and the GPU: aten._to_copy.default",
    "view": "its result shares memory with its arguments or parameters",
    "parameter": "its result",
    "expanded": "a tensor is expanded: its elements share memory",
    "object": "its result holds a object",
}


@pytest.mark.parametrize("effect", REASONS)
def test_refusals(fake, effect):
    model = kgopt.optimize(Broken(effect).eval(), cuda_graph=True, measure=False)
    twin = copy.deepcopy(kgopt.restore(copy.deepcopy(model)))
    for seed in range(4):
        x, other = x_of(seed), x_of(seed)
        torch.manual_seed(seed), random.seed(seed)
        y = model(x)
        torch.manual_seed(seed), random.seed(seed)
        expected = twin(other)
        if effect in ("counts", "logs"):
            continue
        if effect == "object":
            y, expected = y[0], expected[0]
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(x, other)
        assert torch.equal(model.mean, twin.mean)
    assert fake.replayed == 0
    assert REASONS[effect] in kgopt.report(model).graph


def test_what_fails_in_a_capture_is_said(fake):
    fake.fails = "operation not permitted when stream is capturing\nmore"
    model = net()
    for _ in range(3):
        assert not replays(fake, model, x_of())
    assert kgopt.report(model).graph == ("none: recording fails: operation not permitted when stream is capturing")


@pytest.mark.parametrize("where", ["look", "capture"])
def test_an_error_of_the_models_own_while_recording(fake, monkeypatch, where):
    """A KeyError came through, at this call and at each one after it."""

    class Odd(Net):
        def forward(self, x):
            if where == "look" and torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                raise KeyError("of the model")
            return super().forward(x)

    if where == "capture":

        def record(self, call, room=0):
            raise KeyError("of the model")

        monkeypatch.setattr(FakeLane, "record", record)
    model = kgopt.optimize(Odd().eval(), measure=False, cuda_graph=True)
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        for _ in range(4):
            model(x)
    assert "of the model" in kgopt.report(model).graph
    assert fake.replayed == 0


def test_attention_gives_a_random_state_on_the_cpu(fake):
    looking = effects.Looking()
    func = torch.ops.aten._scaled_dot_product_efficient_attention.default
    tokens, state = torch.randn(1, 2, 4, 8), torch.zeros((), dtype=torch.float16)  # a half stands for the other device
    assert not looking.reason(func, (tokens, tokens, tokens), {}, (tokens, tokens, state, state))
    assert looking.reason(torch.ops.aten._to_copy.default, (tokens,), {}, state)


def test_errors_of_the_model_are_its_own(fake):
    model = net()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="expected input"):
            model(torch.zeros(2, 5, 6, 6))
    assert fake.recorded == 0


# ------------------------------------------------------------------------------------------------------ other tools


def test_copies_drop_recordings(fake):
    model = net()
    warmed(fake, model, x_of())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not twin._kgopt.graphs.calls
        before = fake.replayed
        twin.scale = 3.0
        torch.testing.assert_close(twin(x_of()), model(x_of()) * 3)
        assert fake.replayed == before + 1
    shallow = copy.copy(model)
    before = fake.replayed
    shallow(x_of())
    assert fake.replayed == before


def test_restore_frees(fake):
    model = net()
    warmed(fake, model, x_of())
    held = weakref.ref(model._kgopt.graphs)
    kgopt.restore(model)
    assert type(model) is Net
    assert held() is None
    assert fake.settled == 1
    before = fake.replayed
    model(x_of())
    assert fake.replayed == before


def test_state_dict_and_isinstance(fake):
    model = net()
    keys = list(Net().state_dict())
    warmed(fake, model, x_of())
    assert list(model.state_dict()) == keys
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"


def test_optimize_again_drops_and_turns_off(fake):
    model = net()
    warmed(fake, model, x_of())
    kgopt.optimize(model, measure=False, cuda_graph=True)
    assert not replays(fake, model, x_of())
    kgopt.optimize(model, measure=False)
    for _ in range(3):
        assert not replays(fake, model, x_of())


def test_transforms_and_compilers_see_the_plain_path(fake):
    model = net()
    warmed(fake, model, x_of())
    expected = model(x_of())
    before = fake.replayed
    ys = torch.func.vmap(model)(x_of()[:, None])
    torch.testing.assert_close(ys[:, 0], expected)
    program = torch.export.export(model, (x_of(),))
    torch.testing.assert_close(program.module()(x_of()), expected)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x_of()), expected)
    assert fake.replayed == before


def test_threads(fake):
    """A thread that finds another one in a replay takes the plain path."""
    model = net()
    warmed(fake, model, x_of())
    expected = {seed: model(x_of(seed)) for seed in range(4)}
    wrong = []

    def work(seed):
        with torch.no_grad():
            for _ in range(20):
                if not torch.allclose(model(x_of(seed)), expected[seed], rtol=1e-4, atol=1e-4):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Captured:
    """What CUDAGraph does at the end of a capture that is void, or was ended."""

    def __init__(self, calls, void, ended):
        self.calls, self.void, self.ended = calls, void, ended

    def capture_begin(self, pool, capture_error_mode):
        self.calls.append("begin")

    def capture_end(self):
        self.calls.append("end")
        if self.void:
            raise RuntimeError("void")

    def pool(self):
        if not self.ended:
            raise RuntimeError("no pool")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("void", "ended"), [(False, True), (True, False), (True, True)])
def test_a_capture_is_always_ended(void, ended, fails, monkeypatch):
    """The allocator is told where capture_end stopped halfway, and is not told twice; the first error is raised."""
    calls = []
    monkeypatch.setattr(machine, "end_allocation_to_pool", lambda device, pool: calls.append("allocator"))
    lane = object.__new__(machine.Lane)
    lane.pool, lane.device = (0, 1), torch.device("cuda:0")

    def call():
        if fails:
            raise ValueError("of the model")
        return 7

    graph = Captured(calls, void, ended)
    if fails or void:
        with pytest.raises(ValueError if fails else RuntimeError, match="of the model" if fails else "void"):
            lane._capture(graph, call)
    else:
        assert lane._capture(graph, call) == 7
    assert calls == ["begin", "end"] + (["allocator"] if void and not ended else [])


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_how_products_in_half_precision_are_summed_is_a_switch(half):
    name, before = f"allow_{half}_reduced_precision_reduction", keys.switches()
    matmul = torch.backends.cuda.matmul
    allowed = getattr(matmul, name)
    try:
        setattr(matmul, name, not allowed)
        assert keys.switches() != before
    finally:
        setattr(matmul, name, allowed)
    assert keys.switches() == before


def test_a_replay_on_another_stream_waits_for_the_one_before_it(monkeypatch):
    class Stream:
        def __init__(self, handle):
            self.handle, self.waited = handle, []

        def wait_stream(self, other):
            self.waited.append(other)

    streams, now = [Stream(0), Stream(7)], [0]
    monkeypatch.setattr(machine, "current_stream", lambda index: streams[now[0]].handle)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[now[0]])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    lane = object.__new__(machine.Lane)
    lane.device, lane.last, lane.handle = torch.device("cuda:1"), None, 0
    for at in (0, 0, 1, 1, 0):
        now[0] = at
        with lane.turn():
            assert lane.last is streams[at]
    assert streams[1].waited == [streams[0]]
    assert streams[0].waited == [streams[1]]
