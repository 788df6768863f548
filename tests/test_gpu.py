"""What only a GPU shows: graphs, streams, devices, sizes beyond 2**31, the paths that ops take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kgopt import functional
from opcases import NAMES, small_calls
from pipeline_cases import kernels_of

pytestmark = pytest.mark.gpu
OPS = torch.ops.kgopt


def flat(out):
    return [out] if isinstance(out, torch.Tensor) else list(out)


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_cuda_graph(index):
    name, args, kwargs = small_calls("cuda")[index]
    op = getattr(OPS, name)
    expected = flat(op(*args, **kwargs))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op(*args, **kwargs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flat(op(*args, **kwargs))
    for o in out:
        o.fill_(float("nan"))
    graph.replay()
    for o, e in zip(out, expected, strict=True):
        torch.testing.assert_close(o, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_side_stream(index):
    name, args, kwargs = small_calls("cuda")[index]
    op = getattr(OPS, name)
    expected = flat(op(*args, **kwargs))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # The tensors arrive late on this stream: an op that ran on another one would read them before.
        torch.cuda._sleep(20_000_000)
        late = [a + 0 if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        out = flat(op(*late, **kwargs))
    stream.synchronize()
    for o, e in zip(out, expected, strict=True):
        torch.testing.assert_close(o, e, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_device_that_is_not_current(index):
    name, args, kwargs = small_calls("cuda:1")[index]
    assert torch.cuda.current_device() == 0
    out = flat(getattr(OPS, name)(*args, **kwargs))
    assert all(o.device.index == 1 for o in out)
    for o, e in zip(out, flat(getattr(OPS, name)(*small_calls("cpu")[index][1], **kwargs)), strict=True):
        torch.testing.assert_close(o.cpu(), e, rtol=1e-4, atol=1e-5)


def test_more_than_2_31_elements():
    free, _ = torch.cuda.mem_get_info()
    if free < 30 * 2**30:
        pytest.skip("needs 30 GB of GPU memory")
    torch.cuda.empty_cache()
    # 2.2e9 elements; only the last sample differs, beyond what 32-bit offsets reach.
    x = torch.zeros(3, 8, 960, 320, 300, device="cuda", dtype=torch.bfloat16)
    x[2].normal_()
    y = OPS.group_norm(x, 4)
    assert not y[0].any()
    exact = F.group_norm(x[2:, 6:8].float(), 1)
    torch.testing.assert_close(y[2:, 6:8].float(), exact, rtol=2e-2, atol=2e-2)
    del y, exact
    weight = torch.ones(4, 8, 1, 1, 1, device="cuda", dtype=torch.bfloat16) / 8
    c = functional.conv3d(x[:, :, ::2], weight, backend="kgopt")
    torch.testing.assert_close(c[2, 3, -1].float(), x[2, :, -2].float().mean(0), rtol=2e-2, atol=2e-2)
    assert not c[0].any()
    del c
    out = OPS.group_norm_mean(x, 4)
    torch.testing.assert_close(out, torch.zeros_like(out), rtol=0, atol=1e-3)


def test_more_than_2_32_threads():
    """Kernels that number their threads in 32 bits take samples of a large tensor in several launches."""
    free, _ = torch.cuda.mem_get_info()
    if free < 64 * 2**30:
        pytest.skip("needs 64 GB of GPU memory")
    torch.cuda.empty_cache()
    # A thread for each of 4.8e9 elements; only the last sample differs.
    x = torch.zeros(3, 1, 2**15, 3 * 2**14, device="cuda", dtype=torch.bfloat16)
    x[2].normal_()
    y = OPS.max_pool(x, [2, 1], [1, 1], [0, 0])
    assert not y[:2].any()
    assert torch.equal(y[2, 0, -64:], torch.maximum(x[2, 0, -65:-1], x[2, 0, -64:]))
    del y
    y = OPS.upsample_nearest(x[:, :, : 2**14].contiguous(), [2, 1])
    assert not y[:2].any()
    assert torch.equal(y[2, 0, ::2], x[2, 0, : 2**14])
    assert torch.equal(y[2, 0, 1::2], x[2, 0, : 2**14])
    assert torch.equal(OPS.upsample_nearest_backward(y, [1, 1]), y)
    del y
    y = OPS.upsample_linear(x)
    assert not y[:2].any()
    exact = F.interpolate(x[2:, :, :64].float(), scale_factor=2, mode="bilinear")
    torch.testing.assert_close(y[2:, :, :126].float(), exact[:, :, :126], rtol=1e-2, atol=1e-2)
    del x
    dx = OPS.upsample_linear_backward(y)
    assert not dx[:2].any()
    assert dx[2, 0, -1].any()


def test_explain_group_norm_says_how():
    def explain(shape, groups, dtype=torch.float32, **options):
        return OPS.explain_group_norm(torch.zeros((), dtype=dtype, device="cuda").expand(shape), groups, **options)

    assert "registers" in explain((2, 32, 8, 8), 8)
    assert explain((2, 32, 64, 64), 8, torch.float64).startswith("passes over memory: float64")
    assert explain((1, 32, 128, 128, 128), 8, backward=True, act="silu")
    if torch.cuda.get_device_capability() >= (9, 0):
        assert "tiles of a group" in explain((1, 32, 128, 128, 128), 8, torch.bfloat16)
        assert "larger than what the GPU holds" in explain((1, 32, 128, 128, 128), 8)
        assert "teams" in explain((1, 32, 128, 128, 128), 8, channels_last=True)
        assert "a group in the shared memory of a" in explain((8, 320, 64, 64), 32)
        assert "family tiles (group_norm_tiles_fwd_kernel); not small" in functional.explain_group_norm(
            torch.zeros((), dtype=torch.bfloat16, device="cuda").expand(1, 32, 128, 128, 128), 8
        )
    assert explain((1, 32, 0, 4), 8) == "nothing: x has no elements"


def test_explain_group_norm_conv_says_how():
    def explain(shape, out, *more, layout=torch.channels_last, **options):
        x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").contiguous(memory_format=layout)
        rank = len(shape) - 2
        w = torch.empty((out, shape[1], *[3] * rank), dtype=torch.bfloat16, device="cuda")
        rest = ([1] * rank, [1] * rank, [1] * rank, [0] * rank, 1, False, *more)
        return OPS.explain_group_norm_conv(x, w, *rest, **options)

    volume, last = (1, 64, 64, 64, 64), torch.channels_last_3d
    assert explain((1, 128, 64, 64), 3, "silu", moments=True).startswith("one kernel: few")
    assert explain((1, 128, 64, 64), 3, "silu").startswith("two kernels: few")
    assert "an activation behind" in explain((1, 128, 64, 64), 3, "silu", "relu")
    assert "not a plain convolution" in explain((1, 128, 64, 64), 3, layout=torch.contiguous_format)
    assert explain(volume, 64, "relu", layout=last, backend="kgopt:position_rows").startswith(
        "one kernel: positions as rows"
    )
    assert explain(volume, 64, "relu", layout=last).endswith("no moments of x")
    assert "neither relu nor silu" in explain(volume, 64, "gelu", moments=True, layout=last)
    assert "predicted" in explain(volume, 64, "silu", moments=True, layout=last, backend="kgopt") or "another one" in (
        explain(volume, 64, "silu", moments=True, layout=last, backend="kgopt")
    )
    assert explain(volume, 64, layout=last, backend="aten") == "two ops: backend is 'aten'"


# pipeline, x, output channels, kernel, norm groups, what explain_conv says, the kernel that it means
PIPELINE_PATHS = {
    "small mean": ("stats", (5, 3, 6, 9, 12), 24, 3, 8, "kgopt: a small chain", "conv_chain_kernel"),
    "mean": ("stats", (64, 3, 12, 32, 32), 24, 3, 8, "kgopt: few input channels", "conv_window_kernel"),
    "wide mean": ("stats", (4, 64, 6, 18, 18), 96, 3, 8, "output is stored", "group_norm_mean"),
    "small logsumexp": ("logsumexp", (9, 2, 27, 55), 4, 3, 4, "kgopt: a small chain", "conv_chain_kernel"),
    "logsumexp": ("logsumexp", (64, 8, 96, 96), 64, 3, 16, "kgopt: few input channels", "conv_positions_kernel"),
    "long logsumexp": ("logsumexp", (1, 8, 1600, 1600), 16, 5, 4, None, None),
    "from the input": ("logsumexp", (128, 8, 96, 128), 64, 3, 16, "autocorrelation", "conv_autocorrelation_kernel"),
    "relu and norm": (
        "relu_norm",
        (8, 64, 16, 30, 30),
        128,
        3,
        8,
        "in one launch on wgmma",
        "conv_transposed_norm_kernel",
    ),
    "few": ("relu_norm", (2, 8, 16, 16, 16), 16, 3, 4, "kgopt: few channels", "conv_fprop_kernel"),
    "wide": ("relu_norm", (2, 200, 6, 6, 6), 40, 3, 4, "output is stored", "group_norm"),
}


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PIPELINE_PATHS)
def test_explain_conv_of_pipelines_says_what_runs(name, dtype):
    torch.backends.cudnn.allow_tf32 = True
    epilogue, shape, c_out, k, groups, said, kernel = PIPELINE_PATHS[name]
    rank, transposed = len(shape) - 2, epilogue == "relu_norm"
    x = torch.randn(shape, device="cuda").to(dtype)
    channels = (shape[1], c_out) if transposed else (c_out, shape[1])
    weight = torch.randn(*channels, *[k] * rank, device="cuda").to(dtype)
    function = {
        "stats": functional.conv3d_group_norm_mean,
        "relu_norm": functional.conv_transpose3d_relu_group_norm,
        "logsumexp": functional.conv2d_group_norm_tanh_hardswish_residual_logsumexp,
    }[epilogue]
    geometry = [1] * rank, [0] * rank, [1] * rank, [0] * rank, 1, transposed
    text = OPS.explain_conv(x, weight, *geometry, epilogue, num_groups=groups)
    names = kernels_of(lambda: function(x, weight, None, groups))
    if said is not None:
        assert said in text, text
        assert kernel in names, (text, names)
    fused = ("conv_chain_kernel", "conv_transposed_norm_kernel", "conv_autocorrelation_kernel")
    for word, kernel in zip(("small chain", "norm in one launch", "autocorrelation"), fused, strict=True):
        assert (word in text) == (kernel in names), (text, names)
    if "output is stored" in text:
        assert text.startswith("aten: ") or "conv_" in names, (text, names)
    with pytest.raises(RuntimeError, match="num_groups is 7"):
        OPS.explain_conv(x, weight, *geometry, epilogue, num_groups=7)


def test_explain_conv_says_why():
    x, weight = torch.empty(2, 8, 32, 32, device="cuda"), torch.empty(64, 8, 3, 3, device="cuda")
    arguments = ([1, 1], [0, 0], [1, 1], [0, 0], 1, False)
    assert "nearest measured convolutions: cuDNN: " in OPS.explain_conv(x, weight, *arguments)
    assert OPS.explain_conv(x, weight, *arguments, backend="kgopt").startswith("kgopt: ")
    assert OPS.explain_conv(x, weight, *arguments, "logsumexp").startswith("kgopt: ")
    assert "asked for" in OPS.explain_conv(x, weight, *arguments, backend="aten")
    wide = torch.empty(2, 256, 8, 8, device="cuda"), torch.empty(256, 256, 3, 3, device="cuda")
    assert OPS.explain_conv(*wide, *arguments).startswith("aten: ")
    assert OPS.explain_conv(x.double(), weight.double(), *arguments, backend="kgopt").startswith("kgopt (direct): ")
