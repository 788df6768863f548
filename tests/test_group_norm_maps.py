"""act(group_norm(x) * scale + shift) with a scale and a shift for each position, perhaps of lower resolution."""

from __future__ import annotations

import pytest
import torch

from kgopt import reference
from tolerances import assert_as_good_as_torch

OPS = torch.ops.kgopt
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Sizes of x and of the maps: vectors and single elements in both layouts, a dim that is not enlarged, none that is.
SIZES = [
    ((2, 24, 6, 8), (3, 2)),
    ((2, 16, 4, 6, 16), (2, 3, 2)),
    ((1, 32, 5, 4, 8), (5, 2, 4)),
    ((3, 6, 7, 9), (7, 3)),
    ((2, 8, 5, 5), (5, 5)),
    ((1, 136, 64, 48), (8, 6)),
]


def draw(shape, dtype, channels_last, device, offset=0.0):
    t = (torch.randn(shape, dtype=torch.float64, device=device) + offset).to(dtype)
    return t.contiguous(memory_format=FORMATS[len(shape)]) if channels_last else t


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("shape", "small"), SIZES, ids=str)
@pytest.mark.parametrize("act", ["none", "relu", "silu", "gelu+tanh"])
def test_as_good_as_torch(shape, small, act, channels_last, dtype, device):
    torch.manual_seed(0)
    offset = 30 if act == "none" else 0
    x = draw(shape, dtype, channels_last, device, offset)
    scale, shift = (draw((*shape[:2], *small), dtype, channels_last, device) for _ in range(2))
    gamma, beta = (draw(shape[1:2], dtype, False, device) for _ in range(2))
    variance, mean = torch.var_mean(x.double(), dim=list(range(2, x.dim())), correction=0)
    moments = torch.stack([mean, variance], -1).to(torch.float64 if dtype is torch.float64 else torch.float32)
    for affine, of_x in (((gamma, beta), None), ((None, None), None), ((gamma, beta), moments)):
        y = OPS.group_norm_maps(x, of_x, scale, shift, 2, *affine, 1e-5, act)
        expected = reference.group_norm_maps_ref(x, scale, shift, 2, *affine, 1e-5, act)
        wide = [None if t is None else t.double() for t in affine]
        exact = reference.group_norm_maps_ref(x.double(), scale.double(), shift.double(), 2, *wide, 1e-5, act)
        assert_as_good_as_torch(y, expected, exact)
        assert y.stride() == x.stride()


def test_maps_of_another_layout_and_offset(device):
    x = draw((2, 16, 4, 8), torch.float32, True, device)
    scale, shift = torch.randn(2, 2, 16, 2, 4, device=device)[..., ::2].unbind()
    y = OPS.group_norm_maps(x, None, scale, shift, 4)
    torch.testing.assert_close(y, reference.group_norm_maps_ref(x, scale, shift, 4))


def test_gradients(device):
    x = torch.randn(2, 4, 4, 6, dtype=torch.float64, device=device, requires_grad=True)
    maps = [torch.randn(2, 4, 2, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    affine = [torch.randn(4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    call = lambda x, s, t, w, b: OPS.group_norm_maps(x, None, s, t, 2, w, b, 1e-5, "silu")  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, *maps, *affine))


@pytest.mark.parametrize("small", [(2, 4, 3, 6), (2, 4, 4), (2, 3, 4, 6), (1, 4, 4, 6), (2, 4, 0, 6)], ids=str)
def test_what_it_refuses(small, device):
    x, fits = torch.randn(2, 4, 4, 6, device=device), torch.randn(2, 4, 4, 6, device=device)
    map = torch.randn(small, device=device)
    for maps in ((map, fits), (fits, map)):
        with pytest.raises(RuntimeError, match="has shape"):
            OPS.group_norm_maps(x, None, *maps, 2)
    with pytest.raises(RuntimeError, match="has dtype"):
        OPS.group_norm_maps(x, None, fits.double(), fits, 2)
    with pytest.raises(RuntimeError, match="has shape"):
        OPS.group_norm_maps(x, None, fits, fits[..., :1].contiguous(), 2)
    with pytest.raises(RuntimeError, match="shape"):
        OPS.group_norm_maps(x[0, 0], None, x[0, 0], x[0, 0], 2)
