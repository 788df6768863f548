"""Arguments of CUDA graphs that are read where they lie. A fake GPU replays by calling, at the same addresses."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import weakref

import pytest
import torch
from torch import nn

import kgopt
from fake_replays import Fake
from kgopt.rewrite.cuda_graphs import calls, machine
from kgopt.rewrite.cuda_graphs.recording import Recording
from test_replayed import in_place_of_gpu

SHAPE = 2, 3, 8, 7
SIZE = 2 * 3 * 8 * 7
WAYS = ["second call", "example", "compiled"]


class FakeInPlace(Fake):
    def __init__(self):
        super().__init__()
        self.reads_in_place = True

    def place(self, t):
        return t.data_ptr() if self.reads_in_place and type(t) is torch.Tensor else 0


@pytest.fixture
def fake(monkeypatch):
    return in_place_of_gpu(monkeypatch, FakeInPlace())


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)

    def forward(self, x, y=None):
        h = self.norm(self.conv(x))
        return h if y is None else h + self.conv(y)


class Memory:
    """Places of one buffer, whose addresses a test chooses."""

    def __init__(self, device="cpu"):
        self.buffer = torch.zeros(4, 1024, device=device)

    def at(self, place, seed=0):
        """A new tensor with new values there."""
        x = self.buffer[place, :SIZE].view(SHAPE)
        return x.copy_(torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)))


def made(way, model, *example, mode=True):
    """What runs calls of a model that replays. As in the wild the example is of no later call."""
    if way == "compiled":
        return torch.compile(model, backend="kgopt", options={"kgopt.cuda_graph": mode})
    example = tuple(t.clone() for t in example) if way == "example" else None
    return kgopt.optimize(copy.deepcopy(model), example, cuda_graph=mode, measure=False)


@contextlib.contextmanager
def copies_of(*tensors):
    """Counts how often one of them is copied into something."""
    count, copy_ = [0], torch.Tensor.copy_

    def counting(self, source, *args):
        count[0] += any(source is t for t in tensors)
        return copy_(self, source, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", counting)
        yield count


def replay_of(fake, run, model, *args):
    """Copies of the arguments that a call made, which replays and records nothing. Its results are checked."""
    recorded, replayed = fake.recorded, fake.replayed
    with copies_of(*args) as count:
        y = run(*args)
    assert fake.recorded == recorded
    assert fake.replayed == replayed + 1
    torch.testing.assert_close(y, model(*args), rtol=1e-4, atol=1e-4)
    return count[0]


def settled(fake, way, model, *calls_of):
    """Runs calls until arguments that stay are read where they are; each gives the arguments of one call."""
    run = made(way, model, *calls_of[0]())
    for args in (*calls_of, *calls_of[-1:]):  # an example is not one of the calls: it takes one more
        given = args()
        torch.testing.assert_close(run(*given), model(*given), rtol=1e-4, atol=1e-4)
    return run


@pytest.mark.parametrize("way", WAYS)
def test_the_same_place_is_read_there(fake, way):
    memory, model = Memory(), Net().eval()
    run = settled(fake, way, model, *[lambda: (memory.at(0),)] * 2)
    assert fake.recorded == 1 + (way == "example")
    for seed in range(1, 5):  # new values, in a new tensor
        assert replay_of(fake, run, model, memory.at(0, seed)) == 0


@pytest.mark.parametrize("way", WAYS)
def test_another_place_is_copied_for_good(fake, way):
    memory, model = Memory(), Net().eval()
    run = settled(fake, way, model, *[lambda: (memory.at(0),)] * 2)
    recorded = fake.recorded
    x = memory.at(1, 1)
    memory.buffer[0].fill_(float("nan"))  # what lay there is gone
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert fake.recorded == recorded + 1
    for place in (0, 0, 0, 1, 1, 0, 1, 2, 2, 2):
        assert replay_of(fake, run, model, memory.at(place, place)) == 1


@pytest.mark.parametrize("way", WAYS)
def test_places_that_alternate_are_never_read_there(fake, way):
    memory, model = Memory(), Net().eval()
    run = settled(fake, way, model, *[lambda i=i: (memory.at(i % 2),) for i in range(calls.WATCHED)])
    for i in range(6):
        assert replay_of(fake, run, model, memory.at(i % 2, i)) == 1
    assert fake.recorded == 1


@pytest.mark.parametrize("way", WAYS)
def test_one_stays_and_one_moves(fake, way):
    memory, model = Memory(), Net().eval()
    moving = iter([1, 2, 3] * 5)
    run = settled(fake, way, model, *[lambda: (memory.at(0), memory.at(next(moving), 1))] * 2)
    for seed in range(6):
        assert replay_of(fake, run, model, memory.at(0, seed), memory.at(next(moving), seed + 1)) == 1


@pytest.mark.parametrize("way", WAYS)
def test_arguments_that_share_memory(fake, way):
    memory, model = Memory(), Net().eval()

    def args(seed=0):
        x = memory.at(0, seed)
        return x, memory.buffer[0, 64 : 64 + SIZE].view(SHAPE)

    run = settled(fake, way, model, args, args)
    for seed in range(4):
        assert replay_of(fake, run, model, *args(seed)) == 0
    x = memory.at(0)
    torch.testing.assert_close(run(x, x), model(x, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_a_result_that_is_the_argument(fake, way):
    class Passing(Net):
        def forward(self, x):
            return x, super().forward(x)

    memory, model = Memory(), Passing().eval()
    run = settled(fake, way, model, *[lambda: (memory.at(0),)] * 2)
    if way != "compiled":
        for seed in range(3):
            x = memory.at(0, seed)
            assert replay_of(fake, run, model, x) == 0
            assert run(x)[0] is x
    x = memory.at(1, 5)
    for _ in range(3):
        same, y = run(x)
        assert same.data_ptr() == x.data_ptr()
        torch.testing.assert_close(y, model(x)[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_a_view_of_the_argument_is_refused(fake, way):
    class Viewing(Net):
        def forward(self, x):
            return x[1:], super().forward(x)

    memory, model = Memory(), Viewing().eval()
    run = settled(fake, way, model, *[lambda: (memory.at(0),)] * 3)
    before, x = fake.replayed, memory.at(0, 4)
    assert run(x)[0].data_ptr() == x[1:].data_ptr()
    assert fake.replayed == before


@pytest.mark.parametrize("way", WAYS)
def test_an_argument_is_written_to_once_a_call(fake, way):
    class Writing(Net):
        def forward(self, x):
            return super().forward(x.mul_(2))

    memory, model = Memory(), Writing().eval()
    run = made(way, model, memory.at(0))
    for _ in range(5):
        x = memory.at(0)
        expected = x * 2
        run(x)
        torch.testing.assert_close(x, expected)
    assert fake.recorded == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_recording_holds_no_argument(fake, way):
    memory, model = (ctypes.c_float * SIZE)(), Net().eval()
    alive = weakref.ref(memory)
    x = torch.frombuffer(memory, dtype=torch.float32).view(SHAPE).normal_()
    del memory
    run = settled(fake, way, model, *[lambda: (x,)] * 2)
    assert replay_of(fake, run, model, x) == 0
    assert alive() is not None
    del x
    gc.collect()
    assert alive() is None
    x = torch.randn(SHAPE)
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)


def _replacements(fake, reads_in_place):
    """How many weights in a row can be replaced until compiled code is not recorded any more."""
    fake.reads_in_place = reads_in_place
    torch._dynamo.reset()
    memory, model, held = Memory(), Net().eval(), []
    run = settled(fake, "compiled", model, *[lambda: (memory.at(0),)] * 3)
    run(memory.at(1))
    for done in range(20):
        held.append(model.conv.weight.data)  # so that the new ones lie elsewhere
        model.conv.weight.data = torch.randn_like(held[-1])
        recorded, x = fake.recorded, memory.at(done % 2)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
        if fake.recorded == recorded:
            return done
    raise AssertionError("it never ends")


def test_a_place_is_no_replaced_parameter(fake):
    assert _replacements(fake, True) == _replacements(fake, False) > 3


def test_weights_are_replaced_while_an_argument_stays(fake):
    memory, model = Memory(), Net().eval()
    run = settled(fake, "compiled", model, *[lambda: (memory.at(0),)] * 2)
    before = model.conv.weight.data  # so that the new one lies elsewhere
    model.conv.weight.data = before * 2
    x = memory.at(0, 1)
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert fake.recorded == 2
    assert replay_of(fake, run, model, memory.at(0, 2)) == 0


def test_a_model_that_moves_an_argument_has_not_changed(fake):
    memory, model = Memory(), Net().eval()
    run = settled(fake, "second call", model, *[lambda: (memory.at(0),)] * 2)
    run(memory.at(1))
    graphs = run._kgopt.graphs
    assert graphs.renewals == 0
    assert not graphs.off
    (found,) = [c for c in graphs.calls.values() if isinstance(c, Recording)]
    assert not found.places
    assert "2x3x8x7" in kgopt.report(run).graph


@pytest.mark.parametrize(("way", "asked"), [("example", 1), ("second call", 2)])
def test_the_clock_is_asked_of_a_way_once(fake, way, asked):
    """A recording with copies that was fast enough is so without them, and again with them. One that was timed without
    copies may be slower with them.
    """
    memory, model, timed = Memory(), Net().eval(), []

    def seconds(first, second, device):
        timed.append([first(), second()])
        return 2.0, 1.0

    fake.seconds = seconds
    run = made(way, model, memory.at(0))
    run._kgopt.graphs.mode = "auto"  # which without an example or measurements records nothing
    if way == "example":
        assert len(timed) == 1
    for place in (0, 0, 0, 1, 1, 1):
        x = memory.at(place)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert fake.recorded == asked + 2 * (way == "example")
    assert len(timed) == asked
    for pair in timed:
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)
    assert "1000000 us a call, 2000000 us without" in kgopt.report(run).graph


def test_a_call_under_another_thread_s_lock_takes_the_plain_path(fake):
    memory, model = Memory(), Net().eval()
    run = settled(fake, "second call", model, *[lambda: (memory.at(0),)] * 2)
    before, x = fake.replayed, memory.at(1)
    with run._kgopt.graphs.lock:
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert fake.replayed == before
    assert replay_of(fake, run, model, memory.at(0, 3)) == 0


def test_in_training_arguments_are_copied(fake):
    memory, model = Memory(), Net()
    run = made("compiled", model)
    with torch.enable_grad():
        for seed in range(5):
            x = memory.at(0, seed)
            with copies_of(x) as count:
                y = run(x)
            y.sum().backward()
            torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)
    assert fake.replayed
    assert count[0] == 1


# ------------------------------------------------------------------------------------------------------- on a GPU


class Deep(Net):
    """With a plain copy of its argument, which a graph has as a node of its own."""

    def forward(self, x):
        return super().forward(x.clone()) + super().forward(x)


@pytest.fixture
def counted(monkeypatch):
    """Recordings of calls that were made."""
    found, record = [], machine.Lane.record
    monkeypatch.setattr(machine.Lane, "record", lambda *args: found.append(1) or record(*args))
    torch._dynamo.reset()
    return found


def _is_close(y, expected):
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu(way, counted):
    memory, model = Memory("cuda"), Deep().cuda().eval()
    run = settled_on_a_gpu(way, model, memory)
    recorded = len(counted)
    kept = []
    for seed in range(4):
        x = memory.at(0, seed)
        with copies_of(x) as count:
            kept.append((run(x), model(x)))
        assert count[0] == 0
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for seed in range(8):  # the buffer is written to and read on one stream, then on the other
        streams[seed % 2].wait_stream(streams[1 - seed % 2])
        with torch.cuda.stream(streams[seed % 2]):
            torch.cuda._sleep(1_000_000)
            x = memory.at(0, seed)
            kept.append((run(x), model(x)))
    torch.cuda.synchronize()
    assert len(counted) == recorded
    for y, expected in kept:
        _is_close(y, expected)
    for place in (1, 0, 0, 0, 2):
        x = memory.at(place, place)
        with copies_of(x) as count:
            _is_close(run(x), model(x))
    assert count[0] == 1
    assert len(counted) == recorded + 1


def settled_on_a_gpu(way, model, memory):
    run = made(way, model, memory.at(3))
    for _ in range(3):
        x = memory.at(0)
        _is_close(run(x), model(x))
    return run


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_memory_that_was_given_back_on_a_gpu(way, counted):
    """Whatever has the address by now."""
    model = Deep().cuda().eval()
    large = 8, 3, 512, 512
    x = torch.randn(large, device="cuda")
    run = made(way, model, x)
    for _ in range(4):
        _is_close(run(x), model(x))
    gc.collect(), torch.cuda.synchronize()
    before, size = torch.cuda.memory_allocated(), x.numel() * 4
    del x
    assert torch.cuda.memory_allocated() == before - size
    for seed in range(4):
        torch.cuda.empty_cache()
        x = torch.full(large, float(seed + 1), device="cuda")
        x[..., seed] = 0
        _is_close(run(x), model(x))
        del x


@pytest.mark.gpu
def test_where_a_gpu_reads_in_place():
    cuda, x = machine.Cuda(), torch.randn(4096, device="cuda", dtype=torch.complex64)
    assert cuda.place(x) == x.data_ptr()
    assert cuda.place(x[64:]) == x.data_ptr() + 512
    assert cuda.place(x[1:]) == cuda.place(x.conj()) == cuda.place(x.conj().imag[2:]) == cuda.place(x.cpu()) == 0
    assert cuda.place(x[:0]) == cuda.place(x.to_sparse()) == cuda.place(nn.Parameter(x)) == cuda.place(3) == 0
    with torch.inference_mode():
        assert cuda.place(x * 2)
