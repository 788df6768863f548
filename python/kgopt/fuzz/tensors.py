"""Tensors of a case: how they are drawn, and the Python that makes them.

A tensor is a dict: ``shape``, ``dtype``, ``values`` and ``layout``. The Python text is what the check itself runs, so a
program that is printed makes the very same bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["draw_gradient", "draw_layout", "draw_size", "draw_values", "lines", "simpler_tensors", "spec"]

Spec = dict[str, Any]

_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 61, 67, 127, 131, 257)
_EDGES = tuple(sorted({e + d for e in (4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024) for d in (-1, 0, 1)}))

# What the values are, with how often. NaN and infinities are one element each.
_VALUES = {
    "normal": 46,
    "offset": 9,
    "small": 8,
    "large": 8,
    "constant": 4,
    "outlier": 6,
    "nan": 4,
    "inf": 3,
    "-inf": 2,
    "denormal": 3,
    "zero": 3,
    "integers": 4,
}


def spec(shape: Sequence[int], dtype: str, values: str = "normal", layout: str = "contiguous") -> Spec:
    """A tensor."""
    return {"shape": list(shape), "dtype": dtype, "values": values, "layout": layout}


def draw_size(rng: random.Random, most: int) -> int:
    """A size from 1 to ``most``: small ones, primes, and those around tiles."""
    if most <= 1:
        return 1
    how = rng.random()
    if how < 0.35:
        return rng.randint(1, min(most, 6))
    pool = _EDGES if how < 0.7 else _PRIMES
    fitting = [s for s in pool if s <= most]
    return rng.choice(fitting) if fitting else rng.randint(1, most)


def draw_values(rng: random.Random, infinite: bool = True) -> str:
    """What the elements of a tensor are."""
    values = {v: n for v, n in _VALUES.items() if infinite or "inf" not in v}
    return rng.choices(list(values), list(values.values()))[0]


def draw_layout(rng: random.Random, shape: Sequence[int], dull: float = 0.45) -> str:
    """How a tensor of this shape lies in memory; with probability ``dull`` contiguous."""
    rank = len(shape)
    if rank == 0 or rng.random() < dull:
        return "contiguous"
    images = rank in (4, 5)
    if images and rng.random() < 0.5:
        return rng.choice(["channels_last"] * 5 + ["offset_channels_last"])
    dim = rng.randrange(rank)
    kinds = ["offset", f"slice:{dim}", f"step:{dim}", f"expand:{dim}", "expand:all", "ones"]
    if rank >= 2:
        a, b = sorted(rng.sample(range(rank), 2))
        kinds += [f"transpose:{a}:{b}"] * 2
    return rng.choice(kinds)


def draw_gradient(rng: random.Random) -> Spec:
    """Values and layout of a gradient, whose shape is that of a result."""
    values = rng.choices(["normal", "small", "large", "constant", "zero", "nan", "outlier"], [76, 5, 5, 4, 2, 4, 4])[0]
    kinds = ["channels_last"] * 4 + ["expand:all"] * 3 + ["expand:0", "expand:1", "expand:2"]
    kinds += ["offset", "slice:1", "transpose:0:1", "transpose:2:3", "step:1", "step:3", "ones"]
    return {"values": values, "layout": rng.choice(kinds) if rng.random() < 0.4 else "contiguous"}


def _values(spec: Spec, shape: str, seed: int) -> Iterator[str]:
    """Lines that make ``{name}`` in float32 or float64, ``{g}`` being a generator; ``shape`` is Python text."""
    values = spec["values"]
    wide = ", dtype=torch.float64" if spec["dtype"] == "float64" else ""
    plain = f"torch.randn({shape}, generator=torch.Generator().manual_seed({seed}){wide})"
    factor = {"small": " * 0.01", "large": " * 1000", "offset": " + 100"}.get(values, "")
    if values == "constant":
        yield f"torch.full({shape}, 0.7{wide})"
    elif values == "zero":
        yield f"torch.zeros({shape}{wide})"
    elif values == "one":
        yield f"torch.ones({shape}{wide})"
    elif values == "integers":
        whole = f"torch.randint(-3, 4, {shape}, generator=torch.Generator().manual_seed({seed}))"
        yield whole + (".double()" if wide else ".float()")
    elif values == "denormal":
        yield f"{plain} * torch.finfo(torch.{spec['dtype']}).tiny / 4"
    else:
        yield plain + factor
    element = {"outlier": "1e4", "nan": "math.nan", "inf": "math.inf", "-inf": "-math.inf"}.get(values)
    if element is not None:
        yield f"{{name}}.view(-1)[{seed % 7919} % max({{name}}.numel(), 1):][:1] = {element}"


def _strides_of_ones(shape: Sequence[int]) -> list[int]:
    """Contiguous, but where a size is 1 the stride is one that nobody expects."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(3 if size == 1 else step)
        step *= max(size, 1)
    return strides[::-1]


def _layout(name: str, layout: str, shape: Sequence[int]) -> Iterator[str]:
    kind, *numbers = layout.split(":")
    rank = len(shape)
    if any(n != "all" and int(n) >= rank for n in numbers) or rank == 0:
        return  # a gradient's, drawn before its rank was known
    last = {4: "torch.channels_last", 5: "torch.channels_last_3d"}.get(rank)
    nan = f"torch.full_like({name}, math.nan)"
    flat = f"torch.cat([torch.full_like({name}.flatten()[:1], math.nan), {name}.flatten()])"
    behind = f"{name} = {flat}[{name}.numel() > 0 :].view({name}.shape)"
    if kind == "contiguous" or (kind.endswith("channels_last") and last is None):
        return
    if kind == "channels_last":
        yield f"{name} = {name}.contiguous(memory_format={last})"
    elif kind == "offset":  # not aligned, and behind a NaN
        yield behind
    elif kind == "offset_channels_last":
        order, back = [0, *range(2, rank), 1], [0, rank - 1, *range(1, rank - 1)]
        yield f"{name} = {name}.permute({order})"
        yield f"{behind}.permute({back})"
    elif kind == "slice":
        d = int(numbers[0])
        yield f"{name} = torch.cat([{nan}, {name}, {nan}], {d}).narrow({d}, {shape[d]}, {shape[d]})"
    elif kind == "step":
        d = int(numbers[0])
        yield f"{name} = torch.stack([{name}, {nan}], {d + 1}).select({d + 1}, 0)"
    elif kind == "transpose":
        a, b = numbers
        yield f"{name} = {name}.transpose({a}, {b}).contiguous().transpose({a}, {b})"
    elif kind == "expand" and numbers[0] == "all":
        if math.prod(shape) > 0:
            yield f"{name} = {name}.flatten()[:1].view({[1] * rank}).expand({list(shape)})"
    elif kind == "expand":
        d = int(numbers[0])
        if shape[d] > 0:
            yield f"{name} = {name}.narrow({d}, 0, 1).contiguous().expand({list(shape)})"
    elif kind == "ones":
        yield f"{name} = {name}.as_strided({list(shape)}, {_strides_of_ones(shape)})"
    else:
        raise ValueError(f"layout is {layout!r}, expected one that draw_layout gives")


def lines(name: str, spec: Spec, seed: int, device: str) -> list[str]:
    """Python that makes the tensor under this name; it uses ``torch`` and ``math``."""
    shape = list(spec["shape"])
    first, *more = _values(spec, str(shape), seed)
    out = [f"{name} = {first}", *(line.format(name=name) for line in more)]
    moved = [f'"{device}"'] if device != "cpu" else []
    if spec["dtype"] != "float32":
        moved.append(f"torch.{spec['dtype']}")
    if moved:
        out.append(f"{name} = {name}.to({', '.join(moved)})")
    out += _layout(name, spec["layout"], shape)
    if spec.get("meta"):
        out.append(f'{name} = {name}.to("meta")')
    return out


def simpler_tensors(tensors: dict[str, Spec]) -> Iterator[dict[str, Spec]]:
    """The same tensors with plainer values or layouts: all at once, then one by one."""
    for key, plain in (("layout", "contiguous"), ("values", "normal")):
        if sum(t[key] != plain for t in tensors.values()) > 1:
            yield {n: {**t, key: plain} for n, t in tensors.items()}
    for n, t in tensors.items():
        for key, plain in (("layout", "contiguous"), ("values", "normal")):
            if t[key] != plain:
                yield {**tensors, n: {**t, key: plain}}
