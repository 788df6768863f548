"""transformers: vision models with convolutions."""

from __future__ import annotations

from peers.library import Library

LIBRARY = Library("transformers", "transformers")
add = LIBRARY.add
X = (2, 3, 64, 64)

add(
    "ResNet",
    lambda t: t.ResNetModel(t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16], depths=[1, 1, 1])),
    X,
    norm="group",
)
add(
    "ResNet basic",
    lambda t: t.ResNetForImageClassification(
        t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic")
    ),
    X,
    norm="instance",
)
add(
    "BiT",
    lambda t: t.BitModel(t.BitConfig(embedding_size=8, hidden_sizes=[16, 16, 32, 32], depths=[1] * 4, num_groups=4)),
    X,
)
add(
    "RegNet",
    lambda t: t.RegNetModel(
        t.RegNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 24], depths=[1] * 4, groups_width=4)
    ),
    X,
    norm="group",
)
add("ConvNeXt", lambda t: t.ConvNextModel(t.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1] * 4)), X)
add("ConvNeXt V2", lambda t: t.ConvNextV2Model(t.ConvNextV2Config(hidden_sizes=[8, 8, 16, 16], depths=[1] * 4)), X)
add(
    "MobileNet V1",
    lambda t: t.MobileNetV1Model(t.MobileNetV1Config(depth_multiplier=0.25, min_depth=8)),
    X,
    norm="group",
)
add("MobileNet V2", lambda t: t.MobileNetV2Model(t.MobileNetV2Config(depth_multiplier=0.25)), X, norm="mixed")
add(
    "Segformer",
    lambda t: t.SegformerForSemanticSegmentation(
        t.SegformerConfig(
            hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=8
        )
    ),
    X,
    norm="group",
)
add(
    "MobileViT",
    lambda t: t.MobileViTModel(
        t.MobileViTConfig(hidden_sizes=[8] * 3, neck_hidden_sizes=[8] * 7, num_attention_heads=2, image_size=64)
    ),
    X,
    norm="group",
)
add(
    "UperNet",
    lambda t: t.UperNetForSemanticSegmentation(
        t.UperNetConfig(
            backbone_config=t.ConvNextConfig(
                hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, out_features=["stage1", "stage2", "stage3", "stage4"]
            ),
            hidden_size=8,
            auxiliary_in_channels=16,
            auxiliary_channels=8,
        )
    ),
    X,
    norm="group",
)
add(
    "VitMatte",
    lambda t: t.VitMatteForImageMatting(
        t.VitMatteConfig(
            backbone_config=t.VitDetConfig(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=32,
                patch_size=16,
                num_channels=4,
                out_features=["stage1"],
            ),
            hidden_size=16,
            convstream_hidden_sizes=[8] * 3,
            fusion_hidden_sizes=[8] * 4,
        )
    ),
    (1, 4, 32, 32),
    norm="group",
)
