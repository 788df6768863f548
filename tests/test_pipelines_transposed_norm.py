"""The second pipeline in one launch (csrc/conv3d/wgmma/transposed_norm)."""

from __future__ import annotations

import pytest
import torch

from pipeline_cases import PIPELINES, upcast
from tolerances import assert_as_good_as_torch, relative_error, round_tf32

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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["tf32", torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", FLAT)
def test_training_keeps_what_the_norm_reads(case, dtype, poisoned):
    """The launch gives the norm and, in another tensor, what it read; the same bits are the inference's in fp32."""
    tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = tf32
    args, options = make_flat(case, torch.float32 if tf32 else dtype)
    function, *_ = PIPELINES["relu_norm"]
    forward = torch.ops.kgopt.conv_transpose3d_relu_group_norm_fwd
    x, weight, bias, groups, gamma, beta = args
    geometry = {"dilation": [options["dilation"]] * 3}
    y, kept, mean, rstd = forward(x, weight, bias, groups, gamma, beta, **geometry, backend="kgopt")
    again = torch.nn.functional.group_norm(kept.double().relu(), groups, gamma.double(), beta.double())
    tiny = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(kept.dtype, 2e-5)
    assert relative_error(y, again) < tiny
    grouped = kept.double().relu().reshape(len(x), groups, -1)
    assert relative_error(mean, grouped.mean(2)) < 1e-5
    assert relative_error(rstd, (grouped.var(2, correction=0) + 1e-5).rsqrt()) < 1e-4
    if kept.dtype is torch.float32:
        assert torch.equal(y, function(*args, **options, backend="kgopt"))

    a, b, c, d, e = leaves = [t.detach().requires_grad_() for t in (x, weight, bias, gamma, beta)]
    out = function(a, b, c, groups, d, e, **options, backend="kgopt")
    assert torch.equal(out, y)
    dout = torch.randn_like(out)
    mine = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert all(torch.equal(m, n) for m, n in zip(mine, torch.autograd.grad(out, leaves, dout), strict=True))
    # Of what was kept: another rounding of it would turn some of relu's slopes.
    inner = kept.detach().double().requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (gamma, beta)]
    normed = torch.nn.functional.group_norm(inner.relu(), groups, *wide)
    dc, *affine = torch.autograd.grad(normed, [inner, *wide], dout.double())
    sizes = [weight.shape[1]], [1] * 3, [0] * 3, geometry["dilation"], True, [0] * 3, 1, [True] * 3
    exact = [*torch.ops.aten.convolution_backward(dc, x.double(), weight.double(), *sizes), *affine]
    tiny = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}.get(kept.dtype, 1e-3 if tf32 else 2e-5)
    for name, m, right in zip(("x", "weight", "bias", "gamma", "beta"), mine, exact, strict=True):
        # A bias's gradient is what is left of terms that cancel.
        size = dc.abs().sum((0, 2, 3, 4)) * 1e-1 if name == "bias" else None
        assert relative_error(m, right, size) <= tiny, (name, relative_error(m, right, size))


@pytest.mark.gpu
def test_training_in_one_launch_may_be_changed_in_place_and_differentiated_twice():
    torch.backends.cudnn.allow_tf32 = False
    args, options = make_flat("copy of x in the output", torch.float32)
    function, ref, *_ = PIPELINES["relu_norm"]
    results = []
    for run in (function, ref):
        a, b, c, d, e = leaves = [args[i].detach().clone().requires_grad_() for i in (0, 1, 2, 4, 5)]
        y = run(a, b, c, args[3], d, e, **options)
        y.mul_(2).add_(1)
        first = torch.autograd.grad((y * y).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), leaves)
        results.append([t.detach() for t in (y, *first, *second)])
    for mine, theirs in zip(*results, strict=True):
        assert relative_error(mine, theirs) < 1e-2  # of relu's slopes some may turn


@pytest.mark.gpu
@pytest.mark.parametrize("values", ["channels far apart", "an outlier", "tiny", "huge", "infinite"])
def test_scaled_operands_have_tf32s_accuracy(values, poisoned):
    torch.backends.cudnn.allow_tf32 = True
    args, options = make_flat("tiles across planes", torch.float32)
    function, ref, *_ = PIPELINES["relu_norm"]
    x, weight = args[:2]
    if values == "channels far apart":
        scales = 10.0 ** torch.linspace(-6, 6, x.shape[1], device="cuda")
        x *= scales.view(1, -1, 1, 1, 1)
        weight /= scales.view(-1, 1, 1, 1, 1)
    elif values == "an outlier":
        x[0, 3, 4, 5, 6] = 1e4
    elif values == "infinite":  # relu makes a number of one of them
        x[0, 3, 4, 5, 6] = float("inf")
        weight[3] = -weight[3].abs() - 1
    else:
        x *= 1e-30 if values == "tiny" else 1e15
        args[2] *= 0
    if torch.cuda.get_device_capability() == (9, 0):
        geometry = [1] * 3, [0] * 3, [1] * 3, [0] * 3, 1, True, "relu_norm", "kgopt"
        assert "scaled by powers of two" in torch.ops.kgopt.explain_conv(x, weight, *geometry)
    exact = ref(*upcast(args), **options).cuda()
    ideal = ref(*upcast([round_tf32(x), round_tf32(weight), *args[2:]]), **options).cuda()
    y = function(*args, **options, backend="kgopt")
    assert torch.equal(y.isnan(), exact.isnan())
    assert relative_error(y, exact) <= 2 * relative_error(ideal, exact) + 1e-6
