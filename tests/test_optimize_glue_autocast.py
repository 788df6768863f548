"""What runs between the norms under autocast: convolutions with cast tensors, functions that keep their dtype."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt import accuracy
from kgopt.rewrite import glue
from kgopt.rewrite.glue import plans
from optimize_pairs import all_faster


class Net(nn.Module):
    """Convolutions of what autocast casts and of what has its dtype already, a sum, pooling, upsampling."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        conv, up = ((nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d))[rank - 2]
        self.first, self.norm = conv(4, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.second, self.up = conv(8, 8, 3, padding=1), up(8, 4, 2, stride=2)
        self.rank = rank

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)))
        y = (F.max_pool2d, F.max_pool3d)[self.rank - 2](self.second(y) + y, 2)
        return self.up(y), F.interpolate(y, scale_factor=2)


def made(rank=2, dtype=torch.bfloat16, device="cpu"):
    """The original, its optimized copy, and x."""
    torch.manual_seed(0)
    original = Net(rank).eval().to(device)
    model, x = copy.deepcopy(original), torch.randn(2, 4, *[8] * rank, device=device)
    kgopt.optimize(model, measure=False)
    with torch.autocast(device, dtype):
        all_faster(model, x)
    return original, model, x


def casts_of(run, monkeypatch):
    """What the convolutions that a call runs by plans are cast to, and its results."""
    seen, run_plan = [], plans.run_plan

    def noting(conv, x, plan, *more, **how):
        seen.append(plan.cast)
        return run_plan(conv, x, plan, *more, **how)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(plans, "run_plan", noting)
        found = run()
    return seen, found


def assert_close(actual, expected):
    """To rounding in half precision, where that was computed in; the dtypes, too."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_convolutions_under_autocast(rank, dtype, monkeypatch):
    original, model, x = made(rank, dtype)
    with torch.autocast("cpu", dtype):
        seen, y = casts_of(lambda: model(x), monkeypatch)
        assert seen == [dtype] * 3
        with torch.no_grad():
            assert_close(y, original(x))
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert_close(twin(x), original(x))
        grads = [torch.autograd.grad(m(x)[0].float().mean(), m.first.weight) for m in (model, original)]
        assert_close(*grads)
    with torch.no_grad():
        for m in (model, original):
            m.first.weight.mul_(2)
            m.second.bias.add_(1)
        with torch.autocast("cpu", dtype):  # parameters are read at each call
            assert_close(model(x), original(x))


def test_a_verdict_is_that_of_its_autocast(monkeypatch):
    original, model, x = made()
    for context in (
        torch.autocast("cpu", torch.float16),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", torch.float16),
    ):
        with context:
            seen, y = casts_of(lambda: model(x), monkeypatch)
            assert seen == []
            with torch.no_grad():
                assert_close(y, original(x))
    all_faster(model, x)  # without autocast, beside what there is
    assert casts_of(lambda: model(x), monkeypatch)[0] == [None] * 3
    with torch.autocast("cpu", torch.bfloat16):
        seen, y = casts_of(lambda: model(x), monkeypatch)
        assert seen == [torch.bfloat16] * 3
        with torch.autocast("cpu", enabled=False):
            assert casts_of(lambda: model(x), monkeypatch)[0] == [None] * 3


class Tails(nn.Module):
    """What stands behind a convolution: sums with a tensor of autocast's dtype and of another, activations."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5))
        self.acts = nn.ModuleList((nn.ReLU(), nn.Softplus()))

    def forward(self, x):
        y = self.convs[0](x)
        y = self.convs[1](y) + y
        y = torch.relu(self.convs[2](y) + x)
        y = self.acts[0](self.convs[3](y))
        return self.acts[1](self.convs[4](y)), y


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_follows_a_convolution_has_pytorchs_dtype(device, monkeypatch):
    torch.manual_seed(0)
    original, x = Tails().eval().to(device), torch.randn(2, 4, 8, 8, device=device)
    model = copy.deepcopy(original)
    kgopt.optimize(model, measure=False)
    with torch.autocast(device, torch.bfloat16):
        all_faster(model, x)
        seen, y = casts_of(lambda: model(x), monkeypatch)
        assert seen == [torch.bfloat16] * 5
        with torch.no_grad():
            expected = original(x)
    assert [t.dtype for t in y] == [t.dtype for t in expected]
    assert_close([t.float() for t in y], [t.float() for t in expected])


def test_float64_and_other_dtypes_under_autocast():
    conv, x = nn.Conv2d(4, 8, 3), torch.randn(1, 4, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.bfloat16()):
            call = glue.recognize(F.conv2d, (given, conv.weight, conv.bias), {})
            assert call.cast is torch.bfloat16
            assert_close([call.run()], [F.conv2d(given, conv.weight, conv.bias)])
        wide = [t.double() for t in (x, conv.weight, conv.bias)]
        for mixed in (wide, [x, *wide[1:]], [wide[0], conv.weight, conv.bias]):
            assert glue.recognize(F.conv2d, tuple(mixed), {}) is None


def test_functions_that_autocast_gives_float32_are_pytorchs(monkeypatch):
    x, search = torch.randn(1, 2, 8, 8).bfloat16(), glue.search
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        call = glue.recognize(F.max_pool2d, (x, 2), {})
        monkeypatch.setattr(search, "SMALL", 0)
        monkeypatch.setattr(search.clocks, "busy_both", lambda *_: (2.0, 1.0))
        assert search._fastest(call, lambda: F.max_pool2d(x, 2)) == "kgopt"
        assert search._fastest(call, lambda: F.max_pool2d(x, 2).float()) == ""


def test_compiled_code_is_the_compilers():
    original, model, x = made()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), original(x))
    for state in map(glue.state_of, glue.modules_of(model)):
        assert state.always == {}
        assert state.kinds == ()


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_optimize_under_autocast(rank, dtype, last, monkeypatch):
    torch.manual_seed(0)
    original = Net(rank).eval().cuda()
    x = torch.randn(2, 4, *([128, 96] if rank == 2 else [48, 40, 32]), device="cuda")
    if last:
        x = x.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[rank - 2])
    with torch.no_grad():
        exact = copy.deepcopy(original).double()(x.double())
        with torch.autocast("cuda", dtype):
            model = kgopt.optimize(copy.deepcopy(original), x)
            forced = copy.deepcopy(original)
            kgopt.optimize(forced, measure=False)
            all_faster(forced, x)
            expected = original(x)
            for found in (model(x), forced(x)):
                for a, e, truth in zip(found, expected, exact, strict=True):
                    assert a.dtype is e.dtype
                    allowed = accuracy.allowed(dtype, accuracy.relative_error(e, truth))
                    assert accuracy.relative_error(a, truth) <= allowed
            assert dtype in casts_of(lambda: forced(x), monkeypatch)[0]
