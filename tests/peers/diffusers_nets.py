"""diffusers: autoencoders, U-Nets, control networks."""

from __future__ import annotations

import torch

from peers.library import Library, integers

LIBRARY = Library("diffusers", "diffusers")
add = LIBRARY.add
X = (1, 3, 16, 16)
TWO_DOWN, TWO_UP = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2

add(
    "AutoencoderKL",
    lambda d: d.AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=TWO_DOWN, up_block_types=TWO_UP, norm_num_groups=4
    ),
    X,
    sample_posterior=True,
)
add(
    "AutoencoderKL without attention",
    lambda d: d.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=TWO_DOWN,
        up_block_types=TWO_UP,
        norm_num_groups=4,
        mid_block_add_attention=False,
        act_fn="relu",
    ),
    X,
    return_dict=False,
)
add(
    "AsymmetricAutoencoderKL",
    lambda d: d.AsymmetricAutoencoderKL(
        down_block_types=TWO_DOWN,
        down_block_out_channels=(8, 16),
        up_block_types=TWO_UP,
        up_block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_down_block=1,
        layers_per_up_block=1,
    ),
    X,
    mask=(1, 1, 16, 16),
)
# AutoencoderTiny is not here: it quantizes its latents in float32.
add(
    "VQModel",
    lambda d: d.VQModel(
        block_out_channels=(8, 16),
        down_block_types=TWO_DOWN,
        up_block_types=TWO_UP,
        norm_num_groups=4,
        latent_channels=3,
        num_vq_embeddings=8,
    ),
    X,
)
add(
    "AutoencoderKLTemporalDecoder",
    lambda d: d.AutoencoderKLTemporalDecoder(block_out_channels=(32, 32), down_block_types=TWO_DOWN, latent_channels=4),
    X,
    num_frames=1,
)
add(
    "AutoencoderKLCogVideoX",
    lambda d: d.AutoencoderKLCogVideoX(
        block_out_channels=(8,) * 4,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=4,
        temporal_compression_ratio=4,
    ),
    (1, 3, 5, 16, 16),
)
add(
    "AutoencoderKLHunyuanVideo",
    lambda d: d.AutoencoderKLHunyuanVideo(
        block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4, latent_channels=4
    ),
    (1, 3, 5, 16, 16),
)
add(
    "AutoencoderKLWan",
    lambda d: d.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    ),
    (1, 3, 5, 16, 16),
)
add(
    "AutoencoderKLQwenImage",
    lambda d: d.AutoencoderKLQwenImage(
        base_dim=6, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True]
    ),
    (1, 3, 1, 16, 16),
)
add(
    "AutoencoderKLMagvit",
    lambda d: d.AutoencoderKLMagvit(
        block_out_channels=[8, 8],
        down_block_types=["SpatialDownBlock3D", "SpatialTemporalDownBlock3D"],
        up_block_types=["SpatialUpBlock3D", "SpatialTemporalUpBlock3D"],
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
    ),
    (1, 3, 5, 16, 16),
)
add(
    "AutoencoderKLLTXVideo",
    lambda d: d.AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
    ),
    (1, 3, 9, 32, 32),
)
add(
    "AutoencoderKLMochi",
    lambda d: d.AutoencoderKLMochi(
        in_channels=15,
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        latent_channels=4,
        layers_per_block=(1,) * 5,
    ),
    (1, 3, 7, 16, 16),
)
add(
    "AutoencoderKLHunyuanImage",
    lambda d: d.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=16,
        downsample_match_channel=False,
        upsample_match_channel=False,
    ),
    X,
)
add(
    "AutoencoderKLCosmos",
    lambda d: d.AutoencoderKLCosmos(
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        latent_channels=4,
    ),
    (1, 3, 9, 32, 32),
)
add(
    "AutoencoderDC",
    lambda d: d.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        downsample_block_type="pixel_unshuffle",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    ),
    X,
    norm="group",
)
for _shift in ("default", "scale_shift"):
    for _types in (("DownBlock2D", "AttnDownBlock2D"), ("ResnetDownsampleBlock2D",) * 2):
        _ups = tuple(t.replace("Downsample", "Upsample").replace("Down", "Up") for t in reversed(_types))
        add(
            f"UNet2DModel {_shift} {_types[0]}",
            lambda d, s=_shift, t=_types, u=_ups: d.UNet2DModel(
                sample_size=16,
                block_out_channels=(8, 16),
                down_block_types=t,
                up_block_types=u,
                norm_num_groups=4,
                layers_per_block=1,
                attention_head_dim=4,
                resnet_time_scale_shift=s,
            ),
            X,
            3,
        )
_COND = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "cross_attention_dim": 8,
    "attention_head_dim": 4,
    "in_channels": 4,
    "out_channels": 4,
}
_X4, _TEXT = (1, 4, 16, 16), (1, 3, 8)
add(
    "UNet2DConditionModel",
    lambda d: d.UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **_COND,
    ),
    _X4,
    3,
    _TEXT,
)
add(
    "UNet2DConditionModel linear projection",
    lambda d: d.UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        use_linear_projection=True,
        resnet_time_scale_shift="scale_shift",
        **_COND,
    ),
    _X4,
    3,
    _TEXT,
)
add(
    "UNet2DConditionModel simple cross attention",
    lambda d: d.UNet2DConditionModel(
        down_block_types=("SimpleCrossAttnDownBlock2D", "ResnetDownsampleBlock2D"),
        up_block_types=("ResnetUpsampleBlock2D", "SimpleCrossAttnUpBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        **_COND,
    ),
    _X4,
    3,
    _TEXT,
)
add(
    "UNet2DConditionModel with K blocks",
    lambda d: d.UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("KCrossAttnDownBlock2D", "KDownBlock2D"),
        up_block_types=("KUpBlock2D", "KCrossAttnUpBlock2D"),
        mid_block_type=None,
        cross_attention_dim=8,
        attention_head_dim=16,
        norm_num_groups=None,
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
        act_fn="gelu",
    ),
    _X4,
    3,
    _TEXT,
)
add(
    "UNet3DConditionModel",
    lambda d: d.UNet3DConditionModel(
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        **_COND,
    ),
    (1, 4, 2, 16, 16),
    3,
    _TEXT,
)
add(
    "UNetMotionModel",
    lambda d: d.UNetMotionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        norm_num_groups=16,
        layers_per_block=1,
        cross_attention_dim=16,
        num_attention_heads=4,
        motion_num_attention_heads=2,
    ),
    (1, 4, 2, 16, 16),
    3,
    (2, 3, 16),
)
add(
    "UNetSpatioTemporalConditionModel",
    lambda d: d.UNetSpatioTemporalConditionModel(
        sample_size=16,
        in_channels=4,
        block_out_channels=(32, 32),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        layers_per_block=1,
        cross_attention_dim=8,
        num_attention_heads=(2, 2),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        num_frames=2,
    ),
    (1, 2, 4, 16, 16),
    3,
    (1, 1, 8),
    (1, 3),
)
add(
    "Kandinsky3UNet",
    lambda d: d.Kandinsky3UNet(
        in_channels=4,
        time_embedding_dim=4,
        groups=2,
        attention_head_dim=4,
        layers_per_block=3,
        block_out_channels=(32, 64),
        cross_attention_dim=4,
        encoder_hid_dim=32,
    ),
    (1, 4, 8, 8),
    integers(3),
    encoder_hidden_states=(1, 3, 32),
    encoder_attention_mask=lambda: torch.ones(1, 3, dtype=torch.float64),
)
add(
    "StableCascadeUNet",
    lambda d: d.StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        conditioning_dim=8,
        block_out_channels=(8, 16),
        num_attention_heads=(0, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1),
        block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock"),) * 2,
        clip_text_pooled_in_channels=8,
        clip_seq=1,
        timestep_ratio_embedding_dim=8,
        switch_level=[False],
    ),
    (1, 4, 8, 8),
    (1,),
    (1, 1, 8),
)
add(
    "ControlNetModel",
    lambda d: d.ControlNetModel(
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        norm_num_groups=4,
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=4,
        conditioning_embedding_out_channels=(4, 8),
    ),
    _X4,
    3,
    _TEXT,
    (1, 3, 32, 32),
)
add("T2IAdapter", lambda d: d.T2IAdapter(3, [8, 8, 16, 16], 1, 8, "full_adapter"), (1, 3, 64, 64))
add(
    "UNet1DModel",
    lambda d: d.UNet1DModel(
        sample_size=32,
        block_out_channels=(8, 16),
        in_channels=2,
        out_channels=2,
        down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"),
        up_block_types=("UpResnetBlock1D",),
        mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock",
        time_embedding_type="positional",
        extra_in_channels=0,
        use_timestep_embedding=True,
        flip_sin_to_cos=False,
        freq_shift=1.0,
        act_fn="swish",
        norm_num_groups=8,
    ),
    (1, 2, 16),
    3,
)
