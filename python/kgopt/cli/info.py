"""``python -m kgopt info``: versions, the build, the GPUs, and which path ops take."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

import kgopt
from kgopt import torch_private
from kgopt.cli.environment import build_info, environment
from kgopt.cli.measure import precision_flags
from kgopt.cli.models import PIPELINES

__all__ = ["collect", "run_info"]

# What explain_conv calls the pipelines.
_EPILOGUES = {
    "conv3d_group_norm_mean": "stats",
    "conv_transpose3d_relu_group_norm": "relu_norm",
    "conv2d_group_norm_tanh_hardswish_residual_logsumexp": "logsumexp",
}
_CONVS = (
    ("conv3d 32->32 128^3", (1, 32, 128, 128, 128), (32, 32, 3, 3, 3)),
    ("conv3d 128->128 32^3", (1, 128, 32, 32, 32), (128, 128, 3, 3, 3)),
    ("conv3d 3->24 24x32x32", (128, 3, 24, 32, 32), (24, 3, 3, 3, 3)),
    ("conv2d 8->64 128^2", (128, 8, 128, 128), (64, 8, 3, 3)),
)
_NORMS = (  # what, shape, groups
    ("group_norm 1x32x128^3 / 8", (1, 32, 128, 128, 128), 8),
    ("group_norm 1x128x20x256^2 / 32", (1, 128, 20, 256, 256), 32),
    ("group_norm 8x320x64^2 / 32", (8, 320, 64, 64), 32),
    ("group_norm 1x128x8x8 / 32", (1, 128, 8, 8), 32),
)
_DTYPES = {"tf32": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def _explain(
    device: torch.device, x: tuple[int, ...], weight: tuple[int, ...], precision: str, transposed: bool, padding: int,
    epilogue: str, num_groups: int = 0,
) -> str:  # fmt: skip
    rank = len(x) - 2
    one = torch.zeros((), dtype=_DTYPES[precision], device=device)
    ones, zeros = [1] * rank, [0] * rank
    with precision_flags(precision):
        try:
            # The answer depends on sizes and dtype alone, so one element stands for all.
            text = torch.ops.kgopt.explain_conv(
                one.expand(x), one.expand(weight), ones, [padding] * rank, ones, zeros, 1, transposed, epilogue,
                num_groups=num_groups,
            )  # fmt: skip
        except (RuntimeError, NotImplementedError) as error:
            text = "error: " + str(error).splitlines()[0]
    return str(text)


def _paths(device: torch.device) -> list[dict[str, str]]:
    precisions = ["tf32", "fp32", "bf16", "fp64"] if device.type == "cuda" else ["fp32"]
    out = []
    for precision in precisions:
        for pipeline in PIPELINES:
            c_in, c_out, kernel, num_groups = pipeline.args
            x, transposed = pipeline.headline, pipeline.transposed
            weight = ((c_in, c_out) if transposed else (c_out, c_in)) + (kernel,) * (len(x) - 2)
            text = _explain(device, x, weight, precision, transposed, 0, _EPILOGUES[pipeline.name], num_groups)
            out.append({"what": f"{pipeline.module}, headline shape", "dtype": precision, "path": text})
        for what, x, weight in _CONVS:
            text = _explain(device, x, weight, precision, False, 1, "store")
            out.append({"what": what, "dtype": precision, "path": text})
    return out + _norms(device)


def _norms(device: torch.device) -> list[dict[str, str]]:
    out = []
    for what, shape, groups in _NORMS:
        for name in ("fp32", "bf16") if device.type == "cuda" else ("fp32",):
            x = torch.zeros((), dtype=_DTYPES[name], device=device).expand(shape)
            for layout, last in (("", False), (", channels_last", True)):
                for direction, backward in (("", False), (", backward", True)):
                    try:
                        text = torch.ops.kgopt.explain_group_norm(x, groups, backward=backward, channels_last=last)
                    except (RuntimeError, NotImplementedError) as error:
                        text = "error: " + str(error).splitlines()[0]
                    out.append({"what": what + layout + direction, "dtype": name, "path": text})
    return out


def collect() -> dict[str, Any]:
    """Everything `info` prints, as JSON values."""
    gpus: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            gpus.append(
                {
                    "index": index,
                    "name": p.name,
                    "compute_capability": f"{p.major}.{p.minor}",
                    "multiprocessors": p.multi_processor_count,
                    "memory_gib": round(p.total_memory / 2**30, 1),
                }
            )
    build = build_info()
    devices = [torch.device("cpu")]
    if build.get("cuda"):
        devices += [torch.device("cuda", gpu["index"]) for gpu in gpus]
    where = environment(devices[-1])
    return {
        "kgopt": kgopt.__version__,
        "commit": where["commit"],
        "build": build,
        "module": kgopt.__file__,
        "torch": torch.__version__,
        "torch_private_missing": torch_private.missing(everything=True),
        "torch_cuda": torch.version.cuda,
        "cudnn": where["cudnn"],
        "driver": where["driver"],
        "python": where["python"],
        "cpu": where["cpu"],
        "cpu_threads": where["cpu_threads"],
        "gpus": gpus,
        "paths": {str(device): _paths(device) for device in devices},
    }


def run_info(args: argparse.Namespace) -> int:
    """Runs ``python -m kgopt info`` with parsed arguments. Returns 0."""
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    build = facts["build"]
    compiled = f"CUDA {build.get('cuda_version')} kernels for {build.get('archs')}" if build.get("cuda") else "CPU only"
    print(f"kgopt     {facts['kgopt']}" + (f" ({facts['commit']})" if facts["commit"] else "") + f", {facts['module']}")
    print(f"build     {compiled}; needs torch {build.get('torch_target')} or later")
    print(f"torch     {facts['torch']}, CUDA {facts['torch_cuda'] or 'none'}, cuDNN {facts['cudnn'] or 'none'}")
    for name, instead in facts["torch_private_missing"].items():
        print(f"          without {name}: {instead}")
    print(f"python    {facts['python']}")
    print(f"cpu       {facts['cpu']}, {facts['cpu_threads']} threads")
    if not facts["gpus"]:
        print("gpu       none seen by torch")
    for gpu in facts["gpus"]:
        print(f"gpu {gpu['index']}     {gpu['name']}, compute capability {gpu['compute_capability']}, "
              f"{gpu['multiprocessors']} SMs, {gpu['memory_gib']} GiB, driver {facts['driver']}")  # fmt: skip
    if facts["gpus"] and not build.get("cuda"):
        print("          kgopt was built without CUDA: its ops run on the CPU only")
    for device, paths in facts["paths"].items():
        print(f"\npaths on {device}")
        print("  GroupNorm, activations, logsumexp, mean: kgopt's own kernels, every shape and dtype")
        width = max(len(path["what"]) for path in paths)
        for path in paths:
            print(f"  {path['what']:<{width}}  {path['dtype']:<4}  {path['path']}")
    return 0
