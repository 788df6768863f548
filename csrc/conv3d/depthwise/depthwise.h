// Launchers of depthwise convolutions and their gradients. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/depthwise/params.h"

namespace kgopt {

// y, or the gradient of x: what the plan of the pass says. By format, in files of their own, so that they compile
// beside each other.
Status run_conv_depthwise_planar(const DepthwiseParams& p, cudaStream_t stream);
Status run_conv_depthwise_innermost(const DepthwiseParams& p, cudaStream_t stream);
inline Status run_conv_depthwise(const DepthwiseParams& p, cudaStream_t stream) {
  return p.plan.lanes > 1 ? run_conv_depthwise_innermost(p, stream) : run_conv_depthwise_planar(p, stream);
}

// The gradient of the weight: partial sums of each phase, and then, of the first phase's parameters, all sums.
Status run_conv_depthwise_wgrad(const DepthwiseWgradParams& p, cudaStream_t stream);
Status run_conv_depthwise_sum(const DepthwiseWgradParams& p, cudaStream_t stream);

}  // namespace kgopt
