"""dynamic_network_architectures: nnU-Net's networks."""

from __future__ import annotations

from typing import Any

from torch import nn

from peers.library import Library

LIBRARY = Library("dynamic_network_architectures", "dynamic_network_architectures.architectures.unet")
X3, X2 = (2, 1, 16, 16, 16), (2, 1, 32, 32)


def keywords(dims: int, norm: str = "instance", **more: Any) -> dict[str, Any]:
    norms: dict[str, Any] = {
        "instance": (nn.InstanceNorm2d if dims == 2 else nn.InstanceNorm3d, {"eps": 1e-5, "affine": True}),
        "batch": (nn.BatchNorm2d if dims == 2 else nn.BatchNorm3d, {}),
        "group": (lambda channels, **k: nn.GroupNorm(4, channels, **k), {}),
    }
    op, options = norms[norm]
    made = {
        "input_channels": 1,
        "n_stages": 3,
        "features_per_stage": (4, 8, 12),
        "conv_op": nn.Conv2d if dims == 2 else nn.Conv3d,
        "kernel_sizes": 3,
        "strides": (1, 2, 2),
        "num_classes": 2,
        "conv_bias": True,
        "norm_op": op,
        "norm_op_kwargs": options,
        "nonlin": nn.LeakyReLU,
        "nonlin_kwargs": {"inplace": True},
    }
    return made | more


for _dims, _x in ((2, X2), (3, X3)):
    for _norm in ("instance", "group"):
        _more = {"n_conv_per_stage": 2, "n_conv_per_stage_decoder": 2, "deep_supervision": _norm == "group"}
        LIBRARY.add(
            f"PlainConvUNet {_dims}D {_norm}",
            lambda m, d=_dims, n=_norm, k=_more: m.PlainConvUNet(**keywords(d, n, **k)),
            _x,
        )
        _more = {"n_blocks_per_stage": (1, 2, 2), "n_conv_per_stage_decoder": 1}
        LIBRARY.add(
            f"ResidualEncoderUNet {_dims}D {_norm}",
            lambda m, d=_dims, n=_norm, k=_more: m.ResidualEncoderUNet(**keywords(d, n, **k)),
            _x,
        )
LIBRARY.add(
    "ResidualUNet 3D bottleneck, stochastic depth",
    lambda m: m.ResidualUNet(
        **keywords(3, n_blocks_per_stage=2, n_conv_per_stage_decoder=1, stem_channels=4, deep_supervision=True)
    ),
    X3,
)
LIBRARY.add(
    "PlainConvUNet 3D nonlin first",
    lambda m: m.PlainConvUNet(
        **keywords(3, n_conv_per_stage=1, n_conv_per_stage_decoder=1, nonlin_first=True, nonlin=nn.ReLU)
    ),
    X3,
)
LIBRARY.add(
    "PlainConvUNet 3D anisotropic with dropout",
    lambda m: m.PlainConvUNet(
        **keywords(
            3,
            kernel_sizes=((1, 3, 3), (3, 3, 3), (3, 3, 3)),
            strides=((1, 1, 1), (1, 2, 2), (2, 2, 2)),
            n_conv_per_stage=2,
            n_conv_per_stage_decoder=2,
            dropout_op=nn.Dropout3d,
            dropout_op_kwargs={"p": 0.2},
        )
    ),
    X3,
)
LIBRARY.add(
    "PlainConvUNet 2D from batch norms",
    lambda m: m.PlainConvUNet(**keywords(2, "batch", n_conv_per_stage=2, n_conv_per_stage_decoder=2)),
    X2,
    norm="mixed",
)
