"""The three fused pipelines as tests call them: arguments, references, gradients and tolerances."""

from __future__ import annotations

import torch

from kgopt import functional, reference
from tolerances import assert_as_good_as_torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


# name: (function, reference, c_in, c_out, norm groups, size, kernel, list of convolution arguments)
PIPELINES = {
    "mean": (functional.conv3d_group_norm_mean, reference.conv3d_group_norm_mean_ref, False, 3),
    "relu_norm": (functional.conv_transpose3d_relu_group_norm, reference.conv_transpose3d_relu_group_norm_ref, True, 3),
    "logsumexp": (
        functional.conv2d_group_norm_tanh_hardswish_residual_logsumexp,
        reference.conv2d_group_norm_tanh_hardswish_residual_logsumexp_ref,
        False,
        2,
    ),
}


# c_in, c_out, norm groups, sizes (last `rank` used), kernel, options
CASES = {
    "headline channels": {"mean": (3, 24, 8), "relu_norm": (6, 16, 8), "logsumexp": (8, 64, 16)},
    "one group": {"mean": (2, 10, 1), "relu_norm": (3, 5, 1), "logsumexp": (5, 12, 1)},
    "odd channels": {"mean": (5, 33, 11), "relu_norm": (7, 9, 3), "logsumexp": (3, 15, 5)},
    "wide": {"mean": (17, 72, 8), "relu_norm": (20, 36, 4), "logsumexp": (9, 100, 10)},
    "too wide for one block": {"mean": (40, 130, 10), "relu_norm": (24, 70, 7), "logsumexp": (4, 136, 8)},
}


OPTIONS = {
    "plain": {},
    "strided": {"stride": 2, "padding": 1},
    "dilated": {"dilation": 2, "padding": (0, 1, 2)},
}


def make(pipeline, case, dtype, device, scale=1.0, offset=0.0, options=None, batch=3):
    _, _, transposed, rank = PIPELINES[pipeline]
    c_in, c_out, groups = CASES[case][pipeline]
    size = (7, 9, 34)[-rank:] if not transposed else (4, 5, 6)
    kernel = (3, 3, 3)[-rank:]
    x = (torch.randn(batch, c_in, *size, device=device) * scale + offset).to(dtype)
    shape = (c_in, c_out, *kernel) if transposed else (c_out, c_in, *kernel)
    weight = (torch.randn(shape, device=device) * 0.3).to(dtype)
    bias, gamma, beta = ((torch.randn(c_out, device=device)).to(dtype) for _ in range(3))
    options = {k: v[-rank:] if isinstance(v, tuple) else v for k, v in (options or {}).items()}
    return [x, weight, bias, groups, gamma, beta], options


def upcast(args):
    """fp64 and on the CPU: PyTorch's hardswish divides by a float 6 on CUDA, in double too."""
    return [a.double().cpu() if isinstance(a, torch.Tensor) else a for a in args]


def gradients(run, values, dout):
    """Of the tensors among `values`, on dout's device."""
    leaves = [v.detach().clone().requires_grad_() if isinstance(v, torch.Tensor) else v for v in values]
    y = run(*leaves)
    y.backward(dout.to(y))
    return [leaf.grad.to(dout.device) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def last_format(x):
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def mean_tolerance(args):
    """The first pipeline's result is a mean of terms as large as gamma and beta."""
    return float(args[4].double().abs().mean() + args[5].double().abs().mean())


def check(pipeline, y, args, options):
    ref = PIPELINES[pipeline][1]
    exact = ref(*upcast(args), **options).to(y.device)
    expected = ref(*args, **options)
    if pipeline == "mean":
        error = float((y.double() - exact).abs().max())
        torchs = float((expected.double() - exact).abs().max())
        rounding = {torch.float64: 1e-12, torch.float32: 1e-6}.get(y.dtype, torch.finfo(y.dtype).eps)
        assert y.dtype == expected.dtype
        assert error <= 2 * torchs + rounding * mean_tolerance(args), (error, torchs)
    else:
        assert_as_good_as_torch(y, expected, exact)


def kernels_of(run):
    """The names of what runs on the GPU."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return " ".join(event.name for event in profile.events())
