// Launcher of the weight gradient for few input channels. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/gradients/few_wgrad/params.h"

namespace kgopt {

// dw and, where wanted, dbias; partials of plan.partial_floats.
Status run_conv_few_wgrad(const FewWgradParams& p, cudaStream_t stream);

// Its first kernel where the plan makes dy.
Status launch_conv_few_wgrad_making(const FewWgradParams& p, cudaStream_t stream);

}  // namespace kgopt
