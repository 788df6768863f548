"""200 random convolutions: exact on small integers, as accurate as PyTorch on real numbers, by every path."""

from __future__ import annotations

import pytest
import torch

from kgopt.cli.convs import random_convs
from tolerances import assert_as_good_as_torch, round_tf32

pytestmark = pytest.mark.gpu

CONVS = random_convs(200, 7, most_flops=5e7)
BACKENDS = ("auto", "kgopt", "kgopt:implicit_gemm", "kgopt:tap_columns", "kgopt:position_rows", "kgopt:few_channels")
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
DTYPES = {"tf32": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}


def layouts(x, weight):
    yield x, weight
    yield tuple(t.contiguous(memory_format=FORMATS[t.dim()]) for t in (x, weight))


def results(conv, x, weight):
    """(backend, result, the tensors it is of) of every path that can run it, in both memory formats."""
    for a, b in layouts(x, weight):
        for backend in BACKENDS:
            try:
                y = conv.call(a, b, backend=backend)
            except RuntimeError as error:
                if "cannot run this convolution" not in str(error):
                    raise
            else:
                yield backend, y, (a, b)


@pytest.mark.parametrize("index", range(len(CONVS)))
def test_random_conv(index, poisoned):
    conv, generator = CONVS[index], torch.Generator("cuda").manual_seed(index)

    def integers(shape, most):
        return torch.randint(-most, most + 1, shape, device="cuda", generator=generator).double()

    x, weight = integers(conv.shape, 3), integers(conv.weight_shape, 2)
    exact = conv.torch_call(x, weight)
    for precision, dtype in DTYPES.items():
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        a, b = x.to(dtype), weight.to(dtype)
        for backend, y, tensors in results(conv, a, b):
            # cuDNN rounds some halves twice, and has transforms that are not exact: its own result counts too.
            right = torch.equal(y, exact.to(dtype)) or (backend == "auto" and torch.equal(y, conv.torch_call(*tensors)))
            assert right, (precision, backend)

    x = torch.randn(conv.shape, device="cuda", generator=generator)
    weight = torch.randn(conv.weight_shape, device="cuda", generator=generator)
    exact = conv.torch_call(x.double(), weight.double())
    for precision, dtype in DTYPES.items():
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        a, b, also, factor = x.to(dtype), weight.to(dtype), None, 2.0
        if dtype != torch.float32:
            exact = conv.torch_call(a.double(), b.double())
        elif precision == "tf32":  # wgmma cuts x off where the ideal rounds it, which a few outputs do not average out
            also, factor = conv.torch_call(round_tf32(x).double(), round_tf32(weight).double()).float(), 2.5
        expected = conv.torch_call(a, b)
        for _, y, _ in results(conv, a, b):
            assert_as_good_as_torch(y, expected, exact, also, factor)
