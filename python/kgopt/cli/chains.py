"""``bench --suite chains``: random members of the family of the first and third pipeline.

A narrow convolution (1 to 32 input, up to 128 output channels), GroupNorm, and either the mean of each sample or tanh,
hardswish, residual and logsumexp: kernel sizes 1 to 7, strides, padding, dilation, conv groups, from one small image to
batches that fill a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kgopt.cli.cases import Case, batch_slices
from kgopt.cli.floor import Work
from kgopt.cli.models import PIPELINES, Pipeline, randomize
from kgopt.cli.results import Row, group_rows
from kgopt.cli.sweep import log_uniform
from kgopt.cli.text import ratio_text
from kgopt.ops import conv_sizes

__all__ = ["RandomChain", "chain_cases", "chains_summary", "random_chains"]

_MOST_X, _MOST_OUTPUT, _MOST_FLOPS = 2**24, 2**27, 3e11


@dataclasses.dataclass(frozen=True)
class RandomChain:
    """One random chain. Sizes are those of the convolution, spatial dims last."""

    index: int
    pipeline: Pipeline
    shape: tuple[int, ...]  # of x
    c_out: int
    norm_groups: int
    conv_groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def output(self) -> tuple[int, ...]:
        """Shape of the convolution's output."""
        weight = (self.c_out, self.shape[1] // self.conv_groups, *self.kernel)
        none = (0,) * len(self.kernel)
        return tuple(
            conv_sizes(self.shape, weight, self.stride, self.padding, self.dilation, none, self.conv_groups, False)
        )

    @property
    def flops(self) -> float:
        """Of the convolution, two a multiply-add."""
        return 2.0 * math.prod(self.output) * self.shape[1] / self.conv_groups * math.prod(self.kernel)

    @property
    def name(self) -> str:
        """Unique in a run: the index and what is drawn."""

        def sizes(values: Sequence[int]) -> str:
            return "x".join(map(str, values))

        parts = [
            f"{self.index:03d}:",
            "mean" if len(self.kernel) == 3 else "lse",
            sizes(self.shape),
            f"to {self.c_out}",
        ]
        parts += [f"k{sizes(self.kernel)}", f"g{self.norm_groups}"]
        for letter, values, usual in (("s", self.stride, 1), ("p", self.padding, 0), ("d", self.dilation, 1)):
            if any(value != usual for value in values):
                parts.append(f"{letter}{sizes(values)}")
        if self.conv_groups > 1:
            parts.append(f"conv groups {self.conv_groups}")
        return " ".join(parts)

    def plain(self) -> nn.Module:
        """The plain PyTorch model, fp32 on the CPU, seeded."""
        options: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        convolution: Any = nn.Conv3d if len(self.kernel) == 3 else nn.Conv2d
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.index)
            model = self.pipeline.plain(self.shape[1], self.c_out, 1, self.norm_groups)
            model.conv = convolution(self.shape[1], self.c_out, self.kernel, groups=self.conv_groups, **options)
        return randomize(model, self.index + 1)

    def kgopt(self, plain: nn.Module) -> nn.Module:
        """The kgopt module with the plain one's parameters, device and dtype."""
        import kgopt.nn

        like = next(plain.parameters())
        model: nn.Module = getattr(kgopt.nn, self.pipeline.module)(
            self.shape[1], self.c_out, self.kernel, self.norm_groups, stride=self.stride, padding=self.padding,
            dilation=self.dilation, conv_groups=self.conv_groups, device=like.device, dtype=like.dtype,
        )  # fmt: skip
        model.load_state_dict(plain.state_dict(), strict=True)
        return model

    def work(self, shape: tuple[int, ...], itemsize: int, direction: str) -> Work:
        """As ``Pipeline.work``, for a batch of shape[0]."""
        samples = shape[0] / self.shape[0]
        x_bytes = math.prod(shape) * itemsize
        y_bytes = shape[0] * (1 if len(self.kernel) == 3 else math.prod(self.output[2:])) * itemsize
        flops = self.flops * samples
        special = math.prod(self.output) * self.pipeline.special_per_element * samples
        if direction == "training":
            return Work(3 * x_bytes + 2 * y_bytes, 3 * flops, 2 * special)
        return Work(x_bytes + y_bytes, flops, special)


def _draw(rng: random.Random, index: int) -> RandomChain:
    members = [pipeline for pipeline in PIPELINES if not pipeline.transposed]
    while True:
        pipeline = rng.choice(members)
        rank = len(pipeline.headline) - 2
        c_in = round(log_uniform(rng, 1, 32))
        conv_groups = rng.choice([g for g in (1, 2, 4) if c_in % g == 0]) if rng.random() < 0.2 else 1
        norm_groups = rng.choice([1, 2, 4, 8, 16])
        unit = math.lcm(norm_groups, conv_groups)
        c_out = unit * max(1, round(log_uniform(rng, 1, 128)) // unit)
        sizes = [1, 3, 5, 7] if rank == 2 else [1, 2, 3, 5]
        kernel = tuple(rng.choices(sizes, [1, 5, 2, 1], k=rank))
        stride = tuple(rng.choices([1, 2], [4, 1], k=rank))
        dilation = tuple(rng.choices([1, 2], [6, 1], k=rank))
        padding = tuple(rng.randint(0, k // 2) for k in kernel)
        batch = round(log_uniform(rng, 1, 128))
        left = round(log_uniform(rng, 2**10, _MOST_X)) / (batch * c_in)
        edge = max(4.0, left ** (1 / rank))
        spatial = tuple(max(4, round(edge * rng.uniform(0.6, 1.5))) for _ in range(rank))
        shape = (batch, c_in, *spatial)
        chain = RandomChain(index, pipeline, shape, c_out, norm_groups, conv_groups, kernel, stride, padding, dilation)
        output = chain.output
        if min(output) < 1 or math.prod(output) > _MOST_OUTPUT or chain.flops > _MOST_FLOPS:
            continue
        # Of one value a group PyTorch says that it cannot be normalized.
        if math.prod(shape) <= _MOST_X and math.prod(output[1:]) // norm_groups >= 2:
            return chain


def random_chains(count: int, seed: int) -> list[RandomChain]:
    """The first `count` chains of a seed. More of the same seed begin with the same ones."""
    rng = random.Random(seed)
    return [_draw(rng, index) for index in range(count)]


def chain_cases(count: int, seed: int) -> list[Case]:
    """They as cases of the bench."""
    return [
        Case(
            "chains", chain.name, chain.shape, plain=chain.plain, kgopt=chain.kgopt, work=chain.work,
            slices=batch_slices, backward="training", layouts=False, gpu_clock=True,
        )
        for chain in random_chains(count, seed)
    ]  # fmt: skip


def chains_summary(rows: list[Row]) -> str:
    """How many are slower than the better of eager and torch.compile, by how much the slower ones, and the median.

    On a GPU that is the GPU's own time; how many are slower by a call's, launches and all, is said beside it.
    """
    ratios = []
    slow_calls = calls = 0
    for group in group_rows(rows):
        best, ours = group.best(("eager", "compile")), group.time("kgopt")
        if best and ours:
            ratios.append((ours / best[1], group.case, group.dtype))
        others = [us for name in ("eager", "compile") if (us := group.rows.get(name, {}).get("call_us"))]
        if others and (own := group.rows.get("kgopt", {}).get("call_us")):
            calls += 1
            slow_calls += own > min(others)
    if not ratios:
        return "no chain was timed"
    ratios.sort()
    slow = [f"{case} {dtype}: {ratio:.2f}" for ratio, case, dtype in ratios if ratio > 1]
    head = (
        f"{len(ratios)} measurements: kgopt is {ratio_text(1 / ratios[len(ratios) // 2][0])} as fast as the better of "
        f"eager and torch.compile at the median; {len(slow)} are slower"
    )
    if calls:
        head += f" ({slow_calls} of {calls} by the time of a call, launches and all)"
    return "\n".join([head, *(f"  slower: {line}" for line in reversed(slow))])
