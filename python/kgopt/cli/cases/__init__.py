"""What each bench suite measures: shapes, models, work for the floor, and how the float64 reference is cut up.

Shapes are those of real networks: MONAI SegResNet, UNet3D, nnU-Net, the autoencoders of diffusers.
"""

from __future__ import annotations

from collections.abc import Callable

from kgopt.cli.cases.case import Case, Chain, Slice, batch_slices, double
from kgopt.cli.cases.convolutions import conv_cases, conv_slices
from kgopt.cli.cases.norms import (
    PlainChannelNorm,
    PlainGroupNorm,
    channel_norm_cases,
    group_norm_cases,
    group_norm_work,
    group_slices,
    position_slices,
)
from kgopt.cli.cases.ops import op_cases
from kgopt.cli.cases.pipelines import pipeline_cases, scaling_cases

__all__ = [
    "SUITES",
    "Case",
    "Chain",
    "PlainChannelNorm",
    "PlainGroupNorm",
    "Slice",
    "batch_slices",
    "conv_slices",
    "double",
    "group_norm_work",
    "group_slices",
    "position_slices",
    "suite_cases",
]

_MADE_BY: dict[str, Callable[[], list[Case]]] = {
    "pipelines": pipeline_cases,
    "groupnorm": group_norm_cases,
    "channelnorm": channel_norm_cases,
    "conv": conv_cases,
    "ops": op_cases,
    "scaling": scaling_cases,
}
SUITES = tuple(_MADE_BY)


def suite_cases(suite: str) -> list[Case]:
    """The cases of a suite, in the order in which they are measured.

    Raises:
        ValueError: there is no such suite.
    """
    if suite not in _MADE_BY:
        raise ValueError(f"suite is {suite!r}, expected one of {', '.join(SUITES)}")
    return _MADE_BY[suite]()
