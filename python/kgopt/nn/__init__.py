"""Modules with the constructors, parameters and ``state_dict`` keys of the ``torch.nn`` ones they replace."""

from kgopt.nn.channel_norms import ChannelLayerNorm, ChannelRMSNorm, PixelNorm
from kgopt.nn.modules import Conv2d, Conv3d, ConvTranspose2d, ConvTranspose3d, GroupNorm
from kgopt.nn.pipelines import (
    Conv2dGroupNormTanhHardswishResidualLogSumExp,
    Conv3dGroupNormMean,
    ConvTranspose3dReLUGroupNorm,
    GroupNormConv2d,
    GroupNormConv3d,
)

__all__ = [
    "ChannelLayerNorm",
    "ChannelRMSNorm",
    "Conv2d",
    "Conv2dGroupNormTanhHardswishResidualLogSumExp",
    "Conv3d",
    "Conv3dGroupNormMean",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "ConvTranspose3dReLUGroupNorm",
    "GroupNorm",
    "GroupNormConv2d",
    "GroupNormConv3d",
    "PixelNorm",
]
