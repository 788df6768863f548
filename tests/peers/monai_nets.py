"""MONAI."""

from __future__ import annotations

from typing import Any

from peers.library import Library, integers

LIBRARY = Library("monai", "monai.networks.nets")
add = LIBRARY.add

GROUP2 = ("GROUP", {"num_groups": 2})
GROUP4 = ("GROUP", {"num_groups": 4})
LEAKY = ("LeakyReLU", {"inplace": True})
INSTANCE = ("INSTANCE", {"affine": True})
X3, X3_2, X3_32, X2 = (1, 1, 16, 16, 16), (2, 1, 16, 16, 16), (1, 1, 32, 32, 32), (2, 1, 32, 32)

for _units in (0, 2):
    for _kind, _norm, _act in (
        ("group", GROUP2, "PRELU"),
        ("instance", INSTANCE, LEAKY),
        ("plain", "INSTANCE", "SWISH"),
    ):
        add(
            f"UNet 3D {_units} {_kind}",
            lambda n, u=_units, o=_norm, a=_act: n.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=u, norm=o, act=a),
            X3,
        )
add("UNet 2D batch", lambda n: n.UNet(2, 1, 2, (4, 8, 16), (2, 2), num_res_units=1, norm="batch"), X2, norm="group")
add("UNet 2D ADN", lambda n: n.UNet(2, 1, 2, (4, 8, 16), (2, 2), norm=GROUP4, dropout=0.2, adn_ordering="DAN"), X2)
add("BasicUNet 3D", lambda n: n.BasicUNet(3, 1, 2, (4, 4, 8, 8, 8, 4), norm=GROUP4), X3_32)
add("BasicUNet 2D", lambda n: n.BasicUNet(2, 1, 2, (4, 4, 8, 8, 8, 4), upsample="nontrainable"), X2)
add("BasicUNet pixelshuffle", lambda n: n.BasicUNet(2, 1, 2, (4, 4, 8, 8, 8, 4), upsample="pixelshuffle"), X2)
add("BasicUNet++ 2D", lambda n: n.BasicUNetPlusPlus(2, 1, 2, (4, 4, 8, 8, 8, 4), deep_supervision=True), X2)
add("AttentionUnet", lambda n: n.AttentionUnet(3, 1, 2, (4, 8, 16), (2, 2)), X3_2, norm="instance")
add("AttentionUnet 2D", lambda n: n.AttentionUnet(2, 1, 2, (4, 8, 16), (2, 2), dropout=0.1), X2, norm="mixed")
for _res in (False, True):
    for _norm in ("INSTANCE", ("GROUP", {"num_groups": 2, "affine": True})):
        add(
            f"DynUNet {_res} {_norm if isinstance(_norm, str) else 'GROUP'}",
            lambda n, r=_res, o=_norm: n.DynUNet(
                3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 8], norm_name=o, res_block=r
            ),
            X3,
        )
add(
    "DynUNet 2D supervised",
    lambda n: n.DynUNet(
        2, 1, 2, [3, 3, 3, 3], [1, 2, 2, 2], [2, 2, 2], filters=[4, 8, 8, 8], deep_supervision=True, trans_bias=True
    ),
    X2,
)
add(
    "DynUNet anisotropic",
    lambda n: n.DynUNet(
        3, 1, 2, [[1, 3, 3], [3, 3, 3], 3], [1, [1, 2, 2], 2], [[1, 2, 2], 2], filters=[4, 8, 8], act_name="relu"
    ),
    X3,
)
for _mode in ("nontrainable", "deconv", "pixelshuffle"):
    add(
        f"SegResNet {_mode}",
        lambda n, m=_mode: n.SegResNet(
            3, 4, 1, 2, norm=("GROUP", {"num_groups": 2}), blocks_down=(1, 2, 2), blocks_up=(1, 1), upsample_mode=m
        ),
        X3,
    )
add("SegResNet 2D", lambda n: n.SegResNet(2, 8, 1, 2, dropout_prob=0.2, blocks_down=(1, 2), blocks_up=(1,)), X2)
add(
    "SegResNetVAE",
    lambda n: n.SegResNetVAE(
        (16, 16, 16), 8, vae_nz=16, init_filters=8, in_channels=1, blocks_down=(1, 1, 1), blocks_up=(1, 1)
    ),
    X3,
)
add("SegResNetDS instance", lambda n: n.SegResNetDS(2, 8, 1, 2, norm="INSTANCE", blocks_down=(1, 1, 2)), X2)
add("HighResNet", lambda n: n.HighResNet(3, 1, 2, norm_type=("GROUP", {"num_groups": 1})), (1, 1, 8, 8, 8))
add("HighResNet 2D", lambda n: n.HighResNet(2, 1, 2, norm_type="INSTANCE"), (2, 1, 16, 16))
add("DenseNet 3D", lambda n: n.DenseNet(3, 1, 2, 8, 4, (2, 2), 2, norm=("GROUP", {"num_groups": 2})), X3)
add("DenseNet 2D", lambda n: n.DenseNet(2, 1, 2, 8, 4, (2, 2), 2, dropout_prob=0.1), X2, norm="instance")
add(
    "ResNet basic 3D",
    lambda n: n.ResNet("basic", [1, 1, 1, 1], [4, 8, 8, 16], spatial_dims=3, n_input_channels=1, norm=GROUP4),
    X3_32,
)
add(
    "ResNet bottleneck 2D",
    lambda n: n.ResNet(
        "bottleneck",
        [1, 1, 1, 1],
        [4, 8, 8, 16],
        spatial_dims=2,
        n_input_channels=1,
        shortcut_type="B",
        bias_downsample=False,
    ),
    (2, 1, 64, 64),
    norm="mixed",
)
add(
    "EfficientNetBN",
    lambda n: n.EfficientNetBN(
        "efficientnet-b0", pretrained=False, spatial_dims=2, in_channels=1, norm=("GROUP", {"num_groups": 1})
    ),
    (2, 1, 64, 64),
)
add("AutoEncoder", lambda n: n.AutoEncoder(3, 1, 1, (4, 8), (2, 2), num_res_units=1), X3)
add("AutoEncoder inter", lambda n: n.AutoEncoder(2, 1, 1, (4, 8), (2, 2), inter_channels=(8, 8), norm=GROUP4), X2)
add("VarAutoEncoder", lambda n: n.VarAutoEncoder(2, (1, 32, 32), 1, 4, (4, 8), (2, 2)), X2)
add(
    "AutoencoderKL 3D",
    lambda n: n.AutoencoderKL(
        3, 1, 1, (1, 1), (4, 8), (False, True), latent_channels=2, norm_num_groups=4, with_encoder_nonlocal_attn=False
    ),
    (1, 1, 8, 8, 8),
)
add(
    "AutoencoderKL 2D attention",
    lambda n: n.AutoencoderKL(
        2, 1, 1, (1, 1), (4, 8), (False, True), latent_channels=2, norm_num_groups=4, use_convtranspose=True
    ),
    (1, 1, 16, 16),
)
add(
    "AutoencoderKL checkpointed",
    lambda n: n.AutoencoderKL(
        2, 1, 1, (1, 1), (4, 8), (False, False), latent_channels=2, norm_num_groups=4, use_checkpoint=True
    ),
    (1, 1, 16, 16),
)
for _dims, _size in ((2, (1, 1, 16, 16)), (3, (1, 1, 8, 8, 8))):
    add(
        f"DiffusionModelUNet {_dims}D",
        lambda n, d=_dims: n.DiffusionModelUNet(
            d, 1, 1, (1, 1), (8, 8), (False, True), norm_num_groups=4, num_head_channels=8
        ),
        _size,
        timesteps=integers(7),
    )
add(
    "DiffusionModelUNet updown",
    lambda n: n.DiffusionModelUNet(
        2,
        1,
        1,
        1,
        (8, 16),
        (False, False),
        norm_num_groups=4,
        resblock_updown=True,
        num_head_channels=8,
        num_class_embeds=3,
    ),
    (1, 1, 16, 16),
    timesteps=integers(7),
    class_labels=integers(2),
)
add(
    "DiffusionModelUNet conditioned",
    lambda n: n.DiffusionModelUNet(
        2,
        1,
        1,
        (1, 1),
        (8, 8),
        (False, True),
        norm_num_groups=4,
        num_head_channels=8,
        with_conditioning=True,
        cross_attention_dim=3,
    ),
    (1, 1, 16, 16),
    timesteps=integers(7),
    context=(1, 2, 3),
)
add(
    "ControlNet",
    lambda n: n.ControlNet(
        2,
        1,
        (1, 1),
        (8, 8),
        (False, True),
        norm_num_groups=4,
        num_head_channels=8,
        conditioning_embedding_in_channels=1,
        conditioning_embedding_num_channels=(8,),
    ),
    (1, 1, 16, 16),
    timesteps=integers(7),
    controlnet_cond=(1, 1, 16, 16),
)
add(
    "SPADEAutoencoderKL",
    lambda n: n.SPADEAutoencoderKL(
        2, 2, 1, 1, (1, 1), (4, 8), (False, False), latent_channels=2, norm_num_groups=4, spade_intermediate_channels=4
    ),
    (1, 1, 16, 16),
    seg=(1, 2, 16, 16),
)
add(
    "SPADEDiffusionModelUNet",
    lambda n: n.SPADEDiffusionModelUNet(
        2, 1, 1, 2, (1, 1), (8, 8), (False, True), norm_num_groups=4, num_head_channels=8, spade_intermediate_channels=4
    ),
    (1, 1, 16, 16),
    timesteps=integers(7),
    seg=(1, 2, 16, 16),
)
add(
    "SPADENet",
    lambda n: n.SPADENet(2, 1, 1, 2, [16, 16], channels=[4, 8], z_dim=4, is_vae=True),
    (1, 2, 16, 16),
    (1, 1, 16, 16),
)
add("UNETR", lambda n: n.UNETR(1, 2, (16, 16, 16), 4, 12, 24, 2, norm_name="instance"), X3)
add(
    "UNETR 2D",
    lambda n: n.UNETR(
        1,
        2,
        32,
        4,
        12,
        24,
        2,
        norm_name=("GROUP", {"num_groups": 2}),
        spatial_dims=2,
        conv_block=False,
        res_block=False,
    ),
    X2,
)
add(
    "SwinUNETR 2D",
    lambda n: n.SwinUNETR(1, 2, feature_size=12, spatial_dims=2, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1)),
    (1, 1, 64, 64),
)
add("RegUNet", lambda n: n.RegUNet(3, 1, 4, 2, out_channels=3), X3, norm="instance")
add("LocalNet", lambda n: n.LocalNet(3, 1, 4, (0, 1, 2)), X3, norm="mixed")
add("VoxelMorphUNet", lambda n: n.VoxelMorphUNet(3, 2, 4, (4, 4, 4, 4), (4, 4)), (1, 2, 16, 16, 16))
add("PatchDiscriminator", lambda n: n.PatchDiscriminator(2, 8, 1, num_layers_d=2, norm="INSTANCE"), X2)
add("PatchDiscriminator 3D", lambda n: n.PatchDiscriminator(3, 8, 1, num_layers_d=2, norm=GROUP4), X3)
add("Generator", lambda n: n.Generator(8, (8, 4, 4), (8, 4), (2, 2), num_res_units=1), (2, 8))
add("Discriminator", lambda n: n.Discriminator((1, 16, 16), (4, 8), (2, 2)), (2, 1, 16, 16))
add("Critic", lambda n: n.Critic((1, 16, 16), (4, 8), (2, 2)), (2, 1, 16, 16))
add("Classifier", lambda n: n.Classifier((1, 16, 16, 16), 3, (4, 8), (2, 2), num_res_units=1), X3_2)
add("Regressor", lambda n: n.Regressor((1, 16, 16), 3, (4, 8), (2, 2), act="gelu"), (2, 1, 16, 16))
add(
    "FlexibleUNet",
    lambda n: n.FlexibleUNet(1, 2, "resnet10", decoder_channels=(8, 8, 8, 8, 8), spatial_dims=2),
    (2, 1, 64, 64),
    norm="instance",
)
add(
    "ViTAutoEnc",
    lambda n: n.ViTAutoEnc(1, (16, 16), (4, 4), hidden_size=12, mlp_dim=24, num_layers=2, num_heads=2, spatial_dims=2),
    (1, 1, 16, 16),
)
add("Quicknat", lambda n: n.Quicknat(num_classes=2, num_channels=1, num_filters=8), X2, norm="instance")
add("SegResNetDS", lambda n: n.SegResNetDS(3, 8, 1, 2, norm=GROUP4, blocks_down=(1, 1, 1), dsdepth=2), X3)
add("SegResNetDS2", lambda n: n.SegResNetDS2(2, 8, 1, 2, norm=GROUP4, blocks_down=(1, 1, 1)), X2)
add("VNet 2D", lambda n: n.VNet(2, 1, 2, act="elu", dropout_prob_down=0.1), (1, 1, 32, 32), norm="group")
add(
    "BasicUNet++ 3D",
    lambda n: n.BasicUNetPlusPlus(3, 1, 2, (4,) * 6, norm=GROUP4, upsample="nontrainable"),
    (1, 1, 16, 16, 32),
)


def _mednext(n: Any, dims: int, **keywords: Any) -> Any:
    one = (1, 1, 1, 1)
    rest = {"encoder_expansion_ratio": 2, "decoder_expansion_ratio": 2, "bottleneck_expansion_ratio": 2}
    return n.MedNeXt(dims, 4, 1, 2, blocks_down=one, blocks_up=one, blocks_bottleneck=1, **rest, **keywords)


add("MedNeXt 2D", lambda n: _mednext(n, 2), X2)
add("MedNeXt 2D GRN", lambda n: _mednext(n, 2, global_resp_norm=True, deep_supervision=True), X2)
add(
    "Restormer",
    lambda n: n.restormer.Restormer(2, 1, 1, 8, (1, 1), (1, 1), 2, 1),
    (1, 1, 16, 16),
)
add(
    "MultiScalePatchDiscriminator",
    lambda n: n.MultiScalePatchDiscriminator(2, 2, 2, 8, 1, norm="INSTANCE"),
    (1, 1, 64, 64),
)
