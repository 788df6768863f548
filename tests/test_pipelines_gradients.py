"""Gradients of the fused pipelines, and the memory that they take at the peak."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kgopt import accuracy, reference
from kgopt.ops import pipelines
from pipeline_cases import CASES, PIPELINES, gradients, kernels_of, last_format, make, upcast
from tolerances import relative_error, round_tf32


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


@pytest.mark.parametrize("values", ["large", "constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [(8, 4, 2, 3), (31, 15, 1, 5), (6, 4, 4, 1), (47, 6, 6, 1)], ids=str)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_gradients_of_what_halves_round_far(pipeline, case, dtype, values, device, poisoned):
    """The backward's convolution is rounded to the dtype, the forward's is not. At 1e5 that took the third pipeline's
    exponentials out of range, and x's gradient was NaN; where a sample is constant, the distance from the forward's
    mean was all rounding, and gradients were 30 times as large as they are."""
    function, ref, transposed, rank = PIPELINES[pipeline]
    c_in, c_out, groups, kernel = case
    sizes = (6, 13, 9)[-rank:]
    weight = torch.randn(*((c_in, c_out) if transposed else (c_out, c_in)), *[kernel] * rank, device=device)
    gamma, beta = torch.randn(2, c_out, device=device)
    if values == "large":
        x = 1000 * torch.randn(2, c_in, *sizes, device=device)
        if dtype == torch.float16:  # below its largest number
            x = x / 8 / kernel**rank
    else:
        x, sizes = torch.full((2, c_in, *sizes), 0.7, device=device), sizes if kernel == 1 else (kernel,) * rank
        x = x[(..., *(slice(s) for s in sizes))]
    args = [t.to(dtype) for t in (x, weight, 0 * beta)] + [groups, gamma.to(dtype), beta.to(dtype)]
    dout = torch.randn(ref(*args).shape, device=device)
    mine, theirs, exact = (
        [g.double().cpu() for g in gradients(f, a, dout)]
        for f, a in ((function, args), (ref, args), (ref, upcast(args)))
    )
    for name, m, t, e in zip(("x", "weight", "bias", "gamma", "beta"), mine, theirs, exact, strict=True):
        assert m.isfinite().all(), name
        # PyTorch's formulas from a convolution's output that is off by a rounding: what is left of terms that cancel.
        size = float(e.norm()) + accuracy.TINY[dtype] * float(dout.norm()) * float(weight.abs().max()) * 1000
        assert float((m - e).norm()) <= 2 * float((t - e).norm()) + 0.1 * size, name


class IdealConv(torch.autograd.Function):
    """A convolution and its gradients from operands rounded to TF32, to nearest, in fp64."""

    @staticmethod
    def forward(ctx, x, weight, bias, *geometry):
        x, weight = round_tf32(x).double(), round_tf32(weight).double()
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        conv = torch.conv2d if x.dim() == 4 else torch.conv3d
        return conv(x, weight, bias.double(), *geometry)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        rank = x.dim() - 2
        sides = ([v] * rank if isinstance(v, int) else v for v in (stride, padding, dilation))
        dx, dweight, _ = torch.ops.aten.convolution_backward(
            round_tf32(dy).double(), x, weight, None, *sides, False, [0] * rank, groups, [True, True, False]
        )
        return dx, dweight, dy.sum((0, *range(2, x.dim()))), None, None, None, None


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
        patched.setattr(reference.F, "conv2d", IdealConv.apply)
        ideal = gradients(ref, doubles, dout)
    for name, m, t, e, i in zip(("x", "weight", "bias", "gamma", "beta"), mine, theirs, exact, ideal, strict=True):
        error, allowed = relative_error(m, e), 2 * max(relative_error(t, e), relative_error(i, e)) + 1e-6
        assert error <= allowed, (name, error, allowed)


def peak_of_a_step(forward, leaves):
    """Bytes beyond what was there, of a forward and its gradients."""
    for _ in range(2):  # the first may allocate what stays
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = forward()
        gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del y, gradients
    return peak


# n, c_in, c_out, groups, size, kernel, padding; then what x's gradient does not take: stride. dy of "large" and "wide"
# is stored for dx in turns, in float32 "large" in two of different numbers of samples; elsewhere dx comes without.
MADE = {
    "large": (9, 3, 24, 8, (24, 96, 96), (3, 3, 3), 0, 1),
    "headline": (16, 3, 24, 8, (24, 32, 32), (3, 3, 3), 0, 1),
    "padded": (3, 3, 24, 4, (9, 17, 40), (3, 3, 3), 1, 1),
    "one channel": (2, 1, 16, 4, (12, 30, 66), (3, 3, 3), (1, 0, 1), 1),
    "odd": (5, 3, 20, 5, (6, 11, 38), (2, 3, 3), 0, 1),
    "two by two": (5, 3, 20, 5, (6, 11, 40), (2, 2, 2), (0, 0, 1), (1, 2, 1)),
    "wide": (2, 4, 72, 8, (5, 20, 36), (3, 3, 3), 1, 1),
    "one by one": (2, 8, 40, 4, (8, 9, 32), (1, 1, 1), 0, 1),
    "many samples": (300, 3, 24, 8, (4, 12, 16), (3, 3, 3), 1, 1),
    "one sample": (1, 2, 12, 4, (41, 13, 14), (3, 2, 3), (2, 1, 1), 1),
    "flat": (2, 10, 33, 3, (4, 40, 64), (1, 3, 3), (0, 1, 1), 1),
    "strided": (2, 3, 24, 8, (13, 24, 32), (3, 3, 3), 1, (2, 2, 1)),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's")
@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", MADE)
def test_first_pipelines_gradients_without_the_output(case, precision, monkeypatch, poisoned):
    n, c_in, c_out, groups, size, kernel, padding, stride = MADE[case]
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    if case == "two by two" and dtype.itemsize == 2:
        pytest.skip("rows of an odd number of half values")
    x, weight = torch.randn(n, c_in, *size, device="cuda"), torch.randn(c_out, c_in, *kernel, device="cuda") * 0.3
    bias, gamma, beta = torch.randn(3, c_out, device="cuda")
    args = [t.to(dtype) for t in (x, weight, bias)] + [groups, gamma.to(dtype), beta.to(dtype)]
    dout = torch.randn(n, device="cuda")
    taken = []

    def counted(*arguments, **options):
        taken.append(run(*arguments, **options))
        return taken[-1]

    run = pipelines._mean_gradients
    monkeypatch.setattr(pipelines, "_mean_gradients", counted)

    def ours(*values):
        return PIPELINES["mean"][0](*values, stride=stride, padding=padding, backend="kgopt")

    def plain(*values):
        return PIPELINES["mean"][1](*values, stride=stride, padding=padding)

    def of(function, values):
        if stride == 1:
            return gradients(function, values, dout)
        return gradients(lambda *rest: function(values[0], *rest), values[1:], dout)

    mine, again, theirs = of(ours, args), of(ours, args), of(plain, args)
    assert [t[-1].numel() for t in taken] == [c_out, c_out], "it was another path"
    doubles = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    exact = ideal = of(plain, doubles)
    if precision == "tf32":
        monkeypatch.setattr(reference.F, "conv3d", IdealConv.apply)
        ideal = of(lambda *v: reference.conv3d_group_norm_mean_ref(*v, stride=stride, padding=padding), doubles)
    names = ("x", "weight", "bias", "gamma", "beta")[-len(mine) :]
    for name, m, a, t, e, i in zip(names, mine, again, theirs, exact, ideal, strict=True):
        assert torch.equal(m, a), name
        error, bar = relative_error(m, e), accuracy.allowed(dtype, relative_error(t, e), relative_error(i, e))
        assert m.dtype == t.dtype
        assert error <= bar, (name, error, bar)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs_x", [True, False])
def test_first_pipelines_training_never_stores_the_output(dtype, needs_x):
    """In float32 it is 232 MiB here. dx and dweight come from one kernel, and dy is stored for no sample."""
    x = torch.randn(128, 3, 24, 32, 32, device="cuda", dtype=dtype, requires_grad=needs_x)
    weight = torch.randn(24, 3, 3, 3, 3, device="cuda", dtype=dtype, requires_grad=True)
    bias, gamma, beta = (torch.randn(24, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    leaves = [t for t in (x, weight, bias, gamma, beta) if t.requires_grad]
    peak = peak_of_a_step(lambda: PIPELINES["mean"][0](x, weight, bias, 8, gamma, beta), leaves)
    assert peak <= (x.nbytes if needs_x else 0) + 8 * 2**20, peak


# n, c_in, c_out, groups, size, kernel, padding; then what x's gradient does not take: stride.
LSE_MADE = {
    "headline": (4, 8, 64, 16, (128, 128), (3, 3), 0, 1),
    "padded": (3, 8, 64, 8, (17, 40), (3, 3), 1, 1),
    "odd": (5, 8, 40, 5, (11, 40), (2, 3), 0, 1),
    "one by one": (2, 8, 48, 4, (9, 32), (1, 1), 0, 1),
    "wide": (2, 8, 64, 1, (7, 200), (3, 3), (1, 0), 1),
    "tall": (2, 8, 64, 8, (45, 40), (3, 1), (2, 0), 1),
    "large": (2, 8, 64, 16, (24, 64), (3, 3), 0, 1),
    "strided": (3, 8, 64, 8, (25, 40), (3, 3), (1, 1), (2, 1)),
    "five channels": (3, 5, 48, 4, (9, 40), (3, 3), 1, 1),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's")
@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", LSE_MADE)
def test_third_pipelines_gradients_without_the_output(case, precision, monkeypatch, poisoned):
    n, c_in, c_out, groups, size, kernel, padding, stride = LSE_MADE[case]
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    if case == "five channels" and dtype.itemsize == 2:
        pytest.skip("input channels that 16 bytes of a position do not divide")
    x, weight = torch.randn(n, c_in, *size, device="cuda"), torch.randn(c_out, c_in, *kernel, device="cuda") * 0.3
    if case == "large":  # exponentials that are out of range without a shift
        x = x * 300
    bias, gamma, beta = torch.randn(3, c_out, device="cuda")
    args = [t.to(dtype) for t in (x, weight, bias)] + [groups, gamma.to(dtype), beta.to(dtype)]
    geometry = {"stride": stride, "padding": padding}
    function, ref, *_ = PIPELINES["logsumexp"]
    taken = []

    def counted(*arguments, **options):
        taken.append(run(*arguments, **options))
        return taken[-1]

    run = pipelines._lse_gradients
    monkeypatch.setattr(pipelines, "_lse_gradients", counted)
    dout = torch.randn(ref(*args, **geometry).shape, device="cuda")

    def of(function, values, **options):
        if stride == 1:
            return gradients(lambda *v: function(*v, **geometry, **options), values, dout)
        return gradients(lambda *rest: function(values[0], *rest, **geometry, **options), values[1:], dout)

    mine, again = (of(function, args, backend="kgopt") for _ in range(2))
    theirs = of(ref, args)
    assert [t[-1].numel() for t in taken] == [c_out, c_out], "it was another path"
    doubles = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    exact = ideal = of(ref, doubles)
    if precision == "tf32":
        monkeypatch.setattr(reference.F, "conv2d", IdealConv.apply)
        ideal = of(ref, doubles)
    names = ("x", "weight", "bias", "gamma", "beta")[-len(mine) :]
    for name, m, a, t, e, i in zip(names, mine, again, theirs, exact, ideal, strict=True):
        assert torch.equal(m, a), name
        error, bar = relative_error(m, e), accuracy.allowed(dtype, relative_error(t, e), relative_error(i, e))
        assert m.dtype == t.dtype
        assert error <= bar, (name, error, bar)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's")
@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16"])
@pytest.mark.parametrize("dilation", [1, (2, 1)])
def test_third_pipelines_gradients_come_from_the_pass_that_makes_dy(dilation, precision, monkeypatch):
    """Where that is not for such a convolution, from dy in memory."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x, weight = torch.randn(2, 8, 45, 40, device="cuda"), torch.randn(64, 8, 3, 3, device="cuda")
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight, *torch.randn(3, 64, device="cuda"))]
    x, weight, bias, gamma, beta = leaves
    function = PIPELINES["logsumexp"][0]

    def step():
        y = function(x, weight, bias, 8, gamma, beta, dilation=dilation, backend="kgopt")
        return torch.autograd.grad(y.sum(), leaves)

    names = kernels_of(step)
    assert "conv_norm_lse_kernel" in names
    assert ("norm_lse_dx_borders_kernel" in names) == (dilation == 1)
    assert ("conv_few_dgrad_kernel" in names) == (dilation != 1)
    assert ("norm_lse_dweight_kernel" in names) == (dilation == 1)
    assert ("conv_few_wgrad_kernel" in names) == (dilation != 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_third_pipelines_dweight_without_dx(dtype, monkeypatch):
    """The same bits as beside dx, which the pass need not make."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    x, weight = torch.randn(3, 8, 45, 40, device="cuda"), torch.randn(64, 8, 3, 3, device="cuda")
    x, weight, bias, gamma, beta = (t.to(dtype) for t in (x, weight, *torch.randn(3, 64, device="cuda")))
    taken = []
    for leaves in ([weight, bias], [weight, bias, x]):
        for leaf in leaves:
            leaf.requires_grad_()
        y = PIPELINES["logsumexp"][0](x, weight, bias, 8, gamma, beta, backend="kgopt")
        taken.append(torch.autograd.grad(y.sum(), leaves)[:2])
    for alone, beside in zip(*taken, strict=True):
        assert torch.equal(alone, beside)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16"])
def test_third_pipelines_training_stores_no_tensor_of_the_outputs_size(precision, layout, monkeypatch):
    """Neither the convolution's output nor its gradient."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.randn(16, 8, 128, 128, device="cuda", dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format)
    weight, out = torch.randn(64, 8, 3, 3, device="cuda", dtype=dtype), 16 * 64 * 126 * 126 * dtype.itemsize
    bias, gamma, beta = torch.randn(3, 64, device="cuda", dtype=dtype)
    leaves = [t.requires_grad_() for t in (x, weight, bias, gamma, beta)]
    peak = peak_of_a_step(lambda: PIPELINES["logsumexp"][0](x, weight, bias, 16, gamma, beta), leaves)
    assert peak < out, (peak, out)


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
