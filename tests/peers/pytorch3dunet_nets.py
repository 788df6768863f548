"""pytorch-3dunet: every network class, its layer orders, and its ways of upsampling."""

from __future__ import annotations

from peers.library import Library

LIBRARY = Library("pytorch3dunet", "pytorch3dunet.unet3d.model")
add = LIBRARY.add
X3, X2 = (1, 1, 16, 16, 16), (2, 1, 32, 32)

for _order in ("gcr", "cgr", "crg", "gcl", "gce", "cgrd", "cl"):
    add(
        f"UNet3D {_order}",
        lambda m, o=_order: m.UNet3D(1, 2, f_maps=[4, 8, 16], num_groups=4, layer_order=o, dropout_prob=0.2),
        X3,
    )
for _upsample in ("nearest", "trilinear", "deconv"):
    add(
        f"UNet3D {_upsample}",
        lambda m, u=_upsample: m.UNet3D(1, 2, f_maps=4, num_levels=3, num_groups=2, upsample=u, final_sigmoid=False),
        X3,
    )
add("UNet3D bcr", lambda m: m.UNet3D(1, 2, f_maps=[4, 8, 16], layer_order="bcr"), X3, norm="instance")
for _name in ("ResidualUNet3D", "ResidualUNetSE3D"):
    for _order in ("gcr", "cge"):
        add(
            f"{_name} {_order}",
            lambda m, n=_name, o=_order: getattr(m, n)(1, 2, f_maps=[4, 8, 16], num_groups=4, layer_order=o),
            X3,
        )
add("UNet2D", lambda m: m.UNet2D(1, 2, f_maps=[4, 8, 16], num_groups=4), X2)
add("UNet2D cgr", lambda m: m.UNet2D(1, 2, f_maps=[4, 8, 16], num_groups=2, layer_order="cgr", upsample="bilinear"), X2)
add("ResidualUNet2D", lambda m: m.ResidualUNet2D(1, 2, f_maps=[4, 8, 16], num_groups=4), X2)
