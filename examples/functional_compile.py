"""A network of one's own with kgopt's functions, eager and under torch.compile.

python examples/functional_compile.py
"""

import torch
from torch import nn

import kgopt.functional as KF


class Block(nn.Module):
    """Convolution, then GroupNorm and SiLU in one pass over memory, with a residual."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(groups, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, C, D, H, W], same shape out."""
        y, norm = self.conv(x), self.norm
        return x + KF.group_norm(y, norm.num_groups, norm.weight, norm.bias, norm.eps, act="silu")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(Block(32, 8), Block(32, 8)).to(device)
    # channels_last stays channels_last through the whole network: GroupNorm has a kernel for it.
    model = model.to(memory_format=torch.channels_last_3d)
    x = torch.randn(1, 32, 16, 24, 24, device=device).to(memory_format=torch.channels_last_3d)

    compiled = torch.compile(model, fullgraph=True)  # the ops have fake kernels: one graph, no break
    with torch.no_grad():
        eager, fast = model(x), compiled(x)
    print("largest difference, compiled to eager:", (fast - eager).abs().max().item())
    print("still channels_last:", eager.is_contiguous(memory_format=torch.channels_last_3d))


if __name__ == "__main__":
    main()
