"""Compiled functions that are replayed as CUDA graphs (cuda_graphs/replayed.py). A fake GPU replays by calling."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fake_replays import Fake
from kgopt.rewrite import backend
from kgopt.rewrite.cuda_graphs import machine


def in_place_of_gpu(monkeypatch, found):
    """``found`` records and replays, graphs as they stand: what Inductor makes of them is not in question."""
    monkeypatch.setattr(machine, "MACHINE", found)
    monkeypatch.setattr(backend, "compile_graph", lambda graph, *_, **__: graph)
    torch._dynamo.reset()
    return found


@pytest.fixture
def fake(monkeypatch):
    return in_place_of_gpu(monkeypatch, Fake())


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 3, 3)).eval()


def compiled(model, **options):
    return torch.compile(model, backend="kgopt", options={f"kgopt.{k}": v for k, v in options.items()} or None)


@torch.no_grad()
def test_results_are_right_and_stay(fake):
    model = net()
    run, kept = compiled(model), []
    for _ in range(4):
        x = torch.randn(2, 3, 8, 7)
        kept.append((run(x), model(x)))
    assert fake.recorded == 1
    assert fake.replayed >= 3
    for y, expected in kept:
        torch.testing.assert_close(y, expected)


@torch.no_grad()
def test_what_a_module_holds_is_read_where_it_is(fake):
    model, x = net(), torch.randn(2, 3, 8, 7)
    run = compiled(model)
    for _ in range(3):
        run(x)
    model[0].weight.mul_(2)
    model[2].running_mean.add_(1)
    torch.testing.assert_close(run(x), model(x))
    assert fake.recorded == 1
    model[0].weight.data = torch.randn(8, 3, 3, 3)  # elsewhere now
    for _ in range(2):
        torch.testing.assert_close(run(x), model(x))
    assert fake.recorded == 2


@torch.no_grad()
def test_weights_that_never_stay_end_it(fake):
    model, x = net(), torch.randn(2, 3, 8, 7)
    run, held = compiled(model), []
    for _ in range(14):
        held.append(model[0].weight.data)  # so that the new ones lie elsewhere
        model[0].weight.data = torch.randn(8, 3, 3, 3)
        torch.testing.assert_close(run(x), model(x))
    assert fake.recorded < 10


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: F.dropout(x, 0.5), id="random numbers"),
        pytest.param(lambda x: x.mul_(2), id="writes to its argument"),
        pytest.param(lambda x: F.relu(x[1:].view(-1), inplace=True) + 1, id="writes to a view of it"),
        pytest.param(lambda x: F.leaky_relu(x, 0.2, True) + 1, id="says so by position"),
        pytest.param(
            lambda x: F.batch_norm(x, x.new_zeros(4), x[0], training=True), id="moves an argument's statistics along"
        ),
        pytest.param(lambda x: (x + 1, x.view(-1)), id="gives its argument's memory"),
    ],
)
def test_what_a_replay_would_not_do(fake, function):
    run = compiled(function)
    for _ in range(4):
        x = torch.randn(3, 4)
        run(x)
    before = fake.replayed
    x = torch.randn(3, 4)
    y = run(x)
    assert fake.replayed == before
    if isinstance(y, tuple):
        assert y[1].data_ptr() == x.data_ptr()


@torch.no_grad()
def test_what_a_call_made_may_be_written_to(fake):
    """Activations in place, sums in place, writing into a part: of what the call computed."""

    def function(x):
        h = F.silu(F.group_norm(x, 2), inplace=True)
        h += x
        h[:, 0].mul_(2)
        return F.relu_(h.view(-1))

    run = compiled(function)
    for _ in range(4):
        x = torch.randn(2, 4, 3, 3)
        torch.testing.assert_close(run(x), function(x))
    assert fake.recorded == 1


@torch.no_grad()
def test_statistics_in_training_are_updated_at_each_call(fake):
    model = net().train()
    run, x = compiled(model), torch.randn(2, 3, 8, 7)
    for _ in range(4):
        run(x)
    assert int(model[2].num_batches_tracked) == 4
    assert fake.recorded == 0


@torch.no_grad()
@pytest.mark.parametrize(("option", "replays"), [("auto", False), (True, True), (False, False)])
def test_the_clock_decides_unless_told(fake, option, replays):
    fake.times = (1.0, 2.0)
    run = compiled(net(), cuda_graph=option)
    for _ in range(3):
        run(torch.randn(2, 3, 8, 7))
    before = fake.replayed
    run(torch.randn(2, 3, 8, 7))
    assert (fake.replayed > before) == replays


@torch.no_grad()
def test_a_replay_is_timed_against_the_call(fake):
    replays = []

    def seconds(first, second, device):
        for function in (first, second):
            before = fake.replayed
            function()
            replays.append(fake.replayed - before)
        return 2.0, 1.0

    fake.seconds = seconds
    run = compiled(net())
    for _ in range(3):
        run(torch.randn(2, 3, 8, 7))
    assert replays == [0, 1]


@torch.no_grad()
def test_work_that_takes_long_is_not_recorded(fake):
    fake.busy = True
    run = compiled(net())
    for _ in range(3):
        run(torch.randn(2, 3, 8, 7))
    assert fake.recorded == 0


@torch.no_grad()
def test_a_mode_of_the_users_stays_alone(fake):
    run = torch.compile(net(), backend="kgopt", mode="max-autotune-no-cudagraphs")
    for _ in range(3):
        run(torch.randn(2, 3, 8, 7))
    assert fake.recorded == 0


@torch.no_grad()
def test_another_thread_takes_the_plain_path_meanwhile(fake):
    model = net()
    run = compiled(model, cuda_graph=True)
    x = torch.randn(2, 3, 8, 7)
    for _ in range(3):
        run(x)
    wrong = []

    @torch.no_grad()
    def use():
        for _ in range(20):
            x = torch.randn(2, 3, 8, 7)
            if not torch.allclose(run(x), model(x), atol=1e-5):
                wrong.append(1)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@torch.no_grad()
def test_a_recording_that_fails(fake):
    fake.fails = "operation not permitted when stream is capturing"
    model = net()
    run = compiled(model)
    for _ in range(3):
        x = torch.randn(2, 3, 8, 7)
        torch.testing.assert_close(run(x), model(x))


def test_a_wrong_option(fake):
    with torch.no_grad(), pytest.raises(Exception, match=r"kgopt\.cuda_graph is 'yes', expected True, False or"):
        compiled(net(), cuda_graph="yes")(torch.randn(2, 3, 8, 7))


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["auto", True])
@torch.no_grad()
def test_on_a_gpu(option):
    torch._dynamo.reset()
    model = net().cuda()
    run, kept = compiled(model, cuda_graph=option), []
    for i in range(5):
        x = torch.randn(2, 3, 8, 7, device="cuda")
        if i == 3:
            model[0].weight.mul_(2)
        kept.append((run(x), model(x)))
    for y, expected in kept:
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
    with torch.inference_mode():
        torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-3)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = run(x)
    stream.synchronize()
    torch.testing.assert_close(y, kept[-1][0])
