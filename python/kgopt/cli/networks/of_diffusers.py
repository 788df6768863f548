"""diffusers: autoencoders as decoders, and U-Nets. Defaults of the constructors where they are those of the weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from kgopt.cli.networks.network import Arguments, Decode, Network, Steps

__all__ = ["NETWORKS"]

NETWORKS: list[Network] = []


def _add(
    name: str, make: Any, full: Arguments, small: Arguments, trains: str = "", large: bool = False, **more: Any
) -> None:
    NETWORKS.append(Network(name, "diffusers", "diffusers", make, full, small, trains, large=large, **more))


def _decoder(name: str, full: dict[str, Any], small: dict[str, Any]) -> Any:
    return lambda d, is_small: Decode(getattr(d, name)(**(small if is_small else full)))


# ---------------------------------------------------------------------------------------------------------- decoders

_FOUR = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
_TWO = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_SD = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, **_FOUR}
_SD_SMALL = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, **_TWO}

_add("SD VAE 64x64", _decoder("AutoencoderKL", _SD, _SD_SMALL), ((1, 4, 64, 64),), ((1, 4, 8, 8),))
_add("SD VAE 32x32", _decoder("AutoencoderKL", _SD, _SD_SMALL), ((1, 4, 32, 32),), ((1, 4, 8, 8),))
_add("SDXL VAE 128x128", _decoder("AutoencoderKL", _SD, _SD_SMALL), ((1, 4, 128, 128),), ((1, 4, 8, 8),),
     precisions=("bf16", "tf32"))  # fmt: skip
_add(
    "Flux VAE 128x128",
    _decoder(
        "AutoencoderKL",
        {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False, **_SD},
        {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False, **_SD_SMALL},
    ),
    ((1, 16, 128, 128),), ((1, 16, 8, 8),),
)  # fmt: skip
_add(
    "Flux2 VAE 128x128", _decoder("AutoencoderKLFlux2", {}, _SD_SMALL), ((1, 32, 128, 128),), ((1, 32, 8, 8),),
)  # fmt: skip
_WAN_SMALL = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
_add("Wan VAE", _decoder("AutoencoderKLWan", {}, _WAN_SMALL), ((1, 16, 3, 60, 104),), ((1, 4, 2, 4, 4),))
_WAN22 = {"z_dim": 48, "base_dim": 160, "decoder_base_dim": 256, "is_residual": True, "in_channels": 12,
          "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}  # fmt: skip
_add(
    "Wan 2.2 VAE",
    _decoder("AutoencoderKLWan", _WAN22, {**_WAN22, **_WAN_SMALL, "decoder_base_dim": 8}),
    ((1, 48, 3, 30, 52),), ((1, 4, 2, 4, 4),), large=True,
)  # fmt: skip
_add("QwenImage VAE", _decoder("AutoencoderKLQwenImage", {}, _WAN_SMALL), ((1, 16, 1, 128, 128),), ((1, 4, 1, 4, 4),))
_add(
    "LTX VAE",
    _decoder(
        "AutoencoderKLLTXVideo", {},
        {"latent_channels": 4, "block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4,
         "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5},
    ),
    ((1, 128, 7, 16, 24),), ((1, 4, 2, 2, 2),),
)  # fmt: skip
_add(
    "HunyuanVideo VAE",
    _decoder(
        "AutoencoderKLHunyuanVideo", {},
        {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4},
    ),
    ((1, 16, 5, 32, 32),), ((1, 4, 2, 4, 4),),
)  # fmt: skip
_add(
    "HunyuanVideo15 VAE",
    _decoder(
        "AutoencoderKLHunyuanVideo15", {},
        {"block_out_channels": (32, 32, 32, 32, 32), "layers_per_block": 1, "latent_channels": 32},
    ),
    ((1, 32, 3, 16, 16),), ((1, 32, 2, 2, 2),), large=True,
)  # fmt: skip
_add(
    "HunyuanImage VAE",
    _decoder(
        "AutoencoderKLHunyuanImage",
        {"in_channels": 3, "out_channels": 3, "latent_channels": 64, "layers_per_block": 2, "sample_size": 384,
         "block_out_channels": (128, 256, 512, 512, 1024, 1024), "spatial_compression_ratio": 32},
        {"in_channels": 3, "out_channels": 3, "latent_channels": 16, "layers_per_block": 1, "sample_size": 16,
         "block_out_channels": (32, 32), "spatial_compression_ratio": 2},
    ),
    ((1, 64, 32, 32),), ((1, 16, 4, 4),), large=True,
)  # fmt: skip
_add(
    "KVAE Video VAE",
    _decoder("AutoencoderKLKVAEVideo", {}, {"ch": 32, "ch_mult": (1, 1), "num_res_blocks": 1, "z_channels": 4}),
    ((1, 16, 3, 32, 48),), ((1, 4, 2, 4, 4),), large=True,
)  # fmt: skip
_COG = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
_add(
    "CogVideoX VAE",
    _decoder(
        "AutoencoderKLCogVideoX", _COG,
        {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 2, "latent_channels": 4, **_COG},
    ),
    ((1, 16, 3, 30, 45),), ((1, 4, 2, 4, 4),),
)  # fmt: skip
_add(
    "Mochi VAE",
    _decoder(
        "AutoencoderKLMochi", {},
        {"encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4,
         "layers_per_block": (1,) * 5},
    ),
    ((1, 12, 3, 30, 53),), ((1, 12, 2, 4, 4),), large=True,
)  # fmt: skip
_add(
    "Cosmos VAE",
    _decoder(
        "AutoencoderKLCosmos", {},
        {"encoder_block_out_channels": (8,) * 4, "decode_block_out_channels": (8,) * 4, "attention_resolutions": (8,),
         "resolution": 64, "num_layers": 1, "latent_channels": 4},
    ),
    ((1, 16, 3, 40, 64),), ((1, 4, 2, 4, 4),),
)  # fmt: skip
_add(
    "SVD VAE",
    lambda d, small: Decode(
        d.AutoencoderKLTemporalDecoder(
            block_out_channels=(32, 32) if small else (128, 256, 512, 512), layers_per_block=1 if small else 2,
            down_block_types=("DownEncoderBlock2D",) * (2 if small else 4),
        ),
        num_frames=2 if small else 4,
    ),
    ((4, 4, 40, 64),), ((2, 4, 8, 8),),
)  # fmt: skip
_SPATIAL = {"down_block_types": ["SpatialDownBlock3D", "SpatialTemporalDownBlock3D"],
            "up_block_types": ["SpatialUpBlock3D", "SpatialTemporalUpBlock3D"]}  # fmt: skip
_add(
    "EasyAnimate VAE",
    _decoder(
        "AutoencoderKLMagvit", {},
        {"block_out_channels": [8, 8], "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4, **_SPATIAL},
    ),
    ((1, 16, 3, 32, 48),), ((1, 4, 2, 4, 4),),
)  # fmt: skip
_add(
    "DC-AE f32",
    _decoder(
        "AutoencoderDC",
        {"encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
         "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3},
        {"latent_channels": 4, "attention_head_dim": 2, "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
         "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (8, 8),
         "decoder_block_out_channels": (8, 8), "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1),
         "encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,))},
    ),
    ((1, 32, 32, 32),), ((1, 4, 8, 8),),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ U-Nets


def _unet2d(d: Any, small: bool) -> nn.Module:
    if small:
        model: nn.Module = d.UNet2DModel(
            sample_size=16, block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=4, layers_per_block=1, attention_head_dim=4,
        )  # fmt: skip
        return model
    model = d.UNet2DModel(
        sample_size=64, in_channels=3, out_channels=3, layers_per_block=2,
        block_out_channels=(128, 128, 256, 256, 512, 512),
        down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
    )  # fmt: skip
    return model


_COND_SMALL = {
    "sample_size": 16, "block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1,
    "cross_attention_dim": 8, "attention_head_dim": 4, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
_COND_INPUT = {"sample": (1, 4, 16, 16), "timestep": Steps((3,)), "encoder_hidden_states": (1, 3, 8),
               "return_dict": False}  # fmt: skip


def _sd15(d: Any, small: bool) -> nn.Module:
    """UNet2DConditionModel's defaults are those of Stable Diffusion 1.5, but for the width of the text's embedding."""
    options: dict[str, Any] = _COND_SMALL if small else {"sample_size": 64, "cross_attention_dim": 768}
    model: nn.Module = d.UNet2DConditionModel(**options)
    return model


class _Sdxl(nn.Module):
    """SDXL's U-Net, the text's pooled embedding and the image's sizes as plain arguments."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, sample: Any, timestep: Any, text: Any, pooled: Any, sizes: Any) -> Any:
        added = {"text_embeds": pooled, "time_ids": sizes}
        return self.unet(sample, timestep, text, added_cond_kwargs=added, return_dict=False)[0]


def _sdxl(d: Any, small: bool) -> nn.Module:
    options: dict[str, Any] = {
        "sample_size": 128, "block_out_channels": (320, 640, 1280), "layers_per_block": 2, "cross_attention_dim": 2048,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (5, 10, 20), "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True,
        "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    }  # fmt: skip
    if small:
        options = {**_COND_SMALL, "use_linear_projection": True, "addition_embed_type": "text_time",
                   "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 32}  # fmt: skip
    return _Sdxl(d.UNet2DConditionModel(**options))


_add("UNet2DModel 64x64", _unet2d,
     {"sample": (16, 3, 64, 64), "timestep": Steps((500,) * 16), "return_dict": False},
     {"sample": (1, 3, 16, 16), "timestep": Steps((3,)), "return_dict": False}, trains="autocast")  # fmt: skip
_add("UNet2DModel batch 1", _unet2d,
     {"sample": (1, 3, 64, 64), "timestep": Steps((500,)), "return_dict": False},
     {"sample": (1, 3, 16, 16), "timestep": Steps((3,)), "return_dict": False})  # fmt: skip
_add("SD 1.5 UNet 64x64", _sd15,
     {"sample": (2, 4, 64, 64), "timestep": Steps((500, 500)), "encoder_hidden_states": (2, 77, 768),
      "return_dict": False}, _COND_INPUT, trains="autocast", large=True)  # fmt: skip
_add("SDXL UNet 128x128", _sdxl,
     ((2, 4, 128, 128), Steps((500, 500)), (2, 77, 2048), (2, 1280), (2, 6)),
     ((1, 4, 16, 16), Steps((3,)), (1, 3, 8), (1, 8), (1, 6)), large=True)  # fmt: skip
