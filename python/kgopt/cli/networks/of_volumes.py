"""Networks of volumes: nnU-Net's and pytorch-3dunet's."""

from __future__ import annotations

from typing import Any

from torch import nn

from kgopt.cli.networks.network import Network

__all__ = ["NETWORKS"]

_NNUNET = ("dynamic-network-architectures", "dynamic_network_architectures.architectures.unet")
_UNET3D = ("pytorch3dunet", "pytorch3dunet.unet3d.model")


def _nnunet(dims: int, small: bool, **more: Any) -> dict[str, Any]:
    """nnU-Net's own plans."""
    if small:
        features: tuple[int, ...] = (4, 8, 12)
    else:
        features = (32, 64, 128, 256, 320, 320) if dims == 3 else (32, 64, 128, 256, 512, 512, 512, 512)
    return {
        "input_channels": 1,
        "n_stages": len(features),
        "features_per_stage": features,
        "conv_op": nn.Conv2d if dims == 2 else nn.Conv3d,
        "kernel_sizes": 3,
        "strides": (1, *(2,) * (len(features) - 1)),
        "num_classes": 3,
        "conv_bias": True,
        "norm_op": nn.InstanceNorm2d if dims == 2 else nn.InstanceNorm3d,
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "nonlin": nn.LeakyReLU,
        "nonlin_kwargs": {"inplace": True},
        **more,
    }


def _plain(dims: int) -> Any:
    return lambda m, small: m.PlainConvUNet(
        **_nnunet(dims, small, n_conv_per_stage=2, n_conv_per_stage_decoder=2, deep_supervision=False)
    )


def _residual(dims: int) -> Any:
    def make(m: Any, small: bool) -> nn.Module:
        blocks = (1, 2, 2) if small else (1, 3, 4, 6, 6, 6, 6, 6)[: 6 if dims == 3 else 8]
        options = {"n_blocks_per_stage": blocks, "n_conv_per_stage_decoder": 1, "deep_supervision": False}
        model: nn.Module = m.ResidualEncoderUNet(**_nnunet(dims, small, **options))
        return model

    return make


def _supervised(model: Any) -> None:
    model.decoder.deep_supervision = True


def _unet3d(name: str, **more: Any) -> Any:
    """pytorch-3dunet's defaults: 64 maps, 8 groups; half of the maps here, as its examples have."""

    def make(m: Any, small: bool) -> nn.Module:
        maps: dict[str, Any] = {"f_maps": [8, 16, 32]} if small else {"f_maps": 32}
        model: nn.Module = getattr(m, name)(1, 1, num_groups=8, **maps, **more)
        return model

    return make


NETWORKS = [
    *(
        Network(
            f"nnU-Net {name} {dims}D", *_NNUNET, make(dims),
            ((2, 1, 128, 128, 128),) if dims == 3 else ((12, 1, 512, 512),),
            ((1, 1, 16, 16, 16),) if dims == 3 else ((1, 1, 32, 32),),
            trains="autocast_fp16", before_training=_supervised,
        )
        for dims in (3, 2)
        for name, make in (("PlainConvUNet", _plain), ("ResidualEncoderUNet", _residual))
    ),
    Network(
        "UNet3D", *_UNET3D, _unet3d("UNet3D"), ((1, 1, 80, 160, 160),), ((1, 1, 16, 16, 16),), trains="autocast",
    ),
    Network(
        "UNet3D cgr", *_UNET3D, _unet3d("UNet3D", layer_order="cgr"), ((1, 1, 80, 160, 160),), ((1, 1, 16, 16, 16),),
        trains="autocast",
    ),
    Network(
        "ResidualUNet3D", *_UNET3D, _unet3d("ResidualUNet3D"), ((1, 1, 80, 160, 160),), ((1, 1, 16, 16, 16),),
        trains="autocast",
    ),
    Network(
        "ResidualUNetSE3D", *_UNET3D, _unet3d("ResidualUNetSE3D"), ((1, 1, 80, 160, 160),), ((1, 1, 16, 16, 16),),
        trains="autocast",
    ),
]  # fmt: skip
