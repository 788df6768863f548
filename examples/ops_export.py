"""The ops themselves: statistics, the choice of a path, and a model exported with torch.export.

python examples/ops_export.py
"""

import json

import torch

import kgopt  # registers torch.ops.kgopt
import kgopt.nn


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    print("compiled in:", json.loads(torch.ops.kgopt.build_info()))

    x = torch.randn(2, 8, 64, 64, device=device)
    mean, rstd = torch.ops.kgopt.group_stats(x, 4)
    print("statistics of 4 groups:", tuple(mean.shape), tuple(rstd.shape))
    y = torch.ops.kgopt.activation(x, "tanh+hardswish")
    print("a chain in one pass:", tuple(y.shape))

    weight = torch.randn(64, 8, 3, 3, device=device)
    ones, zeros = [1, 1], [0, 0]
    print("conv2d 8->64 runs on", torch.ops.kgopt.explain_conv(x, weight, ones, zeros, ones, zeros, 1, False))

    # The exported graph holds one op, and loads wherever kgopt is imported; the batch may vary.
    model = kgopt.nn.Conv2dGroupNormTanhHardswishResidualLogSumExp(8, 64, 3, 16).to(device).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
        more = torch.randn(5, 8, 64, 64, device=device)
        print("exported, another batch:", (program.module()(more) - model(more)).abs().max().item())
    print("kgopt", kgopt.__version__)


if __name__ == "__main__":
    main()
