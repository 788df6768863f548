"""Fused pipelines of few channels, which have kernels of their own on Hopper (csrc/conv3d/few_channels)."""

from __future__ import annotations

import pytest
import torch

from pipeline_cases import PIPELINES, check, last_format, mean_tolerance, upcast
from tolerances import assert_as_good_as_torch, relative_error, round_tf32

# c_in, c_out, norm groups, size, kernel, options: over 32 output channels, which are rows of the products on Hopper
CHANNEL_ROWS = {
    "64 positions": (8, 64, 16, (20, 70), (3, 3), {}),
    "32 positions": (8, 64, 16, (9, 34), (3, 3), {}),
    "several tiles": (6, 64, 8, (150, 300), (3, 3), {}),
    "least channels": (1, 33, 3, (7, 40), (3, 3), {"padding": 1}),
    "strided rows": (5, 48, 6, (15, 66), (3, 3), {"stride": (2, 1), "padding": (0, 2)}),
    "dilated": (4, 40, 5, (17, 90), (3, 2), {"dilation": (2, 3)}),
    "one tap": (16, 64, 64, (6, 50), (1, 1), {}),
    "one row": (7, 36, 1, (3, 5), (3, 3), {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "misaligned"])
@pytest.mark.parametrize("dtype", ["tf32", torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CHANNEL_ROWS)
@pytest.mark.parametrize("pipeline", ["mean", "logsumexp"])
def test_pipeline_channels_as_rows(pipeline, case, dtype, layout, poisoned):
    c_in, c_out, groups, size, kernel, options = CHANNEL_ROWS[case]
    if pipeline == "mean":
        size, kernel = (3, *size), (2, *kernel)
        options = {
            name: (v, v, v) if isinstance(v, int) else (1 - (name == "padding"), *v) for name, v in options.items()
        }
        c_in = min(c_in, 4)
    check_layout(pipeline, c_in, c_out, groups, size, kernel, options, dtype, layout)


def check_layout(pipeline, c_in, c_out, groups, size, kernel, options, dtype, layout):
    tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = tf32
    kind = torch.float32 if tf32 else dtype
    x = torch.randn(3, c_in, *size, device="cuda").to(kind)
    if layout == "channels_last":
        x = x.contiguous(memory_format=last_format(x))
    elif layout == "misaligned":
        x = torch.cat([x, x[..., :1]], -1)[..., 1:]
    weight = (torch.randn(c_out, c_in, *kernel, device="cuda") * 0.3).to(kind)
    bias, gamma, beta = (torch.randn(c_out, device="cuda").to(kind) for _ in range(3))
    args = [x, weight, bias, groups, gamma, beta]
    function, ref, *_ = PIPELINES[pipeline]
    backends = ["auto", "kgopt"]  # small ones are one launch unless the extension's convolutions are asked for
    if not tf32:
        for backend in backends:
            check(pipeline, function(*args, **options, backend=backend), args, options)
        return
    exact = ref(*upcast(args), **options).cuda()
    ideal = ref(*upcast([round_tf32(args[0]), round_tf32(args[1]), *args[2:]]), **options).cuda()
    scale = mean_tolerance(args) if pipeline == "mean" else float(exact.abs().mean())
    allowed = 2 * float((ideal - exact).abs().max()) + 2e-6 * scale
    for backend in backends:
        y = function(*args, **options, backend=backend)
        assert float((y.double() - exact).abs().max()) <= allowed


# c_in, c_out, norm groups, size, kernel, options: three kernel rows side by side, on Hopper from gathered chunks
GATHERED = {
    "a step and a half": (3, 24, 8, (5, 9, 36), (3, 3, 3), {}),
    "three blocks of K": (8, 32, 8, (4, 7, 20), (3, 3, 3), {"padding": 1}),
    "odd": (5, 17, 1, (5, 11, 37), (3, 3, 3), {"padding": (0, 2, 1)}),
    "strided depth": (3, 20, 5, (9, 8, 70), (3, 3, 3), {"stride": (2, 1, 1), "dilation": (2, 1, 3)}),
    "columns together": (1, 24, 6, (3, 20, 40), (1, 3, 5), {"padding": (0, 1, 2)}),
    "one column": (6, 30, 3, (3, 20, 33), (2, 3, 1), {}),
    "longer K": (18, 24, 4, (3, 8, 40), (3, 3, 3), {}),
    "several tiles": (3, 24, 8, (6, 140, 260), (3, 3, 3), {"padding": 1}),
    "tiles in pairs": (3, 24, 8, (9, 32, 32), (3, 3, 3), {}),
    "pairs across rows of tiles": (2, 20, 4, (5, 41, 90), (3, 3, 3), {}),
    "narrow tiles": (3, 24, 8, (12, 16, 16), (3, 3, 3), {}),
    "one output": (2, 9, 3, (3, 3, 3), (3, 3, 3), {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "misaligned"])
@pytest.mark.parametrize("dtype", ["tf32", torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", GATHERED)
def test_pipeline_gathered_window(case, dtype, layout, poisoned):
    check_layout("mean", *GATHERED[case], dtype, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["tf32", torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["growing", "shrinking", "leaping", "empty", "tiny"])
def test_pipeline_gathered_window_scales(kind, dtype, poisoned):
    """fp16 terms follow the size of what they hold from plane to plane."""
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    x = torch.randn(3, 3, 12, 10, 36, device="cuda")
    plane = torch.arange(12, device="cuda").reshape(12, 1, 1)
    x *= {
        "growing": 10.0**plane,
        "shrinking": 10.0**-plane,
        "leaping": 1e4 ** (plane % 3),
        "empty": plane % 4 // 3,
        "tiny": torch.tensor(1e-12, device="cuda"),
    }[kind]
    weight = torch.randn(24, 3, 3, 3, 3, device="cuda") * 0.3
    eps = float(x.var()) * 1e-3  # or nothing would be left of tiny values
    y = torch.ops.kgopt.conv3d_group_norm_mean_fwd(
        x, weight, None, 8, None, None, [1] * 3, [0] * 3, [1] * 3, 1, eps, backend="kgopt"
    )
    c = torch.nn.functional.conv3d(x.double().cpu(), weight.double().cpu()).reshape(3, 8, -1)
    rstd = (c.var(2, correction=0) + eps) ** -0.5
    assert relative_error(y[3].cpu(), rstd) <= (1e-3 if dtype == "tf32" else 2e-6)
    error = (y[2].double().cpu() - c.mean(2)).abs() * rstd
    assert float(error.max()) <= (1e-3 if dtype == "tf32" else 2e-6)


# c_in, c_out, norm groups, size, kernel, options: filters of hundreds of values, of which blocks fetch more than of x
LONG_FILTERS = {
    "5 by 7 taps": (18, 48, 16, (61, 90), (5, 7), {"stride": (1, 2), "padding": 2}),
    "two tiles of channels": (14, 108, 4, (94, 71), (3, 7), {"stride": 2, "padding": (0, 1), "dilation": (1, 2)}),
    "channels in fours": (24, 60, 4, (50, 61), (3, 3), {"stride": (1, 2), "padding": 1}),
    "odd channels": (31, 23, 1, (80, 67), (3, 5), {"padding": (1, 0)}),
    "few rows of a window": (7, 30, 5, (100, 90), (3, 7), {"padding": (1, 3)}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "misaligned"])
@pytest.mark.parametrize("dtype", ["tf32", torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", LONG_FILTERS)
@pytest.mark.parametrize("pipeline", ["mean", "logsumexp"])
def test_pipeline_long_filters(pipeline, case, dtype, layout, poisoned):
    c_in, c_out, groups, size, kernel, options = LONG_FILTERS[case]
    if pipeline == "mean":
        size, kernel = (2, *size), (1, *kernel)
        pairs = {name: (v, v) if isinstance(v, int) else v for name, v in options.items()}
        options = {name: (0 if name == "padding" else 1, *v) for name, v in pairs.items()}
    check_layout(pipeline, c_in, c_out, groups, size, kernel, options, dtype, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "kgopt", "kgopt:few_channels"])
def test_pipeline_long_filters_of_any_layout(backend):
    """Weights are fetched in the order of memory, which is not always that of the taps."""
    torch.backends.cudnn.allow_tf32 = True
    x = torch.randint(-3, 4, (2, 18, 40, 61), device="cuda").float()
    weight = torch.randint(-2, 3, (48, 18, 5, 7), device="cuda").float()
    wide = torch.empty(48, 20, 5, 7, device="cuda")[:, 1:19].copy_(weight)
    exact = torch.nn.functional.conv2d(x.double(), weight.double(), None, (1, 2), 2)
    function, ref, *_ = PIPELINES["logsumexp"]
    expected = ref(x.double(), weight.double(), None, 16, stride=(1, 2), padding=2)
    for w in (weight, weight.contiguous(memory_format=torch.channels_last), wide, weight.mT.contiguous().mT):
        if backend == "kgopt:few_channels":
            if w.stride(1) == 1:
                continue  # the output is channels_last, too, which that kernel does not store
            y = torch.ops.kgopt.conv2d(x, w, None, [1, 2], [2, 2], [1, 1], 1, backend=backend)
            assert torch.equal(y.double(), exact)
        else:
            y = function(x, w, None, 16, stride=(1, 2), padding=2, backend=backend)
            assert relative_error(y, expected) <= 1e-4


# n, c_in, c_out, norm groups, size, kernel, options: 33 to 64 output channels, where positions are rows on Hopper
POSITIONS = {
    "rows of vectors": (3, 8, 64, 16, (37, 128), (3, 3), {}),
    "one sample, odd rows": (1, 7, 50, 10, (45, 99), (3, 3), {"padding": 1}),
    "one channel": (5, 1, 40, 8, (31, 50), (5, 5), {}),
    "two chunks of channels": (2, 12, 64, 8, (33, 70), (3, 3), {"padding": (2, 1)}),
    "thirty channels, no taps": (2, 30, 36, 6, (40, 44), (1, 1), {}),
    "strided": (3, 5, 64, 4, (41, 83), (3, 3), {"stride": 2, "padding": 1}),
    "dilated": (2, 8, 48, 16, (40, 64), (3, 3), {"dilation": (2, 3)}),
    "kernel of 7": (2, 6, 64, 16, (20, 61), (1, 7), {"padding": (0, 3)}),
    "smaller than a strip": (7, 8, 64, 16, (3, 9), (3, 3), {}),
    "several tiles wide": (1, 3, 64, 1, (9, 1300), (3, 3), {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (0.01, 0.0), (3.0, 100.0)])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", POSITIONS)
def test_logsumexp_to_64_channels(case, dtype, scale, offset, poisoned):
    """Both passes beside PyTorch; twice the same call gives the same bits."""
    n, c_in, c_out, groups, size, kernel, options = POSITIONS[case]
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    kind = torch.float32 if dtype in ("fp32", "tf32") else dtype
    x = (torch.randn(n, c_in, *size, device="cuda") * scale + offset).to(kind)
    weight = (torch.randn(c_out, c_in, *kernel, device="cuda") * 0.3).to(kind)
    bias, gamma, beta = (torch.randn(c_out, device="cuda").to(kind) for _ in range(3))
    args = [x, weight, bias, groups, gamma, beta]
    function, ref, *_ = PIPELINES["logsumexp"]
    y = function(*args, **options, backend="kgopt")
    assert torch.equal(y, function(*args, **options, backend="kgopt"))
    if dtype == "tf32":
        ideal = ref(*upcast([round_tf32(x), round_tf32(weight), *args[2:]]), **options).cuda()
        exact = ref(*upcast(args), **options).cuda()
        assert_as_good_as_torch(y, ref(*args, **options), exact, also=ideal)
    else:
        check("logsumexp", y, args, options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("of_x", "of_weight", "of_bias"),
    [(30.0, 1.0, 1.0), (1e-3, 1.0, 1.0), (1.0, 1e-4, 1.0), (1.0, 30.0, 1.0), (1.0, 1.0, 1e4)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("c_out", [64, 50])
def test_logsumexp_of_half_types_in_any_range(c_out, dtype, of_x, of_weight, of_bias, poisoned):
    """Results that spread wider than fp16's exponentials; weights, biases and inputs that fp16 does not hold well."""
    x = (torch.randn(3, 8, 37, 61, device="cuda") * of_x).to(dtype)
    weight = (torch.randn(c_out, 8, 3, 3, device="cuda") * 0.3 * of_weight).to(dtype)
    bias = (torch.randn(c_out, device="cuda") * of_bias).to(dtype)
    gamma, beta = (torch.randn(c_out, device="cuda").to(dtype) for _ in range(2))
    args = [x, weight, bias, 2, gamma, beta]
    check("logsumexp", PIPELINES["logsumexp"][0](*args, backend="kgopt"), args, {})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["tf32", torch.bfloat16, torch.float16], ids=str)
def test_logsumexp_of_values_that_leap(dtype):
    """Results hundreds apart from position to position, zeros, infinities and NaNs."""
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    kind = torch.float32 if dtype == "tf32" else dtype
    x = torch.randn(4, 8, 40, 100, device="cuda")
    x[0] *= 300.0
    x[1] = 0.0
    x[2, 3, 5, 7] = float("inf")
    x[3, 1, 20, 60] = float("nan")
    weight = torch.randn(64, 8, 3, 3, device="cuda") * 0.3
    args = [t.to(kind) for t in (x, weight, torch.randn(64, device="cuda"))]
    function, ref, *_ = PIPELINES["logsumexp"]
    rounded = [round_tf32(args[0]), round_tf32(args[1])] if dtype == "tf32" else args[:2]
    y = function(*args, 16)
    ideal = ref(*upcast([*rounded, args[2], 16])).cuda()
    assert torch.equal(y.isnan(), ideal.isnan())
    assert y[2:].isnan().all()
    for sample in (0, 1):
        assert relative_error(y[sample], ideal[sample]) <= (1e-4 if dtype == "tf32" else 5e-3)
