"""Shapes, dtypes and layouts that the tests run, and tensors of them."""

from __future__ import annotations

import math

import torch

# (shape [N, C, *], groups)
NORM_SHAPES = {
    "one element a group": ((2, 4), 4),
    "no spatial dims": ((3, 12), 3),
    "one position": ((2, 8, 1, 1), 2),
    "1d": ((2, 6, 37), 3),
    "primes 2d": ((3, 7, 11, 13), 7),
    "odd row length 2d": ((2, 24, 9, 15), 8),
    "tail of a vector": ((2, 12, 5, 7, 3), 4),
    "3d": ((2, 24, 5, 6, 8), 8),
    "narrow groups": ((2, 32, 6, 6, 6), 32),
    "groups of two": ((2, 32, 17, 16), 16),
    "groups of three": ((1, 24, 12, 30, 30), 8),
    "one group": ((2, 10, 33, 9), 1),
    "large groups, batch 1": ((1, 16, 40, 66, 50), 2),
    "many small rows": ((4, 320, 4, 4), 32),
    "wide channels": ((1, 520, 6, 5), 8),
}

# transposed, rank, c_in, c_out, size, kernel, stride, padding, dilation, output_padding, groups
CONV_CASES = {
    "pointwise": (False, 2, 5, 7, (9, 11), (1, 1), (1, 1), (0, 0), (1, 1), (0, 0), 1),
    "2d k3": (False, 2, 8, 64, (20, 37), (3, 3), (1, 1), (0, 0), (1, 1), (0, 0), 1),
    "2d k3 padded": (False, 2, 8, 24, (16, 130), (3, 3), (1, 1), (1, 1), (1, 1), (0, 0), 1),
    "2d k7 stride 2": (False, 2, 3, 33, (23, 29), (7, 7), (2, 2), (3, 3), (1, 1), (0, 0), 1),
    "2d dilated": (False, 2, 6, 9, (18, 21), (3, 2), (1, 2), (2, 0), (2, 3), (0, 0), 1),
    "2d grouped": (False, 2, 12, 8, (10, 12), (3, 3), (1, 1), (1, 0), (1, 1), (0, 0), 4),
    "3d k3, 3 channels": (False, 3, 3, 24, (7, 9, 34), (3, 3, 3), (1, 1, 1), (0, 0, 0), (1, 1, 1), (0, 0, 0), 1),
    "3d mixed": (False, 3, 4, 17, (6, 8, 10), (1, 3, 2), (1, 2, 3), (0, 1, 1), (1, 1, 2), (0, 0, 0), 1),
    "3d many channels": (False, 3, 40, 100, (5, 6, 7), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), 1),
    "2d transposed": (True, 2, 6, 20, (9, 14), (3, 3), (1, 1), (0, 0), (1, 1), (0, 0), 1),
    "2d transposed stride 2": (True, 2, 7, 10, (8, 9), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 1),
    "3d transposed": (True, 3, 16, 24, (5, 6, 7), (3, 3, 3), (1, 1, 1), (0, 0, 0), (1, 1, 1), (0, 0, 0), 1),
    "3d transposed stride 2": (True, 3, 9, 40, (4, 5, 6), (2, 3, 4), (2, 2, 2), (0, 1, 1), (1, 1, 1), (0, 1, 0), 1),
    "3d transposed stride > kernel": (
        True,
        3,
        4,
        6,
        (3, 4, 5),
        (1, 2, 1),
        (3, 3, 2),
        (0,) * 3,
        (1,) * 3,
        (1, 0, 1),
        1,
    ),
    "3d transposed dilated, groups": (
        True,
        3,
        8,
        12,
        (4, 5, 4),
        (2, 3, 2),
        (1, 2, 3),
        (1, 1, 0),
        (2, 1, 2),
        (0,) * 3,
        2,
    ),
    # Channels in whole 16-byte pieces: with channels innermost, the wgmma kernel's.
    "3d 32 channels": (False, 3, 32, 32, (5, 19, 37), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), 1),
    "3d 64 channels": (False, 3, 64, 72, (4, 16, 32), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), 1),
    "3d 48 channels, one tap deep": (
        False,
        3,
        48,
        40,
        (6, 21, 50),
        (1, 5, 3),
        (1, 1, 1),
        (0, 1, 0),
        (1, 2, 2),
        (0, 0, 0),
        1,
    ),
    "2d 96 channels": (False, 2, 96, 24, (9, 170), (3, 3), (1, 1), (1, 1), (1, 1), (0, 0), 1),
    "2d 16 channels": (False, 2, 16, 128, (3, 600), (3, 3), (1, 1), (2, 2), (2, 2), (0, 0), 1),
    "3d 64 channels transposed": (
        True,
        3,
        64,
        96,
        (3, 7, 32),
        (3, 3, 3),
        (1, 1, 1),
        (0, 0, 0),
        (1, 1, 1),
        (0, 0, 0),
        1,
    ),
    "2d 32 channels transposed": (True, 2, 32, 16, (13, 29), (2, 3), (1, 1), (0, 1), (1, 1), (0, 0), 1),
    "3d transposed stride 5": (True, 3, 2, 3, (2, 3, 2), (3, 3, 3), (5, 5, 5), (1, 1, 1), (1, 1, 1), (0, 0, 0), 1),
}

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAYOUTS = ["contiguous", "channels_last"]


def within(sizes, most):
    """The sizes, the longest of them halved until their product is at most ``most``."""
    sizes = list(sizes)
    while math.prod(sizes) > most:
        i = sizes.index(max(sizes))
        sizes[i] //= 2
    return tuple(sizes)


def norm_shape(shape, device, most=2**22):
    """The shape; for the CPU, which has no tiles and blocks to fill, at most four samples and ``most`` elements of it.

    Groups of so many are still larger than the caches that the CPU's kernel looks at.
    """
    n, c, *sizes = shape
    if device == "cuda" or math.prod(shape) <= most // 4:
        return shape
    n = min(n, 4)
    return (n, c, *within(sizes, most // (n * c)))


def conv_case(name, device, most=2**25):
    """A case of CONV_CASES; for the CPU, where the op is torch's own, with at most so many products a sample.

    Torch computes half types' by far slower than others.
    """
    case = CONV_CASES[name]
    _, _, c_in, c_out, size, kernel, *_ = case
    if device == "cuda":
        return case
    return (*case[:4], within(size, most // (c_in * c_out * math.prod(kernel))), *case[5:])


def with_threads(run, count):
    """What ``run`` returns with so many threads of the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


def laid_out(x, layout):
    if layout == "contiguous" or x.dim() not in (4, 5):
        return x
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def make(shape, dtype, device, layout="contiguous", scale=1.0, offset=0.0):
    x = laid_out((torch.randn(shape, device=device) * scale + offset).to(dtype), layout)
    weight = torch.randn(shape[1], device=device).to(dtype)
    bias = torch.randn(shape[1], device=device).to(dtype)
    return x, weight, bias
