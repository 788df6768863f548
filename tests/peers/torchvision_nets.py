"""torchvision, its batch norms turned into GroupNorm or InstanceNorm."""

from __future__ import annotations

from typing import Any

from torch import nn

from peers.library import Library

LIBRARY = Library("torchvision", "torchvision.models")
add = LIBRARY.add
X = (2, 3, 64, 64)


def group(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def _resnet(m: Any, block: str, **keywords: Any) -> nn.Module:
    return m.resnet.ResNet(getattr(m.resnet, block), [1, 1, 1, 1], num_classes=5, **keywords)


add("resnet basic", lambda m: _resnet(m, "BasicBlock", norm_layer=group), X)
add("resnet bottleneck", lambda m: _resnet(m, "Bottleneck", groups=4, width_per_group=4), X, norm="mixed")
add(
    "resnet dilated",
    lambda m: _resnet(m, "Bottleneck", width_per_group=16, replace_stride_with_dilation=[False, True, True]),
    X,
    norm="instance",
)
add("mobilenet_v2", lambda m: m.mobilenet_v2(weights=None, num_classes=5, width_mult=0.25), X, norm="group")
add(
    "mobilenet_v3_small",
    lambda m: m.mobilenet_v3_small(weights=None, num_classes=5, reduced_tail=True),
    X,
    norm="mixed",
)
add("shufflenet", lambda m: m.shufflenet_v2_x0_5(weights=None, num_classes=5), X, norm="group")
add("mnasnet", lambda m: m.MNASNet(0.35, num_classes=5), X, norm="group")
add("squeezenet", lambda m: m.squeezenet1_1(weights=None, num_classes=5), X)
add("densenet", lambda m: m.DenseNet(8, (2, 2), 16, num_classes=5), X, norm="instance")
add(
    "densenet checkpointed",
    lambda m: m.DenseNet(8, (2, 2), 16, num_classes=5, memory_efficient=True),
    X,
    norm="group",
)
add("regnet", lambda m: m.regnet_y_400mf(weights=None, num_classes=5), X, norm="group")
add(
    "convnext",
    lambda m: m.convnext.ConvNeXt([m.convnext.CNBlockConfig(8, 16, 1), m.convnext.CNBlockConfig(16, None, 1)]),
    X,
)
add(
    "lraspp",
    lambda m: m.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2),
    X,
    norm="group",
)
for _name in ("r3d_18", "mc3_18", "r2plus1d_18"):
    add(
        _name,
        lambda m, n=_name: m.video.resnet.VideoResNet(
            m.video.resnet.BasicBlock,
            [
                {
                    "r3d_18": m.video.resnet.Conv3DSimple,
                    "mc3_18": m.video.resnet.Conv3DNoTemporal,
                    "r2plus1d_18": m.video.resnet.Conv2Plus1D,
                }[n]
            ]
            * 4,
            [1, 1, 1, 1],
            m.video.resnet.BasicStem,
            num_classes=5,
        ),
        (1, 3, 4, 32, 32),
        norm="instance" if _name == "r3d_18" else "group",
    )
add(
    "raft's encoder",
    lambda m: m.optical_flow.raft.FeatureEncoder(
        block=m.optical_flow.raft.ResidualBlock, layers=(8, 8, 12, 16, 24), norm_layer=nn.InstanceNorm2d
    ),
    X,
)
