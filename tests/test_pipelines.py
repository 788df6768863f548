"""The three fused pipelines against plain PyTorch, in every dtype and layout, with random affine parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kgopt import functional, reference
from tolerances import assert_as_good_as_torch, relative_error, round_tf32

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


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_values(pipeline, case, dtype, layout, device, poisoned):
    args, options = make(pipeline, case, dtype, device)
    if layout == "channels_last":
        args[0] = args[0].contiguous(memory_format=last_format(args[0]))
    backends = ["auto", "kgopt"] if device == "cuda" else ["auto"]
    for backend in backends:
        check(pipeline, PIPELINES[pipeline][0](*args, **options, backend=backend), args, options)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_arguments(pipeline, option, device, poisoned):
    args, options = make(pipeline, "headline channels", torch.float32, device, options=OPTIONS[option])
    for backend in ["auto", "kgopt"] if device == "cuda" else ["auto"]:
        check(pipeline, PIPELINES[pipeline][0](*args, **options, backend=backend), args, options)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_conv_groups(pipeline, device):
    c_in, c_out, norm_groups = 6, 12, 3
    rank = PIPELINES[pipeline][3]
    x = torch.randn(2, c_in, *(6, 7, 8)[-rank:], device=device)
    kernel = (3,) * rank
    shape = (c_in, c_out // 2, *kernel) if PIPELINES[pipeline][2] else (c_out, c_in // 2, *kernel)
    weight, gamma, beta = (torch.randn(s, device=device) for s in (shape, (c_out,), (c_out,)))
    args = [x, weight, None, norm_groups, gamma, beta]
    exact = PIPELINES[pipeline][1](*[a.double() if isinstance(a, torch.Tensor) else a for a in args], groups=2)
    y = PIPELINES[pipeline][0](*args, groups=2)
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scale", "offset"), [(0.01, 0.0), (3.0, 0.0), (1.0, 100.0)])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_ill_conditioned(pipeline, scale, offset, device):
    args, _ = make(pipeline, "headline channels", torch.float32, device, scale, offset)
    check(pipeline, PIPELINES[pipeline][0](*args), args, {})


@pytest.mark.gpu
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_tf32(pipeline):
    """PyTorch takes TF32 for some of these convolutions and not for others: an ideal TF32 product is the yardstick."""
    torch.backends.cudnn.allow_tf32 = True
    args, _ = make(pipeline, "headline channels", torch.float32, "cuda")
    function, ref, *_ = PIPELINES[pipeline]
    exact = ref(*upcast(args)).cuda()
    ideal = ref(*upcast([round_tf32(args[0]), round_tf32(args[1]), *args[2:]])).cuda()
    error = relative_error(function(*args), exact)
    allowed = 2 * max(relative_error(ref(*args), exact), relative_error(ideal, exact)) + 1e-6
    assert error <= allowed, (error, allowed)


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
@pytest.mark.parametrize("backend", ["auto", "kgopt", "kgopt:narrow"])
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
        if backend == "kgopt:narrow":
            if w.stride(1) == 1:
                continue  # the output is channels_last, too, which that kernel does not store
            y = torch.ops.kgopt.conv2d(x, w, None, [1, 2], [2, 2], [1, 1], 1, backend=backend)
            assert torch.equal(y.double(), exact)
        else:
            y = function(x, w, None, 16, stride=(1, 2), padding=2, backend=backend)
            assert relative_error(y, expected) <= 1e-4


# batch, c_in, c_out, norm groups, size, kernel, padding: statistics from the input's autocorrelation on Hopper
FROM_INPUT = {
    "one block a sample": (128, 8, 64, 16, (96, 128), (3, 3), (0, 0)),
    "several slices": (60, 8, 64, 8, (128, 160), (3, 3), (1, 1)),
    "odd": (130, 5, 198, 11, (71, 133), (3, 3), (2, 0)),
    "odd and padded": (130, 7, 250, 5, (83, 97), (3, 3), (1, 1)),
    "many outputs": (70, 3, 192, 1, (64, 104), (3, 3), (0, 1)),
    "few outputs": (140, 8, 40, 8, (128, 128), (3, 3), (0, 0)),
    "flat kernel": (140, 8, 64, 64, (80, 120), (2, 3), (0, 0)),
    "upright kernel": (140, 8, 40, 4, (120, 80), (3, 1), (1, 0)),
    "one tap": (140, 6, 64, 4, (120, 96), (1, 1), (0, 0)),
    "much padding": (140, 8, 64, 16, (88, 96), (3, 2), (3, 4)),
}


def from_input_case(case, dtype):
    batch, c_in, c_out, groups, size, kernel, padding = FROM_INPUT[case]
    kind = torch.float32 if dtype == "tf32" else dtype
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    x = torch.randn(batch, c_in, *size, device="cuda")
    # Borders count for some taps only: they are not what the rest is.
    x[..., :2, :] *= 5
    x[..., -2:, :] += 3
    x[..., :2] -= 2
    x[..., -2:] *= 4
    weight = torch.randn(c_out, c_in, *kernel, device="cuda") * 0.3
    bias = torch.randn(c_out, device="cuda")
    return x.to(kind), weight.to(kind), bias.to(kind), groups, list(padding)


def group_moments(x, weight, bias, groups, padding):
    """Mean and rstd of the convolution's groups in fp64."""
    args = [a.double() for a in (x, weight, bias)]
    parts = [torch.nn.functional.conv2d(part, *args[1:], padding=padding) for part in args[0].split(16)]
    rows = [part.reshape(len(part), groups, -1) for part in parts]
    mean, var = (torch.cat([f(row) for row in rows]) for f in (lambda r: r.mean(2), lambda r: r.var(2, correction=0)))
    return mean, (var + 1e-5) ** -0.5


def moments_by_kgopt(x, weight, bias, groups, padding):
    """The same, by the pipelines with logsumexp and with mean."""
    once = [1, 1]
    lse = torch.ops.kgopt.conv2d_group_norm_tanh_hardswish_residual_logsumexp_fwd
    _, mean, rstd = lse(x, weight, bias, groups, None, None, once, padding, once, 1, 1e-5)
    deep = torch.ops.kgopt.conv3d_group_norm_mean_fwd
    _, _, mean3, rstd3 = deep(
        x[:, :, None], weight[:, :, None], bias, groups, None, None, [1] * 3, [0, *padding], [1] * 3, 1, 1e-5
    )
    return (mean, rstd), (mean3, rstd3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["tf32", torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", FROM_INPUT)
def test_pipeline_statistics_from_input(case, dtype, poisoned):
    args = from_input_case(case, dtype)
    if torch.cuda.get_device_capability() == (9, 0):
        none = [1, 1], args[4], [1, 1], [0, 0], 1, False
        assert "autocorrelation" in torch.ops.kgopt.explain_conv(*args[:2], *none, "stats")
    mean, rstd = group_moments(*args)
    allowed = 5e-6
    if dtype == "tf32":  # an ideal TF32 product is the yardstick
        ideal_mean, ideal_rstd = group_moments(round_tf32(args[0]), round_tf32(args[1]), *args[2:])
        errors = [((ideal_mean - mean) * rstd).abs().max(), (ideal_rstd / rstd - 1).abs().max()]
        allowed += 2 * float(max(errors))
    elif (
        args[1].shape[0] > 128
    ):  # logsumexp of so many channels stores the convolution's output, rounded as PyTorch's is
        y = torch.nn.functional.conv2d(*args[:3], padding=args[4]).double().reshape(*mean.shape, -1)
        stored = [
            ((y.mean(2) - mean) * rstd).abs().max(),
            ((y.var(2, correction=0) + 1e-5) ** -0.5 / rstd - 1).abs().max(),
        ]
        allowed += 2 * float(max(stored))
    for _ in range(2):
        for got_mean, got_rstd in moments_by_kgopt(*args):
            assert float((got_rstd / rstd - 1).abs().max()) <= allowed
            assert float(((got_mean - mean) * rstd).abs().max()) <= allowed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["tf32", torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind", ["offset", "small", "tiny", "smooth", "high pass", "huge", "leap", "zeros", "empty rows"]
)
def test_pipeline_statistics_from_input_ill_conditioned(kind, dtype, poisoned):
    """Filters that cancel their input, and values that the sampled scale does not fit, go to the convolution."""
    x, weight, _, groups, padding = from_input_case("one block a sample", dtype)
    n, _, h, w = x.shape
    y = x.float()
    if kind in ("smooth", "high pass"):
        row, column = (torch.arange(size, device="cuda").float() for size in (h, w))
        y = torch.sin(row * 0.05)[:, None] + torch.cos(column * 0.03) + y * 0.002 + 2
    if kind == "high pass":
        weight = (weight.float() - weight.float().mean((1, 2, 3), keepdim=True)).to(weight.dtype)
    if kind == "leap":
        y[1, 3, 50, 70] = 1e7
    if kind == "empty rows":
        y[:, :, : h // 2] = 0
    factor = {"small": 0.01, "tiny": 1e-12, "huge": 1e12, "zeros": 0.0}.get(kind, 1.0)
    x = (y * factor + (100 if kind == "offset" else 0)).to(x.dtype)
    bias = torch.zeros(len(weight), device="cuda", dtype=x.dtype)
    args = x, weight, bias, groups, padding
    mean, rstd = group_moments(*args)
    # What PyTorch makes of its own convolution, in fp64.
    own = torch.nn.functional.conv2d(*args[:3], padding=padding).double().reshape(n, groups, -1)
    own_mean, own_rstd = own.mean(2), (own.var(2, correction=0) + 1e-5) ** -0.5
    ideal = args
    if dtype == "tf32":
        ideal = round_tf32(x), round_tf32(weight), *args[2:]
    ideal_mean, ideal_rstd = group_moments(*ideal)
    for got_mean, got_rstd in moments_by_kgopt(*args):
        for got, exact, others, unit in [
            (got_rstd, rstd, (own_rstd, ideal_rstd), rstd),
            (got_mean, mean, (own_mean, ideal_mean), 1 / rstd),
        ]:
            error = float(((got - exact) / unit).abs().max())
            theirs = max(float(((other - exact) / unit).abs().max()) for other in others)
            assert error <= 2 * theirs + 1e-5, (error, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_pipeline_statistics_from_input_not_finite(value, poisoned):
    """A sample's NaN stays its own."""
    x, weight, bias, groups, padding = from_input_case("one block a sample", torch.bfloat16)
    clean = moments_by_kgopt(x, weight, bias, groups, padding)
    x[3, 2, 40, 50] = value
    for (mean, rstd), (clean_mean, clean_rstd) in zip(
        moments_by_kgopt(x, weight, bias, groups, padding), clean, strict=True
    ):
        others = torch.arange(len(x), device="cuda") != 3
        assert bool((~torch.isfinite(rstd[3]) | (rstd[3] == 0)).all())
        assert torch.equal(mean[others], clean_mean[others])
        assert torch.equal(rstd[others], clean_rstd[others])


# batch, c_in, c_out, norm groups, size, kernel, dilation: one launch on Hopper (conv3d/wgmma/transposed_norm/)
FLAT = {
    "copy of x in the output": (5, 64, 128, 8, (4, 6, 6), (3, 3, 3), 1),
    "tiles across planes": (2, 64, 128, 4, (8, 14, 14), (3, 3, 3), 1),
    "several tiles a block": (9, 32, 128, 16, (14, 30, 62), (3, 3, 3), 1),
    "padded channels": (3, 40, 72, 9, (5, 10, 12), (3, 3, 5), 1),
    "two tiles of channels": (2, 128, 256, 32, (5, 14, 18), (1, 3, 3), 1),
    "a group a channel": (4, 64, 128, 128, (3, 7, 11), (3, 2, 2), 1),
    "one group, dilated": (2, 64, 80, 1, (4, 8, 12), (2, 3, 3), 2),
    "more copy than output": (4, 128, 72, 6, (2, 6, 6), (3, 3, 3), 1),
    "one sample": (1, 64, 128, 8, (2, 6, 14), (3, 3, 3), 1),
    "rows of whole vectors": (5, 64, 128, 8, (4, 8, 8), (3, 3, 3), 1),
    "vectors of padded channels": (3, 40, 72, 9, (5, 10, 16), (3, 3, 3), 1),
    "vectors of two chunks": (2, 128, 256, 32, (5, 14, 24), (3, 3, 3), 1),
}


def make_flat(case, dtype, offset=0.0):
    n, c_in, c_out, groups, size, kernel, dilation = FLAT[case]
    x = (torch.randn(n, c_in, *size, device="cuda") + offset).to(dtype)
    weight = (torch.randn(c_in, c_out, *kernel, device="cuda") * 0.1).to(dtype)
    bias, gamma, beta = (torch.randn(c_out, device="cuda").to(dtype) for _ in range(3))
    return [x, weight, bias, groups, gamma, beta], {"dilation": dilation}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["tf32", torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", FLAT)
def test_pipeline_in_one_launch(case, dtype, poisoned):
    tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = tf32
    args, options = make_flat(case, torch.float32 if tf32 else dtype)
    function, ref, *_ = PIPELINES["relu_norm"]
    exact = ref(*upcast(args), **options).cuda()
    y = function(*args, **options, backend="kgopt")
    assert y.is_contiguous()
    assert torch.equal(y, function(*args, **options, backend="kgopt"))
    if tf32:
        ideal = ref(*upcast([round_tf32(args[0]), round_tf32(args[1]), *args[2:]]), **options).cuda()
        assert relative_error(y, exact) <= 2 * relative_error(ideal, exact) + 1e-6
    else:
        assert_as_good_as_torch(y, ref(*args, **options), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["sliced", "expanded", "channels_last"])
def test_pipeline_in_one_launch_of_any_input(layout):
    torch.backends.cudnn.allow_tf32 = False
    args, options = make_flat("padded channels", torch.float32)
    function, ref, *_ = PIPELINES["relu_norm"]
    if layout == "sliced":
        args[0] = torch.cat([args[0], args[0]], -1)[..., 1:13]
    elif layout == "expanded":
        args[0] = args[0][:1].expand(3, -1, -1, -1, -1)
    else:
        args[0] = args[0].contiguous(memory_format=torch.channels_last_3d)
    args[1] = args[1].transpose(0, 1).contiguous().transpose(0, 1)
    args[2] = None
    exact = ref(*upcast(args), **options).cuda()
    assert_as_good_as_torch(function(*args, **options, backend="kgopt"), ref(*args, **options), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pipeline_in_one_launch_of_extreme_inputs(dtype):
    """Offsets a hundred times the spread; a NaN spoils its group and no other."""
    torch.backends.cudnn.allow_tf32 = False
    function, ref, *_ = PIPELINES["relu_norm"]
    args, options = make_flat("several tiles a block", dtype, offset=100.0)
    exact = ref(*upcast(args), **options).cuda()
    assert_as_good_as_torch(function(*args, **options, backend="kgopt"), ref(*args, **options), exact)
    args, options = make_flat("tiles across planes", dtype)
    args[0][1, 3, 2, 5, 7] = float("nan")
    y, expected = function(*args, **options, backend="kgopt"), ref(*args, **options)
    assert torch.equal(y.isnan(), expected.isnan())
    assert not y[0].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["tf32", torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*FLAT, "few channels"])
def test_pipeline_keeps_groups_that_relu_makes_finite(case, dtype):
    """Where an infinity meets negative weights alone, what follows relu is zero, and the group is as any other."""
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    few = {"few channels": (3, 6, 16, 8, (5, 9, 13), (3, 3, 3), 1)}
    n, c_in, c_out, groups, size, kernel, dilation = {**FLAT, **few}[case]
    x, weight = torch.randn(n, c_in, *size, device="cuda"), torch.randn(c_in, c_out, *kernel, device="cuda") * 0.1
    x[(n - 1, 1, *(s // 2 for s in size))] = float("inf")
    weight[1, : c_out // groups] = -weight[1, : c_out // groups].abs() - 0.01
    weight[1, c_out // groups :, 0, 0, 0] = 1.0
    kind = torch.float32 if dtype == "tf32" else dtype
    args = [x.to(kind), weight.to(kind), torch.randn(c_out, device="cuda").to(kind), groups]
    y = PIPELINES["relu_norm"][0](*args, dilation=dilation, backend="kgopt").unflatten(1, (groups, -1))
    assert y[n - 1, 0].isfinite().all()
    assert y[n - 1, 1:].isnan().all()
    assert y[: n - 1].isfinite().all()
    args[1][0, -1, 0, 0, 0] = float("inf")
    y = PIPELINES["relu_norm"][0](*args, dilation=dilation, backend="kgopt").unflatten(1, (groups, -1))
    assert y[:, -1].isnan().all()
    assert y[: n - 1, :-1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's")
def test_pipeline_in_one_launch_with_fp32_accuracy_keeps_one_copy_apart():
    """x in two terms a value, padded: that of one sample; it was two, 9% of input and output at the headline shape."""
    torch.backends.cudnn.allow_tf32 = False
    x = torch.randn(4, 64, 16, 30, 30, device="cuda")
    weight = torch.randn(64, 128, 3, 3, 3, device="cuda")
    function, *_ = PIPELINES["relu_norm"]
    function(x, weight, None, 8, backend="kgopt")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = function(x, weight, None, 8, backend="kgopt")
    extra = torch.cuda.max_memory_allocated() - before - y.nbytes
    copy, packed = 16 * 32 * 32 * 64 * 8, weight.nbytes * 2
    assert extra < 1.5 * copy + packed


# c_in, kernel, size, options: statistics of convolutions that are not stored
STATISTICS = {
    "volume": (3, (3, 3, 3), (6, 10, 20), {}),
    "image": (8, (1, 3, 3), (1, 70, 136), {}),
    "image, padded": (5, (1, 3, 3), (1, 70, 136), {"padding": (0, 1, 1)}),
    "image of three channels": (3, (1, 3, 3), (1, 70, 132), {}),
    "slabs": (8, (1, 3, 3), (3, 70, 136), {"padding": (0, 0, 1)}),
    "two taps": (6, (1, 2, 3), (1, 70, 136), {"padding": (0, 2, 2)}),
    "rows of 1200": (8, (1, 3, 3), (1, 64, 1200), {}),
}


def difficult_input(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Values that fp16 does not hold unless they are shifted and scaled, and scaled again."""
    if kind == "offset":
        return x + 100
    if kind == "small":
        return x * 1e-6
    if kind == "outliers":
        return torch.where(torch.rand_like(x) < 1e-3, x * 1e7, x)
    if kind == "spikes":
        return torch.where(torch.rand_like(x) < 2e-2, x * 1e-3, torch.zeros_like(x))
    if kind == "constant":
        x[:, 0] = 7.25
    if kind == "smooth":
        return torch.linspace(-3, 3, x.shape[-1], device=x.device).sin() * 5 + x * 1e-2
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "offset", "small", "outliers", "spikes", "constant", "smooth"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", STATISTICS)
def test_pipeline_statistics(case, dtype, kind, poisoned):
    c_in, kernel, size, options = STATISTICS[case]
    real = torch.float32 if dtype in ("fp32", "tf32") else dtype
    if real == torch.float16 and kind in ("outliers", "small"):
        pytest.skip("fp16 does not hold them itself")
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    x = difficult_input(kind, torch.randn(3, c_in, *size, device="cuda")).to(real)
    weight = torch.randn(24, c_in, *kernel, device="cuda") * 0.3
    if kind == "smooth":
        weight -= weight.mean(dim=(1, 2, 3, 4), keepdim=True)  # little is left of their input
    weight = weight.to(real)
    bias, gamma, beta = (torch.randn(24, device="cuda").to(real) for _ in range(3))
    args = [x, weight, bias, 8, gamma, beta]
    exact = PIPELINES["mean"][1](*upcast(args), **options).cuda()
    # A mean over everything hides much: the statistics themselves are compared, too.
    padding, dilation = list(options.get("padding", [0] * 3)), list(options.get("dilation", [1] * 3))
    out, _, _, rstd = torch.ops.kgopt.conv3d_group_norm_mean_fwd(
        x, weight, bias, 8, gamma, beta, [1] * 3, padding, dilation, 1, 1e-5, backend="kgopt"
    )
    rounded = [round_tf32(x), round_tf32(weight)] if dtype == "tf32" else [x, weight]

    def statistics(a, b, c):
        y = torch.nn.functional.conv3d(a, b, c, 1, padding, dilation)
        return y.double().reshape(3, 8, -1).var(2, correction=0)

    variance = statistics(x.double().cpu(), weight.double().cpu(), bias.double().cpu())
    ideal = statistics(*(t.double().cpu() for t in rounded), bias.double().cpu())
    theirs = statistics(x, weight, bias).cpu() if dtype != "tf32" else ideal
    relative = lambda v: float(((v - variance) / (variance + 1e-5)).abs().max())  # noqa: E731
    allowed = 3 * relative(theirs) + (2e-6 if real == torch.float32 else 2e-4)
    if dtype == "tf32":
        allowed += 1e-3 if kind in ("outliers", "spikes") else 2e-4  # a few values make all of the variance
    elif dtype == "fp32" and kind == "outliers":
        allowed *= (
            2  # 3xTF32 leaves out products of two low parts, 2^-22 of each; few products, so nothing averages out
        )
    error = relative(rstd.double().cpu() ** -2 - 1e-5)
    assert error <= allowed, (error, allowed)
    assert float((out.double() - exact).abs().max()) <= (allowed + 1e-5) * mean_tolerance(args)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_pipeline_statistics_of_what_is_not_finite(value):
    """The sample with it becomes NaN, the others do not notice."""
    x = torch.randn(3, 3, 6, 10, 20, device="cuda")
    x[1, 2, 3, 4, 5] = value
    weight = torch.randn(24, 3, 3, 3, 3, device="cuda")
    y = PIPELINES["mean"][0](x, weight, None, 8, None, None)
    assert y.isnan().tolist() == [False, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", ["tf32", torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(9, 16, 16), (5, 18, 21), (3, 34, 36)])
def test_pipeline_samples_that_share_a_block(size, dtype, layout):
    """A block walks through samples of unlike scale and offset, not all of them finite: no other sample sees it."""
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    real = torch.float32 if dtype == "tf32" else dtype
    n = 3 * torch.cuda.get_device_properties(0).multi_processor_count + 5
    scale = 10.0 ** torch.randint(-2, 3, (n, 1, 1, 1, 1), device="cuda")
    offset = scale * torch.randint(0, 2, (n, 1, 1, 1, 1), device="cuda") * 30
    x = (torch.randn(n, 3, *size, device="cuda") * scale + offset).to(real)
    x[7, 1, 2, 3, 4], x[11, 2, 0, 5, 6] = float("nan"), -float("inf")
    finite = torch.ones(n, dtype=torch.bool, device="cuda")
    finite[[7, 11]] = False
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last_3d)
    weight = (torch.randn(24, 3, 3, 3, 3, device="cuda") * 0.3).to(real)
    bias = torch.randn(24, device="cuda").to(real)
    _, _, mean, rstd = torch.ops.kgopt.conv3d_group_norm_mean_fwd(
        x, weight, bias, 8, None, None, [1] * 3, [0] * 3, [1] * 3, 1, 1e-5, backend="kgopt"
    )
    y = F.conv3d(x.double().cpu(), weight.double().cpu(), bias.double().cpu()).reshape(n, 8, -1).cuda()
    variance = y.var(2, correction=0)
    allowed = 2e-2 if dtype == "tf32" else 1e-4  # an offset of 30 leaves TF32's products that much of their digits
    assert (rstd * (variance + 1e-5).sqrt() - 1).abs().nan_to_num(9)[finite].max() < allowed
    assert ((mean - y.mean(2)) / variance.sqrt()).abs().nan_to_num(9)[finite].max() < allowed
    assert rstd[~finite].isnan().all()


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["headline channels", "too wide for one block"])
@pytest.mark.parametrize("pipeline", ["mean", "logsumexp"])
def test_pipeline_in_inference_is_the_twins_result(pipeline, case, dtype, device, poisoned):
    """Inference returns no statistics, and its result in x's dtype in one step; the values are those of training."""
    args, _ = make(pipeline, case, dtype, device)
    y = PIPELINES[pipeline][0](*args)
    op = "conv3d_group_norm_mean" if pipeline == "mean" else "conv2d_group_norm_tanh_hardswish_residual_logsumexp"
    twin = getattr(torch.ops.kgopt, f"{op}_fwd")(*args)[0]
    assert y.dtype == dtype
    assert torch.equal(y, twin.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_of_a_convolution_with_a_large_bias(dtype, device, poisoned):
    """On CUDA the bias of a convolution by cuDNN is no pass over memory, but a shift of each channel's mean."""
    args, options = make("mean", "too wide for one block", dtype, device)
    args[2] = args[2] * 100
    check("mean", functional.conv3d_group_norm_mean(*args), args, options)


@pytest.mark.gpu
@pytest.mark.parametrize("c_out", [24, 50, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logsumexp_is_rounded_once(dtype, c_out, poisoned):
    """What is stored in half types is the fp32 result that a backward would keep, rounded."""
    x = torch.randn(3, 8, 37, 61, device="cuda").to(dtype)
    weight = (torch.randn(c_out, 8, 3, 3, device="cuda") * 0.3).to(dtype)
    bias, gamma, beta = (torch.randn(c_out, device="cuda").to(dtype) for _ in range(3))
    args = [x, weight, bias, 2, gamma, beta, [1, 1], [1, 1], [1, 1], 1, 1e-5]
    name = "conv2d_group_norm_tanh_hardswish_residual_logsumexp"
    kept, *_ = getattr(torch.ops.kgopt, f"{name}_fwd")(*args, backend="kgopt")
    y = getattr(torch.ops.kgopt, name)(*args, backend="kgopt")
    assert kept.dtype is torch.float32
    assert y.dtype is dtype
    assert torch.equal(y, kept.to(dtype))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_no_bias_no_affine(pipeline, device):
    args, _ = make(pipeline, "odd channels", torch.float32, device)
    args[2] = args[4] = args[5] = None
    exact = PIPELINES[pipeline][1](*upcast(args)).to(device)
    torch.testing.assert_close(PIPELINES[pipeline][0](*args).double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_strided_input(pipeline, device):
    args, _ = make(pipeline, "headline channels", torch.float32, device, batch=6)
    args[0] = args[0][::2, :, ..., 1:]
    check(pipeline, PIPELINES[pipeline][0](*args), args, {})


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_empty_batch(pipeline, device):
    args, _ = make(pipeline, "headline channels", torch.float32, device, batch=1)
    args[0] = args[0][:0]
    assert PIPELINES[pipeline][0](*args).shape == PIPELINES[pipeline][1](*args).shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_backward_values(pipeline, dtype, device, poisoned):
    args, _ = make(pipeline, "headline channels", dtype, device)
    function, ref, *_ = PIPELINES[pipeline]
    shape = ref(*args).shape
    dout = torch.randn(shape, device=device, dtype=torch.float64)

    exact = gradients(ref, upcast(args), dout)
    for mine, theirs, right in zip(gradients(function, args, dout), gradients(ref, args, dout), exact, strict=True):
        error, torchs = relative_error(mine, right), relative_error(theirs, right)
        # Gradients of x and of the convolution's bias are what is left of terms that cancel.
        floor = float(right.norm()) > 1e-6
        assert error <= 3 * torchs + (1e-9 if dtype == torch.float64 else 2e-5) or not floor, (error, torchs)
        assert mine.dtype == theirs.dtype


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_gradients_of_large_outputs(pipeline, layout, monkeypatch, poisoned):
    """With parameters from N(0, 1) one channel has nearly all of softmax: gradients of the third pipeline without TF32
    were four times as far off as PyTorch's while they took the forward's logsumexp for that of the convolution that the
    backward computes again."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    function, ref, transposed, rank = PIPELINES[pipeline]
    c_in, c_out, groups = CASES["headline channels"][pipeline]
    kernel = (3,) * rank
    x = torch.randn(8, c_in, *(6, 40, 66)[-rank:], device="cuda")
    weight = torch.randn((c_in, c_out, *kernel) if transposed else (c_out, c_in, *kernel), device="cuda")
    if layout == "channels_last":
        x = x.contiguous(memory_format=last_format(x))
    args = [x, weight, *torch.randn(1, c_out, device="cuda"), groups, *torch.randn(2, c_out, device="cuda")]
    dout = torch.randn(ref(*args).shape, device="cuda")

    mine, theirs, exact = (gradients(f, a, dout) for f, a in ((function, args), (ref, args), (ref, upcast(args))))
    for name, m, t, e in zip(("x", "weight", "bias", "gamma", "beta"), mine, theirs, exact, strict=True):
        error, allowed = relative_error(m, e), 2 * relative_error(t, e) + 2e-7
        cancels = pipeline == "mean" and name in ("x", "weight", "bias")  # what is left of them is all rounding
        assert error <= allowed or cancels, (name, error, allowed)


class IdealConv2d(torch.autograd.Function):
    """A convolution and its gradients from operands rounded to TF32, to nearest, in fp64."""

    @staticmethod
    def forward(ctx, x, weight, bias, *geometry):
        x, weight = round_tf32(x).double(), round_tf32(weight).double()
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return torch.conv2d(x, weight, bias.double(), *geometry)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        pairs = ([v] * 2 if isinstance(v, int) else v for v in (stride, padding, dilation))
        dx, dweight, _ = torch.ops.aten.convolution_backward(
            round_tf32(dy).double(), x, weight, None, *pairs, False, [0, 0], groups, [True, True, False]
        )
        return dx, dweight, dy.sum((0, 2, 3)), None, None, None, None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "kgopt"])
@pytest.mark.parametrize("innermost", ["", "x", "weight", "x and weight"])
@pytest.mark.parametrize(("c_in", "c_out"), [(8, 64), (3, 40), (20, 48)])
def test_logsumexp_pipeline_gradients_tf32(c_in, c_out, innermost, backend, monkeypatch, poisoned):
    """In channels_last the backward's convolution cut its input off to TF32 where the forward's statistics and
    logsumexp were of rounded input: gradients were up to four times as far off as PyTorch's."""
    torch.backends.cudnn.allow_tf32 = True
    function, ref, *_ = PIPELINES["logsumexp"]
    x, weight = torch.randn(8, c_in, 40, 130, device="cuda"), torch.randn(c_out, c_in, 3, 3, device="cuda") * 0.3
    if "x" in innermost:
        x = x.contiguous(memory_format=torch.channels_last)
    if "weight" in innermost:
        weight = weight.contiguous(memory_format=torch.channels_last)
    bias, gamma, beta = (torch.randn(c_out, device="cuda") for _ in range(3))
    args = [x, weight, bias, c_out // 4, gamma, beta]
    dout = torch.randn(8, 1, 38, 128, device="cuda")

    mine = gradients(lambda *a: function(*a, backend=backend), args, dout)
    theirs = gradients(ref, args, dout)
    doubles = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    exact = gradients(ref, doubles, dout)
    with monkeypatch.context() as patched:
        patched.setattr(reference.F, "conv2d", IdealConv2d.apply)
        ideal = gradients(ref, doubles, dout)
    for name, m, t, e, i in zip(("x", "weight", "bias", "gamma", "beta"), mine, theirs, exact, ideal, strict=True):
        error, allowed = relative_error(m, e), 2 * max(relative_error(t, e), relative_error(i, e)) + 1e-6
        assert error <= allowed, (name, error, allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_deterministic(pipeline):
    args, _ = make(pipeline, "headline channels", torch.float32, "cuda", batch=16)
    first = PIPELINES[pipeline][0](*args, backend="kgopt")
    assert all(torch.equal(PIPELINES[pipeline][0](*args, backend="kgopt"), first) for _ in range(3))


@pytest.mark.gpu
@pytest.mark.parametrize("pipeline", ["mean", "logsumexp"])
def test_pipeline_peak_memory(pipeline):
    """The convolution's output, here 64 MB and more, must never exist."""
    x = {"mean": (32, 3, 24, 32, 32), "logsumexp": (32, 8, 128, 128)}[pipeline]
    c_out, groups = {"mean": (24, 8), "logsumexp": (64, 16)}[pipeline]
    x = torch.randn(x, device="cuda")
    weight = torch.randn(c_out, x.shape[1], *(3,) * (x.dim() - 2), device="cuda")
    bias = torch.randn(c_out, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        args = [t.to(dtype) for t in (x, weight, bias)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = PIPELINES[pipeline][0](*args, groups, *args[2:], *args[2:])
        torch.cuda.synchronize()
        # fp32 result beside its copy in half, and the workspace
        allowed = 3 * y.numel() * 4 + 4 * 2**20
        assert torch.cuda.max_memory_allocated() - before <= allowed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's")
@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16"])
def test_second_pipeline_peak_memory(precision):
    """Input, output and 5%: the padded copies of x lie where the output comes later."""
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.randn(16, 64, 32, 32, 32, device="cuda", dtype=dtype)
    weight = torch.randn(64, 128, 3, 3, 3, device="cuda", dtype=dtype)
    gamma, beta = (torch.randn(128, device="cuda", dtype=dtype) for _ in range(2))
    for _ in range(2):  # the first may allocate what stays
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = PIPELINES["relu_norm"][0](x, weight, None, 8, gamma, beta, backend="kgopt")
        torch.cuda.synchronize()
        peak, size = torch.cuda.max_memory_allocated() - before, y.nbytes
        del y
    assert peak + x.nbytes <= 1.05 * (x.nbytes + size), peak


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_pipelines_training_takes_no_more_memory_than_plain_torchs(dtype):
    x = torch.randn(16, 64, 32, 32, 32, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(64, 128, 3, 3, 3, device="cuda", dtype=dtype, requires_grad=True)
    gamma, beta = (torch.randn(128, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))

    def ours():
        return PIPELINES["relu_norm"][0](x, weight, None, 8, gamma, beta)

    def plain():
        return F.group_norm(F.conv_transpose3d(x, weight).relu(), 8, gamma, beta)

    peaks = []
    for function in (ours, plain):
        for _ in range(2):  # the first may allocate what stays
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y = function()
            gradients = torch.autograd.grad(y, [x, weight, gamma, beta], torch.ones_like(y))
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            del y, gradients
        peaks.append(peak)
    assert peaks[0] <= 1.02 * peaks[1], peaks


# Small chains, which Hopper does in one launch: batch, c_in, c_out, norm groups, sizes, kernel, options
SMALL_CHAINS = {
    "mean": {
        "one value a channel and group": (5, 3, 4, 2, (3, 3, 3), (3, 3, 3), {}),
        "a block a sample": (200, 6, 8, 8, (6, 5, 4), (5, 2, 2), {"dilation": (1, 1, 2)}),
        "a cluster a sample": (6, 13, 7, 1, (6, 15, 16), (2, 2, 2), {"padding": (0, 1, 0), "stride": (1, 2, 1)}),
        "depth divided": (3, 2, 16, 2, (41, 24, 17), (2, 1, 2), {"padding": (1, 0, 0)}),
        "a team of blocks": (1, 5, 54, 2, (23, 44, 38), (2, 1, 3), {}),
        "conv groups": (3, 10, 72, 4, (4, 7, 7), (2, 3, 2), {"groups": 2, "padding": (1, 0, 0)}),
        "many channels": (2, 3, 600, 40, (3, 4, 5), (2, 2, 2), {}),
    },
    "logsumexp": {
        "one channel": (9, 2, 1, 1, (27, 55), (3, 3), {"padding": (1, 0)}),
        "a block a sample": (105, 1, 4, 4, (17, 15), (3, 3), {"stride": (1, 2)}),
        "a cluster a sample": (14, 3, 4, 4, (55, 57), (1, 3), {"padding": (0, 1)}),
        "channels among lanes": (3, 28, 130, 2, (6, 9), (3, 3), {"dilation": (2, 1), "stride": (1, 2)}),
        "a team of blocks": (1, 2, 8, 8, (386, 484), (3, 1), {"stride": (1, 2)}),
        "long K": (3, 23, 16, 16, (10, 14), (5, 7), {"padding": (1, 0)}),
        "conv groups": (6, 14, 4, 4, (5, 4), (3, 3), {"groups": 2, "padding": 1, "dilation": (2, 1)}),
    },
}
SMALL = [(pipeline, name) for pipeline, chains in SMALL_CHAINS.items() for name in chains]


def make_small(pipeline, name, dtype, device):
    batch, c_in, c_out, groups, size, kernel, options = SMALL_CHAINS[pipeline][name]
    generator = torch.Generator().manual_seed(c_in * c_out)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    tensors = [draw(batch, c_in, *size), draw(c_out, c_in // options.get("groups", 1), *kernel) * 0.3]
    tensors += [draw(c_out), draw(c_out), draw(c_out)]
    x, weight, bias, gamma, beta = (t.to(device, dtype) for t in tensors)
    return [x, weight, bias, groups, gamma, beta], options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("pipeline", "name"), SMALL)
def test_small_chain_values(pipeline, name, dtype, device, poisoned):
    args, options = make_small(pipeline, name, dtype, device)
    function = PIPELINES[pipeline][0]
    y = function(*args, **options)
    check(pipeline, y, args, options)
    assert torch.equal(y, function(*args, **options)), "the same bits again"
    moved = [args[0].contiguous(memory_format=last_format(args[0])), *args[1:]]
    check(pipeline, function(*moved, **options), args, options)
    wide = torch.randn(args[0].shape[0] + 1, *args[0].shape[1:-1], args[0].shape[-1] + 3, device=device).to(dtype)
    wide[1:, ..., 2:-1] = args[0]
    assert torch.equal(y, function(wide[1:, ..., 2:-1], *args[1:], **options)), "a slice of something larger"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("pipeline", "name"), [one for one in SMALL if "divided" not in one[1]])
def test_small_chain_keeps_samples_apart(pipeline, name, value, device):
    """What is not finite makes its own sample NaN and no other."""
    args, options = make_small(pipeline, name, torch.float32, device)
    function = PIPELINES[pipeline][0]
    before = function(*args, **options)
    middle = tuple(size // 2 for size in args[0].shape[2:])
    args[0][(-1, 0, *middle)] = value
    after = function(*args, **options)
    expected = PIPELINES[pipeline][1](*args, **options)
    assert bool(after[-1].isnan().all()) == bool(expected[-1].isnan().all())
    assert torch.equal(before[:-1], after[:-1])


@pytest.mark.parametrize(("pipeline", "name"), SMALL)
def test_small_chain_gradients(pipeline, name, device):
    """Statistics that the one launch leaves for the backward."""
    args, options = make_small(pipeline, name, torch.float32, device)
    function, ref, *_ = PIPELINES[pipeline]
    at = [0, 1, 2, 4, 5]

    def gradients(f, inputs):
        inputs = [t.detach().clone().requires_grad_() if i in at else t for i, t in enumerate(inputs)]
        f(*inputs, **options).double().square().sum().backward()
        return [inputs[i].grad for i in at]

    exact = [true.to(device) for true in gradients(ref, upcast(args))]
    # Gradients of the bias in front of the norm are sums that cancel: nothing but rounding.
    least = 1e-4 * max(float(true.norm()) for true in exact)
    for own, torchs, true in zip(gradients(function, args), gradients(ref, args), exact, strict=True):
        allowed = 3 * float((torchs - true).norm()) + 2e-5 * max(float(true.norm()), least)
        assert float((own - true).norm()) <= allowed
