"""Padding and frames in front of a convolution in code: what is made, values, who may see it, what stays as it is."""

from __future__ import annotations

import collections
import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import kgopt
from kgopt import accuracy
from kgopt._layout import FORMATS, is_dense_channels_last
from kgopt.rewrite.optimized.disguise import original_class
from kgopt.rewrite.pytorch import watching
from kgopt.rewrite.waiting import padding

layouts = pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])


def draw(*shape, channels_last=False, dtype=torch.float64):
    x = torch.randn(shape, dtype=dtype)
    return x.contiguous(memory_format=FORMATS[x.dim()]) if channels_last else x


def calls(function):
    """How often PyTorch's ops run in a call, by their names."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        function()
    return collections.Counter(event.name.removeprefix("aten::") for event in found.events())


def pads(model, *args, grad=False):
    with torch.set_grad_enabled(grad):
        return calls(lambda: model(*args))["pad"]


def optimized(model):
    return kgopt.optimize(copy.deepcopy(model), measure=False)


# ------------------------------------------------------------------------------------------------------------ the taps


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_idle_taps(kernel):
    """Every small convolution gives the same without them, and none is left that reads zeros alone."""
    left = set()
    for length, before, after, stride, dilation in itertools.product((1, 2, 4), range(6), range(4), (1, 2), (1, 2, 3)):
        if length + before + after < dilation * (kernel - 1) + 1:
            continue
        x, weight = torch.randn(1, 1, length).double(), torch.randn(1, 1, kernel).double()
        expected = F.conv1d(F.pad(x, (before, after)), weight, stride=stride, dilation=dilation)
        first, count, *zeros = padding.without_idle_taps(length, before, after, kernel, stride, dilation)
        part = weight[..., first : first + count]
        assert part.shape[-1] == count >= 1
        actual = F.conv1d(F.pad(x, zeros), part, stride=stride, dilation=dilation)
        torch.testing.assert_close(actual, expected)
        left.add(kernel - count)
    assert left >= set(range(kernel))


# ----------------------------------------------------------------------------------------------------------- the forms


class Cached(nn.Conv3d):
    """As Wan's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        time, height, width = self.padding
        self._padding = (width, width, height, height, 2 * time, 0)
        self.padding = (0, 0, 0)

    def forward(self, x, cache_x=None):
        padding = list(self._padding)
        if cache_x is not None and self._padding[4] > 0:
            cache_x = cache_x.to(x.device)
            x = torch.cat([cache_x, x], dim=2)
            padding[4] -= cache_x.shape[2]
        x = F.pad(x, padding)
        return super().forward(x)


class Repeated(nn.Conv3d):
    """As Cosmos'."""

    def forward(self, x, cache=None):
        first = x[:, :, :1, ...].expand(-1, -1, 2, -1, -1) if cache is None else cache
        x = torch.cat([first, x], dim=2)
        x = F.pad(x, (1, 1, 2, 2, 0, 0), mode="constant", value=0.0)
        return super().forward(x)


class Twice(nn.Conv3d):
    """As MiniMax'."""

    def forward(self, x, cache=None):
        x = F.pad(x, (1, 1, 1, 1))
        x = F.pad(x, (0, 0, 0, 0, 2, 0), mode="constant")
        return F.conv3d(x, self.weight, self.bias, stride=self.stride, padding=0, dilation=self.dilation)


class Child(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.conv = nn.Conv3d(*args, **kwargs)
        self.pads, self.name = (1, 1, 1, 1), "child"

    def forward(self, x, cache=None):
        if cache is not None:
            x = torch.concat((cache, x), 2)
        else:
            x = F.pad(x, (0, 0, 0, 0, 2, 0), mode="replicate")
        if self.name == "child":
            pads = self.pads
        x = F.pad(x, [*pads, 0, 0])
        y = self.conv(x)
        return y * 2


class InOne(Child):
    def forward(self, x, cache=None):
        return self.conv(F.pad(torch.cat([x[:, :, -1:], x, x[:, :, :1]], -3), (1, 1, 1, 1, 0, 0))) + x.mean()


class Inside(nn.Conv3d):
    def forward(self, x, cache=None):
        h = F.pad(x, (1, 1, 1, 1, 2, 0))
        h = self._conv_forward(h, self.weight, self.bias)
        return h


class Image(nn.Module):
    """A child that pads, and images."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.pad = nn.ZeroPad2d((1, 1, 2, 2))
        self.conv = nn.Conv2d(4, 6, 3, padding=1)

    def forward(self, x, cache=None):
        x = self.pad(x[:, :, 0])
        return self.conv(x)


class Named(Image):
    """And a convolution whose padding has a name."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, (3, 5), padding="same", dilation=(2, 1))


FORMS = {"Cached": Cached, "Repeated": Repeated, "Twice": Twice, "Child": Child, "InOne": InOne, "Inside": Inside}
forms = pytest.mark.parametrize("form", [*FORMS.values(), Image, Named], ids=[*FORMS, "Image", "Named"])


def build(form, **kwargs):
    more = {"padding": 1} if form is Cached else {}
    return form(4, 6, 3, **{**more, **kwargs}).double().eval()


@forms
@layouts
@pytest.mark.parametrize("frames", [1, 2, 5])
def test_values_and_strides(form, channels_last, frames):
    model = build(form, stride=(1, 2, 1))
    fast = optimized(model)
    assert original_class(fast) is form
    x = draw(2, 4, frames, 7, 6, channels_last=channels_last)
    for cache in (None, draw(2, 4, 2, 7, 6, channels_last=channels_last), draw(2, 4, 1, 7, 6)):
        if cache is not None and cache.shape[2] + frames < 3:
            continue
        with torch.no_grad():
            expected, actual = model(x, cache), fast(x, cache)
        assert actual.shape == expected.shape
        assert is_dense_channels_last(actual) == is_dense_channels_last(expected)
        torch.testing.assert_close(actual, expected)


@forms
def test_nothing_is_padded(form):
    """Nor joined in more than one pass; one frame of a causal video is neither."""
    fast = optimized(build(form))
    cache = draw(1, 4, 2, 6, 5)
    for x, given in itertools.product((draw(1, 4, 1, 6, 5), draw(1, 4, 4, 6, 5)), (None, cache)):
        with torch.no_grad():
            found = calls(lambda x=x, given=given: fast(x, given))
        assert not found["constant_pad_nd"] + found["replication_pad3d"]
        has_front = form in (Repeated, Child, InOne) or (form is Cached and given is not None)
        assert found["cat"] == (not issubclass(form, Image) and (has_front or x.shape[2] > 1))


def test_the_format_of_a_join():
    """PyTorch's; channels_last of one such part where the model runs so, which PyTorch would end."""
    x, cache = draw(1, 4, 4, 6, 5, channels_last=True), draw(1, 4, 2, 6, 5)
    for parts, keeps, is_last in (
        ([cache, x], True, True),
        ([cache, x], False, False),
        ([x[:, :, :1], x], False, True),
        ([cache, cache], True, False),
    ):
        y = padding._joined(parts, keeps, (1, 0, 0), (0, 0, 0))
        assert torch.equal(y, F.pad(torch.cat(parts, 2), (0, 0, 0, 0, 1, 0)))
        assert is_dense_channels_last(y) == is_last


def test_a_padding_of_nothing_is_no_copy():
    fast = optimized(Cached(4, 6, 1).double().eval())
    with torch.no_grad():
        assert not calls(lambda: fast(draw(1, 4, 3, 5, 5)))["clone"]


def test_lists_may_change_afterwards():
    """The padding was read when the code came by; what waits does not see what became of the list."""

    class Changing(nn.Conv2d):
        def forward(self, x):
            pads = [1, 1, 1, 1]
            x = F.pad(x, pads)
            pads[0] = 7
            return super().forward(x)

    model = Changing(4, 4, 3).double().eval()
    x = draw(1, 4, 5, 5)
    fast = optimized(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert pads(fast, x) == 0


def test_a_tensor_that_changes_in_between():
    """``+=`` may write to what was joined, and so may a list's item: the join runs first."""

    class Item(nn.Conv2d):
        def forward(self, x):
            parts = [x, 1]
            h = F.pad(x, (1, 1, 1, 1))
            parts[0] += 5
            return super().forward(h)

    class Name(nn.Conv2d):
        def forward(self, x):
            other = x
            h = F.pad(x, (1, 1, 1, 1))
            other += 5
            return super().forward(h)

    for cls in (Item, Name):
        model = cls(4, 4, 3).double().eval()
        x = draw(1, 4, 5, 5)
        with torch.no_grad():
            expected = model(x.clone())
            assert torch.equal(optimized(model)(x), expected)


def test_a_value_that_others_read_is_made():
    """A cache keeps its meaning: a copy of the padded frames, bit for bit."""

    class Keeping(nn.Conv3d):
        cache = None

        def forward(self, x):
            front = x[:, :, :1].repeat(1, 1, 2, 1, 1) if self.cache is None else self.cache
            x = torch.cat([front, x], dim=2)
            self.cache = x[:, :, -2:].clone()
            x = F.pad(x, (1, 1, 1, 1))
            return super().forward(x)

    model = Keeping(4, 4, 3).double().eval()
    fast = optimized(model)
    with torch.no_grad():
        for frames in (1, 4, 2):
            x = draw(1, 4, frames, 6, 5)
            torch.testing.assert_close(fast(x), model(x))
            assert torch.equal(fast.cache, model.cache)
    assert pads(fast, draw(1, 4, 2, 6, 5)) == 0


@pytest.mark.parametrize("convolves", [False, True])
@pytest.mark.parametrize("times", [0, 1])
def test_a_value_that_may_be_replaced_is_made(convolves, times):
    """What a loop assigns, perhaps nothing assigns: the padding that waited was returned."""

    class Perhaps(nn.Conv3d):
        def forward(self, x):
            x = F.pad(x, (1, 1, 1, 1, 2, 0))
            if convolves:
                return super().forward(x)
            for _ in range(times):
                x = torch.ones(1, 2, 3)
            return x

    model, x = Perhaps(4, 4, 3).double().eval(), draw(1, 4, 3, 5, 5)
    with torch.no_grad():
        torch.testing.assert_close(optimized(model)(x), model(x))


# ---------------------------------------------------------------------------------------------------- left as it stands


def test_in_training_pytorchs_code_runs():
    model = build(Cached)
    fast, x = optimized(model), draw(1, 4, 3, 5, 5)
    assert pads(fast, x, grad=True) == 1
    grads = [torch.autograd.grad(m(x).sum(), list(m.parameters())) for m in (model, fast)]
    assert all(map(torch.equal, *grads))


def test_hooks_see_the_padded_tensor():
    model, seen = build(Child), []
    fast, x = optimized(model), draw(1, 4, 3, 5, 5)
    fast.conv.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
    with torch.no_grad():
        fast(x)
    assert seen == [(1, 4, 5, 7, 7)]


def test_what_was_replaced_runs(monkeypatch):
    fast, x, seen = optimized(build(Cached)), draw(1, 4, 3, 5, 5), []
    own = F.pad

    def replaced(*args, **kwargs):
        seen.append("pad")
        return own(*args, **kwargs)

    with torch.no_grad():
        expected = fast(x)
        with monkeypatch.context() as patch:
            patch.setattr(F, "pad", replaced)
            torch.testing.assert_close(fast(x), expected)
        forward = nn.Conv3d._conv_forward
        with monkeypatch.context() as patch:
            patch.setattr(nn.Conv3d, "_conv_forward", lambda *args: seen.append("conv") or forward(*args))
            torch.testing.assert_close(fast(x), expected)
    assert seen == ["pad", "conv"]


def test_other_paddings():
    class Free(nn.Conv2d):
        how = {"pad": (1, 1, 1, 1)}  # noqa: RUF012

        def forward(self, x):
            return super().forward(F.pad(x, **self.how))

    class Given(nn.Conv2d):
        pad, mode, value = (1, 1, 1, 1), "constant", None

        def forward(self, x):
            x = F.pad(x, self.pad, self.mode, self.value)
            return super().forward(x)

    x = draw(1, 4, 5, 5)
    fast = optimized(Given(4, 4, 3).double().eval())
    assert pads(fast, x) == 0
    for pad, mode, value in (
        ((1, 1, 1, 1), "reflect", None),
        ((1, 1, 1, 1), "constant", 1.0),
        ((1, 1, -1, 1), "constant", None),
        ((1, 0, 1, 0), "constant", 0),
        ((1, 1, 1, 1), "constant", torch.zeros(())),
        ((1, 1, 1, 1, 1, 1), "constant", 0),
    ):
        fast.pad, fast.mode, fast.value = pad, mode, value
        if len(pad) == 4:
            assert pads(fast, x) == 1
        else:
            with torch.no_grad(), pytest.raises(RuntimeError):
                fast(x)
    fast.pad, fast.padding_mode = (1, 1, 1, 1), "circular"
    assert pads(fast, x) >= 1
    assert pads(optimized(Free(4, 4, 3).double().eval()), x) == 1


class Looking(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_who_looks_on():
    fast, x = optimized(build(Cached)), draw(1, 4, 3, 5, 5)
    with padding.as_it_stands():
        assert pads(fast, x) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pads(fast, x) == 1
    with Looking():
        assert pads(fast, x) == 1

    class Own(torch.Tensor):
        pass

    assert pads(fast, x.as_subclass(Own)) >= 1
    assert pads(fast, x) == 0


def test_own_modes_see_the_convolution():
    """Which may compute it in another way; what is asked of tensors in front of it is no business of theirs."""
    seen = []

    class Seeing(watching.OwnMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    fast, x = optimized(build(Cached)), draw(1, 4, 3, 5, 5)
    with torch.no_grad():
        expected = fast(x)
        assert torch.equal(watching.inside(Seeing(), fast, x), expected)
    assert seen == ["conv3d"]


def test_sequentials():
    model = nn.Sequential(
        nn.ZeroPad2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.ConstantPad2d(1, 0.0), nn.Conv2d(4, 4, 3, groups=2),
        nn.ConstantPad2d(1, 0.5), nn.Conv2d(4, 4, 3),
    ).double().eval()  # fmt: skip
    fast, x = optimized(model), draw(1, 4, 6, 7)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert pads(fast, x) == 1
    model[3].register_forward_hook(lambda m, args, y: y + 1)
    fast = optimized(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert pads(fast, x) == 2


def test_undone_pickled_excluded():
    model = nn.ModuleList([build(Cached), build(Cached)])
    kgopt.optimize(model, exclude="1")
    x = draw(1, 4, 3, 5, 5)
    assert [pads(m, x) for m in model] == [0, 1]
    assert "padding: of 1 module waits" in str(kgopt.report(model))
    again = pickle.loads(pickle.dumps(model[0]))
    assert pads(again, x) == 0
    kgopt.restore(model)
    assert type(model[0]) is Cached
    assert "_kgopt" not in model[0].__dict__
    assert pads(model[0], x) == 1


def test_compiled_by_others():
    """Another compiler sees the code as it stands."""
    model = build(Cached)
    fast, x = optimized(model), draw(1, 4, 3, 5, 5)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fast, backend="eager", fullgraph=True)(x, x), model(x, x))


@pytest.mark.gpu
@forms
@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(form, channels_last, dtype):
    """As accurate as PyTorch's, in the same format; also by way of kgopt's kernels where they are faster."""
    model = build(form).cuda()
    given = copy.deepcopy(model).to(dtype)
    if channels_last:
        given = given.to(memory_format=torch.channels_last if issubclass(form, Image) else torch.channels_last_3d)
    x, cache = (draw(1, 4, n, 96, 80, channels_last=channels_last, dtype=dtype).cuda() for n in (4, 2))
    measured = kgopt.optimize(copy.deepcopy(given), (x, cache), channels_last=False, cuda_graph=False)
    for fast, frames, front in itertools.product((optimized(given), measured), (1, 4), (None, cache)):
        part = x[:, :, :frames]
        with torch.no_grad(), accuracy.no_autotuning():
            exact = model(part.double(), None if front is None else front.double())
            expected, actual = given(part, front), fast(part, front)
        assert is_dense_channels_last(actual) == is_dense_channels_last(expected)
        allowed = accuracy.allowed(dtype, accuracy.relative_error(expected, exact))
        assert accuracy.relative_error(actual, exact) <= allowed
