// Depthwise convolutions of contiguous tensors.
#include "conv3d/depthwise/launch.cuh"

namespace kgopt {

Status run_conv_depthwise_planar(const DepthwiseParams& p, cudaStream_t stream) {
  return depthwise_detail::launch_pass<1>(p, stream);
}

}  // namespace kgopt
