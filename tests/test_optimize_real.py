"""Models of published libraries, where they are installed: MONAI, diffusers."""

from __future__ import annotations

import copy

import pytest
import torch

import kgopt
import optimize_models as models
from optimize_pairs import all_faster
from test_optimize_sums import sums_run
from tolerances import assert_as_good_as_torch


def check(original, *args, **kwargs):
    """Every norm is fused with its activation, and the output is as accurate as before."""
    models.randomized(original).eval()
    model = kgopt.optimize(copy.deepcopy(original), measure=False)

    def output(m, *arguments):
        y = m(*arguments, **kwargs)
        return y[0] if isinstance(y, tuple) else y

    with torch.no_grad():
        exact = output(
            copy.deepcopy(original).double(), *(a.double() if isinstance(a, torch.Tensor) else a for a in args)
        )
        assert_as_good_as_torch(output(model, *args), output(original, *args), exact)
    kgopt.restore(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    return kgopt.report(kgopt.optimize(copy.deepcopy(original), measure=False))


def test_monai_segresnet():
    nets = pytest.importorskip("monai.networks.nets")
    net = nets.SegResNet(
        spatial_dims=3, init_filters=8, in_channels=1, out_channels=2, norm=("GROUP", {"num_groups": 4})
    )
    report = check(net, torch.randn(1, 1, 32, 32, 32))
    assert len(report.fused) == len(report.sites) == 25, str(report)


def test_monai_dynunet():
    nets = pytest.importorskip("monai.networks.nets")
    report = check(nets.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2]), torch.randn(1, 1, 16, 16, 16))
    assert len(report.fused) == len(report.sites) == 10, str(report)


def test_diffusers_autoencoder():
    diffusers = pytest.importorskip("diffusers")
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        layers_per_block=1,
    )
    report = check(vae, torch.randn(1, 3, 32, 32), return_dict=False)
    # Attention has a norm without an activation.
    alone = [row.path for row in report.sites if "→" not in row.kind]
    assert all("attentions" in path for path in alone), str(report)
    assert all(row.became for row in report.sites)


def test_diffusers_unet():
    diffusers = pytest.importorskip("diffusers")
    net = diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        layers_per_block=1,
    )
    report = check(net, torch.randn(1, 3, 16, 16), 3, return_dict=False)
    alone = [row.path for row in report.sites if "→" not in row.kind]
    assert all("attentions" in path for path in alone), str(report)


def fused_sums(model, x, monkeypatch):
    """Calls between the norms replaced wherever they can be: how many sums ran as one, and the output."""
    all_faster(kgopt.optimize(model, measure=False), x)
    with torch.no_grad():
        return sums_run(model, x, monkeypatch)


def test_monai_segresnet_upsamples_and_adds_at_once(monkeypatch):
    nets = pytest.importorskip("monai.networks.nets")
    net = nets.SegResNet(spatial_dims=3, init_filters=8, in_channels=1, norm=("GROUP", {"num_groups": 4}))
    original, x = models.randomized(net).eval(), torch.randn(1, 1, 16, 16, 16)
    count, y = fused_sums(copy.deepcopy(original), x, monkeypatch)
    assert count == 3  # one a level
    with torch.no_grad():
        assert_as_good_as_torch(y, original(x), copy.deepcopy(original).double()(x.double()))


def test_diffusers_resnet_block_adds_at_once(monkeypatch):
    resnet = pytest.importorskip("diffusers.models.resnet")

    class Block(torch.nn.Module):
        def __init__(self, out_channels) -> None:
            super().__init__()
            self.block = resnet.ResnetBlock2D(
                in_channels=32, out_channels=out_channels, temb_channels=None, output_scale_factor=2**0.5
            )

        def forward(self, x):
            return self.block(x, None)

    for out_channels in (32, 64):  # without and with a shortcut between the convolution and the sum
        original, x = models.randomized(Block(out_channels)).eval(), torch.randn(2, 32, 6, 5)
        count, y = fused_sums(copy.deepcopy(original), x, monkeypatch)
        assert count == 1
        with torch.no_grad():
            assert_as_good_as_torch(y, original(x), copy.deepcopy(original).double()(x.double()))
