"""What compiled code computes itself where ATen has a slow kernel (rewrite/inductor/decomposed.py)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kgopt.rewrite.inductor.decomposed import DECOMPOSITIONS

ATEN = torch.ops.aten
PADS = {
    1: [(0, 0), (2, 1), (0, 3), (7, 9)],
    2: [(1, 1, 1, 1), (0, 2, 3, 0), (5, 0, 0, 7)],
    3: [(1, 1, 1, 1, 1, 1), (0, 0, 0, 0, 2, 0), (3, 1, 0, 2, 4, 0)],
}


@pytest.mark.parametrize("sizes", [(5, 4, 6), (1, 1, 1), (2, 1, 3)])
@pytest.mark.parametrize(("rank", "pad"), [(rank, pad) for rank, pads in PADS.items() for pad in pads])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one sample", "batch"])
def test_replicate_padding_has_atens_gradient(rank, pad, sizes, batch):
    x = torch.randn(*batch, 2, *sizes[:rank], dtype=torch.float64)
    dy = torch.randn_like(F.pad(x, pad, mode="replicate"))
    op = getattr(ATEN, f"replication_pad{rank}d_backward").default
    torch.testing.assert_close(DECOMPOSITIONS[op](dy, x, list(pad)), op(dy, x, list(pad)), rtol=1e-12, atol=1e-12)


def test_padding_that_cuts_off_is_atens():
    x = torch.randn(2, 3, 5, 6)
    op = ATEN.replication_pad2d_backward.default
    assert DECOMPOSITIONS[op](torch.randn(2, 3, 5, 6), x, [1, -1, 0, 0]) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    """ATen adds in half precision: 1 + 2^-9 + 2^-9 + ... stays 1 there in bf16."""
    dy = torch.full((1, 1, 1, 9), 2.0**-9).to(dtype)
    dy[..., -1] = 1
    got = DECOMPOSITIONS[ATEN.replication_pad2d_backward.default](
        dy, torch.empty(1, 1, 1, 1, dtype=dtype), [8, 0, 0, 0]
    )
    assert got.dtype is dtype
    assert float(got) == float((dy.double().sum()).to(dtype))


MAX_POOLS = {
    "halves": {"kernel_size": 2},
    "flat": {"kernel_size": (1, 2, 2)},
    "rounded up": {"kernel_size": 2, "ceil_mode": True},
    "overlap": {"kernel_size": 3, "stride": 2, "padding": 1},
    "some overlap": {"kernel_size": (3, 2, 3), "stride": (2, 2, 3), "padding": (1, 0, 1), "ceil_mode": True},
    "gaps": {"kernel_size": 2, "stride": 3},
}


@pytest.mark.parametrize("sizes", [(6, 8, 4), (5, 7, 9)])
@pytest.mark.parametrize("pool", MAX_POOLS)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one sample", "batch"])
def test_max_pooling_has_atens_gradient(pool, sizes, batch):
    op = ATEN.max_pool3d_with_indices_backward.default
    x = torch.randint(0, 5, (*batch, 2, *sizes)).double()  # equal ones: the first of them counts
    options = {"stride": (), "padding": 0, "dilation": 1, "ceil_mode": False} | MAX_POOLS[pool]
    given = [options[key] for key in ("kernel_size", "stride", "padding", "dilation")]
    given = [[v] * 3 if isinstance(v, int) else list(v) for v in given]
    y, indices = ATEN.max_pool3d_with_indices(x, *given, options["ceil_mode"])
    dy = torch.randn_like(y)
    got = DECOMPOSITIONS[op](dy, x, *given, options["ceil_mode"], indices)
    torch.testing.assert_close(got, op(dy, x, *given, options["ceil_mode"], indices), rtol=1e-12, atol=1e-12)


def test_max_pooling_of_large_windows_is_atens():
    x = torch.randn(1, 1, 6, 6, 6)
    dy, indices = ATEN.max_pool3d_with_indices(x, [3, 3, 3], [1, 1, 1])
    op = ATEN.max_pool3d_with_indices_backward.default
    assert DECOMPOSITIONS[op](dy, x, [3], [1], [0], [1], False, indices) is NotImplemented
    assert DECOMPOSITIONS[op](dy, x, [2], [2], [0], [2], False, indices) is NotImplemented


@pytest.mark.parametrize("options", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_code_pools_backward(options, dtype, device):
    """No kernel of ATen is left for it; half precision adds up in float32."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    def model(x):
        return F.relu(F.max_pool3d(x, **options) - 1)

    torch.manual_seed(0)
    x = torch.randn(2, 5, 7, 8, 6, dtype=dtype, device=device).to(memory_format=torch.channels_last_3d)
    x.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="kgopt", options={"kgopt.always": True})
    _, code = run_fw_bw_and_get_code(lambda: compiled(x).sum())
    y = compiled(x)
    dy = torch.randn_like(y)
    (actual,) = torch.autograd.grad(y, x, dy)
    (expected,) = torch.autograd.grad(model(x.double()), x, dy.double())
    assert actual.dtype is dtype
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=2**-8 if dtype is torch.bfloat16 else 1e-12, atol=1e-12
    )
    assert "max_pool3d_with_indices_backward.default(" not in "".join(code)


class Padded(nn.Module):
    """Padding by a convolution and by a function."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        conv = (nn.Conv2d, nn.Conv3d)[rank - 2]
        self.rank = rank
        self.first = conv(4, 8, 3, padding=1, padding_mode="replicate")
        self.norm = nn.GroupNorm(2, 8)
        self.second = conv(8, 4, 3)

    def forward(self, x):
        y = F.silu(self.norm(self.first(x)))
        return self.second(F.pad(y, (2, 0, 1, 3, 0, 1)[: 2 * self.rank], mode="replicate"))


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_code_has_the_gradient(rank, device):
    """No kernel of ATen is left for it."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch.manual_seed(0)
    model = Padded(rank).double().to(device)
    x = torch.randn(2, 4, *[6, 7, 5][:rank], dtype=torch.float64, device=device, requires_grad=True)
    inputs = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().sum(), inputs)
    compiled = torch.compile(model, backend="kgopt", options={"kgopt.always": True})
    _, code = run_fw_bw_and_get_code(lambda: compiled(x).square().sum())
    model.zero_grad()
    actual = torch.autograd.grad(compiled(x).square().sum(), inputs)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)
    assert code
    assert f"replication_pad{rank}d_backward.default(" not in "".join(code)


POOLS = [  # sizes, results of a channel
    ((16, 16), (2, 2)),
    ((12, 19), (3, 2)),
    ((33, 5), (1, 5)),
    ((8, 8, 8), (2, 2, 2)),
    ((9, 7, 11), (2, 3, 1)),
]


@pytest.mark.parametrize(("sizes", "results"), POOLS)
def test_adaptive_pooling_has_atens_values_and_gradient(sizes, results):
    rank = len(sizes)
    x = torch.randn(2, 3, *sizes, dtype=torch.float64)
    name = f"_adaptive_avg_pool{rank}d"
    forward, backward = getattr(ATEN, name).default, getattr(ATEN, f"{name}_backward").default
    y = forward(x, results)
    torch.testing.assert_close(DECOMPOSITIONS[forward](x, results), y, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(y)
    dx = DECOMPOSITIONS[backward](dy, x)
    if any(s % r for s, r in zip(sizes, results, strict=True)):
        assert dx is NotImplemented
    else:
        torch.testing.assert_close(dx, backward(dy, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "results"), [((4, 4), (2, 2)), ((64, 64), (16, 16)), ((3, 64), (6, 2)), ((64, 64), (1, 1))]
)
def test_other_adaptive_pooling_is_atens(sizes, results):
    """Small windows, many, some that are repeated, and what is a reduction already."""
    x = torch.randn(1, 2, *sizes)
    assert DECOMPOSITIONS[ATEN._adaptive_avg_pool2d.default](x, results) is NotImplemented


class Pyramid(nn.Module):
    """Pooling to several sizes beside each other, as PSPNet and UPerNet have it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        pool = (nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[rank - 2]
        conv = (nn.Conv2d, nn.Conv3d)[rank - 2]
        self.conv, self.norm = conv(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.pools = nn.ModuleList(pool(n) for n in (1, 2, 3))

    def forward(self, x):
        y = F.silu(self.norm(self.conv(x)))
        return torch.cat([pool(y).flatten(2) for pool in self.pools], 2)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_code_pools(rank, device):
    """No kernel of ATen is left for it in inference."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    model = Pyramid(rank).double().to(device)
    x = torch.randn(2, 3, *[26, 25, 13][:rank], dtype=torch.float64, device=device, requires_grad=True)
    inputs = [x, *model.parameters()]
    expected, y = torch.autograd.grad(model(x).square().sum(), inputs), model(x)
    compiled = torch.compile(model, backend="kgopt", options={"kgopt.always": True})
    actual = torch.autograd.grad(compiled(x).square().sum(), inputs)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        got, code = run_and_get_code(compiled, x)
    torch.testing.assert_close(got, y, rtol=1e-9, atol=1e-9)
    assert code
    assert f"_adaptive_avg_pool{rank}d.default(" not in "".join(code)
