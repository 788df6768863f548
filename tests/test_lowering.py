"""Memory formats in code that Inductor compiles (kgopt/rewrite/inductor/lowering.py)."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Net(nn.Module):
    """Convolutions with norms between them, and what stands beside a norm in a block of a diffusion U-Net."""

    def __init__(self, norm, dims=2, emb=False, skip=False):
        super().__init__()
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        self.first = conv(3, 16, 3, padding=1)
        self.norm1 = norm(16)
        self.second = conv(16, 16, 3, padding=1)
        self.norm2 = norm(16)
        self.last = conv(16, 5, 3)
        self.emb = nn.Parameter(torch.randn(1, 16, *[1] * dims)) if emb else None
        self.skip = skip

    def forward(self, x):
        x = self.first(x)
        h = F.silu(self.norm1(x))
        h = self.second(h)
        if self.emb is not None:
            h = h * 2 + self.emb
        h = self.norm2(h)
        h = F.relu(h + x) if self.skip else F.relu(h)
        return self.last(h)


def group(channels):
    return nn.GroupNorm(4, channels)


def compiled(model, **options):
    """The model compiled, and a function that gives the program that Inductor wrote."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    run = torch.compile(model, backend="kgopt", options={"kgopt.always": True}, **options)

    def call(*args):
        y, code = run_and_get_code(run, *args)
        return y, "\n".join(code)

    return call


@pytest.fixture(autouse=True)
def fresh():
    """What an earlier version of this package compiled must not be found."""
    import torch._inductor.utils

    with torch._inductor.utils.fresh_inductor_cache():
        yield
    torch._dynamo.reset()


def goes_through(code: str) -> list[str]:
    """The calls of convolutions and of kgopt's ops that do not read the result of such a call."""
    made, strangers = set(), []
    for line in code.splitlines():
        # buf3 = extern_kernels.convolution(buf2, ...), or the op's own name; a result of several is taken apart below.
        call = re.match(r"\s*(buf\d+) = (?:extern_kernels|torch\.ops)\.(?:\w+\.)*\w+\((.*)", line)
        part = re.match(r"\s*(buf\d+) = (buf\d+)(\[\d+\])?(; *del.*)?$", line)
        if part and part.group(2) in made:
            made.add(part.group(1))
        if call and ("convolution" in line or "kgopt" in line):
            if made and call.group(2).split(",")[0] not in made:
                strangers.append(line.strip())
            made.add(call.group(1))
    return strangers


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("norm", [group, nn.InstanceNorm2d])
def test_nothing_is_copied_between_convolutions_and_norms(norm, form):
    """A norm was given a contiguous copy of what a convolution had written in channels_last, and its result was copied
    back; in channels_last PyTorch's instance norm gives a contiguous result, which cost a copy as well."""
    model = Net(norm).eval().to(memory_format=FORMATS[form])
    x = torch.randn(2, 3, 12, 13).to(memory_format=FORMATS[form])
    with torch.no_grad():
        y, code = compiled(model)(x)
        expected = model(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert y.stride() == expected.stride()
    assert code.count("kgopt.group_norm") >= 2
    assert goes_through(code) == []


def test_sums_follow_the_convolution():
    """What a fused kernel writes for a norm, and the other operand of a sum, come in the convolutions' format."""
    model = Net(group, emb=True, skip=True).eval()
    x = torch.randn(2, 3, 12, 13)
    with torch.no_grad():
        y, code = compiled(model)(x)
        expected = model(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert "kgopt.group_norm_add" in code
    assert goes_through(code) == []  # what stands between the second convolution and its norm is written in its place


def test_volumes():
    model = Net(group, dims=3).eval()
    x = torch.randn(1, 3, 5, 6, 7)
    with torch.no_grad():
        y, code = compiled(model)(x)
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)
    assert y.stride() == model(x).stride()
    assert goes_through(code) == []


@pytest.mark.parametrize("form", FORMATS)
def test_gradients(form):
    model = Net(group, emb=True, skip=True).to(memory_format=FORMATS[form])
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 12, 13).to(memory_format=FORMATS[form])
    y, _ = compiled(model)(x)
    expected = twin(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    dy = torch.randn_like(expected)
    y.backward(dy)
    expected.backward(dy)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


class Mean(nn.Module):
    """A norm whose mean alone is read: its gradient has no dims, its input does."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)

    def forward(self, x):
        return self.norm(self.conv(x)).mean([1, 2, 3])


def test_gradients_of_means():
    model, x = Mean(), torch.randn(2, 3, 12, 13)
    twin = copy.deepcopy(model)
    y, code = compiled(model)(x)
    assert "kgopt.group_norm_mean" in code
    torch.testing.assert_close(y, twin(x), rtol=1e-4, atol=1e-4)
    y.square().sum().backward()
    twin(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


def test_sizes_that_are_not_known():
    model = Net(group).eval()
    with torch.no_grad():
        call = compiled(model, dynamic=True)
        for shape in ((2, 3, 12, 13), (3, 3, 20, 9)):
            x = torch.randn(shape)
            y, _ = call(x)
            torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)


class Outputs(nn.Module):
    """A norm whose result leaves the graph, is seen as other shapes, and is read by its strides."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.InstanceNorm2d(8, affine=True)

    def forward(self, x):
        h = self.norm(self.conv(x))
        part = self.norm(x.repeat(1, 3, 1, 1)[:, :8, 1:, ::2])
        if not h.is_contiguous():
            h = h * 1
        return h, h.flatten(2).transpose(1, 2), torch.as_strided(h, (3, 4), (5, 2), 7), part


@pytest.mark.parametrize("form", FORMATS)
def test_results_of_the_graph_lie_as_in_eager_mode(form):
    model = Outputs().eval().to(memory_format=FORMATS[form])
    x = torch.randn(2, 3, 12, 13).to(memory_format=FORMATS[form])
    with torch.no_grad():
        found, _ = compiled(model)(x)
        expected = model(x)
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-4)
        assert y.stride() == z.stride()


def test_a_model_of_norms_alone_keeps_its_format():
    """Without a convolution nothing prefers channels_last."""
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.GroupNorm(4, 8)).eval()
    x = torch.randn(2, 8, 6, 7)
    with torch.no_grad():
        y, code = compiled(model)(x)
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)
    assert "empty_strided" not in code.split("def call")[1]


def test_an_optimized_model_under_torch_compile():
    """The ops that ``kgopt.optimize`` put in place are given what the convolutions wrote, too."""
    from torch._inductor.utils import run_and_get_code

    model = Net(group).eval()
    x = torch.randn(2, 3, 12, 13)
    with torch.no_grad():
        expected = model(x)
        kgopt.optimize(model, measure=False)
        y, code = run_and_get_code(torch.compile(model), x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    code = "\n".join(code)
    assert "kgopt.group_norm" in code
    assert goes_through(code) == []


@pytest.mark.parametrize("lies", [False, True])
def test_a_format_that_is_asked_for_is_a_copy_where_a_caller_sees_it(lies):
    """And else what is written in it at once."""

    def first(x):
        return torch.ops.kgopt.in_format(x, True)

    def inside(x):
        y = torch.ops.kgopt.in_format(torch.cat([x, x + 1], 1), True)
        return torch.ops.kgopt.upsample_nearest(y, [2, 2, 2])

    x = torch.randn(2, 3, 4, 5, 6)
    x = x.to(memory_format=torch.channels_last_3d) if lies else x
    y, _ = compiled(first)(x)
    assert y.data_ptr() != x.data_ptr()
    assert y.stride() == first(x).stride()
    torch.testing.assert_close(y, x)
    # On the CPU Inductor has each part of a concatenation written into it, and decides itself how it lies.
    with torch._inductor.config.patch(force_pointwise_cat=True):
        y, code = compiled(inside)(x)
    torch.testing.assert_close(y, inside(x))
    assert "kgopt.upsample_nearest" in code
    assert "kgopt.in_format.default" not in code.replace("[kgopt.in_format", "")
    assert len(re.findall(r"= empty_strided_cpu\(", code)) == 1  # the concatenation
