// Statistics of a narrow convolution's output on Hopper, nothing stored: see conv3d/implicit_gemm/fprop_stats.cu for
// who wants them.
#include "conv3d/few_channels/gather/launch.cuh"

namespace kgopt {

Status run_conv_narrow_stats(const NarrowParams& p, int64_t n, cudaStream_t stream) {
  return launch_narrow<ConvEpilogue::kStats>(p, n, stream);
}

}  // namespace kgopt
