"""Calls of a network, and what each did: tensors, hooks in order, the random state, an exception."""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.fuzz.drawn_model import CHANNELS_LAST, input_of

__all__ = ["DTYPES", "Run", "Seen", "autocast_of", "in_channels_last", "unchanged"]

Json = dict[str, Any]
Noise = tuple[float, int]  # its size, relative to a value, and the seed

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_numbers = itertools.count()


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _named(item, f"{name}[{i}]")


class Seen:
    """What one call did: tensors by name, hooks in order, the random state, the exception."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.hooks: list[tuple[str, list[tuple[str, Tensor]]]] = []
        self.random: Tensor | None = None
        self.error: Exception | None = None


class _Hook:
    """Writes down what it is given; copies and pickles of it write to the same run."""

    def __init__(self, run: int, name: str, kind: str) -> None:
        self.run, self.name, self.kind = run, name, kind

    def __call__(self, module: Any, *values: Any) -> Any:
        if _RUNS[self.run].seen:  # not while optimize runs its example
            copies = [(k, t.detach().clone()) for k, t in _named(values, "")]
            _RUNS[self.run].seen[-1].hooks.append((f"{self.kind} of {self.name}", copies))
        return values[-1] * 1.5 if self.kind == "replace" and isinstance(values[-1], Tensor) else None


_RUNS: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()


def _add_hooks(model: nn.Module, hooks: list[Json], run: int) -> None:
    modules = list(model.named_modules())
    for hook in hooks:
        name, module = modules[min(int(hook["at"] * len(modules)), len(modules) - 1)]
        register = {
            "forward": module.register_forward_hook,
            "replace": module.register_forward_hook,
            "forward_pre": module.register_forward_pre_hook,
            "backward": module.register_full_backward_hook,
            "backward_pre": module.register_full_backward_pre_hook,
        }[hook["kind"]]
        register(_Hook(run, name, hook["kind"]))


def _noise_hooks(model: nn.Module, eps: float, seed: int) -> None:
    """Rounding noise on parameters and on what each module gives."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
        return t * (1 + eps * noise.clamp(-3, 3))

    with torch.no_grad():
        for p in model.parameters():
            p.copy_(noisy(p))
    for module in model.modules():
        if not module._modules:
            module.register_forward_hook(lambda m, a, y: noisy(y) if isinstance(y, Tensor) else None)


class Run:
    """A network and the calls that are made of it, one after the other."""

    def __init__(self, case: Json, model: nn.Module, device: str, dtype: torch.dtype, entry: Any = None) -> None:
        self.case, self.model, self.device, self.dtype = case, model, device, dtype
        self.entry = model if entry is None else entry  # what is called: compiled, perhaps
        self.seen: list[Seen] = []
        self.number = next(_numbers)
        _RUNS[self.number] = self

    def hook(self, late: bool) -> None:
        """Registers the hooks that come before or after optimize."""
        _add_hooks(self.model, [h for h in self.case["hooks"] if h["late"] is late], self.number)

    def call(self, index: int, call: Json) -> Seen:
        """Makes one call and writes down what it did."""
        seen = Seen()
        self.seen.append(seen)
        self.model.train(call["train"])
        self.model.zero_grad(set_to_none=True)
        for module in self.model.modules():
            module.__dict__.pop("last", None)  # of the call before
        given = input_of(self.case, call, index, torch.float64)
        # The float64 run computes with the values that a lower precision gets.
        given = given.to(DTYPES[self.case["dtype"]]).to(self.dtype).to(self.device)
        torch.manual_seed(self.case["seed"])
        with contextlib.ExitStack() as context:
            context.enter_context(torch.set_grad_enabled(call["grad"]))
            if self.dtype is not torch.float64:
                context.enter_context(autocast_of(self.case, self.device))
            if call["grad"]:
                given.requires_grad_()
            x = given * 1 if call["grad"] else given  # a leaf takes no in-place op
            try:
                outputs = dict(_named(self._forward(call, x), "y"))
                if call["grad"]:
                    self._backward(outputs, index)
            except Exception as error:
                seen.error = error
                return seen
        # In compiled code that runs in channels_last, what the model writes to its input stays in a copy.
        if not (self.case["how"] == "compiled" and self.case["channels_last"] is True):
            outputs["x afterwards"] = x
        seen.tensors = {k: t.detach().clone() for k, t in (outputs | self._left(given)).items()}
        seen.random = torch.get_rng_state()
        return seen

    def _forward(self, call: Json, x: Tensor) -> Any:
        if not call["functional"]:
            return self.entry(x)
        parameters = {k: p * 0.75 for k, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, parameters, (x,))

    def _left(self, given: Tensor) -> dict[str, Tensor]:
        """What a call leaves behind: gradients, buffers, and what modules keep."""
        left = {} if given.grad is None else {"dx": given.grad}
        left |= {f"gradient of {n}": p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        left |= {f"buffer {n}": b for n, b in self.model.named_buffers()}
        modules = self.model.named_modules()
        return left | {f"{n}.last": m.__dict__["last"] for n, m in modules if "last" in m.__dict__}

    def _backward(self, outputs: dict[str, Tensor], index: int) -> None:
        generator = torch.Generator().manual_seed(self.case["seed"] + 100 + index)
        loss: Any = 0
        for t in outputs.values():
            if t.requires_grad:
                weight = torch.randn(t.shape, generator=generator, dtype=torch.float64)
                loss = loss + (t.to(self.dtype) * weight.to(t.device, self.dtype)).sum()
        if isinstance(loss, Tensor):
            loss.backward()

    def all(self) -> list[Seen]:
        """Every call of the case."""
        return [self.call(i, call) for i, call in enumerate(self.case["calls"])]


def autocast_of(case: Json, device: str) -> Any:
    """The context in which a case calls its network."""
    if case["how"] != "autocast":
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


def unchanged(
    case: Json, original: nn.Module, device: str, dtype: torch.dtype, noise: Noise | None = None, correct: bool = True
) -> Run:
    """A copy of the network without kgopt, for comparison, with all of its hooks.

    ``correct``: where PyTorch's gradients are known to be wrong, the right ones.
    """
    model = copy.deepcopy(original).to(dtype)
    model = _correct(model) if correct else model
    if noise is not None:
        _noise_hooks(model, *noise)
    run = Run(case, model, device, dtype)
    run.hook(False)
    run.hook(True)
    return run


def in_channels_last(run: Run) -> Run:
    """``run``, its network moved to channels_last by PyTorch's own means, as its inputs are at each call."""
    fmt = CHANNELS_LAST[run.case["dims"] + 2]
    for p in run.model.parameters():
        if p.dim() == run.case["dims"] + 2:
            p.data = p.data.contiguous(memory_format=fmt)
    run.model.register_forward_pre_hook(lambda _, args: (args[0].contiguous(memory_format=fmt), *args[1:]))
    return run


def _correct(model: nn.Module) -> nn.Module:
    """``model`` for comparison, its instance norms given contiguous gradients.

    Of one sample and a gradient in channels_last, PyTorch's instance norm computes another gradient on the CPU.
    """
    for module in model.modules():
        if isinstance(module, (nn.InstanceNorm2d, nn.InstanceNorm3d)):
            module.register_forward_hook(_with_contiguous_gradient)
    return model


def _with_contiguous_gradient(module: Any, args: Any, y: Tensor) -> None:
    if y.requires_grad:
        y.register_hook(lambda g: g.clone(memory_format=torch.contiguous_format))
