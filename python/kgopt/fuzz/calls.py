"""Running a call: its switches, the Python that makes its tensors, its results and gradients."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kgopt.functional
import kgopt.nn
import kgopt.reference
from kgopt.fuzz.catalogue import TARGETS
from kgopt.fuzz.kind import Case
from kgopt.fuzz.tensors import lines

__all__ = ["HELPERS", "NEEDS", "Run", "flags", "gradient_lines", "namespace", "setup_lines", "tf32_of"]

HELPERS = {
    "wide": """
def wide(t):
    return t if t.dtype == torch.float64 else t.float()
""",
    "vjp": """
def vjp(f, inputs, dy):
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
    ys, dys = ([y], [dy]) if isinstance(y := f(**leaves), torch.Tensor) else (y, dy)
    return torch.autograd.grad(ys, list(leaves.values()), [d.to(y.dtype) for d, y in zip(dys, ys)])
""",
    "y_and_stats": """
def y_and_stats(y):
    variance, mean = torch.var_mean(wide(y), list(range(2, y.dim())), correction=0)
    return y, torch.stack([mean, variance], -1)
""",
    "given_stats": """
def given_stats(x, num_groups, eps):
    if x.numel() == 0:
        return x.new_zeros(2, x.shape[0], num_groups).to(wide(x).dtype)
    return [t.to(wide(x).dtype) for t in kgopt.reference.group_stats_ref(x.double(), num_groups, eps)]
""",
    "channel_moments": """
def channel_moments(x):
    variance, mean = torch.var_mean(x.detach().double().reshape(*x.shape[:2], -1), 2, correction=0)
    return torch.stack([mean, variance], -1).to(wide(x).dtype)
""",
}
NEEDS = {"y_and_stats": ("wide",), "channel_moments": ("wide",), "given_stats": ("wide",)}


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> Any:
    return compile(text, "<case>", "eval")


@functools.cache
def namespace() -> dict[str, Any]:
    """What the text of calls is evaluated in: torch, kgopt, math and the helpers."""
    names: dict[str, Any] = {"torch": torch, "kgopt": kgopt, "math": math}
    for text in HELPERS.values():
        exec(text, names)
    return names


@contextlib.contextmanager
def flags(case: Case, device: str, theirs: bool = False) -> Iterator[None]:
    """The switches of a case. ``theirs``: an argument of kgopt's that overrides TF32 counts for PyTorch, too."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()
    cudnn.allow_tf32 = tf32_of(case) if theirs else case["tf32"]
    cudnn.deterministic = case["deterministic"]
    if case["poison"]:  # every tensor begins as NaN
        torch.use_deterministic_algorithms(True, warn_only=True)
    low = case["autocast"]
    autocast: Any = contextlib.nullcontext()
    if low:
        autocast = torch.autocast(torch.device(device).type, getattr(torch, low), cache_enabled=False)
    try:
        with autocast:
            yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before[:2]
        if case["poison"]:
            torch.use_deterministic_algorithms(before[2])


def tf32_of(case: Case) -> bool:
    """Whether the call may take TF32."""
    if case["via"] == "module":  # which has no such argument
        return bool(case["tf32"])
    return bool(case["args"].get("allow_tf32", case["tf32"]))


@contextlib.contextmanager
def whole_norms() -> Iterator[None]:
    """PyTorch's GroupNorm with a weight of ones beside a bias alone, for whose gradient 2.11 raises or dies."""
    norm = F.group_norm

    def whole(input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        return norm(
            input, num_groups, torch.ones_like(bias) if weight is None and bias is not None else weight, bias, eps
        )

    F.group_norm = whole
    try:
        yield
    finally:
        F.group_norm = norm


def _outputs(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


class Run:
    """One evaluation: its results, and the gradients of its leaves.

    ``theirs``: by PyTorch, which is asked for the gradient of x along with any other: of GroupNorm's parameters alone
    2.11 has none.
    """

    def __init__(
        self, text: str, names: dict[str, Any], leaves: Sequence[str], differentiable: int, theirs: bool = False
    ) -> None:
        names = {**namespace(), **names}
        self._wanted = len(leaves)
        if theirs and leaves and "x" not in leaves and names["x"].is_floating_point():
            leaves = [*leaves, "x"]
        for n in leaves:
            names[n] = names[n].detach().requires_grad_()
        self._leaves = [names[n] for n in leaves]
        with whole_norms() if theirs else contextlib.nullcontext():
            self._raw = _outputs(eval(_compiled(text), names))
        self._roots = [o for o in self._raw[:differentiable] if o.requires_grad] if leaves else []
        self.outputs = [o.detach() for o in self._raw]
        self.grads: list[Tensor | None] = []

    @property
    def has_gradients(self) -> bool:
        """Whether there is something to differentiate."""
        return bool(self._roots)

    def backward(self, dys: Sequence[Tensor]) -> None:
        """Computes the gradients of the leaves, for these of the results."""
        dys = [dy.to(o.dtype) for dy, o in zip(dys, self._raw, strict=False) if o.requires_grad]
        found = torch.autograd.grad(self._roots, self._leaves, dys[: len(self._roots)], allow_unused=True)
        self.grads = list(found[: self._wanted])

    def everything(self) -> list[Tensor | None]:
        """Results, then gradients."""
        return [*self.outputs, *self.grads]


def setup_lines(case: Case, device: str) -> list[str]:
    """Python that makes the tensors of a case."""
    target = TARGETS[case["op"]]
    out: list[str] = []
    for i, (name, spec) in enumerate(case["tensors"].items()):
        out += lines(name, spec, case["seed"] + i, device)
    return out + target.before(case)


def gradient_lines(case: Case, outputs: Sequence[Tensor], device: str) -> list[str]:
    """Python that makes the gradients that come in, of the shapes of these results."""
    out: list[str] = []
    for i, y in enumerate(outputs[: TARGETS[case["op"]].differentiable]):
        spec = {"shape": list(y.shape), "dtype": str(y.dtype).removeprefix("torch."), **case["dy"]}
        out += lines(f"dy{i}", spec, case["seed"] + 100 + i, device)
    return out
