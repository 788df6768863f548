"""Facts about this machine and this build that every measured row carries."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import kgopt

__all__ = ["build_info", "environment", "git_commit", "pick_device"]


def _output_of(command: list[str]) -> str | None:
    """What a command prints, or None when it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


def pick_device(name: str | None) -> torch.device:
    """The device named, else the current CUDA device where torch sees one and kgopt has code for it, else the CPU.

    Raises ValueError for a CUDA device that torch does not see.
    """
    device = torch.device(name or ("cuda" if torch.cuda.is_available() and build_info().get("cuda") else "cpu"))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"--device is {name}, but torch {torch.__version__} sees no CUDA GPU")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"--device is {name}, but there are {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", index)
    return device


def build_info() -> dict[str, Any]:
    """What was compiled into ``kgopt._C``: cuda (bool), archs, cuda_version, torch_target."""
    return dict(json.loads(torch.ops.kgopt.build_info()))


def git_commit() -> str | None:
    """$KGOPT_COMMIT, else the commit of the checkout that kgopt is imported from, with "+" when files changed."""
    if os.environ.get("KGOPT_COMMIT"):
        return os.environ["KGOPT_COMMIT"]
    folder = Path(kgopt.__file__).resolve().parent
    # An installed kgopt may lie in an environment inside some other project's checkout.
    if _output_of(["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"]) is None:
        return None
    commit = _output_of(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"])
    if commit is None:
        return None
    return commit + ("+" if _output_of(["git", "-C", str(folder), "status", "--porcelain", "-uno"]) else "")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def environment(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Device, driver, versions, commit and date, as flat JSON values."""
    facts: dict[str, Any] = {
        "device": "cpu",
        "gpu": None,
        "driver": None,
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None,
        "kgopt": kgopt.__version__,
        "kgopt_archs": build_info().get("archs"),
        "python": platform.python_version(),
        "commit": commit or git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if device.type == "cuda":
        facts["device"] = "cuda"
        facts["gpu"] = torch.cuda.get_device_name(device)
        drivers = _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        facts["driver"] = drivers.splitlines()[0].strip() if drivers else None
        version = torch.backends.cudnn.version()
        if version:
            facts["cudnn"] = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return facts
