"""timm. Its networks have batch norms, or norms over channels; the first become GroupNorm or InstanceNorm."""

from __future__ import annotations

from typing import Any

from torch import nn

from peers.library import Library

LIBRARY = Library("timm", "timm")
add = LIBRARY.add
X, X32 = (2, 3, 64, 64), (2, 3, 32, 32)


def make(timm: Any, name: str, **keywords: Any) -> nn.Module:
    return timm.create_model(name, pretrained=False, num_classes=5, **keywords)


LIBRARY.add_each(
    (
        "test_byobnet",
        "test_convnext",
        "test_convnext2",
        "test_convnext3",
        "test_efficientnet",
        "test_efficientnet_gn",
        "test_efficientnet_ln",
        "test_mambaout",
        "test_nfnet",
        "test_resnet",
    ),
    lambda timm, name: make(timm, name),
    (1, 3, 64, 64),
    norm="group",
)
LIBRARY.add_each(
    (
        "lcnet_035",
        "mobilenetv2_035",
        "mobilenetv3_small_050",
        "tinynet_e",
        "mnasnet_small",
        "ghostnet_050",
        "regnetx_002",
        "regnety_002",
        "mobilenetv4_conv_small_035",
        "hgnetv2_b0",
        "ese_vovnet19b_slim_dw",
        "starnet_s050",
        "dla46x_c",
    ),
    lambda timm, name: make(timm, name),
    X,
    norm="group",
)
# EfficientViT is not here: its attention computes in float32, whatever its input is.
LIBRARY.add_each(
    (
        "mobilevitv2_050",
        "mobilevit_xxs",
        "edgenext_xx_small",
        "convnext_atto",
        "convnextv2_atto",
    ),
    lambda timm, name: make(timm, name),
    X,
    norm="mixed",
)
_small = {"layers": (1, 1, 1, 1), "channels": (8, 12, 16, 24), "stem_width": 8}
for _name in (
    "resnet18",
    "resnet18d",
    "resnet26t",
    "seresnet18",
    "resnetblur18",
    "ecaresnet26t",
    "resnetaa34d",
):
    add(_name, lambda timm, name=_name: make(timm, name, **_small), X, norm="instance")
add("densenet121", lambda timm: make(timm, "densenet121", growth_rate=4, block_config=(2, 2, 2, 2)), X, norm="group")
add(
    "densenetblur121d", lambda timm: make(timm, "densenetblur121d", growth_rate=4, block_config=(2, 2)), X, norm="mixed"
)
add("resnet18 as features", lambda timm: timm.create_model("resnet18", features_only=True, **_small), X, norm="group")
add("res2net50_14w_8s", lambda timm: make(timm, "res2net50_14w_8s", layers=(1, 1, 1, 1)), X, norm="group")
add("skresnet18", lambda timm: make(timm, "skresnet18", **_small), X, norm="group")
add(
    "poolformer",
    lambda timm: timm.models.metaformer.MetaFormer(
        depths=(1, 1, 1, 1),
        dims=(8, 16, 16, 24),
        num_classes=5,
        downsample_norm=None,
        norm_layers=timm.layers.GroupNorm1,
        res_scale_init_values=None,
        use_mlp_head=False,
    ),
    X,
)
add("repvit", lambda timm: make(timm, "repvit_m0_9", depth=(1, 1, 1, 1), embed_dim=(8, 16, 24, 32)), X, norm="mixed")
add("convmixer", lambda timm: timm.models.convmixer.ConvMixer(16, 2, 5, 4, num_classes=5), X32, norm="group")
add("resnet GroupNorm", lambda timm: make(timm, "resnet26t", norm_layer=timm.layers.GroupNorm1, **_small), X)
# Networks with a GroupNorm of their own. `--write` of scripts/site_coverage.py counts them.
_groups = {"layers": (1, 1, 1, 1), "channels": (128, 128, 256, 256)}
add("resnet50_gn", lambda timm: make(timm, "resnet50_gn", **_groups), X)
add("resnetv2_50d_gn", lambda timm: make(timm, "resnetv2_50d_gn", stem_chs=64, **_groups), X)
for _preact in (True, False):
    add(
        f"ResNetV2 preact {_preact}",
        lambda timm, p=_preact: timm.models.resnetv2.ResNetV2(num_classes=5, stem_chs=64, preact=p, **_groups),
        X,
    )
add("efficientnet_b0_gn", lambda timm: make(timm, "efficientnet_b0_gn", channel_multiplier=0.25), X)
add("efficientnet_b0_g8_gn", lambda timm: make(timm, "efficientnet_b0_g8_gn"), X)
