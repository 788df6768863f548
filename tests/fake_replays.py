"""A fake of the GPU's part in replays, which replays by calling, and models to replay."""

from __future__ import annotations

import contextlib
import copy
import math

import torch
from torch import nn

import kgopt
from kgopt.rewrite.cuda_graphs import keys, machine


class FakeLane:
    """Replays what was recorded by calling it again, without the model's forward being asked for."""

    held = 2**20

    def __init__(self, machine):
        self.machine = machine

    @contextlib.contextmanager
    def aside(self):
        yield

    @contextlib.contextmanager
    def turn(self):
        yield

    def settle(self):
        self.machine.settled += 1

    def record(self, call, room=0):
        if self.machine.fails:
            raise RuntimeError(self.machine.fails)
        with torch.no_grad():
            result = call()
        self.machine.recorded += 1
        static = keys.leaves(result)

        def replay():
            self.machine.replayed += 1
            if self.machine.replay_fails:
                raise RuntimeError(self.machine.replay_fails)
            if self.machine.wrong:
                for own in static:
                    own.fill_(math.nan)
                return
            with torch.no_grad():
                again = call()
            for own, new in zip(static, keys.leaves(again), strict=True):
                if own is not new:
                    own.copy_(new)

        return replay, result


class Fake:
    def __init__(self):
        self.recorded = self.replayed = self.settled = self.asked = self.reclaimed = 0
        self.fails = self.replay_fails = ""
        self.wrong = False  # what replays give from now on
        self.times = (2.0, 1.0)
        self.recording = self.busy = False

    def takes(self, t):
        return t.device.type == "cpu" and t.dtype is not torch.float16  # half tensors stand for those elsewhere

    def place(self, t):
        return 0  # of a test's tensors some would lie where others lay, by chance

    def is_recording(self):
        return self.recording

    def seconds(self, first, second, device):
        first(), second()
        return self.times

    def memory(self, device):
        return 2**35

    def peak(self, call, device):
        call()
        return 2**27

    def reclaim(self):
        self.reclaimed += 1

    def is_busy(self, call, device, long=0.03, launches=0.5):
        self.asked += 1
        call()
        return self.busy

    def lane(self, device):
        return FakeLane(self)


def faked(monkeypatch):
    """The fake, in the GPU's place until the test is over."""
    found = Fake()
    monkeypatch.setattr(machine, "MACHINE", found)
    return found


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()
        self.scale, self.options = 1.0, {"shift": [0.0]}
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, x, flag=True):
        h = self.act(self.norm(self.conv(x)))
        return h * self.scale + self.offset + self.options["shift"][0] if flag else h - 1


def net(**options):
    model = Net().eval()
    options = {"cuda_graph": True, "measure": False, **options}
    return kgopt.optimize(model, **options)


def x_of(seed=0, n=2):
    return torch.randn(n, 4, 6, 5, generator=torch.Generator().manual_seed(seed))


def replays(fake, model, *args, **kwargs):
    """Whether a call's result is a replay's; it is checked against the plain path."""
    before, settled = fake.replayed, fake.settled
    y = model(*args, **kwargs)
    replayed = fake.replayed > before and fake.settled == settled  # a replay that is dropped takes all others along
    twin = copy.deepcopy(model)
    kgopt.restore(twin)
    torch.testing.assert_close(y, twin(*args, **kwargs), rtol=1e-4, atol=1e-4)
    return replayed


def warmed(fake, model, *args, **kwargs):
    """The second call records, so the third one replays."""
    with torch.no_grad():
        model(*args, **kwargs)
        assert fake.recorded == 0
        model(*args, **kwargs)
        assert fake.recorded == 1
        assert replays(fake, model, *args, **kwargs)
