"""Every private name of torch that this package uses, each with a public fallback.

A private name may be gone, or mean something else, in the next torch. So each is looked up here, once, and called once
without harm; where that fails its fallback takes its place, built on torch's public interface. It is slower, or leaves
something to PyTorch; it is never wrong. Nothing outside of this folder names one (tests/test_torch_private.py).

``KGOPT_WITHOUT_PRIVATE=1`` in the environment makes all of them count as missing, a list of names (with commas) those.
What torch.nn.Module keeps under an underscore (its parameters, children and hooks) has been an interface for many
years; it is used where it is needed, and without it :func:`kgopt.optimize` leaves a model as it is. ``1`` does not
stand for it, the name ``torch.nn.Module`` does.
"""

from kgopt.torch_private.compilers import (
    ADAPTIVE_MEANS,
    BACKENDS,
    DYNAMO,
    INDUCTOR_LOG,
    INDUCTOR_PATTERNS,
    Passes,
    compile_eagerly,
    compile_graph,
    compiler_settings,
    inductor_cache_dir,
    inductor_lowering,
    inductor_patterns,
    is_of_module,
    mode_options,
    outside_of_tracing,
    register_backend,
)
from kgopt.torch_private.cuda import (
    CAN_BORROW,
    CAN_COUNT_HOLDERS,
    borrowed,
    clear_blas_workspaces,
    conv_precision,
    copy_each,
    current_stream,
    dispatch_mode,
    end_allocation_to_pool,
    holders,
    keep_busy,
    matmul_precision,
    matmul_reductions,
    set_conv_precision,
)
from kgopt.torch_private.dispatch import (
    BELOW_AUTOGRAD,
    HAS_GUARDS,
    RECORDS_LEVELS,
    Function,
    at_autograd,
    below_autograd,
    exclude,
    packed,
    schema_of,
    set_backward,
    single_level,
    without_autocast,
    without_autocast_on_cuda,
)
from kgopt.torch_private.lookup import missing, names
from kgopt.torch_private.modules import (
    KNOWS_IF_GRAPH_STAYS,
    MODULE_ATTRIBUTES,
    MODULE_METHODS,
    MODULES_ARE_KNOWN,
    border_of,
    current_graph_task,
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
    graph_stays,
    has_backward_hooks,
    may_hook_saved_tensors,
    output_padding_of,
    stands_for_a_plain_tensor,
    tree_leaves,
    tree_map,
    unhooked,
    version_of,
)
from kgopt.torch_private.surroundings import (
    FORWARD_AD,
    LEVEL,
    MODES_CAN_WAIT,
    SWITCHES_TANGENTS,
    DeviceContext,
    any_requires_grad,
    are_functorch_transforms_active,
    function_mode_at,
    is_any_autocast_enabled,
    is_tracing,
    len_torch_dispatch_stack,
    len_torch_function_stack,
    nn_functions,
    pass_tangents,
    pop_torch_function_stack,
    push_on_torch_function_stack,
)
