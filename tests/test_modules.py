"""kgopt.nn: state_dict round trips, initialization, representation, copies; the package itself."""

from __future__ import annotations

import copy
import inspect
import io
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
import torch.overrides
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kgopt
from kgopt import functional
from kgopt import nn as knn
from kgopt.reference import torch_activation

PAIRS = {
    "GroupNorm": (lambda m: m.GroupNorm(4, 8), (2, 8, 5, 5)),
    "GroupNorm no affine": (lambda m: m.GroupNorm(4, 8, affine=False), (2, 8, 5)),
    "Conv2d": (lambda m: m.Conv2d(4, 6, 3, 2, 1), (2, 4, 9, 9)),
    "Conv2d same": (lambda m: m.Conv2d(4, 6, (2, 3), padding="same", dilation=2), (2, 4, 9, 9)),
    "Conv2d reflect": (lambda m: m.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), (2, 4, 9, 9)),
    "Conv2d circular same": (lambda m: m.Conv2d(4, 6, 4, padding="same", padding_mode="circular"), (2, 4, 9, 9)),
    "Conv3d": (lambda m: m.Conv3d(4, 6, (1, 2, 3), groups=2, bias=False), (2, 4, 5, 6, 7)),
    "Conv3d replicate": (lambda m: m.Conv3d(4, 6, 3, padding=1, padding_mode="replicate"), (2, 4, 5, 6, 7)),
    "Conv3d unbatched": (lambda m: m.Conv3d(4, 6, 3), (4, 5, 6, 7)),
    "ConvTranspose2d": (lambda m: m.ConvTranspose2d(4, 6, 3, 2, 1, 1), (2, 4, 5, 5)),
    "ConvTranspose3d": (lambda m: m.ConvTranspose3d(4, 6, 3, 2, groups=2), (2, 4, 4, 5, 3)),
}


@pytest.mark.parametrize("act", ["none", "silu", "leaky_relu(0.2)"])
@pytest.mark.parametrize("bias", [True, False])
def test_channel_layer_norm_loads_layer_norm(bias, act, device):
    theirs = nn.LayerNorm(6, 1e-3, bias=bias)
    nn.init.normal_(theirs.weight)
    ours = knn.ChannelLayerNorm(6, 1e-3, bias=bias, act=act)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 6, 5, 4, device=device)
    expected = torch_activation(theirs.to(device)(x.movedim(1, -1)).movedim(-1, 1), act)
    torch.testing.assert_close(ours.to(device)(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("act", ["none", "silu"])
def test_channel_rms_norm_is_what_libraries_write(act, device):
    x, weight, bias = torch.randn(2, 6, 5, 4, device=device), torch.randn(6), torch.randn(6)
    for normalize in (False, True):
        made = knn.ChannelRMSNorm(6, 1e-3, bias=True, normalize=normalize, act=act)
        made.load_state_dict({"weight": weight, "bias": bias}, strict=True)
        if normalize:
            y = nn.functional.normalize(x, dim=1, eps=1e-3) * 6**0.5
        else:
            y = nn.functional.rms_norm(x.movedim(1, -1), (6,), eps=1e-3).movedim(-1, 1)
        y = y * weight.to(device).view(-1, 1, 1) + bias.to(device).view(-1, 1, 1)
        torch.testing.assert_close(made.to(device)(x), torch_activation(y, act), rtol=1e-4, atol=1e-5)
        assert f"normalize={normalize}" in repr(made) or not normalize
    pixel = knn.PixelNorm(act=act)
    assert not pixel.state_dict()
    expected = torch_activation(x / x.square().mean(1, True).add(1e-8).sqrt(), act)
    torch.testing.assert_close(pixel(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("made", [lambda act: knn.ChannelRMSNorm(4, act=act), lambda act: knn.PixelNorm(act=act),
                                  lambda act: knn.ChannelLayerNorm(4, act=act)])  # fmt: skip
def test_channel_norms_refuse_unknown_activations(made):
    with pytest.raises(ValueError, match="act names an unknown activation 'swoosh'"):
        made("swoosh")


@pytest.mark.parametrize("name", PAIRS)
def test_module_matches_torch(name, device):
    build, shape = PAIRS[name]
    torch.manual_seed(3)
    theirs = build(nn)
    torch.manual_seed(3)
    ours = build(knn)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert repr(ours) == repr(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(shape, device=device)
    torch.testing.assert_close(ours.to(device)(x), theirs.to(device)(x), rtol=1e-4, atol=1e-5)


def test_conv_transpose_output_size(device):
    torch.manual_seed(0)
    ours, theirs = knn.ConvTranspose2d(3, 4, 3, stride=2), nn.ConvTranspose2d(3, 4, 3, stride=2)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 5, 5, device=device)
    y = ours.to(device)(x, output_size=[12, 11])
    torch.testing.assert_close(y, theirs.to(device)(x, output_size=[12, 11]), rtol=1e-4, atol=1e-5)


class PlainMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, 24, 3)
        self.group_norm = nn.GroupNorm(8, 24)

    def forward(self, x):
        return self.group_norm(self.conv(x)).mean(dim=(1, 2, 3, 4))


class PlainReLUNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(6, 16, 3, bias=False)
        self.group_norm = nn.GroupNorm(8, 16)

    def forward(self, x):
        return self.group_norm(torch.relu(self.conv_transpose(x)))


class PlainLogSumExp(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 64, 3)
        self.group_norm = nn.GroupNorm(16, 64, 1e-5)

    def forward(self, x):
        c = self.conv(x)
        r = c + nn.functional.hardswish(torch.tanh(self.group_norm(c)))
        return torch.logsumexp(r, dim=1, keepdim=True)


class PlainNormConv(nn.Module):
    def __init__(self, conv, norm, act):
        super().__init__()
        self.group_norm, self.conv, self.act = norm, conv, act

    def forward(self, x):
        return self.conv(self.act(self.group_norm(x)))


FUSED = {
    "norm_conv2d": (
        lambda: knn.GroupNormConv2d(4, 8, 6, 3, padding=1, act="silu"),
        lambda: PlainNormConv(conv=nn.Conv2d(8, 6, 3, padding=1), norm=nn.GroupNorm(4, 8), act=nn.SiLU()),
        (2, 8, 7, 9),
    ),
    "norm_conv3d": (
        lambda: knn.GroupNormConv3d(2, 4, 6, (1, 3, 2), 2, 1, groups=2, bias=False, act="relu", eps=1e-3),
        lambda: PlainNormConv(
            nn.Conv3d(4, 6, (1, 3, 2), 2, 1, groups=2, bias=False), nn.GroupNorm(2, 4, 1e-3), nn.ReLU()
        ),
        (2, 4, 5, 7, 6),
    ),
    # Both need zeros behind the norm that a padded x would not give.
    "norm_conv2d same": (
        lambda: knn.GroupNormConv2d(4, 8, 6, (2, 4), padding="same", act="gelu"),
        lambda: PlainNormConv(nn.Conv2d(8, 6, (2, 4), padding="same"), nn.GroupNorm(4, 8), nn.GELU()),
        (2, 8, 7, 9),
    ),
    "norm_conv3d replicate": (
        lambda: knn.GroupNormConv3d(4, 8, 6, 3, padding=1, padding_mode="replicate"),
        lambda: PlainNormConv(
            nn.Conv3d(8, 6, 3, padding=1, padding_mode="replicate"), nn.GroupNorm(4, 8), nn.Identity()
        ),
        (1, 8, 4, 3, 5),
    ),
    "mean": (lambda: knn.Conv3dGroupNormMean(3, 24, 3, 8), PlainMean, (2, 3, 6, 8, 9)),
    "relu_norm": (lambda: knn.ConvTranspose3dReLUGroupNorm(6, 16, 3, 8), PlainReLUNorm, (2, 6, 4, 5, 6)),
    "logsumexp": (
        lambda: knn.Conv2dGroupNormTanhHardswishResidualLogSumExp(8, 64, 3, 16),
        PlainLogSumExp,
        (2, 8, 14, 15),
    ),
}


@pytest.mark.parametrize("name", [name for name in FUSED if name.startswith("norm_conv")])
def test_norm_conv_modules_add_a_residual_and_have_gradients(name, device):
    build, plain_class, shape = FUSED[name]
    fused, plain = build().double().to(device), plain_class().double().to(device)
    plain.load_state_dict(fused.state_dict(), strict=True)
    x = torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
    r = torch.randn_like(plain(x)).requires_grad_()
    ours, theirs = fused(x, r), plain(x) + r
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn_like(ours)
    grads = (torch.autograd.grad(y, (x, r, *m.parameters()), dy) for y, m in ((ours, fused), (theirs, plain)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", FUSED)
def test_fused_module_loads_plain_checkpoint(name, device):
    build, plain_class, shape = FUSED[name]
    torch.manual_seed(5)
    plain = plain_class()
    torch.manual_seed(5)
    fused = build()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fused.parameters(), strict=True))
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    fused.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(fused.state_dict(), strict=True)
    x = torch.randn(shape, device=device)
    plain, fused = plain.to(device), fused.to(device)
    torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-5)
    for a, b in ((copy.deepcopy(fused), "deepcopy"), (torch.load(saved(fused), weights_only=False), "torch.save")):
        torch.testing.assert_close(a(x), fused(x), msg=b)


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return buffer


def test_fused_constructors_take_the_documented_arguments():
    expected = {
        knn.Conv3dGroupNormMean: ["in_channels", "out_channels", "kernel_size", "num_groups"],
        knn.ConvTranspose3dReLUGroupNorm: ["in_channels", "out_channels", "kernel_size", "groups", "bias"],
        knn.Conv2dGroupNormTanhHardswishResidualLogSumExp: [
            "in_channels", "out_channels", "kernel_size", "groups", "eps"],
    }  # fmt: skip
    usual = {"stride", "padding", "dilation", "conv_groups", "bias", "device", "dtype"}
    for cls, names in expected.items():
        parameters = list(inspect.signature(cls).parameters)
        assert parameters[: len(names)] == names
        assert usual <= set(parameters)


# Every keyword of the fused constructors, and the same network out of torch.nn.
def mean_pair(device):
    options = {"stride": (1, 2, 1), "padding": (1, 0, 2), "dilation": (1, 1, 2), "bias": False}
    fused = knn.Conv3dGroupNormMean(
        4, 6, (3, 2, 3), 3, groups=2, eps=1e-2, device=device, dtype=torch.float64, **options
    )
    conv = nn.Conv3d(4, 6, (3, 2, 3), groups=2, device=device, dtype=torch.float64, **options)
    norm = nn.GroupNorm(3, 6, 1e-2, device=device, dtype=torch.float64)
    return fused, conv, norm, lambda x: norm(conv(x)).mean((1, 2, 3, 4)), (2, 4, 7, 8, 9)


def mean_circular_pair(device):
    options = {"padding": (1, 2, 0), "padding_mode": "circular", "device": device, "dtype": torch.float64}
    fused = knn.Conv3dGroupNormMean(4, 6, 3, 3, **options)
    conv, norm = nn.Conv3d(4, 6, 3, **options), nn.GroupNorm(3, 6, device=device, dtype=torch.float64)
    return fused, conv, norm, lambda x: norm(conv(x)).mean((1, 2, 3, 4)), (2, 4, 7, 8, 9)


def mean_same_pair(device):
    options = {"padding": "same", "dilation": (1, 2, 1), "device": device, "dtype": torch.float64}
    fused = knn.Conv3dGroupNormMean(4, 6, (2, 3, 4), 3, **options)
    conv, norm = nn.Conv3d(4, 6, (2, 3, 4), **options), nn.GroupNorm(3, 6, device=device, dtype=torch.float64)
    return fused, conv, norm, lambda x: norm(conv(x)).mean((1, 2, 3, 4)), (2, 4, 7, 8, 9)


def relu_norm_pair(device):
    options = {
        "stride": (2, 1, 3),
        "padding": (1, 0, 1),
        "output_padding": (1, 0, 2),
        "dilation": (1, 2, 1),
        "bias": True,
    }
    fused = knn.ConvTranspose3dReLUGroupNorm(
        4, 6, 3, 3, conv_groups=2, eps=1e-2, device=device, dtype=torch.float64, **options
    )
    conv = nn.ConvTranspose3d(4, 6, 3, groups=2, device=device, dtype=torch.float64, **options)
    norm = nn.GroupNorm(3, 6, 1e-2, device=device, dtype=torch.float64)
    return fused, conv, norm, lambda x: norm(torch.relu(conv(x))), (2, 4, 4, 5, 3)


def logsumexp_of(conv, norm):
    def forward(x):
        c = conv(x)
        return torch.logsumexp(c + nn.functional.hardswish(torch.tanh(norm(c))), 1, keepdim=True)

    return forward


def logsumexp_pair(device):
    options = {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1), "bias": False}
    fused = knn.Conv2dGroupNormTanhHardswishResidualLogSumExp(
        4, 6, 3, 3, 1e-2, conv_groups=2, device=device, dtype=torch.float64, **options
    )
    conv = nn.Conv2d(4, 6, 3, groups=2, device=device, dtype=torch.float64, **options)
    norm = nn.GroupNorm(3, 6, 1e-2, device=device, dtype=torch.float64)
    return fused, conv, norm, logsumexp_of(conv, norm), (2, 4, 9, 8)


def logsumexp_reflect_pair(device):
    options = {"padding": (1, 3), "padding_mode": "reflect", "device": device, "dtype": torch.float64}
    fused = knn.Conv2dGroupNormTanhHardswishResidualLogSumExp(4, 6, 3, 3, **options)
    conv, norm = nn.Conv2d(4, 6, 3, **options), nn.GroupNorm(3, 6, device=device, dtype=torch.float64)
    return fused, conv, norm, logsumexp_of(conv, norm), (2, 4, 9, 8)


FUSED_OPTIONS = [
    mean_pair, mean_circular_pair, mean_same_pair, relu_norm_pair, logsumexp_pair, logsumexp_reflect_pair
]  # fmt: skip


@pytest.mark.parametrize("pair", FUSED_OPTIONS, ids=lambda f: f.__name__)
def test_fused_module_options(pair, device):
    fused, conv, norm, forward, shape = pair(device)
    with torch.no_grad():
        for p in fused.parameters():
            p.copy_(torch.randn_like(p))
    state = fused.state_dict()
    kind = "conv_transpose." if isinstance(conv, nn.ConvTranspose3d) else "conv."
    conv.load_state_dict({k[len(kind) :]: v for k, v in state.items() if k.startswith(kind)}, strict=True)
    norm.load_state_dict({k.split(".")[1]: v for k, v in state.items() if k.startswith("group_norm.")}, strict=True)
    x = torch.randn(shape, device=device, dtype=torch.float64)
    torch.testing.assert_close(fused(x), forward(x))
    # The submodules are torch's own, and print as torch's.
    assert repr(norm) == repr(fused.group_norm)
    assert repr(conv) == repr(fused.conv_transpose if kind == "conv_transpose." else fused.conv)


def test_conv_groups_has_two_names_where_groups_is_free():
    a, b = (knn.Conv3dGroupNormMean(4, 6, 3, 3, **k) for k in ({"groups": 2}, {"conv_groups": 2}))
    assert a.conv.groups == b.conv.groups == 2
    with pytest.raises(ValueError, match="groups is 2 and conv_groups is 4"):
        knn.Conv3dGroupNormMean(4, 4, 3, 2, groups=2, conv_groups=4)


def test_padding_of_one_number_in_a_list():
    """torch.nn.functional takes [1] for every dim."""
    x, weight = torch.randn(1, 2, 6, 6, dtype=torch.float64), torch.randn(3, 2, 3, 3, dtype=torch.float64)
    y = kgopt.functional.conv2d(x, weight, None, [2], [1], [1])
    torch.testing.assert_close(y, nn.functional.conv2d(x, weight, None, [2], [1], [1]))


def test_module_errors():
    with pytest.raises(ValueError, match="divisible"):
        knn.GroupNorm(5, 24)
    with pytest.raises(ValueError, match="act names an unknown activation 'swish' in 'swish'; expected"):
        knn.GroupNorm(4, 8, act="swish")
    with pytest.raises(ValueError, match="act names an unknown activation 'foo' in 'relu\\+foo'"):
        knn.GroupNorm(4, 8, act="relu+foo")
    with pytest.raises(ValueError, match="divisible"):
        knn.Conv3dGroupNormMean(3, 10, 3, 4)
    with pytest.raises(ValueError, match="divisible by groups"):
        knn.Conv2dGroupNormTanhHardswishResidualLogSumExp(3, 8, 3, 4, conv_groups=2)
    with pytest.raises(ValueError, match="padding is 'full', expected 'same', 'valid' or numbers"):
        kgopt.functional.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), padding="full")
    with pytest.raises(RuntimeError, match="stride is 2, expected 1 with padding='same'"):
        kgopt.functional.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), stride=2, padding="same")
    assert "act=silu" in repr(knn.GroupNorm(4, 8, act="silu"))


def test_group_norm_with_an_activation(device):
    norm = knn.GroupNorm(4, 8, act="gelu+sigmoid", device=device, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(2, 8, 5, device=device, dtype=torch.float64)
    exact = torch.sigmoid(nn.functional.gelu(nn.functional.group_norm(x, 4, norm.weight, norm.bias)))
    torch.testing.assert_close(norm(x), exact)


def test_version_and_lazy_modules():
    assert kgopt.__version__.count(".") == 2
    assert {"nn", "functional", "reference"} <= set(dir(kgopt))
    with pytest.raises(AttributeError, match="no attribute"):
        _ = kgopt.optimise


def test_import_is_quick():
    """Beside PyTorch's own, in time of the processor: 70 ms, a twentieth of that, where this was written."""
    code = (
        "import time; a = time.process_time(); import torch; b = time.process_time(); import kgopt;"
        " print((time.process_time() - b) / (b - a))"
    )
    shares = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(shares) < 0.07, shares


def test_modes_and_subclasses_see_the_op():
    """Where somebody looks on, modules take no short way past the dispatcher."""

    class Mine(torch.Tensor):
        seen: ClassVar[list] = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    x, op = torch.randn(2, 4, 5, 6), torch.ops.kgopt.group_norm.default
    module = knn.GroupNorm(2, 4)
    with Mode():
        module(x)
    assert op in seen
    expected = module(x)
    weight = module.weight.detach().as_subclass(Mine)
    assert torch.equal(functional.group_norm(x, 2, weight, module.bias), expected)
    assert op in Mine.seen
    with torch.autocast("cpu", torch.bfloat16):
        low = knn.Conv2d(4, 3, 3)(x)
    assert low.dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_group_norm_can_be_scripted():
    module, x = knn.GroupNorm(2, 4, act="silu"), torch.randn(2, 4, 5, 6)
    assert torch.equal(torch.jit.script(module)(x), module(x))
    for function, args in ((functional.group_norm_mean, (x, 2)), (functional.activation, (x, "silu"))):
        torch.testing.assert_close(torch.jit.script(function)(*args), function(*args))


def test_modes_see_the_ops_of_convolutions():
    """Plain tensors spare the dispatcher's way through Python; what watches that way must not miss a call."""

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, model = torch.randn(1, 3, 5, 6), kgopt.nn.Conv2d(3, 4, 3)
    for mode in (Functions, Ops):
        seen: list[str] = []
        with mode():
            y = model(x)
        assert any("conv2d" in name for name in seen)
        assert torch.equal(y, model(x))
    assert model(x).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
