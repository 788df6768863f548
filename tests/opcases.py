"""A small call of every op, for opcheck, the compiler tests and the sanitizer."""

from __future__ import annotations

import torch

import kgopt  # noqa: F401  (registers the ops)

OPS = torch.ops.kgopt
LSE_BACKWARD = "group_norm_tanh_hardswish_residual_logsumexp_backward"
PIPELINE = "conv2d_group_norm_tanh_hardswish_residual_logsumexp"


def small_calls(device, dtype=torch.float32, channels_last=False, requires_grad=False):
    """``(op name, args, kwargs)`` of a small call of every op that takes a tensor."""
    generator = torch.Generator().manual_seed(1)

    def rand(*shape):
        t = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        if channels_last and len(shape) in (4, 5):
            t = t.contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
        return t.requires_grad_() if requires_grad else t

    stats = torch.float64 if dtype == torch.float64 else torch.float32
    x2, x3 = rand(2, 4, 9, 10), rand(2, 4, 5, 6, 7)
    w2, w3, wt2, wt3 = rand(6, 4, 3, 3), rand(6, 4, 3, 3, 3), rand(4, 6, 3, 3), rand(4, 6, 3, 3, 3)
    b, gamma, beta = rand(6), rand(6), rand(6)
    g4, b4 = rand(4), rand(4)
    with torch.no_grad():
        _, channel_mean, mean, rstd = OPS.group_norm_mean_fwd(x2, 2, g4, b4)
        lse = OPS.logsumexp(x2, [1], True)
        variance = x2.to(stats).var([2, 3], correction=0)
        moments = torch.stack([channel_mean, variance], -1)
        dy, dlse = torch.ones_like(x2), torch.ones_like(lse)
        dstats, dout = torch.ones_like(mean), torch.ones(2, device=device, dtype=stats)
    return [
        ("conv2d", (x2, w2, b, [1, 2], [1, 0]), {}),
        ("conv3d", (x3, w3, None, [1, 1, 1], [1, 1, 1]), {}),
        ("conv_transpose2d", (x2, wt2, b, [2, 2], [1, 1], [1, 0]), {}),
        ("conv_transpose3d", (x3, wt3, b), {}),
        ("group_stats", (x2, 2), {}),
        ("group_stats_backward", (dstats, dstats, x2, mean, rstd, 2), {}),
        ("group_norm", (x2, 2, g4, b4, 1e-5, "silu"), {}),
        ("group_norm_fwd", (x3, 2, g4, b4, 1e-5, "none", "relu"), {}),
        ("group_norm_add", (x2, dy, 2, g4, b4, 1e-5, "silu"), {}),
        ("group_norm_add_fwd", (x2, dy, 2, g4, b4, 1e-5, "relu"), {}),
        ("group_norm_add", (x3, x3.detach().roll(1), 2, g4, b4, 1e-5, "leaky_relu"), {}),
        ("group_norm_prelu", (x2, rand(4), 2, g4, b4, 1e-5, dy), {}),
        ("group_norm_prelu", (x3, rand(1), 2, g4, b4), {}),
        ("group_norm_prelu_fwd", (x3, rand(4), 2, g4, b4), {}),
        ("group_norm_prelu_backward", (dy, x2, mean, rstd, rand(4), 2, g4, b4, None), {}),
        ("group_norm_add_leaky_relu_backward", (dy, x2, x2.detach().roll(1), mean, rstd, 2, g4, b4, 0.1), {}),
        ("group_norm_by_sample", (x2, rand(2, 4), rand(2, 4), 2, 1e-5, "silu"), {}),
        ("group_norm_by_sample_fwd", (x3, rand(2, 4), rand(2, 4), 2), {}),
        ("group_norm_by_sample_backward", (dy, x2, mean, rstd, rand(2, 4), rand(2, 4), 2, "silu"), {}),
        ("group_norm_backward", (dy, x2, mean, rstd, 2, g4, b4, "silu"), {}),
        ("channel_norm", (x3, g4, b4, "layer", 1e-5, "silu"), {}),
        ("channel_norm", (x2, g4, None, "rms", 1e-3), {}),
        ("channel_norm_backward", (dy, x2, g4, b4, "l2", 1e-12, "silu"), {}),
        ("group_norm_mean", (x3, 2, g4, b4), {}),
        ("group_norm_mean_fwd", (x2, 2, g4, b4), {}),
        ("group_norm_mean_backward", (dout, x2, channel_mean, mean, rstd, 2, g4), {}),
        (LSE_BACKWARD, (dlse.to(stats), x2, mean, rstd, 2, g4, b4), {}),
        ("activation", (x2, "tanh+hardswish"), {}),
        ("activation_backward", (dy, x2, "gelu"), {}),
        ("conv_add", (x2, w2, b, rand(2, 6, 9, 5), [1, 2], [1, 1], [1, 1], [0, 0], 1, False, 2.0), {}),
        (
            "conv_backward",
            (rand(2, 6, 9, 4), x2, w2, [1, 2], [1, 0], [1, 1], [0, 0], 1, False, [True, True, True]),
            {},
        ),
        ("conv_add_moments", (x3, w3, b, None, [1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0], 1, False, 1.0, "silu"), {}),
        # eps: under vmap, moments are drawn with a negative factor too.
        ("group_norm_moments", (x2, moments, 2, g4, b4, 10.0, "silu"), {}),
        ("group_norm_maps", (x2, None, rand(2, 4, 3, 5), rand(2, 4, 3, 5), 2, g4, b4, 1e-5, "silu"), {}),
        ("group_norm_maps", (x3, None, rand(2, 4, 5, 3, 1), rand(2, 4, 5, 3, 1), 2), {}),
        ("group_norm_conv1x1", (x2, None, 2, g4, b4, 1e-5, "silu", rand(3, 4, 1, 1), None), {}),
        (
            "group_norm_conv",
            (x2, None, 2, g4, b4, 1e-5, "silu", w2, b, rand(2, 6, 9, 5), [1, 2], [1, 1], [1, 1], [0, 0], 1, False, 2.0),
            {},
        ),
        (
            "group_norm_conv",
            (x3, None, 2, g4, b4, 1e-5, "silu", w3, b, None, [1] * 3, [0] * 3, [1] * 3, [0] * 3, 1, False, 2.0, "relu"),
            {"replicate": [1, 0, 2, 1, 0, 3]},
        ),
        (
            "group_norm_conv_moments",
            (x3, None, 2, g4, b4, 1e-5, "relu", w3, b, None, [1] * 3, [1] * 3, [1] * 3, [0] * 3, 1, False, 1.0, "silu"),
            {},
        ),
        ("upsample_linear", (x3, rand(2, 4, 10, 12, 14)), {}),
        ("upsample_linear_backward", (rand(2, 3, 4, 10, 6),), {}),
        ("upsample_nearest", (x3, [2, 1, 3]), {}),
        ("upsample_nearest_backward", (rand(2, 3, 4, 9), [2, 3]), {}),
        ("pad_replicate", (x3, [1, 0, 2, 1, 0, 3]), {}),
        ("in_format", (x3, not channels_last), {}),
        # Numerical derivatives want all digits.
        ("in_format", (x3, not channels_last, torch.float64 if stats is torch.float64 else torch.float16), {}),
        ("max_pool", (x2, [3, 2], [2, 2], [1, 0]), {}),
        ("upsample_conv_weight", (rand(6, 2, 3, 4), [2, 3], 2), {}),
        ("logsumexp", (x2, [1], True), {}),
        ("logsumexp_backward", (dlse, x2, lse, [1], True), {}),
        ("mean", (x2, [0, 2]), {}),
        ("scaled_softmax", (x2, 0.5, x2.dtype), {}),
        ("mean_backward", (rand(4, 10), [2, 4, 9, 10], [0, 2]), {}),
        ("conv3d_group_norm_mean", (x3, w3, b, 3, gamma, beta), {}),
        ("conv3d_group_norm_mean_fwd", (x3, w3, b, 3, gamma, beta), {}),
        ("conv_transpose3d_relu_group_norm", (x3, wt3, None, 3, gamma, beta), {}),
        ("conv_transpose3d_relu_group_norm_fwd", (x3, wt3, None, 3, gamma, beta), {}),
        (PIPELINE, (x2, w2, b, 3, gamma, beta), {}),
        (PIPELINE + "_fwd", (x2, w2, b, 3, gamma, beta), {}),
    ]


NAMES = [name for name, _, _ in small_calls("cpu")]
# In graphs of a forward and its backward alone, without derivatives: tests/test_scaled_half_training.py.
BEHIND_AUTOGRAD = ("scaled_half", "conv_scaled_half", "conv_scaled_half_backward")
