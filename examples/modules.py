"""Replace the layers of a plain PyTorch model by one fused module, keeping its checkpoint.

python examples/modules.py
"""

import torch
from torch import nn

import kgopt.nn


class Plain(nn.Module):
    """A patch classifier's head as one writes it in PyTorch: convolution, GroupNorm, global mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 24, 3)
        self.group_norm = nn.GroupNorm(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, 3, D, H, W] -> [N]."""
        return self.group_norm(self.conv(x)).mean(dim=[1, 2, 3, 4])


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    plain = Plain().to(device)
    with torch.no_grad():  # a trained GroupNorm is not the identity
        plain.group_norm.weight.uniform_(0.5, 1.5)
        plain.group_norm.bias.normal_()

    fused = kgopt.nn.Conv3dGroupNormMean(3, 24, kernel_size=3, num_groups=8).to(device)
    fused.load_state_dict(plain.state_dict(), strict=True)  # the same parameter names

    x = torch.randn(8, 3, 24, 32, 32, device=device)
    with torch.no_grad():
        print("largest difference:", (fused(x) - plain(x)).abs().max().item())

    # Gradients work as usual.
    fused(x).square().mean().backward()
    print("gradient of gamma:", fused.group_norm.weight.grad.norm().item())


if __name__ == "__main__":
    main()
