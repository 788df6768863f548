"""Bad input: one thing in a call is made wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kgopt.fuzz.kind import Case

__all__ = ["spoil"]


# What a direct call of a backward op is not given, or what alone it is given.
_UNUSED = {
    *(("dy", op) for op in ("upsample_linear_backward", "upsample_nearest_backward", "mean_backward")),
    ("bias", "conv_backward"),
}


def _ways(rng: random.Random, case: Case) -> dict[str, Callable[[], Any]]:
    tensors, args = case["tensors"], case["args"]
    others = [n for n in tensors if n != "x" and (n, case["op"]) not in _UNUSED]
    ways: dict[str, Callable[[], Any]] = {}
    dtypes = ["float32", "bfloat16", "float16", "float64", "int64", "complex64"]

    def retype(name: str) -> None:
        spec = tensors[name]
        allowed = {spec["dtype"], "float32"} if spec["dtype"] in ("bfloat16", "float16") else {spec["dtype"]}
        if (name, case["op"]) == ("dy", "group_norm_mean_backward"):
            allowed |= {"float32", "bfloat16", "float16", "float64"}  # a gradient of means is taken as it comes
        spec["dtype"] = rng.choice([d for d in dtypes if d not in allowed])
        spec["values"], spec["layout"] = "one", "contiguous"

    def grow(name: str) -> None:
        shape = tensors[name]["shape"]
        if not shape:
            shape.append(1)
        at = rng.randrange(len(shape)) if name in ("weight", "residual", "dy") else 0
        shape[at] += rng.choice([1, 1, 3])
        tensors[name]["layout"] = "contiguous"

    def rerank(name: str) -> None:
        spec = tensors[name]
        spec["shape"] = spec["shape"][:-1] if rng.random() < 0.5 and len(spec["shape"]) > 1 else [*spec["shape"], 2]
        spec["layout"] = "contiguous"

    def number(name: str, values: list[int]) -> None:
        if isinstance(args[name], list) and args[name]:
            args[name] = list(args[name])
            args[name][rng.randrange(len(args[name]))] = rng.choice(values)
        else:
            args[name] = rng.choice(values)

    if others:
        ways["dtype"] = lambda: retype(rng.choice(others))
        ways["shape"] = lambda: grow(rng.choice(others))
        ways["meta"] = lambda: tensors[rng.choice(others)].update(meta=True)
        ways["rank"] = lambda: rerank(rng.choice(others))
    if list(tensors) == ["x"]:
        ways["integers"] = lambda: tensors["x"].update(
            dtype=rng.choice(["int64", "complex64", "bool"]), values="one", layout="contiguous"
        )
    if "num_groups" in args:
        ways["num_groups"] = lambda: number("num_groups", [0, -1, 7919])
        ways["x rank"] = lambda: tensors["x"].update(shape=tensors["x"]["shape"][:1], layout="contiguous")
    for name, values in (
        ("stride", [0, -1]),
        ("padding", [-1, -3]),
        ("dilation", [0, -1]),
        ("groups", [0, -1, 7919]),
        ("output_padding", [9, -1]),
        ("kernel_size", [0, -1, 999]),
        ("dims", [9, -9]),
        ("factors", [0, -1]),
    ):
        if isinstance(args.get(name), (list, int)) and args[name] != []:
            ways[name] = lambda name=name, values=values: number(name, values)  # type: ignore[misc]
    for name in ("act", "gn_act", "pre_act"):
        if name in args:
            ways[name] = lambda name=name: args.update({name: rng.choice(["swish", "relu+foo", "RELU"])})  # type: ignore[misc]
    return ways


def spoil(rng: random.Random, case: Case) -> None:
    """Makes one thing of the case wrong, and notes what. Nothing is differentiated then."""
    if case["autocast"]:
        return
    ways = _ways(rng, case)
    if not ways:
        return
    how = rng.choice(sorted(ways))
    ways[how]()
    case["bad"], case["grad"] = how, []
