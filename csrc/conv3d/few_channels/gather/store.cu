// A narrow convolution on Hopper whose output is stored.
#include "conv3d/few_channels/gather/launch.cuh"

namespace kgopt {

Status run_conv_narrow_store(const NarrowParams& p, int64_t n, cudaStream_t stream) {
  return launch_narrow<ConvEpilogue::kStore>(p, n, stream);
}

}  // namespace kgopt
