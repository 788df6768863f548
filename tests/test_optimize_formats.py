"""``kgopt.optimize`` with channels_last: what would end the format inside of the model."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import kgopt
from fake_graphs import needs_cuda_build
from kgopt.rewrite.model import layout, whole
from kgopt.rewrite.optimized import known
from optimize_pairs import all_faster


class Seen(nn.Module):
    """Remembers whether what it was given last was contiguous."""

    def forward(self, x):
        self.contiguous = x.is_contiguous()
        return x


class Block(nn.Module):
    """A residual block that asks for a contiguous tensor, as published ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)
        self.seen = Seen()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.shortcut = None

    def forward(self, x):
        x = x.contiguous()
        residual = x
        x = self.seen(x)
        x = F.silu(self.norm(x))
        x = self.conv(x)
        if self.shortcut is not None:
            residual = self.shortcut(residual)
        return x + residual


class Viewed(Block):
    """Needs what it asks for."""

    def forward(self, x):
        x = x.contiguous()
        x = self.seen(x)
        return self.norm(x).sum() + x.view(-1).sum()


def _looks_at_memory(x):
    return x.as_strided((1,), (1,))


class Handed(Block):
    """Gives it to a function that may need it."""

    def forward(self, x):
        y = x.contiguous()
        z = self.seen(y)
        return self.norm(z) + _looks_at_memory(y)


class Joined(Block):
    """No norm in it; what is read by functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        del self.norm

    def forward(self, x):
        n = x.shape[0]
        x = x.contiguous()
        y = self.seen(x)
        y = F.interpolate(x, scale_factor=2, mode="nearest") if n > 100 else y
        return self.conv(torch.cat((x, y), dim=0)).split(n)[0]


class Unnamed(Block):
    def forward(self, x):
        return self.norm(self.seen(x.contiguous()))


@pytest.mark.parametrize(
    ("block", "kept"), [(Block, True), (Joined, True), (Viewed, False), (Handed, False), (Unnamed, False)]
)
def test_contiguous_is_kept_back_where_no_one_can_tell(block, kept, device):
    torch.manual_seed(0)
    model = nn.Sequential(block(), nn.Identity()).to(device).eval()
    x = torch.randn(2, 8, 5, 6, device=device)
    with torch.no_grad():
        expected = model(x)
        assert model[0].seen.contiguous
        kgopt.optimize(model, channels_last=True, measure=False)
        y = model(x)
        assert model[0].seen.contiguous is not kept
        assert y.is_contiguous()  # the caller's own format
        torch.testing.assert_close(y, expected, rtol=2e-3, atol=2e-3)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(x), y)
            assert copied[0].seen.contiguous is not kept
        kgopt.restore(model)
        assert torch.equal(model(x), expected)
        assert model[0].seen.contiguous
        assert type(model[0]) is block


def test_without_the_layout_contiguous_means_contiguous():
    model = nn.Sequential(Block(), nn.Identity()).eval()
    x = torch.randn(2, 8, 5, 6).contiguous(memory_format=torch.channels_last)
    kgopt.optimize(model, channels_last=False, measure=False)
    with torch.no_grad():
        model(x)
    assert model[0].seen.contiguous


def test_a_slice_of_channels_last_becomes_dense():
    """Neither format as it lies: the result is a dense one of the model's own."""
    model = nn.Sequential(Block()).eval()
    kgopt.optimize(model, channels_last=True, measure=False)
    given = []
    model[0].seen.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    x = torch.randn(2, 8, 5, 12).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        model[0](x[..., ::2])
    assert given[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(given[0], x[..., ::2])


def test_a_compiled_model_keeps_the_format(device):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Identity()).to(device).eval()
    x = torch.randn(2, 8, 5, 6, device=device)
    with torch.no_grad():
        expected = model(x)
        kgopt.optimize(model, channels_last=True, measure=False)
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert not model[0].seen.contiguous
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=2e-3)


def test_gradients_flow_through_what_was_kept_back():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Identity())
    x = torch.randn(2, 8, 5, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    kgopt.optimize(model, channels_last=True, measure=False)
    (dx,) = torch.autograd.grad(model(x).square().sum(), x)
    assert not model[0].seen.contiguous
    torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-4)


class Padded(nn.Module):
    def forward(self, x):
        return F.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate")


def test_replicate_padding_keeps_the_format_of_the_model():
    """PyTorch's gives a contiguous tensor where x is channels_last_3d."""
    model = nn.Sequential(Padded(), Seen())
    x = torch.randn(1, 8, 3, 5, 6).contiguous(memory_format=torch.channels_last_3d)
    with torch.no_grad():
        expected = model(x)
        layout.set_layout(model, True)
        assert all_faster(model, x)
        y = model(x)
        assert not model[1].contiguous
        assert torch.equal(y, expected)
        # The verdict is one about that layout alone.
        layout.set_layout(model, False)
        was = Padded()(x).is_contiguous()
        model(x)
        assert model[1].contiguous is was


class Rising(nn.Module):
    """Two branches that meet, upsampled."""

    def __init__(self) -> None:
        super().__init__()
        up = nn.Upsample(scale_factor=2, mode="trilinear", align_corners=False)
        self.ups = nn.ModuleList([nn.Sequential(up)])
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x, skip):
        for up in self.ups:
            x = up(x) + skip
        return self.norm(x)


def test_a_verdict_in_the_models_format_holds_for_sums_too(monkeypatch):
    from kgopt.rewrite.waiting import sums

    torch.manual_seed(0)
    model = Rising().eval()
    x = torch.randn(1, 8, 2, 3, 4)
    skip = torch.randn(1, 8, 4, 6, 8)
    with torch.no_grad():
        expected = model(x, skip)
        kgopt.optimize(model, channels_last=True, measure=False)
        assert all_faster(model, x, skip)
        summed = []
        own = sums._upsample_linear
        monkeypatch.setattr(sums, "_upsample_linear", lambda *a: summed.append(a) or own(*a))
        y = model(x, skip)
    assert len(summed) == 1
    torch.testing.assert_close(y, expected)


class WritesThroughReshape(Block):
    """Sets half of the channels of a feature map through a view of it, which is a copy in channels_last."""

    def forward(self, x):
        h = self.conv(F.silu(self.norm(x)))
        h.reshape(h.shape[0], 2, -1)[:, 0] = x.mean()
        return self.norm(h)


@pytest.mark.parametrize("channels_last", [True, "auto"])
def test_writes_through_a_reshape_keep_the_layout(channels_last, monkeypatch):
    """They went to a copy: the outputs of the optimized model were others, and nothing said so."""
    monkeypatch.setattr(whole, "chooses", lambda device: True)
    monkeypatch.setattr(whole.Whole, "seconds", lambda self, what, *functions: [1.0 for f in functions])
    monkeypatch.setattr(whole.Whole, "work", lambda self, what: 1.0)
    model, x = WritesThroughReshape().eval(), torch.randn(2, 8, 6, 5)
    with torch.no_grad():
        expected = model(x)
        kgopt.optimize(model, x, channels_last=channels_last)
        assert "channels_last gives other outputs" in kgopt.report(model).layout
        torch.testing.assert_close(model(x), expected)


def test_dropout_may_choose_a_layout():
    """In train mode the masks fall on other elements: that the outputs differ says nothing."""
    model, x = (
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout(0.5)),
        torch.randn(2, 8, 6, 5),
    )
    kgopt.optimize(model, x, channels_last=True)
    assert kgopt.report(model).layout == "channels_last, as asked for"


class OneChannel(nn.Module):
    """The first convolution has one channel and a kernel of 1: all its strides may be those of either format."""

    def __init__(self, kernel=1):
        super().__init__()
        self.conv = nn.Conv3d(1, 4, kernel, padding=kernel // 2)
        self.seen = []

    def forward(self, x, writes=False, returns=False):
        self.seen.append(x.stride())
        if writes:
            x.add_(1)
        y = self.conv(x)
        return (y, x) if returns else y


@needs_cuda_build
@pytest.mark.parametrize(("kernel", "channel_stride"), [(1, 1), (3, 210)])
def test_strides_of_one_channel_say_channels_last_where_the_kernel_does_not(kernel, channel_stride):
    model = OneChannel(kernel).eval()
    x = torch.randn(2, 1, 5, 6, 7)
    expected = model(x)
    kgopt.optimize(model, channels_last=True, measure=False)
    weight = model.conv.weight
    with FakeTensorMode():  # on CUDA, PyTorch goes by the strides
        on_gpu = torch.empty_strided(weight.shape, weight.stride(), device="cuda")
        given = layout._Given(known.get(model, "layout").names_format).convert(torch.empty(x.shape, device="cuda"))
        y = torch.conv3d(given, on_gpu, None, 1, kernel // 2)
        assert y.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(model(x), expected)
    assert model.seen[-1] == (210, channel_stride, 42, 7, 1)
    y, same = model(x, returns=True)
    assert same is x
    assert y.is_contiguous()
    before = x.clone()
    model(x, writes=True)
    assert torch.equal(x, before + 1)
    with torch.inference_mode():
        model(x, writes=True)
    assert torch.equal(x, before + 1 + 1)
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    assert leaf.grad.is_contiguous()
