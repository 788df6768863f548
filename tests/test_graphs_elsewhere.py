"""Graphs for a GPU that this machine does not have, as programs are compiled ahead of time: nothing is timed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_graphs import captured, needs_cuda_build
from kgopt.rewrite import backend
from kgopt.rewrite.captured.values import may_measure


def norm(x, w, k):
    return torch.sigmoid(F.group_norm(x * w.view(8, 1, 1), 2, w)) * x


def channel_norm(x, w, k):
    return F.normalize(x + 1, dim=1) * w.view(8, 1, 1) * x


def convolution(x, w, k):
    return torch.conv2d(F.relu(torch.conv2d(x, k, w)), k)


def upsampling(x, w, k):
    return torch.conv2d(F.interpolate(x, scale_factor=2.0), k, w, padding=1)


@needs_cuda_build
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("function", [norm, channel_norm, convolution, upsampling])
def test_a_gpu_that_is_not_here(function, grad, monkeypatch):
    """A site with elementwise functions around it asked for the properties of the graph's GPU, and raised."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    mode = FakeTensorMode()
    with torch.set_grad_enabled(grad):
        with mode:
            x = torch.empty(2, 8, 9, 11, device="cuda", requires_grad=grad)
            w, k = torch.empty(8, device="cuda"), torch.empty(8, 8, 3, 3, device="cuda")
        graph = captured(function, mode, x, w, k)
        report = backend.rewrite_graph(graph)
    assert [bool(row.became) for row in report.sites] == [True] * len(report.sites)
    assert bool(report.sites) is ("norm" in function.__name__)
    assert bool(report.glue) is (function is upsampling and grad)  # its gradient; what is measured stays


def test_which_devices_are_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = ["cuda", "cuda:0", "cuda:1", "cuda:2", "cpu", "meta", "mps"]
    assert [may_measure(torch.device(d)) for d in devices] == [True, True, True, False, False, False, False]
