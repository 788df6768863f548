"""Rows of a bench that tests of results, tables and charts share."""

from __future__ import annotations

FACTS = {
    "device": "cuda", "gpu": "NVIDIA H200", "driver": "580.1", "cpu": "c", "cpu_threads": 2, "torch": "2.14.1",
    "cuda": "13.0", "cudnn": "9.19.0", "kgopt": "0.1.0", "kgopt_archs": "9.0a", "python": "3.11", "commit": "abc",
    "date": "2026-01-02T00:00:00Z",
}  # fmt: skip


def bench_row(implementation: str, time_us: float | None, case: str = "some case", **more: object) -> dict:
    row = {
        "suite": "pipelines", "case": case, "title": f"Title of {case}", "shape": [2, 3, 4], "direction": "forward",
        "dtype": "tf32", "implementation": implementation, "layout": "contiguous", "time_us": time_us, "error": 3e-4,
        "peak_bytes": 5000, "floor_us": 28.0, "floor_bound": "math", "copy_gbytes_per_s": 4300.0,
        "matmul_tflops": 356.0, **FACTS,
    }  # fmt: skip
    return {**row, **more}


def bench_rows() -> list[dict]:
    times = {
        "eager": 1181.0,
        "eager_channels_last": 1259.0,
        "compile": 881.0,
        "compile_max_autotune": 868.0,
        "kgopt": 95.0,
    }
    rows = [bench_row(name, time) for name, time in times.items()]
    return [*rows, bench_row("eager", 500.0, "other"), bench_row("kgopt", 250.0, "other"),
            bench_row("compile", None, "other", failed="RuntimeError: no")]  # fmt: skip
