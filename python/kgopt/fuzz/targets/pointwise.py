"""Activations and reductions."""

from __future__ import annotations

from kgopt.fuzz.draw import Draw
from kgopt.fuzz.kind import Case
from kgopt.fuzz.target import REF, Args, Target, Tensors, home_of
from kgopt.fuzz.tensors import spec

__all__ = ["TARGETS"]


def any_shape(d: Draw, least: int = 0) -> list[int]:
    rank = d.rng.randint(least, 5)
    shape = d.spatial(rank, d.budget) if rank else []
    if shape and d.chance(0.03):
        shape[d.rng.randrange(rank)] = 0
    return shape


def _activation(backward: bool) -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        shape = any_shape(d)
        tensors = {"x": d.tensor(shape)}
        if backward:
            tensors["dy"] = d.tensor(shape)
        return tensors, {"act": d.act(0.03)}

    if backward:
        return Target(
            "activation_backward",
            3,
            draw,
            lambda case: f"torch.ops.kgopt.activation_backward(dy, x, {case['args']['act']!r})",
            lambda case: f"vjp(lambda x: {REF}.activation_ref(x, {case['args']['act']!r}), dict(x=x), dy)[0]",
            ("op",),
            grads=(),
        )
    return Target(
        "activation",
        6,
        draw,
        lambda case: f"{home_of(case)}.activation(x, {case['args']['act']!r})",
        lambda case: f"{REF}.activation_ref(x, {case['args']['act']!r})",
        grads=("x",),
        autocast=True,
    )


def _reduction(name: str, dims: str) -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        shape = any_shape(d, least=0 if d.chance(0.05) else 1)
        rank = len(shape)
        chosen = sorted(d.rng.sample(range(rank), d.rng.randint(1, rank))) if rank else []
        if name == "mean" and d.chance(0.05):
            chosen = []
        chosen = [c - rank if d.chance(0.3) else c for c in chosen]
        return {"x": d.tensor(shape)}, {"dims": chosen, "keepdim": d.chance(0.5)}

    def call(case: Case, home: str) -> str:
        return f"{home}.{name}(x, {_reduction_text(case)})"

    return Target(
        name,
        5,
        draw,
        lambda case: call(case, home_of(case)),
        lambda case: call(case, "torch"),
        grads=("x",),
        autocast=name == "logsumexp",
    )


def _reduced(d: Draw) -> tuple[list[int], list[int], Args]:
    """A shape, that of its reduction over some dims, and these."""
    shape = any_shape(d, least=1)
    rank = len(shape)
    chosen = sorted(d.rng.sample(range(rank), d.rng.randint(1, rank)))
    keepdim = d.chance(0.5)
    kept = [1 if i in chosen else s for i, s in enumerate(shape) if keepdim or i not in chosen]
    return shape, kept, {"dims": chosen, "keepdim": keepdim}


def _reduction_text(case: Case) -> str:
    return f"{case['args']['dims']!r}, {case['args']['keepdim']!r}"


def _logsumexp_backward() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        shape, kept, args = _reduced(d)
        return {"x": d.tensor(shape), "dy": d.tensor(kept)}, args

    return Target(
        "logsumexp_backward",
        2,
        draw,
        lambda case: f"torch.ops.kgopt.logsumexp_backward(dy, x, y, {_reduction_text(case)})",
        lambda case: f"vjp(lambda x: torch.logsumexp(x, {_reduction_text(case)}), dict(x=x), dy)[0]",
        ("op",),
        before=lambda case: [f"y = torch.logsumexp(x.double(), {_reduction_text(case)}).to(x.dtype)"],
        grads=(),
    )


def _mean_backward() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        shape, kept, args = _reduced(d)
        return {"x": spec(shape, d.dtype, "zero"), "dy": d.tensor(kept)}, args

    return Target(
        "mean_backward",
        2,
        draw,
        lambda case: f"torch.ops.kgopt.mean_backward(dy, {case['tensors']['x']['shape']!r}, {_reduction_text(case)})",
        lambda case: f"vjp(lambda x: torch.mean(x, {_reduction_text(case)}), dict(x=x), dy)[0]",
        ("op",),
        grads=(),
    )


def _scaled_softmax() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        # Results of x's dtype: of a half one the bar would still be that of a float32 x.
        return {"x": d.tensor(any_shape(d, least=1))}, {"scale": d.rng.choice([1.0, 0.05, 3.0, -0.5])}

    return Target(
        "scaled_softmax",
        2,
        draw,
        lambda case: f"torch.ops.kgopt.scaled_softmax(x, {case['args']['scale']!r}, x.dtype)",
        lambda case: f"torch.softmax(x * {case['args']['scale']!r}, -1)",
        ("op",),
        grads=(),  # by PyTorch's functions
    )


TARGETS = [
    _scaled_softmax(),
    _activation(False),
    _activation(True),
    _reduction("logsumexp", "dim"),
    _reduction("mean", "dims"),
    _logsumexp_backward(),
    _mean_backward(),
]
