"""Whole models of published libraries, as ``bench --suite models`` runs them: built from code, weights random.

The libraries are optional. Nothing here imports them before :meth:`ModelCase.build` is called.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kgopt.cli._optional import MissingPackageError
from kgopt.cli.models import randomize

__all__ = ["MODEL_CASES", "Decode", "ModelCase"]


class Decode(nn.Module):
    """The decoder of a diffusers autoencoder as a module of its own: latent -> image or video.

    The encoder is dropped: it would only take memory, and its norms would fill the report.
    """

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        autoencoder.encoder = nn.Identity()
        autoencoder.quant_conv = nn.Identity()
        self.autoencoder = autoencoder

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        """latent [N, C, (T,) H, W] -> the decoded sample."""
        sample: torch.Tensor = self.autoencoder.decode(latent, return_dict=False)[0]  # type: ignore[operator]
        return sample


def _segresnet(nets: Any, small: bool) -> nn.Module:
    model: nn.Module = nets.SegResNet(
        spatial_dims=3, init_filters=8 if small else 32, in_channels=4, out_channels=3,
        norm=("GROUP", {"num_groups": 8}),
    )  # fmt: skip
    return model


def _unet3d(module: Any, small: bool) -> nn.Module:
    model: nn.Module = module.UNet3D(
        in_channels=1, out_channels=1, f_maps=8 if small else 32, layer_order="gcr", num_groups=8,
        num_levels=3 if small else 4,
    )  # fmt: skip
    return model


def _autoencoder(diffusers: Any, small: bool) -> nn.Module:
    channels = (32, 32) if small else (128, 256, 512, 512)
    return Decode(
        diffusers.AutoencoderKL(
            block_out_channels=channels,
            down_block_types=("DownEncoderBlock2D",) * len(channels),
            up_block_types=("UpDecoderBlock2D",) * len(channels),
            layers_per_block=1 if small else 2,
        )
    )


def _hunyuan(diffusers: Any, small: bool) -> nn.Module:
    channels = (32, 32, 32, 32) if small else (128, 256, 512, 512)
    return Decode(diffusers.AutoencoderKLHunyuanVideo(block_out_channels=channels, layers_per_block=1 if small else 2))


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """One model and the input that it is measured with."""

    name: str
    full_title: str
    module: str  # what is imported
    package: str  # what pip installs
    make: Callable[[Any, bool], nn.Module]  # the imported module, small? -> the model
    full_shape: tuple[int, ...]  # of the input, batch and channels first
    small_shape: tuple[int, ...]
    trains: bool = False  # is a training step measured too?
    small: bool = False  # few channels and a small input, for tests and --quick
    # Where float64 takes minutes: errors are those against float32, whose own is taken at an input of this shape.
    float64_shape: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """What tables and charts call it."""
        return f"{self.name}, made small" if self.small else self.full_title

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the input."""
        return self.small_shape if self.small else self.full_shape

    def build(self, seed: int = 0) -> nn.Module:
        """The model in fp32 on the CPU, in eval mode; weights seeded, gamma and beta random.

        Every parameter is rounded to bf16, so that the model has the same values in every precision and one float64
        reference serves them all.

        Raises:
            MissingPackageError: the library is not installed; the text has the pip command.
        """
        try:
            library = importlib.import_module(self.module)
        except ImportError as error:
            raise MissingPackageError(f"{self.package} is missing ({error}); pip install {self.package}") from None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = randomize(self.make(library, self.small), seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        return model.eval()

    def inputs(self, device: torch.device, seed: int = 0, shape: tuple[int, ...] = ()) -> torch.Tensor:
        """A standard normal input in fp32, of the case's shape or another, rounded to bf16 as the parameters are."""
        generator = torch.Generator(device=device).manual_seed(seed)
        return torch.randn(shape or self.shape, generator=generator, device=device).bfloat16().float()


MODEL_CASES = (
    ModelCase(
        "SegResNet", "MONAI SegResNet, 32 filters", "monai.networks.nets", "monai", _segresnet,
        (1, 4, 128, 128, 128), (1, 4, 16, 16, 16), trains=True,
    ),
    ModelCase(
        "UNet3D", "pytorch3dunet UNet3D, 32 maps, gcr", "pytorch3dunet.unet3d.model", "pytorch3dunet", _unet3d,
        (1, 1, 96, 128, 128), (1, 1, 16, 16, 16), trains=True,
    ),
    ModelCase(
        "AutoencoderKL", "diffusers AutoencoderKL decode", "diffusers", "diffusers", _autoencoder,
        (1, 4, 64, 64), (1, 4, 8, 8),
    ),
    ModelCase(
        "AutoencoderKLHunyuanVideo", "diffusers AutoencoderKLHunyuanVideo decode", "diffusers", "diffusers", _hunyuan,
        (1, 16, 5, 32, 32), (1, 16, 2, 4, 4), float64_shape=(1, 16, 2, 8, 8),
    ),
)  # fmt: skip
