"""nnU-Net's network and loss, trained by PyTorch and by kgopt: loss curves, time of a step, peak memory.

    pip install dynamic-network-architectures matplotlib
    python examples/train_nnunet.py                        three seeds of each on a GPU
    python examples/train_nnunet.py --steps 40 --seeds 0 --json curves.json --plot curves.png

The network is built from a dict like that in nnU-Net's plans files. The rest follows nnU-Net's trainer: Dice and cross
entropy with deep supervision, SGD with Nesterov momentum 0.99, a polynomial learning rate, gradients clipped at 12,
fp16 autocast and GradScaler. Volumes are drawn: spheres (class 1) and tubes (class 2) in noise. A seed sets the weights
and the volumes, the same for both ways. kgopt's curves are as good as PyTorch's if a seed's two runs end no further
apart than PyTorch's runs of different seeds.

Isensee et al., nnU-Net: a self-configuring method for deep learning-based biomedical image segmentation, 2021.
"""

from __future__ import annotations

import argparse
import json
import pydoc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kgopt

CLASSES = 3  # background, spheres, tubes


def plans(features: Sequence[int]) -> dict[str, Any]:
    """The architecture as nnU-Net's plans files hold it."""
    stages = len(features)
    return {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": {
            "n_stages": stages,
            "features_per_stage": list(features),
            "conv_op": "torch.nn.modules.conv.Conv3d",
            "kernel_sizes": [[3, 3, 3]] * stages,
            "strides": [[1, 1, 1]] + [[2, 2, 2]] * (stages - 1),
            "n_conv_per_stage": [2] * stages,
            "n_conv_per_stage_decoder": [2] * (stages - 1),
            "conv_bias": True,
            "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
            "norm_op_kwargs": {"eps": 1e-05, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def build(plan: dict[str, Any]) -> nn.Module:
    """The network of a plan, with deep supervision and He's initialization."""
    kwargs = dict(plan["arch_kwargs"])
    for name in plan["_kw_requires_import"]:
        kwargs[name] = pydoc.locate(kwargs[name]) if kwargs[name] is not None else None
    make: Any = pydoc.locate(plan["network_class_name"])
    if make is None:
        raise SystemExit("this example needs nnU-Net's networks: pip install dynamic-network-architectures")
    network: nn.Module = make(input_channels=1, num_classes=CLASSES, deep_supervision=True, **kwargs)
    network.apply(network.initialize)
    return network


def draw(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Volumes [count, 1, size, size, size] and their classes [count, size, size, size]."""
    device = generator.device
    at = torch.stack(torch.meshgrid(*[torch.arange(size, device=device)] * 3, indexing="ij")).float()

    def number(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device) * (high - low) + low

    target = torch.zeros(count, size, size, size, dtype=torch.long, device=device)
    for one in target:
        for _ in range(4):
            center, radius = number(0, size, 3, 1, 1, 1), number(0.06 * size, 0.16 * size)
            one[(at - center).norm(dim=0) < radius] = 1
        for _ in range(4):
            center, way = number(0, size, 3, 1, 1, 1), number(-1, 1, 3, 1, 1, 1)
            way = way / way.norm().clamp_min(1e-3)
            along = ((at - center) * way).sum(0)
            one[(at - center - along * way).norm(dim=0) < number(0.02 * size, 0.05 * size)] = 2
    noise = torch.randn(target.shape, generator=generator, device=device)
    return (0.7 * (target == 1) - 0.7 * (target == 2) + noise).unsqueeze(1), target


def dice_and_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """nnU-Net's loss of one resolution: cross entropy minus the soft Dice of the classes but background."""
    logits = logits.float()
    known = F.one_hot(target, CLASSES).movedim(-1, 1)
    given, axes = logits.softmax(1), tuple(range(2, logits.dim()))
    both, all_given, all_known = (given * known).sum(axes), given.sum(axes), known.sum(axes)
    dice = (2 * both + 1e-5) / (all_given + all_known + 1e-5).clamp_min(1e-8)
    return F.cross_entropy(logits, target) - dice[:, 1:].mean()


def deep_loss(outputs: Sequence[Tensor], target: Tensor) -> Tensor:
    """Over the resolutions, each with half the weight of the one above, the lowest with none."""
    weights = [0.5**i for i in range(len(outputs))]
    if len(weights) > 1:
        weights[-1] = 0.0
    total = outputs[0].new_zeros((), dtype=torch.float32)
    for weight, logits in zip(weights, outputs, strict=True):
        if weight:
            smaller = F.interpolate(target.unsqueeze(1).float(), size=logits.shape[2:], mode="nearest")
            total = total + weight / sum(weights) * dice_and_cross_entropy(logits, smaller.squeeze(1).long())
    return total


def train(way: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run: the loss of each step, seconds of a step, MiB at the peak of a step."""
    device = torch.device(args.device)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    torch.manual_seed(seed)
    network = build(plans(args.features)).to(device).train()
    generator = torch.Generator(device).manual_seed(1000 + seed)
    if way == "kgopt":
        example = torch.randn(args.batch, 1, *(args.size,) * 3, device=device)
        with torch.autocast(device.type, half):
            kgopt.optimize(network, example)
    optimizer = torch.optim.SGD(network.parameters(), 1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, args.steps, 0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=half is torch.float16)
    losses, seconds, peak = [], [], 0.0
    for step in range(args.steps):
        x, target = draw(args.batch, args.size, generator)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, half):
            loss = deep_loss(network(x), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), 12)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        losses.append(float(loss.detach()))  # waits for the step
        if step >= 2:
            seconds.append(time.perf_counter() - start)
        if device.type == "cuda":
            peak = max(peak, torch.cuda.max_memory_allocated() / 2**20)
    return {"way": way, "seed": seed, "losses": losses, "seconds": statistics.median(seconds), "MiB": peak}


def at_the_end(run: dict[str, Any]) -> float:
    """The mean loss of the last fifth of the steps."""
    last = run["losses"][-max(1, len(run["losses"]) // 5) :]
    return sum(last) / len(last)


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """The curves, each a mean over some steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=130)
    for run in runs:
        width = max(1, len(run["losses"]) // 40)
        means = torch.tensor(run["losses"])[: len(run["losses"]) // width * width].view(-1, width).mean(1)
        color = "tab:gray" if run["way"] == "eager" else "tab:green"
        axes.plot(torch.arange(len(means)) * width, means, color=color, label=f"{run['way']}, seed {run['seed']}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def numbers(text: str) -> list[int]:
    """Of an argument such as 32,64,128."""
    return [int(number) for number in text.split(",")]


def main() -> int:
    """0 where kgopt's losses at the end are no further from eager's than eager's seeds are from each other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--size", type=int, default=128, help="of a volume's sides")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--features", type=numbers, default=[32, 64, 128, 256, 320, 320])
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="store the curves here")
    parser.add_argument("--plot", type=Path, help="draw the curves here (needs matplotlib)")
    args = parser.parse_args()
    if args.steps < 3:
        parser.error(f"--steps is {args.steps}, expected at least 3")
    runs = []
    print(f"{'way':8} {'seed':>4} {'loss at the end':>16} {'ms a step':>10} {'MiB at the peak':>16}")
    for seed in args.seeds:
        for way in ("eager", "kgopt"):
            run = train(way, seed, args)
            runs.append(run)
            figures = f"{at_the_end(run):16.4f} {run['seconds'] * 1e3:10.2f} {run['MiB']:16.0f}"
            print(f"{way:8} {seed:4} {figures}", flush=True)
    theirs, ours = ([at_the_end(run) for run in runs if run["way"] == way] for way in ("eager", "kgopt"))
    spread = max(theirs) - min(theirs) if len(theirs) > 1 else 0.05
    apart = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    print(f"eager's seeds end {spread:.4f} apart; kgopt's runs end at most {apart:.4f} from eager's of the same seed")
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "kgopt": kgopt.__version__, "runs": runs}) + "\n")
    if args.plot:
        plot(runs, args.plot)
    return 0 if apart <= spread else 1


if __name__ == "__main__":
    raise SystemExit(main())
