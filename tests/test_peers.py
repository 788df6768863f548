"""Networks of published libraries, every one optimized before its first call, against what they were: in float64.

The tables are in ``peers``; a library that is not installed skips its networks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib

import pytest
import torch
import torch.nn.functional as F

import peers
from peers import compare
from peers.library import Peer, offline

offline()
PEERS = peers.all_peers()


@functools.lru_cache(maxsize=1)
def original(peer: Peer, device: str):
    """A network, its arguments and what it does; kept for the next test, which has it in another format."""
    with torch.random.fork_rng():
        model = peer.make().to(device)
        args, kwargs = peer.inputs()
        args, kwargs = compare.to_device(args, device), compare.to_device(kwargs, device)
        return model, args, kwargs, compare.outcome(model, args, kwargs)


def skip_without(peer: Peer) -> None:
    try:
        importlib.import_module(peer.module)
    except (ImportError, RuntimeError) as error:  # a torchvision of another torch lacks its operators
        pytest.skip(f"{peer.library} cannot be imported: {error}")


def test_the_tables_hold_enough():
    assert len(PEERS) >= 150


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
def test_hardswish_is_exact(device, inplace):
    """On CUDA PyTorch's hardswish of float64 is 3e-8 off, by which networks seemed to differ; its gradient is exact."""
    x = torch.linspace(-4, 4, 1001, dtype=torch.float64, device=device, requires_grad=True)
    with compare.steady(device):
        y = F.hardswish(x * 1, inplace=inplace)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    exact = torch.where(x < -3, 0, torch.where(x > 3, x, x * (x + 3) / 6))
    torch.testing.assert_close(y, exact, rtol=1e-14, atol=1e-14)
    slope = torch.where(x < -3, 0, torch.where(x > 3, 1, x / 3 + 0.5))
    inner = (x.abs() - 3).abs() > 1e-3  # the slope jumps at 3
    torch.testing.assert_close(gradient[inner], slope.detach()[inner], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("is_steady", [True, False])
def test_bits_after_restore(is_steady):
    """Where PyTorch's own result has other bits at each call a rounding error is allowed, and nowhere else."""
    exact, near = torch.ones(3, dtype=torch.float64), torch.full((3,), 1 + 1e-12, dtype=torch.float64)
    again = {"y": exact if is_steady else near}
    compare._same_bits({"y": exact}, {"y": exact}, lambda: again)
    with pytest.raises(AssertionError) if is_steady else contextlib.nullcontext():
        compare._same_bits({"y": near}, {"y": exact}, lambda: again)
    with pytest.raises(AssertionError):
        compare._same_bits({"y": exact + 1e-6}, {"y": exact}, lambda: again)


@pytest.mark.parametrize("format", compare.FORMATS)  # the first line varies first: see original
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.id)
def test_peer(peer, format, device):
    skip_without(peer)
    with compare.steady(device):
        model, args, kwargs, expected = original(peer, device)
        compare.check(model, expected, args, kwargs, compare.FORMATS[format])
