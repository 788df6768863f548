"""GroupNorm convolution networks at the speed of the memory and the tensor cores.

Three ways in: drop-in modules (:mod:`kgopt.nn`), functions (:mod:`kgopt.functional`) and the ops themselves
(``torch.ops.kgopt.*``), which work under ``torch.compile``, ``torch.export``, autocast and CUDA graphs.
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

from kgopt import _ops as _ops

if TYPE_CHECKING:
    from kgopt import functional as functional
    from kgopt import nn as nn
    from kgopt import reference as reference

__all__ = ["__version__", "functional", "nn", "reference"]

_LAZY = ("functional", "nn", "reference")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"kgopt.{name}")
    raise AttributeError(f"module 'kgopt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
