"""The kind of case that calls one op."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from kgopt.fuzz import shrinking
from kgopt.fuzz.calls import namespace, setup_lines, tf32_of
from kgopt.fuzz.catalogue import TARGETS
from kgopt.fuzz.check import ONLY_THEIRS, Check
from kgopt.fuzz.draw import Draw
from kgopt.fuzz.kind import Case
from kgopt.fuzz.printing import source
from kgopt.fuzz.spoil import spoil
from kgopt.fuzz.stage import note
from kgopt.fuzz.tensors import draw_gradient

__all__ = ["OpsKind"]

_HALVES = ("bfloat16", "float16")


class OpsKind:
    """Calls of single ops, functions, modules and pipelines."""

    name = "ops"
    seconds = 60.0

    def names(self) -> Sequence[str]:
        """The ops."""
        return list(TARGETS)

    def draw(self, rng: random.Random, device: str, only: Sequence[str] = ()) -> Case:
        """A call of a random op, or of one of ``only``."""
        names = [n for n in TARGETS if n in only] if only else list(TARGETS)
        target = TARGETS[rng.choices(names, [TARGETS[n].weight for n in names])[0]]
        d = Draw(rng, device)
        tensors, args = target.draw(d)
        case: Case = {
            "op": target.name,
            "via": rng.choice(target.vias),
            "dtype": d.dtype,
            "seed": rng.randrange(2**31),
            "tensors": tensors,
            "args": args,
            "grad": [],
            "dy": draw_gradient(rng),
            "tf32": rng.random() < 0.5,
            "autocast": None,
            "deterministic": rng.random() < 0.7,
            "poison": rng.random() < 0.25,
            "bad": None,
        }
        if case["via"] == "module":
            args.pop("allow_tf32", None)  # modules have no such argument
        if target.grads and rng.random() < 0.65:
            case["grad"] = [n for n in target.grads if n in tensors and rng.random() < 0.88]
        if target.autocast and d.dtype == "float32" and rng.random() < 0.12:
            case["autocast"] = rng.choice(_HALVES)
        _spare_slopes(case)
        _spare_prelu(case)
        if device == "cpu":
            _spare_onednn(case)
        else:
            _spare_grouped(case)
            _spare_double(case)
            _spare_pool(case)
        if rng.random() < 0.04:
            spoil(rng, case)
        return case

    def labels(self, case: Case) -> dict[str, str]:
        """The op, and the dtype, where TF32 and autocast are others than float32."""
        if case["autocast"]:
            return {"op": case["op"], "dtype": "autocast"}
        short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}[case["dtype"]]
        tf32 = case["dtype"] == "float32" and TARGETS[case["op"]].products and tf32_of(case)
        return {"op": case["op"], "dtype": "tf32" if tf32 else short}

    def smaller(self, case: Case) -> Iterator[Case]:
        """See :mod:`kgopt.fuzz.shrinking`."""
        return shrinking.smaller(case)

    def check(self, case: Case, device: str) -> str | None:
        """Runs the call and compares it with PyTorch's and float64's."""
        note("building tensors")
        names: dict[str, Any] = {**namespace()}
        try:
            exec("\n".join(setup_lines(case, device)), names)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            if case["bad"] is None and not any(text in str(error) for text in ONLY_THEIRS):
                raise
            return None  # what depends on the wrong thing cannot be made
        return Check(case, device, names).run()

    def source(self, case: Case, device: str) -> str:
        """See :mod:`kgopt.fuzz.printing`."""
        return source(case, device)


def _spare_slopes(case: Case) -> None:
    """Keeps NaN from those whose slopes there depend on PyTorch's kernel (its CPU's vectors, its GPU's) or function."""
    acts = "+".join(case["args"].get(name, "") for name in ("act", "gn_act", "pre_act"))
    if not any(name in acts for name in ("hardtanh", "hardsigmoid", "elu", "shrink", "clamp", "softsign")):
        return
    for name, spec in case["tensors"].items():
        overflows = spec["values"] == "large" and spec["dtype"] == "float16"
        if name != "dy" and (spec["values"] in ("nan", "inf", "-inf") or overflows):
            spec["values"] = "normal"


def _spare_prelu(case: Case) -> None:
    """Keeps the slopes of a PReLU of a size that networks learn.

    An infinite one makes an infinity of a value below zero by a rounding error, and NaN of zero. A large one takes the
    gradient of the norm's result out of float16's range, in which it is rounded; the comparison keeps it in float32.
    """
    slope = case["tensors"].get("slope")
    if slope is not None and slope["values"] in ("inf", "-inf", "large", "offset"):
        slope["values"] = "normal"


def _spare_grouped(case: Case) -> None:
    """Takes NaN and infinities out of grouped convolutions: cuDNN's spread them to other groups."""
    if case["args"].get("groups", 1) > 1:
        for spec in (*case["tensors"].values(), case["dy"]):
            if spec["values"] in ("nan", "inf", "-inf"):
                spec["values"] = "normal"


def _spare_double(case: Case) -> None:
    """cuDNN's grouped convolutions of channels_last float64 are wrong, by more than their size."""
    if case["dtype"] == "float64" and case["args"].get("groups", 1) > 1:
        for spec in case["tensors"].values():
            if "channels_last" in spec["layout"]:
                spec["layout"] = "contiguous"


def _spare_pool(case: Case) -> None:
    """ATen's max pooling of channels_last float64 reads shared memory at odd multiples of four bytes, and faults."""
    x = case["tensors"]["x"]
    if case["op"] == "max_pool" and x["dtype"] == "float64" and "channels_last" in x["layout"]:
        x["layout"] = "contiguous"


def _spare_onednn(case: Case) -> None:
    """Takes out what oneDNN does with memory that is not its own.

    Its gradients of halves, and of float32 volumes with a stride in depth, write past their buffers where a kernel
    reaches beyond the image: PyTorch's own call dies of it, or a later one.
    """
    if not TARGETS[case["op"]].products:
        return
    tensors, args = case["tensors"], case["args"]
    kernel = tensors["weight"]["shape"][2:]
    halves = case["dtype"] in _HALVES or case["autocast"]
    deep = case["dtype"] == "float32" and len(kernel) == 3 and args.get("stride", [1])[0] > 1
    if not halves and not deep:
        return
    image = tensors["x"]["shape"][-len(kernel) :] if kernel else []
    dilation = args.get("dilation", [1] * len(kernel))
    if all(d * (k - 1) < s for d, k, s in zip(dilation, kernel, image, strict=True)):
        return
    case["grad"] = [n for n in case["grad"] if n in ("gn_weight", "gn_bias", "residual")] if halves else []
    if case["op"] == "conv_backward":
        case["dtype"] = "float64"
        for spec in tensors.values():
            spec["dtype"] = "float64"
