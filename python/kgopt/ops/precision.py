"""PyTorch's TF32 switch for convolutions."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kgopt import _C, torch_private


def conv_tf32_allowed() -> int:
    """Whether PyTorch lets convolutions use TF32.

    What torch.backends.cudnn.conv.fp32_precision reads: it knows of allow_tf32 too, and neither warns nor raises when
    both interfaces were used, as reading allow_tf32 does.
    """
    return int(torch_private.conv_precision() == "tf32")


@contextlib.contextmanager
def conv_precision(allow_tf32: bool) -> Iterator[None]:
    """PyTorch's switch for cuDNN convolutions, set for a while. backends.cudnn.flags raises on mixed interfaces."""
    before = torch_private.conv_precision()
    torch_private.set_conv_precision("tf32" if allow_tf32 else "ieee")
    try:
        yield
    finally:
        torch_private.set_conv_precision(before)


def precision_of(x: Tensor, allow_tf32: bool | None) -> Any:
    """A context in which ATen's convolutions of x have the precision that an op was given."""
    return contextlib.nullcontext() if allow_tf32 is None or not x.is_cuda else conv_precision(allow_tf32)


_before: list[str] = []  # what the kernels' calls turned the switch from


def _turn(allow_tf32: int) -> None:
    """The switch for a call: 1 and 0 set it, -1 afterwards puts back what it was."""
    if allow_tf32 < 0:
        torch_private.set_conv_precision(_before.pop())
        return
    _before.append(torch_private.conv_precision())
    torch_private.set_conv_precision("tf32" if allow_tf32 else "ieee")


_Query = ctypes.CFUNCTYPE(ctypes.c_int)
_Turn = ctypes.CFUNCTYPE(None, ctypes.c_int)
_SWITCH = _Query(conv_tf32_allowed), _Turn(_turn)  # alive as long as the kernels may call them


def install() -> None:
    """Lets the kernels ask, and set the switch for what they leave to ATen."""
    setter = ctypes.CDLL(_C.__file__).kgopt_set_tf32_switch
    setter.argtypes = [_Query, _Turn]
    setter.restype = None
    setter(*_SWITCH)
