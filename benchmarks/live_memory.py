"""Memory of training steps on the CPU, by the networks of training.py at a small size: the peak, and who holds it.

    python benchmarks/live_memory.py PlainConvUNet --ways "eager,optimize,recompute like cuda" --holders 12

KiB that are alive at the peak of a step, without weights and what else was there before it. Ways: eager; optimize
(``measure=False``); recompute (the same with ``recompute=True``). "like cuda" behind one of the last two:
channels_last, and upsampling, concatenation and large convolutions by kgopt's ops as well, as where they gained on a
GPU. What PyTorch's convolutions allocate for themselves on the CPU does not count.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import kgopt
from kgopt.rewrite.gradients import casts, joins, training

KIB = 2**10
_POSITIONS = 4096  # of a small network's convolution; PyTorch is faster at those below
_NNUNET: dict[str, Any] = {"features_per_stage": (8, 16, 32, 64, 80, 80), "num_classes": 1}
# By name: how training.py's network is made smaller, and the shape of x.
SMALL: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "PlainConvUNet": (_NNUNET, (2, 1, 64, 64, 64)),
    "ResidualEncoderUNet": (_NNUNET, (2, 1, 64, 64, 64)),
    "DynUNet": ({"filters": (8, 16, 32, 64, 80, 80)}, (1, 1, 64, 64, 64)),
    "SegResNet": ({"init_filters": 8}, (1, 4, 64, 64, 64)),
    "UNet3D": ({"f_maps": 8, "num_groups": 2}, (1, 1, 48, 64, 64)),
}
_FRAME = re.compile(r"^(.*\.py)\((\d+)\): (.*)$")


def _asker(event: Any) -> str:
    """The op that allocates, and the innermost line of Python outside of PyTorch and kgopt."""
    op, e = "", event.parent
    while e is not None:
        frame = _FRAME.match(e.name)
        if frame is None:
            op = op or (e.name if "::" in e.name and not e.name.startswith("aten::empty") else "")
        elif not {"torch", "kgopt"} & set(Path(frame[1]).parts[:-1]):
            return f"{'/'.join(Path(frame[1]).parts[-2:])}:{frame[2]} {frame[3]}  {op}"
        e = e.parent
    return f"autograd  {op}"


def _convolution(event: Any) -> int:
    """Which call of a convolution of PyTorch's allocates or frees; 0: none."""
    e, outermost = event.parent, 0
    while e is not None:
        if e.name.startswith("aten::") and "conv" in e.name:
            outermost = int(e.start_time_ns)
        e = e.parent
    return outermost


def _allocations(events: Any) -> Iterator[Any]:
    for event in events:
        if event.name == "[memory]":
            yield event
        yield from _allocations(event.children)


def live(step: Callable[[], Any], stacks: bool = False) -> tuple[int, list[tuple[str, int]]]:
    """Bytes at the peak of a step, and who holds how much of them, largest first (where ``stacks`` are asked for)."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, with_stack=stacks) as profile:
        step()
    found = list(_allocations(profile.profiler.kineto_results.experimental_event_tree()))  # type: ignore[union-attr]
    found.sort(key=lambda event: event.start_time_ns)
    asked: dict[int, int] = {}  # by address: the index of the event
    within: set[int] = set()  # a convolution's own
    for i, event in enumerate(found):
        fields = event.extra_fields
        if fields.alloc_size > 0:
            asked[fields.ptr] = i
        elif (begin := asked.pop(fields.ptr, None)) is not None:
            if (of := _convolution(event)) and of == _convolution(found[begin]):
                within |= {begin, i}
        else:
            within.add(i)  # older than the step
    held: dict[int, Any] = {}
    at_peak: dict[int, Any] = {}
    total = peak = 0
    for i, event in enumerate(found):
        fields = event.extra_fields
        if i in within:
            continue
        total += fields.alloc_size
        if fields.alloc_size > 0:
            held[fields.ptr] = event
        else:
            held.pop(fields.ptr)
        if total > peak:
            peak, at_peak = total, dict(held)
    by: collections.Counter[str] = collections.Counter()
    for event in at_peak.values():
        by[_asker(event) if stacks else ""] += event.extra_fields.alloc_size
    return peak, by.most_common()


@contextlib.contextmanager
def like_cuda() -> Iterator[None]:
    """On the CPU, what training runs where it gained on a GPU."""

    def is_plain(x: Any) -> bool:
        return type(x) is torch.Tensor and x.numel() > 0 and x.is_floating_point()

    def gain_of(both: training.Both, x: torch.Tensor, store: Any = None) -> float:
        return float(x.shape[2:].numel() >= _POSITIONS)

    def upsample(kind: str, factors: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:  # in half, as autocast has it
        ops = torch.ops.kgopt
        return ops.upsample_linear(x) if kind == "linear" else ops.upsample_nearest(x, list(factors))  # type: ignore[no-any-return]

    with (
        mock.patch.object(training, "_is_plain", is_plain),
        mock.patch.object(casts, "BYTES", casts.BYTES // 16),  # weights are that much smaller
        mock.patch.object(training, "gain_of", gain_of),
        mock.patch.object(training, "_upsample", upsample),
        mock.patch.object(joins, "gain", return_value=1.0),
    ):
        yield


def prepare(way: str, model: nn.Module, x: torch.Tensor) -> nn.Module:
    """A model that a way made of another one. Within autocast, and :func:`like_cuda`."""
    if way == "eager":
        return model
    on_cuda = way.endswith("like cuda")
    kgopt.optimize(model, measure=False, recompute="recompute" in way, channels_last=on_cuda)
    if on_cuda:
        training.find(model, lambda: model(x), lambda name: "")
    return model


def make_step(model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None) -> Callable[[], None]:
    """Forward, loss and backward, under autocast to a dtype; gradients are dropped."""

    def step() -> None:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            y = model(x)
            while not isinstance(y, torch.Tensor):
                y = y[0]
            loss = y.float().square().mean()
            del y
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def peak_of(
    way: str, model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None, stacks: bool = False
) -> tuple[int, list[tuple[str, int]]]:
    """:func:`live` of a step of a copy of a model in training."""
    with like_cuda() if way.endswith("like cuda") else contextlib.nullcontext():
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            ours = prepare(way, copy.deepcopy(model).train(), x)
        step = make_step(ours, x, dtype)
        step()
        return live(step, stacks)


def main() -> None:
    """See the top."""
    from training import NETWORKS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"some of {' '.join(SMALL)}; all where none is named")
    parser.add_argument("--ways", default="eager,optimize like cuda,recompute like cuda")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of autocast; float32: none")
    parser.add_argument("--holders", type=int, default=0, help="how many to print")
    args = parser.parse_args()
    for name in args.networks or SMALL:
        options, shape = SMALL[name]
        torch.manual_seed(0)
        model, x = NETWORKS[name][0](**options), torch.randn(shape)
        for dtype in args.dtypes.split(","):
            eager = 0
            for way in args.ways.split(","):
                half = None if dtype == "float32" else getattr(torch, dtype)
                peak, by = peak_of(way, model, x, half, args.holders > 0)
                eager = peak if way == "eager" else eager
                of = f", {peak / eager:.3f} of eager" if eager else ""
                print(f"{name} {dtype}, {way}: {peak / KIB:.0f} KiB{of}", flush=True)
                for who, size in by[: args.holders]:
                    print(f"    {size / KIB:8.0f} KiB  {who}", flush=True)


if __name__ == "__main__":
    main()
