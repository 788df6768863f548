"""GroupNorm of channels_last tensors by columns and by rows (csrc/groupnorm/columns, rows)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kgopt import reference
from norm_gradients import check_gradients, gradients_of
from shapes import DTYPES, make, norm_shape
from tolerances import assert_as_good_as_torch

OPS = torch.ops.kgopt

# channels_last samples that stay on chip on a GPU that can: in clusters below 4 MB, in teams of blocks above.
COLUMNS = {
    "a cluster": ((2, 32, 30, 40), 8),
    "groups of three channels": ((2, 24, 33, 40), 8),
    "C no multiple of a vector": ((2, 6, 32, 34), 2),
    "three channels": ((3, 3, 64, 64), 3),
    "a group a channel": ((2, 40, 20, 24), 40),
    "rows longer than a warp": ((2, 1024, 7, 9), 1),
    "groups of ten channels": ((2, 320, 25, 41), 32),
    "few positions": ((3, 64, 1, 7), 16),
    "teams over columns of a sample": ((3, 128, 52, 61), 8),
    "teams over whole samples": ((6, 24, 101, 120), 8),
    "many samples": ((80, 32, 64, 71), 8),
    "many samples, rows of several positions": ((60, 6, 168, 170), 2),
    "many samples, long rows": ((40, 1000, 19, 21), 25),
    "many samples, a group a channel": ((70, 40, 60, 64), 40),
    "a sample larger than what is kept": ((1, 32, 64, 64, 57), 8),
    "one group of two channels": ((1, 2, 427, 429), 1),
    "one group of odd channels": ((3, 83, 15, 31), 1),
    "passes, samples that start inside a vector": ((3, 5, 303, 423), 5),
    "passes, few odd positions": ((3, 9, 3, 11), 1),
    "passes, odd channels of several groups": ((2, 33, 5, 103), 11),
}


def as_channels_last(x):
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


@pytest.mark.parametrize(
    ("act", "pre_act"), [("none", "none"), ("silu", "none"), ("leaky_relu", "none"), ("none", "relu"), ("gelu", "none")]
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", COLUMNS)
def test_group_norm_columns(name, dtype, act, pre_act, device, poisoned):
    shape, groups = COLUMNS[name]
    shape = norm_shape(shape, device)
    x, weight, bias = make(shape, dtype, device, scale=2.0, offset=1.0)
    x = as_channels_last(x)
    y, mean, rstd = OPS.group_norm_fwd(x, groups, weight, bias, 1e-5, act, pre_act)
    assert y.stride() == x.stride()
    exact = reference.group_norm_ref(x.double(), groups, weight.double(), bias.double(), act=act, pre_act=pre_act)
    plain = reference.group_norm_ref(x, groups, weight, bias, act=act, pre_act=pre_act)
    assert_as_good_as_torch(y, plain, exact)
    again = OPS.group_norm_fwd(x, groups, weight, bias, 1e-5, act, pre_act)
    assert all(torch.equal(a, b) for a, b in zip((y, mean, rstd), again, strict=True))


@pytest.mark.parametrize(
    "name",
    ["a cluster", "groups of three channels", "teams over columns of a sample", "many samples, a group a channel"],
)
def test_group_norm_columns_ill_conditioned(name, device, poisoned):
    shape, groups = COLUMNS[name]
    shape = norm_shape(shape, device)
    for scale, offset in ((0.01, 0.0), (3.0, 0.0), (1.0, 100.0), (0.01, 100.0)):
        x, weight, bias = make(shape, torch.float32, device, scale=scale, offset=offset)
        x.view(-1)[0] += 50 * scale  # an outlier where sums might take their shift from
        x = as_channels_last(x)
        exact = F.group_norm(x.double(), groups, weight.double(), bias.double())
        assert_as_good_as_torch(OPS.group_norm(x, groups, weight, bias), F.group_norm(x, groups, weight, bias), exact)


# channels_last x and dy whose samples stay on chip together, from 256 KB to 20 MB.
COLUMNS_OF_TWO = {
    "groups of three channels": ((5, 24, 101, 120), 8),
    "C no multiple of a vector": ((2, 6, 168, 170), 2),
    "a group a channel": ((2, 40, 60, 64), 40),
    "rows longer than a warp": ((3, 1024, 23, 29), 1),
    "groups of ten channels": ((3, 320, 33, 41), 32),
    "many samples": ((80, 32, 64, 71), 8),
    "one sample": ((1, 64, 100, 101), 16),
    "one sample, read again from L2": ((1, 128, 200, 200), 8),
    "passes, samples that start inside a vector": ((3, 5, 303, 423), 5),
    "passes, one group of odd channels": ((2, 3, 411, 413), 1),
    "three samples, half types again from L2": ((3, 128, 180, 190), 8),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("act", "pre_act"),
    [("none", "none"), ("relu", "none"), ("silu", "none"), ("leaky_relu", "none"), ("none", "relu"), ("gelu", "none")],
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", COLUMNS_OF_TWO)
def test_group_norm_columns_backward(name, dtype, act, pre_act, poisoned):
    check_gradients(*COLUMNS_OF_TWO[name], dtype, act, pre_act, "cuda", "channels_last")


# Samples whose blocks keep chunks in registers, and such that are read again: two slabs, one, and more than a few.
HELD = {
    "two samples read again": ((2, 32, 90, 91, 110), 8),
    "one sample read again, odd rows": ((1, 64, 803, 811), 16),
    "samples that stay": ((40, 64, 90, 91), 16),
    "samples that stay, in one team": ((9, 128, 30, 31, 33), 8),
}


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["none", "relu", "silu"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", HELD)
def test_group_norm_columns_held(name, dtype, act, poisoned):
    device = "cuda"
    shape, groups = HELD[name]
    x, *params = make(shape, dtype, device, scale=2.0, offset=1.0)
    tensors = as_channels_last(x), *params
    exact = reference.group_norm_ref(tensors[0].double(), groups, *[p.double() for p in params], act=act)
    plain = reference.group_norm_ref(tensors[0], groups, *params, act=act)
    y = OPS.group_norm(tensors[0], groups, *params, 1e-5, act)
    assert_as_good_as_torch(y, plain, exact)
    # What one block overwrites before another has read it shows now and then, and under load.
    for _ in range(20):
        assert torch.equal(y, OPS.group_norm(tensors[0], groups, *params, 1e-5, act))
    dy = as_channels_last(torch.randn(shape, device=device).to(dtype))
    mine = gradients_of(lambda *t: OPS.group_norm_fwd(t[0], groups, *t[1:], 1e-5, act, "none")[0], dy, *tensors)
    for _ in range(10):
        again = gradients_of(lambda *t: OPS.group_norm_fwd(t[0], groups, *t[1:], 1e-5, act, "none")[0], dy, *tensors)
        assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


def test_group_norm_columns_backward_nonfinite(device, poisoned):
    """A NaN in x or dy spoils its group and nothing else; with an infinity in dy, nothing of its group is finite."""
    x, dy = torch.randn(4, 16, 120, 124, device=device), torch.randn(4, 16, 120, 124, device=device)
    x[0, 1, 7, 9] = float("nan")
    dy[1, 6, 0, 0] = float("nan")
    dy[2, 5, 119, 123] = float("inf")
    mine = gradients_of(lambda x: OPS.group_norm(x, 4), as_channels_last(dy), as_channels_last(x))[0]
    theirs = gradients_of(lambda x: F.group_norm(x, 4), dy.cpu(), x.cpu())[0].to(device)
    assert torch.equal(mine.isfinite(), theirs.isfinite())
    assert torch.equal(mine[:2].isnan(), theirs[:2].isnan())


@pytest.mark.parametrize("name", ["a cluster", "teams over columns of a sample"])
def test_group_norm_columns_nonfinite(name, device, poisoned):
    """A NaN or an infinity spoils its group and nothing else."""
    shape, groups = COLUMNS[name]
    x = torch.randn(shape, device=device)
    x[0, 1, 3, 5] = float("nan")
    x[1, -1, 0, 0] = float("inf")
    y = OPS.group_norm(as_channels_last(x), groups)
    spoiled = y.isnan().reshape(shape[0], groups, -1)
    assert torch.equal(spoiled.any(2), spoiled.all(2))
    assert spoiled.any(2).nonzero().tolist() == [[0, 0], [1, groups - 1]]


@pytest.mark.parametrize("name", ["a cluster", "teams over columns of a sample"])
@pytest.mark.parametrize("start", [0, 4, 1])
@pytest.mark.parametrize("affine", [None, torch.float32, torch.bfloat16], ids=str)
def test_group_norm_columns_in_a_view(name, start, affine, device, poisoned):
    """x begins at any element of its storage; weight and bias absent, or of another type."""
    (n, c, h, w), groups = COLUMNS[name]
    base = torch.randn(start + n * c * h * w, device=device, dtype=torch.bfloat16)
    x = base[start:].view(n, h, w, c).permute(0, 3, 1, 2)
    weight, bias = (None, None) if affine is None else (torch.randn(c, device=device, dtype=affine) for _ in "wb")
    y = OPS.group_norm(x, groups, weight, bias, 1e-5, "relu")
    wide = [None if t is None else t.double() for t in (weight, bias)]
    exact = F.relu(F.group_norm(x.double(), groups, *wide))
    same = [None if t is None else t.to(x.dtype) for t in (weight, bias)]
    assert_as_good_as_torch(y, F.relu(F.group_norm(x, groups, *same)), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a cluster", "teams over columns of a sample", "a sample larger than what is kept"])
def test_group_norm_columns_graph(name):
    """The launch, and the memset before it, are captured and replayed."""
    shape, groups = COLUMNS[name]
    x = as_channels_last(torch.randn(shape, device="cuda"))
    OPS.group_norm(x, groups, act="silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = OPS.group_norm(x, groups, act="silu")
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, OPS.group_norm(x, groups, act="silu"))
