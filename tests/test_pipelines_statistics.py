"""Statistics of convolutions that are not stored, and of those that are found from the input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pipeline_cases import PIPELINES, mean_tolerance, upcast
from tolerances import round_tf32

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
@pytest.mark.parametrize(
    ("c_in", "c_out", "kernel"),
    [(6, 61, (4, 4, 4)), (3, 6, (5, 5, 7)), (8, 20, (5, 4, 5)), (12, 30, (3, 3, 3)), (16, 64, (3, 5, 5))],
    ids=str,
)
def test_statistics_of_long_sums_without_tf32(c_in, c_out, kernel, poisoned):
    """Tensor cores truncate where they add: of hundreds of products all outputs came out too small."""
    torch.backends.cudnn.allow_tf32 = False
    x = torch.randn(8, c_in, 16, 18, 20, device="cuda")
    weight, once = torch.randn(c_out, c_in, *kernel, device="cuda"), [1, 1, 1]
    none = None, 1, None, None, once, [0, 0, 0], once, 1, 1e-5
    _, _, mean, rstd = torch.ops.kgopt.conv3d_group_norm_mean_fwd(x, weight, *none)
    y = F.conv3d(x.double(), weight.double()).flatten(1)
    exact_mean, exact_rstd = y.mean(1), (y.var(1, correction=0) + 1e-5) ** -0.5
    assert float((rstd[:, 0] / exact_rstd - 1).abs().max()) <= 6e-7
    assert float(((mean[:, 0] - exact_mean) * exact_rstd).abs().max()) <= 6e-7


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
