"""Networks of images: timm, segmentation-models-pytorch, torchvision."""

from __future__ import annotations

from typing import Any

from torch import nn

from kgopt.cli.networks.network import Network

__all__ = ["NETWORKS"]

NETWORKS: list[Network] = []


def _timm(name: str, size: int = 224, batch: int = 32, called: str = "", **more: Any) -> None:
    """A network as timm names it; small: few images of 64 x 64."""
    NETWORKS.append(
        Network(
            f"timm {called or name}", "timm", "timm",
            lambda timm, small: timm.create_model(name, pretrained=False, **(more if not small else {**more, **_LESS})),
            ((batch, 3, size, size),), ((2, 3, 64, 64),), trains="autocast",
        )
    )  # fmt: skip


_LESS = {"num_classes": 5}


def _smp(architecture: str, encoder: str, size: int = 512, batch: int = 8, **more: Any) -> None:
    def make(smp: Any, small: bool) -> nn.Module:
        model: nn.Module = getattr(smp, architecture)(
            "tu-lcnet_050" if small else encoder, encoder_weights=None, in_channels=3, classes=2, **more
        )
        return model

    norm = " GroupNorm" if more.get("decoder_use_norm") else ""
    NETWORKS.append(
        Network(
            f"smp {architecture} {encoder}{norm}", "segmentation-models-pytorch", "segmentation_models_pytorch", make,
            ((batch, 3, size, size),), ((2, 3, 64, 64),), trains="autocast",
        )
    )  # fmt: skip


def _torchvision(name: str, make: Any, full: tuple[int, ...], small: tuple[int, ...]) -> None:
    NETWORKS.append(
        Network(f"torchvision {name}", "torchvision", "torchvision.models", make, (full,), (small,), trains="autocast")
    )


def _groups(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels)


_timm("resnet50_gn")
_timm("resnetv2_50x1_bit")
_timm("convnext_tiny")
_timm("convnextv2_tiny")
_timm("efficientnet_b3_gn", size=288)
_timm("resnet50_gn", batch=1, called="resnet50_gn batch 1")
_smp("Unet", "resnet34")
_smp("Unet", "resnet34", decoder_use_norm={"type": "groupnorm", "num_groups": 8})
_smp("FPN", "resnet34")
_smp("DeepLabV3Plus", "resnet34")
_smp("UnetPlusPlus", "resnet34", decoder_use_norm={"type": "instancenorm"})
_torchvision(
    "resnet50 GroupNorm", lambda m, small: m.resnet50(weights=None, norm_layer=_groups), (32, 3, 224, 224),
    (2, 3, 64, 64),
)  # fmt: skip
_torchvision(
    "resnet18", lambda m, small: m.resnet18(weights=None), (32, 3, 224, 224), (2, 3, 64, 64)
)
_torchvision(
    "convnext_tiny", lambda m, small: m.convnext_tiny(weights=None), (32, 3, 224, 224), (2, 3, 64, 64)
)
_torchvision(
    "r3d_18", lambda m, small: m.video.r3d_18(weights=None), (4, 3, 16, 112, 112), (1, 3, 4, 32, 32)
)
_torchvision(
    "RAFT's encoder",
    lambda m, small: m.optical_flow.raft.FeatureEncoder(
        block=m.optical_flow.raft.ResidualBlock, layers=(8, 8, 12, 16, 24) if small else (64, 64, 96, 128, 256),
        norm_layer=nn.InstanceNorm2d,
    ),
    (2, 3, 436, 1024), (1, 3, 64, 64),
)  # fmt: skip
