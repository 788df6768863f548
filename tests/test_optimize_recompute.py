"""``optimize(recompute=True)``: results of norms are not kept for the backward, which computes them again."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import kgopt
import optimize_models as models
from kgopt.rewrite.gradients import recompute
from kgopt.rewrite.measure import clocks, measuring
from kgopt.rewrite.model import race
from tolerances import assert_all_as_good


@pytest.fixture(autouse=True)
def same_bits(monkeypatch):
    """cuDNN's gradients in float64 add up in no fixed order."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


# Where torch does not tell of hooks, results are kept.
hooks = pytest.mark.skipif(not recompute.may_hook_saved_tensors(), reason="needs names of torch that are hidden here")


class Block(nn.Module):
    """What stands behind the norm may be anything that keeps its input."""

    def __init__(self, norm, act, after):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.act, self.after = norm, act, after
        self.seen: list[StorageWeakRef] | None = []

    def forward(self, x):
        y = self.act(self.norm(self.conv(x)))
        if self.seen is not None:
            self.seen.append(StorageWeakRef(y.untyped_storage()))
        return self.after(y)


class Rows(nn.Module):
    """Keeps a view of its input that begins and ends elsewhere."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 4, 6))

    def forward(self, x):
        return x[:, :, 1:5] * self.scale


BLOCKS = {
    "group norm, silu, conv": lambda: Block(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)),
    "instance norm, leaky": lambda: Block(nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.01), nn.Conv2d(8, 8, 1)),
    "no parameters": lambda: Block(nn.InstanceNorm2d(8), nn.GELU(), nn.ConvTranspose2d(8, 8, 2)),
    "in place": lambda: Block(nn.GroupNorm(1, 8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, groups=8)),
    "no activation": lambda: Block(nn.GroupNorm(2, 8), nn.Identity(), nn.Conv2d(8, 8, 3)),
    "a view": lambda: Block(nn.GroupNorm(2, 8), nn.SiLU(), Rows()),
}


def gradients(model, x, **more):
    x = x.detach().requires_grad_()
    y = model(x)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    return torch.autograd.grad(y, [x, *model.parameters()], dy, **more)


def pair(model, **options):
    """The model as it was, and optimized."""
    return model, kgopt.optimize(copy.deepcopy(model), measure=False, **options)


def input_of(device, dtype=torch.float64):
    return torch.randn(2, 8, 6, 6, device=device, dtype=dtype)


@hooks
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_result_is_not_kept_and_the_gradients_are_the_same_bits(name, layout, device):
    block = models.randomized(BLOCKS[name](), device).double()
    _, kept = pair(block)
    original, ours = pair(block, recompute=True)
    x = input_of(device).contiguous(memory_format=layout)
    y = ours(x.requires_grad_())
    assert ours.seen[-1].expired(), "it is still there"
    y.sum().backward()
    found = gradients(ours, x)
    assert all(map(torch.equal, found, gradients(kept, x)))
    for a, b in zip(found, gradients(original, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    state = recompute.known.get(ours, "recompute")
    assert state.results == 1
    assert state.bytes == 8 * 2 * 8 * (24 if name == "a view" else 36)
    assert "1 results, 0.0 MiB, of the last call" in str(kgopt.report(ours))


def test_a_result_that_is_not_recomputed_is_there():
    """What the test above would see without the feature."""
    _, kept = pair(models.randomized(BLOCKS["group norm, silu, conv"](), "cpu").double())
    y = kept(input_of("cpu").requires_grad_())
    assert not kept.seen[-1].expired()
    del y
    assert kept.seen[-1].expired()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype(dtype, device):
    block = models.randomized(BLOCKS["group norm, silu, conv"](), device).to(dtype)
    original, ours = pair(block, recompute=True)
    x = input_of(device, dtype)
    exact = gradients(copy.deepcopy(original).double(), x.double())
    assert_all_as_good(gradients(ours, x), gradients(original, x), exact)


@hooks
def test_autocast(device):
    block = models.randomized(BLOCKS["instance norm, leaky"](), device)
    _, kept = pair(block)
    _, ours = pair(block, recompute=True)
    x = input_of(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        y = ours(x.clone().requires_grad_())
        assert ours.seen[-1].expired()
        del y
    found = []
    for model in (ours, kept):
        leaf = x.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            y = model(leaf)
        found.append(torch.autograd.grad(y.float().sum(), [leaf, *model.parameters()]))
    assert all(map(torch.equal, *found))


class Chain(nn.Module):
    """A norm of a norm's result: the second one's input is itself computed again."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.GroupNorm(2, 8), nn.GroupNorm(4, 8)
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return self.conv(torch.relu(self.b(torch.tanh(self.a(x)))))


@hooks
def test_a_norm_of_a_norm(device):
    original, ours = pair(models.randomized(Chain(), device).double(), recompute=True)
    x = input_of(device)
    for a, b in zip(gradients(ours, x), gradients(original, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert recompute.known.get(ours, "recompute").results == 2


class Residual(nn.Module):
    """The end of a residual block, whose activation's slope follows from the sum: its node keeps the other operand."""

    def __init__(self, act):
        super().__init__()
        self.first, self.act = Block(nn.GroupNorm(2, 8), nn.SiLU(), nn.Identity()), act
        self.conv, self.norm = nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8)

    def forward(self, x):
        x = self.first(x)
        h = self.norm(self.conv(x))
        return self.act(h + x)


@pytest.fixture
def hooked(monkeypatch):
    """Shapes of the tensors that reached the hooks."""
    pack, value = recompute._HOOKS
    shapes = []
    monkeypatch.setattr(recompute, "_HOOKS", (lambda t: shapes.append(tuple(t.shape)) or pack(t), value))
    return shapes


@hooks
@pytest.mark.skipif(
    any(name.endswith("_saved_tensors_default_hooks") for name in kgopt.torch_private.missing()),
    reason="hooks stay where they are",
)
def test_what_a_norm_keeps_passes_no_hook(hooked, device):
    """Each call of a hook takes microseconds of the host, and a norm keeps five tensors."""
    _, ours = pair(models.randomized(BLOCKS["group norm, silu, conv"](), device).double(), recompute=True)
    ours(input_of(device).requires_grad_())
    convolution = [(2, 8, 6, 6), (8, 8, 3, 3)]
    assert sorted(hooked) == sorted(2 * convolution)
    assert recompute.known.get(ours, "recompute").results == 1


@hooks
@pytest.mark.parametrize("act", [nn.SiLU(), nn.ReLU()], ids=["silu", "relu"])
def test_a_sum_that_keeps_a_result(act, hooked, device):
    original, ours = pair(models.randomized(Residual(act), device).double(), recompute=True)
    x = input_of(device)
    found = gradients(ours, x)
    assert recompute.known.get(ours, "recompute").results == 1  # the convolution and SiLU's sum want the same one
    assert ours.first.seen[-1].expired()
    for a, b in zip(found, gradients(original, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# ----------------------------------------------------------------------------------------------------------------------
# Changes in place


class Writes(nn.Module):
    """Writes to one of its tensors at one of its moments."""

    def __init__(self, what):
        super().__init__()
        self.first, self.conv = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.norm, self.act = nn.GroupNorm(2, 8), nn.SiLU()
        self.what = what

    def forward(self, x):
        c = self.first(x)
        y = self.act(self.norm(c))
        if self.what == "result before":
            y.mul_(2)
        s = torch.sigmoid(x)
        z = self.conv(y) * s
        if self.what == "input":
            c.add_(1)
        if self.what == "another":
            s.add_(1)
        if self.what == "weight":
            with torch.no_grad():
                self.norm.weight.add_(1)
        return z


def test_a_result_that_was_changed_is_kept(device):
    original, ours = pair(models.randomized(Writes("result before"), device).double(), recompute=True)
    x = input_of(device)
    for a, b in zip(gradients(ours, x), gradients(original, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert recompute.known.get(ours, "recompute").results == 0


@pytest.mark.parametrize("what", ["input", "another", "weight"])
def test_what_autograd_refuses_is_refused(what, device):
    """With hooks autograd looks at no versions: a gradient of changed tensors would have been silently wrong."""
    for model in pair(models.randomized(Writes(what), device).double(), recompute=True):
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            gradients(model, input_of(device))


# ----------------------------------------------------------------------------------------------------------------------
# Others that look at saved tensors


def test_hooks_of_others_get_what_they_would_get(device):
    """Of several pairs of hooks autograd calls the innermost: ours would have hidden an offload to the CPU."""
    block = models.randomized(BLOCKS["group norm, silu, conv"](), device).double()
    _, kept = pair(block)
    _, ours = pair(block, recompute=True)
    counts = []
    for model in (kept, ours):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=shapes: s.append(t.shape) or t.detach(), lambda t: t):
            model(input_of(device).requires_grad_())
        counts.append(shapes)
    assert counts[0] == counts[1]
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        ours(input_of(device).requires_grad_()).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        ours(input_of(device).requires_grad_()).sum().backward()


class Offloads(nn.Module):
    """Has hooks of its own around a norm."""

    def __init__(self):
        super().__init__()
        self.block = BLOCKS["group norm, silu, conv"]()
        self.shapes = []

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: self.shapes.append(tuple(t.shape)) or t.detach(), lambda t: t
        ):
            y = self.block(x)
        return self.block(y)


@hooks
def test_hooks_inside_the_model_get_what_norms_keep(device):
    original, ours = pair(models.randomized(Offloads(), device).double(), recompute=True)
    _, kept = pair(original)
    x = input_of(device)
    ours.shapes, kept.shapes = [], []
    for a, b in zip(gradients(ours, x), gradients(kept, x), strict=True):
        assert torch.equal(a, b)
    assert ours.shapes == kept.shapes
    assert (2, 4) in ours.shapes, "statistics of the norm"
    assert recompute.known.get(ours, "recompute").results == 1


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.block, self.last = BLOCKS["group norm, silu, conv"](), BLOCKS["instance norm, leaky"]()
        self.reentrant = reentrant

    def forward(self, x):
        return self.last(checkpoint(self.block, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_and_outside(reentrant, device):
    original, ours = pair(models.randomized(Checkpointed(reentrant), device).double(), recompute=True)
    x = input_of(device)

    def grads(model, outside):
        leaf = x.clone().requires_grad_()
        y = checkpoint(model, leaf, use_reentrant=reentrant) if outside else model(leaf)
        model.zero_grad()
        y.sum().backward()
        return [leaf.grad, *(p.grad for p in model.parameters())]

    for outside in (False, True):
        for a, b in zip(grads(ours, outside), grads(original, outside), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_second_derivatives(device):
    original, ours = pair(models.randomized(BLOCKS["group norm, silu, conv"](), device).double(), recompute=True)
    x = input_of(device)
    for model in (original, ours):
        dx = gradients(model, x, create_graph=True)[0]
        model.penalty = torch.autograd.grad(dx.square().sum(), model.conv.weight)[0]
    torch.testing.assert_close(ours.penalty, original.penalty, rtol=1e-8, atol=1e-10)


def test_torch_func_and_compile_see_the_model(device):
    original, ours = pair(models.randomized(BLOCKS["group norm, silu, conv"](), device).double(), recompute=True)
    original.seen = ours.seen = None
    x = input_of(device)
    a, b = (torch.func.grad(lambda t, m=m: m(t).sum())(x) for m in (original, ours))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    compiled = torch.compile(ours, backend="aot_eager")
    for a, b in zip(gradients(compiled, x), gradients(original, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# ----------------------------------------------------------------------------------------------------------------------
# Life


def test_a_graph_is_used_twice_and_goes_without_the_collector(device):
    _, ours = pair(models.randomized(BLOCKS["group norm, silu, conv"](), device).double(), recompute=True)
    x = input_of(device)
    gc.collect()
    gc.disable()
    try:
        leaf = x.clone().requires_grad_()
        y = ours(leaf)
        first = torch.autograd.grad(y.sum(), leaf, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(y.sum(), leaf)[0])
        given = weakref.ref(leaf)
        del y, leaf
        assert given() is None
    finally:
        gc.enable()


def test_an_error_leaves_nothing_open(device):
    model = kgopt.optimize(BLOCKS["a view"]().to(device), measure=False, recompute=True)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 8, 3, 5, device=device))
    assert recompute.now() is None
    model(torch.randn(2, 8, 6, 6, device=device)).sum().backward()


def test_threads(device):
    _, ours = pair(models.randomized(BLOCKS["group norm, silu, conv"](), device).double(), recompute=True)
    inputs = [input_of(device) for _ in range(4)]
    expected = [gradients(ours, x) for x in inputs]
    found = [None] * 4

    def work(i):
        for _ in range(10):
            found[i] = gradients(ours, inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for a, b in zip(found, expected, strict=True):
        assert all(map(torch.equal, a, b))


def test_without_the_name_that_tells_of_hooks_all_is_kept(device, monkeypatch):
    monkeypatch.setattr(recompute, "may_hook_saved_tensors", lambda: False)
    _, ours = pair(models.randomized(BLOCKS["group norm, silu, conv"](), device).double(), recompute=True)
    y = ours(input_of(device).requires_grad_())
    assert not ours.seen[-1].expired()
    y.sum().backward()


def test_it_is_turned_off_by_the_next_call_and_by_restore(device):
    original, ours = pair(models.randomized(BLOCKS["group norm, silu, conv"](), device).double(), recompute=True)
    x = input_of(device)
    kgopt.optimize(ours, measure=False)
    y = ours(x.requires_grad_())
    assert not ours.seen[-1].expired()
    del y
    kgopt.optimize(ours, measure=False, recompute=True)
    kgopt.restore(ours)
    assert type(ours) is type(original)
    assert ours.__dict__.keys() == original.__dict__.keys()


def test_inference_keeps_nothing_and_asks_nothing(device):
    _, ours = pair(models.randomized(BLOCKS["group norm, silu, conv"](), device).double(), recompute=True)
    with torch.no_grad():
        ours(input_of(device))
    assert recompute.known.get(ours, "recompute").results == 0
    assert kgopt.report(ours).recompute == "no result yet"


@hooks
@pytest.mark.parametrize(("after", "on"), [(1.02, True), (1.05, False)])
def test_auto_takes_what_costs_little(after, on, device, monkeypatch):
    def clock(first, second, device, ready):
        for prepare, step in zip(ready, (first, second), strict=True):
            prepare()
            step()
        return 1.0, after

    monkeypatch.setattr(clocks, "time_both", lambda first, second, device: (2.0, 1.0))
    monkeypatch.setattr(measuring, "_errors", lambda question: (0.0, 0.0))
    monkeypatch.setattr(clocks, "clock_both", clock)
    model = models.randomized(BLOCKS["group norm, silu, conv"](), device).train()
    x = input_of(device, torch.float32)
    kgopt.optimize(model, x, recompute="auto")
    report = kgopt.report(model).recompute
    assert report.startswith("1.02e+03 ms a step" if on else "nothing: 1.05e+03 ms a step, 1e+03 ms with all kept")
    y = model(x.requires_grad_())
    assert model.seen[-1].expired() == on
    del y
    model.eval()
    kgopt.optimize(model, x.detach(), recompute="auto")
    assert kgopt.report(model).recompute == "nothing: only a step with example inputs is measured"
    assert race.PRICE == 1.03


def test_a_norm_alone_has_nothing_behind_it(device):
    model = kgopt.optimize(nn.GroupNorm(2, 8).to(device), measure=False, recompute=True)
    assert kgopt.report(model).recompute == "a norm alone has nothing behind it"


@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_a_wrong_word_is_refused(wrong):
    with pytest.raises(ValueError, match=r"recompute is .*, expected True, False or"):
        kgopt.optimize(nn.ReLU(), recompute=wrong)


class Rms(nn.Module):
    """Gives the dtype that it is given."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + 1e-6)
        return (x.float() * scale * self.weight).to(x.dtype)


@hooks
@pytest.mark.gpu
@pytest.mark.parametrize("after", ["replicate", "depthwise"])
@pytest.mark.parametrize("norm", [Rms, lambda channels: nn.GroupNorm(2, channels)], ids=["rms", "group norm"])
def test_a_backward_under_autocast(norm, after):
    """Its kernels are given what the forward made, in the dtype that it had then."""
    torch.manual_seed(0)
    last = {"replicate": {"padding": 1, "padding_mode": "replicate"}, "depthwise": {"groups": 8}}[after]
    model = nn.Sequential(nn.Conv2d(4, 8, 3), norm(8), nn.GELU(), nn.Conv2d(8, 8, 3, bias=False, **last)).cuda()
    expected = copy.deepcopy(model)
    kgopt.optimize(model, measure=False, recompute=True)
    x = torch.randn(2, 4, 12, 10, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        model(x).float().square().sum().backward()
        expected(x).float().square().sum().backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=0.02 * float(q.grad.abs().max()))
