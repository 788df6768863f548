"""cuda_graph= of kgopt.optimize on a GPU: replays give what calls give, and a capture that fails leaves nothing."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt.rewrite.cuda_graphs import calls, keys
from kgopt.rewrite.cuda_graphs.recording import Recording
from kgopt.rewrite.measure import clocks
from optimize_models import randomized

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_is_timed_in_a_capture")]


class Small(nn.Module):
    """Many launches of little work; a linear layer for cuBLAS, attention, and an argument that is added."""

    def __init__(self, channels=16):
        super().__init__()
        self.first = nn.Conv2d(4, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(6))
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(6))
        self.time = nn.Linear(8, channels)
        self.last = nn.Conv2d(channels, 4, 1)

    def forward(self, x, t=None, *, flag=True):
        h = self.first(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = h + conv(F.silu(norm(h)))
            if t is not None:
                h = h + self.time(t)[:, :, None, None]
        tokens = h.flatten(2).transpose(1, 2)
        h = h + F.scaled_dot_product_attention(tokens, tokens, tokens).transpose(1, 2).reshape(h.shape)
        return {"y": self.last(F.silu(h)), "more": (h, None)} if flag else self.last(h)


@pytest.fixture(autouse=True)
def quiet():
    """No old graphs, no gradients; afterwards no capture is open and the device still works."""
    gc.collect()
    torch.cuda.synchronize()
    with torch.no_grad():
        yield
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3
    torch.cuda.empty_cache()  # which an open capture forbids


@pytest.fixture
def replayed(monkeypatch):
    """Counts calls whose result is a replay's."""
    count = [0]
    run, replayed = Recording.run, calls.Graphs._replayed

    def counted(*args):
        count[0] += 1
        return run(*args)

    def kept(*args, **kwargs):
        before = count[0]
        result = replayed(*args, **kwargs)
        if result is None:  # it was launched, and dropped
            count[0] = before
        return result

    monkeypatch.setattr(Recording, "run", counted)
    monkeypatch.setattr(calls.Graphs, "_replayed", kept)
    return count


def x_of(seed=0, n=2, dtype=torch.float32, device="cuda"):
    return torch.randn(n, 4, 16, 18, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def t_of(seed=0, n=2, dtype=torch.float32):
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def pair(dtype=torch.float32, **options):
    """A model with its calls recorded, and the original."""
    original = randomized(Small()).cuda().to(dtype).eval()
    model = kgopt.optimize(copy.deepcopy(original), **{"cuda_graph": True, **options})
    return model, original


def check(actual, expected, tolerance=1e-4):
    if isinstance(expected, dict):
        assert type(actual) is dict
        assert actual.keys() == expected.keys()
        assert actual["more"][1] is None
        actual, expected = actual["y"], expected["y"]
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < tolerance


def replays(count, model, *args, **kwargs):
    before = count[0]
    y = model(*args, **kwargs)
    return count[0] > before, y


@pytest.mark.parametrize("example", [True, False], ids=["example_inputs", "second_call"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_replays_give_what_calls_give(dtype, example, replayed):
    inputs = x_of(dtype=dtype), t_of(dtype=dtype)
    model, original = pair(dtype, example_inputs=inputs if example else None)
    if not example:
        model(*inputs), model(*inputs)
    for seed in range(5):
        args = x_of(seed, dtype=dtype), t_of(seed, dtype=dtype)
        done, y = replays(replayed, model, *args)
        assert done, kgopt.report(model).graph
        check(y, original(*args), 1e-4 if dtype is torch.float32 else 3e-2)
    text = kgopt.report(model).graph
    assert "2x4x16x18, 2x8" in text
    assert "MiB of memory held" in text
    assert model._kgopt.graphs.lane.held > 0


def test_kwargs_shapes_and_formats(replayed):
    model, original = pair()
    kinds = [
        ((x_of(),), {}),
        ((x_of(n=3),), {"t": t_of(n=3)}),
        ((x_of(),), {"flag": False}),
        ((x_of().contiguous(memory_format=torch.channels_last),), {"flag": False}),
        ((x_of(n=4)[::2],), {"flag": False}),
    ]
    strides = []
    for _ in range(3):
        for args, kwargs in kinds:
            _, y = replays(replayed, model, *args, **kwargs)
            check(y, original(*args, **kwargs))
            strides.append([t.stride() for t in keys.leaves(y)])
    for i, (args, kwargs) in enumerate(kinds):
        done, y = replays(replayed, model, *args, **kwargs)
        assert done, kgopt.report(model).graph
        assert [t.stride() for t in keys.leaves(y)] == strides[i]  # of the plain path
    assert len({id(c) for c in model._kgopt.graphs.calls.values() if isinstance(c, Recording)}) == len(kinds)


def test_results_are_not_overwritten():
    model, original = pair(example_inputs=(x_of(), t_of()))
    results = [model(x_of(seed), t_of(seed)) for seed in range(6)]
    model(x_of(9), t_of(9))["y"].fill_(float("nan"))
    for seed, y in enumerate(results):
        check(y, original(x_of(seed), t_of(seed)))


def test_weights_are_followed(replayed):
    model, original = pair(example_inputs=(x_of(), t_of()))
    for p, q in zip(model.parameters(), original.parameters(), strict=True):
        p.mul_(0.9), q.mul_(0.9)
    done, y = replays(replayed, model, x_of(1), t_of(1))
    assert done
    check(y, original(x_of(1), t_of(1)))
    other = {k: v * 1.1 for k, v in original.state_dict().items()}
    model.load_state_dict(other), original.load_state_dict(other)
    done, y = replays(replayed, model, x_of(2), t_of(2))
    assert done
    check(y, original(x_of(2), t_of(2)))


def _data(model):
    for p in model.parameters():
        p.data = p.data * 0.8


def _assign(model):
    model.load_state_dict({k: v * 0.8 for k, v in model.state_dict().items()}, assign=True)


def _to(model):
    kept = [p.data for p in model.parameters()]  # their addresses are not taken again
    model.cpu().cuda()
    model.last.weight.mul_(2)
    del kept


def _submodule(model):
    torch.manual_seed(5)
    model.last = nn.Conv2d(16, 4, 3, padding=1).cuda()


@pytest.mark.parametrize("change", [_data, _assign, _to, _submodule])
def test_replaced_weights(change, replayed):
    model, original = pair(example_inputs=(x_of(), t_of()))
    change(model), change(original)
    gc.collect(), torch.cuda.empty_cache()
    torch.full((2**20,), float("nan"), device="cuda")  # on what was freed
    for i in range(4):
        done, y = replays(replayed, model, x_of(i), t_of(i))
        check(y, original(x_of(i), t_of(i)))
        assert i > 0 or not done
    assert done


def settle(model):
    """Inputs that lay at one place, and then at another, are copied from now on."""
    same, other = ((x_of(), t_of()) for _ in "ab")
    with torch.no_grad():
        for args in (same, same, other):
            model(*args)


def test_modes_and_switches(replayed):
    model, original = pair(example_inputs=(x_of(), t_of()))
    settle(model)
    assert replays(replayed, model, x_of(), t_of())[0]
    with torch.inference_mode():
        done, y = replays(replayed, model, x_of(1), t_of(1))
        assert done
        assert y["y"].is_inference()
    with torch.enable_grad():
        done, y = replays(replayed, model, x_of(), t_of())
        assert not done
        y["y"].sum().backward()
        assert model.last.weight.grad is not None
    torch.backends.cudnn.allow_tf32 = True
    done, y = replays(replayed, model, x_of(), t_of())
    torch.backends.cudnn.allow_tf32 = False
    assert not done
    model.train()
    assert not replays(replayed, model, x_of(), t_of())[0]
    model.eval()
    for i in range(3):
        done, y = replays(replayed, model, x_of(i), t_of(i))
        check(y, original(x_of(i), t_of(i)))
    assert done


def test_autocast(replayed):
    """Casts of weights that autocast keeps would not follow the weights."""
    model, original = pair()
    for i in range(6):
        for m in (model, original):
            m.time.weight.mul_(1.2)
            m.first.weight.mul_(0.9)
        with torch.autocast("cuda", torch.bfloat16):
            done, y = replays(replayed, model, x_of(i), t_of(i))
            check(y, original(x_of(i), t_of(i)), 5e-2)
        assert done == (i > 0)  # the second call is recorded, and the recording tried
    assert not replays(replayed, model, x_of(), t_of())[0]


def test_hooks(replayed):
    model, _ = pair(example_inputs=x_of())
    seen = []
    root = model.register_forward_hook(lambda *_: seen.append("root"))
    assert replays(replayed, model, x_of())[0]
    assert seen == ["root"]
    inner = model.last.register_forward_pre_hook(lambda *_: seen.append("inner"))
    assert not replays(replayed, model, x_of())[0]
    assert seen == ["root", "inner", "root"]
    inner.remove(), root.remove()
    assert replays(replayed, model, x_of())[0]


def test_other_streams(replayed):
    """Each call on another stream than the one before: results belong to the stream that asked for them."""
    model, original = pair(example_inputs=(x_of(), t_of()))
    inputs = [(x_of(seed), t_of(seed)) for seed in range(24)]
    expected = [original(*args) for args in inputs]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    for i, args in enumerate(inputs):
        with torch.cuda.stream(streams[i % 3]):
            if i % 3 == 0:
                torch.cuda._sleep(2_000_000)
            done, y = replays(replayed, model, *args)
            assert done
            results.append(y["y"] * 1.0)
    torch.cuda.synchronize()
    for y, e in zip(results, expected, strict=True):
        check(y, e["y"])


def test_threads():
    model, original = pair(example_inputs=(x_of(), t_of()))
    expected = {seed: original(x_of(seed), t_of(seed))["y"] for seed in range(4)}
    torch.cuda.synchronize()
    wrong = []

    def work(seed):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            args = x_of(seed), t_of(seed)
            for i in range(30):
                y = model(*args)["y"]
                if i == 10 and seed == 0:
                    model(x_of(n=5)), model(x_of(n=5))  # records while the others run
                if float((y - expected[seed]).norm() / expected[seed].norm()) > 1e-3:
                    wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


class Refusing(nn.Module):
    def __init__(self, effect):
        super().__init__()
        self.conv, self.norm, self.effect = nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), effect
        self.register_buffer("count", torch.zeros(()))
        self.host = torch.arange(8.0)

    def forward(self, x):
        y = self.norm(self.conv(x))
        if self.effect == "item":
            return y * y.mean().item()
        if self.effect == "branch":
            return y + 1 if y.sum() > 0 else y
        if self.effect == "synchronize":
            torch.cuda.synchronize()
        if self.effect == "host":
            return y + self.host.view(8, 1, 1).to(y.device)
        if self.effect == "host without waiting":
            return y + self.host.view(8, 1, 1).pin_memory().to(y.device, non_blocking=True)
        if self.effect == "to the host":
            return y.cpu()
        if self.effect == "random":
            return y + torch.randn_like(y)
        if self.effect == "writes":
            self.count.add_(1)
        if self.effect == "raises in a capture" and torch.cuda.is_current_stream_capturing():
            raise ValueError("not here")
        if self.effect == "mask":
            return y[x[:, :1, 1:-1, 1:-1].expand_as(y) > 0]
        return y


EFFECTS = {
    "item": "it reads values of the GPU",
    "branch": "it reads values of the GPU",
    "synchronize": "recording fails",
    "host": "it copies between the CPU and the GPU",
    "host without waiting": "it copies between the CPU and the GPU",
    "to the host": "it copies between the CPU and the GPU",
    "random": "its forward draws random numbers",
    "writes": "its forward changes what the model holds",
    "raises in a capture": "recording fails: not here",
    "mask": "the shape of a result hangs on values",
}


@pytest.mark.parametrize("effect", EFFECTS)
def test_what_cannot_be_recorded(effect, replayed):
    original = randomized(Refusing(effect)).cuda().eval()
    model = kgopt.optimize(copy.deepcopy(original), x_of(), cuda_graph=True, channels_last=False)
    for seed in range(3):
        torch.manual_seed(seed)
        y = model(x_of(seed))
        torch.manual_seed(seed)
        torch.testing.assert_close(y, original(x_of(seed)), rtol=1e-3, atol=1e-4)
    assert replayed[0] == 0
    assert EFFECTS[effect] in kgopt.report(model).graph
    stream = torch.cuda.current_stream()
    assert stream == torch.cuda.default_stream()
    # A good model is recorded after it, and a capture of the user's own works.
    good, plain = pair(example_inputs=x_of())
    check(good(x_of(1)), plain(x_of(1)))
    assert any(isinstance(c, Recording) for c in good._kgopt.graphs.calls.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = torch.zeros(4, device="cuda") + 1
    graph.replay()
    assert z.sum().item() == 4


def test_a_capture_of_the_users(replayed):
    model, original = pair(example_inputs=x_of())
    x, graph = x_of(), torch.cuda.CUDAGraph()
    model(x)
    before = replayed[0]
    gc.collect()
    with torch.cuda.graph(graph):
        y = model(x)
    assert replayed[0] == before
    x.copy_(x_of(3))
    graph.replay()
    check(y, original(x))


def test_compile_and_vmap(replayed):
    model, original = pair(example_inputs=x_of())
    before = replayed[0]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    check(compiled(x_of(1)), original(x_of(1)), 1e-3)
    ys = torch.func.vmap(lambda x: model(x, flag=False))(x_of(1)[:, None])
    check(ys[:, 0].contiguous(), original(x_of(1), flag=False), 1e-3)
    assert replayed[0] == before
    model(x_of(1))  # what compiling leaves on modules makes the recording void: the call is recorded anew
    assert replays(replayed, model, x_of(1))[0]


def test_one_pool_and_restore():
    model, _ = pair()
    for n in (1, 2, 3):
        model(x_of(n=n)), model(x_of(n=n))
    state = model._kgopt.graphs
    pools = {tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot()} - {(0, 0)}
    assert tuple(state.lane.pool) in pools
    held, pool = state.lane.held, tuple(state.lane.pool)
    assert held > 0
    del state
    kgopt.restore(model)
    torch.cuda.empty_cache()
    assert all(tuple(s["segment_pool_id"]) != pool for s in torch.cuda.memory_snapshot())
    assert type(model) is Small


def test_a_model_goes_with_its_last_name():
    """Without the collector: the memory of a model is free where it is deleted."""
    model, _ = pair(example_inputs=x_of())
    model(x_of())
    pool = tuple(model._kgopt.graphs.lane.pool)
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(model)
        del model
        assert alive() is None
        torch.cuda.empty_cache()
        assert all(tuple(s["segment_pool_id"]) != pool for s in torch.cuda.memory_snapshot())
    finally:
        gc.enable()


def test_copies(replayed):
    model, original = pair(example_inputs=x_of())
    twin = copy.deepcopy(model)
    before = replayed[0]
    check(twin(x_of(1)), original(x_of(1)))
    assert replayed[0] == before
    twin(x_of(1))
    assert replays(replayed, twin, x_of(2))[0]


def test_auto_is_never_slower():
    """A model of many short kernels is faster."""
    model, _ = pair(example_inputs=(x_of(), t_of()), cuda_graph="auto")
    found = [c for c in model._kgopt.graphs.calls.values() if isinstance(c, Recording)]
    assert found
    assert found[0].after < calls.GAIN * found[0].before
    plain = kgopt.restore(copy.deepcopy(model))
    args = x_of(), t_of()
    before, after = clocks.clock_both(lambda: plain(*args), lambda: model(*args), torch.device("cuda"))
    assert after < before


def test_channels_last_inside(replayed):
    model, original = pair(example_inputs=(x_of(), t_of()), channels_last=True)
    for seed in range(3):
        done, y = replays(replayed, model, x_of(seed), t_of(seed))
        assert done, kgopt.report(model).graph
        check(y, original(x_of(seed), t_of(seed)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device(replayed):
    model, original = pair()
    model.to("cuda:1"), original.to("cuda:1")
    x = x_of(device="cuda:1")
    for _ in range(3):
        done, y = replays(replayed, model, x)  # the current device is the first one
        check(y, original(x))
    assert done
    assert torch.cuda.current_device() == 0
