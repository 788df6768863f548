"""What would end channels_last in a model that :func:`kgopt.optimize` moved there.

Authors write ``x.contiguous()`` in front of code that once needed it; the next convolution converts the tensor back.
The front end for source code (:mod:`~kgopt.rewrite.source`) has :meth:`Keep.keep` called instead where what becomes of
the value is in sight: it goes to modules, functions of torch and sums, which take any strides, and nothing looks at its
memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kgopt._layout import FORMATS
from kgopt.rewrite.optimized import known
from kgopt.rewrite.pytorch import originals
from kgopt.rewrite.waiting.base import Written


def keeps(module: nn.Module) -> bool:
    """Whether a module stands in a model that runs in channels_last inside."""
    return bool(known.get(module, "keeps"))


class Keep(Written):
    """One ``x.contiguous()`` in a method."""

    def keep(self, owner: Any, x: Any) -> Any:
        """``x.contiguous()``; where the model runs in channels_last and x has its channels innermost, dense so."""
        if keeps(owner) and isinstance(x, Tensor) and _has_channels_innermost(x) and _is_untouched():
            return x.contiguous(memory_format=FORMATS[x.dim()])
        return x.contiguous()


_is_untouched = originals.untouched(*originals.methods(("contiguous",)))


def _has_channels_innermost(x: Tensor) -> bool:
    return x.dim() in FORMATS and x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous()
