"""The floor of a measured row: what the memory and the tensor cores of this device allow, no matter the code.

floor = max(bytes / copy bandwidth, operations / matmul rate), both ceilings measured in the same run. Bytes count each
input read once and each output written once; intermediate tensors count nothing.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F

from kgopt.cli.measure import precision_flags, time_call
from kgopt.cli.results import Row

__all__ = ["Ceilings", "Work", "measure_ceilings"]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a computation cannot do without."""

    bytes: float  # read and written at least
    flops: float = 0.0  # of the convolution, 2 per multiply-add
    special: float = 0.0  # exp and tanh evaluations

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops, self.special + other.special)


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Rates of one device, measured: bytes/s and flop/s by precision ("tf32", "fp32", "bf16", "fp16", "fp64")."""

    bytes_per_s: float
    flops_per_s: dict[str, float]
    special_per_s: float | None = None  # 16 a clock and multiprocessor: from the data sheet, not measured

    def conv_rate(self, precision: str) -> float:
        """Flop/s for a convolution in `precision`.

        Where TF32 is off, fp32 accuracy can be had from fused multiply-adds, or from three TF32 products each.
        """
        rate = self.flops_per_s[precision]
        if precision == "fp32" and "tf32" in self.flops_per_s:
            rate = max(rate, self.flops_per_s["tf32"] / 3)
        return rate

    def floor(self, work: Work, precision: str) -> tuple[float, str]:
        """(microseconds, what binds: "memory" or "math")."""
        memory = work.bytes / self.bytes_per_s * 1e6
        math = work.flops / self.conv_rate(precision) * 1e6 if work.flops else 0.0
        return (memory, "memory") if memory >= math else (math, "math")

    def note(self, row: Row, work: Work, precision: str) -> None:
        """The floor of a row, and what part of its time that is."""
        floor_us, row["floor_bound"] = self.floor(work, precision)
        row["floor_us"], row["work_bytes"] = round(floor_us, 3), work.bytes
        if row.get("time_us"):
            row["floor_fraction"] = round(floor_us / row["time_us"], 5)

    def special_us(self, work: Work) -> float | None:
        """Microseconds of exp and tanh on the special function units: no part of the floor, polynomials can do it."""
        return work.special / self.special_per_s * 1e6 if self.special_per_s and work.special else None


_MATMUL_DTYPES = {"tf32": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure_ceilings(device: torch.device, precisions: list[str], quick: bool = False) -> Ceilings:
    """Measures copy bandwidth (read plus written) and the matmul rate of each precision on `device`.

    The 20th percentile counts: a ceiling is what can be reached, not what is usual on a busy machine.
    """
    cuda = device.type == "cuda"
    if cuda:
        free = torch.cuda.mem_get_info(device)[0]
        count, size = int(min(2**30, free // 8)), 8192 if free > 4 * 2**30 else 4096
    else:
        count, size = 2**26, 1024
    src = torch.ones(count // 4, device=device)
    dst = torch.empty_like(src)
    rep = 30.0 if quick else 100.0
    copied = time_call(functools.partial(dst.copy_, src), device, rep_ms=rep)
    bandwidth = 2 * src.numel() * 4 / (copied.p20_us * 1e-6)
    del src, dst

    wanted = set(precisions)
    if "fp32" in wanted and cuda:
        wanted.add("tf32")
    rates = {}
    for precision in sorted(wanted):
        a = torch.randn(size, size, device=device).to(_MATMUL_DTYPES[precision])
        b = torch.randn(size, size, device=device).to(_MATMUL_DTYPES[precision])
        with precision_flags(precision):
            took = time_call(functools.partial(torch.mm, a, b), device, rep_ms=rep)
        rates[precision] = 2.0 * size**3 / (took.p20_us * 1e-6)
        if not cuda:  # oneDNN's convolutions may use wider instructions than the matmul
            x, w = a.view(-1, 128, 64, 64)[:16], b.flatten()[: 128 * 128 * 9].view(128, 128, 3, 3)
            took = time_call(functools.partial(F.conv2d, x, w, padding=1), device, rep_ms=rep)
            rates[precision] = max(rates[precision], 2.0 * x.numel() * 128 * 9 / (took.p20_us * 1e-6))

    special = None
    if cuda:
        properties = torch.cuda.get_device_properties(device)
        clock_khz = getattr(properties, "clock_rate", 0)
        special = 16.0 * properties.multi_processor_count * clock_khz * 1e3 if clock_khz else None
    return Ceilings(bandwidth, rates, special)
