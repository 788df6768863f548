"""Sites of captured graphs that stay the compiler's, which is faster there (rewrite/captured/contest.py)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt.rewrite import backend
from kgopt.rewrite.captured import contest
from kgopt.rewrite.measure import clocks, policy, verdicts
from kgopt.torch_private import compile_graph

NORM = torch.ops.kgopt.group_norm.default


class Block(nn.Module):
    """A norm with elementwise functions on either side."""

    def __init__(self, times=1):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(times))
        self.scale = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x):
        x = self.conv(x)
        for norm in self.norms:
            x = torch.maximum(torch.sigmoid(norm(x * self.scale)) * self.scale, x)
        return x


class Plain(nn.Module):
    """One between convolutions, with its activation."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 3, 3))

    def forward(self, x):
        return self.net(x)


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """The times that are found; the processor counts as a GPU. What was timed is in its list."""
    timed = []

    def busy_both(first, second, device):
        first()
        second()
        timed.append(device)
        return clock.times

    def clock(times):
        clock.times = times
        return timed

    monkeypatch.setattr(clocks, "busy_both", busy_both)
    monkeypatch.setattr(policy, "default", lambda device: True)
    monkeypatch.setattr(contest, "may_measure", lambda device: True)
    monkeypatch.setattr(verdicts, "inductor_cache_dir", lambda: str(tmp_path))
    monkeypatch.setattr(verdicts, "compiled", verdicts.Store())
    monkeypatch.setattr(verdicts, "store", verdicts.Store())
    # Regions as they stand: Inductor itself takes seconds for each, and has a test of its own.
    monkeypatch.setattr(contest, "compile_graph", lambda graph, inputs, mode, options: graph)
    torch._dynamo.reset()
    return clock


def run(model, *args, **options):
    """The result of the rewritten graph, and the functions that it calls."""
    calls = []

    def rewrite(graph, example_inputs):
        backend.rewrite_graph(graph)
        calls.extend(node.target for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    return torch.compile(model, backend=rewrite, **options)(*args), calls


def test_what_is_around_a_site():
    """Functions that only the site connects, in front of it and behind it; a convolution or another reader ends it."""

    def forward(x, weight, s):
        h = torch.conv2d(x, weight)
        a = h * s  # in front, with a factor that is read elsewhere, too
        b = F.gelu(a + 1)
        n = F.group_norm(b, 2)
        c = torch.clamp(n * s, 0, 1)
        return F.conv2d(c, weight.transpose(0, 1)), s * 2

    found = []

    def rewrite(graph, example_inputs):
        norm = next(node for node in graph.graph.nodes if node.target is F.group_norm)
        found.append(contest.Region([norm], norm, norm.meta["example_value"]))
        return graph

    torch._dynamo.reset()
    x, weight, s = torch.randn(1, 3, 5, 5), torch.randn(4, 3, 1, 1), torch.randn(4, 1, 1)
    torch.compile(forward, backend=rewrite)(x, weight, s)
    (region,) = found
    assert len(region.around) == 5
    assert len(region.inputs) == 2
    assert [n.name for n in region.outputs] == [region.nodes[-1].name]
    h = torch.conv2d(x, weight)
    values = [h if node.op == "call_function" else s for node in region.inputs]
    (y,) = region.module()(*values)
    torch.testing.assert_close(y, torch.clamp(F.group_norm(F.gelu(h * s + 1), 2) * s, 0, 1))


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_one_stands_in_the_graph(faster, clock):
    timed = clock((2.0, 1.0) if faster else (1.0, 2.0))
    model, x = Block().eval(), torch.randn(2, 3, 6, 7)
    with torch.no_grad():
        y, calls = run(model, x)
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)
    assert (NORM in calls) == faster
    assert len(timed) == 1
    (row,) = backend.last_report.sites
    assert bool(row.became) == faster
    assert faster or "the compiler's kernels are faster" in row.reason


def test_a_few_percent_are_no_reason(clock):
    clock((1.0, 1.02))
    with torch.no_grad():
        _, calls = run(Block().eval(), torch.randn(2, 3, 6, 7))
    assert NORM in calls


def test_nothing_is_measured_where_nothing_is_left_around_a_norm(clock):
    timed = clock((1.0, 2.0))
    with torch.no_grad():
        _, calls = run(Plain().eval(), torch.randn(2, 3, 8, 7))
    assert NORM in calls
    assert timed == []


def test_equal_sites_are_measured_once_and_another_process_reads_it(clock, monkeypatch):
    timed = clock((1.0, 2.0))
    model, x = Block(times=3).eval(), torch.randn(2, 3, 6, 7)
    with torch.no_grad():
        _, calls = run(model, x)
        assert NORM not in calls
        # Of three the last one's result leaves the graph, the others' is read twice.
        assert len(timed) <= 2
        before = len(timed)
        state = torch.get_rng_state()
        monkeypatch.setattr(verdicts, "compiled", verdicts.Store())  # as in a process that has just started
        _, calls = run(model, x)
    assert NORM not in calls
    assert len(timed) == before
    kgopt.forget()
    with torch.no_grad():
        run(model, x)
    assert len(timed) == 2 * before, "forgotten verdicts are measured again"
    assert torch.equal(state, torch.get_rng_state()), "measuring takes none of the user's random numbers"


def test_sizes_that_are_not_known_and_time_that_is_over(clock, monkeypatch):
    timed = clock((1.0, 2.0))
    with torch.no_grad():
        x = torch.randn(2, 3, 6, 7)
        torch._dynamo.mark_dynamic(x, 2)
        _, calls = run(Block().eval(), x)
        assert NORM in calls
        monkeypatch.setattr(contest, "SECONDS", -1.0)
        _, calls = run(Block().eval(), torch.randn(2, 3, 6, 7))
        assert NORM in calls
    assert timed == []


def test_what_cannot_be_compiled_is_kgopts(clock, monkeypatch):
    timed = clock((1.0, 2.0))

    def compile_graph(*args):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(contest, "compile_graph", compile_graph)
    with torch.no_grad():
        _, calls = run(Block().eval(), torch.randn(2, 3, 6, 7))
    assert NORM in calls
    assert timed == []


def test_gradients(clock):
    """A step of a region in training has its backward, and leaves no gradients on the model's parameters."""
    timed = clock((1.0, 2.0))
    model, x = Block(), torch.randn(2, 3, 6, 7)
    twin = copy.deepcopy(model)
    y, calls = run(model, x)
    assert NORM not in calls
    assert timed
    assert all(p.grad is None for p in model.parameters())
    y.sum().backward()
    twin(x).sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [False, True])
def test_inside_the_compilers_callback(training, clock, monkeypatch):
    """Inductor compiles regions, forward and backward, while it is asked for the whole graph."""
    monkeypatch.setattr(contest, "compile_graph", compile_graph)
    timed = clock((1.0, 2.0))
    model, x = Block(), torch.randn(2, 3, 6, 7)
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        y = torch.compile(model, backend="kgopt")(x)
        expected = twin(x)
    assert timed
    assert not any(row.became for row in backend.last_report.sites)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    if training:
        y.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(model.scale.grad, twin.scale.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_on_a_gpu(training):
    """Measured for real; whichever is taken computes the same."""
    model, x = Block(times=2).cuda(), torch.randn(4, 3, 64, 64, device="cuda")
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        y = torch.compile(model, backend="kgopt")(x)
        expected = twin(x)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
    assert all(row.became or "faster" in row.reason for row in backend.last_report.sites)
    if training:
        y.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(model.scale.grad, twin.scale.grad, rtol=1e-2, atol=1e-2)
