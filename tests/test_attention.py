"""Softmax of scores, and attention of wide heads by matrix products."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kgopt.rewrite import glue
from kgopt.rewrite.glue import kernels, recognize, search
from optimize_pairs import all_faster
from tolerances import assert_as_good_as_torch

OPS = torch.ops.kgopt
WIDER = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)]
SAME = [(t, t) for t in (torch.float32, torch.float64, torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("shape", [(7,), (5, 1), (3, 2, 1028), (2, 4099), (600, 36), (1, 70000)], ids=str)
@pytest.mark.parametrize(("dtype", "to"), SAME + WIDER, ids=str)
def test_softmax_values(shape, dtype, to, device, poisoned):
    x = (torch.randn(shape, device=device) * 8).to(dtype)
    for scale in (1.0, 0.04, -0.5):
        exact = torch.softmax(x.double() * scale, -1)
        y = OPS.scaled_softmax(x, scale, to)
        assert y.dtype is to
        assert_as_good_as_torch(y, torch.softmax(x * scale, -1).to(to), exact)
        assert torch.equal(y, OPS.scaled_softmax(x, scale, to))


def test_softmax_of_views(device):
    x = torch.randn(6, 9, 34, device=device)
    for t in (x[:, ::2], x[..., 1:], x.transpose(0, 2), x[:, :, ::3], x.flatten()[1:1021].view(30, 34)):
        torch.testing.assert_close(OPS.scaled_softmax(t, 0.7, t.dtype), torch.softmax(t * 0.7, -1))


@pytest.mark.parametrize("count", [3, 4, 700], ids=str)
def test_softmax_keeps_what_is_not_finite(count, device):
    inf, nan = float("inf"), float("nan")
    x = torch.zeros(6, count, device=device)
    x[0] = -inf
    x[1, 1:], x[2, 0], x[3, 2], x[4, 1], x[5, 0], x[5, 2] = -inf, inf, nan, -inf, inf, -inf
    torch.testing.assert_close(OPS.scaled_softmax(x, 0.5, x.dtype), torch.softmax(x * 0.5, -1), equal_nan=True)


def test_softmax_of_nothing(device):
    for shape in ((0, 4), (3, 0), (0,)):
        assert OPS.scaled_softmax(torch.ones(shape, device=device), 1.0, torch.float16).shape == shape


def test_softmax_gradient(device):
    x = torch.randn(3, 5, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: OPS.scaled_softmax(t, 0.7, t.dtype), (x,))


def test_bad_softmax(device):
    x = torch.ones(2, 3, device=device)
    with pytest.raises(RuntimeError, match="x is a scalar, expected at least 1 dimension"):
        OPS.scaled_softmax(x[0, 0], 1.0, x.dtype)
    with pytest.raises(RuntimeError, match="x has dtype int64"):
        OPS.scaled_softmax(x.long(), 1.0, x.dtype)
    with pytest.raises(RuntimeError, match="dtype is float64, expected that of x, float32, bfloat16 or float16"):
        OPS.scaled_softmax(x, 1.0, torch.float64)
    with pytest.raises(RuntimeError, match="dtype is float32, expected that of x, float16"):
        OPS.scaled_softmax(x.half(), 1.0, torch.float32)


SHAPES = [(1, 1, 1100, 1100, 512, 512), (2, 3, 130, 1031, 320, 384), (1, 2, 257, 64, 288, 40)]


def operands(shape, dtype, device):
    n, heads, length, keys, channels, values = shape
    q, k = (torch.randn(n, heads, s, channels, device=device) for s in (length, keys))
    v = torch.randn(n, keys, heads, values, device=device).transpose(1, 2)
    return [t.to(dtype) for t in (q, k, v)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_attention_values(shape, dtype, device, monkeypatch, poisoned):
    if device == "cpu" and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("PyTorch's products of halves give float32 on CUDA alone")
    q, k, v = operands(shape, dtype, device)
    scale = q.shape[-1] ** -0.5
    exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), scale=scale)
    expected = F.scaled_dot_product_attention(q, k, v, scale=scale)
    for room in (0, kernels._SCORES):  # rows at a time: as few as may be, and more
        monkeypatch.setattr(kernels, "_SCORES", room)
        y = kernels.attention(q, k, v, scale)
        assert y.shape == expected.shape
        assert_as_good_as_torch(y, expected, exact)


@pytest.mark.parametrize(
    "given",
    [
        {"is_causal": True},
        {"dropout_p": 0.1},
        {"attn_mask": torch.ones(1100, 1100, dtype=torch.bool)},
        {"enable_gqa": True},
    ],
    ids=lambda given: next(iter(given)),
)
@pytest.mark.gpu
def test_other_attention_is_pytorchs(given):
    q, k, v = operands(SHAPES[0], torch.bfloat16, "cuda")
    given = {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    assert recognize(F.scaled_dot_product_attention, (q, k, v), {}) is not None
    assert recognize(F.scaled_dot_product_attention, (q, k, v), given) is None
    assert recognize(F.scaled_dot_product_attention, (q[..., :256], k[..., :256], v), {}) is None
    assert recognize(F.scaled_dot_product_attention, (q, k, v.float()), {}) is None
    assert recognize(F.scaled_dot_product_attention, (q.cpu(), k.cpu(), v.cpu()), {}) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_right_by_the_rule(dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    q, k, v = operands(SHAPES[0], dtype, "cuda")
    call = recognize(F.scaled_dot_product_attention, (q, k, v), {})
    expected, actual = F.scaled_dot_product_attention(q, k, v), call.run("kgopt")
    assert search._is_right(call, "kgopt", expected, actual)
    assert not search._is_right(call, "kgopt", expected, actual * 1.1)
    assert actual.stride() == expected.stride()
    if dtype is torch.float32:
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        assert recognize(F.scaled_dot_product_attention, (q, k, v), {}) is None


class Middle(nn.Module):
    """The middle of an image autoencoder: one head of all channels."""

    def __init__(self, channels=512):
        super().__init__()
        self.norm = nn.GroupNorm(32, channels, eps=1e-6)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x):
        n, c, *size = x.shape
        h = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (t.view(n, -1, 1, c).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, -1, c)
        return x + self.out(h).transpose(1, 2).view(n, c, *size)


@pytest.mark.gpu
def test_a_model_takes_it(monkeypatch):
    torch.manual_seed(0)
    model = Middle().cuda().half().eval()
    x = torch.randn(2, 512, 40, 40, device="cuda").half()
    with torch.no_grad():
        expected, exact = model(x), model.double()(x.double())
        model.half()
        calls, own = [], kernels.attention
        monkeypatch.setattr(kernels, "attention", lambda *args: calls.append(args) or own(*args))
        assert all_faster(model, x) > 0
        calls.clear()
        y = model(x)
        assert len(calls) == 1
        assert_as_good_as_torch(y, expected, exact)
        glue.forget(model)
        assert torch.equal(model(x), expected)
        assert len(calls) == 1
