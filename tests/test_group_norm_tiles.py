"""GroupNorm of large groups, which one launch reads once by tiles (csrc/groupnorm/tiles)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kgopt import reference
from norm_gradients import check_gradients, gradients_of
from shapes import DTYPES, make, norm_shape
from tolerances import assert_all_as_good, assert_as_good_as_torch

OPS = torch.ops.kgopt

# Groups of 0.6 to 27 MB, and many of 50 to 110 KB, which one launch reads once on a GPU with bulk copies. Named by what
# is hard about them.
LARGE_GROUPS = {
    "few long rows": ((1, 16, 64, 64, 40), 2),
    "groups off the 128-byte lines": ((3, 6, 71, 73, 60), 3),
    "vectors across rows": ((2, 40, 130, 129), 2),
    "rows shorter than a tile": ((1, 4096, 16, 17), 1),
    "one channel a group": ((2, 3, 512, 520), 3),
    "tiles in registers": ((1, 4, 4, 409, 1403), 2),
    "tiles in registers, 16 bits": ((1, 4, 8, 409, 1205), 2),
    "more tiles than slots but one": ((1, 4, 4, 650, 650), 1),
    "runs of tiles, the last not full": ((1, 96, 300, 295), 24),
    "a block each in turn": ((150, 6, 75, 120), 2),
    "a block each in turn, vectors across rows": ((140, 8, 2, 3501), 2),
}


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", LARGE_GROUPS)
def test_group_norm_large_groups(name, dtype, device, poisoned):
    shape, groups = LARGE_GROUPS[name]
    shape = norm_shape(shape, device)
    for scale, offset in ((1.0, 0.0), (0.01, 0.0), (3.0, 100.0)):
        x, weight, bias = make(shape, dtype, device, scale=scale, offset=offset)
        y, mean, rstd = OPS.group_norm_fwd(x, groups, weight, bias, 1e-5, "silu", "none")
        exact = reference.group_norm_ref(x.double(), groups, weight.double(), bias.double(), act="silu")
        assert_as_good_as_torch(y, reference.group_norm_ref(x, groups, weight, bias, act="silu"), exact)
        stats = x.double().reshape(shape[0], groups, -1)
        torch.testing.assert_close(mean.double(), stats.mean(2), rtol=1e-5, atol=1e-5 * scale)
        torch.testing.assert_close(rstd.double(), (stats.var(2, correction=0) + 1e-5).rsqrt(), rtol=1e-4, atol=0)
        again = OPS.group_norm_fwd(x, groups, weight, bias, 1e-5, "silu", "none")
        assert all(torch.equal(a, b) for a, b in zip((y, mean, rstd), again, strict=True))


@pytest.mark.parametrize("affine", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", [8, 24, 1])
def test_group_norm_large_groups_in_a_view(start, affine, device, poisoned):
    """x begins at any element of its storage; weight and bias absent, or of another type."""
    base = torch.randn(start + 2 * 8 * 90_000, device=device, dtype=torch.bfloat16)
    x = base[start:].view(2, 8, 300, 300)
    weight, bias = (None, None) if affine is None else (torch.randn(8, device=device, dtype=affine) for _ in "wb")
    y = OPS.group_norm(x, 2, weight, bias, 1e-5, "relu")
    wide = [None if t is None else t.double() for t in (weight, bias)]
    exact = F.relu(F.group_norm(x.double(), 2, *wide))
    same = [None if t is None else t.to(x.dtype) for t in (weight, bias)]
    assert_as_good_as_torch(y, F.relu(F.group_norm(x, 2, *same)), exact)


def test_group_norm_large_groups_nonfinite(device, poisoned):
    """A NaN or an infinity spoils its group and nothing else; a constant group has variance zero."""
    x = torch.randn(4, 8, 300, 300, device=device)
    x[0, 1, 7, 9] = float("nan")
    x[1, 6, 0, 0] = float("inf")
    x[2, :4] = 5.0
    y = OPS.group_norm(x, 2)
    expected = F.group_norm(x.cpu(), 2).to(device)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(
        y.isnan().flatten(2).any(2)[:, ::4],
        torch.tensor([[True, False], [False, True], [False, False], [False, False]], device=device),
    )
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


# x and dy of a group of 0.6 to 21 MB together, which one launch reads once on a GPU with bulk copies.
LARGE_GROUPS_OF_TWO = {
    "few long rows": ((1, 16, 64, 64, 40), 2),
    "groups off the 128-byte lines": ((3, 6, 71, 73, 60), 3),
    "vectors across rows": ((2, 40, 130, 129), 2),
    "more groups than places": ((20, 16, 129, 127), 2),
    "one channel a group": ((2, 3, 512, 520), 3),
    "tiles in registers": ((1, 4, 4, 409, 603), 2),
    "tiles in registers, 16 bits": ((1, 4, 4, 409, 1206), 2),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("act", "pre_act"),
    [
        ("none", "none"),
        ("relu", "none"),
        ("silu", "none"),
        ("leaky_relu", "none"),
        ("none", "relu"),
        ("gelu+tanh", "elu"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", LARGE_GROUPS_OF_TWO)
def test_group_norm_large_groups_backward(name, dtype, act, pre_act, poisoned):
    check_gradients(*LARGE_GROUPS_OF_TWO[name], dtype, act, pre_act, "cuda", "contiguous")


@pytest.mark.parametrize("affine", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", [8, 24, 1])
def test_group_norm_large_groups_backward_in_a_view(start, affine, device, poisoned):
    """x and dy begin at any element of their storage; weight and bias absent, or of another type."""
    base, dy = (torch.randn(start + 2 * 8 * 90_000, device=device, dtype=torch.bfloat16)[start:] for _ in "xy")
    x, dy = base.view(2, 8, 300, 300), dy.view(2, 8, 300, 300)
    params = [] if affine is None else [torch.randn(8, device=device, dtype=affine) for _ in "wb"]
    weight, bias = params or (None, None)
    _, mean, rstd = OPS.group_norm_fwd(x, 2, weight, bias, 1e-5, "relu")
    mine = OPS.group_norm_backward(dy, x, mean, rstd, 2, weight, bias, "relu")[: 1 + len(params)]

    def plain(x, *params):
        return F.relu(F.group_norm(x, 2, *params))

    exact = gradients_of(plain, dy, x.double(), *(p.double() for p in params))
    half = gradients_of(plain, dy, x, *(p.to(x.dtype) for p in params))
    assert_all_as_good(mine, (theirs.to(own.dtype) for own, theirs in zip(mine, half, strict=True)), exact)


def test_group_norm_large_groups_backward_nonfinite(device, poisoned):
    """A NaN in x or dy spoils its group and nothing else; with an infinity in dy, nothing of its group is finite."""
    x, dy = torch.randn(4, 8, 300, 300, device=device), torch.randn(4, 8, 300, 300, device=device)
    x[0, 1, 7, 9] = float("nan")
    dy[1, 6, 0, 0] = float("nan")
    dy[2, 5, 299, 299] = float("inf")
    mine = gradients_of(lambda x: OPS.group_norm(x, 2), dy, x)[0]
    theirs = gradients_of(lambda x: F.group_norm(x, 2), dy.cpu(), x.cpu())[0].to(device)
    assert torch.equal(mine.isfinite(), theirs.isfinite())
    assert torch.equal(mine[:2].isnan(), theirs[:2].isnan())


@pytest.mark.gpu
def test_group_norm_large_groups_graph_and_streams():
    """The cooperative launch is captured, replayed, and shares the GPU with another one."""
    x = torch.randn(4, 16, 128, 130, 16, device="cuda")
    expected = F.silu(F.group_norm(x.double(), 4)).float()
    graph = torch.cuda.CUDAGraph()
    OPS.group_norm(x, 4, act="silu")
    with torch.cuda.graph(graph):
        y = OPS.group_norm(x, 4, act="silu")
    y.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(OPS.group_norm(x, 4, act="silu"))
    torch.cuda.synchronize()
    assert all(torch.equal(r, y) for r in results)
