"""cuda_graph= of kgopt.optimize: what was recorded is dropped where the model changes. With a fake GPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from fake_replays import Net, faked, net, replays, warmed, x_of
from kgopt.rewrite.cuda_graphs import calls as graph_calls
from kgopt.rewrite.cuda_graphs import effects
from kgopt.rewrite.cuda_graphs.stamp import Stamp


@pytest.fixture
def fake(monkeypatch):
    return faked(monkeypatch)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


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
