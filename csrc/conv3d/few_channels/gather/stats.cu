// Statistics of the output of a convolution of few channels, nothing stored: see conv3d/implicit_gemm/fprop_stats.cu
// for who wants them.
#include "conv3d/few_channels/gather/launch.cuh"

namespace kgopt {

Status run_conv_gather_stats(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  return launch_gather<ConvEpilogue::kStats>(p, n, stream);
}

}  // namespace kgopt
