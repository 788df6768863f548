// A convolution of few channels whose output is stored.
#include "conv3d/few_channels/gather/launch.cuh"

namespace kgopt {

Status run_conv_gather_store(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  return launch_gather<ConvEpilogue::kStore>(p, n, stream);
}

}  // namespace kgopt
