"""cuda_graph= of kgopt.optimize: calls that a replay would not do for; other tools. With a fake GPU."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import weakref

import pytest
import torch
from torch import nn

import kgopt
from fake_replays import FakeLane, Net, faked, net, replays, warmed, x_of
from kgopt.rewrite.cuda_graphs import effects, keys, machine


@pytest.fixture
def fake(monkeypatch):
    return faked(monkeypatch)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


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
