"""Hands every record to torch: fake kernels, autograd, autocast, vmap, flop formulas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kgopt import torch_private
from kgopt._after_import import after_import
from kgopt.ops import calls
from kgopt.ops.registry import LIB, OPS, RECORDS, Op, by_name, overload, with_defaults
from kgopt.ops.vmap import one_by_one
from kgopt.torch_private import schema_of


def _given_every_argument(op: Op) -> Callable[..., Any]:
    """A fake kernel that always gets every argument, as a C++ kernel does, all of them on one device.

    It runs for meta tensors, too, and one of these beside real tensors is enough for that.
    """
    name, fake = op.name, op.fake
    schema = schema_of(overload(name))
    names = [a.name for a in schema.arguments if not a.kwarg_only]
    whose = "x" if "x" in names else names[0]

    @functools.wraps(fake)
    def call(*args: Any, **kwargs: Any) -> Any:
        positional, keywords = with_defaults(schema, args, kwargs)
        device = positional[names.index(whose)].device
        for argument, value in zip(names, positional, strict=True):
            if isinstance(value, Tensor) and value.device != device:
                raise RuntimeError(f"{name}: {argument} is on {value.device}, expected the device of {whose}, {device}")
        return fake(*positional, **keywords)

    return call


def _at_autocast(op: Op, rule: Callable[..., Any], device: str) -> Callable[..., Any]:
    direct, off = calls.direct(op.name), torch_private.without_autocast(device)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with off():
            return rule(direct, torch.get_autocast_dtype(device), args, kwargs)

    return kernel


def _vmap(op: Op) -> Callable[..., Any]:
    return functools.partial(op.vmap or one_by_one, getattr(OPS, op.name))


def _install_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    def formula_of(op: Op, count: Callable[[dict[str, Any]], int]) -> Callable[..., int]:
        return lambda *args, out_shape=None, **kwargs: count(by_name(op.name, args, kwargs))

    for op in RECORDS.values():
        if op.flops is not None:
            register_flop_formula(getattr(OPS, op.name))(formula_of(op, op.flops))


def install() -> None:
    """Everything but DTensor's part, which is ``sharding.install``."""
    for op in RECORDS.values():
        torch.library.register_fake(f"kgopt::{op.name}", _given_every_argument(op))
        if op.on_cpu is not None:
            LIB.impl(op.name, op.on_cpu, "CPU")
    calls.install()
    for op in RECORDS.values():
        for device, rule in op.autocast.items():
            kernel = _at_autocast(op, rule, device)
            calls.set_autocast(op.name, device, kernel)
            LIB.impl(op.name, kernel, f"Autocast{device.upper()}")
        torch.library.register_vmap(f"kgopt::{op.name}", _vmap(op))
    # With the flop counter, when that is imported: importing it here costs 100 ms, most of it triton.
    after_import("torch.utils.flop_counter", _install_flops)
