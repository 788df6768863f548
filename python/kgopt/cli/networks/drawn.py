"""Networks drawn from the grammar of the fuzz, at sizes where the GPU has work to do, and some small ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from kgopt.cli.networks.network import Arguments
from kgopt.fuzz.grammar import draw_network
from kgopt.fuzz.trial import network_class, randomized

__all__ = ["Drawn", "drawn_networks"]

Json = dict[str, Any]

SMALL = 0.2  # of the networks wait for their launches
ELEMENTS = (2.0**28, 2.0**31.5)  # written by all operations together
FLOPS = 4e12
EDGES = {2: (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024), 3: (8, 12, 16, 24, 32, 48, 64, 96, 128, 160)}


class _Elements(TorchFunctionMode):
    """Counts the elements that functions return: about those that a call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.count += out.numel()
        return out


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One drawn network; the same for the same seed and index on every machine.

    Nothing is drawn before it is asked for: sizes are found by running the network without data, which takes seconds.
    """

    seed: int
    index: int

    @property
    def name(self) -> str:
        """As rows and ``--case`` have it."""
        return f"drawn {self.seed}/{self.index:03}"

    @property
    def package(self) -> str:
        """It needs none."""
        return ""

    @property
    def precisions(self) -> tuple[str, ...]:
        """In one precision: there are many of them."""
        return (random.Random(f"{self.seed}/{self.index}/precision").choice(("bf16", "bf16", "fp16", "tf32")),)

    @property
    def trains(self) -> str:
        """Two in five are trained, too."""
        return random.Random(f"{self.seed}/{self.index}/training").choice(("", "", "", "autocast", "autocast_fp16"))

    @property
    def before_training(self) -> None:
        """Nothing."""

    def drawn(self, small: bool = False) -> Json:
        """The grammar's own description, at the size that is measured, or as small as the fuzz has it."""
        return _drawn(f"{self.seed}/{self.index}", small)

    def shape(self, small: bool = False) -> list[int]:
        """Of its input."""
        found = self.drawn(small)
        return [found["batch"], found["channels"], *found["size"]]

    @contextlib.contextmanager
    def built(self, device: torch.device, small: bool = False) -> Iterator[nn.Module]:
        """The network in float32 on the device, in eval mode."""
        found = self.drawn(small)
        with network_class(found) as net:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(found["seed"])
                model = randomized(net(), found["seed"])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.bfloat16())
            yield model.to(device).eval()

    def arguments(self, device: torch.device, dtype: torch.dtype, small: bool = False) -> Arguments:
        """One tensor."""
        generator = torch.Generator().manual_seed(self.seed)
        return (torch.randn(self.shape(small), generator=generator).bfloat16().to(device, dtype),)


def drawn_networks(count: int, seed: int) -> list[Drawn]:
    """The first ones of a seed."""
    return [Drawn(seed, index) for index in range(count)]


@functools.lru_cache(maxsize=16)
def _drawn(name: str, small: bool) -> Json:
    rng = random.Random(f"{name}/network")
    for _ in range(50):
        found = _plain(draw_network(rng, "cpu", ("eager",)))
        if not _has_norm(found) or _cost(found) is None:
            continue
        sized = found if small else _sized(found, rng)
        if sized is not None:
            return sized
    raise RuntimeError(f"{name}: no network with a norm among 50")


def _plain(case: Json) -> Json:
    """Without what the fuzz does around a network. In float32 nothing is dropped: results can be compared."""
    return case | {"dtype": "float32", "how": "eager", "hooks": [], "copy": "", "home": "importable"}


def _has_norm(value: Any) -> bool:
    if isinstance(value, dict):
        if value.get("layer") == "norm":
            return value["norm"] in ("group", "instance")
        return any(_has_norm(item) for item in value.values())
    return isinstance(value, list) and any(_has_norm(item) for item in value)


def _cost(case: Json) -> tuple[float, float] | None:
    """Elements written and operations of a call; None where the network fails."""
    elements, flops = _Elements(), FlopCounterMode(display=False)
    try:
        with network_class(case) as net, torch.device("meta"), torch.no_grad(), flops, elements:
            net()(torch.empty(case["batch"], case["channels"], *case["size"]))
    except Exception:
        return None
    return float(elements.count), float(flops.get_total_flops())


def _sized(case: Json, rng: random.Random) -> Json | None:
    """The case at a size whose cost is near a drawn one; None where no size comes near."""
    if rng.random() < SMALL:
        return case | {"channels": rng.choice([8, 16, 32]), "size": [4 * s for s in case["size"]]}
    low, high = ELEMENTS
    wanted = low * (high / low) ** rng.random()
    channels, batch, stretch = (
        rng.choice([16, 32, 32, 48, 64, 128]),
        rng.choice([1, 1, 2, 4, 8, 16]),
        rng.uniform(0.8, 1.2),
    )
    ratios = [rng.choice([1.0, 1.0, 0.75]) for _ in range(case["dims"])]
    best = None
    while best is None and channels >= 8:
        for edge in EDGES[case["dims"]]:
            size = [max(4, int(edge * stretch * ratio)) for ratio in ratios]
            found = case | {"channels": channels, "batch": batch, "size": size}
            cost = _cost(found)
            if cost is None or cost[0] > wanted or cost[1] > FLOPS:
                break
            best = found if cost[0] > wanted / 8 else best
        channels, batch = channels // 2, max(1, batch // 2)
    return best
