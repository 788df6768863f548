"""What stands between norms in inference: equal values from faster kernels, or from a few strided copies.

PyTorch's own kernels for upsampling, pooling and padding run far below the speed of the memory (3D upsampling in
channels_last at a tenth, 3D replicate padding at a fortieth of it on an H200), a convolution's bias is added in a pass
of its own, in half types at a third of it, and cuDNN has no good kernel for a few channels.

Calls of such functions are found by running the model; the module that makes one, however its code gets there, receives
a forward that looks at these functions while it runs. A call is replaced where nothing needs a gradient, at the
arguments that were measured to be faster so; every other call goes to PyTorch.

========  ==========================================================================
calls     which calls, and the ways to compute them
kernels   copies and kernels
pools     pooling to a few results, as reductions
later     upsampling that waits for the convolution behind it
plans     what a convolution module does with inputs of one kind
search    finds and measures calls; the forward of the modules that make them
heads     a norm and the convolution behind it
========  ==========================================================================
"""

from kgopt.rewrite.glue.calls import FEW, Call, recognize
from kgopt.rewrite.glue.kernels import upsample_nearest
from kgopt.rewrite.glue.plans import PLANS, GlueState
from kgopt.rewrite.glue.search import adopt, find, forget, modules_of, state_of, swap

__all__ = [
    "FEW",
    "PLANS",
    "Call",
    "GlueState",
    "adopt",
    "find",
    "forget",
    "modules_of",
    "recognize",
    "state_of",
    "swap",
    "upsample_nearest",
]
