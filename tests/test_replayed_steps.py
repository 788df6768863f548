"""Training steps of compiled functions, replayed (cuda_graphs/replayed_steps.py), beside those of eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fake_replays import FakeLane
from kgopt.rewrite.cuda_graphs import machine, replayed_steps
from test_replayed import compiled, fake  # noqa: F401


class Net(nn.Module):
    """A weight in channels_last, a parameter that nothing reads, and one in double precision."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm, self.drop = nn.GroupNorm(2, 8), nn.Dropout(dropout)
        self.last = nn.Conv2d(8, 5, 3)
        self.unused = nn.Parameter(torch.ones(3))
        self.factor = nn.Parameter(torch.randn(5, 1, 1, dtype=torch.float64))

    def forward(self, x):
        y = self.last(F.silu(self.drop(self.norm(self.first(x)))))
        return y.double() * self.factor, y.detach() + 1, y.mean((2, 3))


def x_of(seed, device="cpu"):
    return torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(seed)).to(device)


def loss_of(outputs):
    y, detached, means = outputs
    return (
        (y.square() * torch.linspace(-1, 1, 5, device=y.device).view(5, 1, 1)).sum()
        + means.exp().sum()
        + detached.sum()
    )


def pair(device="cpu", **options):
    model = Net().to(device)
    return compiled(model, **options), model, copy.deepcopy(model)


def same_gradients(model, expected):
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
            continue
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        assert p.grad.stride() == q.grad.stride(), name


def is_replayed(y):
    return type(y[0].grad_fn).__name__ == "_ReplayBackward"


def warm(run, device="cpu"):
    for seed in range(3):
        y = run(x_of(seed, device))
        loss_of(y).backward()
    assert is_replayed(y)
    run._orig_mod.zero_grad()


def test_gradients_are_right_and_stay(fake):  # noqa: F811
    run, model, expected = pair()
    kept = []
    for seed in range(6):
        x, other = (x_of(seed).requires_grad_() for _ in range(2))
        y = run(x)
        assert is_replayed(y) == (seed > 0)
        assert [t.requires_grad for t in y] == [True, False, True]
        loss_of(y).backward()
        loss_of(expected(other)).backward()  # both add up over the steps
        same_gradients(model, expected)
        kept.append((x.grad, other.grad, y, expected(x_of(seed))))
    assert fake.recorded == 2
    for gradient, right, y, outputs in kept:
        torch.testing.assert_close(gradient, right, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(y, outputs, rtol=1e-3, atol=1e-4)


def test_weights_are_followed_through_an_optimizer(fake):  # noqa: F811
    run, model, expected = pair()
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3, momentum=0.9) for m in (model, expected)]
    for seed in range(6):
        for forward, optimizer in zip((run, expected), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=seed % 2 == 0)
            loss_of(forward(x_of(seed))).backward()
            optimizer.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()), rtol=1e-3, atol=1e-4)
    assert fake.recorded == 2
    model.first.weight.data = torch.randn_like(model.first.weight)  # elsewhere now
    expected.load_state_dict(model.state_dict())
    for _ in range(2):
        model.zero_grad(), expected.zero_grad()
        loss_of(run(x_of(7))).backward(), loss_of(expected(x_of(7))).backward()
        same_gradients(model, expected)
    assert fake.recorded == 4


def step(run, model, expected, seed, drop, device="cpu"):
    """Whether a step was replayed, and whether its gradients lie in the recording.

    ``drop``: when gradients are dropped, "before" the forward or "between" that and the backward; "zeros": set to zero
    there; "never".
    """
    for forward, m in ((expected, expected), (run, model)):
        if drop == "before":
            m.zero_grad()
        y = forward(x_of(seed, device))
        if drop in ("between", "zeros"):
            m.zero_grad(set_to_none=drop == "between")
        node = y[0].grad_fn
        loss_of(y).backward()
    same_gradients(model, expected)
    if not is_replayed(y):
        return False, False
    own = {b.untyped_storage().data_ptr() for b in node.step.buffers}
    return True, any(p.grad is not None and p.grad.untyped_storage().data_ptr() in own for p in model.parameters())


DROPS = pytest.mark.parametrize(
    ("drop", "lie"), [("before", True), ("between", False), ("zeros", False), ("never", False)]
)


@DROPS
def test_gradients_of_the_usual_loops(fake, drop, lie):  # noqa: F811
    """Those that are dropped before the next forward are no copies."""
    check_loops(drop, lie, "cpu")


def check_loops(drop, lie, device, **options):
    run, model, expected = pair(device, **options)
    found = [step(run, model, expected, seed, drop, device) for seed in range(5)]
    assert found == [(False, False)] + 4 * [(True, lie)]


def test_gradients_that_somebody_keeps(fake):  # noqa: F811
    """Nothing is written over them, and those of the steps behind are copies."""
    run, model, expected = pair()
    assert [step(run, model, expected, seed, "before") for seed in range(3)][-1] == (True, True)
    kept = [model.first.weight.grad, model.last.weight.grad]
    right = [g.clone() for g in kept]
    assert step(run, model, expected, 3, "before") == (False, False)
    del kept[0]
    assert step(run, model, expected, 4, "before") == (False, False), "one of them is enough"
    assert torch.equal(kept[0], right[1])
    del kept
    assert [step(run, model, expected, seed, "before") for seed in (5, 6)] == 2 * [(True, False)]


def test_gradients_outlive_the_recording(fake):  # noqa: F811
    run, model, expected = pair()
    assert [step(run, model, expected, seed, "before") for seed in range(3)][-1] == (True, True)
    model.first.weight.data = model.first.weight.data.clone()  # elsewhere now: the next forward records anew
    kept = model.last.weight.grad
    right = kept.clone()
    assert step(run, model, expected, 3, "before")[0]
    assert torch.equal(kept, right)


def test_gradients_are_copies_where_holders_cannot_be_counted(fake, monkeypatch):  # noqa: F811
    monkeypatch.setattr(replayed_steps, "CAN_COUNT_HOLDERS", False)
    check_loops("before", False, "cpu")


def test_forwards_before_their_backwards(fake):  # noqa: F811
    """As where losses of several batches are added, in either order."""
    run, model, expected = pair()
    warm(run)
    outputs = [run(x_of(seed)) for seed in (3, 4, 5)]
    assert [is_replayed(y) for y in outputs] == [True, False, False]
    for y, seed in zip(outputs, (3, 4, 5), strict=True):
        loss_of(y).backward()
        loss_of(expected(x_of(seed))).backward()
    same_gradients(model, expected)
    assert is_replayed(run(x_of(0)))
    assert is_replayed(run(x_of(0))), "the result of the call before is gone, so its backward cannot come"


def test_a_graph_that_is_kept(fake):  # noqa: F811
    run, model, expected = pair()
    warm(run)
    losses = [loss_of(f(x_of(3))) for f in (run, expected)]
    assert not is_replayed(run(x_of(4)))
    for kept in (True, True, False):
        for loss in losses:
            loss.backward(retain_graph=kept)
        same_gradients(model, expected)
        assert is_replayed(run(x_of(4))) == (not kept)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        losses[0].backward()


def test_parts_of_the_results(fake):  # noqa: F811
    run, model, expected = pair()
    warm(run)
    for part in (0, 2):
        run(x_of(3))[part].exp().sum().backward(), expected(x_of(3))[part].exp().sum().backward()
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(*(torch.zeros_like(p) if t.grad is None else t.grad for t in (p, q)))


def test_a_weight_that_is_written_to_before_the_backward(fake):  # noqa: F811
    run, model, expected = pair()
    warm(run)
    loss = loss_of(run(x_of(3)))
    with torch.no_grad():
        model.last.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.no_grad():
        model.last.weight.mul_(0.5)
    loss, right = loss_of(run(x_of(3))), loss_of(expected(x_of(3)))
    with torch.no_grad():
        model.last.bias.add_(1)  # no gradient reads it
    loss.backward(), right.backward()
    same_gradients(model, expected)


def test_a_weight_that_is_gathered_anew_for_the_backward(fake):  # noqa: F811
    """As sharded parameters are: memory is freed behind the forward, and filled again elsewhere."""
    run, model, expected = pair()
    warm(run)
    losses = [loss_of(f(x_of(3))) for f in (run, expected)]
    weight, before = model.last.weight, fake.replayed
    values, storage, place = weight.detach().clone(), weight.untyped_storage(), weight.data_ptr()
    size = storage.nbytes()
    storage.resize_(0)
    kept = [torch.empty(size, dtype=torch.uint8) for _ in range(64)]  # one of them may have its place
    storage.resize_(size)
    weight.data.copy_(values)  # which its count of writes does not tell
    for loss in losses:
        loss.backward()
    same_gradients(model, expected)
    assert (fake.replayed == before) == (weight.data_ptr() != place)
    del kept


def test_a_second_derivative_is_refused(fake):  # noqa: F811
    run, *_ = pair()
    x = x_of(3).requires_grad_()
    for _ in range(3):
        loss_of(run(x)).backward()
    (gradient,) = torch.autograd.grad(loss_of(run(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def test_hooks_for_saved_tensors_and_checkpoints(fake):  # noqa: F811
    run, model, expected = pair()
    warm(run)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        y = run(x_of(3))
    assert seen
    assert not is_replayed(y)
    for f in (run, expected):
        loss_of(checkpoint(f, x_of(4), use_reentrant=False)).backward()
    same_gradients(model, expected)


@pytest.mark.parametrize("change", ["dropout", "work", "clock", "memory", "more", "never"])
def test_what_is_not_recorded(fake, change):  # noqa: F811
    model = Net(0.5 if change == "dropout" else 0.0)
    fake.busy = change == "work"
    fake.times = (1.0, 2.0) if change == "clock" else fake.times
    if change == "memory":
        fake.memory = lambda device: 2**20
    if change == "more":  # than a step by calls takes
        fake.lane = lambda device: large_lane(fake)
    run = compiled(model, cuda_graph=change != "never" and "auto")
    for seed in range(4):
        y = run(x_of(seed))
        loss_of(y).backward()
    assert not is_replayed(y)
    assert fake.reclaimed == (change not in ("never", "dropout"))


def large_lane(fake):  # noqa: F811
    lane = FakeLane(fake)
    lane.held = 2**28
    return lane


@pytest.mark.parametrize("times", [(2.0, 1.0), (1.0, 2.0)])
def test_statistics_are_moved_along_once_a_call(fake, times):  # noqa: F811
    fake.times = times
    model = Net()
    model.norm = nn.BatchNorm2d(8)
    expected = copy.deepcopy(model)
    run = compiled(model)
    for seed in range(5):
        y = run(x_of(seed))
        loss_of(y).backward(), loss_of(expected(x_of(seed))).backward()
        for (name, ours), right in zip(model.named_buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(ours, right, msg=lambda text, name=name: f"{name}: {text}")
    same_gradients(model, expected)
    assert is_replayed(y) == (times[0] > times[1])
    if is_replayed(y):
        version = model.norm.running_mean._version
        y = run(x_of(0))
        assert model.norm.running_mean._version > version
        with pytest.raises(RuntimeError, match="neither retain_graph=True nor"):
            loss_of(y).backward(retain_graph=True)


class Follows(nn.Module):
    """Reads a buffer, and writes it anew: as spectral norms and codebooks do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.register_buffer("state", torch.ones(3))

    def forward(self, x):
        y = self.conv(x) * self.state[:, None, None].clone()
        self.state.mul_(0.5)
        self.state.add_(y.detach().mean((0, 2, 3)))
        return y


def test_a_buffer_that_is_read_and_written(fake):  # noqa: F811
    torch.manual_seed(0)
    model = Follows()
    expected, run = copy.deepcopy(model), compiled(model)
    for seed in range(5):
        y, right = run(x_of(seed)), expected(x_of(seed))
        torch.testing.assert_close(y, right)
        y.square().sum().backward(), right.square().sum().backward()
        torch.testing.assert_close(model.state, expected.state)
    torch.testing.assert_close(model.conv.weight.grad, expected.conv.weight.grad)
    assert is_replayed([y])


def test_an_argument_that_is_written_to(fake):  # noqa: F811
    run = compiled(lambda x, w: (x.add_(1) * w).sum())
    x, w = torch.zeros(3), torch.ones(3, requires_grad=True)
    for i in range(4):
        run(x, w).backward()
        assert x.tolist() == [i + 1.0] * 3


def test_dropout_of_nothing_is_recorded(fake):  # noqa: F811
    warm(pair()[0])
    assert fake.recorded == 2


def test_only_the_input_is_trained(fake):  # noqa: F811
    run, model, expected = pair()
    model.requires_grad_(False), expected.requires_grad_(False)
    for seed in range(4):
        x, other = (x_of(seed).requires_grad_() for _ in range(2))
        y = run(x)
        y[2].exp().sum().backward(), expected(other)[2].exp().sum().backward()
        torch.testing.assert_close(x.grad, other.grad, rtol=1e-3, atol=1e-4)
    assert is_replayed(y)


def test_results_that_share_memory(fake):  # noqa: F811
    run = compiled(lambda x, w: (lambda y: (y, y.view(-1)))(x * w))
    w = torch.randn(4, requires_grad=True)
    for _ in range(4):
        y, flat = run(torch.randn(3, 4), w)
        assert y.data_ptr() == flat.data_ptr()
        (y.sum() + flat.sum()).backward()


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["auto", True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_on_a_gpu(option, dtype):
    torch._dynamo.reset()
    run, model, expected = pair("cuda", cuda_graph=option)
    scalers = [torch.amp.GradScaler("cuda", init_scale=16.0, enabled=dtype is torch.float16) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in (model, expected)]
    kept = []
    for seed in range(6):
        losses = []
        for forward, optimizer, scaler in zip((run, expected), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                y = forward(x_of(seed, "cuda"))
                losses.append(loss_of(y))
            scaler.scale(losses[-1]).backward()
            scaler.step(optimizer)
            scaler.update()
            kept.append(y[0])
        torch.testing.assert_close(*losses, rtol=0.05, atol=0.5)
    tolerance = 2e-3 if dtype is None else 5e-2
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    assert option == "auto" or is_replayed([kept[-2]])
    for ours, right in zip(kept[::2], kept[1::2], strict=True):
        torch.testing.assert_close(ours, right, rtol=0.1, atol=0.2)


@pytest.mark.gpu
@DROPS
def test_gradients_of_the_usual_loops_on_a_gpu(drop, lie):
    torch._dynamo.reset()
    check_loops(drop, lie, "cuda", cuda_graph=True)


@pytest.mark.gpu
def test_streams_and_pending_forwards_on_a_gpu():
    torch._dynamo.reset()
    run, model, expected = pair("cuda", cuda_graph=True)
    warm(run, "cuda")
    stream = torch.cuda.Stream()
    for seed in range(4):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream if seed % 2 else torch.cuda.current_stream()):
            first, second = (run(x_of(10 * seed + i, "cuda")) for i in range(2))
            assert [is_replayed(first), is_replayed(second)] == [True, False]
            (loss_of(first) + loss_of(second)).backward()
        torch.cuda.current_stream().wait_stream(stream)
        for i in range(2):
            loss_of(expected(x_of(10 * seed + i, "cuda"))).backward()
    same_gradients(model, expected)
    assert not machine.MACHINE.is_recording()
