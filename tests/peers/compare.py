"""What a network does, and how far two of them are apart."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kgopt

TOLERANCE = 1e-9  # of float64 results, relative to the largest of a tensor
FORMATS = {"contiguous": False, "channels_last": True}


@dataclasses.dataclass
class Outcome:
    """All that a caller sees of a training step and of inference, by name."""

    train: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    eval: dict[str, Tensor]
    rng: Tensor
    is_random: bool


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of whatever a network returns, in order: tuples, dicts, dataclasses, distributions."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{name}[{i}]")
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        for key, item in vars(value).items():
            if isinstance(item, (Tensor, Mapping, tuple, list)) or dataclasses.is_dataclass(item):
                yield from tensors_in(item, f"{name}.{key}")


@contextlib.contextmanager
def random_by_place() -> Iterator[None]:
    """Random numbers go to elements by their place in the tensor, whatever its memory format.

    PyTorch fills a tensor in the order of its memory, so a dropout or a VAE's sample in channels_last is another one
    than in the contiguous format.
    """

    def like(make: Any) -> Any:
        def filled(x: Tensor, **keywords: Any) -> Tensor:
            keywords.pop("memory_format", None)
            return make(x.shape, **{"dtype": x.dtype, "device": x.device, **keywords})

        return filled

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        kept = torch.rand(x.shape, dtype=x.dtype, device=x.device) >= p
        return x.mul_(kept).div_(1 - p) if inplace else x * kept / (1 - p)

    with (
        unittest.mock.patch.object(torch, "randn_like", like(torch.randn)),
        unittest.mock.patch.object(torch, "rand_like", like(torch.rand)),
        unittest.mock.patch.object(F, "dropout", dropout),
    ):
        yield


@contextlib.contextmanager
def steady(device: str) -> Iterator[None]:
    """What PyTorch computes on a device, twice the same and in float64 what it says.

    cuDNN picks algorithms for transposed convolutions whose float64 sums are added in another order at each call. And
    on CUDA ``hardswish`` multiplies by the float32 1/6 in float64 too, so PyTorch's own result is 3e-8 off: the exact
    one takes its place, in every network of the test, below whatever calls it. On the CPU PyTorch divides by 6.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in (("hardswish", _hardswish), ("hardswish_", _hardswish_)):
            library.impl(name, function, "CUDA" if device == "cuda" else "CPU", allow_override=True)
        yield
    finally:
        library._destroy()
        cudnn.deterministic, cudnn.benchmark = before


def _hardswish(x: Tensor) -> Tensor:
    return x * (x + 3).clamp(0, 6) / 6


def _hardswish_(x: Tensor) -> Tensor:
    return x.copy_(_hardswish(x))


def outcome(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """A training step of a copy of the model, and inference of another."""
    original, model = model, copy.deepcopy(model)
    args, kwargs = copy.deepcopy((args, kwargs))
    images = [t for _, t in tensors_in((args, kwargs)) if t.is_floating_point()]
    for t in images:
        t.requires_grad_()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model.train()
    given = [t * 1 for t in images]  # networks that start with an in-place op get no leaf
    swap = {id(t): g for t, g in zip(images, given, strict=True)}
    result = model(*_swapped(args, swap), **_swapped(kwargs, swap))
    rng = torch.get_rng_state()
    outputs = dict(tensors_in(result, "output"))
    generator = torch.Generator().manual_seed(4)
    loss = torch.zeros((), dtype=torch.float64)
    for t in outputs.values():
        if t.requires_grad:
            weights = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
            loss = loss.to(t.device) + (t.double() * weights).sum() / max(t.numel(), 1) ** 0.5
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"input {i}": t.grad for i, t in enumerate(images) if t.grad is not None}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    model = copy.deepcopy(original).eval()
    done = {k: t.detach() for k, t in outputs.items()}
    return Outcome(done, gradients, buffers, inference(model, args, kwargs), rng, not torch.equal(rng, before))


def inference(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """What it returns in eval mode."""
    with torch.no_grad():
        torch.manual_seed(3)
        return {k: t.detach() for k, t in tensors_in(model(*copy.deepcopy(args), **copy.deepcopy(kwargs)), "output")}


def to_device(value: Any, device: str) -> Any:
    """Arguments on another device."""
    tensors = {id(t): t.to(device) for _, t in tensors_in(value)}
    return _swapped(value, tensors)


def _swapped(value: Any, swap: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return swap.get(id(value), value)
    if isinstance(value, Mapping):
        return {k: _swapped(v, swap) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_swapped(v, swap) for v in value)
    return value


def difference(actual: Outcome, expected: Outcome) -> float:
    """The largest difference of any tensor, relative to the largest element of the expected one.

    A gradient that is zero but for rounding (of a bias in front of a norm) is compared with the largest of all
    gradients instead.

    Raises:
        AssertionError: other names, shapes, dtypes, NaNs or random numbers.
    """
    assert torch.equal(actual.rng, expected.rng), "other random numbers were drawn"
    worst = 0.0
    for part in ("train", "gradients", "buffers", "eval"):
        ours, theirs = getattr(actual, part), getattr(expected, part)
        assert list(ours) == list(theirs), f"{part}: {sorted(set(ours) ^ set(theirs)) or 'other order'}"
        floor = 0.0
        if part == "gradients":
            floor = 1e-3 * max((float(t.abs().max()) for t in theirs.values() if t.numel()), default=0.0)
        for name, e in theirs.items():
            a = ours[name]
            assert (a.shape, a.dtype) == (e.shape, e.dtype), f"{part} {name}: {a.shape} {a.dtype}, {e.shape} {e.dtype}"
            if not e.is_floating_point() and not e.is_complex():
                assert torch.equal(a, e), f"{part} {name} differs"
                continue
            assert torch.equal(a.isnan(), e.isnan()), f"{part} {name}: NaN in other places"
            if e.numel() == 0 or torch.equal(a, e):
                continue
            apart = _apart(a, e, floor)
            if apart > TOLERANCE:
                raise AssertionError(f"{part} {name} differs by {apart:.1e} of its largest element")
            worst = max(worst, apart)
    return worst


def check(
    original: nn.Module, expected: Outcome, args: tuple[Any, ...], kwargs: dict[str, Any], channels_last: bool
) -> tuple[float, int]:
    """Optimizes a copy before its first call, compares it, restores it and compares again.

    Returns:
        The largest difference, and how many sites were fused or replaced.

    Raises:
        AssertionError: something differs.
    """
    state = original.state_dict()
    randomness = contextlib.nullcontext
    if channels_last and expected.is_random:
        randomness = random_by_place
        with randomness():
            expected = outcome(original, args, kwargs)
    model = copy.deepcopy(original)
    kgopt.optimize(model, measure=False, channels_last=channels_last)
    _same_state(model.state_dict(), state)
    with randomness():
        worst = difference(outcome(model, args, kwargs), expected)
    replaced = sum(1 for row in kgopt.report(model).sites if row.became)
    kgopt.restore(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()], "classes after restore"
    _same_state(model.state_dict(), state)
    for name, p in model.named_parameters():
        assert p.stride() == original.get_parameter(name).stride(), f"{name} has other strides after restore"
    with randomness():
        again = inference(model.eval(), args, kwargs)
        _same_bits(again, expected.eval, lambda: inference(copy.deepcopy(original).eval(), args, kwargs))
    return worst, replaced


def _same_bits(
    restored: Mapping[str, Tensor], expected: Mapping[str, Tensor], repeat: Callable[[], Mapping[str, Tensor]]
) -> None:
    """What a restored network gives is what the original gave, and gives again.

    Where that differs from call to call (an op whose sums are atomic), a rounding error is allowed. ``repeat``: the
    original's next call, asked only where bits differ.
    """

    def differing(a: Mapping[str, Tensor]) -> list[str]:
        return [name for name, t in expected.items() if not torch.equal(a[name].nan_to_num(), t.nan_to_num())]

    unequal = differing(restored)
    if not unequal:
        return
    unsteady = {name for _ in range(3) for name in differing(repeat())}
    for name in unequal:
        assert name in unsteady, f"{name} has other bits after restore; the original gives the same ones at each call"
        apart = _apart(restored[name], expected[name])
        assert apart <= TOLERANCE, f"{name} differs by {apart:.1e} after restore"


def _apart(a: Tensor, e: Tensor, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest element of the expected tensor."""
    scale = max(float(e.nan_to_num().abs().max()), floor)
    return float((a - e).nan_to_num().abs().max()) / max(scale, 1e-30)


def _same_state(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert list(actual) == list(expected), "other state_dict keys"
    for name, value in expected.items():
        same = torch.equal(actual[name], value) if isinstance(value, Tensor) else True
        assert same or bool(value.isnan().any()), f"state_dict: {name} differs"
