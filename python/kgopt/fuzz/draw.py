"""Random choices: sizes, groups, geometries, parameters of one case."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from kgopt.fuzz.tensors import draw_layout, draw_size, draw_values, spec
from kgopt.reference import ACTIVATIONS, PARAMETRIZED

__all__ = ["Args", "Draw", "Tensors", "conv_sizes"]

Tensors = dict[str, dict[str, Any]]
Args = dict[str, Any]


class Draw:
    """The random choices of one case."""

    def __init__(self, rng: random.Random, device: str) -> None:
        self.rng, self.device = rng, device
        self.dtype = rng.choices(["float32", "bfloat16", "float16", "float64"], [42, 24, 14, 20])[0]
        big = rng.random()
        cuda = device == "cuda"
        if big < (0.004 if cuda else 0.01):
            self.budget = 2 ** rng.uniform(17, 23.3 if cuda else 17.5)
        elif big < 0.12:
            self.budget = 2 ** rng.uniform(12, 17 if cuda else 15)
        else:
            self.budget = 2 ** rng.uniform(1, 12)
        self.products = 2.0**27 if cuda else 2.0**21
        if self.budget > 2**17:
            self.products *= 32 if cuda else 4

    def chance(self, p: float) -> bool:
        """True with this probability."""
        return self.rng.random() < p

    def tensor(self, shape: Sequence[int], plain: bool = False, dull: float = 0.45) -> dict[str, Any]:
        """``plain``: a parameter, seldom anything but normal values, and never infinite.

        Where infinities meet, a norm's formulas differ in whether they leave one of them or a NaN.
        """
        values = "normal" if self.chance(0.93 if plain else 0.0) else draw_values(self.rng, not plain)
        return spec(shape, self.dtype, values, draw_layout(self.rng, shape, 0.85 if plain else dull))

    def channels(self, most: int) -> tuple[int, int]:
        """Groups, and channels of one."""
        how = self.rng.random()
        most = max(1, most)
        if how < 0.22:
            return draw_size(self.rng, most), 1
        if how < 0.42:
            return 1, draw_size(self.rng, most)
        groups = self.rng.choice([2, 3, 4, 5, 8, 16, 32])
        return groups, draw_size(self.rng, max(1, most // groups))

    def norm_shape(self, least: int = 2) -> tuple[list[int], int]:
        """[N, C, *] and the groups of a norm."""
        rank = self.rng.choices(range(least, 6), [1, 2, 5, 4][least - 2 :])[0]
        groups, per_group = self.channels(int(min(1024, max(1, self.budget**0.7))))
        c = groups * per_group
        sizes = self.spatial(rank - 2, self.budget / c)
        n = max(1, min(draw_size(self.rng, 9), int(2 * self.budget / max(1, c * math.prod(sizes)))))
        shape = [n, c, *sizes]
        if self.chance(0.015):
            shape[self.rng.choice([0, *range(2, rank)])] = 0
        return shape, groups

    def spatial(self, rank: int, budget: float) -> list[int]:
        """So many sizes, whose product is about the budget."""
        sizes: list[int] = []
        for i in range(rank):
            rest = max(1.0, budget / max(1, math.prod(sizes)))
            most = rest if i == rank - 1 else rest ** self.rng.uniform(0.2, 0.8)
            sizes.append(draw_size(self.rng, max(1, int(most))))
        self.rng.shuffle(sizes)
        return sizes

    def act(self, none: float = 0.4) -> str:
        """A chain."""
        if self.chance(none):
            return "none"
        # But for those that jump: behind a norm rounding decides on which side of it a value lies.
        names = [a for a in (*ACTIVATIONS, *PARAMETRIZED) if not a.startswith(("none", "threshold", "hardshrink"))]
        return "+".join(self.rng.choice(names) for _ in range(self.rng.choices([1, 2, 3], [6, 2, 1])[0]))

    def eps(self) -> float:
        """A norm's."""
        return self.rng.choice([1e-5] * 6 + [1e-6, 1e-3, 0.1, 2.0])

    def affine(self, tensors: Tensors, channels: int, prefix: str = "") -> None:
        """The norm's parameters, both, one or none; float32 ones beside halves now and then."""
        wide = self.dtype in ("bfloat16", "float16") and self.chance(0.12)
        for name in ("weight", "bias"):
            if self.chance(0.8):
                tensors[prefix + name] = self.tensor([channels], plain=True)
                if wide:
                    tensors[prefix + name]["dtype"] = "float32"

    def conv(self, rank: int, transposed: bool, bias: float = 0.6) -> tuple[Tensors, Args, list[int]]:
        """x, weight, perhaps bias; the geometry; the result's sizes."""
        groups, c_in, c_out = self._conv_channels()
        kernel, geometry = self._conv_geometry(rank, transposed)
        sizes = self.spatial(rank, self.budget / c_in)
        odd = self.chance(0.02)  # as they come: results without elements, refusals
        if not odd:
            for i in range(rank):
                reach = geometry["dilation"][i] * (kernel[i] - 1) + 1
                if transposed:
                    past = reach - 2 * geometry["padding"][i] + geometry["output_padding"][i]
                    while (sizes[i] - 1) * geometry["stride"][i] + past < 1:
                        sizes[i] += 1
                else:
                    sizes[i] = max(sizes[i], reach - 2 * geometry["padding"][i])
        n = max(1, min(draw_size(self.rng, 7), int(2 * self.budget / max(1, c_in * math.prod(sizes)))))
        if self.chance(0.01):
            n = 0
        while True:
            geometry["groups"] = groups
            shape = [n, c_in, *sizes]
            w_shape = [c_in, c_out // groups, *kernel] if transposed else [c_out, c_in // groups, *kernel]
            out = conv_sizes(shape, w_shape, geometry, transposed)
            positions = math.prod(sizes) if transposed else math.prod(max(0, s) for s in out[2:])
            cost = n * positions * math.prod(w_shape)
            if odd or (cost <= self.products and math.prod(map(abs, out)) <= 4 * self.budget + 4096):
                break
            if n > 1:
                n = (n + 1) // 2 if n > 2 else 1
            elif c_out > groups:
                c_out = groups * max(1, c_out // groups // 2)
            elif c_in > groups:
                c_in = groups * max(1, c_in // groups // 2)
            elif groups > 1:
                c_in, c_out, groups = max(1, c_in // groups), max(1, c_out // groups), 1
            else:
                break
        tensors = {"x": self.tensor(shape), "weight": self.tensor(w_shape, plain=True)}
        if rank + 2 in (4, 5) and tensors["x"]["layout"] == "channels_last" and self.chance(0.6):
            tensors["weight"]["layout"] = "channels_last"
        if rank == 3 and groups == c_in and not transposed and tensors["x"]["layout"] == "ones":
            # PyTorch's depthwise kernel steps by the stride of a size of 1, out of x.
            tensors["x"]["layout"] = "contiguous"
        if self.chance(bias):
            tensors["bias"] = self.tensor([c_out], plain=True)
        return tensors, geometry, out

    def _conv_channels(self) -> tuple[int, int, int]:
        """Groups, channels in and out."""
        rng = self.rng
        how = rng.random()
        if how < 0.6:
            return 1, draw_size(rng, 64), draw_size(rng, 64)
        if how < 0.78:  # depthwise, perhaps with a multiplier
            groups = draw_size(rng, 40)
            return groups, groups, groups * rng.choice([1, 1, 1, 2, 3])
        groups = rng.choice([2, 3, 4, 8])
        return groups, groups * draw_size(rng, 12), groups * draw_size(rng, 12)

    def _conv_geometry(self, rank: int, transposed: bool) -> tuple[list[int], Args]:
        """The kernel's sizes; stride, padding, dilation, and the output padding of a transposed one."""
        rng = self.rng

        def per_dim(choices: Sequence[int], same: float = 0.6) -> list[int]:
            return [rng.choice(choices)] * rank if self.chance(same) else [rng.choice(choices) for _ in range(rank)]

        kernel = per_dim([1, 1, 2, 3, 3, 3, 3, 4, 5, 7, 6])
        stride = per_dim([1] * 6 + [2, 2, 2, 3, 5], 0.8)
        dilation = per_dim([1] * 8 + [2, 3], 0.8)
        padding = [rng.choice([0, 0, k // 2, k // 2, k - 1, k + 1 if self.chance(0.1) else 0]) for k in kernel]
        if self.chance(0.6):
            padding = [padding[0]] * rank
        output_padding = [0] * rank
        if transposed and self.chance(0.4):
            output_padding = [rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
        geometry: Args = {"stride": stride, "padding": padding, "dilation": dilation, "groups": 1}
        return kernel, geometry | ({"output_padding": output_padding} if transposed else {})

    def backend(self) -> Args:
        """The keyword-only arguments of a convolution."""
        more: Args = {}
        if self.chance(0.15):
            more["backend"] = self.rng.choice(["kgopt", "aten"] if self.device == "cuda" else ["aten"])
        if self.chance(0.08):
            more["allow_tf32"] = self.chance(0.5)
        return more

    def statistics(self, shape: Sequence[int]) -> dict[str, Any]:
        """A tensor of the dtype of statistics: float32 beside halves."""
        tensor = self.tensor(shape)
        tensor["dtype"] = "float64" if self.dtype == "float64" else "float32"
        return tensor

    def divisor(self, channels: int) -> int:
        """Groups of a norm of so many channels."""
        if self.chance(0.25):
            return 1
        if self.chance(0.25):
            return channels
        return self.rng.choice([d for d in range(1, channels + 1) if channels % d == 0])


def conv_sizes(x: Sequence[int], weight: Sequence[int], geometry: Args, transposed: bool) -> list[int]:
    """The sizes of a convolution's result; below 1 where there is none."""
    out = [x[0], weight[1] * geometry["groups"] if transposed else weight[0]]
    for i, (s, p, d) in enumerate(zip(geometry["stride"], geometry["padding"], geometry["dilation"], strict=True)):
        reach = d * (weight[2 + i] - 1)
        if transposed:
            out.append((x[2 + i] - 1) * s - 2 * p + reach + geometry["output_padding"][i] + 1)
        else:
            out.append((x[2 + i] + 2 * p - reach - 1) // s + 1)
    return out
