"""Wrong arguments: each raises, names the argument and its value, and leaves the device usable."""

from __future__ import annotations

import pytest
import torch

from kgopt import functional
from opcases import PIPELINE

OPS = torch.ops.kgopt


def norm(x=(2, 24, 4, 4), groups=8, weight=None, bias=None, eps=1e-5, act="none", dtype=torch.float32):
    def call(device):
        def tensor(shape):
            return torch.ones(shape, device=device, dtype=dtype) if isinstance(shape, tuple) else shape

        return OPS.group_norm(tensor(x), groups, tensor(weight), tensor(bias), eps, act)

    return call


def conv(x=(2, 3, 8, 8), weight=(4, 3, 3, 3), bias=None, transposed=False, dtype=torch.float32, **options):
    def call(device):
        tensors = [None if s is None else torch.ones(s, device=device, dtype=dtype) for s in (x, weight, bias)]
        op = OPS.conv_transpose2d if transposed else OPS.conv2d
        return op(*tensors, **options)

    return call


CASES = {
    "rank": (norm(x=(3,)), r"x has shape \[3\], expected at least 2 dimensions"),
    "groups": (norm(groups=5), "num_groups is 5, expected a positive divisor of C = 24"),
    "no groups": (norm(groups=0), "num_groups is 0"),
    "negative groups": (norm(groups=-2), "num_groups is -2"),
    "weight shape": (norm(weight=(7,)), r"weight has shape \[7\], expected \[24\]"),
    "bias rank": (norm(bias=(24, 1)), r"bias has shape \[24, 1\], expected \[24\]"),
    "weight dtype": (norm(weight=torch.ones(24, dtype=torch.float64)), "weight"),
    "integers": (norm(dtype=torch.int64), "x has dtype int64, expected float32"),
    "complex": (norm(dtype=torch.complex64), "x has dtype complex64"),
    "act": (norm(act="swish"), "unknown activation 'swish' in 'swish'; expected .* none relu"),
    "act in a chain": (norm(act="relu+foo"), "unknown activation 'foo' in 'relu\\+foo'"),
    "conv rank": (conv(x=(3, 8, 8)), r"x has shape \[3, 8, 8\], expected 4 dimensions \[N, C, H, W\]"),
    "conv channels": (conv(x=(2, 5, 8, 8)), r"weight has shape \[4, 3, 3, 3\], expected \[out_channels, C / groups"),
    "conv groups": (conv(groups=2), "groups is 2, expected a positive divisor of C = 3 and of weight.size"),
    "conv stride": (conv(stride=[0, 1]), r"stride is \[0, 1\], expected positive values"),
    "conv negative stride": (conv(stride=[-1, 1]), r"stride is \[-1, 1\]"),
    "conv padding": (conv(padding=[-1, 0]), r"padding is \[-1, 0\], expected non-negative"),
    "conv dilation": (conv(dilation=[1, 0]), r"dilation is \[1, 0\], expected positive"),
    "conv bias": (conv(bias=(5,)), r"bias has shape \[5\], expected \[4\]"),
    "conv integers": (conv(dtype=torch.int32), "x has dtype int32"),
    "conv output": (conv(x=(2, 3, 2, 8)), r"the output would have size \[2, 4, -?\d+, 6\], expected at least 1"),
    "conv backend": (conv(backend="cudnn"), "backend is 'cudnn', expected auto, kgopt or aten"),
    "conv_transpose channels": (conv(weight=(5, 4, 3, 3), transposed=True), r"weight has shape \[5, 4, 3, 3\]"),
    "conv_transpose output_padding": (
        conv(weight=(3, 4, 3, 3), transposed=True, output_padding=[2, 0]),
        r"output_padding is \[2, 0\], expected smaller than stride",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, device):
    call, message = CASES[name]
    with pytest.raises(RuntimeError, match=message):
        call(device)
    assert functional.activation(torch.ones(3, device=device), "relu").sum() == 3


def test_bad_reduction(device):
    x = torch.ones(2, 3, device=device)
    with pytest.raises(RuntimeError, match=r"dim is \[2\], expected values from -2 to 1"):
        OPS.logsumexp(x, [2])
    with pytest.raises(RuntimeError, match=r"dims is \[0, -2\], expected each dim once"):
        OPS.mean(x, [0, -2])
    with pytest.raises(RuntimeError, match="x has dtype int64"):
        OPS.mean(x.long(), [0])


def test_bad_gradients(device):
    x = torch.ones(2, 4, 3, device=device)
    _, mean, rstd = OPS.group_norm_fwd(x, 2)
    with pytest.raises(RuntimeError, match=r"dy has shape \[2, 4\], expected \[2, 4, 3\]"):
        OPS.group_norm_backward(x[..., 0], x, mean, rstd, 2)
    with pytest.raises(RuntimeError, match=r"mean has shape \[2, 4\], expected \[2, 2\]"):
        OPS.group_norm_backward(x, x, x[..., 0], rstd, 2)
    with pytest.raises(RuntimeError, match="rstd has dtype float64, expected float32"):
        OPS.group_norm_backward(x, x, mean, rstd.double(), 2)


@pytest.mark.parametrize("fused", ["conv3d_group_norm_mean", "conv_transpose3d_relu_group_norm", PIPELINE])
def test_bad_pipeline(fused, device):
    rank = 2 if fused == PIPELINE else 3
    x, weight = torch.ones(2, 4, *(6,) * rank, device=device), torch.ones(4, 4, *(3,) * rank, device=device)
    op = getattr(OPS, fused)
    with pytest.raises(RuntimeError, match=f"{fused}: num_groups is 3, expected a positive divisor of C = 4"):
        op(x, weight, None, 3)
    with pytest.raises(RuntimeError, match=f"{fused}: x has shape"):
        op(x[0], weight, None, 2)
    with pytest.raises(RuntimeError, match=r"weight has shape \[3\], expected \[4\]"):
        op(x, weight, None, 2, torch.ones(3, device=device))


def test_cpu_has_no_convolution_of_its_own():
    with pytest.raises(RuntimeError, match="backend is 'kgopt', expected auto or aten for x on the cpu"):
        functional.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), backend="kgopt")


@pytest.mark.gpu
def test_tensors_on_two_devices():
    x = torch.ones(2, 4, 5, 5, device="cuda")
    with pytest.raises(RuntimeError, match="weight is on cpu, expected the device of x, cuda:0"):
        OPS.group_norm(x, 2, torch.ones(4))
    with pytest.raises(RuntimeError, match="weight is on cpu, expected the device of x, cuda:0"):
        OPS.conv2d(x, torch.ones(4, 4, 3, 3))
