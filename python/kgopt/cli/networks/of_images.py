"""Networks of images: timm, segmentation-models-pytorch, torchvision."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from kgopt.cli.networks.network import Network

__all__ = ["NETWORKS"]

NETWORKS: list[Network] = []


_RESNET = {"layers": (1, 1, 1, 1), "channels": (32, 32, 32, 32)}
_CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 24)}


def _timm(name: str, small: dict[str, Any], size: int = 224, batch: int = 32, note: str = "", other: str = "") -> None:
    """A network as timm names it; ``small``: what makes it narrow, or ``other`` that stands for it."""

    def make(timm: Any, is_small: bool) -> nn.Module:
        options = {"num_classes": 5, **small} if is_small else {}
        model: nn.Module = timm.create_model(other if is_small and other else name, pretrained=False, **options)
        return model

    NETWORKS.append(
        Network(
            f"timm {name}{note}", "timm", "timm", make, ((batch, 3, size, size),), ((2, 3, 64, 64),), trains="autocast"
        )
    )


def _grouped(model: nn.Module) -> nn.Module:
    """``model`` with GroupNorm for every batch norm, as people do who train with few images."""
    for name, module in model.named_children():
        if isinstance(module, nn.BatchNorm2d):
            setattr(model, name, nn.GroupNorm(math.gcd(8, module.num_features), module.num_features))
        else:
            _grouped(module)
    return model


_NARROW: dict[str, dict[str, Any]] = {
    "Unet": {"decoder_channels": (16, 16, 8, 8, 8)},
    "UnetPlusPlus": {"decoder_channels": (16, 16, 8, 8, 8)},
    "FPN": {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 32},
    "DeepLabV3Plus": {"decoder_channels": 16, "decoder_atrous_rates": (2, 3, 4)},
}


def _smp(architecture: str, encoder: str, norm: str = "") -> None:
    def make(smp: Any, small: bool) -> nn.Module:
        more: dict[str, Any] = _NARROW[architecture] if small else {}
        if norm == "InstanceNorm":
            more = {**more, "decoder_use_norm": {"type": "instancenorm", "affine": True}}
        model: nn.Module = getattr(smp, architecture)(
            "tu-lcnet_050" if small else encoder, encoder_weights=None, in_channels=3, classes=2, **more
        )
        if norm == "GroupNorm":
            _grouped(model.decoder)  # type: ignore[arg-type]
        return model

    NETWORKS.append(
        Network(
            f"smp {architecture} {encoder} {norm}".rstrip(), "segmentation-models-pytorch",
            "segmentation_models_pytorch", make, ((8, 3, 512, 512),), ((2, 3, 64, 64),), trains="autocast",
        )
    )  # fmt: skip


def _torchvision(name: str, make: Any, full: tuple[int, ...], small: tuple[int, ...]) -> None:
    NETWORKS.append(
        Network(f"torchvision {name}", "torchvision", "torchvision.models", make, (full,), (small,), trains="autocast")
    )


def _groups(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels)


def _resnet(blocks: str, layers: list[int], **more: Any) -> Any:
    def make(m: Any, small: bool) -> nn.Module:
        model: nn.Module = m.resnet.ResNet(getattr(m.resnet, blocks), [1] * 4 if small else layers, **more)
        return model

    return make


def _video(m: Any, small: bool) -> nn.Module:
    r = m.video.resnet
    model: nn.Module = r.VideoResNet(r.BasicBlock, [r.Conv3DSimple] * 4, [1 if small else 2] * 4, r.BasicStem)
    return model


def _convnext(m: Any, small: bool) -> nn.Module:
    if not small:
        model: nn.Module = m.convnext_tiny(weights=None)
        return model
    block = m.convnext.CNBlockConfig
    model = m.convnext.ConvNeXt([block(8, 16, 1), block(16, None, 1)])
    return model


_timm("resnet50_gn", _RESNET)
_timm("resnet50_gn", _RESNET, batch=1, note=" batch 1")
_timm("resnetv2_50x1_bit", _RESNET, other="resnet50_gn")
_timm("convnext_tiny", _CONVNEXT)
_timm("convnextv2_tiny", _CONVNEXT)
_timm("efficientnet_b3_gn", {}, size=288, other="test_efficientnet_gn")
_smp("Unet", "resnet34")
_smp("Unet", "resnet34", norm="GroupNorm")
_smp("Unet", "resnet34", norm="InstanceNorm")
_smp("FPN", "resnet34")
_smp("UnetPlusPlus", "resnet34", norm="GroupNorm")
_smp("DeepLabV3Plus", "resnet34")
_torchvision("resnet18", _resnet("BasicBlock", [2] * 4), (32, 3, 224, 224), (2, 3, 64, 64))
_torchvision(
    "resnet50 GroupNorm", _resnet("Bottleneck", [3, 4, 6, 3], norm_layer=_groups), (32, 3, 224, 224), (2, 3, 64, 64)
)
_torchvision("convnext_tiny", _convnext, (32, 3, 224, 224), (2, 3, 64, 64))
_torchvision("r3d_18", _video, (4, 3, 16, 112, 112), (1, 3, 4, 32, 32))
_torchvision(
    "RAFT's encoder",
    lambda m, small: m.optical_flow.raft.FeatureEncoder(
        block=m.optical_flow.raft.ResidualBlock, layers=(8, 8, 12, 16, 24) if small else (64, 64, 96, 128, 256),
        norm_layer=nn.InstanceNorm2d,
    ),
    (2, 3, 436, 1024), (1, 3, 64, 64),
)  # fmt: skip
