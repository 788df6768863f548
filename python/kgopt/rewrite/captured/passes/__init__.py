"""The rewrites of captured graphs beside that of norms, a file each.

Padding, upsampling, resampling, casts, biases and depthwise convolutions become what runs faster, or what lets a norm's
op take more.
"""

from kgopt.rewrite.captured.passes import (
    autocast,
    convolutions,
    doubled,
    mapped,
    padded,
    plain,
    resampled,
    tapped,
    unbiased,
    upsampled,
)

__all__ = [
    "autocast",
    "convolutions",
    "doubled",
    "mapped",
    "padded",
    "plain",
    "resampled",
    "tapped",
    "unbiased",
    "upsampled",
]
