"""How much Python a step of an optimized model runs: counts of calls, which other programs do not change."""

from __future__ import annotations

import contextlib
import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import kgopt
from kgopt.rewrite.gradients import training
from kgopt.rewrite.norms import sites
from kgopt.rewrite.optimized import classes, known
from kgopt.rewrite.pytorch import watching

PACKAGE = str(Path(kgopt.__file__).parent)


def calls_of(function):
    """How many of the package's Python functions a call enters."""
    entered = []

    def look(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_name)

    function()
    function()
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(before)
    return len(entered)


class _Residual(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.norm, self.act = nn.InstanceNorm3d(2, affine=True), act

    def forward(self, x):
        y = self.norm(x)
        return self.act(y + x)


def in_training(conv, monkeypatch):
    """A convolution by kgopt's op, as after a measurement that it won."""
    monkeypatch.setattr(training, "_is_plain", lambda x: True)
    conv.__class__ = classes.make_class(type(conv), (("training",),))
    known.put(conv, training=training.TrainingState(measuring=True))
    monkeypatch.setattr(training, "gain_of", lambda *_: 1.0)
    return conv


def _block(norm=nn.InstanceNorm3d):
    norm = nn.GroupNorm(1, 2) if norm is nn.GroupNorm else norm(2, affine=True)
    return nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), norm, nn.LeakyReLU())


def optimized(module, monkeypatch):
    """In training, every convolution by kgopt's op."""
    kgopt.optimize(module, measure=False)
    for conv in [m for m in module.modules() if isinstance(m, (nn.Conv3d, nn.ConvTranspose3d))]:
        in_training(conv, monkeypatch)
    return module


@pytest.mark.parametrize(
    ("name", "make", "forward", "backward"),
    [
        ("conv", lambda: nn.Conv3d(2, 2, 3, padding=1), 21, 6),
        ("transposed", lambda: nn.ConvTranspose3d(2, 2, 2, stride=2), 21, 6),
        ("norm, act", lambda: nn.Sequential(nn.InstanceNorm3d(2, affine=True), nn.LeakyReLU()), 38, 4),
        ("norm, prelu", lambda: nn.Sequential(nn.InstanceNorm3d(2, affine=True), nn.PReLU()), 43, 8),
        ("conv, norm, act", _block, 58, 10),
        ("norm, sum, act", lambda: _Residual(nn.LeakyReLU()), 48, 10),
        ("norm, sum, prelu", lambda: _Residual(nn.PReLU()), 55, 8),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_calls_of_a_step(name, make, forward, backward, monkeypatch):
    """Who adds a check to what every call of a site runs does so here."""
    module = make().train()
    module = in_training(module, monkeypatch) if "norm" not in name else optimized(module, monkeypatch)
    x = torch.randn(2, 2, 3, 4, 5, dtype=torch.bfloat16, requires_grad=True)
    wanted = [x, *module.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        assert calls_of(lambda: module(x)) <= forward
        y = module(x)
    dy = torch.ones_like(y)
    assert calls_of(lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True)) <= backward


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_the_tf32_switch_is_no_part_of_a_verdict_in_half_precision(half, monkeypatch):
    def keys(x):
        found = []
        for allowed in (False, True):
            monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
            found.append(training.key_of(x))
        return found

    x = torch.randn(1, 2, 3, 3)
    off, on = keys(x)
    assert off != on
    off, on = keys(x.to(half))
    assert off == on
    with torch.autocast("cpu", half):
        off, on = keys(x)
    assert off == on


def _noting(seen, what, function):
    def noting(*args):
        seen.append(what)
        return function(*args)

    return noting


def _ways_of(call, monkeypatch):
    """Which of kgopt's ways a call takes, in order: "conv", "norm"."""
    ways = []
    with monkeypatch.context() as patch:
        for owner, name, way in ((training, "_convolve_now", "conv"), (sites.Site, "run_now", "norm")):
            patch.setattr(owner, name, _noting(ways, way, getattr(owner, name)))
        call()
    return ways


@pytest.mark.parametrize("norm", [nn.InstanceNorm3d, nn.GroupNorm])
def test_steps_without_code_in_between(norm, monkeypatch):
    torch.manual_seed(0)
    plain = _block(norm).train()
    module = optimized(copy.deepcopy(plain), monkeypatch)
    x = torch.randn(2, 2, 3, 4, 5, requires_grad=True)
    y = module(x)  # measures the convolution
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(watching, "is_quiet", lambda ask=watching.is_quiet: asked.append(True) or ask())
        assert _ways_of(lambda: module(x), monkeypatch) == ["conv", "norm"]
    assert len(asked) == 1
    torch.testing.assert_close(y, plain(x))
    dy = torch.randn_like(y)
    for a, b in zip(*(torch.autograd.grad(m(x), [x, *m.parameters()], dy) for m in (module, plain)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_steps_at_which_somebody_looks(monkeypatch):
    """Hooks and replaced code of a convolution whose step runs without a call of it."""
    module = optimized(_block().train(), monkeypatch)
    conv, x, seen = module[0], torch.randn(2, 2, 3, 4, 5, requires_grad=True), []
    module(x)
    for register in (
        conv.register_forward_hook,
        conv.register_forward_pre_hook,
        conv.register_full_backward_hook,
        nn.modules.module.register_module_forward_hook,
    ):
        handle = register(lambda *_: seen.append("hook"))
        module(x).sum().backward()
        handle.remove()
        assert seen, register
        seen.clear()
    for owner, name in ((nn.Conv3d, "forward"), (conv, "forward"), (nn.Module, "__call__"), (conv, "_conv_forward")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _noting(seen, "code", getattr(owner, name)))
            module(x)
        assert seen, name
        seen.clear()
    assert _ways_of(lambda: module(x), monkeypatch) == ["conv", "norm"]


class _Does(nn.Module):
    """Does something, once it is told to, that the steps behind it must see."""

    what = staticmethod(lambda: None)

    def forward(self, x):
        self.what()
        return x


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (lambda stack, norm: None, ["conv", "norm", "conv", "norm"]),
        (lambda stack, norm: stack.enter_context(FlopCounterMode(display=False)), ["conv", "norm"]),
        (lambda stack, norm: stack.enter_context(torch.no_grad()), ["conv", "norm", "norm"]),
        (lambda stack, norm: setattr(norm, "forward", lambda x: x), ["conv", "norm", "conv"]),
    ],
    ids=["nothing", "a mode", "no gradients", "another forward"],
)
def test_a_module_that_changes_what_follows(what, expected, monkeypatch):
    does = _Does()
    module = optimized(nn.Sequential(*_block(), does, *_block()).train(), monkeypatch)
    x = torch.randn(2, 2, 3, 4, 5, requires_grad=True)
    module(x)
    with contextlib.ExitStack() as stack:
        does.what = lambda: what(stack, module[5])
        assert _ways_of(lambda: module(x), monkeypatch) == expected
