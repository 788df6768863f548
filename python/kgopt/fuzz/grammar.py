"""Draws networks: what modules there are, how the code strings them together, and how the model is then used.

A network is a dict of JSON values: blocks in blocks, layers in the innermost. Blocks say what they want (a stride, a
number of groups); :mod:`kgopt.fuzz.writer` makes of it what fits the shape at hand, so every drawn network and every
part of one runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

__all__ = ["ACTIVATIONS", "HOWS", "draw_network", "simpler"]

Json = dict[str, Any]

# Those of kgopt's `act`, but for those that jump, of which rounding makes a difference of any size, and hardsigmoid,
# whose gradient PyTorch multiplies by a float's 1/6 in float64, too; then others that it has to leave alone.
_KNOWN = (
    *("relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "hardswish", "hardtanh", "elu", "mish"),
    *("softplus", "relu6", "selu", "leaky_relu_0.2", "elu_0.5", "logsigmoid", "softsign", "celu_2", "softplus_2"),
    *("hardtanh_0", "tanhshrink", "softshrink", "clamp", "clamp_min"),
)
ACTIVATIONS = (*_KNOWN, "prelu")
HOWS = ("eager", "autocast", "backend", "compiled")

_STYLES = (
    *("statements", "statements", "names", "expression", "sequential", "sequential", "nested", "ordered", "subclass"),
    *("added", "list", "dict", "sliced", "indexed", "reduced", "functional", "functional", "walrus", "conditional"),
)
_FILMS = ("film", "film steps", "film branch", "film addcmul", "film in place", "film shift")
_SUMS = (
    *("x + h", "h + x", "h += x", "h += x", "x += h", "torch.add", "scaled", "divided", "h.add", "add_", "chained"),
    *("halved", "rooted"),
)
_FORMS = ("module", "module", "functional", "method", "torch", "shared")


def _layer(rng: random.Random) -> Json:
    """Any layer."""
    kind = rng.choices(["conv", "tconv", "norm", "act", "drop", "pool", "up", "other"], [24, 4, 30, 26, 5, 3, 3, 5])[0]
    return _DRAW[kind](rng)


def _conv(rng: random.Random) -> Json:
    return {
        "layer": "conv",
        "kernel": rng.choice([1, 1, 2, 3, 3, 3, 3, 5, "flat"]),
        "stride": rng.choice([1, 1, 1, 1, 2]),
        "dilation": rng.choice([1, 1, 1, 2]),
        "groups": rng.choice(["1", "1", "1", "2", "depthwise"]),
        "padding": rng.choice(["same", "half", "half", "half", "0"]),
        "mode": rng.choice(["zeros"] * 5 + ["reflect", "replicate", "circular"]),
        "bias": rng.random() < 0.7,
        "out": rng.choice([0.5, 1, 1, 1, 1, 2]),
    }


def _tconv(rng: random.Random) -> Json:
    return {
        "layer": "tconv",
        "kernel": rng.choice([1, 2, 3, 3, 4]),
        "stride": rng.choice([1, 1, 2]),
        "extra": rng.random() < 0.2,
        "groups": rng.choice(["1", "1", "2"]),
        "bias": rng.random() < 0.6,
        "out": rng.choice([0.5, 1, 1, 2]),
    }


def _norm(rng: random.Random) -> Json:
    kind = rng.choices(
        [
            *("group", "instance", "batch", "layer", "rms", "unit", "centered", "pixel", "tracked", "subclass"),
            *("branch", "acted", "none"),
        ],
        [48, 17, 6, 5, 4, 4, 4, 2, 3, 2, 3, 3, 2],
    )[0]
    return {
        "layer": "norm",
        "norm": kind,
        "groups": rng.choice([1, 2, 2, 4, "all"]),
        "affine": rng.random() < 0.75,
        "eps": rng.choice([1e-5, 1e-5, 1e-6, 1e-3]),
        "shared": rng.random() < 0.06,
        "functional": rng.random() < 0.12,
    }


def _act(rng: random.Random) -> Json:
    # Those with kernels come more often than those without.
    name = rng.choice(_KNOWN) if rng.random() < 0.85 else rng.choice(ACTIVATIONS)
    return {"layer": "act", "act": name, "form": rng.choice(_FORMS), "inplace": rng.random() < 0.35}


def _drop(rng: random.Random) -> Json:
    return {"layer": "drop", "kind": rng.choice(["", "", "2d", "alpha", "path"]), "p": rng.choice([0.0, 0.3, 0.5]),
            "form": rng.choice(["module", "functional"])}  # fmt: skip


def _pool(rng: random.Random) -> Json:
    return {
        "layer": "pool",
        "pool": rng.choice(["max", "avg", "adaptive"]),
        "form": rng.choice(["module", "functional"]),
    }


def _up(rng: random.Random) -> Json:
    return {
        "layer": "up",
        "mode": rng.choice(["nearest", "linear", "sized"]),
        "form": rng.choice(["module", "functional"]),
    }


def _other(rng: random.Random) -> Json:
    names = ["identity", "scale", "contiguous", "clone", "flip", "pad", "clamp", "replicate", "softmax", "roundtrip"]
    return {"layer": "other", "other": rng.choice(names)}


_DRAW = {"conv": _conv, "tconv": _tconv, "norm": _norm, "act": _act, "drop": _drop, "pool": _pool, "up": _up,
         "other": _other}  # fmt: skip


def _layers(rng: random.Random) -> list[Json]:
    """A few layers; mostly in the orders that networks have, with other things in between."""
    how = rng.random()
    if how < 0.25:
        return [_layer(rng) for _ in range(rng.randint(1, 4))]
    order = rng.choice(
        ["cna", "cna", "nac", "nac", "can", "cnda", "na", "cn", "cnaa", "acn", "tan", "cnacn", "nacnac", "ncna"]
    )
    made = []
    for letter in order:
        made.append(_DRAW[{"c": "conv", "n": "norm", "a": "act", "d": "drop", "t": "tconv"}[letter]](rng))
        if rng.random() < 0.06:
            made.append(_layer(rng))
    return made


def _chain(rng: random.Random) -> Json:
    return {"block": "chain", "layers": _layers(rng), "style": rng.choice(_STYLES)}


def _blocks(rng: random.Random, depth: int, most: int = 2) -> list[Json]:
    return [_block(rng, depth) for _ in range(rng.randint(1, most))]


def _block(rng: random.Random, depth: int) -> Json:
    if depth == 0 or rng.random() < 0.3:
        return _chain(rng)
    kind = rng.choices(list(_COMPOSED), [weight for weight, _ in _COMPOSED.values()])[0]
    block = {"block": kind, "own": rng.random() < 0.45, **_COMPOSED[kind][1](rng, depth - 1)}
    if block["own"]:
        block["wrap"] = rng.choice(
            ["", "", "", "kwargs", "default", "tuple", "dict", "dataclass", "inherited", "extra"]
        )
        block["decorated"] = rng.random() < 0.08
    return block


def _residual(rng: random.Random, depth: int) -> Json:
    return {
        "body": _blocks(rng, depth),
        "form": rng.choice(_SUMS),
        "first": rng.choice(["shortcut", "body"]),
        "shortcut": rng.choice(["", "", "conv", "norm"]),
        "after": _act(rng) if rng.random() < 0.4 else None,
    }


_COMPOSED: dict[str, tuple[float, Any]] = {
    "residual": (30, _residual),
    "cat": (8, lambda rng, d: {"bodies": [_blocks(rng, d, 1), _blocks(rng, d, 1)]}),
    "unet": (
        10,
        lambda rng, d: {
            "body": _blocks(rng, d),
            "down": rng.choice(["max", "avg", "conv"]),
            "up": rng.choice(["nearest", "linear", "tconv"]),
            "join": rng.choice(["cat", "cat", "add", "skips"]),
        },
    ),
    "branch": (
        10,
        lambda rng, d: {
            "test": rng.choice(["self.training", "self.flag", "batch", "not self.training", "is not None", "grad"]),
            "bodies": [_blocks(rng, d, 1), _blocks(rng, d, 1)],
            "moved": rng.choice([None, None, _act(rng)]),
        },
    ),
    "shared": (7, lambda rng, d: {"body": _blocks(rng, d), "times": rng.choice([2, 2, 3])}),
    "loop": (
        8,
        lambda rng, d: {
            "bodies": [_blocks(rng, d, 1) for _ in range(rng.choice([1, 2, 2, 3]))],
            "form": rng.choice(["for", "enumerate", "index", "zip", "values", "reversed", "while", "comprehension"]),
        },
    ),
    "checkpoint": (5, lambda rng, d: {"body": _blocks(rng, d), "reentrant": rng.random() < 0.25}),
    "gate": (9, lambda rng, d: {"form": rng.choice(["se", "spatial", "softmax", *_FILMS])}),
    "views": (
        6,
        lambda rng, d: {
            "form": rng.choice(["tokens", "grouped", "shuffle", "slices", "chunks", "stack", "unfold"]),
            "body": _blocks(rng, d, 1),
        },
    ),
    "wrapped": (
        10,
        lambda rng, d: {
            "body": _blocks(rng, d),
            "how": rng.choice(
                ["helper", "lambda", "nested", "try", "with", "static", "partial", "method", "suppress", "kept"]
            ),
        },
    ),
}


def _tail(rng: random.Random) -> str:
    return rng.choice(["", "", "", "", "", "mean", "mean_keep", "logsumexp", "sum", "amax", "linear", "adaptive"])


def _hooks(rng: random.Random, how: str) -> list[Json]:
    if how in ("backend", "compiled") or rng.random() < 0.6:
        return []
    kinds = ["forward", "forward", "forward_pre", "backward", "backward_pre", "replace"]
    return [
        {"at": rng.random(), "kind": rng.choice(kinds), "late": rng.random() < 0.5}
        for _ in range(rng.choice([1, 1, 2]))
    ]


def _call(rng: random.Random, train: bool, how: str) -> Json:
    return {
        "train": train,
        "grad": train or rng.random() < 0.3,
        "batch": rng.choice([None, None, 1, 3]),
        "grow": rng.choice([0, 0, 1, 3]),
        "format": rng.choice(["contiguous"] * 4 + ["channels_last", "channels_last", "slice", "transposed"]),
        "functional": how == "eager" and rng.random() < 0.12,
    }


def draw_network(rng: random.Random, device: str, hows: tuple[str, ...]) -> Json:
    """A network and all that is done with it. ``hows``: of :data:`HOWS`, those that may be drawn."""
    weights = {"eager": 86.0, "autocast": 10.0, "backend": 2.0, "compiled": 2.0}
    how = rng.choices(hows, [weights[h] for h in hows])[0]
    dims = rng.choice([2, 2, 3])
    if how == "autocast":
        dtype = "float32"
    elif device == "cpu":
        dtype = rng.choices(["float64", "float32", "bfloat16"], [80, 13, 7])[0]
    else:
        dtype = rng.choices(["float64", "float32", "bfloat16", "float16"], [30, 35, 22, 13])[0]
    calls = [_call(rng, train, how) for train in (True, False)]
    calls[0] |= {"batch": None, "grow": 0}
    if how not in ("backend", "compiled"):
        calls += [_call(rng, rng.random() < 0.4, how) for _ in range(rng.choice([0, 0, 1, 2]))]
    channels_last = rng.choice([False, False, True, "auto"])
    measured = rng.random() < (0.1 if device == "cpu" else 0.3)
    return {
        "seed": rng.randrange(2**31),
        "dims": dims,
        "channels": rng.choice([4, 4, 4, 6, 8]),
        "batch": rng.choice([1, 2, 2, 3]),
        "size": [rng.randint(4, 9 if dims == 2 else 6) for _ in range(dims)],
        "body": _blocks(rng, rng.choice([0, 1, 2, 2, 3]), 3),
        "tail": _tail(rng),
        "root": rng.choice(["module", "module", "module", "sequential"]),
        "returns": rng.choice(["tensor", "tensor", "tensor", "tuple", "dict"]),
        "dtype": dtype,
        "tf32": rng.random() < 0.5,
        "how": how,
        # On the CPU in channels_last, PyTorch's instance norm gives wrong gradients for one sample.
        "always": not measured or (device == "cpu" and channels_last is True),
        "channels_last": channels_last,
        "example": rng.random() < (0.15 if device == "cpu" else 0.3),
        "optimized_in": rng.choice(["train", "eval"]),
        "twice": rng.random() < 0.05,
        "copy": rng.choice(["", "", "", "", "deepcopy", "pickle"]) if how == "eager" else "",
        "home": rng.choice(["importable", "importable", "executed"]),
        "hooks": _hooks(rng, how),
        "calls": calls,
        "slower": rng.random() < 0.2,  # where it is measured, the whole model is found slower, and so undone
        "recompute": rng.random() < 0.3,
    }


# ----------------------------------------------------------------------------------------------------------------------
# Simpler ones


def _simpler_list(items: list[Any], least: int) -> Iterator[list[Any]]:
    """Fewer items, then one of them simpler."""
    if len(items) > least:
        if len(items) > 2:
            half = len(items) // 2
            yield items[:half]
            yield items[half:]
        for i in range(len(items)):
            yield items[:i] + items[i + 1 :]
    for i, item in enumerate(items):
        for other in _simpler_item(item):
            yield [*items[:i], *other, *items[i + 1 :]]


_PLAIN: dict[str, Any] = {
    "style": "statements",
    "form": "module",
    "own": False,
    "wrap": "",
    "decorated": False,
    "inplace": False,
    "shared": False,
    "functional": False,
    "affine": True,
    "eps": 1e-5,
    "after": None,
    "moved": None,
    "shortcut": "",
    "first": "shortcut",
    "stride": 1,
    "dilation": 1,
    "mode": "zeros",
    "padding": "half",
    "out": 1,
    "extra": False,
    "kernel": 3,
    "reentrant": False,
    "bias": True,
}
_PLAIN_CASE: dict[str, Any] = {
    "how": "eager",
    "dtype": "float64",
    "hooks": [],
    "copy": "",
    "home": "importable",
    "channels_last": False,
    "example": False,
    "slower": False,
    "recompute": False,
    "always": True,
    "twice": False,
    "returns": "tensor",
    "root": "module",
    "tail": "",
    "tf32": False,
    "optimized_in": "eval",
}
_PLAIN_CALL = {"batch": None, "grow": 0, "format": "contiguous", "functional": False, "grad": False, "train": False}


def _simpler_item(item: Json) -> Iterator[list[Json]]:
    """What may stand in the place of a block or a layer."""
    if "layer" in item:
        plain = dict(_PLAIN)
        if item["layer"] == "act":
            if item["act"] != "relu":
                yield [item | {"act": "relu"}]
        elif item["layer"] == "norm":
            if item["norm"] != "group":
                yield [item | {"norm": "group"}]
        elif item["layer"] == "conv" and item["groups"] != "1":
            yield [item | {"groups": "1"}]
    else:
        plain = dict(_PLAIN)
        if item["block"] == "residual":
            plain["form"] = "x + h"
        elif item["block"] != "chain":
            plain.pop("form")
        inner = item.get("body")
        if inner is not None:
            yield inner
            for body in _simpler_list(inner, 0):
                yield [item | {"body": body}]
        for i, body in enumerate(item.get("bodies", [])):
            yield body
            if item["block"] == "loop" and len(item["bodies"]) > 1:
                yield [item | {"bodies": item["bodies"][:i] + item["bodies"][i + 1 :]}]
            for other in _simpler_list(body, 0):
                yield [item | {"bodies": [*item["bodies"][:i], other, *item["bodies"][i + 1 :]]}]
        if "layers" in item:
            for layers in _simpler_list(item["layers"], 1):
                yield [item | {"layers": layers}]
    for key, value in plain.items():
        if key in item and item[key] != value:
            yield [item | {key: value}]


def simpler(case: Json) -> Iterator[Json]:
    """Simpler networks and simpler uses, the most drastic first; each has fewer parts or one more plain value."""
    if len(case["body"]) > 1:
        for body in _simpler_list(case["body"], 1):
            if len(body) < len(case["body"]):
                yield case | {"body": body}
    for key, value in _PLAIN_CASE.items():
        if case[key] != value:
            yield case | {key: value}
    for i, hook in enumerate(case["hooks"]):
        yield case | {"hooks": case["hooks"][:i] + case["hooks"][i + 1 :]}
        if hook["at"] != 0.0:
            yield case | {"hooks": [*case["hooks"][:i], hook | {"at": 0.0}, *case["hooks"][i + 1 :]]}
    calls = case["calls"]
    if len(calls) > 1:
        for i in range(len(calls)):
            yield case | {"calls": [calls[i]]}
            yield case | {"calls": calls[:i] + calls[i + 1 :]}
    for body in _simpler_list(case["body"], 1):
        if body:
            yield case | {"body": body}
    for i, call in enumerate(calls):
        for key, value in _PLAIN_CALL.items():
            if call[key] != value:
                yield case | {"calls": [*calls[:i], call | {key: value}, *calls[i + 1 :]]}
    if case["dims"] == 3:
        yield case | {"dims": 2, "size": case["size"][:2]}
    for i, size in enumerate(case["size"]):
        if size > 4:
            yield case | {"size": [*case["size"][:i], 4, *case["size"][i + 1 :]]}
    for key, least in (("batch", 1), ("channels", 4)):
        if case[key] > least:
            yield case | {key: least}
