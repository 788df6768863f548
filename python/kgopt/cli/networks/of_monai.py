"""MONAI's networks, at the sizes of its tutorials."""

from __future__ import annotations

from typing import Any

from torch import nn

from kgopt.cli.networks.network import Arguments, Network, Steps

__all__ = ["NETWORKS"]

NETWORKS: list[Network] = []


def _add(name: str, make: Any, full: Arguments, small: Arguments, trains: str = "autocast") -> None:
    NETWORKS.append(Network(f"MONAI {name}", "monai", "monai.networks.nets", make, full, small, trains))


def _volume(edge: int, channels: int = 1, batch: int = 1) -> Arguments:
    return ((batch, channels, edge, edge, edge),)


def _dynunet(residual: bool) -> Any:
    def make(n: Any, small: bool) -> nn.Module:
        filters = (4, 8, 8) if small else (32, 64, 128, 256, 320, 320)
        count = len(filters)
        model: nn.Module = n.DynUNet(
            3, 1, 3, [3] * count, [1] + [2] * (count - 1), [2] * (count - 1), filters=filters, res_block=residual
        )
        return model

    return make


def _channels(small: bool) -> tuple[int, ...]:
    return (4, 8, 16) if small else (16, 32, 64, 128, 256)


def _unet(n: Any, small: bool, **more: Any) -> nn.Module:
    channels = _channels(small)
    model: nn.Module = n.UNet(3, 1, 2, channels, (2,) * (len(channels) - 1), num_res_units=2, **more)
    return model


def _attention_unet(n: Any, small: bool) -> nn.Module:
    channels = _channels(small)
    model: nn.Module = n.AttentionUnet(3, 1, 2, channels, (2,) * (len(channels) - 1))
    return model


def _diffusion(dims: int) -> Any:
    def make(n: Any, small: bool) -> nn.Module:
        if small:
            options: dict[str, Any] = {"channels": (8, 8), "attention_levels": (False, True), "num_res_blocks": 1,
                                       "norm_num_groups": 4, "num_head_channels": 8}  # fmt: skip
        elif dims == 2:
            options = {"channels": (128, 256, 256), "attention_levels": (False, True, True), "num_res_blocks": 1,
                       "num_head_channels": 256}  # fmt: skip
        else:
            options = {"channels": (256, 256, 512), "attention_levels": (False, False, True), "num_res_blocks": 2,
                       "num_head_channels": (0, 0, 512)}  # fmt: skip
        model: nn.Module = n.DiffusionModelUNet(dims, 1, 1, **options)
        return model

    return make


def _autoencoder(n: Any, small: bool) -> nn.Module:
    if small:
        options: dict[str, Any] = {"channels": (4, 8), "attention_levels": (False, False), "num_res_blocks": 1,
                                   "norm_num_groups": 4, "latent_channels": 2}  # fmt: skip
    else:
        options = {"channels": (32, 64, 64), "attention_levels": (False, False, False), "num_res_blocks": 1,
                   "norm_num_groups": 16, "latent_channels": 3}  # fmt: skip
    model: nn.Module = n.AutoencoderKL(
        3, 1, 1, with_encoder_nonlocal_attn=False, with_decoder_nonlocal_attn=False, **options
    )
    return _Reconstruct(model)


class _Reconstruct(nn.Module):
    """Encoder's mean and decoder, without the random sample between them."""

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, x: Any) -> Any:
        return self.autoencoder.reconstruct(x)  # type: ignore[operator]


def _segresnet(n: Any, small: bool) -> nn.Module:
    model: nn.Module = n.SegResNet(
        spatial_dims=3, init_filters=8 if small else 32, in_channels=4, out_channels=3,
        blocks_down=(1, 1) if small else (1, 2, 2, 4), blocks_up=(1,) if small else (1, 1, 1),
    )  # fmt: skip
    return model


def _mednext(n: Any, small: bool) -> nn.Module:
    """MedNeXt-S."""
    if not small:
        model: nn.Module = n.MedNeXtSmall(spatial_dims=3, in_channels=1, out_channels=2)
        return model
    one = (1, 1, 1, 1)
    ratios = {"encoder_expansion_ratio": 2, "decoder_expansion_ratio": 2, "bottleneck_expansion_ratio": 2}
    model = n.MedNeXt(3, 4, 1, 2, blocks_down=one, blocks_up=one, blocks_bottleneck=1, **ratios)
    return model


_add("SegResNet", _segresnet, _volume(128, 4), _volume(16, 4))
_add(
    "SegResNetDS",
    lambda n, small: n.SegResNetDS(
        3, 8 if small else 32, 1, 2, blocks_down=(1, 1, 1) if small else (1, 2, 2, 4, 4), norm="INSTANCE"
    ),
    _volume(128), _volume(16),
)  # fmt: skip
_add("DynUNet", _dynunet(False), _volume(128, batch=2), _volume(16))
_add("DynUNet residual", _dynunet(True), _volume(128, batch=2), _volume(16))
_add("AttentionUnet", _attention_unet, _volume(96, batch=2), _volume(16))
_add("UNet PReLU", _unet, _volume(96, batch=4), _volume(16))
_add("UNet batchnorm", lambda n, small: _unet(n, small, norm="batch"), _volume(96, batch=4), _volume(16))
_add("BasicUNet", lambda n, small: n.BasicUNet(3, 1, 2, (4, 4, 8, 8, 8, 4) if small else (32, 32, 64, 128, 256, 32)),
     _volume(96, batch=2), _volume(32))  # fmt: skip
_add("BasicUNet small input", lambda n, small: n.BasicUNet(3, 1, 2, (4,) * 6 if small else (32, 32, 64, 128, 256, 32)),
     _volume(32), _volume(32), trains="")  # fmt: skip
_add("VNet", lambda n, small: n.VNet(2 if small else 3, 1, 2),
     _volume(128), ((1, 1, 32, 32),))  # fmt: skip
_add(
    "SwinUNETR",
    lambda n, small: n.SwinUNETR(1, 2, feature_size=12, spatial_dims=2, depths=(1,) * 4, num_heads=(1,) * 4)
    if small
    else n.SwinUNETR(1, 14, feature_size=48),
    _volume(96), ((1, 1, 64, 64),),
)  # fmt: skip
_add(
    "UNETR",
    lambda n, small: n.UNETR(1, 14, (16,) * 3, 4, 12, 24, 2, norm_name="instance")
    if small
    else n.UNETR(1, 14, (96, 96, 96), 16, 768, 3072, 12, norm_name="instance"),
    _volume(96), _volume(16),
)  # fmt: skip
_add("HighResNet", lambda n, small: n.HighResNet(3, 1, 2, norm_type="INSTANCE"), _volume(64), _volume(8), trains="")
_add("MedNeXt-S", _mednext, _volume(128), _volume(32))
_add("AutoencoderKL 3D", _autoencoder, _volume(64), _volume(8))
_add("DiffusionModelUNet 2D", _diffusion(2), {"x": (4, 1, 64, 64), "timesteps": Steps((500,) * 4)},
     {"x": (1, 1, 16, 16), "timesteps": Steps((7,))})  # fmt: skip
_add("DiffusionModelUNet 3D", _diffusion(3), {"x": (1, 1, 32, 40, 32), "timesteps": Steps((500,))},
     {"x": (1, 1, 8, 8, 8), "timesteps": Steps((7,))})  # fmt: skip
