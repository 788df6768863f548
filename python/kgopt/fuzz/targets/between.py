"""What stands between norms and convolutions: resampling, padding, pooling."""

from __future__ import annotations

from kgopt.fuzz.draw import Draw
from kgopt.fuzz.kind import Case
from kgopt.fuzz.target import REF, Args, Target, Tensors, name_of
from kgopt.fuzz.tensors import draw_size, spec

__all__ = ["TARGETS"]


def _image(d: Draw) -> list[int]:
    rank = d.rng.choice([2, 3])
    c = draw_size(d.rng, int(max(1, min(256, d.budget**0.5))))
    shape = [max(1, draw_size(d.rng, 5)), c, *d.spatial(rank, d.budget / c)]
    if d.chance(0.01):
        shape[0] = 0
    return shape


def _upsample_linear() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        shape = _image(d)
        tensors = {"x": d.tensor(shape)}
        if d.chance(0.5):
            tensors["residual"] = d.tensor([*shape[:2], *(2 * s for s in shape[2:])])
        return tensors, {}

    return Target(
        "upsample_linear",
        3,
        draw,
        lambda case: f"torch.ops.kgopt.upsample_linear(x, {name_of(case, 'residual')})",
        lambda case: f"{REF}.upsample_linear_ref(x, {name_of(case, 'residual')})",
        ("op",),
        grads=("x", "residual"),
        border=True,
    )


def _in_format() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        return {"x": d.tensor(_image(d))}, {"channels_last": d.chance(0.5)}

    return Target(
        "in_format",
        2,
        draw,
        lambda case: f"torch.ops.kgopt.in_format(x, {case['args']['channels_last']!r})",
        lambda case: f"{REF}.in_format_ref(x, {case['args']['channels_last']!r})",
        ("op",),
        grads=("x",),
    )


def _upsample_nearest() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        shape = _image(d)
        return {"x": d.tensor(shape)}, {"factors": [d.rng.choice([1, 2, 2, 2, 3, 5]) for _ in shape[2:]]}

    return Target(
        "upsample_nearest",
        3,
        draw,
        lambda case: f"torch.ops.kgopt.upsample_nearest(x, {case['args']['factors']!r})",
        lambda case: (
            "torch.nn.functional.interpolate(x, scale_factor="
            f"{[float(f) for f in case['args']['factors']]!r}, mode='nearest')"
        ),
        ("op",),
        grads=("x",),
    )


def _upsample_backward(name: str) -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        shape = _image(d)
        factors = [d.rng.choice([1, 2, 2, 3]) if name == "nearest" else 2 for _ in shape[2:]]
        dy = d.tensor([*shape[:2], *(s * f for s, f in zip(shape[2:], factors, strict=True))])
        return {"x": spec(shape, d.dtype, "zero"), "dy": dy}, {"factors": factors}

    def theirs(case: Case) -> str:
        a = case["args"]
        if name == "nearest":
            scale = [float(f) for f in a["factors"]]
            call = f"torch.nn.functional.interpolate(x, scale_factor={scale!r}, mode='nearest')"
        else:
            call = f"{REF}.upsample_linear_ref(x)"
        return f"vjp(lambda x: {call}, dict(x=x), dy)[0]"

    def ours(case: Case) -> str:
        more = f", {case['args']['factors']!r}" if name == "nearest" else ""
        return f"torch.ops.kgopt.upsample_{name}_backward(dy{more})"

    return Target(
        f"upsample_{name}_backward",
        1.5,
        draw,
        ours,
        theirs,
        ("op",),
        grads=(),
        border=name == "linear",
    )


def _pad_replicate() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        shape = _image(d)
        pad = [d.rng.choice([0, 0, 1, 1, 2, 3, 7]) for _ in range(2 * len(shape[2:]))]
        return {"x": d.tensor(shape)}, {"pad": pad}

    return Target(
        "pad_replicate",
        3,
        draw,
        lambda case: f"torch.ops.kgopt.pad_replicate(x, {case['args']['pad']!r})",
        lambda case: f"{REF}.pad_replicate_ref(x, {case['args']['pad']!r})",
        ("op",),
        grads=("x",),
    )


def _max_pool() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        shape = _image(d)
        kernel = [d.rng.choice([1, 2, 2, 3, 3, 4]) for _ in shape[2:]]
        stride = [d.rng.choice([1, 2, 2, 3]) for _ in kernel]
        padding = [d.rng.choice([0, 0, k // 2]) for k in kernel]
        if not d.chance(0.03):
            shape[2:] = [max(s, k - 2 * p) for s, k, p in zip(shape[2:], kernel, padding, strict=True)]
        return {"x": d.tensor(shape)}, {"kernel_size": kernel, "stride": stride, "padding": padding}

    def values(case: Case) -> str:
        return ", ".join(repr(case["args"][n]) for n in ("kernel_size", "stride", "padding"))

    return Target(
        "max_pool",
        3,
        draw,
        lambda case: f"torch.ops.kgopt.max_pool(x, {values(case)})",
        lambda case: f"{REF}.max_pool_ref(x, {values(case)})",
        ("op",),
        grads=("x",),
    )


def _upsample_conv_weight() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        kernel = [d.rng.choice([1, 2, 3, 3, 3, 4, 5]) for _ in range(d.rng.choice([2, 3]))]
        groups = d.rng.choice([1, 1, 1, 2, 3])
        shape = [groups * d.rng.choice([1, 3, 8, 33]), d.rng.choice([1, 3, 8, 40]), *kernel]
        factors = [d.rng.choice([1, 2, 2, 2, 3, 5]) for _ in kernel]
        return {"x": d.tensor(shape)}, {"factors": factors, "groups": groups, "last": d.chance(0.5)}

    def values(case: Case) -> str:
        return f"{case['args']['factors']!r}, {case['args']['groups']}"

    def theirs(case: Case) -> str:
        form = f"channels_last{'_3d' if len(case['args']['factors']) == 3 else ''}"
        form = form if case["args"]["last"] else "contiguous_format"
        return f"{REF}.upsample_conv_weight_ref(x, {values(case)}).contiguous(memory_format=torch.{form})"

    return Target(
        "upsample_conv_weight",
        2,
        draw,
        lambda case: f"torch.ops.kgopt.upsample_conv_weight(x, {values(case)}, {case['args']['last']})",
        theirs,
        ("op",),
        grads=("x",),
    )


TARGETS = [
    _upsample_linear(),
    _upsample_nearest(),
    _in_format(),
    _upsample_backward("linear"),
    _upsample_backward("nearest"),
    _pad_replicate(),
    _max_pool(),
    _upsample_conv_weight(),
]
