"""segmentation-models-pytorch: decoders of every kind behind small encoders, batch norms turned into others."""

from __future__ import annotations

from typing import Any

from torch import nn

from peers.library import Library

LIBRARY = Library("segmentation_models_pytorch", "segmentation_models_pytorch")
X = (2, 3, 64, 64)


def make(smp: Any, architecture: str, encoder: str, **keywords: Any) -> nn.Module:
    return getattr(smp, architecture)(encoder, encoder_weights=None, in_channels=3, classes=2, **keywords)


_NARROW: dict[str, dict[str, Any]] = {
    "Unet": {"decoder_channels": (16, 16, 8, 8, 4)},
    "UnetPlusPlus": {"decoder_channels": (16, 16, 8, 8, 4)},
    "MAnet": {"decoder_channels": (16, 16, 8, 8, 4), "decoder_pab_channels": 8},
    "FPN": {"decoder_pyramid_channels": 16, "decoder_segmentation_channels": 32},
    "PSPNet": {"psp_out_channels": 16},
    "PAN": {"decoder_channels": 8},
    "DeepLabV3": {"decoder_channels": 16},
    "DeepLabV3Plus": {"decoder_channels": 16, "decoder_atrous_rates": (2, 3, 4)},
    "UPerNet": {"decoder_channels": 16},
    "Segformer": {"decoder_segmentation_channels": 16},
    "Linknet": {},
}
# These pool to one position, where an InstanceNorm refuses to train.
_POOLS = ("PAN", "DeepLabV3", "DeepLabV3Plus", "UPerNet")
_NORMS = ("group", "instance", "mixed")

for _i, (_architecture, _keywords) in enumerate(_NARROW.items()):
    for _j, _encoder in enumerate(("timm-mobilenetv3_small_minimal_100", "tu-lcnet_050")):
        LIBRARY.add(
            f"{_architecture} {_encoder}",
            lambda smp, a=_architecture, e=_encoder, k=_keywords: make(smp, a, e, **k),
            (2, 3, 128, 128) if _architecture == "PAN" else X,
            norm="group" if _architecture in _POOLS else _NORMS[(_i + _j) % 3],
        )
LIBRARY.add(
    "Unet scSE",
    lambda smp: make(smp, "Unet", "tu-lcnet_050", decoder_attention_type="scse"),
    X,
    norm="group",
)
LIBRARY.add(
    "Unet with a classifier",
    lambda smp: make(smp, "Unet", "mobilenet_v2", aux_params={"classes": 3, "dropout": 0.2}, **_NARROW["Unet"]),
    X,
    norm="instance",
)
LIBRARY.add("Unet mit_b0", lambda smp: make(smp, "Unet", "mit_b0", **_NARROW["Unet"]), X, norm="group")
_INSTANCE = {"type": "instancenorm", "affine": True}
for _architecture in ("Unet", "UnetPlusPlus", "Linknet"):
    LIBRARY.add(
        f"{_architecture} decoder_use_norm",
        lambda smp, a=_architecture: make(
            smp, a, "timm-mobilenetv3_small_minimal_100", decoder_use_norm=_INSTANCE, **_NARROW[a]
        ),
        X,
    )
