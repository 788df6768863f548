"""What PyTorch must know of the ops beside their kernels: fake kernels, autograd, autocast, vmap, flops, DTensor.

Schemas and kernels are in the extension. ``registry.py`` says what a record holds. A file for each of csrc's folders
holds the records of its ops, ``install.py`` hands them to torch, and ``calls.py`` is the way of a call. Gradients are
compositions of ops.
"""

from kgopt.ops import activation as activation
from kgopt.ops import channel_norm as channel_norm
from kgopt.ops import conv as conv
from kgopt.ops import conv_gradients as conv_gradients
from kgopt.ops import group_norm as group_norm
from kgopt.ops import group_norm_by_sample as group_norm_by_sample
from kgopt.ops import group_norm_maps as group_norm_maps
from kgopt.ops import group_norm_prelu as group_norm_prelu
from kgopt.ops import layout as layout
from kgopt.ops import lse_backward as lse_backward
from kgopt.ops import norm_conv as norm_conv
from kgopt.ops import pipelines as pipelines
from kgopt.ops import pointwise as pointwise
from kgopt.ops import precision as precision
from kgopt.ops import reduce as reduce
from kgopt.ops import scaled_half as scaled_half
from kgopt.ops.calls import direct as direct
from kgopt.ops.calls import from_python as from_python
from kgopt.ops.calls import node_of as node_of
from kgopt.ops.calls import recorded as recorded
from kgopt.ops.calls import without_grad as without_grad
from kgopt.ops.conv import autocast_convolution as autocast_convolution
from kgopt.ops.geometry import conv_sizes as conv_sizes
from kgopt.ops.install import install
from kgopt.ops.norm_conv import SCALED_HALF as SCALED_HALF
from kgopt.ops.norm_conv import conv_backend as conv_backend
from kgopt.ops.precision import conv_tf32_allowed as conv_tf32_allowed

install()
precision.install()
