"""channels_last(_3d) inside, the caller's formats outside.

The root gets a forward that converts what comes in and, where the caller gave contiguous tensors, what goes out; the
parameters of convolutions are stored channels_last, as the same Parameter objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _is_channels_last(x: Tensor) -> bool:
    return not x.is_contiguous() and x.is_contiguous(memory_format=FORMATS[x.dim()])


def as_channels_last(x: Tensor) -> Tensor:
    """x in channels_last or channels_last_3d; as it is where it has another rank."""
    return x.contiguous(memory_format=FORMATS[x.dim()]) if x.dim() in FORMATS else x


def wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` on channels_last tensors, with the caller's formats outside."""

    @functools.wraps(forward)
    def channels_last_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._kgopt_layout:
            return forward(self, *args, **kwargs)
        given = False  # did the caller use channels_last?

        def convert(x: Any) -> Any:
            nonlocal given
            if not isinstance(x, Tensor) or x.dim() not in FORMATS or not x.is_floating_point():
                return x
            given = given or _is_channels_last(x)
            return as_channels_last(x)

        def back(x: Any) -> Any:
            if isinstance(x, Tensor) and x.dim() in FORMATS and _is_channels_last(x):
                return x.contiguous()
            return x

        args, kwargs = tree_map(convert, (args, kwargs))
        result = forward(self, *args, **kwargs)
        return result if given else tree_map(back, result)

    return channels_last_forward


def convert_parameters(model: nn.Module) -> list[str]:
    """Stores the weights of convolutions channels_last; the names of those that were contiguous before."""
    changed = []
    for path, module in model.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, _CONVS) else None
        if weight is None or type(weight.data) is not Tensor or not weight.is_contiguous():
            continue
        converted = weight.data.contiguous(memory_format=FORMATS[weight.dim()])
        if converted.is_contiguous():
            # 1x1 kernels: both at once, but the strides say channels_last.
            converted = torch.empty_like(weight.data, memory_format=FORMATS[weight.dim()]).copy_(weight.data)
        weight.data = converted
        changed.append(f"{path}.weight" if path else "weight")
    return changed


def restore_parameters(model: nn.Module, names: list[str]) -> None:
    """Undoes :func:`convert_parameters`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if name in parameters:
            weight = parameters[name]
            # A tensor may be contiguous in both senses; its strides are those of a new one.
            weight.data = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device).copy_(weight.data)
