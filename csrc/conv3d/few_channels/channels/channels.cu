// Convolutions of few channels with output channels as the rows of the products.
#include "conv3d/few_channels/channels/launch.cuh"

namespace kgopt {

Status run_conv_channels(const FewChannelsParams& p, int64_t n, bool lse, cudaStream_t stream) {
  return lse ? launch_channels<true>(p, n, stream) : launch_channels<false>(p, n, stream);
}

}  // namespace kgopt
