"""The kinds of cases there are, by name. Each is made when it is first asked for: the networks import torch.fx."""

from __future__ import annotations

import functools
import importlib

from kgopt.fuzz.kind import Kind

__all__ = ["KINDS", "make_kind"]

KINDS = {"ops": "kgopt.fuzz.ops:OpsKind", "networks": "kgopt.fuzz.networks:NetworksKind"}
"""``module:class`` of each; the class takes no arguments."""


@functools.cache
def make_kind(name: str) -> Kind:
    """The one instance of a kind in this process."""
    module, class_name = KINDS[name].split(":")
    kind: Kind = getattr(importlib.import_module(module), class_name)()
    return kind
