"""Convolutions and GPUs that the tests of plans share, and the developer module kgopt_dev, without which they skip.

`make dev-module` (part of `make test`) builds it.
"""

from __future__ import annotations

import pytest

dev = pytest.importorskip("kgopt_dev", reason="the developer module is not built: make dev-module")

DTYPES = ("float32", "bfloat16", "float16")
# A100, RTX 4090, H200: multiprocessors, shared memory of a block and of a multiprocessor in bytes.
GPUS = {
    "a100": dev.DeviceLimits(108, 163 * 1024, 164 * 1024),
    "rtx4090": dev.DeviceLimits(128, 99 * 1024, 100 * 1024),
    "h200": dev.DeviceLimits(132, 227 * 1024, 228 * 1024),
}


def make_problem(c_in, c_out, size, kernel, stride=(1, 1, 1), padding=(0, 0, 0), dilation=(1, 1, 1), **kwargs):
    """A problem with the output size that belongs to it; returns both."""
    dims = zip(size, kernel, stride, padding, dilation, strict=True)
    output = tuple(dev.conv_out_size(*dim, kwargs.get("transposed", False)) for dim in dims)
    problem = dev.ConvProblem(
        c_in=c_in,
        c_out=c_out,
        input=size,
        output=output,
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        **kwargs,
    )
    return problem, output


def check_refusal(refusal: str | None, reasons: dict[str, bool | None]) -> bool:
    """Whether a plan refused, which it must do for a right reason and for no other.

    `reasons` has a fragment of every refusal that the drawn problems can meet: True where the plan must refuse, False
    where it must not, None where only the planner knows, as of shared memory that is neither plenty nor short.
    """
    must = [why for why, holds in reasons.items() if holds]
    if refusal is None:
        assert not must, f"runs in spite of: {must}"
        return False
    said = [why for why in reasons if why in refusal]
    assert said, f"no reason that such a problem has: {refusal}"
    assert any(reasons[why] is not False for why in said), f"refused without cause: {refusal}"
    return True


def extents(kernel, dilation) -> list[int]:
    """How many positions of the input one output reads along each dim."""
    return [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]


CASES = {
    "pipeline 1": dict(c_in=3, c_out=24, size=(24, 32, 32), kernel=(3, 3, 3)),
    "pipeline 2": dict(c_in=64, c_out=128, size=(32, 32, 32), kernel=(3, 3, 3), transposed=True),
    "pipeline 3": dict(c_in=8, c_out=64, size=(1, 128, 128), kernel=(1, 3, 3)),
    "pointwise": dict(c_in=64, c_out=64, size=(5, 17, 31), kernel=(1, 1, 1)),
    "strided": dict(c_in=5, c_out=7, size=(9, 11, 13), kernel=(3, 4, 5), stride=(2, 3, 1), padding=(1, 0, 2)),
    "dilated": dict(c_in=4, c_out=33, size=(9, 20, 23), kernel=(2, 3, 3), dilation=(1, 3, 2), padding=(0, 3, 2)),
    "upsampling": dict(c_in=6, c_out=12, size=(3, 5, 7), kernel=(2, 4, 3), stride=(2, 4, 3), transposed=True),
    "kernel below stride": dict(c_in=6, c_out=12, size=(3, 5, 7), kernel=(1, 2, 3), stride=(3, 3, 4), transposed=True),
    "transposed, dilated": dict(
        c_in=3,
        c_out=8,
        size=(4, 6, 5),
        kernel=(3, 3, 2),
        stride=(2, 3, 2),
        padding=(1, 2, 0),
        dilation=(2, 2, 3),
        transposed=True,
    ),
    "large kernel": dict(c_in=1, c_out=8, size=(1, 64, 64), kernel=(1, 15, 15), padding=(0, 7, 7)),
    "one column": dict(c_in=2, c_out=1, size=(1, 1, 1), kernel=(1, 1, 1)),
}
