// Depthwise convolutions of channels_last tensors.
#include "conv3d/depthwise/launch.cuh"

namespace kgopt {

Status run_conv_depthwise_innermost(const DepthwiseParams& p, cudaStream_t stream) {
  return depthwise_detail::launch_pass<kDepthwiseLanes>(p, stream);
}

}  // namespace kgopt
