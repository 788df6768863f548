// Convolutions of few channels with positions as the rows of the products and the input in chunks of halves.
#include "conv3d/few_channels/positions/launch.cuh"

namespace kgopt {

Status run_conv_positions(const FewChannelsParams& p, int64_t n, bool lse, cudaStream_t stream) {
  return lse ? launch_positions<true>(p, n, stream) : launch_positions<false>(p, n, stream);
}

}  // namespace kgopt
