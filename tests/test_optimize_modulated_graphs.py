"""Scale and shift by sample behind norms in captured graphs: torch.compile(backend="kgopt")."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import kgopt.rewrite.backend as backend
from tolerances import assert_all_as_good

C = 8


def usual(x, w, b, e):
    scale, shift = e.chunk(2, dim=1)
    return F.silu(F.group_norm(x, 2, w, b) * (1 + scale) + shift)


def other_way_round(x, w, b, e):
    scale, shift = e.chunk(2, dim=1)
    return torch.relu(shift + (scale + 1) * F.group_norm(x, 2, w, b))


def addcmul(x, w, b, e):
    scale, shift = e.split(C, dim=1)
    return F.gelu(torch.addcmul(shift, F.group_norm(x, 2, w, b), 1 + scale))


def addcmul_method(x, w, b, e):
    scale, shift = e.split(C, dim=1)
    return F.silu(shift.addcmul(scale, F.group_norm(x, 2, w, b)))


def in_place(x, w, b, e):
    h = F.group_norm(x, 2, w, b)
    h *= e[:, :C]
    h += e[:, C:]
    return F.leaky_relu_(h, 0.2)


def methods(x, w, b, e):
    return F.group_norm(x, 2, w, b).mul(e[:, :C]).add_(e[:, C:]).relu()


def no_affine(x, w, b, e):
    """AdaGroupNorm of diffusers."""
    scale, shift = e.chunk(2, dim=1)
    x = F.group_norm(x, 2, eps=1e-6)
    return x * (1 + scale) + shift


def scale_alone(x, w, b, e):
    return F.silu(F.group_norm(x, 2, w, b) * e[:, :C])


def shift_alone(x, w, b, e):
    return F.silu(F.group_norm(x, 2, w, b) + e[:, :C])


def instance(x, w, b, e):
    return F.silu(F.instance_norm(x, weight=w, bias=b) * e[:, :C] + e[:, C:])


def prelu(x, w, b, e):
    return F.prelu(F.group_norm(x, 2, w, b) * e[:, :C] + e[:, C:], w)


def one_for_all(x, w, b, e):
    return F.silu(F.group_norm(x, 2, w, b) * e[:1, :C] + e[:1, C:])


def with_sum(x, w, b, e):
    """The sum with a tensor of x's size joins."""
    return F.silu(F.group_norm(x, 2, w, b) * e[:, :C] + e[:, C:] + x)


def dropout(x, w, b, e):
    return F.silu(F.dropout(F.group_norm(x, 2, w, b), 0.0, False) * e[:, :C] + e[:, C:])


def one_a_sample(x, w, b, e):
    return F.silu(F.group_norm(x, 2, w, b) * e[:, :1] + e[:, C : C + 1])


def of_fewer_dims(x, w, b, e):
    return F.silu(F.group_norm(x, 2, w, b) * w[:, None, None] + b.view(C, 1, 1))


def of_one_value(x, w, b, e):
    return F.silu(F.group_norm(x, 2, w, b) * w[0] + b[:1])


def less(x, w, b, e):
    return torch.tanh(F.group_norm(x, 2, w, b) - w[:, None, None])


def times_less(x, w, b, e):
    return torch.sub(F.group_norm(x, 2, w, b) * e[:, :C], e[:, C:]).relu()


OURS = {
    usual: "group_norm(scale, shift, act=silu)",
    other_way_round: "group_norm(scale, shift, act=relu)",
    addcmul: "group_norm(scale, shift, act=gelu)",
    addcmul_method: "group_norm(scale, shift, act=silu)",
    in_place: "group_norm(scale, shift, act=leaky_relu(0.2))",
    methods: "group_norm(scale, shift, act=relu)",
    no_affine: "group_norm(scale, shift)",
    scale_alone: "group_norm(scale, act=silu)",
    shift_alone: "group_norm(shift, act=silu)",
    instance: "group_norm(scale, shift, act=silu)",
    prelu: "group_norm_prelu(scale, shift)",
    one_for_all: "group_norm(scale, shift, act=silu)",
    with_sum: "group_norm_add(scale, shift, act=silu)",
    one_a_sample: "group_norm(scale, shift, act=silu)",
    of_fewer_dims: "group_norm(scale, shift, act=silu)",
    of_one_value: "group_norm(scale, shift, act=silu)",
    less: "group_norm(shift, act=tanh)",
    times_less: "group_norm(scale, shift, act=relu)",
}


def by_position(x, w, b, e):
    return F.silu(F.group_norm(x, 2, w, b) * x + e[:, C:])


def wider(x, w, b, e):
    return F.silu(F.group_norm(x, 2, w, b) * e[:, :C].double() + e[:, C:])


def in_place_on_the_other(x, w, b, e):
    r = e[:, :C].expand_as(x).clone()
    r *= F.group_norm(x, 2, w, b)
    return F.silu(r)


def read_twice(x, w, b, e):
    h = F.group_norm(x, 2, w, b)
    return F.silu(h * e[:, :C] + e[:, C:]) + h


def with_itself(x, w, b, e):
    h = F.group_norm(x, 2, w, b)
    return F.silu(h * h + e[:, C:])


def with_a_value(x, w, b, e):
    return F.silu(torch.addcmul(e[:, C:], F.group_norm(x, 2, w, b), e[:, :C], value=2))


def less_from(x, w, b, e):
    return e[:, :C] - F.group_norm(x, 2, w, b)


def of_a_row(x, w, b, e):
    """One value a column."""
    return F.group_norm(x, 2, w, b) * w[: x.shape[-1]]


APART = [less_from, of_a_row, by_position, wider, in_place_on_the_other, read_twice, with_itself, with_a_value]


def rewritten(function, *given):
    torch._dynamo.reset()

    def compiler(graph, _):
        backend.rewrite_graph(graph, always=True)
        return graph

    return torch.compile(function, backend=compiler, fullgraph=True)(*given), backend.last_report


def sample(dtype, device, n=3):
    x, e = torch.randn(n, C, 6, 5, device=device), torch.randn(n, 2 * C, 1, 1, device=device)
    w, b = torch.randn(C, device=device), torch.randn(C, device=device)
    return [t.to(dtype) for t in (x, w, b, e)]


def check(function, given, dtype):
    results = []
    for run, tensors in (
        (lambda *g: rewritten(function, *g)[0], given),
        (function, given),
        (function, [t.double() for t in given]),
    ):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = run(*leaves)
        y.square().sum().backward()
        results.append([y.detach(), *(t.grad for t in leaves)])
    assert_all_as_good(*results, factor=3)  # the sums around the op have errors, too


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", OURS)
def test_one_op(function, dtype, device):
    given = sample(dtype, device)
    check(function, given, dtype)
    (row,) = rewritten(function, *given)[1].sites
    assert row.became == OURS[function]


@pytest.mark.parametrize("function", APART)
def test_what_cannot_be_one_op(function, device):
    given = sample(torch.float32, device)
    (y, report), expected = rewritten(function, *given), function(*given)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)  # of a wider product the norm is still float32
    assert y.dtype is expected.dtype
    (row,) = report.sites
    assert "scale" not in row.became
    assert "shift" not in row.became


def one_scaled(x, w, b, e):
    return F.silu(F.group_norm(x, 2, w, b) + F.group_norm(x + 1, 4, b, w) * e[:, :C])


def both_scaled(x, w, b, e):
    return F.silu(F.group_norm(x, 2, w, b) * e[:, C:] + F.group_norm(x + 1, 4, b, w) * e[:, :C])


def a_product(x, w, b, e):
    return F.group_norm(x, 2, w, b) * F.group_norm(x + 1, 4, b, w) + x


@pytest.mark.parametrize("function", [one_scaled, both_scaled, a_product])
def test_sums_and_products_of_two_norms_are_the_first_ones(function, device):
    """Both took the sum, where one of them is scaled: the graph was written twice, and its call raised."""
    given = sample(torch.float32, device)
    check(function, given, torch.float32)
    with torch.no_grad():
        (y, report), expected = rewritten(function, *given), function(*given)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    first, second = report.sites
    assert first.became.startswith(("group_norm_add", "group_norm_maps"))
    assert second.became in ("group_norm", "group_norm(scale)")


@pytest.mark.parametrize("n", [1, 3])
def test_channels_last(n, device):
    """Of several samples the norm alone is kgopt's, as it was."""
    x, *rest = sample(torch.float32, device, n)
    given = x.contiguous(memory_format=torch.channels_last), *rest
    (y, report), expected = rewritten(usual, *given), usual(*given)
    torch.testing.assert_close(y, expected)
    assert y.stride() == expected.stride()
    (row,) = report.sites
    assert row.became == (OURS[usual] if n == 1 else "group_norm")


@pytest.mark.parametrize("n", [1, 3])
def test_beside_convolutions_on_a_gpu(n, device, monkeypatch):
    """Inductor runs convolutions in channels_last there, where several samples' channels cannot be those of one: the
    contiguous copies in front of the op and behind it cost more than the compiler's own product and sum.
    """
    monkeypatch.setattr(backend, "_lies_as_inductor_wants", lambda x: True)
    x, w, b, e = sample(torch.float32, device, n)
    kernel = torch.randn(C, C, 1, 1, device=device)

    def convolved(x, w, b, e):
        return usual(F.conv2d(x, kernel), w, b, e)

    (y, report), expected = rewritten(convolved, x, w, b, e), convolved(x, w, b, e)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    (row,) = report.sites
    assert row.became == (OURS[usual] if n == 1 else "group_norm")


def test_one_graph_for_all_sizes(device):
    graphs = []

    def compiler(graph, given):
        backend.rewrite_graph(graph, always=True)
        graphs.append([row.became for row in backend.last_report.sites])
        return aot_eager(graph, given)  # which traces the calls of the ops, too

    compiled = torch.compile(usual, backend=compiler, fullgraph=True, dynamic=True)
    for n, size in ((2, 5), (3, 7), (5, 4)):
        x, w, b, e = sample(torch.float32, device, n)
        x = torch.randn(n, C, size, 6, device=device)
        torch.testing.assert_close(compiled(x, w, b, e), usual(x, w, b, e))
    assert graphs == [[OURS[usual]]]


def test_with_inductor():
    given = [t.requires_grad_() for t in sample(torch.float32, "cpu")]
    torch._dynamo.reset()
    y = torch.compile(usual, backend="kgopt", options={"kgopt.always": True})(*given)
    assert [row.became for row in backend.last_report.sites] == [OURS[usual]]
    expected = usual(*given)
    for mine, right in zip(*(torch.autograd.grad(t.square().sum(), given) for t in (y, expected)), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def test_autocast_inside(device):
    linear = nn.Linear(4, 2 * C).to(device)

    def function(x, w, b, z):
        with torch.autocast(x.device.type, torch.bfloat16):
            scale, shift = linear(z)[:, :, None, None].chunk(2, dim=1)
            return F.silu(F.group_norm(x, 2, w, b) * (1 + scale) + shift)

    x, w, b, _ = sample(torch.float32, device)
    z = torch.randn(3, 4, device=device)
    (y, report), expected = rewritten(function, x, w, b, z), function(x, w, b, z)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)
    assert [row.became for row in report.sites] == [OURS[usual]]


def test_diffusers_conditional_block():
    """ResnetBlockCondNorm2D, whose two AdaGroupNorms call F.group_norm."""
    resnet = pytest.importorskip("diffusers.models.resnet")
    block = resnet.ResnetBlockCondNorm2D(in_channels=32, temb_channels=16, groups=8, time_embedding_norm="ada_group")
    given = torch.randn(2, 32, 6, 5), torch.randn(2, 16)
    y, report = rewritten(block, *given)
    torch.testing.assert_close(y, block(*given), rtol=1e-4, atol=1e-5)
    assert [row.became for row in report.sites] == ["group_norm(scale, shift, act=silu)"] * 2
