"""Host time of calls so small that nothing else takes time: PyTorch's modules, and the same through kgopt.

    python benchmarks/host_time.py --json benchmarks/results/host_time/cpu.json
    python benchmarks/host_time.py norm conv --ways torch,optimize --seconds 2

Microseconds a call. ``no_grad`` and ``training`` are the forward without and with gradients, ``backward`` is what
``torch.autograd.grad`` adds to it, for the input and all parameters; ``autocast`` is the forward without gradients in
bfloat16 autocast, ``autocast training`` forward and backward. The ways run in turns, short rows of calls; of the rows
the fastest tenth counts: what else runs on the machine is no host time of ours. On CUDA the device is idle before and
after a row; it is behind the host nowhere at these sizes.

``all ours`` is ``optimize`` with every convolution by kgopt's op in training, as after measurements that it won.
``nothing`` is a multiplication. Most of its backward is ``torch.autograd.grad`` itself, which a network pays once.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kgopt
from kgopt.cli.environment import environment
from kgopt.rewrite.chains.meanings import conv_of
from kgopt.rewrite.gradients import training
from kgopt.rewrite.optimized import classes


class _Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class _Residual(nn.Module):
    """The end of a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.relu = nn.GroupNorm(2, 8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.relu(y + x)


class _ChannelNorm(nn.Module):
    """RMSNorm over channels, as video autoencoders write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.scale = nn.Parameter(torch.ones(8, 1, 1, 1)), 8**0.5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=1) * self.scale * self.gamma


def _block(*norm_and_act: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv3d(8, 8, 3, padding=1), *norm_and_act)


# By name: PyTorch's module, and the same of kgopt.nn where that has one. All take 1 x 8 x 4 x 4 x 4.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module] | None]] = {
    "nothing": (_Nothing, None),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), lambda: kgopt.nn.GroupNorm(2, 8)),
    "GroupNorm, ReLU": (
        lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU()),
        lambda: kgopt.nn.GroupNorm(2, 8, act="relu"),
    ),
    "InstanceNorm, LeakyReLU": (
        lambda: nn.Sequential(nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU()),
        lambda: kgopt.nn.GroupNorm(8, 8, act="leaky_relu"),
    ),
    "norm, sum, ReLU": (_Residual, None),
    "channel norm": (_ChannelNorm, lambda: kgopt.nn.ChannelRMSNorm(8)),
    "Conv3d": (lambda: nn.Conv3d(8, 8, 3, padding=1), lambda: kgopt.nn.Conv3d(8, 8, 3, padding=1)),
    "Conv3d of 1": (lambda: nn.Conv3d(8, 2, 1), lambda: kgopt.nn.Conv3d(8, 2, 1)),
    "ConvTranspose3d": (
        lambda: nn.ConvTranspose3d(8, 8, 2, stride=2),
        lambda: kgopt.nn.ConvTranspose3d(8, 8, 2, stride=2),
    ),
    "Conv3d, GroupNorm, ReLU": (
        lambda: _block(nn.GroupNorm(2, 8), nn.ReLU()),
        lambda: nn.Sequential(kgopt.nn.Conv3d(8, 8, 3, padding=1), kgopt.nn.GroupNorm(2, 8, act="relu")),
    ),
    "Conv3d, InstanceNorm, LeakyReLU": (
        lambda: _block(nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU()),
        lambda: nn.Sequential(kgopt.nn.Conv3d(8, 8, 3, padding=1), kgopt.nn.GroupNorm(8, 8, act="leaky_relu")),
    ),
    "30 of them": (
        lambda: nn.Sequential(*[_block(nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU()) for _ in range(30)]),
        None,
    ),
}
ROW = 4  # calls: a longer row is interrupted where other programs run
WAYS = ("torch", "optimize", "all ours", "kgopt.nn")
COLUMNS = ("no_grad", "training", "backward", "autocast", "autocast training")


class _Won(dict[Any, float]):
    """Verdicts on a convolution in training: kgopt's op, whatever is asked."""

    def get(self, key: Any, default: Any = None) -> Any:
        return 1.0


def _with_convolutions(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if conv_of(module) is not None:
            original, recipe = classes.recipe_of(module)
            classes.give(module, original, (*recipe, ("training",)), training=training.TrainingState(ours=_Won()))
    return model


def way_of(way: str, name: str, device: torch.device) -> nn.Module | None:
    """A case's module in one of the ways; None where there is none."""
    plain, own = CASES[name]
    if way == "kgopt.nn":
        return None if own is None else own().to(device)
    model = plain().to(device)
    if way == "torch":
        return model
    model = kgopt.optimize(copy.deepcopy(model), measure=False)
    if way == "optimize":
        return model
    return _with_convolutions(model) if any(map(conv_of, model.modules())) else None


def calls_of(module: nn.Module, device: torch.device) -> dict[str, Callable[[], None]]:
    """What is timed, by the column; "step" is forward and backward."""
    x = torch.randn(1, 8, 4, 4, 4, device=device)
    leaf = torch.randn(1, 8, 4, 4, 4, device=device, requires_grad=True)
    wanted = [leaf, *module.parameters()]
    ones: dict[torch.dtype, Tensor] = {}

    def forward() -> None:
        module(x)

    def training() -> None:
        module(leaf)

    def step() -> None:
        y = module(leaf)
        if y.dtype not in ones:
            ones[y.dtype] = torch.ones_like(y)
        torch.autograd.grad(y, wanted, ones[y.dtype])

    return {"no_grad": forward, "training": training, "step": step, "autocast": forward, "autocast training": step}


def _around(column: str, device: torch.device) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(torch.set_grad_enabled(column not in ("no_grad", "autocast")))
    if "autocast" in column:
        stack.enter_context(torch.autocast(device.type, torch.bfloat16))
    return stack


def microseconds(modules: dict[str, nn.Module], device: torch.device, seconds: float) -> dict[str, dict[str, float]]:
    """Of each way, each column."""
    calls = {way: calls_of(module, device) for way, module in modules.items()}
    found: dict[str, dict[str, float]] = {way: {} for way in modules}
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for column in ("no_grad", "training", "step", "autocast", "autocast training"):
        with _around(column, device):
            for own in calls.values():
                for _ in range(ROW):
                    own[column]()
            rows: dict[str, list[float]] = {way: [] for way in calls}
            end = time.perf_counter() + seconds / 5
            while time.perf_counter() < end or len(rows["torch"]) < 5:
                for way, own in calls.items():
                    function = own[column]
                    synchronize()
                    start = time.perf_counter()
                    for _ in range(ROW):
                        function()
                    synchronize()
                    rows[way].append((time.perf_counter() - start) / ROW * 1e6)
        for way, times in rows.items():
            found[way][column] = sorted(times)[len(times) // 10]
    for times in found.values():
        times["backward"] = times.pop("step") - times["training"]
    return found


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"parts of names; all where none is given: {'; '.join(CASES)}")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="a case")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"environment": environment(device), "rows": []}
    print(f"{'us a call':32s} {'':9s}" + "".join(f"{column:>19s}" for column in COLUMNS))
    for name in CASES:
        if args.cases and not any(part.lower() in name.lower() for part in args.cases):
            continue
        modules = {way: way_of(way, name, device) for way in ("torch", *args.ways.split(","))}
        found = microseconds({way: m for way, m in modules.items() if m is not None}, device, args.seconds)
        for way, times in found.items():
            print(f"{name:32s} {way:9s}" + "".join(f"{times[column]:19.1f}" for column in COLUMNS), flush=True)
            result["rows"].append({"case": name, "way": way, **{c: round(times[c], 2) for c in COLUMNS}})
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
