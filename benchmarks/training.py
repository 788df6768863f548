"""Training steps of U-Nets: time, peak memory, and who holds the memory at the peak.

    python benchmarks/training.py --json benchmarks/results/training/h200.json
    python benchmarks/training.py PlainConvUNet SegResNet --ways eager,optimize --holders 12
    python benchmarks/training.py --ways eager,compile,backend --jobs 8

A step is forward, loss, backward and dropping the gradients; fp16 autocast goes through a GradScaler. Milliseconds of a
step by the clock, several in a row; ``gpu_ms`` is the GPU's work, launches hidden. MiB is the largest
``memory_allocated`` in a step, weights and their gradients included. Ways: eager, compile, backend
(``backend="kgopt"``), "backend recompute", optimize, "optimize recompute", "optimize compile"; with "graph" behind one
that is not compiled, the network's forward and backward are CUDA graphs (``make_graphed_callables``). MiB has the pools
of graphs, "backend"'s too; ``graphs``: of the backend's steps, "recorded" or why not. Holders are the bytes that are
allocated at that moment, by the code that asked for them (the first line outside of PyTorch, where Python asked;
"autograd" where the backward's C++ did). With ``--jobs`` networks compile side by side, each dtype of one in a process
of its own, and one at a time is timed while the others are stopped.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kgopt
from kgopt.cli.environment import environment
from kgopt.cli.measure import gpu_time
from kgopt.cli.networks.turns import Turns
from kgopt.rewrite.cuda_graphs.replayed import Replayed
from kgopt.rewrite.measure import clocks

MIB = 2**20
_NNUNET: dict[str, Any] = {
    "input_channels": 1,
    "n_stages": 6,
    "features_per_stage": (32, 64, 128, 256, 320, 320),
    "conv_op": nn.Conv3d,
    "kernel_sizes": 3,
    "strides": (1, 2, 2, 2, 2, 2),
    "num_classes": 6,
    "conv_bias": True,
    "norm_op": nn.InstanceNorm3d,
    "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    "nonlin": nn.LeakyReLU,
    "nonlin_kwargs": {"inplace": True},
}


def plain_conv_unet(**more: Any) -> nn.Module:
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    return PlainConvUNet(**_NNUNET | more, n_conv_per_stage=2, n_conv_per_stage_decoder=2)


def residual_encoder_unet(**more: Any) -> nn.Module:
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet

    return ResidualEncoderUNet(**_NNUNET | more, n_blocks_per_stage=(1, 3, 4, 6, 6, 6), n_conv_per_stage_decoder=1)


def dynunet(**more: Any) -> nn.Module:
    from monai.networks.nets import DynUNet

    return DynUNet(3, 1, 3, kernel_size=[3] * 6, strides=[1, 2, 2, 2, 2, 2], upsample_kernel_size=[2] * 5, **more)


def segresnet(**more: Any) -> nn.Module:
    from monai.networks.nets import SegResNet

    return SegResNet(**{"spatial_dims": 3, "init_filters": 32, "in_channels": 4, "out_channels": 3} | more)


def unet3d(**more: Any) -> nn.Module:
    from pytorch3dunet.unet3d.model import UNet3D

    options = {"f_maps": 32, "layer_order": "gcr", "num_groups": 8, "num_levels": 4} | more
    return UNet3D(in_channels=1, out_channels=1, **options)


# By name: how it is made, the shape of x, and the dtypes of autocast ("tf32": none).
NETWORKS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "PlainConvUNet": (plain_conv_unet, (2, 1, 128, 128, 128), ("float16",)),
    "ResidualEncoderUNet": (residual_encoder_unet, (2, 1, 128, 128, 128), ("float16",)),
    "DynUNet": (dynunet, (1, 1, 128, 128, 128), ("bfloat16", "tf32")),
    "SegResNet": (segresnet, (1, 4, 128, 128, 128), ("bfloat16", "tf32")),
    "UNet3D": (unet3d, (1, 1, 96, 128, 128), ("bfloat16", "tf32")),
}


def first(outputs: Any) -> torch.Tensor:
    """The tensor that a loss is taken of."""
    while not isinstance(outputs, torch.Tensor):
        outputs = outputs[0]
    return outputs


def autocast(dtype: str, way: str) -> torch.autocast:
    """Autocast of a row. With graphs it may not keep casts of weights from call to call."""
    half = None if dtype == "tf32" else getattr(torch, dtype)
    return torch.autocast("cuda", half or torch.bfloat16, enabled=half is not None, cache_enabled="graph" not in way)


def make_step(model: nn.Module, x: torch.Tensor, dtype: str, way: str) -> Callable[[], None]:
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")

    def step() -> None:
        with autocast(dtype, way):
            loss = first(model(x)).float().square().mean()
        scaler.scale(loss).backward()
        model.zero_grad(set_to_none=True)

    return step


def milliseconds(step: Callable[[], None], rows: int = 4, seconds: float = 0.4) -> float:
    """Of one step, the median of rows."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    calls = max(1, int(seconds / (time.perf_counter() - start)))
    times = []
    for _ in range(rows):
        start = time.perf_counter()
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls * 1e3)
    return sorted(times)[len(times) // 2]


def _asker(frames: list[dict[str, Any]]) -> str:
    for frame in frames:
        name = frame["filename"]
        if "/torch/" not in name and name.endswith(".py"):
            return f"{'/'.join(Path(name).parts[-2:])}:{frame['line']} {frame['name']}"
    return "autograd"


def holders(step: Callable[[], None]) -> tuple[float, list[tuple[str, float]]]:
    """The peak of a step in MiB, and who holds how much of it, largest first."""
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=1_000_000)
    step()
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    held: dict[int, tuple[int, str]] = {}
    total = peak = 0
    at_peak: dict[int, tuple[int, str]] = {}
    for event in events:
        if event["action"] == "alloc":
            held[event["addr"]] = event["size"], _asker(event["frames"])
            total += event["size"]
            if total > peak:
                peak, at_peak = total, dict(held)
        elif event["action"] == "free_completed" and event["addr"] in held:
            total -= held.pop(event["addr"])[0]
    by: collections.Counter[str] = collections.Counter({"before the step": base})
    for size, asker in at_peak.values():
        by[asker] += size
    return (base + peak) / MIB, [(who, size / MIB) for who, size in by.most_common()]


def pools_of_graphs() -> tuple[float, float]:
    """MiB that CUDA graphs hold for themselves, whether a replay is running or not; and what of it counts as free."""
    segments = [s for s in torch.cuda.memory._snapshot()["segments"] if tuple(s["segment_pool_id"]) != (0, 0)]
    held = sum(s["total_size"] for s in segments)
    return held / MIB, (held - sum(s["allocated_size"] for s in segments)) / MIB


def prepare(way: str, model: nn.Module, x: torch.Tensor, dtype: str) -> nn.Module:
    """A model that a way made of another one."""
    if way.endswith(" graph"):
        model = prepare(way.removesuffix(" graph"), model, x, dtype)
        with autocast(dtype, way):
            return torch.cuda.make_graphed_callables(model, (x.clone(),), allow_unused_input=True)  # type: ignore[no-any-return]
    if way == "eager":
        return model
    if way == "compile":
        return torch.compile(model)  # type: ignore[return-value]
    if way.startswith("backend"):
        options = {"kgopt.recompute": True} if "recompute" in way else None
        return torch.compile(model, backend="kgopt", options=options)  # type: ignore[return-value]
    with autocast(dtype, way):
        kgopt.optimize(model, x, recompute="recompute" in way)
    return torch.compile(model) if "compile" in way.split() else model  # type: ignore[return-value]


def measure_row(
    original: nn.Module,
    x: torch.Tensor,
    row: dict[str, Any],
    alone: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:
    """Fills a row, which says the network, dtype and way. ``alone``: keeps other processes off the GPU."""
    dtype, way = row["dtype"], row["way"]
    start = time.perf_counter()
    with alone() if "optimize" in way else contextlib.nullcontext():
        model = prepare(way, copy.deepcopy(original).cuda(), x, dtype)
    step = make_step(model, x, dtype, way)
    with clocks.among_others(alone):
        for _ in range(4):  # the second and third of "backend" are recorded where that is faster
            step()
    row["seconds"] = time.perf_counter() - start
    with alone():
        row["ms"] = milliseconds(step)
        row["gpu_ms"] = gpu_time(step, x.device, 100.0).median_us / 1e3
        row["MiB"], row["holders"] = holders(step)
    row["graph_MiB"], free = pools_of_graphs()
    row["graphs"] = [r.why or "recorded" for r in gc.get_objects() if type(r) is Replayed and r.calls > 0]
    row["MiB"] += free
    if "optimize" in way:
        row["report"] = [str(getattr(kgopt.report(model), k, "")) for k in ("layout", "whole", "clock")]


def show(row: dict[str, Any], count: int) -> None:
    """Prints a row and its largest holders."""
    line = row.get("error") or f"{row['ms']:.1f} ms ({row['gpu_ms']:.1f} on the GPU), {row['MiB']:.0f} MiB"
    if "report" in row:
        line += f"  {row['report']}"
    if row.get("graphs"):
        line += f"  graphs: {'; '.join(row['graphs'])}"
    print(f"{row['network']} {row['dtype']}, {row['way']}: {line}", flush=True)
    for who, size in row.get("holders", [])[:count]:
        print(f"    {size:8.0f} MiB  {who}", flush=True)


def rows_of(name: str, args: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    """The rows of a network."""
    make, shape, dtypes = NETWORKS[name]
    turns = Turns(args.turns)

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        with turns.alone() as is_new:
            if is_new:
                torch.cuda.synchronize()
                time.sleep(0.05)  # what the others had launched
            yield

    torch.manual_seed(0)
    original = make().train()  # on the CPU: its weights would count twice
    x = torch.randn(shape, device="cuda")
    for dtype in dtypes:
        for way in args.ways.split(",") if args.dtype in (None, dtype) else ():
            if time.monotonic() > end:
                print("no time left", flush=True)
                return
            row: dict[str, Any] = {"network": name, "dtype": dtype, "way": way}
            try:
                measure_row(original, x, row, alone)
            except Exception as error:  # the other rows want their turn
                row["error"] = f"{type(error).__name__}: {error}"[:500]
            yield row
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()


def rows_side_by_side(names: list[str], args: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    """The rows of networks, by processes."""
    with Turns.made() as folder, tempfile.TemporaryDirectory() as results:

        def run(case: tuple[str, str]) -> list[dict[str, Any]]:
            name, dtype = case
            path = Path(results) / f"{name}_{dtype}.json"
            command = [sys.executable, __file__, name, "--dtype", dtype, "--ways", args.ways, "--turns", folder,
                       "--seconds", str(end - time.monotonic()), "--holders", "0", "--json", str(path)]  # fmt: skip
            child = subprocess.Popen(command, start_new_session=True)
            child.wait()
            Turns(folder, is_worker=False).resume(child.pid)
            return json.loads(path.read_text())["rows"] if path.exists() else []

        cases = [(name, dtype) for name in names for dtype in NETWORKS[name][2] if args.dtype in (None, dtype)]
        with ThreadPoolExecutor(args.jobs) as pool:
            for done in as_completed([pool.submit(run, case) for case in cases]):
                yield from done.result()


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"some of {' '.join(NETWORKS)}; all where none is named")
    parser.add_argument("--ways", default="eager,compile,optimize,optimize recompute")
    parser.add_argument("--dtype", help="one alone: float16, bfloat16 or tf32")
    parser.add_argument("--holders", type=int, default=6, help="how many to print")
    parser.add_argument("--seconds", type=float, default=1e9, help="nothing more is begun after them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--turns", default="", help=argparse.SUPPRESS)
    parser.add_argument("--commit", help="of kgopt, where it is no git checkout")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    end = time.monotonic() + args.seconds
    found: dict[str, Any] = {"environment": environment(torch.device("cuda"), args.commit), "rows": []}
    names = [name for name in NETWORKS if not args.networks or name in args.networks]
    if args.jobs > 1:
        rows = rows_side_by_side(names, args, end)
    else:
        rows = (row for name in names for row in rows_of(name, args, end))
    for row in rows:
        found["rows"].append(row)
        show(row, args.holders)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
