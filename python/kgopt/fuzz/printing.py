"""A case as a Python program."""

from __future__ import annotations

from typing import Any

from kgopt.fuzz.calls import HELPERS, NEEDS, Run, flags, gradient_lines, namespace, setup_lines
from kgopt.fuzz.catalogue import TARGETS
from kgopt.fuzz.kind import Case
from kgopt.fuzz.target import Target

__all__ = ["source"]


def source(case: Case, device: str) -> str:
    """The call, beside PyTorch's and float64's."""
    target = TARGETS[case["op"]]
    ours, theirs = target.ours(case), target.theirs(case)
    setup = setup_lines(case, device)
    text = "\n".join([*setup, ours, theirs])
    helpers = [n for n in HELPERS if f"{n}(" in text]
    helpers = [n for n in HELPERS if n in helpers or any(n in NEEDS.get(h, ()) for h in helpers)]
    out = [
        "import math",
        "",
        "import torch",
        "",
        "import kgopt.functional",
        "import kgopt.nn",
        "import kgopt.reference",
    ]
    out += [HELPERS[n].rstrip() for n in helpers]
    out += ["", f"torch.backends.cudnn.allow_tf32 = {case['tf32']}"]
    out.append(f"torch.backends.cudnn.deterministic = {case['deterministic']}")
    if case["poison"]:
        out.append("torch.use_deterministic_algorithms(True, warn_only=True)  # tensors begin as NaN")
    out += setup
    grads = [n for n in case["grad"] if n in case["tensors"]]
    out += [f"{n}.requires_grad_()" for n in grads]
    indent = ""
    if case["autocast"]:
        out.append(f'with torch.autocast("{device}", torch.{case["autocast"]}, cache_enabled=False):')
        indent = "    "
    out += [f"{indent}y = {ours}", f"{indent}expected = {theirs}"]
    out += ["results = [y] if isinstance(y, torch.Tensor) else list(y)"]
    out += ["right = [expected] if isinstance(expected, torch.Tensor) else list(expected)"]
    if grads:
        out += _source_of_gradients(case, device, grads, target)
    out += ["for a, b in zip(results, right):", "    print(a, b, (a.double() - b.double()).abs().max(), sep='\\n')"]
    return "\n".join(out) + "\n"


def _source_of_gradients(case: Case, device: str, grads: list[str], target: Target) -> list[str]:
    names: dict[str, Any] = {**namespace()}
    try:  # on the CPU, and PyTorch's call alone: for the shapes of its results
        with flags(case, "cpu", theirs=True):
            exec("\n".join(setup_lines(case, "cpu")), names)
            outputs = Run(target.theirs(case), names, grads, target.differentiable).outputs
    except Exception:
        return []
    out = gradient_lines(case, outputs, device)
    dys = ", ".join(f"dy{i}" for i in range(min(target.differentiable, len(outputs))))
    leaves = ", ".join(grads)
    for name in ("results", "right"):
        out.append(
            f"{name} += torch.autograd.grad({name}[:{target.differentiable}], [{leaves}], "
            f"[dy.to(r.dtype) for dy, r in zip([{dys}], {name})], allow_unused=True)"
        )
    return out
