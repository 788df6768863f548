"""Train a small 3D U-Net, built with kgopt.nn, to denoise an MRI volume. Nothing is downloaded.

    python examples/denoise_unet3d.py                 # a minute or two on a CPU, seconds on a GPU
    python examples/denoise_unet3d.py --amp --steps 2000 --channels 32
    python examples/denoise_unet3d.py --quick         # a few small steps, to see that it runs

The volume is the echo-planar MRI inside the nibabel package: two scans of a head, 24 slices of 128 x 96 voxels. The
network sees random patches of the lower slices with Gaussian noise on top and learns to predict the noise. It is tested
on the upper slices of the second scan, which it never saw. Writes a PNG with the loss curve and a slice before and
after, and prints the peak signal-to-noise ratio (PSNR).

Needs `pip install nibabel matplotlib tqdm`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import kgopt.nn as knn
from kgopt.cli import MissingPackageError
from kgopt.cli.demo_data import load_mri

TRAIN_SLICES = 14  # of 24; the rest is for the test


class Block(nn.Module):
    """Two times convolution, GroupNorm and SiLU; the last two are one op."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = knn.Conv3d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm1 = knn.GroupNorm(8, out_channels, act="silu")
        self.conv2 = knn.Conv3d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = knn.GroupNorm(8, out_channels, act="silu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in_channels, D, H, W] -> [N, out_channels, D, H, W]."""
        return self.norm2(self.conv2(self.norm1(self.conv1(x))))


class UNet3d(nn.Module):
    """Three levels; the slices are thick and few, so only height and width are halved. Predicts the noise in x."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        a, b, c = channels, 2 * channels, 4 * channels
        self.enter, self.middle, self.bottom = Block(1, a), Block(b, b), Block(c, c)
        self.down1 = knn.Conv3d(a, b, (1, 2, 2), stride=(1, 2, 2))
        self.down2 = knn.Conv3d(b, c, (1, 2, 2), stride=(1, 2, 2))
        self.up1 = knn.ConvTranspose3d(c, b, (1, 2, 2), stride=(1, 2, 2))
        self.up2 = knn.ConvTranspose3d(b, a, (1, 2, 2), stride=(1, 2, 2))
        self.merge1, self.merge2 = Block(2 * b, b), Block(2 * a, a)
        self.leave = knn.Conv3d(a, 1, 1)
        nn.init.zeros_(self.leave.weight)  # starts as the identity: predicts no noise
        nn.init.zeros_(self.leave.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, 1, D, H, W], H and W multiples of 4 -> x without its noise, the same shape."""
        high = self.enter(x)
        low = self.middle(self.down1(high))
        y = self.bottom(self.down2(low))
        y = self.merge1(torch.cat([self.up1(y), low], dim=1))
        y = self.merge2(torch.cat([self.up2(y), high], dim=1))
        return x - self.leave(y)


def patches(volume: torch.Tensor, count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Random patches [count, 1, 8, size, size] of volume [time, D, H, W], half of them mirrored left to right."""
    times, depth, height, width = volume.shape

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    out = []
    for _ in range(count):
        t, z, y, x = draw(times), draw(depth - 7), draw(height - size + 1), draw(width - size + 1)
        patch = volume[t, z : z + 8, y : y + size, x : x + size]
        out.append(patch.flip(-1) if draw(2) else patch)
    return torch.stack(out)[:, None]


def psnr(x: torch.Tensor, clean: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB; the peak is the range of the clean volume."""
    peak = clean.max() - clean.min()
    return float(10 * torch.log10(peak**2 / F.mse_loss(x.float(), clean)))


def train(model: nn.Module, volume: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """The loss of every step."""
    from tqdm import tqdm

    draws = torch.Generator().manual_seed(args.seed)
    noise = torch.Generator(device=volume.device).manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    losses: list[torch.Tensor] = []
    bar = tqdm(range(args.steps), desc="training", unit="step", dynamic_ncols=True)
    for step in bar:
        clean = patches(volume, args.batch, args.patch, draws)
        noisy = clean + args.noise * torch.randn(clean.shape, generator=noise, device=clean.device)
        with torch.autocast(clean.device.type, torch.bfloat16, enabled=args.amp):
            loss = F.mse_loss(model(noisy).float(), clean)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.detach())
        if step % 20 == 0:  # reading the loss waits for the GPU
            bar.set_postfix(loss=f"{float(loss):.4f}")
    return torch.stack(losses).tolist()


def picture(path: str, losses: list[float], images: list[tuple[str, torch.Tensor]], title: str) -> None:
    """The loss curve and the middle slice of each volume, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(13, 3.9), facecolor="white", layout="constrained")
    FigureCanvasAgg(fig)
    fig.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes = fig.subplots(1, 1 + len(images), width_ratios=[1.7, *[1] * len(images)])
    curve = torch.tensor(losses)
    width = max(1, len(losses) // 50)
    smooth = curve.unfold(0, width, 1).mean(1)
    axes[0].plot(curve, color="#c3c9d1", linewidth=0.8)
    axes[0].plot(range(width - 1, len(losses)), smooth, color="#76b900", linewidth=2)
    axes[0].set(yscale="log", xlabel="step", title="loss (mean squared error)")
    axes[0].spines[["top", "right"]].set_visible(False)
    low, high = (float(images[0][1].quantile(q)) for q in (0.01, 0.995))
    for ax, (name, volume) in zip(axes[1:], images, strict=True):
        ax.imshow(volume[volume.shape[0] // 2].rot90(), cmap="gray", vmin=low, vmax=high)
        ax.set_title(name, fontsize=10.5)
        ax.set_axis_off()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=140)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="patches a step (%(default)s)")
    parser.add_argument("--patch", type=int, default=48, help="height and width of a patch, at most 96 (%(default)s)")
    parser.add_argument("--channels", type=int, default=16, help="of the first level, a multiple of 8 (%(default)s)")
    parser.add_argument("--noise", type=float, default=0.3, help="noise, in units of the signal's spread (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--amp", action="store_true", help="train under autocast to bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of weights, patches and noise (%(default)s)")
    parser.add_argument("--out", metavar="PNG", default="denoise_unet3d.png", help="the picture (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="12 small steps")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.batch, args.patch, args.channels = 12, 2, 16, 8
    if args.channels % 8 or args.channels < 8:
        parser.error(f"--channels is {args.channels}, expected a multiple of 8")
    if args.patch % 4 or not 4 <= args.patch <= 96:
        parser.error(f"--patch is {args.patch}, expected a multiple of 4 up to 96")
    if args.steps < 2:
        parser.error(f"--steps is {args.steps}, expected at least 2")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        volume = load_mri().to(args.device)  # [2, 24, 128, 96], zero mean, unit variance
    except MissingPackageError as error:
        print(f"this example needs nibabel, matplotlib and tqdm: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(args.seed)
    model = UNet3d(args.channels).to(args.device)
    start = time.perf_counter()
    losses = train(model, volume[:, :TRAIN_SLICES], args)
    took = time.perf_counter() - start

    clean = volume[1, TRAIN_SLICES:]
    generator = torch.Generator(device=clean.device).manual_seed(args.seed + 1)
    noisy = clean + args.noise * torch.randn(clean.shape, generator=generator, device=clean.device)
    with torch.no_grad():
        denoised = model(noisy[None, None])[0, 0]
    before, after = psnr(noisy, clean), psnr(denoised, clean)

    parameters = sum(p.numel() for p in model.parameters())
    summary = f"{args.steps} steps in {took:.1f} s on {args.device}, {parameters / 1e3:.0f}k parameters"
    images = [("clean", clean), (f"noisy, {before:.1f} dB", noisy), (f"denoised, {after:.1f} dB", denoised)]
    cpu_images = [(name, image.float().cpu()) for name, image in images]
    picture(args.out, losses, cpu_images, f"3D U-Net of kgopt.nn: {summary}")
    print(summary)
    print(f"PSNR on slices that it never saw: {before:.2f} dB before, {after:.2f} dB after")
    print(f"picture: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
