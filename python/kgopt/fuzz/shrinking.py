"""Simpler forms of a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from kgopt import _acts
from kgopt.fuzz.catalogue import TARGETS
from kgopt.fuzz.draw import conv_sizes
from kgopt.fuzz.kind import Case
from kgopt.fuzz.tensors import simpler_tensors

__all__ = ["smaller"]


def _with(case: Case, **changes: Any) -> Case:
    return {**copy.deepcopy(case), **changes}


def _with_args(case: Case, **changes: Any) -> Case:
    out = copy.deepcopy(case)
    out["args"].update(changes)
    return _fitted(out)


def _transposed(case: Case) -> bool:
    return bool(case["args"].get("transposed", "transpose" in case["op"]))


def _fitted(case: Case) -> Case:
    """Shapes that follow from those of x and the weight."""
    tensors, args = case["tensors"], case["args"]
    x = tensors["x"]["shape"] if "x" in tensors else []
    sizes: dict[str, list[int]] = {}
    if TARGETS[case["op"]].products:
        weight, transposed = tensors["weight"]["shape"], _transposed(case)
        geometry = {"stride": [1, 1, 1], "padding": [0, 0, 0], "dilation": [1, 1, 1], "groups": 1, **args}
        c_out = weight[1] * geometry["groups"] if transposed else weight[0]
        sizes["bias"] = [c_out]
        norm = (
            c_out
            if case["op"].startswith("conv3d_group_norm_mean") or "relu" in case["op"] or "tanh" in case["op"]
            else x[1]
        )
        sizes["gn_weight"] = sizes["gn_bias"] = [norm]
        if len(x) == len(weight) and isinstance(geometry["padding"], list) and 0 not in geometry["stride"]:
            if len(geometry["stride"]) != len(x) - 2:
                geometry.update({k: geometry[k][: len(x) - 2] for k in ("stride", "padding", "dilation")})
            sizes["residual"] = sizes["dy"] = [max(0, s) for s in conv_sizes(x, weight, geometry, transposed)]
    elif len(x) >= 2 and "num_groups" in args:
        sizes["weight"] = sizes["bias"] = [x[1]]
        sizes["dy"] = sizes["drstd"] = [x[0], args["num_groups"]]
        if case["op"] == "group_norm_backward":
            sizes["dy"] = x
        elif case["op"] == "group_norm_mean_backward":
            sizes["dy"] = x[:1]
        elif "logsumexp" in case["op"]:
            sizes["dy"] = [x[0], 1, *x[2:]]
    elif case["op"].startswith("upsample"):
        factors = args.get("factors", [2] * (len(x) - 2))
        sizes["dy"] = sizes["residual"] = [*x[:2], *(s * f for s, f in zip(x[2:], factors, strict=True))]
    elif case["op"] == "activation_backward":
        sizes["dy"] = x
    elif "dims" in args and "dy" in tensors:
        keep, dims = args["keepdim"], args["dims"]
        sizes["dy"] = [1 if i in dims else s for i, s in enumerate(x) if keep or i not in dims]
    for name, shape in sizes.items():
        if name in tensors:
            tensors[name]["shape"] = list(shape)
    return case


def _sizes(case: Case) -> Iterator[Case]:
    """One size of x or the weight smaller, or groups merged; what depends on it follows."""
    args = case["args"]
    x = case["tensors"]["x"]["shape"]
    products = TARGETS[case["op"]].products
    channels = 1 if products or "num_groups" in args else None

    def resized(change: Callable[[Case, list[int]], None]) -> Case:
        out = copy.deepcopy(case)
        change(out, out["tensors"]["x"]["shape"])
        return _fitted(out)

    def steps(size: int, least: int) -> list[int]:
        return [s for s in dict.fromkeys([least, size // 2, size - 1]) if least <= s < size]

    for d in range(len(x)):
        if d == channels:
            continue
        for s in steps(x[d], 1):
            yield resized(lambda out, shape, d=d, s=s: shape.__setitem__(d, s))  # type: ignore[misc]
    if products:
        yield from _channels_of_products(case, resized, steps)
    elif "num_groups" in args and len(x) > 1:
        groups = args["num_groups"]
        if groups > 0 and x[1] % groups == 0:
            per = x[1] // groups
            for g, p in [*((g, per) for g in steps(groups, 1)), *((groups, p) for p in steps(per, 1))]:

                def change(out: Case, shape: list[int], g: int = g, p: int = p) -> None:
                    shape[1], out["args"]["num_groups"] = g * p, g

                yield resized(change)


def _channels_of_products(case: Case, resized: Any, steps: Any) -> Iterator[Case]:
    args = case["args"]
    w, groups, transposed = case["tensors"]["weight"]["shape"], args.get("groups", 1), _transposed(case)
    norm = args.get("num_groups", 0)
    behind = "gn_act" not in args  # the norm stands behind the convolution
    c_in, c_out = (w[0], w[1] * groups) if transposed else (w[1] * groups, w[0])

    def change(out: Case, shape: list[int], g: int, i: int, o: int, n: int) -> None:
        shape[-(len(w) - 1)] = i
        weight = out["tensors"]["weight"]["shape"]
        weight[0], weight[1] = (i, o // g) if transposed else (o, i // g)
        if "groups" in out["args"]:
            out["args"]["groups"] = g
        if norm:
            out["args"]["num_groups"] = n

    if groups > 1 and c_in % groups == 0 and c_out % groups == 0:
        yield resized(lambda out, shape: change(out, shape, 1, c_in // groups, c_out // groups, 1))
        half = max(1, groups // 2)
        yield resized(lambda out, shape: change(out, shape, half, c_in // groups * half, c_out // groups * half, 1))
    if groups >= 1 and c_in % groups == 0 and c_out % groups == 0:
        for per in steps(c_in // groups, 1):
            n = norm if behind or not norm or (per * groups) % norm == 0 else 1
            yield resized(lambda out, shape, per=per, n=n: change(out, shape, groups, per * groups, c_out, n))
        for per in steps(c_out // groups, 1):
            n = norm if not behind or not norm or (per * groups) % norm == 0 else 1
            yield resized(lambda out, shape, per=per, n=n: change(out, shape, groups, c_in, per * groups, n))
    for n in steps(norm, 1):
        yield resized(lambda out, shape, n=n: out["args"].update(num_groups=n))
    for d in range(2, len(w)):
        for k in steps(w[d], 1):
            yield resized(lambda out, shape, d=d, k=k: out["tensors"]["weight"]["shape"].__setitem__(d, k))


def _arguments(case: Case) -> Iterator[Case]:
    args = case["args"]
    for name in ("backend", "allow_tf32", "padding_mode"):
        if name in args:
            out = copy.deepcopy(case)
            del out["args"][name]
            yield out
    for name in ("act", "gn_act", "pre_act"):
        chain = _acts.split(args.get(name, "none"))
        if chain != ["none"]:
            yield _with_args(case, **{name: "none"})
            if len(chain) > 1:
                for i in range(len(chain)):
                    yield _with_args(case, **{name: "+".join(chain[:i] + chain[i + 1 :])})
    for name, plain in (("stride", 1), ("dilation", 1), ("padding", 0), ("output_padding", 0), ("pad", 0)):
        value = args.get(name)
        if isinstance(value, str):
            yield _with_args(case, **{name: [0] * len(args["stride"])})
        elif value and value != [plain] * len(value):
            yield _with_args(case, **{name: [plain] * len(value)})
            for i, v in enumerate(value):
                if v != plain:
                    yield _with_args(case, **{name: [*value[:i], plain, *value[i + 1 :]]})
                    if v > plain + 1:
                        yield _with_args(case, **{name: [*value[:i], v - 1, *value[i + 1 :]]})
    for name, simple in (("divisor", 1.0), ("eps", 1e-5), ("moments", False), ("keepdim", False)):
        if name in args and args[name] != simple:
            yield _with_args(case, **{name: simple})


def smaller(case: Case) -> Iterator[Case]:
    """Simpler calls, the most drastic first. Each changes one thing for good, so that chains of them end."""
    tensors = case["tensors"]
    if case["grad"]:
        yield _with(case, grad=[])
        for n in case["grad"]:
            if len(case["grad"]) > 1:
                yield _with(case, grad=[g for g in case["grad"] if g != n])
    for key, simple in (("autocast", None), ("poison", False), ("tf32", False), ("deterministic", True), ("via", "op")):
        if case[key] != simple and (key != "via" or "op" in TARGETS[case["op"]].vias):
            yield _with(case, **{key: simple})
    for key, simple in (("layout", "contiguous"), ("values", "normal")):
        if case["grad"] and case["dy"][key] != simple:
            yield _with(case, dy={**case["dy"], key: simple})
    for name in tensors:
        required = ("x", "dy", "drstd", "slope", *(("weight", "bias") if case["op"] == "conv_backward" else ()))
        if name in required or (name == "weight" and TARGETS[case["op"]].products):
            continue
        kept = {n: t for n, t in tensors.items() if n != name}
        yield _with(case, tensors=kept, grad=[g for g in case["grad"] if g != name])
    for simpler in simpler_tensors(tensors):
        yield _with(case, tensors=copy.deepcopy(simpler))
    yield from _arguments(case)
    if "x" in tensors:
        yield from _sizes(case)
    if case["dtype"] != "float32":
        out = copy.deepcopy(case)
        out["dtype"] = "float32"
        for t in out["tensors"].values():
            if t["dtype"] == case["dtype"]:
                t["dtype"] = "float32"
        yield out
