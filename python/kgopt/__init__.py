"""GroupNorm convolution networks at the speed of the memory and the tensor cores.

``kgopt.optimize(model)`` finds what can be fused in a model that others wrote. For code of your own: drop-in modules
(:mod:`kgopt.nn`), functions (:mod:`kgopt.functional`) and the ops themselves (``torch.ops.kgopt.*``), which work under
``torch.compile``, ``torch.export``, autocast and CUDA graphs.
"""

import importlib
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  (libtorch must be there before the extension)

from kgopt._version import __version__

try:
    from kgopt import _C as _C
except ImportError as error:
    raise ImportError(
        f"kgopt's compiled extension kgopt._C could not be loaded: {error}. Install a wheel (pip install kgopt) or "
        "build one (make build); running from the source tree without building cannot work."
    ) from error

from kgopt import _autotune as _autotune
from kgopt import ops as ops
from kgopt import torch_private
from kgopt._after_import import after_import

if TYPE_CHECKING:
    from kgopt import functional as functional
    from kgopt import nn as nn
    from kgopt import reference as reference
    from kgopt.rewrite import forget as forget
    from kgopt.rewrite import optimize as optimize
    from kgopt.rewrite import report as report
    from kgopt.rewrite import restore as restore

__all__ = ["__version__", "forget", "functional", "nn", "optimize", "reference", "report", "restore"]


def _register_backend() -> None:
    """``torch.compile(backend="kgopt")``, also where kgopt is not installed and its entry point not seen."""

    def kgopt(graph: Any, example_inputs: Any, **kwargs: Any) -> Any:
        from kgopt.rewrite.backend import kgopt_backend

        return kgopt_backend(graph, example_inputs, **kwargs)

    torch_private.register_backend("kgopt", kgopt)


def _register_sharding() -> None:
    """DTensor inputs."""
    from kgopt.ops import sharding

    sharding.install()


after_import(torch_private.BACKENDS, _register_backend)
after_import("torch.distributed.tensor", _register_sharding)
_autotune.install()

_LAZY = ("functional", "nn", "reference")
_LAZY_FUNCTIONS = ("forget", "optimize", "report", "restore")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"kgopt.{name}")
    if name in _LAZY_FUNCTIONS:
        return getattr(importlib.import_module("kgopt.rewrite"), name)
    raise AttributeError(f"module 'kgopt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, *_LAZY_FUNCTIONS])
