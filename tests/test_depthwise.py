"""Depthwise convolutions and their gradients by kgopt's own kernels (csrc/conv3d/depthwise)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kgopt._layout import FORMATS
from tolerances import assert_all_as_good, assert_as_good_as_torch

ops = torch.ops.kgopt

# rank, samples, channels, size, kernel, stride, padding, dilation. Channels fill 16 bytes or not, rows too.
CASES = [
    (3, 2, 16, (9, 17, 33), 3, 1, 1, 1),
    (3, 1, 18, (7, 12, 36), 5, 2, 0, 1),
    (3, 1, 12, (6, 10, 22), 3, 1, 1, 1),
    (2, 2, 20, (19, 76), 5, 1, 0, 1),
    (2, 2, 10, (13, 50), 3, 2, 1, 1),
    (3, 1, 24, (8, 16, 64), 3, 1, 1, 1),
    (3, 2, 5, (7, 11, 13), 3, 2, 1, 1),
    (3, 1, 16, (10, 40, 72), 5, 1, 2, 1),
    (3, 4, 16, (12, 24, 24), 5, 2, 2, 1),
    (3, 1, 40, (9, 20, 24), 7, 1, 3, 1),
    (3, 1, 8, (16, 18, 16), 7, 2, 3, 1),
    (3, 2, 300, (4, 4, 4), 3, 1, 1, 1),
    (3, 2, 17, (5, 6, 7), 5, 1, 0, 1),
    (3, 1, 3, (3, 70, 150), 3, 1, 3, 1),
    (3, 1, 6, (40, 8, 8), 3, 1, 1, 1),
    (2, 3, 96, (56, 56), 7, 1, 3, 1),
    (2, 2, 384, (14, 14), 7, 1, 3, 1),
    (2, 8, 100, (7, 7), 7, 1, 3, 1),
    (2, 2, 32, (112, 112), 3, 1, 1, 1),
    (2, 2, 24, (57, 61), 3, 2, 1, 1),
    (2, 2, 24, (64, 64), 3, 2, 0, 1),
    (2, 1, 48, (28, 28), 5, 1, 2, 1),
    (2, 1, 144, (56, 56), 5, 2, 2, 1),
    (2, 1, 2, (1, 300), 5, 1, 2, 1),
    (2, 1, 7, (9, 1), 3, 2, 1, 1),
    (3, 1, 16, (9, 10, 12), (1, 3, 3), 1, (0, 1, 1), 1),
    (3, 1, 16, (9, 10, 12), (1, 5, 5), (1, 2, 2), (0, 2, 2), 1),
    (3, 1, 16, (9, 10, 12), (1, 7, 7), 1, (0, 3, 3), (2, 1, 1)),
]
# With dilation: as many passes, some with more outputs than others, or with none.
DILATED = [
    (2, 2, 24, (57, 61), 3, 1, 2, 2),
    (2, 1, 16, (40, 64), 5, 1, 4, 2),
    (2, 2, 40, (30, 45), 7, 1, 9, 3),
    (2, 1, 20, (19, 76), 5, 1, 0, (1, 2)),
    (2, 1, 9, (6, 50), 3, 1, (4, 1), (4, 1)),
    (2, 1, 4, (10, 11), 3, 1, 7, 3),
    (2, 2, 8, (5, 6), 3, 1, 1, 3),
    (3, 1, 16, (9, 17, 33), 3, 1, 2, 2),
    (3, 1, 6, (10, 12, 14), 5, 1, (2, 4, 4), (1, 2, 2)),
    (3, 1, 24, (8, 9, 10), 7, 1, (6, 3, 3), (2, 1, 1)),
    (3, 1, 10, (9, 10, 12), (1, 3, 3), 1, (0, 2, 2), (1, 2, 2)),
    (3, 2, 5, (5, 6, 7), 3, 1, 0, 2),
]
CASES += DILATED
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _each(value, rank):
    return list(value) if isinstance(value, tuple) else [value] * rank


def _laid(t: torch.Tensor, last: bool) -> torch.Tensor:
    return t.contiguous(memory_format=FORMATS[t.dim()]) if last else t.contiguous()


def _operands(case, dtype, last):
    rank, n, c, size, kernel, stride, padding, dilation = case
    kernel, stride, padding, dilation = (_each(v, rank) for v in (kernel, stride, padding, dilation))
    x = _laid(torch.randn(n, c, *size, device="cuda").to(dtype), last)
    weight = torch.randn(c, 1, *kernel, device="cuda").to(dtype)
    bias = torch.randn(c, device="cuda").to(dtype)
    return x, weight, bias, stride, padding, dilation


def _forward(case, *operands, transposed=False, backend="kgopt"):
    x, weight, bias, stride, padding, dilation = operands
    rank, groups = case[0], x.shape[1]
    if transposed:
        output_padding = [s - 1 for s in stride]
        op = getattr(ops, f"conv_transpose{rank}d")
        return op(x, weight, bias, stride, padding, output_padding, groups, dilation, backend=backend)
    return getattr(ops, f"conv{rank}d")(x, weight, bias, stride, padding, dilation, groups, backend=backend)


def _torch(case, *operands, transposed=False):
    x, weight, bias, stride, padding, dilation = operands
    rank, groups = case[0], x.shape[1]
    if transposed:
        output_padding = [s - 1 for s in stride]
        return getattr(F, f"conv_transpose{rank}d")(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return getattr(F, f"conv{rank}d")(x, weight, bias, stride, padding, dilation, groups)


def _doubled(operands):
    return *(t.double() for t in operands[:3]), *operands[3:]


def _backward(dy, operands, transposed=False, backend="kgopt", mask=(True, True, True)):
    x, weight, _, stride, padding, dilation = operands
    output_padding = [s - 1 if transposed else 0 for s in stride]
    geometry = stride, padding, dilation, output_padding, x.shape[1], transposed
    return ops.conv_backward(dy, x, weight, *geometry, list(mask), backend=backend)


def _check(case, dtype, last, transposed=False) -> None:
    """Result and gradients against PyTorch's error, and equal bits twice."""
    operands = _operands(case, dtype, last)
    x, weight = operands[:2]
    if transposed and min(_torch(case, *operands, transposed=True).shape) < 1:
        return
    y = _forward(case, *operands, transposed=transposed)
    expected = _torch(case, *operands, transposed=transposed)
    exact = _torch(case, *_doubled(operands), transposed=transposed)
    assert y.is_contiguous(memory_format=FORMATS[y.dim()] if last else torch.contiguous_format)
    assert_as_good_as_torch(y, expected, exact)
    assert torch.equal(y, _forward(case, *operands, transposed=transposed))
    dy = _laid(torch.randn_like(exact).to(dtype), last)
    mine = _backward(dy, operands, transposed)
    theirs = _backward(dy, operands, transposed, "aten")
    right = _backward(dy.double(), _doubled(operands), transposed, "aten")
    assert mine[0].stride() == x.stride()
    assert mine[1].stride() == weight.stride()
    assert_all_as_good(mine, theirs, right)
    again = _backward(dy, operands, transposed)
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


@pytest.fixture(autouse=True)
def _without_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_depthwise(case, dtype, last, poisoned):
    _check(case, dtype, last)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if min(c[3]) > 3], ids=str)
def test_depthwise_transposed(case, dtype, last, poisoned):
    _check(case, dtype, last, transposed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[8], CASES[15], CASES[22], DILATED[0], DILATED[7]], ids=str)
def test_the_kernels_are_told(case):
    for last in (False, True):
        x, weight, _, *geometry = _operands(case, torch.bfloat16, last)
        geometry = *geometry, [0] * case[0], x.shape[1], False
        text = ops.explain_conv(x, weight, *geometry, backend="kgopt")
        assert text.startswith("kgopt: ")
        assert "depthwise" in text
        assert ops.explain_conv(x, weight, *geometry, "backward", backend="kgopt") == "dx kgopt; dweight kgopt"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [CASES[5], CASES[8], CASES[18], CASES[21], DILATED[1], DILATED[7]], ids=str)
def test_views(case, dtype, poisoned):
    """Storage offsets that no vector fits, parts of rows and channels, and a weight in channels_last beside a
    contiguous x."""
    operands = _operands(case, dtype, False)
    x = operands[0]
    views = [
        F.pad(x, [3, 2] + [1, 1] * (case[0] - 1))[(..., *(slice(1, -1),) * (case[0] - 1), slice(3, -2))],
        torch.cat([x, x], 1)[:, 1 : 1 + x.shape[1]],
        torch.empty(x.numel() + 1, device="cuda", dtype=dtype)[1:].view(x.shape).copy_(x),
        x[:1].expand(2, *x.shape[1:]),
        x.transpose(-1, -2).contiguous().transpose(-1, -2),
        _laid(x, True)[:, :-1],
    ]
    for view in views:
        channels = view.shape[1]
        now = view, operands[1][:channels], operands[2][:channels], *operands[3:]
        dense = view.contiguous(), *now[1:]
        assert_as_good_as_torch(_forward(case, *now), _torch(case, *dense), _torch(case, *_doubled(dense)))
        dy = torch.randn_like(_torch(case, *dense))
        mine, theirs = _backward(dy, now), _backward(dy, dense, backend="aten")
        assert_all_as_good(mine, theirs, _backward(dy.double(), _doubled(dense), backend="aten"))
    weight = operands[1].contiguous(memory_format=FORMATS[x.dim()])
    y = _forward(case, x, weight, *operands[2:])
    assert_as_good_as_torch(y, _torch(case, *operands), _torch(case, *_doubled(operands)))


@pytest.mark.gpu
def test_wide_weights(poisoned):
    """Weight and bias of float32 beside a half x, as autocast's gradients have them."""
    case = CASES[0]
    for last in (False, True):
        operands = _operands(case, torch.float32, last)
        half = operands[0].bfloat16()
        y = _forward(case, half, *operands[1:])
        narrow = half, *(t.bfloat16() for t in operands[1:3]), *operands[3:]
        exact = _torch(case, half.double(), *(t.double() for t in operands[1:3]), *operands[3:])
        assert_as_good_as_torch(y, _torch(case, *narrow), exact)
        dy = torch.randn_like(y)
        dx, dweight, _ = _backward(dy, (half, *operands[1:]))
        assert (dx.dtype, dweight.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", [CASES[5], CASES[8], CASES[10], CASES[19], CASES[15], *DILATED[::3]], ids=str)
def test_nan_and_infinities_stay_where_they_are(case, last, poisoned):
    """A value reaches what its taps meet and nothing else."""
    x, weight, bias, *geometry = _operands(case, torch.float32, last)
    middle = tuple(s // 2 for s in x.shape[2:])
    x[(0, 1, *middle)], x[(-1, 0, *(0,) * case[0])] = float("nan"), float("inf")
    dy = torch.randn_like(_torch(case, x, weight, bias, *geometry))
    dy = _laid(dy, last)
    dy[(0, 0, *(s // 2 for s in dy.shape[2:]))] = float("nan")
    y, exact = _forward(case, x, weight, bias, *geometry), _torch(case, *_doubled((x, weight, bias, *geometry)))
    operands = x, weight, bias, *geometry
    dx = _backward(dy, operands, mask=(True, False, False))[0]
    # By taps, so that nothing multiplies a NaN by the zeros between them.
    wide = torch.zeros_like(x, dtype=torch.double).requires_grad_()
    places = dy.isnan().double()
    reached = torch.autograd.grad(_torch(case, wide, torch.ones_like(weight).double(), None, *geometry), wide, places)[
        0
    ]
    assert torch.equal(dx.isnan(), reached != 0)
    for places_of in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(places_of(y), places_of(exact))


@pytest.mark.gpu
def test_more_than_2_to_31_elements():
    """Offsets are 64 bits wide; the last plane is compared."""
    size = (2, 1030, 1040)
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    x = torch.randn(1, 1024, *size, device="cuda").bfloat16()
    weight = torch.randn(1024, 1, 3, 3, 3, device="cuda").bfloat16()
    y = ops.conv3d(x, weight, None, [1] * 3, [1] * 3, [1] * 3, 1024, backend="kgopt")
    part = slice(1020, 1024)
    expected = F.conv3d(x[:, part], weight[part], None, 1, 1, 1, 4)
    assert_as_good_as_torch(
        y[:, part], expected, F.conv3d(x[:, part].double(), weight[part].double(), None, 1, 1, 1, 4)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [2, 3])
def test_modules_train(rank):
    """Through autograd: an op's gradients are its own kernels'."""
    x = torch.randn(2, 12, *[10] * rank, device="cuda", requires_grad=True)
    weight = torch.randn(12, 1, *[3] * rank, device="cuda", requires_grad=True)
    bias = torch.randn(12, device="cuda", requires_grad=True)
    op = getattr(ops, f"conv{rank}d")
    y = op(x, weight, bias, [1] * rank, [1] * rank, [1] * rank, 12, backend="kgopt")
    dy = torch.randn_like(y)
    mine = torch.autograd.grad(y, (x, weight, bias), dy)
    theirs = torch.autograd.grad(getattr(F, f"conv{rank}d")(x, weight, bias, 1, 1, 1, 12), (x, weight, bias), dy)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    right = torch.autograd.grad(getattr(F, f"conv{rank}d")(*exact, 1, 1, 1, 12), exact, dy.double())
    assert_all_as_good(mine, theirs, right)
