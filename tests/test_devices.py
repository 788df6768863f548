"""Tensors of two devices in one call are an error, whichever argument it is, of every op."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from opcases import NAMES, small_calls

OPS = torch.ops.kgopt


def with_elsewhere(args, kwargs, at, elsewhere):
    args = list(args)
    args[at] = elsewhere(args[at].detach())
    return args, kwargs


def places(index, device):
    """The positions of a case's tensors."""
    _, args, _ = small_calls(device)[index]
    return [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_a_meta_tensor_beside_real_ones_is_refused(index, device):
    """group_norm took a weight on the meta device beside a real x, and so did every op: one such tensor is enough for
    the dispatcher to run the fake kernel, which looked at no device."""
    for at in places(index, device):
        name, args, kwargs = small_calls(device)[index]
        if sum(isinstance(a, torch.Tensor) for a in args) == 1:
            continue
        mixed, kwargs = with_elsewhere(args, kwargs, at, lambda t: t.to("meta"))
        with pytest.raises(RuntimeError, match=r"is on .*, expected the device of"):
            getattr(OPS, name)(*mixed, **kwargs)


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_fake_tensors_of_two_devices_are_refused(index):
    """What is traced must not differ from what runs."""
    name, args, kwargs = small_calls("cpu")[index]
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    if len(tensors) == 1:
        pytest.skip("one tensor has one device")
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        getattr(OPS, name)(*fakes, **kwargs)
        fakes[tensors[-1]] = torch.empty_like(fakes[tensors[-1]], device="meta")
        with pytest.raises(RuntimeError, match="device"):
            getattr(OPS, name)(*fakes, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_a_tensor_of_the_cpu_beside_those_of_a_gpu_is_refused(index):
    for device, other in (("cuda", "cpu"), ("cpu", "cuda")):
        for at in places(index, device):
            name, args, kwargs = small_calls(device)[index]
            if sum(isinstance(a, torch.Tensor) for a in args) == 1:
                continue
            mixed, kwargs = with_elsewhere(args, kwargs, at, lambda t: t.to(other))  # noqa: B023
            with pytest.raises(RuntimeError, match="device"):
                getattr(OPS, name)(*mixed, **kwargs)
