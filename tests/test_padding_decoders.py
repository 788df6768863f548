"""Video decoders of diffusers, small, on the CPU: their causal convolutions pad and join nothing that they need not."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import kgopt
from kgopt.cli.networks import zoo

CPU = torch.device("cpu")
DECODERS = (("Wan VAE", False), ("Wan VAE", True), ("QwenImage VAE", False), ("Cosmos VAE", True))


def calls(function):
    with profile(activities=[ProfilerActivity.CPU]) as found:
        function()
    return collections.Counter(event.name.removeprefix("aten::") for event in found.events())


@pytest.mark.parametrize(("name", "channels_last"), DECODERS)
def test_a_decoder_pads_nothing(name, channels_last):
    pytest.importorskip("diffusers", exc_type=ImportError)
    entry = zoo.find_network(name)
    with entry.built(CPU, small=True) as model, torch.no_grad():
        model = model.double()
        (z,) = entry.arguments(CPU, torch.float64, small=True)
        fast = kgopt.optimize(copy.deepcopy(model), measure=False, channels_last=channels_last)
        torch.testing.assert_close(fast(z), model(z))
        before, after = calls(lambda: model(z)), calls(lambda: fast(z))
    assert before["constant_pad_nd"] > 20
    assert after["constant_pad_nd"] == 0
    # Zeros in front of a video are part of a join that was there, or one in place of the padding.
    assert after["cat"] <= before["cat"] + before["constant_pad_nd"] - 20
