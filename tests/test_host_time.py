"""How much Python a step of an optimized model runs: counts of calls, which other programs do not change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import kgopt
from kgopt.rewrite import classes, known, training

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


@pytest.mark.parametrize(
    ("name", "make", "forward", "backward"),
    [
        ("conv", lambda: nn.Conv3d(2, 2, 3, padding=1), 21, 6),
        ("transposed", lambda: nn.ConvTranspose3d(2, 2, 2, stride=2), 21, 6),
        ("norm, act", lambda: nn.Sequential(nn.InstanceNorm3d(2, affine=True), nn.LeakyReLU()), 38, 4),
        ("norm, prelu", lambda: nn.Sequential(nn.InstanceNorm3d(2, affine=True), nn.PReLU()), 44, 8),
        ("norm, sum, act", lambda: _Residual(nn.LeakyReLU()), 47, 10),
        ("norm, sum, prelu", lambda: _Residual(nn.PReLU()), 54, 8),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_calls_of_a_step(name, make, forward, backward, monkeypatch):
    """Who adds a check to what every call of a site runs does so here."""
    module = make().train()
    module = in_training(module, monkeypatch) if "norm" not in name else kgopt.optimize(module, measure=False)
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
