"""The three pipelines, and two of them at growing sizes."""

from __future__ import annotations

import dataclasses

from kgopt.cli.cases.case import Case, batch_slices
from kgopt.cli.models import PIPELINES, Pipeline


def _pipeline_case(pipeline: Pipeline) -> Case:
    return Case(
        "pipelines",
        pipeline.name,
        pipeline.headline,
        plain=pipeline.plain_model,
        kgopt=pipeline.kgopt_model,
        work=lambda shape, itemsize, direction: pipeline.work(shape, itemsize, direction == "training"),
        slices=batch_slices,
        backward="training",
        max_autotune=True,
        title=pipeline.title,
        optimize=True,
    )


def scaling_cases() -> list[Case]:
    """Cost against work: the pipelines whose convolution is never stored, at growing batches and at growing images."""
    cases = []
    for pipeline in PIPELINES:
        if pipeline.transposed:
            continue
        batch, channels, *spatial = pipeline.headline
        shapes = [("batch", (n, channels, *spatial)) for n in (1, 4, 16, 64, 256, 1024)]
        # 128 cubed needs no batch of 128 to fill a GPU.
        many = batch if len(spatial) == 2 else 16
        shapes += [("edge", (many, channels, *[edge] * len(spatial))) for edge in (8, 16, 32, 64, 128)]
        for axis, shape in shapes:
            case = dataclasses.replace(
                _pipeline_case(pipeline),
                suite="scaling",
                shape=shape,
                axis=axis,
                graph=True,
                layouts=False,
                compile=False,
                backward="",
            )
            cases.append(dataclasses.replace(case, name=f"{pipeline.name} {axis} {case.axis_value}"))
    return cases


def pipeline_cases() -> list[Case]:
    """Each at its headline shape."""
    return [_pipeline_case(pipeline) for pipeline in PIPELINES]
