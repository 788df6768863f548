"""Random forwards: whatever surrounds norms and activations, the optimized code does what the original did.

Values, exceptions, and in-place changes are compared, so a rewriting that loses a read of a value shows.
"""

from __future__ import annotations

import importlib.util
import os
import random
import textwrap

import pytest
import torch

import kgopt

PROGRAMS = int(os.environ.get("KGOPT_TEST_PROGRAMS", "100"))

HEADER = """
import contextlib
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.n3 = nn.GroupNorm(2, 4), nn.GroupNorm(4, 4), nn.InstanceNorm2d(4, affine=True)
        self.act, self.relu, self.drop = nn.SiLU(), nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.kept = None

    def forward(self, a, flag, count):
        b = a * 2
        c = a - 1
"""

NAMES = ("a", "b", "c")


class Program:
    """Writes one forward."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def name(self):
        return self.random.choice(NAMES)

    def value(self, depth=2):
        """An expression; mostly what chains are made of."""
        if depth == 0 or self.random.random() < 0.25:
            return self.name()
        inner = self.value(depth - 1)
        return self.random.choice(
            [
                f"self.n1({inner})",
                f"self.n2({inner})",
                f"self.n3({inner})",
                f"self.n1({inner})",
                f"self.act({inner})",
                f"self.act({inner})",
                f"self.relu({inner})",
                f"self.drop({inner})",
                f"self.conv({inner})",
                f"F.relu({inner}, inplace=True)",
                f"F.silu({inner})",
                f"F.leaky_relu({inner}, 0.2)",
                f"({inner}).tanh()" if inner[-1] == ")" else f"{inner}.tanh()",
                f"({inner} + {self.value(depth - 1)})",
                f"torch.sigmoid({inner})",
                f"(self.act({inner}) if flag else {self.value(depth - 1)})",
                f"[self.act(t) for t in (self.n1({inner}), {self.name()})][0]",
                f"(lambda: self.act({inner}))()",
                f"({self.name()} := {inner})",
                f"torch.stack([{inner}, {self.value(depth - 1)}]).sum(0)",
            ]
        )

    def simple(self):
        r, v = self.random, self.name()
        norm, act = r.choice(["self.n1", "self.n2", "self.n3"]), r.choice(["self.act", "self.relu", "F.silu"])
        w = self.name()
        return r.choice(
            [
                [f"{v} = {norm}({w})", f"{v} = {act}({v})"],
                [f"{v} = {norm}({w})", f"{self.name()} = {act}({v})"],
                [f"{v} = {norm}({w})", f"{self.name()} = {act}({v}) + {self.name()}"],
                [f"{v} = {norm}({w})", f"{self.name()} = self.conv({act}({v}))"],
                [f"{v} = self.conv({w})", f"{v} = F.relu({v}, inplace=True)", f"{v} = {norm}({v})"],
                [
                    f"{v} = self.conv({w})",
                    f"{v} = {norm}({v})",
                    f"{self.name()} = {v}.flatten(1).mean(1).view(-1, 1, 1, 1) + a",
                ],
                [f"{v} = {self.value()}"],
                [f"{v} = {self.value(3)}"],
                [f"{v} = {norm}({w})", f"if flag: {v} = {v} * 2", f"{v} = {act}({v})"],
                [f"{v} += {self.name()}"],
                [f"{v} = {w}"],
                [f"{v} = {v} * 0.5 + 0.1"],
                [f"{v}.add_(0.25)"],
                [f"{v}, {w} = {self.name()}, {self.name()}"],
                [f"self.kept = {self.value(1)}"],
                [f"{v} = {w} if self.kept is None else self.kept"],
                [f"del {v}", f"{v} = {r.choice([n for n in NAMES if n != v])} * 1"],
                [f"if count > {r.randint(0, 3)}: return {self.value()}"],
                [f"if count > {r.randint(1, 4)}: raise ValueError({v}.sum().item())"],
            ]
        )

    def block(self, depth, in_loop=False):
        lines = []
        for _ in range(self.random.randint(1, 4)):
            kind = self.random.random()
            if depth == 0 or kind < 0.6:
                lines += self.simple()
                if in_loop and self.random.random() < 0.2:
                    lines.append(
                        f"if count == {self.random.randint(0, 3)}: " + self.random.choice(["break", "continue"])
                    )
                continue
            inner = textwrap.indent("\n".join(self.block(depth - 1, in_loop)), "    ").split("\n")
            other = textwrap.indent("\n".join(self.block(depth - 1, in_loop)), "    ").split("\n")
            looped = textwrap.indent("\n".join(self.block(depth - 1, True)), "    ").split("\n")
            v = self.name()
            lines += self.random.choice(
                [
                    ["if flag:", *inner, "else:", *other, f"{v} = self.act({self.name()})"],
                    [
                        "if flag:",
                        *inner,
                        f"    {v} = self.n1({v})",
                        "else:",
                        *other,
                        f"    {v} = self.n2({v})",
                        f"{v} = self.act({v})",
                    ],
                    ["if flag:", *inner, f"    {v} = self.n1({v})", f"{v} = self.act({v})"],
                    ["for i in range(2):", *looped, "    count = count + i"],
                    ["for i in range(2):", *looped, "    count += 1", "else:", *inner],
                    ["while count < 2:", "    count += 1", *looped],
                    ["try:", *inner, "except ValueError:", *other],
                    [
                        "try:",
                        *inner,
                        f"    if flag: raise ValueError({v})",
                        "except ValueError as error:",
                        *other,
                        "finally:",
                        f"    {v} = {v} * 1",
                    ],
                    ["with contextlib.suppress(ValueError):", *inner],
                    ["with torch.autograd.profiler.record_function('x'):", *inner],
                    [f"def nested(t={v}):", f"    return self.act(self.n1(t)) + {self.name()}", f"{v} = nested()"],
                ]
            )
        return lines

    def source(self):
        body = [*self.block(2), f"return a + b * 2 + c * 3 + {self.value()}"]
        return HEADER + textwrap.indent("\n".join(body), "        ") + "\n"


def load(source, path):
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome(model, flag, count):
    """The result or the exception, what the input has become, and what the module kept."""
    torch.manual_seed(1)
    x = torch.linspace(-2, 2, 2 * 4 * 3 * 5).view(2, 4, 3, 5).sin()
    model.kept = None
    with torch.no_grad():
        try:
            result = model(x, flag, count)
        except (ValueError, UnboundLocalError, NameError) as error:
            result = type(error).__name__
            if isinstance(error, ValueError) and isinstance(error.args[0], float):
                result = torch.tensor(error.args[0])
    return result, x, model.kept


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_programs(seed, tmp_path):
    source = Program(seed).source()
    try:
        compile(source, "program", "exec")
    except SyntaxError:
        return  # a walrus where Python does not allow one
    module = load(source, tmp_path / f"program_{seed}.py")
    torch.manual_seed(0)
    original = module.Net()
    with torch.no_grad():
        for p in original.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    model = module.Net()
    model.load_state_dict(original.state_dict())
    kgopt.optimize(model, measure=False)
    reasons = [row.reason for row in kgopt.report(model).sites]
    assert not any("other source" in r or "has no source" in r for r in reasons), reasons
    for training in (True, False):
        model.train(training), original.train(training)
        for flag in (True, False):
            for count in (0, 1, 3):
                for a, b in zip(outcome(model, flag, count), outcome(original, flag, count), strict=True):
                    assert type(a) is type(b), source
                    if isinstance(a, torch.Tensor):
                        same = torch.allclose(
                            a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max().clamp_min(1)), equal_nan=True
                        )
                        assert same, f"{source}\nflag={flag} count={count} training={training}"
                    else:
                        assert a == b, source
